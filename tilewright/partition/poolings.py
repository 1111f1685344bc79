"""Poolings: convolutions whose kernels combine windows of their results, instead of storing results that a kernel of its own reads again.

The windows do not overlap, so that each result is computed once, and nothing but the pooling reads them. What the kernel saves is the traffic of a
result that is several times as large as the pooled one, and a launch; against that stand the schedules that hold no whole windows. So both ways are
predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tilewright.ir.region import MergeDecision, Region, Unsuitable, readers_of
from tilewright.partition.merges import BY_MERGES, Policy, Timed, compared
from tilewright.partition.pooling_joining import with_windows

POOLING = "pooling"
"""The kind of these merges."""


@dataclass(frozen=True)
class Poolings:
    """Results of contractions that are pooled in their kernels, and the decisions by the last node of each pooling."""

    values: frozenset[str] = frozenset()
    decisions: Mapping[str, MergeDecision] = field(default_factory=lambda: MappingProxyType({}))


def find_poolings(
    regions: Sequence[Region], results: Sequence[str], constants: frozenset[str]
) -> dict[tuple[str, str], tuple[Region, Region, Region]]:
    """By both results the contractions whose results are read by a pooling alone: the contraction, the pooling, and one region of both. `results`:
    those of the model."""
    made = {region.outputs[0]: region for region in regions if region.kind == "contraction" and len(region.outputs) == 1}
    readers = readers_of(regions)
    found = {}
    for pool in regions:
        if pool.kind not in ("window", "row reduction") or not pool.nodes or pool.checks or len(pool.outputs) != 1:
            continue
        for name in pool.inputs:
            host = made.get(name)
            if host is None or host.checks or host.steps[-1].name != name or name in results or readers[name] != [pool]:
                continue
            steps = with_windows(host.steps, name, pool.steps, constants)
            if not isinstance(steps, str):
                inputs = dict.fromkeys((*host.inputs, *(other for other in pool.inputs if other != name)))
                both = replace(pool, kind=host.kind, nodes=(*host.nodes, *pool.nodes), steps=steps, inputs=tuple(inputs))
                found[name, pool.outputs[0]] = host, pool, both
    return found


def choose_poolings(
    regions: Sequence[Region],
    results: Sequence[str],
    constants: frozenset[str],
    predict: Callable[[Sequence[Region]], Sequence[Timed]],
    policy: Policy = BY_MERGES,
) -> Poolings:
    """The results that are pooled where they are computed since one kernel is predicted, or was measured, to be faster. Graphs without such results
    cost nothing. About those of which the `policy` says something, that decides, if one kernel is possible."""
    taken: set[str] = set()
    decisions: dict[str, MergeDecision] = {}
    for names, (host, pool, both) in find_poolings(regions, results, constants).items():
        name, pooled = names
        try:
            together = predict([both])
        except Unsuitable as reason:
            text = f"{name} is stored before it is pooled to {pooled}: no kernel does both: {reason}"
            decisions[pool.nodes[-1].name] = MergeDecision(names, False, text, POOLING)
            continue
        times = compared(together, predict([host, pool]), policy.about(POOLING, names), policy.predicted)
        taken.update([name] if times.taken else [])
        how = "is pooled" if times.taken else "would be slower if pooled"
        text = f"{name} {how} to {pooled} where it is computed: {times.text('in one kernel', 'with a kernel of its own')}"
        decisions[pool.nodes[-1].name] = MergeDecision(names, times.taken, text, POOLING, times.ways)
    return Poolings(frozenset(taken), MappingProxyType(decisions))
