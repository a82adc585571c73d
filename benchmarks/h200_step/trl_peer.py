"""TRL's SFTTrainer, tuned, on the rows, weights and clock of a bench run: a `worker` of peers.yaml, not run by hand.
A recipe with an adapter is trained by TRL and peft.

What is the same: model shape and initial weights, the packed rows and their order, rows per optimizer step, AdamW's
settings, clipping, the steps that are left out and the formula of every number. What is TRL's own: it keeps the last
token of a document as an input whose output is thrown away, so its rows have one more position per document (0.25 % at
a mean of 400); AdamW's states have the precision of the weights; options.bf16_autocast switches its autocast on.

options: attention: names to try in order; use_liger_kernel, gradient_checkpointing, bf16_autocast: true | false
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from labs.bench.plan import Job, read_job
from labs.bench.run import measured_row, run_job
from labs.bench.worker import ModelSpec, new_model, rows_in_order, synthetic_documents
from sftkit.data.batches.collate import IGNORE
from sftkit.data.batches.epoch import causal_pairs
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.models.structure import Work, attention_windows, train_flops
from sftkit.ops.flash import document_attention
from sftkit.ops.recurrent import fla_unsupported_reason
from sftkit.runtime.hardware import peak_flops, peak_memory_gib
from sftkit.runtime.start import quiet_libraries, resolve_precision, start_device

ATTENTION = ("flash_attention_4", "flash_attention_3", "flash_attention_2", "sdpa")
DENSE = "sdpa keeps the documents of a row apart by a dense mask, quadratic in the row: no FlashAttention works here"


class Clock(TrainerCallback):
    """Waits for the device where sftkit's loop does, at the end of the first step and of each window."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.window, self.device = window, device
        self.started = self.first = 0.0
        self.ends: list[tuple[int, float, float]] = []
        "(step, when, peak memory in GiB)"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time and the memory at the end of a window."""
        step = state.global_step
        if step == 1 or step % self.window == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.first = self.first or now
            if step % self.window == 0:
                self.ends.append((step, now, peak_memory_gib(self.device)))


def as_dataset(examples: Examples, rows: list[tuple[int, ...]]) -> Dataset:
    """Rows with the columns that TRL's collator reads: input_ids, labels, seq_lengths."""
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for row in rows:
        parts = [examples[i] for i in row]
        columns["input_ids"].append([t for part in parts for t in part.ids.tolist()])
        columns["labels"].append([t for part in parts for t in np.where(part.is_target, part.ids, IGNORE).tolist()])
        columns["seq_lengths"].append([len(part.ids) for part in parts])
    return Dataset.from_dict(columns)


_starts: list[Any] = [None]
"Positions of the last row, where its documents start, and the longest."


def attend_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    position_ids: torch.Tensor,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """FlashAttention-2 as torch brings it, for heads that FlashAttention-4 lacks; documents begin where positions do,
    found once a row, as transformers does for its own FlashAttention."""
    if position_ids is not _starts[0]:
        first = (position_ids.flatten() == 0).nonzero().flatten().int()
        starts = torch.cat([first, first.new_full((1,), position_ids.numel())])
        _starts[:] = [position_ids, starts, int(starts.diff().max())]
    _, starts, longest = _starts
    query, key, value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value))
    out, _lse = document_attention(query, key, value, starts, starts, longest, scaling, sliding_window or 0, "varlen")
    return out[None], None


def working_model(job: Job, precision: str, device: torch.device) -> tuple[PreTrainedModel, str, list[str]]:
    """Return a model with the first attention that trains a packed row here, its name, and why not the others."""
    refused = []
    for name in job.options.get("attention", ATTENTION):
        try:
            model = new_model(ModelSpec(job.fields, job.config.run.seed, precision, name), device)
            try_packed_row(model, device)
            return model, name, refused
        except (ImportError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
            refused.append(f"{name}: {' '.join(str(error).split())[:160]}")
    raise ConfigError(f"options.attention: none works here: {'; '.join(refused)}")


def try_packed_row(model: PreTrainedModel, device: torch.device) -> None:
    """Forward and backward of two documents of 64 tokens, as TRL's collator hands them over; gradients are dropped."""
    ends = torch.tensor([0, 64, 128], dtype=torch.int32, device=device)
    out = model(
        input_ids=torch.ones(1, 128, dtype=torch.int64, device=device),
        position_ids=torch.arange(64, device=device).repeat(2)[None],
        use_cache=False,
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=64,
        max_length_k=64,
        logits_to_keep=1,
    )
    out.logits.float().sum().backward()
    model.zero_grad(set_to_none=True)


def settings(job: Job, device: torch.device) -> SFTConfig:
    """SFTTrainer's arguments; what sftkit's recipe says wherever both can."""
    optim = job.config.optim
    return SFTConfig(
        output_dir=str(job.folder / "trl"),
        max_steps=job.steps.total,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=job.config.train.global_batch_size,
        train_sampling_strategy="sequential",
        padding_free=True,
        max_length=None,  # the rows are made already
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=bool(job.options.get("gradient_checkpointing", False)),
        use_liger_kernel=bool(job.options.get("use_liger_kernel", False)),
        bf16=bool(job.options.get("bf16_autocast", False)),
        optim="adamw_torch_fused" if device.type == "cuda" else "adamw_torch",
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm or 0.0,
        lr_scheduler_type="constant",
        warmup_steps=0,
        logging_steps=job.steps.window,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=job.config.run.seed,
        use_cpu=device.type == "cpu",
    )


def adapter(job: Job) -> LoraConfig | None:
    """Return peft's settings of the recipe's adapter; None: all weights are trained."""
    own = job.config.adapter
    if own is None:
        return None
    if own.targets != ("all-linear",) or own.scaling != "standard":
        raise ConfigError("adapter: this comparison has all linear layers and the scale alpha / rank")
    sizes = {"r": own.rank, "lora_alpha": own.alpha, "lora_dropout": own.dropout, "use_dora": own.method == "dora"}
    return LoraConfig(**sizes, target_modules="all-linear", task_type="CAUSAL_LM")


def tokenizer() -> PreTrainedTokenizerFast:
    """SFTTrainer wants one; the rows are tokens already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def window_lines(
    job: Job, clock: Clock, logged: list[dict[str, Any]], counts: list[tuple[int, int, int]], model: PreTrainedModel
) -> list[dict[str, Any]]:
    """Windows in the words of metrics.jsonl; a loss is the mean of its steps' means.

    Args:
        counts: (useful tokens, targets, attention pairs of all layers) of each step.
    """
    peak = peak_flops(clock.device) if model.dtype == torch.bfloat16 else None
    by_step = {entry["step"]: entry for entry in logged if "loss" in entry}
    lines, before, done = [], clock.started, 0
    for step, now, gib in clock.ends:
        tokens, targets, pairs = (sum(values) for values in zip(*counts[done:step], strict=True))
        seconds = now - before
        flops = train_flops(model, Work(tokens, targets, pairs))
        lines.append(
            {
                "step": step,
                "train/loss": by_step[step]["loss"],
                "train/grad_norm": by_step[step].get("grad_norm"),
                "perf/tok_per_sec": tokens / seconds,
                "perf/target_tok_per_sec": targets / seconds,
                "perf/mfu": flops / seconds / peak if peak else None,
                "perf/step_seconds": seconds / (step - done),
                "mem/peak_gib": gib,
                "data/padding_pct": 0.0,
            }
        )
        before, done = now, step
    return lines


def run(job: Job) -> dict[str, Any]:
    """Train as the job says, with TRL; its row."""
    quiet_libraries()
    device = start_device()
    precision = resolve_precision(job.config.train.precision)
    heads = job.fields.get("linear_num_value_heads")
    if heads and device.type == "cuda":
        # It lets the kernels compute that flash-linear-attention rejects by version, as in sftkit's runs.
        sizes = (int(job.fields[f"linear_{name}_head_dim"]) for name in ("key", "value"))
        if reason := fla_unsupported_reason(int(heads), int(heads), *sizes):
            raise ConfigError(f"flash-linear-attention {reason}")
    AttentionInterface.register("varlen", attend_varlen)
    model, attention, refused = working_model(job, precision, device)
    parameters = sum(p.numel() for p in model.parameters())
    examples = synthetic_documents(job.data, model.get_input_embeddings().weight.shape[0])
    rows = rows_in_order(job, examples)
    size = job.config.train.global_batch_size
    steps = [[i for row in rows[j : j + size] for i in row] for j in range(0, len(rows), size)]
    lengths, targets = examples.lengths, examples.num_targets
    kinds = attention_windows(model)
    if kinds is None:
        raise ConfigError(f"{job.fields['model_type']}: a layer whose attention is not known")
    counts = [
        (
            int(lengths[d].sum()),
            int(targets[d].sum()),
            sum(n * int(causal_pairs(lengths[d], one.keys, chunked=one.chunked).sum()) for one, n in kinds.items()),
        )
        for d in steps
    ]
    clock = Clock(job.steps.window, device)
    trainer = SFTTrainer(
        model=model,
        args=settings(job, device),
        train_dataset=as_dataset(examples, rows),
        processing_class=tokenizer(),
        peft_config=adapter(job),
        callbacks=[clock],
    )
    clock.started = time.perf_counter()
    trainer.train()
    return {
        "parameters": parameters,
        "precision": precision,
        "attention": {"backend": attention, "why": "; ".join(refused) or "the first of the list"},
        "optimizer": f"torch AdamW, states in {precision}",
        "note": f"{job.options or 'options as in trl_peer.py'}; {attention}"
        + (f": {DENSE}" if attention == "sdpa" else ""),
        **measured_row(window_lines(job, clock, trainer.state.log_history, counts, model), job.steps),
        "reserved_memory_gib": torch.cuda.memory_reserved() / 2**30 if device.type == "cuda" else None,
        "warm_up_seconds": None,
        "first_step_seconds": clock.first - clock.started,
    }


if __name__ == "__main__":
    run_job(read_job(Path(sys.argv[1])), run)
