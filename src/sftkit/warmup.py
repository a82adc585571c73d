"""What happens between assembling a run and its first step: compiled code is loaded or built, memory is tried out."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from sftkit import compile_cache
from sftkit.adamw import AdamW
from sftkit.anatomy import vocab_size
from sftkit.attention_choice import eager_backend
from sftkit.compilation import warm_up
from sftkit.compile_watch import CompileWatch
from sftkit.config import Config
from sftkit.data.collate import warm_up_batch
from sftkit.data.pack import Layout
from sftkit.hardware import peak_memory_gib
from sftkit.memory import MemoryPlan, compare, explained, reserve_optimizer_state
from sftkit.optim import warm_up_optimizer
from sftkit.runtime import Runtime
from sftkit.step import ModelWithLoss, forward_backward, verify_logits
from sftkit.tracker import Tracker


def prepare_step(
    cfg: Config,
    rt: Runtime,
    model: torch.nn.Module,
    orig_model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    plan: MemoryPlan,
    watch: CompileWatch,
    tracker: Tracker,
) -> tuple[bool, float]:
    """Run the heaviest batch of every declared shape, forward and backward, with the optimizer's memory taken: every
    graph is built and a run that does not fit ends here. Weights, gradients and random state are as before.

    Returns:
        (whether the step is compiled, seconds)
    """
    started = time.perf_counter()
    objective = rt.accelerator.unwrap_model(model)
    assert isinstance(objective, ModelWithLoss)
    verify_logits(objective, eager_backend(objective.backend, orig_model), rt.device)
    orig_model.train()
    run_shape = shape_runner(rt, model, orig_model, layout)
    with explained(plan, cfg, layout):
        with reserve_optimizer_state(optimizer, plan, rt.device):
            compiled = warm_up(model, run_shape, layout.shapes, cfg.compile, rt.any_rank, rt.topology.sharded)
        if not compiled:
            objective.backend = eager_backend(objective.backend, orig_model)
        if isinstance(optimizer, AdamW):
            optimizer.compile = compiled
        warm_up_optimizer(optimizer)
    watch.warm_up_done()
    seconds = time.perf_counter() - started
    tracker.say(_line(compiled, layout, watch.counts(), seconds))
    if rt.device.type == "cuda":
        tracker.say(compare(plan, peak_memory_gib(rt.device)))
    if compiled:
        compile_cache.keep(cfg, orig_model, layout, rt)
    return compiled, seconds


def shape_runner(
    rt: Runtime, model: torch.nn.Module, orig_model: PreTrainedModel, layout: Layout
) -> Callable[[int, int], None]:
    """A function that runs the heaviest batch of a shape, forward and backward; replicas do without communication, pieces
    of a model as in a step of several micro-batches, if the run's have several."""

    def run_shape(rows: int, row_length: int) -> None:
        slots = layout.max_docs(rows, row_length)
        batch = warm_up_batch(rows, row_length, vocab_size(orig_model), slots, layout.max_doc_length, rt.part)
        batch = batch.to(rt.device)
        syncs = [False] * (layout.accumulation > 1) + [True] if rt.topology.sharded else [False]
        for sync in syncs:
            with rt.gradient_sync(model, sync):
                float(forward_backward(model, batch, batch.num_targets, rt)[0])

    return run_shape


def _line(compiled: bool, layout: Layout, counts: dict[str, float], seconds: float) -> str:
    """What the warm-up built, for the console."""
    declared = ", ".join(f"{rows} x {length}" for rows, length in layout.shapes)
    kind = f"{layout.kind} rows, shapes {declared}"
    if not compiled:
        return f"{kind}; eager"
    return (
        f"{kind}; compiled {counts['compile/graphs']:.0f} graphs, "
        f"{counts['compile/graph_breaks']:.0f} graph breaks, in {seconds:.1f} s"
    )
