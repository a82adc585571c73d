"""Exit codes of all scripts: 2 for what the user can mend, in words, recipe, data or model; 1 for failures; 128 + n for signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import preloaded
import pytest

from sftkit.rundir.status import RunStatus, stopped_by

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
SCRATCH = (
    "model.scratch={model_type: llama, vocab_size: 600, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
    "num_attention_heads: 2}"
)
RECIPE = (
    "run: {dir: DIR/run}\nmodel: {tokenizer: DIR/tokenizer}\ndata: {train: [{path: DIR/rows.jsonl}], max_length: 64}\n"
)
RECIPE += "train: {max_steps: 1, global_batch_size: 1}\nlog: {wandb: 'off'}\ncompile: {enabled: false}\n"
MISTAKES = {
    "data that lack columns": (("scripts/chat_sft.py", "DIR/sft.yaml", SCRATCH), "rows.jsonl"),
    "data that are not there": (
        ("scripts/chat_sft.py", "DIR/sft.yaml", SCRATCH, "data.train.0.path=DIR/lost.jsonl"),
        "lost.jsonl",
    ),
    "data that are looked at": (("scripts/inspect_data.py", "DIR/sft.yaml", "--stage", "sft", SCRATCH), "rows.jsonl"),
    "a model that is not there": (("scripts/base_train.py", "DIR/sft.yaml", "model.path=DIR/lost"), "DIR/lost"),
    "a chain without recipes": (
        ("scripts/run_chain.py", "DIR/lost"),
        "DIR/lost: no such folder. The chain takes one with base.yaml, mid.yaml, sft.yaml, such as ",
    ),
    "the launcher without a script": (
        ("-m", "sftkit.launch", "DIR/lost.py", "DIR/sft.yaml", SCRATCH),
        "no such script",
    ),
    "a model to evaluate": (("scripts/evaluate.py", "DIR/lost"), "DIR/lost: no such folder"),
    "a task": (("scripts/evaluate.py", "mmlu"), "mmlu is a task: name the model before it"),
    "a number of a flag": (
        ("scripts/evaluate.py", "DIR/lost", "--batch-size", "0"),
        "--batch-size 0: must be 1 or more",
    ),
    "a run to talk to": (("scripts/chat.py", "DIR/lost", "--prompt", "Hi?"), "DIR/lost: no such folder"),
    "a run to report on": (("scripts/report.py", "DIR/lost"), "DIR/lost: no such folder"),
    "a script to validate": (
        ("scripts/validate_compile.py", "DIR/sft.yaml", SCRATCH, "--script", "x.py"),
        "x.py: no such file",
    ),
    "a plan": (("-m", "labs.bench", "DIR/lost.yaml"), "DIR/lost.yaml: no such file"),
    "results": (("-m", "labs.bench", "--report", "DIR/rows.jsonl"), "not results of this bench"),
}


@pytest.fixture
def folder(tmp_path: Path, tokenizer) -> Path:
    """A recipe whose data are wrong."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"colour": "red"}) + "\n")
    (tmp_path / "sft.yaml").write_text(RECIPE.replace("DIR", str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_the_users_is_told_without_a_traceback_and_ends_with_2(what: str, folder: Path) -> None:
    words, said = MISTAKES[what]
    done = preloaded.run([word.replace("DIR", str(folder)) for word in words], 1, ENV)
    assert said.replace("DIR", str(folder)) in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr[-3000:]


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("LOCAL_RANK", "x")])
def test_a_launchers_number_that_is_none_is_told_without_a_traceback_and_ends_with_2(folder, name, value) -> None:
    done = preloaded.run(["scripts/chat_sft.py", str(folder / "sft.yaml"), SCRATCH], 1, {**ENV, name: value})
    assert f"{name}='{value}' is not a whole number from" in done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr[-3000:]


def test_a_failure_that_nobody_can_mend_on_the_command_line_ends_with_1(folder: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    words = ["scripts/chat_sft.py", str(folder / "sft.yaml"), SCRATCH, "optim.lr=1e30", "train.max_steps=9"]
    done = preloaded.run([*words, f"data.cache_dir={folder}/cache", "model.chat_template=chatml"], 1, ENV)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-3000:]
    assert "numerics.on_nonfinite=skip" in done.stderr


@pytest.mark.parametrize(
    ("number", "earlier", "expected"),
    [(signal.SIGTERM, None, signal.SIGTERM), (signal.SIGTERM, "this", None), (None, None, None)],
)
def test_a_launcher_learns_from_the_run_which_signal_has_stopped_it(tmp_path: Path, number, earlier, expected) -> None:
    """Not of an earlier run's, nor of the time limit, after which a run ends with 0."""
    RunStatus(tmp_path, 0, 1, start_id="this", step=3).write_end(number, stopped=True)
    assert stopped_by(tmp_path, earlier) == expected
    assert stopped_by(tmp_path / "none", earlier) is None
