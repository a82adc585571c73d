"""The passes of a recipe over the graphs of a shape, in order, and what the graphs are like before and after each.

The pass cuda_graphs replays the halves of a graph: no launch costs the host anything, collectives included. A half runs
once as it is, which lets libraries and communicators allocate what they keep; the second call records it, and the
others replay the record. It reads its inputs where they were when it was recorded: weights, and what the forward half
left in the graphs' memory, lie there anyway; a batch is copied there. What is handed out is copied too, as the next
replay writes over it; only what the forward half keeps for the backward half is not, so a backward pass must come
before the next forward pass, of another shape too, as records of all shapes share a memory pool. A step of several
micro-batches keeps this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sftkit.config.tables import PASSES, Pass
from sftkit.graph import compat
from sftkit.graph.graphs import Counts, counts_of, tensor_bytes
from sftkit.graph.passes import gather_once, reduce_once
from sftkit.graph.passes.gather_once import SharedWeights
from sftkit.graph.passes.reduce_once import WholeGradients
from sftkit.graph.passes.regions import flex_attention
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import graph_file

RecordGraph = Callable[[Callable[[], Sequence[Any]]], tuple[Callable[[], None], Sequence[Any]]]
"""Runs a function once, and returns what repeats its work, and what it returned, whose memory each repetition fills
anew."""


class Replayed:
    """A half of a graph that is recorded and replayed."""

    _boxed_call = True  # AOTAutograd's mark of the calling convention

    def __init__(
        self, run: compat.Boxed, in_place: Sequence[bool], handed_out: int | None, record: RecordGraph
    ) -> None:
        """Take a half that nothing is recorded of yet.

        Args:
            run: the half.
            in_place: of each input whether it is where it was in every call.
            handed_out: how many of the first outputs others get; None: all.
        """
        self._run = run
        self._in_place = in_place
        self._handed_out = handed_out
        self._record = record
        self._calls = 0
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._replay: Callable[[], None] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        """Return the outputs: computed at first, then by replaying what was recorded."""
        self._calls += 1
        if self._calls == 1:
            return self._run(args)
        if self._replay is None:
            self._inputs = [
                arg if stays or not isinstance(arg, Tensor) else arg.clone()
                for arg, stays in zip(args, self._in_place, strict=True)
            ]
            self._replay, outputs = self._record(lambda: self._run(list(self._inputs)))
            self._outputs = list(outputs)
        else:
            for mine, given in zip(self._inputs, args, strict=True):
                if isinstance(given, Tensor) and given.data_ptr() != mine.data_ptr():
                    mine.copy_(given)
        # The boxed convention: the caller has given its inputs away, and here nobody needs them any more.
        args.clear()
        self._replay()
        count = len(self._outputs) if self._handed_out is None else self._handed_out
        given_out = [out.clone() if isinstance(out, Tensor) else out for out in self._outputs[:count]]
        return [*given_out, *self._outputs[count:]]


class Recorder:
    """CUDA graphs that share one memory pool: of all halves of all shapes of an engine."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record a function's work and return it, see RecordGraph. Recording runs nothing on the device."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog (pytorch/pytorch#104555) and the loader call CUDA from threads of their own,
        # which in the default mode would invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = work()
        self._graphs.append(graph)
        return graph.replay, outputs

    def close(self) -> None:
        """Destroy the graphs: none can be replayed any more. NCCL waits for those with collectives of a
        communicator before it ends that, and dropping who replays them is not enough: the classes that AOTAutograd
        makes are in reference cycles."""
        # pytorch/pytorch#115388: destroy_process_group hangs while such a graph is there.
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """A graph at one point of its way."""

    graph: str
    "joint, forward, later-forward (gather_once), backward, first-backward or middle-backward (reduce_once)"
    after: str
    "the pass that it comes from: captured, split, or a name of graph.passes"
    counts: Counts
    text: str


@dataclass
class Passes:
    """Applies the passes that a recipe names; one object for each graph that is captured."""

    names: Sequence[str]
    saves_memory: bool = False
    "whether the split keeps no more for the backward pass than torch's activation memory budget"
    recorder: RecordGraph | None = None
    "what records CUDA graphs; None: halves are called"
    shared: SharedWeights | None = None
    "where the micro-batches of a step share whole weights, as gather_once has it; None: each gathers its own"
    sums: WholeGradients | None = None
    "where a step sums whole gradients, as reduce_once has it; None: each micro-batch reduces its own"
    stages: list[Stage] = field(default_factory=list)
    "what the graphs were like, in order"
    _aliases: set[str] = field(default_factory=set)
    "names of values of the forward half that may share memory with a shared weight"
    reduced_once: set[str] = field(default_factory=set)
    "first names of the weights whose gradients only the last micro-batch of a step gives"

    def on_joint(self, graph: GraphModule) -> None:
        """Change the captured graph, in place."""
        self._record("joint", "captured", graph)
        for spec in self._at("joint"):
            resolve_name(spec.fn)(graph)
            graph.recompile()
            self._record("joint", spec.name, graph)

    def _on_half(self, half: str, graph: GraphModule, kept: int | None) -> None:
        """Change a half, in place."""
        # Regions last: they are compiled as they are then, so what merges and moves collectives has to be done.
        for spec in (*self._at("split"), *self._at("regions")):
            resolve_name(spec.fn)(graph, for_inductor=self.for_inductor)
            graph.recompile()
            self._record(half, spec.name, graph, kept)  # no pass changes what a half takes
        # Without a pass that compiles it: run call by call, FlexAttention materialises the whole score matrix, which no
        # memory plan counts.
        if not self._at("regions") and not self.for_inductor and flex_attention(graph):
            self._record(half, "flex_attention", graph, kept)

    @property
    def for_inductor(self) -> bool:
        """Return whether the graphs are Inductor's as a whole: captured in its operators, and split for it."""
        return "full_inductor" in self.names

    def compile_half(self, half: str, num_sums: int, graph: GraphModule, examples: Sequence[Any]) -> compat.Boxed:
        """Change the forward or the backward half, in place, and return what runs it.

        Args:
            num_sums: how many outputs a captured graph has before its gradients.
        """
        kept = tensor_bytes(compat.kept_for_backward(graph)) if half == "backward" else None
        self._record(half, "split", graph, kept)
        if half == "forward" and self.shared is not None:
            forward = gather_once.fork(graph)
            if forward is not None:
                return self._gathering_once(forward, graph, examples)
        if half == "backward" and self.sums is not None:
            backward = reduce_once.fork_backward(graph, several=self.sums.several)
            if backward is not None:
                return self._reducing_once(backward, graph, examples, kept)
        in_place = compat.in_place(graph, half)  # before Inductor owns the graph
        run = self._compiled(half, graph, examples, kept)
        if self.recorder is None:
            return run
        return Replayed(run, in_place, num_sums if half == "forward" else None, self.recorder)

    def _gathering_once(self, fork: gather_once.Fork, graph: GraphModule, examples: Sequence[Any]) -> compat.Boxed:
        """Return what runs the forward half of any micro-batch."""
        assert self.shared is not None
        self._aliases = fork.aliases
        graphs = {"forward": graph, "later-forward": fork.later}
        for name, each in graphs.items():
            self._record(name, "gather_once", each)
        compiled = gather_once.compile_both(
            fork, examples, lambda name, given: self._compiled(name, graphs[name], given)
        )
        return self.shared.half_of(fork.keys, *compiled)

    def _reducing_once(
        self, fork: reduce_once.BackwardFork, graph: GraphModule, examples: Sequence[Any], kept: int | None
    ) -> compat.Boxed:
        """Return what runs the backward half of any micro-batch."""
        assert self.sums is not None
        self.reduced_once = fork.weights
        given = [*examples, *fork.sums.values()]
        graphs = {"first-backward": (fork.first, examples), "middle-backward": (fork.middle, given)}
        graphs["backward"] = (graph, given)
        known = {name: (each, inputs) for name, (each, inputs) in graphs.items() if each is not None}
        for name, (each, _) in known.items():
            self._record(name, "reduce_once", each, kept)
        compiled = {name: self._compiled(name, each, inputs, kept) for name, (each, inputs) in known.items()}
        middle = compiled.get("middle-backward")
        return self.sums.half_of(fork, compiled["first-backward"], middle, compiled["backward"])

    def _compiled(
        self, half: str, graph: GraphModule, examples: Sequence[Any], kept: int | None = None
    ) -> compat.Boxed:
        self._on_half(half, graph, kept)
        codegen = self._at("codegen")
        if not codegen:
            return compat.boxed(graph)
        aliases = half.endswith("backward") and self._aliases
        with compat.kept_from_reuse(graph, aliases) if aliases else nullcontext():
            return resolve_name(codegen[0].fn)(graph, examples, half)

    def _at(self, stage: str) -> list[Pass]:
        return [PASSES[name] for name in self.names if PASSES[name].stage == stage]

    def _record(self, name: str, after: str, graph: GraphModule, kept: int | None = None) -> None:
        counts = counts_of(graph)._replace(kept=kept)
        self.stages.append(Stage(name, after, counts, graph.print_readable(print_output=False)))


def dump(stages: Mapping[tuple[int, int], Sequence[Stage]], run_dir: Path) -> None:
    """Write the graphs of every shape as text; a full disk costs the files, not the run."""
    try:
        for shape, each in stages.items():
            for number, stage in enumerate(each):
                path = graph_file(run_dir, shape, number, stage.graph, stage.after)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, f"# {stage.counts}\n{stage.text}\n")
    except OSError as error:
        log.warning("the graphs of graph.dump cannot be written: %s", error)
