"""Tasks read from small files: which rows, what a chat asks, how answers are judged, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers import SHARED_DATA

from sftkit.config.schema import DataConfig, EvalConfig
from sftkit.config.tables import CODE, METRICS_IN_CHAT, TASK_METRICS, TASKS
from sftkit.data.reading import origin
from sftkit.errors import ConfigError, DataError
from sftkit.evals import tasks
from sftkit.evals.results import Choices, Likelihoods
from sftkit.evals.tasks import answers
from sftkit.evals.tasks.data import DatasetSplit, read_split
from sftkit.generation.repl import Answer

EVAL = SHARED_DATA / "eval"
OURS = tuple(name for name in TASKS if name not in CODE)


def arc_row(i: int, labels: str = "ABCD", answer: str = "B") -> dict[str, Any]:
    texts = [f"choice {label} of {i}" for label in labels]
    return {
        "id": f"q{i}",
        "question": f"Question {i}?",
        "choices": {"text": texts, "label": [*labels]},
        "answerKey": answer,
    }


def gsm_row(i: int) -> dict[str, Any]:
    return {"question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"}


def mmlu_row(subject: str, i: int) -> dict[str, Any]:
    return {"subject": subject, "question": f"{subject} {i}?", "choices": [*"wxyz"], "answer": i % 4}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def likelihoods(*sums: float) -> Likelihoods:
    return Likelihoods(sums, (False,) * len(sums), (1,) * len(sums))


def test_training_data_is_compared_with_questions_and_long_answers_and_short_questions_have_their_options(
    tmp_path: Path,
) -> None:
    long = "Because the first of the two trains leaves one hour before the other one does."
    write(tmp_path / "arc_easy_test.jsonl", [{**arc_row(1), "question": "Why is the sky blue on every clear day?"}])
    write(tmp_path / "gsm8k_test.jsonl", [gsm_row(4), {"question": "Why?", "answer": long}])
    write(tmp_path / "mmlu_test.jsonl", [mmlu_row("law", 3)])
    config = EvalConfig(data=str(tmp_path), tasks=("families", "gsm8k", "mmlu"))
    data = DataConfig(train=())
    assert tasks.benchmarks(data, config) is None
    compared = tasks.benchmarks(data, config, always=True)
    assert compared is not None
    assert compared.texts == {
        "mmlu": ["law 3? w x y z"],
        "mmlu answers": [""],
        "gsm8k": [gsm_row(4)["question"], "Why?"],
        "gsm8k answers": ["", long],
    }
    every = tasks.benchmarks(DataConfig(train=(), decontaminate=("all",)), config)
    assert every is not None
    assert list(every.texts) == [
        f"{name}{which}" for name in ("mmlu", "arc_easy", "gsm8k") for which in ("", " answers")
    ]
    assert every.texts["arc_easy"] == ["Why is the sky blue on every clear day?"]
    assert set(every.missing) == {*TASKS} - {"mmlu", "arc_easy", "gsm8k"}
    with pytest.raises(DataError, match="piqa_validation"):
        tasks.benchmarks(DataConfig(train=(), decontaminate=("piqa", "gsm8k")), config)
    with pytest.raises(
        DataError, match=r"data\.decontaminate: no task can be read: eval\.data .*/none: no such folder"
    ):
        tasks.benchmarks(DataConfig(train=(), decontaminate=("all",)), EvalConfig(data=str(tmp_path / "none")))


# ---- files -----------------------------------------------------------------------------------------------------------

ROWS = [{"question": "one", "n": 1}, {"question": "zwei, ü", "n": 2}]
SPLIT = DatasetSplit(("t_test", "t"), "owner/t", None, "test")


@pytest.mark.parametrize("name", ["t_test.jsonl", "t_test.jsonl.gz", "t.jsonl", "t_test_1000.jsonl", "t_test.json.gz"])
def test_rows_of_json_lines_are_found_by_name(name: str, tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    write(tmp_path / "t_train.jsonl", [{"other": 1}])
    write(tmp_path / "t_test_notes.jsonl", [{"other": 1}])
    rows = read_split(SPLIT, str(tmp_path))
    assert rows == ROWS
    assert [row.index for row in rows] == [0, 1]
    assert rows[0].origin == str(tmp_path / name)


def test_rows_of_parquet_in_parts_and_of_csv_are_read(tmp_path: Path) -> None:
    for i, row in enumerate(ROWS):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / f"t_test-0000{i}-of-00002.parquet")
    assert read_split(SPLIT, str(tmp_path)) == ROWS
    other = tmp_path / "csv"
    other.mkdir()
    (other / "t_test.csv").write_text('question,n\none,1\n"zwei, ü",2\n')
    assert read_split(SPLIT, str(other)) == [{**row, "n": str(row["n"])} for row in ROWS]
    assert [row.number("n", 3) for row in read_split(SPLIT, str(other))] == [1, 2]


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_tset.jsonl", [gsm_row(1)])
    with pytest.raises(DataError, match=r"gsm8k_test.*gsm8k_tset\.jsonl.*openai/gsm8k") as caught:
        tasks.load_task("gsm8k", str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(DataError, match="no such folder"):
        tasks.load_task("gsm8k", str(tmp_path / "nowhere"))


def test_two_files_for_one_split_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t_test.jsonl", ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "t_test.parquet")
    with pytest.raises(DataError, match=r"which one.*t_test\.jsonl.*t_test\.parquet"):
        read_split(SPLIT, str(tmp_path))


@pytest.mark.parametrize("text", ["", "{broken\n"])
def test_a_file_without_rows_or_that_is_no_json_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "t_test.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"t_test\.jsonl"):
        read_split(SPLIT, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        ("arc_easy", {"question": "?", "choices": {"text": ["a"], "label": ["A"]}}, r"row 1.*answerKey"),
        ("arc_easy", arc_row(1, answer="E"), r"row 1.*answerKey.*'E'"),
        ("arc_easy", {**arc_row(1), "choices": ["a", "b"]}, r"(row 1.*choices|cannot be read)"),
        ("gsm8k", {"question": "What?"}, r'row 1.*"answer"'),
        ("gsm8k", {"question": "What?", "answer": "no idea"}, r"row 1.*no number"),
        ("mmlu", {**mmlu_row("law", 0), "answer": 4}, r'row 1.*"answer": 4 is not a number from 0 to 3'),
        ("mmlu", {**mmlu_row("law", 0), "choices": ["a", "b"]}, r"row 1.*instead of four"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_column(
    name: str, bad: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    good = {"arc_easy": arc_row(0), "gsm8k": gsm_row(1), "mmlu": mmlu_row("law", 0)}[name]
    write(tmp_path / f"{name}_test.jsonl", [good, bad])
    with pytest.raises(DataError, match=expected) as caught:
        tasks.load_task(name, str(tmp_path), shots=0)
    assert f"{name}_test.jsonl" in str(caught.value)


@pytest.mark.skipif(not EVAL.is_dir(), reason="needs the shared evaluation data")
@pytest.mark.parametrize("name", OURS)
def test_every_task_reads_the_published_rows(name: str) -> None:
    task = tasks.load_task(name, str(EVAL), format="chat")
    assert len(task.examples) == task.settings["rows"] > 400
    assert len({example.id for example in task.examples}) == len(task.examples)
    assert (0.0 if name == "gsm8k" else 0.1) <= task.chance < 0.6
    json.dumps([example.source for example in task.examples[:5]])


# ---- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked_hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the hub: `rows` of it, and the (id, subset, split) that were asked for."""
    state: dict[str, Any] = {"rows": [], "asked": []}

    def load(source: Any) -> Any:
        state["asked"].append((source.path, source.subset, source.split))
        return datasets.Dataset.from_list(state["rows"])

    monkeypatch.setattr(origin, "load_from_hub", load)
    return state


def test_labels_are_read_as_numbers_texts_and_truth_values(asked_hub: dict[str, Any], tmp_path: Path) -> None:
    activity = {"activity_label": "Cooking", "ctx_a": "A man cooks.", "ctx_b": "he", "endings": [*"abcd"], "label": "3"}
    asked_hub["rows"] = [activity]
    assert tasks.load_task("hellaswag").examples[0].gold == (3,)
    asked_hub["rows"] = [{"passage": "P.", "question": "is it", "label": 1}]
    assert tasks.load_task("boolq").examples[0].gold == (1,)
    write(tmp_path / "boolq_validation.jsonl", [{"passage": "P.", "question": "is it", "answer": False}])
    assert tasks.load_task("boolq", str(tmp_path)).examples[0].gold == (0,)
    assert asked_hub["asked"] == [("Rowan/hellaswag", None, "validation"), ("aps/super_glue", "boolq", "validation")]


def test_a_hub_that_does_not_answer_is_a_config_error_that_names_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "hub_answers", lambda: False)
    with pytest.raises(ConfigError, match=r"openai/gsm8k.*eval\.data.*gsm8k_test"):
        tasks.load_task("gsm8k")


# ---- which examples, which shots -------------------------------------------------------------------------------------


def test_max_examples_are_the_first_ones_and_of_every_subject_of_mmlu(tmp_path: Path) -> None:
    write(tmp_path / "arc_easy_test.jsonl", [arc_row(i) for i in range(9)])
    task = tasks.load_task("arc_easy", str(tmp_path), max_examples=4)
    assert [example.source["id"] for example in task.examples] == ["q0", "q1", "q2", "q3"]
    assert task.settings["selection"] == "the first 4"
    rows = [mmlu_row(subject, i) for subject, count in (("law", 2), ("art", 9), ("war", 9)) for i in range(count)]
    write(tmp_path / "mmlu_test.jsonl", rows)
    task = tasks.load_task("mmlu", str(tmp_path), max_examples=10)
    assert Counter(example.source["subject"] for example in task.examples) == {"law": 2, "art": 4, "war": 4}
    assert [e.source["question"] for e in task.examples if e.group == "art"] == [f"art {i}?" for i in range(4)]
    assert "evenly" in task.settings["selection"]


def test_fewer_examples_get_the_same_shots(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_test.jsonl", [gsm_row(i) for i in range(8)])
    write(tmp_path / "gsm8k_train.jsonl", [gsm_row(i) for i in range(100, 140)])
    whole, part = (tasks.load_task("gsm8k", str(tmp_path), max_examples=count) for count in (None, 3))
    assert whole.examples[:3] == part.examples
    assert len({example.prompt.partition("Question: What is 0")[0] for example in whole.examples}) == 8
    assert whole.settings["shots"] == 5
    assert whole.settings["shots_from"].endswith("gsm8k_train.jsonl")


def test_shots_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "arc_easy_test.jsonl", [arc_row(0)])
    with pytest.raises(DataError, match="arc_easy_train"):
        tasks.load_task("arc_easy", str(tmp_path), shots=1)
    write(tmp_path / "arc_easy_train.jsonl", [arc_row(0)])
    with pytest.raises(ConfigError, match=r"eval\.shots: 2.*1 shots of arc_easy"):
        tasks.load_task("arc_easy", str(tmp_path), shots=2)
    write(tmp_path / "mmlu_test.jsonl", [mmlu_row("law", 0)])
    write(tmp_path / "mmlu_dev.jsonl", [mmlu_row("law", 0), *(mmlu_row("art", i) for i in range(5))])
    with pytest.raises(ConfigError, match=r"eval\.shots: 2.*1 rows of law"):
        tasks.load_task("mmlu", str(tmp_path), shots=2)
    with pytest.raises(ConfigError, match=r"humaneval has a fixed prompt"):
        tasks.load_task("humaneval", str(tmp_path), shots=5)


def test_wrong_names_and_settings_are_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r'Did you mean "hellaswag"\?'):
        tasks.check_names(EvalConfig(tasks=("helaswag",)))
    for name in ("ifeval", "truthfulqa_mc1", "truthfulqa_mc2"):
        with pytest.raises(ConfigError, match=rf'"{name}" is not one of .* For others set eval.backend to lm_eval'):
            tasks.check_names(EvalConfig(tasks=(name,)))
        tasks.check_names(EvalConfig(tasks=(name,), backend="lm_eval"))
    with pytest.raises(ConfigError, match=r"eval\.format.*completion, chat"):
        tasks.load_task("mmlu", format="letters")
    with pytest.raises(ConfigError, match=r"eval\.shots: -1"):
        tasks.load_task("mmlu", shots=-1)


# ---- in a chat -------------------------------------------------------------------------------------------------------


def test_a_chat_shows_lettered_options_and_shots_as_earlier_turns(tmp_path: Path) -> None:
    write(tmp_path / "arc_easy_test.jsonl", [arc_row(7, "123", "3")])
    write(tmp_path / "arc_easy_train.jsonl", [arc_row(1), arc_row(2, answer="D"), arc_row(3)])
    task = tasks.load_task("arc_easy", str(tmp_path), shots=2, format="chat")
    (example,) = task.examples
    assert [message["role"] for message in example.prompt] == ["user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in example.prompt[1::2]] == ["B", "D"]
    assert example.prompt[-1]["content"] == (
        "Question 7?\n\nA. choice 1 of 7\nB. choice 2 of 7\nC. choice 3 of 7\n\n"
        "Answer with the letter of the right option only."
    )
    assert (example.continuations, example.gold) == (("A", "B", "C"), (2,))
    assert task.judge([example], [likelihoods(-2, -3, -1)]) == [{"acc": 1.0}]
    assert (task.metric, task.chance) == ("acc", pytest.approx(1 / 3))


def test_problems_of_gsm8k_are_turns_and_any_form_of_the_right_number_counts(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_test.jsonl", [gsm_row(600)])
    write(tmp_path / "gsm8k_train.jsonl", [gsm_row(1)])
    task = tasks.load_task("gsm8k", str(tmp_path), shots=1, format="chat")
    (question,) = task.examples
    assert question.prompt == (
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": gsm_row(1)["answer"]},
        {"role": "user", "content": "What is 600 + 600?"},
    )
    right = [
        "1200",
        "#### 1,200",
        "It is $1,200.00.",
        "600+600=1200",
        "**1200**",
        "#### 1200 apples in 3 boxes",
        "a-1200",
    ]
    wrong = ["", "1,201", "-1200", "1200.5", "#### 7, not 1200", "120", "1200 of 1300"]
    for text in right + wrong:
        assert task.judge([question], [Answer(text, "end_of_turn", 1)]) == [{"exact_match": float(text in right)}], text
    assert tasks.load_task("gsm8k", str(tmp_path), format="chat").settings["shots"] == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("3-4", 4), ("(-4)", -4), ("x = -4", -4), ("-$4.50", -4.5), ("10,000", 10000), ("no", None), ("####", None)],
)
def test_numbers_are_read_with_sign_dollars_and_commas(text: str, number: float | None) -> None:
    assert answers.parse_number(text) == number


# ---- judging ---------------------------------------------------------------------------------------------------------


def test_acc_norm_divides_by_characters(tmp_path: Path) -> None:
    row = {"goal": "G", "sol1": "ab", "sol2": "abcdefgh", "label": 1}
    write(tmp_path / "piqa_validation.jsonl", [row, {**row, "label": 0}])
    task = tasks.load_task("piqa", str(tmp_path))
    given = [likelihoods(-2.0, -3.0)] * 2
    assert task.judge(task.examples, given) == [{"acc": 0.0, "acc_norm": 1.0}, {"acc": 1.0, "acc_norm": 0.0}]
    assert (task.metric, task.chance) == ("acc_norm", 0.5)


@pytest.mark.skipif(not EVAL.is_dir(), reason="needs the published rows")
@pytest.mark.parametrize("format", ["completion", "chat"])
@pytest.mark.parametrize("name", OURS)
def test_what_a_recipe_knows_of_the_metrics_of_a_task_is_what_it_is_judged_by(name: str, format: str) -> None:
    task = tasks.load_task(name, str(EVAL), max_examples=2, shots=0, format=format)
    given = [
        likelihoods(*range(-len(example.continuations), 0))
        if isinstance(example, Choices)
        else Answer("7", "length", 1)
        for example in task.examples
    ]
    expected = METRICS_IN_CHAT.get(name, TASK_METRICS[name]) if format == "chat" else TASK_METRICS[name]
    assert {tuple(marks) for marks in task.judge(task.examples, given)} == {expected}
