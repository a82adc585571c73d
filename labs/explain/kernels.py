"""The three stages of compiling a model: captured graphs, their operators, the generated kernels; and the split of a
step's time.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._inductor.config
from torch._dynamo import utils as dynamo_utils  # private: no public records of compiles (pytorch/pytorch#115788)
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile traverses arguments this way
from torch.utils._python_dispatch import TorchDispatchMode  # the only view of every operator (pytorch/pytorch#110073)

from labs.explain.compiler_logs import FOLDER, compiler_logs
from labs.explain.subject import Subject
from sftkit.compile.contract import compile_model, compiler_switches, run_eagerly
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import CompileConfig, has_cuda_graphs
from sftkit.errors import ConfigError
from sftkit.runtime.script import working

TRIED = "2.13"
"The torch version that these were tested on."


def undo_compile(model: torch.nn.Module) -> None:
    """Return a model to eager for good."""
    for module in model.modules():
        # Private: what Module.compile sets (pytorch/pytorch#97565), which has no inverse (torch 2.13).
        module._compiled_call_impl = None
    # Dynamo keeps graphs by code object, not by module: without a reset other models of this class would still find
    # them.
    torch.compiler.reset()


def _needed(owner: Any, name: str, where: str) -> Any:
    """Return a private attribute of torch.

    Raises:
        ConfigError: this torch has no attribute of that name.
    """
    if not hasattr(owner, name):
        raise ConfigError(
            f"sftkit explain: torch {torch.__version__} has no {where}.{name}, which torch {TRIED} has: use that "
            "version, or leave --kernels and --labs out"
        )
    return getattr(owner, name)


def quiet_profiler() -> None:
    """Suppress the two lines that Kineto prints for each profile as of torch 2.13 (USDT: profiler_start). Only
    without a GPU, whose profiler's errors are wanted. Kineto reads the variable when the first profile begins.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def kernels_in_profile() -> AbstractContextManager[None]:
    """Mark each kernel in generated C++ within the context, so that a profile on a CPU shows kernels by name."""
    # Private: the option that marks generated kernels (pytorch/pytorch#89367).
    cpp = _needed(torch._inductor.config, "cpp", "torch._inductor.config")
    _needed(cpp, "enable_kernel_profile", "torch._inductor.config.cpp")
    # A patch of Inductor's settings, undone when the context ends.
    return torch._inductor.config.patch({"cpp.enable_kernel_profile": True})


def dispatch_keys(tensor: torch.Tensor) -> list[str]:
    """Return the dispatch keys of a tensor in the order in which they are asked for a kernel."""
    # Private: torch has no public view of dispatch keys (pytorch/pytorch#26207). Its text lists the lowest
    # priority first.
    keys = str(_needed(torch._C, "_dispatch_keys", "torch._C")(tensor))
    return [word.strip() for word in keys.partition("(")[2].rstrip(")").split(",") if word.strip()][::-1]


def has_kernel(operator: str, key: str) -> bool:
    """Return whether an overload of an operator such as aten::linear, except those with out=, has its own kernel for
    a dispatch key, or for the alias that AutogradCPU and similar keys share.
    """
    # Private: the public torch.library.get_kernel (pytorch/pytorch#158393) returns the kernel that would run, which
    # may be registered for another key. Some overloads exist only in Python, and asking for their keys is an error,
    # so `known` is asked first.
    known = _needed(torch._C, "_dispatch_has_kernel", "torch._C")
    asked = _needed(torch._C, "_dispatch_has_kernel_for_dispatch_key", "torch._C")
    space, _, name = operator.partition("::")
    overloads = [one for one in getattr(getattr(torch.ops, space), name).overloads() if "out" not in one]
    names = [operator if overload == "default" else f"{operator}.{overload}" for overload in overloads]
    keys = (key, "Autograd") if key.startswith("Autograd") else (key,)
    return any(known(each) and asked(each, one) for each in names for one in keys)


MATRIX, ATTENTION, ELEMENTWISE, REDUCTION = "matrix products", "attention", "elementwise", "reductions"
COPIES, COMMUNICATION, IDLE = "copies and lookups", "communication", "idle"
KERNEL_KINDS = (MATRIX, ATTENTION, ELEMENTWISE, REDUCTION, COPIES, COMMUNICATION, IDLE)
"""Kinds into which a step's time is split. idle: the GPU has no work; on a CPU: between operators, in Python, the
dispatcher and guards.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


REDUCTIONS = _names(
    "sum mean amax amin max min argmax argmin softmax log_softmax logsumexp var var_mean std norm linalg_vector_norm "
    "prod any all native_layer_norm layer_norm rms_norm fused_rms_norm native_group_norm cumsum nll_loss "
    "nll_loss_forward cross_entropy_loss count_nonzero"
)
_MATRIX_OPERATORS = _names("mm addmm bmm baddbmm matmul linear addbmm dot mv einsum convolution mkl_linear grouped_mm")
_COPIES = _names(
    "copy clone to _to_copy contiguous cat stack index index_select gather scatter scatter_add index_put index_add "
    "embedding embedding_dense_backward fill zero zeros zeros_like ones ones_like full full_like arange repeat "
    "new_zeros masked_fill constant_pad_nd slice_backward select_backward"
)
_NOTHING = _names(
    "as_strided view reshape t transpose permute expand unsqueeze squeeze slice select detach alias resolve_conj "
    "resolve_neg empty empty_like empty_strided resize lift_fresh unbind split chunk narrow flatten _unsafe_view "
    "unflatten is_nonzero item _local_scalar_dense result_type _has_compatible_shallow_copy_type numpy_T movedim "
    "swapaxes expand_as view_as"
)
_DEVICE = (
    (
        COMMUNICATION,
        r"^(?!triton_).*(?:nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|AllReduce|SendRecv|PtoP)",
    ),
    (ATTENTION, r"flash|fmha|attention|sdpa|flex"),
    (MATRIX, r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|triton_tem|triton_mm|splitKreduce|s884|s1688|s16816"),
    (
        REDUCTION,
        r"triton_(?:red|per)_|reduce_kernel|[Ss]oftmax|layer_norm|LayerNorm|RowwiseMoments|cub::|nll_loss|logsumexp",
    ),
    (ELEMENTWISE, r"triton_poi_|foreach|multi_tensor"),
    (COPIES, r"Memcpy|Memset|[Cc]opy|CatArray|index|gather|scatter|[Ee]mbedding|FillFunctor|arange"),
    (ELEMENTWISE, r"elementwise"),
)
"Patterns of GPU kernel names; the first match counts."


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel on a GPU."""
    return next((kind for kind, pattern in _DEVICE if re.search(pattern, name)), ELEMENTWISE)


def kind_of_operator(name: str, origins: Mapping[str, Sequence[str]]) -> str | None:
    """Return the kind of an event on a CPU; None if it only contains or arranges computing events.

    Args:
        origins: generated kernel -> its ATen operators.
    """
    # Inductor prefixes the graph's number if a profile has several.
    name = re.sub(r"^graph_\d+_", "", name)
    if name.startswith("cpp_"):
        reduces = any(_plain(operator) in REDUCTIONS for operator in origins.get(name, ()))
        return REDUCTION if reduces else ELEMENTWISE
    if re.match(r"c10d|gloo|nccl", name):
        return COMMUNICATION
    space, _, operator = name.partition("::")
    if not operator or space == "autograd" or operator in ("engine", ""):
        return None
    if re.search(r"attention|flash", operator):
        return ATTENTION
    plain = _plain(operator)
    if plain in _NOTHING:
        return None
    for kind, names in ((MATRIX, _MATRIX_OPERATORS), (REDUCTION, REDUCTIONS), (COPIES, _COPIES)):
        if plain in names or operator in names:
            return kind
    return ELEMENTWISE


def _plain(operator: str) -> str:
    """Return the operator's plain name: `aten._softmax_backward_data` as softmax, `mul_` as mul."""
    operator = operator.rpartition(".")[2] if operator.startswith("aten.") else operator
    return re.sub(r"_backward(?:_data|_input|_weight)?$", "", operator).strip("_")


PROFILED_STEPS = 3
LISTED = 12
"Maximum number of listed kernels or operators."
_BUSY = 1.5
"From this ratio of median to fastest on, other work took much of the time."

Step = Callable[[], object]
Origins = Mapping[str, Sequence[str]]


class Dispatched(TorchDispatchMode):
    """A mode that counts the operator calls that reach the kernels of a backend, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        self.views += bool(getattr(func, "is_view", False))
        return func(*args, **(kwargs or {}))


def dispatched(step: Step) -> Dispatched:
    """Run an eager step and count its operators."""
    with Dispatched() as counted:
        step()
    return counted


@dataclass(frozen=True)
class Timing:
    """Seconds of calls. The fastest is least disturbed by other work on the machine."""

    quickest: float
    median: float

    @property
    def busy(self) -> bool:
        """Return whether other work took much of the time, so that ratios say little."""
        return self.median > _BUSY * self.quickest


def alternately(
    eager: Step, compiled: Step, device: torch.device, calls: int, least_seconds: float = 0.0
) -> list[Timing]:
    """Time two ways alternately, so that other work on the machine disturbs both alike; the first two calls of each
    do not count.

    Args:
        calls, least_seconds: minimum for each way.

    Returns:
        timings of the eager and of the compiled way.
    """
    found: tuple[list[float], list[float]] = [], []
    while len(found[0]) < calls + 2 or min(map(sum, found)) < least_seconds:
        # One call of each in turn: a machine that slows down as it heats up slows both.
        for seconds, step in zip(found, (eager, compiled), strict=True):
            started = time.perf_counter()
            step()
            finish(device)
            seconds.append(time.perf_counter() - started)
    return [Timing(min(seconds[2:]), median(seconds[2:])) for seconds in found]


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profiled(step: Step, device: torch.device, origins: Origins) -> dict[str, Any]:
    """Profile some steps of a function that has already run.

    Returns:
        shares of a step's time under the profiler by kind, which add up to 1; launches of a step; top: the most
        expensive kernels or operators.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as traced:
        started = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        finish(device)
        wall = 1e6 * (time.perf_counter() - started)
    events = list(traced.events() or [])
    work = _on_device(events) if device.type == "cuda" else on_host(events, origins)
    return {"shares": kind_shares(work, wall), "launches": round(len(work) / PROFILED_STEPS), "top": top(work)}


def _on_device(events: Iterable[Any]) -> list[tuple[str, str, float, float]]:
    """Return (name, kind, start, end) of each kernel and copy of a GPU, in microseconds."""
    return [
        (event.name, kind_of_kernel(event.name), event.time_range.start, event.time_range.end)
        for event in events
        # User annotations appear on the device too, around the kernels that they name.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def on_host(events: Iterable[Any], origins: Origins) -> list[tuple[str, str, float, float]]:
    """Return the same for a CPU: the outermost operators and kernels that compute, including everything inside them."""
    return [
        (event.name, kind, event.time_range.start, event.time_range.end)
        for event in events
        if (kind := kind_of_operator(event.name, origins))
        and not any(kind_of_operator(caller.name, origins) for caller in callers(event))
    ]


def callers(event: Any) -> Iterator[Any]:
    """Yield the CPU events that enclose an event, the nearest first."""
    while (event := event.cpu_parent) is not None:
        yield event


def kind_shares(work: Sequence[tuple[str, str, float, float]], wall: float) -> dict[str, float]:
    """Return the shares of the wall time by kind, 0-1, in the order of KERNEL_KINDS. Overlapping time counts for the
    event that began first, and uncovered time is idle.

    Args:
        work: (name, kind, start, end) in microseconds.
        wall: microseconds of all steps.
    """
    spent: dict[str, float] = defaultdict(float)
    reached = float("-inf")
    for _, kind, start, end in sorted(work, key=lambda one: one[2]):
        spent[kind] += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    # Events end after the host's clock was read, so their sum may be slightly larger.
    whole = max(wall, sum(spent.values()))
    spent[IDLE] = whole - sum(spent.values())
    return {kind: spent[kind] / whole for kind in KERNEL_KINDS if spent[kind] > 0}


def top(work: Sequence[tuple[str, str, float, float]]) -> list[dict[str, Any]]:
    """Return name, kind, launches and milliseconds per step of the most expensive entries."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kind, start, end in work:
        found[name, kind].append(end - start)
    n = PROFILED_STEPS
    return [
        {"name": name, "kind": kind, "launches": round(len(times) / n, 2), "ms": sum(times) / n / 1e3}
        for (name, kind), times in sorted(found.items(), key=lambda item: -sum(item[1]))[:LISTED]
    ]


TIMED_STEPS = 5
"Number of timed steps of each way."


def kernels_of(subject: Subject, compile: CompileConfig | None, out: Path) -> dict[str, Any]:
    """Measure a training step (forward and backward pass) in eager and compiled by Inductor, on this machine.

    Args:
        compile: compile section of the recipe, for scope, mode and dynamic; None: the module is compiled whole.
        out: folder; the compiler's logs go to out/compile, see docs/engineering/compile.md.
    """
    # Eager first, before anything is compiled: a first step warms up, then operators are counted, then it
    # is profiled.
    step, device = module_step(subject), next(subject.module.parameters()).device
    with working("a step in eager"):
        step()
        counted, eager = dispatched(step), profiled(step, device, {})
    # Compiled in the same way as a run of the recipe, with the compiler's own logs kept.
    asked = compile or CompileConfig()
    compile = replace(asked, enabled=True, backend="inductor")
    with working("Inductor writes kernels"), compiled(subject, compile, out) as watch:
        step()
    graphs = watch["graphs"]
    # The logs list the operators of a kernel, which determine its kind on a CPU.
    origins = {kernel["name"]: kernel["aten"] for graph in graphs for kernel in graph["kernels"] or []}
    with working("a step compiled"):
        fast = profiled(step, device, origins)
        # Eager runs the same step with the model's Python code.
        slow, quick = alternately(run_eagerly()(step), step, device, TIMED_STEPS)
    undo_compile(subject.trained.model if subject.trained else subject.module)
    # Written only if Inductor had any.
    hints = out / FOLDER / "perf_hints.txt"
    return {
        "graphs": graphs,
        "profiles": {"eager": eager | {"seconds": slow.quickest}, "compiled": fast | {"seconds": quick.quickest}},
        "busy": slow.busy or quick.busy,
        "counts": {
            "dispatches": sum(counted.operators.values()),
            "views": counted.views,
            "eager_launches": eager["launches"],
            "launches": fast["launches"],
            "graphs": int(watch["compile/graphs"]),
            "breaks": int(watch["compile/graph_breaks"]),
            "seconds": watch["compile/seconds"],
        },
        "operators": counted.operators.most_common(),
        "hints": hints.read_text().split("\n\n") if hints.exists() else [],
    }


@contextmanager
def compiled(subject: Subject, compile: CompileConfig, out: Path) -> Iterator[dict[str, Any]]:
    """Compile in place as a run of the recipe does; steps within the context are compiled and logged.

    Yields:
        filled at the end: CompileWatch.counts, and the graphs of compiler_logs as "graphs"
    """
    counts: dict[str, Any] = {}
    # Code compiled earlier in this process must not be reused: the seconds are those of a first compile.
    torch.compiler.reset()
    # Private: otherwise earlier captures would be in the summary, which lists everything that Dynamo knows.
    dynamo_utils.clear_compilation_metrics()
    dynamic_layout = subject.trained is not None and subject.trained.dynamic_layout
    if subject.trained:
        compile_model(subject.trained.model.orig_model, compile, dynamic_layout=dynamic_layout)
    else:
        subject.module.compile(backend=compile.backend, dynamic=compile.dynamic, mode=compile.mode)
    budget = 1.0 if compile.activation_memory_budget is None else compile.activation_memory_budget
    switches = compiler_switches(compile, budget, dynamic_layout=dynamic_layout)
    logs = compiler_logs(out, cuda_graphs=has_cuda_graphs(compile))
    with logs as write, switches, kernels_in_profile():
        watch = CompileWatch()
        yield counts
        counts |= watch.counts() | {"graphs": write()}
        watch.close()


def module_step(subject: Subject) -> Step:
    """Return a forward and backward pass, with a recipe's objective, otherwise from the sum of the module's outputs."""

    def trained() -> None:
        assert subject.trained is not None
        model, batch = subject.trained.model, subject.trained.batch
        sums = model(batch)
        (sums.loss / max(model.objective.count(batch), 1)).backward()
        model.zero_grad(set_to_none=True)

    def plain() -> None:
        leaves = pytree.tree_leaves(subject.run(subject.call))
        total = sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        subject.module.zero_grad(set_to_none=True)

    return trained if subject.trained else plain
