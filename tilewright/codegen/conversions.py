"""C text of conversions between float32 and stored bfloat16, as vectors too.

Rounding is to the nearest bfloat16, to the even one of two; NaN stays NaN (and becomes quiet), and subnormal numbers become zero, as of the
instruction that does it where there is AVX512_BF16, and as of the products of tiles, which take them for zero.
"""

from __future__ import annotations

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
