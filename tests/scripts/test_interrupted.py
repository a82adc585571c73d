"""Ctrl-C while a script starts: one line and exit code 130, whatever it was doing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import ROOT
from transformers import PreTrainedTokenizerFast

from sftkit.preflight.inputs import SMALL_BYTES

WITNESS = """
import os, signal, sys

MOMENT, WHO, SENT = os.environ["MOMENT"], os.environ.get("WHO", ""), []

def now():
    if WHO in " ".join(sys.orig_argv) and not SENT:
        SENT.append(MOMENT)
        os.killpg(0, signal.SIGINT) if WHO else os.kill(os.getpid(), signal.SIGINT)

class Importing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == MOMENT:
            now()

sys.meta_path.insert(0, Importing)
sys.addaudithook(lambda event, args: now() if event == "open" and str(args[0]).endswith(MOMENT) else None)
"""
"A sitecustomize that sends one real SIGINT when a module is about to be imported, or a file to be opened."

RECIPE = "recipes/smoke/sft.yaml"
TINY = {
    "model_type": "llama",
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
} | {"num_attention_heads": 2}
OF_NO_RUN = (
    RECIPE,
    "model.path=null",
    "model.scratch={model_type: llama}",
    "model.tokenizer=NEW_TOKENIZER",
    "data.max_length=64",
)
SCRIPTS = {
    "base_train.py": ("recipes/smoke/base.yaml",),
    "mid_train.py": ("recipes/smoke/mid.yaml",),
    "chat_sft.py": OF_NO_RUN,
    "caption_train.py": ("recipes/captioning/caption_smoke.yaml",),
    "inspect_data.py": (RECIPE,),
    "validate_compile.py": (RECIPE,),
    "run_chain.py": ("recipes/smoke",),
    "evaluate.py": ("runs/x",),
    "chat.py": ("runs/x",),
    "report.py": ("runs/x",),
    "export.py": ("runs/x", "--out", "runs/y"),
    "data_stores.py": ("list",),
    "doctor.py": (),
    "make_dashboard.py": ("--entity", "me", "--dry-run"),
}
FIRST, CONFIG, TORCH = "sftkit.runtime.signals", "sftkit.config.schema", "torch.nn"
MOMENTS = [
    *((name, CONFIG) for name in SCRIPTS if name not in ("chat.py", "report.py", "export.py", "make_dashboard.py")),
    ("chat.py", "sftkit.generation.repl"),
    ("report.py", "sftkit.reports.page"),
    ("export.py", "sftkit.runtime.hub"),
    ("make_dashboard.py", "sftkit.tracking.dashboard.panels"),
    *(pytest.param(name, FIRST, marks=pytest.mark.slow) for name in SCRIPTS),
    pytest.param("chat_sft.py", TORCH, marks=pytest.mark.slow),
]


def interrupted(folder: Path, moment: str, *words: str, who: str = "", timeout: int = 200) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a Python that gets a SIGINT at a moment; no process of its session is left."""
    (folder / "sitecustomize.py").write_text(WITNESS)
    (folder / "new").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "new" / name).write_text("{}")
    words = tuple(word.replace("NEW_TOKENIZER", str(folder / "new")) for word in words)
    paths = os.pathsep.join([str(folder), str(ROOT / "src")])
    env = {**os.environ, "PYTHONPATH": paths, "MOMENT": moment, "WHO": who, "ACCELERATE_USE_CPU": "true"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, error = process.communicate(timeout=timeout)
    deadline = time.monotonic() + 20
    while (left := of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    return process.returncode, out, error


def of_session(session: int) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return found


def test_every_script_is_interrupted() -> None:
    assert SCRIPTS.keys() == {path.name for path in (ROOT / "scripts").glob("*.py")}


@pytest.mark.parametrize(("script", "moment"), MOMENTS)
def test_ctrl_c_while_a_script_starts_is_one_line_and_exit_code_130(script: str, moment: str, tmp_path: Path) -> None:
    code, out, error = interrupted(tmp_path, moment, f"scripts/{script}", *SCRIPTS[script])
    assert (code, error) == (130, "\nSIGINT: ended\n")
    assert "Traceback" not in out


@pytest.mark.parametrize("moment", ["labs.bench.plan", "machine.log"])
def test_ctrl_c_in_the_bench_is_one_line_and_leaves_no_caches(moment: str, tmp_path: Path, monkeypatch) -> None:
    """While it starts, and while it runs what it measures, which it ends first."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    words = ["-m", "labs.bench", "benchmarks/smoke_plan.yaml", "--out", str(tmp_path / "out")]
    code, out, error = interrupted(tmp_path, moment, *words)
    assert (code, error) == (130, "\nSIGINT: ended\n")
    assert "Traceback" not in out
    assert not list((tmp_path / "tmp").iterdir())


def test_ctrl_c_in_the_command_sftkit_is_one_line(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "sftkit.config.keys", "-m", "sftkit", "report", "runs/x")[::2] == (
        130,
        "\nSIGINT: ended\n",
    )


@pytest.mark.parametrize(
    "moment",
    [
        "sftkit.config.schema",
        pytest.param("accelerate.utils.launch", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_make_starts_a_script_is_one_line(moment: str, tmp_path: Path) -> None:
    """In the process that the user starts, or in the launcher that it starts."""
    who = "accelerate_launch" if moment.startswith("accelerate") else ""
    code, _, error = interrupted(tmp_path, moment, "-m", "sftkit.launch", "scripts/chat_sft.py", *OF_NO_RUN, who=who)
    assert code == 130
    assert set(error.splitlines()) == {"", "SIGINT: ended"}  # of a launcher that is no longer starting, too


def test_a_script_that_ends_by_itself_has_its_own_exit_code(tmp_path: Path) -> None:
    code, _, error = interrupted(tmp_path, "no such moment", "scripts/report.py", str(tmp_path / "none"))
    assert (code, "Traceback" in error) == (2, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "who", "line"),
    [
        ("inspect_data.py", "", "\nSIGINT: ended\n"),
        ("inspect_data.py", "multiprocessing", "\nSIGINT: ended\n"),
        ("chat_sft.py", "", "\nSIGINT: ended before the first step\n"),
        ("chat_sft.py", "multiprocessing", "\nSIGINT: ended before the first step\n"),
    ],
)
def test_ctrl_c_while_data_is_prepared_is_one_line_and_leaves_no_process(
    script: str, who: str, line: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """While a file is read, or while the processes that tokenize start, which hear of a Ctrl-C in a terminal too."""
    row = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]}
    line_of_row = f"{json.dumps(row)}\n"
    (tmp_path / "rows.jsonl").write_text(line_of_row * (SMALL_BYTES // len(line_of_row) + 1))  # no check reads it whole
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe = {
        "run": {"dir": f"{tmp_path}/run", "stage": "sft"},
        "model": {"scratch": TINY, "tokenizer": f"{tmp_path}/tokenizer"},
        "data": {
            "train": [{"path": f"{tmp_path}/rows.jsonl", "split": "train[1%:]"}],  # nor its beginning
            "max_length": 64,
            "num_proc": 2,
            "cache_dir": f"{tmp_path}/c",
        },
        "train": {"max_steps": 1},
        "log": {"wandb": "off"},
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(recipe))
    moment = "transformers" if who else "rows.jsonl"
    code, out, error = interrupted(tmp_path, moment, f"scripts/{script}", f"{tmp_path}/sft.yaml", who=who)
    assert code == 130, error
    assert "Traceback" not in error
    assert (out + error).count("SIGINT") == 1
    assert line in out + error
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("step-*"))
