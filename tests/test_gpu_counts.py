"""Counts of data movement of the GPU schemas, against enumeration of small cases."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cnnopt import PUBLISHED
from tests.draws import draws
from tilewright.hardware import machine as find_machine
from tilewright.kernels.columns import length, take
from tilewright.kernels.gpu.counts import TileCounts, row_sectors
from tilewright.kernels.gpu.direct.counts import bank_conflicts, direct_registers, input_extent, variant_counts
from tilewright.kernels.gpu.direct.schedule import RS, DirectFacts, DirectSchedule, S
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand, contraction_space

V100 = find_machine("v100")


def columns_of(*schedules: DirectSchedule) -> dict[str, np.ndarray]:
    return {spec.name: np.array([getattr(one, spec.name) for one in schedules]) for spec in fields(DirectSchedule)}


def rs_schedule(k: int = 2, y: int = 2, x: int = 3, block_y: int = 2, block_x: int = 2, split: int = 1) -> DirectSchedule:
    return DirectSchedule(RS, k, y, x, 32, 1, 1, 1, block_y, block_x, channels=1, split=split, filters=1)


def wavefronts(words: list[int]) -> int:
    """Wavefronts of a warp's words: the largest number of distinct words in one of 32 banks."""
    distinct = set(words)
    return max(sum(word % 32 == bank for word in distinct) for bank in range(32))


@pytest.mark.parametrize("stride, groups", [(1, 32), (2, 32), (3, 8), (4, 16), (8, 4), (17, 32), (32, 8), (6, 32)])
def test_bank_conflicts_count_the_fullest_bank(stride: int, groups: int) -> None:
    words = [stride * group for group in range(groups) for _ in range(32 // groups)]
    assert bank_conflicts(np.array([stride]), np.array([groups]))[0] == wavefronts(words)


@given(st.integers(1, 70))
def test_sectors_of_a_run_are_the_mean_over_its_starts(words: int) -> None:
    touched = [len({(start + word) // 8 for word in range(words)}) for start in range(8)]
    assert row_sectors(np.array([words]))[0] == pytest.approx(np.mean(touched))


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_input_extent_counts_the_points_that_outputs_reach(outputs: int, filter_size: int, stride: int, dilation: int) -> None:
    reached = [output * stride + tap * dilation for output in range(outputs) for tap in range(filter_size)]
    assert input_extent(*map(np.array, (outputs, filter_size, stride, dilation))) == max(reached) + 1


@settings(max_examples=draws(25), deadline=None)
@given(st.data())
def test_rs_counts_against_a_walk_over_one_block(data: st.DataObject) -> None:
    draw = data.draw
    stride, size, split = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2]))
    k, y, x, block_y, block_x = (draw(st.integers(1, 3)) for _ in range(5))
    tiles_k, tiles_y, tiles_x, channels = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), 4
    facts = DirectFacts(1, 1, 32 * k * tiles_k, channels, y * block_y * tiles_y, x * block_x * tiles_x, size, size, stride, stride)
    candidates = columns_of(rs_schedule(k, y, x, block_y, block_x, split))
    counted = variant_counts(candidates, facts, V100, PUBLISHED)

    in_y, in_x = (y * block_y - 1) * stride + size, (x * block_x - 1) * stride + size
    # a warp's reads, thread by thread: all 32 threads are along K, so that they read the same word of the input
    shared, cached, multiply_adds = 0, 0, 0
    for i in range((y - 1) * stride + size):
        for j in range((x - 1) * stride + size):
            shared += wavefronts([i * in_x + j] * 32)
    for _ in range(k):
        for _tap in range(size * size):
            cached += 1  # 32 adjacent words
            multiply_adds += y * x
    assert counted.step_shared_loads[0] == shared
    assert counted.step_cached_loads[0] == cached
    assert counted.step_multiply_adds[0] == multiply_adds
    # sectors of the input tile and of the filters of one channel, over all starts of a row
    input_sectors = in_y * np.mean([len({(start + j) // 8 for j in range(in_x)}) for start in range(8)])
    filter_sectors = size * size * np.mean([len({(start + j) // 8 for j in range(32 * k)}) for start in range(8)])
    assert counted.step_sectors[0] == pytest.approx(input_sectors + filter_sectors)
    assert counted.blocks[0] == tiles_k * tiles_y * tiles_x * split
    assert counted.steps[0] == channels // split
    assert counted.warps[0] == block_y * block_x
    assert counted.step_fill[0] == sum(-(-in_x // 32) for _ in range(in_y))
    assert counted.shared_bytes[0] == 4 * (in_y * in_x + y * block_y * x * block_x * 33)
    # with whole tiles there are no multiply-adds for padding
    total = counted.blocks * counted.steps * counted.warps * 32 * counted.step_multiply_adds
    assert 2 * total[0] == counted.flops[0] == counted.padded_flops[0] == facts.flops
    stores = sum(-(-x * block_x // 32) for _ in range(32 * k) for _ in range(y * block_y))
    assert counted.store_instructions[0] == stores


@pytest.mark.parametrize("register_k, warp_k, register_x", [(2, 32, 5), (4, 8, 17), (8, 16, 3), (16, 2, 4), (64, 32, 1)])
def test_s_counts_against_a_warps_words(register_k: int, warp_k: int, register_x: int) -> None:
    warp_x = 32 // warp_k
    schedule = DirectSchedule(S, register_k, 1, register_x, warp_k, 1, warp_x, 1, 1, 1, channels=1, stages=2)
    facts = DirectFacts(1, 1, register_k * warp_k, 8, 4, register_x * warp_x, 3, 3)
    counted = variant_counts(columns_of(schedule), facts, V100, PUBLISHED)
    lanes = [(lane % warp_k, lane // warp_k) for lane in range(32)]
    expected = 0
    for _row in range(3):
        expected += sum(wavefronts([along_x * register_x + j for _, along_x in lanes]) for j in range(register_x + 2))
        for _tap in range(3):
            for pair in range(0, register_k, 2):
                # two words at a time: the largest count in a bank over the pairs' even words
                expected += wavefronts([along_k * register_k + pair for along_k, _ in lanes])
    assert counted.step_shared_loads[0] == expected
    assert counted.step_cached_loads[0] == 0
    assert counted.steps[0] == 8


def test_padding_is_counted() -> None:
    facts = DirectFacts(1, 1, 40, 8, 5, 7, 3, 3)
    counted = variant_counts(columns_of(rs_schedule(1, 2, 2, 1, 1)), facts, V100, PUBLISHED)
    assert counted.blocks[0] == 2 * 3 * 4
    assert counted.padded_flops[0] / counted.flops[0] == pytest.approx(64 * 6 * 8 / (40 * 5 * 7))


def test_registers_follow_equations_2_and_3() -> None:
    candidates = columns_of(rs_schedule(4, 2, 5), replace(rs_schedule(4, 1, 5), slice=S, filters=0))
    facts = DirectFacts(1, 1, 128, 8, 20, 20, 3, 3)
    assert list(direct_registers(candidates, facts, replace(PUBLISHED, spare_registers=0))) == [40 + 4 * 7 + 1, 20 + 7 + 1]


def test_a_problem_as_columns_is_as_one_problem() -> None:
    facts = DirectFacts(1, 1, 64, 16, 12, 12, 3, 3, bytes_read=1)
    candidates = columns_of(rs_schedule(), rs_schedule(1, 1, 6, 1, 1), rs_schedule(2, 3, 3, 2, 2, 4))
    as_columns = {spec.name: np.full(3, getattr(facts, spec.name)) for spec in fields(DirectFacts)}
    one, many = (variant_counts(candidates, given, V100, PUBLISHED) for given in (facts, as_columns))
    for spec in fields(TileCounts):
        np.testing.assert_array_equal(getattr(one, spec.name), getattr(many, spec.name), err_msg=spec.name)


def contraction_candidates() -> tuple[dict[str, np.ndarray], ContractionFacts]:
    facts = ContractionFacts(1, 784, 128, 1152, Operand("r", 4, 4 * 128 * 900, 2), Operand("own", 4, 4 * 128 * 1152), 4, 4 * 784 * 128)
    candidates, _ = contraction_space(facts, find_machine("h200"))
    return candidates, facts


def test_contraction_counts() -> None:
    candidates, facts = contraction_candidates()
    candidates = take(candidates, np.arange(0, length(candidates), 97))
    counted = contraction_counts(facts, candidates, find_machine("h200"))
    for position in range(0, len(counted), 11):
        m, n, k, split = (int(candidates[name][position]) for name in ("block_m", "block_n", "block_k", "split"))
        assert counted.blocks[position] == len(range(0, 784, m)) * len(range(0, 128, n)) * split
        steps = -(-len(range(0, 1152, k)) // split)
        assert counted.steps[position] == steps
        assert counted.padded_flops[position] == 2 * counted.blocks[position] * m * n * k * steps
        threads = (m // int(candidates["thread_m"][position])) * (n // int(candidates["thread_n"][position]))
        # a is read along r, block_k words per row; b along n
        assert counted.step_sectors[position] == m * max(k / 8, 1) + k * max(n / 8, 1)
        assert counted.step_fill[position] * 32 * 4 == pytest.approx((m + n) * k)
        assert counted.threads[position] == threads
