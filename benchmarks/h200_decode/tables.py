"""Write the tables of this folder's README out of results/decode.json, which measure.py wrote.

python benchmarks/h200_decode/tables.py
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "decode.json"
MARKS = re.compile(r"(<!-- tables -->\n).*(<!-- end of tables -->)", re.DOTALL)
TITLES = {"answers": "Answers, Qwen3 0.6B", "captions": "Captions, ViT-base and GPT-2 small"}
COLUMNS = (
    *("rows", "way", "new tokens/s", "times eager", "first token, ms", "step, ms", "recording, ms", "warm-up, s"),
    *("recording pays from (steps)", "warm-up pays from (tokens)", "same texts in bf16"),
)


def lines(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(columns), ["---"] * len(columns), *rows])


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
    """Return a number of steps or tokens; never, where nothing is won."""
    return "never" if number is None else f"{number:,.0f}"


def failed(run: dict[str, Any]) -> str:
    """Return why a run failed, in a cell."""
    return f"failed: {' '.join(run['error'].split())[:200]}".replace("|", "\\|")


def exact(run: dict[str, Any]) -> list[str]:
    """Return the cells of a run in the table of texts."""
    same = run["error"] or f"{run['same_texts']:.0%} of {run['rows']}, {run['different_texts']} different"
    return [TITLES[run["task"]], run["way"], failed(run) if run["error"] else same]


def table(results: dict[str, Any] | None) -> str:
    """All tables as Markdown."""
    if results is None:
        return "\nNot measured yet.\n\n"
    env, runs = results["environment"], results["runs"]
    parts = [f"{env['device']}, torch {env['packages']['torch']}, {results['new_tokens']} new tokens for each row."]
    for name, title in TITLES.items():
        rows = [cells(run) for run in runs if run["task"] == name and not run["exact"]]
        parts.append(f"**{title}**\n\n" + lines(COLUMNS, rows))
    rows = [exact(run) for run in runs if run["exact"]]
    parts.append(
        f"**The same texts as eager steps: fp32, {results['exact_layers']} layers, {results['exact_tokens']} tokens**\n\n"
        + lines(("model", "way", "same texts"), rows)
    )
    return "\n" + "\n\n".join(parts) + "\n\n"


def main() -> None:
    """Rebuild the tables of README.md."""
    readme = HERE / "README.md"
    made = table(json.loads(RESULTS.read_text()) if RESULTS.exists() else None)
    readme.write_text(MARKS.sub(lambda match: f"{match[1]}{made}{match[2]}", readme.read_text()))


if __name__ == "__main__":
    main()
