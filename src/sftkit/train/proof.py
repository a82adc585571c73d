"""What a run shows of itself: checks made with its own model, data and step, written to proof.json."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sftkit.compile.contract import run_eagerly
from sftkit.compile.watch import CompileWatch
from sftkit.data.pack import Layout
from sftkit.data.types import Examples
from sftkit.engine.self_check import TOLERANCE, DocumentCheck
from sftkit.errors import RecompileError
from sftkit.models.structure import vocab_size
from sftkit.ops.attention import plain_attention
from sftkit.parallel.fsdp import let_go
from sftkit.parallel.tensor import whole_rows
from sftkit.runtime.files import replace_text
from sftkit.runtime.rundir import MANIFEST, PROOF
from sftkit.tracking.meter import ShapeCounts

log = logging.getLogger(__name__)
PROBE_LENGTH = 64
SAME = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"Largest relative difference of a loss of a dozen targets that is computed in two ways, by the dtype of the weights."
SAME_OF_MANY = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
"The same for the mean over a whole batch, in which roundings cancel."


@dataclass(frozen=True)
class Row:
    """One check, ready to show."""

    name: str
    ok: bool | None
    "None: it does not apply here, or could not be made"
    found: str
    expected: str
    how: str


def document_rows(check: DocumentCheck, dtype: torch.dtype, backend: str) -> list[Row]:
    """What two documents in one row gave before the first step: logits, loss, isolation.

    Args:
        backend: attention of the run. Where `check` had to be made with another one, isolation is not known of it.
    """
    stand_in = "" if check.backend == backend else f" ({check.backend} stands in for {backend})"
    isolated = check.leak <= SAME[dtype] * check.changed and check.changed > 0
    limit = SAME[dtype]
    off = abs(check.loss - check.plain_loss) / max(abs(check.plain_loss), 1e-9)
    return [
        Row(
            "Same logits as the plain model",
            check.logits_difference < TOLERANCE,
            f"relative difference {check.logits_difference:.2e}",
            f"below {TOLERANCE:.0e}",
            "two documents and padding in one row through this run's attention and head, each alone through transformers",
        ),
        Row(
            "Loss equals plain cross entropy",
            off < limit,
            f"{check.loss:.5f} against {check.plain_loss:.5f} nats over {check.targets} targets",
            f"equal to {limit:.0e}",
            "two packed documents through the run's loss, sums over all targets, against the plain model's mean",
        ),
        Row(
            "Documents in a row do not see each other",
            None if isolated and stand_in else isolated,
            f"the other document moves by {check.leak:.1e}, the changed one by {check.changed:.1e}{stand_in}",
            "no move beyond rounding",
            "every token of one document is replaced; largest change of the hidden states of the other one",
        ),
    ]


def compiled_row(compiled: float | None, eager: float | None, dtype: torch.dtype) -> Row:
    """The warm-up's batch through the compiled step and eagerly: nats per target; None where that was not run."""
    how = "the warm-up batch of the largest declared shape, forward pass of the compiled step and of the eager one"
    if compiled is None or eager is None:
        return Row("Compiled step computes what eager does", None, "not compiled, or with dropout", "-", how)
    off = abs(compiled - eager) / max(abs(eager), 1e-9)
    found = f"{compiled:.5f} against {eager:.5f} nats per target"
    limit = SAME_OF_MANY[dtype]
    return Row("Compiled step computes what eager does", off < limit, found, f"equal to {limit:.0e}", how)


def mask_row(examples: Examples, ends: Sequence[int]) -> Row:
    """How much of the training documents is learned, and whether those with a mask teach to end the turn.

    Args:
        ends: tokens that end a turn.
    """
    name, how = "Answers end with a learned end of turn", "the mask of the tokenized training data"
    sums = np.concatenate([[0], np.cumsum(examples.is_target, dtype=np.int64)])
    last = examples.offsets[1:] - 1  # whatever follows the last target was cut off
    masked = examples.num_targets < examples.lengths
    tokens, targets = int(examples.lengths.sum()), int(sums[-1])
    share = (
        f"{100.0 * targets / max(tokens, 1):.1f} % of {tokens:,} positions in {len(examples):,} documents are targets"
    )
    if not masked.any():
        return Row(name, None, share, "-", how)
    ended = examples.is_target[last] & np.isin(examples.ids[last], list(ends))
    percent = 100.0 * float(ended[masked].mean())
    return Row(name, percent >= 99.0, f"{percent:.1f} % of documents with a mask; {share}", "99 % or more", how)


def divisor_row(seen: int, divided_by: int) -> Row:
    """Whether the loss was divided by the number of targets that all ranks and micro-batches really had."""
    same = abs(seen - divided_by) <= 1e-6 * divided_by if divided_by else None  # None: no line was logged
    found = f"{seen:,} targets reached the model, {divided_by:,} were divided by"
    how = "targets counted in the batches of all ranks, against the counts of the plan that gradients are divided by"
    return Row(
        "Loss is divided by the targets of all ranks and micro-batches",
        same,
        found,
        "equal",
        how,
    )


def resume_row(step: int, folder: Path | None) -> Row:
    """Where the run started from."""
    how = "sha256 of the manifest of the checkpoint, whose files all matched the hashes in it"
    if folder is None:
        return Row("Resumed from a verified checkpoint", None, "started anew", "-", how)
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    return Row(
        "Resumed from a verified checkpoint", True, f"step {step}, {folder.name}, {digest[:16]}", "verified", how
    )


def shapes_row(shapes: ShapeCounts, layout: Layout) -> Row:
    """What reached the compiled model against what was declared."""
    if layout.dynamic:
        declared = f"{layout.micro_batch_size} x any multiple of {layout.pad_multiple} up to {layout.max_length}"
        seen = f"{len(shapes.seen)} lengths in {sum(shapes.seen.values()):,} micro-batches"
    else:
        declared = ", ".join(f"{rows} x {length}" for rows, length in layout.shapes)
        seen = ", ".join(f"{rows} x {length}: {count:,}" for (rows, length), count in sorted(shapes.seen.items()))
    found = f"{seen or 'none'}; {shapes.undeclared:,} undeclared"
    how = "the tensors of every micro-batch of this start of the run, on the main rank"
    return Row("Only declared shapes", shapes.undeclared == 0 if shapes.seen else None, found, declared, how)


def compile_rows(compiled: bool, watch: CompileWatch, error: BaseException | None) -> list[Row]:
    """What the compiler did, from the framework's own records.

    Args:
        error: what ended training, if anything did: a recompile or graph break that was refused is one that happened.
    """
    how = "torch.compile's own records of this process"
    if not compiled:
        return [Row("The step is compiled", None, "eager", "-", how)]
    graphs = int(watch.counts()["compile/graphs"])
    late, breaks = watch.recompile_kinds(), watch.graph_break_reasons()
    if isinstance(error, RecompileError) and not breaks:
        late = [*late, str(error).partition("\n")[0]]
    return [
        Row("The step is compiled", graphs > 0, f"{graphs} graphs", "1 or more", how),
        Row("No recompiles after the warm-up", not late, "; ".join(late) or "0", "0", how),
        Row("No graph breaks", not breaks, "; ".join(breaks) or "0", "0", how),
        Row(
            "Evaluation compiles nothing",
            watch.in_evaluation == 0 if watch.evaluations else None,
            f"{watch.in_evaluation} compiles during {watch.evaluations} evaluations",
            "0",
            "the same records, before and after each evaluation",
        ),
    ]


def logits_of(orig_model: PreTrainedModel) -> dict[str, Any]:
    """The logits of a fixed row of tokens through the plain model, eagerly; every rank calls it.

    Whoever loads the checkpoint on the same kind of device and dtype gets the same bits: see `verify_checkpoint`.
    """
    ids = [(7 * i + 3) % vocab_size(orig_model) for i in range(PROBE_LENGTH)]
    was_training = orig_model.training
    orig_model.eval()
    try:
        with torch.no_grad(), run_eagerly(), plain_attention(orig_model), whole_rows():
            batch = torch.tensor([ids], device=orig_model.device)
            logits = orig_model(input_ids=batch, use_cache=False).logits[0].float().cpu()
    finally:
        orig_model.train(was_training)
        let_go(orig_model)
    return {
        "ids": ids,
        "sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "last": logits[-1, :8].tolist(),
        "norm": float(logits.double().norm()),
        "device": orig_model.device.type,
        "dtype": str(orig_model.dtype).removeprefix("torch."),
    }


def verify_checkpoint(folder: Path, recorded: Mapping[str, Any]) -> Row:
    """Load a checkpoint with plain transformers and compare its logits with those that its run wrote down.

    Args:
        folder: a step directory.
        recorded: "logits" of the run's proof.json.
    """
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, recorded["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(recorded["device"]).eval()
    found = logits_of(model)
    same = found["sha256"] == recorded["sha256"]
    words = "the same bits" if same else f"norm {found['norm']:.6g} against {recorded['norm']:.6g}"
    how = f"AutoModelForCausalLM.from_pretrained, {len(recorded['ids'])} fixed tokens, sha256 of the logits"
    return Row("Checkpoint gives the logits of the run", same, words, "the same bits", how)


def write(run_dir: Path, rows: Sequence[Row], logits: Mapping[str, Any] | None = None) -> None:
    """Write proof.json; on the main rank only. A full disk costs the file, not the run."""
    text = json.dumps({"rows": [asdict(row) for row in rows], "logits": logits}, indent=1, ensure_ascii=False)
    try:
        replace_text(run_dir / PROOF, text)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / PROOF, error)
