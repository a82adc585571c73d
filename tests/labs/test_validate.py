"""The validation of compiling: every criterion passes on a good pair of runs and fails on its own fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from made_validation import GOOD_PROOF, PLAN, RECIPE, result_of, run, trio

from labs.validate.judge import Measured, Trio, judge, measure, scaling
from labs.validate.run import ValidationPlan, cases, check_plan, judged
from labs.validate.verdicts import html, markdown_page
from sftkit.config.load import read_config
from sftkit.errors import ConfigError
from sftkit.launch.launch import Hardware, Needs
from sftkit.models.files import Replica


def check(plan: ValidationPlan, hardware: Hardware, *words: str) -> None:
    cfg = read_config(RECIPE, words, world_size=1)
    check_plan(plan, hardware, cfg.train, cfg.data, cfg.eval)


def compiled(**changes: Any) -> dict[str, Any]:
    return {"compiled": replace(trio().compiled, **changes)}


def with_lines(**values: Any) -> dict[str, Any]:
    return compiled(lines=[line | values for line in trio().compiled.lines])


def with_proof(name: str) -> dict[str, Any]:
    return compiled(proof={"rows": [row | {"ok": row["name"] != name} for row in GOOD_PROOF["rows"]]})


PROOF = "no row of proof.json failed"


def with_failed(proof: dict[str, Any]) -> dict[str, Any]:
    row = {"name": "Same gradients as the plain model", "ok": False, "found": "difference 0.4", "expected": "below 0.1"}
    return {"rows": [*proof["rows"], row]}


def test_the_rows_of_the_proof_that_failed_are_named_with_their_run() -> None:
    found = trio(eager=replace(run(), proof=with_failed(run().proof)))
    (text,) = (v.found for v in judge(found) if v.criterion == PROOF)
    assert text == "eager: Same gradients as the plain model (difference 0.4)"


def test_a_good_pair_of_runs_passes_every_criterion() -> None:
    assert [v.criterion for v in judge(trio()) if not v.ok] == []
    assert len(judge(trio())) == 13


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda: with_proof("Only declared shapes"), ["constant batch shapes", PROOF]),
        (lambda: with_lines(**{"compile/graphs": 0}), ["compiled model detected"]),
        (lambda: {"eager": trio().compiled}, ["compiled model detected", "tokens/s ratio"]),
        (lambda: with_lines(**{"compile/recompiles": 1}), ["no recompiles in training"]),
        (lambda: with_proof("No recompiles after the warm-up"), ["no recompiles in training", PROOF]),
        (lambda: with_proof("Evaluation compiles nothing"), ["no recompiles in evaluation", PROOF]),
        (lambda: compiled(proof=with_failed(GOOD_PROOF)), [PROOF]),
        (lambda: {"eager": replace(run(), proof=with_failed(run().proof))}, [PROOF]),
        (lambda: {"eager": replace(run(), proof={})}, [PROOF]),
        (lambda: {"compiled": replace(run(125.0, compiled=True))}, ["tokens/s ratio"]),
        (lambda: compiled(summary={"compiled": True, "warm_up_seconds": 61.0}), ["first compile"]),
        (lambda: with_lines(**{"mem/peak_gib": 2.21}), ["peak memory"]),
        (lambda: {"compiled": run(150.0, 0.02, compiled=True)}, ["loss trajectory", "evaluation"]),
        (
            lambda: {"compiled": run(150.0, 0.06, compiled=True)},
            ["loss at the last step", "loss trajectory", "evaluation"],
        ),
        (lambda: compiled(results=[trio().compiled.results[0] | {"value": 0.61}]), ["evaluation"]),
        (lambda: compiled(results=[]), ["evaluation"]),
        (lambda: {"eager": replace(trio().eager, evals={}, results=[])}, ["evaluation"]),
        (lambda: {"logits": {"ok": False, "found": "norm 1 against 2"}}, ["checkpoint loads"]),
        (lambda: {"logits": {}}, ["checkpoint loads"]),
        (lambda: {"reference": run(off=0.02)}, ["loss trajectory"]),
        (lambda: {"reference": run(off=0.08)}, ["loss at the last step", "loss trajectory"]),
        (lambda: compiled(rank_errors=["rank-001.json"]), ["runs finish on all ranks"]),
        (lambda: {"eager": run(world_size=2)}, ["runs finish on all ranks"]),
    ],
)
def test_each_criterion_fails_on_its_own_fault(change: Callable[[], dict[str, Any]], failed: list[str]) -> None:
    assert [v.criterion for v in judge(trio(**change())) if not v.ok] == failed


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_speed_is_asked_of_a_backend_that_generates_no_code(backend: str) -> None:
    slow = trio(compiled=replace(run(90.0, compiled=True), backend=backend))
    (verdict,) = (v for v in judge(slow) if v.criterion == "tokens/s ratio")
    assert verdict.ok is None
    assert verdict.found.endswith(f"not judged: compile.backend {backend} generates no code")
    assert [v.ok for v in scaling([trio(), replace(slow, processes=4)])] == [None]


def test_a_run_is_measured_with_the_backend_of_its_recipe(tmp_path: Path) -> None:
    assert measure(tmp_path, None).backend is None
    (tmp_path / "config.yaml").write_text("compile:\n  backend: aot_eager\n")
    assert measure(tmp_path, None).backend == "aot_eager"


def ratio_row(one: Trio) -> str:
    return next(v.found for v in judge(one) if v.criterion == "tokens/s ratio")


def test_the_ratio_says_what_it_means_in_time() -> None:
    # 0.1 s a step against 10 / 150 s, and 30 s of compiling: 30 / (0.1 - 0.0667) = 900 steps of 0.1 s.
    words = "1,000 steps take 3.3 s less with 30 s of compiling; compiling pays from 900 steps on (1 min 30 s)"
    assert words in ratio_row(trio())
    assert "1,000 steps take 30 s longer" in ratio_row(trio(eager=run(150.0)))
    assert "compiling never pays" in ratio_row(trio(eager=run(150.0)))
    # What an eager run warms up too is not the compiler's: 18 of the 30 s are left, or none.
    slow, slower = (replace(run(), summary={"compiled": False, "warm_up_seconds": seconds}) for seconds in (12.0, 40.0))
    assert "with 18 s of compiling; compiling pays from 540 steps on" in ratio_row(trio(eager=slow))
    assert "with 0.0 s of compiling; compiling pays from 1 steps on" in ratio_row(trio(eager=slower))
    assert "compiling" not in ratio_row(trio(eager=replace(run(), lines=without_seconds(run()))))


def without_seconds(run: Measured) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "perf/step_seconds"} for line in run.lines]


def test_the_time_is_in_the_pages_and_in_the_data() -> None:
    result = judged(result_of(trio()))
    assert "pays from 900 steps on" in html(result)
    assert "pays from 900 steps on" in markdown_page(result)
    (found,) = result["times"]
    assert (found["layout"], found["processes"], found["steps"]) == ("packed", 1, 900)
    assert found["minutes"] == pytest.approx(1.5)
    assert found["saved_seconds_per_1000_steps"] == pytest.approx(100 - 1000 * 10 / 150 - 30)
    assert judged(result_of(trio(), error="out of memory"))["times"] == []


def test_losses_are_compared_with_the_reference_and_with_the_eager_run_where_there_is_none() -> None:
    with_it = {v.criterion: v.found for v in judge(trio())}
    assert "(reference)" in with_it["loss at the last step"]
    assert with_it["loss trajectory"].startswith("from reference ")
    without = trio(reference=None, eager=run(off=0.08))
    failed = [v.criterion for v in judge(without) if not v.ok]
    assert "loss at the last step" in failed
    assert "(eager)" in {v.criterion: v.found for v in judge(without)}["loss at the last step"]


def test_a_reference_that_failed_fails_the_two_rows_of_the_losses_and_says_why() -> None:
    failed = [v for v in judge(trio(reference=replace(run(), error="killed after 600 s"))) if not v.ok]
    assert [v.criterion for v in failed] == ["loss at the last step", "loss trajectory"]
    assert {v.found for v in failed} == {"not measured: reference: killed after 600 s"}


def test_a_model_whose_fp32_states_do_not_fit_a_gpu_has_no_reference() -> None:
    cfg = read_config(RECIPE, [], world_size=1)
    for gib, expected in ((40, True), (10, False)):
        hardware = Hardware(1, 2, "GPU", gib * 2**30)
        kinds = [case.kind for case in cases(PLAN, cfg, hardware, Needs(Replica(10**9, "auto", 0)), Path("out"))]
        assert ("reference" in kinds) is expected


def test_the_reference_is_left_out_on_demand() -> None:
    every = cases(
        replace(PLAN, reference=False), read_config(RECIPE, [], world_size=1), Hardware(0, 2), Needs(), Path("out")
    )
    assert [case.kind for case in every] == ["eager", "eager, other seed", "compiled"]


def test_a_run_that_failed_fails_all_that_needs_it_and_says_why() -> None:
    verdicts = judge(trio(**compiled(error="ended with code 1: out of memory", lines=[], summary={}, proof={})))
    assert not any(v.ok for v in verdicts)
    assert "out of memory" in verdicts[0].found


def test_the_ratio_on_several_processes_must_be_similar() -> None:
    assert [v.ok for v in scaling([trio(), trio(4)])] == [True]
    assert [v.ok for v in scaling([trio(), trio(4, compiled=run(118.0, compiled=True, world_size=4))])] == [False]


def test_the_pages_show_each_verdict_and_escape_what_runs_say(tmp_path: Path) -> None:
    result = judged(result_of(trio(), error="<script>alert(1)</script>"))
    page, text = html(result), markdown_page(result)
    assert "<script>" not in page
    assert "FAIL: 13 of 13 criteria failed" in page
    assert text.count("| FAIL |") == 13
    good = judged(result_of(trio()))
    assert "PASS: 13 of 13 criteria passed" in html(good)
    assert markdown_page(good).count("| PASS |") == 13


@pytest.mark.slow
def test_earlier_runs_are_judged_again_from_their_json_alone(tmp_path: Path) -> None:
    path = tmp_path / "validation.json"
    path.write_text(json.dumps(result_of(trio())))
    words = [sys.executable, "scripts/validate_compile.py", "--judge", str(path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "PASS: 13 of 13 criteria passed, 1 not checked"
    assert json.loads(path.read_text())["passed"] is True
    assert "PASS: 13 of 13" in (tmp_path / "validation.html").read_text()
    path.write_text(json.dumps(result_of(trio(**with_lines(**{"compile/recompiles": 1})))))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAIL: 1 of 13 criteria failed, 1 not checked: no recompiles in training"
    path.write_text("{}")
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 2


def test_a_run_that_is_missing_fails_its_criteria() -> None:
    result = result_of(trio())
    del result["runs"][2]
    assert not any(verdict["ok"] for verdict in judged(result)["verdicts"])


def test_a_plan_runs_a_second_seed_once_and_changes_only_what_it_compares() -> None:
    cfg = read_config(RECIPE, [], world_size=1)
    plan = replace(PLAN, layouts=("packed", "bucketed"), processes=(1, 2))
    every = cases(plan, cfg, Hardware(0, 2), Needs(), Path("out"))
    assert [case.kind for case in every] == [
        "eager",
        "eager, other seed",
        "compiled",
        "reference",
        "eager",
        "compiled",
    ] * 2
    eager, compiled_one = ({word for word in case.command if "=" in word} for case in (every[0], every[2]))
    assert eager ^ compiled_one == {
        "run.dir=out/runs/packed-1-eager",
        "run.dir=out/runs/packed-1-compiled",
        "compile.enabled=false",
        "compile.enabled=true",
        "compile.on_recompile=warn",
    }
    assert len({case.environment["TORCHINDUCTOR_CACHE_DIR"] for case in every}) == len(every)
    reference = {word for word in every[3].command if "=" in word}
    assert reference - eager == {
        *(
            "run.dir=out/runs/packed-1-reference",
            "train.engine=reference",
            "train.precision=fp32",
            "train.memory=speed",
        ),
        *("optim.name=adamw", "attention.backend=auto"),
    }
    muon = read_config(RECIPE, ["optim.name=muon"], world_size=1)
    assert "reference" not in [case.kind for case in cases(plan, muon, Hardware(0, 2), Needs(), Path("out"))]
    for case in every:  # every one of them is a recipe that can be run
        read_config(RECIPE, [w for w in case.command if "=" in w and not w.startswith("from")], world_size=1)


def test_eager_runs_of_a_graph_recipe_have_no_passes_and_its_reference_no_graph() -> None:
    words = ["train.engine=graph", "graph.passes=[block_bucketing]", "graph.dump=true"]
    cfg = read_config(RECIPE, words, world_size=1)
    every = cases(replace(PLAN, overrides=tuple(words)), cfg, Hardware(0, 2), Needs(), Path("out"))
    read = [
        (case.kind, read_config(RECIPE, [w for w in case.command if "=" in w], world_size=1))
        for case in every
        if case.processes == 1
    ]
    assert {(kind, one.train.engine, one.graph.passes) for kind, one in read} == {
        ("eager", "graph", ()),
        ("eager, other seed", "graph", ()),
        ("compiled", "graph", ("block_bucketing",)),
        ("reference", "reference", ()),
    }


def test_the_reference_of_a_pipeline_has_no_stages() -> None:
    words = ["train.engine=pipeline", "train.pipeline_schedule=gpipe", "train.pipeline_layers=[1,1]"]
    cfg = read_config(RECIPE, words, world_size=1)
    every = cases(replace(PLAN, overrides=tuple(words)), cfg, Hardware(0, 2), Needs(), Path("out"))
    (reference,) = (case for case in every if case.kind == "reference")
    assert read_config(RECIPE, [w for w in reference.command if "=" in w], world_size=1).train.engine == "reference"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"warm_up": 4}, "--warm-up must be 5 or more"),
        ({"steps": 20}, "fewer than three windows"),
        ({"layouts": ("pakced",)}, '"pakced" is not one of packed'),
        ({"processes": (1, 3)}, "3 do not divide train.global_batch_size"),
        ({"script": "scripts/none.py"}, "no such file"),
    ],
)
def test_a_plan_that_cannot_be_judged_is_refused_before_anything_runs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(replace(PLAN, **change), Hardware(0, 2))


def test_float8_which_needs_compiling_is_refused() -> None:
    with pytest.raises(ConfigError, match="the eager baseline cannot train in float8"):
        check(PLAN, Hardware(0, 2), "train.fp8=rowwise", "train.precision=bf16")


def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="4, but 2 GPUs are visible"):
        check(replace(PLAN, processes=(4,)), Hardware(2, 2))


def test_a_run_folder_that_was_cut_short_is_measured_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "train/loss": 1.0}\n{"step": 10, "tra')
    found = measure(tmp_path, "killed")
    assert (found.lines, found.error, found.evals) == ([{"step": 5, "train/loss": 1.0}], "killed", {})


def test_the_command_refuses_a_wrong_recipe_with_exit_code_2() -> None:
    words = [sys.executable, "scripts/validate_compile.py", "recipes/smoke/none.yaml"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "recipes/smoke/none.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_whole_validation_runs_on_a_cpu_with_one_and_two_processes(tmp_path: Path) -> None:
    words = [sys.executable, "scripts/validate_compile.py", RECIPE, "--script", "scripts/base_train.py"]
    words += ["--steps", "30", "--processes", "1", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    result = json.loads((tmp_path / "out/validation.json").read_text())
    by_name = {(v["processes"], v["criterion"]): v for v in result["verdicts"]}
    about_speed = {"tokens/s ratio", "ratio on several processes", "first compile", "peak memory"}
    failed = [key for key, v in by_name.items() if v["ok"] is False and key[1] not in about_speed]
    assert failed == [], done.stdout
    assert done.returncode == (0 if result["passed"] else 1)
