"""Uninitialized memory filled with NaN: a result that reads it is visibly wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import deterministic
from torch.utils._pytree import tree_flatten


@contextmanager
def planted(fill: bool = True) -> Iterator[None]:
    """Inside the context, fresh memory holds NaN, or the largest integer; with `fill` False it keeps its old content,
    all else being equal.

    torch does this itself in deterministic mode on every device: torch.empty, empty_like, new_empty, empty_strided,
    resize_ and Module.to_empty, pinned or not, also if an operator of torch allocates its result this way. numpy is
    patched. Allocations of Inductor's code are not covered.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = fill
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("empty", "empty_like") if fill else ():
                patch.setattr(np, name, _filled(getattr(np, name)))
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


def _filled(allocate: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """np.empty or np.empty_like, whose result holds NaN or the largest integer."""

    def allocate_and_fill(*args: Any, **kwargs: Any) -> np.ndarray:
        array = allocate(*args, **kwargs)
        if array.dtype.kind in "fc":
            array.fill(np.nan)
        elif array.dtype.kind in "iu":
            array.fill(np.iinfo(array.dtype).max)
        return array

    return allocate_and_fill


def same_when_planted(compute: Callable[[], Any], tolerance: float = 0.0) -> Any:
    """Assert that the result of `compute` is finite and the same, bit for bit, in planted memory, and return it.

    Args:
        compute: function that makes its own inputs from a seed; returns tensors and plain values, in tuples, lists
            and dicts.
        tolerance: relative to the norm of a tensor, for kernels whose summation order varies.
    """
    with planted(fill=False):
        plain = compute()
    with planted():
        dirty = compute()
    leaves, structure = tree_flatten(plain)
    others, other_structure = tree_flatten(dirty)
    assert structure == other_structure
    for i, (value, other) in enumerate(zip(leaves, others, strict=True)):
        if not isinstance(value, torch.Tensor):
            assert value == other, f"result {i}"
            continue
        bad = int((~other.isfinite()).sum())
        assert bad == 0, f"result {i}, {list(other.shape)}: {bad} values are not finite"
        off = float((value.double() - other.double()).norm()) if value.shape == other.shape else float("inf")
        assert off <= tolerance * float(value.double().norm()), f"result {i}, {list(other.shape)}: off by {off:.1e}"
    return plain
