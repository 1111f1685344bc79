"""Numbers for tests of instructions: in the interpreter's representation of a type, and as factors read them."""

from __future__ import annotations

import numpy as np


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to the type, in the interpreter's representation."""
    if dtype == "bf16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(values, np.float16 if dtype == "f16" else np.float32)


def integers(shape: tuple[int, ...], largest: int, seed: int) -> np.ndarray:
    """Random multiples of 1/8."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape) / 8.0


def as_factor(held: np.ndarray, kind: str) -> np.ndarray:
    if kind == "tf32":  # 19 bits are read
        held = (held.view(np.uint32) >> 13 << 13).view(np.float32)
    if kind == "bf16":
        held = (held.astype(np.uint32) << 16).view(np.float32)
    return held.astype(np.float64)


def assert_bits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
