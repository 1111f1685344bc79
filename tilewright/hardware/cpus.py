"""Catalogue data of CPU targets. Peak rates are computed here from cores, clock, vector width and ports."""

from __future__ import annotations

from dataclasses import replace

from tilewright.hardware import documents as named
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

GENERIC = "assumed: a typical machine of this instruction set"
DISPATCH = "assumed: order of magnitude of an empty parallel region of libgomp with spinning threads"
DERIVED = "derived: processors * clock_hz * fma_ports * lanes * 2"


def peak(processors: int, clock_hz: float, fma_ports: float, vector_bits: int, fp16: bool = False) -> dict[str, float]:
    """Peak flop/s if every port starts one full-width fused multiply-add (two operations per lane) each cycle."""
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
    pipeline="haswell",
    isa=X86_V3,
    compiler_flags=("-march=x86-64-v3",),
    target_triple="x86_64-linux-gnu",
    dispatch_seconds=2e-6,
    sources={
        "processors": GENERIC,
        "clock_hz": GENERIC,
        "peak_flops": DERIVED,
        "memory_bandwidth": "assumed: two channels of DDR4-2400",
        "memory_bytes": GENERIC,
        "memory_latency_cycles": "assumed: 80 ns",
        "caches": f"level 1 and 2 sizes, ways and level 1 bandwidth from {named.INTEL_MANUAL}, Haswell: cache parameters; "
        "level 1 and 2 latencies assumed: one cycle above the 4 and 11 there, for vectors; level 2 bandwidth assumed: half of its path of "
        "64 bytes; level 3 assumed: 2 MB a core, 40 cycles, 16 bytes a cycle",
        "fma_latency_cycles": f"{named.FOG}, Haswell",
        "vector_bits": f"{named.INTEL_X86_LEVELS}: x86-64-v3",
        "vector_registers": f"{named.INTEL_X86_LEVELS}: x86-64-v3",
        "fma_ports": f"{named.FOG}, Haswell: ports 0 and 1",
        "load_ports": f"{named.FOG}, Haswell: ports 2 and 3",
        "store_ports": f"{named.FOG}, Haswell: port 4",
        "issue_width": f"{named.FOG}, Haswell",
        "dispatch_seconds": DISPATCH,
    },
)

SKYLAKE_SOURCES = {
    "peak_flops": DERIVED,
    "memory_latency_cycles": "assumed: 90 ns",
    "caches": f"sizes, ways, level 1 and 2 bandwidths, level 2 latency from {named.INTEL_MANUAL}, Skylake Server: cache parameters "
    "(the most, not what is sustained); level 1 latency assumed: 5 cycles, for vectors; level 3 bandwidth assumed: 10 bytes a cycle; "
    "level 3 latency assumed: 60 cycles of the 50 to 70",
    "fma_latency_cycles": f"{named.FOG}, Skylake",
    "vector_bits": f"{named.INTEL_X86_LEVELS}: x86-64-v4",
    "vector_registers": f"{named.INTEL_X86_LEVELS}: x86-64-v4",
    "fma_ports": f"{named.INTEL_MANUAL}, Skylake Server: ports 0 and 1 fused, and port 5",
    "load_ports": f"{named.INTEL_MANUAL}, Skylake Server: ports 2 and 3",
    "store_ports": f"{named.INTEL_MANUAL}, Skylake Server: port 4",
    "issue_width": f"{named.FOG}, Skylake",
    "dispatch_seconds": DISPATCH,
}


def _skylake_caches(cores: int) -> tuple[Cache, ...]:
    return (
        Cache(level=1, bytes=32 * KB, line_bytes=64, ways=8, shared_by=1, bandwidth=128, latency_cycles=5),
        Cache(level=2, bytes=1 * MB, line_bytes=64, ways=16, shared_by=1, bandwidth=64, latency_cycles=14),
        Cache(level=3, bytes=cores * 1408 * KB, line_bytes=64, ways=11, shared_by=cores, bandwidth=10, latency_cycles=60),
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
    pipeline="skylake-server",
    isa=X86_V4,
    compiler_flags=("-march=x86-64-v4", "-mprefer-vector-width=512"),
    target_triple="x86_64-linux-gnu",
    dispatch_seconds=3e-6,
    sources={
        **SKYLAKE_SOURCES,
        "processors": GENERIC,
        "clock_hz": GENERIC,
        "memory_bandwidth": "assumed: six channels of DDR4-2666 of 8 bytes",
        "memory_bytes": GENERIC,
    },
)

GOLDEN_COVE_SOURCES = {
    **X86_AVX512.sources,
    "issue_width": f"{named.INTEL_MANUAL}, Golden Cove: six",
    "memory_latency_cycles": "assumed: 90 ns, as of x86-avx512",
}
GOLDEN_COVE = replace(X86_AVX512, issue_width=6, pipeline="golden-cove", sources=GOLDEN_COVE_SOURCES)
"""The core of Xeons with AMX, used when identifying this host: two 512-bit multiply-adds, loads and one store per cycle as well."""

AMX_BF16_FLOPS_PER_CYCLE = 1024
"""A tile product of 16 x 16 x 32 multiply-adds every 16 cycles (Intel optimization manual, AMX)."""

XEON_SAPPHIRE_RAPIDS = replace(
    GOLDEN_COVE,
    name="xeon-sapphire-rapids",
    vendor="Intel",
    description="Intel Xeon Platinum 8480+ (Sapphire Rapids) with AMX, one socket of 56 cores",
    processors=56,
    clock_hz=3.0e9,
    peak_flops={**peak(56, 3.0e9, 2, 512), "bf16": 56 * 3.0e9 * AMX_BF16_FLOPS_PER_CYCLE},
    memory_bandwidth=307.2e9,
    memory_bytes=512 * GB,
    memory_latency_cycles=270,
    caches=(
        Cache(level=1, bytes=48 * KB, line_bytes=64, ways=12, shared_by=1, bandwidth=128, latency_cycles=5),
        Cache(level=2, bytes=2 * MB, line_bytes=64, ways=16, shared_by=1, bandwidth=64, latency_cycles=14),
        Cache(level=3, bytes=105 * MB, line_bytes=64, ways=15, shared_by=56, bandwidth=10, latency_cycles=70),
    ),
    isa=(*X86_V4, "avx512_bf16", "amx_tile", "amx_bf16"),
    compiler_flags=(*X86_AVX512.compiler_flags, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    dispatch_seconds=4e-6,
    sources={
        **GOLDEN_COVE_SOURCES,
        "processors": f"{named.INTEL_LISTS}: Xeon Platinum 8480+",
        "clock_hz": "assumed: the turbo clock of all cores, 3.0 GHz, where the base clock is 2.0 GHz",
        "peak_flops": f"{DERIVED}; bf16 derived: {AMX_BF16_FLOPS_PER_CYCLE} operations a cycle of the tile unit ({named.INTEL_MANUAL}: AMX)",
        "memory_bandwidth": f"derived: eight channels of DDR5-4800 of 8 bytes ({named.INTEL_LISTS})",
        "memory_bytes": GENERIC,
        "memory_latency_cycles": "assumed: 90 ns",
        "caches": f"sizes and ways of levels 1 and 2 from {named.INTEL_MANUAL}, Golden Cove; level 3 size from {named.INTEL_LISTS}; "
        "bandwidths and latencies of levels 1 and 2 assumed: as of x86-avx512; level 3 assumed: 15 ways, 70 cycles, 10 bytes a cycle",
    },
)

ZEN3_SOURCES = {
    **X86_AVX2.sources,
    **dict.fromkeys(("fma_ports", "load_ports", "store_ports", "issue_width", "fma_latency_cycles"), named.AMD_ZEN3),
    "caches": f"{named.AMD_ZEN3}: sizes, ways, latencies (of level 1 that of vectors), and bytes a cycle of level 1; levels 2 and 3 assumed: 32 "
    "bytes a cycle, the width of their paths",
    "memory_latency_cycles": "assumed: 110 ns at 3.15 GHz",
}
ZEN3 = replace(
    X86_AVX2,
    name="zen3",
    vendor="AMD",
    memory_latency_cycles=350,
    caches=(
        Cache(level=1, bytes=32 * KB, line_bytes=64, ways=8, shared_by=1, bandwidth=64, latency_cycles=7),
        Cache(level=2, bytes=512 * KB, line_bytes=64, ways=8, shared_by=1, bandwidth=32, latency_cycles=12),
        Cache(level=3, bytes=32 * MB, line_bytes=64, ways=16, shared_by=8, bandwidth=32, latency_cycles=46),
    ),
    fma_latency_cycles=4,
    issue_width=6,
    pipeline="zen3",
    sources=ZEN3_SOURCES,
)
"""The core of EPYC 7003 and Ryzen 5000: four vector pipes of 256 bits, two of which multiply."""

EPYC_7763 = replace(
    ZEN3,
    name="epyc-7763",
    description="AMD EPYC 7763 (Zen 3), one socket of 64 cores",
    processors=64,
    clock_hz=3.15e9,
    peak_flops=peak(64, 3.15e9, 2, 256),
    memory_bandwidth=204.8e9,
    memory_bytes=256 * GB,
    dispatch_seconds=4e-6,
    sources={
        **ZEN3_SOURCES,
        "processors": f"{named.AMD_LISTS}: EPYC 7763",
        "clock_hz": f"{named.AMD_LISTS}: EPYC 7763, base clock 2.45 GHz, and boost of one core 3.5; assumed: 0.7 GHz above base with all cores",
        "memory_bandwidth": f"derived: eight channels of DDR4-3200 of 8 bytes ({named.AMD_LISTS})",
        "memory_bytes": GENERIC,
    },
)

ZEN5_SOURCES = {
    **X86_AVX512.sources,
    **dict.fromkeys(("fma_ports", "load_ports", "store_ports", "issue_width", "fma_latency_cycles"), named.AMD_ZEN5),
    "caches": f"{named.AMD_ZEN5}: sizes, ways, latencies of levels 1 and 2, and bytes a cycle; level 3 assumed: 50 cycles",
    "memory_latency_cycles": "assumed: 110 ns at 4.1 GHz",
}
ZEN5 = replace(
    X86_AVX512,
    name="zen5",
    vendor="AMD",
    memory_latency_cycles=450,
    caches=(
        Cache(level=1, bytes=48 * KB, line_bytes=64, ways=12, shared_by=1, bandwidth=128, latency_cycles=4),
        Cache(level=2, bytes=1 * MB, line_bytes=64, ways=16, shared_by=1, bandwidth=64, latency_cycles=14),
        Cache(level=3, bytes=32 * MB, line_bytes=64, ways=16, shared_by=8, bandwidth=32, latency_cycles=50),
    ),
    fma_latency_cycles=4,
    issue_width=8,
    pipeline="zen5",
    sources=ZEN5_SOURCES,
)
"""The core of EPYC 9005 and Ryzen 9000: four vector pipes of 512 bits, two of which multiply."""

EPYC_9655 = replace(
    ZEN5,
    name="epyc-9655",
    description="AMD EPYC 9655 (Zen 5), one socket of 96 cores",
    processors=96,
    clock_hz=4.1e9,
    peak_flops=peak(96, 4.1e9, 2, 512),
    memory_bandwidth=576e9,
    memory_bytes=512 * GB,
    isa=(*X86_V4, "avx512_vnni", "avx512_bf16"),
    compiler_flags=(*X86_AVX512.compiler_flags, "-mavx512vnni", "-mavx512bf16"),
    dispatch_seconds=4e-6,
    sources={
        **ZEN5_SOURCES,
        "processors": f"{named.AMD_LISTS}: EPYC 9655",
        "clock_hz": f"{named.AMD_LISTS}: EPYC 9655, all-core boost",
        "memory_bandwidth": f"derived: twelve channels of DDR5-6000 of 8 bytes ({named.AMD_LISTS})",
        "memory_bytes": GENERIC,
    },
)

XEON_8124M = Machine(
    name="xeon-8124m",
    kind="cpu",
    vendor="Intel",
    architecture="x86-64",
    description="Intel Xeon Platinum 8124M (Skylake Server) at its base clock, one socket of 18 cores, as in AWS c5.9xlarge",
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
    pipeline="skylake-server",
    isa=X86_V4,
    compiler_flags=("-march=x86-64-v4", "-mtune=skylake-avx512", "-mprefer-vector-width=512"),
    target_triple="x86_64-linux-gnu",
    dispatch_seconds=4e-6,
    sources={
        **SKYLAKE_SOURCES,
        "processors": f"{named.AWS_INSTANCES}: c5.9xlarge has 36 virtual processors, two a core",
        "clock_hz": "assumed: the base clock, 3.0 GHz, as the 3.4 GHz that AWS gives for all cores is more than 512-bit code gets",
        "memory_bandwidth": "derived: six channels of DDR4-2666 of 8 bytes",
        "memory_bytes": f"{named.AWS_INSTANCES}: c5.9xlarge",
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
    fma_latency_cycles=4,
    vector_bits=128,
    vector_registers=32,
    fma_ports=1,
    load_ports=0.5,
    store_ports=0.5,
    issue_width=2,
    pipeline="cortex-a53",
    isa=ARMV8,
    compiler_flags=("-mcpu=cortex-a53",),
    target_triple="aarch64-linux-gnu",
    dispatch_seconds=6e-6,
    sources={
        "processors": named.RASPBERRY,
        "clock_hz": f"{named.RASPBERRY}: maximum clock",
        "peak_flops": DERIVED,
        "memory_bandwidth": f"derived: 32-bit LPDDR2 at 900 MT/s ({named.RASPBERRY})",
        "memory_bytes": f"{named.RASPBERRY}: Raspberry Pi 3 Model B",
        "memory_latency_cycles": "assumed: 150 ns",
        "caches": f"lines and ways from {named.A53_MANUAL}; sizes from {named.RASPBERRY}; level 1 latency from {named.LLVM_A53}: "
        f"LoadLatency; level 1 bandwidth from {named.GCC_A53}: 64 bits a cycle; level 2 assumed: 8 bytes a cycle, 15 cycles",
        "fma_latency_cycles": f"{named.GCC_A53}: cortex_a53_advsimd_mul_q, and the bypass of accumulators; the same from {named.LLVM_A53}",
        "vector_bits": f"{named.ARM_ARCHITECTURE}: Advanced SIMD",
        "vector_registers": f"{named.ARM_ARCHITECTURE}: Advanced SIMD",
        "fma_ports": f"{named.GCC_A53}: two 64-bit units, which a 128-bit instruction takes together for one cycle (LLVM's model has it take two)",
        "load_ports": f"{named.GCC_A53}: a 128-bit load takes two cycles; the same from {named.NCNN_A53}",
        "store_ports": f"{named.GCC_A53}: a 128-bit store takes two cycles",
        "issue_width": f"{named.LLVM_A53}: two, in order",
        "dispatch_seconds": DISPATCH,
    },
)

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
    memory_latency_cycles=202,
    caches=(
        Cache(level=1, bytes=64 * KB, line_bytes=64, ways=4, shared_by=1, bandwidth=32, latency_cycles=5),
        Cache(level=2, bytes=1 * MB, line_bytes=64, ways=8, shared_by=1, bandwidth=19, latency_cycles=11),
        Cache(level=3, bytes=32 * MB, line_bytes=64, ways=16, shared_by=64, bandwidth=8, latency_cycles=75),
    ),
    fma_latency_cycles=2,
    vector_bits=128,
    vector_registers=32,
    fma_ports=2,
    load_ports=2,
    store_ports=1,
    issue_width=4,
    pipeline="neoverse-n1",
    isa=ARMV8_2,
    compiler_flags=("-mcpu=neoverse-n1",),
    target_triple="aarch64-linux-gnu",
    dispatch_seconds=6e-6,
    sources={
        "processors": f"{named.ARM_GRAVITON2}: c6g.16xlarge",
        "clock_hz": named.ANANDTECH_GRAVITON2,
        "peak_flops": DERIVED + ", twice that with half-precision vectors",
        "memory_bandwidth": f"{named.ANANDTECH_GRAVITON2}: eight channels of DDR4-3200",
        "memory_bytes": f"{named.ARM_GRAVITON2}: c6g.16xlarge",
        "memory_latency_cycles": f"derived: 81 ns at 2.5 GHz ({named.ANANDTECH_GRAVITON2}: structural estimate)",
        "caches": f"sizes and ways of level 1 and 2 from {named.ARM_GRAVITON2}; level 3 size from {named.ARM_GRAVITON2}; "
        f"level 1 latency from {named.LLVM_N1}: vector loads; level 1 bandwidth derived: two loads of 16 bytes; "
        f"level 2 latency from {named.ANANDTECH_GRAVITON2}; level 2 bandwidth assumed: six tenths of its path of 32 bytes; "
        "level 3 assumed: 16 ways, 30 ns, 8 bytes a cycle with every core at it",
        "fma_latency_cycles": f"{named.N1_GUIDE}: 4, and 2 from accumulation to accumulation",
        "vector_bits": f"{named.ARM_ARCHITECTURE}: Advanced SIMD",
        "vector_registers": f"{named.ARM_ARCHITECTURE}: Advanced SIMD",
        "fma_ports": f"{named.LLVM_N1}: N1UnitV0 and N1UnitV1",
        "load_ports": f"{named.LLVM_N1}: two pipes N1UnitL",
        "store_ports": "assumed: one 16-byte store a cycle",
        "issue_width": f"{named.N1_GUIDE}: four decoded a cycle",
        "dispatch_seconds": DISPATCH,
    },
)

CPUS = (X86_AVX2, X86_AVX512, XEON_8124M, XEON_SAPPHIRE_RAPIDS, EPYC_7763, EPYC_9655, CORTEX_A53, NEOVERSE_N1)
