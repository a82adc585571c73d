"""AdamW for bf16 weights: what bf16 would lose is kept in fp32 masters, or in expectation by stochastic rounding.

An update of a learning rate of 1e-5 is smaller than half the distance between neighbouring bf16 numbers, so rounding to
the nearest one loses it entirely, and the bf16 copy of an fp32 master shows it late. The update is one pointwise
function on flat tensors: eager on CPU, one compiled graph for all sizes on CUDA. Everything that varies comes in as a 0-d
tensor, so nothing is ever compiled again. Of a sharded parameter each rank updates its own piece.

An update that is left out does not count in the bias corrections. Only the device knows of it in time, so the counts and
what follows from them stay there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.ops.dtensor import contiguous_strides, local, local_region
from sftkit.ops.rounding import elements, int32, noise16, stochastic_round
from sftkit.optim.adamw_fused import FusedAdamW
from sftkit.optim.protocol import Groups, Optimizer, kind_of, parameters_of, set_learning_rate
from sftkit.runtime.rng import random_key

WARM_UP_ELEMENTS = 1 << 20
"Size of the throw-away tensors of the warm-up: Inductor picks its block sizes by it."


class Scalars(NamedTuple):
    """What the update of a group needs besides tensors: 0-d fp32 tensors on the CPU."""

    decay: torch.Tensor
    "learning rate times weight decay"
    rate1: torch.Tensor
    "1 - beta1"
    rate2: torch.Tensor
    "1 - beta2"
    eps: torch.Tensor


@functools.lru_cache(maxsize=32)
def scalars(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Scalars:
    beta1, beta2 = betas
    return Scalars(*(torch.tensor(x, dtype=torch.float32) for x in (lr * weight_decay, 1 - beta1, 1 - beta2, eps)))


def corrections(counts: torch.Tensor, lr: float, betas: tuple[float, float]) -> torch.Tensor:
    """What bias correction makes of the learning rate and of the root of exp_avg_sq, after so many updates.

    Args:
        counts: [P], update numbers from 1, on any device; of 0 the result is not finite.

    Returns:
        fp64 [P, 2] there: lr / (1 - beta1^count) and sqrt(1 - beta2^count). In fp32 the first count of beta2=0.999 would
        be off by 6e-5. A row has the 16 bytes to which Inductor wants its inputs aligned.
    """
    counts = counts.double()
    beta1, beta2 = betas
    return torch.stack((lr / (1 - beta1**counts), (1 - beta2**counts).sqrt()), dim=1)


Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    s: Scalars,
    corrected: torch.Tensor,
) -> Moments:
    """The formula (Loshchilov & Hutter 2019, algorithm 2): new weight, exp_avg and exp_avg_sq; all fp32, one shape.

    Args:
        corrected: fp64 [2], a row of `corrections`.
    """
    step_size, root2 = corrected.float().unbind()
    exp_avg = exp_avg + (grad - exp_avg) * s.rate1
    exp_avg_sq = exp_avg_sq + (grad * grad - exp_avg_sq) * s.rate2
    direction = exp_avg / (exp_avg_sq.sqrt() / root2 + s.eps)
    return weight - (s.decay * weight + step_size * direction), exp_avg, exp_avg_sq


def update_exact(
    weight: torch.Tensor,
    rounded: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    s: Scalars,
    corrected: torch.Tensor,
    offset: torch.Tensor,
    key0: torch.Tensor,
    key1: torch.Tensor,
) -> None:
    """In place on flat tensors: fp32 weight and moments; `rounded`, the bf16 parameter of a master weight, follows.

    A `clip` of nan leaves everything as it is.

    It is rounded stochastically: to the nearest, a weight that starts at a bf16 number would stand still until its master
    has moved half the distance to the next one, and training would lag behind fp32 (benchmarks/h200_step, losses).
    """
    new = adamw(weight, grad.float() * clip, exp_avg, exp_avg_sq, s, corrected)
    usable = ~clip.isnan()
    if rounded is not None:
        bits = noise16(elements(rounded) + offset, key0, key1)[0]
        rounded.copy_(torch.where(usable, stochastic_round(new[0], bits), rounded))
    for stored, value in zip((weight, exp_avg, exp_avg_sq), new, strict=True):
        stored.copy_(torch.where(usable, value, stored))


def update_stochastic(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    clip: torch.Tensor,
    s: Scalars,
    corrected: torch.Tensor,
    offset: torch.Tensor,
    key0: torch.Tensor,
    key1: torch.Tensor,
) -> None:
    """In place on flat bf16 tensors, fp32 inside; every store is rounded stochastically (arXiv 2502.20566).

    A `clip` of nan leaves everything as it is.
    """
    new = adamw(param.float(), grad.float() * clip, exp_avg.float(), exp_avg_sq.float(), s, corrected)
    usable = ~clip.isnan()
    noise = noise16(elements(param) + offset, key0, key1)
    for stored, value, bits in zip((param, exp_avg, exp_avg_sq), new, noise, strict=True):
        stored.copy_(torch.where(usable, stochastic_round(value, bits), stored))


@functools.cache
def compiled(update: Callable[..., None]) -> Callable[..., None]:
    """One graph for every size, step and learning rate."""
    return torch.compile(update, fullgraph=True, dynamic=True)


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
        compile: bool = True,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "attempts": 0})
        self.stochastic, self.seed, self.compile = stochastic, seed, compile

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
        index = 0
        for group in self.param_groups:
            group["attempts"] += 1
            # Also of an empty piece: its updates are counted, and Muon gathers the pieces of all ranks.
            numbered = [(i, p) for i, p in enumerate(group["params"], start=index) if p.grad is not None]
            index += len(group["params"])
            if not numbered:
                continue
            clip = torch.ones((), device=numbered[0][1].device) if clip is None else clip
            counts = self._counted([self._state_of(p, group)["step"] for _, p in numbered], clip)
            rows = corrections(counts, group["lr"], tuple(group["betas"]))
            for (number, param), row in zip(numbered, rows, strict=True):
                self._update(param, group, number, clip, row)

    def _counted(self, steps: list[torch.Tensor], clip: torch.Tensor) -> torch.Tensor:
        """Count an update, unless it is left out, of so many parameters; the new counts, [P] on the device."""
        taken = (~clip.isnan()).to(steps[0].dtype)
        torch._foreach_add_(steps, [taken] * len(steps))
        return torch.stack(steps)

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

    def _update(
        self,
        param: torch.nn.Parameter,
        group: dict[str, Any],
        index: int,
        clip: torch.Tensor,
        corrected: torch.Tensor,
    ) -> None:
        """One parameter: the one of number `index`, with its row of `corrections`."""
        state = self.state[param]
        s = scalars(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"])
        assert param.grad is not None
        rest = (flat(param.grad), state["exp_avg"], state["exp_avg_sq"], clip, s, corrected)
        key = random_key(self.seed, group["attempts"], index)
        self._run(flat(param), state.get("master"), rest, first_element(param), key)

    def _run(
        self, param: torch.Tensor, master: torch.Tensor | None, rest: tuple[Any, ...], offset: int, key: int
    ) -> None:
        # Dynamo specialises on sizes of 0 and 1, and a graph for one number is not worth having.
        eager = not (self.compile and param.is_cuda) or param.numel() <= 1
        run = (lambda update: update) if eager else compiled
        keys = (int32(offset), int32(key), int32(key >> 32))
        if self._rounds(param):
            run(update_stochastic)(param, *rest, *keys)
        elif master is None:
            run(update_exact)(param, None, *rest, *keys)
        else:
            run(update_exact)(master, param, *rest, *keys)

    @torch.no_grad()
    def warm_up(self, compiled: bool) -> None:
        """Compile what `update` will run, on tensors that are thrown away; parameters, states and RNG stay untouched."""
        self.compile = compiled
        kinds = {(param.dtype, param.device): group for param, group in self._parameters()}
        for (dtype, device), group in kinds.items():
            param = torch.zeros(WARM_UP_ELEMENTS if device.type == "cuda" else 2, dtype=dtype, device=device)
            state = AdamW._zero_states(self, param, group)
            master = param.float() if self._has_master(param) else None
            s = scalars(group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"])
            row = corrections(torch.ones(1, device=device), group["lr"], tuple(group["betas"]))[0]
            ones = torch.ones((), device=device)
            rest = (torch.zeros_like(param), state["exp_avg"], state["exp_avg_sq"], ones, s, row)
            self._run(param, master, rest, offset=0, key=0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Bit for bit; torch's own would cast every state to the dtype of its parameter, a master weight to bf16.

        Raises:
            ConfigError: the states are those of another optimizer.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
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


def build(groups: Groups, optim: OptimConfig, *, seed: int, compile: bool) -> Optimizer:
    """Build the optimizer of optim.name=adamw: torch's own where all is fp32, else ours, with masters."""
    parameters = list(parameters_of(groups))
    # The fused update takes no flag beside sharded tensors.
    if all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in parameters):
        return FusedAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return AdamW(groups, optim.lr, optim.betas, optim.eps, seed=seed, compile=compile)
