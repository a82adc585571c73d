"""Compute matrix products of the decoder blocks in float8 with torchao."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from sftkit.config.commands import install
from sftkit.config.schema import CompileConfig, TrainConfig
from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError, config_error, hint
from sftkit.models.structure import decoder_blocks
from sftkit.runtime.start import Runtime, replaced_in_each

SMALLEST_HIDDEN_SIZE = 2048
"Smallest hidden size: below it, casting and scaling cost more than the faster products save."
NARROWEST = 512
"""Smallest side of a float8 matrix. Smaller ones stay in bf16: they gain nothing, and expert routers need
the precision.
"""
_MULTIPLE = 16
"Float8 products need every dimension to be a multiple of this."


def apply_fp8(
    train: TrainConfig, compile: CompileConfig, orig_model: PreTrainedModel, layout: Layout, rt: Runtime
) -> None:
    """Convert the model to float8 according to train.fp8 and print a line about it; do nothing if it is null.

    Raises:
        ConfigError: tensor parallelism, micro-batches whose positions are not multiples of 16, or a model that
            convert_to_fp8 rejects.
    """
    if train.fp8 is not None:
        if rt.topology.tensor > 1:
            raise config_error("float8 with tensor parallelism", fp8=train.fp8)
        # The product for a weight's gradient sums over positions, so positions are one of its dimensions.
        multiple = _MULTIPLE * rt.topology.context  # each context-parallel rank has a share of the positions
        odd = [f"{rows} x {length}" for rows, length in layout.shapes if rows * length % multiple]
        odd += ["of any length"] if layout.dynamic and layout.micro_batch_size * layout.pad_multiple % multiple else []
        if odd:
            raise config_error("positions of float8", fp8=train.fp8, multiple=multiple, odd=", ".join(odd))
        number = convert_to_fp8(orig_model, train.fp8, rt.device, rt.precision, compile=compile.enabled)
        rt.print(f"{number} linear layers compute in float8, {train.fp8}")


def convert_to_fp8(
    orig_model: PreTrainedModel,
    recipe: Literal["tensorwise", "rowwise"],
    device: torch.device,
    precision: str,
    *,
    compile: bool,
) -> int:
    """Replace the linear layers of the decoder blocks in place; weights, their names and checkpoints do not change.

    Call it before compilation and wrapping. The number of positions of a micro-batch must be a multiple of 16.

    Returns:
        number of layers that now compute in float8.

    Raises:
        ConfigError: float8 is unavailable or slower here; the message names the missing part and the fix.
    """
    reason = fp8_unsupported_reason(orig_model, device, precision, compile=compile)
    if reason is not None:
        raise ConfigError(f"train.fp8={recipe}: {reason}; or set train.fp8=null")
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise ConfigError(f"train.fp8={recipe} needs torchao ({error}): {install('sftkit[fp8]')}") from error
    return swap_linears(orig_model, Float8LinearConfig.from_recipe_name(recipe))


def fp8_unsupported_reason(
    orig_model: PreTrainedModel, device: torch.device, precision: str, *, compile: bool
) -> str | None:
    """Return the reason why float8 is unavailable or slower here; None if it works."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return f"{device.type} has no float8 products: they need a GPU of compute capability 8.9 (Ada, Hopper) or newer"
    if precision != "bf16":
        return f"weights are in {precision}: set train.precision=bf16"
    if not compile:
        return "uncompiled float8 is about four times slower than bf16: set compile.enabled=true"
    hidden_size = orig_model.config.get_text_config().hidden_size
    if hidden_size < SMALLEST_HIDDEN_SIZE:
        return f"a model of hidden size {hidden_size} would get slower: float8 pays off from {SMALLEST_HIDDEN_SIZE}"
    if not convertible(orig_model):
        return hint("no float8 layers", cls=type(orig_model).__name__, multiple=_MULTIPLE, narrowest=NARROWEST)
    return None


def convertible(orig_model: PreTrainedModel) -> list[torch.nn.Linear]:
    """Return the linear layers that float8 suits: inside decoder blocks (not head or embeddings), wide enough
    and divisible.
    """
    # Only torch's own Linear: a subclass may compute something else.
    linears = [m for block in decoder_blocks(orig_model) for m in block.modules() if type(m) is torch.nn.Linear]
    return [m for m in linears if all(n % _MULTIPLE == 0 and n >= NARROWEST for n in m.weight.shape)]


def swap_linears(orig_model: PreTrainedModel, config: Any) -> int:
    """Replace the convertible layers by torchao's Float8Linear with this Float8LinearConfig and return their number;
    they share the weights.
    """
    from torchao.float8 import convert_to_float8_training

    chosen = {id(linear) for linear in convertible(orig_model)}
    convert_to_float8_training(orig_model, module_filter_fn=lambda module, _: id(module) in chosen, config=config)
    return len(chosen)


def products_in_bf16(*models: PreTrainedModel) -> AbstractContextManager[None]:
    """Let layers in float8 multiply as torch.nn.Linear does within the context. One scale for all positions of a row
    couples its documents, and four bits of a product hide what else a forward pass may do to them."""
    layers: list[Any] = [module for model in models for module in model.modules() if _is_float8(module)]
    return replaced_in_each("forward", {layer: partial(torch.nn.Linear.forward, layer) for layer in layers})


def position_multiple(orig_model: PreTrainedModel) -> int:
    """Return the number that the positions of a forward and backward pass must be a multiple of.

    It exceeds 1 for a model in float8: the product for a weight's gradient sums over positions.
    """
    return _MULTIPLE if any(map(_is_float8, orig_model.modules())) else 1


def _is_float8(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "Float8Linear"  # torchao may not be installed
