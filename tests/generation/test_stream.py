"""One answer as a stream, and what is said before a conversation."""

from __future__ import annotations

import json
import threading
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from sftkit.config.schema import ModelConfig
from sftkit.data.tokens import chat
from sftkit.data.types import Row
from sftkit.errors import ConfigError
from sftkit.generation.decode import introduction, stream, text_of
from sftkit.generation.repl import Sampling
from sftkit.models.tokenizer import set_template_arguments

HI = [{"role": "user", "content": "Hi?"}]


@pytest.fixture
def model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=None, **sizes))
    made.lm_head.weight.data.mul_(50)  # so that some tokens are likely
    return made


def test_top_p_samples_from_the_likeliest_tokens_alone(model, tokenizer) -> None:
    def said(*sampling: float) -> str:
        torch.manual_seed(1)
        return "".join(stream(model, tokenizer, HI, Sampling(*sampling, max_new_tokens=12)))

    greedy = said()
    assert said(5.0, 1e-6) == greedy
    assert said(5.0) != greedy
    drawn: dict = {}
    generate = model.generate
    model.generate = lambda **arguments: drawn.update(arguments) or generate(**arguments)
    said(0.5, 0.9)
    assert (drawn["temperature"], drawn["top_p"], drawn["top_k"], drawn["do_sample"]) == (0.5, 0.9, 0, True)


def test_an_answer_in_channels_is_shown_as_others_are_and_asked_about_without_its_analysis(make_tokenizer) -> None:
    tokenizer = make_tokenizer("gpt_oss", eos="<|im_end|>")
    marks = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    said = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>So. <b>"
    call = '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"a": 1}'
    for text, shown in (
        (said, "<think>\nI think.\n</think>\n\nSo. <b>"),
        ("<|channel|>final<|message|>42<|return|>", "42"),
        (call, '<think>\nHm.\n</think>\n\n to=functions.look{"a": 1}'),
        ("<|channel|>analysis<|message|>I th", "<think>\nI th"),
    ):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert text_of(tokens, tokenizer) == shown
        parts = [text_of(tokens[:n], tokenizer) for n in range(len(tokens) + 1)]
        assert all(shown.startswith(part) for part in parts), "nothing that is shown is taken back"
    answered = [*HI, {"role": "assistant", "content": text_of(tokenizer.encode(said), tokenizer)}, *HI]
    prompt = chat.prompt_text(Row("x", messages=answered), tokenizer)
    assert prompt.endswith(
        "<|start|>assistant<|channel|>final<|message|>So. <b><|end|><|start|>user<|message|>Hi?<|end|><|start|>assistant"
    )


def test_an_answer_that_is_closed_is_not_decoded_to_its_end(model, tokenizer) -> None:
    before = set(threading.enumerate())
    pieces = stream(model, tokenizer, HI, Sampling(max_new_tokens=100_000))
    assert list(islice((piece for piece in pieces if piece), 1))
    pieces.close()
    assert set(threading.enumerate()) == before


def test_a_failure_while_decoding_reaches_the_caller(model, tokenizer) -> None:
    model.generate = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(stream(model, tokenizer, HI, Sampling()))


def evaluated(folder: Path, marks: dict[str, float]) -> None:
    """An evaluation of a step: a question of one message of each family, and one that follows an answer."""
    folder.mkdir(parents=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"a question\nof {family}"}],
            "marks": {"acc": mark},
            "source": {"family": family},
        }
        for family, mark in marks.items()
    ]
    turns = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]
    rows.append({"prompt": turns, "marks": {"acc": 1.0}, "source": {"family": "turns"}})
    (folder / "families.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_introduction_shows_held_out_questions_that_this_checkpoint_answered_right(
    tmp_path: Path, tokenizer
) -> None:
    step, orig_model = tmp_path / "step-000020", tiny_llama()
    evaluated(tmp_path / "evals" / "step-000010", dict.fromkeys("abc", 1.0))
    evaluated(tmp_path / "evals" / "step-000020", {"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0, "e": 1.0, "f": 1.0})
    told = introduction(str(step), orig_model, tokenizer, newest=True).splitlines()
    assert told[0] == f"{step}, the newest run, answers: LlamaForCausalLM of 0.0 million parameters on cpu"
    shown = [line for family in "bde" for line in ("  a question\\", f"  of {family}")]
    assert told[1:-1] == ["Questions that were not in training and that this checkpoint answered right:", *shown]
    assert told[-1].startswith("/help")


def test_a_checkpoint_that_answered_nothing_right_gets_no_questions_and_the_reason(tmp_path: Path, tokenizer) -> None:
    evaluated(tmp_path / "evals" / "step-000020", dict.fromkeys("abc", 0.0))
    told = introduction(str(tmp_path / "step-000020"), tiny_llama(), tokenizer, newest=False).splitlines()
    assert told[1] == "It answered none of 3 held-out questions right, so expect no right answers here"
    for other in (tmp_path / "step-000010", Path("some/hub-id")):
        assert len(introduction(str(other), tiny_llama(), tokenizer, newest=False).splitlines()) == 2


def test_template_arguments_of_thinking_are_named_and_taken(tokenizer) -> None:
    tokenizer.chat_template = (Path(__file__).parents[1] / "golden" / "qwen3.jinja").read_text()
    told = introduction("some/hub-id", tiny_llama(), tokenizer, newest=False)
    assert "Thinking: --template-arg enable_thinking=false turns it off" in told
    set_template_arguments(tokenizer, ModelConfig(path="x", chat_template_args={"enable_thinking": False}))
    ids = tokenizer.apply_chat_template(HI, add_generation_prompt=True, tokenize=False)
    assert ids.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="the chat template has no thinking_enabled in it"):
        set_template_arguments(tokenizer, ModelConfig(path="x", chat_template_args={"thinking_enabled": False}))
