"""Matrices in NF4 hold the bits that the format says, and products with them are those of the dequantized matrix."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from sftkit.models.files import NF4_BYTES
from sftkit.ops.nf4 import QUANTILES, Nf4, dequantize, nf4_linear, quantize, tables

HOST = torch.device("cpu")


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (0.02 * torch.randn(rows, columns, generator=generator)).to(dtype)


def plain(weight: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the 4-bit numbers and the magnitudes of blocks as the paper writes them, one element at a time."""
    flat = weight.flatten().tolist()
    codes, magnitudes = [], []
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        largest = max(map(abs, block))
        magnitudes.append(largest)
        codes += [min(range(16), key=lambda i, x=x / largest: abs(QUANTILES[i] - x)) for x in block]
    numbers = tables(HOST)[1].tolist()
    offset = math.fsum(magnitudes) / len(magnitudes)
    rests = [value - offset for value in magnitudes]
    stored = []
    for start in range(0, len(rests), 256):
        group = rests[start : start + 256]
        scale = max(map(abs, group))
        stored += [min(numbers, key=lambda number, x=x / scale: abs(number - x)) * scale + offset for x in group]
    return codes, stored


@pytest.mark.parametrize("shape", [(128, 192), (300, 64), (7, 34), (3, 16384)])
def test_bits_are_those_of_the_paper_written_plainly(shape: tuple[int, int]) -> None:
    weight = drawn(*shape)
    matrix = quantize(weight)
    codes, magnitudes = plain(weight)
    found = torch.stack([matrix.packed >> 4, matrix.packed & 15], -1).flatten().tolist()
    assert found == codes
    expected = [QUANTILES[code] * magnitudes[i // 64] for i, code in enumerate(codes)]
    torch.testing.assert_close(dequantize(matrix, torch.float32).flatten(), torch.tensor(expected), rtol=1e-5, atol=0)


def test_bytes_computed_by_hand() -> None:
    weight = torch.tensor([*(2 * q for q in QUANTILES), *([0.0] * 48), *([-0.5] * 64)]).view(2, 64)
    matrix = quantize(weight)
    assert matrix.packed[0].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF, *([0x77] * 24)]
    assert matrix.packed[1].tolist() == [0x00] * 32
    # Magnitudes 2 and 0.5 are 1.25 + 0.75 and 1.25 - 0.75; there is 1, and no -1 but -0.9929688.
    assert matrix.absmax.tolist() == [255, 0]
    assert matrix.absmax_scale.tolist() == [0.75]
    assert matrix.absmax_offset.item() == 1.25
    assert torch.equal(dequantize(matrix, torch.float32)[0], weight[0])
    torch.testing.assert_close(dequantize(matrix, torch.float32)[1], torch.full((64,), -1.25 + 0.75 * 0.9929688))


def test_the_256_numbers_are_those_of_bitsandbytes() -> None:
    """The digest is of the table that its create_dynamic_map() returns."""
    numbers = tables(HOST)[1]
    digest = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
    assert hashlib.sha256(numbers.numpy().tobytes()).hexdigest() == digest
    assert numbers.shape == (256,)


def test_a_quantized_matrix_is_near_takes_little_room_and_stays_when_quantized_again() -> None:
    weight = drawn(512, 1024)
    matrix = quantize(weight)
    dense = dequantize(matrix, torch.bfloat16)
    assert 0.08 < (dense - weight).float().norm() / weight.float().norm() < 0.10
    assert sum(t.nbytes for t in matrix) == NF4_BYTES * weight.numel() + 4  # the offset
    assert torch.equal(quantize(dense).packed, matrix.packed)


def test_a_block_of_zeros_stays_one() -> None:
    weight = drawn(4, 64)
    weight[2] = 0
    dense = dequantize(quantize(weight), torch.float32)
    assert not dense[2].any()
    assert dense.isfinite().all()
    assert not dequantize(quantize(torch.zeros(4, 64)), torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_dequantized_matrix(dtype: torch.dtype) -> None:
    matrix = quantize(drawn(96, 128))
    dense = dequantize(matrix, dtype)
    x = drawn(2 * 5, 128, dtype).view(2, 5, 128)
    grad = drawn(10, 96, dtype).view(2, 5, 96)
    for transposed, given, other in ((False, x, grad), (True, grad, x)):
        found, expected = (given.clone().requires_grad_() for _ in range(2))
        y = nf4_linear(found, *matrix, transposed=transposed)
        right = linear(expected, dense.t() if transposed else dense)
        assert torch.equal(y, right)
        y.backward(other)
        right.backward(other)
        assert torch.equal(found.grad, expected.grad)


def test_the_operator_keeps_the_rules_of_operators_and_counts_its_product() -> None:
    matrix = quantize(drawn(6, 10))
    for transposed, width in ((False, 10), (True, 6)):
        x = torch.randn(3, 4, width, requires_grad=True)
        torch.library.opcheck(nf4_linear, (x, *matrix), {"transposed": transposed})
        with FlopCounterMode(display=False) as counter:
            nf4_linear(x, *matrix, transposed=transposed).sum().backward()
        assert counter.get_total_flops() == 2 * (2 * 12 * 6 * 10)


def test_the_operator_keeps_nothing_but_the_bits_for_its_gradient() -> None:
    matrix = quantize(drawn(64, 128))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nf4_linear(torch.randn(3, 128, requires_grad=True), *matrix)
    assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in matrix)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 4096), (12288, 4096), (7, 34), (300, 64), (1000, 576)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_quantizes_and_dequantizes_to_the_bits_of_the_host(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from sftkit.ops.nf4 import dense_matrix

    weight = drawn(*shape)
    host, on_gpu = quantize(weight), quantize(weight.cuda())
    assert all(torch.equal(one, other.cpu()) for one, other in zip(host, on_gpu, strict=True))
    expected = dequantize(host, dtype)
    assert torch.equal(dense_matrix(on_gpu, dtype).cpu(), expected)
    assert torch.equal(dequantize(on_gpu, dtype).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 4096), (12288, 4096)])
def test_product_and_gradient_on_a_gpu_are_those_of_the_dequantized_matrix_bitwise(shape: tuple[int, int]) -> None:
    matrix = quantize(drawn(*shape).cuda())
    dense = dequantize(matrix, torch.bfloat16)
    found, expected = (torch.randn(2, 1024, shape[1]).bfloat16().cuda().requires_grad_() for _ in range(2))
    with torch.no_grad():
        found.copy_(expected)
    y, right = nf4_linear(found, *matrix), linear(expected, dense)
    assert torch.equal(y, right)
    grad = torch.randn_like(y)
    y.backward(grad)
    right.backward(grad)
    assert torch.equal(found.grad, expected.grad)


@pytest.mark.gpu
def test_a_product_on_a_gpu_holds_one_dense_matrix_at_a_time() -> None:
    matrices = [quantize(drawn(4096, 4096).cuda()) for _ in range(8)]
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = x
    for matrix in matrices:
        y = nf4_linear(y, *Nf4(*matrix))
    y.sum().backward()
    dense = 2 * 4096 * 4096
    assert torch.cuda.max_memory_allocated() - before < 1.2 * dense
