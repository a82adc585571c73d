"""Routers of a mixture of experts: count the positions of each expert and compute the auxiliary loss that
balances them.

A forward hook on each router, inside the compiled block, keeps the router's choices as sums over each row: no logits
leave the block. The loss is that of transformers (Switch Transformers, arXiv 2101.03961, equations 4 to 6, over all
layers together), computed for each row separately. A product of two means is not a sum over micro-batches, so the row
is the unit: its loss does not depend on how rows are distributed. In a row of prefix trees a position counts as often
as documents hold it, so the loss balances the documents as if they stood in the row one after the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce
from transformers import PreTrainedConfig, PreTrainedModel

from sftkit.data.batches.collate import IGNORE, Batch
from sftkit.errors import ConfigError, config_error
from sftkit.ops.tensors import resolve_group

COEFFICIENT = "router_aux_loss_coef"
"Config field with the weight of the loss."
NOT_READ = ("longcat_flash", "inkling")
"Model types whose routers do not return logits, weights and choice."


class _CountedPositions:
    """State that the hooks of all routers read and compiled code guards on.

    It is not an attribute of a module: Dynamo assumes that the sizes of a module's tensors are constant.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        "fp32 [B, C] of the current micro-batch, 0 at padding; None: nothing is counted"


_COUNTED = _CountedPositions()


def coefficient(config: PreTrainedConfig, override: float | None) -> float:
    """Return the weight of the auxiliary loss: `override`, otherwise the weight that transformers applies for
    this config.

    Raises:
        ConfigError: the setting asks for a loss that the model does not have.
    """
    text = config.get_text_config()
    if override and not hasattr(text, COEFFICIENT):
        raise config_error("no auxiliary loss", coefficient=COEFFICIENT, override=override, model_type=text.model_type)
    if override is not None:
        return override
    return float(getattr(text, COEFFICIENT, 0.0) or 0.0) if getattr(text, "output_router_logits", False) else 0.0


def routing_of(orig_model: PreTrainedModel, override: float | None) -> Routing | None:
    """Attach hooks to the routers of a model before compilation and return their reader; None if the model has
    no experts.

    Args:
        override: loss.router_aux_loss_coef.

    Raises:
        ConfigError: the setting asks for an auxiliary loss that the model does not have.
    """
    weight = coefficient(orig_model.config, override)
    # Found by class name, in the order of the layers: routers have no common base class in transformers.
    routers = [m for m in orig_model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    if orig_model.config.get_text_config().model_type in NOT_READ:
        routers = []
    if weight and not routers:
        raise ConfigError(f"loss.{COEFFICIENT}: the routers of {type(orig_model).__name__} cannot be read: set it to 0")
    has_loss = hasattr(orig_model.config.get_text_config(), COEFFICIENT)
    return Routing(routers, weight, has_loss=has_loss) if routers else None


class Routing:
    """The routers of a model, observed during forward passes of training."""

    def __init__(self, routers: list[torch.nn.Module], weight: float, *, has_loss: bool) -> None:
        """Attach the hooks.

        Args:
            routers: modules in the order of the layers.
            weight: weight of the auxiliary loss in the minimised loss; 0: it is only measured.
            has_loss: whether the architecture has the loss.
        """
        self.weight = weight
        self.has_loss = has_loss
        self._routers = routers
        self._load: Tensor | None = None
        for router in routers:
            router.register_forward_hook(partial(_count_hook, with_loss=has_loss))

    def begin(self, positions: Tensor | None) -> None:
        """Set the counted positions before a training forward pass, which the backward pass may repeat.

        Args:
            positions: bool or int [B, C], how often each position counts; None counts nothing, as in evaluation.
        """
        _COUNTED.positions = None if positions is None else positions.float()

    def counted(self, batch: Batch) -> Tensor:
        """Return how often each local position of a batch counts: bool or int [B, C], 0 at padding."""
        if batch.tree_documents is not None:
            return batch.tree_documents
        return (batch.doc_ids if batch.columns is None else batch.doc_ids.index_select(1, batch.columns)) >= 0

    def taken(self) -> tuple[Tensor, Tensor | None]:
        """Return the routers' choices since `begin`, summed over layers, and add them to the load of each layer.

        Returns:
            (fp32 [B, E], positions given to each expert; [B, E], sum of its probabilities, differentiable, or None
                for an architecture without the loss).
        """
        # Popped, so that no pass finds the values of an earlier one.
        chosen = torch.stack([router.__dict__.pop("sftkit_chosen") for router in self._routers])
        load = chosen.detach().sum(1).long()  # fp32 counts of one micro-batch are exact
        self._load = load if self._load is None else self._load + load
        if not self.has_loss:
            return chosen.sum(0), None
        return chosen.sum(0), torch.stack([r.__dict__.pop("sftkit_probability") for r in self._routers]).sum(0)

    def loss_of(self, batch: Batch, context_group: str | None) -> Tensor | None:
        """Return the auxiliary loss of the pass since `begin`, 0-d: the sum over rows of loss times
        number of targets.

        Divided by the step's number of target tokens, it is the mean that is logged. None for an architecture without
        the loss; for chunks of rows it is this rank's share.

        Args:
            context_group: name of the group of ranks whose chunks form whole rows; None if each rank has whole rows.
        """
        chosen, probability = self.taken()
        if probability is None:
            return None
        if batch.tree_documents is not None and batch.edge_weights is not None:
            rows = torch.arange(len(batch.targets), device=chosen.device)
            own = batch.target_index // batch.targets.shape[1] == rows[:, None]
            targets = (own * batch.edge_weights).sum(-1, dtype=chosen.dtype)
            return self.loss_of_rows(chosen, probability, batch.tree_documents.sum(-1), targets)
        targets = (batch.targets != IGNORE).sum(-1, dtype=chosen.dtype)
        if context_group is not None:
            # Sum choices and targets over whole rows. Probabilities, and so their gradient, stay this rank's own.
            both = torch.cat([chosen, targets[:, None]], dim=1)
            all_reduce(both, group=resolve_group(context_group))
            chosen = both[:, :-1]
            targets = both[:, -1]
        return self.loss_of_rows(chosen, probability, (batch.doc_ids >= 0).sum(-1), targets)

    def loss_of_rows(self, chosen: Tensor, probability: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over rows, 0-d, of targets x E x sum over experts of (share of positions x mean probability).

        Args:
            chosen, probability: [B, E], from `taken`. tokens, targets: [B], of whole rows.
        """
        seen = (tokens * len(self._routers)).to(chosen.dtype).clamp(min=1.0)
        of_rows = chosen.shape[-1] * (chosen * probability).sum(-1) / seen.square()
        return (of_rows * targets).sum()

    def take_load(self) -> Tensor | None:
        """Return the positions given to each expert of each layer on this rank since the last call, int64 [L, E];
        None if no pass was made.
        """
        load = self._load
        self._load = None
        return load


def _count_hook(router: torch.nn.Module, _: Any, output: tuple[Tensor, ...], *, with_loss: bool) -> None:
    """As a forward hook, store in the router the number of positions that each row gave each expert, fp32 [B, E].

    Args:
        output: output of a router: its logits [B C, E], weights and choice [B C, k].
        with_loss: whether to store the sum of the probabilities too.
    """
    positions = _COUNTED.positions
    if positions is None or not router.training:
        return
    first, _, last = output
    logits, choice = (first, last) if first.is_floating_point() else (last, first)  # Granite gives the choice first
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Row sums leave the block instead of logits: [B, E], not [B C, E], for each layer.
    rows, columns = positions.shape
    shape = (rows, columns, logits.shape[-1])
    weights = positions.to(logits.dtype)[..., None]
    given = torch.zeros_like(logits).scatter(-1, choice, 1.0)
    router.sftkit_chosen = (given.detach().view(shape) * weights).sum(1)
    if with_loss:
        router.sftkit_probability = (logits.softmax(-1).view(shape) * weights).sum(1)
