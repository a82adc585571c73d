"""A folder that says what is in it is loaded only if that is so, and each of its files is read for it once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sftkit.errors import ConfigError
from sftkit.rundir import files as manifest
from sftkit.rundir.files import check_loadable
from sftkit.rundir.names import MANIFEST, RECIPE, TRAINING_STATE

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    RECIPE: b"run: {}\n",
    TRAINING_STATE: b"{}",
    "training_state/optimizer/__0_0.distcp": b"states",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step directory; the cache is beside it, and files count as settled at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(manifest, "SETTLED_SECONDS", 0.0)
    return make(tmp_path / "run" / "step-000020", FILES)


def make(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    listed = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in files.items()}
    (folder / MANIFEST).write_text(json.dumps({"step": 20, "files": listed}))
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to the end."""
    names: list[str] = []
    original = manifest._sha256

    def noted(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(manifest, "_sha256", noted)
    return names


def flip(path: Path) -> str:
    """Flip a bit in place. Returns the hash of what is there now."""
    with path.open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_are_read_once_and_again_when_they_have_changed(folder: Path, read: list[str]) -> None:
    for _ in range(3):
        check_loadable(str(folder))
    assert sorted(read) == ["config.json", "model.safetensors", "recipe.yaml", "state.json"]
    (folder / "config.json").write_bytes(b"{}")  # the same again
    check_loadable(str(folder))
    assert read[4:] == ["config.json"]


@pytest.mark.parametrize("mtime", ["moves", "is put back"])
def test_a_flipped_bit_is_refused_with_file_both_hashes_and_what_to_do(folder: Path, mtime: str) -> None:
    check_loadable(str(folder))  # what is remembered of the good file does not make the bad one good
    path = folder / "model.safetensors"
    before = path.stat()
    found = flip(path)
    if mtime == "is put back":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    earlier = make(folder.with_name("step-000010"), FILES)
    for _ in range(2):  # remembered, it stays bad
        with pytest.raises(ConfigError) as refused:
            check_loadable(str(folder))
        text = str(refused.value)
        expected = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
        assert text.startswith(f"{path}: content does not match its sha256: {found}, and {MANIFEST} says {expected}")
        assert f"take another checkpoint, such as {earlier}" in text
        assert f"remove {folder / MANIFEST}" in text
    path.write_bytes(FILES["model.safetensors"])
    check_loadable(str(folder))


def test_a_file_that_is_cut_or_gone_is_refused_without_reading_any(folder: Path, read: list[str]) -> None:
    os.truncate(folder / "model.safetensors", 10)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not 7000 bytes, as manifest\.json says, but 10\. "):
        check_loadable(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: missing, and manifest\.json lists it"):
        check_loadable(str(folder))
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match=r"no readable manifest\.json"):
        check_loadable(str(folder))
    assert read == []


def test_what_only_a_resume_loads_may_be_damaged_or_deleted(folder: Path) -> None:
    flip(folder / "training_state/optimizer/__0_0.distcp")
    check_loadable(str(folder))
    flip(folder / TRAINING_STATE)
    with pytest.raises(ConfigError, match=r"state\.json"):
        check_loadable(str(folder))
    for path in (folder / "training_state/optimizer/__0_0.distcp", folder / TRAINING_STATE):
        path.unlink()
    (folder / "training_state/optimizer").rmdir()
    (folder / "training_state").rmdir()
    check_loadable(str(folder))


def test_hub_names_and_folders_of_another_origin_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"name": "an app"}))
    check_loadable(str(tmp_path))
    check_loadable(str(tmp_path / "none"))
    check_loadable("Qwen/Qwen3-0.6B")


def test_a_file_that_was_written_a_moment_ago_is_not_remembered(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SETTLED_SECONDS", 3600.0)
    check_loadable(str(folder))
    check_loadable(str(folder))
    assert len(read) == 8


@pytest.mark.parametrize("cache", ["cannot be made", "is garbage", "has another form"])
def test_a_broken_cache_costs_reading_and_hides_nothing(folder: Path, cache: str) -> None:
    hashes = Path(".cache/sftkit/hashes")
    if cache == "cannot be made":
        Path(".cache").write_text("a file")
    else:
        check_loadable(str(folder))
        (kept,) = hashes.glob("*.json")
        kept.write_text("\0" if cache == "is garbage" else json.dumps({"files": [["a", "b"], 3]}))
    check_loadable(str(folder))
    flip(folder / "config.json")
    with pytest.raises(ConfigError, match="content does not match"):
        check_loadable(str(folder))


ASK = """
import sys, time
from pathlib import Path
from sftkit.rundir import files as manifest
manifest.SETTLED_SECONDS = 0.0
read, original = [], manifest._sha256
manifest._sha256 = lambda path: (read.append(path.name), original(path))[1]
Path(sys.argv[2]).touch()
while len(list(Path("ready").iterdir())) < 4:
    time.sleep(0.01)
manifest.check_loadable(sys.argv[1])
print(len(read))
"""


def test_of_several_processes_one_reads_the_files(folder: Path, tmp_path: Path) -> None:
    large = make(tmp_path / "run" / "step-000030", FILES | {"model.safetensors": os.urandom(50_000_000)})
    (tmp_path / "ready").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(manifest.__file__).parents[2])}
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, str(large), f"ready/{number}"],
            env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    told = [process.communicate(timeout=120)[0].strip() for process in asking]
    assert sorted(told) == ["0", "0", "0", "4"]
