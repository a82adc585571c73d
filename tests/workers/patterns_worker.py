"""Run on ranks by labs/test_patterns.py: cases of `make patterns` on a smaller model."""

from __future__ import annotations

import sys
from functools import partial

from labs.patterns import measure
from sftkit.runtime.script import script

SMALL = {**measure.MODEL, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}


def main(*words: str) -> None:
    measure.MODEL = SMALL
    measure.main(*words)


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
