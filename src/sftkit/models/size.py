"""How many parameters the model of a recipe has, read from its files or fields before anything is loaded. No torch here."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftkit.config.schema import Config, ModelConfig

GIB = 2**30
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BYTES_PER_PARAMETER = {"auto": 8, "adamw": 16, "adamw_sr": 8, "adamw8bit": 6, "muon": 14}
"Of weight, gradient and optimizer states in bf16, as optim.optimizer_bytes has them; auto: what it falls back to, adamw_sr."
FP32_BYTES_PER_PARAMETER = {"auto": 16, "adamw": 16, "muon": 14}
BESIDE = 1.25
"A step takes at least a quarter more: activations, logits, buckets of the exchange."
GATED = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo", "olmo2", "olmo3")
"Architectures of four attention matrices and three of the feed-forward layer, with the names that `_of_fields` reads."


@dataclass(frozen=True)
class Replica:
    """What a whole copy of the model needs on a GPU that trains it."""

    parameters: int
    optimizer: str
    "optim.name"
    num_bytes: int

    def describe(self) -> str:
        """For the console: `32.8 billion parameters need about 305 GiB as a replica (optim.name auto)`."""
        return (
            f"{self.parameters / 1e9:.1f} billion parameters need about {self.num_bytes / GIB:.0f} GiB as a replica "
            f"(optim.name {self.optimizer})"
        )


def replica_of(cfg: Config) -> Replica | None:
    """The least that a replica takes in training, None where the model's size is unknown before it is loaded."""
    parameters = parameters_of(cfg.model)
    if parameters is None:
        return None
    width = FP32_BYTES_PER_PARAMETER if cfg.train.precision == "fp32" else BYTES_PER_PARAMETER
    name = cfg.optim.name
    return Replica(parameters, name, int(BESIDE * width[name] * parameters))


def parameters_of(model: ModelConfig) -> int | None:
    """Parameters of the model that a run starts from, exact where its files name them, else by the sizes of its config.

    A hub model that is not in the local cache yet is unknown, as is a model.scratch whose fields leave sizes to defaults.
    """
    if model.scratch is not None:
        fields = dict(model.scratch)
        if model.train_tokenizer is not None:
            fields.setdefault("vocab_size", model.train_tokenizer.vocab_size)
        return _of_fields(fields)
    try:
        folder = _folder(model.path or "", model.revision)
        return None if folder is None else _of_folder(folder)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        struct.error,
    ):  # loading it will say what is wrong with it
        return None


def _folder(path: str, revision: str | None) -> Path | None:
    """Where the files are: a folder, a run's newest checkpoint, a snapshot in the hub's cache."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if (folder / "LATEST").is_file():
        return folder / (folder / "LATEST").read_text().strip()
    if folder.is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _of_folder(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    if (folder / INDEX).is_file():
        metadata = json.loads((folder / INDEX).read_text())["metadata"]
        width = DTYPE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")))
        if "total_parameters" in metadata:
            return int(metadata["total_parameters"])
        return int(metadata["total_size"]) // width if width else None
    if (folder / SINGLE).is_file():
        return _elements(folder / SINGLE)
    return _of_fields(text)


def _elements(path: Path) -> int:
    """Elements of all tensors of a safetensors file, out of its header."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _of_fields(fields: Mapping[str, Any]) -> int | None:
    """Parameters by the fields of a transformers config, norms and biases left out."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if fields.get("model_type") not in GATED or any(not isinstance(fields.get(name), int) for name in names):
        return None
    vocab, hidden, inner, blocks, heads = (fields[name] for name in names)
    key_heads = fields.get("num_key_value_heads") or heads
    head_dim = fields.get("head_dim") or hidden // heads
    block = 2 * hidden * head_dim * (heads + key_heads) + 3 * hidden * inner
    return blocks * block + vocab * hidden * (1 if fields.get("tie_word_embeddings") else 2)
