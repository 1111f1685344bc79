"""The values of the toolchain: a source file as input, a binary with its compiler's output as the result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class SourceFile:
    """One translation unit, as produced by a code printer."""

    name: str
    """For people: it appears in file names and messages, and does not affect the binary."""
    text: str
    language: str
    """"c" or "cuda"."""
    entries: tuple[str, ...]
    """Names of the functions that are called from outside."""
    extra_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """Resources of one GPU kernel, as the assembler reports them."""

    registers: int
    """Registers per thread."""
    shared_bytes: int
    """Static shared memory per block; dynamic shared memory, requested at launch, is not included."""
    spill_bytes: int
    """Stores and loads of spilled registers per thread, in bytes of code."""
    stack_bytes: int
    barriers: int


@dataclass(frozen=True)
class Binary:
    """A compiled source file."""

    path: Path
    """Location of the shared object or cubin, for people and for tools that read it."""
    kind: str
    """"so" or "cubin"."""
    entries: tuple[str, ...]
    command: tuple[str, ...]
    log: str
    """Output of the compiler, including warnings."""
    content: bytes = field(repr=False)
    """Content of the file when it was checked. This is what is loaded and saved, whatever happens to the file."""
    resources: Mapping[str, Resources] = field(default_factory=dict)
    """Resources by entry; empty for CPU code."""


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources by entry from a log of ``--ptxas-options=-v``.

    For each entry the assembler writes one line with its name, one with its stack and spills, and one with its registers, barriers and shared memory.
    """
    found: dict[str, Resources] = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'([^']+)'", part)
        if name is None:
            continue
        used = re.search(r"Used (\d+) registers[^\n]*", part)
        line = used[0] if used else ""
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        stack = re.search(r"(\d+) bytes stack frame", part)
        barriers = re.search(r"used (\d+) barriers", line)
        shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", line)
        found[name[1]] = Resources(
            registers=int(used[1]) if used else 0,
            shared_bytes=int(shared[1]) if shared else 0,
            spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
            stack_bytes=int(stack[1]) if stack else 0,
            barriers=int(barriers[1]) if barriers else 0,
        )
    return found
