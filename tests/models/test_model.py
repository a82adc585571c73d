"""Models from a config, a folder, and the errors of both; counts; generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny_llama, tiny_qwen3_with_windows
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.generation.decode import stream
from sftkit.generation.repl import Sampling
from sftkit.models.load import from_scratch, load_model, resolve_max_length
from sftkit.models.structure import Work, attention_windows, count_parameters, positions, train_flops
from sftkit.models.tokenizer import load_tokenizer
from sftkit.ops.attention import windows
from sftkit.runtime.hardware import peak_flops_by_name

FIELDS = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_new_model_has_the_tokenizers_vocabulary_and_the_same_weights_for_the_same_seed(tokenizer) -> None:
    a, b, c = (from_scratch({**FIELDS, **HEADS}, tokenizer, seed) for seed in (1, 1, 2))
    assert a.config.vocab_size == len(tokenizer)
    assert a.config.eos_token_id == tokenizer.eos_token_id
    states = [m.state_dict() for m in (a, b, c)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert any(not torch.equal(states[0][k], states[2][k]) for k in states[0])


def test_a_new_model_leaves_the_generator_to_the_rank_that_seeded_it(tokenizer) -> None:
    """Else all ranks would drop the same positions."""
    drawn = []
    for rank in range(2):
        torch.manual_seed(rank)
        from_scratch({**FIELDS, **HEADS}, tokenizer, 0)
        drawn.append(torch.rand(8))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_take_the_precision_of_the_run_whatever_the_checkpoint_holds(
    tmp_path: Path, tokenizer, saved: torch.dtype, precision: str, dtype: torch.dtype
) -> None:
    from_scratch({**FIELDS, **HEADS}, tokenizer, 0).to(saved).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)), tokenizer, 0, precision)
    assert {p.dtype for p in loaded.parameters()} == {dtype}


def test_rotary_frequencies_stay_fp32_in_a_bf16_model(tokenizer) -> None:
    model = from_scratch({**FIELDS, **HEADS}, tokenizer, 0, "bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for name, b in model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ tokens, the model embeds 64"):
        load_model(ModelConfig(scratch={**FIELDS, **HEADS, "vocab_size": 64}), tokenizer, seed=0)


def test_a_config_that_transformers_refuses_is_a_config_error(tokenizer) -> None:
    for kind, told in (
        (
            "no_such_model",
            r'model_type: "no_such_model" is not an architecture of transformers .* llama, gpt2, vit and t5$',
        ),
        ("qwen33", r'model_type: "qwen33" is not an architecture of .*\. Did you mean "qwen3"\?$'),
    ):
        with pytest.raises(ConfigError, match=rf"^model\.scratch: {told}"):
            from_scratch({"model_type": kind}, tokenizer, 0)
    captioner = {"encoder": {"model_type": "vitt"}, "decoder": {"model_type": "gpt2"}}
    with pytest.raises(ConfigError, match=r'^model\.scratch: encoder\.model_type: "vitt" .* Did you mean "vit"\?$'):
        from_scratch({"model_type": "vision-encoder-decoder", **captioner}, tokenizer, 0)
    with pytest.raises(ConfigError, match=r"rejects this config: .*'num_hidden_layers' expected int, got str"):
        from_scratch({**FIELDS, **HEADS, "num_hidden_layers": "two"}, tokenizer, 0)


def test_the_row_length_must_come_from_somewhere(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length"):
        resolve_max_length(ModelConfig(scratch={}), None, tokenizer, "fp32")
    assert resolve_max_length(ModelConfig(scratch={}), 64, tokenizer, "fp32")[0] == 64


def test_tied_embeddings_count_once_and_as_a_matrix_product(tokenizer) -> None:
    untied = from_scratch({**FIELDS, **HEADS}, tokenizer, 0)
    tied = from_scratch({**FIELDS, **HEADS, "tie_word_embeddings": True}, tokenizer, 0)
    embedding = len(tokenizer) * 32
    one, two = count_parameters(tied), count_parameters(untied)
    assert one.head == two.head == embedding
    assert two.total == one.total + embedding == two.body + 2 * embedding
    assert one.body == two.body


def test_routed_experts_count_by_the_share_that_a_token_visits(tokenizer) -> None:
    fields = {**FIELDS, **HEADS, "model_type": "qwen3_moe", "head_dim": 8, "moe_intermediate_size": 16}
    four, eight = (from_scratch({**fields, "num_experts": n, "num_experts_per_tok": 2}, tokenizer, 0) for n in (4, 8))
    routers = 2 * 4 * 32  # four more rows in the router of each of two blocks
    assert count_parameters(eight).body == count_parameters(four).body + routers
    assert count_parameters(eight).total > count_parameters(four).total + routers


def test_model_flops_are_those_that_torch_counts_for_one_document() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_llama()
    model.set_attn_implementation("eager")
    length = 16
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    # The counter sees the whole square of attention scores, of which we count the causal half, and no norms; beyond
    # that only the outer product of the rotary angles, 0.01 %.
    counted = train_flops(model, Work(length, length, 2 * length * length)) - 6.0 * norms * length
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-3)
    assert train_flops(model, Work(length, 5, 0)) == counted_without(model, length, 5)


def test_learned_positions_are_read_and_not_multiplied_so_they_are_no_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, attn_implementation="eager", **sizes))
    length = 16
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)  # norms and biases
    counted = train_flops(model, Work(length, length, 2 * length * length)) - 6.0 * vectors * length
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-3)
    table = model.transformer.wpe.weight.numel()
    counts = count_parameters(model)
    assert counts.total == counts.body + counts.head + table


def test_layers_are_counted_by_their_windows() -> None:
    assert attention_windows(tiny_llama()) == {(None, False): 2}
    assert attention_windows(tiny_qwen3_with_windows()) == {(None, False): 2, (5, False): 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    every = MistralForCausalLM(MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=7, **sizes))
    assert attention_windows(every) == {(7, False): 3}
    assert windows(every.config)
    every.config.sliding_window = 0
    assert attention_windows(every) == {(None, False): 3}
    assert not windows(every.config)


def test_layers_in_chunks_are_counted_by_chunk_and_a_model_with_layers_of_other_kinds_not_at_all() -> None:
    model = tiny_llama()
    model.config.layer_types = ["chunked_attention", "full_attention"]
    assert attention_windows(model) is None, "it does not say how long its chunks are"
    model.config.attention_chunk_size = 6
    assert attention_windows(model) == {(6, True): 1, (None, False): 1}
    for kind in ("linear_attention", "conv", "deepseek_sparse_attention"):
        model.config.layer_types = [kind, "full_attention"]
        assert attention_windows(model) is None
    mixer = tiny_llama()
    mixer.model.layers[0].mixer = torch.nn.Conv1d(4, 4, 3)
    assert attention_windows(mixer) is None


def counted_without(model: torch.nn.Module, tokens: int, targets: int) -> float:
    """6 FLOPs per parameter of the body and token, and of the head and target."""
    inside = sum(
        p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    )
    return 6.0 * (inside * tokens + model.lm_head.weight.numel() * targets)


def test_a_generation_config_with_sampling_values_can_be_saved(tmp_path: Path, tokenizer) -> None:
    model = from_scratch({**FIELDS, **HEADS}, tokenizer, 0)
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    load_model(ModelConfig(path=str(tmp_path / "a")), tokenizer, seed=0).save_pretrained(tmp_path / "b")


def test_an_error_while_streaming_reaches_the_caller(tokenizer, monkeypatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr(model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(stream(model, tokenizer, [{"role": "user", "content": "Hi"}], Sampling(max_new_tokens=3)))


def test_a_folder_with_only_a_tokenizer_serves_as_model_tokenizer(tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path="Qwen/Qwen3-0.6B", tokenizer=str(tmp_path)))
    assert loaded("What is it?")["input_ids"] == tokenizer("What is it?")["input_ids"]


def test_a_template_whose_turn_marks_are_no_tokens_is_refused(tmp_path: Path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "t")
    template = tmp_path / "x.jinja"
    template.write_text("<|turn_of|>{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"<\|turn_of\|>, which is not a token"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path / "t"), chat_template=str(template)))
    with pytest.raises(ConfigError, match=r"nope\.jinja: No such file"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path / "t"), chat_template="nope.jinja"))


def test_rows_longer_than_the_models_positions_are_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match="300 is more than the model's 256 positions"):
        resolve_max_length(ModelConfig(scratch={}), 300, tokenizer, "fp32", positions(tiny_llama()))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_whole_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops_by_name(name) == peak


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (None, "its files lack model.layers.1.mlp.up_proj.weight"),
        (torch.zeros(3, 32), r"has shape \[3, 32\] in the files and \[64, 32\] in the model"),
    ],
)
def test_a_weight_that_is_missing_or_misshapen_is_an_error_and_not_random_numbers(
    tmp_path: Path, tokenizer, change: torch.Tensor | None, text: str
) -> None:
    from safetensors.torch import load_file, save_file

    tiny_llama().save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if change is None else {name: change}), file, {"format": "pt"})
    with pytest.raises(ConfigError, match=text):
        load_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=0)
