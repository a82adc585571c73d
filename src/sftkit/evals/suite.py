"""Evaluate in the loop and after it: validation loss, tasks, captions and sample answers, by `Suite`.

All of it runs on the uncompiled `orig_model`, split over the ranks. What only some runs need (tasks, scoring, captions,
lm-evaluation-harness) is imported where it is used.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, EvalConfig, SourceConfig
from sftkit.config.tables import CODE, WITHOUT_SHOTS
from sftkit.data.batches.collate import collate
from sftkit.data.batches.epoch import plan_epoch, row_shard
from sftkit.data.batches.pack import Layout, validation_layout
from sftkit.data.hygiene import head_hash, held_out
from sftkit.data.tokens import chat
from sftkit.data.tokens.sources import RowTokenizer, read_source
from sftkit.data.types import Examples, Row
from sftkit.errors import DataError, config_error
from sftkit.evals.results import Choices, Likelihoods, Question, Result, Task, evaluated, values_of, write_results
from sftkit.generation import decode, repl
from sftkit.models import kind, structure
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.attention import eager_backend
from sftkit.parallel.wrap import reshard
from sftkit.rundir import files, names
from sftkit.runtime import hardware, script
from sftkit.runtime.start import Runtime

log = logging.getLogger(__name__)

FAMILIES_TASK = "families"
"The held-out built-in tasks, which sftkit runs itself with either backend."
IN_A_ROW = 4
"Batches of a pipeline between two checks for a requested stop, in which its stages wait for one another."
SAMPLE_TOKENS = 32
"Longest sample answer in tokens, if eval.max_new_tokens is null."

# ---- validation loss -------------------------------------------------------------------------------------------------


def validate(
    model: ModelWithLoss, sources: Mapping[str, Examples], layout: Layout, pad_id: int, rt: Runtime
) -> dict[str, float | None]:
    """Return val/<source>/loss (nats per target) and val/<source>/bpb; val/loss and val/bpb over all sources together.

    Every rank runs the same number of forward passes, those of a pipeline the same ones. Bits per byte: nats of all
    targets / ln 2 / UTF-8 bytes of the decoded targets, special tokens not counted as bytes.
    """
    sums = {name: _sums(model, examples, layout, pad_id, rt) for name, examples in sources.items()}
    values: dict[str, float | None] = {}
    for name, (nll, targets, num_bytes) in [*sums.items(), ("", tuple(map(sum, zip(*sums.values(), strict=True))))]:
        prefix = f"val/{name}/" if name else "val/"
        values[f"{prefix}loss"] = nll / targets
        values[f"{prefix}bpb"] = nll / math.log(2) / num_bytes if num_bytes else None
    return values


def _sums(model: ModelWithLoss, examples: Examples, layout: Layout, pad_id: int, rt: Runtime) -> tuple[float, int, int]:
    """Return (nats, targets, bytes) of one source over all ranks."""
    # The ranks that evaluate may differ from those that the layout was made for.
    layout = validation_layout(replace(layout, world_size=rt.data_world_size), examples.lengths)
    backend = eager_backend(model.backend, model.orig_model)
    in_a_row = 1 if rt.topology.stages == 1 else IN_A_ROW * rt.topology.stages
    # MPS has no float64
    nll = torch.zeros((), dtype=torch.float64 if rt.device.type != "mps" else torch.float32, device=rt.device)
    with structure.inference(model.orig_model):
        for number, batch in enumerate(plan_epoch(examples.lengths, layout, seed=None, epoch=0)):
            # A stop is a collective decision: asked for at the same batch by every rank, or one would wait in a pass.
            if number % in_a_row == 0:
                rt.check_stop()
            for rows in batch.micro_batches(layout, rt.data_rank):
                shape = layout.batch_shape(len(rows), batch.row_length)
                collated = collate(examples, rows, shape, pad_id, row_shard(rt.topology, rt.rank))
                nll += model(collated.to(rt.device), backend).measured[model.objective.monitored]
    return float(rt.sum(nll)), int(examples.num_targets.sum()), int(examples.num_bytes.sum())


# ---- sample answers --------------------------------------------------------------------------------------------------


def sample_rows(data: DataConfig, tokenize: RowTokenizer, num_samples: int) -> list[Row]:
    """Return the first rows of the validation sources, and of those held out by data.val_fraction, in turn, that can be
    learned from as a whole; asked as they are trained."""
    shares = [(source, 1.0) for source in data.val]
    shares += [(source, data.val_fraction) for source in data.train if data.val_fraction]
    heads = [list(islice(usable_rows(source, data, tokenize, share), num_samples)) for source, share in shares]
    in_turn = [head[i] for i in range(num_samples) for head in heads if i < len(head)]
    return in_turn[:num_samples]


def usable_rows(source: SourceConfig, data: DataConfig, tokenize: RowTokenizer, share: float = 1.0) -> Iterator[Row]:
    """Yield rows that fit in a training row and do not begin with an answer, as their first answer is trained; of a
    share of the source, those that are held out."""
    learning = tokenize.learning or chat.ANSWERS
    for row in read_source(source, "skip", data):
        if share < 1.0 and not held_out(np.array([head_hash(row)], np.uint64), share)[0]:
            continue
        try:
            # Tokenized only to learn whether it is usable; the prompt is made of the row itself.
            tokenized = tokenize(row)
        except DataError:
            continue
        if not tokenized.examples or tokenized.note is not None:
            continue
        if row.text is not None:
            yield row
        elif row.messages and row.messages[0]["role"] != "assistant":
            yield chat.as_trained(row, _first_answer(row), tokenize.tokenizer, learning.thinking)


def _first_answer(row: Row) -> int:
    """Return the index of the first answer that is not given as context, else of the first one."""
    assistant = [i for i, message in enumerate(row.messages or ()) if message["role"] == "assistant"]
    return next((i for i in assistant if i >= row.context_messages), assistant[0])


def sample_prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str, str]:
    """Return (token ids, prompt text, reference): a conversation up to its first answer, or the start of a text."""
    if row.messages is None:
        text = row.text or ""
        return tokenizer(text[:80])["input_ids"], text[:80], text[80:240]
    first = _first_answer(row)
    shown = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in row.messages[:first])
    prompt = chat.render_prompt(replace(row, messages=row.messages[:first]), tokenizer)
    return prompt, shown, str(row.messages[first].get("content") or "")


# ---- tasks -----------------------------------------------------------------------------------------------------------


def load_tasks(config: EvalConfig, tokenizer: PreTrainedTokenizerBase, rt: Runtime) -> tuple[Task[Any, Any], ...]:
    """Load the tasks of eval.tasks that sftkit runs itself, with all rows; the main rank reads first.

    Raises:
        ConfigError: a task or setting that cannot work here. DataError: rows that are missing or cannot be used.
    """
    if not config.tasks:
        return ()
    from sftkit.evals import tasks

    # Errors of the recipe alone are raised before anything is read.
    tasks.check_names(config)
    if config.shots and set(config.tasks) <= {*WITHOUT_SHOTS}:
        raise config_error("no task takes shots", shots=config.shots, tasks=", ".join(config.tasks))
    # Then what this machine decides: whether lm_eval has its tasks, and whether there is a sandbox for code.
    if elsewhere := _of_lm_eval(config):
        from sftkit.evals import harness

        harness.check_tasks(elsewhere, config, rt)
    if code := [task for task in config.tasks if task in CODE]:
        from sftkit.evals.tasks.code import require_sandbox

        rt.print(f"model-written code runs in the sandbox; memory: {require_sandbox(code[0])}")
    # The main rank reads first: it may download, and the others find the files. What was read must fit the tokenizer.
    with rt.main_first():
        loaded = tuple(
            tasks.load_task(
                name, config.data, None if name in WITHOUT_SHOTS else config.shots, config.format, config.max_examples
            )
            for name in config.tasks
            if name not in elsewhere
        )
    for task in loaded:
        if not task.examples:
            raise DataError(f"eval.tasks: {task.name} has no examples")
        if not isinstance(task.examples[0].prompt, str) and not tokenizer.chat_template:
            raise config_error("task without chat template", task=task.name)
    return loaded


def _of_lm_eval(config: EvalConfig) -> list[str]:
    """Return the tasks that lm_eval runs."""
    return [name for name in config.tasks if name != FAMILIES_TASK] if config.backend == "lm_eval" else []


def check_room(tasks: Sequence[Task[Any, Any]], config: EvalConfig, longest: int) -> None:
    """Reject answers that leave no room for a prompt in the `longest` tokens that the model reads.

    Raises:
        ConfigError: the task, and how long its answers may be.
    """
    asks = {"samples": config.max_new_tokens} if config.samples and config.max_new_tokens else {}
    for task in tasks:
        if not isinstance(task.examples[0], Choices):
            asks[task.name] = config.max_new_tokens or max(question.max_new_tokens for question in task.examples)
    for name, max_new_tokens in asks.items():
        if max_new_tokens >= longest:
            less = max(longest // 2, 1)
            raise config_error("no room for a prompt", tokens=max_new_tokens, task=name, longest=longest, less=less)


@dataclass(frozen=True)
class Suite:
    """Evaluates `orig_model`, eagerly, split over the ranks."""

    config: EvalConfig
    orig_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rt: Runtime
    model: ModelWithLoss | None = None
    "orig_model with the run's loss, for validation; not the wrapped one"
    validation: Mapping[str, Examples] = field(default_factory=dict)
    layout: Layout | None = None
    sample_rows: Sequence[Row] = ()
    run_dir: Path | None = None
    "where evals/step-NNNNNN/ gets every example of the tasks; None: nowhere"
    tasks: tuple[Task[Any, Any], ...] | None = None
    "what load_tasks gives for the config, if it was called before"
    part: str = ""
    "a folder in evals/step-NNNNNN/ for these results; empty: that folder itself"
    model_name: str | None = None
    "what results call the model; None: the run directory"

    def __post_init__(self) -> None:
        if self.config.tasks:
            kind.check_causal(self.orig_model.config, f"eval.tasks={','.join(self.config.tasks)}")
        check_room([task for task, _ in self.encoded_tasks], self.config, self._longest)

    @cached_property
    def encoded_tasks(self) -> list[tuple[Task[Any, Any], list[Any]]]:
        """Return each task with the tokens of its examples, as `scoring.encode_examples` makes them."""
        loaded = self.tasks if self.tasks is not None else load_tasks(self.config, self.tokenizer, self.rt)
        if not loaded:
            return []
        from sftkit.evals import scoring

        return [(task, scoring.encode_examples(task.examples, self.tokenizer)) for task in loaded]

    def evaluate(self, step: int | None = None) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """Return (val/* of every validation source, eval/* of every task and of captions, sample answers); every rank
        calls it.

        With a step and a run directory the main rank writes every example to <run>/evals/step-NNNNNN/.
        """
        try:
            values = self.validate()
            captioned, written = self.captions()
            found = self.run_tasks() + captioned
            if found and step is not None and self.run_dir is not None and self.rt.is_main:
                folder = names.evaluation_dir(self.rt.output_dir(self.run_dir), step) / self.part
                try:
                    write_results(folder, found)
                except OSError as error:  # a full disk costs the details, not the run
                    log.warning("%s: examples of the evaluation are lost (%s)", folder, error.strerror or error)
            # Samples last: they are only looked at.
            return values | values_of(found), [*written, *self.samples()]
        finally:
            # Also after an error: eager passes have gathered weights, which the next step expects as shards.
            reshard(self.orig_model)

    def validate(self) -> dict[str, float | None]:
        """Return val/loss, val/bpb and those of every validation source; empty without one."""
        if not self.validation or self.model is None or self.layout is None:
            return {}
        documents = sum(map(len, self.validation.values()))
        with script.working(f"evaluating the loss of {script.counted(documents, 'document')}"):
            return validate(self.model, self.validation, self.layout, int(self.tokenizer.pad_token_id or 0), self.rt)

    def captions(self) -> tuple[list[Result], list[dict[str, Any]]]:
        """Return the results of texts written for validation documents with something to encode, and the first few
        texts; empty without any."""
        encoded = {name: one for name, one in self.validation.items() if one.encoder_inputs is not None}
        if not encoded or self.layout is None:
            return [], []
        from sftkit.evals.scoring import evaluate_captions

        with script.working("describing what is held out"):
            # The default limit is the longest row of training.
            config = replace(self.config, max_new_tokens=self.config.max_new_tokens or self.layout.max_length)
            found, written = evaluate_captions(self.orig_model, self.tokenizer, encoded, config, self.rt)
        return self._with_settings(found), written

    def _with_settings(self, found: list[Result]) -> list[Result]:
        """Return the results with `about` before their own settings."""
        return [replace(one, settings={**self.about, **one.settings}) for one in found]

    @cached_property
    def about(self) -> dict[str, Any]:
        """Return what was evaluated, and on what: part of the settings of every result."""
        here = hardware.environment(self.rt.device, self.rt.world_size)
        packages: Any = here["packages"]
        return {
            "model": self.model_name or (str(self.run_dir) if self.run_dir else None),
            "manifest": files.digest(Path(self.model_name)) if self.model_name else None,
            "dtype": str(self.orig_model.dtype).removeprefix("torch."),
            "device": here["device"],
            "processes": self.rt.world_size,
            "batch_size": self.config.batch_size,
            **{package: packages[package] for package in ("torch", "transformers", "sftkit")},
            "git": here["git"],
        }

    @property
    def about_validation(self) -> dict[str, Any]:
        """Return what was evaluated, the documents of each source, and how long they may be."""
        documents = {name: len(of) for name, of in self.validation.items()}
        return self.about | {"documents": documents, "max_length": self.layout and self.layout.max_length}

    @cached_property
    def _longest(self) -> int:
        """Return the most tokens that the model reads at once."""
        return decode.longest_input(structure.positions(self.orig_model), self.tokenizer)

    def run_tasks(self) -> list[Result]:
        """Return the result of every task, with its examples, on every rank."""
        found = []
        for task, encoded in self.encoded_tasks:
            with script.working(f"evaluating {task.name}, {len(task.examples):,} examples"):
                found.append(self._run(task, encoded))
        if elsewhere := _of_lm_eval(self.config):
            from sftkit.evals.harness import evaluate_with_lm_eval

            with script.working(f"evaluating {', '.join(elsewhere)} with lm-evaluation-harness"):
                found += evaluate_with_lm_eval(elsewhere, self.config, self.orig_model, self.tokenizer)
        return self._with_settings(found)

    def _run(self, task: Task[Any, Any], encoded: list[Any]) -> Result:
        """Ask the model one task, and judge its answers."""
        from sftkit.evals import scoring

        outputs: Sequence[Likelihoods | repl.Answer]
        settings: dict[str, Any] = {"backend": "sftkit", "max_examples": self.config.max_examples}
        if isinstance(task.examples[0], Choices):
            num_truncated = scoring.num_truncated(encoded, self._longest)
            batching = decode.Batching(self.config.batch_size, self.rt)
            outputs = scoring.score(self.orig_model, self.tokenizer, task.examples, batching, encoded)
        else:
            limits = [self.config.max_new_tokens or question.max_new_tokens for question in task.examples]
            settings["max_new_tokens"] = max(limits)
            num_truncated = sum(len(prompt) + n > self._longest for prompt, n in zip(encoded, limits, strict=True))
            outputs = self.answers(encoded, limits, task.examples)
        if num_truncated:
            prompts = script.counted(num_truncated, "prompt")
            log.warning("%s: %s longer than the model's context, truncated at the beginning", task.name, prompts)
        settings["prompts_cut"] = num_truncated
        # On one rank: judges may run programs, and all ranks must log the same.
        scores = self.rt.from_main(lambda: task.judge(task.examples, outputs))
        return evaluated(task, outputs, scores, settings)

    def answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], questions: Sequence[Question] = ()
    ) -> list[repl.Answer]:
        """Return greedy answers to tokenized prompts of at most `max_new_tokens` each; a prompt that leaves no room for
        its answer loses its beginning.

        Args:
            questions: those that the prompts were made of, if they have stop texts or groups.
        """
        room = [self._longest - n for n in max_new_tokens]
        assert all(n > 0 for n in room), "check_room has seen to it"
        # The end stays: it holds the question.
        truncated = [prompt[-n:] for prompt, n in zip(prompts, room, strict=True)]
        return decode.generate(
            self.orig_model,
            self.tokenizer,
            truncated,
            decode.Batching(self.config.batch_size, self.rt),
            max_new_tokens=max_new_tokens,
            stop_texts=[one.stop for one in questions] or None,
            groups=[one.group for one in questions] or None,
        )

    def samples(self) -> list[dict[str, Any]]:
        """Return prompt, reference and answer of each sample row, and why the answer ended."""
        prompts = [sample_prompt(row, self.tokenizer) for row in self.sample_rows]
        max_new_tokens = self.config.max_new_tokens or min(SAMPLE_TOKENS, self._longest // 2)
        answers = self.answers([ids for ids, _, _ in prompts], [max_new_tokens] * len(prompts))
        return [
            {"prompt": shown, "reference": reference, "answer": answer.text, "stop": answer.stop}
            for (_, shown, reference), answer in zip(prompts, answers, strict=True)
        ]
