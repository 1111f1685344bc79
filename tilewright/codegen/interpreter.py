"""Runs any kernel on a CPU, GPU kernels included, and reports its faults.

The kernel becomes C with a check on every access, which is compiled (unoptimised, to compile fast; the checks themselves once, optimised) and called.
It reports:

- accesses out of bounds of global, shared and register buffers;
- reads of the target of an asynchronous copy before the copy was awaited, and races with its arrival;
- reads of shared and register elements, and of elements of output buffers, that were not written before;
- races: two threads of a block access the same element of shared or global memory between two barriers, or two blocks the same element of global
  memory without a barrier of the grid between, or (in CPU kernels) two iterations of a parallel loop the same element, and one of them writes; atomic
  additions race with everything but one another;
- vectors that are not aligned to their size (GPU);
- barriers that some threads of a block do not reach, or reach a different number of times, and warp instructions that some lanes do not reach;
- barriers of a grid whose counter is not the number of arrivals that is awaited;
- barriers in memory: a wait that never ends (instead of hanging); an arrival at a barrier of a block of the cluster that may have ended, or a read of
  its shared memory; bytes that were copied and not expected; accesses of what engines copy or multiply that no wait orders (races), and engines'
  accesses of what threads wrote without publishing it; stores by the copy engine that several threads of a warpgroup start, or that a block does not
  await at its end;
- accesses of sums that tensor cores may not have written yet;
- stores to parameters that are not writable.

Indices out of range for which a kernel checks are not its faults: they are stored to its parameter FAULTS, as on the real machine.

The generated C is described in `codegen.checked`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright import settings
from tilewright.codegen.checked import CheckedPrinter, barriers_of, number_of, places_of, strand_of
from tilewright.errors import CacheError, CompilerMissing, KernelFailed
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.intrinsic import LANES, Intrinsic
from tilewright.ir.kernel import FAULTS, Buffer, Kernel
from tilewright.system.libraries import mapped
from tilewright.system.private_files import make_folder, read_private
from tilewright.system.programs import ProgramHung, run_program

_FLAGS = ("-w", "-fwrapv", "-fno-strict-aliasing", "-fPIC")
_FAULTS = 64  # as TW_FAULTS in interpreter_runtime.h
_KINDS = (
    "out of bounds", "uninitialised", "race", "race between blocks", "misaligned", "barrier divergence", "read-only", "deadlock", "not awaited",
    "not published", "bytes", "ended", "stores",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """`faults`: messages in order of occurrence, only the first of each kind per buffer; empty if there are none. `unwritten`: for each writable
    parameter that the kernel did not write completely, the number of elements that it did not write."""

    faults: tuple[str, ...] = ()
    unwritten: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_clean(self) -> bool:
        return not self.faults


_MEANING = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p))
"""Callback of the compiled code: the number of an instruction, and the addresses of its operands."""


@lru_cache(maxsize=1)
def _compiler() -> str:
    wanted = settings.c_compiler()
    for name in (wanted,) if wanted else ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompilerMissing("the interpreter needs a C compiler and found none", "install gcc, or set TILEWRIGHT_CC")


@lru_cache(maxsize=1024)
def _library(source: str) -> ctypes.CDLL:
    """The compiled source, with the runtime in it."""
    inputs = {"kernel.c": source.encode(), "runtime.o": _runtime(_compiler())}
    # symbols of the C library are those of this process: a linker takes longer to read that library than to link a kernel
    flags, libraries = (*_FLAGS, "-O0", "-shared", "-nostdlib"), ("runtime.o", "-lm", "-lgcc")
    return mapped(_compiled("interpreter", _compiler(), flags, inputs, libraries), "interpreter")


@lru_cache(maxsize=8)
def _runtime(compiler: str) -> bytes:
    """What all kernels call, as an object file."""
    header, text = ((files(__package__) / f"interpreter_runtime.{suffix}").read_bytes() for suffix in "hc")
    inputs = {"kernel.c": text, "interpreter_runtime.h": header}
    return _compiled("interpreter_runtime", compiler, (*_FLAGS, "-O2", "-fvisibility=hidden", "-c"), inputs)


def _compiled(name: str, compiler: str, flags: Sequence[str], inputs: Mapping[str, bytes], others: Sequence[str] = ()) -> bytes:
    """What `kernel.c`, one of the given files, is compiled to: from the folder of that name in the cache if it is there and intact; from a temporary
    folder if the cache cannot be written. `others`: arguments that follow the file."""
    command = (compiler, *flags, "-o", "compiled", "kernel.c", *others)
    key = hashlib.sha256(b"\0".join((*map(str.encode, command), *inputs.values()))).hexdigest()[:32]
    folder = settings.cache_directory() / name
    path = folder / f"{key}.hashed"
    content = _read(path)
    if content is not None:
        return content
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            content = _built(command, inputs, Path(work))
            (Path(work) / "hashed").write_bytes(hashlib.sha256(content).digest() + content)
            (Path(work) / "hashed").chmod(0o600)
            os.replace(Path(work) / "hashed", path)
        return content
    except OSError:  # full or read-only
        pass
    try:
        with tempfile.TemporaryDirectory() as work:
            return _built(command, inputs, Path(work))
    except OSError as error:
        raise CacheError(
            f"neither {folder} nor the temporary folder can be written: {' '.join(str(error).split())}",
            "free some space, or set TILEWRIGHT_CACHE or TMPDIR to a folder that can be written",
        ) from error


def _read(path: Path) -> bytes | None:
    """The content of a file that begins with its hash; None if there is no such file, it is damaged, or another user may have written it."""
    try:
        content = read_private(path, path.parent)
    except OSError:
        return None
    return content[32:] if hashlib.sha256(content[32:]).digest() == content[:32] else None


def _built(command: Sequence[str], inputs: Mapping[str, bytes], folder: Path) -> bytes:
    """What the command writes in a folder with these files. Raises OSError for faults of the disk, KernelFailed for faults of the source."""
    for name, content in inputs.items():
        (folder / name).write_bytes(content)
    try:
        done = run_program(command, settings.compile_seconds(), folder)
    except ProgramHung as error:
        raise KernelFailed(f"the interpreter's code is not compiled: {error}", "check the C compiler, or raise TILEWRIGHT_COMPILE_SECONDS") from error
    if done.status:
        if any(os.strerror(code) in done.errors for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)):
            raise OSError(f"the compiler could not write: {done.errors[-200:]}")
        raise KernelFailed(f"the interpreter's code does not compile: {done.errors[:2000]}", "report this as a defect")
    return (folder / "compiled").read_bytes()


@lru_cache(maxsize=256)
def _translated(kernel: Kernel) -> tuple[str, tuple[Buffer, ...], tuple[tuple[Intrinsic, tuple[_Held, ...]], ...]]:
    """The kernel in C, its buffers, and its instructions with how their operands lie in memory."""
    printer = CheckedPrinter(kernel)
    source = printer.checked(kernel)
    return source, tuple(printer.buffers), tuple((intrinsic, _held(intrinsic)) for intrinsic in printer.intrinsics)


@dataclass(frozen=True)
class _Held:
    """How an operand lies in memory: the type of its bytes, of its elements, and its shape [lanes][elements]."""

    memory: Any
    kind: np.dtype[Any]
    shape: tuple[int, ...]
    reads: bool
    writes: bool


def _held(intrinsic: Intrinsic) -> tuple[_Held, ...]:
    held = []
    for operand in intrinsic.operands:
        kind, lanes = np.dtype(_array_type(operand.dtype)), operand.lanes or LANES[intrinsic.scope]
        memory = ctypes.c_uint8 * (lanes * operand.size * kind.itemsize)
        held.append(_Held(memory, kind, (lanes, *operand.shape), operand.reads, operand.writes))
    return tuple(held)


def _apply(intrinsic: Intrinsic, operands: Sequence[_Held], addresses: Any) -> None:
    """Applies the meaning of an instruction to its operands."""
    read, written = [], None
    for held, address in zip(operands, addresses[: len(operands)], strict=True):
        array = np.frombuffer(held.memory.from_address(address), held.kind).reshape(held.shape)
        if held.reads:
            read.append(array.copy())
        if held.writes and written is None:
            written = array
    assert intrinsic.meaning is not None and written is not None
    written[...] = intrinsic.meaning(*read)


def _array_type(dtype: str) -> str:
    """The NumPy type of a parameter's array; for bfloat16 that of its bits."""
    return ELEMENT_TYPES[dtype].array


def run(kernel: Kernel, arguments: Sequence[np.ndarray], scalars: Sequence[int] = (), initialised: Sequence[str] = ()) -> Report:
    """Runs the kernel on NumPy arrays, one per parameter, flat, with the parameter's dtype and size; writable ones are written.

    `initialised` names writable parameters whose contents count as written before the call. Raises ValueError for arguments that do not fit, and
    CompilerMissing if there is no C compiler.
    """
    if len(arguments) != len(kernel.parameters) or len(scalars) != len(kernel.scalars):
        raise ValueError(
            f"{kernel.name} takes {len(kernel.parameters)} arrays and {len(kernel.scalars)} scalars, got {len(arguments)} and {len(scalars)}"
        )
    flags: list[np.ndarray | None] = []
    for buffer, array in zip(kernel.parameters, arguments, strict=True):
        if array.dtype != np.dtype(_array_type(buffer.dtype)) or array.size < buffer.size or not array.flags.c_contiguous:
            raise ValueError(f"{kernel.name}: {buffer.name} needs {buffer.size} contiguous {buffer.dtype}, got {array.size} {array.dtype}")
        flags.append(np.zeros(max(buffer.size, 1), np.uint8) if buffer.writable and buffer.name != FAULTS else None)
    known = [None if b.name in initialised else f for b, f in zip(kernel.parameters, flags, strict=True)]
    source, buffers, intrinsics = _translated(kernel)
    faults, count = np.zeros((_FAULTS, 8), np.int64), np.zeros(1, np.int64)
    library = _library(source)
    errors: list[BaseException] = []

    def meaning(number: int, addresses: Any) -> None:
        """Keeps an exception for later, as it cannot pass through C."""
        try:
            _apply(*intrinsics[number], addresses)
        except BaseException as error:
            errors.append(error)

    slots = max(len(arguments), 1)
    library.run(
        (ctypes.c_void_p * slots)(*(a.ctypes.data for a in arguments)),
        (ctypes.c_int64 * max(len(scalars), 1))(*scalars),
        (ctypes.c_void_p * slots)(*(None if f is None else f.ctypes.data for f in known)),
        ctypes.c_void_p(faults.ctypes.data),
        ctypes.c_void_p(count.ctypes.data),
        _MEANING(meaning),
    )
    if errors:
        raise errors[0]
    messages = tuple(_message(kernel, buffers, row.tolist()) for row in faults[: count[0]])
    unwritten = {
        b.name: int(b.size - f[: b.size].sum()) for b, f in zip(kernel.parameters, known, strict=True) if f is not None and not f[: b.size].all()
    }
    return Report(messages, MappingProxyType(unwritten))


def _message(kernel: Kernel, buffers: Sequence[Buffer], fault: Sequence[int]) -> str:
    kind, number, offset, lanes, block, thread, other, writes = fault
    who = _who(kernel, block, thread)
    if _KINDS[kind] == "barrier divergence" and number < 0 and kernel.cooperative and lanes == kernel.launch.grid[0]:  # type: ignore[union-attr]
        return f"{kernel.name}: barrier divergence: the counter of the grid's barriers is {offset} where {other} arrivals are awaited"
    if _KINDS[kind] == "barrier divergence":
        first, meeting = ("thread 0", "a barrier") if lanes == _threads(kernel) else ("the first of its group", f"what {lanes} threads do together")
        return f"{kernel.name}: barrier divergence: {who} decides for {offset}, {first} for {other}, on the way to {meeting}"
    if _KINDS[kind] == "bytes":
        return f"{kernel.name}: bytes: {_agent(kernel, places_of(kernel) + offset)} were {-other} more than the phases expected"
    if _KINDS[kind] == "ended":
        return f"{kernel.name}: ended: {who} reaches into block {offset} of its cluster, which may have ended"
    if _KINDS[kind] == "stores" and number < 0:
        return f"{kernel.name}: stores: the block of {who} may end while the copy engine reads what that thread has it store"
    if _KINDS[kind] == "deadlock" and number < 0:
        return f"{kernel.name}: deadlock: {who} waits at a barrier of the block that others do not reach"
    buffer = buffers[number]
    if _KINDS[kind] == "deadlock":
        rest = f"{lanes} arrivals and {other} bytes are missing"
        return f"{kernel.name}: deadlock: {who} waits for a phase of parity {writes} of barrier {buffer.name}[{offset}], of which {rest}"
    deed = "writes" if writes else "reads"
    where = f"{buffer.space} buffer {buffer.name} ({buffer.size} elements) at offset {offset}" + (f", {lanes} lanes" if lanes > 1 else "")
    text = f"{kernel.name}: {_KINDS[kind]}: {who} {deed} {where}"
    if _KINDS[kind] == "race":
        engine = kernel.is_gpu and other >= places_of(kernel)
        doer = "several threads touch" if other < -1 else f"{_agent(kernel, other)} {'touch' if engine else 'touches'}"
        return f"{text}, which {doer} without a barrier between"
    if _KINDS[kind] == "stores":
        return f"{text}, from which the copy engine stores, as {_agent(kernel, other)} of its group has it do, too"
    if _KINDS[kind] == "not published":
        return f"{text} through an engine, which {_agent(kernel, other)} wrote and did not publish"
    if _KINDS[kind] == "race between blocks":
        doer = "several blocks touch" if other < -1 else f"block {other} touches"
        return f"{text}, which {doer} in the same launch"
    return text


def _threads(kernel: Kernel) -> int:
    """Upper limit on the number of threads of a barrier."""
    return prod(kernel.launch.block) * kernel.cluster if kernel.launch else 1


def _agent(kernel: Kernel, number: int) -> str:
    """A thread, or an engine of those that follow the threads (interpreter_runtime.h)."""
    if not kernel.is_gpu or number < places_of(kernel):
        return f"{'thread' if kernel.is_gpu else 'iteration'} {number}"
    barriers = barriers_of(kernel)
    number -= places_of(kernel)
    if number < number_of(barriers) * kernel.cluster:
        number %= number_of(barriers)
    for name, (first, count) in barriers.items():
        if number < first + count:
            return f"copies that complete on barrier {name}[{number - first}]"
    strands = places_of(kernel) // (strand_of(kernel) or 1)
    return "stores of the copy engine" if number >= number_of(barriers) * kernel.cluster + strands else "products of tensor cores"


def _who(kernel: Kernel, block: int, thread: int) -> str:
    if kernel.launch is None:
        return f"iteration {thread}"
    x, y, _ = kernel.launch.grid
    i, j, _ = kernel.launch.block
    return f"block {(block % x, block // x % y, block // x // y)} thread {(thread % i, thread // i % j, thread // i // j)}"
