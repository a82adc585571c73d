"""A run with several adapters: their data, and an evaluation of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sftkit.data.batches.loader import Batches, load_examples
from sftkit.data.batches.many import ManyBatches, ManyDataset, Source, joined, joint_layout
from sftkit.data.batches.pack import make_layout
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Examples
from sftkit.evals.suite import Suite
from sftkit.models.many_adapters import active
from sftkit.objectives.objective import Objective
from sftkit.train.parts import LoadedModel, Run


def load_several(
    run: Run, loaded: LoadedModel, tokenize: RowTokenizer, objective: Objective
) -> tuple[Batches, dict[str, Examples]]:
    """Load the documents of all adapters, those that several share once; return batches and validation documents.

    Raises:
        ConfigError, DataError: the sources or the layout are invalid.
    """
    cfg = run.cfg
    entries = cfg.adapters or ()
    data = [replace(cfg.data, train=entry.data or cfg.data.train, val=()) for entry in entries]
    first_part, validation = load_examples(replace(data[0], val=cfg.data.val), tokenize, nullcontext())
    parts: dict[Any, tuple[str, Examples]] = {data[0].train: (entries[0].name, first_part)}
    for entry, own in zip(entries, data, strict=True):
        if own.train not in parts:
            parts[own.train] = entry.name, load_examples(own, tokenize, nullcontext())[0]
    first, total = {}, 0
    for key, (_, examples) in parts.items():
        first[key] = total
        total += len(examples)
    # The rows of a step are the same in micro-batches of any size.
    train = replace(cfg.train, micro_batch_size=cfg.train.global_batch_size)
    layouts = {key: make_layout(cfg.data, train, one.lengths, loaded.max_length) for key, (_, one) in parts.items()}
    sources = []
    for entry, own in zip(entries, data, strict=True):
        seed = cfg.run.seed if entry.seed is None else entry.seed
        sources.append(Source(layouts[own.train], seed, first[own.train], len(parts[own.train][1])))
    examples = joined([*parts.values()])
    pad_id = int(loaded.tokenizer.pad_token_id or 0)
    layout = joint_layout([source.layout for source in sources], cfg.train)
    dataset = ManyDataset(examples, layout, pad_id=pad_id, divisors=objective.divisors(examples))
    resumed = {"earlier": run.resume.segments, "first_step": run.resume.state["step"]}
    return ManyBatches(dataset, sources, cfg.train, num_workers=cfg.data.num_workers, **resumed), validation


class EvaluationOfEach:
    """Evaluates the adapters one after the other."""

    def __init__(self, suite: Suite, names: Sequence[str]) -> None:
        """Evaluate each as `suite` does. `names`: of the adapters."""
        tasks = tuple(task for task, _ in suite.encoded_tasks)
        self._suites = {name: replace(suite, part=name, tasks=tasks) for name in names}

    def evaluate(self, step: int) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """Return the metrics of all adapters, with the name behind val/ or eval/, and their sample answers."""
        metrics: dict[str, float | None] = {}
        samples = []
        for k, (name, suite) in enumerate(self._suites.items()):
            with active(suite.orig_model, k):
                values, answers = suite.evaluate(step)
            metrics |= {key.replace("/", f"/{name}/", 1): value for key, value in values.items()}
            samples += [{"adapter": name, **answer} for answer in answers]
        return metrics, samples
