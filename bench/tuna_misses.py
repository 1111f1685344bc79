"""Tuna's algorithm 2 as the paper has it, over our loop trees: what `bench.cache_misses` compares our model with.

Each tensor has a reuse status, true at the leaves. Where what a loop node touches fits in the cache, it moves its footprint. Else a tensor with
reuse moves its footprint, one without the movement of an iteration times the trips. The status becomes false where the tensor's own footprint
exceeds the cache, or that of a loop that does not index the tensor does. Footprints in lines; no associativity.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.analysis.cpu.footprints import distinct_lines
from tilewright.analysis.cpu.loop_tree import Leaf, Loop, LoopTree, Node, touched
from tilewright.hardware.machine import Cache


@dataclass(frozen=True)
class _Moved:
    """Of one tensor: lines moved by a node, and its reuse status above that node."""

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
