"""A loop's body as one region: sums of products, then a map for each result, so that all steps of the loop can be one kernel.

Everything between the products is inlined. Whether a kernel can be made of the region is decided by the schemas for regions of kind `loop`; whether
it is faster than kernels of one step, by their predictions (`partition.loops.lower_loop`).
"""

from __future__ import annotations

from tilewright.graph.contraction import contraction
from tilewright.graph.index_checks import IndexChecks
from tilewright.graph.inline import inline_step, slice_for, too_long
from tilewright.graph.table import STRUCTURAL
from tilewright.ir.computation import Step
from tilewright.ir.expr import checks, loads
from tilewright.ir.graph import Graph
from tilewright.ir.layout import row_major
from tilewright.ir.region import Region, Unsuitable
from tilewright.partition.layouts import LaidOut


def whole_body(body: Graph) -> LaidOut:
    """The body as one region of kind `loop`, whose steps are its sums of products and one map for each distinct result.

    Raises:
        Unsuitable: if it is not of that form, with the reason.
    """
    if body.constants:
        raise Unsuitable("its body has constants of its own")
    index_checks = IndexChecks.of(body)
    maps: dict[str, Step] = {}
    products: dict[str, Step] = {}
    for node in body.nodes:
        if node.operator in STRUCTURAL:
            raise Unsuitable(f"{node.described} runs by itself")
        computation = index_checks.computation(node)
        for output in node.outputs:
            *before, last = (inline_step(step, maps) for step in slice_for(computation, output))
            for step in (*before, last) if last.kind != "map" else before:
                if contraction(step) is None:
                    raise Unsuitable(f"{node.described} is neither a map nor a sum of products")
                products[step.name] = step
            if last.kind == "map":
                if not last.identity_index:
                    raise Unsuitable(f"{node.described} stores its elements in another order")
                if reason := too_long([last], []):
                    raise Unsuitable(reason)
                maps[output] = last
    results = tuple(dict.fromkeys(body.outputs))
    if missing := [name for name in results if name not in maps]:
        raise Unsuitable(f"{', '.join(missing)} is passed through or stored as it is summed")
    used: dict[str, Step] = {}
    waiting = [maps[name] for name in results]
    while waiting:
        for load in loads(*waiting.pop().bodies):
            if load.buffer in products and load.buffer not in used:
                used[load.buffer] = products[load.buffer]
                waiting.append(products[load.buffer])
    steps = (*(step for name, step in products.items() if name in used), *(maps[name] for name in results))
    if checks(*(part for step in steps for part in step.bodies)):
        raise Unsuitable("its body checks indices")
    inputs = tuple(name for name in body.inputs if any(load.buffer == name for step in steps for load in loads(*step.bodies)))
    region = Region(results[0], "loop", body.nodes, steps, inputs, results)
    layouts = {name: row_major(body.values[name].shape) for name in (*body.inputs, *results)}
    return LaidOut((region,), body.values, layouts)
