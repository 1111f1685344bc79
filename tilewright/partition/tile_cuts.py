"""How a chain on a GPU can be cut into tiles: along which dimensions, into chunks of channels, and of which the blocks of a cluster exchange rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.partition.strips import Cut, cuts_of, dims_of, is_path
from tilewright.partition.tile_exchange import EXCHANGEABLE
from tilewright.partition.tiles import windows_along

CLUSTERS = (2, 4, 8)
"""Blocks of a cluster that exchange rows: up to eight are portable (CUDA C++ Programming Guide, thread block clusters)."""


def extents_of(problem: Problem, cuts: Sequence[Cut]) -> list[int]:
    """The rows of a chain's result along each axis."""
    return [problem.values[cuts[-1].result].shape[dim] for dim in dims_cut(cuts)]


def dims_cut(cuts: Sequence[Cut]) -> list[int]:
    """The dimensions of a chain's result along which it is cut."""
    return [rows.dim for rows in cuts[-1].spans[cuts[-1].result] if rows is not None]


def axis_of(cuts: Sequence[Cut], dim: int) -> int:
    """The axis of a dimension along which a chain is cut. Raises Unsuitable if it is not."""
    if dim not in dims_cut(cuts):
        raise Unsuitable(f"it is not cut along dimension {dim}")
    return dims_cut(cuts).index(dim)


def overlapping(problem: Problem, cuts: Sequence[Cut]) -> int | None:
    """The first axis along which regions need more rows of floats before than their own; None if there is none, or if a result has other readers
    than the next region, as tiles then exchange no rows."""
    if not is_path(problem.region):
        return None
    for axis in range(len(dims_cut(cuts))):
        for producer, consumer in pairwise(cuts):
            rows, dtype = consumer.span(producer.result, axis), problem.values[producer.result].dtype
            if dtype in EXCHANGEABLE and rows is not None and (rows.first < 0 or rows.first + rows.span > rows.stride):
                return axis
    return None


def exchanging(problem: Problem, cuts: Sequence[Cut], axis: int, sizes: Sequence[int]) -> list[int]:
    """The sizes along an axis for which the tiles are those of a cluster that can exchange rows."""
    found = []
    for size in sizes:
        with suppress(Unsuitable):
            last = windows_along(cuts, axis, size, problem, True)[-1]
            found += [size] if last is not None and last.tiles in CLUSTERS else []
    return found


def summed(cuts: Sequence[Cut]) -> int:
    """The channels over which the last region sums in chunks."""
    (*_, axis) = cuts[-1].axes
    assert axis is not None and axis.extent is not None
    return axis.extent


def in_chunks(problem: Problem, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """The regions of a canonical chain cut as before, and into chunks of what the last one sums over.

    Raises:
        Unsuitable: if they cannot be.
    """
    return cuts_of(problem, dims_cut(cuts), chunked=True)


def cut_along(problem: Problem) -> tuple[Cut, ...]:
    """The regions of a canonical chain cut along all dimensions of its result in which that is possible together.

    Raises:
        Unsuitable: if it cannot be cut along any dimension, or some inner result cannot be.
    """
    for name, whole in problem.region.wholes:
        raise Unsuitable(f"{name} is read as a part of {whole}, in memory")
    every, dims = dims_of(problem), tuple[int, ...]()
    cuts: tuple[Cut, ...] = ()
    refusals: list[str] = []
    # what can be cut along several dimensions can be along fewer: all of them together are tried first, then one after another
    for more in (every, *((dim,) for dim in every if len(every) > 1)):
        try:
            cuts, dims = cuts_of(problem, tuple(sorted((*dims, *more)))), tuple(sorted((*dims, *more)))
        except Unsuitable as reason:
            refusals.append(str(reason))
        if len(dims) == len(every):
            break
    if not dims:
        raise Unsuitable("; ".join(dict.fromkeys(refusals)) or "its result has one element")
    for part in cuts:
        if not any(part.spans[part.result]):
            raise Unsuitable(f"each tile needs all of {part.result}")
    return cuts
