"""How texts are written: by transformers, by eager, replayed and compiled steps, with a compiled encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from sftkit.generation.kv_cache import StaticStep, fixed_layers
from sftkit.models.vision import VisionToText
from sftkit.ops.attention import implementation
from sftkit.ops.cross_attention import IMPLEMENTATION

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILE: dict[str, Any] = {
    "dynamic": False,
    **({"mode": "reduce-overhead"} if DEVICE.type == "cuda" else {"backend": "aot_eager"}),
}


@dataclass(frozen=True)
class Way:
    """How texts are written."""

    name: str
    step: type[StaticStep] | None = None
    "None: eager steps"
    encoder_compiled: bool = False
    transformers: bool = False


class CompiledStep(StaticStep):
    """A step of Inductor's kernels, recorded and replayed by torch itself."""

    _compiled = torch.compile(StaticStep._compute, fullgraph=True, **COMPILE)

    def __init__(self, *args: Any, **state: Any) -> None:
        super().__init__(*args, **state)
        cross = getattr(self._cache, "cross_attention_cache", None)
        layers = [*fixed_layers(self._cache), *(cross.layers if cross else ())]
        kept = [x for layer in layers for x in (layer.keys, layer.values)]
        # What is written has to stay where it is to be recorded, and what is read would be copied for each replay
        for tensor in (self._tokens, self._at, self._mask, self._positions, self._order, *kept):
            torch._dynamo.mark_static_address(tensor, guard=False)  # other addresses, of the next batch: recorded anew
        self._attending = implementation(self._orig_model, IMPLEMENTATION)
        self._attending.__enter__()  # until this is let go with its batch: to set it for each step takes milliseconds

    def __call__(self) -> torch.Tensor:
        """Return the tokens after the present ones, int64 [B, 1]."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default"):
            self._compiled()
        return self._tokens


_eager_encode = VisionToText.encode
_compiled_encode = torch.compile(_eager_encode, fullgraph=True, **COMPILE)


def encode_compiled(self: VisionToText, orig_model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Any:
    """Encode with compiled code."""
    with torch.compiler.set_stance("default"):
        return _compiled_encode(self, orig_model, inputs)[0].clone(), None  # memory that the next batch reuses


EAGER = Way("eager steps")
PLAIN = (EAGER, Way("transformers generate", transformers=True), Way("replayed steps", StaticStep))
COMPILED = {
    "captions": (
        Way("replayed steps, compiled encoder", StaticStep, encoder_compiled=True),
        Way("compiled steps", CompiledStep),
        Way("compiled steps and encoder", CompiledStep, encoder_compiled=True),
    ),
    "answers": (Way("compiled steps", CompiledStep),),
}
