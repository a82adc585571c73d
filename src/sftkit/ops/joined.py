"""Layers that read the same input as one matrix product each way: queries, keys and values, and a whole gated MLP.

The weights of such layers lie next to each other in one storage (models/joined_products.py), so that several
parameters are one matrix to a product, and their gradients are written as one. The products are cuBLAS's or QuACK's
(ops/quack_products.py), whose kernels also compute SwiGLU and its gradient on the way out.
"""

import hashlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from subprocess import PIPE, STDOUT
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils.flop_counter import register_flop_formula

from sftkit.ops.quack_products import Tile, kernels_folder, product, quack, swiglu_gradient_product, swiglu_product

log = logging.getLogger(__name__)
PINGPONG = Tile(128, 192, pingpong=True, cluster=(2, 1))
COOPERATIVE = Tile(128, 256, pingpong=False, cluster=(2, 1))
TILES = {
    "forward": PINGPONG,
    "input": COOPERATIVE,
    "input added": COOPERATIVE,
    "weight": COOPERATIVE,
    "gated": COOPERATIVE,
    "gated gradient": Tile(128, 128, pingpong=True, cluster=(2, 1)),
    "input of both": COOPERATIVE,
    "weights of both": COOPERATIVE,
}
"Of QuACK's products: not chosen by measurement yet; benchmarks/h200_step/gemms.py measures others next to them."


def joint(weights: Sequence[Tensor]) -> Tensor:
    """Return weights [n_i, H] as one matrix: a view if they lie next to each other in one storage, else a copy."""
    first = weights[0].detach()
    if not are_neighbours(weights):
        return torch.cat([weight.detach() for weight in weights])
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def are_neighbours(weights: Sequence[Tensor]) -> bool:
    """Return whether matrices lie next to each other in one storage, in this order."""
    storage = weights[0].untyped_storage().data_ptr()
    place = weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != place:
            return False
        if not weight.is_contiguous():
            return False
        place += weight.numel()
    return True


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate) * up, [N, F], of gate and up next to each other, [N, 2F]."""
    if both.is_cuda and both.dtype == torch.bfloat16:
        from sftkit.ops import gated_mlp_kernel  # Triton is not installed on CPU machines

        return gated_mlp_kernel.swiglu_forward(both)
    gate, up = both.chunk(2, 1)
    return silu(gate) * up


def swiglu_backward(d_h: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `swiglu` by both, [N, 2F], and its output again, [N, F]."""
    if both.is_cuda and both.dtype == torch.bfloat16:
        from sftkit.ops import gated_mlp_kernel  # Triton is not installed on CPU machines

        return gated_mlp_kernel.swiglu_gradients(d_h, both)
    exact = torch.promote_types(both.dtype, torch.float32)
    gate, up = both.to(exact).chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    gated = gate * sigmoid
    d_gate = d_h * up * (sigmoid + gated * (1 - sigmoid))
    return torch.cat([d_gate, d_h * gated], 1).to(both.dtype), (gated * up).to(both.dtype)


@torch.library.custom_op("sftkit::joined_mlp", mutates_args=())
def joined_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Return down(silu(gate(x)) * up(x)) and what the backward pass needs.

    Args:
        x: [N, H]. gate, up: [F, H], neighbours in one storage. down: [H, F].
        kernel: of the products, cublas or quack.

    Returns:
        [N, H], and the outputs of gate and up, [N, 2F], in an order of columns that the backward pass knows.
    """
    weights = joint((gate, up))
    if kernel == "quack":
        both = x.new_empty(len(x), len(weights))
        h = x.new_empty(len(x), len(gate))
        swiglu_product(x, weights, both, h, TILES["gated"])
        return product(h, down, torch.empty_like(x), TILES["forward"]), both
    both = x @ weights.t()
    return swiglu(both) @ down.t(), both


@joined_mlp.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], gate.shape[0] + up.shape[0])


@torch.library.custom_op("sftkit::joined_mlp_backward", mutates_args=())
def joined_mlp_backward(
    d_y: Tensor, x: Tensor, both: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `joined_mlp` by x, [N, H], by gate above up, [2F, H], and by down, [H, F]."""
    weights = joint((gate, up))
    if kernel == "quack":
        d_both = torch.empty_like(both)
        h = x.new_empty(len(x), len(gate))
        swiglu_gradient_product(d_y, down, both, d_both, h, TILES["gated gradient"])
        d_down = product(d_y.t(), h.t(), torch.empty_like(down), TILES["weight"])
        d_x = product(d_both, weights.t(), torch.empty_like(x), TILES["input of both"], alternating="B")
        d_weights = torch.empty_like(weights)
        product(d_both.t(), x.t(), d_weights, TILES["weights of both"], alternating="out")
        return d_x, d_weights, d_down
    d_both, h = swiglu_backward(d_y @ down, both)
    return d_both @ weights, d_both.t() @ x, d_y.t() @ h


@joined_mlp_backward.register_fake
def _(d_y: Tensor, x: Tensor, both: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: str) -> Any:
    weights = gate.new_empty(gate.shape[0] + up.shape[0], gate.shape[1])
    return x.new_empty(x.shape), weights, down.new_empty(down.shape)


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *weights, ctx.kernel = inputs
    ctx.save_for_backward(x, output[1], *weights)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _mlp_gradients(ctx: Any, d_y: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of `joined_mlp`."""
    gate = ctx.saved_tensors[2]
    d_x, d_weights, d_down = joined_mlp_backward(d_y.contiguous(), *ctx.saved_tensors, ctx.kernel)
    return d_x, d_weights[: len(gate)], d_weights[len(gate) :], d_down, None


joined_mlp.register_autograd(_mlp_gradients, setup_context=_save_mlp)


@register_flop_formula(torch.ops.sftkit.joined_mlp)
def _mlp_flops(x: Any, gate: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of three products."""
    return 6 * x[0] * math.prod(gate)


@register_flop_formula(torch.ops.sftkit.joined_mlp_backward)
def _mlp_backward_flops(d_y: Any, x: Any, both: Any, gate: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of six products."""
    return 12 * x[0] * math.prod(gate)


@torch.library.custom_op("sftkit::joined_linear", mutates_args=())
def joined_linear(x: Tensor, weights: Sequence[Tensor], kernel: str) -> Tensor:
    """Return the outputs of layers with these weights next to each other, [N, sum of outs].

    Args:
        x: [N, H]. weights: [out, H] each, neighbours in one storage. kernel: of the products, cublas or quack.
    """
    weight = joint(weights)
    if kernel == "quack":
        return product(x, weight, x.new_empty(len(x), len(weight)), TILES["forward"])
    return x @ weight.t()


@joined_linear.register_fake
def _(x: Tensor, weights: Sequence[Tensor], kernel: str) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op("sftkit::joined_linear_backward", mutates_args=())
def joined_linear_backward(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], kernel: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients by x, [N, H], and by the weights, one above the other.

    Args:
        grads: [N, out] by the output of each layer. They are not joined: that would cost what one product saves.
    """
    d_x = torch.empty_like(x)
    d_weights = x.new_empty(sum(map(len, weights)), x.shape[1])
    parts = d_weights.split([len(weight) for weight in weights])
    for i, (grad, weight, part) in enumerate(zip(grads, weights, parts, strict=True)):
        if kernel == "quack":
            kind, added = ("input added", d_x) if i else ("input", None)
            product(grad, weight.t(), d_x, TILES[kind], added=added)
            product(grad.t(), x.t(), part, TILES["weight"])
            continue
        torch.mm(grad.t(), x, out=part)
        if i:
            d_x.addmm_(grad, weight)
        else:
            torch.mm(grad, weight, out=d_x)
    return d_x, d_weights


@joined_linear_backward.register_fake
def _(grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], kernel: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(sum(weight.shape[0] for weight in weights), x.shape[1])


@register_flop_formula(torch.ops.sftkit.joined_linear)
def _linear_flops(x: Any, weights: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return the FLOPs of one product."""
    return 2 * math.prod(out_shape) * x[1]


@register_flop_formula(torch.ops.sftkit.joined_linear_backward)
def _linear_backward_flops(grads: Any, x: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Return the FLOPs of two products."""
    return 4 * x[0] * math.prod(out_shape[1])


class _Parts(torch.autograd.Function):
    """`joined_linear`, cut into the outputs of its layers. As one tensor, their gradients would have to be joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: str, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.kernel = kernel
        return joined_linear(x, weights, kernel).split([len(weight) for weight in weights], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_x, d_weights = joined_linear_backward([grad.contiguous() for grad in grads], x, weights, ctx.kernel)
        return d_x, None, *d_weights.split([len(weight) for weight in weights])


def joined_layers(x: Tensor, weights: Sequence[Tensor], kernel: str) -> tuple[Tensor, ...]:
    """Return the output of each layer, [..., out], as columns of one product of x, [..., H]."""
    flat = _Parts.apply(x.reshape(-1, x.shape[-1]).contiguous(), kernel, *weights)
    return tuple(part.view(*x.shape[:-1], -1) for part in flat)


def compile_kernel(kind: str, tile: Tile | None = None) -> None:
    """Compile one of QuACK's kernels into the folder that they are kept in; none runs, and no GPU is used.

    Args:
        kind, tile: a key of TILES, and a value for it; None: that of TILES.
    """
    tile = tile or TILES[kind]
    quack()
    from quack import cache_utils

    cache_utils.COMPILE_ONLY = True
    make = partial(torch.empty, dtype=torch.bfloat16)
    x, h, both = make(512, 256), make(512, 384), make(512, 768)
    weights, down = make(768, 256), make(256, 384)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: product(x, weights, both, tile),
        "input": lambda: product(both, weights.t(), x, tile),
        "input added": lambda: product(both, weights.t(), x, tile, added=x),
        "weight": lambda: product(both.t(), x.t(), weights, tile),
        "gated": lambda: swiglu_product(x, weights, both, h, tile),
        "gated gradient": lambda: swiglu_gradient_product(x, down, both, both, h, tile),
        "input of both": lambda: product(both, weights.t(), x, tile, alternating="B"),
        "weights of both": lambda: product(both.t(), x.t(), weights, tile, alternating="out"),
    }
    calls[kind]()


def compile_ahead() -> Callable[[], None]:
    """Begin to compile QuACK's kernels, each in a process of its own, if that was not done on this machine; return a
    function that waits for them. By itself, each takes some 3 s when it is first called."""
    folder = kernels_folder()
    known = hashlib.sha256(f"{quack()[0].__file__} {TILES}".encode()).hexdigest()[:16]
    done = folder / f"compiled-{known}"  # safe to delete
    if done.exists():
        return lambda: None
    # A CPU can compile for the GPU of this process.
    environment = os.environ | {"QUACK_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "QUACK_CACHE_DIR": str(folder)}
    code = "import sys; from sftkit.ops.joined import compile_kernel; compile_kernel(sys.argv[1])"
    start = partial(subprocess.Popen, env=environment, stdout=PIPE, stderr=STDOUT, text=True, errors="replace")
    workers = {kind: start([sys.executable, "-c", code, kind]) for kind in TILES}

    def wait() -> None:
        for kind, worker in workers.items():
            how = ""
            try:
                said, _ = worker.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                worker.kill()
                said, _ = worker.communicate()
                how = "after 120 s, "
            if worker.returncode:
                last = "\n".join(said.splitlines()[-5:])
                log.warning(
                    "QuACK's product %r was not compiled ahead (%sexit code %d), which its first call does:\n%s",
                    *(kind, how, worker.returncode, last),
                )
        if not any(worker.returncode for worker in workers.values()):
            with suppress(OSError):
                done.touch()

    return wait
