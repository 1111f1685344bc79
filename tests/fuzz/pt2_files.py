"""Mutated .pt2 files: programs that are slightly changed (`pt2_changes`), and arbitrary ones: members, their JSON at any depth, raw tensors, and
pickles that create a file if anything unpickles them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fuzz.harness import MARK, Case
from tests.fuzz.planning import prepare as prepare_planning
from tests.fuzz.planning import read_and_plan
from tests.fuzz.pt2_changes import changed

__all__ = ["cases", "prepare", "run"]

COMMAND = f"__import__('os').system('touch {MARK}-text')"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 99, 1 << 31, 1 << 40, (1 << 62) + 1, -(1 << 63), 1 << 80, 0.5, 1e999, -0.0, "", "x", "NaN", "\0", "../x", COMMAND,
    f"x={COMMAND}", "torch.os.system", "torch.ops.aten.from_file.default", "torch.ops.aten.mul.Tensor", "torch.ops.aten.set_.source_Tensor",
    "torch.ops.aten.as_strided.default", "torch.ops.higher_order.cond", "_operator.call", "builtins.tuple", "collections.deque", [], {}, [[[]]],
    {"as_int": 3}, {"as_expr": {"expr_str": COMMAND, "hint": {"as_int": 2}}}, {"as_none": True}, {"as_string": COMMAND}, {"as_name": "x"},
)  # fmt: skip


def prepare() -> None:
    """Reads a valid file, so that everything it imports and caches exists before the children are forked."""
    prepare_planning()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for members in _seeds():
            path = Path(folder) / "model.pt2"
            path.write_bytes(_archive(members))
            read_and_plan(str(path))


def run() -> None:
    read_and_plan("model.pt2")


class _Payload:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARK}-pickle",)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 5)
        self.register_buffer("scale", torch.ones(1).expand(5))

    def forward(self, x: Tensor, *, bias: Tensor) -> Any:
        with torch.no_grad():
            y = nn.functional.max_pool2d(self.norm(self.convolution(x)).relu(), 2).flatten(1)
        return OrderedDict(a=self.linear(y) * self.scale + bias, b=(y.sum(), 3, None))


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.norm = nn.Embedding(10, 4), nn.LSTM(4, 3, batch_first=True), nn.LayerNorm(3)

    def forward(self, index: Tensor, count: int) -> Any:
        out, _ = self.lstm(self.table(index))
        return self.norm(out).softmax(-1).topk(2)[0] + torch.arange(2) * count, torch.cat([out, out], 1).split(3, 1)


class _Indexed(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Any:
        y = x.gather(1, index).clamp(-1, 1) * 2
        z = torch.where(y > 0, y, x.flip(0)).sort(1)[0]
        return z.scatter_add(1, index, y).cumsum(0), z[:, index[0]], (x @ z.transpose(0, 1)).argmax(-1), x.unbind(0)[0].roll(1)


class _Image(nn.Module):
    grid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.rand(1, 3, 3, 2) * 2 - 1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y = nn.functional.interpolate(nn.functional.pad(x, (1, 1, 0, 2), mode="reflect"), scale_factor=2, mode="bilinear")
        z = nn.functional.grid_sample(y, self.grid, align_corners=False).flatten(2)
        rows = nn.functional.avg_pool2d(y, 2).flatten(2)[..., :6]
        return z.std(-1), self.attention(rows, rows, rows)[0].sigmoid().mean(1), torch.einsum("bcd,bed->bce", rows, z[..., :6])


@cache
def _seeds() -> tuple[dict[str, bytes], ...]:
    """Members of valid archives."""
    programs = (
        torch.export.export(_Network().eval(), (torch.ones(1, 3, 8, 8),), {"bias": torch.ones(5)}),
        torch.export.export(_Rows().eval(), (torch.zeros(2, 3, dtype=torch.int64), 2)),
        torch.export.export(nn.Linear(3, 2), (torch.ones(2, 3),)),
        torch.export.export(_Indexed(), (torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.int64))),
        torch.export.export(_Image().eval(), (torch.ones(1, 2, 5, 6),)),
    )
    result = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            torch.export.save(program, Path(folder) / "model.pt2")
            with zipfile.ZipFile(Path(folder) / "model.pt2") as archive:
                result.append({name: archive.read(name) for name in archive.namelist()})
    return tuple(result)


@cache
def _pickles() -> tuple[bytes, ...]:
    buffer = io.BytesIO()
    torch.save(_Payload(), buffer)
    return buffer.getvalue(), pickle.dumps(_Payload())


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        container = stack.pop()
        keys = container.keys() if isinstance(container, dict) else range(len(container)) if isinstance(container, list) else ()
        for key in keys:
            found.append((container, key))
            stack.append(container[key])
    return found


def _document(members: dict[str, bytes], chance: random.Random) -> None:
    name = chance.choice([n for n in members if n.endswith(".json")] + [n for n in members if n.endswith("model.json")] * 3)
    document = json.loads(members[name])
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        places = _places(document)
        if not places:
            break
        container, key = chance.choice(places)
        way = chance.randrange(6)
        if way == 0:
            del container[key]
        elif way == 1:
            other, where = chance.choice(places)
            container[key] = json.loads(json.dumps(other[where] if where in (other if isinstance(other, dict) else range(len(other))) else None))
        elif way == 2 and isinstance(container, list):
            container.insert(key, container[key])
        elif way == 3 and isinstance(container, dict):
            container[chance.choice(("x", "y", COMMAND, "use_pickle", "as_expr"))] = container.pop(key)
        elif isinstance(container[key], int) and not isinstance(container[key], bool) and way == 4:
            container[key] += chance.choice((1, -1, 2))
        else:
            container[key] = chance.choice(VALUES)
    members[name] = json.dumps(document).encode()


def _payload(members: dict[str, bytes], chance: random.Random) -> None:
    """Makes a pickle one of the members that PyTorch unpickles, and declares it in the configuration."""
    root, data = next(iter(members)).partition("/")[0], chance.choice(_pickles())
    kind = chance.choice(("weights", "constants"))
    path = chance.choice(("weight_0", "tensor_0", "custom_obj_0", "opaque_obj_0", "model.pt"))
    members[chance.choice((f"{root}/data/{kind}/{path}", f"{root}/data/sample_inputs/model.pt", chance.choice(list(members))))] = data
    name = f"{root}/data/{kind}/model_{kind}_config.json"
    try:
        document = json.loads(members[name])
    except (KeyError, ValueError):
        return
    entry = {"path_name": path, "is_param": chance.random() < 0.5, "use_pickle": chance.random() < 0.8, "tensor_meta": None}
    document.setdefault("config", {})[chance.choice(["added", *document.get("config", {})])] = entry
    members[name] = json.dumps(document).encode()


def _member(members: dict[str, bytes], chance: random.Random) -> None:
    name = chance.choice(list(members))
    data, way = members[name], chance.randrange(5)
    if way == 0:
        del members[name]
    elif way == 1:
        members[name] = data[: chance.randrange(len(data) + 1)]
    elif way == 2:
        members[name] = data + chance.randbytes(8)
    elif way == 3:
        members[chance.choice(list(members))] = data
    else:
        members[chance.choice(("/x", "../x", "a/b", name + "/", name.upper(), "version", "serialized_exported_program.json"))] = data


def _archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _case(which: int, number: int) -> Case:
    chance = random.Random(number)
    members = dict(_seeds()[which])
    changes: list[Callable[[dict[str, bytes], random.Random], None]] = [_document, _document, _document, _payload, _member]
    near = chance.random() < 0.65
    if near:
        changed(members, chance)
    for _ in range(0 if near else chance.choice((1, 1, 1, 2))):
        if members:
            try:
                chance.choice(changes)(members, chance)
            except (ValueError, TypeError, AttributeError, LookupError):  # an already damaged document
                pass
    raw = bytearray(_archive(members, zipfile.ZIP_DEFLATED if not near and chance.random() < 0.04 else zipfile.ZIP_STORED))
    if chance.random() < (0.01 if near else 0.2):
        for _ in range(chance.randrange(1, 4)):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    if not near and chance.random() < 0.04:
        del raw[chance.randrange(len(raw)) :]
    return {"model.pt2": bytes(raw)}


def cases() -> st.SearchStrategy[Case]:
    return st.builds(_case, st.integers(0, 4), st.integers(0, (1 << 48) - 1))
