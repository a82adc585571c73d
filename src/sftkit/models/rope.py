"""Rotary positions: the model's maximum length, and frequencies that depend on the length of a document.

transformers chooses longrope frequencies by the longest document of a batch, so a short document next to a long one
gets other frequencies than alone. Here each document has the frequencies that it has alone, in any layout of rows.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sftkit.config.schema import RopeScaling
from sftkit.config.topology import Topology
from sftkit.errors import ConfigError

ORIGINAL = "original_max_position_embeddings"
LONG = "sftkit_long"
"Submodule of a rotary embedding: a copy with the frequencies of long documents. No file holds its buffers."


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the largest number of positions that a model was made for; None if its config does not say.

    yarn extends original_max_position_embeddings by its factor, linear scaling extends max_position_embeddings by its
    factor; servers count the same way. For all other kinds, and for kinds by layer type other than yarn,
    max_position_embeddings is the whole length.
    """
    text = config.get_text_config()
    given = getattr(text, "max_position_embeddings", None)
    if not isinstance(given, int):
        return None
    reach = given
    for layer_type, rope in _ropes(text):
        factor = rope.get("factor")
        original = rope.get("original_max_position_embeddings") or given
        if rope["rope_type"] == "yarn" and factor:
            reach = max(reach, int(factor * original))
        elif rope["rope_type"] == "linear" and factor and layer_type is None:
            reach = max(reach, int(factor * given))
    return reach


def _ropes(text: PretrainedConfig) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield (layer type, its settings); the type is None if all layers share one."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield None, rope
    else:
        yield from ((key, value) for key, value in rope.items() if isinstance(value, Mapping) and "rope_type" in value)


def longrope_limit(config: PretrainedConfig) -> int | None:
    """Return the length up to which documents use longrope's short frequencies; None without longrope."""
    limits = [rope["original_max_position_embeddings"] for _, rope in _ropes(config.get_text_config()) if _long(rope)]
    return min(limits, default=None)


def _long(rope: Mapping[str, Any]) -> bool:
    return bool(rope["rope_type"] == "longrope")


def scale_rope(config: PretrainedConfig, scaling: RopeScaling | None) -> None:
    """Replace the rotary frequencies of a model's config, as model.rope_scaling says; None: keep them.

    max_position_embeddings becomes the whole length for yarn and llama3, as servers read it; for the other kinds
    servers multiply it by the factor themselves. A second call changes nothing.

    Raises:
        ConfigError: the model has no rotary positions, or several kinds of them.
    """
    if scaling is None:
        return
    text: Any = config.get_text_config()
    own = getattr(text, "rope_parameters", None) or {}
    longest = getattr(text, "max_position_embeddings", None)
    if own.get("rope_type") in (None, "longrope") or not isinstance(longest, int):
        kinds = "rotary frequencies by layer or length" if own else "no rotary positions"
        raise ConfigError(f"model.rope_scaling: {config.model_type} has {kinds}, which it cannot replace: leave it out")
    names = {*asdict(scaling), "type"} - {"rope_theta"}
    rope: dict[str, Any] = {name: value for name, value in own.items() if name not in names}
    rope |= {name: value for name, value in asdict(scaling).items() if value is not None}
    if scaling.rope_type in ("yarn", "llama3"):
        original = rope.setdefault(ORIGINAL, own.get(ORIGINAL) or longest)
        text.max_position_embeddings = max(longest, int(scaling.factor * original))
    text.rope_parameters = rope
    text.standardize_rope_params()
    text.validate_rope()


def check_rope(orig_model: PreTrainedModel, topology: Topology, max_length: int) -> None:
    """Reject longrope with context parallelism, where each rank has only chunks of a document and cannot know
    its length.

    Raises:
        ConfigError: a document may exceed the length of longrope's short frequencies.
    """
    limit = longrope_limit(orig_model.config)
    if limit is not None and topology.context > 1 and max_length > limit:
        raise ConfigError(
            f"data.max_length: {max_length}: longrope of {orig_model.config.model_type} changes for documents longer "
            f"than {limit} positions, and with context parallelism no rank knows a document's length: set {limit} or "
            "less, or train without context parallelism"
        )


def use_document_lengths(orig_model: PreTrainedModel) -> None:
    """Make every longrope of the model choose its frequencies for each document separately."""
    if longrope_limit(orig_model.config) is None:
        return
    for module in [*orig_model.modules()]:
        types = getattr(module, "rope_type", None)
        kinds = types if isinstance(types, dict) else {None: types}
        # Without transformers' decorator the class itself chooses the frequencies (Phi-3.5-MoE, which is rejected).
        if "longrope" in kinds.values() and hasattr(type(module).forward, "__wrapped__"):
            long = copy.deepcopy(module)
            for layer_type in (name for name, kind in kinds.items() if kind == "longrope"):
                settings: Any = module.config.rope_parameters  # type: ignore[union-attr]
                limit = (settings if layer_type is None else settings[layer_type])["original_max_position_embeddings"]
                given = {} if layer_type is None else {"layer_type": layer_type}
                frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=limit + 1, **given)
                name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
                long.register_buffer(name, frequencies.to(getattr(module, name).device), persistent=False)
            module.add_module(LONG, long)
            module.forward = MethodType(_forward, module)


@torch.no_grad()
def _forward(self: torch.nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Return the output of a rotary embedding, [B, T, ...] each, for every document as if it were alone.

    Args:
        position_ids: int64 [B, T], from 0 in each document; a document that starts in an earlier chunk continues to
            its own end.
    """
    # The class's own computation, under the decorator that looks at the whole batch.
    own = inspect.unwrap(type(self).forward)
    given = () if layer_type is None else (layer_type,)
    settings: Any = self.config
    rope = settings.rope_parameters if layer_type is None else settings.rope_parameters[layer_type]
    short = own(self, x, position_ids, *given)
    if not _long(rope):
        return short
    long = own(getattr(self, LONG), x, position_ids, *given)
    is_long = (document_lengths(position_ids) > rope["original_max_position_embeddings"])[..., None]
    if isinstance(short, Tensor):
        return torch.where(is_long, long, short)
    return tuple(torch.where(is_long, there, here) for there, here in zip(long, short, strict=True))


def document_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each position's document, int64 [B, T]: its largest position plus 1."""
    document = (position_ids == 0).cumsum(-1)
    *batch, length = position_ids.shape
    longest = torch.zeros(*batch, length + 1, dtype=torch.int64, device=document.device)
    longest = longest.scatter_reduce(-1, document, position_ids.long(), "amax")
    return longest.gather(-1, document) + 1
