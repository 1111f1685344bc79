"""From a graph to a program: what runs together, layouts, a schedule for each region, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import ParamSpec

from tilewright.errors import contained
from tilewright.hardware.calibration import gpu_recurrence
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, MergeDecision, Program, Region, Storage
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.chains import Ready, Search
from tilewright.partition.context import Chooser, Context, Recorded, canonical_problem, deciding_once
from tilewright.partition.joining import JOIN
from tilewright.partition.layouts import LaidOut
from tilewright.partition.library_layers import lower_layer
from tilewright.partition.loops import lower_loop
from tilewright.partition.lowering import lower_region
from tilewright.partition.merges import BY_MERGES, CHAIN, Measured, Memory, Merge, Policy
from tilewright.partition.precision import Precision, precision_of
from tilewright.partition.predictions import Predictions
from tilewright.partition.regions import unfused
from tilewright.partition.rewriting import Rewritten, rewritten
from tilewright.partition.updates import in_place
from tilewright.partition.without_kernels import through_torch
from tilewright.selection.choice import choose, choosing
from tilewright.stages import Stages


@dataclass(frozen=True)
class Divided:
    """A graph divided into regions, none of which but chains is lowered: the regions, the context to lower them in, what was decided before, and all
    decisions."""

    laid_out: LaidOut
    context: Context
    changed: Rewritten
    search: tuple[MergeDecision, ...]

    def program(self) -> Program:
        """The program with the kernels of all regions."""
        laid_out, context = self.laid_out, self.context
        with context.stages.stage("code generation"):
            lowered, lost = _lowered(laid_out, self.changed, context)
        storage = MappingProxyType(_storage(laid_out, context.graph))
        aliases = MappingProxyType({name: place.buffer for name, place in laid_out.slices.items()})
        program = Program(context.graph, context.machine.name, lowered, storage, aliases, (*self.search, *context.considered))
        return through_torch(program, lost) if lost else program


def divide(
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
    sizes: bool = False,
) -> Divided:
    """Decides what of the graph runs together on the machine.

    threads: for CPUs.
    chooser: selects the schedules of regions.
    precision: a name of `precision.PRECISIONS`, or a `Precision` that decides the type of each value that regions store.
    numerics: allowed rounding when it is decided what runs together; the chooser observes it separately.
    models: chooses by predictions alone when it is decided what runs together (`selection.choice.choose`, or what remembers its choices).
    chains: whether successive regions may become one kernel (`partition.chains`); by default on a GPU those that were measured, and of the others
        those predicted faster as far as predictions were found to be right (`TileJudge.decides`, docs/partitions.md), if the program has one size.
    recorded: what was measured of chains, which decides about them; if it is given, the chooser's measured seconds decide about all other merges of
        which the predictions are close, where it has them.
    stages: learns what took how long.
    persistent: whether all steps of a recurrent layer may be one kernel; by default on CPUs, and on GPUs where its barrier was measured
        (`hardware.calibration.gpu_recurrence`).
    updates: (input, output) numbers of the outputs that replace inputs after a call; on CPUs they are stored in the inputs where that is possible
        (`partition.updates`).
    memory: of plans for other sizes, whose schedules and chains, and on CPUs joins of which times decide, are kept where they are predicted nearly as
        fast as the best, and on CPUs whose merged siblings are kept; this plan is added.
    ready: is called with kernels as soon as the program is likely to have them.
    as_before: what the memory knows is taken without a prediction, on CPUs: the plan takes a fraction of the time, but nothing says how good it is.
    policy: merges about which not their own times decide.
    sizes: the program is one of several for different sizes, and on a GPU its kernels are to serve other sizes too (`kernels.gpu.trips`), as on a CPU
        they always do.

    Raises:
        UnsupportedOption: for a precision that the machine does not have.
    """
    if isinstance(precision, str):
        precision = precision_of(precision, graph, machine)
    stages = stages or Stages()
    if models is None and chooser is choose and numerics == USUAL:  # which then choose alike
        models = chooser = deciding_once(choosing())
    measured = deciding_once(chooser) if recorded is not None else None
    memory = memory or Memory()
    by_prediction = chains or (chains is None and not machine.is_gpu)
    if persistent is None:
        persistent = not machine.is_gpu or gpu_recurrence(machine) is not None
    follows = not machine.is_gpu and not policy.predicted
    predictions = Predictions(
        models or choosing(numerics), machine, threads, numerics, stages, precision, measured=measured, chains=by_prediction,
        replaced=frozenset(output for _, output in updates), layouts=dict(memory.layouts) if follows else None,
        joins=dict(memory.joins) if follows else {}, persistent=persistent, policy=policy,
    )  # fmt: skip
    stages.report("partition")
    with stages.stage("partition"):
        changed = rewritten(graph, predictions, memory)
        graph = changed.graph
        fused = partial(predictions.laid_out, graph, changed.unstored)
        laid_out = contained("the model", "all of it runs through PyTorch", fused, lambda _: unfused(graph))
        memory.layouts.update(predictions.decided.get((id(graph), changed.unstored), {}))
        memory.joins.update((each.results, each.taken) for each in laid_out.considered if each.kind == JOIN and each.ways is not None)
        if updates and not machine.is_gpu:
            pairs = [(graph.outputs[output], graph.inputs[given]) for given, output in updates]
            apart = laid_out
            laid_out = contained("the model", "its updates are copied", partial(in_place, graph, laid_out, pairs), lambda _: apart)
        context = Context(
            graph, laid_out.values, laid_out.layouts, machine, threads, chooser, numerics, stages, persistent=persistent, memory=memory, ready=ready,
            as_before=as_before and not machine.is_gpu, sizes=sizes, policy=policy,
        )  # fmt: skip
        search = (*changed.considered, *laid_out.considered)
        # kernels of chains have constant extents, so that programs for several sizes on a GPU have only measured ones
        if chains or (chains is None and (recorded is not None or not (machine.is_gpu and sizes))):
            separate: tuple[LaidOut, tuple[Merge, ...]] = (laid_out, ())
            chained = partial(_chained, laid_out, context, predictions, recorded, chains is True)
            laid_out, considered = contained("the model", "nothing is merged", chained, lambda _: separate)
            search += tuple(MergeDecision(merge.results, merge.taken, str(merge), CHAIN, merge.ways) for merge in considered)
    return Divided(laid_out, context, changed, search)


P = ParamSpec("P")


def _with_kernels(division: Callable[P, Divided]) -> Callable[P, Program]:
    def planned(*args: P.args, **options: P.kwargs) -> Program:
        return division(*args, **options).program()

    return planned


plan_program = _with_kernels(divide)
"""Plans how a graph runs on a machine: `divide`, with the same arguments, and the kernels of all regions."""


def chains_by_prediction(
    graph: Graph, machine: Machine, search: Sequence[MergeDecision], precision: str | Precision = "fp32", numerics: Numerics = USUAL
) -> tuple[MergeDecision, ...]:
    """The chains of a program for a GPU, with what predictions would decide about them, as far as they are not in its own `search`. `graph`: the
    program's."""
    known = {decision.key for decision in search}
    considered = divide(graph, machine, 1, precision=precision, numerics=numerics, chains=True).search
    return tuple(decision for decision in considered if decision.kind == CHAIN and decision.key not in known)


def _chained(
    laid_out: LaidOut, context: Context, predictions: Predictions, recorded: Recorded | None, every: bool
) -> tuple[LaidOut, tuple[Merge, ...]]:
    """The regions with chains where these are faster, and what was considered; the context's judge then knows their strips or tiles."""

    def predict(region: Region, winograd: bool) -> float:
        return predictions.seconds(region, context, winograd)

    chosen = deciding_once(context.choose)

    def measured(recorded: Recorded, problem: Problem) -> Measured | None:
        return recorded(problem, context.machine, context.threads, chosen)

    def library(region: Region) -> float | None:
        if not context.numerics.vendor:
            return None
        choice = chosen(canonical_problem(region, context)[0], context.machine, context.threads)
        return None if choice.predicted else choice.measured_seconds

    search = Search(
        context.graph, laid_out, predict, context.judge, None if recorded is None else partial(measured, recorded), library, context.memory,
        every, context.ready, context.as_before, context.policy,
    )  # fmt: skip
    return search.chained(), tuple(search.considered)


def _lowered(laid_out: LaidOut, changed: Rewritten, context: Context) -> tuple[tuple[Lowered, ...], dict[int, list[str]]]:
    """The lowered regions, and by position why some run through PyTorch."""
    lowered: list[Lowered] = []
    lost: dict[int, list[str]] = {}
    for region in laid_out.regions:
        subject = ", ".join(node.described for node in region.nodes) or f"a copy of {', '.join(region.inputs)}"
        region = replace(region, reasons=(*region.reasons, *changed.about(region)))
        made = contained(subject, "runs through PyTorch", partial(_lowered_region, region, context, laid_out), str)
        if isinstance(made, str):
            lost[len(lowered)] = [f"a fault inside Tilewright: {made}"]
            made = [Lowered(replace(region, kind="torch"), "PyTorch", (), ())]
        for one in made:
            context.ready(one.kernels)
        lowered += made
    return tuple(lowered), lost


def _lowered_region(region: Region, context: Context, laid_out: LaidOut) -> list[Lowered] | str:
    if region.kind == "loop":
        return lower_loop(region, context, laid_out)
    layer = lower_layer(region, context, laid_out.regions) if region.kind == "torch" else None
    return [lower_region(region, context) if layer is None else layer]


def _storage(laid_out: LaidOut, graph: Graph) -> dict[str, Storage]:
    """What is stored of the graph's values: not what stays inside of chains."""
    within = {stage.outputs[0] for region in laid_out.regions for stage in region.stages if stage.outputs[0] not in region.outputs}
    stored = {name: layout for name, layout in laid_out.layouts.items() if name not in within}
    return {name: Storage(laid_out.values[name], layout, name if name in graph.constants else None) for name, layout in stored.items()}
