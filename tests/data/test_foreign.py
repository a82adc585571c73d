"""Tokens that other programs wrote, in files written here byte by byte: documents, masks, and what is rejected."""

from __future__ import annotations

import fcntl
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import remote
from sftkit.data.reading.origin import find_source
from sftkit.data.store import foreign
from sftkit.data.tokens import chat, sources, text
from sftkit.data.tokens.sources import RowTokenizer, load_sources
from sftkit.data.types import Examples
from sftkit.errors import ConfigError, DataError

TEXTS = ["One day.", "Nothing is learned in vain, ä € 😀.", "x"]


@pytest.fixture
def documents(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Ids of three texts; each ends with eos."""
    return [[*tokenizer.encode(one, add_special_tokens=False), tokenizer.eos_token_id] for one in TEXTS]


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Examples]:
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def load(
        path: Path | str,
        rule: object = text.tokenize,
        max_length: int = 64,
        too_long: str | None = None,
        **settings: object,
    ) -> Examples:
        settings = {"tokenizer_of": str(tmp_path / "tokenizer"), **settings}
        of_data = {"local_gb": settings.pop("local_gb")} if "local_gb" in settings else {}
        source = SourceConfig(path=str(path), **settings)
        data = DataConfig(train=(source,), cache_dir=str(tmp_path / "cache"), **of_data)
        return load_sources([source], data, RowTokenizer(rule, tokenizer, max_length, too_long))

    return load


def ids_of(examples: Examples) -> list[list[int]]:
    return [examples[i].ids.tolist() for i in range(len(examples))]


def flat(documents: list[list[int]]) -> list[int]:
    return [i for one in documents for i in one]


def write_megatron(path: Path, documents: list[list[list[int]]], code: int = 8, dtype: str = "<u2") -> None:
    """Documents of sequences, as megatron/core/datasets/indexed_dataset.py writes them."""
    sequences = [one for document in documents for one in document]
    raw = [np.array(one, dtype).tobytes() for one in sequences]
    path.with_suffix(".bin").write_bytes(b"".join(raw))
    borders = np.cumsum([0, *(len(one) for one in documents)])
    sizes = [len(one) for one in raw]
    pointers = np.cumsum([0, *sizes])[: len(raw)]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    lengths = struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    path.with_suffix(".idx").write_bytes(
        head + lengths + struct.pack(f"<{len(raw)}q", *pointers) + struct.pack(f"<{len(borders)}q", *borders)
    )


def write_datatrove(path: Path, documents: list[list[int]], token: str = "H", loss: list[int] | None = None) -> None:
    """As datatrove/pipeline/tokens/tokenizer.py writes it."""
    path.write_bytes(struct.pack(f"<{len(flat(documents))}{token}", *flat(documents)))
    ends = np.cumsum([len(one) for one in documents])
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if loss is not None:
        Path(f"{path}.loss").write_bytes(struct.pack(f"<{len(loss)}?", *loss))


def write_llm_c(path: Path, ids: list[int], magic: int = 20240520, version: int = 1, token: str = "H") -> None:
    """As dev/data/data_common.py of llm.c writes it."""
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(ids)}{token}", *ids))


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4")])
@pytest.mark.parametrize("named", ["web.bin", "web", ""])
def test_documents_of_megatron_are_ranges_of_sequences(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], code: int, dtype: str, named: str
) -> None:
    first, second, third = documents
    folder = tmp_path / "tokens"
    folder.mkdir()
    write_megatron(folder / "web", [[first, second], [], [third]], code, dtype)
    found = load(folder / named)
    assert ids_of(found) == [first + second, third]
    counts = found.counts[named.partition(".")[0] or "tokens"]
    assert (counts["rows"], counts["documents"], counts["dropped_no_target"]) == (3, 2, 1)
    assert found.num_targets.tolist() == [len(first + second) - 1, len(third) - 1]


def test_another_index_of_the_same_tokens_is_another_source(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    first, second, third = documents
    write_megatron(tmp_path / "x", [[first], [second, third]])
    assert ids_of(load(tmp_path / "x.bin")) == [first, second + third]
    write_megatron(tmp_path / "x", [[first, second], [third]])
    assert ids_of(load(tmp_path / "x.bin")) == [first + second, third]


def test_documents_of_datatrove_end_where_its_index_says(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    for token in "HI":
        write_datatrove(tmp_path / "00000.ds", documents, token)
        assert ids_of(load(tmp_path / "00000.ds")) == documents
    # Blocks that were shuffled: a document has no end, and the bytes of a token are in .metadata.
    Path(tmp_path / "00000.ds.index").write_bytes(struct.pack("<Q", len(documents[0])))
    Path(tmp_path / "00000.ds.metadata").write_text("gpt2|4\n30\n30T")
    assert ids_of(load(tmp_path / "00000.ds")) == [documents[0], documents[1] + documents[2]]


def test_a_mask_of_datatrove_says_what_is_learned(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    loss = [[1] * len(one) for one in documents]
    loss[1][:4] = [0] * 4
    loss[2] = [1] + [0] * (len(documents[2]) - 1)  # the first token is no target, so nothing is learned
    write_datatrove(tmp_path / "00000.ds", documents, loss=flat(loss))
    found = load(tmp_path / "00000.ds")
    assert ids_of(found) == documents[:2]
    assert found[1].is_target.tolist() == [bool(one) for one in loss[1]]
    assert found.num_targets.tolist() == [len(documents[0]) - 1, len(documents[1]) - 4]
    assert found.counts["00000"]["dropped_no_target"] == 1
    # It is cut into chunks as a text is, each with its part of the mask.
    cut = load(tmp_path / "00000.ds", max_length=6)
    assert cut[1].ids.tolist() == documents[1][:7]
    assert cut[1].is_target.tolist() == [False] * 4 + [True] * 3
    assert cut.num_targets.sum() == found.num_targets.sum()


@pytest.mark.parametrize(("name", "dtype"), [("part-0-00000.npy", "<u2"), ("x.bin", "<u2"), ("x.bin", "<u4")])
def test_documents_of_a_flat_file_end_with_eos(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], name: str, dtype: str
) -> None:
    rest = documents[0][:-1]
    np.array([*flat(documents), *rest], dtype).tofile(tmp_path / name)
    assert ids_of(load(tmp_path / name)) == [*documents, rest]
    (borders,) = (tmp_path / "cache" / "borders").glob("*.npy")
    before = borders.stat().st_ino
    load(tmp_path / name)
    assert borders.stat().st_ino == before


def test_borders_of_another_version_or_that_are_damaged_are_found_again(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.array(flat(documents), "<u2").tofile(tmp_path / "x.bin")
    load(tmp_path / "x.bin")
    (borders,) = (tmp_path / "cache" / "borders").glob("*.npy")
    for damage in (b"", b"no array", borders.read_bytes()[:-1]):
        borders.write_bytes(damage)
        assert ids_of(load(tmp_path / "x.bin")) == documents
    assert np.load(borders).dtype == np.int64
    np.save(borders, np.zeros(1))  # as if another version had kept something else
    assert ids_of(load(tmp_path / "x.bin")) == documents
    monkeypatch.setattr(foreign, "BORDERS_FORMAT", foreign.BORDERS_FORMAT + 1)
    np.save(borders, np.zeros(1, np.int64))
    assert ids_of(load(tmp_path / "x.bin")) == documents


def test_a_file_with_the_header_of_numpy_is_read_by_it(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    np.save(tmp_path / "x.npy", np.array(flat(documents), np.int32))
    assert ids_of(load(tmp_path / "x.npy")) == documents
    np.save(tmp_path / "x.npy", np.zeros((2, 2), np.int32))
    with pytest.raises(DataError, match=r"an array int32\[2, 2\], not one row of whole numbers"):
        load(tmp_path / "x.npy")


@pytest.mark.parametrize(("magic", "version", "token"), [(20240520, 1, "H"), (20240801, 7, "I")])
def test_documents_of_llm_c_begin_with_eos_and_learn_the_next_one(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], magic: int, version: int, token: str
) -> None:
    eos = documents[0][-1]
    begins = [[eos, *one[:-1]] for one in documents]
    write_llm_c(tmp_path / "a.bin", [7, 8, *flat(begins)], magic, version, token)
    expected = [[7, 8, eos], [*begins[0], eos], [*begins[1], eos], begins[2]]
    found = load(tmp_path / "a.bin")
    assert ids_of(found) == expected
    # Every token but the first of the file is learned once.
    assert int(found.num_targets.sum()) == len(flat(begins)) + 1


# ---- documents as others see them ------------------------------------------------------------------------------------


def test_documents_are_those_of_the_same_texts_as_rows(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    """Cut at max_length, sliced, repeated; with the bytes of their targets."""
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    write_datatrove(tmp_path / "x.ds", documents)
    for settings in (
        {},
        {"max_length": 5},
        {"split": "train[1:]"},
        {"max_rows": 2, "repeat": 2},
        {"split": "train[-1:]"},
    ):
        ours = load(tmp_path / "x.jsonl", tokenizer_of=None, **settings)
        theirs = load(tmp_path / "x.ds", **settings)
        assert ids_of(theirs) == ids_of(ours)
        for column in ("lengths", "num_targets", "num_bytes", "source"):
            assert getattr(theirs, column).tolist() == getattr(ours, column).tolist()
        for mine, other in zip(theirs.gather(np.arange(len(theirs))), ours.gather(np.arange(len(ours))), strict=True):
            assert mine.tolist() == other.tolist()


def test_files_of_a_folder_are_shards_of_one_source_by_the_split_in_their_names(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "SHARD_TOKENS", 4)  # several shards a file
    folder = tmp_path / "fineweb"
    folder.mkdir()
    eos = documents[0][-1]
    for i, name in enumerate(("fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin")):
        write_llm_c(folder / name, [eos, *documents[i][:-1]])
    (folder / "README.md").write_text("x")
    begins = [[eos, *one[:-1]] for one in documents]
    found = load(folder)
    assert ids_of(found) == begins[:2]
    assert found.files["fineweb"].startswith(
        "train: 2 files, validation: 1 (fineweb_val_000000.bin); left out: README.md; it begins "
    )
    assert "One day." in found.files["fineweb"]
    assert ids_of(load(folder, split="validation")) == begins[2:]
    assert ids_of(load(f"{folder}/*_00000[12].bin")) == begins[:2]
    assert ids_of(load(folder, files=("fineweb_train_000002.bin",))) == begins[1:2]
    with pytest.raises(ConfigError, match='no split "test" among train, validation'):
        load(folder, split="test")


def test_bytes_of_tokens_are_those_of_the_tokenizer_of_this_run(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    np.array(flat(documents), "<u2").tofile(tmp_path / "x.npy")
    before = load(tmp_path / "x.npy").num_bytes.tolist()
    # Another tokenizer, that of the run too, by which one of the ids is a longer text.
    made = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = made["model"]["vocab"]
    now = next(token for token, i in vocabulary.items() if i == documents[0][1])
    longest = max((token for token in vocabulary if token.isalpha()), key=len)
    vocabulary[now], vocabulary[longest] = vocabulary[longest], vocabulary[now]
    made["model"]["merges"] = []
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(made))
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    source = SourceConfig(path=str(tmp_path / "x.npy"), tokenizer_of=str(tmp_path / "tokenizer"))
    data = DataConfig(train=(source,), cache_dir=str(tmp_path / "cache"))
    found = load_sources([source], data, RowTokenizer(text.tokenize, other, 64))
    assert found.num_bytes[0] == before[0] + len(longest) - len(now) != before[0]


# ---- what is rejected ------------------------------------------------------------------------------------------------


def test_tokens_of_another_tokenizer_are_rejected_and_added_tokens_are_not(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], tokenizer: PreTrainedTokenizerFast
) -> None:
    write_datatrove(tmp_path / "x.ds", documents)
    made = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|new|>"]})
    tokenizer.chat_template = "another"
    tokenizer.eos_token = "<|new|>"  # documents end as the tokenizer says that made them
    np.array(flat(documents), "<u2").tofile(tmp_path / "x.npy")
    assert ids_of(load(tmp_path / "x.npy")) == documents
    assert ids_of(load(tmp_path / "x.ds")) == documents
    vocabulary = made["model"]["vocab"]
    first, second = list(vocabulary)[30:32]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ConfigError, match=r"is not the tokenizer of this run: the ids of .* differ"):
        load(tmp_path / "x.ds")
    made["model"]["vocab"][first], made["model"]["vocab"][second] = vocabulary[second], vocabulary[first]
    made["pre_tokenizer"] = None
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ConfigError, match=r"is not the tokenizer of this run: its pre_tokenizer differ"):
        load(tmp_path / "x.ds")
    with pytest.raises(ConfigError, match="tokenizer_of nowhere: "):
        load(tmp_path / "x.ds", tokenizer_of="nowhere")


def test_an_id_that_the_tokenizer_does_not_have_is_named(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], tokenizer: PreTrainedTokenizerFast
) -> None:
    first = documents[0]
    for wrong in (len(tokenizer), -1):
        write_megatron(tmp_path / "x", [[first], [[5, wrong, 5]]], 4, "<i4")
        with pytest.raises(DataError, match=rf"x\.bin: token {len(first) + 1} is {wrong:,}, and the tokenizer has"):
            load(tmp_path / "x")


def test_files_that_do_not_fit_together_are_rejected(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    def rejected(path: Path, told: str) -> None:
        with pytest.raises(DataError, match=told):
            load(path)

    write_megatron(tmp_path / "m", [[one] for one in documents])
    index = (tmp_path / "m.idx").read_bytes()
    for at, told in ((0, "no index of Megatron"), (17, "no index of Megatron"), (34, "do not follow each other")):
        broken = bytearray(index)
        broken[at] ^= 7
        (tmp_path / "m.idx").write_bytes(broken)
        rejected(tmp_path / "m.bin", told)
    (tmp_path / "m.idx").write_bytes(index + b"\0\1\0")
    rejected(tmp_path / "m.bin", "or modes of them")
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:-2])
    rejected(tmp_path / "m.bin", "or are not its")

    write_datatrove(tmp_path / "x.ds", documents, loss=[1])
    rejected(tmp_path / "x.ds", r"its \.loss has 1 bytes for")
    (tmp_path / "x.ds").write_bytes((tmp_path / "x.ds").read_bytes()[:-1])
    rejected(tmp_path / "x.ds", r"are not the [\d,]+ tokens of its \.index")
    (tmp_path / "x.ds.index").write_bytes(struct.pack("<2Q", 4, 3))
    (tmp_path / "x.ds").write_bytes(bytes(6))
    rejected(tmp_path / "x.ds", "do not ascend")
    (tmp_path / "x.ds.index").unlink()
    rejected(tmp_path / "x.ds", "cannot be read as tokens: .*No such file")

    write_llm_c(tmp_path / "c.bin", documents[0])
    (tmp_path / "c.bin").write_bytes((tmp_path / "c.bin").read_bytes()[:-2])
    rejected(tmp_path / "c.bin", "but its header says")
    write_llm_c(tmp_path / "c.bin", documents[0], magic=20240522)
    rejected(tmp_path / "c.bin", "a file of llm.c that holds no tokens")
    np.array(documents[0][:-1], "<u2").tofile(tmp_path / "f.bin")
    rejected(tmp_path / "f.bin", r"eos \(\d+\) is not in it\. Is tokenizer_of")


def test_settings_and_stages_that_need_rows_are_rejected(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples]
) -> None:
    write_datatrove(tmp_path / "x.ds", documents)
    with pytest.raises(ConfigError, match="revision is of datasets of the hub, which this is not"):
        load(tmp_path / "x.ds", revision="main")
    with pytest.raises(ConfigError, match=r"tokenizer_of is for files of tokens \(\.bin, \.npy, \.ds\)"):
        load(tmp_path / "tokenizer" / "tokenizer.json")
    with pytest.raises(ConfigError, match="this stage does not learn from texts"):
        load(tmp_path / "x.ds", rule=chat.tokenize, too_long="truncate")
    with pytest.raises(ConfigError, match="set tokenizer_of to the tokenizer that made them"):
        load(tmp_path / "x.ds", tokenizer_of=None)
    assert len(load(tmp_path / "x.ds", rule=text.tokenize_any, too_long="truncate")) == len(documents)
    assert list(sources.read_source(SourceConfig(path=str(tmp_path / "x.ds"), tokenizer_of="x"))) == []


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["index.json", "shard.00000.mds"], r"MosaicML's streaming \(MDS\), .*from streaming import StreamingDataset"),
        (["train/index.json", "train/shard.00001.mds.zstd"], "from streaming import StreamingDataset"),
        (["index.json", "chunk-0-0.bin", "chunk-0-1.bin"], "chunks of litdata, .*from litdata import StreamingDataset"),
        (["index.json", "chunk-0-0.zstd.bin"], "from litdata import StreamingDataset"),
    ],
)
@pytest.mark.parametrize("tokenizer_of", [None, "gpt2"])
def test_files_of_other_libraries_are_rejected_by_name_with_the_line_that_converts_them(
    tmp_path: Path, bucket: Any, names: list[str], told: str, tokenizer_of: str | None
) -> None:
    for name in names:
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text("{}")
    bucket.put(f"{tmp_path}/here/", "/bucket/", recursive=True)
    for path in (str(tmp_path / "here"), "memory://bucket"):
        with pytest.raises(ConfigError, match=told):
            find_source(SourceConfig(path=path, tokenizer_of=tokenizer_of))


# ---- at a URL --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty file system at memory://."""
    import fsspec

    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/", recursive=True)
    while remote.MAPPED:  # as the end of a process does
        remote.MAPPED.pop().close()


@pytest.mark.parametrize("kind", ["megatron", "datatrove", "llm.c"])
def test_tokens_at_a_url_are_read_from_copies_that_stay(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], bucket: Any, kind: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("a", "b"):
        if kind == "megatron":
            write_megatron(here / name, [documents[:2], [], documents[2:]])
        elif kind == "datatrove":
            loss = [i % 3 > 0 for i in range(len(flat(documents)))]
            write_datatrove(here / f"{name}.ds", documents, loss=loss)
        else:
            write_llm_c(here / f"{name}.bin", flat(documents))
    bucket.put(f"{here}/", "/bucket/", recursive=True)
    first = "a.ds" if kind == "datatrove" else "a.bin"
    for path, ours in (
        ("memory://bucket", here),
        (f"memory://bucket/{first}", here / first),
        (f"file://{here}/{first}", here / first),
    ):
        theirs, expected = load(path, split="train[1:]"), load(ours, split="train[1:]")
        assert ids_of(theirs) == ids_of(expected)
        assert theirs.num_targets.tolist() == expected.num_targets.tolist()
    assert list(theirs.counts) == ["a"]
    copies = [path for path in (tmp_path / "cache" / "remote").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(copies) > 2
    for copy in copies:
        with copy.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Fetched once: they are there when the bucket is gone, and another index is another copy.
    before = {copy: copy.stat().st_ino for copy in copies}
    assert ids_of(load("memory://bucket")) == ids_of(load(here))
    assert all(copy.stat().st_ino == inode for copy, inode in before.items())


def test_whole_lengths_are_known_without_reading_tokens(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "SHARD_TOKENS", 1)  # a shard for each document
    write_megatron(tmp_path / "x", [documents[:2], documents[2:]])
    found = load(tmp_path / "x.bin", max_length=2)
    whole = [len(flat(documents[:2])), len(documents[2])]
    monkeypatch.setattr(foreign.ForeignShard, "docs", property(lambda _: pytest.fail("tokens are read")))
    monkeypatch.setattr(foreign.ForeignShard, "tokens", lambda *_: pytest.fail("tokens are read"))
    pieces = np.diff(found.columns.row, prepend=-1).cumsum()
    assert found.tokens.sizes(np.arange(len(found))).tolist() == [whole[i - 1] for i in pieces]
    assert found.tokens.sizes(np.array([0, len(found) - 1])).tolist() == whole
    assert found.tokens.sizes(np.zeros(0, int)).tolist() == []


def test_another_index_at_a_url_is_fetched_with_its_tokens(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], bucket: Any
) -> None:
    first, second, third = documents
    here = tmp_path / "here"
    here.mkdir()
    for written in ([[first], [second, third]], [[first, second], [third]]):
        write_megatron(here / "x", written)
        bucket.put(f"{here}/", "/bucket/", recursive=True)
        assert ids_of(load("memory://bucket/x.bin")) == [flat(one) for one in written]


def test_more_tokens_at_a_url_than_copies_may_stay_are_rejected(
    tmp_path: Path, documents: list[list[int]], load: Callable[..., Examples], bucket: Any
) -> None:
    write_llm_c(tmp_path / "a.bin", flat(documents))
    bucket.put(str(tmp_path / "a.bin"), "/bucket/a.bin")
    with pytest.raises(ConfigError, match=r"files of tokens have 0\.0 GB, but data\.local_gb keeps 1e-06 GB of copies"):
        load("memory://bucket/a.bin", local_gb=1e-6)
    assert not list((tmp_path / "cache" / "remote").rglob("*.bin"))
