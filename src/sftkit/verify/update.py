"""Check the first update of a start: samples of every parameter against torch's own optimizer, and the gradient norm
against a plain sum over all ranks.

The engine does not take part: its optimizer's `update` is observed during one step. A sample of each parameter,
its gradient and its states is copied on the device before and after, and read when the step is done. Everything
that determines the update is restated here, independent of the training code: which parameters decay, the
clipping, the arithmetic.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftkit.config.schema import OptimConfig
from sftkit.config.tables import OPTIMIZERS
from sftkit.engine.engine import Engine
from sftkit.models.structure import decoder_blocks
from sftkit.models.trained import TOKEN_ADAPTER
from sftkit.ops.tensors import as_sharded, local, local_part, local_region
from sftkit.optim.protocol import Optimizer
from sftkit.runtime.start import Runtime, replaced_in_each
from sftkit.tracking.names import Check

UPDATE_SAMPLE = 512
"Maximum number of compared elements of a parameter, or of this rank's shard."
Update = Callable[[float, Tensor], None]
"The method of an optimizer, of a learning rate and a factor of the gradients."
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
LIMIT = 2e-3
"Largest relative difference of an update or a moment, beyond the rounding of stored values."
EIGHT_BITS = 0.04
"Tolerance for the 8-bit codes of a block, relative to the largest value of the tensor."
MATRICES = 2
"Number of Muon matrices whose whole update is compared: the smallest ones."
MATRIX_LIMIT = 0.03
"The limit for a matrix, which is orthogonalized in bf16."
DEVIATIONS, RATIO = 6.0, 0.02
"Stochastic rounding fails if the updates of all samples are off by more standard deviations, and by this share."


@dataclass
class _Sampled:
    """A parameter before and after the update, at the sampled elements of this rank's part; flat, on the device."""

    param: torch.nn.Parameter
    at: Tensor
    decays: bool
    trained: bool
    before: dict[str, Tensor] = field(default_factory=dict)
    "weight, gradient if there is one, and states by name"
    after: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Errors:
    """The differences that this rank found."""

    relative: dict[str, float] = field(default_factory=dict)
    "compared quantity -> difference, relative to torch's value"
    off: float = 0.0
    "for stochastically rounded weights: sum of update x (found - expected)"
    variance: float = 0.0
    "variance of that sum, from the probabilities of rounding up and down"
    squares: float = 0.0
    "sum of squared updates"


class FirstUpdate:
    """Observe the update of one step. Every rank has an instance and calls the same methods."""

    def __init__(self, engine: Engine, optim: OptimConfig, rt: Runtime) -> None:
        """Choose the samples. `optim` is the recipe's; the engine's setup has the name of the optimizer."""
        self._engine, self._optim, self._rt = engine, optim, rt
        self._name = engine.setup.optimizer
        self._sampled: dict[str, _Sampled] = {}
        self._squares: dict[tuple[str, tuple[tuple[int, int], ...]], Tensor] = {}
        self._matrices: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self._given: tuple[float, Tensor] | None = None
        self._of_members = engine.training.members is not None

    def watching(self) -> AbstractContextManager[None]:
        """Observe the engine's optimizer within the context, in which one step runs."""
        optimizer = self._engine.optimizer
        return _watching(optimizer, lambda *given: self.observe(optimizer, *given))

    def observe(self, optimizer: Optimizer, update: Update, learning_rate: float, coefficient: Tensor) -> None:
        """Update, with copies before and after. `update`: the optimizer's own method."""
        self._before(optimizer)
        # The optimizer may compute in place on its argument.
        self._given = learning_rate, coefficient.detach().clone()
        update(learning_rate, coefficient)
        self._after(optimizer)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        """Copy samples of weights, gradients and states; add up the squares of the gradients."""
        orig_model = self._engine.model.orig_model
        tables = {id(m.weight) for m in orig_model.modules() if isinstance(m, torch.nn.Embedding)}
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in orig_model.named_parameters():
            # a parameter of another stage, or of another adapter, which a separate update changes
            if p.is_meta or (self._of_members and p.requires_grad and id(p) not in own):
                continue
            # Decoupled decay on matrices; none on norms, biases (of experts too) and tables, a tied head and trained
            # rows of tokens included.
            table = id(p) in tables or TOKEN_ADAPTER in name
            of_vectors = table or name.endswith("bias") or (p.ndim == 3 and p.shape[0] == 1)
            decays = p.ndim >= 2 and not of_vectors
            size = local(p).numel()
            at = torch.arange(0, size, -(-size // UPDATE_SAMPLE) | 1 if size else 1, device=p.device)
            one = _Sampled(p, at, decays, p.requires_grad)
            one.before = _at(p, optimizer.state.get(p) or {}, at)
            if p.grad is not None:
                gradient = local(p.grad)
                one.before["gradient"] = gradient.reshape(-1)[at].clone()
                region = tuple(local_region(p))
                exact = torch.float32 if p.device.type == "mps" else torch.float64
                self._squares[name, region] = torch.linalg.vector_norm(gradient.reshape(-1), dtype=exact).square()
            self._sampled[name] = one
        if OPTIMIZERS[self._name].elsewhere is not None:
            self._keep_matrices(optimizer)

    def _keep_matrices(self, optimizer: Optimizer) -> None:
        """Copy weight, gradient and momentum of the smallest matrices in full: a matrix update needs all of it. Ranks
        that share them call it together.
        """
        found = {name: one for name, one in self._sampled.items() if self._by_muon(one.param)}
        smallest = sorted(found, key=lambda name: (found[name].param.numel(), name))[:MATRICES]
        for name in smallest:
            p = found[name].param
            if p.grad is None:
                continue
            state = optimizer.state.get(p) or {}
            shards = [local(p), local(p.grad), local(p)]
            if state:
                shards[0] = state.get("master", local(p)).view(local(p).shape)
                shards[2] = state["momentum_buffer"].view(local(p).shape)
            weight, gradient, momentum = (_whole(shard.detach().float(), p) for shard in shards)
            self._matrices[name] = weight, gradient, momentum if state else torch.zeros_like(gradient)

    def _by_muon(self, p: torch.nn.Parameter) -> bool:
        """Return whether Muon updates a parameter: a matrix of a decoder block."""
        if OPTIMIZERS[self._name].elsewhere is None or p.ndim != 2:
            return False
        if not hasattr(self, "_in_blocks"):
            blocks = decoder_blocks(self._engine.model.orig_model)
            tables = {
                id(m.weight) for m in self._engine.model.orig_model.modules() if isinstance(m, torch.nn.Embedding)
            }
            matrices = [q for block in blocks for name, q in block.named_parameters() if not name.endswith("bias")]
            self._in_blocks = {id(q) for q in matrices} - tables
        return id(p) in self._in_blocks

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        """Copy the same samples again."""
        for one in self._sampled.values():
            one.after = _at(one.param, optimizer.state.get(one.param) or {}, one.at)
        for name in self._matrices:
            p = self._sampled[name].param
            stored = (optimizer.state.get(p) or {}).get("master", local(p))
            self._sampled[name].after["matrix"] = stored.view(local(p).shape).clone()

    def checks(self, grad_norm: float, learning_rate: float) -> list[Check]:
        """Return the checks of the observed update; every rank calls it. It waits for the device.

        Args:
            grad_norm: norm that the step reported.
            learning_rate: rate of this step by the schedule.
        """
        norm, disagreeing = self._norm()
        norm_row = _norm_check(grad_norm, norm, disagreeing)
        given = self._given
        skipped = given is None or bool(given[1].isnan()) or not math.isfinite(norm)
        if skipped:
            how = "the first step was skipped: its loss or gradient norm was not finite, or it was a spike"
            return [norm_row, Check(_UPDATE, None, how, "-", _HOW)]
        assert given is not None
        factor = 1.0 if self._optim.max_grad_norm is None else min(1.0, self._optim.max_grad_norm / (norm + 1e-6))
        errors = self._compare(factor, learning_rate)
        errors.relative["learning rate"] = abs(given[0] - learning_rate) / learning_rate
        errors.relative["clipping"] = abs(float(given[1]) - factor) / factor
        return [norm_row, self._update_check(self._rt.gathered(errors), factor)]

    def _norm(self) -> tuple[float, list[str]]:
        """Return the norm of the gradients of all ranks, and the shared parameters whose gradients differ
        between ranks.

        Each part of a parameter counts once, regardless of how many ranks hold it.
        """
        keys, values = list(self._squares), list(self._squares.values())
        own = dict(zip(keys, torch.stack(values).tolist() if values else [], strict=True))
        parts: dict[tuple[str, Any], float] = {}
        disagreeing: dict[str, None] = {}
        for found in self._rt.gathered(own):
            for key, square in found.items():
                if 0 in (size for _, size in key[1]):
                    continue
                first = parts.setdefault(key, square)
                if abs(square - first) > 1e-5 * max(abs(first), 1e-30):
                    disagreeing[key[0]] = None
        return math.sqrt(math.fsum(parts.values())), list(disagreeing)

    def _compare(self, factor: float, learning_rate: float) -> _Errors:
        """Compare this rank's samples with torch's optimizers in fp64. `factor`: factor of the gradients."""
        errors, optim = _Errors(), self._optim
        groups = {id(p): group for group in self._engine.optimizer.param_groups for p in group["params"]}
        for name, one in self._sampled.items():
            before = {key: value.double().cpu() for key, value in one.before.items()}
            after = {key: value.double().cpu() for key, value in one.after.items() if key != "matrix"}
            if not len(one.at):
                continue
            decay = optim.weight_decay if one.decays else 0.0
            group = groups.get(id(one.param))
            if one.trained and group is None:
                errors.relative[f"{name}, which is in no group"] = math.inf
            settings = {"weight_decay": decay, "betas": optim.betas, "eps": optim.eps}
            if wrong := [key for key, value in settings.items() if group and group.get(key, value) != value]:
                errors.relative[f"wrong {wrong[0]} in the group of {name}"] = math.inf
            if not one.trained or "gradient" not in before:
                changed = (after["weight"] != before["weight"]).double().mean()
                errors.relative[f"{name}, which has no gradient"] = float(changed)
                continue
            gradient = before["gradient"] * factor
            by_muon = self._by_muon(one.param)
            stored = "master" if "master" in after else "weight"
            start = before.get(stored, before["weight"])
            expected = torch.nn.Parameter(start.clone())
            expected.grad = gradient
            if by_muon:
                momentum = before.get("momentum_buffer", torch.zeros_like(gradient))
                moments = {"momentum_buffer": momentum.lerp(gradient, 0.05)}
            else:
                rate = learning_rate * (group or {}).get("lr_scale", 1.0)
                adamw = torch.optim.AdamW(
                    [expected], lr=rate, betas=optim.betas, eps=optim.eps, weight_decay=decay, foreach=False
                )
                if "step" in before and float(before["step"]):
                    state = {key: before[key].clone() for key in ("exp_avg", "exp_avg_sq")}
                    adamw.state[expected] = {"step": before["step"].float().clone(), **state}
                adamw.step()
                moments = {key: adamw.state[expected][key] for key in ("exp_avg", "exp_avg_sq")}
            for key, value in moments.items():
                if key not in after:
                    errors.relative[f"{name}: no {key}"] = math.inf
                    continue
                # Tolerance of 8-bit codes; 0.0 without them.
                slack = EIGHT_BITS * float(one.after.get(f"{key}, largest", 0.0))
                errors.relative[f"{name}: {key}"] = _off(after[key], value, one.after[key].dtype, slack)
            update = after[stored] - start if by_muon else expected.detach() - start
            if not by_muon:  # whole matrices are compared below
                dtype = one.after[stored].dtype
                magnitude = torch.maximum(after[stored].abs(), start.abs())
                errors.relative[name] = _relative(after[stored], expected.detach(), update, dtype, magnitude)
                if dtype == torch.bfloat16:
                    self._add_rounding(errors, after[stored], expected.detach(), update)
            if stored == "master":
                # The bf16 copy used in computation is one of the two neighbours of its master; on average it equals
                # the master.
                gap = (after["weight"] - after["master"]).abs()
                far = gap > 2**-7 * after["master"].abs()
                errors.relative[f"{name}: copy of the master"] = float(far.double().mean())
                self._add_rounding(errors, after["weight"], after["master"], update)
        for name, (weight, gradient, momentum) in self._matrices.items():
            rate = learning_rate * groups.get(id(self._sampled[name].param), {}).get("lr_scale", 1.0)
            errors.relative[f"{name}: whole matrix"] = self._of_matrix(name, weight, gradient * factor, momentum, rate)
        return errors

    def _of_matrix(self, name: str, weight: Tensor, gradient: Tensor, momentum: Tensor, learning_rate: float) -> float:
        """Return the difference of a matrix's update from torch.optim.Muon's, scaled so that LIMIT is the maximum."""
        p = self._sampled[name].param
        expected = torch.nn.Parameter(weight.clone())
        expected.grad = gradient
        muon = torch.optim.Muon(
            [expected], lr=learning_rate, weight_decay=self._optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        muon.state[expected] = {"momentum_buffer": momentum.clone()}
        muon.step()
        start, end = local_part(weight, p), local_part(expected.detach(), p)
        found = self._sampled[name].after["matrix"].float()
        update = end - start
        if not update.numel():
            return 0.0
        return float((found - end).norm() / update.norm()) * LIMIT / MATRIX_LIMIT

    def _add_rounding(self, errors: _Errors, found: Tensor, expected: Tensor, update: Tensor) -> None:
        """Add evidence whether rounding to one of two bf16 neighbours keeps weights, or copies of masters, at their
        expected value on average.
        """
        below = expected.float().view(torch.int32).bitwise_and(-65536).view(torch.float32).double()
        # Towards zero; the other neighbour is a unit of the last place further.
        unit = torch.ldexp(torch.ones_like(expected), (torch.frexp(expected).exponent - 8))
        share = ((expected.abs() - below.abs()) / unit).clamp(0.0, 1.0)
        errors.off += float((update * (found - expected)).sum())
        errors.variance += float((update.square() * unit.square() * share * (1 - share)).sum())
        errors.squares += float(update.square().sum())

    def _update_check(self, found: list[_Errors], factor: float) -> Check:
        """Return the row of the update from the results of all ranks."""
        relative: dict[str, float] = {}
        for errors in found:
            for name, value in errors.relative.items():
                relative[name] = max(relative.get(name, 0.0), math.inf if math.isnan(value) else value)
        worst = max(relative, key=lambda name: relative[name])
        good = relative[worst] <= LIMIT
        words = f"{relative[worst]:.1e} at most ({worst}), clipped by {factor:.4g}"
        squares = sum(errors.squares for errors in found)
        if squares:
            off, deviation = sum(one.off for one in found), math.sqrt(sum(one.variance for one in found))
            deviations = abs(off) / max(deviation, 1e-30)
            words += f"; rounded updates are {1 + off / squares:.3f} of torch's ({deviations:.1f} deviations)"
            good = good and not (deviations > DEVIATIONS and abs(off) / squares > RATIO)
        return Check(_UPDATE, good, words, f"below {LIMIT:.0e} beyond the rounding of stored values", _HOW)


def _watching(optimizer: Optimizer, observe: Callable[[Update, float, Tensor], None]) -> AbstractContextManager[None]:
    """Call `observe` in place of the optimizer's update within the context, with that update and its arguments."""
    return replaced_in_each("update", {optimizer: partial(observe, optimizer.update)})


class UpdatesOfMembers:
    """Observe the update of each of several adapters in one step, as FirstUpdate does."""

    def __init__(self, engine: Engine, optim: OptimConfig, rt: Runtime) -> None:
        """See FirstUpdate. `optim`: what the adapters share."""
        self._engine, self._optim, self._rt = engine, optim, rt
        self._each: dict[int, FirstUpdate] = {}

    def watching(self) -> AbstractContextManager[None]:
        """Observe the updates of the step that runs within the context."""
        optimizer = self._engine.optimizer

        def observe(update: Update, learning_rate: float, coefficient: Tensor) -> None:
            one = self._each[optimizer.param_groups[0]["member"]] = FirstUpdate(self._engine, self._optim, self._rt)
            one.observe(optimizer, update, learning_rate, coefficient)

        return _watching(optimizer, observe)

    def checks(self, grad_norm: float, learning_rate: float) -> list[Check]:
        """Return the two checks of FirstUpdate, of the adapters together; those that failed are named."""
        members = self._engine.training.members
        assert members is not None
        rows: dict[str, list[tuple[str, Check]]] = {}
        for k, one in self._each.items():
            member = members.each[k]
            assert member.norm is not None
            assert member.rate is not None
            for check in one.checks(float(member.norm), member.rate):
                rows.setdefault(check.name, []).append((member.name, check))
        found = []
        for checks in rows.values():
            # A failure says more than a row that does not apply, and that more than a green one.
            name, worst = min(checks, key=lambda one: (one[1].ok is not False, one[1].ok is not None))
            found.append(replace(worst, found=f"{worst.found} ({name}, of {len(checks)} adapters)"))
        return found


_UPDATE = "First update is that of torch's optimizer"
_HOW = (
    "a sample of every parameter and its moments before and after the update of this start's first step, against "
    "torch.optim.AdamW in fp64 and torch.optim.Muon, with decay and clipping from the recipe"
)


def _norm_check(reported: float, plain: float, disagreeing: list[str]) -> Check:
    """Return the row of the gradient norm of the first step."""
    how = "squares of all gradients of this start's first step, each part of a parameter once, added up over all ranks"
    same = abs(reported - plain) <= 1e-4 * plain if math.isfinite(plain) else not math.isfinite(reported)
    words = f"{reported:.6g} against {plain:.6g}"
    if disagreeing:
        words += f"; gradients of {disagreeing[0]} differ between ranks"
    return Check("Gradient norm is that of all ranks", same and not disagreeing, words, "equal to 1e-04", how)


def _whole(shard: Tensor, p: torch.nn.Parameter) -> Tensor:
    """Return the whole tensor of a shard that is distributed like a parameter."""
    sharded = as_sharded(shard, p)
    return sharded.full_tensor() if isinstance(sharded, DTensor) else sharded.clone()


def _at(p: torch.nn.Parameter, state: Mapping[str, Tensor], at: Tensor) -> dict[str, Tensor]:
    """Copy the weight and the states at some elements of this rank's part."""
    found = {"weight": local(p).detach().reshape(-1)[at].clone()}
    for key in ("master", *MOMENTS):
        if key in state:
            value = local(state[key])
            # torchao's 8-bit states: the largest value of the tensor bounds the error of a code.
            if hasattr(value, "dequantize") and hasattr(value, "codes"):
                value = value.dequantize()
                found[f"{key}, largest"] = value.abs().max().reshape(1)
            found[key] = value.detach().reshape(-1)[at].clone()
    if "step" in state:
        found["step"] = state["step"].detach().clone()
    return found


def _off(found: Tensor, expected: Tensor, dtype: torch.dtype, slack: float) -> float:
    """Return the difference of a moment from the expected one, relative to the expected one."""
    if slack and float(expected.square().sum()):
        # Codes are inaccurate for small values, but accurate over the whole tensor.
        ratio = float((found * expected).sum() / expected.square().sum())
        wide = float(((found - expected).abs() > slack).double().mean())
        return max(abs(ratio - 1.0) / 0.1 * LIMIT, wide)
    return _relative(found, expected, expected, dtype, expected.abs())


def _relative(found: Tensor, expected: Tensor, scale: Tensor, dtype: torch.dtype, magnitude: Tensor) -> float:
    """Return the norm of the difference, beyond the rounding of the stored dtype, over the norm of `scale`.

    Args:
        magnitude: stored values, to which rounding is relative.
    """
    # Two units of the last place, because the update's own arithmetic rounds too; one for bf16.
    ulp = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-22 if dtype == torch.float32 else 2.0**-50
    beyond = ((found - expected).abs() - ulp * magnitude).clamp(min=0.0)
    if bool(found.isnan().any()):
        return math.inf
    size = float(scale.norm())
    off = float(beyond.norm())
    return off / size if size else (math.inf if off else 0.0)
