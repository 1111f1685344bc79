"""Partitions of a whole graph into regions: those that the times of single merges leave in doubt are planned, measured in turns, and recorded.

A merge that is measured by itself misses what the network around it does: caches that keep a value from kernel to kernel, early launches, threads. So
the plan that the merges' own times choose is compared with a few others (`alternatives`), and the fastest one is taken if it is so beyond noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tilewright.hardware.machine import Machine
from tilewright.ir.graph import Graph
from tilewright.ir.region import MergeDecision, Program, Ways
from tilewright.kernels.schema import Numerics
from tilewright.partition.merges import BY_MERGES, CHAIN, MEASURED_LOSS, MergeKey, Policy, gains
from tilewright.runtime.encoding import encode_graph
from tilewright.text import number_of, seconds_text
from tilewright.tuning.measurement import Measurement, now, printable
from tilewright.tuning.partition_trials import WholeOutcome
from tilewright.tuning.problems import code_of, generator
from tilewright.tuning.records import Records
from tilewright.tuning.trials import TUNING_MODE

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


CHOSEN = Partition("as each merge's own times decide")


def alternatives(search: Sequence[MergeDecision], most: int) -> list[Partition]:
    """The partitions, at most so many, to compare with the one in which these merges were considered: that without chains, that of the predictions,
    and those that differ in one merge and its like, the closest times of both ways first. Layers that are equal have equal times, and their merges
    are decided alike."""
    found: dict[Policy, Partition] = {}

    def add(name: str, policy: Policy) -> None:
        if policy != BY_MERGES:
            found.setdefault(policy, Partition(name, policy))

    known = [decision for decision in search if decision.ways is not None]
    chains = [decision for decision in known if decision.ways is not None and decision.ways.kind == CHAIN]
    if any(decision.taken for decision in chains):
        add("without chains", Policy(refused=frozenset(map(_key, chains))))
    if any(d.ways is not None and d.ways.measured is not None and gains(*d.ways.measured) != gains(*d.ways.predicted) for d in known):
        add("as predictions decide", Policy(predicted=True))
    alike: dict[tuple[bool, Ways], list[MergeDecision]] = {}
    for decision in known:
        assert decision.ways is not None
        alike.setdefault((decision.taken, decision.ways), []).append(decision)
    for (taken, ways), decisions in sorted(alike.items(), key=lambda entry: _difference(entry[0][1])):
        if _difference(ways) <= MEASURED_LOSS:
            keys = frozenset(map(_key, decisions))
            add(_flipped(decisions, taken), Policy(refused=keys) if taken else Policy(taken=keys))
    return list(found.values())[:most]


def _key(decision: MergeDecision) -> MergeKey:
    assert decision.ways is not None
    return decision.ways.kind, decision.results


def _difference(ways: Ways) -> float:
    """The difference of both ways as a share of the time apart."""
    together, apart = ways.measured or ways.predicted
    return abs(together - apart) / apart if apart else float("inf")


def _flipped(decisions: Sequence[MergeDecision], taken: bool) -> str:
    first = decisions[0]
    names = " -> ".join((*first.results[:NAMES_SHOWN], *(["..."] if len(first.results) > NAMES_SHOWN else [])))
    others = f" and {len(decisions) - 1} like it" if len(decisions) > 1 else ""
    return f"{first.ways.kind if first.ways is not None else ''} {names}{others} {'apart' if taken else 'together'}"


def network_key(graph: Graph, precision: str, numerics: Numerics, updates: Iterable[tuple[int, int]]) -> str:
    """A digest of everything that determines the partitions of a graph besides the machine: its operators and sizes, without the values of its
    constants, and the options."""
    plain = encode_graph(graph, "", {})
    for node in plain["nodes"]:
        del node["place"]
    facts = (json.dumps(plain, sort_keys=True), precision, repr(numerics), sorted(updates))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def network_text(graph: Graph) -> str:
    """The graph in a few words."""
    inputs = (f"{name} {'x'.join(map(str, graph.values[name].shape)) or 'scalar'}" for name in graph.inputs)
    return f"network of {number_of(len(graph.nodes), 'operator')}; {'; '.join(inputs)}"[:MOST_TEXT]


def program_code(program: Program) -> str:
    """A digest of the kernels of a program in the order of their calls, and of what runs through libraries and PyTorch."""
    parts = [code_of(lowered) or " ".join(node.operator for node in lowered.region.nodes) for lowered in program.regions]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


Plan = Callable[[Policy], Program]
"""Plans the graph under a policy."""
Measure = Callable[[Sequence[Program]], Sequence[WholeOutcome]]
"""The outcomes of programs that compute the graph, timed in turns."""


@dataclass(frozen=True)
class Network:
    """A graph to be planned for a machine: its `network_key`, the words that describe it, the machine's name in records (`tuning.recorded_as`),
    and what plans it."""

    key: str
    described: str
    machine: Machine
    place: str
    plan: Plan
    records: Records
    planned: dict[str, Program] = field(default_factory=dict)
    """Programs by the texts of their partitions."""

    def program(self, partition: Partition) -> Program:
        if partition.text not in self.planned:
            self.planned[partition.text] = self.plan(partition.policy)
        return self.planned[partition.text]

    def turn(self, chosen: Program) -> list[Measurement]:
        """What was measured in turns with a program that the merges' own times choose, which comes first; empty if it was not, or its code has
        changed."""
        standing = self.records.standing(self.key, self.place)
        code = program_code(chosen)
        own = next((entry for entry in standing if entry.schedule == CHOSEN.text and entry.code == code), None)
        return [] if own is None else [own, *(entry for entry in standing if entry.date == own.date and entry is not own)]


def compared(network: Network, chosen: Program, trials: int, measure: Measure | None) -> tuple[Policy, Program]:
    """The program of the partition that was measured to be the fastest beyond noise, otherwise `chosen`, that of the merges' own times; with its
    policy, and with what was measured. `trials`: the maximum number of partitions, as of a region's candidates; with `measure`, those that are not
    in the records yet are measured first."""
    others = alternatives(chosen.search, MOST - 1)
    network.planned[CHOSEN.text] = chosen
    turn = network.turn(chosen)
    wanted = others[: trials - 1] if trials else []
    if measure is not None and wanted and not {partition.text for partition in wanted} <= {entry.schedule for entry in turn}:
        network.records.add(_measured(network, [CHOSEN, *wanted], measure))
        turn = network.turn(chosen)
    if not turn:
        return BY_MERGES, chosen
    fastest = min((entry for entry in turn if is_faster(entry, turn[0])), key=lambda entry: entry.seconds, default=turn[0])
    partition = next((partition for partition in others if partition.text == fastest.schedule), CHOSEN)
    if program_code(network.program(partition)) != fastest.code:
        partition, fastest = CHOSEN, turn[0]  # what would be planned today was not measured
    program = network.program(partition)
    said = tuple(MergeDecision(program.graph.outputs, entry is fastest, _said(entry)) for entry in turn)
    return partition.policy, replace(program, partitions=said)


def is_faster(entry: Measurement, chosen: Measurement) -> bool:
    """Whether a partition was faster than the chosen one beyond noise: by more than a merge has to gain, and the middle halves of the times of their
    rounds are apart."""
    if entry.upper is None or chosen.lower is None:
        return False
    return gains(entry.seconds, chosen.seconds) and entry.upper < chosen.lower


def _measured(network: Network, partitions: Sequence[Partition], measure: Measure) -> list[Measurement]:
    """Records of partitions, with one date. Those whose plan is that of an earlier one are not measured."""
    programs = [network.program(partition) for partition in partitions]
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
    predicted = sum(lowered.predicted_seconds for lowered in program.regions)
    return Measurement(
        region=network.key, kind=NETWORK, problem=printable(network.described), schedule=partition.text,
        description=printable(f"{partition.name}: predicted {seconds_text(predicted)}"), machine=network.place, gpu=known.get("gpu", ""),
        driver=known.get("driver", ""), compiler="", mode=TUNING_MODE, code=code, generator=generator(network.machine, chain=True),
        status=outcome.status, reason=printable(outcome.reason), median=timing.median if timing else None, lower=timing.lower if timing else None,
        upper=timing.upper if timing else None, count=timing.count if timing else 0, stopped=False, relative_error=outcome.relative_error,
        resources="{}", date=date,
    )  # fmt: skip


def _said(entry: Measurement) -> str:
    if entry.lower is None or entry.upper is None:
        return f"{entry.description}; {entry.status}: {entry.reason}"
    return f"{entry.description}, measured {seconds_text(entry.seconds)} ({seconds_text(entry.lower)} to {seconds_text(entry.upper)})"
