"""Every recipe that ships can start on one, two and eight processes; every setting is in one, or documented as unused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sftkit.config.keys import key_table, row_of
from sftkit.config.load import read_config
from sftkit.errors import ConfigError

ROOT = Path(__file__).parents[2]
STAGES = ("base", "mid", "sft")
FLEX = ("flex", *(f"flex_{passes}" for passes in ("auto_regional", "block_regional", "cuda_graphs")))
OF_THE_GRAPH = [
    *([f"{stage}_{what}" for stage in STAGES] for what in ("auto_bucketing", "full_inductor", "no_passes", *FLEX)),
    [f"deepseek_v3/{stage}_flex" for stage in STAGES],
]
"Configurations of the graph engine beside the two of the plain names: a recipe of each stage."
EXPECTED = {
    *(
        f"{folder}/{stage}.yaml"
        for folder in ("default", "smoke", "smollm2_135m", "graph", "graph/deepseek_v3")
        for stage in STAGES
    ),
    *(f"graph/{name}.yaml" for names in OF_THE_GRAPH for name in names),
    "qwen3_0_6b/mid.yaml",
    "qwen3_0_6b/sft.yaml",
    "qwen3_0_6b/sft_agent.yaml",
    "tinyllama_1_1b/sft.yaml",
    *(f"{model}/sft.yaml" for model in ("qwen3_1_7b", "qwen3_4b", "qwen3_8b", "gemma_3_1b", "gemma_3_4b")),
    *(f"lab/gpt2_compile/{how}{of}.yaml" for how in ("compiled", "eager") for of in ("", "_two_gpus")),
    *(f"{model}/sft.yaml" for model in ("qwen3_5_0_8b", "qwen3_5_4b")),
    *(f"{model}/sft.yaml" for model in ("llama_3_2_1b", "llama_3_2_3b", "llama_3_1_8b", "smollm3_3b", "olmo_2_1b")),
    "lfm2_1_2b/sft.yaml",
}
ALL = sorted(str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml"))
PUBLISHED = [name for name in ALL if not name.startswith("shared/")]
MAX_PROCESSES = {
    "lab/gpt2_compile/compiled.yaml": 2,
    "lab/gpt2_compile/eager.yaml": 2,
    "smoke/adapters.yaml": 1,
}
"Of recipes for so few that more cannot share their rows, or their adapters."


def test_the_documented_recipes_exist():
    assert set(PUBLISHED) >= EXPECTED


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_valid(name: str, world_size: int):
    read_config(ROOT / "recipes" / name, world_size=min(world_size, MAX_PROCESSES.get(name, world_size)))


@pytest.mark.parametrize("names", OF_THE_GRAPH, ids=lambda names: names[0].replace("base_", ""))
def test_stages_of_a_graph_configuration_start_from_one_another_and_train_alike(names: list[str]):
    base, mid, sft = (read_config(ROOT / "recipes" / "graph" / f"{name}.yaml", world_size=1) for name in names)
    assert base.model.path is None
    assert (mid.model.path, sft.model.path) == (base.run.dir, mid.run.dir)
    assert base.graph == mid.graph == sft.graph
    assert base.attention == mid.attention == sft.attention
    assert [cfg.run.dir for cfg in (base, mid, sft)] == [f"runs/graph/{name}" for name in names]


def test_what_recipes_share_lacks_a_model_and_a_place_to_run_and_nothing_else():
    with pytest.raises(ConfigError) as refused:
        read_config(ROOT / "recipes" / "shared" / "sft.yaml", world_size=1)
    problems = str(refused.value).splitlines()
    assert [problem.partition(": ")[2].split()[0].rstrip(":") for problem in problems] == ["run.dir", "model.path"]


def test_a_setting_is_in_a_recipe_or_in_the_table_of_those_that_none_uses():
    used = {row_of(keys) for name in ALL for keys in _places(yaml.safe_load((ROOT / "recipes" / name).read_text()), ())}
    _, _, section = (ROOT / "docs/tutorial.md").read_text().partition("\n## Settings that no recipe uses")
    told = re.findall(r"`([\w.]+)`", "".join(line.split("|")[1] for line in section.splitlines() if line[:1] == "|"))
    # A source for validation has the settings of one for training.
    unused = [key for key in key_table() if key not in used and not key.startswith("data.val.N.")]
    assert sorted(told) == sorted(unused)


def _places(value: object, keys: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    yield keys
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(item, (*keys, key))
