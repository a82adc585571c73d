"""Suggest settings that save memory: settings not used yet, and optimizers with smaller states. The error of a GPU
that ran out of memory names those that save most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch

from sftkit.config.commands import install
from sftkit.config.schema import CompileConfig, DataConfig, OptimConfig
from sftkit.config.tables import DEFAULT, FALLBACK, OPTIMIZERS, OptimizerSpec
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout, largest_divisor
from sftkit.errors import ConfigError
from sftkit.memory.estimate import BUDGETS, GIB, SHARDINGS, EstimateInputs, estimate, gib

if TYPE_CHECKING:
    from sftkit.memory.plan import MemoryPlan


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
    s, ways = replace(plan.setup, layout=layout), []
    tried = (_smaller_batch(s, data), _recompute(s, compile, optim), smaller_states(s), _chunk(s), _more_shards(s))
    for options in (*tried, _schedule(s)):
        saved = [(text, plan.estimate.total - estimate(after).total, after) for text, after in options]
        # A saving below the last printed digit (0.1 GiB after rounding) is not worth suggesting.
        saved = [one for one in saved if one[1] >= 0.05 * GIB]
        if saved:
            more = "".join(f", {text} {gib(n)}" for text, n, _ in saved[1:])
            resumable = tuple(text for text, _, after in saved if _may_resume(s, after))
            most = max(n for _, n, _ in saved)
            ways.append(Remedy(f"{saved[0][0]} saves {gib(saved[0][1])}{more}", most, resumable))
    return sorted(ways, key=lambda remedy: -remedy.saved_bytes)


def _may_resume(there: EstimateInputs, here: EstimateInputs) -> bool:
    """Return whether a checkpoint of one setup fits the other: the same optimizer states and the same rows."""

    def kept(s: EstimateInputs) -> tuple[object, ...]:
        return s.optimizer, s.precision, s.layout.row_lengths, s.layout.max_length

    return kept(there) == kept(here)


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
    # A packed row must hold at least the longest document, so that no document is cut.
    if layout.kind == "packed" and halved >= layout.max_length:
        return [(f"data.row_length={halved}", replace(s, layout=replace(layout, row_lengths=lengths)))]
    # A row length in the recipe would override the shorter rows.
    also = "" if layout.kind != "packed" or data.row_length is None else f" data.row_length={halved}"
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
    if optim.name == "auto" and "low" in options:
        name = automatic_optimizer("low", s.precision, too_much=False, partial=s.topology.partial)
        options["low"] = replace(options["low"], optimizer=name)
    return [(f"train.memory={preset}", after) for preset, after in options.items()]


def smaller_states(s: EstimateInputs) -> list[Option]:
    """Return the optimizers for bf16 weights with smaller states; for fp32 weights return bf16 ones."""
    # The smaller optimizers are made for bf16 weights, so the weights come first.
    if s.precision != "bf16":
        return [("train.precision=bf16", replace(s, precision="bf16"))]
    width, found = OPTIMIZERS[s.optimizer].state_width(s.precision), []
    for spec in _smaller_optimizers(partial=s.topology.partial):
        if spec.state_width(s.precision) < width:
            needs = f" ({install(f'sftkit[{spec.extra.name}]')})" if spec.extra and not _is_installed(spec) else ""
            found.append((f"optim.name={spec.name}{needs}", replace(s, optimizer=spec.name)))
    return found


def _more_shards(s: EstimateInputs) -> list[Option]:
    """Return weights sharded over the existing processes, or over twice as many."""
    # Replicas become shards on the existing GPUs; a sharded run needs more GPUs.
    unsharded = s.topology.world_size > 1 and not s.topology.sharded
    number = s.topology.world_size * (1 if unsharded else 2)
    share, left = divmod(s.layout.global_batch_size, number)
    if left:
        return []
    layout = replace(s.layout, world_size=number, micro_batch_size=largest_divisor(share, s.layout.micro_batch_size))
    # With the smallest sharding, because the run did not fit.
    after = replace(s, layout=layout, topology=Topology(shards=number, sharded=True), sharding=SHARDINGS[-1])
    engine = "train.engine=blocks and " if s.topology.stages > 1 else ""
    return [(f"{engine}accelerate_configs/fsdp2.yaml on {number} GPUs", after)]


def _schedule(s: EstimateInputs) -> list[Option]:
    """Return the pipeline schedule that keeps activations of as many micro-batches as stages, instead of all."""
    fewer = s.schedule == "gpipe" and s.layout.accumulation >= s.topology.stages > 1
    return [("train.pipeline_schedule=1f1b", replace(s, schedule="1f1b"))] if fewer else []


def _chunk(s: EstimateInputs) -> list[Option]:
    """Return a quarter of the loss's chunk of tokens, but at least 64; nothing if that is not smaller."""
    quarter = max(s.chunk_tokens // 4, 64)
    return [(f"loss.chunk_tokens={quarter}", replace(s, chunk_tokens=quarter))] if quarter < s.chunk_tokens else []


def automatic_optimizer(preset: str, precision: str, *, too_much: bool, partial: bool) -> str:
    """Return the optimizer that optim.name=auto means. `too_much`: the default would not fit; `partial`: a process
    holds a part of the weights.
    """
    if precision != "bf16":
        return DEFAULT
    if preset == "low":
        # The smallest that can be built here: a run must not fail for a package that the user never named.
        usable = [spec for spec in _smaller_optimizers(partial=partial) if _is_installed(spec)]
        return min(usable, key=lambda spec: spec.state_width(precision)).name
    return FALLBACK if too_much else DEFAULT


def _smaller_optimizers(*, partial: bool) -> list[OptimizerSpec]:
    """Return the optimizers that do the same as the default in less memory."""
    # An optimizer that cannot be sharded cannot handle a tied weight on two pipeline stages either.
    return [spec for spec in OPTIMIZERS.values() if spec.saves_memory and not (partial and spec.unshardable)]


def _is_installed(spec: OptimizerSpec) -> bool:
    """Return whether the package of an optimizer is installed."""
    return spec.extra is None or find_spec(spec.extra.package) is not None


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
        advice = (
            "Lower train.micro_batch_size, with which a checkpoint can be resumed, or start from scratch with "
            f"train.memory=low or optim.name={FALLBACK}"
        )
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


@contextmanager
def oom_advice(
    plan: MemoryPlan, layout: Layout, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> Iterator[None]:
    """Turn running out of GPU memory within the context into a ConfigError that names the three settings that
    save most.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        best = remedies(plan, layout, data, compile, optim)[:3]
        raise explain_oom(error, plan, best, optim) from error
