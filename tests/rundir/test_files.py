"""Files that several processes may write are whole, and open to those whom the umask lets in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sftkit.compile import cache as compile_cache
from sftkit.data.store.shards import RowSpan, Store
from sftkit.data.store.writing import TokenizedRows, write_shard
from sftkit.rundir import lock
from sftkit.rundir.files import replace_shared


@pytest.fixture
def of_a_group() -> object:
    before = os.umask(0o007)
    yield
    os.umask(before)


def test_what_other_processes_may_read_has_the_mode_that_the_umask_leaves(tmp_path: Path, of_a_group: object) -> None:
    write_shard(Store(tmp_path / "data" / "key", 9), RowSpan(0, 1), iter([TokenizedRows()]), "a", on_disk=True)
    compile_cache._write(str(tmp_path / "compile" / "key.compiled"), b"code")
    replace_shared(tmp_path / "beat", "text")
    held = lock.take_lock(tmp_path / "run")
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    held.release()
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o770}
    # Nobody else may change code that this user runs.
    assert found.pop(tmp_path / "compile" / "key.compiled") == 0o640
    assert {mode for path, mode in found.items() if path.is_file()} == {0o660}
    assert not list(tmp_path.rglob("*.tmp"))
