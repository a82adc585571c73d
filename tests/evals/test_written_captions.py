"""Captions that are written in an evaluation: what is compared, and that a model that knows them scores 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, flat
from made_captioners import CAPTIONER, TRANSLATOR, captions, made
from transformers import GenerationConfig, PreTrainedModel

from sftkit.config.schema import EvalConfig
from sftkit.data.tokens import chat
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.evals import scoring as captioned
from sftkit.evals.results import interval, values_of
from sftkit.evals.scoring import evaluate_captions, token_f1
from sftkit.generation import decode, kv_cache
from sftkit.generation.decode import Batching, Decoding
from sftkit.generation.repl import Answer
from sftkit.models.kind import kind_of
from sftkit.ops.attention import plain_attention

TOKENIZER: Any = SimpleNamespace(
    eos_token_id=0, pad_token_id=1, chat_template=None, decode=lambda ids, **_: " ".join(map(str, ids))
)


def with_ends(examples: Examples) -> Examples:
    """Each document ends with eos and has the name of what is encoded for it."""
    tokens = flat(examples)
    ids = np.maximum(tokens.ids, 2)
    ids[tokens.offsets[1:] - 1] = 0
    return replace(
        examples, tokens=replace(tokens, ids=ids), encoder_sources=[f"picture {i}" for i in range(len(examples))]
    )


@pytest.mark.parametrize(
    ("written", "reference", "expected"),
    [([1, 2], [1, 2], 1.0), ([], [], 1.0), ([], [3], 0.0), ([1, 1, 2], [1, 2, 3], 2 / 3), ([2, 1], [1, 2], 1.0)],
)
def test_token_f1_counts_tokens_that_both_have_as_often(
    written: list[int], reference: list[int], expected: float
) -> None:
    assert token_f1(written, reference) == pytest.approx(expected)


def transformers_own(
    orig_model: PreTrainedModel, examples: Examples, max_new_tokens: int, end: int
) -> list[tuple[int, ...]]:
    """What transformers' own greedy generation writes for each document, without first token and end."""
    assert examples.encoder_inputs is not None
    given = {name: torch.from_numpy(array) for name, array in examples.encoder_inputs.arrays.items()}
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, decoder_start_token_id=0, eos_token_id=end, pad_token_id=1
    )
    generate: Any = orig_model.eval().generate
    with plain_attention(orig_model):
        inputs = kind_of(orig_model.config).plain_inputs(orig_model, given)
        found = generate(**inputs, generation_config=settings)[:, 1:].tolist()
    return [tuple(ids[: ids.index(end)] if end in ids else ids) for ids in found]


def lively(fields: dict[str, Any], documents: int) -> tuple[PreTrainedModel, Examples]:
    """A model that writes another text for each document, and those."""
    orig_model = made(fields)
    with torch.no_grad():
        for parameter in orig_model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return orig_model, with_ends(captions(orig_model, [5] * documents))


def describe(
    orig_model: PreTrainedModel,
    tokenizer: Any,
    examples: Examples,
    count: int,
    max_new_tokens: int,
    batch_size: int,
    replay: bool | None = None,
) -> list[Answer]:
    """Texts of at most so many tokens for the first documents."""
    return decode.generate(
        orig_model,
        tokenizer,
        [[orig_model.generation_config.decoder_start_token_id]] * count,
        Batching(batch_size),
        max_new_tokens=max_new_tokens,
        encoder_inputs=examples.encoder_inputs,
        replay=replay,
    )


def ending(end: int) -> Any:
    """A tokenizer with this end."""
    return SimpleNamespace(**{**vars(TOKENIZER), "eos_token_id": end})


@pytest.mark.parametrize("fields", [CAPTIONER, TRANSLATOR], ids=["pictures", "texts"])
def test_greedy_texts_are_those_of_one_pass_at_a_time(fields: dict[str, Any]) -> None:
    orig_model = made(fields)
    examples = with_ends(captions(orig_model, [5, 7, 4]))
    found = describe(orig_model, TOKENIZER, examples, 3, 6, batch_size=2)
    kind = kind_of(orig_model.config)
    assert examples.encoder_inputs is not None
    for document, answer in enumerate(found):
        ids = [0]
        arrays = examples.encoder_inputs.arrays.items()
        inputs = {name: torch.from_numpy(array[document : document + 1]) for name, array in arrays}
        orig_model.eval()
        while len(ids) < 7 and (len(ids) == 1 or ids[-1] != 0):
            with torch.no_grad():
                logits = kind.plain_logits(orig_model, {"input_ids": torch.tensor([ids]), **inputs})
            ids.append(int(logits[0, -1].argmax()))
        assert answer.ids == tuple(ids[1:-1] if ids[-1] == 0 else ids[1:])


def often_an_end(texts: list[tuple[int, ...]]) -> int:
    """The token at which most different numbers of tokens come from ending these texts, no two of which become equal."""

    def lengths(end: int) -> int:
        ended = [text[: text.index(end)] if end in text else text for text in texts]
        return len({len(text) for text in ended}) if len(set(ended)) == len(texts) else 0

    # Which tokens a model of random weights writes is another matter in each version of torch.
    return max({token for text in texts for token in text}, key=lengths)


@pytest.mark.parametrize(
    ("fields", "replay"),
    [(CAPTIONER, False), (CAPTIONER, True), (TRANSLATOR, False)],
    ids=["pictures", "pictures, replayed", "texts"],
)
def test_greedy_texts_are_those_of_transformers_while_rows_end_and_leave_the_batch(
    fields: dict[str, Any], replay: bool
) -> None:
    orig_model, examples = lively(fields, documents=12)
    end = often_an_end(transformers_own(orig_model, examples, 16, end=10**6))
    expected = transformers_own(orig_model, examples, 16, end)
    assert len({len(ids) for ids in expected}) > 4
    assert len(set(expected)) == 12
    for batch_size in (5, 12):
        found = describe(orig_model, ending(end), examples, 12, 16, batch_size, replay=replay)
        assert [answer.ids for answer in found] == expected
        assert [answer.stop for answer in found] == ["length" if len(ids) == 16 else "end_of_turn" for ids in expected]


def test_a_text_ends_where_an_answer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the chat template's end of turn as well, which the checkpoint's generation_config names."""
    orig_model, examples = lively(CAPTIONER, documents=4)
    long = describe(orig_model, ending(10**6), examples, 4, 8, 4)
    end = long[0].ids[2]
    monkeypatch.setattr(chat, "template_of", lambda _: SimpleNamespace(end_tokens=("<|im_end|>",)))
    talks = SimpleNamespace(
        **{**vars(ending(10**6)), "chat_template": "x", "convert_tokens_to_ids": {"<|im_end|>": end}.get}
    )
    found = describe(orig_model, talks, examples, 4, 8, 4)
    assert found[0].stop == "end_of_turn"
    assert found[0].ids == long[0].ids[: long[0].ids.index(end)]


@pytest.mark.parametrize("replay", [False, True])
def test_a_picture_is_encoded_once_and_its_keys_and_values_are_made_once(replay: bool) -> None:
    orig_model = made(CAPTIONER)
    examples = with_ends(captions(orig_model, [5, 7]))
    counts: Counter[str] = Counter()
    for name, module in orig_model.named_modules():
        if name == "encoder" or name.endswith("crossattention.c_attn"):
            module.register_forward_hook(lambda *_, name=name: counts.update([name]))
    describe(orig_model, ending(10**6), examples, 2, 6, batch_size=2, replay=replay)
    assert len(counts) == 3
    assert set(counts.values()) == {1}


def test_steps_are_replayed_on_a_gpu_alone_and_from_as_many_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PAYS_FROM", 8)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [kv_cache.replay_pays(gpu, steps) for steps in (7, 8)] == [False, True]
    assert not kv_cache.replay_pays(cpu, 100)
    replayed = []
    monkeypatch.setattr(kv_cache, "replay_pays", lambda _, steps: steps >= 8)
    monkeypatch.setattr(Decoding, "_replayed", lambda self: replayed.append(1) or self._read())
    for fields, max_new_tokens, expected in ((CAPTIONER, 8, False), (CAPTIONER, 9, True), (TRANSLATOR, 9, False)):
        replayed.clear()
        orig_model = made(fields)
        describe(orig_model, ending(10**6), with_ends(captions(orig_model, [5])), 1, max_new_tokens, 1)
        assert bool(replayed) is expected


def test_a_text_whose_positions_are_counted_on_the_host_is_not_replayed() -> None:
    orig_model = made(TRANSLATOR)
    with pytest.raises(ConfigError, match="positions are counted on the host"):
        describe(orig_model, TOKENIZER, with_ends(captions(orig_model, [5])), 1, 4, 1, replay=True)


@pytest.mark.gpu
def test_replayed_captions_are_on_a_gpu_those_of_eager_steps() -> None:
    """Also when rows end early and leave the batch, and the steps are recorded anew."""
    orig_model, examples = lively(CAPTIONER, documents=24)
    orig_model.cuda()
    endless = [a.ids for a in describe(orig_model, ending(10**6), examples, 24, 40, 24, replay=False)]
    # Which token ends texts at many lengths depends on the device: so random a model amplifies roundings.
    end = max(set().union(*endless), key=lambda token: len({ids.index(token) for ids in endless if token in ids}))
    expected = describe(orig_model, ending(end), examples, 24, 40, 24, replay=False)
    assert len({len(answer.ids) for answer in expected}) > 4
    assert describe(orig_model, ending(end), examples, 24, 40, 24, replay=True) == expected


def test_captions_of_every_source_are_scored_and_the_first_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    orig_model = made(CAPTIONER)
    examples = with_ends(captions(orig_model, [5, 7, 4, 6]))
    asked = []

    def known(_: Any, __: Any, prompts: list[list[int]], *rest: Any, **asks: Any) -> list[Answer]:
        asked.append(len(prompts))
        right = [tuple(examples[i].ids[1:-1].tolist()) for i in range(len(prompts))]
        said = [ids if i else ids[:1] for i, ids in enumerate(right)]
        return [Answer(TOKENIZER.decode(ids), "end_of_turn", len(ids), ids) for ids in said]

    monkeypatch.setattr(captioned, "generate", known)
    config = EvalConfig(max_examples=3, samples=2, max_new_tokens=8, batch_size=4)
    judged, shown = evaluate_captions(orig_model, TOKENIZER, {"a": examples}, config, cpu_runtime())
    assert asked == [3]
    f1 = (2 * 1 / (1 + 4) + 2) / 3
    values = values_of(judged)
    assert values["eval/captions/exact_match"] == pytest.approx(2 / 3)
    assert values["eval/captions/token_f1"] == pytest.approx(f1)
    low, high = interval([0.0, 1.0, 1.0])[2:]
    assert (values["eval/captions/low"], values["eval/captions/high"]) == (low, high)
    for one, value in zip(judged, (2 / 3, f1), strict=True):
        assert one.examples == 3
        assert one.low is not None
        assert one.high is not None
        assert one.low < value < one.high
        assert one.settings["max_new_tokens"] == 8
    first = judged[0].records[0]
    assert (first["id"], first["prompt"], first["marks"]["exact_match"]) == ("a-0", "picture 0", 0.0)
    assert [len(one.records) for one in judged] == [3, 0]
    assert [sample["prompt"] for sample in shown] == ["picture 0", "picture 1"]
    assert shown[1]["answer"] == shown[1]["reference"] != shown[0]["answer"]
