"""Rows of proof.json on the data, the batches and the checkpoint of a run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.data.batches.pack import Layout
from sftkit.data.tokens.chat import PromptedTargets
from sftkit.data.types import Examples
from sftkit.models import files
from sftkit.models.kind import kind_of
from sftkit.models.structure import inference, positions, vocab_size
from sftkit.models.trained import adapters_of
from sftkit.parallel.tensor import without_sequence_parallel
from sftkit.parallel.wrap import as_whole, reshard
from sftkit.rundir.manifest import check_loadable
from sftkit.rundir.names import MANIFEST
from sftkit.tracking.meter import ShapeCounts
from sftkit.tracking.names import Check

PROBE_LENGTH = 64


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
    last = examples.offsets[1:] - 1  # the text after the last target was cut off
    masked = examples.num_targets < examples.lengths
    tokens, targets = int(examples.lengths.sum()), int(np.count_nonzero(examples.is_target))
    share = f"{100 * targets / max(tokens, 1):.1f} % of {tokens:,} positions in {len(examples):,} documents are targets"
    if not masked.any():
        return Check(name, None, share, "-", how)
    ended = examples.is_target[last] & np.isin(examples.ids[last], list(eos_token_ids))
    percent = 100.0 * float(ended[masked].mean())
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


def logits_of(orig_model: PreTrainedModel) -> dict[str, Any]:
    """Return a digest of the logits of a fixed row of tokens, computed eagerly by the plain model; every rank
    calls it.

    Loading the checkpoint on the same kind of device and in the same dtype gives the same bits: see
    `verify_checkpoint`. Attention uses torch's math kernel: torch's choice among the others depends on
    settings of the process, which differ between a run that trains with `sdpa` and a new process, and
    each kernel rounds differently.
    """
    length = min(PROBE_LENGTH, positions(orig_model) or PROBE_LENGTH)
    # Any fixed row of tokens would do. This one needs no random generator, whose numbers may change between versions.
    ids = [(7 * i + 3) % vocab_size(orig_model) for i in range(length)]
    kind, kernel = kind_of(orig_model.config), sdpa_kernel(SDPBackend.MATH)
    try:
        # Everything that could change a bit is fixed: whole weights, no compiled code, one attention kernel.
        with as_whole(orig_model), inference(orig_model), kernel, without_sequence_parallel(orig_model):
            made_up = kind.made_up_inputs(orig_model, 1, length)
            arrays = {"input_ids": np.array([ids]), **({} if made_up is None else made_up.arrays)}
            given = {name: torch.from_numpy(array).to(orig_model.device) for name, array in arrays.items()}
            logits = kind.plain_logits(orig_model, given)[0].float().cpu()
    finally:
        # a forward pass without a backward pass leaves gathered weights behind
        reshard(orig_model)
    adapters = adapters_of(orig_model)
    return {
        **({"base": "nf4"} if adapters is not None and adapters.config.base == "nf4" else {}),
        "ids": ids,
        "sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "last": logits[-1, :8].tolist(),
        "norm": float(logits.double().norm()),
        "device": orig_model.device.type,
        "dtype": str(orig_model.dtype).removeprefix("torch."),
    }


def verify_checkpoint(folder: Path, recorded: Mapping[str, Any]) -> Check:
    """Load a checkpoint with plain transformers and compare its logits with the digest that its run recorded.

    Args:
        folder: step directory.
        recorded: "logits" of the run's proof.json.

    Raises:
        ConfigError: one of its files is damaged.
    """
    check_loadable(str(folder))
    dtype = getattr(torch, recorded["dtype"])
    # Plain transformers without any setup of ours, as a server would load it.
    name = files.auto_class_in(folder)
    adapter = files.adapter_at(ModelConfig(path=str(folder)))
    if adapter is None:
        model, info = getattr(transformers, name).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    else:
        from sftkit.models.adapters import adapters_in, add_adapters

        base, revision = str(adapter.base.path), adapter.base.revision or "main"
        model, info = getattr(transformers, name).from_pretrained(
            base, dtype=dtype, revision=revision, output_loading_info=True
        )
        adapters = adapters_in(adapter)
        config = replace(adapters.config, base=recorded.get("base", "bf16"))
        add_adapters(model, replace(adapters, config=config), torch.device(recorded["device"]))
    found = logits_of(model.to(recorded["device"]).eval())
    # Tensors that the class lacks change no logits, but then the files do not match this class.
    others = [f"{key}: {sorted(map(str, names))[0]}" for key, names in info.items() if names]
    same = found["sha256"] == recorded["sha256"]
    words = "the same bits" if same else f"norm {found['norm']:.6g} against {recorded['norm']:.6g}"
    loaded = f"{name}.from_pretrained" + (f" of {base} with these factors, computed by sftkit" if adapter else "")
    how = f"{loaded}, {len(recorded['ids'])} fixed tokens, sha256 of the logits"
    words, ok = "; ".join([words, *others]), same and not others
    return Check("Checkpoint gives the logits of the run", ok, words, "the same bits", how)
