"""Decide what is due after a step: by the recipe, or because training ends early at that step."""

from __future__ import annotations

from dataclasses import dataclass

from sftkit.config.schema import CheckpointConfig, EvalConfig, LogConfig


@dataclass(frozen=True)
class Due:
    """The actions after a step, in this order."""

    window: bool
    """keep the open window for the checkpoint, before a line that only a stop makes due would close it: a resumed run
    then writes the same lines as an uninterrupted one"""
    log: bool
    save: bool
    wait_for_save: bool
    "wait until the checkpoint is published"
    evaluate: bool

    @property
    def keeps_weights(self) -> bool:
        """Return whether the weights of this step are saved or evaluated."""
        return self.save or self.evaluate

    @property
    def waits(self) -> bool:
        """Return whether the host is about to wait for the device."""
        return self.log or self.keeps_weights

    def if_stopped(self) -> Due:
        """Return what is due if training ends early at this step: a line and a checkpoint, no evaluation."""
        return Due(window=not self.log, log=True, save=True, wait_for_save=True, evaluate=False)


def due_after(step: int, total_steps: int, log: LogConfig, checkpoint: CheckpointConfig, eval: EvalConfig) -> Due:
    """Return what follows a step, as the recipe says."""
    last = step == total_steps
    logs = last or step % log.every == 0
    saves = last or bool(checkpoint.every and step % checkpoint.every == 0)
    evaluates = evaluation_due(eval, step, total_steps)
    return Due(window=(saves or evaluates) and not logs, log=logs, save=saves, wait_for_save=last, evaluate=evaluates)


def evaluation_due(eval: EvalConfig, step: int, total_steps: int) -> bool:
    """Return whether a step is followed by an evaluation."""
    return step == total_steps or bool(eval.every and step % eval.every == 0)
