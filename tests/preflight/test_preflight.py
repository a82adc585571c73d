"""The look at the data before training: preflight.json, its lines and warnings, the page, scripts/inspect_data.py."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT, cpu_runtime, flat, make_examples, make_layout_of
from transformers import PreTrainedTokenizerBase

from sftkit.config.load import read_config
from sftkit.config.schema import Config, DataConfig, SourceConfig, TrainConfig
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.config.topology import Topology
from sftkit.data.batches import loader
from sftkit.data.batches.epoch import num_positions, plan_epoch
from sftkit.data.batches.pack import make_layout
from sftkit.data.tokens.sources import stage_rule
from sftkit.data.types import SPLIT_TOKENS, Examples
from sftkit.errors import ConfigError, DataError
from sftkit.evals.tasks import benchmarks
from sftkit.memory.plan import make_plan, shape_of
from sftkit.models.load import load_model
from sftkit.preflight import analysis
from sftkit.preflight import analysis as preflight
from sftkit.preflight import analysis as preflight_costs
from sftkit.preflight import terminal as inspection
from sftkit.preflight.data import answer_warnings, duplicate_facts
from sftkit.preflight.terminal import page
from sftkit.rundir.names import TRAINING_STATE
from sftkit.train import assemble

CHROMIUM = shutil.which("chromium")
SCRATCH = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def chat(question: str, answer: str, system: str = "") -> dict[str, Any]:
    turns = [("system", system), ("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in turns if content]}


TEXTS = [{"text": f"Sea shells number {i}. " * 10} for i in range(9)]
DDP_LAUNCH = ("--config_file", f"{ROOT}/accelerate_configs/ddp.yaml")
PIPELINE_LAUNCH = ("--config_file", f"{ROOT}/accelerate_configs/pp.yaml", "train.engine=pipeline")
CHATS = [chat(f"What comes after {i}?", f"It is {i + 1}.") for i in range(20)]


def write_recipe(folder: Path, tokenizer: PreTrainedTokenizerBase, rows: list[Any], **settings: Any) -> Path:
    """A recipe with its data and tokenizer beside it; section__key=value changes a setting, model__path the model."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.save_pretrained(folder / "tokenizer")
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run"), "stage": "sft"},
        "model": {} if "model__path" in settings else {"scratch": SCRATCH, "tokenizer": str(folder / "tokenizer")},
        "data": {
            "train": [{"path": str(folder / "data.jsonl")}],
            "max_length": 64,
            "cache_dir": str(folder / "cache"),
        },
        "train": {"epochs": 2, "global_batch_size": 4, "micro_batch_size": 2},
    }
    for key, value in settings.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(sections))
    return recipe


class Prepared:
    """A recipe on disk and all that a script has when it looks at the data."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, rows: list[Any], stage: str = "sft", **settings: Any
    ) -> None:
        self.recipe = write_recipe(folder, tokenizer, rows, run__stage=stage, **settings)
        self.cfg: Config = read_config(self.recipe)
        self.tokenizer = tokenizer
        max_length = self.cfg.data.max_length
        assert max_length is not None
        tokenize = stage_rule(stage)(self.cfg.data, tokenizer, max_length)
        compared = benchmarks(self.cfg.data, self.cfg.eval, always=True)
        self.examples, self.validation = loader.load_examples(self.cfg.data, tokenize, benchmarks=compared)
        self.layout = make_layout(self.cfg.data, self.cfg.train, self.examples.lengths, max_length)

    def look(self, **kwargs: Any) -> dict[str, Any]:
        epoch = plan_epoch(self.examples.lengths, self.layout, 0, 0)
        data = {"examples": self.examples, "validation": self.validation, "layout": self.layout, "epoch": epoch}
        return preflight.analyse(self.cfg, self.tokenizer, **data, **kwargs)


# ---- the data --------------------------------------------------------------------------------------------------------


PROBLEM = "Natalia sold clips to forty eight friends in April, and then half as many clips in May. How many altogether?"


def test_held_out_left_out_and_evaluation_questions_are_in_preflight_lines_and_warnings(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "gsm8k_test.jsonl").write_text(json.dumps({"question": PROBLEM, "answer": "#### 72"}) + "\n")
    rows = [*CHATS, *CHATS[:5], chat(PROBLEM.replace("clips in May", "pins in May"), "72")]
    looked: dict[str, Any] = {
        "data__max_length": 128,
        "eval__tasks": ["gsm8k", "piqa"],
        "eval__data": str(tmp_path / "tasks"),
        "data__val_fraction": 0.2,
    }
    counted = Prepared(tmp_path, tokenizer, rows, **looked).look()
    place = f"{tmp_path}/data.jsonl:26"
    assert [one["where"] for one in counted["contamination"]["found"]] == [place]
    assert counted["contamination"]["said"].startswith(
        "compared with questions and answers of gsm8k: found in 1 of 26 documents (gsm8k 1), not left out; not compared "
        "with piqa: "
    )
    assert any("1 training document with a question" in one for one in counted["warnings"])
    (source,) = counted["sources"]
    assert source["documents"] + source["held_out"] == 26
    assert [(one["name"], one["documents"]) for one in counted["validation"]] == [("data", source["held_out"])]
    assert counted["validation_in_train"] == {"data": 0}

    clean = Prepared(tmp_path, tokenizer, rows, data__decontaminate="all", data__dedup="exact", **looked).look()
    (source,) = clean["sources"]
    assert (source["left_out"], source["documents"] + source["held_out"]) == (6, 20)
    assert f", 6 of its documents left out, {source['held_out']} held out for validation" in "".join(
        preflight.lines(clean)
    )
    assert f"{place}: gsm8k 0" in "".join(preflight.lines(clean))
    assert not [one for one in clean["warnings"] if "with a question" in one]
    with pytest.raises(DataError, match="piqa_validation"):
        Prepared(tmp_path, tokenizer, rows, data__decontaminate=["piqa"], **looked)


def test_look_counts_rows_roles_lengths_and_targets(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [*CHATS, chat("Hi", "Hello", system="Be kind."), chat("word " * 100, "late"), {"messages": []}]
    prepared = Prepared(tmp_path, tokenizer, rows, data__on_bad_row="skip")
    found = prepared.look()
    (source,) = found["sources"]
    assert source["rows"] == 23
    assert source["documents"] == 21
    assert (source["truncated"], source["dropped_no_target"], source["skipped_bad"]) == (0, 1, 1)
    assert found["roles"] == {"user": 21, "assistant": 21, "system": 1}  # neither the bad row nor the dropped one
    assert sum(found["lengths"]["counts"]) == 21
    assert len(found["lengths"]["edges"]) == len(found["lengths"]["counts"]) + 1
    assert found["target_pct"] == pytest.approx(100 * source["targets"] / source["tokens"])
    assert 5 < found["target_pct"] < 95
    assert source["tokens"] == prepared.examples.lengths.sum()  # positions, as data/target_pct counts them
    assert source["tokens"] == found["time"]["tokens"] / found["time"]["epochs"]
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    assert found["template_sha256"] == template
    assert found["end_of_turn_pct"] == 100.0
    assert json.loads(json.dumps(found)) == found


def test_answers_cut_by_max_length_lower_the_share_that_learns_to_stop_and_warn(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [*CHATS[:15], *(chat(f"Count {i}", "one two three four " * 40) for i in range(5))]
    found = Prepared(tmp_path, tokenizer, rows).look()
    assert found["end_of_turn_pct"] == pytest.approx(75.0)
    assert any("25.0 % of the conversations are cut" in w and "data.max_length (64)" in w for w in found["warnings"])


def test_texts_have_no_roles_no_template_and_no_end_of_turn(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = Prepared(tmp_path, tokenizer, TEXTS, "base").look()
    assert found["roles"] == {}
    assert found["template_sha256"] is None
    assert found["end_of_turn_pct"] is None
    assert found["target_pct"] > 90


def test_conversations_that_base_training_skips_do_not_count_as_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = Prepared(tmp_path, tokenizer, [*TEXTS, *CHATS], "base", data__on_bad_row="skip")
    found = prepared.look()
    assert found["sources"][0]["findings"][0]["reason"] == "conversation, not text"
    assert found["end_of_turn_pct"] is None
    assert found["target_pct"] == 100.0


def test_copies_and_validation_rows_in_training_are_found_but_repeat_is_no_copy(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*CHATS[:3], chat("New?", "Yes"))))
    sources = [{"path": str(tmp_path / "data.jsonl"), "repeat": 3}]
    val = [{"path": str(tmp_path / "val.jsonl")}]
    once = Prepared(tmp_path, tokenizer, CHATS, data__train=sources, data__val=val).look()
    assert once["duplicate_pct"] == 0.0
    assert once["validation_in_train"] == {"val": 3}
    assert any("validation source val: 3 of its documents" in w for w in once["warnings"])
    twice = Prepared(tmp_path, tokenizer, [*CHATS, *CHATS[:5]], data__train=sources).look()
    assert twice["duplicate_pct"] == pytest.approx(100 * 5 / 25)
    assert any("20.0 % of the training documents are exact copies" in w for w in twice["warnings"])


def test_the_same_caption_of_another_picture_is_no_copy() -> None:
    training = replace(make_examples([4, 4, 4]), encoder_sources=["a.png", "b.png", "a.png"])
    ids = flat(training).ids
    ids[:] = np.tile(ids[:5], 3)
    held_out = replace(training, encoder_sources=["c.png", "a.png", "d.png"])
    found = duplicate_facts(training, {"held_out": held_out}, [SourceConfig(path="a")])
    assert found["duplicate_pct"] == pytest.approx(100 / 3)
    assert found["validation_in_train"] == {"held_out": 1}


def test_rows_that_are_dropped_or_truncated_warn_by_source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    long = [chat(f"Count {i}", "one two three four " * 40) for i in range(20)]
    cut = Prepared(tmp_path, tokenizer, long).look()
    assert any("source data: 20 of 20 rows longer than data.max_length (64)" in w for w in cut["warnings"])
    dropped = Prepared(tmp_path, tokenizer, [*CHATS, *long], data__too_long="drop").look()
    assert any("source data: 20 of 40 rows not used" in w for w in dropped["warnings"])


def test_rows_that_lost_a_document_are_dropped_in_part_and_not_truncated(
    tmp_path: Path,
    make_tokenizer: Callable[..., PreTrainedTokenizerBase],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a template that renders history differently each answer ends a document, and the second is too long."""
    tokenizer = make_tokenizer("qwen3", bos="<s>")
    turns = [turn for answer in ("Yes.", "one two three four " * 40) for turn in chat("Count", answer)["messages"]]
    prepared = Prepared(tmp_path, tokenizer, [{"messages": turns}] * 3, data__too_long="drop")
    found = prepared.look()
    (source,) = found["sources"]
    assert (source["truncated"], source["partly_dropped"], source["dropped_too_long"]) == (0, 3, 0)
    longer = "source data: 3 of 3 rows longer than data.max_length (64)"
    assert f"{longer} and dropped in part. Raise data.max_length, or set data.too_long=truncate" in found["warnings"]
    plain = shown(prepared, 0, capsys)
    assert "% targets, 3 with documents dropped as too long\n" in plain
    assert "truncated" not in plain
    assert ">partly dropped</th>" in page("A", found, [])


def test_rows_are_told_by_reason_with_the_first_of_each(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"messages": [{"role": "tool", "content": "4"}, *CHATS[0]["messages"]]}
    empty = {"messages": [*chat("Hi", "")["messages"], {"role": "assistant", "content": ""}]}
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (CHATS[0], empty)))
    rows = [*CHATS[:3], empty, {"\x1b[31m<b>": 1}, empty, result]
    val = [{"path": str(tmp_path / "val.jsonl")}]
    prepared = Prepared(tmp_path, tokenizer, rows, data__on_bad_row="skip", data__val=val)
    found = prepared.look()
    (source,), (held_out,) = found["sources"], found["validation"]
    told = [(one["kind"], one["rows"], one["reason"]) for one in source["findings"]]
    odd = ("accepted", 1, "tool result without a call")
    assert told == [("skipped", 2, "empty answer"), ("skipped", 1, "unknown columns"), odd, ("read", 4, "messages")]
    assert [one["first"].split(":")[1] for one in source["findings"]] == ["4", "5", "7", "1"]
    assert source["findings"][3]["first"].endswith(":1: user: What comes after 0? | assistant: It is 1.")
    assert [(one["rows"], one["reason"]) for one in held_out["findings"]] == [(1, "empty answer"), (1, "messages")]
    assert any("3 of 7 rows not used. 3 bad (2 empty answer, 1 unknown columns)" in w for w in found["warnings"])
    plain = shown(prepared, 0, capsys)
    assert f"rows      data: 2 bad rows skipped, empty answer; the first: {tmp_path}/data.jsonl:4: messages[1]" in plain
    assert "rows      val: 1 bad row skipped, empty answer; the first: " in plain
    assert "\x1b" not in plain
    html = page("A", found, [])
    assert all(cell in html for cell in (">empty answer</td>", ">tool result without a call</td>", "data.jsonl:7:"))
    assert "31m<b>" not in html


def test_columns_that_nothing_reads_are_shown_as_text_and_on_the_page(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*CHATS, *({**chat, "quality <b>": 3} for chat in CHATS)]
    prepared = Prepared(tmp_path, tokenizer, rows)
    plain = shown(prepared, 0, capsys)
    assert "% targets, 1 of their columns and keys not used" in plain
    first = f"{tmp_path}/data.jsonl:21"
    assert f"rows      data: 20 rows have a column quality <b>, which is not used; the first: {first}" in plain
    html = page("A", prepared.look(), [])
    assert all(cell in html for cell in (">unused</td>", ">column quality &lt;b&gt;</td>", "data.jsonl:21"))


def turns(count: int, number: int) -> dict[str, Any]:
    """A conversation of so many turns, each with reasoning."""
    messages = []
    for i in range(count):
        messages += [
            {"role": "user", "content": f"What comes after {number + i}?"},
            {
                "role": "assistant",
                "content": f"It is {number + i + 1}.",
                "reasoning_content": "one more " * (number % 5),
            },
        ]
    return {"messages": messages}


def test_answers_that_split_turns_would_add_are_warned_of_while_it_is_off(tmp_path: Path, make_tokenizer: Any) -> None:
    tokenizer, rows = make_tokenizer("qwen3"), [turns(1 + i % 4, i) for i in range(40)]
    found = Prepared(tmp_path, tokenizer, rows, data__split_turns=False, data__max_length=512).look()
    left_out = found["sources"][0]["answers"]["not_learned_history"]
    assert left_out > 0
    (warning,) = (text for text in found["warnings"] if "data.split_turns=true learns each" in text)
    assert warning.startswith(f"source data: {left_out:,} of 100 answers context only")
    assert warning.endswith("for more tokens: inspect_data.py with that setting counts them")


def test_split_turns_costs_nothing_where_the_template_only_appends(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"messages": CHATS[0]["messages"] + CHATS[1]["messages"]}]
    found = Prepared(tmp_path, tokenizer, rows, data__split_turns=False).look()
    assert not any("split_turns" in warning for warning in found["warnings"])


def test_the_precision_is_that_of_a_run_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for gpu, told in (
        (False, "fp32 on this machine (bf16 on a GPU, as memory and disk below are counted)"),
        (True, "bf16"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        assert analysis.precision_text(TrainConfig()) == told
        assert analysis.precision_text(TrainConfig(precision="fp32")) == "fp32"
        assert analysis.precision_text(TrainConfig(precision="bf16")) == "bf16"


def test_one_of_something_is_no_plural(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = Prepared(tmp_path, tokenizer, CHATS[:1], train__epochs=1).look()
    lines = "\n".join(preflight.lines(found))
    assert "data: 1 row, 1 document, " in lines
    assert "1 step an epoch" in lines
    assert "time      1 step, 1.00 epochs" in lines


def test_little_target_share_and_padding_warn_with_a_way_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [chat(f"word number {i} and so on and on and on and on", "A") for i in range(40)]
    found = Prepared(tmp_path, tokenizer, rows, data__layout="fixed", data__max_length=256).look()
    own = preflight.own_layout(found)
    assert own["layout"] == "fixed"
    assert own["padding_pct"] > 50
    assert any("data.layout=" in w and "are padding in the fixed layout" in w for w in found["warnings"])
    assert any("are targets" in w for w in preflight.data_warnings({**found, "target_pct": 3.0}))
    healthy = {**found, "layouts": [{**own, "padding_pct": 10.0}]}
    assert preflight.data_warnings(healthy) == []


# ---- what it costs ---------------------------------------------------------------------------------------------------


def lognormal(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(3.0, 0.8, count), 4, 128).astype(np.int64)


def layouts_of(lengths: np.ndarray, own: str) -> dict[str, dict[str, Any]]:
    data, train = DataConfig(train=(), layout=own), TrainConfig(global_batch_size=16, micro_batch_size=4)  # type: ignore[arg-type]
    layout = make_layout(data, train, lengths, 128)
    rows = preflight_costs.layout_facts(data, train, layout, plan_epoch(lengths, layout, 0, 0), lengths)
    return {row["layout"]: row for row in rows}


def test_layouts_have_the_positions_of_their_plans_and_the_own_one_is_marked() -> None:
    lengths = lognormal(500)
    rows = layouts_of(lengths, "bucketed")
    assert [row["own"] for row in rows.values()] == [False, True, False, False]
    for kind, row in rows.items():
        layout = make_layout_of(kind, lengths.tolist(), row_length=128, batch=16, micro=4)
        if kind != "bucketed":  # whose buckets here are those of the helper
            assert row["positions"] == num_positions(plan_epoch(lengths, layout, 0, 0), layout)
            assert row["padding_pct"] == pytest.approx(100 * (1 - lengths.sum() / row["positions"]))


def test_other_layouts_of_large_data_are_planned_on_a_sample_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = lognormal(20_000)
    exact = layouts_of(lengths, "packed")
    monkeypatch.setattr(preflight_costs, "SAMPLE", 5000)
    sampled = layouts_of(lengths, "packed")
    assert sampled["packed"]["positions"] == exact["packed"]["positions"]
    for kind in ("bucketed", "fixed", "dynamic"):
        assert sampled[kind]["positions"] == pytest.approx(exact[kind]["positions"], rel=0.05)
        assert sampled[kind]["positions"] != exact[kind]["positions"]


def test_steps_are_those_of_all_epochs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = Prepared(tmp_path, tokenizer, CHATS).look()
    assert found["time"]["steps"] == 2 * preflight.own_layout(found)["steps"]
    assert found["time"]["epochs"] == 2.0
    assert preflight.lines(found)[-1].startswith(f"time      {found['time']['steps']} steps, 2.00 epochs, ")
    sizes = [preflight.size_text(gib) for gib in (123.4, 1.5, 0.04, 0.0003)]
    assert sizes == ["123.4 GiB", "1.50 GiB", "41 MiB", "0.31 MiB"]


@pytest.mark.parametrize("tied", [False, True])
def test_memory_without_weights_is_that_of_the_loaded_model(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, tied: bool
) -> None:
    own = {"model__scratch": {**SCRATCH, "tie_word_embeddings": tied}, "model__tokenizer": str(tmp_path / "tokenizer")}
    own |= {"train__precision": "fp32", "checkpoint__every": 2, "checkpoint__keep": 2}
    prepared = Prepared(tmp_path, tokenizer, CHATS, **own)
    cfg = prepared.cfg
    shell = analysis.meta_model(cfg.model, tokenizer, "fp32")
    assert shell is not None
    assert {p.device.type for p in shell.parameters()} == {"meta"}
    loaded = load_model(cfg.model, tokenizer, 0, "fp32")
    assert shape_of(shell) == shape_of(loaded)
    plan = analysis.memory_plan(cfg, shell, prepared.layout, 0.5, Topology())
    assert plan is not None
    assert plan.estimate == make_plan(cfg, loaded, prepared.layout, cpu_runtime()).estimate
    found = prepared.look(orig_model=shell, plan=plan)
    assert found["memory"]["fits"] is False
    assert sum(found["memory"]["parts_gib"].values()) == pytest.approx(found["memory"]["estimated_gib"])
    assert any("the GPU has 0.5 GiB" in w for w in found["warnings"])
    parameters = sum(p.numel() for p in loaded.parameters())
    assert found["disk"]["checkpoint_gib"] == pytest.approx(12 * parameters / 2**30)


def test_a_disk_too_small_for_the_checkpoints_warns(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(preflight_costs.shutil, "disk_usage", lambda _: usage(2**30, 2**30 - 1000, 1000))
    prepared = Prepared(tmp_path, tokenizer, CHATS, checkpoint__every=1)
    shell = analysis.meta_model(prepared.cfg.model, tokenizer, "bf16")
    found = prepared.look(
        orig_model=shell, plan=analysis.memory_plan(prepared.cfg, shell, prepared.layout, 80, Topology())
    )
    assert found["disk"]["checkpoints"] == min(3, found["time"]["steps"] + 1)
    assert any("checkpoint.every=null" in w for w in found["warnings"])


def test_a_model_that_is_not_here_leaves_memory_unknown_and_says_why(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared(tmp_path, tokenizer, CHATS)
    missing = read_config(prepared.recipe, ["model.scratch=null", "model.path=./no/model"])
    assert analysis.meta_model(missing.model, tokenizer, "bf16") is None
    assert "./no/model: no such folder" in caplog.text
    assert prepared.look()["memory"] is None


# ---- training --------------------------------------------------------------------------------------------------------


def record(prepared: Prepared, run_dir: Path) -> None:
    rt, cfg = cpu_runtime(), prepared.cfg
    orig_model = analysis.meta_model(cfg.model, prepared.tokenizer, "fp32")
    assert orig_model is not None
    plan = make_plan(cfg, orig_model, prepared.layout, rt)
    batches = loader.Batches(loader.StepDataset(prepared.examples, prepared.layout), seed=0)
    model = orig_model, plan
    preflight.record_preflight(cfg, rt, run_dir, prepared.tokenizer, batches, prepared.validation, *model)


def test_training_writes_preflight_json_and_a_calm_table(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    prepared = Prepared(tmp_path, tokenizer, [*CHATS, chat("Count", "one two three four " * 40)])
    capsys.readouterr()
    record(prepared, tmp_path)
    found = json.loads((tmp_path / "preflight.json").read_text())
    assert found["sources"][0]["documents"] == 21
    assert found["memory"]["estimated_gib"] > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("memory:")]
    assert len(lines) <= 10
    assert any(line.startswith("train") and "% targets, 1 truncated" in line for line in lines)
    assert "4.8 % of the conversations are cut" in caplog.text


@pytest.mark.slow
def test_training_looks_at_100_000_documents_in_two_seconds(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    prepared = Prepared(tmp_path, tokenizer, CHATS, data__max_length=2048, model__scratch={**SCRATCH, "max_position_embeddings": 4096})  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.6, 0.9, 100_000), 4, 2048).astype(int)
    examples = make_examples(lengths.tolist())
    prepared.examples = replace(examples, source_names=("data",))
    prepared.layout = make_layout(prepared.cfg.data, prepared.cfg.train, prepared.examples.lengths, 2048)
    epoch = plan_epoch(prepared.examples.lengths, prepared.layout, 0, 0)
    started = time.process_time()
    preflight.analyse(
        prepared.cfg, tokenizer, examples=prepared.examples, validation={}, layout=prepared.layout, epoch=epoch
    )
    seconds = time.process_time() - started
    print(f"{seconds:.2f} s")
    assert seconds < 2.0


# ---- samples and the page --------------------------------------------------------------------------------------------


def shown(prepared: Prepared, count: int, capsys: pytest.CaptureFixture[str]) -> str:
    inspection.print_preflight(prepared.look(), inspection.previews(prepared.examples, prepared.tokenizer, count))
    return capsys.readouterr().out


def test_masks_are_readable_without_colour_and_coloured_on_a_terminal(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepared = Prepared(tmp_path, tokenizer, [chat("What comes\x1b[31m next?", "It is [2].")] * 2)
    capsys.readouterr()
    plain = shown(prepared, 1, capsys)
    assert "\x1b" not in plain
    assert "[[It is [2].<<|im_end|>>]]" in plain
    assert "<<|im_start|>>user\nWhat comes\\x1b[31m next?<<|im_end|>>" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert plain == shown(prepared, 1, capsys)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    coloured = shown(prepared, 1, capsys)
    assert "\x1b[4;32mIt is [2]." in coloured
    assert "[[It is" not in coloured
    assert "\x1b[31m next" not in coloured


def test_the_table_of_layouts_has_a_line_for_each() -> None:
    row = {"padding_pct": 3.2, "steps": 123_456, "positions": 12_345_678_901}
    rows = [
        {"layout": name, "own": name == "bucketed", "shapes": "64x128, 32x256", **row}
        for name in ("packed", "bucketed", "fixed", "dynamic")
    ]
    lines = inspection.layout_table({"layouts": rows}).splitlines()
    (own,) = [line for line in lines if "bucketed *" in line]
    assert max(map(len, lines)) <= 80
    assert all(text in own for text in ("3.2 %", "123,456", "12,345,678,901", "64x128, 32x256"))


def test_a_preview_says_what_the_encoder_reads(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = replace(make_examples([4, 4]), encoder_sources=["cats/a.png", "b" * 50 + "c" * 50])
    short, long = map(inspection.preview_title, inspection.previews(examples, tokenizer, 2))
    assert short.startswith("test, document 0, of cats/a.png: 4 tokens")
    assert f"of {'b' * 40}...{'c' * 40}: " in long


def test_previews_are_spread_over_the_data_and_hold_each_token_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = Prepared(tmp_path, tokenizer, CHATS)
    samples = inspection.previews(prepared.examples, tokenizer, 3)
    assert [sample.document for sample in samples] == [0, 9, 19]
    assert len(inspection.previews(prepared.examples, tokenizer, 50)) == 20
    assert inspection.previews(prepared.examples, tokenizer, 0) == []
    example = prepared.examples[9]
    assert "".join(text for text, _, _ in samples[1].spans) == tokenizer.decode(example.ids.tolist())
    learned = "".join(text for text, target, _ in samples[1].spans if target)
    assert learned == tokenizer.decode(example.ids[example.is_target].tolist()) == "It is 10.<|im_end|>"


HOSTILE = "</pre><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def test_the_page_shows_all_and_runs_nothing_of_the_data(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [chat(f"{HOSTILE} {i}", HOSTILE) for i in range(3)]
    sources = [{"path": str(tmp_path / "data.jsonl"), "name": "<b>bold</b>"}]
    prepared = Prepared(tmp_path, tokenizer, rows, data__train=sources, data__max_length=256)
    html = page("A <title>", prepared.look(), inspection.previews(prepared.examples, tokenizer, 2))
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>bold" not in html
    assert html.count("http") == html.count("http-equiv")
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    (tmp_path / "page.html").write_text(html)
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options += f" --disable-component-update --disable-sync --user-data-dir={tmp_path}/chromium --dump-dom"
    command = [CHROMIUM, *options.split(), f"file://{tmp_path}/page.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "<title>A &lt;title&gt;</title>" in dom
    assert dom.count('<span class="t">') >= 3
    assert dom.count('<div class="doc">') == 2
    assert "packed (this run)" in dom


# ---- the script ------------------------------------------------------------------------------------------------------


def inspect(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/inspect_data.py", *words])
    runpy.run_path(str(ROOT / "scripts" / "inspect_data.py"))["main"]()


def test_the_script_shows_and_writes_all_of_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    prepared = Prepared(tmp_path, tokenizer, CHATS)
    files = ["--html", f"{tmp_path}/look.html", "--json", f"{tmp_path}/look.json"]
    inspect(monkeypatch, str(prepared.recipe), "--preview", "1", *files, "data.layout=fixed", "--gpu-gib", "24")
    out = capsys.readouterr().out
    for expected in ("20 rows", "fixed *", "of 24.0 GiB", "GiB free", "[[It is 1.<<|im_end|>>]]", "median"):
        assert expected in out
    assert out.count("\n--- ") == 1
    found = json.loads((tmp_path / "look.json").read_text())
    assert preflight.own_layout(found)["layout"] == "fixed"
    assert found["memory"]["gpu_gib"] == 24.0
    assert "Before training: " in (tmp_path / "look.html").read_text()


def test_each_finding_is_shown_once_and_a_sample_has_the_tokens_of_the_summary(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    rows = [CHATS[0], {"messages": []}, chat("Count", "one two three four " * 40)]
    recipe = write_recipe(tmp_path, tokenizer, rows, data__on_bad_row="skip", data__too_long="drop")
    inspect(monkeypatch, str(recipe))
    out = capsys.readouterr().out
    assert out.count("messages is empty") == out.count("1 row dropped, too long; the first: ") == 1
    assert not [message for message in caplog.messages if "the first: " in message]
    (summary,) = re.findall(r"1 document, (\d+) tokens", out)
    assert f"document 0: {summary} tokens, " in out


class Loaded(Exception):
    """The stage's script has read its data."""


def run_until_loaded(monkeypatch: pytest.MonkeyPatch, script: str, recipe: Path) -> Examples:
    """The training documents that a stage's script reads."""
    cfg = read_config(recipe)
    found: list[Examples] = []

    @contextmanager
    def start_run(_: Config, stage: str) -> Iterator[assemble.Run]:
        run_dir = Path(cfg.run.dir)
        run_dir.mkdir()
        yield assemble.Run(cfg, stage, cpu_runtime(), run_dir, assemble.NO_CHECKPOINT)

    def build_engine(_: Any, __: Any, ___: Any, data: assemble.Data) -> None:
        found.append(data.batches.examples)
        raise Loaded

    monkeypatch.setattr(assemble, "start_run", start_run)
    monkeypatch.setattr(assemble, "build_engine", build_engine)
    monkeypatch.setattr(sys, "argv", [f"scripts/{script}", str(recipe)])
    with pytest.raises(Loaded):
        runpy.run_path(str(ROOT / "scripts" / script))["main"]()
    return found[0]


def checkpoint_of(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model of an earlier run, whose documents had 48 positions."""
    (folder / "first").mkdir()
    cfg = Prepared(folder / "first", tokenizer, CHATS).cfg
    load_model(cfg.model, tokenizer, 0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / TRAINING_STATE).parent.mkdir()
    (folder / "model" / TRAINING_STATE).write_text(json.dumps({"max_length": 48}))
    return folder / "model"


@pytest.mark.parametrize("inherited", [False, True], ids=["max_length set", "max_length inherited"])
@pytest.mark.parametrize("stage", ["base", "mid", "sft"])
def test_a_stage_finds_in_the_cache_what_inspect_has_tokenized(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any, stage: str, inherited: bool
) -> None:  # fmt: skip
    rows = {"base": TEXTS, "mid": [*TEXTS, *CHATS], "sft": CHATS}[stage]
    own: dict[str, Any] = {"data__val": [{"path": str(tmp_path / "val.jsonl")}]}
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    if inherited:
        own |= {"model__path": str(checkpoint_of(tmp_path, tokenizer)), "data__max_length": None}
    recipe = write_recipe(tmp_path, tokenizer, rows, run__stage=stage, **own)
    recipe = recipe.rename(tmp_path / "base_or_midsize.yaml")  # its name says nothing
    look = tmp_path / "look.json"
    inspect(monkeypatch, str(recipe), "--json", str(look))
    folders = sorted((tmp_path / "cache").iterdir())
    assert len(folders) == 2  # training and validation
    examples = run_until_loaded(monkeypatch, STAGE_SCRIPTS[stage], recipe)
    assert sorted((tmp_path / "cache").iterdir()) == folders
    found = json.loads(look.read_text())
    assert found["sources"][0]["targets"] == examples.num_targets.sum()
    assert found["max_length"] == (48 if inherited else 64)
    assert (
        f"stage     {stage}, run.stage of the recipe: shown is what scripts/{STAGE_SCRIPTS[stage]} learns"
        in capsys.readouterr().out
    )


def test_a_base_run_finds_the_tokens_of_the_tokenizer_that_it_trains(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"model__tokenizer": None, "model__train_tokenizer": {"vocab_size": 300}, "run__stage": "base"}
    recipe = write_recipe(tmp_path, tokenizer, TEXTS, **own)
    inspect(monkeypatch, str(recipe))
    run_until_loaded(monkeypatch, "base_train.py", recipe)
    assert len(list((tmp_path / "cache" / "stores").iterdir())) == 1


@pytest.mark.parametrize("name", ["base.yaml", "midsize.yaml"])
def test_a_recipe_without_a_stage_is_not_guessed_by_its_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    recipe = write_recipe(tmp_path, tokenizer, CHATS, run__stage=None).rename(tmp_path / name)
    with pytest.raises(SystemExit) as refused:
        inspect(monkeypatch, str(recipe))
    assert refused.value.code == 2
    assert re.search(
        r"run\.stage: not set, .*Write stage: sft under run: .*or give --stage sft", capsys.readouterr().err
    )
    inspect(monkeypatch, str(recipe), "--stage", "sft", "--preview", "0", "--gpu", "h100")
    out = capsys.readouterr().out
    assert "stage     sft, as asked" in out
    assert re.search(
        r"^hours     at least .* on one H100 \(models of fewer than 300 million .*\), an estimate", out, re.M
    )
    assert "of 79.2 GiB" in out
    assert re.search(r"^time      .* tokens, \d+ of them targets$", out, re.M)


def test_the_stage_asked_for_is_shown_whatever_the_recipe_is_called(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    recipe = write_recipe(tmp_path, tokenizer, CHATS)
    inspect(monkeypatch, str(recipe), "--stage", "mid", "--preview", "1", "--html", str(tmp_path / "look.html"))
    out = capsys.readouterr().out
    assert (
        "stage     mid, as asked: shown is what scripts/mid_train.py learns; --stage base or sft or caption for another"
        in out
    )
    assert "100.0 % targets" in out
    assert "<<|im_start|>>[[user\nWhat comes" in out  # every token but the first
    assert f"Before training: {recipe}, mid</h1>" in (tmp_path / "look.html").read_text()
    with pytest.raises(SystemExit):
        inspect(monkeypatch, str(recipe), "--stage", "base")
    assert "a conversation, but this script learns from plain text" in capsys.readouterr().err


def test_texts_in_an_sft_recipe_are_refused_as_the_run_refuses_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    recipe = write_recipe(tmp_path, tokenizer, TEXTS)
    with pytest.raises(SystemExit):
        inspect(monkeypatch, str(recipe))
    assert re.search(r"data\.jsonl:1: a text without turns.*base_train\.py and mid_train\.py", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "chat"], "invalid choice: 'chat' (choose from"),
        (["--preview", "-3"], "-3: how many documents? Take 0 or more"),
        (["--html", "/no/such/page.html"], "there is no folder /no/such"),
        (["--json", "/tmp"], "/tmp is a folder"),
        (["--gpu-gib", "0"], "0: GiB of a GPU, more than 0"),
        (["--previw"], "--previw: no such option. Did you mean --preview?"),
        (["--gpu-gb", "24"], "--gpu-gb: no such option. Did you mean --gpu-gib?"),
        (["--num_processes", "4"], "--num_processes needs --config_file"),
        (["--config_file", "nothing.yaml"], "nothing.yaml: no accelerate config that can be read"),
        (
            ["--config_file", f"{ROOT}/accelerate_configs/ddp.yaml", "--num_processes", "3"],
            "4 cannot be shared equally by 3",
        ),
        # What training refuses of a launch is refused here in the same words.
        ([*DDP_LAUNCH, "train.engine=graph"], "train.engine=graph shards weights over its 2 processes, and ddp keeps"),
        (
            [*PIPELINE_LAUNCH, "train.engine=graph"],
            "train.engine=graph shards weights over its 2 processes, and ddp keeps",
        ),
        (
            [*PIPELINE_LAUNCH, "train.micro_batch_size=1", "train.pipeline_layers=[2,2]"],
            "train.pipeline_layers=[2, 2]: must be 2 numbers that add up to the 2 layers of the model",
        ),
        (
            [*PIPELINE_LAUNCH, "train.micro_batch_size=4"],
            "4 makes 1 micro-batch of a step, and a pipeline of 2 stages with train.pipeline_schedule 1f1b needs 2 or more",
        ),
    ],
)
def test_wrong_options_end_with_what_to_write_instead(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], message: str
) -> None:  # fmt: skip
    recipe = Prepared(tmp_path, tokenizer, CHATS).recipe
    with pytest.raises(SystemExit) as end:
        inspect(monkeypatch, str(recipe), *words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_rows_that_the_ranks_of_a_launch_cannot_share_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, tokenizer, CHATS, data__row_length=66)
    launch = ["--config_file", f"{ROOT}/accelerate_configs/cp.yaml", "--num_processes", "2"]
    with pytest.raises(ConfigError, match=r"data\.row_length: rows of 66 positions do not split into 4 chunks"):
        inspect(monkeypatch, str(recipe), *launch)
    inspect(monkeypatch, str(recipe), *launch, "data.row_length=68")


def test_what_a_launch_takes_on_paper_is_shown_where_the_size_of_a_gpu_is_known(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    scratch = {**SCRATCH, "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    recipe = write_recipe(
        tmp_path, tokenizer, CHATS, model__scratch=scratch, model__tokenizer=str(tmp_path / "tokenizer")
    )

    def shown(*words: str) -> str:
        inspect(monkeypatch, str(recipe), "--preview", "0", *words)
        return " ".join(capsys.readouterr().out.split())

    launch = ("--config_file", f"{ROOT}/accelerate_configs/fsdp2.yaml", "--num_processes", "2")
    assert "on paper: fsdp2.yaml takes 1 of 24 GiB on each GPU" in shown("--gpu-gib", "24", *launch)
    pipeline = shown("--gpu-gib", "24", *PIPELINE_LAUNCH, "train.micro_batch_size=1")
    assert "on paper: pp.yaml takes 1 of 24 GiB on each GPU" in pipeline
    assert "on paper" not in shown("--gpu-gib", "24")  # one process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "on paper" not in shown(*launch)


def test_a_missing_recipe_and_empty_data_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as end:
        inspect(monkeypatch, "nothing.yaml")
    assert end.value.code == 2
    assert "nothing.yaml: no such file" in capsys.readouterr().err
    prepared = Prepared(tmp_path, tokenizer, CHATS)
    (tmp_path / "data.jsonl").write_text("")
    with pytest.raises(SystemExit) as end:
        inspect(monkeypatch, str(prepared.recipe))
    assert end.value.code == 2
    assert "data.jsonl (split train): empty, it has no rows" in capsys.readouterr().err


def test_help_names_the_options(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        inspect(monkeypatch, "--help")
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(
        option in out
        for option in ("--preview N", "--html FILE", "--json FILE", "--gpu-gib GIB", "--stage", "data.layout")
    )


@pytest.mark.slow
def test_all_of_it_takes_under_ten_seconds_for_10_000_conversations(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    sources = [{"path": "builtin:tasks", "max_rows": 10_000}]
    prepared = Prepared(tmp_path, tokenizer, CHATS, data__train=sources, data__max_length=256)
    assert len(prepared.examples) == 10_000
    started = time.perf_counter()
    shell = analysis.meta_model(prepared.cfg.model, tokenizer, "bf16")
    found = prepared.look(
        orig_model=shell, plan=analysis.memory_plan(prepared.cfg, shell, prepared.layout, 80, Topology())
    )
    samples = inspection.previews(prepared.examples, tokenizer, 10)
    inspection.print_preflight(found, samples)
    page("all", found, samples)
    seconds = time.perf_counter() - started
    print(f"{seconds:.2f} s")
    assert seconds < 10.0


@pytest.mark.parametrize(("trees", "told"), [(None, True), ({"factor": 1.1}, True), ({"factor": 3.0}, False)])
def test_the_cost_of_separate_answers_is_a_warning_unless_rows_of_trees_share_it(trees: Any, told: bool) -> None:
    answers = Counter({"answers": 20, "answers_learned": 20, SPLIT_TOKENS: 90})
    source = {"name": "chats", "rows": 10, "tokens": 100, "answers": answers, "trees": trees}
    assert any("data.split_turns=false saves them" in text for text in answer_warnings(source)) == told
