"""Products of warpgroups: fragments, every layout of the factors by itself, and a product of matrices with copies by another warpgroup; in the interpreter,
compiled, and on a GPU bit for bit."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.instruction_values import as_factor, assert_bits, integers, stored
from tests.on_device import cuda_binary, launch
from tests.test_tensor_copies import swizzled_rows
from tilewright.codegen.assemble import block
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import launching, mbarrier, wgmma
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.mma import SHAPES
from tilewright.codegen.intrinsics.tensor_copy import copy_box
from tilewright.codegen.intrinsics.wgmma import DEPTHS, STORED, M, Tile
from tilewright.hardware import machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import Expr, Load, Var, compare, const
from tilewright.ir.expr import index_const as at
from tilewright.ir.kernel import (
    Allocate,
    Block,
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
    required_features,
    thread_variable,
)
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.registry import require_instructions

GROUP = Launch((1, 1, 1), (128, 1, 1))
WIDE = {"tf32": Tile(128), "f16": Tile(128), "bf16": Tile(128)}


def test_sums_are_held_once_and_as_in_the_manual() -> None:
    """Thread 45 (warp 1, group 3, place 1): PTX ISA, "WGMMA .m64nNk16 register fragment layout for accumulator matrix D"."""
    for n in (8, 56, 256):
        fragment = wgmma.sums_fragment(n)
        counted = np.zeros((M, n), np.int64)
        np.add.at(counted, (fragment.rows, fragment.columns), 1)
        assert (counted == 1).all()
    rows, columns = wgmma.sums_fragment(16).rows[45].tolist(), wgmma.sums_fragment(16).columns[45].tolist()
    assert list(zip(rows, columns, strict=True)) == [(19, 2), (19, 3), (27, 2), (27, 3), (19, 10), (19, 11), (27, 10), (27, 11)]


def put_sums(n: int, thread: Expr, first_row: Expr, rows: int = M) -> Statement:
    """Stores the sums of a warpgroup in out[rows, n] from the row on; the columns by pairs."""
    i, half = Var("i", n // 8), Var("half", 2)
    row = thread // 32 % 4 * 16 + thread % 32 // 4 + half * 8
    put = Store("out", (first_row + row) * n + thread % 4 * 2 + i * 8, Load("sums", (i * 4 + half * 2,), "f32", 2))
    return For(i, at(n // 8), For(half, at(2), If(compare("lt", first_row + row, rows), put), "unroll"), "unroll")


# --- one product ------------------------------------------------------------------------------------------------------


def elements(kind: str, tile: Tile, rows: int, deep: int) -> int:
    """Elements of a factor in shared memory."""
    row = tile.swizzle // size_of(STORED[kind])
    return len(apart(np.zeros((rows, 1)), tile)) * row if tile.k_major else -(-rows // row) * deep * row


def apart(matrix: np.ndarray, tile: Tile) -> np.ndarray:
    """The rows with others between each eight of them, which products do not read."""
    between = np.full((tile.group - 8, matrix.shape[1]), 3, matrix.dtype)
    parts = [part for begin in range(0, len(matrix), 8) for part in (matrix[begin : begin + 8], between)]
    return np.concatenate(parts[:-1])


def deep_of(kind: str, tiles: tuple[Tile, Tile]) -> int:
    """k of `products`: a row of K-major tiles, else two products."""
    rows = [tile.swizzle // size_of(STORED[kind]) for tile in tiles if tile.k_major]
    return min(rows, default=2 * DEPTHS[kind])


def products(kind: str, n: int, tiles: tuple[Tile, Tile], omit: str = "") -> Kernel:
    """out[64, n] = the products of factors that lie in the parameters as in shared memory."""
    dtype, depth, deep = STORED[kind], DEPTHS[kind], deep_of(kind, tiles)
    thread = thread_variable(GROUP)
    sizes = {"a": elements(kind, tiles[0], M, deep), "b": elements(kind, tiles[1], n, deep)}
    body: list[Statement] = [Allocate(Buffer("sums", "f32", n // 2, "register"))]
    for name, size in sizes.items():
        i = Var("i", -(-size // 128))
        body.append(Allocate(Buffer(f"{name}_tile", dtype, size, "shared", alignment=1024)))
        fill = Store(f"{name}_tile", i * 128 + thread, Load(f"{name}_in", (i * 128 + thread,), dtype))
        body.append(For(i, at(-(-size // 128)), If(compare("lt", i * 128 + thread, size), fill)))
    body += [] if omit == "publish" else [mbarrier.publish()]
    body += [] if omit == "barrier" else [mbarrier.group_barrier(at(1))]
    step = Var("step", deep // depth)
    places = [
        Place(f"{name}_tile", step * depth * (1 if tile.k_major else tile.swizzle // size_of(dtype))) for name, tile in zip("ab", tiles, strict=True)
    ]
    start = compare("gt", step, 0) if omit != "start" else const(True, "bool")
    body.append(wgmma.fence())
    body.append(For(step, at(deep // depth), wgmma.multiply(kind, n, Place("sums", at(0)), places[0], places[1], start, tiles), "unroll"))
    body += [] if omit == "commit" else [wgmma.commit()]
    overwritten = Store("a_tile", thread, Load("a_in", (thread,), dtype))
    done = wgmma.await_sums(n, Place("sums", at(0)))
    body += [overwritten, done] if omit == "overwritten" else [] if omit == "wait" else [done]
    body.append(put_sums(n, thread, at(0)))
    inputs = [Buffer(f"{name}_in", dtype, size) for name, size in sizes.items()]
    return Kernel(f"products_{kind}", (*inputs, Buffer("out", "f32", M * n, writable=True)), block(body), GROUP)


def laid_out(matrix: np.ndarray, tile: Tile) -> np.ndarray:
    """A factor [rows, k] as it lies in shared memory."""
    row = tile.swizzle // matrix.itemsize
    if tile.k_major:
        return swizzled_rows(apart(matrix, tile), tile.swizzle).ravel()
    panels = [np.zeros((matrix.shape[1], row), matrix.dtype) for _ in range(-(-len(matrix) // row))]
    for number, panel in enumerate(panels):
        part = matrix[number * row : (number + 1) * row].T
        panel[:, : part.shape[1]] = part
    return np.concatenate([swizzled_rows(panel, tile.swizzle).ravel() for panel in panels])


def product_inputs(kind: str, n: int, tiles: tuple[Tile, Tile]) -> tuple[list[np.ndarray], np.ndarray]:
    deep, dtype = deep_of(kind, tiles), STORED[kind]
    a, b = stored(integers((M, deep), 60, n), dtype), stored(integers((n, deep), 60, n + 1), dtype)
    a_in, b_in = (np.ascontiguousarray(laid_out(x, tile)) for x, tile in ((a, tiles[0]), (b, tiles[1])))
    for array, tile, rows in ((a_in, tiles[0], M), (b_in, tiles[1], n)):
        assert len(array) == elements(kind, tile, rows, deep)
    return [a_in, b_in, np.zeros(M * n, np.float32)], (as_factor(a, kind) @ as_factor(b, kind).T).astype(np.float32).ravel()


def wide(swizzle: int) -> Tile:
    """A factor of 16 bits that is not K-major, in panels one after another, of as many rows as two products have."""
    return Tile(swizzle, False, 2 * 16 * swizzle // 2)


MODES: dict[str, tuple[str, int, tuple[Tile, Tile]]] = {
    **{f"{kind}, {swizzle} B": (kind, 16, (Tile(swizzle), Tile(swizzle))) for kind in DEPTHS for swizzle in (32, 64, 128)},
    "unlike swizzles": ("f16", 24, (Tile(32), Tile(32))),
    **{f"a M-major, {swizzle} B": ("f16", 16, (replace(wide(swizzle), panel=swizzle // 2 * 32), Tile(64))) for swizzle in (32, 64, 128)},
    **{f"b N-major, {swizzle} B": ("bf16", 128, (Tile(64), replace(wide(swizzle), panel=swizzle // 2 * 32))) for swizzle in (32, 64, 128)},
    "b N-major, one panel": ("f16", 64, (Tile(64), Tile(128, False))),
    "both MN-major": ("f16", 192, (wide(128), wide(128))),
    **{f"{n} columns": ("bf16", n, (Tile(128), Tile(128))) for n in (8, 56, 200, 256)},
    **{f"b in groups, {swizzle} B": ("f16", 24, (Tile(swizzle), Tile(swizzle, group=10))) for swizzle in (32, 64, 128)},
    "a in groups": ("tf32", 16, (Tile(128, group=11), Tile(128))),
    "both in groups": ("bf16", 256, (Tile(128, group=9), Tile(128, group=10))),
    "tf32, 256 columns": ("tf32", 256, (Tile(128), Tile(128))),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_product_in_the_interpreter(mode: str) -> None:
    arrays, expected = product_inputs(*MODES[mode])
    report = run(products(*MODES[mode]), arrays)
    assert report.is_clean and not report.unwritten, report
    assert_bits(arrays[-1], expected)


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ("wait", "not awaited: .* reads register buffer sums"),
        ("commit", "not awaited: .* reads register buffer sums"),
        ("overwritten", "race: .* writes shared buffer a_tile .* which products of tensor cores touch without a barrier"),
        ("publish", r"not published: .* reads shared buffer a_tile .* through an engine, which thread \d+ wrote"),
        ("barrier", "race: .* reads shared buffer [ab]_tile"),
        ("start", "uninitialised: .* reads register buffer sums"),
    ],
)
def test_the_interpreter_reports_what_a_warpgroup_does_wrong(omit: str, message: str) -> None:
    mode = MODES["f16, 128 B"]
    report = run(products(*mode, omit=omit), product_inputs(*mode)[0])
    assert [fault for fault in report.faults if re.search(message, fault)], report.faults


def test_products_that_do_not_exist_are_refused() -> None:
    place = Place("x", at(0))
    for n, tiles, message in ((12, (Tile(32), Tile(32)), "no product of 12 columns"), (8, (Tile(32, False), Tile(32)), "factors of f32 are K-major")):
        with pytest.raises(ValueError, match=message):
            wgmma.multiply("tf32", n, place, place, place, const(True, "bool"), tiles)
    with pytest.raises(ValueError, match="32, 64 or 128 bytes, not 16"):
        Tile(16)
    with pytest.raises(ValueError, match="24 to 256 registers"):
        launching.more_registers(260)
    assert required_features(products(*MODES["8 columns"])) == ("sm_90", "sm_90a")
    require_instructions(products(*MODES["8 columns"]), machine("h100"))
    with pytest.raises(ValueError, match="which needs sm_90a"):
        require_instructions(products(*MODES["8 columns"]), machine("b200"))


# --- a product of matrices --------------------------------------------------------------------------------------------

STAGES = 3


def matrix_product(kind: str, sizes: tuple[int, int, int], n: int = 64, consumers: int = 2, omit: str = "", registers: bool = True) -> Kernel:
    """out[m, n] = a[m, k] b[n, k]^T: one warpgroup copies tiles of 64 * consumers by 128 bytes and n by 128 bytes into three stages, and each consumer
    multiplies 64 rows. A block computes 64 * consumers rows and all columns."""
    m, columns, k = sizes
    assert columns == n
    dtype, depth = STORED[kind], DEPTHS[kind]
    wide = 128 // size_of(dtype)
    steps, rows = -(-k // wide), M * consumers
    grid = Launch((-(-m // rows), 1, 1), (128 * (1 + consumers), 1, 1))
    thread, step, part = thread_variable(grid), Var("step", steps), Var("part", wide // depth)
    stage, turn, group, first = step % STAGES, step // STAGES, Var("group", 1 + consumers), Var("first", m + rows)
    a, b = TensorMap("map_a", "a", dtype, (k, m), (1, k), (wide, rows), 128), TensorMap("map_b", "b", dtype, (k, n), (1, k), (wide, n), 128)
    setup = [mbarrier.initialise(Place(name, at(i)), count) for name, count in (("full", 1), ("empty", 4 * consumers)) for i in range(STAGES)]
    produce = block(
        mbarrier.wait(Place("empty", stage), (turn + 1) % 2, "thread") if omit != "wait for empty" else block(),
        mbarrier.expect(Place("full", stage), a.bytes + b.bytes),
        copy_box(Place("a_tiles", stage * (rows * wide)), a, Place("full", stage), [step * wide, first]),
        copy_box(Place("b_tiles", stage * (n * wide)), b, Place("full", stage), [step * wide, at(0)]),
    )
    multiply = wgmma.multiply(
        kind,
        n,
        Place("sums", at(0)),
        Place("a_tiles", stage * (rows * wide) + group * (M * wide) + part * depth),
        Place("b_tiles", stage * (n * wide) + part * depth),
        compare("gt", step + part, 0),
        (WIDE[kind], WIDE[kind]),
    )
    arrive = If(compare("eq", thread % 32, 0), mbarrier.arrive(Place("empty", stage)))
    consume = block(
        mbarrier.wait(Place("full", stage), turn % 2, "warpgroup") if omit != "wait for full" else block(),
        wgmma.fence(),
        For(part, at(wide // depth), multiply, "unroll"),
        wgmma.commit(),
        wgmma.await_groups(0 if omit != "wait for products" else 1),
        arrive if omit != "arrive" else block(),
    )
    allocated = (
        Buffer("a_tiles", dtype, STAGES * rows * wide, "shared", alignment=1024),
        Buffer("b_tiles", dtype, STAGES * n * wide, "shared", alignment=1024),
    )
    body = block(
        Allocate(mbarrier.barriers("full", STAGES)),
        Allocate(mbarrier.barriers("empty", STAGES)),
        *map(Allocate, allocated),
        Let(group, thread // 128),
        Let(first, Var("block_x", grid.grid[0]) * rows),
        If(compare("eq", thread, 0), block(*setup, mbarrier.publish())),
        block_barrier(),
        If(
            compare("eq", group, consumers),
            block(
                *([launching.fewer_registers(40)] if registers else []),
                If(compare("eq", thread, 128 * consumers), For(step, at(steps), produce)),
            ),
            block(
                *([launching.more_registers(232)] if registers else []),
                Allocate(Buffer("sums", "f32", n // 2, "register")),
                For(step, at(steps), consume),
                *([wgmma.await_sums(n, Place("sums", at(0)))] if omit != "wait for products" else []),
                put_sums(n, thread % 128, first + group * M, m),
            ),
        ),
    )
    parameters = (Buffer("a", dtype, m * k), Buffer("b", dtype, n * k), Buffer("out", "f32", m * n, writable=True))
    return Kernel(f"matrix_product_{kind}", parameters, body, grid, maps=(a, b), blocks_per_processor=1)


def matrix_inputs(kind: str, sizes: tuple[int, int, int]) -> tuple[list[np.ndarray], np.ndarray]:
    m, n, k = sizes
    a, b = stored(integers((m, k), 60, 1), STORED[kind]), stored(integers((n, k), 60, 2), STORED[kind])
    return [a.ravel(), b.ravel(), np.zeros(m * n, np.float32)], (as_factor(a, kind) @ as_factor(b, kind).T).astype(np.float32).ravel()


@pytest.mark.parametrize("kind", DEPTHS)
@pytest.mark.parametrize("sizes", [(128, 64, 256), (200, 64, 328), (40, 64, 72)])
def test_a_product_of_matrices_in_the_interpreter(kind: str, sizes: tuple[int, int, int]) -> None:
    arrays, expected = matrix_inputs(kind, sizes)
    report = run(matrix_product(kind, sizes), arrays)
    assert report.is_clean and not report.unwritten, report
    assert_bits(arrays[-1], expected)


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ("wait for empty", "(race: .* writes shared buffer a_tiles|deadlock: .* barrier full)"),
        ("wait for full", "race: .* reads shared buffer a_tiles .* which copies that complete on barrier full"),
        ("wait for products", "race: .* writes shared buffer [ab]_tiles .* which products of tensor cores touch"),
        ("arrive", "deadlock: .* barrier empty.0., of which 8 arrivals and 0 bytes are missing"),
    ],
)
def test_the_interpreter_reports_what_a_pipeline_does_wrong(omit: str, message: str) -> None:
    sizes = (128, 64, 512)
    report = run(matrix_product("f16", sizes, omit=omit), matrix_inputs("f16", sizes)[0])
    assert [fault for fault in report.faults if re.search(message, fault)], report.faults


def test_nvrtc_does_not_serialise_products_nor_spill() -> None:
    modes = [replace(products(*mode), name=f"mode{i}") for i, mode in enumerate(MODES.values())]
    whole = [matrix_product(kind, (512, n, 1024), n) for kind, n in (("tf32", 128), ("f16", 256), ("bf16", 192))]
    passed, log = cuda_binary(print_cuda([*modes, *whole]))
    assert passed and "warning" not in log and "serialized" not in log and "injected" not in log and "setmaxnreg" not in log, log
    assert log.count("0 bytes stack frame, 0 bytes spill stores") == len(modes) + len(whole), log


# --- a first factor in registers --------------------------------------------------------------------------------------


def product_of_registers(kind: str, n: int) -> Kernel:
    """out[64, n] = a b^T for one product whose a threads load from row-major memory to their registers."""
    dtype, depth, thread = STORED[kind], DEPTHS[kind], thread_variable(GROUP)
    whole, packed = products(kind, n, (Tile(128), Tile(128))), 4 // size_of(dtype)
    assert isinstance(whole.body, Block)
    lane, warp, count = thread % 32, thread // 32, SHAPES[kind].a.size
    body: list[Statement] = [Allocate(Buffer("a", dtype, count, "register", packed))]
    for element in range(0, count, packed):
        half, beyond = (element // 2 % 2, element // 4 * 8) if packed == 2 else (element % 2, element // 2 * 4)
        place = (warp * 16 + lane // 4 + half * 8) * depth + lane % 4 * packed + beyond
        body.append(Store("a", at(element), Load("a_in", (place,), dtype, packed)))
    for member in whole.body.statements:
        if isinstance(member, For) and isinstance(member.body, Invoke) and member.body.intrinsic.engine:
            b = Place("b_tile", at(0))
            member = wgmma.multiply(kind, n, Place("sums", at(0)), Place("a", at(0)), b, const(False, "bool"), (None, Tile(128)))
        body.append(member)
    body = [
        one for one in body if not (isinstance(one, For) and "a_tile" in str(one)) and not (isinstance(one, Allocate) and one.buffer.name == "a_tile")
    ]
    _, b_in, out = whole.parameters
    return Kernel(f"registers_{kind}", (Buffer("a_in", dtype, M * depth), b_in, out), block(body), GROUP)


def of_registers(kind: str, n: int) -> tuple[list[np.ndarray], np.ndarray]:
    depth, dtype = DEPTHS[kind], STORED[kind]
    deep = deep_of(kind, (Tile(128), Tile(128)))
    a, b = stored(integers((M, depth), 60, n), dtype), stored(integers((n, deep), 60, n + 1), dtype)
    expected = (as_factor(a, kind) @ as_factor(b[:, :depth], kind).T).astype(np.float32).ravel()
    return [a.ravel(), np.ascontiguousarray(laid_out(b, Tile(128))), np.zeros(M * n, np.float32)], expected


@pytest.mark.parametrize("kind", DEPTHS)
def test_a_factor_in_registers(kind: str) -> None:
    arrays, expected = of_registers(kind, 72)
    report = run(product_of_registers(kind, 72), arrays)
    assert report.is_clean, report.faults
    assert_bits(arrays[-1], expected)
    passed, log = cuda_binary(print_cuda([product_of_registers(kind, 72)]))
    assert passed and "serialized" not in log, log


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DEPTHS)
def test_a_factor_in_registers_on_the_gpu(kind: str) -> None:
    arrays, expected = of_registers(kind, 72)
    launch(product_of_registers(kind, 72), arrays)
    assert_bits(arrays[-1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_product_on_the_gpu(mode: str) -> None:
    arrays, expected = product_inputs(*MODES[mode])
    launch(products(*MODES[mode]), arrays)
    assert_bits(arrays[-1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DEPTHS)
def test_a_product_of_matrices_on_the_gpu(kind: str) -> None:
    for sizes in ((128, 64, 256), (200, 64, 328), (4000, 64, 1000)):
        arrays, expected = matrix_inputs(kind, sizes)
        launch(matrix_product(kind, sizes), arrays)
        assert_bits(arrays[-1], expected)
