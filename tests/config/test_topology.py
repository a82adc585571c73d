"""What the launcher exports becomes one topology, or an error that names the setting."""

from __future__ import annotations

import pytest

from sftkit.config.topology import Topology, check_numbers, read_topology, take_topology
from sftkit.errors import ConfigError
from sftkit.runtime.launcher import check_variables

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def mesh(**sizes: int) -> dict[str, str]:
    named = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in sizes.items()}
    return {**FSDP2, "ACCELERATE_USE_PARALLELISM_CONFIG": "true", **named}


@pytest.mark.parametrize(
    ("environ", "world_size", "topology", "described"),
    [
        ({}, 1, Topology(), "one process"),
        ({}, 4, Topology(replicas=4), "ddp"),
        ({"ACCELERATE_USE_FSDP": "false"}, 4, Topology(replicas=4), "ddp"),
        (FSDP2, 4, Topology(shards=4, sharded=True), "fsdp2, 4 shards"),
        (
            mesh(dp_replicate=2, dp_shard=4),
            8,
            Topology(replicas=2, shards=4, sharded=True),
            "fsdp2, 2 replicas x 4 shards",
        ),
        (mesh(dp_shard=4, tp=2), 8, Topology(shards=4, tensor=2, sharded=True), "fsdp2, 4 shards x 2 tensor"),
        (mesh(dp_shard=2, cp=4), 8, Topology(shards=2, context=4, sharded=True), "fsdp2, 2 shards x 4 context"),
        (mesh(tp=2), 2, Topology(tensor=2, sharded=True), "fsdp2, 1 shards x 2 tensor"),
    ],
)
def test_the_launchers_variables_name_the_mesh(
    environ: dict[str, str], world_size: int, topology: Topology, described: str
) -> None:
    found = read_topology(environ, world_size)
    assert found == topology
    assert found.world_size == world_size
    assert found.row_ranks * found.ranks_per_row == world_size
    assert found.describe() == described


@pytest.mark.parametrize(
    ("stages", "topology", "described"),
    [
        (None, Topology(stages=4), "pipeline of 4 stages"),
        (2, Topology(stages=2, replicas=2), "pipeline of 2 stages x ddp"),
        (1, Topology(replicas=4), "ddp"),
    ],
)
def test_the_recipe_says_of_how_many_stages(stages: int | None, topology: Topology, described: str) -> None:
    found = read_topology({}, 4, stages)
    assert found == topology
    assert (found.world_size, found.describe()) == (4, described)
    assert found.row_ranks * found.stages == 4


def test_sizes_of_the_accelerate_config_are_those_of_a_stage() -> None:
    hsdp = mesh(dp_replicate=2, dp_shard=-1)
    found = read_topology(hsdp, 8, 2)
    assert found == Topology(stages=2, replicas=2, shards=2, sharded=True)
    assert found.describe() == "pipeline of 2 stages x fsdp2, 2 replicas x 2 shards"
    with pytest.raises(
        ConfigError, match=r"makes 2 processes, and 1 were started \(for each stage.*train.pipeline_stages"
    ):
        read_topology(hsdp, 8, None)


def test_stages_that_do_not_divide_the_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.pipeline_stages=3 does not divide the 4 processes"):
        read_topology({}, 4, 3)
    with pytest.raises(ConfigError, match=r"not with tp_size or cp_size"):
        read_topology(mesh(tp=2), 4, 2)
    with pytest.raises(ConfigError, match=r"not with tp_size or cp_size: set them to 1, or take .*pp\.yaml"):
        read_topology(mesh(tp=2), 2, None)  # no number of processes would do
    with pytest.raises(ConfigError, match=r"=2 does not divide the 1 process of this launch: .*a multiple of 2"):
        read_topology({}, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "shards"), [({"dp_replicate": 2}, 4), ({"tp": 2}, 4), ({"cp": 4}, 2), ({"dp_replicate": 2, "tp": 4}, 1)]
)
def test_minus_one_takes_the_processes_that_the_other_sizes_leave(sizes: dict[str, int], shards: int) -> None:
    assert read_topology(mesh(dp_shard=-1, **sizes), 8).shards == shards


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (mesh(dp_replicate=2, dp_shard=2), r"dp_replicate_size 2 x dp_shard_size 2 .*makes 4 processes, and 8"),
        (mesh(dp_replicate=3, dp_shard=-1), r"dp_replicate_size 3 x dp_shard_size 2 .*makes 6 processes, and 8"),
        (mesh(dp_shard=-1, tp=16), r"tp_size 16 makes 16 processes, and 8 were started.*--num_processes"),
        (mesh(dp_shard=2, cp=2, tp=2), r"cp_size 2 and tp_size 2 together are not supported"),
        (mesh(dp_shard=4, sp=2), r"sp_size is not supported: use cp_size"),
        ({"ACCELERATE_USE_FSDP": "true"}, r"fsdp_version must be 2 \(accelerate_configs/fsdp2\.yaml\)"),
        ({**FSDP2, "FSDP_VERSION": "1"}, r"fsdp_version must be 2"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, r"fsdp_offload_params=true is not supported: .*adamw_sr"),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, r"fsdp_activation_checkpointing=true .*train\.memory"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_setting(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_topology(environ, 8)


def test_taking_the_topology_leaves_accelerate_nothing_to_shard() -> None:
    environ = mesh(dp_shard=4, tp=2)
    assert take_topology(environ, 8) == Topology(shards=4, tensor=2, sharded=True)
    assert not {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"} & set(environ)


def test_a_topology_that_is_refused_stays_in_the_environment() -> None:
    environ = mesh(dp_shard=3)
    with pytest.raises(ConfigError):
        take_topology(environ, 8)
    assert environ == mesh(dp_shard=3)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=4 does not fit WORLD_SIZE=2"),
        (
            {"MASTER_PORT": "abc", "RANK": "1.5"},
            "RANK='1.5' is not a whole number from 0 to 1000000; MASTER_PORT='abc'",
        ),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not a whole number from 1 to 65535"),
        ({"TORCHELASTIC_RESTART_COUNT": "once"}, "TORCHELASTIC_RESTART_COUNT='once'"),
        ({"OMPI_COMM_WORLD_SIZE": "²"}, "OMPI_COMM_WORLD_SIZE='²'"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "wide"}, "PARALLELISM_CONFIG_TP_SIZE='wide'"),
    ],
)
def test_a_launchers_number_that_is_none_is_named_before_anything_reads_it(environ, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_numbers(environ)
    assert named in str(error.value)
    with pytest.raises(ConfigError):
        check_variables(environ)


def test_the_numbers_that_launchers_set_are_accepted() -> None:
    check_numbers({})
    check_numbers({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"})
    check_numbers({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "-1", "PARALLELISM_CONFIG_TP_SIZE": "", "NODE_RANK": "0"})
