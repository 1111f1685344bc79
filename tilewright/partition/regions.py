"""The regions of a graph, and where they store their values by rule."""

from __future__ import annotations

from dataclasses import replace

from tilewright.graph.index_checks import IndexChecks
from tilewright.graph.table import OPERATORS, STRUCTURAL
from tilewright.ir.computation import Computation
from tilewright.ir.graph import Graph, Node
from tilewright.ir.region import Region
from tilewright.partition.fusion import Partition, partition
from tilewright.partition.joining import RowJudge
from tilewright.partition.layouts import LaidOut, assign_layouts
from tilewright.partition.precision import AS_COMPUTED, Precision


def unfused(graph: Graph) -> LaidOut:
    """Makes every node a region that runs through PyTorch or by its operator's definition."""
    regions = (Region(node.name, "torch", (node,), (), node.inputs, node.outputs, ("nothing is fused",)) for node in graph.nodes)
    return assign_layouts(graph, Partition(tuple(regions), graph.values))


def lay_out(
    graph: Graph,
    judge_rows: RowJudge | None = None,
    precision: Precision = AS_COMPUTED,
    in_place: bool = True,
    unstored: frozenset[str] = frozenset(),
    fused: bool = True,
) -> LaidOut:
    """The graph's regions (`regions_of`) with types, and layouts by rule, of the values that they store."""
    return assign_layouts(graph, regions_of(graph, judge_rows, in_place, unstored, fused), precision, in_place)


def regions_of(
    graph: Graph, judge_rows: RowJudge | None = None, in_place: bool = True, unstored: frozenset[str] = frozenset(), fused: bool = True
) -> Partition:
    """The graph's regions. Without a judge, row reductions never join a contraction. `in_place`: values that are concatenated are slices of one
    buffer. `unstored`: results of maps that contractions compute where they read them, and of contractions that
    are pooled in their kernels. `fused`: whether any operators share a kernel.

    Raises:
        InvalidModel: if a constant index is out of range.
    """
    checks = IndexChecks.of(graph)

    def steps(node: Node) -> Computation | None:
        return None if node.operator in STRUCTURAL else checks.computation(node)

    def is_view(node: Node) -> bool:
        return node.operator in OPERATORS and OPERATORS[node.operator].view

    parts = partition(graph, steps, is_view, judge_rows, in_place, unstored, fused=fused)
    return replace(parts, regions=tuple(checks.numbered(region) for region in parts.regions))
