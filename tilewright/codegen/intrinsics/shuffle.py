"""Exchange of registers between the lanes of a warp (PTX: shfl.sync)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Expr
from tilewright.ir.intrinsic import LANES, Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Place


@lru_cache(maxsize=8)
def _exchanging(distance: int) -> Intrinsic:
    source = """static __device__ __forceinline__ void tw_exchange(float *target, float value, int distance) {
    *target = __shfl_xor_sync(0xffffffffu, value, distance);
}"""
    return Intrinsic(
        f"exchange at {distance}",
        "warp",
        (Operand("target", "fragment", "write", FLOAT32, (1,)), Operand("value", "value")),
        lambda value: value[np.arange(LANES["warp"]) ^ distance][:, None],
        {"CUDA": Text(f"tw_exchange({{target}}, {{value}}, {distance});", "tw_exchange", source)},
        "shfl.sync.bfly",
    )


def exchange(target: Place, value: Expr, distance: int) -> Invoke:
    """Gives each lane the value of the lane whose number differs in the bit `distance`, a power of two up to 16."""
    if distance not in (1, 2, 4, 8, 16):
        raise ValueError(f"lanes of a warp are not {distance} apart in one bit")
    return Invoke(_exchanging(distance), (target, value))
