"""The layouts of processes that are compared, and the model and rows that all of them train. No torch in this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sftkit.config.topology import Topology

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"Layers and heads that two and four ranks divide, in two stages on each of four ranks too."
ROWS, ROW_LENGTH = 4, 128
"Rows of an optimizer step, over all ranks, and their positions; a micro-batch is one row."
TRAINED_STEPS = 2


@dataclass(frozen=True)
class TopologyCase:
    """A layout, by the name that it has in the tables."""

    name: str
    topology: Topology
    config: str
    "the accelerate config, and what is set beside it; of a pipeline train.engine=pipeline too"
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    "of a pipeline"
    lean: bool = False
    "weights are gathered for each pass and gradients exchanged after each micro-batch, as where memory is scarce"

    @property
    def processes(self) -> int:
        """Return how many processes it takes."""
        return self.topology.world_size

    @property
    def stages(self) -> int:
        """Return how many stages there are; without a pipeline 1."""
        return self.topology.stages * (2 if self.schedule == "interleaved" else 1)

    @property
    def key(self) -> str:
        """Return its name among all cases: `2 ddp`."""
        return f"{self.processes} {self.name}"


def _pipelines(stages: int) -> tuple[TopologyCase, ...]:
    topology = Topology(stages=stages)
    return (
        TopologyCase("pp, gpipe", topology, "pp.yaml, train.pipeline_schedule=gpipe", "gpipe"),
        TopologyCase("pp, 1f1b", topology, "pp.yaml", "1f1b"),
        TopologyCase("pp, interleaved", topology, "pp.yaml, train.pipeline_schedule=interleaved", "interleaved"),
    )


TOPOLOGY_CASES: tuple[TopologyCase, ...] = (
    TopologyCase("one process", Topology(), "single_gpu.yaml, cpu.yaml"),
    TopologyCase("ddp", Topology(replicas=2), "ddp.yaml"),
    TopologyCase("fsdp2", Topology(shards=2, sharded=True), "fsdp2.yaml"),
    TopologyCase("fsdp2, lean", Topology(shards=2, sharded=True), "fsdp2.yaml, where memory is scarce", lean=True),
    TopologyCase("tp", Topology(tensor=2, sharded=True), "tp.yaml"),
    TopologyCase("cp", Topology(context=2, sharded=True), "cp.yaml"),
    *_pipelines(2),
    TopologyCase("ddp", Topology(replicas=4), "ddp.yaml"),
    TopologyCase("fsdp2", Topology(shards=4, sharded=True), "fsdp2.yaml"),
    TopologyCase("hsdp 2 x 2", Topology(replicas=2, shards=2, sharded=True), "hsdp.yaml"),
    TopologyCase("tp", Topology(tensor=4, sharded=True), "tp.yaml, parallelism_config_tp_size 4"),
    TopologyCase("fsdp2 2 x tp 2", Topology(shards=2, tensor=2, sharded=True), "tp.yaml"),
    *_pipelines(4),
    TopologyCase("pp 2 x ddp 2", Topology(stages=2, replicas=2), "pp.yaml, train.pipeline_stages=2", "1f1b"),
    TopologyCase(
        "pp 2 x fsdp2 2", Topology(stages=2, shards=2, sharded=True), "fsdp2.yaml, train.pipeline_stages=2", "1f1b"
    ),
)
