"""The explanation of a compiled program as text: totals, every region with its reasons, nodes that run through PyTorch, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright.frontend.imported import unsupported
from tilewright.hardware.calibration import name_in_use
from tilewright.ir.graph import place_text
from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall
from tilewright.ir.space import SpaceCounts
from tilewright.report.units import scaled, seconds_text
from tilewright.report.work import program_work, region_work
from tilewright.runtime.executable import Image
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion
from tilewright.runtime.memory_plan import CPU_ALIGNMENT, GPU_ALIGNMENT, plan_memory
from tilewright.selection.bounds import DEEPCUTS

DIMENSION_LETTERS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


def explanation(image: Image, name: str = "model") -> str:
    """The full report on a program; needs neither its machine nor a call."""
    lines = [*_totals(image, name), ""]
    for number, region in enumerate(image.program.regions, 1):
        lines += [*region_lines(image.program, region, number), ""]
    lines += [*_through_torch(image.program), "", *_memory(image)]
    return "\n".join(lines)


def search_lines(image: Image, name: str = "model") -> Iterator[str]:
    """The merges of operators that were considered, in order, with the predicted times of both ways."""
    search = image.program.search
    taken = sum(text.startswith("taken") for text in search)
    yield f"{name} for {image.machine.name}: {len(search)} merges of regions considered, {taken} taken"
    for number, text in enumerate(search, 1):
        yield f"{number:>5}. {text}"
    yield "what joins an operator as part of its kernel (element by element, rows, attention) is among the reasons of each region"


def _totals(image: Image, name: str) -> Iterator[str]:
    program, machine = image.program, image.machine
    work = program_work(program)
    predicted = sum(region.predicted_seconds for region in program.regions)
    without = sum(1 for region in program.regions if (region.calls or region.library is not None) and not region.predicted_seconds)
    calls = sum(len(region.calls) * region.repeat for region in program.regions)
    yield f"{name} for {machine.name} ({machine.architecture}): {len(program.regions)} regions, {len(program.kernels)} kernels, {calls} kernel calls"
    moved = scaled(work.bytes_read + work.bytes_written, "B")
    yield f"  {scaled(work.flops, 'flop')}, {moved} read and written by the regions"
    if calibration := name_in_use(machine) if machine.is_gpu else machine.calibration:
        yield f"  {'order of candidates' if machine.is_gpu else 'facts of the machine'} measured by tilewright calibrate: {calibration}"
    note = f" ({without} regions have no prediction and count as nothing)" if without and predicted else ""
    yield f"  predicted {seconds_text(predicted)}{note}"


def region_lines(program: LoadableProgram, region: LoadableRegion, number: int) -> Iterator[str]:
    """One region: its nodes and their places in the model, its schedule, the candidates it was chosen from, predicted time with its terms, bounds,
    work, layouts, reasons."""
    repeated = f", repeated {region.repeat} times" if region.repeat > 1 else ""
    yield f"{number}. {region.name}: {region.kind}{repeated}"
    for label, texts in (
        ("nodes", _nodes(program, region)),
        ("schedule", [region.schedule] if region.schedule else []),
        ("space", _space(region.space)),
        ("time", _time(region)),
        ("bound", _bound(region)),
        ("work", [_work(program, region)]),
        ("layout", _layouts(program, region)),
        ("library", [] if region.library is None else [library_text(region.library)]),
        ("kernels", [", ".join(dict.fromkeys(call.kernel for call in region.calls))] if region.calls else []),
        ("checked", _checked(program, region)),
        ("because", region.reasons),
    ):
        for index, text in enumerate(texts):
            yield f"   {label if index == 0 else '':9}{text}"


def library_text(call: LibraryCall) -> str:
    """`convolution of 1 x 64 x 58 x 58 and 64 x 64 x 3 x 3, through PyTorch`"""
    a, b = (" x ".join(map(str, view.sizes)) for view in (call.a, call.b))
    return f"{call.operator} of {a} and {b}, through PyTorch"


def _nodes(program: LoadableProgram, region: LoadableRegion) -> list[str]:
    texts = []
    for name in region.nodes:
        node = program.nodes[name]
        operator = node.attributes["target"] if node.operator == "torch" else node.operator
        texts.append(f"{operator} {name}" + (f"  at {place_text(node.place)}" if node.place else ""))
    return texts or ["none: it prepares storage"]


def _checked(program: LoadableProgram, region: LoadableRegion) -> list[str]:
    names = dict.fromkeys(name for call in region.calls for name in call.arguments if name in program.faults)
    found = (check for name in names for check in program.faults[name])
    return [f"indices of {check.place}: {check.least} to {check.extent - 1}" for check in found]


def _space(space: SpaceCounts) -> list[str]:
    """The candidates of the region's schemas, and the number rejected for each reason, most frequent first; a candidate counts for the first reason
    that rejects it. Empty if there was no choice."""
    if space.generated < 2:
        return []
    reasons = sorted(space.rejected.items(), key=lambda item: (-item[1], item[0]))
    infeasible = space.generated - space.feasible
    return [
        f"{space.generated:,} candidates: {space.feasible:,} feasible, {infeasible:,} rejected",
        *(f"{count:>9,}  {reason}" for reason, count in reasons),
    ]


def _time(region: LoadableRegion) -> list[str]:
    if not region.predicted_seconds:
        measured = [] if region.measured_seconds is None else [f"{seconds_text(region.measured_seconds)} measured"]
        return ["no prediction", *measured] if region.calls or region.library is not None else []
    terms = sorted(region.terms.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in terms if seconds)
    lines = [f"{seconds_text(region.predicted_seconds)} predicted" + (f": {parts}" if parts else "")]
    if region.measured_seconds is not None:
        lines.append(f"{seconds_text(region.measured_seconds)} measured")
    return lines


def _bound(region: LoadableRegion) -> list[str]:
    """Our lower bound and DeepCuts' limit, which is the claim of the paper and no bound."""
    own = [f"at least {seconds_text(seconds)} ({name})" for name, seconds in region.bounds.items() if name != DEEPCUTS]
    claimed = [f"{seconds_text(region.bounds[DEEPCUTS])} by {DEEPCUTS}"] if DEEPCUTS in region.bounds else []
    return ["; ".join(own + claimed)] if region.bounds else []


def _work(program: LoadableProgram, region: LoadableRegion) -> str:
    work = region_work(program, region)
    operations = "not counted" if region.kind == "torch" else scaled(work.flops, "flop")
    return f"{operations}, {scaled(work.bytes_read, 'B')} read, {scaled(work.bytes_written, 'B')} written"


def _layouts(program: LoadableProgram, region: LoadableRegion) -> list[str]:
    texts = []
    for name in region.outputs:
        root = program.root(name)
        storage = program.storage.get(name) or program.storage.get(root)
        if storage is not None:
            within = f", a slice of {program.storage[root].value}" if root != name and root in program.storage else ""
            texts.append(f"{storage.value} stored as {layout_text(storage.layout)}{within}")
    return texts


def layout_text(layout: Layout) -> str:
    """The layout as text, such as "N H W C", with the factors of split dimensions and the halo, or "row-major"."""
    if layout.is_row_major:
        return "row-major"
    letters: Sequence[str] = DIMENSION_LETTERS.get(len(layout.shape), tuple(f"d{i}" for i in range(len(layout.shape))))
    text = " ".join(letters[dim] + (f":{factor}" if factor else "") for dim, factor in layout.order)
    halo = [f"{letters[dim]} {before}+{after}" for dim, (before, after) in enumerate(layout.halo) if before or after]
    return text + (f" with a zeroed halo ({', '.join(halo)})" if halo else "")


def _through_torch(program: LoadableProgram) -> Iterator[str]:
    nodes = unsupported(program.graph)
    others = [r for r in program.regions if r.kind == "torch" and not any(program.nodes[n].operator == "torch" for n in r.nodes)]
    if not nodes and not others:
        yield "Nothing runs through PyTorch."
        return
    yield "Through PyTorch:"
    for node in nodes:
        yield f"   {node}"
    for region in others:
        yield f"   region {region.name}: {'; '.join(region.reasons)}"


def _memory(image: Image) -> Iterator[str]:
    program = image.program
    plan = plan_memory(program, GPU_ALIGNMENT if image.machine.is_gpu else CPU_ALIGNMENT)
    constants = [name for name in program.storage if program.constant_source(name) is not None]
    yield f"Memory: {plan}"
    yield f"   constants as kernels read them: {scaled(sum(program.bytes_of(name) for name in constants), 'B')} in {len(constants)} buffers"
    largest = sorted(plan.sizes, key=lambda name: (-plan.sizes[name], name))[:5]
    for name in largest:
        yield f"   {scaled(plan.sizes[name], 'B'):>9} at {plan.offsets[name]:>12,}  {name}"
