"""Products of float32 factors as pairs of narrower numbers, by warpgroups (`precision="fp32-tensor"`, `"fp32-tensor-fp16"`).

A warpgroup splits its rows of the first factor in registers, from where `wgmma` takes them; weights are stored as tiles of their parts. Of the four
products of two pairs the smallest is left out. Tensor cores truncate their sums: those of a run of elements of the reduction are made there, those of
high parts last, and added in float32 (docs/usage.md, "Precision").

    TF32       high + low            weights: high, low
    float16    high + 2^-11 low      weights in units of their own: 2^11 high, high, low; so sums are in units of 2^-11 of these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tilewright.codegen.intrinsics import wgmma
from tilewright.codegen.intrinsics.mma import REGISTER_BYTES, SHAPES, pair_of_tf32, round_to_f16
from tilewright.codegen.intrinsics.wgmma import DEPTHS, STORED, Tile
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Const, Expr, Load, Var, as_lanes, index_const
from tilewright.ir.intrinsic import LANES
from tilewright.ir.kernel import Allocate, Buffer, For, Place, Statement, Store
from tilewright.ir.region import F16_PAIR, F16_STEP, TF32_PAIR
from tilewright.kernels.gpu.gemm.tile import swizzled
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule

GROUP, WARP = LANES["warpgroup"], LANES["warp"]
LONG_RUN, SHORT_RUN = 32, 16
MOST_BESIDE_LONG = 192
"""Columns of all warpgroups of a block up to which a run may be long. Beyond, the fragments of a long run exceed a thread's registers; where two
blocks of 64 x 128 are to share a processor, up to 64 bytes of a thread are spilled."""
HIGH, LOW, PART, VALUES = "high", "low", "part", "values"
UNIT = Var("unit", None, FLOAT32)
"""Of the sums of float16."""


@dataclass(frozen=True)
class Pairs:
    """How float32 factors are pairs. kind: the type of the products (a key of `wgmma.DEPTHS`). numbers: how weights are stored. products: the part of
    the first factor and the tile of weights of each product, smallest first. least: elements of a run, and products of a sum from which on runs are
    as long (`bench.pair_errors`). split: loads a number of fragments of both parts of rows, from an element of the reduction on."""

    kind: str
    numbers: str
    products: tuple[tuple[str, int], ...]
    least: Mapping[int, int]
    split: Callable[[Pairs, Place, int, int, int, Expr], list[Statement]]

    @property
    def depth(self) -> int:
        return DEPTHS[self.kind]

    @property
    def stored(self) -> str:
        return STORED[self.kind]

    @property
    def fragment(self) -> int:
        """Elements of the first factor that a thread has for one product."""
        return SHAPES[self.kind].a.size

    @property
    def lanes(self) -> int:
        """Elements of a register."""
        return REGISTER_BYTES // size_of(self.stored)

    def moved_after(self, products: int) -> int:
        """Elements of a run that leave a sum of so many products as accurate as a chain of float32 multiply-adds."""
        return next(run for run, least in self.least.items() if products >= least)

    def run_of(self, schedule: WarpgroupSchedule, products: int) -> int:
        """Elements whose sums tensor cores make: a short run where threads have no registers for the fragments of a long one."""
        most = SHORT_RUN if schedule.consumers * schedule.columns > MOST_BESIDE_LONG else LONG_RUN
        return min(most, self.moved_after(products))

    def multiplied(
        self, columns: int, rows: Place, weights: Place, tile: int, wide: int, run: int, thread: Expr, unit: Expr | None
    ) -> list[Statement]:
        """acc += the products of a warpgroup's 64 rows, of `wide` channels, and the tiles of the parts of weights, of `tile` elements each, which are
        one behind the other. Tensor cores make the sums of `run` elements, of small products first. `unit`: of these sums; None if it is 1."""
        run, at, part = min(run, wide), Var("at", columns // 2), Place(PART, index_const(0))
        tiles, count = (None, Tile(wide * size_of(self.stored))), run // self.depth
        held = [Buffer(name, self.stored, count * self.fragment, "register", self.lanes) for name in (HIGH, LOW)]
        statements: list[Statement] = [Allocate(buffer) for buffer in (*held, Buffer(PART, FLOAT32, columns // 2, "register"))]
        for begin in range(0, wide, run):
            factors = [(name, piece, number * tile) for name, number in self.products for piece in range(count)]
            products = [
                wgmma.multiply(
                    self.kind,
                    columns,
                    part,
                    Place(name, index_const(piece * self.fragment)),
                    Place(weights.buffer, weights.offset + (offset + begin + piece * self.depth)),
                    Const(number > 0, "bool"),
                    tiles,
                )
                for number, (name, piece, offset) in enumerate(factors)
            ]
            sums: Expr = Load(PART, (at,), FLOAT32)
            moved = Store("acc", at, Load("acc", (at,), FLOAT32) + (sums if unit is None else sums * unit))
            move = For(at, index_const(columns // 2), moved, "unroll")
            split = self.split(self, rows, begin, count, wide, thread)
            statements += [*split, wgmma.fence(), *products, wgmma.commit(), wgmma.await_sums(columns, part), move]
        return statements


def _split_to_tf32(pairs: Pairs, rows: Place, begin: int, pieces: int, wide: int, thread: Expr) -> list[Statement]:
    """Loads the rows' elements from `begin` on as fragments of pairs."""
    fragment, depth = pairs.fragment, pairs.depth
    statements: list[Statement] = []
    for number in range(pieces * fragment):
        column = begin + number // fragment * depth + thread % 4 + number % fragment // 2 * 4
        value = _element(rows, number, column, wide, thread, 1)
        statements += pair_of_tf32(Place(HIGH, index_const(number)), Place(LOW, index_const(number)), value)
    return statements


def _split_to_float16(pairs: Pairs, rows: Place, begin: int, pieces: int, wide: int, thread: Expr) -> list[Statement]:
    """The same, of pairs of adjacent elements. The rest of a value less its high part is exact in float32, and is zero, or 2^-11 of the value at
    most, so that 2^11 of it has the range of the value."""
    fragment, depth, lanes = pairs.fragment, pairs.depth, pairs.lanes
    statements: list[Statement] = []
    for number in range(0, pieces * fragment, lanes):
        column = begin + number // fragment * depth + thread % 4 * lanes + number % fragment // 4 * 8
        at = index_const(number)
        held, high = (Load(name, (at,), FLOAT32, lanes) for name in (VALUES, HIGH))
        taken = Store(VALUES, at, _element(rows, number // lanes, column, wide, thread, lanes))
        rest = Store(VALUES, at, (held - high) * as_lanes(Const(F16_STEP, FLOAT32), lanes))
        statements += [taken, round_to_f16(Place(HIGH, at), Place(VALUES, at)), rest, round_to_f16(Place(LOW, at), Place(VALUES, at))]
    return [Allocate(Buffer(VALUES, FLOAT32, pieces * fragment, "register", lanes)), *statements]


def _element(rows: Place, number: int, column: Expr, wide: int, thread: Expr, lanes: int) -> Load:
    """Elements of the row of a thread's register with this number, from a column on."""
    lane, warp = thread % WARP, thread % GROUP // WARP
    row = warp * 16 + lane // 4 + number % 2 * 8
    return Load(rows.buffer, (rows.offset + row * wide + swizzled(row, column, wide, FLOAT32, True),), FLOAT32, lanes)


TF32 = Pairs("tf32", TF32_PAIR, ((LOW, 0), (HIGH, 1), (HIGH, 0)), MappingProxyType({LONG_RUN: 288, SHORT_RUN: 72, DEPTHS["tf32"]: 0}), _split_to_tf32)
FLOAT16 = Pairs("f16", F16_PAIR, ((LOW, 1), (HIGH, 2), (HIGH, 0)), MappingProxyType({LONG_RUN: 288, SHORT_RUN: 0}), _split_to_float16)
PAIRS = MappingProxyType({1: TF32, 2: FLOAT16})
"""By `WarpgroupSchedule.pairs`."""
