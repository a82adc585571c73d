"""Apply the passes of a recipe to the graphs of a shape, in order, and keep the graphs before and after each pass.

The pass cuda_graphs replays the halves of a graph: no launch costs the host anything, collectives included. The first
call runs a half as it is, so that libraries and communicators allocate what they keep. The second call records it, and
later calls replay the record. A replay reads its inputs at the places that they had when it was recorded: weights and
saved activations are there anyway, and a batch is copied there. Outputs are copied, too, because the next replay
overwrites them. Saved activations are not copied, so a backward pass must come before the next forward pass. This holds
between shapes, too: their records share a memory pool. A step of several micro-batches keeps this order.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from sftkit.config.tables import PASSES, Pass
from sftkit.graph import compat, passes
from sftkit.graph.graphs import Counts, counts_of, tensor_bytes
from sftkit.graph.passes.regions import flex_attention
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import graph_file

RecordGraph = Callable[[Callable[[], Sequence[Any]]], tuple[Callable[[], None], Sequence[Any]]]
"Runs a function once. Returns a function that repeats its work, and its results, whose memory each repetition fills."


class Replayed:
    """A half of a graph that is recorded and replayed."""

    _boxed_call = True  # AOTAutograd's mark of the calling convention

    def __init__(
        self, run: compat.Boxed, in_place: Sequence[bool], handed_out: int | None, record: RecordGraph
    ) -> None:
        """Take a half that nothing is recorded of yet.

        Args:
            run: the half.
            in_place: for each input, whether it lies at the same place in every call.
            handed_out: number of the first outputs that leave the graph; None: all.
        """
        self._run = run
        self._in_place = in_place
        self._handed_out = handed_out
        self._record = record
        self._warm = False
        self._inputs: list[Any] = []
        self._outputs: Sequence[Any] = ()
        self._replay: Callable[[], None] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        """Return the outputs: computed in the first call, then by replaying the record."""
        if not self._warm:
            self._warm = True
            return self._run(args)
        if self._replay is None:
            self._inputs = [
                arg if stays or not isinstance(arg, Tensor) else arg.clone()
                for arg, stays in zip(args, self._in_place, strict=True)
            ]
            self._replay, self._outputs = self._record(lambda: self._run(list(self._inputs)))
        else:
            for mine, given in zip(self._inputs, args, strict=True):
                if isinstance(given, Tensor) and given.data_ptr() != mine.data_ptr():
                    mine.copy_(given)
        # The boxed convention: the caller has given its inputs away, and this function no longer needs them.
        args.clear()
        self._replay()
        outputs = self._outputs[: self._handed_out]
        return [*(out.clone() if isinstance(out, Tensor) else out for out in outputs), *self._outputs[len(outputs) :]]


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
    """A graph after a pass."""

    graph: str
    "joint, forward, later-forward (gather_once), backward, first-backward or middle-backward (reduce_once)"
    after: str
    "the pass that it comes from: captured, split, or a name of graph.passes"
    counts: Counts
    text: str


class Passes:
    """Apply the passes that a recipe names to the graphs of an engine, one shape after the other."""

    def __init__(self, names: Sequence[str], micro_batches: int = 1, *, saves_memory: bool = False) -> None:
        """Begin without a graph.

        Args:
            names: of graph.passes, in order.
            micro_batches: of a step on a rank, at most.
            saves_memory: the split keeps no more for the backward pass than torch's activation memory budget.
        """
        self.names = names
        self.saves_memory = saves_memory
        self.for_inductor = "full_inductor" in names
        "whether the graphs are Inductor's as a whole: captured in its operators, and split for it"
        self._recorder: Recorder | None = None
        self._shared = passes.once.SharedWeights() if "gather_once" in names else None
        self._sums = passes.once.WholeGradients(several=micro_batches > 2) if "reduce_once" in names else None
        self.begin()

    def begin(self) -> None:
        """Begin with the graphs of another shape."""
        self.stages: list[Stage] = []
        "the graphs of the shape, in order"
        self.reduced_once: set[str] = set()
        "first names of the weights whose gradients only the last micro-batch of a step gives"
        self._aliases: set[str] = set()  # values of the forward half that may share memory with a shared weight

    @contextmanager
    def step_of(self, micro_batches: int) -> Iterator[None]:
        """Let n micro-batches, forward and backward, be a step within the context: gather_once and reduce_once need to
        know. Weights must not change before the last forward pass."""
        with ExitStack() as stack:
            if self._shared is not None:
                stack.enter_context(self._shared.sharing(micro_batches))
            if self._sums is not None:
                stack.enter_context(self._sums.summing(micro_batches))
            yield

    @property
    def reduces(self) -> bool:
        """Return whether the backward pass to come gives every gradient."""
        return self._sums is None or self._sums.reduces

    def close(self) -> None:
        """Drop the records."""
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None

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
            self._record(half, spec.name, graph, kept)  # no pass changes the inputs of a half
        # Without a pass that compiles it: run call by call, FlexAttention materialises the whole score matrix, which no
        # memory plan counts.
        if not self._at("regions") and not self.for_inductor and flex_attention(graph):
            self._record(half, "flex_attention", graph, kept)

    def compile_half(self, half: str, num_sums: int, graph: GraphModule, examples: Sequence[Any]) -> compat.Boxed:
        """Change the forward or the backward half, in place, and return what runs it.

        Args:
            num_sums: how many outputs a captured graph has before its gradients.
        """
        kept = tensor_bytes(compat.kept_for_backward(graph)) if half == "backward" else None
        self._record(half, "split", graph, kept)
        run = None
        if half == "forward" and self._shared is not None:
            run = self._gathering_once(self._shared, graph, examples)
        elif half == "backward" and self._sums is not None:
            run = self._reducing_once(self._sums, graph, examples, kept)
        if run is not None:
            return run
        in_place = compat.in_place(graph, half)  # before Inductor owns the graph
        run = self._compiled(half, graph, examples, kept)
        if "cuda_graphs" not in self.names:
            return run
        # One for all shapes, so that their CUDA graphs share a memory pool: only one shape runs at a time.
        self._recorder = self._recorder or Recorder()
        return Replayed(run, in_place, num_sums if half == "forward" else None, self._recorder)

    def _gathering_once(
        self, shared: passes.once.SharedWeights, graph: GraphModule, examples: Sequence[Any]
    ) -> compat.Boxed | None:
        """Return the function of the forward half of any micro-batch; None: it gathers no weight to share."""
        fork = passes.once.fork(graph)
        if fork is None:
            return None
        self._aliases = fork.aliases
        graphs = {"forward": graph, "later-forward": fork.later}
        for name, each in graphs.items():
            self._record(name, "gather_once", each)
        halves = passes.once.compile_both(fork, examples, lambda name, given: self._compiled(name, graphs[name], given))
        return shared.half_of(fork.keys, *halves)

    def _reducing_once(
        self, sums: passes.once.WholeGradients, graph: GraphModule, examples: Sequence[Any], kept: int | None
    ) -> compat.Boxed | None:
        """Return the function of the backward half of any micro-batch; None: it reduces no gradient."""
        fork = passes.once.fork_backward(graph, several=sums.several)
        if fork is None:
            return None
        self.reduced_once = fork.weights
        given = [*examples, *fork.sums.values()]
        halves = [("first-backward", fork.first, examples), ("backward", graph, given)]
        if fork.middle is not None:
            halves.insert(1, ("middle-backward", fork.middle, given))
        for name, each, _ in halves:
            self._record(name, "reduce_once", each, kept)
        first, *middle, last = [self._compiled(name, each, inputs, kept) for name, each, inputs in halves]
        return sums.half_of(fork, first, middle[0] if middle else None, last)

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
