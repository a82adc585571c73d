"""The compiled engine: blocks compiled one by one in place, replicas, shards or stages, our attention, loss and
optimizers."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from sftkit.compile import cache, contract, watch
from sftkit.config.schema import Config
from sftkit.engine.engine import EngineReport, Losses, Setup, Training, report_of
from sftkit.engine.step import TrainStep, shape_runner
from sftkit.memory import plan as memory_plan
from sftkit.models import float8, structure
from sftkit.models.routing import routing_of
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import choose_backend, eager_backend
from sftkit.optim.protocol import Optimizer, build_optimizer
from sftkit.parallel import tensor, wrap
from sftkit.runtime import hardware, script, start


class Blocks:
    """The default engine. See engine.Engine."""

    def __init__(
        self, cfg: Config, training: Training, rt: start.Runtime, on_plan: Callable[[memory_plan.MemoryPlan], None]
    ) -> None:
        """Build the engine for a model, in the only order that works; every rank calls it.

        Args:
            on_plan: called with the memory plan, before weights are read, moved or sharded.

        Raises:
            ConfigError: the recipe asks for what this model, layout or machine cannot do.
        """
        orig_model = training.orig_model
        layout = training.layout
        contract.check_options(cfg.compile)
        with ExitStack() as stack:  # restores settings if an error is raised
            # First float8 layers and attention, which the compiler will see. Saved compiled code is loaded before
            # attention is chosen, since timing the candidates may run kernels that the saved code holds.
            float8.apply_fp8(cfg.train, cfg.compile, orig_model, layout, rt)
            self._code_key = cache.code_key(cfg, orig_model, layout, rt)
            if cfg.compile.enabled and cfg.compile.cache:
                rt.print(cache.load_compiled(cfg.compile.cache, self._code_key, rt.device.index or 0))
            choice = choose_backend(cfg.attention.backend, orig_model, layout, rt, compiled=cfg.compile.enabled)
            advice = contract.recording_advice(cfg.compile, dynamic_layout=layout.dynamic)
            if rt.device.type == "cuda" and advice:
                rt.print(advice, "warning")
            if cfg.train.engine == "pipeline" and rt.topology.stages == 1:
                unused = "; train.pipeline_layers has no effect" if cfg.train.pipeline_layers else ""
                rt.print(f"one process: the pipeline has one stage, so steps run as with train.engine=blocks{unused}")
            # Hooks on routers come before compilation: they are part of the graphs. Compilation comes before sharding,
            # whose hooks stay around the graphs. Compilation is lazy: graphs are built in the warm-up.
            routing = routing_of(orig_model, cfg.loss.router_aux_loss_coef)
            settings, mode = contract.choose_mode(cfg.compile, orig_model, layout, rt, routed=routing is not None)
            cfg = replace(cfg, compile=settings)
            if mode:
                rt.print(f"compile.mode {mode}")
            # A run that cannot fit ends before weights are read, moved or sharded.
            plan = memory_plan.make_plan(cfg, orig_model, layout, rt, backend=choice.backend)
            on_plan(plan)
            self.forward = self.model = model = ModelWithLoss(orig_model, choice.backend, training.objective, routing)
            compiled = contract.compile_model(
                orig_model, cfg.compile, dynamic_layout=layout.dynamic, sharded=rt.topology.partial
            )
            switches = contract.compiler_switches(
                cfg.compile, plan.activation_memory_budget, compiled * len(layout.shapes), dynamic_layout=layout.dynamic
            )
            stack.enter_context(switches)
            wrapped = wrap.distribute(model, training.source, plan.sharding, rt, cfg.train)
            if tensor.tensor_group(orig_model) is not None:
                stack.enter_context(contract.collectives_hidden())
            # The optimizer comes last: its states belong to the final parameters, DTensors if the model is sharded.
            self.optimizer: Optimizer = build_optimizer(orig_model, plan.optim, cfg.run.seed)
            # Nothing failed, so the settings outlive this method: `close` restores them, in the reverse order.
            self._at_close = stack.pop_all()
        self._cfg = cfg
        self._rt = rt
        self._plan = plan
        self._wrapped = wrapped
        self.training = training
        parts = wrapped, self.optimizer, model.objective, rt, cfg.optim.max_grad_norm
        if training.members is None:
            train_step = TrainStep(*parts)
        else:
            from sftkit.engine.members import StepOfMembers

            train_step = StepOfMembers(*parts, training.members)
        self.step = train_step.step
        self.gradients = train_step.gradients
        stages = structure.stages_of(orig_model)
        self.setup = Setup(
            attention=choice.backend,
            attention_reason=choice.reason,
            optimizer=plan.optim.name,
            memory_plan=plan.line,
            checkpoint_bytes=memory_plan.checkpoint_bytes(orig_model, plan),
            pipeline_layers=stages.layers if stages else None,
            fp8=cfg.train.fp8 is not None,
            compile_mode=mode,
        )
        self.compiled = False
        "whether the step is compiled; known after the warm-up"
        self.watch = watch.CompileWatch()
        self._at_close.callback(self.watch.close)
        self._hooks: contract.HookWatch | None = None
        self._records = watch.RecordsOfRanks(rt)
        rt.at_end.callback(self.close)  # for a run that ends before its first step

    @contextmanager
    def warm_up(self, print_line: Callable[[str], None]) -> Iterator[Losses]:
        """Run the worst-case batch of every declared shape, forward and backward, with the optimizer's memory reserved.
        This builds every graph, and ends a run that does not fit in memory."""
        cfg = self._cfg
        rt = self._rt
        orig_model = self.model.orig_model
        layout = self.training.layout
        started = time.perf_counter()
        orig_model.train()
        losses: Losses = {}
        run_shape = shape_runner(rt, self._wrapped, self.model, layout, losses)
        oom = memory_plan.oom_advice(self._plan, layout, cfg.data, cfg.compile, cfg.optim)
        parts = "blocks" if cfg.compile.scope == "block" else "the model"
        with script.working(f"compiling {parts}" if cfg.compile.enabled else "trying the worst-case batches"), oom:
            # The optimizer's states are allocated, so that the peak is that of a step.
            with memory_plan.reserve_optimizer_state(self.optimizer, self._plan, rt.device):
                self.compiled = contract.warm_up(
                    self._wrapped, run_shape, layout.shapes, cfg.compile, rt.any_rank, sharded=rt.topology.partial
                )
            # Without a compiler, by the recipe or because it failed on some rank. flex exists as generated code only.
            if not self.compiled:
                trees = self.training.layout.kind == "tree"
                self.model.backend = eager_backend(self.model.backend, orig_model, trees=trees)
            self.optimizer.warm_up(compiled=self.compiled)
            # From here on every compile counts as a recompile, and added hooks are reported.
            self.watch.warm_up_done()
            self._hooks = contract.HookWatch(orig_model)
            yield losses
        # Report the graphs and the measured memory, and save the compiled code.
        seconds = time.perf_counter() - started
        kind = f"{layout.kind} rows, shapes {', '.join(f'{rows} x {length}' for rows, length in layout.shapes)}"
        counts = self.watch.counts()
        built = script.counted(int(counts["compile/graphs"]), "graph")
        breaks = script.counted(int(counts["compile/graph_breaks"]), "graph break")
        print_line(f"{kind}; compiled {built}, {breaks}, in {seconds:.1f} s" if self.compiled else f"{kind}; eager")
        if rt.device.type == "cuda":
            print_line(memory_plan.against_measured(self._plan, hardware.peak_memory_gib(rt.device)))
        # Before any step, so that a run that dies early leaves it to the next start.
        if self.compiled and cfg.compile.cache:
            gpu = rt.device.index or 0
            rt.print(cache.save_compiled(cfg.compile.cache, self._code_key, gpu, writes=rt.rank == gpu))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Forbid compilation within the context, as compile.on_recompile says, and turn an out-of-memory error into
        advice."""
        cfg = self._cfg
        on_recompile = cfg.compile.on_recompile if self.compiled else "warn"
        oom = memory_plan.oom_advice(self._plan, self.training.layout, cfg.data, cfg.compile, cfg.optim)
        with contract.step_contract(on_recompile, self.watch.graph_break_reasons()), oom:
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count what is compiled within the context, which should be nothing. Within it the model of a pipeline can be
        called like an unsplit one."""
        with wrap.as_whole(self.model.orig_model), self.watch.evaluating():
            yield

    def report(self, error: BaseException | None = None) -> EngineReport:
        """Return the compiler's records of all ranks."""
        assert self._hooks is not None, "warm_up comes first"
        own = watch.records_of(self.watch, self._hooks.unheeded())
        records = self._records.together(own, exchange=error is None)
        return report_of(self.watch.counts(), self.watch.evaluations, records, compiled=self.compiled)

    def close(self) -> None:
        """Restore the compiler's settings."""
        self._at_close.close()
