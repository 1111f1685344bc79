"""Element types: their names, widths and relation to PyTorch, NumPy, C and CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class ElementType:
    """One element type; `name` is what every IR type stores (`"f32"`), `c` its spelling in C and CUDA C++."""

    name: str
    c: str
    bytes: int
    kind: str  # "float", "int", "bool"
    torch: str
    numpy: str


_ALL = (
    ElementType("f64", "double", 8, "float", "float64", "float64"),
    ElementType("f32", "float", 4, "float", "float32", "float32"),
    ElementType("f16", "_Float16", 2, "float", "float16", "float16"),
    ElementType("bf16", "__bf16", 2, "float", "bfloat16", "bfloat16"),
    ElementType("i64", "int64_t", 8, "int", "int64", "int64"),
    ElementType("i32", "int32_t", 4, "int", "int32", "int32"),
    ElementType("i16", "int16_t", 2, "int", "int16", "int16"),
    ElementType("i8", "int8_t", 1, "int", "int8", "int8"),
    ElementType("u8", "uint8_t", 1, "int", "uint8", "uint8"),
    ElementType("bool", "uint8_t", 1, "bool", "bool", "bool"),
)
ELEMENT_TYPES: Mapping[str, ElementType] = MappingProxyType({t.name: t for t in _ALL})
BY_TORCH_NAME: Mapping[str, str] = MappingProxyType({t.torch: t.name for t in _ALL})

NARROW_FLOATS = frozenset({"f16", "bf16"})
"""What kernels store and move, and compute with as float32: a load or cast widens, a store or cast rounds."""

# What generated kernels compute with; operators on float16 and bfloat16 tensors run through PyTorch.
COMPUTED = frozenset({"f64", "f32", "i64", "i32", "i16", "i8", "u8", "bool"})


def is_float(dtype: str) -> bool:
    return ELEMENT_TYPES[dtype].kind == "float"


def size_of(dtype: str) -> int:
    """Bytes of one element."""
    return ELEMENT_TYPES[dtype].bytes


def of_torch(dtype: object) -> str:
    """The name of a `torch.dtype`; raises KeyError for one that has none (complex, quantised)."""
    return BY_TORCH_NAME[str(dtype).removeprefix("torch.")]
