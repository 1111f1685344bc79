"""Cache padding: adds one cache line between pixels that would fall into few sets of the first-level cache.

A contraction on a CPU reads one element each of about PIXELS adjacent pixels, then the next element of each. If the stride between pixels shares a
large factor with the size of a cache way, their lines fall into the same few sets and evict each other before they are fully read. Worked example:
512 channels of float32 are 2,048 bytes, and a way of 48 KB in 12 ways has 4,096: sixteen pixels fall into two sets, eight in each, in addition to
lines of the filters.
"""

from __future__ import annotations

from math import gcd

from tilewright.graph.contraction import anchor
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import size_of
from tilewright.ir.expr import loads, variables
from tilewright.ir.graph import Graph
from tilewright.ir.layout import Layout
from tilewright.partition.layouts import LaidOut, fixed_values

PIXELS = 16
"""Typical number of pixels in a tile."""


def with_cache_padding(graph: Graph, laid_out: LaidOut, machine: Machine) -> LaidOut:
    """Adds a cache line of zeros after the channels of each pixel of the values that need it. Candidates are values that contractions sum along their
    innermost dimension, except inputs and outputs of the model and of nodes that do not run in generated kernels."""
    fixed = fixed_values(graph, laid_out.regions)
    layouts = dict(laid_out.layouts)
    for region in laid_out.regions:
        found = anchor(region.steps, frozenset(graph.constants)) if region.kind == "contraction" else None
        for load in loads(found.a) if found is not None else ():
            name = laid_out.slices[load.buffer].buffer if load.buffer in laid_out.slices else load.buffer
            if found is None or name in fixed or name not in layouts or not layouts[name].order:
                continue
            dim, factor = layouts[name].order[-1]
            if factor == 0 and variables(load.index[dim]) & {*found.r}:
                layouts[name] = _apart(layouts[name], size_of(laid_out.values[name].dtype), machine)
    return laid_out.with_layouts(layouts)


def _apart(layout: Layout, element: int, machine: Machine) -> Layout:
    """The layout padded by one cache line; unchanged if the lines of PIXELS pixels occupy at most half of the ways of their sets."""
    level_1 = machine.cache(1)
    if level_1 is None or len(layout.order) < 2 or layout.extents[-2] == 1:
        return layout
    pitch, way = layout.strides[-2] * element, level_1.bytes // level_1.ways
    lines_in_a_set = PIXELS * gcd(pitch, way) / way
    if lines_in_a_set <= level_1.ways / 2:
        return layout
    dim, _ = layout.order[-1]
    before, after = layout.halo[dim]
    return layout.with_halo([(before, after + level_1.line_bytes // element) if at == dim else pair for at, pair in enumerate(layout.halo)])
