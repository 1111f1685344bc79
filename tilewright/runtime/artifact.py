"""Saved executables: a directory, or one zip file, of a manifest, weights, sources and binaries.

| file | holds |
|---|---|
| ``manifest.json`` | format version, machine, requirements, program, signature, and the SHA-256 of every other file |
| ``weights.safetensors`` | the graph's constants, and the module's buffers that calls change |
| ``sources/`` | the kernels' source text, for people |
| ``binaries/`` | shared objects or cubins |

Nothing in an artifact is executed but its kernels, and those only after every file's hash was found to be the
manifest's. The hashes find damage; they do not say who made the artifact: load only what you would also run. The
manifest has a hash of its own in ``manifest.sha256``. Everything is written under a temporary name and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tilewright.errors import InvalidArtifact, TargetNotPresent, TilewrightError
from tilewright.hardware import Machine, host_cpu, host_gpu, is_present
from tilewright.runtime.driver import system_driver
from tilewright.runtime.encoding import decode_machine, decode_program, encode_machine, encode_program
from tilewright.runtime.executable import Executable, Image
from tilewright.runtime.signature import decode_signature, encode_signature

FORMAT_VERSION = 2
"""Of what is written. Version 2: a constant may be mapped by a matrix before it is packed, which a reader of version 1 would pass over."""
OLDEST_VERSION = 1
"""Of what is read."""
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
WEIGHTS = "weights.safetensors"
SAFE_NAME = re.compile(r"(sources/|binaries/)?[A-Za-z0-9_][A-Za-z0-9_.+-]*")
STATE_PREFIX = "state:"
"""Before the names of states in the weights; graph constants have their own names."""


@dataclass(frozen=True)
class SavedBinary:
    """A binary of a loaded artifact; `path` is its place in it, for messages."""

    path: Path
    entries: tuple[str, ...]
    kind: str
    content: bytes = field(repr=False)


# Saving


def save(image: Image, path: str | Path) -> None:
    """Write an artifact; an existing one at the path is replaced. The machine need not be here.

    Raises:
        InvalidArtifact: where the model has inputs, outputs or attributes that JSON cannot hold, the path is something
        else's, or nothing can be written there.
    """
    target = Path(path)
    check_path(target)
    files = _files(image)
    try:
        _write(files, target)
    except OSError as error:
        raise InvalidArtifact(f"{target} cannot be written: {error.strerror or error}", "check the path and the free space") from error


def check_path(path: str | Path) -> None:
    """Raises InvalidArtifact where an artifact would replace something else."""
    target = Path(path)
    if target.suffix == ".zip":
        ours = not target.exists() or (target.is_file() and (not target.stat().st_size or _is_packed_artifact(target)))
    else:
        ours = not target.exists() or (target / MANIFEST).is_file()
    if not ours:
        raise InvalidArtifact(f"{target} exists and is no artifact", "choose another path")


def _is_packed_artifact(path: Path) -> bool:
    """Whether the file is a zip file with a manifest, or damaged beyond that."""
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
        "format": "tilewright executable",
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
    """A contiguous copy on the CPU that shares memory with nothing, as safetensors asks."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _driver_minimum(machine: Machine) -> str:
    """The CUDA release whose driver loads the cubins; empty for a CPU."""
    if not machine.is_gpu:
        return ""
    return "12.0" if machine.toolchain_extra == "cuda12" else "13.0"


# Loading


def load(path: str | Path) -> Executable:
    """The executable of an artifact, on the machine that it was compiled for.

    Raises:
        InvalidArtifact: for a file that is missing, damaged or changed (it is named), another format version, or a CPU
        of another
            architecture or without the instruction sets.
        TargetNotPresent: where it needs a GPU, or a newer driver, that is not here.
    """
    image, driver = _opened(path)
    check_target(image.machine, driver)
    return Executable(image)


def read(path: str | Path) -> Image:
    """Everything in an artifact, for any machine; nothing is run. Raises InvalidArtifact as `load` does."""
    return _opened(path)[0]


def _opened(path: str | Path) -> tuple[Image, str]:
    """An artifact's image and the CUDA release that its driver must be of at least (empty for a CPU)."""
    with _reader(Path(path)) as reader:
        manifest = _manifest(reader, path)
        hashes = manifest["files"]
        if not isinstance(hashes, dict) or WEIGHTS not in hashes:
            raise _broken(path, "its manifest lists no weights")
        for name in hashes:
            if not isinstance(name, str) or not SAFE_NAME.fullmatch(name):
                raise _broken(path, f"its manifest names the file {name!r}")
        surplus = sorted(set(reader) - set(hashes) - {MANIFEST, MANIFEST_HASH})
        if surplus:
            raise _broken(path, f"it holds {surplus[0]}, which its manifest does not list")
        contents = {name: _checked(reader, path, name, digest) for name, digest in hashes.items()}
    try:
        return _decode(path, manifest, contents), _release(manifest["requires"]["cuda_driver"])
    except TilewrightError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, safetensors.SafetensorError) as error:
        raise _broken(path, f"its manifest is inconsistent ({type(error).__name__}: {error})") from error


def _release(text: str) -> str:
    """A CUDA release such as "13.0", or nothing. Raises ValueError for anything else."""
    if text and not all(part.isdecimal() for part in text.split(".")):
        raise ValueError(f"CUDA release {text!r}")
    return text


def check_target(machine: Machine, driver: str = "") -> None:
    """Raises where code for the machine, that needs a driver of at least this CUDA release, cannot run here; see `load`."""
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
    host = host_cpu()
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


def _broken(path: str | Path, what: str) -> InvalidArtifact:
    return InvalidArtifact(f"{path} is no sound artifact: {what}", "save the executable again")


@contextmanager
def _reader(path: Path) -> Iterator[Mapping[str, Any]]:
    """Names of the files in an artifact, to functions that read them."""
    if path.is_dir():
        inside = path.resolve()
        found = {}
        for file in sorted(path.rglob("*")):
            if file.is_dir() and not file.is_symlink():
                continue
            name = file.relative_to(path).as_posix()
            if file.is_symlink() or not file.resolve().is_relative_to(inside):
                raise _broken(path, f"{name} is a link")
            found[name] = file.read_bytes
        yield found
        return
    if not path.is_file():
        raise InvalidArtifact(f"there is no artifact {path}", "check the path")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                if name not in (MANIFEST, MANIFEST_HASH) and not SAFE_NAME.fullmatch(name):
                    raise _broken(path, f"it holds a file named {name!r}")
            if len(set(names)) != len(names):
                raise _broken(path, "it holds two files of one name")
            yield {name: lambda name=name: archive.read(name) for name in names}
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise _broken(path, f"{error}") from error


def _read(reader: Mapping[str, Any], path: str | Path, name: str) -> bytes:
    if name not in reader:
        raise _broken(path, f"{name} is missing")
    try:
        return reader[name]()
    except (OSError, RuntimeError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise _broken(path, f"{name} cannot be read ({error})") from error


def _manifest(reader: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    text = _read(reader, path, MANIFEST)
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise _broken(path, f"{MANIFEST} is damaged ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "tilewright executable":
        raise _broken(path, f"{MANIFEST} is not one of an executable")
    version = manifest.get("version")
    if type(version) is not int or not OLDEST_VERSION <= version <= FORMAT_VERSION:
        newer = type(version) is int and version > FORMAT_VERSION
        raise InvalidArtifact(
            f"{path} has format version {version!r}, and this release reads the versions {OLDEST_VERSION} to {FORMAT_VERSION}",
            "install the newer release that saved it, or compile the model again" if newer else "compile the model again",
        )
    if _read(reader, path, MANIFEST_HASH).rstrip(b"\n") != hashlib.sha256(text).hexdigest().encode():
        raise _broken(path, f"{MANIFEST} was changed after it was written")
    missing = {"machine", "machine_digest", "program", "signature", "states", "binaries", "files"} - set(manifest)
    if missing:
        raise _broken(path, f"{MANIFEST} lacks {', '.join(sorted(missing))}")
    return manifest


def _checked(reader: Mapping[str, Any], path: str | Path, name: str, digest: Any) -> bytes:
    data = _read(reader, path, name)
    if hashlib.sha256(data).hexdigest() != digest:
        raise _broken(path, f"{name} is damaged or was changed: its hash is not the manifest's")
    return data


def _decode(path: str | Path, manifest: Mapping[str, Any], contents: Mapping[str, bytes]) -> Image:
    machine = decode_machine(manifest["machine"])
    if machine.digest != manifest["machine_digest"]:
        raise ValueError("the machine's facts do not have the machine's digest")
    weights = safetensors.torch.load(contents[WEIGHTS])
    program = decode_program(manifest["program"], weights)
    states = {str(name): weights[STATE_PREFIX + name] for name in manifest["states"]}
    sources = {name.removeprefix("sources/"): data.decode() for name, data in contents.items() if name.startswith("sources/")}
    binaries = []
    for entry in manifest["binaries"]:
        name = entry["file"]
        if not name.startswith("binaries/"):
            raise ValueError(f"the binary {name}")
        binaries.append(SavedBinary(Path(path) / name, tuple(map(str, entry["entries"])), "cubin" if machine.is_gpu else "so", contents[name]))
    return Image(program, decode_signature(manifest["signature"]), machine, tuple(binaries), sources, states)
