"""The tail of an ONNX model: nodes whose results have shapes that depend on data (NonZero, NonMaxSuppression), branches and loops that data decide,
and all that read these. It is a model of its own, which ONNX's runtimes run after the program (`graph.onnx_call`): programs have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.imported import Tail, UnsupportedNode
from tilewright.frontend.onnx_elsewhere import LARGEST_KNOWN, NOT_PASSED
from tilewright.frontend.onnx_node import Known, dtype_of
from tilewright.frontend.onnx_pointwise import element_type
from tilewright.frontend.onnx_proto import read_names, type_of
from tilewright.graph.onnx_call import encoded, may_run, runner_of
from tilewright.ir.graph import Value


@dataclass(frozen=True)
class Later:
    """A tensor that the tail computes, by its name there."""

    name: str


Operand = Known | Later | None


class TailBuilder:
    """Collects the nodes of a tail in order. `materialise` makes a known tensor a constant of the graph."""

    def __init__(self, materialise: Callable[[np.ndarray], Value]) -> None:
        self.values: list[Value] = []
        """The graph's values that the tail reads: its inputs."""
        self._materialise = materialise
        self._nodes: list[onnx.NodeProto] = []
        self._infos: list[onnx.ValueInfoProto] = []
        self._known: list[onnx.TensorProto] = []
        self._begins: list[UnsupportedNode] = []
        self._opset: int | None = None
        self._names = 0

    def mark(self) -> tuple[int, ...]:
        """How much was collected, for `undo`."""
        return tuple(len(listed) for listed in self._collected())

    def undo(self, mark: tuple[int, ...]) -> None:
        """Removes what was collected since."""
        for listed, length in zip(self._collected(), mark, strict=True):
            del listed[length:]
        self._opset = self._opset if self._nodes else None

    def _collected(self) -> tuple[list[Any], ...]:
        return self.values, self._nodes, self._infos, self._known, self._begins

    def add(self, node: onnx.NodeProto, named: Mapping[str, Operand], opset: int, begins: UnsupportedNode | None) -> list[Later | None]:
        """The results of a node; `named` maps what it and its branches read. `begins` lists the node if it reads nothing of the tail itself.

        Raises Unsupported, and adds nothing, if ONNX's runtimes do not run it."""
        if self._opset not in (None, opset):
            raise Unsupported(f"nodes of the operator sets {self._opset} and {opset} follow one whose result has a shape that depends on data")
        if not may_run(node):
            raise Unsupported(f"{node.domain + '.' if node.domain else ''}{node.op_type} reads a tensor whose shape depends on data")
        names = {name: self._name_of(operand) for name, operand in named.items()}
        copied = renamed(node, names)
        results: list[Later | None] = []
        for k, name in enumerate(node.output):
            copied.output[k] = self._fresh("y") if name else ""
            results.append(Later(copied.output[k]) if name else None)
        self._opset = opset
        self._nodes.append(copied)
        self._begins += [begins] if begins is not None else []
        return results

    def finish(self, results: Sequence[Later], positions: Callable[[Value], int]) -> Tail | None:
        """The tail that makes these results, None if there are none; `positions` gives the number of the graph output that is a value.

        Raises Unsupported if a type in it is not known, or ONNX's runtimes do not take it."""
        if not results:
            return None
        opset = self._opset or 0
        graph = helper.make_graph(self._nodes, "tail", self._infos, [onnx.ValueInfoProto(name=later.name) for later in results], self._known)
        ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
        inferred = shape_inference.infer_shapes(model)
        types = {info.name: info.type.tensor_type.elem_type for info in (*inferred.graph.value_info, *inferred.graph.output)}
        del model.graph.output[:]
        for later in results:
            if not types.get(later.name) or element_type(types[later.name]) in NOT_PASSED:
                raise Unsupported("an output of the model whose shape depends on data is of a type that ONNX's runtimes do not return")
            model.graph.output.append(helper.make_tensor_value_info(later.name, types[later.name], None))
        try:
            text = encoded(model)
            runner = runner_of(text)
        except Exception as error:
            raise Unsupported(
                f"ONNX's runtimes do not run what follows a result whose shape depends on data: {str(error).splitlines()[0]}"
            ) from error
        after = len(self._nodes) - len(self._begins)
        also = f" and the {after} nodes that read its result" if after else ""
        nodes = tuple(UnsupportedNode(n.node, n.target, n.place, f"{n.reason}; {runner} computes it{also}, after the program") for n in self._begins)
        return Tail(text, tuple(positions(value) for value in self.values), nodes)

    def _fresh(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _name_of(self, operand: Operand) -> str:
        if operand is None or isinstance(operand, Later):
            return "" if operand is None else operand.name
        if isinstance(operand, np.ndarray) and operand.size <= LARGEST_KNOWN:
            name = self._fresh("c")
            self._known.append(numpy_helper.from_array(operand, name))
            return name
        value = self._materialise(operand) if isinstance(operand, np.ndarray) else operand
        if dtype_of(value) in NOT_PASSED:
            raise Unsupported(f"ONNX's runtimes are given no {dtype_of(value)}")
        if value not in self.values:
            self.values.append(value)
            self._infos.append(helper.make_value_info(f"x{len(self.values)}", type_of(value)))
        return f"x{self.values.index(value) + 1}"


def renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy of a node that reads its operands by other names, also in its branches or body; their own tensors get names that no other has."""
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    copied.name = copied.domain = ""
    for k, name in enumerate(copied.input):
        copied.input[k] = names.get(name, name)
    for attribute in copied.attribute:
        if attribute.HasField("g"):
            _rename_branch(attribute.g, names)
    return copied


def _rename_branch(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    own = {each.name for each in (*graph.input, *graph.initializer)} | {name for node in graph.node for name in node.output if name}
    inside = {**names, **{name: f"{name}_inside" for name in own}}
    for each in (*graph.input, *graph.initializer):
        each.name = inside[each.name]
    for node in graph.node:
        node.CopyFrom(renamed(node, inside))
        for k, name in enumerate(node.output):
            node.output[k] = inside.get(name, name)
    for info in graph.output:
        info.name = inside.get(info.name, info.name)
    del graph.value_info[:]


def read_by(node: onnx.NodeProto) -> list[str]:
    """The names of all tensors that a node reads, and its branches or body read from around it."""
    return [*dict.fromkeys([*node.input, *sorted(read_names(node) - _made_inside(node))])]


def _made_inside(node: onnx.NodeProto) -> set[str]:
    found: set[str] = set()
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found |= {each.name for each in (*attribute.g.input, *attribute.g.initializer)}
            found |= {name for inner in attribute.g.node for name in (*inner.output, *_made_inside(inner))}
    return found
