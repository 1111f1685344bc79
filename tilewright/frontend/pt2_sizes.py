"""Texts about symbolic sizes in a .pt2 file, which PyTorch would evaluate as Python: each is parsed, and only a few forms are accepted.

Expressions are SymPy's `srepr`::

    E = Symbol('s0', ...) | Integer(n) | true | false | FUNCTION(E, ...) | Pow(E without Pow, Integer(2 to 8))

Guards are conditions on the inputs' sizes::

    G = G and G | G or G | not G | A < A and the other comparisons
    A = n | L['x'].size()[k] | A + A, -, *, //, % | -A | (A)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, PythonMod

from tilewright.frontend.reading import printable

SYMBOL = re.compile(r"s\d{1,6}")
LONGEST = 10_000
"""Characters of a text."""
LARGEST = 1 << 62
_EXPONENTS = range(2, 9)
_FUNCTIONS = frozenset(
    "Add Mul FloorDiv CeilDiv CleanDiv Mod PythonMod ModularIndexing Max Min Where Identity "
    "Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not".split()
)
_COMPARED: Mapping[type[ast.cmpop], Any] = {
    ast.Eq: sympy.Eq, ast.NotEq: sympy.Ne, ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
}  # fmt: skip


def expression(text: Any, place: str) -> str:
    """A size's or a condition's expression. Raises ValueError, which names the place, for any other text."""
    return _rebuilt(_parsed(text, place), place)


def _parsed(text: Any, place: str) -> ast.expr:
    try:
        if type(text) is not str or len(text) > LONGEST:
            raise ValueError
        return ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{printable(place)} is not an expression of sizes") from error


def _rebuilt(node: ast.expr, place: str) -> str:
    match node:
        case ast.Name("true" | "false" as name):
            return name
        case ast.Call(ast.Name("Integer"), [number], []):
            return f"Integer({_integer(number, place)})"
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str() as name)], facts) if SYMBOL.fullmatch(name):
            named = [fact.arg for fact in facts if isinstance(fact.value, ast.Constant) and fact.value.value is True]
            if len(named) == len(facts) and set(named) <= {"positive", "nonnegative", "integer"}:
                return f"Symbol('{name}', {', '.join(f'{fact}=True' for fact in named)})"
        case ast.Call(ast.Name("Pow"), [base, ast.Call(ast.Name("Integer"), [ast.Constant(int() as exponent)], [])], []) if exponent in _EXPONENTS:
            rebuilt = _rebuilt(base, place)
            if "Pow" not in rebuilt:  # or a short text could stand for a number of any length
                return f"Pow({rebuilt}, Integer({exponent}))"
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return f"{name}({', '.join(_rebuilt(argument, place) for argument in arguments)})"
    raise ValueError(f"{printable(place)} is not an expression of sizes")


def _integer(node: ast.expr, place: str) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if not isinstance(node, ast.Constant) or type(node.value) is not int or node.value > LARGEST:
        raise ValueError(f"{printable(place)} is not an expression of sizes")
    return sign * node.value


def guard(text: Any, place: str) -> str:
    """A guard's text. Raises ValueError, which names the place, if it is no condition on sizes."""
    condition(text, None, place)
    return str(text)


def condition(text: Any, inputs: Mapping[str, Any] | None, place: str) -> sympy.Basic:
    """A guard as an expression over the symbols that the inputs, tensors or numbers by name, have as sizes; with None any name is taken for a size.

    Raises ValueError, which names the place, if it is no condition on sizes, and KeyError for another input."""

    def of(node: ast.expr) -> Any:
        match node:
            case ast.BoolOp(operator, parts):
                return (sympy.And if isinstance(operator, ast.And) else sympy.Or)(*map(of, parts))
            case ast.UnaryOp(ast.Not(), operand):
                return sympy.Not(of(operand))
            case ast.Compare(left, operators, rest) if all(type(operator) in _COMPARED for operator in operators):
                values = [arithmetic(part) for part in (left, *rest)]
                pairs = zip(operators, values, values[1:], strict=False)
                return sympy.And(*(_COMPARED[type(operator)](a, b) for operator, a, b in pairs))
        raise ValueError(f"{printable(place)} is not a condition on sizes")

    def arithmetic(node: ast.expr) -> Any:
        match node:
            case ast.Constant(int()) | ast.UnaryOp(ast.USub(), ast.Constant()):
                return sympy.Integer(_integer(node, place))
            case ast.UnaryOp(ast.USub(), operand):
                return -arithmetic(operand)
            case ast.BinOp(left, ast.Add(), right):
                return arithmetic(left) + arithmetic(right)
            case ast.BinOp(left, ast.Sub(), right):
                return arithmetic(left) - arithmetic(right)
            case ast.BinOp(left, ast.Mult(), right):
                return arithmetic(left) * arithmetic(right)
            case ast.BinOp(left, ast.FloorDiv(), right):
                return FloorDiv(arithmetic(left), arithmetic(right))
            case ast.BinOp(left, ast.Mod(), right):
                return PythonMod(arithmetic(left), arithmetic(right))
            case ast.Subscript(
                ast.Call(ast.Attribute(ast.Subscript(ast.Name("L"), ast.Constant(str() as name)), "size"), [], []), ast.Constant(int() as dim)
            ):
                return size(name, dim)
            case ast.Subscript(ast.Name("L"), ast.Constant(str() as name)):
                return size(name, None)
        raise ValueError(f"{printable(place)} is not a condition on sizes")

    def size(name: str, dim: int | None) -> Any:
        if inputs is None:
            return sympy.Symbol("s0", integer=True, positive=True)
        value = inputs[name] if dim is None else inputs[name].shape[dim]
        return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)

    try:
        return of(_parsed(text, place))
    except (ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"{printable(place)} is not a condition on sizes") from error
