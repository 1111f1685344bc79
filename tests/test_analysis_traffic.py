"""Traffic of GPU kernels beyond their processors: sectors against a count by hand, level 2 against its size, memory against counters."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings

from tests.draws import draws
from tests.gpu_accesses import counted, executed, kernels
from tests.gpu_cases import convolution_case
from tilewright.analysis.gpu.traffic import PlacesWalk, level_2_sectors, memory_sectors, traffic_of
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Load, Var, index_const
from tilewright.ir.kernel import Buffer, For, Kernel, Launch, Store
from tilewright.kernels.gpu.gemm.space import ContractionSchedule
from tilewright.kernels.registry import lower

H200 = machine("h200")


def by_hand(kernel: Kernel) -> set[int]:
    """Sectors of the buffer g that any thread touches."""
    assert kernel.launch is not None
    grid, block = kernel.launch.grid, kernel.launch.block
    found = set()
    for number in range(prod(grid)):
        for thread in range(prod(block)):
            at = {"block_x": number % grid[0], "block_y": number // grid[0], "thread_x": thread % block[0], "thread_y": thread // block[0]}
            found |= {4 * offset // 32 for _, buffer, offset, _ in executed(kernel.body, at) if buffer == "g"}
    return found


@settings(max_examples=draws(60), deadline=None)
@given(kernels())
def test_no_sector_that_a_thread_touches_is_missing(kernel: Kernel) -> None:
    """Accesses that guards leave out may be counted too."""
    assert kernel.launch is not None
    walk = PlacesWalk(kernel, np.arange(prod(kernel.launch.grid)))
    found = {int(sector) for place in walk.places for sector in place.sectors(slice(None), 1 << 40)}  # random kernels ignore the ends of buffers
    assert by_hand(kernel) <= found


def test_places_of_a_tile_are_exact() -> None:
    """A kernel without guards touches exactly the found sectors, block by block."""
    thread, block, loop = Var("thread_x", 64), Var("block_x", 6), Var("i", 5)
    where = (block * 64 + thread) // 24 * 640 + (block * 64 + thread) % 24 * 8 + loop * 200
    body = For(loop, index_const(5), Store("out", block * 64 + thread, Load("g", (where,), "f32")))
    kernel = Kernel("k", (Buffer("g", "f32", 1 << 16), Buffer("out", "f32", 384, writable=True)), body, Launch((6, 1, 1), (64, 1, 1)))
    (read, written) = PlacesWalk(kernel, np.arange(6)).places
    assert read.buffer == "g" and written.buffer == "out"
    for number in range(6):
        at = np.arange(64) + 64 * number
        expected = {int(4 * o // 32) for i in range(5) for o in at // 24 * 640 + at % 24 * 8 + i * 200}
        assert set(read.sectors(np.array([number]), 1 << 20).tolist()) == expected


def streaming(times: int) -> Kernel:
    """Every block reads the same 64 KB `times` times, and writes 256 bytes of its own."""
    thread, block, loop, again = Var("thread_x", 64), Var("block_x", 8), Var("i", 256), Var("j", times)
    load = Load("g", (loop * 64 + thread,), "f32")
    body = For(again, index_const(times), For(loop, index_const(256), Store("out", block * 64 + thread, load)))
    return Kernel("k", (Buffer("g", "f32", 1 << 14), Buffer("out", "f32", 512, writable=True)), body, Launch((8, 1, 1), (64, 1, 1)))


def small(level_2: int, processors: int, level_1: int) -> Machine:
    first, second = (replace(cache, bytes=size) for cache, size in zip(H200.caches, (level_1, level_2), strict=True))
    return replace(H200, caches=(first, second), processors=processors)


@pytest.mark.parametrize(
    "level_2, processors, times",
    [
        (1 << 20, 2, 1),  # all of it stays
        (48 << 10, 2, 4),  # nothing stays until the next of four waves of two blocks
        (48 << 10, 8, 1),  # one wave: the blocks share their reads
        (68 << 10, 2, 1),  # the data read and written between two accesses to a sector just fit
    ],
)
def test_waves_find_in_level_2_what_fits(level_2: int, processors: int, times: int) -> None:
    read, written = memory_sectors(streaming(1), small(level_2, processors, 1 << 18), resident=1)
    assert (read, written) == (times * 2048, 64)


def test_level_1_serves_what_a_block_reads_again() -> None:
    kernel = streaming(3)
    fits, exceeds = small(1 << 20, 2, 80 << 10), small(1 << 20, 2, 0)
    assert level_2_sectors(kernel, fits, 1, 0) == (3 * 8 * 2048, 8 * 2048)
    assert level_2_sectors(kernel, exceeds, 1, 0) == (3 * 8 * 2048, 3 * 8 * 2048)
    traffic = traffic_of(kernel, fits, 1, 0)
    assert (traffic.level_2, traffic.memory, traffic.hits) == (8 * 2048, 2048, 7 / 8)


def test_a_convolution_reads_its_operands_once_from_memory() -> None:
    case = convolution_case(channels=16, outputs=32)
    made = lower(case.problem, ContractionSchedule(16, 32, 16, 2, 4, 1, 2), H200)
    (kernel,) = made.kernels
    read, written = memory_sectors(kernel, H200, 1)
    distinct = sum(-(-buffer.size * 4 // 32) for buffer in kernel.parameters if not buffer.writable)
    stored = sum(-(-buffer.size * 4 // 32) for buffer in kernel.parameters if buffer.writable)
    assert 0.8 * distinct <= read <= distinct + 2 and written == stored


@pytest.mark.parametrize("name", ["D5", pytest.param("R9", marks=pytest.mark.slow)])
def test_memory_is_read_as_an_h200_counted(name: str) -> None:
    for row in counted(name):
        assert row["predicted"]["memory reads"] == pytest.approx(row["counted"]["memory reads"], rel=0.045), row["schedule"]
