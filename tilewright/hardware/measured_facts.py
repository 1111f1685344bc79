"""Facts of this host's CPU that ``tilewright calibrate`` has measured, and the machine that they make of an identified one.

There is one file for each identified machine before any fact is replaced (`calibration_file`), so that it never serves another CPU, other cores, or
the same CPU taken for another. Nothing measures by itself: without a file the facts stay as identified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright.hardware.calibration_file import Content, read
from tilewright.hardware.machine import Machine

LARGEST = 1e18
TILE_TYPES = frozenset({"bf16"})
"""Types whose peak on a CPU is that of its tile registers, which does not depend on the ports for vectors."""


@dataclass(frozen=True)
class Fact:
    """One measured number."""

    value: float
    unit: str
    spread: float
    """The interquartile range of the repetitions over the value."""


@dataclass(frozen=True)
class Calibration(Content):
    """The content of a file."""

    version = 1
    threads: int
    """Threads that measured at once."""
    date: str
    compiler: str
    openmp: str
    """File name of the OpenMP runtime."""
    facts: Mapping[str, Fact]
    """By name, as in `assumed_facts`, and others that only inform."""


def assumed_facts(machine: Machine) -> dict[str, tuple[float, str]]:
    """The machine's value and unit of every fact that a calibration replaces, by name."""
    facts = {
        "clock": (machine.clock_hz, "Hz"),
        "multiply-add ports": (machine.fma_ports, "vectors a cycle"),
        "memory bandwidth": (machine.memory_bandwidth, "B/s"),
        "memory latency": (machine.memory_latency_cycles, "cycles"),
        "parallel region": (machine.dispatch_seconds, "s"),
    }
    for cache in machine.caches:
        facts[f"level {cache.level} bandwidth"] = (cache.bandwidth, "B a cycle")
        facts[f"level {cache.level} latency"] = (cache.latency_cycles, "cycles")
    return facts


def with_facts(machine: Machine, calibration: Calibration) -> Machine:
    """The machine with the calibration's facts instead of its own, and peaks that follow from them."""
    found = {name: calibration.facts[name].value for name in assumed_facts(machine)}
    faster = found["clock"] / machine.clock_hz
    wider = faster * found["multiply-add ports"] / machine.fma_ports
    source = f"measured by tilewright calibrate: {calibration.name}, {calibration.threads} threads"
    measured = ("clock_hz", "fma_ports", "memory_bandwidth", "memory_latency_cycles", "dispatch_seconds")
    sources = {
        **dict.fromkeys(measured, source),
        "caches": f"{machine.sources['caches']}; instead of these bandwidths and latencies those {source}",
        "peak_flops": f"{machine.sources['peak_flops']}; clock and ports {source}",
    }
    return replace(
        machine,
        clock_hz=found["clock"],
        fma_ports=found["multiply-add ports"],
        peak_flops={dtype: flops * (faster if dtype in TILE_TYPES else wider) for dtype, flops in machine.peak_flops.items()},
        memory_bandwidth=found["memory bandwidth"],
        memory_latency_cycles=found["memory latency"],
        dispatch_seconds=found["parallel region"],
        caches=tuple(
            replace(cache, bandwidth=found[f"level {cache.level} bandwidth"], latency_cycles=found[f"level {cache.level} latency"])
            for cache in machine.caches
        ),
        sources={**machine.sources, **sources},
        calibration=calibration.name,
        uncalibrated=machine.digest,
    )


def calibrated(machine: Machine) -> Machine:
    """The identified machine with its measured facts, if there is a file of them. Raises CacheError if the file is damaged."""
    calibration = stored(machine)
    return machine if calibration is None else with_facts(machine, calibration)


def stored(machine: Machine) -> Calibration | None:
    """The calibration of an identified machine; None as `calibration_file.read`.

    Raises:
        CacheError: as `calibration_file.read`.
    """
    return read(machine, Calibration.version, lambda content: _checked(content, machine))


def _checked(content: dict[str, Any], machine: Machine) -> Calibration:
    """The calibration in a file's content. Raises ValueError, KeyError or TypeError if it does not serve the machine."""
    facts = {str(name): Fact(float(fact["value"]), str(fact["unit"]), float(fact["spread"])) for name, fact in content.pop("facts").items()}
    wrong = [name for name in assumed_facts(machine) if name not in facts or not 0 < facts[name].value < LARGEST or math.isnan(facts[name].spread)]
    if wrong:
        raise ValueError(f"it has no valid {wrong[0]}")
    return Calibration(**content, facts=facts)
