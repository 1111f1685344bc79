"""The two compilers: the system's C compiler for CPUs, and NVRTC in this process for GPUs.

Each has an ``identity`` and a ``command`` (without paths of a particular build), which determine the binary together with the source text, and a
method ``compile``, which writes it. Both may be used from many threads; NVRTC releases the interpreter's lock, so threads suffice to use all cores.
Each call has a time limit, and ``stop`` ends calls in progress: a C compiler with all processes that it started, NVRTC when it next asks whether to
continue, which is between its passes. Their output is checked: a binary that could not be loaded is a compilation failure.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright import settings
from tilewright.errors import CompilerMissing, UnsupportedOption
from tilewright.hardware import Machine
from tilewright.system.programs import ProgramHung, Programs, ProgramStopped, run_program
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.elf import check_cubin, check_shared_object

C_FLAGS = (
    "-O2", "-ftree-vectorize", "-std=gnu11", "-fPIC", "-shared", "-fopenmp",
    "-nostartfiles",  # no constructors: loading a kernel runs no code (toolchain/elf.py checks this)
    "-fno-math-errno",  # allows square roots and exponentials to be vectorised
    "-fno-trapping-math",  # allows branches to become masked operations; values do not change
    "-ffp-contract=fast",  # a * b + c becomes one fused operation
    "-fwrapv",  # integers wrap, as in PyTorch
)  # fmt: skip
CUDA_FLAGS = ("--std=c++17", "-default-device", "--ptxas-options=-v")
LIBRARIES = ("-lm",)
INSTALL = {
    "x86_64-linux-gnu": "install one, as with 'apt install gcc' or 'dnf install gcc'",
    "aarch64-linux-gnu": "install the cross compiler, as with 'apt install gcc-aarch64-linux-gnu'",
}


@dataclass(frozen=True)
class Outcome:
    """Result of one compiler run: its output, and whether it wrote the binary; `hung` if it was stopped."""

    succeeded: bool
    log: str
    hung: bool = False


VERSION_SECONDS = 60.0


@lru_cache(maxsize=64)
def _version_line(path: str, modified_ns: int) -> str:
    """First line of ``--version``, requested once per process for each file and modification time.

    Raises:
        CompilerMissing: if the program cannot be run or does not answer.
    """
    try:
        done = run_program([path, "--version"], min(settings.compile_seconds(), VERSION_SECONDS))
    except (OSError, ProgramHung) as error:
        raise CompilerMissing(f"the C compiler {path} cannot be asked for its version: {error}", "set TILEWRIGHT_CC to one that runs") from error
    return (done.output or done.errors).partition("\n")[0].strip()


def identity_of(path: str) -> str:
    """The resolved path of a program and its version line.

    Raises:
        CompilerMissing: if it cannot be run.
    """
    return f"{os.path.realpath(path)}: {_version_line(path, os.stat(path).st_mtime_ns)}"


def _failed(words: str, reason: object, hung: bool = False) -> Outcome:
    return Outcome(False, f"{words}{'' if not words or words.endswith(chr(10)) else chr(10)}error: {reason}\n", hung)


def _hung(words: str, reason: object) -> Outcome:
    return _failed(words, f"{reason} (TILEWRIGHT_COMPILE_SECONDS)", True)


@dataclass(frozen=True)
class CCompiler:
    """gcc or clang for one machine."""

    path: str
    """The executable; symbolic links are not resolved, as some compilers depend on the name by which they are called."""
    machine_flags: tuple[str, ...]
    architecture: str
    """Architecture of the code, as in `Machine`."""
    seconds: float = field(default_factory=settings.compile_seconds, compare=False)
    """Time limit of one call."""
    programs: Programs = field(default_factory=Programs, compare=False, repr=False)

    binary_name = "kernel.so"
    source_name = "kernel.c"
    kind = "so"

    @classmethod
    def find(cls, machine: Machine) -> CCompiler:
        """The compiler chosen by the user; else this host's gcc or clang, or for another architecture the gcc named after its target triple.

        Raises:
            CompilerMissing: if there is none; the message lists the names that were tried.
        """
        native = machine.target_triple.split("-")[0] == os.uname().machine
        chosen = settings.c_compiler()
        # A compiler chosen by the user serves the host, and another architecture only if its name contains that architecture.
        if chosen and (native or machine.target_triple.split("-")[0] in Path(chosen).name):
            names: tuple[str, ...] = (chosen,)
        elif native:
            names = ("gcc", "clang", "cc")
        else:
            names = (f"{machine.target_triple}-gcc",)
        found = next(filter(None, map(shutil.which, names)), None)
        if found is None:
            raise CompilerMissing(
                f"no C compiler for {machine.name} ({machine.target_triple}): looked for {', '.join(names)}",
                INSTALL.get(machine.target_triple, "install one") + ", or set TILEWRIGHT_CC to its path",
            )
        return cls(os.path.abspath(found), machine.compiler_flags, machine.architecture)

    def require(self) -> None:
        """Does nothing: ``find`` has already found the compiler."""

    @property
    def identity(self) -> str:
        """The resolved path and the version line."""
        return identity_of(self.path)

    def command(self, source: SourceFile) -> tuple[str, ...]:
        flags = (*C_FLAGS, *self.machine_flags, *source.extra_flags)
        return (self.path, *flags, "-o", self.binary_name, self.source_name, *LIBRARIES)

    def compile(self, source: SourceFile, folder: Path) -> Outcome:
        """Compiles ``folder / source_name`` to ``folder / binary_name``."""
        try:
            done = self.programs.run(self.command(source), self.seconds, folder, settings.compiler_environment(folder))
        except ProgramHung as error:
            return _hung("", error)
        words = done.output + done.errors
        if done.status:
            return Outcome(False, words or f"error: {self.path} ended with status {done.status} and without a word\n")
        try:
            self.check((folder / self.binary_name).read_bytes(), source.entries)
        except FileNotFoundError:
            return _failed(words, f"{self.path} ended without an error and left no {self.binary_name}")
        except ValueError as error:
            return _failed(words, f"{self.path} ended without an error and left no sound {self.binary_name}: {error}")
        return Outcome(True, words)

    def check(self, content: bytes, entries: Sequence[str]) -> None:
        """Raises ValueError if a binary cannot be loaded or lacks a function."""
        check_shared_object(content, self.architecture, entries)

    def stop(self) -> None:
        """Ends compilations in progress, and prevents new ones."""
        self.programs.stop()


@lru_cache(maxsize=1)
def _nvrtc_identity() -> str:
    """Release of the installed NVRTC: that of its package if there is one, so that a warm cache loads no library."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return f"nvrtc {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    _nvrtc_architectures()  # a clear error if the library is missing
    status, major, minor = _load_nvrtc("cuda13").nvrtcVersion()
    return f"nvrtc {major}.{minor}"


@lru_cache(maxsize=1)
def _nvrtc_architectures() -> frozenset[int]:
    """Architectures that the installed NVRTC supports, as numbers such as 90.

    Raises:
        CompilerMissing: if the bindings are installed but the library is not.
    """
    try:
        status, architectures = _load_nvrtc("cuda13").nvrtcGetSupportedArchs()
    except RuntimeError as error:
        raise CompilerMissing(f"the NVRTC library cannot be loaded: {error}", _install_extra("cuda13")) from error
    return frozenset(architectures)


def _install_extra(extra: str) -> str:
    return f"pip install 'tilewright[{extra}]'"


def _load_nvrtc(extra: str) -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilerMissing("NVRTC compiles kernels for NVIDIA GPUs, and cuda.bindings.nvrtc cannot be imported", _install_extra(extra)) from error
    return nvrtc


FLOW_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
"""A callback that NVRTC calls between its passes; it returns 1 to stop NVRTC."""


@dataclass(frozen=True)
class NvrtcCompiler:
    """NVRTC for one exact architecture. It always produces a cubin, so that inline assembly is checked at once."""

    architecture: str
    """Such as "sm_90a"."""
    extra: str
    """The package extra with an NVRTC for this architecture."""
    seconds: float = field(default_factory=settings.compile_seconds, compare=False)
    """Time limit of one call."""
    stopping: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    binary_name = "kernel.cubin"
    source_name = "kernel.cu"
    kind = "cubin"

    @classmethod
    def find(cls, machine: Machine) -> NvrtcCompiler:
        """NVRTC for the machine; the library is loaded only when needed."""
        return cls(machine.architecture, machine.toolchain_extra)

    def require(self) -> None:
        """Loads NVRTC and checks that it supports the architecture.

        Raises:
            CompilerMissing: if it is not installed, or its CUDA release lacks the architecture.
        """
        _load_nvrtc(self.extra)
        if int(self.architecture.removeprefix("sm_").rstrip("af")) not in _nvrtc_architectures():
            raise CompilerMissing(
                f"the installed NVRTC ({_nvrtc_identity()}) does not know {self.architecture}",
                f"the extra {self.extra!r} has the compiler for it: {_install_extra(self.extra)}",
            )

    @property
    def identity(self) -> str:
        return _nvrtc_identity()

    def command(self, source: SourceFile) -> tuple[str, ...]:
        return ("nvrtc", f"--gpu-architecture={self.architecture}", *CUDA_FLAGS, *source.extra_flags, self.source_name)

    def compile(self, source: SourceFile, folder: Path) -> Outcome:
        """Compiles the source's text to ``folder / binary_name``."""
        outcome, _, cubin = self.translated(source)
        if outcome.succeeded:
            try:
                self.check(cubin, source.entries)
            except ValueError as error:
                return _failed(outcome.log, f"NVRTC made no sound cubin: {error}")
            (folder / self.binary_name).write_bytes(cubin)
        return outcome

    def check(self, content: bytes, entries: Sequence[str]) -> None:
        """Raises ValueError if a binary is incomplete or lacks a kernel."""
        check_cubin(content, self.architecture, entries)

    def stop(self) -> None:
        """Ends compilations in progress when NVRTC next asks, and any that start later."""
        self.stopping.set()

    def translated(self, source: SourceFile) -> tuple[Outcome, str, bytes]:
        """The compiler's output, the PTX of the source's text, and the cubin assembled from it; PTX and cubin are empty if it failed."""
        self.require()
        nvrtc = _load_nvrtc(self.extra)
        options = [flag.encode() for flag in self.command(source)[1:-1]]
        status, program = nvrtc.nvrtcCreateProgram(source.text.encode(), self.source_name.encode(), 0, [], [])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return Outcome(False, f"nvrtcCreateProgram: {status.name}"), "", b""
        start = time.monotonic()
        asked = FLOW_CALLBACK(lambda *_: int(self.stopping.is_set() or time.monotonic() - start > self.seconds))
        try:
            if hasattr(nvrtc, "nvrtcSetFlowCallback"):  # since CUDA 12.8
                nvrtc.nvrtcSetFlowCallback(program, ctypes.cast(asked, ctypes.c_void_p).value, 0)
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.rstrip(b"\0 \n").decode(errors="replace")
            if self.stopping.is_set():
                raise ProgramStopped("NVRTC was stopped")
            if status == getattr(nvrtc.nvrtcResult, "NVRTC_ERROR_CANCELLED", None):
                return _hung(text, f"NVRTC was stopped after {time.monotonic() - start:.0f} s"), "", b""
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                return Outcome(False, f"{text}\n{status.name}"), "", b""
            cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
            nvrtc.nvrtcGetCUBIN(program, cubin)
            ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
            nvrtc.nvrtcGetPTX(program, ptx)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return Outcome(True, text), ptx.rstrip(b"\0").decode(), bytes(cubin)


Compiler = CCompiler | NvrtcCompiler


def language_of(machine: Machine) -> str:
    """The language of the machine's kernels."""
    return "cuda" if machine.is_gpu else "c"


def compiler_for(machine: Machine, language: str) -> Compiler:
    """The compiler of a machine.

    Raises:
        UnsupportedOption: if the language is not that of the machine's kind.
        CompilerMissing: if there is none.
    """
    if (machine.kind, language) not in (("cpu", "c"), ("gpu", "cuda")):
        raise UnsupportedOption(f"{language} sources are not for {machine.name}, a {machine.kind}")
    return NvrtcCompiler.find(machine) if machine.is_gpu else CCompiler.find(machine)
