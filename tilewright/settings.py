"""Settings from the environment: the only file that reads it, anew at each call.

| variable | meaning | default |
|---|---|---|
| ``TILEWRIGHT_CACHE`` | folder of kernels and records | ``tilewright`` in ``$XDG_CACHE_HOME`` or ``~/.cache`` |
| ``TILEWRIGHT_CC`` | C compiler for every CPU target, a name or a path | the first of gcc and clang that is installed |
| ``TILEWRIGHT_COMPILE_SECONDS`` | seconds after which a compiler counts as hanging, and its kernel as one that does not compile | 300 |
| ``TILEWRIGHT_THREADS`` | threads of generated CPU code | ``torch.get_num_threads()`` |
| ``TILEWRIGHT_NATIVE`` | a CPU of the catalogue: plan and compile as if this CPU were that one | this CPU, as identified |
| ``TILEWRIGHT_READ_CODE`` | 0: choose by the models alone where candidates' code would be compiled and analysed | 1 |
| ``TILEWRIGHT_DEBUG`` | 1: keep the folders of failed builds, and log more | 0 |
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tilewright.errors import UnsupportedOption

MOST_THREADS = 1024
"""Maximum threads of one executable: more than any CPU of the catalogue has, and fewer than a process may start."""


def cache_directory() -> Path:
    """Folder under which everything reusable is stored; it need not exist yet.

    Raises:
        UnsupportedOption: if the variable names the home of an unknown user.
    """
    chosen = os.environ.get("TILEWRIGHT_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise UnsupportedOption(f"TILEWRIGHT_CACHE={chosen!r} is in the home of a user that is not known", "set it to a path") from error
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base).absolute() / "tilewright"
    try:
        return Path.home() / ".cache" / "tilewright"
    except RuntimeError:  # a user without a name and without HOME
        return Path(tempfile.gettempdir()) / f"tilewright-{os.getuid()}"


def c_compiler() -> str | None:
    """The C compiler chosen by the user, or None to look for one."""
    return os.environ.get("TILEWRIGHT_CC") or None


def compile_seconds() -> float:
    """Seconds after which a call of a compiler, or of another program, counts as hanging.

    Raises:
        UnsupportedOption: if the variable is not a positive number.
    """
    variable = "TILEWRIGHT_COMPILE_SECONDS"
    text = os.environ.get(variable) or "300"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UnsupportedOption(f"{variable}={text!r} is not a positive number of seconds", f"unset {variable} or correct it")
    return seconds


def compiler_environment(folder: Path) -> dict[str, str]:
    """The environment of a compiler: its temporary files in the folder, and untranslated messages."""
    return {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}


def child_environment() -> dict[str, str]:
    """The environment of a process of ours that works in another folder, with the same cache and compiler."""
    compiler = c_compiler() or ""
    return {
        **os.environ,
        "TILEWRIGHT_CACHE": str(cache_directory()),
        "TILEWRIGHT_CC": os.path.abspath(compiler) if os.sep in compiler else compiler,
    }


def native() -> str | None:
    """The catalogue name of the CPU as which to treat this host, or None to identify it."""
    return os.environ.get("TILEWRIGHT_NATIVE") or None


def available_cores() -> int:
    """Logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def asked_threads() -> int | None:
    """Threads that the user requested for generated CPU code alone, or None.

    Raises:
        UnsupportedOption: if the variable is not a number of threads.
    """
    variable = "TILEWRIGHT_THREADS"
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10) or not 1 <= int(text) <= MOST_THREADS:
        raise UnsupportedOption(f"{variable}={text!r} is no whole number from 1 to {MOST_THREADS}", f"unset {variable} or correct it")
    return int(text)


def read_code() -> bool:
    """Whether candidates may be compiled and their code analysed to choose among them, which is slow."""
    return os.environ.get("TILEWRIGHT_READ_CODE", "1") not in ("", "0")


def debug() -> bool:
    """Whether debugging output is requested."""
    return os.environ.get("TILEWRIGHT_DEBUG", "0") not in ("", "0")
