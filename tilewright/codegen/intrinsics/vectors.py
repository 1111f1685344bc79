"""Instructions on vectors of 16 float32 of x86 (AVX-512), for weights between two products of bfloat16.

    greater(target, value)        target[i] = the greater of both; value[i] if one is NaN
    power_of_two(value)           value[i] = 2 to the value[i], with a relative error of at most 2^-13
    pair(target, first, second)   target[2i], target[2i + 1] = first[i], second[i], rounded to bfloat16
    transpose_pairs(target, source)   target[j][2i : 2i + 2] = source[i][2j : 2j + 2], 16 x 16 pairs of bfloat16

Powers: VREDUCEPS gives the fraction f of a number, a polynomial of degree 3 2^f, with the least relative error among those that are 1 at 0, and
VSCALEFPS multiplies by 2 to the floor of the number. Minus infinity gives 0, NaN gives NaN. Rounding is to nearest, ties away from zero: the sum of a
row has the weights as they were before, so that the bits which this makes of NaN do not matter.
"""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import FACTOR, SUM
from tilewright.ir.intrinsic import Array, Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Place

LANES = 16
"""float32 in a vector, and pairs of bfloat16."""
REQUIRES = ("avx512f", "avx512bw", "avx512dq")

_POLYNOMIAL = (0.0770670548081398, 0.22764497995376587, 0.6951167583465576, 1.0)
"""Coefficients of the powers, highest first."""
_HEADER = "#include <immintrin.h>\ntypedef float tw_floats __attribute__((vector_size(64)));"


def _greater(target: Array, value: Array) -> Array:
    return np.where(target > value, target, value)


def _power(value: Array) -> Array:
    with np.errstate(all="ignore"):
        floor = np.floor(value)
        rest = np.where(np.isfinite(value), value - floor, np.where(np.isnan(value), value, 0)).astype(np.float32)
        power = np.zeros_like(rest)
        for coefficient in _POLYNOMIAL:
            power = (power.astype(np.float64) * rest + np.float32(coefficient)).astype(np.float32)  # fused
        return (power.astype(np.float64) * np.exp2(floor.astype(np.float64))).astype(np.float32)


def _pair(first: Array, second: Array) -> Array:
    both = np.stack([first, second], -1).reshape(len(first), -1)
    return ((both.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)


def _transposed(source: Array) -> Array:
    return source.reshape(-1, LANES, LANES, 2).swapaxes(1, 2).reshape(-1, LANES, 2 * LANES)


def _instruction(name: str, operands: tuple[Operand, ...], meaning: object, body: str) -> Intrinsic:
    """One whose C function has this body, whose parameters are pointers to the operands."""
    function = f"tw_{name.replace(' ', '_')}"
    kinds = {"fragment": "tw_floats", "memory": "void"}
    given = ", ".join(f"{'' if each.writes else 'const '}{kinds[each.storage]} *{each.name}" for each in operands)
    source = f"{_HEADER}\nstatic inline __attribute__((always_inline)) void {function}({given}) {{\n{body}}}"
    line = f"{function}({', '.join(f'{{{each.name}}}' for each in operands)});"
    return Intrinsic(name, "thread", operands, meaning, {"C": Text(line, function, source)}, name, REQUIRES)  # type: ignore[arg-type]


_VECTOR = (LANES,)
_GREATER = _instruction(
    "greater",
    (Operand("target", "fragment", "update", SUM, _VECTOR), Operand("value", "fragment", "read", SUM, _VECTOR)),
    _greater,
    "    *target = (tw_floats)_mm512_max_ps((__m512)*target, (__m512)*value);\n",
)
_POWER = _instruction(
    "power of two",
    (Operand("value", "fragment", "update", SUM, _VECTOR),),
    _power,
    f"""\
    const __m512 x = (__m512)*value, rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps({_POLYNOMIAL[0]!r}f);
"""
    + "".join(f"    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps({coefficient!r}f));\n" for coefficient in _POLYNOMIAL[1:])
    + "    *value = (tw_floats)_mm512_scalef_ps(p, x);\n",
)
_PAIR = _instruction(
    "pair",
    (
        Operand("target", "memory", "write", FACTOR, (2 * LANES,)),
        Operand("first", "fragment", "read", SUM, _VECTOR),
        Operand("second", "fragment", "read", SUM, _VECTOR),
    ),
    _pair,
    """\
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)*first, half), 16), high = _mm512_add_epi32((__m512i)*second, half);
    _mm512_storeu_si512(target, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
""",
)
_BLOCK = (LANES, 2 * LANES)
_TRANSPOSE = _instruction(
    "transpose pairs",
    (Operand("target", "memory", "write", FACTOR, _BLOCK), Operand("source", "memory", "read", FACTOR, _BLOCK)),
    _transposed,
    """\
    __m512i rows[16], turned[16];
    for (int i = 0; i < 16; ++i)
        rows[i] = _mm512_loadu_si512((const char *)source + 64 * i);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#pragma GCC unroll 4
    for (int turn = 0; turn < 4; ++turn) {  // each interleaves rows i and i + 8 into rows 2i and 2i + 1
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            turned[2 * i] = _mm512_permutex2var_epi32(rows[i], low, rows[i + 8]);
            turned[2 * i + 1] = _mm512_permutex2var_epi32(rows[i], high, rows[i + 8]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
            rows[i] = turned[i];
    }
    for (int i = 0; i < 16; ++i)
        _mm512_storeu_si512((char *)target + 64 * i, rows[i]);
""",
)


def greater(target: Place, value: Place) -> Invoke:
    """Each lane of a vector in registers becomes the greater of both."""
    return Invoke(_GREATER, (target, value))


def power_of_two(value: Place) -> Invoke:
    """Replaces the lanes of a vector in registers by the powers of two."""
    return Invoke(_POWER, (value,))


def pair(target: Place, first: Place, second: Place) -> Invoke:
    """Stores two vectors of registers as 16 pairs of bfloat16."""
    return Invoke(_PAIR, (target, first, second))


def transpose_pairs(target: Place, source: Place) -> Invoke:
    """Transposes 16 rows of 16 pairs of bfloat16, both dense."""
    return Invoke(_TRANSPOSE, (target, source))
