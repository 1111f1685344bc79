"""Prologues: maps that a contraction computes where it reads their result, instead of reading what a kernel of their own has stored.

The normalisation and activation before each product of a dense block, or the scale of squeeze-and-excitation, cannot join the region before it:
others read that region's result, or it is stored in a larger buffer. Computed by the contraction that reads it, the map is computed again for each
tile of output channels, and its result, which then is no stored value, can be neither copied to shared memory asynchronously nor multiplied by
Winograd's algorithm or by warpgroups. Against that stand a kernel and a stored value less, so both ways are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tilewright.ir.expr import loads
from tilewright.ir.region import MergeDecision, Region, Ways, readers_of
from tilewright.partition.layouts import in_graph
from tilewright.partition.merges import BY_MERGES, Policy, Timed, compared

PROLOGUE = "prologue"
"""The kind of these merges."""
Predict = Callable[[frozenset[str], Callable[[Region], bool]], Sequence[Timed]]
"""Predicts those regions for which the function says true, where contractions compute the given results of maps."""


@dataclass(frozen=True)
class Prologues:
    """Results of maps that the contractions which read them compute, and the decisions by the last node of each map."""

    values: frozenset[str] = frozenset()
    decisions: Mapping[str, MergeDecision] = field(default_factory=lambda: MappingProxyType({}))


def find_prologues(regions: Sequence[Region], results: Sequence[str]) -> dict[str, list[Region]]:
    """By the result of each contraction the maps that it could compute: those whose result its sum reads, and nothing else. `results`: those of the
    model."""
    readers = readers_of(regions)
    found: dict[str, list[Region]] = {}
    for region in regions:
        if region.kind != "map" or not region.nodes or region.checks or len(region.outputs) != 1 or region.outputs[0] in results:
            continue
        reading = readers.get(region.outputs[0], [])
        if (
            len(reading) == 1
            and reading[0].kind == "contraction"
            and any(load.buffer == region.outputs[0] for load in loads(*reading[0].steps[0].bodies))
        ):
            found.setdefault(in_graph(reading[0].outputs[0]), []).append(region)
    return found


def choose_prologues(
    regions: Sequence[Region],
    results: Sequence[str],
    predict: Predict,
    kept: MutableMapping[tuple[str, ...], bool] | None = None,
    policy: Policy = BY_MERGES,
) -> Prologues:
    """The maps that contractions compute since one kernel is predicted, or was measured, to be faster than all of them. Graphs without such maps cost
    nothing. `kept`: what was decided for another size of the model, by the results of the maps of each contraction and its own, decides without a
    prediction if it is about all of them about which the `policy` says nothing; otherwise what is decided here is added."""
    found = find_prologues(regions, results)
    kept = {} if kept is None else kept
    names = {reader: tuple(region.outputs[0] for region in maps) for reader, maps in found.items()}
    following = policy.as_kept(PROLOGUE, ((*own, reader) for reader, own in names.items()), kept)
    taken: set[str] = set()
    decisions: dict[str, MergeDecision] = {}

    def decide(reader: str, merged: bool, refused: str, why: str, ways: Ways | None = None) -> None:
        taken.update(names[reader] if merged else ())
        for region in found[reader]:
            text = f"{region.outputs[0]} {'is' if merged else refused} computed where its product reads it: {why}"
            decisions[region.nodes[-1].name] = MergeDecision((*names[reader], reader), merged, text, PROLOGUE, ways)

    asked = dict(found)
    for reader, own in names.items():
        if (*own, reader) in following:
            decide(reader, kept[*own, reader], "is not", "as for another size")
            del asked[reader]
    if not asked:
        return Prologues(frozenset(taken), MappingProxyType(decisions))
    every = frozenset(name for own in names.values() for name in own)
    before = {
        in_graph(timed.region.outputs[0]): timed for timed in predict(frozenset(), lambda region: in_graph(region.outputs[0]) in {*every, *found})
    }
    after = {in_graph(timed.region.outputs[0]): timed for timed in predict(every, lambda region: in_graph(region.outputs[0]) in found)}
    for reader, maps in asked.items():
        own = names[reader]
        kept[*own, reader] = False
        if reader not in after or not {*own, reader} <= before.keys():
            continue
        members = {node.name for region in (*maps, before[reader].region) for node in region.nodes}
        if not members <= {node.name for node in after[reader].region.nodes}:
            continue  # refused for another reason, which the region states
        decided = policy.about(PROLOGUE, (*own, reader))
        both = compared([after[reader]], [before[name] for name in (*own, reader)], decided, policy.predicted)
        kept[*own, reader] = both.taken
        decide(reader, both.taken, "would be slower if", both.text("in one kernel", "with a kernel of its own"), both.ways)
    return Prologues(frozenset(taken), MappingProxyType(decisions))
