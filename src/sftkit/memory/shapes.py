"""The sizes of a model that its memory depends on, read from the model."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from sftkit.memory.estimate import Shape
from sftkit.models.structure import decoder_blocks, encoder, vocab_size


def shape_of(orig_model: PreTrainedModel) -> Shape | None:
    """Return the sizes that the model's config names, with an encoder those of the decoder.

    None if the config lacks one, or has several values for it.
    """
    return _shape(orig_model, orig_model.config.get_text_config())


def encoder_shape_of(orig_model: PreTrainedModel) -> Shape | None:
    """Return the sizes of the model's encoder; None if it has none, or one whose config does not name them."""
    inner = encoder(orig_model)
    return _shape(orig_model, inner.config) if isinstance(inner, PreTrainedModel) else None


def _shape(orig_model: PreTrainedModel, config: PretrainedConfig) -> Shape | None:
    """Return the sizes that a config names; None if it lacks one, or has several values for it."""

    def size(*names: str, default: int | None = None) -> int | None:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

    hidden, heads, blocks = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    if not (isinstance(hidden, int) and isinstance(heads, int) and isinstance(blocks, int)):
        return None
    head_dim = size("qk_head_dim", "head_dim", default=hidden // max(heads, 1))
    key_heads = size("num_key_value_heads", default=heads)
    # GPT-2 calls the inner size n_inner, which is null for four times the hidden one; OPT calls it ffn_dim.
    inner = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    # A token passes some experts only: its activations are theirs together, though all experts are in the parameters.
    if isinstance(experts := size("num_experts_per_tok"), int):
        inner = size("moe_intermediate_size", default=inner)
        inner = inner * experts if isinstance(inner, int) else None
    # A list, one size for each layer, is no size that the estimate could use.
    if not (isinstance(head_dim, int) and isinstance(key_heads, int) and isinstance(inner, int)):
        return None
    parameters = sum(p.numel() for p in orig_model.parameters())
    return Shape(
        parameters=parameters,
        ends=parameters - sum(p.numel() for b in decoder_blocks(orig_model) for p in b.parameters()),
        matrices=sum(p.numel() for b in decoder_blocks(orig_model) for p in b.parameters() if p.ndim == 2),
        blocks=blocks,
        hidden=hidden,
        query=heads * head_dim,
        key=key_heads * head_dim,
        inner=inner,
        head_dim=head_dim,
        vocab=vocab_size(orig_model),
    )
