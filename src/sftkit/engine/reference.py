"""Compute each document alone by transformers' own forward pass, whole logits and plain loss operators.

Checks compute the plain side of a comparison so. The reference engine trains so, with torch's own AdamW: it has nothing
of what makes our step fast, no packing, no masks, no chunked loss, no compiler, no kernels, no shards. So the tests of
exactness and `make validate` compare the other engines with it. It is slow: a pass for each document.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sftkit.compile.contract import random_state_kept
from sftkit.config.schema import LossConfig, OptimConfig
from sftkit.config.tables import DEFAULT
from sftkit.data.batches.collate import IGNORE, OF_TOKENS, Batch
from sftkit.data.batches.loader import StepBatches
from sftkit.data.types import Examples
from sftkit.engine.engine import EngineReport, Losses, Setup, Training
from sftkit.engine.step import exchange, worst_case_batch
from sftkit.errors import ConfigError, config_error
from sftkit.models.kind import ModelKind
from sftkit.models.routing import Routing, routing_of
from sftkit.models.structure import output_projection
from sftkit.models.weights import materialize_weights
from sftkit.objectives.objective import LOSS, Balanced, ModelWithLoss, Objective, Sums, Totals, nll_of
from sftkit.ops.attention import plain_attention
from sftkit.optim import adamw, protocol
from sftkit.runtime.start import Runtime
from sftkit.tracking import health, names


class PlainDocument(NamedTuple):
    """A document as the plain model takes it, or several of one padded length."""

    inputs: dict[str, Tensor]
    "of the model, [N, L] without positions, and of an encoder [N, ...]"
    targets: Tensor
    "[N L], IGNORE where nothing is learned"
    length: int
    "positions of the document, without padding"
    source: int = 0
    "number of its source"
    weights: Tensor | None = None
    "[N L], of a tree: factor of each target; None: 1"
    counted: Tensor | None = None
    "[N L], of a tree: how often routers count each position; None: once"


class Computes(Protocol):
    """A model with its objective: the one that is trained, for the reference engine, or a PlainModel."""

    orig_model: PreTrainedModel
    objective: Objective
    routing: Routing | None
    kind: ModelKind


def documents_of(
    examples: Examples, rows: Iterable[Sequence[int]], device: torch.device, multiple: int = 1
) -> list[list[PlainDocument]]:
    """Return the documents of each row, made from their own ids and mask: nothing of a batch or its collation.

    Args:
        multiple: documents are padded to a multiple of this number of positions.
    """
    return [[_document(examples, number, device, multiple) for number in row] for row in rows]


def _document(examples: Examples, number: int, device: torch.device, multiple: int) -> PlainDocument:
    """Return document i: its tokens but the last, and as target of each the token that follows, if that is learned."""
    ids = examples[number].ids
    length = len(ids) - 1
    padding = (0, -length % multiple)
    targets = np.where(examples[number].is_target[1:], ids[1:], IGNORE).astype(np.int64)
    inputs = {"input_ids": pad(torch.from_numpy(ids[:-1].astype(np.int64)), padding)[None].to(device)}
    if (encoded := examples.encoder_inputs) is not None:
        entry = int(encoded.index[number])
        inputs |= {
            name: torch.from_numpy(array[entry][None].copy()).to(device) for name, array in encoded.arrays.items()
        }
    return PlainDocument(inputs, pad(torch.from_numpy(targets), padding, value=IGNORE).to(device), length)


def in_one_pass(found: Iterable[PlainDocument]) -> PlainDocument:
    """Return documents as one, padded behind to the same length, for a single pass: no token sees those behind it."""
    found = list(found)
    length = max(one.inputs["input_ids"].shape[1] for one in found)

    def padded(one: PlainDocument, name: str) -> Tensor:
        value = one.inputs[name]
        return pad(value, (0, length - value.shape[1])) if name == "input_ids" else value

    inputs = {name: torch.cat([padded(one, name) for one in found]) for name in found[0].inputs}
    targets = [pad(one.targets, (0, length - len(one.targets)), value=IGNORE) for one in found]
    return PlainDocument(inputs, torch.cat(targets), sum(one.length for one in found))


class RowDocument(NamedTuple):
    """A document of a batch."""

    inputs: dict[str, Tensor]
    """of the model, [1, L] without positions, which begin at 0 as for a text alone, and of the encoder [1, ...]; L is
    padded behind the document with token 0"""
    targets: Tensor
    "int64 [L], IGNORE where nothing is learned"
    source: int
    "number of its source"
    row: int
    columns: Tensor
    "int64, where it lies in its row, without padding"
    weights: Tensor | None = None
    "tree: fp32 [L], number of documents with the target; else None"
    counted: Tensor | None = None
    "tree: int32 [L], number of documents with the position, 0 if an earlier one of the tree has it; else None"


def documents(batch: Batch, multiple: int = 1) -> Iterator[RowDocument]:
    """Yield the documents of a batch, padded to a multiple of `multiple` positions. Those of trees are the paths from
    the root to each leaf; an edge that several of them share is a target of the first, with the weight of all."""
    encoded = {name: value for name, value in batch.inputs.items() if name not in OF_TOKENS}
    if batch.tree_ends is not None:
        yield from _documents_of_trees(batch, multiple)
        return
    for row, ids in enumerate(batch.doc_ids):
        for number in ids.unique().tolist():
            if number < 0:  # padding
                continue
            columns = (ids == number).nonzero().flatten()
            padding = (0, -len(columns) % multiple)
            inputs = {"input_ids": pad(batch.inputs["input_ids"][row, columns], padding)[None]}
            for name, value in encoded.items():
                inputs[name] = value.unflatten(0, (len(batch.doc_ids), -1))[row, number][None]
            targets = pad(batch.targets[row, columns], padding, value=IGNORE)
            yield RowDocument(inputs, targets, int(batch.sources[row, columns[0]]), row, columns)


def _documents_of_trees(batch: Batch, multiple: int) -> Iterator[RowDocument]:
    """Yield the documents of trees, see `documents`."""
    assert batch.tree_ends is not None
    assert batch.tree_documents is not None
    assert batch.edge_targets is not None
    assert batch.edge_weights is not None
    row_length = batch.doc_ids.shape[1]
    # Edges that are not part of a document yet, by position: target -> weight.
    left: dict[int, dict[int, float]] = {}
    edges = (batch.target_index.tolist(), batch.edge_targets.tolist(), batch.edge_weights.tolist())
    for position, target, weight in zip(*edges, strict=True):
        if target != IGNORE:
            of_position = left.setdefault(position, {})
            of_position[target] = of_position.get(target, 0.0) + weight
    for row, (ends, ids) in enumerate(zip(batch.tree_ends, batch.inputs["input_ids"], strict=True)):
        tokens = ids.tolist()
        fresh = batch.tree_documents[row].clone()
        used = int((batch.doc_ids[row] >= 0).sum())
        of_row = [left.get(row * row_length + column, {}) for column in range(used)]
        leaves = (ends[:used] == torch.arange(1, used + 1, device=ends.device)).nonzero().flatten().tolist()
        # The paths to the leaves contain every edge between two positions. All other edges lead to the last token of
        # a document, which has no position.
        for leaf in chain(leaves, (column for column in range(used) for _ in range(len(of_row[column])))):
            if leaf not in leaves and not of_row[leaf]:
                continue
            columns = (ends[: leaf + 1] > leaf).nonzero().flatten()
            follow = [*(tokens[column] for column in columns.tolist()[1:]), next(iter(of_row[leaf]), IGNORE)]
            weights = [of_row[column].pop(token, 0.0) for column, token in zip(columns.tolist(), follow, strict=True)]
            targets = [token if weight else IGNORE for token, weight in zip(follow, weights, strict=True)]
            padding = (0, -len(columns) % multiple)
            yield RowDocument(
                {"input_ids": pad(ids[columns], padding)[None]},
                pad(torch.tensor(targets, device=ids.device), padding, value=IGNORE),
                int(batch.sources[row, columns[0]]),
                row,
                columns,
                pad(torch.tensor(weights, device=ids.device), padding),
                pad(fresh[columns], padding),
            )
            fresh[columns] = 0


def rows_of_batch(model: Computes, batch: Batch) -> Iterator[list[PlainDocument]]:
    """Yield the documents of a batch, for an engine that learns from it; those of a row together only where the
    objective needs that."""
    together = _balanced(model) is not None
    for _, found in groupby(documents(batch), key=lambda one: one.row):
        row = [PlainDocument(d.inputs, d.targets, len(d.columns), d.source, d.weights, d.counted) for d in found]
        yield from [row] if together else ([one] for one in row)


def _balanced(model: Computes) -> Balanced | None:
    """Return the objective where it has the auxiliary loss of routers in this pass, which is that of whole rows."""
    return model.objective if isinstance(model.objective, Balanced) and model.orig_model.training else None


def plain_sums(model: Computes, rows: Iterable[Sequence[PlainDocument]]) -> Iterator[Sums]:
    """Yield the sums of documents one by one, so that the caller's backward pass frees one before the next.

    Call it inside ops.attention.plain_attention.
    """
    # The auxiliary loss of routers depends on what all tokens of a row choose, so documents need the counts
    # of their row.
    objective = _balanced(model)
    if objective is None and model.routing is not None:
        model.routing.begin(None)  # the load of experts is counted in training steps only
    for row in rows:
        found: Iterable[Sums] = ()
        if objective is None:
            sums_of_logits = model.objective.sums_of_logits
            found = (sums_of_logits(plain_logits(model, one), one.targets, one.weights) for one in row)
        elif row:  # else it is padding
            found = _of_row(model, objective, row)
        for one, sums in zip(row, found, strict=True):
            if (name := nll_of(one.source)) in sums.measured:
                sums.measured[name] = sums.measured[model.objective.monitored]
            yield sums


def plain_logits(model: Computes, document: PlainDocument) -> Tensor:
    """Return the logits [N L, V] of a document by transformers' own forward pass, in fp32 or more."""
    logits = model.kind.plain_logits(model.orig_model, document.inputs).flatten(0, 1)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _of_row(model: Computes, objective: Balanced, row: Sequence[PlainDocument]) -> Iterator[Sums]:
    """Yield the sums of a row's documents, each with its share of the row's auxiliary loss.

    How often the row chooses each expert must be known first, and is counted in passes without gradients. Given that,
    the loss is a sum over documents.
    """
    routing = model.routing
    assert routing is not None

    def passed(document: PlainDocument) -> tuple[Sums, Tensor, Tensor]:
        """Return (sums, positions that each expert was given, sums of probabilities) of a document."""
        routing.begin(_counted(document)[None])
        sums = objective.sums_of_logits(plain_logits(model, document), document.targets, document.weights)
        chosen, probability = routing.taken()
        assert probability is not None
        return sums, chosen, probability

    with torch.no_grad():
        counted = [passed(document)[1] for document in row]
    # The second pass, with gradients: each document adds its own probabilities to the counts of the whole row.
    tokens = torch.stack([_counted(one).sum() for one in row]).sum()[None]
    learned = torch.stack([_learned(one) for one in row]).sum()[None]
    for document in row:
        sums, _, probability = passed(document)
        yield objective.added(sums, routing.loss_of_rows(torch.stack(counted).sum(0), probability, tokens, learned))


def _counted(document: PlainDocument) -> Tensor:
    """Return how often routers count each position of a document, [L]."""
    if document.counted is not None:
        return document.counted
    return torch.arange(len(document.targets), device=document.targets.device) < document.length


def _learned(document: PlainDocument) -> Tensor:
    """Return the number of a document's targets, 0-d, each times its weight."""
    return (document.targets != IGNORE).sum() if document.weights is None else document.weights.sum()


class Reference:
    """The engine without optimizations. See engine.Engine."""

    def __init__(self, optim: OptimConfig, loss: LossConfig, training: Training, rt: Runtime) -> None:
        """Build the engine for a model in fp32 or fp64, whole on every rank.

        Raises:
            ConfigError: the weights are bf16 or sharded, or another optimizer than AdamW is asked for.
        """
        orig_model = training.orig_model
        if orig_model.dtype not in (torch.float32, torch.float64) or rt.topology.sharded:
            raise config_error("reference in parts")
        if optim.name not in ("auto", DEFAULT):
            raise ConfigError(f"train.engine=reference supports only AdamW: set optim.name={DEFAULT}, not {optim.name}")
        rt.print("engine reference: each document alone, eager, torch's own loss and AdamW")
        if any(p.is_meta for p in orig_model.parameters()):
            materialize_weights(orig_model, training.source, rt.device)
        routing = routing_of(orig_model, loss.router_aux_loss_coef)
        self.model = ModelWithLoss(orig_model, "reference", training.objective, routing).to(rt.device)
        self.forward = DocumentsAlone(self.model)
        self.compiled = False
        self.training = training
        self._max_norm = optim.max_grad_norm
        self._rt = rt
        optim = replace(optim, name=DEFAULT)  # the only one that auto may choose here
        groups = protocol.parameter_groups(orig_model, optim)
        self.optimizer = PlainAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=False, foreach=False)
        # Private: transformers has a public setter (huggingface/transformers#38974), but no public getter.
        attention = str(orig_model.config._attn_implementation)
        # Weights, and two moments of the trained ones.
        size = sum((3.0 if p.requires_grad else 1.0) * p.numel() * p.element_size() for p in orig_model.parameters())
        self.setup = Setup(attention, "documents alone", DEFAULT, "none", size)

    @contextmanager
    def warm_up(self, print_line: Callable[[str], None]) -> Iterator[Losses]:
        """Run one forward and backward pass of the largest batch, to see that it fits."""
        layout = self.training.layout
        self.model.orig_model.train()
        batch = worst_case_batch(self._rt, self.model.orig_model, layout, *layout.shapes[-1])
        with random_state_kept():
            self.gradients([batch], self.model.objective.count(batch))
        self.optimizer.zero_grad(set_to_none=True)
        yield {}
        print_line(f"{layout.kind} rows, one document at a time; eager")

    def gradients(self, batches: Sequence[Batch], divisor: int) -> None:
        """See engine.Engine.gradients."""
        for batch in batches:
            self._forward_backward(batch, divisor)

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context without effect: nothing is compiled."""
        return nullcontext()

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: health.Spikes | None = None
    ) -> names.StepOutcome:
        """Sum the gradients of the mean over the global batch, document by document; exchange them once; update."""
        totals = self._nothing()
        losses = []
        for batch in batches.micro_batches:
            found = self._forward_backward(batch, batches.divisor)
            totals.add_(found)
            losses.append(found[LOSS])
        squared = torch.zeros((), dtype=torch.float64, device=self._rt.device)
        # Each rank has divided its loss by the global divisor already, so gradients add up, where DDP
        # would average them.
        for parameter in protocol.parameters_of(self.optimizer.param_groups):
            if self._rt.world_size > 1:  # a rank whose rows are all padding has no gradient, but the others wait for it
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad)
            if parameter.grad is not None:
                squared = squared + parameter.grad.double().square().sum()
        # Every rank has the whole gradients by now, so each gives its share of the norm.
        share = squared / self._rt.world_size
        grad_norm, flags = exchange(share, totals, batches.divisor, self._rt, stop=stop, spikes=spikes)
        self.optimizer.update(learning_rate, protocol.clip_coefficient(grad_norm, flags.skipped == 0, self._max_norm))
        self.optimizer.zero_grad(set_to_none=True)
        return names.StepOutcome(totals, grad_norm, flags, torch.stack(losses))

    def _nothing(self) -> Totals:
        """Return totals of 0."""
        return Totals.zeros(self.model.objective.measured, self._rt.device, self.model.orig_model.dtype)

    def _forward_backward(self, batch: Batch, divisor: int) -> Totals:
        """Add the gradients of a micro-batch's loss / divisor and return its sums."""
        totals = self._nothing()
        with plain_attention(self.model.orig_model):  # once for all documents: it walks through all modules
            for sums in plain_sums(self.model, rows_of_batch(self.model, batch)):
                (sums.loss / max(divisor, 1)).backward()
                totals.add_(Totals.of(sums))
        return totals

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def report(self, error: BaseException | None = None) -> EngineReport:
        """Report that nothing is compiled."""
        # The same metrics as the other engines', so that lines of a run have the same columns.
        counted = ("graphs", "recompiles", "graph_breaks", "cuda_graphs")
        return EngineReport({f"compile/{name}": 0 for name in counted})

    def close(self) -> None:
        """Do nothing: nothing was changed."""


class DocumentsAlone:
    """The forward pass of the engine. See engine.ForwardPass; the attention backend is transformers' own."""

    def __init__(self, model: ModelWithLoss) -> None:
        self._model = model

    def sums(self, batch: Batch, backend: str) -> Sums:
        """Return the sums of a batch."""
        with plain_attention(self._model.orig_model):
            found = list(plain_sums(self._model, rows_of_batch(self._model, batch)))
        measured = {name: torch.stack([one.measured[name] for one in found]).sum() for name in found[0].measured}
        return Sums(torch.stack([one.loss for one in found]).sum(), measured)

    def hidden_states(self, batch: Batch, backend: str) -> Tensor:
        """Return the input of the head for each document, at the document's places: [B, C, H]; zeros elsewhere."""
        model = self._model
        taken: list[Tensor] = []
        head = output_projection(model.orig_model)
        hook = head.register_forward_pre_hook(lambda _, given: taken.append(given[0].flatten(0, 1)))
        with hook, plain_attention(model.orig_model):
            found = list(documents(batch))
            for document in found:
                model.kind.plain_logits(model.orig_model, document.inputs)
        states = taken[0].new_zeros(*batch.doc_ids.shape, taken[0].shape[-1])
        for document, hidden in zip(found, taken, strict=True):
            states[document.row, document.columns] = hidden
        return states


class PlainAdamW(adamw.FusedAdamW):
    """torch.optim.AdamW, one tensor and one operator after the other, as an optim.protocol.Optimizer."""

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Make one update, or none for a coefficient of nan, which the host reads."""
        # A host sync, which the other engines avoid: only torch's fused AdamW takes a flag on the device, found_inf.
        if bool(coefficient.isnan()):
            return
        protocol.set_learning_rate(self.param_groups, learning_rate)
        protocol.multiply_gradients(protocol.parameters_of(self.param_groups), coefficient)
        self.step()
