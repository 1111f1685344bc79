"""Identifies the CPU of this host from /proc/cpuinfo and sysfs: identity only, nothing is timed.

Facts that do not follow from the identity (memory bandwidth, latencies) are assumed from the kind of core, and ``sources`` says so, unless
``tilewright calibrate`` has measured them (`hardware/measured_facts.py`).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tilewright import settings
from tilewright.errors import UnsupportedOption
from tilewright.hardware import cpus
from tilewright.hardware import documents as named
from tilewright.hardware.documents import CPUINFO, SYSFS
from tilewright.hardware.machine import Cache, Machine
from tilewright.hardware.measured_facts import calibrated

EXTRA_X86 = {
    "avx512_vnni": "-mavx512vnni",
    "avx512_bf16": "-mavx512bf16",
    "avx512_fp16": "-mavx512fp16",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
    "amx_int8": "-mamx-int8",
}
"""Instruction sets beyond x86-64-v4 that generated code may use, and the compiler flags (gcc 12, clang 14) that enable them."""
EXTRA_AARCH64 = {"atomics": "lse", "asimdrdm": "rdma", "asimddp": "dotprod", "asimdhp": "fp16", "bf16": "bf16"}
SINGLE_PORT_AVX512_MODELS = frozenset({0x66, 0x7D, 0x7E, 0x8C, 0x8D, 0xA7})
"""Intel client cores (Cannon, Ice, Tiger and Rocket Lake), which have one 512-bit multiply-add port."""

SERVER_TURBO_HZ = 1.0e9
SERVER_TURBO_LIMIT_HZ = 3.8e9
"""Difference of all-core turbo and base clock on Intel servers with AMX, and the upper limit of all-core turbo.

Published base and all-core clocks in GHz: Xeon 6980P 2.0 and 3.2, 6960P 2.7 and 3.8 (PurePC, 2025); Intel lists 8480+ 2.0 and 3.0,
8490H and 8592+ 1.9 and 2.9. The smallest difference is used, as 512-bit multiply-adds lower the clock. Model numbers would say more, but virtual
machines hide them.
"""

PROCESSORS = Path("/sys/devices/system/cpu")

ZEN3_FAMILY, ZEN3_SERVER_MODELS = 25, range(0x10)
ZEN3_MODELS = (*ZEN3_SERVER_MODELS, *range(0x20, 0x60))
"""Models of the family with Zen 3; the others are Zen 4 (Linux, arch/x86/kernel/cpu/amd.c, lists generations)."""
ZEN5_FAMILY, ZEN5_SERVER_MODELS = 26, range(0x20)
ZEN5_MODELS = (*ZEN5_SERVER_MODELS, *range(0x40, 0x50), *range(0x70, 0x80))
"""Models of the family with Zen 5 and vector pipes of 512 bits (in the same list)."""
ZEN5_NARROW_MODELS = (*range(0x20, 0x30), *range(0x60, 0x70))
"""Zen 5 with pipes of 256 bits: Strix Point, Krackan Point. Other models of the family are Zen 6."""


@dataclass(frozen=True)
class AmdBoost:
    """What servers of one generation run at with all cores: `above_hz` above the base clock, at most `limit_hz`."""

    models: range
    above_hz: float
    limit_hz: float
    known: str


AMD_BOOSTS = {
    "zen3": AmdBoost(ZEN3_SERVER_MODELS, 0.7e9, 4.0e9, "EPYC 7003"),
    "zen5": AmdBoost(ZEN5_SERVER_MODELS, 1.2e9, 4.1e9, "EPYC 9005"),
}
"""By the pipeline of the core. AMD's product specifications, in GHz: base clock and all-core boost of EPYC 9655 2.6 and 4.1, 9755 2.7 and 4.1, 9575F
3.3 and 4.5, 9965 2.25 and 3.35; base clock and boost of one core, where those of all cores are not listed, of EPYC 7763 2.45 and 3.5, 7713 2.0 and
3.675, 7543 2.8 and 3.7, 7453 2.75 and 3.45 (the smallest difference), 75F3 2.95 and 4.0."""


@dataclass(frozen=True)
class AmdCore:
    """Throughput of one generation of AMD cores per cycle, in vectors of the widest kind that it supports."""

    multiply_adds: float
    loads: float
    stores: float
    multiply_add_latency: float
    issue_width: int


AMD_CORES = {
    "zen": AmdCore(1.0, 1.0, 0.5, 5, 6),  # 256-bit operations occupy the 128-bit pipes for two cycles
    "zen2": AmdCore(2.0, 2.0, 1.0, 5, 6),
    "zen3": AmdCore(2.0, 2.0, 1.0, 4, 6),
    "zen4": AmdCore(1.0, 1.0, 0.5, 4, 6),  # 512-bit operations occupy the 256-bit pipes for two cycles
    "zen5": AmdCore(2.0, 2.0, 1.0, 4, 8),
    "zen5 narrow": AmdCore(1.0, 1.0, 0.5, 4, 8),  # as Zen 4
}


@dataclass(frozen=True)
class CpuIdentity:
    """What the operating system reports about this host's CPU."""

    architecture: str
    """The value of ``platform.machine()``: "x86_64" or "aarch64"."""
    properties: Mapping[str, str]
    """The first processor's entries of /proc/cpuinfo."""
    cores: int
    """Physical cores that this process may run on."""
    base_hz: float
    """Base frequency from sysfs; 0 if sysfs does not have it."""
    caches: tuple[tuple[int, int, int, int, int], ...]
    """(level, bytes, line bytes, ways, cores that share it) for each data or unified cache of the first core."""
    memory_bytes: int


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The entries of the first processor in the text of /proc/cpuinfo."""
    entries: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        entries[name.strip()] = value.strip()
    return entries


def _read(path: Path, default: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return default


def _parse_cpu_list(text: str) -> set[int]:
    """The numbers of a list in the kernel's format: {0, 1, 2, 5} for "0-2,5"."""
    members: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        members.update(range(int(first), int(last or first) + 1))
    return members


def _first_threads(available: Iterable[int], root: Path) -> set[int]:
    """One logical processor for each physical core among the available ones."""
    seen: dict[str, int] = {}
    for index in sorted(available):
        siblings = _read(root / f"cpu{index}/topology/thread_siblings_list", str(index))
        seen.setdefault(siblings, index)
    return set(seen.values())


def separate_cores(root: Path = PROCESSORS) -> list[int]:
    """One logical processor of each physical core that this process may run on."""
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return sorted(_first_threads(available, root))


def read_cpu_identity(root: Path = PROCESSORS, cpuinfo: Path = Path(CPUINFO)) -> CpuIdentity:
    """Reads the identity from the operating system; entries that it does not have are empty or zero."""
    cores = set(separate_cores(root))
    first = min(cores)
    caches = []
    for folder in sorted((root / f"cpu{first}/cache").glob("index*")):
        if _read(folder / "type") == "Instruction":
            continue
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(folder / "size"))
        if size is None:
            continue
        unit = {"": 1, "K": cpus.KB, "M": cpus.MB, "G": cpus.GB}[size[2]]
        sharing = _parse_cpu_list(_read(folder / "shared_cpu_list", str(first))) & cores
        line, ways = _read(folder / "coherency_line_size", "64"), _read(folder / "ways_of_associativity", "0")
        level = int(_read(folder / "level", "0"))
        caches.append((level, int(size[1]) * unit, int(line), int(ways), max(1, len(sharing))))
    base = _read(root / f"cpu{first}/cpufreq/base_frequency", "0")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = parse_cpuinfo(_read(cpuinfo))
    return CpuIdentity(platform.machine(), properties, len(cores), 1e3 * float(base), tuple(sorted(caches)), memory)


def _x86_base_clock(identity: CpuIdentity) -> tuple[float, str]:
    """Base clock and its source: the model name, sysfs, or the constant rate of the time-stamp counter."""
    frequency = re.search(r"@\s*([\d.]+)\s*GHz", identity.properties.get("model name", ""))
    if frequency:
        return float(frequency[1]) * 1e9, f"{CPUINFO}: model name, the base clock"
    if identity.base_hz:
        return identity.base_hz, f"{SYSFS}: base_frequency"
    bogomips = float(identity.properties.get("bogomips", "0") or 0)
    if bogomips:
        return bogomips / 2 * 1e6, f"{CPUINFO}: bogomips, which is twice the rate of the time-stamp counter, and that the base clock"
    return cpus.X86_AVX2.clock_hz, cpus.GENERIC


def _x86_clock(identity: CpuIdentity, flags: set[str]) -> tuple[float, str]:
    """Clock with all cores under load, and its source: the base clock, plus the turbo known for this kind of chip."""
    base, source = _x86_base_clock(identity)
    if identity.properties.get("vendor_id") == "GenuineIntel" and "amx_tile" in flags:
        more, most, known = SERVER_TURBO_HZ, SERVER_TURBO_LIMIT_HZ, f"Xeons with AMX ({named.XEON_6_LISTS}, and Intel's)"
    else:
        core = _measured_amd_core(identity.properties)
        boost = AMD_BOOSTS[core.pipeline] if core is not None else None
        if boost is None or int(identity.properties.get("model", "0")) not in boost.models:
            return base, source
        more, most, known = boost.above_hz, boost.limit_hz, f"{boost.known} ({named.AMD_LISTS})"
    turbo = min(base + more, most)
    if turbo <= base:
        return base, source
    rule = f"{more / 1e9:g} GHz above base and at most {most / 1e9:g} GHz"
    return turbo, f"base clock from {source}; all-core turbo assumed: {rule}, as of {known}"


def _measured_amd_core(properties: Mapping[str, str]) -> Machine | None:
    """The AMD core with measurements and a pipeline table of its own that family and model name; None for others."""
    if properties.get("vendor_id") != "AuthenticAMD":
        return None
    models = {ZEN3_FAMILY: (ZEN3_MODELS, cpus.ZEN3), ZEN5_FAMILY: (ZEN5_MODELS, cpus.ZEN5)}
    found = models.get(int(properties.get("cpu family", "0")))
    return found[1] if found is not None and int(properties.get("model", "0")) in found[0] else None


def _amd_core(properties: Mapping[str, str], flags: set[str]) -> AmdCore:
    family, model = int(properties.get("cpu family", "23")), int(properties.get("model", "0"))
    if family >= ZEN5_FAMILY:
        return AMD_CORES["zen5 narrow" if family == ZEN5_FAMILY and model in ZEN5_NARROW_MODELS and "avx512f" in flags else "zen5"]
    if family == ZEN3_FAMILY:
        return AMD_CORES["zen4" if "avx512f" in flags else "zen3"]
    return AMD_CORES["zen2" if model >= 0x30 else "zen"]


def _x86_core(base: Machine, properties: Mapping[str, str], flags: set[str]) -> Machine:
    """`base` with the rates of this vendor's core, as far as family and model determine them."""
    if properties.get("vendor_id") == "AuthenticAMD":
        core = _amd_core(properties, flags)
        same = _measured_amd_core(properties)
        told = ("fma_ports", "load_ports", "store_ports", "fma_latency_cycles", "issue_width")
        return replace(
            base,
            fma_ports=core.multiply_adds,
            load_ports=core.loads,
            store_ports=core.stores,
            fma_latency_cycles=core.multiply_add_latency,
            issue_width=core.issue_width,
            pipeline=base.pipeline if same is None else same.pipeline,
            sources={**base.sources, **dict.fromkeys(told, f"{named.FOG}; chosen from {CPUINFO}: family, model")},
        )
    if properties.get("vendor_id") != "GenuineIntel":
        return base
    if "avx512f" in flags:
        # Only server cores have AMX; a virtual machine may show another model number.
        single = int(properties.get("model", "0")) in SINGLE_PORT_AVX512_MODELS and "amx_tile" not in flags
        ports = 1.0 if single else 2.0
    else:
        ports = 2.0 if "avx2" in flags else 1.0
    return replace(base, fma_ports=ports, sources={**base.sources, "fma_ports": f"{named.INTEL_MANUAL}; chosen from {CPUINFO}: model, flags"})


def _caches(identity: CpuIdentity, like: Machine) -> tuple[Cache, ...]:
    """Cache sizes as the host reports them, with bandwidths and latencies of `like`; the caches of `like` if sysfs has none."""
    known = {cache.level: cache for cache in like.caches}
    last = max(known)
    found = [
        replace(known[min(level, last)], level=level, bytes=size, line_bytes=line, ways=ways, shared_by=shared)
        for level, size, line, ways, shared in identity.caches
        if level >= 1
    ]
    return tuple(found) or like.caches


def _peak_source(peaks: Mapping[str, float]) -> str:
    tiles = f"; bf16 derived: {cpus.AMX_BF16_FLOPS_PER_CYCLE} operations a cycle of the tile unit" if "bf16" in peaks else ""
    return f"{cpus.DERIVED}{', twice that for fp16' if 'fp16' in peaks else ''}{tiles}"


def _x86_machine(identity: CpuIdentity) -> Machine:
    flags = set(identity.properties.get("flags", "").split())
    amd = _measured_amd_core(identity.properties)
    if set(cpus.X86_V4) <= flags:
        base = cpus.GOLDEN_COVE if "amx_tile" in flags else cpus.ZEN5 if amd is cpus.ZEN5 else cpus.X86_AVX512
        extras = [flag for flag in EXTRA_X86 if flag in flags]
        isa = (*cpus.X86_V4, *extras)
        compiler_flags = (*base.compiler_flags, *(EXTRA_X86[flag] for flag in extras))
    elif set(cpus.X86_V3) <= flags:
        base, isa, compiler_flags = cpus.ZEN3 if amd is cpus.ZEN3 else cpus.X86_AVX2, cpus.X86_V3, cpus.X86_AVX2.compiler_flags
    else:
        vectors = dict.fromkeys(("vector_bits", "vector_registers"), f"{named.INTEL_X86_LEVELS}: baseline")
        base = replace(cpus.X86_AVX2, vector_bits=128, sources={**cpus.X86_AVX2.sources, **vectors})
        isa, compiler_flags = ("sse2",), ("-march=x86-64",)
    base = _x86_core(base, identity.properties, flags)
    clock, clock_source = _x86_clock(identity, flags)
    peaks = cpus.peak(identity.cores, clock, base.fma_ports, base.vector_bits, fp16="avx512_fp16" in isa)
    if "amx_bf16" in isa:
        peaks["bf16"] = identity.cores * clock * cpus.AMX_BF16_FLOPS_PER_CYCLE
    return replace(
        base,
        vendor={"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}.get(identity.properties.get("vendor_id", ""), "x86"),
        description=identity.properties.get("model name") or "x86-64 processor",
        clock_hz=clock,
        peak_flops=peaks,
        isa=isa,
        compiler_flags=compiler_flags,
        sources={**base.sources, "clock_hz": clock_source, "peak_flops": _peak_source(peaks)},
    )


def _aarch64_machine(identity: CpuIdentity) -> Machine:
    part = identity.properties.get("CPU part", "")
    features = set(identity.properties.get("Features", "").split())
    same_core = {"0xd03": cpus.CORTEX_A53, "0xd0c": cpus.NEOVERSE_N1}.get(part)
    if same_core is not None and set(same_core.isa) <= features:
        base, compiler_flags, isa = same_core, same_core.compiler_flags, same_core.isa
    else:
        base = cpus.NEOVERSE_N1
        extras = [name for name in EXTRA_AARCH64 if name in features]
        isa = (*cpus.ARMV8, *extras)
        compiler_flags = ("+".join(["-march=armv8-a", *(EXTRA_AARCH64[name] for name in extras)]),)
    clock, clock_source = base.clock_hz, f"assumed: as of {base.name}"
    if identity.base_hz:
        clock, clock_source = identity.base_hz, f"{SYSFS}: base_frequency"
    peaks = cpus.peak(identity.cores, clock, base.fma_ports, 128, fp16="asimdhp" in isa)
    return replace(
        base,
        vendor="Arm",
        description=f"aarch64 processor, part {part or 'unknown'}",
        clock_hz=clock,
        peak_flops=peaks,
        isa=isa,
        compiler_flags=compiler_flags,
        sources={**base.sources, "peak_flops": _peak_source(peaks), "clock_hz": clock_source},
    )


def identify_cpu(identity: CpuIdentity) -> Machine:
    """The ``Machine`` named "native" for an identity that the operating system reports.

    Raises:
        UnsupportedOption: for an architecture that is neither x86-64 nor aarch64.
    """
    if identity.architecture in ("x86_64", "AMD64"):
        machine = _x86_machine(identity)
    elif identity.architecture in ("aarch64", "arm64"):
        machine = _aarch64_machine(identity)
    else:
        raise UnsupportedOption(f"no code is generated for {identity.architecture} processors", "compile for a catalogue target instead")
    per_core = 12e9
    bandwidth = min(identity.cores * per_core, machine.memory_bandwidth)
    return replace(
        machine,
        name="native",
        processors=identity.cores,
        memory_bandwidth=bandwidth,
        memory_bytes=identity.memory_bytes,
        caches=_caches(identity, machine),
        sources={
            **machine.sources,
            "processors": f"{SYSFS}: physical cores in this process's affinity mask",
            "memory_bandwidth": f"assumed: {per_core / 1e9:.0f} GB/s a core, at most that of {machine.name}",
            "memory_bytes": named.SYSCONF,
            "memory_latency_cycles": f"assumed: as of {machine.name}",
            "caches": f"sizes from {SYSFS}; bandwidths and latencies assumed: as of {machine.name}",
        },
    )


def host_cpu() -> Machine:
    """`identified_cpu`, with the facts that ``tilewright calibrate`` has measured for it, if it has.

    Raises:
        UnsupportedOption: as `identified_cpu`.
        CacheError: if the file of the measured facts is damaged.
    """
    return calibrated(identified_cpu())


def identified_cpu() -> Machine:
    """This host's CPU, restricted to the cores that the process may use; or the CPU that `settings.native` names, if set.

    Raises:
        UnsupportedOption: if the setting names no CPU of the catalogue, or one with instructions that this host lacks.
    """
    identified = identify_cpu(read_cpu_identity())
    chosen = settings.native()
    return identified if chosen is None else _taken_for(chosen, identified)


def _taken_for(name: str, host: Machine) -> Machine:
    entries = {entry.name: entry for entry in cpus.CPUS}
    like = entries.get(name)
    able = [other.name for other in entries.values() if other.architecture == host.architecture and set(other.isa) <= set(host.isa)]
    if like is None or name not in able:
        why = "is no CPU of the catalogue" if like is None else "has instructions that this CPU lacks"
        remedy = f"unset TILEWRIGHT_NATIVE or name one of {', '.join(able)}" if able else "unset TILEWRIGHT_NATIVE"
        raise UnsupportedOption(f"TILEWRIGHT_NATIVE={name!r} {why}", remedy)
    peaks = {dtype: flops * host.processors / like.processors for dtype, flops in like.peak_flops.items()}
    sources = {**like.sources, "processors": host.sources["processors"], "memory_bytes": host.sources["memory_bytes"]}
    return replace(like, name=host.name, processors=host.processors, peak_flops=peaks, memory_bytes=host.memory_bytes, sources=sources)
