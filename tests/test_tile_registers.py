"""Instructions of x86's tile registers (AMX): products in the interpreter, and on this CPU bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.instruction_values import as_factor, assert_bits, integers, stored
from tilewright.codegen.assemble import block
from tilewright.codegen.c import print_c
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import amx
from tilewright.hardware import host_cpu
from tilewright.ir.expr import index_const as at
from tilewright.ir.kernel import Buffer, Invoke, Kernel, With, statements, written_by


def tile_product(rows: int, depth: int) -> Kernel:
    """out = c + a b on tile registers."""
    c, a, b = amx.tile("c", rows, 16, "f32"), amx.tile("a", rows, depth, "bf16"), amx.tile("b", depth // 2, 32, "bf16")
    body = block(
        amx.load(c, "c_in", at(0), 16),
        amx.load(a, "a_in", at(0), depth),
        amx.load(b, "b_in", at(0), 32),
        amx.multiply(c, a, b),
        amx.store(c, "out", at(0), 16),
    )
    parameters = (Buffer("c_in", "f32", rows * 16), Buffer("a_in", "bf16", rows * depth), Buffer("b_in", "bf16", depth * 16))
    return Kernel("tiles", (*parameters, Buffer("out", "f32", rows * 16, writable=True)), amx.with_tiles((c, a, b), body))


def tile_inputs(rows: int, depth: int, exact: bool) -> list[np.ndarray]:
    generator = np.random.default_rng(depth)
    numbers: Callable[..., np.ndarray] = (lambda shape: integers(shape, 100, depth)) if exact else generator.standard_normal
    a, b, c = (numbers(shape) for shape in ((rows, depth), (depth, 16), (rows, 16)))
    pairs = b.reshape(depth // 2, 2, 16).swapaxes(1, 2)
    return [stored(c, "f32").ravel(), stored(a, "bf16").ravel(), stored(pairs, "bf16").ravel(), np.zeros(rows * 16, np.float32)]


@pytest.mark.parametrize(("rows", "depth"), [(16, 32), (7, 10), (1, 2)])
def test_tiles_in_the_interpreter(rows: int, depth: int) -> None:
    arrays = tile_inputs(rows, depth, True)
    assert run(tile_product(rows, depth), arrays).is_clean
    c, a, b = (as_factor(array, "bf16" if array.dtype == np.uint16 else "f32") for array in arrays[:3])
    expected = c.reshape(rows, 16) + a.reshape(rows, depth) @ b.reshape(depth // 2, 16, 2).swapaxes(1, 2).reshape(depth, 16)
    assert_bits(arrays[3], expected.astype(np.float32).ravel())


def test_a_tile_that_was_not_written_is_reported() -> None:
    kernel = tile_product(4, 8)
    (region,) = [s for s in statements(kernel.body) if isinstance(s, With)]
    body = block(tuple(s for s in statements(region) if isinstance(s, Invoke) and written_by(s) != ("a",)))
    report = run(replace(kernel, body=replace(region, body=body)), tile_inputs(4, 8, True))
    assert ["uninitialised" in fault and "register buffer a" in fault for fault in report.faults] == [True], report.faults


@pytest.mark.skipif(not {"amx_tile", "amx_bf16"} <= set(host_cpu().isa), reason="this CPU has no AMX for bfloat16")
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**62])
def test_tiles_are_multiplied_as_by_the_machine(scale: float, tmp_path: Path) -> None:
    """Equal bit for bit, including intermediate rounding and subnormal numbers."""
    from tilewright.runtime.cpu import permit_tiles
    from tilewright.toolchain import SourceFile
    from tilewright.toolchain.compilers import CCompiler

    kernel = tile_product(16, 32)
    arrays = tile_inputs(16, 32, False)
    for number in (1, 2):
        arrays[number] = stored(as_factor(arrays[number], "bf16") * scale, "bf16")
    arrays[0] = (arrays[0] * np.float32(min(scale, 1.0)) ** 2).astype(np.float32)
    expected = arrays[3].copy()
    assert run(kernel, [*arrays[:3], expected]).is_clean
    source = SourceFile("kernel", print_c([kernel]), "c", ("tiles",))
    (tmp_path / CCompiler.source_name).write_text(source.text)
    outcome = CCompiler.find(host_cpu()).compile(source, tmp_path)
    assert outcome.succeeded, outcome.log
    permit_tiles()
    function = ctypes.CDLL(str(tmp_path / CCompiler.binary_name)).tiles
    function((ctypes.c_void_p * 4)(*(array.ctypes.data for array in arrays)), None)
    assert_bits(arrays[3], expected)
