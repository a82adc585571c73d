"""Which decoder block a node of a captured graph comes from, written on it while the model's Python is traced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch.fx import Node
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.models.structure import decoder_blocks
from sftkit.runtime.replaced import replaced_in_each

_MARK = "sftkit_block"
"Annotation of a node, which those of its gradient get, too."


def blocks_tagged(orig_model: PreTrainedModel) -> AbstractContextManager[None]:
    """Tag what a decoder block computes with the number of the block, for whoever traces within the context."""
    # In the place of `forward`, not by hooks: those run outside of it, and a context has to be open while it runs.
    blocks = enumerate(decoder_blocks(orig_model))
    return replaced_in_each("forward", {block: _tagged(block.forward, number) for number, block in blocks})


def block_of(node: Node) -> int | None:
    """Return the number of the block that a node belongs to, of the backward pass, too; None: to none, or
    it sums gradients."""
    return compat.annotation(node, _MARK)


def _tagged(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    @wraps(forward)
    def tagged(*args: Any, **kwargs: Any) -> Any:
        with compat.annotated({_MARK: number}):
            return forward(*args, **kwargs)

    return tagged
