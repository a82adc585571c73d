"""Write into the tables of benchmarks/reliability/README.md how many seconds the tests of each case took.

make test ARGS="--junitxml default.xml"
make test ARGS="-m slow --junitxml slow.xml"
python benchmarks/reliability/times.py default.xml slow.xml     on two GPUs also that of tests/train/test_gpu_ranks.py

A case of several tests, or of one with several parameters, has their sum. One of which a test is in none of the files
keeps what stands there.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parent / "README.md"
TEST = re.compile(r"`(test_\w+)`")


def seconds_of(files: list[Path]) -> Counter[str]:
    """Seconds by name of the test, without its parameters, of those that passed. Setting up counts."""
    found: Counter[str] = Counter()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            if not any(part.tag in ("failure", "error", "skipped") for part in case):
                found[str(case.get("name")).split("[")[0]] += float(case.get("time", 0))
    return found


def with_times(page: str, seconds: Mapping[str, float]) -> str:
    """Return the page, with the last cell of each row of a table whose last column is named `s`."""
    lines, timed = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not line.startswith("|"):
            timed = False
        elif cells[-1] == "s":
            timed = True
        elif timed and (tests := TEST.findall(line)) and all(test in seconds for test in tests):
            line = f"| {' | '.join([*cells[:-1], f'{sum(seconds[test] for test in tests):.0f}'])} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_times(PAGE.read_text(), seconds_of([Path(file) for file in sys.argv[1:]])))
