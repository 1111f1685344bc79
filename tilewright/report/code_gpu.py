"""What was read of the code of GPU kernels: resources, occupancy, instructions, conflicts, sectors, traffic and limits, as cells and as lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

from tilewright import settings
from tilewright.analysis.gpu.reading import KernelReading, LoopReading, Occupancy, Translation, busy_cycles, occupancy_of, read, translated
from tilewright.analysis.gpu.warps import SECTOR_BYTES
from tilewright.report.reasons import UNREAD, attempted
from tilewright.runtime.executable import Image
from tilewright.runtime.loadable import LoadableKernel
from tilewright.text import counts_text, percent, scaled
from tilewright.toolchain.binary import Resources, SourceFile

ELSE = "the binary is other code than NVRTC now makes of its source, as can happen from one translation to the next: these figures are of the source"


@dataclass(frozen=True)
class GpuCode:
    """What is known of one kernel. Without `resources`, or without `reading`, the reason is `unread`; `unmoved` is the reason if the kernel IR is
    known and its accesses are not. `differs`: its source now gives other code than its binary; NVRTC on
    several threads does not always make the same of one source, though code of the same meaning."""

    kernel: LoadableKernel
    resources: Resources | None
    occupancy: Occupancy | None
    reading: KernelReading | None
    unread: str = ""
    unmoved: str = ""
    differs: bool = False


def gpu_code(image: Image, names: Iterable[str], progress: Callable[[int, int], None]) -> dict[str, GpuCode]:
    """The code of some kernels by name. NVRTC translates their sources again for the PTX, several at a time."""
    wanted = list(names)
    sources = {name: _source(image, name) for name in wanted}
    found = {}
    pool = ThreadPoolExecutor(settings.available_cores())
    try:
        made = {name: pool.submit(attempted, name, lambda source=source: translated(source, image.machine)) for name, source in sources.items()}
        for number, name in enumerate(wanted):
            progress(number, len(wanted))
            found[name] = _code(image, name, *made[name].result())
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption waits for no translation that has not begun
    progress(len(wanted), len(wanted))
    return found


def _source(image: Image, name: str) -> SourceFile:
    """The text of a kernel; artifacts put a number before the name of a file."""
    text = next((text for file, text in image.sources.items() if file.endswith(f"{name}.cu")), "")
    return SourceFile(name, text, "cuda", (name,))


def _code(image: Image, name: str, made: Translation | None, unread: str) -> GpuCode:
    machine, kernel, body = image.machine, image.program.kernels[name], image.kernels.get(name)
    if made is None or name not in made.functions or name not in made.resources:
        return GpuCode(kernel, None, None, None, unread or "its source is not in the artifact")
    function, resources = made.functions[name], made.resources[name]
    differs = all(binary.content != made.cubin for binary in image.binaries if name in binary.entries)
    reading, unmoved = attempted(name, lambda: read(kernel, function, resources, machine, body))
    if reading is None and body is not None:
        reading, unread = attempted(name, lambda: read(kernel, function, resources, machine))
    return GpuCode(kernel, resources, occupancy_of(kernel, resources, machine), reading, unread or unmoved, unmoved, differs)


# One row


def gpu_columns() -> list[str]:
    """Headings of the cells of `gpu_row`."""
    resources = ["grid x block", "registers", "spills", "shared", "blocks", "waves"]
    return [*resources, "instructions", "fma", "conflicts", "sectors", "L2", "memory", "limit"]


def gpu_row(code: GpuCode) -> list[str]:
    """Blocks and threads; registers, bytes of spills per thread, shared memory per block; blocks per processor and what limits them; waves; executed
    warp instructions, and the fraction that multiply and add; wavefronts of shared memory over those without bank conflicts; sectors for each request
    to global memory; bytes read from level 2 and from memory; what limits the kernel, and its cycles on the busiest processor."""
    cells = [f"{prod(code.kernel.grid):,} x {prod(code.kernel.block)}"]
    if code.resources is None or code.occupancy is None:
        return [*cells, *["-"] * 11, f"{UNREAD}: {code.unread}"]
    resources, occupancy = code.resources, code.occupancy
    cells += [str(resources.registers), str(resources.spill_bytes), scaled(occupancy.shared_bytes, "B")]
    cells += [f"{occupancy.resident} by {occupancy.limits[0]}" if occupancy.limits else str(occupancy.resident), str(occupancy.waves)]
    if code.reading is None:
        return [*cells, *["-"] * 6, f"{UNREAD}: {code.unread}"]
    executed = sum(code.reading.instructions.values())
    cells += [scaled(executed, ""), percent(code.reading.instructions.get("fma", 0), executed)]
    movement = code.reading.movement
    if movement is None:
        return [*cells, *["-"] * 4, _limit(code.reading)]
    found, traffic = movement.transactions, movement.traffic
    cells += [_ratio(found.shared_loads + found.shared_stores, found.ideal_loads + found.ideal_stores)]
    cells += [_ratio(found.global_loads + found.global_stores, found.load_requests + found.store_requests)]
    return [*cells, scaled(traffic.level_2 * SECTOR_BYTES, "B"), scaled(traffic.memory * SECTOR_BYTES, "B"), _limit(code.reading)]


def _ratio(amount: float, base: float) -> str:
    return f"{amount / base:.3g}" if base else "-"


def _limit(reading: KernelReading) -> str:
    cycles = busy_cycles(reading)
    name = max(cycles, key=lambda name: cycles[name])
    return f"{name}, {cycles[name]:,.0f} cycles"


# One kernel in detail


def gpu_lines(code: GpuCode) -> Iterator[str]:
    """Everything that is known of one kernel."""
    grid, block = (" x ".join(map(str, extents)) for extents in (code.kernel.grid, code.kernel.block))
    yield f"launch       {grid} blocks of {block} threads"
    if code.differs and code.resources is not None:
        yield f"note         {ELSE}"
    if code.resources is not None and code.occupancy is not None:
        yield from _resources(code.resources, code.occupancy)
    if code.reading is None:
        yield f"{UNREAD}: {code.unread}"
        return
    reading = code.reading
    executed = reading.instructions
    yield f"executed     {sum(executed.values()):,.0f} warp instructions of PTX: {counts_text(executed)}"
    yield from _movement(code)
    cycles = sorted(busy_cycles(reading).items(), key=lambda item: -item[1])
    yield f"cycles       {', '.join(f'{name} {count:,.0f}' for name, count in cycles)}, on the busiest processor, as if nothing else took time"
    yield f"latency      one warp takes {reading.alone:,.0f} cycles alone, and {reading.waits:,.0f} waiting for memory"
    yield f"limit        {cycles[0][0]}"
    yield f"loops        of each: instructions of one iteration, without those of inner loops{'' if reading.loops else ': none'}"
    for loop in reading.loops:
        yield f"  {'  ' * loop.depth}{_loop(loop)}"


def _resources(resources: Resources, occupancy: Occupancy) -> Iterator[str]:
    yield f"registers    {resources.registers} for each thread; {resources.spill_bytes} B of spill code, {resources.stack_bytes} B of local memory"
    yield f"shared       {occupancy.shared_bytes:,} B for each block"
    admitted = ", ".join(f"{name} {blocks}" for name, blocks in occupancy.admitted.items())
    yield f"occupancy    {occupancy.resident} blocks on each processor (limits: {admitted}); waves of blocks: {occupancy.waves}"


def _movement(code: GpuCode) -> Iterator[str]:
    movement = code.reading.movement if code.reading is not None else None
    if movement is None:
        if code.unmoved:
            yield f"memory       {UNREAD}: {code.unmoved}"
        return
    found, traffic = movement.transactions, movement.traffic
    for name, wavefronts, ideal in (("loads", found.shared_loads, found.ideal_loads), ("stores", found.shared_stores, found.ideal_stores)):
        if ideal:
            times = f"{ideal:,.0f} without conflicts ({wavefronts / ideal:.3g} times)"
            yield f"conflicts    {name}: {wavefronts:,.0f} wavefronts of shared memory, {times}"
    for name, sectors, requests in (("loads", found.global_loads, found.load_requests), ("stores", found.global_stores, found.store_requests)):
        if requests:
            yield f"sectors      {name}: {sectors:,.0f} of 32 B for {requests:,.0f} requests to global memory ({sectors / requests:.3g} for each)"
    sizes = {"asked for by warps": traffic.asked, "from level 2": traffic.level_2, "from memory": traffic.memory, "written": traffic.written}
    moved = [f"{scaled(sectors * SECTOR_BYTES, 'B')} {name}" for name, sectors in sizes.items()]
    yield f"traffic      {', '.join(moved)}; level 2 starts cold"


def _loop(loop: LoopReading) -> str:
    trips = f"{loop.trips:.4g} iterations, {loop.iterations:.4g} of a thread"
    return f"{trips}: {counts_text(loop.instructions)}" if loop.is_innermost else trips
