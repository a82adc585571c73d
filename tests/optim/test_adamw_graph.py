"""optim.implementation compiled and foreach_map: one graph for all parameters, the same updates, gradients where they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import problems_of
from torch._dynamo.utils import counters

from sftkit.config.schema import OptimConfig
from sftkit.optim.adamw import AdamW, FusedAdamW
from sftkit.optim.adamw_graph import GraphAdamW, build
from sftkit.optim.protocol import Optimizer

NAN = float("nan")
OPTIM = {"name": "adamw", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
every_implementation = pytest.mark.parametrize("implementation", ["compiled", "foreach_map"])


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def parameters(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4 + i, 3, generator=generator).to(dtype)) for i, dtype in enumerate(dtypes)]


def groups_of(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


def make(params: list[torch.nn.Parameter], implementation: str, backend: str = "aot_eager", **more: Any) -> GraphAdamW:
    optim = OptimConfig(**OPTIM, implementation=implementation, **more)
    return build(groups_of(params), optim, seed=3, graph={"backend": backend, "dynamic": None})


def plain(params: list[torch.nn.Parameter]) -> AdamW:
    optim = OptimConfig(**OPTIM)
    return AdamW(groups_of(params), optim, seed=3)


def set_gradients(params: list[torch.nn.Parameter], seed: int, factor: float = 1.0) -> None:
    """As a backward pass does: added to what is there."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p.dtype) * factor
        p.grad = grad if p.grad is None else p.grad.add_(grad)


def steps(params: list[torch.nn.Parameter], optimizer: Optimizer, seeds: list[int | None]) -> None:
    for seed in seeds:
        set_gradients(params, seed or 0, NAN if seed is None else 1.0)
        optimizer.update(1e-2, torch.tensor(NAN if seed is None else 0.5))
        optimizer.zero_grad()


def everything(params: list[torch.nn.Parameter], optimizer: Optimizer) -> dict[str, torch.Tensor]:
    found = {f"weight{i}": p.detach() for i, p in enumerate(params)}
    return found | {f"{name}{i}": value for i, p in enumerate(params) for name, value in optimizer.state[p].items()}


@every_implementation
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32, torch.bfloat16)])
def test_the_updates_are_those_of_adamw_and_the_graph_is_one(
    implementation: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    ours, theirs = parameters(*dtypes), parameters(*dtypes)
    optimizer, reference = make(ours, implementation), plain(theirs)
    counters.clear()
    optimizer.warm_up(compiled=True)
    assert optimizer.kind == reference.kind
    with torch.compiler.set_stance("fail_on_recompile"):
        steps(ours, optimizer, [0, None, 1, 2])
    steps(theirs, reference, [0, None, 1, 2])
    assert counters["stats"]["unique_graphs"] == 1
    found, expected = everything(ours, optimizer), everything(theirs, reference)
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # to the bit: the same operators, the same random bits
        assert torch.equal(found[name], value), name


def test_in_fp32_the_updates_are_those_of_torchs_fused_kernel() -> None:
    ours, theirs = parameters(torch.float32, torch.float32), parameters(torch.float32, torch.float32)
    optimizer = make(ours, "foreach_map")
    fused = FusedAdamW(groups_of(theirs), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, fused=True)
    optimizer.warm_up(compiled=True)
    steps(ours, optimizer, [0, None, 1])
    steps(theirs, fused, [0, None, 1])
    assert optimizer.kind == fused.kind
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@every_implementation
def test_a_warm_up_changes_no_weight_and_a_parameter_without_a_gradient_is_left_alone(implementation: str) -> None:
    ours, theirs = parameters(torch.float32, torch.bfloat16), parameters(torch.float32, torch.bfloat16)
    before = copy.deepcopy(ours)
    optimizer, reference = make(ours, implementation), plain(theirs)
    optimizer.warm_up(compiled=True)
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(ours, before, strict=True))
    assert not any(state.any() for p in ours for name, state in optimizer.state[p].items() if name != "master")
    for params, one in ((ours, optimizer), (theirs, reference)):
        set_gradients(params, 0)
        params[0].grad = None
        one.update(1e-2, torch.tensor(1.0))
    assert torch.equal(ours[0], before[0])
    assert torch.equal(ours[1], theirs[1])


def test_static_gradients_keep_their_memory_and_are_told_to_the_compiler() -> None:
    ours, theirs = parameters(torch.float32, torch.bfloat16), parameters(torch.float32, torch.bfloat16)
    static: list[list[bool]] = []

    def recorder(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        static.append([bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")) for node in places])
        return graph

    optimizer = make(ours, "foreach_map", backend=recorder, static_gradients=True)  # type: ignore[arg-type]
    optimizer.warm_up(compiled=True)
    set_gradients(ours, 0)
    optimizer.update(1e-2, torch.tensor(0.5))
    optimizer.zero_grad()
    addresses = [p.grad.data_ptr() for p in ours if p.grad is not None]
    for seed in (None, 1):
        assert all(p.grad is not None and not p.grad.any() for p in ours)
        steps(ours, optimizer, [seed])
        assert [p.grad.data_ptr() for p in ours if p.grad is not None] == addresses
    steps(theirs, reference := plain(theirs), [0, None, 1])
    for name, value in everything(theirs, reference).items():
        torch.testing.assert_close(everything(ours, optimizer)[name], value, rtol=0, atol=0, msg=name)
    (told,) = static
    tables = 4  # clip and three tables
    assert sum(told) == len(told) - tables

    static.clear()
    torch._dynamo.reset()
    moving = make(parameters(torch.float32, torch.bfloat16), "foreach_map", backend=recorder)  # type: ignore[arg-type]
    moving.warm_up(compiled=True)
    assert sum(static[0]) == len(static[0]) - tables - 2  # and the gradients


@every_implementation
@pytest.mark.parametrize("static_gradients", [False, True])
def test_a_parameter_that_a_step_does_not_reach_decays_only_where_its_gradient_is_kept(
    implementation: str, static_gradients: bool
) -> None:
    """As the setting's words and docs/optimizers.md say: none is left alone, one that is kept is 0."""
    ours, theirs = parameters(torch.float32, torch.float32), parameters(torch.float32, torch.float32)
    optimizer, reference = make(ours, implementation, static_gradients=static_gradients), plain(theirs)
    for params, one in ((ours, optimizer), (theirs, reference)):
        steps(params, one, [0])
        set_gradients(params[1:], 1)  # params[0] gets none
        if one is reference and static_gradients:
            params[0].grad = torch.zeros_like(params[0])
        before = params[0].detach().clone()
        one.update(1e-2, torch.tensor(1.0))
        assert torch.equal(params[0], before) is not static_gradients
    for name, value in everything(theirs, reference).items():
        assert torch.equal(everything(ours, optimizer)[name], value), name


@pytest.mark.slow
@every_implementation
def test_inductor_compiles_the_update(implementation: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    ours, theirs = parameters(*dtypes), parameters(*dtypes)
    optimizer = make(ours, implementation, backend="inductor")
    optimizer.warm_up(compiled=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        steps(ours, optimizer, [0, None, 1])
    steps(theirs, plain(theirs), [0, None, 1])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-6)


@pytest.mark.gpu
@every_implementation
@pytest.mark.parametrize("static_gradients", [False, True])
def test_cuda_graphs_replay_the_update_on_a_gpu(implementation: str, static_gradients: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    ours, theirs = ([torch.nn.Parameter(p.detach().cuda()) for p in parameters(*dtypes)] for _ in range(2))
    optim = OptimConfig(**OPTIM, implementation=implementation, static_gradients=static_gradients)
    optimizer = build(groups_of(ours), optim, seed=3, graph={"mode": "reduce-overhead"})
    optimizer.warm_up(compiled=True)
    reference = plain(theirs)
    counters.clear()
    for seed in (0, 1, 2, 3):
        for params, one in ((ours, optimizer), (theirs, reference)):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                grad = torch.randn(p.shape, generator=generator).to(p)
                p.grad = grad if p.grad is None else p.grad.add_(grad)
            one.update(1e-2, torch.tensor(0.5, device="cuda"))
            one.zero_grad()
    assert counters["inductor"]["cudagraph_skips"] == 0
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["optim.implementation=foreach_map"], "foreach_map only goes with optim.name adamw, not auto"),
        (["optim.implementation=compiled", "optim.name=muon"], "compiled only goes with optim.name adamw, not muon"),
        (["optim.implementation=compiled", "optim.name=adamw", "compile.enabled=false"], "nothing is compiled"),
        (["optim.static_gradients=true"], "only goes with optim.implementation compiled or foreach_map, not auto"),
        (["optim.implementation=foreach"], 'Did you mean "foreach_map"?'),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, words: list[str], wanted: str) -> None:
    (problem,) = problems_of(tmp_path, words)
    assert wanted in problem
