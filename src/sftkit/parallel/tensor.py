"""Tensor parallelism: the matrices of a block are sharded over ranks, activations between them by position.

Ranks of a group hold the same rows. Each computes embedding, norms and loss for its own columns of them; attention
and the feed-forward layer see whole rows and some of the heads and channels: an all-gather before, a reduce-scatter
after (Megatron's sequence parallelism, arXiv 2205.05198). `without_sequence_parallel`, for decoding and checks,
turns that off.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from sftkit.config.rules import DIVIDED, TENSOR_MODEL_TYPES
from sftkit.errors import config_error
from sftkit.models.structure import decoder_blocks
from sftkit.runtime.start import replaced

COLUMNWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class Activations:
    """How activations of a model lie between its attention and feed-forward layers; its hooks and
    `without_sequence_parallel` share it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.sequence_parallel = True

    @property
    def placement(self) -> Placement:
        """Return how a row lies between its ranks."""
        return Shard(1) if self.sequence_parallel else Replicate()


def without_sequence_parallel(orig_model: PreTrainedModel) -> AbstractContextManager[None]:
    """Give every rank of a group all positions of its rows within the context: inputs of any length, as in decoding. A
    model without tensor parallelism stays as it is."""
    activations = getattr(orig_model, "_activations", None)
    if not isinstance(activations, Activations):
        return nullcontext()
    return replaced(activations, "sequence_parallel", value=False)


def tensor_group(orig_model: PreTrainedModel) -> ProcessGroup | None:
    """Return the ranks that share the matrices of a model; None without tensor parallelism."""
    activations = getattr(orig_model, "_activations", None)
    return activations.group if isinstance(activations, Activations) else None


def shard_matrices(orig_model: PreTrainedModel, blocks: list[torch.nn.Module], mesh: DeviceMesh) -> None:
    """Turn the weights of the blocks into DTensors on the mesh, in place, and let them exchange activations.

    Raises:
        ConfigError: an architecture that is not in TENSOR_MODEL_TYPES, or heads or channels that the ranks do not
            divide.
    """
    check_tensor_parallel(orig_model, mesh.size())
    # On the model, where without_sequence_parallel finds it.
    activations = Activations(mesh.get_group())
    orig_model._activations = activations  # type: ignore[assignment]
    # Placements are asked at each call, as without_sequence_parallel changes that of activations. Heads
    # are dimension 2.
    channels = _as_dtensor(mesh, lambda: Shard(-1))
    heads = _as_dtensor(mesh, lambda: Shard(2))
    between = _as_dtensor(mesh, lambda: activations.placement)

    def add_up(_: torch.nn.Module, __: tuple[Tensor, ...], output: DTensor) -> Tensor:
        return _exchanged(output, activations.placement).to_local()

    # By hooks: the model's own code then computes on plain tensors of this rank's heads and channels, in
    # whatever attention backend.
    for names, placement, pre_hook, hook in (
        (COLUMNWISE, Shard(0), None, _to_local),
        (ROWWISE, Shard(1), channels, add_up),
        (NORMS, Replicate(), between, _gather),
        (HEAD_NORMS, Replicate(), heads, _to_local),
    ):
        for module in (m for block in blocks for name, m in list(block.named_modules()) if name in names):
            _distribute(module, mesh, placement)
            if pre_hook is not None:
                module.register_forward_pre_hook(pre_hook)
            module.register_forward_hook(hook)


@torch.no_grad()
def add_up_partial_gradients(model: torch.nn.Module) -> None:
    """Add up the gradients of weights that all ranks of a group hold, in fp32: norms, of which each rank has the
    gradient from its own positions or heads. One all-reduce for all of them; none is needed where FSDP has exchanged
    the gradients of a block."""
    partial = [p for p in model.parameters() if isinstance(p.grad, DTensor) and p.grad.placements == (Partial(),)]
    if not partial:
        return
    gradients = [p.grad.to_local() for p in partial]  # type: ignore[union-attr]
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    mesh = partial[0].grad.device_mesh  # type: ignore[union-attr]
    torch.distributed.all_reduce(flat, group=mesh.get_group())
    for p, own, total in zip(partial, gradients, flat.split([g.numel() for g in gradients]), strict=True):
        p.grad = DTensor.from_local(total.view_as(own).to(own.dtype), mesh, [Replicate()], run_check=False)


def check_tensor_parallel(orig_model: PreTrainedModel, size: int) -> None:
    """Raise what `shard_matrices` raises."""
    config = orig_model.config.get_text_config()
    if config.model_type not in TENSOR_MODEL_TYPES:
        raise config_error(
            "no tensor-parallel plan", size=size, model_type=config.model_type, known=", ".join(TENSOR_MODEL_TYPES)
        )
    check_split(orig_model, size, DIVIDED, {*COLUMNWISE, *ROWWISE, *NORMS, *HEAD_NORMS})


def check_split(orig_model: PreTrainedModel, size: int, divided: Collection[str], known: Collection[str]) -> None:
    """Reject a model that `size` ranks cannot split.

    Args:
        divided: numbers of its config that they must divide. known: names of the modules of a block.

    Raises:
        ConfigError: a number that they do not divide, or a block with weights in other modules than these.
    """
    config = orig_model.config.get_text_config()
    for name in divided:
        if (number := getattr(config, name)) % size:
            raise config_error("number that ranks do not divide", size=size, name=name, number=number)
    for block in decoder_blocks(orig_model):
        odd = [name for name, m in block.named_modules() if name not in known and list(m.parameters(recurse=False))]
        if odd:
            raise config_error("unplanned parts of a block", size=size, odd=", ".join(odd))


def _distribute(module: torch.nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, param in list(module.named_parameters(recurse=False)):
        # A bias behind a sum over ranks is added once: DTensor does so with a replicated one.
        along = Replicate() if name == "bias" and placement == Shard(1) else placement
        # No rank sends: each has the same values, or none yet (meta).
        distributed = distribute_tensor(param.data, mesh, [along], src_data_rank=None)
        module.register_parameter(name, torch.nn.Parameter(distributed, requires_grad=param.requires_grad))


def _as_dtensor(mesh: DeviceMesh, placement: Callable[[], Placement]) -> Any:
    """Return a hook that wraps the input, this rank's shard, as a DTensor."""

    def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (DTensor.from_local(inputs[0], mesh, [placement()], run_check=False), *inputs[1:])

    return hook


def _to_local(_: torch.nn.Module, __: tuple[Tensor, ...], output: DTensor) -> Tensor:
    return output.to_local()


def _gather(_: torch.nn.Module, __: tuple[Tensor, ...], output: DTensor) -> DTensor:
    """Gather whole rows; a DTensor still, so that gradients of what reads it are added up before they are scattered."""
    return _exchanged(output, Replicate())


def _exchanged(rows: DTensor, placement: Placement) -> DTensor:
    """Return rows, [B, T, H], as another placement has them."""
    batch, length, width = rows.shape
    if batch > 1:
        return rows.redistribute(placements=[placement])
    # A collective joins and parts tensors along their first dimension, so columns of several rows are copied before or
    # after it. Those of one row need not be, once the dimension of rows is gone.
    placement = Shard(0) if placement.is_shard() else placement
    one_row = rows.view(length, width)
    return one_row.redistribute(placements=[placement]).view(1, length, width)  # type: ignore[attr-defined]
