"""The graph engine: a micro-batch is one captured graph, weights sharded by operators in it.

Loss, optimizers and checks are those of the other engines. The model is put on its device first, or sharded over the
processes, each rank reading its own shards.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from sftkit.compile.contract import HookWatch, compiler_switches, random_state_kept, step_contract
from sftkit.compile.watch import CompileWatch, RecordsOfRanks, records_of
from sftkit.config import rules, schema, tables
from sftkit.engine import engine, step
from sftkit.errors import ConfigError, config_error
from sftkit.graph import capture, graphs, sharding
from sftkit.memory import plan as memory_plan
from sftkit.models.weights import materialize_weights
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import choose_backend
from sftkit.optim.protocol import Optimizer, build_optimizer
from sftkit.parallel.wrap import Sharding
from sftkit.runtime import hardware, script, start


def check_possible(rt: start.Runtime, orig_model: PreTrainedModel) -> None:
    """Reject processes that the engine has no sharding for, and models that it was not made for.

    Raises:
        ConfigError: replicas of whole models, context parallelism, a model with an encoder, or what tensor parallelism
            does not know or cannot divide.
    """
    # Questions about the model alone come first: their answers are the same on one GPU and on many.
    if orig_model.config.is_encoder_decoder:
        raise config_error("graph with an encoder", model_type=orig_model.config.model_type)
    topology = rt.topology
    _reject(rules.graph_mesh_problems(topology))
    # This needs the sizes of every matrix, so it comes after the checks that do not.
    if topology.tensor > 1:
        sharding.check_tensor_plan(orig_model, topology.tensor)


def check_device(passes: Sequence[str], attention: str, device: torch.device) -> None:
    """Reject passes that this device cannot run, before a model is loaded.

    Args:
        passes: names of graph.passes. attention: the backend that the recipe names.

    Raises:
        ConfigError: which pass, and what to do.
    """
    if device.type != "cuda":
        _reject(rules.passes_off_gpu(passes, attention, device.type))


def _reject(problems: Iterable[rules.Problem]) -> None:
    for _, text in problems:
        raise ConfigError(text)


def distribute_for_graph(model: ModelWithLoss, source: schema.ModelConfig | None, rt: start.Runtime) -> None:
    """Put weights on the device, sharded where the launcher asks for it, and experts as a graph takes them; every rank
    calls it.

    Args:
        source: where the weights of an empty model come from (models.load).
    """
    if not rt.topology.sharded:
        model.to(rt.device)
        return
    # Modules change their class first for the products of experts, then for activations, last for sharding: the forward
    # pass that gathers weights gives them to the others, so it must be the outermost.
    every, mesh = sharding.make_graph_meshes(rt.topology, rt.device.type)
    if mesh is not None:
        sharding.share_experts(model.orig_model, mesh.get_group("tensor"))
        sharding.exchange_activations(model.orig_model, mesh)
    sharding.shard_for_graph(model, sharding.weight_placement(model.orig_model, every, mesh), rt.precision)
    # Weights are read when their places are known, so that each rank reads no more than its own shards.
    materialize_weights(model.orig_model, source, rt.device)


class GraphEngine:
    """See engine.Engine."""

    def __init__(
        self,
        cfg: schema.Config,
        training: engine.Training,
        rt: start.Runtime,
        run_dir: Path,
        on_plan: Callable[[memory_plan.MemoryPlan], None] = lambda _: None,
    ) -> None:
        """Turn a model into an engine; every rank calls it. Where there are several processes its weights are sharded.

        Args:
            run_dir: where graph.dump writes.
            on_plan: called with the memory plan, before weights are read, moved or sharded.

        Raises:
            ConfigError: the recipe asks for what this model, layout, machine or engine cannot do.
        """
        orig_model = training.orig_model
        layout = training.layout
        passes = cfg.graph.passes
        once = [name for name in passes if tables.PASSES[name].stage == "fork"]
        if once and layout.accumulation == 1:
            passes = tuple(name for name in passes if name not in once)
            rt.print(f"{', '.join(once)}: a step has one micro-batch, so there is nothing to put together")
        self._cfg = cfg
        self._rt = rt
        self.training = training
        self._run_dir = run_dir
        # Checks without weights come first: a wrong recipe fails before minutes of reading them.
        check_device(passes, cfg.attention.backend, rt.device)  # for callers that did not ask before loading
        check_possible(rt, orig_model)
        with ExitStack() as stack:  # an error restores the settings
            # Attention decides what a block keeps, sharding what is gathered: the plan needs both. The caller gets the
            # plan before anything large is allocated: the estimate is most useful if the run ends there.
            compiled = cfg.compile.enabled
            choice = choose_backend(cfg.attention.backend, orig_model, layout, rt, compiled=compiled, captured=True)
            keep_gradients = "reduce_once" in passes
            kept_shards = Sharding(keep_weights="reshard_after_forward" not in passes, keep_gradients=keep_gradients)
            sharding = kept_shards if rt.topology.sharded else None
            # train.memory=speed recomputes only what Inductor fuses, which costs no time.
            kept = cfg.compile.activation_memory_budget
            again = cfg.train.memory != "speed" or "full_inductor" in passes
            kept = 1.0 if kept is None and not again else kept
            planned = replace(cfg.compile, activation_memory_budget=kept, backend="inductor")
            self._plan = plan = memory_plan.make_plan(
                replace(cfg, compile=planned), orig_model, layout, rt, backend=choice.backend, sharding=sharding
            )
            on_plan(plan)
            # Weights come to the device as shards. The model is wrapped before: the loss reads the head without calling
            # it, so the wrapper has to know that this weight is a shard too.
            self.model = self.forward = model = ModelWithLoss(orig_model, choice.backend, training.objective)
            budget = plan.activation_memory_budget
            stack.enter_context(compiler_switches(cfg.compile, budget))  # the optimizer may compile
            distribute_for_graph(model, training.source, rt)
            if rt.topology.sharded:
                exchanged = "once a step" if keep_gradients else "after each micro-batch"
                rt.print(
                    f"{rt.topology.describe()}: weights gathered inside the graph, gradients exchanged {exchanged}"
                )
            # The optimizer is last: its states belong to the parameters as they are now, DTensors where
            # they are sharded.
            self.optimizer: Optimizer = build_optimizer(orig_model, plan.optim, cfg.run.seed)
            self._at_close = stack.pop_all()
        # Nothing is captured yet: the warm-up does that.
        size = memory_plan.checkpoint_bytes(orig_model, plan)
        self.setup = engine.Setup(choice.backend, choice.reason, plan.optim.name, plan.line, size)
        self.captured = capture.CapturedModel(model, passes, layout.accumulation, saves_memory=budget < 1.0)
        train_step = step.TrainStep(self.captured, self.optimizer, model.objective, rt, cfg.optim.max_grad_norm)
        self.step = train_step.step
        self.gradients = train_step.gradients
        self.compiled = False
        "after the warm-up: whether steps run captured graphs"
        self.watch = CompileWatch()
        self._at_close.callback(self.watch.close)
        self._hooks: HookWatch | None = None
        self._records = RecordsOfRanks(rt)
        rt.at_end.callback(self.close)  # for a run that ends before its first step

    @contextmanager
    def warm_up(self, print_line: Callable[[str], None]) -> Iterator[engine.Losses]:
        """Capture every declared shape, and run its worst-case batch forward and backward with the
        optimizer's memory reserved."""
        cfg = self._cfg
        rt = self._rt
        orig_model = self.model.orig_model
        layout = self.training.layout
        started = time.perf_counter()
        # A graph is of the mode that it was captured in.
        orig_model.train()
        with script.working("capturing the graph of a step"):
            if cfg.compile.enabled:
                self._capture()
            self.compiled = cfg.compile.enabled
        # Dumped before the graphs run, so that those of a run that fails in its first pass can be read.
        if cfg.graph.dump and rt.is_main:
            capture.dump(self.captured.stages, rt.output_dir(self._run_dir))
        with memory_plan.oom_advice(self._plan, layout, cfg.data, cfg.compile, cfg.optim):
            # The peak of a step, with room held for optimizer states that do not exist yet. The optimizer's own warm-up
            # may make them, so it comes after that room is given back.
            with memory_plan.reserve_optimizer_state(self.optimizer, self._plan, rt.device):
                losses = self._run_shapes()
            self.optimizer.warm_up(compiled=self.compiled)
            # From here on a capture or compile is late, and so is a hook: graphs do not contain it.
            self.watch.warm_up_done()
            self._hooks = HookWatch(orig_model, captured=self.compiled)
            yield losses
        self._print_setup(print_line, time.perf_counter() - started)

    def _capture(self) -> None:
        """Capture every shape. A capture runs no collective, so a rank may fail alone.

        Raises:
            ConfigError: it cannot be captured.
        """
        model = self.model.orig_model
        layout = self.training.layout
        try:
            for rows, row_length in layout.shapes:
                self.captured.capture(step.worst_case_batch(self._rt, model, layout, rows, row_length))
        except (torch.OutOfMemoryError, ConfigError):  # no fault of the graph, or one that says what to do
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            problem = f"train.engine=graph: the graph of a step cannot be captured here: {reason}"
            raise ConfigError(f"{problem}; set train.engine=blocks") from error

    def _run_shapes(self) -> dict[tuple[int, int], float]:
        """Run forward and backward of each declared shape and return the objective per target of each; random state and
        gradients are as before."""
        losses: dict[tuple[int, int], float] = {}
        layout = self.training.layout
        run_shape = step.shape_runner(self._rt, self.captured, self.model, layout, losses)
        # It runs two micro-batches if a step has several. CUDA graphs are recorded the second time. With reduce_once
        # the micro-batches between the first and the last of a step have a graph of their own.
        passes = self._cfg.graph.passes
        times = 2 if "cuda_graphs" in passes else 1
        in_step = 2 if self.compiled and "reduce_once" in passes and layout.accumulation > 2 else 1
        with random_state_kept():
            # Eagerly no shape has code of its own: the last, which is the largest, is enough for the peak of memory.
            for rows, row_length in layout.shapes if self.compiled else layout.shapes[-1:]:
                for _ in range(times):
                    with self.captured.step_of(2 * in_step):
                        for _ in range(in_step):
                            run_shape(rows, row_length)
                self.model.zero_grad(set_to_none=True)
        return losses

    def _print_setup(self, print_line: Callable[[str], None], seconds: float) -> None:
        """Print the captured graphs and the effect of each pass."""
        layout = self.training.layout
        declared = ", ".join(f"{rows} x {length}" for rows, length in layout.shapes)
        kind = f"{layout.kind} rows, shapes {declared}"
        if not self.compiled:
            print_line(f"{kind}; eager")
        else:
            print_line(f"{kind}; captured {script.counted(self.captured.num_graphs, 'graph')}, in {seconds:.1f} s")
            # A pass that changed nothing has no line.
            known: dict[str, graphs.Counts] = {}
            for stage in self.captured.stages[layout.shapes[-1]]:
                if known.get(stage.graph) != stage.counts:
                    print_line(f"  {stage.graph} graph, {stage.after}: {stage.counts}")
                known[stage.graph] = stage.counts
        if self._rt.device.type == "cuda":
            print_line(memory_plan.against_measured(self._plan, hardware.peak_memory_gib(self._rt.device)))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Forbid capture and compilation within the context, as compile.on_recompile says, and explain running
        out of memory."""
        cfg = self._cfg
        on_recompile = cfg.compile.on_recompile
        contract = step_contract(on_recompile, self.watch.graph_break_reasons())
        oom = memory_plan.oom_advice(self._plan, self.training.layout, cfg.data, cfg.compile, cfg.optim)
        with self.captured.contract(on_recompile), contract, oom:
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        """Count compilations within the context, which should not happen."""
        return self.watch.evaluating()

    def report(self, error: BaseException | None = None) -> engine.EngineReport:
        """Return the numbers of graphs and of calls without a graph, on all ranks."""
        watch = self.watch
        captured = self.captured
        assert self._hooks is not None, "warm_up comes first"
        # torch.compile has no records of captured graphs: these are added.
        own = records_of(watch, self._hooks.unheeded())
        own = replace(
            own,
            recompiles=own.recompiles + len(captured.late),
            recompile_kinds=(*own.recompile_kinds, *dict.fromkeys(captured.late)),
        )
        # A run that failed cannot ask other ranks, which may be gone: it reports what they last sent.
        records = self._records.together(own, exchange=error is None)
        counts = watch.counts()
        counts["compile/graphs"] += captured.num_graphs
        counts["compile/seconds"] = round(counts["compile/seconds"] + captured.seconds, 3)
        return engine.report_of(counts, watch.evaluations, records, compiled=self.compiled)

    def close(self) -> None:
        """Put the compiler's settings back, and drop the graphs: CUDA graphs must go before the
        communicators in them."""
        self.captured.forget()
        self._at_close.close()
