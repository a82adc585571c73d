"""README.md beside an exported model: a Hugging Face model card from the run's files."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sftkit.models.files import CAPTIONS, TEXT_TO_TEXT
from sftkit.reports.collect import EVALUATION_COLUMNS, is_part, latest_evaluations
from sftkit.reports.components import columns, value_text
from sftkit.reports.details import SOURCES
from sftkit.reports.values import (
    NONE,
    Report,
    Rows,
    applies,
    dicts,
    drawable_number,
    duration,
    format_interval,
    format_value,
    mapping,
    parameters,
    passed,
)
from sftkit.rundir.names import DOES_NOT_APPLY

PIPELINES = {CAPTIONS: "image-to-text", TEXT_TO_TEXT: "text2text-generation"}
"Name of a model's auto class -> the hub's name of its task; any other model generates text."
_WORDS = {True: "PASS", False: "**FAIL**", None: "not checked"}


LICENCE = ("license", "license_name", "license_link")
"Keys of the header that the user owns: a card that is written again keeps them."


def licence(card: Path) -> dict[str, str]:
    """Return what the header of an earlier card says of the licence; empty without one that can be read."""
    try:
        # Of the header alone; the rest of the card may hold lines of dashes too.
        _, header, _ = card.read_text(encoding="utf-8").split("---\n", 2)
        found = mapping(yaml.safe_load(header))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return {key: found[key] for key in LICENCE if isinstance(found.get(key), str)}


def model_card(report: Report, kept: Mapping[str, Any]) -> str:
    """Return the card: a header that the hub reads, then what, how, data, settings, checks, results and environment.

    Args:
        kept: what `licence` has read from the card that this one replaces.
    """
    usage = _use(report["run"]["auto_class"], drawable_number(report["preflight"].get("max_length")))
    found = [section(report) for section in (_training, _data, _settings, _proof, _results, _environment)]
    parts = [f"# {md(report['run']['name'])}", _what(report), usage, *found, _licence(kept)]
    return f"---\n{_header(report, kept)}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _licence(kept: Mapping[str, str]) -> str:
    """Return the section on the licence."""
    if kept:
        return "## Licence\n\n" + ", ".join(code(text) for text in kept.values())
    return (
        "## Licence\n\nNone is stated here. The licences of the base model and of the training data apply; "
        "state yours as `license:` in the header of this file, which a later report keeps."
    )


def _header(report: Report, kept: Mapping[str, Any]) -> str:
    """Return the YAML header, with the results that the hub shows."""
    from huggingface_hub import EvalResult, ModelCardData

    # Only characters that a repository on the hub may have in its name.
    name = re.sub(r"[^\w.-]+", "-", report["run"]["name"])
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=row["task"],
            metric_type=row["metric"],
            metric_value=row["value"],
            metric_name=row["metric"],
        )
        for row in _scores(report)
        if not is_part(row) and row["task"] != "centred_mean"  # the mean is no dataset
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINES.get(report["run"]["auto_class"], "text-generation"),
        base_model=report["run"]["base_model"],
        datasets=report["run"]["datasets"] or None,
        tags=["sftkit"],
        # ModelCardData refuses results without a name, and a name without results says nothing.
        model_name=name if results else None,
        eval_results=results or None,
        **kept,
    )
    return data.to_yaml().strip()


def _scores(report: Report) -> Rows:
    """Return the values of the final evaluation; without one, the newest of each task."""
    return [row for row in latest_evaluations(report["final"] or report["evaluations"]) if row["value"] is not None]


def md(value: Any) -> str:
    """Escape text of any origin for a line or a table cell of Markdown: nothing in it is markup."""
    # HTML first, then Markdown: both are markup in a card.
    text = html.escape(" ".join(value_text(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)


def code(value: Any) -> str:
    """Return a setting as code in a table cell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<code>{md(text)}</code>"


def block(text: str) -> str:
    """Return text in a fence that is longer than any in it."""
    # A fence ends at the first one as long as itself.
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
    return f"{fence}\n{text}\n{fence}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a Markdown table of cells that are Markdown already; `right`: indices of right-aligned columns."""
    marks = ["---:" if index in right else "---" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(head), marks, *rows])


def _what(report: Report) -> str:
    """Return the first sentence: what the model is, and what it starts from."""
    run = report["run"]
    size = f" with {parameters(run['parameters'])} parameters" if run["parameters"] else ""
    named = md(run["model"] or "a model that its settings do not name")
    start = f"`{run['base_model']}`" if run["base_model"] else named
    return f"A language model{size}, trained with sftkit. It starts from {start}."


def _use(auto_class: str | None, max_length: float | None = None) -> str:
    """Return the section with the code that loads the model.

    Args:
        auto_class: the class of transformers that loads it; None: unknown, so there is no such section.
        max_length: the most positions of a caption; without a limit transformers writes 20 tokens.
    """
    if auto_class is None:
        return ""
    pictures = auto_class == CAPTIONS
    limit = f", max_new_tokens={max_length:.0f}" if max_length else ""
    lines = (
        *["from PIL import Image"] * pictures,
        f"from transformers import {auto_class}{', AutoImageProcessor' * pictures}, AutoTokenizer",
        "",
        'path = "."  # this folder, or its id on the hub',
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        *["processor = AutoImageProcessor.from_pretrained(path)  # needs torchvision"] * pictures,
        f"model = {auto_class}.from_pretrained(path)",
        *['pixels = processor(Image.open("picture.png").convert("RGB"), return_tensors="pt").pixel_values'] * pictures,
        *[f"print(tokenizer.decode(model.generate(pixels{limit})[0], skip_special_tokens=True))"] * pictures,
    )
    return "## Use\n\n```python\n" + "\n".join(lines) + "\n```"


def _training(report: Report) -> str:
    """Return the section on steps, time and speed, with the command."""
    status, summary = report["status"], report["summary"]
    steps = format_value(drawable_number(status.get("step")))
    rows = [["status", md(status.get("status"))], ["optimizer steps", steps]]
    sums = (("tokens", "tokens", format_value), ("time in steps", "train_seconds", duration))
    rows += [[name, words(summary[key])] for name, key, words in sums if drawable_number(summary.get(key))]
    rows += [[f"{row['name']} ({row['how']})", row["text"]] for row in report["headline"] if row["value"] is not None]
    command = f"\n\n{block(report['command'])}" if report["command"] else ""
    return f"## Training\n\n{grid(['', ''], rows, right=(1,))}{command}"


def _data(report: Report) -> str | None:
    """Return the section on the sources; None where they are unknown."""
    # Of what preflight has found where there is one, as it counts; else of the recipe, which names the sources.
    found = dicts(report["preflight"].get("sources"))
    if found:
        head, cells = columns(found, SOURCES)
        rows = [[md(value) for value in row] for row in cells]
        return _table("Training data", head, rows, right=range(1, len(head)))
    sources = dicts(mapping(report["config"].get("data")).get("train"))
    rows = [[code(source.get("path")), md(source.get("split"))] for source in sources]
    return _table("Training data", ["source", "split"], rows)


def _settings(report: Report) -> str | None:
    """Return the section on settings that differ from the defaults; None without any."""
    rows = [[code(row["key"]), code(row["value"]), code(row["default"])] for row in report["config_changed"]]
    return _table("Settings\n\nWhat differs from the defaults.", ["setting", "value", "default"], rows)


def _proof(report: Report) -> str | None:
    """Return the section on the run's checks of itself; None without any."""
    keys = ("name", "found", "expected")
    rows = [
        [_WORDS[passed(row)] if applies(row) else DOES_NOT_APPLY, *(md(row.get(key)) for key in keys)]
        for row in report["proof"]
    ]
    return _table("Checks that the run made of itself", ["", "check", "found", "expected"], rows)


def _results(report: Report) -> str | None:
    """Return the section on evaluations; None without any."""
    rows = []
    for row in _scores(report):
        value, *others = (format_value(row[key]) for key in ("value", "chance", "examples", "step"))
        rows.append([md(row["task"]), md(row["metric"]), value, format_interval(row) or NONE, *others])
    return _table("Results", EVALUATION_COLUMNS, rows, right=range(2, 7))


def _environment(report: Report) -> str | None:
    """Return the section on machine and packages; None where it is unknown."""
    found = report["environment"]
    flat = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
    rows = [[md(key.replace("_", " ")), md(value)] for key, value in (flat | mapping(found.get("packages"))).items()]
    return _table("Environment", ["", ""], rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str | None:
    """Return a section that is a table; None without rows."""
    return f"## {title}\n\n{grid(head, rows, right)}" if rows else None
