"""Instructions of tensor cores: fragments, matrices and products in the interpreter, compiled, and on a GPU bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.instruction_values import as_factor, assert_bits, integers, stored
from tests.on_device import cuda_binary, launch
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.assemble import block
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import async_copy, mma
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, compare, const, select
from tilewright.ir.expr import index_const as at
from tilewright.ir.kernel import (
    Allocate,
    Buffer,
    For,
    If,
    Invoke,
    Kernel,
    Launch,
    Let,
    Place,
    Statement,
    Store,
    statements,
    thread_variable,
    written_by,
)

KINDS = ("tf32", "f16", "bf16")
WARP = Launch((1, 1, 1), (32, 1, 1))
LANE = thread_variable(WARP)


# --- fragments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fragments_hold_every_element_once(kind: str) -> None:
    shape = mma.SHAPES[kind]
    for fragment, size in ((shape.a, (16, shape.depth)), (shape.b, (shape.depth, 8)), (shape.sums, (16, 8))):
        counted = np.zeros(size, np.int64)
        np.add.at(counted, (fragment.rows, fragment.columns), 1)
        assert (counted == 1).all()
        matrix = np.arange(counted.size).reshape(size)
        np.testing.assert_array_equal(fragment.matrix(fragment.of(matrix)), matrix)


def test_fragments_are_those_of_the_manual() -> None:
    """Lane 13 (group 3, place 1): PTX ISA, figures of m16n8k8 (.tf32) and m16n8k16 (.f16)."""
    tf32, half = mma.SHAPES["tf32"], mma.SHAPES["f16"]

    def held(fragment: mma.Fragment) -> list[tuple[int, int]]:
        return list(zip(fragment.rows[13].tolist(), fragment.columns[13].tolist(), strict=True))

    assert held(tf32.a) == [(3, 1), (11, 1), (3, 5), (11, 5)]
    assert held(tf32.b) == [(1, 3), (5, 3)]
    assert held(tf32.sums) == [(3, 2), (3, 3), (11, 2), (11, 3)]
    assert held(half.a) == [(3, 2), (3, 3), (11, 2), (11, 3), (3, 10), (3, 11), (11, 10), (11, 11)]
    assert held(half.b) == [(2, 3), (3, 3), (10, 3), (11, 3)]


def fragments(kind: str, warps: int = 4) -> Kernel:
    """sums += a b for the fragments [warp][lane][element] in the parameters."""
    shape = mma.SHAPES[kind]
    grid = Launch((warps, 1, 1), (32, 1, 1))
    thread = Var("block_x", warps) * 32 + thread_variable(grid)
    packed = 4 // size_of(shape.stored)
    sizes = {"a": shape.a.size, "b": shape.b.size, "sums": shape.sums.size}
    dtypes = {"a": shape.stored, "b": shape.stored, "sums": "f32"}
    body: list[Statement] = []
    for name, size in sizes.items():
        lanes = packed if name != "sums" else 1
        body.append(Allocate(Buffer(name, dtypes[name], size, "register", lanes)))
        body += [Store(name, at(i), Load(f"{name}_in", (thread * size + i,), dtypes[name], lanes)) for i in range(0, size, lanes)]
    body.append(mma.mma(kind, Place("sums", at(0)), Place("a", at(0)), Place("b", at(0))))
    body += [Store("out", thread * 4 + i, Load("sums", (at(i),), "f32")) for i in range(4)]
    inputs = (Buffer(f"{name}_in", dtypes[name], warps * 32 * size) for name, size in sizes.items())
    return Kernel(f"fragments_{kind}", (*inputs, Buffer("out", "f32", warps * 128, writable=True)), block(body), grid)


def fragment_inputs(kind: str, warps: int, exact: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Arrays for `fragments`, and the result; `exact`: every sum of products is a float32."""
    shape = mma.SHAPES[kind]
    generator = np.random.default_rng(len(kind) + warps)
    expected: list[Any] = []
    arrays: dict[str, list[Any]] = {"a": [], "b": [], "sums": []}
    for _ in range(warps):
        a, b, c = (
            integers(size, 127, int(generator.integers(1 << 30))) if exact else generator.standard_normal(size)
            for size in ((16, shape.depth), (shape.depth, 8), (16, 8))
        )
        arrays["a"].append(shape.a.of(stored(a, shape.stored)))
        arrays["b"].append(shape.b.of(stored(b, shape.stored)))
        arrays["sums"].append(shape.sums.of(stored(c, "f32")))
        factors = [as_factor(stored(x, shape.stored), kind) for x in (a, b)]
        expected.append(shape.sums.of((stored(c, "f32").astype(np.float64) + factors[0] @ factors[1]).astype(np.float32)))
    flat = [np.ascontiguousarray(np.concatenate(parts)).ravel() for parts in arrays.values()]
    return [*flat, np.zeros(warps * 128, np.float32)], np.concatenate(expected).ravel()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_fragments_in_the_interpreter(kind: str, exact: bool) -> None:
    arrays, expected = fragment_inputs(kind, 4, exact)
    report = run(fragments(kind), arrays)
    assert report.is_clean and not report.unwritten, report
    assert_bits(arrays[-1], expected)


# --- a product of matrices --------------------------------------------------------------------------------------------

ROWS, COLUMNS, STEPS = 32, 16, 32


def product(kind: str, transposed: bool = False, omit: str = "") -> Kernel:
    """out[32, 16] = a[32, 32] b: two warps with 16 rows each, factors by asynchronous copies to shared memory and from there by ldmatrix. b is stored
    [n][k], or `transposed` [k][n]. `omit` names a part to leave out."""
    shape = mma.SHAPES[kind]
    dtype, depth = shape.stored, shape.depth
    vector = 16 // size_of(dtype)  # elements in a row of a matrix
    grid = Launch((1, 1, 1), (64, 1, 1))
    thread = thread_variable(grid)
    lane, warp = Var("lane", 32), Var("warp", 2)
    shared = {"a": (ROWS, STEPS), "b": (STEPS, COLUMNS) if transposed else (COLUMNS, STEPS)}
    pitch = {name: columns + vector for name, (_, columns) in shared.items()}
    body: list[Statement] = [Let(lane, thread % 32), Let(warp, thread // 32)]
    for name, (rows, columns) in shared.items():
        body.append(Allocate(Buffer(f"{name}_tile", dtype, rows * pitch[name], "shared")))
        number, position = Var("number", rows * columns // vector // 64), Var("position", rows * columns // vector)
        row, column = position // (columns // vector), position % (columns // vector) * vector
        copied = async_copy.copy(f"{name}_tile", row * pitch[name] + column, Load(f"{name}_in", (row * columns + column,), dtype, vector), dtype)
        body.append(For(number, at(number.extent or 1), block(Let(position, number * 64 + thread), copied), "unroll"))
    body += [async_copy.commit(), async_copy.await_groups(0)]
    if omit != "barrier":
        body.append(block_barrier())
    packed = 4 // size_of(dtype)
    body += [
        Allocate(Buffer("a", dtype, shape.a.size, "register", packed)),
        Allocate(Buffer("b", dtype, 2 * shape.b.size, "register", packed)),
        Allocate(Buffer("acc", "f32", 8, "register")),
    ]
    i, tile, half, step = Var("i", 8), Var("tile", 2), Var("half", 2), Var("step", STEPS // depth)
    body.append(For(i, at(8), Store("acc", i, const(0.0, "f32")), "unroll"))
    a_place = (warp * 16 + lane % 16) * pitch["a"] + step * depth + lane // 16 * vector
    b_place: Expr = (lane // 16 * 8 + lane % 8) * pitch["b"] + step * depth + lane // 8 % 2 * vector
    if transposed:
        b_place = (step * depth + lane % 16) * pitch["b"] + lane // 16 * 8
    products = For(tile, at(2), mma.mma(kind, Place("acc", tile * 4), Place("a", at(0)), Place("b", tile * shape.b.size)), "unroll")
    steps: Statement = block(
        mma.ldmatrix(dtype, 4, Place("a", at(0)), Place("a_tile", a_place + (1 if omit == "alignment" else 0))),
        mma.ldmatrix(dtype, 4, Place("b", at(0)), Place("b_tile", b_place), transposed),
        products,
    )
    if omit == "a lane":
        steps = If(compare("lt", thread, 63), steps)
    if omit == "a warp":
        steps = If(compare("lt", warp, 1), steps)
    body.append(For(step, at(STEPS // depth), steps, "unroll"))
    place = (warp * 16 + half * 8 + lane // 4) * COLUMNS + tile * 8 + lane % 4 * 2
    put = Store("out", place, Load("acc", (tile * 4 + half * 2,), "f32", 2))
    body.append(For(tile, at(2), For(half, at(2), put, "unroll"), "unroll"))
    parameters = (Buffer("a_in", dtype, ROWS * STEPS), Buffer("b_in", dtype, COLUMNS * STEPS), Buffer("out", "f32", ROWS * COLUMNS, writable=True))
    return Kernel(f"product_{kind}{'_transposed' if transposed else ''}", parameters, block(body), grid)


PRODUCTS = [("tf32", False), ("f16", False), ("f16", True), ("bf16", False), ("bf16", True)]


def product_inputs(kind: str, transposed: bool) -> tuple[list[np.ndarray], np.ndarray]:
    dtype = mma.SHAPES[kind].stored
    a, b = integers((ROWS, STEPS), 60, 1), integers((STEPS, COLUMNS), 60, 2)
    arrays = [stored(a, dtype).ravel(), stored(b if transposed else b.T, dtype).ravel(), np.zeros(ROWS * COLUMNS, np.float32)]
    return arrays, (a @ b).astype(np.float32).ravel()


@pytest.mark.parametrize(("kind", "transposed"), PRODUCTS)
def test_a_product_in_the_interpreter(kind: str, transposed: bool) -> None:
    arrays, expected = product_inputs(kind, transposed)
    report = run(product(kind, transposed), arrays)
    assert report.is_clean and not report.unwritten, report
    assert_bits(arrays[-1], expected)


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ("barrier", "race: .* reads shared buffer a_tile"),
        ("alignment", "misaligned: .* reads shared buffer a_tile .* at offset 1, 8 lanes"),
        (
            "a lane",
            r"barrier divergence: block \(0, 0, 0\) thread \(63, 0, 0\) decides for 0, the first of its group for 1, .* 32 threads do together",
        ),
        ("a warp", ""),
    ],
)
def test_the_interpreter_reports_what_a_warp_does_wrong(omit: str, message: str) -> None:
    arrays, expected = product_inputs("f16", False)
    report = run(product("f16", omit=omit), arrays)
    if not message:  # warps may diverge from each other
        assert report.is_clean
        assert_bits(arrays[-1], np.where(np.arange(ROWS * COLUMNS) < ROWS * COLUMNS // 2, expected, np.float32(0)))
        return
    assert len([fault for fault in report.faults if re.search(message, fault)]) == 1, report.faults


def rows_of_matrices(count: int, transposed: bool, barrier: bool) -> Kernel:
    """Lane l stores row l (mod 8 count) of `count` matrices of float16, and gives its address; out holds the fragments. Other lanes' addresses are
    arbitrary."""
    row = Var("row", 8 * count)
    body: list[Statement] = [
        Allocate(Buffer("s", "f16", 64 * count, "shared")),
        Allocate(Buffer("held", "f16", 2 * count, "register", 2)),
        Let(row, LANE % (8 * count)),
        If(compare("lt", LANE, 8 * count), block([Store("s", row * 8 + i, Load("x", (row * 8 + i,), "f16", 2)) for i in range(0, 8, 2)])),
        *([block_barrier()] if barrier else []),
        mma.ldmatrix("f16", count, Place("held", at(0)), Place("s", select(compare("lt", LANE, 8 * count), LANE * 8, 1 << 20)), transposed),
        *(Store("out", LANE * (2 * count) + i, Load("held", (at(i),), "f16", 2)) for i in range(0, 2 * count, 2)),
    ]
    return Kernel("rows", (Buffer("x", "f16", 64 * count), Buffer("out", "f16", 64 * count, writable=True)), block(body), WARP)


def held_of(x: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """The result of `rows_of_matrices`, computed element by element."""
    held = np.zeros((32, count, 2), np.float16)
    for number, matrix in enumerate(x.reshape(count, 8, 8)):
        for lane in range(32):
            row, column = lane // 4, lane % 4 * 2
            held[lane, number] = matrix[column : column + 2, row] if transposed else matrix[row, column : column + 2]
    return held.ravel()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_in_the_interpreter(count: int, transposed: bool) -> None:
    x, out = np.arange(64 * count, dtype=np.float16), np.zeros(64 * count, np.float16)
    report = run(rows_of_matrices(count, transposed, True), [x, out])
    assert report.is_clean and not report.unwritten, report
    np.testing.assert_array_equal(out, held_of(x, count, transposed))


def test_other_lanes_read_what_a_lane_gives_the_address_of() -> None:
    report = run(rows_of_matrices(4, False, False), [np.zeros(256, np.float16), np.zeros(256, np.float16)])
    assert ["race" in fault and "reads shared buffer s" in fault for fault in report.faults] == [True], report.faults


def test_what_is_not_written_is_not_multiplied() -> None:
    kernel = fragments("tf32", 1)
    body = block(tuple(s for s in statements(kernel.body) if isinstance(s, (Allocate, Store, Invoke)) and written_by(s) != ("b",)))
    arrays, _ = fragment_inputs("tf32", 1, True)
    report = run(replace(kernel, body=body), arrays)
    assert ["uninitialised" in fault and "register buffer b" in fault for fault in report.faults] == [True], report.faults


def test_a_block_has_whole_warps() -> None:
    kernel = fragments("tf32", 1)
    with pytest.raises(ValueError, match="blocks of 48 threads, which are no whole warps"):
        run(replace(kernel, launch=Launch((1, 1, 1), (48, 1, 1))), fragment_inputs("tf32", 1, True)[0])


def test_an_exception_in_a_meaning_is_not_lost() -> None:
    kernel = fragments("tf32", 1)

    def broken(*operands: np.ndarray) -> np.ndarray:
        raise ArithmeticError("broken")

    def change(root: Statement) -> Statement:
        return replace(root, intrinsic=replace(root.intrinsic, name="broken", meaning=broken)) if isinstance(root, Invoke) else root

    body = block(tuple(change(s) for s in statements(kernel.body) if isinstance(s, (Allocate, Store, Invoke))))
    with pytest.raises(ArithmeticError, match="broken"):
        run(replace(kernel, body=body), fragment_inputs("tf32", 1, True)[0])


def rounding(count: int) -> Kernel:
    """out = x rounded to TF32."""
    grid = Launch((count // 32, 1, 1), (32, 1, 1))
    thread = Var("block_x", count // 32) * 32 + thread_variable(grid)
    body = block(
        Allocate(Buffer("y", "f32", 1, "register")),
        mma.round_to_tf32(Place("y", at(0)), Load("x", (thread,), "f32")),
        Store("out", thread, Load("y", (at(0),), "f32")),
    )
    return Kernel("rounding", (Buffer("x", "f32", count), Buffer("out", "f32", count, writable=True)), body, grid)


def rounding_inputs() -> np.ndarray:
    """Every kind of float32 except NaN, including values around midpoints."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 1 << 13, dtype=np.uint64).astype(np.uint32)
    low = generator.choice(np.array([0, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32), 1 << 13)
    values = np.concatenate([bits, bits & np.uint32(0xFFFFE000) | low]).view(np.float32)
    return np.where(np.isnan(values), np.float32(1), values)


def nearest_tf32(x: np.ndarray) -> np.ndarray:
    """In float64: the nearest multiple of the unit in the tenth place, ties away from zero."""
    magnitude = np.abs(x).astype(np.float64)
    unit = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(magnitude, 2.0**-126))), -126) - 10)
    with np.errstate(all="ignore"):
        nearest = np.floor(magnitude / unit + 0.5) * unit
    nearest = np.where(np.isinf(x) | (nearest >= 2.0**128), np.inf, nearest).astype(np.float32)
    return np.copysign(nearest, x)


def test_rounding_to_tf32_in_the_interpreter() -> None:
    x = rounding_inputs()
    out = np.zeros_like(x)
    assert run(rounding(len(x)), [x, out]).is_clean
    assert_bits(out, nearest_tf32(x))


# --- analysis and compilation -----------------------------------------------------------------------------------------


def test_matrices_are_loaded_without_bank_conflicts() -> None:
    """4 matrices of 8 rows of 16 bytes take 4 wavefronts, because the row pitch avoids bank conflicts; in both of two steps, by two warps."""
    found = [access for access in accesses(product("f16")) if access.kind == "load" and access.space == "shared"]
    assert [(access.buffer, access.bytes, access.requests, access.lanes, access.transactions) for access in found] == [
        ("a_tile", 16, 4, 128, 16),
        ("b_tile", 16, 4, 128, 16),
    ]


@pytest.mark.parametrize(("kind", "transposed"), PRODUCTS)
def test_nvrtc_keeps_fragments_in_registers(kind: str, transposed: bool) -> None:
    passed, log = cuda_binary(print_cuda([product(kind, transposed), fragments(kind), rounding(32)]))
    assert passed, log
    assert log.count("0 bytes stack frame, 0 bytes spill stores") == 3 and "warning" not in log, log


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_random_fragments_on_the_gpu(kind: str) -> None:
    arrays, expected = fragment_inputs(kind, 64, True)
    launch(fragments(kind, 64), arrays)
    assert_bits(arrays[-1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "transposed"), PRODUCTS)
def test_a_product_on_the_gpu(kind: str, transposed: bool) -> None:
    arrays, expected = product_inputs(kind, transposed)
    launch(product(kind, transposed), arrays)
    assert_bits(arrays[-1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_on_the_gpu(count: int, transposed: bool) -> None:
    x, found = np.arange(64 * count, dtype=np.float16), np.zeros(64 * count, np.float16)
    launch(rows_of_matrices(count, transposed, True), [x, found])
    np.testing.assert_array_equal(found, held_of(x, count, transposed))


@pytest.mark.gpu
def test_inexact_sums_on_the_gpu_are_close() -> None:
    for kind in KINDS:
        arrays, expected = fragment_inputs(kind, 64, False)
        launch(fragments(kind, 64), arrays)
        np.testing.assert_allclose(arrays[-1], expected, rtol=0, atol=3e-5)


@pytest.mark.gpu
def test_tf32_factors_are_cut_off_on_the_gpu() -> None:
    """1 + 2^-11 is read as 1 in either factor."""
    shape = mma.SHAPES["tf32"]
    a, b = np.full((16, 8), 1 + 2.0**-11, np.float32), np.full((8, 8), -1 - 2.0**-11, np.float32)
    arrays = [shape.a.of(a).ravel(), shape.b.of(b).ravel(), np.zeros(128, np.float32), np.zeros(128, np.float32)]
    arrays = [np.ascontiguousarray(array) for array in arrays]
    launch(fragments("tf32", 1), arrays)
    assert_bits(arrays[-1], np.full(128, -8, np.float32))


@pytest.mark.gpu
def test_rounding_to_tf32_on_the_gpu() -> None:
    """Equal in the 19 bits that a product reads."""
    x = rounding_inputs()
    found = np.zeros_like(x)
    launch(rounding(len(x)), [x, found])
    np.testing.assert_array_equal(found.view(np.uint32) >> 13, nearest_tf32(x).view(np.uint32) >> 13)
