"""A base model becomes a chat model: the tokens of a named template, and rows of embedding and head for them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from helpers import ROOT, torchrun
from made_models import MOE, SIZES
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sftkit.config.load import read_config
from sftkit.config.schema import ModelConfig
from sftkit.data.tokens import chat
from sftkit.data.tokens.template import special_tokens_of
from sftkit.errors import ConfigError
from sftkit.models.load import load_model, resolve_max_length
from sftkit.models.tokenizer import load_tokenizer, train_tokenizer
from sftkit.models.vocabulary import added_tokens, describe_added_tokens, new_rows, vocabulary_of
from sftkit.models.weights import load_model_weights, make_room
from sftkit.preflight.analysis import meta_model

TOKENS = ("<|im_start|>", "<|im_end|>")
QUESTION = [{"role": "user", "content": "Hello?"}]
Save = Callable[..., ModelConfig]


def plain_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One without a chat template, without pad and without the turn tokens: 272 tokens, <|endoftext|> alone is special."""
    trained = train_tokenizer(["hello world, hello again"], 300)
    described = json.loads(trained.backend_tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:1]
    vocabulary = [token for token in described["model"]["vocab"] if token not in ("<|pad|>", *TOKENS)]
    described["model"]["vocab"] = {token: i for i, token in enumerate(vocabulary)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")


def make_model(kind: str, rows: int) -> PreTrainedModel:
    """A small model of so many rows; what transformers begins with zeros is random too."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": rows}
    made: dict[str, Callable[[], PreTrainedModel]] = {
        "untied": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)),
        "head bias": lambda: PhiForCausalLM(PhiConfig(**{**sizes, "head_dim": 12, "num_key_value_heads": 4})),
        "tied, head bias": lambda: PhiForCausalLM(
            PhiConfig(**{**sizes, "head_dim": 12, "num_key_value_heads": 4}, tie_word_embeddings=True)
        ),
        "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **MOE)),
    }
    model = made[kind]()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """save(kind, spare): a base model with its plain tokenizer in a folder; the setting that makes it a chat model."""

    def save(kind: str = "untied", spare: int = 0) -> ModelConfig:
        folder = tmp_path / f"{kind} {spare}"
        tokenizer = plain_tokenizer(folder)
        tokenizer.save_pretrained(folder)
        make_model(kind, len(tokenizer) + spare).save_pretrained(folder)
        return ModelConfig(path=str(folder), chat_template="chatml")

    return save


def loaded(source: ModelConfig, precision: str = "fp32", empty: bool = False) -> tuple[PreTrainedModel, Any]:
    tokenizer = load_tokenizer(source)
    model = load_model(source, tokenizer, 0, precision, empty=empty)
    if empty:
        make_room(model, torch.device("cpu"))
        load_model_weights(model, source)
    return model, tokenizer


def files_of(source: ModelConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def test_a_named_template_adds_its_tokens_and_a_chat_then_ends_its_turns_with_one(save: Save) -> None:
    source = save()
    plain = AutoTokenizer.from_pretrained(source.path)
    assert not set(TOKENS) & plain.get_vocab().keys()
    tokenizer = load_tokenizer(source)
    start, end = tokenizer.convert_tokens_to_ids(list(TOKENS))
    assert (start, end) == (len(plain), len(plain) + 1)
    assert set(TOKENS) <= set(special_tokens_of(tokenizer))
    ids = tokenizer.apply_chat_template([*QUESTION, {"role": "assistant", "content": "Hi."}], return_dict=False)
    assert ids.count(start) == ids.count(end) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHello?\nassistant\nHi.\n"
    assert chat.end_of_turn_ids(tokenizer) == [end, plain.eos_token_id]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    assert tokenizer("hello world").input_ids == plain("hello world").input_ids


def test_a_token_that_is_there_as_ordinary_text_keeps_its_id_and_becomes_special(save: Save) -> None:
    source = save(spare=1)
    plain = AutoTokenizer.from_pretrained(source.path)
    plain.add_tokens([TOKENS[1]])
    plain.save_pretrained(source.path)
    model, tokenizer = loaded(source)
    assert tokenizer.convert_tokens_to_ids(TOKENS[1]) == plain.convert_tokens_to_ids(TOKENS[1])
    assert set(TOKENS) <= set(special_tokens_of(tokenizer))
    added = added_tokens(tokenizer)
    assert added is not None
    assert (added.tokens, added.ids, added.known) == (TOKENS[:1], (len(plain),), len(plain))
    assert torch.equal(model.get_input_embeddings().weight[added.known - 1], embedding_row(source, added.known - 1))


def embedding_row(source: ModelConfig, row: int) -> torch.Tensor:
    return files_of(source).get_input_embeddings().weight[row]


def test_a_tokenizer_that_has_the_tokens_stays_as_it_is(tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path)
    found = load_tokenizer(ModelConfig(tokenizer=str(tmp_path), chat_template="chatml"))
    assert added_tokens(found) is None
    assert found.get_vocab() == tokenizer.get_vocab()
    assert found.special_tokens_map == tokenizer.special_tokens_map
    assert found.chat_template == tokenizer.chat_template


# ---- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "precision"), [("untied", "fp32"), ("tied", "bf16"), ("head bias", "bf16"), ("tied, head bias", "fp32")]
)
@pytest.mark.parametrize(("spare", "rows"), [(0, 320), (1, 320), (2, None), (9, None)])
def test_new_rows_are_the_mean_of_the_known_ones_and_all_else_stays(
    save: Save, kind: str, precision: str, spare: int, rows: int | None
) -> None:
    source = save(kind, spare)
    model, tokenizer = loaded(source, precision)
    base = files_of(source).to(model.dtype)
    known, before = len(tokenizer) - 2, len(tokenizer) - 2 + spare
    rows = rows or before  # spare rows are used first, and a model with enough of them does not grow
    assert model.config.vocab_size == model.vocab_size == rows
    grown = {id(tensor) for tensor in vocabulary_of(model)}
    assert len(grown) == 1 + (not kind.startswith("tied")) + kind.endswith("bias")
    new = [known, known + 1, *range(before, rows)]
    old = [row for row in range(before) if row not in new]
    expected = dict(base.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if id(value) not in grown:
            assert torch.equal(value, expected[name]), name
            continue
        assert value.shape[0] == rows, name
        assert torch.equal(value[old], expected[name][old]), name
        mean = expected[name][:known].double().mean(0).to(value.dtype)
        for row in set(new):
            assert torch.equal(value[row], mean), (name, row)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "spare"),
    [("untied", 0), ("tied", 0), ("tied", 9), ("head bias", 1), ("tied, head bias", 0), ("experts", 0)],
)
def test_an_empty_model_that_is_filled_from_smaller_files_is_the_one_that_was_loaded_whole(
    save: Save, kind: str, spare: int, precision: str
) -> None:
    source = save(kind, spare)
    (whole, _), (filled, _) = (loaded(source, precision, empty) for empty in (False, True))
    expected, found = dict(whole.named_parameters()), dict(filled.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert filled.config.to_dict() == whole.config.to_dict()


def test_loading_is_the_same_each_time_and_draws_no_random_numbers(save: Save) -> None:
    source, states, models = save(), [], []
    for seed, template in ((5, None), (5, "chatml"), (6, "chatml")):
        torch.manual_seed(seed)
        models.append(loaded(ModelConfig(path=source.path, chat_template=template))[0])
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert all(torch.equal(a, b) for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True))


def test_inspection_sees_the_grown_model_without_its_weights(save: Save) -> None:
    source = save()
    model, tokenizer = loaded(source)
    shell = meta_model(source, tokenizer, "fp32")
    assert shell is not None
    assert all(p.is_meta for p in shell.parameters())
    assert [p.shape for p in shell.parameters()] == [p.shape for p in model.parameters()]


def test_the_console_says_what_was_added_and_how_the_model_grew(save: Save) -> None:
    for kind, spare, words in (
        ("untied", 0, "embedding and head grow from 272 to 320 rows"),
        ("tied", 9, "tied embedding and head have room in their 281 rows"),
    ):
        model, tokenizer = loaded(save(kind, spare))
        said = describe_added_tokens(model, tokenizer)
        assert said is not None
        assert f"<|im_start|> (272), <|im_end|> (273); {words}" in said
    assert "<|im_start|> and <|im_end|> added" in resolve_max_length(ModelConfig(scratch={}), 64, tokenizer, "fp32")[1]


# ---- what is saved ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "spare"), [("untied", 0), ("tied", 0), ("tied", 9), ("head bias", 0)])
def test_what_is_saved_loads_in_plain_transformers_and_gets_nothing_added_again(
    save: Save, tmp_path: Path, kind: str, spare: int
) -> None:
    model, tokenizer = loaded(save(kind, spare))
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.apply_chat_template(QUESTION, return_dict=False) == tokenizer.apply_chat_template(
        QUESTION, return_dict=False
    )
    assert words.get_vocab() == tokenizer.get_vocab()
    for template in (None, "chatml"):
        again, tokens = loaded(ModelConfig(path=str(tmp_path / "out"), chat_template=template))
        assert added_tokens(tokens) is None
        assert new_rows(again) is None
        assert describe_added_tokens(again, tokens) is None
        assert tokens.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert tokens.special_tokens_map == tokenizer.special_tokens_map
        assert again.config.vocab_size == plain.config.vocab_size == model.config.vocab_size
        for one in (again, plain):
            assert all(torch.equal(a, b) for a, b in zip(one.parameters(), model.parameters(), strict=True))


def run_stage(script: str, folder: Path, *settings: str, timeout: float = 200) -> str:
    command = [
        *(f"scripts/{script}.py", f"recipes/smoke/{'mid' if script == 'mid_train' else 'sft'}.yaml"),
        *("train.global_batch_size=4", "train.micro_batch_size=2", "compile.backend=aot_eager", "data.max_length=128"),
        *("data.val=[]", "eval.tasks=[]", "eval.at_start=false", "log.wandb=off", f"data.cache_dir={folder}/cache"),
        "data.train=[{path: 'builtin:tasks', max_rows: 100}]",
    ]
    done = preloaded.run([*command, *settings], env={**os.environ, "ACCELERATE_USE_CPU": "true"}, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_compiled_run_resumes_and_adds_nothing_and_answers_in_plain_transformers(save: Save, tmp_path: Path) -> None:
    source = save("tied")
    words = (f"run.dir={tmp_path}/sft", f"model.path={source.path}", "model.chat_template=chatml", "train.resume=auto")
    assert "grow from 272 to 320 rows" in run_stage("chat_sft", tmp_path, *words, "train.max_steps=2")
    first = AutoTokenizer.from_pretrained(tmp_path / "sft" / "step-000002")
    assert "resumed" in run_stage("chat_sft", tmp_path, *words, "train.max_steps=3")
    step = tmp_path / "sft" / "step-000003"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(step), AutoTokenizer.from_pretrained(step)
    assert tokenizer.get_vocab() == first.get_vocab()
    assert (len(tokenizer), model.config.vocab_size) == (274, 320)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    rows = model.get_input_embeddings().weight
    assert not torch.equal(rows[272], rows[273])  # they were learned, from one mean
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]


@pytest.mark.slow
def test_sft_goes_on_from_the_mid_training_that_added_the_tokens(save: Save, tmp_path: Path) -> None:
    source = save()
    mid = (f"run.dir={tmp_path}/mid", f"model.path={source.path}", "model.chat_template=chatml", "train.max_steps=2")
    assert "grow from 272 to 320 rows" in run_stage("mid_train", tmp_path, *mid)
    sft = (f"run.dir={tmp_path}/sft", f"model.path={tmp_path}/mid", "model.chat_template=chatml")
    said = run_stage("chat_sft", tmp_path, *sft, "train.max_steps=2")
    assert "tokenizer of 274 tokens" in said
    assert "added" not in said
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name / "step-000002") for name in ("mid", "sft"))
    assert before.get_vocab() == after.get_vocab()
    assert before.chat_template == after.chat_template
    folder = str(tmp_path / "sft")
    done = preloaded.run(["scripts/chat.py", folder, "--prompt", "Hello", "--max-new-tokens", "4"])
    assert done.returncode == 0, done.stderr[-3000:]


QUICK = (("untied", 0, "fsdp2", "fp32"),)
SLOW = (
    *(("tied", 0, "tensor", "bf16"), ("tied", 9, "fsdp2", "bf16")),
    *(("experts", 0, "fsdp2", "fp32"), ("head bias", 0, "fsdp2", "fp32")),
)


@pytest.mark.parametrize("todo", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_ranks_grow_what_one_process_grows_and_resume_what_they_saved(
    save: Save, tmp_path: Path, todo: tuple[tuple[str, int, str, str], ...]
) -> None:
    """Two ranks, each with its shard of an embedding larger than that of the files."""
    cases = {
        f"{kind} {topology}": (save(kind, spare), topology, precision) for kind, spare, topology, precision in todo
    }
    load_tokenizer(save()).save_pretrained(tmp_path / "tokenizer")
    plan = {name: (source.path, topology, precision) for name, (source, topology, precision) in cases.items()}
    torchrun(2, "vocabulary_worker.py", str(tmp_path), json.dumps(plan))
    found = json.loads((tmp_path / "out.json").read_text())
    for name, (source, _, precision) in cases.items():
        whole, _ = loaded(source, precision)
        live = torch.load(tmp_path / f"{name}.start.pt")
        for key, value in whole.named_parameters():
            assert torch.equal(live[key], value), (name, key)
        assert found[name]["repeated"] == found[name]["losses"], name
        assert found[name]["restored"] == found[name]["finished"] == [], name
        trained = torch.load(tmp_path / f"{name}.pt")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-000002", dtype="auto")
        assert plain.config.vocab_size == whole.config.vocab_size
        for key, value in plain.named_parameters():
            assert torch.equal(trained[key], value), (name, key)


# ---- what cannot be done ---------------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model_is_refused_and_not_grown_into(save: Save, tmp_path: Path) -> None:
    source = save()
    make_model("untied", 200).save_pretrained(tmp_path / "small")
    other = ModelConfig(path=str(tmp_path / "small"), tokenizer=source.path, chat_template="chatml")
    with pytest.raises(ConfigError, match="274 tokens, the model embeds 200 and has no row for "):
        load_model(other, load_tokenizer(other), 0)


def test_a_special_token_that_nothing_writes_needs_no_row(save: Save) -> None:
    """As in Gemma 3 1B, whose tokenizer has a token for images behind the model's last row."""
    source = save()
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(source.path)
    plain = ModelConfig(path=source.path)
    model, found = loaded(plain)
    assert (len(found), model.config.vocab_size) == (273, 272)
    for empty in (False, True):
        model, found = loaded(source, empty=empty)  # the turn marks come behind it
        assert (added_tokens(found).ids, model.config.vocab_size) == ((273, 274), 320)  # type: ignore[union-attr]
        rows, before = model.get_input_embeddings().weight, files_of(source).get_input_embeddings().weight
        assert torch.equal(rows[:272], before)
        assert all(torch.equal(row, before.double().mean(0).to(row)) for row in rows[272:])


@pytest.mark.parametrize(
    ("token", "special", "template"),
    [
        ("<image_soft_token>", False, ""),
        ("<image_soft_token>", True, "{{ '<image_soft_token>' }}"),
        ("<eos>", True, ""),
    ],
    ids=["ordinary text", "the template writes it", "it ends texts"],
)
def test_a_token_that_may_occur_needs_a_row(save: Save, token: str, special: bool, template: str) -> None:
    source = ModelConfig(path=save().path)
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    tokenizer.add_tokens([AddedToken(token, special=special)], special_tokens=special)
    tokenizer.chat_template = template
    if token == "<eos>":
        tokenizer.eos_token = token
    tokenizer.save_pretrained(source.path)
    with pytest.raises(ConfigError, match=rf"273 tokens, the model embeds 272 and has no row for {token} \(272\)"):
        loaded(source)


def test_a_name_that_is_no_template_is_refused_with_the_one_that_was_meant() -> None:
    recipe = ROOT / "recipes" / "smoke" / "sft.yaml"
    with pytest.raises(
        ConfigError, match=r'model\.chat_template.*"chatlm" is neither chatml nor a Jinja file; did you mean'
    ):
        read_config(recipe, ["model.chat_template=chatlm"])
    for fine in ("chatml", "templates/mine.jinja"):
        assert read_config(recipe, [f"model.chat_template={fine}"]).model.chat_template == fine


def test_a_new_model_has_the_added_tokens_in_its_vocabulary(save: Save) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    source = ModelConfig(scratch={"model_type": "llama", **sizes}, tokenizer=save().path, chat_template="chatml")
    model, tokenizer = loaded(source)
    assert model.config.vocab_size == len(tokenizer) == 274
    assert new_rows(model) is None


def test_a_file_whose_tokens_are_missing_names_the_template_that_brings_its_own(save: Save) -> None:
    source = save()
    file = str(ROOT / "src/sftkit/data/tokens/chatml.jinja")
    with pytest.raises(
        ConfigError, match=r"<\|im_start\|>, which is not a token of .*Set model\.chat_template to chatml"
    ):
        load_tokenizer(ModelConfig(path=source.path, chat_template=file))


def test_a_weight_of_another_size_is_still_an_error_where_the_vocabulary_grows(save: Save) -> None:
    source = save()
    assert source.path is not None
    config = Path(source.path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 273}))
    for empty in (False, True):
        with pytest.raises(ConfigError, match=r"has shape \[272, 48\] in the files and \[273, 48\] in the model"):
            loaded(source, empty=empty)
