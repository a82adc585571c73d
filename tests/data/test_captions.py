"""Pictures and captions: made ones, files of a folder, what of them is learned, and the arrays that they become."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import SHARED_DATA
from PIL import Image

from sftkit.config.schema import DataConfig, SourceConfig, TrainConfig
from sftkit.data.batches.pack import make_layout, pack
from sftkit.data.demo.builtin import LENGTHS, LEVELS, NAMES, PICTURES, SIDES, picture, pictures
from sftkit.data.reading import pictures as store
from sftkit.data.reading.rows import convert, require_conversation, require_source_and_texts, require_text
from sftkit.data.tokens import sources
from sftkit.data.tokens.text import start_id, tokenize_captions
from sftkit.data.types import EncoderInputs, Row
from sftkit.errors import ConfigError, DataError
from sftkit.models.tokenizer import train_tokenizer, training_texts

SIZE = (3, 32, 48)
ORIENTATION = 0x0112
"The tag of EXIF that says how a camera was held."


def caption_folder(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
    """A folder with two pictures, and rows about them."""
    path.mkdir(exist_ok=True)
    for i, name in enumerate(("a.png", "b.png")):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path / name)
    (path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(path=str(path))


def load(tmp_path: Path, tokenizer, *source: SourceConfig, max_length: int = 40, **settings):
    data = DataConfig(train=source, cache_dir=str(tmp_path / "cache"), max_length=max_length, **settings)
    tokenize = sources.stage_rule("caption")(data, tokenizer, max_length)
    return sources.load_sources(data.train, data, tokenize)


def test_a_made_picture_determines_its_caption_at_any_size() -> None:
    for row, _ in zip(pictures("train"), range(200), strict=False):
        words = row["caption"].split()
        side = next(side for side in SIDES if side**2 >= len(words))
        for size in ((3, 224, 224), (3, 48, 64)):
            pixels = picture(row["image"], size)
            assert (pixels.shape, pixels.dtype) == (size, np.uint8)
            middles = [((np.arange(side) + 0.5) * length / side).astype(int) for length in size[1:]]
            levels = np.searchsorted(LEVELS, pixels[:, middles[0][:, None], middles[1][None]]).reshape(3, -1)
            read = [NAMES[16 * r + 4 * g + b] for r, g, b in levels.T]
            assert read == words + [NAMES[0]] * (side**2 - len(words))


def test_made_captions_have_the_lengths_that_are_asked_for_and_are_always_the_same() -> None:
    rows = [row["caption"] for row, _ in zip(pictures("train"), range(5000), strict=False)]
    tokens = np.array([len(caption.split()) + 1 for caption in rows])
    assert (tokens.min(), tokens.max()) >= (5, 200)
    assert tokens.max() <= LENGTHS[-1][2]
    assert np.mean(tokens <= 32) == pytest.approx(0.90, abs=0.015)
    assert np.mean(tokens <= 64) == pytest.approx(0.99, abs=0.005)
    assert rows[:3] == [row["caption"] for row, _ in zip(pictures("train"), range(3), strict=False)]
    assert not set(rows) & {row["caption"] for row in pictures("heldout")}
    assert sum(1 for _ in pictures("heldout")) == PICTURES["heldout"]


def test_a_tokenizer_of_1024_has_a_token_for_each_word() -> None:
    rows = [row["caption"] for row, _ in zip(pictures("train"), range(1500), strict=False)]
    tokenizer = train_tokenizer(rows, 1024)
    for text in rows[:100]:
        found = tokenize_captions(Row("x", image="builtin:x", captions=(text,)), tokenizer, max_length=256)
        assert len(found.examples[0].ids) == len(text.split()) + 2  # the first token and the end
    texts = list(training_texts([SourceConfig(path="builtin:pictures", max_rows=2)], DataConfig(train=())))
    assert texts == rows[:2]


def test_a_caption_begins_with_a_token_that_is_no_target_and_ends_with_eos(tokenizer) -> None:
    [found] = tokenize_captions(Row("x", image="a.png", captions=("A cat.",)), tokenizer, max_length=40).examples
    words = tokenizer("A cat.", add_special_tokens=False)["input_ids"]
    assert found.ids.tolist() == [start_id(tokenizer), *words, tokenizer.eos_token_id]
    assert found.is_target.tolist() == [False] + [True] * (len(words) + 1)
    assert found.encoder_source == "a.png"


@pytest.mark.parametrize(("too_long", "note"), [("truncate", "truncated"), ("drop", "dropped_too_long")])
def test_long_captions_are_cut_or_dropped_and_counted(tokenizer, too_long: str, note: str) -> None:
    row = Row("x", image="a.png", captions=("one two three four five six seven eight nine ten",))
    found = tokenize_captions(row, tokenizer, max_length=8, too_long=too_long)
    assert found.note == note
    assert [len(example.ids) for example in found.examples] == ([9] if too_long == "truncate" else [])
    with pytest.raises(DataError, match=r"x: \d+ tokens, but data.max_length 8 holds 9"):
        tokenize_captions(row, tokenizer, max_length=8, too_long="error")


def test_a_folder_of_pictures_with_captions(tmp_path: Path, tokenizer) -> None:
    rows = [{"file_name": "a.png", "text": "Noise."}, {"image": "b.png", "captions": ["Other noise.", "Snow."]}]
    examples = load(tmp_path, tokenizer, caption_folder(tmp_path / "data", rows))
    a, b = (str(tmp_path / "data" / name) for name in ("a.png", "b.png"))
    assert list(examples.encoder_sources) == [a, b, b]
    again = load(tmp_path, tokenizer, SourceConfig(path=str(tmp_path / "data")))
    assert list(again.encoder_sources) == [a, b, b]  # from the cache
    assert isinstance(again.lengths, np.memmap)
    found = store.load_images(again.encoder_sources, "pixel_values", SIZE, tmp_path / "cache")
    pixels = found.arrays["pixel_values"]
    assert isinstance(pixels, np.memmap)
    assert (pixels.shape, pixels.dtype, found.index.tolist()) == ((2, *SIZE), np.uint8, [0, 1, 1])
    with Image.open(a) as image:
        expected = np.asarray(image.resize((48, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(pixels[0], expected)


def test_pictures_are_read_once_and_again_when_a_file_or_the_size_changes(tmp_path: Path, monkeypatch) -> None:
    caption_folder(tmp_path, [])
    names, read, seen = [str(tmp_path / "a.png"), str(tmp_path / "b.png")], store.read_image, []
    monkeypatch.setattr(store, "read_image", lambda name, size: seen.append(name) or read(name, size))

    def again(size=SIZE) -> np.ndarray:
        seen.clear()
        return np.array(store.load_images(names, "pixel_values", size, tmp_path / "cache").arrays["pixel_values"])

    first = again()
    assert seen == names
    assert np.array_equal(again(), first)
    assert seen == []
    again((3, 16, 16))
    assert seen == names
    shutil.copy(tmp_path / "b.png", tmp_path / "a.png")
    assert np.array_equal(again()[0], first[1])
    assert seen == names
    # An edit that keeps size and time, and one flipped bit of the array.
    picture_file = tmp_path / "a.png"
    times = picture_file.stat().st_atime_ns, picture_file.stat().st_mtime_ns
    time.sleep(0.02)  # a tick of the file system's clock
    picture_file.write_bytes(picture_file.read_bytes())
    os.utime(picture_file, ns=times)
    again()
    assert seen == names
    for file in (tmp_path / "cache").glob("images-*/pictures.npy"):
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    assert np.array_equal(again()[1], first[1])
    assert seen == names
    for file in (tmp_path / "cache").glob("images-*/pictures.npy"):
        file.write_bytes(b"broken")
    assert np.array_equal(again()[1], first[1])
    assert len(seen) == 2


def test_grey_pictures_and_single_channels(tmp_path: Path) -> None:
    Image.fromarray(np.full((9, 7), 80, np.uint8)).save(tmp_path / "grey.png")
    assert (store.read_image(str(tmp_path / "grey.png"), (3, 4, 5)) == 80).all()
    assert store.read_image(str(tmp_path / "grey.png"), (1, 4, 5)).shape == (1, 4, 5)
    with pytest.raises(ConfigError, match=r"3 channels, and the encoder takes 1"):
        picture("builtin:pictures/train/0", (1, 8, 8))


def test_a_picture_is_upright_as_a_viewer_shows_it(tmp_path: Path) -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255  # as it lies in the file: left is white
    turned = Image.Exif()
    turned[ORIENTATION] = 6  # turn it clockwise: left comes to the top
    Image.fromarray(pixels).save(tmp_path / "phone.png", exif=turned)
    found = store.read_image(str(tmp_path / "phone.png"), (3, 16, 8))
    assert (found[:, :8] == 255).all()
    assert (found[:, 8:] == 0).all()


def test_more_than_eight_bits_are_refused_and_not_made_white(tmp_path: Path) -> None:
    for dtype in (np.uint16, np.int32, np.float32):
        Image.fromarray(np.full((8, 8), 300, dtype)).save(tmp_path / "deep.tiff")
        with pytest.raises(DataError, match=r"deep.tiff: .* mode \S+ has more than 8 bits a channel: save it with 8"):
            store.read_image(str(tmp_path / "deep.tiff"), SIZE)


def test_a_broken_file_is_named_whatever_its_reader_raises(tmp_path: Path, monkeypatch) -> None:
    """Of some broken files Pillow raises SyntaxError or struct.error."""
    caption_folder(tmp_path, [])

    def broken(_: object) -> None:
        raise SyntaxError("broken PNG file")

    monkeypatch.setattr(store.ImageOps, "exif_transpose", broken)
    with pytest.raises(DataError, match=r"a.png: cannot be read as a picture: broken PNG file"):
        store.read_image(str(tmp_path / "a.png"), SIZE)


def test_a_large_picture_is_read_without_a_word_and_one_that_may_be_an_attack_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    caption_folder(tmp_path, [])  # 40 x 60
    monkeypatch.setattr(store.Image, "MAX_IMAGE_PIXELS", 1300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read_image(str(tmp_path / "a.png"), SIZE).shape == SIZE
    monkeypatch.setattr(store.Image, "MAX_IMAGE_PIXELS", 1100)
    with pytest.raises(DataError, match=r"a.png: .* \(2400 pixels\) exceeds limit of 2200 pixels"):
        store.read_image(str(tmp_path / "a.png"), SIZE)


def test_a_picture_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    caption_folder(tmp_path, [])
    (tmp_path / "bad.png").write_bytes(b"no picture")
    names = [str(tmp_path / name) for name in ("a.png", "bad.png")]
    with pytest.raises(DataError, match=r"bad\.png: cannot be read as a picture: .*Repair it, or remove its rows"):
        store.load_images(names, "pixel_values", SIZE, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_what_cannot_be_used_is_named(tmp_path: Path, tokenizer) -> None:
    data = tmp_path / "data"
    with pytest.raises(DataError, match=r"captions.jsonl:1: .*/c.png: no such picture"):
        load(tmp_path, tokenizer, caption_folder(data, [{"image": "c.png", "caption": "Nothing."}]))
    with pytest.raises(DataError, match=r"captions.jsonl:1: captions is neither a text nor a list of texts"):
        load(tmp_path, tokenizer, caption_folder(data, [{"image": "a.png", "captions": [1]}]))
    with pytest.raises(DataError, match=r"neither a picture with captions .* nor a question with its answer"):
        load(tmp_path, tokenizer, caption_folder(data, [{"text": "No picture."}]))
    (data / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"a.png: cannot be read as a picture"):
        store.load_images([str(data / "a.png")], "pixel_values", SIZE, tmp_path)
    caption_folder(data, [])
    row = convert({"file_name": "a.png", "text": "Noise."}, f"{data}/captions.jsonl:1")
    with pytest.raises(DataError, match=r"captions.jsonl:1: a picture with captions, which are for caption_train.py"):
        require_text(row)
    named = convert({"file_name": "main.py", "text": "print()"}, f"{data}/code.jsonl:1")  # of a corpus of texts
    assert require_text(named) == "print()"
    with pytest.raises(DataError, match=r"code.jsonl:1: .*/main.py: no such picture"):
        require_source_and_texts(named)
    row = Row("x:1", image="a.png", captions=("Noise.",))
    for refuse in (require_text, require_conversation):
        with pytest.raises(DataError, match=r"x:1: a picture with captions, which are for caption_train.py"):
            refuse(row)
    with pytest.raises(ConfigError, match=r"data.targets=assistant"):
        sources.stage_rule("caption")(DataConfig(train=(), targets="assistant"), tokenizer, 40)


def test_a_question_and_its_answer_are_a_text_to_read_and_one_to_write(tmp_path: Path, tokenizer) -> None:
    examples = load(
        tmp_path, tokenizer, caption_folder(tmp_path / "data", [{"prompt": "Capital?", "completion": "Paris."}])
    )
    assert list(examples.encoder_sources) == ["Capital?"]
    assert tokenizer.decode(examples[0].ids[1:-1]) == "Paris."


def test_rows_have_as_many_captions_as_leave_few_places_for_pictures_empty() -> None:
    lengths = np.array(
        [len(row["caption"].split()) + 1 for row, _ in zip(pictures("train"), range(4000), strict=False)]
    )
    data = DataConfig(train=(), row_length=512)
    train = TrainConfig(global_batch_size=4, micro_batch_size=4)
    plain = make_layout(data, train, lengths, 256)
    encoded = make_layout(data, train, lengths, 256, encoded=True)
    assert encoded.docs_per_row < plain.docs_per_row
    rows = len(pack(lengths, np.arange(len(lengths)), 512, encoded.docs_per_row))
    assert len(lengths) > 0.9 * rows * encoded.docs_per_row


@pytest.mark.skipif(not (SHARED_DATA / "images").is_dir(), reason="no shared data")
def test_real_pictures_with_captions(tmp_path: Path, tokenizer) -> None:
    examples = load(tmp_path, tokenizer, SourceConfig(path=str(SHARED_DATA / "images")))
    found = store.load_images(examples.encoder_sources, "pixel_values", (3, 64, 64), tmp_path / "cache")
    assert isinstance(found, EncoderInputs)
    assert (
        len(examples)
        == len(found.index)
        > len(found.arrays["pixel_values"])
        == len(set(examples.encoder_sources))
        >= 10
    )


@pytest.mark.parametrize(
    ("too_long", "counts"),
    [
        ("truncate", {"answers": 3, "answers_learned": 2, "answers_cut": 1, "truncated": 1}),
        ("drop", {"answers": 3, "answers_learned": 2, "not_learned_too_long": 1}),
    ],
)
def test_what_is_cut_of_captions_is_counted(tmp_path: Path, tokenizer, too_long: str, counts: dict[str, int]) -> None:
    long = "word " * 60
    source = caption_folder(tmp_path / "p", [{"image": "a.png", "captions": ["A cat.", long, "A dog.", " "]}])
    found = load(tmp_path, tokenizer, source, too_long=too_long)
    own = found.counts[found.source_names[0]]
    shown = {name: own[name] for name in (*counts, "answers_cut", "not_learned_too_long", "truncated")}
    zeros = {"answers_cut": 0, "not_learned_too_long": 0, "truncated": 0}
    assert shown == {**zeros, **counts}
    assert [one.reason for one in found.findings[found.source_names[0]] if one.kind != "read"] == [
        "empty text left out"
    ]


def test_what_is_cut_of_texts_for_an_encoder_is_counted_dropped_or_an_error(tmp_path: Path, tokenizer) -> None:
    rows = [{"prompt": "Say it.", "completion": "It."}, {"prompt": "word " * 60, "completion": "It."}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceConfig(path=str(tmp_path / "t.jsonl"))
    cut = load(tmp_path, tokenizer, source)
    assert (len(cut), cut.counts["t"]["truncated"], cut.counts["t"]["answers_learned"]) == (2, 1, 2)
    finding, _ = cut.findings["t"]
    assert (finding.kind, finding.reason) == ("accepted", "text for the encoder cut at data.max_length")
    assert "t.jsonl:2: the text for the encoder has" in finding.first
    dropped = load(tmp_path, tokenizer, source, too_long="drop")
    assert (len(dropped), dropped.counts["t"]["dropped_too_long"], dropped.counts["t"]["not_learned_too_long"]) == (
        1,
        1,
        1,
    )
    with pytest.raises(DataError, match=r"t\.jsonl:2: the text for the encoder has"):
        load(tmp_path, tokenizer, source, too_long="error")
