"""The kinds of model that can be trained, each by the class of transformers that loads it."""

from __future__ import annotations

from transformers import PretrainedConfig

from sftkit.errors import ConfigError
from sftkit.models import auto_classes
from sftkit.models.causal import CausalLM
from sftkit.models.kind import ModelKind
from sftkit.models.text_to_text import TextToText
from sftkit.models.vision import VisionToText

MODEL_KINDS: dict[str, ModelKind] = {
    auto_classes.CAUSAL: CausalLM(),
    auto_classes.CAPTIONS: VisionToText(),
    auto_classes.TEXT_TO_TEXT: TextToText(),
}


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Return the kind of the models with this config."""
    return MODEL_KINDS[auto_classes.auto_class(config.to_dict())]


def check_causal(config: PretrainedConfig, what: str) -> None:
    """Refuse a model with an encoder where only a text is continued.

    Raises:
        ConfigError: `what` is done with causal models.
    """
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{config.model_type} has an encoder: {what} is for models that continue a text. Its training run evaluates its "
            "captions (data.val), and transformers generates with it, see docs/captioning.md"
        )
