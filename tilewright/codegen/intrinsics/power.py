"""Powers of two by the special function unit (PTX: ex2.approx.ftz.f32), with a relative error of at most 2^-22; results below 2^-126 are zeros."""

from __future__ import annotations

import numpy as np

from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Expr
from tilewright.ir.intrinsic import INTERPRETER, Array, Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Place


def _meaning(value: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        power = np.exp2(value)
    return np.where(power < np.finfo(np.float32).tiny, np.float32(0.0), power)[:, None]


_POWER = Intrinsic(
    "power of two",
    "thread",
    (Operand("target", "fragment", "write", FLOAT32, (1,)), Operand("value", "value")),
    _meaning,
    {
        "CUDA": Text(
            "tw_power_of_two({target}, {value});",
            "tw_power_of_two",
            """static __device__ __forceinline__ void tw_power_of_two(float *target, float value) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(*target) : "f"(value));
}""",
        ),
        INTERPRETER: Text(
            "tw_power_of_two({target}[0], {value}[0][0]);",
            "tw_power_of_two",
            """static void tw_power_of_two(float *target, float value) {
    const float power = exp2f(value);
    *target = power < 0x1p-126f ? 0.0f : power;
}""",
        ),
    },
    "ex2.approx",
)


def power_of_two(target: Place, value: Expr) -> Invoke:
    """target = 2 to the value, a float32."""
    return Invoke(_POWER, (target, value))
