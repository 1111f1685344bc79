"""What ``tilewright calibrate`` has found of a GPU: constants of the analytical models, and maybe a learned correction, which rank its candidates.

There is one file for each identified GPU (`calibration_file`). A machine for which there is one names it in `Machine.calibration`; its constants then
hold for all estimates (`calibration.gpu_calibration`), and its learned model, or none, ranks instead of the package's (`selection/learned/gpu.py`).
The content that a machine names stays in use in this process, also if the file is replaced or removed meanwhile. In another process that did not
identify the GPU, as one that explains an artifact, the constants of the package serve.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilewright.hardware import calibration
from tilewright.hardware.calibration_file import digest_of, read, write
from tilewright.hardware.machine import Machine

VERSION = 1


@dataclass(frozen=True)
class MeasuredOrder:
    """The content of a file."""

    identity: str
    """The digest of the machine as identified."""
    machine: str
    """Its description."""
    date: str
    environment: Mapping[str, str]
    """GPU, driver and compiler."""
    kernels: int
    layers: int
    """Numbers of kernels measured, and of their layers."""
    qualities: Mapping[str, Mapping[str, float]]
    """For each order that was compared, means over layers left out: LoP@n, rank correlation, error of logarithms."""
    chosen: str
    """The name of the best of them."""
    constants: Mapping[str, Mapping[str, float]]
    """By part and name, as in `GpuCalibration`."""
    model: str
    """The learned correction, an .npz file in base64; empty if constants alone are better."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the content, 64 hexadecimal digits."""
        return digest_of({"version": VERSION, **asdict(self)})

    @property
    def name(self) -> str:
        """The digest as plans and reports name it."""
        return self.digest[:12]

    @property
    def model_bytes(self) -> bytes:
        """The .npz file of the learned correction; empty without one."""
        return base64.b64decode(self.model, validate=True)


_in_use: dict[str, MeasuredOrder] = {}
"""What machines of this process name, by name."""


def calibrated(machine: Machine) -> Machine:
    """The identified GPU, which names its file if there is one. Raises CacheError if the file is damaged."""
    found = stored(machine)
    if found is None:
        return machine
    _in_use[found.name] = found
    calibration.hold(found.name, calibration.constants_of(found.constants))
    return replace(machine, calibration=found.name, uncalibrated=machine.digest)


def identified(machine: Machine) -> Machine:
    """The GPU without what is stored of it, as models of the package are trained for it."""
    return replace(machine, calibration="", uncalibrated="")


def in_use(machine: Machine) -> MeasuredOrder | None:
    """What the machine names; None if it names nothing, or if another process identified it."""
    return _in_use.get(machine.calibration)


def stored(machine: Machine) -> MeasuredOrder | None:
    """The content of an identified GPU's file; None as `calibration_file.read`.

    Raises:
        CacheError: as `calibration_file.read`.
    """
    return read(machine, VERSION, _checked)


def store(found: MeasuredOrder, machine: Machine) -> Path:
    """Writes the GPU's file, replacing an earlier one; returns its path. Raises CacheError if it cannot be written."""
    return write(machine, {"version": VERSION, **asdict(found)})


def _checked(content: dict[str, Any]) -> MeasuredOrder:
    """The content of a file. Raises ValueError, KeyError, TypeError or AttributeError if it cannot serve."""
    found = MeasuredOrder(**content)
    calibration.constants_of(found.constants)
    base64.b64decode(found.model, validate=True)
    return found
