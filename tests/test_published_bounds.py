"""The bound for measurements in the published format."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.published_bounds import check
from tilewright.hardware import machine

V100 = machine("v100")


def test_rows_of_the_published_form_are_checked(tmp_path: Path) -> None:
    # one measurement that the bound allows, one failed launch, one too fast, and one beyond the peak rate (231 Mflop in 5 us)
    row = "64, 56, 56, 64, 3, 8, 4, 4, 8, 14, 2, 1"
    path = tmp_path / "layer_64x56x56_64_3.csv"
    path.write_text(f"{row}, 1.0\nCUDA error\n{row}, 0.0301\n{row}, 0.005\n")
    found = check(path, "rs", 1, V100)
    assert found.seconds.tolist() == pytest.approx([1e-3, 3.01e-5])
    assert found.tightness[0] == pytest.approx(found.tightness[1] * 0.0301)
    assert found.figures["kernels"] == 2 and found.figures["faster than our bound"] == 1
    assert found.figures["microseconds of those"] == "30.1"


def test_the_bound_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "layer_64x56x56_64_3.csv"
    path.write_text("64, 56, 56, 64, 3, 8, 4, 4, 8, 14, 2, 1, 1.0\n")
    # a block of 7 warps computes 64 x 56 x 8 outputs: two warps on some scheduler, 64 channels of 9 * 128 multiply-adds, each two cycles of 16 lanes
    assert check(path, "rs", 1, V100).tightness[0] == pytest.approx(2 * 64 * 9 * 128 * 2 / V100.clock_hz / 1e-3)
