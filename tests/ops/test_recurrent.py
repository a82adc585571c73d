"""The gated delta rule as one operator, against its definition, position by position and document by document."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from sftkit.ops import recurrent
from sftkit.ops.recurrent import SCAN_CHUNK, _segments, fla_unsupported_reason, gated_delta_rule, normalized

ROWS = [[3, 40, 70, 1, 36], [150]]
"Lengths of documents: some in one chunk, some over its border, one over three chunks."
LENGTHS = [length for row in ROWS for length in row]
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
STARTS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)


def inputs(heads: int, value_heads: int, dtype: torch.dtype = torch.float64, sizes: tuple[int, int] = (8, 6)) -> list:
    """Query, key, value, decay and beta; some decays are as good as 0, some as good as 1."""
    generator = torch.Generator().manual_seed(0)
    rows, length = POSITIONS.shape
    query, key = (torch.randn(rows, length, heads, sizes[0], generator=generator, dtype=dtype) for _ in range(2))
    value = torch.randn(rows, length, value_heads, sizes[1], generator=generator, dtype=dtype)
    decay, beta = (torch.rand(rows, length, value_heads, generator=generator, dtype=dtype) for _ in range(2))
    return [normalized(query).to(dtype), normalized(key).to(dtype), value, -20 * decay**3, beta]


def of_one_document(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    groups = value.shape[2] // query.shape[2]
    query, key = query.repeat_interleave(groups, 2) * query.shape[-1] ** -0.5, key.repeat_interleave(groups, 2)
    state = value.new_zeros(1, value.shape[2], key.shape[-1], value.shape[-1])
    out = []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        read = (state * key[:, t, :, :, None]).sum(-2)
        state = state + key[:, t, :, :, None] * ((value[:, t] - read) * beta[:, t, :, None])[:, :, None]
        out.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1)


def document_by_document(given: list) -> Tensor:
    rows = []
    for i, lengths in enumerate(ROWS):
        parts = zip(*(x[i : i + 1].split(lengths, 1) for x in given), strict=True)
        rows.append(torch.cat([of_one_document(*part) for part in parts], 1))
    return torch.cat(rows)


@pytest.mark.parametrize(("heads", "value_heads"), [(2, 2), (1, 3)])
def test_output_and_gradients_are_those_of_each_document_alone(heads: int, value_heads: int) -> None:
    given = [x.requires_grad_() for x in inputs(heads, value_heads)]
    out, *_ = gated_delta_rule(*given, POSITIONS, "torch")
    wanted = document_by_document(given)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    found, expected = (torch.autograd.grad((x * weight).sum(), given) for x in (out, wanted))
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-10)


def test_in_fp32_decays_of_other_documents_cost_no_precision() -> None:
    wanted = document_by_document(inputs(2, 2))
    out, *_ = gated_delta_rule(*(x.float() for x in inputs(2, 2)), POSITIONS, "torch")
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_document_does_not_see_its_neighbours_nor_move_their_gradients() -> None:
    """To the last bit, forwards and backwards, though another document fills most of a chunk."""

    def computed(given: list, weight: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in given]
        out, *_ = gated_delta_rule(*given, POSITIONS, "torch")
        return out, *torch.autograd.grad((out * weight).sum(), given)

    given = inputs(2, 2, torch.float32)
    other = [x.clone() for x in given]
    for x in other:
        x[0, 3:43] = x[0, 3:43] * -1.3 if x.ndim == 4 else x[0, 3:43] * 0.1
    weight = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(1))
    changed = weight.clone()
    changed[0, 3:43] *= 2
    apart = torch.ones(POSITIONS.shape, dtype=torch.bool)
    apart[0, 3:43] = False
    for before, after in zip(computed(given, weight), computed(other, changed), strict=True):
        assert torch.equal(before[apart], after[apart])
        assert not torch.equal(before[~apart], after[~apart])


def test_the_operator_is_registered_completely() -> None:
    given = [x.requires_grad_() for x in inputs(1, 2)]
    torch.library.opcheck(gated_delta_rule, (*given, POSITIONS, "torch"))


def test_chunks_of_documents_are_numbered_without_asking_the_device() -> None:
    """All chunks of all documents, in order; the places behind them name a document of no length."""
    slots = torch.cat([STARTS, STARTS[-1:], STARTS[-1:]])
    total = int(STARTS[-1])
    found = _segments(slots, total)
    lengths = found["cu_seqlens"].diff()
    real = [(n, chunk) for n, length in enumerate(LENGTHS) for chunk in range(-(-length // SCAN_CHUNK))]
    indices = [tuple(pair) for pair in found["chunk_indices"].tolist()]
    assert indices[: len(real)] == real
    assert len(indices) == total // SCAN_CHUNK + len(slots) - 1
    assert all(lengths[document] == 0 and chunk == 0 for document, chunk in indices[len(real) :])


@pytest.mark.parametrize(("error", "reason"), [(0.01, None), (0.54, "54% off"), (float("nan"), "wrong gradients")])
def test_kernels_are_taken_only_if_their_gradients_are_right(
    monkeypatch: pytest.MonkeyPatch, error: float, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for name in ("fla", "fla.ops", "fla.ops.common"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(recurrent, "_largest_error", lambda *_: error)
    found = recurrent.fla_unsupported_reason.__wrapped__(2, 4, 128, 128)
    assert found is None if reason is None else reason in found


def test_each_kernel_gets_the_measured_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = SimpleNamespace(configs=["a", "b"])
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(Config=lambda kwargs, **named: (kwargs, named)))
    monkeypatch.setattr(recurrent, "autotuners", lambda: {"chunk_fwd_kernel_o": tuner, "new": SimpleNamespace()})
    recurrent.use_measured_settings()
    assert tuner.configs == [({"BK": 64, "BV": 64}, {"num_warps": 4, "num_stages": 3})]


@pytest.mark.gpu
def test_the_kernels_of_flash_linear_attention_compute_the_same() -> None:
    if reason := fla_unsupported_reason(2, 4, 128, 128):
        pytest.skip(f"flash-linear-attention {reason}")
    given = [x.cuda() for x in inputs(2, 4, torch.float32, (128, 128))]
    exact = [x.clone().requires_grad_() for x in given]
    rounded = [(x if x is given[3] else x.bfloat16()).clone().requires_grad_() for x in given]
    wanted, *_ = gated_delta_rule(*exact, POSITIONS.cuda(), "torch")
    out, *_ = gated_delta_rule(*rounded, STARTS.cuda(), "fla")
    weight = torch.randn(out.shape, device="cuda")
    found, expected = (torch.autograd.grad((o * weight).sum(), x) for o, x in ((out, rounded), (wanted, exact)))
    for ours, theirs in zip((out, *found), (wanted, *expected), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    torch.library.opcheck(
        gated_delta_rule, (*rounded, STARTS.cuda(), "fla"), test_utils=("test_schema", "test_faketensor")
    )
