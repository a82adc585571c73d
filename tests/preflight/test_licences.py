"""preflight.json names the model that a run goes back to, and the licences that the hub's cache knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from sftkit.config.schema import Config, DataConfig, ModelConfig, RunConfig, SourceConfig
from sftkit.preflight.analysis import source_licence, start_facts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, folder: str, card: str) -> None:
    snapshot = cache / folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / folder / "refs").mkdir()
    (cache / folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "README.md").write_text(card)
    (snapshot / "config.json").write_text("{}")


def test_a_model_of_the_hub_has_its_commit_and_licence_and_so_have_runs_that_continue_it(
    hub_cache: Path, tmp_path: Path
) -> None:
    cached(hub_cache, "models--org--base", "---\nlicense: other\nlicense_name: community\n---\n")
    found = start_facts(ModelConfig(path="org/base"))
    assert found == {"model": "org/base", "revision": COMMIT, "licence": "community"}
    step = tmp_path / "run" / "step-000005"
    step.mkdir(parents=True)
    for name in ("config.yaml", "run_status.json", "metrics.jsonl"):
        (step.parent / name).write_text("{}")
    (step / "config.json").write_text("{}")
    (step.parent / "preflight.json").write_text(json.dumps({"start": found}))
    assert start_facts(ModelConfig(path=str(step))) == found
    assert start_facts(ModelConfig(scratch={"model_type": "llama"})) == {}


def test_what_the_cache_does_not_know_is_unknown(tmp_path: Path) -> None:
    assert start_facts(ModelConfig(path="org/other")) == {"model": "org/other", "revision": None, "licence": None}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert start_facts(ModelConfig(path=str(tmp_path)))["licence"] == "mit"


def test_sources_of_the_hub_have_the_licence_of_their_card(hub_cache: Path) -> None:
    cached(hub_cache, "datasets--org--chats", "---\nlicense: apache-2.0\n---\n# Chats")
    paths = ("org/chats", "org/others", "builtin:tasks")
    data = DataConfig(train=tuple(SourceConfig(path=path) for path in paths))
    cfg = Config(run=RunConfig(dir="x"), model=ModelConfig(path="x"), data=data)
    assert [source_licence(cfg, name) for name in ("chats", "others", "tasks")] == ["apache-2.0", None, None]
