"""Log-likelihoods of continuations: how they are tokenized, what they equal, what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import tiny_llama
from made_models import passes, tiny_gemma2
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sftkit.errors import DataError
from sftkit.evals import scoring
from sftkit.evals.results import Choices
from sftkit.evals.scoring import encode_continuation, score
from sftkit.generation import decode
from sftkit.generation.decode import Batching
from sftkit.models.structure import output_projection


def choices(prompt, *continuations: str, group: str = "", id: str = "x") -> Choices:
    return Choices(id, prompt, continuations, (0,), tuple(map(len, continuations)), group)


@pytest.fixture
def model(tokenizer) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=256, num_key_value_heads=2, **sizes, initializer_range=0.5
    )
    return LlamaForCausalLM(config).eval()


SHOTS = "Question: How many days are in a week?\nAnswer: seven\n\nQuestion: What is the capital?\nAnswer: Paris\n\n"


def examples() -> list[Choices]:
    words = ["the shore", "a week of days", "France", "sea shells and one two", "a user", "python", "Berlin", "turns"]
    return [
        choices(
            f"{SHOTS[20 * (i // 4) :]}Question: What is {word}?\nAnswer:",
            " seven",
            " Paris",
            " the sea shore",
            " A",
            group=str(i // 4),
        )
        for i, word in enumerate(words)
    ]


def one_by_one(model: PreTrainedModel, context: np.ndarray, continuation: np.ndarray) -> tuple[float, bool]:
    """From the whole logits of one sequence."""
    ids = torch.tensor(np.concatenate([context, continuation])[:-1].tolist())
    with torch.no_grad():
        log_probs = model(ids[None], use_cache=False).logits[0, -len(continuation) :].float().log_softmax(-1)
    tokens = torch.tensor(continuation.tolist())
    return float(log_probs.gather(1, tokens[:, None]).sum()), bool((log_probs.argmax(-1) == tokens).all())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_scores_equal_those_one_by_one_whatever_the_batch(tokenizer, model, name: str) -> None:
    if name == "gemma2":
        model = tiny_gemma2()
        model.resize_token_embeddings(len(tokenizer))
    asked = examples()
    expected = [[one_by_one(model, *pair) for pair in pairs] for pairs in encode_continuation(asked, tokenizer)]
    for batch_size in (1, 3, 8, 64):
        found = score(model, tokenizer, asked, Batching(batch_size))
        for given, wanted in zip(found, expected, strict=True):
            assert given.sums == pytest.approx([value for value, _ in wanted], abs=1e-4)
            assert list(given.greedy) == [greedy for _, greedy in wanted]
            assert np.argmax(given.sums) == np.argmax([value for value, _ in wanted])


def test_the_text_of_a_group_is_computed_once_and_logits_exist_only_where_they_are_asked_for(tokenizer, model) -> None:
    asked = examples()
    projected: list[int] = []
    hook = output_projection(model).register_forward_hook(
        lambda _, __, logits: projected.append(logits.numel() // len(tokenizer))
    )
    with passes(model) as seen:
        score(model, tokenizer, asked, Batching(64))
    hook.remove()
    assert [rows for rows, _ in seen][::2] == [1, 1]
    assert all(positions >= len(tokenizer(SHOTS[20:])["input_ids"]) for _, positions in seen[::2])
    assert all(positions < 30 for _, positions in seen[1::2])
    # Both prefix passes project one position, the others what is asked for, less what inputs have in common.
    lengths = [len(k) for pairs in encode_continuation(asked, tokenizer) for _, k in pairs]
    assert sum(projected[1::2]) <= sum(lengths)
    assert projected[::2] == [1, 1]


def test_continuations_of_one_token_share_a_row(tokenizer, model) -> None:
    letters = [choices(f"Is it {word}? The letter is", "A", "B", "C", "D") for word in ("one", "two", "three")]
    assert all(len(k) == 1 for pairs in encode_continuation(letters, tokenizer) for _, k in pairs)
    with passes(model) as seen:
        found = score(model, tokenizer, letters)
    assert [rows for rows, _ in seen] == [3]
    for given, pairs in zip(found, encode_continuation(letters, tokenizer), strict=True):
        assert given.sums == pytest.approx([one_by_one(model, *pair)[0] for pair in pairs], abs=1e-4)


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation(tokenizer) -> None:
    (spaced,), (plain,) = encode_continuation(
        [choices("The capital of ", "France"), choices("The capital of", " France")], tokenizer
    )
    for a, b in zip(spaced, plain, strict=True):
        assert a.tolist() == b.tolist()
    assert tokenizer.decode(spaced[0]) == "The capital of"
    assert np.concatenate(spaced).tolist() == tokenizer("The capital of France")["input_ids"]


def test_a_tokenizer_that_adds_a_bos_adds_it_once_and_an_empty_context_is_the_bos(make_tokenizer) -> None:
    tokenizer = make_tokenizer("chatml", bos="<|begin_of_text|>", adds_bos=True)
    bos = tokenizer.bos_token_id
    texts = ("seven days", "<|begin_of_text|>seven days", "")
    encoded = encode_continuation([choices(text, " in a week") for text in texts], tokenizer)
    for ((context, _),) in encoded:
        assert context.tolist().count(bos) == 1
        assert context[0] == bos
    ((context, continuation),) = encoded[2]
    assert context.tolist() == [bos]
    assert tokenizer.decode(continuation) == " in a week"


def test_without_a_bos_an_empty_context_is_the_end_of_the_sequence(tokenizer) -> None:
    (((context, continuation),),) = [encode_continuation([choices("", "seven days")], tokenizer)[0]]
    assert context.tolist() == [tokenizer.eos_token_id]
    assert tokenizer.decode(continuation) == "seven days"


def test_a_conversation_is_continued_after_the_assistants_header(tokenizer) -> None:
    ((context, continuation),) = encode_continuation(
        [choices([{"role": "user", "content": "A or B?"}], "A")], tokenizer
    )[0:1][0]
    assert tokenizer.decode(context) == "<|im_start|>user\nA or B?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(continuation) == "A"


def test_a_context_that_is_too_long_loses_its_beginning(tokenizer, model) -> None:
    long = choices("seven days " * 200 + "in a", " week")
    ((context, continuation),) = encode_continuation([long], tokenizer)[0:1][0]
    room = model.config.max_position_embeddings + 1 - len(continuation)
    assert len(context) > room
    expected = one_by_one(model, context[-room:], continuation)[0]
    assert score(model, tokenizer, [long])[0].sums[0] == pytest.approx(expected, abs=1e-4)


def test_a_continuation_without_tokens_is_refused_by_name(tokenizer) -> None:
    with pytest.raises(DataError, match="question 7: the continuation '' has no tokens"):
        encode_continuation([choices("seven", "", id="question 7")], tokenizer)


def test_batches_are_bounded_by_positions_and_targets(tokenizer, model, monkeypatch) -> None:
    expected = score(model, tokenizer, examples())
    monkeypatch.setattr(decode, "MAX_POSITIONS", 64)
    monkeypatch.setattr(scoring, "MAX_TARGETS", 3)
    with passes(model) as seen:
        found = score(model, tokenizer, examples())
    assert all(rows * positions <= 64 or rows == 1 for rows, positions in seen)
    assert all(rows <= 3 for rows, _ in seen)
    for a, b in zip(found, expected, strict=True):
        assert a.sums == pytest.approx(b.sums, abs=1e-4)


def test_nothing_asked_is_nothing_found(tokenizer) -> None:
    assert score(tiny_llama(), tokenizer, []) == []
