"""The checks that an engine reports: documents in a row, gradients, compiled against eager, what the compiler did."""

from __future__ import annotations

import torch

from sftkit.compile.contract import run_eagerly
from sftkit.compile.watch import Records
from sftkit.data.batches.pack import Layout
from sftkit.engine.engine import EngineReport
from sftkit.engine.gradient_check import MAX_LIMIT, MAX_SCALE_LIMIT, GradientCheck, GradientDifference, RoundingLimits
from sftkit.engine.plain import PlainModel
from sftkit.engine.self_check import DocumentCheck
from sftkit.engine.step import has_dropout, worst_case_batch
from sftkit.errors import RecompileError
from sftkit.models.structure import from_last
from sftkit.objectives.objective import ModelWithLoss
from sftkit.parallel.fsdp import reshard
from sftkit.parallel.pipeline import stagewise
from sftkit.runtime.script import counted, first_of
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Check, does_not_apply
from sftkit.tracking.tracker import EventKind

_SAME = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"Limit of the relative difference between two ways to compute the loss of a dozen targets, by the dtype of the weights."
SAME_OF_MANY = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
"The same for the mean over a whole batch, in which roundings cancel."


def document_checks(
    check: DocumentCheck, dtype: torch.dtype, backend: str, layout_kind: str = "packed", logits_limit: float = 1e-4
) -> list[Check]:
    """Return the checks of two documents in one row, made before the first step: logits, loss, isolation.

    Args:
        dtype: of the weights.
        backend: attention of the run. Where `check` had to be made with another one, its isolation is unknown.
        layout_kind: of the run; in all but packed a row holds one document.
        logits_limit: largest relative difference of the logits, from roundings.limits.
    """
    stand_in = "" if check.backend == backend else f" ({check.backend} stands in for {backend})"
    # Judged by what the change does to its own document: where that does not move either, nothing is shown.
    isolated = check.leak <= _SAME[dtype] * check.changed and check.changed > 0
    moves = f"the other document moves by {check.leak:.1e}, the changed one by {check.changed:.1e}{stand_in}"
    alone = bool(stand_in) and isolated and layout_kind != "packed"
    beyond = f"; {check.beyond:.2e} around {', '.join(map(str, check.limits))} positions" if check.limits else ""
    return [
        Check(
            "Same logits as the plain model",
            check.logits_difference < logits_limit and check.beyond < logits_limit,
            f"relative difference {check.logits_difference:.2e}{beyond}",
            f"below {logits_limit:.1e}",
            "two documents and padding in one row through this run's attention and head, each alone through a model "
            "that transformers made of the start's files; longer documents on both sides of the config's limits",
        ),
        loss_check(check.loss, check.plain_loss, check.targets, dtype),
        Check(
            "Documents in a row do not see each other",
            # A stand-in that isolates says nothing of the run's own kernel; if it leaks, the masks are
            # wrong for either.
            None if isolated and stand_in else isolated,
            does_not_apply("each row holds one document") if alone else moves,
            "no move beyond rounding",
            "every token of one document is replaced; largest change of the hidden states of the other one",
        ),
    ]


def loss_check(loss: float, plain_loss: float, targets: int, dtype: torch.dtype) -> Check:
    """Return the check of the loss of a few documents, nats per target. `dtype`: of the weights."""
    limit = _SAME.get(dtype, _SAME[torch.float32])
    off = abs(loss - plain_loss) / max(abs(plain_loss), 1e-9)
    return Check(
        "Loss equals plain cross entropy",
        off < limit,
        f"{loss:.5f} against {plain_loss:.5f} nats over {targets} targets",
        f"equal to {limit:.0e}",
        "a few documents through the run's rows and loss, sums over all targets, against the plain model's mean",
    )


def weights_check(plain: PlainModel) -> Check:
    """Return the check of the weights in memory against the files that training starts from."""
    name, how = (
        "Weights are those of the files",
        "a sample of each parameter and every buffer against a new from_pretrained of the start's files",
    )
    if not plain.has_files:
        return Check(name, None, does_not_apply("the model is new"), "-", how)
    shares = sorted(plain.differing.items(), key=lambda one: -one[1])
    words = first_of([f"{parameter} ({share:.0%})" for parameter, share in shares])
    found = f"{words} of {plain.compared} differ" if shares else f"{plain.compared} parameters"
    return Check(name, not shares, found, "each as in the files", how)


def gradients_check(check: GradientCheck, allowed: RoundingLimits, backend: str) -> Check:
    """Return the check of the gradients of a few short documents, made before the first step.

    Args:
        allowed: the limits for this model; roundings that were measured widen them.
        backend: attention of the run; if the eager half needed another backend, the check names that one.
    """
    eager = "eager" if check.backend == backend else f"eager ({check.backend} stands in for {backend})"
    known = {side: d for side, d in {"compiled": check.compiled, eager: check.eager}.items() if d is not None}
    not_compiled = f"compiled: not checked, {check.skip_reason}; " if check.skip_reason else ""
    found = not_compiled + "; ".join(f"{side}: {_words(d)}" for side, d in known.items())
    # Roundings are measured only where a fixed limit was exceeded. Where they alone move gradients beyond any limit
    # that would still find a fault, the comparison decides nothing.
    unknown = allowed.gradients is None
    if allowed.gradients is not None and (alone := check.roundings) is not None:
        allowed = allowed.widened(alone)
        found += f"; roundings alone: {alone.relative:.1e}, {alone.scale:.1e} of the scale"
        unknown = alone.relative > MAX_LIMIT or alone.scale > MAX_SCALE_LIMIT
    same = all(allowed.hold(d) for d in known.values())
    return Check(
        "Same gradients as the plain model",
        # Without a limit it was not checked. A pass needs both halves, but a difference in one is enough to fail.
        None if allowed.gradients is None or (unknown and not same) or (same and check.skip_reason) else same,
        found,
        "no limit is known of float8 products"
        if allowed.gradients is None
        else f"below {allowed.gradients:.1e} in every parameter, {allowed.scale:.0e} of the scale",
        "short documents through this run's micro-batches, masks, loss and exchange, compiled in a declared shape and "
        "uncompiled, against each alone through transformers and torch's cross entropy; of a sample of each parameter",
    )


def _words(difference: GradientDifference) -> str:
    """Return a line: the worst parameter, the scale of all, and how many are too small to be measured by themselves."""
    small = f", {difference.below} of {difference.parameters} too small beside their block" if difference.below else ""
    return f"{difference.relative:.1e} at most ({difference.parameter}), scale {difference.scale:.5f}{small}"


def compiled_check(compiled: float | None, eager: float | None, dtype: torch.dtype) -> Check:
    """Return the check of the warm-up's batch, through the compiled step and eagerly.

    Args:
        compiled, eager: nats per target; None: not run.
        dtype: of the weights.
    """
    how = "the warm-up batch of the largest declared shape, forward pass of the compiled step and of the eager one"
    if compiled is None or eager is None:
        return Check("Compiled step computes what eager does", None, "not compiled, or with dropout", "-", how)
    off = abs(compiled - eager) / max(abs(eager), 1e-9)
    found = f"{compiled:.5f} against {eager:.5f} nats per target"
    limit = SAME_OF_MANY[dtype]
    return Check("Compiled step computes what eager does", off < limit, found, f"equal to {limit:.0e}", how)


def compiled_against_eager(
    rt: Runtime, model: ModelWithLoss, layout: Layout, losses: dict[tuple[int, int], float], eager: str
) -> Check:
    """Compare the loss of the warm-up's largest batch with one that is computed without the compiler.

    Args:
        losses: as shape_runner fills them; empty: nothing is compiled.
        eager: attention backend without the compiler.
    """
    orig_model, shape = model.orig_model, layout.shapes[-1]
    # With dropout two passes of the same batch differ.
    if not losses or has_dropout(orig_model):
        return compiled_check(None, None, orig_model.dtype)
    batch = worst_case_batch(rt, orig_model, layout, *shape)
    with stagewise(orig_model):
        with torch.no_grad(), run_eagerly():
            loss = float(from_last(orig_model, model(batch, eager).loss)) / max(model.objective.count(batch), 1)
        # No backward pass follows that would reshard the weights that this one gathers.
        reshard(orig_model)
    return compiled_check(losses[shape], loss, orig_model.dtype)


def compile_checks(graphs: int | None, evaluations: int, records: Records, error: BaseException | None) -> list[Check]:
    """Return the checks of what the compiler did, from torch's own records.

    Args:
        graphs: how many this rank has; None: nothing is compiled.
        evaluations: how many there were so far.
        records: of all ranks.
        error: what ended training, if anything did: a recompile or graph break that was refused counts as one.
    """
    how = "torch.compile's own records of every rank"
    if graphs is None:
        return [Check("The step is compiled", None, "eager", "-", how)]
    late, breaks, uncompiled = list(records.recompile_kinds), records.graph_break_reasons, records.fallbacks
    # A refused recompile ends the run before torch records it. A graph break raises the same error, but is
    # in the records.
    if isinstance(error, RecompileError) and not breaks:
        late = [*late, str(error).partition("\n")[0]]
    ran = counted(graphs, "graph")
    # Calls that fell back left no record of a compile, but the step was not what the warm-up had built either.
    if uncompiled:
        ran += f", and {uncompiled:,} calls ran without one (compile.on_recompile=eager)"
        late += [f"run uncompiled instead: {reason}" for reason in records.fallback_kinds]
    return [
        Check("The step is compiled", graphs > 0 and not uncompiled, ran, "1 or more, for every call", how),
        Check("No recompiles after the warm-up", not late, "; ".join(late) or "0", "0", how),
        Check("No graph breaks", not breaks, "; ".join(breaks) or "0", "0", how),
        Check(
            "Evaluation compiles nothing",
            records.in_evaluation == 0 if evaluations else None,
            f"{records.in_evaluation} compiles during {evaluations} evaluations",
            "0",
            "the same records, before and after each evaluation",
        ),
    ]


def report_of(
    counts: dict[str, float], evaluations: int, records: Records, error: BaseException | None, *, compiled: bool
) -> EngineReport:
    """Return the report of an engine.

    Args:
        counts: of CompileWatch, on this rank.
        evaluations, records, error: as compile_checks takes them.
        compiled: whether the steps are.
    """
    graphs = int(counts["compile/graphs"]) if compiled else None
    # Texts of all ranks, each kind once: the tracker makes an event of those that it has not written yet.
    events: list[tuple[EventKind, list[str]]] = [
        ("recompile", list(records.recompile_kinds)),
        ("fallback", list(records.fallback_kinds)),
        ("graph_break", list(records.graph_break_reasons)),
        ("cuda_graph", list(records.late_cuda_graphs)),
        ("hook", list(records.hooks)),
    ]
    how = (
        "hooks of every module, at each logged line, against those when the warm-up was done, as torch guards none of "
        "them; and whether the step calls the module at all"
    )
    unheeded = "; ".join(records.hooks) or "all of them"
    hooks = Check("The step runs the hooks that the model has", not records.hooks, unheeded, "all of them", how)
    checks = [*compile_checks(graphs, evaluations, records, error), hooks]
    # Graphs and seconds are this rank's, but what should not happen counts on every rank.
    counts = counts | {"compile/recompiles": records.recompiles, "compile/fallbacks": records.fallbacks}
    return EngineReport(counts, events, checks)
