"""The explanation of a compiled program as text: totals, every region with its reasons, nodes that run through PyTorch, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tilewright.frontend.imported import through, unsupported
from tilewright.graph import onnx_call
from tilewright.hardware.calibration import name_in_use
from tilewright.ir.graph import place_text
from tilewright.ir.layout import Layout
from tilewright.ir.library import LibraryCall
from tilewright.ir.region import REGISTERS, TILE, MergeDecision
from tilewright.ir.space import Candidate, SpaceCounts
from tilewright.ir.stage import MEMORY
from tilewright.runtime.executable import Image
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion
from tilewright.runtime.memory_plan import CPU_ALIGNMENT, GPU_ALIGNMENT, plan_memory
from tilewright.runtime.plan import WRONG_BY, Plan, PlanRow, plan_of
from tilewright.runtime.plan_text import summary_lines
from tilewright.selection.bounds import is_claim
from tilewright.text import WIDTH, aligned, folded, number_of, scaled, seconds_text

LABEL = 9
"""Characters of the labels before the lines of a region, which are indented by three."""
LONGEST_TERMS = 3
THROUGH = {REGISTERS: "registers", TILE: "tiles on the chip", MEMORY: "memory"}
DIMENSION_LETTERS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


def explanation(image: Image, name: str = "model", plan: Plan | None = None, width: int | None = None) -> str:
    """The full report on a program; needs neither its machine nor a call. `plan` may hold times that were measured elsewhere. Lines that would be
    longer than `width` are continued under their beginning."""
    plan = plan or plan_of(image.program, image.machine)
    lines = [*summary_lines(plan, name), *(part for line in _calibrated(image) for part in folded(line, width, 4)), ""]
    for row in plan.rows:
        lines += [*region_lines(image.program, row, width), ""]
    rest = [*through_torch_lines(image), "", *memory_lines(image)]
    return "\n".join([*lines, *(part for line in rest for part in folded(line, width, 5))])


def search_lines(
    image: Image, name: str, apart: Mapping[str, float] | None = None, width: int | None = None, unmeasured: Sequence[MergeDecision] = ()
) -> Iterator[str]:
    """The merges of regions and the layouts that were considered, in order, with the predicted times of both ways; the partitions that trials
    compared; chains of a GPU that none has measured; then the regions of several operators, with their times and those of kernels for each operator.
    `apart`: the latter's seconds by node (`partition.predictions.operators_apart`); None: not known. `unmeasured`: see
    `partition.plan.chains_by_prediction`. Lines that would be longer than `width` are continued."""
    for line in _search_lines(image, name, apart, unmeasured):
        yield from folded(line, width, 9)


def unmeasured_chains(unmeasured: Sequence[MergeDecision]) -> tuple[str, list[str]]:
    """What is said of the chains that no trial measured (`partition.plan.chains_by_prediction`): of all, and of each."""
    gaining = sum(decision.taken for decision in unmeasured)
    said = f"{number_of(len(unmeasured), 'chain')} that no trial measured and predictions do not decide about; they would take {gaining}"
    return said, [f"{'would be taken' if decision.taken else 'refused'}: {decision.text}" for decision in unmeasured]


def _search_lines(image: Image, name: str, apart: Mapping[str, float] | None, unmeasured: Sequence[MergeDecision]) -> Iterator[str]:
    search = image.program.search
    taken = sum(decision.taken for decision in search)
    yield f"{name} for {image.machine.name}: {number_of(len(search), 'decision')} about merges of regions and layouts, {taken} taken"
    for number, decision in enumerate(search, 1):
        yield f"{number:>5}. {decision}"
    partitions = image.program.partitions
    if partitions:
        yield f"{number_of(len(partitions), 'partition')} of the whole network measured in turns:"
        yield from (f"{number:>5}. {partition}" for number, partition in enumerate(partitions, 1))
    if unmeasured:
        said, chains = unmeasured_chains(unmeasured)
        yield f"{said}:"
        yield from (f"{number:>5}. {text}" for number, text in enumerate(chains, 1))
    if apart is None:
        yield "what the operators of a region would take by themselves is predicted for models, not for artifacts"
        return
    yield "operators in one region, as planned, and each by itself:"
    rows = plan_of(image.program, image.machine).rows
    holding = Counter(node for row in rows for node, _, _ in row.nodes)  # an operator with several results is in a region for each
    for row in rows:
        alone = [apart[node] / holding[node] for node, _, _ in row.nodes if node in apart]
        if len(alone) > 1 and row.predicted_seconds:
            operators = " > ".join(operator for _, operator, _ in row.nodes)
            times = f"{seconds_text(row.predicted_seconds)} predicted, {seconds_text(sum(alone))} apart"
            yield f"{row.number:>5}. {operators}: {times}"


def _calibrated(image: Image) -> Iterator[str]:
    machine = image.machine
    if calibration := name_in_use(machine) if machine.is_gpu else machine.calibration:
        yield f"  {'order of candidates' if machine.is_gpu else 'facts of the machine'} measured by tilewright calibrate: {calibration}"


def region_lines(program: LoadableProgram, row: PlanRow, width: int | None = None) -> Iterator[str]:
    """One region: what it is, and its entries, a label before the lines of each, which are continued if they are longer than `width`."""
    repeated = f", repeated {row.repeat} times" if row.repeat > 1 else ""
    yield from folded(f"{row.number}. {row.name}: {row.kind}{repeated}", width, 3)
    for label, texts in region_entries(program, row):
        for index, text in enumerate(texts):
            yield from folded(f"   {label if index == 0 else '':{LABEL}}{text}", width, LABEL + 5)


def region_entries(program: LoadableProgram, row: PlanRow) -> Sequence[tuple[str, Sequence[str]]]:
    """What is said of a region, by labels: its nodes and their places in the model, its stages, its schedule, the candidates it was chosen from and
    compared with, predicted time with its terms, bounds, work, layouts, reasons. Entries without lines have nothing to say."""
    region = program.regions[row.number - 1]
    return (
        ("nodes", _nodes(row)),
        ("stages", list(stage_lines(row))),
        ("schedule", [region.schedule] if region.schedule else []),
        ("space", _space(region.space)),
        ("time", _time(row)),
        ("bound", _bound(row)),
        ("against", list(candidate_lines(row))),
        ("terms", list(term_lines(row))),
        ("work", [_work(row)]),
        ("layout", _layouts(program, region)),
        ("library", [] if region.library is None else [library_text(region.library)]),
        ("kernels", [", ".join(dict.fromkeys(row.kernels))] if region.calls else []),
        ("checked", _checked(program, region)),
        ("because", region.reasons),
        ("apart", [text for text in row.separate if not any(text in reason for reason in region.reasons)]),
    )


def stage_lines(row: PlanRow) -> Iterator[str]:
    """What the region computes one after another: what operators of a stage, or the parts of one, pass each other in registers or in tiles, and a
    stage others in tiles or memory: the next, unless they are numbered. Nothing for a single operator in registers."""
    stages = row.flow.stages
    if len(stages) == 1 and len(stages[0].what) == 1 and stages[0].within == REGISTERS:
        return
    for number, stage in enumerate(stages):
        within = f" in {THROUGH[stage.within]}" if len(stage.what) > 1 or stage.within != REGISTERS else ""
        passing: dict[tuple[int, str], list[str]] = {}
        for edge in row.flow.edges:
            if edge.producer == number:
                passing.setdefault((edge.bytes, edge.level), []).append("other regions" if edge.consumer is None else f"stage {edge.consumer + 1}")
        path = row.flow.is_path
        passed = ", ".join(
            f"{scaled(count, 'B')} through {THROUGH[level]}" + ("" if path else f" to {' and '.join(to)}") for (count, level), to in passing.items()
        )
        yield ("" if path else f"{number + 1}: ") + " > ".join(stage.what) + within + (f", then {passed}" if passed else "")


def candidate_lines(row: PlanRow, width: int = WIDTH - LABEL - 3) -> Iterator[str]:
    """A table of the chosen schedule and those that it was compared with, the best of every schema: their times, and by how much they lose. Recorded
    times are compared where both have one. Then the schemas that have no candidate, with the reason."""
    others = row.comparison.others
    if others:
        own = chosen(row)
        measured = any(candidate.measured_seconds is not None for candidate in (own, *others))
        cells = [
            (
                candidate.schema,
                candidate.schedule,
                _seconds(candidate.predicted_seconds),
                *((_seconds(candidate.measured_seconds),) if measured else ()),
                "chosen" if candidate is own else loss_text(candidate, own),
            )
            for candidate in (own, *others)
        ]
        headings = ("schema", "schedule", "predicted", *(("measured",) if measured else ()), "loses by")
        yield from aligned(headings, cells, ("schema", "schedule"), width, {"schedule": 1.0}, folded=True)
    yield from (f"{name}: {reason}" for name, reason in row.comparison.unsuitable.items())


def chosen(row: PlanRow) -> Candidate:
    """The chosen schedule, as those that it was compared with."""
    return Candidate(row.comparison.schema, row.schedule, row.predicted_seconds, row.terms, row.measured_seconds)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def loss_text(other: Candidate, chosen: Candidate) -> str:
    """By how much longer the other takes; negative if it was not its time that decided."""
    if other.measured_seconds is not None and chosen.measured_seconds:
        return f"{100 * (other.measured_seconds / chosen.measured_seconds - 1):.1f} %"
    if other.predicted_seconds is None or not chosen.predicted_seconds:
        return "-"
    return f"{100 * (other.predicted_seconds / chosen.predicted_seconds - 1):.1f} %"


def term_lines(row: PlanRow, width: int = WIDTH - LABEL - 3) -> Iterator[str]:
    """The longest terms of the chosen schedule and of the runner-up, side by side."""
    second = next((other for other in row.comparison.others if other.terms), None)
    if second is None or not row.terms:
        return
    names = dict.fromkeys(name for terms in (row.terms, second.terms) for name in sorted(terms, key=lambda name: -terms[name])[:LONGEST_TERMS])
    ordered = sorted(names, key=lambda name: -max(row.terms.get(name, 0.0), second.terms.get(name, 0.0)))
    cells = [(name, *(seconds_text(terms.get(name, 0.0)) for terms in (row.terms, second.terms))) for name in ordered]
    yield from aligned(("longest terms", "chosen", "runner-up"), cells, ("longest terms",), width, {"longest terms": 1.0})


def library_text(call: LibraryCall) -> str:
    """`convolution of 1 x 64 x 58 x 58 and 64 x 64 x 3 x 3, through PyTorch`"""
    inputs = " and ".join(" x ".join(map(str, view.sizes)) for view in call.inputs)
    return f"{call.operator.name} of {inputs}, through PyTorch"


def _nodes(row: PlanRow) -> list[str]:
    texts = [f"{operator} {name}" + (f"  at {place_text(place)}" if place else "") for name, operator, place in row.nodes]
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


def _time(row: PlanRow) -> list[str]:
    if not row.predicted_seconds:
        measured = [] if row.measured_seconds is None else [f"{seconds_text(row.measured_seconds)} measured"]
        return ["no prediction", *measured] if row.kernels or row.has_library else []
    terms = sorted(row.terms.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in terms if seconds)
    lines = [f"{seconds_text(row.predicted_seconds)} predicted" + (f": {parts}" if parts else "")]
    if row.measured_seconds is not None:
        wrong = f": predicted wrong by more than {WRONG_BY:g} times" if row.is_mispredicted else ""
        lines.append(f"{seconds_text(row.measured_seconds)} measured{wrong}")
    return lines


def _bound(row: PlanRow) -> list[str]:
    """The lower bound, and DeepCuts' limit, which is the claim of the paper and no bound."""
    own = [f"at least {seconds_text(seconds)} ({name})" for name, seconds in row.bounds.items() if not is_claim(name)]
    claimed = [f"{seconds_text(seconds)} by {name}" for name, seconds in row.bounds.items() if is_claim(name)]
    return ["; ".join(own + claimed)] if row.bounds else []


def _work(row: PlanRow) -> str:
    operations = "not counted" if row.kind == "torch" else scaled(row.work.flops, "flop")
    return f"{operations}, {scaled(row.work.bytes_read, 'B')} read, {scaled(row.work.bytes_written, 'B')} written"


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


def through_torch_lines(image: Image) -> Iterator[str]:
    """What our kernels do not compute."""
    program, tail = image.program, image.signature.tail
    if tail is not None:
        operators = ", ".join(f"{count} {name}" if count > 1 else name for name, count in onnx_call.operators_of(tail.model).items())
        yield f"Through ONNX's runtimes after the program, with results whose shapes depend on data: {operators}."
    nodes = unsupported(program.graph)
    others = [r for r in program.regions if r.kind == "torch" and not any(program.nodes[n].operator == "torch" for n in r.nodes)]
    if not nodes and not others:
        yield "Nothing runs through PyTorch."
        return
    yield f"{through(nodes).replace('t', 'T', 1) if nodes else 'Through PyTorch'}:"
    for node in nodes:
        yield f"   {node}"
    for region in others:
        yield f"   region {region.name}: {'; '.join(region.reasons)}"


def memory_lines(image: Image) -> Iterator[str]:
    """The plan of the memory, and its largest buffers."""
    program = image.program
    plan = plan_memory(program, GPU_ALIGNMENT if image.machine.is_gpu else CPU_ALIGNMENT)
    constants = [name for name in program.storage if program.constant_source(name) is not None]
    yield f"Memory: {plan}"
    size = scaled(sum(program.bytes_of(name) for name in constants), "B")
    yield f"   constants as kernels read them: {size} in {number_of(len(constants), 'buffer')}"
    largest = sorted(plan.sizes, key=lambda name: (-plan.sizes[name], name))[:5]
    for name in largest:
        yield f"   {scaled(plan.sizes[name], 'B'):>9} at {plan.offsets[name]:>12,}  {name}"
