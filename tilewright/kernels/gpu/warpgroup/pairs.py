"""Products of float32 factors as pairs of TF32 numbers, by warpgroups (`precision="fp32-tensor"`).

A warpgroup splits its rows of the first factor in registers, from where `wgmma` takes them; weights are stored as two tiles, of high and of low
parts. Of the four products of two pairs the smallest is left out. Tensor cores truncate their sums: those of a run of elements of the reduction are
made there, those of high parts last, and added in float32 (docs/usage.md, "Precision").
"""

from __future__ import annotations

from types import MappingProxyType

from tilewright.codegen.intrinsics import wgmma
from tilewright.codegen.intrinsics.mma import SHAPES, pair_of_tf32
from tilewright.codegen.intrinsics.wgmma import DEPTHS, Tile
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Const, Expr, Load, Var, index_const
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Buffer, For, Place, Statement, Store
from tilewright.kernels.gpu.gemm.tile import swizzled
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
KIND = "tf32"
DEPTH = DEPTHS[KIND]
FRAGMENT = SHAPES[KIND].a.size
"""Elements of the first factor that a thread has for one product."""
LONG_RUN, SHORT_RUN = 32, 16
LEAST_PRODUCTS = MappingProxyType({LONG_RUN: 288, SHORT_RUN: 72, DEPTH: 0})
"""Elements of a run, and products of a sum from which on runs are as long (`bench.pair_errors`)."""
MOST_BESIDE_LONG = 192
"""Columns of all warpgroups of a block up to which a run may be long. Beyond, the fragments of a long run exceed a thread's registers; where two
blocks of 64 x 128 are to share a processor, up to 64 bytes of a thread are spilled."""
HIGH, LOW, PART = "high", "low", "part"


def moved_after(products: int) -> int:
    """Elements of a run that leave a sum of so many products as accurate as a chain of float32 multiply-adds."""
    return next(run for run, least in LEAST_PRODUCTS.items() if products >= least)


def run_of(schedule: WarpgroupSchedule, products: int) -> int:
    """Elements whose sums tensor cores make: a short run where threads have no registers for the fragments of a long one."""
    most = SHORT_RUN if schedule.consumers * schedule.columns > MOST_BESIDE_LONG else LONG_RUN
    return min(most, moved_after(products))


def pair_products(columns: int, rows: Place, weights: Place, low: int, wide: int, run: int, thread: Expr) -> list[Statement]:
    """acc += the products of a warpgroup's 64 rows, of `wide` channels, and a tile of weights, whose low parts are `low` elements behind the high
    ones. Tensor cores make the sums of `run` elements, of small products first."""
    run, at, part = min(run, wide), Var("at", columns // 2), Place(PART, index_const(0))
    tiles, count = (None, Tile(wide * size_of(FLOAT32))), run // DEPTH
    held = [(name, count * FRAGMENT) for name in (HIGH, LOW)]
    statements: list[Statement] = [Allocate(Buffer(name, FLOAT32, size, "register")) for name, size in (*held, (PART, columns // 2))]
    for begin in range(0, wide, run):
        factors = [(name, piece, offset) for name, offset in ((LOW, 0), (HIGH, low), (HIGH, 0)) for piece in range(count)]
        products = [
            wgmma.multiply(
                KIND,
                columns,
                part,
                Place(name, index_const(piece * FRAGMENT)),
                Place(weights.buffer, weights.offset + (offset + begin + piece * DEPTH)),
                Const(number > 0, "bool"),
                tiles,
            )
            for number, (name, piece, offset) in enumerate(factors)
        ]
        total = Load("acc", (at,), FLOAT32) + Load(PART, (at,), FLOAT32)
        moved = For(at, index_const(columns // 2), Store("acc", at, total), "unroll")
        statements += [*_split(rows, begin, count, wide, thread), wgmma.fence(), *products, wgmma.commit(), wgmma.await_sums(columns, part), moved]
    return statements


def _split(rows: Place, begin: int, pieces: int, wide: int, thread: Expr) -> list[Statement]:
    """Loads the rows' elements from `begin` on as fragments of pairs."""
    lane, warp = thread % WARP, thread % GROUP // WARP
    statements: list[Statement] = []
    for number in range(pieces * FRAGMENT):
        row = warp * 16 + lane // 4 + number % 2 * 8
        column = begin + number // FRAGMENT * DEPTH + lane % 4 + number % FRAGMENT // 2 * 4
        value = Load(rows.buffer, (rows.offset + row * wide + swizzled(row, column, wide, FLOAT32, True),), FLOAT32)
        statements += pair_of_tf32(Place(HIGH, index_const(number)), Place(LOW, index_const(number)), value)
    return statements
