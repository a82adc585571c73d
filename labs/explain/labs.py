"""Small experiments that show how the compiler works, each run here and now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Private: a backend that counts graphs, and runs them by Python. pytorch/pytorch#153199 proposed torch.testing for it.
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from labs.explain import pays
from labs.explain.cases import GRAPH_BREAK_CASES, LossByName, LossByTensor, LossByValue
from labs.explain.private import dispatch_keys, has_kernel
from labs.explain.profile import callers
from labs.explain.torch_logs import listening
from sftkit.compile.debug import compiler_logs
from sftkit.compile.switches import compiler_switches
from sftkit.config.schema import CompileConfig
from sftkit.rundir.names import SUMMARY, compile_dir
from sftkit.runtime.progress import working


def labs(device: torch.device, out: Path) -> dict[str, Any]:
    """Run all labs and return what each found."""
    with working("what breaks graphs"):
        found: dict[str, Any] = {"breaks": what_breaks(), "loss": chosen_losses(), "dispatch": dispatch_trace(device)}
    with working("linear + softmax by Inductor"):
        found["softmax"] = softmax_kernels(device, out)
    with working("when does compiling help?"):
        found["pays"] = pays.measure_cases(device)
    return found


def what_breaks() -> list[dict[str, Any]]:
    """Return the breaks of each case as it is and with its remedy, and what Dynamo calls the first."""
    rows = []
    for case in GRAPH_BREAK_CASES:
        breaking, fixed = captured_graphs(case.breaking), captured_graphs(case.fixed)
        counts = {"broken": breaking["breaks"], "graphs": breaking["graphs"], "mended": fixed["breaks"]}
        rows.append({"name": case.name, "reasons": breaking["reasons"], **counts, "remedy": case.remedy})
    return rows


def captured_graphs(function: Callable[..., Any], *calls: Callable[[], tuple[Any, ...]]) -> dict[str, Any]:
    """Return graphs, breaks with their reasons, and recompiles of some calls; the graphs are run by Python.

    Args:
        calls: each makes the arguments of one; none: a single call with a tensor [4, 8].
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
    """Compare three ways to choose a loss function in `forward`: two calls, of which the second takes the other one."""
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
    """Return each call that a linear layer makes through the dispatcher, with its depth, and the dispatch keys of its
    input that have a kernel of their own for it: the first of them runs."""
    layer, x = nn.Linear(8, 4).to(device), torch.randn(2, 3, 8, device=device, requires_grad=True)
    # Once without the profiler: a first call may do more than later ones.
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
    """Return the kernels that Inductor makes of a linear layer with a softmax behind it: one product of a library and
    one of its own."""
    layer, x = nn.Linear(64, 256).to(device), torch.randn(128, 64, device=device)
    compile = CompileConfig(debug=("output_code",))
    # Else the lambda's code of an earlier lab could be found again.
    torch.compiler.reset()
    folder = out / "softmax"
    with torch.no_grad(), compiler_logs(lambda: folder, compile, 0) as write, compiler_switches(compile):
        torch.compile(lambda y: F.softmax(layer(y), -1), dynamic=False)(x)
        write()
    graphs = json.loads((compile_dir(folder, 0).parent / SUMMARY).read_text())["graphs"]
    return {
        "kernels": [kernel for graph in graphs for kernel in graph["kernels"] or []],
        "code": [f for g in graphs for f in g["files"]],
    }
