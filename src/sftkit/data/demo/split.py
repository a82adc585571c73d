"""Which side of the split an item is on: a hash of what it is decides, so that no held-out item is in training."""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "heldout"]


def is_heldout_split(split: str) -> bool:
    """Return whether a split is the held-out one; raises ValueError for an unknown split."""
    if split not in ("train", "heldout"):
        raise ValueError(f'split: "{split}" is not one of train, heldout.')
    return split == "heldout"


def stable_hash(text: str) -> int:
    """Return 64 bits that are the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
