"""Machine facts: complete and sourced catalogue, target names, and identification from given identities."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.machine_facts import DOCUMENTS, clauses_without_origin, missing_facts
from tilewright.errors import TargetNotPresent, UnknownTarget, UnsupportedOption
from tilewright.hardware import Machine, catalogue, host_cpu, is_present, machine, target_names
from tilewright.hardware.device import DeviceAttributes, identify_gpu, read_device
from tilewright.hardware.host import CpuIdentity, identify_cpu, parse_cpuinfo

EXPECTED_ARCHITECTURES = {
    "v100": "sm_70", "xavier": "sm_72", "rtx2080": "sm_75", "rtx2080ti": "sm_75", "a100": "sm_80", "rtx4090": "sm_89",
    "h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a", "x86-avx2": "x86-64", "x86-avx512": "x86-64",
    "xeon-8124m": "x86-64", "xeon-sapphire-rapids": "x86-64", "epyc-7763": "x86-64", "epyc-9655": "x86-64", "cortex-a53": "aarch64",
    "neoverse-n1": "aarch64",
}  # fmt: skip

ZEN4 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9354 32-Core Processor
bogomips\t: 6490.39
flags\t\t: pni ssse3 sse4_1 sse4_2 popcnt avx f16c fma bmi1 bmi2 movbe abm avx2 avx512f avx512bw avx512cd avx512dq \
avx512vl avx512_vnni avx512_bf16

processor\t: 1
model name\t: another
"""
HASWELL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 60
model name\t: Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz
flags\t\t: pni ssse3 sse4_1 sse4_2 popcnt avx f16c fma bmi1 bmi2 movbe abm avx2
"""
SERVER_WITH_AMX = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 167
model name\t: Intel(R) Xeon(R) Processor
bogomips\t: 5400.00
flags\t\t: pni ssse3 sse4_1 sse4_2 popcnt avx f16c fma bmi1 bmi2 movbe abm avx2 avx512f avx512bw avx512cd avx512dq \
avx512vl avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_int8
"""
GRAVITON2 = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU part\t: 0xd0c
"""

H200_DEVICE = DeviceAttributes(
    name="NVIDIA H200", memory_bytes=150_000_000_000, threads_per_block=1024, warp_size=32, clock_khz=1_980_000,
    processors=132, memory_clock_khz=0, memory_bus_bits=6144, l2_bytes=62914560, threads_per_processor=2048, major=9,
    minor=0, shared_bytes_per_processor=233472, registers_per_processor=65536, shared_bytes_per_block=232448,
    blocks_per_processor=32, shared_reserved_bytes=1024,
)  # fmt: skip


def identity(text: str, architecture: str = "x86_64", cores: int = 4) -> CpuIdentity:
    return CpuIdentity(architecture, parse_cpuinfo(text), cores, 0.0, ((1, 32768, 64, 8, 1),), 8 << 30)


@pytest.mark.parametrize("name", EXPECTED_ARCHITECTURES)
def test_every_entry_is_complete_and_every_number_has_a_source(name: str) -> None:
    entry = catalogue()[name]
    assert entry.architecture == EXPECTED_ARCHITECTURES[name]
    assert missing_facts(entry) == ()


def described_machines() -> dict[str, Machine]:
    """Every catalogue entry, and hosts and GPUs identified by each method."""
    old = HASWELL.replace("avx f16c fma", "").replace("avx2", "")
    texts = {"zen4": ZEN4, "haswell": HASWELL, "baseline": old, "server with AMX": SERVER_WITH_AMX}
    hosts = {name: identify_cpu(identity(text)) for name, text in texts.items()}
    for name, text in {"graviton2": GRAVITON2, "unknown Arm core": GRAVITON2.replace("0xd0c", "0xd40")}.items():
        hosts[name] = identify_cpu(identity(text, "aarch64"))
    for capability in ((8, 6), (9, 0), (12, 0)):
        device = replace(H200_DEVICE, name="a chip", major=capability[0], minor=capability[1], processors=99)
        found = identify_gpu(device)
        assert found is not None
        hosts[f"capability {capability}"] = found
    return {**catalogue(), **hosts, "native": host_cpu()}


DESCRIBED = described_machines()


@pytest.mark.parametrize("entry", DESCRIBED.values(), ids=DESCRIBED)
def test_every_source_is_a_document_a_derivation_an_assumption_or_a_measurement(entry: Machine) -> None:
    broken = {field: clauses for field, text in entry.sources.items() if (clauses := clauses_without_origin(text))}
    assert broken == {}


def test_the_check_of_sources_finds_those_that_say_nothing() -> None:
    for text in ("AVX2", "", "assumed:", "a hundred", f"{DOCUMENTS[0]}; sizes as usual", "about, after a paper", "measured"):
        assert clauses_without_origin(text) != ()
    for text in (DOCUMENTS[0], "derived: a * b", f"sizes from {DOCUMENTS[1]}: table 3; latencies assumed: as on the v100"):
        assert clauses_without_origin(text) == ()


def test_the_check_for_completeness_finds_gaps() -> None:
    entry = catalogue()["h200"]
    sources = {field: text for field, text in entry.sources.items() if field != "caches"}
    broken = replace(entry, warp_size=0, sources=sources)
    assert set(missing_facts(broken)) == {"warp_size", "source of caches"}


def test_the_catalogue_is_the_expected_list() -> None:
    assert set(catalogue()) == set(EXPECTED_ARCHITECTURES)
    assert set(target_names()) == {"native", "cuda", *EXPECTED_ARCHITECTURES}
    volta = {name for name, entry in catalogue().items() if entry.toolchain_extra == "cuda12"}
    assert volta == {"v100", "xavier"}


@pytest.mark.parametrize("entry", catalogue().values(), ids=lambda entry: entry.name)
def test_numbers_agree_with_each_other(entry: Machine) -> None:
    cycles = entry.processors * entry.clock_hz
    if entry.is_gpu:
        lanes = entry.fp32_lanes_per_processor
        assert entry.peak_flops["fp32"] == pytest.approx(2 * lanes * cycles, rel=0.01)
        assert entry.shared_bytes_per_block + entry.shared_reserved_bytes <= entry.shared_bytes_per_processor
        assert entry.shared_bytes_per_processor <= entry.caches[0].bytes
        assert entry.threads_per_processor % entry.warp_size == 0
        for dtype, rate in entry.sustained_flops.items():
            assert rate < entry.peak_flops[dtype]
    else:
        assert entry.peak_flops["fp32"] == pytest.approx(2 * entry.fma_ports * entry.vector_lanes() * cycles)
    sizes = [cache.bytes / cache.shared_by for cache in entry.caches]
    bandwidths = [entry.cache_bandwidth(cache.level) for cache in entry.caches]
    assert bandwidths == sorted(bandwidths, reverse=True) and bandwidths[-1] > entry.memory_bandwidth
    assert all(size > 0 for size in sizes)
    latencies = [cache.latency_cycles for cache in entry.caches] + [entry.memory_latency_cycles]
    assert latencies == sorted(latencies)


def test_digest_changes_with_facts_only() -> None:
    entry = catalogue()["a100"]
    assert entry.digest == catalogue()["a100"].digest
    assert replace(entry, description="x", sources={}).digest == entry.digest
    assert replace(entry, processors=107).digest != entry.digest
    assert len({other.digest for other in catalogue().values()}) == len(catalogue())
    assert len({entry, catalogue()["a100"]}) == 1


def test_compute_capability_of_architecture() -> None:
    found = {name: entry.compute_capability for name, entry in catalogue().items()}
    assert found["b200"] == (10, 0) and found["h200"] == (9, 0) and found["rtx4090"] == (8, 9)
    assert found["cortex-a53"] == (0, 0)


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UnknownTarget, match="h200"):
        machine("H-200")
    with pytest.raises(UnknownTarget, match="known targets: native, cuda"):
        machine("@@@@")


def test_cuda_without_a_gpu_says_so() -> None:
    if read_device() is not None:
        pytest.skip("a GPU is present")
    with pytest.raises(TargetNotPresent, match="h200"):
        machine("cuda")
    assert not is_present(machine("h200"))


def test_native_is_this_host_and_runs_here() -> None:
    native = machine(None)
    assert native == machine("native") == host_cpu() and machine(native) is native
    assert missing_facts(native) == ()
    assert is_present(native)
    foreign = catalogue()["neoverse-n1" if native.architecture == "x86-64" else "x86-avx2"]
    assert not is_present(foreign)
    assert not is_present(replace(native, isa=(*native.isa, "an-instruction-set-of-the-future")))


@pytest.mark.skipif(host_cpu().architecture != "x86-64" or "avx2" not in host_cpu().isa, reason="this CPU cannot be taken for x86-avx2")
def test_native_may_be_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_NATIVE", raising=False)
    own, like = host_cpu(), catalogue()["x86-avx2"]
    monkeypatch.setenv("TILEWRIGHT_NATIVE", "x86-avx2")
    taken = machine("native")
    assert taken == machine(None) == host_cpu() and taken.name == "native"
    assert (taken.isa, taken.compiler_flags, taken.pipeline, taken.caches) == (like.isa, like.compiler_flags, like.pipeline, like.caches)
    assert (taken.processors, taken.memory_bytes) == (own.processors, own.memory_bytes)
    assert taken.peak_flops["fp32"] / taken.processors == like.peak_flops["fp32"] / like.processors
    assert is_present(taken) and is_present(like) and not is_present(catalogue()["x86-avx512"])


@pytest.mark.parametrize(
    ("name", "why"), [("nonsense", "no CPU of the catalogue"), ("h200", "no CPU of the catalogue"), ("neoverse-n1", "CPU lacks")]
)
@pytest.mark.skipif(host_cpu().architecture != "x86-64", reason="another architecture lacks others")
def test_native_is_not_taken_for_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setenv("TILEWRIGHT_NATIVE", name)
    with pytest.raises(UnsupportedOption, match=f"TILEWRIGHT_NATIVE='{name}'.*{why}.*unset TILEWRIGHT_NATIVE"):
        machine("native")


def test_identify_zen4_counts_one_512_bit_multiply_add_a_cycle() -> None:
    found = identify_cpu(identity(ZEN4))
    assert (found.vendor, found.vector_bits, found.fma_ports) == ("AMD", 512, 1)
    assert found.clock_hz == pytest.approx(3.245e9, rel=1e-3)
    assert found.peak_flops["fp32"] == pytest.approx(4 * found.clock_hz * 32)
    assert "-mavx512bf16" in found.compiler_flags and "-mavx512fp16" not in found.compiler_flags
    assert missing_facts(found) == ()


def test_identify_zen4_loads_one_512_bit_vector_a_cycle() -> None:
    found = identify_cpu(identity(ZEN4))
    assert (found.load_ports, found.store_ports, found.fma_latency_cycles, found.issue_width) == (1, 0.5, 4, 6)
    zen2 = identify_cpu(identity(HASWELL.replace("GenuineIntel", "AuthenticAMD").replace("family\t: 6", "family\t: 23")))
    assert (zen2.fma_ports, zen2.fma_latency_cycles) == (2, 5)


def test_identify_zen3() -> None:
    """With its own pipeline and caches; servers alone have the boost of servers, and Zen 4 of the same family is another core."""
    zen3 = re.sub(r" avx512\w+", "", ZEN4.replace("model\t\t: 17", "model\t\t: 1"))
    found = identify_cpu(identity(zen3))
    assert (found.pipeline, found.vector_bits, found.fma_ports, found.load_ports, found.issue_width) == ("zen3", 256, 2, 2, 6)
    assert found.fma_latency_cycles == 4 and missing_facts(found) == ()
    assert "EPYC 7003" in found.sources["clock_hz"]
    desktop = identify_cpu(identity(zen3.replace("model\t\t: 1\n", "model\t\t: 33\n")))
    assert desktop.pipeline == "zen3" and found.clock_hz == pytest.approx(desktop.clock_hz + 0.7e9)
    assert identify_cpu(identity(ZEN4)).pipeline == "skylake-server"


def test_identify_zen5() -> None:
    """With its own pipeline whatever the instructions; servers alone have the boost of servers."""
    zen5 = ZEN4.replace("family\t: 25", "family\t: 26").replace("model\t\t: 17", "model\t\t: 2")
    found = identify_cpu(identity(zen5))
    assert (found.pipeline, found.vector_bits, found.fma_ports, found.load_ports, found.issue_width) == ("zen5", 512, 2, 2, 8)
    assert found.clock_hz == pytest.approx(4.1e9) and "EPYC 9005" in found.sources["clock_hz"]
    assert missing_facts(found) == ()
    desktop = identify_cpu(identity(zen5.replace("model\t\t: 2\n", "model\t\t: 68\n")))
    assert desktop.clock_hz == pytest.approx(3.245e9, rel=1e-3)
    without = HASWELL.replace("GenuineIntel", "AuthenticAMD").replace("family\t: 6", "family\t: 26").replace("model\t\t: 60", "model\t\t: 2")
    narrow = identify_cpu(identity(without))
    assert (narrow.pipeline, narrow.vector_bits, narrow.fma_ports) == ("zen5", 256, 2)


@pytest.mark.parametrize(("model", "multiply_adds"), [(0x24, 1), (0x60, 1), (0x50, 2), (0x90, 2)])
def test_other_cores_of_the_family_of_zen5_have_no_pipeline_of_it(model: int, multiply_adds: int) -> None:
    """Pipes of 256 bits (0x24, 0x60) and Zen 6 (0x50, 0x90): no measurement and no table is of these cores."""
    found = identify_cpu(identity(ZEN4.replace("family\t: 25", "family\t: 26").replace("model\t\t: 17", f"model\t\t: {model}")))
    assert (found.pipeline, found.fma_ports) == (identify_cpu(identity(ZEN4)).pipeline, multiply_adds)


def test_identify_server_with_amx_assumes_its_turbo() -> None:
    found = identify_cpu(identity(SERVER_WITH_AMX, cores=2))
    assert found.clock_hz == pytest.approx(3.7e9) and "turbo assumed" in found.sources["clock_hz"]
    assert found.fma_ports == 2 and found.peak_flops["fp32"] == pytest.approx(2 * 3.7e9 * 64)
    fast = identify_cpu(identity(SERVER_WITH_AMX.replace("5400", "7200")))
    assert fast.clock_hz == pytest.approx(3.8e9)
    faster = identify_cpu(identity(SERVER_WITH_AMX.replace("5400", "8000")))
    assert faster.clock_hz == pytest.approx(4.0e9) and "turbo" not in faster.sources["clock_hz"]


def test_identify_haswell_takes_the_clock_from_its_name() -> None:
    found = identify_cpu(identity(HASWELL))
    assert found.clock_hz == 3.4e9 and found.vector_bits == 256 and found.compiler_flags == ("-march=x86-64-v3",)
    first = found.cache(1)
    assert first is not None and first.bytes == 32768 and found.cache(3) is None


def test_identify_graviton2_matches_the_catalogue_core() -> None:
    found = identify_cpu(identity(GRAVITON2, "aarch64", cores=16))
    assert found.compiler_flags == ("-mcpu=neoverse-n1",) and found.processors == 16
    assert found.peak_flops["fp32"] == pytest.approx(catalogue()["neoverse-n1"].peak_flops["fp32"] / 4)
    other = identify_cpu(identity(GRAVITON2.replace("0xd0c", "0xd40"), "aarch64"))
    assert other.compiler_flags == ("-march=armv8-a+lse+rdma+dotprod+fp16",)


def test_identify_gpu_finds_the_catalogue_entry() -> None:
    assert identify_gpu(H200_DEVICE) == catalogue()["h200"]
    two = replace(H200_DEVICE, name="NVIDIA GeForce RTX 2080 Ti", major=7, minor=5, processors=68)
    assert identify_gpu(two) == catalogue()["rtx2080ti"]


def test_identify_gpu_builds_a_part_that_is_not_in_the_catalogue() -> None:
    pcie = replace(H200_DEVICE, name="NVIDIA H100 PCIe", processors=114, clock_khz=1_755_000, l2_bytes=50 << 20)
    found = identify_gpu(pcie)
    assert found is not None and found.architecture == "sm_90a" and missing_facts(found) == ()
    assert found.processors == 114 and found.caches[1].bytes == 50 << 20
    assert found.peak_flops["fp32"] == pytest.approx(114 * 128 * 2 * 1.755e9)
    geforce = identify_gpu(replace(H200_DEVICE, name="NVIDIA GeForce RTX 5090", major=12, minor=0, processors=170, clock_khz=2_407_000))
    ada = catalogue()["rtx4090"]
    assert geforce is not None
    assert geforce.peak_flops["fp16"] / geforce.peak_flops["fp32"] == pytest.approx(ada.peak_flops["fp16"] / ada.peak_flops["fp32"], rel=0.01)
    assert identify_gpu(replace(H200_DEVICE, name="Tesla K80", major=3, minor=7)) is None
