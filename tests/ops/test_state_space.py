"""ops.state_space: Mamba2's recurrence in chunks, with a new state at the start of every document."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from sftkit.ops.state_space import state_space
from tests.ops.test_short_convolution import distances

HEADS, SIZE, STATES = 4, 3, 5
LIMIT = (0.0, float("inf"))


def inputs(rows: int, length: int, groups: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict:
    """Arguments whose decays range from almost none to almost everything at each step."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    given = {
        "x": normal(rows, length, HEADS, SIZE),
        "dt": normal(rows, length, HEADS),
        "A": -torch.tensor([0.001, 0.1, 2.0, 90.0], dtype=dtype),
        "B": normal(rows, length, groups, STATES),
        "C": normal(rows, length, groups, STATES),
        "D": normal(HEADS),
        "dt_bias": normal(HEADS),
    }
    return {name: value.requires_grad_() for name, value in given.items()}


def alone(given: dict, row: int, start: int, end: int, limit: tuple[float, float]) -> torch.Tensor:
    """What transformers computes from one document by itself, in one chunk."""
    own = {name: value if value.ndim == 1 else value[row : row + 1, start:end] for name, value in given.items()}
    x = own.pop("x")
    return mamba2_chunk_scan(x, **own, chunk_size=end - start, dt_softplus=True, dt_limit=limit)[0]


@pytest.mark.parametrize("limit", [LIMIT, (0.3, 0.9)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 4, 8, 32])
def test_each_document_of_a_row_is_computed_as_transformers_does_it_alone_and_so_are_the_gradients(
    chunk, groups, limit
):
    """Documents within a chunk, that begin or end with one, and that reach over several; padding disturbs nothing."""
    rows = ([3, 1, 8, 2, 7], [16, 4], [21])
    given = inputs(3, 21, groups)
    out = state_space(**given, dt_limit=limit, chunk_size=chunk, starts=distances(*rows))
    assert out.is_contiguous()  # transformers' layers view it
    pairs = [
        (out[row, end - size : end], alone(given, row, end - size, end, limit))
        for row, sizes in enumerate(rows)
        for size, end in zip(sizes, torch.tensor(sizes).cumsum(0).tolist(), strict=True)
    ]
    grads = []
    for side in zip(*pairs, strict=True):
        total = sum((part * part).sum() for part in side)
        grads.append(torch.autograd.grad(total, [*given.values()], retain_graph=True))
    for own, expected in [*pairs, *zip(*grads, strict=True)]:
        torch.testing.assert_close(own, expected, rtol=2e-4, atol=2e-4)


def test_it_is_the_recurrence():
    given = {name: value.detach() for name, value in inputs(1, 11, 1, torch.float64).items()}
    out = state_space(**given, dt_limit=LIMIT, chunk_size=4, starts=distances([5, 6]))
    state = torch.zeros(HEADS, SIZE, STATES, dtype=torch.float64)
    for t in range(11):
        step = F.softplus(given["dt"][0, t] + given["dt_bias"])
        state = torch.zeros_like(state) if t in (0, 5) else state * (step * given["A"]).exp()[:, None, None]
        state = state + step[:, None, None] * given["x"][0, t][:, :, None] * given["B"][0, t, 0]
        read = (state * given["C"][0, t, 0]).sum(-1) + given["D"][:, None] * given["x"][0, t]
        torch.testing.assert_close(out[0, t], read, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [4, 16])
def test_a_document_does_not_change_at_all_if_the_others_do(chunk):
    given = {name: value.detach() for name, value in inputs(1, 15).items()}
    other = {name: value.detach() for name, value in inputs(1, 15, seed=1).items()}
    starts = distances([6, 5, 4])
    before = state_space(**given, dt_limit=LIMIT, chunk_size=chunk, starts=starts)
    for name in ("x", "dt", "B", "C"):
        for part in (slice(6), slice(11, None)):
            given[name][:, part] = 100 * other[name][:, part]
    after = state_space(**given, dt_limit=LIMIT, chunk_size=chunk, starts=starts)
    assert torch.equal(after[:, 6:11], before[:, 6:11])
    assert not torch.equal(after[:, :6], before[:, :6])


def test_gradients_are_the_derivatives():
    given = inputs(1, 7, dtype=torch.float64)
    names, values = zip(*given.items(), strict=True)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, tensors, strict=True))
        return state_space(**named, dt_limit=LIMIT, chunk_size=2, starts=distances([3, 4]))

    assert torch.autograd.gradcheck(function, values)


def test_decays_too_large_for_an_exponential_leave_gradients_finite():
    given = inputs(1, 12)
    with torch.no_grad():
        given["A"].mul_(1e4)
    out = state_space(**given, dt_limit=LIMIT, chunk_size=4, starts=distances([5, 7]))
    grads = torch.autograd.grad(out.square().sum(), [*given.values()])
    assert all(torch.isfinite(grad).all() for grad in (out, *grads))


def test_in_bf16_the_result_is_as_close_as_its_rounding():
    given = {name: value.detach().bfloat16() for name, value in inputs(2, 40).items()}
    starts = distances([17, 23], [40])
    own = state_space(**given, dt_limit=LIMIT, chunk_size=8, starts=starts)
    exact = state_space(**{k: v.double() for k, v in given.items()}, dt_limit=LIMIT, chunk_size=8, starts=starts)
    assert own.dtype == torch.bfloat16
    assert float((own - exact).norm() / exact.norm()) < 2**-8
