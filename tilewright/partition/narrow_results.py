"""GELU and the sigmoid in regions of GPUs that store only 16-bit floats, as functions with errors far below half a unit in their last place.

An exact float32 GELU takes 32 instructions of a GPU and a sigmoid 22 with a branch, which in the epilogue of a matrix product on tensor cores cost as
much as a third of the product. The functions `narrow_gelu` and `narrow_sigmoid` (`codegen.helpers.narrow_functions`) take 9 and 4. Their errors are
relative to their own results, so that whatever a region computes with them is as if they had been rounded to more than 16 bits, which eager PyTorch
does. Rewritten are

    x/2 (1 + erf(x sqrt(1/2)))                          ->  narrow_gelu(x)
    x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))       ->  x narrow_sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
    1 / (1 + e^-x)                                      ->  narrow_sigmoid(x)

Regions with a float32 result keep the exact functions, and so do attention and loops, whose schemas know them by their form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tilewright.graph.operators.pointwise import gelu, gelu_tanh, sigmoid
from tilewright.ir.dtypes import FLOAT32, NARROW_FLOATS
from tilewright.ir.expr import Apply, Expr, rewrite, unary
from tilewright.ir.graph import Value
from tilewright.ir.region import Region
from tilewright.partition.layouts import LaidOut


def with_narrow_functions(laid_out: LaidOut) -> LaidOut:
    """The partition with cheaper functions in the regions whose results are all 16-bit floats."""
    return replace(laid_out, regions=tuple(_narrowed(region, laid_out.values) for region in laid_out.regions))


def _narrowed(region: Region, values: Mapping[str, Value]) -> Region:
    if region.kind in ("torch", "loop", "attention") or any(values[name].dtype not in NARROW_FLOATS for name in region.outputs):
        return region
    return replace(region, steps=tuple(replace(step, bodies=tuple(rewrite(body, narrow) for body in step.bodies)) for step in region.steps))


def narrow(node: Expr) -> Expr:
    """The node, if it is one of the functions of float32, as the cheaper one."""
    if not isinstance(node, Apply) or node.dtype != FLOAT32:
        return node
    match node:
        case Apply("mul", (Apply("mul", (x, _)), Apply("add", (_, Apply("erf"))))) if node == gelu(x):
            return unary("narrow_gelu", x)
        case Apply("mul", (Apply("mul", (x, _)), Apply("add", (_, Apply("tanh"))))) if node == gelu_tanh(x):
            return x * unary("narrow_sigmoid", x * (x * x * (2 * 0.044715 * math.sqrt(2 / math.pi)) + 2 * math.sqrt(2 / math.pi)))
        case Apply("div", (_, Apply("add", (_, Apply("exp", (Apply("neg", (x,)),)))))) if node == sigmoid(x):
            return unary("narrow_sigmoid", x)
    return node
