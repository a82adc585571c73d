"""The class of transformers that loads a model, by name, from its config.json. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CAUSAL = "AutoModelForCausalLM"


def auto_class(config: Mapping[str, Any]) -> str | None:
    """Of a model with this config; None: no kind of model in models/kinds.py is trained so."""
    return None if config.get("is_encoder_decoder") else CAUSAL


def auto_class_in(folder: Path) -> str:
    """Of the model in a folder, one that a run has written."""
    found = auto_class(json.loads((folder / "config.json").read_text()))
    assert found is not None, f"{folder}: no run writes such a model"
    return found
