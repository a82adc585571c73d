"""Evaluation apart from a run of ours: model and validation data for scripts/evaluate.py, and lm-evaluation-harness.

lm-evaluation-harness is a backend: any task that it has, on the model at hand, with results in the same files.
"""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.commands import install, invocation
from sftkit.config.schema import DataConfig, EvalConfig, LossConfig, ModelConfig, SourceConfig, TrainConfig
from sftkit.data.batches import loader, pack
from sftkit.data.reading.origin import offline
from sftkit.data.tokens import chat, template, text
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Examples
from sftkit.errors import ConfigError, config_error, did_you_mean
from sftkit.evals.results import Result, Z
from sftkit.generation import decode, kv_cache
from sftkit.models import kind, load, structure
from sftkit.models.files import adapter_at
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.attention import has_sinks, windows
from sftkit.parallel.wrap import Sharding, distribute
from sftkit.rundir.names import TRAINING_STATE, resolve
from sftkit.runtime.hub import hub_answers
from sftkit.runtime.start import Runtime

VALIDATION_LENGTH = 2048
"The most tokens of a document of --val, for a model that comes from no run."
LEARNED_WITH = ("thinking", "split_turns", "targets")
TRAINED_WITH = ("max_length", *LEARNED_WITH, "too_long")
"Settings of data that are kept in a checkpoint's state."
VALIDATION_ROWS = 4
"Documents of --val that go through the model together."


def load_for_evaluation(source: ModelConfig, tokenizer: PreTrainedTokenizerBase, rt: Runtime) -> ModelWithLoss:
    """Load the model on its device, sharded over the ranks if the launcher's configuration says so."""
    # Empty if it will be sharded: every rank then reads its own part, and no rank holds the whole.
    orig_model = load.load_model(source, tokenizer, 0, rt.precision, empty=rt.topology.sharded)
    # sdpa is plain causal attention: no windows, no soft-capping, no sinks, whole rows on each rank
    softcap = getattr(orig_model.config.get_text_config(), "attn_logit_softcapping", None)
    special = windows(orig_model.config) or softcap or has_sinks(orig_model) or rt.topology.context > 1
    model = ModelWithLoss(orig_model, "reference" if special else "sdpa", NextToken(LossConfig()))
    if not rt.topology.sharded:
        return model.to(rt.device)
    distribute(model, source, Sharding(), rt)
    return model


def longest_of(source: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that the model reads at once, from its config alone.

    Raises:
        ConfigError: it has an encoder.
    """
    assert source.path is not None
    files = adapter_at(source)
    model = source if files is None else files.base
    path = resolve(str(model.path))
    config = load.start_config(path, load.load_options(path, model))
    kind.check_causal(config, "scripts/evaluate.py")
    return decode.longest_input(structure.max_positions(config), tokenizer)


def load_validation(
    sources: Sequence[SourceConfig], source: ModelConfig, longest: int, tokenizer: PreTrainedTokenizerBase, rt: Runtime
) -> tuple[dict[str, Examples], pack.Layout | None]:
    """Return (documents of each source, their layout). Targets are the answers of conversations, and all of plain text.

    Documents are made like those that the checkpoint was trained on, by the settings TRAINED_WITH of its run; if its
    recipe names no data.targets, targets are the answers, also after mid-training. If the checkpoint does not say how
    long documents are, they have as many tokens as the model reads, up to VALIDATION_LENGTH.

    Args:
        sources: like data.val.
    """
    if not sources:
        return {}, None
    # A document that is cut at another length has another loss, so the run's own settings come before today's defaults.
    state = Path(source.path or "") / TRAINING_STATE
    kept = json.loads(state.read_text()) if state.is_file() else {}  # a model of no run has none
    trained = {name: kept[name] for name in TRAINED_WITH if kept.get(name) is not None}
    max_length = min(trained.get("max_length") or VALIDATION_LENGTH, longest)
    learning = replace(chat.ANSWERS, **{name: trained[name] for name in LEARNED_WITH if name in trained})
    too_long = trained.get("too_long", "truncate")
    tokenize = RowTokenizer(text.tokenize_any, tokenizer, max_length, too_long, learning)
    chosen = tuple(sources)
    # All sources together decide how rows are laid out.
    data = DataConfig(train=chosen, val=chosen, layout="dynamic", pad_multiple=math.gcd(max_length, pack.PAD_MULTIPLE))
    together, validation = loader.load_examples(data, tokenize, rt)
    batch = TrainConfig(global_batch_size=VALIDATION_ROWS * rt.data_world_size, micro_batch_size=VALIDATION_ROWS)
    return validation, pack.make_layout(data, batch, together.lengths, max_length, rt.data_world_size)


# ---- lm-evaluation-harness -------------------------------------------------------------------------------------------


def check_tasks(names: Sequence[str], config: EvalConfig, rt: Runtime) -> None:
    """Reject settings that cannot work, before a model is loaded.

    Raises:
        ConfigError: no lm_eval here, several processes, an unknown task, a setting that it does not take.
    """
    if rt.world_size > 1:
        command = invocation("scripts/evaluate.py", "PATH", "TASK", "--backend", "lm_eval")
        raise config_error("lm_eval in several processes", world_size=rt.world_size, command=command)
    if config.data is not None:
        raise ConfigError("eval.data: lm_eval reads its own data sets: set it to null, or use backend sftkit")
    if config.max_new_tokens is not None:
        raise ConfigError("eval.max_new_tokens: lm_eval's tasks have their own: set it to null, or use backend sftkit")
    known = task_manager().all_tasks
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ConfigError(f'eval.tasks: lm_eval has no task "{name}".{meant} `lm_eval ls tasks` lists them')


def task_manager() -> Any:
    """Return lm_eval's list of its tasks. ConfigError: lm_eval is not installed."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise config_error("no lm_eval", error=error, install=install("sftkit[eval]")) from None
    return TaskManager()


def evaluate_with_lm_eval(
    names: Sequence[str], config: EvalConfig, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Result]:
    """Evaluate tasks with lm_eval; the first metric that a task names stands for it.

    Raises:
        ConfigError: a task that cannot be run: its data are not there, or it runs code that the model writes.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    class Limited(HFLM):
        """Render prompts within the limits of all others."""

        def apply_chat_template(self, *args: Any, **options: Any) -> str:
            return template.limited(super().apply_chat_template, *args, **options)

    connected = hub_answers()  # without a connection its client retries for half a minute
    # lm_eval pads and batches as it likes, which transformers' own attention takes, with its masks, and ours does not.
    with kv_cache.plain_forward(orig_model), nullcontext() if connected else offline():
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
            why = f"{str(error).strip()[:500]}{advice}"
            raise ConfigError(f"eval.tasks: lm_eval cannot run {', '.join(names)}: {why}") from error
    assert output is not None
    return [_evaluated(name, output, config) for name in (*output.get("groups", {}), *output["samples"])]


def _evaluated(name: str, output: Any, config: EvalConfig) -> Result:
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
    kept = ("doc_id", "target", "arguments", "resps", "filtered_resps", "filter", "doc")
    records = []
    for sample in samples or ():
        scores = {name: sample.get(name) for name in sample.get("metrics", ())}
        # "marks" is the key of results.example_record: files of all tasks are read alike.
        records.append({"id": str(sample["doc_id"]), **{key: sample.get(key) for key in kept}, "marks": scores})
    return Result(name, metric, value, stderr, low, high, None, examples, settings, metrics, records)
