"""Go from the flags to explain.json, explain.html and the scripts beside them."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from labs.explain.bisect import QUESTIONS, BisectAnswer, bisect
from labs.explain.breaks import breaks_of
from labs.explain.flags import report_dir
from labs.explain.kernels import kernels_of
from labs.explain.labs import labs
from labs.explain.page import render_page
from labs.explain.private import quiet_profiler
from labs.explain.reproduce import reproduce
from labs.explain.subject import Subject, of_recipe
from labs.explain.user_file import of_file
from labs.explain.words import lines_of, wrapped
from sftkit.config.schema import Config
from sftkit.config.terminal import print_text, visible
from sftkit.rundir.files import replace_shared
from sftkit.runtime import start as runtime
from sftkit.runtime.hardware import device_name
from sftkit.runtime.progress import working
from sftkit.runtime.start import quiet_libraries, start_device
from sftkit.runtime.vectors import name_vector_width

DATA, PAGE = "explain.json", "explain.html"


def run_explain(args: Namespace, cfg: Config | None) -> int:
    """Do what the flags ask for, and return the exit code: 1 where a graph breaks or a module is found guilty.

    Args:
        cfg: the recipe; None: what is looked at has none.

    Raises:
        ConfigError: what is wrong with the file or the model.
    """
    out = report_dir(args)
    quiet_profiler()
    # Before anything is compiled: the width is in the keys of compiled code only once it is named.
    name_vector_width()
    if args.labs:
        quiet_libraries()
        device = start_device()
        return _finish(_facts("Labs of the compiler", device) | {"labs": labs(device, out)}, out)
    with subject_of(args, cfg) as subject:
        out.mkdir(parents=True, exist_ok=True)
        device = next((p.device for p in subject.module.parameters()), torch.device("cpu"))
        shapes = [call.shape for call in (subject.call, subject.other) if call]
        result = _facts(subject.name, device) | {"beside": subject.beside, "shapes": shapes}
        with working("capturing graphs"):
            result["breaks"] = breaks_of(subject)
        if args.bisect:
            result["bisect"] = _bisected(subject, cfg.compile.backend if cfg else "inductor", out)
        if args.kernels:
            result["kernels"] = kernels_of(subject, cfg.compile if cfg else None, out)
    return _finish(result, out)


@contextmanager
def subject_of(args: Namespace, cfg: Config | None) -> Iterator[Subject]:
    """Yield the subject that the words name."""
    if cfg is None:
        quiet_libraries()
        yield of_file(args.subject, start_device())
        return
    with closing(runtime.start(cfg.run, cfg.train)) as rt:
        yield of_recipe(cfg, args.layers, rt, of_encoder=args.encoder)


def _facts(name: str, device: torch.device) -> dict[str, Any]:
    """Return what was looked at, and on what."""
    return {"name": name, "device": device_name(device), "torch": torch.__version__}


def _bisected(subject: Subject, backend: str, out: Path) -> list[dict[str, Any]]:
    """Return the section on the smallest modules at fault; differences are looked for with the recipe's backend, all
    else without generated code."""
    rows = []
    # Where no other shape is known nothing can be asked about one.
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
