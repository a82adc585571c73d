"""The Accelerate configs say what Accelerate reads: it ignores nested keys that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

FILES = sorted((Path(__file__).parents[1] / "accelerate_configs").glob("*.yaml"))
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


def test_the_four_layouts_exist():
    assert {file.name for file in FILES} >= {"cpu.yaml", "cpu_ddp.yaml", "single_gpu.yaml", "ddp.yaml"}


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


@pytest.mark.parametrize(
    ("name", "world_size", "env"), [("cpu", 1, {}), ("cpu_ddp", 2, {"ACCELERATE_USE_CPU": "true"})]
)
def test_cpu_configs_start_as_many_processes_as_they_say(tmp_path: Path, name: str, world_size: int, env: dict):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys; from accelerate import Accelerator\n"
        "a = Accelerator(); sys.stdout.write(f'{a.process_index}/{a.num_processes}/{a.device.type}\\n')\n"
        "a.end_training()\n"
    )
    config = next(file for file in FILES if file.stem == name)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, check=True)
    assert sorted(done.stdout.split()) == [f"{rank}/{world_size}/cpu" for rank in range(world_size)]
