"""A run of the loop in this process: a tiny model on documents made here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_llama, tiny_recipe

from sftkit.config.schema import (
    AttentionConfig,
    CompileConfig,
    EvalConfig,
    LogConfig,
    LossConfig,
    OptimConfig,
    TrainConfig,
)
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine.engine import Training
from sftkit.evals.results import Choices
from sftkit.evals.scoring import score
from sftkit.evals.suite import validate
from sftkit.generation.decode import Batching, generate
from sftkit.objectives.objective import NextToken
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import make_engine
from sftkit.train.end import Trained
from sftkit.train.loop import train
from sftkit.train.parts import TrainServices

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4


class NoCheckpoints:
    def __init__(self, run_dir: Path, skipped: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        self.last_save: dict[str, float] = {}
        self.resumed_from: Path | None = None
        self.skipped_checkpoints = skipped

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> Path:
        return self.run_dir

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        pass

    def archive_later_steps(self, step: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def ended_saves(self) -> tuple[()]:
        return ()


def run(
    folder: Path,
    kind: str = "packed",
    compile: CompileConfig = CompileConfig(backend="eager", fullgraph=True),  # noqa: B008
    loss: LossConfig = LossConfig(),  # noqa: B008
    disturb: bool = False,
    evaluates: bool = True,
    tokenizer: Any = None,
    from_step: int = 0,
    steps: int = 20,
    skipped: Sequence[str] = (),
) -> Trained:
    """Run some steps of a tiny model; `disturb` passes one batch of an undeclared shape to the step."""
    torch._dynamo.reset()
    cfg = tiny_recipe(
        folder,
        optim=OptimConfig(name="adamw", lr=1e-2),
        train=TrainConfig(max_steps=steps),
        loss=loss,
        attention=AttentionConfig(backend="reference"),
        compile=compile,
        eval=EvalConfig(every=6),
        log=LogConfig(every=5, wandb="off"),
    )
    folder.mkdir()
    rt = cpu_runtime()
    orig_model = tiny_llama()
    examples = make_examples(LENGTHS, target_share=0.4)
    layout = make_layout_of(kind, examples.lengths)
    batches = Batches(StepDataset(examples, layout), seed=0)
    engine = make_engine(cfg, rt, folder, Training(orig_model, NextToken(loss), layout))
    if disturb:
        other = Batches(StepDataset(examples, make_layout_of(kind, examples.lengths, row_length=48)), seed=0)
        declared = batches.steps
        batches.steps = lambda first, last: [*list(declared(first, last))[:9], *other.steps(9, last)]  # type: ignore[method-assign,assignment]

    def evaluate(_: int) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        if not evaluates:
            return {}, []
        values = validate(engine.model, {"held out": make_examples([3, 9, 30, 31, 7])}, layout, 0, rt)
        answers = generate(orig_model, tokenizer, [[5, 6, 7], [8]], Batching(2), end_ids=[2], max_new_tokens=3)
        pair = (np.array([5, 6], dtype=np.int32), np.array([7], dtype=np.int32))
        score(orig_model, tokenizer, [Choices("x", "", ("",), (0,), (1,))], encoded=[[pair]])
        return values, [{"answer": answer.text} for answer in answers]

    with closing(engine), Tracker(folder, cfg.log, rt, {}) as tracker:
        return train(
            cfg,
            rt,
            engine,
            batches,
            TrainServices(evaluate, NoCheckpoints(folder, skipped), tracker, {"step": from_step}),
        )


def proof_rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "proof.json").read_text())["rows"]}
