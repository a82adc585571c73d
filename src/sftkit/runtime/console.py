"""rich's console for text of any origin: colours and bars are rich's own, and no text between them can steer the
terminal. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from rich.console import Console
from rich.segment import Segment

from sftkit.config.terminal import visible, writable


class VisibleConsole(Console):
    """A Console that writes out what `visible` does, and takes no word in brackets for markup. rich itself would leave
    some control characters of a text out without a word."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts with their control characters written out."""
        super().print(*(visible(one) if isinstance(one, str) else one for one in objects), **settings)

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Yield segments that the output's encoding can write; rich's own control segments as they are."""
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else Segment(writable(segment.text, self.encoding), segment.style)

    def show_cursor(self, show: bool = True) -> bool:  # noqa: FBT001, FBT002 - as rich calls it
        """Leave the cursor as it is: a process that is killed could not bring it back."""
        return False


@cache
def output_console() -> VisibleConsole:
    """Return the console of this process's output, one for all that moves there. Long lines are the terminal's to wrap,
    so that they can be copied."""
    return VisibleConsole(soft_wrap=True, highlight=False)
