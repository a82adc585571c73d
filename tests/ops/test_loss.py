"""The chunked loss: exact against autograd over full logits, in bounded memory."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import IGNORE
from sftkit.ops import linear_cross_entropy
from sftkit.ops.linear_cross_entropy import Head, LossSums, linear_nll, loss_as_operator

GIB = 1 << 30
OPTIONS = {
    "plain": ({}, None),
    "softcap": ({}, 3.0),
    "z_loss": ({"z_loss": 0.05}, None),
    "label_smoothing": ({"label_smoothing": 0.1}, None),
    "dft": ({"dft": True}, None),
    "dft of capped logits": ({"dft": True, "z_loss": 0.05, "token_metrics": True}, 3.0),
    "all": ({"z_loss": 0.05, "label_smoothing": 0.1, "token_metrics": True}, 3.0),
}
"loss settings and softcap"


def inputs(
    rows: int = 37, width: int = 8, vocab: int = 19, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, head, bias (leaves) and targets, about a third of them IGNORE; logits have a deviation of about 3."""
    generator = torch.Generator(device).manual_seed(0)
    random = {"generator": generator, "device": device, "dtype": torch.float32}
    hidden, head, bias = (
        (torch.randn(shape, **random) * scale).to(dtype).requires_grad_()
        for shape, scale in (((rows, width), 1.0), ((vocab, width), 3 / width**0.5), ((vocab,), 1.0))
    )
    targets = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    targets[torch.rand(rows, **random) < 0.3] = IGNORE
    return hidden, head, bias, targets


def reference(
    hidden: Tensor, head: Tensor, targets: Tensor, options: LossConfig, bias: Tensor | None, softcap: float | None
) -> LossSums:
    """float64 over full logits."""
    logits = hidden.double() @ head.double().t() + (0.0 if bias is None else bias.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = targets != IGNORE
    smoothed = F.cross_entropy(
        logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=options.label_smoothing
    )
    if options.dft:
        log_p = logits.log_softmax(1)[kept].gather(1, targets[kept, None])
        smoothed = -(log_p.detach().exp() * log_p).sum()
    loss = smoothed + options.z_loss * logits.logsumexp(1)[kept].square().sum()
    nll = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum").detach()
    log_p = logits.detach().log_softmax(1)[kept]
    zero = torch.zeros((), dtype=torch.float64, device=hidden.device)
    correct = (logits.argmax(1) == targets).sum().double() if options.token_metrics else zero
    entropy = -(log_p.exp() * log_p).sum() if options.token_metrics else zero
    each = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none").detach()
    return LossSums(loss, nll, correct, entropy, each)


def same(one: LossSums, other: LossSums) -> bool:
    """Whether all values are equal, bit for bit."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [g.double() for g in torch.autograd.grad(loss, leaves)]


def assert_equal_to_reference(
    leaves: tuple[Tensor, Tensor, Tensor, Tensor],
    options: LossConfig,
    softcap: float | None,
    rtol: float = 1e-10,
    gradient_error: float = 1e-10,
) -> None:
    """Sums to `rtol`, every gradient to `gradient_error` of its norm. Not in bf16: accuracy and the nll of a row, since
    its logits are rounded and often tie."""
    hidden, head, bias, targets = leaves
    got = linear_nll(hidden, Head(head, bias, softcap), targets, options)
    exact = reference(hidden, head, targets, options, bias, softcap)
    for name, value, expected in zip(LossSums._fields, got, exact, strict=True):
        if name in ("correct", "each") and hidden.dtype == torch.bfloat16:
            continue
        torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")
    pairs = zip(gradients(got.loss, hidden, head, bias), gradients(exact.loss, hidden, head, bias), strict=True)
    for name, (gradient, expected) in zip(("hidden", "head", "bias"), pairs, strict=True):
        error = (gradient - expected).norm() / expected.norm()
        assert error <= gradient_error, f"gradient of {name} is off by {error:.1e} of its norm"
    assert not any(value.requires_grad for value in got[1:])


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_autograd_over_full_logits(name: str, chunk: int) -> None:
    settings, softcap = OPTIONS[name]
    assert_equal_to_reference(inputs(), LossConfig(chunk_tokens=chunk, **settings), softcap)


def assert_weights_repeat_rows(
    leaves: tuple[Tensor, Tensor, Tensor, Tensor], name: str, chunk: int, rtol: float, gradient_error: float
) -> None:
    """A row of weight n adds what n rows add, in sums and gradients; 0 is none, and `each` is the row's whole share."""
    hidden, head, bias, targets = leaves
    settings, softcap = OPTIONS[name]
    options = LossConfig(chunk_tokens=chunk, **settings)
    times = torch.arange(len(targets), device=targets.device) % 4
    weighted = linear_nll(hidden, Head(head, bias, softcap), targets, options, times.float())
    repeated = linear_nll(
        hidden.repeat_interleave(times, 0), Head(head, bias, softcap), targets.repeat_interleave(times), options
    )
    for got, wanted in zip(weighted[:4], repeated[:4], strict=True):
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=0.0)
    torch.testing.assert_close(weighted.each.sum(), weighted.nll, rtol=rtol, atol=0.0)
    assert not weighted.each[times == 0].any()
    ours, theirs = (gradients(found.loss, hidden, head, bias) for found in (weighted, repeated))
    for gradient, expected in zip(ours, theirs, strict=True):
        assert float((gradient - expected).norm() / expected.norm()) <= gradient_error


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_of_weight_n_counts_as_n_rows(name: str) -> None:
    assert_weights_repeat_rows(inputs(), name, 5, 1e-12, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_a_row_of_weight_n_counts_as_n_rows(name: str, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    leaves = inputs(rows=300, width=64, vocab=9000, dtype=dtype, device="cuda")
    rtol, gradient_error = (1e-5, 1e-4) if dtype == torch.float32 else (1e-4, 0.02)
    assert_weights_repeat_rows(leaves, name, 128, rtol, gradient_error)


def test_without_bias_and_with_fp32_inputs() -> None:
    hidden, head, _, targets = inputs(dtype=torch.float32)
    options = LossConfig(chunk_tokens=8)
    got, exact = linear_nll(hidden, Head(head), targets, options), reference(hidden, head, targets, options, None, None)
    assert {value.dtype for value in got} == {torch.float32}
    torch.testing.assert_close(got.loss.double(), exact.loss, rtol=1e-6, atol=0)
    pairs = zip(gradients(got.loss, hidden, head), gradients(exact.loss, hidden, head), strict=True)
    for gradient, expected in pairs:
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scaled_logits_have_the_loss_and_gradients_of_a_scaled_head(dtype: torch.dtype, operator: bool) -> None:
    hidden, head, bias, targets = inputs(dtype=dtype)
    scale, softcap = 0.3, 3.0
    options = LossConfig(chunk_tokens=5, z_loss=0.05)
    exact = reference(hidden, head.double() * scale, targets, options, bias.double() * scale, softcap)
    with loss_as_operator() if operator else nullcontext():
        got = linear_nll(hidden, Head(head, bias, softcap, scale=scale), targets, options)
        own = gradients(got.loss, hidden, head, bias)
    error = 1e-10 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(got.loss.double(), exact.loss, rtol=error, atol=0)
    for ours, theirs in zip(own, gradients(exact.loss, hidden, head, bias), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < error


def test_gradcheck_across_chunks_with_every_option() -> None:
    hidden, head, bias, targets = inputs(rows=7, width=3, vocab=5)
    settings, softcap = OPTIONS["all"]

    def loss(hidden: Tensor, head: Tensor, bias: Tensor) -> Tensor:
        options = LossConfig(chunk_tokens=3, **settings)
        return linear_nll(hidden, Head(head, bias, softcap), targets, options).loss

    assert torch.autograd.gradcheck(loss, (hidden, head, bias))


@pytest.mark.parametrize("chunk", [5, 64])
def test_ignored_rows_count_nothing_and_have_zero_gradients(chunk: int) -> None:
    hidden, head, _, targets = inputs()
    ignored = targets == IGNORE
    options = LossConfig(chunk_tokens=chunk, z_loss=0.1, label_smoothing=0.1, token_metrics=True)
    clean = linear_nll(hidden, Head(head), targets, options)
    with torch.no_grad():
        dirty = linear_nll(hidden.masked_fill(ignored[:, None], torch.nan), Head(head), targets, options)
    assert same(dirty, clean)
    (d_hidden,) = gradients(clean.loss, hidden)
    assert ignored.any()
    assert torch.equal(d_hidden[ignored], torch.zeros_like(d_hidden[ignored]))


@pytest.mark.parametrize("rows", [0, 11])
@pytest.mark.parametrize("settings", [{}, OPTIONS["all"][0]])
def test_no_rows_or_no_target_at_all_is_zero_not_nan(rows: int, settings: dict[str, float]) -> None:
    hidden, head, bias, targets = inputs(rows=rows, dtype=torch.float32)
    sums = linear_nll(hidden, Head(head, bias), targets.fill_(IGNORE), LossConfig(chunk_tokens=4, **settings))
    assert all(torch.equal(value, torch.zeros_like(value)) for value in sums)
    assert sums.each.shape == (rows,)
    for gradient in gradients(sums.loss, hidden, head, bias):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_accuracy_and_entropy_are_measured_only_when_asked() -> None:
    hidden, head, _, targets = inputs(vocab=6)
    asked = linear_nll(hidden, Head(head), targets, LossConfig(chunk_tokens=8, token_metrics=True))
    logits, kept = hidden @ head.t(), targets != IGNORE
    assert 0 < asked.correct < kept.sum()
    assert asked.correct == (logits.argmax(1) == targets).sum()
    exact = torch.distributions.Categorical(logits=logits.detach()[kept]).entropy().sum()
    torch.testing.assert_close(asked.entropy, exact, rtol=1e-12, atol=0)
    plain = linear_nll(hidden, Head(head), targets, LossConfig(chunk_tokens=8))
    assert (plain.correct, plain.entropy) == (0.0, 0.0)
    assert plain.nll == asked.nll


def test_tied_head_adds_the_gradients_of_embedding_and_head() -> None:
    _, head, _, _ = inputs()
    ids, targets = torch.arange(1, 19), torch.arange(18)
    options = LossConfig(chunk_tokens=5)
    (got,) = gradients(linear_nll(F.embedding(ids, head).tanh(), Head(head), targets, options).loss, head)
    (exact,) = gradients(reference(F.embedding(ids, head).tanh(), head, targets, options, None, None).loss, head)
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)


def test_gradients_scale_with_the_incoming_gradient() -> None:
    hidden, head, bias, targets = inputs()
    loss = linear_nll(hidden, Head(head, bias), targets, LossConfig(chunk_tokens=8)).loss
    once = torch.autograd.grad(loss, (hidden, head, bias), retain_graph=True)
    thrice = torch.autograd.grad(loss * 3, (hidden, head, bias))
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(b, 3 * a, rtol=1e-14, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scaling_does_not_round_the_scale_to_bf16(device: str) -> None:
    hidden, head, _, targets = inputs(dtype=torch.bfloat16, device=device)
    scale = torch.tensor(1 / 3, device=device)  # 0.2 % away from the nearest bf16
    loss = linear_nll(hidden, Head(head), targets, LossConfig()).loss
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * scale, hidden)
    assert torch.equal(scaled, (once.float() * scale).to(torch.bfloat16))
    assert not torch.equal(scaled, once * scale.to(torch.bfloat16))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float64, "cpu"),
        (torch.bfloat16, "cpu"),
        *(pytest.param(d, "cuda", marks=pytest.mark.gpu) for d in (torch.float32, torch.bfloat16)),
    ],
)
def test_rows_of_their_own_stand_in_for_those_of_a_frozen_head(dtype: torch.dtype, device: str, count: int) -> None:
    scale = 1.0 if count == 1 else 0.5
    hidden, head, _, targets = inputs(dtype=dtype, device=device)
    ids = torch.tensor([4, 11, 7][:count], device=device)
    targets[:6] = ids.repeat(6)[:6]
    before = head.detach().clone()
    rows = torch.randn(count, 8, dtype=torch.promote_types(dtype, torch.float32), device=device, requires_grad=True)
    options = LossConfig(chunk_tokens=10, z_loss=0.05)
    found = linear_nll(hidden, Head(head.detach(), own_ids=ids, own_rows=rows, scale=scale), targets, options)
    whole = before.index_copy(0, ids, rows.to(dtype))
    expected = reference(hidden, whole * scale, targets, options, None, None)
    error = 1e-10 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=error, atol=0)
    # As a step: scaled, and with the rows in fp32 whatever the hidden states are.
    scaled = torch.autograd.grad(found.loss * 0.25, (hidden, rows))
    assert scaled[1].dtype == rows.dtype
    for ours, theirs in zip(scaled, gradients(expected.loss * 0.25, hidden, rows), strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < error
    assert torch.equal(head, before)
    with pytest.raises(RuntimeError), torch.no_grad():
        linear_nll(hidden[:, :3], Head(head.detach(), own_ids=ids, own_rows=rows), targets, options)
    assert torch.equal(head, before), "also after an error"


def test_only_a_backward_pass_outside_of_graphs_may_scale_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype, *, traced: bool) -> Tensor | None:
        asked.append(traced)
        return None if gradient is None else gradient * scale

    monkeypatch.setattr(linear_cross_entropy, "_scaled", scaled)
    hidden, head, _, targets = inputs()
    linear_nll(hidden, Head(head), targets, LossConfig()).loss.backward()
    with linear_cross_entropy.loss_as_operator():
        linear_nll(hidden, Head(head), targets, LossConfig()).loss.backward()
    assert True not in asked[: len(asked) // 2]
    assert False not in asked[len(asked) // 2 :]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [19, 4099, 9000])
def test_on_cuda_the_heads_gradient_is_scaled_as_on_a_cpu(vocab: int) -> None:
    hidden, head, bias, targets = inputs(vocab=vocab, dtype=torch.float32, device="cuda")
    scale = torch.tensor(1 / 3, device="cuda")
    loss = linear_nll(hidden, Head(head, bias), targets, LossConfig()).loss
    once = torch.autograd.grad(loss, (head, bias), retain_graph=True)
    scaled = torch.autograd.grad(loss * scale, (head, bias))
    for a, b in zip(once, scaled, strict=True):
        assert torch.equal(b.cpu(), a.cpu() * scale.cpu())


def test_frozen_inputs_get_no_gradient_and_none_is_computed() -> None:
    hidden, head, bias, targets = inputs()
    for trained in (hidden, head, bias):
        leaves = [t.detach().requires_grad_(t is trained) for t in (hidden, head, bias)]
        with Allocations() as made:
            linear_nll(leaves[0], Head(leaves[1], leaves[2]), targets, LossConfig(chunk_tokens=8)).loss.backward()
        assert (head.shape in made.shapes) is (trained is head)
        assert [leaf.grad is not None for leaf in leaves] == [t is trained for t in (hidden, head, bias)]
        (exact,) = gradients(reference(hidden, head, targets, LossConfig(), bias, None).loss, trained)
        (got,) = (leaf.grad for leaf in leaves if leaf.grad is not None)
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)


class Allocations(TorchDispatchMode):
    """The shapes of everything that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.shapes += [r.shape for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, Tensor)]
        return result


@pytest.mark.parametrize("name", ["plain", "all"])
def test_logits_of_more_than_a_chunk_never_exist(name: str) -> None:
    hidden, head, bias, targets = inputs(rows=50, vocab=128)
    settings, softcap = OPTIONS[name]
    with Allocations() as seen:
        linear_nll(hidden, Head(head, bias, softcap), targets, LossConfig(chunk_tokens=8, **settings)).loss.backward()
    of_vocabulary_width = [shape[0] for shape in seen.shapes if len(shape) == 2 and shape[1] == 128]
    assert of_vocabulary_width
    assert max(row for row in of_vocabulary_width if row != hidden.shape[1]) <= 8  # head.t() is [width, V]


def test_without_gradients_the_sums_are_the_same_and_nothing_is_kept() -> None:
    hidden, head, bias, targets = inputs()
    options = LossConfig(chunk_tokens=8, **OPTIONS["all"][0])
    trained = linear_nll(hidden, Head(head, bias, 3.0), targets, options)
    assert trained.loss.grad_fn is not None
    with torch.no_grad(), Allocations() as seen:
        measured = linear_nll(hidden, Head(head, bias, 3.0), targets, options)
    frozen = linear_nll(hidden.detach(), Head(head.detach(), bias.detach(), 3.0), targets, options)
    assert same(trained, measured)
    assert same(measured, frozen)
    assert all(value.grad_fn is None for value in (*measured, *frozen))
    assert not {hidden.shape, head.shape} & set(seen.shapes)  # neither gradient is ever made


def test_bf16_is_within_its_rounding_of_the_exact_gradients() -> None:
    leaves = inputs(rows=200, width=32, vocab=150, dtype=torch.bfloat16)
    # Logits of about 10 are rounded to 1/32, which moves a probability by up to 2 %; sums of many are far closer.
    options = LossConfig(chunk_tokens=64, **OPTIONS["all"][0])
    assert_equal_to_reference(leaves, options, None, rtol=2e-3, gradient_error=0.01)
    sums = linear_nll(leaves[0], Head(leaves[1], leaves[2]), leaves[3], options)
    assert {value.dtype for value in sums} == {torch.float32}
    assert {g.dtype for g in torch.autograd.grad(sums.loss, leaves[:3])} == {torch.bfloat16}


def test_the_heads_gradient_is_accumulated_in_fp32_over_many_bf16_chunks() -> None:
    # One target token over and over: 512 equal shares, by which a bf16 total stops growing after about 2**8.
    hidden = torch.ones(512, 4, dtype=torch.bfloat16)
    head = torch.zeros(16, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64)
    linear_nll(hidden, Head(head), targets, LossConfig(chunk_tokens=1)).loss.backward()
    share = torch.full((16, 4), 1 / 16)
    share[0] -= 1.0
    in_bf16 = torch.zeros(16, 4, dtype=torch.bfloat16)
    for _ in range(512):
        in_bf16 += share
    exact = 512 * share
    assert torch.equal(head.grad.float(), exact)
    assert (in_bf16.float() - exact).abs().max() > 0.3 * exact.abs().max()


def test_autocast_changes_nothing() -> None:
    hidden, head, bias, targets = inputs(dtype=torch.float32)
    plain = linear_nll(hidden, Head(head, bias), targets, LossConfig())
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_nll(hidden, Head(head, bias), targets, LossConfig())
    assert same(plain, cast)
    assert [g.dtype for g in torch.autograd.grad(cast.loss, (hidden, head))] == [torch.float32] * 2


@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
def test_a_compiled_caller_keeps_the_loss_out_of_its_graph() -> None:
    hidden, head, _, targets = inputs()
    graphs: list[str] = []

    def backend(graph, _):  # type: ignore[no-untyped-def]
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(
        lambda h: linear_nll(h * 2, Head(head), targets, LossConfig(chunk_tokens=8)).loss, backend=backend
    )
    compiled(hidden).backward()
    (exact,) = gradients(reference(hidden * 2, head, targets, LossConfig(), None, None).loss, hidden)
    torch.testing.assert_close(hidden.grad, exact, rtol=1e-10, atol=1e-12)
    assert not any("mm" in code for code in graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("vocab", "width"), [(50257, 64), (151936, 64), (1000, 32)])
@pytest.mark.parametrize("name", OPTIONS)
def test_on_cuda_triton_equals_float64(name: str, vocab: int, width: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    leaves = inputs(rows=300, width=width, vocab=vocab, dtype=dtype, device="cuda")
    settings, softcap = OPTIONS[name]
    options = LossConfig(chunk_tokens=128, **settings)
    rtol, gradient_error = (1e-5, 1e-4) if dtype == torch.float32 else (5e-3, 0.02)
    assert_equal_to_reference(leaves, options, softcap, rtol, gradient_error)


@pytest.mark.gpu
def test_on_cuda_rows_past_2_to_the_31_elements_are_addressed() -> None:
    from sftkit.ops.cross_entropy_kernel import cross_entropy_

    rows, vocab = 16384 + 8, 131072  # 4.3 GB of bf16; element 2**31 is in row 16384
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, 7] = 20.0
    targets = torch.full((rows,), 7, device="cuda")
    sums = torch.zeros(4, rows, device="cuda")
    cross_entropy_(logits, targets, sums, LossConfig(), None, gradients=True)
    exact = torch.logsumexp(torch.tensor([20.0] + [0.0] * (vocab - 1), dtype=torch.float64), 0) - 20.0
    assert float(sums[1, -1]) == pytest.approx(float(exact), rel=1e-3, abs=1e-5)
    assert float(sums[1, 0]) == pytest.approx(17 * 0.6931471805599453, rel=1e-6)
    assert float(logits[-1, 7]) == pytest.approx(float((-exact).exp() - 1), abs=1e-5)


@pytest.mark.gpu
def test_on_cuda_peak_memory_is_one_chunk_of_logits_and_the_heads_gradient() -> None:
    hidden, head, _, targets = inputs(rows=16384, width=1024, vocab=151936, dtype=torch.bfloat16, device="cuda")
    options = LossConfig(chunk_tokens=4096)
    linear_nll(hidden[:256], Head(head), targets[:256], options).loss.backward()  # kernels and cuBLAS workspaces
    head.grad = hidden.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_nll(hidden, Head(head), targets, options).loss.backward()
    returned = sum(t.grad.numel() * t.grad.element_size() for t in (hidden, head))
    assert torch.cuda.max_memory_allocated() - before - returned < 2 * GIB


@pytest.mark.gpu
def test_on_cuda_there_is_no_host_sync() -> None:
    hidden, head, bias, targets = inputs(rows=300, vocab=1000, dtype=torch.bfloat16, device="cuda")
    settings, softcap = OPTIONS["all"]
    options = LossConfig(chunk_tokens=128, **settings)
    linear_nll(hidden, Head(head, bias, softcap), targets, options).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_nll(hidden, Head(head, bias, softcap), targets, options).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_on_cuda_the_result_is_the_same_every_time() -> None:
    hidden, head, _, targets = inputs(rows=700, width=256, vocab=32000, dtype=torch.bfloat16, device="cuda")
    runs = []
    for _ in range(3):
        sums = linear_nll(hidden, Head(head), targets, LossConfig(chunk_tokens=256))
        runs.append([sums.nll, *torch.autograd.grad(sums.loss, (hidden, head))])
    assert all(torch.equal(a, b) for one, two in pairwise(runs) for a, b in zip(one, two, strict=True))
