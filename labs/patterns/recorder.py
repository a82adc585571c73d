"""What a rank holds in memory and exchanges with others, seen from outside: every operation of torch passes
a dispatch mode.

One mode sees the collectives of DDP's reducer, of FSDP2, of DTensors (functional ones) and what a pipeline sends alike,
and every tensor that is made. Counted bytes are those of the whole tensor that the ranks of a group end with or begin
with; `sent` is what a ring makes of it on each rank.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # torch's notes name this path (pytorch/pytorch#110073)

from sftkit.memory.traffic import ring_share
from sftkit.ops.dtensor import local

_KINDS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "allreduce_": ("all_reduce", lambda args, out: args[0]),
    "allreduce_coalesced_": ("all_reduce", lambda args, out: args[0]),
    "all_reduce": ("all_reduce", lambda args, out: out),
    "_allgather_base_": ("all_gather", lambda args, out: args[0]),
    "allgather_": ("all_gather", lambda args, out: args[0]),
    "all_gather_into_tensor": ("all_gather", lambda args, out: out),
    "all_gather": ("all_gather", lambda args, out: out),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args, out: args[1]),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, out: args[0]),
    "reduce_scatter": ("reduce_scatter", lambda args, out: args[0]),
    "broadcast_": ("broadcast", lambda args, out: args[0]),
    "send": ("send", lambda args, out: args[0]),
}
"Operation -> what it is called here, and its whole tensor among arguments and result."
WITHOUT_BYTES = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
"The other end of a send, and what moves nothing."
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"Of the operators of collectives: in place (DDP, FSDP2, send), functional (DTensor), and these with a backward pass."
OURS = "sftkit"
"Of the operators of ops.gather_rows, inside which no mode looks."


class TrafficRecorder(TorchDispatchMode):
    """A mode that records, inside, what is exchanged and what is alive. Not for compiled code,
    which dispatches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        "(kind, ranks of the group) -> bytes of each call"
        self.alive = self.max_alive = 0
        "bytes of tensors that were made inside"
        self._sizes: dict[int, int] = {}
        self._there: dict[int, weakref.KeyedRef[int, torch.UntypedStorage]] = {}

    def begin_step(self) -> None:
        """Forget the calls and the peak so far."""
        self.calls.clear()
        self.max_alive = self.alive

    def exchanged(self) -> list[dict[str, Any]]:
        """Return the calls since `begin_step` by kind and group, as plain data."""
        found = []
        for (kind, ranks), sizes in sorted(self.calls.items()):
            sent = sum(sizes) * ring_share(kind, len(ranks))
            found.append({"kind": kind, "ranks": [*ranks], "calls": len(sizes), "bytes": sum(sizes), "sent": sent})
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The operator of a DTensor would be counted with the size of the whole tensor, of which this rank holds a part.
        if DTensor in types:
            return NotImplemented  # it comes again, as what DTensor makes of it
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in NAMESPACES or (func.namespace == OURS and name in _KINDS):
            self._count(name, args, out)
        for tensor in _tensors(out):
            # _cdata, the address of torch's own object, is private; of the Python objects nothing tells whether they
            # are one storage (pytorch/pytorch#65950), and data_ptr would change when a storage is resized.
            storage = tensor.untyped_storage()
            # An argument that has this memory is what comes out, or what comes out is a view of it.
            known = any(each.untyped_storage()._cdata == storage._cdata for each in _tensors(args))
            if storage._cdata not in self._sizes and not known:
                self.resized(storage, storage.nbytes())
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name in WITHOUT_BYTES:
            return
        kind, whole = _KINDS[name]  # a KeyError names a collective that nobody has counted yet
        size = sum(t.numel() * t.element_size() for t in _tensors(whole(args, out)))
        self.calls[kind, _ranks(args)].append(size)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Note a storage that is new, or has another size in bytes."""
        key = storage._cdata
        if key not in self._sizes:
            # A weak reference: counting must not keep alive what is counted.
            self._there[key] = weakref.KeyedRef(storage, self._freed, key)
        self.alive += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.max_alive = max(self.max_alive, self.alive)

    def _freed(self, there: weakref.KeyedRef[int, torch.UntypedStorage]) -> None:
        del self._there[there.key]
        self.alive -= self._sizes.pop(there.key)


@contextmanager
def recording() -> Iterator[TrafficRecorder]:
    """Yield a TrafficRecorder at work. FSDP2 frees and takes the memory of gathered weights by the size of their
    storage, which is no operation."""
    recorder, resize = TrafficRecorder(), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found = resize(storage, size)
        recorder.resized(storage, size)
        return found

    # Replaced on the class, as no dispatch mode sees it: it is no operator in eager (pytorch/pytorch#122434). Put back
    # at the end.
    with mock.patch.object(torch.UntypedStorage, "resize_", resize_), recorder:
        yield recorder


class Saved:
    """The bytes of what forward passes keep for their backward passes, weights left out."""

    def __init__(self) -> None:
        self._users: dict[int, int] = defaultdict(int)
        self.alive = self.max_alive = 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count, inside, what is saved until it is freed, and note the most of it anew."""
        self.max_alive = self.alive
        # What unpacks returns the tensor itself, so the backward pass computes the same.
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        # _base is private (pytorch/pytorch#32560): a view of a weight (a transposed one, say) names the weight there,
        # and takes no memory of its own.
        if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            return _Kept(tensor, lambda: None)
        self.alive += 0 if self._users[key] else size
        self._users[key] += 1
        self.max_alive = max(self.max_alive, self.alive)
        return _Kept(tensor, lambda: self._release(key, size))

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        self.alive -= 0 if self._users[key] else size


class _Kept:
    """A tensor that is saved, and what is done when nobody needs it any more."""

    def __init__(self, tensor: torch.Tensor, at_end: Callable[[], None]) -> None:
        self.tensor, self._at_end = tensor, at_end

    def __del__(self) -> None:
        self._at_end()


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for each in tree for tensor in _tensors(each)] if isinstance(tree, list | tuple) else []


def _ranks(args: Any) -> tuple[int, ...]:
    """Return the ranks of the group among the arguments of a collective: an object, or a name where it is
    a functional one."""
    for arg in reversed(args):
        # Private, but what functional collectives, whose groups are names (pytorch/pytorch#93173), resolve them with.
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min"):
            return tuple(
                dist.get_process_group_ranks(
                    dist.distributed_c10d._resolve_process_group(arg)  # type: ignore[arg-type]
                )
            )
        # A ScriptObject tells its class by _type alone (pytorch/pytorch#99542).
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    raise AssertionError("a collective without a group")
