"""The lines before a conversation: which model answers, what it has learned, how to ask it."""

from __future__ import annotations

from pathlib import Path

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.demo import builtin
from sftkit.data.tokens.template import template_of
from sftkit.rundir.names import RECIPE

_SHOWN = ("arithmetic", "calendar", "pick")
"Families of which a question is shown."


def introduction(path: str, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, newest: bool) -> str:
    """Return the lines that are printed before a conversation.

    Args:
        path: a folder, or a hub id.
        newest: the path was not given; it is that of the newest run.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    template = template_of(tokenizer)
    size, device = orig_model.num_parameters(), orig_model.device
    about = f"{type(orig_model).__name__} of {size / 1e6:,.1f} million parameters on {device.type}"
    lines = [f"{path}{', the newest run,' if newest else ''} answers: {about}"]
    if questions := learned_questions(Path(path)):
        lines += [
            "Small tasks are among what it has learned, each in a few wordings. Questions of this kind, which were not "
            "in training:"
        ]
        lines += [f"  {line}" for question in questions for line in question.replace("\n", "\\\n").split("\n")]
    if argument := template.thinking_argument:
        lines += [f"Thinking: --template-arg {argument}=false turns it off, --template-arg {argument}=true on"]
    return "\n".join([*lines, "/help lists the commands; exit or Ctrl-D ends"])


def learned_questions(folder: Path) -> list[str]:
    """Return held-out questions of three of the built-in task families, if the run that wrote this
    folder has trained on them."""
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text())
    except OSError:
        return []
    if "builtin:tasks" not in [source["path"] for source in recipe["data"]["train"]]:
        return []
    alone = {task.family: task.messages for task in builtin.tasks("heldout") if len(task.messages) == 2}
    return [alone[family][0]["content"] for family in _SHOWN]
