"""Quantized weights of start models: which formats are de-quantized while a model is loaded, and by which numbers.

Each weight is de-quantized on its own when it is read, whole or in part. Everything but the reading works without
torch, from the headers of the files.

| method in config.json | weight | scales |
|---|---|---|
| mxfp4 (gpt-oss) | `N_blocks` uint8 [E, rows, G, 16], two 4-bit floats a byte | `N_scales` uint8, exponents |
| fp8 (DeepSeek, MiniMax, Qwen) | `N` float8 e4m3 [..., rows, columns] | `N_scale_inv`, one a block, or one |
| compressed-tensors, float-quantized | `N` float8 e4m3 | `N_scale`, one a weight, row, group or block |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sftkit.errors import config_error
from sftkit.models.files import dequantized_in, format_in, json_object, quantizations

if TYPE_CHECKING:
    from torch import Tensor

PACKED = ("F8_E4M3", "F8_E5M2", "U8", "I8")
"Data types that need scales."
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
"Data types of scales that multiply float8 weights."
_DROPPED = ("activation_scale", "input_scale", "k_scale", "v_scale", "q_scale")
"Last parts of names of scales for activations, which training does not quantize."
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"The values of a 4-bit float without its sign, which is its highest bit."
MXFP4_BLOCK = 32
"Consecutive values that share a scale."
MXFP4_BIAS = 127


class Format(NamedTuple):
    """A format that is de-quantized."""

    method: str
    "mxfp4, fp8 or compressed-tensors"
    suffix: str
    "end of the names of scales"
    block: tuple[int | None, int | None] | None = None
    "rows and columns of a weight that share a scale; None in it: all of them; None instead: not float8"

    def describe(self) -> str:
        """Return the format in words, for logs and the run's facts."""
        size = "" if self.block is None else f" in blocks of {'x'.join(str(n or 'all') for n in self.block)}"
        return f"{self.method}{size}"


class Packed(NamedTuple):
    """Where the files hold a weight."""

    data: str
    "name of the tensor with the values"
    scale: str | None
    "name of the tensor with the scales; None: the values are the weight"
    shape: tuple[int, ...]
    "shape of the weight"
    block: tuple[int, int] | None = None
    "rows and columns that share a scale; None: not float8"


def supported(declared: tuple[str, Any], where: str) -> Format:
    """Return the format that a field of config.json declares. `declared`: the field and its settings.

    Raises:
        ConfigError: a method that is not de-quantized, by name.
    """
    field, settings = declared
    method = method_of(settings)
    try:
        found = _format(settings) if isinstance(settings, Mapping) else None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # settings of another form
        found = None
    if found is None or any(size is not None and size < 1 for size in found.block or ()):
        if method in ("mxfp4", "fp8", "compressed-tensors float-quantized"):
            method += " with settings that are not supported here"
        raise config_error("quantized weights", place=f"{where}: {field}", method=method)
    return found


def _format(settings: Mapping[str, Any]) -> Format | None:
    """Return the format of a quantization_config; None if it is not de-quantized."""
    method = settings.get("quant_method")
    if method == "mxfp4":
        return Format("mxfp4", "_scales")
    if method == "fp8" and settings.get("fmt", "e4m3") == "e4m3":
        block = settings.get("weight_block_size", (128, 128))
        return Format("fp8", "_scale_inv", (None, None) if block is None else (int(block[0]), int(block[1])))
    if method == "compressed-tensors" and settings.get("format") == "float-quantized":
        blocks = {_block_of(group) for group in (settings.get("config_groups") or {}).values()}
        block = blocks.pop() if len(blocks) == 1 else None
        return None if block is None else Format("compressed-tensors", "_scale", block)
    return None


def _block_of(group: Mapping[str, Any]) -> tuple[int | None, int | None] | None:
    """Return what shares a scale in a group of layers of compressed-tensors; None if that is not known here."""
    weights = group.get("weights") or {}
    if weights.get("type") != "float" or weights.get("num_bits") != 8 or not weights.get("symmetric", True):
        return None
    strategy = weights.get("strategy")
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return int(rows), int(columns)
    return {"tensor": (None, None), "channel": (1, None), "group": (1, weights.get("group_size"))}.get(str(strategy))


def method_of(found: Any) -> str:
    """Return the name of the quantization method that its settings give."""
    if not isinstance(found, Mapping):
        return "an unknown method"
    named = found.get("quant_method") or found.get("quant_algo")
    if named in (None, "compressed-tensors") and found.get("format"):
        named = f"{named} {found['format']}" if named else found["format"]
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        bits = "4-bit" if found.get("load_in_4bit") else "8-bit"
        named = f"bitsandbytes {found.get('bnb_4bit_quant_type', '') if bits == '4-bit' else ''} {bits}"
        named = " ".join(named.split())
    return str(named or ("gptq" if "desc_act" in found else "an unknown method"))


def packed_weights(stored: Format, tensors: Mapping[str, Mapping[str, Any]], where: Path) -> dict[str, Packed]:
    """Map the name of each weight to where the files hold it, quantized or plain.

    Args:
        tensors: name -> dtype and shape of every tensor in the files.

    Raises:
        ConfigError: a quantized tensor without its scales, or scales that do not fit it.
    """
    found: dict[str, Packed] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_blocks") if stored.block is None else name
        scale, shape = f"{base}{stored.suffix}", tuple(tensor["shape"])
        scales = tensors.get(scale)
        of_weight = name.removesuffix(stored.suffix) + ("_blocks" if stored.block is None else "")
        if (name.endswith(stored.suffix) and of_weight in tensors) or name.rpartition(".")[2] in _DROPPED:
            continue  # a scale, of a weight or of activations
        if tensor["dtype"] not in PACKED:
            found[name] = Packed(name, None, shape)
        elif stored.block is None and scales and [*shape[:3], MXFP4_BLOCK // 2] == [*scales["shape"], shape[-1]]:
            found[base] = Packed(name, scale, (shape[0], shape[2] * MXFP4_BLOCK, shape[1]))
        elif stored.block is not None and (block := _shared(stored.block, tensor["dtype"], shape, scales)) is not None:
            found[name] = Packed(name, scale, shape, block)
        else:
            raise config_error("scales of weights", place=where, weight=name, scale=scale, method=stored.describe())
    return found


def _shared(
    block: tuple[int | None, int | None], dtype: str, shape: tuple[int, ...], scales: Mapping[str, Any] | None
) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, of which the last may be fewer; None if the scales do not fit."""
    if scales is None or dtype != "F8_E4M3" or scales["dtype"] not in SCALE_TYPES or len(shape) < 2:
        return None
    rows, columns = (whole if size is None else size for size, whole in zip(block, shape[-2:], strict=True))
    if math.prod(scales["shape"]) == 1 and len(shape) == 2:
        return shape[0], shape[1]
    expected = [*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns)]
    return (rows, columns) if list(scales["shape"]) == expected else None


def settings_for_transformers(folder: Path) -> dict[str, Any] | None:
    """Return the quantization_config by which transformers de-quantizes the files of a folder itself; None if it cannot
    without a further library or a GPU, or if it would by other numbers: it takes the size of a block from the number of
    scales, which is wrong if the last block is smaller.
    """
    stored, weights = format_in(folder), dequantized_in(folder) or {}
    if stored is None or stored.method == "compressed-tensors":
        return None
    for weight in weights.values():
        _, _, shape, block = weight.packed
        if block is not None and (shape[-2] % block[0] or shape[-1] % block[1]):
            return None
    return {**quantizations(json_object(folder / "config.json"))[0][1], "dequantize": True}


class Weight:
    """A weight in the files, read and de-quantized by indexing, as a slice of safetensors is."""

    def __init__(self, packed: Packed, files: Mapping[str, Path]) -> None:
        """Remember where the weight is. `files`: name of each tensor -> its file."""
        self.packed, self._files = packed, files

    def get_shape(self) -> list[int]:
        """Return the shape of the whole weight."""
        return [*self.packed.shape]

    def __getitem__(self, index: Any) -> Tensor:
        """Return the weight, or the part that slices select: in the files' precision, bf16 of mxfp4, fp32 of float8."""
        slices = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        first, *rest = slices or (slice(None),)
        packed = self.packed
        if packed.scale is None:
            return self._read(packed.data, (first, *rest))
        if packed.block is None:
            value = mxfp4(self._read(packed.data, (first,)), self._read(packed.scale, (first,)))
        else:
            value = float8(self._read(packed.data, (first,)), self._read(packed.scale, ()), packed, first)
        return value[(slice(None), *rest)]

    def _read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return file.get_slice(name)[slices] if slices else file.get_tensor(name)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weight of packed 4-bit floats, exact in bf16, one expert after the other.

    Args:
        blocks: uint8 [E, rows, G, 16], the lower half of a byte first. scales: uint8 [E, rows, G], exponents.

    Returns:
        bf16 [E, 32 G, rows], contiguous
    """
    import torch

    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    found = []
    for packed, exponents in zip(blocks, scales, strict=True):
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        values = torch.ldexp(table[codes.int()], exponents[..., None].int() - MXFP4_BIAS)
        found.append(values.flatten(1).T.to(torch.bfloat16))
    return torch.stack(found)


def float8(values: Tensor, scales: Tensor, packed: Packed, first: slice) -> Tensor:
    """Return values times scales, fp32 in the shape of `values`.

    Args:
        values: float8, the part of the weight that `first` selects of its first dimension. scales: all of the weight.
    """
    import torch

    assert packed.block is not None
    rows, columns = (torch.arange(size) // block for size, block in zip(packed.shape[-2:], packed.block, strict=True))
    factors = scales.float()
    factors = factors.reshape(1, 1) if factors.ndim < 2 else factors
    if len(packed.shape) == 2:
        rows = rows[first]
    else:
        factors = factors[first]
    return values.float() * factors[..., rows, :][..., columns]
