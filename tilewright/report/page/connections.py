"""Which regions of a program read what others store, and which regions of two programs compute the same operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tilewright.runtime.loadable import LoadableProgram
from tilewright.runtime.plan import Plan, PlanRow


@dataclass(frozen=True)
class Connections:
    """`nodes`: the numbers of regions that run something as text, "in NAME" and "out NAME" of the model's inputs and results, and in `joins` those
    where several writers of a buffer meet before its readers; in an order in which all edges lead forwards."""

    nodes: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    joins: frozenset[str]

    @property
    def direct(self) -> tuple[tuple[str, str], ...]:
        """The edges from writers to readers, whether or not they pass a join."""
        behind: dict[str, list[str]] = {}
        for source, target in self.edges:
            if source in self.joins:
                behind.setdefault(source, []).append(target)
        return tuple((source, reader) for source, target in self.edges if source not in self.joins for reader in behind.get(target, [target]))


def runs(row: PlanRow) -> bool:
    """Whether a region does anything in a call."""
    return bool(row.kernels) or row.has_library or row.kind == "torch"


def connections(program: LoadableProgram, plan: Plan) -> Connections:
    """Edges from writers to readers. A reader of a buffer that several regions write has edges only from those that no other of them follows."""
    edges: dict[tuple[str, str], None] = {}
    before: dict[str, frozenset[str]] = {}  # of each node those from which a path leads to it
    writers: dict[str, dict[str, str]] = {}  # of each buffer the name under which each node writes it
    joins: dict[tuple[str, ...], str] = {}

    def connect(sources: Iterable[str], node: str) -> None:
        for source in sources:
            edges[source, node] = None
        before[node] = before.get(node, frozenset()).union(*({source} | before[source] for source in sources))

    def read(node: str, names: Iterable[str]) -> None:
        found = []
        for name in dict.fromkeys(names):
            written = writers.get(program.root(name), {})
            own = [writer for writer, as_name in written.items() if as_name == name]
            sources = [own[-1]] if own and program.root(name) != name else list(written)
            last = tuple(source for source in sources if not any(source in before[other] for other in sources))
            if len(last) > 1 and last not in joins:
                joins[last] = f"join {len(joins)}"
                connect(last, joins[last])
            found += [joins[last]] if len(last) > 1 else list(last)
        before[node] = frozenset()
        connect(found, node)

    for name in program.graph.inputs:
        writers[program.root(name)] = {f"in {name}": name}
        before[f"in {name}"] = frozenset()
    for row in filter(runs, plan.rows):
        region, node = program.regions[row.number - 1], str(row.number)
        arguments = [pair for call in region.calls for pair in zip(call.arguments, program.kernels[call.kernel].writes, strict=True)]
        stored = dict.fromkeys((*row.outputs, *(name for name, writes in arguments if writes)))
        names = (*row.inputs, *(name for name, _ in arguments))
        # what a region stores it also reads if it was stored before, as a loop's states are
        read(node, [name for name in names if name not in stored or name in writers.get(program.root(name), {}).values()])
        for name in stored:
            writers.setdefault(program.root(name), {})[node] = name
    for name in program.graph.outputs:
        read(f"out {name}", [name])
    used = {name for edge in edges for name in edge}
    return Connections(tuple(name for name in before if name.isdigit() or name in used), tuple(edges), frozenset(joins.values()))


@dataclass(frozen=True)
class Match:
    """Regions of two plans, by number, that compute the same operators; one side may be empty. `seconds`: of both sides, measured if every region of
    both has a measured time (`measured`), otherwise predicted, so that like is compared with like."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    measured: bool = False
    seconds: tuple[float, float] = (0.0, 0.0)


def matched(first: Plan, second: Plan) -> tuple[Match, ...]:
    """The regions of both plans in the smallest groups that have all operators in common, in the order of the first plan.

    Operators are known by the names of their nodes, and regions that have none by their own."""
    rows = [*((0, row) for row in first.rows if runs(row)), *((1, row) for row in second.rows if runs(row))]
    group: dict[tuple[int, int], int] = {(side, row.number): index for index, (side, row) in enumerate(rows)}
    owner: dict[str, int] = {}
    for side, row in rows:
        for name in _names(row):
            here, there = group[side, row.number], owner.setdefault(name, group[side, row.number])
            if here != there:
                group = {key: there if value == here else value for key, value in group.items()}
                owner = {key: there if value == here else value for key, value in owner.items()}
    numbers: dict[int, tuple[list[int], list[int]]] = {}
    for side, row in rows:
        numbers.setdefault(group[side, row.number], ([], []))[side].append(row.number)
    return tuple(_match(tuple(a), tuple(b), first, second) for a, b in numbers.values())


def _match(a: tuple[int, ...], b: tuple[int, ...], first: Plan, second: Plan) -> Match:
    sides = [first.rows[number - 1] for number in a], [second.rows[number - 1] for number in b]
    measured = all(row.measured_seconds is not None for side in sides for row in side)
    times = (sum(row.seconds if measured else row.predicted_seconds for row in side) for side in sides)
    return Match(a, b, measured, (next(times), next(times)))


def _names(row: PlanRow) -> Sequence[str]:
    return [name for name, _, _ in row.nodes] or [f"region {row.name}"]


def match_data(matches: Sequence[Match]) -> list[Mapping[str, object]]:
    """The matches as values of JSON."""
    return [asdict(match) for match in matches]
