"""A run with several adapters: their data, and an evaluation of each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from sftkit.checkpoint.resume import NO_CHECKPOINT, ResumeCheckpoint
from sftkit.config.schema import Config
from sftkit.data.batches import many, pack
from sftkit.data.batches.loader import Batches, load_examples
from sftkit.data.reading.columns import without_logging
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Examples
from sftkit.evals import tasks
from sftkit.evals.suite import Suite
from sftkit.models.many_adapters import active
from sftkit.objectives.objective import NextToken, Objective
from sftkit.preflight.analysis import adapter_facts
from sftkit.train.parts import EncodedDocuments


def load_several(cfg: Config, tokenize: RowTokenizer) -> tuple[list[EncodedDocuments], dict[str, Examples]]:
    """Load the documents of each adapter, those that several share once, and the validation documents.

    Raises:
        ConfigError, DataError: the sources are invalid.
    """
    data = [replace(cfg.data, train=entry.data or cfg.data.train, val=()) for entry in cfg.adapters or ()]
    compared = tasks.benchmarks(cfg.data, cfg.eval)
    first, validation = load_examples(replace(data[0], val=cfg.data.val), tokenize, benchmarks=compared)
    found = {repr(data[0].train): first}  # sources may hold mappings, which have no hash
    for one in data:
        if repr(one.train) not in found:
            found[repr(one.train)], held_out = load_examples(one, tokenize, benchmarks=compared)
            validation |= held_out
    pad_id = int(tokenize.tokenizer.pad_token_id or 0)
    return [EncodedDocuments(found[repr(one.train)], tokenize.max_length, pad_id) for one in data], validation


def lay_out_several(
    cfg: Config,
    documents: Sequence[EncodedDocuments],
    objective: Objective,
    resume: ResumeCheckpoint = NO_CHECKPOINT,
    check_data: Callable[[Examples, pack.Layout], None] = lambda *_: None,
) -> Batches:
    """Return the batches of several adapters.

    Args:
        documents: of each adapter; several may have the same. check_data: see `assemble.lay_out`.

    Raises:
        ConfigError, DataError: the layout is invalid.
    """
    entries = cfg.adapters or ()
    # The rows of a step are the same in micro-batches of any size.
    train = replace(cfg.train, micro_batch_size=cfg.train.global_batch_size)
    parts: dict[int, tuple[str, Examples]] = {}
    layouts, firsts, total = {}, {}, 0
    for entry, one in zip(entries, documents, strict=True):
        key = id(one.examples)
        if key not in parts:
            parts[key] = entry.name, one.examples
            layouts[key] = pack.make_layout(cfg.data, train, one.examples.lengths, one.max_length)
            firsts[key] = total
            total += len(one.examples)
    sources = [
        many.Source(
            layouts[id(one.examples)],
            cfg.run.seed if entry.seed is None else entry.seed,
            firsts[id(one.examples)],
            len(one.examples),
        )
        for entry, one in zip(entries, documents, strict=True)
    ]
    examples = many.joined([*parts.values()])
    layout = many.joint_layout([source.layout for source in sources], cfg.train)
    check_data(examples, layout)
    dataset = many.ManyDataset(examples, layout, pad_id=documents[0].pad_id, divisors=objective.divisors(examples))
    resumed = {"earlier": resume.segments, "first_step": resume.state["step"]}
    return many.ManyBatches(dataset, sources, cfg.train, num_workers=cfg.data.num_workers, **resumed)


def data_of_several(cfg: Config, tokenize: RowTokenizer, orig_model: PreTrainedModel | None) -> dict[str, Any]:
    """Return what preflight.analysis.analyse asks of the data of several adapters; see its data_of."""
    with without_logging():
        documents, validation = load_several(cfg, tokenize)
        batches = lay_out_several(cfg, documents, NextToken(cfg.loss))
    adapters = adapter_facts(cfg, batches, orig_model)
    data = {"examples": batches.examples, "layout": batches.layout, "epoch": batches.first_epoch()[0]}
    return {**data, "validation": validation, "adapters": adapters}


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
