"""What an engine says of its own step before and while it trains: gradients, hooks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    cpu_runtime,
    make_examples,
    make_layout_of,
    tiny_llama,
    tiny_qwen3_with_windows,
    tiny_recipe,
    torchrun,
)
from made_models import MODELS, tiny_gemma2
from transformers import PreTrainedModel

from sftkit.config.schema import (
    AttentionConfig,
    CompileConfig,
    LossConfig,
    OptimConfig,
    TrainConfig,
)
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine import step
from sftkit.engine.engine import Engine, Training
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops import attention
from sftkit.tracking.names import Check
from sftkit.train.assemble import make_engine
from sftkit.verify import gradients as gradient_check
from sftkit.verify import proof
from sftkit.verify.gradients import (
    GradientCheck,
    GradientDifference,
    RoundingLimits,
    Roundings,
    gradients_check,
    largest,
    limits,
)
from sftkit.verify.plain import rounded_at_random
from sftkit.verify.proof import report_checks, verified_warm_up

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4
COMPILED = CompileConfig(backend="eager", fullgraph=True)
GRAPHS_BOTH_WAYS = CompileConfig(backend="aot_eager", fullgraph=True)
"With graphs of the backward pass too, which take longer to build."
EAGER = CompileConfig(enabled=False)
GRADIENTS, LOGITS = "Same gradients as the plain model", "Same logits as the plain model"
FP32 = limits(torch.float32, 2)
HOOKS = "The step runs the hooks that the model has"


BUILT: list[Engine] = []
"By the test that runs; the compiler's settings are the process's until an engine is closed."


@pytest.fixture(autouse=True)
def engines_closed() -> Iterator[None]:
    yield
    while BUILT:
        BUILT.pop().close()


def engine_with(
    folder: Path,
    orig_model: PreTrainedModel,
    kind: str = "packed",
    compile: CompileConfig = COMPILED,
    micro: int = 2,
    loss: LossConfig = LossConfig(),  # noqa: B008
    attention_backend: str = "reference",
) -> tuple[Engine, Batches]:
    """An engine as a recipe makes it, not warm yet."""
    torch._dynamo.reset()
    cfg = tiny_recipe(
        folder,
        optim=OptimConfig(name="adamw", lr=1e-2),
        train=TrainConfig(max_steps=20),
        loss=loss,
        attention=AttentionConfig(backend=attention_backend),  # type: ignore[arg-type]
        compile=compile,
    )
    examples = make_examples(LENGTHS, target_share=0.4)
    layout = make_layout_of(kind, examples.lengths, micro=micro)
    rt = cpu_runtime()
    BUILT.append(make_engine(cfg, rt, folder, Training(orig_model, NextToken(loss), layout)))
    return BUILT[-1], Batches(StepDataset(examples, layout), seed=0)


def warm(engine: Engine) -> dict[str, Check]:
    """The checks of its warm-up, after which nothing was compiled."""
    checks = {check.name: check for check in verified_warm_up(engine, cpu_runtime(), lambda _: None).checks}
    assert engine.report().metrics["compile/recompiles"] == 0
    return checks


def hook(*_: object) -> None:
    """Changes nothing."""


def test_a_hook_that_the_step_does_not_run_is_found_with_its_module(tmp_path: Path) -> None:
    orig_model = tiny_llama()
    engine, batches = engine_with(tmp_path, orig_model)
    warm(engine)
    assert row(engine, HOOKS).ok
    for name, register, found in (
        ("model.layers.1.mlp", "register_forward_hook", "model.layers.1.mlp: forward hook added after the warm-up"),
        ("model.layers.0.self_attn.q_proj", "register_forward_pre_hook", "q_proj: forward pre-hook added"),
        ("model.layers.0.mlp", "register_full_backward_hook", "model.layers.0.mlp: backward hook added"),
    ):
        ran: list[object] = []
        handle = getattr(orig_model.get_submodule(name), register)(lambda *_, ran=ran: ran.append(1))
        with engine.guarded():
            engine.step(next(iter(batches.steps(0, 1))), 1e-3)
        assert not ran, "torch leaves it out without a word"
        after = row(engine, HOOKS)
        assert after.ok is False
        assert found in after.found
        assert "before the engine is built" in after.found
        assert "compile.enabled=false" in after.found
        assert dict(engine.report().events())["hook"] == [after.found]
        handle.remove()
        assert row(engine, HOOKS).ok


def test_a_hook_that_runs_is_no_fault_and_one_that_was_compiled_in_and_removed_is(tmp_path: Path) -> None:
    orig_model = tiny_llama()
    ran: list[object] = []
    compiled_in = orig_model.get_submodule("model.layers.0.mlp").register_forward_hook(hook)
    engine, batches = engine_with(tmp_path, orig_model)
    warm(engine)
    orig_model.get_input_embeddings().register_forward_hook(lambda *_: ran.append(1))
    with engine.guarded():
        engine.step(next(iter(batches.steps(0, 1))), 1e-3)
    assert len(ran) == 4, "a call for each micro-batch"
    assert row(engine, HOOKS).ok
    compiled_in.remove()
    assert "model.layers.0.mlp: forward hook removed after the warm-up" in row(engine, HOOKS).found


def test_hooks_for_all_modules_are_found_and_an_uncompiled_step_runs_its_own(tmp_path: Path) -> None:
    engine, _ = engine_with(tmp_path, tiny_llama())
    warm(engine)
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        assert "every module: forward hook added" in row(engine, HOOKS).found
    finally:
        handle.remove()
    orig_model = tiny_llama()
    engine, _ = engine_with(tmp_path, orig_model, compile=EAGER)
    warm(engine)
    orig_model.get_submodule("model.layers.0.mlp").register_forward_hook(hook)
    assert row(engine, HOOKS).ok


@pytest.mark.parametrize(
    ("name", "said", "compile"),
    [
        ("lm_head", "lm_head", COMPILED),
        ("lm_head", "lm_head", EAGER),
        ("", "the model itself", EAGER),
        ("projector", "projector", EAGER),
    ],
)
def test_a_hook_of_a_module_that_the_step_never_calls_is_found_whenever_it_was_added(
    tmp_path: Path, name: str, said: str, compile: CompileConfig
) -> None:
    orig_model = tiny_llama()
    orig_model.projector = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    module = orig_model.get_submodule(name)
    ran: list[object] = []
    before = module.register_forward_hook(lambda *_: ran.append(1))
    engine, batches = engine_with(tmp_path, orig_model, compile=compile)
    warm(engine)
    ran.clear()  # the plain model, which steps are compared with, calls all of them
    with engine.guarded():
        engine.step(next(iter(batches.steps(0, 1))), 1e-3)
    early = row(engine, HOOKS)
    assert not ran
    assert early.ok is False
    assert early.found.startswith(f"{said}: forward hook does not run in a step")
    assert "hook the final norm or a block" in early.found
    assert "enabled=false" not in early.found, "it would not help"
    before.remove()
    assert row(engine, HOOKS).ok, "gone, and it never ran"
    module.register_forward_pre_hook(hook)
    assert f"{said}: forward pre-hook does not run in a step" in row(engine, HOOKS).found


def test_hooks_that_parallelism_puts_on_such_modules_are_no_fault(tmp_path: Path) -> None:
    def of_fsdp(*_: object) -> None:
        """As torch.distributed.fsdp registers them."""

    of_fsdp.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    orig_model = tiny_llama()
    engine, _ = engine_with(tmp_path, orig_model)
    orig_model.lm_head.register_forward_pre_hook(partial(of_fsdp, 1))
    warm(engine)
    orig_model.register_forward_hook(of_fsdp)
    assert row(engine, HOOKS).ok


def row(engine: Engine, name: str) -> Check:
    (found,) = [check for check in report_checks(engine.report()) if check.name == name]
    return found


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama,
    "tied": MODELS["qwen3"],
    "experts": MODELS["qwen3_moe"],
    "caps and windows": tiny_gemma2,
    "windows": tiny_qwen3_with_windows,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama")) for name in KINDS])
def test_a_good_model_has_the_gradients_of_the_plain_one_compiled_and_eager(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    orig_model = KINDS[name]()
    if orig_model._can_set_experts_implementation():
        orig_model.set_experts_implementation("batched_mm")
    every_part = LossConfig(z_loss=1e-3, label_smoothing=0.1)
    loss = every_part if name == "llama" else LossConfig()
    engine, _ = engine_with(tmp_path, orig_model, loss=loss, compile=GRAPHS_BOTH_WAYS)
    checks = warm(engine)
    assert checks[LOGITS].ok
    assert checks[GRADIENTS].ok, checks[GRADIENTS]
    assert checks[GRADIENTS].expected == "below 1.0e-04 in every parameter, 1e-04 of the scale"


class Float8Linear(torch.nn.Linear):
    """Asks of its positions what float8 products of a GPU ask: the gradient of a weight is a product over them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled() or x.numel() // x.shape[-1] % 16 == 0
        return super().forward(x)


def test_documents_of_any_length_are_padded_where_float8_products_need_it(tmp_path: Path) -> None:
    orig_model = tiny_llama()
    for block in orig_model.model.layers:
        block.mlp.up_proj.__class__ = Float8Linear
    engine, _ = engine_with(tmp_path, orig_model, compile=EAGER)
    check = warm(engine)[GRADIENTS]
    assert check.ok, check
    assert check.expected == "below 1.0e-04 in every parameter, 1e-04 of the scale"


@pytest.mark.parametrize(
    ("kind", "micro"),
    [("bucketed", 2), ("fixed", 1), pytest.param("dynamic", 8, marks=pytest.mark.slow), ("packed", 8)],
)
def test_gradients_are_compared_in_every_layout_without_a_graph_more(tmp_path: Path, kind: str, micro: int) -> None:
    engine, _ = engine_with(tmp_path, tiny_llama(), kind=kind, micro=micro)
    check = warm(engine)[GRADIENTS]
    assert check.ok
    assert "compiled: " in check.found


def attending(change: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], scale: float = 1.0) -> Any:
    """Our attention with another scale, or another output."""
    right = attention.attend

    def wrong(module: torch.nn.Module, *args: Any, scaling: float, **kwargs: Any) -> tuple[torch.Tensor, None]:
        out, weights = right(module, *args, scaling=scaling * scale, **kwargs)
        return change(module, out), weights

    return wrong


def test_a_wrong_attention_scale_fails_in_fp32_what_5_percent_would_let_pass(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(attention, "attend", attending(lambda _, out: out, scale=1.2))
    orig_model = tiny_llama()
    with torch.no_grad():
        for block in orig_model.model.layers:
            block.self_attn.q_proj.weight.mul_(6)  # scores that differ, as those of a trained model
    engine, _ = engine_with(tmp_path, orig_model, compile=EAGER)
    checks = warm(engine)
    assert checks[LOGITS].ok is False
    assert 1e-4 < float(checks[LOGITS].found.split()[-1]) < 0.05
    assert checks[GRADIENTS].ok is False


def detached(module: torch.nn.Module, out: torch.Tensor) -> torch.Tensor:
    """Of the second block."""
    return out.detach() if module.layer_idx == 1 else out


def detached_in_graphs(module: torch.nn.Module, out: torch.Tensor) -> torch.Tensor:
    return detached(module, out) if torch.compiler.is_compiling() else out


@pytest.mark.parametrize("change", [detached, detached_in_graphs])
def test_a_gradient_that_is_lost_on_the_way_fails_beside_right_logits(tmp_path: Path, monkeypatch, change) -> None:
    monkeypatch.setattr(attention, "attend", attending(change))
    engine, _ = engine_with(tmp_path, tiny_llama())
    checks = warm(engine)
    assert [name for name, check in checks.items() if check.ok is False] == [GRADIENTS]
    compiled, eager = checks[GRADIENTS].found.split("; ")
    assert "compiled: 1.0e+00 at most (model.layers.1.self_attn." in compiled
    assert ("model.layers.1.self_attn." in eager and "1.0e+00" in eager) is (change is detached)


def test_without_the_compiler_the_eager_half_is_judged_alone_and_with_dropout_the_other_is_not_checked(
    tmp_path: Path,
) -> None:
    engine, _ = engine_with(tmp_path, tiny_llama(), compile=EAGER)
    plain = warm(engine)[GRADIENTS]
    assert plain.ok, "there is nothing else to check"
    assert plain.found.startswith("eager: ")
    engine, _ = engine_with(tmp_path, tiny_llama(dropout=0.1))
    dropping = warm(engine)[GRADIENTS]
    assert dropping.ok is None
    assert "compiled: not checked, dropout; eager: " in dropping.found


def test_a_run_computes_the_same_bits_whether_its_gradients_were_checked_or_not(tmp_path: Path, monkeypatch) -> None:
    results, nothing = [], GradientCheck(GradientDifference(0.0, ""), None, "left out")
    for checked in (True, False):
        if not checked:
            monkeypatch.setattr(proof, "check_gradients", lambda *_, **__: nothing)
        torch.manual_seed(7)
        orig_model = tiny_llama()
        engine, batches = engine_with(tmp_path, orig_model)
        before = torch.get_rng_state()
        warm(engine)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(p.grad is None for p in orig_model.parameters())
        assert not any(engine.optimizer.state.values())
        with engine.guarded():
            norms = [float(engine.step(step, 1e-2).grad_norm) for step in batches.steps(0, 4)]
        results.append((norms, [p.detach().clone() for p in orig_model.parameters()]))
    (norms, weights), (others, other_weights) = results
    assert norms == others
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_what_rounding_may_do_grows_with_the_blocks_and_with_the_dtype() -> None:
    assert limits(torch.float32, 80) == (1e-4, 1e-4, 1e-4)
    bf16, deep, fp16 = limits(torch.bfloat16, 16), limits(torch.bfloat16, 80), limits(torch.float16, 16)
    assert bf16.logits == pytest.approx(4 * 2**-7)
    assert bf16.gradients == pytest.approx(16 * 2**-7)
    assert deep == (0.05, 0.2, 0.01)
    assert fp16.logits == pytest.approx(4 * 2**-10)
    assert limits(torch.bfloat16, 16, fp8=True) == bf16._replace(gradients=None)
    eager = GradientDifference(0.3, "x")
    assert gradients_check(GradientCheck(eager, eager), limits(torch.bfloat16, 16, fp8=True), "").ok is None


def test_a_parameter_without_a_gradient_of_its_own_is_measured_against_its_block() -> None:
    blocks_of = {"a.bias": "a", "a.weight": "a", "b.weight": "b"}
    rounding = {"a.bias": (1e-14, 1e-14, 0.0), "a.weight": (1e-13, 1.0, 1.0), "b.weight": (0.0, 0.0, 0.0)}
    found = largest(rounding, blocks_of)
    assert found == GradientDifference(pytest.approx(1e-5), "a.bias", pytest.approx(1.0), below=1, parameters=3)
    assert "1 of 3 too small next to their block" in gradients_check(GradientCheck(found, None), FP32, "").found
    assert largest({"b.weight": (1e-9, 0.0, 0.0)}, blocks_of).relative == float("inf")
    nan = largest({"a.weight": (float("nan"), 1.0, 1.0), "b.weight": (0.0, 1.0, 1.0)}, blocks_of)
    assert gradients_check(GradientCheck(nan, None), FP32, "").ok is False


def test_a_lost_gradient_of_two_percent_of_its_block_fails_in_bf16_too() -> None:
    sums = {"a.norm": (4e-4, 4e-4, 0.0), "a.weight": (0.0, 1.0, 1.0)}
    found = largest(sums, {"a.norm": "a", "a.weight": "a"})
    routed = largest(sums | {"a.experts.w": (0.0, 1.0, 1.0)}, dict.fromkeys(("a.norm", "a.weight", "a.experts.w"), "a"))
    assert (found.below, routed.below) == (0, 1)
    assert routed.relative < found.relative / 2, "where a rounding may send a token to another expert"
    assert found.parameter == "a.norm"
    assert gradients_check(GradientCheck(found, None), limits(torch.bfloat16, 28), "").ok is False


@pytest.mark.parametrize("scale", [1.0, 1.03])
def test_a_wrong_scale_of_all_gradients_fails_though_it_is_less_than_roundings_of_one(
    tmp_path: Path, monkeypatch, scale: float
) -> None:
    monkeypatch.setattr(step, "gradient_scale", lambda _: scale)
    engine, _ = engine_with(tmp_path, tiny_llama(layers=4).to(torch.bfloat16), compile=EAGER, micro=8)
    check = warm(engine)[GRADIENTS]
    assert check.ok is (scale == 1.0), check
    said = float(check.found.split("scale ")[1].split(",")[0])
    assert said == pytest.approx(scale, abs=5e-3)
    assert check.expected.endswith("in every parameter, 1e-02 of the scale")
    assert ("rounding noise alone" in check.found) is (scale != 1.0), "measured where a limit is passed"


def sensitive_llama() -> PreTrainedModel:
    """In bf16, with scores so large that roundings shift attention."""
    orig_model = tiny_llama(layers=4)
    with torch.no_grad():
        for block in orig_model.model.layers:
            block.self_attn.q_proj.weight.mul_(6)
            block.self_attn.k_proj.weight.mul_(6)
    return orig_model.to(torch.bfloat16)


@pytest.mark.parametrize("scaling", [1.0, 1.2])
def test_of_a_model_that_roundings_move_far_they_are_measured_and_a_wrong_attention_still_fails(
    tmp_path: Path, monkeypatch, scaling: float
) -> None:
    right, rounds_otherwise = attention.attend, step.gradients

    def attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return right(module, *args, **kwargs | {"scaling": kwargs["scaling"] * scaling})

    def gradients(wrapped: torch.nn.Module, *args: Any) -> None:
        with rounded_at_random(wrapped):
            rounds_otherwise(wrapped, *args)

    monkeypatch.setattr(attention, "attend", attend)
    monkeypatch.setattr(step, "gradients", gradients)
    monkeypatch.setattr(proof, "limits", lambda *_, **__: RoundingLimits(0.05, 0.015, 0.002))
    engine, _ = engine_with(tmp_path, sensitive_llama(), compile=EAGER)
    check = warm(engine)[GRADIENTS]
    assert "rounding noise alone" in check.found
    assert check.ok is (scaling == 1.0), check


def test_roundings_widen_limits_up_to_a_bound_and_beyond_it_nothing_is_known() -> None:
    same, off = GradientDifference(0.01, "x"), GradientDifference(0.16, "x", scale=0.985)
    bf16 = limits(torch.bfloat16, 4)

    def judged(compiled: GradientDifference, *roundings: float) -> bool | None:
        alone = Roundings(*roundings) if roundings else None
        return gradients_check(GradientCheck(same, compiled, roundings=alone), bf16, "").ok

    assert judged(off) is False
    assert judged(off, 0.01, 0.01) is False, "the parameter"
    assert judged(off, 0.06, 0.001) is False, "the scale"
    assert judged(off, 0.06, 0.006) is True
    assert judged(GradientDifference(0.6, "x"), 0.4, 0.02) is False
    assert judged(GradientDifference(0.6, "x"), 0.6, 0.02) is None
    assert judged(GradientDifference(0.1, "x", scale=1.06), 0.4, 0.04) is False


def test_random_roundings_move_what_modules_put_out_by_half_a_unit_of_its_last_place_at_most() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16))
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    plain = layer(x)
    with rounded_at_random(layer):
        moved = layer(x)
    off = ((moved - plain).abs() / plain.abs().clamp(min=1e-9)).float()
    assert 0 < off.max() <= torch.finfo(torch.bfloat16).eps
    assert 0.2 < (off > 0).float().mean() < 0.8
    assert torch.equal(layer(x), plain), "no hook is left"
    with rounded_at_random(layer.float()):
        assert torch.equal(layer(x.float()), layer[0](x.float()))


def test_gradients_that_queries_lose_are_found_in_bf16(tmp_path: Path, monkeypatch) -> None:
    right = attention.attend

    def wrong(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return right(module, query.detach(), *args, **kwargs)

    monkeypatch.setattr(attention, "attend", wrong)
    engine, _ = engine_with(tmp_path, tiny_llama().to(torch.bfloat16), compile=EAGER)
    check = warm(engine)[GRADIENTS]
    assert check.ok is False, check
    assert "self_attn.q_proj" in check.found


@pytest.mark.parametrize("rows", [slice(-1, None), slice(41, 48)], ids=["the last row", "a chunk"])
def test_a_head_whose_gradient_misses_rows_of_no_documents_token_is_found(tmp_path: Path, monkeypatch, rows) -> None:
    orig_model = tiny_llama()
    kept = torch.ones_like(orig_model.lm_head.weight)
    kept[rows] = 0
    right = ModelWithLoss.sums_of_selected

    def wrong(self: ModelWithLoss, selected: torch.Tensor, batch: Batch) -> Any:
        weight = orig_model.lm_head.weight
        handle = weight.register_hook(lambda gradient: gradient * kept)
        sums = right(self, selected, batch)
        handles.append(handle)
        return sums

    handles: list[Any] = []
    monkeypatch.setattr(gradient_check, "TOKENS", 4)
    monkeypatch.setattr(ModelWithLoss, "sums_of_selected", wrong)
    monkeypatch.setattr(gradient_check.Sides, "_plain", unhooked(gradient_check.Sides._plain, handles))
    engine, _ = engine_with(tmp_path, orig_model, compile=EAGER)
    check = warm(engine)[GRADIENTS]
    assert check.ok is False, check
    assert "lm_head.weight, " in check.found


def unhooked(right: Any, handles: list[Any]) -> Any:
    """What is called after the hooks on parameters are gone."""

    def call(*args: Any) -> Any:
        for handle in handles:
            handle.remove()
        return right(*args)

    return call


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8191, 8192, 12289, 100_000])
def test_no_more_elements_than_documented_are_compared(size: int) -> None:
    places = gradient_check.evenly(size)
    assert min(size, 1365) <= len(places) <= 4096
    assert 0 <= int(places[0]) <= int(places[-1]) < size


def test_a_layer_is_a_block_where_a_model_names_none() -> None:
    # As Marian: a bias of keys has little but rounding errors, which count against the gradient of its layer.
    orig_model = tiny_llama()
    named = gradient_check.block_names(orig_model)
    orig_model._no_split_modules = None
    assert gradient_check.block_names(orig_model) == named
    assert named["model.layers.1.self_attn.k_proj.weight"] == "model.layers.1"
    assert "model.norm.weight" not in named


@pytest.mark.parametrize("kind", ["bucketed", "fixed"])
def test_a_run_with_sdpa_has_its_own_attention_checked(tmp_path: Path, monkeypatch, kind: str) -> None:
    used, right = set[str](), ModelWithLoss.sums

    def sums(self: ModelWithLoss, batch: Batch, backend: str) -> Any:
        used.add(backend)
        return right(self, batch, backend)

    engine, _ = engine_with(tmp_path, tiny_llama(), kind=kind, compile=EAGER, attention_backend="sdpa")
    monkeypatch.setattr(proof, "check_documents", documents_with(proof.check_documents, used))
    monkeypatch.setattr(ModelWithLoss, "sums", sums)
    check = warm(engine)[GRADIENTS]
    assert used == {"sdpa"}
    assert check.ok, check
    assert check.found.startswith("eager: ")


def documents_with(right: Any, used: set[str]) -> Any:
    """The check before, whose attention does not count here."""

    def call(*args: Any) -> Any:
        found = right(*args)
        used.clear()
        return found

    return call


def test_a_kernel_that_stands_in_is_named() -> None:
    check = gradients_check(
        GradientCheck(GradientDifference(0.0, "x"), GradientDifference(0.0, "x"), "", "varlen"), FP32, "flex"
    )
    assert "eager (varlen stands in for flex): " in check.found


@cache
def on_two_ranks() -> dict[str, Any]:
    """What claims_worker found."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(2, "claims_worker.py", f"{folder}/found.json")
        return json.loads(Path(folder, "found.json").read_text())


@pytest.mark.parametrize("case", ["right", "exchanged often"])
def test_the_gradients_of_a_sharded_model_are_those_of_all_ranks_documents(case: str) -> None:
    found = on_two_ranks()[case]["eager"]
    assert 0.0 < found["relative"] < 1e-5
    assert found["scale"] == pytest.approx(1.0, abs=1e-6)


def test_gradients_that_ranks_add_up_wrongly_are_found_as_the_plain_side_does_not_go_through_their_exchange() -> None:
    found = on_two_ranks()["halved"]["eager"]
    assert found["relative"] == pytest.approx(0.5, rel=1e-4)
    assert found["scale"] == pytest.approx(0.5, rel=1e-4)


def test_what_fails_on_another_rank_alone_is_in_the_rows_the_events_and_the_counts_of_the_main_rank() -> None:
    before, logged, failed = (on_two_ranks()["alone"][name] for name in ("before", "logged", "failed"))
    assert all(check["ok"] is not False for check in before["checks"])
    assert before["metrics"]["compile/recompiles"] == 0
    for report in (logged, failed):
        assert report["metrics"]["compile/recompiles"] == 1, "of one block"
        rows = {check["name"]: check for check in report["checks"]}
        late = rows["No recompiles after the warm-up"]
        assert late["ok"] is False
        assert "rank 1: " in late["found"]
        assert "training" in late["found"]
        assert rows[HOOKS]["found"].startswith("rank 1: model.layers.1.mlp: forward hook added")
        events = dict(report["events"])
        assert [text[:8] for text in (*events["recompile"], *events["hook"])] == ["rank 1: "] * 2
