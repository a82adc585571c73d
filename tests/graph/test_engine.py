"""The graph engine computes what one eager process does, on one process and on two, in every loss and every gradient."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_worker import MODELS, config, train
from helpers import cpu_runtime, make_examples, make_layout_of, torchrun
from made_models import tiny_gemma2
from transformers import T5Config

from sftkit.config.topology import Topology
from sftkit.engine.engine import Training
from sftkit.errors import ConfigError
from sftkit.graph.engine import check_possible
from sftkit.objectives.objective import NextToken
from sftkit.train.assemble import make_engine

BLOCKS = "reshard_after_forward,block_bucketing"
FLEX = f"llama; flex; {BLOCKS}"
WIDE = f"wide llama; graph; {BLOCKS}"
SUMMED = "wide llama; graph; gather_once,reduce_once,block_bucketing"
FOUR_MICRO_BATCHES = "deepseek_v3; graph; gather_once,reduce_once,block_bucketing; tp"
GATHERED = "uneven llama; graph; gather_once,reduce_once,block_bucketing"
TWO = (WIDE, SUMMED)
LOPSIDED = f"lopsided deepseek_v3; graph; {BLOCKS}; tp"
SLOW_TENSOR = (
    "qwen3; flex; ; tp",
    LOPSIDED,
    FOUR_MICRO_BATCHES,
)
ORDERED = (
    f"llama; graph; {BLOCKS},full_inductor",
    "llama; graph; reshard_after_forward,auto_bucketing,full_inductor",
)
COMPILED = (
    *ORDERED,
    "deep llama; graph; gather_once,block_bucketing,full_inductor",
)
COMPILED_TENSOR = ("experts of deepseek_v3; graph; reshard_after_forward,full_inductor; tp",)
"Regions are compiled in runs of scripts (test_graph_scripts.py)."
AUTO = "deep llama; graph; reshard_after_forward,auto_bucketing"
SAME_BITS = (
    "deep llama; graph; reshard_after_forward",
    f"deep llama; graph; {BLOCKS}",
    AUTO,
)
SAME_BITS_KEPT = (
    "deep llama; graph",
    "deep llama; graph; gather_once,block_bucketing",
)
BF16_SUMMED = (
    "bf16 llama; graph; reduce_once",
    "bf16 llama; graph; reduce_once,full_inductor",
    "bf16 llama; graph; reduce_once; tp",
)
BF16 = (
    "bf16 llama; graph; reshard_after_forward",
    "bf16 wide llama; graph; reshard_after_forward",
    *BF16_SUMMED,
)
"Compared with what rounds alike: their own plain model, in the checks."
SLOW_TWO = (
    *SAME_BITS,
    *SAME_BITS_KEPT,
    GATHERED,
    FLEX,
    "llama; sdpa bucketed; gather_once,reduce_once,block_bucketing",
    "qwen3; eager",
    "qwen3; graph; gather_once,reduce_once",
    f"wide llama; graph; {BLOCKS}; tp",
    "experts of deepseek_v3; graph; reshard_after_forward",
    *BF16,
)
CHECKS = {
    "Same logits as the plain model",
    "Loss equals plain cross entropy",
    "Documents in a row do not see each other",
    "Same gradients as the plain model",
    "Compiled step computes what eager does",
    "The step is compiled",
    "No recompiles after the warm-up",
    "The step runs the hooks that the model has",
}


@cache
def ranks(processes: int, *cases: str, gpus: bool = False) -> dict[str, dict[str, Any]]:
    """What graph_worker found of these cases with so many ranks, gloo or each with a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(processes, "graph_worker.py", f"{folder}/found.json", *cases, timeout=1500, gpus=gpus)
        return json.loads(Path(folder, "found.json").read_text())


@cache
def alone(model: str, layout: str = "packed") -> dict[str, Any]:
    """One process, eager, the engine that everything else is trained with."""
    return train(cpu_runtime(), model, config("blocks", layout=layout))


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["names"] == expected["names"]
    assert actual["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, theirs in expected["gradients"].items():
        ours, plain = torch.tensor(actual["gradients"][name]), torch.tensor(theirs)
        assert (ours - plain).norm() <= 1e-5 * plain.norm(), name


def check_proved(result: dict[str, Any], shapes: int = 1) -> None:
    one_document = {"Documents in a row do not see each other"}
    stood_in = one_document if result["attention"] in ("flex", "sdpa") else set()
    assert {name for name, ok in result["checks"].items() if ok} >= CHECKS - stood_in
    assert False not in result["checks"].values()
    assert result["metrics"]["compile/graphs"] == shapes
    assert result["metrics"]["compile/recompiles"] == 0


@pytest.mark.slow
def test_one_process_by_its_graph_computes_what_it_does_eagerly() -> None:
    found = train(cpu_runtime(), "llama", config("graph"))
    same(found, alone("llama"))
    check_proved(found)
    assert [stage["counts"]["collectives"] for stage in found["stages"]] == [{}, {}, {}]


LAUNCHES = (TWO, SLOW_TWO, SLOW_TENSOR, COMPILED, COMPILED_TENSOR)
"Cases that ranks run one after the other."
SLOW = [
    pytest.param(case, marks=pytest.mark.slow)
    for case in (*SLOW_TWO, *SLOW_TENSOR, *COMPILED, *COMPILED_TENSOR)
    if case not in BF16
]


@pytest.mark.parametrize("case", [*TWO, *SLOW])
def test_two_ranks_compute_what_one_eager_process_does(case: str) -> None:
    found = ranks(2, *next(cases for cases in LAUNCHES if case in cases))[case]
    model, how, *_ = case.split("; ")
    how, *layout = how.split()
    same(found, alone(model, *layout))
    whole = sum(p.numel() for p in MODELS[model]().parameters())
    assert (
        found["local_elements"] == whole / 2
        if "uneven" not in model and "wide" not in model
        else whole / 2 < found["local_elements"] < 0.51 * whole
    )
    if how != "eager":
        check_proved(found, shapes=2 if layout == ["bucketed"] else 1)
    else:
        assert found["checks"]["Same gradients as the plain model"] is True
        assert found["stages"] == []


FOUR = (
    f"wide llama; graph; {BLOCKS}",
    "qwen3; graph; reshard_after_forward,auto_bucketing",
    "wide llama; graph; reduce_once,block_bucketing",
)
FOUR_AND_BF16 = (*FOUR, BF16[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_two_copies_of_two_shards_compute_what_one_eager_process_does(case: str) -> None:
    found, model = ranks(4, *FOUR_AND_BF16)[case], case.partition(";")[0]
    same(found, alone(model))
    check_proved(found)
    half = sum(p.numel() for p in MODELS[model]().parameters()) / 2
    assert half <= found["local_elements"] <= half * 1.001  # a table of an odd number of rows
    summed = [line for line in found["stages"][0]["text"].splitlines() if ".all_reduce.default(" in line]
    assert len(summed) == collectives(case, {case: found})["joint captured"]["all-reduce"] > 0
    # The gradient of a table that is looked up in shards is one from the start: no reduce-scatter comes before.
    others = [line for line in summed if ".all_reduce.default(wait_tensor" not in line]
    assert len(others) == ("wide" in model), "copies sum shards, not whole gradients"


FOUR_TENSOR = (
    "qwen3; graph; reshard_after_forward,auto_bucketing; tp",
    "deep llama; eager; ; tp",
    f"experts of deepseek_v3; flex; {BLOCKS}; tp",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR_TENSOR)
def test_two_shards_of_two_tensor_parallel_ranks_compute_what_one_eager_process_does(case: str) -> None:
    found, (model, how, *_) = ranks(4, *FOUR_TENSOR)[case], case.split("; ")
    same(found, alone(model))
    assert found["local_elements"] == sum(p.numel() for p in MODELS[model]().parameters()) / 4
    if how != "eager":
        check_proved(found)


def collectives(case: str, results: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Of each graph of a case, after each pass."""
    return {f"{stage['graph']} {stage['after']}": stage["counts"]["collectives"] for stage in results[case]["stages"]}


def test_passes_change_how_often_ranks_exchange_as_they_say() -> None:
    of_blocks = collectives(WIDE, ranks(2, *TWO))
    # A block has 9 weights, norms among them; behind it are the final norm and the head. The table is looked up in shards:
    # token ids and rows in the forward pass, the gradients of rows in the backward pass.
    weights, table = 9 + 2, 1
    assert of_blocks["joint captured"] == {"all-gather": weights + 2 * table, "reduce-scatter": weights + table}
    assert of_blocks["forward split"] == {"all-gather": weights + table, "reduce-scatter": table}
    assert of_blocks["forward block_bucketing"] == {"all-gather": 2 + table, "reduce-scatter": table}
    again = weights - 1  # not the head
    assert of_blocks["backward split"] == {"all-gather": again + table, "reduce-scatter": weights}
    assert of_blocks["backward block_bucketing"] == {"all-gather": 2 + table, "reduce-scatter": 2}


def test_a_large_table_is_looked_up_in_shards_and_never_gathered() -> None:
    found = ranks(2, *TWO)[WIDE]
    text = next(stage["text"] for stage in found["stages"] if stage["graph"] == "joint")
    gathered = re.findall(r'"\w+\[(\d+)[^"]*" = torch\.ops\._c10d_functional\.all_gather_into_tensor', text)
    assert gathered.count("4100") == 1, "the head alone, padded to an even number of rows"


def test_a_block_is_gathered_and_reduced_from_and_to_where_its_tensors_lie() -> None:
    """Merging adds no operator that computes or copies, only those that name the parts of what one collective gives."""
    texts = {(s["graph"], s["after"]): s["text"] for s in ranks(2, *TWO)[WIDE]["stages"]}
    for half in ("forward", "backward"):
        before, after = (
            sorted(re.findall(r"= (torch\.ops\.aten\.[\w.]+|operator\.\w+)", texts[half, at]))
            for at in ("split", "block_bucketing")
        )
        assert before == after, half
        assert "_tensor_coalesced.default([" in texts[half, "block_bucketing"]


@pytest.mark.slow
def test_tensor_parallel_ranks_exchange_activations_and_not_matrices() -> None:
    found = collectives(LOPSIDED, ranks(2, *SLOW_TENSOR))
    # Whole weights: embedding, final norm and head; of a block two norms and the four modules of the latents; the router, and
    # the three matrices of the shared expert.
    weights = 3 + 2 * 6 + 4
    # Gathered before attention and the dense layer, and for the experts: tokens, what they visit, and with which weight.
    # Added up behind attention, the dense layer and the experts. In the backward pass the other way round; no numbers.
    gathered, added_up = 3 + 3, 2 + 1 + 1
    assert found["joint captured"] == {
        "all-gather": weights + gathered + added_up,
        "reduce-scatter": weights + gathered - 1 + added_up,
    }
    assert found["forward block_bucketing"] == {"all-gather": 4 + gathered, "reduce-scatter": added_up}


def test_the_micro_batches_of_a_step_gather_weights_once_and_the_last_reduces_gradients_for_all() -> None:
    weights, rows = 12 - 1, 1  # a table is looked up where it lies: its rows are added up in each forward pass
    plain, summed = (ranks(2, *TWO)[case] for case in (WIDE, SUMMED))
    count, table = summed["micro_batches"], 2  # token ids, and the gradients of rows
    assert count == plain["micro_batches"] == 2
    again = 10  # in the backward pass, where weights are not kept for it: not the head
    assert plain["gathered"] == count * (weights + again + table)
    assert summed["gathered"] == weights + count * table
    assert plain["reduced"] == count * (weights + rows)
    assert summed["reduced"] == weights + count * rows
    passes = collectives(SUMMED, ranks(2, *TWO))
    assert passes["forward block_bucketing"] == {"all-gather": 2 + 1, "reduce-scatter": 1}
    assert passes["later-forward block_bucketing"] == {"all-gather": 1, "reduce-scatter": 1}
    assert passes["first-backward block_bucketing"] == {"all-gather": 1}  # the gradients of the table's rows
    assert passes["backward block_bucketing"] == {"all-gather": 1, "reduce-scatter": 2}


@pytest.mark.slow
def test_micro_batches_between_the_first_and_the_last_only_add() -> None:
    found = ranks(2, *SLOW_TENSOR)[FOUR_MICRO_BATCHES]
    assert found["micro_batches"] == 4
    passes = collectives(FOUR_MICRO_BATCHES, ranks(2, *SLOW_TENSOR))
    activations = {"all-gather": 4, "reduce-scatter": 5}
    assert passes["first-backward block_bucketing"] == passes["middle-backward block_bucketing"] == activations
    assert passes["backward reduce_once"] == {"all-gather": 4, "reduce-scatter": 5 + 3 + 2 * 6 + 4}


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16_SUMMED)
def test_bf16_gradients_are_summed_whole_in_fp32(case: str) -> None:
    """With and without the operators of Inductor, which casts by another one; and by four micro-batches. The engine's own check
    runs the micro-batches of a step."""
    found = ranks(2, *SLOW_TWO)[case]
    assert found["checks"]["Same gradients as the plain model"] is True
    if "; tp" in case:
        assert found["micro_batches"] == 4
    else:
        assert found["reduced"] == 12
        reductions = reductions_of(found)
        assert len(reductions) == 12
        assert all(': "f32[' in line for line in reductions)
    last = next(s["text"] for s in found["stages"] if (s["graph"], s["after"]) == ("backward", "reduce_once"))
    assert last.count('whole_gradient_0: "f32[') == 1
    assert found["losses"] == pytest.approx(ranks(2, *SLOW_TWO)[BF16[0]]["losses"], rel=1e-3)


def test_a_step_of_one_micro_batch_has_nothing_to_share_and_says_so(capsys) -> None:
    passes = ("gather_once", "reduce_once")
    examples, cfg = make_examples([30, 4, 25, 8, 31, 3, 17, 29]), config("graph", passes)
    layout = make_layout_of("packed", examples.lengths, micro=8)
    assert layout.accumulation == 1
    make_engine(cfg, cpu_runtime(), Path(), Training(MODELS["llama"](), NextToken(cfg.loss), layout)).close()
    assert (
        "gather_once, reduce_once: a step has one micro-batch, so there is nothing to put together"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_tied_table_is_gathered_once_and_one_that_the_backward_pass_does_not_read_each_time() -> None:
    """So that the peak of memory, where the loss is computed, has no more whole weights than without the pass."""
    tied, untied = (ranks(2, *SLOW_TWO)[case] for case in ("qwen3; graph; gather_once,reduce_once", GATHERED))
    assert (tied["gathered"], untied["gathered"]) == (13, 12 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [SAME_BITS, SAME_BITS_KEPT])
def test_moving_and_merging_collectives_change_no_bit(cases: tuple[str, ...]) -> None:
    """Nor does it that micro-batches share what the first has gathered, which takes no more memory."""
    plain, *changed = (ranks(2, *SLOW_TWO)[case] for case in cases)
    if cases == SAME_BITS_KEPT:
        assert changed[-1]["peak"] == plain["peak"]
    for found in changed:
        same_bits(found, plain)


def same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("losses", "gradients", "weights"):
        assert actual[what] == expected[what]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["", "bf16 "])
@pytest.mark.parametrize("cases", [SAME_BITS, SAME_BITS_KEPT])
def test_moving_and_merging_collectives_change_no_bit_on_two_gpus(cases: tuple[str, ...], dtype: str) -> None:
    """Where the kernels of attention and cuBLAS are asked for the same bits each time."""
    plain, *changed = ranks(2, *(f"{dtype}{case}" for case in cases), gpus=True).values()
    for found in changed:
        same_bits(found, plain)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_reduce_gradients_once_a_step_and_train_alike() -> None:
    """To the order in which fp32 numbers are added."""
    plain, *summed = ranks(
        2,
        "deep llama; graph",
        "deep llama; graph; gather_once,reduce_once,block_bucketing",
        "deep llama; graph; gather_once,reduce_once,block_bucketing,full_inductor",
        gpus=True,
    ).values()
    for found in summed:
        same(found, plain)
        assert found["reduced"] == 21
    assert plain["reduced"] == 2 * 21


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("passes", [BLOCKS, "block_bucketing"])
def test_replayed_halves_with_collectives_train_two_gpus_to_the_same_bits(passes: str) -> None:
    plain, replayed = ranks(
        2, *(f"deep llama; graph; {passes}{more}" for more in ("", ",cuda_graphs")), gpus=True
    ).values()
    same_bits(replayed, plain)


@pytest.mark.slow
def test_the_order_of_a_bucketing_pass_is_written_down_for_inductor() -> None:
    """Which orders anew what has no dependency."""
    blocks, auto = (
        {(s["graph"], s["after"]): s["text"] for s in ranks(2, *COMPILED)[case]["stages"]} for case in ORDERED
    )
    plain = {stage["graph"]: stage["text"] for stage in ranks(2, *COMPILED_TENSOR)[COMPILED_TENSOR[0]]["stages"]}
    assert not any("control_deps(" in text for text in plain.values())
    assert all("control_deps(" in blocks[half, "block_bucketing"] for half in ("forward", "backward"))
    assert all("control_deps(" in auto[half, "auto_bucketing"] for half in ("forward", "backward"))


@pytest.mark.slow
def test_inductor_computes_a_block_behind_each_reduction_of_gradients() -> None:
    """Where weights are kept no gather of the backward pass holds the order, and all reductions could move to its end."""
    found = ranks(2, *COMPILED)["deep llama; graph; gather_once,block_bucketing,full_inductor"]
    before, *behind = found["products"]
    of_block = 2 * 7  # the gradients of seven matrices, and of what each of them reads
    # norm and head, two blocks, embedding; then the forward pass of the second micro-batch
    assert behind == [of_block, of_block, 0, before, of_block, of_block, 0]


@pytest.mark.slow
def test_flex_attention_is_an_operator_that_gets_the_documents_of_each_step() -> None:
    stages = ranks(2, *SLOW_TWO)[FLEX]["stages"]
    texts = {stage["graph"]: stage["text"] for stage in stages if stage["after"] != "captured"}
    (forward,) = re.findall(r"= torch\.ops\.higher_order\.flex_attention\((.*)\);", texts["forward"])
    # Where documents end, and positions in them: computed from inputs of the step, no constants of the graph.
    (boundaries,) = re.findall(r"\(\), \((\w+), (\w+)\)", forward)
    for name in boundaries:
        computed = re.search(rf"\b{name}: .* = torch\.ops\.aten\.", texts["forward"])
        assert name.startswith("primals_") or computed, name
    assert "_tensor_constant" not in forward
    assert "torch.ops.higher_order.flex_attention_backward(" in texts["backward"]


@pytest.mark.slow
def test_without_resharding_nothing_is_gathered_again() -> None:
    assert collectives(SAME_BITS_KEPT[0], ranks(2, *SLOW_TWO))["backward split"].keys() == {"reduce-scatter"}


@pytest.mark.slow
def test_automatic_bucketing_merges_what_fits_a_bucket() -> None:
    found = collectives("deep llama; graph; reshard_after_forward,auto_bucketing", ranks(2, *SLOW_TWO))
    assert found["forward auto_bucketing"]["all-gather"] < found["forward split"]["all-gather"]
    assert found["backward auto_bucketing"]["reduce-scatter"] < found["backward split"]["reduce-scatter"]


@pytest.mark.slow
def test_bf16_gradients_are_summed_in_fp32() -> None:
    plain, wide = (ranks(2, *SLOW_TWO)[case] for case in BF16[:2])
    for found, tables in ((plain, 0), (wide, 1)):
        assert found["checks"]["Same gradients as the plain model"] is True
        reductions = reductions_of(found)
        # Of a table that is looked up in shards rows are, each of which one rank has: exact in bf16.
        assert len(reductions) == 12
        assert sum(': "bf16[' in line for line in reductions) == tables
        assert sum(': "f32[' in line for line in reductions) == 12 - tables
    assert "f32[" not in of_table(wide), "nothing of it is summed, so nothing cast"


def reductions_of(found: dict[str, Any]) -> list[str]:
    text = next(stage["text"] for stage in found["stages"] if stage["graph"] == "joint")
    return [line for line in text.splitlines() if ".reduce_scatter_tensor.default(" in line]


def of_table(found: dict[str, Any]) -> str:
    """The end of the joint graph: what becomes of the gradient of a table that is looked up in shards."""
    text = next(stage["text"] for stage in found["stages"] if stage["graph"] == "joint")
    return text.partition("embedding_dense_backward:")[2]


@pytest.mark.slow
def test_copies_of_a_bf16_table_sum_its_gradient_in_fp32() -> None:
    found = ranks(4, *FOUR_AND_BF16)[BF16[1]]
    assert found["checks"]["Same gradients as the plain model"] is True
    assert re.search(r'"f32\[2050, 32\]" = .*\.all_reduce\.default\(', of_table(found))


def fails(*_: Any) -> None:
    raise RuntimeError("an operator without a gradient")


def test_a_graph_that_cannot_be_captured_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sftkit.graph.capture.capture", fails)
    with pytest.raises(
        ConfigError,
        match=r"cannot be captured here: an operator without.*train\.engine=blocks",
    ):
        train(cpu_runtime(), "llama", config("graph"))


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology(replicas=2), r"shards weights over its 2 processes, and ddp keeps.*fsdp2\.yaml or hsdp\.yaml"),
        (Topology(replicas=2, on_cpu=True), r"ddp keeps them whole: start it with accelerate_configs/cpu_fsdp2\.yaml$"),
        (Topology(context=2, sharded=True), r"no context parallelism yet.*set cp_size to 1"),
        (
            Topology(tensor=4, sharded=True),
            r"tp_size=4 does not divide the model's num_key_value_heads, 2: take a size that",
        ),
    ],
)
def test_processes_that_it_has_no_sharding_for_are_refused(topology: Topology, message: str) -> None:
    rt: Any = SimpleNamespace(topology=topology, world_size=2)
    with pytest.raises(ConfigError, match=message):
        check_possible(rt, MODELS["llama"]())


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    rt: Any = SimpleNamespace(topology=Topology(tensor=2, sharded=True), world_size=2)
    model = MODELS["deepseek_v3"]()
    check_possible(rt, model)
    model.config.n_routed_experts = 7
    with pytest.raises(ConfigError, match=r"tp_size=2 does not divide the model's n_routed_experts, 7"):
        check_possible(rt, model)


def test_a_model_without_a_plan_for_tensor_parallelism_is_refused() -> None:
    rt: Any = SimpleNamespace(topology=Topology(tensor=2, sharded=True), world_size=2)
    with pytest.raises(
        ConfigError, match=r"gemma2 has no tensor-parallel plan with train\.engine=graph, llama, .*deepseek_v3"
    ):
        check_possible(rt, tiny_gemma2())


def test_a_module_that_the_plan_does_not_know_is_refused() -> None:
    rt: Any = SimpleNamespace(topology=Topology(tensor=2, sharded=True), world_size=2)
    model = MODELS["llama"]()
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"a block has mlp\.extra, which the tensor-parallel plan does not know"):
        check_possible(rt, model)


def test_a_model_with_an_encoder_is_refused() -> None:
    rt: Any = SimpleNamespace(topology=Topology(), world_size=1)
    t5: Any = SimpleNamespace(config=T5Config())
    with pytest.raises(ConfigError, match=r"decoders alone, and t5 has an encoder: set train\.engine=blocks"):
        check_possible(rt, t5)
