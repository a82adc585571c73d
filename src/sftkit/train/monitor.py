"""Measure and watch the steps, and log lines about them."""

from __future__ import annotations

from collections.abc import Mapping

from sftkit.config.schema import Config
from sftkit.data.batches.loader import Batches, StepBatches
from sftkit.engine.engine import Engine
from sftkit.rundir.status import RunStatus
from sftkit.runtime.start import Runtime
from sftkit.tracking.experts import ExpertLoad
from sftkit.tracking.health import Health
from sftkit.tracking.meter import Meter
from sftkit.tracking.outcome import StepOutcome
from sftkit.tracking.window import Window, resume_window
from sftkit.train.parts import TrainServices


class Monitor:
    """Meter, health and load of experts, which all see the same steps. Every rank has one and calls
    the same methods."""

    def __init__(self, cfg: Config, rt: Runtime, engine: Engine, batches: Batches, services: TrainServices) -> None:
        """Begin to measure; a resumed run restores its counts and the window of steps that are not logged yet."""
        model = engine.model
        self.meter = Meter(model.orig_model, model.objective, batches, rt)
        self.health = Health(cfg.numerics, rt, batches, model.objective, services.tracker)
        self.expert_load = ExpertLoad(model.routing, rt)
        if line := resume_window(services.resumed, self.meter, self.health, rt, cfg.log.every):
            rt.print(line)

    def add(self, step: int, step_batches: StepBatches, outcome: StepOutcome) -> None:
        """Add a step that has been launched."""
        self.meter.add(step_batches, outcome)
        self.health.add(step, step_batches, outcome)

    def read_flags(self, *, wait: bool) -> bool:
        """Check the steps whose flags have arrived; `wait`: all steps.

        Returns:
            whether a rank requests a stop

        Raises:
            NumericsError: see Health.read_flags.
        """
        stopped, skipped_divisor = self.health.read_flags(wait=wait)
        self.meter.add_skipped(skipped_divisor)
        return stopped

    def open_window(self) -> Window:
        """Return the window of steps that no line has reported yet, for a checkpoint. Waits for the device."""
        return {"meter": self.meter.window(), "health": self.health.window()}


def log_window(
    monitor: Monitor, engine: Engine, services: TrainServices, status: RunStatus, values: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Close the window of steps since the last line, and log it; every rank calls it. Waits for the device.

    Args:
        values: of the last step.

    Returns:
        the metrics of the line
    """
    assert status.total_steps is not None
    tracker, checkpoints = services.tracker, services.checkpoints
    # Each of these exchanges sums with the other ranks, so their order must be the same on all.
    loads = monitor.expert_load.read(status.step, checkpoints.run_dir)
    report = engine.report()
    metrics = {**monitor.meter.read(), **values, **loads, **report.metrics}
    metrics |= {f"ckpt/{name}": value for name, value in checkpoints.last_save.items()} | monitor.health.read()
    tracker.log_metrics(status.step, status.total_steps, metrics)
    for kind, texts in report.events:
        tracker.new_events(kind, status.step, texts)
    return metrics
