"""Experts by grouped products are those of transformers, and no gradient of theirs is an addition by number."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import preloaded
import pytest
import test_towers
import torch
from checkpoint_worker import Run
from helpers import cpu_runtime, make_batch, make_examples
from safetensors.torch import load_file
from test_gpt_oss import gpt_oss
from test_models import build
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from sftkit.config.schema import LossConfig, ModelConfig
from sftkit.models.experts import EXPERTS_IMPLEMENTATION, ChosenExperts, compute_experts_here
from sftkit.models.load import load_model
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.grouped import grouped_product
from sftkit.rundir.names import step_dir
from sftkit.verify.plain import PlainModel

FAMILIES = ("gpt_oss", "llama4_text", "nemotron_h", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3", "lfm2_moe")
SLOW = FAMILIES[3:]
every_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAMILIES]
)
BY_NUMBER = ("index_put", "index_add", "scatter_reduce")
IDS = torch.randint(0, 60, (2, 33), generator=torch.Generator().manual_seed(0))


class Additions(TorchDispatchMode):
    """Notes the operators that add by number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {name for name in BY_NUMBER if func.__name__.startswith(name)}
        return func(*args, **(kwargs or {}))


class Products(TorchDispatchMode):
    """Counts the rows of grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.sftkit.grouped_product.default:
            self.rows.append(len(args[0]))
        assert func is not torch.ops.aten.bmm.default or args[0].shape[-1] != 32, "all experts at once"
        return func(*args, **(kwargs or {}))


def plain(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """With transformers' own loop over experts, and larger weights, so that experts differ."""
    model = gpt_oss() if family == "gpt_oss" else build(family)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and family != "gpt_oss":
                parameter.mul_(4.0)
    return model.to(dtype)


def logits_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor], set[str]]:
    with Additions() as additions:
        logits = model(IDS, use_cache=False).logits
        (logits.float().square().mean() * 10).backward()
    return (
        logits.detach(),
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        additions.found,
    )


@every_family
def test_logits_and_gradients_are_those_of_transformers_and_nothing_is_added_by_number(family: str) -> None:
    model = plain(family)
    ours = copy.deepcopy(model)
    compute_experts_here(ours)
    wanted, exact, added = logits_and_gradients(model)
    found, gradients, ours_added = logits_and_gradients(ours)
    assert bool(added) == (family != "llama4_text")
    assert not ours_added
    assert gradients.keys() == exact.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for name, gradient in exact.items():
        assert float(gradient.norm()) > 0, name
        assert float((gradients[name] - gradient).norm() / gradient.norm()) < 1e-4, name


def test_biases_of_experts_have_the_sums_of_their_rows_in_bf16_too() -> None:
    """Sums of 500 numbers in bf16 would be wrong by more than their rounding if they were not summed in fp32."""
    from sftkit.ops.grouped import by_expert, rows_of_experts

    chosen = torch.randint(0, 4, (2000,), generator=torch.Generator().manual_seed(0))
    chosen[chosen == 2] = 1
    chosen[:7] = 4  # of no expert
    numbers, _, _, ends = by_expert(chosen, 4)
    bias = torch.zeros(4, 16, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.rand(2000, 16).bfloat16()
    gradient[-7:] = torch.nan
    rows_of_experts(bias, numbers, ends).backward(gradient)
    wanted = torch.stack([gradient[numbers == n].double().sum(0) for n in range(4)])
    assert bias.grad is not None
    assert (bias.grad[2] == 0).all()
    torch.testing.assert_close(bias.grad.double(), wanted, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_one_operator_and_gradients_have_the_strides_of_the_matrices(transposed: bool) -> None:
    """In bf16, too, where torch could trace the product: Inductor may give its operands strides that a GPU rejects."""
    rows = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, *((16, 8) if transposed else (8, 16)), dtype=torch.bfloat16, requires_grad=True)

    def gradients(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ends = torch.tensor([8, 11, 24], dtype=torch.int32)
        y = grouped_product(rows, weight.transpose(1, 2) if transposed else weight, ends)
        return torch.autograd.grad(y.square().sum(), (rows, weight))

    called = [node.target for node in make_fx(gradients)(rows, weight).graph.nodes]
    assert called.count(torch.ops.sftkit.grouped_product.default) == 2
    assert torch.ops.aten._grouped_mm.default not in called
    with FlopCounterMode(display=False) as counter:
        _, of_weight = gradients(rows, weight)
    assert of_weight.stride() == weight.stride()
    assert counter.get_total_flops() == 3 * 2 * rows.numel() * 8


def test_llama_4_multiplies_the_rows_of_chosen_experts_only() -> None:
    model = plain("llama4_text")
    compute_experts_here(model)
    layers = sum(isinstance(module, ChosenExperts) for module in model.modules())
    with Products() as products, torch.no_grad():
        model(IDS, use_cache=False)
    assert products.rows == [IDS.numel()] * 2 * layers
    assert layers == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loaded_model_has_our_products_and_the_plain_model_those_of_transformers(
    tmp_path: Any, tokenizer: Any, precision: Any
) -> None:
    build("qwen3_moe", vocab_size=576).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), tokenizer, 0, precision)
    assert model.config._experts_implementation == EXPERTS_IMPLEMENTATION
    other = PlainModel(ModelWithLoss(model, "reference", NextToken(LossConfig())), torch.device("cpu"))
    assert other.orig_model.config._experts_implementation in ("grouped_mm", "eager")
    model.save_pretrained(tmp_path / "saved")
    assert EXPERTS_IMPLEMENTATION not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_and_resumed_ends_with_the_bits_of_the_uninterrupted_one(
    tmp_path: Any, tokenizer: Any, family: str
) -> None:
    """On as many threads as there are, with rows for every expert."""

    def model() -> PreTrainedModel:
        made = plain(family)
        compute_experts_here(made)
        return made

    whole = Run(tmp_path / "whole", tokenizer, cpu_runtime(), model=model())
    losses = whole.steps(0, 4, every=2, wait=True)
    again = Run(tmp_path / "again", tokenizer, cpu_runtime(), model=model())
    again.checkpoints.resume(str(step_dir(tmp_path / "whole", 2)))
    assert again.steps(2, 4) == losses[2:]
    for (name, ours), theirs in zip(again.orig_model.named_parameters(), whole.orig_model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_gradients_have_the_same_bits_each_time_in_packed_rows() -> None:
    model = plain("gpt_oss")
    compute_experts_here(model)
    ours = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    batch = make_batch(make_examples([100, 90, 60, 5], target_share=1.0), ((0, 1, 2, 3),), 256)
    found = []
    for _ in range(3):
        model.zero_grad()
        ours(batch).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


RUN = (
    *("train.max_steps=6", "train.global_batch_size=2", "train.micro_batch_size=1", "checkpoint.every=2"),
    *("checkpoint.keep=3", "compile.enabled=false", "attention.backend=reference", "eval.tasks=[]", "eval.samples=0"),
    *("data.max_length=128", "data.row_length=256", "log.wandb=off", "model.chat_template=null"),
    *(f"data.{part}=[{{path: 'builtin:tasks', max_rows: 40}}]" for part in ("train", "val")),
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "qwen3_5"])
def test_a_script_that_is_killed_and_resumed_ends_with_the_bits_of_the_uninterrupted_one(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """On two threads. Of Qwen3.5 the text model of one that reads pictures, with dropout."""
    start = tmp_path / "start"
    if family == "qwen3_5":
        text, *others = test_towers.FAMILIES[family]
        monkeypatch.setitem(test_towers.FAMILIES, family, (text | {"attention_dropout": 0.2}, *others))
        test_towers.start(start, family)
    else:
        made = gpt_oss(vocab_size=576) if family == "gpt_oss" else build(family, vocab_size=576)
        made.save_pretrained(start)
    tokenizer.save_pretrained(start)
    words = [*RUN, f"model.path={start}", f"data.cache_dir={tmp_path}/cache"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "2"}

    def run(name: str, *more: str) -> None:
        given = ["scripts/chat_sft.py", "recipes/smoke/sft.yaml", *words, f"run.dir={tmp_path}/{name}", *more]
        done = preloaded.run(given, 1, env)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    run("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(step_dir(tmp_path / "killed", 6))
    shutil.rmtree(step_dir(tmp_path / "killed", 4))
    (tmp_path / "killed" / "LATEST").write_text("step-000002\n")
    run("killed", "train.resume=auto")
    for step in (4, 6):
        ours, theirs = (step_dir(tmp_path / name, step) for name in ("killed", "whole"))
        files = [path.name for path in theirs.glob("*.safetensors")]
        assert files
        for file in files:
            wanted = load_file(theirs / file)
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in load_file(ours / file).items()), file
