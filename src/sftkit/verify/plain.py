"""The plain model, the reference for ours: transformers' own modules, made from the start files, with each document
alone through their forward pass and torch's loss.

The plain model is never the trained model, so that a weight lost while loading the latter shows up. Weights are not
stored twice: a parameter of the trained model whose samples equal the files lends its memory, any other is read from
the files. Files on the host are mapped, not copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from sftkit.config.schema import ModelConfig
from sftkit.models.load import from_config, model_of_files
from sftkit.models.routing import routing_of
from sftkit.models.structure import decoder_blocks, stages_of
from sftkit.models.trained import adapters_of
from sftkit.models.vocabulary import NewRows, new_rows, vocabulary_of, without_padding
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.nf4 import SCALES, Nf4, dequantize
from sftkit.ops.tensors import local, local_part, local_region
from sftkit.runtime.start import Runtime, replaced, replaced_in_each

WEIGHT_SAMPLE = 1024
"Maximum number of elements of a parameter, or of this rank's shard, that are compared with the files."
MEAN_COLUMNS = 8
"Columns whose mean over all known tokens is recomputed for the rows of added tokens."
DRAWS = 3
"Number of passes with random rounding; the worst counts."
APART = 3.0
"""The limit is this multiple of the difference that such a pass makes: both sides of a comparison round, in 28 blocks
and more.
"""
MAX_LIMIT = 0.5
"No limit is wider: an attention scale wrong by a factor of 1.2 moves gradients by 0.7 and more."


class PlainModel:
    """A transformers model with the weights of the start files and the run's objective. Every rank makes one.

    If ranks hold parts of the weights, those of a block are gathered while it computes, and again in the
    backward pass.
    """

    def __init__(
        self,
        model: ModelWithLoss,
        device: torch.device,
        source: ModelConfig | None = None,
        checkpoint: Path | None = None,
        rt: Runtime | None = None,
    ) -> None:
        """Load the files, compare the trained model's weights with them, and make the plain model ready to compute.

        Args:
            model: trained model, on the device, whole or distributed.
            source: model section of the recipe; if None or without files (model.scratch), config and weights come
                from `model`.
            checkpoint: step directory that the run resumes from; None: a new run.
            rt: runtime; None: a single process.

        Raises:
            ConfigError: transformers cannot load the files.
        """
        live = model.orig_model
        self.objective, self.kind, self.device = model.objective, model.kind, device
        self._dtype = live.dtype
        # Captured now: in a pipeline, or between two gathers, the modules temporarily hold other parameters.
        self._live = dict(live.named_parameters(remove_duplicate=False))
        self._first = {id(p): name for name, p in live.named_parameters()}
        self._rows, self._stages = without_padding(live), stages_of(live)
        adapters = adapters_of(live)
        precision = "bf16" if live.dtype == torch.bfloat16 else "fp32"
        files = None if source is None else model_of_files(source, checkpoint, adapters, precision, device)
        self.has_files = files is not None
        self.orig_model = _skeleton(live, source) if files is None else files
        if adapters is not None:
            from sftkit.models.adapters import as_written

            as_written(self.orig_model)
        if self.orig_model._can_set_experts_implementation():
            # Private, as in models.experts: transformers chooses among its own functions of experts.
            self.orig_model.set_experts_implementation(self.orig_model.get_correct_experts_implementation(None))
        own = dict(self.orig_model.named_parameters(remove_duplicate=False))
        self.differing: dict[str, float] = {}
        "name of a parameter or buffer -> share of its compared elements that differ from the files, over all ranks"
        self._vocabulary = set(map(id, vocabulary_of(live)))
        # A checkpoint has these rows; that of an adapter lacks the table behind them.
        held = source is None or (checkpoint is not None and adapters is None)
        self._new = None if held else new_rows(live)
        if self.has_files:
            found = {name: _difference(p, self._live.get(name), self._vocabulary, self._new) for name, p in own.items()}
            found |= dict.fromkeys(self._live.keys() - own.keys(), 1.0)
            if self._new is not None:
                for name, p in own.items():
                    if id(self._live.get(name)) in self._vocabulary:
                        found[f"{name}, added rows"] = _added_differ(p, self._live[name], self._new)
            found |= _differing_buffers(self.orig_model, live)
            differing = {name: share for name, share in found.items() if share}
            for other in [differing] if rt is None else rt.gathered(differing):
                self.differing |= other
        self.compared = len(own)
        # Differing parameters come from the files; the others share the trained model's memory.
        self._own = {name: p.detach() for name, p in own.items() if name in self.differing or name not in self._live}
        self._listener: Callable[[str, Tensor], None] | None = None
        _match_float8(self.orig_model, live)
        self.orig_model.train(live.training)
        self.orig_model.config.use_cache = False
        gathered = any(isinstance(p, DTensor) or _is_nf4(p) for p in self._live.values())
        self.gathers = self._stages is not None or gathered
        "whether weights are gathered, or dequantized, for each use"
        self._place()
        weight = model.routing.weight if model.routing is not None else None
        self.routing = None if model.routing is None else routing_of(self.orig_model, weight)

    def gradients_to(self, listener: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
        """Pass each gradient of a backward pass within the context to a function, and keep none.

        Args:
            listener: called with the first name of the trained model's parameter and the whole gradient in its shape;
                it may be called more than once for a name, with gradients that add up.
        """
        return replaced(self, "_listener", listener)

    def _place(self) -> None:
        """Put the modules on the device, without weights of their own."""
        # Buffers are small, and come from the files or are computed from the config.
        for module in self.orig_model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        names = {id(p): name for name, p in self.orig_model.named_parameters(remove_duplicate=False)}
        placed = {key: self._placeholder(name) if self.gathers else self._lent(name) for key, name in names.items()}
        owners: dict[torch.nn.Module, dict[str, str]] = {}
        for module in self.orig_model.modules():
            owners[module] = {name: names[id(p)] for name, p in module._parameters.items() if p is not None}
            # Private: setting the attribute would run the global hooks of register_parameter.
            module._parameters.update({name: placed[id(module._parameters[name])] for name in owners[module]})
        if not self.gathers:
            return
        blocks = decoder_blocks(self.orig_model)
        inner = {id(m) for block in blocks for m in block.modules() if m is not block}
        blocks = [block for block in blocks if id(block) not in inner]
        inside = inner | set(map(id, blocks))
        for block in blocks:
            of_block = {module: owners[module] for module in block.modules() if owners[module]}
            # Without the checkpoint autograd would keep the gathered weights of all blocks.
            forward = partial(self._with_weights, of_block, block.forward)
            block.forward = partial(checkpoint, forward, use_reentrant=False)
        for module, of_module in owners.items():
            if of_module and id(module) not in inside:
                module.forward = partial(self._with_weights, {module: of_module}, module.forward)

    def _lent(self, name: str) -> torch.nn.Parameter:
        """Return a parameter in the trained model's memory, or from the files, whose gradients go to the listener."""
        trained = name in self._live and self._live[name].requires_grad
        parameter = torch.nn.Parameter(self._whole(name), requires_grad=trained)
        if trained:
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
        return parameter

    def _take(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._found(name, gradient)

    def _placeholder(self, name: str) -> torch.nn.Parameter:
        """Return a parameter without memory, NaN everywhere, so that a result that reads it is visibly wrong."""
        shape, dtype = self._shape(name)
        return torch.nn.Parameter(
            torch.full((), torch.nan, dtype=dtype, device=self.device).expand(shape), requires_grad=False
        )

    def _shape(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return a parameter's shape without padding of the vocabulary, and the dtype of the run."""
        live = self._live.get(name)
        if live is not None and _is_nf4(live):
            return torch.Size([live.shape[0], 2 * live.shape[1]]), self._dtype
        if live is None or (name in self._own and id(live) not in self._vocabulary):
            own = self._own[name]
            return own.shape, own.dtype if live is None else live.dtype
        return torch.Size([self._rows.get(id(live), live.shape[0]), *live.shape[1:]]), live.dtype

    def _with_weights(
        self, owners: dict[torch.nn.Module, dict[str, str]], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a forward pass with the whole weights of some modules."""
        whole = {
            module: {name: self._gathered(of[name]) if name in of else p for name, p in module._parameters.items()}
            for module, of in owners.items()
        }
        with replaced_in_each("_parameters", whole):
            return forward(*args, **kwargs)

    def _gathered(self, name: str) -> Tensor:
        """Return the whole weight, whose gradient goes to the listener."""
        if name not in self._live or not self._live[name].requires_grad:
            return self._whole(name)
        anchor = torch.zeros((), requires_grad=True)
        return _Gathered.apply(anchor, self, name)

    def _whole(self, name: str) -> Tensor:
        """Return the whole weight on the device, without padding of the vocabulary; if ranks hold parts of it, all of
        them call this together.
        """
        p, own = self._live.get(name), self._own.get(name)
        if p is not None and _is_nf4(p):
            layer = self.orig_model.get_submodule(name.rpartition(".")[0])
            scales = (layer.get_buffer(scale) for scale in SCALES)
            return dequantize(Nf4((p if own is None else own).detach().to(self.device), *scales), self._dtype)
        if p is None or (own is not None and id(p) not in self._vocabulary):
            assert own is not None
            return own.to(self.device, self._shape(name)[1])
        value = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        if self._stages is not None:
            value = torch.empty(p.shape, dtype=p.dtype, device=self.device) if p.is_meta else value.clone()
            holder = self._stages.holders[self._first[id(p)]][0]
            dist.broadcast(value, src=dist.get_global_rank(self._stages.group, holder), group=self._stages.group)
        if id(p) in self._rows:
            value = value[: self._rows[id(p)]]
        if own is not None:
            # Rows from the files, except the rows that no file has.
            known = torch.ones(min(len(own), len(value)), dtype=torch.bool)
            if self._new is not None:
                known[self._new.among(0, len(known))] = False
            value, known = value.clone(), known.nonzero().flatten()
            value[known.to(self.device)] = own[known].to(value)
        return value

    def _found(self, name: str, gradient: Tensor) -> None:
        """Pass a gradient to the listener, with zeros in the padding of the vocabulary."""
        live = self._live[name]
        if self._listener is None:
            return
        missing = live.shape[0] - gradient.shape[0] if live.ndim else 0
        if missing:
            gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
        self._listener(self._first[id(live)], gradient)


class _Gathered(torch.autograd.Function):
    """A weight that is gathered only while it is used."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, plain: PlainModel, name: str) -> Tensor:
        """Return the whole weight. `anchor`: tensor that makes autograd request the gradient."""
        ctx.plain, ctx.name = plain, name
        return plain._whole(name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.plain._found(ctx.name, gradients[0])
        return None, None, None


def _is_nf4(parameter: Tensor) -> bool:
    return parameter.dtype == torch.uint8


def _skeleton(live: PreTrainedModel, source: ModelConfig | None) -> PreTrainedModel:
    """Return a transformers model with the config and the buffers of another model, its parameters on the
    meta device.
    """
    trusted = source is not None and source.trust_remote_code
    with no_init_weights(), init_empty_weights(include_buffers=False):
        fresh = from_config(copy.deepcopy(live.config), live.dtype, trust_remote_code=trusted)
    fresh.tie_weights()
    if (adapters := adapters_of(live)) is not None:
        from sftkit.models.adapters import add_adapters

        add_adapters(fresh, adapters)
    # Only buffers in the state dict: the others follow from the config, and the result checks them.
    theirs = live.state_dict()
    for name, buffer in fresh.named_buffers():
        if name in theirs and not theirs[name].is_meta:
            buffer.copy_(local(theirs[name]))
    return fresh


@contextmanager
def rounded_at_random(model: torch.nn.Module) -> Iterator[None]:
    """Round the model's activations at random within the context.

    Half-precision outputs of each module without submodules move by up to half a unit of the last place, as another
    kernel might round them. It consumes torch's random state.
    """

    def move(_: torch.nn.Module, __: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or isinstance(output, DTensor):
            return None
        if output.dtype not in (torch.bfloat16, torch.float16):
            return None
        return output * (1 + (torch.rand_like(output) - 0.5) * torch.finfo(output.dtype).eps)

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(move).remove)
        yield


def _difference(file: Tensor, live: Tensor | None, vocabulary: set[int], new: NewRows | None) -> float:
    """Return the share of sampled elements in this rank's part of a parameter that differ from the files, after
    rounding to its precision.

    Args:
        vocabulary: ids of the parameters with a row for each token: rows after those of the files are left out.
        new: rows of added tokens, left out too, because the files' rows belong to no token.
    """
    if live is None or live.is_meta:
        return float(live is None)
    mine, part = local(live).detach(), local_part(file, live)
    new = new if id(live) in vocabulary else None
    if id(live) in vocabulary:
        rows = min(len(part), len(mine))
        mine, part = mine[:rows], part[:rows]
    if part.shape != mine.shape:
        return 1.0
    size = mine.numel()
    if not size:
        return 0.0
    at = torch.unravel_index(torch.arange(0, size, -(-size // WEIGHT_SAMPLE) | 1), mine.shape)
    if new is not None:
        known = ~torch.isin(at[0], torch.tensor(new.among(*local_region(live)[0]), dtype=torch.long))
        at = tuple(index[known] for index in at)
    ours = mine[tuple(index.to(mine.device) for index in at)].cpu()
    return float((part[at].to(mine.dtype) != ours).double().mean()) if len(ours) else 0.0


def _added_differ(file: Tensor, live: Tensor, new: NewRows) -> float:
    """Return the share of the first columns of added rows that differ from the mean of the rows of known tokens."""
    if live.is_meta:
        return 0.0
    (start, size), *columns = local_region(live)
    rows = new.among(start, size)
    first = tuple(slice(begin, begin + min(width, MEAN_COLUMNS)) for begin, width in columns)
    mine = local(live).detach()[torch.tensor(rows, dtype=torch.long)]
    mine = mine[(slice(None), *(slice(0, MEAN_COLUMNS) for _ in columns))]
    if not mine.numel():
        return 0.0
    mean = file[(slice(0, new.known), *first)].to(live.dtype).double().mean(0).to(live.dtype).float()
    unit = float(torch.finfo(live.dtype).eps)
    off = (mine.float().cpu() - mean).abs() > 2 * unit * mean.abs() + 1e-7
    return float(off.double().mean())


def _differing_buffers(fresh: PreTrainedModel, live: PreTrainedModel) -> dict[str, float]:
    """Return the buffers of the files whose values differ in the trained model."""
    there, parameters = live.state_dict(), {name for name, _ in fresh.named_parameters(remove_duplicate=False)}
    found = {}
    for name, value in fresh.state_dict().items():
        if name not in parameters:
            mine = there.get(name)
            same = mine is not None and not mine.is_meta and torch.equal(value.to(mine.dtype), local(mine).cpu())
            found[name] = float(not same)
    return found


def _match_float8(fresh: PreTrainedModel, live: PreTrainedModel) -> None:
    """Convert the layers that the trained model computes in float8: the comparison leaves out the cost of float8."""
    for name, module in live.named_modules():
        # Compared by name: torchao may not be installed.
        if type(module).__name__ == "Float8Linear" and hasattr(type(module), "from_float"):
            parent, _, last = name.rpartition(".")
            setattr(
                fresh.get_submodule(parent), last, type(module).from_float(fresh.get_submodule(name), module.config)
            )
