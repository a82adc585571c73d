"""AdamW: torch's fused one for fp32 weights that are whole, and ours, which keeps what bf16 weights would lose.

An update at a learning rate of 1e-5 is smaller than half the distance between neighbouring bf16 numbers, so rounding to
the nearest one loses it entirely. Ours keeps it in fp32 masters (optim.name=adamw), or in expectation by stochastic
rounding (adamw_sr). The update is one pointwise function on flat tensors: on CUDA a Triton kernel for all parameters at
once (ops.adamw_kernel), elsewhere torch's operators. Each rank updates its own shard of a parameter.

A skipped update does not count in the bias corrections. Only the device knows of it in time, so the counts and what
follows from them stay there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.ops.tensors import ParameterShard, elements, int32, local, local_region, noise16, stochastic_round
from sftkit.optim import protocol
from sftkit.optim.protocol import Group, Groups, Optimizer, State, parameters_of, set_learning_rate
from sftkit.runtime.open import random_key


def numbers_of(group: Group) -> tuple[float, float, float, float]:
    """Return learning rate times weight decay, 1 - beta1, 1 - beta2 and eps."""
    beta1, beta2 = group["betas"]
    return group["lr"] * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]


def corrections(counts: Tensor, lr: float, betas: tuple[float, float]) -> Tensor:
    """Return the two numbers of AdamW's bias correction after each count of updates.

    Args:
        counts: [P], update numbers from 1, on any device; of 0 the result is not finite.

    Returns:
        fp64 [P, 2] on that device: lr / (1 - beta1^count) and sqrt(1 - beta2^count). In fp32 the first count of
        beta2=0.999 would be off by 6e-5.
    """
    counts = counts.double()
    beta1, beta2 = betas
    return torch.stack((lr / (1 - beta1**counts), (1 - beta2**counts).sqrt()), dim=1)


Updated = tuple[Tensor, Tensor, Tensor]
"Weight, exp_avg and exp_avg_sq of a parameter, or of this rank's shard of it."


def adamw(old: Updated, grad: Tensor, numbers: tuple[float, float, float, float], corrected: Tensor) -> Updated:
    """Return the new weight and moments, all fp32 of one shape (Loshchilov & Hutter 2019, algorithm 2).

    Args:
        numbers: of the group (numbers_of).
        corrected: fp64 [2], a row of `corrections`.
    """
    weight, exp_avg, exp_avg_sq = old
    decay, rate1, rate2, eps = numbers
    step_size, root2 = corrected.float().unbind()
    exp_avg = exp_avg + (grad - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq + (grad * grad - exp_avg_sq) * rate2
    direction = exp_avg / (exp_avg_sq.sqrt() / root2 + eps)
    return weight - (decay * weight + step_size * direction), exp_avg, exp_avg_sq


def update_eagerly(shard: ParameterShard, clip: Tensor, corrected: Tensor) -> None:
    """Update flat tensors in place, in fp32 inside. A `clip` of nan leaves everything as it is.

    bf16 tensors are rounded stochastically at every store (arXiv 2502.20566). So is `rounded`, the bf16 copy of a
    master: rounded to the nearest, a weight that starts at a bf16 number would stand still until its master has moved
    half the distance to the next one, and training would lag behind fp32 (benchmarks/h200_step, losses).

    Args:
        clip: fp32 0-d, multiplies the gradient.
        corrected: fp64 [2], a row of `corrections`.
    """
    stored = (shard.weight, shard.exp_avg, shard.exp_avg_sq)
    exact = (shard.weight.float(), shard.exp_avg.float(), shard.exp_avg_sq.float())
    new = adamw(exact, shard.grad.float() * clip, shard.scalars, corrected)
    usable = ~clip.isnan()
    stochastic = shard.weight.dtype == torch.bfloat16
    noise: Sequence[Tensor] = ()
    if stochastic or shard.rounded is not None:
        noise = random_bits(shard.weight, int32(shard.offset), int32(shard.key), int32(shard.key >> 32))
    if shard.rounded is not None:
        shard.rounded.copy_(torch.where(usable, stochastic_round(new[0], noise[0]), shard.rounded))
    for i, (old, value) in enumerate(zip(stored, new, strict=True)):
        old.copy_(torch.where(usable, stochastic_round(value, noise[i]) if stochastic else value, old))


def random_bits(flat: Tensor, offset: Tensor, key0: Tensor, key1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three draws of 16 bits for each element, int32 [N] or [B, N]: all follow from the numbers given.

    Args:
        flat: one of B tensors of one size, [N].
        offset: index of the first element in the whole parameter, int32, 0-d or [B, 1]. key0, key1: of the update.
    """
    return noise16(elements(flat) + offset, key0, key1)


def small_table(values: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small table on the device. No host sync."""
    table = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


class FusedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW with fused=True as an optim.protocol.Optimizer."""

    found_inf: Tensor
    """fp32 0-d, 1 for no update. torch's fused update reads it from its optimizer, where only GradScaler sets it; so a
    step is skipped without a host sync."""

    @property
    def kind(self) -> str:
        """Return what decides which states there are: see optim.protocol."""
        return protocol.optimizer_kind("AdamW", self.param_groups)

    def warm_up(self, *, compiled: bool) -> None:
        """Do nothing: the kernel comes compiled with torch."""

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Update as optim.protocol says, by torch's fused kernel, which skips a step whose coefficient is NaN."""
        set_learning_rate(self.param_groups, learning_rate)
        protocol.multiply_gradients(parameters_of(self.param_groups), coefficient)
        # The way of GradScaler, which sets the attribute for one step only (pytorch/pytorch#88015); public torch
        # has no other.
        self.found_inf = coefficient.isnan().float()
        try:
            self.step()
        finally:
            del self.found_inf

    def new_state(self, param: Tensor, group: Group) -> State:
        """Return the states of a parameter before its first update."""
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        return {"step": step, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}


WARM_UP_ELEMENTS = (32, 33)
"Sizes of the warm-up's tensors: one that aligned loads fill exactly, and one that they do not."


def flat(tensor: Tensor) -> Tensor:
    """Return all elements that this rank holds, [N].

    Through `.data`, because Dynamo would also guard the shape of the base of a view.
    """
    return local(tensor).data.reshape(-1).data


def first_element(param: Tensor) -> int:
    """Return the index, in the whole parameter, of the first element of this rank's shard.

    So all elements of a parameter that is sharded by rows have numbers of their own, and are rounded as the whole would
    be. Shards by columns (tensor parallelism) share numbers and so random bits: each rounding is unbiased all the same.
    """
    if not isinstance(param, DTensor):
        return 0
    return sum(start * stride for (start, _), stride in zip(local_region(param), param.stride(), strict=True))


def no_updates(param: Tensor) -> Tensor:
    """Return a count of updates before the first one: fp32 0-d, on the parameter's device."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


class Numbered(NamedTuple):
    """A parameter with its group and its number among all of the model."""

    number: int
    "as build.parameter_groups counts"
    param: torch.nn.Parameter
    group: Group


class AdamW(torch.optim.Optimizer):
    """AdamW whose states are exact, or unbiased, whatever the dtype of the parameter.

    States of a parameter, flat: `exp_avg`, `exp_avg_sq` (fp32; bf16 if rounded stochastically), `master` (fp32; for
    bf16 parameters unless stochastic), `step` (fp32 0-d on the device, as torch's fused AdamW has it: updates that were
    not skipped). They are made at the parameter's first update. A group has `attempts` (int), the updates that were
    asked for: the random bits of an update follow from this number, which the host knows.
    """

    label = "AdamW"
    "First word of `kind`."

    def __init__(self, groups: Groups, optim: OptimConfig, *, seed: int = 0, stochastic: bool = False) -> None:
        """Take parameter groups; of the settings only learning rate, betas and epsilon count.

        `stochastic`: round bf16 parameters and states stochastically instead of keeping masters.
        `seed`: of the random bits.
        """
        defaults = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": 0.0, "attempts": 0}
        super().__init__(groups, defaults)
        numbers = itertools.count()
        for group in self.param_groups:  # groups of another maker than build.parameter_groups: all parameters, in order
            group.setdefault("numbers", list(itertools.islice(numbers, len(group["params"]))))
        self._optim = optim
        self.stochastic = stochastic
        self.seed = seed

    @property
    def kind(self) -> str:
        """Return what decides which states there are: see optim.protocol."""
        return protocol.optimizer_kind(f"{self.label} stochastic" if self.stochastic else self.label, self.param_groups)

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Update as optim.protocol says; the coefficient acts inside the update, without a pass over the gradients.

        No host sync.
        """
        set_learning_rate(self.param_groups, learning_rate)
        self.step(clip=coefficient)

    # torch's signature has a closure that is called for the loss: no loop here gives one.
    @torch.no_grad()
    def step(self, closure: None = None, clip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, at the learning rates of the groups.

        Args:
            closure: must be None.
            clip: fp32 0-d, multiplies the gradients; nan: nothing is updated; None: 1.
        """
        assert closure is None
        for group in self.param_groups:
            group["attempts"] += 1
        self._update_all(clip)

    def _update_all(self, clip: Tensor | None) -> None:
        """Update every parameter that has a gradient, as `step` says."""
        numbered = self._numbered()
        if not numbered:
            return
        clip = torch.ones((), device=numbered[0].param.device) if clip is None else clip
        self._update(numbered, clip, self._corrected(numbered, clip))

    def _numbered(self) -> list[Numbered]:
        """Return the parameters that have a gradient, in the order of their update."""
        # Empty shards too: their updates are counted, and Muon gathers the shards of all ranks.
        return [
            Numbered(number, param, group)
            for group in self.param_groups
            for number, param in zip(group["numbers"], group["params"], strict=True)
            if param.grad is not None
        ]

    def _corrected(self, numbered: list[Numbered], clip: Tensor) -> Tensor:
        """Count an update of these parameters, unless it is skipped; return their rows of
        `corrections`, fp64 [P, 2]."""
        for one in numbered:
            if not self.state[one.param]:
                self.state[one.param].update(self.new_state(one.param, one.group))
        steps = [self.state[one.param]["step"] for one in numbered]
        # Private: one launch for all counts. torch's own optimizers use these operators, and torch 2.13 has no public
        # ones (pytorch/pytorch#145355; #193607 proposes torch.foreach).
        torch._foreach_add_(steps, [(~clip.isnan()).to(steps[0].dtype)] * len(steps))
        runs = [list(same) for _, same in itertools.groupby(numbered, key=lambda one: id(one.group))]
        groups = [members[0].group for members in runs]
        counts_of_runs = torch.stack(steps).split([len(members) for members in runs])
        return torch.cat([corrections(n, g["lr"], g["betas"]) for n, g in zip(counts_of_runs, groups, strict=True)])

    def _parameters(self) -> Iterator[tuple[torch.nn.Parameter, Group]]:
        """Return each parameter with its group."""
        return ((param, group) for group in self.param_groups for param in group["params"])

    def _has_master(self, param: Tensor) -> bool:
        """Return whether a parameter has an fp32 master weight."""
        return param.dtype != torch.float32 and not self._rounds(param)

    def _rounds(self, param: Tensor) -> bool:
        """Return whether a parameter and its states are rounded stochastically."""
        return self.stochastic and param.dtype == torch.bfloat16

    def _zero_states(self, param: Tensor, group: Group) -> State:
        """Return the states, without a master, before the first update; load_state_dict expects their names."""
        dtype = torch.bfloat16 if self._rounds(param) else torch.float32
        zeros = [torch.zeros(local(param).numel(), dtype=dtype, device=param.device) for _ in range(2)]
        return {"step": no_updates(param), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def new_state(self, param: Tensor, group: Group) -> State:
        """Return the states of a parameter before its first update."""
        assert local(param).is_contiguous()
        master = {"master": flat(param).float()} if self._has_master(param) else {}
        return {**self._zero_states(param, group), **master}

    def _update(self, numbered: list[Numbered], clip: Tensor, corrected: Tensor) -> None:
        """Update these parameters; `corrected` has a row for each, fp64 [P, 2]."""
        shards = [self._shard(one) for one in numbered]
        if clip.is_cuda:
            from sftkit.ops.adamw_kernel import update_  # Triton is not installed on CPU machines

            update_(shards, clip, corrected)
        else:
            for shard, row in zip(shards, corrected, strict=True):
                update_eagerly(shard, clip, row)

    def _shard(self, one: Numbered) -> ParameterShard:
        """Return what an update of a parameter needs, its tensors flat."""
        assert one.param.grad is not None
        state, weight = self.state[one.param], flat(one.param)
        master = state.get("master")
        rounded = None if master is None else weight
        tensors = (weight if master is None else master, rounded, flat(one.param.grad))
        moments = (state["exp_avg"], state["exp_avg_sq"])
        return ParameterShard(*tensors, *moments, numbers_of(one.group), first_element(one.param), self._key(one))

    def _key(self, one: Numbered) -> int:
        """Return the 64-bit key of the random bits of an update."""
        return random_key(self.seed, one.group["attempts"], one.number)

    @torch.no_grad()
    def warm_up(self, *, compiled: bool) -> None:
        """Load the kernels that `update` will run, on tensors that are thrown away; parameters,
        states and RNG stay untouched."""
        kinds = {(param.dtype, param.device): group for param, group in self._parameters()}
        for (dtype, device), group in kinds.items():
            if device.type == "cuda":
                thrown = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in WARM_UP_ELEMENTS]
                for param in thrown:
                    param.grad = torch.zeros_like(param)
                settings = {name: value for name, value in group.items() if name not in ("params", "numbers")}
                AdamW([{**settings, "params": thrown}], self._optim, stochastic=self.stochastic).step()

    # Any, as in the protocol
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states bit for bit: torch's own would cast every state, also a master, to the dtype of its parameter.

        Raises:
            ConfigError: the states are those of another optimizer.
        """
        # torch's own takes the groups; the states follow as they are.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        saved_ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, (param, group) in zip(saved_ids, self._parameters(), strict=True):
            if saved := state_dict["state"].get(saved_id):
                self._check_states(saved, param, group)
                self.state[param] = {name: value.to(param.device, copy=True) for name, value in saved.items()}

    def _check_states(self, saved: State, param: Tensor, group: Group) -> None:
        """Reject states of other names or dtypes than this optimizer keeps for the parameter."""
        expected = {*self._zero_states(param, group), *(["master"] if self._has_master(param) else [])}
        dtype = torch.bfloat16 if self._rounds(param) else torch.float32
        same = {value.dtype for name, value in saved.items() if name != "step"} == {dtype}
        if set(saved) != expected or not same:
            raise ConfigError(
                f"optimizer state {sorted(saved)} does not fit {type(self).__name__}, which keeps {sorted(expected)} "
                f"in {str(dtype).removeprefix('torch.')}: resume with the optim.name and train.precision of the "
                "checkpoint, or start from its weights with model.path"
            )


def build(groups: Groups, optim: OptimConfig, *, seed: int) -> Optimizer:
    """Build the optimizer of optim.name=adamw: torch's own where all is fp32, else ours, with masters."""
    parameters = list(parameters_of(groups))
    # torch's fused update does not take `found_inf`, a plain tensor, together with sharded parameters:
    # pytorch/pytorch#126670 is of a GradScaler, which sets it.
    if all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in parameters):
        return FusedAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return AdamW(groups, optim, seed=seed)


def build_stochastic(groups: Groups, optim: OptimConfig, *, seed: int) -> AdamW:
    """Build the optimizer of optim.name=adamw_sr: weights and moments in bf16, exact in expectation.

    Raises:
        ConfigError: no weight is bf16, so that nothing would be rounded.
    """
    if all(p.dtype != torch.bfloat16 for p in parameters_of(groups)):
        raise ConfigError("optim.name=adamw_sr rounds bf16 weights: set train.precision=bf16, or optim.name=adamw")
    return AdamW(groups, optim, seed=seed, stochastic=True)
