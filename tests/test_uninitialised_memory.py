"""What memory held before is in no result: every buffer that we take uninitialised is full of NaN here."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, cpu_runtime, make_examples, make_layout_of, tiny_llama
from made_models import odd_llama
from planted import planted, same_when_planted
from torch import distributed as dist
from transformers import PhiConfig, PhiForCausalLM

from sftkit.checkpoint.states import copies_done, load_states, save_states, snapshot_states
from sftkit.config.schema import AdapterConfig, LossConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.config.tables import OPTIMIZERS
from sftkit.data.batches.collate import IGNORE, collate
from sftkit.data.batches.epoch import FULL_ROW, RankRows, RowShard
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import BatchShape
from sftkit.engine.step import TrainStep
from sftkit.evals.results import Choices
from sftkit.evals.scoring import score
from sftkit.generation.decode import Batching, generate
from sftkit.models.load import load_model
from sftkit.models.vocabulary import add_tokens
from sftkit.models.weights import load_model_weights, make_room, materialize_weights
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops import flash, linear_cross_entropy
from sftkit.ops.attention import attend, document_boundaries, kernel_order
from sftkit.ops.linear_cross_entropy import Head, linear_nll
from sftkit.ops.low_rank import gated_product, gated_product_backward
from sftkit.ops.nf4 import nf4_linear, quantize
from sftkit.ops.short_convolution import convolved, convolved_backward
from sftkit.ops.tensors import gather_rows
from sftkit.optim.protocol import build_optimizer
from sftkit.runtime import start as runtime
from sftkit.tracking.health import DelayedFlags

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
every_device = pytest.mark.parametrize("device", ["cpu", CUDA])
both_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)

TESTED = {
    ("checkpoint/states.py", "to_host"): 1,
    ("data/batches/epoch.py", "assign_rows"): 1,
    ("verify/plain.py", "PlainModel._whole"): 1,
    ("generation/kv_cache.py", "FixedLayer.update"): 1,
    ("models/weights.py", "fill_with_memory"): 1,
    ("ops/cross_entropy_kernel.py", "scaled"): 1,
    ("ops/flash.py", "_"): 5,
    ("ops/flash.py", "document_attention_backward"): 1,
    ("ops/grouped.py", "_"): 2,
    ("ops/low_rank.py", "_"): 7,
    ("ops/nf4.py", "_"): 1,
    ("ops/nf4.py", "dense_matrix"): 1,
    ("ops/gated_mlp_kernel.py", "backward"): 4,
    ("ops/gated_mlp_kernel.py", "forward"): 2,
    ("ops/recurrent.py", "_"): 7,
    ("ops/short_convolution.py", "_"): 3,
    ("ops/short_convolution_kernel.py", "convolve_backward"): 2,
    ("ops/short_convolution_kernel.py", "convolve"): 1,
    ("ops/tensors.py", "_"): 2,
    ("ops/tensors.py", "_all_gather"): 1,
    ("ops/tensors.py", "_reduce_scatter"): 1,
    ("ops/linear_cross_entropy.py", "_"): 5,
    ("ops/linear_cross_entropy.py", "_logits_buffer"): 1,
    ("ops/linear_cross_entropy.py", "_scaled"): 1,
    ("ops/linear_cross_entropy.py", "_sums_and_gradients"): 1,
    ("parallel/pipeline.py", "_placed"): 2,
    ("parallel/pipeline.py", "_Links.moved"): 1,
    ("parallel/pipeline.py", "_logits"): 1,
    ("parallel/pipeline.py", "_passed_by"): 1,
    ("tracking/health.py", "DelayedFlags.__init__"): 1,
}
"""(file, function) -> how often it takes memory uninitialised, for which there is a test below, for a pipeline in
scripts/test_pipeline_script.py; `_` only tells shapes."""
ONLY_TIMED = {
    ("labs/bench/machine.py", "copy_tb_per_sec"): 2,
    ("labs/bench/machine.py", "matmul_tflops"): 1,
    ("memory/plan.py", "reserve_optimizer_state"): 1,
    ("ops/attention.py", "_milliseconds"): 1,
    ("ops/nf4.py", "quantize_layer"): 4,
    ("parallel/pipeline.py", "Pipelined._torch_stage"): 3,
}
"Those that take it to time it, to hold it or for its shape: nobody looks at the values."
WAYS = {"empty", "empty_like", "new_empty", "empty_strided", "empty_permuted", "to_empty", "resize_", "ndarray"}


# ---- the planting itself ----


def takers(node: ast.AST, inside: str = "") -> Iterator[str]:
    """The function of each call that takes uninitialised memory, with the classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        where = f"{inside}.{child.name}".lstrip(".") if named else inside  # type: ignore[attr-defined]
        called = child.func.attr if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) else ""
        if called in WAYS and (child.args or child.keywords):  # type: ignore[attr-defined]
            yield where
        yield from takers(child, where)


def test_every_function_that_takes_uninitialised_memory_is_tested_here() -> None:
    package = ROOT / "src" / "sftkit"
    found = Counter(
        (path.relative_to(above).as_posix(), function)
        for folder, above in ((package, package), (ROOT / "labs", ROOT))
        for path in folder.rglob("*.py")
        for function in takers(ast.parse(path.read_text()))
    )
    assert found == TESTED | ONLY_TIMED


def test_a_second_function_of_a_file_and_a_second_call_of_a_function_are_found() -> None:
    text = (
        "class A:\n    def f(self):\n        return x.new_empty(3), torch.empty(2)\ndef f():\n    return np.empty(1)\n"
    )
    assert list(takers(ast.parse(text))) == ["A.f", "A.f", "f"]


@every_device
def test_planting_reaches_every_way_to_take_memory_and_ends_with_its_block(device: str) -> None:
    def take() -> list[torch.Tensor]:
        like = torch.zeros(3, device=device)
        made = [torch.empty(3, device=device), torch.empty_like(like), like.new_empty(3)]
        made += [torch.empty_strided((2, 2), (3, 1), device=device), like.new_empty(3, dtype=torch.bfloat16)]
        made += [torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight, torch.zeros(0).resize_(3)]
        made += [torch.empty(3, pin_memory=device == "cuda"), torch.from_numpy(np.empty(3))]
        return made

    numpys = np.empty
    with planted():
        assert all(tensor.isnan().all() for tensor in take())
        assert torch.empty(1, dtype=torch.int64, device=device).item() == 2**63 - 1
        assert np.empty(1, np.int32).item() == 2**31 - 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert np.empty is numpys


@every_device
def test_a_gated_product_with_factors_reads_no_old_memory(device: str) -> None:
    def compute() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        sizes = [(130, 72), (130, 72), (130, 16), (8, 72), (8, 72), (8, 72), (130, 72), (130, 8)]
        *tensors, d_h, d_down = (torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes)
        return (*gated_product(*tensors, 0.5), *gated_product_backward(d_h, d_down, *tensors, 0.5))

    same_when_planted(compute)


@every_device
def test_a_short_convolution_reads_no_old_memory(device: str) -> None:
    def compute() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        sizes = [(2, 70, 72), (2, 70, 72), (72, 4), (72,)]
        grad, *tensors = (torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes)
        starts = torch.arange(70, device=device).remainder(23).expand(2, -1).contiguous()
        return convolved(*tensors, starts, True), *convolved_backward(grad, *tensors, starts, True)

    same_when_planted(compute)


@every_device
def test_a_product_with_a_matrix_in_nf4_reads_no_old_memory(device: str) -> None:
    def compute() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(size, generator=generator).bfloat16().to(device) for size in ((70, 96), (5, 96)))
        return nf4_linear(x, *quantize(weight))

    same_when_planted(compute)


def not_cleared(rows: int, vocab: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(rows, -(-vocab // 64) * 64)[:, :vocab]


def padding_is_read() -> bool:
    """Whether torch's bf16 product on CPU takes in what lies between the rows of its left factor, as 2.13 does."""
    with planted():
        logits = not_cleared(64, 19, torch.zeros(0, dtype=torch.bfloat16)).fill_(1)
        return bool((logits @ torch.ones(19, 64, dtype=torch.bfloat16)).isnan().any())


def test_columns_of_the_logits_that_are_not_cleared_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "_logits_buffer", not_cleared)
    found = pytest.raises(AssertionError, match="not finite") if padding_is_read() else nullcontext()
    with found:
        same_when_planted(lambda: loss_and_gradients(200, 19, torch.bfloat16, "cpu", LossConfig(chunk_tokens=64), None))


def test_columns_beside_the_logits_are_zeros_whatever_reads_them() -> None:
    with planted():
        logits = linear_cross_entropy._logits_buffer(3, 19, torch.zeros(0, dtype=torch.bfloat16))
    assert logits.stride() == (64, 1)
    assert logits.as_strided((3, 45), (64, 1), 19).count_nonzero() == 0


# ---- loss ----


def loss_and_gradients(
    rows: int, vocab: int, dtype: torch.dtype, device: str, options: LossConfig, softcap: float | None
) -> list[torch.Tensor]:
    """Sums of the loss and the gradients of a third of it; a third of the rows and the last 70 have no target."""
    generator = torch.Generator(device).manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
        for shape in ((rows, 64), (vocab, 64), (vocab,))
    ]
    targets = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    targets[torch.rand(rows, generator=generator, device=device) < 0.3] = IGNORE
    targets[max(rows - 70, 0) :] = IGNORE
    hidden, head, bias = leaves
    sums = linear_nll(hidden, Head(head, bias, softcap), targets, options)
    without_bias = linear_nll(hidden, Head(head, softcap=softcap), targets, options).loss
    gradients = [*torch.autograd.grad(sums.loss / 3, leaves), *torch.autograd.grad(without_bias / 3, leaves[:2])]
    with torch.no_grad():
        measured = linear_nll(hidden, Head(head, bias, softcap), targets, options)
    return [value.detach() for value in (*sums, *measured, *gradients)]


@every_device
@both_dtypes
@pytest.mark.parametrize("vocab", [1, 19, 1000, 1024])
@pytest.mark.parametrize(("rows", "chunk"), [(200, 64), (200, 256), (129, 128), (1, 64), (0, 64)])
def test_loss_and_its_gradients(rows: int, chunk: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    everything = {"z_loss": 0.05, "label_smoothing": 0.1, "token_metrics": True}
    for settings, softcap in (({}, None), (everything, 3.0)):
        options = LossConfig(chunk_tokens=chunk, **settings)  # type: ignore[arg-type]
        same_when_planted(lambda o=options, s=softcap: loss_and_gradients(rows, vocab, dtype, device, o, s))


# ---- attention ----

DOCUMENTS = [[[200]], [[100], [1], []], [[1, 1, 130, 5], [64, 64]], [[3, 40, 77, 5], [60, 60, 60, 20], [1]]]
"Documents of rows of 200 positions: full rows, rows with padding, an empty row, rows of one document."


def attention(
    backend: str,
    rows: Sequence[Sequence[int]],
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    shard: RowShard,
) -> list[torch.Tensor]:
    """Outputs and gradients at all positions, padding too; of chunks the gradients of whole rows' keys."""
    lengths = [n for row in rows for n in row]
    numbers = iter(range(len(lengths)))
    recipe = tuple(tuple(next(numbers) for _ in row) for row in rows)
    batch = collate(
        make_examples(lengths), recipe, BatchShape(200, max_docs=8 * len(rows), max_doc_length=200), shard=shard
    ).to(torch.device(device))
    generator = torch.Generator(device).manual_seed(0)
    leaves = [
        torch.randn(len(rows), h, 200, 64, device=device, generator=generator).to(dtype).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    query = leaves[0] if batch.columns is None else leaves[0][:, :, batch.columns]
    documents = document_boundaries(batch, backend, context_group="none")._replace(group=None)
    call = torch.compile(attend, fullgraph=True, dynamic=False) if backend == "flex" else attend
    with kernel_order(backend):
        out, _ = call(torch.nn.Module(), query, *leaves[1:], None, documents=documents)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


HEADS = ((4, 4), (8, 4), (8, 1))
ON_CPU = [("cpu", backend, heads) for backend in ("reference", "sdpa") for heads in HEADS]
ON_CUDA = [("cuda", backend, heads) for backend in ("fa4", "varlen", "reference", "sdpa") for heads in HEADS]


@pytest.mark.parametrize(
    ("device", "backend", "heads"),
    [
        *ON_CPU,
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_CUDA),
        pytest.param("cuda", "flex", (8, 4), marks=[pytest.mark.gpu, pytest.mark.own_process]),
    ],
)
@both_dtypes
def test_attention_of_rows_with_padding(device: str, backend: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    if backend in ("fa4", "varlen") and (
        reason := flash.kernel_unsupported_reason(backend, torch.device(device), dtype)
    ):
        pytest.skip(reason)
    shards = (
        [FULL_ROW] if backend in ("flex", "sdpa") else [FULL_ROW, RowShard("chunks", 0, 2), RowShard("chunks", 1, 2)]
    )
    for rows in DOCUMENTS[-1:] if backend == "flex" else DOCUMENTS:  # each shape is compiled for flex
        if backend == "sdpa" and max(map(len, rows)) > 1:
            continue  # rows of one document
        for shard in shards:
            same_when_planted(
                lambda r=rows, p=shard: attention(backend, r, heads, dtype, device, p),
                tolerance=0.0 if device == "cpu" else 0.01,
            )


@pytest.fixture(params=["cpu", CUDA])
def one_rank(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device, with a group of one process."""
    torch.distributed.init_process_group(
        "nccl" if request.param == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    yield request.param
    dist.destroy_process_group()


def test_rows_gathered_from_the_ranks_and_their_gradients(one_rank: str) -> None:
    def gathered() -> list[torch.Tensor]:
        generator = torch.Generator(one_rank).manual_seed(0)
        pair = [torch.randn(2, 3, 6, 5, device=one_rank, generator=generator).requires_grad_() for _ in "kv"]
        assert dist.group.WORLD is not None
        rows = gather_rows(*pair, dist.group.WORLD.group_name)  # type: ignore[arg-type]
        return [*(x.detach() for x in rows), *torch.autograd.grad(rows[0].sum() + 2 * rows[1].sum(), pair)]

    same_when_planted(gathered)


# ---- optimizers, batches, a step ----


@every_device
@both_dtypes
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_of_an_optimizer(name: str, dtype: torch.dtype, device: str) -> None:
    if ("bf16" if dtype == torch.bfloat16 else "fp32") not in OPTIMIZERS[name].state_bytes:
        pytest.skip("not for this precision")
    if name == "adamw8bit":
        pytest.importorskip("torchao")

    def updated() -> list[torch.Tensor]:
        model = odd_llama(dtype, device)
        optimizer = build_optimizer(model, OptimConfig(name=name, lr=1e-2), seed=3)  # type: ignore[arg-type]
        optimizer.warm_up(compiled=False)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            optimizer.update(1e-2, torch.tensor(0.5, device=device))
        states = [torch.as_tensor(value) for p in model.parameters() for value in optimizer.state[p].values()]
        plain = [tensor for s in states for tensor in ((s.codes, s.scale) if hasattr(s, "codes") else (s,))]
        return [t.detach().clone() for t in (*model.parameters(), *plain)]

    same_when_planted(updated)


LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4


@pytest.mark.parametrize("kind", ["packed", "bucketed", "fixed"])
@pytest.mark.parametrize(
    "shard", [FULL_ROW, RowShard("chunks", 1, 2), RowShard("columns", 0, 2)], ids=lambda shard: shard.kind
)
@every_device
def test_batches_and_later_ones_do_not_write_into_earlier_ones(kind: str, shard: RowShard, device: str) -> None:
    def collated() -> list[torch.Tensor]:
        examples = make_examples(LENGTHS)
        found = []
        for rank in range(2):
            layout = make_layout_of(kind, examples.lengths, world_size=2)
            for step in Batches(StepDataset(examples, layout, RankRows(rank, shard)), seed=0).steps(0, 4):
                for batch in step.micro_batches:
                    tensors = batch.to(torch.device(device)).tensors()
                    found += [(tensor, tensor.clone()) for tensor in (*batch.tensors(), *tensors)]
        assert all(torch.equal(tensor, as_it_came) for tensor, as_it_came in found)
        return [tensor for tensor, _ in found]

    same_when_planted(collated)


@every_device
@both_dtypes
@pytest.mark.parametrize("kind", ["packed", "bucketed", "fixed"])
def test_steps_of_training(kind: str, dtype: torch.dtype, device: str) -> None:
    backend = "reference" if device == "cpu" or dtype == torch.float32 else "varlen"

    rt = cpu_runtime() if device == "cpu" else runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))

    def trained() -> list[torch.Tensor]:
        model = ModelWithLoss(odd_llama(dtype, device), backend, NextToken(LossConfig(chunk_tokens=24)))
        optimizer = build_optimizer(model.orig_model, OptimConfig(name="adamw", lr=1e-3))
        examples = make_examples(LENGTHS, target_share=0.3)
        batches = Batches(StepDataset(examples, make_layout_of(kind, examples.lengths)), seed=0)
        flags = DelayedFlags(torch.device(device), delay=1, objective=model.objective)
        found = []
        for number, step in enumerate(batches.steps(0, 3)):
            moved = [batch.to(torch.device(device)) for batch in step.micro_batches]
            step.micro_batches[:] = moved
            outcome = TrainStep(model, optimizer, model.objective, rt, max_grad_norm=1.0).step(step, 1e-3)
            flags.push(number, step, outcome)
            assert all(known.finite and not known.stop for known in flags.read(wait=False))
            found += [outcome.sums.vector, outcome.grad_norm]
        assert len(flags.read(wait=True)) == 1
        return [value.detach().clone() for value in (*found, *model.parameters())]

    same_when_planted(trained, tolerance=0.0 if device == "cpu" else 0.02)


# ---- generation, models, checkpoints ----


@every_device
@both_dtypes
@pytest.mark.parametrize("groups", [None, ["a"] * 5 + ["b"] * 4], ids=["alone", "shared"])
def test_answers_and_their_logits(tokenizer, groups: list[str] | None, dtype: torch.dtype, device: str) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(0)
    prompts = [[*range(3, 28), *rng.integers(3, 64, 1 + 3 * i % 17).tolist()] for i in range(9)]

    def answered() -> list[object]:
        model, logits = odd_llama(dtype, device).eval(), []
        model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output.clone()))
        max_new_tokens = [12, 3, 7, 12, 1, 9, 12, 5, 2]  # rows leave their batch one after the other
        for batch_size in (1, 4, 9):
            answers = generate(
                model,
                tokenizer,
                prompts,
                Batching(batch_size),
                end_ids=[10**6],
                max_new_tokens=max_new_tokens,
                groups=groups,
            )
            logits += [(answer.text, answer.tokens) for answer in answers]
        asked = [Choices(str(i), "", ("", ""), (0,), (1, 1), groups[i] if groups else "") for i in range(9)]
        pairs = [[(np.array(p, np.int32), np.array(c, np.int32)) for c in ([5, 6], [7])] for p in prompts]
        logits += [vars(found) for found in score(model, tokenizer, asked, Batching(4), pairs)]
        return logits

    same_when_planted(answered)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("empty", [True, False])
@every_device
def test_weights_that_are_loaded_and_rows_that_are_added(  # type: ignore[no-untyped-def]
    tied: bool, empty: bool, device: str, tokenizer, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 66, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    PhiForCausalLM(PhiConfig(vocab_size=len(tokenizer), tie_word_embeddings=tied, **sizes)).save_pretrained(tmp_path)
    add_tokens(tokenizer, ["<|new|>", "<|other|>"])
    source = ModelConfig(path=str(tmp_path))

    def loaded() -> list[torch.Tensor]:
        model = load_model(source, tokenizer, 0, "bf16", empty=empty)
        make_room(model, torch.device(device))
        if empty:
            load_model_weights(model, source)
        assert len(model.lm_head.bias) == model.config.vocab_size > len(tokenizer)
        return [value.detach() for value in (*model.parameters(), *model.buffers())]

    same_when_planted(loaded)


@every_device
def test_matrices_that_are_quantized_while_they_are_read(  # type: ignore[no-untyped-def]
    device: str, tokenizer, tmp_path: Path
) -> None:
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    source = ModelConfig(path=str(tmp_path))

    def loaded() -> list[torch.Tensor]:
        model = load_model(source, tokenizer, 0, "bf16", empty=True, adapter=AdapterConfig(method="dora", base="nf4"))
        materialize_weights(model, source, torch.device(device))
        return [value.detach() for value in (*model.parameters(), *model.buffers())]

    same_when_planted(loaded)


@every_device
def test_optimizer_states_on_disk_and_back(device: str, tmp_path: Path) -> None:
    numbers = torch.arange(12.0, device=device)
    states = {"a": numbers.view(3, 4).t(), "b": numbers[::5].bfloat16(), "c": numbers[3], "d": numbers[:0]}

    def read_back(folder: Path) -> list[torch.Tensor]:
        shards = snapshot_states(states, 0, 1)
        copies_done(torch.device(device))
        save_states(shards, folder, None, 0)
        found = {name: torch.empty_like(state) for name, state in states.items()}
        load_states(found, folder)
        return list(found.values())

    folders = iter([tmp_path / "plain", tmp_path / "planted"])
    for value, expected in zip(same_when_planted(lambda: read_back(next(folders))), states.values(), strict=True):
        assert torch.equal(value, expected)
