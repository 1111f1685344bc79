"""What a program returns and changes: results of its graph, and tensors of the caller or the module, with the views of them that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tilewright.errors import UnsupportedOperator
from tilewright.frontend.handlers import torch_dtype
from tilewright.frontend.imported import Output
from tilewright.frontend.sizes import Sizes, is_symbolic
from tilewright.frontend.torch_call import call_recipe
from tilewright.frontend.torch_operators import resolve_operator
from tilewright.frontend.torch_views import Calls, is_view, view_of
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.dtypes import COMPLEX
from tilewright.ir.graph import Value

_Views = Mapping[torch.fx.Node, Calls]
"""Results that are views of one tensor, with the calls that make them."""


@dataclass(frozen=True)
class Results:
    """`values` are the graph's outputs, `outputs` the leaves of what the model returns; `mutations` pairs an input leaf, and `states` the name of a
    buffer, with the graph output that replaces it."""

    values: list[Value] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    mutations: list[tuple[int, int]] = field(default_factory=list)
    states: list[tuple[str, int]] = field(default_factory=list)


class OutputReader:
    """Reads the output node of a functional program, of which `environment` holds the values. `leaves` are the numbers of the user's inputs, and
    `names` those of parameters and buffers, by their placeholders."""

    def __init__(
        self,
        program: ExportedProgram,
        environment: Mapping[torch.fx.Node, Any],
        leaves: Mapping[torch.fx.Node, int],
        names: Mapping[torch.fx.Node, str],
        sizes: Sizes,
        builder: GraphBuilder,
    ) -> None:
        self.program, self.environment, self.leaves, self.names, self.sizes, self.builder = program, environment, leaves, names, sizes, builder
        self.results = Results()
        self.positions: dict[torch.fx.Node, int] = {}

    def read(self) -> Results:
        """Raises UnsupportedOperator for outputs that only training needs."""
        returned: Any = next(node for node in self.program.graph.nodes if node.op == "output").args[0]
        pairs = list(zip(self.program.graph_signature.output_specs, returned, strict=True))
        self.written = {node: output for spec, node in pairs if (output := self._written(spec)) is not None}
        leaves = [argument for spec, argument in pairs if spec.kind == OutputKind.USER_OUTPUT]
        views: dict[torch.fx.Node, dict[torch.fx.Node, Calls]] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.fx.Node) and isinstance(self.environment[leaf], Value):
                root, calls = view_of(leaf, self.sizes, self.written)
                views.setdefault(root, {})[leaf] = calls
        found: dict[torch.fx.Node, Output] = {}
        for root, of_it in views.items():
            for leaf, output in self._of(root, of_it).items():
                alike = [(other.kind, other.index, other.value, other.calls) for other in found.values()]
                found[leaf] = replace(output, twin=alike.count((output.kind, output.index, output.value, output.calls)))
        for leaf in leaves:
            value = self.environment[leaf] if isinstance(leaf, torch.fx.Node) else leaf
            self.results.outputs.append(found[leaf] if isinstance(value, Value) else Output("constant", value=value))
        for spec, node in pairs:
            if spec.kind == OutputKind.USER_INPUT_MUTATION:
                self.results.mutations.append((self.written[node].index, self._new_value(node)))
            elif spec.kind == OutputKind.BUFFER_MUTATION:
                self.results.states.append((str(spec.target), self._new_value(node)))
        return self.results

    def _written(self, spec: Any) -> Output | None:
        """The caller's tensor or the buffer that an output replaces; None for results."""
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            return Output("input", next(leaf for node, leaf in self.leaves.items() if node.name == spec.target))
        if spec.kind == OutputKind.BUFFER_MUTATION:
            return Output("state", value=str(spec.target))
        if spec.kind == OutputKind.PARAMETER_MUTATION:
            raise UnsupportedOperator(f"the model changes its parameter {spec.target}", "make it a buffer")
        if spec.kind != OutputKind.USER_OUTPUT:
            raise UnsupportedOperator(f"the program has an output of kind {spec.kind.name.lower()}", "export it for inference")
        return None

    def _of(self, root: torch.fx.Node, views: _Views) -> dict[torch.fx.Node, Output]:
        """The outputs that are views of a node's result."""
        value = self.environment[root]
        outer = self.written.get(root)
        if outer is None and root in self.leaves and self.leaves[root] not in {output.index for output in self.written.values()}:
            outer = Output("input", self.leaves[root])
        if outer is None and root in self.names and value.name in self.builder.constants:
            outer = Output("parameter", value=self.names[root])
        if outer is not None:
            return {leaf: replace(outer, calls=calls) for leaf, calls in views.items()}
        if len(views) == 1:
            return {leaf: Output("value", self._position(leaf, self.environment[leaf])) for leaf in views}
        base, turn = self._base(root, views)
        found = {}
        for leaf, calls in views.items():
            own = self.environment[leaf]
            if self._makes(base, (*turn, *calls), own):
                found[leaf] = Output("value", self._position(root, base), calls=(*turn, *calls), apart=own.name)
            else:
                found[leaf] = Output("value", self._position(leaf, own))
        return found

    def _base(self, root: torch.fx.Node, views: _Views) -> tuple[Value, Calls]:
        """The value whose row-major memory views share, and the calls that make the root's result of it: the result itself, or, if views need the
        dimensions in PyTorch's order in memory, with them in this order."""
        value = self.environment[root]
        if all(self._makes(value, calls, self.environment[leaf]) for leaf, calls in views.items()):
            return value, ()
        strides = [self.sizes.number(s, root.name) if is_symbolic(s) else s for s in root.meta["val"].stride()]
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        with self.builder.at(f"{root.name}_in_memory", ""):
            turned = self._called("aten.permute.default", value, order) if value.dtype in COMPLEX else self.builder.permute(value, order)
        return turned, (("aten.permute.default", (tuple(order.index(dim) for dim in range(len(order))),)),)

    def _makes(self, base: Value, calls: Calls, wanted: Value) -> bool:
        memory = torch.empty(base.shape, dtype=torch_dtype(base.dtype), device="meta")
        return is_view(memory, calls, (wanted.shape, torch_dtype(wanted.dtype)))

    def _position(self, node: torch.fx.Node, value: Value) -> int:
        """The number of the graph output for a node's result, which has memory of its own, even if another result is the same value."""
        if node not in self.positions:
            self.positions[node] = self._append(value)
        return self.positions[node]

    def _new_value(self, node: torch.fx.Node) -> int:
        """The number of a graph output with the value that is copied to an input or buffer."""
        value = self.environment[node]
        return self.results.values.index(value) if value in self.results.values else self._append(value)

    def _append(self, value: Value) -> int:
        """Adds a graph output; inputs and constants are copied by a node."""
        if value.name in self.builder.inputs or value.name in self.builder.constants:
            with self.builder.at(f"{value.name}_copy", ""):
                value = self._called("aten.clone.default", value) if value.dtype in COMPLEX else self.builder.op("copy", value)
        self.results.values.append(value)
        return len(self.results.values) - 1

    def _called(self, target: str, value: Value, *further: Any) -> Value:
        """The result of an operator on a complex value, which runs through PyTorch."""
        inputs, call = call_recipe((value, *further), {})
        shape = resolve_operator(target)(torch.empty(value.shape, device="meta"), *further).shape
        attributes = {"target": target, "call": call, "reason": f"computes with {value.dtype}, which kernels do not"}
        return self.builder.structural("torch", inputs, [(shape, value.dtype)], attributes)[0]
