"""The compile contract: one graph per kind of module, declared shapes only, no compile after the warm-up, eager elsewhere."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers import tiny_llama
from torch._dynamo import callback_handler
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.callback import CallbackTrigger
from torch._dynamo.utils import CompilationMetrics
from torch._guards import CompileId
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental import _config as symbolic_shapes
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from sftkit.compile.contract import (
    MAX_RECORDS,
    begin_step,
    compile_model,
    compiler_switches,
    decoder_blocks,
    run_eagerly,
    small_modules,
    step_contract,
    warm_up,
)
from sftkit.compile.watch import CompileWatch, phase_seconds
from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError, RecompileError, hint

AT_END = ExitStack()
"What a test has set in the compiler, put back after it."


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    with AT_END:
        AT_END.enter_context(compiler_switches(CompileConfig(enabled=False)))  # enough records for a CompileWatch
        yield
    torch._dynamo.reset()


def compile_in_run(
    orig_model: PreTrainedModel,
    config: CompileConfig,
    budget: float = 1.0,
    dynamic_layout: bool = False,
    shapes: int = 1,
) -> int:
    """As a run of so many shapes does, with the switches set until the test ends. Returns the number of modules."""
    modules = compile_model(orig_model, config, dynamic_layout=dynamic_layout)
    AT_END.enter_context(compiler_switches(config, budget, modules * shapes, dynamic_layout=dynamic_layout))
    return modules


def run(orig_model: PreTrainedModel, rows: int = 2, row_length: int = 16, backward: bool = True) -> torch.Tensor:
    """The decoder as the train step calls it; the loss is any scalar."""
    torch.manual_seed(row_length)
    ids = torch.randint(3, 64, (rows, row_length), device=orig_model.device)
    mask = torch.ones(row_length, row_length, dtype=torch.bool, device=ids.device).tril().expand(rows, 1, -1, -1)
    positions = torch.arange(row_length, device=ids.device).expand(rows, -1)
    hidden = orig_model.get_decoder()(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    loss = hidden.float().pow(3).mean()
    if backward:
        loss.backward()
    return loss.detach()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("sftkit")]


def warmed_up(
    shapes: Sequence[tuple[int, int]] = ((2, 16),), budget: float = 1.0, dynamic_layout: bool = False, **settings
) -> tuple[PreTrainedModel, CompileWatch]:
    """A model whose graphs of these shapes are there, with guards as of every backend; "aot_eager" where graphs matter."""
    orig_model = tiny_llama()
    config = CompileConfig(**{"backend": "eager", **settings})
    compile_in_run(orig_model, config, budget, dynamic_layout, len(shapes))
    watch = CompileWatch()
    assert warm_up(orig_model, lambda rows, length: float(run(orig_model, rows, length)), shapes, config, bool)
    watch.warm_up_done()
    return orig_model, watch


@pytest.mark.parametrize(("scope", "graphs", "backend"), [("block", 2, "aot_eager"), ("model", 1, "eager")])
def test_each_shape_has_one_graph_per_kind_of_module_and_nothing_compiles_afterwards(
    scope: str, graphs: int, backend: str
) -> None:
    orig_model, watch = warmed_up([(2, 16), (4, 8)], backend=backend, scope=scope, fullgraph=True)
    with step_contract("error", watch.graph_break_reasons()):
        for rows, row_length in [(4, 8), (2, 16), (2, 16), (4, 8)]:
            run(orig_model, rows, row_length)
    counts = watch.counts()
    assert counts["compile/graphs"] == graphs * 2
    assert counts["compile/recompiles"] == counts["compile/graph_breaks"] == 0
    assert counts["compile/seconds"] > 0


@pytest.mark.parametrize(("rows", "warm_up_length"), [pytest.param(2, 16, marks=pytest.mark.slow), (16, 16)])
def test_a_dynamic_layout_has_one_graph_for_every_row_length(rows: int, warm_up_length: int) -> None:
    orig_model, watch = warmed_up([(rows, warm_up_length)], dynamic_layout=True)
    with step_contract("error", watch.graph_break_reasons()):
        for row_length in (8, 16, 24, 40, 72):
            run(orig_model, rows, row_length)
    assert watch.counts()["compile/graphs"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [True, "marked"])
def test_one_graph_has_batches_that_inductor_would_fuse_in_another_way(dynamic: bool | str) -> None:
    """A norm's backward pass over fewer than 4,096 positions of 1,024 numbers, and over more than 5 MiB of them."""
    config = AutoConfig.for_model("llama", **{**SIZES, "hidden_size": 1024})
    orig_model = AutoModelForCausalLM.from_config(config).cuda().bfloat16()
    watch, settings = CompileWatch(), CompileConfig(dynamic=dynamic)
    compile_in_run(orig_model, settings, dynamic_layout=True)
    assert warm_up(orig_model, lambda rows, length: float(run(orig_model, rows, length)), [(64, 128)], settings, bool)
    watch.warm_up_done()
    with step_contract("error", watch.graph_break_reasons()):
        for row_length in (16, 128, 72, 32):
            run(orig_model, 64, row_length)
    assert watch.counts()["compile/recompiles"] == 0


@pytest.mark.parametrize("dynamic_layout", [False, True])
def test_what_a_dynamic_layout_asks_of_inductor_holds_while_the_run_lasts(dynamic_layout: bool) -> None:
    triton = torch._inductor.config.triton
    before = triton.mix_order_reduction_non_strict_mode
    with compiler_switches(CompileConfig(), dynamic_layout=dynamic_layout):
        assert triton.mix_order_reduction_non_strict_mode is dynamic_layout
    assert triton.mix_order_reduction_non_strict_mode is before is False


@pytest.mark.parametrize("dynamic", [False, pytest.param(None, marks=pytest.mark.slow)])
def test_without_a_dynamic_layout_another_row_length_needs_another_graph(dynamic: bool | None) -> None:
    orig_model, watch = warmed_up(dynamic=dynamic)
    run(orig_model, 2, 24)
    assert watch.counts()["compile/recompiles"] == 2


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
DEEPSEEK = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "first_k_dense_replace": 1,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
FAMILIES = [
    *((family, SIZES, "norm") for family in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "smollm3")),
    ("phi", SIZES, None),  # torch.nn.LayerNorm: one operator as it is
    ("gpt2", GPT2, None),
    ("olmo", SIZES, None),  # its norm has no parameters
    ("olmo2", SIZES, "norm"),
    ("deepseek_v3", SIZES | DEEPSEEK | EXPERTS, "norm"),
]


@pytest.mark.parametrize(("family", "sizes", "norm"), FAMILIES, ids=[family for family, _, _ in FAMILIES])
def test_the_blocks_and_the_final_norm_of_a_family_are_found(
    family: str, sizes: dict[str, int], norm: str | None
) -> None:
    orig_model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, pad_token_id=0, **sizes))
    decoder = orig_model.get_decoder()
    assert len(decoder_blocks(orig_model)) == 2
    assert small_modules(orig_model) == ([] if norm is None else [getattr(decoder, norm)])


@pytest.mark.slow
def test_a_smaller_activation_budget_keeps_fewer_activations_and_the_gradients_of_eager() -> None:
    eager = tiny_llama()
    run(eager)
    kept, gradients = [], [[p.grad for p in eager.get_decoder().parameters()]]
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        orig_model, _ = warmed_up(budget=budget, backend="aot_eager_decomp_partition")  # inductor's cut, no code
        sizes: list[int] = []
        pointers = {p.data_ptr() for p in orig_model.parameters()}

        def pack(x: torch.Tensor, sizes: list[int] = sizes, pointers: set[int] = pointers) -> torch.Tensor:
            sizes.append(0 if x.data_ptr() in pointers else x.nbytes)
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            run(orig_model)
        kept.append(sum(sizes))
        gradients.append([p.grad.clone() for p in orig_model.get_decoder().parameters()])
    assert kept[0] > kept[1] > kept[2]
    for compiled in gradients[1:]:
        torch.testing.assert_close(gradients[0], compiled, rtol=1e-3, atol=1e-6)


# What makes a step need a graph that the warm-up has not built.


def other_shape(orig_model: PreTrainedModel) -> None:
    run(orig_model, 2, 24)


def other_dtype(orig_model: PreTrainedModel) -> None:
    run(orig_model.to(torch.bfloat16))


def eval_mode(orig_model: PreTrainedModel) -> None:
    run(orig_model.eval())


def no_grad(orig_model: PreTrainedModel) -> None:
    with torch.no_grad():
        run(orig_model, backward=False)


def autocast(orig_model: PreTrainedModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run(orig_model)


SURPRISES = [
    (other_shape, "size mismatch at index 1. expected 16, actual 24"),
    (other_dtype, "dtype mismatch"),
    (eval_mode, "training"),
    (no_grad, "grad_mode"),
    (autocast, "autocast"),
]


@pytest.mark.parametrize(("surprise", "guard"), SURPRISES)
def test_a_step_that_needs_another_graph_ends_with_the_guard_or_is_compiled_as_told(surprise, guard) -> None:
    orig_model, watch = warmed_up()
    with step_contract("error"):
        run(orig_model)
    with pytest.raises(RecompileError) as raised, step_contract("error"):
        surprise(orig_model)
    message = str(raised.value)
    assert guard in message
    assert "LlamaDecoderLayer.forward (" in message
    assert "modeling_llama.py:" in message
    assert "data.layout" in message
    assert "compile.on_recompile=warn" in message
    assert isinstance(raised.value, ConfigError)
    assert watch.counts()["compile/recompiles"] == 0
    run(orig_model.float().train())  # what was compiled still is
    assert watch.counts()["compile/recompiles"] == 0
    with step_contract("warn"):
        surprise(orig_model.float().train())
    assert watch.counts()["compile/recompiles"] >= 1
    assert any(guard in reason for reason in watch.recompile_kinds())


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers 5.23 wraps the forward of every block."""

    @functools.wraps(forward)
    def around(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return around


@pytest.mark.parametrize(
    ("times", "scope"), [(1, "block"), (2, "block"), pytest.param(2, "model", marks=pytest.mark.slow)]
)
def test_what_is_refused_is_named_for_the_class_whose_forward_it_is_however_often_that_is_wrapped(
    monkeypatch, times: int, scope: str
) -> None:
    compiled = {"block": LlamaDecoderLayer, "model": LlamaModel}[scope]
    line = inspect.unwrap(compiled.forward).__code__.co_firstlineno
    for _ in range(times):
        monkeypatch.setattr(compiled, "forward", wrapped(compiled.forward))
    orig_model, _ = warmed_up(scope=scope)
    with pytest.raises(RecompileError) as raised, step_contract("error"):
        other_shape(orig_model)
    reason = str(raised.value)
    assert f"{compiled.__name__}.forward ({inspect.getfile(compiled)}:{line}): " in reason
    assert "around" not in reason, "the wrapper"
    assert f"tensor '{'hidden_states' if scope == 'block' else 'input_ids'}' size mismatch" in reason


def test_a_function_that_is_refused_is_named_as_it_is() -> None:
    scaled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    scaled(torch.ones(3))
    refused = pytest.raises(RecompileError, match=rf"<lambda> \({__file__}:\d+\): .*tensor 'x' size mismatch")
    with refused, step_contract("error"):
        scaled(torch.ones(4))


def test_reasons_that_differ_only_in_a_size_are_of_one_kind() -> None:
    orig_model, watch = warmed_up()
    kinds = []
    with step_contract("warn"):
        for row_length in (24, 32):
            run(orig_model, 2, row_length)
            kinds.append(watch.recompile_kinds())
    assert watch.counts()["compile/recompiles"] == 4
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) <= 2, "the block's and the norm's, where torch has two names for the hidden states"


def test_run_eagerly_takes_any_shape_and_the_contract_holds_again_after_it() -> None:
    orig_model, watch = warmed_up()
    graphs = watch.counts()["compile/graphs"]
    with step_contract("error"):
        for row_length in (3, 7, 19):
            run(orig_model)
            with torch.no_grad(), run_eagerly():
                run(orig_model.eval(), 1, row_length, backward=False)
                with run_eagerly():
                    run(orig_model, 3, row_length, backward=False)
                run(orig_model, 1, row_length, backward=False)
            orig_model.train()
        assert watch.counts()["compile/graphs"] == graphs
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            other_shape(orig_model)
    assert watch.counts()["compile/recompiles"] == 0
    other_shape(orig_model)  # outside the contract torch compiles as ever
    assert watch.counts()["compile/graphs"] == graphs + 2


def test_the_contract_ends_and_leaves_other_errors_as_they_are() -> None:
    orig_model, watch = warmed_up()
    with pytest.raises(RuntimeError, match=r"^out of data$"), step_contract("error"):
        raise RuntimeError("out of data")
    other_shape(orig_model)
    assert watch.counts()["compile/recompiles"] == 2


@pytest.mark.parametrize("on_recompile", ["error", "warn"])
def test_a_backward_graph_that_the_warm_up_did_not_build_is_no_exception(on_recompile: str) -> None:
    orig_model = tiny_llama()
    compile_in_run(orig_model, CompileConfig(backend="aot_eager"))
    watch = CompileWatch()
    with torch._functorch.config.patch(enable_autograd_cache=False):  # a cached graph brings its backward graph along
        run(orig_model, backward=False)
        watch.warm_up_done()
        if on_recompile == "error":
            with pytest.raises(RecompileError, match="backward pass of graph"), step_contract("error"):
                run(orig_model)
            return
        with step_contract(on_recompile):
            run(orig_model)
    assert watch.counts()["compile/recompiles"] == 2  # the block and the norm
    assert "never run in the warm-up" in watch.recompile_kinds()[0]


# Graph breaks: each of these is invisible to some of torch's own counters.


def explicit(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def host_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        torch._dynamo.graph_break()
        x = x + 1
    return x


@pytest.mark.parametrize("broken", [explicit, data_dependent, host_number, in_a_loop])
def test_a_graph_break_is_counted_and_refused_with_its_line(broken, caplog) -> None:
    watch = CompileWatch()
    compiled = torch.compile(broken, backend="aot_eager", dynamic=False)
    compiled(torch.ones(3))
    assert watch.counts()["compile/graph_breaks"] == 1
    (reason,) = watch.graph_break_reasons()
    first = broken.__code__.co_firstlineno
    assert reason.split(": ")[0] in {f"{__file__}:{line}" for line in range(first, first + 5)}
    refused = pytest.raises(RecompileError, match=r"graph breaks[\s\S]*on_recompile=warn")
    with refused as raised, step_contract("error", watch.graph_break_reasons()):
        pass
    assert reason in str(raised.value)
    with step_contract("warn", watch.graph_break_reasons()):
        pass
    assert reason in caplog.text
    assert CompileWatch().graph_break_reasons() == []


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_cuda_graph_that_is_recorded_late_is_told_and_no_recompile(is_backward: bool) -> None:
    def record() -> None:  # as torch._inductor.cudagraph_trees does, and the call of a graph after it
        timed = {"dynamo_compile_column_us": "runtime_cudagraphify_time_us", "is_backward": is_backward}
        with (
            callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"),
            dynamo_utils.dynamo_timed(
                "CUDAGraphNode.record", compile_id=CompileId(frame_id=0, frame_compile_id=0), **timed
            ),
        ):
            pass
        dynamo_utils.get_runtime_metrics_context().finish()

    _, watch = warmed_up()
    record()
    watch.warm_up_done()
    assert (watch.counts()["compile/cuda_graphs"], watch.late_cuda_graphs()) == (1, [])
    before = len(dynamo_utils.get_compilation_metrics())
    record()
    assert len(dynamo_utils.get_compilation_metrics()) == before + 1, "torch keeps a record of it"
    assert (watch.counts()["compile/cuda_graphs"], watch.counts()["compile/recompiles"]) == (2, 0)
    assert watch.recompile_kinds() == []
    assert watch.late_cuda_graphs() == [hint("late CUDA graphs")]


@pytest.mark.gpu
@pytest.mark.own_process
def test_each_row_length_of_a_dynamic_layout_has_a_cuda_graph_of_its_own_and_is_told() -> None:
    orig_model, settings = tiny_llama().cuda(), CompileConfig(mode="reduce-overhead", dynamic="marked")
    compile_in_run(orig_model, settings, dynamic_layout=True)

    def run_shape(rows: int, row_length: int) -> None:
        begin_step()
        float(run(orig_model, rows, row_length))
        orig_model.zero_grad()  # gradients lie in memory of the graphs, which the next step writes over

    watch = CompileWatch()
    assert warm_up(orig_model, run_shape, [(2, 32)], settings, bool)
    watch.warm_up_done()
    recorded = watch.counts()["compile/cuda_graphs"]
    assert recorded > 0
    for row_length in (48, 48, 48, 64, 64, 64):  # 16 divides all, lest attention with a mask guard on it
        run_shape(2, row_length)
    assert watch.counts()["compile/cuda_graphs"] > recorded
    assert watch.counts()["compile/recompiles"] == 0
    assert watch.late_cuda_graphs() == [hint("late CUDA graphs")]


def test_the_seconds_of_the_phases_add_up_to_those_of_the_compiler() -> None:
    _, watch = warmed_up(backend="aot_eager")
    counts = watch.counts()
    phases = {name.split("/")[2]: seconds for name, seconds in counts.items() if name.startswith("compile/seconds/")}
    assert list(phases) == ["dynamo", "aot", "inductor", "codegen", "kernels", "backward"]
    assert phases["dynamo"] > 0
    assert phases["aot"] > 0
    assert phases["backward"] > 0
    assert phases["inductor"] == phases["codegen"] == phases["kernels"] == 0  # the backend is aot_eager
    assert sum(phases.values()) == pytest.approx(counts["compile/seconds"], rel=0.05)


def test_a_second_of_a_compile_is_in_one_phase() -> None:
    spent = {
        "dynamo_cumulative_compile_time_us": 10_000_000,
        "aot_autograd_cumulative_compile_time_us": 8_000_000,
        "inductor_cumulative_compile_time_us": 7_000_000,
        "inductor_code_gen_cumulative_compile_time_us": 5_000_000,
        "triton_compile_time_us": 4_000_000,
    }
    phases = phase_seconds(CompilationMetrics(is_forward=True, **spent))
    assert phases == {"dynamo": 2, "aot": 1, "inductor": 2, "codegen": 1, "kernels": 4}
    tuned = phase_seconds(CompilationMetrics(is_forward=True, **(spent | {"triton_compile_time_us": 6_000_000})))
    assert sum(tuned.values()) == 10  # autotuning compiled kernels while no code was generated yet
    assert phase_seconds(CompilationMetrics(is_forward=False, backward_cumulative_compile_time_us=3_000_000)) == {
        "backward": 3
    }


@pytest.mark.slow
def test_no_declared_shape_can_reach_torchs_recompile_limit() -> None:
    AT_END.enter_context(torch._dynamo.config.patch(recompile_limit=2))  # as torch's own, only sooner
    shapes = [(1, length) for length in range(4, 7)]
    orig_model, watch = warmed_up(shapes)
    with step_contract("error", watch.graph_break_reasons()):
        for rows, row_length in shapes:
            run(orig_model, rows, row_length)
    assert watch.counts()["compile/graphs"] == 2 * len(shapes)


def test_warm_up_leaves_random_state_and_gradients_as_they_were() -> None:
    orig_model = tiny_llama(dropout=0.5)
    config = CompileConfig(backend="eager")
    compile_in_run(orig_model, config)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    warm_up(
        orig_model,
        lambda rows, length: float(torch.rand(()) * run(orig_model, rows, length)),
        [(2, 8)],
        config,
        bool,
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in orig_model.parameters())


def test_compiling_in_place_keeps_module_types_and_keys() -> None:
    orig_model = tiny_llama()
    keys, types = list(orig_model.state_dict()), [type(m) for m in orig_model.modules()]
    assert compile_in_run(orig_model, CompileConfig(backend="aot_eager")) == 3  # two blocks and the final norm
    assert list(orig_model.state_dict()) == keys
    assert [type(m) for m in orig_model.modules()] == types


def settings_of_the_process() -> list[Any]:
    """Everything that can be set in dynamo, functorch, inductor and symbolic shapes, and how many records are kept."""
    modules = torch._dynamo.config, torch._functorch.config, torch._inductor.config, symbolic_shapes
    configs = [module.get_config_copy() for module in modules]  # type: ignore[attr-defined]
    return [*configs, dynamo_utils._compilation_metrics.maxlen]


@pytest.mark.parametrize("dynamic_layout", [False, True])
@pytest.mark.parametrize("settings", [{}, {"enabled": False}])
def test_the_switches_are_set_inside_and_all_as_before_afterwards_even_after_an_error(
    settings: dict[str, Any], dynamic_layout: bool
) -> None:
    AT_END.close()  # torch's own limit of records
    before = settings_of_the_process()
    config = CompileConfig(**settings)
    enabled = config.enabled
    refused = pytest.raises(ValueError, match="in a step")
    with refused, compiler_switches(config, 0.25, dynamic_layout=dynamic_layout, graphs=500):
        dynamo, functorch, inductor, symbolic, records = settings_of_the_process()
        raise ValueError("in a step")
    assert settings_of_the_process() == before
    assert records == MAX_RECORDS
    assert before[-1] < MAX_RECORDS
    was = before[0]
    assert dynamo["optimize_ddp"] == (False if enabled else was["optimize_ddp"])
    assert dynamo["recompile_limit"] == (508 if enabled else was["recompile_limit"])
    assert dynamo["accumulated_recompile_limit"] == (508 if enabled else was["accumulated_recompile_limit"])
    assert functorch["activation_memory_budget"] == (0.25 if enabled else before[1]["activation_memory_budget"])
    assert inductor["fx_graph_cache"] == before[2]["fx_graph_cache"]
    assert symbolic["use_duck_shape"] == (before[3]["use_duck_shape"] and not (enabled and dynamic_layout))
    with compiler_switches(config, 0.25, dynamic_layout=dynamic_layout, graphs=500):
        pass
    assert settings_of_the_process() == before


def broken_compiler(*_: object) -> None:
    raise RuntimeError("no working C++ compiler found")


@pytest.mark.parametrize("on_failure", ["warn", "error"])
def test_a_machine_without_a_compiler_trains_eagerly_after_one_warning_or_stops(on_failure, caplog) -> None:
    orig_model = tiny_llama()
    config = CompileConfig(on_failure=on_failure)
    for block in decoder_blocks(orig_model):
        block.compile(backend=broken_compiler)

    def run_shape(rows: int, row_length: int) -> None:
        run(orig_model, rows, row_length)

    if on_failure == "error":
        with pytest.raises(ConfigError, match=r"no working C\+\+ compiler"):
            warm_up(orig_model, run_shape, [(2, 16)], config, bool)
        return
    with caplog.at_level(logging.WARNING):
        assert warm_up(orig_model, run_shape, [(2, 16)], config, bool) is False
    (line,) = told(caplog)
    assert "training eagerly" in line
    with step_contract("error"):
        run(orig_model)  # eager now, so any shape works
        run(orig_model, 1, 9)


def test_an_error_that_eager_has_too_is_raised_as_it_is() -> None:
    orig_model, config = tiny_llama(), CompileConfig(backend="aot_eager")
    compile_in_run(orig_model, config)

    def run_shape(rows: int, row_length: int) -> None:
        raise ZeroDivisionError("a bug of the step")

    with pytest.raises(ZeroDivisionError, match="a bug of the step"):
        warm_up(orig_model, run_shape, [(2, 16)], config, bool)


def test_disabled_compile_builds_no_graph() -> None:
    orig_model, config, watch = tiny_llama(), CompileConfig(enabled=False), CompileWatch()
    assert compile_in_run(orig_model, config) == 0
    assert not warm_up(orig_model, lambda rows, length: None, [(2, 16)], config, bool)
    run(orig_model)
    assert watch.counts()["compile/graphs"] == 0


@pytest.mark.gpu
@pytest.mark.own_process  # a graph that is replayed over memory of others writes into it
@pytest.mark.parametrize("scope", ["block", "model"])
def test_cuda_graphs_train_with_accumulation_like_eager(scope: str) -> None:
    gradients = []
    for enabled in (False, True):
        orig_model = tiny_llama().cuda()
        config = CompileConfig(enabled=enabled, mode="reduce-overhead", scope=scope)
        compile_in_run(orig_model, config, shapes=2)

        def run_shape(rows: int, row_length: int, orig_model: PreTrainedModel = orig_model) -> torch.Tensor:
            begin_step()
            return run(orig_model, rows, row_length).clone()

        watch = CompileWatch()
        assert warm_up(orig_model, run_shape, [(2, 16), (4, 16)], config, bool) is enabled
        watch.warm_up_done()
        for parameter in orig_model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with step_contract("error"):
            for _ in range(3):
                for rows in (2, 4, 2):
                    run_shape(rows, 16)
        gradients.append([p.grad.clone() for p in orig_model.get_decoder().parameters()])
        assert watch.counts()["compile/recompiles"] == 0
        assert (watch.counts()["compile/cuda_graphs"] > 0, watch.late_cuda_graphs()) == (enabled, [])
        torch.compiler.reset()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_sharded_ranks_fall_back_together_before_they_wait_for_each_other(monkeypatch, caplog) -> None:
    """One rank has no compiler: none of them may begin a compiled pass in which it would wait for that one."""
    asked: list[bool] = []
    eager: list[int] = []

    def any_rank(flag: bool) -> bool:
        asked.append(flag)
        return True

    def no_compiler(_: torch.Tensor) -> torch.Tensor:
        raise torch._dynamo.exc.TorchDynamoException("no C compiler")

    def run_shape(rows: int, row_length: int) -> None:
        eager.append(len(asked))

    model, config = tiny_llama(), CompileConfig(on_failure="warn", backend="aot_eager")
    assert not warm_up(model, run_shape, [(2, 32)], config, any_rank, sharded=True)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    assert not warm_up(model, run_shape, [(2, 32)], config, any_rank, sharded=True)
    assert (asked, eager) == ([False, True], [1, 2]), "once all know, each tries the largest batch eagerly"
    assert "it failed on another rank" in caplog.text
    assert "no C compiler" in caplog.text


def test_an_error_of_one_sharded_rank_in_the_warm_up_ends_it_for_the_others_to_find() -> None:
    def run_shape(rows: int, row_length: int) -> None:
        raise ValueError("only here")

    with pytest.raises(ValueError, match="only here"):
        warm_up(
            tiny_llama(),
            run_shape,
            [(2, 32)],
            CompileConfig(backend="aot_eager"),
            lambda flag: flag,
            sharded=True,
        )
