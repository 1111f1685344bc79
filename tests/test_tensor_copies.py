"""Copies of boxes by the copy engine: what arrives in shared memory, in the interpreter and on a GPU, one kind of box at a time; and what is reported."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.instruction_values import stored
from tests.on_device import cuda_binary, launch
from tests.test_gpu_runtime import FakeLibrary
from tilewright.codegen.assemble import block
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.tensor_copy import copy_box
from tilewright.hardware import machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Load, Var, compare, index_const
from tilewright.ir.expr import index_const as at
from tilewright.ir.kernel import Allocate, Buffer, For, If, Kernel, Launch, Place, Statement, Store, thread_variable
from tilewright.ir.tensor_map import TensorMap
from tilewright.runtime.driver import MAP_L2_PROMOTION, MAP_SWIZZLES, MAP_TYPES, Driver
from tilewright.runtime.encoding import decode_kernel
from tilewright.runtime.fields import Field
from tilewright.runtime.gpu_kernels import parameter_block
from tilewright.runtime.loadable import facts_symbol, loadable_kernel

WARP = Launch((1, 1, 1), (32, 1, 1))
LANE = thread_variable(WARP)


def copying(described: TensorMap, coordinates: tuple[int, ...], filters: tuple[int, ...] = (), omit: str = "") -> Kernel:
    """out = the bytes that a copy of a box leaves in shared memory, in their order."""
    count = described.bytes // size_of(described.dtype)
    barrier, i = Place("full", at(0)), Var("i", -(-count // 32))
    place = i * 32 + LANE
    alignment = max(128, 8 * described.swizzle) // (2 if omit == "alignment" else 1)
    expected = described.bytes - 16 * (omit == "bytes")
    start: list[Statement] = [
        mbarrier.expect(barrier, expected) if omit != "expected" else mbarrier.arrive(barrier),
        copy_box(Place("box", at(0)), described, barrier, [*map(index_const, coordinates)], [*map(index_const, filters)]),
    ]
    body = block(
        Allocate(mbarrier.barriers("full", 1)),
        Allocate(Buffer("box", described.dtype, count, "shared", alignment=alignment)),
        If(compare("eq", LANE, 0), block(mbarrier.initialise(barrier, 1), *([] if omit == "publish" else [mbarrier.publish()]))),
        block_barrier(),
        If(compare("eq", LANE, 0), block(start)),
        *([] if omit == "wait" else [mbarrier.wait(barrier, at(0), "warp")]),
        For(i, at(i.extent or 1), If(compare("lt", place, count), Store("out", place, Load("box", (place,), described.dtype)))),
    )
    parameters = Buffer("x", described.dtype, described.end), Buffer("out", described.dtype, count, writable=True)
    return Kernel("copying", parameters, body, WARP, maps=(described,))


def swizzled_rows(box: np.ndarray, swizzle: int) -> np.ndarray:
    """Rows of a box as they lie in shared memory: the pieces of 16 bytes of 8 rows in other orders (PTX ISA, "Swizzling Modes", by figure)."""
    rows = box.reshape(len(box), -1, 16 // box.itemsize)
    result = np.empty_like(rows)
    for row, piece in np.ndindex(*rows.shape[:2]):
        turn = {0: 0, 32: row // 4 % 2, 64: row // 2 % 4, 128: row % 8}[swizzle]
        result[row, piece ^ turn] = rows[row, piece]
    return result.reshape(box.shape)


def values(described: TensorMap, seed: int = 0) -> np.ndarray:
    return stored(np.random.default_rng(seed).integers(-100, 100, described.end), described.dtype)


def tensor(described: TensorMap, x: np.ndarray) -> np.ndarray:
    """The tensor in the buffer, dimensions outermost first."""
    strides = [stride * x.itemsize for stride in reversed(described.strides)]
    return np.lib.stride_tricks.as_strided(x[described.offset :], described.extents[::-1], strides)


def tile_of(described: TensorMap, x: np.ndarray, coordinates: tuple[int, ...]) -> np.ndarray:
    """The box at the coordinates, as rows in shared memory."""
    box = np.zeros(described.box[::-1], x.dtype)
    whole = tensor(described, x)
    for index in itertools.product(*map(range, box.shape)):
        source = tuple(first + i for first, i in zip(reversed(coordinates), index, strict=True))
        if all(0 <= i < extent for i, extent in zip(source, whole.shape, strict=True)):
            box[index] = whole[source]
    return swizzled_rows(box.reshape(-1, described.box[0]), described.swizzle).ravel()


def columns_of(described: TensorMap, x: np.ndarray, coordinates: tuple[int, ...], filters: tuple[int, ...]) -> np.ndarray:
    """The columns that begin at the coordinates: all pixels in the order of memory are listed, and a part of the list is taken."""
    whole = tensor(described, x)
    sides = [
        range(low, extent + high, step) for extent, (low, high), step in zip(described.extents[1:-1], described.corners, described.steps, strict=True)
    ]
    pixels = list(itertools.product(range(whole.shape[0] + 2), *reversed(sides)))
    first = pixels.index(tuple(reversed(coordinates[1:])))
    channels, count = described.box
    box = np.zeros((count, channels), x.dtype)
    for row, (image, *pixel) in enumerate(pixels[first : first + count]):
        place = [image, *(p + f for p, f in zip(pixel, reversed(filters), strict=True))]
        inside = all(0 <= i < extent for i, extent in zip(place, whole.shape, strict=False))
        for channel in range(channels if inside else 0):
            if 0 <= coordinates[0] + channel < whole.shape[-1]:
                box[row, channel] = whole[(*place, coordinates[0] + channel)]
    return swizzled_rows(box, described.swizzle).ravel()


def matrix(dtype: str, swizzle: int, rows: int = 24) -> TensorMap:
    """A box of a matrix with rows of the swizzle."""
    wide = (swizzle or 48) // size_of(dtype)
    return TensorMap("map_x", "x", dtype, (3 * wide + 8, 40), (1, 4 * wide), (wide, rows), swizzle)


TILES: dict[str, tuple[TensorMap, tuple[int, ...]]] = {
    **{f"{dtype}, {swizzle}": (matrix(dtype, swizzle), (16, 5)) for dtype in ("f16", "f32") for swizzle in (0, 32, 64, 128)},
    "bf16, 128": (matrix("bf16", 128), (64, 0)),
    "before the first": (matrix("f16", 128), (-8, -5)),
    "beyond the last": (matrix("f16", 64), (80, 30)),
    "1 dimension": (TensorMap("map_x", "x", "f32", (100,), (1,), (64,)), (20,)),
    "3 dimensions": (TensorMap("map_x", "x", "f16", (40, 7, 5), (1, 48, 400), (32, 4, 3), 64, 8), (16, 5, 1)),
    "4 dimensions": (TensorMap("map_x", "x", "f32", (12, 5, 4, 3), (1, 12, 60, 240), (8, 3, 2, 2), 32), (4, 3, 1, 1)),
    "5 dimensions": (TensorMap("map_x", "x", "f16", (16, 3, 4, 2, 3), (1, 16, 48, 192, 384), (16, 2, 3, 2, 2), 32), (0, 1, 2, 1, -1)),
}


def convolution(
    dtype: str,
    channels: int,
    size: tuple[int, ...],
    filters: tuple[int, ...],
    padding: int,
    stride: int,
    dilation: int,
    box: tuple[int, int],
    swizzle: int,
) -> TensorMap:
    """The map of a convolution's input, channels innermost; sizes from the outermost dimension on: images, rows, columns."""
    images, *spatial = size
    extents = (channels, *reversed(spatial), images)
    strides = [1]
    for extent in extents[:-1]:
        strides.append(strides[-1] * extent)
    corners = tuple((-padding, padding - (width - 1) * dilation) for width in reversed(filters))
    return TensorMap("map_x", "x", dtype, extents, tuple(strides), box, swizzle, corners=corners, steps=(stride,) * len(spatial))


COLUMNS: dict[str, tuple[TensorMap, tuple[int, ...], tuple[int, ...]]] = {
    "1x1": (convolution("f16", 64, (2, 5, 6), (1, 1), 0, 1, 1, (64, 40), 128), (0, 2, 1, 0), (0, 0)),
    "1x1, stride": (convolution("f16", 64, (2, 5, 6), (1, 1), 0, 2, 1, (64, 16), 128), (0, 2, 2, 0), (0, 0)),
    "3x3, first": (convolution("f16", 64, (2, 7, 6), (3, 3), 1, 1, 1, (64, 64), 128), (0, -1, -1, 0), (0, 0)),
    "3x3, last": (convolution("f16", 64, (2, 7, 6), (3, 3), 1, 1, 1, (64, 64), 128), (0, 2, 3, 1), (2, 2)),
    "3x3, stride": (convolution("f16", 32, (3, 9, 8), (3, 3), 1, 2, 1, (32, 48), 64), (0, 1, 3, 0), (1, 2)),
    "3x3, dilation": (convolution("f32", 16, (2, 9, 8), (3, 3), 2, 1, 2, (8, 48), 32), (8, 0, 1, 0), (2, 4)),
    "1 spatial dimension": (convolution("f16", 16, (3, 20), (5,), 2, 1, 1, (16, 24), 32), (0, 14, 0), (3,)),
    "3 spatial dimensions": (convolution("f16", 16, (2, 4, 5, 3), (3, 3, 3), 1, 1, 1, (16, 40), 32), (0, 1, -1, 2, 0), (2, 0, 1)),
    "more channels than there are": (convolution("f16", 40, (1, 5, 6), (3, 3), 1, 1, 1, (32, 16), 64), (32, -1, 0, 0), (1, 1)),
}


@pytest.mark.parametrize("name", TILES)
def test_tiles_in_the_interpreter(name: str) -> None:
    described, coordinates = TILES[name]
    x = values(described)
    out = np.zeros(described.bytes // x.itemsize, x.dtype)
    report = run(copying(described, coordinates), [x, out])
    assert report.is_clean and not report.unwritten, report
    np.testing.assert_array_equal(out, tile_of(described, x, coordinates))


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_pixels_in_the_interpreter(name: str) -> None:
    described, coordinates, filters = COLUMNS[name]
    x = values(described)
    out = np.zeros(described.bytes // x.itemsize, x.dtype)
    report = run(copying(described, coordinates, filters), [x, out])
    assert report.is_clean and not report.unwritten, report
    np.testing.assert_array_equal(out, columns_of(described, x, coordinates, filters))


@given(st.data())
@settings(max_examples=draws(25), deadline=None)
def test_the_columns_of_any_convolution(data: Any) -> None:
    """All columns of all positions of the filter are the rows of the matrix whose product with the filter is the convolution."""
    whole = st.integers
    filters, size = data.draw(st.tuples(whole(1, 3), whole(1, 3))), data.draw(st.tuples(whole(1, 2), whole(5, 8), whole(5, 8)))
    padding, stride, dilation = data.draw(whole(0, 2)), data.draw(whole(1, 3)), data.draw(whole(1, 2))
    described = convolution("f32", 8, size, filters, padding, stride, dilation, (8, 64), 32)
    x = values(described, data.draw(whole(0, 9)))
    at_filter = tuple(data.draw(whole(0, width - 1)) * dilation for width in reversed(filters))
    rows = [(s + 2 * padding - (width - 1) * dilation - 1) // stride + 1 for s, width in zip(size[1:], filters, strict=True)]
    if min(rows) < 1:
        return
    start = data.draw(whole(0, size[0] * rows[0] * rows[1] - 1))
    image, row, column = start // (rows[0] * rows[1]), start // rows[1] % rows[0], start % rows[1]
    coordinates = (0, column * stride - padding, row * stride - padding, image)
    out = np.zeros(8 * 64, np.float32)
    assert run(copying(described, coordinates, at_filter), [x, out]).is_clean
    padded = np.pad(tensor(described, x), ((0, 2), (padding, padding), (padding, padding), (0, 0)))[:, at_filter[1] :, at_filter[0] :]
    pixels = padded[:, : (rows[0] - 1) * stride + 1 : stride, : (rows[1] - 1) * stride + 1 : stride].reshape(-1, 8)[start : start + 64]
    expected = np.zeros((64, 8), np.float32)
    expected[: len(pixels)] = pixels
    np.testing.assert_array_equal(out, swizzled_rows(expected, 32).ravel())


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ("wait", r"race: .* reads shared buffer box .* which copies that complete on barrier full\[0\] touch without a barrier between"),
        ("bytes", r"deadlock: .* barrier full\[0\], of which 0 arrivals and -16 bytes are missing"),
        ("expected", r"bytes: copies that complete on barrier full\[0\] were 3072 more than the phases expected"),
        ("publish", "not published: .* through an engine, which thread 0 wrote"),
    ],
)
def test_the_interpreter_reports_what_is_wrong_with_a_copy(omit: str, message: str) -> None:
    described, coordinates = TILES["f16, 128"]
    x = values(described)
    report = run(copying(described, coordinates, omit=omit), [x, np.zeros(described.bytes // 2, np.float16)])
    assert [fault for fault in report.faults if re.search(message, fault)], report.faults


def test_boxes_are_aligned() -> None:
    described, coordinates = TILES["f16, 128"]
    with pytest.raises(ValueError, match="box is aligned to 512 bytes, where an engine needs 1024"):
        run(copying(described, coordinates, omit="alignment"), [values(described), np.zeros(described.bytes // 2, np.float16)])


def test_a_map_that_the_engine_does_not_know_is_refused() -> None:
    described, _ = TILES["f16, 128"]
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"strides": (1, 251)}, "no multiples of 16 bytes"),
        ({"strides": (2, 256)}, "the first of which is 1"),
        ({"swizzle": 64}, "rows of 128 bytes do not fit a swizzle of 64"),
        ({"box": (64, 257)}, "1 to 256 elements"),
        ({"extents": (0, 40)}, "from 1 to"),
        ({"offset": 4}, "offset 4"),
        ({"corners": ((0, 0),), "steps": (1,)}, "0 spatial dimensions"),
    )
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            replace(described, **change)
    column, _, _ = COLUMNS["3x3, first"]
    changes = (
        ({"corners": ((-200, 0), (0, 0))}, "from -128 to 127"),
        ({"steps": (1, 9)}, "steps from 1 to 8"),
        ({"box": (64, 2000)}, "1024 pixels"),
    )
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            replace(column, **change)
    with pytest.raises(ValueError, match="2 coordinates and 0 offsets"):
        copy_box(Place("box", at(0)), described, Place("full", at(0)), [at(0)])


def test_nvrtc_compiles_every_kind_of_copy() -> None:
    kernels = [replace(copying(*case), name=f"tile{i}") for i, case in enumerate(TILES.values())]
    kernels += [replace(copying(*case), name=f"column{i}") for i, case in enumerate(COLUMNS.values())]
    passed, log = cuda_binary(print_cuda(kernels))
    assert passed and "warning" not in log, log


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILES)
def test_tiles_on_the_gpu(name: str) -> None:
    described, coordinates = TILES[name]
    x = values(described)
    out = np.zeros(described.bytes // x.itemsize, x.dtype)
    launch(copying(described, coordinates), [x, out])
    np.testing.assert_array_equal(out, tile_of(described, x, coordinates))


@pytest.mark.gpu
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_pixels_on_the_gpu(name: str) -> None:
    described, coordinates, filters = COLUMNS[name]
    x = values(described)
    out = np.zeros(described.bytes // x.itemsize, x.dtype)
    launch(copying(described, coordinates, filters), [x, out])
    np.testing.assert_array_equal(out, columns_of(described, x, coordinates, filters))


# --- the host's side --------------------------------------------------------------------------------------------------


def test_descriptions_survive_json() -> None:
    for described, coordinates, filters in (*((*case, ()) for case in TILES.values()), *COLUMNS.values()):
        kernel = loadable_kernel(copying(described, coordinates, filters))
        assert kernel.maps == ((0, described),)
        assert decode_kernel(Field(json.loads(json.dumps(asdict(kernel))), "kernel")) == kernel
    broken = asdict(kernel)
    broken["maps"][0][1]["strides"] = [1, 3]
    with pytest.raises(ValueError, match="strides"):
        decode_kernel(Field(json.loads(json.dumps(broken)), "kernel"))


def test_the_name_of_what_is_called_tells_maps_apart() -> None:
    described, coordinates = TILES["f16, 128"]
    first, second = (loadable_kernel(copying(replace(described, extents=(wide, 40)), coordinates)) for wide in (200, 192))
    assert facts_symbol(first, machine("h100")) != facts_symbol(replace(first, maps=second.maps), machine("h100"))


def numbers(pointer: Any, count: int) -> list[int]:
    return [pointer[i] for i in range(count)]


def test_maps_are_encoded_for_the_addresses_of_a_launch() -> None:
    """What the driver is asked for, and where: aligned, behind the buffers, again when a buffer moves."""
    library = FakeLibrary()
    driver = Driver(library)
    described, coordinates, filters = COLUMNS["3x3, stride"]
    kernel = loadable_kernel(copying(described, coordinates, filters))
    slots = (ctypes.c_uint64 * 1)(1 << 20)
    block = parameter_block(driver, kernel, [ctypes.addressof(slots), 0], [1 << 30], 0)
    slots[0] = 1 << 21
    block.encode(driver)
    calls = [arguments for name, arguments in library.calls if name == "cuTensorMapEncodeIm2col"]
    assert [arguments[3] for arguments in calls] == [1 << 20, 1 << 21]
    target, kind, rank, _, extents, strides, lower, upper, channels, pixels, steps, *rest = calls[0]
    assert target == block.pointers[2] and target % 64 == 0
    assert (kind, rank, channels, pixels) == (6, 4, 32, 48) and rest == [0, 2, 2, 0]
    assert numbers(extents, 4) == [32, 8, 9, 3] and numbers(strides, 3) == [64, 512, 4608]
    assert numbers(lower, 2) == [-1, -1] and numbers(upper, 2) == [-1, -1] and numbers(steps, 4) == [1, 2, 2, 1]
    described, coordinates = TILES["3 dimensions"]
    parameter_block(driver, loadable_kernel(copying(described, coordinates)), [0, 0], [1 << 20, 1 << 30], 0)
    name, (_, kind, rank, address, extents, strides, box, steps, *rest) = library.calls[-1]
    assert name == "cuTensorMapEncodeTiled" and (kind, rank, address) == (6, 3, (1 << 20) + 16) and rest == [0, 2, 2, 0]
    assert numbers(extents, 3) == [40, 7, 5] and numbers(strides, 2) == [96, 800] and numbers(box, 3) == [32, 4, 3] and numbers(steps, 3) == [1, 1, 1]


def test_the_drivers_numbers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    types = {"u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "i32": "INT32", "u64": "UINT64", "i64": "INT64", "f16": "FLOAT16", "bf16": "BFLOAT16"}
    for name, found in (types | {"f32": "FLOAT32", "f64": "FLOAT64"}).items():
        assert int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{found}")) == MAP_TYPES[name]
    for count, number in MAP_SWIZZLES.items():
        assert int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{count}B' if count else 'NONE'}")) == number
    assert int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B) == MAP_L2_PROMOTION
