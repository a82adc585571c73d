"""The Accelerate configs say what Accelerate reads, topology and precision and nothing else, and mean what they say."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from sftkit.config.topology import Topology, read_topology, topology_of
from sftkit.errors import ConfigError

FILES = sorted((Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml"))
PREFIXED = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}


def unknown_nested_keys(config: dict) -> list[str]:
    """Keys inside sections that no option of `accelerate launch` reads, prefixed as the launcher prefixes them."""
    options = {action.dest for action in launch_command_parser()._actions}
    return [
        f"{section}.{key}"
        for section, values in config.items()
        if isinstance(values, dict)
        for key in values
        if (key if key.startswith(PREFIXED.get(section, "")) else PREFIXED[section] + key) not in options
    ]


TOPOLOGIES = {
    "cpu": (1, Topology()),
    "single_gpu": (1, Topology()),
    "cpu_ddp": (8, Topology(replicas=8)),
    "ddp": (8, Topology(replicas=8)),
    "pp": (8, Topology(replicas=8)),  # the recipe says of how many stages
    "cpu_fsdp2": (8, Topology(shards=8, sharded=True)),
    "cpu_tp": (8, Topology(shards=4, tensor=2, sharded=True)),
    "fsdp2": (8, Topology(shards=8, sharded=True)),
    "hsdp": (8, Topology(replicas=2, shards=4, sharded=True)),
    "tp": (8, Topology(shards=4, tensor=2, sharded=True)),
    "cp": (8, Topology(shards=4, context=2, sharded=True)),
    "multi_node": (16, Topology(replicas=2, shards=8, sharded=True)),
}
"File: number of processes, and what they are then."
LAUNCHING = {
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "gpu_ids", "dynamo_config"),
    *("num_machines", "machine_rank", "num_processes", "main_process_ip", "main_process_port"),
}


def test_every_layout_is_listed() -> None:
    assert {file.stem for file in FILES} == set(TOPOLOGIES)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_layout_launched_is_the_topology_that_it_is_named_for(name: str) -> None:
    world_size, topology = TOPOLOGIES[name]
    assert read_topology(exported(name, world_size), world_size) == topology
    assert topology_of(FILES[0].with_name(f"{name}.yaml"), world_size) == topology


def test_without_a_number_a_file_counts_its_own_processes(tmp_path: Path) -> None:
    assert topology_of(FILES[0].with_name("fsdp2.yaml")) == Topology(shards=8, sharded=True)
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no accelerate config that can be read"):
        topology_of(tmp_path / "nothing.yaml")
    for text in ("- a list", "fsdp_config: 3", "num_processes: many", "{"):
        (tmp_path / "odd.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"odd\.yaml: no accelerate config that can be read"):
            topology_of(tmp_path / "odd.yaml")
    (tmp_path / "odd.yaml").write_text("{distributed_type: FSDP, fsdp_config: {fsdp_version: 1}}")
    with pytest.raises(ConfigError, match="fsdp_version must be 2"):
        topology_of(tmp_path / "odd.yaml", 2)


def exported(name: str, num_processes: int, *options: str) -> dict[str, str]:
    """The environment that `accelerate launch` makes for a script, without starting one."""
    file = str(FILES[0].with_name(f"{name}.yaml"))
    words = ["--config_file", file, "--num_processes", str(num_processes), *options, "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_fsdp or args.multi_gpu:
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]


def test_a_size_on_the_command_line_wins_over_the_file() -> None:
    environ = exported("tp", 8, "--parallelism_config_tp_size", "4")
    assert read_topology(environ, 8) == Topology(shards=2, tensor=4, sharded=True)


def test_more_machines_of_a_layout_are_more_shards_or_an_error() -> None:
    assert read_topology(exported("multi_node", 32, "--num_machines", "4"), 32).shards == 16
    with pytest.raises(ConfigError, match="dp_replicate_size 2"):
        read_topology(exported("multi_node", 1, "--num_machines", "1"), 1)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_layout_holds_topology_and_precision_only(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    assert set(config) <= LAUNCHING | {"fsdp_config", "parallelism_config"}
    assert set(config.get("fsdp_config", {})) <= {"fsdp_version"}
    assert all(key.endswith("_size") for key in config.get("parallelism_config", {}))
    assert config["mixed_precision"] == ("no" if config["use_cpu"] else "bf16")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_key_is_known_to_accelerate(file: Path):
    load_config_from_file(str(file))  # raises for unknown keys at the top
    assert unknown_nested_keys(yaml.safe_load(file.read_text())) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_accelerate_does_not_compile(file: Path):
    assert yaml.safe_load(file.read_text())["dynamo_config"] == {"dynamo_backend": "NO"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_first_line_says_when_it_is_used(file: Path):
    assert file.read_text().startswith("# ")


def test_the_check_for_nested_keys_finds_a_misspelled_one():
    assert unknown_nested_keys({"dynamo_config": {"dynamo_bakend": "NO"}}) == ["dynamo_config.dynamo_bakend"]
    assert unknown_nested_keys({"parallelism_config": {"dp_shard_size": 2}}) == ["parallelism_config.dp_shard_size"]


@pytest.mark.slow
def test_the_config_of_several_processes_on_a_cpu_starts_them(tmp_path: Path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys; from accelerate import Accelerator\n"
        "a = Accelerator(); sys.stdout.write(f'{a.process_index}/{a.num_processes}/{a.device.type}\\n')\n"
        "sys.stdout.flush(); a.end_training()\n"
    )
    command = ["-m", "accelerate.commands.launch", "--config_file", FILES[0].with_name("cpu_ddp.yaml"), script]
    done = preloaded.run(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.split()) == ["0/2/cpu", "1/2/cpu"]
