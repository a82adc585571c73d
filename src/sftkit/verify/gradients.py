"""Check before training that an engine's gradients equal those of the plain model, document by document.

A few short documents go through the engine's own gradients, including micro-batches, masks and loss: once in a
declared shape through the compiled code, once in a short row without the compiler. The plain model (verify.plain)
computes each document's own ids and mask with transformers' forward pass and torch's cross entropy. A sample of each
parameter's gradient is compared, so that no full gradient is kept. The limits are the rounding noise in gradients of
such a model: fixed limits, and a measurement if they are exceeded. Afterwards gradients are cleared, and random state
and weights are unchanged.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.compile.contract import random_state_kept, run_eagerly
from sftkit.data.batches.collate import Batch, collate
from sftkit.data.batches.epoch import row_shard
from sftkit.data.batches.pack import BatchShape, Layout
from sftkit.data.types import Examples
from sftkit.engine.reference import PlainDocument, documents_of, in_one_pass, plain_sums
from sftkit.engine.step import has_dropout
from sftkit.models import float8, kind, structure, trained
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import plain_attention, short_windows
from sftkit.ops.tensors import local, local_part, local_region
from sftkit.parallel.wrap import reshard
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Check
from sftkit.verify.documents import COMMON, REFUSED_FROM, branch_off
from sftkit.verify.plain import APART, DRAWS, MAX_LIMIT, PlainModel, rounded_at_random

_SAMPLE = 4096
"Maximum number of compared elements of a parameter, evenly spaced."
LAST_ROWS = 8
"""Number of last rows of embedding and head that are all compared: they hold padding, added tokens and the last chunk
of the loss.
"""
FLOOR, FLOOR_OF_EXPERTS = 1e-2, 5e-2
"""A difference is relative to the parameter's own gradient, but at least to this share of its block's gradient: the
gradients of some parameters are mostly rounding errors (the bias of keys without positions, projections of queries if
scores hardly differ). The share is larger in a block of experts, where rounding may send a token to another expert.
The check reports how many parameters are below it.
"""


@dataclass(frozen=True)
class GradientDifference:
    """The difference of two sets of gradients."""

    relative: float
    "largest over all parameters: norm of the difference over the norm of the plain gradient, in the sample"
    parameter: str
    "parameter with the largest difference"
    scale: float = 1.0
    "over all parameters: dot product of our and the plain gradients over the squared norm of the plain ones"
    below: int = 0
    "number of parameters with a gradient below the floor, a share of their block's gradient"
    parameters: int = 0
    "number of compared parameters"


class SampledElements(NamedTuple):
    """Elements of one parameter that are compared."""

    parameter: str
    at: Tensor
    """int64 [N], on its device: indices into the flattened parameter, or into this rank's shard if it is
    sharded by columns
    """
    each: float
    "number of elements of the parameter that each sample represents"


def sample_elements(
    orig_model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter], tokens: Tensor
) -> dict[str, SampledElements]:
    """Return the compared elements of each parameter by name.

    Embedding and head [V, H] have three entries each: all elements of the rows of `tokens`, all of the last rows, and
    a sample of the other rows, whose gradients are far smaller.

    Args:
        tokens: int64 [K], tokens of the documents.
    """
    vocabulary = {id(structure.embedding_of(orig_model)), id(structure.output_projection(orig_model).weight)}
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
    """Return at most _SAMPLE indices into `size` elements, int64. An odd distance visits all columns."""
    return torch.arange(0, size, -(-size // _SAMPLE) | 1)


def _elements(rows: Tensor, width: int) -> Tensor:
    """Return the indices of all elements of some rows of a matrix."""
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()


def window(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return (index of this rank's first element in the flattened whole, size of the whole).

    A parameter sharded by columns counts this rank's shard as the whole.
    """
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    rows, *columns = local_region(parameter)
    if any(size != whole for (_, size), whole in zip(columns, parameter.shape[1:], strict=True)):
        return 0, local(parameter).numel()
    return rows[0] * math.prod(parameter.shape[1:]), parameter.numel()


def on_this_rank(parameter: torch.nn.Parameter, at: Tensor) -> Tensor:
    """Return which of these indices this rank holds: bool [N]."""
    first = window(parameter)[0]
    return (at >= first) & (at < first + local(parameter).numel())


def taken(parameter: torch.nn.Parameter, at: Tensor) -> Tensor:
    """Return the gradient at the indices that this rank holds: float64, zeros without a gradient."""
    own = at[on_this_rank(parameter, at)] - window(parameter)[0]
    if parameter.grad is None:
        return torch.zeros(len(own), dtype=torch.float64, device=own.device)
    return local(parameter.grad).flatten()[own].double()


def block_names(orig_model: PreTrainedModel) -> dict[str, str]:
    """Map each parameter of a block to the name of the block. A model that names no blocks, such as Marian, uses the
    items of a module list.
    """
    names = {id(module): name for name, module in orig_model.named_modules()}
    blocks = [(names[id(block)], block) for block in structure.decoder_blocks(orig_model)]
    found = {f"{name}.{inner}": name for name, block in blocks for inner, _ in block.named_parameters()}
    for name, _ in orig_model.named_parameters():
        if item := re.match(r"(.*?\.\d+)\.", name):
            found.setdefault(name, item[1])
    return found


def largest(sums: Mapping[str, Sequence[float]], blocks: Mapping[str, str]) -> GradientDifference:
    """Return the largest relative difference with its parameter, and the scale over all parameters.

    Args:
        sums: by parameter: squared norm of the difference, squared norm of the plain model's gradient, dot product of
            that and ours.
        blocks: name of a parameter -> name of its block.
    """
    # The floor is a share of the block's gradient; parameters outside blocks form a block of their own.
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
        # In a block without any gradient every difference is infinitely large. NaN must fail, but would
        # win no comparison.
        relative = math.sqrt(difference / against) if against else math.inf if difference else 0.0
        relative = math.inf if math.isnan(relative) else relative
        if relative > worst or not parameter:
            worst, parameter = relative, name
    whole = sum(norm for _, norm, _ in sums.values())
    scale = sum(dot for _, _, dot in sums.values()) / whole if whole else math.nan
    return GradientDifference(worst, parameter, scale, below, len(sums))


_SIZES = (8, 5)
"Largest lengths of the documents of a micro-batch, in positions."
_ROW_LENGTH = 16
"Positions of the uncompiled row, for each rank that shares it."
MICRO_BATCHES = 3
"""Maximum number of micro-batches, or the number of pipeline stages if larger: from 3 on a step adds up bf16
gradients in fp32.
"""
TOKENS = 32
"Maximum number of distinct tokens in the documents: all ranks compare the same few rows of embedding and head."


class ProbeBatch(NamedTuple):
    """A micro-batch whose gradients are compared."""

    examples: Examples
    rows: tuple[tuple[int, ...], ...]
    "documents of each row, the same on all ranks that share rows"
    own: Batch
    "this rank's part of them, collated as in a step"


def same_rows(rt: Runtime) -> bool:
    """Return whether all ranks get the same documents, as under tensor parallelism; both sides use its collectives."""
    return rt.topology.tensor > 1


def tokens_of(orig_model: PreTrainedModel) -> np.ndarray:
    """Return the tokens of the documents and 0, the padding token: int64 [K], ascending."""
    return np.unique([0, *np.random.default_rng(0).integers(0, structure.vocab_size(orig_model), TOKENS - 1)])


def short_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime, *, alone: bool) -> list[ProbeBatch]:
    """Return micro-batches of one row with two documents and padding, or of two rows with one document
    each if `alone`.
    """
    row_length = _ROW_LENGTH * rt.topology.ranks_per_row
    shares = max(layout.shares, 1)
    rows = _rows_of_shares([(0,), (1,)] if alone else [(0, 1)], shares)
    tree = layout.kind == "tree"
    shape = BatchShape(row_length, max_docs=4 * shares, max_doc_length=row_length, tree=tree)
    return _micro_batches(orig_model, layout, rt, rows, shape)


def declared_rows(orig_model: PreTrainedModel, layout: Layout, rt: Runtime) -> list[ProbeBatch]:
    """Return the batches of `short_rows` in the smallest declared shape.

    If rows hold one document each, two rows have one and the others are padding.
    """
    rows, row_length = layout.shapes[0]
    # A packed row holds both documents, so that the comparison covers their isolation; a tree has them as branches.
    several = layout.kind == "tree" or (layout.kind == "packed" and layout.docs_per_row > 1)
    recipe: list[tuple[int, ...]] = [(0, 1)] if several else [(0,), (1,)]
    recipe = (_rows_of_shares(recipe, rows) if layout.shares else [*recipe, *[()] * rows])[:rows]
    return _micro_batches(orig_model, layout, rt, recipe, layout.batch_shape(rows, row_length))


def _rows_of_shares(rows: list[tuple[int, ...]], times: int) -> list[tuple[int, ...]]:
    """Return rows of two documents several times, each time of two others, so that no two adapters have the same."""
    return [tuple(document + 2 * i for document in row) for i in range(times) for row in rows]


def _micro_batches(
    orig_model: PreTrainedModel, layout: Layout, rt: Runtime, rows: list[tuple[int, ...]], shape: BatchShape
) -> list[ProbeBatch]:
    """Build micro-batches of random tokens, with every third token excluded from the targets.

    Each rank with rows of its own gets different tokens.
    """
    # Declared shapes may be shorter than the usual sizes.
    most = max(map(len, rows))
    room = min(shape.max_doc_length // (most if shape.tree else 1), shape.row_length // most)
    count = max(len(_SIZES), *(document + 1 for row in rows for document in row))
    sizes = [min(_SIZES[i % len(_SIZES)], room) for i in range(count)]
    # Ranks with rows of their own need different tokens, otherwise a missing collective would be invisible; ranks
    # that share rows need the same tokens.
    random, tokens = np.random.default_rng(0 if same_rows(rt) else rt.data_rank), tokens_of(orig_model)
    inputs = kind.kind_of(orig_model.config).made_up_inputs(orig_model, len(sizes), layout.max_length)
    members, found = trained.members_in(orig_model), []
    for number in range(min(layout.accumulation, max(MICRO_BATCHES, rt.topology.stages))):
        if members:
            first = number * layout.shares
            shape = replace(shape, adapters=tuple((first + k) % len(members) for k in range(layout.shares)))
        ids = random.choice(tokens, sum(sizes) + len(sizes))
        # A loss that ignored the mask or counted wrong would show in every gradient.
        is_target = np.arange(len(ids)) % 3 != 2
        if shape.tree and min(sizes) > COMMON:
            # One of the shared tokens is a target in both documents, one in the second alone.
            branch_off(ids, sizes[0] + 1, tokens)
            is_target[sizes[0] + 1 : sizes[0] + 1 + COMMON] = True
        examples = Examples.of(ids, sizes, inputs, is_target=is_target)
        own = collate(examples, tuple(rows), shape, shard=row_shard(rt.topology, rt.rank)).to(rt.device)
        found.append(ProbeBatch(examples, tuple(rows), own))
    return found


SCALE = 0.01
"""Largest distance of the gradients' scale from 1 in bf16: up to a quarter of it was measured, with 4 to 28 blocks on
a CPU.
"""
MAX_SCALE_LIMIT = 0.05
"""No limit is wider, so that faults are still found: an attention scale wrong by a factor of 1.2 moves such gradients
by 0.7 and more, a wrong number of target tokens moves the scale.
"""


class Roundings(NamedTuple):
    """The measured rounding noise in gradients of the plain model: the worst of `DRAWS` passes."""

    relative: float
    "relative difference of the most affected parameter"
    scale: float
    "distance of the scale of all gradients from 1"


class RoundingLimits(NamedTuple):
    """Largest relative differences between our step and the plain model that rounding explains."""

    logits: float
    gradients: float | None
    "limit for a parameter; None: unknown"
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
        """Return the limits for a model whose gradients are more sensitive to rounding than usual."""
        assert self.gradients is not None
        gradients = max(self.gradients, min(APART * measured.relative, MAX_LIMIT))
        return RoundingLimits(self.logits, gradients, max(self.scale, min(APART * measured.scale, MAX_SCALE_LIMIT)))


def limits(dtype: torch.dtype, blocks: int, *, fp8: bool = False) -> RoundingLimits:
    """Return the limits of rounding noise by the dtype of the weights.

    fp32 and fp64: 1e-4.

    bf16 and fp16, with eps the distance from 1 to the next number: two kernels differ in how they round each block's
    addition to the residual stream, and such errors add up like a random walk: eps x sqrt(blocks) for the logits.
    Gradients pass through the blocks twice, and the worst of all parameters counts: four times that. Over all
    parameters rounding errors cancel out in the scale: 1 %.

    Measured on an H200 in bf16 from random weights, with 2 to 80 blocks of six architectures: logits up to 0.4 of the
    limit, gradients up to 0.7; an attention scale wrong by a factor of 1.2 moves gradients by 4 times the limit and
    more. A trained model can be far more sensitive (0.6B after 13 million tokens: 16 % in one projection, 1.6 % of
    the scale, with losses 0.006 % apart over 100 steps): if it exceeds these limits, `Roundings` are measured.

    Float8 products scale each matrix by the other contents of the batch: no limit of the gradients is known. Logits are
    compared without them.
    """
    if dtype in (torch.float32, torch.float64):
        return RoundingLimits(1e-4, 1e-4, 1e-4)
    walk = torch.finfo(dtype).eps * math.sqrt(max(blocks, 1))
    gradients = None if fp8 else min(4 * walk, 4 * REFUSED_FROM)
    return RoundingLimits(min(walk, REFUSED_FROM), gradients, SCALE)


def worst(draws: Sequence[GradientDifference]) -> Roundings:
    """Return the worst of several passes with random rounding."""
    return Roundings(max(d.relative for d in draws), max(abs(d.scale - 1.0) for d in draws))


@dataclass(frozen=True)
class GradientCheck:
    """Our step's gradients compared with the plain model's."""

    eager: GradientDifference
    compiled: GradientDifference | None
    skip_reason: str = ""
    "why the compiled step is not compared; empty if it is"
    backend: str = ""
    "attention backend of the eager comparison"
    roundings: Roundings | None = None
    "how far rounding alone moves this model's gradients; measured if one of the two differences exceeds the limits"


def check_gradients(
    sides: Sides, layout: Layout, eager: str, allowed: RoundingLimits, *, compiled: bool
) -> GradientCheck:
    """Compare our gradients with the plain model's after the warm-up; every rank calls it.

    Args:
        eager: attention backend without compilation.
        compiled: whether the step is compiled. It is not compared with dropout, which makes two passes differ.
        allowed: the limits; if half precision exceeds one, rounding noise is measured, see Roundings.
    """
    model, rt = sides.model, sides.rt
    orig_model, dropout = model.orig_model, has_dropout(model.orig_model)
    # Everything changed below is restored at the end in any case: training continues with this model.
    was_training, attention = orig_model.training, model.backend
    with random_state_kept():
        try:
            # Two passes with dropout differ, so a model with dropout is compared in eval mode, and only without
            # the compiler.
            orig_model.train(not dropout)
            model.backend = eager
            # Without the compiler, in one short row of two documents: sdpa takes only one document a row.
            with short_windows(orig_model), run_eagerly():
                micro_batches = short_rows(orig_model, layout, rt, alone=eager == "sdpa")
                with short_windows(sides.plain.orig_model):
                    same = GradientCheck(sides.compare(micro_batches), None, "", eager)
            # Through the compiled code, in a declared shape and in training mode, as its guards expect.
            model.backend = attention
            if compiled and dropout:
                same = replace(same, skip_reason="dropout")
            elif compiled:
                orig_model.train()
                micro_batches = declared_rows(orig_model, layout, rt)
                same = replace(same, compiled=sides.compare(micro_batches))
            # Beyond the limits: measure whether this model is that sensitive to rounding.
            known = [d for d in (same.eager, same.compiled) if d is not None]
            if allowed.gradients is None or orig_model.dtype == torch.float32 or all(map(allowed.hold, known)):
                return same
            return replace(same, roundings=sides.roundings(micro_batches))
        finally:
            model.backend = attention
            orig_model.train(was_training)
            # A failed pass may leave gathered weights and some gradients behind.
            model.zero_grad(set_to_none=True)
            reshard(orig_model)


class Sides:
    """Compute the gradients in two ways: with our step and with the plain model."""

    def __init__(
        self,
        model: ModelWithLoss,
        gradients: Callable[[Sequence[Batch], int], None],
        parameters: Sequence[torch.nn.Parameter],
        rt: Runtime,
        plain: PlainModel | None = None,
    ) -> None:
        """Choose the compared elements before anything is computed.

        Args:
            gradients: gradients of the engine, see engine.Engine.
            parameters: trained parameters by name.
            plain: plain model; None: one without files is made.
        """
        self.model, self.gradients, self.rt = model, gradients, rt
        self.plain = plain or PlainModel(model, rt.device, rt=rt)
        self.parameters = list(parameters)
        # A tied weight has one parameter and several names: its first name is used, as in named_parameters.
        wanted = {id(p) for p in self.parameters if p.requires_grad}
        self.named = {name: p for name, p in model.orig_model.named_parameters() if id(p) in wanted}
        self.blocks = block_names(model.orig_model)
        tokens = torch.from_numpy(tokens_of(model.orig_model)).to(rt.device)
        self.sampled = sample_elements(model.orig_model, self.named, tokens)
        self.names = rt.united(list(self.sampled))
        "names of all ranks: a pipeline stage has elements of its own parameters only"

    def compare(self, micro_batches: Sequence[ProbeBatch]) -> GradientDifference:
        """Return the difference between our gradients and the plain model's."""
        targets = self._targets(micro_batches)
        # The sums themselves are not compared here: verify.documents compared the loss.
        self.gradients([one.own for one in micro_batches], targets)
        ours = {name: taken(self.named[parameter], at) for name, (parameter, at, _) in self.sampled.items()}
        self.model.zero_grad(set_to_none=True)
        return self._largest(ours, self._plain(micro_batches, targets))

    def roundings(self, micro_batches: Sequence[ProbeBatch]) -> Roundings:
        """Return how far random rounding moves the plain model's gradients."""
        targets, draws = self._targets(micro_batches), []
        plain = self._plain(micro_batches, targets)
        for _ in range(DRAWS):
            with rounded_at_random(self.plain.orig_model):
                draws.append(self._largest(self._plain(micro_batches, targets), plain))
        return worst(draws)

    def _targets(self, micro_batches: Sequence[ProbeBatch]) -> int:
        """Return the number of targets, by their own masks, in all documents that contribute to a rank's gradients."""
        targets = sum(int(self.model.objective.divisors(one.examples).sum()) for one in micro_batches)
        # Shards add up gradients over all ranks. Ranks that share a row, or a pipeline, each counted the
        # same targets.
        if self.rt.topology.sharded and not same_rows(self.rt):
            count = torch.tensor(float(targets), dtype=torch.float64, device=self.rt.device)
            targets = round(float(self.rt.sum(count)) / (self.rt.topology.ranks_per_row * self.rt.topology.stages))
        return targets

    def _plain(self, micro_batches: Sequence[ProbeBatch], targets: int) -> dict[str, Tensor]:
        """Return this rank's samples of the plain model's gradients, uncompiled.

        Each rank computes full gradients of its rows, which a plain sum adds up over ranks: nothing uses the
        step's collectives.
        """
        plain, orig_model = self.plain, self.plain.orig_model
        multiple = float8.position_multiple(orig_model)
        rows: list[Any] = [self._rows(one, multiple) for one in micro_batches]
        # If weights are gathered for each pass, one pass takes all documents. Routers count each separately.
        if plain.gathers and plain.routing is None:
            rows = [[[in_one_pass(chain.from_iterable(chain.from_iterable(rows)))]]]
        sums = {
            name: torch.zeros(len(at), dtype=torch.float64, device=at.device)
            for name, (_, at, _) in self.sampled.items()
        }
        of: dict[str, list[str]] = defaultdict(list)
        for name, elements in self.sampled.items():
            of[elements.parameter].append(name)

        def add(parameter: str, gradient: Tensor) -> None:
            for name in of.get(parameter, ()):
                # A parameter sharded by columns counts this rank's shard as the whole.
                live = self.named[parameter]
                part = gradient if window(live)[1] == live.numel() else local_part(gradient, live)
                sums[name] += part.flatten()[self.sampled[name].at].double()

        orig_model.train(self.model.orig_model.training)
        with run_eagerly(), plain_attention(orig_model), plain.gradients_to(add):
            for one in plain_sums(plain, chain.from_iterable(rows)):
                (one.loss / targets).backward()
        sums = self._over_ranks(sums)
        return {name: sums[name][on_this_rank(self.named[p], at)] for name, (p, at, _) in self.sampled.items()}

    def _rows(self, one: ProbeBatch, multiple: int) -> Iterator[list[PlainDocument]]:
        """Yield the documents of each row; of several adapters, the one of the row then computes."""
        adapters = trained.adapters_of(self.plain.orig_model)
        for i, row in enumerate(documents_of(one.examples, one.rows, self.rt.device, multiple)):
            if adapters is not None and adapters.selection is not None:
                adapters.selection.active = one.own.adapters[i * len(one.own.adapters) // len(one.rows)]
            yield row

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up over the ranks whose gradients a step adds up here; replicas have no collective in it."""
        stages, topology = structure.stages_of(self.model.orig_model), self.rt.topology
        if not topology.sharded:
            return sums
        if same_rows(self.rt):
            return {name: value * self.rt.data_world_size for name, value in sums.items()}
        # One collective for all samples. In a pipeline only ranks of the same stage have the same names.
        values = torch.cat(list(sums.values()))
        if stages is None:
            values = self.rt.sum(values) / topology.ranks_per_row
        else:
            torch.distributed.all_reduce(values, group=stages.mesh.get_group("alike"))
        return dict(zip(sums, values.split([len(each) for each in sums.values()]), strict=True))

    def _largest(self, ours: dict[str, Tensor], plain: dict[str, Tensor]) -> GradientDifference:
        """Return the largest difference over all ranks, the same on each."""
        # A rank has only the elements of its own shards. Squares and products add up over ranks, but relative
        # differences do not, so the sums are exchanged first; `each` scales a sample to the whole parameter.
        sums = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.rt.device)
        rows = {name: row for row, name in enumerate(self.names)}
        for name, elements in self.sampled.items():
            a, b = ours[name], plain[name]
            found = torch.stack([(a - b).square().sum(), b.square().sum(), (a * b).sum()])
            sums[rows[name]] = found * elements.each
        return largest(dict(zip(self.names, self.rt.sum(sums).tolist(), strict=True)), self.blocks)


def gradients_check(check: GradientCheck, allowed: RoundingLimits, backend: str) -> Check:
    """Return the check of the gradients of a few short documents from before the first step.

    Args:
        allowed: limits for this model, widened by measured rounding noise.
        backend: attention backend of the run; if the eager half needed another one, the check names it.
    """
    eager = "eager" if check.backend == backend else f"eager ({check.backend} stands in for {backend})"
    known = {side: d for side, d in {"compiled": check.compiled, eager: check.eager}.items() if d is not None}
    not_compiled = f"compiled: not checked, {check.skip_reason}; " if check.skip_reason else ""
    found = not_compiled + "; ".join(f"{side}: {_words(d)}" for side, d in known.items())
    # Rounding noise is measured only if a fixed limit was exceeded. If it alone exceeds any limit that would still
    # find a fault, the comparison decides nothing.
    unknown = allowed.gradients is None
    if allowed.gradients is not None and (alone := check.roundings) is not None:
        allowed = allowed.widened(alone)
        found += f"; rounding noise alone: {alone.relative:.1e}, {alone.scale:.1e} of the scale"
        unknown = alone.relative > MAX_LIMIT or alone.scale > MAX_SCALE_LIMIT
    same = all(allowed.hold(d) for d in known.values())
    return Check(
        "Same gradients as the plain model",
        # Without a limit it was not checked. Passing needs both halves, but a difference in one is enough to fail.
        None if allowed.gradients is None or (unknown and not same) or (same and check.skip_reason) else same,
        found,
        "no limit is known for float8 products"
        if allowed.gradients is None
        else f"below {allowed.gradients:.1e} in every parameter, {allowed.scale:.0e} of the scale",
        "short documents through this run's micro-batches, masks, loss and collectives, compiled in a declared shape "
        "and uncompiled, against each alone through transformers and torch's cross entropy; a sample of each parameter",
    )


def _words(difference: GradientDifference) -> str:
    """Return a line with the worst parameter, the scale of all, and the number of parameters too small to be
    measured alone.
    """
    small = f", {difference.below} of {difference.parameters} too small next to their block" if difference.below else ""
    return f"{difference.relative:.1e} at most ({difference.parameter}), scale {difference.scale:.5f}{small}"
