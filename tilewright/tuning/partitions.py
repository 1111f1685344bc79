"""Partitions of a whole graph into regions: those that the times of single merges leave in doubt are planned, measured in turns, and recorded.

A merge that is measured by itself misses what the network around it does: caches that keep a value from kernel to kernel, early launches, threads. So
the plan that the merges' own times choose is compared with a few others (`alternatives`), and the fastest one is taken if it is so beyond noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tilewright.errors import InvalidArtifact, contained
from tilewright.hardware import is_present
from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.region import MergeDecision, Program, Ways
from tilewright.kernels.schema import Numerics
from tilewright.partition.merges import BY_MERGES, CHAIN, LEAST_GAIN, LIBRARY, MEASURED_LOSS, Memory, Policy, gains
from tilewright.runtime.encoding import encode_graph
from tilewright.runtime.executable import Image
from tilewright.system.collection import collection_paused
from tilewright.text import number_of, seconds_text
from tilewright.tuning.measurement import Measurement, now, printable
from tilewright.tuning.partition_trials import MEASURER, Measurer, WholeOutcome, measured
from tilewright.tuning.problems import code_of, generator
from tilewright.tuning.records import Records
from tilewright.tuning.trials import TUNING_MODE
from tilewright.tuning.tuning import recorded_as

MOST = 4
"""Maximum partitions of a graph that are measured: each is planned, and its kernels compiled."""
NAMES_SHOWN = 3
"""Results of a merge that its partition's name has."""
MOST_TEXT = 1000
NETWORK = "network"
"""The kind of their records."""


@dataclass(frozen=True)
class Partition:
    """A partition, by what decides about its merges. `name` says how it differs from that which the merges' own times choose."""

    name: str
    policy: Policy = BY_MERGES

    @property
    def text(self) -> str:
        """What stands for the schedule in records."""
        facts = (sorted(self.policy.taken), sorted(self.policy.refused), self.policy.predicted)
        return json.dumps({"type": type(self).__name__, "policy": hashlib.sha256(repr(facts).encode()).hexdigest()[:20]})


CHOSEN = Partition("merges by their own times")


def alternatives(search: Sequence[MergeDecision], seconds: float, most: int) -> list[Partition]:
    """The partitions, at most so many, to compare with the one in which these merges were considered, which takes `seconds`: that with all layers
    that a library computes, that without chains, that of the predictions, and those that differ in one merge and its like, the closest times of both
    ways first and layers by a library last. Layers that are equal have equal times, and their merges are decided alike. Merges that take less of the
    whole than it has to gain are left out."""
    found: dict[Policy, Partition] = {}

    def add(name: str, policy: Policy) -> None:
        if policy != BY_MERGES:
            found.setdefault(policy, Partition(name, policy))

    timed = [(decision, decision.ways) for decision in search if decision.ways is not None]
    chains = [decision for decision, _ in timed if decision.kind == CHAIN]
    layers = [decision for decision, _ in timed if decision.kind == LIBRARY]
    if sum(ways.predicted[1] for decision, ways in timed if decision.kind == LIBRARY) >= LEAST_GAIN * seconds:
        add("recurrent layers by a library", Policy(taken=frozenset(decision.key for decision in layers)))
    if any(decision.taken for decision in chains):
        add("without chains", Policy(refused=frozenset(decision.key for decision in chains)))
    if any(ways.measured is not None and gains(*ways.measured) != gains(*ways.predicted) for _, ways in timed):
        add("merges by predictions", Policy(predicted=True))
    alike: dict[tuple[bool, str, Ways], list[MergeDecision]] = {}
    for decision, ways in timed:
        alike.setdefault((decision.taken, decision.kind, ways), []).append(decision)
    for (taken, kind, ways), decisions in sorted(alike.items(), key=lambda entry: _difference(entry[0][2])):
        together, apart = ways.measured or ways.predicted
        may_gain = len(decisions) * (together if taken else apart) >= LEAST_GAIN * seconds
        if may_gain and (kind == LIBRARY or _difference(ways) <= MEASURED_LOSS):
            keys = frozenset(decision.key for decision in decisions)
            add(_flipped(decisions, taken), Policy(refused=keys) if taken else Policy(taken=keys))
    return list(found.values())[:most]


def _difference(ways: Ways) -> float:
    """The difference of both ways as a share of the time apart."""
    together, apart = ways.measured or ways.predicted
    return abs(together - apart) / apart if apart else float("inf")


def _flipped(decisions: Sequence[MergeDecision], taken: bool) -> str:
    first = decisions[0]
    names = " -> ".join((*first.results[:NAMES_SHOWN], *(["..."] if len(first.results) > NAMES_SHOWN else [])))
    others = f" and {len(decisions) - 1} like it" if len(decisions) > 1 else ""
    return f"{first.kind} {names}{others} {'apart' if taken else 'together'}"


def program_code(program: Program) -> str:
    """A digest of the kernels of a program in the order of their calls, and of what runs through libraries and PyTorch."""
    parts = [code_of(lowered) or " ".join(node.operator for node in lowered.region.nodes) for lowered in program.regions]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


Replan = Callable[..., Program]
"""`partition.plan.plan_program` of a graph with all arguments but `memory`, `policy` and what does not change the plan."""
ImageOf = Callable[[Program, bool], Image | str]
"""The image of a program, or why there is none; with True also for a kernel that does not compile, whose region else runs through PyTorch."""
Told = Callable[[int, int], object]
"""Is called with the number of programs that were checked so far, and of all."""


@dataclass(frozen=True)
class Network:
    """A graph that is planned for a machine, with the options that its plan depends on."""

    graph: Graph
    machine: Machine
    threads: int
    precision: str
    numerics: Numerics
    updates: tuple[tuple[int, int], ...] = ()

    @cached_property
    def key(self) -> str:
        """A digest of everything that determines the partitions besides the machine: operators, sizes and options, without the values of constants.

        Raises:
            InvalidArtifact: if the graph cannot be stored.
        """
        plain = encode_graph(self.graph, "", {})
        for node in plain["nodes"]:
            del node["place"]
        facts = (json.dumps(plain, sort_keys=True), self.precision, repr(self.numerics), self.updates)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]

    @property
    def place(self) -> str:
        """The name of the machine in records."""
        return recorded_as(self.machine, self.threads)

    def __str__(self) -> str:
        inputs = (f"{name} {'x'.join(map(str, self.graph.values[name].shape)) or 'scalar'}" for name in self.graph.inputs)
        return printable(f"network of {number_of(len(self.graph.nodes), 'operator')}; {'; '.join(inputs)}"[:MOST_TEXT])


@dataclass(frozen=True)
class Planning:
    """Plans of a graph, each partition's once. `before`: the memory of other sizes' plans without that of this graph; `memory`: with the plan that
    the merges' own times choose, later with that which is taken."""

    replan: Replan
    before: Memory
    memory: Memory
    programs: dict[Policy, tuple[Program, Memory]] = field(default_factory=dict)

    def program(self, partition: Partition) -> Program:
        """The program of a partition."""
        if partition.policy not in self.programs:
            memory = self.before.copied()
            with collection_paused():
                self.programs[partition.policy] = self.replan(memory=memory, policy=partition.policy), memory
        return self.programs[partition.policy][0]

    def take(self, partition: Partition) -> None:
        """Has the memory be that with this partition's plan."""
        if partition.policy != BY_MERGES:
            self.memory.become(self.programs[partition.policy][1])


def fastest(
    network: Network,
    chosen: Program,
    planning: Planning,
    image: ImageOf,
    trials: int,
    path: str | Path | None,
    tell: Told,
    command: Sequence[str] = MEASURER,
) -> Program:
    """The program of the partition that was measured to be the fastest beyond noise, otherwise `chosen`, that of the merges' own times; with what was
    measured.

    `trials`: the maximum number of partitions, as of a region's candidates; those that the records at `path` lack are measured first, if the machine
    is here. `command`: of the process that measures.

    Raises:
        CacheError: for records that cannot be used.
    """

    def measure(programs: Sequence[Program]) -> list[WholeOutcome]:
        images = [image(program, number > 0) for number, program in enumerate(programs)]
        measurer = Measurer(network.machine, network.threads, network.numerics.tf32, command=command)
        return measured(images, measurer, lambda done: tell(done, len(images)))

    def found() -> Program:
        measuring = trials > 0 and is_present(network.machine)
        try:
            with Records(path, write=measuring) as records:
                return compared(network, chosen, planning, records, trials, measure if measuring else None)
        except InvalidArtifact as error:  # no program of the graph can be stored for the process that measures
            said = MergeDecision(chosen.graph.outputs, True, f"{CHOSEN.name}, not compared with others: {error.cause}")
            return replace(chosen, partitions=(said,)) if trials else chosen

    return contained("the model", "partitions of it are not compared", found, lambda _: chosen)


Measure = Callable[[Sequence[Program]], Sequence[WholeOutcome]]
"""The outcomes of programs that compute the same, timed in turns."""


def compared(network: Network, chosen: Program, planning: Planning, records: Records, trials: int, measure: Measure | None) -> Program:
    """As `fastest`; with `measure`, partitions that the records lack are measured, and all again if the chosen one has no time: what failed then,
    such as for lack of memory beside other processes, need not fail now, and nothing is decided without that time."""
    seconds = sum(lowered.measured_seconds or lowered.predicted_seconds for lowered in chosen.regions)
    others = alternatives(chosen.search, seconds, MOST - 1)
    if not others:
        return chosen
    planning.programs[CHOSEN.policy] = chosen, planning.memory
    turn = _turn(network, chosen, records)
    wanted = others[: max(trials - 1, 0)]
    known = {entry.schedule for entry in turn} if turn and turn[0].status == "measured" else set()
    if measure is not None and wanted and not {partition.text for partition in wanted} <= known:
        records.add(_measured(network, [CHOSEN, *wanted], planning, measure))
        turn = _turn(network, chosen, records)
    if not turn:
        return chosen
    best = min((entry for entry in turn if is_faster(entry, turn[0])), key=lambda entry: entry.seconds, default=turn[0])
    partition = next((partition for partition in others if partition.text == best.schedule), CHOSEN)
    if program_code(planning.program(partition)) != best.code:
        partition, best = CHOSEN, turn[0]  # what would be planned today was not measured
    planning.take(partition)
    program = planning.program(partition)
    return replace(program, partitions=tuple(MergeDecision(program.graph.outputs, entry is best, _said(entry)) for entry in turn))


def _turn(network: Network, chosen: Program, records: Records) -> list[Measurement]:
    """What was measured in turns with the program that the merges' own times choose, which comes first; empty if it was not, or its code has
    changed."""
    standing = records.standing(network.key, network.place)
    code = program_code(chosen)
    own = next((entry for entry in standing if entry.schedule == CHOSEN.text and entry.code == code), None)
    return [] if own is None else [own, *(entry for entry in standing if entry.date == own.date and entry is not own)]


def is_faster(entry: Measurement, chosen: Measurement) -> bool:
    """Whether a partition was faster than the chosen one beyond noise: by more than a merge has to gain, and the middle halves of the times of their
    rounds are apart."""
    if entry.upper is None or chosen.lower is None:
        return False
    return gains(entry.seconds, chosen.seconds) and entry.upper < chosen.lower


def _measured(network: Network, partitions: Sequence[Partition], planning: Planning, measure: Measure) -> list[Measurement]:
    """Records of partitions, with one date. Those whose plan is that of an earlier one are not measured."""
    programs = [planning.program(partition) for partition in partitions]
    codes = [program_code(program) for program in programs]
    first = [codes.index(code) == number for number, code in enumerate(codes)]
    outcomes = iter(measure([program for program, new in zip(programs, first, strict=True) if new]))
    date, entries = now(), []
    for partition, program, code, new in zip(partitions, programs, codes, first, strict=True):
        same = WholeOutcome("failed", f"its kernels are those of the partition {partitions[codes.index(code)].name}")
        entries.append(_record(network, partition, program, code, next(outcomes) if new else same, date))
    return entries


def _record(network: Network, partition: Partition, program: Program, code: str, outcome: WholeOutcome, date: str) -> Measurement:
    timing, known = outcome.timing, outcome.environment
    predicted = seconds_text(sum(lowered.predicted_seconds for lowered in program.regions))
    predicted += " without libraries' operators" if any(lowered.library is not None for lowered in program.regions) else ""
    return Measurement(
        region=network.key, kind=NETWORK, problem=str(network), schedule=partition.text,
        description=printable(f"{partition.name}: predicted {predicted}"), machine=network.place, gpu=known.get("gpu", ""),
        driver=known.get("driver", ""), compiler="", mode=TUNING_MODE, code=code, generator=generator(network.machine, chain=True),
        status=outcome.status, reason=printable(outcome.reason), median=timing.median if timing else None, lower=timing.lower if timing else None,
        upper=timing.upper if timing else None, count=timing.count if timing else 0, stopped=False, relative_error=outcome.relative_error,
        resources="{}", date=date,
    )  # fmt: skip


def _said(entry: Measurement) -> str:
    if entry.lower is None or entry.upper is None:
        return f"{entry.description}; {entry.status}: {entry.reason}"
    return f"{entry.description}, measured {seconds_text(entry.seconds)} ({seconds_text(entry.lower)} to {seconds_text(entry.upper)})"
