"""Write what the compiler made of a model to files: graphs, kernels, hints, and a summary of them."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._logging
from torch._dynamo import utils as dynamo_utils
from torch._logging._internal import _is_torch_handler

from labs.explain.run import refuse_torch_logs
from sftkit.compile.watch import phase_seconds
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import SUMMARY

FOLDER = "compile"
"Folder of the logs, in that of a subject."

ARTIFACTS = {
    "graphs": ("graph_code", "aot_graphs"),
    "output_code": ("output_code",),
    "perf_hints": ("perf_hints", "cudagraphs"),
}
"Kind of a file -> torch's logs that belong to it."
OF_CUDA_GRAPHS = "cudagraphs"
"A log with a line for every operator of every graph. It says nothing of use if no CUDA graph is to be recorded."
ORIGINS = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*)\], Original ATen: \[(.*)\]")
LAUNCHES = {
    "triton": re.compile(r"(\w+)\.run\("),
    "c++": re.compile(r"(cpp_\w+)\("),
    "library": re.compile(r"(?:\w+ = )?((?:extern_kernels|torch\.ops|aten)\.[\w.]+)\("),
}
"Kind of a kernel -> how a line of generated code that runs one begins."


class CompilerFiles(logging.Handler):
    """Writes torch's logs into one folder, each record under the id of its graph, generated code a file each."""

    def __init__(self, folder: Path, logs: Sequence[str], *, cuda_graphs: bool) -> None:
        """Take records of these of ARTIFACTS.

        Args:
            folder: where to write; files of an earlier call are deleted.
            cuda_graphs: some are to be recorded, so hints say why one was not.
        """
        super().__init__(logging.DEBUG)
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.names = {artifact: name for name in logs for artifact in ARTIFACTS[name]}
        if not cuda_graphs:
            self.names.pop(OF_CUDA_GRAPHS, None)
        self.generated: list[dict[str, Any]] = []
        "a dict for each graph that Inductor wrote code for: id, pass, aten_ops, file, kernels"

    def for_terminal(self, record: logging.LogRecord) -> bool:
        """Return whether the record goes to the terminal as before, because it is not written here."""
        return artifact_of(record) not in self.names

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record under the id of its graph."""
        name = self.names.get(artifact_of(record))
        if name is None:
            return
        text = record.getMessage()
        # Private: the id of the graph that is being compiled, which the record is about; of backward graphs too
        # (pytorch/pytorch#124626). torch.compiler has no name for it (torch 2.13).
        graph = str(torch._guards.CompileContext.current_compile_id() or "")
        try:
            if name == "output_code":
                if text.startswith("Output code:"):
                    self._add_code(graph, text.partition("\n")[2])
            # Other records of graphs are metadata of thousands of characters.
            elif name != "graphs" or "TRACED GRAPH" in text:
                with (self.folder / f"{name}.txt").open("a") as file:
                    file.write(f"[{graph}] {text.strip()}\n\n")
        except OSError:
            self.handleError(record)

    def _add_code(self, graph: str, code: str) -> None:
        """Write generated code to a file of its own and remember its kernels."""
        # Private: Inductor's graph that is being compiled, which knows its direction and operators; the log has neither
        # for every graph (pytorch/pytorch#130147).
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
                "file": str(file.relative_to(self.folder)),
                "kernels": kernels(code),
            }
        )


@contextmanager
def compiler_logs(
    out: Path, logs: Sequence[str] = tuple(ARTIFACTS), *, cuda_graphs: bool = False
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Write the compiler's logs into out/compile, not to the terminal, within the context.

    It is entered before anything is compiled. A graph that comes from a cache is logged in part: without hints, without
    what Inductor knew of it when it wrote code. So the caches of graphs are off; machine code still comes from disk.

    Args:
        logs: of ARTIFACTS.
        cuda_graphs: CUDA graphs are to be recorded.

    Yields:
        a function that writes out/compile/summary.md and summary.json, and returns the graphs, each with its kernels
        and the operators that they came from.

    Raises:
        ConfigError: TORCH_LOGS is set, which overrides these settings in torch.
    """
    refuse_torch_logs()
    files = CompilerFiles(out / FOLDER, logs, cuda_graphs=cuda_graphs)
    with (
        torch_logs_to(files, files.for_terminal, modules=dict.fromkeys(files.names, True)),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield lambda: _write_summary(files)


@contextmanager
def torch_logs_to(
    handler: logging.Handler, for_terminal: Callable[[logging.LogRecord], bool], **settings: Any
) -> Iterator[None]:
    """Send torch's logs to a handler within the context, and to the terminal only some records; then restore all.

    Args:
        handler: is given every record.
        for_terminal: returns whether a record goes to the terminal.
        settings: of torch._logging.set_logs.
    """
    # Private module, but its set_logs is documented (pytorch/pytorch#99219); without settings it goes back to torch's
    # defaults.
    torch._logging.set_logs(**settings)
    with ExitStack() as stack:
        stack.callback(torch._logging.set_logs)
        for logger in torch_loggers():
            for terminal in logger.handlers:
                terminal.addFilter(for_terminal)
                stack.callback(terminal.removeFilter, for_terminal)
            logger.addHandler(handler)
            stack.callback(logger.removeHandler, handler)
        yield


def torch_loggers() -> list[logging.Logger]:
    """Return torch's loggers that write to the terminal, except its log of traces; a record reaches one of them.

    The class of their handlers differs between versions, so torch itself is asked whether a handler is one of its own.
    """
    named = logging.root.manager.loggerDict.values()
    ours = [one for one in named if isinstance(one, logging.Logger) and one.name.split(".")[0] == "torch"]
    # Private: what torch's own set_logs asks before it removes handlers; others put theirs on the same loggers
    # (pytorch/pytorch#188241).
    return [one for one in ours if one.name != "torch.__trace" and any(map(_is_torch_handler, one.handlers))]


def _write_summary(files: CompilerFiles) -> list[dict[str, Any]]:
    # Private: the records of each compile (pytorch/pytorch#115788), with seconds by phase; torch.compiler has no name
    # for them.
    graphs = summarize(dynamo_utils.get_compilation_metrics(), files.generated)
    content = {"torch": torch.__version__, "logs": sorted(set(files.names.values())), "graphs": graphs}
    replace_text(files.folder / SUMMARY, json.dumps(content, indent=1))
    replace_text(files.folder / "summary.md", as_markdown(content))
    return graphs


def summarize(
    records: Iterable[dynamo_utils.CompilationMetrics], generated: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return one dict for each pass of each graph.

    Its keys: id, pass, function, captured_ops, aten_ops, seconds, phases, recompile_reason, files, kernels
    (None: no code was logged).
    """
    # What torch's records say of each pass.
    graphs: dict[tuple[str, str], dict[str, Any]] = {}
    functions: dict[str, str] = {}
    for record in records:
        # Of a later call, which tried out kernels or recorded a CUDA graph: not what the compile took.
        if record.is_runtime or record.compile_id is None or (record.is_forward and not record.graph_op_count):
            continue
        phases = phase_seconds(record)
        if record.is_forward is not False:
            place = f"{Path(record.co_filename or '?').name}:{record.co_firstlineno}"
            functions[record.compile_id] = f"{record.co_name} ({place})"
        direction = "backward" if record.is_forward is False else "forward"
        graphs[record.compile_id, direction] = _entry(record.compile_id, direction) | {
            "captured_ops": record.graph_op_count,
            "seconds": round(sum(phases.values()), 3),
            "phases": {phase: round(seconds, 3) for phase, seconds in phases.items()},
            "recompile_reason": record.recompile_reason,
        }
    # The code that was logged for it.
    for code in generated:
        graph = graphs.setdefault((code["id"], code["pass"]), _entry(code["id"], code["pass"]))
        graph["aten_ops"] = (graph["aten_ops"] or 0) + (code["aten_ops"] or 0)
        graph["files"] += [code["file"]]
        graph["kernels"] = (graph["kernels"] or []) + code["kernels"]
    in_order = sorted(graphs, key=lambda key: (list(map(int, re.findall(r"\d+", key[0]))), key[1] != "forward"))
    return [graphs[key] | {"function": functions.get(key[0], "?")} for key in in_order]


def _entry(graph: str, direction: str) -> dict[str, Any]:
    """Return the dict of a pass of which nothing is known yet."""
    unknown = dict.fromkeys(("captured_ops", "aten_ops", "seconds", "recompile_reason", "kernels"))
    return {"id": graph, "pass": direction, "function": "?"} | unknown | {"phases": {}, "files": []}


def kernels(code: str) -> list[dict[str, Any]]:
    """Return the kernels that a module of Inductor's generated code runs, in the order of their first launch.

    Returns:
        a dict each: name; kind, "triton", "c++" or "library" (a matrix product or another operator that is not
        generated); launches; aten, the operators that it came from; nodes, their names in the captured graph. A C++
        kernel says where it came from by its name alone, so it has no nodes.
    """
    # Behind this line of Inductor's modules only the function that launches the kernels is left. Above a launch there
    # is a comment with the operators that the kernel came from.
    kernels_by_name: dict[str, dict[str, Any]] = {}
    origins: list[list[str]] | None = None
    for line in map(str.strip, code.rpartition("async_compile.wait(globals())")[2].splitlines()):
        if comment := ORIGINS.match(line):
            origins = [[word for word in listed.split(", ") if word] for listed in comment.groups()]
            continue
        for kind, launch in LAUNCHES.items():
            if call := launch.match(line):
                nodes, aten = origins or ([], [])
                unseen: dict[str, Any] = {"name": call[1], "kind": kind, "launches": 0, "aten": [], "nodes": []}
                kernel = kernels_by_name.setdefault(call[1], unseen)
                kernel["launches"] += 1
                kernel["aten"] = list(dict.fromkeys(kernel["aten"] + (aten or _in_name(call[1], kind))))
                kernel["nodes"] = list(dict.fromkeys(kernel["nodes"] + nodes))
                origins = None
                break
    return list(kernels_by_name.values())


def _in_name(kernel: str, kind: str) -> list[str]:
    """Return the operators in the name of a kernel: `cpp_fused_add_silu_backward_0` has
    aten.add, aten.silu_backward, and `triton_poi_fused_0` none."""
    if kind == "library" or "_fused_" not in kernel:
        return [kernel.removeprefix("torch.ops.").removeprefix("extern_kernels.").removesuffix(".default")]
    # Names of operators have underscores of their own, so each time the longest one that torch knows is taken.
    words = re.sub(r"^.*?_fused|_\d+$", "", kernel).split("_")[1:]
    operators = []
    while words:
        ends = range(len(words), 0, -1)
        length = next((end for end in ends if hasattr(torch.ops.aten, "_".join(words[:end]))), 1)
        operators.append(f"aten.{'_'.join(words[:length])}")
        words = words[length:]
    return operators


def as_markdown(content: dict[str, Any]) -> str:
    """Return the content of summary.json for reading."""
    graphs = content["graphs"]
    title = f"# What the compiler made\n\ntorch {content['torch']}. labs/explain/README.md says how to read this.\n"
    if not graphs:
        return title + "\nNothing was compiled.\n"
    columns = "graph | function | operators captured | ATen operators | fused kernels | library calls | seconds"
    lines = [title, f"| {columns} |", "|---|---|---|---|---|---|---|"]
    for graph in graphs:
        fused = library = None  # unknown without generated code
        if graph["kernels"] is not None:
            launches = [kernel["launches"] for kernel in graph["kernels"] if kernel["kind"] == "library"]
            fused = len(graph["kernels"]) - len(launches)
            library = sum(launches)
        counts = [graph["captured_ops"], graph["aten_ops"], fused, library, graph["seconds"]]
        known = ("" if count is None else str(count) for count in counts)
        cells = [f"{graph['id']} {graph['pass']}", graph["function"], *known]
        lines.append(f"| {' | '.join(cells)} |")
    for graph in graphs:
        if graph["kernels"] is not None:
            lines.append(f"\n## {graph['id']} {graph['pass']}: {graph['function']}\n")
            if graph["recompile_reason"]:
                lines.append(f"Compiled again: `{graph['recompile_reason']}`\n")
            lines += [f"Code: {', '.join(graph['files'])}\n", "| kernel | launches | from |", "|---|---|---|"]
            for kernel in graph["kernels"]:
                origin = ", ".join(name.removeprefix("aten.") for name in kernel["aten"])
                lines.append(f"| `{kernel['name']}` | {kernel['launches']} | {origin} |")
    return "\n".join(lines) + "\n"


def artifact_of(record: logging.LogRecord) -> str:
    """Return which of torch's logs a record belongs to; empty: none."""
    return getattr(logging.getLogger(record.name), "artifact_name", None) or ""
