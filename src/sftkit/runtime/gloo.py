"""Gloo groups that do not crash with two collectives in flight."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


@cache
def use_one_worker_per_group() -> None:
    """Give each gloo group that this process makes from now on one worker thread; torch gives it two.

    Both note the name of what they run in one std::string of the group without a lock (ProcessGroupGloo::runLoop,
    torch 2.11 to 2.13). A name of over 15 letters is on the heap, such as that of coalesced all-gathers, which every
    functional all-gather is: two of them in flight free it twice, and the process dies with "malloc(): unaligned
    tcache chunk detected" some seconds later. No option of init_process_group reaches the number of threads. No
    issue is known.

    The replaced `__init__` is never put back: groups are made at any time of the process.
    """
    group: Any = getattr(dist, "ProcessGroupGloo", None)
    if group is None:  # a build without gloo
        return
    plain = group.__init__

    def with_one_worker(
        self: object, store: dist.Store, rank: int, size: int, timeout: Any = timedelta(minutes=30), **fields: Any
    ) -> None:
        # Private: the options of a gloo group have no public names, and init_process_group takes none
        # (pytorch/pytorch#88330). What torch would fill in is filled in the same way, but for the number of threads.
        if isinstance(fields.get("options", timeout), group._Options):  # the caller chose its options
            plain(self, store, rank, size, *([] if "options" in fields else [timeout]), **fields)
            return
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        devices = [group.create_device(interface=name) for name in interfaces if name]
        options = group._Options()
        options._devices = devices or [group.create_default_device()]
        options._timeout, options._threads = timeout, 1
        for name, value in fields.items():  # torch 2.15: enable_reconfigure
            setattr(options, name, value)
        plain(self, store, rank, size, options)

    group.__init__ = with_one_worker
