"""Output of commands: consoles, and silencing PyTorch's exporter."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def output_console(error: bool = False) -> Console:
    """A console that does not wrap tables if its output is a file or pipe, and interprets no markup, because names come from files."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Output(stderr=error, highlight=False, markup=False)
    return console if console.is_terminal else Output(stderr=error, highlight=False, markup=False, width=160)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function that shows (what is done, steps done, steps) on the standard error stream, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = output_console(error=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)

        def show(stage: str, done: int, total: int) -> None:
            progress.update(task, description=stage, completed=done, total=total)

        yield show


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
            ours = [str(w.message) for w in caught if "tilewright" in str(w.filename) or "hrough PyTorch" in str(w.message)]
            for message in dict.fromkeys(ours):
                print(f"tilewright: warning: {message}", file=sys.stderr)
