"""Pictures that determine their caption, so that learning can be measured: a grid of colours, named one
after the other.

Each colour has a level of red, of green and of blue, and its name spells them: bakapa would be black, which stands for
nothing. A caption has as many tokens as its words and the end: 90 % have 5 to 32, 9 % 33 to 64 and 1 % 65 to 256.
Trained on such captions a tokenizer of 1,024 entries has a token for each word.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import numpy as np

from sftkit.data.demo.split import Split
from sftkit.errors import ConfigError

PICTURES = {"train": 40_000, "heldout": 2_000}
PREFIX = "builtin:pictures/"
LENGTHS = ((0.90, 5, 32), (0.99, 33, 64), (1.00, 65, 256))
"(share of the captions up to here, fewest tokens, most tokens)"
SIDES = (6, 8, 16)
"Cells along a side of the grid; a picture has the smallest grid that holds its caption."
LEVELS = np.array([0, 85, 170, 255], dtype=np.uint8)
NAMES = tuple(map("".join, product(("ba", "de", "fi", "go"), ("ka", "le", "mi", "no"), ("pa", "re", "si", "tu"))))
"Names of the 64 colours; the first is black."


def pictures(split: Split) -> Iterator[dict[str, str]]:
    """Yield rows in a fixed order, the same on every machine: the name of a picture and its caption."""
    for number in range(PICTURES[split]):
        caption = " ".join(NAMES[colour] for colour in _colours(split, number))
        yield {"image": f"{PREFIX}{split}/{number}", "caption": caption}


def picture(name: str, size: tuple[int, int, int]) -> np.ndarray:
    """Make the picture of that name: uint8 [3, height, width].

    Raises:
        ConfigError: the size has not three channels.
    """
    channels, height, width = size
    if channels != 3:
        raise ConfigError(f"{PREFIX}*: these pictures have 3 channels, and the encoder takes {channels}")
    split, number = name.removeprefix(PREFIX).split("/")
    colours = _colours(split, int(number))
    side = next(side for side in SIDES if side * side >= len(colours))
    cells = np.zeros(side * side, dtype=np.int64)
    cells[: len(colours)] = colours
    levels = np.stack([LEVELS[cells // 16], LEVELS[cells // 4 % 4], LEVELS[cells % 4]]).reshape(3, side, side)
    rows, columns = (np.arange(length) * side // length for length in (height, width))
    return levels.take(columns, axis=2).take(rows, axis=1)


def _colours(split: str, number: int) -> list[int]:
    """Return the colours that a picture's caption names, as indices into NAMES."""
    # Random.random() is the one method whose sequence Python promises to keep.
    rng = Random(f"sftkit pictures {split} {number}")
    share = rng.random()
    min_words, max_words = next((low, high) for limit, low, high in LENGTHS if share < limit)
    words = min_words + int(rng.random() * (max_words - min_words + 1)) - 1  # the end is a token, too
    return [1 + int(rng.random() * (len(NAMES) - 1)) for _ in range(words)]
