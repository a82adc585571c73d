"""When does compiling help? Five kinds of code, eager against compiled, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo  # private: graph_break (pytorch/torchdynamo#1482) has no public name
from torch import Tensor, nn
from torch.nn import functional as F

from labs.explain.profile import alternately, finish
from sftkit.reports.pays import pays_from
from sftkit.runtime.hardware import device_name

CALLS, LEAST_SECONDS = 10, 0.3
"Each timing has at least so many calls, which take at least so many seconds together."


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors: such that the device takes some milliseconds."""

    elements: int
    side: int
    hidden: int
    length: int
    dtype: torch.dtype


SIZES = {"cpu": Sizes(2**20, 512, 256, 128, torch.float32), "cuda": Sizes(2**26, 4096, 2048, 4096, torch.bfloat16)}


@dataclass(frozen=True)
class CodeKind:
    """A kind of code, and what is said of it."""

    name: str
    claim: str
    low: float
    high: float
    make: Callable[[Sizes, torch.device], Callable[[], object]]
    """makes a function of a compiler, which returns the call to be timed; the compiler is torch.compile or changes
    nothing"""


def chain(x: Tensor) -> Tensor:
    """Compute ten elementwise operators, on a tensor of any shape: eager reads and writes memory for each, a fused
    kernel once."""
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
    """Return a row for each kind: milliseconds in eager and compiled, of the quickest of some calls in turn, their
    ratio, what was claimed, and which of the two is larger."""
    sizes = SIZES[device.type]
    kind = str(sizes.dtype).removeprefix("torch.")
    machine = f"{device_name(device)}, {kind}, torch {torch.__version__}"
    if device.type == "cpu":
        machine += f", threads: {torch.get_num_threads()}"
    return {"machine": machine, "backend": backend, "rows": [_row(one, sizes, device, backend) for one in CODE_KINDS]}


def _row(kind: CodeKind, sizes: Sizes, device: torch.device, backend: str) -> dict[str, Any]:
    torch.compiler.reset()
    # Made once for both ways: the same weights and inputs.
    make: Any = kind.make(sizes, device)
    plain = make(lambda function: function)
    started = time.perf_counter()
    call = make(lambda function: torch.compile(function, backend=backend, dynamic=False))
    # The first call compiles; what follows is timed without it.
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
