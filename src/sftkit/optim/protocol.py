"""The protocol of optimizers, `build_optimizer`, and the other parts of an optimizer step.

These are the norm of all gradients with the factor that clips them, without a host sync; the learning rate as a pure
function of the step; and optimizer states under the names and in the shapes of their parameters, which checkpoints
store at any sharding. The optimizer of `optim.name` is imported only if a recipe names it.
"""

import importlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.config.commands import install
from sftkit.config.schema import OptimConfig
from sftkit.config.tables import FALLBACK, OPTIMIZERS
from sftkit.errors import config_error
from sftkit.models.structure import decoder_blocks, is_table, stages_of
from sftkit.models.trained import TOKEN_ADAPTER, adapters_of, learning_rate_scales, members_in
from sftkit.ops.tensors import as_sharded, local

Group = dict[str, Any]
"""A parameter group as torch types and stores it: params, weight_decay, lr, and an optimizer's own keys. Any, because
a TypedDict would not fit torch's optimizers, whose `param_groups` has this type.
"""
Groups = list[Group]
State = dict[str, Tensor]
"The states of a parameter by name."


@runtime_checkable
class Optimizer(Protocol):
    """Parameters, their states, and the update of both."""

    param_groups: Groups
    state: defaultdict[Tensor, State]
    """States of each parameter by name, including `step`, a 0-d tensor: the number of its updates without skipped
    ones. Empty before the first update.
    """

    @property
    def kind(self) -> str:
        """Return a name for the kind of states: a checkpoint resumes only its own kind."""

    def warm_up(self, *, compiled: bool) -> None:
        """Compile and load the code of an update; parameters, states and random numbers do not change.

        Missing states may be created, as the first update would.

        Args:
            compiled: whether the run compiles. If not, an optimizer that supports both updates eagerly from now on.
        """

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Set the learning rate of every group, multiply gradients by the coefficient, update parameters
        with a gradient.

        Gradients are undefined afterwards: the product may be computed inside the update.

        Args:
            coefficient: fp32 0-d on the device; nan skips the update, so weights, states and their update counts do
                not change. Only a group's `attempts`, if it has them, counts it.
        """

    def new_state(self, param: Tensor, group: Group) -> State:
        """Return the states of a parameter as they are before its first update."""

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zeros."""

    # Any, as in torch: its state dict holds groups and states, and no type of torch covers both.
    def state_dict(self) -> dict[str, Any]:
        """Return groups and states, as torch.optim.Optimizer does."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` bit for bit."""


class Build(Protocol):
    """The function that an OptimizerSpec names."""

    def __call__(self, groups: Groups, optim: OptimConfig, *, seed: int) -> Optimizer:
        """Build the optimizer.

        Args:
            groups: parameter groups from build.parameter_groups.
            seed: seed of stochastic rounding, the same on every rank.
        """


def optimizer_kind(label: str, groups: Groups) -> str:
    """Return `kind`: the label, which is stored in checkpoints and never changes, and the dtypes of the parameters."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters_of(groups)}
    return f"{label} {'+'.join(sorted(dtypes))}"


def parameters_of(groups: Groups) -> Iterable[torch.nn.Parameter]:
    """Return all parameters of the groups."""
    return (p for group in groups for p in group["params"])


def set_learning_rate(groups: Groups, learning_rate: float) -> None:
    """Set the learning rate of every group: this one, times the group's `lr_scale` if it has one."""
    for group in groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


SUM_CHUNK = 1 << 16
"Number of elements whose squares are added up at once on a CPU: their fp64 copy stays in the cache."


@torch.no_grad()
def squared_norm(parameters: Iterable[Tensor], world_size: int, copies: Mapping[int, int] | None = None) -> Tensor:
    """Return this rank's share of the squared L2 norm of all gradients: the shares of all ranks add up to it.

    A gradient that n ranks hold, such as a replica's or an unsharded weight's, counts 1/n on each.

    Args:
        copies: id of a parameter -> number of ranks that hold it; None, or a missing id: all ranks.

    Returns:
        0-d on the device, no host sync: fp32 on a GPU, which sums in trees; fp64 on a CPU, which sums one by one.
    """
    by_copies: dict[int, list[Tensor]] = {}
    device = torch.device("cpu")
    for p in parameters:
        device = p.device
        if p.grad is not None:
            number = (copies or {}).get(id(p), world_size)
            if isinstance(p, DTensor):
                # Not is_shard(): it is false for the strided shards that FSDP makes of tensor-parallel ones.
                sharding = [i for i, place in enumerate(p.placements) if not place.is_replicate()]
                number //= math.prod(p.device_mesh.size(i) for i in sharding)
            by_copies.setdefault(number, []).append(local(p.grad))
    if not by_copies:  # in the dtype of ranks that have gradients, because the shares are added up
        return torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    return torch.stack([_sum_of_squares(grads) / copies for copies, grads in by_copies.items()]).sum()


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    """Return the sum of all squares, 0-d: fp32 on a GPU, fp64 on a CPU."""
    if grads[0].device.type != "cpu":
        # Private: one launch for many tensors. The public get_total_norm (pytorch/pytorch#139662) calls it too, but
        # in the dtype of the gradients.
        return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
    # In fp32, torch's sum on a CPU loses 6e-4 of a norm over 2^24 elements, 5e-3 over 2^26.
    chunks = (chunk for grad in grads for chunk in grad.reshape(-1).split(SUM_CHUNK))
    return torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]).square().sum()


def clip_coefficient(norm: Tensor, usable: Tensor, max_norm: float | None) -> Tensor:
    """Return the factor that brings gradients to `max_norm`: min(1, max_norm / (norm + 1e-6)); nan if not usable.

    Args:
        norm: fp32 0-d, norm of the gradients. usable: bool 0-d, whether an update is allowed.
        max_norm: largest norm; None: gradients are not clipped.
    """
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(usable, factor, torch.nan)


@torch.no_grad()
def multiply_gradients(parameters: Iterable[torch.nn.Parameter], coefficient: Tensor) -> None:
    """Multiply gradients in place, for optimizers that cannot do it inside their update; nan leaves them unchanged."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        # Private: a few kernels for all gradients. The public clip_grads_with_norm_ (pytorch/pytorch#139662) takes a
        # norm, not a factor.
        torch._foreach_mul_(grads, coefficient.nan_to_num(1.0))


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the learning rate of optimizer step 1..total_steps."""
    warmup = math.ceil(share(optim.warmup_ratio, total_steps))
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.schedule == "constant":
        return optim.lr
    decay = max(round(share(optim.decay_ratio, total_steps)), 1) if optim.schedule == "wsd" else total_steps - warmup
    # Counted up to the previous step, so that the first step of a decay has the full rate and the last is not
    # lost at 0.
    progress = min(max((step - 1 - (total_steps - decay)) / decay, 0.0), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)


def share(ratio: float, total_steps: int) -> Fraction:
    """Return the exact product with the decimal number in the recipe: in floats, 0.07 of 100 steps is more than 7."""
    return Fraction(str(ratio)) * total_steps


STEP = "step"
ATTEMPTS = "attempts"


def named_states(optimizer: Optimizer, orig_model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the optimizer's states by the names of their parameters. No host sync.

    `exp_avg.<parameter>` is a tensor of the parameter's shape, a view of the live state; for a sharded parameter, a
    DTensor with this rank's shard. `step.<parameter>` is its number of updates, int64 0-d, a copy.

    Missing states are first created as zeros, so that a checkpoint can be loaded into them.
    """
    found: dict[str, Tensor] = {}
    for name, param, group in _named(optimizer, orig_model):
        state = optimizer.state[param]
        if not state:
            state.update(optimizer.new_state(param, group))
        found[f"{STEP}.{name}"] = state[STEP].to(torch.int64)
        for key, value in state.items():
            # torchao's states are 8-bit codes and a scale per block of the shard.
            own: Any = local(value)
            if key != STEP and not hasattr(own, "codes"):
                found[f"{key}.{name}"] = _shaped(own, param)
            elif key != STEP:
                found[f"{key}.{name}.codes"] = _shaped(own.codes, param)
                found[f"{key}.{name}.scale"] = own.scale
    return found


def states_loaded(optimizer: Optimizer, orig_model: PreTrainedModel, tensors: dict[str, Tensor], steps: int) -> None:
    """Restore the numbers of updates after a checkpoint was loaded into the tensors of `named_states`.

    Args:
        steps: number of steps of the run so far, including skipped ones: each requested an update.
    """
    for name, param, _ in _named(optimizer, orig_model):
        optimizer.state[param][STEP].copy_(tensors[f"{STEP}.{name}"])
    for group in optimizer.param_groups:
        if ATTEMPTS in group:
            group[ATTEMPTS] = steps


def _named(optimizer: Optimizer, orig_model: PreTrainedModel) -> list[tuple[str, torch.nn.Parameter, Group]]:
    """Return name, parameter and group of every updated parameter."""
    names = {id(p): name for name, p in orig_model.named_parameters()}
    return [(names[id(p)], p, group) for group in optimizer.param_groups for p in group["params"]]


def _shaped(value: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Return a state in the parameter's shape and sharding."""
    return as_sharded(value.view(local(param).shape), param)


def build_optimizer(model: PreTrainedModel, optim: OptimConfig, seed: int = 0) -> Optimizer:
    """Build the recipe's optimizer, with weight decay on matrices but not on norms, biases and embeddings.

    Args:
        model: model in fp32 or bf16; with bf16 the optimizer keeps the updates that the weights would lose.
        seed: seed of stochastic rounding, the same on every rank.

    Raises:
        ConfigError: the optimizer does not fit the model's precision or sharding, needs decoder blocks that
            transformers does not name, or its package is missing.
    """
    assert optim.name != "auto"
    spec = OPTIMIZERS[optim.name]
    groups = parameter_groups(model, optim)
    if spec.unshardable and any(isinstance(p, DTensor) for p in model.parameters()):
        raise config_error("unshardable optimizer", optimizer=spec.name, problem=spec.unshardable, fallback=FALLBACK)
    stages = stages_of(model)
    # Two stages hold tied embedding and head.
    if spec.unshardable and stages is not None and any(len(ranks) > 1 for ranks in stages.holders.values()):
        raise config_error("optimizer of a shared weight", optimizer=spec.name, fallback=FALLBACK)
    module, _, function = spec.code.partition(":")
    try:
        build: Build = getattr(importlib.import_module(module), function)
    except ImportError as error:
        if spec.extra is None:
            raise
        raise config_error(
            "package of an optimizer", spec=spec, error=error, how=install(f"sftkit[{spec.extra.name}]"), other=FALLBACK
        ) from error
    return build(groups, optim, seed=seed)


def parameter_groups(model: PreTrainedModel, optim: OptimConfig) -> Groups:
    """Sort trained parameters by weight decay and, for optimizers such as Muon, by whether they are matrices of
    a block.

    Returns:
        groups with the `params` that this process holds and their `numbers` among all of the model. The numbers
        determine the random bits: two processes of a pipeline hold a tied weight and must round it alike.

    Raises:
        ConfigError: the optimizer needs block matrices, and no block that transformers names has one; a pattern of
            optim.lr_scale matches nothing.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings |= {id(p) for name, p in model.named_parameters() if is_table(p) or TOKEN_ADAPTER in name}
    # The biases of the experts of a block are one parameter of two dimensions.
    embeddings |= {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    trained = [p for p in model.parameters() if p.requires_grad]
    # Embeddings are matrices too, but their rows are looked up: decay would shrink the rows of rare tokens.
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups: Groups = [{"params": matrices, "weight_decay": optim.weight_decay}]
    # Optimizers for matrices only, such as Muon: all other parameters are updated as by AdamW.
    if (elsewhere := OPTIMIZERS[optim.name].elsewhere) is not None:
        inside = {id(p) for block in decoder_blocks(model) for p in block.parameters() if p.ndim == 2}
        in_blocks = [p for p in matrices if id(p) in inside]
        if not in_blocks:
            raise config_error("no matrix in a block", optimizer=optim.name, cls=type(model).__name__, other=elsewhere)
        outside = [p for p in matrices if id(p) not in inside]
        groups = [
            {"params": in_blocks, "weight_decay": optim.weight_decay, "block_matrices": True},
            {"params": outside, "weight_decay": optim.weight_decay, "block_matrices": False},
        ]
    groups.append({**groups[-1], "params": others, "weight_decay": 0.0})
    adapters = adapters_of(model)
    if adapters is not None and adapters.config.lr_ratio_b != 1.0:
        second = {id(p) for name, p in model.named_parameters() if ".lora_B." in name}
        in_b = {**groups[0], "params": [p for p in matrices if id(p) in second]}
        groups[0]["params"] = [p for p in matrices if id(p) not in second]
        groups.append({**in_b, "lr_scale": adapters.config.lr_ratio_b})
    if optim.lr_scale:
        scales = learning_rate_scales(model, optim.lr_scale)
        groups = [
            {**group, "params": same, "lr_scale": group.get("lr_scale", 1.0) * scale}
            for group in groups
            for scale in dict.fromkeys((1.0, *scales.values()))
            if (same := [p for p in group["params"] if scales.get(id(p), 1.0) == scale])
        ]
    if members := members_in(model):
        from sftkit.models.many_adapters import member_factors

        owner = {id(p): k for k in range(len(members)) for p in member_factors(model, k).values()}
        groups = [
            {**group, "params": [p for p in group["params"] if owner[id(p)] == k], "member": k}
            for k in range(len(members))
            for group in groups
        ]
    number = itertools.count()
    for group in groups:
        held = [(p, n) for p, n in zip(group["params"], number, strict=False) if not p.is_meta]
        group |= {"params": [p for p, _ in held], "numbers": [n for _, n in held]}
    return [group for group in groups if group["params"]]
