"""Write the tables of docs/parallelism.md: what was measured out of results/results.json, which `make patterns` writes, and what
is worked on paper out of launch/layouts.py.

python benchmarks/patterns/tables.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labs.bench.report import markdown_table
from labs.patterns import paper
from labs.patterns.tables import bubbles, exchanges, holds, machine_line, timeline_pictures

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "parallelism.md"
BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "machine": machine_line,
    "holds": lambda results: markdown_table(*holds(results)),
    "exchanges": lambda results: markdown_table(*exchanges(results)),
    "bubbles": lambda results: markdown_table(*bubbles(results)),
    "pictures": lambda results: f"```\n{timeline_pictures(results)}\n```",
    "chosen": lambda _: markdown_table(*paper.chosen()),
    "families": lambda _: markdown_table(*paper.families()),
    "per_pattern": lambda _: markdown_table(*paper.per_pattern()),
    "slow_links": lambda _: markdown_table(*paper.slow_links()),
    "published": lambda _: markdown_table(*paper.published()),
    "beside": lambda _: markdown_table(*paper.beside_measured(HERE.parent)),
}


def rebuilt(page: str, results: dict[str, Any]) -> str:
    """Return the page, with each table made of the raw numbers."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]](results)}\n\n{match[3]}", page)


def main() -> None:
    """Rebuild the tables of the page."""
    PAGE.write_text(rebuilt(PAGE.read_text(), json.loads((HERE / "results" / "results.json").read_text())))
    print(f"tables: {PAGE}")


if __name__ == "__main__":
    main()
