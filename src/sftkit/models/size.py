"""The parameters of a recipe's model, counted from its files or fields before anything is loaded. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sftkit.config.optimizers import DEFAULT, FALLBACK, OPTIMIZERS
from sftkit.config.schema import ModelConfig, OptimConfig, TrainConfig
from sftkit.errors import ConfigError
from sftkit.models.files import INDEX_FILE, SINGLE_FILE, header_of, json_object
from sftkit.rundir.names import latest_checkpoint
from sftkit.runtime.hub import hub_answers

T = TypeVar("T")
GIB = 2**30
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BESIDE = 1.25
"A step takes at least a quarter more: activations, logits, buckets of the exchange."
GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "smollm3", "olmo", "olmo2", "olmo3")
"Architectures of four attention matrices and three of the feed-forward layer, with the names that `of_fields` reads."
TIED = ("gemma3_text", "smollm3")
"Those of them whose embedding is the head where their fields do not say."
NAMED = {"qwen3": ("head_dim",), "gemma3_text": ("head_dim", "num_key_value_heads")}
"Fields of theirs whose defaults follow from no other field, so their sizes are known where these are named."


class ModelSize(NamedTuple):
    """Numbers of parameters of a model."""

    parameters: int
    ends: int
    "those of embedding and head, which are not matrices of a block; 0 where unknown"


@dataclass(frozen=True)
class Replica:
    """The needs of a whole copy of the model on a GPU that trains it."""

    parameters: int
    optimizer: str
    "optim.name"
    num_bytes: int
    "estimate of a training step's peak: BESIDE times weights, gradients and optimizer states"
    held_bytes: int = 0
    "weights, gradients and optimizer states at least: no step takes less, on one GPU or sharded over several"

    def describe(self) -> str:
        """Return a line for people: `32.8 billion parameters need about 305 GiB as a replica (optim.name auto)`."""
        return (
            f"{self.parameters / 1e9:.1f} billion parameters need about {self.num_bytes / GIB:.0f} GiB as a replica "
            f"(optim.name {self.optimizer})"
        )


def replica_of(model: ModelConfig, optim: OptimConfig, train: TrainConfig) -> Replica | None:
    """Return what a replica takes in training; None where the model's size is unknown before it is loaded."""
    size = size_of(model)
    if size is None:
        return None
    precision = "fp32" if train.precision == "fp32" else "bf16"
    held = training_bytes(size, optim.name, precision)
    least = held
    if optim.name == "auto" and precision == "bf16":  # "auto" takes the smallest states for train.memory=low
        least = min(training_bytes(size, spec.name, precision) for spec in OPTIMIZERS.values() if spec.saves_memory)
    return Replica(size.parameters, optim.name, int(BESIDE * held), least)


def training_bytes(size: ModelSize, optimizer: str, precision: str) -> int:
    """Return the bytes of weights, gradients and optimizer states; for "auto" those of the smallest
    optimizer that it may choose."""
    least = FALLBACK if precision == "bf16" else DEFAULT
    spec = OPTIMIZERS[least if optimizer == "auto" else optimizer]
    # Whole bytes of each: this is a lower bound, and of 8-bit states the scales are a hundredth.
    in_blocks, elsewhere = (
        int(spec.training_width(precision, block_matrix=block_matrix)) for block_matrix in (True, False)
    )
    return in_blocks * (size.parameters - size.ends) + elsewhere * size.ends


def size_of(model: ModelConfig) -> ModelSize | None:
    """Return the size of the model that a run starts from; None where its config leaves sizes to defaults.

    It is exact where the model's files say it, else computed from the sizes in its config, which is fetched from the
    hub where the local cache lacks it.
    """
    if model.scratch is not None:
        return of_fields(_scratch_fields(model))
    return _read(model, _of_folder)


def fields_of(model: ModelConfig) -> Mapping[str, Any] | None:
    """Return the fields of the transformers config of the model that a run starts from, of its text
    part; None where unknown."""
    return _scratch_fields(model) if model.scratch is not None else _read(model, _text_fields)


def _scratch_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a new model, with the vocabulary size of a tokenizer that is still to be trained."""
    learned = {} if model.train_tokenizer is None else {"vocab_size": model.train_tokenizer.vocab_size}
    return learned | (model.scratch or {})


def _read(model: ModelConfig, read: Callable[[Path], T]) -> T | None:
    """Return what `read` finds in the model's folder; None where there is none or it cannot be read."""
    try:
        folder = _folder(model.path or "", model.revision)
        return None if folder is None else read(folder)
    # Loading it will say what is wrong with it.
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _folder(path: str, revision: str | None) -> Path | None:
    """Return where the files are: a folder, a run's newest checkpoint, or a snapshot in the hub's cache, which
    may hold the config alone."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if (newest := latest_checkpoint(folder)) is not None:
        return newest
    if folder.is_dir():
        return None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(cached, str) and hub_answers():
        cached = hf_hub_download(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _text_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of config.json, those of its text part on top."""
    config = json_object(folder / "config.json")
    return config | (config.get("text_config") or {})


def _of_folder(folder: Path) -> ModelSize | None:
    """Return the size by the index or the weights of a folder, else by its config."""
    text = _text_fields(folder)
    if (folder / INDEX_FILE).is_file():
        metadata = json_object(folder / INDEX_FILE)["metadata"]
        width = DTYPE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")))
        # Older files have their bytes only.
        if "total_parameters" in metadata:
            return ModelSize(int(metadata["total_parameters"]), _ends(text, tied=True))
        return ModelSize(int(metadata["total_size"]) // width, _ends(text, tied=True)) if width else None
    if (folder / SINGLE_FILE).is_file():
        return ModelSize(num_elements(folder / SINGLE_FILE), _ends(text, tied=True))
    return of_fields(text)


def _ends(fields: Mapping[str, Any], *, tied: bool) -> int:
    """Return the parameters of embedding and head by the fields of a transformers config, 0 where it names no sizes.

    Args:
        tied: whether they share one matrix where the fields do not say.
    """
    vocab, hidden = fields.get("vocab_size"), fields.get("hidden_size")
    if not (isinstance(vocab, int) and isinstance(hidden, int)):
        return 0
    return vocab * hidden * (1 if fields.get("tie_word_embeddings", tied) else 2)


def num_elements(path: Path) -> int:
    """Return the number of elements of all tensors of a safetensors file, from its header.

    Raises:
        ConfigError: the file is damaged.
    """
    return sum(math.prod(tensor["shape"]) for tensor in header_of(path).values())


def of_fields(fields: Mapping[str, Any]) -> ModelSize | None:
    """Return the parameters by the fields of a transformers config, without norms and biases; None
    where it names no sizes."""
    model_type = str(fields.get("model_type"))
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    needed = names + NAMED.get(model_type, ())
    if model_type not in GATED or any(not isinstance(fields.get(name), int) for name in needed):
        return None
    _, hidden, inner, blocks, heads = (fields[name] for name in names)
    key_heads = fields.get("num_key_value_heads") or heads
    head_dim = fields.get("head_dim") or hidden // heads
    # Projections of queries and output, of keys and values; then gate, up and down of the feed-forward layer.
    block = 2 * hidden * head_dim * (heads + key_heads) + 3 * hidden * inner
    ends = _ends(fields, tied=model_type in TIED)
    return ModelSize(blocks * block + ends, ends)
