"""Render the page of the chat model's step from its raw file.

python benchmarks/h200_explain/pages.py
"""

import json
from pathlib import Path

from labs.explain.page import render_page
from sftkit.config.terminal import visible

HERE = Path(__file__).parent
NAME = "qwen3_0_6b"


def main() -> None:
    """Write NAME.html beside NAME.json."""
    result = json.loads((HERE / f"{NAME}.json").read_text())
    (HERE / f"{NAME}.html").write_text(visible(render_page(result)))


if __name__ == "__main__":
    main()
