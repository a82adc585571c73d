"""Routers of a mixture of experts: what each expert is given, and the auxiliary loss that keeps it even.

A forward hook on each router, which is part of the compiled block, keeps what it has chosen as sums over each row: no
logits leave the block. The loss is that of transformers (Switch Transformers, arXiv 2101.03961, equations 4 to 6, the
layers together), for each row by itself. A product of two means is no sum over micro-batches, so the row is the unit:
it stays the same however rows are distributed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce
from transformers import PreTrainedConfig, PreTrainedModel

from sftkit.data.batches.collate import IGNORE, Batch
from sftkit.errors import ConfigError
from sftkit.ops.tensors import resolve_group

COEFFICIENT = "router_aux_loss_coef"
"Field of a config with the weight of the loss."
NOT_READ = ("longcat_flash", "inkling")
"Model types whose routers return something else than logits, weights and choice."


class _CountedPositions:
    """State that the hooks of all routers read and compiled code guards on.

    Not an attribute of a module: Dynamo takes the sizes of a module's tensors for fixed.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        "fp32 [B, C] of the current micro-batch, 1 where there is a token; None: nothing is counted"


_COUNTED = _CountedPositions()


def coefficient(config: PreTrainedConfig, override: float | None) -> float:
    """Return the weight of the auxiliary loss: `override`, else the one that transformers applies for this config.

    Raises:
        ConfigError: one is asked for of a model that has none.
    """
    text = config.get_text_config()
    if override and not hasattr(text, COEFFICIENT):
        raise ConfigError(
            f"loss.{COEFFICIENT}={override:g}: {text.model_type} has no auxiliary loss of its routers: leave the key "
            "out, or set 0"
        )
    if override is not None:
        return override
    return float(getattr(text, COEFFICIENT, 0.0) or 0.0) if getattr(text, "output_router_logits", False) else 0.0


def routing_of(orig_model: PreTrainedModel, override: float | None) -> Routing | None:
    """Attach hooks to the routers of a model that is not compiled yet, and return what reads them;
    None: it has no experts.

    Args:
        override: loss.router_aux_loss_coef.

    Raises:
        ConfigError: an auxiliary loss is asked for of a model that has none.
    """
    weight = coefficient(orig_model.config, override)
    # Known by the names of their classes, in the order of the layers: in transformers routers have no base class of
    # their own.
    routers = [m for m in orig_model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    if orig_model.config.get_text_config().model_type in NOT_READ:
        routers = []
    if weight and not routers:
        raise ConfigError(
            f"loss.{COEFFICIENT}: the routers of {type(orig_model).__name__} cannot be read here: set it to 0"
        )
    has_loss = hasattr(orig_model.config.get_text_config(), COEFFICIENT)
    return Routing(routers, weight, has_loss=has_loss) if routers else None


class Routing:
    """The routers of a model, watched in forward passes of training."""

    def __init__(self, routers: list[torch.nn.Module], weight: float, *, has_loss: bool) -> None:
        """Attach the hooks.

        Args:
            routers: in the order of the layers.
            weight: of the auxiliary loss in the loss that is minimised; 0: it is measured only.
            has_loss: whether the architecture has one.
        """
        self.weight = weight
        self.has_loss = has_loss
        self._routers = routers
        self._load: Tensor | None = None
        for router in routers:
            router.register_forward_hook(partial(_count_hook, with_loss=has_loss))

    def begin(self, positions: Tensor | None) -> None:
        """Set the positions that are counted, before a forward pass of training, which the backward pass may repeat.

        Args:
            positions: bool [B, C], where there is a token; None: nothing is counted, as in evaluation.
        """
        _COUNTED.positions = None if positions is None else positions.float()

    def taken(self) -> tuple[Tensor, Tensor | None]:
        """Return what the routers have chosen since `begin`, all layers together, and add to the load of each layer.

        Returns:
            (fp32 [B, E], positions that each expert was given; [B, E], the sum of its probabilities, differentiable, or
                None for an architecture without the loss).
        """
        # Popped, so that no pass can find what another has left.
        chosen = torch.stack([router.__dict__.pop("sftkit_chosen") for router in self._routers])
        load = chosen.detach().sum(1).long()  # fp32 counts of a micro-batch are exact
        self._load = load if self._load is None else self._load + load
        if not self.has_loss:
            return chosen.sum(0), None
        return chosen.sum(0), torch.stack([r.__dict__.pop("sftkit_probability") for r in self._routers]).sum(0)

    def loss_of(self, batch: Batch, context_group: str | None) -> Tensor | None:
        """Return the auxiliary loss of the pass since `begin`, 0-d: each row's times its number of targets, added up.

        Divided by the step's divisor it is the mean that is logged. None for an architecture without one; for chunks of
        rows this rank's share.

        Args:
            context_group: name of the group of ranks whose chunks make whole rows; None: rows are whole here.
        """
        chosen, probability = self.taken()
        if probability is None:
            return None
        targets = (batch.targets != IGNORE).sum(-1, dtype=chosen.dtype)
        if context_group is not None:
            # Of whole rows: what was chosen, and the targets. Probabilities stay this rank's own, and so
            # does their gradient.
            both = torch.cat([chosen, targets[:, None]], dim=1)
            all_reduce(both, group=resolve_group(context_group))
            chosen = both[:, :-1]
            targets = both[:, -1]
        return self.loss_of_rows(chosen, probability, (batch.doc_ids >= 0).sum(-1), targets)

    def loss_of_rows(self, chosen: Tensor, probability: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over rows, 0-d, of targets x E x sum over experts of (share of positions x mean probability).

        Args:
            chosen, probability: [B, E], as `taken` returns them. tokens, targets: [B], of whole rows.
        """
        seen = (tokens * len(self._routers)).to(chosen.dtype).clamp(min=1.0)
        of_rows = chosen.shape[-1] * (chosen * probability).sum(-1) / seen.square()
        return (of_rows * targets).sum()

    def take_load(self) -> Tensor | None:
        """Return how many positions each expert of each layer was given since the last call, on this rank: int64 [L,
        E]; None if there was no pass."""
        load = self._load
        self._load = None
        return load


def _count_hook(router: torch.nn.Module, _: Any, output: tuple[Tensor, ...], *, with_loss: bool) -> None:
    """Leave in the router how many positions of each row it gave each expert, fp32 [B, E], as a forward hook.

    Args:
        output: of a router: its logits [B C, E], weights and choice [B C, k].
        with_loss: leave the sum of their probabilities too.
    """
    positions = _COUNTED.positions
    if positions is None or not router.training:
        return
    first, _, last = output
    logits, choice = (first, last) if first.is_floating_point() else (last, first)  # Granite gives the choice first
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Sums over a row leave the block, not logits: [B, E] instead of [B C, E] for each layer.
    rows, columns = positions.shape
    shape = (rows, columns, logits.shape[-1])
    weights = positions.to(logits.dtype)[..., None]
    given = torch.zeros_like(logits).scatter(-1, choice, 1.0)
    router.sftkit_chosen = (given.detach().view(shape) * weights).sum(1)
    if with_loss:
        router.sftkit_probability = (logits.softmax(-1).view(shape) * weights).sum(1)
