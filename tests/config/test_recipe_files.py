"""Every recipe that ships can start on one, two and eight processes."""

from pathlib import Path

import pytest

from sftkit.config.load import read_config

ROOT = Path(__file__).parents[2]
EXPECTED = {
    *(f"{folder}/{stage}.yaml" for folder in ("default", "smoke", "smollm2_135m") for stage in ("base", "mid", "sft")),
    "qwen3_0_6b/mid.yaml",
    "qwen3_0_6b/sft.yaml",
    "tinyllama_1_1b/sft.yaml",
}
FOUND = sorted(str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml"))


def test_the_documented_recipes_exist():
    assert set(FOUND) >= EXPECTED


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("name", FOUND)
def test_recipes_are_valid(name: str, world_size: int):
    read_config(ROOT / "recipes" / name, world_size=world_size)
