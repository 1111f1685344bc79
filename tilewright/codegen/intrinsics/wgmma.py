"""Products of matrices in shared memory by the tensor cores of a warpgroup (PTX: wgmma, sm_90a).

    fence()                               before the first product, and after a thread accessed sums
    multiply(kind, sums, a, b, add)       sums[64, n] = a[64, k] b[n, k]^T (+ sums), in float32; k = 8 for "tf32", 16 for "f16" and "bf16"
    commit()                              makes the products since the last commit a group
    await_groups(pending)                 until at most the youngest `pending` groups are incomplete
    await_sums(n, sums)                   until all are complete, after which the sums are accessed

Products run asynchronously and in order. Until a product's group was awaited its sums are not accessed, and its factors in shared memory not
overwritten. Factors that threads (not the copy engine) wrote are published first (`mbarrier.publish`).

A factor is a `Tile` of an aligned buffer: rows of 32, 64 or 128 bytes, swizzled, as the copy engine stores boxes with such rows. If it is K-major,
its rows are those of the matrix, and a product takes a part of each row, from the place's offset on; the next eight rows
may begin `group` rows after the first of the eight before. If it is not ("MN-major", 16 bits only), the tile's rows are columns of the matrix (k),
each with as many elements (m or n) as fit `swizzle` bytes; more elements follow in further panels, `panel` elements apart. Source:
PTX ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor Format"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.codegen.intrinsics.mbarrier import shared_address
from tilewright.codegen.intrinsics.mma import REGISTER_BYTES, SHAPES, Fragment, exact, register_type, register_word, splits_to_tf32
from tilewright.ir.dtypes import FLOAT32, size_of
from tilewright.ir.expr import Expr, index_const
from tilewright.ir.intrinsic import LANES, SWIZZLES, Array, Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Kernel, Place, statements

M = 64
MOST_N = 256
REQUIRES = ("sm_90a",)
DEPTHS = {"tf32": 8, "f16": 16, "bf16": 16}
"""k of one product, by the type of the factors."""
STORED = {"tf32": FLOAT32, "f16": "f16", "bf16": "bf16"}
"""Type of the buffers that hold the factors."""
GROUP = 8
"""Rows of a tile after which the swizzle repeats."""

_QUALIFIER = "static __device__ __forceinline__"
_LAYOUT = {128: 1, 64: 2, 32: 3}  # descriptor bits 62 and 63, by bytes of the swizzle


@dataclass(frozen=True)
class Tile:
    """How a factor lies in shared memory. `swizzle`: bytes of a row. `panel`: elements between panels of a factor that is not K-major. `group`: rows
    from the first of eight rows of a K-major factor to the first of the next eight."""

    swizzle: int
    k_major: bool = True
    panel: int = 0
    group: int = GROUP

    def __post_init__(self) -> None:
        if self.swizzle not in SWIZZLES[1:]:
            raise ValueError(f"rows of a factor have 32, 64 or 128 bytes, not {self.swizzle}")


def sums_fragment(n: int) -> Fragment:
    """Row and column of each of the n / 2 sums that each thread of a warpgroup holds (PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk16")."""
    thread, element = np.arange(LANES["warpgroup"])[:, None], np.arange(n // 2)[None]
    rows = thread // 32 * 16 + thread % 32 // 4 + element // 2 % 2 * 8
    columns = thread % 4 * 2 + element % 2 + element // 4 * 8
    return Fragment(*np.broadcast_arrays(rows, columns))


def _factor(name: str, kind: str, rows: int, tile: Tile) -> Operand:
    """The operand, as an array [rows, k] in pieces of the shape."""
    dtype, depth = STORED[kind], DEPTHS[kind]
    row = tile.swizzle // size_of(dtype)
    if tile.k_major:
        if tile.group == GROUP:
            return Operand(name, "shared", "read", dtype, (rows, depth), (row, 1), 1, swizzle=tile.swizzle)
        shape, strides = (rows // GROUP, GROUP, depth), (tile.group * row, row, 1)
        return Operand(name, "shared", "read", dtype, shape, strides, 1, swizzle=tile.swizzle)
    if size_of(dtype) != 2:
        raise ValueError(f"factors of {dtype} are K-major")
    inner = min(rows, row)
    if rows % inner:
        raise ValueError(f"{rows} rows are no whole panels of {row}")
    return Operand(name, "shared", "read", dtype, (rows // inner, inner, depth), (tile.panel or GROUP * row, 1, row), 1, swizzle=tile.swizzle)


def _descriptor(tile: Tile, dtype: str) -> int:
    """The bits of a matrix descriptor other than the address. Offsets are in units of 16 bytes: to the next group of 8 rows of the matrix, and to the
    next panel (without meaning for K-major tiles)."""
    group, panel = tile.group * tile.swizzle // 16, tile.panel * size_of(dtype) // 16
    return (1 if tile.k_major else max(panel, 1)) << 16 | group << 32 | _LAYOUT[tile.swizzle] << 62


def _mark(tile: Tile) -> str:
    """The tile in names of functions."""
    panel, group = f"_{tile.panel}" * (tile.panel > 0), f"_by{tile.group}" * (tile.group != GROUP)
    return f"_{'k' if tile.k_major else 'mn'}{tile.swizzle}{panel}{group}"


@lru_cache(maxsize=256)
def _multiplying(kind: str, n: int, a: Tile | None, b: Tile) -> Intrinsic:
    """`a`: None if it is in registers."""
    if n % 8 or not 8 <= n <= MOST_N:
        raise ValueError(f"there is no product of {n} columns")
    dtype, depth, fragment = STORED[kind], DEPTHS[kind], sums_fragment(n)
    count = n // 2
    name = f"m{M}n{n}k{depth}"
    tiles = [tile for tile in (a, b) if tile is not None]
    layouts = "".join(map(_mark, tiles))
    function = f"tw_wgmma_{n}_{kind}{'_held' * (a is None)}{layouts}"
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    transposed = "" if kind == "tf32" else "".join(f", {int(not tile.k_major)}" for tile in tiles)
    held = SHAPES[kind].a
    if a is None:
        words = [register_word(f"a[{i}]", dtype) for i in range(held.size * size_of(dtype) // REGISTER_BYTES)]
        left, given = f"const {register_type(dtype)} *a", ", ".join(f'"r"({word})' for word in words)
        factor = "{" + ", ".join(f"%{count + i}" for i in range(len(words))) + "}"
    else:
        words, left, factor = ["left"], "const void *a", f"%{count}"
        given = f'"l"({_descriptor(a, dtype):#x}ull | ({shared_address("a")} & 0x3ffff) >> 4)'
    last = count + len(words)
    source = f"""{_QUALIFIER} void {function}(float *sums, {left}, const void *b, int add) {{
    const unsigned long long right = {_descriptor(b, dtype):#x}ull | ({shared_address("b")} & 0x3ffff) >> 4;
    asm volatile("{{ .reg .pred add; setp.ne.b32 add, %{last + 1}, 0; wgmma.mma_async.sync.aligned.{name}.f32.{kind}.{kind} "
                 "{{{sums}}}, {factor}, %{last}, add, 1, 1{transposed}; }}"
                 : {outputs} : {given}, "l"(right), "r"(add));
}}"""

    def meaning(add: Array, sums: Array, a_held: Array, b_held: Array) -> Array:
        found = exact(a_held, kind)
        if a is None:  # each warp has 16 rows
            left = np.concatenate([held.matrix(part) for part in found.reshape(-1, LANES["warp"], held.size)])
        else:
            left = found.reshape(M, depth)
        right = exact(b_held, kind).reshape(n, depth)
        with np.errstate(all="ignore"):
            return fragment.of((fragment.matrix(sums).astype(np.float64) + left @ right.T).astype(np.float32))

    operands = (
        Operand("add", "value", dtype="bool"),
        Operand("sums", "fragment", "update", FLOAT32, (count,), guard="add"),
        Operand("a", "fragment", "read", dtype, (held.size,)) if a is None else _factor("a", kind, M, a),
        _factor("b", kind, n, b),
    )
    return Intrinsic(
        f"wgmma {name} {kind}{' held' * (a is None)}{layouts}",
        "warpgroup",
        operands,
        meaning,
        {"CUDA": Text(f"{function}({{sums}}, {{a}}, {{b}}, {{add}});", function, source)},
        f"wgmma.{name}.{kind}",
        REQUIRES,
        engine="products",
    )


def multiply(kind: str, n: int, sums: Place, a: Place, b: Place, add: Expr, tiles: tuple[Tile | None, Tile]) -> Invoke:
    """sums[64, n] = a b^T, plus what they are if `add`. `sums`: n / 2 registers of each thread (`sums_fragment`). `tiles`: how a and b lie; without
    one a is in registers, of which each warp has the fragment of its 16 rows (`mma.SHAPES`), and which are not overwritten until the product was
    awaited."""
    return Invoke(_multiplying(kind, n, *tiles), (add, sums, a, b))


def truncates_to_tf32(kernel: Kernel) -> bool:
    """Whether the kernel multiplies float32 values, of which tensor cores take the bits of TF32, instead of pairs that have no others."""
    invoked = (statement.intrinsic.key for statement in statements(kernel.body) if isinstance(statement, Invoke))
    return any(key.startswith("wgmma.") and key.endswith(".tf32") for key in invoked) and not splits_to_tf32(kernel)


def _group(name: str, text: str, order: str = "", operands: tuple[Operand, ...] = ()) -> Intrinsic:
    printed = {"CUDA": Text(f'asm volatile("{text}" ::: "memory");')}
    return Intrinsic(name, "warpgroup", operands, text=printed, key=text.split(".sync")[0], requires=REQUIRES, order=order)


_FENCE = _group("fence of products", "wgmma.fence.sync.aligned;")
_COMMIT = _group("commit products", "wgmma.commit_group.sync.aligned;", "commit")
_AWAIT = _group("await products", "wgmma.wait_group.sync.aligned {pending};", "await", (Operand("pending", "value", dtype="i64"),))


@lru_cache(maxsize=32)
def _awaiting(n: int) -> Intrinsic:
    count = n // 2
    function = f"tw_wgmma_await_{n}"
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    source = f"""{_QUALIFIER} void {function}(float *sums) {{
    asm volatile("wgmma.wait_group.sync.aligned 0;" : {outputs} :: "memory");  // the compiler moves no use of the sums ahead of it
}}"""
    operands = (Operand("pending", "value", dtype="i64"), Operand("sums", "fragment", "address", FLOAT32, (count,)))
    text = {"CUDA": Text(f"{function}({{sums}});", function, source)}
    return Intrinsic(f"await {count} sums", "warpgroup", operands, text=text, key="wgmma.wait_group", requires=REQUIRES, order="await")


def await_sums(n: int, sums: Place) -> Invoke:
    """Waits until all groups are complete; the sums of a product of `n` columns may be read and written then."""
    return Invoke(_awaiting(n), (index_const(0), sums))


def fence() -> Invoke:
    """Orders accesses of registers before later products."""
    return Invoke(_FENCE)


def commit() -> Invoke:
    """Makes the warpgroup's products since the last commit a group."""
    return Invoke(_COMMIT)


def await_groups(pending: int) -> Invoke:
    """Waits until at most `pending` of the warpgroup's youngest groups are incomplete (0 to 7)."""
    return Invoke(_AWAIT, (index_const(pending),))
