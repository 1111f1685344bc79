"""Output of commands: consoles, and silencing PyTorch's exporter."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.errors import NotCompiled

if TYPE_CHECKING:
    from rich.console import Console

    from tilewright.stages import Progress

PIPE_COLUMNS = 160
"""Width of tables in files and pipes."""
REFRESH_SECONDS = 0.25
"""Time between two pictures of a progress bar."""


def output_console(error: bool = False) -> Console:
    """A console that does not wrap tables if its output is a file or pipe, and interprets no markup, because names come from files."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Output(stderr=error, highlight=False, markup=False)
    return console if console.is_terminal else Output(stderr=error, highlight=False, markup=False, width=PIPE_COLUMNS)


@contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """Gives a function that shows (what is done, steps done, steps or 0) on the standard error stream, if that is a terminal. The display moves by
    itself, also where the number of steps is not known."""
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Display
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            done = f"{int(task.completed):,}" if task.completed or task.total else ""
            return Text(f"{done}/{int(task.total):,}" if task.total else done, style="progress.download")

    console = output_console(error=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), Count(), TimeElapsedColumn())
    with Display(*columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=1 / REFRESH_SECONDS) as progress:
        task = progress.add_task(description, total=None)
        progress.refresh()  # what follows may keep the thread that refreshes from running: an import does
        drawn = time.monotonic()

        def show(stage: str, done: int = 0, total: int = 0) -> None:
            nonlocal drawn
            now = time.monotonic()
            due = now - drawn >= REFRESH_SECONDS or stage != progress.tasks[0].description
            drawn = now if due else drawn
            progress.tasks[0].total = total or None  # `update` cannot take a total back
            progress.update(task, description=stage, completed=done, refresh=due)

        yield show


def reading_artifact(path: str) -> AbstractContextManager[Progress]:
    """Shows that an artifact is read."""
    return progress_bar(f"reading {Path(path).name}")


@contextmanager
def quiet(debug: bool) -> Iterator[None]:
    """Suppresses the warnings of PyTorch's exporter; our own are shown in one line each."""
    import logging

    if debug:
        logging.basicConfig(level=logging.INFO)
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            ours = [str(w.message) for w in caught if "tilewright" in str(w.filename) or issubclass(w.category, NotCompiled)]
            for message in dict.fromkeys(ours):
                print(f"tilewright: warning: {message}", file=sys.stderr)
