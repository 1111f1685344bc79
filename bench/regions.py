"""The candidates of a benchmark's convolution layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.hardware.machine import Machine
from tilewright.selection.ranking import Ranking
from tilewright.tuning import collecting, dataset


def ranking_of(layer: Mapping[str, Any], machine: Machine) -> Ranking:
    """All GPU candidates of a layer given by outputs, channels, height and width of the output, filter and stride (`bench.layers.layer`)."""
    return collecting.ranking_of(dataset.layer_problem(layer), machine)
