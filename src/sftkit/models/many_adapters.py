"""Several adapters (LoRA) over one frozen model: each row of a batch belongs to one, in shares of equal size.

The rows of a batch are [G, rows of a share], for the G adapters of a pass. Every product with factors has the share as
its first dimension, so no number of one adapter, not even a NaN, enters a sum of another. Which G of all adapters it
is are numbers in a tensor: one graph for all passes. Outside of training batches one adapter computes all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from sftkit.errors import ConfigError
from sftkit.models.adapters import (
    Adapters,
    Factor,
    LoraLinear,
    adapted,
    first_factor,
    peft_name,
    read_factors,
    target_modules,
)
from sftkit.models.trained import ADAPTERS, adapters_of
from sftkit.rundir.names import adapter_dir
from sftkit.runtime.start import replaced

if TYPE_CHECKING:
    from sftkit.config.schema import NamedAdapter


class Selection:
    """Which adapters the layers of a model compute with; the layers share it."""

    def __init__(self, scales: Sequence[float], device: torch.device) -> None:
        """Let the first adapter compute all rows."""
        self.active = 0
        "the adapter of all rows, outside of a pass"
        self.shares = 0
        "number of shares of the batch in a pass; 0: no pass"
        self.scales = tuple(scales)
        self.scale_of = torch.tensor(self.scales, dtype=torch.float32, device=device)
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        "int64 [G]: the adapter of each share"
        self._numbers: dict[tuple[int, ...], Tensor] = {}

    def begin(self, adapters: tuple[int, ...], device: torch.device) -> None:
        """Let these adapters compute a share each of the next training pass; (): one adapter all rows. It holds until
        the next call, for blocks that are computed again in the backward pass. No host sync after the first passes.
        """
        self.shares = len(adapters)
        if not adapters:
            return
        if adapters not in self._numbers:
            self._numbers[adapters] = torch.tensor(adapters, device=device)
        if len(self.slots) != len(adapters) or self.slots.device != device:
            self.scale_of = self.scale_of.to(device)
            self.slots = self._numbers[adapters].clone()
        self.slots.copy_(self._numbers[adapters])


class ManyLora(LoraLinear):
    """A frozen linear layer with several adapters: y = W x + b + scale_k * B_k A_k x for the rows of adapter k."""

    lora_A: torch.nn.ModuleList  # type: ignore[assignment]
    lora_B: torch.nn.ModuleList  # type: ignore[assignment]
    lora_selection: Selection
    joined: dict[str, tuple[torch.nn.Parameter, list[torch.Size]]]
    """"A" and "B" -> the memory of this factor of all adapters, [K, elements of the largest], and the shape of each"""

    def join(self) -> None:
        """Move each factor of all adapters into one tensor, which training passes read: a graph then has one input and
        one gradient for all, and their number costs no launches.

        The factors are views of it. They get their gradients as soon as its own is there.
        """
        self.joined = {}
        for which in ("A", "B"):
            factors = self.factors(which)
            size = max(factor.numel() for factor in factors)
            joint = torch.nn.Parameter(factors[0].new_zeros(len(factors), size))
            for own, factor in zip(joint.data, factors, strict=True):
                factor.data = own[: factor.numel()].view_as(factor).copy_(factor.data)
            self.joined[which] = joint, [factor.shape for factor in factors]
            joint.register_post_accumulate_grad_hook(partial(hand_out, factors, self.joined[which][1]))

    def _apply(self, *args: Any, **named: Any) -> Any:
        """Join the factors again after torch has moved each by itself."""
        super()._apply(*args, **named)
        self.join()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, [..., out]."""
        chosen = self.lora_selection
        if not self.in_shares:
            b = self.factors("B")[chosen.active]
            return self.with_factors(x, self.factor_of_rows, b, chosen.scales[chosen.active])
        y = linear(x, self.weight, self.bias)
        joint = self.joint is not None and self.joint[0] is x
        u = self.joint[1] if joint else product_of_shares(x, self.factors_of_shares("A", x.dtype))  # type: ignore[index]
        added = product_of_shares(u, self.factors_of_shares("B", x.dtype))
        # The scales as fp32: most are no numbers of bf16.
        return y + (added * chosen.scale_of.index_select(0, chosen.slots)[:, None, None]).to(x.dtype).view(y.shape)

    def factors(self, which: Literal["A", "B"]) -> list[torch.nn.Parameter]:
        """Return one of the two factors of each adapter."""
        several: Any = self.lora_A if which == "A" else self.lora_B
        return [factor.weight for factor in several]

    @property
    def factor_of_rows(self) -> Tensor:
        """Return A of the adapter that computes all rows."""
        return self.factors("A")[self.lora_selection.active]

    @property
    def in_shares(self) -> bool:
        """Return whether rows are shares of several adapters; a single one computes as it does alone, to the bit."""
        return self.training and self.lora_selection.shares > 0 and len(self.lora_selection.scales) > 1

    def factors_of_shares(self, which: Literal["A", "B"], dtype: torch.dtype) -> Tensor:
        """Return the factor of the adapter of each share, [G, largest rank, in] or [G, out, largest rank]. The gradient
        of an adapter without a share is 0."""
        joint, shapes = self.joined[which]
        rows, columns = (max(sizes) for sizes in zip(*shapes, strict=True))
        if len({*shapes}) == 1:
            every = joint.view(-1, rows, columns)
        else:
            own = [part[: h * w].view(h, w) for part, (h, w) in zip(joint.unbind(), shapes, strict=True)]
            every = torch.stack([pad(part, (0, columns - part.shape[1], 0, rows - len(part))) for part in own])
        return every.index_select(0, self.lora_selection.slots).to(dtype)


class PlainMany(ManyLora):
    """The same as the paper writes it, one adapter for all rows: what ManyLora is compared with."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, [..., out]."""
        k = self.lora_selection.active
        added = linear(linear(x, self.factors("A")[k].to(x.dtype)), self.factors("B")[k].to(x.dtype))
        return linear(x, self.weight, self.bias) + self.lora_selection.scales[k] * added


ManyLora.plain = PlainMany


@torch.no_grad()
def hand_out(factors: Sequence[torch.nn.Parameter], shapes: Sequence[torch.Size], joint: torch.nn.Parameter) -> None:
    """Give each adapter's factor its part of the gradient of all."""
    gradient = joint.grad
    assert gradient is not None
    joint.grad = None
    if len({*shapes}) == 1:  # a single call of torch: the host is the limit of short rows
        parts = gradient.view(-1, *shapes[0]).unbind()
    else:
        parts = tuple(own[: shape.numel()].view(shape) for own, shape in zip(gradient, shapes, strict=True))
    for factor, part in zip(factors, parts, strict=True):
        factor.grad = part if factor.grad is None else factor.grad + part


def product_of_shares(x: Tensor, factors: Tensor) -> Tensor:
    """Return the product of the inputs of each share with its factor, [G, N, out].

    Args:
        x: [..., in], shares one after the other. factors: [G, out, in].
    """
    shares = x.reshape(len(factors), -1, x.shape[-1])
    # A single share as a layer with one adapter computes it.
    return linear(shares[0], factors[0])[None] if len(factors) == 1 else torch.bmm(shares, factors.mT)


def members_of(adapters: Adapters, *, seed: int, entries: Sequence[NamedAdapter]) -> Adapters:
    """Return the adapters with a member for each entry of a recipe.

    Args:
        adapters: what an entry has where it says nothing else. seed: run.seed.
    """
    config = adapters.config
    members = tuple(
        replace(
            adapters,
            name=entry.name,
            config=replace(config, rank=entry.rank or config.rank, alpha=entry.alpha or config.alpha),
            seed=seed if entry.seed is None else entry.seed,
        )
        for entry in entries
    )
    return replace(adapters, members=members)


def add_many(orig_model: PreTrainedModel, adapters: Adapters) -> Adapters:
    """Freeze the model and give its target layers the adapters of all members.

    Raises:
        ConfigError: a target that is no layer of the model, a rank above a layer's size, or a model with experts.
    """
    if any(type(module).__name__.endswith("Experts") for module in orig_model.modules()):
        raise ConfigError("adapters: models with experts, whose tokens change places, train one adapter at a time yet")
    largest = max(adapters.members, key=lambda member: member.config.rank)
    targets = target_modules(orig_model, largest.config)
    orig_model.requires_grad_(requires_grad=False)
    device = orig_model.get_parameter(f"{next(iter(targets))}.weight").device
    chosen = Selection([member.scale for member in adapters.members], device)
    for layer in targets.values():
        layer.__class__ = ManyLora
        assert isinstance(layer, ManyLora)
        ranks = [member.config.rank for member in adapters.members]
        layer.lora_A = torch.nn.ModuleList([Factor(rank, layer.in_features, device) for rank in ranks])
        layer.lora_B = torch.nn.ModuleList([Factor(layer.out_features, rank, device) for rank in ranks])
        layer.lora_dropout = None
        layer.lora_selection = chosen
        layer.join()
        layer.train(orig_model.training)
    members = tuple(replace(member, modules=tuple(targets)) for member in adapters.members)
    found = replace(adapters, members=members, modules=tuple(targets), selection=chosen)
    setattr(orig_model, ADAPTERS, found)
    if adapters.start is not None:
        load_many(orig_model, adapters.start)
    elif not chosen.scale_of.is_meta:
        for k, member in enumerate(members):
            for name, weight in member_factors(orig_model, k).items():
                module, _, factor = name.rpartition(".lora_")
                if factor == "A.weight":
                    weight.data.copy_(first_factor(member.seed, module, weight.shape))
    return found


def active(orig_model: torch.nn.Module, member: int) -> AbstractContextManager[None]:
    """Let one adapter compute all rows within the context, for an evaluation of it."""
    adapters = adapters_of(orig_model)
    assert adapters is not None
    assert adapters.selection is not None
    return replaced(adapters.selection, "active", member)


def member_factors(orig_model: torch.nn.Module, member: int) -> dict[str, torch.nn.Parameter]:
    """Return the factors of a member by the names that they have in a model with this adapter alone."""
    found = {}
    for name, layer in adapted(orig_model).items():
        assert isinstance(layer, ManyLora)
        found[f"{name}.lora_A.weight"] = layer.factors("A")[member]
        found[f"{name}.lora_B.weight"] = layer.factors("B")[member]
    return found


def member_files(orig_model: torch.nn.Module) -> dict[Path, dict[str, torch.nn.Parameter]]:
    """Return the folder of each member in a step directory -> its live tensors under the names of peft."""
    adapters = adapters_of(orig_model)
    assert adapters is not None
    return {
        adapter_dir(Path(), member.name): {
            peft_name(orig_model, name): p for name, p in member_factors(orig_model, k).items()
        }
        for k, member in enumerate(adapters.members)
    }


def load_many(orig_model: PreTrainedModel, folder: Path) -> None:
    """Load the factors of all members from a step directory.

    Raises:
        ConfigError: the files hold other adapters than the model has.
    """
    for own, held in member_files(orig_model).items():
        read_factors(held, folder / own)
