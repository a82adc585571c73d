"""Condense what pytest --junitxml writes into what is kept of a run of tests: counts, what failed, why others were skipped.

python benchmarks/versions/summary.py RESULT.xml OUT.json [KEY=VALUE ...]

KEY=VALUE: what the file cannot know, such as command, hardware, commit and versions.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

LONGEST = 10


def summary(file: Path) -> dict[str, Any]:
    """Return what a file of --junitxml says in short; seconds are those of the whole run."""
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None, f"{file}: no results of pytest"
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    cases = list(suite.iter("testcase"))
    bad = [(case, part) for case in cases for part in case if part.tag in ("failure", "error")]
    skipped = Counter(str(part.get("message")) for case in cases for part in case if part.tag == "skipped")
    named = {id(case): f"{case.attrib['classname']}::{case.attrib['name']}" for case in cases}
    longest = sorted(cases, key=lambda case: -float(case.attrib["time"]))[:LONGEST]
    return {
        "started": suite.attrib["timestamp"],
        "seconds": round(float(suite.attrib["time"])),
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "skipped": count["skipped"],
        "failed": {named[id(case)]: str(part.get("message")).partition("\n")[0] for case, part in bad},
        "skipped_because": dict(skipped.most_common()),
        "longest": {named[id(case)]: round(float(case.attrib["time"]), 1) for case in longest},
    }


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    given, out, *words = sys.argv[1:]
    told = dict(word.split("=", 1) for word in words)
    Path(out).write_text(json.dumps({**told, **summary(Path(given))}, indent=1) + "\n")
