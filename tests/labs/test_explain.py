"""`sftkit explain`: what breaks graphs, which module is to blame, and a script that shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from helpers import ROOT, cpu_runtime
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from labs.explain.bisect import (
    NEEDS_SFTKIT,
    QUESTIONS,
    BisectAnswer,
    NotWritable,
    bisect,
    difference,
    reproduce,
    script_of,
    written,
)
from labs.explain.bisect import called_modules as captured_parts
from labs.explain.breaks import (
    GRAPH_BREAK_CASES,
    LossByName,
    LossByTensor,
    LossByValue,
    breaks_of,
    listening,
    read_message,
    recompile_of,
)
from labs.explain.experiments import captured_graphs, chosen_losses, dispatch_trace, what_breaks
from labs.explain.kernels import module_step
from labs.explain.run import _bisect_result, _finish, lines_of, parse, run_explain, wrapped
from labs.explain.subject import ModuleCall, Subject, of_file, of_recipe
from sftkit.config.load import read_config
from sftkit.errors import ConfigError
from sftkit.ops import attention

FAULTS = Path(__file__).parents[1] / "support" / "planted_faults.py"
CPU = torch.device("cpu")
ASKED = {question.name: question for question in QUESTIONS}


@pytest.fixture(autouse=True)
def _dynamo_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")  # which `run` sets for good
    yield
    torch._dynamo.reset()


def planted(name: str) -> Subject:
    return of_file(f"{FAULTS}:{name}", CPU)


def line_of(file: str, text: str) -> int:
    return next(number for number, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line)


# ---- breaks ----------------------------------------------------------------------------------------------------------


def test_a_message_of_dynamo_is_taken_apart() -> None:
    found = read_message(
        "Graph break in user code at /m.py:7\nGraph Break Reason: Failed to handle graph break gracefully. Skipping the "
        "function and falling back to eager. Graph break encountered:\n\nUnsupported context manager\n  Explanation: Dynamo "
        "does not know\n    this one.\n  Hint: Avoid it.\n  Hint: File an issue to PyTorch.\n\n  Developer debug context: x\n\n"
        "User code traceback:\n  File '/n.py', line 1\n"
    )
    assert (found.file, found.line, found.kind) == ("/m.py", 7, "Unsupported context manager")
    assert (found.explanation, found.hints, found.given_up) == ("Dynamo does not know this one.", ("Avoid it.",), True)
    again = read_message(
        "Graph break (user stack suppressed due to duplicate graph break) in user code at /m.py:7\nX\n"
    )
    assert (again.location, again.kind) == (("/m.py", 7), "X")
    error = read_message(
        'X\n\nfrom user code:\n   File "/a.py", line 1, in f\n    y\n  File "/b.py", line 2, in g\n    z\n'
    )
    assert error.location == ("/b.py", 2)
    said = recompile_of(
        "Recompiling function forward in /m.py:3\n    triggered by the following guard failure(s):\n"
        '    - 0/0: self.n == 1  # self.n += 1  # m.py:4 in forward\n    - User stack trace:\n    -   File "/m.py", line 4\n'
    )
    assert said == "forward (/m.py:3): self.n == 1"


def test_a_loss_function_chosen_in_forward_breaks_the_graph_where_a_tensor_chooses() -> None:
    x, near, far = torch.zeros(8, 16), torch.zeros(8, 4), torch.full((8, 4), 9.0)
    found = breaks_of(Subject("loss", LossByValue(), ModuleCall((x, near)), ModuleCall((x, far)), None, ""))
    (row,) = found["rows"]
    assert row["line"] == line_of(row["file"], "loss = F.l1_loss if (out - target)")
    assert row["code"].startswith("loss = F.l1_loss if (out - target)")
    assert row["reason"] == "Data-dependent branching"
    assert "torch.where" in row["remedy"]
    assert row["dynamo_says"]
    assert row["seen_by"] == ["explain", "fullgraph", "TORCH_LOGS"]
    by_name, by_tensor = (
        breaks_of(Subject("loss", model, ModuleCall((x, near)), ModuleCall((x, far)), None, ""))
        for model in (LossByName(), LossByTensor())
    )
    assert by_name["rows"] == by_tensor["rows"] == []
    assert "one graph" in by_tensor["instruments"][1]["said"]


def test_the_ways_to_choose_a_loss_are_counted() -> None:
    rows = {row["name"]: (row["graphs"], row["breaks"], row["recompiles"]) for row in chosen_losses()}
    assert rows["both, and torch.where"] == (1, 0, 0)
    assert rows["by an attribute"] == (2, 0, 1)
    assert rows["by a value computed there"][1] == 1


class TwoBreaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        print("", end="")
        with open("/dev/null") as file:
            file.readable()
        return y * x.max().item()


def test_each_instrument_sees_what_another_leaves_out() -> None:
    x = torch.linspace(0, 1, 6)
    found = breaks_of(Subject("two", TwoBreaks(), ModuleCall((x,)), ModuleCall((x,)), None, ""))
    seen = {row["code"]: row["seen_by"] for row in found["rows"]}
    assert seen['print("", end="")'] == ["explain", "fullgraph", "TORCH_LOGS"]
    assert seen['with open("/dev/null") as file:'] == ["TORCH_LOGS"]
    assert any(row["given_up"] for row in found["rows"])
    torch._dynamo.reset()
    with listening() as heard:
        torch.compile(TwoBreaks(), backend="eager")(x)
    logged = [one.line for one in heard.breaks()]
    assert len(logged) > 1
    assert logged == sorted(logged)  # as they happen


def test_what_is_said_to_break_graphs_does_and_its_remedy_does_not() -> None:
    for case, row in zip(GRAPH_BREAK_CASES, what_breaks(), strict=True):
        assert (row["broken"] > 0, row["mended"]) == (True, 0), row
        assert any(reason.startswith(case.kinds) for reason in row["reasons"]), row
        x = torch.linspace(-1, 2, 32).reshape(4, 8)
        torch.testing.assert_close(case.breaking(x), case.fixed(x))


def test_the_dispatcher_of_a_linear_layer_calls_addmm() -> None:
    calls = dispatch_trace(CPU)
    assert [(call["name"], call["depth"]) for call in calls[:1]] == [("aten::linear", 0)]
    assert {"aten::t", "aten::addmm"} <= {call["name"] for call in calls if call["depth"] == 1}
    (product,) = [call for call in calls if call["name"] == "aten::addmm"]
    assert "AutogradCPU" in product["keys"]
    assert "CompositeImplicitAutograd" in calls[0]["keys"]


def test_recompiles_of_later_calls_are_counted() -> None:
    grown = captured_graphs(lambda x: x * 2, lambda: (torch.ones(4),), lambda: (torch.ones(5),))
    assert (grown["graphs"], grown["breaks"], grown["recompiles"]) == (2, 0, 1)


# ---- bisection -------------------------------------------------------------------------------------------------------


def bisected(name: str) -> BisectAnswer:
    return bisect(planted(name), ASKED[name], "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ASKED))
def test_the_smallest_module_at_fault_is_found_and_confirmed(name: str) -> None:
    finding = bisected(name)
    assert [part.path for part in finding.guilty] == ["blocks.1"]
    assert finding.confirmed is True
    asked = dict(finding.steps)
    assert asked["the whole (Net)"]
    assert asked["blocks.0 (Gated)"] is asked["blocks.1.up (Linear)"] is None
    assert finding.guilty[0].where == f"{FAULTS}:{line_of(str(FAULTS), 'def forward')}"


def test_a_module_without_a_fault_is_guilty_of_nothing() -> None:
    assert bisect(planted("none"), ASKED["differs"], "eager").guilty == ()


def test_a_module_that_was_not_asked_is_named_as_one_that_looks_alike() -> None:
    parts = captured_parts(planted("breaks"))
    finding = BisectAnswer(
        "breaks", (parts["blocks.1"], parts["blocks.0"]), "said", (("blocks.1 (Gated)", "said"),), True
    )
    found = _bisect_result(finding, None)
    assert (found["others"], found["alike"]) == ([], ["blocks.0 (Gated)"])
    row = {"question": "breaks", "title": "breaks the graph", "backend": "eager", **found}
    said = "\n".join(lines_of({"name": "x", "device": "CPU", "torch": "2", "bisect": [row]}))
    assert "not asked, as they look like it: blocks.0 (Gated)" in said


def test_the_script_of_a_fault_is_printed_below_what_was_found_and_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = f"import torch\n\nargs = ({'None, ' * 20})\n    # indented\n"
    found = BisectAnswer("breaks", (captured_parts(planted("breaks"))["blocks.1"],), "said", (), True)
    script = {"script": "out/breaks.py", "text": text, "shows": True, "printed": "said"}
    row = {"question": "breaks", "title": "breaks the graph", "backend": "eager", **_bisect_result(found, script)}
    unwritten = row | {"script": None, "text": None, "printed": "no script: it takes an object"}
    assert _finish({"name": "x", "device": "CPU", "torch": "2", "bisect": [row, unwritten]}, tmp_path) == 1
    said = capsys.readouterr().out
    assert said.endswith(f"# ---- out/breaks.py\n{text}\npage: {tmp_path / 'explain.html'}\n")
    assert said.count("# ----") == 1


def test_what_is_not_looked_at_is_said_and_numbers_agree_with_their_nouns() -> None:
    counts = {"dispatches": 9, "views": 2, "launches": 3, "graphs": 1, "breaks": 2}
    profile = {"seconds": 0.001, "shares": {}}
    graph = {"id": "0/0", "pass": "forward", "function": "f", "aten_ops": 1, "kernels": ["k"]}
    kernels = {"counts": counts, "busy": False, "profiles": {"eager": profile, "compiled": profile}, "graphs": [graph]}
    result = {"name": "x", "device": "CPU", "torch": "2", "beside": "the decoder alone", "kernels": kernels}
    said = list(lines_of(result))
    assert said[1] == "the decoder alone"
    assert "3 launches compiled; 1 graph, 2 breaks" in said[2]
    assert said[-1] == "  graph 0/0 forward: f, 1 ATen operator, 1 kernel"


def test_long_lines_are_wrapped_between_words() -> None:
    path = "runs/explain/" + "a-long-name-" * 8
    assert list(wrapped("  which  short", 80)) == ["  which  short"]
    assert list(wrapped("", 80)) == [""]
    found = list(wrapped(f"    why     {'some words ' * 20}python {path}", 80))
    assert [line for line in found if len(line) > 80] == [f"        {path}"]
    assert found[0].startswith("    why     some words")
    assert all(line.startswith(" " * 8) for line in found[1:])


def test_a_fault_in_the_last_of_modules_that_look_alike_is_found() -> None:
    subject = planted("breaks")
    subject.module.blocks[0].fault = None  # looks as blocks.1 does, and is asked first
    assert repr(subject.module.blocks[0]) == repr(subject.module.blocks[1])
    assert [part.path for part in bisect(subject, ASKED["breaks"], "eager").guilty] == ["blocks.1"]


def test_a_fault_of_the_whole_is_in_the_whole() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * x.sum().item()

    call = ModuleCall((torch.ones(2, 3),))
    finding = bisect(Subject("sum", Sum(), call, call, None, ""), ASKED["breaks"], "eager")
    assert [part.path for part in finding.guilty] == [""]
    assert finding.confirmed is None


def test_rounding_is_no_difference_and_one_percent_and_nan_are() -> None:
    layer, call = nn.Linear(4, 4), ModuleCall((torch.randn(3, 4),))
    assert difference(layer, call, layer).relative == 0.0
    assert not difference(layer, call, lambda x: layer(x) * (1 + 1e-6)).beyond
    assert difference(layer, call, lambda x: layer(x) * 1.01).beyond
    assert difference(layer, call, lambda x: layer(x) * float("nan")).beyond
    assert difference(layer, call, lambda x: layer(x.detach())).name == "gradient of input 0"  # one that is not there
    assert difference(layer, call, lambda x: layer(x.detach())).beyond
    assert not difference(Silent(), call, Silent()).beyond
    layer = layer.bfloat16()
    call = ModuleCall((torch.randn(3, 4).bfloat16(),))
    assert not difference(layer, call, lambda x: layer(x) * 1.01).beyond


class Silent(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


def test_a_script_of_a_difference_sees_nan_and_a_gradient_that_is_not_there() -> None:
    text = script_of(planted("none"), *alone("none", "differs"))
    scope: dict[str, Any] = {"torch": torch}
    exec(text[text.index("from collections.abc") : text.index("torch._inductor.config.fallback")], scope)
    one, lost = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    relative = scope["relative_difference"]
    assert relative(one, one) == relative(lost, lost) == 0.0
    assert relative(torch.zeros(3), one) == 1.0
    assert relative(one, torch.zeros(())) == relative(one, lost) == float("inf")


def test_arguments_are_written_so_that_python_makes_them_again() -> None:
    values = {
        "a": [None, True, 2, -0.5, float("inf"), "x'y", torch.bfloat16, torch.device("cpu")],
        "b": (torch.arange(12).reshape(3, 4), torch.tensor([True, False]), torch.tensor(1.5)),
    }
    scope = {"torch": torch, "inf": float("inf")}
    head = script_of(planted("none"), *alone("none"))
    exec(head[head.index("import base64") : head.index("torch.manual_seed")], scope)
    again = eval(written(values), scope)
    assert again["a"] == values["a"]
    assert all(torch.equal(one, two) for one, two in zip(again["b"], values["b"], strict=True))
    drawn = eval(written(torch.randn(400, 50)), scope)
    assert (drawn.shape, drawn.dtype) == ((400, 50), torch.float32)
    with pytest.raises(NotWritable, match="object"):
        written(object())


def alone(name: str, question: str = "breaks") -> tuple:
    """What script_of takes of a module without a fault."""
    from labs.explain.bisect import called_modules as inputs

    part = inputs(planted(name))["blocks.1"]
    return part, BisectAnswer(question, (part,), "", (), None), question, "eager"


@pytest.mark.slow
def test_the_script_shows_the_fault_to_plain_python(tmp_path: Path) -> None:
    """In a folder of its own, from which nothing of the run is seen."""
    made = reproduce(planted("breaks"), bisected("breaks"), "breaks the graph", "eager", tmp_path / "breaks.py")
    assert made["shows"], made["printed"]
    assert made["printed"] == "Data-dependent branching"
    assert str(FAULTS.parent) not in made["text"].partition("import torch")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ASKED if name != "breaks"])  # of the test before
def test_every_script_shows_its_fault_and_not_when_it_is_mended(name: str, tmp_path: Path) -> None:
    made = reproduce(planted(name), bisected(name), "is at fault", "eager", tmp_path / f"{name}.py")
    assert made["shows"], made["printed"]
    path = Path(made["script"])
    assert path.read_text() == made["text"]
    path.write_text(made["text"].replace(f'self.fault == "{name}"', "False"))
    done = preloaded.run([path])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_profile_on_a_cpu_says_nothing_of_its_own() -> None:
    code = (
        "import torch; from labs.explain.kernels import quiet_profiler; quiet_profiler()\n"
        "from labs.explain.experiments import dispatch_trace; dispatch_trace(torch.device('cpu'))"
    )
    env = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "USDT" not in done.stderr + done.stdout


# ---- recipes ---------------------------------------------------------------------------------------------------------


class FaultyConfig(LlamaConfig):
    model_type = "llama_with_a_break"


class FaultyMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x * 2
        return super().forward(x)


class FaultyForCausalLM(LlamaForCausalLM):
    config_class = FaultyConfig

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(config)
        self.model.layers[-1].mlp = FaultyMLP(config)


AutoConfig.register("llama_with_a_break", FaultyConfig, exist_ok=True)
AutoModelForCausalLM.register(FaultyConfig, FaultyForCausalLM, exist_ok=True)

RECIPE = """
run: {dir: runs/x}
model:
  train_tokenizer: {vocab_size: 300}
  scratch:
    model_type: MODEL
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    max_position_embeddings: 64
data:
  train: [{path: "builtin:docs"}]
  max_length: 32
train: {global_batch_size: 2, micro_batch_size: 2, precision: fp32, max_steps: 1}
compile: {backend: eager}
"""


def recipe(tmp_path: Path, model: str = "llama") -> Path:
    file = tmp_path / "base.yaml"
    file.write_text(RECIPE.replace("MODEL", model))
    return file


def subject_of(file: Path, *words: str, layers: int | None = None, of_encoder: bool = False) -> Subject:
    return of_recipe(read_config(file, words, world_size=1), layers, cpu_runtime(), of_encoder=of_encoder)


def test_a_recipe_is_its_decoder_with_batches_of_its_shape(tmp_path: Path) -> None:
    subject = subject_of(recipe(tmp_path), layers=1)
    assert subject.name == "LlamaForCausalLM, 1 block"
    assert (subject.call.shape, subject.other and subject.other.shape) == ("2 x 32", "2 x 24")
    assert subject.run(subject.call).last_hidden_state.shape == (2, 32, 32)
    assert not torch.equal(subject.call.kwargs["input_ids"], subject.again.kwargs["input_ids"])
    with pytest.raises(ConfigError, match="--layers: 3, but the model has 2 blocks"):
        subject_of(recipe(tmp_path), layers=3)
    with pytest.raises(ConfigError, match=r"--encoder: the model of this recipe \(llama\) has none"):
        subject_of(recipe(tmp_path), of_encoder=True)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "varlen", "flex", "fa4"])
def test_a_script_needs_sftkit_only_where_its_module_attends_with_it_and_says_so(
    tmp_path: Path, backend: str, monkeypatch
) -> None:
    monkeypatch.setitem(attention.BACKENDS, backend, attention.BACKENDS["reference"])  # as none of these is here
    subject = subject_of(recipe(tmp_path), layers=1)
    kwargs = subject.call.kwargs | {"documents": subject.call.kwargs["documents"]._replace(backend=backend)}
    parts = captured_parts(replace(subject, call=ModuleCall((), kwargs)))
    for path, needs in (("layers.0.mlp", False), ("layers.0.self_attn", True), ("", True)):
        finding = BisectAnswer("breaks", (parts[path],), "", (), None)
        text = script_of(subject, parts[path], finding, "breaks the graph", "eager")
        compile(text, "breaks.py", "exec")
        assert [line.strip() for line in text.split("\n") if line.startswith("#")] == [NEEDS_SFTKIT] * needs
        assert ("sftkit." in text.partition("import torch")[2]) == needs


CAPTIONING = ROOT / "recipes/captioning/caption_smoke.yaml"


def test_the_decoder_of_a_captioning_recipe_looks_at_what_its_encoder_made() -> None:
    subject = subject_of(CAPTIONING, "train.micro_batch_size=2", "data.row_length=256")
    assert subject.trained is not None
    assert "--encoder examines ViTModel" in (subject.beside or "")
    pictures = subject.trained.batch.inputs["pixel_values"]
    assert subject.call.kwargs["encoder_hidden_states"].shape == (
        2,
        len(pictures) // 2 * 37,
        64,
    )  # 36 patches and one more
    assert "h.1.crossattention.c_attn" in captured_parts(subject)
    module_step(subject)()
    scope: dict[str, Any] = {"torch": torch}
    exec(subject.source, scope)
    assert type(scope["module"]) is type(subject.module)
    assert scope["module"].state_dict().keys() == subject.module.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pictures", pytest.param("texts", marks=pytest.mark.slow)])
def test_an_encoder_is_looked_at_with_what_a_step_gives_it(kind: str) -> None:
    words = ["train.micro_batch_size=2", "data.row_length=256"]
    if kind == "texts":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        words.append(f"model.scratch={json.dumps({'model_type': 't5', **sizes})}")
    subject = subject_of(CAPTIONING, *words, of_encoder=True)
    whole = subject_of(CAPTIONING, *words)
    assert subject.trained is not None
    inputs = whole.trained.batch.inputs if whole.trained else {}
    name = next(iter(subject.call.kwargs))
    assert len(subject.call.kwargs[name]) == len(next(iter(inputs.values()))), "all that a micro-batch encodes"
    assert subject.call.shape == " x ".join(map(str, subject.call.kwargs[name].shape))
    assert subject.again.kwargs[name].shape == subject.call.kwargs[name].shape
    assert not torch.equal(subject.again.kwargs[name], subject.call.kwargs[name])
    assert subject.other is None
    bucketed = subject_of(
        CAPTIONING, *words[:1], *words[2:], "data.row_length=null", "data.layout=bucketed", of_encoder=True
    )
    assert bucketed.other is not None
    assert len(bucketed.other.kwargs[name]) != len(bucketed.call.kwargs[name]), (
        "buckets of other lengths have other rows"
    )
    encoded = subject.run(subject.call).last_hidden_state
    assert encoded.ndim == 3
    scope: dict[str, Any] = {"torch": torch}
    exec(subject.source, scope)
    assert type(scope["module"]) is type(subject.module)
    assert scope["module"].state_dict().keys() == subject.module.state_dict().keys() != whole.module.state_dict().keys()
    assert breaks_of(subject)["rows"] == []


@pytest.mark.slow
def test_the_break_of_a_users_model_is_found_in_its_file(tmp_path: Path) -> None:
    assert breaks_of(subject_of(recipe(tmp_path), layers=1))["rows"] == []
    row = breaks_of(subject_of(recipe(tmp_path, "llama_with_a_break"), layers=1))["rows"][0]
    assert (row["file"], row["code"]) == (__file__, "if x.sum() > 1e9:")
    assert row["seen_by"] == ["explain", "fullgraph", "TORCH_LOGS"]


def test_an_environment_with_torch_logs_is_refused_with_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    monkeypatch.setattr(sys, "argv", ["explain", f"{FAULTS}:breaks"])
    with pytest.raises(ConfigError, match=r"the environment has TORCH_LOGS, .*: unset it"):
        parse()


def test_the_command_writes_page_and_data_and_ends_with_1_where_a_graph_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", f"{FAULTS}:breaks", "--out", str(tmp_path / "out")])
    assert run_explain(*parse()) == 1
    said = capsys.readouterr().out
    assert f"{FAULTS}:{line_of(str(FAULTS), 'h.sum() > 1e9')}: if self.fault" in said
    assert "remedy  compute both sides" in said
    result = json.loads((tmp_path / "out/explain.json").read_text())
    assert [one["name"] for one in result["breaks"]["instruments"]] == ["explain", "fullgraph", "TORCH_LOGS"]
    page = (tmp_path / "out/explain.html").read_text()
    assert "default-src &#39;none&#39;" in page
    assert "<script" not in page
    assert "h.sum() &gt; 1e9" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a recipe or FILE.py:FUNCTION, or take --labs alone"),
        (["x.yaml", "--labs"], "name a recipe or FILE.py:FUNCTION, or take --labs alone"),
        (["--labs", "--bisect"], "--labs has no recipe"),
        (["x.py:f", "train.seed=1"], "belong to a recipe"),
        (["x.yaml", "--layers", "0"], "how many blocks? Take 1 or more"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", *words])
    with pytest.raises(SystemExit) as ended:
        parse()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("recipes/nowhere.yaml", "error: recipes/nowhere.yaml: no such file"),
        ("nowhere.py:f", "nowhere.py:f: there is no Python file nowhere.py;"),
    ],
)
def test_what_is_not_there_is_refused_before_torch_is_imported(word: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"}
    words = [sys.executable, "-m", "labs.explain", word]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere.py:f", "there is no Python file nowhere.py"),
        (f"{FAULTS}:nobody", "has no function nobody; it has: made, none, breaks"),
        (f"{FAULTS}:nothing", "must return .module, args."),
        (f"{FAULTS}:a_tensor_alone", r"args must be a tuple, even of one tensor: return module, \(tensor,\)"),
        (f"{FAULTS}:fails", r"calling the function fails, at .*planted_faults.py:\d+: ValueError: no data here"),
        (
            f"{FAULTS}:of_another_width",
            r"calling the module uncompiled with its args fails, at .*: RuntimeError: (addmm: )?mat1 and",
        ),
    ],
)
def test_a_function_that_makes_no_module_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of_file(words, CPU)


@pytest.mark.slow
def test_code_that_comes_with_a_model_is_explained_and_reproduced(tmp_path: Path) -> None:
    """From the command line, in processes of their own."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_faulty.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.models.llama.modeling_llama import LlamaMLP\n\n\n"
        "class FaultyConfig(LlamaConfig):\n    model_type = 'faulty'\n\n\n"
        "class FaultyMLP(LlamaMLP):\n    def forward(self, x):\n        return super().forward(x) * x.max().item()\n\n\n"
        "class FaultyForCausalLM(LlamaForCausalLM):\n    config_class = FaultyConfig\n\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.model.layers[-1].mlp = FaultyMLP(config)\n"
    )
    auto = {"AutoConfig": "modeling_faulty.FaultyConfig", "AutoModelForCausalLM": "modeling_faulty.FaultyForCausalLM"}
    fields = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "faulty", "auto_map": auto, **fields}))
    file = tmp_path / "sft.yaml"
    model = f"model: {{path: {folder}, trust_remote_code: true}}\n"
    file.write_text("run: {dir: runs/x}\n" + model + RECIPE[RECIPE.index("data:") :])
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, "-m", "sftkit", "explain", str(file), "--bisect", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "which module breaks the graph? layers.0.mlp (FaultyMLP)" in done.stdout
    assert "shows it: python" in done.stdout, "which has run it"
    assert "Tensor.item()" in done.stdout
