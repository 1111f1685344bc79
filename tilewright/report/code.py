"""What was read of the code of a program's kernels, for people: a table of all kernels, and one region in detail. Nothing is run.

Binaries are read, so that artifacts can be explained too; cache misses, bank conflicts, sectors and traffic come from the kernel IR, which artifacts
do not store. What cannot be read is said with its reason, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.errors import UnsupportedOption
from tilewright.report.code_cpu import cpu_code, cpu_columns, cpu_lines, cpu_row
from tilewright.report.code_gpu import gpu_code, gpu_columns, gpu_lines, gpu_row
from tilewright.report.explanation import region_lines
from tilewright.report.reasons import UNREAD
from tilewright.runtime.executable import Image
from tilewright.runtime.loadable import LoadableRegion
from tilewright.runtime.plan import plan_of
from tilewright.text import folded, number_of, seconds_text, stacked

Progress = Callable[[int, int], None]
ARTIFACT = "an artifact does not store the loops of its kernels: explain the model for cache misses, conflicts, sectors and traffic"

LABEL = 13
"""Characters of the labels before the lines of a kernel."""
LONGER = "--code REGION shows what is known of a kernel that is not analysed, and follows it for longer"


@dataclass(frozen=True)
class KernelText:
    """One kernel: the cells of its row in a table, of which the last says what limits it, and all that is known of it as lines."""

    cells: Sequence[str]
    lines: Sequence[str]


def kernels_read(
    image: Image, threads: int, names: Sequence[str], progress: Progress, thorough: bool = False
) -> tuple[Sequence[str], Mapping[str, KernelText]]:
    """The headings of the cells, and what was read of these kernels by name. `thorough`: takes up to ten seconds to follow CPU code, not one."""
    machine = image.machine
    if machine.is_gpu:
        gpu = gpu_code(image, names, progress)
        return gpu_columns(), {name: KernelText(gpu_row(code), list(gpu_lines(code))) for name, code in gpu.items()}
    cpu = cpu_code(image, names, threads, progress, thorough)
    return cpu_columns(machine), {name: KernelText(cpu_row(code, machine), list(cpu_lines(code))) for name, code in cpu.items()}


def code_table(image: Image, threads: int, title: str, progress: Progress, width: int | None = None) -> Iterator[str]:
    """A line for each kernel, in the order of their first calls, with the numbers of the regions that call it. `threads`: of CPU code; the figures
    are those of one call on the busiest of them, on a GPU those of one launch. Lines longer than `width` are divided (`text.stacked`)."""
    machine, callers = image.machine, calling(image)
    columns, read = kernels_read(image, threads, list(callers), progress)
    rows = []
    for name, numbers in callers.items():
        *figures, limit = read[name].cells
        rows.append([_numbers(numbers), name, *figures, _predicted(image.program.regions[numbers[0] - 1]), limit])
    yield from folded(f"{title} for {machine.name} ({machine.architecture}): {number_of(len(rows), 'kernel')}, {_what(image, threads)}", width, 2)
    yield from stacked(["regions", "kernel", *columns[:-1], "predicted", columns[-1]], rows, ("kernel", "limit"), width, keys=2)
    if not machine.is_gpu and any(row[-1].startswith(UNREAD) for row in rows):
        yield from folded(LONGER, width, 2)
    if not image.kernels and rows:
        yield from folded(ARTIFACT, width, 2)


def _what(image: Image, threads: int) -> str:
    return "one launch" if image.machine.is_gpu else "one call" + (f", the busiest of {threads} threads" if threads > 1 else "")


def code_lines(image: Image, threads: int, region: str, progress: Progress, width: int | None = None) -> Iterator[str]:
    """One region: its explanation, and the code of each of its kernels in detail. Lines that would be longer than `width` are continued.

    Raises:
        UnsupportedOption: if `region` is neither the number nor the name of a region, nor the name of a kernel.
    """
    number = _chosen(image, region)
    chosen = image.program.regions[number - 1]
    yield from region_lines(image.program, plan_of(image.program, image.machine).rows[number - 1], width)
    names = list(dict.fromkeys(call.kernel for call in chosen.calls))
    _, details = kernels_read(image, threads, names, progress, thorough=True)
    for name in names:
        yield ""
        yield from folded(f"{name}: {_what(image, threads)}", width, 2)
        for line in details[name].lines:
            yield from folded(f"   {line}", width, 5 + (len(line) - len(line.lstrip()) or LABEL))
    if not image.kernels and names:
        yield ""
        yield from folded(ARTIFACT, width, 2)


def calling(image: Image) -> dict[str, list[int]]:
    """The numbers of the regions that call each kernel, from 1."""
    found: dict[str, list[int]] = {}
    for number, region in enumerate(image.program.regions, 1):
        for name in dict.fromkeys(call.kernel for call in region.calls):
            found.setdefault(name, []).append(number)
    return found


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:3])) + (f" +{len(numbers) - 3}" if len(numbers) > 3 else "")


def _predicted(region: LoadableRegion) -> str:
    calls = len(region.calls) * region.repeat
    return seconds_text(region.predicted_seconds) + (f" for {calls} calls" if calls > 1 else "")


def _chosen(image: Image, text: str) -> int:
    """The number of the region that is meant."""
    regions = image.program.regions
    if text.isascii() and text.isdigit() and 1 <= int(text) <= len(regions):
        return int(text)
    for number, region in enumerate(regions, 1):
        if text == region.name or any(text == call.kernel for call in region.calls):
            return number
    raise UnsupportedOption(f"--code: {text[:60]!r} is no region or kernel", f"give a number up to {len(regions)}, or a name that explain prints")
