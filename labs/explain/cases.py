"""Code that breaks graphs: each case is a function that breaks one, and a function that computes the same and does not.
The labs run all of them, and the remedies that are shown for a user's break are theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labs.explain.torch_logs import Break

Function = Callable[..., Any]


@dataclass(frozen=True)
class GraphBreakCase:
    """Code that breaks the graph."""

    name: str
    kinds: tuple[str, ...]
    "how the reasons begin that Dynamo gives"
    breaking: Function
    fixed: Function
    remedy: str


def branch(x: Tensor) -> Tensor:
    """Choose in Python by a tensor's value."""
    if x.sum() > 0:
        return x * 2
    return x


def branchless(x: Tensor) -> Tensor:
    """Compute both sides and choose with torch.where."""
    return torch.where(x.sum() > 0, x * 2, x)


def _item(x: Tensor) -> Tensor:
    return x / x.max().item()


def no_item(x: Tensor) -> Tensor:
    """Divide by a 0-dim tensor."""
    return x / x.max()


def selected(x: Tensor) -> Tensor:
    """Make a tensor whose shape depends on values."""
    return x[x > 0].sum()


def masked(x: Tensor) -> Tensor:
    """Keep the shape, with zeros in the place of what is left out."""
    return torch.where(x > 0, x, 0.0).sum()


def printed(x: Tensor) -> Tensor:
    """Print between two operators."""
    y = x * 2
    print("", end="")
    return y + 1


def silent(x: Tensor) -> Tensor:
    """Compute the same as `printed`, `_timed`, `marked` and `_written` without acting on the world."""
    return x * 2 + 1


def _timed(x: Tensor) -> Tensor:
    y = x * 2
    time.sleep(0)
    return y + 1


@torch.compiler.disable
def by_hand(x: Tensor) -> Tensor:
    """Stay out of the graph."""
    return x * 2


def disabled(x: Tensor) -> Tensor:
    """Call a function that stays out of the graph."""
    return by_hand(x + 1) + 1


def enabled(x: Tensor) -> Tensor:
    """Compute the same as `disabled` in one graph."""
    return (x + 1) * 2 + 1


def marked(x: Tensor) -> Tensor:
    """Break the graph by Dynamo's own call."""
    y = x * 2
    # Private (pytorch/torchdynamo#1482): the call that this case is about.
    torch._dynamo.graph_break()
    return y + 1


def _written(x: Tensor) -> Tensor:
    y = x * 2
    with open("/dev/null", "w") as file:
        file.write("a line")
    return y + 1


GRAPH_BREAK_CASES = (
    GraphBreakCase(
        "a branch on a tensor's value",
        ("Data-dependent branching",),
        branch,
        branchless,
        "compute both sides and choose with torch.where, or torch.cond for two large ones",
    ),
    GraphBreakCase(
        ".item(), float(tensor), int(tensor)",
        ("Unsupported Tensor.item()",),
        _item,
        no_item,
        "keep the number a tensor: 0-dim tensors take part in arithmetic; read it after the compiled call",
    ),
    GraphBreakCase(
        "a shape that depends on values: x[mask], nonzero, unique",
        ("Dynamic shape operator", "Dynamic slicing", "Data dependent operator"),
        selected,
        masked,
        "keep the shape: torch.where with the mask instead of x[mask], or choose outside the compiled module",
    ),
    GraphBreakCase(
        "print and other builtins that act on the world: open, input",
        ("Failed to trace builtin operator",),
        printed,
        silent,
        "do it outside the compiled module, and return what is to be printed",
    ),
    GraphBreakCase(
        "a C function that is not torch's: time, files, other libraries",
        ("Attempted to call function marked as skipped", "Unsupported function call"),
        _timed,
        silent,
        "call it outside, or make an operator of it with torch.library.custom_op, which the graph calls as it is",
    ),
    GraphBreakCase(
        "a context manager that Dynamo does not know: an open file",
        ("Unsupported context manager",),
        _written,
        silent,
        "open it around the compiled module, not in it",
    ),
    GraphBreakCase(
        "torch.compiler.disable",
        ("Skip calling `torch.compiler.disable()`d function",),
        disabled,
        enabled,
        "take the decorator away, or make an operator of the function with torch.library.custom_op",
    ),
    GraphBreakCase(
        "torch._dynamo.graph_break()", ("Call to `torch._dynamo.graph_break()`",), marked, silent, "take the call away"
    ),
)


class LossByValue(nn.Module):
    """A loss function that is chosen in Python inside `forward`, by a number that is computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-dim, of x [B, 16] and target [B, 4]."""
        out = self.net(x)
        loss = F.l1_loss if (out - target).abs().max() > 1.0 else F.mse_loss
        return loss(out, target)


class LossByName(LossByValue):
    """A loss function that is chosen by an attribute: Python is asked while the graph is captured, so there is no
    break, and a guard on the name."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "mse"

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-dim, of x [B, 16] and target [B, 4]."""
        out = self.net(x)
        loss = F.l1_loss if self.kind == "l1" else F.mse_loss
        return loss(out, target)


class LossByTensor(LossByValue):
    """Both losses are computed and one is taken: one graph, whatever the values."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-dim, of x [B, 16] and target [B, 4]."""
        out = self.net(x)
        far = (out - target).abs().max() > 1.0
        return torch.where(far, F.l1_loss(out, target), F.mse_loss(out, target))


def remedy_of(graph_break: Break) -> str:
    """Return what to do about a break: what was tried here for breaks of its kind, else what Dynamo proposes, if
    anything."""
    ours = [case.remedy for case in GRAPH_BREAK_CASES if graph_break.kind.startswith(case.kinds)]
    return ". ".join(ours or (hint.rstrip(".") for hint in graph_break.hints))
