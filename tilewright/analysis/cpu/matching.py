"""Loops of a kernel matched to those of its assembly, and the executed instructions of each (Tuna, algorithm 1).

How often each block of the assembly is executed follows from the assembly itself (`loops_execution`), so the counts need no match. The match says
which loop of the kernel an assembly loop is: top down, an inner loop of the assembly is that loop inside of its parent's match that is entered as
often and runs as many iterations, or as many as unrolling or vector lanes leave. Loops that the compiler unrolled whole, or that run only once, have
no loop in the assembly; one that it divided (vectors and a remainder, a version for buffers that overlap) has several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log2

from tilewright.analysis.cpu.assembly import Assembly, parse
from tilewright.analysis.cpu.instructions import InstructionCounts, total
from tilewright.analysis.cpu.loops import Loop, natural_loops
from tilewright.analysis.cpu.loops_execution import BUFFER_DISTANCE, BUFFERS, UNDECIDED, Execution
from tilewright.codegen.c import perfect_depth
from tilewright.ir.expr import Const
from tilewright.ir.kernel import Block, For, If, Kernel, Statement


def executions(kernel: Kernel, assembly: Assembly, threads: int = 1, thread: int = 0, step: int = 0, comparisons: float = inf) -> dict[object, float]:
    """How often a thread executes each block (by its number), enters each loop (("entries", header)), and meets branches that depend on data
    (`UNDECIDED`); `step` is the value of every scalar parameter. Thread 0 executes what is not parallel. `comparisons`: see `Execution`.

    Raises:
        Unanalysable: where the flow of control cannot be followed.
    """
    addresses = [BUFFERS + BUFFER_DISTANCE * (number + 1) for number in range(len(kernel.parameters))]
    found = Execution(assembly, threads, thread, comparisons=comparisons).run(kernel.name, addresses, [step] * len(kernel.scalars))
    if thread == 0:
        return dict(found)
    return {key: count for key, count in found.items() if not isinstance(key, int) or "._omp_fn." in assembly.blocks[key].function}


def executed(kernel: Kernel, assembly: Assembly | str, architecture: str = "", threads: int = 1, thread: int | None = None) -> InstructionCounts:
    """Instructions executed by one call of a kernel, in its own functions (without those of libraries), by class.

    `assembly` is what `assembly.disassembled` gives, or that parsed; the counts are of all `threads` together, or of one `thread`.

    Raises:
        Unanalysable: where the flow of control cannot be followed.
    """
    code = parse(assembly, architecture) if isinstance(assembly, str) else assembly
    result = InstructionCounts()
    each = {block.number: block.counts for block in code.blocks}
    for number in range(threads) if thread is None else (thread,):
        found = executions(kernel, code, threads, number)
        blocks = {key: count for key, count in found.items() if isinstance(key, int)}
        result = result + total(blocks, each, found.get(UNDECIDED, 0))
    return result


@dataclass(frozen=True)
class KernelLoop:
    """A loop of the kernel, or parallel loops that are divided among threads as one: how often it is entered, and all iterations of a call (at most,
    where an extent or a guard depends on a variable)."""

    variables: tuple[str, ...]
    entries: int
    iterations: int
    inner: tuple[KernelLoop, ...]


@dataclass(frozen=True)
class MatchedLoop:
    """A loop of the assembly that is executed: the variables of the kernel's loop that it is (empty: of none), how often it is entered, its header's
    executions, and what its blocks execute in all, without the loops inside."""

    variables: tuple[str, ...]
    function: str
    header: int
    depth: int
    entries: float
    iterations: float
    body: InstructionCounts


def kernel_loops(root: Statement, entries: int = 1) -> tuple[KernelLoop, ...]:
    """The loops of a statement that begin outermost."""
    if isinstance(root, Block):
        return tuple(loop for child in root.statements for loop in kernel_loops(child, entries))
    if isinstance(root, If):
        return kernel_loops(root.then, entries) + (kernel_loops(root.otherwise, entries) if root.otherwise is not None else ())
    if not isinstance(root, For):
        return ()
    names, count, body = [root.variable.name], _extent(root), root.body
    for _ in range(perfect_depth(root) - 1 if root.kind == "parallel" else 0):
        inner = next(loop for loop in (body.statements if isinstance(body, Block) else (body,)) if isinstance(loop, For))
        names.append(inner.variable.name)
        count, body = count * _extent(inner), inner.body
    return (KernelLoop(tuple(names), entries, entries * count, kernel_loops(body, entries * count)),)


def _extent(loop: For) -> int:
    return int(loop.extent.value) if isinstance(loop.extent, Const) else loop.variable.extent or 1


def _below(loops: tuple[KernelLoop, ...]) -> Iterator[KernelLoop]:
    for loop in loops:
        yield loop
        yield from _below(loop.inner)


def _distance(loop: KernelLoop, entries: float, iterations: float) -> float:
    """How badly an assembly loop fits: entries and trips that differ, in powers of two; fewer iterations are what unrolling and lanes do."""
    trips, wanted = iterations / entries, loop.iterations / loop.entries
    factor = wanted / trips
    unrolled = 0.25 * log2(factor) if factor >= 1 else -4 * log2(factor)
    whole = abs(factor - round(factor)) < 0.01 * factor
    return abs(log2(loop.entries / entries)) + unrolled + (0 if whole else 0.5)


def matched(kernel: Kernel, assembly: Assembly) -> list[MatchedLoop]:
    """The loops of the assembly that one thread executes, outer ones first, each with the kernel's loop that it is.

    Raises:
        Unanalysable: where the flow of control cannot be followed.
    """
    found = executions(kernel, assembly)
    own = kernel_loops(kernel.body)
    result: list[MatchedLoop] = []
    each = {block.number: block.counts for block in assembly.blocks}
    for function, entry in assembly.entries.items():
        if not found.get(entry):
            continue
        loops = natural_loops(entry, {block.number: block.successors for block in assembly.of(function)})
        _descend(None, own, loops, found, each, function, 0, result)
    return result


def _descend(
    parent: int | None, candidates: tuple[KernelLoop, ...], loops: Mapping[int, Loop], found: Mapping[object, float],
    each: Mapping[int, InstructionCounts], function: str, depth: int, result: list[MatchedLoop],
) -> None:  # fmt: skip
    for header, loop in sorted(loops.items()):
        entries = found.get(("entries", header), 0)
        if loop.parent != parent or not entries:
            continue
        iterations = found[header]
        possible = list(_below(candidates))
        best = min(possible, key=lambda one: _distance(one, entries, iterations), default=None)
        inner = frozenset[int]().union(*(other.blocks for other in loops.values() if other.parent == header))
        body = total({block: found[block] for block in loop.blocks - inner if block in found}, each)
        variables = best.variables if best is not None else ()
        result.append(MatchedLoop(variables, function, header, depth, entries, iterations, body))
        _descend(header, best.inner if best is not None else (), loops, found, each, function, depth + 1, result)
