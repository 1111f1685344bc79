"""Artifacts: real ones of small models, with fields, weights, binaries and zip files changed, and all hashes computed again.

Accepted artifacts are called on inputs that match their signatures; if a change keeps the meaning, results must be those of the graph. The caller's
tensors end where memory ends, so that reading or writing beyond them is a crash; inputs that must not be changed and constants must be the same
afterwards, and so must the bytes after the arena. An artifact with a changed binary is only loaded: its machine code is not defended against.
"""

from __future__ import annotations

import copy
import ctypes
import io
import json
import mmap
import zipfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch

from tests.fuzz.artifact_changes import MEANT, exchanges, rewordings
from tests.fuzz.harness import Broken, Case
from tests.fuzz.planning import results_are_right
from tests.sample_artifacts import MANIFEST, WEIGHTS, files, manifest_of, signed
from tilewright.errors import TilewrightError
from tilewright.runtime import artifact
from tilewright.runtime.executable import Executable
from tilewright.runtime.packing import torch_dtype

NAMES = ("convolutions", "recurrent", "embedded", "stateful", "joined", "returned")
LOAD_ONLY = "load-only"
"""A file in a case that marks it: the artifact is not to be called."""
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 255, 65536, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 62, 1 << 63, -(1 << 63), 1 << 64, 10**30,
    0.5, -1.0, 1e300, 1e-300, "", "x", "\x00", "a\nb", "\x1b[2J", "../../etc/passwd", "é", "n" * 5000, "f32", "bool", "i64", "leaf",
    [], [[]], [0], [1, 1], [0, 0], [1 << 40] * 3, {}, {"float": "nan"}, {"float": "1e999"}, {"graph": {}}, {"torch": "float32"}, {"torch": "load"}, "aten.save.default",
)  # fmt: skip


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a JSON value."""
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*place, key))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def interesting(manifest: Any) -> list[tuple[Any, ...]]:
    """Paths that describe the program, and only a few of those of machine facts and hashes."""
    found = [place for place in places(manifest) if place[0] in ("program", "signature", "states", "binaries")]
    rest = [place for place in places(manifest) if place[0] not in ("program", "signature")]
    return [*found, *rest[:: max(1, len(rest) // 40)]]


@st.composite
def manifests(draw: st.DrawFn, held: Case) -> Case:
    """One to three changes of fields."""
    manifest = manifest_of(held)
    for _ in range(draw(st.integers(1, 3))):
        known = interesting(manifest)
        place = known[draw(st.integers(0, len(known) - 1))]
        parent, key = at(manifest, place[:-1]), place[-1]
        action = draw(st.sampled_from(("replace", "nudge", "nudge", "other", "other", "delete", "duplicate", "swap", "grow")))
        value = parent[key]
        if action == "delete":
            del parent[key]
        elif action == "nudge" and isinstance(value, (int, float)) and not isinstance(value, bool):
            parent[key] = draw(st.sampled_from((value + 1, value - 1, value * 2, value // 2, -value, 0)))
        elif action == "other":  # a value of the same kind from elsewhere
            same = [
                other for other in known if other != place and type(at(manifest, other)) is type(value) and (other[-1] == key) == isinstance(key, str)
            ]
            parent[key] = copy.deepcopy(at(manifest, same[draw(st.integers(0, len(same) - 1))])) if same else None
        elif action == "duplicate" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(value))
        elif action == "swap" and isinstance(parent, list):
            other = draw(st.integers(0, len(parent) - 1))
            parent[key], parent[other] = parent[other], value
        elif action == "grow" and isinstance(value, list) and value:
            value.extend(copy.deepcopy(value) * draw(st.integers(1, 3)))
        else:
            parent[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
    return signed(held, manifest)


@st.composite
def lies(draw: st.DrawFn, held: Case) -> Case:
    """A consistent change in several places: shapes, types, aliases, arguments, steps, extents."""
    manifest = manifest_of(held)
    program = manifest["program"]
    stored = sorted(program["storage"])
    for _ in range(draw(st.integers(1, 2))):
        name, other = draw(st.sampled_from(stored)), draw(st.sampled_from(stored))
        kind = draw(st.sampled_from(("shape", "shape", "layout", "alias", "argument", "repeat", "extents", "source", "output", "regions")))
        region = draw(st.sampled_from(program["regions"])) if program["regions"] else None
        if kind == "shape":
            shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 8, 1 << 20)), max_size=4))
            dtype = draw(st.sampled_from(("f32", "f32", "f64", "i64", "bool", "bf16")))
            program["storage"][name].update(
                value=[name, shape, dtype], shape=shape, order=[[i, 0] for i in range(len(shape))], halo=[[0, 0] for _ in shape]
            )
            for value in program["graph"]["values"]:
                if value[0] == name:
                    value[1:] = [shape, dtype]
            for leaf in manifest["signature"]["inputs"]:
                if leaf["name"] == name:
                    leaf.update(shape=shape, dtype=dtype)
        elif kind == "layout":
            program["storage"][name].update(
                {key: copy.deepcopy(program["storage"][other][key]) for key in draw(st.sets(st.sampled_from(("shape", "order", "halo", "around"))))}
            )
        elif kind == "alias":
            program["aliases"][name] = other
        elif kind == "source":
            program["storage"][name].update({key: program["storage"][other][key] for key in ("source", "view", "matrix")})
        elif kind == "output":
            program["graph"]["outputs"] = [name if draw(st.booleans()) else output for output in program["graph"]["outputs"]]
        elif kind == "extents":
            for kernel in program["kernels"]:
                kernel["extents"] = [draw(st.sampled_from((0, 1, 4, extent))) for extent in kernel["extents"]]
        elif kind == "regions":
            program["regions"].reverse() if draw(st.booleans()) else program["regions"].remove(region)
        elif kind == "repeat" and region is not None:
            region["repeat"] = draw(st.sampled_from((0, 2, 5, 6, 1000, 1 << 20, 10**9)))
            for kernel in program["kernels"] if draw(st.booleans()) else ():
                kernel["steps"] = region["repeat"]
        elif region is not None and region["calls"]:
            arguments = draw(st.sampled_from(region["calls"]))[1]
            arguments[draw(st.integers(0, len(arguments) - 1))] = name
        if not program["regions"]:
            break
    return signed(held, manifest)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with a few of them changed, cut off, or repeated."""
    if not data:
        return data
    for _ in range(draw(st.integers(1, 4))):
        position = min(draw(st.integers(0, len(data) - 1)), draw(st.integers(0, len(data) - 1)))  # headers come first
        kind = draw(st.sampled_from(("bit", "byte", "word", "cut", "insert")))
        if kind == "bit":
            data = data[:position] + bytes([data[position] ^ 1 << draw(st.integers(0, 7))]) + data[position + 1 :]
        elif kind == "byte":
            data = data[:position] + bytes([draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))]) + data[position + 1 :]
        elif kind == "word":
            data = data[:position] + draw(st.sampled_from((0, 1, 1 << 31, (1 << 32) - 1))).to_bytes(4, "little") + data[position + 4 :]
        elif kind == "cut":
            data = data[:position] or data[:1]
        else:
            data = data[:position] + data[position : position + draw(st.integers(1, 64))] + data[position:]
    return data


@st.composite
def members(draw: st.DrawFn, held: Case) -> Case:
    """A damaged member with a matching hash: weights, a binary, a source, or the manifest's text itself."""
    name = draw(st.sampled_from((WEIGHTS, WEIGHTS, MANIFEST, *sorted(n for n in held if n.startswith("binaries/")))))
    if name == MANIFEST:
        compact = json.dumps(manifest_of(held)).encode()
        return signed(held, draw(damaged(compact)))
    result = signed({**held, name: draw(damaged(held[name]))})
    return {**result, LOAD_ONLY: b""} if name.startswith("binaries/") else result


@st.composite
def archives(draw: st.DrawFn, held: Case) -> Case:
    """A damaged zip file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    data = buffer.getvalue()
    directory = data.index(b"PK\x01\x02")
    where = draw(st.sampled_from(("anywhere", "directory", "directory")))
    return {"artifact.zip": draw(damaged(data)) if where == "anywhere" else data[:directory] + draw(damaged(data[directory:]))}


def cases() -> st.SearchStrategy[Case]:
    """Three quarters are changes that pass the first checks, the rest is arbitrary: fields, consistent lies in several places, members, zip files."""

    def of(name: str) -> st.SearchStrategy[Case]:
        held = files(name)
        near = st.one_of(rewordings(held), exchanges(held))
        wild = st.one_of(manifests(held), lies(held), members(held))
        return st.one_of(near.map(placed), near.map(placed), near.map(placed), st.one_of(wild.map(placed), wild.map(placed), archives(held)))

    return st.sampled_from(NAMES).flatmap(of)


def placed(held: Case) -> Case:
    return {name if name in (LOAD_ONLY, MEANT) else f"artifact/{name}": data for name, data in held.items()}


# In the child


def prepare() -> None:
    """Compiles what loading needs."""
    from tilewright.runtime.cpu import _load_runner

    _load_runner()


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor after whose last byte there is no memory."""
    size, page = prod(shape) * dtype.itemsize, mmap.PAGESIZE
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + whole), ctypes.c_size_t(page), 0):
        raise OSError("mprotect")
    KEPT.append(memory)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=whole - size).view(dtype).view(shape)


KEPT: list[object] = []
"""Memory of guarded tensors."""


def run() -> None:
    executable = artifact.load("artifact.zip" if Path("artifact.zip").exists() else "artifact")
    if not Path(LOAD_ONLY).exists():
        call(executable)
        if Path(MEANT).exists():
            results_are_right(executable, executable.image.program.graph)


def call(executable: Executable) -> None:
    program, signature = executable.image.program, executable.signature
    leaves: list[Any] = []
    for leaf in signature.inputs:
        if not leaf.name:
            leaves.append(leaf.constant)
            continue
        tensor = guarded(leaf.shape, torch_dtype(leaf.dtype))
        leaves.append(tensor.copy_(torch.randn(leaf.shape) if tensor.is_floating_point() else torch.randint(2, leaf.shape)))
    before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    allocate = executable._allocate
    executable._allocate = lambda: [guarded(tuple(t.shape), t.dtype).zero_() for t in allocate()]  # type: ignore[method-assign]
    assert executable._engine is not None
    buffers = executable._engine.buffers
    constants = {name: tensor.clone() for name, tensor in buffers.constants.items()}
    for _ in range(2):
        try:
            arguments, keywords = nested(executable, leaves)
            executable(*arguments, **keywords)
        except TilewrightError:
            return
        except (RuntimeError, TypeError, ValueError, IndexError):
            if not any(region.kind == "torch" for region in program.regions):
                raise
            return  # an error of PyTorch
    changing = {position for position, _ in signature.mutations}
    for position, (old, new) in enumerate(zip(before, leaves, strict=True)):
        if isinstance(old, torch.Tensor) and position not in changing and not same(old, new):
            raise Broken(f"input {position} was changed")
    if not all(same(tensor, buffers.constants[name]) for name, tensor in constants.items()):
        raise Broken("a constant was changed")
    if buffers.arena[buffers._base + buffers.plan.bytes :].any():
        raise Broken("the bytes behind the arena were changed")


def nested(executable: Executable, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments nested according to the signature."""
    from tilewright.runtime.signature import unflatten

    arguments, keywords = unflatten(executable.signature.input_tree, iter(leaves))
    return tuple(arguments), dict(keywords)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
