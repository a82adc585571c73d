"""Write the tables of this folder's README out of results/decode.json, which measure.py wrote.

python benchmarks/h200_decode/tables.py
"""

import json
import math
from pathlib import Path
from typing import Any

from labs.bench.report import markdown_table, write_page

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "decode.json"
TITLES = {"answers": "Answers, Qwen3 0.6B", "captions": "Captions, ViT-base and GPT-2 small"}
COLUMNS = (
    *("rows", "way", "new tokens/s", "times eager", "first token, ms", "step, ms", "recording, ms", "warm-up, s"),
    *("recording pays from (steps)", "warm-up pays from (tokens)", "same texts in bf16"),
)


def cells(run: dict[str, Any]) -> list[str]:
    """Return the cells of a run in the table of speeds."""
    first = [str(run["rows"]), run["way"]]
    if run["error"]:
        return [*first, failed(run), *[""] * (len(COLUMNS) - 3)]
    recorded = "pays_from_steps" in run
    pays = [won(run[name]) if recorded else "" for name in ("pays_from_steps", "pays_from_tokens")]
    return [
        *first,
        f"{run['tok_per_sec']:,.0f}",
        f"{run['times_eager']:.2f}" if "times_eager" in run else "",
        *(f"{1e3 * run[name]:.1f}" for name in ("first_token_seconds", "step_seconds")),
        f"{1e3 * run['recording_seconds']:.1f}" if recorded else "",
        f"{run['warm_up_seconds']:.1f}",
        *pays,
        f"{run['same_texts']:.0%}",
    ]


def won(number: float | None) -> str:
    """Return the first whole number of steps or tokens that wins; never, where nothing is won."""
    return "never" if number is None else f"{math.ceil(number):,}"


def failed(run: dict[str, Any]) -> str:
    """Return why a run failed, in a cell."""
    return f"failed: {' '.join(run['error'].split())[:200]}"


def exact(run: dict[str, Any]) -> list[str]:
    """Return the cells of a run in the table of texts."""
    same = "" if run["error"] else f"{run['same_texts']:.0%} of {run['rows']}, {run['different_texts']} different"
    return [TITLES[run["task"]], run["way"], same or failed(run)]


def table(results: dict[str, Any] | None) -> str:
    """All tables as Markdown."""
    if results is None:
        return "\nNot measured yet.\n\n"
    env, runs = results["environment"], results["runs"]
    parts = [f"{env['device']}, torch {env['packages']['torch']}, {results['new_tokens']} new tokens for each row."]
    for name, title in TITLES.items():
        rows = [cells(run) for run in runs if run["task"] == name and not run["exact"]]
        parts.append(f"**{title}**\n\n" + markdown_table(COLUMNS, rows))
    sizes = f"fp32, {results['exact_layers']} layers, {results['exact_tokens']} tokens"
    same = markdown_table(("model", "way", "same texts"), [exact(run) for run in runs if run["exact"]])
    parts.append(f"**The same texts as eager steps: {sizes}**\n\n{same}")
    return "\n" + "\n\n".join(parts) + "\n\n"


def main() -> None:
    """Rebuild the tables of README.md."""
    write_page(HERE / "README.md", table(json.loads(RESULTS.read_text()) if RESULTS.exists() else None))


if __name__ == "__main__":
    main()
