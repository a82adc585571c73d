"""lm-evaluation-harness as a backend: any task that it has, on the model at hand, with results in the same files."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.commands import install, invocation
from sftkit.config.schema import EvalConfig
from sftkit.data.reading.hub import offline
from sftkit.data.tokens.rendering import limited
from sftkit.errors import ConfigError
from sftkit.evals.results import Evaluated, Result, Z
from sftkit.generation.kv_cache import plain_forward
from sftkit.runtime.hub import hub_answers
from sftkit.runtime.start import Runtime


def check_tasks(names: Sequence[str], config: EvalConfig, rt: Runtime) -> None:
    """Refuse what cannot work before a model is loaded.

    Raises:
        ConfigError: no lm_eval here, several processes, an unknown task, a setting that it does not take.
    """
    if rt.world_size > 1:
        raise ConfigError(
            f"eval.backend: lm_eval evaluates in one process, and this run has {rt.world_size}: use backend sftkit, or "
            "evaluate the checkpoint afterwards: "
            f"{invocation('scripts/evaluate.py', 'PATH', 'TASK', '--backend', 'lm_eval')}"
        )
    if config.data is not None:
        raise ConfigError("eval.data: lm_eval reads its own data sets: set it to null, or use backend sftkit")
    if config.max_new_tokens is not None:
        raise ConfigError("eval.max_new_tokens: lm_eval's tasks have their own: set it to null, or use backend sftkit")
    known = task_manager().all_tasks
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise ConfigError(f'eval.tasks: lm_eval has no task "{name}".{hint} `lm_eval ls tasks` lists them')


def task_manager() -> Any:
    """Return lm_eval's list of its tasks; refuses a recipe where lm_eval is not installed."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"eval.backend: lm_eval needs lm-evaluation-harness ({error}): {install('sftkit[eval]')}, or use backend "
            "sftkit"
        ) from None
    return TaskManager()


def evaluate_with_lm_eval(
    names: Sequence[str], config: EvalConfig, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Evaluated]:
    """Evaluate tasks with lm_eval; the first metric that a task names stands for it.

    Raises:
        ConfigError: a task that cannot be run: its data are not there, or it runs code that the model writes.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    class Limited(HFLM):
        """Render prompts within the limits of all others."""

        def apply_chat_template(self, *args: Any, **options: Any) -> str:
            return limited(super().apply_chat_template, *args, **options)

    connected = hub_answers()  # else its client tries for half a minute before it says so
    # lm_eval pads and batches as it likes, which transformers' own attention takes, with its masks, and ours does not.
    with plain_forward(orig_model), nullcontext() if connected else offline():
        try:
            output = simple_evaluate(
                model=Limited(pretrained=orig_model, tokenizer=tokenizer, batch_size=config.batch_size),
                tasks=list(names),
                num_fewshot=config.shots,
                limit=config.max_examples,
                apply_chat_template=config.format == "chat",
                fewshot_as_multiturn=config.format == "chat",
                task_manager=task_manager(),
            )
        except (OSError, ValueError) as error:
            advice = "" if connected else "; the hub is not in reach, so its data sets must be in the cache (HF_HOME)"
            raise ConfigError(
                f"eval.tasks: lm_eval cannot run {', '.join(names)}: {str(error).strip()[:500]}{advice}"
            ) from error
    assert output is not None
    return [_evaluated(name, output, config) for name in (*output.get("groups", {}), *output["samples"])]


def _evaluated(name: str, output: Any, config: EvalConfig) -> Evaluated:
    """Convert one of lm_eval's results, of a task or of a group."""
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    # Keys are "metric,filter"; the filter "none" is left out of the name, and a metric's error stands beside it.
    for key, value in output["results"][name].items():
        metric, comma, way = key.partition(",")
        if comma and isinstance(value, int | float):
            label = metric.removesuffix("_stderr") + ("" if way == "none" else f"_{way}")
            (errors if metric.endswith("_stderr") else metrics)[label] = float(value)
    metric, value = next(iter(metrics.items()))
    stderr = errors.get(metric)
    low, high = (None, None) if stderr is None else (value - Z * stderr, value + Z * stderr)
    settings = {
        "backend": "lm_eval",
        "lm_eval": version("lm_eval"),
        "task_version": output["versions"].get(name),
        "shots": output["n-shot"].get(name),
        "format": config.format,
        "max_examples": config.max_examples,
    }
    # A group has no samples of its own, only those of its tasks.
    samples = output["samples"].get(name)
    if samples is None:
        settings["subtasks"] = list(output["group_subtasks"].get(name, ()))
    examples = output["results"][name]["sample_len"] if samples is None else output["n-samples"][name]["effective"]
    result = Result(name, metric, value, stderr, low, high, None, examples, settings, metrics)
    return Evaluated(result, [_record(sample) for sample in samples or ()])


def _record(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one example."""
    kept = ("doc_id", "target", "arguments", "resps", "filtered_resps", "filter", "doc")
    scores = {metric: sample.get(metric) for metric in sample.get("metrics", ())}
    # "marks" is the key of results.example_record: files of all tasks are read alike.
    return {"id": str(sample["doc_id"]), **{key: sample.get(key) for key in kept}, "marks": scores}
