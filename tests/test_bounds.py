"""Bounds of GPU schedules: no measured kernel is faster, hand-worked cases, the best possible distribution of blocks, pruning, DeepCuts' formulas."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from bench.bounds_check import check, layer_table, read, schema_table, summary
from bench.common import RESULTS
from bench.deepcuts import printed_limit
from bench.layers import LAYERS, layer
from bench.regions import ranking_of
from tilewright.hardware import machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.gpu.bounds import lower_bound, memory_share
from tilewright.kernels.gpu.direct.schedule import RS, DirectFacts
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand
from tilewright.kernels.gpu.gemv.schema import GEMV
from tilewright.kernels.gpu.map.schema import MAP
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.gpu.winograd_fused.space import fused_winograd_space
from tilewright.tuning import dataset

H200 = machine("h200")
MINIMAL = (WINOGRAD, WINOGRAD_FUSED)
"""Schemas of minimal filtering, which needs 1 / 4 or 4 / 9 of the products."""


def contraction_rows(**axes: int) -> Columns:
    defaults = {"block_m": 64, "block_n": 64, "block_k": 16, "thread_m": 4, "thread_n": 4, "split": 1, "stages": 2, "cluster": 0}
    return {name: np.array([value]) for name, value in {**defaults, **axes}.items()}


def contraction_facts(m: int, n: int, r: int) -> ContractionFacts:
    return ContractionFacts(1, m, n, r, Operand("r", 4, 4 * m * r), Operand("own", 4, 4 * n * r), 4, 4 * m * n)


def direct_rows(**axes: int) -> Columns:
    names = ("register", "warp", "block")
    defaults = {f"{level}_{d}": 1 for level in names for d in "kyx"} | {
        "slice": RS, "warp_k": 8, "warp_x": 4, "channels": 4, "split": 1, "stages": 1, "filters": 0, "cluster": 0, "atomics": 0,
    }  # fmt: skip
    return {name: np.array([value]) for name, value in {**defaults, **axes}.items()}


def test_no_measured_kernel_is_faster_than_its_bound() -> None:
    measured = list(read(RESULTS / "gpu_layers_h200.json"))
    assert len(measured) == 357
    for name in LAYERS:
        found = check([m for m in measured if m.layer["name"] == name], H200)
        assert (found.bound <= found.seconds).all(), (name, found.tightness.max())
        assert found.best_kept
        # a trivial bound would pass as well
        assert found.tightness[found.seconds.argmin()] > 0.2


def test_the_check_notices_a_kernel_that_is_too_fast() -> None:
    measured = [m for m in read(RESULTS / "gpu_layers_h200.json") if m.layer["name"] == "Y8"]
    found = check([replace(m, seconds=m.seconds * 0.6) for m in measured], H200)
    assert (found.bound > found.seconds).any()


def test_a_data_set_of_measured_layers_is_checked(tmp_path: Path) -> None:
    known = [m for m in read(RESULTS / "gpu_layers_h200.json") if m.layer["name"] in ("R2", "R12")]
    layers = []
    for name in ("R2", "R12"):
        some = [m for m in known if m.layer["name"] == name]
        columns = {axis: np.array([m.parameters[axis] for m in some]) for axis in some[0].parameters}
        columns |= {"seconds": np.array([m.seconds for m in some]), "spread": np.zeros(len(some)), "rounds": np.ones(len(some), dtype=int)}
        layers.append(dataset.MeasuredLayer(layer(name), "h200", {"ContractionSchedule": columns}))
    dataset.write(tmp_path / "layers.jsonl.gz", layers)
    found = list(read(tmp_path / "layers.jsonl.gz"))
    assert [(m.layer, m.parameters) for m in found] == [(m.layer, {**m.parameters, "atomics": 0}) for m in known]
    checked = check(found[:18], H200)
    assert set(checked.schemas) == {"contraction"} and summary(checked)["faster than our bound"] == 0
    text = io.StringIO()
    for table in (layer_table([checked]), schema_table([checked])):
        Console(width=200, file=text).print(table)
    assert "contraction" in text.getvalue() and str(checked.left) in text.getvalue()


def test_implicit_gemm_by_hand() -> None:
    estimate = lower_bound(GEMM, contraction_facts(1024, 1024, 1024), contraction_rows(), H200)
    # 256 blocks of 8 warps: two of them, 16 warps, on some processor, 4 on a scheduler, 64 steps of 16 * 16 multiply-adds
    assert estimate.terms["fma"] == pytest.approx(65536 / 1.98e9)
    # two loads of four for every eight elements, and per thread and step one copy of four of A and one of B
    assert estimate.terms["issue"] == pytest.approx(4 * 64 * (256 + 32 + 2) / 1.98e9)
    assert estimate.terms["shared"] == pytest.approx(2 * 64 * (8 * 32 + 128 * 16 * 4 / 128) / 1.98e9)
    assert estimate.terms["chain"] == pytest.approx(1024 * 4 / 1.98e9)
    assert estimate.terms["memory"] == 0 and estimate.seconds == estimate.terms["issue"]


def test_a_split_adds_a_launch_unless_a_cluster_adds_the_parts() -> None:
    problem = contraction_facts(1024, 1024, 1024)
    apart = lower_bound(GEMM, problem, contraction_rows(split=2), H200)
    together = lower_bound(GEMM, problem, contraction_rows(split=2, cluster=1), H200)
    assert apart.seconds - together.seconds == pytest.approx(H200.launch_seconds)
    # 512 blocks on 132 processors: four blocks with half the steps take as long as two whole ones
    assert together.terms["fma"] == lower_bound(GEMM, problem, contraction_rows(), H200).terms["fma"]


def test_warps_do_not_leave_their_scheduler() -> None:
    # one block of two warps on a processor: two of its four schedulers are idle
    estimate = lower_bound(GEMM, contraction_facts(32, 32, 1024), contraction_rows(block_m=32, block_n=32), H200)
    assert estimate.terms["fma"] == pytest.approx(64 * 16 * 16 / 1.98e9)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([32, 64]))
def test_no_distribution_of_blocks_and_warps_beats_the_bound(tiles: int, split: int, steps: int, processors: int, schedulers: int, block: int) -> None:
    small = replace(H200, processors=processors, schedulers_per_processor=schedulers, fp32_lanes_per_processor=32 * schedulers)
    each = -(-steps // split)
    parts = [min(each, steps - at * each) for at in range(split)]
    if min(parts) < 1 or tiles * split > 6:
        return
    rows = contraction_rows(block_m=block, block_n=32, thread_m=4, thread_n=4, split=split, cluster=int(split > 1))
    warps = block * 32 // 16 // 32
    estimate = lower_bound(GEMM, contraction_facts(tiles * block, 32, steps * 16), rows, small)
    pieces = parts * tiles
    best = min(_longest(pieces, places, processors, schedulers, warps) for places in product(range(processors), repeat=len(pieces)))
    assert estimate.terms["fma"][0] <= best * 16 * 16 / small.clock_hz * (1 + 1e-9)


def _longest(pieces: list[int], places: tuple[int, ...], processors: int, schedulers: int, warps: int) -> int:
    """Warp steps of the busiest scheduler, with blocks placed on processors by `places` and their warps (longest first) each on the least loaded
    scheduler."""
    loads = []
    for processor in range(processors):
        queues = [0] * schedulers
        for piece in sorted((p for p, at in zip(pieces, places, strict=True) if at == processor), reverse=True):
            for _ in range(warps):
                queues[queues.index(min(queues))] += piece
        loads.append(max(queues))
    return max(loads)


def test_direct_convolution_by_hand() -> None:
    # 8 x 2 x 4 outputs per block of one warp, 2 per thread; 16 x 132 rows of 8 channels: two blocks on each processor
    facts = DirectFacts(1, 1, 8, 16, 2 * 264, 4, 3, 3)
    estimate = lower_bound(DIRECT, facts, direct_rows(register_y=2), H200)
    assert estimate.terms["fma"] == pytest.approx(1 * 16 * 9 * 2 / 1.98e9)
    # per channel 4 x 3 inputs and 9 weights, by fours
    assert estimate.terms["issue"] == pytest.approx(16 * (18 + (12 + 9) / 4) / 1.98e9)
    assert estimate.terms["chain"] == pytest.approx(16 * 9 * 4 / 1.98e9)
    crowded = lower_bound(DIRECT, replace(facts, height=2 * 132 * 8 + 2), direct_rows(register_y=2), H200)
    assert crowded.terms["fma"] == pytest.approx(3 * 16 * 9 * 2 / 1.98e9)


def test_what_no_thread_stores_counts_as_nothing() -> None:
    # four rows per thread, of which two exist; all ten channels of three chunks of four
    facts = DirectFacts(1, 1, 8, 10, 2, 4, 3, 3)
    estimate = lower_bound(DIRECT, facts, direct_rows(register_y=4), H200)
    assert estimate.terms["fma"] == pytest.approx(3 * 4 * 9 * 2 / 1.98e9)
    # a tile of 16 rows with 8 per thread, of which 7 exist: the second four of each thread are out of range
    one = lower_bound(GEMM, contraction_facts(7, 64, 1024), contraction_rows(block_m=16, thread_m=8), H200)
    assert one.terms["fma"] == pytest.approx(64 * 16 * 4 * 4 / 1.98e9)


def test_every_bound_covers_the_arithmetic() -> None:
    for name in ("D3", "R10", "R12"):
        for part in ranking_of(layer(name), H200).parts:
            if part.schema.bound is None:
                continue
            seconds = lower_bound(part.schema, part.facts, part.candidates, H200).seconds
            assert seconds.shape == (length(part.candidates),)
            saved: np.ndarray | float = np.where(part.candidates["output_tile"] == 4, 4, 2.25) if part.schema in MINIMAL else 1
            assert (seconds >= part.facts.flops / saved / H200.peak_flops["fp32"] * 0.99).all()


def test_winograd_is_three_kernels() -> None:
    part = next(part for part in ranking_of(layer("R2"), H200).parts if part.schema is WINOGRAD)
    estimate = lower_bound(part.schema, part.facts, part.candidates, H200, rotated_bytes=1e12)
    assert (estimate.terms["launch"] >= 3 * H200.launch_seconds * 0.999).all()
    product = lower_bound(GEMM, part.facts.products[0], part.candidates, H200)
    first = part.candidates["output_tile"] == 2
    # the transforms of a layer this small are two launches
    assert estimate.terms["fma"][first] == pytest.approx(product.terms["fma"][first] + 2 * H200.launch_seconds)
    facts = part.facts
    moved = facts.bytes_read + 4 * 16 * 64 * 64 + facts.bytes_written + facts.epilogue_bytes
    assert estimate.terms["memory"][first] == pytest.approx(memory_share(H200, 1e12) * moved / 4.8e12)


def test_winograd_in_one_kernel() -> None:
    part = next(part for part in ranking_of(layer("R9"), H200).parts if part.schema is WINOGRAD)
    facts = part.facts
    candidates, _ = fused_winograd_space(facts, H200)
    estimate = lower_bound(WINOGRAD_FUSED, facts, candidates, H200)
    saved = np.where(candidates["output_tile"] == 4, 4, 2.25)
    assert length(candidates) and (estimate.seconds >= facts.flops / saved / H200.peak_flops["fp32"]).all()
    # F(2x2): 49 tiles, 256 outputs in blocks of 16 x 32: 32 blocks of 16 warps, 4 on a scheduler, each 32 steps of 8 channels and 4 x 4 sums per
    # thread
    some = {"output_tile": 2, "tiles": 16, "outputs": 32, "channels": 8, "thread_m": 4, "thread_n": 4, "split": 1}
    one = lower_bound(WINOGRAD_FUSED, facts, {name: np.array([value]) for name, value in some.items()}, H200)
    assert one.terms["fma"] == pytest.approx(4 * 32 * 8 * 16 / 1.98e9)


def test_memory_counts_what_level_2_cannot_hold() -> None:
    level2 = H200.cache(2)
    assert level2 is not None
    assert memory_share(H200, 0) == 0 and memory_share(H200, level2.bytes) == 0
    assert memory_share(H200, 4 * level2.bytes) == 0.75
    problem = contraction_facts(64, 4096, 4096)
    cold = lower_bound(GEMM, problem, contraction_rows(), H200, rotated_bytes=4 * level2.bytes)
    assert cold.terms["memory"] == pytest.approx(0.75 * 4 * (64 * 4096 + 4096 * 4096 + 64 * 4096) / 4.8e12)


def test_a_schema_without_a_bound_says_so() -> None:
    with pytest.raises(Unsuitable, match="the schema map has no bound"):
        lower_bound(MAP, None, contraction_rows(), H200)


def test_deepcuts_formulas_as_printed() -> None:
    # 131 blocks: the balance ratio as printed
    limit = printed_limit(GEMM, contraction_facts(64 * 131, 64, 1024), contraction_rows(), H200)
    assert limit.balance == pytest.approx(1 / 132)
    # 2 * 64 * 64 * 16 operations for 64 + 16 * 2 transactions of 128 bytes; 13.9 operations per byte at the peak
    assert limit.memory == pytest.approx(2 * 64 * 64 * 16 / (128 * 96) / (66.9e12 / 4.8e12))
    # 2 * 4 * 16 * 4 operations for 128 loads: 4 of 41 cycles hidden
    assert limit.shared == pytest.approx(4 / 41)
    assert limit.resources == 1 and limit.share_of_peak == limit.memory * limit.shared * limit.balance
    direct = printed_limit(DIRECT, DirectFacts(1, 1, 8, 16, 264, 4, 3, 3), direct_rows(register_y=2), H200)
    # 4 x 3 inputs of each channel and 9 of 32 transactions' weights, as table 7 has it
    assert direct.shared == pytest.approx(2 * 16 * 2 * 9 / (16 * 4 * 3 + 16 * 9 / 32) / 41)
    with pytest.raises(Unsuitable):
        printed_limit(GEMV, contraction_facts(1, 64, 64), {"columns": np.ones(1)}, H200)


def test_a_layer_s_rows_keep_their_order() -> None:
    part = ranking_of(layer("R12"), H200).parts[0]
    few = take(part.candidates, np.array([5, 0]))
    whole = lower_bound(part.schema, part.facts, part.candidates, H200).seconds
    assert lower_bound(part.schema, part.facts, few, H200).seconds.tolist() == [whole[5], whole[0]]
