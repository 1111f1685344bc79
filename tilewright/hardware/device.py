"""Identifies the GPU that is present, by asking the CUDA driver for its attributes (no context is created)."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace

from tilewright.hardware import documents as named
from tilewright.hardware.gpus import GPUS, KB, capability_facts
from tilewright.hardware.machine import Machine

DRIVER = f"{named.DRIVER}: cuDeviceGetAttribute"
GEFORCE_LIKE = {(8, 6): "rtx4090", (12, 0): "rtx4090"}
"""Capabilities whose tensor cores and caches resemble a GeForce more than the entry of the preceding capability."""
ATTRIBUTES = {
    "threads_per_block": 1,
    "warp_size": 10,
    "clock_khz": 13,
    "processors": 16,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "threads_per_processor": 39,
    "major": 75,
    "minor": 76,
    "shared_bytes_per_processor": 81,
    "registers_per_processor": 82,
    "shared_bytes_per_block": 97,
    "blocks_per_processor": 106,
    "shared_reserved_bytes": 111,
}
"""The driver's CUdevice_attribute number of each field."""


@dataclass(frozen=True)
class DeviceAttributes:
    """What the driver reports about one GPU; clocks are in kHz, as the driver gives them, and are maxima, not measurements."""

    name: str
    memory_bytes: int
    threads_per_block: int
    warp_size: int
    clock_khz: int
    processors: int
    memory_clock_khz: int
    memory_bus_bits: int
    l2_bytes: int
    threads_per_processor: int
    major: int
    minor: int
    shared_bytes_per_processor: int
    registers_per_processor: int
    shared_bytes_per_block: int
    blocks_per_processor: int
    shared_reserved_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


def read_device(index: int = 0) -> DeviceAttributes | None:
    """Attributes of the device with that index, or None if there is no driver or no such device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, handle = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value <= index:
        return None
    if driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
        return None
    name = ctypes.create_string_buffer(128)
    memory = ctypes.c_size_t()
    driver.cuDeviceGetName(name, len(name), handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    values: dict[str, int] = {}
    for field, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        # An older driver does not know the newest attributes; those stay 0.
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        values[field] = value.value
    return DeviceAttributes(name=name.value.decode(), memory_bytes=memory.value, **values)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def _named_entry(attributes: DeviceAttributes) -> Machine | None:
    """The catalogue entry of exactly this chip: same capability, same number of processors, and every word of the entry's name in the device's
    name."""
    device_words = _words(attributes.name)
    fitting = [
        entry
        for entry in GPUS
        if entry.compute_capability == attributes.capability
        and entry.processors == attributes.processors
        and all(word in device_words for word in _words(entry.name))
    ]
    return max(fitting, key=lambda entry: len(entry.name), default=None)


def identify_gpu(attributes: DeviceAttributes) -> Machine | None:
    """The catalogue entry for the device, or a generic machine scaled from one of the nearest capability.

    None if the compute capability is unknown here (older than 7.0, or newer than the table).
    """
    entry = _named_entry(attributes)
    if entry is not None:
        return entry
    try:
        facts = capability_facts(attributes.capability)
    except KeyError:
        return None
    same = [gpu for gpu in GPUS if gpu.compute_capability == attributes.capability]
    near = [gpu for gpu in GPUS if gpu.compute_capability <= attributes.capability]
    alike = [gpu for gpu in GPUS if gpu.name == GEFORCE_LIKE.get(attributes.capability)]
    like = (same or alike or near)[-1]
    suffix = "a" if attributes.capability >= (9, 0) else ""
    clock = attributes.clock_khz * 1e3 or like.clock_hz
    lanes = facts["fp32_lanes_per_processor"]
    scale = attributes.processors * clock / (like.processors * like.clock_hz)
    peaks = {dtype: rate * scale for dtype, rate in like.peak_flops.items()}
    peaks["fp32"] = attributes.processors * lanes * 2 * clock
    bandwidth = 2 * attributes.memory_clock_khz * 1e3 * attributes.memory_bus_bits / 8
    bandwidth_source = f"derived: twice the memory clock times the bus width ({DRIVER})"
    if not bandwidth:  # recent drivers no longer report the memory clock
        bandwidth, bandwidth_source = like.memory_bandwidth, f"assumed: as of the {like.name}"
    first, second = like.caches
    caches = (
        first,
        replace(second, bytes=attributes.l2_bytes or second.bytes, shared_by=attributes.processors),
    )
    told = {
        field: getattr(attributes, field)
        for field in (
            "threads_per_block", "threads_per_processor", "warp_size", "shared_bytes_per_processor",
            "shared_bytes_per_block", "registers_per_processor", "blocks_per_processor", "shared_reserved_bytes",
        )
        if getattr(attributes, field)
    }  # fmt: skip
    sources = {
        **facts.pop("sources"),
        **dict.fromkeys(told, DRIVER),
        "processors": DRIVER,
        "clock_hz": f"{DRIVER}, the maximum clock" if attributes.clock_khz else f"assumed: as of the {like.name}",
        "peak_flops": f"fp32 derived: processors, lanes and clock; others assumed: the {like.name}'s, scaled by processors and clock",
        "memory_bandwidth": bandwidth_source,
        "memory_bytes": f"{named.DRIVER}: cuDeviceTotalMem",
        "memory_latency_cycles": f"assumed: as of the {like.name}",
        "caches": f"level 2 size from {DRIVER}; the rest assumed: as of the {like.name}",
    }
    return Machine(
        name="-".join(_words(attributes.name)),
        kind="gpu",
        vendor="NVIDIA",
        architecture=f"sm_{attributes.major}{attributes.minor}{suffix}",
        description=f"{attributes.name}, {attributes.processors} processors, "
        f"{attributes.shared_bytes_per_processor // KB} KB of shared memory each, as the driver reports it",
        processors=attributes.processors,
        clock_hz=clock,
        peak_flops=peaks,
        memory_bandwidth=bandwidth,
        memory_bytes=attributes.memory_bytes,
        memory_latency_cycles=like.memory_latency_cycles,
        caches=caches,
        sources=sources,
        **{**facts, **told},
    )


def host_gpu() -> Machine | None:
    """The first GPU that the driver reports, or None."""
    attributes = read_device()
    return identify_gpu(attributes) if attributes is not None else None
