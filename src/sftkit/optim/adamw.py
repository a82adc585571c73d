"""AdamW for bf16 weights: what bf16 would lose is kept in fp32 masters, or in expectation by stochastic rounding.

An update at a learning rate of 1e-5 is smaller than half the distance between neighbouring bf16 numbers, so rounding to
the nearest one loses it entirely, and the bf16 copy of an fp32 master shows it late. The update is one pointwise
function on flat tensors: on CUDA a Triton kernel for all parameters at once (ops.adamw_kernel), elsewhere eager
(optim.formula). Each rank updates its own shard of a parameter.

A skipped update does not count in the bias corrections. Only the device knows of it in time, so the counts
and what follows from them stay there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.ops.dtensor import local, local_region
from sftkit.optim.adamw_fused import FusedAdamW
from sftkit.optim.formula import (
    Coefficients,
    RandomBits,
    WeightAndMoments,
    corrections,
    numbers_of,
    scalars,
    update_exact,
    update_stochastic,
)
from sftkit.optim.protocol import Group, Groups, Optimizer, State, optimizer_kind, parameters_of, set_learning_rate
from sftkit.runtime.rng import random_key

WARM_UP_ELEMENTS = (32, 33)
"Sizes of the warm-up's tensors: one that aligned loads fill exactly, and one that they do not."


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements that this rank holds, [N].

    Through `.data`, because Dynamo would also guard the shape of the base of a view.
    """
    return local(tensor).data.reshape(-1).data


def first_element(param: torch.Tensor) -> int:
    """Return the index, in the whole parameter, of the first element of this rank's shard.

    So all elements of a parameter that is sharded by rows have numbers of their own, and are rounded as the whole would
    be. Shards by columns (tensor parallelism) share numbers and so random bits: each rounding is unbiased all the same.
    """
    if not isinstance(param, DTensor):
        return 0
    return sum(start * stride for (start, _), stride in zip(local_region(param), param.stride(), strict=True))


def no_updates(param: torch.Tensor) -> torch.Tensor:
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

    def update(self, learning_rate: float, coefficient: torch.Tensor) -> None:
        """Update as optim.protocol says; the coefficient acts inside the update, without a pass over the gradients.

        No host sync.
        """
        set_learning_rate(self.param_groups, learning_rate)
        self.step(clip=coefficient)

    # torch's signature has a closure that is called for the loss: no loop here gives one.
    @torch.no_grad()
    def step(self, closure: None = None, clip: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, at the learning rates of the groups.

        Args:
            closure: must be None.
            clip: fp32 0-d, multiplies the gradients; nan: nothing is updated; None: 1.
        """
        assert closure is None
        for group in self.param_groups:
            group["attempts"] += 1
        self._update_all(clip)

    def _update_all(self, clip: torch.Tensor | None) -> None:
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

    def _corrected(self, numbered: list[Numbered], clip: torch.Tensor) -> torch.Tensor:
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

    def _has_master(self, param: torch.Tensor) -> bool:
        """Return whether a parameter has an fp32 master weight."""
        return param.dtype != torch.float32 and not self._rounds(param)

    def _rounds(self, param: torch.Tensor) -> bool:
        """Return whether a parameter and its states are rounded stochastically."""
        return self.stochastic and param.dtype == torch.bfloat16

    def _zero_states(self, param: torch.Tensor, group: Group) -> State:
        """Return the states, without a master, before the first update; load_state_dict expects their names."""
        dtype = torch.bfloat16 if self._rounds(param) else torch.float32
        zeros = [torch.zeros(local(param).numel(), dtype=dtype, device=param.device) for _ in range(2)]
        return {"step": no_updates(param), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def new_state(self, param: torch.Tensor, group: Group) -> State:
        """Return the states of a parameter before its first update."""
        assert local(param).is_contiguous()
        master = {"master": flat(param).float()} if self._has_master(param) else {}
        return {**self._zero_states(param, group), **master}

    def _state_of(self, param: torch.Tensor, group: Group) -> State:
        """Return the states of a parameter, made if there are none."""
        state: State = self.state[param]
        if not state:
            state.update(self.new_state(param, group))
        return state

    def _update(self, numbered: list[Numbered], clip: torch.Tensor, corrected: torch.Tensor) -> None:
        """Update these parameters; `corrected` has a row for each, fp64 [P, 2]."""
        if clip.is_cuda:
            self._update_in_one_launch(numbered, clip, corrected)
            return
        for one, row in zip(numbered, corrected, strict=True):
            self._update_eager(one, clip, row)

    def _update_in_one_launch(self, numbered: list[Numbered], clip: torch.Tensor, corrected: torch.Tensor) -> None:
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

    def _update_eager(self, one: Numbered, clip: torch.Tensor, corrected: torch.Tensor) -> None:
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

    def _check_states(self, saved: State, param: torch.Tensor, group: Group) -> None:
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
