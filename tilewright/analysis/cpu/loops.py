"""Loops of a control-flow graph: dominators, natural loops by back edges, their nesting, and post-dominators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header, all its blocks, the sources of its back edges, and the header of the enclosing loop (None: outermost)."""

    header: int
    blocks: frozenset[int]
    latches: tuple[int, ...]
    parent: int | None = None


def order_of(entry: int, successors: Mapping[int, Sequence[int]]) -> list[int]:
    """The reachable blocks, in reverse post-order."""
    done: list[int] = []
    seen = {entry}
    stack = [(entry, iter(successors[entry]))]
    while stack:
        block, following = stack[-1]
        for target in following:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(successors[target])))
                break
        else:
            done.append(block)
            stack.pop()
    return done[::-1]


def dominators(entry: int, successors: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Immediate dominator of every reachable block; the entry's is itself (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm)."""
    order = order_of(entry, successors)
    number = {block: position for position, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for target in successors[block]:
            before[target].append(block)
    immediate = {entry: entry}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [p for p in before[block] if p in immediate]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    while number[new] > number[other]:
                        new = immediate[new]
                    while number[other] > number[new]:
                        other = immediate[other]
            if immediate.get(block) != new:
                immediate[block] = new
                changed = True
    return immediate


def dominates(above: int, block: int, immediate: Mapping[int, int]) -> bool:
    while block != above and immediate[block] != block:
        block = immediate[block]
    return block == above


def natural_loops(entry: int, successors: Mapping[int, Sequence[int]]) -> dict[int, Loop]:
    """Loops by header; all back edges to one header form one loop. Cycles without a dominating header are not included."""
    immediate = dominators(entry, successors)
    before: dict[int, list[int]] = {block: [] for block in immediate}
    for block in immediate:
        for target in successors[block]:
            before[target].append(block)
    latches: dict[int, list[int]] = {}
    for block in immediate:
        for target in successors[block]:
            if dominates(target, block, immediate):
                latches.setdefault(target, []).append(block)
    found: dict[int, frozenset[int]] = {}
    for header, sources in latches.items():
        inside, stack = {header}, list(sources)
        while stack:
            block = stack.pop()
            if block not in inside:
                inside.add(block)
                stack.extend(before[block])
        found[header] = frozenset(inside)
    loops = {}
    for header, blocks in found.items():
        around = [other for other, theirs in found.items() if other != header and header in theirs]
        parent = min(around, key=lambda other: len(found[other])) if around else None
        loops[header] = Loop(header, blocks, tuple(sorted(latches[header])), parent)
    return loops


EXIT = -1
"""Number of the virtual block after every return, in `post_dominators`."""


def post_dominators(entry: int, successors: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Immediate post-dominator of every reachable block; `EXIT` for the last ones."""
    reached = order_of(entry, successors)
    reverse: dict[int, list[int]] = {block: [] for block in [EXIT, *reached]}
    for block in reached:
        for target in successors[block] or (EXIT,):
            reverse[target].append(block)
    return dominators(EXIT, reverse)
