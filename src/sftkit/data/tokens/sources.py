"""Turn data sources into tokenized examples: read rows, tokenize them in order into the stores of their sources, and
make the view of a run.

A store is found by its key: the content of the source, and all else that its tokens depend on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.commands import ROOT, is_ours
from sftkit.config.schema import DataConfig, SourceConfig, source_label, where_columns
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.data.reading import columns as findings
from sftkit.data.reading import rows
from sftkit.data.reading.origin import Origin, find_source
from sftkit.data.store import making, view
from sftkit.data.store.making import Peers
from sftkit.data.store.shards import DOCS, FORMAT, Shard, Store
from sftkit.data.tokens import chat, template, text
from sftkit.data.types import Examples, Row, Tokenized
from sftkit.errors import ConfigError, DataError, LeftOut, hint
from sftkit.rundir.files import content_stamp, make_folder
from sftkit.runtime.script import counted

MASK_VERSION = 4
"""Raised whenever the same rows lead to other tokens, targets, counts or findings: stores of another version are not
read. tests/data/test_mask_version.py fails until it is raised."""
WHOLE = 2**20
"""Most row positions of a conversation in a store, and of a piece of a text; data.max_length cuts what is read from
there."""
NOT_IN_TOKENS = (
    *("path", "name", "subset", "split", "repeat", "max_rows", "sample", "files", "revision"),
    *("weight", "max_epochs", "order"),
)
"Settings of a source that decide which of its files and documents are used, and how often; `identity` has its content."
COMPARED_ROWS = 64
"Rows that are tokenized again if libraries have another version than those that a store was made with."

if TYPE_CHECKING:
    from sftkit.data.tokens.batch import RowBatches

log = logging.getLogger(__name__)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides tokens: vocabulary and merges, special tokens, chat template."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    parts = [tokenizer.backend_tokenizer.to_str(), special, json.dumps(tokenizer.chat_template, sort_keys=True)]
    if (start := text.text_start(tokenizer)) is not None:
        parts.append(f"texts begin with {start}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class RowTokenizer:
    """The mask policy of a stage: a rule and its settings, which turn a row into documents and their loss mask.

    Training and inspection of a stage share a cache, whose key names the rule and its settings.
    """

    rule: Callable[..., Tokenized]
    "chat.tokenize or one of text.py, for example; takes a row, the tokenizer and `settings`"
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    "most row positions of a document"
    too_long: str | None = None
    "data.too_long; None: the rule cuts a text into documents that fit"
    learning: chat.Learning | None = None
    "which tokens of a conversation are learned; None: the rule's own choice"
    special_tokens: str | None = None
    "data.special_tokens_in_text; None: the rule takes no plain texts"
    alone: bool = False
    "Tokenize each row alone: results of some rows differ in a batch."

    def __call__(self, row: Row) -> Tokenized:
        """Return the documents of a row."""
        return self.rule(row, self.tokenizer, **self.settings)

    def many(self, rows: Sequence[Row]) -> list[Tokenized | DataError]:
        """Return the documents of each row, or its error, as for one row; two to five times as fast."""
        return [self._batch.by_itself(row) for row in rows] if self.alone else self._batch.many(rows)

    @property
    def differs(self) -> str:
        """Return the place of a row for which `many` differs from the rule; empty: none is known."""
        return self._batch.different or ""

    @cached_property
    def _batch(self) -> RowBatches:
        from sftkit.data.tokens.batch import RowBatches  # a start that finds its stores tokenizes nothing

        return RowBatches(self.rule, self.tokenizer, self.settings)

    @property
    def settings(self) -> dict[str, object]:
        """Return the keyword arguments of the rule."""
        names = ("learning", "max_length", "too_long", "special_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @cached_property
    def writes_day(self) -> bool:
        """Return whether documents are those of the day on which they are tokenized."""
        return self.rule is not text.tokenize and template.writes_day(self.tokenizer)

    @property
    def limits(self) -> view.Limits | None:
        """Return how documents from a store are cut; None: a rule of which that is not known cuts them itself."""
        if self.rule not in (chat.tokenize, text.tokenize, text.tokenize_any):
            return None
        return view.Limits(self.max_length, self.too_long or "truncate")

    @property
    def whole(self) -> RowTokenizer:
        """Return what makes the documents of a store: those of known rules are not cut."""
        if self.limits is None:
            return self
        return replace(self, max_length=WHOLE, too_long=None if self.too_long is None else "truncate")

    @cached_property
    def identity(self) -> dict[str, str]:
        """Return what the documents of a row depend on besides the row, as text for the key of a store."""
        rule = f"{self.rule.__module__}.{self.rule.__qualname__}"
        # The fingerprint identifies the tokenizer: the text of the object would differ in every process.
        return {
            "rule": rule,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "settings": str(sorted(self.settings.items())),
            **({"rows": "each by itself"} if self.alone else {}),
            **({"day": date.today().isoformat()} if self.writes_day else {}),
        }


def stage_rule(stage: str) -> Callable[[DataConfig, PreTrainedTokenizerBase, int], RowTokenizer]:
    """Return `row_tokenizer` of the script that runs a stage here, which says what the stage learns.

    Raises:
        ConfigError: the script, a changed one, has no such function.
    """
    script = f"scripts/{STAGE_SCRIPTS[stage]}"
    script = script if is_ours(script) else str(ROOT / script)
    found = runpy.run_path(script).get("row_tokenizer")
    if found is None:
        raise ConfigError(f"{script}: no function row_tokenizer, which says what the stage learns")
    return found  # type: ignore[no-any-return]


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_source(source: SourceConfig, on_bad_row: OnBadRow = "error", data: DataConfig | None = None) -> Iterator[Row]:
    """Yield the rows of a source in order, once (`repeat` is not applied). With "skip", bad rows are left out, and
    reported at the end.

    Args:
        data: as for find_source.
    """
    tally: findings.Tally = {}
    for raw in find_source(source, data).part():
        try:
            row = rows.parse(raw)
        except LeftOut as out:
            findings.add(tally, "dropped", out.reason, str(out))
        except DataError as error:
            if on_bad_row == "error":
                raise findings.advised(error) from error
            findings.add(tally, "skipped", error.reason, str(error))
        else:
            yield row
    findings.log_findings(source_label(source), findings.sort_findings(tally))


# ---- stores ----------------------------------------------------------------------------------------------------------


IN_USE: dict[Path, int] = {}
"Store that this process reads or fills -> the descriptor that holds its lock."


def use(folder: Path) -> None:
    """Make the folder of a store, and keep it from being pruned while this process lives: what a manifest names is
    opened later. Waits while `sftkit data prune` removes a folder of this name."""
    with suppress(OSError):  # a full disk, or a file system without locks
        for _ in range(3):
            if (known := IN_USE.get(folder)) is not None:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(known), folder.stat()):
                        return
                os.close(IN_USE.pop(folder))  # it was removed, or is another one of that name
            make_folder(folder)
            IN_USE[folder] = os.open(folder, os.O_RDONLY)
            fcntl.flock(IN_USE[folder], fcntl.LOCK_SH)


def load_sources(
    sources: Sequence[SourceConfig], data: DataConfig, tokenize: RowTokenizer, peers: Peers = making.NO_PEERS
) -> Examples:
    """Return all documents of the sources, source after source, from their stores, which are filled where shards are
    missing. What was found in their rows is reported either way.

    A source that yields no document is a DataError. With `repeat`, documents and counts are those of all passes.
    """
    origins = [find_source(source, data) for source in sources]
    stored = [
        view.StoredSource(source, prepare(source, origin, data, tokenize, peers))
        for source, origin in zip(sources, origins, strict=True)
    ]
    limits = tokenize.limits
    if limits is not None and (limits.too_long, data.on_bad_row) == ("error", "skip"):
        limits = limits._replace(too_long="skip")
    used = [(one.path, one.repeat, source_label(one), [shard.line for shard in shards]) for one, shards in stored]
    # Tokens of other programs do not say which tokenizer their bytes are counted by.
    follows_from = [used, limits, tokenizer_fingerprint(tokenize.tokenizer), MASK_VERSION, FORMAT, view.VIEW_FORMAT]
    folder = Path(data.cache_dir) / "views" / _digest(follows_from)
    count_bytes = partial(chat.count_bytes, tokenize.tokenizer)
    examples = view.make_examples(stored, limits, count_bytes, folder, peers)
    for counts in examples.counts.values():  # every source has every count, zeros too
        counts.update({name: counts.get(name, 0) for name in chat.ANSWER_COUNTS})
    for i, (source, one) in enumerate(zip(sources, origins, strict=True)):
        said = one.said
        there = sum(shard.line["rows"] for shard in stored[i].shards)
        if source.max_rows is not None and there < source.max_rows:
            said = "; ".join(filter(None, (said, f"max_rows: it has only {counted(there, 'row')}; all are taken")))
        if source.tokenizer_of is not None:
            # Nothing else shows whether the tokens are what they should be.
            first = examples[int(np.argmax(examples.source == i))].ids[:24]
            said = "; ".join(filter(None, (said, f"it begins {tokenize.tokenizer.decode(first)!r}")))
        if said:
            log.info("%s: %s", source_label(source), said)
            examples.files[source_label(source)] = said
    for name, found in examples.findings.items():
        findings.log_findings(name, found)
    return examples


def prepare(
    source: SourceConfig, origin: Origin, data: DataConfig, tokenize: RowTokenizer, peers: Peers = making.NO_PEERS
) -> list[Shard]:
    """Return the shards of a source in order, made where they are missing.

    Raises:
        DataError: a bad row, or one that is too long, if that is an error.
    """
    if source.tokenizer_of is not None:
        if tokenize.rule not in (text.tokenize, text.tokenize_any):
            problem = "tokens of another program are texts, and this stage does not learn from texts"
            raise ConfigError(f"data source {source.path}: {problem}. Take base_train.py or mid_train.py")
        from sftkit.data.store import foreign

        count_bytes = partial(chat.count_bytes, tokenize.tokenizer)
        return foreign.open_source(source, origin, tokenize.tokenizer, count_bytes, Path(data.cache_dir) / "borders")
    stamps = [content_stamp(file) for file in origin.files]
    store, about = _store_of(source, origin, Path(data.cache_dir) / "stores", tokenize)

    def check() -> None:
        changed = [file for file, stamp in zip(origin.files, stamps, strict=True) if content_stamp(file) != stamp]
        if changed and origin.identity() != about["content"]:
            raise DataError(hint("changed while tokenized", file=changed[0]))

    by_itself = replace(tokenize, alone=True)
    if making.DIFFERS in making.read_about(store):
        return prepare(source, origin, data, by_itself, peers)
    per_shard = making.rows_per_shard(store, origin.rows, about)
    shards = []
    with suppress(OSError):  # `sftkit data prune` removes what was not used for long
        os.utime(store.folder / making.STORE_FILE)
    from sftkit.data.tokens.processes import chunk_tokenizer

    try:
        with chunk_tokenizer(tokenize.whole, data, origin.num_bytes, store.dtype) as tokenize_chunks:
            settings: dict[str, Any] = {"per_shard": per_shard, "peers": peers, "check": check}
            for shard in making.shards_of(store, source, origin.rows, origin.span(), tokenize_chunks, **settings):
                skipped = next((one for one in shard.tally(source.path).values() if one.kind == "skipped"), None)
                if skipped is not None and data.on_bad_row == "error":
                    raise findings.advised(DataError(skipped.first, reason=skipped.reason))
                if tokenize.limits is not None and (tokenize.too_long, data.on_bad_row) == ("error", "error"):
                    view.check_lengths(shard, source, tokenize.limits)
                shards.append(shard)
    except making.RowsDiffer as error:
        # Rows of other shards may differ too, those that were not compared.
        making.write_about(store, {**making.read_about(store), making.DIFFERS: str(error)})
        return prepare(source, origin, data, by_itself, peers)
    return sorted(shards, key=lambda shard: shard.span)


def _store_of(
    source: SourceConfig, origin: Origin, folder: Path, tokenize: RowTokenizer
) -> tuple[Store, dict[str, Any]]:
    """Return the store of a source, which may be empty, and what decides its tokens."""
    kept = {name: value for name, value in asdict(source).items() if name not in NOT_IN_TOKENS}
    kept["where"] = where_columns(source)
    about = {
        **tokenize.whole.identity,
        "converter": kept,
        "content": origin.identity(),
        "mask_version": MASK_VERSION,
        "format": FORMAT,
        "vocabulary": len(tokenize.tokenizer),
    }
    if tokenize.limits is None:  # its documents may name pictures next to the rows
        about["place"] = str(Path(source.path).resolve())
    key = _digest(about)
    store = Store(folder / key, len(tokenize.tokenizer))
    use(store.folder)  # before anything is read
    libraries = [f"{name} {version(name)}" for name in ("transformers", "tokenizers", "jinja2")]
    about |= {"source": source.path, "libraries": [libraries]}
    there = making.read_about(store)
    if there and libraries not in there["libraries"]:
        if _is_same(store, source, origin, tokenize.whole):
            making.write_about(store, {**there, "libraries": [*there["libraries"], libraries]})
        else:
            store = Store(folder / _digest([key, libraries]), len(tokenize.tokenizer))
            use(store.folder)
    return store, about


def _is_same(store: Store, source: SourceConfig, origin: Origin, tokenize: RowTokenizer) -> bool:
    """Return whether the first rows of a store lead to the same documents as when it was made."""
    line = min(store.lines().items(), default=None)
    if line is None:
        return True
    shard = store.find(line[0], said=True)
    rows_again = islice(origin.rows(), line[0].first, min(line[0].first + COMPARED_ROWS, line[0].past))
    from sftkit.data.tokens.processes import tokenize_chunk

    part = tokenize_chunk(tokenize, "skip", store.dtype, (line[0].first, list(rows_again)))
    docs = np.array(part.docs, DOCS)
    if shard is None or not np.array_equal(docs["length"], shard.docs["length"][: len(docs)]):
        return False
    ids, is_target = shard.tokens(0, int(docs["length"].sum()))
    is_target[np.cumsum(docs["length"])[:-1]] = False
    return not part.ids or (np.array_equal(ids, part.ids[0]) and np.array_equal(is_target, part.is_target[0]))


def _digest(description: object) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:32]
