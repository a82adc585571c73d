"""`sftkit explain --kernels` and `--labs`: kinds of work, shares of time, the page; what Inductor makes of them, in slow tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_explain import FAULTS, recipe, subject_of
from torch import nn

from labs.explain import kernels
from labs.explain.experiments import CODE_KINDS, SIZES, Block, labs
from labs.explain.kernels import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    IDLE,
    MATRIX,
    PROFILED_STEPS,
    REDUCTION,
    Timing,
    alternately,
    compiled,
    dispatched,
    kind_of_kernel,
    kind_of_operator,
    kind_shares,
    module_step,
    on_host,
    profiled,
    top,
)
from labs.explain.page import render_page
from labs.explain.run import parse, run_explain
from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_add_mul_0", ELEMENTWISE),
        ("triton_red_fused_mean_mul_pow_rsqrt_3", REDUCTION),
        ("triton_per_fused__softmax_1", REDUCTION),
        ("triton_tem_fused_mm_4", MATRIX),
        ("triton_tem_fused_flex_attention_0", ATTENTION),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", MATRIX),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", MATRIX),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", ATTENTION),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", ATTENTION),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", ELEMENTWISE),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", REDUCTION),
        ("void at::native::elementwise_kernel<128, at::native::direct_copy_kernel_cuda>", COPIES),
        ("Memcpy DtoD (Device -> Device)", COPIES),
        ("Memcpy PtoP (Device -> Device)", COMMUNICATION),
        ("triton_poi_fused_all_gather_into_tensor_split_cat_0", ELEMENTWISE),
    ],
)
def test_a_kernel_of_a_gpu_has_its_kind(name: str, kind: str) -> None:
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", MATRIX),
        ("aten::linear", MATRIX),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION),
        ("aten::_softmax_backward_data", REDUCTION),
        ("aten::mean", REDUCTION),
        ("aten::mul_", ELEMENTWISE),
        ("aten::silu_backward", ELEMENTWISE),
        ("aten::copy_", COPIES),
        ("aten::embedding_dense_backward", COPIES),
        ("gloo:all_reduce", COMMUNICATION),
        ("graph_3_cpp_fused_add_mean_2", REDUCTION),
        ("cpp_fused_add_mul_1", ELEMENTWISE),
        ("aten::transpose", None),
        ("aten::as_strided", None),
        ("autograd::engine::evaluate_function: MmBackward0", None),
        ("## Call CompiledFxGraph abc ##", None),
        ("Torch-Compiled Region: 0/0", None),
    ],
)
def test_an_event_of_a_cpu_has_its_kind_or_computes_nothing(name: str, kind: str | None) -> None:
    assert kind_of_operator(name, {"cpp_fused_add_mean_2": ["aten.add", "aten.mean"]}) == kind


def test_shares_add_up_and_what_overlaps_counts_once() -> None:
    work = [("a", MATRIX, 0.0, 40.0), ("b", ELEMENTWISE, 30.0, 60.0), ("c", ELEMENTWISE, 80.0, 90.0)]
    found = kind_shares(work, wall=100.0)
    assert found == pytest.approx({MATRIX: 0.4, ELEMENTWISE: 0.3, IDLE: 0.3})
    assert [(one["name"], one["launches"]) for one in top(work * PROFILED_STEPS)] == [("a", 1), ("b", 1), ("c", 1)]


def test_two_ways_are_timed_in_turn_by_their_quickest() -> None:
    said: list[str] = []
    slow, quick = alternately(lambda: said.append("a"), lambda: said.append("b"), CPU, calls=3)
    assert said == ["a", "b"] * 5
    assert 0 < slow.quickest <= slow.median
    assert 0 < quick.quickest <= quick.median
    assert Timing(1.0, 2.0).busy
    assert not Timing(1.0, 1.2).busy


def test_nested_operators_are_one_launch() -> None:
    def event(name: str, start: float, end: float, parent: object = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, cpu_parent=parent, time_range=SimpleNamespace(start=start, end=end))

    region = event("Torch-Compiled Region: 0/0", 0, 10)
    product = event("aten::linear", 1, 5, region)
    inner = event("aten::addmm", 2, 4, product)
    kernel = event("graph_0_cpp_fused_mul_0", 6, 8, region)
    work = on_host([region, product, inner, kernel, event("aten::view", 8, 9, region)], {})
    assert [(name, kind) for name, kind, *_ in work] == [
        ("aten::linear", MATRIX),
        ("graph_0_cpp_fused_mul_0", ELEMENTWISE),
    ]


def test_operators_of_an_eager_step_are_counted_and_timed(tmp_path: Path) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        layer(x).sum().backward()

    counted = dispatched(step)
    assert counted.operators["aten.addmm.default"] == 1
    assert counted.operators["aten.mm.default"] == 1  # backward: of the weight alone
    assert counted.views >= 2
    found = profiled(step, CPU, {})
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert {MATRIX, REDUCTION, IDLE} <= found["shares"].keys()
    assert found["launches"] >= 3


def test_a_recipe_is_compiled_as_its_run_would_be(tmp_path: Path) -> None:
    """With a backend that writes no code: two blocks of one kind and the final norm are two graphs."""
    subject = subject_of(recipe(tmp_path))
    step = module_step(subject)
    with compiled(subject, CompileConfig(backend="aot_eager"), tmp_path) as counts:
        step()
    assert (counts["compile/graphs"], counts["compile/graph_breaks"]) == (2, 0)
    assert [(graph["id"], graph["pass"]) for graph in counts["graphs"] if graph["captured_ops"]] == [
        ("0/0", "forward"),
        ("1/0", "forward"),
    ]
    assert all(parameter.grad is None for parameter in subject.module.parameters())


def test_a_recipe_with_symbolic_row_lengths_is_compiled_for_all_of_them(tmp_path: Path) -> None:
    subject = subject_of(recipe(tmp_path), "data.layout=dynamic", "data.pad_multiple=8")
    step = module_step(subject)
    assert subject.other is not None
    with compiled(subject, CompileConfig(backend="eager"), tmp_path) as counts:
        step()
        subject.run(subject.other)  # another row length
    assert counts["compile/graphs"] == 2


def test_options_of_the_compiler_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no option of Inductor.*Did you mean "shape_padding"'):
        subject_of(recipe(tmp_path), "compile.backend=inductor", "compile.options={shape_paddin: true}")


def test_a_name_that_torch_no_longer_has_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_dispatch_keys")
    with pytest.raises(
        ConfigError, match=rf"torch {torch.__version__.partition('+')[0]}.* has no torch._C._dispatch_keys"
    ):
        kernels.dispatch_keys(torch.ones(1))


def test_every_kind_of_code_runs_in_eager() -> None:
    sizes = SIZES["cpu"].__class__(64, 8, 16, 8, torch.float32)
    for kind in CODE_KINDS:
        kind.make(sizes, CPU)(lambda function: function)()
    assert Block(16)(torch.randn(2, 8, 16)).shape == (2, 8, 16)


def made_labs() -> dict:
    row = {
        "name": "a <b>",
        "claim": "2-5x",
        "low": 2.0,
        "high": 5.0,
        "eager_ms": 2.0,
        "compiled_ms": 1.0,
        "speedup": 2.0,
    }
    row |= {"first_seconds": 1.0, "pays_after": 1000, "verdict": "as claimed", "busy": True}
    kernel = {"name": "cpp_fused__softmax_0", "kind": "c++", "launches": 1, "aten": ["aten._softmax"], "nodes": []}
    broken = {"name": "print", "reasons": ["x"], "broken": 1, "graphs": 2, "mended": 0, "remedy": "none"}
    return {
        "pays": {"machine": "CPU (2 cores)", "backend": "inductor", "rows": [row]},
        "softmax": {"kernels": [kernel], "code": []},
        "dispatch": [{"name": "aten::linear", "depth": 0, "keys": ["CPU"]}],
        "breaks": [broken],
        "loss": [{"name": "by an attribute", "graphs": 2, "breaks": 0, "recompiles": 1}],
    }


def made_kernels() -> dict:
    profile = {"seconds": 0.5, "shares": {MATRIX: 0.75, IDLE: 0.25}, "launches": 9, "top": []}
    kernel = {"name": "triton_poi_<x>", "kind": "triton", "launches": 2, "aten": ["aten.mul"], "nodes": ["mul_1"]}
    graph = {"id": "0/0", "pass": "forward", "function": "f", "captured_ops": 3, "aten_ops": 4, "seconds": 1.0}
    counts = {
        "dispatches": 20,
        "views": 5,
        "eager_launches": 15,
        "launches": 9,
        "graphs": 1,
        "breaks": 0,
        "seconds": 2.0,
    }
    return {
        "graphs": [graph | {"kernels": [kernel]}],
        "profiles": {"eager": profile, "compiled": profile},
        "counts": counts,
        "operators": [],
        "busy": False,
        "hints": ["a hint"],
    }


def test_the_page_has_pictures_and_nothing_in_it_is_markup_of_another() -> None:
    facts = {"name": "a <script>", "device": "CPU (2 cores)", "torch": "2.13.0"}
    page = render_page(facts | {"kernels": made_kernels(), "labs": made_labs()})
    assert "default-src &#39;none&#39;" in page
    assert "<script" not in page
    assert "triton_poi_&lt;x&gt;" in page
    assert page.count("<svg") == 3
    assert "matrix products: 375" in page  # a title in the picture: milliseconds
    assert "CPU (2 cores)" in page
    assert page.count("did other work meanwhile") == 1


def test_the_page_has_the_script_of_the_module_at_fault_and_what_was_asked() -> None:
    row = {
        "title": "breaks the graph",
        "module": "blocks.1 (<b>)",
        "where": "m.py:1",
        "said": "x",
        "others": [],
        "alike": ["b.0"],
    }
    row |= {"confirmed": True, "script": "out/breaks.py", "shows": True, "printed": "x", "text": "a < b"}
    row |= {"steps": [{"module": "the whole", "found": "x"}, {"module": "blocks.0", "found": None}]}
    none = {"title": "differs", "module": None, "script": None, "printed": None, "steps": []}
    page = render_page({"name": "x", "device": "CPU", "torch": "2.13.0", "bisect": [row, none]})
    for text in (
        "blocks.1 (&lt;b&gt;)",
        "breaks.py: shows it",
        "a &lt; b",
        "2 modules asked",
        "without fault",
        "look like it: b.0",
    ):
        assert text in page


@pytest.mark.slow
def test_the_kernels_of_a_module_and_what_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", f"{FAULTS}:none", "--kernels", "--out", str(tmp_path)])
    assert run_explain(*parse()) == 0
    found = json.loads((tmp_path / "explain.json").read_text())["kernels"]
    assert found["counts"]["graphs"] == 1
    assert found["counts"]["launches"] < found["counts"]["dispatches"]
    assert {graph["pass"] for graph in found["graphs"]} == {"forward", "backward"}
    made = [kernel for graph in found["graphs"] for kernel in graph["kernels"]]
    assert any(kernel["kind"] == "c++" and kernel["aten"] for kernel in made)
    assert any("cpp_fused" in one["name"] for one in found["profiles"]["compiled"]["top"])
    assert MATRIX in found["profiles"]["compiled"]["shares"]
    assert (tmp_path / "compile/summary.md").exists()
    assert "a training step:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_labs_find_one_softmax_kernel_and_measure_when_compiling_pays(tmp_path: Path) -> None:
    found = labs(CPU, tmp_path)
    own = [kernel for kernel in found["softmax"]["kernels"] if kernel["kind"] == "c++"]
    assert len(own) == 1
    assert "aten._softmax" in own[0]["aten"]
    assert [row["name"] for row in found["pays"]["rows"]] == [kind.name for kind in CODE_KINDS]
    assert all(row["speedup"] > 0 for row in found["pays"]["rows"])


@pytest.mark.gpu
def test_triton_kernels_are_found_in_the_profile_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", f"{FAULTS}:chain", "--kernels", "--out", str(tmp_path)])
    assert run_explain(*parse()) == 0
    found = json.loads((tmp_path / "explain.json").read_text())["kernels"]
    names = [one["name"] for one in found["profiles"]["compiled"]["top"]]
    assert any(name.startswith("triton_") for name in names)
    assert any(
        kernel["kind"] == "triton" and kernel["nodes"] for graph in found["graphs"] for kernel in graph["kernels"]
    )
    assert found["counts"]["launches"] < found["counts"]["eager_launches"]
