"""Our tasks against lm-evaluation-harness, example by example: what is asked, how answers are judged, the scores.

Its own task files are used, with the rows read from the same local files.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import SHARED_DATA

from sftkit.config.tables import TASKS
from sftkit.evals import tasks
from sftkit.evals.results import Choices, Likelihoods, Question, Task
from sftkit.generation.repl import Answer

lm_eval = pytest.importorskip("lm_eval")

EVAL = SHARED_DATA / "eval"
MODEL = SHARED_DATA / "models" / "stories260k"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EVAL.is_dir(), reason="needs the shared evaluation data"),
]

SUBJECTS = ("abstract_algebra", "high_school_us_history", "us_foreign_policy")
EXAMPLES = 12
CASES = [
    *(("mmlu", 0), ("mmlu", 5), ("arc_easy", 0), ("arc_easy", 25), ("arc_challenge", 0), ("arc_challenge", 25)),
    *(("hellaswag", 0), ("hellaswag", 10), ("piqa", 0), ("piqa", 3), ("openbookqa", 0), ("openbookqa", 3)),
    *(("boolq", 0), ("boolq", 3), ("gsm8k", 0), ("gsm8k", 5)),
]
YAML = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    **{f"mmlu_{subject}": f"mmlu/default/mmlu_{subject}.yaml" for subject in SUBJECTS},
}
METRICS = {
    "acc": "acc",
    "acc_norm": "acc_norm",
    "exact_match": "exact_match,strict-match",
    "exact_match_flexible": "exact_match,flexible-extract",
}
"Ours -> theirs; theirs of a generative task with the filter."


# ---- the same rows for both ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """A folder for us, and the files of each of their tasks by split."""

    ours: Path
    theirs: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    made: dict[str, dict[str, str]] = {}
    for name in ("arc_easy", "arc_challenge", "gsm8k"):
        for split, count in (("test", EXAMPLES), ("train", 60)):
            path = _write(ours / f"{name}_{split}.jsonl", _rows(f"{name}_{split}")[:count])
            made.setdefault(name, {})[split] = path
    for name, source in (
        ("hellaswag", "hellaswag_validation_1000"),
        *((n, f"{n}_validation") for n in ("piqa", "boolq")),
    ):
        rows = _rows(source)
        for split, part in (
            ("validation", rows[:EXAMPLES]),
            ("train", rows[EXAMPLES - 2 : 60]),
        ):  # two rows are in both
            _write(ours / f"{name}_{split}.jsonl", part)
            relabelled = [{"label": int(row["answer"]), **row} if name == "boolq" else row for row in part]
            made.setdefault(name, {})[split] = _write(theirs / f"{name}_{split}.jsonl", relabelled)
    for split, part in (("test", slice(EXAMPLES)), ("train", slice(EXAMPLES, 60))):
        path = _write(ours / f"openbookqa_{split}.jsonl", _rows("openbookqa_validation")[part])
        made.setdefault("openbookqa", {})[split] = path
    made["openbookqa"]["validation"] = made["openbookqa"]["test"]
    for name in ("arc_easy", "arc_challenge"):
        made[name]["validation"] = made[name]["train"]
    for split, count in (("test", EXAMPLES // len(SUBJECTS)), ("dev", 5)):
        of_subject = {s: [r for r in _rows(f"mmlu_{split}") if r["subject"] == s][:count] for s in SUBJECTS}
        _write(ours / f"mmlu_{split}.jsonl", [row for rows in of_subject.values() for row in rows])
        for subject, rows in of_subject.items():
            made.setdefault(f"mmlu_{subject}", {})[split] = _write(theirs / f"mmlu_{subject}_{split}.jsonl", rows)
    return Files(ours, made)


def _rows(name: str) -> list[dict[str, Any]]:
    with gzip.open(EVAL / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@cache
def _config(name: str) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.__file__).parent / "tasks" / YAML[name])


def their_tasks(name: str, shots: int, files: Files) -> list[Any]:
    """lm-evaluation-harness's tasks: one, or one for each subject. `shots` in the name keeps runs apart."""
    from lm_eval.api.task import ConfigurableTask

    made = []
    for part in [f"mmlu_{subject}" for subject in SUBJECTS] if name == "mmlu" else [name]:
        read = {"data_files": files.theirs[part], "cache_dir": str(files.ours / "cache")}
        changed = {"task": f"{part}@{shots}", "dataset_path": "json", "dataset_name": None, "dataset_kwargs": read}
        task = ConfigurableTask(config={**_config(part), **changed, "num_fewshot": shots})
        task.set_fewshot_seed(1234)
        made.append(task)
    return made


@pytest.fixture(scope="module")
def both(files: Files) -> Any:
    """both(name, shots) -> (our task, their tasks with requests built)."""

    @cache
    def make(name: str, shots: int) -> tuple[Task[Any, Any], list[Any]]:
        theirs = their_tasks(name, shots, files)
        for task in theirs:
            task.build_all_requests()
        return tasks.load_task(name, str(files.ours), shots), theirs

    return make


def requests(theirs: list[Any]) -> Iterator[tuple[Any, int, list[Any]]]:
    """(task, number of the example in it, its requests), one example after the other."""
    for task in theirs:
        of_example: dict[int, list[Any]] = {}
        for instance in task.instances:
            of_example.setdefault(instance.doc_id, []).append(instance)
        yield from ((task, number, instances) for number, instances in sorted(of_example.items()))


# ---- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shots"), CASES)
def test_the_model_is_asked_the_same_character_by_character(name: str, shots: int, both: Any) -> None:
    ours, theirs = both(name, shots)
    asked = list(requests(theirs))
    assert len(ours.examples) == len(asked) == EXAMPLES
    for example, (_, _, instances) in zip(ours.examples, asked, strict=True):
        if isinstance(example, Choices):
            told = [(example.prompt, continuation) for continuation in example.continuations]
            assert told == [instance.args for instance in instances]
        else:
            prompt, settings = instances[0].args
            assert example.prompt == prompt
            assert list(example.stop) == settings["until"]


def test_every_subject_of_mmlu_is_introduced_in_the_same_words() -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    introduced = {}
    for path in folder.glob("mmlu_*.yaml"):
        config = load_yaml(path)
        introduced[config["dataset_name"]] = config["description"]
    ours = tasks.load_task("mmlu", str(EVAL), max_examples=57)
    assert {example.source["subject"] for example in ours.examples} == set(introduced)
    for example in ours.examples:
        assert example.prompt.startswith(introduced[example.source["subject"]])


def test_shots_and_lengths_of_answers_are_theirs_by_default(files: Files) -> None:
    from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS

    for name in TASKS:
        parts = [f"mmlu_{SUBJECTS[0]}"] if name == "mmlu" else [name]
        if parts[0] in YAML:
            task = tasks.load_task(name, str(files.ours), max_examples=1)
            assert task.settings["shots"] == (_config(parts[0]).get("num_fewshot") or 0)
            if isinstance(task.examples[0], Question):
                assert task.examples[0].max_new_tokens == DEFAULT_MAX_GEN_TOKS


# ---- how answers are judged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shots"), [case for case in CASES if case[1] == 0 and case[0] != "gsm8k"])
def test_any_log_likelihoods_get_the_same_marks(name: str, shots: int, both: Any) -> None:
    ours, theirs = both(name, shots)
    rng = random.Random(0)
    for _ in range(5):
        given = [tuple(-rng.choice((1, 5, 20, 30 * rng.random())) for _ in e.continuations) for e in ours.examples]
        likelihoods = [Likelihoods(sums, (False,) * len(sums), (1,) * len(sums)) for sums in given]
        marks = ours.judge(ours.examples, likelihoods)
        for sums, mark, (task, _, instances) in zip(given, marks, requests(theirs), strict=True):
            expected = task.process_results(instances[0].doc, [(nats, False) for nats in sums])
            assert mark == pytest.approx({metric: expected[METRICS[metric]] for metric in mark})
            assert len(mark) == len(expected)


ANSWERS = (
    "{n}",
    " She has {n} left.\n#### {n}",
    "#### {n}.",
    "#### ${n}",
    "#### {n} dollars\nQuestion",
    "#### 1{n}\n#### {n}",
    "####{n}",
    "it is ${n}.00",
    "it is {n}, or 7",
    "-{n}",
    "{n}.5",
    "no number, ...",
    "3 + 4 = {n}\nThe answer is {n}.",
    "THE ANSWER IS: {n}%",
    "",
)


def test_any_answers_to_gsm8k_get_the_same_marks(both: Any) -> None:
    ours, theirs = both("gsm8k", 0)
    for template in ANSWERS:
        texts = [template.format(n=example.target.rpartition("#### ")[2]) for example in ours.examples]
        marks = ours.judge(ours.examples, [Answer(text, "length", 1) for text in texts])
        (task,) = theirs
        for instance, text in zip(task.instances, texts, strict=True):
            instance.resps, instance.filtered_resps = [text], {}
        task.apply_filters()
        for mark, instance in zip(marks, task.instances, strict=True):
            expected = {
                f"exact_match,{name}": task.process_results(instance.doc, [found])["exact_match"]
                for name, found in instance.filtered_resps.items()
            }
            assert mark == {metric: expected[METRICS[metric]] for metric in mark}, (template, instance.filtered_resps)


# ---- scores of a small pretrained model ------------------------------------------------------------------------------

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model() -> Any:
    """(model, tokenizer), of 512 positions: the longer prompts are cut."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval(), tokenizer


@pytest.fixture(scope="module")
def their_results(files: Files, model: Any) -> Any:
    """simple_evaluate's results, with every case in them."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    orig_model, tokenizer = model
    made = [task for name, shots in CASES for task in their_tasks(name, shots, files)]
    for task in made:
        if task.OUTPUT_TYPE == "generate_until":
            task.config.generation_kwargs["max_gen_toks"] = NEW_TOKENS
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=orig_model, tokenizer=tokenizer, batch_size=16, device="cpu"),
        tasks=made,
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return results


def parts_of(name: str, shots: int) -> list[str]:
    return [f"{part}@{shots}" for part in ([f"mmlu_{s}" for s in SUBJECTS] if name == "mmlu" else [name])]


def their_samples(results: dict[str, Any], name: str, shots: int) -> list[list[dict[str, Any]]]:
    """What they kept of each example, once for each filter."""
    kept = []
    for part in parts_of(name, shots):
        of_example: dict[int, list[dict[str, Any]]] = {}
        for sample in results["samples"][part]:
            of_example.setdefault(sample["doc_id"], []).append(sample)
        kept += [samples for _, samples in sorted(of_example.items())]
    return kept


@pytest.mark.parametrize(("name", "shots"), [case for case in CASES if case[0] != "gsm8k"])
def test_log_likelihoods_predictions_and_scores_are_theirs(
    name: str, shots: int, both: Any, model: Any, their_results: Any
) -> None:
    from sftkit.evals.scoring import score
    from sftkit.generation.decode import Batching

    ours, _ = both(name, shots)
    theirs = their_samples(their_results, name, shots)
    given = score(*model, ours.examples, Batching(16))
    marks = ours.judge(ours.examples, given)
    for likelihoods, mark, (sample,) in zip(given, marks, theirs, strict=True):
        nats, greedy = zip(*((float(nats), bool(greedy)) for nats, greedy in sample["filtered_resps"]), strict=True)
        assert likelihoods.sums == pytest.approx(nats, abs=1e-4, rel=1e-5)
        assert likelihoods.greedy == greedy
        assert _best(likelihoods.sums) == _best(nats)
        assert mark == pytest.approx({metric: sample[METRICS[metric]] for metric in mark}, abs=1e-4)
    assert set(marks[0]) >= {ours.metric}
    for metric in marks[0]:
        parts = [their_results["results"][part][f"{METRICS[metric]},none"] for part in parts_of(name, shots)]
        assert sum(mark[metric] for mark in marks) / EXAMPLES == pytest.approx(sum(parts) / len(parts), abs=1e-4)


@pytest.mark.parametrize(("name", "shots"), [case for case in CASES if case[0] == "gsm8k"])
def test_answers_to_gsm8k_and_their_marks_are_theirs(
    name: str, shots: int, both: Any, model: Any, their_results: Any
) -> None:
    from sftkit.evals.scoring import encode_texts
    from sftkit.generation.decode import Batching, generate

    orig_model, tokenizer = model
    ours, _ = both(name, shots)
    theirs = their_samples(their_results, name, shots)
    longest = orig_model.config.max_position_embeddings - NEW_TOKENS
    prompts = [ids[-longest:] for ids in encode_texts([(q.prompt, False) for q in ours.examples], tokenizer)]
    answers = generate(
        orig_model,
        tokenizer,
        prompts,
        Batching(8),
        end_ids=[tokenizer.eos_token_id],
        max_new_tokens=NEW_TOKENS,
        stop_texts=[question.stop for question in ours.examples],
    )
    marks = ours.judge(ours.examples, answers)
    for answer, mark, samples in zip(answers, marks, theirs, strict=True):
        assert answer.text == samples[0]["resps"][0][0]
        expected = {f"exact_match,{sample['filter']}": sample["exact_match"] for sample in samples}
        assert mark == {metric: expected[METRICS[metric]] for metric in mark}


def _best(nats: Any) -> int:
    return max(range(len(nats)), key=nats.__getitem__)
