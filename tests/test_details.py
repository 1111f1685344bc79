"""The finer features of GPU kernels, against walks over threads, rows and blocks of CNNOpt's RS kernel."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cnnopt import PUBLISHED
from tilewright.hardware import machine as find_machine
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.details import DETAILS, details
from tilewright.kernels.gpu.direct.counts import variant_counts
from tilewright.kernels.gpu.direct.features import NUMBER as DIRECT
from tilewright.kernels.gpu.direct.schedule import RS
from tilewright.kernels.gpu.features import described

V100 = find_machine("v100")


def rs(
    register: tuple[int, int, int], block: tuple[int, int], grid: tuple[int, int, int], filter_size: int, split: int
) -> tuple[dict[str, float], TileCounts]:
    """The details and counts of one RS kernel: tiles of a thread and threads of a block along K, Y, X, and tiles of the result."""
    (k, y, x), (block_y, block_x) = register, block
    candidate = {
        "slice": RS, "register_k": k, "register_y": y, "register_x": x, "warp_k": 32, "warp_y": 1, "warp_x": 1, "block_k": 1, "block_y": block_y,
        "block_x": block_x, "channels": 1, "split": split, "stages": 1, "filters": 1,
    }  # fmt: skip
    problem = {
        "outputs": 32 * k * grid[0], "height": y * block_y * grid[1], "width": x * block_x * grid[2], "channels": 8, "filter_y": filter_size,
        "filter_x": filter_size, "stride_y": 1, "stride_x": 1,
    }  # fmt: skip
    columns, sizes = ({name: np.array([float(value)]) for name, value in values.items()} for values in (candidate, problem))
    counts = variant_counts(columns, sizes, V100, PUBLISHED)
    found = details(described(DIRECT, columns, sizes), counts, V100)
    assert set(found) == set(DETAILS)
    return {name: float(column[0]) for name, column in found.items()}, counts


small = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 2), small, small), st.tuples(small, small), st.sampled_from([1, 3]))
def test_rounds_of_the_busiest_warp(register: tuple[int, int, int], block: tuple[int, int], filter_size: int) -> None:
    found, _ = rs(register, block, (1, 1, 1), filter_size, 1)
    warps = block[0] * block[1]
    rows, columns = register[1] * block[0], register[2] * block[1]
    if columns + filter_size - 1 > 32:  # the published kernels have no wider tile
        return
    filled = Counter(row % warps for row in range(rows + filter_size - 1))  # a warp fills every warps-th row
    stored = Counter(row % warps for _ in range(32 * register[0]) for row in range(rows))
    assert found["fill rounds"] == max(filled.values()) and found["drain rounds"] == max(stored.values())
    assert found["fill lanes"] == pytest.approx((columns + filter_size - 1) / 32) and found["drain lanes"] == pytest.approx(columns / 32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), small, st.sampled_from([1, 3]))
def test_vector_loads_cover_a_slice_wherever_its_rows_start(y: int, x: int, block_x: int, filter_size: int) -> None:
    found, _ = rs((1, y, x), (2, block_x), (1, 1, 1), filter_size, 1)
    pitch = x * block_x + filter_size - 1
    # the widest vectors for which every thread's slice starts at a multiple of the width
    threads = [(thread_y * y * pitch + thread_x * x) for thread_y in range(8) for thread_x in range(8)]
    width = next(words for words in (4, 2, 1) if all(start % words == 0 for start in threads))
    touched = {(row, (row * pitch + column) // width) for row in range(y + filter_size - 1) for column in range(x + filter_size - 1)}
    assert found["vector words"] == width and found["vector loads"] == len(touched)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), small, st.integers(1, 4))
def test_sectors_of_rows_over_the_starts_that_occur(y: int, x: int, block_x: int, grid_x: int) -> None:
    found, _ = rs((1, y, x), (1, block_x), (1, 1, grid_x), 3, 1)
    tile, width = x * block_x, x * block_x * grid_x

    def sectors(pitch: int, words: int) -> float:
        """The mean over many rows and tiles, with as many tiles in a row as there are starts."""
        starts = [row * pitch + across * tile for row in range(8) for across in range(8)]
        return float(np.mean([len({(start + word) // 8 for word in range(words)}) for start in starts]))

    assert found["input sectors a word"] == pytest.approx(sectors(width + 2, tile + 2) / (tile + 2))
    assert found["output sectors a word"] == pytest.approx(sectors(width, tile) / tile)


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 2), st.integers(1, 3), small), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.sampled_from([1, 2, 4]))
def test_warps_of_the_busiest_scheduler(register: tuple[int, int, int], block: tuple[int, int], split: int) -> None:
    found, counts = rs(register, block, (4, 9, 13), 3, split)
    resident, warps = int(counts.resident[0]), int(counts.warps[0])
    left, busiest, last = ceil(4 * 9 * 13 * split / V100.processors), 0, 0
    while left:
        last = min(left, resident)
        busiest += ceil(last * warps / 4)
        left -= last
    assert found["busiest scheduler cycles"] == busiest * found["chain"] * 2  # 16 lanes a scheduler: two cycles for a warp
    assert found["last wave warps a scheduler"] == last * warps / 4
    assert found["busiest scheduler over even"] >= 1


@pytest.mark.parametrize("tiles_k, split, expected", [(1, 1, 1), (4, 4, 1), (2, 16, 2), (3, 1, 3), (32, 1, 2), (16, 8, 8)])
def test_blocks_of_a_processor_that_read_the_same_filters(tiles_k: int, split: int, expected: int) -> None:
    found, counts = rs((1, 1, 4), (1, 1), (tiles_k, 30, 30), 3, split)
    together = int(min(counts.resident[0], ceil(counts.blocks[0] / V100.processors)))
    assert found["distinct filters"] == min(together, expected) == len({block * V100.processors % (tiles_k * split) for block in range(together)})


def test_the_resource_that_limits_has_the_smallest_share() -> None:
    found, counts = rs((4, 2, 10), (1, 2), (2, 20, 20), 3, 1)
    limits = {name: found[f"limit by {name}"] for name in ("threads", "registers", "shared memory")}
    assert limits["registers"] == min(limits.values()) == 1.0
    assert found["allocated registers"] % 8 == 0 and 0 <= found["spare registers"] < 8
    assert found["allocated registers"] - found["spare registers"] == counts.registers[0]
