"""Stages of a lowered region: what it computes one after another, and the edges that join them, each with the level at which a result is passed on.

A chain (DeepCuts, section 4.4) has its regions as stages, which pass tiles: in shared memory of a block or a cluster, or in the cache of a thread. A
result that other regions need too is in memory as well, and some are only there, from where the next stage reads them while they still are in the
caches. Where several kernels compute a region (Winograd's transforms and products, the parts of a split sum, a factor that is copied first), the
stages pass workspaces in memory. What the steps of one kernel pass each other (sums for an epilogue, rows for a softmax, weights of attention,
transforms) stays in registers or in a tile, as the schema of the region says (`kernels.schema.Schema.within`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tilewright.ir.dtypes import size_of
from tilewright.ir.region import REGISTERS, TILE, Lowered, Region

MEMORY = "memory"
LEVELS = (TILE, MEMORY)
"""Where a stage leaves its result for others."""


@dataclass(frozen=True)
class Stage:
    """`what` the stage computes: its operators, or its kernel's name without the digest. `within`: where its operators find what they pass each
    other, one of `region.WITHIN`; of one kernel of several it is not known."""

    what: tuple[str, ...]
    within: str = REGISTERS


@dataclass(frozen=True)
class Edge:
    """A result that a stage passes on, by the numbers of both stages; `consumer` is None for other regions. `level`: where it is found, one of
    `LEVELS`. `bytes`: those of the whole result."""

    producer: int
    consumer: int | None
    level: str
    bytes: int


@dataclass(frozen=True)
class Flow:
    """The stages of a region in order, and the edges between them, by producers. The last stage's result, which is the region's, has none."""

    stages: tuple[Stage, ...] = ()
    edges: tuple[Edge, ...] = ()

    @property
    def is_path(self) -> bool:
        """Whether each stage passes its result to the next one only."""
        return [(edge.producer, edge.consumer) for edge in self.edges] == [(number, number + 1) for number in range(len(self.stages) - 1)]


def flow_of(lowered: Lowered) -> Flow:
    """The stages of a region; none for what PyTorch runs, for loops, and where nothing is computed."""
    region = lowered.region
    if region.kind in ("torch", "loop") or not (lowered.calls or lowered.library):
        return Flow()
    if region.stages:
        stages = tuple(Stage(_operators(stage), within) for stage, within in zip(region.stages, lowered.within, strict=True))
        return Flow(stages, tuple(edge for number in range(len(stages) - 1) for edge in _chained(lowered, number)))
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    # of each kernel, or of the library's operator: what it stores, and what it reads or stores
    stored_first = [] if lowered.library is None else [view.name for view in lowered.library.outs]
    parts = [] if lowered.library is None else [(lowered.library.operator.name, stored_first, stored_first)]
    for call in lowered.calls:
        pairs = list(zip(call.arguments, kernels[call.kernel].parameters, strict=True))
        stored = [name for name, parameter in pairs if parameter.writable]
        parts.append((call.kernel.rpartition("_")[0], stored, [name for name, _ in pairs]))
    if len(parts) == 1:
        return Flow((Stage(_operators(region), lowered.within[0]),))
    edges = {
        (producer, consumer): sum(_stored_bytes(lowered, name) for name in dict.fromkeys(stored) if name in touched)
        for producer, (_, stored, _) in enumerate(parts)
        for consumer, (_, _, touched) in enumerate(parts)
        if producer < consumer and not {*stored}.isdisjoint(touched)
    }
    return Flow(tuple(Stage((kernel,)) for kernel, _, _ in parts), tuple(Edge(*pair, MEMORY, count) for pair, count in edges.items()))


def _chained(lowered: Lowered, number: int) -> list[Edge]:
    """The edges of a stage of a chain."""
    region = lowered.region
    producer, stored = region.stages[number], region.stages[number].outputs[0] in region.outputs
    on_gpu = any(kernel.launch is not None for kernel in lowered.kernels)
    level = TILE if on_gpu or not stored or tile_of(producer.outputs[0]) in lowered.storage else MEMORY
    readers = region.readers_of(producer.outputs[0])
    size = _result_bytes(producer)
    return [*(Edge(number, at, level, size) for at in readers), *([Edge(number, None, MEMORY, size)] if stored else [])]


def tile_of(result: str) -> str:
    """The name of the tile of a result inside of a chain."""
    return f"{result}.tile"


def _operators(region: Region) -> tuple[str, ...]:
    return tuple(node.operator_name for node in region.nodes) or ("copy",)


def _result_bytes(region: Region) -> int:
    """Of the region's last result, as its sums or its map compute it."""
    last = region.steps[-1]
    return prod(last.shape) * size_of(last.dtypes[0])


def _stored_bytes(lowered: Lowered, name: str) -> int:
    """Of a workspace, or of a result of the region, which an earlier kernel prepares."""
    workspace = lowered.storage.get(name)
    return _result_bytes(lowered.region) if workspace is None else workspace.layout.own_size * size_of(workspace.value.dtype)
