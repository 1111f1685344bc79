"""Bounds of GPU schedules: no measured kernel is faster, hand-worked cases, the best possible distribution of blocks, pruning, DeepCuts' formulas."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import tilewright
from bench.bounds_check import check, layer_table, read, schema_table, summary
from bench.common import RESULTS
from bench.layers import LAYERS, layer
from bench.regions import ranking_of
from tilewright.hardware import machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.attention_form import AttentionFacts
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.gpu.attention.schema import ATTENTION
from tilewright.kernels.gpu.bounds import lower_bound, memory_share
from tilewright.kernels.gpu.deepcuts import (
    Launch,
    Operation,
    PrintedLimit,
    Tile,
    Window,
    convolution,
    elementwise,
    limit,
    matrix_product,
    pooling,
    winograd_transform,
)
from tilewright.kernels.gpu.deepcuts_limits import Part, fused_seconds, printed_limit, stages_of
from tilewright.kernels.gpu.direct.schedule import RS, DirectFacts
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, ContractionSchedule, Operand
from tilewright.kernels.gpu.gemv.schema import GEMV
from tilewright.kernels.gpu.map.schema import MAP
from tilewright.kernels.gpu.map.space import MapFacts
from tilewright.kernels.gpu.row_reduction.schema import ROW_REDUCTION
from tilewright.kernels.gpu.window.schema import WINDOW
from tilewright.kernels.gpu.window.space import WindowFacts
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.gpu.winograd_fused.space import fused_winograd_space
from tilewright.kernels.schema import AnySchema
from tilewright.report.explanation import explanation
from tilewright.selection.bounds import ARITHMETIC, is_claim
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
    known = [m for m in read(RESULTS / "gpu_layers_h200.json") if m.layer["name"] in ("R4", "R10") and isinstance(m.schedule, ContractionSchedule)]
    layers = []
    for name in ("R4", "R10"):
        some = [m for m in known if m.layer["name"] == name]
        columns = {axis: np.array([m.parameters[axis] for m in some]) for axis in some[0].parameters}
        columns |= {"seconds": np.array([m.seconds for m in some]), "spread": np.zeros(len(some)), "rounds": np.ones(len(some), dtype=int)}
        layers.append(dataset.MeasuredLayer(layer(name), "h200", {"ContractionSchedule": columns}))
    dataset.write(tmp_path / "layers.jsonl.gz", layers)
    found = list(read(tmp_path / "layers.jsonl.gz"))
    assert [(m.layer, m.parameters) for m in found] == [(m.layer, m.parameters) for m in known]
    checked = check([m for m in found if m.layer == layer("R4")], H200)
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
def test_no_distribution_of_blocks_and_warps_beats_the_bound(
    tiles: int, split: int, steps: int, processors: int, schedulers: int, block: int
) -> None:
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
    some = {"output_tile": 2, "filter_y": 3, "filter_x": 3, "tiles": 16, "outputs": 32, "channels": 8, "thread_m": 4, "thread_n": 4, "split": 1}
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
        lower_bound(replace(MAP, bound=None), None, contraction_rows(), H200)


def test_stored_results_by_hand() -> None:
    facts = MapFacts(1 << 24, 4, 4 << 24, 4 << 24, 1.0, 2, 0, 1)
    estimate = lower_bound(MAP, facts, {"threads": np.array([256]), "items": np.array([1]), "vector_width": np.array([4])}, H200, rotated_bytes=1e12)
    assert estimate.terms["issue"] == pytest.approx((1 << 17) / 528 / 1.98e9)
    assert estimate.terms["memory"] == pytest.approx(memory_share(H200, 1e12) * (4 << 24) / 4.8e12)
    few = replace(facts, points=1 << 10, bytes_written=4 << 10)  # one block
    alone = lower_bound(MAP, few, {"threads": np.array([256]), "items": np.array([1]), "vector_width": np.array([4])}, H200)
    assert alone.terms["issue"] == pytest.approx(8 / 4 / 1.98e9)


def test_attention_by_hand() -> None:
    facts = AttentionFacts(16, 2048, 2048, 64, 64, 4, 4, 4, 4, 0, 0, 0, 0, 16 * 2048 * 256)
    rows = {name: np.array([value]) for name, value in {"block_m": 64, "block_n": 64, "thread_m": 4, "thread_n": 4, "stages": 1, "split": 1}.items()}
    estimate = lower_bound(ATTENTION, facts, rows, H200)
    # 512 tiles of queries: four on some processor, each 64 * 2048 * 128 multiply-adds on 128 lanes
    assert estimate.terms["fma"] == pytest.approx(4 * 64 * 2048 * 128 / 128 / 1.98e9)
    causal = lower_bound(ATTENTION, replace(facts, shift=0), rows, H200)
    assert causal.terms["fma"] == pytest.approx(16 * 2048 * 2049 / 2 * 128 / 32 / 528 / 1.98e9)
    assert estimate.terms["chain"] == pytest.approx(2048 * 4 / 1.98e9)


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
    with pytest.raises(Unsuitable, match="no formulas for the schema row reduction"):
        printed_limit(ROW_REDUCTION, None, {}, H200)


def test_the_paper_s_own_numbers() -> None:
    """Section 4.2: the ridge of its V100 is at 15.6 operations per byte; 10 operations per load hide half of 20 cycles, 20 and more all of them.
    Section 5.1: a block of the example computes 2 x 2 pixels of one channel from two."""
    level1 = replace(H200.caches[0], latency_cycles=20.0)
    theirs = replace(H200, peak_flops={"fp32": 15.6 * 900e9}, memory_bandwidth=900e9, caches=(level1, *H200.caches[1:]))
    launch = Launch(np.array([132]), np.array([64]), np.array([0]))

    def factors(intensity: float, hidden: float) -> PrintedLimit:
        return limit(Operation(np.array([intensity * 4 * 32]), 1.0, hidden, 1.0), launch, theirs)

    assert factors(15.6, 1).memory == 1 and factors(15.5, 1).memory < 1 and factors(7.8, 1).memory == 0.5
    assert factors(1, 10).shared == 0.5 and factors(1, 20).shared == factors(1, 30).shared == 1
    block, thread = Tile(h=np.array([2]), w=np.array([2])), Tile(h=np.array([1]), w=np.array([2]))
    assert convolution(block, thread, 2, Window(1, 1)).block_flops == 16


def test_tables_6_to_8() -> None:
    block, thread = Tile(2, 3, 4, 64), Tile(1, 1, 2, 8)
    assert elementwise(block, thread) == Operation(1536, 2 * 3 * 4 * 2, 16, 16)
    assert elementwise(block, thread, operands=2) == Operation(1536, 2 * 2 * 3 * 4 * 2, 16, 32)
    assert elementwise(block, thread, operations=3, parameters=3) == Operation(3 * 1536, 48 + 3 * 3 / 32, 48, 16 + 3)  # batch normalisation
    assert winograd_transform(block, thread) == Operation(2.25 * 1536, 48, 36, 16)
    # windows of 2 x 2 with stride 2 and no padding: (4 + 2) // 2 + 1 rows, (64 + 2) // 2 + 1 columns
    assert pooling(block, thread, Window(2, 2, 2, 2)) == Operation(1536 * 4, 2 * 3 * 4 * 34 / 32, 64, 64)
    assert matrix_product(Tile(64, 32), Tile(4, 2), 16, 5) == Operation(5 * 2 * 64 * 16 * 32, 5 * (64 + 16), 5 * 2 * 4 * 16 * 2, 5 * 16 * 6)
    # 3 x 3 with padding 1: 6 x 66 inputs of 5 channels, and 3 filters
    assert convolution(block, thread, 5, Window(3, 3)) == Operation(2 * 1536 * 45, 2 * 5 * 6 * 66 / 32 + 5, 2 * 16 * 45, 5 * 4 * 10 + 45 / 32)


def test_fused_operations() -> None:
    """Section 4.4: in registers the second operation adds its arithmetic, in shared memory it has no transactions."""
    block, thread = Tile(64, 64), Tile(4, 4)
    first, second = matrix_product(block, thread, 16), elementwise(block, thread)
    assert first.then(second) == replace(first, block_flops=first.block_flops + 64 * 64, thread_flops=first.thread_flops + 16)
    assert first.after() == replace(first, transactions=0)
    launch = Launch(np.array([132]), np.array([256]), np.array([0]))
    assert limit(first.after(), launch, H200).memory == 1 > limit(first, launch, H200).memory
    # an epilogue of 8 operations for each of 1024 elements of a sum
    plain = contraction_facts(1024, 1024, 1024)
    apart, fused = (printed_limit(GEMM, replace(plain, epilogue_flops=flops), contraction_rows(), H200) for flops in (0.0, 8.0))
    assert fused.memory == pytest.approx(apart.memory * (2 * 1024 + 8) / (2 * 1024)) and fused.shared == pytest.approx(apart.shared * 2056 / 2048)


def test_products_of_few_rows_are_matrix_products() -> None:
    """Eight threads divide the 256 reduced elements that a split leaves to a block, of three rows and 32 columns of four lanes."""
    rows = {name: np.array([value]) for name, value in {"columns": 32, "threads_along_r": 8, "split": 4}.items()}
    (stage,) = stages_of(GEMV, contraction_facts(3, 512, 1024), rows)
    assert stage.operation == Operation(2 * 3 * 256 * 128, 3 * 8 + 256 * 4, 2 * 3 * 32 * 4, 32 * (3 + 4))
    assert stage.launch == Launch(4 * 4, 256, 4 * 3 * 128 * 9) and stage.flops == 2 * 3 * 512 * 1024


@pytest.mark.parametrize("schema", [GEMM, GEMV])
def test_maps_that_a_product_computes_are_fused_in_registers(schema: AnySchema) -> None:
    """Five operations for each element of the first factor, as often as blocks compute it."""
    few = {name: np.array([value]) for name, value in {"columns": 16, "threads_along_r": 4, "split": 2}.items()}
    cases = {
        GEMM: (contraction_facts(128, 256, 64), contraction_rows(), 128 * 64 * 4),  # by four tiles of columns
        GEMV: (contraction_facts(4, 128, 64), few, 4 * 64 * 128 // 4),  # by every thread, which has four columns
    }
    plain, rows, computed = cases[schema]
    (apart,), (fused,) = (stages_of(schema, replace(plain, a=replace(plain.a, arithmetic=count)), rows) for count in (0.0, 5.0))
    blocks, threads = (float(np.ravel(count)[0]) for count in (apart.launch.blocks, apart.launch.threads))
    assert fused.operation.block_flops - apart.operation.block_flops == 5 * computed / blocks
    assert fused.operation.thread_flops - apart.operation.thread_flops == 5 * computed / blocks / threads
    assert fused.flops - apart.flops == 5 * computed
    assert (fused.operation.transactions, fused.operation.loads) == (apart.operation.transactions, apart.operation.loads)


def test_regions_of_a_chain_are_fused_in_shared_memory() -> None:
    """Every block computes its parts, and all but the first read what is there."""
    facts, rows, launch = contraction_facts(64, 64, 64), contraction_rows(), Launch(264, 256, 0)
    (stage,) = stages_of(GEMM, facts, rows)
    flops = float(stage.flops[0]) * 264 if isinstance(stage.flops, np.ndarray) else stage.flops * 264
    first, second = (flops / float(limit(operation, launch, H200).flops(H200)[0]) for operation in (stage.operation, stage.operation.after()))
    part = Part(GEMM, facts, rows, 1)
    assert fused_seconds([part], launch, H200) == pytest.approx(first) and second < first
    assert fused_seconds([part, replace(part, times=3)], launch, H200) == pytest.approx(first + 3 * second)
    with pytest.raises(Unsuitable, match="no formulas"):
        fused_seconds([part, replace(part, schema=ROW_REDUCTION)], launch, H200)


def test_windows_that_read_nothing_have_no_limit() -> None:
    facts = WindowFacts(64, 1, 0, 256, 9.0, 9, (), 1, 1, 1)
    rows = {name: np.array([value]) for name, value in {"threads": 32, "items": 1, "vector_width": 1, "rows": 1}.items()}
    with pytest.raises(Unsuitable, match="these read none"):
        printed_limit(WINDOW, facts, rows, H200)
    assert lower_bound(WINDOW, facts, rows, H200).seconds == H200.launch_seconds


class Parts(nn.Module):
    """A region of each kind that has a limit, and rows, which have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Conv2d(3, 32, 7, 2, 3), nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        tokens = self.last(F.relu(self.wide(x)).flatten(2).transpose(1, 2)).unflatten(2, (2, 32)).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens).sin().softmax(-1)


def test_explanations_state_both() -> None:
    executable = tilewright.compile(Parts().eval(), (torch.randn(1, 3, 64, 64),), target="h200")
    text = explanation(executable.image)
    regions = executable.image.program.regions
    assert {region.kind for region in regions} >= {"contraction", "window", "attention", "row reduction", "map"}
    for region in regions:
        names = {name for name in region.bounds if not is_claim(name)}
        assert len(names) == 1 and all(0 < seconds < region.predicted_seconds * 1.5 for name, seconds in region.bounds.items() if name in names)
        assert len(region.bounds) == 2 or region.kind in ("row reduction", "map"), region.name
    assert text.count("   bound    at least") == len(regions) and "by DeepCuts' limit" in text
    for_cpu = tilewright.compile(Parts().eval(), (torch.randn(1, 3, 64, 64),), target="x86-avx2", threads=1)
    computing = [row for row in for_cpu.plan.rows if row.work.flops]
    assert all(set(row.bounds) == {ARITHMETIC} and 0 < row.bounds[ARITHMETIC] < row.predicted_seconds for row in computing)
    assert explanation(for_cpu.image).count(f"({ARITHMETIC})") == len(computing)


def test_a_layer_s_rows_keep_their_order() -> None:
    part = ranking_of(layer("R12"), H200).parts[0]
    few = take(part.candidates, np.array([5, 0]))
    whole = lower_bound(part.schema, part.facts, part.candidates, H200).seconds
    assert lower_bound(part.schema, part.facts, few, H200).seconds.tolist() == [whole[5], whole[0]]
