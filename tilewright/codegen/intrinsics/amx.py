"""Tile registers of x86 (Intel AMX): 8 registers of up to 16 rows of 64 bytes, and their products of bfloat16 with float32 sums.

In C the instructions are inline assembly with a memory clobber, so that earlier stores are in memory when a tile is loaded, and later loads see a
stored tile. The shapes of a kernel's tiles are set once, by `with_tiles`. A process requests the registers from Linux once, when a file with such
kernels is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Expr, index_const
from tilewright.ir.intrinsic import Array, Context, ContextText, Intrinsic, Operand, Text, moved
from tilewright.ir.kernel import Block, Buffer, Comment, Invoke, Place, Statement, With

TILES = 8
"""Tile registers per thread."""
TILE_PIXELS = 16
"""Rows of a register."""
TILE_CHANNELS = 16
"""Four-byte elements per row."""
ROW_BYTES = 4 * TILE_CHANNELS

FACTOR, SUM = "bf16", FLOAT32
"""Element types of the factors and of the sums."""

_MACROS = """\
#define TW_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TW_TILE_LOAD(t, from, bytes) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(bytes)) : "memory")
#define TW_TILE_STORE(t, to, bytes) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(bytes)) : "memory")
#define TW_TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
"""


# --- registers --------------------------------------------------------------------------------------------------------


def tile(name: str, rows: int, columns: int, dtype: str) -> Buffer:
    """A register of `rows` rows of `columns` elements."""
    return Buffer(name, dtype, rows * columns, "register", columns)


def shape_of(buffer: Buffer) -> tuple[int, int]:
    """Rows, and elements per row."""
    return buffer.size // buffer.lanes, buffer.lanes


def row_bytes(buffer: Buffer) -> int:
    return buffer.lanes * size_of(buffer.dtype)


def configuration(tiles: Sequence[Buffer]) -> str:
    """The 64 bytes that `ldtilecfg` reads, as a C initialiser list.

    Raises:
        ValueError: for more or larger tiles than the machine has.
    """
    if len(tiles) > TILES or any(shape_of(buffer)[0] > TILE_PIXELS or row_bytes(buffer) > ROW_BYTES for buffer in tiles):
        raise ValueError(f"{len(tiles)} tiles {[(shape_of(buffer)[0], row_bytes(buffer)) for buffer in tiles]} do not fit the registers")
    data = [0] * 64
    data[0] = 1
    for number, buffer in enumerate(tiles):
        data[16 + 2 * number] = row_bytes(buffer)
        data[48 + number] = shape_of(buffer)[0]
    return ", ".join(map(str, data))


def with_tiles(tiles: Sequence[Buffer], body: Statement) -> Statement:
    """The body in a context with these tiles, in the order of the registers.

    Raises:
        ValueError: for more or larger tiles than the machine has.
    """
    what = "\n".join(f"tile {number}: {each.name}, {shape_of(each)[0]} rows of {row_bytes(each)} bytes" for number, each in enumerate(tiles))
    text = ContextText(
        (
            f"static const uint8_t shapes[64] __attribute__((aligned(64))) = {{{configuration(tiles)}}};",
            '__asm__ volatile("ldtilecfg %0" : : "m"(shapes));',
        ),
        ('__asm__ volatile("tilerelease" ::);',),
        tuple(str(number) for number in range(len(tiles))),
        _MACROS,
    )
    return Block((Comment(what), With(Context("tiles", {"C": text}), tuple(tiles), body)))


# --- instructions -----------------------------------------------------------------------------------------------------


def zero(target: Buffer) -> Invoke:
    """target = 0"""
    return Invoke(_zero(shape_of(target), target.dtype), (_register(target),))


def load(target: Buffer, buffer: str, offset: Expr, stride: int) -> Invoke:
    """Row i of the tile = the buffer's elements from offset + i * stride on."""
    return Invoke(_load(shape_of(target), target.dtype, stride), (_register(target), Place(buffer, offset)))


def multiply(sums: Buffer, a: Buffer, b: Buffer) -> Invoke:
    """sums[i][j] += the sum over k of a[i][2k] * b[k][2j] + a[i][2k + 1] * b[k][2j + 1]"""
    (rows, columns), (rows_a, depth), (rows_b, columns_b) = shape_of(sums), shape_of(a), shape_of(b)
    if (rows_a, depth, columns_b) != (rows, 2 * rows_b, 2 * columns):
        raise ValueError(f"tiles of {a} and {b} do not multiply to {sums}")
    return Invoke(_multiply(rows, columns, depth), (_register(sums), _register(a), _register(b)))


def store(source: Buffer, buffer: str, offset: Expr, stride: int) -> Invoke:
    """Stores row i of the tile to the buffer at offset + i * stride (not to a buffer of vectors)."""
    return Invoke(_store(shape_of(source), source.dtype, stride), (_register(source), Place(buffer, offset)))


def _register(buffer: Buffer) -> Place:
    return Place(buffer.name, index_const(0))


@lru_cache(maxsize=256)
def _zero(shape: tuple[int, int], dtype: str) -> Intrinsic:
    operands = (Operand("tile", "fragment", "write", dtype, shape),)
    text = {"C": Text("TW_TILE_ZERO({tile});")}
    return Intrinsic(f"zero {shape} {dtype}", "thread", operands, lambda: np.zeros((1, *shape)), text, "zero", ("amx_tile",))


@lru_cache(maxsize=256)
def _load(shape: tuple[int, int], dtype: str, stride: int) -> Intrinsic:
    operands = (Operand("tile", "fragment", "write", dtype, shape), Operand("source", "memory", "read", dtype, shape, (stride, 1)))
    text = {"C": Text(f"TW_TILE_LOAD({{tile}}, {{source}}, {stride * size_of(dtype)});")}
    return Intrinsic(f"load {shape} {dtype} by {stride}", "thread", operands, moved, text, "tile load", ("amx_tile",))


@lru_cache(maxsize=256)
def _store(shape: tuple[int, int], dtype: str, stride: int) -> Intrinsic:
    operands = (Operand("tile", "fragment", "read", dtype, shape), Operand("target", "memory", "write", dtype, shape, (stride, 1)))
    text = {"C": Text(f"TW_TILE_STORE({{tile}}, {{target}}, {stride * size_of(dtype)});")}
    return Intrinsic(f"store {shape} {dtype} by {stride}", "thread", operands, moved, text, "tile store", ("amx_tile",))


@lru_cache(maxsize=256)
def _multiply(rows: int, columns: int, depth: int) -> Intrinsic:
    operands = (
        Operand("sums", "fragment", "update", SUM, (rows, columns)),
        Operand("a", "fragment", "read", FACTOR, (rows, depth)),
        Operand("b", "fragment", "read", FACTOR, (depth // 2, 2 * columns)),
    )
    text = {"C": Text("TW_TILE_MULTIPLY({sums}, {a}, {b});")}
    return Intrinsic(f"multiply {rows}x{columns}x{depth}", "thread", operands, _products, text, "tile product", ("amx_bf16",))


def _products(sums: Array, a: Array, b: Array) -> Array:
    """Sums the even and the odd steps separately, by fused multiply-adds in float32 in order; the two sums are added, then added to the accumulator.
    Subnormal numbers count as zero (Intel SDM, TDPBF16PS)."""
    (_, rows, columns), steps = sums.shape, b.shape[1]
    left = flushed(widened(a[0])).reshape(rows, steps, 2)
    right = flushed(widened(b[0])).reshape(steps, columns, 2)
    parts = np.zeros((rows, columns, 2), np.float32)
    with np.errstate(all="ignore"):
        for k in range(steps):
            # a product of two bfloat16 is exact in float32 unless it is tiny
            parts = flushed((parts.astype(np.float64) + left[:, k, None, :].astype(np.float64) * right[k]).astype(np.float32))
        return flushed(flushed(sums[0]) + flushed(parts[..., 0] + parts[..., 1]))[None]


def widened(bits: Array) -> Array:
    """float32 of the bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


_LEAST = np.finfo(np.float32).tiny


def flushed(values: Array) -> Array:
    """Replaces subnormal float32 by zero of the same sign."""
    small = np.abs(values) < _LEAST
    return np.where(small, np.copysign(np.float32(0), values), values) if small.any() else values
