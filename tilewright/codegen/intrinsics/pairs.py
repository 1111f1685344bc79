"""Products of pairs of bfloat16 in vectors of float32 sums (AVX512-BF16: vdpbf16ps).

    multiply(sums, a, b)     sums[i] += a[0] * b[2i] + a[1] * b[2i + 1], for 16 sums in a register

In C it is the compiler's intrinsic function: with inline assembly, gcc 12 keeps sums on the stack.
"""

from __future__ import annotations

import numpy as np

from tilewright.codegen.intrinsics.amx import FACTOR, SUM, flushed, widened
from tilewright.ir.intrinsic import Array, Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Place

LANES = 16
"""Sums of a product: 512 bits, the only width that is used."""
REQUIRES = ("avx512_bf16",)

_FUNCTION = "tw_multiply_pairs"
_SOURCE = f"""\
#include <immintrin.h>
typedef float tw_pair_sums __attribute__((vector_size(64)));
static inline __attribute__((always_inline)) void {_FUNCTION}(tw_pair_sums *sums, const uint16_t *a, const uint16_t *b) {{
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof(pair));
    *sums = (tw_pair_sums)_mm512_dpbf16_ps((__m512)*sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(b));
}}"""


def _meaning(sums: Array, a: Array, b: Array) -> Array:
    """The second products of pairs are added first, each by a fused multiply-add; subnormal numbers count as zero (Intel SDM, VDPBF16PS)."""
    left, right = flushed(widened(a[0])), flushed(widened(b[0])).reshape(-1, 2)
    total = flushed(sums[0]).astype(np.float64)
    with np.errstate(all="ignore"):
        for k in (1, 0):  # a product of two bfloat16 is exact in float32 unless it is tiny
            total = flushed((total + left[k].astype(np.float64) * right[:, k]).astype(np.float32)).astype(np.float64)
        return total.astype(np.float32)[None]


_MULTIPLY = Intrinsic(
    "multiply pairs",
    "thread",
    (
        Operand("sums", "fragment", "update", SUM, (LANES,)),
        Operand("a", "memory", "read", FACTOR, (2,)),
        Operand("b", "memory", "read", FACTOR, (2 * LANES,)),
    ),
    _meaning,
    {"C": Text(f"{_FUNCTION}({{sums}}, {{a}}, {{b}});", _FUNCTION, _SOURCE)},
    "pair product",
    REQUIRES,
)


def multiply(sums: Place, a: Place, b: Place) -> Invoke:
    """Adds the products of one pair of A with 16 pairs of B to a vector of sums."""
    return Invoke(_MULTIPLY, (sums, a, b))
