"""The error of a GPU that ran out of memory: what was tried, and the settings that save most."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sftkit.config.optimizers import FALLBACK
from sftkit.config.schema import Config, OptimConfig
from sftkit.data.pack import Layout
from sftkit.errors import ConfigError
from sftkit.memory.estimate import gib
from sftkit.memory.plan import MemoryPlan
from sftkit.memory.remedies import Remedy, remedies


def explain_oom(error: BaseException, plan: MemoryPlan, cfg: Config, layout: Layout) -> ConfigError:
    """Return the error that says what ran out, and the three settings that save most for this run."""
    tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", str(error))
    device = "the GPU" if plan.total_bytes is None else f"the GPU has {gib(plan.total_bytes)}"
    lines = [f"out of memory: {device}"]
    if torch.cuda.is_available():
        lines.append(f"tensors took up to {gib(torch.cuda.max_memory_allocated())}")
    if tried:
        lines.append(f"{tried.group(1)} more did not fit")
    if plan.estimate is not None:
        lines.append(f"this run was estimated at {gib(plan.estimate.total)}")
    best = remedies(plan, cfg, layout)[:3]
    if best:
        advice = "What saves most here (estimated):" + "".join(f"\n  {remedy.text}" for remedy in best)
        advice += f"\n{_on_resume(best, plan, cfg.optim)}"
    elif plan.estimate is None:
        advice = (
            "Lower train.micro_batch_size, with which a checkpoint can be resumed, or start anew with train.memory=low or "
            f"optim.name={FALLBACK}"
        )
    else:
        advice = "Every setting that saves memory is in use: take a smaller model or a larger GPU"
    return ConfigError(", ".join(lines) + ". " + advice)


def _on_resume(best: Sequence[Remedy], plan: MemoryPlan, optim: OptimConfig) -> str:
    """Return a sentence on which of these settings the run can go on with from its newest checkpoint."""
    settings = [setting for remedy in best for setting in remedy.on_resume]
    if not settings:
        return "A resumed run keeps what these change: they are for a new one"
    named = f" together with optim.name={plan.optim.name}, as auto may now mean another" if optim.name == "auto" else ""
    return f"The newest checkpoint can be resumed (train.resume=auto) with {' or '.join(settings)}{named}"


@contextmanager
def oom_advice(plan: MemoryPlan, cfg: Config, layout: Layout) -> Iterator[None]:
    """Turn running out of GPU memory, within the context, into a ConfigError that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain_oom(error, plan, cfg, layout) from error
