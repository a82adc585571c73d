"""What is evaluated in the loop and after: validation loss, generative tasks, sample answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config import EvalConfig, SourceConfig
from sftkit.data import chat, sources
from sftkit.data.pack import Layout
from sftkit.data.types import Examples, Row, Tokenized
from sftkit.errors import ConfigError, DataError
from sftkit.evals import families
from sftkit.evals.validation import validate
from sftkit.generate import generate
from sftkit.parallel import let_go
from sftkit.runtime import Runtime
from sftkit.step import ModelWithLoss


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

    def __post_init__(self) -> None:
        if self.config.tasks and not self.tokenizer.chat_template:
            raise ConfigError("eval.tasks: the tokenizer has no chat template to ask with; set model.chat_template")

    def evaluate(self) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """(val/* of every validation source and eval/<task>/acc of every task, sample answers); every rank calls it."""
        try:
            return self._evaluate()
        finally:
            let_go(self.orig_model)

    def _evaluate(self) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        values: dict[str, float | None] = {}
        if self.validation and self.model is not None and self.layout is not None:
            pad_id = int(self.tokenizer.pad_token_id or 0)
            values |= validate(self.model, self.validation, self.layout, pad_id, self.rt)
        if "families" in self.config.tasks:
            values |= self.families()[0]
        return values, self.samples()

    def families(self) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        """Exact match on held-out instances, (eval/<family>/acc and their mean eval/families/acc, every example)."""
        prompts = families.heldout(self.config.max_examples)
        answers = self.answer([chat.render_prompt(p.messages, self.tokenizer) for p in prompts])
        scores = families.score(prompts, answers)
        values: dict[str, float | None] = {
            f"eval/{'families' if name == 'mean' else name}/acc": value for name, value in scores.items()
        }
        return values, [{**asdict(p), "given": given} for p, given in zip(prompts, answers, strict=True)]

    def answer(self, prompts: Sequence[list[int]]) -> list[str]:
        """Greedy answers, the prompts shared out over the ranks; tensor-parallel ranks of a group decode the same ones.

        Every rank has as many as the one with most: sharded weights are gathered in each forward pass, and all ranks ask
        for a stop between batches.
        """
        alike = self.rt.topology.tensor
        index, count = self.rt.rank // alike, self.rt.world_size // alike
        mine = list(prompts[index::count])
        most = -(-len(prompts) // count)
        filler = [list(prompts[0])] * (most - len(mine)) if prompts else []
        answers = generate(
            self.orig_model,
            self.tokenizer,
            mine + filler,
            stop_ids=chat.end_of_turn_ids(self.tokenizer),
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.config.batch_size,
            in_step=self.rt.topology.sharded,
            between=self.rt.check_stop,
        )[: len(mine)]
        if self.rt.world_size == 1:
            return answers
        pairs = dict(gather_object([(index + i * count, answer) for i, answer in enumerate(answers)]))
        return [answer for _, answer in sorted(pairs.items())]

    def samples(self) -> list[dict[str, Any]]:
        """Prompt, reference and answer of each sample row."""
        prompts = [sample_prompt(row, self.tokenizer) for row in self.sample_rows]
        answers = self.answer([ids for ids, _, _ in prompts])
        return [
            {"prompt": shown, "reference": reference, "answer": answer}
            for (_, shown, reference), answer in zip(prompts, answers, strict=True)
        ]


def sample_rows(validation: Sequence[SourceConfig], tokenize: Callable[[Row], Tokenized], count: int) -> list[Row]:
    """The first rows of the validation sources that can be learned from and whole, in turn."""
    heads = [list(islice(usable_rows(source, tokenize), count)) for source in validation]
    in_turn = [head[i] for i in range(count) for head in heads if i < len(head)]
    return in_turn[:count]


def usable_rows(source: SourceConfig, tokenize: Callable[[Row], Tokenized]) -> Iterator[Row]:
    """Rows that fit in a training row and do not begin with an answer."""
    for row in sources.read(source, "skip"):
        try:
            tokenized = tokenize(row)
        except DataError:
            continue
        asks = row.messages is None or (row.messages and row.messages[0]["role"] != "assistant")
        if tokenized.examples and tokenized.note is None and asks:
            yield row


def sample_prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str, str]:
    """(token ids, prompt text, reference): a conversation up to its first answer, or the start of a text."""
    if row.messages is None:
        text = row.text or ""
        return tokenizer(text[:80])["input_ids"], text[:80], text[80:240]  # type: ignore[index, return-value]
    first = next(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
    shown = "\n".join(f"{message['role']}: {message['content']}" for message in row.messages[:first])
    prompt = chat.render_prompt(row.messages[:first], tokenizer, row.tools)
    return prompt, shown, str(row.messages[first]["content"])
