"""Filling tiles in shared memory while the previous ones are read, by asynchronous copies or through registers, or before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tilewright.codegen.assemble import block
from tilewright.codegen.intrinsics.async_copy import await_groups, commit
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.expr import TRUE, Expr, Load, Var, compare, index_const, loads
from tilewright.ir.kernel import Allocate, Buffer, For, If, Let, Statement, Store
from tilewright.kernels.gpu import early
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.gemm.offsets import OffsetTable
from tilewright.kernels.gpu.gemm.tile import Loader, Tile, in_tile, loader


@dataclass(frozen=True)
class Staged:
    """One tile. `elements`: size of one of its buffers. `load` fetches the tile of a step to registers, or starts to copy it to the buffer at an
    offset. `put` stores the fetched tile to the buffer with a number (not called if tiles are copied). `constant`: whether no kernel writes what is
    loaded."""

    elements: int
    load: Loader
    put: Callable[[Expr], list[Statement]]
    constant: bool = False


def staged_tile(
    tile: Tile, start: Expr, form: ProductForm, thread: Var, first_r: Expr, buffers: int, table: OffsetTable | None = None
) -> tuple[list[Statement], Staged]:
    """A factor's tile with its loader, and the statements before the loop, which allocate `buffers` of it; `start` and `first_r`: where the tile of
    the first step begins."""
    setup, load = loader(tile, start, form, thread, first_r, tile.depth, table)
    if not tile.copies:
        setup.append(Allocate(Buffer(tile.stage, tile.fetched, tile.passes * tile.vector_width, "register", tile.vector_width)))
    setup.append(Allocate(Buffer(tile.tile, tile.held, buffers * tile.elements, "shared")))
    sources = [form.storage.get(load.buffer) for load in loads(tile.expr)]
    constant = all(storage is not None and storage.source is not None for storage in sources)
    return setup, Staged(tile.elements, load, lambda buffer: _to_shared(tile, thread, buffer), constant)


Inner: TypeAlias = Callable[[Sequence[Expr], Expr], list[Statement]]
"""Maps the offsets of the buffers with a step's tiles, and the step, to the statements that read them."""


def pipeline(tiles: Sequence[Staged], stages: int, steps: Expr, steps_each: int, inner: Inner, ready: Sequence[Statement] = ()) -> list[Statement]:
    """A loop with copies `stages` - 1 steps ahead of the products. One barrier per step both makes a buffer's copies visible and frees the buffer
    that the previous step has read. `ready`: what a thread does between its copies and that barrier."""
    stages = max(2, min(stages, steps_each))
    statements: list[Statement] = []
    first, others = _apart(tiles)

    def copies_to(tiles: Sequence[Staged], ahead: int) -> list[Statement]:
        copies = [s for tile in tiles for s in tile.load(index_const(ahead), index_const(ahead * tile.elements))]
        some = compare("lt", index_const(ahead), steps)
        return copies if some == TRUE or not copies else [If(some, block(copies))]

    for ahead in range(stages - 1):
        statements += copies_to(first, ahead)  # they are in the first group
    for ahead in range(stages - 1):
        statements += copies_to(others, ahead)
        statements.append(commit())
    step = Var("step", steps_each)
    buffers = buffers_of(stages, steps_each)
    body: list[Statement] = [await_groups(stages - 2), *ready, block_barrier()]
    if steps_each > stages - 1:
        following = step + (stages - 1)
        slot = Var("free_slot", buffers)
        copies: list[Statement] = [Let(slot, following % stages)]
        copies += [s for tile in tiles for s in tile.load(following, slot * tile.elements)]
        body.append(If(compare("lt", following, steps), block(copies)))
    body.append(commit())
    slot = Var("slot", buffers)
    body.append(Let(slot, step % stages))
    body += inner([slot * tile.elements for tile in tiles], step)
    return [*statements, For(step, steps, block(body))]


def _apart(tiles: Sequence[Staged]) -> tuple[list[Staged], list[Staged]]:
    """The tiles whose first copies may begin before the kernel waits for others (`kernels.gpu.early`), and the others."""
    first = [tile for tile in tiles if tile.constant and early.AHEAD]
    return first, [tile for tile in tiles if tile not in first]


def double_buffer(tiles: Sequence[Staged], steps: Expr, steps_each: int, inner: Inner) -> list[Statement]:
    """A loop in which the next tiles are fetched to registers while the current ones are read, and then stored to the other buffer."""
    zero = index_const(0)
    first, others = _apart(tiles)
    root = [s for tile in (*first, *others) for s in tile.load(zero, zero)]
    root += [s for tile in tiles for s in tile.put(zero)]
    root.append(block_barrier())
    step = Var("step", steps_each)
    more = compare("lt", step + 1, steps)
    body: list[Statement] = []
    if steps_each > 1:
        body.append(If(more, block([s for tile in tiles for s in tile.load(step + 1, zero)])))
    body += inner([step % 2 * tile.elements for tile in tiles], step)
    if steps_each > 1:
        body.append(If(more, block([s for tile in tiles for s in tile.put((step + 1) % 2)])))
        body.append(block_barrier())
    return [*root, For(step, steps, block(body))]


def single_buffer(
    tiles: Sequence[Staged], copies: bool, steps: Expr, steps_each: int, inner: Inner, ready: Sequence[Statement] = ()
) -> list[Statement]:
    """A loop that fills the only buffer and then reads it: other blocks of the processor work meanwhile."""
    step, zero = Var("step", steps_each), index_const(0)
    body = [s for tile in tiles for s in tile.load(step, zero)]
    body += [commit(), await_groups(0)] if copies else [s for tile in tiles for s in tile.put(zero)]
    return [For(step, steps, block([*body, *ready, block_barrier(), *inner([zero] * len(tiles), step), block_barrier()]))]


def staged_steps(
    tiles: Sequence[Staged], stages: int, steps: Expr, steps_each: int, inner: Inner, plain: bool = False, ready: Sequence[Statement] = ()
) -> list[Statement]:
    """The loop over the steps of a reduction: by copies if there is more than one stage, otherwise through registers. `plain`: with one buffer.
    `ready`: see `pipeline`."""
    if plain:
        return single_buffer(tiles, stages > 1, steps, steps_each, inner, ready)
    if stages > 1:
        return pipeline(tiles, stages, steps, steps_each, inner, ready)
    return double_buffer(tiles, steps, steps_each, inner)


def buffers_of(stages: int, steps_each: int, plain: bool = False) -> int:
    """Number of buffers for each tile."""
    return 1 if plain else min(max(2, stages), steps_each)


def _to_shared(tile: Tile, thread: Var, buffer: Expr) -> list[Statement]:
    """Stores the fetched elements to one of the two buffers: a vector along r of a tile that is [k][m] or [k][n] one by one."""
    run, line = Var(f"{tile.name}_run", tile.run), Var(f"{tile.name}_line", tile.reach)
    base = buffer * tile.elements
    dtype = tile.held if tile.held == tile.fetched else tile.dtype
    statements: list[Statement] = []
    for number in range(tile.passes):
        lanes = 1 if tile.along_r and not tile.deep else tile.vector_width
        inner: list[Statement] = []
        for lane in range(0, tile.vector_width, lanes):
            value = Load(tile.stage, (index_const(number * tile.vector_width + lane),), dtype, lanes)
            inner.append(Store(tile.tile, base + tile.at(*tile.own_and_k(run, line, number, lane)), value))
        statements += in_tile(tile, line, number, block(inner))
    return statements
