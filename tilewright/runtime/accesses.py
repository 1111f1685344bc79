"""What calls of kernels and libraries access, and which of them have to wait for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.ir.layout import Box, boxes_overlap
from tilewright.ir.library import LibraryCall, Recurrent
from tilewright.ir.region import Call
from tilewright.runtime.loadable import LoadableProgram


@dataclass(frozen=True)
class Extent:
    """The bytes from `start` to `end` of a memory, or what a slice of the buffer `root` occupies among them: a box of its elements."""

    memory: str
    start: int
    end: int
    root: str = ""
    box: Box = ()

    def overlaps(self, other: Extent) -> bool:
        if self.memory != other.memory or self.end <= other.start or other.end <= self.start:
            return False
        return not self.box or not other.box or self.root != other.root or boxes_overlap(self.box, other.box)

    def covers(self, other: Extent) -> bool:
        """Whether everything that overlaps `other` overlaps this as well. A slice covers only itself."""
        within = self.memory == other.memory and self.start <= other.start and other.end <= self.end
        return within and (not self.box or self == other)


SEGMENTS = Extent("segments", 0, 1)
"""What each operator of PyTorch counts as writing, and every other call as reading: all that is before it ends first."""
EDGES_UP_TO = 4096
"""Segments with more calls are ordered as a chain."""
COOPERATION = Extent("processors", 0, 1)
"""What each kernel whose blocks must all be resident counts as writing: of two at once each could hold processors that the other waits for."""
WORKSPACE = Extent("workspace", 0, 1)
"""What each call of a library counts as writing: all calls share what they allocate (`captured`)."""


def accesses(
    program: LoadableProgram, calls: Sequence[Call | LibraryCall], extent: Callable[[str], Extent]
) -> list[tuple[list[Extent], list[Extent]]]:
    """For each call the extents that it reads and that it writes, by the extents of buffers."""
    result: list[tuple[list[Extent], list[Extent]]] = []
    for call in calls:
        if isinstance(call, LibraryCall):
            # the kernels of recurrent layers may wait for all their blocks
            shared = [WORKSPACE, COOPERATION] if isinstance(call.operator, Recurrent) else [WORKSPACE]
            result.append(([extent(view.name) for view in call.inputs], [*shared, *(extent(view.name) for view in call.outs)]))
            continue
        kernel = program.kernels[call.kernel]
        pairs = list(zip(call.arguments, kernel.writes, strict=True))
        alone = [COOPERATION] if kernel.cooperative else []
        # a kernel may also read a buffer that it writes
        result.append(([extent(name) for name, _ in pairs], [*alone, *(extent(name) for name, write in pairs if write)]))
    return result


def dependencies(accesses: Sequence[tuple[Sequence[Extent], Sequence[Extent]]]) -> list[list[int]]:
    """For each call, the earlier calls that it must wait for, without those implied by others.

    Each call is given by the extents that it reads and that it writes.
    """
    result: list[list[int]] = []
    ancestors: list[int] = []  # bit i: call i comes before this one
    history: dict[str, list[tuple[int, Extent, bool]]] = {}
    for index, (reads, writes) in enumerate(accesses):
        needed: set[int] = set()
        for extents, writing in ((reads, False), (writes, True)):
            for extent in extents:
                needed.update(earlier for earlier, other, wrote in history.get(extent.memory, ()) if (writing or wrote) and extent.overlaps(other))
        before, direct = 0, []
        for earlier in sorted(needed, reverse=True):
            if not before >> earlier & 1:
                direct.append(earlier)
                before |= ancestors[earlier] | 1 << earlier
        ancestors.append(before)
        result.append(sorted(direct))
        for extents, writing in ((reads, False), (writes, True)):
            for extent in extents:
                entries = history.setdefault(extent.memory, [])
                if writing:  # earlier accesses to bytes that this call overwrites completely are now ordered before it
                    entries[:] = [e for e in entries if not (extent.covers(e[1]) and e[0] != index)]
                entries.append((index, extent, writing))
    return result


def ancestors(edges: Sequence[Sequence[int]]) -> list[int]:
    """For each call all calls that come before it, as bits, given those that it waits for directly."""
    result: list[int] = []
    for direct in edges:
        before = 0
        for earlier in direct:
            before |= result[earlier] | 1 << earlier
        result.append(before)
    return result
