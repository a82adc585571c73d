"""Rules between the engine and other settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from sftkit.config.graph_passes import CHECKPOINTING, problems
from sftkit.config.optimizers import DEFAULT
from sftkit.config.rule import Get, Problem, Rule
from sftkit.config.topology import Topology


def _engine(get: Get) -> Iterator[Problem]:
    if get("train.engine") != "reference":
        return
    if get("train.precision") != "fp32":
        yield "train.engine", "reference computes in fp32: set train.precision=fp32"
    # Refused, not ignored: a setting without effect in the run that others are judged by would be believed.
    unused: dict[str, str | None] = {"compile.debug": None, "compile.cache": None, "train.fp8": None}
    unused |= {"train.memory": "speed", "attention.backend": "auto", "optim.implementation": "auto"}
    for key, default in unused.items():
        if (get(key) or None) != default:
            yield key, "has no effect with train.engine reference, which is plain: leave it out"
    if get("optim.name") not in ("auto", DEFAULT):
        yield "train.engine", f"reference has torch's AdamW only: set optim.name={DEFAULT}, not {get('optim.name')}"


def _pipeline(get: Get) -> Iterator[Problem]:
    if get("train.engine") != "pipeline":
        for key in ("train.pipeline_stages", "train.pipeline_schedule", "train.pipeline_layers"):
            if get(key) != ("1f1b" if key == "train.pipeline_schedule" else None):
                problem = f"only goes with train.engine pipeline, not {get('train.engine')}"
                yield key, f"{problem}: leave it out, or set train.engine=pipeline"
        return
    if get("data.layout") in ("bucketed", "dynamic"):
        yield (
            "train.engine",
            "pipeline sends hidden states of one shape from stage to stage, and rows of data.layout "
            f"{get('data.layout')} have several: take packed or fixed",
        )
    if get("train.fp8") is not None:
        problem = "does not go with train.engine pipeline: its scales are not exchanged between stages; set it to null"
        yield "train.fp8", problem
    if get("compile.backend") == "cudagraphs" or get("compile.mode") in ("reduce-overhead", "max-autotune"):
        yield (
            "train.engine",
            "pipeline keeps the activations of several micro-batches, which CUDA graphs would overwrite: take "
            "compile.mode default or max-autotune-no-cudagraphs, and another compile.backend than cudagraphs",
        )


def enough_micro_batches(get: Get, topology: Topology) -> Iterator[Problem]:
    """Yield a problem if a pipeline gets too few micro-batches. Processes with rows of their own, or groups of them,
    compute a step in the fewest micro-batches of one size."""
    stages, rows = topology.stages, get("train.global_batch_size") // topology.row_ranks
    schedule = get("train.pipeline_schedule")
    if get("train.engine") != "pipeline" or schedule == "gpipe" or not rows:
        return
    micro_batch_size = get("train.micro_batch_size")
    count = _micro_batches(rows, micro_batch_size)
    made = f"{micro_batch_size} makes {count} micro-batch{'es' * (count != 1)} of a step"
    if schedule == "interleaved":
        if not _in_rounds(count, stages):
            yield (
                "train.micro_batch_size",
                f"{made}, and train.pipeline_schedule interleaved takes them in rounds of one size for {stages} "
                f"processes: up to {2 * stages - 1} of them, or a number that can be divided by itself / {stages}, "
                f"rounded down, as multiples of {stages} can. {_of_rounds(topology, rows, micro_batch_size)}",
            )
    elif count < stages:
        smaller = f"{rows // stages} or less, or " if rows >= stages else ""
        yield (
            "train.micro_batch_size",
            f"{made}, and a pipeline of {stages} stages with train.pipeline_schedule 1f1b needs {stages} or more: set "
            f"{smaller}a larger train.global_batch_size",
        )


def _micro_batches(rows: int, micro_batch_size: int) -> int:
    """Return in how many micro-batches a process, or a group of them, computes its rows of a step, as data.pack divides
    them: by the largest size that divides the rows, up to micro_batch_size."""
    return min(rows // size for size in range(1, min(micro_batch_size, rows) + 1) if rows % size == 0)


def _of_rounds(topology: Topology, rows: int, micro_batch_size: int) -> str:
    """Return which settings next to these make rounds of one size of the rows of a process, for a person."""

    def fits(rows: int) -> bool:
        return _in_rounds(_micro_batches(rows, micro_batch_size), topology.stages)

    # The second search ends: multiples of stages x micro_batch_size are taken. The first may find none.
    batches = [
        *itertools.islice(filter(fits, range(rows - 1, 0, -1)), 1),
        next(filter(fits, itertools.count(rows + 1))),
    ]
    # Of the sizes that divide the rows the next smaller one, else the next larger one.
    low = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    sizes = [n for n in (*low, *(rows // n for n in low)) if _in_rounds(rows // n, topology.stages)]
    size = max((n for n in sizes if n < micro_batch_size), default=min(sizes))
    return (
        f"Set train.micro_batch_size={size}, which makes {rows // size}, or train.global_batch_size to "
        f"{' or '.join(str(n * topology.row_ranks) for n in batches)}"
    )


def _in_rounds(count: int, stages: int) -> bool:
    """Return whether torch's interleaved schedule divides so many micro-batches into rounds of one size."""
    return count % max(1, count // stages) == 0


def _graph(get: Get) -> Iterator[Problem]:
    passes, dispatcher = get("graph.passes"), "graph.token_dispatcher"
    yield from (("graph.passes", problem) for problem in problems(passes))
    # How a recipe is freed of a key of graph that another one may have set.
    resets = {key: f"set {key}={off}" for key, off in (("graph.passes", "[]"), ("graph.dump", "false")) if get(key)}
    if get("train.engine") != "graph":
        resets |= {dispatcher: "leave it out"} if get(dispatcher) != "allgather" else {}
        for key, advice in resets.items():
            yield key, f"only goes with train.engine graph, not {get('train.engine')}: {advice}, or train.engine=graph"
        return
    if get(dispatcher) == "alltoall" and "cuda_graphs" in passes:
        yield (
            dispatcher,
            "alltoall waits on the host for what a router chose, which the pass cuda_graphs cannot record: take "
            "allgather, or leave the pass out",
        )
    for name, does in (("gather_once", "gather weights"), ("reduce_once", "reduce gradients")):
        if name in passes and get("compile.on_recompile") == "eager":
            yield (
                "graph.passes",
                f"{name} does not go with compile.on_recompile=eager, as a rank that runs a micro-batch eagerly would "
                f"{does} while the others do not: set it to warn or error, or leave the pass out",
            )
    if get("data.layout") == "dynamic":
        yield "train.engine", "graph captures fixed shapes: set data.layout=packed, bucketed or fixed"
    if get("train.fp8") is not None:
        yield "train.fp8", f"{get('train.fp8')} does not go with train.engine graph yet: set it to null"
    if get("model.gradient_checkpointing"):
        yield (
            "model.gradient_checkpointing",
            "has no effect with train.engine graph: set train.memory=balanced or low, or put full_checkpointing or "
            "selective_checkpointing into graph.passes",
        )
    for name in sorted(CHECKPOINTING & set(passes)):
        if get("train.memory") != "speed" or get("compile.activation_memory_budget") is not None:
            problem = f"{name} says what is kept: leave train.memory and compile.activation_memory_budget out"
            yield "graph.passes", problem
    for key, advice in resets.items() if not get("compile.enabled") else ():
        yield key, f"only goes with compile.enabled true, without which no graph is captured: {advice}"
    for key in ("compile.modules", "compile.mode", "compile.options", "compile.cache", "compile.debug"):
        if get(key):
            yield key, "has no effect with train.engine graph, where graph.passes say what is compiled: leave it out"


ENGINE_RULES: tuple[Rule, ...] = (_engine, _pipeline, _graph)
