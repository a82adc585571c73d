"""What makes code of the halves of a split graph, in place of calling one operator after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from sftkit.graph import compat


def full_inductor(graph: GraphModule, examples: Sequence[Any], half: str) -> compat.Boxed:
    """Compile a whole half by Inductor."""
    return compat.by_inductor(graph, examples, is_backward=half == "backward")
