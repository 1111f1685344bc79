"""One graph for a range of sizes: which free size of a model is rounded up, and the model bound to a rounded size.

A size that is not the first dimension of an input, such as the length of a sequence, often has many values. A program for the largest of a range of
them serves all if the operators allow it (`graph/ranges.py`). Batches keep programs of their own: they have few values, and work grows with them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch.utils import _pytree as pytree

from tilewright.errors import InvalidInput, InvalidModel
from tilewright.frontend.imported import Imported
from tilewright.frontend.sized import Key, SizedModel
from tilewright.graph.passes import simplify
from tilewright.graph.ranges import Frame, NotServed, framed

LEAST = 16
"""The first range reaches to this size."""
STEP = 8
KNOWN = 4096
"""Sizes whose rounding is kept: checking a model's conditions takes longer than a small call."""


class Ranges:
    """Rounds the free size at `position` of a model's keys."""

    def __init__(self, model: SizedModel, position: int) -> None:
        self._model = model
        self.position = position
        self._refused: set[Key] = set()
        self._tried: dict[Key, tuple[Imported, Frame]] = {}
        self.rounded = lru_cache(maxsize=KNOWN)(self._rounded_key)
        self.following = lru_cache(maxsize=KNOWN)(self._following_key)

    def _rounded_key(self, key: Key) -> Key | None:
        """The sizes of the program that serves these: the next of four steps for each power of two. None if they need one of their own."""
        result = self._with(key, _rounded(key[self.position]))
        return result if result not in self._refused and self._allows(key) and self._allows(result) else None

    def refuse(self, key: Key) -> None:
        """Of rounded sizes for which there is no program: sizes that they would serve have programs of their own from now on."""
        self._refused.add(key)
        self.rounded.cache_clear()
        self.following.cache_clear()

    def _following_key(self, key: Key) -> Key | None:
        """Of sizes in the last quarter of a range the sizes of the next range's program; None for other sizes, or if there is no such program."""
        rounded = self.rounded(key)
        if rounded is None:
            return None
        last = rounded[self.position]
        near = 4 * (last - key[self.position]) < last + 1 - self.first(last)
        return self.rounded(self._with(key, last + 1)) if near else None

    def grows(self, before: Key, key: Key) -> bool:
        """Whether two successive calls may be of a sequence that grows: by a few entries, with the same other sizes."""
        return self._with(before, key[self.position]) == key and 0 < key[self.position] - before[self.position] <= STEP

    def first(self, last: int) -> int:
        """The smallest size that is rounded up to this one."""
        return next((size + 1 for size in range(last - 1, 1, -1) if _rounded(size) != last), 2)

    def _allows(self, key: Key) -> bool:
        try:
            self._model.check_sizes(key)
        except InvalidInput:
            return False
        return not self._model.is_special(key)

    def attempt(self, key: Key) -> None:
        """Binds the model to rounded sizes, for the next `bind` to them. Raises as `bind`."""
        self._tried[key] = self.bind(key)

    def bind(self, key: Key) -> tuple[Imported, Frame]:
        """The model for rounded sizes, which takes the leaves of a call and the number of entries as positional inputs.

        Raises NotServed if it would be wrong for smaller sizes, and as `SizedModel.bind`."""
        if key in self._tried:
            return self._tried.pop(key)
        extent = key[self.position]
        fewer = next((size for size in range(extent - 1, 1, -1) if self._allows(self._with(key, size))), None)
        if fewer is None:
            raise NotServed("no smaller size is allowed")
        imported, other = self._model.bind(key), self._model.bind(self._with(key, fewer))
        if imported.mutations or imported.states or any(output.kind not in ("value", "constant") for output in imported.outputs):
            raise NotServed("the model changes or returns its inputs or buffers")
        imported, other = imported.with_results_apart(), other.with_results_apart()  # results without their padding are copies
        if imported.literals != other.literals or imported.outputs != other.outputs:
            raise NotServed("a Python number depends on the size")
        graph, frame = framed(simplify(imported.graph)[0], simplify(other.graph)[0], extent, fewer)
        _, tree = pytree.tree_flatten(((0,) * (len(imported.leaves) + 1), {}))
        leaves = (*imported.leaves, len(graph.inputs) - 1)
        inputs = tuple(() if leaf is None else frame.inputs[leaf] for leaf in imported.leaves)
        outputs = tuple(frame.outputs[output.index] if output.kind == "value" else () for output in imported.outputs)
        return replace(imported, graph=graph, in_spec=tree, leaves=leaves, literals=(*imported.literals, None)), replace(
            frame, inputs=inputs, outputs=outputs
        )

    def _with(self, key: Key, size: int) -> Key:
        return (*key[: self.position], size, *key[self.position + 1 :])


def _rounded(size: int) -> int:
    step = max(STEP, (1 << max(size - 1, 1).bit_length()) // 8)
    return max(LEAST, -(-size // step) * step)


def ranges_of(model: SizedModel, key: Key) -> Ranges | None:
    """The ranges of the one free size that may be rounded, tried for a key; None if there is none, or the model's operators do not allow it."""
    positions = [k for k, dimension in enumerate(model.dimensions) if dimension > 0]
    if len(positions) != 1 or not model.is_affine(positions[0]):
        return None
    ranges = Ranges(model, positions[0])
    rounded = ranges.rounded(tuple(max(size, 2) for size in key))
    if rounded is None:
        return None
    try:
        ranges.attempt(rounded)
    except (NotServed, InvalidModel):
        return None
    return ranges
