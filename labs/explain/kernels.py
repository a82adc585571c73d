"""The three stages on a model: captured graphs, their operators, the kernels that come out, and where a step's time
goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import utils as dynamo_utils  # private: no public records of compiles (pytorch/pytorch#115788)
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile walks arguments so

from labs.explain.private import kernels_in_profile
from labs.explain.profile import Step, alternately, dispatched, profiled
from labs.explain.subject import Subject
from sftkit.compile.contract import compile_model, run_eagerly, undo_compile
from sftkit.compile.debug import compiler_logs
from sftkit.compile.switches import compiler_switches
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import CompileConfig
from sftkit.rundir.names import SUMMARY, compile_dir
from sftkit.runtime.progress import working

TIMED_STEPS = 5
"Steps of either way that are timed."


def kernels_of(subject: Subject, compile: CompileConfig | None, out: Path) -> dict[str, Any]:
    """Measure a training step (forward and backward pass) in eager and compiled by Inductor, on this machine.

    Args:
        compile: the recipe's, whose scope, mode and dynamic are taken; None: the module is compiled whole.
        out: the compiler's logs go to out/compile, see docs/compile.md.
    """
    # Eager first, while nothing is compiled: a first step warms up, then operators are counted, then it is profiled.
    step, device = module_step(subject), next(subject.module.parameters()).device
    with working("a step in eager"):
        step()
        counted, eager = dispatched(step), profiled(step, device, {})
    # Compiled the same way as a run of the recipe, with the compiler's own logs kept.
    asked = compile or CompileConfig()
    compile = replace(asked, enabled=True, backend="inductor", debug=("graphs", "output_code", "perf_hints"))
    with working("Inductor writes kernels"), compiled(subject, compile, out) as watch:
        step()
    graphs = json.loads((compile_dir(out, 0).parent / SUMMARY).read_text())["graphs"]
    # The logs say from which operators a kernel came, which on a CPU decides its kind.
    origins = {kernel["name"]: kernel["aten"] for graph in graphs for kernel in graph["kernels"] or []}
    with working("a step compiled"):
        fast = profiled(step, device, origins)
        # Eager is the same step, of which the Python of the model is run.
        slow, quick = alternately(run_eagerly()(step), step, device, TIMED_STEPS)
    undo_compile(subject.trained.model if subject.trained else subject.module)
    # Written only where Inductor had any.
    hints = compile_dir(out, 0) / "perf_hints.txt"
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
def compiled(subject: Subject, compile: CompileConfig, out: Path) -> Iterator[dict[str, float]]:
    """Compile in place as a run of the recipe does; what is run inside is compiled and logged.

    Yields:
        counters that are filled at the end with what CompileWatch.counts says
    """
    counts: dict[str, float] = {}
    # What this process compiled before must not be found again: the seconds are those of a first compile.
    torch.compiler.reset()
    # Private: what was captured before would be in the summary, which lists all that Dynamo knows.
    dynamo_utils.clear_compilation_metrics()
    dynamic_layout = subject.trained is not None and subject.trained.dynamic_layout
    if subject.trained:
        compile_model(subject.trained.model.orig_model, compile, dynamic_layout=dynamic_layout)
    else:
        subject.module.compile(backend=compile.backend, dynamic=compile.dynamic, mode=compile.mode)
    budget = 1.0 if compile.activation_memory_budget is None else compile.activation_memory_budget
    switches = compiler_switches(compile, budget, dynamic_layout=dynamic_layout)
    with compiler_logs(lambda: out, compile, 0) as write, switches, kernels_in_profile():
        watch = CompileWatch()
        yield counts
        counts |= watch.counts()
        watch.close()
        write()


def module_step(subject: Subject) -> Step:
    """Return a forward and backward pass; of a recipe with its objective, else from the sum of what the module
    returns."""

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
