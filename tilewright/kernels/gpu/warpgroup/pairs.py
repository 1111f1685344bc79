"""Products of float32 factors as pairs of TF32 numbers, by warpgroups (`precision="fp32-tensor"`).

A warpgroup splits its rows of the first factor in registers, from where `wgmma` takes them; weights are stored as two tiles, of high and of low
parts. Of the four products of two pairs the smallest is left out, the others are added in the order of their size. Tensor cores truncate their sums:
those of 8 elements of the reduction are made there, and added in float32 (docs/usage.md, "Precision").
"""

from __future__ import annotations

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics import wgmma
from tilewright.codegen.intrinsics.mma import SHAPES, pair_of_tf32
from tilewright.codegen.intrinsics.wgmma import DEPTHS, Tile
from tilewright.ir.dtypes import FLOAT32
from tilewright.ir.expr import Const, Expr, Load, Var, index_const
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Place, Statement, Store
from tilewright.kernels.gpu.gemm.tile import swizzled

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
KIND = "tf32"
DEPTH = DEPTHS[KIND]
FRAGMENT = SHAPES[KIND].a.size
"""Elements of the first factor that a thread has for one product."""
HIGH, LOW, PART = "high", "low", "part"


def split_rows(own: Place, wide: int, thread: Expr) -> list[Statement]:
    """Loads the 64 rows of a warpgroup, of `wide` channels, from `own` on, as fragments of pairs."""
    lane, warp = thread % WARP, thread % GROUP // WARP
    statements: list[Statement] = [Allocate(Buffer(name, FLOAT32, wide // DEPTH * FRAGMENT, "register")) for name in (HIGH, LOW)]
    for number in range(wide // DEPTH * FRAGMENT):
        row = warp * 16 + lane // 4 + number % 2 * 8
        column = number // FRAGMENT * DEPTH + lane % 4 + number % FRAGMENT // 2 * 4
        value = Load(own.buffer, (own.offset + row * wide + swizzled(row, column, wide, FLOAT32, True),), FLOAT32)
        at = index_const(number)
        statements += pair_of_tf32(Place(HIGH, at), Place(LOW, at), value)
    return statements


def pair_products(columns: int, weights: Place, low: int, wide: int) -> Block:
    """acc += the products of the split rows and a tile of weights, whose low parts are `low` elements behind the high ones."""
    piece, at = Var("piece", wide // DEPTH), Var("at", columns // 2)
    row_bytes, part = wide * 4, Place(PART, index_const(0))
    tiles = None, Tile(row_bytes)
    high_weights = Place(weights.buffer, weights.offset + piece * DEPTH)
    low_weights = Place(weights.buffer, weights.offset + low + piece * DEPTH)
    high_rows, low_rows = Place(HIGH, piece * FRAGMENT), Place(LOW, piece * FRAGMENT)
    first, more = Const(False, "bool"), Const(True, "bool")
    return block(
        Allocate(Buffer(PART, FLOAT32, columns // 2, "register")),
        For(
            piece,
            index_const(piece.extent or 1),
            block(
                wgmma.fence(),
                wgmma.multiply(KIND, columns, part, low_rows, high_weights, first, tiles),
                wgmma.multiply(KIND, columns, part, high_rows, low_weights, more, tiles),
                wgmma.multiply(KIND, columns, part, high_rows, high_weights, more, tiles),
                wgmma.commit(),
                wgmma.await_sums(columns, part),
                For(at, index_const(columns // 2), Store("acc", at, Load("acc", (at,), FLOAT32) + Load(PART, (at,), FLOAT32)), "unroll"),
            ),
            "unroll",
        ),
    )
