"""Read a model's files before torch is loaded: find damage and quantization, the model kind, and its size.

The files come from third parties, so every error while reading them becomes a ConfigError that names the file.
Parameters of a recipe's model are counted from its files or from the fields of its config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sftkit.config.schema import AdapterConfig, ModelConfig, NamedAdapter, OptimConfig, TrainConfig
from sftkit.config.tables import BYTES, DEFAULT, FALLBACK, OPTIMIZERS
from sftkit.errors import ConfigError, DataError, RunError, Stopped, config_error, hint
from sftkit.models.trained import frozen_names
from sftkit.rundir.names import ADAPTER_CONFIG, ADAPTER_FOLDERS, latest_checkpoint, resolve
from sftkit.runtime.hub import find_model, hub_answers

if TYPE_CHECKING:
    from sftkit.models.adapter_files import AdapterFiles
    from sftkit.models.quantized import Format, Weight

CAUSAL = "AutoModelForCausalLM"
CAPTIONS = "AutoModelForImageTextToText"
TEXT_TO_TEXT = "AutoModelForSeq2SeqLM"
VISION = "vision-encoder-decoder"
"The model_type whose encoder reads pictures."


def auto_class(config: Mapping[str, Any]) -> str:
    """Return the name of the auto class that loads a model with this config, the contents of its config.json."""
    if config.get("model_type") == VISION:
        return CAPTIONS
    return TEXT_TO_TEXT if config.get("is_encoder_decoder") else CAUSAL


def auto_class_in(folder: Path) -> str:
    """Return the auto class of the model in a folder, such as a checkpoint; only causal models have adapters."""
    if (folder / ADAPTER_FOLDERS).is_dir():
        return CAUSAL
    if (folder / ADAPTER_CONFIG).is_file():
        base = folder_of(str(folder), None)
        return CAUSAL if base is None else whole_class(json_object(base / "config.json"))
    return whole_class(json.loads((folder / "config.json").read_text()))


def whole_class(config: Mapping[str, Any]) -> str:
    """Return the name of the auto class that loads a model with this config, its text model and all other parts."""
    if "text_config" not in config or config.get("is_encoder_decoder"):
        return auto_class(config)
    return CAPTIONS if "vision_config" in config else "AutoModelForMultimodalLM"


def not_causal(model_type: str, what: str) -> str:
    """Return the reason why `what` rejects a model with an encoder."""
    return hint("model with an encoder", model_type=model_type, what=what)


TEXT_NAMES = {
    r"^(model\.)?(language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.(model\.)?": "model.",
}
"Map the names of weights in the files of a model with several parts to the names of its text model."


def text_name(name: str) -> str | None:
    """Return the name in the text model of a weight in the files of a model with several parts; None: it belongs to
    another part, such as a vision tower.
    """
    for pattern, inside in TEXT_NAMES.items():
        found = re.sub(pattern, inside, name)
        if found != name:
            return found
    return name if name.startswith("lm_head.") else None


INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
UNCHANGED = "model-unchanged.safetensors"
"File of a checkpoint with the tensors of the whole model outside its text model, which no run changes (towers.py)."
HEADER_BYTES = 8
"A safetensors file begins with the length of its header in so many bytes."
LARGEST_HEADER = 100 * 2**20
"Largest valid size of a safetensors header in bytes; a longer header means a damaged file."
FLOATS = ("F64", "F32", "F16", "BF16")
"Data types of safetensors whose numbers are the weights themselves; all other types need a scale."
COPY_AGAIN = "Copy or download the model again"
_QUANTIZED = ("quantization_config", "compression_config")
"Fields of config.json that describe how weights are stored; the second is an older name used by compressed-tensors."
_QUANTIZED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"Files in which ModelOpt, AutoGPTQ and AWQ store the same settings."
_NOT_OF_THE_FILES = (ConfigError, DataError, RunError, Stopped, MemoryError, KeyboardInterrupt, SystemExit)
"Errors that the model's files did not cause, or that already have a clear message."
_LEFTOVER = re.compile(
    r"(?:^|\.)(lora_\w+|base_layer|modules_to_save|weight_scale\w*|input_scale|qweight|qzeros|_orig_mod)(?:\.|$)"
)
"Parts of weight names that wrappers of a model leave in its files: transformers drops such tensors with a warning."


@contextmanager
def reading_files(where: str | Path, what: str = "the model") -> Iterator[None]:
    """Turn any error that a library raises while reading third-party files into a ConfigError that names them.

    This includes panics of Rust libraries, which do not derive from Exception.
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
        if name == "UnpicklingError":  # The library's own message advises the user to execute the code in the file.
            text = "a .bin file that holds more than pickled tensors"
        raise ConfigError(f"{where}: cannot load {what}: {name}: {text}. {COPY_AGAIN}") from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: the file cannot be read, is nested too deeply, or holds something other than an object.
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
    """Reject a model folder that has a damaged file, or weights in a format that is not de-quantized.

    Raises:
        ConfigError: names the file, the reason, and the fix.
    """
    stored = format_in(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        raise config_error("two models in a folder", folder=folder, file=ADAPTER_CONFIG)
    for name in _QUANTIZED_FILES:
        if (folder / name).is_file():
            found = json_object(folder / name)
            from sftkit.models.quantized import method_of

            method = method_of(found.get("quantization") or found)
            raise config_error("quantized weights", place=f"{folder}: {name}", method=method)
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            json_object(folder / name)
    tensors = _tensors_in(folder)
    if stored is None:
        plain: Collection[str] = tensors
    else:
        from sftkit.models.quantized import packed_weights

        plain = {weight.data for weight in packed_weights(stored, tensors, folder).values() if weight.scale is None}
    for path in weight_files(folder):
        check_weights(path, plain)


def quantizations(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (field, its settings) where the contents of a config.json say how weights are stored, for the whole model
    or a part of it; [] for plain weights.
    """
    parts = {"": config, **{f"{key}.": value for key, value in config.items() if isinstance(value, Mapping)}}
    return [(f"{place}{key}", fields[key]) for place, fields in parts.items() for key in _QUANTIZED if fields.get(key)]


def format_of(config: Mapping[str, Any], where: str) -> Format | None:
    """Return the format that the contents of a config.json declare; None: plain.

    Raises:
        ConfigError: a method that is not de-quantized, by name.
    """
    if not quantizations(config):
        return None
    from sftkit.models.quantized import supported  # most models are plain

    return supported(quantizations(config)[0], where)


def format_in(folder: Path) -> Format | None:
    """Return the format of the weights in a folder by its config.json; None: plain, or no config.json is there.

    Raises:
        ConfigError: a format that is not de-quantized.
    """
    path = folder / "config.json"
    return format_of(json_object(path), f"{folder}: config.json") if path.is_file() else None


def dequantized_in(folder: Path) -> dict[str, Weight] | None:
    """Return name -> the weight in the quantized files of a folder, de-quantized when it is read; None: plain files.

    Raises:
        ConfigError: a damaged file, or a weight that does not fit its scales.
    """
    if (stored := format_in(folder)) is None:
        return None
    from sftkit.models.quantized import Weight, packed_weights

    files = files_of_weights(folder)
    return {name: Weight(one, files) for name, one in packed_weights(stored, _tensors_in(folder), folder).items()}


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """Return name -> shape of each weight of the model that is trained, in the safetensors files of a folder."""
    weights = dequantized_in(folder)
    if weights is not None:
        shapes = {name: weight.get_shape() for name, weight in weights.items()}
    else:
        shapes = {name: tensor["shape"] for name, tensor in _tensors_in(folder).items()}
    return {own: shapes[stored] for own, stored in trained_names(shapes).items()}


def _tensors_in(folder: Path) -> dict[str, Any]:
    """Return the tensors of all safetensors files of a folder, as header_of does."""
    return {name: tensor for path in weight_files(folder) for name, tensor in header_of(path).items()}


def stored_format(model: ModelConfig) -> str | None:
    """Return the quantized format of the start model's weights in words; None: plain, or unknown before loading."""
    stored = None if model.path is None else _read(model, format_in)
    return None if stored is None else stored.describe()


def files_of_weights(folder: Path) -> dict[str, Path]:
    """Map each weight name to its safetensors file, as transformers reads a folder; empty if the folder
    has no safetensors.

    Raises:
        ConfigError: a damaged index or file.
    """
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        return {name: folder / file for name, file in index_of(folder).items()}
    return {name: path for path in weight_files(folder) for name in header_of(path)}


def text_weights(folder: Path) -> dict[str, tuple[str, Path]]:
    """Map each weight name of the model that is trained to its name in the files and its file: of a model with several
    parts the weights of its text model, of any other model all weights.

    Raises:
        ConfigError: a damaged index or file.
    """
    files = files_of_weights(folder)
    return {own: (stored, files[stored]) for own, stored in trained_names(files).items()}


def trained_names(stored: Iterable[str]) -> dict[str, str]:
    """Map the names of weights of the model that is trained to their names in files; a model that is no part of a
    larger one has the same in both.
    """
    inside = {name: text_name(name) for name in stored}
    if not any(found not in (None, name) for name, found in inside.items()):
        return {name: name for name in inside}
    return {found: name for name, found in inside.items() if found is not None}


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads, according to the index if there is one.

    Raises:
        ConfigError: the index is damaged, or names a file that is missing or outside the folder.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        return []
    files = sorted({folder / file for file in index_of(folder).values()})
    if missing := [path for path in files if not path.is_file()]:
        raise ConfigError(f"{missing[0]}: missing, but {INDEX_FILE} names it. {COPY_AGAIN}")
    return files


def index_of(folder: Path) -> dict[str, str]:
    """Map each weight name to its file name in a sharded model.

    Raises:
        ConfigError: the index is damaged or points outside the folder.
    """
    path = folder / INDEX_FILE
    names = json_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ConfigError(f"{path}: cannot read weights: no weight_map of names to files. {COPY_AGAIN}")
    # The index came with the model: a file name with a folder in it could read any file on this machine.
    outside = [file for file in names.values() if Path(file).name != file]
    if outside:
        raise ConfigError(f"{path}: {outside[0]!r} leads out of the folder; use the model's own files")
    return names


def check_weights(path: Path, plain: Collection[str]) -> None:
    """Reject a safetensors file that is incomplete, or in which a weight that should be plain needs a scale.

    Args:
        plain: names of all tensors but quantized weights and their scales.

    Raises:
        ConfigError: names the file and the fault.
    """
    tensors = header_of(path)
    for name, tensor in tensors.items():
        if name not in plain:
            continue
        if found := _LEFTOVER.search(name):
            raise config_error("leftovers of a wrapper", path=path, weight=name, part=found[1])
        if name.endswith(".weight") and tensor["dtype"] not in (*FLOATS, "I64", "BOOL"):
            stored = f"stored as {tensor['dtype']}"
            raise config_error("quantized weights", place=f"{path}: {name}", method=stored)


def header_of(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name, each with dtype, shape and data_offsets.

    Raises:
        ConfigError: the file cannot be read, or its length differs from its header's.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(HEADER_BYTES), "little")
            if size < HEADER_BYTES or length > min(LARGEST_HEADER, size - HEADER_BYTES):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(file.read(length))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = HEADER_BYTES + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
        if not all(
            isinstance(tensor["dtype"], str) and isinstance(tensor["shape"], list) for tensor in tensors.values()
        ):
            raise ValueError("a tensor without dtype or shape")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read weights: {error.strerror}. {COPY_AGAIN}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot read weights: not a safetensors file ({error}). {COPY_AGAIN}") from error
    if end != size:
        raise ConfigError(f"{path}: cannot read weights: {size:,} bytes, but its header needs {end:,}. {COPY_AGAIN}")
    return tensors


def adapter_at(model: ModelConfig, *, with_base: bool = True) -> AdapterFiles | None:
    """Return the adapter at model.path; None: there is a whole model, or none.

    Raises:
        ConfigError: nothing is there, or an adapter that is not loaded here.
    """
    if model.path is None or not (Path(resolve(model.path)) / ADAPTER_CONFIG).is_file():
        return None
    from sftkit.models.adapter_files import adapter_in  # most models have none

    return adapter_in(Path(resolve(model.path)), model, with_base=with_base)


def find_with_base(path: str) -> str:
    """Return what `find_model` finds; an adapter must be whole, and its model there.

    Raises:
        ConfigError: a model is not there, or an adapter is damaged.
    """
    found = find_model(path)
    if (files := adapter_at(ModelConfig(path=found))) is not None:
        from sftkit.models.adapter_files import check_adapter

        check_adapter(files, None)
        find_model(str(files.base.path), files.base.revision)
    return found


T = TypeVar("T")
GIB = 2**30
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"Bytes per element of a matrix in NF4 (ops/nf4.py), with those of its scales."
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BESIDE = 1.25
"Factor for the rest of a step's memory, at least a quarter more: activations, logits, communication buffers."
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "smollm3", "olmo", "olmo2", "olmo3")
"""Architectures whose blocks have four attention matrices and three feed-forward matrices, with the field names that
`of_fields` reads.
"""
TIED = ("gemma3_text", "smollm3")
"The architectures among them that tie head and embedding if their fields do not say."
SPARSE = "gpt_oss"
"An architecture with as many attention matrices, and feed-forward matrices and biases for each expert."
NAMED = {
    "qwen3": ("head_dim",),
    "gemma3_text": ("head_dim", "num_key_value_heads"),
    SPARSE: ("head_dim", "num_local_experts"),
}
"Their fields whose defaults do not depend on other fields: the model's size is known once these are set."


class ModelSize(NamedTuple):
    """Numbers of parameters of a model."""

    parameters: int
    ends: int
    "parameters of embedding and head, which are not matrices of a block; 0 if unknown"
    frozen: int = 0
    "parameters without gradients and states; 0 if the names in the files are unknown"
    frozen_ends: int = 0
    nf4: int = 0
    "of the frozen ones: in 4 bits"
    factors: int = 0
    "parameters of adapters in fp32, not counted in `parameters`; 0 if the layers are unknown"


@dataclass(frozen=True)
class Replica:
    """The memory that a full copy of the model needs on a GPU that trains it."""

    parameters: int
    optimizer: str
    "optim.name"
    num_bytes: int
    "estimated peak of a training step: BESIDE times weights, gradients and optimizer states"
    held_bytes: int = 0
    "weights, gradients and optimizer states: a lower bound for a step, on one GPU or sharded over several"

    def describe(self) -> str:
        """Return a line for users: `32.8 billion parameters need about 305 GiB as a replica (optim.name auto)`."""
        need = f"{self.parameters / 1e9:.1f} billion parameters need about {self.num_bytes / GIB:.0f} GiB"
        return f"{need} as a replica (optim.name {self.optimizer})"


def replica_of(
    model: ModelConfig,
    optim: OptimConfig,
    train: TrainConfig,
    adapter: AdapterConfig | None = None,
    several: Sequence[NamedAdapter] | None = None,
) -> Replica | None:
    """Return the memory that a replica needs in training; None if the model's size is unknown before loading."""
    size = size_of(model, train.freeze, adapter, several)
    if size is None:
        return None
    precision = "fp32" if train.precision == "fp32" else "bf16"
    held = training_bytes(size, optim.name, precision)
    least = held
    if optim.name == "auto" and precision == "bf16":  # "auto" chooses the smallest states for train.memory=low
        least = min(training_bytes(size, spec.name, precision) for spec in OPTIMIZERS.values() if spec.saves_memory)
    return Replica(size.parameters, optim.name, int(BESIDE * held), least)


def training_bytes(size: ModelSize, optimizer: str, precision: str) -> int:
    """Return the bytes of weights, gradients and optimizer states; "auto" counts the smallest optimizer that it
    may choose.
    """
    least = FALLBACK if precision == "bf16" else DEFAULT
    spec = OPTIMIZERS[least if optimizer == "auto" else optimizer]
    # Integer bytes: the result is a lower bound, and the scales of 8-bit states add only a hundredth.
    in_blocks, elsewhere = (
        int(spec.training_width(precision, block_matrix=block_matrix)) for block_matrix in (True, False)
    )
    weight = BYTES[precision]
    frozen = (in_blocks - weight) * (size.frozen - size.frozen_ends) + (elsewhere - weight) * size.frozen_ends
    smaller = int((weight - NF4_BYTES) * size.nf4)
    factors = int(OPTIMIZERS[DEFAULT].training_width("fp32")) * size.factors
    return in_blocks * (size.parameters - size.ends) + elsewhere * size.ends - frozen - smaller + factors


def size_of(
    model: ModelConfig,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    several: Sequence[NamedAdapter] | None = None,
) -> ModelSize | None:
    """Return the size of the model that a run starts from; None if its config leaves sizes to defaults.

    The size is exact if the model's files give it. Otherwise it is computed from the sizes in the config, which is
    fetched from the hub if the local cache lacks it.

    Args:
        freeze: train.freeze.
        adapter: the whole model is frozen. several: Config.adapters.
    """
    if model.scratch is not None:
        return of_fields(_scratch_fields(model))
    size = _read(model, _of_folder)
    if size is not None and adapter is not None:
        nf4 = size.parameters - size.ends if adapter.base == "nf4" else 0
        from sftkit.models.adapter_files import num_factor_elements

        factors = num_factor_elements(model, adapter, several or ())
        return size._replace(frozen=size.parameters, frozen_ends=size.ends, nf4=nf4, factors=factors)
    frozen = _read(model, partial(frozen_in_files, patterns=freeze)) if freeze else None
    if size is None or frozen is None:
        return size
    ends = sum(count for name, count in frozen.items() if END_NAMES.search(name))
    return size._replace(frozen=sum(frozen.values()), frozen_ends=ends)


def fields_of(model: ModelConfig) -> Mapping[str, Any] | None:
    """Return the fields of the start model's transformers config, those of its text part; None if unknown."""
    return _scratch_fields(model) if model.scratch is not None else _read(model, _text_fields)


def _scratch_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a new model, with the vocabulary size of the tokenizer that will be trained."""
    learned = {} if model.train_tokenizer is None else {"vocab_size": model.train_tokenizer.vocab_size}
    return learned | (model.scratch or {})


def _read(model: ModelConfig, read: Callable[[Path], T]) -> T | None:
    """Return what `read` finds in the model's folder; None if there is no folder or it cannot be read."""
    try:
        folder = folder_of(model.path or "", model.revision)
        return None if folder is None else read(folder)
    # Loading reports the fault later.
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def folder_of(path: str, revision: str | None) -> Path | None:
    """Return the folder of the model's files: local, a run's newest checkpoint, or a snapshot in the hub's cache,
    which may hold only the config.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if (newest := latest_checkpoint(folder)) is not None:
        return folder_of(str(newest), revision)
    if (folder / ADAPTER_CONFIG).is_file():  # the model that it belongs to
        found = json_object(folder / ADAPTER_CONFIG)
        base = Path(found["base_model_name_or_path"])
        return None if (base / ADAPTER_CONFIG).is_file() else folder_of(str(base), found.get("revision"))
    if folder.is_dir():
        return None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(cached, str) and hub_answers():
        cached = hf_hub_download(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _text_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of config.json, overridden by those of its text part."""
    config = json_object(folder / "config.json")
    return config | (config.get("text_config") or {})


def _of_folder(folder: Path) -> ModelSize | None:
    """Return the model's size from the index or weights of a folder, otherwise from its config."""
    text = _text_fields(folder)
    files = files_of_weights(folder)
    has_parts = "text_config" in json_object(folder / "config.json") and all(path.is_file() for path in files.values())
    if (files and has_parts) or format_in(folder) is not None:  # an index gives the bytes of all
        sizes = stored_sizes(folder)[0] if files else {}
        return ModelSize(sum(sizes.values()), _ends(text, tied=True)) if sizes else of_fields(text)
    if (folder / INDEX_FILE).is_file():
        metadata = json_object(folder / INDEX_FILE)["metadata"]
        width = DTYPE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")))
        # Older indexes give only the total bytes.
        if "total_parameters" in metadata:
            return ModelSize(int(metadata["total_parameters"]), _ends(text, tied=True))
        return ModelSize(int(metadata["total_size"]) // width, _ends(text, tied=True)) if width else None
    if (folder / SINGLE_FILE).is_file():
        return ModelSize(num_elements(folder / SINGLE_FILE), _ends(text, tied=True))
    return of_fields(text)


def _ends(fields: Mapping[str, Any], *, tied: bool) -> int:
    """Return the number of parameters of embedding and head from the fields of a transformers config; 0 if they give
    no sizes.

    Args:
        tied: whether embedding and head share one matrix if the fields do not say.
    """
    vocab = fields.get("vocab_size")
    hidden = fields.get("hidden_size")
    if not (isinstance(vocab, int) and isinstance(hidden, int)):
        return 0
    return vocab * hidden * (1 if fields.get("tie_word_embeddings", tied) else 2)


END_NAMES = re.compile(r"(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)\.weight$")
"Names of embedding and head."
HEAD_NAME = "lm_head.weight"


def stored_sizes(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return name -> elements of each tensor in the safetensors files of a model, and the name that a tied head has in
    the live model -> that in the files.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes_in(folder).items()}
    embedding = next((name for name in sizes if END_NAMES.search(name)), None)
    return sizes, {HEAD_NAME: embedding} if embedding and HEAD_NAME not in sizes else {}


def frozen_in_files(folder: Path, patterns: Sequence[str]) -> dict[str, int]:
    """Return name -> elements of the tensors of a model's files that train.freeze freezes."""
    sizes, tied = stored_sizes(folder)
    names = {tied.get(name, name) for name in frozen_names([*sizes, *tied], patterns)}
    return {name: sizes[name] for name in names}


def num_elements(path: Path) -> int:
    """Return the number of elements of all tensors in a safetensors file, from its header.

    Raises:
        ConfigError: the file is damaged.
    """
    return sum(math.prod(tensor["shape"]) for tensor in header_of(path).values())


def of_fields(fields: Mapping[str, Any]) -> ModelSize | None:
    """Count the parameters from the fields of a transformers config, without norms and biases outside of experts; None
    if they give no sizes.
    """
    model_type = str(fields.get("model_type"))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    needed = names + NAMED.get(model_type, ())
    if model_type not in (*GATED, SPARSE) or any(not isinstance(fields.get(name), int) for name in needed):
        return None
    _, hidden, inner, blocks, heads = (fields[name] for name in names)
    key_heads = fields.get("num_key_value_heads") or heads
    head_dim = fields.get("head_dim") or hidden // heads
    # Projections of queries and output, of keys and values; then gate, up and down of the feed-forward layer.
    layer = 3 * hidden * inner
    if model_type == SPARSE:  # the router too
        layer = fields["num_local_experts"] * (layer + 2 * inner + 2 * hidden)
    block = 2 * hidden * head_dim * (heads + key_heads) + layer
    ends = _ends(fields, tied=model_type in TIED)
    return ModelSize(blocks * block + ends, ends)
