"""Run on ranks by the tests of sharded models: several topologies in one launch, what came out as files."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers import full_parameters, make_examples, make_layout_of, over_ranks
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel

from sftkit.config.schema import EvalConfig, LossConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.epoch import RankRows, row_shard
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.types import Row
from sftkit.engine.step import TrainStep
from sftkit.errors import ConfigError
from sftkit.evals import results
from sftkit.evals.results import Choices, ExampleScores, Likelihoods, Task
from sftkit.evals.suite import Suite
from sftkit.evals.tasks import load_task
from sftkit.models.load import load_model
from sftkit.models.tokenizer import load_tokenizer
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.optim.protocol import build_optimizer
from sftkit.parallel.pipeline import stagewise
from sftkit.parallel.wrap import Sharding, distribute, reshard
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.runtime.start import Runtime

ROOT = Path(__file__).parents[2]
TOPOLOGIES = {
    "one": Topology(),
    "ddp": Topology(replicas=2),
    "fsdp2": Topology(shards=2, sharded=True),
    "fsdp2 of 3": Topology(shards=3, sharded=True),
    "fsdp2 of 4": Topology(shards=4, sharded=True),
    "tensor": Topology(tensor=2, sharded=True),
    "context": Topology(context=2, sharded=True),
    "pipeline": Topology(stages=2),
    "pipeline, interleaved": Topology(stages=2),
    "pipeline of 4": Topology(stages=4),
    "pipeline x ddp": Topology(stages=2, replicas=2),
    "pipeline x fsdp2": Topology(stages=2, shards=2, sharded=True),
    "hsdp": Topology(replicas=2, shards=2, sharded=True),
    "fsdp2 x tensor": Topology(shards=2, tensor=2, sharded=True),
    "fsdp2 x context": Topology(shards=2, context=2, sharded=True),
}
NO_TOKENS: Any = SimpleNamespace(
    get_vocab=dict,
    added_tokens_decoder={},
    bos_token=None,
    eos_token=None,
    eos_token_id=None,
    pad_token=None,
    chat_template=None,
)
"In place of a tokenizer where only its tokens are looked at."


def start() -> Runtime:
    return runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))


def gathered(orig_model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, whole."""
    return {name: t.detach().clone() for name, t in [*full_parameters(orig_model), *orig_model.named_buffers()]}


class Job:
    """A model from a folder, shared out as a topology says, and what trains it on rows that follow from the step."""

    def __init__(
        self,
        rt: Runtime,
        topology: str,
        folder: Path,
        precision: str = "fp32",
        sharding: Sharding | None = None,
        optim: str = "adamw",
        chat_template: str | None = None,
        pad_vocab: int | None = None,
    ) -> None:
        self.rt = replace(rt, topology=TOPOLOGIES[topology], precision=precision)
        self.again = partial(Job, rt, topology, folder, precision, sharding, optim, chat_template, pad_vocab)
        source = ModelConfig(path=str(folder), chat_template=chat_template, pad_vocab_to_multiple_of=pad_vocab)
        tokenizer = load_tokenizer(source) if chat_template else NO_TOKENS
        self.orig_model = load_model(source, tokenizer, 0, precision, empty=self.rt.topology.partial)
        self.model = ModelWithLoss(self.orig_model, "reference", NextToken(LossConfig()))
        schedule: Any = "interleaved" if "interleaved" in topology else "1f1b"
        train = TrainConfig(pipeline_schedule=schedule)
        self.wrapped = distribute(self.model, source, sharding or Sharding(), self.rt, train)
        self.optimizer = build_optimizer(self.orig_model, OptimConfig(name=optim, lr=1e-2, eps=1e-4))  # type: ignore[arg-type]
        examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4, target_share=0.3)
        self.layout = make_layout_of("packed", examples.lengths, world_size=self.rt.data_world_size)
        self.batches = Batches(
            StepDataset(examples, self.layout, RankRows(self.rt.data_rank, row_shard(self.rt.topology, self.rt.rank))),
            seed=0,
        )

    def steps(self, first: int, last: int) -> list[float]:
        """Train steps first + 1 to last; the loss of each over all ranks."""
        losses = []
        for step in self.batches.steps(first, last):
            outcome = TrainStep(self.wrapped, self.optimizer, self.model.objective, self.rt, max_grad_norm=1.0).step(
                step, 1e-2
            )
            losses.append(float(over_ranks(self.rt, outcome.sums)["nll"]) / step.num_targets)
        return losses

    def suite(self, tokenizer: Any, config: EvalConfig, samples: list[Row]) -> Suite:
        validation = {"val": make_examples([5, 9, 13, 30, 31, 2, 7])}
        return Suite(config, self.orig_model, tokenizer, self.rt, self.model, validation, self.layout, samples)


def main_load(folder: str) -> None:
    """Load each case of plan.json; write the weights that came out, or the error of every rank."""
    rt, out = start(), Path(folder)
    plan = json.loads((out / "plan.json").read_text())
    memory = max_memory(rt, out, plan["large"])
    problems: dict[str, list[str]] = {}
    for name, (model, topology, precision) in plan["cases"].items():
        try:
            loaded = gathered(Job(rt, topology, out / model, precision).orig_model)
        except ConfigError as error:
            problems[name] = gather(str(error))
            continue
        if rt.is_main:
            torch.save(loaded, out / f"{name}.pt")
    if rt.is_main:
        (out / "found.json").write_text(json.dumps({"problems": problems, "memory": memory}))


def gather(value: Any) -> list[Any]:
    """The value of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def max_memory(rt: Runtime, out: Path, large: list[list[str]]) -> list[list[float]]:
    """The most host memory that each rank took, beyond what it had, to load its half of each (model, precision)."""
    grown, before = [], resident()
    for model, precision in large:
        with anonymous_memory() as peak:
            job = Job(rt, "fsdp2", out / model, precision)
        grown.append(gather(peak() - before))
        del job
        gc.collect()
    return grown


@contextmanager
def anonymous_memory() -> Iterator[Callable[[], float]]:
    """Afterwards: the most host memory, files aside, that this process had meanwhile, in bytes."""
    seen = [resident()]
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(resident())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: max(seen)
    finally:
        over.set()
        watcher.join()


def resident() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return float(line.split()[1]) * 1024


TOKENS = 7
"A limit of answers."
SAMPLES = [
    Row("here", messages=[{"role": "user", "content": text}, {"role": "assistant", "content": "?"}])
    for text in ("seven days", "Berlin", "one two")
]


def choices_task() -> Task[Choices, Likelihoods]:
    """Questions of two groups, each with continuations of several lengths."""
    shots = "How many days are in a week? seven\n\nWhat is the capital of France? Paris\n\n"
    words = ("sea shells", "Berlin", "a user", "one, two, three", "the shore", "a tool", "turns")
    examples = tuple(
        Choices(
            word,
            f"{shots[5 * (i % 2) :]}What is {word}?",
            (" A", " seven", " the sea shore"),
            (0,),
            (1, 5, 13),
            f"{i % 2}",
        )
        for i, word in enumerate(words)
    )

    def judge(examples: Sequence[Choices], outputs: Sequence[Likelihoods]) -> list[ExampleScores]:
        return [{"acc": float(max(g.sums) == g.sums[a.gold[0]])} for a, g in zip(examples, outputs, strict=True)]

    return Task("words", examples, judge, "acc", 1 / 3, {})


def evaluation(job: Job, tokenizer: Any) -> dict[str, Any]:
    """What an evaluation finds, and training with and without one in the middle."""
    counts = [0]

    def count(*_: Any) -> None:
        counts[0] += 1

    plain = job.again().steps(0, 4)
    config = EvalConfig(tasks=("families",), batch_size=2, max_new_tokens=TOKENS, max_examples=1)
    suite = job.suite(tokenizer, config, SAMPLES)
    with stagewise(job.orig_model):
        hook = job.orig_model.model.register_forward_pre_hook(count)
        values, answers = suite.evaluate()
        whole = [name for name, p in job.orig_model.named_parameters() if not isinstance(p, DTensor)]
        # Batches of one, so that ranks are done after different tokens.
        choices = choices_task()
        one_by_one = replace(
            suite, config=replace(config, batch_size=1), tasks=(load_task("families", max_examples=1), choices)
        )
        given, scored = one_by_one.run_tasks()
        (together,) = replace(suite, config=replace(config, batch_size=8), tasks=(choices,)).run_tasks()
        fewer = replace(suite, sample_rows=SAMPLES[:1]).samples()
        hook.remove()
        reshard(job.orig_model)
    trained = job.steps(0, 2)
    with stagewise(job.orig_model):
        suite.evaluate()
    sums = [row["loglikelihoods"] for one in (scored, together) for row in one.records]
    return {
        "values": values | results.values_of([given, scored]),
        "answers": [sample["answer"] for sample in answers],
        "given": [[record["answer"], record["stop"]] for record in given.records],
        "likelihoods": [value for row in sums for value in row],
        "predictions": [row.index(max(row)) for row in sums],
        "fewer": [sample["answer"] for sample in fewer],
        "forwards": counts[0],
        "whole": whole,
        "plain": plain,
        "interrupted": [*trained, *job.steps(2, 4)],
    }


def main_evaluate(folder: str, *cases: str) -> None:
    """Evaluate the model of this folder in each topology, lean ones with weights gathered for each pass."""
    rt, out = start(), Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(out)
    found = {}
    for case in cases:
        topology, *lean = case.split(", ")
        job = Job(rt, topology, out, sharding=Sharding(False, False) if lean else Sharding())
        found[case] = gather(evaluation(job, tokenizer))
    if rt.is_main:
        (out / "evaluated.json").write_text(json.dumps(found))


if __name__ == "__main__":
    mains = {"load": main_load, "evaluate": main_evaluate}
    script(partial(mains[sys.argv[1]], *sys.argv[2:]))
