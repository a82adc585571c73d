"""torch.compile for the train step: in place, for declared shapes, held to a contract. All else runs eagerly."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._functorch.config
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils
from torch.fx.experimental import _config as symbolic_shapes
from transformers import PreTrainedModel

from sftkit.anatomy import decoder_blocks
from sftkit.config import CompileConfig
from sftkit.errors import ConfigError

if TYPE_CHECKING:
    from sftkit.step import ModelWithLoss

log = logging.getLogger(__name__)

STANCES = {"error": "fail_on_recompile", "warn": "default", "eager": "eager_on_recompile"}
REFUSED = "torch.compile stance is 'fail_on_recompile'"
"Part of the text of the RuntimeError that torch raises under this stance (torch/_dynamo/eval_frame.py)."
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class RecompileError(ConfigError):
    """Something in a training step would have been compiled after the warm-up, or broke a graph in it."""


def small_modules(orig_model: PreTrainedModel) -> list[torch.nn.Module]:
    """What the decoder runs besides its blocks and embeddings and has parameters of its own: the final norm, mostly.

    Not torch's own modules: they are one operator, and Dynamo does not trace them on their own.
    """
    blocks = set(decoder_blocks(orig_model))
    return [
        child
        for child in orig_model.get_decoder().children()
        if next(child.parameters(), None) is not None
        and not isinstance(child, torch.nn.Embedding)
        and not type(child).__module__.startswith("torch.nn")
        and not blocks & set(child.modules())
    ]


def compile_model(
    model: ModelWithLoss,
    compile: CompileConfig,
    activation_memory_budget: float,
    dynamic_layout: bool = False,
    sharded: bool = False,
) -> None:
    """Compile in place, before any wrapping or sharding: module types, parameter names and `orig_model` stay as they are.
    Graphs are built at the first call of each shape, in `warm_up`. The loss stays outside.

    Args:
        activation_memory_budget: share of each graph's activations that is kept for its backward pass, 0 to 1. What is
            recomputed is chosen by FLOPs; a custom operator counts with its formula (torch.utils.flop_counter).
        dynamic_layout: row lengths vary freely: one graph with symbolic sizes, whatever compile.dynamic says.
        sharded: weights will be gathered between graphs, so the scope is block, whatever compile.scope says.

    Raises:
        ConfigError: scope block for a model whose blocks transformers does not name.
    """
    if not compile.enabled:
        return
    torch._dynamo.config.optimize_ddp = False  # blocks already give overlap; it would split them, see pytorch #108966
    torch._functorch.config.activation_memory_budget = activation_memory_budget  # type: ignore[assignment]
    torch._functorch.config.activation_memory_budget_runtime_estimator = "flops"
    # With duck shapes a warm-up whose rows happen to equal its row length gives a graph for square batches only.
    symbolic_shapes.use_duck_shape = not dynamic_layout  # type: ignore[assignment]
    dynamic = True if dynamic_layout else compile.dynamic
    options: dict[str, Any] = {"backend": compile.backend, "fullgraph": compile.fullgraph, "dynamic": dynamic}
    if compile.mode is not None:
        options["mode"] = compile.mode
    if sharded and compile.scope == "model":
        log.info("compile.scope: block, because sharded weights are gathered block by block")
    for module in _compiled_parts(model.orig_model, "block" if sharded else compile.scope):
        module.compile(**options)


def _compiled_parts(orig_model: PreTrainedModel, scope: str) -> list[torch.nn.Module]:
    if scope == "model":
        return [orig_model.get_decoder()]
    blocks = decoder_blocks(orig_model)
    if not blocks:
        raise ConfigError(
            f"compile.scope: {type(orig_model).__name__} names no decoder block (_no_split_modules); "
            "set compile.scope=model or compile.enabled=false"
        )
    return blocks + small_modules(orig_model)


def begin_step() -> None:
    """Before each forward pass of training: CUDA graphs may reuse the memory of the pass before.

    Gradients that must outlive it are copied: see step.GradientSum.
    """
    if uses_cuda_graphs():
        torch.compiler.cudagraph_mark_step_begin()


def uses_cuda_graphs() -> bool:
    """Whether this process has compiled in a mode with CUDA graphs: inductor imports their module only then."""
    return "torch._inductor.cudagraph_trees" in sys.modules


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Inside, compiled modules run their plain Python: any shape, no compile, and the compiled code stays valid."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def step_contract(on_recompile: str, breaks: Sequence[str] = ()) -> Iterator[None]:
    """From the end of the warm-up to the end of training: nothing is compiled any more in a step.

    Args:
        on_recompile: error: the step that needs a new graph ends training; eager: that call runs eagerly; warn: it is
            compiled, and `CompileWatch.counts` logs why.
        breaks: what `CompileWatch.graph_break_reasons` found in the warm-up: refused if on_recompile is error.

    Raises:
        RecompileError: with the guards that failed, or the graph breaks.
    """
    if breaks and on_recompile == "error":
        raise RecompileError(
            "the compiled model has graph breaks, so it is compiled in pieces and slower than it could be:\n  "
            + "\n  ".join(breaks)
            + "\nMend the model's code, or train with the breaks: compile.on_recompile=warn"
        )
    for reason in breaks:
        log.warning("graph break: %s", reason)
    if on_recompile == "error":
        dynamo_callback.on_compile_start(_refuse_backward)
    try:
        with torch.compiler.set_stance(STANCES[on_recompile]):
            yield
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        raise _recompile_error(_guards(str(error))) from error
    finally:
        if _refuse_backward in dynamo_callback.callback_handler.start_callbacks:
            dynamo_callback.callback_handler.remove_start_callback(_refuse_backward)


def _refuse_backward(args: dynamo_callback.CallbackArgs) -> None:
    # A backward graph is built when it is first needed, where no stance is asked.
    if args.callback_trigger is dynamo_callback.CallbackTrigger.LAZY_BACKWARD:
        raise _recompile_error(f"the backward pass of graph {args.compile_id} was never run in the warm-up")


def _recompile_error(reason: str) -> RecompileError:
    return RecompileError(
        f"a training step needs a graph that the warm-up did not compile: {reason}\n"
        "The warm-up covers the shapes of data.layout (packed and fixed: one; bucketed: one per bucket; dynamic: any row "
        "length). If this step is as it should be, train on with compile.on_recompile=warn (compile it and count) or "
        "compile.on_recompile=eager (run it uncompiled)"
    )


def _guards(message: str) -> str:
    """The place and the failed guards, out of torch's message."""
    place = re.search(r"filename: '(.*)', function name: '(.*)', line number: (\d+)", message)
    guards = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip().startswith("- ")]
    where = f"{place[2]} ({place[1]}:{place[3]})" if place else "unknown code"
    return f"{where}: {'; '.join(guards) or 'never compiled before'}"


def undo_compile(model: torch.nn.Module) -> None:
    """Back to eager for good."""
    for module in model.modules():
        module._compiled_call_impl = None
    torch._dynamo.reset()


def warm_up(
    model: torch.nn.Module,
    run_shape: Callable[[int, int], None],
    shapes: Sequence[tuple[int, int]],
    compile: CompileConfig,
    any_rank: Callable[[bool], bool],
) -> bool:
    """Build every graph: a forward and backward pass of each declared shape, random state and gradients as before.

    Args:
        run_shape: runs forward and backward on random tokens of the shape, without communication.
        any_rank: whether the flag is set on any rank, so that all fall back together.

    Returns:
        whether the train step is compiled; False when there is no working compiler and compile.on_failure is warn.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    if not compile.enabled:
        with torch.random.fork_rng(devices=devices):  # to see that the largest batch fits
            run_shape(*shapes[-1])
        model.zero_grad(set_to_none=True)
        return False
    _raise_limits(model, len(shapes))
    error: Exception | None = None
    with torch.random.fork_rng(devices=devices):
        try:
            for rows, row_length in shapes:
                for _ in range(_passes(compile)):
                    run_shape(rows, row_length)
                    model.zero_grad(set_to_none=True)  # as a step starts; and CUDA graphs reuse their memory
        except torch.OutOfMemoryError:
            raise
        except Exception as caught:
            error = caught
    model.zero_grad(set_to_none=True)
    if not any_rank(error is not None):
        return True
    if error is not None:
        undo_compile(model)
        with torch.random.fork_rng(devices=devices):
            run_shape(*shapes[-1])  # an error that eager has too is no compiler's fault: it is raised from here
        model.zero_grad(set_to_none=True)
    reason = " ".join(str(error or "it failed on another rank").split())[:300]
    if compile.on_failure == "error":
        raise ConfigError(f"compile.on_failure=error and the model cannot be compiled here: {reason}") from error
    log.warning("torch.compile does not work here, training eagerly: %s (compile.enabled=false hides this)", reason)
    undo_compile(model)
    return False


def _passes(compile: CompileConfig) -> int:
    """CUDA graphs: the first pass compiles, the second lets kernels settle, the third records."""
    return 3 if compile.mode in CUDA_GRAPH_MODES or compile.backend == "cudagraphs" else 1


def _raise_limits(model: torch.nn.Module, num_shapes: int) -> None:
    """Past recompile_limit graphs of one function torch turns to eager without an error: no model may come near it."""
    parts = sum(module._compiled_call_impl is not None for module in model.modules())
    limit = 8 + parts * num_shapes
    torch._dynamo.config.recompile_limit = limit  # type: ignore[assignment]
    torch._dynamo.config.accumulated_recompile_limit = max(256, limit)  # type: ignore[assignment]


class CompileWatch:
    """Counts graphs, recompiles, graph breaks and seconds from the framework's own records, from construction on."""

    def __init__(self) -> None:
        dynamo_utils.set_compilation_metrics_limit(100_000)
        self._skip = len(dynamo_utils.get_compilation_metrics())
        self._earlier_breaks = list(dynamo_utils.graph_break_reasons)
        self._hits = _cache_hits()
        self._warm_at: int | None = None
        self._told: set[str] = set()
        self._seconds, self._started = 0.0, 0.0
        dynamo_callback.on_compile_start(self._on_start)
        dynamo_callback.on_compile_end(self._on_end)

    def _on_start(self, _: object) -> None:
        self._started = time.perf_counter()

    def _on_end(self, _: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def warm_up_done(self) -> None:
        """From here on, every compile is a recompile."""
        self._warm_at = len(self._records())

    def _records(self) -> list[dynamo_utils.CompilationMetrics]:
        return dynamo_utils.get_compilation_metrics()[self._skip :]

    def _late(self) -> list[dynamo_utils.CompilationMetrics]:
        """Compiles and refusals to compile after the warm-up; a backward pass counts only if its forward pass is older."""
        records = self._records()
        late = records[len(records) if self._warm_at is None else self._warm_at :]
        forward = {r.compile_id for r in late if r.is_forward is not False}
        return [r for r in late if r.is_forward is not False or r.compile_id not in forward]

    def counts(self) -> dict[str, float]:
        """compile/graphs, recompiles, graph_breaks, seconds, cache_hits; see docs/metrics.md. New recompiles are logged."""
        self._tell()
        forward = [r for r in self._records() if r.is_forward is True]
        resumed = [r for r in forward if (r.co_name or "").startswith("torch_dynamo_resume_in")]
        return {
            "compile/graphs": sum(bool(r.has_guarded_code) and bool(r.graph_op_count) for r in forward),
            "compile/recompiles": len(self._late()),
            "compile/graph_breaks": len(resumed) + sum(map(_left_eager, self._records())),
            "compile/seconds": round(self._seconds, 3),
            "compile/cache_hits": max(0, _cache_hits() - self._hits),
        }

    def _tell(self) -> None:
        """Log each kind of recompile once: sizes differ, the reason is the same."""
        for reason in self.recompile_reasons():
            kind = re.sub(r"\d+", "0", reason)
            if kind not in self._told:
                self._told.add(kind)
                log.warning("compiled after the warm-up: %s", reason)

    def recompile_reasons(self) -> list[str]:
        """Why each compile after warm-up happened: the guard that failed, or the new frame's name."""
        return [_why(record) for record in self._late()]

    def graph_break_reasons(self) -> list[str]:
        """`file:line: reason` of every graph break and of every function that was left to eager, each once."""
        new = [b for b in dynamo_utils.graph_break_reasons if not any(b is old for old in self._earlier_breaks)]
        places = [f"{b.user_stack[-1].filename}:{b.user_stack[-1].lineno}" if b.user_stack else "?" for b in new]
        broken = [f"{place}: {_first_line(b.reason)}" for place, b in zip(places, new, strict=True)]
        skipped = [
            f"{r.fail_user_frame_filename or r.co_filename}:{r.fail_user_frame_lineno or r.co_firstlineno}: "
            f"{_first_line(r.fail_reason or '')}, so all of {r.co_name or 'it'} runs eagerly"
            for r in self._records()
            if _left_eager(r)
        ]
        return list(dict.fromkeys(broken + skipped))

    def close(self) -> None:
        if self._on_start in (handler := dynamo_callback.callback_handler).start_callbacks:  # reset() forgets them
            handler.remove_start_callback(self._on_start)
            handler.remove_end_callback(self._on_end)


def _left_eager(record: dynamo_utils.CompilationMetrics) -> bool:
    """A function that torch gave up on: neither `counters` nor `graph_break_reasons` know of it."""
    return record.fail_type is not None and record.is_forward is not False


def _why(record: dynamo_utils.CompilationMetrics) -> str:
    if record.recompile_reason:
        return re.sub(r"^\d+/\d+: ", "", record.recompile_reason.strip())
    if record.is_forward is False:
        return f"backward pass of graph {record.compile_id}, never run in the warm-up"
    return f"new frame {record.co_name}" + (f": {_first_line(record.fail_reason)}" if record.fail_reason else "")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown"])[0]


def _cache_hits() -> int:
    """Graphs of this process that came from a cache on disk instead of the compiler."""
    counters = dynamo_utils.counters
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
