"""Correlations of counts with time."""

from __future__ import annotations

import pytest

from bench.bounds_check import read
from bench.common import RESULTS
from bench.transactions import SECONDS, SECTORS, WAVEFRONTS, correlations, pearson, rows_of, summarised
from tilewright.hardware import machine


def test_correlations_take_the_rows_that_have_a_count() -> None:
    rows = [{SECONDS: t, "rising": 3 * t + 1, "falling": -t, **({"rare": t} if t > 3 else {})} for t in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert correlations([*rows, {"falling": 3.0}]) == {"rising": pytest.approx(1), "falling": pytest.approx(-1)}
    assert pearson([1, 2, 3], [1, 1, 1]) is None and pearson([1, 2], [1, 2]) is None


def test_the_summary_of_several_layers() -> None:
    def layer(scale: float, sign: int) -> list[dict[str, float]]:
        return [{SECONDS: scale * t, "count": scale * (10 + sign * t)} for t in (1.0, 2.0, 3.0)]

    found = summarised({"a": layer(1, 1), "b": layer(2, 1), "c": layer(3, -1), "empty": []})
    assert found["by layer"]["c"]["count"] == pytest.approx(-1)
    assert found["mean by layer"] == {"count": pytest.approx(1 / 3)}
    assert found["fastest"]["count"] == pytest.approx(pearson([11, 22, 27], [1, 2, 3]))


def test_predicted_counts_of_measured_kernels() -> None:
    some = [m for m in read(RESULTS / "gpu_layers_h200.json") if m.layer["name"] == "Y8"]
    rows = rows_of(some, machine("h200"))
    assert len(rows) > 10 and {row[SECONDS] for row in rows} <= {m.seconds for m in some}
    assert all(row[WAVEFRONTS] > 0 and row[SECTORS] > 0 for row in rows)
