"""A trace of some steps: its files, and what a GPU did in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sftkit.tracking.trace import TRACED_STEPS, Trace, busy_shares, trace_line


class Said(list[str]):
    """A runtime of one process that keeps what it was told to print."""

    device, rank = torch.device("cpu"), 0

    def print(self, text: str, level: str | None = None) -> None:
        self.append(text)


def run(first: int, run_dir: Path, steps: range) -> Said:
    rt: Any = Said()
    with Trace(first, run_dir, rt) as trace:
        paused = [trace.after(step) for step in steps if torch.zeros(3).add(step) is not None]
    assert all(seconds >= 0 for seconds in paused)
    return rt


def test_three_steps_are_recorded_and_told(tmp_path: Path) -> None:
    said = run(3, tmp_path, range(1, 9))
    found = json.loads((tmp_path / "trace" / "rank0.json").read_text())
    assert found["steps"] == [3, 5]
    assert len(said) == 1
    assert said[0].startswith("trace of steps 3 to 5: ")
    events = json.loads(gzip.decompress((tmp_path / "trace" / "rank0.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::add" for event in events) == TRACED_STEPS


@pytest.mark.parametrize(("first", "steps"), [(3, range(4, 9)), (30, range(1, 9)), (9, range(1, 9))])
def test_nothing_is_recorded_where_nothing_is_asked_for_or_its_steps_do_not_come(
    first: int, steps: range, tmp_path: Path
) -> None:
    assert run(first, tmp_path, steps) == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_amid_them_keeps_what_was_recorded(tmp_path: Path) -> None:
    run(3, tmp_path, range(1, 4))
    assert json.loads((tmp_path / "trace" / "rank0.json").read_text())["steps"] == [3, 3]


def test_a_trace_that_cannot_be_written_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file where the folder would be")
    said = run(3, tmp_path, range(1, 9))
    assert len(said) == 1
    assert said[0].startswith("log.trace_at: the trace cannot be written: ")


def test_an_error_amid_them_is_the_error_that_is_told(tmp_path: Path) -> None:
    rt: Any = SimpleNamespace(device=torch.device("cpu"), rank=0)

    def fail(trace: Trace) -> None:
        with trace:
            trace.after(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(Trace(2, tmp_path, rt))
    assert list(tmp_path.iterdir()) == []


def test_communication_beside_computing_is_told_from_that_with_nothing_beside_it() -> None:
    kernels = [
        ("gemm", 0.0, 40.0),
        ("triton_poi_fused", 30.0, 50.0),  # another stream: counted once where both run
        ("ncclDevKernel_AllGather", 20.0, 60.0),
        ("Memcpy DtoD", 70.0, 80.0),
    ]
    found = busy_shares(kernels, 100.0)
    assert found == pytest.approx({"computing": 0.6, "communicating": 0.4, "exposed": 0.1, "idle": 0.3})
    assert trace_line({"steps": [2, 4], "seconds": 0.1, "device": found}) == (
        "trace of steps 2 to 4: 0.100 s a step, the GPU computes 60.0% of it, communicates 40.0% "
        "(10.0% with nothing beside it), idles 30.0%"
    )
