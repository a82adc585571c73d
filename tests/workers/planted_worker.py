"""Run a script with fresh memory full of NaN, or as it comes: planted_worker.py yes|no scripts/x.py arguments."""

import runpy
import sys

from planted import planted

if __name__ == "__main__":
    _, fill, *sys.argv = sys.argv
    with planted(fill == "yes"):
        runpy.run_path(sys.argv[0], run_name="__main__")
