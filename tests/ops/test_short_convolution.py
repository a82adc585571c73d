"""ops.short_convolution: a depthwise causal convolution that stays inside each document of a row."""

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sftkit.ops.short_convolution import convolved, convolved_backward, short_convolution

CHANNELS = 6
ACTIVATIONS = [None, "silu", "swish"]


def distances(*rows: list[int]) -> torch.Tensor:
    """The distance of each position from its document's first; the positions after the documents of a row are padding."""
    longest = max(map(sum, rows))
    padded = [[*sizes, *[1] * (longest - sum(sizes))] for sizes in rows]
    return torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in padded])


def convolution(kernel: int, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Conv1d:
    torch.manual_seed(kernel)
    return nn.Conv1d(CHANNELS, CHANNELS, kernel, groups=CHANNELS, bias=bias, padding=kernel - 1, dtype=dtype)


def alone(conv: nn.Conv1d, x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """What the module computes from one document [L, C] by itself, as transformers calls it."""
    out = conv(x.T[None])[..., : len(x)]
    return (out if activation is None else F.silu(out))[0].T


def ours(conv: nn.Conv1d, x: torch.Tensor, activation: str | None, starts: torch.Tensor) -> torch.Tensor:
    return short_convolution(x, conv.weight.squeeze(1), conv.bias, activation, starts)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("kernel", "bias"), [(2, False), (3, False), (4, True), (8, True)])
def test_each_document_of_a_row_is_convolved_as_if_it_were_alone_and_so_are_the_gradients(kernel, bias, activation):
    """Documents shorter than the kernel too, and padding disturbs nothing."""
    rows = ([5, 1, 2, 7], [3, 8])
    conv, starts = convolution(kernel, bias), distances(*rows)
    x = torch.randn(2, 15, CHANNELS, requires_grad=True)
    out = ours(conv, x, activation, starts)
    pairs = [
        (out[row, end - size : end], alone(conv, x[row, end - size : end], activation))
        for row, sizes in enumerate(rows)
        for size, end in zip(sizes, torch.tensor(sizes).cumsum(0).tolist(), strict=True)
    ]
    variables = [x, *conv.parameters()]
    grads = []
    for side in zip(*pairs, strict=True):
        total = sum((part * part).sum() for part in side)
        grads.append(torch.autograd.grad(total, variables, retain_graph=True))
    for own, expected in [*pairs, *zip(*grads, strict=True)]:
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_a_document_does_not_change_if_another_becomes_infinite():
    conv, starts = convolution(4, True), distances([3, 4, 2])
    x = torch.randn(1, 9, CHANNELS)
    before = ours(conv, x, "silu", starts)
    x[:, :3] = torch.inf
    x[:, 7:] = torch.nan
    assert torch.equal(ours(conv, x, "silu", starts)[:, 3:7], before[:, 3:7])


def test_rows_shorter_than_the_kernel():
    conv, starts = convolution(4, True), distances([2])
    x = torch.randn(1, 2, CHANNELS)
    torch.testing.assert_close(ours(conv, x, None, starts)[0], alone(conv, x[0], None))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_the_derivatives(activation):
    conv, starts = convolution(3, True, torch.float64), distances([4, 1, 2])
    x = torch.randn(1, 7, CHANNELS, dtype=torch.float64, requires_grad=True)
    weight, bias = conv.weight.squeeze(1).detach().requires_grad_(), conv.bias
    assert torch.autograd.gradcheck(lambda *given: short_convolution(*given, activation, starts), (x, weight, bias))


def test_in_bf16_the_sum_is_rounded_once_and_then_activated():
    conv, starts = convolution(8, True), distances([9, 3])
    conv.bfloat16()
    x = torch.randn(1, 12, CHANNELS, dtype=torch.bfloat16)
    out = ours(conv, x, "silu", starts)
    exact = ours(conv.float(), x.float(), None, starts)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, F.silu(exact.bfloat16()))


def test_a_compiled_block_keeps_no_shifted_inputs():
    """Autograd would keep one for each tap, in fp32; twice the input is the input and what is activated."""
    conv, starts = convolution(8, False), distances([40, 24])
    conv.bfloat16()
    x = torch.randn(1, 64, CHANNELS, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch._functorch.config.patch(activation_memory_budget=0.9):
        compiled = torch.compile(ours, backend="aot_eager_decomp_partition", fullgraph=True)
        compiled(conv, x * 1, "silu", starts)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            compiled(conv, x * 1, "silu", starts)
    assert sum(kept.values()) < 3 * x.nbytes + starts.nbytes


def test_compiled_it_is_one_graph_with_the_same_values():
    conv, starts = convolution(4, True), distances([5, 2, 6])
    x = torch.randn(1, 13, CHANNELS, requires_grad=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    variables = [x, *conv.parameters()]
    sides = []
    for function in (ours, compiled):
        out = function(conv, x, "silu", starts)
        sides.append([out, *torch.autograd.grad(out.square().sum(), variables)])
    for own, expected in zip(*sides, strict=True):
        torch.testing.assert_close(own, expected)


class GivenToOperators(TorchDispatchMode):
    """Collects the tensors that the operators of this project are given."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sftkit":
            self.tensors += [value for value in args if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_kernels_which_know_no_strides_get_contiguous_tensors():
    """Of a transposed input, columns of a matrix as weights, and distances that all rows share."""
    wide, starts = torch.randn(CHANNELS, 4, 2), distances([5, 2, 6])
    strided = torch.randn(13, 2, CHANNELS).transpose(0, 1), wide[..., 0], wide[:, 0, 1]
    sides = []
    for given, rows in ((strided, starts), ([t.contiguous() for t in strided], starts.repeat(2, 1))):
        leaves = [t.detach().requires_grad_() for t in given]
        with GivenToOperators() as seen:
            out = short_convolution(*leaves, "silu", rows)
            sides.append([out, *torch.autograd.grad(out.mT.square().sum(), leaves)])
        assert len(seen.tensors) == 4 + 5
        assert all(t.is_contiguous() for t in seen.tensors)
        assert seen.tensors[3].shape == seen.tensors[-1].shape == (2, 13)
    for own, expected in zip(*sides, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_operators_keep_the_rules_of_operators(bias: bool):
    conv, starts = convolution(4, bias), distances([5, 2, 6], [13])
    x = torch.randn(2, 13, CHANNELS, requires_grad=True)
    given = [None if t is None else t.detach().requires_grad_() for t in (conv.weight.squeeze(1), conv.bias)]
    torch.library.opcheck(convolved, (x, *given, starts, True))
    tensors = [None if t is None else t.detach() for t in (x, *given)]
    torch.library.opcheck(convolved_backward, (torch.randn(2, 13, CHANNELS), *tensors, starts, True))


def test_flops_are_those_of_a_convolution_of_torch():
    conv, starts = convolution(4, False), distances([12])
    x = torch.randn(1, 12, CHANNELS, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        ours(conv, x, "silu", starts).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 4 * 12 * CHANNELS


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("kernel", "bias", "channels"), [(3, False, 200), (4, True, 136), (4, False, 1024)])
def test_the_kernel_equals_the_operator_on_the_host_and_itself_bitwise(kernel, bias, channels, activation):
    generator = torch.Generator().manual_seed(0)
    starts = distances([130, 1, 2, 64, 65, 3], [200, 60])
    x, grad = (torch.randn(2, 265, channels, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(channels, kernel, generator=generator).bfloat16()
    given = [x, weight, torch.randn(channels, generator=generator).bfloat16() if bias else None, starts]
    on_gpu = [None if t is None else t.cuda() for t in given]
    silu = activation == "silu"

    def results(grad: torch.Tensor, given: list) -> list[torch.Tensor]:
        return [convolved(*given, silu).cpu(), *(t.cpu() for t in convolved_backward(grad, *given, silu))]

    found, again, expected = results(grad.cuda(), on_gpu), results(grad.cuda(), on_gpu), results(grad, given)
    for one, same, right, limit in zip(found, again, expected, (1e-3, 1e-3, 1e-5), strict=True):
        assert torch.equal(one, same)
        assert (one.double() - right.double()).norm() <= limit * right.double().norm()


def test_an_unknown_activation_is_rejected_by_name():
    conv, starts = convolution(4, True), distances([5])
    with pytest.raises(RuntimeError, match="gelu"):
        ours(conv, torch.randn(1, 5, CHANNELS), "gelu", starts)
