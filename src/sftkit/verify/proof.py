"""Verify any engine, and make the rows of proof.json on compilation, data, batches and the checkpoint.

An engine offers a forward pass, the gradients of micro-batches and the losses of its warm-up; this module computes
the references.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from sftkit.compile.contract import random_state_kept, run_eagerly
from sftkit.compile.watch import Records
from sftkit.data.batches.pack import Layout
from sftkit.data.reading.rows import ELSEWHERE
from sftkit.data.tokens.chat import UNASKED, PromptedTargets
from sftkit.data.types import Examples
from sftkit.engine.engine import Engine, EngineReport
from sftkit.engine.step import has_dropout, worst_case_batch
from sftkit.errors import RecompileError
from sftkit.models.structure import decoder_blocks, from_last
from sftkit.models.trained import adapters_of
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import eager_backend
from sftkit.optim.protocol import parameters_of
from sftkit.parallel.wrap import as_whole, reshard
from sftkit.rundir.names import MANIFEST
from sftkit.runtime.script import counted, first_of
from sftkit.runtime.start import Runtime
from sftkit.tracking.meter import ShapeCounts
from sftkit.tracking.names import Check, does_not_apply
from sftkit.verify.documents import check_documents, document_checks
from sftkit.verify.gradients import Sides, check_gradients, gradients_check, limits
from sftkit.verify.plain import PlainModel


def prompt_check(found: PromptedTargets | None) -> Check:
    """Check that targets begin where a server's prompt ends; None: every token is a target."""
    how = (
        "small conversations through this run's tokenizing; the ids before each run of targets against those of "
        "apply_chat_template with add_generation_prompt, in each thinking mode of the template"
    )
    name, expected = "Every target is sampled by a server", "each after the ids of a prompt"
    if found is None or not found.answers:
        reason = "every token is a target" if found is None else "no conversation was rendered"
        return Check(name, None, reason, "-", how)
    asked = found.answers - len(found.unasked)
    words = f"{asked} of {found.answers} answers in {len(found.conversations)} conversations"
    return Check(name, not found.unasked, "; ".join((words, *found.unasked[:2])), expected, how)


def eos_token_ids_of(orig_model: PreTrainedModel) -> list[int]:
    """Return the tokens that end a turn or text, as generation knows them."""
    ids = orig_model.generation_config.eos_token_id if orig_model.generation_config else None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def mask_check(examples: Examples, eos_token_ids: Sequence[int]) -> Check:
    """Check that documents with a loss mask train the end of the turn, and measure the share of target tokens.

    Args:
        eos_token_ids: tokens that end a turn.
    """
    name, how = "Answers end with a learned end of turn", "the mask of the tokenized training data"
    masked = examples.num_targets < examples.lengths
    tokens, targets = int(examples.lengths.sum()), int(examples.num_targets.sum())
    share = f"{100 * targets / max(tokens, 1):.1f} % of {tokens:,} positions in {len(examples):,} documents are targets"
    every = [one for found in examples.findings.values() for one in found]
    if elsewhere := sum(one.rows for one in every if one.kind == "read" and one.reason.startswith(ELSEWHERE)):
        unasked = sum(one.rows for one in every if one.reason == UNASKED)
        share += f"; {counted(elsewhere, 'row')} tokenized elsewhere, {unasked:,} with {UNASKED}"
    if not masked.any():
        return Check(name, None, share, "-", how)
    # The text after the last target was cut off.
    last, is_target = examples.last_tokens(np.flatnonzero(masked))
    percent = 100.0 * float((is_target & np.isin(last, list(eos_token_ids))).mean())
    return Check(name, percent >= 99.0, f"{percent:.1f} % of documents with a mask; {share}", "99 % or more", how)


def divisor_check(seen: int, divided_by: int) -> Check:
    """Check that the loss was divided by the number of targets that all ranks and micro-batches really had."""
    same = abs(seen - divided_by) <= 1e-6 * divided_by if divided_by else None  # None: no line was logged
    found = f"{seen:,} targets reached the model, {divided_by:,} were divided by"
    how = "targets counted in the batches of all ranks, against the planned number that gradients are divided by"
    return Check("Loss is divided by the targets of all ranks and micro-batches", same, found, "equal", how)


def resume_check(step: int, folder: Path | None) -> Check:
    """Report the checkpoint that the run started from."""
    how = "sha256 of the manifest of the checkpoint, whose files all matched the hashes in it"
    name = "Resumed from a verified checkpoint"
    if folder is None:
        return Check(name, None, "started anew", "-", how)
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    return Check(name, ok=True, found=f"step {step}, {folder.name}, {digest[:16]}", expected="verified", how=how)


def shapes_check(shapes: ShapeCounts, layout: Layout) -> Check:
    """Check that only declared shapes reached the compiled model."""
    if layout.dynamic:
        declared = f"{layout.micro_batch_size} x any multiple of {layout.pad_multiple} up to {layout.max_length}"
        seen = f"{len(shapes.seen)} lengths in {sum(shapes.seen.values()):,} micro-batches"
    else:
        declared = ", ".join(f"{rows} x {length}" for rows, length in layout.shapes)
        seen = ", ".join(f"{rows} x {length}: {count:,}" for (rows, length), count in sorted(shapes.seen.items()))
    found = f"{seen or 'none'}; {shapes.undeclared:,} undeclared"
    how = "the tensors of every micro-batch of the run, against the shapes that its start declared, on the main rank"
    return Check("Only declared shapes", shapes.undeclared == 0 if shapes.seen else None, found, declared, how)


SAME_OF_MANY = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
"Limit for the mean over a whole batch, in which rounding noise cancels."


@dataclass(frozen=True)
class WarmUp:
    """The result of a warm-up: the step is ready to run."""

    compiled: bool
    seconds: float
    "duration of the warm-up with its checks"
    checks: list[Check]
    "rows for proof.json"


def verified_warm_up(engine: Engine, rt: Runtime, print_line: Callable[[str], None]) -> WarmUp:
    """Warm up an engine and compare its forward pass and gradients with the plain model's; every rank calls it once,
    before the first step.

    Args:
        print_line: function that prints a line on the console.

    Raises:
        ConfigError: the run cannot work with these settings, or the model computes something that we leave out.
    """
    started = time.perf_counter()
    model, orig_model, training = engine.model, engine.model.orig_model, engine.training
    layout, dtype = training.layout, orig_model.dtype
    allowed = limits(dtype, len(decoder_blocks(orig_model)), fp8=engine.setup.fp8)
    eager = eager_backend(model.backend, orig_model, trees=layout.kind == "tree")
    # Before compilation: check that the forward pass computes the same as the plain model. No other model is trained.
    with random_state_kept():  # transformers draws numbers for some models that it loads, and a resumed run loads again
        plain = PlainModel(model, rt.device, training.source, training.checkpoint, rt)
    # While B is zero an adapter adds nothing and A has no gradient: there would be nothing to compare.
    moved: AbstractContextManager[None] = nullcontext()
    if adapters_of(orig_model) is not None:
        from sftkit.models.adapters import factors_moved

        moved = factors_moved(orig_model)
    with moved:
        documents = check_documents(model, eager, rt.device, layout, plain, engine.forward, allowed.logits)
        # No graph may be new within the context, so the gradients are compared through the graphs of the steps.
        with engine.warm_up(print_line) as losses:
            sides = Sides(model, engine.gradients, list(parameters_of(engine.optimizer.param_groups)), rt, plain)
            gradients = check_gradients(sides, layout, eager, allowed, compiled=engine.compiled)
        same = compiled_against_eager(rt, model, layout, losses if engine.compiled else {})
    seconds = time.perf_counter() - started
    checks = [
        *document_checks(documents, dtype, model.backend, layout.kind, allowed.logits),
        weights_check(plain),
        gradients_check(gradients, allowed, model.backend),
        same,
    ]
    return WarmUp(engine.compiled, seconds, checks)


def report_checks(report: EngineReport, error: BaseException | None = None) -> list[Check]:
    """Return the checks of an engine's own report on its steps. `error`: the exception that ended training early."""
    if (records := report.records) is None:
        return [Check("The step is compiled", None, "reference engine", "-", "train.engine=reference never compiles")]
    how = (
        "hooks of every module, at each logged line, against those at the end of the warm-up, because torch does "
        "not guard them; and whether the step calls the module at all"
    )
    unheeded = "; ".join(records.hooks) or "all of them"
    hooks = Check("The step runs the hooks that the model has", not records.hooks, unheeded, "all of them", how)
    return [*compile_checks(report.graphs, report.evaluations, records, error), hooks]


def weights_check(plain: PlainModel) -> Check:
    """Return the check of the weights in memory against the start files."""
    name = "Weights are those of the files"
    how = "a sample of each parameter and every buffer against a new from_pretrained of the start files"
    if not plain.has_files:
        return Check(name, None, does_not_apply("the model is new"), "-", how)
    shares = sorted(plain.differing.items(), key=lambda one: -one[1])
    words = first_of([f"{parameter} ({share:.0%})" for parameter, share in shares])
    found = f"{words} of {plain.compared} differ" if shares else f"{plain.compared} parameters"
    return Check(name, not shares, found, "each as in the files", how)


def compiled_check(compiled: float | None, eager: float | None, dtype: torch.dtype) -> Check:
    """Return the check of the warm-up's batch, through the compiled step and eagerly.

    Args:
        compiled, eager: losses in nats per target; None: not run.
        dtype: dtype of the weights.
    """
    how = "the warm-up batch of the largest declared shape, forward pass of the compiled step and of the eager one"
    if compiled is None or eager is None:
        return Check("Compiled step computes what eager does", None, "not compiled, or with dropout", "-", how)
    off = abs(compiled - eager) / max(abs(eager), 1e-9)
    found = f"{compiled:.5f} against {eager:.5f} nats per target"
    limit = SAME_OF_MANY[dtype]
    return Check("Compiled step computes what eager does", off < limit, found, f"equal to {limit:.0e}", how)


def compiled_against_eager(
    rt: Runtime, model: ModelWithLoss, layout: Layout, losses: dict[tuple[int, int], float]
) -> Check:
    """Compare the loss of the warm-up's largest batch with a loss computed without the compiler.

    Args:
        losses: losses from shape_runner; empty if nothing is compiled.
    """
    orig_model, shape = model.orig_model, layout.shapes[-1]
    # With dropout two passes of the same batch differ.
    if not losses or has_dropout(orig_model):
        return compiled_check(None, None, orig_model.dtype)
    # The trees of that batch are single documents, which packed rows hold too, without a mask in memory.
    layout = replace(layout, kind="packed") if layout.kind == "tree" else layout
    batch = worst_case_batch(rt, orig_model, layout, *shape)
    eager = eager_backend(model.backend, orig_model)
    with as_whole(orig_model):
        with torch.no_grad(), run_eagerly():
            loss = float(from_last(orig_model, model(batch, eager).loss)) / max(model.objective.count(batch), 1)
        # No backward pass follows that would reshard the gathered weights.
        reshard(orig_model)
    return compiled_check(losses[shape], loss, orig_model.dtype)


def compile_checks(graphs: int | None, evaluations: int, records: Records, error: BaseException | None) -> list[Check]:
    """Return the checks of the compiler from torch's own records.

    Args:
        graphs: number of graphs on this rank; None: nothing is compiled.
        evaluations: number of evaluations so far.
        records: records of all ranks.
        error: exception that ended training, if any: a rejected recompile or graph break counts as one.
    """
    how = "torch.compile's own records of every rank"
    if graphs is None:
        return [Check("The step is compiled", None, "eager", "-", how)]
    late = list(records.recompile_kinds)
    breaks = records.graph_break_reasons
    # A rejected recompile ends the run before torch records it. A graph break raises the same error, but is in
    # the records.
    if isinstance(error, RecompileError) and not breaks:
        late = [*late, str(error).partition("\n")[0]]
    again = records.in_evaluation
    said = f"{again} compiles during {evaluations} evaluations"
    between = "the same records, before and after each evaluation"
    return [
        Check("The step is compiled", graphs > 0, counted(graphs, "graph"), "1 or more, for every call", how),
        Check("No recompiles after the warm-up", not late, "; ".join(late) or "0", "0", how),
        Check("No graph breaks", not breaks, "; ".join(breaks) or "0", "0", how),
        Check("Evaluation compiles nothing", again == 0 if evaluations else None, said, "0", between),
    ]
