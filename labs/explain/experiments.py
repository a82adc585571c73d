"""Small experiments that show how the compiler works, each run on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # private: graph_break (pytorch/torchdynamo#1482) has no public name
from torch import Tensor, nn

# Private: a backend that counts graphs and runs them in Python. pytorch/pytorch#153199 proposed torch.testing for it.
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from labs.explain.breaks import GRAPH_BREAK_CASES, LossByName, LossByTensor, LossByValue, listening
from labs.explain.compiler_logs import compiler_logs
from labs.explain.kernels import alternately, callers, dispatch_keys, finish, has_kernel
from labs.validate.judge import pays_from
from sftkit.compile.contract import compiler_switches
from sftkit.config.schema import CompileConfig
from sftkit.runtime.hardware import device_name
from sftkit.runtime.script import working

CALLS, LEAST_SECONDS = 10, 0.3
"Minimum number of calls of each timing, and their minimum total seconds."


@dataclass(frozen=True)
class Sizes:
    """Tensor sizes at which the device takes some milliseconds."""

    elements: int
    side: int
    hidden: int
    length: int
    dtype: torch.dtype


SIZES = {"cpu": Sizes(2**20, 512, 256, 128, torch.float32), "cuda": Sizes(2**26, 4096, 2048, 4096, torch.bfloat16)}


@dataclass(frozen=True)
class CodeKind:
    """A kind of code, with the claim about it."""

    name: str
    claim: str
    low: float
    high: float
    make: Callable[[Sizes, torch.device], Callable[[], object]]
    """function from a compiler to the timed call; the compiler is torch.compile or the identity"""


def chain(x: Tensor) -> Tensor:
    """Compute ten elementwise operators on a tensor of any shape: eager reads and writes memory for each, a fused
    kernel once.
    """
    y = x * 1.5 + 0.5
    y = F.silu(y) * y.sigmoid()
    return (y.tanh() + y.square()) * 0.5 - y.abs()


def chain_with_breaks(x: Tensor) -> Tensor:
    """Compute the same in four graphs."""
    y = x * 1.5 + 0.5
    # Private: breaks the graph and does nothing else.
    torch._dynamo.graph_break()
    y = F.silu(y) * y.sigmoid()
    torch._dynamo.graph_break()
    y = y.tanh() + y.square()
    torch._dynamo.graph_break()
    return y * 0.5 - y.abs()


class Block(nn.Module):
    """A decoder block: RMS norm, causal attention, gated feed-forward layer; [B, T, H] in and out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = 4
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate_up, self.down = nn.Linear(hidden, 6 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [B, T, H]."""
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, hidden))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _elementwise(function: Callable[[Tensor], Tensor], sizes: Sizes, device: torch.device) -> Callable[..., object]:
    x = torch.randn(sizes.elements, device=device, dtype=sizes.dtype)
    return lambda compiled: (lambda call: lambda: call(x))(compiled(function))


def _product(sizes: Sizes, device: torch.device) -> Callable[..., object]:
    a, b = (torch.randn(sizes.side, sizes.side, device=device, dtype=sizes.dtype) for _ in range(2))
    return lambda compiled: (lambda call: lambda: call(a, b))(compiled(torch.mm))


def _block(sizes: Sizes, device: torch.device, *, training: bool) -> Callable[..., object]:
    block = Block(sizes.hidden).to(device, sizes.dtype).train(training)
    x = torch.randn(4, sizes.length, sizes.hidden, device=device, dtype=sizes.dtype)

    def made(compiled: Callable[..., Any]) -> Callable[[], object]:
        call = compiled(block)

        def infer() -> object:
            with torch.no_grad():
                return call(x)

        def train() -> None:
            call(x).sum().backward()
            block.zero_grad(set_to_none=True)

        return train if training else infer

    return made


CODE_KINDS = (
    CodeKind("a chain of elementwise operators", "2-5x", 2.0, 5.0, partial(_elementwise, chain)),
    CodeKind("one matrix product", "1x", 0.9, 1.1, _product),
    CodeKind("the chain with three graph breaks", "marginal", 0.9, 1.5, partial(_elementwise, chain_with_breaks)),
    CodeKind("a whole block, inference", "1.5-3x", 1.5, 3.0, partial(_block, training=False)),
    CodeKind("a whole block, training", "1.2-2x", 1.2, 2.0, partial(_block, training=True)),
)


def measure_cases(device: torch.device, backend: str = "inductor") -> dict[str, Any]:
    """Return a row for each kind: milliseconds in eager and compiled, from the fastest of alternating calls, their
    ratio, the claim, and which of the two is larger.
    """
    sizes = SIZES[device.type]
    kind = str(sizes.dtype).removeprefix("torch.")
    machine = f"{device_name(device)}, {kind}, torch {torch.__version__}"
    if device.type == "cpu":
        machine += f", threads: {torch.get_num_threads()}"
    return {"machine": machine, "backend": backend, "rows": [_row(one, sizes, device, backend) for one in CODE_KINDS]}


def _row(kind: CodeKind, sizes: Sizes, device: torch.device, backend: str) -> dict[str, Any]:
    torch.compiler.reset()
    # Created once for both ways: the same weights and inputs.
    make: Any = kind.make(sizes, device)
    plain = make(lambda function: function)
    started = time.perf_counter()
    call = make(lambda function: torch.compile(function, backend=backend, dynamic=False))
    # The first call compiles, so only later calls are timed.
    call()
    finish(device)
    first = time.perf_counter() - started
    slow, quick = alternately(plain, call, device, CALLS, LEAST_SECONDS)
    eager, compiled = slow.quickest, quick.quickest
    speedup = eager / compiled
    return {
        "name": kind.name,
        "claim": kind.claim,
        "low": kind.low,
        "high": kind.high,
        "eager_ms": 1e3 * eager,
        "compiled_ms": 1e3 * compiled,
        "speedup": speedup,
        "first_seconds": first,
        "busy": slow.busy or quick.busy,
        "pays_after": pays_from(eager, compiled, first),
        "verdict": "as claimed" if kind.low <= speedup <= kind.high else "less" if speedup < kind.low else "more",
    }


def labs(device: torch.device, out: Path) -> dict[str, Any]:
    """Run all labs and return their findings."""
    with working("what breaks graphs"):
        found: dict[str, Any] = {"breaks": what_breaks(), "loss": chosen_losses(), "dispatch": dispatch_trace(device)}
    with working("linear + softmax by Inductor"):
        found["softmax"] = softmax_kernels(device, out)
    with working("when does compiling help?"):
        found["pays"] = measure_cases(device)
    return found


def what_breaks() -> list[dict[str, Any]]:
    """Return the breaks of each case with and without its remedy, and Dynamo's name for the first."""
    rows = []
    for case in GRAPH_BREAK_CASES:
        breaking, fixed = captured_graphs(case.breaking), captured_graphs(case.fixed)
        counts = {"broken": breaking["breaks"], "graphs": breaking["graphs"], "mended": fixed["breaks"]}
        rows.append({"name": case.name, "reasons": breaking["reasons"], **counts, "remedy": case.remedy})
    return rows


def captured_graphs(function: Callable[..., Any], *calls: Callable[[], tuple[Any, ...]]) -> dict[str, Any]:
    """Return graphs, breaks with their reasons, and recompiles of some calls; Python runs the graphs.

    Args:
        calls: functions that make the arguments of a call; empty: a single call with a tensor [4, 8].
    """
    graphs = CompileCounter()
    with listening() as heard:
        compiled = torch.compile(function, backend=graphs)
        for make in calls or (lambda: (torch.linspace(-1, 2, 32).reshape(4, 8),),):
            compiled(*make())
    reasons = [one.kind for one in heard.breaks()]
    return {
        "graphs": graphs.frame_count,
        "breaks": len(reasons),
        "reasons": reasons,
        "recompiles": len(heard.recompiles()),
    }


def chosen_losses() -> list[dict[str, Any]]:
    """Compare three ways to choose a loss function in `forward`, with two calls that choose different losses."""
    near = torch.zeros(8, 16), torch.zeros(8, 4)
    far = torch.zeros(8, 16), torch.full((8, 4), 9.0)
    rows = []
    for name, model in (
        ("by a value computed there", LossByValue()),
        ("by an attribute", LossByName()),
        ("both, and torch.where", LossByTensor()),
    ):

        def second(model: nn.Module = model) -> tuple[torch.Tensor, ...]:
            if isinstance(model, LossByName):
                model.kind = "l1"
            return far

        rows.append({"name": name} | captured_graphs(model, lambda: near, second))
    return rows


def dispatch_trace(device: torch.device) -> list[dict[str, Any]]:
    """Return each call of a linear layer through the dispatcher with its depth, and the dispatch keys of its input
    that have their own kernel for it: the first of them runs.
    """
    layer, x = nn.Linear(8, 4).to(device), torch.randn(2, 3, 8, device=device, requires_grad=True)
    # First without the profiler: a first call may do more than later ones.
    layer(x)
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        layer(x)
    keys = [*dispatch_keys(x), "CompositeExplicitAutograd", "CompositeImplicitAutograd"]
    rows = []
    for event in traced.events() or []:
        if event.name.startswith("aten::"):
            depth = sum(parent.name.startswith("aten::") for parent in callers(event))
            own = [key for key in keys if has_kernel(event.name, key)]
            rows.append({"name": event.name, "depth": depth, "keys": own})
    return rows


def softmax_kernels(device: torch.device, out: Path) -> dict[str, Any]:
    """Return the kernels that Inductor makes from a linear layer followed by a softmax: a library's product and one
    generated kernel.
    """
    layer, x = nn.Linear(64, 256).to(device), torch.randn(128, 64, device=device)
    switches = compiler_switches(CompileConfig())
    # Otherwise the lambda's code of an earlier lab could be found again.
    torch.compiler.reset()
    folder = out / "softmax"
    with torch.no_grad(), compiler_logs(folder, ["output_code"]) as write, switches:
        torch.compile(lambda y: F.softmax(layer(y), -1), dynamic=False)(x)
        graphs = write()
    return {
        "kernels": [kernel for graph in graphs for kernel in graph["kernels"] or []],
        "code": [f for g in graphs for f in g["files"]],
    }
