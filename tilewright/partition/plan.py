"""From a graph to a program: regions, layouts, a schedule for each region, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

from tilewright.codegen.describe import prediction
from tilewright.errors import contained
from tilewright.graph.index_checks import IndexChecks
from tilewright.graph.table import OPERATORS, STRUCTURAL
from tilewright.hardware.calibration import gpu_recurrence
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Computation
from tilewright.ir.dtypes import size_of
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.layout import Layout
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, MergeDecision, Program, Region, Storage, Unsuitable, Ways
from tilewright.ir.space import SpaceCounts
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.registry import library, lower_for_images, schemas
from tilewright.kernels.schema import USUAL, Numerics, form_of
from tilewright.partition.cache_padding import with_cache_padding
from tilewright.partition.canonical import canonical, key_of, named
from tilewright.partition.chains import Ready, Search, with_lines
from tilewright.partition.folded_images import fold_images
from tilewright.partition.fusion import Partition, partition
from tilewright.partition.joining import RowJudge
from tilewright.partition.joint_loops import TimedLoop, join_loops
from tilewright.partition.judges import judge_of
from tilewright.partition.layout_choice import Chosen, Decided, Judge, choose_layouts
from tilewright.partition.layouts import BY_RULE, LaidOut, Storing, assign_layouts, in_graph
from tilewright.partition.merges import BY_MERGES, KEPT, WHOLE, Measured, Memory, Merge, Policy, Timed
from tilewright.partition.narrow_results import with_narrow_functions
from tilewright.partition.precision import AS_COMPUTED, Precision, precision_of
from tilewright.partition.prologues import Prologues, choose_prologues
from tilewright.partition.recurrence import whole_body
from tilewright.partition.scans import Loop, unfold, without_copies
from tilewright.partition.siblings import Merged, merge_siblings
from tilewright.partition.strip_judge import StripJudge
from tilewright.partition.tile_judge import TileJudge
from tilewright.partition.type_choice import Types, choose_types
from tilewright.partition.updates import in_place
from tilewright.selection.bounds import NO_BOUNDS, bounds_of
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.stages import Stages

Chooser = Callable[[Problem, Machine, int], Choice]
"""Decides the schedule of a canonical problem for a machine and, on a CPU, a number of threads: `selection.choice.choose`, or records before it."""
Recorded = Callable[[Problem, Machine, int, Chooser], Measured | None]
"""What was measured of a canonical chain, and of its regions apart by the schedules that the chooser takes; None unless both were."""

LOOP = "loop"
"""The kind of merges of all steps of a loop."""
IN_NO_ORDER = "parts of its sums are added by atomic operations, in no fixed order (deterministic=False)"


@dataclass(frozen=True)
class _Predictions:
    """Predicted seconds of regions when it is decided what runs together. Each problem is ranked once: merged siblings and chains concern the same
    regions."""

    models: Chooser
    machine: Machine
    threads: int
    numerics: Numerics
    stages: Stages
    measured: Chooser | None = None
    """Chooses what trials measured, where that decides: between ways whose predictions are close."""
    chains: bool = False
    """Whether predictions decide about chains."""
    replaced: frozenset[int] = frozenset()
    """Numbers of the graph's outputs that replace inputs after a call."""
    layouts: Decided | None = None
    """What was decided about layouts for another size of the model."""
    persistent: bool = True
    """Whether all steps of a recurrent layer may be one kernel."""
    known: dict[object, float] = field(default_factory=dict)
    graphs: dict[tuple[int, frozenset[str]], tuple[Graph, LaidOut]] = field(default_factory=dict)
    rows: dict[object, float] = field(default_factory=dict)
    policy: Policy = BY_MERGES
    decided: dict[tuple[int, frozenset[str]], Decided] = field(default_factory=dict)

    def laid_out(self, graph: Graph, precision: Precision, prologues: frozenset[str] = frozenset()) -> LaidOut:
        """The graph's regions, where contractions compute these results of maps, with layouts by prediction; those of a graph that was predicted are
        planned."""
        key = id(graph), prologues
        if key not in self.graphs:
            judge = RowJudge(
                self.machine, self.threads, frozenset(graph.constants), self.numerics, precision, self.rows, self._measured_seconds,
                self.policy,
            )  # fmt: skip
            parts = regions_of(graph, judge if precision.whole_rows or precision.attention else None, prologues=prologues)
            gpu = self.machine.is_gpu

            def laid(storing: Storing) -> LaidOut:
                found = assign_layouts(graph, parts, precision, storing=storing)
                return with_narrow_functions(found) if gpu else with_cache_padding(graph, found, self.machine)

            pinned = frozenset(graph.outputs[number] for number in self.replaced)
            deciding = Judge(
                partial(self._timed, graph), gpu, self.measured is not None, partial(self._chained_seconds, graph) if self.chains else None,
                self.numerics.vendor, self.policy.predicted,
            )  # fmt: skip
            trusted = replace(deciding, predict=partial(self._timed, graph, loops=True), trusted=True)
            typing = partial(choose_types, graph, laid, trusted, precision)
            types = contained("the model", "all factors have the types of its precision", typing, lambda _: Types())
            typed = types.laid(laid)
            choosing = partial(choose_layouts, graph, typed, deciding, pinned, self.layouts)
            chosen = contained("the model", "its layouts follow rules", choosing, lambda _: Chosen(typed(BY_RULE)))
            self.graphs[key], self.decided[key] = (graph, chosen.laid_out), chosen.decided
        return self.graphs[key][1]

    def _timed(self, graph: Graph, laid_out: LaidOut, regions: Sequence[Region], loops: bool = False) -> list[Timed]:
        """The regions that kernels compute, with their seconds, loops among them if that is said."""
        context = self._context(graph, laid_out)
        timed = [
            Timed(region, self.seconds(region, context), partial(self._measured_by_itself, region, context))
            for region in regions
            if region.kind not in ("torch", "loop") and all(0 not in context.values[name].shape for name in region.outputs)
        ]
        timed += [Timed(region, self._loop_seconds(region, context, laid_out)) for region in regions if loops and region.kind == "loop"]
        return timed

    def _loop_seconds(self, region: Region, context: _Context, laid_out: LaidOut) -> float:
        """Predicted seconds of a loop the faster way: in one kernel, or by kernels of one step."""
        ways = _ways_of(region, context, laid_out)
        around = (*ways.apart.loop.before, *ways.apart.loop.after)
        each = sum(self.seconds(part, ways.apart.context) for part in ways.apart.loop.body)
        seconds = ways.apart.loop.length * each
        if not isinstance(ways.together, str):
            try:
                seconds = min(seconds, sum(self.seconds(part, ways.together.context) for part in ways.together.loop.body))
            except Unsuitable:
                pass
        return seconds + sum(self.seconds(part, ways.apart.context) for part in around)

    def _context(self, graph: Graph, laid_out: LaidOut) -> _Context:
        return _Context(graph, laid_out.values, laid_out.layouts, self.machine, self.threads, persistent=self.persistent)

    def _chained_seconds(self, graph: Graph, before: LaidOut, after: LaidOut, names: frozenset[str]) -> tuple[float, float]:
        """Predicted seconds in two partitions of all regions that named ones may be chained with, as chains where these are faster."""
        names = with_lines(graph, (before, after), names)

        def seconds(laid_out: LaidOut) -> float:
            context = self._context(graph, laid_out)

            def predict(region: Region, winograd: bool) -> float:
                return self.seconds(region, context, winograd)

            return Search(graph, laid_out, predict, self.judge, lambda _: None, lambda _: None, Memory()).seconds(names)

        return seconds(before), seconds(after)

    @cached_property
    def judge(self) -> StripJudge | TileJudge:
        """Predicts chains."""
        return judge_of(self.machine, self.threads, self.numerics, self.stages.ranked)

    def context(self, graph: Graph, precision: Precision, prologues: frozenset[str] = frozenset()) -> _Context:
        """The context of the graph's regions."""
        return self._context(graph, self.laid_out(graph, precision, prologues))

    def of_regions(
        self, precision: Precision, graph: Graph, concerns: Callable[[Region], bool], prologues: frozenset[str] = frozenset()
    ) -> list[Timed]:
        """The graph's regions for which the function says true, with their seconds and those of the copies of their results (`Storing.apart`)."""
        laid_out = self.laid_out(graph, precision, prologues)
        copies = [region for region in laid_out.regions if region.inputs and region.outputs == (in_graph(region.inputs[0]),)]
        names = {region.name for region in copies}
        concerned = self._timed(graph, laid_out, [region for region in laid_out.regions if region.name not in names and concerns(region)])
        copied = {timed.region.inputs[0]: timed for timed in self._timed(graph, laid_out, copies)}
        return [timed.with_copy(copied[name]) if (name := timed.region.outputs[0]) in copied else timed for timed in concerned]

    def loops(self, precision: Precision, persistent: bool, graph: Graph, names: Collection[str]) -> dict[str, TimedLoop]:
        """The graph's loops with these names, as they are best lowered."""
        laid_out = self.laid_out(graph, precision)
        context = replace(self.context(graph, precision), numerics=self.numerics, stages=self.stages, persistent=persistent, policy=self.policy)

        def lowered(region: Region, choose: Chooser) -> Lowered:
            made = lower_loop(region, replace(context, choose=choose), laid_out)
            return next(one for one in made if one.region.kind == "loop")

        def measured(region: Region) -> float | None:
            return lowered(region, self.measured).measured_seconds if self.measured is not None else None

        found = {}
        for region in laid_out.regions:
            if region.kind == "loop" and region.nodes[0].name in names:
                best = lowered(region, self.models)
                timed = Timed(region, best.predicted_seconds, partial(measured, region))
                alone = not self.machine.is_gpu or any(kernel.cooperative for kernel in best.kernels)
                found[region.nodes[0].name] = TimedLoop(timed, best.repeat == 1, "; ".join(best.region.reasons), alone)
        return found

    def _measured_seconds(self, problem: Problem) -> float | None:
        """Seconds that trials measured of a canonical problem; None without them."""
        return self.measured(problem, self.machine, self.threads).measured_seconds if self.measured is not None else None

    def _measured_by_itself(self, region: Region, context: _Context) -> float | None:
        return self._measured_seconds(_canonical(region, context)[0])

    def seconds(self, region: Region, context: _Context, winograd: bool = True) -> float:
        """Predicted seconds of the region by itself, with or without Winograd's algorithm."""
        problem, key, _ = _canonical(region, context)
        transforms = self.numerics.winograd and any(schema.transforms for schema in schemas(self.machine, region.kind))
        winograd = winograd or not transforms  # the same ranking where no schema transforms
        if (key, winograd) not in self.known:
            chosen = self.models if winograd else partial(choose, numerics=replace(self.numerics, winograd=False))
            choice = chosen(problem, self.machine, self.threads)
            self.stages.ranked(choice.space.generated)
            self.known[key, winograd] = choice.seconds
        return self.known[key, winograd]


@dataclass(frozen=True)
class _Context:
    """Context for lowering regions."""

    graph: Graph
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    machine: Machine
    threads: int
    choose: Chooser = choose
    numerics: Numerics = USUAL
    stages: Stages = field(default_factory=Stages)
    lowered: dict[object, Lowered] = field(default_factory=dict)
    """Lowered canonical problems: networks repeat layers."""
    persistent: bool = True
    """Whether all steps of a recurrent layer may be one kernel."""
    memory: Memory = field(default_factory=Memory)
    ready: Ready = lambda kernels: None
    as_before: bool = False
    """Whether regions that the memory knows take their schedules from it."""
    policy: Policy = BY_MERGES
    considered: list[MergeDecision] = field(default_factory=list)
    """What was decided about loops when they were lowered."""

    @cached_property
    def judge(self) -> StripJudge | TileJudge:
        """Predicts chains."""
        return judge_of(self.machine, self.threads, self.numerics, self.stages.ranked, self.memory)


def plan_program(
    graph: Graph,
    machine: Machine,
    threads: int,
    chooser: Chooser = choose,
    precision: str | Precision = "fp32",
    numerics: Numerics = USUAL,
    models: Chooser | None = None,
    chains: bool | None = None,
    recorded: Recorded | None = None,
    stages: Stages | None = None,
    persistent: bool | None = None,
    updates: Sequence[tuple[int, int]] = (),
    memory: Memory | None = None,
    ready: Ready = lambda kernels: None,
    as_before: bool = False,
    policy: Policy = BY_MERGES,
) -> Program:
    """Plans how the graph runs on the machine; `chooser` selects the schedules of its regions. `threads` is for CPUs.
    `precision`: a name of `precision.PRECISIONS`, or a `Precision` that decides the type of each value that regions store.
    `numerics`: allowed rounding when it is decided what runs together; the chooser observes it separately. `models`: chooses by predictions alone
    when it is decided what runs together (`selection.choice.choose`, or what remembers its choices).
    `chains`: whether successive regions may become one kernel (`partition.chains`); by default on a GPU only those that were measured, since
    networks were slower with those predicted faster for an H200 (docs/models.md). `recorded`: what was measured of chains, which decides about them;
    if it is given, the chooser's measured seconds decide about all other merges of which the predictions are close, where it has them.
    `stages`: learns what took how long. `persistent`: whether all steps of a recurrent layer may be one kernel; by default on CPUs, and on GPUs where
    its barrier was measured (`hardware.calibration.gpu_recurrence`). `updates`: (input, output) numbers of the outputs that replace inputs after a
    call; on CPUs they are stored in the inputs where that is possible (`partition.updates`). `memory`: of plans for other sizes, whose schedules and
    chains are kept where they are predicted nearly as fast as the best, and on CPUs whose merged siblings are kept; this plan is added. `ready`: is
    called with kernels as soon as the program is likely to have them. `as_before`: what the memory knows is taken without a prediction, on CPUs: the
    plan takes a fraction of the time, but nothing says how good it is. `policy`: merges about which not their own times decide.

    Raises:
        UnsupportedOption: for a precision that the machine does not have.
    """
    if isinstance(precision, str):
        precision = precision_of(precision, graph, machine)
    stages = stages or Stages()
    measured = deciding_once(chooser) if recorded is not None else None
    memory = memory or Memory()
    by_prediction = chains or (chains is None and not machine.is_gpu)
    if persistent is None:
        persistent = not machine.is_gpu or gpu_recurrence(machine) is not None
    earlier = None if machine.is_gpu or policy.predicted else dict(memory.layouts)
    predictions = _Predictions(
        models or partial(choose, numerics=numerics), machine, threads, numerics, stages, measured,
        by_prediction, frozenset(output for _, output in updates), earlier, persistent,
        policy=policy,
    )  # fmt: skip
    if persistent is None:
        persistent = not machine.is_gpu or gpu_recurrence(machine) is not None
    stages.report("partition")
    with stages.stage("partition"):
        merged = contained("the model", "its siblings stay apart", partial(_merged, graph, precision, predictions, memory), lambda _: Merged(graph))
        joining = partial(_joint, merged.graph, precision, predictions, memory, persistent)
        joint = contained("the model", "its loops stay apart", joining, lambda _: Merged(merged.graph))
        folded = contained("the model", "no image is folded", partial(_folded, joint.graph, precision, predictions), lambda _: Merged(joint.graph))
        graph = folded.graph
        chosen = partial(_prologues, graph, precision, predictions, memory)
        inside = contained("the model", "contractions read what maps store", chosen, lambda _: Prologues())
        rewritten = (merged.decisions, joint.decisions, folded.decisions, inside.decisions)
        fused = partial(predictions.laid_out, graph, precision, inside.values)
        laid_out = contained("the model", "all of it runs through PyTorch", fused, lambda _: unfused(graph))
        memory.layouts.update(predictions.decided.get((id(graph), inside.values), {}))
        if updates and not machine.is_gpu:
            pairs = [(graph.outputs[output], graph.inputs[given]) for given, output in updates]
            apart = laid_out
            laid_out = contained("the model", "its updates are copied", partial(in_place, graph, laid_out, pairs), lambda _: apart)
        context = _Context(
            graph, laid_out.values, laid_out.layouts, machine, threads, chooser, numerics, stages, persistent=persistent, memory=memory, ready=ready,
            as_before=as_before and not machine.is_gpu, policy=policy,
        )  # fmt: skip
        search = (*(decision for decisions in rewritten for decision in decisions.values()), *laid_out.considered)
        only_measured = chains is None and machine.is_gpu
        if chains is not False and (recorded is not None or not only_measured):
            separate: tuple[LaidOut, tuple[Merge, ...]] = (laid_out, ())
            chained = partial(_chained, laid_out, context, predictions, recorded, only_measured)
            laid_out, considered = contained("the model", "nothing is merged", chained, lambda _: separate)
            search += tuple(MergeDecision(merge.results, merge.taken, str(merge), merge.ways) for merge in considered)
    lowered: list[Lowered] = []
    lost: dict[int, list[str]] = {}
    with stages.stage("code generation"):
        for region in laid_out.regions:
            subject = ", ".join(node.described for node in region.nodes) or f"a copy of {', '.join(region.inputs)}"
            notes = [decisions[node.name].text for node in region.nodes for decisions in rewritten if node.name in decisions]
            region = replace(region, reasons=(*region.reasons, *notes))
            made = contained(subject, "runs through PyTorch", partial(_lowered, region, context, laid_out), str)
            if isinstance(made, str):
                lost[len(lowered)] = [f"a fault inside Tilewright: {made}"]
                made = [Lowered(replace(region, kind="torch"), "PyTorch", (), ())]
            for one in made:
                ready(one.kernels)
            lowered += made
    within = {stage.outputs[0] for region in laid_out.regions for stage in region.stages if stage.outputs[0] not in region.outputs}
    storage = {
        name: Storage(laid_out.values[name], layout, name if name in graph.constants else None)
        for name, layout in laid_out.layouts.items()
        if name not in within
    }
    aliases = {name: place.buffer for name, place in laid_out.slices.items()}
    search = (*search, *context.considered)
    program = Program(graph, machine.name, tuple(lowered), MappingProxyType(storage), MappingProxyType(aliases), search)
    return through_torch(program, lost) if lost else program


def deciding_once(chooser: Chooser) -> Chooser:
    """The chooser, which is asked once for each canonical problem: regions are in several chains."""
    known: dict[object, Choice] = {}

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        key = key_of(problem)
        if key not in known:
            known[key] = chooser(problem, machine, threads)
        return known[key]

    return chosen


def _merged(graph: Graph, precision: Precision, predictions: _Predictions, memory: Memory) -> Merged:
    """The graph with siblings merged where the models predict a gain; on CPUs, where sizes share kernels, as for the size planned first."""
    kept = None if predictions.machine.is_gpu else memory.siblings
    return merge_siblings(graph, partial(predictions.of_regions, precision), kept, predictions.policy)


def _joint(graph: Graph, precision: Precision, predictions: _Predictions, memory: Memory, persistent: bool) -> Merged:
    """The graph with pairs of loops joined where the models predict a gain; on CPUs, where sizes share kernels, as for the size planned first."""
    kept = None if predictions.machine.is_gpu else memory.loops
    return join_loops(graph, partial(predictions.loops, precision, persistent), kept, predictions.policy)


def _folded(graph: Graph, precision: Precision, predictions: _Predictions) -> Merged:
    """The graph with images of few channels folded for tensor cores where the models predict a gain."""
    machine, numerics = predictions.machine, predictions.numerics
    if not machine.is_gpu:
        return Merged(graph)

    def lanes(graph: Graph, region: Region) -> int:
        context = predictions.context(graph, precision)
        form = form_of(TENSOR_CORES, _canonical(region, context)[0], machine)
        if isinstance(form, Unsuitable) or (form.facts.kind == "tf32" and not numerics.tf32):
            return 0
        # folded, the factors may be of 16 bits although they are better float32 as they are
        factors = precision.factors(region, frozenset(graph.constants))
        element = min((size_of(precision.stored(region, context.values[name])) for name in factors), default=form.facts.element_bytes)
        return WIDEST_BYTES // element

    regions = partial(_regions, precision, predictions)
    return fold_images(graph, regions, partial(predictions.of_regions, precision), lanes, predictions.policy)


def _regions(precision: Precision, predictions: _Predictions, graph: Graph) -> Sequence[Region]:
    return predictions.laid_out(graph, precision).regions


def _prologues(graph: Graph, precision: Precision, predictions: _Predictions, memory: Memory) -> Prologues:
    """The maps that contractions compute where the models predict a gain; on CPUs, where sizes share kernels, as for the size planned first."""

    def predict(values: frozenset[str], concerns: Callable[[Region], bool]) -> list[Timed]:
        return predictions.of_regions(precision, graph, concerns, values)

    regions = predictions.laid_out(graph, precision).regions
    return choose_prologues(regions, graph.outputs, predict, None if predictions.machine.is_gpu else memory.prologues, predictions.policy)


def _chained(
    laid_out: LaidOut, context: _Context, predictions: _Predictions, recorded: Recorded | None, only_measured: bool
) -> tuple[LaidOut, tuple[Merge, ...]]:
    """The regions with chains where these are faster, and what was considered; the context's judge then knows their strips or tiles."""

    def predict(region: Region, winograd: bool) -> float:
        return predictions.seconds(region, context, winograd)

    chosen = deciding_once(context.choose)

    def measured(problem: Problem) -> Measured | None:
        return recorded(problem, context.machine, context.threads, chosen) if recorded is not None else None

    def library(region: Region) -> float | None:
        if not context.numerics.vendor:
            return None
        choice = chosen(_canonical(region, context)[0], context.machine, context.threads)
        return None if choice.predicted else choice.measured_seconds

    search = Search(
        context.graph, laid_out, predict, context.judge, measured, library, context.memory, only_measured, context.ready, context.as_before,
        context.policy,
    )  # fmt: skip
    return search.chained(), tuple(search.considered)


def _lowered(region: Region, context: _Context, laid_out: LaidOut) -> list[Lowered] | str:
    return lower_loop(region, context, laid_out) if region.kind == "loop" else [lower_region(region, context)]


def unfused(graph: Graph) -> LaidOut:
    """Makes every node a region that runs through PyTorch or by its operator's definition."""
    regions = (Region(node.name, "torch", (node,), (), node.inputs, node.outputs, ("nothing is fused",)) for node in graph.nodes)
    return assign_layouts(graph, Partition(tuple(regions), graph.values))


def lay_out(
    graph: Graph,
    judge_rows: RowJudge | None = None,
    precision: Precision = AS_COMPUTED,
    in_place: bool = True,
    prologues: frozenset[str] = frozenset(),
    fused: bool = True,
) -> LaidOut:
    """The graph's regions (`regions_of`) with types, and layouts by rule, of the values that they store."""
    return assign_layouts(graph, regions_of(graph, judge_rows, in_place, prologues, fused), precision, in_place)


def regions_of(
    graph: Graph, judge_rows: RowJudge | None = None, in_place: bool = True, prologues: frozenset[str] = frozenset(), fused: bool = True
) -> Partition:
    """The graph's regions. Without a judge, row reductions never join a contraction. `in_place`: values that are concatenated are slices of one
    buffer. `prologues`: results of maps that contractions compute where they read them. `fused`: whether any operators share a kernel.

    Raises:
        InvalidModel: if a constant index is out of range.
    """
    checks = IndexChecks.of(graph)

    def steps(node: Node) -> Computation | None:
        return None if node.operator in STRUCTURAL else checks.computation(node)

    def is_view(node: Node) -> bool:
        return node.operator in OPERATORS and OPERATORS[node.operator].view

    parts = partition(graph, steps, is_view, judge_rows, in_place, prologues, fused=fused)
    return replace(parts, regions=tuple(checks.numbered(region) for region in parts.regions))


def operators_apart(graph: Graph, machine: Machine, threads: int, precision: str = "fp32", numerics: Numerics = USUAL) -> dict[str, float]:
    """Predicted seconds of operators if each had kernels of its own, by the names of their nodes. Views and what PyTorch runs have none."""
    laid_out = lay_out(graph, None, precision_of(precision, graph, machine), fused=False)
    context = _Context(graph, laid_out.values, laid_out.layouts, machine, threads)
    predictions = _Predictions(partial(choose, numerics=numerics), machine, threads, numerics, Stages())
    seconds: dict[str, float] = {}
    for region in laid_out.regions:
        if region.nodes and region.kind not in ("torch", "loop") and all(laid_out.values[name].elements for name in region.outputs):
            name = region.nodes[-1].name
            seconds[name] = seconds.get(name, 0.0) + predictions.seconds(region, context)
    return seconds


def lower_region(region: Region, context: _Context) -> Lowered:
    """Lowers the region under the schedule chosen for it, which may add to its reasons. Regions that differ only in names are lowered once."""
    if region.kind == "torch":
        return Lowered(region, "PyTorch", (), ())
    if any(0 in context.values[name].shape for name in region.outputs):
        return Lowered(region, "nothing to compute", (), ())
    problem, key, names = _canonical(region, context)
    if key not in context.lowered:
        context.lowered[key] = _lower(problem, context, region.outputs)
    lowered = context.lowered[key]
    reasons = (*region.reasons, *lowered.region.reasons)
    return named(lowered, replace(region, reasons=reasons), names)


def _canonical(region: Region, context: _Context) -> tuple[Problem, object, dict[str, str]]:
    """The region's problem with canonical names, what equal problems have in common, and the region's names by canonical ones."""
    same = canonical(Problem(region, context.layouts, context.values, frozenset(context.graph.constants)))
    return same.problem, key_of(same.problem), {short: name for name, short in same.names.items()}


def _lower(problem: Problem, context: _Context, results: tuple[str, ...]) -> Lowered:
    if problem.region.kind == "chain":
        kernel = context.judge.kernels[key_of(problem)]
        assert not isinstance(kernel, str)
        return replace(kernel, region=replace(problem.region, reasons=()))
    if context.as_before and (earlier := context.memory.schedules.get(results)) is not None:
        try:
            lowered = lower_for_images(problem, earlier, context.machine)
            return replace(lowered, region=replace(problem.region, reasons=("has the schedule of other sizes; not predicted for these",)))
        except Unsuitable:
            pass
    with context.stages.stage("choice"):
        choice = _as_before(problem, context.choose(problem, context.machine, context.threads), context, results)
        context.stages.ranked(choice.space.generated)
    lowered = lower_for_images(problem, choice.schedule, context.machine)
    said = [prediction(choice.predicted, choice.terms, len(lowered.kernels))] if choice.predicted else [f"what follows {choice.schedule}"]
    if choice.measured_seconds is not None:
        said.append(f"measured {1e6 * choice.measured_seconds:.3g} us")
    kernels = tuple(replace(kernel, header="\n".join((kernel.header, *said))) for kernel in lowered.kernels)
    reasons = (*([IN_NO_ORDER] if choice.schema.unordered(choice.schedule) else ()), *choice.notes)
    return replace(
        lowered,
        region=replace(problem.region, reasons=reasons),
        kernels=kernels,
        predicted_seconds=choice.predicted,
        terms=choice.terms,
        space=choice.space,
        measured_seconds=choice.measured_seconds,
        bounds=contained(
            choice.schema.name, "no bounds are stated", partial(bounds_of, problem, choice, context.machine, context.threads), lambda _: NO_BOUNDS
        ),
        comparison=choice.comparison,
    )


def _as_before(problem: Problem, best: Choice, context: _Context, results: tuple[str, ...]) -> Choice:
    """The schedule that the region with these results has for another size, if it is predicted nearly as fast as the best; otherwise the best. Only
    for CPUs, where sizes share kernels, and unless the best was measured."""
    earlier = context.memory.schedules.get(results)
    context.memory.schedules[results] = best.schedule
    if earlier in (None, best.schedule) or context.machine.is_gpu or best.measured_seconds is not None:
        return best
    ranking = rank(problem, context.machine, context.threads, context.numerics)
    found = ranking.find(earlier)
    if found is None or found.seconds > (1 + KEPT) * best.seconds:
        return best
    context.memory.schedules[results] = earlier
    return ranking.compared(found)


def lower_loop(region: Region, context: _Context, laid_out: LaidOut) -> list[Lowered]:
    """Lowers a loop to regions before it, one region for all steps, and regions after it. The steps are one kernel if its body is a recurrence for
    which a schema predicts that to be faster than the kernels of one step, repeated. What is decided, about joins in the body too, is added to what
    the context considered."""
    possible = _ways_of(region, context, laid_out)
    apart = possible.apart
    for joined in possible.joined:  # the body's names are its own
        context.considered.append(replace(joined, results=tuple(f"{region.nodes[0].name}.{name}" for name in joined.results)))
    repeated = apart.repeated(region)
    try:
        if isinstance(possible.together, str):
            raise Unsuitable(possible.together)
        together = possible.together
        (steps,) = together.steps()
    except Unsuitable as reason:
        why = f"kernels for each step: {reason}"
        context.considered.append(MergeDecision(region.outputs, False, f"{region.name} has {why}"))
        return apart.around(with_reasons(repeated, why))
    one, each = (f"{1e6 * way.predicted_seconds:.4g} us" for way in (steps, repeated))
    times = f"predicted {one} for all steps in one kernel, {each} for kernels of one step"
    decided = context.policy.about(LOOP, region.outputs)
    taken = steps.predicted_seconds < repeated.predicted_seconds if decided is None else decided
    times = times if decided is None else f"{times}; {WHOLE}"
    ways = Ways(LOOP, (steps.predicted_seconds, repeated.predicted_seconds))
    context.considered.append(MergeDecision(region.outputs, taken, f"{region.name} {times}", ways))
    if not taken:
        return apart.around(with_reasons(repeated, times))
    steps = replace(steps, region=region, schedule=f"{together.loop.length} steps in one kernel: {steps.schedule}")
    return together.around(with_reasons(steps, times))


@dataclass(frozen=True)
class _Unfolded:
    """A decomposed loop, and the context that its regions are lowered in, extended by its values."""

    loop: Loop
    outside: _Context

    @cached_property
    def context(self) -> _Context:
        values = MappingProxyType({**self.outside.values, **self.loop.values})
        layouts = MappingProxyType({**self.outside.layouts, **self.loop.layouts})
        return replace(self.outside, values=values, layouts=layouts, choose=_with_kernels(self.outside), lowered={})

    @property
    def storage(self) -> dict[str, Storage]:
        return {name: Storage(self.loop.values[name], layout) for name, layout in self.loop.layouts.items()}

    def steps(self) -> list[Lowered]:
        return [lower_region(part, self.context) for part in self.loop.body]

    def repeated(self, region: Region) -> Lowered:
        """The regions of one step as one region that repeats."""
        steps = self.steps()
        storage = self.storage
        for part in steps:
            storage |= part.storage
        kernels = {kernel.name: kernel for part in steps for kernel in part.kernels}
        return Lowered(
            region,
            f"{self.loop.length} steps of: " + "; ".join(f"{part.region.kind} ({part.schedule})" for part in steps),
            tuple(kernels.values()),
            tuple(call for part in steps for call in part.calls),
            MappingProxyType(storage),
            self.loop.length * sum(part.predicted_seconds for part in steps),
            MappingProxyType({}),
            self.loop.length,
            sum((part.space for part in steps), SpaceCounts()),
            checks=MappingProxyType({name: checks for part in steps for name, checks in part.checks.items()}),
        )

    def around(self, steps: Lowered) -> list[Lowered]:
        """The lowered regions before the steps, the steps, and the regions after them."""
        storage = MappingProxyType(self.storage)
        before = [replace(lower_region(part, self.context), storage=storage) for part in self.loop.before]
        steps = replace(steps, storage=MappingProxyType({**storage, **steps.storage}))
        return [*before, steps, *(lower_region(part, self.context) for part in self.loop.after)]


@dataclass(frozen=True)
class _Ways:
    """A loop by kernels of one step, and by one kernel, or why that is not possible. `joined`: what was decided about joins in its body."""

    apart: _Unfolded
    together: _Unfolded | str
    joined: tuple[MergeDecision, ...]


def _ways_of(region: Region, context: _Context, laid_out: LaidOut) -> _Ways:
    """Both ways of computing a loop, not yet lowered."""
    node = without_copies(region.nodes[0])
    read = {name for other in laid_out.regions for name in other.inputs} | set(context.graph.outputs)
    body = node.attributes["body"]
    laid_out_body = lay_out(body, RowJudge(context.machine, context.threads, frozenset(body.constants)), in_place=False)

    def unfolded(body: LaidOut) -> _Unfolded:
        return _Unfolded(unfold(node, context.graph, body, read, context.values), context)

    apart = unfolded(laid_out_body)
    if not context.persistent:
        return _Ways(apart, f"a barrier of all blocks was not measured on {context.machine.name}", laid_out_body.considered)
    try:
        together = unfolded(whole_body(body))
    except Unsuitable as reason:
        return _Ways(apart, str(reason), laid_out_body.considered)
    copies = len(together.loop.body) > 1
    return _Ways(apart, "its body copies what it passes through" if copies else together, laid_out_body.considered)


def with_reasons(lowered: Lowered, *reasons: str) -> Lowered:
    return replace(lowered, region=replace(lowered.region, reasons=(*lowered.region.reasons, *reasons)))


def _with_kernels(context: _Context) -> Chooser:
    """The context's chooser inside a loop, whose steps are kernel calls: libraries are not called there, and the models choose instead."""

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        choice = context.choose(problem, machine, threads)
        return choice if choice.schema is not library(machine) else choose(problem, machine, threads)

    return chosen


def without_kernels(program: Program, failures: Mapping[str, str]) -> Program:
    """The program with every region that calls a failed kernel run by PyTorch or by its operators' definitions; `failures` maps kernels to reasons.
    If a part of a loop failed, the whole loop is replaced; a copy that only lowering needed becomes a node of the graph."""
    lost: dict[int, list[str]] = {}
    for index, lowered in enumerate(program.regions):
        why = [f"kernel failed: {failures[kernel.name]}" for kernel in lowered.kernels if kernel.name in failures]
        if why:
            lost[index] = why
    return through_torch(program, lost)


def through_torch(program: Program, positions: Mapping[int, Sequence[str]]) -> Program:
    """The program with the regions at some positions run by PyTorch or by their operators' definitions, for the reasons given."""
    graph = program.graph
    lost = {index: list(why) for index, why in positions.items()}
    loops = {index: _loop_parts(program, lowered.region) for index, lowered in enumerate(program.regions) if lowered.region.kind == "loop"}
    skipped: set[int] = set()
    for index, parts in loops.items():
        why = list(dict.fromkeys(reason for part in parts for reason in lost.pop(part, [])))
        if why:
            lost[index] = why
            skipped |= parts - {index}
    for index in lost:
        region = program.regions[index].region
        if not region.nodes:
            graph = _with_copy(graph, region)
    made = graph.producers()

    def outputs_of(index: int) -> tuple[str, ...]:
        """The region's results; a part of a concatenation is stored with all of it, as everything else in it is stored before."""
        return tuple(name if name in made else program.aliases.get(name, name) for name in program.regions[index].region.outputs)

    # a part of an operator (the sum of a softmax) is not a value of the graph: its readers compute the whole operator
    for index, lowered in enumerate(program.regions):
        if index not in skipped and index in lost and not any(name in made for name in outputs_of(index)):
            skipped.add(index)
            for reader, other in enumerate(program.regions):
                if set(other.region.inputs) & set(lowered.region.outputs):
                    lost.setdefault(reader, []).extend(why for why in lost[index] if why not in lost.get(reader, ()))
    regions = []
    for index, lowered in enumerate(program.regions):
        if index in skipped:
            continue
        if index in lost:
            region = lowered.region
            outputs = outputs_of(index)
            if index in loops:
                written = {name for part in loops[index] for name in program.regions[part].region.outputs}
                outputs = tuple(name for name in region.nodes[0].outputs if name in written)
            nodes = _sufficient(graph, made, outputs, frozenset(program.storage) - frozenset(outputs))
            own = {name for node in nodes for name in node.outputs}
            inputs = tuple(dict.fromkeys(name for node in nodes for name in node.inputs if name not in own))
            region = replace(region, kind="torch", nodes=nodes, inputs=inputs, outputs=outputs, reasons=(*region.reasons, *lost[index]))
            lowered = Lowered(region, "PyTorch", (), ())
        regions.append(lowered)
    return replace(program, graph=graph, regions=tuple(regions))


def _loop_parts(program: Program, loop: Region) -> frozenset[int]:
    """Positions of the regions of a loop: the loop itself, and regions that write or read its states' histories."""
    histories = {f"{loop.nodes[0].name}.state{i}" for i in range(loop.nodes[0].attributes["states"])}
    return frozenset(
        index
        for index, lowered in enumerate(program.regions)
        if lowered.region is loop or histories.intersection((*lowered.region.inputs, *lowered.region.outputs))
    )


def _with_copy(graph: Graph, region: Region) -> Graph:
    """The graph with a node for a region that has none, which copies its only input into another layout; not for a result of the model, which is
    copied from what the graph does not know, and computed again. Other copies of that are of the result."""
    (source,), (target,) = region.inputs, region.outputs
    if target in graph.values:
        return graph
    source = in_graph(source)
    value = graph.values[source]
    values = MappingProxyType({**graph.values, target: Value(target, value.shape, value.dtype)})
    return replace(graph, nodes=(*graph.nodes, Node(target, "copy", (source,), (target,))), values=values)


def _sufficient(graph: Graph, made: Mapping[str, Node], outputs: Sequence[str], stored: frozenset[str]) -> tuple[Node, ...]:
    """The nodes that compute the outputs from stored values and constants, in graph order."""
    needed: set[str] = set()
    waiting = list(outputs)
    while waiting:
        node = made.get(waiting.pop())
        if node is None or node.name in needed:
            continue
        needed.add(node.name)
        waiting += [name for name in node.inputs if name not in stored]
    return tuple(node for node in graph.nodes if node.name in needed)
