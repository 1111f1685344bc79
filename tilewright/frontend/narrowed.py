"""A model that declares its free sizes itself, of which only some may differ from call to call: the others are those of an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import InvalidInput, UnsupportedOption
from tilewright.frontend.imported import Imported
from tilewright.frontend.sized import DeclaredModel, Key, check_bounds, named_sizes
from tilewright.frontend.sizes import NUMBER


@dataclass(frozen=True)
class _Free:
    """A size that stays free, from `least` to `most`, under the user's name: the sizes of the model at these `positions`, which are equal."""

    name: str
    positions: tuple[int, ...]
    least: int = 0
    most: int | None = None


class NarrowedModel:
    """`model` with the sizes free that `dynamic` names, as for `sized.free_sizes`, and the others those of the leaves of an example.

    Raises UnsupportedOption for a `dynamic` that does not fit the model, and InvalidInput for an example that does not."""

    def __init__(self, model: DeclaredModel, leaves: Sequence[Any], dynamic: Any) -> None:
        self._model = model
        self._example = model.key(leaves)
        self._free = _free(model, leaves, dynamic)
        named = {position for size in self._free for position in size.positions}
        self._fixed = [position for position in range(len(self._example)) if position not in named]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(size.name for size in self._free)

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(self._model.dimensions[size.positions[0]] for size in self._free)

    def sizes(self, key: Key) -> dict[str, int]:
        return dict(zip(self.names, key, strict=True))

    def example(self, key: Key) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._model.example(self._whole(key))

    def key(self, leaves: Sequence[Any]) -> Key:
        whole = self._model.key(leaves)
        return tuple(whole[size.positions[0]] for size in self._free)

    def check(self, leaves: Sequence[Any]) -> None:
        whole, names = self._model.key(leaves), self._model.names
        for position in self._fixed:
            if whole[position] != self._example[position]:
                raise InvalidInput(
                    f"{names[position]} is {whole[position]}, and the model was compiled for {self._example[position]} alone, since `dynamic` does "
                    "not name it",
                    "name it too, or compile the model for that size",
                )
        for size in self._free:
            first, *others = size.positions
            for other in others:
                if whole[other] != whole[first]:
                    cause = f"{names[first]} is {whole[first]} and {names[other]} is {whole[other]}, and `dynamic` calls both {size.name}"
                    raise InvalidInput(cause, "pass equal sizes, or give them two names")
        self.check_sizes(self.key(leaves))
        self._model.check(leaves)

    def check_sizes(self, key: Key) -> None:
        for size, number in zip(self._free, key, strict=True):
            check_bounds(size.name, number, size.least, size.most)
        self._model.check_sizes(self._whole(key))

    def is_special(self, key: Key) -> bool:
        whole = list(self._whole(key))
        for position in self._fixed:  # all programs have these
            whole[position] = max(whole[position], 2)
        return self._model.is_special(tuple(whole))

    def is_affine(self, position: int) -> bool:
        positions = self._free[position].positions
        return len(positions) == 1 and self._model.is_affine(positions[0])  # two may be factors of a product

    def bind(self, key: Key) -> Imported:
        return self._model.bind(self._whole(key))

    def _whole(self, key: Key) -> Key:
        whole = list(self._example)
        for size, number in zip(self._free, key, strict=True):
            for position in size.positions:
                whole[position] = number
        return tuple(whole)


def _free(model: DeclaredModel, leaves: Sequence[Any], dynamic: Any) -> tuple[_Free, ...]:
    """The sizes that `dynamic` names, in the order of the model's."""
    inputs = list(model.declared.items())
    free, names = named_sizes({name: leaf for leaf, (name, _) in enumerate(inputs)}, leaves, dynamic)
    found: dict[str, _Free] = {}
    called: dict[int, str] = {}  # by the positions of the model's sizes
    for leaf, hints in free.items():
        input_name, dims = inputs[leaf]
        for dim, hint in (hints if isinstance(hints, dict) else {NUMBER: hints}).items():
            place = input_name if dim == NUMBER else f"dimension {dim} of {input_name}"
            position = dims.get(dim)
            if position is None:
                listed = f"its free sizes are {', '.join(model.names)}"
                cause = f"dynamic names {place}, which is not free in the model"
                raise UnsupportedOption(cause, f"leave it out ({listed}), or export the model with that size free")
            name = names.get((leaf, dim)) or model.names[position]
            if called.setdefault(position, name) != name:
                cause = f"dynamic calls {place} {name}, and {called[position]} as well, which is the same size of the model, {model.names[position]}"
                raise UnsupportedOption(cause, "give it one name")
            found[name] = _with(found.get(name, _Free(name, ())), position, hint)
    if not found:
        raise UnsupportedOption(f"dynamic={dynamic!r} names no sizes", f"name some of {', '.join(model.names)}, or use True for all of them")
    return tuple(sorted(found.values(), key=lambda size: size.positions))


def _with(size: _Free, position: int, hint: Any) -> _Free:
    """The size with one more position, and within the bounds of a `torch.export.Dim`."""
    positions = tuple(sorted({*size.positions, position}))
    if not isinstance(hint, torch.export.Dim):
        return _Free(size.name, positions, size.least, size.most)
    if hasattr(hint, "root"):
        raise UnsupportedOption(f"dynamic derives {size.name} from another size", "name sizes alone: how they are related is decided by the model")
    most = [limit for limit in (size.most, hint.max) if isinstance(limit, int)]
    return _Free(size.name, positions, max(size.least, hint.min), min(most, default=None))
