"""The kernel cache: one folder per kernel with source, command, log, metadata and binary, safe for concurrent processes.

    root/ab/ab12...           a finished entry, named by its key; it appears by one atomic rename and is not changed
    root/building-HOST-PID-*  an entry being built; if its process is killed it remains until it is pruned

An entry whose hashes do not match is built again. If the cache cannot be written (full disk, read-only) or another user may have written it, a
warning is logged and the kernel is built in a private temporary folder that lives as long as the process. Folders and files are created for this user
only, and no others are read (`system/private_files.py`).
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tilewright.errors import CacheError, KernelFailed
from tilewright.hardware import Machine
from tilewright.system.private_files import NotPrivate, make_folder, read_private, require_private
from tilewright.system.scratch import Scratch
from tilewright.toolchain.binary import Binary, SourceFile, parse_resources
from tilewright.toolchain.compilers import Compiler, Outcome

SCHEMA = 1
"""Version of the entries' format; part of every key."""
_COMMENTS = re.compile(r"^//.*\n", re.MULTILINE)
BUILDING = "building-"
STALE_SECONDS = 3600.0
"""A folder being built counts as abandoned after this time, even if a process with its number exists."""

DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""Exceptions that reading a damaged entry may raise."""
DISK_WORDS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG))
"""Compiler messages that indicate a fault of the disk, not of the kernel."""

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
    """Hash of everything that determines the binary: text, command, compiler identity, format version. Lines that are comments do not: kernels for
    several sizes differ in their headers only."""
    parts = [SCHEMA, source.language, _COMMENTS.sub("", source.text), compiler.command(source), compiler.identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def _hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    """A temporary folder of this process, removed when the process ends."""
    scratch, owner = Scratch(), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child inherits this registration, but does not own the folder
            scratch.close()

    atexit.register(remove)
    return scratch.path


def _warn_once(place: Path, words: str) -> None:
    """Logs a warning about a place, once per process."""
    if place not in _warned():
        _warned().add(place)
        log.warning(words)


@lru_cache(maxsize=1)
def _warned() -> set[Path]:
    """The places about which this process has warned."""
    return set()


def _warn_foreign(error: NotPrivate) -> None:
    _warn_once(
        error.place,
        f"kernel cache: {error}, so that nothing in it is loaded; make it yours alone (chown, chmod go-w), remove it, "
        "or set TILEWRIGHT_CACHE to a folder of your own",
    )


def _alive(name: str) -> bool:
    """Whether the process that builds the folder ``building-HOST-PID-RANDOM`` still runs, as far as can be determined."""
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
    """Tag of this host, and of a container with its own process numbers, for the names of folders being built."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{os.uname().nodename}{namespace}".encode()).hexdigest()[:8]


class KernelCache:
    """Compiled kernels under one root folder. All state is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def folder(self, key: str) -> Path:
        """The folder of the entry with that key, which need not exist."""
        return self.root / key[:2] / key

    def load(self, key: str, source: SourceFile, compiler: Compiler) -> Binary | None:
        """The finished binary of that key, or None if there is none, it is damaged, or another user may have written it."""
        folder = self.folder(key)
        try:
            binary = _read_entry(folder, source.entries)
            compiler.check(binary.content, source.entries)
            return binary
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if os.path.lexists(folder):
                _warn_once(folder, f"kernel cache entry {folder} is incomplete; building it again")
        except NotPrivate as error:
            _warn_foreign(error)
        except DAMAGE as error:
            _warn_once(folder, f"kernel cache entry {folder} is damaged ({error!r}); building it again")
        return None

    def get_or_build(self, source: SourceFile, compiler: Compiler, machine: Machine) -> Binary | KernelFailed:
        """The binary from the cache, or else compiled and stored; a kernel that does not compile is returned as a value.

        Raises:
            CompilerMissing: if the compiler is needed and missing.
            CacheError: if neither the cache nor the temporary folder can be written.
        """
        key = kernel_key(source, compiler)
        found = self.load(key, source, compiler)
        if found is not None:
            return found
        try:
            return self._build(self.root, key, source, compiler, machine)
        except NotPrivate as error:
            _warn_foreign(error)
        except OSError as error:
            why = " ".join(str(error).split())
            _warn_once(self.root, f"kernel cache {self.root} cannot be written ({why}); kernels are kept for this process only")
        try:
            private = KernelCache(_private_folder())
            return private.load(key, source, compiler) or self._build(private.root, key, source, compiler, machine)
        except OSError as error:
            raise CacheError(
                f"neither {self.root} nor the temporary folder can be written: {error}",
                "free some space, or set TILEWRIGHT_CACHE or TMPDIR to a folder that can be written",
            ) from error

    def _build(self, root: Path, key: str, source: SourceFile, compiler: Compiler, machine: Machine) -> Binary | KernelFailed:
        make_folder(root)
        require_private(root, root)
        folder = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{_host_tag()}-{os.getpid()}-", dir=root))
        try:
            (folder / compiler.source_name).write_text(source.text)
            (folder / "command").write_text(" ".join(compiler.command(source)) + "\n")
            outcome = compiler.compile(source, folder)
            (folder / "log").write_text(outcome.log)
            if not outcome.succeeded and any(words in outcome.log for words in DISK_WORDS):
                raise OSError(f"the compiler could not write: {' '.join(outcome.log.split())[-200:]}")
            if not outcome.succeeded:
                return self._keep_failure(root, folder, key, source, machine, outcome)
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
                "source_sha256": _hash_of((folder / compiler.source_name).read_bytes()),
                "binary_sha256": _hash_of((folder / compiler.binary_name).read_bytes()),
                "created": time.time(),
            }
            (folder / "metadata.json").write_text(json.dumps(metadata, indent=1))
            _close_to_others(folder)
            _publish(folder, root / key[:2] / key, lambda found: _is_sound(found, compiler, source.entries))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        stored = KernelCache(root).load(key, source, compiler)
        if stored is None:
            raise OSError(f"entry {key} cannot be read back")
        return stored

    @staticmethod
    def _keep_failure(root: Path, folder: Path, key: str, source: SourceFile, machine: Machine, outcome: Outcome) -> KernelFailed:
        """Keeps the source, command and log of a failed build in a place that the message can name."""
        kept = root / "failed" / key
        shutil.rmtree(kept, ignore_errors=True)
        make_folder(kept.parent)
        _close_to_others(folder)
        try:
            os.rename(folder, kept)
        except OSError:  # another process is storing the same failure
            if not (kept / "log").exists():
                raise
        words = outcome.log
        errors = [line for line in words.splitlines() if "error" in line.lower()]
        first = errors[0] if errors else words.strip().partition("\n")[0] or "the compiler failed without a word"
        return KernelFailed(
            f"kernel {source.name!r} does not compile for {machine.name}: {first}",
            f"the source and the compiler's log are in {kept}",
            kept / "log",
            outcome.hung,
        )

    def _all_folders(self) -> Iterator[Path]:
        for shelf in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            if not shelf.is_symlink():
                yield from sorted(path for path in shelf.iterdir() if path.is_dir() and not path.is_symlink())

    def entries(self) -> list[Entry]:
        """Every finished entry with readable metadata."""
        found = []
        for folder in self._all_folders():
            try:
                metadata = json.loads(read_private(folder / "metadata.json", self.root))
                size = sum(path.lstat().st_size for path in folder.iterdir())
                fields = (metadata["name"], metadata["kind"], metadata["target"], size, metadata["created"])
            except DAMAGE:
                continue
            found.append(Entry(folder.name, folder, *fields))
        return found

    def check(self) -> list[str]:
        """One line per problem: damaged entries, and folders that killed processes left."""
        problems = []
        for folder in self._all_folders():
            try:
                _read_entry(folder, ())
                metadata = json.loads(read_private(folder / "metadata.json", self.root))
                if _hash_of(read_private(_inside(folder, metadata["source"]), self.root)) != metadata["source_sha256"]:
                    problems.append(f"{folder}: the source's hash is not the one in metadata.json")
            except DAMAGE as error:
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

    def prune(self, older_than_days: float | None = None, size_limit_bytes: int | None = None, everything: bool = False) -> int:
        """Removes abandoned folders and kept failures, then entries: all, those that are too old, or the oldest beyond a total size.

        Returns:
            Number of finished entries removed.
        """
        for folder in (*self._abandoned(), self.root / "failed"):
            shutil.rmtree(folder, ignore_errors=True)
        if everything:
            folders = list(self._all_folders())  # including those without readable metadata
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


def _publish(folder: Path, destination: Path, is_sound: Callable[[Path], bool]) -> None:
    """Renames the finished folder to its final name in one step; if another process was first, its entry stays if it is intact."""
    make_folder(destination.parent)
    require_private(destination.parent, destination.parent.parent)
    for _ in range(3):
        try:
            os.rename(folder, destination)
            return
        except OSError:
            if not os.path.lexists(destination):
                raise
        if is_sound(destination):
            return
        # A damaged entry is moved aside, again in one step, so that no process sees it half removed.
        aside = folder.parent / f"{folder.name}-damaged"
        try:
            os.rename(destination, aside)
        except FileNotFoundError:
            continue  # another process was faster
        aside.unlink() if aside.is_symlink() else shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{destination} cannot be replaced")


def _read_entry(folder: Path, entries: tuple[str, ...]) -> Binary:
    """The binary of a finished entry; raises OSError, ValueError, KeyError or TypeError if the entry is damaged."""
    root = folder.parent.parent
    metadata = json.loads(read_private(folder / "metadata.json", root))
    path = _inside(folder, metadata["binary"])
    content = read_private(path, root)
    if metadata["schema"] != SCHEMA or _hash_of(content) != metadata["binary_sha256"]:
        raise ValueError("the binary's hash is not the one in metadata.json")
    text = read_private(folder / "log", root).decode(errors="replace")
    resources = parse_resources(text) if metadata["kind"] == "cubin" else {}
    return Binary(path, metadata["kind"], entries, tuple(metadata["command"]), text, content, resources)


def _close_to_others(folder: Path) -> None:
    """Removes other users' permissions: files are made with the umask, which may let a group write them."""
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(0o600)


def _inside(folder: Path, name: str) -> Path:
    """The path of an entry's file. Raises ValueError for a name that leads elsewhere."""
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return folder / name


def _is_sound(folder: Path, compiler: Compiler, entries: tuple[str, ...]) -> bool:
    try:
        compiler.check(_read_entry(folder, entries).content, entries)
    except DAMAGE:
        return False
    return True
