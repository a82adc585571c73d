"""The command `sftkit`: from any folder it does what the scripts of a clone do."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from sftkit.config.commands import ROOT, SCRIPTS, SHIPPED
from sftkit.config.keys import hints, key_table
from sftkit.launch.cli import CLI_USAGE, LABS, main, of_setting, python_arguments

COMMAND = (sys.executable, "-m", "sftkit")


def sftkit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "ACCELERATE_USE_CPU": "true"}
    return subprocess.run([*COMMAND, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_init_copies_what_a_run_needs_and_never_over_something(tmp_path: Path) -> None:
    done = sftkit(tmp_path, "init", "mine")
    assert (done.returncode, done.stderr) == (0, "")
    for name in SHIPPED:
        ours, theirs = tmp_path / "mine" / name, ROOT / name
        files = [
            path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        assert [file for file in files if (ours / file).read_bytes() != (theirs / file).read_bytes()] == []
        assert ours.exists()
    again = sftkit(tmp_path, "init", "mine")
    assert again.returncode == 2
    assert "scripts is there already: name another folder" in again.stderr
    assert "\n  cd 'my own'\n" in sftkit(tmp_path, "init", "my own").stdout


def test_every_word_is_listed_and_has_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in (*SCRIPTS, "bench", "explain", "patterns", "prepare"):
        assert word in CLI_USAGE
        assert python_arguments(word)[0] == "-m" or Path(python_arguments(word)[0]).is_file()
    assert python_arguments("sft")[:2] == ["-m", "sftkit.launch"]
    assert max(map(len, CLI_USAGE.splitlines())) < 80


@pytest.mark.parametrize("words", ["init", "chain", "prepare", "data prepare"])
def test_help_of_a_word_begins_with_it_and_names_no_script(words: str) -> None:
    """In a clone too, where the script of the folder is taken."""
    done = sftkit(ROOT, *words.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: sftkit {words.split()[-1]} ")
    assert "python scripts/" not in done.stdout


def test_a_word_that_lacks_its_recipe_says_its_own_usage(tmp_path: Path) -> None:
    done = sftkit(tmp_path, "mid")
    assert (done.returncode, done.stderr) == (2, "usage: sftkit mid RECIPE [key=value ...]\n")


def test_the_version_is_told_with_that_of_torch_which_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sftkit", "--version"])
    monkeypatch.setitem(sys.modules, "torch", None)
    main()
    assert capsys.readouterr().out.startswith(f"sftkit {version('sftkit')}, torch {version('torch')}, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sfft", "x"), "sftkit sfft: no such word. Did you mean sftkit sft?"),
        (
            ("lora",),
            "sftkit lora: no such word. an adapter is a setting of a recipe: `sftkit sft recipes/qwen3_8b/lora.y",
        ),
        (("deepspeed",), "sftkit deepspeed: no such word. the launcher decides it: accelerate launch --config_file"),
        (("learning-rate",), "sftkit learning-rate: no such word. It is a setting of recipes: optim.lr"),
        (
            ("max_steps=100",),
            "recipes: train.max_steps. Set it after the recipe: `sftkit sft RECIPE train.max_steps=100`",
        ),
        (("init",), "usage: sftkit init DIR"),
        (("sft", "recipes/smoke/sft.yaml", "optim.lrr=1"), 'Did you mean "optim.lr"?'),
        (
            ("chain", "recipes/nothing"),
            "recipes/nothing: no such folder. The chain takes one with base.yaml, mid.yaml, sft.yaml, such as recipes/default",
        ),
    ],
)
def test_a_mistake_is_told_with_code_2(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = sftkit(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_last_part_of_every_setting_is_known_as_one_that_was_typed_as_a_word() -> None:
    said = [of_setting(key.rpartition(".")[2]) or "" for key in key_table()]
    assert all(
        key.startswith("adapters.") or key.replace(".N.", ".0.") in text
        for key, text in zip(key_table(), said, strict=True)
    )
    assert "or checkpoint.every or log.every" in (of_setting("every") or "")
    assert "adapter.rank=VALUE` (int > 0)" in (of_setting("rank") or "")
    assert of_setting("modell") is None


def test_no_word_that_exists_is_said_to_be_none() -> None:
    typed = {word for words in hints()["no_word"].values() for word in words.split()}
    assert typed.isdisjoint({"init", "data", *LABS, *SCRIPTS})


def test_the_script_of_this_folder_is_taken_unless_it_has_nothing_to_do_with_sftkit(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "report.py").write_text("print('of another project')")
    assert "of another project" not in sftkit(tmp_path, "report", "--help").stdout
    (tmp_path / "scripts" / "report.py").write_text("import sys, sftkit; sys.exit(f'mine: {sys.argv[1:]}')")
    done = sftkit(tmp_path, "report", "runs/x")
    assert (done.returncode, done.stderr) == (1, "mine: ['runs/x']\n")


def test_labs_are_those_of_sftkit_where_another_project_has_a_package_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "__init__.py").write_text("print('of another project')")
    done = sftkit(tmp_path, "bench", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: sftkit bench ")


@pytest.mark.slow
def test_the_wheel_holds_what_is_shipped_and_runs_elsewhere(tmp_path: Path) -> None:
    """In an environment that has its dependencies, without this checkout."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*build, str(Path(__file__).parents[2])], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    for name in SHIPPED:
        assert (site / "sftkit" / "project" / name).exists()
    env = {**os.environ, "PYTHONPATH": f"{site}:{os.environ['PYTHONPATH']}", "ACCELERATE_USE_CPU": "true"}
    for word in ("bench", "explain", "patterns", "validate"):  # of labs, which lies next to the scripts
        asked = subprocess.run([*COMMAND, word, "--help"], cwd=elsewhere, env=env, capture_output=True, text=True)
        assert asked.stdout.startswith(f"usage: sftkit {word} "), asked.stderr
    words = ["chain", "recipes/smoke", "train.max_steps=2", "log.wandb=off", "compile.enabled=false", "eval.samples=1"]
    done = subprocess.run([*COMMAND, *words], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "sftkit chat runs/smoke/sft\n" in done.stdout
    assert (elsewhere / "runs/smoke/sft/report.html").is_file()
