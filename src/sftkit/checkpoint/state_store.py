"""Optimizer states on disk through torch.distributed.checkpoint: by parameter name, in shards that any layout reads.

torch writes the index of the shards as a pickle. It is read here through an unpickler that knows the index's own
classes and nothing else, so that no code in a checkpoint ever runs.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from sftkit.errors import ConfigError
from sftkit.rundir.failure import describe_error
from sftkit.runtime.words import first_of

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
"All names in the pickle of an index besides torch's dtypes; the private ones are what torch's writer puts there."


class HostShard(NamedTuple):
    """A copy in host memory of the part of a tensor that this rank writes."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    "where the part begins in the whole tensor"
    size: torch.Size
    "shape of the whole tensor"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory, where later updates of `tensor` do not reach it.

    From a GPU it goes to pinned memory on the current stream, behind the update that made the values and at the speed
    of the bus; it is complete after `copies_done`. torch keeps the pinned memory for the next checkpoint.
    """
    source = tensor.detach()
    if not source.is_cuda:
        return source.clone(memory_format=torch.contiguous_format)
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


def copies_done(device: torch.device) -> None:
    """Wait for the copies that `to_host` has queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def snapshot_states(tensors: Mapping[str, torch.Tensor], rank: int, world_size: int) -> dict[str, HostShard]:
    """Copy what this rank writes: its own shards of DTensors, and its share of the tensors that all ranks hold alike.

    Nothing is copied twice over the ranks: of a replicated shard the first replica is the writer.

    Args:
        tensors: the same names in the same order on every rank.
    """
    mine = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            # A rank without a part of a short dimension writes nothing; a tensor that is empty as a whole has an entry.
            if _writes_shard(tensor) and (local.numel() or not tensor.numel()):
                # Where a local shard lies in the whole tensor: documented for writers of checkpoints
                # (pytorch/pytorch#144100).
                (chunk,) = tensor.__create_chunk_list__()
                mine[name] = HostShard(to_host(local), tuple(chunk.offsets), tensor.shape)
        # In turn, so that all ranks share the writing of what they hold alike.
        elif position % world_size == rank:
            mine[name] = HostShard(to_host(tensor), (0,) * tensor.dim(), tensor.shape)
    return mine


def _writes_shard(tensor: DTensor) -> bool:
    """Return whether this rank is the first of those that hold the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        at == 0 or not place.is_replicate() for place, at in zip(tensor.placements, coordinate, strict=True)
    )


class _HostShardPlanner(dcp.DefaultSavePlanner):
    """Plans the writing of each HostShard, which has left the device mesh of the tensor that it comes from."""

    def create_local_plan(self) -> SavePlan:
        """Plan to write each shard at its place; torch's own plan would ask the tensors for their device mesh."""
        self.plan = SavePlan([_write_item(name, shard) for name, shard in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].tensor


def _write_item(name: str, shard: HostShard) -> WriteItem:
    """Return torch's description of a shard: its name, its place in the whole tensor, dtype and shape."""
    offsets = torch.Size(shard.offsets)
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=shard.tensor.size())
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=shard.tensor.dtype), size=shard.size)
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def save_states(shards: dict[str, HostShard], folder: Path, group: dist.ProcessGroup | None, rank: int) -> list[Path]:
    """Write this rank's shards; every rank of `group` calls it (None: a process alone).

    Returns:
        the files that this rank wrote.
    """
    with warnings.catch_warnings():
        # A process alone: torch warns that it may not be meant, even with no_dist. No issue is known (torch
        # 2.11 to 2.13).
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(shards),
            storage_writer=dcp.FileSystemWriter(folder),
            planner=_HostShardPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    # torch's own names, which no function tells: files of a rank begin with __RANK_, and the coordinator, rank 0,
    # writes the index.
    return [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the index; refuse any other name, which could be code."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in INDEX_CLASSES:
            return super().find_class(module, name)
        raise ConfigError(
            f"names {module}.{name}, which is not part of an index of optimizer states: the checkpoint was tampered "
            f"with"
        )


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a folder of states, without its plain unpickling:
    https://github.com/pytorch/pytorch/issues/189308.

    Shards it reads with weights_only=True.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the index: only known classes, only files of this folder, no extensions."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        # A pickle that was made up may raise anything while it is read.
        except Exception as error:
            raise ConfigError(f"{path}: {describe_error(error)}; resume from another checkpoint") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ConfigError(f"{path}: not an index of optimizer states; resume from another checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.relative_path == "..":
                raise ConfigError(f"{path}: {info.relative_path!r} leads out of the folder")
            if info.transform_descriptors:
                raise ConfigError(
                    f"{path}: asks for the extensions {info.transform_descriptors}, which sftkit never uses"
                )
        # as torch's own read_metadata does
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def load_states(
    tensors: dict[str, torch.Tensor], folder: Path, elsewhere: Callable[[str], bool] = lambda _: False
) -> None:
    """Read states into `tensors`, in place; each rank reads the parts that it holds, by itself.

    Args:
        elsewhere: whether a state of that name is another rank's alone.

    Raises:
        ConfigError: names, shapes or dtypes are not those of the checkpoint, or a file in it is not what it should be.
    """
    reader = SafeReader(folder)
    try:
        saved = reader.read_metadata().state_dict_metadata
        _check_fit(tensors, {name: there for name, there in saved.items() if not elsewhere(name)}, folder)
    except ConfigError:
        raise
    except Exception as error:  # known classes, with fields of other types than theirs
        raise ConfigError(f"{folder}: {describe_error(error)}; resume from another checkpoint") from None
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # Each rank reads by itself: torch warns as above.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
        # A BaseException, which nobody above would take for an error, with a traceback over many lines.
        except dcp.CheckpointException as error:
            inner = next(iter(error.failures.values()))[0]
            raise ConfigError(f"{folder}: {type(inner).__name__}: {inner}; resume from another checkpoint") from None
        except Exception as error:
            raise ConfigError(f"{folder}: {describe_error(error)}; resume from another checkpoint") from None


def _check_fit(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any], folder: Path) -> None:
    """Refuse states that do not fit: torch would skip what is only in the checkpoint, and cast another dtype."""
    problems = [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in tensors]
    for name in tensors.keys() & saved.keys():
        there, here = saved[name], tensors[name]
        if not isinstance(there, TensorStorageMetadata):
            problems.append(f"{name} is no tensor in the checkpoint")
        elif there.size != here.shape or there.properties.dtype != here.dtype:
            problems.append(
                f"{name} is {there.properties.dtype} {list(there.size)} in the checkpoint, "
                f"{here.dtype} {list(here.shape)} in this run"
            )
    if problems:
        raise ConfigError(
            f"{folder}: optimizer states do not fit: {first_of(sorted(problems), between='; ')}. Resume with the "
            "model, optim.name and train.precision of the checkpoint, or start from its weights with model.path"
        )
