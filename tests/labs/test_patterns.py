"""The layouts side by side: what is counted, and a page that says what the raw file says."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, torchrun

from labs.patterns import paper
from labs.patterns.run import (
    TOPOLOGY_CASES,
    TopologyCase,
    bubble_by_formula,
    loss_difference,
    measured_bubble,
    read_pattern_results,
    terminal_tables,
    timeline_picture,
)
from sftkit.config.topology import topology_of
from sftkit.errors import ConfigError
from sftkit.launch.launch import CONFIGS

RAW: dict[str, Any] = json.loads((ROOT / "benchmarks/patterns/results/results.json").read_text())
QUICK = ("2 ddp", "2 fsdp2", "2 pp, 1f1b")


@cache
def measured(processes: int, *keys: str) -> dict[str, Any]:
    """Raw numbers of cases on so many gloo ranks, of a smaller model than the page's."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for number, names in ((1, ("1 one process",)), (processes, keys)):
            torchrun(number, "patterns_worker.py", f"{folder}/{number}.json", *names, timeout=600)
            found |= json.loads(Path(folder, f"{number}.json").read_text())["cases"]
        return {"cases": found}


def of_ranks(results: dict[str, Any], key: str, name: str) -> list[int]:
    return [rank["bytes"][name] for rank in results["cases"][key]]


def exchanged(rank: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Kind -> calls and bytes."""
    return {each["kind"]: (each["calls"], each["bytes"]) for each in rank["exchanged"]}


def check_same_losses(results: dict[str, Any], keys: list[str]) -> None:
    assert {key: loss_difference(results, key) for key in keys if loss_difference(results, key) > 1e-5} == {}


@pytest.mark.slow
def test_what_two_ranks_hold_and_exchange_is_counted_whoever_exchanges_it() -> None:
    found = measured(2, *QUICK)
    check_same_losses(found, [*QUICK])
    (whole,) = of_ranks(found, "1 one process", "weights")
    small = 32  # one exchange of four numbers: norm, wishes to stop, losses that are not finite
    ddp, fsdp2, pipeline = (found["cases"][key] for key in QUICK)
    for rank in ddp:
        assert rank["bytes"]["weights"] == rank["bytes"]["gradients"] == whole
        assert exchanged(rank)["all_reduce"][1] == whole + small
    for rank in fsdp2:
        assert rank["bytes"]["weights"] == rank["bytes"]["gradients"] == whole / 2
        assert exchanged(rank)["all_gather"] == (7, whole)  # four blocks, embedding, head, final norm
        assert exchanged(rank)["reduce_scatter"] == (7, whole)
    hidden = 128 * 32 * 4
    assert sum(of_ranks(found, QUICK[2], "weights")) == whole
    assert [exchanged(rank)["send"] for rank in pipeline] == [(4, 4 * hidden), (4, 4 * hidden)]
    assert found["cases"]["1 one process"][0]["exchanged"] == []


def test_states_are_two_moments_and_what_is_saved_depends_on_the_layout() -> None:
    found = measured(2, *QUICK)
    (alone,) = of_ranks(found, "1 one process", "activations")
    for key in QUICK:
        for weights, states in zip(*(of_ranks(found, key, name) for name in ("weights", "states")), strict=True):
            assert 2 * weights <= states <= 2 * weights + 1000  # and a count of steps for each tensor
    assert of_ranks(found, "2 ddp", "activations") == [alone] * 2  # of one micro-batch, whoever has it
    assert all(
        rank["bytes"]["most"] > rank["bytes"]["weights"] + rank["bytes"]["states"] for rank in found["cases"]["2 ddp"]
    )


def test_a_pipeline_waits_as_long_as_its_timestamps_say() -> None:
    passes = [rank["passes"] for rank in measured(2, *QUICK)["cases"]["2 pp, 1f1b"]]
    assert [len(rank) for rank in passes] == [8, 8]  # four micro-batches, forward and backward
    without_overlap = 0.5  # of the time one of two ranks waits
    assert 0.5 * bubble_by_formula(2, 4, 1) < measured_bubble(passes) < 0.8 * without_overlap


def one(micro_batch: int, forward: bool, start: float, end: float) -> dict[str, Any]:
    return {"stage": 0, "micro_batch": micro_batch, "forward": forward, "start": start, "end": end}


def test_bubble_and_picture_of_two_ranks() -> None:
    first = [one(0, True, 0.0, 1.0), one(0, False, 4.0, 6.0)]
    second = [one(0, True, 1.0, 2.0), one(0, False, 2.0, 4.0)]
    assert measured_bubble([first, second]) == pytest.approx(0.5) == bubble_by_formula(2, 1, 1)
    assert timeline_picture([first, second], columns=6) == ["rank 0  0...aa", "rank 1  .0aa.."]
    assert bubble_by_formula(4, 8, 2) == pytest.approx(3 / 19)


@pytest.mark.parametrize(("topology", "mesh"), [("pp", {}), ("fsdp2", {"dp_shard_size": 2})])
def test_on_paper_a_measured_pipeline_has_its_own_stages_and_copies_or_shards_of_them(
    topology: str, mesh: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads((ROOT / "benchmarks/h200_multi/results/again_8b.json").read_text())
    four_stages = next(row for row in found["runs"] if row["name"] == "8b-x4-1f1b")
    two = {"topology": topology, "mesh": mesh, "pipeline_layers": [19, 17]}
    four_stages |= two | {"set": four_stages["set"] | {"train.pipeline_stages": 2}}
    results = tmp_path / "benchmarks/h200_multi/results"
    results.mkdir(parents=True)
    (results / "two_stages.json").write_text(json.dumps(found))
    (tmp_path / found["plan"]).symlink_to(ROOT / found["plan"])
    (tmp_path / "benchmarks/h200_step").symlink_to(ROOT / "benchmarks/h200_step")
    monkeypatch.setattr(paper, "MEASURED", {"h200_multi": ("two_stages",)})
    _, rows = paper.beside_measured(tmp_path / "benchmarks")
    (share,) = (on_paper for name, *_, on_paper, _ in rows if name == "8b-x4-1f1b")
    # 4 micro-batches of each copy wait for one; the head is worth some layers.
    assert 70 < float(share.removesuffix("%")) < 80


def test_the_raw_file_has_every_case_and_their_losses_are_those_of_one_process() -> None:
    assert list(RAW["cases"]) == [case.key for case in TOPOLOGY_CASES]
    check_same_losses(RAW, list(RAW["cases"]))


def test_the_tables_fit_a_terminal() -> None:
    assert max(map(len, terminal_tables(RAW).splitlines())) <= 80


@pytest.mark.parametrize("case", [case for case in TOPOLOGY_CASES if case.processes > 1], ids=lambda case: case.key)
def test_a_case_is_the_topology_of_the_accelerate_config_that_it_names(case: TopologyCase) -> None:
    if "tp_size" in case.config:
        pytest.skip("sizes of the file are changed")
    stages = case.topology.stages if case.schedule else 1
    assert topology_of(CONFIGS / case.config.partition(",")[0], case.processes, stages) == case.topology


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json: no raw numbers of this command"):
        read_pattern_results(tmp_path / "other.json")


@pytest.mark.slow
def test_every_layout_of_two_and_four_ranks_computes_what_one_process_does() -> None:
    for processes in (2, 4):
        keys = [
            case.key for case in TOPOLOGY_CASES if case.processes == processes and case.key != "4 pp, interleaved"
        ]  # 8 layers
        check_same_losses(measured(processes, *keys), keys)
