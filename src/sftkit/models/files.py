"""Check the files of a model before torch is loaded: what is damaged, and what would be trained as something else.

Somebody else wrote these files. An error while they are read is a ConfigError that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sftkit.errors import ConfigError, DataError, RunError, Stopped

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LARGEST_HEADER = 100 * 2**20
"Bytes of a safetensors header; a longer one is damage."
FLOATS = ("F64", "F32", "F16", "BF16")
"Data types of safetensors whose numbers are weights by themselves; all others need a scale."
COPY_AGAIN = "Copy or download the model again"
_QUANTIZED = ("quantization_config", "compression_config")
"Fields of config.json that say how weights are stored; the second is an older name of compressed-tensors."
_QUANTIZED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"Files in which ModelOpt, AutoGPTQ and AWQ say the same."
_NOT_OF_THE_FILES = (ConfigError, DataError, RunError, Stopped, MemoryError, KeyboardInterrupt, SystemExit)
"What is no fault of the files that are read, or says so itself."
_LEFTOVER = re.compile(
    r"(?:^|\.)(lora_\w+|base_layer|modules_to_save|weight_scale\w*|input_scale|qweight|qzeros|_orig_mod)(?:\.|$)"
)
"Parts of names that wrappers of a model leave in its files: transformers drops such tensors with a warning."


@contextmanager
def reading_files(where: str | Path, what: str = "the model") -> Iterator[None]:
    """Turn any error of libraries that read files of somebody else into a ConfigError that names them.

    That includes panics of Rust libraries, which are no Exception.
    """
    try:
        yield
    except _NOT_OF_THE_FILES:
        raise
    except BaseException as error:
        name = type(error).__name__
        if name == "OutOfMemoryError" or not (isinstance(error, Exception) or name == "PanicException"):
            raise
        text = " ".join(str(error).split())[:300] or "no message"
        if name == "UnpicklingError":  # whose own text advises to run the code that is in the file
            text = "a .bin file that is no pickle of tensors alone"
        raise ConfigError(f"{where}: cannot load {what}: {name}: {text}. {COPY_AGAIN}") from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: it cannot be read, is nested too deeply, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not usable: its JSON is nested too deeply. {COPY_AGAIN}") from error
    except ValueError as error:  # JSON and UTF-8
        raise ConfigError(f"{path}: not valid JSON: {error}. {COPY_AGAIN}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, found a {type(found).__name__}. {COPY_AGAIN}")
    return found


def check_model_files(folder: Path) -> None:
    """Reject a model folder with a file that is damaged, or with weights that are quantized.

    Raises:
        ConfigError: which file, why, and what to do.
    """
    config = json_object(folder / "config.json")
    check_unquantized(config, f"{folder}: config.json")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder}: adapter_config.json: adapters of PEFT are not loaded, so the model would be another one. Merge "
            "them into the weights first (PeftModel.merge_and_unload, save_pretrained) and name that folder"
        )
    for name in _QUANTIZED_FILES:
        if (folder / name).is_file():
            found = json_object(folder / name)
            raise ConfigError(_quantized(f"{folder}: {name}", _method(found.get("quantization") or found)))
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            json_object(folder / name)
    for path in weight_files(folder):
        check_weights(path)


def check_unquantized(config: Mapping[str, Any], where: str) -> None:
    """Reject a config, the contents of config.json, that says that weights are quantized; also of a part of the model.

    Raises:
        ConfigError: with the name of the method.
    """
    parts = {"": config, **{f"{key}.": value for key, value in config.items() if isinstance(value, Mapping)}}
    for place, fields in parts.items():
        for key in _QUANTIZED:
            if found := fields.get(key):
                raise ConfigError(_quantized(f"{where}: {place}{key}", _method(found)))


def _method(found: Any) -> str:
    """Return the name of a quantization method as its settings give it."""
    if not isinstance(found, Mapping):
        return "an unknown method"
    named = found.get("quant_method") or found.get("quant_algo") or found.get("format")
    if named is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        named = "bitsandbytes"
    return str(named or ("gptq" if "desc_act" in found else "an unknown method"))


def _quantized(where: str, method: str) -> str:
    return (
        f"{where}: the weights are quantized ({method}), and only plain bf16, fp16 or fp32 weights are trained. Start "
        "from the model before it was quantized (often the same name without -FP8, -AWQ, -GPTQ or -bnb-4bit), or "
        "de-quantize it with transformers (from_pretrained, model.dequantize(), save_pretrained) and name that folder"
    )


def files_of_weights(folder: Path) -> dict[str, Path]:
    """Return weight name -> its safetensors file, as transformers reads a folder; empty without safetensors.

    Raises:
        ConfigError: a damaged index or file.
    """
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        return {name: folder / file for name, file in index_of(folder).items()}
    return {name: path for path in weight_files(folder) for name in header_of(path)}


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads, by the index if there is one.

    Raises:
        ConfigError: the index is damaged, names a file elsewhere, or one that is not there.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        return []
    files = sorted({folder / file for file in index_of(folder).values()})
    if missing := [path for path in files if not path.is_file()]:
        raise ConfigError(f"{missing[0]}: missing, and {INDEX_FILE} names it. {COPY_AGAIN}")
    return files


def index_of(folder: Path) -> dict[str, str]:
    """Return weight name -> file name of a sharded model.

    Raises:
        ConfigError: a damaged index, or one that leads out of the folder.
    """
    path = folder / INDEX_FILE
    names = json_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{path}: cannot read weights: it has no weight_map of names to files. {COPY_AGAIN}")
    # The index came with the model: a name with a folder in it would read whatever file it points at.
    outside = [file for file in names.values() if Path(file).name != file]
    if outside:
        raise ConfigError(f"{path}: {outside[0]!r} leads out of the folder; take the model's own files")
    return names


def check_weights(path: Path) -> None:
    """Reject a safetensors file that is not whole, or whose weights are numbers that need a scale.

    Raises:
        ConfigError: the file and what is wrong.
    """
    tensors = header_of(path)
    for name, tensor in tensors.items():
        if found := _LEFTOVER.search(name):
            raise ConfigError(
                f"{path}: {name}: {found[1]} is of an adapter, a quantized layer or a compiled module, which the class "
                "of config.json does not have, so the model would be another one. Save the plain model "
                "(merge_and_unload, dequantize, or the module inside torch.compile) and name that folder"
            )
        if name.endswith(".weight") and tensor["dtype"] not in (*FLOATS, "I64", "BOOL"):
            raise ConfigError(_quantized(f"{path}: {name}", f"stored as {tensor['dtype']}"))


def header_of(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name, each with dtype, shape and data_offsets.

    Raises:
        ConfigError: the file cannot be read, or is longer or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            # The file begins with the length of its header, 8 bytes, and the header, JSON.
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LARGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(file.read(length))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
        if not all(
            isinstance(tensor["dtype"], str) and isinstance(tensor["shape"], list) for tensor in tensors.values()
        ):
            raise ValueError("a tensor without dtype or shape")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read weights: {error.strerror}. {COPY_AGAIN}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot read weights: no safetensors file ({error}). {COPY_AGAIN}") from error
    if end != size:
        raise ConfigError(f"{path}: cannot read weights: {size:,} bytes, and its header says {end:,}. {COPY_AGAIN}")
    return tensors
