"""Functions that generated code calls: flooring integer division, NaN-propagating extrema, and single-precision mathematics.

C has its own single-precision mathematics here: branch-free, so that gcc vectorises a loop (or a vector's lanes) that calls it. The coefficients are
minimax fits made for this file (Lawson's iteration in 40-digit arithmetic; those of erf, a rational function, then varied by units in the last place
to lower the error in single precision); errors are a few units in the last place, and infinities, NaN and
subnormal numbers give the same results as in the C library. The argument reductions are the usual ones: e^x = 2^n e^r with |r| <= ln(2)/2, log x = e
ln 2 + log m with m in [sqrt(1/2), sqrt(2)), sine and cosine of x - n pi/2 (in double precision: |x| up to about 10^9). Compiler flags must not allow
re-association or assume finite numbers (`-O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast` are safe).

CUDA C++ uses the compiler's built-in functions.

A helper is named `tw_OPERATION_TYPE`, in C with `xLANES` for vectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, log10
from types import MappingProxyType

import numpy as np

from tilewright.ir.dtypes import COMPUTED, ELEMENT_TYPES, is_float, size_of
from tilewright.ir.scalar import NEAREST_TF32, REINTERPRETED


@dataclass(frozen=True)
class Helper:
    """Source text of one function, and the names of the helpers that it calls."""

    text: str
    needs: tuple[str, ...] = ()


C_TYPES: Mapping[str, str] = MappingProxyType({name: element.c for name, element in ELEMENT_TYPES.items()})
CUDA_TYPES: Mapping[str, str] = MappingProxyType({name: element.cuda for name, element in ELEMENT_TYPES.items()})
# operation -> the C library's function for double; for other types the type's suffix is appended
LIBRARY: Mapping[str, str] = MappingProxyType(
    {
        **{op: op for op in "pow atan2 sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh erf floor ceil trunc".split()},
        **{op: op for op in "asinh acosh atanh fmod asin acos atan".split()},
        "round": "rint",
        "abs": "fabs",
    }
)


def _unsigned(dtype: str) -> str:
    return {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}[size_of(dtype)]


def _greatest(dtype: str) -> str:
    """The largest finite number, with enough digits to distinguish it from its neighbours."""
    limits = np.finfo(ELEMENT_TYPES[dtype].numpy)
    return f"{float(limits.max):.{ceil((limits.nmant + 1) * log10(2))}e}"


def _extremum(operation: str, dtype: str, t: str) -> str:
    relation = ">" if operation == "max" else "<"
    if not is_float(dtype):
        return f"{{ return a {relation} b ? a : b; }}"
    return f"""{{
    const {t} m = a {relation} b ? a : b;  // b where either is NaN
    return a != a ? a : m;
}}"""


_UNSIGNED = {
    "sign": "{one} {{ return a != 0; }}",
    "abs": "{one} {{ return a; }}",
    "floordiv": "{two} {{ return ({t})(a / b); }}",
    "mod": "{two} {{ return ({t})(a % b); }}",
    "shift_left": "{two} {{ return b < {width} ? ({t})(a << b) : 0; }}",
    "shift_right": "{two} {{ return b < {width} ? ({t})(a >> b) : 0; }}",
    "pow": """{two} {{
    {t} result = 1;
    for (; b > 0; b = ({t})(b / 2)) {{
        if (b % 2 != 0)
            result = ({t})(result * a);
        a = ({t})(a * a);
    }}
    return result;
}}""",
}


TOTAL_DIVISIONS: frozenset[str] = frozenset({"total_div", "total_floordiv", "total_mod", "total_truncdiv", "total_fmod"})
"""Integer divisions defined for any divisor: quotient and remainder by 0 are 0, and the lowest integer divided by -1 is itself. Otherwise equal to
the operations without `total_`."""


def _total_division(operation: str, dtype: str, two: str, t: str) -> Helper:
    symbol = {"div": "/", "truncdiv": "/", "fmod": "%"}.get(operation)
    plain = f"({t})(a {symbol} b)" if symbol else f"tw_{operation}_{dtype}(a, b)"
    negative = f"b == -1 ? {'0' if operation in ('mod', 'fmod') else f'({t})(0 - ({_unsigned(dtype)})a)'} : " if ELEMENT_TYPES[dtype].lowest else ""
    return Helper(f"{two} {{ return b == 0 ? 0 : {negative}{plain}; }}", () if symbol else (f"tw_{operation}_{dtype}",))


_TYPED = re.compile(rf"tw_(\w+?)_({'|'.join(sorted(COMPUTED))})")


def typed_helper(name: str, types: Mapping[str, str], qualifier: str) -> Helper | None:
    """The helper of a function that exists for several element types; None if `name` is not one."""
    match = _TYPED.fullmatch(name)
    if match is None:
        return None
    operation, dtype = match.groups()
    t = types[dtype]
    f = ELEMENT_TYPES[dtype].suffix
    one = f"{qualifier} {t} {name}({t} a)"
    two = f"{qualifier} {t} {name}({t} a, {t} b)"
    if not is_float(dtype) and not ELEMENT_TYPES[dtype].lowest and operation in _UNSIGNED:
        return Helper(_UNSIGNED[operation].format(one=one, two=two, t=t, width=8 * size_of(dtype)))
    if operation in ("min", "max"):
        return Helper(f"{two} {_extremum(operation, dtype, t)}")
    if operation in ("atmost", "atleast"):
        relation = "<" if operation == "atmost" else ">"
        return Helper(f"// a is bounded by b, which is not NaN\n{two} {{ return b {relation} a ? b : a; }}")
    if operation == "sign":
        return Helper(f"{one} {{ return ({t})((a > 0) - (a < 0)); }}")
    if operation == "abs" and not is_float(dtype):
        return Helper(f"{one} {{ return ({t})(a < 0 ? -a : a); }}")
    if operation == "reinterpret" and dtype in REINTERPRETED:
        other = types[REINTERPRETED[dtype]]
        return Helper(f"{qualifier} {other} {name}({t} a) {{ return ((union {{ {t} a; {other} b; }}){{a}}).b; }}")
    if operation == "rsqrt":
        return Helper(f"{one} {{ return 1 / sqrt{f}(a); }}")
    if operation == NEAREST_TF32 and dtype == "f64":
        return Helper(f"{one} {{ return a; }}")
    if operation == "isnan":
        return Helper(f"{qualifier} int {name}({t} a) {{ return a != a; }}")
    if operation == "isinf":
        infinite = f"fabs{f}(a) > {_greatest(dtype)}{f}" if is_float(dtype) else "0"
        return Helper(f"{qualifier} int {name}({t} a) {{ return {infinite}; }}")
    if operation == "floordiv" and is_float(dtype):
        return Helper(
            f"""{two} {{
    if (b == 0)
        return a / b;
    const {t} remainder = fmod{f}(a, b);
    {t} quotient = (a - remainder) / b;
    if (remainder != 0 && (b < 0) != (remainder < 0))
        quotient -= 1;
    const {t} whole = floor{f}(quotient);
    return quotient - whole > ({t})0.5 ? whole + 1 : whole;
}}"""
        )
    if operation == "mod" and is_float(dtype):
        return Helper(
            f"""{two} {{
    const {t} remainder = fmod{f}(a, b);
    return remainder != 0 && (b < 0) != (remainder < 0) ? remainder + b : remainder;
}}"""
        )
    if operation == "truncdiv" and is_float(dtype):
        return Helper(f"{two} {{ return trunc{f}(a / b); }}")
    if operation in TOTAL_DIVISIONS:
        return _total_division(operation.removeprefix("total_"), dtype, two, t)
    if operation == "floordiv":
        return Helper(f"{two} {{ return ({t})(a / b - ((a % b != 0) & ((a < 0) != (b < 0)))); }}")
    if operation == "mod":
        return Helper(
            f"""{two} {{
    const {t} remainder = ({t})(a % b);
    return ({t})(remainder + ((remainder != 0) & ((remainder < 0) != (b < 0)) ? b : 0));
}}"""
        )
    if operation == "pow" and not is_float(dtype):
        return Helper(
            f"""{two} {{
    if (b < 0)
        return a == 1 ? 1 : a == ({t})-1 ? ({t})(b % 2 != 0 ? -1 : 1) : 0;
    {_unsigned(dtype)} result = 1, base = ({_unsigned(dtype)})a;
    for (; b > 0; b = ({t})(b / 2)) {{
        if (b % 2 != 0)
            result *= base;
        base *= base;
    }}
    return ({t})result;
}}"""
        )
    width = 8 * size_of(dtype)
    if operation == "shift_left":
        return Helper(f"{two} {{ return b >= 0 && b < {width} ? ({t})(({_unsigned(dtype)})a << b) : 0; }}")
    if operation == "shift_right":
        return Helper(f"{two} {{ return ({t})(a >> (b >= 0 && b < {width} ? b : {width - 1}));  }}".replace(";  }", "; }"))
    return None


# --- single precision in C --------------------------------------------------------------------------------------------

_C = "static inline float "
_BITS = Helper(
    """typedef union {
    float f;
    int32_t i;
} tw_word;
static inline int32_t tw_bits(float x) { return ((tw_word){.f = x}).i; }
static inline float tw_from_bits(int32_t i) { return ((tw_word){.i = i}).f; }
// Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
#define TW_ROUNDER 12582912.0f"""
)
_EXP_OF_REST = """\
    const TYPE r = (x - n * 0.693145752f) - n * 1.42860677e-06f;
    TYPE p = r * 0.00019913707f + 0.0013941117f;
    p = p * r + 0.008333274f;
    p = p * r + 0.041666355f;
    p = p * r + 0.16666667f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
"""
_LOG_MANTISSA = Helper(
    """// x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); returns f
static inline float tw_split(float x, float *e) {
    const int tiny = x < 1.17549435e-38f;
    const int32_t i = tw_bits(tiny ? x * 8388608.0f : x) - 0x3f3504f3;
    *e = (float)((i >> 23) - (tiny ? 23 : 0));
    return tw_from_bits((i & 0x7fffff) + 0x3f3504f3) - 1.0f;
}
// log(1 + f) - f
static inline float tw_log_rest(float f) {
    float p = 0.069155954f;
    p = p * f - 0.11794092f;
    p = p * f + 0.11875076f;
    p = p * f - 0.123838f;
    p = p * f + 0.14218326f;
    p = p * f - 0.1666927f;
    p = p * f + 0.20002243f;
    p = p * f - 0.24999987f;
    p = p * f + 0.3333331f;
    return f * f * (p * f - 0.5f);
}
static inline float tw_log_edges(float x, float y) {
    y = x > 3.40282347e+38f ? x : y;
    y = x == 0.0f ? -INFINITY : y;
    return x >= 0.0f ? y : NAN;
}""",
    ("tw_bits",),
)
_TRIGONOMETRIC = Helper(
    """// sin(x + quarter * pi/2)
static inline float tw_sine(float x, int32_t quarter) {
    const double turns = (double)x * 0.63661977236758134308 + 6755399441055744.0;  // rounds, as TW_ROUNDER does
    union {
        double f;
        int64_t i;
    } word = {.f = turns};
    const int32_t q = (int32_t)word.i + quarter;
    const double n = turns - 6755399441055744.0;
    const float r = (float)((double)x - n * 1.57079632679489655800 - n * 6.12323399573676603587e-17);
    const float s = r * r;
    float odd = 2.7181218e-06f;
    odd = odd * s - 0.00019839316f;
    odd = odd * s + 0.008333329f;
    odd = odd * s - 0.16666667f;
    odd = odd * s * r + r;
    float even = -2.7208475e-07f;
    even = even * s + 2.47995e-05f;
    even = even * s - 0.0013888883f;
    even = even * s + 0.041666668f;
    even = even * s * s - 0.5f * s + 1.0f;
    const float y = q & 1 ? even : odd;
    return q & 2 ? -y : y;
}""",
)

_LOG_OF_NORMAL = (-0.00037655741, 0.0063452013, -0.049891796, -0.46199611, -1.1501132, -1.0000559)


def narrow_functions(qualifier: str, power: str, reciprocal: str) -> dict[str, Helper]:
    """GELU and the sigmoid for results that are rounded to 16 bits, by a function that computes powers of two and the text of a reciprocal.

    GELU is x/2 + |x| (1/2 - F), where F is the normal distribution at -|x|, and log2 F a polynomial of degree 5: the minimax fit for errors relative
    to the larger of |x| F and 10^-3, 3.9e-5. Infinities and NaN give what PyTorch's formula gives."""
    first, *rest = (f"{coefficient:.8g}f" for coefficient in _LOG_OF_NORMAL)
    steps = "\n".join(f"    p = p * t {'-' if c.startswith('-') else '+'} {c.removeprefix('-')};" for c in rest)
    gelu = f"""{qualifier} float tw_narrow_gelu_f32(float x) {{
    const float t = fabsf(x);
    float p = {first};
{steps}
    return fmaf(t, 0.5f - {power}(p), 0.5f * x);
}}"""
    sigmoid = f"{qualifier} float tw_narrow_sigmoid_f32(float x) {{ return {reciprocal.format(f'1.0f + {power}(x * -1.44269504f)')}; }}"
    needs = (power, *re.findall(r"tw_\w+", reciprocal))
    return {"tw_narrow_gelu_f32": Helper(gelu, (power,)), "tw_narrow_sigmoid_f32": Helper(sigmoid, needs)}


SINGLE_PRECISION: Mapping[str, Helper] = MappingProxyType(
    {
        **narrow_functions(_C.strip().removesuffix(" float"), "tw_exp2_f32", "1.0f / ({})"),
        "tw_bits": _BITS,
        "tw_nearest_tf32_f32": Helper(
            f"{_C}tw_nearest_tf32_f32(float x) {{ return x == x ? tw_from_bits((tw_bits(x) + 0x1000) & ~0x1fff) : x; }}", ("tw_bits",)
        ),
        "tw_split": _LOG_MANTISSA,
        "tw_sine": _TRIGONOMETRIC,
        "tw_exp_f32": Helper(
            f"""{_C}tw_exp_f32(float x) {{
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const float t = x * 1.44269504f + TW_ROUNDER;
    const float n = t - TW_ROUNDER;
{_EXP_OF_REST.replace("TYPE", "float")}\
    const int32_t e = tw_bits(t) - 0x4b400000, half = e >> 1;  // 2^e as two factors: e may leave the range of normal numbers
    return p * tw_from_bits((half + 127) << 23) * tw_from_bits((e - half + 127) << 23);
}}""",
            ("tw_bits",),
        ),
        "tw_exp2_f32": Helper(
            _C
            + """tw_exp2_f32(float x) {
    x = x > 129.0f ? 129.0f : x;
    x = x < -151.0f ? -151.0f : x;
    const float t = x + TW_ROUNDER;
    const float r = x - (t - TW_ROUNDER);
    float p = 0.00015476192f;
    p = p * r + 0.001340055f;
    p = p * r + 0.009618005f;
    p = p * r + 0.05550327f;
    p = p * r + 0.2402265f;
    p = p * r + 0.6931472f;
    p = p * r + 1.0f;
    const int32_t e = tw_bits(t) - 0x4b400000, half = e >> 1;
    return p * tw_from_bits((half + 127) << 23) * tw_from_bits((e - half + 127) << 23);
}""",
            ("tw_bits",),
        ),
        "tw_expm1_f32": Helper(
            _C
            + """tw_expm1_f32(float x) {
    const float input = x;
    x = x > 89.0f ? 89.0f : x;
    x = x < -20.0f ? -20.0f : x;
    const float t = x * 1.44269504f + TW_ROUNDER;
    const float n = t - TW_ROUNDER;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-06f;
    float p = 0.00019913707f;
    p = p * r + 0.0013941117f;
    p = p * r + 0.008333274f;
    p = p * r + 0.041666355f;
    p = p * r + 0.16666667f;
    p = p * r + 0.5f;
    p = p * r * r + r;
    const float scale = tw_from_bits((tw_bits(t) - 0x4b400000 + 126) << 23);  // 2^(n - 1)
    const float y = (p * scale + (scale - 0.5f)) * 2.0f;
    return n == 0.0f ? (input == 0.0f ? input : p) : y;
}""",
            ("tw_bits",),
        ),
        "tw_log_f32": Helper(
            _C
            + """tw_log_f32(float x) {
    float e;
    const float f = tw_split(x, &e);
    return tw_log_edges(x, e * 0.693145752f + (f + (tw_log_rest(f) + e * 1.42860677e-06f)));
}""",
            ("tw_split",),
        ),
        "tw_log2_f32": Helper(
            _C
            + """tw_log2_f32(float x) {
    float e;
    const float f = tw_split(x, &e);
    const float rest = tw_log_rest(f);
    return tw_log_edges(x, e + (f * 1.44269502f + (rest * 1.44269502f + (f + rest) * 1.92596299e-08f)));
}""",
            ("tw_split",),
        ),
        "tw_log10_f32": Helper(
            _C
            + """tw_log10_f32(float x) {
    float e;
    const float f = tw_split(x, &e);
    const float rest = tw_log_rest(f);
    const float low = rest * 0.434294492f + (f + rest) * -1.01004e-08f + e * 7.90341e-07f;
    return tw_log_edges(x, e * 0.301029205f + (f * 0.434294492f + low));
}""",
            ("tw_split",),
        ),
        "tw_log1p_f32": Helper(
            _C
            + """tw_log1p_f32(float x) {
    const float u = 1.0f + x;
    const float correction = (x - (u - 1.0f)) / u;  // what rounding took from u
    const float y = tw_log_f32(u);
    return u > 0.0f && u <= 3.40282347e+38f ? (u == 1.0f ? x : y + correction) : y;
}""",
            ("tw_log_f32",),
        ),
        "tw_tanh_f32": Helper(
            _C
            + """tw_tanh_f32(float x) {
    const float s = x * x;
    float p = 0.0021227426f;
    p = p * s - 0.008156276f;
    p = p * s + 0.021692606f;
    p = p * s - 0.053945377f;
    p = p * s + 0.13333195f;
    p = p * s - 0.3333333f;
    const float near = p * s * x + x;
    const float far = copysignf(1.0f - 2.0f / (tw_exp_f32(2.0f * fabsf(x)) + 1.0f), x);
    return fabsf(x) < 0.625f ? near : far;
}""",
            ("tw_exp_f32",),
        ),
        "tw_erf_f32": Helper(
            _C
            + """tw_erf_f32(float x) {
    const float t = fabsf(x), s = x * x;
    float p = 2.02585079e-06f;
    p = p * s + 0.000284666981f;
    p = p * s + 0.0038076858f;
    p = p * s + 0.0528739318f;
    p = p * s + 0.191540584f;
    p = p * s + 1.12837911f;
    float q = 3.78301156e-05f;
    q = q * s + 0.00117059203f;
    q = q * s + 0.0150541374f;
    q = q * s + 0.114555404f;
    q = q * s + 0.503081143f;
    q = q * s + 1.0f;
    const float y = t * p / q;
    return copysignf((t > 3.92f) | (y > 1.0f) ? 1.0f : y, x);
}"""
        ),
        "tw_sin_f32": Helper(_C + "tw_sin_f32(float x) { return tw_sine(x, 0); }", ("tw_sine",)),
        "tw_cos_f32": Helper(_C + "tw_cos_f32(float x) { return tw_sine(x, 1); }", ("tw_sine",)),
    }
)


def _exp_of_lanes(lanes: int) -> str:
    """`tw_exp_f32` in operations on whole vectors: gcc unrolls loops over few lanes before it vectorises them, and leaves branches in them."""
    return f"""\
    typedef int32_t words __attribute__((vector_size({4 * lanes})));
    f32x{lanes} x;
    for (int i = 0; i < {lanes}; ++i)
        x[i] = a[i] > 89.0f ? 89.0f : a[i];
    for (int i = 0; i < {lanes}; ++i)
        x[i] = x[i] < -104.0f ? -104.0f : x[i];
    const f32x{lanes} t = x * 1.44269504f + TW_ROUNDER, n = t - TW_ROUNDER;
{_EXP_OF_REST.replace("TYPE", f"f32x{lanes}")}\
    const words e = (words)t - 0x4b400000, half = e >> 1;
    result = p * (f32x{lanes})((half + 127) << 23) * (f32x{lanes})((e - half + 127) << 23);
"""


VECTOR_FUNCTIONS: Mapping[tuple[str, int], tuple[str, str]] = MappingProxyType(
    {
        **{("tw_exp_f32", lanes): ("__GNUC__", _exp_of_lanes(lanes)) for lanes in (4, 8)},
        ("tw_exp_f32", 16): (
            "__AVX512F__",
            f"""\
    const f32x16 most = (f32x16){{0}} + 89.0f, least = (f32x16){{0}} - 104.0f;
    f32x16 x;
    __asm__("vminps %1, %2, %0" : "=v"(x) : "v"(a), "v"(most));  // of NaN the second source, which is written first
    __asm__("vmaxps %1, %2, %0" : "=v"(x) : "v"(x), "v"(least));
    const f32x16 n = (x * 1.44269504f + TW_ROUNDER) - TW_ROUNDER;
{_EXP_OF_REST.replace("TYPE", "f32x16")}\
    __asm__("vscalefps %1, %2, %0" : "=v"(result) : "v"(n), "v"(p));  // p 2^n, rounded once
""",
        ),
    }
)
"""By function and lanes: the macro that a compiler defines if the target has instructions for it, and the text that then computes `result` from
`a`: the same numbers as the function applied to each lane."""


def ordered(names: Iterable[str], find: Mapping[str, Helper]) -> list[str]:
    """Texts of the helpers and of the helpers that they call, callees first."""
    done: dict[str, str] = {}

    def visit(name: str) -> None:
        if name not in done:
            for callee in find[name].needs:
                visit(callee)
            done[name] = find[name].text

    for name in names:
        visit(name)
    return list(done.values())


@dataclass(frozen=True)
class HelperTable(Mapping[str, Helper]):
    """Every helper that code of one language may call, by name: its `own`, and the typed ones, which are built on request. Iteration covers only its
    own."""

    own: Mapping[str, Helper]
    types: Mapping[str, str]
    qualifier: str

    def with_own(self, more: Mapping[str, Helper]) -> HelperTable:
        """The table extended by more helpers of its own."""
        return HelperTable({**self.own, **more}, self.types, self.qualifier) if more else self

    def __getitem__(self, name: str) -> Helper:
        if name in self.own:
            return self.own[name]
        found = typed_helper(name, self.types, self.qualifier)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)
