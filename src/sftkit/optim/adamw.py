"""AdamW for bf16 weights: what bf16 would lose is kept in fp32 masters, or in expectation by stochastic rounding.

An update of a learning rate of 1e-5 is smaller than half the distance between neighbouring bf16 numbers, so rounding to
the nearest one loses it entirely, and the bf16 copy of an fp32 master shows it late. The update is one pointwise
function on flat tensors: on CUDA a Triton kernel for all parameters at once (ops.adamw_kernel), elsewhere eager
(optim.formula). Of a sharded parameter each rank updates its own piece.

An update that is left out does not count in the bias corrections. Only the device knows of it in time, so the counts and
what follows from them stay there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.ops.dtensor import contiguous_strides, local, local_region
from sftkit.ops.rounding import int32
from sftkit.optim.adamw_fused import FusedAdamW
from sftkit.optim.formula import corrections, scalars, update_exact, update_stochastic
from sftkit.optim.protocol import Groups, Optimizer, kind_of, parameters_of, set_learning_rate
from sftkit.runtime.rng import random_key

WARM_UP_ELEMENTS = (32, 33)
"Sizes of the throw-away tensors of the warm-up: of whole vectors, and not."


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements that this rank holds, in one dimension; `.data`, because Dynamo would also guard the shape of the base
    of a view."""
    return local(tensor).data.reshape(-1).data


def first_element(param: torch.Tensor) -> int:
    """The number, in the whole parameter, of the first element of this rank's piece.

    Of a parameter cut by rows all elements so get their own numbers, and are rounded as the whole would be. Pieces cut by
    columns (tensor parallelism) share numbers, so random bits: each rounding is unbiased all the same.
    """
    if not isinstance(param, DTensor):
        return 0
    region = local_region(param)
    return sum(start * stride for (start, _), stride in zip(region, contiguous_strides(param.shape), strict=True))


def no_updates(param: torch.Tensor) -> torch.Tensor:
    """A count of updates before the first one."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


class Numbered(NamedTuple):
    """A parameter with its number among all of the optimizer, and its group."""

    number: int
    param: torch.nn.Parameter
    group: dict[str, Any]


class AdamW(torch.optim.Optimizer):
    """AdamW whose states are exact, or unbiased, whatever the dtype of the parameter.

    States of a parameter, flat: `exp_avg`, `exp_avg_sq` (fp32; bf16 if rounded stochastically), `master` (fp32; for bf16
    parameters unless stochastic), `step` (fp32 0-d on the device, as torch's fused AdamW has it: updates that were not
    left out). They are made at the parameter's first update. A group has `attempts` (int), the updates that were asked
    for: the random bits of an update follow from it, as the host knows it.
    """

    label = "AdamW"
    "For `kind`."

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        stochastic: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "attempts": 0})
        self.stochastic, self.seed = stochastic, seed

    @property
    def kind(self) -> str:
        return kind_of(f"{self.label} stochastic" if self.stochastic else self.label, self.param_groups)

    def update(self, learning_rate: float, coefficient: torch.Tensor) -> None:
        """See optim.protocol; the coefficient acts inside the update, without a pass over the gradients. No host sync."""
        set_learning_rate(self.param_groups, learning_rate)
        self.step(clip=coefficient)

    @torch.no_grad()
    def step(self, closure: None = None, clip: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Update at the rates of the groups every parameter that has a gradient; None: gradients as they are."""
        assert closure is None
        for group in self.param_groups:
            group["attempts"] += 1
        # Also of an empty piece: its updates are counted, and Muon gathers the pieces of all ranks.
        numbered = [Numbered(i, p, g) for i, (p, g) in enumerate(self._parameters()) if p.grad is not None]
        if not numbered:
            return
        clip = torch.ones((), device=numbered[0].param.device) if clip is None else clip
        self._update(numbered, clip, self._corrected(numbered, clip))

    def _corrected(self, numbered: list[Numbered], clip: torch.Tensor) -> torch.Tensor:
        """Count an update, unless it is left out, of these parameters; their rows of `corrections`, on the device."""
        steps = [self._state_of(one.param, one.group)["step"] for one in numbered]
        torch._foreach_add_(steps, [(~clip.isnan()).to(steps[0].dtype)] * len(steps))
        counts = torch.stack(steps)
        rows, start = [], 0
        for _, same in itertools.groupby(numbered, key=lambda one: id(one.group)):
            members = list(same)
            group, end = members[0].group, start + len(members)
            rows.append(corrections(counts[start:end], group["lr"], tuple(group["betas"])))
            start = end
        return torch.cat(rows)

    def _parameters(self) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield param, group

    def _has_master(self, param: torch.Tensor) -> bool:
        return param.dtype != torch.float32 and not self._rounds(param)

    def _rounds(self, param: torch.Tensor) -> bool:
        return self.stochastic and param.dtype == torch.bfloat16

    def _zero_states(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """States before the first update; their names are also what load_state_dict asks for."""
        dtype = torch.bfloat16 if self._rounds(param) else torch.float32
        zeros = [torch.zeros(local(param).numel(), dtype=dtype, device=param.device) for _ in range(2)]
        return {"step": no_updates(param), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """States of a parameter before its first update."""
        assert local(param).is_contiguous()
        master = {"master": flat(param).float()} if self._has_master(param) else {}
        return {**self._zero_states(param, group), **master}

    def _state_of(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state.update(self.new_state(param, group))
        return state

    def _update(self, numbered: list[Numbered], clip: torch.Tensor, corrected: torch.Tensor) -> None:
        """Update these parameters, of each of which `corrected` has a row."""
        if clip.is_cuda:
            self._update_in_one_launch(numbered, clip, corrected)
            return
        for one, row in zip(numbered, corrected, strict=True):
            self._update_eager(one, clip, row)

    def _update_in_one_launch(self, numbered: list[Numbered], clip: torch.Tensor, corrected: torch.Tensor) -> None:
        from sftkit.ops.adamw_kernel import ParameterShard, update_  # Triton is not installed on CPU machines

        rows = []
        for one in numbered:
            param, group, state = one.param, one.group, self.state[one.param]
            assert param.grad is not None
            weight, master = local(param).detach(), state.get("master")
            lr, (beta1, beta2) = group["lr"], group["betas"]
            row = ParameterShard(
                weight=weight if master is None else master,
                rounded=None if master is None else weight,
                grad=local(param.grad).contiguous(),
                exp_avg=state["exp_avg"],
                exp_avg_sq=state["exp_avg_sq"],
                scalars=(lr * group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]),
                first=first_element(param),
                key=self._key(one),
            )
            rows.append(row)
        update_(rows, clip, corrected)

    def _key(self, one: Numbered) -> int:
        """Of the random bits of an update."""
        return random_key(self.seed, one.group["attempts"], one.number)

    def _update_eager(self, one: Numbered, clip: torch.Tensor, corrected: torch.Tensor) -> None:
        """One parameter, by torch's operators."""
        param, group, state = one.param, one.group, self.state[one.param]
        s = scalars(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"])
        assert param.grad is not None
        key = self._key(one)
        rest = (flat(param.grad), state["exp_avg"], state["exp_avg_sq"], clip, s, corrected)
        bits = (int32(first_element(param)), int32(key), int32(key >> 32))
        if self._rounds(param):
            update_stochastic(flat(param), *rest, *bits)
        elif "master" in state:
            update_exact(state["master"], flat(param), *rest, *bits)
        else:
            update_exact(flat(param), None, *rest, *bits)

    @torch.no_grad()
    def warm_up(self, compiled: bool) -> None:
        """Load the kernels that `update` will run, on tensors that are thrown away; parameters, states and RNG stay untouched."""
        kinds = {(param.dtype, param.device): group for param, group in self._parameters()}
        for (dtype, device), group in kinds.items():
            if device.type == "cuda":
                thrown = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in WARM_UP_ELEMENTS]
                for param in thrown:
                    param.grad = torch.zeros_like(param)
                settings = {name: value for name, value in group.items() if name != "params"}
                other = AdamW(
                    [{**settings, "params": thrown}], group["lr"], group["betas"], group["eps"], self.stochastic
                )
                other.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bit for bit; torch's own would cast every state to the dtype of its parameter, a master weight to bf16.

        Raises:
            ConfigError: the states are those of another optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        saved_ids = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, (param, group) in zip(saved_ids, self._parameters(), strict=True):
            if saved := state_dict["state"].get(saved_id):
                self._check_states(saved, param, group)
                self.state[param] = {name: value.to(param.device, copy=True) for name, value in saved.items()}

    def _check_states(self, saved: dict[str, Any], param: torch.Tensor, group: dict[str, Any]) -> None:
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
    # The fused update takes no flag beside sharded tensors.
    if all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in parameters):
        return FusedAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return AdamW(groups, optim.lr, optim.betas, optim.eps, seed=seed)
