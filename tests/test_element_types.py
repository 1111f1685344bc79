"""Element types: their names in PyTorch, NumPy, C and CUDA C++, and their properties in every stage, come from one table."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewright
from tilewright.codegen.c import print_c
from tilewright.codegen.conversions import CUDA_CONVERSIONS, bits_of, c_conversion, conversion_name
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.helpers import C_TYPES, CUDA_TYPES
from tilewright.codegen.interpreter import run
from tilewright.hardware import machine
from tilewright.ir.computation import highest, lowest
from tilewright.ir.dtypes import COMPUTED, ELEMENT_TYPES, NARROW_FLOATS, ElementType, computed_in, is_float, of_torch, size_of
from tilewright.ir.expr import Const, Load, Var, index_const
from tilewright.ir.kernel import Buffer, For, Kernel, Launch, Store, thread_variable
from tilewright.kernels.gpu.gemm.bound import contraction_bound
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.space import ContractionFacts, ContractionSchedule, Operand, shared_bytes_of
from tilewright.runtime.verify import TOLERANCES

PACKAGE = Path(tilewright.__file__).parent
H200 = machine("h200")
EVERY = pytest.mark.parametrize("element", ELEMENT_TYPES.values(), ids=ELEMENT_TYPES)


@EVERY
def test_an_entry_agrees_with_pytorch_and_numpy(element: ElementType) -> None:
    dtype = getattr(torch, element.torch)
    assert of_torch(dtype) == element.name and dtype.itemsize == element.bytes == np.dtype(element.array).itemsize == size_of(element.name)
    assert dtype.is_floating_point == is_float(element.name) == (element.name in TOLERANCES and not dtype.is_complex)
    if element.kind == "int":
        limits = torch.iinfo(dtype)
        assert (limits.min, limits.max) == (element.lowest, element.highest)
        assert (lowest(element.name), highest(element.name)) == (Const(limits.min, element.name), Const(limits.max, element.name))
    wider = ELEMENT_TYPES[computed_in(element.name)]
    assert (wider.name in COMPUTED) == (element.kind != "complex") and wider.kind == element.kind and wider.bytes >= element.bytes
    assert (element.name in NARROW_FLOATS) == (wider is not element)


@EVERY
def test_its_names_in_c_have_its_size(element: ElementType) -> None:
    sizes = {
        "double": 8,
        "float": 4,
        "long long": 8,
        "int": 4,
        "short": 2,
        "char": 1,
        "float2": 8,
        "double2": 16,
        "float _Complex": 8,
        "double _Complex": 16,
    }
    fixed = re.fullmatch(r"u?int(\d+)_t", element.c)
    assert (int(fixed[1]) // 8 if fixed else sizes[element.c]) == element.bytes
    assert sizes[element.cuda.removeprefix("unsigned ").removeprefix("signed ")] == element.bytes
    assert element.kind == "complex" or sizes[element.cuda_vector.removeprefix("u").replace("longlong", "long long")] == element.bytes


def copy(dtype: str, gpu: bool) -> Kernel:
    """target[i] = source[i]."""
    launch = Launch((1, 1, 1), (8, 1, 1)) if gpu else None
    at = thread_variable(launch) if launch else Var("i", 8)
    body = Store("target", at, Load("source", (at,), dtype))
    return Kernel(
        "copy", (Buffer("source", dtype, 8), Buffer("target", dtype, 8, writable=True)), body if gpu else For(at, index_const(8), body), launch
    )


@EVERY
def test_both_printers_and_the_interpreter_take_it(element: ElementType) -> None:
    assert C_TYPES[element.name] == element.c and CUDA_TYPES[element.name] == element.cuda
    assert f"const {element.c} *" in print_c([copy(element.name, False)])
    assert f"const {element.cuda} *" in print_cuda([copy(element.name, True)])
    for gpu in (False, True):
        source, target = np.arange(8).astype(element.array), np.zeros(8, element.array)
        assert run(copy(element.name, gpu), [source, target]).is_clean
        assert np.array_equal(source, target)


def test_no_stage_names_float32_but_where_it_is_somebody_elses_word() -> None:
    """Types come from values, or from the constants of the table. PTX, OpenVINO, the
    driver's tensor maps and the conversions, which are text per type, use the same word."""
    elsewhere = {"ir/dtypes.py", "analysis/gpu/ptx.py", "tuning/peers.py", "codegen/conversions.py", "runtime/driver.py"}
    assert {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if '"f32"' in p.read_text()} <= elsewhere


def test_shared_memory_is_as_large_as_the_elements_that_are_staged() -> None:
    """With tiles of 64 x 64 x 16 and double buffering, A in two-byte elements takes half the space of four-byte elements if it is copied, and the same
    if registers widen it."""
    through, rows = (
        {name: np.array([value]) for name, value in dataclasses.asdict(ContractionSchedule(64, 64, 16, 4, 4, stages=stages)).items()}
        for stages in (1, 2)
    )
    a, b = Operand("own", 4, 4 * 512 * 512), Operand("own", 4, 4 * 512 * 512)
    facts = ContractionFacts(1, 512, 512, 512, a, b, 4, 4 * 512 * 512)
    narrow = dataclasses.replace(facts, a=dataclasses.replace(a, element_bytes=2))
    assert shared_bytes_of(facts, rows) == 2 * 16 * (64 * 4 + 64 * 4) and shared_bytes_of(narrow, rows) == 2 * 16 * (64 * 2 + 64 * 4)
    assert shared_bytes_of(narrow, through) == shared_bytes_of(facts, through) == shared_bytes_of(facts, rows)
    bound, half = (contraction_bound(one, rows, contraction_counts(one, rows, H200), H200, 0.0).terms["shared"] for one in (facts, narrow))
    assert half < bound


@pytest.mark.parametrize("dtype", sorted(NARROW_FLOATS))
def test_every_narrow_float_has_its_conversions_and_bits(dtype: str) -> None:
    wide, element = computed_in(dtype), ELEMENT_TYPES[dtype]
    for source, target in ((dtype, wide), (wide, dtype)):
        for lanes in (1, 2, 4, 8):
            name = conversion_name(source, target, lanes)
            assert name in c_conversion(source, target, lanes) and name in CUDA_CONVERSIONS
    for value in (0.0, -1.0, 1 / 3, 65504.0, float("inf")):
        exact = torch.tensor(value).to(getattr(torch, element.torch)).view(torch.int16)
        assert bits_of(value, dtype) == int(exact) % (1 << 8 * element.bytes)
