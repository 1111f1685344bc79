"""Static analysis of GPU kernels: transactions of warps against a count thread by thread, and against hardware counters."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.draws import draws
from tests.gpu_accesses import counted, executed, kernels
from tilewright.analysis.gpu.warps import Access, NotStatic, accesses, chosen_blocks, shared_wavefronts, transactions_of
from tilewright.codegen.intrinsics.async_copy import copy
from tilewright.ir.expr import Load, Var, index_const
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Kernel, Launch, Store

LANES = np.arange(32)
ALL = np.ones((1, 32), bool)


def wavefronts(addresses: np.ndarray, size: int, active: np.ndarray = ALL) -> int:
    return int(shared_wavefronts(np.asarray(addresses).reshape(1, 32), active, size)[0])


@pytest.mark.parametrize("stride, expected", [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1), (0, 1)])
def test_strides_of_the_programming_guide(stride: int, expected: int) -> None:
    assert wavefronts(4 * stride * LANES, 4) == expected


def test_wide_accesses_are_served_in_parts_of_a_warp() -> None:
    assert wavefronts(8 * LANES, 8) == 2
    assert wavefronts(16 * LANES, 16) == 4
    assert wavefronts(16 * (LANES // 2), 16) == 2  # adjacent lanes read the same: half a warp at once
    assert wavefronts(16 * (LANES // 4 * 2 + LANES % 2), 16) == 2
    assert wavefronts(16 * (LANES // 4), 16) == 2
    assert wavefronts(16 * (LANES % 8), 16) == 4  # the same addresses in every quarter, and no merging
    assert wavefronts(80 * (LANES % 8), 16) == 4  # rows of 20 floats: eight rows use every bank once
    assert wavefronts(64 * (LANES % 8), 16) == 16  # rows of 16 floats: four of them begin in the same bank


def test_inactive_lanes_ask_for_nothing() -> None:
    few = (LANES < 8).reshape(1, 32)
    assert wavefronts(128 * LANES, 4, few) == 8
    assert wavefronts(16 * LANES, 16, few) == 1
    assert wavefronts(128 * LANES, 4, np.zeros((1, 32), bool)) == 0


# --- against a count by hand ------------------------------------------------------------------------------------------


def by_hand(kernel: Kernel) -> dict[str, tuple[int, int, int]]:
    """Requests, active lanes and (of global buffers) sectors, by buffer."""
    assert kernel.launch is not None
    grid, block = kernel.launch.grid, kernel.launch.block
    found: dict[str, list[int]] = {}
    for number in range(prod(grid)):
        for warp in range(-(-prod(block) // 32)):
            requests: dict[tuple[Any, ...], list[int]] = {}
            for thread in range(32 * warp, min(32 * warp + 32, prod(block))):
                at = {"block_x": number % grid[0], "block_y": number // grid[0], "thread_x": thread % block[0], "thread_y": thread // block[0]}
                for place, buffer, offset, _ in executed(kernel.body, at):
                    requests.setdefault((place, buffer), []).append(4 * offset)
            for (_, buffer), addresses in requests.items():
                total = found.setdefault(buffer, [0, 0, 0])
                total[0] += 1
                total[1] += len(addresses)
                total[2] += len({address // 32 for address in addresses})
    return {name: (total[0], total[1], total[2]) for name, total in found.items()}


def summed(found: tuple[Access, ...], buffer: str) -> tuple[float, float, float]:
    of = [access for access in found if access.buffer == buffer]
    return sum(a.requests for a in of), sum(a.lanes for a in of), sum(a.transactions for a in of)


@settings(max_examples=draws(60), deadline=None)
@given(kernels())
def test_counts_are_those_of_a_count_by_hand(kernel: Kernel) -> None:
    found, expected = accesses(kernel), by_hand(kernel)
    assert summed(found, "g") == expected.get("g", (0, 0, 0))
    assert summed(found, "s")[:2] == expected.get("s", (0, 0, 0))[:2]


def test_uniform_terms_do_not_change_wavefronts() -> None:
    thread, loop, block = Var("thread_x", 64), Var("i", 5), Var("block_x", 3)
    where = thread % 8 * 20 + thread // 8 * 4 + loop * 7 * 4 + block * 12
    body = Block((Allocate(Buffer("s", "f32", 4096, "shared")), For(loop, index_const(5), Store("s", where, Load("g", (thread * 4,), "f32", 4)))))
    kernel = Kernel("k", (Buffer("g", "f32", 4096),), body, Launch((3, 1, 1), (64, 1, 1)))
    of = next(access for access in accesses(kernel) if access.space == "shared")
    lanes = np.arange(64)
    one = shared_wavefronts((4 * (lanes % 8 * 20 + lanes // 8 * 4)).reshape(2, 32), np.ones((2, 32), bool), 16).sum()
    assert (of.requests, of.lanes, of.transactions) == (30, 15 * 64, 15 * one)


def test_copies_of_sixteen_bytes_count_sectors_of_their_target() -> None:
    thread = Var("thread_x", 32)
    row, column = thread // 4, thread % 4 * 4

    def sectors(length: int, bytes_each: int) -> float:
        lanes = bytes_each // 4
        copied = copy("s", row * length + column, Load("g", (row * 16 + column,), "f32", lanes), "f32")
        body = Block((Allocate(Buffer("s", "f32", 4096, "shared")), copied))
        return transactions_of(Kernel("k", (Buffer("g", "f32", 4096),), body, Launch((1, 1, 1), (32, 1, 1)))).global_loads

    assert sectors(16, 16) == 16
    assert sectors(20, 16) == 20  # every other row begins in the middle of a sector
    assert sectors(20, 4) == 16


def test_an_address_that_is_loaded_is_not_static() -> None:
    thread = Var("thread_x", 32)
    gather = Store("g", thread, Load("g", (Load("index", (thread,), "i64"),), "f32"))
    parameters = (Buffer("g", "f32", 64, writable=True), Buffer("index", "i64", 64))
    with pytest.raises(NotStatic, match="index"):
        accesses(Kernel("k", parameters, gather, Launch((1, 1, 1), (32, 1, 1))))
    with pytest.raises(ValueError, match="launch"):
        accesses(Kernel("k", parameters, gather))


def test_a_sample_of_blocks_spreads_over_the_grid() -> None:
    assert chosen_blocks(5, 8).tolist() == [0, 1, 2, 3, 4]
    some = chosen_blocks(1000, 64)
    assert len(some) == 64 and some.min() < 50 and some.max() > 950


# --- against counters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["D5", pytest.param("R9", marks=pytest.mark.slow)])
def test_transactions_are_those_that_an_h200_counted(name: str) -> None:
    rows = counted(name)
    assert len(rows) == 9 and all("predicted" in row for row in rows)
    for row in rows:
        predicted, had = row["predicted"], row["counted"]
        assert predicted["global loads"] == pytest.approx(had["global loads"], rel=1e-6), row["schedule"]
        assert predicted["global stores"] == pytest.approx(had["global stores"], rel=1e-6), row["schedule"]
        # the counters include conflicts between warps
        assert 0.97 * had["shared loads"] <= predicted["shared loads"] <= 1.01 * had["shared loads"], row["schedule"]
        assert 0.93 * had["shared stores"] <= predicted["shared stores"] <= 1.01 * had["shared stores"], row["schedule"]
