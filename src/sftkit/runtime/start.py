"""Accelerator -> Runtime: ranks, device, precision, the few collectives that training needs, and stop signals.

Before the process group is joined, three faults of torch are worked around: the width of vectors in Inductor's cache,
two collectives in flight on gloo, and Triton's assembler in compile workers.
"""

import gc
import logging
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch._inductor.config
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin, TorchDynamoPlugin, broadcast_object_list
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
from transformers.utils import logging as transformers_logging

from sftkit.config import schema, terminal
from sftkit.config.topology import Topology, take_topology
from sftkit.errors import ConfigError, RunError, Stopped
from sftkit.rundir.attempt import is_attempt, leaves_nothing, withdraw
from sftkit.rundir.lock import RunLock
from sftkit.rundir.status import RunStatus, report
from sftkit.runtime.hardware import device_name, gpu_unavailable_reason
from sftkit.runtime.launcher import check_group, check_variables
from sftkit.runtime.signals import SIGNALS, Stopping, end_process

BITS = {"AVX512": 512, "AVX2": 256}


def name_vector_width() -> None:
    """Set the width of the CPU's vectors for Inductor, which detects it otherwise.

    Inductor writes loops over as many elements as a vector holds, and keeps the text in TORCHINDUCTOR_CACHE_DIR under a
    key without that number (torch 2.11 and 2.13). A CPU of another width that shares the folder compiles this text for
    its own vectors: of 12 elements written for AVX-512, code for AVX2 silently leaves the last 4 as they were.
    A width that is named is in the key. No upstream issue is known.
    """
    # Set for the whole process and never restored: kernels are written at any time.
    cpp = torch._inductor.config.cpp
    if cpp.simdlen is None:
        cpp.simdlen = BITS.get(torch.backends.cpu.get_cpu_capability())


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
        options._timeout = timeout
        options._threads = 1
        for name, value in fields.items():  # torch 2.15: enable_reconfigure
            setattr(options, name, value)
        plain(self, store, rank, size, options)

    group.__init__ = with_one_worker


def use_ptxas_of_workers() -> None:
    """Assemble this process's Triton kernels with the ptxas that torch's compile workers take. Call it before the first
    kernel: Triton asks for the version once.

    That version is in the key of Triton's cache. Workers of torch 2.11 take torch/bin/ptxas (CUDA 13.0 in a wheel for
    CUDA 13), the process takes Triton's own (12.8), so that max-autotune found none of the kernels that workers had
    compiled for it, and compiled them again one by one: 5 to 20 s for a matrix product on an H200, which are 0.6 s now.
    In torch 2.13 both take Triton's, and this does nothing: pytorch/pytorch#163988, by which only this function
    finds it, put the program into wheels, and #174716 took it out again.
    """
    # Private: what the workers call, and without a public name. It sets TRITON_PTXAS_PATH, for this process and all
    # that it starts.
    _set_triton_ptxas_path()


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of an object or module another value within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def replaced_in_each(name: str, values: Mapping[Any, object]) -> Iterator[None]:
    """Give an attribute of each object another value within the context; afterwards one that its class had alone is
    its class's again.

    Args:
        values: object -> value.
    """
    # vars, not getattr: a value of the class must not become the object's own.
    before = {owner: vars(owner)[name] for owner in values if name in vars(owner)}
    try:
        for owner, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for owner in values:
            if owner in before:
                setattr(owner, name, before[owner])
            else:
                delattr(owner, name)


T = TypeVar("T")
GROUP_TIMEOUT = timedelta(minutes=60)
"How long a collective may wait for a rank: a skewed cold compile outlasts NCCL's 10 minutes."
WAIT_SECONDS = 0.2
"Between two polls of a rank that waits outside of a collective."
PATIENCE_SECONDS = 10.0
"How long a process that is to end waits for its main thread, which may rename on a disk that hangs."


@dataclass
class Runtime:
    """The place of this process in the run.

    As a context it puts back, at its end, what the run has changed in the process. An error inside is written down and
    printed, and ends the process.
    """

    accelerator: Accelerator
    precision: str
    "bf16 | fp32"
    topology: Topology = field(default_factory=Topology)
    stopping: Stopping = field(default_factory=Stopping)
    "this rank's request to end early"
    status: RunStatus | None = None
    "where this rank is in the run; None before its directory is opened"
    page: Callable[[Path], None] | None = None
    "what writes the page of the run directory when the run has failed"
    lock: RunLock | None = None
    "of the run directory; on the main rank"
    resumes: bool = False
    "whether this start continues the run of its directory"
    leaving: threading.RLock = field(default_factory=threading.RLock)
    "held by the thread that withdraws this start, or makes it the run of its directory"
    at_end: ExitStack = field(default_factory=ExitStack)
    "restores what the run has changed; each change registers its own"
    _turns: int = 0
    "how often main_first was entered"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            # Reported before signals are given back: the launcher sends one when another rank has failed.
            stays = self.status is not None and not leaves_nothing(self.status) and not self.status.is_withdrawn()
            page = self.page if stays else None
            code = report(error, self.status, page) if isinstance(error, Exception) else None
            if code is not None and self.world_size > 1:
                self.withdraw()
                end_process(code)  # closing the process group would wait for ranks that wait for this one
            self.at_end.close()  # which may write
            self.withdraw()
            if error is None and self.status is not None and self.status.stopped_by and "RANK" not in os.environ:
                code = 128 + self.status.stopped_by  # torch's launcher would take it for a failure of a rank
        finally:
            self.close()
        if code is not None:
            raise SystemExit(code)

    def close(self) -> None:
        """Put back what the run has changed in this process."""
        try:
            self.at_end.close()
        finally:
            self.stopping.close()
            if self.lock is not None:
                self.lock.release()

    def withdraw(self) -> None:
        """Leave the directory as it was, if this start has done no step; see attempt.withdraw."""
        if self.lock is not None and self.status is not None and self.leaving.acquire(timeout=PATIENCE_SECONDS):
            try:
                withdraw(self.status, self.lock)
            except OSError:  # the disk is gone or full: the next start sweeps
                pass
            finally:
                self.leaving.release()

    def owns(self, run_dir: Path) -> bool:
        """Return whether the run directory is still this run's. If not, request a stop: `check_run_dir` then ends all
        ranks. It looks on the main rank alone, and costs microseconds."""
        if self.lock is None or self.lock.lost(run_dir) is None:
            return True
        self.stopping.lost = True
        return False

    def check_run_dir(self, run_dir: Path) -> None:
        """Check that the run directory is still this run's, before a save and at the end; every rank must call it.

        Raises:
            RunDirError: on every rank, with where the directory went.
        """
        self.from_main(lambda: self.lock.check(run_dir) if self.lock is not None else None)

    def output_dir(self, run_dir: Path) -> Path:
        """Return where to write now what belongs into the run directory."""
        return self.status.run_dir if self.status is not None and is_attempt(self.status) else run_dir

    def open_status(self, run_dir: Path) -> RunStatus:
        """Return the status of the run in this directory, the same object until another directory is opened."""
        if self.status is None or self.status.run_dir != run_dir:
            self.status = RunStatus(run_dir, self.rank, self.world_size)
        return self.status

    @property
    def rank(self) -> int:
        """Return this process's number among all of the run, from 0."""
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return self.accelerator.num_processes

    @property
    def data_world_size(self) -> int:
        """Return the number of groups of ranks that hold different rows; fewer than ranks in a pipeline and under
        tensor and context parallelism."""
        return self.world_size // (self.topology.stages * self.topology.ranks_per_row)

    @property
    def data_rank(self) -> int:
        """Return which of the `data_world_size` groups this rank belongs to, from 0."""
        # Ranks are numbered by stage, within it by rows, and those that share a row are neighbours.
        return self.rank // self.topology.ranks_per_row % self.data_world_size

    @property
    def has_loss(self) -> bool:
        """Return whether the loss of this rank's rows is computed here: not in a stage before the last."""
        return self.rank >= self.world_size - self.world_size // self.topology.stages

    @property
    def device(self) -> torch.device:
        """Return the device that this rank computes on."""
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the only one that prints and writes what the run has once."""
        return self.accelerator.is_main_process

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over ranks of a tensor of any shape on this rank's device; every rank
        must call it."""
        if self.world_size == 1:
            return values
        total = values.clone()
        torch.distributed.all_reduce(total)
        return total

    def any_rank(self, flag: bool) -> bool:  # noqa: FBT001 - the flag is all there is to it
        """Return whether the flag is set on any rank; every rank must call it."""
        if self.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item() > 0)

    def from_main(self, decide: Callable[[], T]) -> T:
        """Return on every rank what the main rank decides; `decide` is called there alone, and an error that it raises
        is raised on every rank: otherwise they would wait forever. Every rank must call it."""
        if self.world_size == 1:
            return decide()
        box: list[T | Exception | None] = [None]
        if self.is_main:
            try:
                box = [decide()]
            except Exception as error:
                box = [error]
        broadcast_object_list(box)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]  # type: ignore[return-value]

    def united(self, names: Sequence[str]) -> list[str]:
        """Return the names of all ranks, each once, in the same order on every rank; every rank must call it."""
        if self.topology.stages == 1:  # ranks have the same ones
            return list(names)
        return list(dict.fromkeys(name for of_rank in self.gathered(list(names)) for name in of_rank))

    def gathered(self, own: T) -> list[T]:
        """Return the values of all ranks, in rank order; every rank must call it."""
        found = [own] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(found, own)
        return found

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.accelerator.wait_for_everyone()

    @property
    def leads(self) -> bool:
        """Return whether this process does what is done once on each machine."""
        return int(os.environ.get("LOCAL_RANK", self.rank)) == 0

    @contextmanager
    def main_first(self, *, at_once: bool = False) -> Iterator[Callable[[], bool]]:
        """Let the main process enter alone and fill the cache, then one process of every other machine, whose disk may
        be another, then all others; all leave together. Every rank calls it. Yields a function that raises the error
        of another rank that failed inside, and returns whether the process that leads on this machine is done.

        Args:
            at_once: all enter at once.

        Processes wait by asking the store of the process group, for as long as it takes: a collective would end the run
        after GROUP_TIMEOUT, and tokenizing may take longer.

        Raises:
            Exception: what any of them raises inside, on every rank.
        """
        if self.world_size == 1:
            yield lambda: False
            return
        # Private, but the only way to the store that the ranks have in common (pytorch/pytorch#46415 asks for one).
        store = torch.distributed.distributed_c10d._get_default_store()
        self._turns += 1
        turn = f"sftkit/main_first/{self._turns}"
        machine = f"machine {os.environ.get('GROUP_RANK', '0')}"

        def look() -> bool:
            if store.add(f"{turn}/failed", 0):
                error = pickle.loads(store.get(f"{turn}/error"))
                store.add(f"{turn}/told", 1)
                raise error
            if self.status is not None:
                self.status.progress()
                if gone := self.status.gone():
                    raise RunError(f"rank {gone[0]} has ended while this rank waited for it")
            return bool(store.add(f"{turn}/{machine}", 0))

        def wait_for(what: str, number: int = 1) -> None:
            while store.add(f"{turn}/{what}", 0) < number:
                look()
                time.sleep(WAIT_SECONDS)

        try:
            if not self.is_main and not at_once:
                wait_for("main" if self.leads else machine)
            yield look
            for what in ("main",) * self.is_main + (machine,) * self.leads + ("all",):
                store.add(f"{turn}/{what}", 1)
            wait_for("all", self.world_size)
        except Exception as error:
            if store.add(f"{turn}/failing", 1) == 1:
                store.set(f"{turn}/error", _pickled(error))  # type: ignore[arg-type]  # bytes, in spite of its stub
                store.add(f"{turn}/failed", 1)
                # The store may end with this process.
                end = time.monotonic() + PATIENCE_SECONDS
                while store.add(f"{turn}/told", 0) < self.world_size - 1 and time.monotonic() < end:
                    time.sleep(WAIT_SECONDS)
            raise

    def print(self, text: str, level: terminal.Level | None = None) -> None:
        """Print once for the whole run."""
        if self.is_main:
            terminal.print_text(text, level=level)

    def stop_requested(self) -> bool:
        """Return whether any rank requests a stop; every rank must call it."""
        return self.any_rank(self.stopping.stop_requested())

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if any rank requests a stop; every rank must call it. Evaluation and generation
        call it on their way, which also shows the watchdog that they continue."""
        if self.status is not None:
            self.status.progress()
        if self.stop_requested():
            raise Stopped

    def signal_of_any_rank(self) -> int | None:
        """Return the signal that any rank has received, the same on every rank; None: none has. Every rank
        must call it."""
        # One sum for all signals: a number for each rank would need a gather.
        counts = self.sum(torch.tensor([float(self.stopping.signal == n) for n in SIGNALS], device=self.device))
        return next((number for number, count in zip(SIGNALS, counts.tolist(), strict=True) if count), None)


def _pickled(error: Exception) -> bytes:
    """Return an error as other ranks can raise it: itself, or its text if its class cannot be made from that."""
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:
        return pickle.dumps(RunError(f"{type(error).__name__}: {error}"))
    return content


def resolve_precision(wanted: str) -> str:
    """Return "bf16" or "fp32": 'auto' follows the launcher's mixed_precision, else it is bf16 on a GPU that has
    it, else fp32.

    Raises:
        ConfigError: the launcher's mixed_precision is neither "no" nor "bf16".
    """
    if wanted != "auto":
        return wanted
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", "bf16"):
        problem = f"accelerate's mixed_precision={launched} is not supported; use bf16 or no, or set train.precision"
        raise ConfigError(problem)
    use_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bf16" if launched == "bf16" or use_bf16 else "fp32"


def start(run: schema.RunConfig, train: schema.TrainConfig, page: Callable[[Path], None] | None = None) -> Runtime:
    """Join the process group, seed every generator, and return the Runtime.

    Accelerate's own dynamo and its division of the loss by accumulation steps are pinned off: see
    compile/contract.py and engine/step.py.

    Args:
        page: writes the page of the run directory when the run has failed.

    Raises:
        ConfigError: the launcher's settings do not fit, or its processes form no group.
    """
    # Before Accelerate looks for the other processes: missing variables would make it wait, or make each process a run
    # of its own.
    check_variables(os.environ)
    precision = resolve_precision(train.precision)
    # Before the first group, kernel and compilation: each of these is read once.
    use_one_worker_per_group()
    use_ptxas_of_workers()
    name_vector_width()
    topology = take_topology(os.environ, int(os.environ.get("WORLD_SIZE", "1")), schema.num_stages(train))
    accelerator = Accelerator(
        mixed_precision="no",  # weights are bf16 themselves; autocast would cast them again at every use
        dynamo_plugin=TorchDynamoPlugin(backend="no"),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[
            # Buffers are computed alike on every rank; gradients as views of the buckets need no second copy.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=GROUP_TIMEOUT),
        ],
    )
    check_group(os.environ, accelerator.num_processes, gpu_unavailable_reason)
    quiet_libraries(logging.INFO if accelerator.is_main_process else logging.ERROR)
    # Another seed on each rank, as rows are others; what must be equal on all, such as new weights, seeds again.
    seed_everything(run.seed + accelerator.process_index)
    topology = replace(topology, on_cpu=accelerator.device.type == "cpu")  # now it is known
    rt = Runtime(accelerator, precision, topology, page=page)
    where = device_name(rt.device) if rt.world_size == 1 else f"{rt.world_size} x {device_name(rt.device)}"
    where += f" ({topology.describe()})" if rt.world_size > 1 else ""
    rt.print(f"running on {where}, {precision}, torch {torch.__version__}")
    return rt


def quiet_libraries(level: int = logging.INFO) -> None:
    """Log our own messages as plain lines, and only warnings of the libraries that chat at info level."""
    logging.basicConfig(level=level, handlers=[terminal.TerminalHandler()], format="%(message)s")
    for noisy in ("httpx", "datasets", "accelerate", "filelock", "urllib3", "torch"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def start_device() -> torch.device:
    """Return the device for scripts without a process group: the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy, torch on the CPU and every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def garbage_collected_between_steps() -> Iterator[Callable[..., int]]:
    """Let Python's cycle collector run only when the yielded function, gc.collect, is called: in the middle of a step
    it would stop one rank, and with it all. Objects that exist already are not examined."""
    # torchtitan #148. Frozen are modules, weights and compiled code, of which a collection would look at every object.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()
        gc.unfreeze()
