"""How far compiled code is from eager: outputs and gradients of one module, held to what rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config  # private: fallback_random has no public name (pytorch/pytorch#141645)
from torch.utils import _pytree as pytree  # private (pytorch/pytorch#65761); torch.compile walks arguments so

from labs.explain.subject import ModuleCall

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Dtype -> most of |compiled - eager| / |eager| (norms of whole tensors) that rounding explains: about 1,000 units of
the last place in fp32, 6 in bf16, where a fused kernel rounds once and eager after each operator."""


@dataclass(frozen=True)
class LargestDifference:
    """The tensor that is farthest from eager, of all outputs and gradients."""

    name: str
    relative: float
    dtype: torch.dtype

    @property
    def allowed(self) -> float:
        """Return the relative difference that rounding explains in this dtype; 0.0 for whole numbers."""
        return ALLOWED.get(self.dtype, 0.0)

    @property
    def beyond(self) -> bool:
        """Return whether it is more than is allowed; NaN is."""
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: relative difference {self.relative:.2g}, {self.allowed:g} is allowed in {kind}"


def difference(module: torch.nn.Module, call: ModuleCall, compiled: Callable[..., Any]) -> LargestDifference:
    """Run a module both ways on the same inputs and random numbers, forward and backward, and return the largest
    difference. A gradient that compiled code does not give is as far away as can be; a module that returns no tensor
    does not differ."""
    eager = _values(module, module, call)
    with torch._inductor.config.patch(fallback_random=True):  # else Inductor draws other random numbers than eager
        other = _values(module, compiled, call)
    found = [
        LargestDifference(name, _relative(other[name], tensor) if name in other else float("inf"), tensor.dtype)
        for name, tensor in eager.items()
    ]
    # By the share of what is allowed: a bf16 output may be farther off than an fp32 gradient and still be the better
    # one.
    none = LargestDifference("no output", 0.0, torch.float64)
    return max(found, key=lambda one: one.relative / (one.allowed or 1.0), default=none)


def _values(module: torch.nn.Module, function: Callable[..., Any], call: ModuleCall) -> dict[str, torch.Tensor]:
    """Return outputs and, where there are any, gradients of a sum of them with fixed signs, by name."""
    torch.manual_seed(0)
    args, kwargs = pytree.tree_map_only(torch.Tensor, _fresh, (call.args, call.kwargs))
    outputs = function(*args, **kwargs)
    paths = pytree.tree_flatten_with_path(outputs)[0]
    named = {f"output{pytree.keystr(path)}": leaf for path, leaf in paths if isinstance(leaf, torch.Tensor)}
    found = {name: tensor.detach() for name, tensor in named.items()}
    inputs = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad)
    leaves: dict[str, torch.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    leaves |= {f"input {index}": tensor for index, tensor in enumerate(inputs)}
    total = sum((_signed(tensor) for tensor in named.values() if tensor.requires_grad), torch.zeros(()))
    if leaves and total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return found


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum in fp32, 0-dim, with signs that no symmetry of a model cancels."""
    flat = tensor.float().flatten()
    return (flat * torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float32))).sum()


def _relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return |value - reference| / |reference|, norms of whole tensors; infinite where shapes differ, or where one
    alone is not finite."""
    if value.shape != reference.shape or not torch.equal(value.isfinite(), reference.isfinite()):
        return float("inf")
    a, b = (tensor.double().nan_to_num(posinf=0.0, neginf=0.0) for tensor in (value, reference))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
