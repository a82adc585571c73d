"""What the compiler made of the model, as files of the run: graphs, generated kernels, recompiles, hints, a summary."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch._logging
from torch._dynamo import utils as dynamo_utils
from torch._logging._internal import _is_torch_handler

from sftkit.compile.watch import phase_seconds
from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import COMPILE_SUMMARY, SUMMARY, compile_dir

ARTIFACTS = {
    "graphs": ("graph_code", "aot_graphs"),
    "output_code": ("output_code",),
    "recompiles": ("recompiles",),
    "perf_hints": ("perf_hints", "cudagraphs"),
}
"What compile.debug may name: the framework's logs that belong to it."
ORIGINS = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*)\], Original ATen: \[(.*)\]")
LAUNCHES = {
    "triton": re.compile(r"(\w+)\.run\("),
    "c++": re.compile(r"(cpp_\w+)\("),
    "library": re.compile(r"(?:\w+ = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+)\("),
}
"How a line of generated code begins that runs a kernel."


class CompilerFiles(logging.Handler):
    """Writes the framework's logs into one folder, each record under the id of its graph, generated code a file each."""

    def __init__(self, folder: Callable[[], Path], debug: Iterable[str]) -> None:
        super().__init__(logging.DEBUG)
        self._folder = folder
        self.names = {artifact: name for name in debug for artifact in ARTIFACTS[name]}
        self.generated: list[dict[str, Any]] = []
        "a dict for each graph that Inductor wrote code for: id, pass, aten_ops, file, kernels"
        self._ready = False

    @property
    def folder(self) -> Path:
        """Where it is by now: the place of a run changes at its first step."""
        return self._folder()

    def make_folder(self) -> None:
        """Make it when there is something to write."""
        if not self._ready:
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier start of this run
            self.folder.mkdir(parents=True)
            self._ready = True

    def is_theirs(self, record: logging.LogRecord) -> bool:
        """Whether the record goes to the terminal as ever, being none of those that are written here."""
        return _artifact(record) not in self.names

    def emit(self, record: logging.LogRecord) -> None:
        name, text = self.names.get(_artifact(record)), record.getMessage()
        if name is None:
            return
        graph = str(torch._guards.CompileContext.current_compile_id() or "")
        try:
            self.make_folder()
            if name == "output_code":
                if text.startswith("Output code:"):
                    self._add_code(graph, text.partition("\n")[2])
            elif (
                name != "graphs" or "TRACED GRAPH" in text
            ):  # its other records are metadata of thousands of characters
                with (self.folder / f"{name}.txt").open("a") as file:
                    file.write(f"[{graph}] {text.strip()}\n\n")
        except OSError:
            self.handleError(record)

    def _add_code(self, graph: str, code: str) -> None:
        from torch._inductor.virtualized import V

        direction = "backward" if getattr(V.graph, "is_backward", False) else "forward"
        nodes = getattr(getattr(getattr(V.graph, "module", None), "graph", None), "nodes", None)
        folder = self.folder / "output_code"
        folder.mkdir(exist_ok=True)
        stem = f"{graph.replace('/', '_')}-{direction}"
        taken = len(list(folder.glob(f"{stem}*.py")))
        file = folder / (f"{stem}-{taken + 1}.py" if taken else f"{stem}.py")
        file.write_text(code)
        self.generated.append(
            {
                "id": graph,
                "pass": direction,
                "aten_ops": None if nodes is None else sum(node.op == "call_function" for node in nodes),
                "file": str(file.relative_to(self.folder.parent)),
                "kernels": kernels(code),
            }
        )


@contextmanager
def compiler_logs(place: Callable[[], Path], compile: CompileConfig, rank: int) -> Iterator[Callable[[], None]]:
    """Inside, what compile.debug names goes into <place>/compile/rank000/ and not to the terminal; from before anything
    is compiled.

    A graph from a cache is not logged as one that is compiled, so all but `recompiles` turn the caches of graphs off
    (compiler_switches). The compiled code stays the same; machine code of kernels still comes from disk.

    Args:
        place: where the run writes at that moment; see Runtime.place.

    Yields:
        what writes <place>/compile/summary.md and summary.json, on the main rank: each graph, its kernels, the operators
        they came from. It may be called again: after the warm-up, and at the end.

    Raises:
        ConfigError: TORCH_LOGS is set, which torch lets win.
    """
    if not compile.debug:
        yield lambda: None
        return
    if "TORCH_LOGS" in os.environ:
        raise ConfigError(
            f"compile.debug: the environment has TORCH_LOGS={os.environ['TORCH_LOGS']}, and with it torch ignores other "
            "settings of its logs; unset TORCH_LOGS, or set compile.debug=[] to see its logs in the terminal"
        )
    files = CompilerFiles(lambda: compile_dir(place(), rank), compile.debug)
    with torch_logs_to(files, files.is_theirs, modules=dict.fromkeys(files.names, True)):
        yield lambda: _write_summary(rank, files)


@contextmanager
def torch_logs_to(
    handler: logging.Handler, for_terminal: Callable[[logging.LogRecord], bool], **settings: Any
) -> Iterator[None]:
    """Inside, a handler hears torch's logs too, and the terminal only what is for it; then they are as torch has them.

    Args:
        settings: of torch._logging.set_logs.
    """
    torch._logging.set_logs(**settings)
    loggers = torch_loggers()
    terminals = [terminal for logger in loggers for terminal in logger.handlers]
    for terminal in terminals:
        terminal.addFilter(for_terminal)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for terminal in terminals:
            terminal.removeFilter(for_terminal)
        for logger in loggers:
            logger.removeHandler(handler)
        torch._logging.set_logs()


def torch_loggers() -> list[logging.Logger]:
    """The framework's loggers that write to the terminal; a record reaches one of them. Its log of traces is not one.

    The class of their handlers differs between versions, so torch itself is asked whether a handler is one of its own.
    """
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    ours = [logger for logger in loggers if logger.name.split(".")[0] == "torch"]
    return [
        logger for logger in ours if logger.name != "torch.__trace" and any(map(_is_torch_handler, logger.handlers))
    ]


def _write_summary(rank: int, files: CompilerFiles) -> None:
    """What `compiler_logs` yields."""
    files.make_folder()
    if rank != 0:
        return
    graphs = summarize(dynamo_utils.get_compilation_metrics(), files.generated)
    folder = files.folder.parent
    content = {"torch": torch.__version__, "logs": sorted(set(files.names.values())), "graphs": graphs}
    replace_text(folder / SUMMARY, json.dumps(content, indent=1))
    replace_text(folder / COMPILE_SUMMARY, as_markdown(content))


def summarize(
    records: Iterable[dynamo_utils.CompilationMetrics], generated: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One dict for each pass of each graph: id, pass, function, captured_ops, aten_ops, seconds, phases, recompile_reason,
    files, kernels (None: no code was logged).
    """
    graphs: dict[tuple[str, str], dict[str, Any]] = {}
    functions: dict[str, str] = {}
    for record in records:
        if record.compile_id is None or (record.is_forward and not record.graph_op_count):
            continue
        phases = phase_seconds(record)
        if record.is_forward is not False:
            functions[record.compile_id] = _function(record)
        direction = "backward" if record.is_forward is False else "forward"
        graphs[record.compile_id, direction] = _entry(record.compile_id, direction) | {
            "captured_ops": record.graph_op_count,
            "seconds": round(sum(phases.values()), 3),
            "phases": {phase: round(seconds, 3) for phase, seconds in phases.items()},
            "recompile_reason": record.recompile_reason,
        }
    for code in generated:
        graph = graphs.setdefault((code["id"], code["pass"]), _entry(code["id"], code["pass"]))
        graph["aten_ops"] = (graph["aten_ops"] or 0) + (code["aten_ops"] or 0)
        graph["files"] += [code["file"]]
        graph["kernels"] = (graph["kernels"] or []) + code["kernels"]
    in_order = sorted(
        graphs, key=lambda key: ([int(number) for number in re.findall(r"\d+", key[0])], key[1] != "forward")
    )
    return [graphs[key] | {"function": functions.get(key[0], "?")} for key in in_order]


def _entry(graph: str, direction: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("captured_ops", "aten_ops", "seconds", "recompile_reason", "kernels"))
    return {"id": graph, "pass": direction, "function": "?"} | unknown | {"phases": {}, "files": []}


def _function(record: dynamo_utils.CompilationMetrics) -> str:
    return f"{record.co_name} ({Path(record.co_filename or '?').name}:{record.co_firstlineno})"


def kernels(code: str) -> list[dict[str, Any]]:
    """The kernels that a module of Inductor's generated code runs, in the order of their first launch.

    Returns:
        a dict each: name; kind, "triton", "c++" or "library" (a matrix product, an operator of its own); launches; aten, the
        operators that it came from; nodes, their names in the captured graph. A C++ kernel says where it came from by its
        name alone, so it has no nodes.
    """
    found: dict[str, dict[str, Any]] = {}
    origins: tuple[list[str], list[str]] | None = None
    for line in map(str.strip, code.rpartition("async_compile.wait(globals())")[2].splitlines()):
        if comment := ORIGINS.match(line):
            origins = _words(comment[1]), _words(comment[2])
            continue
        for kind, launch in LAUNCHES.items():
            if call := launch.match(line):
                nodes, aten = origins or ([], [])
                unseen: dict[str, Any] = {"name": call[1], "kind": kind, "launches": 0, "aten": [], "nodes": []}
                kernel = found.setdefault(call[1], unseen)
                kernel["launches"] += 1
                kernel["aten"] = list(dict.fromkeys(kernel["aten"] + (aten or _in_name(call[1], kind))))
                kernel["nodes"] = list(dict.fromkeys(kernel["nodes"] + nodes))
                origins = None
                break
    return list(found.values())


def _words(listed: str) -> list[str]:
    return [word for word in listed.split(", ") if word]


def _in_name(kernel: str, kind: str) -> list[str]:
    """The operators in the name of a kernel: `cpp_fused_add_silu_backward_0` has aten.add and aten.silu_backward."""
    if kind == "library" or "_fused_" not in kernel:
        return [kernel.removeprefix("torch.ops.").removeprefix("extern_kernels.").removesuffix(".default")]
    words = re.sub(r"^.*?_fused_|_\d+$", "", kernel).split("_")
    operators = []
    while words:
        ends = range(len(words), 0, -1)
        length = next((end for end in ends if hasattr(torch.ops.aten, "_".join(words[:end]))), 1)
        operators.append(f"aten.{'_'.join(words[:length])}")
        words = words[length:]
    return operators


def as_markdown(content: dict[str, Any]) -> str:
    """summary.json for reading."""
    graphs = content["graphs"]
    lines = [
        f"# What the compiler made\n\ntorch {content['torch']}, main rank. docs/compile.md says how to read this.\n"
    ]
    if not graphs:
        return lines[0] + "\nNothing was compiled.\n"
    lines += ["| graph | function | operators captured | ATen operators | fused kernels | library calls | seconds |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for graph in graphs:
        counts = [graph["captured_ops"], graph["aten_ops"], *_kernel_counts(graph["kernels"]), graph["seconds"]]
        cells = [f"{graph['id']} {graph['pass']}", graph["function"], *map(_cell, counts)]
        lines.append(f"| {' | '.join(cells)} |")
    if "output_code" not in content["logs"]:
        lines.append("\nKernels are listed with `compile.debug: [output_code]`.")
    for graph in graphs:
        if graph["kernels"] is not None:
            lines.append(f"\n## {graph['id']} {graph['pass']}: {graph['function']}\n")
            if graph["recompile_reason"]:
                lines.append(f"Compiled again: `{graph['recompile_reason']}`\n")
            lines += [f"Code: {', '.join(graph['files'])}\n", "| kernel | launches | from |", "|---|---|---|"]
            lines += [f"| `{k['name']}` | {k['launches']} | {_origin(k)} |" for k in graph["kernels"]]
    return "\n".join(lines) + "\n"


def _kernel_counts(kernels: list[dict[str, Any]] | None) -> tuple[int | None, int | None]:
    """Fused kernels that Inductor wrote, and calls of libraries."""
    if kernels is None:
        return None, None
    library = [kernel for kernel in kernels if kernel["kind"] == "library"]
    return len(kernels) - len(library), sum(kernel["launches"] for kernel in library)


def _origin(kernel: dict[str, Any]) -> str:
    return ", ".join(name.removeprefix("aten.") for name in kernel["aten"])


def _cell(value: float | None) -> str:
    return "" if value is None else str(value)


def _artifact(record: logging.LogRecord) -> str:
    return getattr(logging.getLogger(record.name), "artifact_name", None) or ""
