"""What share of the positions each expert of each layer is given, between two logged lines."""

from __future__ import annotations

import json
from pathlib import Path

from sftkit.models.routing import Routing
from sftkit.rundir.files import replace_text
from sftkit.rundir.names import EXPERTS
from sftkit.runtime.start import Runtime

DIGITS = 4


class ExpertLoad:
    """Reads what the routers of a model have chosen; nothing of a model without experts."""

    def __init__(self, routing: Routing | None, rt: Runtime) -> None:
        """What was chosen before, in the warm-up, is forgotten."""
        self._routing, self._rt = routing, rt
        if routing is not None:
            routing.take_load()

    def read(self, step: int, run_dir: Path) -> dict[str, float | None]:
        """train/expert_load_max and train/expert_load_min of the window: the most and the least that an expert of any layer was
        given, 1 being an even share; every rank calls it. All of them are written to EXPERTS. Waits for the device."""
        if self._routing is None:
            return {}
        found = self._routing.take_load()
        assert found is not None, "a line is logged after a step"
        counts = self._rt.sum(found.double())  # every position of a layer has as many experts
        load = counts * counts.shape[1] / counts.sum(1, keepdim=True).clamp(min=1.0)
        if self._rt.is_main:
            rows = [[round(value, DIGITS) for value in row] for row in load.tolist()]
            replace_text(run_dir / EXPERTS, json.dumps({"step": step, "load": rows}))
        return {"train/expert_load_max": float(load.max()), "train/expert_load_min": float(load.min())}
