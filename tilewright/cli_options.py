"""Shared parts of the commands' options: a parser whose errors are one line, and the types of option values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tilewright.kernels.schema import Numerics

WRONG_CODE = 1
"""`verify` found a wrong region, `bench` a wrong result, or `cache check` a problem."""
ERROR_CODE = 2
LARGEST = (1 << 31) - 1
"""Largest value of any count."""
LARGEST_SEED = (1 << 63) - 1
LONGEST = 1000
"""Maximum characters of an error's line: names in a file may be megabytes long."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line. Arguments without another type have the type `given`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", None, given)

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR_CODE, f"{error_line(message)}; see `{self.prog} --help`\n")


def is_count(text: str) -> bool:
    """Whether the text is a non-negative integer of fewer than 20 ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) < 20


def whole(least: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """The type of whole numbers from `least` to `most`."""

    def parsed(text: str) -> int:
        if not (is_count(text) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} {f'to {most}' if most != LARGEST else 'up'}")
        return int(text)

    return parsed


seed = whole(0, LARGEST_SEED)


def add_numerics(parser: argparse.ArgumentParser) -> None:
    """The options that determine how results may be rounded."""
    parser.add_argument("--nondeterministic", action="store_true", help="a GPU may add the parts of a sum in any order, where that is faster")
    parser.add_argument(
        "--no-winograd", action="store_true", help="compute all sums directly: transforms of blocks (Winograd, Fourier) spread outliers and NaN"
    )
    parser.add_argument("--vendor", action="store_true", help="consider library kernels (cuDNN, cuBLAS, oneDNN) if they were measured here")


def numerics_of(options: argparse.Namespace) -> Numerics:
    """The numerics that the options of `add_numerics` allow."""
    from tilewright.kernels.schema import Numerics

    return Numerics(atomics=options.nondeterministic, winograd=not options.no_winograd, vendor=options.vendor)


def numerics_arguments(options: argparse.Namespace) -> list[str]:
    """The options of `add_numerics` as they were given, for a command that is run elsewhere."""
    return [f"--{name}" for name in ("nondeterministic", "no-winograd", "vendor") if getattr(options, name.replace("-", "_"))]


def amount(text: str) -> float:
    """The type of finite, non-negative numbers."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from 0 up")
    return value


def given(text: str) -> str:
    """The type of names and paths: any text that is not blank and contains no NUL."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} names nothing")
    return text


def path(text: str) -> Path:
    """The type of paths; the path need not exist."""
    return Path(given(text))


def error_line(message: str) -> str:
    """An error message as one line, without control sequences, which a file could send to the terminal."""
    text = " ".join(message.split())
    shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return "tilewright: error: " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
