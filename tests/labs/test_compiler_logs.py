"""The compiler's logs in a folder: what is written where, and what is read out of generated code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from helpers import scalar_kernels
from torch._dynamo import utils as dynamo_utils
from torch.nn import functional as F

from labs.explain.compiler_logs import CompilerFiles, compiler_logs, kernels, torch_loggers
from sftkit.compile.contract import compiler_switches
from sftkit.config.schema import CompileConfig
from sftkit.errors import ConfigError


@pytest.fixture(autouse=True)
def _logs_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    torch._dynamo.reset()
    dynamo_utils.clear_compilation_metrics()
    caches = {"fx_graph_cache": True}, {"enable_autograd_cache": True}
    with scalar_kernels(), torch._inductor.config.patch(caches[0]), torch._functorch.config.patch(caches[1]):
        yield
    torch._dynamo.reset()


@contextmanager
def logged(out: Path, *logs: str) -> Iterator[Callable[[], list]]:
    """As sftkit explain has it: the logs, then the switches."""
    with compiler_logs(out, logs) as write, compiler_switches(CompileConfig()):
        yield write


def state_of_logs() -> list[tuple]:
    """Level, handlers and their filters of every logger of torch; set_logs makes its own handler anew each time."""
    names = sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch")
    loggers = [logging.getLogger(name) for name in names]
    return [
        (logger.name, logger.level, logger.propagate, list(logger.filters), [as_values(h) for h in logger.handlers])
        for logger in loggers
    ]


def as_values(handler: logging.Handler) -> tuple:
    return type(handler), handler.level, type(handler.formatter), list(handler.filters)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An RMS norm, a gate, a matrix product: two kernels that the compiler writes and one that it calls."""
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.silu(x @ weight)


def inputs(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "compile/summary.json").read_text())


@pytest.mark.parametrize("asked", [False, True])
def test_hints_say_why_no_cuda_graph_was_recorded_only_where_one_was_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], asked: bool
) -> None:
    hints = tmp_path / "compile/perf_hints.txt"
    with compiler_logs(tmp_path, ["perf_hints"], cuda_graphs=asked):
        torch._logging.getArtifactLogger("torch._inductor.scheduler", "cudagraphs").debug("op0: no graph of it")
        torch._logging.getArtifactLogger("torch._inductor.ir", "perf_hints").info("Using FallbackKernel")
    assert "Using FallbackKernel" in hints.read_text()
    assert ("op0: no graph of it" in hints.read_text()) == asked
    assert "op0" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_graphs_kernels_and_hints_of_a_compile_are_in_the_run_folder_and_not_on_the_terminal(tmp_path, capfd) -> None:
    with logged(tmp_path, "graphs", "output_code", "perf_hints") as write:
        torch.compile(gated, dynamic=False)(*inputs()).sum().backward()
        write()
    folder = tmp_path / "compile"

    graphs = (folder / "graphs.txt").read_text()
    assert "torch.nn.functional.silu(" in graphs  # as Dynamo captured it
    assert "torch.ops.aten.rsqrt.default(" in graphs  # as AOTAutograd made it
    assert "Backward graph" in graphs
    assert graphs.startswith("[0/0] TRACED GRAPH")
    assert "padding on CPU" in (folder / "perf_hints.txt").read_text()
    terminal = "".join(capfd.readouterr())
    assert "TRACED GRAPH" not in terminal
    assert "async_compile" not in terminal

    forward, backward = summary(tmp_path)["graphs"]
    assert (forward["id"], forward["pass"], backward["id"], backward["pass"]) == ("0/0", "forward", "0/0", "backward")
    assert forward["function"].startswith("gated (test_compiler_logs.py:")
    assert forward["captured_ops"] == 7  # pow, mean, add, rsqrt, mul, matmul, silu
    assert forward["aten_ops"] >= 7
    assert forward["seconds"] > 0 < backward["seconds"]
    code = (tmp_path / "compile" / forward["files"][0]).read_text()
    norm, product, gate = forward["kernels"]
    assert norm["kind"] == gate["kind"] == "c++"
    assert norm["aten"] == ["aten.add", "aten.mean", "aten.mul", "aten.pow", "aten.rsqrt"]
    assert gate["aten"] == ["aten.silu"]
    assert (product["name"], product["kind"], product["aten"]) == ("extern_kernels.mm", "library", ["aten.mm"])
    assert f"{norm['name']} = async_compile" in code
    assert "silu_backward" in str(backward["kernels"])

    page = (tmp_path / "compile/summary.md").read_text()
    assert "| 0/0 forward | gated (test_compiler_logs.py:" in page
    assert f"| `{norm['name']}` | 1 | add, mean, mul, pow, rsqrt |" in page


def test_a_graph_that_is_in_a_cache_is_logged_all_the_same(tmp_path) -> None:
    torch.compile(gated, dynamic=False)(*inputs())  # now it is
    torch._dynamo.reset()
    with logged(tmp_path, "output_code") as write:
        hits = dynamo_utils.counters["inductor"]["fxgraph_cache_hit"]
        torch.compile(gated, dynamic=False)(*inputs())
        write()
    assert dynamo_utils.counters["inductor"]["fxgraph_cache_hit"] == hits
    assert summary(tmp_path)["graphs"][0]["aten_ops"] >= 7


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_handlers_filters_and_levels_are_as_before_even_after_an_error(tmp_path, capsys, fails) -> None:
    torch._logging.set_logs()  # what torch sets at its first use stays
    before = state_of_logs()
    error = pytest.raises(ValueError, match="in a step") if fails else nullcontext()
    with error, logged(tmp_path, "graphs", "output_code", "perf_hints"):
        assert state_of_logs() != before
        assert all(any(isinstance(h, CompilerFiles) for h in logger.handlers) for logger in torch_loggers())
        if fails:
            raise ValueError("in a step")
    assert state_of_logs() == before
    torch.compile(gated, backend="eager", dynamic=False)(*inputs())
    assert "TRACED GRAPH" not in "".join(capsys.readouterr())
    assert not (tmp_path / "compile/graphs.txt").exists()


def test_the_logs_of_an_earlier_call_are_deleted(tmp_path) -> None:
    old = tmp_path / "compile/output_code/9_9-forward.py"
    old.parent.mkdir(parents=True)
    old.write_text("of an earlier call")
    with logged(tmp_path, "output_code"):
        assert not old.exists()


def test_torch_logs_in_the_environment_is_refused_because_torch_lets_it_win(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    refused = pytest.raises(ConfigError, match=r"TORCH_LOGS.*unset it")
    with refused, logged(tmp_path, "graphs"):
        pass
    assert not (tmp_path / "compile").exists()


def test_other_messages_of_torch_still_reach_the_terminal(tmp_path, capsys) -> None:
    with logged(tmp_path, "graphs"):
        logging.getLogger("torch._inductor").warning("something else")
        assert "something else" in capsys.readouterr().err


@pytest.mark.slow
def test_the_code_that_is_compiled_is_the_same_with_the_logs_on(tmp_path) -> None:
    from torch._inductor.utils import fresh_cache, run_and_get_code

    with fresh_cache():
        _, (plain, *_) = run_and_get_code(torch.compile(gated, dynamic=False), *inputs())
    torch._dynamo.reset()
    with logged(tmp_path, "graphs", "output_code", "perf_hints"):
        torch.compile(gated, dynamic=False)(*inputs())
    (code_file,) = (tmp_path / "compile/output_code").iterdir()

    def body(code: str) -> str:
        return code[code.index("async_compile = ") :].strip()

    assert body(code_file.read_text()) == body(plain)


TRITON = """# AOT ID: ['0_forward']
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
alloc_from_pool = torch.ops.inductor._alloc_from_pool
async_compile = AsyncCompile()


# kernel path: /cache/ab/cab.py
# Topologically Sorted Source Nodes: [hidden_states, pow_1], Original ATen: [aten._to_copy, aten.pow]
# Source node to ATen node mapping:
#   pow_1 => pow_1
# Graph fragment:
#   %primals_1 : Tensor "bf16[1, 16384, 1024][16777216, 1024, 1]cuda:0" = PlaceHolder[target=primals_1]
#   %pow_1 : [num_users=1] = call_function[target=torch.ops.aten.pow.Tensor_Scalar](args = (%convert, 2), kwargs = {})
#   return %mul_1
triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0 = async_compile.triton('triton_per_fused__to_copy_add_mean', '''
import triton
@triton.jit
def triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0(in_out_ptr0, in_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (r0_1 + 1024*x0), r0_mask, other=0.0).to(tl.float32)
''', device_str='cuda')


async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        primals_1, primals_2, primals_3 = args
        args.clear()
        assert_size_stride(primals_1, (1, 16384, 1024), (16777216, 1024, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((1, 16384, 1), (16384, 1, 16384), torch.float32)
            # Topologically Sorted Source Nodes: [hidden_states, pow_1, variance, add, rsqrt, mul], Original ATen: [aten._to_copy, aten.pow, aten.mean, aten.add, aten.rsqrt, aten.mul]
            # [Provenance debug handles] triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0:1
            stream0 = get_raw_stream(0)
            triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0.run(buf1, primals_1, 16384, 1024, stream=stream0)
            buf2 = empty_strided_cuda((16384, 2048), (2048, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
            extern_kernels.mm(reinterpret_tensor(buf1, (16384, 1024), (1024, 1), 0), primals_3, out=buf2)
            # Topologically Sorted Source Nodes: [linear_1], Original ATen: [aten.mm]
            extern_kernels.mm(reinterpret_tensor(buf1, (16384, 1024), (1024, 1), 0), primals_3, out=buf3)
            # Topologically Sorted Source Nodes: [attention], Original ATen: [sftkit.flash_attention]
            buf4 = torch.ops.sftkit.flash_attention.default(buf2, buf3, buf3, primals_2, 2048, 0.125)
            assert_size_stride(buf4, (16384, 16, 128), (2048, 128, 1), 'torch.ops.sftkit.flash_attention.default')
            # Topologically Sorted Source Nodes: [], Original ATen: []
            buf5 = torch.ops.sftkit.gather_chunks.default(buf4)
            # Unsorted Source Nodes: [silu, mul_2], Original ATen: [aten.silu, aten.mul]
            triton_poi_fused_mul_silu_1_xnumel = 16384*s0
            stream0 = get_raw_stream(0)
            triton_poi_fused_mul_silu_1.run(buf5, buf6, 50331648, stream=stream0)
            # Topologically Sorted Source Nodes: [pow_2], Original ATen: [aten.pow, aten.neg]
            stream0 = get_raw_stream(0)
            triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0.run(buf7, buf6, 16384, 1024, stream=stream0)
            del buf6
        return (buf7, )

def get_args():
    return [rand_strided((8, 16), (16, 1), device='cuda:0', dtype=torch.float32)]
"""


def test_each_launch_of_generated_triton_code_is_found_with_the_operators_it_came_from() -> None:
    norm, product, attention, gather, gate = kernels(TRITON)
    assert (norm["name"], norm["kind"]) == ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "triton")
    assert norm["launches"] == 2  # of one definition
    # In the order of the captured graph, and what the second launch adds.
    assert " ".join(norm["aten"]).replace("aten.", "") == "_to_copy pow mean add rsqrt mul neg"
    assert norm["nodes"] == ["hidden_states", "pow_1", "variance", "add", "rsqrt", "mul", "pow_2"]
    assert (product["name"], product["launches"], product["aten"]) == ("extern_kernels.mm", 2, ["aten.mm"])
    assert (attention["kind"], attention["aten"]) == ("library", ["sftkit.flash_attention"])
    assert gather["aten"] == ["sftkit.gather_chunks"]  # torch names no origin, so the call itself
    assert (gate["kind"], gate["aten"]) == ("triton", ["aten.silu", "aten.mul"])


def test_a_kernel_without_a_comment_is_read_by_the_operators_in_its_name() -> None:
    code = """async_compile.wait(globals())
        cpp_fused__to_copy_native_layer_norm_silu_backward_3(buf0, buf1)
        my_own_kernel_0.run(buf1, stream=stream0)
        triton_poi_fused_0.run(buf1, 8, stream=stream0)
        buf2 = empty_strided_cpu((8, 1), (1, 8), torch.float32)
    """
    fused, own, copies = kernels(code)
    assert fused["aten"] == ["aten._to_copy", "aten.native_layer_norm", "aten.silu_backward"]
    assert copies["aten"] == []  # a number is no operator
    assert own["aten"] == ["my_own_kernel_0"]
