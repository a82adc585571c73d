"""Layers of a trained block that read the same input, computed as one matrix product each way (ops/joined.py).

The parameters stay what they are, under their names; their values move next to each other into one storage, so that
several are one matrix to a product. Checkpoints, optimizers and replicas see separate parameters. Modules that are
known get another class in front of their own. Without gradients they compute layer by layer, so evaluation gives the
bits of the checkpoint in plain transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError
from sftkit.models.joined_adapters import MLP, QUERIES_KEYS_VALUES, SharedInput, is_gated_mlp
from sftkit.models.token_rows import in_front
from sftkit.ops.joined import are_neighbours, compile_ahead, joined_layers, joined_mlp
from sftkit.ops.quack_products import quack_unsupported_reason
from sftkit.runtime.script import counted
from sftkit.runtime.start import Runtime

SMALLEST_BUDGET = 0.9
"The share of activations that is kept."


class Joining(NamedTuple):
    """What computes the products of a run, before it does."""

    kernel: str
    "of the products: cublas or quack"
    is_named: bool
    "the recipe names it"
    wait: Callable[[], None]
    "waits until its kernels are compiled"

    def budget(self, activation_memory_budget: float) -> float | None:
        """Return the share of activations that keeps as many bytes as this one does with layers apart; None: it is too
        small for products that are operators of ours, of which torch would compute all again.

        Raises:
            ConfigError: it is too small, and the recipe names the products.
        """
        if activation_memory_budget >= SMALLEST_BUDGET:
            # A share of less, since the widest activation is inside of an operator and never kept. Half of what is left
            # out is as many bytes, from 0.6B to 8B.
            return (1 + activation_memory_budget) / 2
        if self.is_named:
            raise ConfigError(
                f"compile.products: {self.kernel} needs an activation budget of {SMALLEST_BUDGET} or more, and here it "
                f"is {activation_memory_budget}: take auto, or train.memory=speed"
            )
        return None

    def join(self, orig_model: PreTrainedModel, rt: Runtime) -> None:
        """Join the products of a model whose weights are where they stay; every rank calls it, before any step."""
        rt.from_main(self.wait)
        joined = join_products(orig_model, self.kernel)
        rt.print(f"products {self.kernel}: one for several layers in {counted(joined, 'module')}")


def chosen_products(settings: CompileConfig, orig_model: PreTrainedModel, rt: Runtime) -> Joining | None:
    """Choose what computes the products of blocks, on the main rank for all; None: nothing is joined.

    Raises:
        ConfigError: the recipe names what does not run here.
    """
    named = settings.products
    problem = _unsupported_reason(orig_model, rt, compiled=settings.enabled)
    if problem is None and named != "cublas":
        problem = rt.from_main(lambda: quack_unsupported_reason(rt.device))
    if problem and named != "auto":
        raise ConfigError(f"compile.products: {named} {problem}; take another one, or auto")
    if problem:
        return None
    kernel = "cublas" if named == "cublas" else "quack"
    # Compiling takes seconds, in which attention is chosen and weights are read.
    wait = compile_ahead() if kernel == "quack" and rt.is_main else lambda: None
    return Joining(kernel, named != "auto", wait)


def _unsupported_reason(orig_model: PreTrainedModel, rt: Runtime, *, compiled: bool) -> str | None:
    """Return why no layers can be joined, whatever computes them; None if some can."""
    if rt.device.type != "cuda" or orig_model.dtype != torch.bfloat16:
        return "needs a GPU and bf16 weights (train.precision)"
    if rt.topology.partial:
        return "needs whole weights in every process (one GPU, or ddp.yaml)"
    if not compiled:
        return "needs compile.enabled"
    return None if any(layers_of(orig_model)) else "needs layers that are trained whole, and this model has none"


def layers_of(orig_model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, tuple[str, ...]]]:
    """Yield the modules whose layers can be joined, with the names of these layers."""
    if orig_model.config.is_encoder_decoder:  # keys and values of its decoder read what queries do not
        return
    for module in orig_model.modules():
        if are_plain(module, MLP) and is_gated_mlp(module):
            yield module, MLP[:2]
        elif are_plain(module, QUERIES_KEYS_VALUES):
            yield module, QUERIES_KEYS_VALUES


def join_products(orig_model: PreTrainedModel, kernel: str) -> int:
    """Have the MLPs and attention modules that are known compute their layers together, and return how many do.

    Args:
        kernel: of the products, cublas or quack.
    """
    found = list(layers_of(orig_model))
    for module, names in found:
        layers = [getattr(module, name) for name in names]
        move_together(layers)
        own: Any = type(module)
        module.kernel = kernel  # type: ignore[assignment]
        if names == QUERIES_KEYS_VALUES:
            for layer in layers:
                layer.__class__ = PartOfProduct
                layer.joint = None  # an attribute that appears in the first step would be a guard that fails
            module.__class__ = in_front(AttentionProducts, own)
        else:
            module.__class__ = in_front(MlpProducts, own)
    return len(found)


def are_plain(module: torch.nn.Module, names: Sequence[str]) -> bool:
    """Return whether these layers of a module are torch's own, with whole weights that are trained, and unhooked.
    QuACK's kernels want widths that are multiples of 16."""
    for name in names:
        layer: Any = getattr(module, name, None)
        if type(layer) is not Linear or type(layer.weight) is not torch.nn.Parameter or not layer.weight.requires_grad:
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            return False
        if layer.in_features % 16 or layer.out_features % 16:
            return False
    return True


@torch.no_grad()
def move_together(layers: Sequence[Any]) -> None:
    """Move the weights of layers next to each other into one storage; they stay the same parameters."""
    weights = [layer.weight for layer in layers]
    if not are_neighbours(weights):
        for weight, part in zip(weights, torch.cat(weights).split([len(w) for w in weights]), strict=True):
            weight.data = part


class MlpProducts(torch.nn.Module):
    """An MLP down(silu(gate(x)) * up(x)) whose gate and up are one product."""

    kernel: str

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [..., H]."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        weights = (getattr(self, name).weight for name in MLP)
        return joined_mlp(x.reshape(-1, x.shape[-1]).contiguous(), *weights, self.kernel)[0].view(x.shape)


class PartOfProduct(Linear):
    """A layer that takes its output from a product with others."""

    joint: tuple[Tensor, Tensor] | None
    "an input, and its product with the weight"

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [..., out]."""
        if self.joint is None or self.joint[0] is not x:
            return super().forward(x)
        return self.joint[1] if self.bias is None else self.joint[1] + self.bias


class AttentionProducts(SharedInput):
    """An attention module whose queries, keys and values are one product."""

    kernel: str

    def forward(self, *args: Any, **named: Any) -> Any:
        """Compute the module's own forward pass."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **named)
        x = args[0] if args else named["hidden_states"]
        weights = [getattr(self, name).weight for name in QUERIES_KEYS_VALUES]
        parts = [*joined_layers(x, weights, self.kernel)]
        if not hasattr(self, "q_norm"):
            # The backward pass needs values alone, and columns of a matrix would keep all of it. A norm needs its
            # input, so there the matrix is kept anyway.
            parts[2] = parts[2].contiguous()
        return self.with_parts(x, parts, *args, **named)
