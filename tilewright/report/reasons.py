"""Readings of code that may fail: the reading, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tilewright.errors import TilewrightError, contained

T = TypeVar("T")
UNREAD = "not analysed"
"""Said of a kernel whose code cannot be read, before the reason."""


def attempted(name: str, attempt: Callable[[], T]) -> tuple[T | None, str]:
    """(the attempt's result, ""), or (None, the reason) if the code of kernel `name` cannot be read. A fault of ours is a warning, too."""
    try:
        return contained(f"kernel {name}", "its code is not analysed", lambda: (attempt(), ""), lambda why: (None, why))
    except TilewrightError as error:
        return None, error.cause.removeprefix(f"{name}: ")
