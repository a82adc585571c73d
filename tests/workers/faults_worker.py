"""Run by test_faults.py and test_signals.py: a run of a tiny model with a fault put into one rank.

faults_worker.py RUN_DIR FAULT [key=value ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import before_each_step, make_examples, make_layout_of, tiny_llama
from transformers import PreTrainedTokenizerFast

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.save import Snapshot, Writer
from sftkit.config.load import read_config, to_yaml
from sftkit.config.schema import Config
from sftkit.data.batches.epoch import RankRows
from sftkit.data.batches.loader import Batches, StepBatches, StepDataset, load_examples
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Row, Tokenized
from sftkit.engine.engine import Training
from sftkit.generation.decode import Batching, generate
from sftkit.objectives.objective import ModelWithLoss, NextToken, Sums
from sftkit.reports.page import try_report
from sftkit.rundir.status import effective_resume
from sftkit.runtime import start as runtime
from sftkit.runtime.open import open_run
from sftkit.runtime.script import script
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import make_engine
from sftkit.train.end import write_summary
from sftkit.train.loop import train
from sftkit.train.parts import TrainServices

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 40


def settings(run_dir: str, overrides: list[str]) -> Config:
    recipe = Path(run_dir).parent / f"recipe-{os.getpid()}.yaml"
    recipe.write_text(
        f"run: {{dir: {run_dir}}}\nmodel: {{path: unused}}\ndata:\n"
        "  train: [{path: 'builtin:tasks'}]\n  val: [{path: 'builtin:tasks', split: heldout}]\n"
        'attention: {backend: reference}\ncompile: {enabled: false}\nlog: {every: 1, wandb: "off"}\noptim: {name: adamw}\ntrain: {max_steps: 12}\n'
    )
    return read_config(recipe, overrides)


def tokenize_slowly(row: Row, tokenizer: Any, max_length: int) -> Tokenized:
    Path(f"{os.environ['FAULT_RUN_DIR']}.tokenizing{os.getpid()}").touch()
    time.sleep(1000)
    raise AssertionError


def load(fault: str, run_dir: str, cfg: Config, rt: runtime.Runtime) -> None:
    """What goes wrong while model and data are loaded."""
    if fault == "loading":
        time.sleep(1000)
    if fault == "killed in loading":
        if rt.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    if fault == "tokenizing":
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.environ["FAULT_TOKENIZER"])
        os.environ["FAULT_RUN_DIR"] = run_dir
        load_examples(cfg.data, RowTokenizer(tokenize_slowly, tokenizer, 8), rt)


def stay_in_warm_up(run_dir: str, rank: int, _: Any) -> Any:
    Path(f"{run_dir}.warming up{rank}").touch()
    time.sleep(1000)


def fail_in_warm_up(_: Any) -> Any:
    Path(os.environ["FAULT_ONCE"]).touch()
    raise ValueError("a GPU is gone")


def save_slowly(run_dir: str, rank: int) -> None:
    """As to a disk that takes seconds."""
    write = Writer._write_own

    def slow(self: Writer, snapshot: Snapshot, folder: Path) -> list[Path]:
        Path(f"{run_dir}.saving{rank}").touch()
        time.sleep(3)
        return write(self, snapshot, folder)

    Writer._write_own = slow  # type: ignore[method-assign]


def inject(fault: str, rank: int, batches: Batches) -> None:
    """Put the fault into rank 1, at step 4."""
    slowed = ("slow", "saving", "killed once")
    everywhere = (*slowed, "kill while others wait")
    if (fault in ("raise", "hang", "kill") and rank == 1) or fault in everywhere:

        def faulty(step: int, _: StepBatches) -> None:
            if fault in slowed:
                time.sleep(0.2)
            if fault == "killed once" and rank == 0:
                return
            if (
                fault not in ("slow", "saving")
                and step == 4
                and not Path(os.environ.get("FAULT_ONCE", "/nowhere")).exists()
            ):
                strike(fault)

        before_each_step(batches, faulty)
    if fault == "nan":
        forward, calls = ModelWithLoss.forward, [0]

        def broken(self: ModelWithLoss, *args: Any, **kwargs: Any) -> Any:
            sums = forward(self, *args, **kwargs)
            calls[0] += torch.is_grad_enabled()
            bad = rank == 1 and calls[0] == FAULTY_CALL
            if not bad:
                return sums
            nan = float("nan")
            return Sums(sums.loss * nan, {**sums.measured, "nll": sums.measured["nll"] * nan})

        ModelWithLoss.forward = broken  # type: ignore[method-assign]


def flip_bit(orig_model: torch.nn.Module, rank: int, batches: Batches) -> None:
    """In rank 1, the lowest bit of one weight, before step 4."""

    def faulty(step: int, _: StepBatches) -> None:
        if step == 4 and rank == 1:
            weight = orig_model.get_parameter("model.layers.1.mlp.up_proj.weight")
            weight.data.view(torch.int32)[3, 5] ^= 1

    before_each_step(batches, faulty)


def spike(rank: int, batches: Batches) -> None:
    """The loss of rank 1 in step 40, fifty times what it is."""
    at, forward = [0], ModelWithLoss.forward

    def note(step: int, _: StepBatches) -> None:
        at[0] = step

    def larger(self: ModelWithLoss, *args: Any, **kwargs: Any) -> Any:
        sums = forward(self, *args, **kwargs)
        if not (rank == 1 and at[0] == 40):
            return sums
        return Sums(sums.loss * 50, {name: value * 50 for name, value in sums.measured.items()})

    before_each_step(batches, note)
    ModelWithLoss.forward = larger  # type: ignore[method-assign]


FAULTY_CALL = 8
"in step 3: the first three calls are the warm-up's, whose gradients are compared, then two micro-batches a step"


def strike(fault: str) -> None:
    if "FAULT_ONCE" in os.environ:
        Path(os.environ["FAULT_ONCE"]).touch()
        time.sleep(2)  # the checkpoint of step 2 is written in the background
    if fault == "raise":
        raise ValueError("row 17 is made of cheese")
    if fault == "hang" or (fault == "kill while others wait" and os.environ["RANK"] == "0"):
        time.sleep(1000)  # as rank 0 would in a collective of NCCL, which does not notice that rank 1 is gone
    os.kill(os.getpid(), signal.SIGKILL)


def main(run_dir: str, fault: str, *overrides: str) -> None:
    if fault == "differs" and os.environ["RANK"] == "1":
        overrides = (*overrides, "optim.lr=0.5")
    cfg = settings(run_dir, list(overrides))
    with runtime.start(cfg.run, cfg.train, page=try_report) as rt:
        run(run_dir, fault, cfg, rt)


def run(run_dir: str, fault: str, cfg: Config, rt: runtime.Runtime) -> None:
    resume = effective_resume(cfg.train.resume, cfg.run.dir, os.environ)
    open_run(cfg.run.dir, resume, to_yaml(cfg), rt)
    folder = Path(cfg.run.dir)
    Path(f"{run_dir}.pid{rt.rank}").write_text(str(os.getpid()))
    load(fault, run_dir, cfg, rt)
    others = fault == "other data" and rt.rank == 1
    examples = make_examples(LENGTHS[1:] if others else LENGTHS, target_share=0.5)
    layout = make_layout_of("packed", examples.lengths, world_size=rt.world_size)
    batches = Batches(StepDataset(examples, layout, RankRows(rt.rank)), seed=0, num_workers=cfg.data.num_workers)
    inject(fault, rt.rank, batches)
    if fault == "spike":
        spike(rt.rank, batches)
    if fault == "saving":
        save_slowly(run_dir, rt.rank)
    orig_model = tiny_llama()
    if fault == "flipped bit":
        flip_bit(orig_model, rt.rank, batches)
    engine = make_engine(cfg, rt, folder, Training(orig_model, NextToken(cfg.loss), layout))
    if fault == "warming up":
        engine.warm_up = partial(stay_in_warm_up, run_dir, rt.rank)
    if fault == "fails in the warm-up" and not Path(os.environ["FAULT_ONCE"]).exists():
        engine.warm_up = fail_in_warm_up
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.environ["FAULT_TOKENIZER"])
    checkpoints = Checkpoints(folder, cfg.checkpoint, rt, orig_model, tokenizer, engine.optimizer, to_yaml(cfg))
    resumed = checkpoints.resume(resume)

    def evaluate(_: int) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
        if fault == "evaluating":
            Path(f"{run_dir}.evaluating{rt.rank}").touch()
            while True:
                time.sleep(0.1)
                rt.check_stop()
        if fault == "generating":
            Path(f"{run_dir}.generating{rt.rank}").touch()
            many = [[5, 6, 7]] * 100_000
            generate(orig_model, tokenizer, many, Batching(1, rt), end_ids=[10**6], max_new_tokens=8)
        return {}, []

    with Tracker(folder, cfg.log, rt, {}, step=resumed["step"]) as tracker:
        trained = train(cfg, rt, engine, batches, TrainServices(evaluate, checkpoints, tracker, resumed))
    write_summary(folder, trained, rt)
    weights = {name: value.double().sum().item() for name, value in orig_model.state_dict().items()}
    Path(f"{run_dir}.weights{rt.rank}").write_text(json.dumps(weights))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
