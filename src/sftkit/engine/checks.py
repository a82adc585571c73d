"""What an engine shows of itself: two documents in a row, compiled against eager, what the compiler did."""

from __future__ import annotations

import torch

from sftkit.compile.watch import CompileWatch
from sftkit.engine.self_check import TOLERANCE, DocumentCheck
from sftkit.errors import RecompileError
from sftkit.tracking.checks import Check

SAME = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"Largest relative difference of a loss of a dozen targets that is computed in two ways, by the dtype of the weights."
SAME_OF_MANY = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
"The same for the mean over a whole batch, in which roundings cancel."


def document_checks(check: DocumentCheck, dtype: torch.dtype, backend: str) -> list[Check]:
    """What two documents in one row gave before the first step: logits, loss, isolation.

    Args:
        backend: attention of the run. Where `check` had to be made with another one, isolation is not known of it.
    """
    stand_in = "" if check.backend == backend else f" ({check.backend} stands in for {backend})"
    isolated = check.leak <= SAME[dtype] * check.changed and check.changed > 0
    limit = SAME[dtype]
    off = abs(check.loss - check.plain_loss) / max(abs(check.plain_loss), 1e-9)
    return [
        Check(
            "Same logits as the plain model",
            check.logits_difference < TOLERANCE,
            f"relative difference {check.logits_difference:.2e}",
            f"below {TOLERANCE:.0e}",
            "two documents and padding in one row through this run's attention and head, each alone through transformers",
        ),
        Check(
            "Loss equals plain cross entropy",
            off < limit,
            f"{check.loss:.5f} against {check.plain_loss:.5f} nats over {check.targets} targets",
            f"equal to {limit:.0e}",
            "two packed documents through the run's loss, sums over all targets, against the plain model's mean",
        ),
        Check(
            "Documents in a row do not see each other",
            None if isolated and stand_in else isolated,
            f"the other document moves by {check.leak:.1e}, the changed one by {check.changed:.1e}{stand_in}",
            "no move beyond rounding",
            "every token of one document is replaced; largest change of the hidden states of the other one",
        ),
    ]


def compiled_check(compiled: float | None, eager: float | None, dtype: torch.dtype) -> Check:
    """The warm-up's batch through the compiled step and eagerly: nats per target; None where that was not run."""
    how = "the warm-up batch of the largest declared shape, forward pass of the compiled step and of the eager one"
    if compiled is None or eager is None:
        return Check("Compiled step computes what eager does", None, "not compiled, or with dropout", "-", how)
    off = abs(compiled - eager) / max(abs(eager), 1e-9)
    found = f"{compiled:.5f} against {eager:.5f} nats per target"
    limit = SAME_OF_MANY[dtype]
    return Check("Compiled step computes what eager does", off < limit, found, f"equal to {limit:.0e}", how)


def compile_checks(compiled: bool, watch: CompileWatch, error: BaseException | None) -> list[Check]:
    """What the compiler did, from the framework's own records.

    Args:
        error: what ended training, if anything did: a recompile or graph break that was refused is one that happened.
    """
    how = "torch.compile's own records of this process"
    if not compiled:
        return [Check("The step is compiled", None, "eager", "-", how)]
    graphs = int(watch.counts()["compile/graphs"])
    late, breaks, uncompiled = watch.recompile_kinds(), watch.graph_break_reasons(), watch.fallbacks
    if isinstance(error, RecompileError) and not breaks:
        late = [*late, str(error).partition("\n")[0]]
    ran = f"{graphs} graphs"
    if uncompiled:
        ran += f", and {uncompiled:,} calls ran without one (compile.on_recompile=eager)"
        late += [f"run uncompiled instead: {reason}" for reason in watch.fallback_kinds()]
    return [
        Check("The step is compiled", graphs > 0 and not uncompiled, ran, "1 or more, for every call", how),
        Check("No recompiles after the warm-up", not late, "; ".join(late) or "0", "0", how),
        Check("No graph breaks", not breaks, "; ".join(breaks) or "0", "0", how),
        Check(
            "Evaluation compiles nothing",
            watch.in_evaluation == 0 if watch.evaluations else None,
            f"{watch.in_evaluation} compiles during {watch.evaluations} evaluations",
            "0",
            "the same records, before and after each evaluation",
        ),
    ]
