"""Rows of tiles that the blocks of a cluster exchange through its distributed shared memory, instead of computing them twice (`tiles.Window`).

    after a region's part:  offered = its last and its first rows               (each block its own part of a "cluster" buffer)
                            barrier of the cluster
                            halo of its storage = rows offered by the blocks beside it
                            barrier of the block

The blocks of a cluster are all tiles along one axis, so that every row beyond a tile belongs to a block of the cluster, or to no image and is filled.
A buffer has its place throughout; the barrier of the cluster after a chunk's sums, or at the end, is after all reads (thread block clusters: CUDA C++
Programming Guide).
"""

from __future__ import annotations

from math import prod

from tilewright.codegen.access import divide_linear
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.ir.dtypes import FLOAT32, NARROW_FLOATS, size_of
from tilewright.ir.expr import ZERO, Expr, Load, Var, compare, index_const
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Launch, Statement, Store, thread_variable
from tilewright.ir.region import Unsuitable
from tilewright.ir.stage import tile_of
from tilewright.partition.tiles import Tiling

EXCHANGED = "chain_exchanged"
EXCHANGEABLE = frozenset({FLOAT32}) | NARROW_FLOATS
"""Types of elements that blocks exchange, 16 bytes at a time where rows allow it. They are moved as they are stored."""
VECTOR_BYTES = 16


def offers(tiling: Tiling) -> list[Statement]:
    """The buffers of what blocks offer to others."""
    found: list[Statement] = []
    for number in tiling.exchanges:
        dtype = _type(tiling, number)
        if dtype not in EXCHANGEABLE:
            raise Unsuitable("blocks exchange floats only")
        found.append(Allocate(Buffer(_offered(tiling, number), dtype, tiling.cluster * _part(tiling, number), "cluster")))
    return found


def exchange(tiling: Tiling, number: int, rank: Expr, launch: Launch) -> list[Statement]:
    """Copies the rows of a region's result that other blocks computed to its storage, after the barrier behind its part. `rank`: the block's number
    in its cluster."""
    if number not in tiling.exchanges:
        return []
    before, after = tiling.borders(number)
    assert tiling.exchanged is not None
    window = tiling.windows[number][tiling.exchanged]
    assert window is not None
    name, offered, part, dtype = tile_of(tiling.cuts[number].result), _offered(tiling, number), _part(tiling, number), _type(tiling, number)
    sending: list[Statement] = []
    receiving: list[Statement] = []
    # what the next block has before its rows are the last rows here, and what the one before has after its rows the first
    for count, begin, own, there, other, exists in (
        (before, 0, window.count, 0, rank - 1, compare("gt", rank, ZERO)),
        (after, before, before, before + window.count, rank + 1, compare("lt", rank, index_const(tiling.cluster - 1))),
    ):
        if not count:
            continue
        for statements, row in ((sending, own), (receiving, there)):
            element, place, at, lanes, inside = _element(tiling, number, count, row, launch)
            place_there = begin * tiling.slab(number) + place
            if statements is sending:
                copy: Statement = Store(offered, rank * part + place_there, Load(name, (at,), dtype, lanes))
            else:
                copy = Store(name, at, Load(offered, (other * part + place_there,), dtype, lanes))
            loop: Statement = For(element, index_const(element.extent or 1), If(inside, copy))
            statements.append(loop if statements is sending else If(exists, loop))
    return [Block((*sending, cluster_barrier(), *receiving, block_barrier()))]


def _offered(tiling: Tiling, number: int) -> str:
    return f"{tiling.cuts[number].result}.offered"


def _type(tiling: Tiling, number: int) -> str:
    """The type in which a region's result is stored."""
    return tiling.problem.values[tiling.cuts[number].result].dtype


def _vector(tiling: Tiling, number: int) -> int:
    """Elements of a region's result in a vector."""
    return VECTOR_BYTES // size_of(_type(tiling, number))


def _part(tiling: Tiling, number: int) -> int:
    """Elements that a block offers of a region's result, in whole vectors."""
    most = _vector(tiling, number)
    return -(-sum(tiling.borders(number)) * tiling.slab(number) // most) * most


def _element(tiling: Tiling, number: int, count: int, first: int, launch: Launch) -> tuple[Var, Expr, Expr, int, Expr]:
    """A loop's variable over the elements of `count` rows of a region's storage from row `first` on, which threads share; an element's place among
    them, its offset in the storage, elements of a vector, and whether it is one of them."""
    assert tiling.exchanged is not None
    result = tiling.cuts[number].result
    rows, layout = tiling.cuts[number].spans[result][tiling.exchanged], tiling.storage[result]
    strides = layout.dense_strides()
    if rows is None or strides is None:
        raise Unsuitable(f"{result} is stored in blocks")
    extents = [layout.shape[dim] + sum(halo) for dim, halo in enumerate(layout.halo)]
    order = [dim for dim, _ in layout.order if dim != rows.dim and extents[dim] > 1]
    most = _vector(tiling, number)
    lanes = most if order and strides[order[-1]] == 1 and extents[order[-1]] % most == 0 else 1
    sizes = [count, *(extents[dim] for dim in order)]
    if lanes > 1:
        sizes[-1] //= lanes
    threads = prod(launch.block)
    element = Var(EXCHANGED, -(-prod(sizes) // threads))
    linear = element * threads + thread_variable(launch)
    row, *others = divide_linear(linear, sizes)
    at = (row + first) * strides[rows.dim]
    for dim, place in zip(order, others, strict=True):
        at = at + place * (strides[dim] * (lanes if dim == order[-1] else 1))
    return element, linear * lanes, at, lanes, compare("lt", linear, index_const(prod(sizes)))
