"""What users type: each script, the hand-over between stages, errors, chat, inspection, a run that is stopped and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from helpers import SHARED_DATA
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.evals.suite import sample_rows

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}

TINY = (
    "train.max_steps=3",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "compile.backend=eager",
    "log.every=1",
    "eval.max_examples=1",
    "eval.samples=1",
    "eval.max_new_tokens=4",
)


DOCS, TASKS = "{path: 'builtin:docs', max_rows: 20}", "{path: 'builtin:tasks', max_rows: 200}"
TEXTS = f"model.train_tokenizer.sources=[{DOCS}, {TASKS}]"
HELD_OUT = "data.val=[{path: 'builtin:tasks', split: heldout, max_rows: 20}]"
OF_SFT = (f"data.train=[{TASKS}]", HELD_OUT)


def run(*words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """A script with these arguments, in a process of its own, or several."""
    return preloaded.run(words, ranks, ENV)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """base -> mid -> sft of the smoke recipes, 3 steps each, all of fewer texts; sft on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    cache = f"data.cache_dir={folder}/cache"
    docs = "data.val=[{path: 'builtin:docs', split: heldout, max_rows: 2}]"
    for stage, script, ranks, own in (
        ("base", "base_train.py", 1, (TEXTS, f"data.train=[{DOCS}]", docs)),
        ("mid", "mid_train.py", 1, (f"model.path={folder}/base", f"data.train=[{DOCS}, {TASKS}]", HELD_OUT)),
        ("sft", "chat_sft.py", 2, (f"model.path={folder}/mid", *OF_SFT)),
    ):
        settings = [*TINY, f"run.dir={folder}/{stage}", cache, "log.wandb=off", *own]
        done = run(f"scripts/{script}", f"recipes/smoke/{stage}.yaml", *settings, ranks=ranks)
        assert done.returncode == 0, f"{stage}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        (folder / f"{stage}.log").write_text(done.stdout)
        (folder / f"{stage}.err").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("stage", ["base", "mid", "sft"])
def test_each_script_trains_and_leaves_a_whole_run_directory(runs: Path, stage: str) -> None:
    folder = runs / stage
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step"] == 3
    assert summary["compiled"] is True
    assert summary["metrics"]["compile/graphs"] >= 1
    assert summary["metrics"]["compile/recompiles"] == summary["metrics"]["compile/graph_breaks"] == 0
    assert summary["evals"]["val/loss"] > 0
    assert "eval/families/acc" in summary["evals"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    for name in ("config.yaml", "environment.json", "evals.jsonl", "samples.jsonl", "LATEST"):
        assert (folder / name).is_file(), name


def test_stages_hand_over_tokenizer_and_row_length_and_say_so(runs: Path) -> None:
    for stage, parent in (("mid", "base"), ("sft", "mid")):
        log = (runs / f"{stage}.log").read_text()
        assert f"from {runs}/{parent}/step-000003: fp32, max_length 128 (inherited)" in log
        assert "tokenizer of 1,024 tokens" in log
    assert "2 x CPU" in (runs / "sft.log").read_text()
    templates = {(runs / stage / "step-000003" / "chat_template.jinja").read_text() for stage in ("base", "mid", "sft")}
    assert len(templates) == 1


def test_each_stage_says_what_takes_long_before_it_does_it(runs: Path) -> None:
    for stage, start in (("base", "making a new model"), ("mid", f"loading {runs}/base/step-000003")):
        log = (runs / f"{stage}.err").read_text()
        order = (start, "tokenizing docs", "compiling the model", "evaluating the loss of", "evaluating families, ")
        places = [log.index(text) for text in order]
        assert places == sorted(places), log
    assert "training a tokenizer of 1,024 tokens" in (runs / "base.err").read_text()
    assert (runs / "sft.err").read_text().count("compiling the model") == 1  # of two ranks


def test_the_exported_folder_answers_in_plain_transformers(runs: Path) -> None:
    path = runs / "sft" / "step-000003"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Which is larger, 3 or 5?"}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id


def test_every_stage_has_opened_its_first_checkpoint_as_others_do(runs: Path) -> None:
    for stage in ("base", "mid", "sft"):
        rows = {row["name"]: row for row in json.loads((runs / stage / "proof.json").read_text())["rows"]}
        assert rows["Files next to the weights are read as in this run"]["ok"], rows
        row = rows["First checkpoint is loaded by transformers as this model"]
        assert row["ok"], row
        assert "8 of 8 greedy tokens are the same" in row["found"]


def test_chat_answers_one_prompt_with_what_generate_gives(runs: Path) -> None:
    path = str(runs / "sft")
    prompt = "Which is larger, 3 or 5?"
    done = run("scripts/chat.py", path, "--prompt", prompt, "--max-new-tokens", "5")
    assert done.returncode == 0, done.stderr[-2000:]
    folder = runs / "sft" / "step-000003"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        output = model.generate(**ids, max_new_tokens=5, do_sample=False)
    expected = tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert done.stdout.strip() == expected.strip()


def test_chat_says_who_answers_and_whether_it_answered_questions_right(runs: Path) -> None:
    done = run("scripts/chat.py", str(runs / "sft"))  # at the end of its input
    assert (done.returncode, done.stdout) == (0, "")
    assert f"\n{runs}/sft/step-000003 answers: " in done.stderr
    assert re.search(r"answered none of \d+ held-out questions right|this checkpoint answered right", done.stderr)


@pytest.mark.slow
def test_evaluate_writes_every_example(runs: Path, tmp_path: Path) -> None:
    command = ["scripts/evaluate.py", str(runs / "sft"), "--max-examples", "1", "--max-new-tokens", "4"]
    done = run(*command, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    (families,) = json.loads((tmp_path / "results.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "families.jsonl").read_text().splitlines()]
    assert len(rows) == families["examples"] == len(families["metrics"]) - 1
    assert {"prompt", "target", "answer", "stop", "marks"} <= set(rows[0])
    assert "95 % interval" in done.stdout


def test_inspect_data_shows_lengths_targets_and_the_padding_of_every_layout(runs: Path) -> None:
    command = ["scripts/inspect_data.py", "recipes/smoke/sft.yaml", f"model.path={runs}/base", *OF_SFT]
    done = run(*command, f"data.cache_dir={runs}/cache")
    assert done.returncode == 0, done.stderr[-2000:]
    for expected in ("% targets", "median", "packed *", "bucketed", "fixed", "<<|im_start|>>assistant"):
        assert expected in done.stdout


def mixed_rows() -> dict[str, list[dict[str, Any]]]:
    """Rows of the four shapes of recipes/qwen3_0_6b/mix.yaml, by the folder of each."""
    numbers = range(40)
    asked = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    return {
        "dolly": [{"instruction": f"Say {n}.", "context": "", "response": f"It is {n}."} for n in numbers],
        "sgd": [
            {
                "tools": [asked],
                "messages": [
                    {"role": "user", "content": f"Find {n}."},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "content": f"{n}", "tool_call_id": "1"},
                    {"role": "assistant", "content": f"Found {n}."},
                ],
            }
            for n in numbers
        ],
        "oasst": [
            {"messages": [{"role": role, "content": f"{role} {n}"} for _ in (0, 1) for role in ("user", "assistant")]}
            for n in numbers
        ],
        "gsm8k": [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in numbers],
    }


def test_the_recipe_of_a_mix_logs_the_loss_of_each_source_and_their_weighted_mean_is_the_loss(
    runs: Path, tmp_path: Path
) -> None:
    settings = []
    for number, (name, rows) in enumerate(mixed_rows().items()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings.append(f"data.train.{number}.path={tmp_path / name}")
    places = (f"model.path={runs}/mid", f"run.dir={tmp_path}/run", f"data.cache_dir={tmp_path}/cache", "log.wandb=off")
    quick = ("train.max_steps=4", "train.global_batch_size=2", "data.max_length=256", "compile.backend=eager")
    done = run("scripts/chat_sft.py", "recipes/smoke/mix.yaml", *places, *quick, *settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        losses = {name: line[f"train/{name}/loss"] for name in mixed_rows()}
        known = [loss * line[f"data/target_share/{name}"] for name, loss in losses.items() if loss is not None]
        assert sum(known) == pytest.approx(line["train/loss"], rel=1e-5)
        assert len(known) > 1
    (evals,) = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert all(evals[f"val/{name}/loss"] > 0 for name in mixed_rows())
    assert "Loss by source" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_the_recipe_of_weights_holds_its_shares_and_resumes_in_the_middle_bit_for_bit(
    runs: Path, tmp_path: Path
) -> None:
    settings = [
        "train.max_steps=12",
        "log.every=1",
        "checkpoint.every=5",
        "checkpoint.keep=3",
        "compile.backend=eager",
        "eval.tasks=[]",
    ]
    settings += [f"model.path={runs}/base", f"data.cache_dir={tmp_path}/cache", "log.wandb=off", "eval.samples=0"]

    def lines(name: str, *words: str) -> list[dict[str, Any]]:
        own = [f"run.dir={tmp_path}/{name}", *words]
        done = run("scripts/mid_train.py", "recipes/smoke/mid_weights.yaml", *settings, *own)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        assert ("step-000005: step 5" in done.stdout) == bool(words)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    whole = lines("whole")
    assert [line["step"] for line in whole] == list(range(1, 13))
    for line in whole:
        losses = {name: line[f"train/{name}/loss"] for name in ("docs", "tasks")}
        known = [loss * line[f"data/target_share/{name}"] for name, loss in losses.items() if loss is not None]
        assert sum(known) == pytest.approx(line["train/loss"], rel=1e-5)
    # Until the stage at step 8, and after it. A step moves by its packing, several by a document of a row at most.
    tokens = {name: [0, *(line[f"data/tokens/{name}"] for line in whole)] for name in ("docs", "tasks")}
    resolved = json.loads((tmp_path / "whole" / "preflight.json").read_text())
    longest = resolved["lengths"]["max"]
    for first, last, share in ((0, 8, 0.75), (8, 12, 1 / 3)):
        docs, tasks = (tokens[name][last] - tokens[name][first] for name in ("docs", "tasks"))
        assert abs(docs - share * (docs + tasks)) <= 2.5 * longest
    config = (tmp_path / "whole" / "config.yaml").read_text()
    assert "weight: 0.75" in config
    assert "weight: null" in (runs / "mid" / "config.yaml").read_text(), "the chain's own mid stage has no weights"
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "step-000012")
    shutil.rmtree(tmp_path / "cut" / "step-000010")
    (tmp_path / "cut" / "LATEST").write_text("step-000005\n")
    again = lines("cut", "train.resume=auto")
    same = [
        name
        for name in whole[-1]
        if name.startswith(("data/", "train/")) and name.endswith(("loss", "norm", "docs", "tasks"))
    ]
    assert {"train/loss", "train/docs/loss", "train/grad_norm", "data/tokens/tasks"} <= {*same}
    assert [[line.get(name) for name in same] for line in again] == [
        [line.get(name) for name in same] for line in whole
    ]
    there, here = ((tmp_path / name / "step-000012" / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert here == there


@pytest.mark.slow
def test_a_run_on_trees_that_is_killed_goes_on_bit_for_bit(runs: Path, tmp_path: Path) -> None:
    """The log of an agent, in which each request repeats the conversation: trees of up to four documents."""
    rows = []
    for number in range(40):
        messages: list[dict[str, str]] = []
        for turn in range(1 + number % 4):
            messages += [{"role": "user", "content": f"Which is larger, {number} or {7 * turn}?"}]
            messages += [{"role": "assistant", "content": f"{max(number, 7 * turn)} is."}]
            rows.append(json.dumps({"messages": messages}))
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    settings = [*TINY, "train.max_steps=12", "checkpoint.every=4", "checkpoint.keep=9", "log.wandb=off"]
    settings += ["data.layout=tree", f"data.train=[{{path: {tmp_path}/log.jsonl}}]", "data.targets=last_turn"]
    settings += [HELD_OUT, "eval.tasks=[]", "eval.samples=0", f"model.path={runs}/mid", f"data.cache_dir={runs}/cache"]

    def start(name: str, *words: str) -> str:
        done = run("scripts/chat_sft.py", "recipes/smoke/sft.yaml", *settings, f"run.dir={tmp_path}/{name}", *words)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout

    assert "trees: 40 trees of 100 documents, " in start("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (8, 12):
        shutil.rmtree(tmp_path / "cut" / f"step-{step:06d}")
    (tmp_path / "cut" / "LATEST").write_text("step-000004\n")
    assert "step-000004: step 4" in start("cut", "train.resume=auto")
    there, here = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    )
    assert [line["step"] for line in here] == list(range(1, 13))
    assert there[3]["train/epoch"] < there[-1]["train/epoch"], "trees are planned anew after the resume"
    for name in ("train/loss", "train/grad_norm", "train/tokens", "data/tree_factor", "data/padding_pct"):
        assert [line[name] for line in here] == [line[name] for line in there], name
    for step in (8, 12):
        one, other = (tmp_path / name / f"step-{step:06d}" for name in ("whole", "cut"))
        states = [*one.rglob("*.distcp")]
        assert states
        for file in (one / "model.safetensors", *states):
            assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.path=Qwen/Qwen3-0.6B-Base", "data.max_length=64"), "hf download Qwen/Qwen3-0.6B-Base"),
        pytest.param(("model.path=runs/nothing/here", "data.max_length=64"), "no such folder", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_had_is_an_error_in_seconds_that_says_what_to_do(tmp_path, overrides, message) -> None:
    done = run("scripts/chat_sft.py", "recipes/smoke/sft.yaml", f"run.dir={tmp_path}/x", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the shared real data")
def test_sft_on_real_conversations_with_a_model_and_tokenizer_from_disk_lowers_the_loss(tmp_path: Path) -> None:
    """The path of a hub id, but for the download: a pretrained checkpoint folder, gzipped JSONL, validation, samples."""
    model_dir = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(SHARED_DATA / "models" / "stories260k")
    tokenizer = AutoTokenizer.from_pretrained(SHARED_DATA / "models" / "stories260k")
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        f"""
run: {{dir: {tmp_path}/run}}
model: {{path: {model_dir}, chat_template: chatml}}
data:
  train:
    - {{path: {SHARED_DATA}/chat/dolly15k.jsonl.gz, split: "train[100:300]"}}
    - {{path: {SHARED_DATA}/chat/instruct_1100_alpaca.jsonl.gz, max_rows: 100}}
    - {{path: {SHARED_DATA}/chat/oasst1_val.jsonl.gz, max_rows: 50}}
  val:
    - {{path: {SHARED_DATA}/chat/dolly15k.jsonl.gz, split: "train[:30]"}}
  max_length: 256
  cache_dir: {tmp_path}/cache
  on_bad_row: skip
optim: {{lr: 3.0e-3}}
train: {{max_steps: 12, global_batch_size: 8, micro_batch_size: 4}}
compile: {{backend: eager}}
eval: {{at_start: true, samples: 1, max_new_tokens: 8}}
log: {{every: 4, wandb: "off"}}
"""
    )
    done = run("scripts/chat_sft.py", str(recipe))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    evals = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evals] == [0, 12]
    assert evals[1]["val/loss"] < evals[0]["val/loss"] - 0.3
    assert evals[1]["val/dolly15k/bpb"] < evals[0]["val/dolly15k/bpb"]


def test_sample_prompts_pass_over_rows_that_cannot_be_asked(tmp_path: Path, tokenizer) -> None:
    ask, reply = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
    good = {"messages": [ask, reply]}
    rows = [
        {"messages": [ask]},
        {"messages": [reply, ask, reply]},
        {"messages": [{"role": "user", "content": None}, reply]},
        {"messages": [{"role": "user", "content": "long " * 200}, reply]},
        good,
    ]
    file = tmp_path / "val.jsonl"
    file.write_text("not json\n" + "".join(json.dumps(row) + "\n" for row in rows))
    tokenize = RowTokenizer(chat.tokenize, tokenizer, max_length=64)
    (row,) = sample_rows(DataConfig(train=(), val=(SourceConfig(path=str(file)),)), tokenize, 3)
    assert row.messages == good["messages"]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("", "  ", "Some text.")))
    (row,) = sample_rows(
        DataConfig(train=(), val=(SourceConfig(path=str(texts)),)),
        RowTokenizer(text.tokenize, tokenizer, max_length=64),
        3,
    )
    assert row.text == "Some text."


@pytest.mark.slow
def test_a_second_run_renames_the_first_saves_on_a_signal_to_its_process_group_and_is_resumed(
    runs: Path, tmp_path: Path
) -> None:
    recipe = ["scripts/chat_sft.py", "recipes/smoke/sft.yaml"]
    paths = [f"run.dir={tmp_path}/sft", f"model.path={runs}/mid", f"data.cache_dir={runs}/cache", "log.wandb=off"]
    settings = [*TINY, *OF_SFT, "compile.enabled=false", "eval.at_start=false", *paths]
    shutil.copytree(runs / "sft", tmp_path / "sft")
    child = subprocess.Popen(
        [sys.executable, "-m", "sftkit.launch", *recipe, *settings, "train.max_steps=100000"],
        cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    first, metrics = tmp_path / "sft.old-1", tmp_path / "sft" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (first.exists() and metrics.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGTERM)
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 128 + signal.SIGTERM, output[-2000:]
    assert (first / "step-000003").is_dir()
    summary = json.loads((tmp_path / "sft" / "summary.json").read_text())
    step = summary["step"]
    assert summary["stopped"] is True, output[-2000:]
    assert (tmp_path / "sft" / "LATEST").read_text().strip() == f"step-{step:06d}"
    assert "saving and stopping" in output

    done = run(*recipe, *settings, f"train.max_steps={step + 2}", "train.resume=auto")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed" in done.stdout
    assert (tmp_path / "sft" / "LATEST").read_text() == f"step-{step + 2:06d}\n"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, step + 3))
