"""Files of artifacts of small models, for tests that change them."""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import tilewright
from tests.compiled import without_chains

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"


class Convolutions(nn.Module):
    """A small network that returns one result twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.head(torch.relu(self.body(x)).mean((2, 3))), -1)


class Recurrent(nn.Module):
    """A loop in one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Stepwise(Recurrent):
    """A loop in kernels of one step: its weights depend on the input."""

    def forward(self, x: Tensor) -> Tensor:
        start, (w_ih, w_hh, *biases) = x.new_zeros(1, x.shape[1], 6), self.cell.parameters()
        return torch.lstm(x, (start, start), [w_ih, w_hh * x.mean(), *biases], True, 1, 0.0, False, False, False)[0]


class Embedded(nn.Module):
    """An embedding, and an operator that runs through PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, tokens: Tensor, choice: Tensor) -> dict[str, Tensor]:
        rows = self.table(tokens)
        return {"rising": torch.cummax(rows.sum(1), -1)[0], "gathered": torch.gather(rows, 1, choice)}


class Stateful(nn.Module):
    """A buffer that calls change, an input that they write to, a view of an input, and a parameter that is returned."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self.total.add_(x)
        y.mul_(2)
        return self.total * self.scale, x.transpose(0, 1), x + y, self.scale


class Joined(nn.Module):
    """Nested concatenations: results of convolutions in place, an input copied, and a reader that needs a halo."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(3, channels, 1) for channels in (8, 16))
        self.inner, self.last = nn.Conv2d(27, 8, 3, padding=1), nn.Conv2d(35, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([*(torch.relu(part(x)) for part in self.parts), x], 1)
        return self.last(torch.cat([y, torch.relu(self.inner(y))], 1))


class Returned(nn.Module):
    """A result that is a concatenation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(3, channels, size, padding=size // 2) for channels, size in ((8, 1), (16, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.relu(part(x)) for part in self.parts], 1)


@cache
def files(name: str) -> Mapping[str, bytes]:
    """The files of an artifact for this machine: "convolutions", "batched", "recurrent", "stepwise", "embedded", "stateful", "joined" or "returned",
    all without chains, so that changes find the regions that they name; and "chained", which may have one."""
    torch.manual_seed(1)
    models: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "convolutions": (Convolutions(), (torch.randn(1, 3, 8, 8),)),
        "batched": (Convolutions(), (torch.randn(3, 3, 8, 8),)),
        "chained": (Convolutions(), (torch.randn(1, 3, 8, 8),)),
        "recurrent": (Recurrent(), (torch.randn(5, 2, 4),)),
        "stepwise": (Stepwise(), (torch.randn(5, 2, 4),)),
        "embedded": (Embedded(), (torch.randint(11, (2, 4)), torch.randint(4, (2, 3, 6)))),
        "stateful": (Stateful(), (torch.randn(4, 3), torch.randn(4, 3))),
        "joined": (Joined(), (torch.randn(1, 3, 6, 6),)),
        "returned": (Returned(), (torch.randn(1, 3, 6, 6),)),
    }
    module, inputs = models[name]
    planned = nullcontext() if name == "chained" else without_chains()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), planned:
        warnings.simplefilter("ignore")
        path = Path(folder) / "artifact"
        tilewright.compile(module.eval(), inputs, threads=1).save(path)
        return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def manifest_of(held: Mapping[str, bytes]) -> Any:
    return json.loads(held[MANIFEST])


def signed(held: Mapping[str, bytes], manifest: Any = None) -> dict[str, bytes]:
    """The files with all hashes recomputed, as somebody who changes an artifact would; the manifest may be given as text or as a value."""
    result = dict(held)
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest_of(held) if manifest is None else manifest).encode()
    try:
        value = json.loads(text)
        value["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in held.items() if name in value["files"]}
        text = text if isinstance(manifest, bytes) else json.dumps(value).encode()
    except (ValueError, TypeError, KeyError, RecursionError):  # the field no longer exists
        pass
    result[MANIFEST] = text
    result["manifest.sha256"] = hashlib.sha256(text).hexdigest().encode()
    return result


def with_weights(held: Mapping[str, bytes], weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The files with other weights; not signed."""
    return {**held, WEIGHTS: safetensors.torch.save(dict(weights))}


def put(held: Mapping[str, bytes], path: Path) -> Path:
    """Writes the files as a directory."""
    for name, data in held.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Changes the files of an artifact."""
    if path.is_dir():
        files = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    else:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    before = dict(files)
    change(files)
    if path.is_dir():
        for name in before.keys() - files.keys():
            (path / name).unlink()
        for name, data in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], object], sign: bool = True) -> None:
    def apply(files: dict[str, bytes]) -> None:
        manifest = json.loads(files["manifest.json"])
        change(manifest)
        files["manifest.json"] = json.dumps(manifest).encode()
        if sign:
            files["manifest.sha256"] = hashlib.sha256(files["manifest.json"]).hexdigest().encode()

    rewrite(path, apply)
