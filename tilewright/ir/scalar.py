"""The scalar operations of expressions: arity, result, cost, and meaning (one NumPy reference each).

The printers (`codegen.printer`) know how an operation is spelled in C or CUDA C++; everything else that needs to know an operation (operation counts,
constant folding, tests) reads this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import erf as _erf
from types import MappingProxyType

import numpy as np

from tilewright.ir.dtypes import FLOAT32, nearest_tf32


@dataclass(frozen=True)
class ScalarOperation:
    """`flops`: arithmetic operations charged per element; `boolean`: the result is a bool whatever the operand types."""

    name: str
    arity: int
    reference: Callable[..., np.ndarray]
    flops: int = 1
    boolean: bool = False


def _division(function: Callable[[np.ndarray, np.ndarray], np.ndarray], quotient: bool) -> Callable[..., np.ndarray]:
    """The function, made total for integers as in `codegen.helpers.TOTAL_DIVISIONS`: division by 0 gives 0, and the lowest integer divided by -1 is
    itself."""

    def total(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.asarray(a), np.asarray(b)
        if not (np.issubdtype(a.dtype, np.integer) and np.issubdtype(b.dtype, np.integer)):
            return function(a, b)
        negative = (b < 0) & (b == -1)
        result = function(a, np.where((b == 0) | negative, np.ones_like(b), b))
        with np.errstate(over="ignore"):
            return np.where(b == 0, np.zeros_like(result), np.where(negative, 0 - a if quotient else np.zeros_like(result), result))

    return total


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not np.issubdtype(np.asarray(a).dtype, np.integer):
        return np.asarray(np.trunc(a / b).astype(np.asarray(a).dtype))
    return np.asarray(np.floor_divide(a, b) + ((np.mod(a, b) != 0) & ((a < 0) != (b < 0))))


def _zipped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The elements of two vectors along the last axis, interleaved."""
    return np.stack((a, b), axis=-1).reshape(*a.shape[:-1], 2 * a.shape[-1])


def _checked(index: np.ndarray, least: np.ndarray, extent: np.ndarray, _: np.ndarray) -> np.ndarray:
    inside = (least <= index) & (index < extent)
    return np.where(inside, np.where(index < 0, index + extent, index), 0)


def _reinterpreted(a: np.ndarray) -> np.ndarray:
    return a.view(f"{'i' if a.dtype.kind == 'f' else 'f'}{a.itemsize}")


NEAREST_TF32 = "nearest_tf32"
_vector_erf = np.vectorize(_erf, otypes=[float])

_TABLE = (
    ScalarOperation("add", 2, np.add),
    ScalarOperation("sub", 2, np.subtract),
    ScalarOperation("mul", 2, np.multiply),
    ScalarOperation("div", 2, np.divide, 4),
    ScalarOperation("floordiv", 2, _division(np.floor_divide, True), 4),
    ScalarOperation("mod", 2, _division(np.mod, False), 4),  # the result has the divisor's sign, as in Python and torch.remainder
    ScalarOperation("fmod", 2, _division(np.fmod, False), 4),
    ScalarOperation("truncdiv", 2, _division(_truncated, True), 4),
    ScalarOperation("neg", 1, np.negative),
    ScalarOperation("abs", 1, np.abs),
    ScalarOperation("sign", 1, lambda a: np.where(np.isnan(a), 0, np.sign(a)).astype(a.dtype)),  # 0 for NaN, as torch.sign
    ScalarOperation("min", 2, np.minimum),  # propagates NaN, as torch.minimum
    ScalarOperation("max", 2, np.maximum),
    ScalarOperation("pow", 2, np.power, 20),
    ScalarOperation("atan2", 2, np.arctan2, 20),
    ScalarOperation("sqrt", 1, np.sqrt, 4),
    ScalarOperation("rsqrt", 1, lambda a: 1 / np.sqrt(a), 4),
    ScalarOperation("exp", 1, np.exp, 8),
    ScalarOperation("exp2", 1, np.exp2, 8),
    ScalarOperation("expm1", 1, np.expm1, 10),
    ScalarOperation("log", 1, np.log, 8),
    ScalarOperation("log2", 1, np.log2, 8),
    ScalarOperation("log10", 1, np.log10, 8),
    ScalarOperation("log1p", 1, np.log1p, 10),
    ScalarOperation("sin", 1, np.sin, 10),
    ScalarOperation("cos", 1, np.cos, 10),
    ScalarOperation("tan", 1, np.tan, 12),
    ScalarOperation("asin", 1, np.arcsin, 12),
    ScalarOperation("acos", 1, np.arccos, 12),
    ScalarOperation("atan", 1, np.arctan, 12),
    ScalarOperation("sinh", 1, np.sinh, 12),
    ScalarOperation("cosh", 1, np.cosh, 12),
    ScalarOperation("tanh", 1, np.tanh, 10),
    ScalarOperation("asinh", 1, np.arcsinh, 12),
    ScalarOperation("acosh", 1, np.arccosh, 12),
    ScalarOperation("atanh", 1, np.arctanh, 12),
    ScalarOperation("erf", 1, _vector_erf, 10),
    # for results that are rounded to 16 bits (`partition.narrow_results`); charged are cycles of a GPU's scheduler, 8 for each special function
    ScalarOperation("narrow_gelu", 1, lambda a: a * 0.5 * (1.0 + _vector_erf(a * np.sqrt(0.5))), 9),
    ScalarOperation("narrow_sigmoid", 1, lambda a: 1.0 / (1.0 + np.exp(-a)), 16),
    # float64, in which references are computed, stays. Not charged: an instruction for each stored element, without which learned models were trained
    ScalarOperation(NEAREST_TF32, 1, lambda a: nearest_tf32(a) if a.dtype == np.float32 else a, 0),
    ScalarOperation("floor", 1, np.floor),
    ScalarOperation("ceil", 1, np.ceil),
    ScalarOperation("round", 1, np.round),  # half to even
    ScalarOperation("trunc", 1, np.trunc),
    ScalarOperation("isnan", 1, np.isnan, 1, True),
    ScalarOperation("isinf", 1, np.isinf, 1, True),
    ScalarOperation("lt", 2, np.less, 1, True),
    ScalarOperation("le", 2, np.less_equal, 1, True),
    ScalarOperation("gt", 2, np.greater, 1, True),
    ScalarOperation("ge", 2, np.greater_equal, 1, True),
    ScalarOperation("eq", 2, np.equal, 1, True),
    ScalarOperation("ne", 2, np.not_equal, 1, True),
    ScalarOperation("and", 2, np.logical_and, 1, True),  # the right side is evaluated only if the left holds
    ScalarOperation("or", 2, np.logical_or, 1, True),
    ScalarOperation("not", 1, np.logical_not, 1, True),
    ScalarOperation("bitwise_and", 2, np.bitwise_and),
    ScalarOperation("bitwise_or", 2, np.bitwise_or),
    ScalarOperation("bitwise_xor", 2, np.bitwise_xor),
    ScalarOperation("bitwise_not", 1, np.invert),
    ScalarOperation("shift_left", 2, np.left_shift),
    ScalarOperation("shift_right", 2, np.right_shift),
    ScalarOperation("select", 3, np.where, 1),
    ScalarOperation("checked", 4, _checked),  # see ir.expr.checked: an index out of range becomes 0, and is reported
    ScalarOperation("cast", 1, lambda a: a, 1),
    ScalarOperation("reinterpret", 1, _reinterpreted, 0),  # the bits of a float as a signed integer, or back; see REINTERPRETED
    ScalarOperation("broadcast", 1, lambda a: a, 0),  # one element to every lane of a vector
    # interleaves the lanes of two vectors, lower halves: a0 b0 a1 b1...
    ScalarOperation("zip_low", 2, lambda a, b: _zipped(a, b)[..., : a.shape[-1]], 0),
    ScalarOperation("zip_high", 2, lambda a, b: _zipped(a, b)[..., a.shape[-1] :], 0),  # upper halves
    ScalarOperation("join", 2, lambda a, b: np.concatenate((a, b), -1), 0),  # the lanes of two vectors, one after the other
)
OPERATIONS: Mapping[str, ScalarOperation] = MappingProxyType({op.name: op for op in _TABLE})
REINTERPRETED: Mapping[str, str] = MappingProxyType({FLOAT32: "i32", "i32": FLOAT32, "f64": "i64", "i64": "f64"})
"""The type whose numbers have the bits of this one's, for the operation `reinterpret`."""
NARROW = frozenset({"narrow_gelu", "narrow_sigmoid"})
"""Functions of float32 for results that are rounded to 16 bits."""
REAL = NARROW | {
    NEAREST_TF32,
    *"sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf".split(),
}
"""Functions that are defined only for floating-point numbers."""
