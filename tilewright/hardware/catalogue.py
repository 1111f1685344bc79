"""The catalogue of targets, by name; its data is in ``cpus`` and ``gpus``."""

from __future__ import annotations

from tilewright.hardware.cpus import CPUS
from tilewright.hardware.gpus import GPUS
from tilewright.hardware.machine import Machine


def catalogue() -> dict[str, Machine]:
    """Every named target, CPUs first."""
    return {entry.name: entry for entry in CPUS + GPUS}
