"""What was read of the code of CPU kernels: loops, instructions, vector registers, spills, cache misses, cycles and limits, as cells and as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.analysis.cpu.assembly import Assembly, disassembled, parse
from tilewright.analysis.cpu.caches import CacheMisses, cache_misses
from tilewright.analysis.cpu.instructions import InstructionCounts
from tilewright.analysis.cpu.reading import KernelReading, LoopReading, Vectors, loops_of, read
from tilewright.hardware.machine import Machine
from tilewright.report.reasons import UNREAD, attempted
from tilewright.runtime.executable import Image
from tilewright.selection.code_score import COMPARISONS, terms_of
from tilewright.system.scratch import Scratch
from tilewright.text import counts_text, percent, scaled, seconds_text

PATIENCE, THOROUGH = 3, 30
"""How many times as many comparisons of iterations as a choice allows are allowed for a kernel in a table, and in a detailed report."""
SMALL = 0.005
"""A loop with less than this fraction of a kernel's cycles is left out, unless it contains a larger one."""
NAMES = {"store": "stores", "multiply": "products", "arithmetic": "other arithmetic", "fma": "multiply-adds", "move": "moves", "load": "loads",
         "integer": "integers", "branch": "branches", "add": "additions"}  # fmt: skip
"""Names of `analysis.cpu.instructions.CLASSES`, in the order in which classes with equal counts are listed."""


@dataclass(frozen=True)
class CpuCode:
    """What is known of one kernel. Without `reading` the reason is `unread`, and `loops` are those of the code, with unknown trip counts. `misses` is
    None without the kernel IR. `terms` are seconds (`code_score`)."""

    reading: KernelReading | None
    unread: str
    loops: Sequence[LoopReading]
    misses: CacheMisses | None
    terms: Mapping[str, float]


def cpu_code(image: Image, names: Iterable[str], threads: int, progress: Callable[[int, int], None], thorough: bool = False) -> dict[str, CpuCode]:
    """The code of some kernels by name, for the busiest of `threads` threads. `thorough`: takes up to ten seconds to follow a kernel, not one."""
    comparisons = COMPARISONS * (THOROUGH if thorough else PATIENCE)
    contents = {entry: binary.content for binary in image.binaries for entry in binary.entries}
    wanted = list(names)
    found = {}
    with Scratch() as folder:
        for number, name in enumerate(wanted):
            progress(number, len(wanted))
            found[name] = _code(image, name, contents[name], folder, threads, comparisons)
    progress(len(wanted), len(wanted))
    return found


def _code(image: Image, name: str, content: bytes, folder: Path, threads: int, comparisons: int) -> CpuCode:
    machine, body = image.machine, image.kernels.get(name)
    misses = attempted(name, lambda: cache_misses(body, machine, threads))[0] if body is not None else None

    def assembly() -> Assembly:
        binary = folder / "kernel.so"
        binary.write_bytes(content)
        return parse(disassembled(binary, machine), machine.architecture)

    code, unread = attempted(name, assembly)
    if code is None:
        return CpuCode(None, unread, (), misses, {})
    reading, unread = attempted(name, lambda: read(image.program.kernels[name], code, machine, threads, comparisons))
    if reading is None:
        return CpuCode(None, unread, attempted(name, lambda: loops_of(code, machine, {}))[0] or (), misses, {})
    terms = terms_of(reading, misses, threads)
    used = {name: seconds for name, seconds in terms.items() if name != "dispatch" or reading.is_parallel}
    return CpuCode(reading, "", reading.loops, misses, used)


# One row


def cpu_columns(machine: Machine) -> list[str]:
    """Headings of the cells of `cpu_row`."""
    return ["instructions", "fma", "loads", "stores", "spills", "vectors", *(f"into L{cache.level}" for cache in machine.caches), "cycles", "limit"]


def cpu_row(code: CpuCode, machine: Machine) -> list[str]:
    """Executed instructions and the fractions of them that multiply and add, load, store, and access the stack; vector registers and their bits;
    bytes brought into each cache level; cycles; what limits the kernel, and the fraction of cycles if that is in its pipelines."""
    moved = [scaled(code.misses.level(cache.level).bytes_moved, "B") if code.misses is not None else "-" for cache in machine.caches]
    if code.reading is None:
        return ["-"] * 6 + moved + ["-", f"{UNREAD}: {code.unread}"]
    counts, cycles = code.reading.counts, code.reading.cycles
    shares = [percent(part, counts.total) for part in (counts.fma, counts.loads, counts.stores, counts.spills)]
    vectors = f"{code.reading.vectors.registers} x {code.reading.vectors.bits}"
    return [scaled(counts.total, ""), *shares, vectors, *moved, scaled(cycles.steady + cycles.starts, ""), limit(code)]


def limit(code: CpuCode) -> str:
    """The largest of the times in the pipelines, in the transfer from each cache level or memory, and of starting the threads."""
    times = {"pipeline": code.terms["pipeline"] + code.terms["starts"]}
    times |= {name: seconds for name, seconds in code.terms.items() if name.startswith("level") or name in ("memory", "dispatch")}
    binding = max(times, key=lambda name: times[name])
    if binding != "pipeline":
        return binding
    return next(_shares(code.reading.limits), "pipeline") if code.reading is not None else ""


def _shares(limits: Mapping[str, float]) -> Iterator[str]:
    """Limits with their percentages of the cycles, largest first."""
    total = sum(limits.values()) or 1.0
    for name, cycles in sorted(limits.items(), key=lambda item: -item[1]):
        if cycles >= SMALL * total:
            yield f"{name} {percent(cycles, total)}"


# One kernel in detail


def cpu_lines(code: CpuCode) -> Iterator[str]:
    """Everything that is known of one kernel."""
    if code.reading is not None:
        counts, cycles = code.reading.counts, code.reading.cycles
        yield f"executed     {counts.total:,.0f} instructions: {_classes(counts)}"
        yield f"memory       {counts.loads:,.0f} loads, {counts.stores:,.0f} stores; {counts.spills:,.0f} of them access the stack"
        if counts.undecided:
            yield f"undecided    {counts.undecided:,.0f} branches depend on data; both sides count half"
        yield f"vectors      {_vectors(code.reading.vectors)}"
        yield f"cycles       {cycles.steady + cycles.starts:,.0f}, of which first iterations {cycles.starts:,.0f}"
        yield f"pipeline     {', '.join(_shares(code.reading.limits))}"
        terms = sorted(code.terms.items(), key=lambda item: -item[1])
        yield f"times        {', '.join(f'{name} {seconds_text(seconds)}' for name, seconds in terms if seconds)}"
        yield f"limit        {limit(code)}"
    else:
        yield f"{UNREAD}: {code.unread}"
    if code.misses is not None:
        sizes = ", ".join(f"{scaled(level.bytes_moved, 'B')} into L{level.level}" for level in code.misses.levels)
        yield f"misses       {sizes}"
        yield from (f"  {line}" for line in str(code.misses).splitlines())
    yield from _loops(code)


def _loops(code: CpuCode) -> Iterator[str]:
    spent = code.reading.cycles.steady if code.reading is not None else 0.0
    shown = [loop for number, loop in enumerate(code.loops) if _largest(code.loops, number) >= SMALL * spent]
    left_out = len(code.loops) - len(shown)
    note = f" ({left_out} with less than {100 * SMALL:.1g} % of the cycles left out)" if left_out else ""
    yield f"loops        of each: instructions of one iteration, without those of inner loops{note}" if code.loops else "loops        none"
    for function in dict.fromkeys(loop.function for loop in shown):
        yield f"  {function}"
        for loop in shown:
            if loop.function == function:
                yield f"    {'  ' * loop.depth}{_loop(loop, spent)}"


def _largest(loops: Sequence[LoopReading], number: int) -> float:
    """The most cycles of a loop or of one of those inside it."""
    end = next((at for at in range(number + 1, len(loops)) if loops[at].depth <= loops[number].depth), len(loops))
    return max(loop.cycles * loop.iterations for loop in loops[number:end])


def _loop(loop: LoopReading, spent: float) -> str:
    trips = f"{loop.trips:.4g} iterations, entered {loop.entries:,.0f} times" if loop.iterations else "unknown iterations"
    share = f", {percent(loop.cycles * loop.iterations, spent)} of the cycles" if spent else ""
    limits = max(loop.limits, key=lambda name: loop.limits[name], default="")
    own = f"{_classes(loop.counts)}; {_vectors(loop.vectors)}; {loop.cycles:.4g} cycles, {limits}"
    return f"{trips}{share}: {own}" if loop.is_innermost else f"{trips}{share}"


def _classes(counts: InstructionCounts) -> str:
    """Instructions by class, most frequent first."""
    return counts_text({name: getattr(counts, kind) for kind, name in NAMES.items()})


def _vectors(vectors: Vectors) -> str:
    return f"{vectors.registers} vector registers of {vectors.bits} bits" if vectors.registers else "no vector registers"
