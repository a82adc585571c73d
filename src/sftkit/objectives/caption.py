"""Captioning: cross entropy of each token of a text, given what an encoder read for it and all tokens before it."""

from __future__ import annotations

from dataclasses import replace

from sftkit.config.schema import LossConfig
from sftkit.objectives.next_token import NextToken


class Caption(NextToken):
    """The sums of NextToken, always with token metrics.

    Texts are short and their tokens few, so the share that is predicted right, train/token_accuracy, says something
    beside the captions that an evaluation generates.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__(replace(config, token_metrics=True))
