"""Write the lengths of a recipe's training documents, without a word of them, for a bench plan's data.lengths.

.venv/bin/python benchmarks/lab_layouts/lengths.py benchmarks/lab_layouts/data.yaml benchmarks/lab_layouts/lengths.json [COUNT]

A random sample of COUNT documents (8,000), in random order, as chat SFT would learn them.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from sftkit.config.load import read_config
from sftkit.data.batches.loader import load_examples
from sftkit.data.tokens.sources import stage_rule
from sftkit.preflight.analysis import tokenizer_of


def main(recipe: Path, out: Path, count: int = 8000) -> None:
    """Write the lengths of `count` documents of a recipe, drawn at random."""
    cfg = read_config(recipe, [], world_size=1)
    tokenizer = tokenizer_of(cfg.model, cfg.data)
    assert cfg.data.max_length is not None
    tokenize = stage_rule("sft")(cfg.data, tokenizer, cfg.data.max_length)
    examples, _ = load_examples(cfg.data, tokenize, nullcontext())
    chosen = np.random.default_rng(0).permutation(len(examples))[:count]
    found = {
        "sources": [source.path for source in cfg.data.train],
        "tokenizer": cfg.model.tokenizer,
        "documents": len(examples),
        "positions": examples.lengths[chosen].tolist(),
        "targets": examples.num_targets[chosen].tolist(),
    }
    out.write_text(json.dumps(found) + "\n")
    print(f"{out}: {len(chosen)} of {found['documents']} documents, mean {np.mean(found['positions']):.0f} positions")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
