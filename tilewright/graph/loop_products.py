"""Sums of products in the body of a loop whose factors come from outside it: a state, and a weight that every step reads."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.graph.contraction import contraction
from tilewright.graph.table import STRUCTURAL, computation
from tilewright.ir.expr import loads
from tilewright.ir.graph import Graph, Node


@dataclass(frozen=True)
class LoopProduct:
    """A sum of products of the state with this number and of a value outside of the loop."""

    state: int
    weight: str


def loop_products(node: Node) -> tuple[LoopProduct, ...]:
    """The products of a `scan` node whose first factor is a state as the step before stored it."""
    body: Graph = node.attributes["body"]
    states = body.inputs[: node.attributes["states"]]
    first = len(states) + node.attributes["sequences"]
    weights = dict(zip(body.inputs[first:], node.inputs[first:], strict=True))
    found = []
    for inner in body.nodes:
        if inner.operator in STRUCTURAL:
            continue
        for step in computation(inner, body.values).steps:
            product = contraction(step, frozenset(weights))
            if product is not None and product.b.buffer in weights:
                read = {load.buffer for load in loads(product.a)}
                found += [LoopProduct(number, weights[product.b.buffer]) for number, state in enumerate(states) if state in read]
    return tuple(found)
