"""What learned models see of a problem's form: batch, groups, dilation, vectors and epilogues; and that older records stay as they were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.stand_ins import H200
from tilewright.hardware.calibration import gpu_calibration
from tilewright.kernels.columns import take
from tilewright.kernels.gpu.features import CANDIDATE, FORM, FORMED, RECORDS, features
from tilewright.selection.learned.gpu import described, model_of
from tilewright.tuning.collecting import ranking_of
from tilewright.tuning.training import RECIPE, part_of
from tilewright.tuning.workloads import Convolution, problem_of

PLAIN = Convolution(4, 32, 32, (12, 12), (3, 3))
SCHEMAS = ("contraction", "direct", "winograd", "winograd fused")


def rows_of(workload: Convolution, name: str, record: str) -> dict[str, np.ndarray]:
    """The features of the plain workload's first candidates of a schema, for another workload."""
    part = next(part for part in ranking_of(problem_of(PLAIN), H200).parts if part.schema.name == name)
    candidates = take(part.candidates, np.arange(40))
    own = part_of(problem_of(workload), part.schema.schedule.__name__, candidates, H200)
    assert own is not None
    known = described(own, H200)
    assert known is not None
    table = features(record, known.columns, known.counts, H200, gpu_calibration(H200).counted)
    return dict(zip(RECORDS[record].names, table.T, strict=True))


def differing(workload: Convolution, name: str) -> set[str]:
    first, second = (rows_of(each, name, "formed") for each in (PLAIN, workload))
    return {feature.removeprefix("form ") for feature in first if feature.startswith("form ") and not np.array_equal(first[feature], second[feature])}


@pytest.mark.parametrize("name", SCHEMAS)
def test_epilogues_are_seen(name: str) -> None:
    assert differing(replace(PLAIN, then="residual"), name) == {"epilogue_bytes", "epilogue_flops"}


@pytest.mark.parametrize("name", SCHEMAS[1:])
def test_images_are_seen(name: str) -> None:
    """The partition of three kernels counts its intermediate values as bytes of the epilogue."""
    assert {"images"} <= differing(replace(PLAIN, batch=8), name) <= {"images", "epilogue_bytes"}


@pytest.mark.parametrize(
    ("name", "groups", "dilation"), [("contraction", {"groups", "taps"}, {"taps"}), ("direct", {"groups"}, {"dilation_y", "dilation_x"})]
)
def test_groups_and_dilation_are_seen(name: str, groups: set[str], dilation: set[str]) -> None:
    """In a product groups are the batch, and loads divide more indices by extents; so do they if taps are not adjacent."""
    assert differing(replace(PLAIN, groups=2), name) == groups
    assert differing(replace(PLAIN, dilation=2), name) == dilation


def test_vectors_are_seen() -> None:
    narrow = replace(PLAIN, channels=33)
    assert "input_vector" in differing(narrow, "contraction") and "input_vector" in differing(narrow, "direct")


def test_older_records_are_as_they_were() -> None:
    assert FORMED[: len(CANDIDATE)] == CANDIDATE and len(FORMED) == len(CANDIDATE) + len(FORM) and RECIPE.record == "formed"
    shipped = model_of(H200.name)
    assert shipped is not None and shipped.forest.names == RECORDS[shipped.record].names
    for name in SCHEMAS:
        plain, formed = (rows_of(PLAIN, name, record) for record in ("candidate", "formed"))
        assert all(np.array_equal(plain[feature], formed[feature]) for feature in CANDIDATE)
