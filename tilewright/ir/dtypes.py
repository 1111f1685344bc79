"""Element types: one table of their names in PyTorch, NumPy, C and CUDA C++, their sizes and their limits.

Adding a type means adding an entry. Kernels store narrow floats but compute with a wider type; `codegen.conversions` has the functions that widen and
round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import copysign, inf
from types import MappingProxyType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ElementType:
    """One element type; `name` is what every IR type stores (`"f32"`).

    kind: "float", "int", "bool" or "complex".
    torch: its name in PyTorch and NumPy.
    c, cuda: type of a stored element in C and in CUDA C++; for a narrow float, the type that holds its bits.
    cuda_vector: name of the built-in vector types of CUDA C++, without the number of lanes.
    suffix: suffix of literals and of C library functions.
    computed: the type that kernels compute with, if different: loads and casts widen to it, stores and casts round from it.
    bits: NumPy type of arrays that hold its bits, if NumPy has no such type.
    tolerance: largest error of a stored value, as a fraction of the value's largest magnitude; 0 means exact.
    lowest, highest: range of an integer type."""

    name: str
    kind: str
    bytes: int
    torch: str
    c: str
    cuda: str
    cuda_vector: str
    suffix: str = ""
    computed: str = ""
    bits: str = ""
    tolerance: float = 0.0
    lowest: int = 0
    highest: int = 0

    @property
    def numpy(self) -> str:
        """Its name in NumPy, which may be one that NumPy does not implement."""
        return self.torch

    @property
    def array(self) -> str:
        """NumPy type of arrays that hold its elements or their bits."""
        return self.bits or self.torch

    @property
    def is_narrow(self) -> bool:
        return self.computed != ""


def _integer(name: str, torch: str, cuda: str, cuda_vector: str) -> ElementType:
    signed, bits = name[0] == "i", int(name[1:])
    lowest, highest = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return ElementType(name, "int", bits // 8, torch, f"{torch}_t", cuda, cuda_vector, lowest=lowest, highest=highest)


FLOAT32_OVERFLOW = (2.0 - 2.0**-24) * 2.0**127
"""The least number that float32 rounds to infinity: half a unit in the last place above its largest one."""
FLOAT32 = "f32"
"""Named where a feature exists only for this type: the generated mathematical functions, atomic additions, tile products."""
DEFAULT_FLOAT = FLOAT32
"""PyTorch's default: the type of floating-point results of integers, and of constants without a type."""

_ALL = (
    ElementType("f64", "float", 8, "float64", "double", "double", "double", tolerance=1e-10),
    ElementType("f32", "float", 4, "float32", "float", "float", "float", "f", tolerance=1e-4),
    ElementType("f16", "float", 2, "float16", "uint16_t", "unsigned short", "ushort", computed="f32", tolerance=1e-2),
    ElementType("bf16", "float", 2, "bfloat16", "uint16_t", "unsigned short", "ushort", computed="f32", bits="uint16", tolerance=5e-2),
    _integer("i64", "int64", "long long", "longlong"),
    _integer("i32", "int32", "int", "int"),
    _integer("i16", "int16", "short", "short"),
    _integer("i8", "int8", "signed char", "char"),
    _integer("u64", "uint64", "unsigned long long", "ulonglong"),
    _integer("u32", "uint32", "unsigned int", "uint"),
    _integer("u16", "uint16", "unsigned short", "ushort"),
    _integer("u8", "uint8", "unsigned char", "uchar"),
    ElementType("c128", "complex", 16, "complex128", "double _Complex", "double2", "", tolerance=1e-10),
    ElementType("c64", "complex", 8, "complex64", "float _Complex", "float2", "", tolerance=1e-4),
    ElementType("bool", "bool", 1, "bool", "uint8_t", "unsigned char", "uchar", highest=1),
)
ELEMENT_TYPES: Mapping[str, ElementType] = MappingProxyType({t.name: t for t in _ALL})
BY_TORCH_NAME: Mapping[str, str] = MappingProxyType({t.torch: t.name for t in _ALL})

NARROW_FLOATS = frozenset(t.name for t in _ALL if t.is_narrow)
"""Types that kernels store and move, but compute with as a wider type."""

COMPLEX = frozenset(t.name for t in _ALL if t.kind == "complex")
"""Types of which kernels know only the size."""

COMPUTED = frozenset(t.name for t in _ALL) - COMPLEX
"""Types of tensors on which kernels compute; operators on others run through PyTorch."""


def is_float(dtype: str) -> bool:
    return ELEMENT_TYPES[dtype].kind == "float"


def size_of(dtype: str) -> int:
    """Bytes of one element."""
    return ELEMENT_TYPES[dtype].bytes


def computed_in(dtype: str) -> str:
    """The type that kernels compute with for values of this type."""
    return ELEMENT_TYPES[dtype].computed or dtype


def of_torch(dtype: object) -> str:
    """The name of a `torch.dtype`; raises KeyError for one that has none (quantised)."""
    return BY_TORCH_NAME[str(dtype).removeprefix("torch.")]


def within_float32(value: float) -> float:
    """A number as PyTorch's arithmetic on float32 takes it: infinite beyond the range of float32."""
    return copysign(inf, value) if abs(value) >= FLOAT32_OVERFLOW else value


def nearest_tf32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float32 values rounded to 10 bits of mantissa; ties away from zero, as `cvt.rna.tf32`."""
    bits = (values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), values, bits.view(np.float32))
