"""Sharded models are evaluated like whole ones: the same losses and answers, on all ranks, without a trace in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, torchrun
from sharded_worker import SAMPLES, TOKENS, Job, evaluation
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sftkit.data.tokens import chat
from sftkit.data.types import Row
from sftkit.evals.tasks.answers import heldout


def prepare(folder: Path, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A model and its tokenizer in a folder; the lengths of its answers, which are different ones.

    A model that never learned anything never ends a turn. So the end of a turn changes places in the head with the token
    that comes first at the most different places of the answers.
    """
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer) + 1, **sizes, **heads, initializer_range=0.5))
    prompts = [question.prompt for question in heldout(1)] + [(row.messages or [])[:1] for row in SAMPLES]
    rows = []
    for messages in prompts:
        ids = torch.tensor([chat.render_prompt(Row("x:1", messages=messages), tokenizer)])
        rows.append(
            model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
        )
    firsts = {token: [row.index(token) if token in row else TOKENS for row in rows] for row in rows for token in row}
    best = max(firsts, key=lambda token: len(set(firsts[token])))
    (end,) = chat.end_of_turn_ids(tokenizer)
    with torch.no_grad():
        swapped = model.lm_head.weight[[end, best]].clone()
        model.lm_head.weight[[best, end]] = swapped
    model.save_pretrained(folder)
    return firsts[best]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    assert len(set(prepare(tmp_path, tokenizer))) > 3
    return tmp_path


def compare(folder: Path, tokenizer: PreTrainedTokenizerFast, processes: int, *cases: str) -> None:
    alone = evaluation(Job(cpu_runtime(), "one", folder), tokenizer)
    assert len(alone["answers"]) == 3  # which neither two nor four ranks divide
    torchrun(processes, "sharded_worker.py", "evaluate", str(folder), *cases)
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "evaluated.json").read_text())
    for name, ranks in found.items():
        assert name == "ddp" or len({rank["forwards"] for rank in ranks}) == 1, name  # whole models need no company
        for rank in ranks:
            assert rank["values"] == pytest.approx(alone["values"], rel=1e-5), name
            for key in ("answers", "given", "fewer", "predictions"):
                assert rank[key] == alone[key], (name, key)
            tolerance = {"rel": 1e-5} if "tensor" in name else {"rel": 0.0, "abs": 0.0}
            assert rank["likelihoods"] == pytest.approx(alone["likelihoods"], **tolerance), name
            assert rank["whole"] == [] or name.startswith(("ddp", "pipeline")), name
            assert rank["interrupted"] == rank["plain"], name
            assert rank["plain"] == pytest.approx(alone["plain"], rel=1e-5), name


@pytest.mark.slow
def test_two_ranks_evaluate_like_one_and_train_on_as_if_they_had_not(folder: Path, tokenizer) -> None:
    compare(folder, tokenizer, 2, "ddp", "fsdp2, lean", "tensor", "context", "pipeline")


@pytest.mark.slow
def test_four_ranks_evaluate_like_one_and_train_on_as_if_they_had_not(folder: Path, tokenizer) -> None:
    compare(folder, tokenizer, 4, "hsdp", "fsdp2 x tensor", "pipeline x fsdp2")
