"""Predicted seconds of a graph's regions, with layouts by prediction, when it is decided what runs together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from tilewright.codegen.intrinsics.wgmma import REQUIRES
from tilewright.errors import contained
from tilewright.graph.windows import pooling_of
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region, Unsuitable
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.cache_padding import with_cache_padding
from tilewright.partition.canonical import with_names
from tilewright.partition.chains import Search, with_sections
from tilewright.partition.context import Chooser, Context, canonical_problem
from tilewright.partition.joining import RowJudge
from tilewright.partition.joint_loops import TimedLoop
from tilewright.partition.judges import judge_of
from tilewright.partition.layout_choice import Chosen, Decided, Judge, choose_layouts
from tilewright.partition.layouts import BY_RULE, LaidOut, Storing, assign_layouts, in_graph
from tilewright.partition.loops import lower_loop, ways_of
from tilewright.partition.merges import BY_MERGES, Memory, Policy, Timed
from tilewright.partition.narrow_results import with_narrow_functions
from tilewright.partition.nearest_factors import with_nearest_factors
from tilewright.partition.precision import AS_COMPUTED, Precision, precision_of
from tilewright.partition.regions import lay_out, regions_of
from tilewright.partition.strip_judge import StripJudge
from tilewright.partition.tile_judge import TileJudge
from tilewright.partition.type_choice import Types, choose_types
from tilewright.selection.choice import choose
from tilewright.stages import Stages


@dataclass(frozen=True)
class Predictions:
    """Predicted seconds of regions when it is decided what runs together. Each problem is ranked once: merged siblings and chains concern the same
    regions."""

    models: Chooser
    machine: Machine
    threads: int
    numerics: Numerics
    stages: Stages
    precision: Precision = AS_COMPUTED
    measured: Chooser | None = None
    """Chooses what trials measured, where that decides: between ways whose predictions are close."""
    chains: bool = False
    """Whether predictions decide about all chains, which then count when layouts, types and merges are decided."""
    replaced: frozenset[int] = frozenset()
    """Numbers of the graph's outputs that replace inputs after a call."""
    layouts: Decided | None = None
    """What was decided about layouts for another size of the model."""
    joins: Mapping[tuple[str, ...], bool] = field(default_factory=dict)
    """What was decided for another size about reductions and attention that join the regions before them."""
    persistent: bool = True
    """Whether all steps of a recurrent layer may be one kernel."""
    policy: Policy = BY_MERGES
    known: dict[object, float] = field(default_factory=dict)
    """Seconds by problem, and whether with Winograd's algorithm."""
    rows: dict[object, float] = field(default_factory=dict)
    """Seconds of the problems that were asked about when it was decided which rows join."""
    graphs: dict[tuple[int, frozenset[str]], tuple[Graph, LaidOut]] = field(default_factory=dict)
    """By a graph's identity and the values that are not stored: the graph, which keeps its identity, and its regions with layouts."""
    decided: dict[tuple[int, frozenset[str]], Decided] = field(default_factory=dict)
    """What was decided about the layouts of each of them."""

    def laid_out(self, graph: Graph, unstored: frozenset[str] = frozenset()) -> LaidOut:
        """The graph's regions, of which these values are not stored, with layouts by prediction; those of a graph that was predicted are
        planned."""
        key = id(graph), unstored
        if key not in self.graphs:
            judge = RowJudge(
                self.machine, self.threads, frozenset(graph.constants), self.numerics, self.precision, self.rows, self._measured_seconds,
                self.policy, self.joins,
            )  # fmt: skip
            parts = regions_of(graph, judge if self.precision.whole_rows or self.precision.attention else None, unstored=unstored)
            gpu = self.machine.is_gpu

            def laid(storing: Storing) -> LaidOut:
                found = assign_layouts(graph, parts, self.precision, storing=storing)
                if not gpu:
                    return with_cache_padding(graph, found, self.machine)
                found = with_narrow_functions(found)
                return with_nearest_factors(graph, found) if self.numerics.tf32 and self.machine.has(*REQUIRES) else found

            pinned = frozenset(graph.outputs[number] for number in self.replaced)
            deciding = Judge(
                partial(self._timed, graph), gpu, self.measured is not None, partial(self._chained_seconds, graph) if self.chains else None,
                self.numerics.vendor, self.policy.predicted,
            )  # fmt: skip
            with_loops = replace(deciding, predict=partial(self._timed, graph, loops=True))
            typing = partial(choose_types, graph, laid, with_loops, self.precision)
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
            self._possible(region, context)
            for region in regions
            if region.kind not in ("torch", "loop") and all(0 not in context.values[name].shape for name in region.outputs)
        ]
        timed += [Timed(region, self._loop_seconds(region, context, laid_out)) for region in regions if loops and region.kind == "loop"]
        return timed

    def _by_itself(self, region: Region, context: Context) -> Timed:
        """A region with its seconds. Raises Unsuitable if there is no kernel for it."""
        return Timed(region, self.seconds(region, context), lambda: self._measured_seconds(canonical_problem(region, context)[0]))

    def _possible(self, region: Region, context: Context) -> Timed:
        """A region with its seconds: infinite if results are pooled and no kernel does that with values that are stored so."""
        try:
            return self._by_itself(region, context)
        except Unsuitable:
            if pooling_of(region.steps) is None:
                raise
            return Timed(region, math.inf)

    def _loop_seconds(self, region: Region, context: Context, laid_out: LaidOut) -> float:
        """Predicted seconds of a loop the faster way: in one kernel, or by kernels of one step."""
        ways = ways_of(region, context, laid_out)
        around = (*ways.apart.loop.before, *ways.apart.loop.after)
        each = sum(self.seconds(part, ways.apart.context) for part in ways.apart.loop.body)
        seconds = ways.apart.loop.length * each
        if not isinstance(ways.together, str):
            try:
                seconds = min(seconds, sum(self.seconds(part, ways.together.context) for part in ways.together.loop.body))
            except Unsuitable:
                pass
        return seconds + sum(self.seconds(part, ways.apart.context) for part in around)

    def _context(self, graph: Graph, laid_out: LaidOut) -> Context:
        return Context(graph, laid_out.values, laid_out.layouts, self.machine, self.threads, persistent=self.persistent)

    def _chained_seconds(self, graph: Graph, before: LaidOut, after: LaidOut, names: frozenset[str]) -> tuple[float, float]:
        """Predicted seconds in two partitions of all regions that named ones may be chained with, as chains where these are faster."""
        names = with_sections(graph, (before, after), names)

        def seconds(laid_out: LaidOut) -> float:
            context = self._context(graph, laid_out)

            def predict(region: Region, winograd: bool) -> float:
                return self.seconds(region, context, winograd)

            return Search(graph, laid_out, predict, self.judge, None, lambda _: None, Memory(), every=True).seconds(names)

        return seconds(before), seconds(after)

    @cached_property
    def judge(self) -> StripJudge | TileJudge:
        """Predicts chains."""
        return judge_of(self.machine, self.threads, self.numerics, self.stages.ranked)

    def context(self, graph: Graph, unstored: frozenset[str] = frozenset()) -> Context:
        """The context of the graph's regions."""
        return self._context(graph, self.laid_out(graph, unstored))

    def of_regions(self, graph: Graph, concerns: Callable[[Region], bool], unstored: frozenset[str] = frozenset()) -> list[Timed]:
        """The graph's regions for which the function says true, with their seconds and those of the copies of their results (`Storing.apart`)."""
        laid_out = self.laid_out(graph, unstored)
        copies = [region for region in laid_out.regions if region.inputs and region.outputs == (in_graph(region.inputs[0]),)]
        names = {region.name for region in copies}
        concerned = self._timed(graph, laid_out, [region for region in laid_out.regions if region.name not in names and concerns(region)])
        copied = {timed.region.inputs[0]: timed for timed in self._timed(graph, laid_out, copies)}
        return [timed.with_copy(copied[name]) if (name := timed.region.outputs[0]) in copied else timed for timed in concerned]

    def of_nodes(self, graph: Graph, names: Collection[str]) -> float:
        """Predicted seconds of the graph's regions that have some nodes of these names, loops among them."""
        laid_out = self.laid_out(graph)
        concerned = [region for region in laid_out.regions if any(node.name in names for node in region.nodes)]
        return sum(timed.seconds for timed in self._timed(graph, laid_out, concerned, loops=True))

    def in_partition(self, graph: Graph, unstored: frozenset[str], regions: Sequence[Region]) -> list[Timed]:
        """Regions of the graph, or made of them, with their seconds.

        Raises:
            Unsuitable: if there is no kernel for one.
        """
        context = self.context(graph, unstored)
        return [self._by_itself(region, context) for region in regions]

    def loops(self, graph: Graph, names: Collection[str]) -> dict[str, TimedLoop]:
        """The graph's loops with these names, as they are best lowered."""
        laid_out = self.laid_out(graph)
        context = replace(self._context(graph, laid_out), numerics=self.numerics, stages=self.stages, policy=self.policy)

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

    def seconds(self, region: Region, context: Context, winograd: bool = True) -> float:
        """Predicted seconds of the region by itself, with or without Winograd's algorithm. Raises Unsuitable if there is no kernel for it."""
        problem, key, names = canonical_problem(region, context)
        transforms = self.numerics.winograd and any(schema.transforms for schema in schemas(self.machine, region.kind))
        winograd = winograd or not transforms  # the same ranking where no schema transforms
        if (key, winograd) not in self.known:
            chosen = self.models if winograd else partial(choose, numerics=replace(self.numerics, winograd=False))
            try:
                choice = chosen(problem, self.machine, self.threads)
            except Unsuitable as reason:
                raise Unsuitable(with_names(str(reason), names)) from None
            self.stages.ranked(choice.space.generated)
            self.known[key, winograd] = choice.seconds
        return self.known[key, winograd]


def operators_apart(graph: Graph, machine: Machine, threads: int, precision: str = "fp32", numerics: Numerics = USUAL) -> dict[str, float]:
    """Predicted seconds of operators if each had kernels of its own, by the names of their nodes. Views and what PyTorch runs have none."""
    laid_out = lay_out(graph, None, precision_of(precision, graph, machine), fused=False)
    context = Context(graph, laid_out.values, laid_out.layouts, machine, threads)
    predictions = Predictions(partial(choose, numerics=numerics), machine, threads, numerics, Stages())
    seconds: dict[str, float] = {}
    for region in laid_out.regions:
        if region.nodes and region.kind not in ("torch", "loop") and all(laid_out.values[name].elements for name in region.outputs):
            name = region.nodes[-1].name
            seconds[name] = seconds.get(name, 0.0) + predictions.seconds(region, context)
    return seconds
