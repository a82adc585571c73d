"""Low-rank adapters (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353) in a model of transformers, and their files in
the format of peft.

The class of a linear layer is changed in place: its weight keeps name, identity and key, and only the factors are new.
They are fp32 whatever the weights are, and rounded where they are multiplied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from sftkit.config.schema import AdapterConfig, ModelConfig
from sftkit.errors import ConfigError, config_error
from sftkit.models import adapter_files, towers, vocabulary
from sftkit.models.files import reading_files
from sftkit.models.structure import decoder_blocks, embedding_of, num_experts, output_projection
from sftkit.models.token_rows import add_token_rows, fill_token_rows, in_front, merge_token_rows, rows_as_written
from sftkit.models.trained import ADAPTERS, TOKEN_ADAPTER, adapters_of, factors
from sftkit.ops.low_rank import adapted_linear, low_rank
from sftkit.ops.nf4 import Nf4, Nf4Linear, dequantize, frozen_linear, matrix_of, quantize, quantize_layer
from sftkit.ops.tensors import local, local_part, local_region
from sftkit.rundir.names import ADAPTER_WEIGHTS
from sftkit.runtime.open import random_key
from sftkit.runtime.script import first_of

if TYPE_CHECKING:
    from sftkit.models.many_adapters import Selection


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    config: AdapterConfig
    seed: int
    base: ModelConfig
    "the frozen model"
    digest: str
    "of the files of its weights"
    start: Path | None = None
    "folder of the adapter that training continues; None: new factors"
    modules: tuple[str, ...] = ()
    "names of the layers that have one"
    name: str = ""
    "of a member"
    members: tuple[Adapters, ...] = ()
    "several adapters that are trained side by side (models/many_adapters.py); empty: one"
    selection: Selection | None = None
    "which of several the model computes with"
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    "name of embedding or head -> tokens whose rows are trained too (models/token_rows.py)"
    known: int | None = None
    "number of known rows, as whose mean the trained rows begin; None: they are in the files at `start`"

    @property
    def scale(self) -> float:
        """Return the factor of what an adapter adds."""
        return adapter_files.scale_of(self.config)

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint's adapters belong to, as JSON values."""
        if self.members:
            return {member.name: member.identity() for member in self.members}
        return {
            "method": self.config.method,
            "rank": self.config.rank,
            "scale": self.scale,
            "modules": list(self.modules),
            **({"tokens": {name: list(ids) for name, ids in self.tokens.items()}} if self.tokens else {}),
            "base": {"sha256": self.digest},
        }


class Factor(torch.nn.Module):
    """One of the two matrices of an adapter: a module, so that its weight has the name that it has in peft's files."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32, device=device))


class LoraLinear(torch.nn.Linear):
    """A frozen linear layer with an adapter: y = W x + b + scale * B A x."""

    lora_A: Factor
    lora_B: Factor
    lora_dropout: torch.nn.Module | None
    lora_scale: float
    plain: type[LoraLinear]
    joint: tuple[Tensor, Tensor] | None = None
    "an input, and its product with A, computed with those of other layers (models/joined_adapters.py)"

    def frozen(self, x: Tensor) -> Tensor:
        """Return W x + b."""
        return frozen_linear(self, x, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, [..., out]."""
        return self.with_factors(x, self.lora_A.weight, self.lora_B.weight, self.lora_scale)

    def with_factors(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return the output of the layer with these factors, A [rank, in] and B [out, rank]."""
        b = b.to(x.dtype)
        if self.joint is not None and self.joint[0] is x:
            if not self.weight.is_floating_point():  # in NF4
                return self.frozen(x) + scale * linear(self.joint[1], b)
            y = adapted_linear(x, self.weight, self.joint[1], b, scale)
            return y if self.bias is None else y + self.bias
        y = self.frozen(x)
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        return low_rank(y, dropped, a.to(x.dtype), b, scale)

    @property
    def factor_of_rows(self) -> Tensor:
        """Return A of the adapter that computes all rows."""
        return self.lora_A.weight


class DoraLinear(LoraLinear):
    """The same with each row of the sum, V = W + scale * B A, scaled to a trained length: y = m / |V| V x + b."""

    lora_magnitude_vector: torch.nn.Parameter
    "m: [out], fp32"
    squared_rows: Tensor
    "of W in NF4: the squared norm of each row, fp32 [out]"

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, [..., out]."""
        a, b = self.lora_A.weight, self.lora_B.weight
        y = low_rank(frozen_linear(self, x), x, a.to(x.dtype), b.to(x.dtype), self.lora_scale)
        y = y * (self.lora_magnitude_vector / self._lengths(a.detach(), b.detach(), x.dtype)).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def _lengths(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of each row of W + scale * B A, fp32 [out], without a matrix of that size. The paper, section
        4.3, leaves it out of the gradient."""
        weight, s = self.weight.detach(), self.lora_scale
        squared = weight.float().square().sum(1) if weight.is_floating_point() else self.squared_rows
        squared = squared + 2 * s * (b * frozen_linear(self, a.to(dtype)).t().float()).sum(1)
        return (squared + s * s * (b * (b @ (a @ a.T))).sum(1)).clamp_min(1e-30).sqrt()


class PlainLora(LoraLinear):
    """A layer with an adapter as its paper writes it, without our operators: what the others are compared with."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, [..., out]."""
        a, b = self.lora_A.weight, self.lora_B.weight
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        added = self.lora_scale * linear(linear(dropped, a.to(x.dtype)), b.to(x.dtype))
        lengths = getattr(self, "lora_magnitude_vector", None)
        if lengths is None:
            return linear(x, self.weight, self.bias) + added
        norms = (self.weight.float() + self.lora_scale * (b @ a)).norm(dim=1).detach()
        y = (linear(x, self.weight) + added) * (lengths / norms).to(x.dtype)
        return y if self.bias is None else y + self.bias


LoraLinear.plain = PlainLora


def as_written(orig_model: torch.nn.Module) -> None:
    """Let the layers with an adapter compute as their paper writes it, and all layers with a weight that is dense."""
    for layer in orig_model.modules():
        if isinstance(layer, LoraLinear):
            layer.__class__ = layer.plain
        elif isinstance(layer, Nf4Linear):
            layer.__class__ = torch.nn.Linear  # type: ignore[assignment]
    for experts in adapted_experts(orig_model).values():
        from sftkit.models.expert_adapters import PlainExperts  # most models have none

        experts.__class__ = in_front(PlainExperts, type(experts).__bases__[1])
    rows_as_written(orig_model)


def adapted(orig_model: torch.nn.Module) -> dict[str, LoraLinear]:
    """Return the layers that have an adapter, by name."""
    return {name: module for name, module in orig_model.named_modules() if isinstance(module, LoraLinear)}


def adapted_experts(orig_model: torch.nn.Module) -> dict[str, Any]:
    """Return the experts of mixtures that have adapters (models/expert_adapters.py), by name."""
    return {name: module for name, module in orig_model.named_modules() if hasattr(module, "base_layer")}


def with_factors(orig_model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules that hold a pair of factors by name: adapted layers, and two for the experts of a block."""
    return {name: m for name, m in orig_model.named_modules() if isinstance(getattr(m, "lora_A", None), Factor)}


def add_adapters(orig_model: PreTrainedModel, adapters: Adapters, device: torch.device | None = None) -> Adapters:
    """Freeze the model and give its target layers adapters, with the factors that training starts from; on the meta
    device they are filled by fill_factors, once there is memory for them.

    Args:
        device: which quantizes the frozen layers, one at a time; None: the one that they are on.

    Raises:
        ConfigError: a target that is no layer of the model, a rank above a layer's size, or a model that cannot be
            quantized.
    """
    if adapters.members:
        from sftkit.models.many_adapters import add_many

        return add_many(orig_model, adapters)
    config = adapters.config
    targets = target_modules(orig_model, config)
    orig_model.requires_grad_(requires_grad=False)
    if config.base == "nf4":
        quantize_layers(orig_model, device)
    for layer in targets.values():
        if not isinstance(layer, torch.nn.Linear):
            from sftkit.models.expert_adapters import adapt  # most models have none

            adapt(layer, config.rank, adapters.scale)
            continue
        layer.__class__ = DoraLinear if config.method == "dora" else LoraLinear
        assert isinstance(layer, LoraLinear)
        layer.lora_A = Factor(config.rank, layer.in_features, layer.weight.device)
        layer.lora_B = Factor(layer.out_features, config.rank, layer.weight.device)
        layer.lora_dropout = torch.nn.Dropout(config.dropout) if config.dropout else None
        layer.lora_scale = adapters.scale
        if isinstance(layer, DoraLinear):
            lengths = torch.zeros(layer.out_features, dtype=torch.float32, device=layer.weight.device)
            layer.lora_magnitude_vector = torch.nn.Parameter(lengths)
            if matrix_of(layer) is not None:
                layer.register_buffer("squared_rows", torch.zeros(layer.out_features), persistent=False)
        layer.train(orig_model.training)
    add_token_rows(orig_model, adapters.tokens)
    found = replace(adapters, modules=tuple(targets))
    setattr(orig_model, ADAPTERS, found)
    if not any(parameter.is_meta for parameter in factors(orig_model).values()):
        fill_factors(orig_model, device)
    return found


def quantize_layers(orig_model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Quantize the linear layers of the blocks, one after the other: only one dense matrix is on the device. Those in
    NF4 already stay.

    Args:
        device: which computes it; None: the one that a layer is on.

    Raises:
        ConfigError: a model that cannot be quantized.
    """
    for layer in _layers_in_nf4(orig_model):
        if type(layer) is not Nf4Linear:
            quantize_layer(layer, device)


def _layers_in_nf4(orig_model: PreTrainedModel) -> list[torch.nn.Linear]:
    """Return the layers that adapter.base=nf4 quantizes: the linear layers of the blocks but for routers.

    Raises:
        ConfigError: a model that cannot be quantized.
    """
    for name, module in orig_model.named_modules():
        if type(module).__name__.endswith("Experts") and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            raise config_error("experts in nf4", name=name)
    layers = {name: layer for name, layer in _linears(orig_model).items() if not adapter_files.ROUTER.search(name)}
    for name, layer in layers.items():
        if layer.in_features % 2:
            raise ConfigError(f"adapter.base: {name} has {layer.in_features} inputs, an odd number: set it to bf16")
    return list(layers.values())


def _linears(orig_model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of the blocks by name: torch's own, those in NF4, and no other subclass, which may
    compute something else."""
    inside = {id(module) for block in decoder_blocks(orig_model) for module in block.modules()}
    own = torch.nn.Linear, Nf4Linear
    return {name: m for name, m in orig_model.named_modules() if type(m) in own and id(m) in inside}


def target_modules(orig_model: PreTrainedModel, config: AdapterConfig) -> dict[str, torch.nn.Module]:
    """Return the linear layers and the experts that get an adapter, by name.

    Raises:
        ConfigError: as target_layers; or the model has experts of a form that gets no adapters here.
    """
    linears = _linears(orig_model)
    found: dict[str, torch.nn.Module] = {}
    shapes: dict[str, tuple[int, int]] = {}
    experts: set[str] = set()
    for name, module in orig_model.named_modules():
        # peft would not load the files: kernels of Mamba compute with this weight themselves.
        if name.endswith(".out_proj") and orig_model.config.model_type in ("falcon_h1", "nemotron_h"):
            continue
        if name in linears:
            assert isinstance(module, torch.nn.Linear)
            shapes[name] = (module.out_features, module.in_features)
        elif any(p.ndim == 3 for p in module.parameters(recurse=False)) and type(module).__name__.endswith("Experts"):
            from sftkit.models.expert_adapters import can_be_adapted, sizes  # most models have none

            if can_be_adapted(module):
                shapes[name] = sizes(module, "down_proj")  # has the smallest of all sizes: I is smaller than 2 I
                experts.add(name)
            # They are no layers of torch: they would be left out in silence.
            elif config.experts and {"all-linear", "mlp"} & {*config.targets}:
                raise config_error("experts of another form", name=name, cls=type(module).__name__)
        if name in shapes:
            found[name] = module
    head = next(name for name, module in orig_model.named_modules() if module is output_projection(orig_model))
    return {name: found[name] for name in adapter_files.target_layers(shapes, config, head, experts)}


def fill_factors(orig_model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Fill the factors with what training starts from: those of a file, or A at random and B zero.

    A layer's numbers depend on the seed and its name, so other targets or ranks do not change them, and each rank
    keeps its part of the same ones.

    Args:
        device: which dequantizes the matrices whose rows DoRA measures, one at a time; None: the one that they are on.
    """
    adapters = adapters_of(orig_model)
    assert adapters is not None
    for layer in adapted(orig_model).values():
        if isinstance(layer, DoraLinear) and (matrix := matrix_of(layer)) is not None:
            there = Nf4(*(tensor.to(device or tensor.device) for tensor in matrix))
            layer.squared_rows.copy_(dequantize(there, torch.float32).square().sum(1))
    if adapters.known is not None:
        fill_token_rows(orig_model, adapters.known)
    if adapters.start is not None:
        load_factors(orig_model, adapters.start, with_rows=adapters.known is None)
        return
    with torch.no_grad():
        for name, layer in with_factors(orig_model).items():
            drawn = first_factor(adapters.seed, name, layer.lora_A.weight.shape)
            local(layer.lora_A.weight).copy_(local_part(drawn, layer.lora_A.weight))
            local(layer.lora_B.weight).zero_()
            if isinstance(layer, DoraLinear) and not layer.weight.is_floating_point():
                layer.lora_magnitude_vector.copy_(layer.squared_rows.sqrt())
            elif isinstance(layer, DoraLinear):  # shards are of rows; on the host, so that any device gets these bits
                local(layer.lora_magnitude_vector).copy_(local(layer.weight).cpu().float().norm(dim=1))


def first_factor(seed: int, name: str, shape: torch.Size) -> Tensor:
    """Return the numbers that A of a layer begins with, [rank, in]."""
    generator = torch.Generator().manual_seed(random_key(seed, name) >> 1)
    # Kaiming's uniform distribution with a = sqrt(5), as peft has it.
    # In place: 70B has 560 of them, on the host.
    return torch.rand(shape, generator=generator).mul_(2).sub_(1).mul_(1 / math.sqrt(shape[1]))


def load_factors(orig_model: PreTrainedModel, folder: Path, *, with_rows: bool = True) -> None:
    """Load the factors of an adapter's folder into the live model, each rank its own part; no collective.

    Args:
        with_rows: whether the folder has rows of tokens too, if the model has some.

    Raises:
        ConfigError: the files hold other adapters than the model has.
    """
    named = {name: p for name, p in factors(orig_model).items() if with_rows or TOKEN_ADAPTER not in name}
    read_factors({peft_name(orig_model, name): parameter for name, parameter in named.items()}, folder)


def peft_name(orig_model: torch.nn.Module, name: str) -> str:
    """Return what the files of an adapter call a parameter: peft gives names to the whole model, of which a text model
    may be a part.
    """
    whole = towers.whole_of(orig_model)
    return f"{adapter_files.PEFT_PREFIX}{name if whole is None else whole.live_name(name)}"


@torch.no_grad()
def read_factors(own: dict[str, torch.nn.Parameter], folder: Path) -> None:
    """Read parameters from an adapter's folder, by their names there."""
    path = folder / ADAPTER_WEIGHTS
    with reading_files(path, "the adapter"), safe_open(path, "pt") as file:
        there = set(file.keys())
        if different := sorted(there ^ own.keys()):
            where = "is only in the files" if different[0] in there else "is not in the files"
            raise config_error("layers of another adapter", path=path, different=first_of(different), where=where)
        for name, parameter in own.items():
            source = file.get_slice(name)
            if list(source.get_shape()) != list(parameter.shape):
                words = {"path": path, "name": name, "there": list(source.get_shape()), "here": list(parameter.shape)}
                raise config_error("rank of another adapter", **words)
            local(parameter).copy_(local_part(source, parameter))


@contextmanager
def factors_moved(orig_model: torch.nn.Module) -> Iterator[None]:
    """Give B small random numbers within the context, the same on all ranks; a model without adapters stays as it is.

    Afterwards B has its bits back, in the same memory.
    """
    trained = factors(orig_model)
    held = {name: parameter for name, parameter in trained.items() if ".lora_B." in name}
    # As large as A at its start, so that the gradients of A are about as large as those of B.
    inputs = {name: trained[name.replace(".lora_B.", ".lora_A.")].shape[1] for name in held}
    before = {name: local(weight).detach().clone() for name, weight in held.items()}
    try:
        with torch.no_grad():
            for name, weight in held.items():
                key = random_key(0, name.removesuffix(".lora_B.weight"))
                generator = torch.Generator().manual_seed(key >> 1)
                noise = torch.randn(weight.shape, generator=generator) / math.sqrt(3 * inputs[name])
                local(weight).copy_(local_part(noise, weight))
        yield
    finally:
        with torch.no_grad():
            for name, weight in held.items():
                local(weight).copy_(before[name])


def adapters_in(files: adapter_files.AdapterFiles) -> Adapters:
    """Return the adapters that a model gets which computes with those of a folder, not merged."""
    path = files.folder / ADAPTER_WEIGHTS
    with reading_files(path, "the adapter"), safe_open(path, "pt") as file:
        keys = [adapter_files.name_in_model(key).partition(".lora_")[0] for key in file.keys() if ".lora_" in key]  # noqa: SIM118
    config = AdapterConfig(
        rank=files.rank,
        alpha=files.scale * files.rank,
        targets=tuple(dict.fromkeys(key.removesuffix(".base_layer") for key in keys)),
        method="dora" if files.dora else "lora",
    )
    return Adapters(config, 0, files.base, files.digest or "", files.folder, tokens=files.tokens)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, lengths: Tensor | None = None) -> Tensor:
    """Return W + scale * B A, computed in fp32 and rounded once to the dtype of W. It is computed on the host, whatever
    device W is on: a GPU adds up in another order, and the run's checks compare its weights with those of the host.

    Args:
        weight: [out, in], whole or this rank's shard of rows. lengths: of DoRA, of the rows, [out].
    """
    added = scale * (b.cpu().float() @ a.cpu().float())
    merged = local(weight).cpu().float() + local_part(added, weight)
    if lengths is not None:
        (start, size), _ = local_region(weight)
        merged = merged * (lengths.cpu()[start : start + size] / merged.norm(dim=1))[:, None]
    return merged.to(weight.device, weight.dtype)


@torch.no_grad()
def merge_files(
    orig_model: PreTrainedModel, files: adapter_files.AdapterFiles, nf4_of: torch.dtype | None = None
) -> None:
    """Add the adapter of a folder to the weights of a model that has none, each rank to its own part; no collective.

    Args:
        nf4_of: precision of the weights that a run has quantized: the adapter is added to what NF4 holds of them. The
            model is whole. None: it is added to the weights as they are.

    Raises:
        ConfigError: the folder's adapters are those of another model.
    """
    from sftkit.models.expert_adapters import expert_weights, merged_experts

    layers = adapter_files.check_adapter(files, None)
    path = files.folder / ADAPTER_WEIGHTS
    owners = dict(orig_model.named_modules())
    of_experts = expert_weights(orig_model) if files.experts else {}
    for layer in () if nf4_of is None else _layers_in_nf4(orig_model):
        layer.weight.data = dequantize(quantize(layer.weight.to(nf4_of)), layer.weight.dtype)
    with reading_files(path, "the adapter"), safe_open(path, "pt") as file:
        keys = {adapter_files.name_in_model(key): key for key in file.keys()}  # noqa: SIM118 - of safetensors, which has no iterator
        for name, ids in files.tokens.items():
            vocabulary.make_room_for(orig_model, ids)
            merge_token_rows(orig_model, name, ids, file.get_tensor(keys[f"{name}{adapter_files.TRAINED_ROWS}"]))
            vocabulary.set_new_rows(orig_model, None)
        for name in layers:
            if not isinstance(owners.get(name), torch.nn.Linear) and name not in of_experts:
                raise config_error("layer of another model", files=files, path=path, name=name)
            weight = of_experts[name] if name in of_experts else owners[name].weight
            assert isinstance(weight, torch.nn.Parameter)
            if weight is embedding_of(orig_model):
                raise config_error("adapter of a tied weight", path=path, name=name)
            a, b = (file.get_tensor(keys[f"{name}.lora_{one}.weight"]) for one in "AB")
            if name in of_experts:
                transposed = owners[name.removesuffix(".base_layer")].is_transposed
                merged = merged_experts(weight, a, b, files.scale, transposed=bool(transposed))
            else:
                lengths = file.get_tensor(keys[f"{name}.lora_magnitude_vector"]) if files.dora else None
                merged = merged_weight(weight, a, b, files.scale, lengths)
            if isinstance(weight, DTensor):
                weight.to_local().copy_(merged)
            else:  # not in place: the weights of files that are mapped into memory stay as they are
                weight.data = merged


def peft_config(orig_model: PreTrainedModel, adapters: Adapters | None = None) -> dict[str, Any]:
    """Return what adapter_config.json says of the model's adapters, or of one of several."""
    adapters = adapters or adapters_of(orig_model)
    assert adapters is not None
    config = adapters.config
    experts = [name for name in adapters.modules if not isinstance(orig_model.get_submodule(name), torch.nn.Linear)]
    # In a mixture peft takes these names among target_modules for the experts of older files, whatever is before them.
    taken = ("gate_proj", "up_proj", "down_proj") if num_experts(orig_model) else ()
    mistaken = [name for name in adapters.modules if name.rpartition(".")[2] in taken]
    parameters = [f"{name}.{one}" for name in _suffixes(orig_model, experts) for one in adapter_files.EXPERT_WEIGHTS]
    parameters += [f"{name}.weight" for name in _suffixes(orig_model, mistaken)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base.path,
        "revision": adapters.base.revision,
        "r": config.rank,
        # rsLoRA is folded into alpha: programs that know alpha / r only compute the same.
        "lora_alpha": adapters.scale * config.rank,
        "use_rslora": False,
        "use_dora": config.method == "dora",
        "target_modules": _suffixes(orig_model, {*adapters.modules} - {*experts, *mistaken}),
        "target_parameters": parameters or None,
        "trainable_token_indices": {_in_whole(orig_model, name): list(ids) for name, ids in adapters.tokens.items()}
        or None,
        "lora_dropout": 0.0 if parameters else config.dropout,  # peft has none for parameters
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
        "peft_version": "0.21.0",
    }


def _in_whole(orig_model: PreTrainedModel, name: str) -> str:
    return peft_name(orig_model, name).removeprefix(adapter_files.PEFT_PREFIX)


def _suffixes(orig_model: PreTrainedModel, modules: Collection[str]) -> list[str]:
    """Return the last parts of names, if they name these modules and no others with weights; else the names
    themselves."""
    if towers.whole_of(orig_model) is not None:  # other parts of the whole model have layers of the same names
        return sorted(_in_whole(orig_model, name) for name in modules)
    last = {name.rpartition(".")[2] for name in modules}
    named = {
        n for n, m in orig_model.named_modules() if n.rpartition(".")[2] in last and [*m.parameters(recurse=False)]
    }
    return sorted(last) if named == set(modules) else sorted(modules)


def peft_config_text(orig_model: PreTrainedModel, adapters: Adapters | None = None) -> str:
    """Return the content of adapter_config.json. `adapters`: one of several."""
    return json.dumps(peft_config(orig_model, adapters), indent=2)
