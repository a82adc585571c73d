"""Load the checkpoint of a finished run with plain transformers, in a process of its own, and compare its logits.

python -m sftkit.experiments.validate.logits RUN OUT.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from sftkit.rundir.names import PROOF, latest_checkpoint
from sftkit.verify.rows import verify_checkpoint


def main(run: Path, out: Path) -> None:
    """Write the row that says whether the checkpoint's logits are those that the run recorded.

    Raises:
        FileNotFoundError: the run has no checkpoint.
    """
    folder, recorded = latest_checkpoint(run), json.loads((run / PROOF).read_text())["logits"]
    if folder is None:
        raise FileNotFoundError(f"{run} has no LATEST: no checkpoint was written")
    out.write_text(json.dumps(asdict(verify_checkpoint(folder, recorded)), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
