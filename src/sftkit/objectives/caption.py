"""Captioning: cross entropy of each token of a text, given what an encoder read for it and all tokens before it."""

from __future__ import annotations

from dataclasses import replace

from sftkit.config.schema import LossConfig
from sftkit.objectives.next_token import NextToken


class Caption(NextToken):
    """The sums of NextToken, of which the model sees more. Texts are short and their tokens few, so the share of them that is
    predicted right is always measured: train/token_accuracy, beside the captions that an evaluation generates."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__(replace(config, token_metrics=True))
