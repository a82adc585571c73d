"""Run cases of `make patterns` on the ranks of this process group through the training engine. The main rank
writes what a rank holds in memory and exchanges with others, observed from outside: a dispatch mode sees every
operation of torch.

One mode sees the collectives of DDP's reducer, of FSDP2 and of DTensors (functional ones), the sends of a pipeline,
and every new tensor. Counted bytes are those of the whole tensor that the ranks of a group start or end with; `sent`
is each rank's share with a ring.

python -m labs.patterns.measure OUT.json CASE ...      started by run.py, with a launcher for several ranks
"""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch's notes name this path (pytorch/pytorch#110073)

from labs.bench.plan import DataPlan, LognormalLengths
from labs.bench.worker import ModelSpec, new_model, synthetic_documents
from labs.patterns.run import MODEL, ROW_LENGTH, ROWS, TOPOLOGY_CASES, TRAINED_STEPS, TimelinePass, TopologyCase
from labs.patterns.traffic import ring_share
from sftkit.config.schema import CompileConfig, Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.config.tables import DEFAULT
from sftkit.memory import plan as memory_plan
from sftkit.objectives.objective import NextToken
from sftkit.ops.tensors import local
from sftkit.runtime import start as runtime
from sftkit.runtime.hardware import environment
from sftkit.runtime.script import script
from sftkit.train.assemble import Training, lay_out, make_engine
from sftkit.train.parts import EncodedDocuments

_KINDS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "allreduce_": ("all_reduce", lambda args, out: args[0]),
    "allreduce_coalesced_": ("all_reduce", lambda args, out: args[0]),
    "all_reduce": ("all_reduce", lambda args, out: out),
    "_allgather_base_": ("all_gather", lambda args, out: args[0]),
    "allgather_": ("all_gather", lambda args, out: args[0]),
    "all_gather_into_tensor": ("all_gather", lambda args, out: out),
    "all_gather": ("all_gather", lambda args, out: out),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, out: args[1]),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, out: args[0]),
    "reduce_scatter": ("reduce_scatter", lambda args, out: args[0]),
    "broadcast_": ("broadcast", lambda args, out: args[0]),
    "send": ("send", lambda args, out: args[0]),
}
"Operation -> its name here, and its whole tensor among arguments and result."
WITHOUT_BYTES = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
"The receiving end of a send, and operations that move no data."
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"Operators of collectives: in place (DDP, FSDP2, send), functional (DTensor), and the latter with a backward pass."
OURS = "sftkit"
"Operators of ops.gather_rows, whose inside is invisible to a mode."


class TrafficRecorder(TorchDispatchMode):
    """A mode that records collectives and live tensors within the context. It does not work for compiled code, which
    dispatches nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        "(kind, ranks of the group) -> bytes of each call"
        self.alive = self.max_alive = 0
        "bytes of tensors that were made inside"
        self._sizes: dict[int, int] = {}
        self._there: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}

    def begin_step(self) -> None:
        """Reset the calls and the peak."""
        self.calls.clear()
        self.max_alive = self.alive

    def exchanged(self) -> list[dict[str, Any]]:
        """Return the calls since `begin_step` by kind and group, as plain data."""
        found = []
        for (kind, ranks), sizes in sorted(self.calls.items()):
            sent = sum(sizes) * ring_share(kind, len(ranks))
            found.append({"kind": kind, "ranks": [*ranks], "calls": len(sizes), "bytes": sum(sizes), "sent": sent})
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor's operator would be counted with the size of the whole tensor, of which this rank holds a part.
        if DTensor in types:
            return NotImplemented  # it is dispatched again in the form that DTensor makes of it
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES or (func.namespace == OURS and name in _KINDS):
            self._count(name, args, out)
        for tensor in _tensors(out):
            # _cdata, the address of torch's own object, is private; Python objects do not show whether they share a
            # storage (pytorch/pytorch#65950), and data_ptr changes when a storage is resized.
            storage = tensor.untyped_storage()
            # An argument with this memory is the result itself, or the result is a view of it.
            known = any(each.untyped_storage()._cdata == storage._cdata for each in _tensors(args))
            if storage._cdata not in self._sizes and not known:
                self.resized(storage, storage.nbytes())
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name in WITHOUT_BYTES:
            return
        kind, whole = _KINDS[name]  # a KeyError names a collective that is not counted yet
        size = sum(t.numel() * t.element_size() for t in _tensors(whole(args, out)))
        self.calls[kind, _ranks(args)].append(size)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record a storage that is new, or whose size in bytes changed."""
        key = storage._cdata
        if key not in self._sizes:
            # A weak reference: counting must not keep tensors alive.
            self._there[key] = weakref.KeyedRef(storage, self._freed, key)
        self.alive += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.max_alive = max(self.max_alive, self.alive)

    def _freed(self, there: weakref.KeyedRef[int, torch.UntypedStorage]) -> None:
        del self._there[there.key]
        self.alive -= self._sizes.pop(there.key)


@contextmanager
def recording() -> Iterator[TrafficRecorder]:
    """Yield an active TrafficRecorder. FSDP2 frees and allocates the memory of gathered weights by the size of their
    storage, which is not an operation.
    """
    recorder, resize = TrafficRecorder(), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found = resize(storage, size)
        recorder.resized(storage, size)
        return found

    # Replaced on the class, because no dispatch mode sees it: it is not an operator in eager
    # (pytorch/pytorch#122434). Restored at the end.
    with mock.patch.object(torch.UntypedStorage, "resize_", resize_), recorder:
        yield recorder


class Saved:
    """The bytes that forward passes save for their backward passes, without weights."""

    def __init__(self) -> None:
        self._users: dict[int, int] = defaultdict(int)
        self.alive = self.max_alive = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count saved tensors within the context until they are freed, with a new peak."""
        self.max_alive = self.alive
        # Unpacking returns the tensor itself, so the backward pass computes the same.
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # _base is private (pytorch/pytorch#32560): a view of a weight (a transposed one, for example) refers to the
        # weight there, and uses no memory of its own.
        if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            return _Kept(tensor, lambda: None)
        self.alive += 0 if self._users[key] else size
        self._users[key] += 1
        self.max_alive = max(self.max_alive, self.alive)
        return _Kept(tensor, lambda: self._release(key, size))

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        self.alive -= 0 if self._users[key] else size


class _Kept:
    """A saved tensor, with a callback for when it is freed."""

    def __init__(self, tensor: torch.Tensor, at_end: Callable[[], None]) -> None:
        self.tensor, self._at_end = tensor, at_end

    def __del__(self) -> None:
        self._at_end()


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for each in tree for tensor in _tensors(each)] if isinstance(tree, list | tuple) else []


def _ranks(args: Any) -> tuple[int, ...]:
    """Return the ranks of the group among a collective's arguments: an object, or a name for a functional one."""
    for arg in reversed(args):
        # Private, but functional collectives, whose groups are names (pytorch/pytorch#93173), resolve them with it.
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min"):
            return tuple(
                dist.get_process_group_ranks(
                    dist.distributed_c10d._resolve_process_group(arg)  # type: ignore[arg-type]
                )
            )
        # A ScriptObject reveals its class only by _type (pytorch/pytorch#99542).
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    raise AssertionError("a collective without a group")


LEARNING_RATE = 1e-2
FORWARD_SECONDS, BACKWARD_SECONDS = 0.2, 0.4
"""Seconds of a process's share of a micro-batch, computation and a pause together: longer than this small model's
processes need, which share the cores of one machine. So only the schedule decides which rank waits.
"""


def recipe(case: TopologyCase, folder: Path) -> Config:
    """Return the settings of a case; eager, so that each operation is visible."""
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
            # Layers are spread evenly, not by times, which differ from run to run.
            pipeline_layers=(MODEL["num_hidden_layers"] // case.stages,) * case.stages if case.schedule else None,
        ),
        compile=CompileConfig(enabled=False),
    )


def _measured(case: TopologyCase, rt: runtime.Runtime, folder: Path) -> dict[str, Any]:
    """Measure a case on this rank: losses, bytes held, bytes exchanged, passes of its stages."""
    rt.topology = case.topology
    cfg = recipe(case, folder)
    lengths = LognormalLengths(count=400, median=24, mean=32, cap=ROW_LENGTH // 2)
    data = DataPlan(row_length=ROW_LENGTH, documents=lengths)
    objective = NextToken(cfg.loss)
    losses, norms, passes = [], [], list[TimelinePass]()
    # Starts before the model is made, so that all live bytes belong to this case.
    with recording() as recorder:
        orig_model = new_model(ModelSpec(MODEL, cfg.run.seed, rt.precision), rt.device)
        documents = EncodedDocuments(synthetic_documents(data, MODEL["vocab_size"]), ROW_LENGTH // 2)
        batches = lay_out(cfg, rt, documents, objective)
        # The plan takes the first entry that fits. On a CPU all fit, so only the leanest is offered: the choice of
        # ranks on a GPU without room for more.
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
                # All ranks begin together, otherwise the wait for a late one would count as a bubble.
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

    # Just before the update the gradients of all micro-batches exist.
    def noted(*args: Any) -> None:
        found.append(_size(local(p.grad) for p in orig_model.parameters() if p.grad is not None))
        update(*args)

    optimizer.update = noted
    return found


def _size(tensors: Iterator[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def timed_passes(stages_per_process: int) -> Iterator[list[TimelinePass]]:
    """Make passes of this process's stages within the context take equally long, and record them.

    Yields:
        the passes so far, in the order in which they ended.
    """
    noted: list[TimelinePass] = []

    def timed(name: str, seconds: float) -> Any:
        plain = getattr(PipelineStage, name)

        def one_chunk(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            found = plain(stage, micro_batch, *args, **kwargs)
            # A pause up to a fixed time: this measures the schedule, not the machine's cores.
            time.sleep(max(start + seconds / stages_per_process - time.monotonic(), 0.0))
            what = {"stage": stage.stage_index, "micro_batch": micro_batch, "forward": name.startswith("forward")}
            noted.append(what | {"start": round(start, 4), "end": round(time.monotonic(), 4)})
            return found

        return mock.patch.object(PipelineStage, name, one_chunk)

    # A stage has no hooks around its passes: its methods are replaced on the class and restored.
    with timed("forward_one_chunk", FORWARD_SECONDS), timed("backward_one_chunk", BACKWARD_SECONDS):
        yield noted


def main(out: str, *keys: str) -> None:
    """Measure all cases of these keys one after the other, and write the file after each."""
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1, precision="fp32"))
    found: dict[str, Any] = {"environment": environment(rt.device, rt.world_size), "cases": {}}
    for key in keys:
        (case,) = (case for case in TOPOLOGY_CASES if case.key == key)
        own = _measured(case, rt, Path(out).parent)
        found["cases"][key] = rt.gathered(own)
        gc.collect()  # free this case's model before the next one's
        if rt.is_main:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
