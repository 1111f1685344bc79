"""Barriers in shared memory: threads that wait for one another in the interpreter, what it reports of those that do not, and the instructions' code."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.on_device import cuda_binary, launch
from tilewright.codegen.assemble import block
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import mbarrier
from tilewright.codegen.intrinsics.barriers import block_barrier, cluster_barrier
from tilewright.ir.expr import Expr, Load, Var, compare, const
from tilewright.ir.expr import index_const as at
from tilewright.ir.kernel import Allocate, Buffer, For, If, Kernel, Launch, Let, Place, Statement, Store, thread_variable

STAGES, ROUNDS = 2, 7


def ping_pong(omit: str = "", blocks: int = 2, readers: int = 2) -> Kernel:
    """Warp 0 puts the sums of pairs of x into shared stages, and other warps store twice of them, a part of each. `omit`: what is left out."""
    grid = Launch((blocks, 1, 1), (32 * (1 + readers), 1, 1))
    thread = thread_variable(grid)
    lane, warp, step, base = Var("lane", 32), Var("warp", 1 + readers), Var("step", ROUNDS), Var("base", 32 * ROUNDS * blocks)
    stage, turn = step % STAGES, step // STAGES

    def wait(name: str, parity: Expr) -> list[Statement]:
        return [] if omit == f"wait for {name}" else [mbarrier.wait(Place(name, stage), parity, "warp")]

    def arrive(name: str) -> list[Statement]:
        return [] if omit == f"arrive at {name}" else [mbarrier.arrive(Place(name, stage))]

    setup = [
        statement
        for name, arrivals in (("full", 32), ("empty", 32 * readers))
        for number in range(STAGES)
        for statement in [mbarrier.initialise(Place(name, at(number)), arrivals + (omit == "count of " + name))]
    ]
    value = Load("x", (base + step * 32 + lane,), "f32")
    write = For(step, at(ROUNDS), block(*wait("empty", (turn + 1) % 2), Store("stages", stage * 32 + lane, value + 1.0), *arrive("full")))
    other = Load("stages", (stage * 32 + (31 - lane),), "f32")
    mine = compare("eq", step % readers, warp - 1)
    held: list[Statement] = [Store("held", at(0), other), If(mine, Store("out", base + step * 32 + lane, Load("held", (at(0),), "f32") * 2.0))]
    read = For(step, at(ROUNDS), block(*wait("full", turn % 2), *held, *arrive("empty")))
    body = block(
        Allocate(mbarrier.barriers("full", STAGES)),
        Allocate(mbarrier.barriers("empty", STAGES)),
        Allocate(Buffer("stages", "f32", 32 * STAGES, "shared")),
        Allocate(Buffer("held", "f32", 1, "register")),
        Let(lane, thread % 32),
        Let(warp, thread // 32),
        Let(base, Var("block_x", blocks) * (32 * ROUNDS)),
        *([] if omit == "initialisation" else [If(compare("eq", thread, 0), block(*setup))]),
        *([] if omit == "barrier" else [block_barrier()]),
        If(compare("eq", warp, 0), write, read),
    )
    size = 32 * ROUNDS * blocks
    return Kernel("ping_pong", (Buffer("x", "f32", size), Buffer("out", "f32", size, writable=True)), body, grid)


def ping_pong_arrays(blocks: int = 2) -> tuple[list[np.ndarray], np.ndarray]:
    x = np.random.default_rng(0).standard_normal(32 * ROUNDS * blocks).astype(np.float32)
    return [x, np.zeros_like(x)], ((x.reshape(-1, 32)[:, ::-1] + np.float32(1)) * np.float32(2)).ravel()


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_warps_pass_stages_to_one_another(readers: int) -> None:
    arrays, expected = ping_pong_arrays()
    report = run(ping_pong(readers=readers), arrays)
    assert report.is_clean and not report.unwritten, report
    np.testing.assert_array_equal(arrays[1], expected)


@pytest.mark.parametrize(
    ("omit", "message"),
    [
        ("wait for full", r"race: .* (reads|writes) shared buffer stages"),
        ("wait for empty", r"(deadlock: .* barrier full|race: .* writes shared buffer stages)"),
        ("arrive at full", r"deadlock: .* waits for a phase of parity 0 of barrier full\[0\], of which 32 arrivals and 0 bytes are missing"),
        ("arrive at empty", r"deadlock: .* waits for a phase of parity 0 of barrier empty\[0\], of which 64 arrivals and 0 bytes are missing"),
        ("count of full", r"deadlock: .* full\[0\], of which 1 arrivals and 0 bytes are missing"),
        ("initialisation", "uninitialised: .* reads shared buffer full"),
        ("barrier", "(race|uninitialised): .* shared buffer (full|empty)"),
    ],
)
def test_the_interpreter_reports_what_is_missing(omit: str, message: str) -> None:
    report = run(ping_pong(omit), ping_pong_arrays()[0])
    assert [fault for fault in report.faults if re.search(message, fault)], report.faults


def swapped(barrier: str, warps: int = 8) -> Kernel:
    """Each warpgroup reverses its part of x, through shared memory and a barrier of its own."""
    grid = Launch((1, 1, 1), (32 * warps, 1, 1))
    thread = thread_variable(grid)
    group, other = thread // 128, thread // 128 * 128 + (127 - thread % 128)
    between: dict[str, list[Statement]] = {"group": [mbarrier.group_barrier(group + 1)], "block": [block_barrier()], "none": []}
    body = block(
        Allocate(Buffer("s", "f32", 32 * warps, "shared")),
        If(
            compare("lt", thread, 128),
            block(Store("s", thread, Load("x", (thread,), "f32")), *between[barrier], Store("out", thread, Load("s", (other,), "f32"))),
            block(Store("s", thread, Load("x", (thread,), "f32") * 2.0), *between[barrier], Store("out", thread, Load("s", (other,), "f32"))),
        ),
    )
    return Kernel("swapped", (Buffer("x", "f32", 32 * warps), Buffer("out", "f32", 32 * warps, writable=True)), body, grid)


def test_warpgroups_have_barriers_of_their_own() -> None:
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    report = run(swapped("group"), [x, out])
    assert report.is_clean, report
    np.testing.assert_array_equal(out.reshape(2, 128), x.reshape(2, 128)[:, ::-1] * np.array([[1], [2]], np.float32))
    assert any("race" in fault and "shared buffer s " in fault for fault in run(swapped("none"), [x, out]).faults)
    assert "barrier divergence" in run(swapped("block"), [x, out]).faults[0]


def test_a_barrier_of_a_block_that_some_strands_do_not_reach_is_a_deadlock() -> None:
    grid = Launch((1, 1, 1), (64, 1, 1))
    thread = thread_variable(grid)
    body = block(
        Allocate(mbarrier.barriers("b", 1)),
        If(compare("eq", thread, 0), mbarrier.initialise(Place("b", at(0)), 1)),
        If(compare("lt", thread, 32), block_barrier()),
        Store("out", thread, const(0.0, "f32")),
    )
    report = run(Kernel("k", (Buffer("out", "f32", 64, writable=True),), body, grid), [np.zeros(64, np.float32)])
    assert ["deadlock" in fault and "a barrier of the block" in fault for fault in report.faults] == [True], report.faults


def exchanged(barrier: str, other: int, last: bool = True) -> Kernel:
    """Each block of a cluster of two stores its part of x in its shared memory, and reads it, or the other's if `other`, in reverse. `last`: no block
    ends before the other has read."""
    grid, blocks = Launch((2, 1, 1), (64, 1, 1)), Var("block_x", 2)
    thread, between = thread_variable(grid), {"block": [block_barrier()], "cluster": [cluster_barrier()], "none": []}
    body = block(
        Allocate(mbarrier.barriers("b", 1)),
        Allocate(Buffer("parts", "f32", 128, "cluster")),
        If(compare("eq", thread, 0), mbarrier.initialise(Place("b", at(0)), 1)),
        Store("parts", blocks * 64 + thread, Load("x", (blocks * 64 + thread,), "f32")),
        between[barrier],
        Store("out", blocks * 64 + thread, Load("parts", ((blocks + other) % 2 * 64 + (63 - thread),), "f32")),
        [cluster_barrier()] if last else [],
    )
    return Kernel("exchanged", (Buffer("x", "f32", 128), Buffer("out", "f32", 128, writable=True)), body, grid, cluster=2)


@pytest.mark.parametrize("barrier, other", [("block", 0), ("cluster", 0), ("cluster", 1)])
def test_blocks_of_a_cluster_have_barriers_of_their_own(barrier: str, other: int) -> None:
    x, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    report = run(exchanged(barrier, other), [x, out])
    assert report.is_clean, report
    np.testing.assert_array_equal(out.reshape(2, 64), x.reshape(2, 64)[:: 1 - 2 * other, ::-1])


@pytest.mark.parametrize("barrier, other, last, found", [("none", 0, True, "race"), ("block", 1, True, "race"), ("cluster", 1, False, "ended")])
def test_what_no_barrier_orders_in_a_cluster_is_reported(barrier: str, other: int, last: bool, found: str) -> None:
    faults = run(exchanged(barrier, other, last), [np.zeros(128, np.float32), np.zeros(128, np.float32)]).faults
    assert any(found in fault for fault in faults), faults


def test_nvrtc_compiles_them() -> None:
    passed, log = cuda_binary(print_cuda([ping_pong(), swapped("group")]))
    assert passed and "warning" not in log and log.count("0 bytes spill stores") == 2, log


@pytest.mark.gpu
def test_warps_pass_stages_to_one_another_on_the_gpu() -> None:
    arrays, expected = ping_pong_arrays(300)
    launch(ping_pong(blocks=300), arrays)
    np.testing.assert_array_equal(arrays[1], expected)


@pytest.mark.gpu
def test_warpgroups_have_barriers_of_their_own_on_the_gpu() -> None:
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    launch(swapped("group"), [x, out])
    np.testing.assert_array_equal(out.reshape(2, 128), x.reshape(2, 128)[:, ::-1] * np.array([[1], [2]], np.float32))
