"""The command `sftkit explain`: its flags, and its written and printed results. torch is imported after the arguments
are checked.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftkit.config.commands import Parser, path, path_or_id, whole_number
from sftkit.config.load import read_config
from sftkit.config.schema import Config
from sftkit.config.terminal import print_text, visible
from sftkit.errors import ConfigError
from sftkit.rundir.files import replace_shared
from sftkit.runtime.script import counted, working

if TYPE_CHECKING:
    from labs.explain.bisect import BisectAnswer
    from labs.explain.subject import Subject

DESCRIPTION = """Explain what the compiler does with a model: where and why its graph breaks, which module is guilty, \
which kernels it generates.

  sftkit explain recipes/default/base.yaml               breaks and recompiles, by three instruments
  sftkit explain recipes/default/base.yaml --bisect      the smallest module that breaks, recompiles or differs, as a \
script
  sftkit explain recipes/default/base.yaml --kernels     graph, fused kernels, where a step's time goes
  sftkit explain my_model.py:example                     the same for the result of example(): (module, args)
  sftkit explain --labs                                  small experiments on this machine

The model has random weights and is fed random tokens in rows of the recipe's shape: no weights and no data are read.
The results are written as a page, explain.html, and as explain.json.
Exit code 1: a graph breaks, or a module is at fault."""


def parse() -> tuple[Namespace, Config | None]:
    """Return the parsed command line and the recipe that it names; None without a recipe. Print argument errors and
    exit with code 2 if there are any.

    Raises:
        ConfigError: the recipe is invalid, the file does not exist, or TORCH_LOGS is set.
    """
    parser = Parser(DESCRIPTION, prog="sftkit explain")
    parser.add_argument("subject", nargs="?", type=path_or_id, help="a recipe, or FILE.py:FUNCTION")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    blocks = whole_number("blocks", 1)
    parser.add_argument("--layers", type=blocks, metavar="N", help="the first N blocks of the model only; all")
    parser.add_argument("--encoder", action="store_true", help="examine the encoder in place of the decoder")
    parser.add_argument(
        "--bisect", action="store_true", help="find the smallest module at fault, and write it as a script"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="graph, kernels and time of a training step; compiles with Inductor"
    )
    parser.add_argument("--labs", action="store_true", help="no recipe: experiments that show how the compiler works")
    parser.add_argument("--out", type=path, help="a folder (runs/explain/NAME-TIME)")
    args = parser.parse_intermixed_args()
    refuse_torch_logs()
    if args.encoder and args.layers:
        parser.error("--layers cuts the decoder, and --encoder examines the encoder: leave one out")
    if (args.subject is None) == (not args.labs):
        parser.error("name a recipe or FILE.py:FUNCTION, or take --labs alone")
    if args.labs and (args.bisect or args.kernels or args.layers or args.encoder):
        parser.error("--labs has no recipe, so no --bisect, --kernels, --layers or --encoder")
    if is_file(args.subject) and (args.overrides or args.layers or args.encoder):
        parser.error("key=value words, --layers and --encoder belong to a recipe")
    if is_file(args.subject):
        file_of(args.subject)
    without = args.labs or is_file(args.subject)
    return args, None if without else read_config(args.subject, args.overrides, world_size=1)


def refuse_torch_logs() -> None:
    """Reject an environment with TORCH_LOGS, which overrides the log settings here.

    Raises:
        ConfigError: it is set.
    """
    if "TORCH_LOGS" in os.environ:
        raise ConfigError(
            "the environment has TORCH_LOGS, and with it torch ignores other settings of its logs: unset it"
        )


def is_file(subject: str | None) -> bool:
    """Return whether the argument names a function in a file."""
    return subject is not None and ".py:" in subject


def file_of(subject: str) -> Path:
    """Return the file of FILE.py:FUNCTION as an absolute path.

    Raises:
        ConfigError: the file does not exist.
    """
    file = subject.rpartition(":")[0]
    if not Path(file).is_file():
        raise ConfigError(f"{subject}: there is no Python file {file}; name a recipe, or FILE.py:FUNCTION")
    return Path(file).absolute()


def report_dir(args: Namespace) -> Path:
    """Return the folder of the results: --out, or a new folder named after recipe and time."""
    words = Path((args.subject or "labs").replace(".py:", "/")).with_suffix("").parts
    name = "-".join(words[-2:]) + "-encoder" * args.encoder
    return args.out or Path("runs/explain") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Yield the whole result, line by line."""
    yield f"{result['name']} on {result['device']}, torch {result['torch']}"
    if result.get("beside"):
        yield result["beside"]
    if "breaks" in result:
        yield from _breaks(result["breaks"])
    for row in result.get("bisect", []):
        yield from _bisected(row)
    if "kernels" in result:
        yield from _kernels(result["kernels"])
    if "labs" in result:
        yield from _labs(result["labs"])


def wrapped(line: str, width: int) -> Iterator[str]:
    """Yield a line wrapped at this many columns with a hanging indent; words, and so paths and commands, stay whole."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
    parts = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    yield from parts or [""]


def _breaks(breaks: dict[str, Any]) -> Iterator[str]:
    yield f"\ngraph breaks: {len(breaks['rows'])}"
    for row in breaks["rows"]:
        yield f"  {row['file']}:{row['line']}: {row['code']}"
        yield f"    why     {row['reason']}" + ("; the rest of the function runs as Python" if row["given_up"] else "")
        yield f"    remedy  {row['remedy']}"
        yield f"    seen by {', '.join(row['seen_by'])}"
    for one in breaks["instruments"]:
        yield f"  {one['name']}: {one['said']}"
    for text in breaks["recompiles"]:
        yield f"  compiled again: {text}"


def _bisected(row: dict[str, Any]) -> Iterator[str]:
    if row["module"] is None:
        yield f"\nwhich module {row['title']}? none"
        return
    yield f"\nwhich module {row['title']}? {row['module']}, {row['where']}"
    yield f"  {row['said']}"
    for step in row["steps"]:
        yield f"    {'fault' if step['found'] else '  ok '}  {step['module']}"
    if row["others"]:
        yield f"  and {', '.join(row['others'])}"
    if row["alike"]:
        yield f"  not asked, as they look like it: {', '.join(row['alike'])}"
    if row["confirmed"] is not None:
        without = "without fault" if row["confirmed"] else "still at fault: something else is too"
        yield f"  the whole with these left out of the graph: {without}"
    if row["script"]:
        yield f"  {'shows it' if row['shows'] else 'does not show it by itself'}: python {row['script']}"
    else:
        yield f"  {row['printed']}"


def _kernels(result: dict[str, Any]) -> Iterator[str]:
    counts = result["counts"]
    yield (
        f"\na training step: {counts['dispatches']:,} operators dispatched in eager ({counts['views']:,} of them "
        f"views), {counts['launches']:,} launches compiled; {counted(counts['graphs'], 'graph')}, "
        f"{counted(counts['breaks'], 'break')}"
    )
    if result["busy"]:
        yield "  the machine did other work meanwhile: these times say little"
    for way in ("eager", "compiled"):
        profile = result["profiles"][way]
        # A share below half a percent would be printed as 0 %.
        shares = (f"{kind} {share:.0%}" for kind, share in profile["shares"].items() if share >= 0.005)
        yield f"  {way:8}  {1e3 * profile['seconds']:8.2f} ms  {', '.join(shares)}"
    for graph in result["graphs"]:
        kernels = graph["kernels"] or []
        known = graph["aten_ops"] is not None
        operators = counted(graph["aten_ops"], "ATen operator") if known else "ATen operators not known"
        yield (
            f"  graph {graph['id']} {graph['pass']}: {graph['function']}, {operators}, "
            f"{counted(len(kernels), 'kernel')}"
        )


def _labs(labs: dict[str, Any]) -> Iterator[str]:
    softmax = labs["softmax"]
    yield f"\nlinear + softmax: {', '.join(k['name'] for k in softmax['kernels'])}"
    yield "\na linear layer, as the dispatcher sees it:"
    for call in labs["dispatch"]:
        yield f"  {'  ' * call['depth']}{call['name']}"
    yield "\nwhat breaks graphs (breaks before and after the remedy)"
    for row in labs["breaks"]:
        yield f"  {row['broken']} -> {row['mended']}  {row['name']}: {row['remedy']}"
    yield "\na loss function chosen in forward"
    for row in labs["loss"]:
        numbers = (counted(row[f"{noun}s"], noun) for noun in ("graph", "break", "recompile"))
        yield f"  {row['name']}: {', '.join(numbers)}"
    yield f"\nwhen does compiling help? {labs['pays']['machine']}"
    if any(row["busy"] for row in labs["pays"]["rows"]):
        yield "  the machine did other work meanwhile: these times say little"
    for row in labs["pays"]["rows"]:
        yield f"  {row['name']:34}  {row['speedup']:5.2f}x  (claimed {row['claim']})"


DATA, PAGE = "explain.json", "explain.html"


def main() -> int:
    """Explain the subject of the arguments and return the exit code."""
    args, cfg = parse()  # rejects invalid arguments and recipes before torch is imported
    return run_explain(args, cfg)


def run_explain(args: Namespace, cfg: Config | None) -> int:
    """Carry out the flags and return the exit code: 1 if a graph breaks or a module is found guilty.

    Args:
        cfg: recipe; None: the subject has none.

    Raises:
        ConfigError: the file or the model is invalid.
    """
    import torch

    from labs.explain.breaks import breaks_of
    from labs.explain.experiments import labs
    from labs.explain.kernels import kernels_of, quiet_profiler
    from labs.explain.subject import of_file, of_recipe
    from sftkit.runtime import start as runtime
    from sftkit.runtime.hardware import device_name
    from sftkit.runtime.start import name_vector_width, quiet_libraries, start_device

    out = report_dir(args)
    quiet_profiler()
    # Before compilation: the width is part of the keys of compiled code only once it is named.
    name_vector_width()
    with ExitStack() as stack:
        if cfg is not None:
            rt = stack.enter_context(closing(runtime.start(cfg.run, cfg.train)))
            subject = of_recipe(cfg, args.layers, rt, of_encoder=args.encoder)
        else:
            quiet_libraries()
            device = start_device()
            if args.labs:
                facts = {"name": "Labs of the compiler", "device": device_name(device), "torch": torch.__version__}
                return _finish(facts | {"labs": labs(device, out)}, out)
            subject = of_file(args.subject, device)
        out.mkdir(parents=True, exist_ok=True)
        device = next((p.device for p in subject.module.parameters()), torch.device("cpu"))
        result: dict[str, Any] = {"name": subject.name, "device": device_name(device), "torch": torch.__version__}
        result |= {"beside": subject.beside, "shapes": [call.shape for call in (subject.call, subject.other) if call]}
        with working("capturing graphs"):
            result["breaks"] = breaks_of(subject)
        if args.bisect:
            result["bisect"] = _asked(subject, cfg.compile.backend if cfg else "inductor", out)
        if args.kernels:
            result["kernels"] = kernels_of(subject, cfg.compile if cfg else None, out)
    return _finish(result, out)


def _asked(subject: Subject, backend: str, out: Path) -> list[dict[str, Any]]:
    """Return the section on the smallest modules at fault; differences are tested with the recipe's backend, all
    other questions without generated code.
    """
    from labs.explain.bisect import QUESTIONS, bisect, reproduce

    rows = []
    # Without another known shape, questions about one cannot be asked.
    for question in (each for each in QUESTIONS if subject.other or each.name != "shapes"):
        used = backend if question.name == "differs" else "eager"
        with working(f"which module {question.title}?"):
            finding = bisect(subject, question, used)
            path = out / f"{question.name}.py"
            script = reproduce(subject, finding, question.title, used, path) if finding.guilty else None
        asked = {"question": question.name, "title": question.title, "backend": used}
        rows.append(asked | _bisect_result(finding, script))
    return rows


def _bisect_result(finding: BisectAnswer, script: dict[str, Any] | None) -> dict[str, Any]:
    first = finding.guilty[0] if finding.guilty else None
    others, asked = [part.name for part in finding.guilty[1:]], {name for name, _ in finding.steps}
    return {
        "module": first.name if first else None,
        "where": first.where if first else None,
        "said": finding.message,
        "others": [name for name in others if name in asked],
        "alike": [name for name in others if name not in asked],
        "confirmed": finding.confirmed,
        "steps": [{"module": name, "found": found} for name, found in finding.steps],
        **(script or dict.fromkeys(("script", "text", "shows", "printed"))),
    }


def _finish(result: dict[str, Any], out: Path) -> int:
    """Write the result as data and as a page, print it, and return the exit code."""
    from labs.explain.page import render_page

    out.mkdir(parents=True, exist_ok=True)
    replace_shared(out / DATA, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    replace_shared(out / PAGE, visible(render_page(result)))
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns  # a file or a pipe gets whole lines
    for line in "\n".join(lines_of(result)).split("\n"):
        for part in wrapped(line, width):
            print_text(part)
    # Whole, so that it can be copied: neither wrapped nor indented.
    for row in result.get("bisect", []):
        if row["script"]:
            print_text(f"\n# ---- {row['script']}\n{row['text']}")
    print_text(f"page: {out / PAGE}")
    at_fault = any(row["module"] for row in result.get("bisect", []))
    return 1 if at_fault or result.get("breaks", {}).get("rows") else 0
