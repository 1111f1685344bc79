"""The work of a region: arithmetic operations from the operator table, bytes from the storage of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.graph.table import OPERATORS, computation
from tilewright.ir.graph import Graph, Node
from tilewright.runtime.loadable import LoadableProgram, LoadableRegion


@dataclass(frozen=True)
class Work:
    """`flops` counts the operations of the model's operators, however the kernel computes them (operators that run through PyTorch count as 0). Bytes
    count each distinct buffer once, including its halo."""

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written)


def node_flops(graph: Graph, node: Node) -> int:
    """Arithmetic operations of one node; a loop's body counts once per repetition."""
    if node.operator == "scan":
        body: Graph = node.attributes["body"]
        length: int = node.attributes["length"]
        return length * sum(node_flops(body, inner) for inner in body.nodes)
    return computation(node, graph.values).flops() if node.operator in OPERATORS else 0


def region_work(program: LoadableProgram, region: LoadableRegion) -> Work:
    """Work of one region."""
    flops = sum(node_flops(program.graph, program.nodes[name]) for name in region.nodes)
    written = _bytes(program, region.outputs)
    return Work(flops, _bytes(program, [name for name in region.inputs if name not in region.outputs]), written)


def _bytes(program: LoadableProgram, names: Iterable[str]) -> int:
    stored = dict.fromkeys(name if name in program.storage else program.root(name) for name in names)
    return sum(program.bytes_of(name) if name in program.storage else program.graph.values[name].bytes for name in stored)
