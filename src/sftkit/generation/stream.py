"""The model side of scripts/chat.py: the lines before a conversation, and one answer as a stream of text."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextIteratorStreamer

from sftkit.data.tokens import chat
from sftkit.data.tokens.template import template_of
from sftkit.data.types import Row
from sftkit.generation.repl import Sampling
from sftkit.models.load import stop_ids
from sftkit.models.structure import quiet_routers
from sftkit.rundir.names import RECIPE

_SHOWN = ("arithmetic", "calendar", "pick")
"Number of task families with an example question."


def introduction(path: str, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, newest: bool) -> str:
    """Return the lines printed before a conversation.

    Args:
        path: folder or hub id.
        newest: whether the path was not given and is that of the newest run.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    template = template_of(tokenizer)
    size = orig_model.num_parameters() / 1e6
    about = f"{type(orig_model).__name__} of {size:,.1f} million parameters on {orig_model.device.type}"
    lines = [f"{path}{', the newest run,' if newest else ''} answers: {about}"]
    if questions := learned_questions(Path(path)):
        lines += [
            "The model was trained on small tasks, each in a few wordings. Similar questions, which were not in "
            "training:"
        ]
        lines += [f"  {line}" for question in questions for line in question.replace("\n", "\\\n").split("\n")]
    if argument := template.thinking_argument:
        lines += [f"Thinking: --template-arg {argument}=false turns it off, --template-arg {argument}=true on"]
    return "\n".join([*lines, "/help lists the commands; exit or Ctrl-D ends"])


def learned_questions(folder: Path) -> list[str]:
    """Return held-out questions of three built-in task families, if the run that wrote this folder trained on them."""
    try:
        recipe = yaml.safe_load((folder / RECIPE).read_text())
    except OSError:
        return []
    if "builtin:tasks" not in [source["path"] for source in recipe["data"]["train"]]:
        return []
    from sftkit.data.demo import builtin

    alone = {task.family: task.messages for task in builtin.tasks("heldout") if len(task.messages) == 2}
    return [alone[family][0]["content"] for family in _SHOWN]


def stream(
    orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], sampling: Sampling
) -> Iterator[str]:
    """Yield one answer in parts as it is decoded. Closing the generator early waits for the token being computed."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    prompt = torch.tensor([chat.render_prompt(Row("prompt", messages=messages), tokenizer)], device=orig_model.device)
    # transformers' generate runs in a thread and passes its text through the streamer. `closed` ends it early; its
    # exceptions are raised again here.
    closed = Event()
    failure: list[Exception] = []
    # transformers' default top_k is 50: only the requested settings should apply
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    orig_model.eval()
    decode: Any = orig_model.generate

    def work() -> None:
        stopping = [lambda ids, *_, **__: torch.full((len(ids),), closed.is_set(), device=ids.device)]
        try:
            with quiet_routers(orig_model):
                decode(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=sampling.max_new_tokens,
                    eos_token_id=stop_ids(orig_model, tokenizer),
                    pad_token_id=tokenizer.pad_token_id,
                    streamer=streamer,
                    stopping_criteria=stopping,
                    **(drawn if sampling.temperature > 0 else {"do_sample": False}),
                )
        except Exception as error:
            failure.append(error)
        finally:
            # The reader of the stream would wait for more text.
            streamer.end()

    worker = Thread(target=work, daemon=True)
    worker.start()
    try:
        yield from streamer
    finally:
        closed.set()
        worker.join()
    if failure:
        raise failure[0]
