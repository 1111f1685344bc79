"""Catalogue data of GPU targets: first the facts that a compute capability fixes, then the chips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.hardware import documents as named
from tilewright.hardware.machine import Cache, Machine

KB = 1024
MB = 1024 * KB
GB = 1024 * MB

BENCH = "one NVIDIA H200, CUDA 13.0 driver, CUDA-graph replays, 2026-11-21"
LIKE_H200 = "assumed: as measured on the h200"

LAUNCH_SECONDS = 1.1e-6


def capability_facts(capability: tuple[int, int]) -> dict[str, Any]:
    """What all GPUs of a compute capability have in common, with sources; KeyError if it is not listed.

    The size of the unified L1 and shared memory is not included.
    """
    # shared memory per processor and per block (KB), threads and blocks per processor, fp32 lanes, bytes per cycle
    shared_processor, shared_block, threads, blocks, lanes, bytes_per_cycle = {
        (7, 0): (96, 96, 2048, 32, 64, 128),
        (7, 2): (96, 96, 2048, 32, 64, 128),
        (7, 5): (64, 64, 1024, 16, 64, 64),
        (8, 0): (164, 163, 2048, 32, 64, 128),
        (8, 6): (100, 99, 1536, 16, 128, 128),
        (8, 7): (164, 163, 1536, 16, 128, 128),
        (8, 9): (100, 99, 1536, 24, 128, 128),
        (9, 0): (228, 227, 2048, 32, 128, 128),
        (10, 0): (228, 227, 2048, 32, 128, 128),
        (10, 3): (228, 227, 2048, 32, 128, 128),
        (12, 0): (100, 99, 1536, 24, 128, 128),
    }[capability]
    guide_fields = (
        "registers_per_processor", "registers_per_thread_max", "shared_bytes_per_processor", "shared_bytes_per_block",
        "threads_per_processor", "threads_per_block", "blocks_per_processor", "warp_size",
    )  # fmt: skip
    return {
        "registers_per_processor": 64 * KB,
        "registers_per_thread_max": 255,
        "register_allocation_unit": 256,
        "shared_bytes_per_processor": shared_processor * KB,
        "shared_bytes_per_block": shared_block * KB,
        "shared_reserved_bytes": 1 * KB if capability >= (8, 0) else 0,
        "shared_bytes_per_cycle": float(bytes_per_cycle),
        "threads_per_processor": threads,
        "threads_per_block": 1024,
        "blocks_per_processor": blocks,
        "warp_size": 32,
        "schedulers_per_processor": 4,
        "fp32_lanes_per_processor": lanes,
        "special_lanes_per_processor": 16,
        "fma_latency_cycles": 4.0,
        "launch_seconds": LAUNCH_SECONDS,
        "toolchain_extra": "cuda13" if capability >= (7, 5) else "cuda12",
        "sources": {
            **dict.fromkeys(guide_fields, f"{named.CCCL}; 7.2 and 8.7 from {named.GUIDE}"),
            "register_allocation_unit": f"{named.OCCUPANCY}: cudaOccRegAllocationGranularity",
            "shared_reserved_bytes": f"{named.CCCL}: reserved_shared_memory_per_block",
            "shared_bytes_per_cycle": f"derived: 32 banks of 4 bytes; 7.5 from {named.GA102_PAPER}: half that of GA10x",
            "schedulers_per_processor": f"{named.OCCUPANCY}: cudaOccSubPartitionsPerMultiprocessor",
            "fp32_lanes_per_processor": named.ARITHMETIC,
            "special_lanes_per_processor": named.ARITHMETIC,
            "fma_latency_cycles": f"7.0 from {named.JIA_VOLTA}; 7.5 from {named.JIA_TURING}; "
            f"8.0 from {named.AMPERE_CYCLES}; others assumed: the same",
            "launch_seconds": LIKE_H200,
        },
    }


def _caches(l1_kb: int, l1: float, l1_latency: float, l2_bytes: int, processors: int, l2: float, l2_latency: float) -> tuple[Cache, ...]:
    return (
        Cache(1, l1_kb * KB, line_bytes=128, ways=0, shared_by=1, bandwidth=l1, latency_cycles=l1_latency),
        Cache(2, l2_bytes, line_bytes=128, ways=0, shared_by=processors, bandwidth=l2, latency_cycles=l2_latency),
    )


def _gpu(architecture: str, sources: dict[str, str], **facts: Any) -> Machine:
    digits = architecture.removeprefix("sm_").rstrip("a")
    common = capability_facts((int(digits[:-1]), int(digits[-1])))
    merged = {**common.pop("sources"), **sources}
    return Machine(kind="gpu", vendor="NVIDIA", architecture=architecture, sources=merged, **{**common, **facts})


L1_BANDWIDTH = "level 1 bandwidth assumed: that of shared memory, which is the same memory"


def _sheet(sheet: str, clock: str, caches: str, latency: str) -> dict[str, str]:
    """Sources of a chip's own numbers: its data sheet or whitepaper, which of its clocks is used, and the source of the rest of ``caches``."""
    fields = ("processors", "peak_flops", "memory_bandwidth", "memory_bytes")
    return {
        **dict.fromkeys(fields, sheet),
        "clock_hz": f"{sheet}: {clock}",
        "caches": f"sizes from {sheet}; {L1_BANDWIDTH}; {caches}",
        "memory_latency_cycles": latency,
    }


V100 = _gpu(
    "sm_70",
    name="v100",
    description="NVIDIA Tesla V100 SXM2 16 GB (Volta)",
    processors=80,
    clock_hz=1.53e9,
    peak_flops={"fp32": 15.7e12, "fp16": 125e12},
    memory_bandwidth=900e9,
    memory_bytes=16 * GB,
    memory_latency_cycles=375,
    caches=_caches(128, 128, 28, 6 * MB, 80, 25.6, 193),
    sources=_sheet(
        named.V100_PAPER,
        "boost clock",
        f"latencies from {named.JIA_VOLTA}; level 2 bandwidth from {named.A100_PAPER}: 2048 bytes a cycle in all",
        f"assumed: about the miss of level 2 in {named.JIA_VOLTA}",
    ),
)

XAVIER = _gpu(
    "sm_72",
    name="xavier",
    description="NVIDIA Jetson AGX Xavier 32 GB (Volta, integrated)",
    processors=8,
    clock_hz=1.377e9,
    peak_flops={"fp32": 1.41e12, "fp16": 11e12},
    memory_bandwidth=136.5e9,
    memory_bytes=32 * GB,
    memory_latency_cycles=400,
    caches=_caches(128, 128, 28, 512 * KB, 8, 25.6, 193),
    sources=_sheet(
        named.XAVIER_SHEET,
        "maximum clock",
        "bandwidths and latencies assumed: as on the v100",
        "assumed: somewhat above the v100's, for the slower memory",
    )
    | {"peak_flops": f"fp16 from {named.XAVIER_SHEET}; fp32 derived: 8 processors of 64 lanes at 1.377 GHz"},
)

TURING_CLOCK = "boost clock of the reference card"
TURING_CACHES = f"latencies from {named.JIA_TURING}; level 2 bandwidth assumed: 20 bytes a cycle each, about 1270 GB/s on the 40 processors of a T4"
TURING_LATENCY = f"assumed: about the T4's miss of level 2 in {named.JIA_TURING}"
TURING_PEAKS = f"{named.TURING_PAPER}: reference card; fp16 from {named.TURING_PAPER}: tensor cores, accumulated in fp32"

RTX2080 = _gpu(
    "sm_75",
    name="rtx2080",
    description="NVIDIA GeForce RTX 2080 (Turing TU104)",
    processors=46,
    clock_hz=1.71e9,
    peak_flops={"fp32": 10.1e12, "fp16": 40.3e12},
    memory_bandwidth=448e9,
    memory_bytes=8 * GB,
    memory_latency_cycles=296,
    caches=_caches(96, 64, 32, 4 * MB, 46, 20, 188),
    sources=_sheet(named.TURING_PAPER, TURING_CLOCK, TURING_CACHES, TURING_LATENCY) | {"peak_flops": TURING_PEAKS},
)

RTX2080TI = _gpu(
    "sm_75",
    name="rtx2080ti",
    description="NVIDIA GeForce RTX 2080 Ti (Turing TU102)",
    processors=68,
    clock_hz=1.545e9,
    peak_flops={"fp32": 13.4e12, "fp16": 53.8e12},
    memory_bandwidth=616e9,
    memory_bytes=11 * GB,
    memory_latency_cycles=296,
    caches=_caches(96, 64, 32, 5632 * KB, 68, 20, 188),
    sources=_sheet(named.TURING_PAPER, TURING_CLOCK, TURING_CACHES, TURING_LATENCY) | {"peak_flops": TURING_PEAKS},
)

A100 = _gpu(
    "sm_80",
    name="a100",
    description="NVIDIA A100 SXM4 40 GB (Ampere)",
    processors=108,
    clock_hz=1.41e9,
    peak_flops={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    memory_bandwidth=1555e9,
    memory_bytes=40 * GB,
    memory_latency_cycles=466,
    caches=_caches(192, 128, 38, 40 * MB, 108, 5120 / 108, 262),
    sources=_sheet(
        named.A100_PAPER,
        "boost clock",
        f"level 2 bandwidth from {named.A100_PAPER}: 5120 bytes a cycle in all; latencies from {named.LUO}",
        f"{named.LUO}: latencies of memory scopes, A100",
    ),
)

RTX4090 = _gpu(
    "sm_89",
    name="rtx4090",
    description="NVIDIA GeForce RTX 4090 (Ada AD102)",
    processors=128,
    clock_hz=2.52e9,
    peak_flops={"fp32": 82.6e12, "tf32": 82.6e12, "fp16": 165.2e12, "bf16": 165.2e12},
    memory_bandwidth=1008e9,
    memory_bytes=24 * GB,
    memory_latency_cycles=542,
    caches=_caches(128, 128, 43, 72 * MB, 128, 15.5, 273),
    sources=_sheet(
        named.ADA_PAPER,
        "boost clock",
        f"level 2 bandwidth assumed: 5 TB/s in all; latencies from {named.LUO}",
        f"{named.LUO}: latencies of memory scopes, RTX 4090",
    )
    | {"peak_flops": f"{named.ADA_PAPER}: dense, fp16 accumulated in fp32"},
)

H100 = _gpu(
    "sm_90a",
    name="h100",
    description="NVIDIA H100 SXM5 80 GB (Hopper)",
    chip="h200",
    processors=132,
    clock_hz=1.98e9,
    peak_flops={"fp32": 66.9e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12},
    memory_bandwidth=3352e9,
    memory_bytes=80 * GB,
    memory_latency_cycles=479,
    caches=_caches(256, 128, 41, 50 * MB, 132, 21.4, 263),
    sources=_sheet(
        named.H100_PAPER,
        "maximum boost clock; under tensor-core load assumed: 1.83 GHz, the clock that the dense tensor peaks imply",
        f"level 2 bandwidth {LIKE_H200}, the same chip; latencies from {named.LUO}",
        f"{named.LUO}: latencies of memory scopes, H800 PCIe",
    )
    | {"peak_flops": f"{named.H100_PAPER}: dense"},
)

H200 = replace(
    H100,
    name="h200",
    chip="",
    description="NVIDIA H200 SXM 141 GB (Hopper)",
    memory_bandwidth=4.8e12,
    memory_bytes=141_000_000_000,
    caches=_caches(256, 128, 41, 60 * MB, 132, 21.4, 263),
    sustained_flops={"fp32": 51e12, "tf32": 410e12, "fp16": 753e12, "bf16": 783e12},
    sustained_memory_bandwidth=4.3e12,
    sources={
        **H100.sources,
        "processors": f"{named.DRIVER}: cuDeviceGetAttribute on an H200",
        "clock_hz": "assumed: as of the h100",
        "peak_flops": f"{named.H200_SHEET}: as the H100, dense",
        "memory_bandwidth": named.H200_SHEET,
        "memory_bytes": named.H200_SHEET,
        "memory_latency_cycles": f"assumed: as of the H800 PCIe in {named.LUO}",
        "caches": f"level 1 size from {named.H100_PAPER}; level 2 size from {named.DRIVER}: cuDeviceGetAttribute on an "
        f"H200; {L1_BANDWIDTH}; level 2 bandwidth measured: copies that stay in level 2, the best of 3.8 to 5.6 TB/s, "
        f"{BENCH}; latencies assumed: as of the H800 PCIe in {named.LUO}",
        "sustained_flops": f"measured: matrix products of 8192, {BENCH}",
        "sustained_memory_bandwidth": f"measured: copies, the best of runs that gave 2.8 to 4.3 TB/s, {BENCH}",
        "launch_seconds": f"measured: tiny dependent kernels, {BENCH}",
    },
)

B200 = _gpu(
    "sm_100a",
    name="b200",
    description="NVIDIA B200 SXM 180 GB (Blackwell)",
    processors=148,
    clock_hz=1.98e9,
    peak_flops={"fp32": 75e12, "tf32": 1.1e15, "fp16": 2.25e15, "bf16": 2.25e15},
    memory_bandwidth=8e12,
    memory_bytes=180_000_000_000,
    memory_latency_cycles=550,
    caches=_caches(256, 128, 39, 126 * MB, 148, 64, 297),
    sources={
        "processors": named.CHEESE_B200,
        "clock_hz": "derived: the clock at which 148 processors of 128 lanes reach 75 TFLOP/s",
        "peak_flops": f"tensor cores from {named.BLACKWELL_BRIEF}: HGX B200 at 1000 W, dense; "
        "fp32 derived: 600 TFLOP/s of the eight GPUs of an HGX B200 (the technical brief rounds up to 80 each)",
        "memory_bandwidth": f"{named.B200_SHEET}: 64 TB/s of eight GPUs",
        "memory_bytes": f"{named.B200_SHEET}: 1440 GB of eight GPUs",
        "memory_latency_cycles": "assumed: somewhat above the h100's",
        "caches": f"level 1 size from {named.CHEESE_B200}; level 2 size from {named.CHEESE_B200}; {L1_BANDWIDTH}; "
        "level 2 bandwidth assumed: 64 bytes a cycle each; latencies assumed: 20 ns and 150 ns",
    },
)

GPUS = (V100, XAVIER, RTX2080, RTX2080TI, A100, RTX4090, H100, H200, B200)
