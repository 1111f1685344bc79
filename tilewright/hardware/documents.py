"""Where numbers may be from: the documents that ``sources`` name, and the form that every source has."""

from __future__ import annotations

import re

CCCL = "NVIDIA CCCL, libcudacxx/include/cuda/__device/arch_traits.h"
OCCUPANCY = "CUDA toolkit, cuda_occupancy.h"
GUIDE = "CUDA C++ Programming Guide, table of technical specifications per compute capability"
ARITHMETIC = "CUDA C++ Programming Guide, table of throughput of native arithmetic instructions"
V100_PAPER = "NVIDIA Tesla V100 GPU Architecture whitepaper"
TURING_PAPER = "NVIDIA Turing GPU Architecture whitepaper"
A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture whitepaper"
GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
ADA_PAPER = "NVIDIA Ada GPU Architecture whitepaper"
H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet"
XAVIER_SHEET = "NVIDIA Jetson AGX Xavier Series System-on-Module data sheet"
BLACKWELL_BRIEF = "NVIDIA Blackwell Architecture Technical Brief"
B200_SHEET = "NVIDIA DGX B200 datasheet"
CHEESE_B200 = "Chips and Cheese, Nvidia's B200: Keeping the CUDA Juggernaut Rolling (2025)"
JIA_VOLTA = "Z. Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking (2018)"
JIA_TURING = "Z. Jia et al., Dissecting the NVidia Turing T4 GPU via Microbenchmarking (2019)"
AMPERE_CYCLES = "H. Abdelkhalik et al., Demystifying the Nvidia Ampere Architecture through Microbenchmarking (2022)"
LUO = "W. Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture (2024)"

INTEL_MANUAL = "Intel 64 and IA-32 Architectures Optimization Reference Manual"
FOG = "A. Fog, The microarchitecture of Intel, AMD and VIA CPUs"
AWS_INSTANCES = "AWS EC2 instance types"
GCC_A53 = "GCC, gcc/config/arm/cortex-a53.md"
LLVM_A53 = "LLVM, llvm/lib/Target/AArch64/AArch64SchedA53.td"
NCNN_A53 = "ncnn, docs/developer-guide/arm-a53-a55-dual-issue.md"
A53_MANUAL = "Arm Cortex-A53 MPCore Processor Technical Reference Manual"
RASPBERRY = "Raspberry Pi documentation, BCM2837"
LLVM_N1 = "LLVM, llvm/lib/Target/AArch64/AArch64SchedNeoverseN1.td"
N1_GUIDE = "Arm Neoverse N1 Software Optimization Guide"
ARM_GRAVITON2 = "Arm Learning Paths, Analyze Arm cache hierarchy and performance characteristics"
ANANDTECH_GRAVITON2 = "AnandTech, Amazon's Arm-based Graviton2 against AMD and Intel (2020)"
INTEL_LISTS = "Intel product specifications"
LLVM_HASWELL = "LLVM, llvm/lib/Target/X86/X86SchedHaswell.td"
LLVM_SKYLAKE = "LLVM, llvm/lib/Target/X86/X86SchedSkylakeServer.td"
UOPS = "A. Abel and J. Reineke, uops.info"
INTEL_X86_LEVELS = "x86-64 psABI, micro-architecture levels"
ARM_ARCHITECTURE = "Arm Architecture Reference Manual for A-profile"
XEON_6_LISTS = "PurePC (2025), specifications of Xeon 6"

DRIVER = "CUDA driver"
CPUINFO = "/proc/cpuinfo"
SYSFS = "sysfs: /sys/devices/system/cpu"
SYSCONF = "sysconf"

DOCUMENTS = (
    CCCL, OCCUPANCY, GUIDE, ARITHMETIC, V100_PAPER, TURING_PAPER, A100_PAPER, GA102_PAPER, ADA_PAPER, H100_PAPER, H200_SHEET,
    XAVIER_SHEET, BLACKWELL_BRIEF, B200_SHEET, CHEESE_B200, JIA_VOLTA, JIA_TURING, AMPERE_CYCLES, LUO, INTEL_MANUAL, FOG,
    AWS_INSTANCES, GCC_A53, LLVM_A53, NCNN_A53, A53_MANUAL, RASPBERRY, LLVM_N1, N1_GUIDE, ARM_GRAVITON2, ANANDTECH_GRAVITON2,
    INTEL_LISTS, INTEL_X86_LEVELS, ARM_ARCHITECTURE, XEON_6_LISTS, LLVM_HASWELL, LLVM_SKYLAKE, UOPS,
)  # fmt: skip
"""Publications."""
ORACLES = (DRIVER, CPUINFO, SYSFS, SYSCONF)
"""What the machine at hand says of itself."""

_ORIGIN = re.compile(
    r"(?:[a-z0-9][\w ,.-]* )??"
    r"(?:(?:derived|assumed): \S.*|measured[ :,].*\S.*|(?:from )?(?:" + "|".join(map(re.escape, DOCUMENTS + ORACLES)) + r")(?:[,:( ].*)?)"
)


def clauses_without_origin(source: str) -> tuple[str, ...]:
    """The clauses (separated by "; ") of a source that do not say where their numbers are from; none of an honest one.

    A clause is an optional few words for the numbers it speaks of, then a document of the list here and the place in it,
    or "derived: " with the calculation, "assumed: " with the reason, or "measured" with what and how.
    """
    return tuple(clause for clause in source.split("; ") if not _ORIGIN.fullmatch(clause))
