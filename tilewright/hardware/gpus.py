"""Catalogue data of GPU targets: what a compute capability fixes stands once, the chips follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.hardware.machine import Cache, Machine

KB = 1024
MB = 1024 * KB
GB = 1024 * MB

GUIDE = "CUDA C++ Programming Guide, table of technical specifications per compute capability"
ARITHMETIC = "CUDA C++ Programming Guide, table of arithmetic throughput per compute capability"
MEASURED = "measured, bench: NVIDIA H200, CUDA-graph replays, 2026-11-21"
LIKE_H200 = "assumption: as measured on the h200"
JIA_VOLTA = "about, after Z. Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking (2018)"
JIA_TURING = "about, after Z. Jia et al., Dissecting the NVidia Turing T4 GPU via Microbenchmarking (2019)"
LUO = "about, after W. Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture (2024)"
CHEESE_B200 = "Chips and Cheese, Nvidia's B200 (2025)"

LAUNCH_SECONDS = 1.1e-6


def capability_facts(capability: tuple[int, int]) -> dict[str, Any]:
    """What every GPU of a compute capability has in common, with its sources; KeyError for one not listed.

    Those of 7.0 to 10.0 are in the programming guide; the unified L1 and shared memory's size is not included.
    """
    # shared memory of a processor and of a block (KB), threads and blocks of a processor, fp32 lanes, bytes a cycle
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
            **dict.fromkeys(guide_fields, GUIDE),
            "register_allocation_unit": "CUDA occupancy calculator: 256 registers a warp",
            "shared_reserved_bytes": "CUDA C++ Programming Guide, shared memory of compute capability 8.x and later",
            "shared_bytes_per_cycle": "32 banks of 4 bytes; Turing: half (NVIDIA Ampere GA102 whitepaper)",
            "schedulers_per_processor": "CUDA C++ Programming Guide, architecture of each compute capability",
            "fp32_lanes_per_processor": ARITHMETIC,
            "special_lanes_per_processor": ARITHMETIC,
            "fma_latency_cycles": f"{JIA_VOLTA}; later architectures: {LUO}",
            "launch_seconds": LIKE_H200,
        },
    }


def _caches(
    l1_kb: int, l1: float, l1_latency: float, l2_bytes: int, processors: int, l2: float, l2_latency: float
) -> tuple[Cache, ...]:
    return (
        Cache(1, l1_kb * KB, line_bytes=128, ways=0, shared_by=1, bandwidth=l1, latency_cycles=l1_latency),
        Cache(2, l2_bytes, line_bytes=128, ways=0, shared_by=processors, bandwidth=l2, latency_cycles=l2_latency),
    )


def _gpu(architecture: str, sources: dict[str, str], **facts: Any) -> Machine:
    digits = architecture.removeprefix("sm_").rstrip("a")
    common = capability_facts((int(digits[:-1]), int(digits[-1])))
    merged = {**common.pop("sources"), **sources}
    return Machine(kind="gpu", vendor="NVIDIA", architecture=architecture, sources=merged, **{**common, **facts})


def _sheet(sheet: str, caches: str, latency: str) -> dict[str, str]:
    fields = ("processors", "clock_hz", "peak_flops", "memory_bandwidth", "memory_bytes")
    return {**dict.fromkeys(fields, sheet), "caches": f"sizes: {sheet}; {caches}", "memory_latency_cycles": latency}


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
        "NVIDIA Tesla V100 GPU Architecture whitepaper",
        f"latencies: {JIA_VOLTA}; level 2: 2048 bytes a cycle (NVIDIA A100 whitepaper, comparison)",
        JIA_VOLTA,
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
        "NVIDIA Jetson AGX Xavier System-on-Module data sheet",
        "bandwidths and latencies assumed as on the v100",
        "assumption: the v100's and the slower memory's",
    ),
)

TURING = "NVIDIA Turing GPU Architecture whitepaper (reference clocks, half precision with fp32 accumulation)"
TURING_CACHES = f"latencies and level 2 bandwidth a processor: {JIA_TURING}"

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
    sources=_sheet(TURING, TURING_CACHES, JIA_TURING),
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
    sources=_sheet(TURING, TURING_CACHES, JIA_TURING),
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
        "NVIDIA A100 Tensor Core GPU Architecture whitepaper", f"level 2: 5120 bytes a cycle; latencies: {LUO}", LUO
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
        "NVIDIA Ada GPU Architecture whitepaper", f"level 2 bandwidth assumed: 5 TB/s in all; latencies: {LUO}", LUO
    ),
)

H100 = _gpu(
    "sm_90a",
    name="h100",
    description="NVIDIA H100 SXM5 80 GB (Hopper)",
    processors=132,
    clock_hz=1.98e9,
    peak_flops={"fp32": 66.9e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12},
    memory_bandwidth=3352e9,
    memory_bytes=80 * GB,
    memory_latency_cycles=479,
    caches=_caches(256, 128, 41, 50 * MB, 132, 21.4, 263),
    sources=_sheet(
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper",
        f"level 2 bandwidth: {LIKE_H200}, the same chip; latencies: {LUO}",
        LUO,
    ),
)

H200 = replace(
    H100,
    name="h200",
    description="NVIDIA H200 SXM 141 GB (Hopper)",
    memory_bandwidth=4.8e12,
    memory_bytes=141_000_000_000,
    caches=_caches(256, 128, 41, 60 * MB, 132, 21.4, 263),
    sustained_flops={"fp32": 51e12, "tf32": 410e12, "fp16": 753e12, "bf16": 783e12},
    sustained_memory_bandwidth=4.3e12,
    sources={
        **H100.sources,
        "peak_flops": "NVIDIA H200 datasheet: as the H100",
        "memory_bandwidth": "NVIDIA H200 datasheet",
        "memory_bytes": "NVIDIA H200 datasheet",
        "caches": f"level 2 size as the driver reports it on the measured machine; its bandwidth: 5.6 TB/s copied in "
        f"all, {MEASURED}; latencies: {LUO}, on an H100",
        "sustained_flops": f"{MEASURED}, matrix products of 8192",
        "sustained_memory_bandwidth": "measured, bench: copies, the best of several runs, which gave 2.8 to 4.3 TB/s",
        "launch_seconds": MEASURED,
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
        **_sheet(
            "NVIDIA HGX B200 datasheet",
            f"level 1 and 2 sizes and latencies: {CHEESE_B200}; level 2 bandwidth assumed: 64 bytes a cycle each",
            "assumption: somewhat above the h100's",
        ),
        "processors": CHEESE_B200,
        "clock_hz": "derived: the datasheet's 75 TFLOP/s of fp32 on 148 processors of 128 lanes",
    },
)

GPUS = (V100, XAVIER, RTX2080, RTX2080TI, A100, RTX4090, H100, H200, B200)
