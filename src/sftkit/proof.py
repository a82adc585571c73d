"""What a run shows of itself: checks made with its own model, data and step, written to proof.json."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sftkit.anatomy import vocab_size
from sftkit.attention import plain_attention
from sftkit.compilation import run_eagerly
from sftkit.compile_watch import CompileWatch
from sftkit.data.pack import Layout
from sftkit.data.types import Examples
from sftkit.document_check import TOLERANCE, DocumentCheck
from sftkit.manifest import replace_text
from sftkit.metrics import ShapeCounts
from sftkit.parallel import let_go
from sftkit.tensor_parallel import whole_rows

log = logging.getLogger(__name__)
FILE = "proof.json"
PROBE_LENGTH = 64
SAME = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"Largest relative difference of two ways to compute the same number, by the dtype of the weights."


@dataclass(frozen=True)
class Row:
    """One check, ready to show."""

    name: str
    ok: bool | None
    "None: it does not apply here, or could not be made"
    found: str
    expected: str
    how: str


def document_rows(check: DocumentCheck, dtype: torch.dtype) -> list[Row]:
    """What two documents in one row gave before the first step: logits, loss, isolation."""
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
            "Loss is the mean over target tokens",
            off < limit,
            f"{check.loss:.5f} against {check.plain_loss:.5f} nats over {check.targets} targets",
            f"equal to {limit:.0e}",
            "sums of two unequal micro-batches over their targets together, against plain cross entropy of all targets",
        ),
        Row(
            "Documents in a row do not see each other",
            check.leak <= limit * check.changed and check.changed > 0,
            f"the other document moves by {check.leak:.1e}, the changed one by {check.changed:.1e}",
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
    return Row("Compiled step computes what eager does", off < SAME[dtype], found, f"equal to {SAME[dtype]:.0e}", how)


def mask_row(examples: Examples) -> Row:
    """How much of the training documents is learned, and that each teaches something."""
    tokens, targets = int(examples.lengths.sum()), examples.num_targets
    without = int((targets == 0).sum())
    share = 100.0 * int(targets.sum()) / max(tokens, 1)
    found = f"{share:.1f} % of {tokens:,} tokens in {len(examples):,} documents; {without:,} documents without a target"
    return Row(
        "Every document has targets", without == 0, found, "0 without", "the mask of the tokenized training data"
    )


def resume_row(step: int, folder: Path | None) -> Row:
    """Where the run started from."""
    how = "sha256 of the manifest of the checkpoint, whose files all matched the hashes in it"
    if folder is None:
        return Row("Resumed from a verified checkpoint", None, "started anew", "-", how)
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
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
    return Row("Only declared shapes", shapes.undeclared == 0, found, declared, how)


def compile_rows(compiled: bool, watch: CompileWatch) -> list[Row]:
    """What the compiler did, from the framework's own records."""
    how = "torch.compile's own records of this process"
    if not compiled:
        return [Row("The step is compiled", None, "eager", "-", how)]
    graphs = int(watch.counts()["compile/graphs"])
    late, breaks = watch.recompile_kinds(), watch.graph_break_reasons()
    return [
        Row("The step is compiled", graphs > 0, f"{graphs} graphs", "1 or more", how),
        Row("No recompiles after the warm-up", not late, "; ".join(late) or "0", "0", how),
        Row("No graph breaks", not breaks, "; ".join(breaks) or "0", "0", how),
        Row(
            "Evaluation compiles nothing",
            watch.in_evaluation == 0,
            f"{watch.in_evaluation} compiles during evaluations",
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
        replace_text(run_dir / FILE, text)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / FILE, error)
