"""Products of small matrices by a warp on tensor cores (PTX: mma.sync, ldmatrix), and rounding to TF32.

    mma(type, sums, a, b)           sums[16, 8] += a[16, k] b[k, 8], in float32; k = 8 for "tf32", 16 for "f16" and "bf16"
    ldmatrix(type, target, source)  1, 2 or 4 matrices of 8 rows of 16 bytes from shared memory to the lanes' registers
    stmatrix(type, target, source)  the same from registers to shared memory
    round_to_tf32(target, value)    the nearest number with 10 bits of mantissa; ties away from zero
    pair_of_tf32(high, low, value)  two such numbers whose sum is the value, but for its last bits
    round_to_f16(target, values)    two float32 rounded to a register of two float16

The elements of a matrix that a lane holds are its fragment (`Fragment`; PTX ISA, "Matrix Fragments for mma.m16n8k8" and "... mma.m16n8k16"), in a
register buffer: one element per register for float32 and TF32, two for 16-bit floats (a buffer of 2 lanes).

The meaning of a sum is its exact value, rounded once. The machine aligns the products of one instruction and truncates bits far below the largest, so
its results are equal if no bits are lost, and close otherwise. It reads 19 bits of a TF32 factor and ignores the others, which rounds towards zero;
apply `round_to_tf32` first to round to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tilewright.ir.dtypes import ELEMENT_TYPES, FLOAT32, nearest_tf32, size_of
from tilewright.ir.expr import Apply, Expr, Load, walk
from tilewright.ir.intrinsic import INTERPRETER, LANES, Array, Intrinsic, Operand, Text
from tilewright.ir.kernel import Invoke, Kernel, Place, Statement, Store, expressions, statements
from tilewright.ir.scalar import NEAREST_TF32

M, N = 16, 8
ROW_BYTES = 16
"""Bytes per row of a matrix that `ldmatrix` loads; rows are aligned to this."""
REGISTER_BYTES = 4

_QUALIFIER = "static __device__ __forceinline__"


# --- fragments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fragment:
    """Row and column of each matrix element that each lane of a warp holds; both arrays are [lane, element]."""

    rows: Array
    columns: Array

    @property
    def size(self) -> int:
        """Elements per lane."""
        return int(self.rows.shape[1])

    def matrix(self, held: Array) -> Array:
        """The matrix whose elements the lanes hold."""
        result = np.zeros((self.rows.max() + 1, self.columns.max() + 1), held.dtype)
        result[self.rows, self.columns] = held
        return result

    def of(self, matrix: Array) -> Array:
        """The elements of a matrix that the lanes hold."""
        held: Array = matrix[self.rows, self.columns]
        return held


@dataclass(frozen=True, eq=False)
class Shape:
    """Depth k of a product, the element type of the buffers that hold its factors, and the fragments of the factors and the sums."""

    depth: int
    stored: str
    a: Fragment
    b: Fragment
    sums: Fragment


def _shapes() -> dict[str, Shape]:
    lane = np.arange(LANES["warp"])[:, None]
    group, place = lane // 4, lane % 4

    def fragment(rows: Array, columns: Array) -> Fragment:
        return Fragment(*np.broadcast_arrays(rows, columns))

    two, four, eight = (np.arange(count)[None] for count in (2, 4, 8))
    sums = fragment(group + four // 2 * 8, place * 2 + four % 2)
    short = fragment(group + four % 2 * 8, place + four // 2 * 4), fragment(place + two * 4, group)
    a = fragment(group + eight // 2 % 2 * 8, place * 2 + eight % 2 + eight // 4 * 8)
    b = fragment(place * 2 + four % 2 + four // 2 * 8, group)
    return {"tf32": Shape(8, FLOAT32, *short, sums), "f16": Shape(16, "f16", a, b, sums), "bf16": Shape(16, "bf16", a, b, sums)}


SHAPES = _shapes()
"""The shapes by the type of the factors."""
FIRST = {"tf32": "sm_80", "f16": "sm_75", "bf16": "sm_80"}
"""The first architecture with products of such factors."""


# --- instructions -----------------------------------------------------------------------------------------------------


def mma(kind: str, sums: Place, a: Place, b: Place) -> Invoke:
    """sums += a b, on fragments of `SHAPES[kind]`; the matrices are a [16, k], b [k, 8] and sums [16, 8]."""
    return Invoke(_mma(kind), (sums, a, b))


def is_product(intrinsic: Intrinsic) -> bool:
    """Whether an instruction is an `mma`, which adds to its first operand a product of the others."""
    return intrinsic.key.startswith("mma.")


def ldmatrix(dtype: str, count: int, target: Place, source: Place, transposed: bool = False) -> Invoke:
    """Loads `count` matrices of 8 rows of 16 bytes. Lane 8 m + r gives the address of row r of matrix m; those of the other lanes are not read, but
    valid on Turing. A lane receives register lane % 4 of row lane / 4 of every matrix; if `transposed` (16 bits only), of the transposed matrix."""
    return Invoke(_ldmatrix(dtype, count, transposed), (target, source))


def stmatrix(dtype: str, count: int, target: Place, source: Place, transposed: bool = False) -> Invoke:
    """Stores `count` matrices of 8 rows of 8 elements of 16 bits, the inverse of `ldmatrix`. Lane 8 m + r gives the address of row r of matrix m. A
    lane holds register lane % 4 of row lane / 4 of every matrix; if `transposed`, of the transposed matrix."""
    return Invoke(_stmatrix(dtype, count, transposed), (target, source))


def round_to_tf32(target: Place, value: Expr) -> Invoke:
    """target = a float32 rounded to the nearest TF32."""
    return Invoke(_ROUND, (target, value))


def pair_of_tf32(high: Place, low: Place, value: Expr) -> list[Statement]:
    """high + low = a float32, with a relative error of at most 2^-22: high is the nearest TF32, low the nearest to the rest, which is exact in
    float32. Both registers are of float32, and `high` may hold the value."""
    rest = Load(low.buffer, (low.offset,), FLOAT32) - Load(high.buffer, (high.offset,), FLOAT32)
    return [Store(low.buffer, low.offset, value), Invoke(_PART, (high, value)), Invoke(_PART, (low, rest))]


def round_to_f16(target: Place, values: Place) -> Invoke:
    """target[2] = values[2] rounded to float16. `values`: a register buffer of 2 lanes. The compiler does not move it, as it does a conversion by a
    `Store`: behind the fence of a `wgmma` that reads the target it serialises the products."""
    return Invoke(_ROUND_TWO, (target, values))


def rounds_to_tf32(kernel: Kernel) -> bool:
    """Whether the kernel rounds float32 values to TF32, in fragments or where it stores them, instead of making pairs of them."""
    if any(isinstance(statement, Invoke) and statement.intrinsic == _ROUND for statement in statements(kernel.body)):
        return True
    return any(isinstance(node, Apply) and node.operation == NEAREST_TF32 for node in walk(*expressions(kernel.body)))


def splits_to_tf32(kernel: Kernel) -> bool:
    """Whether the kernel makes pairs of TF32 numbers of float32 values."""
    return any(isinstance(statement, Invoke) and statement.intrinsic == _PART for statement in statements(kernel.body))


@lru_cache(maxsize=8)
def _mma(kind: str) -> Intrinsic:
    shape = SHAPES[kind]
    name = f"m{M}n{N}k{shape.depth}"
    operands = (
        Operand("sums", "fragment", "update", FLOAT32, (shape.sums.size,)),
        Operand("a", "fragment", "read", shape.stored, (shape.a.size,)),
        Operand("b", "fragment", "read", shape.stored, (shape.b.size,)),
    )
    packed = REGISTER_BYTES // size_of(shape.stored)
    factors = [f"{of}[{i}]" for of, fragment in (("a", shape.a), ("b", shape.b)) for i in range(fragment.size // packed)]
    registers = [f"%{i}" for i in range(shape.sums.size + len(factors))]
    d, at = shape.sums.size, shape.sums.size + shape.a.size // packed
    lists = ["{" + ", ".join(part) + "}" for part in (registers[:d], registers[d:at], registers[at:])]
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(d))
    inputs = ", ".join(f'"r"({register_word(factor, shape.stored)})' for factor in factors)
    held = register_type(shape.stored)
    whole = f'"mma.sync.aligned.{name}.row.col.f32.{kind}.{kind}.f32 {lists[0]}, {lists[1]}, {lists[2]}, {lists[0]};"'
    if kind == "f16":  # Turing has the halves, whose registers are those of the whole one after another
        halves = [[part[half * len(part) // 2 : (half + 1) * len(part) // 2] for part in (registers[d:at], registers[at:])] for half in (0, 1)]
        parts = "".join(
            f"mma.sync.aligned.m{M}n{N}k{shape.depth // 2}.row.col.f32.f16.f16.f32 "
            f"{lists[0]}, {{{', '.join(a)}}}, {{{', '.join(b)}}}, {lists[0]};" for a, b in halves
        )  # fmt: skip
        whole = f'\n#if __CUDA_ARCH__ >= 800\n        {whole}\n#else\n        "{parts}"\n#endif\n       '
    source = f"""{_QUALIFIER} void tw_mma_{kind}(float *sums, const {held} *a, const {held} *b) {{
    asm volatile({whole}
                 : {outputs}
                 : {inputs});
}}"""

    def meaning(sums: Array, a: Array, b: Array) -> Array:
        left, right = shape.a.matrix(exact(a, kind)), shape.b.matrix(exact(b, kind))
        with np.errstate(all="ignore"):
            return shape.sums.of((shape.sums.matrix(sums).astype(np.float64) + left @ right).astype(np.float32))

    text = {"CUDA": Text(f"tw_mma_{kind}({{sums}}, {{a}}, {{b}});", f"tw_mma_{kind}", source)}
    return Intrinsic(f"mma {name} {kind}", "warp", operands, meaning, text, f"mma.{name}.{kind}", (FIRST[kind],))


@lru_cache(maxsize=16)
def _ldmatrix(dtype: str, count: int, transposed: bool) -> Intrinsic:
    if count not in (1, 2, 4) or transposed and size_of(dtype) != 2:
        raise ValueError(f"there is no ldmatrix of {count} matrices of {dtype}{', transposed' if transposed else ''}")
    row, packed = ROW_BYTES // size_of(dtype), REGISTER_BYTES // size_of(dtype)
    operands = (
        Operand("target", "fragment", "write", dtype, (count * packed,)),
        Operand("source", "shared", "read", dtype, (row,), lanes=8 * count),
    )
    suffix = f"x{count}{'.trans' if transposed else ''}"
    function = f"tw_ldmatrix_{dtype}_x{count}{'_transposed' if transposed else ''}"
    words = ", ".join(f'"=r"(word[{i}])' for i in range(count))
    source = f"""{_QUALIFIER} void {function}({register_type(dtype)} *target, const void *source) {{
    unsigned word[{count}];
    asm volatile("ldmatrix.sync.aligned.m8n8.{suffix}.shared.b16 {{{", ".join(f"%{i}" for i in range(count))}}}, [%{count}];"
                 : {words} : "r"((unsigned)__cvta_generic_to_shared(source)) : "memory");
    for (int i = 0; i < {count}; ++i)
        target[i] = {_register("word[i]", dtype)};
}}"""

    def meaning(rows: Array) -> Array:
        matrices = rows.reshape(count, 8, row)
        if transposed:
            matrices = matrices.swapaxes(1, 2)
        return matrices.reshape(count, LANES["warp"], packed).swapaxes(0, 1).reshape(LANES["warp"], count * packed)

    text = {"CUDA": Text(f"{function}({{target}}, {{source}});", function, source)}
    return Intrinsic(f"ldmatrix {suffix} {dtype}", "warp", operands, meaning, text, f"ldmatrix.{suffix}", ("sm_75",))


@lru_cache(maxsize=16)
def _stmatrix(dtype: str, count: int, transposed: bool) -> Intrinsic:
    if count not in (1, 2, 4) or size_of(dtype) != 2:
        raise ValueError(f"there is no stmatrix of {count} matrices of {dtype}")
    row, packed = ROW_BYTES // size_of(dtype), REGISTER_BYTES // size_of(dtype)
    operands = (
        Operand("target", "shared", "write", dtype, (row,), lanes=8 * count),
        Operand("source", "fragment", "read", dtype, (count * packed,)),
    )
    suffix = f"x{count}{'.trans' if transposed else ''}"
    function = f"tw_stmatrix_{dtype}_x{count}{'_transposed' if transposed else ''}"
    words = ", ".join(f'"r"({register_word(f"source[{i}]", dtype)})' for i in range(count))
    source = f"""{_QUALIFIER} void {function}(void *target, const {register_type(dtype)} *source) {{
    asm volatile("stmatrix.sync.aligned.m8n8.{suffix}.shared.b16 [%0], {{{", ".join(f"%{i + 1}" for i in range(count))}}};"
                 :: "r"((unsigned)__cvta_generic_to_shared(target)), {words} : "memory");
}}"""

    def meaning(held: Array) -> Array:
        matrices = held.reshape(LANES["warp"], count, packed).swapaxes(0, 1).reshape(count, 8, row)
        return (matrices.swapaxes(1, 2) if transposed else matrices).reshape(8 * count, row)

    text = {"CUDA": Text(f"{function}({{target}}, {{source}});", function, source)}
    return Intrinsic(f"stmatrix {suffix} {dtype}", "warp", operands, meaning, text, f"stmatrix.{suffix}", ("sm_90",))


_ROUND = Intrinsic(
    "round to tf32",
    "thread",
    (Operand("target", "fragment", "write", FLOAT32, (1,)), Operand("value", "value")),
    lambda value: nearest_tf32(value)[:, None],
    {
        "CUDA": Text(
            "tw_round_to_tf32({target}, {value});",
            "tw_round_to_tf32",
            f"""{_QUALIFIER} void tw_round_to_tf32(float *target, float value) {{
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    *target = __uint_as_float(bits);
}}""",
        ),
        INTERPRETER: Text(
            "tw_round_to_tf32({target}[0], {value}[0][0]);",
            "tw_round_to_tf32",
            """static void tw_round_to_tf32(float *target, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value == value)
        bits = (bits + 0x1000) & 0xffffe000;
    memcpy(target, &bits, sizeof bits);
}""",
        ),
    },
    "cvt.rna.tf32",
    ("sm_80",),
)


_PART = replace(_ROUND, name="part of a pair of tf32")


def _as_f16(values: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16)


_ROUND_TWO = Intrinsic(
    "round two to f16",
    "thread",
    (Operand("target", "fragment", "write", "f16", (2,)), Operand("values", "fragment", "read", FLOAT32, (2,))),
    _as_f16,
    {
        "CUDA": Text(
            "tw_round_two_to_f16({target}, {values});",
            "tw_round_two_to_f16",
            f"""{_QUALIFIER} void tw_round_two_to_f16(ushort2 *target, const float2 *values) {{
    unsigned word;
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values->y), "f"(values->x));
    *target = make_ushort2(word & 0xffff, word >> 16);
}}""",
        ),
    },
    "cvt.rn.f16x2",
    ("sm_80",),
)


def exact(held: Array, kind: str) -> Array:
    """The factors as the machine reads them, in float64."""
    if kind == "tf32":
        return (held.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return ((held.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else held).astype(np.float64)


def register_type(dtype: str) -> str:
    """The type of a register of a fragment."""
    return ELEMENT_TYPES[dtype].cuda if size_of(dtype) == 4 else f"{ELEMENT_TYPES[dtype].cuda_vector}2"


def register_word(register: str, dtype: str) -> str:
    """A fragment's register as 32 bits."""
    return f"__float_as_uint({register})" if size_of(dtype) == 4 else f"{register}.x | (unsigned){register}.y << 16"


def _register(word: str, dtype: str) -> str:
    """A fragment's register made of 32 bits."""
    return f"__uint_as_float({word})" if size_of(dtype) == 4 else f"make_ushort2({word} & 0xffff, {word} >> 16)"
