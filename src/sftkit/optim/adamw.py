"""AdamW: torch's fused version for whole fp32 weights, and ours, which keeps the updates that bf16 weights
would lose.

An update at a learning rate of 1e-5 is smaller than half the distance between neighbouring bf16 numbers, so rounding
to nearest loses it entirely. Ours keeps it in fp32 masters (optim.name=adamw), or in expectation by stochastic
rounding (adamw_sr). The update is one pointwise function on flat tensors: on CUDA a Triton kernel for all parameters
at once (ops.adamw_kernel), elsewhere torch's operators. Each rank updates its own shard of a parameter.

A skipped update does not count in the bias corrections. Only the device knows in time whether an update is skipped,
so the counts and the corrections stay on the device.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError, config_error
from sftkit.ops.tensors import ParameterShard, elements, int32, local, local_region, noise16, stochastic_round
from sftkit.optim import protocol
from sftkit.optim.protocol import Group, Groups, Optimizer, State, parameters_of, set_learning_rate
from sftkit.runtime.open import random_key


def numbers_of(group: Group) -> tuple[float, float, float, float]:
    """Return learning rate times weight decay, 1 - beta1, 1 - beta2 and eps."""
    beta1, beta2 = group["betas"]
    return group["lr"] * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]


def corrections(counts: Tensor, lr: float, betas: tuple[float, float]) -> Tensor:
    """Return the two factors of AdamW's bias correction for each count of updates.

    Args:
        counts: update counts from 1, [P], on any device; 0 gives a result that is not finite.

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
        numbers: values of numbers_of for the parameter's group.
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
    """Update flat tensors in place with fp32 arithmetic. A `clip` of nan changes nothing.

    bf16 tensors are rounded stochastically at every store (arXiv 2502.20566), and so is `rounded`, the bf16 copy of a
    master. Rounded to nearest, a weight that starts at a bf16 number would not move until its master is half way to
    the next number, and training would lag behind fp32 (benchmarks/h200_step, losses).

    Args:
        clip: fp32 0-d factor of the gradient.
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
    """Return three draws of 16 bits for each element, int32 [N] or [B, N], determined by the arguments.

    Args:
        flat: one of B tensors of one size, [N].
        offset: index of the first element in the whole parameter, int32, 0-d or [B, 1]. key0, key1: key
            of the update.
    """
    return noise16(elements(flat) + offset, key0, key1)


def small_table(values: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small table on the device. No host sync."""
    table = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


class FusedAdamW(torch.optim.AdamW):
    """Implement optim.protocol.Optimizer with torch.optim.AdamW and fused=True."""

    found_inf: Tensor
    """fp32 0-d, 1 to skip the update. torch's fused update reads this attribute, which only GradScaler sets
    otherwise, so a step is skipped without a host sync.
    """

    @property
    def kind(self) -> str:
        """Return the kind of states: see optim.protocol."""
        return protocol.optimizer_kind("AdamW", self.param_groups)

    def warm_up(self, *, compiled: bool) -> None:
        """Do nothing: the kernel comes compiled with torch."""

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Update as optim.protocol defines, with torch's fused kernel, which skips a step whose coefficient is NaN."""
        set_learning_rate(self.param_groups, learning_rate)
        protocol.multiply_gradients(parameters_of(self.param_groups), coefficient)
        # GradScaler's way: it sets the attribute for one step only (pytorch/pytorch#88015). torch has no
        # public alternative.
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

    Uses `.data`, because Dynamo would also guard the shape of a view's base.
    """
    return local(tensor).data.reshape(-1).data


def first_element(param: Tensor) -> int:
    """Return the index of the first element of this rank's shard in the whole parameter.

    All elements of a parameter sharded by rows then have distinct numbers, and are rounded as in the whole parameter.
    Shards by columns (tensor parallelism) share numbers and so random bits, but each rounding is still unbiased.
    """
    if not isinstance(param, DTensor):
        return 0
    return sum(start * stride for (start, _), stride in zip(local_region(param), param.stride(), strict=True))


def no_updates(param: Tensor) -> Tensor:
    """Return the update count before the first update: fp32 0-d, on the parameter's device."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


class Numbered(NamedTuple):
    """A parameter with its group and its number among all parameters of the model."""

    number: int
    "number assigned by build.parameter_groups"
    param: torch.nn.Parameter
    group: Group


class AdamW(torch.optim.Optimizer):
    """AdamW with states that are exact, or unbiased, for any dtype of the parameter.

    States of a parameter, flat: `exp_avg`, `exp_avg_sq` (fp32; bf16 if rounded stochastically), `master` (fp32; for
    bf16 parameters unless stochastic), `step` (fp32 0-d on the device, like torch's fused AdamW: the number of
    updates that were not skipped). They are made at the parameter's first update. A group has `attempts` (int), the
    number of requested updates: it determines the random bits of an update and is known to the host.
    """

    label = "AdamW"
    "First word of `kind`."

    def __init__(self, groups: Groups, optim: OptimConfig, *, seed: int = 0, stochastic: bool = False) -> None:
        """Create the optimizer for some parameter groups, with learning rate, betas and epsilon of the settings.

        `stochastic`: whether to round bf16 parameters and states stochastically instead of keeping masters. `seed`:
        seed of the random bits.
        """
        defaults = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": 0.0, "attempts": 0}
        super().__init__(groups, defaults)
        numbers = itertools.count()
        for group in self.param_groups:  # groups from elsewhere than build.parameter_groups: all parameters, in order
            group.setdefault("numbers", list(itertools.islice(numbers, len(group["params"]))))
        self._optim = optim
        self.stochastic = stochastic
        self.seed = seed

    @property
    def kind(self) -> str:
        """Return the kind of states: see optim.protocol."""
        return protocol.optimizer_kind(f"{self.label} stochastic" if self.stochastic else self.label, self.param_groups)

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Update as optim.protocol defines; the coefficient is applied inside the update, without a pass over
        the gradients.

        No host sync.
        """
        set_learning_rate(self.param_groups, learning_rate)
        self.step(clip=coefficient)

    # torch's signature has a closure that computes the loss: no loop here passes one.
    @torch.no_grad()
    def step(self, closure: None = None, clip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient with its group's learning rate.

        Args:
            closure: must be None.
            clip: fp32 0-d factor of the gradients; nan: nothing is updated; None: 1.
        """
        assert closure is None
        for group in self.param_groups:
            group["attempts"] += 1
        numbered = self._numbered()
        if not numbered:
            return
        clip = torch.ones((), device=numbered[0].param.device) if clip is None else clip
        self._update(numbered, clip, self._corrected(numbered, clip))

    def _numbered(self) -> list[Numbered]:
        """Return the parameters that have a gradient, in the order of their update."""
        # Includes empty shards: their updates are counted, and Muon gathers the shards of all ranks.
        return [
            Numbered(number, param, group)
            for group in self.param_groups
            for number, param in zip(group["numbers"], group["params"], strict=True)
            if param.grad is not None
        ]

    def _corrected(self, numbered: list[Numbered], clip: Tensor) -> Tensor:
        """Count an update of these parameters, unless it is skipped, and return their rows of `corrections`,
        fp64 [P, 2].
        """
        for one in numbered:
            if not self.state[one.param]:
                self.state[one.param].update(self.new_state(one.param, one.group))
        steps = [self.state[one.param]["step"] for one in numbered]
        # Private: one launch for all counts. torch's own optimizers use these operators, and torch 2.13 has no public
        # alternative (pytorch/pytorch#145355; #193607 proposes torch.foreach).
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
        """Return the states before the first update, without a master; load_state_dict expects their names."""
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
        """Return the inputs of a parameter's update, with flat tensors."""
        assert one.param.grad is not None
        state, weight = self.state[one.param], flat(one.param)
        master = state.get("master")
        rounded = None if master is None else weight
        tensors = (weight if master is None else master, rounded, flat(one.param.grad))
        moments = (state["exp_avg"], state["exp_avg_sq"])
        return ParameterShard(*tensors, *moments, numbers_of(one.group), first_element(one.param), self._key(one))

    def _key(self, one: Numbered) -> int:
        """Return the 64-bit key for the random bits of an update."""
        return random_key(self.seed, one.group["attempts"], one.number)

    @torch.no_grad()
    def warm_up(self, *, compiled: bool) -> None:
        """Load the kernels of `update` by running them on temporary tensors; parameters, states and RNG
        do not change.
        """
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
        """Load states bit for bit: torch's own method would cast every state, even a master, to its
        parameter's dtype.

        Raises:
            ConfigError: the states belong to another optimizer.
        """
        # torch's own method loads the groups; the states are loaded unchanged.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        saved_ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, (param, group) in zip(saved_ids, self._parameters(), strict=True):
            if saved := state_dict["state"].get(saved_id):
                self._check_states(saved, param, group)
                self.state[param] = {name: value.to(param.device, copy=True) for name, value in saved.items()}

    def _check_states(self, saved: State, param: Tensor, group: Group) -> None:
        """Reject states whose names or dtypes differ from this optimizer's states for the parameter."""
        expected = {*self._zero_states(param, group), *(["master"] if self._has_master(param) else [])}
        dtype = torch.bfloat16 if self._rounds(param) else torch.float32
        same = {value.dtype for name, value in saved.items() if name != "step"} == {dtype}
        if set(saved) != expected or not same:
            words = {"cls": type(self).__name__, "dtype": str(dtype).removeprefix("torch.")}
            raise config_error("states of another optimizer", saved=sorted(saved), expected=sorted(expected), **words)


def build(groups: Groups, optim: OptimConfig, *, seed: int) -> Optimizer:
    """Build the optimizer of optim.name=adamw: torch's own if all parameters are fp32, otherwise ours with masters."""
    parameters = list(parameters_of(groups))
    # torch's fused update rejects `found_inf`, a plain tensor, together with sharded parameters:
    # pytorch/pytorch#126670 reports it for GradScaler, which sets the attribute.
    if all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in parameters):
        return FusedAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return AdamW(groups, optim, seed=seed)


def build_stochastic(groups: Groups, optim: OptimConfig, *, seed: int) -> AdamW:
    """Build the optimizer of optim.name=adamw_sr: weights and moments in bf16, exact in expectation.

    Raises:
        ConfigError: no weight is bf16, so nothing would be rounded.
    """
    if all(p.dtype != torch.bfloat16 for p in parameters_of(groups)):
        raise ConfigError("optim.name=adamw_sr rounds bf16 weights: set train.precision=bf16, or optim.name=adamw")
    return AdamW(groups, optim, seed=seed, stochastic=True)
