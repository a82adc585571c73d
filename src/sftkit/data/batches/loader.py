"""Build the micro-batches of every optimizer step from examples and a layout, beginning at any step."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from sftkit.config.schema import DataConfig, source_label, where_counts
from sftkit.data.batches.collate import Batch, collate
from sftkit.data.batches.epoch import ALL_ROWS, GlobalBatch, RankRows, check_row_shard
from sftkit.data.batches.order import NO_MIXTURE, Cursor, Mixture, known_by_source, order_of, segments_of
from sftkit.data.batches.pack import BatchShape, Layout, PlanSegment
from sftkit.data.store.making import Peers
from sftkit.data.tokens.sources import RowTokenizer, load_sources
from sftkit.data.types import Examples
from sftkit.errors import WorkerError, hint
from sftkit.runtime import script, signals
from sftkit.runtime.start import Runtime

if TYPE_CHECKING:
    from sftkit.data.batches.tree import Trees
    from sftkit.data.hygiene import Benchmarks

log = logging.getLogger(__name__)


class AdapterStep(NamedTuple):
    """A step of one of several adapters, counted as if it were alone."""

    step: int
    total_steps: int
    divisor: int
    "by which its sums are divided"


@dataclass(frozen=True)
class StepBatches:
    """The batches of one rank in one optimizer step, with the counts over all ranks by which the loss is divided."""

    epoch: int
    micro_batches: list[Batch]
    num_targets: int
    "target tokens of the global batch"
    divisor: int
    "by which sums over the global batch are divided, as the objective counts it"
    num_tokens: int
    "document tokens of the global batch"
    num_positions: int
    "row positions of the global batch, padding included"
    rank_skew: float = 1.0
    "(query, key) pairs of the busiest rank / mean over all ranks; 1.0: all ranks have the same number"
    documents: tuple[int, ...] = ()
    "indices of the documents in this rank's rows"
    documents_per_micro_batch: tuple[int, ...] = ()
    "how many of these documents each micro-batch has"
    source_tokens: tuple[int, ...] = (0,)
    "document tokens of the global batch by source"
    source_targets: tuple[int, ...] = (0,)
    "target tokens of the global batch by source"
    document_lengths: tuple[int, ...] = ()
    "positions of each document of the global batch"
    document_shared: tuple[int, ...] = ()
    "trees: how many positions of each of these documents others before it in its tree have; else ()"
    targets_again: int = 0
    "trees: of the target tokens of the global batch, those that documents before in their tree have; else 0"
    adapters: tuple[AdapterStep | None, ...] = ()
    "of several adapters the step of each; None: its data has ended"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the step for another process, with its tensors in one block of memory."""
        # Each block of shared memory takes a connection between the processes, longer than building a batch.
        tensors = [tensor for batch in self.micro_batches for tensor in batch.tensors()]
        block = torch.zeros(sum(map(_in_block, tensors)), dtype=torch.uint8)
        for piece, tensor in zip(block.split(list(map(_in_block, tensors))), tensors, strict=True):
            piece[: tensor.nbytes] = tensor.flatten().view(torch.uint8)
        empty = [batch.to(torch.device("meta")) for batch in self.micro_batches]
        return _from_block, ({**vars(self), "micro_batches": empty}, block)

    def pin_memory(self) -> StepBatches:
        """Return the same step in pinned host memory; DataLoader calls it."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


def _in_block(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in the block of a step; each begins at a multiple of 64."""
    return -(-tensor.nbytes // 64) * 64


def _from_block(fields: dict[str, Any], block: torch.Tensor) -> StepBatches:
    """Return a step whose tensors are views of a block, see StepBatches.__reduce__. `fields`: with meta tensors."""
    empty = [tensor for batch in fields["micro_batches"] for tensor in batch.tensors()]
    pieces = zip(block.split(list(map(_in_block, empty))), empty, strict=True)
    views = (piece[: one.nbytes].view(one.dtype).view(one.shape) for piece, one in pieces)
    micro_batches = [batch.each(lambda _: next(views)) for batch in fields["micro_batches"]]
    return StepBatches(**{**fields, "micro_batches": micro_batches})


_WORKER_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([0-9]+)")
"torch's error message when a data worker has died."
_KEPT: list[Iterator[StepBatches]] = []
"""Iterators of which a worker has died, kept to the end of the process: dropped, they would end their other workers in
good order, and wait for a lock that the dead one may hold for ever."""


class StepDataset(Dataset[StepBatches]):
    """Builds the batches of a step from its plan; runs in data workers."""

    def __init__(
        self,
        examples: Examples,
        layout: Layout,
        share: RankRows = ALL_ROWS,
        pad_id: int = 0,
        divisors: np.ndarray | None = None,
        noise: tuple[int, float] | None = None,
        trees: Trees | None = None,
    ) -> None:
        """Keep what batches are built from.

        Args:
            share: the rows and positions of this process.
            divisors: what each document adds to the divisor of its step, int64 [D]; None: its target tokens.
            noise: run.seed and train.neftune_alpha; None: no noise.
            trees: of the documents, in a layout of trees: what plans take as documents; else None.
        """
        check_row_shard(layout, share.shard)
        self.examples = examples
        self.layout = layout
        self.share = share
        self.pad_id = pad_id
        self.trees = trees
        self.lengths = examples.lengths if trees is None else trees.lengths
        "of what a plan takes as documents"
        self.num_targets = examples.num_targets
        self.divisors = self.num_targets if divisors is None else divisors
        self._noise = noise

    def __getitem__(self, item: tuple[int, int, GlobalBatch]) -> StepBatches:
        """Build the batches of one (step, epoch, global batch) for this rank."""
        step, epoch, batch = item
        docs = batch.documents
        shared: np.ndarray = docs[:0]
        again = 0
        if self.trees is not None:
            places = self.trees.members(docs)
            docs = self.trees.documents[places]
            shared = self.trees.shared[places]
            again = int(self.trees.again[places].sum())
        lengths = self.examples.lengths[docs]
        names = self.examples.source_names
        # Counts over all ranks need no communication: every rank has the whole plan.
        targets = self.num_targets[docs]
        sources = self.examples.source[docs]
        of_sources = [np.bincount(sources, weights=counts, minlength=len(names)) for counts in (lengths, targets)]
        source_tokens, source_targets = (tuple(counts.astype(np.int64).tolist()) for counts in of_sources)
        shape = self.layout.batch_shape(self.layout.micro_rows(batch.row_length), batch.row_length)
        mine = list(batch.micro_batches(self.layout, self.share.rank))
        made = [self._collated(number, rows, shape) for number, rows in enumerate(mine)]
        if self.trees is not None:
            mine = [self.trees.in_rows(rows)[0] for rows in mine]
        return StepBatches(
            epoch=epoch,
            micro_batches=[self._with_noise(step, rows, one) for rows, one in zip(mine, made, strict=True)],
            num_targets=int(targets.sum()),
            divisor=int(self.divisors[docs].sum()),
            num_tokens=int(lengths.sum()),
            num_positions=self.layout.positions(batch.row_length),
            rank_skew=batch.rank_skew(self.layout),
            documents=tuple(chain.from_iterable(row for rows in mine for row in rows)),
            documents_per_micro_batch=tuple(sum(map(len, rows)) for rows in mine),
            source_tokens=source_tokens,
            source_targets=source_targets,
            document_lengths=tuple(lengths.tolist()),
            document_shared=tuple(shared.tolist()),
            targets_again=again,
        )

    def _collated(self, number: int, rows: tuple[tuple[int, ...], ...], shape: BatchShape) -> Batch:
        """Return a micro-batch. `number`: from 0 in the step."""
        trees = None
        if self.trees is not None:
            rows, trees = self.trees.in_rows(rows)
        return collate(self.examples, rows, shape, self.pad_id, self.share.shard, trees)

    def _with_noise(self, step: int, rows: tuple[tuple[int, ...], ...], batch: Batch) -> Batch:
        """Return the micro-batch of these documents with the seed of its noise, if there is any."""
        if self._noise is None:
            return batch
        seed, alpha = self._noise
        # By step and documents: the same on any rank, and in a resumed run.
        drawn = np.random.SeedSequence((seed, step, *chain.from_iterable(rows))).generate_state(1, np.uint64)
        return replace(batch, noise=(int(drawn[0] >> np.uint64(1)), alpha))


class Batches:
    """The training data of a run as a function of the step number. Its only state: plans of epochs."""

    def __init__(
        self,
        dataset: StepDataset,
        seed: int,
        *,
        num_workers: int | None = 0,
        earlier: Sequence[PlanSegment] = (),
        first_step: int = 0,
        known: Sequence[Cursor] = (),
        mixture: Mixture = NO_MIXTURE,
    ) -> None:
        """Continue the plan segments of earlier starts; no batch is built yet.

        Args:
            dataset: builds the batches of this process.
            seed: of the order of documents.
            num_workers: processes that build batches; 0: this one; None: 2 with a GPU, else 0.
            earlier, first_step, known: segments, step and cursors of the checkpoint that is resumed.
            mixture: of the sources of the documents.
        """
        self.examples = dataset.examples
        self.trees = dataset.trees
        self.layout = dataset.layout
        self.seed = seed
        self._dataset = dataset
        self._num_workers = (2 if torch.cuda.is_available() else 0) if num_workers is None else num_workers
        self._iterator: Iterator[StepBatches] = iter(())
        self.segments = segments_of(earlier, first_step, self.layout, seed, mixture)
        known = known_by_source(known, earlier, mixture)
        self.order = order_of(dataset.lengths, self.layout, self.segments, known)
        self.mixture = mixture
        self._items = self.order.batches

    def num_steps(self, epochs: int | None, max_steps: int | None = None) -> int:
        """Return the optimizer steps of a run: those of n epochs, but at most max_steps, or those of data.tokens. None
        is no limit."""
        return self.order.num_steps(epochs, self.mixture.max_steps if max_steps is None else max_steps)

    def first_epoch(self) -> tuple[list[GlobalBatch], int]:
        """Return the batches of the first epoch, or of its first block, as the settings of now make them, and the
        steps of an epoch."""
        if len(self.segments) == 1:
            return self.order.first_batches()
        now = segments_of((), 0, self.layout, self.seed, self.mixture)
        return order_of(self._dataset.lengths, self.layout, now).first_batches()

    def num_documents(self, first_step: int, last_step: int) -> int:
        """Return how many documents the steps first_step + 1 .. last_step have, over all ranks."""
        taken = (batch.documents for _, _, batch in self._items(first_step, last_step))
        return sum(len(one) if self.trees is None else len(self.trees.members(one)) for one in taken)

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatches]:
        """Return the batches of steps first_step + 1 .. last_step (so a resumed run passes the step it has reached)."""
        loader = DataLoader(
            self._dataset,
            # an item is a whole step
            batch_size=None,
            sampler=self._items(first_step, last_step),
            num_workers=self._num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_leave_signals_to_the_main_process if self._num_workers else None,
            generator=torch.Generator(),  # else it draws from the generator of dropout, and no resume is exact
        )
        self._iterator = iter(loader)
        # Not asked for more than there is: it would wait for its workers to end, while the last steps are computed.
        return islice(self._iterator, last_step - first_step)

    @contextmanager
    def workers_named(self) -> Iterator[None]:
        """Replace torch's error about a dead data worker, wherever it is raised, by an error that says why it died.

        Raises:
            WorkerError: with process and cause.
        """
        try:
            yield
        except RuntimeError as error:
            if not _WORKER_DIED.search(str(error)):
                raise
            _KEPT.append(self._iterator)
            for worker in self._iterator._workers:  # type: ignore[attr-defined]
                worker.kill()
            said = str(error).partition("\n")[0].strip().rstrip(".")
            cause = script.likely_cause(signal.SIGKILL) if "Killed" in said else "a crash"
            raise WorkerError(hint("dead data worker", said=said, cause=cause)) from error
        finally:
            # Dropping the iterator ends its workers. At the end of Python it would wait for them, and they
            # ignore signals.
            self._iterator = iter(())


def load_examples(
    data: DataConfig, tokenize: RowTokenizer, rt: Runtime | None = None, benchmarks: Benchmarks | None = None
) -> tuple[Examples, dict[str, Examples]]:
    """Return (training documents, validation documents by source) that the settings choose. One process of each
    machine makes what is missing; the others wait, for as long as it takes.

    Args:
        rt: None: this process loads them for itself.
        benchmarks: evaluation texts that training documents are compared with.
    """
    if tokenize.writes_day:
        log.warning(hint("day in template"))
    with nullcontext(lambda: False) if rt is None else rt.main_first(at_once=True) as look:
        peers = Peers() if rt is None else Peers(rt.leads, alone=rt.world_size == 1, look=look)
        training = load_sources(data.train, data, tokenize, peers)
        validation = {source_label(source): load_sources((source,), data, tokenize, peers) for source in data.val}
    every = (*data.train, *data.val)
    limited = [source for source in every if source.sample or where_counts(source) or source.tree == "all"]
    if not (limited or data.val_fraction or data.dedup or benchmarks):
        return training, validation
    from sftkit.data.hygiene import choose_documents  # most runs take all of them

    decode = tokenize.tokenizer.backend_tokenizer.decode_batch  # leaves special tokens out
    with nullcontext() if rt is None else rt.main_first():
        for name, source in zip(validation, data.val, strict=True):
            if source in limited:
                alone = DataConfig(train=(source,), cache_dir=data.cache_dir)
                validation[name], _ = choose_documents(validation[name], {}, alone, decode)
        return choose_documents(training, validation, data, decode, benchmarks)


def _leave_signals_to_the_main_process(_: int) -> None:
    """Ignore signals in a data worker: the main process decides when to stop."""
    signals.ignore_signals()
