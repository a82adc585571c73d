"""Results of evaluations: numbers, files, the suite in the loop, the script, and lm_eval as a backend."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import cpu_runtime
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sftkit.checkpoint.save import Best, higher_is_better, is_better
from sftkit.config.schema import EvalConfig, SourceConfig
from sftkit.data.demo import builtin
from sftkit.data.types import Row
from sftkit.errors import ConfigError
from sftkit.evals import harness, results
from sftkit.evals.results import (
    Choices,
    ExampleScores,
    Likelihoods,
    Question,
    Result,
    Task,
    centred_mean,
    interval,
    values_of,
)
from sftkit.evals.suite import Suite, load_tasks
from sftkit.evals.tasks.answers import heldout
from sftkit_sandbox.programs import check_sandbox

WORDS = ("sea shells", "Berlin", "a user", "one, two", "the shore")


def choose(examples: Sequence[Choices], outputs: Sequence[Likelihoods]) -> list[ExampleScores]:
    return [{"acc": float(max(g.sums) == g.sums[a.gold[0]])} for a, g in zip(examples, outputs, strict=True)]


def choices_task() -> Task[Choices, Likelihoods]:
    examples = tuple(
        Choices(word, f"What is {word}?", (" A", " seven"), (0,), (1, 5), source={"row": 1}) for word in WORDS
    )
    return Task("words", examples, choose, "acc", 0.5, {"shots": 0})


def question_task(judge=lambda questions, answers: [{"exact_match": float("e" in g.text)} for g in answers]):
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


def test_the_interval_of_shares_keeps_within_0_and_1() -> None:
    _, _, low, high = interval([0.99, 1.0, 0.6])
    assert 0 < low < high == 1.0
    assert interval([0.01, 0.0, 0.4])[2] == 0.0
    assert interval([1.2, 3.0, 0.1])[2] < 0


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("eval/mmlu/acc", True),
        ("eval/gsm8k/exact_match_strict-match", True),
        ("eval/centred_mean", True),
        ("eval/wikitext/word_perplexity", False),
        ("eval/lambada/perplexity", False),
        ("eval/wikitext/bits_per_byte", False),
        ("eval/wmt/ter_best", False),
        ("eval/wmt/bleu", True),
        ("eval/interest/acc", True),
        ("val/loss", False),
        ("val/bpb", False),
    ],
)
def test_more_is_better_for_tasks_but_not_for_measures_of_error(metric: str, higher: bool) -> None:
    assert higher_is_better(metric) == higher
    assert is_better(Best("b", metric, 2.0), Best("a", metric, 1.0)) == higher
    assert is_better(Best("b", metric, 1.0), Best("a", metric, 2.0)) != higher
    assert not is_better(Best("b", metric, float("nan")), None)


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
        *("eval/words/acc", "eval/words/low", "eval/words/high"),
        *("eval/then/exact_match", "eval/then/low", "eval/then/high", "eval/centred_mean"),
    }
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
    results.write_results(tmp_path, [results.evaluated(task, given, task.judge(task.examples, given), {})])
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


def test_answers_that_leave_no_room_for_the_prompt_are_refused_before_anything_runs(model, tokenizer) -> None:
    task = question_task()
    for settings, tasks in (({"max_new_tokens": 256}, (task,)), ({"max_new_tokens": 300}, ())):
        with pytest.raises(ConfigError, match=r"max_new_tokens: answers of (256|300) tokens .*leave no room.*say 128"):
            Suite(EvalConfig(**settings), model, tokenizer, cpu_runtime(), tasks=tasks)
    long = replace(task, examples=tuple(replace(q, max_new_tokens=256) for q in task.examples))
    with pytest.raises(ConfigError, match=r"256 tokens \(then\)"):
        Suite(EvalConfig(), model, tokenizer, cpu_runtime(), tasks=(long,))


def test_prompts_that_lose_their_beginning_are_counted(model, tokenizer, caplog) -> None:
    long = "sea shells on the shore " * 100
    asked, answered = choices_task(), question_task()
    asked = replace(asked, examples=(replace(asked.examples[0], prompt=long), *asked.examples[1:]))
    answered = replace(answered, examples=(*answered.examples, replace(answered.examples[0], prompt=long)))
    suite = Suite(EvalConfig(), model, tokenizer, cpu_runtime(), tasks=(asked, answered, choices_task()))
    assert [found.settings["prompts_cut"] for found in suite.run_tasks()] == [1, 1, 0]
    assert "then: 1 prompt longer than the model's context" in caplog.text


def test_results_say_what_was_evaluated_and_with_what(tmp_path: Path, model, tokenizer) -> None:
    suite = Suite(EvalConfig(batch_size=3), model, tokenizer, cpu_runtime(), tasks=(choices_task(),), model_name="x/y")
    (found,) = suite.run_tasks()
    settings = found.settings
    assert (settings["model"], settings["dtype"], settings["batch_size"]) == ("x/y", "float32", 3)
    assert settings["device"].startswith("CPU")
    assert settings["torch"] == torch.__version__
    assert {"transformers", "sftkit", "git", "shots", "max_examples"} <= settings.keys()
    assert settings["manifest"] is None
    (tmp_path / "manifest.json").write_bytes(b"one")
    here = replace(suite, model_name=str(tmp_path))
    assert here.about["manifest"] == hashlib.sha256(b"one").hexdigest()


def test_shots_are_for_the_tasks_that_take_them(tmp_path: Path, tokenizer) -> None:
    rows = [{"goal": f"go {i}", "sol1": "walk", "sol2": "sit", "label": i % 2} for i in range(6)]
    for name in ("piqa_validation", "piqa_train"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig(tasks=("piqa", "families"), shots=2, data=str(tmp_path))
    found = load_tasks(config, tokenizer, cpu_runtime())
    assert [task.settings["shots"] for task in found] == [2, 0]
    with pytest.raises(ConfigError, match=r"shots: 2: no task here takes shots \(families\)"):
        load_tasks(replace(config, tasks=("families",)), tokenizer, cpu_runtime())


def test_rows_that_the_hub_does_not_give_are_asked_for_in_eval_data(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("sftkit.data.reading.origin.hub_answers", lambda: False)
    monkeypatch.setattr(
        "sftkit.evals.tasks.data.SourceConfig", lambda path, **_: SourceConfig(path="no-one/" + path[-4:])
    )
    with pytest.raises(ConfigError, match=r"Set eval\.data to a folder with the rows of .*piqa_validation") as error:
        load_tasks(EvalConfig(tasks=("piqa",)), tokenizer, cpu_runtime())
    assert "data.train" not in str(error.value)


def test_an_error_of_a_judge_is_raised(model, tokenizer) -> None:
    def judge(examples, outputs):
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
    assert found.examples == len(heldout(1))
    values = values_of([found])
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


def test_how_the_memory_of_programs_is_limited_is_said_at_the_start(tmp_path: Path, tokenizer, capsys) -> None:
    if (missing := check_sandbox()) is not None:
        pytest.skip(missing)
    row = {"task_id": "a", "prompt": "def f():\n", "entry_point": "f", "test": "def check(candidate):\n    pass\n"}
    (tmp_path / "humaneval.jsonl").write_text(json.dumps(row))
    config = EvalConfig(tasks=("humaneval",), data=str(tmp_path), allow_code_execution=True)
    (found,) = load_tasks(config, tokenizer, cpu_runtime())
    said = f"model-written code runs in the sandbox; memory: {found.settings['memory']}"
    assert said in capsys.readouterr().out
    assert "of a program" in said


def test_a_task_that_asks_in_a_chat_needs_a_chat_template(make_tokenizer) -> None:
    with pytest.raises(ConfigError, match="families asks through a chat template, and the tokenizer has none"):
        load_tasks(EvalConfig(tasks=("families",)), make_tokenizer(template=None), cpu_runtime())


def test_without_lm_eval_its_backend_names_the_extra(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install 'sftkit\[eval\]'"):
        load_tasks(EvalConfig(tasks=("winogrande",), backend="lm_eval"), tokenizer, cpu_runtime())


@pytest.mark.slow
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
    (tmp_path / "ours.yaml").write_text(
        "group: ours\ntask: [our_words]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
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
    assert values["eval/our_words/acc"] == found["value"] == same.value
    assert len((tmp_path / "evals" / "step-000001" / "our_words.jsonl").read_text().splitlines()) == 5
    whole, part = Suite(replace(config, tasks=("ours",)), model, tokenizer, cpu_runtime()).run_tasks()
    assert (whole.task, whole.value, whole.examples) == ("ours", found["value"], 5)
    assert (whole.settings["subtasks"], whole.records) == (["our_words"], [])
    assert part.task == "our_words"
    with pytest.raises(ConfigError, match=r'no task "our_word".* Did you mean "our_words"'):
        load_tasks(replace(config, tasks=("our_word",)), tokenizer, cpu_runtime())
