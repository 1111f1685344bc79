"""Runs a program on this CPU: a whole segment of kernels is one foreign call.

Kernels have the signature ``void NAME(void *const *arguments, const int64_t *scalars)``. When the executable is built, each call becomes a record
{function, arguments, scalars} over buffers with known addresses. A call of the executable only writes the addresses of the caller's tensors and runs
a small C loop, compiled once, over the records. Without a C compiler a Python loop does the same.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tilewright import settings
from tilewright.errors import CompilerMissing, KernelFailed
from tilewright.hardware import identified_cpu
from tilewright.ir.region import Call
from tilewright.runtime.buffers import Buffers, SharedConstants
from tilewright.runtime.loadable import LoadableKernel, LoadableProgram
from tilewright.system.libraries import mapped
from tilewright.toolchain import SourceFile, compile_kernels

RUNNER_SOURCE = """\
// Walks the kernel calls of one executable. The layout of these structs is also written in tilewright/runtime/cpu.py.
#include <stdint.h>
#include <time.h>

typedef void (*kernel_function)(void *const *arguments, const int64_t *scalars);
typedef struct { kernel_function function; void *const *arguments; const int64_t *scalars; } record;
typedef struct { void **slot; int64_t external; int64_t shift; } patch;
typedef struct {
    const record *records; int64_t record_count;
    const patch *patches; int64_t patch_count;
    void *const *externals;
    int (*get_threads)(void); void (*set_threads)(int); int64_t threads;
    const int64_t *faults; int64_t fault_count;
    int64_t *moments;
} segment;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// Whether a kernel has reported an index out of range; no other runs after it, as one could update an input in place.
int tilewright_run(const segment *s)
{
    for (int64_t i = 0; i < s->patch_count; i++)
        *s->patches[i].slot = (char *)s->externals[s->patches[i].external] + s->patches[i].shift;
    int before = 0, fault = 0;
    if (s->get_threads && s->set_threads) {
        before = s->get_threads();
        if (before != s->threads) s->set_threads((int)s->threads);
    }
    if (s->moments)
        s->moments[0] = now();
    for (int64_t i = 0; i < s->record_count && !fault; i++) {
        s->records[i].function(s->records[i].arguments, s->records[i].scalars);
        if (s->moments)
            s->moments[i + 1] = now();
        for (int64_t k = 0; k < s->fault_count; k++)
            fault |= s->faults[k] != 0;
    }
    if (before && before != s->threads) s->set_threads(before);
    return fault;
}
"""
TILES = "amx_tile"
"""The machine feature that needs permission from Linux."""
KERNEL_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class SegmentStruct(ctypes.Structure):
    """The struct `segment` of the C runner."""

    _fields_ = [
        ("records", ctypes.c_void_p),
        ("record_count", ctypes.c_int64),
        ("patches", ctypes.c_void_p),
        ("patch_count", ctypes.c_int64),
        ("externals", ctypes.c_void_p),
        ("get_threads", ctypes.c_void_p),
        ("set_threads", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("faults", ctypes.c_void_p),
        ("fault_count", ctypes.c_int64),
        ("moments", ctypes.c_void_p),
    ]


class Compiled(Protocol):
    """The part of `toolchain.Binary` that the runtime needs."""

    @property
    def path(self) -> Path: ...
    @property
    def entries(self) -> tuple[str, ...]: ...
    @property
    def content(self) -> bytes: ...


def openmp_libraries() -> tuple[str, ...]:
    """Paths of the OpenMP runtimes mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" ") and len(line.split(maxsplit=5)) == 6}
    return tuple(sorted(p for p in paths if Path(p).name.startswith(("libgomp", "libiomp", "libomp"))))


def share_openmp() -> ctypes.CDLL | None:
    """Makes the OpenMP runtime that PyTorch loaded visible to kernels, so that they do not start a second thread pool."""
    own = str(Path(torch.__file__).resolve().parent)  # the maps show paths without links, and an environment may be one
    # other packages, such as scikit-learn, bring runtimes of their own
    for path in sorted(openmp_libraries(), key=lambda path: not path.startswith(own)):
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return None


def permit_tiles() -> bool:
    """Requests permission from Linux to use the tile registers (AMX), without which tile instructions are illegal; returns whether it was granted."""
    arch_prctl, get_permitted, request, tile_data = 158, 0x1022, 0x1023, 18
    mask, syscall = ctypes.c_uint64(), ctypes.CDLL(None).syscall
    syscall(arch_prctl, request, tile_data)
    return syscall(arch_prctl, get_permitted, ctypes.byref(mask)) == 0 and bool(mask.value >> tile_data & 1)


class Library:
    """The mapped shared objects of a program with these kernels, and the addresses of their entries.

    Raises:
        KernelFailed: if a binary cannot be loaded or lacks an entry, or the process may not use what a kernel requires.
    """

    def __init__(self, binaries: Sequence[Compiled], kernels: Mapping[str, LoadableKernel]) -> None:
        self.openmp = share_openmp()
        self.entries: dict[str, int] = {}
        for binary in binaries:
            try:
                handle = mapped(binary.content, binary.entries[0] if binary.entries else "kernel")
            except OSError as error:
                raise KernelFailed(f"{binary.path} cannot be loaded: {error}", "compile the model again") from error
            for name in binary.entries:
                try:
                    self.entries[name] = ctypes.cast(handle[name], ctypes.c_void_p).value or 0
                except AttributeError as error:
                    raise KernelFailed(f"{binary.path} has no function {name}", "compile the model again") from error
        if any(TILES in kernel.requires for kernel in kernels.values()) and not permit_tiles():
            remedy = 'compile the model with precision="fp32", a bfloat16 module for the target "x86-avx512"'
            raise KernelFailed("Linux does not let this process use the tile registers (AMX)", remedy)
        self.runner = _load_runner()

    def thread_functions(self) -> tuple[int, int]:
        """Addresses of omp_get_max_threads and omp_set_num_threads; zeros without an OpenMP runtime."""
        if self.openmp is None:
            return 0, 0
        get, put = (ctypes.cast(getattr(self.openmp, n), ctypes.c_void_p) for n in ("omp_get_max_threads", "omp_set_num_threads"))
        return get.value or 0, put.value or 0


def _load_runner() -> ctypes._NamedFuncPointer | None:
    """The compiled C loop; None if there is no compiler or the code cannot be mapped."""
    source = SourceFile("runner", RUNNER_SOURCE, "c", ("tilewright_run",))
    try:
        built = compile_kernels([source], identified_cpu())[0]
    except CompilerMissing:
        return None
    if isinstance(built, KernelFailed):
        return None
    try:
        function = mapped(built.content, "tilewright_run").tilewright_run
    except OSError:  # such as a limit on file sizes, which also applies to files in memory
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function


class _Segment:
    """The regions between two PyTorch nodes, as records."""

    def __init__(self, owner: CpuEngine, first: int, last: int) -> None:
        starts = owner.region_starts
        self.records = owner.records[starts[first] : starts[last]]
        self.struct = SegmentStruct(
            self.records.ctypes.data,
            len(self.records),
            owner.patches.ctypes.data,
            len(owner.patches),
            ctypes.addressof(owner.externals),
            *owner.library.thread_functions(),
            _TEAM.of(owner),
            owner.buffers.faults.data_ptr(),
            owner.buffers.faults.numel(),
            None,
        )
        self.address = ctypes.addressof(self.struct)


class Team:
    """The threads that OpenMP keeps for the next kernel. A forked process has none of them, and GNU's runtime would wait for them forever, so kernels
    there run on one thread if any kernel before the fork ran on several."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[CpuEngine] = weakref.WeakSet()
        self._exists, self._lost = False, False
        os.register_at_fork(after_in_child=self._lose)

    def of(self, engine: CpuEngine) -> int:
        """The number of threads for the engine's kernels from now on."""
        if engine.threads > 1:
            self._exists = True
            self._engines.add(engine)
        return 1 if self._lost else engine.threads

    def _lose(self) -> None:
        self._lost = self._exists
        for engine in list(self._engines):
            engine.renew_threads()


_TEAM = Team()


class CpuEngine:
    """One program over one arena, ready to run. Calls of `run` must not overlap.

    Raises:
        KernelFailed: if a binary cannot be loaded or lacks a kernel.
    """

    input_alignment = 1
    """In bytes; inputs are read in place at any address."""

    def __init__(self, buffers: Buffers, library: Library, threads: int | None = None) -> None:
        program = buffers.program
        self.buffers = buffers
        self.library = library
        self._threads = threads or settings.asked_threads() or torch.get_num_threads()
        self.externals = (ctypes.c_void_p * max(buffers.slots, 1))()
        self._build_records(program)
        self._segments: dict[tuple[int, int], _Segment] = {}

    def _build_records(self, program: LoadableProgram) -> None:
        missing = sorted({c.kernel for r in program.regions for c in r.calls} - self.library.entries.keys())
        if missing:
            raise KernelFailed(f"no binary holds the kernels {', '.join(missing)}", "compile the model again")
        slots = sum(len(call.arguments) for region in program.regions for call in region.calls)
        self.arguments = np.zeros(max(slots, 1), dtype=np.int64)
        scalars: list[int] = []
        records: list[tuple[int, int, int]] = []
        patches: list[tuple[int, int, int]] = []
        self.region_starts = [0]
        cursor = 0
        argument_base = self.arguments.ctypes.data
        for region in program.regions:
            calls: list[tuple[int, int, Call]] = []
            for call in region.calls:
                calls.append((self.library.entries[call.kernel], argument_base + 8 * cursor, call))
                for name, elements in call.shifted:
                    slot, shift = self.buffers.slot(name), elements * program.element_bytes(name) if elements else 0
                    if slot is None:
                        self.arguments[cursor] = self.buffers.address(name) + shift
                    else:
                        patches.append((argument_base + 8 * cursor, slot, shift))
                    cursor += 1
            for step in range(region.repeat):
                for function, arguments, call in calls:
                    records.append((function, arguments, len(scalars)))
                    scalars += [*[step] * program.kernels[call.kernel].scalars, call.trips]
            self.region_starts.append(len(records))
        self.scalars = np.array(scalars, dtype=np.int64)
        self.records = np.array(records, dtype=np.int64).reshape(-1, 3)
        self.records[:, 2] = self.scalars.ctypes.data + 8 * self.records[:, 2]
        self.patches = np.array(patches, dtype=np.int64).reshape(-1, 3)

    @property
    def threads(self) -> int:
        """OpenMP threads per kernel; after a fork, kernels may have to run on one, see `Team`."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        self._threads = count
        self.renew_threads()

    def renew_threads(self) -> None:
        """Sets the number of threads in all segments that are already built."""
        for segment in self._segments.values():
            segment.struct.threads = _TEAM.of(self)

    def in_place(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The caller's tensors as PyTorch's operators are to see them: as they are."""
        return inputs, outputs

    def bind(self, pointers: Sequence[int]) -> None:
        """Sets the addresses of the caller's tensors for the following runs: inputs, then outputs."""
        self.externals[: self.buffers.slots] = [*self.buffers.addresses(pointers)]

    def _segment(self, first: int, last: int) -> _Segment:
        segment = self._segments.get((first, last))
        if segment is None:
            segment = self._segments[first, last] = _Segment(self, first, last)
        return segment

    def run(self, first: int, last: int) -> None:
        """Runs the kernels of regions `first` to `last` (excluded), none of which is a PyTorch node.

        Raises:
            IndexOutOfRange: if a kernel found an index out of range.
        """
        segment = self._segment(first, last)
        if self.library.runner(segment.address) if self.library.runner is not None else self._run_in_python(segment):
            fault = self.buffers.take_fault()
            assert fault is not None
            raise fault

    def run_timed(self, first: int, last: int) -> list[float]:
        """Does what `run` does. Returns the moment at which the first region began, and those at which each one ended.

        Raises:
            IndexOutOfRange: if a kernel found an index out of range.
        """
        segment = self._segment(first, last)
        moments = np.zeros(len(segment.records) + 1, dtype=np.int64)
        segment.struct.moments = moments.ctypes.data
        try:
            self.run(first, last)
        finally:
            segment.struct.moments = None
        starts = np.array(self.region_starts[first : last + 1])
        return [1e-9 * nanoseconds for nanoseconds in moments[starts - starts[0]].tolist()]

    def idle(self, launches: int) -> None:
        """Does nothing: calls are not enqueued."""

    def moment(self) -> float:
        """Now, in seconds of the system's monotonic clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The seconds between two moments."""
        return end - start

    def clock_seconds(self) -> float:
        """What a clock adds to the time of a region: nothing worth subtracting, as reading it takes some 25 ns."""
        return 0.0

    def _run_in_python(self, segment: _Segment) -> bool:
        for slot, external, shift in self.patches.tolist():
            self.arguments[(slot - self.arguments.ctypes.data) // 8] = (self.externals[external] or 0) + shift
        before = 0
        if self.library.openmp is not None:
            before = self.library.openmp.omp_get_max_threads()
            self.library.openmp.omp_set_num_threads(_TEAM.of(self))
        moments = [time.perf_counter_ns()]
        for function, arguments, scalars in segment.records.tolist():
            KERNEL_PROTOTYPE(function)(arguments, scalars)
            moments.append(time.perf_counter_ns())
            if self.buffers.faults.any():
                break
        if segment.struct.moments:
            ctypes.memmove(segment.struct.moments, (ctypes.c_int64 * len(moments))(*moments), 8 * len(moments))
        if self.library.openmp is not None:
            self.library.openmp.omp_set_num_threads(before)
        return bool(self.buffers.faults.any())

    def check_indices(self, wait: bool) -> None:
        """Does nothing: `run` has already raised any error."""

    def finish(self) -> None:
        """Does nothing: `run` returns when the kernels have finished."""

    def abandon(self) -> None:
        """Does nothing: a failed call leaves nothing to undo."""

    def close(self) -> None:
        self._segments.clear()


def cpu_engine(
    program: LoadableProgram,
    binaries: Sequence[Compiled],
    threads: int | None = None,
    model: CpuEngine | None = None,
    shared_constants: SharedConstants | None = None,
) -> CpuEngine:
    """An engine over fresh buffers; a clone of `model`, if given, shares its constants and kernels, others `shared_constants`."""
    from tilewright.runtime.memory_plan import CPU_ALIGNMENT

    buffers = Buffers(program, torch.device("cpu"), CPU_ALIGNMENT, model.buffers.constants if model is not None else None, shared_constants)
    return CpuEngine(buffers, model.library if model is not None else Library(binaries, program.kernels), threads)
