"""Facts of this host's CPU that ``tilewright calibrate`` has measured: the file that holds them, and the machine that they make of an identified one.

There is one file for each identified machine (`Machine.digest` before any fact is replaced), so that a file never serves another CPU, other cores, or
the same CPU taken for another. Nothing measures by itself: without a file the facts stay as identified. A file that is damaged is an error rather
than ignored, since plans would change with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilewright import settings
from tilewright.errors import CacheError
from tilewright.files import first_line, json_of
from tilewright.hardware.machine import Machine
from tilewright.system.private_files import NotPrivate, read_private, write_private

VERSION = 1
LARGEST = 1e18
REMEDY = "run `tilewright calibrate` again, or `tilewright calibrate --remove`"
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
class Calibration:
    """The content of a file."""

    identity: str
    """The digest of the machine as identified."""
    machine: str
    """Its description."""
    threads: int
    """Threads that measured at once."""
    date: str
    compiler: str
    openmp: str
    """File name of the OpenMP runtime."""
    facts: Mapping[str, Fact]
    """By name, as in `assumed_facts`, and others that only inform."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the content, 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The digest as sources and reports name it."""
        return self.digest[:12]


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


def place(machine: Machine) -> Path:
    """The file of an identified machine's measured facts, which need not exist."""
    return settings.cache_directory() / "calibration" / f"{machine.identity}.json"


def stored(machine: Machine) -> Calibration | None:
    """The calibration of an identified machine; None if there is none, or, with a warning, if another user may have written it.

    Raises:
        CacheError: if the file cannot be read, is damaged, or is from another machine or release.
    """
    path = place(machine)
    try:
        return _checked(json_of(read_private(path, path.parent)), machine)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except NotPrivate as error:
        warnings.warn(f"the calibration {path} is not used: {error}; make it yours alone, or remove it", stacklevel=2)
        return None
    except OSError as error:
        raise CacheError(f"the calibration {path} cannot be read: {error.strerror or error}", REMEDY) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"the calibration {path} is damaged or not of this machine: {first_line(error)}", REMEDY) from error


def store(calibration: Calibration, machine: Machine) -> Path:
    """Writes the machine's file, replacing an earlier one; returns its path. Raises CacheError if it cannot be written."""
    path = place(machine)
    content = {"version": VERSION, **asdict(calibration), "sha256": calibration.digest}
    try:
        write_private(path, json.dumps(content, indent=1).encode() + b"\n")
    except OSError as error:
        raise CacheError(f"the calibration {path} cannot be written: {error.strerror or error}", "set TILEWRIGHT_CACHE to another folder") from error
    return path


def remove(machine: Machine) -> Path | None:
    """Removes the machine's file, whatever is in it; returns its path, or None if there was none. Raises CacheError if it cannot be removed."""
    path = place(machine)
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"the calibration {path} cannot be removed: {error.strerror or error}", "check the permissions of its folder") from error
    return path


def _checked(content: dict[str, Any], machine: Machine) -> Calibration:
    """The calibration in a file's content. Raises ValueError, KeyError or TypeError if it is damaged or does not serve the machine."""
    digest = content.pop("sha256")
    if content.pop("version") != VERSION:
        raise ValueError("another release of Tilewright wrote it")
    facts = {str(name): Fact(float(fact["value"]), str(fact["unit"]), float(fact["spread"])) for name, fact in content.pop("facts").items()}
    found = Calibration(**content, facts=facts)
    if found.digest != digest:
        raise ValueError("its SHA-256 is not the one that it states")
    if found.identity != machine.identity:
        raise ValueError(f"it is of the machine {found.identity}")
    wrong = [name for name in assumed_facts(machine) if name not in facts or not 0 < facts[name].value < LARGEST or math.isnan(facts[name].spread)]
    if wrong:
        raise ValueError(f"it has no valid {wrong[0]}")
    return found
