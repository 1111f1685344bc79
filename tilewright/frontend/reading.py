"""Reading model files: the boundary for unexpected errors and the limits on files, which all readers share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.errors import InvalidModel, TilewrightError
from tilewright.ir.computation import LARGEST_SPACE

LARGEST_COMPUTED = 1 << 30
"""Maximum bytes of a constant that is computed while a file is read, or that repeats stored elements: a few bytes of a file can request any size."""
LARGEST_VALUE = LARGEST_SPACE
"""Maximum number of elements in any tensor of a model."""


def check_computed(elements: int) -> None:
    """Raises ValueError if a constant of `elements` elements, of eight bytes at most, exceeds LARGEST_COMPUTED."""
    if elements * 8 > LARGEST_COMPUTED:
        raise ValueError(f"a constant of {elements:,} elements that the file does not hold")


@contextmanager
def reading(file: str | Path | None, remedy: str) -> Iterator[None]:
    """Makes every error while a model is read name the file (None: a model in memory); exceptions that are not user errors become InvalidModel."""
    try:
        yield
    except TilewrightError as error:
        named = file is None or str(file) in error.cause
        cause = printable(error.cause if named else f"{file}: {error.cause}", 10_000)
        if cause == error.cause:
            raise
        raise type(error)(cause, error.remedy) from error
    except Exception as error:
        raise InvalidModel(f"{file or 'the model'} cannot be read: {said(error)}", remedy) from error


def said(error: BaseException) -> str:
    """An exception in one printable line, with its type if the first line does not say what is wrong."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not lines:
        return kind
    return printable(lines[0] if isinstance(error, (ValueError, RuntimeError, OSError)) else f"{kind}: {lines[0]}")


def printable(text: str, length: int = 300) -> str:
    """Text of a file made safe to show: one line, no control characters, at most `length` characters."""
    shown = text[: length + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else "?" for c in shown)
    return shown if len(shown) <= length else f"{shown[:length]}..."
