"""Check before a run starts that one of its evaluations will write the metric that checkpoint.best names. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from sftkit.config.eval_tasks import METRICS_IN_CHAT, TASK_METRICS
from sftkit.config.rule import Get, Problem
from sftkit.config.schema import SourceConfig, source_label
from sftkit.data.demo.builtin import FAMILIES
from sftkit.runtime.words import first_of

OF_CAPTIONS = tuple(f"eval/captions/{metric}" for metric in ("exact_match", "token_f1", "low", "high"))
"What a captioning run writes of the captions of its data.val (evals/captions.py)."


def best(get: Get, stage: str | None) -> Iterator[Problem]:
    """Refuse a run that names, in checkpoint.best, a metric which it never writes: it would train to its end and keep
    no best checkpoint."""
    wanted, tasks = get("checkpoint.best"), get("eval.tasks")
    validation = get("data.val")
    if wanted is None or get("eval.every") is None or not (tasks or validation):  # the last two have rules of their own
        return
    names = validation_metrics(validation)
    of_others = get("eval.backend") == "lm_eval" and tasks  # whose names are known when it has run
    names += [] if of_others else task_metrics(tasks, get("eval.format"))
    if stage == "caption" and validation:
        names += OF_CAPTIONS
    if wanted not in names and not (of_others and wanted.startswith("eval/")):
        yield "checkpoint.best", _unknown(wanted, names)


def validation_metrics(sources: Sequence[dict]) -> list[str]:
    """Return the names that evals.validation.validate gives the values of validation sources, those of
    all together first."""
    prefixes = ["val", *(f"val/{source_label(SourceConfig(**source))}" for source in sources)] if sources else []
    return [f"{prefix}/{metric}" for prefix in prefixes for metric in ("loss", "bpb")]


def task_metrics(tasks: Sequence[str], format: str) -> list[str]:
    """Return the names that evals.results.values_of gives the values of our tasks."""
    names = []
    for task in tasks:
        metrics = METRICS_IN_CHAT.get(task, TASK_METRICS[task]) if format == "chat" else TASK_METRICS[task]
        names += [f"eval/{task}/{metric}" for metric in (*metrics, "low", "high")]
        if task == "families":
            names += [f"eval/{family}/{metric}" for family in FAMILIES for metric in metrics]
    return [*names, "eval/centred_mean"] if tasks else []


def _unknown(wanted: str, names: list[str]) -> str:
    near = difflib.get_close_matches(wanted, names, n=1)
    meant = f' Did you mean "{near[0]}"?' if near else ""
    return f'"{wanted}" is no metric that an evaluation of this run writes: {first_of(names, 8)}.{meant}'
