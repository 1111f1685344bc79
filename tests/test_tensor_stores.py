"""Stores of boxes by the copy engine, and of matrices from registers to shared memory: in the interpreter and on a GPU; and what is reported."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.on_device import cuda_binary, launch
from tests.test_tensor_copies import COLUMNS, TILES, swizzled_rows, tensor, values
from tilewright.codegen.assemble import block
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.mma import ldmatrix, stmatrix
from tilewright.codegen.intrinsics.tensor_copy import await_stores, commit_stores, store_box
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, compare, index_const
from tilewright.ir.expr import index_const as at
from tilewright.ir.kernel import Allocate, Buffer, For, If, Kernel, Launch, Place, Statement, Store, thread_variable
from tilewright.ir.tensor_map import TensorMap

WARP = Launch((1, 1, 1), (32, 1, 1))
LANE = thread_variable(WARP)


def storing(described: TensorMap, coordinates: tuple[int, ...], omit: str = "", by: int = 1, first: int = 0) -> Kernel:
    """Shared memory is filled with the elements of `box`, in their order, and stored as a box of `x`. `by`: threads that store it, from the element
    `first` on."""
    count = described.bytes // size_of(described.dtype)
    i = Var("i", -(-count // 32))
    place: Expr = i * 32 + LANE
    fill = If(compare("lt", place, count), Store("shared", place, Load("box", (place,), described.dtype)))
    store: list[Statement] = [store_box(Place("shared", at(first)), described, [*map(index_const, coordinates)]), commit_stores()]
    body = block(
        Allocate(Buffer("shared", described.dtype, count + first, "shared", alignment=max(128, 8 * described.swizzle))),
        For(i, at(i.extent or 1), fill),
        [] if omit == "publish" else mbarrier.publish(),
        [] if omit == "barrier" else block_barrier(),
        If(compare("lt", LANE, by), block(store, [] if omit == "await" else await_stores(0))),
    )
    parameters = Buffer("box", described.dtype, count), Buffer("x", described.dtype, described.end, writable=True)
    return Kernel("storing", parameters, body, WARP, maps=(described,))


def stored_in(described: TensorMap, box: np.ndarray, coordinates: tuple[int, ...], x: np.ndarray) -> np.ndarray:
    """x after the box, as it lies in shared memory, was stored; a swizzle is its own inverse."""
    found = x.copy()
    whole = tensor(described, found)
    elements = swizzled_rows(box.reshape(-1, described.box[0]), described.swizzle).reshape(described.box[::-1])
    for index in np.ndindex(*elements.shape):
        target = tuple(first + k for first, k in zip(reversed(coordinates), index, strict=True))
        if all(0 <= k < extent for k, extent in zip(target, whole.shape, strict=True)):
            whole[target] = elements[index]
    return found


def box_of(described: TensorMap) -> np.ndarray:
    return values(replace(described, extents=(described.bytes // size_of(described.dtype),), strides=(1,), box=(8,), swizzle=0, offset=0), 1)


STORED = [name for name, (_, coordinates) in TILES.items() if min(coordinates) >= 0]


@pytest.mark.parametrize("name", STORED)
def test_boxes_in_the_interpreter(name: str) -> None:
    described, coordinates = TILES[name]
    x, box = values(described), box_of(described)
    found = x.copy()
    report = run(storing(described, coordinates), [box, found], initialised=["x"])
    assert report.is_clean, report
    np.testing.assert_array_equal(found, stored_in(described, box, coordinates, x))


@pytest.mark.parametrize("name", sorted(TILES.keys() - STORED))
def test_boxes_do_not_begin_before_the_tensor(name: str) -> None:
    described, coordinates = TILES[name]
    report = run(storing(described, coordinates), [box_of(described), values(described)], initialised=["x"])
    assert any(re.search("out of bounds: .* writes global buffer x", fault) for fault in report.faults), report.faults


@pytest.mark.parametrize("name", TILES)
def test_stores_compile(name: str) -> None:
    passed, log = cuda_binary(print_cuda([storing(*TILES[name])]))
    assert passed and "warning" not in log, log


@pytest.mark.parametrize(
    ("omit", "by", "message"),
    [
        ("publish", 1, r"not published: .* reads shared buffer shared .* through an engine, which thread \d+ wrote and did not publish"),
        ("barrier", 1, r"race: .* writes shared buffer shared .* which stores of the copy engine touch"),
        ("await", 1, r"stores: the block of block \(0, 0, 0\) thread \(0, 0, 0\) may end while the copy engine reads"),
        ("", 2, r"stores: .* from which the copy engine stores, as thread 0 of its group has it do, too"),
    ],
)
def test_the_interpreter_reports_what_is_wrong_with_a_store(omit: str, by: int, message: str) -> None:
    described, coordinates = TILES["f16, 128"]
    report = run(storing(described, coordinates, omit, by), [box_of(described), values(described)], initialised=["x"])
    assert [fault for fault in report.faults if re.search(message, fault)], report.faults


MATRIX = TensorMap("map_x", "x", "f16", (64, 24), (1, 64), (64, 24), 128)


def test_what_was_stored_is_not_read_in_the_same_block() -> None:
    """The wait is for the engine's reads, not for what it writes."""
    kernel = storing(MATRIX, (0, 0))
    read = block(kernel.body, block_barrier(), Store("out", LANE, Load("x", (LANE,), "f16")))
    whole = replace(kernel, body=read, parameters=(*kernel.parameters, Buffer("out", "f16", 32, writable=True)))
    report = run(whole, [box_of(MATRIX), values(MATRIX), np.zeros(32, np.float16)], initialised=["x"])
    assert any(re.search("race: .* reads global buffer x .* stores of the copy engine", fault) for fault in report.faults), report.faults


def test_boxes_are_at_whole_128_bytes() -> None:
    plain = replace(MATRIX, box=(64, 4), swizzle=0)
    report = run(storing(plain, (0, 0), first=8), [box_of(plain), values(plain)], initialised=["x"])
    assert any(re.search("misaligned: .* reads shared buffer shared .* at offset 8", fault) for fault in report.faults), report.faults


def test_a_store_takes_a_tiled_map_and_its_coordinates() -> None:
    described, _ = TILES["f16, 128"]
    with pytest.raises(ValueError, match="at 2 coordinates"):
        store_box(Place("shared", at(0)), described, [at(0)])
    columns, _, _ = COLUMNS["1x1"]
    with pytest.raises(ValueError, match="through a tiled map"):
        store_box(Place("shared", at(0)), columns, [at(0)] * 4)


def through_registers(count: int, transposed: bool, back: bool) -> Kernel:
    """out = matrices of x, loaded to registers by one instruction and stored by the other, each `transposed` or as it is."""
    row = Place("rows", LANE % (8 * count) * 8)
    i = Var("i", 2 * count)
    body = block(
        Allocate(Buffer("rows", "f16", 64 * count, "shared", alignment=16)),
        Allocate(Buffer("held", "f16", 2 * count, "register", 2)),
        For(i, at(i.extent or 1), Store("rows", i * 32 + LANE, Load("x", (i * 32 + LANE,), "f16"))),
        block_barrier(),
        ldmatrix("f16", count, Place("held", at(0)), row, transposed),
        block_barrier(),
        stmatrix("f16", count, row, Place("held", at(0)), back),
        block_barrier(),
        For(i, at(i.extent or 1), Store("out", i * 32 + LANE, Load("rows", (i * 32 + LANE,), "f16"))),
    )
    return Kernel("through_registers", (Buffer("x", "f16", 64 * count), Buffer("out", "f16", 64 * count, writable=True)), body, WARP)


MATRICES = [(count, transposed, back) for count in (1, 2, 4) for transposed in (False, True) for back in (False, True)]


def matrices(count: int, transposed: bool, back: bool) -> tuple[np.ndarray, np.ndarray]:
    """x and what is expected of it."""
    x = np.random.default_rng(count).standard_normal(64 * count).astype(np.float16)
    held = x.reshape(count, 8, 8)
    return x, (held.swapaxes(1, 2) if transposed != back else held).ravel()


@pytest.mark.parametrize(("count", "transposed", "back"), MATRICES)
def test_matrices_in_the_interpreter(count: int, transposed: bool, back: bool) -> None:
    x, wanted = matrices(count, transposed, back)
    out = np.zeros_like(x)
    report = run(through_registers(count, transposed, back), [x, out])
    assert report.is_clean and not report.unwritten, report
    np.testing.assert_array_equal(out, wanted)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", STORED)
def test_boxes_on_the_gpu(name: str) -> None:
    described, coordinates = TILES[name]
    x, box = values(described), box_of(described)
    found = x.copy()
    launch(storing(described, coordinates), [box, found])
    np.testing.assert_array_equal(found, stored_in(described, box, coordinates, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "transposed", "back"), MATRICES)
def test_matrices_on_the_gpu(count: int, transposed: bool, back: bool) -> None:
    x, wanted = matrices(count, transposed, back)
    out = np.zeros_like(x)
    launch(through_registers(count, transposed, back), [x, out])
    np.testing.assert_array_equal(out, wanted)
