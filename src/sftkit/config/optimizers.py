"""Every value of optim.name as facts without torch: what it keeps, what it needs, where its code is.

An optimizer is a file in optim/ whose `build` returns an optim.protocol.Optimizer, and its entry in OPTIMIZERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

BYTES = {"bf16": 2, "fp32": 4}
"Bytes of a weight, a gradient and an activation in each precision."
DEFAULT = "adamw"
"The optimizer of optim.name=auto if it fits in memory."
FALLBACK = "adamw_sr"
"The optimizer of auto if that one does not fit; it needs no package and can be sharded."


class Extra(NamedTuple):
    """A package that an optimizer needs beside those of every installation."""

    package: str
    name: str
    "of the extra of sftkit that brings it"


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Facts about an optimizer that are known without importing its code."""

    name: str
    code: str
    "module:function, an optim.protocol.Build"
    summary: str
    "for --help"
    state_bytes: Mapping[str, float]
    "Per parameter of bf16 and of fp32 weights. No fp32: it rounds weights to bf16, so a model in fp32 is refused."
    elsewhere: str | None = None
    "The optimizer of all parameters that are not matrices of a decoder block; None: it updates all parameters itself."
    saves_memory: bool = False
    "Whether its update is AdamW's with smaller states, so that auto and the advice on memory may take it instead."
    extra: Extra | None = None
    unshardable: str | None = None
    "Why its states cannot be sharded; None: they can."

    @property
    def rounds_weights(self) -> bool:
        """Return whether it rounds weights to bf16; it then refuses a model in fp32."""
        return "fp32" not in self.state_bytes

    def state_width(self, precision: str, *, block_matrix: bool = True) -> float:
        """Return the bytes of optimizer state per parameter.

        Args:
            precision: of the weights. The few tensors that a model in bf16 keeps in fp32 count as bf16 where the
                optimizer rounds weights.
            block_matrix: whether the parameter is a matrix of a decoder block.
        """
        if self.elsewhere is not None and not block_matrix:
            return OPTIMIZERS[self.elsewhere].state_width(precision)
        return self.state_bytes.get(precision, self.state_bytes["bf16"])

    def training_width(self, precision: str, *, block_matrix: bool = True) -> float:
        """Return the bytes per parameter of weight, gradient and optimizer states."""
        return 2 * BYTES[precision] + self.state_width(precision, block_matrix=block_matrix)


OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            name="adamw",
            code="sftkit.optim.adamw:build",
            summary="fp32 master weights and states, of which bf16 weights are stochastically rounded copies",
            state_bytes={"bf16": 4 + 8, "fp32": 8},  # a master; two moments
        ),
        OptimizerSpec(
            name="adamw_sr",
            code="sftkit.optim.adamw_sr:build",
            summary="all bf16, stochastically rounded",
            state_bytes={"bf16": 4},
            saves_memory=True,
        ),
        OptimizerSpec(
            name="adamw8bit",
            code="sftkit.optim.adamw8bit:build",
            summary="torchao's 8-bit states, stochastically rounded",
            state_bytes={"bf16": 2 * (1 + 4 / 256)},  # for each moment a byte, and an fp32 scale per block of 256
            saves_memory=True,
            extra=Extra("torchao", "fp8"),
            unshardable="keeps states in blocks that cannot be cut anew for other numbers of ranks",
        ),
        OptimizerSpec(
            name="muon",
            code="sftkit.optim.muon:build",
            summary="Muon on the matrices of the blocks, AdamW on the rest, for training from scratch",
            state_bytes={"bf16": 4 + 4, "fp32": 4},  # a master; one momentum
            elsewhere="adamw",
        ),
    )
}
"Every optimizer, in the order of --help and of the advice on memory."


def describe_optimizers() -> str:
    """Compose the help of optim.name from the table."""
    clauses = [f"{spec.name}: {spec.summary} ({_bytes_in_bf16(spec)})" for spec in OPTIMIZERS.values()]
    auto = f"auto: {DEFAULT} where it fits in memory, else {FALLBACK}"
    return f"{'; '.join([*clauses, auto])}. Bytes are per parameter in bf16, with its gradient."


def _bytes_in_bf16(spec: OptimizerSpec) -> str:
    """Format bytes per parameter: `16 bytes`, `about 6 bytes`, `12 to 16 bytes`."""
    widths = sorted({spec.training_width("bf16", block_matrix=block_matrix) for block_matrix in (True, False)})
    about = "" if all(width == round(width) for width in widths) else "about "
    return f"{about}{' to '.join(f'{width:.0f}' for width in widths)} bytes"
