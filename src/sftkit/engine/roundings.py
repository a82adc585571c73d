"""Limits of the effect of rounding on logits and gradients: known ones, and a measurement if they are exceeded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.engine.gradient_samples import GradientDifference
from sftkit.engine.self_check import REFUSED_FROM

SCALE = 0.01
"Largest distance of the gradients' scale from 1 in bf16: up to a quarter of it was measured, 4 to 28 blocks on a CPU."
DRAWS = 3
"Passes with random roundings, of which the worst counts."
APART = 3.0
"The limit is this many times the difference of such a pass: both sides of the comparison round, in 28 blocks and more."
MAX_LIMIT, MAX_SCALE_LIMIT = 0.5, 0.05
"""No limit is wider, so that faults are still found: an attention scale wrong by a factor of 1.2 moves such gradients
by 0.7 and more, a wrong divisor moves the scale."""


class Roundings(NamedTuple):
    """The measured effect of rounding on gradients of the plain model: the worst of `DRAWS` passes."""

    relative: float
    "relative difference of the parameter that they move furthest"
    scale: float
    "distance of the scale of all gradients from 1"


class RoundingLimits(NamedTuple):
    """Largest relative differences between our step and the plain model that rounding explains."""

    logits: float
    gradients: float | None
    "of a parameter; None: unknown"
    scale: float
    "distance of the scale of all gradients from 1"

    def hold(self, difference: GradientDifference) -> bool:
        """Return whether gradients are the same up to rounding."""
        return (
            self.gradients is not None
            and difference.relative < self.gradients
            and abs(difference.scale - 1.0) < self.scale
        )

    def widened(self, measured: Roundings) -> RoundingLimits:
        """Return the limits for a model whose gradients rounding moves further than usual."""
        assert self.gradients is not None
        gradients = max(self.gradients, min(APART * measured.relative, MAX_LIMIT))
        return RoundingLimits(self.logits, gradients, max(self.scale, min(APART * measured.scale, MAX_SCALE_LIMIT)))


def limits(dtype: torch.dtype, blocks: int, *, fp8: bool = False) -> RoundingLimits:
    """Return what rounding may do, by the dtype of the weights.

    fp32: 1e-4.

    bf16 and fp16, with eps the distance from 1 to the next number: two kernels round differently what each block adds
    to the residual stream, and such errors add up like a random walk: eps x sqrt(blocks) for the logits. Gradients go
    through the blocks twice, and the worst of all parameters is taken: four times that. Over all parameters
    rounding errors cancel out in the scale: 1 %.

    Measured on an H200 in bf16 from random weights, 2 to 80 blocks of six architectures: logits up to 0.4 of the limit,
    gradients up to 0.7; an attention scale that is wrong by a factor of 1.2 moves gradients by 4 times the limit and
    more. A trained model can be far more sensitive (0.6B after 13 million tokens: 16 % in one projection, 1.6 % of the
    scale, with losses 0.006 % apart over 100 steps): where these limits are exceeded, `Roundings` are measured.

    Float8 products scale each matrix by what else is in the batch: 5 % for the logits, above which no run starts, and
    no known limit for the gradients.
    """
    if fp8:
        return RoundingLimits(REFUSED_FROM, None, SCALE)
    if dtype == torch.float32:
        return RoundingLimits(1e-4, 1e-4, 1e-4)
    walk = torch.finfo(dtype).eps * math.sqrt(max(blocks, 1))
    return RoundingLimits(min(walk, REFUSED_FROM), min(4 * walk, 4 * REFUSED_FROM), SCALE)


def worst(draws: Sequence[GradientDifference]) -> Roundings:
    """Return the worst of several passes with random roundings."""
    return Roundings(max(d.relative for d in draws), max(abs(d.scale - 1.0) for d in draws))


@contextmanager
def rounded_at_random(model: torch.nn.Module) -> Iterator[None]:
    """Round the model's activations at random within the context.

    What each module without submodules returns in half precision moves by up to half a unit of its last place, as
    another kernel might round it. Takes from torch's random state.
    """

    def move(_: torch.nn.Module, __: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or isinstance(output, DTensor):
            return None
        if output.dtype not in (torch.bfloat16, torch.float16):
            return None
        return output * (1 + (torch.rand_like(output) - 0.5) * torch.finfo(output.dtype).eps)

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(move).remove)
        yield
