"""Recipes and words that are made to hang, to fill the memory or to end in a traceback: each is refused in a second."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from sftkit.config.load import load_config, read_config
from sftkit.errors import ConfigError

MINIMAL = """
run: {dir: runs/x}
model: {path: org/model}
data: {train: [{path: "builtin:tasks"}]}
train: {max_steps: 10}
"""
MAX_SECONDS = 5.0
"Of CPU, on a slow machine; most take some hundredths."
LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
BOMBS = {
    "aliases": (f"a0: &a0 [lol]\n{LAUGHS}", "line 2: not valid YAML: an alias (*name) is not allowed: write the value out"),
    "aliases in a known place": (f"x: &x {list(range(200))}\nmodel: {{scratch: {{a: [{'*x, ' * 60}]}}}}", "an alias (*name) is not allowed"),
    "20 MB of text": ("run: {dir: '" + "x" * 20_000_000 + "'}", "more than 64 KiB"),
    "a long text": ("run: {dir: '" + "x" * 20_000 + "'}", "run.dir: 20,000 characters, and a value has 10,000 at most"),
    "20 MB of keys": ("k: 1\n" * 4_000_000, "more than 64 KiB"),
    "20,000 values": ("a: [" + "1," * 20_000 + "]", "a: is not a known key"),
    "nesting": ("a: " + "[" * 2_000 + "]" * 2_000, "nested more than 32 levels deep"),
    "nested mappings": ("a: " + "{a: " * 100 + "1" + "}" * 100, "nested more than 32 levels deep"),
    "60 KB of brackets": ("[" * 60_000, "nested more than 32 levels deep"),
    "4,800 unknown keys": ("".join(f"k{i}: 1\n" for i in range(4800)), "... and 4,7"),
    "3,500 unknown keys of a section": ("train: {" + "".join(f"stepz{i}: 1, " for i in range(3500)) + "}", "... and 3,4"),
    "a key 4,000 times": ("run: 1\n" * 4000, "... and 3,9"),
    "2,400 sources without a path": (f"data: {{val: [{'{}, ' * 2400}]}}", "... and 2,3"),
    "a long key": (f"? {'k' * 5000}\n: 1", "a key must be a word of 200 characters at most"),
    "a number of 10,000 digits": ("run: {seed: " + "9" * 10_000 + "}", "run.seed: not a whole number of at most 64 bits"),
    "not UTF-8": (b"run: {dir: \xff}", "not UTF-8 text"),
    "control characters": ("run: {dir: \x00}", "not valid YAML"),
    "half a character": ('run: {dir: "\\ud800"}', "half of a character"),
}  # fmt: skip
WORDS = {
    "run.seed=10^23": 'run.seed: must be a whole number, not "10^23"',
    f"run.seed={10**23}": "run.seed: not a whole number of at most 64 bits",
    f"run.seed=-{10**23}": "run.seed: not a whole number of at most 64 bits",
    f"run.seed={2**31}": "run.seed: must be at most 2147483647",
    "train.max_steps=9000000000000000000": "train.max_steps: must be at most 2147483647",
    "optim.lr=.nan": 'optim.lr: must be a number, not ".nan"',
    "optim.lr=.inf": 'optim.lr: must be a number, not ".inf"',
    "optim.lr=1e400": 'optim.lr: must be a number, not "1e400"',
    "optim.lr=nan": 'optim.lr: must be a number, not "nan"',
    f"optim.lr={'9' * 5000}": "optim.lr: not a whole number of at most 64 bits",
    f"{'9' * 5000}=1": "a key of 5,000 characters, 200 at most",
    f"data.train.{'9' * 150}.path=x": "data.train is a list of 1",
    f"model.tokenizer={'x' * 100_000}": "a word of more than 10,000 characters",
    "model.tokenizer=" + "[" * 3000: "nested more than 32 levels deep",
    "model.tokenizer=&a [*a]": "an alias (*name) is not allowed",
    'model.tokenizer="a\\0b"': "a path cannot hold the character",
    "model.tokenizer=\udcff": "unreadable characters",
}


def refused(recipe: str | Path, *words: str) -> str:
    began = time.process_time()
    with pytest.raises(ConfigError) as error:
        read_config(recipe, words, world_size=1)
    assert time.process_time() - began < MAX_SECONDS
    assert len(str(error.value)) < 20_000
    assert str(error.value).count("\n") <= 30
    return str(error.value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(("content", "text"), BOMBS.values(), ids=BOMBS)
def test_a_recipe_made_to_hang_or_fill_the_memory_is_refused(content: str | bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert text in refused(path)
    top = tmp_path / "top.yaml"
    top.write_text(f"extends: bomb.yaml\n{MINIMAL}")
    assert text in refused(top)


@pytest.mark.parametrize(("word", "text"), WORDS.items(), ids=[word[:30].encode("ascii", "replace") for word in WORDS])
def test_a_word_that_no_setting_can_take_is_refused(word: str, text: str, recipe: Path) -> None:
    assert text in refused(recipe, word)


def test_only_regular_files_are_recipes(recipe: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for path, what in (
        ("/dev/zero", "not a regular file, which a recipe must be"),
        (pipe, "not a regular file, which a recipe must be"),
        (tmp_path / "folder.yaml", "a folder without recipes in it; name a recipe, a .yaml file"),
    ):
        assert refused(path).endswith(what)
        recipe.write_text(f"extends: {path}\n{MINIMAL}")
        assert f"{path}: {what}" in refused(recipe)
    recipe.write_text(f"extends: loop.yaml\n{MINIMAL}")
    assert "loop.yaml: cannot be read: Too many levels of symbolic links" in refused(recipe)
    recipe.write_text(f'extends: "a\\0b"\n{MINIMAL}')
    assert "extends: a path cannot hold the character" in refused(recipe)
    recipe.write_text(f"extends: {'x' * 300}.yaml\n{MINIMAL}")
    assert "File name too long" in refused(recipe)


def test_what_16_files_hold_together_is_bounded_too(tmp_path: Path) -> None:
    for i in range(1, 16):
        keys = "".join(f"k{i}_{j}{'x' * 180}: 1\n" for j in range(230))
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml\n{keys}")
    (tmp_path / "16.yaml").write_text(MINIMAL)
    assert "2.yaml: more than 64 KiB together with the files that extend it" in refused(tmp_path / "1.yaml")


def test_what_the_words_of_a_command_line_hold_together_is_bounded_too(recipe: Path) -> None:
    assert "more than 64 KiB of words" in refused(recipe, *[f"k{i}.x=[{'1,' * 4000}]" for i in range(10)])


def test_no_key_of_a_recipe_begins_a_line_of_its_own(recipe: Path) -> None:
    recipe.write_text(f'{MINIMAL}"x\\nall is well": 1\nlog: {{"y\\nall is well": 1}}\n')
    assert [line for line in refused(recipe).split("\n") if line.startswith("all")] == []


def test_a_recipe_may_be_json(recipe: Path) -> None:
    assert read_config(recipe, ['data.train.0.name="\\ud83d\\ude00"'], world_size=1).data.train[0].name == "😀"


def test_recipes_that_extend_one_another_for_ever_are_refused(tmp_path: Path) -> None:
    for i in range(1, 50):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml\n")
    assert "more than 16 files that extend one another" in refused(tmp_path / "1.yaml")
    (tmp_path / "link.yaml").symlink_to("a.yaml")
    (tmp_path / "a.yaml").write_text("extends: link.yaml\n")
    assert "files extend one another in a circle" in refused(tmp_path / "a.yaml")


# ---- paths -----------------------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_directory_in_every_path_of_a_recipe(recipe: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text(MINIMAL)
    recipe.write_text(
        "extends: ~/base.yaml\nrun: {dir: ~/r}\n"
        "model: {path: null, scratch: {model_type: llama}, train_tokenizer: {sources: [{path: ~/t.jsonl}]}}\n"
        "data: {train: [{path: ~/a.jsonl}, {path: org/data}], val: [{path: b/~c.jsonl}], cache_dir: ~/c}\n"
        "compile: {cache: s3://x/~y}\n"
    )
    words = ["train.resume=~/r/step-000005", "eval.data=~/d", "model.chat_template=~/t.jinja"]
    cfg = read_config("~/sft.yaml", words, world_size=1)
    assert cfg.model.train_tokenizer is not None
    assert cfg.model.train_tokenizer.sources is not None
    found = [
        *(cfg.run.dir, cfg.data.cache_dir, cfg.train.resume, cfg.eval.data, cfg.model.chat_template),
        *(source.path for source in (*cfg.model.train_tokenizer.sources, *cfg.data.train)),
    ]
    expected = ["r", "c", "r/step-000005", "d", "t.jinja", "t.jsonl", "a.jsonl"]
    assert found == [*(f"{tmp_path}/{name}" for name in expected), "org/data"]
    assert (cfg.data.val[0].path, cfg.compile.cache) == ("b/~c.jsonl", "s3://x/~y")


def test_the_home_of_nobody_is_refused(recipe: Path) -> None:
    text = "~no-such-user: no such user on this machine. Write the path in full, or ./~no-such-user for a file of that name"
    assert refused(recipe, "run.dir=~no-such-user/x") == f"command line: run.dir: {text}"
    assert refused("~no-such-user/x.yaml") == text


LONG = "x" * 300
CANNOT = {
    "a file system that takes none": ("/proc/runs/x", "nothing can be written in /proc"),
    "a long name": (f"runs/{LONG}", "is too long, with 300 bytes in a name"),
    "a long path": ("/".join(["runs", *["x" * 200] * 25]), "and 3800 at most"),
    "a control character": ('"runs/\\e[31m"', "has characters that no terminal shows"),
    "a file in its place": ("{file}", "is not a folder, so {file} cannot be one"),
    "a file on the way": ("{file}/runs/x", "is not a folder, so {file}/runs/x cannot be one"),
}


@pytest.mark.parametrize(("name", "text"), CANNOT.values(), ids=CANNOT)
def test_a_run_directory_that_cannot_be_made_is_refused_before_torch(
    name: str, text: str, recipe: Path, monkeypatch, capsys
) -> None:
    name, text = name.replace("{file}", str(recipe)), text.replace("{file}", str(recipe))
    monkeypatch.setattr(sys, "argv", ["x.py", str(recipe), f"run.dir={name}"])
    with pytest.raises(SystemExit) as ended:
        load_config("")
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("\nerror: command line: run.dir: ")
    assert text in told
    assert told.count("\n") == 2


def test_a_link_to_a_folder_that_is_not_there_yet_can_be_a_run_directory(
    recipe: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    monkeypatch.setattr(sys, "argv", ["x.py", str(recipe), f"run.dir={tmp_path}/link"])
    assert load_config("").run.dir == f"{tmp_path}/link"
    (tmp_path / "disk").touch()
    with pytest.raises(SystemExit):
        load_config("")


def test_asking_whether_a_run_directory_can_be_made_leaves_nothing(recipe: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x.py", str(recipe), f"run.dir={tmp_path}/a/b/c"])
    load_config("")
    assert [path.name for path in tmp_path.iterdir()] == ["sft.yaml"]
