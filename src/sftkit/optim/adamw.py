"""The arithmetic of AdamW by torch's operators, on flat tensors: for any device, and as the reference of the kernel.

torch's fused AdamW, for fp32 weights that are not sharded: one kernel for all of them.

AdamW for bf16 weights: what bf16 would lose is kept in fp32 masters, or in expectation by stochastic rounding.

An update at a learning rate of 1e-5 is smaller than half the distance between neighbouring bf16 numbers, so rounding to
the nearest one loses it entirely, and the bf16 copy of an fp32 master shows it late. The update is one pointwise
function on flat tensors: on CUDA a Triton kernel for all parameters at once (ops.adamw_kernel), elsewhere eager
(optim.formula). Each rank updates its own shard of a parameter.

A skipped update does not count in the bias corrections. Only the device knows of it in time, so the counts
and what follows from them stay there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.ops.tensors import elements, int32, local, local_region, noise16, stochastic_round
from sftkit.optim.protocol import (
    Group,
    Groups,
    Optimizer,
    State,
    multiply_gradients,
    optimizer_kind,
    parameters_of,
    set_learning_rate,
)
from sftkit.runtime.open import random_key


class Scalars(NamedTuple):
    """The numbers that the update of a group needs: 0-d fp32 tensors on the CPU."""

    decay: Tensor
    "learning rate times weight decay"
    rate1: Tensor
    "1 - beta1"
    rate2: Tensor
    "1 - beta2"
    eps: Tensor


def numbers_of(group: Group) -> tuple[float, float, float, float]:
    """Return the numbers of a group, in the order of Scalars."""
    beta1, beta2 = group["betas"]
    return group["lr"] * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]


@functools.lru_cache(maxsize=32)
def scalars(*numbers: float) -> Scalars:
    """Return the numbers of a group as tensors, the same objects for the same numbers."""
    return Scalars(*(torch.tensor(number, dtype=torch.float32) for number in numbers))


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


class WeightAndMoments(NamedTuple):
    """The tensors of a parameter, or of this rank's shard of it, that an update changes, flat: [N]."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Coefficients(NamedTuple):
    """The numbers of an update of one parameter."""

    clip: Tensor
    "fp32 0-d, multiplies the gradient; nan: everything stays as it is"
    scalars: Scalars
    "of its group"
    corrected: Tensor
    "fp64 [2], a row of `corrections`"


class RandomBits(NamedTuple):
    """The random bits of an update, for stochastic rounding: all follow from these numbers, int32 0-d, or [B, 1] for B
    tensors of one size."""

    offset: Tensor
    "index of the first element in the whole parameter"
    key0: Tensor
    key1: Tensor

    @classmethod
    def of(cls, offset: int, key: int) -> RandomBits:
        """Return the random bits of the shard that begins with the element `offset`. `key`: 64 bits, of the update."""
        return cls(int32(offset), int32(key), int32(key >> 32))

    def noise(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three draws of 16 bits for each element, int32 [N] or [B, N]. `flat`: one of the tensors, [N]."""
        return noise16(elements(flat) + self.offset, self.key0, self.key1)


def adamw(old: WeightAndMoments, grad: Tensor, scalars: Scalars, corrected: Tensor) -> WeightAndMoments:
    """Return the new weight and moments, all fp32 of one shape (Loshchilov & Hutter 2019, algorithm 2).

    Args:
        corrected: fp64 [2], a row of `corrections`.
    """
    step_size, root2 = corrected.float().unbind()
    exp_avg = old.exp_avg + (grad - old.exp_avg) * scalars.rate1
    exp_avg_sq = old.exp_avg_sq + (grad * grad - old.exp_avg_sq) * scalars.rate2
    direction = exp_avg / (exp_avg_sq.sqrt() / root2 + scalars.eps)
    weight = old.weight - (scalars.decay * old.weight + step_size * direction)
    return WeightAndMoments(weight, exp_avg, exp_avg_sq)


def update_exact(
    stored: WeightAndMoments, rounded: Tensor | None, grad: Tensor, by: Coefficients, bits: RandomBits
) -> None:
    """Update flat fp32 weight and moments in place; `rounded`, the bf16 parameter of a master weight, follows.

    A `clip` of nan leaves everything as it is.

    `rounded` is rounded stochastically. Rounded to the nearest, a weight that starts at a bf16 number would stand still
    until its master has moved half the distance to the next one, and training would lag behind fp32
    (benchmarks/h200_step, losses).

    Args:
        stored: fp32 [N].
        rounded: bf16 [N]; None: the weight has no such copy.
        grad: [N].
    """
    new = adamw(stored, grad.float() * by.clip, by.scalars, by.corrected)
    usable = ~by.clip.isnan()
    if rounded is not None:
        rounded.copy_(torch.where(usable, stochastic_round(new.weight, bits.noise(rounded)[0]), rounded))
    for old, value in zip(stored, new, strict=True):
        old.copy_(torch.where(usable, value, old))


def update_stochastic(stored: WeightAndMoments, grad: Tensor, by: Coefficients, bits: RandomBits) -> None:
    """Update flat bf16 tensors in place, in fp32 inside; every store is rounded stochastically (arXiv 2502.20566).

    A `clip` of nan leaves everything as it is.
    """
    precise = WeightAndMoments(*(old.float() for old in stored))
    new = adamw(precise, grad.float() * by.clip, by.scalars, by.corrected)
    usable = ~by.clip.isnan()
    for old, value, noise in zip(stored, new, bits.noise(stored.weight), strict=True):
        old.copy_(torch.where(usable, stochastic_round(value, noise), old))


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
        return optimizer_kind("AdamW", self.param_groups)

    def warm_up(self, *, compiled: bool) -> None:
        """Do nothing: the kernel comes compiled with torch."""

    def update(self, learning_rate: float, coefficient: Tensor) -> None:
        """Update as optim.protocol says, by torch's fused kernel, which skips a step whose coefficient is NaN."""
        set_learning_rate(self.param_groups, learning_rate)
        multiply_gradients(parameters_of(self.param_groups), coefficient)
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
        self._optim, self.stochastic, self.seed = optim, stochastic, seed

    @property
    def kind(self) -> str:
        """Return what decides which states there are: see optim.protocol."""
        return optimizer_kind(f"{self.label} stochastic" if self.stochastic else self.label, self.param_groups)

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
        steps = [self._state_of(one.param, one.group)["step"] for one in numbered]
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

    def _state_of(self, param: Tensor, group: Group) -> State:
        """Return the states of a parameter, made if there are none."""
        state: State = self.state[param]
        if not state:
            state.update(self.new_state(param, group))
        return state

    def _update(self, numbered: list[Numbered], clip: Tensor, corrected: Tensor) -> None:
        """Update these parameters; `corrected` has a row for each, fp64 [P, 2]."""
        if clip.is_cuda:
            self._update_in_one_launch(numbered, clip, corrected)
            return
        for one, row in zip(numbered, corrected, strict=True):
            self._update_eager(one, clip, row)

    def _update_in_one_launch(self, numbered: list[Numbered], clip: Tensor, corrected: Tensor) -> None:
        """Update these parameters by the Triton kernel."""
        from sftkit.ops.adamw_kernel import ParameterShard, update_  # Triton is not installed on CPU machines

        rows = []
        for one in numbered:
            param, group, state = one.param, one.group, self.state[one.param]
            assert param.grad is not None
            weight, master = local(param).detach(), state.get("master")
            row = ParameterShard(
                weight=weight if master is None else master,
                rounded=None if master is None else weight,
                grad=local(param.grad).contiguous(),
                exp_avg=state["exp_avg"],
                exp_avg_sq=state["exp_avg_sq"],
                scalars=numbers_of(group),
                offset=first_element(param),
                key=self._key(one),
            )
            rows.append(row)
        update_(rows, clip, corrected)

    def _key(self, one: Numbered) -> int:
        """Return the 64-bit key of the random bits of an update."""
        return random_key(self.seed, one.group["attempts"], one.number)

    def _update_eager(self, one: Numbered, clip: Tensor, corrected: Tensor) -> None:
        """Update one parameter by torch's operators."""
        param, group, state = one.param, one.group, self.state[one.param]
        assert param.grad is not None
        weight, grad = flat(param), flat(param.grad)
        by = Coefficients(clip, scalars(*numbers_of(group)), corrected)
        bits = RandomBits.of(first_element(param), self._key(one))
        master = state.get("master")
        stored = WeightAndMoments(weight if master is None else master, state["exp_avg"], state["exp_avg_sq"])
        if self._rounds(param):
            update_stochastic(stored, grad, by, bits)
        else:
            update_exact(stored, None if master is None else weight, grad, by, bits)

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
        """Refuse states of other names or dtypes than this optimizer keeps for the parameter."""
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
