"""Estimate how long a run takes on a named card: its FLOPs at the share of the peak that committed results reached."""

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from sftkit.config.schema import Config
from sftkit.config.topology import Topology
from sftkit.data.batches.epoch import causal_pairs
from sftkit.data.batches.pack import Layout
from sftkit.errors import texts
from sftkit.models.structure import Work, attention_windows, count_parameters, num_experts, train_flops
from sftkit.runtime.hardware import peak_flops_by_name

SMALLEST = 0.3e9
"Parameters of the smallest model whose speed is known."
FEWEST_POSITIONS = 8_192
"Positions of the smallest micro-batch whose speed is known."
FALLBACK_CARD = "H100"
"Card whose results stand in for those of a card without any."


def hours_facts(
    cfg: Config,
    orig_model: PreTrainedModel | None,
    layout: Layout,
    lengths: np.ndarray,
    *,
    tokens: int,
    targets: int,
    card: str,
    topology: Topology,
) -> dict[str, Any]:
    """Return card, gpus, low, high (hours; high None: not bounded), mfu (lowest and highest share of the peak),
    measured_on, slower (why more than `high` is likely); or card and `unknown`, why nothing is estimated.

    Args:
        orig_model: on any device; None: its sizes are unknown.
        lengths: int [D], positions of the documents of an epoch.
        tokens, targets: of the whole run.
        card: name of a device.
    """
    speeds = texts("preflight/speeds.yaml")
    peak = peak_flops_by_name(card)
    windows = None if orig_model is None else attention_windows(orig_model)
    reasons = {
        "the sizes of the model are unknown": orig_model is None,
        f"the peak of {card} is unknown": peak is None,
        "no result is committed for layers of these kinds": orig_model is not None and not windows,
        "no result is committed for models with experts": orig_model is not None and num_experts(orig_model) > 0,
        "no result is committed for eager training": not cfg.compile.enabled or cfg.train.engine == "reference",
        "no result is committed for fp32": cfg.train.precision == "fp32",
        "no result is committed for fp8": cfg.train.fp8 is not None,
        "no result is committed for rows of trees": layout.kind == "tree",
        "the speed of this layout depends on the links between the GPUs": topology.world_size != topology.row_ranks,
    }
    if unknown := next((reason for reason, holds in reasons.items() if holds), None):
        return {"card": card, "unknown": unknown}
    assert orig_model is not None
    assert peak is not None
    assert windows is not None
    pairs = sum(
        count * int(causal_pairs(np.asarray(lengths, np.int64), keys, chunked=chunked).sum())
        for (keys, chunked), count in windows.items()
    )
    flops = train_flops(orig_model, Work(tokens, targets, round(pairs * tokens / float(lengths.sum()))))
    known: dict[str, Any] = speeds["mfu"]
    measured_on = next((name for name in known if name in card.split()), FALLBACK_CARD)
    counted = count_parameters(orig_model)
    parameters = counted.body + counted.head
    of_kind = known[measured_on]["adapter" if cfg.adapter else "full"]
    low, high = next(mfu for below, mfu in of_kind.items() if parameters < float(below))
    gpus = topology.world_size
    least, most = (1.0, 1.0) if gpus == 1 else speeds["several"]
    slower = []
    if parameters < SMALLEST:
        slower.append(f"models of fewer than {SMALLEST / 1e6:.0f} million parameters wait for the host")
    if (positions := max(rows * length for rows, length in layout.shapes)) < FEWEST_POSITIONS:
        slower.append(f"a micro-batch of {positions:,} positions does not fill the GPU")
    return {
        "card": card,
        "gpus": gpus,
        "flops": flops,
        "low": flops / (peak * gpus * high * float(most)) / 3600,
        "high": None if slower else flops / (peak * gpus * low * float(least)) / 3600,
        "mfu": [low, high],
        "measured_on": measured_on,
        "slower": "; ".join(slower) or None,
    }


def hours_text(found: dict[str, Any] | None, cards: str) -> str:
    """Return the estimate in words. `cards`: how to name one, for a run whose card is not known."""
    if found is None:
        return f"not estimated: name the GPU, {cards}"
    if "unknown" in found:
        return f"not estimated on {found['card']}: {found['unknown']}"
    times = [span_text(found[name]) for name in ("low", "high") if found[name] is not None]
    where = f"one {found['card']}" if found["gpus"] == 1 else f"{found['gpus']} x {found['card']}"
    low, high = found["mfu"]
    source = f"as measured on {found['measured_on']}, since no result of this card is committed"
    if found["measured_on"] in found["card"].split():
        source = "as committed benchmarks measured"
    span = times[0] if times[0] == times[-1] else " to ".join(times)
    likely = f"at least {span} on {where} ({found['slower']})" if found["slower"] else f"about {span} on {where}"
    share = f"{found['flops']:.2g} FLOPs at {low:g} to {high:g} of the bf16 peak, {source}"
    return f"{likely}, an estimate: {share}; without evaluations, checkpoints and compilation"


def span_text(hours: float) -> str:
    """Return hours in the unit that suits them, with two digits; 1 s at least."""
    unit, size = next(((u, s) for u, s in (("h", 1.0), ("min", 1 / 60)) if hours >= s), ("s", 1 / 3600))
    value = max(hours / size, 1.0)
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
