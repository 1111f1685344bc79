"""Catalogue data of CPU targets. Peak rates are computed here from cores, clock, vector width and ports."""

from __future__ import annotations

from tilewright.hardware.machine import Cache, Machine

KB = 1024
MB = 1024 * KB
GB = 1024 * MB

X86_V3 = (
    "pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "f16c", "fma", "bmi1", "bmi2", "movbe", "abm", "avx2",
)  # fmt: skip
"""/proc/cpuinfo names ("pni" is SSE3, "abm" LZCNT) of the instructions in -march=x86-64-v3."""
X86_V4 = (*X86_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
ARMV8 = ("fp", "asimd")
ARMV8_2 = (*ARMV8, "crc32", "atomics", "fphp", "asimdhp", "asimdrdm", "lrcpc", "asimddp")

INTEL_MANUAL = "Intel 64 and IA-32 Architectures Optimization Reference Manual"
FOG = "A. Fog, Instruction tables, and The microarchitecture of Intel, AMD and VIA CPUs"
GENERIC = "assumption: a typical machine of this instruction set"
DISPATCH = "assumption: order of magnitude of an empty parallel region of libgomp with spinning threads"
DERIVED = "derived: processors * clock_hz * fma_ports * lanes * 2"


def peak(processors: int, clock_hz: float, fma_ports: float, vector_bits: int, fp16: bool = False) -> dict[str, float]:
    """Peak flop/s: every port starts one full-width fused multiply-add (two operations a lane) each cycle."""
    fp32 = processors * clock_hz * fma_ports * (vector_bits // 32) * 2
    return {"fp32": fp32, "fp16": 2 * fp32} if fp16 else {"fp32": fp32}


X86_AVX2 = Machine(
    name="x86-avx2",
    kind="cpu",
    vendor="generic",
    architecture="x86-64",
    description="any x86-64 machine with AVX2 and FMA (x86-64-v3); four cores of the Haswell kind assumed",
    processors=4,
    clock_hz=3.0e9,
    peak_flops=peak(4, 3.0e9, 2, 256),
    memory_bandwidth=38.4e9,
    memory_bytes=16 * GB,
    memory_latency_cycles=240,
    caches=(
        Cache(level=1, bytes=32 * KB, line_bytes=64, ways=8, shared_by=1, bandwidth=64, latency_cycles=5),
        Cache(level=2, bytes=256 * KB, line_bytes=64, ways=8, shared_by=1, bandwidth=32, latency_cycles=12),
        Cache(level=3, bytes=8 * MB, line_bytes=64, ways=16, shared_by=4, bandwidth=16, latency_cycles=40),
    ),
    fma_latency_cycles=5,
    vector_bits=256,
    vector_registers=16,
    fma_ports=2,
    load_ports=2,
    store_ports=1,
    issue_width=4,
    isa=X86_V3,
    compiler_flags=("-march=x86-64-v3",),
    target_triple="x86_64-linux-gnu",
    dispatch_seconds=2e-6,
    sources={
        "processors": GENERIC,
        "clock_hz": GENERIC,
        "peak_flops": DERIVED,
        "memory_bandwidth": "assumption: two channels of DDR4-2400",
        "memory_bytes": GENERIC,
        "memory_latency_cycles": "assumption: 80 ns",
        "caches": f"{INTEL_MANUAL}, Haswell: cache parameters; level 3 bandwidth assumed",
        "fma_latency_cycles": f"{INTEL_MANUAL}, Haswell",
        "vector_bits": "AVX2",
        "vector_registers": "AVX2",
        "fma_ports": f"{INTEL_MANUAL}, Haswell: ports 0 and 1",
        "load_ports": f"{INTEL_MANUAL}, Haswell: ports 2 and 3",
        "store_ports": f"{INTEL_MANUAL}, Haswell: port 4",
        "issue_width": f"{INTEL_MANUAL}, Haswell",
        "dispatch_seconds": DISPATCH,
    },
)

SKYLAKE_SOURCES = {
    "peak_flops": DERIVED,
    "memory_latency_cycles": "assumption: 90 ns",
    "caches": f"{INTEL_MANUAL}, Skylake Server: cache parameters; level 3 bandwidth assumed",
    "fma_latency_cycles": f"{INTEL_MANUAL}, Skylake Server",
    "vector_bits": "AVX-512",
    "vector_registers": "AVX-512",
    "fma_ports": f"{INTEL_MANUAL}, Skylake Server: ports 0+1 fused and 5",
    "load_ports": f"{INTEL_MANUAL}, Skylake Server: ports 2 and 3",
    "store_ports": f"{INTEL_MANUAL}, Skylake Server: port 4",
    "issue_width": f"{INTEL_MANUAL}, Skylake Server",
    "dispatch_seconds": DISPATCH,
}


def _skylake_caches(cores: int) -> tuple[Cache, ...]:
    return (
        Cache(level=1, bytes=32 * KB, line_bytes=64, ways=8, shared_by=1, bandwidth=128, latency_cycles=5),
        Cache(level=2, bytes=1 * MB, line_bytes=64, ways=16, shared_by=1, bandwidth=64, latency_cycles=14),
        Cache(
            level=3, bytes=cores * 1408 * KB, line_bytes=64, ways=11, shared_by=cores, bandwidth=10, latency_cycles=60
        ),
    )


X86_AVX512 = Machine(
    name="x86-avx512",
    kind="cpu",
    vendor="generic",
    architecture="x86-64",
    description="any x86-64 machine with AVX-512 (x86-64-v4); eight cores of the Skylake Server kind assumed",
    processors=8,
    clock_hz=2.5e9,
    peak_flops=peak(8, 2.5e9, 2, 512),
    memory_bandwidth=128e9,
    memory_bytes=64 * GB,
    memory_latency_cycles=225,
    caches=_skylake_caches(8),
    fma_latency_cycles=4,
    vector_bits=512,
    vector_registers=32,
    fma_ports=2,
    load_ports=2,
    store_ports=1,
    issue_width=4,
    isa=X86_V4,
    compiler_flags=("-march=x86-64-v4", "-mprefer-vector-width=512"),
    target_triple="x86_64-linux-gnu",
    dispatch_seconds=3e-6,
    sources={
        **SKYLAKE_SOURCES,
        "processors": GENERIC,
        "clock_hz": GENERIC,
        "memory_bandwidth": "assumption: six channels of DDR4-2666",
        "memory_bytes": GENERIC,
    },
)

XEON_8124M = Machine(
    name="xeon-8124m",
    kind="cpu",
    vendor="Intel",
    architecture="x86-64",
    description="Intel Xeon Platinum 8124M (Skylake Server), one socket of 18 cores, as in AWS c5.9xlarge",
    processors=18,
    clock_hz=3.0e9,
    peak_flops=peak(18, 3.0e9, 2, 512),
    memory_bandwidth=128e9,
    memory_bytes=72 * GB,
    memory_latency_cycles=270,
    caches=_skylake_caches(18),
    fma_latency_cycles=4,
    vector_bits=512,
    vector_registers=32,
    fma_ports=2,
    load_ports=2,
    store_ports=1,
    issue_width=4,
    isa=X86_V4,
    compiler_flags=("-march=x86-64-v4", "-mtune=skylake-avx512", "-mprefer-vector-width=512"),
    target_triple="x86_64-linux-gnu",
    dispatch_seconds=4e-6,
    sources={
        **SKYLAKE_SOURCES,
        "processors": "AWS instance types: c5.9xlarge has 36 virtual processors, two a core",
        "clock_hz": "AWS instance types: c5, base clock 3.0 GHz",
        "memory_bandwidth": "Intel Xeon Scalable (Skylake) product brief: six channels of DDR4-2666",
        "memory_bytes": "AWS instance types: c5.9xlarge",
    },
)

CORTEX_A53 = Machine(
    name="cortex-a53",
    kind="cpu",
    vendor="Arm",
    architecture="aarch64",
    description="four Arm Cortex-A53 cores at 1.2 GHz, as in the BCM2837 of a Raspberry Pi 3",
    processors=4,
    clock_hz=1.2e9,
    peak_flops=peak(4, 1.2e9, 1, 128),
    memory_bandwidth=3.6e9,
    memory_bytes=1 * GB,
    memory_latency_cycles=180,
    caches=(
        Cache(level=1, bytes=32 * KB, line_bytes=64, ways=4, shared_by=1, bandwidth=8, latency_cycles=3),
        Cache(level=2, bytes=512 * KB, line_bytes=64, ways=16, shared_by=4, bandwidth=8, latency_cycles=15),
    ),
    fma_latency_cycles=8,
    vector_bits=128,
    vector_registers=32,
    fma_ports=1,
    load_ports=0.5,
    store_ports=0.5,
    issue_width=2,
    isa=ARMV8,
    compiler_flags=("-mcpu=cortex-a53",),
    target_triple="aarch64-linux-gnu",
    dispatch_seconds=6e-6,
    sources={
        "processors": "Broadcom BCM2837, Raspberry Pi documentation",
        "clock_hz": "Broadcom BCM2837, Raspberry Pi documentation",
        "peak_flops": DERIVED,
        "memory_bandwidth": "derived: 32-bit LPDDR2 at 900 MT/s (Raspberry Pi documentation)",
        "memory_bytes": "Raspberry Pi 3 Model B",
        "memory_latency_cycles": "assumption: 150 ns",
        "caches": "Arm Cortex-A53 Technical Reference Manual (sizes as in BCM2837); bandwidths and latencies assumed",
        "fma_latency_cycles": "GCC, config/arm/cortex-a53.md, cortex_a53_fpmac",
        "vector_bits": "Armv8-A Advanced SIMD",
        "vector_registers": "Armv8-A Advanced SIMD",
        "fma_ports": "assumption: two 64-bit pipes together take one 128-bit FMLA a cycle",
        "load_ports": "assumption: 64-bit path, a 128-bit load takes two cycles",
        "store_ports": "assumption: 64-bit path, a 128-bit store takes two cycles",
        "issue_width": "Arm Cortex-A53 Technical Reference Manual: two, in order",
        "dispatch_seconds": DISPATCH,
    },
)

N1_GUIDE = "Arm Neoverse N1 Software Optimization Guide"
N1_MANUAL = "Arm Neoverse N1 Technical Reference Manual"

NEOVERSE_N1 = Machine(
    name="neoverse-n1",
    kind="cpu",
    vendor="Arm",
    architecture="aarch64",
    description="AWS Graviton2: 64 Arm Neoverse N1 cores at 2.5 GHz",
    processors=64,
    clock_hz=2.5e9,
    peak_flops=peak(64, 2.5e9, 2, 128, fp16=True),
    memory_bandwidth=204.8e9,
    memory_bytes=128 * GB,
    memory_latency_cycles=240,
    caches=(
        Cache(level=1, bytes=64 * KB, line_bytes=64, ways=4, shared_by=1, bandwidth=32, latency_cycles=5),
        Cache(level=2, bytes=1 * MB, line_bytes=64, ways=8, shared_by=1, bandwidth=19, latency_cycles=11),
        Cache(level=3, bytes=32 * MB, line_bytes=64, ways=16, shared_by=64, bandwidth=8, latency_cycles=75),
    ),
    fma_latency_cycles=4,
    vector_bits=128,
    vector_registers=32,
    fma_ports=2,
    load_ports=2,
    store_ports=1,
    issue_width=4,
    isa=ARMV8_2,
    compiler_flags=("-mcpu=neoverse-n1",),
    target_triple="aarch64-linux-gnu",
    dispatch_seconds=6e-6,
    sources={
        "processors": "AWS instance types: m6g.16xlarge",
        "clock_hz": "AWS Graviton2 announcement",
        "peak_flops": DERIVED + ", twice that with half-precision vectors",
        "memory_bandwidth": "AWS Graviton2 announcement: eight channels of DDR4-3200",
        "memory_bytes": "AWS instance types: c6g.16xlarge",
        "memory_latency_cycles": "assumption: 96 ns",
        "caches": f"{N1_MANUAL}, sizes of Graviton2; level 2: Chips and Cheese, Deep Diving Neoverse N1 (2021): "
        "19.3 bytes a cycle; level 3 associativity and bandwidth assumed",
        "fma_latency_cycles": f"{N1_GUIDE}: 4, and 2 between dependent accumulations",
        "vector_bits": "Armv8-A Advanced SIMD",
        "vector_registers": "Armv8-A Advanced SIMD",
        "fma_ports": f"{N1_GUIDE}: pipes V0 and V1",
        "load_ports": f"{N1_GUIDE}: two load/store pipes",
        "store_ports": f"{N1_GUIDE}",
        "issue_width": f"{N1_GUIDE}: four decoded a cycle",
        "dispatch_seconds": DISPATCH,
    },
)

CPUS = (X86_AVX2, X86_AVX512, XEON_8124M, CORTEX_A53, NEOVERSE_N1)
