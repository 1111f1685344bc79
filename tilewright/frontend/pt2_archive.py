"""The .pt2 archive: a zip file that holds an exported program as JSON and its weights as raw bytes, read without running any of it.

    NAME/archive_format                               "pt2"
    NAME/byteorder                                    "little"
    NAME/models/model.json                            the program (`pt2_program`)
    NAME/data/weights/model_weights_config.json       {"config": {name: {"path_name", "is_param", "use_pickle", "tensor_meta"}}}
    NAME/data/weights/weight_0                        the storage of a tensor; several tensors may be views of it
    NAME/data/constants/...                           the same for constants

`torch.export.save` writes this since release 2.9, with uncompressed members. `torch.export.load` unpickles everything that the archive declares a
pickle: always the sample inputs, also tensors of subclasses, script objects, and all weights of older layouts. Here pickles are refused, and members
that are not needed, such as the sample inputs, are not opened.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._export.serde.serialize import deserialize_scalar_type

from tilewright.errors import InvalidModel, UnsupportedOperator
from tilewright.frontend import pt2_program as program
from tilewright.frontend.reading import LARGEST_COMPUTED, printable

AGAIN = "write it again with torch.export.save"
_NEWER = "export the module again with torch.export.save of PyTorch 2.9 or newer, which stores raw tensors"
_PLAIN = "export the module again with plain tensors as parameters, buffers and constants"
_PIECE = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Archive:
    """The contents of a .pt2 file: the program as JSON that `pt2_program` has checked, and its tensors by name."""

    program: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]


def read(file: Path) -> Archive:
    """Reads an archive. Raises InvalidModel if it is not one or stores anything as a pickle; ValueError and zipfile's errors if it is damaged."""
    with zipfile.ZipFile(file) as archive:
        members = _Members(file, archive)
        document = program.checked(members.json("models/model.json"))
        return Archive(document, members.tensors("weights"), members.tensors("constants"))


class _Members:
    """The members of one archive, named without the enclosing folder."""

    def __init__(self, file: Path, archive: zipfile.ZipFile) -> None:
        self.file = file
        self.archive = archive
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if "serialized_exported_program.json" in names:
            raise InvalidModel(f"{file} has the layout of PyTorch 2.8 and older, whose weights are pickles", _NEWER)
        if len(set(names)) < len(names):
            raise ValueError("two of its members have the same name")
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ValueError("its members are compressed, which torch.export.save does not do")
        if sum(info.file_size for info in infos) > file.stat().st_size:
            raise ValueError("its members are larger than the file")
        self.infos = {info.filename.partition("/")[2]: info for info in infos}
        if len(self.infos) < len(infos) or self.bytes("archive_format") != b"pt2":
            raise ValueError("it is no .pt2 archive")
        if "byteorder" in self.infos and self.bytes("byteorder") != b"little":
            raise UnsupportedOperator(f"{file} was written on a big-endian machine", "export the module on this one")

    def bytes(self, name: str) -> bytes:
        """A member's contents, verified by its checksum."""
        return bytes(self._contents(name).numpy())

    def json(self, name: str) -> Any:
        return json.loads(self.bytes(name))

    def _contents(self, name: str) -> torch.Tensor:
        if name not in self.infos:
            raise ValueError(f"it has no {printable(name)}")
        info = self.infos[name]
        contents = torch.empty(info.file_size, dtype=torch.uint8)
        view: Any = contents.numpy()  # shares the memory
        with self.archive.open(info) as member:
            position = 0
            while piece := member.read(_PIECE):
                view[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
                position += len(piece)
        if position != info.file_size:
            raise ValueError(f"{printable(name)} is truncated")
        return contents

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of data/weights or data/constants, by name; views of one storage share it."""
        if f"data/{kind}/model.pt" in self.infos:
            raise InvalidModel(f"{self.file} stores its {kind} as a pickle, as older releases of PyTorch do", _NEWER)
        entries = program.payloads(self.json(f"data/{kind}/model_{kind}_config.json"))
        result: dict[str, torch.Tensor] = {}
        storages: dict[str, torch.Tensor] = {}
        repeated: dict[Any, int] = {}
        for name, entry in entries.items():
            path, meta = entry["path_name"], entry.get("tensor_meta")
            if entry["use_pickle"] or meta is None:
                raise InvalidModel(f"{self.file} stores {printable(name)} as a pickle, which could run any code", _PLAIN)
            if path not in storages:
                storages[path] = self._contents(f"data/{kind}/{path}")
            tensor = _view(storages[path], meta, name)
            repeated[path, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype] = tensor.numel() * tensor.element_size()
            device = program.device(meta["device"])
            if device.type != "cpu":
                tensor = tensor.to(device)
            result[name] = torch.nn.Parameter(tensor, meta["requires_grad"]) if entry["is_param"] else tensor
        if sum(repeated.values()) > LARGEST_COMPUTED + 4 * sum(storage.numel() for storage in storages.values()):
            raise ValueError(f"its {kind} repeat their stored elements into {sum(repeated.values()):,} bytes")
        return result


def _view(storage: torch.Tensor, meta: Mapping[str, Any], name: str) -> torch.Tensor:
    """The tensor that `meta` describes over the bytes of a storage. Raises ValueError if it reads outside them."""
    dtype = deserialize_scalar_type(meta["dtype"])
    sizes, strides, offset = program.integers(meta["sizes"]), program.integers(meta["strides"]), meta["storage_offset"]["as_int"]
    if len(sizes) != len(strides) or storage.numel() % dtype.itemsize:
        raise ValueError(f"{printable(name)} does not fit its storage")
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if (last + 1) * dtype.itemsize > storage.numel():
        raise ValueError(f"{printable(name)} is larger than its storage")
    if dtype is torch.bool and bool((storage > 1).any()):
        raise ValueError(f"{printable(name)} holds bytes that are neither true nor false")
    return torch.as_strided(storage.view(dtype), sizes, strides, offset)
