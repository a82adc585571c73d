"""What tensor parallelism makes of a block: the exchanges in its graphs, traced on one process of a group that sends
nothing. That ranks compute what one process does: test_parallel.py."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import contains_collective, contains_wait
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from sftkit.compile.contract import _is_product as is_product
from sftkit.compile.contract import behind_products, collectives_hidden
from sftkit.config.schema import LossConfig
from sftkit.config.topology import Sharding, Topology
from sftkit.models.structure import decoder, decoder_blocks
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.parallel.tensor import shard_matrices
from sftkit.parallel.wrap import make_meshes, shard

HIDDEN, LENGTH = 64, 32


OWN_PROCESS = pytest.mark.own_process
"For tests with a group: a process has one default group."


@pytest.fixture
def group_of_four() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@OWN_PROCESS
def test_weights_are_replicated_over_replicas_and_sharded_over_shards_alone(group_of_four: None) -> None:
    hybrid = make_meshes(Topology(replicas=2, shards=2, sharded=True), "cpu").blocks
    assert (hybrid.mesh_dim_names, hybrid.shape) == (("replicas", "shards"), (2, 2))
    whole = make_meshes(Topology(shards=4, sharded=True), "cpu").blocks
    assert (whole.mesh_dim_names, whole.shape) == (("shards",), (4,))
    beside_columns = make_meshes(Topology(replicas=2, tensor=2, sharded=True), "cpu")
    assert beside_columns.blocks.mesh_dim_names == beside_columns.rest.mesh_dim_names == ("replicas", "shards")


def qwen3() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(**sizes, vocab_size=128, num_key_value_heads=2, head_dim=16, use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def traced(orig_model: PreTrainedModel, rows: int, backend: Any) -> None:
    """Forward and backward of the first block for rows of which this rank has half."""
    positions = torch.arange(LENGTH)[None]
    rotary = decoder(orig_model).rotary_emb(torch.randn(1, LENGTH, HIDDEN), positions)
    hidden = torch.randn(rows, LENGTH // 2, HIDDEN, requires_grad=True)
    block = torch.compile(decoder_blocks(orig_model)[0], backend=backend, fullgraph=True, dynamic=False)
    out = block(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def exchanges(rows: int) -> list[Node]:
    """The collectives in both graphs of a block."""
    found = []

    def keep(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.extend(
            node
            for node in graph.graph.nodes
            if "_into_tensor" in str(node.target) or "scatter_tensor" in str(node.target)
        )
        return make_boxed_func(graph)

    traced(sharded(), rows, aot_autograd(fw_compiler=keep))
    return found


def through_views(node: Node, step: Callable[[Node], Node]) -> str:
    """The first operator from a node on that is no view and no wait."""
    while any(name in str(node.target) for name in ("view", "reshape", "wait_tensor", "alias")):
        node = step(node)
    return str(node.target)


@pytest.mark.slow
@OWN_PROCESS
def test_columns_of_one_row_are_exchanged_without_a_copy_before_or_after_it(group_of_four: None) -> None:
    for rows, copies in ((1, 0), (2, 8)):
        found = exchanges(rows)
        kinds = Counter("gather" if "all_gather" in str(node.target) else "scatter" for node in found)
        assert kinds == {"gather": 4, "scatter": 4}
        copied = 0
        for node in found:
            if "all_gather" in str(node.target):
                copied += "split" in through_views(next(iter(node.users)), lambda node: next(iter(node.users)))
            else:
                copied += "cat" in through_views(node.args[0], lambda node: node.args[0])  # type: ignore[arg-type, return-value]
        assert copied == copies


@OWN_PROCESS
def test_tensor_parallelism_alone_leaves_blocks_without_fsdp_and_beside_shards_it_does_not(group_of_four: None) -> None:
    for topology, sharded in (
        (Topology(tensor=4, sharded=True), False),
        (Topology(shards=2, tensor=2, sharded=True), True),
    ):
        model = ModelWithLoss(qwen3() if sharded else four_heads(), "reference", NextToken(LossConfig()))
        shard(model, make_meshes(topology, "cpu"), Sharding(), "fp32")
        blocks = decoder_blocks(model.orig_model)
        assert [isinstance(block, FSDPModule) for block in blocks] == [sharded] * 2
        assert isinstance(model.orig_model, FSDPModule)
        assert {p.device_mesh.ndim for block in blocks for p in block.parameters()} == {1 + sharded}  # type: ignore[union-attr]


def four_heads() -> PreTrainedModel:
    config = qwen3().config
    config.num_key_value_heads = 4
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Enough(Exception):
    """Raised where Inductor has merged what it can, before it generates code."""


def sharded() -> PreTrainedModel:
    """Blocks whose matrices two of the four ranks share."""
    orig_model = qwen3()
    shard_matrices(orig_model, decoder_blocks(orig_model), tensor_mesh())
    return orig_model


def tensor_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensor"))["tensor"]


def test_cached_code_of_another_order_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key has the code of the pass and not its name alone."""
    from torch._inductor import config

    def key() -> bytes:
        with collectives_hidden():
            return config.save_config()

    before = key()
    assert key() == before
    monkeypatch.setattr("sftkit.compile.contract.get_hash_for_files", lambda _: "other code")
    assert key() != before


@OWN_PROCESS
@pytest.mark.slow
def test_gradients_of_weights_stand_where_a_backward_pass_would_wait_for_an_exchange(group_of_four: None) -> None:
    """Of a block's four exchanges all but the first, before which nothing is computed."""
    from torch._inductor import config

    found: list[list[str]] = []

    def watched(nodes: list[Any]) -> list[Any]:
        ordered = behind_products(nodes)
        assert sorted(map(id, ordered)) == sorted(map(id, nodes))
        found.append([kind(node) for node in ordered])
        if len(found) == 2:
            raise Enough  # before code is generated
        return ordered

    def kind(node: Any) -> str:
        if contains_wait(node):
            return "wait"
        return "start" if contains_collective(node) else "product" if is_product(node) else "other"

    settings = {"reorder_for_compute_comm_overlap_passes": [watched], "fx_graph_cache": False}
    with collectives_hidden(), config.patch(settings), pytest.raises(Exception, match="Enough"):
        traced(sharded(), 1, "inductor")
    forward, backward = (between_start_and_wait(kinds) for kinds in found)
    assert forward == [0, 0, 0, 0]
    assert backward[0] == 0
    assert all(products == 1 for products in backward[1:-1]), "one each, as long as there is a later wait"
    assert backward[-1] > 1, "and the rest at the last"


def between_start_and_wait(kinds: list[str]) -> list[int]:
    """The number of products between the start of each exchange and the wait for it."""
    text = " ".join(kind for kind in kinds if kind != "other")
    return [part.partition("wait")[0].count("product") for part in text.split("start")[1:]]


def test_the_order_keeps_what_depends_on_each_other_in_order() -> None:
    """A chain start -> wait -> product -> start -> wait, gradients that need either wait, and one that needs nothing."""
    chain = [Fake("a", "start"), Fake("b", "wait", "a"), Fake("c", "product", "b"), Fake("d", "start", "c")]
    chain += [Fake("e", "wait", "d"), Fake("f", "other", "e")]
    nodes = [
        Fake("x", "product"),
        chain[0],
        chain[1],
        Fake("y", "product", "b"),
        *chain[2:],
        Fake("z", "product", "e", "y"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sftkit.compile.contract.contains_collective", lambda node: node.kind == "start")
        patch.setattr("sftkit.compile.contract.contains_wait", lambda node: node.kind == "wait")
        patch.setattr("sftkit.compile.contract._is_product", lambda node: node.kind == "product")
        order = "".join(node.name for node in behind_products(nodes))
    assert order == "axbcdyefz"


class Fake:
    """A node of Inductor's scheduler, as far as the order asks it."""

    def __init__(self, name: str, kind: str, *needs: str) -> None:
        self.name, self.kind = name, kind
        self.unmet_dependencies = [SimpleNamespace(name=need) for need in needs]

    def get_buffer_names(self) -> list[str]:
        return [self.name]
