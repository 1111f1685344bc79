"""From a graph to a program: what runs together, layouts, a schedule for each region, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from tilewright.errors import contained
from tilewright.hardware.calibration import gpu_recurrence
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.graph import Graph
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, MergeDecision, Program, Region, Storage, Unsuitable
from tilewright.kernels.gpu.bounds import WIDEST_BYTES
from tilewright.kernels.gpu.tensor_cores.schema import TENSOR_CORES
from tilewright.kernels.schema import USUAL, Numerics, form_of
from tilewright.partition.chains import Ready, Search
from tilewright.partition.context import Chooser, Context, Recorded, canonical_problem, deciding_once
from tilewright.partition.folded_images import fold_images
from tilewright.partition.joint_loops import join_loops
from tilewright.partition.layouts import LaidOut
from tilewright.partition.loops import lower_loop
from tilewright.partition.lowering import lower_region
from tilewright.partition.merges import BY_MERGES, CHAIN, Measured, Memory, Merge, Policy, Timed
from tilewright.partition.poolings import Poolings, choose_poolings
from tilewright.partition.precision import Precision, precision_of
from tilewright.partition.predictions import Predictions
from tilewright.partition.prologues import Prologues, choose_prologues
from tilewright.partition.regions import unfused
from tilewright.partition.siblings import Merged, merge_siblings
from tilewright.partition.updates import in_place
from tilewright.partition.without_kernels import through_torch
from tilewright.selection.choice import choose
from tilewright.stages import Stages


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
    sizes: bool = False,
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
    plan takes a fraction of the time, but nothing says how good it is. `policy`: merges about which not their own times decide. `sizes`: the program
    is one of several for different sizes, and on a GPU its kernels are to serve other sizes too (`kernels.gpu.trips`), as on a CPU they always do.

    Raises:
        UnsupportedOption: for a precision that the machine does not have.
    """
    divided = _divided(
        graph, machine, threads, chooser, precision, numerics, models, chains, recorded, stages, persistent, updates, memory, ready,
        as_before, policy, sizes,
    )  # fmt: skip
    laid_out, context = divided.laid_out, divided.context
    graph, stages = context.graph, context.stages
    lowered: list[Lowered] = []
    lost: dict[int, list[str]] = {}
    with stages.stage("code generation"):
        for region in laid_out.regions:
            subject = ", ".join(node.described for node in region.nodes) or f"a copy of {', '.join(region.inputs)}"
            notes = [decisions[node.name].text for node in region.nodes for decisions in divided.rewritten if node.name in decisions]
            region = replace(region, reasons=(*region.reasons, *notes))
            made = contained(subject, "runs through PyTorch", partial(_lowered, region, context, laid_out), str)
            if isinstance(made, str):
                lost[len(lowered)] = [f"a fault inside Tilewright: {made}"]
                made = [Lowered(replace(region, kind="torch"), "PyTorch", (), ())]
            for one in made:
                context.ready(one.kernels)
            lowered += made
    within = {stage.outputs[0] for region in laid_out.regions for stage in region.stages if stage.outputs[0] not in region.outputs}
    storage = {
        name: Storage(laid_out.values[name], layout, name if name in graph.constants else None)
        for name, layout in laid_out.layouts.items()
        if name not in within
    }
    aliases = {name: place.buffer for name, place in laid_out.slices.items()}
    search = (*divided.search, *context.considered)
    program = Program(graph, context.machine.name, tuple(lowered), MappingProxyType(storage), MappingProxyType(aliases), search)
    return through_torch(program, lost) if lost else program


@dataclass(frozen=True)
class _Divided:
    """A graph divided into regions, none of which but chains is lowered: the regions, the context to lower them in, what was decided about rewriting
    the graph, by node, and all decisions."""

    laid_out: LaidOut
    context: Context
    rewritten: tuple[Mapping[str, MergeDecision], ...]
    search: tuple[MergeDecision, ...]


def _divided(
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
) -> _Divided:
    """The first part of `plan_program`: what runs together."""
    if isinstance(precision, str):
        precision = precision_of(precision, graph, machine)
    stages = stages or Stages()
    if models is None and chooser is choose and numerics == USUAL:  # which then choose alike
        models = chooser = deciding_once(choose)
    measured = deciding_once(chooser) if recorded is not None else None
    memory = memory or Memory()
    by_prediction = chains or (chains is None and not machine.is_gpu)
    if persistent is None:
        persistent = not machine.is_gpu or gpu_recurrence(machine) is not None
    earlier = None if machine.is_gpu or policy.predicted else dict(memory.layouts)
    predictions = Predictions(
        models or partial(choose, numerics=numerics), machine, threads, numerics, stages, measured,
        by_prediction, frozenset(output for _, output in updates), earlier, persistent,
        policy=policy,
    )  # fmt: skip
    stages.report("partition")
    with stages.stage("partition"):
        merged = contained("the model", "its siblings stay apart", partial(_merged, graph, precision, predictions, memory), lambda _: Merged(graph))
        joining = partial(_joint, merged.graph, precision, predictions, memory, persistent)
        joint = contained("the model", "its loops stay apart", joining, lambda _: Merged(merged.graph))
        folded = contained("the model", "no image is folded", partial(_folded, joint.graph, precision, predictions), lambda _: Merged(joint.graph))
        graph = folded.graph
        chosen = partial(_prologues, graph, precision, predictions, memory)
        inside = contained("the model", "contractions read what maps store", chosen, lambda _: Prologues())
        pooling = partial(_poolings, graph, precision, predictions, inside.values)
        pooled = contained("the model", "poolings read what is stored", pooling, lambda _: Poolings())
        rewritten = (merged.decisions, joint.decisions, folded.decisions, inside.decisions, pooled.decisions)
        unstored = inside.values | pooled.values
        fused = partial(predictions.laid_out, graph, precision, unstored)
        laid_out = contained("the model", "all of it runs through PyTorch", fused, lambda _: unfused(graph))
        memory.layouts.update(predictions.decided.get((id(graph), unstored), {}))
        if updates and not machine.is_gpu:
            pairs = [(graph.outputs[output], graph.inputs[given]) for given, output in updates]
            apart = laid_out
            laid_out = contained("the model", "its updates are copied", partial(in_place, graph, laid_out, pairs), lambda _: apart)
        context = Context(
            graph, laid_out.values, laid_out.layouts, machine, threads, chooser, numerics, stages, persistent=persistent, memory=memory, ready=ready,
            as_before=as_before and not machine.is_gpu, sizes=sizes, policy=policy,
        )  # fmt: skip
        search = (*(decision for decisions in rewritten for decision in decisions.values()), *laid_out.considered)
        only_measured = chains is None and machine.is_gpu
        if chains is not False and (recorded is not None or not only_measured):
            separate: tuple[LaidOut, tuple[Merge, ...]] = (laid_out, ())
            chained = partial(_chained, laid_out, context, predictions, recorded, only_measured)
            laid_out, considered = contained("the model", "nothing is merged", chained, lambda _: separate)
            search += tuple(MergeDecision(merge.results, merge.taken, str(merge), merge.ways) for merge in considered)
    return _Divided(laid_out, context, rewritten, search)


def chains_by_prediction(
    graph: Graph, machine: Machine, search: Sequence[MergeDecision], precision: str | Precision = "fp32", numerics: Numerics = USUAL
) -> tuple[MergeDecision, ...]:
    """The chains of a program for a GPU, with what predictions would decide about them, as far as they are not in its own `search`. `graph`: the
    program's."""
    measured = {decision.results for decision in search if decision.ways is not None and decision.ways.kind == CHAIN}
    known = {str(decision) for decision in search}  # such as regions that are not joined
    considered = _divided(graph, machine, 1, precision=precision, numerics=numerics, chains=True).search
    merges = (decision for decision in considered if len(decision.results) > 1 and (decision.ways is None or decision.ways.kind == CHAIN))
    return tuple(decision for decision in merges if decision.results not in measured and str(decision) not in known)


def _merged(graph: Graph, precision: Precision, predictions: Predictions, memory: Memory) -> Merged:
    """The graph with siblings merged where the models predict a gain; on CPUs, where sizes share kernels, as for the size planned first."""
    kept = None if predictions.machine.is_gpu else memory.siblings
    return merge_siblings(graph, partial(predictions.of_regions, precision), kept, predictions.policy)


def _joint(graph: Graph, precision: Precision, predictions: Predictions, memory: Memory, persistent: bool) -> Merged:
    """The graph with pairs of loops joined where the models predict a gain; on CPUs, where sizes share kernels, as for the size planned first."""
    kept = None if predictions.machine.is_gpu else memory.loops
    return join_loops(graph, partial(predictions.loops, precision, persistent), kept, predictions.policy)


def _folded(graph: Graph, precision: Precision, predictions: Predictions) -> Merged:
    """The graph with images of few channels folded for tensor cores where the models predict a gain."""
    machine, numerics = predictions.machine, predictions.numerics
    if not machine.is_gpu:
        return Merged(graph)

    def lanes(graph: Graph, region: Region) -> int:
        context = predictions.context(graph, precision)
        form = form_of(TENSOR_CORES, canonical_problem(region, context)[0], machine)
        if isinstance(form, Unsuitable) or (form.facts.kind == "tf32" and not numerics.tf32):
            return 0
        # folded, the factors may be of 16 bits although they are better float32 as they are
        factors = precision.factors(region, frozenset(graph.constants))
        element = min((size_of(precision.stored(region, context.values[name])) for name in factors), default=form.facts.element_bytes)
        return WIDEST_BYTES // element

    regions = partial(_regions, precision, predictions)
    return fold_images(graph, regions, partial(predictions.of_regions, precision), lanes, predictions.policy)


def _regions(precision: Precision, predictions: Predictions, graph: Graph) -> Sequence[Region]:
    return predictions.laid_out(graph, precision).regions


def _prologues(graph: Graph, precision: Precision, predictions: Predictions, memory: Memory) -> Prologues:
    """The maps that contractions compute where the models predict a gain; on CPUs, where sizes share kernels, as for the size planned first."""

    def predict(values: frozenset[str], concerns: Callable[[Region], bool]) -> list[Timed]:
        return predictions.of_regions(precision, graph, concerns, values)

    regions = predictions.laid_out(graph, precision).regions
    return choose_prologues(regions, graph.outputs, predict, None if predictions.machine.is_gpu else memory.prologues, predictions.policy)


def _poolings(graph: Graph, precision: Precision, predictions: Predictions, unstored: frozenset[str]) -> Poolings:
    """The results that kernels of contractions pool where the models predict a gain (GPUs)."""
    if not predictions.machine.is_gpu:
        return Poolings()
    regions = predictions.laid_out(graph, precision, unstored).regions
    predict = partial(predictions.in_partition, precision, graph, unstored)
    return choose_poolings(regions, graph.outputs, frozenset(graph.constants), predict, predictions.policy)


def _chained(
    laid_out: LaidOut, context: Context, predictions: Predictions, recorded: Recorded | None, only_measured: bool
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
        only_measured, context.ready, context.as_before, context.policy,
    )  # fmt: skip
    return search.chained(), tuple(search.considered)


def _lowered(region: Region, context: Context, laid_out: LaidOut) -> list[Lowered] | str:
    return lower_loop(region, context, laid_out) if region.kind == "loop" else [lower_region(region, context)]
