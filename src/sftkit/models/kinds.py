"""The kinds of model that can be trained, each by the class of transformers that loads it."""

from __future__ import annotations

from transformers import PretrainedConfig

from sftkit.errors import ConfigError
from sftkit.models import auto_classes
from sftkit.models.causal import CausalLM
from sftkit.models.kind import ModelKind

KINDS: dict[str, ModelKind] = {auto_classes.CAUSAL: CausalLM()}


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Return the kind of the models with this config.

    Raises:
        ConfigError: they are trained in none of the ways that are known.
    """
    name = auto_classes.auto_class(config.to_dict())
    if name is None:
        raise ConfigError(
            f"{config.model_type} has an encoder: decoders of text are trained here, take a model that "
            f"{' or '.join(KINDS)} loads"
        )
    return KINDS[name]
