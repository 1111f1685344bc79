"""Matrix products: sums of products with broadcast batch dimensions."""

from __future__ import annotations

from tilewright.graph.operators.definition import Operator, broadcast, broadcast_load
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.expr import mul


def _matmul(b: StepBuilder, x: Tensor, y: Tensor) -> Tensor:
    """x [batch..., M, L], y [batch..., L, N] -> [batch..., M, N]"""
    if x.rank < 2 or y.rank < 2 or x.shape[-1] != y.shape[-2]:
        raise ValueError(f"matrix product of {x.shape} and {y.shape}")
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    (result,) = b.reduce(
        "sum",
        (*batch, x.shape[-2], y.shape[-1]),
        (x.shape[-1],),
        lambda *i: mul(broadcast_load(x, (*i[:-2], i[-1])), broadcast_load(y, (*i[:-3], i[-1], i[-2]))),
    )
    return result


def _linear(b: StepBuilder, x: Tensor, w: Tensor) -> Tensor:
    """x [..., L], w [N, L] -> [..., N]"""
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"linear map {w.shape} of {x.shape}")
    (result,) = b.reduce("sum", (*x.shape[:-1], w.shape[0]), (x.shape[-1],), lambda *i: mul(x(*i[:-2], i[-1]), w(i[-2], i[-1])))
    return result


OPERATORS: tuple[Operator, ...] = (
    Operator("matmul", _matmul),
    Operator("linear", _linear),
)
