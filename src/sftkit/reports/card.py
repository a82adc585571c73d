"""README.md next to an exported model: a Hugging Face model card from the run's files."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sftkit.models.files import CAPTIONS, TEXT_TO_TEXT
from sftkit.reports import values
from sftkit.reports.collect import EVALUATION_COLUMNS, is_part, latest_evaluations
from sftkit.reports.details import SOURCES
from sftkit.reports.values import NONE, Report, Rows, columns, dicts, drawable_number, format_value, mapping, templates
from sftkit.rundir.names import DOES_NOT_APPLY

PIPELINES = {CAPTIONS: "image-to-text", TEXT_TO_TEXT: "text2text-generation"}
"Name of a model's auto class -> the hub's name of its task; any other model generates text."
_WORDS = {True: "PASS", False: "**FAIL**", None: "not checked"}


LICENCE = ("license", "license_name", "license_link")
"Keys of the header that the user owns: a card that is written again keeps them."


def licence(card: Path) -> dict[str, str]:
    """Return the licence in the header of an earlier card; empty without a header that can be read."""
    try:
        # Only the header counts: the rest of the card may hold lines of dashes too.
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
    status = report["status"]
    summary = report["summary"]
    training = [["status", md(status.get("status"))]]
    training.append(["optimizer steps", format_value(drawable_number(status.get("step")))])
    sums = (("tokens", "tokens", format_value), ("time in steps", "train_seconds", values.duration))
    training += [[name, words(summary[key])] for name, key, words in sums if drawable_number(summary.get(key))]
    known = [row for row in report["headline"] if row["value"] is not None]
    training += [[f"{row['name']} ({row['how']})", row["text"]] for row in known]
    # The sources of preflight.json, which have counts; without that file, those of the recipe.
    rows = dicts(report["preflight"].get("sources"))
    head, cells = columns([row | {"licence": row.get("licence") or "unknown"} for row in rows], (*SOURCES, "licence"))
    data = (head, [[md(value) for value in row] for row in cells], range(1, len(head) - 1))
    if not cells:
        sources = dicts(mapping(report["config"].get("data")).get("train"))
        data = (["source", "split"], [[code(one.get("path")), md(one.get("split"))] for one in sources], range(0))
    checks = [
        [_WORDS[values.passed(row)] if values.applies(row) else DOES_NOT_APPLY]
        + [md(row.get(key)) for key in ("name", "found", "expected")]
        for row in report["proof"]
    ]
    results = []
    for row in _scores(report):
        value, *others = (format_value(row[key]) for key in ("value", "chance", "examples", "step"))
        results.append([md(row["task"]), md(row["metric"]), value, values.format_interval(row) or NONE, *others])
    found = report["environment"]
    flat = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
    machine = flat | mapping(found.get("packages"))
    return template.render(
        report=report,
        start=[[name, code(value) if value else "unknown"] for name, value in _start(report)],
        kept=kept,
        header=_header(report, kept),
        limit=drawable_number(report["preflight"].get("max_length")),
        captions=CAPTIONS,
        seq2seq=TEXT_TO_TEXT,
        training=training,
        data=data,
        settings=[[code(row[key]) for key in ("key", "value", "default")] for row in report["config_changed"]],
        checks=checks,
        columns=EVALUATION_COLUMNS,
        results=results,
        environment=[[md(key.replace("_", " ")), md(value)] for key, value in machine.items()],
    )


def _start(report: Report) -> list[tuple[str, str | None]]:
    """Return what the model was trained from, as far as a stranger could get the same; None: unknown."""
    run = report["run"]
    start, base = run["start"], run["adapter_base"]
    if run["model"] is None and not start:
        return []
    local = base.get("path") if base.get("path") != run["base_model"] else None
    model, origin = run["base_model"] or run["model"] or start.get("model"), start.get("model")
    found = [("model", model), *([("original model", origin)] if origin and origin != model else [])]
    found.append(("commit", start.get("revision") or (None if local else base.get("revision"))))
    found.append(("licence", start.get("licence")))
    if base:
        found.append(("sha256 of the weights under the adapter", base.get("sha256")))
    if local:
        found.append(("where they were on the machine that trained", local))
    return found


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
    is_adapter = bool(report["run"]["adapter"] or report["run"]["adapters"])
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="image-text-to-text"
        if report["run"].get("unchanged_parameters")
        else PIPELINES.get(report["run"]["auto_class"], "text-generation"),
        base_model=report["run"]["base_model"],
        base_model_relation=("adapter" if is_adapter else "finetune") if report["run"]["base_model"] else None,
        datasets=report["run"]["datasets"] or None,
        tags=["sftkit"],
        # ModelCardData rejects results without a name, and a name without results says nothing.
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
    text = html.escape(" ".join(values.value_text(value).split()), quote=False)
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


templates.filters |= {"md": md, "code": code, "block": block, "size": values.parameters}
template = templates.get_template("card.md.jinja")
