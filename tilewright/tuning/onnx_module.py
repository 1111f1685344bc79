"""An ONNX file as a module, for comparing ways of running it: its results in float64 are those of the definitions of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.frontend.handlers import torch_dtype
from tilewright.frontend.onnx_import import import_onnx
from tilewright.runtime.verify import reference_values


class OnnxModule(nn.Module):
    """The file at `path`, read for these example inputs, or for the sizes that it declares itself.

    Raises InvalidModel and UnsupportedOperator as `import_onnx` does."""

    def __init__(self, path: str | Path, example_inputs: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self._imported = import_onnx(path, example_inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        return self  # nothing of it changes

    def inputs(self, draw: Callable[[Sequence[int], torch.dtype], Tensor]) -> tuple[Tensor, ...]:
        """Inputs drawn by shape and type; those that the model was read for particular values of are these."""
        graph = self._imported.graph
        values = [None if number is None else graph.values[graph.inputs[number]] for number in self._imported.leaves]
        return tuple(
            literal if value is None else draw(value.shape, torch_dtype(value.dtype))
            for value, literal in zip(values, self._imported.literals, strict=True)
        )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results, floating-point ones in float64."""
        imported = self._imported
        given = [x.cpu() for x, number in zip(inputs, imported.leaves, strict=True) if number is not None]
        found = reference_values(imported.graph, given, frozenset(imported.graph.outputs))
        made = [found[name] for name in imported.graph.outputs]
        later = [] if imported.tail is None else imported.tail.results(made.__getitem__)
        return tuple(later[output.index] if output.kind == "tail" else made[output.index] for output in imported.outputs)
