"""Handwritten run files of a validation: input for the tests of the judge and the ledger."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from labs.validate.judge import Measured, Trio
from labs.validate.run import ValidationPlan

RECIPE = "recipes/smoke/base.yaml"
PLAN = ValidationPlan(RECIPE, "scripts/base_train.py", ("packed",), (1,), 30, 10, 5, (), 600)
GOOD_PROOF = {
    "rows": [
        {"name": "Only declared shapes", "ok": True, "found": "8 x 64: 30; 0 undeclared", "expected": "8 x 64"},
        {"name": "No recompiles after the warm-up", "ok": True, "found": "0", "expected": "0"},
        {"name": "Evaluation compiles nothing", "ok": True, "found": "0", "expected": "0"},
    ]
}


def run(speed: float = 100.0, off: float = 0.0, compiled: bool = False, world_size: int = 1) -> Measured:
    lines = [
        {
            "step": step,
            "train/loss": (5.0 - step / 30) * (1 + off),
            "perf/tok_per_sec": speed + step,
            "perf/step_seconds": 10.0 / speed,
            "perf/mfu": None,
            "mem/peak_gib": 2.0,
            "compile/graphs": 3 * compiled,
            "compile/recompiles": 0,
            "compile/seconds": 20.0 * compiled,
        }
        for step in range(5, 35, 5)
    ]
    return Measured(
        error=None,
        lines=lines,
        evals={"val/loss": 4.0 * (1 + off), "eval/piqa/acc": 0.5, "eval/centred_mean": 0.0},
        results=[{"task": "piqa", "metric": "acc", "value": 0.5, "low": 0.4, "high": 0.6, "settings": {}}],
        summary={"compiled": compiled, "warm_up_seconds": 30.0 * compiled},
        status={"status": "finished"},
        proof=GOOD_PROOF if compiled else {"rows": [row | {"ok": None} for row in GOOD_PROOF["rows"][1:]]},
        environment={"world_size": world_size},
        rank_errors=[],
    )


def trio(processes: int = 1, **changes: Any) -> Trio:
    good = Trio(
        "packed",
        processes,
        eager=run(world_size=processes),
        compiled=run(150.0, 1e-4, compiled=True, world_size=processes),
        other_seed=run(off=1e-2),
        reference=run(2.0, off=2e-4),
        logits={"ok": True, "found": "the same bits"},
        warm_up=10,
    )
    return replace(good, **changes)


def result_of(one: Trio, error: str | None = None) -> dict[str, Any]:
    """A result before it is judged."""
    runs = {"eager": one.eager, "eager, other seed": one.other_seed, "compiled": replace(one.compiled, error=error)}
    runs |= {} if one.reference is None else {"reference": one.reference}
    return {
        "plan": vars(PLAN),
        "runs": [
            {
                "name": kind,
                "layout": "packed",
                "processes": 1,
                "kind": kind,
                "command": "accelerate launch <x> run.seed=7",
            }
            | {"measured": asdict(found), "logits": dict(one.logits)}
            for kind, found in runs.items()
        ],
    }
