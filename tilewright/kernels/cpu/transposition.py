"""Transposing a register tile: vectors of channels, one for each pixel, become vectors of pixels, one for each channel.

    1 2 3 4       1 3 a c       1 a A *
    a b c d   →   A C * ...  →  2 b ...        (log2(lanes) rounds, each of `lanes` interleavings of two vectors)

Each round interleaves rows i and i + half into rows 2i and 2i + 1. This rotates the bits of the combined index (row, lane) by one place, so that
after log2(lanes) rounds row and lane have changed places.
"""

from __future__ import annotations

from tilewright.codegen.assemble import block
from tilewright.ir.expr import Apply, Expr, Load, Var, index_const
from tilewright.ir.kernel import For, Statement, Store


def transposed(first: str, second: str, lanes: int, dtype: str) -> tuple[list[Statement], str]:
    """Statements that transpose the `lanes` vectors of the register buffer `first`, and the name of the buffer that holds the result. Rounds
    alternate between `first` and `second`, which is equally large. `lanes` is a power of two."""
    assert lanes & (lanes - 1) == 0, "a power of two"
    half = lanes // 2
    turns: list[Statement] = []
    for turn in range(lanes.bit_length() - 1):
        i = Var(f"i{turn}", half)
        pair = tuple(Load(first, ((i + start) * lanes,), dtype, lanes) for start in (0, half))
        low, high = (Store(second, (i * 2 + part) * lanes, Apply(f"zip_{name}", pair, dtype, lanes)) for part, name in enumerate(("low", "high")))
        turns.append(For(i, index_const(half), block(low, high), "unroll"))
        first, second = second, first
    return turns, first


def vector_pieces(count: int, lanes: int) -> list[tuple[int, int]]:
    """(first element, lanes) of the fewest vectors of 1, 2, 4... up to `lanes` lanes that make up `count` elements."""
    pieces: list[tuple[int, int]] = []
    done = 0
    while done < count:
        width = min(lanes, 1 << ((count - done).bit_length() - 1))
        pieces.append((done, width))
        done += width
    return pieces


def copied(target: str, to: Expr, source: str, start: Expr, count: int, lanes: int, dtype: str) -> list[Statement]:
    """target[to : to + count] = source[start : start + count] in the fewest vectors."""
    return [Store(target, to + first, Load(source, (start + first,), dtype, width)) for first, width in vector_pieces(count, lanes)]
