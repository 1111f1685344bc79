"""Formulas of windows, maps and row reductions: starts of blocks, sectors of scattered operands, and what level 1 keeps between stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tilewright.hardware import machine
from tilewright.hardware.calibration import assumed, gpu_calibration
from tilewright.ir.estimate import Estimate
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.map.schema import MAP
from tilewright.kernels.gpu.row_reduction.schema import ROW_REDUCTION
from tilewright.kernels.gpu.window.schema import WINDOW
from tilewright.kernels.schema import AnySchema, Options, form_of
from tilewright.selection.ranking import estimated
from tilewright.tuning.workloads import Convolution, Elementwise, Pool, Rows, Workload, problem_of

H200 = machine("h200")


def form(schema: AnySchema, workload: Workload) -> Any:
    found = form_of(schema, problem_of(workload), H200)
    assert found is not None and not isinstance(found, Unsuitable)
    return found


def judged(schema: AnySchema, workload: Workload, **axes: tuple[int, ...]) -> tuple[LaunchCounts, Estimate]:
    """Counts and estimate of the candidates with these axes."""
    part = estimated(schema, form(schema, workload).facts, {name: np.array(column) for name, column in axes.items()}, H200, Options())
    assert isinstance(part.counts, LaunchCounts)
    return part.counts, part.estimate


@pytest.mark.parametrize(("schema", "part", "workload", "axes"), [
    (MAP, "map", Elementwise(8, 64, (56, 56)), {"threads": (64, 512), "items": (1, 1), "vector_width": (1, 1)}),
    (WINDOW, "window", Pool(8, 64, (56, 56), 2, 2), {"threads": (32, 256), "items": (1, 1), "vector_width": (1, 1), "rows": (1, 1)}),
    (ROW_REDUCTION, "row_reduction", Rows(40_000, 64), {"rows": (1, 8), "threads_per_row": (32, 32), "vector_width": (1, 1)}),
])  # fmt: skip
def test_a_processor_starts_its_blocks_one_after_another(schema: AnySchema, part: str, workload: Workload, axes: dict[str, tuple[int, ...]]) -> None:
    counts, estimate = judged(schema, workload, **axes)
    present = gpu_calibration(H200)
    own = getattr(present, part)
    each = np.ceil(counts.blocks / H200.processors)
    np.testing.assert_allclose(estimate.terms["starts"], each * own.block_cycles / H200.clock_hz)
    assert estimate.seconds[1] < estimate.seconds[0], "large blocks are started less often"
    with assumed(H200, replace(present, **{part: replace(own, block_cycles=2 * own.block_cycles)})):
        longer = judged(schema, workload, **axes)[1].seconds
    np.testing.assert_allclose(longer - estimate.seconds, estimate.terms["starts"])


def test_blocks_read_whole_sectors_of_a_transposed_operand() -> None:
    transposed, plain = Elementwise(2, 128, (40, 40), 1), Elementwise(2, 128, (40, 40))
    facts = form(MAP, transposed).facts
    assert (facts.scattered, facts.inner, form(MAP, plain).facts.scattered) == (4 * 2 * 128 * 1600, 128, 0)
    axes = {"threads": (64, 128, 256, 512, 512), "items": (1, 1, 1, 2, 8), "vector_width": (1,) * 5}
    counts, estimate = judged(MAP, transposed, **axes)
    # a block of 128 elements covers one pixel, one word of each sector of eight; of 1,024 elements eight pixels
    again = (counts.level2_bytes - counts.read_bytes) / facts.scattered
    assert again.tolist() == [7, 7, 3, 0, 0] and (estimate.terms["level 2"] > 0).tolist() == [True, True, True, False, False]
    counts, estimate = judged(MAP, plain, **axes)
    assert (counts.level2_bytes == counts.read_bytes).all() and not estimate.terms["level 2"].any()


def test_rows_that_level_1_keeps_are_not_read_again() -> None:
    one = {"rows": (1,), "threads_per_row": (64,), "vector_width": (4,)}
    assert judged(ROW_REDUCTION, Rows(8000, 256), **one)[1].terms["level 2"] == 0
    counts, estimate = judged(ROW_REDUCTION, Rows(8000, 8192), **one)
    assert 0 < estimate.terms["level 2"][0] < 1.1 * (counts.level2_bytes - counts.read_bytes)[0] / H200.cache_bandwidth(2)


def test_a_warp_that_reads_several_rows_touches_several_lines() -> None:
    axes = {"rows": (1, 4, 8), "threads_per_row": (128, 32, 8), "vector_width": (1, 1, 1)}
    lines = judged(ROW_REDUCTION, Rows(132 * 64, 1024), **axes)[1].terms["wavefronts"]
    assert lines[1] == pytest.approx(lines[0]) and lines[2] == pytest.approx(4 * lines[0])


def test_windows_on_a_depthwise_convolution_prefer_large_blocks_of_small_tiles() -> None:
    """A batch of 16 with 32 channels, 80 x 80, filters of 3 x 3."""
    axes = {"threads": (32, 128), "items": (1, 1), "vector_width": (1, 1), "rows": (1, 1)}
    seconds = judged(WINDOW, Convolution(16, 32, 32, (80, 80), (3, 3), 1, groups=32), **axes)[1].seconds
    assert seconds[1] < 0.8 * seconds[0]
