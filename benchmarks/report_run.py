"""Turn a run directory into a benchmark record: raw files, loss curve, table, samples before and after.

python benchmarks/report_run.py runs/h200_smollm2_135m benchmarks/h200_smollm2_135m
"""

import json
import shutil
import sys
from pathlib import Path
from statistics import median_high as median

from matplotlib import pyplot as plt

RAW = ("config.yaml", "environment.json", "metrics.jsonl", "evals.jsonl", "samples.jsonl", "summary.json")


def rows(path: Path) -> list[dict]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(metrics: list[dict], evals: list[dict], out: Path) -> None:
    """Draw the training and the validation loss."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    left.plot([r["step"] for r in metrics], [r["train/loss"] for r in metrics], color="tab:blue")
    left.set(title="training loss", xlabel="step", ylabel="nats per target token")
    for name in sorted(key for key in evals[0] if key.endswith("/loss")):
        label = name.removeprefix("val/").removesuffix("/loss")
        if label != "loss":
            right.plot([r["step"] for r in evals], [r[name] for r in evals], marker="o", label=label)
    right.set(title="validation loss", xlabel="step", ylabel="nats per target token", ylim=(0, None))
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def table(metrics: list[dict], evals: list[dict], summary: dict, environment: dict) -> str:
    """Return machine, speeds and losses of a run as Markdown."""
    steady = metrics[2:-1]  # the first two lines hold first-launch costs, the last a partial window
    packages = environment["packages"]
    lines = [
        ("hardware", f"{environment['world_size']} x {environment['device']}"),
        ("versions", ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "accelerate"))),
        ("steps, tokens", f"{summary['step']:,} steps, {summary['tokens']:,} useful tokens"),
        ("seconds in steps", f"{summary['train_seconds']:.0f}"),
        ("useful tokens/s, median of logged windows", f"{median([r['perf/tok_per_sec'] for r in steady]):,.0f}"),
        ("target tokens/s, median", f"{median([r['perf/target_tok_per_sec'] for r in steady]):,.0f}"),
        ("MFU over the datasheet peak, median", f"{100 * median([r['perf/mfu'] for r in steady]):.1f} %"),
        ("peak memory", f"{max(r['mem/peak_gib'] for r in metrics):.1f} GiB"),
        ("padding, data wait (medians)", f"{median([r['data/padding_pct'] for r in steady]):.1f} %, "
         f"{median([r['perf/data_wait_pct'] for r in steady]):.1f} %"),
        ("graphs, graph breaks, recompiles", " / ".join(
            f"{metrics[-1][f'compile/{name}']:.0f}" for name in ("graphs", "graph_breaks", "recompiles"))),
        ("seconds in the compiler, warm-up", f"{metrics[-1]['compile/seconds']:.1f}, {summary['warm_up_seconds']:.1f}"),
        ("training loss, first and last logged", f"{metrics[0]['train/loss']:.3f}, {metrics[-1]['train/loss']:.3f}"),
    ]  # fmt: skip
    for name in sorted(key for key in evals[0] if key.endswith(("/loss", "/bpb"))):
        lines.append((f"{name}, before and after", f"{evals[0][name]:.3f}, {evals[-1][name]:.3f}"))
    return "\n".join(["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines)])


def answers(samples: list[dict]) -> str:
    """Return the answers of the first and of the last evaluation, one above the other."""
    first, last = min(s["step"] for s in samples), max(s["step"] for s in samples)
    before = {s["prompt"]: s for s in samples if s["step"] == first}
    after = {s["prompt"]: s for s in samples if s["step"] == last}
    return "\n---\n\n".join(
        f"**Prompt**\n\n{quoted(prompt[-700:])}\n\n**Before**\n\n{quoted(sample['answer'])}\n\n"
        f"**After**\n\n{quoted(after[prompt]['answer'])}\n\n**Reference**\n\n{quoted(sample['reference'][:700])}\n"
        for prompt, sample in before.items()
    )


def quoted(text: str) -> str:
    """Return a text as a quotation in Markdown."""
    return "\n".join(f"> {line}" for line in text.splitlines()) or "> (nothing)"


def main() -> None:
    """Copy the raw files of a run, and write the page about it."""
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    raw = out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name in RAW:
        shutil.copyfile(run_dir / name, raw / name)
    metrics, evals, samples = (rows(raw / f"{name}.jsonl") for name in ("metrics", "evals", "samples"))
    draw(metrics, evals, out / "loss.png")
    summary, environment = (json.loads((raw / f"{name}.json").read_text()) for name in ("summary", "environment"))
    result = f"![training and validation loss](loss.png)\n\n{table(metrics, evals, summary, environment)}\n"
    (out / "result.md").write_text(f"# Result\n\n{result}\n## Answers before and after\n\n{answers(samples)}")


if __name__ == "__main__":
    main()
