"""Run cases of cases.py on the ranks of this process group, through the engine that training has; the main rank writes
what came out.

python -m labs.patterns.measure OUT.json CASE ...      started by run.py, with a launcher for several
ranks
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from labs.bench.plan import DataPlan, LognormalLengths
from labs.bench.synthetic import ModelSpec, new_model, synthetic_documents
from labs.patterns.cases import MODEL, ROW_LENGTH, ROWS, TOPOLOGY_CASES, TRAINED_STEPS, TopologyCase
from labs.patterns.recorder import Saved, recording
from labs.patterns.tables import TimelinePass
from sftkit.config.optimizers import DEFAULT
from sftkit.config.schema import CompileConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.memory import plan as memory_plan
from sftkit.objectives.next_token import NextToken
from sftkit.ops.dtensor import local
from sftkit.runtime import start as runtime
from sftkit.runtime.hardware import environment
from sftkit.runtime.script import script
from sftkit.train.assemble import Training, lay_out, make_engine
from sftkit.train.parts import EncodedDocuments

LEARNING_RATE = 1e-2
FORWARD_SECONDS, BACKWARD_SECONDS = 0.2, 0.4
"""Seconds that a process's share of a micro-batch takes, its computing and a pause together: longer than the processes
of this small model need, which share the cores of one machine. So the schedule alone decides who waits."""


def recipe(case: TopologyCase, folder: Path) -> Config:
    """Return the settings of a case; eager, so that each operation is seen."""
    return Config(
        run=RunConfig(dir=str(folder)),
        model=ModelConfig(scratch=MODEL, tokenizer="synthetic"),
        data=DataConfig(train=(), max_length=ROW_LENGTH // 2, row_length=ROW_LENGTH),
        optim=OptimConfig(name=DEFAULT, lr=LEARNING_RATE, eps=1e-4, schedule="constant", warmup_ratio=0.0),
        train=TrainConfig(
            max_steps=TRAINED_STEPS,
            global_batch_size=ROWS,
            micro_batch_size=1,
            precision="fp32",
            engine="pipeline" if case.schedule else "blocks",
            pipeline_schedule=case.schedule or "1f1b",
            # Layers are spread evenly, and not by times, which differ from run to run.
            pipeline_layers=(MODEL["num_hidden_layers"] // case.stages,) * case.stages if case.schedule else None,
        ),
        compile=CompileConfig(enabled=False),
    )


def _measured(case: TopologyCase, rt: runtime.Runtime, folder: Path) -> dict[str, Any]:
    """Return what this rank sees of a case: losses, bytes that it holds, bytes that it exchanges, passes
    of its stages."""
    rt.topology = case.topology
    cfg = recipe(case, folder)
    lengths = LognormalLengths(count=400, median=24, mean=32, cap=ROW_LENGTH // 2)
    data = DataPlan(row_length=ROW_LENGTH, documents=lengths)
    objective = NextToken(cfg.loss)
    losses, norms, passes = [], [], list[TimelinePass]()
    # From the making of the model on, so that the bytes alive are all of this case's.
    with recording() as recorder:
        orig_model = new_model(ModelSpec(MODEL, cfg.run.seed, rt.precision), rt.device)
        documents = EncodedDocuments(synthetic_documents(data, MODEL["vocab_size"]), ROW_LENGTH // 2)
        batches = lay_out(cfg, rt, documents, objective)
        # The plan takes the first entry that fits. On a CPU all do, so only the leanest is left to choose, which is
        # what ranks of a GPU without room for more take.
        lean = mock.patch.object(memory_plan, "SHARDINGS", memory_plan.SHARDINGS[-1:])
        with lean if case.lean else nullcontext():
            engine = make_engine(cfg, rt, folder, Training(orig_model, objective, batches.layout))
        saved = Saved()
        at_update = _gradients_at_update(engine.optimizer, orig_model)
        for step in batches.steps(0, TRAINED_STEPS):
            recorder.begin_step()
            with saved.measuring():
                outcome = engine.step(step, LEARNING_RATE)
            exchanged, peak = recorder.exchanged(), recorder.max_alive
            losses.append(float(rt.sum(outcome.sums["nll"])) / step.num_targets)
            norms.append(float(outcome.grad_norm))
    if case.schedule:  # one more step
        with timed_passes(case.stages // case.topology.stages) as passes:
            for step in batches.steps(TRAINED_STEPS, TRAINED_STEPS + 1):
                # All ranks begin together, or the wait for a late one would count as a bubble.
                dist.barrier()
                engine.step(step, LEARNING_RATE)
    states = engine.optimizer.state.values()
    return {
        "losses": losses,
        "grad_norms": norms,
        "bytes": {
            "weights": _size(local(p) for p in orig_model.parameters() if not p.is_meta),
            "gradients": at_update[-1],
            "states": _size(local(v) for state in states for v in state.values() if torch.is_tensor(v)),
            "activations": saved.max_alive,
            "most": peak,
        },
        "exchanged": exchanged,
        "passes": passes,
    }


def _gradients_at_update(optimizer: Any, orig_model: torch.nn.Module) -> list[int]:
    """Return a list to which each update of the optimizer adds the bytes of this rank's gradients."""
    found: list[int] = []
    update: Callable[..., None] = optimizer.update

    # Just before the update the gradients of all micro-batches are there.
    def noted(*args: Any) -> None:
        found.append(_size(local(p.grad) for p in orig_model.parameters() if p.grad is not None))
        update(*args)

    optimizer.update = noted
    return found


def _size(tensors: Iterator[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def timed_passes(stages_per_process: int) -> Iterator[list[TimelinePass]]:
    """Have passes of this process's stages, inside, take equally long, and note them.

    Yields:
        the passes so far, in the order in which they ended.
    """
    noted: list[TimelinePass] = []

    def timed(name: str, seconds: float) -> Any:
        plain = getattr(PipelineStage, name)

        def one_chunk(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            found = plain(stage, micro_batch, *args, **kwargs)
            # A pause up to a fixed time: what is measured is the schedule, not this machine's cores.
            time.sleep(max(start + seconds / stages_per_process - time.monotonic(), 0.0))
            what = {"stage": stage.stage_index, "micro_batch": micro_batch, "forward": name.startswith("forward")}
            noted.append(what | {"start": round(start, 4), "end": round(time.monotonic(), 4)})
            return found

        return mock.patch.object(PipelineStage, name, one_chunk)

    # A stage has no hooks around its passes: its methods are replaced on the class, and put back.
    with timed("forward_one_chunk", FORWARD_SECONDS), timed("backward_one_chunk", BACKWARD_SECONDS):
        yield noted


def main(out: str, *keys: str) -> None:
    """Measure all cases of these keys, one after the other, and write the file after each."""
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1, precision="fp32"))
    found: dict[str, Any] = {"environment": environment(rt.device, rt.world_size), "cases": {}}
    for key in keys:
        (case,) = (case for case in TOPOLOGY_CASES if case.key == key)
        own = _measured(case, rt, Path(out).parent)
        found["cases"][key] = rt.gathered(own)
        gc.collect()  # of this case's model, before the next one's
        if rt.is_main:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
