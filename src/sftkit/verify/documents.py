"""Check before training that an engine's forward pass computes the same as the plain model, document by document."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from sftkit.compile.contract import random_state_kept
from sftkit.data.batches.collate import OF_TOKENS, Batch, collate
from sftkit.data.batches.pack import BatchShape, Layout
from sftkit.data.types import Examples
from sftkit.engine.engine import ForwardPass
from sftkit.engine.reference import PlainDocument, documents, documents_of, plain_logits
from sftkit.errors import ConfigError, config_error
from sftkit.models import float8, hybrids, structure
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import attention_chunk, short_windows, windows
from sftkit.parallel.tensor import without_sequence_parallel
from sftkit.parallel.wrap import as_whole
from sftkit.runtime.script import first_of
from sftkit.tracking.names import Check, does_not_apply
from sftkit.verify.plain import APART, DRAWS, PlainModel, rounded_at_random

_SIZES = (8, 5)
"Lengths of the two documents, in positions."
_ROW_LENGTH = 16
_LONG = 264
"Positions of longer documents: beyond the tiles of attention kernels and the chunks of recurrent layers, at most 256."
COMMON = 3
"Positions that two documents share in rows of trees."
_BEYOND = 8
"Number of positions before and after a limit of the model whose logits are compared."
REFUSED_FROM = 0.05
"""From this relative difference of the logits on, no run starts, unless rounding alone explains it: 64 blocks of random
weights in bf16 come close. The limit in proof.json is tighter: gradients.limits.
"""

WIDEST = 0.2
"No measured rounding noise allows more."

OTHER_EXPERTS = 0.01
"""Largest share of other choices that a forward pass may make than the plain model, unless rounding explains more. With
eight blocks of 32 experts of random weights in bf16, rounding changes 1 %.
"""

BY_CHANCE = 2
"Number of other choices that are always allowed: rounding can change as many in a small sample."

MOST_OTHER_EXPERTS = 0.3
"No measured rounding noise allows more other choices."

_SAME = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Limit of the relative difference between two computations of the loss of a dozen targets, by the dtype
of the weights.
"""


@dataclass(frozen=True)
class DocumentCheck:
    """Two documents and padding in one row, of trees with a common beginning, compared with each document alone."""

    backend: str
    "attention backend that was compared"
    logits_difference: float
    "relative difference: norm of the difference over the norm of the plain model's logits"
    loss: float
    "mean of the objective's monitored sum in nats per target over both documents, each in its own micro-batch"
    plain_loss: float
    "the same mean from the plain model's logits, by the objective's plain operators"
    targets: int
    "number of target tokens of both documents"
    leak: float
    "largest change of a hidden state of one document when every token of the other is replaced"
    changed: float
    "largest change in the document that was replaced"
    limits: tuple[int, ...] = ()
    "position limits of the model, such as a sliding window, with documents compared on both sides"
    beyond: float = 0.0
    "largest relative difference of the logits at these limits"
    roundings: float = 0.0
    """largest relative difference that random rounding alone makes to the plain model's logits; 0: not measured, as
    the logits are closer than rounding usually brings them
    """
    beyond_roundings: float = 0.0
    "the same of the documents at the limits: rounding noise grows with the length"
    choices: tuple[int, int] | None = None
    """of the choices of experts, how many our forward pass makes otherwise than the plain model, and all; of several
    calls in a block those that differ most. None: no choices were compared, as in fp32
    """
    experts_rounded: float = 0.0
    "share of the plain model's choices that random rounding changes, 0-1; 0: not measured"

    @property
    def allowed(self) -> float:
        """Return the relative difference of the logits from which on no run starts."""
        return max(REFUSED_FROM, min(APART * self.roundings, WIDEST))

    @property
    def allowed_beyond(self) -> float:
        """Return the same of the logits at the limits."""
        return max(REFUSED_FROM, min(APART * self.beyond_roundings, WIDEST))

    @property
    def other_experts(self) -> float:
        """Return the share of choices that our forward pass makes otherwise, 0-1."""
        return self.choices[0] / self.choices[1] if self.choices else 0.0

    @property
    def allowed_experts(self) -> float:
        """Return the largest share of other choices with which a run starts."""
        return max(OTHER_EXPERTS, min(APART * self.experts_rounded, MOST_OTHER_EXPERTS))

    @property
    def experts_hold(self) -> bool:
        """Return whether no more choices differ than rounding explains."""
        return self.choices is None or self.choices[0] <= BY_CHANCE or self.other_experts <= self.allowed_experts


def check_documents(
    model: ModelWithLoss,
    backend: str,
    device: torch.device,
    layout: Layout | None = None,
    plain: PlainModel | None = None,
    forward: ForwardPass | None = None,
    limit: float = 1.0,
) -> DocumentCheck:
    """Compare the logits of two documents and padding in one row through our forward pass with those of each document
    alone through the plain model, and likewise longer documents at the limits of the model. No document may move when
    others are replaced, in a row that is longer than the tiles of kernels and the chunks of recurrent layers too.

    Sliding windows are shortened below the two documents for this comparison; at the limits they keep their size.
    Layers in float8 multiply in bf16.

    Args:
        backend: attention backend; "sdpa" takes one document a row, so the reference kernel replaces it.
        layout: layout of the run: the longest documents, and which documents are computed together; None: the two
            documents only.
        plain: plain model; None: one without files is made.
        forward: forward pass of the engine; None: the model itself.
        limit: relative difference of the logits from which on rounding noise is measured, at most REFUSED_FROM.

    Raises:
        ConfigError: the logits differ, documents see each other, or the model does not accept our arguments: this
            architecture does something that our attention or head leaves out, or mixes the tokens of a row.
    """
    orig_model, name = model.orig_model, type(model.orig_model).__name__
    limit = min(limit, REFUSED_FROM) if _rounds(orig_model) else REFUSED_FROM
    # A convolution or a recurrent layer carries tokens across documents regardless of the masks.
    mixer = hybrids.mixes_tokens(orig_model)
    if mixer:
        raise ConfigError(f"{name} is not supported: {mixer} carries tokens from one document of a row to the next")
    plain = plain or PlainModel(model, device)
    forward = forward or model
    backend = "reference" if backend == "sdpa" else backend
    try:
        with (
            as_whole(orig_model),
            structure.inference(orig_model),
            structure.inference(plain.orig_model),
            without_sequence_parallel(orig_model),
            float8.products_in_bf16(orig_model, plain.orig_model),
        ):
            with short_windows(orig_model), short_windows(plain.orig_model):
                length = _ROW_LENGTH if layout is None else layout.max_length
                tree = layout is not None and layout.kind == "tree"
                found = _compare(model, forward, plain, backend, length, tree=tree)
            if layout is not None:
                found = _at_limits(model, forward, plain, backend, layout, found, limit)
                if layout.packs and not orig_model.config.is_encoder_decoder:
                    with _rotary_state_kept(orig_model):
                        leak, changed = _among_neighbours(model, forward, backend, device, layout)
                    # np.maximum and np.minimum keep NaN
                    found = replace(found, leak=float(np.maximum(found.leak, leak)))
                    found = replace(found, changed=float(np.minimum(found.changed, changed)))
            if not found.logits_difference < limit or not found.experts_hold:
                with short_windows(plain.orig_model):
                    moved, others = _roundings(plain, _two_documents(model, length))
                found = replace(found, roundings=moved, experts_rounded=max(others, found.experts_rounded))
    # Errors of a model called with unknown arguments; running out of memory says nothing about the model.
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(f"{name} is not supported: {' '.join(str(error).split())[:300]}") from error
    if found.logits_difference < found.allowed and found.beyond < found.allowed_beyond and found.experts_hold:
        # Written so that NaN raises too.
        if not found.leak <= REFUSED_FROM * found.changed:
            raise config_error("documents that see each other", name=name, found=found)
        return found
    if plain.differing:
        raise config_error("weights in memory", differing=first_of(sorted(plain.differing)), found=found)
    if not found.experts_hold:
        raise config_error("other experts", name=name, found=found)
    if not found.logits_difference < found.allowed:
        raise config_error("other forward pass", name=name, found=found)
    words = {"name": name, "limits": first_of(list(map(str, found.limits))), "found": found}
    raise config_error("other forward pass beyond a limit", least=min(found.limits), **words)


def _compare(
    model: ModelWithLoss, forward: ForwardPass, plain: PlainModel, backend: str, length: int, *, tree: bool
) -> DocumentCheck:
    """Compute both sides with the reference kernel or the run's own. `length`: length of texts for an encoder."""
    examples = _two_documents(model, length, tree=tree)
    # The plain side does not use batches: a collation that shifts targets by zero or two would shift both sides.
    (own,) = documents_of(examples, [(0, 1)], plain.device)
    logits, chosen = zip(*(_logits_and_choices(plain, document) for document in own), strict=True)
    theirs = torch.cat(logits)
    batch = _batch(examples, (0, 1), tree=tree).to(plain.device)
    first, second = (document.columns for document in documents(batch))
    compared: Compared = {}
    with _choosing(model.orig_model, batch, chosen, compared):
        hidden = forward.hidden_states(batch, backend)
    ours = _projected(model, hidden[:, torch.cat([first, second])])[0]
    monitored, targets = model.objective.monitored, int(model.objective.divisors(examples).sum())
    # Each document in its own micro-batch, unless they make one tree: the sums must add up to the plain model's.
    sums = []
    for row in [(0, 1)] if tree else [(0,), (1,)]:
        alone = _batch(examples, row, tree=tree).to(plain.device)
        with _choosing(model.orig_model, alone, [chosen[i] for i in row]):
            found = forward.sums(alone, backend).measured[monitored]
        sums.append(structure.from_last(model.orig_model, found))
    expected = model.objective.sums_of_logits(theirs, torch.cat([one.targets for one in own])).measured[monitored]

    # Measure leakage by its effect: with every token of the first document replaced that the second does not share,
    # the second must not change.
    others = first[~torch.isin(first, second)]
    replaced = replace(batch, inputs=_first_replaced(batch, others, structure.vocab_size(model.orig_model)))
    with _choosing(model.orig_model, batch, chosen):
        moved = (forward.hidden_states(replaced, backend) - hidden).float().abs()
    return DocumentCheck(
        backend=backend,
        logits_difference=relative(ours, theirs),
        loss=float(sum(sums)) / targets,
        plain_loss=float(expected) / targets,
        targets=targets,
        leak=float(moved[:, second].max()),
        changed=float(moved[:, others].max()),
        choices=_worst(compared),
    )


def _two_documents(model: ModelWithLoss, length: int, *, tree: bool = False) -> Examples:
    """Return the same two documents in every run, so that the checks of two starts can be compared."""
    ids = np.random.default_rng(0).integers(0, structure.vocab_size(model.orig_model), sum(_SIZES) + 2)
    if tree:
        branch_off(ids, _SIZES[0] + 1)
    return Examples.of(ids, _SIZES, model.kind.made_up_inputs(model.orig_model, len(_SIZES), length))


def branch_off(ids: np.ndarray, second: int, tokens: Sequence[int] | np.ndarray = (0, 1)) -> None:
    """Let two documents, one after the other in ids, share their first COMMON tokens and no more.

    Args:
        second: where the second one begins. tokens: one of these makes the difference.
    """
    ids[second : second + COMMON] = ids[:COMMON]
    ids[second + COMMON] = next(token for token in tokens if token != ids[COMMON])


def _roundings(plain: PlainModel, examples: Examples) -> tuple[float, float]:
    """Return how far random rounding moves the plain model's logits of two documents, and the share of experts that it
    changes; 0.0 in fp32.
    """
    (own,) = documents_of(examples, [(0, 1)], plain.device)
    exact, chosen = zip(*(_logits_and_choices(plain, document) for document in own), strict=True)

    compared: Compared = {}

    def moved() -> torch.Tensor:
        found = []
        for document, choices in zip(own, chosen, strict=True):
            length = len(document.targets)
            with _taking(plain.orig_model, [(torch.arange(length), choices)], (1, length), compared):
                found.append(plain_logits(plain, document))
        return torch.cat(found)

    with random_state_kept():
        draws = []
        for _ in range(DRAWS):
            with rounded_at_random(plain.orig_model):
                draws.append(relative(moved(), torch.cat(exact)))
    differ, of = _worst(compared) or (0, 1)
    return max(draws), differ / of


# ---- experts ---------------------------------------------------------------------------------------------------------

# Two experts of a token whose scores are nearly equal change places by rounding alone, and another expert is another
# function: with 12 layers of random weights in bf16 the logits move by half their norm. So both sides use the plain
# model's choices for the same tokens, and each computes its own weights for them. How many our forward pass would
# choose otherwise is counted. In fp32 each side uses its own choices.

ExpertChoices = dict[tuple[int, int], torch.Tensor]
"(number of a block, of the call in it) -> what a top-k chose for the positions of a document, [L, ..., k]"

Compared = dict[int, list[int]]
"number of the call in a block -> [choices that differ, all]"


class _TopK(TorchFunctionMode):
    """Passes what each top-k over the last dimension chooses in the decoder's blocks through a function."""

    def __init__(
        self, orig_model: PreTrainedModel, decide: Callable[[tuple[int, int], torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._decide = decide
        self._block, self._call = -1, 0
        self._hooks = ExitStack()
        for number, block in enumerate(structure.decoder_blocks(orig_model)):
            hook = block.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            self._hooks.callback(hook.remove)

    def _enter(self, block: int) -> None:
        self._block, self._call = block, 0

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and replace what it chose if it is a top-k."""
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or self._block < 0 or isinstance(found.indices, DTensor):
            return found
        scores = args[0] if args else kwargs["input"]
        if found.indices.shape[:-1] != scores.shape[:-1]:
            return found
        key = (self._block, self._call)
        self._call += 1
        indices = self._decide(key, found.indices)
        if indices is found.indices:
            return found
        return type(found)((scores.gather(-1, indices), indices))


def _rounds(orig_model: PreTrainedModel) -> bool:
    """Return whether the model computes in half precision."""
    return orig_model.dtype in (torch.bfloat16, torch.float16)


def _by_position(indices: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return choices for rows [B, C] as [B C, ..., k]; None: they are not of these rows."""
    if indices.shape[0] == shape[0] * shape[1]:
        return indices
    return indices.flatten(0, 1) if indices.shape[:2] == shape else None


def _logits_and_choices(plain: PlainModel, document: PlainDocument) -> tuple[torch.Tensor, ExpertChoices]:
    """Return the plain model's logits of a document, and what its routers chose."""
    noting, noted = _noting(plain.orig_model, len(document.targets))
    with noting:
        return plain_logits(plain, document), noted


def _noting(orig_model: PreTrainedModel, length: int) -> tuple[_TopK, ExpertChoices]:
    """Return a context that records the choices of routers for a row of `length` positions, and the record."""
    noted: ExpertChoices = {}

    def note(key: tuple[int, int], indices: torch.Tensor) -> torch.Tensor:
        if (own := _by_position(indices, (1, length))) is not None:
            noted[key] = own
        return indices

    return _TopK(orig_model, note), noted


def _choosing(
    orig_model: PreTrainedModel, batch: Batch, chosen: Sequence[ExpertChoices], compared: Compared | None = None
) -> AbstractContextManager[object]:
    """Let routers choose within the context what was noted of each document of a batch, at its places; in fp32
    they choose for themselves."""
    if not _rounds(orig_model):
        return nullcontext()
    rows, columns = batch.doc_ids.shape
    places = [document.row * columns + document.columns.cpu() for document in documents(batch)]
    return _taking(orig_model, list(zip(places, chosen, strict=True)), (rows, columns), compared)


def _taking(
    orig_model: PreTrainedModel,
    places: Sequence[tuple[torch.Tensor, ExpertChoices]],
    shape: tuple[int, int],
    compared: Compared | None = None,
) -> _TopK:
    """Let routers choose within the context what was noted for these positions of rows [B, C]. Passes over other rows
    than these, such as an engine's that takes documents one by one, choose for themselves.

    Args:
        compared: counts the choices that would differ.
    """

    def take(key: tuple[int, int], indices: torch.Tensor) -> torch.Tensor:
        own = _by_position(indices, shape)
        if own is None:
            return indices
        taken = own.clone()
        for place, choices in places:
            if key not in choices or choices[key].shape[1:] != own.shape[1:]:
                continue
            there, given = place.to(own.device), choices[key]
            if compared is not None:
                other = (own[there][..., None] != given[..., None, :]).all(-1)
                counts = compared.setdefault(key[1], [0, 0])
                counts[0] += int(other.sum())
                counts[1] += other.numel()
            taken[there] = given
        return taken.view(indices.shape)

    return _TopK(orig_model, take)


def _worst(compared: Compared) -> tuple[int, int] | None:
    """Return (choices that differ, all) of the call in which most differ."""
    differ, of = max(compared.values(), key=lambda counts: counts[0] / counts[1], default=(0, 0))
    return (differ, of) if of else None


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the second tensor."""
    return float((ours - theirs).norm() / theirs.norm())


def limits_of(orig_model: PreTrainedModel) -> list[int]:
    """Return the numbers of positions beyond which the model computes differently: its sliding window, its attention
    chunk, the positions with one temperature, and the length at which rotary factors change (longrope, dynamic).
    """
    config = orig_model.config.get_text_config()
    found = [getattr(config, "sliding_window", None)] if windows(orig_model.config) else []
    found.append(attention_chunk(config))
    found.append(getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", None) else None)
    rope = getattr(config, "rope_parameters", None) or {}
    # One value for all layers, or one for each type of layer.
    for one in [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]:
        if one.get("rope_type") in ("longrope", "dynamic") or one.get("llama_4_scaling_beta"):
            longest = getattr(config, "max_position_embeddings", None)
            found.append(one.get("original_max_position_embeddings") or longest)
    return sorted({limit for limit in found if isinstance(limit, int) and limit > 0})


def _at_limits(
    model: ModelWithLoss,
    forward: ForwardPass,
    plain: PlainModel,
    backend: str,
    layout: Layout,
    found: DocumentCheck,
    limit: float,
) -> DocumentCheck:
    """Add the comparison at the limits of the model: a document that ends after a limit next to one that ends before
    it, if the run's rows are long enough.
    """
    rows, row_length = layout.shapes[-1]
    # The most positions of an attention call, which may be more than those of any document: trees, and rounding.
    longest = min(layout.batch_shape(rows, row_length).max_doc_length, layout.max_length)
    limits = [limit for limit in limits_of(model.orig_model) if limit < longest]
    if model.orig_model.config.is_encoder_decoder or not limits:
        return found
    differences = []
    pairs = []
    compared: Compared = {}
    for positions in limits:
        sizes = (min(positions + _BEYOND, longest), _SIZES[1])
        ids = np.random.default_rng(positions).integers(0, structure.vocab_size(model.orig_model), sum(sizes) + 2)
        tree = layout.kind == "tree"
        if tree:
            branch_off(ids, sizes[0] + 1)
        examples = Examples.of(ids, sizes)
        pairs.append(examples)
        # Together as in a step: in one row, in two rows of a micro-batch, or alone.
        if layout.packs and sum(sizes) <= row_length:
            batches: list[list[tuple[int, ...]]] = [[(0, 1)]]
        else:
            batches = [[(0,), (1,)]] if rows > 1 else [[(0,)], [(1,)]]
        shape = BatchShape(sum(sizes), max_docs=2 * len(sizes) + 2, max_doc_length=sum(sizes), tree=tree)
        (alone,) = documents_of(examples, [(0, 1)], plain.device)
        with _last_positions(plain.orig_model, 2 * _BEYOND):
            theirs, chosen = zip(*(_logits_and_choices(plain, document) for document in alone), strict=True)
        own: list[torch.Tensor] = []
        with _rotary_state_kept(model.orig_model):
            for batch_rows in batches:
                batch = collate(examples, tuple(batch_rows), shape).to(plain.device)
                with _choosing(model.orig_model, batch, [chosen[i] for row in batch_rows for i in row], compared):
                    hidden = forward.hidden_states(batch, backend)
                for document in documents(batch):
                    last = hidden[document.row, document.columns[-2 * _BEYOND :]][None]
                    own.append(_projected(model, last)[0])
        differences += [relative(own[number], theirs[number]) for number in (0, 1)]
    found = replace(found, limits=tuple(limits), beyond=float(np.max(differences)))  # propagates NaN
    choices = _worst({0: list(found.choices or (0, 1)), 1: list(_worst(compared) or (0, 1))})
    found = replace(found, choices=choices if compared else found.choices)
    if not found.beyond < limit or not found.experts_hold:
        with _last_positions(plain.orig_model, 2 * _BEYOND):
            noise = [_roundings(plain, examples) for examples in pairs]
        moved, changed = (max(values) for values in zip(*noise, strict=True))
        found = replace(found, beyond_roundings=moved, experts_rounded=changed)
    return found


def _among_neighbours(
    model: ModelWithLoss, forward: ForwardPass, backend: str, device: torch.device, layout: Layout
) -> tuple[float, float]:
    """Return the largest change of documents in a longer row when the others are replaced, and the smallest of those:
    first one half of the row, then every second document. Long documents, as long as the run's and up to _LONG,
    alternate with short ones.
    """
    orig_model = model.orig_model
    short = _SIZES[1]
    longest = min(_LONG, layout.max_length, structure.positions(orig_model) or _LONG)
    half = 2 * -(-_LONG // (longest + short))
    sizes = [longest, short] * half
    total = -(-sum(sizes) // _ROW_LENGTH) * _ROW_LENGTH  # with padding, as rows have it
    ids = np.random.default_rng(1).integers(0, structure.vocab_size(orig_model), sum(sizes) + len(sizes))
    shape = BatchShape(total, max_docs=2 * len(sizes) + 2, max_doc_length=total, tree=layout.kind == "tree")
    batch = collate(Examples.of(ids, sizes), (tuple(range(len(sizes))),), shape).to(device)
    noting, chosen = _noting(orig_model, total)
    with noting:
        hidden = forward.hidden_states(batch, backend)
    columns = [document.columns for document in documents(batch)]
    halves = columns[:half], columns[half:]
    leaks = []
    changes = []
    for parts in (halves, halves[::-1], (columns[::2], columns[1::2]), (columns[1::2], columns[::2])):
        whole, kept = map(torch.cat, parts)
        replaced = whole[~torch.isin(whole, kept)]  # documents of a tree may share positions
        inputs = _first_replaced(batch, replaced, structure.vocab_size(orig_model))
        with _taking(orig_model, [(torch.arange(total), chosen)], (1, total)):
            moved = (forward.hidden_states(replace(batch, inputs=inputs), backend) - hidden).float().abs()
        leaks.append(float(moved[:, kept].max()))
        changes.append(float(moved[:, replaced].max()))
    return float(np.max(leaks)), float(np.min(changes))  # both keep NaN


def _last_positions(orig_model: PreTrainedModel, count: int) -> AbstractContextManager[object]:
    """Make the head project only the last positions within the context: the logits of a long document take GiB."""
    return structure.output_projection(orig_model).register_forward_pre_hook(lambda _, given: (given[0][:, -count:],))


@contextmanager
def _rotary_state_kept(orig_model: PreTrainedModel) -> Iterator[None]:
    """Restore after the context the state that rotary embeddings keep of the longest document so far."""
    rotary = [module for module in orig_model.modules() if any("inv_freq" in name for name in module._buffers)]
    # Private: transformers registers the buffer again when it changes, and keeps the length next to it.
    before = [(module, dict(module._buffers), dict(vars(module))) for module in rotary]
    try:
        yield
    finally:
        for module, buffers, attributes in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            vars(module).update(attributes)


def _first_replaced(batch: Batch, columns: torch.Tensor, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch with the tokens of these columns and the first encoder input replaced."""
    found = {name: value.clone() for name, value in batch.inputs.items()}
    found["input_ids"][:, columns] = (found["input_ids"][:, columns] + 1) % vocabulary
    for name in found.keys() - set(OF_TOKENS):
        found[name][0] = found[name][0].flip(-1)
    return found


def _batch(examples: Examples, row: tuple[int, ...], *, tree: bool) -> Batch:
    """Return these documents in one row of the fixed length."""
    longest = sum(_SIZES) if tree else max(_SIZES)
    return collate(examples, (row,), BatchShape(_ROW_LENGTH, max_docs=3, max_doc_length=longest, tree=tree))


def _projected(model: ModelWithLoss, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden states [B, T, H] by the run's head: fp32 [B, T, V]."""
    projection, softcap = structure.output_projection(model.orig_model), structure.logit_softcap(model.orig_model)
    logits = structure.logit_scale(model.orig_model) * projection(hidden).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def document_checks(
    check: DocumentCheck, dtype: torch.dtype, backend: str, layout_kind: str = "packed", logits_limit: float = 1e-4
) -> list[Check]:
    """Return the checks of two documents in one row from before the first step: logits, loss, isolation.

    Args:
        dtype: dtype of the weights.
        backend: attention backend of the run. If `check` had to use another one, its isolation is unknown.
        layout_kind: layout of the run; in every kind but packed and tree a row holds one document.
        logits_limit: largest relative difference of the logits, from gradients.limits, unless
            the measured rounding noise explains more.
    """
    stand_in = "" if check.backend == backend else f" ({check.backend} stands in for {backend})"
    # Judged relative to the changed document: if that does not move either, nothing is shown.
    isolated = check.leak <= _SAME.get(dtype, _SAME[torch.float32]) * check.changed and check.changed > 0
    moves = f"the other document moves by {check.leak:.1e}, the changed one by {check.changed:.1e}{stand_in}"
    alone = bool(stand_in) and isolated and layout_kind not in ("packed", "tree")
    noise = f" (rounding noise alone: {check.roundings:.2e})" if check.roundings else ""
    experts = "" if check.choices is None else f"; {check.other_experts:.1%} of the experts chosen otherwise"
    limit = max(logits_limit, min(APART * check.roundings, WIDEST))
    beyond_limit = max(logits_limit, min(APART * check.beyond_roundings, WIDEST))
    beyond = expected = ""
    if check.limits:
        beyond = f"; {check.beyond:.2e} around {', '.join(map(str, check.limits))} positions"
        beyond += f" (rounding noise alone: {check.beyond_roundings:.2e})" if check.beyond_roundings else ""
        expected = f", {beyond_limit:.1e} there" if beyond_limit != limit else ""
    return [
        Check(
            "Same logits as the plain model",
            check.logits_difference < limit and check.beyond < beyond_limit and check.experts_hold,
            f"relative difference {check.logits_difference:.2e}{noise}{beyond}{experts}",
            f"below {limit:.1e}{expected}",
            "two documents and padding in one row through this run's attention and head, each alone through a model "
            "that transformers made from the start files; longer documents on both sides of the config's limits; "
            "in half precision with the experts that the plain model chose; layers in float8 multiply in bf16 here",
        ),
        loss_check(check.loss, check.plain_loss, check.targets, dtype),
        Check(
            "Documents in a row do not see each other",
            # If another kernel isolates, that says nothing about the run's own; if it leaks, the masks are
            # wrong for both.
            None if isolated and stand_in else isolated,
            does_not_apply("each row holds one document") if alone else moves,
            "no change beyond rounding",
            "every token of one document is replaced that the other does not share, then half of the documents of a "
            f"row, of up to {_LONG} positions each; largest change of the others' hidden states",
        ),
    ]


def loss_check(loss: float, plain_loss: float, targets: int, dtype: torch.dtype) -> Check:
    """Return the check of the loss of a few documents in nats per target. `dtype`: dtype of the weights."""
    limit = _SAME.get(dtype, _SAME[torch.float32])
    off = abs(loss - plain_loss) / max(abs(plain_loss), 1e-9)
    found = f"{loss:.5f} against {plain_loss:.5f} nats over {targets} targets"
    how = "a few documents through the run's rows and loss, sums over all targets, against the plain model's mean"
    return Check("Loss equals plain cross entropy", off < limit, found, f"equal to {limit:.0e}", how)
