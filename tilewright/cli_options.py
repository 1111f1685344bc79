"""What the options of every command share: a parser whose errors are one line, and the types of their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

WRONG_CODE = 1
"""`verify` found a wrong region, `bench` a wrong result, or `cache check` a problem."""
ERROR_CODE = 2
LARGEST = (1 << 31) - 1
"""Of any number of things."""
LARGEST_SEED = (1 << 63) - 1
LONGEST = 1000
"""Characters of an error's line: a file may give its parts names of megabytes."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments. Those without another type are `given`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", None, given)

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR_CODE, f"{error_line(message)}; see `{self.prog} --help`\n")


def is_count(text: str) -> bool:
    """Whether it is a whole number from 0 up, in digits that `int` reads, and not too many of them."""
    return text.isascii() and text.isdigit() and len(text) < 20


def whole(least: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """The type of whole numbers from `least` to `most`."""

    def parsed(text: str) -> int:
        if not (is_count(text) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} {f'to {most}' if most != LARGEST else 'up'}")
        return int(text)

    return parsed


seed = whole(0, LARGEST_SEED)


def amount(text: str) -> float:
    """The type of finite numbers from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from 0 up")
    return value


def given(text: str) -> str:
    """The type of names and paths: anything that is not blank and holds no NUL."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} names nothing")
    return text


def path(text: str) -> Path:
    """The type of paths; the path itself need not be there."""
    return Path(given(text))


def error_line(message: str) -> str:
    """The line that says what is wrong, without what a file could tell a terminal to do."""
    text = " ".join(message.split())
    shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return "tilewright: error: " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
