"""Loops of a kernel matched to those of its assembly, and the executed instructions of each (Tuna, algorithm 1)."""

from __future__ import annotations

from tilewright.analysis.assembly import Assembly, parse
from tilewright.analysis.instructions import InstructionCounts, total
from tilewright.analysis.loops_execution import BUFFER_DISTANCE, BUFFERS, UNDECIDED, Execution
from tilewright.ir.kernel import Kernel


def executions(kernel: Kernel, assembly: Assembly, threads: int = 1, thread: int = 0, step: int = 0) -> dict[object, float]:
    """How often a thread executes each block (by its number), enters each loop (("entries", header)), and meets branches that depend on data
    (`UNDECIDED`); `step` is the value of every scalar parameter. Thread 0 executes what is not parallel."""
    addresses = [BUFFERS + BUFFER_DISTANCE * (number + 1) for number in range(len(kernel.parameters))]
    found = Execution(assembly, threads, thread).run(kernel.name, addresses, [step] * len(kernel.scalars))
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
