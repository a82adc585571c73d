"""The class of transformers that loads a model, by name, from its config.json. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CAUSAL = "AutoModelForCausalLM"
CAPTIONS = "AutoModelForImageTextToText"
TEXT_TO_TEXT = "AutoModelForSeq2SeqLM"
VISION = "vision-encoder-decoder"
"The model_type whose encoder reads pictures."


def auto_class(config: Mapping[str, Any]) -> str:
    """Return the name of the auto class that loads a model with this config, the contents of its config.json."""
    if config.get("model_type") == VISION:
        return CAPTIONS
    return TEXT_TO_TEXT if config.get("is_encoder_decoder") else CAUSAL


def auto_class_in(folder: Path) -> str:
    """Return the same for the model in a folder, such as a checkpoint of a run."""
    return auto_class(json.loads((folder / "config.json").read_text()))


def not_causal(model_type: str, what: str) -> str:
    """Return why `what` refuses a model with an encoder."""
    return (
        f"{model_type} has an encoder: {what} is for models that continue a text. Its run measures its captions by "
        "itself (data.val), and transformers generates with it, see docs/captioning.md"
    )
