"""Weights from safetensors into a live model: each rank reads its own shards and no more."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError
from sftkit.models.load import TEXT_NAMES, check_complete, load_options
from sftkit.models.padding import rows_of_files
from sftkit.models.size import INDEX_FILE, SINGLE_FILE
from sftkit.models.structure import plain_class
from sftkit.models.vocabulary import NewRows, fill, new_rows, vocabulary_of
from sftkit.ops.dtensor import local, local_part
from sftkit.rundir.manifest import check_loadable
from sftkit.rundir.names import resolve
from sftkit.runtime.progress import working
from sftkit.runtime.words import first_of


def make_room(orig_model: PreTrainedModel, device: torch.device) -> None:
    """Allocate the parameters that are on the meta device; move buffers and real parameters to the device."""
    # Private: what from_pretrained keeps in fp32 (huggingface/transformers#39058), the bias that balances experts.
    exact = set(orig_model._keep_in_fp32_modules_strict or ())
    for module in orig_model.modules():
        # Assigned, a buffer stays as persistent as it was (pytorch/pytorch#125971).
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, buffer.to(device, torch.float32 if name in exact else None))
    if any(p.is_meta for p in orig_model.parameters()):
        fill_with_memory(orig_model, device)
    else:
        orig_model.to(device)  # type: ignore[arg-type]
    # Memory for a weight on the meta device is made by each module that has it, so tied ones are two by now.
    orig_model.tie_weights()


def fill_with_memory(module: torch.nn.Module, device: torch.device) -> None:
    """Allocate memory for weights, or shards of them, that are on the meta device; buffers stay as they are."""
    # to_empty would leave buffers without the values that were computed (pytorch/pytorch#148926).
    buffers = [(part, [*part.named_buffers(recurse=False, remove_duplicate=False)]) for part in module.modules()]
    module.to_empty(device=device)
    for part, named in buffers:
        for name, buffer in named:
            setattr(part, name, buffer)


def materialize_weights(orig_model: PreTrainedModel, source: ModelConfig | None, device: torch.device) -> None:
    """Move a model to the device; of an empty one read the weights of the recipe's model.path."""
    empty = any(p.is_meta for p in orig_model.parameters())
    make_room(orig_model, device)
    if empty:
        load_model_weights(orig_model, source)


def load_model_weights(orig_model: PreTrainedModel, model: ModelConfig | None) -> None:
    """Load the weights of the recipe's model.path into the live model; rows of tokens that were added are the mean."""
    assert model is not None, "an empty model has a source"
    with working(f"reading the weights of {model.path}"):
        path = resolve(model.path or "")
        check_loadable(path)
        options = load_options(path, model)
        if not Path(path).is_dir():
            path = snapshot_download(
                path,
                revision=str(options["revision"]),
                local_files_only=bool(options["local_files_only"]),
                allow_patterns=["*.json", "*.safetensors"],
            )
        load_weights(orig_model, Path(path), new_rows(orig_model))


def load_weights(orig_model: PreTrainedModel, folder: Path, new: NewRows | None = None) -> None:
    """Load the weights of a folder of safetensors into the live model, in its own precision; no collective.

    Where names in the model are not those in the files (fused experts, say), the whole model is loaded on the host by
    from_pretrained, which knows every layout that save_pretrained writes.

    Args:
        new: rows of the vocabulary that the files do not have; None: they have all but padding.

    Raises:
        ConfigError: no safetensors, a file that cannot be read, a weight that is missing or of another shape.
    """
    files = _files(folder)
    wanted = _wanted(orig_model)
    new = new or rows_of_files(orig_model)
    grown = {id(tensor): new for tensor in vocabulary_of(orig_model)} if new is not None else {}
    # One name that the files lack, and all weights go the slow way: what transformers converts may take
    # several of them.
    others = [name for name in wanted if name not in files]
    if others:
        _load_full(orig_model, wanted, others, folder, grown)
        return
    # By file, so that each is opened once.
    for path, names in itertools.groupby(sorted(wanted, key=files.__getitem__), files.__getitem__):
        with _named_errors(path), safe_open(path, "pt") as file:
            for name in names:
                _fill(wanted[name], file.get_slice(name), f"{path}: {name}", grown.get(id(wanted[name])))


def _files(folder: Path) -> dict[str, Path]:
    """Return weight name -> file."""
    if (folder / INDEX_FILE).is_file():
        with _named_errors(folder / INDEX_FILE):
            names = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        # The index came with the model: a name with a folder in it would read whatever file it points at.
        outside = [file for file in names.values() if Path(file).name != file]
        if outside:
            raise ConfigError(
                f"{folder / INDEX_FILE}: {outside[0]!r} leads out of the folder; take the model's own files"
            )
        return {name: folder / file for name, file in names.items()}
    if (folder / SINGLE_FILE).is_file():
        with _named_errors(folder / SINGLE_FILE), safe_open(folder / SINGLE_FILE, "pt") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE_FILE)
    raise ConfigError(
        f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE} in it; save the model with save_pretrained of transformers 5"
    )


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading this file into a ConfigError that names it."""
    try:
        yield
    except (SafetensorError, OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: cannot read weights: {type(error).__name__}: {error}. Copy or download the model again"
        ) from error


def _wanted(orig_model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return name -> tensor to fill, a shared one under its first name; without those of other
    ranks (on the meta device)."""
    # keep_vars: the parameters themselves, which are filled where they lie.
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in orig_model.state_dict(keep_vars=True).items():
        if not tensor.is_meta:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _fill(tensor: torch.Tensor, source: Any, where: str, new: NewRows | None) -> None:
    """Fill this rank's shard of a weight from a slice of its file, whose shape is checked."""
    shape = tuple(source.get_shape())
    there = tuple(tensor.shape) if new is None else (new.before, *tensor.shape[1:])
    if shape != there:
        raise ConfigError(
            f"{where} has shape {list(shape)} in the files and {list(there)} in the model: use the config.json of "
            f"these weights"
        )
    _copy(tensor, source, new)


@torch.no_grad()
def _copy(tensor: torch.Tensor, source: Any, new: NewRows | None) -> None:
    """Fill this rank's shard of a weight from all of it; of a vocabulary that has grown, the new rows too."""
    if new is not None:
        fill(tensor, source, new)
    else:
        local(tensor).copy_(local_part(source, tensor))


def _load_full(
    orig_model: PreTrainedModel,
    wanted: dict[str, torch.Tensor],
    others: list[str],
    folder: Path,
    grown: dict[int, NewRows],
) -> None:
    """Fill all of `wanted` from a whole model on the host; `others` are the names that no file has.

    Args:
        grown: id of a tensor with rows that the files do not have -> which.
    """
    # The class before FSDP put its own in front, which cannot load.
    plain: Any = plain_class(orig_model)
    with _named_errors(folder / "config.json"):
        found_type = json.loads((folder / "config.json").read_text()).get("model_type")
    try:
        whole, loading_info = plain.from_pretrained(
            folder,
            dtype=orig_model.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            key_mapping=None if found_type == orig_model.config.model_type else TEXT_NAMES,
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{folder}: transformers cannot build {first_of(others)} of {plain.__name__} from its files: "
            f"{' '.join(str(error).split())[:300]}. Copy or download the model again"
        ) from error
    # What transformers would leave at random is an error here.
    saved = whole.state_dict()
    missing = loading_info["missing_keys"] | (wanted.keys() - saved.keys())
    check_complete(folder, plain, missing, loading_info["mismatched_keys"])
    for name, tensor in wanted.items():
        _copy(tensor, saved[name], grown.get(id(tensor)))
