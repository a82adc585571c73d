"""Apply the arithmetic of patterns/speed.py to published models, and compare it with measurements on GPUs. No torch
in this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from labs.bench.plan import read_plan
from labs.patterns.run import Table
from labs.patterns.speed import DATASHEET, Machines, OnPaper, choice, on_paper, ways
from labs.patterns.traffic import traffic
from sftkit.config.tables import DEFAULT
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout
from sftkit.launch.layouts import shape_of_fields
from sftkit.memory.estimate import BUDGETS, GIB, EstimateInputs, Shape

_ROW_LENGTH = 8192
_ROWS = {8: 64, 64: 256, 1024: 2048}
"GPUs -> rows of a step: 0.5, 2 and 17 million tokens."
MICRO = (1, 2, 4)
"Candidate rows of a micro-batch; the fastest is chosen."
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
"Sizes of Llama 3.1, as published."
PAPER_MODELS: dict[str, Callable[[Topology], bool]] = {
    "ddp": lambda t: not t.partial,
    "fsdp2, hsdp": lambda t: t.sharded and t.ranks_per_row == t.stages == 1,
    "tp": lambda t: t.tensor > 1,
    "cp": lambda t: t.context > 1,
    "pp": lambda t: t.stages > 1,
}


MEASURED = {
    "h200_multi": ("plan", "plan_8b_x4", "quick", "again_0.6b", "again_0.6b_x4", "again_8b"),
    "h200_patterns": (
        *("h200_layouts_0.6b", "h200_layouts_x4", "h100_tensor_8b"),
        *("h200_pipeline_1.7b", "h200_pipeline_8b", "h200_gpipe", "h200_tensor_8b", "h200_pipeline"),
    ),
}
"Folders of benchmarks, and their result files for several GPUs."


def shape(name: str) -> Shape:
    """Return the sizes of one of MODELS."""
    found = shape_of_fields(LLAMA | MODELS[name])
    assert found is not None
    return found


@cache
def worked(name: str, gpus: int) -> list[OnPaper]:
    """Calculate every layout of a model that fits these GPUs."""
    return ways(shape(name), Machines(gpus), _ROWS[gpus], _ROW_LENGTH, MICRO)


def chosen() -> Table:
    """Return a table of the chosen layout for each model and number of GPUs, with its costs."""
    cells = []
    for name, gpus in product(MODELS, _ROWS):
        way = choice(worked(name, gpus))
        begin = [name, f"{gpus:,}"]
        if way is None:
            cells.append([*begin, "none fits: take more GPUs or shorter rows", *[""] * 4])
            continue
        s = way.setup
        settings = f"{s.optimizer}, {way.memory}"
        sizes = [f"{way.estimate.total / GIB:.0f}", f"{way.sent / 1e9:,.0f}"]
        cells.append([*begin, way.config, settings, *sizes, f"{way.share:.0%}"])
    return ["model", "GPUs", "layout", "optimizer, train.memory", "GiB", "GB sent", "speed"], cells


def families() -> Table:
    """Return a table of the best layout of each pattern: speed and memory."""
    cells = []
    for name, gpus in product(MODELS, _ROWS):
        fastest = _fastest(worked(name, gpus))
        sizes = (
            f"{w.share:.0%}, {w.estimate.total / GIB:.0f} GiB{_sizes(w)}" if w else "does not fit" for w in fastest
        )
        cells.append([name, f"{gpus:,}", *sizes])
    return ["model", "GPUs", *PAPER_MODELS], cells


def _fastest(found: list[OnPaper]) -> list[OnPaper | None]:
    """Return the fastest layout of each pattern; None if none fits."""
    of_patterns = ([way for way in found if belongs(way.setup.topology)] for belongs in PAPER_MODELS.values())
    return [max(own, key=lambda way: way.share, default=None) for own in of_patterns]


def _sizes(way: OnPaper) -> str:
    """Return the sizes of the mesh that a reader could not infer."""
    t = way.setup.topology
    named = {"tp": t.tensor, "cp": t.context, "pp": t.stages, "copies": t.replicas if t.sharded else 1}
    sizes = ", ".join(f"{key} {size}" for key, size in named.items() if size > 1)
    return f" ({sizes})" if sizes else ""


def beside_measured(benchmarks: Path) -> Table:
    """Return a table of layouts measured on GPUs of one machine, and the calculated values from the speed of their
    reference run: on one GPU, or sharded if one GPU has no room.
    """
    cells = []
    for folder, names in MEASURED.items():
        alone = dict[tuple[str, str], dict[str, Any]]()  # by name and card
        for name in names:
            found = json.loads((benchmarks / folder / "results" / f"{name}.json").read_text())
            plan, card = read_plan(benchmarks.parent / found["plan"]), found["machine"]["device"].split()[1]
            for row in (row for row in found["runs"] if not row["error"]):
                if row["baseline"] is None:
                    alone[row["name"], card] = row
                elif (row["baseline"], card) in alone:
                    one = alone[row["baseline"], card]["tok_per_sec_per_gpu"]["median"]
                    measured = row["tok_per_sec_per_gpu"]["median"] / one
                    way = _measured(row, plan.models[row["model"]], one, plan.defaults["train"]["global_batch_size"])
                    gpus = f"{row['world_size']} {card}"
                    cells.append([row["name"], gpus, row["baseline"], f"{way.share:.1%}", f"{measured:.1%}"])
    return ["run", "GPUs", "relative to", "on paper", "measured"], cells


def _measured(row: dict[str, Any], fields: dict[str, Any], tokens_per_second: float, rows: int) -> OnPaper:
    """Calculate a run of a bench.

    Args:
        tokens_per_second: speed per GPU of the reference run.
        rows: rows of a step, of 16,384 positions each.
    """
    # A pipeline's stages come from the recipe, and each is a mesh of the other sizes.
    pipelined = row["set"].get("train.engine") == "pipeline"
    stages = row["set"].get("train.pipeline_stages", row["world_size"]) if pipelined else 1
    mesh, gpus = row["mesh"], row["world_size"] // stages
    parts = {"tensor": mesh.get("tp_size", 1), "context": mesh.get("cp_size", 1)}
    replicas, sharded = mesh.get("dp_replicate_size", 1), row["topology"] == "fsdp2"
    shards = gpus // (replicas * parts["tensor"] * parts["context"])
    topology = Topology(replicas=replicas, shards=shards, sharded=True, **parts) if sharded else Topology(replicas=gpus)
    topology = replace(topology, stages=stages)
    found = shape_of_fields(fields)
    assert found is not None
    micro = row["set"].get("train.micro_batch_size", 1)
    layout = Layout("packed", (16384,), rows, micro, topology.row_ranks, 16384, 16384)
    # One GPU recomputes as much as the run's budget requires, so its speed includes it.
    setup = _inputs(found, layout, topology, BUDGETS["speed"], row["set"].get("optim.name", DEFAULT))
    if topology.stages > 1:
        schedule = row["set"].get("train.pipeline_schedule", setup.schedule)
        setup = replace(setup, stage_layers=tuple(row["pipeline_layers"]), schedule=schedule)
    return on_paper(setup, "speed", Machines(row["world_size"], flops=6 * found.parameters * tokens_per_second))


def _inputs(
    found: Shape, layout: Layout, topology: Topology, budget: float, optimizer: str = DEFAULT
) -> EstimateInputs:
    """Return the inputs of a compiled bf16 run that keeps the budget's share of activations."""
    sizes = found, layout, optimizer, "bf16", 4096, budget
    return EstimateInputs(*sizes, compiled=True, checkpointing=False, topology=topology)


def per_pattern() -> Table:
    """Return a table of each pattern's traffic for 8B in a step of eight GPUs, 64 rows, and its time."""
    cells = []
    topologies = {
        "ddp": Topology(replicas=8),
        "fsdp2": Topology(shards=8, sharded=True),
        "tp 8": Topology(tensor=8, sharded=True),
        "cp 8": Topology(context=8, sharded=True),
        "pp 8": Topology(stages=8),
    }
    for label, topology in topologies.items():
        layout = Layout("packed", (_ROW_LENGTH,), _ROWS[8], 1, topology.row_ranks, _ROW_LENGTH, _ROW_LENGTH)
        setup = replace(_inputs(shape("8B"), layout, topology, 0.9), stage_layers=(4,) * 8)
        # Six FLOPs per parameter and token: two forward, four backward.
        sent, machines = sum(each.sent for each in traffic(setup)), Machines(8)
        compute = 6 * setup.shape.parameters * _ROW_LENGTH * _ROWS[8] / 8 / machines.flops
        times = [f"{sent / speed / compute:.1%}" for speed in (machines.inside, machines.between)]
        cells.append([label, f"{sent / 1e9:,.0f}", *times])
    return ["8B on 8 GPUs", "GB sent", "of the time that computing takes, within a machine", "between machines"], cells


def slow_links() -> Table:
    """Return a table of the best layout of each pattern for 8B on eight machines with one GPU each, by the speed of
    the network.
    """
    cells = []
    for gigabits in (400, 100, 25, 10):
        machines = Machines(8, per_machine=1, between=0.8 * gigabits / 8 * 1e9)
        found = ways(shape("8B"), machines, _ROWS[8], _ROW_LENGTH, MICRO)
        taken = choice(found)
        assert taken is not None
        shares = (f"{way.share:.0%}" if way else "-" for way in _fastest(found))
        cells.append([f"{gigabits} Gb/s", *shares, taken.config])
    return ["network of each GPU", *PAPER_MODELS, "taken"], cells


TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
LLAMA_PAPER, MEGATRON = "https://arxiv.org/abs/2407.21783", "https://arxiv.org/abs/2104.04473"
TITAN_8B = (6667, 6514)
"Tokens per second and GPU of 8B on 8 and on 128 GPUs, FSDP with torch.compile: tables 1 and 3."
TITAN_8B_FLOAT8 = 8532
"Tokens per second and GPU of 8B on 8 GPUs with float8."


def published() -> Table:
    """Return a table of published results on H100s with 400 Gb/s of network each, next to the values
    calculated here.
    """
    few, many = TITAN_8B
    return ["model", "GPUs", "layout", "published", "here, on paper"], [
        [
            f"Llama 3.1 8B, [torchtitan]({TITAN}), tables 1 and 3",
            "8, 128",
            "FSDP over all, 2 rows a GPU",
            f"{few:,} and {many:,} tokens/s a GPU: {many / few:.1%} is kept",
            f"{titan_on_paper().share:.1%} is kept: gathering and exchanging fit behind the passes",
        ],
        [
            "Llama 3.1 70B, the same, table 4",
            "256",
            "FSDP 32 x TP 8",
            "829 tokens/s a GPU in float8, 876 with asynchronous TP",
            f"{titan_70b_on_paper():,.0f} tokens/s a GPU, from the {TITAN_8B_FLOAT8:,} of its 8B in float8 on 8",
        ],
        [
            "Llama 3.1 405B, the same, table 5",
            "512",
            "FSDP 8 x TP 8 x PP 8",
            "100 tokens/s a GPU in float8 with 1F1B, 128 interleaved",
            "TP in a pipeline is not offered",
        ],
        [
            f"Llama 3 405B, [paper]({LLAMA_PAPER}), table 4",
            "8,192",
            "TP 8, PP 16, DP 64",
            "430 TFLOP/s a GPU, 43 % of the datasheet",
            f"{_at('405B', 1024)} on 1,024, without a pipeline, if one GPU reaches 50 %",
        ],
        ["", "16,384", "TP 8, PP 16, DP 128", "400 TFLOP/s a GPU, 41 %", "half as many micro-batches wait longer"],
        ["", "16,384", "TP 8, CP 16, PP 16, DP 8", "380 TFLOP/s a GPU, 38 %", "CP beside TP is not offered"],
        [
            f"GPT of a trillion parameters, [Megatron-LM]({MEGATRON})",
            "3,072 (A100)",
            "tensor, pipeline and data parallel",
            "52 % of the datasheet",
            "",
        ],
    ]


def _at(name: str, gpus: int) -> str:
    way = choice(worked(name, gpus))
    assert way is not None
    return f"{way.share * way.machines.flops / DATASHEET:.0%} with {way.config.partition(', dp_replicate')[0]}"


def titan_70b_on_paper() -> float:
    """Calculate the tokens per second and GPU of torchtitan's 70B: 16 rows in a micro-batch, everything recomputed."""
    found, topology = shape("70B"), Topology(shards=32, tensor=8, sharded=True)
    layout = Layout("packed", (_ROW_LENGTH,), 512, 16, 32, _ROW_LENGTH, _ROW_LENGTH)
    machines = Machines(256, flops=6 * shape("8B").parameters * TITAN_8B_FLOAT8)
    way = on_paper(_inputs(found, layout, topology, BUDGETS["low"]), "low", machines)
    return way.share * machines.flops / (6 * found.parameters)


def titan_on_paper() -> OnPaper:
    """Calculate torchtitan's 8B on 128 GPUs from its speed on 8."""
    topology, found = Topology(shards=128, sharded=True), shape("8B")
    layout = Layout("packed", (_ROW_LENGTH,), 256, 2, 128, _ROW_LENGTH, _ROW_LENGTH)
    setup = _inputs(found, layout, topology, BUDGETS["speed"])
    return on_paper(setup, "speed", Machines(128, flops=6 * found.parameters * TITAN_8B[0]))
