"""Sources to tokenized examples: read rows, tokenize them in order, count what became of each, cache the result."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import batched, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sftkit.config import DataConfig, SourceConfig
from sftkit.data import cache, hub, readers, rows
from sftkit.data.readers import RawRow
from sftkit.data.types import Examples, Row, Tokenized
from sftkit.errors import ConfigError, DataError

OnBadRow = Literal["error", "skip"]
Tokenize = Callable[[Row], Tokenized]

COUNTS = ("rows", "documents", "truncated", "dropped_too_long", "dropped_no_target", "skipped_bad")
ROWS_PER_CHUNK = 128
"Rows that a worker process gets at a time."

log = logging.getLogger(__name__)
