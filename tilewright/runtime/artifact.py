"""Saved executables: a directory, or one zip file, with a manifest, weights, sources and binaries.

| file | holds |
|---|---|
| ``manifest.json`` | format version, machine, requirements, program, signature, and the SHA-256 of every other file |
| ``weights.safetensors`` | the graph's constants, and the buffers of the module that calls change |
| ``sources/`` | the kernels' source text, to be read |
| ``binaries/`` | shared objects or cubins |

`load` maps nothing into memory until everything is checked: hashes; that an encoder could have written every field (`fields`); that a compilation
could have produced their contents (`soundness`); that binaries are complete, run no code while they are mapped, and carry the facts of their kernels
(`toolchain.elf`). Hashes detect damage, and the checks detect false statements about honest kernels. Neither says who made the artifact, and its
kernels may do anything when they are called: load only what you would also run, or what has the digest that you expect. The digest is the SHA-256 of
the manifest and is also stored in ``manifest.sha256``. Everything is written under a temporary name and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from tilewright.errors import InvalidArtifact, TargetNotPresent, TilewrightError
from tilewright.hardware import Machine, host_gpu, identified_cpu, is_present
from tilewright.runtime.driver import system_driver
from tilewright.runtime.encoding import decode_machine, decode_program, encode_machine, encode_program
from tilewright.runtime.executable import Executable, Image
from tilewright.runtime.fields import Field, parsed
from tilewright.runtime.loadable import LoadableProgram, facts_symbol
from tilewright.runtime.members import MOST_BYTES, MOST_MEMBERS, SAFE_NAME, Members, members
from tilewright.runtime.memory_plan import assign_places, plan_memory
from tilewright.runtime.signature import decode_signature, encode_signature
from tilewright.runtime.soundness import check
from tilewright.toolchain.elf import check_cubin, check_shared_object

FORMAT = "tilewright executable"
FORMAT_VERSION = 30
"""The only version that can be read. Versions 1 and 2 do not say what memory kernels access, so nothing in them can be checked; version 3 has other
names for kinds of regions; version 4 does not say which machine features a kernel requires, so that permission for them could not be requested;
version 6 has no bounds, version 7 no calls of libraries, version 9 not what a choice was made from, version 19 not which partitions were compared,
version 21 not which kernels round to TF32, version 22 not which sequences of a loop run backwards, version 24 not for which image a kernel is
called, and version 26 has one result of a library's operator."""
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
WEIGHTS = "weights.safetensors"
MOST_MANIFEST = 1 << 28
"""Maximum size of a manifest in bytes."""
RELEASE = re.compile(r"(\d{1,3}\.\d{1,3})?")
"""A CUDA release, or the empty string."""
STATE_PREFIX = "state:"
"""Prefix of the names of states in the weights; graph constants have names without it."""


@dataclass(frozen=True)
class SavedBinary:
    """A binary of a loaded artifact; `path` is its path inside the artifact, for messages."""

    path: Path
    entries: tuple[str, ...]
    kind: str
    content: bytes = field(repr=False)


# Saving


def save(image: Image, path: str | Path) -> str:
    """Writes an artifact, replacing an existing one at the path. The target machine need not be present. Returns its `digest`.

    Raises:
        InvalidArtifact: if the model has inputs, outputs or attributes that JSON cannot represent or that `load` would reject, if something other
        than an artifact is at the path, or if nothing can be written there.
    """
    target = Path(path)
    check_path(target)
    files = _files(image)
    with _boundary(target, "report this model"):  # never write what could not be read again
        manifest = _manifest(target, files[MANIFEST])
        _decode(target, manifest, files)
    try:
        _write(files, target)
    except OSError as error:
        raise InvalidArtifact(f"{target} cannot be written: {error.strerror or error}", "check the path and the free space") from error
    return hashlib.sha256(files[MANIFEST]).hexdigest()


def check_path(path: str | Path) -> None:
    """Raises InvalidArtifact if an artifact would replace something else."""
    target = Path(path)
    if target.suffix == ".zip":
        ours = not target.exists() or (target.is_file() and (not target.stat().st_size or _is_packed_artifact(target)))
    else:
        ours = not target.exists() or (target / MANIFEST).is_file()
    if not ours:
        raise InvalidArtifact(f"{target} exists and is no artifact", "choose another path")


def _is_packed_artifact(path: Path) -> bool:
    """Whether the file is a zip file with a manifest, or one too damaged to tell."""
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError):
        return True


def _write(files: Mapping[str, bytes], target: Path) -> None:
    packed = target.suffix == ".zip"
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        if packed:
            with zipfile.ZipFile(work / "artifact.zip", "w", zipfile.ZIP_STORED) as archive:
                for name, data in files.items():
                    archive.writestr(zipfile.ZipInfo(name), data)
            os.replace(work / "artifact.zip", target)
        else:
            for name, data in files.items():
                destination = work / "artifact" / name
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(data)
            if target.exists():
                os.rename(target, work / "before")
            os.rename(work / "artifact", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _files(image: Image) -> dict[str, bytes]:
    weights: dict[str, torch.Tensor] = {}
    program = encode_program(image.program, weights)
    for name, tensor in image.states.items():
        weights[STATE_PREFIX + name] = tensor
    files = {WEIGHTS: safetensors.torch.save({name: _own(tensor) for name, tensor in weights.items()})}
    binaries = []
    for index, binary in enumerate(image.binaries):
        name = f"binaries/{index:04}{'.cubin' if image.machine.is_gpu else '.so'}"
        files[name] = binary.content
        binaries.append({"file": name, "entries": list(binary.entries)})
    for index, (name, text) in enumerate(image.sources.items()):
        files[f"sources/{index:04}_{re.sub('[^A-Za-z0-9_.-]', '_', Path(name).name)[-80:]}"] = text.encode()
    machine = image.machine
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "machine": encode_machine(machine),
        "machine_digest": machine.digest,
        "requires": {
            "kind": machine.kind,
            "architecture": machine.architecture,
            "isa": list(machine.isa),
            "cuda_driver": _driver_minimum(machine),
        },
        "program": program,
        "signature": encode_signature(image.signature),
        "states": list(image.states),
        "binaries": binaries,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    encoded = json.dumps(manifest, indent=1, allow_nan=False).encode()
    return {MANIFEST: encoded, MANIFEST_HASH: hashlib.sha256(encoded).hexdigest().encode() + b"\n", **files}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU that shares no memory, as safetensors requires."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _driver_minimum(machine: Machine) -> str:
    """The CUDA release of the oldest driver that loads the cubins; empty for a CPU."""
    if not machine.is_gpu:
        return ""
    return "12.0" if machine.toolchain_extra == "cuda12" else "13.0"


# Loading


@dataclass(frozen=True)
class Opened:
    """A checked artifact. `driver` is the CUDA release that the driver must at least support (empty for a CPU)."""

    image: Image
    driver: str
    digest: str


def load(path: str | Path, expect_digest: str | None = None) -> Executable:
    """Loads the executable of an artifact on the machine that it was compiled for.

    Args:
        expect_digest: the digest that `Executable.save` returned, or `tilewright digest` printed, when the artifact was made; an artifact with
        another digest is rejected.

    Raises:
        InvalidArtifact: for a missing, damaged or changed file (the message names it), contents that no compilation produces, another format version,
        more memory than the machine has, or a CPU of another architecture or without the instruction sets.
        TargetNotPresent: if it needs a GPU or a newer driver that this machine lacks.
    """
    opened = open_artifact(path, expect_digest)
    check_target(opened.image.machine, opened.driver)
    _check_memory(path, opened.image)
    return Executable(opened.image)


def read(path: str | Path, expect_digest: str | None = None) -> Image:
    """Reads everything in an artifact, for any machine; maps and runs nothing. Raises InvalidArtifact as `load` does."""
    return open_artifact(path, expect_digest).image


def digest(path: str | Path) -> str:
    """The SHA-256 of an artifact's manifest, which contains the hash of every other file. It identifies the whole content, and is the same for a
    directory and a zip file. Raises InvalidArtifact if there is none."""
    with _boundary(path), _opened(path) as reader:
        return hashlib.sha256(_member(reader, MANIFEST, MOST_MANIFEST)).hexdigest()


def open_artifact(path: str | Path, expect_digest: str | None = None) -> Opened:
    """Reads and checks everything, and runs nothing. Raises InvalidArtifact as `load` does."""
    with _boundary(path):
        with _opened(path) as reader:
            text = _member(reader, MANIFEST, MOST_MANIFEST)
            found = hashlib.sha256(text).hexdigest()
            if expect_digest is not None and expect_digest.strip().lower() != found:
                raise InvalidArtifact(f"{path} has the digest {found}, not {expect_digest.strip()}", "load the artifact that you mean")
            manifest = _manifest(path, text)
            if _member(reader, MANIFEST_HASH, 1 << 10).rstrip(b"\n") != found.encode():
                raise ValueError(f"{MANIFEST} was changed after it was written")
            contents = _contents(reader, manifest["files"])
        image, driver = _decode(Path(path), manifest, contents)
        return Opened(image, driver, found)


def _opened(path: str | Path) -> AbstractContextManager[Members]:
    """The members of an artifact. Raises InvalidArtifact for a folder that is none."""
    if Path(path).is_dir() and not (Path(path) / MANIFEST).exists():
        raise InvalidArtifact(f"{path} is a folder without {MANIFEST}, and so no artifact", "give the file or folder that save() wrote, or a model")
    return members(Path(path))


@contextmanager
def _boundary(path: str | Path, remedy: str = "save the executable again") -> Iterator[None]:
    """Context in which an artifact's bytes are decoded: whatever is wrong with them becomes an InvalidArtifact, whose one line names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise InvalidArtifact(f"there is no artifact {path}", "check the path") from error
    except TilewrightError:
        raise
    except OSError as error:
        raise InvalidArtifact(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    except MemoryError as error:
        raise InvalidArtifact(f"{path} needs more memory than there is", "load it on a larger machine") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArtifact(f"{path} is no sound artifact: {' '.join(str(error).split())}", remedy) from error


def _member(reader: Members, name: str, most: int) -> bytes:
    if name not in reader:
        raise ValueError(f"{name} is missing")
    try:
        return reader[name](most)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error


def _manifest(path: str | Path, text: bytes) -> Field:
    manifest = parsed(text, MANIFEST)
    if not isinstance(manifest.value, dict) or manifest.value.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not one of an executable")
    version = manifest["version"].value
    if type(version) is not int or version != FORMAT_VERSION:
        newer = type(version) is int and version > FORMAT_VERSION
        raise InvalidArtifact(
            f"{path} has format version {version!a:.20}, and this release reads version {FORMAT_VERSION}",
            "install the newer release that saved it, or compile the model again" if newer else "compile the model again",
        )
    return manifest.only("format", "version", "machine", "machine_digest", "requires", "program", "signature", "states", "binaries", "files")


def _contents(reader: Members, files: Field) -> dict[str, bytes]:
    """Every file of an artifact except its manifest, with the hash checked against the manifest."""
    hashes = {name: entry.text() for name, entry in files.entries(MOST_MEMBERS)}
    for name in (*hashes, *reader):
        if not SAFE_NAME.fullmatch(name):
            raise ValueError(f"its manifest names the file {name!a:.200}")
    surplus = sorted(set(reader) - set(hashes) - {MANIFEST, MANIFEST_HASH})
    if surplus or WEIGHTS not in hashes:
        raise ValueError(f"it holds {surplus[0]}, which its manifest does not list" if surplus else "its manifest lists no weights")
    contents = {}
    for name, expected in hashes.items():
        contents[name] = _member(reader, name, MOST_BYTES)
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise ValueError(f"{name} is damaged or was changed: its hash is not the manifest's")
    return contents


def _decode(path: Path, manifest: Field, contents: Mapping[str, bytes]) -> tuple[Image, str]:
    """The checked image, and the driver that it needs."""
    machine = decode_machine(manifest["machine"])
    if machine.digest != manifest["machine_digest"].text():
        raise ValueError("the machine's facts do not have the machine's digest")
    requires = manifest["requires"].only("kind", "architecture", "isa", "cuda_driver")
    if (requires["kind"].value, requires["architecture"].value, requires["isa"].names()) != (machine.kind, machine.architecture, machine.isa):
        raise ValueError("what it requires is not the machine that it is for")
    driver = requires["cuda_driver"].text()
    if not RELEASE.fullmatch(driver):
        raise ValueError(f"it needs a driver of CUDA {driver!a:.40}")
    weights = _weights(contents[WEIGHTS])
    program = decode_program(manifest["program"], weights)
    signature = decode_signature(manifest["signature"])
    states = {}
    for name in manifest["states"].names():
        if STATE_PREFIX + name not in weights:
            raise ValueError(f"there is no weight of the state {name}")
        states[name] = weights[STATE_PREFIX + name]
    check(program, signature, machine, states)
    sources = {name.removeprefix("sources/"): data.decode() for name, data in contents.items() if name.startswith("sources/")}
    return Image(program, signature, machine, _binaries(path, manifest["binaries"], program, machine, contents), sources, states), driver


def _weights(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises ValueError for any other content, and for types that PyTorch lacks."""
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{WEIGHTS} is damaged: {error}") from error


def _binaries(path: Path, entries: Field, program: LoadableProgram, machine: Machine, contents: Mapping[str, bytes]) -> tuple[SavedBinary, ...]:
    """The binaries, after checks that each can be loaded and carries the facts of its kernels, and that every kernel is in one of them."""
    kind, examine = ("cubin", check_cubin) if machine.is_gpu else ("so", check_shared_object)
    result, found = [], set[str]()
    for entry in entries.items():
        name, functions = entry.only("file", "entries")["file"].text(), entry["entries"].names()
        if name not in contents or not name.startswith("binaries/"):
            raise entry.wrong("a binary of the artifact")
        facts = [facts_symbol(program.kernels[function], machine) for function in functions if function in program.kernels]
        try:
            examine(contents[name], machine.architecture, functions, facts)
        except ValueError as error:
            raise ValueError(f"{name} is damaged or not what the manifest says: {error}") from error
        found.update(functions)
        result.append(SavedBinary(path / name, functions, kind, contents[name]))
    missing = sorted(program.kernels.keys() - found)
    if missing:
        raise ValueError(f"no binary holds the kernel {missing[0]}")
    return tuple(result)


def _check_memory(path: str | Path, image: Image) -> None:
    """Raises InvalidArtifact if the buffers of a CPU program exceed this machine's memory; otherwise that would show only as pages are touched."""
    if image.machine.is_gpu:
        return
    program, available = image.program, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    places = assign_places(program)
    external = sum(program.graph.values[name].bytes for name in places.inputs) + sum(map(program.bytes_of, places.outputs))
    needed = plan_memory(program).bytes + external + sum(map(program.bytes_of, places.constants))
    if needed > available:
        raise InvalidArtifact(f"{path} needs {needed:,} B of memory, and this machine has {available:,} B", "load it on a larger machine")


def check_target(machine: Machine, driver: str = "") -> None:
    """Raises if code for the machine, with a driver of at least this CUDA release, cannot run here; see `load`."""
    if is_present(machine):
        if driver:
            _check_driver(driver)
        return
    if machine.is_gpu:
        found = host_gpu()
        if found is None:
            raise TargetNotPresent(f"this artifact is for {machine.name}, a GPU, and there is none here", "load it on such a machine")
        raise InvalidArtifact(
            f"this artifact is for {machine.name} ({machine.architecture}), and this machine has {found.name} ({found.architecture})",
            "compile the model for this GPU",
        )
    host = identified_cpu()
    if host.architecture != machine.architecture:
        raise InvalidArtifact(
            f"this artifact is for {machine.architecture} ({machine.name}), and this machine is {host.architecture}",
            "compile the model for this machine",
        )
    missing = sorted(set(machine.isa) - set(host.isa))
    raise InvalidArtifact(
        f"this artifact needs the instruction sets {', '.join(missing)}, which this CPU does not have",
        "compile the model for this machine",
    )


def _check_driver(needed: str) -> None:
    version = system_driver().version
    if version < tuple(int(part) for part in needed.split(".")):
        raise TargetNotPresent(
            f"this artifact needs a driver of CUDA {needed}, and this one is of {version[0]}.{version[1]}",
            "install a newer driver, or compile the model here",
        )
