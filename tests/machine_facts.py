"""Checks of a machine's facts: that all are present, and that each source states the origin of its numbers."""

from __future__ import annotations

import re
from dataclasses import fields

from tilewright.hardware import Machine, documents

COMMON_NUMBERS = (
    "processors", "clock_hz", "peak_flops", "memory_bandwidth", "memory_bytes", "memory_latency_cycles", "caches",
)  # fmt: skip
CPU_NUMBERS = (
    "vector_bits", "vector_registers", "fma_ports", "fma_latency_cycles", "load_ports", "store_ports", "issue_width",
    "dispatch_seconds",
)  # fmt: skip
GPU_NUMBERS = (
    "registers_per_processor", "registers_per_thread_max", "register_allocation_unit", "shared_bytes_per_processor",
    "shared_bytes_per_block", "shared_bytes_per_cycle", "threads_per_processor", "threads_per_block",
    "blocks_per_processor", "warp_size", "schedulers_per_processor", "fp32_lanes_per_processor",
    "special_lanes_per_processor", "fma_latency_cycles", "launch_seconds",
)  # fmt: skip
# ``shared_reserved_bytes`` is not among them: it is 0 before compute capability 8.0.

DOCUMENTS = tuple(title for name, title in vars(documents).items() if name.isupper())
_ORIGIN = re.compile(
    r"(?:[a-z0-9][\w ,.-]* )??"
    r"(?:(?:derived|assumed): \S.*|measured[ :,].*\S.*|(?:from )?(?:" + "|".join(map(re.escape, DOCUMENTS)) + r")(?:[,:( ].*)?)"
)


def missing_facts(machine: Machine) -> tuple[str, ...]:
    """Missing fields of a machine of this kind, and numbers without a source."""
    numbers = COMMON_NUMBERS + (GPU_NUMBERS if machine.is_gpu else CPU_NUMBERS)
    texts: tuple[str, ...] = ("name", "vendor", "architecture", "description")
    texts += ("toolchain_extra",) if machine.is_gpu else ("pipeline", "isa", "compiler_flags", "target_triple")
    absent = [name for name in numbers + texts if not getattr(machine, name)]
    numeric = {spec.name for spec in fields(Machine) if spec.type in ("int", "float")}
    numeric |= {"peak_flops", "sustained_flops", "caches"}
    unsourced = [name for name in sorted(numeric) if getattr(machine, name) and name not in machine.sources]
    return tuple(absent + [f"source of {name}" for name in unsourced])


def clauses_without_origin(source: str) -> tuple[str, ...]:
    """The clauses of a source (form: `tilewright.hardware.documents`) that do not state the origin of their numbers."""
    return tuple(clause for clause in source.split("; ") if not _ORIGIN.fullmatch(clause))
