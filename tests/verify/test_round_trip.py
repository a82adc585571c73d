"""The first checkpoint of a run is opened by plain transformers: what is lost or otherwise in its files shows."""

from __future__ import annotations

import json
import re
import sys
from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, tiny_llama
from made_adapters import move_b, write_adapter
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from sftkit.config.schema import AdapterConfig, ModelConfig
from sftkit.models.load import load_model
from sftkit.models.tokenizer import load_tokenizer, train_tokenizer
from sftkit.rundir.names import step_dir
from sftkit.tracking.names import Check
from sftkit.verify import round_trip
from sftkit.verify.round_trip import NAME, RoundTrip

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model with its tokenizer."""
    tokenizer = train_tokenizer(["a few words about words"], 300, TEMPLATE)
    folder = tmp_path / "base"
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Live:
    """A run's model and tokenizer, and its first checkpoint."""

    def __init__(self, base: Path, run_dir: Path, precision: str = "fp32", **more: Any) -> None:
        source = ModelConfig(path=str(base), **{k: more.pop(k) for k in [*more] if k.startswith("pad_")})
        self.run_dir, self.folder = run_dir, step_dir(run_dir, 1)
        self.tokenizer = load_tokenizer(source)
        self.model: PreTrainedModel = load_model(source, self.tokenizer, 0, precision, **more)
        self.model.generation_config.pad_token_id = self.tokenizer.pad_token_id
        self.trip = RoundTrip(self.model, self.tokenizer, cpu_runtime(), trusted=False)

    def write(self) -> None:
        if hasattr(self.model, "sftkit_adapters"):
            write_adapter(self.model, self.folder)
            self.model.generation_config.save_pretrained(self.folder)
        else:
            rows = {
                name: p[: len(self.tokenizer)] if p.shape[0] > 350 else p for name, p in self.model.state_dict().items()
            }
            self.model.save_pretrained(self.folder, state_dict=rows)
        self.tokenizer.save_pretrained(self.folder)

    def opened(self, failure: str | None = None) -> Check:
        self.trip.ended_save(1, failure, self.run_dir)
        (check,) = self.trip.checks()
        assert check.name == NAME
        return check


class Float8Linear(torch.nn.Linear):
    """Rounds its input as float8 does, which no file of a checkpoint tells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.float8_e4m3fn).to(x.dtype))


def test_a_checkpoint_of_a_model_in_float8_is_compared_without_its_rounding(base: Path, tmp_path: Path) -> None:
    live = Live(base, tmp_path)
    for block in live.model.model.layers:
        block.mlp.down_proj.__class__ = Float8Linear
    live.write()
    live.trip.expect(1)
    assert "logits differ by 0.0e+00" in live.opened().found
    assert round_trip.verify_checkpoint(live.folder, round_trip.logits_of(live.model)).ok


def test_a_checkpoint_that_gives_the_answer_of_the_live_model_passes_and_is_opened_once(
    base: Path, tmp_path: Path
) -> None:
    live = Live(base, tmp_path)
    live.write()
    before = torch.get_rng_state()
    live.trip.expect(1)
    live.trip.expect(2)
    check = live.opened()
    assert check.ok, check.found
    assert check.found.startswith("step 1: 8 of 8 greedy tokens are the same, logits differ by 0.0e+00")
    assert check.how.startswith("AutoModelForCausalLM.from_pretrained: a prompt in the chat template")
    assert torch.equal(torch.get_rng_state(), before), "training continues with the numbers that it would have drawn"
    live.trip.ended_save(2, None, tmp_path)
    assert live.trip.checks(0.0) == []


def weights_changed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensor_lost(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(name: str, **fields: Any) -> Any:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (weights_changed, r"logits differ by \d\.\de-0[1-4]; \d"),
        (tensor_lost, "missing_keys: model.norm.weight"),
        (edit("config.json", tie_word_embeddings=True), "tie_word_embeddings: True instead of False"),
        (edit("config.json", dtype="bfloat16"), "dtype: bfloat16 instead of float32"),
        (edit("config.json", rms_norm_eps=0.5), "logits differ by"),
        (edit("generation_config.json", eos_token_id=[7]), r"generation config: .*\[7\]"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
            "tokens of a prompt: ",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "transformers does not load it: "),
    ],
)
def test_each_file_that_is_otherwise_than_the_run_fails_the_check(
    damage: Any, problem: str, base: Path, tmp_path: Path
) -> None:
    live = Live(base, tmp_path)
    live.write()
    live.trip.expect(1)
    damage(live.folder)
    check = live.opened()
    assert check.ok is False
    assert re.search(problem, check.found), check.found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_padding_of_the_vocabulary_and_half_precision_are_no_difference(
    precision: str, base: Path, tmp_path: Path
) -> None:
    live = Live(base, tmp_path, precision, pad_vocab_to_multiple_of=512)
    live.write()
    live.trip.expect(1)
    assert live.opened().ok


def test_a_difference_that_rounding_explains_is_none_in_half_precision_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = round_trip.limits
    monkeypatch.setattr(round_trip, "limits", lambda *a, **k: real(*a, **k)._replace(logits=1e-9))
    real_logits = round_trip.row_logits
    for precision in ("bf16", "fp32"):
        live = Live(base, tmp_path / precision, precision)
        live.write()
        live.trip.expect(1)
        with monkeypatch.context() as patch:
            patch.setattr(round_trip, "row_logits", lambda *a: real_logits(*a) * (1 + 1e-4))
            check = live.opened()
        assert check.ok is (precision == "bf16"), check


@pytest.mark.parametrize("reader", ["peft", "sftkit", "nf4"])
def test_an_adapter_is_opened_by_peft_if_it_is_there_and_can(
    reader: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reader != "peft":
        monkeypatch.setattr(round_trip, "find_spec", lambda _: None)
    adapter = AdapterConfig(rank=4, base="nf4" if reader == "nf4" else "bf16")
    live = Live(base, tmp_path, adapter=adapter)
    move_b(live.model)
    live.write()
    live.trip.expect(1)
    check = live.opened()
    assert check.ok, check.found
    assert check.how.startswith("AutoPeftModelForCausalLM" if reader == "peft" else "AutoModelForCausalLM")
    assert ("computed by sftkit" in check.how) is (reader != "peft")


def test_an_adapter_that_lost_its_factors_fails(base: Path, tmp_path: Path) -> None:
    live = Live(base, tmp_path, adapter=AdapterConfig(rank=4))
    move_b(live.model)
    live.write()
    live.trip.expect(1)
    path = live.folder / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(p) for name, p in load_file(path).items()}, path, metadata={"format": "pt"})
    assert live.opened().ok is False


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_under_other_names_fails_even_before_its_first_update(base: Path, tmp_path: Path) -> None:
    """B is zero then, so the logits say nothing, and peft only warns."""
    live = Live(base, tmp_path, adapter=AdapterConfig(rank=4))
    live.write()
    live.trip.expect(1)
    path = live.folder / "adapter_model.safetensors"
    renamed = {name.replace("self_attn", "attn"): p for name, p in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    check = live.opened()
    assert check.ok is False
    assert "unexpected: base_model.model.model.layers.0.attn.k_proj.lora_A.weight" in check.found


def test_a_checkpoint_that_is_not_opened_says_why(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(base, tmp_path)
    live.trip.expect(1)
    check = live.opened("no space left")
    assert (check.ok, check.found) == (None, "step 1: the first save failed")
    live = Live(base, tmp_path)
    live.trip.expect(1)
    monkeypatch.setattr(round_trip.psutil, "virtual_memory", lambda: namedtuple("Memory", "available")(1000))
    check = live.opened()
    assert check.ok is None
    assert "GiB of host memory, and 0.0 are free" in check.found


def test_files_besides_the_weights_are_compared_before_the_first_step(base: Path, tmp_path: Path) -> None:
    live = Live(base, tmp_path)
    live.write()
    (live.folder / "model.safetensors").unlink()
    check = live.trip.files_check(lambda _: live.folder)
    assert check.ok, check.found
    edit("config.json", tie_word_embeddings=True)(live.folder)
    assert "tied weights" in live.trip.files_check(lambda _: live.folder).found
    (live.folder / "tokenizer.json").unlink()
    check = live.trip.files_check(lambda _: live.folder)
    assert check.ok is False


def large(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trip, "SMALL", 0)
    live.write()
    live.trip.expect(1)


def test_large_weights_are_opened_by_a_process_that_gets_what_is_expected_in_a_file(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = Live(base, tmp_path)
    large(live, monkeypatch)
    started: list[Any] = []

    class Process:
        def __init__(self, words: list[str], *, env: dict[str, str], stdout: Any, **options: Any) -> None:
            started.append(env)
            monkeypatch.setattr(sys, "argv", words[2:])
            monkeypatch.setattr(round_trip.os, "nice", lambda _: None)
            round_trip.main()
            stdout.write(capsys.readouterr().out.encode())

        def poll(self) -> int | None:
            return 0

        def wait(self, seconds: float | None = None) -> int:
            return 0

        kill = poll

    monkeypatch.setattr(round_trip.subprocess, "Popen", Process)
    monkeypatch.setenv("RANK", "0")
    with closing(live.trip):
        check = live.opened()
    assert check.ok, check.found
    assert "in a process of its own on the host" in check.found
    assert "RANK" not in started[0]
    assert started[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_process_that_ends_late_or_badly_is_no_passed_check(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program, ok, words in (
        ("import time; time.sleep(60)", None, "its process was ended"),
        ("raise OSError('no such file')", False, "transformers does not load it: OSError: no such file"),
    ):
        live = Live(base, tmp_path / str(ok))
        large(live, monkeypatch)
        real = round_trip.subprocess.Popen
        with monkeypatch.context() as patch, closing(live.trip):
            patch.setattr(
                round_trip.subprocess, "Popen", lambda _, p=program, r=real, **o: r([sys.executable, "-c", p], **o)
            )
            live.trip.ended_save(1, None, live.run_dir)
            (check,) = live.trip.checks(0.0 if ok is None else 60.0)
        assert check.ok is ok
        assert words in check.found


@pytest.mark.slow
def test_a_process_of_its_own_opens_an_adapter(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(base, tmp_path, adapter=AdapterConfig(rank=4))
    move_b(live.model)
    large(live, monkeypatch)
    with closing(live.trip):
        live.trip.ended_save(1, None, tmp_path)
        (check,) = live.trip.checks(200.0)
    assert check.ok, check.found
    assert "in a process of its own" in check.found
