"""What is asked in vain costs nothing: a wrong key, a wrong flag and --help are answered before torch is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
HEAVY = {"torch", "transformers", "accelerate", "datasets", "wandb"}
MAX_CPU_SECONDS = 2.0
WRONG_KEY = ("optim.learning_rate=1", "optim.learning_rate")
RECIPES = {
    **dict.fromkeys(("base_train.py", "mid_train.py", "chat_sft.py"), "recipes/smoke/sft.yaml"),
    "caption_train.py": "recipes/captioning/caption_smoke.yaml",
    **dict.fromkeys(("inspect_data.py", "validate_compile.py"), "recipes/smoke/sft.yaml"),
    "run_chain.py": "recipes/smoke",
    "data_stores.py": "recipes/smoke/sft.yaml",
}
"Scripts that take a recipe, or a folder of them."
ASKED = {script: ((recipe, WRONG_KEY[0]), 2, WRONG_KEY[1]) for script, recipe in RECIPES.items()}
ASKED["data_stores.py"] = (
    ("export", "megatron", "recipes/smoke/base.yaml", WRONG_KEY[0], "--out", "x"),
    2,
    WRONG_KEY[1],
)
ASKED["evaluate.py"] = (("runs/x", "--shot-count", "3"), 2, "--shot-count")
ASKED["chat.py"] = (("--promt", "Hi?"), 2, "--promt")
ASKED["report.py"] = (("runs/x", "runs/y"), 2, "Did you mean --against runs/y?")
ASKED["export.py"] = (("runs/x", "out"), 2, "Did you mean --out out?")
ASKED["mid_train.py"] = (("--help",), 0, None)  # of the scripts that train
QUESTIONS = [(script, *ASKED.get(script, (("--help",), 0, None))) for script in SCRIPTS]


def ask(*words: str) -> tuple[int, str, str, float]:
    """(exit code, stdout, stderr, CPU seconds of the process and its own) of a Python that is run with these words."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=out, stderr=error)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, error):
            file.seek(0)
        return process.returncode, out.read(), error.read(), used.ru_utime + used.ru_stime


@cache
def telling_imports(script: str, *words: str) -> tuple[int, str, str, float]:
    """What `ask` finds when stderr lists every import too."""
    return ask("-X", "importtime", f"scripts/{script}", *words)


def test_every_script_that_reads_a_recipe_is_asked_with_a_wrong_key() -> None:
    reading = {
        s
        for s in SCRIPTS
        if re.search(
            r"load_config|read_config|read_stages|preflight\.flags|validate\.run", (ROOT / "scripts" / s).read_text()
        )
    }
    assert reading == set(RECIPES)


@pytest.mark.parametrize(("script", "words", "code", "named"), QUESTIONS, ids=lambda value: str(value)[:40])
def test_a_script_answers_before_it_loads_torch(script: str, words: tuple[str, ...], code: int, named) -> None:
    found, out, imports, _ = telling_imports(script, *words)
    loaded = set(re.findall(r"^import time: .*\| +([\w.]+)$", imports, flags=re.MULTILINE))
    assert found == code, imports[-2000:]
    assert "argparse" in loaded or "sftkit.config.load" in loaded
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    if named is None:
        assert out.strip()
    else:
        assert named in imports


@pytest.mark.parametrize(("script", "words", "code", "named"), QUESTIONS, ids=lambda value: str(value)[:40])
def test_an_answer_takes_less_than_a_second_of_cpu(script: str, words: tuple[str, ...], code: int, named) -> None:
    found, _, error, used = telling_imports(script, *words)
    seconds = [used]
    while min(seconds) >= MAX_CPU_SECONDS and len(seconds) < 4:  # the list took some, and a machine may be busy
        seconds.append(ask(f"scripts/{script}", *words)[3])
    assert found == code, error[-2000:]
    assert "Traceback" not in error
    assert min(seconds) < MAX_CPU_SECONDS, seconds


WITNESS = """
import atexit, json, os, resource, sys

def tell():
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {"argv": sys.argv, "modules": sorted(sys.modules), "seconds": used.ru_utime + used.ru_stime}
    with open(os.path.join(os.environ["WITNESSES"], f"{os.getpid()}.json"), "w") as file:
        json.dump(found, file)

atexit.register(tell)
"""


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        pytest.param(
            *(
                ("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"),
                {"launcher", "script"},
            ),
            marks=pytest.mark.slow,
        ),
        (("-m", "sftkit.launch"), {"launcher"}),
    ],
    ids=["accelerate launch", "make"],
)
def test_a_launched_script_refuses_a_wrong_key_before_it_loads_torch(tmp_path, launcher, processes) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "WITNESSES": str(tmp_path), "ACCELERATE_USE_CPU": "true"}
    words = [*launcher, "scripts/chat_sft.py", RECIPES["chat_sft.py"], WRONG_KEY[0]]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert WRONG_KEY[1] in done.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    script = [one for one in found if one["argv"][0] == "scripts/chat_sft.py"]
    others = [one for one in found if one not in script and any(word.startswith("scripts/") for word in one["argv"])]
    assert len(script) == ("script" in processes)
    assert others, "the launcher itself was not seen"
    ours = [one for one in found if one in script or launcher[1] == "sftkit.launch"]
    for one in ours:
        assert not HEAVY & set(one["modules"]), one["argv"]
        assert one["seconds"] < MAX_CPU_SECONDS, one["argv"]
