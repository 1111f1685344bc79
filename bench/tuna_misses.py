"""Tuna's algorithm 2 as printed, over our loop trees, for comparison with our model in `bench.cache_misses`.

Each tensor has a reuse status, true at the leaves. If the footprint of a loop node fits the cache, the node moves its footprint. Otherwise a tensor
with reuse moves its footprint, and one without reuse the movement of an iteration times the trip count. The status becomes false if the tensor's own
footprint, or that of a loop that does not index the tensor, exceeds the cache. Footprints in lines; no associativity.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.analysis.cpu.footprints import distinct_lines
from tilewright.analysis.cpu.loop_tree import Leaf, Loop, LoopTree, Node, touched
from tilewright.hardware.machine import Cache


@dataclass(frozen=True)
class _Moved:
    """The lines of one tensor moved by a node, and the tensor's reuse status above that node."""

    lines: float
    reuse: bool


def tuna_misses(tree: LoopTree, cache: Cache) -> float:
    """Lines that the kernel moves into the cache."""
    return sum(moved.lines for moved in _visit(tree, tree.root, cache).values()) if tree.root is not None else 0.0


def _footprint(tree: LoopTree, node: Node, cache: Cache) -> dict[str, float]:
    result = {}
    for name, accesses in node.accesses.items():
        line = max(cache.line_bytes // tree.element_bytes[name], 1)
        result[name] = distinct_lines([touched(access, node.ranges, tree.sizes[name], line) for access in accesses], line)
    return result


def _visit(tree: LoopTree, node: Node, cache: Cache) -> dict[str, _Moved]:
    footprint = _footprint(tree, node, cache)
    capacity = cache.bytes // cache.line_bytes
    if isinstance(node, Leaf):
        return {name: _Moved(lines, True) for name, lines in footprint.items()}
    parts = [_visit(tree, part, cache) for part in ((node.body,) if isinstance(node, Loop) else node.parts)]
    fits = sum(footprint.values()) <= capacity
    result = {}
    for name, lines in footprint.items():
        inside = [part[name] for part in parts if name in part]
        reuse = all(moved.reuse for moved in inside)
        trips = node.count if isinstance(node, Loop) else 1
        moved = lines if fits or reuse else trips * sum(part.lines for part in inside)
        lost = lines > capacity or (isinstance(node, Loop) and not node.moves(name) and not fits)
        result[name] = _Moved(moved, reuse and not lost)
    return result
