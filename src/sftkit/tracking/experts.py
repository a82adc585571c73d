"""The load of experts: the share of positions that each expert of each layer is given, between two logged lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from sftkit.models.routing import Routing
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import EXPERTS
from sftkit.runtime.start import Runtime

log = logging.getLogger(__name__)


class ExpertLoad:
    """Reads the choices of a model's routers; of a model without experts it reads nothing."""

    def __init__(self, routing: Routing | None, rt: Runtime) -> None:
        """Forget what was chosen before, in the warm-up. `routing`: None: the model has no experts."""
        self._routing, self._rt = routing, rt
        if routing is not None:
            routing.take_load()

    def read(self, step: int, run_dir: Path) -> dict[str, float | None]:
        """Return train/expert_load_max and train/expert_load_min of the window; every rank must call it.

        Waits for the device.

        They are the largest and the smallest load of any expert of any layer, 1 being an even share. All
        loads are written to EXPERTS.
        """
        if self._routing is None:
            return {}
        # Of this rank's own rows. The sum over ranks is a collective, so it comes before any `if` on the rank.
        found = self._routing.take_load()
        assert found is not None, "a line is logged after a step"
        counts = self._rt.sum(found.double())  # [L, E]; every position has the same number of experts
        load = counts * counts.shape[1] / counts.sum(1, keepdim=True).clamp(min=1.0)
        if self._rt.is_main:
            rows = [[round(value, 4) for value in row] for row in load.tolist()]
            try:
                replace_text(run_dir / EXPERTS, json.dumps({"step": step, "load": rows}))
            except OSError as error:  # a full disk costs the file, not the run
                log.warning("%s cannot be written: %s", run_dir / EXPERTS, error)
        return {"train/expert_load_max": float(load.max()), "train/expert_load_min": float(load.min())}
