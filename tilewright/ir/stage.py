"""Stages of a lowered region: what it computes one after another, and where each stage leaves its result for the next.

A chain (DeepCuts, section 4.4) has its regions as stages, which pass tiles: in shared memory of a block or a cluster, or in the cache of a thread.
Where several kernels compute a region (Winograd's transforms and products, the parts of a split sum, a factor that is copied first), the stages pass
workspaces in memory. What the steps of one kernel pass each other (sums for an epilogue, rows for a softmax, weights of attention, transforms) stays
in registers or in a tile, as the schema of the region says (`kernels.schema.Schema.within`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tilewright.ir.dtypes import size_of
from tilewright.ir.region import REGISTERS, TILE, Lowered, Region

MEMORY = "memory"
LEVELS = (TILE, MEMORY)
"""Where a stage leaves its result for the next."""


@dataclass(frozen=True)
class Stage:
    """`what` the stage computes: its operators, or its kernel's name without the digest. `passes`: where the next stage finds the result, one of
    `LEVELS`; empty for the last. `bytes`: those of the whole result. `within`: where its operators find what they pass each other, one of
    `region.WITHIN`; of one kernel of several it is not known."""

    what: tuple[str, ...]
    passes: str = ""
    bytes: int = 0
    within: str = REGISTERS


def stages_of(lowered: Lowered) -> tuple[Stage, ...]:
    """The stages of a region in order; none for what PyTorch runs, for loops, and where nothing is computed."""
    region = lowered.region
    if region.kind in ("torch", "loop") or not (lowered.calls or lowered.library):
        return ()
    if region.stages:
        *before, last = zip(region.stages, lowered.within, strict=True)
        passing = (Stage(_operators(stage), TILE, _result_bytes(stage), within) for stage, within in before)
        return (*passing, Stage(_operators(last[0]), within=last[1]))
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    parts = [] if lowered.library is None else [(lowered.library.operator, {lowered.library.out.name})]
    for call in lowered.calls:
        parameters = zip(call.arguments, kernels[call.kernel].parameters, strict=True)
        parts.append((call.kernel.rpartition("_")[0], {name for name, parameter in parameters if parameter.writable}))
    if len(parts) == 1:
        return (Stage(_operators(region), within=lowered.within[0]),)
    *first, (last_kernel, _) = parts
    apart = (Stage((kernel,), MEMORY, sum(_stored_bytes(lowered, name) for name in written)) for kernel, written in first)
    return (*apart, Stage((last_kernel,)))


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
