"""Layered drawings of acyclic graphs: layers from top to bottom, few crossings, short edges.

Source: K. Sugiyama, S. Tagawa and M. Toda, "Methods for Visual Understanding of Hierarchical System Structures", 1981: layers by longest path,
points in the layers that an edge passes, order within layers by barycentres. All edges of one node share its points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean

WIDTH, HEIGHT = 160, 44
"""Of a node's box, in pixels."""
POINT, GAP, RISE = 6, 14, 30
"""Width of a point that an edge passes; least distance of neighbours in a layer, and of layers."""
SWEEPS = 8
STEADY = 0.9
"""Factor of distances from the middle in every pass over the layers, so that long networks do not wander off to one side."""

Place = tuple[float, float]
"""Centre from left, and top, in pixels."""


@dataclass(frozen=True)
class Drawing:
    """layers: the names of the nodes in each, from the left. segments: (from, to, source node) of each piece of an edge, from the bottom of a layer
    to the top of the next, or through a layer."""

    places: Mapping[str, Place]
    layers: tuple[tuple[str, ...], ...]
    segments: tuple[tuple[Place, Place, str], ...]
    width: float
    height: float


_Item = tuple[str, int]
"""A node in its own layer, or the point in a later layer that its edges pass."""


def drawn(nodes: Sequence[str], edges: Sequence[tuple[str, str]], points: Set[str] = frozenset()) -> Drawing:
    """The drawing of a graph. `nodes` are in topological order, and so are the ends of each edge; those in `points` are points and not boxes."""
    layer = _layers(nodes, edges)
    furthest = dict(layer)
    for source, target in edges:
        furthest[source] = max(furthest[source], layer[target] - 1)
    rows: list[list[_Item]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for name in nodes:
        for depth in range(layer[name], furthest[name] + 1):
            rows[depth].append((name, depth))
    pairs = {((name, depth), (name, depth + 1)) for name in nodes for depth in range(layer[name], furthest[name])}
    pairs |= {((source, layer[target] - 1), (target, layer[target])) for source, target in edges}
    above: dict[_Item, list[_Item]] = {item: [] for row in rows for item in row}
    below: dict[_Item, list[_Item]] = {item: [] for row in rows for item in row}
    for upper, lower in sorted(pairs):
        above[lower].append(upper)
        below[upper].append(lower)
    _order(rows, above, below)
    widths = {(name, depth): WIDTH if layer[name] == depth and name not in points else POINT for row in rows for name, depth in row}
    centres = _centres(rows, above, below, widths)
    left = min((centre - widths[item] / 2 for item, centre in centres.items()), default=0.0)
    right = max((centre + widths[item] / 2 for item, centre in centres.items()), default=0.0)

    def at(item: _Item, bottom: bool) -> Place:
        return centres[item] - left, item[1] * (HEIGHT + RISE) + (HEIGHT if bottom else 0)

    segments = [(at(upper, True), at(lower, False), upper[0]) for upper, lower in sorted(pairs)]
    segments += [(at(item, False), at(item, True), item[0]) for item, width in widths.items() if width == POINT]
    return Drawing(
        {name: at((name, layer[name]), False) for name in nodes},
        tuple(tuple(name for name, depth in row if layer[name] == depth) for row in rows),
        tuple(segments),
        right - left,
        max(len(rows) * (HEIGHT + RISE) - RISE, 0),
    )


def _layers(nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Each node right above the first of its readers; those without readers at the length of the longest path to them. The edges of one source share
    their points, so that late branches have fewer of them than early ones."""
    before: dict[str, list[str]] = {name: [] for name in nodes}
    after: dict[str, list[str]] = {name: [] for name in nodes}
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    layer: dict[str, int] = {}
    for name in nodes:
        layer[name] = 1 + max((layer[source] for source in before[name]), default=-1)
    for name in reversed(nodes):
        if after[name]:
            layer[name] = min(layer[target] for target in after[name]) - 1
    return layer


def _order(rows: list[list[_Item]], above: Mapping[_Item, list[_Item]], below: Mapping[_Item, list[_Item]]) -> None:
    """Sorts each layer by the mean position of neighbours, in turns above and below."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for index in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            fixed = {item: place for place, item in enumerate(rows[index - 1 if down else index + 1])}
            neighbours = above if down else below
            own = {item: place for place, item in enumerate(rows[index])}
            means = {item: fmean(fixed[other] for other in neighbours[item]) if neighbours[item] else own[item] for item in rows[index]}
            rows[index].sort(key=lambda item: means[item])


def _centres(
    rows: Sequence[Sequence[_Item]], above: Mapping[_Item, list[_Item]], below: Mapping[_Item, list[_Item]], widths: Mapping[_Item, float]
) -> dict[_Item, float]:
    """The centres of all items from the left: near those of their neighbours, above, below, and at last both, in the order of the layer and without
    overlaps."""
    centres: dict[_Item, float] = {item: 0.0 for row in rows for item in row}
    both = {item: [*above[item], *below[item]] for item in centres}
    for sweep in range(3 * SWEEPS):
        neighbours = both if sweep >= 2 * SWEEPS else below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            wanted = [STEADY * fmean(centres[other] for other in neighbours[item] or [item]) for item in row]
            apart = [(widths[a] + widths[b]) / 2 + GAP for a, b in zip(row, row[1:], strict=False)]
            rightmost, leftmost = list(wanted), list(wanted)
            for i, distance in enumerate(apart):
                rightmost[i + 1] = max(rightmost[i + 1], rightmost[i] + distance)
            for i in range(len(apart) - 1, -1, -1):
                leftmost[i] = min(leftmost[i], leftmost[i + 1] - apart[i])
            centres.update({item: (a + b) / 2 for item, a, b in zip(row, leftmost, rightmost, strict=True)})
    return centres
