"""Slices of buffers: where they may be, which parts of a buffer have been written, and when a value is complete."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.ir.layout import Layout, boxes_overlap
from tilewright.runtime.loadable import LoadableProgram


def is_part(layout: Layout, buffer: Layout) -> bool:
    """Whether the layout is that of a slice of a value with the layout `buffer`: inside it, clear of its halo, with its strides."""
    if len(layout.shape) != len(buffer.shape) or buffer.around:
        return False
    around = layout.around or ((0, 0),) * len(layout.shape)
    start = [max(before - halo, 0) for (before, _), (halo, _) in zip(around, buffer.halo, strict=True)]
    if any(first + extent > whole for first, extent, whole in zip(start, layout.shape, buffer.shape, strict=True)):
        return False
    return layout == buffer.part(layout.shape, start)


def accesses_overlap(program: LoadableProgram, a: str, b: str) -> bool:
    """Whether two names of buffers share an element."""
    if program.root(a) != program.root(b):
        return False
    first, second = program.box(a), program.box(b)
    return not first or not second or boxes_overlap(first, second)


def completions(program: LoadableProgram) -> dict[str, int]:
    """For each value that regions store, or of which they store parts, the number of the last of these regions."""
    last = {name: number for number, region in enumerate(program.regions) for name in region.outputs}
    whole = {*program.aliases, *program.aliases.values()} - last.keys() - {*program.graph.inputs}
    parts = {name: [number for other, number in last.items() if accesses_overlap(program, name, other)] for name in whole}
    return last | {name: max(numbers) for name, numbers in parts.items() if numbers}


class Written:
    """The parts of a program's buffers that hold something, as disjoint boxes for each buffer."""

    def __init__(self, program: LoadableProgram) -> None:
        self._program = program
        self._whole: set[str] = set()
        self._boxes: dict[str, np.ndarray] = {}  # [boxes, first and end, dimensions]

    def add(self, name: str) -> None:
        """Marks a value as written.

        Raises:
            ValueError: if it overlaps one that was written before, and neither contains the other.
        """
        root, box = self._program.root(name), self._program.box(name)
        if not box:
            self._whole.add(root)
        if root in self._whole:
            return
        first, end = np.array(box, np.int64).T
        known = self._boxes.get(root, np.empty((0, 2, len(first)), np.int64))
        inside = ((known[:, 0] >= first) & (known[:, 1] <= end)).all(1)
        around = ((known[:, 0] <= first) & (known[:, 1] >= end)).all(1)
        overlapping = ((known[:, 0] < end) & (known[:, 1] > first)).all(1)
        if (overlapping & ~inside & ~around).any():
            raise ValueError(f"{name} overlaps another value in {root}")
        if not around.any():
            self._boxes[root] = np.concatenate((known[~inside], np.stack((first, end))[None]))

    def holds(self, name: str) -> bool:
        """Whether every element of the value has been written."""
        root, box = self._program.root(name), self._program.box(name)
        if root in self._whole:
            return True
        known = self._boxes.get(root)
        if known is None:
            return False
        layout = self._program.storage[root].layout
        first, end = np.array(box or layout.box(), np.int64).T
        # the halo, which is never written, is no part of a value
        halo = np.array(layout.halo, np.int64).reshape(-1, 2).T
        first, end = np.maximum(first, halo[0]), np.minimum(end, halo[0] + layout.shape)
        common = np.minimum(known[:, 1], end) - np.maximum(known[:, 0], first)
        covered = sum(prod(map(int, extents)) for extents in common.clip(0))
        return covered == prod(map(int, end - first))
