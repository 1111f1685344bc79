"""``Machine``: the facts about a target that the models and the feasibility checks use, and nothing else.

A CPU and a GPU are values of one type; the fields of the other kind are zero or empty. Every number carries the source
it was taken from in ``sources``, by the field's name (``caches`` and the mappings have one source for the whole field).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of


@dataclass(frozen=True)
class Cache:
    """One level of cache; on a GPU level 1 is a processor's L1 (with its shared memory), level 2 the chip's L2."""

    level: int
    bytes: int
    """Size of one instance."""
    line_bytes: int
    ways: int
    """Associativity; 0 where it is not known."""
    shared_by: int
    """Processors (cores or streaming multiprocessors) that share one instance."""
    bandwidth: float
    """Bytes a cycle that one processor can read from it."""
    latency_cycles: float


@dataclass(frozen=True)
class Machine:
    """Frozen facts about one target machine. Bytes, hertz, seconds, and flop/s of the whole machine throughout."""

    name: str
    kind: str
    """"cpu" or "gpu"."""
    vendor: str
    architecture: str
    """Of a GPU the real architecture that NVRTC compiles for, as "sm_90a"; of a CPU "x86-64" or "aarch64"."""
    description: str
    processors: int
    """Physical cores, or streaming multiprocessors."""
    clock_hz: float
    """The nominal clock under load (of a GPU its boost clock)."""
    peak_flops: Mapping[str, float]
    """dtype to flop/s: "fp32" without tensor cores; "tf32", "fp16", "bf16" where they exist, accumulated in fp32."""
    memory_bandwidth: float
    """Bytes a second, nominal."""
    memory_bytes: int
    memory_latency_cycles: float
    caches: tuple[Cache, ...]
    """From the nearest to the processor outwards."""
    sustained_flops: Mapping[str, float] = field(default_factory=dict)
    """Measured ceilings by dtype, for the machines where someone has measured them; may be empty."""
    sustained_memory_bandwidth: float = 0.0
    """Measured ceiling, bytes a second; 0 where it was not measured."""
    fma_latency_cycles: float = 0.0
    """Cycles from one dependent fused multiply-add to the next."""

    # CPU
    vector_bits: int = 0
    vector_registers: int = 0
    fma_ports: float = 0.0
    """Full-width vector fused multiply-adds that one core starts each cycle."""
    load_ports: float = 0.0
    """Full-width vector loads a cycle."""
    store_ports: float = 0.0
    """Full-width vector stores a cycle."""
    issue_width: int = 0
    """Instructions a cycle."""
    pipeline: str = ""
    """The table of the core's ports and latencies (`hardware/pipelines.py`)."""
    isa: tuple[str, ...] = ()
    """Instruction-set flags that generated code may use, named as in /proc/cpuinfo."""
    compiler_flags: tuple[str, ...] = ()
    """Flags with which gcc or clang generate code for exactly this instruction set."""
    target_triple: str = ""
    """As "x86_64-linux-gnu": it chooses the C compiler."""
    dispatch_seconds: float = 0.0
    """Cost of one OpenMP parallel region that does nothing."""

    # GPU
    registers_per_processor: int = 0
    """32-bit registers."""
    registers_per_thread_max: int = 0
    register_allocation_unit: int = 0
    """Registers are given to a warp in multiples of this many."""
    shared_bytes_per_processor: int = 0
    shared_bytes_per_block: int = 0
    """The most that a block can opt in to."""
    shared_reserved_bytes: int = 0
    """What the system takes of a processor's shared memory for each resident block."""
    shared_bytes_per_cycle: float = 0.0
    """Bytes a cycle that a processor reads from shared memory without bank conflicts."""
    threads_per_processor: int = 0
    threads_per_block: int = 0
    blocks_per_processor: int = 0
    warp_size: int = 0
    schedulers_per_processor: int = 0
    """Warp schedulers; each issues one warp instruction a cycle."""
    fp32_lanes_per_processor: int = 0
    special_lanes_per_processor: int = 0
    """Lanes of the special-function units (exponential, reciprocal, square root)."""
    launch_seconds: float = 0.0
    """Time that one more kernel costs in a chain of dependent kernels inside a CUDA graph."""
    toolchain_extra: str = ""
    """Of a GPU the extra that brings its compiler: "cuda13", or "cuda12" for Volta, which CUDA 13 dropped."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Field to where its numbers are from."""

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any fact (not with the wording of description and sources)."""
        facts = asdict(self)
        del facts["description"], facts["sources"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "gpu"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(9, 0) of "sm_90a"; (0, 0) of a CPU."""
        if not self.is_gpu:
            return (0, 0)
        digits = self.architecture.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])

    def has(self, feature: str) -> bool:
        """Whether it has an instruction set ("amx_tile"), or as a GPU at least an architecture ("sm_80")."""
        if feature.startswith("sm_"):
            return self.is_gpu and self.compute_capability >= (int(feature[3:-1]), int(feature[-1]))
        return feature in self.isa

    def cache(self, level: int) -> Cache | None:
        """The cache of that level, or None where there is none."""
        return next((cache for cache in self.caches if cache.level == level), None)

    def cache_bandwidth(self, level: int) -> float:
        """Bytes a second that all processors read together from the cache of that level; KeyError if there is none."""
        cache = self.cache(level)
        if cache is None:
            raise KeyError(f"{self.name} has no level-{level} cache")
        return cache.bandwidth * self.clock_hz * self.processors

    def vector_lanes(self, dtype: str = DEFAULT_FLOAT) -> int:
        """Elements in one vector register of a CPU. The default is the type of all that schemas compute in vectors."""
        return self.vector_bits // (8 * size_of(dtype))
