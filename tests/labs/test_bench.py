"""The bench: plans, rows, reports, failures; and the whole of it once with a tiny model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from helpers import cpu_runtime, flat
from transformers import AutoConfig, AutoModelForCausalLM

from labs.bench import machine, worker
from labs.bench.plan import (
    DataPlan,
    LognormalLengths,
    Parallelism,
    Processes,
    Steps,
    expanded_runs,
    read_job,
    read_jobs,
    read_plan,
    save_job,
    slug,
)
from labs.bench.run import (
    add_scaling,
    bench,
    graphs_of,
    main,
    measured_row,
    over_ceiling,
    over_ranks,
    read_bench_results,
    spread,
)
from labs.bench.worker import ModelSpec, new_model, rows_in_order, synthetic_documents
from labs.jobs import bench_command, first_failure, run_logged
from labs.tables import calls_line, graph_table, loss_table, machine_lines, markdown_report, speed_table
from sftkit.config.schema import DataConfig
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import make_layout
from sftkit.data.batches.tree import trees_of
from sftkit.errors import ConfigError
from sftkit.models.experts import EXPERTS_IMPLEMENTATION
from sftkit.ops.nf4 import matrix_of, quantize
from sftkit.rundir.names import graph_file

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def write_plan(folder: Path, **changes: Any) -> Path:
    """A plan of one run, or with some parts replaced; JSON is YAML."""
    plan = {
        "data": {"documents": {"count": 50, "median": 24, "mean": 32, "cap": 64}, "row_length": 128},
        "steps": {"total": 6, "warm_up": 2, "window": 2},
        "models": {"tiny": TINY},
        "defaults": {"train": {"global_batch_size": 2, "precision": "fp32"}},
        "runs": [{"name": "first", "model": "tiny"}],
    }
    path = folder / "plan.yaml"
    path.write_text(json.dumps({**plan, **changes}))
    return path


def problems(path: Path, only: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_jobs(path, path.parent / "out", only)
    return str(caught.value).splitlines()


def write_worker(folder: Path, body: str, name: str = "worker.py") -> str:
    """A worker script that writes no row unless `body` does: `folder` is that of its job."""
    head = "import json, os, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1]).parent\n"
    (folder / name).write_text(head + body)
    return name


def row(name: str, speeds: list[float], losses: dict[str, Any], **changes: Any) -> dict[str, Any]:
    lines = [
        {
            "step": i + 1,
            "train/loss": 0.0,
            "train/grad_norm": 1.0,
            "perf/tok_per_sec": speed,
            "perf/target_tok_per_sec": speed / 2,
            "perf/mfu": None,
            "perf/step_seconds": 0.5,
            "perf/data_wait_pct": 1.0,
            "data/padding_pct": 2.0,
            "mem/peak_gib": 3.0,
            "compile/recompiles": 0,
        }
        for i, speed in enumerate(speeds)
    ]
    values = {
        **measured_row(lines, Steps(total=len(speeds), warm_up=0, window=1)),
        "losses": losses,
        "name": name,
        "baseline": None,
        "same_loss_as": None,
        "reserved_memory_gib": None,
        "first_step_seconds": 1.0,
        "mfu_of_ceiling": None,
        "wall_seconds": 2.0,
        "error": None,
    }
    return {**values, **changes}


# ---- plans ----


def test_every_wrong_key_and_value_of_a_plan_is_reported_with_its_place_and_a_suggestion(tmp_path: Path) -> None:
    path = write_plan(tmp_path, stpes={}, runs=[{"name": "a", "modle": "tiny"}], steps={"total": 6, "warm_up": -1})
    found = problems(path)
    assert f'{path}: stpes: is not a known key. Did you mean "steps"?' in found
    assert f'{path}: runs.0.modle: is not a known key. Did you mean "model"?' in found
    assert f"{path}: runs.0.model: is required" in found
    assert f"{path}: steps.warm_up: must be at least 0, not -1" in found
    assert f"{path}: steps.window: is required" in found


def test_settings_of_runs_are_checked_as_those_of_recipes_and_name_the_run(tmp_path: Path) -> None:
    runs = [{"name": "a", "model": "tiny", "set": {"loss.chunk_token": 8}}]
    found = problems(write_plan(tmp_path, runs=runs, defaults={"optim": {"lr": -1.0}}))
    assert any(
        p.endswith('run a: set.loss.chunk_token: is not a known key. Did you mean "loss.chunk_tokens"?') for p in found
    )
    assert any("defaults.optim.lr: must be greater than 0" in p for p in found)


def test_what_the_bench_fills_in_cannot_be_set(tmp_path: Path) -> None:
    runs = [{"name": "a", "model": "tiny", "set": {"train.max_steps": 3}}]
    assert "train.max_steps: is not set here" in problems(write_plan(tmp_path, runs=runs))[0]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"model": "big"}, '"big" is not one of tiny'),
        ({"model": "tiny", "baseline": "frist"}, '"frist" is not a run. Did you mean "first"?'),
        ({"model": "tiny", "warm_from": "second"}, '"second" is not an earlier run'),
        ({"model": "tiny", "steps": {"total": 7, "warm_up": 2, "window": 2}}, "multiples of window"),
        ({"model": "tiny", "steps": {"total": 4, "warm_up": 4, "window": 2}}, "one window is timed"),
        ({"model": "tiny", "worker": "gone.py"}, "no such file"),
        ({"model": "tiny", "name": "first."}, 'would share the folder "first"'),
        ({"model": "tiny", "processes": 2}, "runs.1.processes: 2 need a topology: one of cp, cpu, cpu_ddp"),
        (
            {"model": "tiny", "topology": "cpu_dpp"},
            'runs.1.topology: "cpu_dpp" is not a file of accelerate_configs. Did you',
        ),
        ({"model": "tiny", "parallelism": {"tp_size": 2}}, "runs.1.parallelism: needs a topology"),
        (
            {"model": "tiny", "processes": 2, "topology": "cpu_ddp", "parallelism": {"tp_size": 2}},
            "runs.1.parallelism: cpu_ddp has no sizes: name a topology whose distributed_type is FSDP, not MULTI_GPU",
        ),
    ],
)
def test_a_run_that_fits_nothing_is_refused(tmp_path: Path, run: dict[str, Any], said: str) -> None:
    runs = [{"name": "first", "model": "tiny"}, {"name": "second", **run}]
    assert said in "\n".join(problems(write_plan(tmp_path, runs=runs)))


def test_only_names_runs_and_what_they_are_warmed_from(tmp_path: Path) -> None:
    runs = [{"name": "first", "model": "tiny"}, {"name": "second", "model": "tiny", "warm_from": "first"}]
    path = write_plan(tmp_path, runs=runs)
    assert [job.name for job in read_jobs(path, tmp_path, ["first"])] == ["first"]
    assert problems(path, ["second"]) == ["--only: second needs first too"]
    assert 'Did you mean "first"?' in problems(path, ["frist"])[0]


def test_ablations_change_the_settings_of_their_run_and_compare_with_it(tmp_path: Path) -> None:
    runs = [{"name": "first", "model": "tiny", "set": {"optim.lr": 0.5}, "environment": {"A": "1"}}]
    each = {"eager": {"compile.enabled": False}, "lr": {"optim.lr": 0.25}}
    jobs = read_jobs(write_plan(tmp_path, runs=runs, ablations={"of": "first", "each": each}), tmp_path)
    assert [(j.name, j.baseline, j.environment) for j in jobs[1:]] == [
        ("first: eager", "first", {"A": "1"}),
        ("first: lr", "first", {"A": "1"}),
    ]
    assert [(j.config.optim.lr, j.config.compile.enabled) for j in jobs] == [(0.5, True), (0.5, False), (0.25, True)]
    assert problems(write_plan(tmp_path, ablations={"of": "x", "each": {}})) == [
        f'{tmp_path}/plan.yaml: ablations.of: "x" is not a run. Runs: first'
    ]


def test_row_length_goes_to_packed_runs_alone_and_a_job_survives_its_file(tmp_path: Path) -> None:
    runs = [
        {"name": "packed", "model": "tiny"},
        {"name": "fixed", "model": "tiny", "set": {"data.layout": "fixed"}},
        {"name": "short", "model": "tiny", "set": {"data.row_length": 64}},
    ]
    jobs = read_jobs(write_plan(tmp_path, runs=runs), tmp_path)
    assert [job.config.data.row_length for job in jobs] == [128, None, 64]
    assert {(job.config.data.max_length, job.config.train.max_steps, job.config.log.every) for job in jobs} == {
        (64, 6, 2)
    }
    assert read_job(save_job(jobs[1])) == jobs[1]


PLANS = [path for path in sorted((ROOT / "benchmarks").rglob("*.yaml")) if "\nruns:" in path.read_text()]


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_plans_of_the_repository_are_valid_and_extends_works(plan: Path) -> None:
    jobs = read_jobs(plan, Path("out"))
    assert len(jobs) == len(expanded_runs(read_plan(plan))) >= 2
    assert len({slug(job.name) for job in jobs}) == len(jobs)


# ---- processes ----


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate_configs with one topology, of two sizes."""
    config = {"distributed_type": "FSDP", "mixed_precision": "no", "use_cpu": True, "num_processes": 2}
    config["parallelism_config"] = {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_backend": "torch"}
    (tmp_path / "sharded.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("labs.bench.plan.CONFIGS", tmp_path)


@pytest.mark.usefixtures("sharded")
def test_a_topologys_config_is_written_beside_the_job_with_the_runs_sizes_and_read_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.config import load_config_from_file

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sizes = Parallelism(dp_replicate_size=2, tp_size=2)
    words, environment = bench_command(
        Processes(count=4, topology="sharded", parallelism=sizes), None, tmp_path / "job.json"
    )
    read = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (read.num_processes, read.main_process_port, read.distributed_type) == (4, 0, "FSDP")
    named = {key.removeprefix("parallelism_config_"): value for key, value in read.parallelism_config.items()}
    assert named == {"dp_replicate_size": 2, "dp_shard_size": 1, "tp_size": 2, "cp_size": 1, "cp_backend": "torch"}
    assert words[-3:] == ["-m", "labs.bench.worker", str(tmp_path / "job.json")]
    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert int(environment["OMP_NUM_THREADS"]) >= 1


@pytest.mark.usefixtures("sharded")
def test_the_sizes_of_a_mesh_multiply_to_the_processes_and_those_that_share_rows_count_as_one(tmp_path: Path) -> None:
    run = {"name": "a", "model": "tiny", "topology": "sharded"}
    path = write_plan(tmp_path, runs=[{**run, "processes": 4}])
    assert "runs.0.parallelism: dp_shard_size 2 is 2, but processes is 4" in problems(path)[0]
    mesh = {"dp_shard_size": 2, "tp_size": 2}
    (job,) = read_jobs(write_plan(tmp_path, runs=[{**run, "processes": 4, "parallelism": mesh}]), tmp_path)
    assert (
        job.started.row_topology(job.config.train).row_ranks == 2
    )  # a global batch of 2 rows is shared by 2, not by 4
    assert read_job(save_job(job)) == job
    bad = {**run, "processes": 4, "parallelism": {"tp_siez": 2}}
    assert 'Did you mean "tp_size"?' in "\n".join(problems(write_plan(tmp_path, runs=[bad])))


def test_a_run_that_takes_too_long_is_killed_with_all_that_descends_from_it(tmp_path: Path) -> None:
    asleep = f"import time; time.sleep(60)  # {tmp_path}"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asleep!r}])"
    code = (
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True).pid, flush=True)\n"
        "time.sleep(60)"
    )
    started = time.perf_counter()
    assert run_logged([sys.executable, "-c", code], tmp_path / "log", {}, 3) == "not done after 3 s"
    assert time.perf_counter() - started < 20
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))
    assert not [p for p in psutil.process_iter(["cmdline"]) if {child, asleep} & {*(p.info["cmdline"] or [])}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_whoever_compares_runs_ends_the_one_at_work(tmp_path: Path, number: int) -> None:
    at_work = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    call = f"run_logged([sys.executable, '-c', {at_work!r}], Path({str(tmp_path / 'log')!r}), {{}}, 600)"
    code = f"import sys; from pathlib import Path; from labs.jobs import run_logged; {call}"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_first_error_of_a_log_is_the_reason_and_a_killed_rank_comes_before_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("hi\n[rank1]: ValueError: no\nRuntimeError: peer left\ntorch.x.ChildFailedError: \n=====\n")
    assert first_failure(log, None) == "ValueError: no"
    assert first_failure(log, "rank 1: ValueError: no") == "rank 1: ValueError: no"
    cause = "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
    log.write_text("RuntimeError: peer left\n" + cause)
    assert first_failure(log, None) == "rank 1 was killed by signal 9; RuntimeError: peer left"
    log.write_text("quiet\n" + cause)
    assert first_failure(log, None) == "rank 1 was killed by signal 9"


# ---- data and weights ----


def data_plan(**changes: Any) -> DataPlan:
    lengths = LognormalLengths(count=4000, median=270, mean=400, cap=2048)
    return DataPlan(**{"documents": lengths, "row_length": 4096, "target_share": 0.6, **changes})


def test_documents_are_lognormal_end_with_their_targets_and_come_from_the_seed_alone() -> None:
    examples = synthetic_documents(data_plan(), vocab_size=1000)
    assert np.median(examples.lengths) == pytest.approx(270, rel=0.05)
    assert examples.lengths.mean() == pytest.approx(390, rel=0.05)  # 400 but for the cap
    assert (examples.lengths.min(), examples.lengths.max()) == (pytest.approx(14, abs=10), 2048)
    for i in (0, 1, 3999):
        targets = examples[i].is_target
        number = max(round(0.6 * examples.lengths[i]), 1)
        assert targets.tolist() == [False] * (len(targets) - number) + [True] * number
    again = synthetic_documents(data_plan(), vocab_size=1000)
    assert np.array_equal(flat(examples).ids, flat(again).ids)
    other = synthetic_documents(data_plan(seed=1), vocab_size=1000)
    assert not np.array_equal(flat(examples).ids[:100], flat(other).ids[:100])


def test_documents_have_the_lengths_of_a_file_and_end_with_as_many_targets(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps({"positions": [5, 9, 3], "targets": [2, 9, 1]}))
    path = write_plan(tmp_path, data={"lengths": "lengths.json", "row_length": 16})
    (job, *_) = read_jobs(path, tmp_path / "out")
    assert job.config.data.max_length == 9
    examples = synthetic_documents(job.data, vocab_size=100)
    assert (examples.lengths.tolist(), examples.num_targets.tolist()) == ([5, 9, 3], [2, 9, 1])
    assert examples[0].is_target.tolist() == [False] * 4 + [True] * 2


def test_a_peer_is_given_the_rows_of_the_loop_in_their_order(tmp_path: Path) -> None:
    documents = {"count": 60, "median": 6, "mean": 7, "cap": 12}
    path = write_plan(tmp_path, data={"documents": documents, "row_length": 32})
    (job, *_) = read_jobs(path, tmp_path / "out")
    examples = synthetic_documents(job.data, vocab_size=100)
    rows = rows_in_order(job, examples)
    config = job.config
    layout = make_layout(config.data, config.train, examples.lengths, int(config.data.max_length or 0))
    steps = Batches(StepDataset(examples, layout), seed=config.run.seed).steps(0, job.steps.total)
    trained = [row for step in steps for batch in step.micro_batches for row in batch.inputs["input_ids"]]
    assert len(rows) == len(trained) >= job.steps.total
    for documents_of_row, row in zip(rows, trained, strict=True):
        ids = torch.cat([torch.from_numpy(examples[i].ids[:-1].astype(np.int64)) for i in documents_of_row])
        assert torch.equal(row[: len(ids)], ids)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("[1]", "must be a JSON object with the lists"),
        ('{"positions": [4]}', "'targets'"),
        ('{"positions": [4, 5], "targets": [1]}', "shorter"),
        ('{"positions": [4], "targets": [5]}', "at most these"),
        ('{"positions": [], "targets": []}', "whole numbers"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_used_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "lengths.json").write_text(text)
    path = write_plan(tmp_path, data={"lengths": "lengths.json", "row_length": 16})
    assert any(said in problem for problem in problems(path)), problems(path)


def test_lengths_are_of_a_file_or_drawn_and_not_both(tmp_path: Path) -> None:
    both = {"lengths": "x.json", "documents": {"count": 4, "median": 6, "mean": 7, "cap": 8}, "row_length": 16}
    for data in (both, {"row_length": 16}):
        assert any(
            "one of documents, lengths, conversations and stage" in p for p in problems(write_plan(tmp_path, data=data))
        )
    share = {"lengths": "x.json", "row_length": 16, "target_share": 0.5}
    assert any("data.target_share" in problem for problem in problems(write_plan(tmp_path, data=share)))


def test_the_conversations_of_the_bench_of_trees_share_what_the_names_of_their_shapes_say() -> None:
    data = read_plan(Path("benchmarks/tree_rows/plan.yaml")).data
    assert data.conversations is not None
    for name, sizes in data.conversations.items():
        examples = synthetic_documents(replace(data, conversations={name: sizes}), vocab_size=1000)
        trees = trees_of(examples, DataConfig(train=()), data.row_length)
        assert len(trees) == sizes.count
        assert trees.expanded.sum() / trees.lengths.sum() == pytest.approx(float(name.removeprefix("x")), rel=0.05)


def test_with_share_1_all_tokens_but_the_first_are_targets() -> None:
    examples = synthetic_documents(data_plan(target_share=1.0), vocab_size=1000)
    assert np.array_equal(examples.num_targets, examples.lengths)
    assert not flat(examples).is_target[flat(examples).offsets[:-1]].any()


def test_tokens_follow_zipfs_law() -> None:
    counts = np.sort(np.bincount(flat(synthetic_documents(data_plan(), vocab_size=1000)).ids, minlength=1000))[::-1]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert counts[0] / counts.sum() == pytest.approx(1 / sum(1 / r for r in range(1, 1001)), rel=0.02)


def test_weights_in_bf16_are_those_in_fp32_rounded_and_buffers_stay() -> None:
    full, rounded = (new_model(ModelSpec(TINY, 3, precision), torch.device("cpu")) for precision in ("fp32", "bf16"))
    for a, b in zip(full.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
    assert all(b.dtype == torch.float32 for b in rounded.buffers() if b.is_floating_point())


def test_a_model_in_nf4_has_the_weights_of_the_dense_one_quantized_and_one_block_of_them_is_dense_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, blocks = torch.device("cpu"), 3
    fields = {**TINY, "num_hidden_layers": blocks}
    dense = new_model(ModelSpec(fields, 3, "bf16"), device)
    made: list[tuple[weakref.ref[Any], ...]] = []
    fill = worker._in_fp32

    @contextmanager
    def watched(part: Any, *args: Any) -> Iterator[None]:
        with fill(part, *args):
            alive = [block for block in made if any(one() is not None for one in block)]
            assert len(alive) <= 1, "the embedding and the head, which are drawn last"
            made.append(tuple(weakref.ref(p) for p in part.parameters() if p.dtype == torch.float32))
            yield

    monkeypatch.setattr(worker, "_in_fp32", watched)
    quantized = new_model(ModelSpec(fields, 3, "bf16", nf4=True), device)
    assert len(made) == blocks + 1
    layers = 0
    for name, layer in dense.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            matrix = matrix_of(quantized.get_submodule(name))
            assert matrix is not None
            assert all(map(torch.equal, matrix, quantize(layer.weight)))
            layers += 1
    assert layers == 7 * blocks
    others = {name: p for name, p in quantized.named_parameters() if p.is_floating_point()}
    assert others
    assert all(torch.equal(p, dense.get_parameter(name)) for name, p in others.items())


def test_experts_of_a_bench_are_computed_as_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    (job,) = read_jobs(write_plan(tmp_path, models={"tiny": {**TINY, **experts}}), tmp_path / "out")
    trained = []
    monkeypatch.setattr(worker, "make_engine", lambda *given: trained.append(given[-1].orig_model) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.measured_run(job, cpu_runtime())
    assert trained[0].config._experts_implementation == EXPERTS_IMPLEMENTATION


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "llama"])
def test_numbers_that_are_drawn_block_by_block_are_distributed_as_transformers_draws_them(model_type: str) -> None:
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101} if model_type == "gpt2" else TINY
    fields = {**fields, "model_type": model_type}
    found = new_model(ModelSpec(fields, 3, "fp32"), torch.device("cpu"))
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(fields)), dtype=torch.float32)
    ours, theirs = ({name: p.detach() for name, p in model.named_parameters()} for model in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        assert float(p.std()) == pytest.approx(float(theirs[name].std()), rel=0.15), name
        assert float(p.mean()) == pytest.approx(float(theirs[name].mean()), abs=0.02), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(found.get_buffer(name), buffer)


# ---- rows and reports ----


def test_speed_is_that_of_the_windows_after_the_warm_up_and_memory_and_losses_of_all() -> None:
    line = {"train/grad_norm": 1.0, "compile/graphs": 2, "perf/mfu": None}
    lines = [
        {**line, "step": step, "perf/tok_per_sec": speed, "mem/peak_gib": gib, "train/loss": 10.0 - step}
        for step, speed, gib in [(2, 1.0, 9.0), (4, 30.0, 5.0), (6, 10.0, 5.0), (8, 24.0, 5.0)]
    ]
    found = measured_row(lines, Steps(total=8, warm_up=2, window=2))
    assert found["tok_per_sec"] == {"median": 24.0, "min": 10.0, "max": 30.0, "windows": [30.0, 10.0, 24.0]}
    assert found["steps_timed"] == 6
    assert found["peak_memory_gib"] == 9.0
    assert found["losses"] == {"2": 8.0, "4": 6.0, "6": 4.0, "8": 2.0}
    assert found["mfu"] is None
    assert found["compile"] == {"graphs": 2}


def test_the_median_of_an_even_number_of_windows_is_between_the_middle_two() -> None:
    found = spread([1.0, None, 4.0, 2.0, 9.0])
    assert found is not None
    assert found["median"] == 3.0


def test_mfu_over_the_measured_ceiling_is_the_datasheets_times_their_ratio() -> None:
    known: dict[str, Any] = {"mfu": {"median": 0.4}}
    over_ceiling(known, {"datasheet_tflops": 1000.0, "matmul_tflops": 800.0})
    assert known["mfu_of_ceiling"] == pytest.approx(0.5)
    for unknown in ({"mfu": None}, {"mfu": {"median": 0.4}}, {}):
        over_ceiling(unknown, {"datasheet_tflops": 1000.0, "matmul_tflops": None})
        assert unknown["mfu_of_ceiling"] is None


def test_the_table_divides_by_the_baseline_and_shows_a_dash_for_what_is_unknown() -> None:
    rows = [row("a", [100.0], {"1": 2.5}), row("b", [100.0, 150.0, 160.0], {"1": 2.0}, baseline="a")]
    lines = speed_table([*rows, row("c", [1.0], {"1": 1.0}, baseline="gone")]).splitlines()
    assert "| 150 (100 to 160) | 75 | - |" in lines[3]
    assert lines[3].endswith("| 2.0000 | 1.50 x a |")
    assert lines[2].endswith("| 2.5000 | - |")
    assert lines[4].endswith("| 1.0000 | - |")


def test_rows_of_two_calls_are_not_divided_and_the_page_says_which_came_from_which() -> None:
    speeds = {"a": [100.0], "b": [150.0], "c": [1.0]}
    base, other, failed = (row(name, speed, {"1": 2.0}, baseline="a") for name, speed in speeds.items())
    base, other = base | {"call": "monday"}, other | {"call": "tuesday"}
    assert speed_table([base, other]).splitlines()[3].endswith("| 2.0000 | - |")
    assert speed_table([base, other | {"call": "monday"}]).splitlines()[3].endswith("| 1.50 x a |")
    line = calls_line([base, other, failed | {"error": "no room", "call": "friday"}])
    assert line.endswith("ratios are of rows of one call. monday: a; tuesday: b.")
    assert calls_line([base]) == ""


def test_a_machine_is_named_with_its_host() -> None:
    assert machine.cpu_name()
    known = {"device": "H200", "driver": "1", "cuda": "13", "versions": {}, "git": None}
    known |= {"matmul_tflops": None, "datasheet_tflops": None, "copy_tb_per_sec": None}
    assert machine_lines(known | {"cpu": "Xeon", "cores": 16}).splitlines()[0].rstrip().endswith("host Xeon (16 cores)")
    assert "host" not in machine_lines(known)


def test_ceilings_are_of_the_newest_of_several_calls() -> None:
    known = {"device": "H200", "driver": "1", "cuda": "13", "versions": {}, "git": None}
    known |= {"matmul_tflops": 680.0, "datasheet_tflops": 990.0, "copy_tb_per_sec": 4.3}
    assert "Ceilings measured in the same call: matrix products 680 TFLOP/s" in machine_lines(known)
    assert "Ceilings measured in the newest call: " in machine_lines(known | {"earlier": {}})


def test_a_rank_is_compared_with_a_rank_and_the_table_shows_ranks_where_there_are_several() -> None:
    one = row("one", [100.0], {"1": 2.5}, world_size=1)
    four = row("four", [360.0], {"1": 2.5}, world_size=4, baseline="one", topology="fsdp2")
    four |= {"tok_per_sec_per_gpu": spread([90.0]), "mesh": {"dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 2}}
    peer = row("peer", [50.0], {"1": 2.5}, world_size=1, baseline="one")
    for each in (one, four, peer):
        add_scaling(each, [one, four, peer])
    assert (one["scaling"], four["scaling"], peer["scaling"]) == (None, pytest.approx(0.9), None)
    lines = speed_table([one, four]).splitlines()
    assert lines[0].startswith("| run | GPUs | topology | tok/s per GPU | scaling | attention |")
    assert lines[2].startswith("| one | 1 | - | 100 | - |")
    assert lines[3].startswith("| four | 4 | fsdp2 (dp_shard 2, tp 2) | 90 | 90.0 % |")
    assert "GPUs" not in speed_table([one])


def test_speed_per_gpu_is_that_of_all_ranks_over_their_number_and_the_worst_rank_stands_for_all() -> None:
    line = {"step": 1, "train/loss": 1.0, "train/grad_norm": 1.0, "perf/tok_per_sec": 80.0, "mem/peak_gib": 1.0}
    found = measured_row([line], Steps(total=1, warm_up=0, window=1), world_size=4)
    assert (found["tok_per_sec"]["median"], found["tok_per_sec_per_gpu"]["median"]) == (80.0, 20.0)
    ranks = [
        {"peak_memory_gib": gib, "reserved_memory_gib": None, "compile": {"graphs": 2, "recompiles": late}}
        for gib, late in [(3.0, 0), (5.0, 1)]
    ]
    worst = over_ranks(ranks)
    assert (worst["peak_memory_gib"], worst["reserved_memory_gib"]) == (5.0, None)
    assert worst["compile"] == {"graphs": 2, "recompiles": 1}
    assert worst["ranks"] == ranks


def test_captured_graphs_are_told_where_a_pass_has_changed_them(tmp_path: Path) -> None:
    sizes = {"captured": "9 operators, 2 all-gather", "reshard": "9 operators, 2 all-gather", "merged": "7 operators"}
    for shape, more in (((2, 128), ""), ((10, 64), " of the largest")):
        for number, (after, size) in enumerate(sizes.items()):
            path = graph_file(tmp_path, shape, number, "joint", after)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {size}{more}\nclass GraphModule\n")
    assert graphs_of(tmp_path / "none") == []
    lines = graph_table([row("first", [1.0], {}), row("run", [1.0], {}) | {"graphs": graphs_of(tmp_path)}]).splitlines()
    assert lines[-2] == "| run | joint | captured | 9 operators, 2 all-gather of the largest |"
    assert lines[-1] == "| run | joint | merged | 7 operators of the largest |"
    assert len([line for line in lines if line.startswith("| run | joint")]) == 2
    assert graph_table([row("first", [1.0], {})]) == ""


def test_losses_are_compared_over_the_steps_that_both_runs_logged() -> None:
    reference = row("ref", [1.0], {"1": 3.0, "2": 2.0, "3": 1.0})
    run = row("run", [1.0], {"1": 3.0, "2": 2.25, "4": 9.0}, same_loss_as="ref")
    assert "| run | ref | 2 | 2.50e-01 (step 2) | 1.25e-01 | 1.0000, 9.0000 |" in loss_table([reference, run])
    assert loss_table([run]) == ""
    broken = row("run", [1.0], {"1": 3.0, "2": None}, same_loss_as="ref")  # as a loss that is not finite is logged
    assert "| run | ref | 2 | inf (step 2) | inf | 1.0000, - |" in loss_table([reference, broken])


def test_a_failed_run_is_listed_with_its_reason_and_is_no_baseline() -> None:
    failed = {"name": "a", "baseline": None, "same_loss_as": None, "error": "OutOfMemoryError:\n too much"}
    text = markdown_report({"machine": {"error": "none"}, "runs": [failed, row("b", [5.0], {"1": 1.0}, baseline="a")]})
    assert "- a: OutOfMemoryError: too much" in text
    assert "| b |" in text
    assert "| a |" not in text


# ---- runs ----


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labs.bench.run.machine_ceilings", lambda out: {"error": "not asked"})


@pytest.mark.usefixtures("no_machine")
def test_a_run_that_dies_hangs_or_raises_is_a_row_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.dumps(row("good", [5.0], {"1": 1.0}))
    bodies = {
        "killed": "print('at work', flush=True); os.kill(os.getpid(), 9)",
        "hung": "time.sleep(60)",
        "silent": "",
        "raised": "raise ValueError('no such thing')",
        "good": f"(folder / 'row.json').write_text({good!r})",
    }
    runs = [{"name": n, "model": "tiny", "worker": write_worker(tmp_path, b, f"{n}.py")} for n, b in bodies.items()]
    results = bench(write_plan(tmp_path, runs=runs, timeout_seconds=2), tmp_path / "out")
    assert {r["name"]: r["error"] for r in results["runs"]} == {
        "killed": "ended with code -9: at work",
        "hung": "not done after 2 s",
        "silent": "it wrote no row",
        "raised": "ended with code 1: ValueError: no such thing",
        "good": None,
    }
    assert re.search(r"\[2/5\] hung: failed after \d+ s: not done after 2 s", capsys.readouterr().out)
    with pytest.raises(ConfigError, match="holds results already"):
        bench(tmp_path / "plan.yaml", tmp_path / "out")


@pytest.mark.usefixtures("no_machine")
@pytest.mark.parametrize(("body", "code"), [("sys.exit(3)", 1), ("(folder / 'row.json').write_text(GOOD)", 0)])
def test_the_exit_code_says_whether_a_run_failed(tmp_path: Path, monkeypatch, body: str, code: int) -> None:
    good = json.dumps(row("one", [5.0], {"1": 1.0}))
    runs = [
        {"name": "one", "model": "tiny", "worker": write_worker(tmp_path, body.replace("GOOD", repr(good)), "one.py")}
    ]
    plan = write_plan(tmp_path, runs=runs)
    monkeypatch.setattr(sys, "argv", ["bench", str(plan), "--out", str(tmp_path / "out")])
    assert main() == code


@pytest.mark.usefixtures("no_machine")
def test_results_are_on_disk_after_every_run(tmp_path: Path) -> None:
    count = "sys.exit(f\"seen {len(json.loads((folder.parent / 'results.json').read_text())['runs'])}\")"
    runs = [
        {"name": "one", "model": "tiny", "worker": write_worker(tmp_path, "", "one.py")},
        {"name": "two", "model": "tiny", "worker": write_worker(tmp_path, count, "two.py")},
    ]
    results = bench(write_plan(tmp_path, runs=runs), tmp_path / "out")
    assert results["runs"][1]["error"] == "ended with code 1: seen 1"


@pytest.mark.usefixtures("no_machine")
def test_every_run_has_empty_caches_and_warm_ones_the_code_that_another_saved(tmp_path: Path) -> None:
    body = (
        "places = [Path(os.environ[k]) for k in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR', 'XDG_CACHE_HOME')]\n"
        "empty = not any(p.exists() and any(p.iterdir()) for p in places)\n"
        "for p in places: p.mkdir(exist_ok=True); (p / 'code').touch()\n"
        "saved = json.loads(Path(sys.argv[1]).read_text())['config']['compile']['cache']\n"
        "sys.exit(f\"{empty} {saved and Path(saved).name} {os.environ.get('MARK')}\")"
    )
    name = write_worker(tmp_path, "import json\n" + body)
    runs = [
        {"name": "cold", "model": "tiny", "worker": name, "environment": {"MARK": "m"}},
        {"name": "cold too", "model": "tiny", "worker": name},
        {"name": "warm", "model": "tiny", "worker": name, "warm_from": "cold"},
    ]
    results = bench(write_plan(tmp_path, runs=runs), tmp_path / "out")
    said = [r["error"].partition(": ")[2] for r in results["runs"]]
    assert said == ["True cold.compiled m", "True None None", "True cold.compiled None"]


@pytest.mark.slow
def test_the_smoke_plan_runs_end_to_end_and_its_report_is_rebuilt_from_its_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "labs.bench", "benchmarks/smoke_plan.yaml", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    results = read_bench_results(out / "results.json")
    compiled, eager = results["runs"]
    assert (compiled["error"], eager["error"]) == (None, None)
    assert (compiled["compiled"], eager["compiled"]) == (True, False)
    assert compiled["compile"]["graphs"] > 0
    assert compiled["compile"]["recompiles"] == 0
    assert len(compiled["tok_per_sec"]["windows"]) == 2
    assert 0 < compiled["target_tok_per_sec"]["median"] < compiled["tok_per_sec"]["median"]
    assert compiled["first_step_seconds"] > compiled["warm_up_seconds"] > 0
    assert compiled["losses"] == pytest.approx(eager["losses"], abs=1e-4)
    assert compiled["losses"]["9"] < compiled["losses"]["3"]
    assert compiled["checks"]["Documents in a row do not see each other"].startswith(
        "the other document moves by 0.0e+00"
    )
    assert results["machine"]["versions"]["torch"]
    assert (out / "report.md").read_text() == markdown_report(results)
    assert markdown_report(results) in ended.stdout


# ---- several processes ----


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bench of one process and of two, and its plan."""
    folder = tmp_path_factory.mktemp("pair")
    one = {"name": "one", "model": "tiny"}
    two = {"name": "two", "model": "tiny", "topology": "cpu_ddp", "processes": 2}
    defaults = {
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "precision": "fp32"},
        "compile": {"backend": "aot_eager", "on_failure": "error"},
        "optim": {"name": "adamw", "lr": 1e-3},
    }
    plan = write_plan(folder, runs=[one, two | {"baseline": "one", "same_loss_as": "one"}], defaults=defaults)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("labs.bench.run.machine_ceilings", lambda out: {"error": "not asked"})
        bench(plan, folder / "out")
    return folder


@pytest.mark.slow
def test_two_processes_train_like_one_and_their_row_counts_both(pair: Path) -> None:
    one, two = read_bench_results(pair / "out" / "results.json")["runs"]
    assert (one["error"], two["error"]) == (None, None)
    assert (one["world_size"], two["world_size"], two["topology"]) == (1, 2, "cpu_ddp")
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert list(two["losses"]) == ["2", "4", "6"]
    assert len(two["ranks"]) == 2
    assert all(rank["compile"]["graphs"] > 0 and rank["compile"]["recompiles"] == 0 for rank in two["ranks"])
    assert two["compile"]["recompiles"] == 0
    assert two["tok_per_sec_per_gpu"]["median"] == pytest.approx(two["tok_per_sec"]["median"] / 2)
    speeds = two["tok_per_sec_per_gpu"]["median"], one["tok_per_sec_per_gpu"]["median"]
    assert two["scaling"] == pytest.approx(speeds[0] / speeds[1])
    report = (pair / "out" / "report.md").read_text()
    assert "| two | 2 | cpu_ddp |" in report
    assert "| two | one | 3 |" in report


@pytest.mark.slow
@pytest.mark.usefixtures("no_machine")
def test_runs_started_ahead_with_and_without_a_launcher_train_as_without_the_flag(pair: Path, tmp_path: Path) -> None:
    plain = read_bench_results(pair / "out" / "results.json")["runs"]
    ahead = bench(pair / "plan.yaml", tmp_path, ahead=True)["runs"]
    assert [run["error"] for run in ahead] == [None] * 2
    assert [run["losses"] for run in ahead] == [run["losses"] for run in plain]
    assert [run["world_size"] for run in ahead] == [1, 2]
    first = json.loads((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["time"] > (tmp_path / "one" / "row.json").stat().st_mtime
    assert "running on" in (tmp_path / "two" / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"), [("raised", "rank 1: ValueError: only here"), ("killed", "rank 1 was killed by signal 9")]
)
@pytest.mark.usefixtures("no_machine")
def test_a_rank_that_raises_or_is_killed_ends_the_run_and_is_named(tmp_path: Path, name: str, error: str) -> None:
    body = """
from labs.bench.plan import read_job
from labs.bench.run import run_job

def run(job):
    if os.environ["RANK"] == "1":
        if job.name == "killed":
            os.kill(os.getpid(), 9)
        raise ValueError("only here")
    time.sleep(60)

run_job(read_job(Path(sys.argv[1])), run)
"""
    worker = write_worker(tmp_path, body)
    run = {"name": name, "model": "tiny", "topology": "cpu_ddp", "processes": 2, "worker": worker}
    (row,) = bench(write_plan(tmp_path, runs=[run], timeout_seconds=50), tmp_path / "out")["runs"]
    assert row["error"] == error
    assert row["wall_seconds"] < 45  # the other rank, which sleeps for 60 s, was ended
