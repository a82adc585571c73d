"""Write and read the optimizer states and weights of a checkpoint.

States use torch.distributed.checkpoint: named by parameter, in shards that any layout can read. torch writes the
index of the shards as a pickle. An unpickler that accepts only the index's own classes reads it, so that code in a
checkpoint never runs. Weights are transformers' safetensors files, written from a copy in host memory that is
gathered tensor by tensor.
"""

import copy
import json
import math
import pickle
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as dcp_index
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from sftkit.errors import ConfigError, config_error
from sftkit.models import load, structure, vocabulary
from sftkit.models.files import INDEX_FILE, SINGLE_FILE, UNCHANGED
from sftkit.models.towers import Whole, loading_faults, whole_of, write_unchanged, write_whole_config
from sftkit.models.trained import adapters_of, factors, members_in
from sftkit.rundir.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_dir
from sftkit.rundir.status import describe_error
from sftkit.runtime.script import first_of

INDEX_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "ChunkStorageMetadata",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip
"All names in the pickle of an index besides torch's dtypes; torch's writer puts the private ones there."


class HostShard(NamedTuple):
    """A copy in host memory of the part of a tensor that this rank writes."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    "start of the part in the whole tensor"
    size: torch.Size
    "shape of the whole tensor"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, so that later updates of `tensor` do not change the copy.

    A copy from a GPU goes to pinned memory on the current stream, after the update that made the values and at the
    speed of the bus; it is complete after `copies_done`. torch reuses the pinned memory for the next checkpoint.
    """
    source = tensor.detach()
    if not source.is_cuda:
        return source.clone(memory_format=torch.contiguous_format)
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


def copies_done(device: torch.device) -> None:
    """Wait for the copies that `to_host` queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def snapshot_states(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> dict[str, HostShard]:
    """Copy the tensors that this rank writes: its own shards of DTensors, and its share of the replicated tensors.

    No part is copied on two ranks: the first replica writes a replicated shard.

    Args:
        tensors: the same names in the same order on every rank.
    """
    mine = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            # A rank without a part of a short dimension writes nothing; a tensor that is empty everywhere has
            # an entry.
            if _writes_shard(tensor) and (local.numel() or not tensor.numel()):
                # The position of a local shard in the whole tensor: documented for checkpoint
                # writers (pytorch/pytorch#144100).
                (chunk,) = tensor.__create_chunk_list__()
                mine[name] = HostShard(to_host(local), tuple(chunk.offsets), tensor.shape)
        # Round-robin, so that all ranks share the writing of replicated tensors.
        elif position % world_size == rank:
            mine[name] = HostShard(to_host(tensor), (0,) * tensor.dim(), tensor.shape)
    return mine


def _writes_shard(tensor: DTensor) -> bool:
    """Return whether this rank is the first of the ranks that hold the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        at == 0 or not place.is_replicate() for place, at in zip(tensor.placements, coordinate, strict=True)
    )


class _HostShardPlanner(dcp.DefaultSavePlanner):
    """Plan the writing of each HostShard, a copy without the device mesh of its tensor."""

    def create_local_plan(self) -> SavePlan:
        """Plan to write each shard at its place; torch's own plan would need the tensors' device mesh."""
        self.plan = SavePlan([_write_item(name, shard) for name, shard in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: dcp_index.MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].tensor


def _write_item(name: str, shard: HostShard) -> WriteItem:
    """Return torch's description of a shard: name, place in the whole tensor, dtype and shape."""
    offsets = torch.Size(shard.offsets)
    chunk = dcp_index.ChunkStorageMetadata(offsets=offsets, sizes=shard.tensor.size())
    data = TensorWriteData(
        chunk=chunk, properties=dcp_index.TensorProperties(dtype=shard.tensor.dtype), size=shard.size
    )
    return WriteItem(index=dcp_index.MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def save_states(shards: dict[str, HostShard], folder: Path, group: dist.ProcessGroup | None, rank: int) -> list[Path]:
    """Write this rank's shards; every rank of `group` calls it (None: a single process).

    Returns:
        files that this rank wrote.
    """
    with warnings.catch_warnings():
        # Single process: torch warns that this may be unintended, even with no_dist. There is no upstream issue
        # (torch 2.11 to 2.13).
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(shards),
            storage_writer=dcp.FileSystemWriter(folder),
            planner=_HostShardPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    # torch's own names, which no API returns: files of a rank begin with __RANK_, and the coordinator, rank 0, writes
    # the index.
    return [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the index; reject any other name, which could be code."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in INDEX_CLASSES:
            return super().find_class(module, name)
        raise config_error("class outside of an index", module=module, name=name)


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a folder of states, without its unrestricted unpickling:
    https://github.com/pytorch/pytorch/issues/189308.

    It reads shards with weights_only=True.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_index.Metadata:
        """Read and check the index: only known classes, only files of this folder, no extensions."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        # A forged pickle may raise any exception while it is read.
        except Exception as error:
            raise ConfigError(f"{path}: {describe_error(error)}; resume from another checkpoint") from None
        if not isinstance(metadata, dcp_index.Metadata) or not isinstance(metadata.storage_data, dict):
            raise ConfigError(f"{path}: not an index of optimizer states; resume from another checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.relative_path == "..":
                raise ConfigError(f"{path}: {info.relative_path!r} leads out of the folder")
            if info.transform_descriptors:
                raise config_error("extensions of states", path=path, extensions=info.transform_descriptors)
        # as torch's own read_metadata does
        metadata.storage_meta = dcp_index.StorageMeta(load_id=self.load_id)
        return metadata


def load_states(
    tensors: dict[str, torch.Tensor], folder: Path, elsewhere: Callable[[str], bool] = lambda _: False
) -> None:
    """Read states into `tensors` in place; each rank reads its own parts.

    Args:
        elsewhere: predicate, whether only another rank holds the state of that name.

    Raises:
        ConfigError: names, shapes or dtypes differ from the checkpoint's, or one of its files is malformed.
    """
    reader = SafeReader(folder)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        saved = reader.read_metadata().state_dict_metadata
        _check_fit(tensors, {name: there for name, there in saved.items() if not elsewhere(name)}, folder)
        with warnings.catch_warnings():
            # Each rank reads by itself, so torch warns as above.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except ConfigError:
        raise
    # A BaseException: callers would not handle it as an error, and its traceback has many lines.
    except dcp.CheckpointException as error:
        inner = next(iter(error.failures.values()))[0]
        raise ConfigError(f"{folder}: {type(inner).__name__}: {inner}; resume from another checkpoint") from None
    except Exception as error:  # known classes in the index, but with fields of the wrong type; a malformed file
        raise ConfigError(f"{folder}: {describe_error(error)}; resume from another checkpoint") from None


def load_common_states(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read those states that the checkpoint has, after a change of what is trained; the others stay as they are."""
    saved = SafeReader(folder).read_metadata().state_dict_metadata
    load_states({name: t for name, t in tensors.items() if name in saved}, folder, lambda name: name not in tensors)


def _check_fit(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any], folder: Path) -> None:
    """Reject states that do not fit: torch would skip states that only the checkpoint has, and would convert
    another dtype.
    """
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in tensors]
    for name in tensors.keys() & saved.keys():
        there, here = saved[name], tensors[name]
        if not isinstance(there, dcp_index.TensorStorageMetadata):
            problems.append(f"{name} is not a tensor in the checkpoint")
        elif there.size != here.shape or there.properties.dtype != here.dtype:
            was = f"{there.properties.dtype} {list(there.size)}"
            problems.append(f"{name} is {was} in the checkpoint, {here.dtype} {list(here.shape)} in this run")
    if problems:
        raise config_error("states that do not fit", folder=folder, problems=first_of(sorted(problems), between="; "))


MAX_FILE_BYTES = 5 * 10**9


@dataclass
class WeightSnapshot:
    """The tensors that this rank writes, copied from the live model."""

    full: dict[str, torch.Tensor] | None
    "every tensor, for save_pretrained; only on the main rank"
    files: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    "file name -> its tensors, for a sharded model"
    index: dict[str, object] | None = None
    "model.safetensors.index.json, if this rank writes it"

    def num_bytes(self) -> int:
        """Return the bytes of the tensors that this rank writes."""
        return sum(t.nbytes for tensors in (self.full or {}, *self.files.values()) for t in tensors.values())


def snapshot_weights(orig_model: PreTrainedModel, rank: int, world_size: int) -> WeightSnapshot:
    """Copy the weights that this rank will write; every rank calls it, and shards are gathered in the same
    order on all.

    The main rank copies a model that is not sharded. For a sharded model each rank keeps the files assigned to it, so
    that no rank holds the whole model. The exception is a class that stores its tensors in another form than it
    trains them (experts of a mixture in one tensor): only a whole model can be converted, so the main rank keeps all
    of it. Padding of the vocabulary is left out. Pipeline stages each write their own files.
    """
    tensors, saved_rows = saved_tensors(orig_model), vocabulary.without_padding(orig_model)
    stages = structure.stages_of(orig_model)
    if members_in(orig_model):
        from sftkit.models.many_adapters import member_files

        files = {
            str(own / ADAPTER_WEIGHTS): _gathered(dict(held), {}, keep=True) or {}
            for own, held in member_files(orig_model).items()
        }
        return WeightSnapshot(None, files)
    if adapters_of(orig_model) is not None:
        gathered = _gathered(tensors, saved_rows, keep=rank == 0)
        return WeightSnapshot(None, {} if gathered is None else {ADAPTER_WEIGHTS: gathered})
    is_sharded = stages is not None or any(isinstance(tensor, DTensor) for tensor in tensors.values())
    # Private: set by from_pretrained, the conversions of the checkpoint's tensors, which save_pretrained reverses
    # (huggingface/transformers#42396). Undocumented, without an alternative: for a model that is not from a checkpoint,
    # the conversions of transformers for its class.
    conversions = getattr(orig_model, "_weight_conversions", None)
    if is_sharded and conversions is None:
        conversions = get_model_conversion_mapping(orig_model, add_legacy=False)
    if not is_sharded or conversions:
        return WeightSnapshot(_gathered(tensors, saved_rows, keep=rank == 0) if is_sharded or rank == 0 else None)
    # All ranks plan before gathering: each then gathers a tensor once and keeps it only if the file is its own.
    writers = {name: stages.writer(name) for name in tensors} if stages else {}
    if (whole := whole_of(orig_model)) is not None:
        tensors = {whole.stored(name): tensor for name, tensor in tensors.items()}
        writers = {whole.stored(name): writer for name, writer in writers.items()}
    sizes = {
        name: t[0].numel() * saved_rows[id(t)] if id(t) in saved_rows else t.numel() for name, t in tensors.items()
    }
    num_bytes = {name: numel * tensors[name].element_size() for name, numel in sizes.items()}
    plan = plan_files(num_bytes, MAX_FILE_BYTES, writers, alone=whole is None)
    files = {}
    for position, (file, names) in enumerate(plan.items()):
        writer = writers.get(names[0], position % world_size)
        held = {name: tensors[name] for name in names if not tensors[name].is_meta}
        if (kept := _gathered(held, saved_rows, keep=writer == rank)) is not None:
            files[file] = kept
    index = weights_index(plan, sum(sizes.values()), sum(num_bytes.values()), whole)
    return WeightSnapshot(None, files, index if rank == 0 and plan.keys() != {SINGLE_FILE} else None)


def weights_index(
    plan: Mapping[str, list[str]], parameters: int, num_bytes: int, whole: Whole | None
) -> dict[str, object]:
    """Return model.safetensors.index.json for the files of a plan and the whole model's other tensors."""
    weight_map = {name: file for file, names in plan.items() for name in names}
    if whole is not None:
        weight_map |= dict.fromkeys(whole.unchanged, UNCHANGED)
        parameters += sum(math.prod(one["shape"]) for _, one in whole.unchanged.values())
        num_bytes += whole.unchanged_bytes
    return {"metadata": {"total_parameters": parameters, "total_size": num_bytes}, "weight_map": weight_map}


def in_files(
    orig_model: PreTrainedModel, whole: Whole, tensors: dict[str, torch.Tensor], max_bytes: int
) -> WeightSnapshot:
    """Return the files of a text model in a larger one. `tensors`: of the whole text model, by its own names."""
    # Converts the experts of a mixture to the form of files, as save_pretrained does.
    found = {whole.stored(name): tensor for name, tensor in revert_weight_conversion(orig_model, tensors).items()}
    num_bytes = {name: tensor.nbytes for name, tensor in found.items()}
    plan = plan_files(num_bytes, max_bytes, alone=False)
    files = {file: {name: found[name].detach().contiguous() for name in names} for file, names in plan.items()}
    parameters = sum(tensor.numel() for tensor in found.values())
    return WeightSnapshot(None, files, weights_index(plan, parameters, sum(num_bytes.values()), whole))


def _gathered(
    tensors: dict[str, torch.Tensor], saved_rows: dict[int, int], *, keep: bool
) -> dict[str, torch.Tensor] | None:
    """Copy tensors to host memory, gathered from their shards; None without `keep`. All ranks gather, and the keeping
    ranks copy.

    Args:
        saved_rows: id of a tensor -> number of its saved rows, if fewer than all.
    """
    kept = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            kept[name] = to_host(full[: saved_rows.get(id(tensor))])
    return kept if keep else None


def saved_tensors(orig_model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the live tensors that a checkpoint holds, each once: tied tensors under the name that transformers loads.
    A model with adapters saves only its factors, under the names of peft.
    """
    if adapters_of(orig_model) is not None:
        from sftkit.models.adapters import peft_name

        return {peft_name(orig_model, name): parameter for name, parameter in factors(orig_model).items()}
    tied_away = set(getattr(orig_model, "all_tied_weights_keys", None) or {})
    # Private since huggingface/transformers#8737: the tensors that save_pretrained leaves out; shards are written
    # without save_pretrained.
    ignored = set(orig_model._keys_to_ignore_on_save or ())
    names: dict[int, str] = {}
    state = orig_model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in names or names[id(tensor)] in tied_away:
            names[id(tensor)] = name
    kept = set(names.values()) - ignored
    return {name: tensor for name, tensor in state.items() if name in kept}


def check_saved_names(orig_model: PreTrainedModel) -> None:
    """Reject a model whose checkpoints plain transformers would load as a different one: with only a warning, it
    drops tensors that the class in config.json lacks and initialises missing ones at random.

    No collective; the class is built without memory.

    Raises:
        ConfigError: tensors are missing, unexpected or of another shape.
    """
    if adapters_of(orig_model) is not None:  # its checkpoints hold nothing of the model
        return
    plain, config = structure.plain_class(orig_model), copy.deepcopy(orig_model.config)
    name = plain.__name__
    with torch.device("meta"), no_init_weights():
        fresh: Any = plain(config) if orig_model.is_remote_code() else load.from_config(config, orig_model.dtype)
    fresh.tie_weights()
    if type(fresh).__name__ != name:
        raise config_error("class of another config", name=name, made=type(fresh).__name__)
    rows = vocabulary.without_padding(orig_model)
    saved = {
        key: (rows.get(id(tensor), tensor.shape[0]), *tensor.shape[1:]) if tensor.ndim else ()
        for key, tensor in saved_tensors(orig_model).items()
    }
    expected = {key: tuple(tensor.shape) for key, tensor in saved_tensors(fresh).items()}
    if (whole := whole_of(orig_model)) is not None and saved == expected:
        held = {key: torch.zeros(shape, device="meta") for key, shape in saved.items()}
        files = in_files(fresh, whole, held, MAX_FILE_BYTES).files
        faults = loading_faults(orig_model, whole, {name: t for one in files.values() for name, t in one.items()})
        if found := [f"{verb} {first_of(names)}" for verb, names in faults.items()]:
            raise config_error("whole model of other tensors", whole=whole, faults="; ".join(found))
    problems = {
        "hold what it does not have,": sorted(saved.keys() - expected.keys()),
        "lack": sorted(expected.keys() - saved.keys()),
        "have another shape of": sorted(key for key in saved.keys() & expected.keys() if saved[key] != expected[key]),
    }
    if found := [f"{verb} {first_of(names)}" for verb, names in problems.items() if names]:
        raise config_error("class of other weights", name=name, found="; ".join(found))


def plan_files(
    num_bytes: dict[str, int], max_bytes: int, writers: Mapping[str, int] | None = None, *, alone: bool = True
) -> dict[str, list[str]]:
    """Map each file name to the names of its tensors, in order. A file exceeds `max_bytes` only if a single
    tensor does.

    Args:
        writers: rank that writes each tensor, the same for all tensors of a file; empty or None: any rank.
        alone: whether the checkpoint has no other files of weights.
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
    if len(groups) == 1 and alone:
        return {SINGLE_FILE: groups[0]}
    # The names of transformers, under which from_pretrained and servers find the files.
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_config(orig_model: PreTrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and the code of remote models: save_pretrained without weights writes
    only these. It also deletes numbered weight files that it finds (huggingface/transformers#16947), so this call
    precedes the first such file of any rank.

    A model with adapters gets adapter_config.json and no config.json: with one, transformers would look for the whole
    model in this folder. Its generation_config.json has the ends of turns, which the base's may lack.
    """
    if (adapters := adapters_of(orig_model)) is not None:
        from sftkit.models.adapters import peft_config_text

        for one in adapters.members or (adapters,):
            own = adapter_dir(folder, one.name) if adapters.members else folder
            own.mkdir(parents=True, exist_ok=True)
            (own / ADAPTER_CONFIG).write_text(peft_config_text(orig_model, one))
            if orig_model.generation_config is not None:
                orig_model.generation_config.save_pretrained(own)
    elif (whole := whole_of(orig_model)) is not None:
        write_whole_config(orig_model, whole, folder)
    else:
        orig_model.save_pretrained(folder, state_dict={})


def write_weights(
    snapshot: WeightSnapshot, orig_model: PreTrainedModel, folder: Path, earlier: Path | None = None
) -> None:
    """Write this rank's files; the main rank also writes the index, and the configuration of a whole model.

    Args:
        earlier: checkpoint that this run published, with the same tensors outside the text model.
    """
    whole = whole_of(orig_model)
    if snapshot.full is not None and whole is not None:
        write_config(orig_model, folder)
        snapshot = in_files(orig_model, whole, snapshot.full, MAX_FILE_BYTES)
    written = [folder / name for name in snapshot.files]
    if snapshot.full is not None:
        orig_model.save_pretrained(folder, state_dict=snapshot.full, max_shard_size=MAX_FILE_BYTES)
        written = [*folder.glob("*.safetensors")]
    for name, tensors in snapshot.files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if snapshot.index is not None and whole is not None:
        write_unchanged(whole, folder, earlier)
    # safetensors makes files that only their owner may read (safetensors #782): give them the mode of the
    # other files.
    for path in written:
        plain = path.with_name(ADAPTER_CONFIG if path.name == ADAPTER_WEIGHTS else "config.json")
        path.chmod(stat.S_IMODE(plain.stat().st_mode))
    if snapshot.index is not None:
        (folder / INDEX_FILE).write_text(json.dumps(snapshot.index, indent=2))
