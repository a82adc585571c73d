"""Results of evaluations: numbers, files, the suite in the loop, the script, and lm_eval as a backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, cpu_runtime
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sftkit.config import EvalConfig
from sftkit.data import builtin
from sftkit.data.types import Row
from sftkit.errors import ConfigError
from sftkit.evals import families, harness, results
from sftkit.evals.loading import check_arguments
from sftkit.evals.results import Result, centred_mean, interval, values_of
from sftkit.evals.suite import Suite, load_tasks
from sftkit.evals.task import Choices, Likelihoods, Marks, Question, Task

WORDS = ("sea shells", "Berlin", "a user", "one, two", "the shore")


def choose(asked: Sequence[Choices], given: Sequence[Likelihoods]) -> list[Marks]:
    return [
        {"acc": float(max(g.sums) == g.sums[a.gold[0]]), "inst": [1.0, 0.0]} for a, g in zip(asked, given, strict=True)
    ]


def choices_task() -> Task[Choices, Likelihoods]:
    examples = tuple(
        Choices(word, f"What is {word}?", (" A", " seven"), (0,), (1, 5), source={"row": 1}) for word in WORDS
    )
    return Task("words", examples, choose, "acc", 0.5, {"shots": 0})


def question_task(judge=lambda asked, given: [{"exact_match": float("e" in g.text)} for g in given]):
    examples = tuple(Question(word, f"{word}, and then", 4, target=["e"]) for word in WORDS)
    return Task("then", examples, judge, "exact_match", 0.0, {})


@pytest.fixture
def model(tokenizer) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, initializer_range=0.5)
    return LlamaForCausalLM(config)


def result(value: float, chance: float | None) -> Result:
    return Result("x", "acc", value, None, None, None, chance, 1, {}, {"acc": value})


def test_the_interval_of_right_and_wrong_is_wilsons() -> None:
    mean, stderr, low, high = interval([1.0] * 5 + [0.0] * 5)
    assert (mean, low, high) == (0.5, pytest.approx(0.23659, abs=1e-4), pytest.approx(0.76341, abs=1e-4))
    assert stderr == pytest.approx((0.25 * 10 / 9 / 10) ** 0.5)
    _, _, low, high = interval([1.0] * 20)
    assert 0.8 < low < 0.85
    assert high == pytest.approx(1.0)
    assert interval([1.0])[1] is None


def test_the_interval_of_other_marks_is_normal() -> None:
    mean, stderr, low, high = interval([0.2, 0.4, 0.9])
    assert stderr is not None
    assert (mean - low, high - mean) == pytest.approx((1.959964 * stderr, 1.959964 * stderr))


def test_the_centred_mean_is_0_for_guessing_and_leaves_out_what_has_no_chance_level() -> None:
    assert centred_mean([result(0.25, 0.25), result(0.5, 0.5)]) == 0.0
    assert centred_mean([result(1.0, 0.25), result(0.5, 0.5), result(7.0, None)]) == 0.5
    assert centred_mean([result(7.0, None)]) is None


def test_the_suite_logs_values_and_writes_every_example_of_a_step(tmp_path: Path, model, tokenizer) -> None:
    row = Row("here", messages=[{"role": "user", "content": "seven days"}, {"role": "assistant", "content": "?"}])
    suite = Suite(
        EvalConfig(batch_size=2), model, tokenizer, cpu_runtime(), sample_rows=[row], run_dir=tmp_path,
        tasks=(choices_task(), question_task()),
    )  # fmt: skip
    values, samples = suite.evaluate(500)
    assert set(values) == {
        *("eval/words/acc", "eval/words/inst", "eval/words/low", "eval/words/high"),
        *("eval/then/exact_match", "eval/then/low", "eval/then/high", "eval/centred_mean"),
    }
    assert values["eval/words/inst"] == 0.5
    assert samples[0].keys() == {"prompt", "reference", "answer", "stop"}
    folder = tmp_path / "evals" / "step-000500"
    words, then = json.loads((folder / "results.json").read_text())
    assert (words["task"], words["metric"], words["chance"], words["examples"]) == ("words", "acc", 0.5, 5)
    assert words["value"] == values["eval/words/acc"]
    assert words["settings"]["shots"] == 0
    assert (then["low"], then["high"]) == (values["eval/then/low"], values["eval/then/high"])
    lines = [json.loads(line) for line in (folder / "words.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(WORDS)
    assert sum(line["marks"]["acc"] for line in lines) / 5 == words["value"]
    assert {"prompt", "continuations", "gold", "loglikelihoods", "source"} <= lines[0].keys()
    line = json.loads((folder / "then.jsonl").read_text().splitlines()[0])
    assert (line["target"], line["stop"], line["tokens"]) == (["e"], "length", 4)


def test_numbers_that_json_does_not_know_are_null_in_the_files(tmp_path: Path) -> None:
    task = choices_task()
    given = [Likelihoods((float("-inf"), -1.0), (False, True), (1, 1))] * 5
    results.write(tmp_path, [results.evaluated(task, given, task.judge(task.examples, given), {})])
    assert json.loads((tmp_path / "words.jsonl").read_text().splitlines()[0])["loglikelihoods"] == [None, -1.0]


def test_predictions_do_not_depend_on_the_batch_size(model, tokenizer) -> None:
    suites = [
        Suite(EvalConfig(batch_size=size), model, tokenizer, cpu_runtime(), tasks=(choices_task(), question_task()))
        for size in (1, 8)
    ]
    one, eight = ([found.records for found in suite.run_tasks()] for suite in suites)
    assert [row["answer"] for row in one[1]] == [row["answer"] for row in eight[1]]
    for a, b in zip(one[0], eight[0], strict=True):
        assert a["loglikelihoods"] == pytest.approx(b["loglikelihoods"], abs=1e-4)
        assert a["marks"] == b["marks"]


def test_an_error_of_a_judge_is_raised(model, tokenizer) -> None:
    def judge(asked, given):
        raise ValueError("no such rule")

    suite = Suite(EvalConfig(), model, tokenizer, cpu_runtime(), tasks=(question_task(judge),))
    with pytest.raises(ValueError, match="no such rule"):
        suite.evaluate()


def test_a_full_disk_costs_the_details_and_not_the_run(tmp_path: Path, model, tokenizer, caplog) -> None:
    (tmp_path / "evals").write_text("in the way")
    suite = Suite(EvalConfig(), model, tokenizer, cpu_runtime(), run_dir=tmp_path, tasks=(choices_task(),))
    assert "eval/words/acc" in suite.evaluate(1)[0]
    assert "examples of the evaluation are lost" in caplog.text


def test_the_families_report_their_mean_interval_and_every_family(model, tokenizer) -> None:
    suite = Suite(EvalConfig(tasks=("families",), max_examples=1, max_new_tokens=2), model, tokenizer, cpu_runtime())
    (found,) = suite.run_tasks()
    assert found.result.examples == len(families.heldout(1))
    values = values_of([found.result])
    expected = {f"eval/{family}/acc" for family in (*builtin.FAMILIES, "families")}
    assert values.keys() == expected | {"eval/families/low", "eval/families/high", "eval/centred_mean"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tasks": ("mmul",)}, r'"mmul" is not one of .*\. Did you mean "mmlu"\?'),
        ({"tasks": ("humaneval",)}, r"allow_code_execution: false does not go with humaneval.*without network"),
        ({"tasks": ("mbpp",), "backend": "lm_eval", "allow_code_execution": True}, "without a sandbox"),
        ({"tasks": ("families", "families")}, "named twice"),
        ({"tasks": ("piqa",), "backend": "lm_eval", "data": "x"}, "eval.data: lm_eval reads its own"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_model_is_there(tokenizer, settings, text) -> None:
    with pytest.raises(ConfigError, match=text):
        load_tasks(EvalConfig(**settings), tokenizer, cpu_runtime())


def test_a_task_that_asks_in_a_chat_needs_a_chat_template(make_tokenizer) -> None:
    with pytest.raises(ConfigError, match="families asks through a chat template, and the tokenizer has none"):
        load_tasks(EvalConfig(tasks=("families",)), make_tokenizer(template=None), cpu_runtime())


def test_without_lm_eval_its_backend_names_the_extra(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install 'sftkit\[eval\]'"):
        load_tasks(EvalConfig(tasks=("winogrande",), backend="lm_eval"), tokenizer, cpu_runtime())


def test_arguments_of_the_script_are_checked_first(tmp_path: Path) -> None:
    good = Namespace(
        path=str(tmp_path), out=str(tmp_path / "a" / "b"), max_examples=None, batch_size=1, max_new_tokens=1
    )
    check_arguments(good)
    assert (tmp_path / "a" / "b").is_dir()
    for change, text in (
        ({"path": "mmlu"}, "mmlu is a task: name the model before it"),
        ({"batch_size": 0}, "--batch-size 0: must be 1 or more"),
        ({"out": "/dev/null/x"}, "no folder can be made there"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_arguments(Namespace(**{**vars(good), **change}))


@pytest.fixture
def folder(tmp_path: Path, model, tokenizer) -> Path:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def script(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "scripts/evaluate.py", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )


def test_the_script_evaluates_any_model_folder_on_local_rows(folder: Path) -> None:
    rows = [{"goal": f"go {i}", "sol1": "walk", "sol2": "sit", "label": i % 2} for i in range(6)]
    (folder / "piqa_validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = script(
        str(folder / "model"), "piqa", "--data", str(folder), "--max-examples", "5", "--out", str(folder / "out")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads((folder / "out" / "results.json").read_text())
    assert (found["task"], found["examples"], found["chance"]) == ("piqa", 5, 0.5)
    assert len((folder / "out" / "piqa.jsonl").read_text().splitlines()) == 5
    for expected in ("95 % interval", "piqa", f"{found['value']:.3f}", "centred mean"):
        assert expected in done.stdout


def test_lm_eval_runs_a_task_of_its_own_and_leaves_the_same_files(
    tmp_path: Path, model, tokenizer, monkeypatch
) -> None:
    tasks = pytest.importorskip("lm_eval.tasks")
    rows = [{"q": f"What is {word}?", "answers": [" A", " seven"], "gold": i % 2} for i, word in enumerate(WORDS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.yaml").write_text(
        f"""task: our_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness, "task_manager", lambda: manager)
    config = EvalConfig(tasks=("our_words",), backend="lm_eval", batch_size=4)
    model.train()
    suite = Suite(config, model, tokenizer, cpu_runtime(), run_dir=tmp_path)
    values, _ = suite.evaluate(1)
    assert model.training
    (found,) = json.loads((tmp_path / "evals" / "step-000001" / "results.json").read_text())
    assert (found["task"], found["examples"], found["chance"]) == ("our_words", 5, None)
    ours = replace(choices_task(), examples=tuple(
        Choices(row["q"], row["q"], (" A", " seven"), (row["gold"],), (1, 5)) for row in rows
    ))  # fmt: skip
    (same,) = Suite(EvalConfig(), model, tokenizer, cpu_runtime(), tasks=(ours,)).run_tasks()
    assert values["eval/our_words/acc"] == found["value"] == same.result.value
    assert len((tmp_path / "evals" / "step-000001" / "our_words.jsonl").read_text().splitlines()) == 5
    with pytest.raises(ConfigError, match=r'no task "our_word".* Did you mean "our_words"'):
        load_tasks(replace(config, tasks=("our_word",)), tokenizer, cpu_runtime())
