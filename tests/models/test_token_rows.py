"""Rows of added tokens are trained next to an adapter: they compute what peft's do, in files that both read."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flat, make_batch, make_examples, tiny
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from sftkit.compile.contract import compile_model, compiler_switches, small_modules
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import AdapterConfig, CompileConfig, LossConfig, ModelConfig, OptimConfig
from sftkit.errors import ConfigError
from sftkit.models.adapters import adapters_in, add_adapters, as_written, peft_config_text
from sftkit.models.files import adapter_at
from sftkit.models.load import load_model
from sftkit.models.structure import Work, count_parameters, embedding_of, output_projection, train_flops
from sftkit.models.tokenizer import train_tokenizer
from sftkit.models.trained import TOKEN_ADAPTER, adapters_of, factors
from sftkit.models.vocabulary import add_tokens, new_rows
from sftkit.models.weights import materialize_weights
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.optim.protocol import parameter_groups
from sftkit.preflight.analysis import meta_model
from sftkit.verify.documents import check_documents
from sftkit.verify.plain import PlainModel

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "scaled": (Gemma3TextConfig, {"sliding_window": 8, "query_pre_attn_scalar": 8}),  # tied, embedding times a number
}
TOKENS = ["<|one|>", "<|two|>"]
ROOM = {"spare": 8, "grown": 0}
"Rows of the model behind those of its tokenizer."


@pytest.fixture(scope="module")
def peft() -> Any:
    return importlib.import_module("peft")


def write_base(folder: Path, family: str, room: str) -> Path:
    tokenizer = train_tokenizer(["a few words about words"], 300, "{{ messages }}")
    config, fields = FAMILIES[family]
    tiny(config, vocab_size=len(tokenizer) + ROOM[room], **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_with_tokens(base: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(base)
    add_tokens(tokenizer, TOKENS)
    return tokenizer


def trained(base: Path, precision: str = "fp32", **settings: Any) -> PreTrainedModel:
    """A model with an adapter and trained rows, none of which are at their start."""
    config = AdapterConfig(**{"rank": 2, **settings})
    model = load_model(ModelConfig(path=str(base)), tokenizer_with_tokens(base), 5, precision, adapter=config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in factors(model).items():
            if ".lora_B." in name or TOKEN_ADAPTER in name:
                p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


def write_adapter(model: PreTrainedModel, tokenizer: Any, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    tensors = {f"base_model.model.{name}": p.detach().clone() for name, p in factors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(peft_config_text(model))
    return folder


def ids_with_tokens(base: Path) -> torch.Tensor:
    """Each added token at several places, as input and as target."""
    ids = torch.arange(24).reshape(2, 12) * 5 % 61
    ids[:, [2, 7]], ids[:, [5, 6, 11]] = (tokenizer_with_tokens(base).convert_tokens_to_ids(t) for t in TOKENS)
    return ids


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Without gradients layers with adapters compute one by one, so bits can be compared."""
    found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found


def of_peft(model: PreTrainedModel, base: Path, folder: Path, peft: Any) -> Any:
    """Our files in peft, which grows a base without room for the tokens only if it may load the base itself."""
    if embedding_of(model).shape[0] == embedding_of(theirs := AutoModelForCausalLM.from_pretrained(base)).shape[0]:
        return peft.PeftModel.from_pretrained(theirs, folder, is_trainable=True)
    return peft.AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(family: str, room: str, tmp_path: Path, peft: Any) -> None:
    base = write_base(tmp_path / "base", family, room)
    ours, ids = trained(base), ids_with_tokens(base)
    folder = write_adapter(ours, tokenizer_with_tokens(base), tmp_path / "adapter")
    theirs = of_peft(ours, base, folder, peft)
    ours.double()
    theirs.double()
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-6, atol=1e-6)
    loss_of(ours, ids).backward()
    loss_of(theirs, ids).backward()
    gradients = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert gradients.keys() == {f"base_model.model.{name}" for name in factors(ours)}
    rows = [name for name in factors(ours) if TOKEN_ADAPTER in name]
    assert len(rows) == (2 if family == "untied" else 1)
    for name, p in factors(ours).items():
        expected = gradients[f"base_model.model.{name}"]
        assert p.grad is not None
        assert expected.norm() > 0
        assert float((p.grad - expected).norm() / expected.norm()) < 5e-5


def sums_of(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    """The loss as a step computes it: from hidden states, without logits of the whole batch."""
    examples = make_examples([11, 11])
    flat(examples).ids[:] = ids.flatten().numpy()
    batch = make_batch(examples, ((0,), (1,)), 16)
    return ModelWithLoss(model, "reference", NextToken(LossConfig(chunk_tokens=4)))(batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_step_uses_the_rows_and_leaves_the_table_as_it_is(
    family: str, precision: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", family, "spare")
    # A small scale: in bf16 large adapters of random numbers make any two orders of sums differ.
    ours, plain = (trained(base, precision, alpha=1.0) for _ in range(2))
    ids = ids_with_tokens(base)
    as_written(plain)  # whole tables with the rows in them, and an own gradient of each table
    for module in (output_projection(plain), plain.get_input_embeddings()):
        assert type(module).__mro__[1].__name__ == "PlainTokenRows"
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    found = sums_of(ours, ids)
    found.loss.backward()
    logits = plain(input_ids=ids[:, :-1], use_cache=False).logits.float()
    examples = make_examples([11, 11])
    mask = torch.from_numpy(flat(examples).is_target).view(2, 12)[:, 1:]
    expected = F.cross_entropy(logits[mask], ids[:, 1:][mask], reduction="sum")
    expected.backward()
    exact = precision == "fp32"
    torch.testing.assert_close(found.loss, expected, rtol=1e-6 if exact else 1e-2, atol=0)
    for name, p in factors(ours).items():
        other = factors(plain)[name].grad
        assert p.grad is not None
        assert other is not None
        assert p.grad.dtype == torch.float32
        assert float((p.grad - other).norm() / other.norm()) < (5e-5 if exact else 0.05)
    assert all(torch.equal(p, before[name]) for name, p in ours.named_parameters())


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("family", ["untied", "tied"])
def test_an_adapter_with_rows_is_merged_continued_and_read_without_template(
    family: str, room: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", family, room)
    ours, ids = trained(base), ids_with_tokens(base)
    folder = write_adapter(ours, tokenizer_with_tokens(base), tmp_path / "adapter")
    source, tokenizer = ModelConfig(path=str(folder)), AutoTokenizer.from_pretrained(folder)
    expected = logits_of(ours, ids)
    merged = load_model(source, tokenizer, 0)
    assert adapters_of(merged) is None
    assert new_rows(merged) is None
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
    for name, p in factors(ours).items():
        if TOKEN_ADAPTER in name:
            table = merged.get_parameter(f"{name.partition(TOKEN_ADAPTER)[0]}.weight")
            assert torch.equal(table[[*adapters_of(ours).tokens[name.partition(TOKEN_ADAPTER)[0]]]], p)  # type: ignore[union-attr]
    going = load_model(source, tokenizer, 0, adapter=AdapterConfig(rank=2))
    assert torch.equal(logits_of(going, ids), expected)
    # The same without a recipe, as proof.json reads a checkpoint: a base of transformers, and what the files say.
    plain = AutoModelForCausalLM.from_pretrained(base)
    files = adapter_at(source)
    assert files is not None
    add_adapters(plain, adapters_in(files))
    assert torch.equal(logits_of(plain, ids), expected)
    # And the model that a run compares itself with.
    for live, start in ((merged, source), (going, source), (ours, ModelConfig(path=str(base)))):
        found = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), start)
        wrong = {name for name in found.differing if ".lora_" not in name and TOKEN_ADAPTER not in name}
        assert (wrong, found.differing == {}) == (set(), live is not ours)  # `ours` has left its start


@pytest.mark.parametrize("room", ROOM)
def test_a_model_that_reads_its_weights_later_has_the_same_rows(room: str, tmp_path: Path) -> None:
    """As for ranks that hold shards: new, continued and merged; and as a preflight counts it."""
    base = write_base(tmp_path / "base", "untied", room)
    settings, ids = AdapterConfig(rank=2), ids_with_tokens(base)
    folder = write_adapter(trained(base), tokenizer_with_tokens(base), tmp_path / "adapter")
    starts = [(base, tokenizer_with_tokens(base), settings)]
    starts += [(folder, AutoTokenizer.from_pretrained(folder), adapter) for adapter in (settings, None)]
    for path, tokenizer, adapter in starts:
        source = ModelConfig(path=str(path))
        whole = load_model(source, tokenizer, 5, adapter=adapter)
        later = load_model(source, tokenizer, 5, empty=True, adapter=adapter)
        materialize_weights(later, source, torch.device("cpu"))
        assert torch.equal(logits_of(later, ids), logits_of(whole, ids))
        counted = meta_model(source, tokenizer, "fp32", adapter=adapter)
        assert counted is not None
        assert count_parameters(counted).trained == count_parameters(whole).trained
    more = AutoTokenizer.from_pretrained(folder)
    add_tokens(more, ["<|three|>"])
    later = load_model(ModelConfig(path=str(folder)), more, 5, empty=True)
    with pytest.raises(ConfigError, match="which is not done in shards"):
        materialize_weights(later, ModelConfig(path=str(folder)), torch.device("cpu"))


@pytest.mark.parametrize("listed", ["list", "names"])
@pytest.mark.parametrize("family", ["untied", "tied"])
def test_files_of_peft_with_trained_tokens_are_merged_and_continued(
    family: str, listed: str, tmp_path: Path, peft: Any
) -> None:
    """A list names rows of the embedding alone, unless the head is tied to it."""
    base = write_base(tmp_path / "base", family, "spare")
    given: Any = [3, 17, 4] if listed == "list" else {"embed_tokens": [3, 17, 4]}
    if listed == "names" and family == "untied":
        given["lm_head"] = [5, 3]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], trainable_token_indices=given)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, 0.0, 0.2)
    model.save_pretrained(tmp_path / "peft")
    ids = torch.arange(24).reshape(2, 12) % 19
    expected = model(ids).logits
    tokenizer, source = AutoTokenizer.from_pretrained(base), ModelConfig(path=str(tmp_path / "peft"))
    going = AdapterConfig(rank=2, alpha=4, targets=("q_proj",))
    for adapter in (None, going):
        found = load_model(source, tokenizer, 0, adapter=adapter)
        torch.testing.assert_close(found(ids).logits, expected, rtol=1e-5, atol=1e-5)
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": [3, 17]}))
    with pytest.raises(ConfigError, match=r"are not the rows of trainable_token_indices=\[3, 17\]"):
        load_model(source, tokenizer, 0)


def test_rows_begin_as_the_mean_and_are_counted_without_decay(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "untied", "spare")
    tokenizer = tokenizer_with_tokens(base)
    known = len(tokenizer) - len(TOKENS)
    for precision in ("fp32", "bf16"):
        model = load_model(ModelConfig(path=str(base)), tokenizer, 5, precision, adapter=AdapterConfig(rank=2))
        rows = {name: p for name, p in factors(model).items() if TOKEN_ADAPTER in name}
        for name, p in rows.items():
            table = model.get_parameter(name.replace("token_adapter.trainable_tokens_delta", "weight"))
            mean = table[:known].double().mean(0).to(table.dtype).float()
            torch.testing.assert_close(p, mean.expand_as(p), rtol=1e-6, atol=1e-8)
    assert all(p.dtype == torch.float32 and p.requires_grad for p in rows.values())
    assert [*rows] == [f"{name}.token_adapter.trainable_tokens_delta" for name in ("model.embed_tokens", "lm_head")]
    groups = parameter_groups(model, OptimConfig(name="adamw", weight_decay=0.1))
    assert {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]} == {id(p) for p in rows.values()}
    # Two rows of width 32 in each table. Their gradient is all that the head computes for them.
    alone = load_model(
        ModelConfig(path=str(base)), AutoTokenizer.from_pretrained(base), 5, adapter=AdapterConfig(rank=2)
    )
    assert count_parameters(model).trained == count_parameters(alone).trained + 2 * 2 * 32
    for work, more in ((Work(7, 0, 0), 0), (Work(0, 7, 0), 7 * 2 * 2 * 32)):
        assert train_flops(model, work) - train_flops(alone, work) == more


def test_a_template_that_adds_tokens_to_an_adapter_is_continued_or_rejected(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "tied", "spare")
    tokenizer, settings = AutoTokenizer.from_pretrained(base), AdapterConfig(rank=2)
    plain = load_model(ModelConfig(path=str(base)), tokenizer, 5, adapter=settings)
    first = write_adapter(plain, tokenizer, tmp_path / "first")
    second = load_model(ModelConfig(path=str(first)), tokenizer_with_tokens(base), 9, adapter=settings)
    assert {*factors(second)} - {*factors(plain)} == {"model.embed_tokens.token_adapter.trainable_tokens_delta"}
    assert all(torch.equal(factors(second)[name], p) for name, p in factors(plain).items())
    assert factors(second)["model.embed_tokens.token_adapter.trainable_tokens_delta"].any()
    folder = write_adapter(second, tokenizer_with_tokens(base), tmp_path / "second")
    more = AutoTokenizer.from_pretrained(folder)
    add_tokens(more, ["<|three|>"])
    with pytest.raises(ConfigError, match=r"has trained rows for tokens, and <\|three\|> would be added"):
        load_model(ModelConfig(path=str(folder)), more, 0, adapter=settings)
    assert load_model(ModelConfig(path=str(folder)), more, 0)(ids_with_tokens(base)).logits.isfinite().all()
    # A row that neither the base nor the adapter has.
    config = json.loads((folder / "adapter_config.json").read_text())
    config["trainable_token_indices"] = {"model.embed_tokens": [3, 999]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"it has a row for token 999, the model .* rows, and no file has row"):
        load_model(ModelConfig(path=str(folder)), more, 0, adapter=settings)
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: t for name, t in tensors.items() if TOKEN_ADAPTER not in name}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the rows of trainable_token_indices=.* are not in it"):
        adapter_at(ModelConfig(path=str(folder)))


def test_blocks_stay_one_graph_and_documents_of_a_row_equal_each_alone(tmp_path: Path) -> None:
    torch._dynamo.reset()
    base = write_base(tmp_path / "base", "tied", "spare")
    ids = ids_with_tokens(base)
    row = ModelWithLoss(trained(base), "reference", NextToken(LossConfig()))
    assert check_documents(row, "reference", torch.device("cpu")).logits_difference < 1e-6
    model = trained(base)
    compile_model(model, CompileConfig(backend="aot_eager", fullgraph=True))
    with compiler_switches(CompileConfig()):  # torch keeps few records of compilations otherwise
        watch = CompileWatch()
        model.train()
        loss_of(model, ids).backward()
        watch.warm_up_done()
        loss_of(model, ids).backward()
        counts = watch.counts()
        watch.close()
    assert counts["compile/graphs"] == 1 + len(small_modules(model))
    assert counts["compile/recompiles"] == 0
