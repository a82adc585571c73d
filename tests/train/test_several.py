"""Several adapters in one run: each is trained as if it were alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, make_examples, tiny_llama, tiny_recipe
from looped import proof_rows
from safetensors.torch import load_file

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.resume import find_checkpoint, run_identity
from sftkit.config.schema import (
    AdapterConfig,
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    NamedAdapter,
    NumericsConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from sftkit.config.topology import Topology
from sftkit.data.batches.many import ManyBatches
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Examples
from sftkit.errors import ConfigError, NonFiniteError
from sftkit.models import adapters
from sftkit.models.files import adapter_at
from sftkit.models.load import load_model
from sftkit.models.many_adapters import Selection, member_factors, members_of
from sftkit.models.structure import count_parameters
from sftkit.objectives.objective import NextToken
from sftkit.preflight.analysis import analyse, memory_plan, meta_model
from sftkit.preflight.analysis import lines as lines_of
from sftkit.rundir.files import verify
from sftkit.rundir.names import resolve, trained_length
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker
from sftkit.train import assemble, several
from sftkit.train.end import Trained, write_summary
from sftkit.train.loop import train
from sftkit.train.parts import LoadedModel, Run, TrainServices
from sftkit.verify.round_trip import verify_checkpoint

DATA = {
    name: make_examples([int(n) for n in torch.randint(4, 33, (count,), generator=torch.Generator().manual_seed(i))], i)
    for i, (name, count) in enumerate({"long": 90, "short": 40}.items())
}
FOUR = (
    NamedAdapter(name="a", rank=4, lr=1e-2, seed=3),
    NamedAdapter(name="b", rank=8, lr=3e-3, alpha=8.0, seed=4),
    # Its data ends after a few steps.
    NamedAdapter(name="c", rank=2, lr=1e-3, seed=3, data=(SourceConfig(path="short"),)),
    NamedAdapter(name="lr-5.0e-3", rank=16, lr=5e-3, seed=5),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture
def base(shared: Path, tokenizer: Any) -> Path:
    folder = shared / "base"
    if not folder.exists():
        tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def whole(shared: Path, tokenizer: Any, base: Path) -> Path:
    """A run of four adapters for all tests, which leave it as it is."""
    folder = shared / "whole"
    if not folder.exists():
        run(recipe(folder, base, checkpoint=CheckpointConfig(every=4)), tokenizer)
    return folder


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path names the documents themselves."""

    def load(data: DataConfig, *_: Any, **others: Any) -> tuple[Examples, dict[str, Examples]]:
        return DATA[data.train[0].path], {}

    monkeypatch.setattr(several, "load_examples", load)


def recipe(run_dir: Path, base: Path, **sections: Any) -> Config:
    own = {
        "model": ModelConfig(path=str(base)),
        "data": DataConfig(train=(SourceConfig(path="long"),), max_length=32),
        "adapter": AdapterConfig(alpha=16.0),
        "adapters": FOUR,
        "optim": OptimConfig(max_grad_norm=0.05, weight_decay=0.1),
        "train": TrainConfig(epochs=2, max_steps=10, global_batch_size=8, micro_batch_size=8),
        "attention": AttentionConfig(backend="reference"),
        "compile": CompileConfig(enabled=False),
        "log": LogConfig(every=1, wandb="off"),
    }
    return replace(tiny_recipe(run_dir, **(own | sections)), run=RunConfig(dir=str(run_dir), seed=3))


def run(cfg: Config, tokenizer: Any, resume: str | None = None) -> Path:
    """A run through load_model, engine, loop and checkpoints; without `adapters` of the data that the recipe names."""
    rt: Runtime = cpu_runtime()
    run_dir = Path(cfg.run.dir)
    run_dir.mkdir(exist_ok=True)
    found = find_checkpoint(run_dir, resume, rt)
    here = Run(cfg, "sft", rt, run_dir, found)
    many = {"several": partial(members_of, seed=cfg.run.seed, entries=cfg.adapters)} if cfg.adapters else {}
    orig_model = load_model(cfg.model, tokenizer, cfg.run.seed, "fp32", adapter=cfg.adapter, **many)
    loaded = LoadedModel(orig_model, tokenizer, 32)
    objective = NextToken(cfg.loss)
    if cfg.adapters:
        of_each, _ = several.load_several(cfg, RowTokenizer(None, tokenizer, 32))  # type: ignore[arg-type]
        batches = several.lay_out_several(cfg, of_each, objective, found)
    else:
        documents = assemble.EncodedDocuments(DATA[cfg.data.train[0].path], 32, tokenizer.pad_token_id or 0)
        batches = assemble.lay_out(cfg, rt, documents, objective, found)
    data = assemble.Data(batches, {}, [], None)
    engine = assemble.build_engine(here, loaded, objective, data)
    with closing(engine):
        identity = run_identity(orig_model, tokenizer, batches.examples, batches.layout)
        state = (orig_model, tokenizer, engine.optimizer)
        checkpoints = Checkpoints(run_dir, cfg.checkpoint, rt, *state, "run: {}\n", identity)
        resumed = checkpoints.resume(found)
        with Tracker(run_dir, cfg.log, rt, {}, step=resumed["step"]) as tracker:
            train(cfg, rt, engine, batches, TrainServices(lambda _: ({}, []), checkpoints, tracker, resumed))
    return run_dir


def alone(cfg: Config, one: NamedAdapter, run_dir: Path) -> Config:
    """The recipe of one of its adapters by itself."""
    assert cfg.adapter is not None
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=cfg.run.seed if one.seed is None else one.seed),
        adapter=replace(cfg.adapter, rank=one.rank or cfg.adapter.rank, alpha=one.alpha or cfg.adapter.alpha),
        optim=replace(cfg.optim, lr=one.lr or cfg.optim.lr),
        data=replace(cfg.data, train=one.data or cfg.data.train),
        adapters=None,
    )


def lines(run_dir: Path, *names: str) -> list[list[float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for name in names] for row in rows if row.get(names[0]) is not None]


def last_step(run_dir: Path) -> Path:
    return max(run_dir.glob("step-*"))


def factors_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_each_adapter_is_trained_as_if_alone(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    cfg = recipe(tmp_path / "many", base)
    cfg = replace(cfg, train=replace(cfg.train, micro_batch_size=2))
    together = last_step(run(cfg, tokenizer))
    assert together.name == "step-000010"
    steps = set()
    for one in FOUR[1:3]:
        own = run(alone(cfg, one, tmp_path / one.name), tokenizer)
        steps.add(last_step(own).name)
        expected, found = factors_in(last_step(own)), factors_in(together / "adapters" / one.name)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert float((found[name] - value).norm() / value.norm()) < 1e-5
        metrics = [f"train/{metric}/{one.name}" for metric in ("loss", "grad_norm", "lr")]
        torch.testing.assert_close(
            torch.tensor(lines(tmp_path / "many", *metrics)),
            torch.tensor(lines(own, "train/loss", "train/grad_norm", "train/lr")),
            rtol=1e-5,
            atol=1e-7,
        )
    assert len(steps) == 2  # the short data has ended before
    names = {name for row in (tmp_path / "many/metrics.jsonl").read_text().splitlines() for name in json.loads(row)}
    assert "train/loss/" + FOUR[1].name in names
    # Adapters may share a source, so none is counted by itself.
    assert not [name for name in names if re.match(r"data/(share|tokens|epochs)/|train/.*/loss$", name)]
    red = {row: found for row, found in proof_rows(tmp_path / "many").items() if found["ok"] is False}
    assert {*red} <= {"Answers end with a learned end of turn"}, red


def test_an_accumulated_step_is_that_of_one_pass(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    cfg = alone(recipe(tmp_path / "many", base), FOUR[0], tmp_path / "whole")
    whole = run(cfg, tokenizer)
    parts = replace(
        cfg, run=replace(cfg.run, dir=str(tmp_path / "parts")), train=replace(cfg.train, micro_batch_size=2)
    )
    accumulated = run(parts, tokenizer)
    # Norms of gradients move by 4e-6 on some CPUs, whose products sum in another order for other numbers of rows.
    for name, limit in (("train/loss", 1e-6), ("train/grad_norm", 1e-5)):
        torch.testing.assert_close(
            torch.tensor(lines(accumulated, name)), torch.tensor(lines(whole, name)), rtol=limit, atol=0
        )
    found = factors_in(last_step(accumulated))
    for name, value in factors_in(last_step(whole)).items():
        assert float((found[name] - value).norm() / value.norm()) < 1e-5


def test_one_adapter_of_one_is_the_single_adapter_run_bitwise(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    one = FOUR[0]
    together = run(recipe(tmp_path / "many", base, adapters=(one,)), tokenizer)
    own = run(alone(recipe(tmp_path / "many", base), one, tmp_path / "own"), tokenizer)
    assert lines(together, "train/loss", "train/grad_norm") == lines(own, "train/loss", "train/grad_norm")
    expected, found = factors_in(last_step(own)), factors_in(last_step(together) / "adapters" / "a")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_adapter_that_is_absent_from_every_second_step_is_not_updated_there(
    tmp_path: Path, tokenizer: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by the decay of weights, or by its moments."""

    def every_second(self: ManyBatches, first_step: int, last_step: int) -> Iterator[Any]:
        plans = [order.batches(0, 10) for order in self._orders]
        for step in range(1, last_step + 1):
            present = [k > 0 or step % 2 == 0 for k in range(len(plans))]
            found = [next(plan)[2] if there else None for plan, there in zip(plans, present, strict=True)]
            own = [(step // 2, 5) if k == 0 else (step, 10) for k in range(len(plans))]
            steps = tuple(one if there else None for one, there in zip(own, present, strict=True))
            yield step, 0, self._joint(found, steps)

    monkeypatch.setattr(ManyBatches, "_joint_items", every_second)
    cfg = recipe(tmp_path / "many", base, adapters=FOUR[:2])
    together = last_step(run(cfg, tokenizer))
    half = replace(cfg, train=replace(cfg.train, max_steps=5))
    for one, own in zip(FOUR, (half, cfg), strict=False):
        expected = factors_in(last_step(run(alone(own, one, tmp_path / one.name), tokenizer)))
        for name, value in factors_in(together / "adapters" / one.name).items():
            assert float((expected[name] - value).norm() / value.norm()) < 1e-5


@pytest.mark.slow
def test_an_adapter_with_a_loss_that_is_not_finite_does_not_change_the_others(
    tmp_path: Path, tokenizer: Any, base: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = assemble.build_engine

    def spoiled(here: Run, loaded: LoadedModel, *more: Any) -> Any:
        """Before the third step a factor of b gets a NaN."""
        engine = build(here, loaded, *more)
        step = engine.step

        def spoiled_step(batches: Any, *given: Any, **named: Any) -> Any:
            broken = [k for k, own in enumerate(batches.adapters) if here.cfg.adapters[k].name == "b" and own.step == 3]
            with torch.no_grad():
                for k in broken:
                    next(iter(member_factors(loaded.orig_model, k).values()))[0, 0] = torch.nan
            return step(batches, *given, **named)

        engine.step = spoiled_step  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(assemble, "build_engine", spoiled)
    for then in ("error", "skip"):
        cfg = recipe(tmp_path / then, base, numerics=NumericsConfig(on_nonfinite=then, max_skips=4))  # type: ignore[arg-type]
        broken = last_step(run(cfg, tokenizer))
        for one in FOUR:
            before, after = (factors_in(folder / "adapters" / one.name) for folder in (last_step(whole), broken))
            same = all(torch.equal(after[name], value) for name, value in before.items())
            assert same == (one.name != "b")
        assert lines(tmp_path / then, "health/skipped_steps/b")[-1] == [8.0]
        assert lines(tmp_path / then, "health/skipped_steps/a")[-1] == [0.0]
        assert all(loss == loss for (loss,) in lines(tmp_path / then, "train/loss"))
        events = (tmp_path / then / "events.jsonl").read_text()
        assert f"adapter b: no updates from step {3 if then == 'error' else 7} on" in events
    with pytest.raises(NonFiniteError, match="adapter b: no updates from step 3 on"):
        run(recipe(tmp_path / "only", base, adapters=FOUR[1:2]), tokenizer)


def test_a_resumed_run_equals_the_uninterrupted_run_bitwise(
    tmp_path: Path, tokenizer: Any, base: Path, whole: Path
) -> None:
    cut = shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(cut / "step-000010")
    shutil.rmtree(cut / "step-000008")  # as if killed after step 4: one adapter ends afterwards
    (cut / "LATEST").write_text("step-000004\n")
    run(recipe(cut, base, checkpoint=CheckpointConfig(every=4)), tokenizer, resume="auto")
    names = ["train/loss", *(f"train/{metric}/{one.name}" for metric in ("loss", "grad_norm") for one in FOUR)]
    for name in names:
        assert lines(cut, name) == lines(whole, name)
    for one in FOUR:
        expected, found = (factors_in(last_step(folder) / "adapters" / one.name) for folder in (whole, cut))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    red = {row for row, found in proof_rows(cut).items() if found["ok"] is False}
    assert red <= {"Answers end with a learned end of turn"}


def test_each_folder_is_a_model_and_the_step_directory_says_so(tokenizer: Any, base: Path, whole: Path) -> None:
    step = last_step(whole)
    assert verify(step) is None
    recorded = json.loads((whole / "proof.json").read_text())["logits"]
    assert verify_checkpoint(step, recorded).ok
    digests = recorded["adapters"]
    assert len({one["sha256"] for one in digests.values()}) == len(digests) == 4
    assert not verify_checkpoint(step, {"adapters": {**digests, "a": digests["b"]}}).ok
    with pytest.raises(ConfigError, match=r"it holds 4 adapters, each a separate model: name one of .*adapters/a, "):
        resolve(str(whole))
    ids = torch.arange(12)[None]
    for one in FOUR:
        folder = step / "adapters" / one.name
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (one.rank, one.alpha or 16.0)
        own_files = {"tokenizer.json", "generation_config.json", "manifest.json", "recipe.yaml"}
        assert own_files <= {path.name for path in folder.iterdir()}
        assert verify(folder) is None
        assert trained_length(folder) == 32  # as its run had it: for make eval and a following stage
        merged = load_model(ModelConfig(path=str(folder)), tokenizer, 0)
        own = adapters.add_adapters(
            load_model(ModelConfig(path=str(base)), tokenizer, 0), adapters.adapters_in(_at(folder))
        )
        assert own.digest  # of the model that it belongs to
        assert merged(ids).logits.isfinite().all()
    content = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(ConfigError, match="was trained on other weights"):
            load_model(ModelConfig(path=str(folder)), tokenizer, 0)
    finally:
        (base / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("losses", [{"a": 2.0, "b": 1.25}, {}])
def test_the_end_of_a_run_names_the_folder_of_the_best_adapter(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str], losses: dict[str, float]
) -> None:
    (tmp_path / "preflight.json").write_text(json.dumps({"adapters": [{"name": one.name} for one in FOUR]}))
    evaluated = {f"val/{name}/loss": loss for name, loss in losses.items()}
    (tmp_path / "evals.jsonl").write_text(json.dumps({"step": 10, **evaluated}) + "\n")
    trained = Trained(10, 10, metrics={"train/loss": 1.0}, checkpoint=str(last_step(whole)))
    write_summary(tmp_path, trained, cpu_runtime())
    found = re.findall(r"^best adapter: (.*) \(validation loss (.*)\), for ", capsys.readouterr().out, re.MULTILINE)
    assert found == ([(f"{last_step(whole)}/adapters/b", "1.2500")] if losses else [])
    assert [resolve(folder) for folder, _ in found] == [folder for folder, _ in found]


def _at(folder: Path) -> Any:
    return adapter_at(ModelConfig(path=str(folder)))


def test_one_graph_computes_all_groups_of_adapters_and_the_rows_of_the_proof_are_green(
    tmp_path: Path, tokenizer: Any, base: Path
) -> None:
    torch._dynamo.reset()
    compile = CompileConfig(backend="eager", fullgraph=True)
    train = TrainConfig(max_steps=3, global_batch_size=4, micro_batch_size=2)
    run_dir = run(recipe(tmp_path / "run", base, compile=compile, train=train), tokenizer)
    rows = proof_rows(run_dir)
    assert [name for name, row in rows.items() if row["ok"] is False] == ["Answers end with a learned end of turn"]
    assert rows["The step is compiled"]["found"] == "2 graphs"  # of the blocks, and of the final norm
    for name in ("Same gradients as the plain model", "Frozen weights unchanged", "Weights are those of the files"):
        assert rows[name]["ok"] is True
    assert "of 4 adapters" in rows["First update is that of torch's optimizer"]["found"]


def test_adapters_of_one_rank_have_the_flops_that_torch_counts(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    alike = tuple(replace(one, rank=4) for one in FOUR)
    run_dir = run(recipe(tmp_path / "run", base, adapters=alike, train=TrainConfig(max_steps=1)), tokenizer)
    assert proof_rows(run_dir)["FLOPs are those that torch counts"]["ok"] is True


def test_a_step_that_mixes_up_adapters_is_found(
    tmp_path: Path, tokenizer: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the proof, with an adapter that computes with the factors of its neighbour."""
    begin = Selection.begin

    def shifted(self: Selection, adapters: tuple[int, ...], device: torch.device) -> None:
        begin(self, tuple((k + 1) % 4 for k in adapters), device)

    monkeypatch.setattr(Selection, "begin", shifted)
    run_dir = run(recipe(tmp_path / "run", base, train=TrainConfig(max_steps=1, micro_batch_size=4)), tokenizer)
    assert proof_rows(run_dir)["Same gradients as the plain model"]["ok"] is False


def test_the_analysis_before_a_run_counts_all_adapters(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    cfg = recipe(tmp_path / "many", base, train=TrainConfig(max_steps=30, global_batch_size=8, micro_batch_size=8))
    cfg = replace(cfg, optim=replace(cfg.optim, lr=7e-4), adapters=(*FOUR[1:], NamedAdapter(name="plain")))
    tokenize = RowTokenizer(None, tokenizer, 32)  # type: ignore[arg-type]
    of_each, _ = several.load_several(cfg, tokenize)
    batches = several.lay_out_several(cfg, of_each, NextToken(cfg.loss))
    shell = meta_model(cfg.model, tokenizer, "bf16", (), cfg.adapter, cfg.adapters)
    assert shell is not None
    found = several.data_of_several(cfg, tokenize, shell)
    facts = found["adapters"]
    assert sum(one["parameters"] for one in facts) == count_parameters(shell).trained
    assert [(one["rank"], one["alpha"], one["lr"], one["seed"]) for one in facts] == [
        *((8, 8.0, 3e-3, 4), (2, 16.0, 1e-3, 3), (16, 16.0, 5e-3, 5)),
        (16, 16.0, 7e-4, 3),
    ]
    assert [one["data"] for one in facts] == ["long", "short", "long", "long"]
    for one in facts:
        own = DATA[one["data"]]
        counts = len(own), int(own.lengths.sum()), int(own.num_targets.sum()), 30
        assert (one["documents"], one["tokens"], one["targets"], one["steps"]) == counts
    plan = memory_plan(cfg, shell, found["layout"], 80, Topology())
    analysis = analyse(cfg, tokenizer, **found, orig_model=shell, plan=plan)
    # An adapter with less data repeats it, as the steps do.
    done = [batch for _, _, batch in batches._items(0, 30)]
    tokens = sum(int(batches.examples.lengths[list(row)].sum()) for batch in done for row in batch.rows)
    assert analysis["time"]["tokens"] == pytest.approx(tokens, rel=0.03)
    assert plan is not None
    assert plan.setup is not None
    assert plan.setup.layout.shapes == batches.layout.shapes == ((8, 32),)
    line = "b: rank 8, alpha 8 ("
    assert any(line in text and "lr 0.003, seed 4, 90 documents of long with " in text for text in lines_of(analysis))
    assert analysis["adapter"].startswith("4 lora adapters on all-linear: trains ")
