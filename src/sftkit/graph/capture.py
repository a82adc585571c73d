"""One graph of a micro-batch's forward and backward pass, loss and sharding included, captured once for a shape, and
the passes of a recipe over it.

The model's own Python runs once on fake tensors under AOTAutograd, without Dynamo: its decisions on the host are
final, and its computations are in the graph. Inputs are weights, the tensors of a batch, and the weight of the loss;
outputs are named sums and gradients. A step calls `CapturedModel`: it runs the graph of a batch's shape, and rejects,
captures or runs eagerly a shape without a graph.

`Passes` are applied in order; the graphs before and after each are kept. The pass cuda_graphs replays the halves of a
graph: no launch costs the host anything, collectives included. The first call runs a half as it is, so that libraries
and communicators allocate what they keep. The second call records it, and later calls replay the record. A replay
reads its inputs at the places that they had when it was recorded: weights and saved activations are there anyway, and
a batch is copied there. Outputs are copied, too, because the next replay overwrites them. Saved activations are not
copied, so a backward pass must come before the next forward pass. This holds between shapes, too: their records share
a memory pool. A step of several micro-batches keeps this order.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from sftkit.config.tables import PASSES, Pass
from sftkit.data.batches.collate import Batch
from sftkit.errors import RecompileError, hint
from sftkit.graph import compat, graphs, sharding
from sftkit.graph.passes import once, regions
from sftkit.objectives.objective import ModelWithLoss, Sums
from sftkit.ops import attention, flex, linear_cross_entropy
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import graph_file
from sftkit.runtime.start import replaced

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
    counts: graphs.Counts
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
        self._shared = once.SharedWeights() if "gather_once" in names else None
        self._sums = once.WholeGradients(several=micro_batches > 2) if "reduce_once" in names else None
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
        if not self._at("regions") and not self.for_inductor and regions.flex_attention(graph):
            self._record(half, "flex_attention", graph, kept)

    def compile_half(self, half: str, num_sums: int, graph: GraphModule, examples: Sequence[Any]) -> compat.Boxed:
        """Change the forward or the backward half, in place, and return what runs it.

        Args:
            num_sums: how many outputs a captured graph has before its gradients.
        """
        kept = graphs.tensor_bytes(compat.kept_for_backward(graph)) if half == "backward" else None
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
        self, shared: once.SharedWeights, graph: GraphModule, examples: Sequence[Any]
    ) -> compat.Boxed | None:
        """Return the function of the forward half of any micro-batch; None: it gathers no weight to share."""
        fork = once.fork(graph)
        if fork is None:
            return None
        self._aliases = fork.aliases
        both = {"forward": graph, "later-forward": fork.later}
        for name, each in both.items():
            self._record(name, "gather_once", each)
        halves = once.compile_both(fork, examples, lambda name, given: self._compiled(name, both[name], given))
        return shared.half_of(fork.keys, *halves)

    def _reducing_once(
        self, sums: once.WholeGradients, graph: GraphModule, examples: Sequence[Any], kept: int | None
    ) -> compat.Boxed | None:
        """Return the function of the backward half of any micro-batch; None: it reduces no gradient."""
        fork = once.fork_backward(graph, several=sums.several)
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
        counts = graphs.counts_of(graph)._replace(kept=kept)
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


OWN = ("targets", "doc_ids", "sources", "cu_seqlens")
"Tensors of a batch that a graph takes next to the inputs of the model."
Signature = tuple[tuple[str, tuple[int, ...]], ...]
"Name and shape of each tensor that a graph takes."


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch that a graph takes. The index of targets is not among them: it would need a graph
    for every number of targets. So the loss is computed at all positions, and those without a target have weight 0."""
    return {**batch.inputs, **{name: getattr(batch, name) for name in OWN}}


def signature_of(batch: Batch) -> Signature:
    """Return the shapes of the tensors of a batch, which decide on its graph."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors_of(batch).items())


@dataclass(frozen=True)
class Graph:
    """A captured forward and backward pass."""

    run: Callable[..., tuple[Tensor, ...]]
    "of parameters, buffers and a batch's tensors, flat; autograd calls the backward half"
    state: list[Tensor]
    "parameters and buffers in the order of the graph"
    reduced_once: set[int]
    "places in `state` of the parameters whose gradients only the last micro-batch of a step gives (reduce_once)"
    measured: list[str]
    "names of the outputs after the loss"
    seconds: float
    "time of capture and compilation"

    def __call__(self, batch: Batch, *, reduces: bool = True) -> Sums:
        """Return the sums of a batch of this graph's signature.

        Args:
            reduces: whether the backward pass to come gives every gradient, or leaves out those of `reduced_once`.
        """
        state = self.state
        if not reduces:
            # The backward pass gives no real gradient here: it goes to another tensor of the same memory.
            state = [p.detach().requires_grad_() if at in self.reduced_once else p for at, p in enumerate(state)]
        loss, *measured = self.run(*state, *tensors_of(batch).values())
        return Sums(loss, dict(zip(self.measured, measured, strict=True)))


class _Traced(torch.nn.Module):
    """A model with its loss as a function of plain tensors, in the order of `tensors_of`."""

    def __init__(self, model: ModelWithLoss, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self.batch = batch
        self.measured: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(tensors_of(self.batch), tensors, strict=True))
        own: dict[str, Any] = {name: given[name] for name in OWN}
        # The positions of targets in the batch are as many as there are targets: in a graph that would be
        # one more shape.
        everywhere = torch.arange(given["targets"].numel(), device=given["targets"].device)
        inputs = {name: given[name] for name in self.batch.inputs}
        sums = self.model(replace(self.batch, inputs=inputs, target_index=everywhere, **own))
        self.measured = list(sums.measured)
        return (sums.loss, *sums.measured.values())


def capture(model: ModelWithLoss, batch: Batch, passes: Passes) -> Graph:
    """Capture the graph of batches like this one; no collective runs. Gradients and random state stay as they are.

    Args:
        batch: on the device. Its numbers on the host are part of the graph.

    Raises:
        ConfigError: this torch lacks something that it takes.
    """
    started = time.perf_counter()
    traced = _Traced(model, batch)
    # Held until both halves are compiled. Within, loss and attention are one operator each: a trace would unroll the
    # loop over chunks of logits, and torch's own flex_attention would start Dynamo in the middle of it.
    with ExitStack() as stack:
        stack.enter_context(linear_cross_entropy.loss_as_operator())
        stack.enter_context(graphs.blocks_tagged(model.orig_model))
        stack.enter_context(flex.attention_as_operator(compat.flex_operator))
        stack.enter_context(sharding.looked_up_in_shards(model.orig_model, batch.inputs["input_ids"].numel()))
        joint = compat.export_joint(stack, traced, list(tensors_of(batch).values()), for_inductor=passes.for_inductor)
        # While weights and gradients have their names, and before any pass: the marks travel with the nodes
        # into both halves.
        prefix = "model.orig_model."
        first = graphs.first_names(model.orig_model, prefix)
        graphs.mark_buckets(joint.graph_module, graphs.buckets_of(model.orig_model, prefix), first)
        passes.on_joint(joint.graph_module)
        # Known only after the trace, which asks the objective for its sums.
        num_sums = 1 + len(traced.measured)
        split = compat.partition(for_inductor=passes.for_inductor, saves_memory=passes.saves_memory)
        halves = [partial(passes.compile_half, name, num_sums) for name in ("forward", "backward")]
        run = compat.compile_joint(joint, split, *halves)
    # By name, in the captured order: parameters() leaves out the second name of a tied weight.
    named = dict(traced.named_parameters(remove_duplicate=False)) | dict(traced.named_buffers(remove_duplicate=False))
    state = [named[name] for name in (*joint.params_spec, *joint.buffers_spec)]
    once = {at for at, name in enumerate(joint.params_spec) if first.get(name) in passes.reduced_once}
    return Graph(run, state, once, traced.measured, time.perf_counter() - started)


OnRecompile = Literal["error", "warn"]


class CapturedModel(torch.nn.Module):
    """Sums of a batch by the graph of its shape. A shape without a graph runs eagerly; within `contract`,
    as on_recompile says."""

    def __init__(
        self, model: ModelWithLoss, passes: Sequence[str], micro_batches: int = 1, *, saves_memory: bool = False
    ) -> None:
        """Wrap a model, with no graph captured yet.

        Args:
            passes, micro_batches, saves_memory: see Passes.
        """
        super().__init__()
        self.model = model
        self.passes = Passes(passes, micro_batches, saves_memory=saves_memory)
        self._eager = attention.eager_backend(model.backend, model.orig_model)
        self._graphs: dict[Signature, Graph] = {}
        self._on_other: OnRecompile | None = None
        self.step_of = self.passes.step_of
        self.stages: dict[tuple[int, int], list[Stage]] = {}
        "the graphs of each captured shape, by what the passes made of them"
        self.late: list[str] = []
        "shapes that were captured after the warm-up, for a person"

    def capture(self, batch: Batch) -> None:
        """Capture the graph of batches like this one. No collective runs."""
        self.passes.begin()
        self._graphs[signature_of(batch)] = capture(self.model, batch, self.passes)
        rows, length = batch.doc_ids.shape
        self.stages[rows, length] = self.passes.stages

    def forget(self) -> None:
        """Drop all graphs: every batch runs eagerly from here on."""
        self.passes.close()
        self._graphs = {}
        self.stages = {}

    @property
    def num_graphs(self) -> int:
        """Return how many shapes have a graph."""
        return len(self._graphs)

    @property
    def seconds(self) -> float:
        """Return the time of all captures."""
        return sum(graph.seconds for graph in self._graphs.values())

    def contract(self, on_recompile: OnRecompile) -> AbstractContextManager[None]:
        """Restrict calls to the captured shapes within the context: another shape is an error, or is captured (warn).

        Raises:
            RecompileError: the shape, and those that there are.
        """
        return replaced(self, "_on_other", on_recompile)

    def forward(self, batch: Batch) -> Sums:
        """Return the sums of a batch."""
        graph = self._graphs.get(signature_of(batch))
        if graph is not None:
            return graph(batch, reduces=self.passes.reduces)
        # Checks and evaluations, outside of the contract, may bring any shape.
        if not self._graphs or self._on_other is None:
            return self.model(batch, self._eager)
        reason = self._reason(batch)
        if self._on_other == "error":
            raise RecompileError(hint("no captured graph", reason=reason))
        # Each rank for itself: a capture runs no collective, so ranks that have the graph only wait for this one.
        self.late.append(reason)
        log.warning("capturing a graph inside training: %s", reason)
        self.capture(batch)
        return self(batch)

    def _reason(self, batch: Batch) -> str:
        """Return the property of the batch that no graph has."""
        rows, length = batch.doc_ids.shape
        known = sorted(self.stages)
        declared = ", ".join(f"{r} x {t}" for r, t in known)
        if (rows, length) not in known:
            return f"a micro-batch of {rows} x {length} positions; captured: {declared}"
        # The size is known, so another tensor of the batch exists, or has a shape, that no captured graph has.
        signatures = [dict(one) for one in self._graphs if dict(one)["doc_ids"] == (rows, length)]
        differing = [
            f"{name} {list(shape)} (captured: "
            f"{' or '.join(str(list(s[name])) for s in signatures if name in s) or 'none'})"
            for name, shape in signature_of(batch)
            if all(s.get(name) != shape for s in signatures)
        ]
        return f"a micro-batch of {rows} x {length} positions with {', '.join(differing) or 'other inputs'}"
