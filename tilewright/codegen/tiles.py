"""C text for what only some x86 machines have: conversions between float32 and stored bfloat16 as vectors, and tile registers (AMX).

Tile instructions are inline assembly with a memory clobber: what was stored before is in memory when a tile is loaded, and what is read after a
tile was stored comes from there. A process asks Linux for the tile registers once, when a file with such kernels is loaded.

Rounding is to the nearest bfloat16, to the even one of two; NaN stays NaN (and becomes quiet), and subnormal numbers become zero, as of the
instruction that does it where there is AVX512_BF16, and as of the products of tiles, which take them for zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.expr import Expr
from tilewright.ir.kernel import Tile, TileLoad, TileMultiply, TileStore, TileZero
from tilewright.schedule.cpu_amx import TILE_CHANNELS, TILE_PIXELS, TILES

WIDENED = "tw_f32_of_bf16"
ROUNDED = "tw_bf16_of_f32"

_NATIVE_LANES = 16

SCALAR_CONVERSIONS = {
    WIDENED: f"""\
static inline float {WIDENED}(uint16_t a) {{
    union {{ uint32_t bits; float value; }} u = {{(uint32_t)a << 16}};
    return u.value;
}}""",
    ROUNDED: f"""\
static inline uint16_t {ROUNDED}(float a) {{
    union {{ float value; uint32_t bits; }} u = {{a}};
    uint32_t x = u.bits, rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    rounded = (x & 0x7fffffff) > 0x7f800000 ? x >> 16 | 0x40 : rounded;
    return (x & 0x7f800000) == 0 ? x >> 16 & 0x8000 : rounded;
}}""",
}


def widened_vector(lanes: int) -> str:
    """The function from a vector of bfloat16 to one of float32; exact. Of a conversion of 16 lanes gcc 12 makes two halves."""
    native = (
        "#ifdef __AVX512F__\n"
        f"    i32x{lanes} wide;\n"
        '    __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(a));\n'
        "#else\n"
        f"    const i32x{lanes} wide = __builtin_convertvector(a, i32x{lanes});\n"
        "#endif\n"
    )
    plain = f"    const i32x{lanes} wide = __builtin_convertvector(a, i32x{lanes});\n"
    body = native if lanes == _NATIVE_LANES else plain
    return f"static inline f32x{lanes} {WIDENED}x{lanes}(bf16x{lanes} a) {{\n{body}    return (f32x{lanes})(wide << 16);\n}}"


def rounded_vector(lanes: int) -> str:
    """The function from a vector of float32 to one of bfloat16."""
    native = (
        "#ifdef __AVX512BF16__\n"
        f"    bf16x{lanes} result;\n"
        '    __asm__("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(a));\n'
        "    return result;\n"
        "#else\n"
    )
    text = (
        f"    const i32x{lanes} x = (i32x{lanes})a, high = x >> 16;\n"
        f"    i32x{lanes} rounded = (x + 0x7fff + (high & 1)) >> 16;\n"
        f"    const i32x{lanes} special = (x & 0x7fffffff) > 0x7f800000, tiny = (x & 0x7f800000) == 0;\n"
        f"    rounded = (special & (high | 0x40)) | (~special & rounded);\n"
        f"    rounded = (tiny & (high & 0x8000)) | (~tiny & rounded);\n"
        f"    return __builtin_convertvector(rounded, bf16x{lanes});\n"
    )
    both = f"{native}{text}#endif\n" if lanes == _NATIVE_LANES else text
    return f"static inline bf16x{lanes} {ROUNDED}x{lanes}(f32x{lanes} a) {{\n{both}}}"


OPERATIONS = """\
#define TW_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TW_TILE_LOAD(t, from, bytes) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(bytes)) : "memory")
#define TW_TILE_STORE(t, to, bytes) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(bytes)) : "memory")
#define TW_TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
"""


def configuration(tiles: Sequence[Tile]) -> str:
    """The 64 bytes that `ldtilecfg` reads, as the list of an initialiser.

    Raises:
        ValueError: for more or larger tiles than there are.
    """
    if len(tiles) > TILES or any(tile.rows > TILE_PIXELS or tile.columns > TILE_CHANNELS for tile in tiles):
        raise ValueError(f"{len(tiles)} tiles {[(tile.rows, tile.columns) for tile in tiles]} do not fit the registers")
    data = [0] * 64
    data[0] = 1
    for number, tile in enumerate(tiles):
        data[16 + 2 * number] = 4 * tile.columns
        data[48 + number] = tile.rows
    return ", ".join(map(str, data))


def opening(tiles: Sequence[Tile]) -> list[str]:
    """Lines that begin a block with these tiles: what each is for, and their shapes into the registers."""
    named = [f"// tile {number}: {tile.name}, {tile.rows} rows of {4 * tile.columns} bytes" for number, tile in enumerate(tiles)]
    shapes = f"    static const uint8_t shapes[64] __attribute__((aligned(64))) = {{{configuration(tiles)}}};"
    return [*named, "{", shapes, '    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));']


def computing(root: TileZero | TileMultiply, numbers: Mapping[str, int]) -> str:
    """The line of what touches no memory; `numbers`: the registers of the tiles."""
    if isinstance(root, TileZero):
        return f"TW_TILE_ZERO({numbers[root.tile]});"
    return f"TW_TILE_MULTIPLY({numbers[root.sums]}, {numbers[root.a]}, {numbers[root.b]});"


def memory_of(root: TileLoad | TileStore) -> tuple[str, Expr]:
    """The buffer, and the offset of the tile's first row."""
    return (root.source.buffer, root.source.index[0]) if isinstance(root, TileLoad) else (root.buffer, root.offset)


def moving(root: TileLoad | TileStore, numbers: Mapping[str, int], place: str, stride_bytes: int) -> str:
    """The line of a load or store at that address."""
    return f"TW_TILE_{'LOAD' if isinstance(root, TileLoad) else 'STORE'}({numbers[root.tile]}, {place}, {stride_bytes});"
