"""Settings that would make a run fit: single ones, largest saving first, and the combination that fits and changes
least. The error of a GPU that ran out of memory names those that save most.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sftkit.config.commands import install
from sftkit.config.schema import CompileConfig, DataConfig, OptimConfig
from sftkit.config.tables import FALLBACK, OPTIMIZERS
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout, largest_divisor
from sftkit.errors import ConfigError, hint
from sftkit.memory.estimate import BUDGETS, GIB, SHARDINGS, EstimateInputs, estimate, gib
from sftkit.memory.plan import MemoryPlan, automatic_optimizer, fits, is_installed, smaller_optimizers


class Remedy(NamedTuple):
    """A setting that would save memory."""

    text: str
    saved_bytes: int
    "bytes saved by its best value"
    on_resume: tuple[str, ...]
    "values of the setting that a resumed run may use"


Option = tuple[str, EstimateInputs]
"A setting as typed on the command line, and the run with it."


def remedies(
    plan: MemoryPlan, layout: Layout, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> list[Remedy]:
    """Return the unused settings that would lower the estimated peak, largest saving first.

    A suggestion may have several values of a setting; the one that saves most counts.
    """
    if plan.setup is None or plan.estimate is None:
        return []
    s = replace(plan.setup, layout=layout)
    ways = []
    for options in _unused(s, data, compile, optim):
        saved = [(text, plan.estimate.total - estimate(after).total, after) for text, after in options]
        # A saving below the last printed digit (0.1 GiB after rounding) is not worth suggesting.
        saved = [one for one in saved if one[1] >= 0.05 * GIB]
        if saved:
            more = "".join(f", {text} {gib(n)}" for text, n, _ in saved[1:])
            resumable = tuple(text for text, _, after in saved if _resumed_parts(after) == _resumed_parts(s))
            most = max(n for _, n, _ in saved)
            ways.append(Remedy(f"{saved[0][0]} saves {gib(saved[0][1])}{more}", most, resumable))
    return sorted(ways, key=lambda remedy: -remedy.saved_bytes)


class Combination(NamedTuple):
    """Settings that fit together."""

    settings: tuple[str, ...]
    "as typed on the command line; more GPUs as a layout and their number"
    peak_bytes: int


PRICES = {
    **dict.fromkeys(("loss.chunk_tokens", "train.pipeline_schedule", "train.micro_batch_size"), 1),
    **dict.fromkeys(("data.row_length", "train.memory=balanced", "compile.activation_memory_budget"), 2),
    **dict.fromkeys(("train.precision", "optim.name", "adapter.base", "train.memory=low"), 4),
    "data.max_length": 9,
    "accelerate_configs": 12,
    "train.engine": 12,
}
"""What a setting costs, by how it begins: 1 hardly any speed, 2 some speed, 4 more of it or other rounding, 9 the ends
of documents, 12 twice the GPUs. Of the combinations that fit, the cheapest is suggested."""
LEAST_ROW = 256
"Positions of the shortest row that is suggested."


def combination(
    s: EstimateInputs, total_bytes: int, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> Combination | None:
    """Return the settings with which a run is estimated to fit, and which change least; None: none do.

    Args:
        s: the run as it is, which does not fit.
        total_bytes: memory of each GPU.
    """
    queue: list[tuple[int, int, dict[str, str], EstimateInputs]] = [(0, 0, {}, s)]
    seen: set[tuple[str, ...]] = set()
    pushed = 0
    while queue:
        price, _, chosen, s = heapq.heappop(queue)
        settings = tuple(chosen.values())
        if (state := tuple(sorted(settings))) in seen:
            continue
        seen.add(state)
        if fits(found := estimate(s), total_bytes):
            return Combination(settings, found.total)
        # A name that is chosen leaves nothing to auto.
        own_optim = replace(optim, name=s.optimizer) if "optim.name" in chosen else optim
        own_data = replace(data, row_length=s.layout.row_lengths[-1]) if "data.row_length" in chosen else data
        for text, after in itertools.chain.from_iterable(_unused(s, own_data, compile, own_optim)):
            if after.layout.row_lengths[-1] < min(LEAST_ROW, s.layout.row_lengths[-1]):
                continue
            parts = re.split(r" and | (?=data\.)", text)
            keys = [part.partition("=")[0] if "=" in part else "GPUs" for part in parts]
            cost = next(cost for start, cost in PRICES.items() if text.startswith(start))
            if "GPUs" in keys and after.topology.world_size == s.topology.world_size:
                cost = 2  # another layout of the same GPUs
            pushed += 1
            heapq.heappush(queue, (price + cost, pushed, chosen | dict(zip(keys, parts, strict=True)), after))
    return None


def fitting_advice(
    s: EstimateInputs, total_bytes: int | None, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> str:
    """Return which settings let a run fit that does not."""
    found = None if total_bytes is None else combination(s, total_bytes, data, compile, optim)
    if found is None:
        return "No combination of settings lets it fit: choose a smaller model or a larger GPU"
    which = "These settings together let it" if len(found.settings) > 1 else "This setting lets it"
    return f"{which} fit, at an estimated {gib(found.peak_bytes)}: {' '.join(found.settings)}"


def _unused(
    s: EstimateInputs, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> tuple[list[Option], ...]:
    """Return the settings that may save memory and are not used yet, those of a kind together."""
    # A quarter of the loss's chunk; the schedule that keeps activations of as many micro-batches as stages.
    quarter = max(s.chunk_tokens // 4, 64)
    chunk = [(f"loss.chunk_tokens={quarter}", replace(s, chunk_tokens=quarter))] * (quarter < s.chunk_tokens)
    fewer = s.schedule == "gpipe" and s.layout.accumulation >= s.topology.stages > 1
    schedule = [("train.pipeline_schedule=1f1b", replace(s, schedule="1f1b"))] * fewer
    states = smaller_states(s)
    return _smaller_batch(s, data), _recompute(s, compile, optim), states, chunk, _more_shards(s), schedule


def _resumed_parts(s: EstimateInputs) -> tuple[object, ...]:
    """Return what a checkpoint fits to: optimizer states and rows."""
    return s.optimizer, s.precision, s.layout.row_lengths, s.layout.max_length, s.shape.nf4


def _smaller_batch(s: EstimateInputs, data: DataConfig) -> list[Option]:
    """Return half of the rows of a micro-batch; if it has one row, half of the row."""
    layout = s.layout
    share, half = layout.global_batch_size // layout.world_size, layout.micro_batch_size // 2
    # The global batch does not change, so the new number of rows must divide this process's share of it.
    if half:
        rows, budget_rows = largest_divisor(share, half), largest_divisor(layout.global_batch_size, half)
        smaller = replace(layout, micro_batch_size=rows, budget_rows=budget_rows)
        return [(f"train.micro_batch_size={rows}", replace(s, layout=smaller))]
    halved = layout.row_lengths[-1] // 2
    lengths = tuple(sorted({min(length, halved) for length in layout.row_lengths}))
    # A row of several documents must hold at least the longest one, so that none is cut.
    if layout.packs and halved >= layout.max_length:
        return [(f"data.row_length={halved}", replace(s, layout=replace(layout, row_lengths=lengths)))]
    # A row length in the recipe would override the shorter rows.
    also = "" if not layout.packs or data.row_length is None else f" data.row_length={halved}"
    shorter = replace(layout, row_lengths=lengths, max_length=halved, max_doc_length=min(layout.max_doc_length, halved))
    return [(f"data.max_length={halved}{also}", replace(s, layout=shorter))]


def _recompute(s: EstimateInputs, compile: CompileConfig, optim: OptimConfig) -> list[Option]:
    """Return the values of train.memory below the run's, or lower budgets if the recipe sets one."""
    if s.checkpointing:
        return []
    # Eager runs have one more step, transformers' gradient checkpointing, the same for every preset.
    if not s.compiled:
        return [("train.memory=balanced", replace(s, checkpointing=True))]
    # A budget in the recipe overrides train.memory, which would then change nothing.
    if compile.activation_memory_budget is not None:
        lower = [b for b in BUDGETS.values() if b < s.budget]
        return [(f"compile.activation_memory_budget={b}", replace(s, budget=b)) for b in lower]
    options = {preset: replace(s, budget=budget) for preset, budget in BUDGETS.items() if budget < s.budget}
    # The preset low also changes the meaning of auto: its estimate includes both.
    if optim.name == "auto" and "low" in options and not s.adapters:
        name = automatic_optimizer("low", s.precision, too_much=False, partial=s.topology.partial)
        options["low"] = replace(options["low"], optimizer=name)
    return [(f"train.memory={preset}", after) for preset, after in options.items()]


def smaller_states(s: EstimateInputs) -> list[Option]:
    """Return the optimizers for bf16 weights with smaller states; for fp32 weights bf16 ones; under adapters, whose
    states are small, frozen weights in NF4.
    """
    # The smaller optimizers are made for bf16 weights, so the weights come first.
    if s.precision != "bf16":
        return [("train.precision=bf16", replace(s, precision="bf16"))]
    m = s.shape
    if s.adapters:
        dense = 10 * m.frozen_matrices > 9 * (m.frozen - m.frozen_ends)  # unlike a mixture of experts
        possible = dense and not (m.nf4 or s.topology.partial or s.layout.shares)
        return [("adapter.base=nf4", replace(s, shape=replace(m, nf4=m.frozen_matrices)))] if possible else []
    width, found = OPTIMIZERS[s.optimizer].state_width(s.precision), []
    for spec in smaller_optimizers(partial=s.topology.partial):
        if spec.state_width(s.precision) < width:
            needs = f" ({install(f'sftkit[{spec.extra.name}]')})" if spec.extra and not is_installed(spec) else ""
            found.append((f"optim.name={spec.name}{needs}", replace(s, optimizer=spec.name)))
    return found


def _more_shards(s: EstimateInputs) -> list[Option]:
    """Return weights sharded over the existing processes, or over twice as many."""
    # Replicas become shards on the existing GPUs; a sharded run needs more GPUs.
    unsharded = s.topology.world_size > 1 and not s.topology.sharded
    number = s.topology.world_size * (1 if unsharded else 2)
    share, left = divmod(s.layout.global_batch_size, number)
    if left or s.shape.nf4:  # matrices in NF4 cannot be sharded
        return []
    layout = replace(s.layout, world_size=number, micro_batch_size=largest_divisor(share, s.layout.micro_batch_size))
    # The sharding that takes least memory, because the run did not fit.
    after = replace(s, layout=layout, topology=Topology(shards=number, sharded=True), sharding=SHARDINGS[-1])
    engine = "train.engine=blocks and " if s.topology.stages > 1 else ""
    return [(f"{engine}accelerate_configs/fsdp2.yaml on {number} GPUs", after)]


def explain_oom(error: BaseException, plan: MemoryPlan, best: Sequence[Remedy], optim: OptimConfig) -> ConfigError:
    """Return the error that reports which memory ran out, and what to change.

    Args:
        best: settings that save most for this run.
    """
    # The size is only in the text of torch's error, which has no field for it.
    tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    device = "the GPU" if plan.total_bytes is None else f"the GPU has {gib(plan.total_bytes)}"
    lines = [f"out of memory: {device}"]
    if torch.cuda.is_available():
        lines.append(f"tensors took up to {gib(torch.cuda.max_memory_allocated())}")
    if tried:
        lines.append(f"{tried[1]} more did not fit")
    if plan.estimate is not None:
        lines.append(f"this run was estimated at {gib(plan.estimate.total)}")
    if best:
        advice = "Largest savings (estimated):" + "".join(f"\n  {remedy.text}" for remedy in best)
        advice += f"\n{_on_resume(best, plan, optim)}"
    elif plan.estimate is None:
        advice = hint("out of memory by unknown sizes", fallback=FALLBACK)
    else:
        advice = "Every setting that saves memory is in use: choose a smaller model or a larger GPU"
    return ConfigError(", ".join(lines) + ". " + advice)


def _on_resume(best: Sequence[Remedy], plan: MemoryPlan, optim: OptimConfig) -> str:
    """Return a sentence that names the settings with which the newest checkpoint can be resumed."""
    settings = [setting for remedy in best for setting in remedy.on_resume]
    if not settings:
        return "These settings cannot change in a resumed run: start a new one"
    named = f" together with optim.name={plan.optim.name} (auto may now mean another)" if optim.name == "auto" else ""
    return f"The newest checkpoint can be resumed (train.resume=auto) with {' or '.join(settings)}{named}"
