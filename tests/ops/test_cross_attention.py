"""Cross attention: the boundaries of encoded inputs, as a mask and as starts, say the same; kernels agree on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sftkit.ops import flash
from sftkit.ops.attention import attend
from sftkit.ops.flex import input_boundaries

DOC_IDS = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0], [-1] * 8, [0, 1, 2, 3, 3, 3, 3, -1]])
PLACES, LENGTH = 4, 5


def own_of(mask: torch.Tensor) -> torch.Tensor:
    """The input that each position sees: int64 [B, T]; all of one and nothing else, or an error."""
    seen = mask[:, 0].unflatten(-1, (PLACES, LENGTH))
    assert torch.equal(seen.any(-1), seen.all(-1))
    assert (seen.any(-1).sum(-1) == 1).all()
    return seen.any(-1).int().argmax(-1)


def test_each_caption_sees_all_of_its_own_input_and_padding_that_of_the_caption_before() -> None:
    mask = input_boundaries(DOC_IDS, PLACES, LENGTH, "reference")
    assert mask is not None
    assert mask.shape == (4, 1, 8, PLACES * LENGTH)
    expected = [[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8, [0] * 8, [0, 1, 2, 3, 3, 3, 3, 3]]
    assert own_of(mask).tolist() == expected


@pytest.mark.parametrize("backend", ["varlen", "fa4"])
def test_starts_of_queries_say_the_same_as_the_mask(backend: str) -> None:
    mask = input_boundaries(DOC_IDS, PLACES, LENGTH, "reference")
    starts = input_boundaries(DOC_IDS, PLACES, LENGTH, backend)
    assert mask is not None
    assert starts is not None
    assert (starts.dtype, starts.shape) == (torch.int32, (1, 1, 1, 4 * PLACES + 1))
    edges = starts.flatten().tolist()
    assert edges[0] == 0
    assert edges[-1] == DOC_IDS.numel()
    assert edges == sorted(edges)
    place = torch.repeat_interleave(torch.arange(4 * PLACES), starts.flatten().diff())
    assert torch.equal(place.view(4, 8) % PLACES, own_of(mask))
    assert torch.equal(place.view(4, 8) // PLACES, torch.arange(4)[:, None].expand(4, 8))


def test_one_input_a_row_needs_no_boundaries_unless_some_of_it_is_filling() -> None:
    assert input_boundaries(DOC_IDS, 1, LENGTH, "reference") is None
    visible = torch.tensor([[True] * 3 + [False] * 2] * 4)
    mask = input_boundaries(torch.zeros_like(DOC_IDS), 1, LENGTH, "varlen", visible)
    assert mask is not None
    assert mask[:, 0].all(1).tolist() == visible.tolist()


class Crossing(torch.nn.Module):
    is_causal = False


def qkv(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 2, 8, 64), (4, 2, PLACES * LENGTH, 64), (4, 2, PLACES * LENGTH, 64)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def test_a_masked_input_is_as_if_it_were_not_there_and_gets_no_gradient() -> None:
    query, key, value = qkv("cpu", torch.float64)
    mask = input_boundaries(DOC_IDS, PLACES, LENGTH, "reference")
    out, _ = attend(Crossing(), query, key, value, mask)
    alone = torch.nn.functional.scaled_dot_product_attention(query[:1, :, 3:5], key[:1, :, 5:10], value[:1, :, 5:10])
    torch.testing.assert_close(out[:1, 3:5], alone.transpose(1, 2))
    out.sum().backward()
    assert key.grad is not None
    assert not key.grad[1, :, LENGTH:].any()  # the second row has one caption


def test_its_flops_are_counted() -> None:
    query, key = torch.empty(32, 2, 64, device="meta"), torch.empty(80, 2, 64, device="meta")
    starts = torch.empty(17, dtype=torch.int32, device="meta")
    with FlopCounterMode(display=False) as counter:
        flash.document_attention(query, key, key, starts, starts, 8, 0.125, 0, "varlen", causal=False)
    assert counter.get_total_flops() == 2 * 32 * 2 * (64 + 64) * 5


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernel_gives_what_the_mask_gives(compiled: bool) -> None:
    doc_ids = DOC_IDS.cuda()
    exact, given = qkv("cuda", torch.float64), qkv("cuda", torch.bfloat16)
    wanted, _ = attend(Crossing(), *exact, input_boundaries(doc_ids, PLACES, LENGTH, "reference"))
    call = torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend
    got, _ = call(Crossing(), *given, input_boundaries(doc_ids, PLACES, LENGTH, "varlen"))
    grad = torch.randn_like(wanted)
    wanted.backward(grad)
    got.backward(grad.to(got.dtype))
    for mine, theirs in [(got, wanted), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))]:
        assert mine is not None
        assert theirs is not None
        assert float(((mine.double() - theirs).norm() / theirs.norm()).detach()) < 0.02
