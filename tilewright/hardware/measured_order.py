"""What ``tilewright calibrate`` has found of a GPU: constants of the analytical models, and maybe a learned correction, which rank its candidates.

There is one file for each identified GPU (`calibration_file`). A machine for which there is one names it in `Machine.calibration`; its constants then
hold for all estimates (`calibration.gpu_calibration`), and its learned model, or none, ranks instead of the package's (`selection/learned/gpu.py`).
The content that a machine names stays in use in this process (`calibration.in_use`), also if the file is replaced or removed meanwhile. In a process
that did not identify the GPU, as one that loaded an artifact, the package's constants and models rank; what is compiled there names no calibration.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright.hardware import calibration
from tilewright.hardware.calibration_file import Content, read
from tilewright.hardware.machine import Machine

PRESENT, CONSTANTS, CORRECTED = "present", "constants", "constants and correction"
"""The orders that are compared: the present one, by fitted constants, and by these with a learned correction."""
SHOWN = ("lop@1", "spearman", "error")
"""The qualities of an order that are shown."""


@dataclass(frozen=True)
class MeasuredOrder(Content):
    """The content of a file."""

    version = 1
    date: str
    environment: Mapping[str, str]
    """GPU, driver and compiler."""
    kernels: int
    layers: int
    """Numbers of kernels measured, and of their layers."""
    qualities: Mapping[str, Mapping[str, float]]
    """For each order that was compared, means over layers left out: LoP@n, rank correlation, error of logarithms (`refit.quality`)."""
    chosen: str
    """The name of the best of them."""
    constants: Mapping[str, Mapping[str, float]]
    """By part and name, as in `GpuCalibration`."""
    model: str
    """The learned correction, an .npz file in base64; empty if constants alone are better."""

    @property
    def measured(self) -> calibration.MeasuredGpu:
        """What ranks candidates. Raises ValueError, KeyError or TypeError as `calibration.constants_of`; ValueError if the model is no base64."""
        return calibration.MeasuredGpu(self.name, calibration.constants_of(self.constants), base64.b64decode(self.model, validate=True))


def calibrated(machine: Machine) -> Machine:
    """The identified GPU, which names its file if there is one. Raises CacheError if the file is damaged."""
    found = stored(machine)
    if found is None:
        return machine
    calibration.use(found.measured)
    return replace(machine, calibration=found.name, uncalibrated=machine.digest)


def as_used(machine: Machine) -> Machine:
    """The machine, without the name of a GPU's calibration that is not in use: what is compiled for it names only what ranked its candidates."""
    return replace(machine, calibration="", uncalibrated="") if machine.is_gpu and calibration.in_use(machine) is None else machine


def stored(machine: Machine) -> MeasuredOrder | None:
    """The content of an identified GPU's file; None as `calibration_file.read`.

    Raises:
        CacheError: as `calibration_file.read`.
    """
    return read(machine, MeasuredOrder.version, _checked)


def _checked(content: dict[str, Any]) -> MeasuredOrder:
    """The content of a file; `json_of` has refused infinite numbers. Raises ValueError, KeyError, TypeError or AttributeError if it cannot serve."""
    found = MeasuredOrder(**content)
    texts = (found.identity, found.machine, found.date, found.chosen, found.model, *found.environment.values())
    if not all(type(text) is str for text in texts) or not all(type(number) is int and number > 0 for number in (found.kernels, found.layers)):
        raise ValueError("a field is of another type")
    rows = found.qualities.values()
    if found.chosen not in found.qualities or not all(type(row[name]) is float for row in rows for name in SHOWN):
        raise ValueError("it lacks the qualities of an order")
    if bool(found.model) != (found.chosen == CORRECTED):
        raise ValueError(f"the order {found.chosen!r} {'has a' if found.model else 'lacks its'} model")
    _ = found.measured  # raises if constants or model cannot be read
    return found
