"""The interpreter: correct kernels run without reports and give the right numbers; each planted fault is reported, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewright.codegen.interpreter import Report, run
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, binary, compare, const, logical_and, select
from tilewright.ir.kernel import (
    Allocate,
    AtomicAdd,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Launch,
    Let,
    Statement,
    Store,
    block_variable,
    thread_variable,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def at(index: int) -> Const:
    return Const(index, INDEX)


def f32(name: str, offset: Expr | int, lanes: int = 1) -> Load:
    return Load(name, (at(offset) if isinstance(offset, int) else offset,), "f32", lanes)


# --- a matrix product with double buffering ---------------------------------------------------------------------------

TILE, DEPTH, REGISTER = 32, 8, 4


def matrix_product(m: int, n: int, k: int, omit: str = "") -> Kernel:
    """C = A B for any extents: 8 x 8 threads, 4 x 4 elements each, slices of 8 in two halves of shared memory. `omit` plants a fault."""
    launch = Launch((-(-n // TILE), -(-m // TILE), 1), (8, 8, 1))
    x, y = thread_variable(launch, "x"), thread_variable(launch, "y")
    row0, column0 = block_variable(launch, "y") * TILE, block_variable(launch, "x") * TILE
    thread, steps = y * 8 + x, -(-k // DEPTH)
    s, i, j, q, p = Var("s", steps), Var("i", REGISTER), Var("j", REGISTER), Var("q", DEPTH), Var("p", 4)

    def fill(half: Expr, step: Expr) -> Statement:
        row, depth = p * 8 + thread // 8, thread % 8
        a_row, a_depth = row0 + row, step * DEPTH + depth
        a = f32("a", a_row * k + a_depth)
        b_depth, b_column = step * DEPTH + p * 2 + thread // 32, column0 + thread % 32
        b = f32("b", b_depth * n + b_column)
        guard_a = logical_and(compare("lt", a_row, m), compare("lt", a_depth, k))
        guard_b = logical_and(compare("lt", b_depth, k), compare("lt", b_column, n))
        if omit == "guard":
            guard_a = compare("ge", at(1), 0)
        return For(
            p,
            at(4),
            Block(
                (
                    Store("sa", half * (TILE * DEPTH) + depth * TILE + row, select(guard_a, a, 0.0)),
                    Store("sb", half * (TILE * DEPTH) + (p * 2 + thread // 32) * TILE + thread % 32, select(guard_b, b, 0.0)),
                )
            ),
            "unroll",
        )

    product = For(
        q,
        at(DEPTH),
        Block(
            (
                Store("fa", at(0), f32("sa", (s % 2) * (TILE * DEPTH) + q * TILE + y * REGISTER, 4)),
                Store("fb", at(0), f32("sb", (s % 2) * (TILE * DEPTH) + q * TILE + x * REGISTER, 4)),
                For(i, at(4), For(j, at(4), Store("acc", i * 4 + j, f32("acc", i * 4 + j) + f32("fa", i) * f32("fb", j)))),
            )
        ),
    )
    row, column = row0 + y * REGISTER + i, column0 + x * REGISTER + j
    inside = logical_and(compare("lt", row, m), compare("lt", column, n))
    barrier: tuple[Statement, ...] = () if omit == "barrier" else (block_barrier(),)
    z = Var("z", 16)
    clear: tuple[Statement, ...] = () if omit == "clear" else (For(z, at(16), Store("acc", z, const(0.0, "f32"))),)
    body = Block(
        (
            Allocate(Buffer("sa", "f32", 2 * TILE * DEPTH, "shared")),
            Allocate(Buffer("sb", "f32", 2 * TILE * DEPTH, "shared")),
            Allocate(Buffer("acc", "f32", 16, "register")),
            Allocate(Buffer("fa", "f32", 4, "register")),
            Allocate(Buffer("fb", "f32", 4, "register")),
            *clear,
            fill(at(0), at(0)),
            block_barrier(),
            For(s, at(steps), Block((If(compare("lt", s, steps - 1), fill((s + 1) % 2, s + 1)), product, *barrier))),
            For(i, at(4), For(j, at(4), If(inside, Store("c", row * n + column, f32("acc", i * 4 + j))))),
        )
    )
    return Kernel("product", (Buffer("a", "f32", m * k), Buffer("b", "f32", k * n), Buffer("c", "f32", m * n, writable=True)), body, launch)


def run_product(m: int, n: int, k: int, omit: str = "") -> tuple[Report, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(m * n + k)
    a = generator.standard_normal((m, k)).astype(np.float32)
    b = generator.standard_normal((k, n)).astype(np.float32)
    c = np.full((m, n), np.nan, np.float32)
    return run(matrix_product(m, n, k, omit), [a, b, c]), c, a.astype(np.float64) @ b


@pytest.mark.parametrize("extents", [(64, 64, 32), (33, 47, 19), (1, 5, 8), (70, 30, 1)])
def test_matrix_product_is_clean_and_right(extents: tuple[int, int, int]) -> None:
    report, result, reference = run_product(*extents)
    assert report.faults == () and not report.unwritten
    np.testing.assert_allclose(result, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("omit", "fault"), [("barrier", "race"), ("guard", "out of bounds"), ("clear", "uninitialised")])
def test_matrix_product_with_a_fault(omit: str, fault: str) -> None:
    report, _, _ = run_product(33, 47, 19, omit)
    assert any(f": {fault}:" in message for message in report.faults), report.faults
    if omit != "barrier":  # a missing barrier shows as more than one kind of fault
        assert all(f": {fault}:" in message for message in report.faults), report.faults


def test_library_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    launch = Launch((1, 1, 1), (4, 1, 1))
    kernel = Kernel("cached", (Buffer("out", "f32", 4, writable=True),), Store("out", thread_variable(launch), const(1.5, "f32")), launch)
    for _ in range(2):
        out = np.zeros(4, np.float32)
        assert run(kernel, [out]).is_clean and (out == 1.5).all()
    assert len(list((tmp_path / "interpreter").glob("*.hashed"))) == 1


# --- one fault each ---------------------------------------------------------------------------------------------------

LAUNCH = Launch((2, 1, 1), (32, 1, 1))
T, B = thread_variable(LAUNCH), block_variable(LAUNCH)


def gpu(*body: Statement, size: int = 64) -> Kernel:
    return Kernel("planted", (Buffer("x", "f32", 64), Buffer("out", "f32", size, writable=True)), Block(body), LAUNCH)


def faults_of(kernel: Kernel) -> tuple[str, ...]:
    x = np.arange(64, dtype=np.float32)
    return run(kernel, [x, np.zeros(kernel.parameters[1].size, np.float32)]).faults


SHARED = Allocate(Buffer("tile", "f32", 32, "shared"))
LOCAL = Allocate(Buffer("r", "f32", 4, "register"))
GLOBAL = B * 32 + T
PLANTED: dict[str, tuple[Kernel, str]] = {
    "global read": (
        gpu(Store("out", GLOBAL, f32("x", GLOBAL + 1))),
        "out of bounds: block (1, 0, 0) thread (31, 0, 0) reads global buffer x (64 elements) at offset 64",
    ),
    "global write": (gpu(Store("out", GLOBAL + 1, f32("x", GLOBAL))), "out of bounds: block (1, 0, 0) thread (31, 0, 0) writes global buffer out"),
    "negative offset": (gpu(Store("out", GLOBAL, f32("x", GLOBAL - 1))), "at offset -1"),
    "shared read": (
        gpu(SHARED, Store("tile", T, const(0.0, "f32")), block_barrier(), Store("out", GLOBAL, f32("tile", T + 1))),
        "out of bounds: block (0, 0, 0) thread (31, 0, 0) reads shared",
    ),
    "register write": (
        gpu(LOCAL, Store("r", at(4), const(0.0, "f32")), Store("out", GLOBAL, const(0.0, "f32"))),
        "out of bounds: block (0, 0, 0) thread (0, 0, 0) writes register buffer r",
    ),
    "shared uninitialised": (
        gpu(SHARED, If(compare("lt", T, 31), Store("tile", T, const(0.0, "f32"))), block_barrier(), Store("out", GLOBAL, f32("tile", 31 - T))),
        "uninitialised: block (0, 0, 0) thread (0, 0, 0) reads shared buffer tile (32 elements) at offset 31",
    ),
    "register uninitialised": (
        gpu(LOCAL, Store("r", at(1), const(0.0, "f32")), Store("out", GLOBAL, f32("r", 0))),
        "uninitialised: block (0, 0, 0) thread (0, 0, 0) reads register",
    ),
    "output uninitialised": (
        gpu(Store("out", GLOBAL, f32("out", GLOBAL))),
        "uninitialised: block (0, 0, 0) thread (0, 0, 0) reads global buffer out",
    ),
    "shared race": (
        gpu(SHARED, Store("tile", T, f32("x", T)), block_barrier(), Store("tile", T, f32("x", T)), Store("out", GLOBAL, f32("tile", 31 - T))),
        "race: block (0, 0, 0) thread (16, 0, 0)",
    ),
    "write after read": (
        gpu(SHARED, Store("tile", T, f32("x", T)), block_barrier(), Store("out", GLOBAL, f32("tile", (T + 1) % 32)), Store("tile", T, f32("x", T))),
        "race: block (0, 0, 0) thread (1, 0, 0) writes shared buffer tile (32 elements) at offset 1, which thread 0 touches",
    ),
    "two writers": (
        gpu(SHARED, Store("tile", T // 2, f32("x", T)), Store("out", GLOBAL, const(0.0, "f32"))),
        "race: block (0, 0, 0) thread (1, 0, 0) writes shared",
    ),
    "global race": (gpu(Store("out", B * 32, f32("x", T)), size=64), "race: block (0, 0, 0) thread (1, 0, 0) writes global buffer out"),
    "between blocks": (
        gpu(Store("out", T, f32("x", T))),
        "race between blocks: block (1, 0, 0) thread (0, 0, 0) writes global buffer out (64 elements) at offset 0, which block 0 touches",
    ),
    "misaligned": (
        gpu(LOCAL, Store("r", at(0), f32("x", (GLOBAL // 4) * 4 % 56 + 2, 4)), Store("out", GLOBAL, f32("r", 0))),
        "misaligned: block (0, 0, 0) thread (0, 0, 0) reads global buffer x (64 elements) at offset 2, 4 lanes",
    ),
    "barrier in a branch": (
        gpu(SHARED, If(compare("lt", T, 16), block_barrier()), Store("out", GLOBAL, const(0.0, "f32"))),
        "barrier divergence: block (0, 0, 0) thread (16, 0, 0) decides for 0, thread 0 for 1",
    ),
    "barrier in a loop": (
        gpu(For(Var("i"), T // 16 + 1, block_barrier()), Store("out", GLOBAL, const(0.0, "f32"))),
        "barrier divergence: block (0, 0, 0) thread (16, 0, 0) decides for 2, thread 0 for 1",
    ),
    "read-only": (gpu(Store("x", GLOBAL, const(0.0, "f32"))), "read-only: block (0, 0, 0) thread (0, 0, 0) writes global buffer x"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault(name: str) -> None:
    kernel, message = PLANTED[name]
    faults = faults_of(kernel)
    assert faults and message in faults[0], faults
    assert len(faults) == 1, faults


def test_clean_counterparts() -> None:
    """The kernels without the planted faults give no reports, so that the checks are not merely overeager."""
    local = Store("r", at(0), f32("x", (GLOBAL // 4) * 4, 4))
    clean = [
        gpu(SHARED, Store("tile", T, f32("x", T)), block_barrier(), Store("out", GLOBAL, f32("tile", 31 - T))),
        gpu(LOCAL, local, Store("out", GLOBAL, f32("r", 3))),
        gpu(SHARED, If(compare("lt", B, 1), block_barrier()), Store("out", GLOBAL, const(0.0, "f32"))),
        gpu(For(Var("i"), B + 1, block_barrier()), Store("out", GLOBAL, const(0.0, "f32"))),
        gpu(Store("out", GLOBAL, select(compare("lt", GLOBAL, 63), f32("x", GLOBAL + 1), 0.0))),
        gpu(Store("out", GLOBAL, const(0.0, "f32")), block_barrier(), Store("out", GLOBAL, f32("out", GLOBAL) + 1.0)),
    ]
    for kernel in clean:
        assert faults_of(kernel) == ()


def test_thread_values_live_across_barriers() -> None:
    """A scalar, a boolean, a vector and a register buffer of each thread survive barriers, also in a loop; `else` branches too."""
    kept, flag, four = Var("kept", None, "f32"), Var("flag", None, "bool"), Var("four", None, "f32", 4)
    level, double = Var("level", 3), Var("double", None, "f32")
    body = Block(
        (
            SHARED,
            LOCAL,
            Let(kept, f32("x", GLOBAL)),
            Let(flag, compare("gt", kept, const(20.0, "f32"))),
            Let(four, f32("x", (GLOBAL // 4) * 4, 4)),
            Store("r", at(0), four),
            Store("tile", T, kept),
            For(
                level,
                at(3),
                Block(
                    (
                        block_barrier(),
                        Let(double, f32("tile", (T + 1) % 32) * 2.0),
                        block_barrier(),
                        If(
                            compare("eq", B, 0),
                            Block((Store("tile", T, double), block_barrier())),
                            Block((Store("tile", T, f32("tile", T) + 1.0), block_barrier())),
                        ),
                    )
                ),
            ),
            Store("r", at(0), binary("max", four, const(1.5, "f32"))),
            Store("r", at(1), f32("r", 1) + 0.5),
            Store("out", GLOBAL, select(flag, f32("tile", T) + kept, f32("r", 1))),
        )
    )
    x = np.arange(64, dtype=np.float32)
    out = np.zeros(64, np.float32)
    assert run(Kernel("alive", (Buffer("x", "f32", 64), Buffer("out", "f32", 64, writable=True)), body, LAUNCH), [x, out]).faults == ()
    tile = x.reshape(2, 32).copy()
    for _ in range(3):
        tile[0] = np.roll(tile[0], -1) * 2
        tile[1] += 1
    want = np.where(x > 20, tile.reshape(64) + x, np.maximum(x // 4 * 4 + 1, 1.5) + 0.5)
    np.testing.assert_array_equal(out, want)


# --- CPU kernels ------------------------------------------------------------------------------------------------------

ROW, COLUMN = Var("i", 8), Var("j", 8)


def cpu(body: Statement) -> Kernel:
    return Kernel("loops", (Buffer("x", "f32", 64), Buffer("out", "f32", 64, writable=True)), body)


def parallel(body: Statement) -> For:
    return For(ROW, at(8), For(COLUMN, at(8), body, "parallel"), "parallel")


def test_cpu_kernels() -> None:
    assert faults_of(cpu(parallel(Store("out", ROW * 8 + COLUMN, f32("x", ROW * 8 + COLUMN, 1))))) == ()
    unaligned = Store("r", at(0), f32("x", COLUMN * 7 + 1, 4))
    assert faults_of(cpu(parallel(Block((LOCAL, unaligned, Store("out", ROW * 8 + COLUMN, f32("r", 3))))))) == ()
    racing = faults_of(cpu(parallel(Store("out", ROW * 8, f32("x", ROW * 8 + COLUMN)))))
    assert len(racing) == 1 and "race: iteration 1 writes global buffer out (64 elements) at offset 0, which iteration 0" in racing[0]
    # an accumulator outside the parallel loop is shared
    total = Store("r", at(0), f32("r", 0) + f32("x", ROW))
    outside = Block((LOCAL, Store("r", at(0), const(0.0, "f32")), For(ROW, at(8), total, "parallel"), Store("out", at(0), f32("r", 0))))
    assert any(": race:" in fault for fault in faults_of(cpu(outside)))
    # two loops in sequence do not race
    first = For(ROW, at(8), Store("out", ROW, f32("x", ROW)), "parallel")
    second = For(ROW, at(8), Store("out", ROW, f32("out", ROW) + 1.0), "parallel")
    assert faults_of(cpu(Block((first, second)))) == ()


def test_unwritten_outputs_are_counted_and_scalars_passed() -> None:
    step = Var("step", 4)
    kernel = Kernel(
        "step",
        (Buffer("x", "f32", 64), Buffer("out", "f32", 64, writable=True)),
        For(ROW, at(8), Store("out", step * 8 + ROW, f32("x", ROW))),
        None,
        (step,),
    )
    x, out = np.arange(64, dtype=np.float32), np.full(64, -1, np.float32)
    report = run(kernel, [x, out], [3])
    assert report.is_clean and report.unwritten == {"out": 56}
    np.testing.assert_array_equal(out[24:32], np.arange(8))
    assert not run(kernel, [x, out], [3], initialised=["out"]).unwritten
    with pytest.raises(ValueError, match="64 contiguous f32"):
        run(kernel, [x[:8], out], [3])


@pytest.mark.parametrize("separated", [False, True])
def test_scopes_that_share_a_place_need_a_barrier(separated: bool) -> None:
    """Buffers of scopes that follow one another have one place, and so has one that a loop allocates in each turn."""
    i, between = Var("i", 2), [block_barrier()] if separated else []

    def scope(name: str) -> list[Statement]:
        return [Allocate(Buffer(name, "f32", 32, "shared")), Store(name, T, f32("x", T)), block_barrier(), Store("out", GLOBAL, f32(name, 31 - T))]

    in_turn = gpu(Block(tuple(scope("first"))), *between, Block(tuple(scope("second"))))
    again = gpu(For(i, at(2), Block((*scope("tile"), *between))))
    for kernel, name in ((in_turn, "first"), (again, "tile")):
        report = run(kernel, [np.arange(64, dtype=np.float32), np.zeros(64, np.float32)])
        assert report.is_clean == separated
        assert separated or "race" in report.faults[0] and f"shared buffer {name}" in report.faults[0]


def test_vectors_of_registers() -> None:
    """Register buffers of vectors, as the CPU's contraction uses: broadcast, multiply, lanes read one by one."""
    j, v = Var("j", 8), Var("v", 2)
    body = Block(
        (
            Allocate(Buffer("acc", "f32", 8, "register", 4)),
            For(v, at(2), Store("acc", v * 4, Apply("broadcast", (const(1.0, "f32"),), "f32", 4))),
            For(v, at(2), Store("acc", v * 4, f32("acc", v * 4, 4) + f32("x", 3) * f32("x", v * 4, 4))),
            For(j, at(8), Store("out", j, f32("acc", j))),
        )
    )
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    report = run(cpu(body), [x, out])
    assert report.is_clean
    np.testing.assert_array_equal(out[:8], 1 + 3 * x[:8])


# --- atomic additions -------------------------------------------------------------------------------------------------


def counting(*body: Statement, blocks: int = 3) -> Kernel:
    """Every thread of every block adds one to out[0], in vectors of two; then the body."""
    ones = Apply("broadcast", (const(1.0, "f32"),), "f32", 2)
    add = AtomicAdd("out", at(0), ones)
    return Kernel("count", (Buffer("out", "f32", 4, writable=True),), Block((add, *body)), Launch((blocks, 1, 1), (32, 1, 1)))


def test_atomic_additions_may_meet() -> None:
    out = np.zeros(4, np.float32)
    assert run(counting(), [out], initialised=["out"]).is_clean
    np.testing.assert_array_equal(out, [96.0, 96.0, 0.0, 0.0])


def test_atomic_additions_to_what_was_never_written_are_reported() -> None:
    report = run(counting(), [np.zeros(4, np.float32)])
    assert "uninitialised" in report.faults[0]


@pytest.mark.parametrize("barrier", [(), (block_barrier(),)], ids=["at once", "behind a barrier"])
def test_an_atomic_addition_may_not_meet_another_access(barrier: tuple[Statement, ...]) -> None:
    plain = Store("out", at(0), f32("out", 1))
    for blocks in (1, 2):
        first = compare("lt", thread_variable(Launch((1, 1, 1), (32, 1, 1))), 1)
        report = run(counting(*barrier, If(first, plain), blocks=blocks), [np.zeros(4, np.float32)], initialised=["out"])
        # a barrier separates accesses within one block, but not those of different blocks
        assert any("race" in fault for fault in report.faults) == (not barrier or blocks > 1)
