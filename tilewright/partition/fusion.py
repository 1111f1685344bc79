"""Partition into regions: which operators share a kernel.

Six rules, applied once in graph order:

* a *view* (pure index map) is never stored: readers read through it;
* a *map* joins the region that produces one of its inputs, as its epilogue, if it reads that input element by element and is its only reader;
* *row reductions* (softmax, normalisation) join the contraction whose result they reduce, if one tile can hold whole rows and that is predicted to be
faster; so does a *sum over pixels* (global average pooling), if one thread computes whole images of a panel of channels;
* a *pooling* joins the contraction whose result it alone reads, where that is predicted to be faster (`partition.poolings`);
* a contraction whose first factor is the softmax of another contraction joins both (*attention*), if that is predicted to be faster;
* a map with a single reader is computed inside the reader, if the repeated arithmetic costs no more than the traffic saved; inside a contraction,
  which computes it again for every tile, where that is predicted to be faster (`partition.prologues`).

Everything else is stored. Each region carries the reasons for its extent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from types import MappingProxyType

from tilewright.codegen.access import split_divided_rows
from tilewright.errors import contained
from tilewright.graph.contraction import contraction
from tilewright.graph.inline import buffers, inline_step, slice_for, too_long
from tilewright.graph.operators.shape import SPACE_TO_DEPTH
from tilewright.graph.rows import rows_of
from tilewright.ir.computation import Computation, Step
from tilewright.ir.expr import INDEX, Apply, Const, Expr, Load, Var, coefficient, loads, replace_loads, rewrite, substitute, variables, walk
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import MergeDecision, Region
from tilewright.ir.scalar import OPERATIONS
from tilewright.kernels.library.recurrent import layer_in
from tilewright.partition.attention_joining import with_softmax
from tilewright.partition.concatenation import avoids_copies
from tilewright.partition.joining import JOIN, JoinDecision, RowJudge, owns_rows, with_rows
from tilewright.partition.pieces import as_one_load
from tilewright.partition.pixel_joining import summed_pixels, with_pixels
from tilewright.partition.pooling_joining import with_windows
from tilewright.partition.thin_contractions import read_in_parts, summing, thin_rows

# Points above which a single reduction is divided among several threads or lanes, unless neighbours share most of them.
WINDOW_POINTS = 64
# Maximum arithmetic operations, per element not stored and read back, for which a map is recomputed inside its reader.
RECOMPUTED_FLOPS = 8
NOT_FUSED = "nothing is fused"


@dataclass
class _Group:
    """A region under construction. `output` is the value that it will store."""

    kind: str
    nodes: list[Node]
    steps: tuple[Step, ...]
    output: str
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Partition:
    """Regions in execution order; `values` extends the graph's values by those that regions store for each other. `considered`: the joins of regions
    that a judge decided about."""

    regions: tuple[Region, ...]
    values: Mapping[str, Value]
    considered: tuple[MergeDecision, ...] = ()


def partition(
    graph: Graph,
    computation: Callable[[Node], Computation | None],
    is_view: Callable[[Node], bool],
    judge_rows: RowJudge | None = None,
    in_place: bool = True,
    unstored: frozenset[str] = frozenset(),
    fused: bool = True,
) -> Partition:
    """Groups the graph's nodes into regions. `computation` returns a node's steps (None for loops and nodes that run through PyTorch). `judge_rows`
    decides whether row reductions join a contraction where they can, and contractions the softmax before them (None: never). `in_place`:
    concatenations need no copies (`partition.concatenation`). `unstored`: results of maps that the contractions which read them compute,
    and of contractions that are pooled in their kernels.
    `fused`: whether any operators share a kernel; otherwise only views are read through."""
    return _Partitioner(graph, computation, is_view, judge_rows, in_place, unstored, fused).run()


class _Partitioner:
    def __init__(
        self,
        graph: Graph,
        computation: Callable[[Node], Computation | None],
        is_view: Callable[[Node], bool],
        judge_rows: RowJudge | None,
        in_place: bool,
        unstored: frozenset[str],
        fused: bool,
    ) -> None:
        self.graph = graph
        self.fused = fused
        self.unstored = unstored
        self.judge_rows = judge_rows
        self.in_place = in_place
        self.constants = frozenset(graph.constants)
        self.values = dict(graph.values)
        self.computations = {node.name: computation(node) for node in graph.nodes}
        self.nodes = {node.name: node for node in graph.nodes}
        self.producer = graph.producers()
        self.pinned = set(graph.outputs) | {name for node in graph.nodes if self.computations[node.name] is None for name in node.inputs}
        self.views: dict[str, Step] = {}
        self.view_nodes: dict[str, Node] = {}
        for node in graph.nodes:
            found = self.computations[node.name]
            if found is not None and (is_view(node) or not node.inputs) and len(node.outputs) == 1 and node.outputs[0] not in self.pinned:
                step = slice_for(found, node.outputs[0])
                if len(step) == 1 and step[0].kind == "map" and step[0].identity_index:
                    self.views[node.outputs[0]] = step[0]
                    self.view_nodes[node.outputs[0]] = node
        self.readers = self._count_readers()
        self.groups: dict[str, _Group] = {}  # keyed by the value they store, in execution order
        self.considered: list[MergeDecision] = []

    def _count_readers(self) -> dict[str, set[str]]:
        """Names of the non-view nodes that read each value, directly or through views."""
        readers: dict[str, set[str]] = {name: set() for name in self.values}

        def mark(name: str, reader: str) -> None:
            if reader in readers[name]:
                return
            readers[name].add(reader)
            if name in self.views:
                for source in self.view_nodes[name].inputs:
                    mark(source, reader)

        for node in self.graph.nodes:
            if not any(output in self.views for output in node.outputs):
                for name in node.inputs:
                    mark(name, node.name)
        return readers

    def run(self) -> Partition:
        for node in self.graph.nodes:
            found = self.computations[node.name]
            if found is None:
                kind = "loop" if node.operator == "scan" and layer_in(node, self.constants) is None else "torch"
                for output in node.outputs[:1]:
                    self.groups[output] = _Group(kind, [node], (), output, [str(node.attributes.get("reason", ""))] if kind == "torch" else [])
                continue
            for output in node.outputs:
                if output in self.views or not (self.readers[output] or output in self.pinned):
                    continue
                self._place(node, output, slice_for(found, output))
        self._dissolve_thin_contractions()
        regions: list[Region] = []
        for group in self.groups.values():
            regions.extend(self._finish(group))
        return Partition(tuple(regions), MappingProxyType(self.values), tuple(self.considered))

    def _place(self, node: Node, output: str, steps: tuple[Step, ...]) -> None:
        steps = tuple(inline_step(step, self.views) for step in steps)
        group = _Group("", [node], steps, output)
        for source in node.inputs:
            self._add_view_nodes(group, source)
        if len(steps) == 1 and steps[0].kind == "map":
            self._join_producer(group, node)
        else:
            self._absorb_maps(group, node)
            group.kind = self._kind(group)
            if group.kind in ("row reduction", "window"):
                self._join_contraction(group, node)
            elif group.kind == "contraction" and len(steps) == 1:
                self._join_softmax(group, node)
        self.groups[output] = group

    def _add_view_nodes(self, group: _Group, name: str) -> None:
        if name in self.views and self.view_nodes[name] not in group.nodes:
            group.nodes.insert(0, self.view_nodes[name])
            for source in self.view_nodes[name].inputs:
                self._add_view_nodes(group, source)

    # -- maps join their producers ---------------------------------------------------------------------------------

    def _join_producer(self, group: _Group, node: Node) -> None:
        group.kind = "map"
        group.steps = (as_one_load(group.steps[0]),)
        self._absorb_maps(group, node)
        step = group.steps[0]
        hosts: list[_Group] = []
        for name in buffers([step]):
            host = self.groups.get(name)
            if host is None or host.kind not in ("contraction", "attention", "window", "row reduction"):
                continue
            refusal = self._refuse_epilogue(name, node, step)
            if refusal:
                group.reasons.append(f"not joined to {host.nodes[0].name}: {refusal}")
            else:
                hosts.append(host)
        if not hosts:
            return
        host = max(hosts, key=lambda h: (h.kind in ("contraction", "attention"), sum(s.flops() for s in h.steps)))
        for other in hosts:
            if other is not host:
                group.reasons.append(f"{other.output} is stored: a kernel has one anchor")
        del self.groups[host.output]
        group.kind = host.kind
        group.steps = self._with_epilogue(host, step)
        group.reasons = host.reasons + group.reasons + [f"{node.operator} {node.name} joins as epilogue: reads {host.output} element for element"]
        group.nodes = host.nodes + [n for n in group.nodes if n not in host.nodes]

    def _read_elsewhere(self, name: str, node: Node) -> str:
        """By what the value is read besides a region of the node; empty if by nothing. Results of a node have a region each."""
        if name in self.pinned:
            return "also a result or read by PyTorch"
        if others := self.readers[name] - {node.name}:
            return f"also read by {', '.join(sorted(others))}"
        results = [output for output in node.outputs if self.readers[output] or output in self.pinned]
        return f"read by the kernels of {len(results)} results" if len(results) > 1 else ""

    def _refuse_reader(self, name: str, node: Node) -> str:
        """Why the node does not join what stores the value; empty if it is the only reader."""
        if not self.fused:
            return NOT_FUSED
        elsewhere = self._read_elsewhere(name, node)
        return f"{name} is {elsewhere}" if elsewhere else ""

    def _refuse_epilogue(self, name: str, node: Node, step: Step) -> str:
        refusal = self._refuse_reader(name, node)
        if refusal:
            return refusal
        if self.values[name].shape != step.shape or any(not _elementwise(load, step.axes) for load in loads(step.bodies[0]) if load.buffer == name):
            return f"does not read {name} element for element"
        host = self.groups[name]
        if refusal := too_long(host.steps[-1:], (step,)):
            return refusal
        # Combining the expressions simplifies integers (i % 1; i % 6 and then // 6): lowerings find an epilogue's rows from its loads of the
        # reductions.
        *reduces, final = self._with_epilogue(host, step)
        inner = {inside for reduce in reduces for inside in reduce.names}
        return "" if any(load.buffer in inner for load in loads(*final.bodies)) else f"its elements do not depend on those of {name}"

    def _with_epilogue(self, host: _Group, step: Step) -> tuple[Step, ...]:
        """The host's steps with the map applied to the host's result before it is stored."""
        last = host.steps[-1]
        # In the kernel an inner result is indexed by the axes of its step; the map's axes are the places to which that step stores.
        body = substitute(step.bodies[0], dict(zip(step.axes, last.index, strict=True)))
        if last.kind == "map":
            body = replace_loads(body, {last.name: last.bodies[0]})
            return (*host.steps[:-1], replace(last, name=step.name, bodies=(body,), shape=step.shape))
        body = replace_loads(body, {last.name: Load(last.name, tuple(last.axes), last.dtypes[0])})
        final = Step(step.name, step.shape, last.axes, (body,), index=last.index)
        return (*host.steps, final)

    # -- row reductions join their contractions ---------------------------------------------------------------------

    def _join_contraction(self, group: _Group, node: Node) -> None:
        """Joins a chain of row reductions to the contraction whose result it reduces, so that it runs on the contraction's tiles."""
        for name in buffers(group.steps):
            host = self.groups.get(name)
            if host is None or host.kind != "contraction":
                continue
            refusal = self._refuse_reader(name, node)
            if name in self.unstored and not refusal:
                pooled = with_windows(host.steps, name, group.steps, self.constants)
                if not isinstance(pooled, str):
                    self._take_host(group, host, pooled, f"{node.operator} {node.name} pools {name} where it is computed")
                    return
            form = with_pixels if summed_pixels(host.steps, name, group.steps, self.constants) else with_rows
            joined = form(host.steps, name, group.steps, self.constants) if not refusal else refusal
            if not isinstance(joined, str) and self.judge_rows is not None:
                decision = self._decided(node, (name, group.output), partial(self.judge_rows, joined, host.steps, group.steps, self.values))
                if decision.taken:
                    self._take_host(group, host, joined, decision.text)
                    return
                group.reasons.append(decision.text)
            if isinstance(joined, str):
                group.reasons.append(f"not joined to {name}: {joined}")

    def _take_host(self, group: _Group, host: _Group, steps: tuple[Step, ...], reason: str) -> None:
        """Makes one group of the host, whose result is not stored any more, and one that reduces its result."""
        del self.groups[host.output]
        group.kind, group.steps = host.kind, steps
        group.reasons = host.reasons + group.reasons + [reason]
        group.nodes = host.nodes + [n for n in group.nodes if n not in host.nodes]

    # -- attention: a contraction joins the softmax that it reads, and the contraction before that -----------------

    def _join_softmax(self, group: _Group, node: Node) -> None:
        """Makes one region of a sum of products, the softmax that is its first factor, and the sum of products that this is the softmax of."""

        def read_within(name: str, values: Sequence[str]) -> bool:
            inside = {member.name for part in (group, *(self.groups[value] for value in values)) for member in part.nodes}
            return name not in self.pinned and self.readers[name] <= inside

        for name in buffers(group.steps):
            joined = with_softmax(group.steps[0], name, self.groups, read_within)
            if self.judge_rows is None or joined is None or not self.fused:
                continue
            if isinstance(joined, str):
                group.reasons.append(f"not joined to {name}: {joined}")
                continue
            parts = [self.groups[value] for value in joined.values]
            apart = [(part.kind, part.steps) for part in (*parts, group)]
            decision = self._decided(node, (*joined.values, group.output), partial(self.judge_rows.in_one, joined.steps, apart, self.values))
            if not decision.taken:
                group.reasons.append(decision.text)
                continue
            for value in joined.values:
                del self.groups[value]
            group.kind, group.steps = "attention", joined.steps
            members = {member.name for part in (*parts, group) for member in part.nodes}
            group.nodes = [member for member in self.graph.nodes if member.name in members]
            group.reasons = [decision.text]
            return

    def _decided(self, node: Node, results: tuple[str, ...], judge: Callable[[], JoinDecision]) -> MergeDecision:
        """Whether the node, which stores the last of the results, joins the regions of the others; not if the judge fails."""
        others = ", ".join(results[:-1])
        decision = contained(node.described, f"does not join {others}", judge, lambda why: JoinDecision(False, f"a fault inside Tilewright: {why}"))
        if self.judge_rows is not None and decision.ways is not None:  # of which times decide
            decision = self.judge_rows.as_asked(results, decision, decision.ways)
        told = f"{node.operator} {node.name} {'joins' if decision.joins else 'not joined to'} {others}: {decision.reason}"
        self.considered.append(MergeDecision(results, decision.joins, told, JOIN, decision.ways))
        return self.considered[-1]

    # -- readers absorb maps ---------------------------------------------------------------------------------------

    def _absorb_maps(self, group: _Group, node: Node) -> None:
        changed = True
        while changed:
            changed = False
            for name in buffers(group.steps):
                producer = self.groups.get(name)
                if producer is None or producer.kind != "map" or producer.steps[0].index != producer.steps[0].axes:
                    continue
                refusal = self._refuse_absorbing(name, node, group, producer)
                if refusal:
                    note = f"{name} is stored: {refusal}"
                    if note not in group.reasons:
                        group.reasons.append(note)
                    continue
                del self.groups[name]
                group.steps = tuple(inline_step(step, {name: producer.steps[0]}) for step in group.steps)
                group.nodes = producer.nodes + [n for n in group.nodes if n not in producer.nodes]
                group.reasons += [r for r in producer.reasons if r not in group.reasons]
                group.reasons.append(f"{producer.nodes[-1].name} is computed where {node.name} reads it")
                changed = True

    def _refuse_absorbing(self, name: str, node: Node, group: _Group, producer: _Group) -> str:
        if not self.fused:
            return NOT_FUSED
        if elsewhere := self._read_elsewhere(name, node):
            return elsewhere
        if producer.nodes[-1].operator == SPACE_TO_DEPTH:
            return "a contraction reads it in vectors"
        if refusal := too_long(group.steps, producer.steps):
            return refusal
        if self.in_place and avoids_copies(producer.steps[0], self.values, self.groups.keys() - self.pinned):
            return "the results of which it is the concatenation are stored in place"
        body = producer.steps[0].bodies[0]
        free = _index_only(body)
        if free and (isinstance(body, Load) or not _read_at_data(name, group.steps)):
            return ""
        arithmetic = sum(OPERATIONS[n.operation].flops for n in walk(body) if isinstance(n, Apply) and n.dtype != INDEX)
        reads = 0
        for step in group.steps:
            sites = sum(load.buffer == name for load in loads(*step.bodies))
            if sites and step.combiner == "sum" and contraction(step, self.constants) is not None:
                return "" if name in self.unstored else "a contraction would recompute it for every tile"
            reads += sites * prod(axis.extent or 0 for axis in (*step.axes, *step.reduction))
        again = reads / max(self.values[name].elements, 1) - 1
        if free and again > 0:
            return "its bounds would be compared at positions that are data"
        if again * arithmetic > RECOMPUTED_FLOPS * 4:
            return f"its {arithmetic} operations an element would be repeated {again + 1:.1f} times"
        return ""

    # -- contractions of a few rows are dissolved into the maps that read parts of them ----------------------------

    def _dissolve_thin_contractions(self) -> None:
        """Replaces contractions of a few rows by sums in the maps that read parts of them."""
        position = {name: index for index, name in enumerate(self.groups)}
        reading: dict[str, dict[str, _Group]] = {}  # keyed by the value read, then by the value stored
        for group in self.groups.values():
            for buffer in buffers(group.steps):
                reading.setdefault(buffer, {})[group.output] = group
        for name, host in list(self.groups.items()):
            if host.kind != "contraction" or name in self.pinned or owns_rows(host.steps):
                continue
            rows = thin_rows(host.steps, self.constants)
            readers = sorted(reading.get(name, {}).values(), key=lambda group: position[group.output])
            if rows is None or any(group.kind != "map" for group in readers):
                continue
            if not read_in_parts([group.steps[0] for group in readers], name, self.values[name].elements):
                continue
            for group in readers:
                group.steps = summing(group.steps[0], name, host.steps)
                group.kind = "row reduction"
                group.nodes = host.nodes + [n for n in group.nodes if n not in host.nodes]
                group.reasons.append(f"sums its own columns of {name}: with {rows} rows no tile would reuse the weights")
            del self.groups[name]
            for buffer in buffers(host.steps):
                reading[buffer].pop(name, None)
                reading[buffer].update((group.output, group) for group in readers)

    # -- kinds ---------------------------------------------------------------------------------------------------

    def _kind(self, group: _Group) -> str:
        reduces = [step for step in group.steps if step.kind != "map"]
        if any(step.kind == "scan" for step in reduces):
            return "scan" if len(reduces) == 1 and _reads_at_own_axes(group.steps) else "unfused"
        if len(reduces) == 1 and contraction(reduces[0], self.constants) is not None and _reads_at_own_axes(group.steps):
            return "contraction"
        if len(reduces) == 1 and _reads_at_own_axes(group.steps):
            points = prod(axis.extent or 0 for axis in reduces[0].reduction)
            return "row reduction" if points > WINDOW_POINTS and not _overlaps(reduces[0]) else "window"
        steps = split_divided_rows(group.steps)
        if rows_of(steps) is not None:
            group.steps = steps
            return "row reduction"
        return "unfused"

    def _finish(self, group: _Group) -> list[Region]:
        if group.kind in ("torch", "loop"):
            node = group.nodes[0]
            return [Region(node.name, group.kind, (node,), (), node.inputs, node.outputs, tuple(r for r in group.reasons if r))]
        if group.kind != "unfused":
            return [self._region(group, group.steps, group.output, group.kind)]
        # The steps do not share rows: each becomes a separate region, with its result stored.
        group.reasons.append("its reductions do not share rows: one kernel each")
        regions: list[Region] = []
        for step in group.steps:
            for name, body in zip(step.names, step.bodies, strict=True):
                if name not in self.values:
                    self.values[name] = Value(name, step.shape, body.dtype)
            single = _Group("", group.nodes, (step,), step.name, group.reasons)
            kind = "map" if step.kind == "map" else self._kind(single)
            regions.append(self._region(single, (step,), step.name, kind))
        return regions

    def _region(self, group: _Group, steps: tuple[Step, ...], output: str, kind: str) -> Region:
        if len(steps) == 2 and _reads_at_own_axes(steps):
            steps = (steps[0], _reading_at_own_axes(steps[1], set(steps[0].names)))
        inner = {name for step in steps[:-1] for name in step.names}
        inputs = tuple(dict.fromkeys(load.buffer for step in steps for load in loads(*step.bodies) if load.buffer not in inner))
        return Region(output, kind, tuple(group.nodes), steps, inputs, (output,), tuple(dict.fromkeys(group.reasons)))


def _overlaps(step: Step) -> bool:
    """Whether the windows that neighbours reduce overlap: those of a large filter, not the parts of a large average."""
    for position in (position for load in loads(*step.bodies) for position in load.index):
        steps = [abs(coefficient(position, axis) or 0) for axis in step.axes if axis in variables(position) and axis.extent != 1]
        taps = [(axis.extent or 1) - 1 for axis in step.reduction if axis in variables(position)]
        if steps and 0 < min(steps) <= max(taps, default=0):
            return True
    return False


def _read_at_data(name: str, steps: Sequence[Step]) -> bool:
    """Whether the value is read at positions that are data, for which no bounds are known."""
    return any(load.buffer == name and any(map(loads, load.index)) for step in steps for load in loads(*step.bodies))


def _elementwise(load: Load, axes: tuple[Var, ...]) -> bool:
    """Whether the load's index is the axes themselves (any index for an axis of extent 1)."""
    return len(load.index) == len(axes) and all(position == axis or axis.extent == 1 for position, axis in zip(load.index, axes, strict=True))


def _index_only(body: Expr) -> bool:
    """Whether the body is a load or a zero-guarded load, which costs a reader only address arithmetic."""
    if isinstance(body, Load):
        return True
    return (
        isinstance(body, Apply)
        and body.operation == "select"
        and isinstance(body.args[1], Load)
        and isinstance(body.args[2], Const)
        and not loads(body.args[0])
    )


def _reads_at_own_axes(steps: tuple[Step, ...]) -> bool:
    """Whether the final map, if any, has the same extents as the only reduction and reads it at its own axes."""
    if len(steps) == 1:
        return True
    if len(steps) != 2:
        return False
    reduce, final = steps
    names = set(reduce.names)
    extents = [axis.extent for axis in reduce.axes]
    if [axis.extent for axis in final.axes] != extents:
        return False
    return all(_elementwise(load, final.axes) for load in loads(*final.bodies) if load.buffer in names)


def _reading_at_own_axes(final: Step, names: set[str]) -> Step:
    """The map with index 0 along axes of extent 1 replaced by the axis, the form that lowerings recognise."""

    def fix(node: Expr) -> Expr:
        return replace(node, index=final.axes) if isinstance(node, Load) and node.buffer in names else node

    return replace(final, bodies=tuple(rewrite(body, fix) for body in final.bodies))
