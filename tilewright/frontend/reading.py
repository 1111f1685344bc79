"""Reading model files: what every reader of them shares, the boundary for unexpected errors and the limits on what a file may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.errors import InvalidModel, TilewrightError
from tilewright.ir.computation import LARGEST_SPACE

LARGEST_COMPUTED = 1 << 30
"""Bytes of a constant that is computed while a file is read, or that repeats stored elements: a file of a few bytes may ask for any size."""
LARGEST_VALUE = LARGEST_SPACE
"""Elements of any tensor of a model."""


def check_computed(elements: int) -> None:
    """Raises ValueError where a constant of so many elements, of eight bytes at most, is more than is computed while a file is read."""
    if elements * 8 > LARGEST_COMPUTED:
        raise ValueError(f"a constant of {elements:,} elements that the file does not hold")


@contextmanager
def reading(file: str | Path | None, remedy: str) -> Iterator[None]:
    """Every error while a model file is read names the file (None: a model in memory): those for users do, and any other exception becomes an
    InvalidModel."""
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
    """An exception in one printable line: its type where its first line does not say what is wrong."""
    lines = str(error).strip().splitlines()
    kind = type(error).__name__
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not lines:
        return kind
    return printable(lines[0] if isinstance(error, (ValueError, RuntimeError, OSError)) else f"{kind}: {lines[0]}")


def printable(text: str, length: int = 300) -> str:
    """Text of a file as it may be shown: on one line, without control characters, not endless."""
    shown = "".join(c if c.isprintable() else "?" for c in text[: length + 1])
    return shown if len(shown) <= length else f"{shown[:length]}..."
