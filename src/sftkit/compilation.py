"""torch.compile for the train step: in place, for declared shapes, watched. Everything else runs `orig_model` eagerly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils

from sftkit.config import CompileConfig
from sftkit.errors import ConfigError
from sftkit.step import ModelWithLoss

log = logging.getLogger(__name__)


def decoder_blocks(model: ModelWithLoss) -> list[torch.nn.Module]:
    """The repeated blocks of the model, as transformers names them for device placement."""
    names = set(getattr(model.orig_model, "_no_split_modules", None) or ())
    return [module for module in model.orig_model.modules() if type(module).__name__ in names]


def compile_model(model: ModelWithLoss, compile: CompileConfig) -> None:
    """Compile in place, before any wrapping or sharding: module types, parameter names and `orig_model` stay as they are.

    Nothing is compiled yet: that happens at the first call of each shape, in `warm_up`.

    Raises:
        ConfigError: scope block for a model whose blocks transformers does not name.
    """
    if not compile.enabled:
        return
    torch._dynamo.config.optimize_ddp = False  # blocks already give overlap; it would split them, see pytorch #108966
    options: dict[str, Any] = {"backend": compile.backend, "fullgraph": compile.fullgraph, "dynamic": compile.dynamic}
    if compile.mode is not None:
        options["mode"] = compile.mode
    if compile.scope == "model":
        model.compile(**options)
        return
    blocks = decoder_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile.scope: {type(model.orig_model).__name__} names no decoder block (_no_split_modules); "
            "set compile.scope=model or compile.enabled=false"
        )
    for block in (*blocks, model.loss):
        block.compile(**options)


def run_eagerly() -> AbstractContextManager[object]:
    """Inside, compiled modules run their plain Python: any shape, no compile, and the compiled code stays valid."""
    return torch.compiler.set_stance("force_eager")


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
    if not compile.enabled:
        return False
    torch._dynamo.config.recompile_limit = max(8, 2 * len(shapes) + 4)
    error: Exception | None = None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            for rows, row_length in shapes:
                run_shape(rows, row_length)
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
            run_shape(*shapes[0])  # an error that eager has too is no compiler's fault: it is raised from here
        model.zero_grad(set_to_none=True)
    reason = " ".join(str(error or "it failed on another rank").split())[:300]
    if compile.on_failure == "error":
        raise ConfigError(f"compile.on_failure=error and the model cannot be compiled here: {reason}") from error
    log.warning("torch.compile does not work here, training eagerly: %s (compile.enabled=false hides this)", reason)
    undo_compile(model)
    return False


class CompileWatch:
    """Counts graphs, recompiles, graph breaks and seconds from the framework's own records, from construction on."""

    def __init__(self) -> None:
        dynamo_utils.set_compilation_metrics_limit(100_000)
        self._skip = len(dynamo_utils.get_compilation_metrics())
        self._warm_at: int | None = None
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

    def counts(self) -> dict[str, float]:
        """compile/graphs, compile/recompiles, compile/graph_breaks, compile/seconds; see docs/metrics.md."""
        forward = [r.is_forward is True for r in self._records()]
        breaks = [(r.co_name or "").startswith("torch_dynamo_resume_in") for r in self._records()]
        kept = [bool(r.has_guarded_code) and bool(r.graph_op_count) for r in self._records()]
        warm_at = len(forward) if self._warm_at is None else self._warm_at
        return {
            "compile/graphs": sum(f and k for f, k in zip(forward, kept, strict=True)),
            "compile/recompiles": sum(forward[warm_at:]),
            "compile/graph_breaks": sum(f and b for f, b in zip(forward, breaks, strict=True)),
            "compile/seconds": round(self._seconds, 3),
        }

    def recompile_reasons(self) -> list[str]:
        """Why each compile after warm-up happened: the guard that failed, or the new frame's name."""
        warm_at = len(self._records()) if self._warm_at is None else self._warm_at
        late = [r for r in self._records()[warm_at:] if r.is_forward is True]
        return [(r.recompile_reason or f"new frame {r.co_name}").strip() for r in late]

    def close(self) -> None:
        handler = dynamo_callback.callback_handler
        if self._on_start in handler.start_callbacks:  # torch._dynamo.reset() forgets them
            handler.remove_start_callback(self._on_start)
            handler.remove_end_callback(self._on_end)
