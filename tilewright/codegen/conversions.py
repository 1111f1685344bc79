"""Conversions between the narrow floats that kernels store and the type that they compute in, as text: in C for scalars and vectors, and in CUDA C++.

A 16-bit float is represented by its bits (`uint16_t`, `unsigned short`). `tw_f32_of_T` widens exactly; `tw_T_of_f32` rounds to nearest, ties to even.
NaN and infinities are preserved, and values that are too large become infinite.

Subnormal numbers are kept. Vectors are converted by F16C, AVX-512 and AVX512_BF16 if the target has them. Everything else is arithmetic without
branches, which compilers vectorise in loops: an instruction in inline assembly would keep them from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from tilewright.codegen.helpers import Helper
from tilewright.ir.dtypes import ELEMENT_TYPES


def bits_of(value: float, dtype: str) -> int:
    """The bits of a number rounded to a narrow float; subnormal numbers are kept."""
    element = ELEMENT_TYPES[dtype]
    with np.errstate(over="ignore"):
        if not element.bits:
            return int(np.array(value, element.numpy).view(f"uint{8 * element.bytes}"))
        word = int(np.float32(value).view(np.uint32))
    if dtype != "bf16":
        raise ValueError(f"no rule for the bits of {dtype}")
    return word >> 16 | 0x40 if value != value else (word + 0x7FFF + (word >> 16 & 1)) >> 16


def conversion_name(source: str, target: str, lanes: int) -> str:
    return f"tw_{target}_of_{source}" + (f"x{lanes}" if lanes > 1 else "")


# --- C ----------------------------------------------------------------------------------------------------------------


def c_conversion(source: str, target: str, lanes: int) -> str:
    """The function named by `conversion_name` in C; for `lanes` > 1 it takes vectors of `f32`, `i32` and the 16-bit type."""
    name = conversion_name(source, target, lanes)
    if lanes == 1:
        return _SCALAR[source, target]
    text, last = _VECTOR[source, target]
    if (source, target, lanes) in _INSTRUCTIONS:
        feature, native = _INSTRUCTIONS[source, target, lanes]
        text = f"#ifdef {feature}\n{native}#else\n{text}#endif\n"
    return f"static inline {target}xLANES {name}({source}xLANES a) {{\n{text}{last}}}".replace("LANES", str(lanes))


def c_joined(source: str, target: str, lanes: int) -> str | None:
    """The function named by `conversion_name` for twice as many lanes in C: it takes two vectors. None if each is converted on its own."""
    return _BF16_JOINED if (source, target, lanes) == ("f32", "bf16", 16) else None


_SCALAR: Mapping[tuple[str, str], str] = MappingProxyType({
    ("bf16", "f32"): """\
static inline float tw_f32_of_bf16(uint16_t a) {
    union { uint32_t bits; float value; } u = {(uint32_t)a << 16};
    return u.value;
}""",
    ("f32", "bf16"): """\
static inline uint16_t tw_bf16_of_f32(float a) {
    union { float value; uint32_t bits; } u = {a};
    const uint32_t x = u.bits, rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? x >> 16 | 0x40 : rounded;
}""",
    ("f16", "f32"): """\
static inline float tw_f32_of_f16(uint16_t a) {
    const int32_t rest = (a & 0x7fff) << 13, sign = (int32_t)((uint32_t)(a & 0x8000) << 16);
    union { int32_t bits; float value; } small = {rest + 0x38800000}, u;
    small.value -= 6.103515625e-05f;  // subnormal: 2^-14 was added
    const int32_t wide = rest + (rest >= 0x0f800000 ? 0x70000000 : 0x38000000);  // infinity and NaN, or any other number
    u.bits = (rest < 0x00800000 ? small.bits : wide) | sign;
    return u.value;
}""",
    ("f32", "f16"): """\
static inline uint16_t tw_f16_of_f32(float a) {
    union { float value; int32_t bits; } u = {a}, small;
    const int32_t sign = u.bits >> 16 & 0x8000, x = u.bits & 0x7fffffff;
    small.bits = x;
    small.value += 0.5f;  // below 2^-14: the addition rounds
    const int32_t usual = (x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13;
    const int32_t finite = x < 0x38800000 ? small.bits - 0x3f000000 : usual;
    return sign | (x > 0x7f800000 ? 0x7e00 : x >= 0x47800000 ? 0x7c00 : finite);
}""",
})  # fmt: skip

_VECTOR: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType({
    ("bf16", "f32"): (
        "    const i32xLANES wide = __builtin_convertvector(a, i32xLANES);\n",
        "    return (f32xLANES)(wide << 16);\n",
    ),
    ("f32", "bf16"): ("", """\
    const i32xLANES x = (i32xLANES)a, high = x >> 16, rounded = (x + 0x7fff + (high & 1)) >> 16;
    const i32xLANES special = (x & 0x7fffffff) > 0x7f800000;
    return __builtin_convertvector((special & (high | 0x40)) | (~special & rounded), bf16xLANES);
"""),
    ("f16", "f32"): ("""\
    const i32xLANES x = __builtin_convertvector(a, i32xLANES), rest = (x & 0x7fff) << 13;
    const i32xLANES special = rest >= 0x0f800000, tiny = rest < 0x00800000;
    const i32xLANES wide = rest + 0x38000000 + (special & 0x38000000);
    const i32xLANES small = (i32xLANES)((f32xLANES)(rest + 0x38800000) - 6.103515625e-05f);
    return (f32xLANES)((tiny & small) | (~tiny & wide) | (x & 0x8000) << 16);
""", ""),
    ("f32", "f16"): ("""\
    const i32xLANES sign = (i32xLANES)a >> 16 & 0x8000, x = (i32xLANES)a & 0x7fffffff;
    const i32xLANES large = x >= 0x47800000, nan = x > 0x7f800000, tiny = x < 0x38800000;
    const i32xLANES small = (i32xLANES)((f32xLANES)x + 0.5f) - 0x3f000000;
    const i32xLANES usual = (x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13;
    const i32xLANES rounded = (tiny & small) | (large & (0x7c00 | (nan & 0x200))) | (~(tiny | large) & usual);
    return __builtin_convertvector(sign | rounded, f16xLANES);
""", ""),
})  # fmt: skip
_F16_WIDENED = '    f32xLANES result;\n    __asm__("vcvtph2ps %1, %0" : "=v"(result) : "v"(a));\n    return result;\n'
_F16_ROUNDED = '    f16xLANES result;\n    __asm__("vcvtps2ph $0, %1, %0" : "=v"(result) : "v"(a));\n    return result;\n'
_BF16_ROUNDED = """\
    bf16xLANES result;
    uint16_t subnormal;  // the rounding instruction makes such numbers zero
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(a));
    __asm__("vfpclassps $32, %1, %0" : "=Yk"(subnormal) : "v"(a));
    if (__builtin_expect(subnormal == 0, 1))
        return result;
"""
_BF16_JOINED = """\
static inline bf16x32 tw_bf16_of_f32x32(f32x16 a, f32x16 b) {
#ifdef __AVX512BF16__
    bf16x32 result;
    uint16_t first, second;  // subnormal numbers: one test for both halves
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(result) : "v"(a), "v"(b));
    __asm__("vfpclassps $32, %1, %0" : "=Yk"(first) : "v"(a));
    __asm__("vfpclassps $32, %1, %0" : "=Yk"(second) : "v"(b));
    if (__builtin_expect((first | second) == 0, 1))
        return result;
#endif
    return tw_join_bf16x32(tw_bf16_of_f32x16(a), tw_bf16_of_f32x16(b));
}"""
_INSTRUCTIONS: Mapping[tuple[str, str, int], tuple[str, str]] = MappingProxyType({
    ("bf16", "f32", 16): ("__AVX512F__", '    i32xLANES wide;\n    __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(a));\n'),
    ("f32", "bf16", 16): ("__AVX512BF16__", _BF16_ROUNDED),
    **{("f16", "f32", lanes): ("__F16C__", _F16_WIDENED) for lanes in (4, 8)},
    **{("f32", "f16", lanes): ("__F16C__", _F16_ROUNDED) for lanes in (4, 8)},
    ("f16", "f32", 16): ("__AVX512F__", _F16_WIDENED),
    ("f32", "f16", 16): ("__AVX512F__", _F16_ROUNDED),
})  # fmt: skip
"""By types and lanes: the macro that a compiler defines if the target has the instruction, and the text that then replaces the first part of
`_VECTOR`; the last part follows either. gcc 12 would split a widening of 16 bfloat16 into two halves."""


# --- CUDA C++ ---------------------------------------------------------------------------------------------------------

_QUALIFIER = "static __device__ __forceinline__"
_CUDA_SCALAR: Mapping[tuple[str, str], str] = MappingProxyType({
    ("bf16", "f32"): f"""\
{_QUALIFIER} float tw_f32_of_bf16(unsigned short a) {{ return __uint_as_float((unsigned)a << 16); }}""",
    ("f32", "bf16"): f"""\
{_QUALIFIER} unsigned short tw_bf16_of_f32(float a) {{
#if __CUDA_ARCH__ >= 800
    unsigned short result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(a));
    return result;
#else
    const unsigned x = __float_as_uint(a);
    return (x & 0x7fffffff) > 0x7f800000 ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
#endif
}}""",
    ("f16", "f32"): f"""\
{_QUALIFIER} float tw_f32_of_f16(unsigned short a) {{
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(a));
    return result;
}}""",
    ("f32", "f16"): f"""\
{_QUALIFIER} unsigned short tw_f16_of_f32(float a) {{
    unsigned short result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(a));
    return result;
}}""",
})  # fmt: skip


_CUDA_PAIR: Mapping[tuple[str, str], str] = MappingProxyType({
    ("bf16", "f32"): f"""\
{_QUALIFIER} void tw_f32_of_bf16_pair(unsigned a, float &low, float &high) {{
    low = __uint_as_float(a << 16);
    high = __uint_as_float(a & 0xffff0000);
}}""",
    ("f16", "f32"): f"""\
{_QUALIFIER} void tw_f32_of_f16_pair(unsigned a, float &low, float &high) {{
    asm("{{ .reg .b16 l, h; mov.b32 {{l, h}}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }}" : "=f"(low), "=f"(high) : "r"(a));
}}""",
    **{("f32", target): f"""\
{_QUALIFIER} unsigned tw_{target}_of_f32_pair(float low, float high) {{
#if __CUDA_ARCH__ >= 800
    unsigned result;
    asm("cvt.rn.{target}x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
#else
    return (unsigned)tw_{target}_of_f32(low) | (unsigned)tw_{target}_of_f32(high) << 16;
#endif
}}""" for target in ("f16", "bf16")},
})  # fmt: skip
_CUDA_EIGHT: Mapping[bool, str] = MappingProxyType(
    {
        True: f"""\
{_QUALIFIER} float8 NAME(uint4 a) {{
    float8 r;
    PAIR(a.x, r.x, r.y), PAIR(a.y, r.z, r.w), PAIR(a.z, r.a, r.b), PAIR(a.w, r.c, r.d);
    return r;
}}""",
        False: f"""\
{_QUALIFIER} uint4 NAME(float8 a) {{
    return make_uint4(PAIR(a.x, a.y), PAIR(a.z, a.w), PAIR(a.a, a.b), PAIR(a.c, a.d));
}}""",
    }
)
"""Conversions of eight elements, by whether they widen; eight 16-bit elements are 16 bytes, the widest access of memory."""


def _cuda_conversion(source: str, target: str, lanes: int) -> Helper:
    if lanes == 1:
        return Helper(_CUDA_SCALAR[source, target])
    if lanes == 8:
        pair = conversion_name(source, target, 1) + "_pair"
        return Helper(_CUDA_EIGHT[target == "f32"].replace("NAME", conversion_name(source, target, 8)).replace("PAIR", pair), ("float8", pair))
    wanted, given = (f"{ELEMENT_TYPES[dtype].cuda_vector}{lanes}" for dtype in (target, source))
    scalar, name = conversion_name(source, target, 1), conversion_name(source, target, lanes)
    parts = ", ".join(f"{scalar}(a.{component})" for component in "xyzw"[:lanes])
    return Helper(f"{_QUALIFIER} {wanted} {name}({given} a) {{ return make_{wanted}({parts}); }}", (scalar,))


CUDA_CONVERSIONS: Mapping[str, Helper] = MappingProxyType(
    {conversion_name(*pair, lanes): _cuda_conversion(*pair, lanes) for pair in _CUDA_SCALAR for lanes in (1, 2, 4, 8)}
    | {f"{conversion_name(*pair, 1)}_pair": Helper(text, (conversion_name(*pair, 1),)) for pair, text in _CUDA_PAIR.items()}
)
