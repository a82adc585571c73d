"""Times a layer, the embedding, and the head with its loss on this device, before a model is split into stages.

The compiled engine: blocks compiled one by one in place, replicas or shards, our attention, loss and optimizers.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sftkit.compile import cache as compile_cache
from sftkit.compile.contract import HookWatch, Ranks, compile_model, random_state_kept, step_contract, warm_up
from sftkit.compile.debug import compiler_logs
from sftkit.compile.modules import (
    asynchronous,
    check_marked,
    check_options,
    compile_arguments,
    compiler_switches,
    exchanges_hidden,
    mergeable_products,
    recording_advice,
    use_symmetric_memory,
)
from sftkit.compile.watch import CompileWatch, RecordsOfRanks, note, records_of, under_way
from sftkit.config.schema import CompileConfig, Config, TrainConfig
from sftkit.config.topology import PartTimes, PipelineStep, StageTimes, bubble, fastest_split
from sftkit.data.batches.loader import StepBatches
from sftkit.engine.checks import compiled_against_eager, document_checks, gradients_check, report_of, weights_check
from sftkit.engine.engine import EngineReport, Setup, Training, WarmUp
from sftkit.engine.gradient_check import Sides, check_gradients, limits
from sftkit.engine.plain import PlainModel, Start
from sftkit.engine.self_check import check_documents
from sftkit.engine.step import TrainStep, optimizer_step, shape_runner, worst_case_batch
from sftkit.memory.plan import (
    Fixed,
    MemoryPlan,
    activation_budget,
    against_measured,
    checkpoint_bytes,
    make_plan,
    reserve_optimizer_state,
)
from sftkit.memory.remedies import oom_advice
from sftkit.models.float8 import apply_fp8
from sftkit.models.routing import routing_of
from sftkit.models.structure import decoder_blocks
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import choose_backend, eager_backend
from sftkit.optim.build import build_optimizer
from sftkit.optim.protocol import Optimizer, parameters_of
from sftkit.parallel.pipeline import Pipelined, stage_times, stagewise
from sftkit.parallel.stages import StageModule, describe_times, layers_of_stages
from sftkit.parallel.tensor import tensor_group
from sftkit.parallel.wrap import distribute
from sftkit.runtime.hardware import peak_memory_gib
from sftkit.runtime.script import counted, working
from sftkit.runtime.start import Runtime
from sftkit.tracking.health import Spikes
from sftkit.tracking.names import StepOutcome

log = logging.getLogger(__name__)
ONE_EACH = (1, 1, 1)
"Layers of each stage of the model that is timed: the first has the embedding, the last the head and the loss."


def measured_layers(
    compile: CompileConfig, train: TrainConfig, training: Training, backend: str, rt: Runtime
) -> tuple[int, ...]:
    """Return the layers of each stage such that a step takes least, by measured times of the model's parts.

    The parts are compiled as in a step and run the largest batch; the slowest rank's times count, so that all
    ranks find the same. Where they cannot be timed, layers are spread by their parameters. Every rank calls it;
    random state is as before.

    Raises:
        ConfigError: a model that has no stages.
    """
    by_parameters = layers_of_stages(training.orig_model, train, rt.topology.stages)
    # A rank that fails must still take part in the exchange below, or the others would wait for it forever.
    error: Exception | None = None
    seconds = torch.zeros(len(ONE_EACH), 2, dtype=torch.float64, device=rt.device)
    try:
        with working("timing a layer, the embedding and the head"):
            times = _times(compile, train, training, backend, rt)
            seconds += torch.tensor([astuple(each) for each in times]).to(seconds)
    except torch.OutOfMemoryError:
        raise
    except Exception as caught:  # the warm-up will report a compiler that does not work
        error = caught
    if rt.any_rank(error is not None):
        log.warning("layers cannot be timed, so stages are balanced by parameters: %s", error or "on another rank")
        return by_parameters
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    # Each stage has a layer, so what the outer ones take beyond that is the embedding's, and the head's with its loss.
    first, layer, last = (StageTimes(*each) for each in seconds.tolist())
    parts = PartTimes(layer, last.plus(layer, -1), first.plus(layer, -1))
    rt.print(
        f"a layer takes {layer.both:.3g} s a micro-batch, the embedding {parts.embedding.both:.3g} s, head and loss "
        f"{parts.head.both:.3g} s"
    )
    accumulation = training.layout.accumulation
    return fastest_split(PipelineStep(by_parameters, train.pipeline_schedule, accumulation, rt.topology.stages), parts)


def _times(
    compile: CompileConfig, train: TrainConfig, training: Training, backend: str, rt: Runtime
) -> list[StageTimes]:
    """Return what three stages of one layer each take: with the embedding, alone, and with norm, head and loss."""
    orig_model, objective, layout = training.orig_model, training.objective, training.layout
    config = copy.deepcopy(orig_model.config)
    config.num_hidden_layers = len(ONE_EACH)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * len(ONE_EACH)  # all are alike (parallel.balance)
    with random_state_kept(), compiler_switches(compile, activation_budget(compile, train), graphs=2):
        # Private, but it makes the very class of the model: the public from_config exists for auto classes only
        # (huggingface/transformers#29295).
        with torch.device(rt.device):
            small = type(orig_model)._from_config(config, dtype=orig_model.dtype)
        model = ModelWithLoss(small.train(), backend, objective)
        compile_model(small, replace(compile, scope="block"), sharded=True)  # the run itself says that it is block
        batch = worst_case_batch(rt, orig_model, layout, *layout.shapes[-1])
        stages = [StageModule(model, ONE_EACH, number) for number in range(len(ONE_EACH))]
        try:
            return [stage_times(stage, model, batch, objective.count(batch)) for stage in stages]
        finally:
            # The warm-up counts its own graphs: forget these. The generated code stays in the compiler's cache.
            torch.compiler.reset()
            del small, model, stages
            if rt.device.type == "cuda":
                torch.cuda.empty_cache()


class Blocks:
    """The default engine. See engine.Engine."""

    def __init__(
        self, cfg: Config, training: Training, rt: Runtime, run_dir: Path, on_plan: Callable[[MemoryPlan], None]
    ) -> None:
        """Build the engine for a model, in the only order that works; every rank calls it.

        Args:
            on_plan: called with the memory plan, before weights are read, moved or sharded.

        Raises:
            ConfigError: the recipe asks for what this model, layout or machine cannot do.
        """
        orig_model, layout = training.orig_model, training.layout
        check_options(cfg.compile)
        with ExitStack() as stack:  # restores settings if an error is raised
            write_logs = stack.enter_context(compiler_logs(partial(rt.output_dir, run_dir), cfg.compile, rt.rank))
            # What the compiler will see: float8 layers, and attention. Saved compiled code is loaded before attention
            # is chosen, since timing the candidates may run kernels that the saved code holds.
            apply_fp8(cfg.train, cfg.compile, orig_model, layout, rt)
            self._code_key = compile_cache.code_key(cfg, orig_model, layout, rt)
            compile_cache.restore(cfg.compile, self._code_key, rt)
            choice = choose_backend(cfg.attention.backend, orig_model, layout, rt, compiled=cfg.compile.enabled)
            check_marked(cfg.compile, choice.backend)
            if rt.device.type == "cuda" and (advice := recording_advice(cfg.compile, dynamic_layout=layout.dynamic)):
                rt.print(advice, "warning")
            if cfg.train.engine == "pipeline" and rt.topology.stages == 1:
                unused = "; train.pipeline_layers has no effect" * (cfg.train.pipeline_layers is not None)
                rt.print(f"one process: the pipeline has one stage, so steps run as with train.engine=blocks{unused}")
            # Which layers a rank holds decides how many bytes it needs, so they are timed before the plan counts.
            if rt.topology.stages > 1 and cfg.train.pipeline_layers is None:
                layers = measured_layers(cfg.compile, cfg.train, training, choice.backend, rt)
                cfg = replace(cfg, train=replace(cfg.train, pipeline_layers=layers))
            # A run that cannot fit is refused before weights are read, moved or sharded.
            plan = make_plan(cfg, orig_model, layout, rt, Fixed(backend=choice.backend))
            on_plan(plan)
            # Hooks on routers come before compilation: they are part of the graphs. Compilation comes before sharding,
            # whose hooks stay around the graphs. Compilation is lazy: graphs are built in the warm-up.
            routing = routing_of(orig_model, cfg.loss.router_aux_loss_coef)
            self.model = model = ModelWithLoss(orig_model, choice.backend, training.objective, routing)
            modules = compile_model(orig_model, cfg.compile, dynamic_layout=layout.dynamic, sharded=rt.topology.partial)
            budget, graphs = plan.activation_memory_budget, modules * len(layout.shapes)
            stack.enter_context(compiler_switches(cfg.compile, budget, graphs, dynamic_layout=layout.dynamic))
            wrapped = distribute(model, training.source, plan.sharding, rt, cfg.train)
            if (group := tensor_group(orig_model)) is not None:
                stack.enter_context(exchanges_hidden())
                if asynchronous(cfg.compile) and rt.device.type == "cuda":
                    use_symmetric_memory(group)
                    stack.enter_context(mergeable_products(cfg.compile))
            # The optimizer comes last: its states belong to the final parameters, DTensors if the model is sharded.
            arguments = compile_arguments(cfg.compile)
            self.optimizer: Optimizer = build_optimizer(orig_model, plan.optim, cfg.run.seed, graph=arguments)
            # Nothing went wrong, so what was set outlives this method: `close` puts it back, in the reverse order.
            self._at_close, self._write_logs = stack.pop_all(), write_logs
        self._cfg, self._rt, self._layout, self._plan, self._wrapped = cfg, rt, layout, plan, wrapped
        self._start = Start.of(training.source, training.checkpoint)
        self._train_step = TrainStep(wrapped, self.optimizer, model.objective, rt, cfg.optim.max_grad_norm)
        size = checkpoint_bytes(orig_model, plan)
        stages = wrapped.placement.layers if isinstance(wrapped, Pipelined) else None
        self.setup = Setup(choice.backend, choice.reason, plan.optim.name, plan.line, size, stages)
        self.compiled = False
        "whether the step is compiled; known after the warm-up"
        self.watch = CompileWatch()
        self._at_close.callback(self.watch.close)
        self._hooks: HookWatch | None = None
        self._own_metrics: dict[str, float] = {}
        self._records = RecordsOfRanks(rt)
        rt.at_end.callback(self.close)  # for a run that ends before its first step

    def warm_up(self, print_line: Callable[[str], None]) -> WarmUp:
        """Run the worst-case batch of every declared shape, forward and backward, with the optimizer's memory reserved.
        This builds every graph, and ends a run that does not fit in memory."""
        cfg, rt, orig_model, layout = self._cfg, self._rt, self.model.orig_model, self._layout
        started = time.perf_counter()
        # Before anything is compiled: check that the forward pass computes what the plain model does.
        allowed = limits(orig_model.dtype, len(decoder_blocks(orig_model)), fp8=cfg.train.fp8 is not None)
        backend, eager = self.model.backend, eager_backend(self.model.backend, orig_model)
        plain = PlainModel(self.model, rt.device, self._start, rt)
        check = check_documents(self.model, eager, rt.device, layout, plain)
        # Build every graph with the optimizer's states allocated, so that the peak is that of a step.
        orig_model.train()
        losses: dict[tuple[int, int], float] = {}
        run_shape = shape_runner(rt, self._wrapped, self.model, layout, losses)
        oom = oom_advice(self._plan, layout, cfg.data, cfg.compile, cfg.optim)
        with working(under_way(cfg.compile, self._code_key)), oom:
            with reserve_optimizer_state(self.optimizer, self._plan, rt.device):
                ranks = Ranks(rt.any_rank, sharded=rt.topology.partial)
                self.compiled = warm_up(self._wrapped, run_shape, layout.shapes, cfg.compile, ranks)
            # Without a compiler, by the recipe or because it failed on some rank. flex exists as generated code only.
            if not self.compiled:
                self.model.backend = eager
            self.optimizer.warm_up(compiled=self.compiled)
            # From here on every compile counts as a recompile, and added hooks are reported. The gradient check
            # uses the graphs that exist.
            self.watch.warm_up_done()
            self._hooks = HookWatch(orig_model)
            sides = Sides(self.model, self._wrapped, list(parameters_of(self.optimizer.param_groups)), rt, plain)
            same = check_gradients(sides, layout, eager, allowed, compiled=self.compiled)
        # Report what was built and measured, and save the compiled code.
        seconds = time.perf_counter() - started
        print_line(self._line(self.watch.counts(), seconds))
        if isinstance(self._wrapped, Pipelined):
            print_line(self._time_stages(self._wrapped))
        if rt.device.type == "cuda":
            print_line(against_measured(self._plan, peak_memory_gib(rt.device)))
        # Before any step, so that a run that dies early leaves it to the next start.
        if self.compiled:
            compile_cache.keep_code(cfg.compile, self._code_key, rt)
            if rt.is_main:
                note(self._code_key, seconds)
        self._write_logs()
        used = backend if self.compiled else eager
        checks = document_checks(check, orig_model.dtype, used, layout.kind, allowed.logits)
        compared = compiled_against_eager(rt, self.model, layout, losses if self.compiled else {}, eager)
        checks += [weights_check(plain), gradients_check(same, allowed, used), compared]
        return WarmUp(self.compiled, seconds, checks)

    def _time_stages(self, pipelined: Pipelined) -> str:
        """Time the stages of a pipeline, note how long they wait, and return a line about them for the console."""
        batch = worst_case_batch(self._rt, self.model.orig_model, self._layout, *self._layout.shapes[-1])
        with random_state_kept():
            times = pipelined.times(batch, self.model.objective.count(batch))
        stages = self._rt.topology.stages
        step = PipelineStep(pipelined.placement.layers, pipelined.schedule, self._layout.accumulation, stages)
        self._own_metrics = {"perf/pipeline_bubble_pct": 100.0 * bubble(step, times)}
        return describe_times(step, times)

    def _line(self, counts: dict[str, float], seconds: float) -> str:
        """Return a line for the console about what the warm-up built."""
        declared = ", ".join(f"{rows} x {length}" for rows, length in self._layout.shapes)
        kind = f"{self._layout.kind} rows, shapes {declared}"
        if not self.compiled:
            return f"{kind}; eager"
        built = counted(int(counts["compile/graphs"]), "graph")
        return (
            f"{kind}; compiled {built}, {counted(int(counts['compile/graph_breaks']), 'graph break')}, in "
            f"{seconds:.1f} s"
        )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Forbid compilation within the context, as compile.on_recompile says, and turn an out-of-memory error into
        advice."""
        cfg = self._cfg
        on_recompile = cfg.compile.on_recompile if self.compiled else "warn"
        contract = step_contract(on_recompile, self.watch.graph_break_reasons(), self.watch.fell_back)
        with contract, oom_advice(self._plan, self._layout, cfg.data, cfg.compile, cfg.optim):
            yield

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: Spikes | None = None
    ) -> StepOutcome:
        """Run the forward and backward passes of all micro-batches and one update, which clips; see
        engine.step.optimizer_step."""
        return optimizer_step(self._train_step, batches, learning_rate, stop=stop, spikes=spikes)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count what is compiled within the context, which should be nothing. Within it the model of a pipeline can be
        called like an unsplit one."""
        with stagewise(self.model.orig_model), self.watch.evaluating():
            yield

    def report(self, error: BaseException | None = None) -> EngineReport:
        """Return what the compiler did on all ranks, from its own records."""
        assert self._hooks is not None, "warm_up comes first"
        own = records_of(self.watch, self._hooks.unheeded())
        records = self._records.exchanged(own) if error is None else self._records.known(own)
        found = report_of(self.watch.counts(), self.watch.evaluations, records, error, compiled=self.compiled)
        return replace(found, metrics={**found.metrics, **self._own_metrics})

    def close(self) -> None:
        """Write the compiler's summary and restore its settings; on a full disk only the summary is lost."""
        write, self._write_logs = self._write_logs, lambda: None
        try:
            write()
        except OSError as error:
            log.warning("the summary of compile.debug cannot be written: %s", error)
        finally:
            self._at_close.close()
