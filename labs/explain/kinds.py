"""What kind of work a kernel or operator does, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MATRIX, ATTENTION, ELEMENTWISE, REDUCTION = "matrix products", "attention", "elementwise", "reductions"
COPIES, COMMUNICATION, IDLE = "copies and lookups", "communication", "idle"
KERNEL_KINDS = (MATRIX, ATTENTION, ELEMENTWISE, REDUCTION, COPIES, COMMUNICATION, IDLE)
"""Kinds into which a step's time is split. idle: the GPU has nothing to do; on a CPU: between operators, in Python, the
dispatcher and guards."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


REDUCTIONS = _names(
    "sum mean amax amin max min argmax argmin softmax log_softmax logsumexp var var_mean std norm linalg_vector_norm "
    "prod any all native_layer_norm layer_norm rms_norm fused_rms_norm native_group_norm cumsum nll_loss "
    "nll_loss_forward cross_entropy_loss count_nonzero"
)
_MATRIX_OPERATORS = _names("mm addmm bmm baddbmm matmul linear addbmm dot mv einsum convolution mkl_linear grouped_mm")
_COPIES = _names(
    "copy clone to _to_copy contiguous cat stack index index_select gather scatter scatter_add index_put index_add "
    "embedding embedding_dense_backward fill zero zeros zeros_like ones ones_like full full_like arange repeat "
    "new_zeros masked_fill constant_pad_nd slice_backward select_backward"
)
_NOTHING = _names(
    "as_strided view reshape t transpose permute expand unsqueeze squeeze slice select detach alias resolve_conj "
    "resolve_neg empty empty_like empty_strided resize lift_fresh unbind split chunk narrow flatten _unsafe_view "
    "unflatten is_nonzero item _local_scalar_dense result_type _has_compatible_shallow_copy_type numpy_T movedim "
    "swapaxes expand_as view_as"
)
_DEVICE = (
    (
        COMMUNICATION,
        r"^(?!triton_).*(?:nccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|AllReduce|SendRecv|PtoP)",
    ),
    (ATTENTION, r"flash|fmha|attention|sdpa|flex"),
    (MATRIX, r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|triton_tem|triton_mm|splitKreduce|s884|s1688|s16816"),
    (
        REDUCTION,
        r"triton_(?:red|per)_|reduce_kernel|[Ss]oftmax|layer_norm|LayerNorm|RowwiseMoments|cub::|nll_loss|logsumexp",
    ),
    (ELEMENTWISE, r"triton_poi_|foreach|multi_tensor"),
    (COPIES, r"Memcpy|Memset|[Cc]opy|CatArray|index|gather|scatter|[Ee]mbedding|FillFunctor|arange"),
    (ELEMENTWISE, r"elementwise"),
)
"Kernels of a GPU, the first that fits."


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel on a GPU."""
    return next((kind for kind, pattern in _DEVICE if re.search(pattern, name)), ELEMENTWISE)


def kind_of_operator(name: str, origins: Mapping[str, Sequence[str]]) -> str | None:
    """Return the kind of an event on a CPU; None: it computes nothing, but holds or arranges what does.

    Args:
        origins: generated kernel -> the ATen operators that it came from.
    """
    # Inductor puts the graph's number in front where a profile has several.
    name = re.sub(r"^graph_\d+_", "", name)
    if name.startswith("cpp_"):
        reduces = any(_plain(operator) in REDUCTIONS for operator in origins.get(name, ()))
        return REDUCTION if reduces else ELEMENTWISE
    if re.match(r"c10d|gloo|nccl", name):
        return COMMUNICATION
    space, _, operator = name.partition("::")
    if not operator or space == "autograd" or operator in ("engine", ""):
        return None
    if re.search(r"attention|flash", operator):
        return ATTENTION
    plain = _plain(operator)
    if plain in _NOTHING:
        return None
    for kind, names in ((MATRIX, _MATRIX_OPERATORS), (REDUCTION, REDUCTIONS), (COPIES, _COPIES)):
        if plain in names or operator in names:
            return kind
    return ELEMENTWISE


def _plain(operator: str) -> str:
    """Return the operator's plain name: `aten._softmax_backward_data` as softmax, `mul_` as mul."""
    operator = operator.rpartition(".")[2] if operator.startswith("aten.") else operator
    return re.sub(r"_backward(?:_data|_input|_weight)?$", "", operator).strip("_")
