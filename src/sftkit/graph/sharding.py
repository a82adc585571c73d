"""How weights, activations and tokens lie over the processes, with all exchanges as operators of a graph.

Experts and the exchanges between ranks that share rows come first, then sharded weights.

Each exchange is the transpose of its gradient. So gradients are those of the sum of all ranks' losses, whatever part of
it a rank computes: the code need not know which values ranks have in common.

All shapes are known when a graph is captured: no size depends on the choices of a router. The matrix products of
experts are operators of static shapes: torch's grouped matrix product over rows of one expert each, which skips the
rows that no expert of this rank computes. Each tensor-parallel rank has different experts. The ranks gather each
other's tokens and what the router chose for them; each computes its own experts for all of these, and the results are
added up where the tokens came from. So the host waits for nothing, and no token is dropped.

Letters: N tokens of a rank, K experts that each token visits, E experts of a rank, S rows, H width.

Weights in the graph: sharded by SimpleFSDP, divided by tensor parallelism, and tables that are read in shards.

SimpleFSDP (arXiv 2411.00284): weights are DTensors, and a module that reads one of its own gathers it by
`redistribute`. There are no hooks and no state: the gather is an operator among others and its gradient a
reduce-scatter, so both can be traced into a graph. Without a graph the model computes the same. Names of classes and
parameters stay.

Tensor parallelism has the layout of `sftkit.parallel.tensor` without DTensors between layers: a rank's shard of a
matrix is a plain tensor, an all-gather follows a norm, and a reduce-scatter follows the matrix that ends a layer.

Embeddings are looked up in the shards of the table: token ids and hidden states travel, and the table does not. A
gather of the table costs its whole size, and its gradient twice that in fp32, at the two ends of a micro-batch, where
no computation hides it. Instead each rank looks up the tokens of all ranks in its own rows, and the results are added
up, as in Megatron-LM's vocabulary-parallel embedding (arXiv 1909.08053). This pays while the hidden states of all ranks
are smaller than that.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.config.topology import Topology
from sftkit.errors import config_error
from sftkit.graph import compat
from sftkit.models.experts import weighted_sums
from sftkit.models.structure import decoder_blocks, embedding_module, output_projection
from sftkit.objectives.objective import ModelWithLoss
from sftkit.ops.tensors import local_region
from sftkit.parallel import tensor
from sftkit.runtime.start import replaced_in_each


def gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the shards of all ranks of a group, joined along a dimension."""
    return _Exchanged.apply(shard, compat.all_gather, compat.reduce_scatter, dim, group)


def add_and_scatter(value: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's shard, along a dimension, of the sum over the ranks of a group."""
    return _Exchanged.apply(value, compat.reduce_scatter, compat.all_gather, dim, group)


class Exchange(tensor.Activations):
    """Between the layers of a tensor-parallel model; in `without_sequence_parallel` every rank has all positions."""

    def gather(self, positions: Tensor) -> Tensor:
        """Gather whole rows, [B, T, H], from the ranks' columns of them, [B, C, H]."""
        return gather(positions, 1, self.group) if self.sequence_parallel else positions

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' parts of whole rows, [B, T, H]: this rank's columns of it, [B, C, H]."""
        if self.sequence_parallel:
            return add_and_scatter(partial, 1, self.group)
        return _Exchanged.apply(partial, compat.all_reduce, compat.all_reduce, self.group)


class _Exchanged(torch.autograd.Function):
    """A linear exchange, whose gradient is exchanged by the transpose. `where`: further arguments of both."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, exchange: Callable[..., Tensor], transpose: Callable[..., Tensor], *where: Any
    ) -> Tensor:
        ctx.transpose = transpose
        ctx.where = where
        return exchange(value, *where)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Linear, so that nothing of the forward pass has to be kept for it.
        return ctx.transpose(gradient, *ctx.where), None, None, *(None for _ in ctx.where)


def share_experts(orig_model: PreTrainedModel, group: ProcessGroup) -> None:
    """Let each rank of a group compute an equal share of every block's experts, in order; call it before weights are
    sharded."""
    # Experts as most architectures have them: gated, without biases, [experts, out, in].
    form = {"has_gate": True, "has_bias": False, "is_transposed": False}
    for module in orig_model.modules():
        if all(getattr(module, name, None) is wanted for name, wanted in form.items()):
            module.__class__ = _shared_out(type(module), group)  # type: ignore[arg-type]  # torch hashes modules


@cache
def _shared_out(cls: type[torch.nn.Module], group: ProcessGroup) -> type[torch.nn.Module]:
    """Return a class of the same name whose experts are computed by all ranks of a group."""

    def forward(self: torch.nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return by_all_gather(self, hidden, top_k_index, top_k_weights, group)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def by_all_gather(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    """Return the contribution of the experts of all ranks to this rank's tokens, [N, H].

    Args:
        experts, hidden, chosen, weights: of added.
    """
    hidden = gather(hidden, 0, group)
    weights = gather(weights, 0, group)
    first = group.rank() * len(experts.gate_up_proj)
    return add_and_scatter(added(experts, hidden, compat.all_gather(chosen, 0, group), weights, first), 0, group)


def added(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, first_expert: int) -> Tensor:
    """Return the contribution of a rank's experts to tokens, [N, H]: 0 for tokens that visit none of them.

    Args:
        experts: with this rank's gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
        hidden: [N, H]. chosen: int64 [N, K], numbers of experts. weights: [N, K].
        first_expert: number of its first expert.
    """
    numbers = chosen - first_expert
    # Others than this rank's become one number behind the last: sorted, they come last, where the products skip them.
    count = len(experts.down_proj)
    return weighted_sums(experts, hidden, torch.where((numbers >= 0) & (numbers < count), numbers, count), weights)


_REDUCE_DTYPE = "_sftkit_reduce_dtype"
"Attribute of a module that is sharded: the dtype of the sum of gradients over the ranks; None: their own."
_READS = "_sftkit_reads"
"Attribute of a module while its own parameters are read: then they come gathered."


Place = tuple[DeviceMesh, Sequence[Placement]]
"""How a weight lies over the ranks. The last placement, a shard, is gathered where the weight is read. Of the others
replicas are copies, and shards stay sharded."""


class _Read(torch.autograd.Function):
    """A weight as a plain tensor: whole but for what stays sharded (`gathers`), or this rank's shard. Its gradient is
    summed over the ranks that read it.

    Gradients are scattered first, so that only shards are summed over copies; `redistribute` alone sums whole ones.
    """

    @staticmethod
    def forward(ctx: Any, param: DTensor, reduce_dtype: torch.dtype | None, gathers: bool) -> Tensor:  # noqa: FBT001
        ctx.mesh = param.device_mesh
        ctx.placements = param.placements
        ctx.dtype = param.dtype
        ctx.reduce_dtype = reduce_dtype
        # A rank's own shard may have fewer rows than others', so the whole shape does not follow from it.
        ctx.whole = {} if gathers else {"shape": param.shape, "stride": param.stride()}
        return (param.redistribute(placements=[*param.placements[:-1], Replicate()]) if gathers else param).to_local()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        *copies, shards = [Partial() if place.is_replicate() else place for place in ctx.placements]
        own = shards if ctx.whole else Partial()
        # Without copies nothing is summed, and a cast there and back would take memory for nothing.
        if ctx.reduce_dtype is not None and any(part.is_partial() for part in (*copies, own)):
            gradient = gradient.to(ctx.reduce_dtype)
        summed = DTensor.from_local(gradient, ctx.mesh, [*copies, own], run_check=False, **ctx.whole)
        summed = summed.redistribute(placements=[*copies, shards]).redistribute(placements=ctx.placements)
        return summed.to(ctx.dtype), None, None


def shard_for_graph(model: ModelWithLoss, spec_of: Callable[[torch.nn.Module, str], Place], precision: str) -> None:
    """Shard every weight of the model, in place.

    Args:
        spec_of: of a module and the name of one of its own parameters how that lies over the ranks.
        precision: of the weights; bf16 gradients are summed over the ranks in fp32.
    """
    sharded: dict[int, torch.nn.Parameter] = {}  # tied weights stay one
    for module in model.orig_model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            if id(param) not in sharded:
                # No rank sends: each has the same values, or none yet (meta), so that shards are cut
                # without an exchange.
                distributed = distribute_tensor(param.data, *spec_of(module, name), src_data_rank=None)
                sharded[id(param)] = torch.nn.Parameter(distributed, requires_grad=param.requires_grad)
            module.register_parameter(name, sharded[id(param)])
        if own:
            module.__class__ = _gathering(type(module), tuple(own))  # type: ignore[arg-type]  # torch hashes modules
            module.__dict__[_REDUCE_DTYPE] = torch.float32 if precision == "bf16" else None
    # The head's weight is gathered for the loss, which reads it without calling the head. Around the method of this one
    # object, not of its class: another model in the process may be whole.
    inner: Callable[..., Any] = model.sums_of_selected

    def sums_of_selected(*args: Any) -> Any:
        with reading(output_projection(model.orig_model)):
            return inner(*args)

    model.sums_of_selected = sums_of_selected  # type: ignore[method-assign,assignment]


def reading(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Give out the module's own parameters gathered, within the context; outside they are this rank's DTensors."""
    return replaced_in_each(_READS, {module: True})


@cache
def _gathering(cls: type[torch.nn.Module], names: tuple[str, ...]) -> type[torch.nn.Module]:
    """Return a class of the same name whose forward pass reads these parameters gathered."""

    @wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with reading(self):
            return cls.forward(self, *args, **kwargs)

    # Properties of a subclass, since a module's __getattr__ is asked only for names that its class does not have. No
    # parametrization of torch.nn.utils: that renames parameters, and with them the files of a checkpoint.
    members = {name: property(partial(_read, name)) for name in names}
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, **members})


def _read(name: str, module: torch.nn.Module) -> Tensor | None:
    # Private, and without a public way: the name is a property of the class by now, so getattr and get_parameter would
    # come back to this function. torchtitan does the same (pytorch/torchtitan#1273).
    param = module._parameters[name]
    if module.__dict__.get(_READS) and isinstance(param, DTensor):
        return _Read.apply(param, module.__dict__[_REDUCE_DTYPE], True)  # noqa: FBT003
    return param


FP32 = 4
"Bytes of an element of a gradient while ranks add it up."


def looked_up_in_shards(orig_model: PreTrainedModel, tokens: int) -> AbstractContextManager[None]:
    """Let the embedding of a sharded model be looked up in shards within the context, if that moves fewer bytes.

    Every rank must look up the same number of tokens: this holds for captured graphs, and not for evaluation.

    Args:
        tokens: that a rank looks up.
    """
    module: Any = embedding_module(orig_model)
    weight = module._parameters["weight"]  # private, as in sharding: read as an attribute it would be gathered
    # The table is sharded by rows, read by nobody else, and looked up as torch does it: sharding has put a class of its
    # own before the module's.
    tied = output_projection(orig_model)._parameters.get("weight") is weight
    sharded = isinstance(weight, DTensor) and weight.placements[-1] == Shard(0)
    if tied or not sharded or type(module).__bases__ != (torch.nn.Embedding,):
        return nullcontext()
    last = weight.device_mesh.ndim - 1
    # Hidden states of all ranks, there and their gradients back, against the table, there and its gradient back. Both
    # go through rings, so the share that a rank sends is the same.
    if 2 * weight.device_mesh.size(last) * tokens * weight.itemsize >= len(weight) * (weight.itemsize + FP32):
        return nullcontext()
    group: ProcessGroup = weight.device_mesh.get_group(last)
    (first, rows), *_ = local_region(weight)
    # The gradient of padding stays 0, as the module has it.
    padding = -1 if module.padding_idx is None else module.padding_idx - first

    def forward(ids: Tensor) -> Tensor:
        """Return the rows of these tokens, [*ids.shape, H]."""
        every = compat.all_gather(ids.flatten(), 0, group) - first
        held = (every >= 0) & (every < rows)
        # Not `weight`: a capture puts a fake one in its place.
        shard = _Read.apply(module._parameters["weight"], module.__dict__[_REDUCE_DTYPE], False)  # noqa: FBT003
        own = F.embedding(every.where(held, 0), shard, padding if 0 <= padding < rows else None)
        # Each token is in the rows of one rank: the sum is its row and zeros, exact in any precision.
        found = add_and_scatter(own.where(held[:, None], 0.0), 0, group)
        return found.view(*ids.shape, -1)

    return replaced_in_each("forward", {module: forward})


@dataclass(frozen=True)
class TensorPlan:
    """The modules of a block by their roles in tensor parallelism. Names are relative to the block."""

    columns: tuple[str, ...]
    "matrices sharded by their outputs: heads, channels"
    rows: tuple[str, ...]
    "matrices sharded by their inputs, whose results are added up"
    gathered: tuple[str, ...]
    "norms behind which whole rows are needed"
    replicated: tuple[str, ...]
    "what every rank computes with whole weights, of its own positions or heads"
    divided: tuple[str, ...] = tensor.DIVIDED
    "numbers of the model's config that the ranks must divide"
    experts: tuple[str, ...] = ()
    "routed experts, a share of them on each rank; nothing else is sharded, and each rank computes its own positions"


_DEEPSEEK_V3 = TensorPlan(
    columns=(*("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), *("mlp.gate_proj", "mlp.up_proj")),
    rows=tensor.ROWWISE,
    gathered=tensor.NORMS,
    replicated=(
        *("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm"),
        *("mlp.gate", *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))),
    ),
    divided=(*tensor.DIVIDED, "n_routed_experts"),
    experts=("mlp.experts",),
)
PLANS = {
    **dict.fromkeys(
        tensor.TENSOR_MODEL_TYPES, TensorPlan(tensor.COLUMNWISE, tensor.ROWWISE, tensor.NORMS, tensor.HEAD_NORMS)
    ),
    "deepseek_v3": _DEEPSEEK_V3,
}
"By model_type."


def check_tensor_plan(orig_model: PreTrainedModel, size: int) -> None:
    """Reject a model that does not allow tensor parallelism over `size` ranks.

    Raises:
        ConfigError: an architecture without a plan, or numbers that the ranks do not divide.
    """
    model_type = orig_model.config.model_type
    if model_type not in PLANS:
        raise config_error(
            "no tensor-parallel plan of the graph engine", size=size, model_type=model_type, known=", ".join(PLANS)
        )
    plan = PLANS[model_type]
    known = {*plan.columns, *plan.rows, *plan.gathered, *plan.replicated, *plan.experts}
    tensor.check_split(orig_model, size, plan.divided, known)


def make_graph_meshes(topology: Topology, device_type: str) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Make the process groups of a topology; every rank calls it.

    Returns:
        ([ranks] or [replicas, ranks], for weights that every rank uses whole, sharded over all ranks;
        [tensor, shards] or [replicas, tensor, shards], for matrices of tensor-parallel blocks, sharded by tensor first)
    """
    t = topology
    sizes = (t.replicas, t.shards * t.tensor)
    every = init_device_mesh(device_type, sizes, mesh_dim_names=("replicas", "shards"))
    every = every["shards"] if t.replicas == 1 else every
    if t.tensor == 1:
        return every, None
    # Ranks that share rows are neighbours, so that their exchanges stay within a machine. In the mesh their dimension
    # comes before that of shards: a matrix is divided by tensor first, and each part sharded.
    ranks = torch.arange(t.world_size).view(t.replicas, t.shards, t.tensor).transpose(1, 2)
    # As a list: a transposed tensor keeps odd strides where a size is 1, and torch 2.11 then cannot slice the mesh. No
    # issue is known.
    mesh = DeviceMesh(device_type, ranks.tolist(), mesh_dim_names=("replicas", "tensor", "shards"))
    return every, mesh["tensor", "shards"] if t.replicas == 1 else mesh


def weight_placement(
    orig_model: PreTrainedModel, every: DeviceMesh, mesh: DeviceMesh | None
) -> Callable[[torch.nn.Module, str], Place]:
    """Return how every weight of a model lies over the ranks: a function of a module and the name of one of
    its own parameters."""
    sharded: dict[tuple[torch.nn.Module, str], Place] = {}
    if mesh is not None:
        plan = PLANS[orig_model.config.model_type]
        copies = [Replicate()] * (mesh.ndim - 2)  # between replicas
        for block in decoder_blocks(orig_model):
            for name, param in block.named_parameters():
                path, _, own = name.rpartition(".")
                # Along which dimensions tensor-parallel ranks, and then shards, divide it.
                if path in plan.columns:
                    dims = (0, 0)
                elif path in plan.rows and own == "weight":
                    dims = (1, 0)
                elif path in plan.experts:  # of few experts there is a part on every shard, too
                    dims = (0, int((len(param) // mesh["tensor"].size()) % mesh.size(-1) > 0))
                else:
                    continue
                sharded[block.get_submodule(path), own] = mesh, [*copies, *map(Shard, dims)]
    others: Place = every, [*[Replicate()] * (every.ndim - 1), Shard(0)]
    return lambda module, name: sharded.get((module, name), others)


def exchange_activations(orig_model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Let the blocks of a model whose matrices are shards exchange activations, in place; before weights are sharded.

    Args:
        mesh: that has a dimension "tensor".
    """
    plan = PLANS[orig_model.config.model_type]
    exchange = Exchange(mesh.get_group("tensor"))
    # without_sequence_parallel finds it there, as in a model that parallel/tensor.py has sharded.
    orig_model._activations = exchange  # type: ignore[assignment]
    for block in decoder_blocks(orig_model):
        for name, module in _of_plan(block, plan.gathered).items():
            # A block with experts gathers before attention alone: its feed-forward layer exchanges tokens by itself.
            if name == tensor.NORMS[0] or not _of_plan(block, plan.experts):
                module.register_forward_hook(lambda _, __, output: exchange.gather(output))
        for module in _of_plan(block, plan.rows).values():
            module.__class__ = _adding_up(type(module))  # type: ignore[arg-type]  # torch hashes modules
            module.__dict__[_EXCHANGE] = exchange


_EXCHANGE = "_sftkit_exchange"
"Attribute of a matrix whose results are parts: its Exchange."


@cache
def _adding_up(cls: type[torch.nn.Linear]) -> type[torch.nn.Linear]:
    """Return a class of the same name that adds the ranks' parts up before its bias, which is one."""

    def forward(self: torch.nn.Linear, input: Tensor) -> Tensor:
        # Before the bias, which each rank has whole: in the parts it would be added once for each rank.
        summed: Tensor = self.__dict__[_EXCHANGE].add_up(F.linear(input, self.weight))
        return summed if self.bias is None else summed + self.bias

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _of_plan(block: torch.nn.Module, names: Sequence[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of these names that a block has."""
    return {name: module for name, module in block.named_modules() if name in names}
