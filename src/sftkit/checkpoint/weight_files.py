"""Weights of a checkpoint as transformers' safetensors files, from a copy in host memory, gathered tensor by tensor."""

from __future__ import annotations

import copy
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights

from sftkit.checkpoint.state_store import to_host
from sftkit.errors import ConfigError
from sftkit.models.files import INDEX_FILE, SINGLE_FILE
from sftkit.models.load import from_config
from sftkit.models.padding import without_padding
from sftkit.models.stages import stages_of
from sftkit.models.structure import plain_class
from sftkit.runtime.words import first_of

MAX_FILE_BYTES = 5 * 10**9


@dataclass
class WeightSnapshot:
    """What this rank writes, copied from the live model."""

    full: dict[str, torch.Tensor] | None
    "every tensor, for save_pretrained; only on the main rank"
    files: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    "file name -> its tensors, of a sharded model"
    index: dict[str, object] | None = None
    "model.safetensors.index.json, if this rank writes it"

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that this rank writes."""
        return sum(t.nbytes for tensors in (self.full or {}, *self.files.values()) for t in tensors.values())


def snapshot_weights(orig_model: PreTrainedModel, rank: int, world_size: int) -> WeightSnapshot:
    """Copy what this rank will write; every rank calls it, and shards are gathered in the same order on all.

    A model that is not sharded is copied by the main rank. Of a sharded one each rank keeps the files that fall to it,
    so none ever holds the whole model; unless the class stores its tensors in another form than it trains them (experts
    of a mixture in one tensor): only the whole model can be converted, so the main rank keeps all of it. Padding of the
    vocabulary is left out. Stages of a pipeline each write files of their own.
    """
    tensors, saved_rows = saved_tensors(orig_model), without_padding(orig_model)
    stages = stages_of(orig_model)
    is_sharded = stages is not None or any(isinstance(tensor, DTensor) for tensor in tensors.values())
    if not is_sharded or stored_in_another_form(orig_model):
        return WeightSnapshot(_gathered(tensors, saved_rows, keep=rank == 0) if is_sharded or rank == 0 else None)
    # Planned by all before anything is gathered: each then gathers a tensor once and keeps it only if the file
    # is its own.
    sizes = {
        name: t[0].numel() * saved_rows[id(t)] if id(t) in saved_rows else t.numel() for name, t in tensors.items()
    }
    num_bytes = {name: numel * tensors[name].element_size() for name, numel in sizes.items()}
    writers = {name: stages.writer(name) for name in tensors} if stages else {}
    plan = plan_files(num_bytes, MAX_FILE_BYTES, writers)
    files = {}
    for position, (file, names) in enumerate(plan.items()):
        writer = writers.get(names[0], position % world_size)
        held = {name: tensors[name] for name in names if not tensors[name].is_meta}
        if (kept := _gathered(held, saved_rows, keep=writer == rank)) is not None:
            files[file] = kept
    totals = {"total_parameters": sum(sizes.values()), "total_size": sum(num_bytes.values())}
    index = {"metadata": totals, "weight_map": {name: file for file, names in plan.items() for name in names}}
    return WeightSnapshot(None, files, index if rank == 0 and len(plan) > 1 else None)


def _gathered(
    tensors: dict[str, torch.Tensor], saved_rows: dict[int, int], *, keep: bool
) -> dict[str, torch.Tensor] | None:
    """Copy tensors to host memory, gathered from their shards; None without `keep`. All ranks
    gather, those that keep copy.

    Args:
        saved_rows: id of a tensor -> how many of its rows are saved, where that is not all.
    """
    kept = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            kept[name] = to_host(full[: saved_rows.get(id(tensor))])
    return kept if keep else None


def saved_tensors(orig_model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the live tensors that a checkpoint holds, each once: tied ones under the name that transformers loads."""
    tied_away = set(getattr(orig_model, "all_tied_weights_keys", None) or {})
    # Private since huggingface/transformers#8737: what save_pretrained leaves out; shards are written without
    # save_pretrained.
    ignored = set(orig_model._keys_to_ignore_on_save or ())
    names: dict[int, str] = {}
    state = orig_model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in names or names[id(tensor)] in tied_away:
            names[id(tensor)] = name
    kept = set(names.values()) - ignored
    return {name: tensor for name, tensor in state.items() if name in kept}


def check_saved_names(orig_model: PreTrainedModel) -> None:
    """Reject a model whose checkpoints plain transformers would load as another one: it drops tensors that the class in
    config.json does not have, and draws those at random that are not there, with a warning only.

    No collective; the class is built without memory.

    Raises:
        ConfigError: tensors that are missing, unexpected or of another shape.
    """
    plain, config = plain_class(orig_model), copy.deepcopy(orig_model.config)
    name = plain.__name__
    with torch.device("meta"), no_init_weights():
        fresh: Any = plain(config) if orig_model.is_remote_code() else from_config(config, orig_model.dtype)
    fresh.tie_weights()
    if type(fresh).__name__ != name:
        raise ConfigError(
            f"checkpoints could not be loaded: config.json names {name}, and transformers makes a "
            f"{type(fresh).__name__} of it. Train a model of a class of transformers"
        )
    rows = without_padding(orig_model)
    saved = {
        key: (rows.get(id(tensor), tensor.shape[0]), *tensor.shape[1:]) if tensor.ndim else ()
        for key, tensor in saved_tensors(orig_model).items()
    }
    expected = {key: tuple(tensor.shape) for key, tensor in saved_tensors(fresh).items()}
    problems = {
        "hold what it does not have,": sorted(saved.keys() - expected.keys()),
        "lack": sorted(expected.keys() - saved.keys()),
        "have another shape of": sorted(key for key in saved.keys() & expected.keys() if saved[key] != expected[key]),
    }
    if found := [f"{verb} {first_of(names)}" for verb, names in problems.items() if names]:
        raise ConfigError(
            f"checkpoints could not be loaded as {name}, the class in their config.json: they {'; '.join(found)}. "
            "Something has added, removed or replaced modules of the model: take them out, or merge them into its "
            "weights"
        )


def stored_in_another_form(orig_model: PreTrainedModel) -> bool:
    """Return whether save_pretrained renames or reshapes tensors of this class on their way to the file."""
    # Private: set by from_pretrained, how it changed tensors of the checkpoint, which save_pretrained reverses
    # (huggingface/transformers#42396).
    conversions = getattr(orig_model, "_weight_conversions", None)
    # Undocumented, but without another way: of a model that is not from a checkpoint, what transformers would do
    # for its class.
    if conversions is None:
        conversions = get_model_conversion_mapping(orig_model, add_legacy=False)
    return bool(conversions)


def plan_files(
    num_bytes: dict[str, int], max_bytes: int, writers: Mapping[str, int] | None = None
) -> dict[str, list[str]]:
    """Return file name -> names of its tensors, in order. A file is larger than `max_bytes` only if a single tensor is.

    Args:
        writers: of each tensor the rank that writes it, one for all of a file; empty or None: any rank.
    """
    groups: list[list[str]] = [[]]
    size, writers = 0, writers or {}
    for name, count in num_bytes.items():
        last = groups[-1]
        if last and (size + count > max_bytes or writers.get(name) != writers.get(last[0])):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += count
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    # The names of transformers, by which from_pretrained and servers find them.
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_config(orig_model: PreTrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and the code of remote models: save_pretrained writes these alone when
    it gets no weights. It also deletes numbered weight files that it finds (huggingface/transformers#16947), so this
    comes before any rank writes one."""
    orig_model.save_pretrained(folder, state_dict={})


def write_weights(snapshot: WeightSnapshot, orig_model: PreTrainedModel, folder: Path) -> None:
    """Write this rank's files; the main rank also the index, and with a whole model its configuration."""
    written = [folder / name for name in snapshot.files]
    if snapshot.full is not None:
        orig_model.save_pretrained(folder, state_dict=snapshot.full, max_shard_size=MAX_FILE_BYTES)
        written = [*folder.glob("*.safetensors")]
    for name, tensors in snapshot.files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    # safetensors makes files that only their owner may read (safetensors #782): they get the mode that others have.
    for path in written:
        path.chmod(stat.S_IMODE((folder / "config.json").stat().st_mode))
    if snapshot.index is not None:
        (folder / INDEX_FILE).write_text(json.dumps(snapshot.index, indent=2))
