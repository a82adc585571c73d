"""Count what the compiler did, from torch's own records: graphs, recompiles, graph breaks, seconds, hits.

The records (pytorch/pytorch#115788), callbacks (pytorch/pytorch#120764) and counters of torch._dynamo are private;
torch has no public ones. Records of all ranks are put together, because guards may fail on one rank alone. A rejected
recompile is explained in words: whose code was not compiled, and which of its guards failed.

torch names the function whose frame it was asked about. A wrapped forward is named as the wrapper, which all classes
share (transformers 5.23 wraps that of every block, older versions that of the decoder).
"""

import inspect
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any

import torch
from torch._dynamo import callback as dynamo_callback
from torch._dynamo import utils as dynamo_utils

from sftkit.errors import hint
from sftkit.runtime.start import Runtime


def describe_guards(message: str, owner: object) -> str:
    """Return the place and the failed guards: `LlamaDecoderLayer.forward (FILE:LINE): tensor
    'hidden_states' size mismatch`.

    Args:
        message: of the RuntimeError that torch raises under the stance `fail_on_recompile`.
        owner: the module whose code was rejected, if known: its own forward is named for any wrapper around it.
    """
    guards = "; ".join(line.strip()[2:] for line in message.splitlines() if line.strip().startswith("- "))
    guards = guards or "never compiled before"
    place = re.search(r"filename: '(.*)', function name: '(.*)', line number: (\d+)", message)
    if not place:
        return f"unknown code: {guards}"
    file, name, line = place.groups()
    # A wrapper of the owner's forward, which speaks of its args and kwargs, is replaced by the forward itself.
    wrappers: list[tuple[str, str]] = []
    own = inspect.unwrap(getattr(owner, "forward", describe_guards), stop=lambda f: wrappers.append(_code_of(f)))
    if (file, name) in wrappers:
        file, _ = _code_of(own)
        line = str(own.__code__.co_firstlineno)
        parameters = dict(enumerate(inspect.signature(own).parameters))
        guards = re.sub(r"\bkwargs\['(\w+)'\]", r"\1", guards)
        guards = re.sub(r"\bargs\[(\d+)\]", lambda at: parameters.get(int(at[1]) + 1, at[0]), guards)
    elif (file, name) != _code_of(own):
        return f"{name} ({file}:{line}): {guards}"
    return f"{own.__qualname__} ({file}:{line}): {guards}"


def _code_of(function: Any) -> tuple[str, str]:
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_name) if code else ("", "")


def module_in(trace: TracebackType | None) -> torch.nn.Module | None:
    """Return the module whose method was called last on the way to an error; None: there was none."""
    selves = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    return next((one for one in reversed(selves) if isinstance(one, torch.nn.Module)), None)


RECOMPILE_REFUSED = "torch.compile stance is 'fail_on_recompile'"
"Part of the text of the RuntimeError that torch raises under this stance (torch/_dynamo/eval_frame.py)."


NESTED = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "aot": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    "codegen": "inductor_code_gen_cumulative_compile_time_us",
    "kernels": "triton_compile_time_us",
}
"Phase of a compile -> torch's field of its time, in microseconds, which includes all later phases."
BACKWARD = "backward_cumulative_compile_time_us"
"Field of the time of all phases of a backward graph that is compiled at its first run, in microseconds."


class CompileWatch:
    """Counts graphs, recompiles, graph breaks and seconds from torch's own records, from its construction on.

    Use it inside `compiler_switches`, which keeps enough records.
    """

    def __init__(self) -> None:
        """Begin to count."""
        # torch records for the whole process: what is there already belongs to an earlier run, or to timing
        # a pipeline's layers.
        self._skip = len(dynamo_utils.get_compilation_metrics())
        self._earlier_breaks = list(dynamo_utils.graph_break_reasons)
        self._hits = _cache_hits()
        self._warm_at: int | None = None
        self.evaluations = self.in_evaluation = 0
        "evaluations, and compiles during them"
        self.cuda_graphs = self._warm_cuda_graphs = 0
        self._seconds = 0.0
        self._started = 0.0
        dynamo_callback.on_compile_start(self._on_start)
        dynamo_callback.on_compile_end(self._on_end)

    def _on_start(self, args: dynamo_callback.CallbackArgs) -> None:
        self.cuda_graphs += args.callback_trigger is dynamo_callback.CallbackTrigger.CUDAGRAPH_RECORDING
        self._started = time.perf_counter()

    def _on_end(self, _: object) -> None:
        self._seconds += time.perf_counter() - self._started

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count compilations within the context, which should not happen, in `in_evaluation`."""
        before = len(self._records())
        self.evaluations += 1
        try:
            yield
        finally:
            self.in_evaluation += len(self._records()) - before

    def warm_up_done(self) -> None:
        """Count every compile from here on as a recompile."""
        self._warm_at = len(self._records())
        self._warm_cuda_graphs = self.cuda_graphs

    def late_cuda_graphs(self) -> list[str]:
        """Return a message if CUDA graphs were recorded after the warm-up."""
        return [hint("late CUDA graphs")] if self.cuda_graphs > self._warm_cuda_graphs else []

    def _records(self) -> list[dynamo_utils.CompilationMetrics]:
        """Return torch's records of compiles since the construction, without those of kernels tried out and CUDA graphs
        recorded at a later call."""
        return [r for r in dynamo_utils.get_compilation_metrics()[self._skip :] if not r.is_runtime]

    def _late(self) -> list[dynamo_utils.CompilationMetrics]:
        """Return compiles and rejections after the warm-up. A backward pass counts if its forward pass is older."""
        records = self._records()
        late = records[len(records) if self._warm_at is None else self._warm_at :]
        forward = {r.compile_id for r in late if r.is_forward is not False}
        return [r for r in late if r.is_forward is not False or r.compile_id not in forward]

    def counts(self) -> dict[str, float]:
        """Return graphs, recompiles, graph breaks, seconds and cache hits as in docs/metrics.md: compile/*."""
        forward = [r for r in self._records() if r.is_forward is True]
        # Behind a graph break Dynamo compiles the rest of a function as one of its own, under this name.
        resumed = [r for r in forward if (r.co_name or "").startswith("torch_dynamo_resume_in")]
        return {
            "compile/graphs": sum(bool(r.has_guarded_code) and bool(r.graph_op_count) for r in forward),
            "compile/recompiles": len(self._late()),
            "compile/graph_breaks": len(resumed) + sum(map(_left_eager, self._records())),
            "compile/cuda_graphs": self.cuda_graphs,
            "compile/seconds": round(self._seconds, 3),
            **{f"compile/seconds/{phase}": round(spent, 3) for phase, spent in self.phases().items()},
            "compile/cache_hits": max(0, _cache_hits() - self._hits),
        }

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase (docs/engineering/compile.md) over all compiles, without overlap."""
        # torch's fields come and go between versions.
        known = [phase for phase, field in NESTED.items() if hasattr(dynamo_utils.CompilationMetrics, field)]
        total = dict.fromkeys([*known, "backward"], 0.0)
        for record in self._records():
            for phase, spent in phase_seconds(record).items():
                total[phase] += spent
        return total

    def recompile_kinds(self) -> list[str]:
        """Return why compiles after the warm-up happened: the guard that failed, or the new frame's name. Of reasons
        that differ in sizes only, the first."""
        kinds: dict[str, str] = {}
        for record in self._late():
            kinds.setdefault(_kind(reason := _compile_reason(record)), reason)
        return list(kinds.values())

    def graph_break_reasons(self) -> list[str]:
        """Return `file:line: reason` of every graph break and of every function that was left to eager, each once."""
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
        """Stop measuring seconds."""
        # torch._dynamo.reset() has forgotten the callbacks, if it was called.
        if self._on_start in (handler := dynamo_callback.callback_handler).start_callbacks:
            handler.remove_start_callback(self._on_start)
            handler.remove_end_callback(self._on_end)


def phase_seconds(record: dynamo_utils.CompilationMetrics) -> dict[str, float]:
    """Return the seconds of each phase of one compile, without those of the phases inside it.

    A phase that did not happen is left out. A backward graph with a record of its own is one phase.
    """
    if record.is_forward is False:
        return {"backward": (getattr(record, BACKWARD, None) or 0) / 1e6}
    seconds: dict[str, float] = {}
    outer = ""
    for phase, field in NESTED.items():
        if (us := getattr(record, field, None)) is None:
            continue
        seconds[phase] = us / 1e6
        if outer:
            # Autotuning compiles kernels before code is generated, so an inner phase may be the longer one.
            seconds[phase] = min(seconds[phase], seconds[outer])
            seconds[outer] -= seconds[phase]
        outer = phase
    return seconds


def _left_eager(record: dynamo_utils.CompilationMetrics) -> bool:
    """Return whether torch gave up on a function: neither `counters` nor `graph_break_reasons` know of it."""
    return record.fail_type is not None and record.is_forward is not False


def _compile_reason(record: dynamo_utils.CompilationMetrics) -> str:
    """Return why a graph was compiled."""
    if record.recompile_reason:
        return re.sub(r"^\d+/\d+: ", "", record.recompile_reason.strip())
    if record.is_forward is False:
        return f"backward pass of graph {record.compile_id}, never run in the warm-up"
    return f"new frame {record.co_name}" + (f": {_first_line(record.fail_reason)}" if record.fail_reason else "")


def _kind(reason: str) -> str:
    """Return a reason without its sizes."""
    return re.sub(r"\d+", "0", reason)


def _first_line(text: str) -> str:
    """Return the first line of a text."""
    return (text.strip().splitlines() or ["unknown"])[0]


def _cache_hits() -> int:
    """Return how many graphs of this process came from a cache on disk instead of the compiler."""
    counters = dynamo_utils.counters
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


@dataclass(frozen=True)
class Records:
    """Faults of one rank or of several: counts are added up, texts of ranks other than 0 name their rank."""

    recompiles: int = 0
    in_evaluation: int = 0
    "compiles during evaluations"
    recompile_kinds: tuple[str, ...] = ()
    graph_break_reasons: tuple[str, ...] = ()
    late_cuda_graphs: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    "what HookWatch found"


def records_of(watch: CompileWatch, hooks: Sequence[str] = ()) -> Records:
    """Return the records of this rank, so far."""
    texts = watch.recompile_kinds(), watch.graph_break_reasons(), watch.late_cuda_graphs(), hooks
    return Records(int(watch.counts()["compile/recompiles"]), watch.in_evaluation, *map(tuple, texts))


class RecordsOfRanks:
    """Keeps the records of each rank as last exchanged; texts are exchanged only when one has something new."""

    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._ranks = [Records()] * rt.world_size

    def together(self, own: Records, *, exchange: bool) -> Records:
        """Return the records of all ranks.

        Args:
            exchange: every rank calls this; the records travel only if those of a rank have changed. False: training
                ended with an error and ranks do not wait for each other, so the others' are those last exchanged.
        """
        here = self._rt.rank
        if not exchange:
            return together([*self._ranks[:here], own, *self._ranks[here + 1 :]])
        if self._rt.any_rank(own != self._ranks[here]):
            self._ranks = self._rt.gathered(own)
        return together(self._ranks)


def together(ranks: Sequence[Records]) -> Records:
    """Return the records of all ranks as one."""

    def united(values: Sequence[Any]) -> Any:
        if isinstance(values[0], int):
            return sum(values)
        found: dict[str, str] = {}
        for rank, texts in enumerate(values):
            for text in texts:
                found.setdefault(text, f"rank {rank}: {text}" if rank else text)
        return tuple(found.values())

    return Records(*(united([getattr(own, field.name) for own in ranks]) for field in fields(Records)))
