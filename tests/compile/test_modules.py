"""compile.mode and compile.options: with what is compiled."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import problems_of, tiny_llama
from transformers import PreTrainedModel

from sftkit.compile.contract import (
    check_options,
    compile_arguments,
    compile_model,
    compiler_switches,
    has_cuda_graphs,
    recording_advice,
)
from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(compiler_switches(CompileConfig(enabled=False), dynamic_layout=True))
        yield
    torch._dynamo.reset()


def run(orig_model: PreTrainedModel, rows: int = 2, row_length: int = 16) -> torch.Tensor:
    """The decoder as a step calls it, forward and backward."""
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (rows, row_length))
    mask = torch.ones(row_length, row_length, dtype=torch.bool).tril().expand(rows, 1, -1, -1)
    positions = torch.arange(row_length).expand(rows, -1)
    decoder = orig_model.get_decoder()
    hidden = decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
    loss = hidden.pow(3).mean()
    loss.backward()
    return loss.detach()


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Inductor is told of each graph; the graphs run as they are."""
    told: list[dict[str, Any]] = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any], **_: Any) -> Any:
        told.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return told


def test_inductor_is_told_the_options_over_those_of_the_mode(patches: list[dict[str, Any]]) -> None:
    orig_model = tiny_llama()
    options = {"shape_padding": True, "coordinate_descent_tuning": False}
    compile_model(orig_model, CompileConfig(mode="max-autotune-no-cudagraphs", options=options))
    run(orig_model)
    wanted = {"max_autotune": True, "coordinate_descent_tuning": False, "shape_padding": True}
    assert [{k: told.get(k) for k in wanted} for told in patches] == [wanted] * 2  # block and norm


def test_a_mode_alone_is_given_as_a_mode_and_cuda_graphs_are_known_by_mode_and_option() -> None:
    assert compile_arguments(CompileConfig(mode="max-autotune"))["mode"] == "max-autotune"
    assert "mode" not in compile_arguments(CompileConfig(mode="max-autotune", options={"shape_padding": True}))
    assert not has_cuda_graphs(CompileConfig(options={"shape_padding": True}))
    assert has_cuda_graphs(CompileConfig(options={"triton.cudagraphs": True}))
    assert not has_cuda_graphs(CompileConfig(mode="max-autotune", options={"triton.cudagraphs": False}))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"options": {"shape_paddin": True}},
            r'compile.options: "shape_paddin" is no option .* Did you mean "shape_padding"\?',
        ),
        ({"options": {"shape_padding": 3}}, "compile.options: shape_padding must be of type bool, not int"),
        ({"options": {"cudagraphs": True}}, r'Did you mean "triton.cudagraphs"\?'),
    ],
)
def test_options_that_this_torch_does_not_have_are_refused(settings: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_options(CompileConfig(**settings))


def test_options_that_this_torch_has_pass() -> None:
    names = {
        "shape_padding": True,
        "coordinate_descent_tuning": True,
        "triton.cudagraphs": False,
        "force_shape_pad": True,
    }
    check_options(CompileConfig(options=names))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["compile.dynamic=marked"], 'compile.dynamic: "marked" was removed: leave it out'),
        (["compile.modules={model.layers: {}}"], "compile.modules: was removed: compile.scope=block or model"),
        (["compile.options={a: [1]}"], "compile.options: a: must be true, false, a number or text, not [1]"),
        (
            ["compile.options={a: 1}", "compile.backend=eager"],
            "compile.options: only goes with compile.backend inductor",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_without_torch(tmp_path: Path, words: list[str], wanted: str) -> None:
    (problem,) = problems_of(tmp_path, words)
    assert wanted in problem


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mode_with_cuda_graphs_is_warned_of_where_row_lengths_vary(mode: str | None, dynamic: bool) -> None:
    said = recording_advice(CompileConfig(mode=mode), dynamic_layout=dynamic)
    assert (said is not None) == (dynamic and mode in ("reduce-overhead", "max-autotune"))
