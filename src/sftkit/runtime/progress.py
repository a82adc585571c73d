"""Show on the last line of a terminal what goes on while something takes long; elsewhere print it once. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from rich import progress
from rich.console import RenderableType
from rich.table import Column

from sftkit.config.terminal import print_text, visible
from sftkit.runtime.console import output_console


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show what is going on that takes a while, once for the whole run: on a terminal for as long as it takes, with its
    seconds; elsewhere as a line of stderr at its beginning."""
    is_main = os.environ.get("RANK", "0") == "0"
    if not (is_main and output_console().is_interactive):
        if is_main:
            print_text(text, error=True)  # stdout may be an answer or a table that goes to a file
        yield
        return
    spinner = progress.SpinnerColumn("line", speed=0.3)  # about a frame each time it is drawn
    description = progress.TextColumn("{task.description}", markup=False)
    with LastLine(spinner, description, progress.TimeElapsedColumn()) as line:
        line.add_task(visible(text), total=None)
        yield


class LastLine(progress.Progress):
    """Lines that a thread draws under all other output of this process, and that leave nothing behind. Several stand
    one above the other. A terminal that is gone stops nothing."""

    def __init__(self, *columns: str | progress.ProgressColumn, expand: bool = False) -> None:
        super().__init__(
            *columns,
            console=output_console(),
            transient=True,
            expand=expand,
            refresh_per_second=2.0,  # each takes the interpreter lock for a millisecond or two
            # A day: rich's default of 30 s would forget the evaluations and saves between the steps.
            speed_estimate_period=86_400.0,
            redirect_stderr=sys.stderr.isatty(),  # else rich would bring a log file's lines here
        )

    def start(self) -> None:
        """Start to draw."""
        with suppress(OSError, ValueError):
            super().start()

    def stop(self) -> None:
        """Stop drawing and clear the line."""
        with suppress(OSError, ValueError):
            super().stop()


class TrainingBar(LastLine):
    """A bar with the steps done, the newest loss and speed, and the time left by the mean time of a step, evaluations
    and saves included.

    The loop sets `step` and `newest`, and never waits: the thread that draws reads them.
    """

    def __init__(self, step: int, total_steps: int) -> None:
        self.step = step
        self.newest = ""
        super().__init__(
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.TextColumn("eta"),
            progress.TimeRemainingColumn(),
            expand=True,
        )
        self.add_task("", total=total_steps, completed=step)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the line, brought up to date first."""
        # Called by the drawing thread before each frame: the loop itself only sets two attributes.
        for task in self.task_ids:
            self.update(task, completed=self.step, description=self.newest)
        yield from super().get_renderables()
