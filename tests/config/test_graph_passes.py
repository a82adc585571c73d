"""Passes of the graph engine are checked with the recipe, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sftkit.config import tables
from sftkit.config.load import read_config
from sftkit.config.tables import PASSES, STAGES, Pass, problems
from sftkit.errors import ConfigError


def made(name: str, stage: str = "joint", **facts: tuple[str, ...]) -> Pass:
    return Pass(name=name, stage=stage, fn="x:y", summary="", **facts)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four passes of two stages."""
    specs = (
        made("tags"),
        made("bucket", "split", conflicts=("merge",)),
        made("merge", "split", conflicts=("bucket",)),
        made("codegen", "split"),
    )
    monkeypatch.setattr(tables, "STAGES", ("joint", "split"))
    monkeypatch.setattr(tables, "PASSES", {spec.name: spec for spec in specs})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("tags", "bucket"), []),
        (("tags", "bucket", "codegen"), []),
        (("tag",), ['"tag" is not one of tags, bucket, merge, codegen. Did you mean "tags"?']),
        (("tags", "tags"), ['"tags" is named twice: leave one out']),
        (("bucket", "tags"), ["tags must come before bucket: write [tags, bucket]"]),
        (("bucket", "merge"), ["merge does not go with bucket: leave one out"]),
        (("bucket", "merge", "tags"), ["merge does not go with bucket: leave one out"]),
    ],
)
def test_a_list_of_passes_is_refused_with_what_is_wrong(
    known: None, names: tuple[str, ...], expected: list[str]
) -> None:
    assert list(problems(names)) == expected


def test_every_pass_names_a_stage_and_known_others() -> None:
    for name, spec in PASSES.items():
        assert spec.name == name
        assert spec.stage in STAGES
        assert {*spec.conflicts} <= PASSES.keys()
        for other in spec.conflicts:
            assert name in PASSES[other].conflicts, f"{name} and {other}: one alone says so"


RECIPE = """
run: {dir: runs/x}
model: {path: some/model}
data: {train: [{path: "builtin:tasks"}], max_length: 64}
train: {max_steps: 2, engine: graph}
"""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["graph.passes=[reshard_after_foward]"],
            'graph.passes: "reshard_after_foward" is not one of .*Did you mean "reshard_after_forward"',
        ),
        (
            ["train.engine=blocks", "graph.dump=true"],
            "graph.dump: only goes with train.engine graph, not blocks: set graph.dump=false",
        ),
        (
            ["train.engine=blocks", "graph.passes=[block_bucketing]"],
            r"graph.passes: only goes with train.engine graph, not blocks: set graph.passes=\[\]",
        ),
        (["compile.mode=max-autotune"], "compile.mode: has no effect with train.engine graph"),
        (["data.layout=dynamic"], "train.engine: graph captures fixed shapes: set data.layout=packed"),
        (["graph.passes=[cuda_graphs, block_bucketing]"], "block_bucketing must come before cuda_graphs"),
        (
            ["graph.passes=[regional_inductor, block_bucketing]"],
            r"block_bucketing must come before regional_inductor: write \[block_bucketing, regional_inductor\]",
        ),
        (["graph.passes=[regional_inductor, full_inductor]"], "full_inductor does not go with regional_inductor"),
        (["graph.passes=[auto_bucketing, block_bucketing]"], "block_bucketing does not go with auto_bucketing"),
        (["compile.on_recompile=eager"], 'compile.on_recompile: "eager" was removed: take warn'),
        (["graph.passes=[full_checkpointing]"], '"full_checkpointing" was removed: train.memory=low'),
        (["graph.token_dispatcher=alltoall"], "graph.token_dispatcher: was removed: leave it out"),
        (["graph.passes=[gather_once, cuda_graphs]"], "cuda_graphs does not go with gather_once"),
        (["graph.passes=[reduce_once, cuda_graphs]"], "cuda_graphs does not go with reduce_once"),
        (
            ["graph.passes=[block_bucketing, reduce_once]"],
            r"reduce_once must come before block_bucketing: write \[reduce_once, block_bucketing\]",
        ),
        (["train.fp8=rowwise"], "train.fp8: rowwise does not go with train.engine graph"),
        (
            ["compile.enabled=false", "graph.passes=[reshard_after_forward]"],
            r"graph.passes: only goes with compile.enabled true, .*: set graph.passes=\[\]",
        ),
    ],
)
def test_what_the_graph_engine_cannot_do_is_refused_with_the_recipe(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=message):
        read_config(str(tmp_path / "recipe.yaml"), settings)


def test_what_has_no_effect_is_not_told_to_take_another_backend_too(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    settings = ["compile.backend=aot_eager", "compile.mode=default"]
    with pytest.raises(ConfigError, match=r"compile\.mode: has no effect") as refused:
        read_config(str(tmp_path / "recipe.yaml"), settings)
    assert "inductor" not in str(refused.value)


def test_a_recipe_of_the_graph_engine_is_read(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    cfg = read_config(str(tmp_path / "recipe.yaml"), ["graph.passes=[reshard_after_forward]", "graph.dump=true"])
    assert cfg.graph.passes == ("reshard_after_forward",)
