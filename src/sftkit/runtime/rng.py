"""Random states of a process, so that a resumed run draws the numbers that the uninterrupted one would have drawn."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, in types
    that torch.load(weights_only=True) takes."""
    # numpy's keys as a tensor, since weights_only refuses its arrays. Of GPUs the one that this rank computes on: the
    # others are other ranks'.
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from what `random_state` returned, bit for bit."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def random_key(*numbers: int) -> int:
    """Return 64 bits that depend on all numbers; the same on every rank and after a resume."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())
