"""From a graph to a program: regions, layouts, a schedule for each region, and its kernels."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Mapping

from ..codegen.cpu import lower_cpu
from ..codegen.cpu.contraction import contraction_problem
from ..cost.cpu import choose_contraction
from ..graph.table import OPERATORS, STRUCTURAL, computation
from ..hardware.machine import Machine
from ..ir.computation import Computation
from ..ir.graph import Graph, Node, Value
from ..ir.layout import Layout
from ..ir.region import Lowered, Program, Region, Storage
from .fusion import partition
from .layouts import LaidOut, assign_layouts


def plan_program(graph: Graph, machine: Machine, threads: int) -> Program:
    """Decides everything about how the graph runs on the machine, from models alone. `threads` is for CPUs."""
    laid_out = lay_out(graph)
    lowered = [lower_region(region, laid_out, graph, machine, threads) for region in laid_out.regions]
    storage: dict[str, Storage] = {}
    for name, layout in laid_out.layouts.items():
        storage[name] = Storage(laid_out.values[name], layout, name if name in graph.constants else None)
    return Program(graph, machine.name, tuple(lowered), MappingProxyType(storage))


def lay_out(graph: Graph) -> LaidOut:
    """The graph's regions with the layouts of what they store."""

    def steps(node: Node) -> Computation | None:
        return None if node.operator in STRUCTURAL else computation(node, graph.values)

    def is_view(node: Node) -> bool:
        return node.operator in OPERATORS and OPERATORS[node.operator].view

    return assign_layouts(graph, partition(graph, steps, is_view))


def lower_region(region: Region, laid_out: LaidOut, graph: Graph, machine: Machine, threads: int) -> Lowered:
    """The region under the schedule that the models like best."""
    layouts: Mapping[str, Layout] = laid_out.layouts
    values: Mapping[str, Value] = laid_out.values
    shapes = {name: values[name].shape for name in graph.constants}
    if region.kind == "torch":
        return Lowered(region, "PyTorch", (), ())
    if region.kind == "contraction":
        problem = contraction_problem(region, layouts, shapes)
        schedule, seconds, terms, _ = choose_contraction(problem, machine, threads)
        lowered = lower_cpu(region, layouts, values, shapes, machine, schedule)
        return replace(lowered, predicted_seconds=seconds, terms=terms)
    return lower_cpu(region, layouts, values, shapes, machine)
