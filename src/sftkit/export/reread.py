"""What a model answers to a few prompts, and the comparison of an exported folder with it, in a separate process with
nothing but transformers: the folder is read as a stranger reads it.

python -m sftkit.export.reread FOLDER ANSWERS DEVICE     ANSWERS: the file of `write_answers`; prints a JSON object
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from sftkit.config.terminal import print_text
from sftkit.models.files import auto_class_in
from sftkit.rundir.names import ADAPTER_CONFIG

QUESTIONS = (
    "What day comes after Monday?",
    "Say hello in French.",
    "What is 12 + 30?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "def add(a, b):",
    "Translate into German: good morning",
    "List the first five prime numbers.",
)
ANSWER_TOKENS = 24
"Length of an answer: at most."


class Spoken(NamedTuple):
    """What a model says to a prompt."""

    prompt: Tensor
    "int64 [T], the tokens of the prompt in the chat template"
    logits: Tensor
    "fp32 [vocabulary], of the token that follows"
    tokens: Tensor
    "int64, the greedy continuation"


@torch.no_grad()
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Spoken]:
    """Return the greedy answers to QUESTIONS, each as a user's message if there is a chat template."""
    found = []
    given: Any
    for text in QUESTIONS:
        if tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            made: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")
            given = made["input_ids"]
        else:
            given = tokenizer(text, return_tensors="pt")["input_ids"]
        given = given.to(model.device)
        logits = model(input_ids=given, use_cache=False).logits[0, -1]
        generated: Any = model.generate(  # type: ignore[operator]
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        found.append(Spoken(given[0].cpu(), logits.float().cpu(), generated[0, given.shape[1] :].cpu()))
    return found


def write_answers(found: Sequence[Spoken], path: Path) -> None:
    """Write answers to a file."""
    tensors = {f"{i}.{name}": value for i, one in enumerate(found) for name, value in one._asdict().items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)


def compare_answers(found: Sequence[Spoken], path: Path) -> dict[str, Any]:
    """Compare answers with those of a file.

    Returns:
        prompts: how many. same_prompts: whether all have the same tokens. same_answers: how many are equal.
        logits: the largest difference of two logits over the largest logit.
    """
    same = 0
    tokens = True
    changes = []
    with safe_open(path, "pt") as file:
        for i, one in enumerate(found):
            own = Spoken(*(file.get_tensor(f"{i}.{name}") for name in Spoken._fields))
            tokens &= torch.equal(one.prompt, own.prompt)
            same += torch.equal(one.tokens, own.tokens)
            # A vocabulary that was padded is as long in the folder.
            changes.append((one.logits - own.logits).abs().max() / own.logits.abs().max())
    difference = float(torch.stack(changes).max())  # Python's max would leave out NaN
    return {"prompts": len(found), "same_prompts": tokens, "same_answers": same, "logits": difference}


def main() -> None:
    """Load the folder that the command line names, and print what `compare_answers` returns."""
    folder, path, device = sys.argv[1:]
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Path(folder, ADAPTER_CONFIG)
    opened: Any = getattr(transformers, auto_class_in(Path(folder)))
    if config.is_file() and json.loads(config.read_text()).get("trainable_token_indices"):
        from peft import AutoPeftModelForCausalLM as opened  # makes room for the tokens in the model
    model = opened.from_pretrained(folder)
    model.to(device).eval()
    print_text(json.dumps({"class": type(model).__name__, **compare_answers(answers(model, tokenizer), Path(path))}))


if __name__ == "__main__":
    main()
