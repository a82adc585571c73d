"""compile.modules, compile.options and compile.dynamic=marked: what is compiled, with what, for which shapes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import problems_of, scratch_recipe, tiny_llama
from made_captioners import CAPTIONER, TRANSLATOR, made
from transformers import PreTrainedModel

from sftkit.compile.contract import compile_model, undo_compile
from sftkit.compile.modules import (
    check_marked,
    check_options,
    compile_arguments,
    compiler_switches,
    has_cuda_graphs,
    named_parts,
    recording_advice,
)
from sftkit.compile.watch import CompileWatch
from sftkit.config.load import read_config
from sftkit.config.schema import CompileConfig, CompileModuleConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import decoder

Own = CompileModuleConfig


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


def paths(orig_model: PreTrainedModel, **modules: Own) -> list[str]:
    named = {path.replace("__", "."): own for path, own in modules.items()}
    return list(named_parts(orig_model, CompileConfig(modules=named)))


def test_a_path_names_a_module_or_each_item_of_a_list_and_the_longer_path_counts() -> None:
    orig_model = tiny_llama()
    assert paths(orig_model, model__norm=Own(), model__layers=Own()) == [
        "model.layers.0",
        "model.layers.1",
        "model.norm",
    ]
    assert paths(orig_model, model=Own()) == ["model"]
    assert paths(orig_model, model__layers__1=Own()) == ["model.layers.1"]
    assert paths(orig_model, model__layers__1__mlp=Own()) == ["model.layers.1.mlp"]
    named = {"model.layers": Own(mode="max-autotune"), "model.layers.1": Own(options={})}
    compile = CompileConfig(modules=named, mode="default", options={"shape_padding": True})
    (_, first), (_, second) = named_parts(orig_model, compile).values()
    assert (first.mode, first.options) == ("max-autotune", {"shape_padding": True})
    assert (second.mode, second.options) == ("default", {})


def test_encoder_and_decoder_are_paths_of_any_model_with_both_though_a_head_may_be_around_the_decoder() -> None:
    both = {"encoder": Own(), "decoder": Own(mode="max-autotune")}
    assert paths(made(TRANSLATOR), **both) == ["encoder", "decoder"]
    captioner = made(CAPTIONER)
    found = named_parts(captioner, CompileConfig(modules=both))
    assert {path: own.mode for path, (_, own) in found.items()} == {
        "encoder": None,
        "decoder.transformer": "max-autotune",
    }
    assert found["decoder.transformer"][0] is decoder(captioner)  # a step calls it


@pytest.mark.parametrize(
    ("path", "sharded", "wanted"),
    [
        ("encoder", False, "there is no encoder in LlamaForCausalLM, which has model, lm_head"),
        ("model.layer", False, 'has embed_tokens, layers, norm, rotary_emb. Did you mean "layers"?'),
        ("model.layers.2", False, "there is no 2 in model.layers, which has 0, 1"),
        ("lm_head", False, "is not called in a step, where the loss reads the weight of the head"),
        ("model.embed_tokens", False, "is a Embedding of torch, which Dynamo does not trace on its own"),
        (
            "model",
            True,
            "sharded weights are gathered between graphs: name other modules, such as model.layers, model.norm",
        ),
    ],
)
def test_a_path_that_no_step_has_is_refused_with_what_there_is(path: str, sharded: bool, wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"compile\.modules: ") as refused:
        named_parts(tiny_llama(), CompileConfig(modules={path: Own()}), sharded=sharded)
    assert wanted in str(refused.value)


def test_a_module_inside_another_that_is_one_graph_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"model.layers.0.mlp" lies in "model.layers.0"'):
        paths(tiny_llama(), model__layers=Own(), model__layers__0__mlp=Own())


def test_only_what_is_named_is_compiled_and_computes_the_same() -> None:
    expected = run(tiny_llama())
    for modules, graphs in (({"model.layers": Own()}, 1), ({"model.norm": Own(), "model.layers.0.mlp": Own()}, 2)):
        orig_model, watch = tiny_llama(), CompileWatch()
        assert compile_model(orig_model, CompileConfig(backend="aot_eager", modules=modules)) == len(
            named_parts(orig_model, CompileConfig(modules=modules))
        )
        torch.testing.assert_close(run(orig_model), expected)
        assert watch.counts()["compile/graphs"] == graphs
        watch.close()
        undo_compile(orig_model)
        assert torch.equal(run(orig_model), expected)
        torch._dynamo.reset()


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Inductor is told of each graph; the graphs run as they are."""
    told: list[dict[str, Any]] = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any], **_: Any) -> Any:
        told.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return told


def test_inductor_is_told_the_options_of_each_module_over_those_of_its_mode(patches: list[dict[str, Any]]) -> None:
    orig_model = tiny_llama()
    modules = {
        "model.layers": Own(mode="max-autotune-no-cudagraphs"),
        "model.norm": Own(options={"epilogue_fusion": False}),
    }
    options = {"shape_padding": True, "coordinate_descent_tuning": False}
    compile_model(orig_model, CompileConfig(options=options, modules=modules))
    run(orig_model)
    blocks = {"max_autotune": True, "coordinate_descent_tuning": False, "shape_padding": True}
    norm = {"epilogue_fusion": False}
    assert [{k: told.get(k) for k in (blocks | norm)} for told in patches] == [
        blocks | {"epilogue_fusion": None},
        dict.fromkeys(blocks) | norm,
    ]


def test_a_mode_alone_is_given_as_a_mode_and_cuda_graphs_are_known_by_mode_and_option() -> None:
    assert compile_arguments(CompileConfig(mode="max-autotune"))["mode"] == "max-autotune"
    assert "mode" not in compile_arguments(CompileConfig(mode="max-autotune", options={"shape_padding": True}))
    assert not has_cuda_graphs(CompileConfig(options={"shape_padding": True}))
    assert has_cuda_graphs(CompileConfig(options={"triton.cudagraphs": True}))
    assert not has_cuda_graphs(CompileConfig(mode="max-autotune", options={"triton.cudagraphs": False}))
    assert has_cuda_graphs(CompileConfig(modules={"model.layers": Own(mode="reduce-overhead"), "model.norm": Own()}))
    assert not has_cuda_graphs(CompileConfig(mode="reduce-overhead", modules={"model.layers": Own(mode="default")}))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"options": {"shape_paddin": True}},
            r'compile.options: "shape_paddin" is no option .* Did you mean "shape_padding"\?',
        ),
        ({"options": {"shape_padding": 3}}, "compile.options: shape_padding must be of type bool, not int"),
        ({"options": {"cudagraphs": True}}, r'Did you mean "triton.cudagraphs"\?'),
        ({"modules": {"model.norm": Own(options={"a": 1})}}, r'compile.modules: model.norm: options: "a" is no option'),
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


def test_a_marked_row_length_is_symbolic_and_nothing_else_is() -> None:
    orig_model, watch = tiny_llama(), CompileWatch()
    compile_model(orig_model, CompileConfig(backend="eager", dynamic="marked"), dynamic_layout=True)
    run(orig_model, 2, 16)
    assert watch.counts()["compile/graphs"] == 2  # block and norm
    watch.warm_up_done()
    for row_length in (24, 8, 72, 16):
        run(orig_model, 2, row_length)
    assert watch.counts()["compile/recompiles"] == 0
    run(orig_model, 3, 16)  # of another number of rows they are other graphs
    assert watch.counts()["compile/recompiles"] == 2
    watch.close()


def test_a_graph_that_would_hold_for_one_row_length_is_an_error_where_it_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orig_model = tiny_llama()
    block = orig_model.model.layers[0]
    plain = type(block).forward

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert hidden_states.shape[1] == 16
        return plain(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(block), "forward", forward)
    compile_model(orig_model, CompileConfig(backend="eager", dynamic="marked"), dynamic_layout=True)
    with pytest.raises(Exception, match=r"hidden_states.*size\(\)\[1\]|L\['hidden_states'\]|marked"):
        run(orig_model, 2, 16)


def test_a_marked_row_length_does_not_go_with_masks_of_blocks() -> None:
    check_marked(CompileConfig(dynamic="marked"), "varlen")
    check_marked(CompileConfig(), "flex")
    with pytest.raises(ConfigError, match=r"marked does not go with attention\.backend flex"):
        check_marked(CompileConfig(dynamic="marked"), "flex")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["compile.dynamic=marked"], "compile.dynamic: marked only goes with layout dynamic, not packed"),
        (["compile.dynamic=mark"], 'is not one of true, false, marked, null. Did you mean "marked"?'),
        (["compile.options={a: [1]}"], "compile.options: a: must be true, false, a number or text, not [1]"),
        (
            ["compile.options={a: 1}", "compile.backend=eager"],
            "compile.options: only goes with compile.backend inductor",
        ),
        (["compile.modules={}"], "compile.modules: names nothing to compile"),
        (["compile.modules={a.b: {modes: default}}"], 'Did you mean "compile.modules.a.b.mode"?'),
        (
            ["compile.modules={a: {mode: default}}", "compile.backend=aot_eager"],
            "a: mode only goes with compile.backend",
        ),
        (["compile.modules={a: {options: {b: null}}}"], "compile.modules.a.options: b: must be true, false"),
    ],
)
def test_what_does_not_fit_together_is_refused_without_torch(tmp_path: Path, words: list[str], wanted: str) -> None:
    (problem,) = problems_of(tmp_path, words)
    assert wanted in problem


def test_a_recipe_says_modules_by_path_and_options_and_a_marked_row_length(tmp_path: Path) -> None:
    compiled = "compile: {modules: {model.layers: {mode: max-autotune}, model.norm: {}}, dynamic: marked}\n"
    recipe = scratch_recipe(tmp_path, compiled)
    compile = read_config(recipe, ["data.layout=dynamic", "compile.options.shape_padding=true"]).compile
    assert compile.modules == {"model.layers": Own(mode="max-autotune"), "model.norm": Own()}
    assert (compile.options, compile.dynamic) == ({"shape_padding": True}, "marked")


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mode_with_cuda_graphs_is_warned_of_where_row_lengths_vary(mode: str | None, dynamic: bool) -> None:
    said = recording_advice(CompileConfig(mode=mode), dynamic_layout=dynamic)
    assert (said is not None) == (dynamic and mode in ("reduce-overhead", "max-autotune"))
