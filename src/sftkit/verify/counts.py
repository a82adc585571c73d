"""Check the logged values of a run independently: validation loss and bits per byte of a few documents, learning
rates, the FLOPs of a step, and the counts of the first window.
"""

import copy
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerBase

from sftkit.compile.contract import inputs_with_gradient
from sftkit.config.schema import OptimConfig
from sftkit.data.batches.loader import StepBatches
from sftkit.data.batches.pack import Layout
from sftkit.data.types import EncoderInputs, Examples
from sftkit.engine.reference import documents_of, plain_logits
from sftkit.evals.suite import validate
from sftkit.models import hybrids, load, trained
from sftkit.models.structure import Work, attention_windows, decoder_blocks, inference, positions, train_flops
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import implementation
from sftkit.optim.protocol import learning_rate
from sftkit.parallel.tensor import without_sequence_parallel
from sftkit.parallel.wrap import as_whole, reshard
from sftkit.runtime.hardware import peak_flops
from sftkit.runtime.start import Runtime, replaced
from sftkit.tracking.names import Check, StepOutcome

DOCUMENTS = 4
"Maximum number of documents."
LONGEST = 1024
"Longer documents are skipped if there are shorter ones."
SAME = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"Limit of the relative difference of a mean over few targets, by the dtype of the weights."


def some_documents(examples: Examples) -> Examples:
    """Return the first few documents that are short enough, as separate examples."""
    lengths = examples.lengths
    fitting = np.flatnonzero(lengths <= max(LONGEST, int(lengths.min())))[:DOCUMENTS]
    ids, is_target = examples.gather(fitting)
    encoded = examples.encoder_inputs
    inputs = None if encoded is None else EncoderInputs(encoded.arrays, np.asarray(encoded.index[fitting]))
    return replace(
        Examples.of(ids, lengths[fitting], inputs, is_target=is_target),
        num_bytes=np.asarray(examples.num_bytes[fitting]),
        encoder_sources=[examples.encoder_sources[i] for i in fitting] if examples.encoder_sources else (),
    )


def validation_check(
    model: ModelWithLoss,
    validation: Mapping[str, Examples],
    layout: Layout,
    tokenizer: PreTrainedTokenizerBase,
    rt: Runtime,
) -> list[Check]:
    """Return the check of val/loss and val/bpb; empty without validation data. Every rank calls it.

    A few documents go through the run's validation. The reference computes each one alone through transformers: the
    base-2 logarithm of the probability of each target, and the bytes of the decoded targets.
    """
    chosen = next((examples for examples in validation.values() if len(examples)), None)
    if chosen is None:
        return []
    examples, orig_model = some_documents(chosen), model.orig_model
    with as_whole(orig_model):
        found = validate(model, {"": examples}, layout, int(tokenizer.pad_token_id or 0), rt)
    bits = targets = 0.0
    try:
        # Every rank computes all of them: shards are gathered, stages pass their results on.
        with as_whole(orig_model), inference(orig_model), without_sequence_parallel(orig_model):
            for (document,) in documents_of(examples, [(i,) for i in range(len(examples))], rt.device):
                learned = document.targets >= 0
                chances = plain_logits(model, document)[learned].log_softmax(-1)
                picked = chances.gather(1, document.targets[learned][:, None]).double()
                bits -= float(picked.sum()) / float(np.log(2.0))
                targets += int(learned.sum())
    finally:
        # A forward pass without a backward pass leaves gathered weights behind.
        reshard(orig_model)
    num_bytes = 0
    for i in range(len(examples)):
        ids = examples[i].ids[examples[i].is_target]
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        num_bytes += len(str(text).encode("utf-8", errors="replace"))
    per_byte = bits / num_bytes if num_bytes else None
    by_hand = {"val/loss": bits * float(np.log(2.0)) / max(targets, 1), "val/bpb": per_byte}
    limit = SAME.get(orig_model.dtype, SAME[torch.bfloat16])
    same, words = True, []
    for name, value in by_hand.items():
        logged = found[name]
        equal = logged == value if logged is None or value is None else abs(logged - value) <= limit * abs(value)
        same = same and equal
        words.append(f"{name} {_number(logged)} against {_number(value)}")
    how = (
        "documents of the validation data, each alone through transformers: log2 of the probability of each target, "
        "by the UTF-8 bytes of the decoded targets"
    )
    text = f"{'; '.join(words)}, {len(examples)} documents"
    return [Check("Validation loss and bits per byte, by hand", same, text, f"equal to {limit:.0e}", how)]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.5f}"


RATES = 2000
"Maximum number of steps whose learning rate is compared."
SAME_RATE, SAME_COUNT, SAME_LOSS, SAME_FLOPS = 1e-9, 1e-6, 1e-4, 1e-3
FLOPS_POSITIONS = 64
"Positions of the document whose FLOPs are counted."


def plain_rates(steps: np.ndarray, total_steps: int, optim: OptimConfig) -> np.ndarray:
    """Return the learning rates of some steps, counted from 1, as docs/optimizers.md defines the schedules: float64.

    Shares of the steps use the decimal numbers in the recipe: warm-up is rounded up to whole steps, the decay of wsd
    to the nearest step.
    """
    warm_up = int((Decimal(str(optim.warmup_ratio)) * total_steps).to_integral_value(ROUND_CEILING))
    decay = total_steps - warm_up
    if optim.schedule == "wsd":
        decay = max(1, int((Decimal(str(optim.decay_ratio)) * total_steps).to_integral_value(ROUND_HALF_EVEN)))
    # The first step of the decay still has the full rate; at the last, one step's share of it is left.
    done = np.clip((steps - (total_steps - decay) - 1.0) / max(decay, 1), 0.0, 1.0)
    shapes = {"cosine": np.cos(np.pi / 2 * done) ** 2, "constant": np.ones_like(done)}
    left = shapes.get(optim.schedule, 1.0 - done)
    rates = optim.lr * (left + optim.min_lr_ratio * (1.0 - left))
    return np.where(steps <= warm_up, optim.lr * steps / max(warm_up, 1), rates)


def rates_check(total_steps: int, optim: OptimConfig) -> Check:
    """Return the check of the learning rates of the whole run, including those around each change of the schedule."""
    edges = [0.0, optim.warmup_ratio, 1.0 - optim.decay_ratio, 1.0]
    near = [round(edge * total_steps) + offset for edge in edges for offset in range(-2, 4)]
    spread = np.linspace(1, total_steps, min(total_steps, RATES))
    chosen = np.unique(np.clip([*near, *spread], 1, total_steps).astype(int))
    expected = plain_rates(chosen, total_steps, optim)
    found = np.array([learning_rate(int(step), total_steps, optim) for step in chosen])
    off = np.abs(found - expected) / optim.lr
    worst = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
    words = f"{len(chosen):,} of {total_steps:,} steps, {off[worst]:.1e} off at most"
    if not (same := bool(off[worst] <= SAME_RATE)):
        words += f" (step {chosen[worst]:,}: {found[worst]:.3g}, not {expected[worst]:.3g})"
    how = f"{optim.schedule} with warm-up as logged in train/lr, against the formula in docs/optimizers.md in numpy"
    return Check("Learning rates follow the schedule", same, words, f"equal to {SAME_RATE:.0e} of optim.lr", how)


def convolution(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return a causal convolution of [B, C, T], without a bias and an activation, as a product for each position and
    channel. torch counts the gradient of a convolution's weights for every pair of channels.
    """
    size = weight.shape[1]
    return (nn.functional.pad(x, (size - 1, 0)).unfold(-1, size, 1) @ weight[..., None])[..., 0]


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Return the gated delta rule of [B, T, N, K or V] as it is defined, one position after another."""
    query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
    state, out = value.new_zeros(key.shape[-1], value.shape[-1]), []
    vectors, numbers = (query / math.sqrt(query.shape[-1]), key, value), (g.exp(), beta)
    positions = *(x[..., None, :].unbind(1) for x in vectors), *(x[..., None, None].unbind(1) for x in numbers)
    for q, k, v, kept, written in zip(*positions, strict=True):
        state = state * kept
        state = state + k.mT @ ((v - k @ state) * written)
        out.append(q @ state)
    return torch.stack(out, 1)[..., 0, :], None


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any) -> Tensor:
    """Return Mamba2's recurrence of [B, T, N, P] as it is defined, one position after another."""
    steps = nn.functional.softplus(dt + given["dt_bias"]).clamp(*given["dt_limit"])[..., None]
    B, C = (vectors.repeat_interleave(x.shape[2] // vectors.shape[2], 2) for vectors in (B, C))
    state, out = torch.zeros(()), []
    positions = ((A[:, None] * steps)[..., None].exp(), (x * steps)[..., None], B[..., None, :], C[..., None])
    for kept, new, b, c in zip(*(values.unbind(1) for values in positions), strict=True):
        state = state * kept + new @ b
        out.append(state @ c)
    return torch.stack(out, 1)[..., 0] + given["D"][:, None] * x


def apart(rule: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return a rule of every position of [B, T, ...] alone: as many products as of one after another, in one call."""

    def alone(value: Any) -> Any:
        return value.flatten(0, 1)[:, None] if isinstance(value, Tensor) and value.ndim > 2 else value

    found = rule(*map(alone, given), **{name: alone(value) for name, value in named.items()})
    out = (found[0] if isinstance(found, tuple) else found)[:, 0].unflatten(0, given[0].shape[:2])
    return (out, None) if isinstance(found, tuple) else out


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": partial(apart, delta_rule),
    "mamba2_chunk_scan": partial(apart, scan),
    "causal_conv1d_fn": convolution,
}
"""By the function of transformers that recurrent layers call: its definition in products that torch counts.
transformers computes further products over chunks of positions, or sums that torch does not count.
"""


def flops_check(model: ModelWithLoss) -> Check:
    """Check the FLOPs counted in train/flops and the MFU against torch's own counter: a forward pass of transformers
    on the meta device, which computes nothing.
    """
    name, expected = "FLOPs are those that torch counts", f"equal to {SAME_FLOPS:.1%}, apart from norms and biases"
    how = f"a document of {FLOPS_POSITIONS} positions through transformers on the meta device, torch.utils.flop_counter"
    orig_model = model.orig_model
    kinds, adapters = attention_windows(orig_model), trained.adapters_of(orig_model)
    odd = ["an encoder"] * orig_model.config.is_encoder_decoder
    # Their only implementation computes every expert for every token, or reads which were chosen.
    if not orig_model._can_set_experts_implementation():
        odd += [f"experts in {t}" for t in {type(m).__name__ for m in orig_model.modules()} if t.endswith("Experts")]
    odd += [hybrids.mixes_tokens(orig_model) or "unknown attention"] * (kinds is None)
    if adapters is not None:
        # DoRA's norms of rows do not depend on positions, and products of experts pad their factors.
        odd += ["adapters of the method dora"] * (adapters.config.method == "dora")
        padded = adapters.config.rank % 8 > 0 and any(name.endswith("experts") for name in adapters.modules)
        odd += ["adapters of experts whose rank is no multiple of 8"] * padded
    odd += ["adapters of several ranks"] * (len({m.config.rank for m in trained.members_in(orig_model)}) > 1)
    if kinds is None or odd:
        return Check(name, None, f"not counted for {odd[0]}", expected, how)
    frozen = [name for name, p in orig_model.named_parameters() if not p.requires_grad]
    length = min(FLOPS_POSITIONS, positions(orig_model) or FLOPS_POSITIONS)
    try:
        with torch.device("meta"), torch.set_grad_enabled(bool(frozen)), ExitStack() as stack:
            plain = load.from_config(copy.deepcopy(orig_model.config), torch.float32).eval()
            plain.tie_weights()
            # With shapes that do not depend on which experts the routers choose: meta has no values.
            if plain._can_set_experts_implementation():
                plain.set_experts_implementation("batched_mm")
            for module in {sys.modules[layer.forward.__module__] for _, layer, _ in hybrids.mixers(plain)}:
                for function in DEFINITIONS.keys() & vars(module):
                    stack.enter_context(replaced(module, function, DEFINITIONS[function]))
            if adapters is not None:
                from sftkit.models.adapters import add_adapters

                add_adapters(plain, adapters)
            for parameter in frozen:
                plain.get_parameter(parameter).requires_grad = False
            inputs_with_gradient(plain, [])
            # If given a mask, transformers makes none itself, which would read numbers.
            mask = torch.zeros(1, 1, length, length)
            of_layers = set(getattr(orig_model.config.get_text_config(), "layer_types", None) or ())
            masks = dict.fromkeys((*of_layers, "full_attention"), mask) | {"linear_attention": None, "conv": None}
            ids, at = torch.zeros(1, length, dtype=torch.long), torch.arange(length)[None]
            seen = masks if of_layers - {"full_attention"} else mask
            # Of alike blocks two and one are counted: the difference is each further one. Tracing all takes seconds.
            blocks = decoder_blocks(plain)
            lists = [m for m in plain.modules() if isinstance(m, nn.ModuleList) and [*m] == blocks]
            kinds_of_blocks = {tuple((n, p.shape, p.requires_grad) for n, p in b.named_parameters()) for b in blocks}
            alike = len(lists) == len(kinds_of_blocks) == 1 and len(blocks) > 2
            # Counted here like matrices, by torch not at all.
            others = sum(p.numel() for n, p in plain.named_parameters() if p.ndim < 2 or n.endswith("bias"))
            torchs = []
            for kept in (2, 1) if alike else (len(blocks),):
                if alike:
                    del lists[0][kept:]
                counter = FlopCounterMode(display=False)
                with implementation(plain, "eager"), counter:
                    # In a step only positions with a target have logits: here one of them.
                    out = plain(input_ids=ids, attention_mask=seen, position_ids=at, use_cache=False, logits_to_keep=1)
                    if frozen:
                        out.logits.sum().backward()
                torchs.append(counter.get_total_flops())
    # The architecture reads a number from a tensor, which the meta device does not have.
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return Check(name, None, f"not counted: {' '.join(str(error).split())[:120]}", expected, how)
    # A plain pass computes full squares of scores; the forward pass is a third of a step, unless weights are frozen.
    pairs = sum(kinds.values()) * length**2
    ours = train_flops(orig_model, Work(tokens=length, targets=1, layer_pairs=pairs)) / (1 if frozen else 3)
    total = torchs[-1] + (torchs[0] - torchs[-1]) * (len(blocks) - 1.0)
    found = f"{ours:.5g} against {total:.5g} of {'both passes' if frozen else 'a forward pass'}"
    # The first trained block may begin with a projection, whose input needs no gradient, but counts as if it did.
    limit = SAME_FLOPS * total * (10 if frozen else 1) + (6 if frozen else 2) * others * length
    return Check(name, abs(ours - total) <= limit, found, expected, how)


class FirstWindow:
    """Count the first logged steps from the documents themselves. Every rank has an instance and calls
    the same methods.
    """

    def __init__(self, examples: Examples, rt: Runtime, model: ModelWithLoss, start_step: int, every: int) -> None:
        """Begin to count.

        Args:
            start_step: step of this start. In the middle of a window the first line includes steps of an earlier
                start, so the second line is compared.
            every: value of log.every.
        """
        self._examples, self._rt, self._model = examples, rt, model
        self._waits, self._from_start = start_step % every != 0, start_step == 0
        kinds = None if examples.encoder_inputs is not None else attention_windows(model.orig_model)
        self._kinds = kinds if rt.topology.stages == 1 else None
        "layers by what their queries see; None: their work is not counted"
        self.done = False
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._targets = self._positions = self._pairs = 0
        self._unique = self._again = self._shared_pairs = 0
        self._losses: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def add(self, step_batches: StepBatches, outcome: StepOutcome) -> None:
        """Count a step."""
        if self.done:
            return
        self._steps += 1
        targets = 0
        for number in step_batches.documents:
            document = self._examples[number]
            self._tokens += len(document.ids) - 1
            targets += int(np.count_nonzero(document.is_target[1:]))
            self._pairs += self._pairs_of(len(document.ids) - 1)
        self._targets += targets
        # Positions that documents of a tree share are computed once. The plan knows them for all ranks.
        self._unique += sum(batch.num_tokens for batch in step_batches.micro_batches)
        trees = [batch for batch in step_batches.micro_batches if batch.edge_weights is not None]
        self._again += sum(batch.num_targets - batch.num_edges for batch in trees)
        self._shared_pairs += sum(map(self._pairs_of, step_batches.document_shared))
        # Ranks that share rows each hold a part of every row.
        shapes = [batch.shape for batch in step_batches.micro_batches]
        self._positions += sum(rows * columns for rows, columns in shapes) * self._rt.topology.ranks_per_row
        loss = outcome.sums[self._model.objective.monitored].detach().clone()
        self._losses.append((loss, outcome.flags.skipped, targets))

    def _pairs_of(self, positions: int) -> int:
        """Return the (query, key) pairs of so many positions of a document, summed over layers."""
        seen = np.arange(1, positions + 1)  # keys of each query, its own position included
        pairs = 0
        for (keys, chunked), layers in (self._kinds or {}).items():
            of_query = seen if keys is None else (seen - 1) % keys + 1 if chunked else np.minimum(seen, keys)
            pairs += layers * int(of_query.sum())
        return pairs

    def check(self, metrics: Mapping[str, float | None]) -> list[Check]:
        """Return the check of the line just logged; empty if it is not compared. Every rank calls it."""
        if self.done:
            return []
        if self._waits:
            self._waits = False
            self._reset()
            return []
        self.done = True
        together = self._rt.topology.ranks_per_row * self._rt.topology.stages
        kept = [(loss, targets) for loss, skipped, targets in self._losses if not float(skipped) > 0]
        device = self._rt.device
        counts = (self._tokens, self._unique, self._targets, self._again, self._positions, self._pairs)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        own = torch.tensor([*counts, sum(targets for _, targets in kept)], dtype=dtype, device=device)
        tokens, unique, targets, again, laid_out, pairs, learned = (self._rt.sum(own) / together).tolist()
        pairs -= self._shared_pairs
        nats = float(self._rt.sum(torch.stack([loss.to(own) for loss, _ in kept]).sum())) if kept else math.nan
        seconds = (metrics["perf/step_seconds"] or 0.0) * self._steps
        expected = {
            "data/target_pct": 100.0 * targets / max(tokens, 1),
            "data/padding_pct": 100.0 - 100.0 * unique / max(laid_out, 1),
            "perf/tok_per_sec": tokens / seconds,
            "perf/unique_tok_per_sec": unique / seconds,
            "perf/target_tok_per_sec": targets / seconds,
            "perf/tok_per_sec_per_gpu": tokens / seconds / self._rt.world_size,
            "train/loss": nats / learned if learned else math.nan,
            "train/tokens": tokens if self._from_start else math.nan,
        }
        if self._kinds is not None:
            flops = train_flops(self._model.orig_model, Work(round(unique), round(targets - again), round(pairs)))
            expected["train/flops"] = flops if self._from_start else math.nan
            if peak := peak_flops(device):
                expected["perf/mfu"] = flops / seconds / (peak * self._rt.world_size)
        wrong = []
        for name, value in expected.items():
            limit = SAME_LOSS if name == "train/loss" else SAME_COUNT
            logged = metrics.get(name)
            if logged is not None and not math.isnan(value) and not abs(logged - value) <= limit * abs(value) + 1e-9:
                wrong.append(f"{name} is {logged:.6g}, not {value:.6g}")
        counted = f"{tokens:,.0f} tokens, {targets:,.0f} targets and {laid_out:,.0f} positions in {self._steps:,} steps"
        how = "ids and masks of the documents of the first logged steps, and the sum of their own losses"
        found = "; ".join(wrong or [counted])
        return [Check("Logged counts are those of the documents", not wrong, found, "equal", how)]
