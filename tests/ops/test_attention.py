"""Attention: every backend computes what a loop over documents computes, and no document sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import VOCAB_SIZE, make_examples, tiny_llama, tiny_qwen3_with_windows
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from sftkit.compile.contract import compiler_switches
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import CompileConfig, LossConfig
from sftkit.data.batches.collate import Batch, collate, warm_up_batch
from sftkit.data.batches.epoch import FULL_ROW, RowShard
from sftkit.data.batches.pack import BatchShape
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops import flash
from sftkit.ops.attention import Documents, attend, document_boundaries, plain_attention
from sftkit.ops.flex import attend_cached

DOCUMENTS = {
    "one document": [[256]],
    "many documents": [[3, 40, 77, 5, 90, 41]],
    "documents of length 1": [[1, 1, 1, 130, 1, 122]],
    "empty tail": [[30, 100]],
    "an empty row": [[64, 64, 128], []],
    "two rows": [[100, 156], [17, 19, 200]],
}


def make_batch(rows: Sequence[Sequence[int]], row_length: int = 256, slots: int = 12) -> Batch:
    """Rows of documents of these lengths, each of random tokens."""
    lengths = [n for row in rows for n in row]
    numbers = iter(range(len(lengths)))
    recipe = tuple(tuple(next(numbers) for _ in row) for row in rows)
    return collate(
        make_examples(lengths),
        recipe,
        BatchShape(row_length, max_docs=slots * len(rows), max_doc_length=max(256, row_length)),
    )


def by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, in the dtype of the inputs, one document at a time: [B, T, H, D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.zeros_like(query)
    for row in range(query.shape[0]):
        for doc in batch.doc_ids[row].unique():
            at = (batch.doc_ids[row] == doc).nonzero().flatten().to(query.device)
            q, k, v = (x[row][:, at] for x in (query, key, value))
            scores = q @ k.transpose(1, 2) * query.shape[-1] ** -0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            distance = torch.arange(len(at))[:, None] - torch.arange(len(at))[None]
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            scores = scores.masked_fill(~seen.to(query.device), float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(at), 1)], -1)
            out[row, :, at] = scores.softmax(-1)[..., : len(at)] @ v
    return out.transpose(1, 2)


def inputs(
    rows: int, heads: int, kv_heads: int, head_dim: int, device: str, row_length: int = 256
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(rows, h, row_length, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(s, device=device, generator=generator) for s in shapes)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm().detach() / wanted.double().norm().detach())


def check(
    backend: str,
    rows: Sequence[Sequence[int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    window: int | None = None,
    softcap: float | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    row_length: int = 256,
    sinks: bool = False,
    tolerance: float,
) -> None:
    """Outputs and gradients at the positions of documents against the definition in float64."""
    batch = make_batch(rows, row_length)
    *qkv, grad = inputs(len(rows), *heads, head_dim, device, row_length)
    real = (batch.doc_ids >= 0).to(device)
    grad = grad.transpose(1, 2) * real[:, :, None, None]
    # Between scores that they hardly change and scores that take most of the weight.
    s_aux = [torch.linspace(-3.0, 6.0, heads[0], device=device)] if sinks else []
    exact = [x.to(dtype).double().requires_grad_() for x in [*qkv, *s_aux]]
    wanted = by_document(*exact[:3], batch, window, softcap, *exact[3:])
    wanted.backward(grad.to(dtype).double())

    given = [x.to(dtype).requires_grad_() for x in [*qkv, *s_aux]]
    documents = document_boundaries(batch.to(torch.device(device)), backend)
    call = torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend
    named = {"sliding_window": window, "softcap": softcap, "s_aux": given[3] if sinks else None}
    got, _ = call(torch.nn.Module(), *given[:3], None, documents=documents, **named)
    got.backward(grad.to(dtype))
    assert relative_error(got[real], wanted[real]) < tolerance
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        where = real[:, None, :].expand(mine.shape[:3]) if mine.ndim > 1 else slice(None)
        assert relative_error(mine.grad[where], theirs.grad[where]) < tolerance


@pytest.mark.parametrize("rows", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 5.0), (9, 5.0)])
def test_reference_equals_a_loop_over_documents(
    rows: list[list[int]], head_dim: int, window: int | None, softcap: float | None
) -> None:
    check("reference", rows, head_dim=head_dim, window=window, softcap=softcap, tolerance=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (9, 5.0)])
def test_reference_with_sinks_equals_a_loop_over_documents(window: int | None, softcap: float | None) -> None:
    for rows in DOCUMENTS.values():
        check("reference", rows, window=window, softcap=softcap, sinks=True, tolerance=1e-5)


class PlainKernel:
    """A kernel with the interface of FlashAttention's, without sinks, from the definition."""

    def _weights(self, query: torch.Tensor, key: torch.Tensor, scale: float, **named: Any) -> torch.Tensor:
        starts, window = named["cu_seqlens_q"], named["window_size_left"]
        at = torch.arange(len(query))
        document = torch.searchsorted(starts, at, right=True)
        distance = at[:, None] - at[None]
        seen = (document[:, None] == document[None]) & (distance >= 0)
        seen = seen if window is None else seen & (distance <= window)
        return (torch.einsum("ihd,jhd->hij", query, key) * scale).masked_fill(~seen, float("-inf"))

    def _flash_attn_fwd(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = self._weights(query, key, named["softmax_scale"], **named)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value), scores.logsumexp(-1)

    def _flash_attn_bwd(
        self, query: Any, key: Any, value: Any, out: Any, grad: Any, lse: Any, *more: Any, **named: Any
    ) -> Any:
        weights = (self._weights(query, key, more[0], **named) - lse[..., None]).exp()
        gained = torch.einsum("ihd,jhd->hij", grad, value) - (out * grad).sum(-1).t()[..., None]
        of_scores = weights * gained * more[0]
        of_value = torch.einsum("hij,ihd->jhd", weights, grad)
        return torch.einsum("hij,jhd->ihd", of_scores, key), torch.einsum("hij,ihd->jhd", of_scores, query), of_value


@pytest.mark.parametrize("window", [None, 9])
def test_a_flash_kernel_without_sinks_gives_the_exact_gradients_of_attention_with_sinks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "fa4", PlainKernel)
    for sinks in (True, False):
        for rows in (DOCUMENTS["many documents"], DOCUMENTS["two rows"]):
            check("fa4", rows, window=window, dtype=torch.float64, head_dim=16, sinks=sinks, tolerance=1e-12)


def test_a_cached_step_with_sinks_is_the_last_position_of_a_row() -> None:
    query, key, value, _ = inputs(2, 4, 2, 16, "cpu", 32)
    sinks = torch.linspace(-1.0, 3.0, 4)
    documents = document_boundaries(make_batch([[32], [32]], 32), "reference")
    for softcap in (None, 5.0):
        row, _ = attend(torch.nn.Module(), query, key, value, None, documents=documents, s_aux=sinks, softcap=softcap)
        step, _ = attend_cached(torch.nn.Module(), query[:, :, -1:], key, value, None, s_aux=sinks, softcap=softcap)
        torch.testing.assert_close(step, row[:, -1:])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_dense_sdpa_equals_a_loop_over_documents_when_rows_hold_one(heads: tuple[int, int]) -> None:
    check("sdpa", [[256], [100], [1]], heads=heads, tolerance=1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_scores_are_scaled_by_the_factor_of_the_layer_and_by_no_other(backend: str) -> None:
    query, key, value, _ = inputs(1, 4, 2, 64, "cpu")
    documents = document_boundaries(make_batch([[256]], 256), backend)

    def attended(factor: float, scaling: float | None) -> torch.Tensor:
        return attend(torch.nn.Module(), factor * query, key, value, None, scaling=scaling, documents=documents)[0]

    assert relative_error(attended(1.0, 1.0), attended(64**0.5, None)) < 1e-5
    assert relative_error(attended(1.0, 0.25), attended(2.0, 0.125)) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_computes_what_the_reference_does() -> None:
    for row_length, window, softcap, sinks in (
        (256, None, None, None),
        (256, 9, None, None),
        (256, None, 5.0, None),
        (100, 9, 5.0, None),
        (32, None, None, None),
        (100, 9, None, torch.linspace(-1.0, 3.0, 4)),
    ):
        batch = make_batch([[row_length // 2, row_length // 3]], row_length)
        query, key, value, _ = inputs(1, 4, 2, 16, "cpu", row_length)
        outs = [
            attend(
                torch.nn.Module(),
                query,
                key,
                value,
                None,
                documents=document_boundaries(batch, backend),
                sliding_window=window,
                softcap=softcap,
                s_aux=sinks,
            )[0]
            for backend in ("flex", "reference")
        ]
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_with_windows])
def test_changing_one_document_leaves_the_others_as_they_are(make: object) -> None:
    model = ModelWithLoss(make(), "reference", NextToken(LossConfig())).eval()  # type: ignore[operator]
    batch = make_batch([[20, 30, 14]], row_length=64)
    changed = batch.inputs["input_ids"].clone()
    changed[0, :20] = (changed[0, :20] + 1) % VOCAB_SIZE
    with torch.no_grad():
        states = [
            model.orig_model.get_decoder()(
                input_ids=ids,
                position_ids=batch.inputs["position_ids"],
                use_cache=False,
                documents=document_boundaries(batch, "reference"),
            ).last_hidden_state
            for ids in (batch.inputs["input_ids"], changed)
        ]
    assert torch.equal(states[0][:, 20:], states[1][:, 20:])
    assert not torch.equal(states[0][:, :20], states[1][:, :20])


def test_generation_outside_plain_attention_is_an_error_and_inside_it_works() -> None:
    model = tiny_llama()
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    wrapped = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    with pytest.raises(RuntimeError, match="plain_attention"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    with plain_attention(wrapped.orig_model):
        assert torch.equal(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False), expected)
    assert model.config._attn_implementation == "sftkit"


def test_a_saved_config_does_not_name_our_attention(tmp_path: object) -> None:
    model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig())).orig_model
    assert "sftkit" not in model.config.to_json_string()


def test_flash_refuses_what_its_kernels_cannot_compute() -> None:
    documents = Documents("varlen", 256, cu_seqlens=torch.tensor([0, 256], dtype=torch.int32))
    query, key, value, _ = inputs(1, 4, 2, 16, "cpu")
    for bad in ({"softcap": 5.0}, {"dropout": 0.1}):
        with pytest.raises(RuntimeError, match="soft cap or dropout"):
            attend(torch.nn.Module(), query, key, value, None, documents=documents, **bad)  # type: ignore[arg-type]


def test_sinks_are_an_error_where_they_are_not_computed() -> None:
    query, key, value, _ = inputs(1, 4, 2, 16, "cpu")
    encoder = torch.nn.Module()
    encoder.is_causal = False  # type: ignore[assignment]
    for module, backend in ((torch.nn.Module(), "sdpa"), (encoder, "reference")):
        documents = document_boundaries(make_batch([[256]]), backend)
        with pytest.raises(RuntimeError, match="sinks"):
            attend(module, query, key, value, None, documents=documents, s_aux=torch.zeros(4))


def test_the_flash_operator_traces_and_counts_its_flops() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        query = torch.empty(512, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        key, value = (torch.empty(512, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        cu_seqlens = torch.empty(9, dtype=torch.int32)
        sinks = torch.empty(4, dtype=torch.bfloat16, requires_grad=True)
        sizes: Any = (128, 0.125, 0, "varlen")
        out, lse = flash.document_attention(query, key, value, cu_seqlens, cu_seqlens, *sizes, sinks=sinks)
        out.sum().backward()
        assert (sinks.grad.shape, sinks.grad.dtype) == ((4,), torch.bfloat16)  # type: ignore[union-attr]
        assert (out.shape, lse.shape, lse.dtype) == ((512, 4, 64), (4, 512), torch.float32)
        assert [x.grad.shape for x in (query, key, value)] == [query.shape, key.shape, key.shape]  # type: ignore[union-attr]
    product = 512 * 4 * 64 * 128  # half of the 128 keys are seen, and 2 FLOPs each
    assert counter.get_total_flops() == (2 + 5) * product


ALONE = pytest.param("flex", marks=pytest.mark.own_process)
"A generated kernel, which may take the GPU's context down."


def available(backend: str) -> bool:
    return torch.cuda.is_available() and (
        backend in ("flex", "sdpa", "reference")
        or flash.kernel_unsupported_reason(backend, torch.device("cuda"), torch.bfloat16) is None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa4", "varlen", ALONE, "reference"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "window"),
    [((4, 4), 64, None), ((4, 2), 128, None), ((8, 1), 128, None), ((4, 2), 64, 9), ((8, 4), 128, 100)],
)
def test_on_a_gpu_every_backend_equals_a_loop_over_documents(
    backend: str, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    if not available(backend):
        pytest.skip(f"{backend} is not installed")
    torch._dynamo.reset()
    for rows in DOCUMENTS.values():
        check(
            backend,
            rows,
            heads=heads,
            head_dim=head_dim,
            window=window,
            device="cuda",
            dtype=torch.bfloat16,
            compiled=backend == "flex",
            tolerance=1e-2,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa4", "varlen", ALONE, "reference"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "window"), [((4, 4), 64, None), ((8, 1), 64, 100), ((4, 2), 128, 9), ((4, 2), 64, None)]
)
def test_on_a_gpu_every_backend_with_sinks_equals_a_loop_over_documents(
    backend: str, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    if not available(backend):
        pytest.skip(f"{backend} is not installed")
    torch._dynamo.reset()
    gpu: Any = {"device": "cuda", "dtype": torch.bfloat16, "compiled": backend == "flex", "tolerance": 1e-2}
    for rows in DOCUMENTS.values():
        check(backend, rows, heads=heads, head_dim=head_dim, window=window, sinks=True, **gpu)


@pytest.mark.gpu
@pytest.mark.own_process
@pytest.mark.parametrize("row_length", [32, 100, 256, 300])
@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_on_a_gpu_flex_with_a_soft_cap_equals_a_loop_over_documents_in_rows_of_any_length(
    row_length: int, head_dim: int
) -> None:
    torch._dynamo.reset()
    rows = [[row_length // 2, row_length // 3], [row_length]]
    check(
        "flex",
        rows,
        head_dim=head_dim,
        window=9,
        softcap=5.0,
        device="cuda",
        dtype=torch.bfloat16,
        compiled=True,
        row_length=row_length,
        tolerance=1e-2,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu_dense_sdpa_equals_a_loop_over_documents(heads: tuple[int, int], head_dim: int) -> None:
    from sftkit.ops.attention import kernel_order

    with kernel_order("sdpa"):
        check(
            "sdpa",
            [[256], [100], [1]],
            heads=heads,
            head_dim=head_dim,
            device="cuda",
            dtype=torch.bfloat16,
            tolerance=1e-2,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa4", "varlen", ALONE])
def test_on_a_gpu_one_graph_serves_all_documents(backend: str) -> None:
    if not available(backend):
        pytest.skip(f"{backend} is not installed")
    torch._dynamo.reset()
    model = ModelWithLoss(tiny_llama(layers=3, head_dim=64), backend, NextToken(LossConfig())).to(
        "cuda", torch.bfloat16
    )
    for block in model.orig_model.model.layers:
        block.compile(fullgraph=True, dynamic=False)
    losses = {}
    with compiler_switches(CompileConfig()):
        watch = CompileWatch()
        for rows in ([[256], [256]], [[3, 40, 77], [5, 90, 41]], [[], [1, 1, 1]]):
            batch = make_batch(rows).to(torch.device("cuda"))
            model(batch).loss.backward()
            got, wanted = model(batch), model(batch, "reference")
            losses[str(rows)] = float(got.measured["nll"]), float(wanted.measured["nll"])
        counts = watch.counts()
    assert counts["compile/graphs"] == 2  # training, and the reference that it is compared with
    for ours, theirs in losses.values():
        assert ours == pytest.approx(theirs, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa4", "varlen"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)])
def test_on_a_gpu_chunks_of_rows_attend_as_whole_rows_do(backend: str, heads: tuple[int, int]) -> None:
    """What context-parallel ranks compute, one after the other: their queries against all keys, and gradients summed."""
    if not available(backend):
        pytest.skip(f"{backend} is not installed")
    rows = [[700, 20, 280], [3, 500, 33, 200]]
    examples = make_examples([length for row in rows for length in row])
    numbers = ((0, 1, 2), (3, 4, 5, 6))
    batches = [
        collate(examples, numbers, BatchShape(1024, max_docs=10, max_doc_length=1024), shard=shard).to(
            torch.device("cuda")
        )
        for shard in (FULL_ROW, *(RowShard("chunks", index, 2) for index in range(2)))
    ]
    tensors = inputs(2, *heads, 128, "cuda", row_length=1024)
    query, key, value = (x.bfloat16().requires_grad_() for x in tensors[:3])
    whole, *parts = batches
    documents = Documents(backend, 1024, cu_seqlens=whole.cu_seqlens)
    expected, _ = attend(torch.nn.Module(), query, key, value, None, documents=documents)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (query, key, value), grad)
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for batch in parts:
        columns, chunks = batch.columns, (batch.cu_seqlens_q, batch.cu_seqlens_k)
        documents = Documents(backend, 1024, cu_seqlens=batch.cu_seqlens, chunks=chunks)
        out, _ = attend(torch.nn.Module(), query[:, :, columns], key, value, None, documents=documents)
        torch.testing.assert_close(out, expected[:, columns], atol=2e-2, rtol=2e-2)
        grads = torch.autograd.grad(out, (query, key, value), grad[:, columns])
        for total, one in zip(found, grads, strict=True):
            total += one
    for ours, theirs in zip(found, wanted, strict=True):
        # bf16 rounds each part of a sum, and kernels add in any order: steps of 2^-8 of what is largest.
        torch.testing.assert_close(ours, theirs.float(), atol=2e-2 * float(theirs.abs().max()), rtol=3e-2)


def test_a_warm_up_batch_is_all_targets_in_whole_documents() -> None:
    batch = warm_up_batch(2, BatchShape(300, max_docs=8, max_doc_length=128), VOCAB_SIZE)
    assert batch.num_targets == 600
    loss = F.cross_entropy(torch.zeros(600, VOCAB_SIZE), batch.targets.flatten())
    assert torch.isfinite(loss)


def chunked_layer() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.sftkit_chunked = True
    return layer


def check_chunks(backend: str, rows: Sequence[Sequence[int]], chunk: int, device: str, dtype: torch.dtype) -> None:
    """Output and gradients of layers with and without chunks, in one row, against a loop over pieces of documents."""
    batch = make_batch(rows)
    pieces = batch.doc_ids * 1000 + batch.inputs["position_ids"].int() // chunk
    call = torch.compile(attend, fullgraph=True, dynamic=False) if backend == "flex" else attend
    documents = document_boundaries(batch.to(torch.device(device)), backend, chunk=chunk)
    real = (batch.doc_ids >= 0).to(device)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for layer, ids in ((chunked_layer(), pieces), (torch.nn.Module(), batch.doc_ids)):
        *qkv, grad = inputs(len(rows), 4, 2, 64, device)
        grad = grad.transpose(1, 2) * real[:, :, None, None]
        given, exact = (
            [x.to(dtype).to(kind).detach().clone().requires_grad_() for x in qkv] for kind in (dtype, torch.float64)
        )
        wanted = by_document(*exact, replace(batch, doc_ids=ids), None, None)
        wanted.backward(grad.to(dtype).double())
        got, _ = call(layer, *given, None, documents=documents)
        got.backward(grad.to(dtype))
        assert relative_error(got[real], wanted[real]) < tolerance
        for mine, theirs in zip(given, exact, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            where = real[:, None, :].expand(mine.shape[:3])
            # A chunk of one position has no gradient by query and key.
            off = (mine.grad[where] - theirs.grad[where]).norm() / (theirs.grad[where].norm() + 1)
            assert off < tolerance


@pytest.mark.parametrize("chunk", [5, 64, 100])
def test_a_chunk_begins_where_its_document_begins_and_not_where_the_row_does(chunk: int) -> None:
    check_chunks("reference", [[100, 27, 64], [65, 191], []], chunk, "cpu", torch.float32)


@pytest.mark.parametrize("rows", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 255])
def test_kernels_get_one_boundary_a_chunk_in_as_many_slots_for_any_documents(rows: list[list[int]], chunk: int) -> None:
    batch = make_batch(rows)
    found = document_boundaries(batch, "varlen", chunk=chunk).pieces
    starts = [
        256 * row + sum(lengths[:number]) + start
        for row, lengths in enumerate(rows)
        for number, length in enumerate([*lengths, 256 - sum(lengths)])  # with the padding
        for start in range(0, length, chunk)
    ]
    assert found.cu_seqlens.unique().tolist() == [*starts, 256 * len(rows)]
    assert found.cu_seqlens.diff().min() >= 0
    assert len(found.cu_seqlens) == len(batch.cu_seqlens) + 256 * len(rows) // chunk
    assert found.max_length == chunk


def test_documents_within_a_chunk_cost_no_boundaries_of_their_own() -> None:
    assert document_boundaries(make_batch([[100, 20]]), "reference", chunk=256).pieces is None
    assert document_boundaries(make_batch([[100, 20]]), "reference").pieces is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa4", "varlen", ALONE, "reference"])
def test_on_a_gpu_every_backend_attends_within_chunks_of_documents(backend: str) -> None:
    if not available(backend):
        pytest.skip(f"{backend} is not installed")
    torch._dynamo.reset()
    for chunk in (17, 64):
        check_chunks(backend, [[100, 27, 64], [65, 191], []], chunk, "cuda", torch.bfloat16)
