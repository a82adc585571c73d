"""Samples of gradients: which elements of each parameter are compared, and the largest difference of two gradients."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.models.structure import decoder_blocks, embedding_of, output_projection
from sftkit.ops.dtensor import local, local_region

_SAMPLE = 4096
"Maximum number of elements of a parameter that are compared, evenly spread."
LAST_ROWS = 8
"Rows at the end of embedding and head, all compared: padding, added tokens and the last chunk of the loss are there."
FLOOR, FLOOR_OF_EXPERTS = 1e-2, 5e-2
"""A difference is measured against the parameter's own gradient, but at least against this share of its block's
gradient: some parameters have little but rounding errors (the bias of keys without positions, projections of queries
where scores hardly differ). The share is larger in a block of experts, where a rounding may send a token to another
expert. The check says how many parameters are below it."""


@dataclass(frozen=True)
class GradientDifference:
    """The difference of two sets of gradients."""

    relative: float
    "largest of all parameters: norm of the difference over the norm of the plain gradient, in the sample"
    parameter: str
    "the one with the largest"
    scale: float = 1.0
    "over all parameters: dot product of ours and the plain ones over the squared norm of the plain ones"
    below: int = 0
    "parameters whose gradient is below the floor, a share of their block's"
    parameters: int = 0
    "how many were compared"


class SampledElements(NamedTuple):
    """Elements of one parameter that are compared."""

    parameter: str
    at: Tensor
    """int64 [N], on its device: indices into the flattened parameter, or in this rank's shard if it is sharded by
    columns"""
    each: float
    "how many elements of the parameter each one stands for"


def sample_elements(
    orig_model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter], tokens: Tensor
) -> dict[str, SampledElements]:
    """Return the elements to compare of each parameter, by its name.

    Embedding and head [V, H] have three entries each: all elements of the rows of `tokens`, all of the last rows, and a
    sample of the other rows, whose gradients are far smaller.

    Args:
        tokens: int64 [K], the tokens of the documents.
    """
    vocabulary = {id(embedding_of(orig_model)), id(output_projection(orig_model).weight)}
    samples: dict[str, SampledElements] = {}
    spread: dict[tuple[int, torch.device], Tensor] = {}  # parameters of one size share their indices
    for name, parameter in parameters.items():
        size, device = window(parameter)[1], parameter.device
        if (size, device) not in spread:
            spread[size, device] = evenly(size).to(device)
        at = spread[size, device]
        if id(parameter) not in vocabulary:
            samples[name] = SampledElements(name, at, size / max(len(at), 1))
            continue
        rows, width = parameter.shape
        full_rows = torch.zeros(rows, dtype=torch.bool, device=device)
        full_rows[tokens] = True
        last = torch.arange(max(rows - LAST_ROWS, 0), rows, device=device)
        last = last[~full_rows[last]]
        samples[name] = SampledElements(name, _elements(tokens, width), 1.0)
        samples[f"{name}, last rows"] = SampledElements(name, _elements(last, width), 1.0)
        full_rows[last] = True
        others = at[~full_rows[at // width]]
        left = size - int(full_rows.sum()) * width
        samples[f"{name}, other rows"] = SampledElements(name, others, left / max(len(others), 1))
    return samples


def evenly(size: int) -> Tensor:
    """Return at most _SAMPLE indices into `size` elements, int64. An odd distance passes through all columns."""
    return torch.arange(0, size, -(-size // _SAMPLE) | 1)


def _elements(rows: Tensor, width: int) -> Tensor:
    """Return the indices of all elements of some rows of a matrix."""
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()


def window(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return (index of this rank's first element in the flattened whole, size of the whole).

    For a parameter that is sharded by columns, this rank's shard counts as the whole.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    rows, *columns = local_region(parameter)
    if any(size != whole for (_, size), whole in zip(columns, parameter.shape[1:], strict=True)):
        return 0, local(parameter).numel()
    return rows[0] * math.prod(parameter.shape[1:]), parameter.numel()


def on_this_rank(parameter: torch.nn.Parameter, at: Tensor) -> Tensor:
    """Return which of these indices this rank has: bool [N]."""
    first = window(parameter)[0]
    return (at >= first) & (at < first + local(parameter).numel())


def taken(parameter: torch.nn.Parameter, at: Tensor) -> Tensor:
    """Return the gradient at those of these indices that this rank has: float64, zeros where there is no gradient."""
    own = at[on_this_rank(parameter, at)] - window(parameter)[0]
    if parameter.grad is None:
        return torch.zeros(len(own), dtype=torch.float64, device=own.device)
    return local(parameter.grad).flatten()[own].double()


def block_names(orig_model: PreTrainedModel) -> dict[str, str]:
    """Return name of each parameter of a block -> name of the block. In a model that names no blocks, such as Marian,
    the items of a list of modules are taken for them."""
    names = {id(module): name for name, module in orig_model.named_modules()}
    blocks = [(names[id(block)], block) for block in decoder_blocks(orig_model)]
    found = {f"{name}.{inner}": name for name, block in blocks for inner, _ in block.named_parameters()}
    for name, _ in orig_model.named_parameters():
        if item := re.match(r"(.*?\.\d+)\.", name):
            found.setdefault(name, item[1])
    return found


def largest(sums: Mapping[str, Sequence[float]], blocks: Mapping[str, str]) -> GradientDifference:
    """Return the parameter with the largest relative difference, and the scale of all.

    Args:
        sums: by parameter: squared norm of the difference, squared norm of the plain model's gradient, dot
            product of that and ours.
        blocks: name of a parameter -> name of its block.
    """
    # The floor is a share of the block's gradient: names that belong to no block are a block of their own.
    of_block: dict[str, float] = defaultdict(float)
    for name, (_, norm, _) in sums.items():
        of_block[blocks.get(name, name)] += norm
    routed = {blocks.get(name, name) for name in sums if ".experts." in name}
    worst, parameter, below = 0.0, "", 0
    for name, (difference, norm, _) in sums.items():
        block = blocks.get(name, name)
        share = FLOOR_OF_EXPERTS if block in routed else FLOOR
        floor = share**2 * of_block[block]
        below += norm < floor
        against = max(norm, floor)
        # Without any gradient in the block every difference is infinitely large; NaN must fail, and would
        # win no comparison.
        relative = math.sqrt(difference / against) if against else math.inf if difference else 0.0
        relative = math.inf if math.isnan(relative) else relative
        if relative > worst or not parameter:
            worst, parameter = relative, name
    whole = sum(norm for _, norm, _ in sums.values())
    scale = sum(dot for _, _, dot in sums.values()) / whole if whole else math.nan
    return GradientDifference(worst, parameter, scale, below, len(sums))
