"""What fits on which GPU with which method, by the memory planner: the tables of docs/adapters.md and
benchmarks/h200_adapters/README.md. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from labs.patterns.paper import LLAMA, MODELS
from labs.patterns.run import Table
from sftkit.config.schema import LossConfig
from sftkit.config.tables import DEFAULT, FALLBACK
from sftkit.data.batches.pack import Layout
from sftkit.launch.layouts import is_within, shape_of_fields
from sftkit.memory.estimate import BUDGETS, GIB, EstimateInputs, Shape, estimate
from sftkit.models.files import of_fields

RANK = 16
GPUS = {"24 GB": 23.6, "40 GB": 39.4, "48 GB": 44.4, "80 GB": 79.1, "141 GB": 139.8}
"Card -> GiB that torch reports of an RTX 4090, A100, L40S, H100 and H200."
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
METHODS = ("full", "LoRA", "QLoRA")
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
_SIZES = {  # hidden, inner, blocks, heads, whether the head is the embedding; as published
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12_288, 36, 32, False),
    "14B": (5120, 17_408, 40, 40, False),
    "32B": (5120, 25_600, 64, 64, False),
}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
FIELDS: dict[str, dict[str, Any]] = {
    **{f"Qwen3 {name}": _QWEN3 | dict(zip(_NAMES, sizes, strict=True)) for name, sizes in _SIZES.items()},
    "Llama 3.1 70B": LLAMA | MODELS["70B"],
}
_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/h200_adapters/results"
MEASURED = {
    ("Qwen3 0.6B", "full"): ("one_call_h100", "0.6B"),
    ("Qwen3 0.6B", "LoRA"): ("one_call_h100", "0.6B LoRA"),
    ("Qwen3 1.7B", "LoRA"): ("one_call_h100", "1.7B LoRA"),
    ("Qwen3 8B", "LoRA"): ("sizes_8b_h100", "8B LoRA"),
    ("Qwen3 8B", "QLoRA"): ("sizes_8b_h100", "8B QLoRA"),
}
"Model and method -> file of results and run, of one row of 16,384 tokens with train.memory speed."


@cache
def _shape(model: str, method: str) -> Shape:
    """Return the sizes of a model that is trained by a method, adapters of RANK on all linear layers of its blocks."""
    fields = FIELDS[model]
    size = of_fields(fields)
    assert size is not None
    if method != "full":
        shape = shape_of_fields(fields)
        assert shape is not None
        widths = 4 * shape.hidden + 2 * (shape.query + shape.key) + 3 * (shape.hidden + shape.inner)
        body = size.parameters - size.ends if method == "QLoRA" else 0
        size = size._replace(
            frozen=size.parameters, frozen_ends=size.ends, nf4=body, factors=RANK * shape.blocks * widths
        )
    found = shape_of_fields(fields, size)
    assert found is not None
    return replace(found, frozen_head=method != "full")


def setups(model: str, method: str, length: int, memory: str) -> Iterator[EstimateInputs]:
    """Yield a step of one row, with each optimizer that `auto` may choose on one GPU."""
    layout = Layout("packed", (length,), 1, 1, 1, length, length)
    least = (FALLBACK,) if memory == "low" else (DEFAULT, FALLBACK)
    for optimizer in least if method == "full" else (DEFAULT,):
        sizes = _shape(model, method), layout, optimizer, "bf16", LossConfig.chunk_tokens, BUDGETS[memory]
        yield EstimateInputs(*sizes, compiled=True, checkpointing=False)


def longest(model: str, method: str, gib: float, memory: str) -> int:
    """Return the tokens of the longest row of LENGTHS that is estimated to fit; 0: none."""
    fitting = (n for n in LENGTHS for s in setups(model, method, n, memory) if is_within(s, int(gib * GIB)))
    return max(fitting, default=0)


def fits() -> Table:
    """Return the longest row by model, method and GPU, with train.memory speed and, if it is longer, low;
    without the methods that fit no GPU.
    """
    rows = []
    for model in FIELDS:
        for method in METHODS:
            cells = []
            for gib in GPUS.values():
                fast, most = (longest(model, method, gib, memory) for memory in ("speed", "low"))
                lengths = [fast, most] if most > fast else [fast]
                cells.append("/".join(f"{n // 1024}k" if n else "–" for n in lengths))
            if {*cells} != {"–"}:
                rows.append([model, method, *cells])
    return ["model", "method", *GPUS], rows


def peaks() -> Table:
    """Return the estimated peak of a step by model, method and row; the measured one of 16,384 tokens with speed."""
    rows = []
    for model in FIELDS:
        for method in METHODS:
            cells = []
            for length, memory in ((8192, "speed"), (8192, "balanced"), (8192, "low"), (16_384, "low")):
                cells.append(f"{_peak(model, method, length, memory):.1f}")
            fast = f"{_peak(model, method, 16_384, 'speed'):.1f}"
            if (model, method) in MEASURED:
                fast += f" (**{measured(model, method):.1f} measured**)"
            rows.append([model, method, *cells, fast])
    columns = ("8,192, `speed`", "8,192, `balanced`", "8,192, `low`", "16,384, `low`", "16,384, `speed`")
    return ["model", "method", *columns], rows


def measured(model: str, method: str) -> float:
    """Return the measured peak of tensors of a combination in MEASURED, in GiB."""
    file, run = MEASURED[model, method]
    found = json.loads((_RESULTS / f"{file}.json").read_text())["runs"]
    (peak,) = (one["peak_memory_gib"] for one in found if one["name"] == run)
    return float(peak)


def _peak(model: str, method: str, length: int, memory: str) -> float:
    """Return the estimated GiB of a step with the first optimizer."""
    return estimate(next(setups(model, method, length, memory))).total / GIB


FITS = {"fits": fits, "peaks": peaks}
"Name of a table -> function that makes it."
