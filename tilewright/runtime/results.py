"""What a call returns, made of the buffers after its kernels have run: tensors as PyTorch would return them, in memory of their own or in that of
inputs, parameters and buffers, and views of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.frontend.torch_operators import replayed
from tilewright.runtime.buffers import Buffers
from tilewright.runtime.loadable import LoadableProgram
from tilewright.runtime.signature import OutputLeaf, Signature, unflatten

Tensors = Sequence[torch.Tensor]


class Results:
    """The results of a program's calls. `states` are the tensors of the signature's states; `live` returns the module's own parameter for a constant
    of the graph."""

    def __init__(
        self,
        program: LoadableProgram,
        signature: Signature,
        buffers: Buffers,
        states: Tensors,
        live: Mapping[str, Callable[[], torch.Tensor | None]],
    ) -> None:
        self.program, self.signature, self.buffers, self.states, self.live = program, signature, buffers, states, live
        self._direct: tuple[int, ...] | None = None
        """For each leaf the number of the output tensor that is returned as it is, if all are."""
        named = {leaf.index: program.graph.outputs[leaf.index] for leaf in signature.outputs if leaf.kind == "value"}
        plain = all(leaf.kind == "value" and not leaf.calls for leaf in signature.outputs) and len(set(named.values())) == len(named)
        plain = plain and all(name in buffers.places.outputs and program.storage[name].layout.is_row_major for name in named.values())
        if plain and not signature.mutations and not signature.states:
            self._direct = tuple(buffers.places.outputs[named[leaf.index]] for leaf in signature.outputs)
        self._single = self._direct is not None and signature.output_tree.kind == "leaf"

    def of(self, leaves: Sequence[Any], inputs: Tensors, outputs: Tensors) -> Any:
        """The result of a call with these leaves of the arguments, for which kernels read `inputs` and wrote `outputs`; changes what the model
        changes."""
        if self._direct is not None:
            if self._single:
                return outputs[self._direct[0]]
            return unflatten(self.signature.output_tree, iter([outputs[i] for i in self._direct]))
        # everything that is still needed from inputs and states is read before they are changed
        taken: set[str] = set()
        numbers = dict.fromkeys(leaf.index for leaf in self.signature.outputs if leaf.kind == "value")
        produced = {number: self._produced(number, inputs, outputs, taken) for number in numbers}
        tail = self.signature.tail
        later = tail.results(lambda number: self._output(number, inputs, outputs)) if tail is not None else ()
        self._update(leaves, inputs, outputs, produced)
        parameters = {leaf.value: self._parameter(leaf.value) for leaf in self.signature.outputs if leaf.kind == "parameter"}
        tensors: Mapping[str, Any] = {"value": produced, "input": leaves, "state": self.states, "parameter": parameters, "tail": later}
        results: list[Any] = []
        views: dict[OutputLeaf, torch.Tensor] = {}
        for leaf in self.signature.outputs:
            if leaf.kind == "constant":
                results.append(leaf.value)
                continue
            if leaf not in views:  # a tensor that is returned twice is one
                views[leaf] = replayed(tensors[leaf.kind][leaf.value if leaf.kind == "parameter" else leaf.index], leaf.calls)
            results.append(views[leaf])
        return unflatten(self.signature.output_tree, iter(results))

    def _parameter(self, name: str) -> torch.Tensor:
        live = self.live.get(name, lambda: None)()
        return self._constant(name) if live is None else live

    def _constant(self, name: str) -> torch.Tensor:
        """A copy of a constant of the graph."""
        constant: torch.Tensor = self.program.graph.constants[name].to(self.buffers.device, copy=True)
        return constant

    def _output(self, output: int, inputs: Tensors, outputs: Tensors) -> torch.Tensor:
        """The graph output of this number, wherever it is."""
        name = self.program.graph.outputs[output]
        if name in self.program.graph.constants and not self.buffers.is_stored(name):
            return self._constant(name)
        return self.buffers.value(name, inputs, outputs)

    def _produced(self, output: int, inputs: Tensors, outputs: Tensors, taken: set[str]) -> torch.Tensor:
        """The graph output of this number, in memory that is no input's, no constant's, and none of `taken`, to which it is added."""
        name = self.program.graph.outputs[output]
        root = self.program.root(name)
        value = self._output(output, inputs, outputs)
        if name in self.program.graph.constants and not self.buffers.is_stored(name):
            return value
        if root in taken or root not in self.buffers.places.outputs:
            return value.clone(memory_format=torch.contiguous_format)
        taken.add(root)
        return value

    def _update(self, leaves: Sequence[Any], inputs: Tensors, outputs: Tensors, produced: Mapping[int, torch.Tensor]) -> None:
        """Changes inputs and states; of those that were updated in place PyTorch learns that they changed."""
        targets = [(leaves[leaf], output) for leaf, output in self.signature.mutations]
        targets += [(tensor, state.output) for tensor, state in zip(self.states, self.signature.states, strict=True)]
        changed = []
        for target, output in targets:
            name = self.program.graph.outputs[output]
            place = self.buffers.places.inputs.get(self.program.root(name)) if name in self.program.aliases else None
            if place is not None and inputs[place] is target:
                torch.autograd.graph.increment_version(target)
            else:
                changed.append((target, produced[output] if output in produced else self._produced(output, inputs, outputs, set())))
        with torch.no_grad():
            for target, new in changed:
                target.copy_(new)
