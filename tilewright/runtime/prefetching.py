"""Constants are brought to level 2 of a GPU ahead of the kernels that read them.

At batch 1 most weights of a network come from memory, each of them when the kernel that reads it has begun, whose first products wait for them, while
memory is idle much of the time. So a CUDA graph has nodes besides its kernels, on which nothing depends: each asks for the constants of some of the
following calls (`cp.async.bulk.prefetch.L2`, compute capability 9.0 on) and ends without waiting for them. It begins when the call that reads what
is some megabytes before has ended, so that level 2 holds few constants that are not needed soon, beside activations.

What this gains: docs/kernels.md, "Constants ahead of the kernels that read them".
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tilewright.runtime.driver import Driver, KernelNodeParams

CHUNK, THREADS = 4096, 32
"""Bytes that one thread asks for at once, and threads of a block."""
PIECE = CHUNK * THREADS
"""Bytes of one block."""
MOST_PIECES = 240
"""Blocks of a node: kernels have 4,096 bytes of parameters, and each piece has 16."""
UNIT = 16
"""Addresses and sizes are multiples of it."""
SHORT_SECONDS = 4e-6
"""Calls that are longer on average, some ten latencies of memory, are not worth it: their first loads are a small part of them, and a node takes some
tenths of a microsecond from what runs beside it."""
SHARE_AHEAD, SHARE_OF_NODE = 6, 24
"""What is asked for ahead of its use, and by one node, is level 2 divided by these: 8 and 2 MB of an H100's 50."""

NAME = "prefetch"
PTX = f"""
.version 8.0
.target sm_90
.address_size 64
// Block b asks for piece b, an address and a number of bytes; each thread for a chunk of it.
.visible .entry {NAME}(.param .align 8 .b8 pieces[{16 * MOST_PIECES}]) {{
    .reg .pred %outside;
    .reg .b32 %number, %bytes;
    .reg .b64 %at, %piece, %first, %size, %offset, %rest, %most;
    mov.b64 %at, pieces;
    mov.u32 %number, %ctaid.x;
    mul.wide.u32 %piece, %number, 16;
    add.s64 %at, %at, %piece;
    ld.param.u64 %first, [%at];
    ld.param.u64 %size, [%at + 8];
    mov.u32 %number, %tid.x;
    mul.wide.u32 %offset, %number, {CHUNK};
    setp.ge.u64 %outside, %offset, %size;
    @%outside ret;
    sub.s64 %rest, %size, %offset;
    mov.u64 %most, {CHUNK};
    min.u64 %rest, %rest, %most;
    cvt.u32.u64 %bytes, %rest;
    add.s64 %first, %first, %offset;
    cp.async.bulk.prefetch.L2.global [%first], %bytes;
    ret;
}}
"""
"""The driver assembles it for the GPU that is present."""


@dataclass(frozen=True)
class Prefetch:
    """One node: the address and the bytes of each piece, at most `PIECE`, and the number of the call whose end it waits for, if any."""

    after: int | None
    pieces: tuple[tuple[int, int], ...]


def are_short(calls: int, seconds: float) -> bool:
    """Whether so many calls, which take so many seconds in all, are short enough to gain by prefetches."""
    return calls > 0 and seconds <= SHORT_SECONDS * calls


def prefetches(constants: Sequence[Sequence[tuple[int, int]]], level_2: int) -> list[Prefetch]:
    """The nodes of a graph, given address and bytes of the constants that each of its calls reads, in order, and the bytes of level 2.

    What the first call reads is left out, as nothing runs meanwhile. Of one constant no more is brought than may be ahead: a kernel that reads more
    is limited by the bandwidth of memory anyway.
    """
    ahead, each = level_2 // SHARE_AHEAD, level_2 // SHARE_OF_NODE
    seen = {address for address, _ in constants[0]} if constants else set()
    placed: list[tuple[int, int, int, int]] = []  # bytes before it, call, address, bytes
    before = 0
    for number, read in enumerate(constants[1:], 1):
        for address, size in read:
            size = min(size, ahead) // UNIT * UNIT
            if size and address not in seen:
                seen.add(address)
                placed.append((before, number, address, size))
                before += size
    starts = [start for start, *_ in placed]
    found: list[Prefetch] = []
    for _, members in groupby(placed, lambda one: one[0] // each):
        group = list(members)
        behind = group[0][0] - ahead
        # a call that reads more than may be ahead does not wait for itself
        after = min(placed[bisect_right(starts, behind) - 1][1], group[0][1] - 1) if behind >= 0 else None
        pieces = [(address + at, min(PIECE, size - at)) for _, _, address, size in group for at in range(0, size, PIECE)]
        found += [Prefetch(after, tuple(pieces[at : at + MOST_PIECES])) for at in range(0, len(pieces), MOST_PIECES)]
    return found


class PrefetchNode:
    """A node of a graph, with its parameters."""

    def __init__(self, driver: Driver, graph: int, before: Sequence[int], function: int, pieces: Sequence[tuple[int, int]]) -> None:
        self._pieces = (ctypes.c_uint64 * (2 * MOST_PIECES))(*(number for piece in pieces for number in piece))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._pieces))
        self._params = KernelNodeParams(
            func=function,
            gridDimX=len(pieces),
            gridDimY=1,
            gridDimZ=1,
            blockDimX=THREADS,
            blockDimY=1,
            blockDimZ=1,
            sharedMemBytes=0,
            kernelParams=ctypes.cast(self._pointers, ctypes.POINTER(ctypes.c_void_p)),
        )
        driver.add_kernel_node(graph, before, self._params)
