"""A run of plan.yaml whose adapter has trained rows of tokens: a `worker`, not run by hand.

The two last tokens of the vocabulary stand for those that a chat template adds, and the first two for text: rows of
embedding and head for all four are trained. Their first values are the mean of the table, as those of added tokens.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from labs.bench import worker
from labs.bench.plan import Job, read_job
from labs.bench.run import run_job
from sftkit.models.adapters import Adapters


def train_with_token_rows(job: Job) -> dict[str, Any]:
    """Return the row of a job whose adapter trains four rows of the vocabulary."""
    size = int(job.fields["vocab_size"])
    rows = (0, 1, size - 2, size - 1)
    tables = ["model.embed_tokens", *([] if job.fields.get("tie_word_embeddings") else ["lm_head"])]

    def adapters(*given: Any, **named: Any) -> Adapters:
        return replace(Adapters(*given, **named), tokens=dict.fromkeys(tables, rows), known=size - 2)

    worker.Adapters = adapters  # type: ignore[misc, assignment]
    return worker.train_job(job)


if __name__ == "__main__":
    run_job(read_job(Path(sys.argv[1])), train_with_token_rows)
