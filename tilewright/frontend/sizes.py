"""Numbers for the symbolic sizes of an exported program.

`torch.export` describes a size that may differ from call to call by an expression over symbols. `Sizes` maps the symbols to the numbers of one call,
and evaluates the expressions that the program's tensors have as sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from tilewright.errors import InvalidModel

NUMBER = -1
"""In place of a dimension: the input is a Python number, and the size is its value."""
REMEDY = "compile it with example inputs, whose sizes are taken, or with dynamic=True"


def is_symbolic(value: Any) -> bool:
    """Whether a Python number is an expression over symbols."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class Sizes:
    """The numbers of a program's symbols. Results are kept: a program has few different sizes, and each evaluation takes a tenth of a millisecond."""

    def __init__(self, numbers: Mapping[sympy.Symbol, int]) -> None:
        self.numbers = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
        self._known: dict[sympy.Basic, bool | int | float] = {}

    def value(self, expression: sympy.Basic) -> bool | int | float | None:
        """The number that an expression stands for; None if it contains a symbol without a number."""
        if expression not in self._known:
            bound = expression.xreplace(self.numbers)
            if bound.free_symbols:
                return None
            self._known[expression] = _plain(bound)
        return self._known[expression]

    def number(self, value: Any, place: str) -> bool | int | float:
        """The number that a symbolic Python number stands for. Raises InvalidModel, which names the place, if it depends on more than the sizes of
        inputs: on what a tensor holds."""
        result = self.value(value.node.expr)
        if result is None:
            if any(symbol not in self.numbers and not _from_a_tensor(symbol) for symbol in value.node.expr.free_symbols):
                raise InvalidModel(f"{place} has the symbolic size {value}", REMEDY)
            raise InvalidModel(
                f"{place} makes a Python number from a tensor, which differs from call to call",
                "keep it a tensor, or compile the parts of the module around it",
            )
        return result

    def shape(self, tensor: torch.Tensor, place: str) -> tuple[int, ...]:
        """The shape of a tensor of the program in numbers. Raises InvalidModel, which names the place, if there are none for it."""
        shape = []
        for size in tensor.shape:
            number = size if isinstance(size, int) else self.value(size.node.expr)
            if number is None:
                data = all(map(_from_a_tensor, set(size.node.expr.free_symbols) - set(self.numbers)))
                remedy = "keep shapes independent of what tensors hold, or compile the parts of the module around it" if data else REMEDY
                raise InvalidModel(f"{place} has the symbolic shape {tuple(tensor.shape)}", remedy)
            shape.append(int(number))
        return tuple(shape)


NO_SIZES = Sizes({})
"""For programs without symbolic sizes."""


def _from_a_tensor(symbol: sympy.Symbol) -> bool:
    """Whether a symbol stands for what a tensor holds ("unbacked") rather than for a size of an input."""
    return str(symbol).startswith(("u", "zuf"))


def _plain(number: sympy.Basic) -> bool | int | float:
    if number in (sympy.true, sympy.false):
        return bool(number)
    return int(number) if number.is_integer else float(number)
