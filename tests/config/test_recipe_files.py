"""Every recipe that ships can start on one, two and eight processes."""

from pathlib import Path

import pytest

from sftkit.config.load import read_config
from sftkit.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXPECTED = {
    *(
        f"{folder}/{stage}.yaml"
        for folder in ("default", "smoke", "smollm2_135m", "graph", "graph/deepseek_v3")
        for stage in ("base", "mid", "sft")
    ),
    *(f"graph/sft_{passes}.yaml" for passes in ("auto_bucketing", "full_inductor", "no_passes")),
    *(f"graph/sft_flex{passes}.yaml" for passes in ("", "_auto_regional", "_block_regional", "_cuda_graphs")),
    *(f"graph/deepseek_v3/sft_{what}.yaml" for what in ("flex", "alltoall")),
    "qwen3_0_6b/mid.yaml",
    "qwen3_0_6b/sft.yaml",
    "tinyllama_1_1b/sft.yaml",
    *(f"{model}/sft.yaml" for model in ("qwen3_1_7b", "qwen3_4b", "qwen3_8b", "gemma_3_1b", "gemma_3_4b")),
    *(f"lab/gpt2_compile/{how}{of}.yaml" for how in ("compiled", "eager") for of in ("", "_two_gpus")),
    *(f"{model}/sft.yaml" for model in ("llama_3_2_1b", "llama_3_2_3b", "llama_3_1_8b", "smollm3_3b", "olmo_2_1b")),
}
ALL = sorted(str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml"))
PUBLISHED = [name for name in ALL if not name.startswith("shared/")]
MAX_PROCESSES = {"lab/gpt2_compile/compiled.yaml": 2, "lab/gpt2_compile/eager.yaml": 2}
"Of recipes for so few that more cannot share their rows."


def test_the_documented_recipes_exist():
    assert set(PUBLISHED) >= EXPECTED


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_valid(name: str, world_size: int):
    read_config(ROOT / "recipes" / name, world_size=min(world_size, MAX_PROCESSES.get(name, world_size)))


def test_what_recipes_share_lacks_a_model_and_a_place_to_run_and_nothing_else():
    with pytest.raises(ConfigError) as refused:
        read_config(ROOT / "recipes" / "shared" / "sft.yaml", world_size=1)
    problems = str(refused.value).splitlines()
    assert [problem.partition(": ")[2].split()[0].rstrip(":") for problem in problems] == ["run.dir", "model.path"]
