"""Attention in rows of prefix trees: a query sees its ancestors and itself, and windows count depth."""

from itertools import pairwise

import pytest
import torch
from made_trees import branching, tree_batch
from test_attention import DOCUMENTS, inputs, make_batch, relative_error
from torch._dynamo.testing import CompileCounterWithBackend

from sftkit.data.batches.collate import Batch
from sftkit.ops.attention import attend, document_boundaries
from sftkit.ops.flex import blocks_of, document_ends

TREE = [(0, 50), (30, 15), (10, 45), (55, 1), (45, 20)]
"A tree of five documents: what each shares with the one before it, and its own tokens."


def trees(row_length: int = 160) -> Batch:
    """A row of a tree, a chain and padding, and a row of a tree."""
    examples = branching(0, 1000, [*TREE, (0, 30), *TREE])
    return tree_batch(examples, [[range(5), [5]], [range(6, 11)]], row_length)


def by_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The definition, a query at a time: [B, T, H, D]."""
    ends = document_ends(batch.cu_seqlens, *batch.doc_ids.shape) if batch.tree_ends is None else batch.tree_ends
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    depths = batch.inputs["position_ids"]
    found = []
    for row in range(len(query)):
        for q in range(query.shape[2]):
            path = [k for k in range(q + 1) if q < ends[row, k]]
            if window is not None:
                path = [k for k in path if depths[row, q] - depths[row, k] < window]
            scores = torch.einsum("hd,hkd->hk", query[row, :, q], key[row][:, path]) * query.shape[-1] ** -0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            found.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), value[row][:, path]))
    return torch.stack(found).unflatten(0, (len(query), -1))


def test_a_query_sees_the_documents_that_it_is_in_and_none_of_their_later_tokens() -> None:
    examples = branching(1, 1000, TREE)
    batch = tree_batch(examples, [[range(5)]], 256)
    mask = document_boundaries(batch, "reference").mask
    assert mask is not None
    for document in range(5):
        ids = examples[document].ids[:-1].tolist()
        leaf = [int(i) for i in (batch.inputs["position_ids"][0] == len(ids) - 1).nonzero()]
        seen = [mask[0, 0, i].nonzero().flatten() for i in leaf]
        assert ids in [batch.inputs["input_ids"][0, columns].tolist() for columns in seen]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 5.0)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_backends_with_trees_equal_a_loop_over_queries(window: int | None, softcap: float | None) -> None:
    batch = trees()
    query, key, value, _ = inputs(2, 4, 2, 16, "cpu", 160)
    wanted = by_query(query, key, value, batch, window, softcap)
    for backend in ("reference", "flex"):
        documents = document_boundaries(batch, backend)
        named = {"sliding_window": window, "softcap": softcap}
        got, _ = attend(torch.nn.Module(), query, key, value, None, documents=documents, **named)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_one_graph_of_flex_serves_all_trees_and_packed_rows(window: int | None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(attend, fullgraph=True, dynamic=False, backend=counter)
    other = tree_batch(branching(9, 1000, [(0, 100), (10, 30)]), [[range(2)], []], 160)
    query, key, value, _ = inputs(2, 4, 2, 16, "cpu", 160)
    for batch in (trees(), other, make_batch([[50, 100], [17, 130]], 160)):
        both = []
        for backend, attended in (("flex", call), ("reference", attend)):
            documents = document_boundaries(batch, backend)
            given = {"documents": documents, "sliding_window": window}
            with torch.no_grad():
                both.append(attended(torch.nn.Module(), query, key, value, None, **given)[0])
        torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


def all_ends() -> list[torch.Tensor]:
    """Ends of packed documents and of trees, in rows of whole blocks."""
    batches = [make_batch(rows) for rows in DOCUMENTS.values()]
    found = [document_ends(batch.cu_seqlens, *batch.doc_ids.shape) for batch in batches]
    for seed in range(5):
        shape = [(0, 300), (290 - 50 * seed, 200), (150, 140), (40 * seed, 130)]
        batch = tree_batch(branching(seed, 1000, shape), [[range(4)]], 1024)
        assert batch.tree_ends is not None
        found.append(batch.tree_ends)
    return found


def test_blocks_of_flex_are_those_that_the_mask_touches_and_those_that_it_fills() -> None:
    for ends in all_ends():
        columns = torch.arange(ends.shape[1])
        mask = (columns <= columns[:, None]) & (columns[:, None] < ends[:, None])
        of_blocks = mask.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).permute(0, 1, 3, 2, 4).flatten(3)
        touched, whole = of_blocks.any(3), of_blocks.all(3)
        for found, any_, all_ in zip(
            blocks_of(ends), (touched, touched.transpose(1, 2)), (whole, whole.transpose(1, 2)), strict=True
        ):
            for row in range(len(ends)):
                for block in range(any_.shape[1]):
                    listed = found.listed[row, 0, block].tolist()
                    partial, full = int(found.partial[row, 0, block]), int(found.whole[row, 0, block])
                    assert int(found.touched[row, 0, block]) == partial + full
                    assert sorted(listed[: partial + full]) == any_[row, block].nonzero().flatten().tolist()
                    first = found.whole_listed[row, 0, block, :full].tolist()
                    assert first == listed[partial : partial + full] == all_[row, block].nonzero().flatten().tolist()


def test_the_ends_of_packed_documents_are_where_the_next_one_starts() -> None:
    for rows in DOCUMENTS.values():
        batch = make_batch(rows)
        ends = document_ends(batch.cu_seqlens, *batch.doc_ids.shape)
        for row, ids in enumerate(batch.doc_ids.tolist()):
            borders = [i for i, (one, other) in enumerate(pairwise([*ids, None]), 1) if one != other]
            assert ends[row].tolist() == [next(b for b in borders if b > i) for i in range(len(ids))]


@pytest.mark.gpu
@pytest.mark.own_process
@pytest.mark.parametrize("window", [None, 20])
def test_compiled_flex_has_one_graph_and_the_exact_gradients_for_all_trees(window: int | None) -> None:
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(attend, fullgraph=True, dynamic=False, backend=counter)
    packed = make_batch([[50, 100], [17, 130]], 160)
    other = tree_batch(branching(9, 1000, [(0, 100), (10, 30)]), [[range(2)], []], 160)
    for batch in (trees(), other, packed):
        *qkv, grad = inputs(2, 4, 2, 64, "cuda", 160)
        exact = [x.double().requires_grad_() for x in qkv]
        wanted = by_query(*(x.cpu() for x in exact), batch, window, None).cuda()
        wanted.backward(grad.transpose(1, 2).double())
        given = [x.requires_grad_() for x in qkv]
        documents = document_boundaries(batch.to(torch.device("cuda")), "flex")
        got, _ = call(torch.nn.Module(), *given, None, documents=documents, sliding_window=window)
        got.backward(grad.transpose(1, 2))
        assert relative_error(got, wanted) < 5e-3
        for mine, theirs in zip(given, exact, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert relative_error(mine.grad, theirs.grad) < 5e-3
    assert counter.frame_count == 1
