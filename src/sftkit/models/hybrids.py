"""Recurrent layers in hybrid models: which classes of transformers have them, and what computes them in packed rows.

transformers computes these layers with functions of the model's own module, and passes the arguments of the layer on to
them. With `documents` among these arguments our operators take their place, which begin every document with an empty
state; without, in generation and in the plain model, a function of transformers computes. No class is changed.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from sftkit.config.topology import Topology
from sftkit.errors import config_error
from sftkit.models import structure
from sftkit.ops import attention, recurrent

log = logging.getLogger(__name__)

Function = Callable[..., Any]


def _convolution(original: Function) -> Function:
    """Return a causal convolution of [B, C, T] that stays within documents if it is given them."""
    from sftkit.ops.short_convolution import short_convolution

    plain = inspect.unwrap(original)

    def convolve(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        documents: Any = None,
        seq_idx: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        documents = seq_idx if documents is None else documents
        if documents is None:
            return (original if x.is_cuda else plain)(x, weight, bias, activation=activation, **kwargs)
        return short_convolution(x.mT, weight, bias, activation, documents.positions).mT

    return convolve


def _gated_delta_rule(original: Function) -> Function:
    """Return a gated delta rule that stays within documents if it is given them.

    Without, it is transformers' own code in torch, as the plain model is what ours is compared with; an answer, which
    keeps the last state, may have the kernels that transformers found.
    """

    plain = inspect.unwrap(original)

    def delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, documents: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        kernel = "fla" if value.is_cuda and value.dtype != torch.float32 and _kernels["fla"] else "torch"
        if documents is None:
            answers = kwargs.get("output_final_state") and kernel == "fla"
            return (original if answers else plain)(query, key, value, g=g, beta=beta, **kwargs)
        query, key = recurrent.normalized(query), recurrent.normalized(key)
        if kernel == "fla":
            query, key = query.to(value.dtype), key.to(value.dtype)
        borders = documents.cu_seqlens if kernel == "fla" else documents.positions
        out, *_ = recurrent.gated_delta_rule(query, key, value, g.float(), beta, borders, kernel)
        return out, None

    return delta_rule


def _one_position(original: Function) -> Function:
    """Return the function for a single position, in torch where its kernels cannot compute."""
    plain = inspect.unwrap(original)

    def recur(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (original if query.is_cuda else plain)(query, *args, **kwargs)

    return recur


def _state_space(original: Function) -> Function:
    """Return Mamba2's recurrence that stays within documents if it is given them.

    Without, it is transformers' own code, as in `_gated_delta_rule`, except at the beginning of an answer: in torch
    that code takes gigabytes for a few prompts.
    """
    from sftkit.ops.state_space import last_state, state_space

    plain = inspect.unwrap(original)

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor,
        dt_bias: Tensor,
        dt_limit: tuple[float, float],
        documents: Any = None,
        **kwargs: Any,
    ) -> Any:
        steps: dict[str, Any] = {"dt_bias": dt_bias, "dt_limit": dt_limit}
        if documents is not None:
            return state_space(x, dt, A, B, C, D=D, **steps, chunk_size=chunk_size, starts=documents.positions)
        rows, length = x.shape[:2]
        if kwargs["return_final_states"] and kwargs["initial_states"] is None:
            starts = torch.arange(length, device=x.device).expand(rows, -1)
            out = state_space(x, dt, A, B, C, D=D, **steps, chunk_size=min(chunk_size, length), starts=starts)
            return out, last_state(x, dt, A, B, **steps)
        return (original if x.is_cuda else plain)(x, dt, A, B, C, chunk_size=chunk_size, D=D, **steps, **kwargs)

    return scan


def _one_by_one(original: Function) -> Function:
    """Return Mamba2's convolution and recurrence in one kernel, None if it is given documents: the layer then calls
    one after the other.
    """

    def combined(*args: Any, documents: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if documents is None else None

    return combined


_kernels = {"fla": False}
"Whether flash-linear-attention computes on the GPUs of this process; set before anything is traced."


class Mixer(NamedTuple):
    """What a class of recurrent layers needs."""

    layer_type: str
    "its name in layer_types of the config"
    functions: Mapping[str, Callable[[Function], Function]]
    "name of a function of its module -> maker of what takes its place, given the function"
    products: Callable[[Any], int]
    "multiplications of a layer for one token, besides those with its parameters"
    kept: Callable[[Any], int]
    "elements that a compiled layer keeps of a token for the backward pass"
    documents_as: str = "documents"
    "the only argument that its block hands on to it"


def _delta_products(layer: Any) -> int:
    """Return three products with the state [K, V] of each head: of the key that is read, of the key that is written,
    and of the query (Gated Delta Networks, arXiv 2412.06464, equation 10). The chunks' further products are not work.
    """
    return int(3 * layer.num_v_heads * layer.head_k_dim * layer.head_v_dim)


def _delta_kept(layer: Any) -> int:
    """Return what is kept: the convolution's input, normalized queries and keys of all value heads, the gate, the
    output and what leaves the norm, and the inverse of a system of 64 positions.
    """
    keys, values = layer.num_v_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
    return int(layer.conv_dim + 2 * keys + 3 * values + 64 * layer.num_v_heads)


def _scan_products(layer: Any) -> int:
    """Return two products with the state [P, N] of each head: of what is added to it, and of what is read."""
    return int(2 * layer.num_heads * layer.head_dim * layer.ssm_state_size)


def _scan_kept(layer: Any) -> int:
    """Return what is kept: the projected input, the convolution before and after its activation, vectors B and C by
    chunk, inputs with decays, the states between chunks, what is read of them, products of B and C, and the output.
    """
    inner, vectors = layer.num_heads * layer.head_dim, layer.n_groups * layer.ssm_state_size
    states = inner * layer.ssm_state_size // layer.chunk_size
    scanned = 3 * inner + 3 * vectors + states + layer.chunk_size * layer.n_groups
    return int(layer.in_proj.out_features + 2 * layer.conv_dim + scanned)


_DELTA_FUNCTIONS = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _one_position,
}
_DELTA = Mixer("linear_attention", _DELTA_FUNCTIONS, _delta_products, _delta_kept)
_SCAN_FUNCTIONS = {
    "causal_conv1d_fn": _convolution,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _one_by_one,
}
_SCAN = Mixer("linear_attention", _SCAN_FUNCTIONS, _scan_products, _scan_kept)
_CONVOLUTION = Mixer(
    "conv", {"causal_conv1d_fn": _convolution}, lambda _: 0, lambda x: 5 * int(x.in_proj.in_features), "seq_idx"
)
MIXERS = {
    **{f"{family}GatedDeltaNet": _DELTA for family in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "OlmoHybrid")},
    **dict.fromkeys(("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), _SCAN),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), _CONVOLUTION),
}
"By the class of the layer, or of what mixes tokens in it."


_SELECTIVE = "Mamba 1: transformers computes it one position at a time, and no kernel of it begins again at a document"
UNSUPPORTED = {
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"), _SELECTIVE),
    "Mamba2Mixer": "Mamba 2 in a model without attention, whose sizes a run reads",
    "GitSelfAttention": "it does not take its attention from transformers' registry",  # only its vision tower does
    "KimiLinearDeltaAttention": "Kimi Delta Attention: no operator here has a decay for each channel of a key",
    "Zamba2MambaMixer": "Mamba 2 between layers that share their weights, which blocks of a run cannot",
}
"By the class of a recurrent layer why it is not in MIXERS, and of other layers why no boundary holds their tokens."


def mixers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Mixer]]:
    """Yield (name, layer, what it needs) of the recurrent layers of a model that are known here."""
    for name, inner in module.named_modules():
        found = next((MIXERS[cls.__name__] for cls in type(inner).__mro__ if cls.__name__ in MIXERS), None)
        if found is not None:
            yield name, inner, found


def use_operators(orig_model: PreTrainedModel) -> None:
    """Put our operators in the place of the functions that the model's recurrent layers call.

    Raises:
        ConfigError: this version of transformers has no such function.
    """
    found = list(mixers(orig_model))
    # Decided before anything is traced.
    deltas: list[Any] = [layer for _, layer, mixer in found if mixer is _DELTA]
    # In fp32 torch computes: nothing to compare, and nothing that would be slow for want of kernels.
    if torch.cuda.is_available() and deltas and orig_model.dtype != torch.float32:
        # Layers repeat their keys for all heads of values before the function is called.
        sizes = {(x.num_v_heads, x.num_v_heads, x.head_k_dim, x.head_v_dim) for x in deltas}
        reason = next(filter(None, (recurrent.fla_unsupported_reason(*size) for size in sizes)), None)
        _kernels["fla"] = reason is None
        if reason is not None:
            log.warning("recurrent layers take several times longer: flash-linear-attention %s", reason)
    for path, layer, mixer in found:
        if mixer.documents_as != "documents":
            block = orig_model.get_submodule(path.rpartition(".")[0])
            block.register_forward_pre_hook(_renamed(mixer.documents_as), with_kwargs=True)
        module = sys.modules[layer.forward.__module__]
        for name, replacement in mixer.functions.items():
            original = getattr(module, name, None)
            if original is None:
                words = {"cls": type(orig_model).__name__, "version": transformers.__version__}
                raise config_error("no function of recurrent layers", module=module.__name__, name=name, **words)
            if getattr(original, "of_documents", False):
                continue
            ours: Any = replacement(original)
            ours.of_documents = True
            setattr(module, name, ours)


def _renamed(name: str) -> Function:
    """Return a hook that gives a block its documents under another name, too."""

    def rename(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, name: kwargs.get("documents")}

    return rename


def mixes_tokens(orig_model: PreTrainedModel) -> str | None:
    """Return what in the model lets tokens see each other and stops at no document boundary; None: nothing."""
    for name, inner in orig_model.named_modules():
        if reason := UNSUPPORTED.get(type(inner).__name__):
            return f"the layer {name} ({reason})"
    kinds = set(getattr(orig_model.config.get_text_config(), "layer_types", None) or ())
    others = {"full_attention", "sliding_attention", attention.CHUNKED, structure.BESIDE_ATTENTION}
    odd = kinds - others - structure.without_attention(orig_model)
    if odd:
        return f"a layer of type {', '.join(sorted(map(str, odd)))}"
    name = stray_convolution(orig_model)
    return f"the convolution {name}" if name is not None else None


def stray_convolution(orig_model: torch.nn.Module) -> str | None:
    """Return the name of a convolution over positions that is no part of a recurrent layer known here; None: none."""
    inside = {inner for _, layer, _ in mixers(orig_model) for inner in layer.modules()}
    found = (name for name, m in orig_model.named_modules() if isinstance(m, torch.nn.Conv1d) and m not in inside)
    return next(found, None)


def check_topology(orig_model: PreTrainedModel, topology: Topology) -> None:
    """Reject context parallelism: a rank would need the state of the chunk before its own.

    Raises:
        ConfigError: the model has recurrent layers, and ranks share rows.
    """
    if topology.context > 1 and (reason := state_besides_keys(orig_model)) is not None:
        raise config_error("recurrent layers in chunks", model=orig_model.config.model_type, reason=reason)


def state_besides_keys(orig_model: PreTrainedModel) -> str | None:
    """Return what in the model keeps a state of earlier tokens that is not their keys and values; None: nothing."""
    name = next((name for name, *_ in mixers(orig_model)), None)
    return mixes_tokens(orig_model) if name is None else f"the recurrent layer {name}"


def check_trees(orig_model: PreTrainedModel) -> None:
    """Reject models that do more in a row of prefix trees than attend to ancestors.

    Raises:
        ConfigError: the model has an encoder or recurrent layers, attends within chunks, or its positions depend on
            the length of a document, of which a shared position has several.
    """
    found = {
        "an encoder": orig_model.config.is_encoder_decoder,
        "recurrent layers": state_besides_keys(orig_model) is not None,
        "attention within chunks of a document": attention.attention_chunk(orig_model.config) is not None,
        "longrope": structure.longrope_limit(orig_model.config) is not None,
    }
    if names := [name for name, there in found.items() if there]:
        raise config_error(
            "model that has no trees", model_type=orig_model.config.model_type, names=" and ".join(names)
        )
