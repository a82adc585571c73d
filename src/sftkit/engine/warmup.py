"""What happens between assembling a run and its first step: compiled code is loaded or built, memory is tried out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sftkit.compile import cache as compile_cache
from sftkit.compile.contract import run_eagerly, warm_up
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import Config
from sftkit.data.collate import Batch, part_of, warm_up_batch
from sftkit.data.pack import Layout
from sftkit.engine.self_check import check_documents
from sftkit.engine.step import forward_backward
from sftkit.memory.plan import MemoryPlan, compare, explained, reserve_optimizer_state
from sftkit.models.structure import vocab_size
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.ops.attention_choice import eager_backend
from sftkit.optim.protocol import Optimizer
from sftkit.parallel.fsdp import let_go
from sftkit.runtime.hardware import peak_memory_gib
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker
from sftkit.train.proof import Row, compiled_row, document_rows


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to run."""

    compiled: bool
    seconds: float
    "what the warm-up took"
    proof: list[Row]
    "what was checked on the way"


def prepare_step(
    cfg: Config,
    rt: Runtime,
    model: torch.nn.Module,
    orig_model: PreTrainedModel,
    optimizer: Optimizer,
    layout: Layout,
    plan: MemoryPlan,
    watch: CompileWatch,
    tracker: Tracker,
) -> Prepared:
    """Run the heaviest batch of every declared shape, forward and backward, with the optimizer's memory taken: every
    graph is built and a run that does not fit ends here. Weights, gradients and random state are as before."""
    started = time.perf_counter()
    objective = rt.accelerator.unwrap_model(model)
    assert isinstance(objective, ModelWithLoss)
    backend, eager = objective.backend, eager_backend(objective.backend, orig_model)
    check = check_documents(objective, eager, rt.device)
    orig_model.train()
    losses: dict[tuple[int, int], float] = {}
    run_shape = shape_runner(rt, model, orig_model, layout, losses)
    with explained(plan, cfg, layout):
        with reserve_optimizer_state(optimizer, plan, rt.device):
            compiled = warm_up(model, run_shape, layout.shapes, cfg.compile, rt.any_rank, rt.topology.sharded)
        if not compiled:
            objective.backend = eager
        optimizer.warm_up(compiled)
    watch.warm_up_done()
    seconds = time.perf_counter() - started
    tracker.say(_line(compiled, layout, watch.counts(), seconds))
    if rt.device.type == "cuda":
        tracker.say(compare(plan, peak_memory_gib(rt.device)))
    if compiled:
        compile_cache.keep(cfg, orig_model, layout, rt)
    proof = document_rows(check, orig_model.dtype, backend if compiled else eager)
    if compiled and not has_dropout(orig_model):
        batch = heaviest(rt, orig_model, layout, *layout.shapes[-1])
        proof.append(compiled_row(losses[layout.shapes[-1]], eager_loss(objective, batch, eager), orig_model.dtype))
    else:
        proof.append(compiled_row(None, None, orig_model.dtype))
    return Prepared(compiled, seconds, proof)


def has_dropout(orig_model: PreTrainedModel) -> bool:
    """Whether two training passes of the same batch differ."""
    layers = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in orig_model.modules())
    return layers or bool(getattr(orig_model.config.get_text_config(), "attention_dropout", 0.0))


def eager_loss(model: ModelWithLoss, batch: Batch, backend: str) -> float:
    """Objective per target of this rank's part of a batch, by the plain Python of the model."""
    with torch.no_grad(), run_eagerly():
        loss = float(model(batch, backend).loss) / max(batch.num_targets, 1)
    let_go(model.orig_model)
    return loss


def heaviest(rt: Runtime, orig_model: PreTrainedModel, layout: Layout, rows: int, row_length: int) -> Batch:
    """This rank's part of the heaviest batch of a shape, on the device."""
    slots = layout.max_docs(rows, row_length)
    part = part_of(rt.topology, rt.rank)
    return warm_up_batch(rows, row_length, vocab_size(orig_model), slots, layout.max_doc_length, part).to(rt.device)


def shape_runner(
    rt: Runtime,
    model: torch.nn.Module,
    orig_model: PreTrainedModel,
    layout: Layout,
    losses: dict[tuple[int, int], float],
) -> Callable[[int, int], None]:
    """A function that runs the heaviest batch of a shape, forward and backward; replicas do without communication, pieces
    of a model as in a step of several micro-batches, if the run's have several.

    Args:
        losses: filled with the objective per target of each shape.
    """

    def run_shape(rows: int, row_length: int) -> None:
        batch = heaviest(rt, orig_model, layout, rows, row_length)
        syncs = [False] * (layout.accumulation > 1) + [True] if rt.topology.sharded else [False]
        for sync in syncs:
            with rt.gradient_sync(model, sync):
                total = float(forward_backward(model, batch, batch.num_targets, rt)[0])
                losses[rows, row_length] = total / max(batch.num_targets, 1)

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
