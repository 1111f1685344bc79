"""``Machine``: the facts about a target that the models and the feasibility checks use, and nothing else.

CPUs and GPUs are values of one type; fields of the other kind are zero or empty. ``sources`` maps each field's name to the source of its numbers
(``caches`` and the mappings have one source for the whole field).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of


@dataclass(frozen=True)
class Cache:
    """One level of cache. On a GPU level 1 is a processor's L1 (with its shared memory) and level 2 the chip's L2."""

    level: int
    bytes: int
    """Size of one instance."""
    line_bytes: int
    ways: int
    """Associativity; 0 if unknown."""
    shared_by: int
    """Processors (cores or streaming multiprocessors) that share one instance."""
    bandwidth: float
    """Bytes per cycle that one processor can read from it."""
    latency_cycles: float


@dataclass(frozen=True)
class Machine:
    """Frozen facts about one target machine. Units are bytes, hertz, seconds, and flop/s of the whole machine."""

    name: str
    kind: str
    """"cpu" or "gpu"."""
    vendor: str
    architecture: str
    """"x86-64" or "aarch64"; for a GPU the real architecture that NVRTC compiles for, such as "sm_90a"."""
    description: str
    processors: int
    """Physical cores, or streaming multiprocessors."""
    clock_hz: float
    """The nominal clock under load (the boost clock of a GPU)."""
    peak_flops: Mapping[str, float]
    """flop/s by type: "fp32" without tensor cores; "tf32", "fp16" and "bf16" if supported, accumulated in fp32."""
    memory_bandwidth: float
    """Nominal bytes per second."""
    memory_bytes: int
    memory_latency_cycles: float
    caches: tuple[Cache, ...]
    """The caches, closest to the processor first."""
    sustained_flops: Mapping[str, float] = field(default_factory=dict)
    """Measured ceilings by type; empty for machines without measurements."""
    sustained_memory_bandwidth: float = 0.0
    """Measured ceiling in bytes per second; 0 if it was not measured."""
    fma_latency_cycles: float = 0.0
    """Latency of a fused multiply-add: cycles until a dependent one can start."""

    # CPU
    vector_bits: int = 0
    vector_registers: int = 0
    fma_ports: float = 0.0
    """Full-width vector fused multiply-adds that one core starts each cycle."""
    load_ports: float = 0.0
    """Full-width vector loads per cycle."""
    store_ports: float = 0.0
    """Full-width vector stores per cycle."""
    issue_width: int = 0
    """Instructions per cycle."""
    pipeline: str = ""
    """Name of the table of the core's ports and latencies (`hardware/pipelines.py`)."""
    isa: tuple[str, ...] = ()
    """Instruction-set flags that generated code may use, named as in /proc/cpuinfo."""
    compiler_flags: tuple[str, ...] = ()
    """Flags with which gcc or clang generate code for exactly this instruction set."""
    target_triple: str = ""
    """Selects the C compiler, such as "x86_64-linux-gnu"."""
    dispatch_seconds: float = 0.0
    """Cost of an empty OpenMP parallel region."""

    # GPU
    registers_per_processor: int = 0
    """Number of 32-bit registers."""
    registers_per_thread_max: int = 0
    register_allocation_unit: int = 0
    """Registers are allocated to a warp in multiples of this number."""
    shared_bytes_per_processor: int = 0
    shared_bytes_per_block: int = 0
    """The largest size that a block can opt in to."""
    shared_reserved_bytes: int = 0
    """Shared memory that the system reserves for each resident block."""
    shared_bytes_per_cycle: float = 0.0
    """Bytes per cycle that a processor reads from shared memory without bank conflicts."""
    threads_per_processor: int = 0
    threads_per_block: int = 0
    blocks_per_processor: int = 0
    warp_size: int = 0
    schedulers_per_processor: int = 0
    """Warp schedulers; each issues one warp instruction per cycle."""
    fp32_lanes_per_processor: int = 0
    special_lanes_per_processor: int = 0
    """Lanes of the special-function units (exponential, reciprocal, square root)."""
    launch_seconds: float = 0.0
    """Time that each further kernel adds to a chain of dependent kernels in a CUDA graph."""
    chip: str = ""
    """For a GPU, the machine of the catalogue with the same chip (another memory, for example), whose measured constants and learned models serve.
    Empty if it is known by its own."""
    toolchain_extra: str = ""
    """For a GPU, the package extra with its compiler: "cuda13", or "cuda12" for Volta, which CUDA 13 dropped."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of each field's numbers, by field name."""
    calibration: str = ""
    """Name of its calibration: on a CPU facts are from it (`hardware/measured_facts.py`), on a GPU no fact is, but it orders candidates in processes
    that use it (`hardware/measured_order.py`). Empty without one."""
    uncalibrated: str = ""
    """The digest of the machine as identified, which the facts of a CPU's calibration change; empty without a calibration."""

    @property
    def measured_as(self) -> str:
        """The name under which measurements of the machine, or of its chip, are kept."""
        return self.chip or self.name

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any fact (not with the wording of description and sources)."""
        facts = asdict(self)
        for name in ("description", "sources", "calibration", "uncalibrated"):
            del facts[name]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def identity(self) -> str:
        """The digest of the machine as identified, which a calibration does not change: names the same hardware before and after."""
        return self.uncalibrated or self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "gpu"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(9, 0) for "sm_90a"; (0, 0) for a CPU."""
        if not self.is_gpu:
            return (0, 0)
        digits = self.architecture.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])

    def has(self, feature: str) -> bool:
        """Whether the machine has an instruction set ("amx_tile"), or is a GPU of at least an architecture ("sm_80"), or exactly of one
        ("sm_90a")."""
        if feature.startswith("sm_") and not feature[-1].isdigit():
            return self.architecture == feature
        if feature.startswith("sm_"):
            return self.is_gpu and self.compute_capability >= (int(feature[3:-1]), int(feature[-1]))
        return feature in self.isa

    def cache(self, level: int) -> Cache | None:
        """The cache of that level, or None if there is none."""
        return next((cache for cache in self.caches if cache.level == level), None)

    def cache_bandwidth(self, level: int) -> float:
        """Bytes per second that all processors together read from the cache of that level; KeyError if there is none."""
        cache = self.cache(level)
        if cache is None:
            raise KeyError(f"{self.name} has no level-{level} cache")
        return cache.bandwidth * self.clock_hz * self.processors

    def vector_lanes(self, dtype: str = DEFAULT_FLOAT) -> int:
        """Elements per vector register of a CPU. The default is the type in which schemas do all vector arithmetic."""
        return self.vector_bits // (8 * size_of(dtype))
