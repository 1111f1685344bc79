"""The kernel cache: one folder a kernel with source, command, log, metadata and binary, safe for many processes.

    root/ab/ab12...           a finished entry, named by its key; it appears by one atomic rename and is not changed
    root/building-HOST-PID-*  an entry in the making; left behind by a killed process, and then pruned

An entry whose hashes do not fit is built again. Where the cache cannot be written (full disk, read-only), a warning is
logged and the kernel is built in a private temporary folder that lives as long as the process.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tilewright.errors import CacheError, KernelFailed
from tilewright.hardware import Machine
from tilewright.toolchain.binary import Binary, SourceFile, parse_resources
from tilewright.toolchain.compilers import Compiler

SCHEMA = 1
"""Version of the entries' format; it is part of every key."""
BUILDING = "building-"
STALE_SECONDS = 3600.0
"""A folder in the making counts as abandoned after this long, whatever process has its number now."""

DISK_WORDS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
"""What a compiler says when it is the disk, and not the kernel, that is at fault."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One finished kernel in the cache."""

    key: str
    folder: Path
    name: str
    kind: str
    target: str
    bytes: int
    created: float
    """Seconds since the epoch."""


def kernel_key(source: SourceFile, compiler: Compiler) -> str:
    """Hash of everything that decides the binary: text, command, compiler's identity, format version."""
    parts = [SCHEMA, source.language, source.text, compiler.command(source), compiler.identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    """A temporary folder of this process, removed when it ends."""
    folder, owner = Path(tempfile.mkdtemp(prefix="tilewright-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child inherits this registration, not the folder
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _warn_unwritable(root: Path, why: str) -> None:
    """Says once in a process that a cache is of no use."""
    if root not in _unwritable():
        _unwritable().add(root)
        log.warning("kernel cache %s cannot be written (%s); kernels are kept for this process only", root, why)


@lru_cache(maxsize=1)
def _unwritable() -> set[Path]:
    """The caches of which the process knows it."""
    return set()


def _alive(name: str) -> bool:
    """Whether the process that is making the folder ``building-HOST-PID-RANDOM`` still runs, as far as can be told."""
    host, _, rest = name.removeprefix(BUILDING).partition("-")
    pid = rest.partition("-")[0]
    if host != _host_tag() or not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@lru_cache(maxsize=1)
def _host_tag() -> str:
    """Name of this host, and of a container with process numbers of its own, in the names of folders in the making."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{os.uname().nodename}{namespace}".encode()).hexdigest()[:8]


class KernelCache:
    """Compiled kernels under one root folder. Its only state is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def folder(self, key: str) -> Path:
        """Where the entry of that key is, if it is."""
        return self.root / key[:2] / key

    def load(self, key: str, source: SourceFile) -> Binary | None:
        """The finished binary of that key, or None where there is none or it is damaged."""
        folder = self.folder(key)
        try:
            return _read_entry(folder, source.entries)
        except FileNotFoundError:
            if folder.exists():
                log.warning("kernel cache entry %s is incomplete; building it again", folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("kernel cache entry %s is damaged (%r); building it again", folder, error)
        return None

    def get_or_build(self, source: SourceFile, compiler: Compiler, machine: Machine) -> Binary | KernelFailed:
        """The binary from the cache, else compiled and stored; a kernel that does not compile is a value.

        Raises:
            CompilerMissing: where the compiler is needed and not there.
            CacheError: where neither the cache nor the temporary folder can be written.
        """
        key = kernel_key(source, compiler)
        found = self.load(key, source)
        if found is not None:
            return found
        try:
            return self._build(self.root, key, source, compiler, machine)
        except OSError as error:
            _warn_unwritable(self.root, " ".join(str(error).split()))
        try:
            private = KernelCache(_private_folder())
            return private.load(key, source) or self._build(private.root, key, source, compiler, machine)
        except OSError as error:
            raise CacheError(
                f"neither {self.root} nor the temporary folder can be written: {error}",
                "free some space, or set TILEWRIGHT_CACHE or TMPDIR to a folder that can be written",
            ) from error

    def _build(
        self, root: Path, key: str, source: SourceFile, compiler: Compiler, machine: Machine
    ) -> Binary | KernelFailed:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{_host_tag()}-{os.getpid()}-", dir=root))
        try:
            (folder / compiler.source_name).write_text(source.text)
            (folder / "command").write_text(" ".join(compiler.command(source)) + "\n")
            outcome = compiler.compile(source, folder)
            (folder / "log").write_text(outcome.log)
            if not outcome.succeeded and any(words in outcome.log for words in DISK_WORDS):
                raise OSError(f"the compiler could not write: {' '.join(outcome.log.split())[-200:]}")
            if not outcome.succeeded:
                return self._keep_failure(root, folder, key, source, machine, outcome.log)
            metadata = {
                "schema": SCHEMA,
                "name": source.name,
                "language": source.language,
                "kind": compiler.kind,
                "source": compiler.source_name,
                "binary": compiler.binary_name,
                "entries": list(source.entries),
                "command": list(compiler.command(source)),
                "compiler": compiler.identity,
                "target": machine.name,
                "machine_digest": machine.digest,
                "source_sha256": _hash_file(folder / compiler.source_name),
                "binary_sha256": _hash_file(folder / compiler.binary_name),
                "created": time.time(),
            }
            (folder / "metadata.json").write_text(json.dumps(metadata, indent=1))
            _publish(folder, root / key[:2] / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        stored = KernelCache(root).load(key, source)
        if stored is None:
            raise OSError(f"entry {key} cannot be read back")
        return stored

    @staticmethod
    def _keep_failure(
        root: Path, folder: Path, key: str, source: SourceFile, machine: Machine, words: str
    ) -> KernelFailed:
        """Keep source, command and log of a failed build where the message can point to them."""
        kept = root / "failed" / key
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(folder, kept)
        except OSError:  # another process keeps the same failure at this moment
            if not (kept / "log").exists():
                raise
        errors = [line for line in words.splitlines() if "error" in line.lower()]
        first = errors[0] if errors else words.strip().partition("\n")[0] or "the compiler failed without a word"
        return KernelFailed(
            f"kernel {source.name!r} does not compile for {machine.name}: {first}",
            f"the source and the compiler's log are in {kept}",
            kept / "log",
        )

    def _all_folders(self) -> Iterator[Path]:
        for shelf in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            yield from sorted(path for path in shelf.iterdir() if path.is_dir())

    def entries(self) -> list[Entry]:
        """Every finished entry with readable metadata."""
        found = []
        for folder in self._all_folders():
            try:
                metadata = json.loads((folder / "metadata.json").read_bytes())
                size = sum(path.stat().st_size for path in folder.iterdir())
                fields = (metadata["name"], metadata["kind"], metadata["target"], size, metadata["created"])
            except (OSError, ValueError, KeyError):
                continue
            found.append(Entry(folder.name, folder, *fields))
        return found

    def check(self) -> list[str]:
        """One line for each thing that is wrong: damaged entries, and folders that killed processes left."""
        problems = []
        for folder in self._all_folders():
            try:
                _read_entry(folder, ())
                metadata = json.loads((folder / "metadata.json").read_bytes())
                if _hash_file(folder / metadata["source"]) != metadata["source_sha256"]:
                    problems.append(f"{folder}: the source's hash is not the one in metadata.json")
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{folder}: {type(error).__name__}: {error}")
        problems += [f"{folder}: left by a process that was killed" for folder in self._abandoned()]
        return problems

    def _abandoned(self) -> list[Path]:
        now = time.time()
        found = []
        for folder in self.root.glob(f"{BUILDING}*"):
            try:
                old = now - folder.stat().st_mtime > STALE_SECONDS
            except OSError:
                continue
            if old or not _alive(folder.name):
                found.append(folder)
        return found

    def prune(
        self, older_than_days: float | None = None, size_limit_bytes: int | None = None, everything: bool = False
    ) -> int:
        """Remove abandoned folders and kept failures, then entries: all, those too old, or the oldest beyond a size.

        Returns:
            How many finished entries were removed.
        """
        for folder in (*self._abandoned(), self.root / "failed"):
            shutil.rmtree(folder, ignore_errors=True)
        if everything:
            folders = list(self._all_folders())  # those without readable metadata too
        else:
            remaining = sorted(self.entries(), key=lambda entry: entry.created, reverse=True)
            doomed = []
            if older_than_days is not None:
                limit = time.time() - older_than_days * 86400
                doomed += [entry for entry in remaining if entry.created < limit]
                remaining = [entry for entry in remaining if entry.created >= limit]
            if size_limit_bytes is not None:
                total = 0
                for entry in remaining:
                    total += entry.bytes
                    if total > size_limit_bytes:
                        doomed.append(entry)
            folders = [entry.folder for entry in doomed]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return len(folders)


def _publish(folder: Path, destination: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
    """Give the finished folder its name in one step; where another process was first, its entry stays."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        try:
            rename(folder, destination)
            return
        except OSError:
            if not destination.exists():
                raise
        if _is_sound(destination):
            return
        # A damaged entry is moved aside (one step again), so that no process sees it half removed.
        aside = folder.parent / f"{folder.name}-damaged"
        try:
            rename(destination, aside)
        except FileNotFoundError:
            continue  # another process was faster
        shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{destination} cannot be replaced")


def _read_entry(folder: Path, entries: tuple[str, ...]) -> Binary:
    """The binary of a finished entry; OSError, ValueError, KeyError or TypeError where anything is wrong with it."""
    metadata = json.loads((folder / "metadata.json").read_bytes())
    path = folder / metadata["binary"]
    content = path.read_bytes()
    if metadata["schema"] != SCHEMA or hashlib.sha256(content).hexdigest() != metadata["binary_sha256"]:
        raise ValueError("the binary's hash is not the one in metadata.json")
    text = (folder / "log").read_text()
    resources = parse_resources(text) if metadata["kind"] == "cubin" else {}
    return Binary(path, metadata["kind"], entries, tuple(metadata["command"]), text, content, resources)


def _is_sound(folder: Path) -> bool:
    try:
        _read_entry(folder, ())
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True
