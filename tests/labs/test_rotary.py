"""Norms and rotary embedding with attention, as one operator, equal what transformers computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers import make_batch, make_examples, tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from labs.fused import rotary
from labs.fused.rotary_attention import RotaryAttention, use_rotary_operator
from sftkit.ops import flash
from sftkit.ops.attention import document_boundaries, plain_attention, use_document_attention


def scores_of(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float, window: int
) -> tuple[Tensor, ...]:
    """Return the masked scores [H, N, N], and keys and values for each query head."""
    places = torch.arange(len(query))
    document = torch.searchsorted(starts[1:].contiguous(), places, right=True)
    distance = places[:, None] - places
    seen = (document[:, None] == document) & (distance >= 0) & (distance < (window or len(query)))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(~seen, float("-inf")), key, value


def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """Compute flash.document_attention by dense products."""
    scores, _, value = scores_of(query, key, value, starts, *more[2:4])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).contiguous(), scores.logsumexp(-1).float()


def attend_back(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """Compute flash.document_attention_backward by dense products."""
    _, starts, _, _, scale, window, _ = more
    scores, keys, values = scores_of(query, key, value, starts, scale, window)
    weights = scores.softmax(-1)
    gained = torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).t()[..., None]
    of_scores = weights * gained * scale
    of_keys = torch.einsum("hqk,qhd->khd", of_scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
    summed = (x.unflatten(1, (key.shape[1], -1)).sum(2).contiguous() for x in of_keys)
    return torch.einsum("hqk,khd->qhd", of_scores, keys).contiguous(), *summed


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of attention be dense products."""
    monkeypatch.setattr(flash, "document_attention", attend)
    monkeypatch.setattr(flash, "document_attention_backward", attend_back)


WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def model_with_odd_norms(config: type[PreTrainedConfig], **fields: Any) -> PreTrainedModel:
    model = tiny(config, **(HEADS | fields))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    use_document_attention(model)
    return model


def loss_and_gradients(model: PreTrainedModel, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed loss of two rows of documents, and all gradients."""
    batch = make_batch(make_examples([9, 7, 3, 13]), ((0, 1), (2, 3)), 16)
    given = {**batch.inputs, "documents": document_boundaries(batch, backend), "use_cache": False}
    loss = F.cross_entropy(model(**given).logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize(
    ("config", "fields", "compiled"),
    [
        (Qwen3Config, {}, False),
        (Qwen3Config, WINDOWS, False),
        (LlamaConfig, {}, False),
        (Qwen2Config, {}, False),
        (Qwen3Config, {}, True),
    ],
)
def test_loss_and_all_gradients_are_those_of_transformers_modules(
    config: type[PreTrainedConfig], fields: dict[str, Any], compiled: bool
) -> None:
    model = model_with_odd_norms(config, **fields)
    loss, gradients = loss_and_gradients(deepcopy(model), "reference")
    use_rotary_operator(model)
    for block in model.model.layers if compiled else ():
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    found, of_found = loss_and_gradients(model, "fa4")
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert of_found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (of_found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_an_answer_and_other_backends_are_computed_by_the_module_itself() -> None:
    model = model_with_odd_norms(Qwen3Config)
    plain = deepcopy(model)
    use_rotary_operator(model)
    assert isinstance(model.model.layers[0].self_attn, RotaryAttention)
    ids = torch.arange(6)[None]
    for one in (plain, model):
        one.eval()
    with plain_attention(model), plain_attention(plain):
        answers = [m.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (plain, model)]
    assert torch.equal(*answers)
    assert loss_and_gradients(model, "reference")[0] == loss_and_gradients(plain, "reference")[0]


def test_a_class_in_front_of_transformers_own_is_not_passed_by() -> None:
    model = model_with_odd_norms(Qwen3Config)
    module = model.model.layers[0].self_attn
    module.__class__ = type("Qwen3Attention", (type(module),), {})
    use_rotary_operator(model)
    found = [isinstance(block.self_attn, RotaryAttention) for block in model.model.layers]
    assert found == [False, *[True] * (len(found) - 1)]


def inputs(device: str, dtype: torch.dtype, *, norms: bool) -> list[Any]:
    """Return the arguments of rotary_attention up to the epsilon; queries and keys lie in one matrix."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(37, 6, 64, generator=generator)
    value = torch.randn(37, 2, 64, generator=generator)
    weights = [1 + 0.2 * torch.randn(64, generator=generator) for _ in "qk"]
    angles = (6 * torch.rand(37, 32, generator=generator)).repeat(1, 2)
    made = [x.to(device, dtype) for x in (both, value, *weights, angles.cos(), angles.sin())]
    return [made[0][:, :4], made[0][:, 4:], made[1], *(made[2:4] if norms else (None, None)), *made[4:], 1e-6]


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("norms", [True, False])
def test_both_operators_keep_the_rules_of_operators(norms: bool) -> None:
    given = inputs("cpu", torch.float32, norms=norms)
    sizes = (torch.tensor([0, 20, 37], dtype=torch.int32), 20, 0.125, 0, "varlen")
    leaves = [x.requires_grad_() if isinstance(x, Tensor) and i < 5 else x for i, x in enumerate(given)]
    torch.library.opcheck(rotary.rotary_attention, (*leaves, *sizes))
    out = rotary.rotary_attention(*given, *sizes)
    saved = [x.detach() if isinstance(x, Tensor) else x for x in given[:7]]
    back = (torch.ones_like(out[0]), *saved, *(x.detach() for x in out), given[7], *sizes)
    torch.library.opcheck(rotary.rotary_attention_backward, back)


def test_flops_are_those_of_attention() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        query = torch.empty(512, 4, 64, requires_grad=True)
        key, value = (torch.empty(512, 2, 64, requires_grad=True) for _ in "kv")
        angles = (torch.empty(512, 64), torch.empty(512, 64))
        starts = torch.empty(9, dtype=torch.int32)
        out, *_ = rotary.rotary_attention(query, key, value, None, None, *angles, 0.0, starts, 128, 0.125, 0, "varlen")
        out.sum().backward()
        assert key.grad is not None
        assert key.grad.shape == key.shape
    assert counter.get_total_flops() == (2 + 5) * 512 * 4 * 64 * 128


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compute_what_torch_does_and_the_same_bits_twice(norms: bool, dtype: torch.dtype) -> None:
    query, key, value, *rotation = inputs("cuda", dtype, norms=norms)
    grads = tuple(torch.randn(37, 4, 64, device="cuda").to(dtype) for _ in "qkv")
    exact = [x.cpu().double() if isinstance(x, Tensor) else x for x in rotation]
    wide = [x.cpu().double() for x in (query, key)]
    expected = [*rotary.rotate(*wide, exact), *rotary.rotate_back(tuple(g.cpu().double() for g in grads), *wide, exact)]
    found = [*rotary.rotate(query, key, rotation), *rotary.rotate_back(grads, query, key, rotation)]
    again = [*rotary.rotate(query, key, rotation), *rotary.rotate_back(grads, query, key, rotation)]
    for one, other, right in zip(found, again, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.cpu() - right).norm() <= (3e-3 if one.dtype == torch.bfloat16 else 1e-6) * right.norm()
    repeats = rotary.repeated(key, value, 3)
    assert all(torch.equal(x, y.repeat_interleave(3, 1)) for x, y in zip(repeats, (key, value), strict=True))
