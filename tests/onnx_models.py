"""ONNX models as the reference evaluates their graphs: no kernel is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch

from bench.onnx_node_tests import Prepared
from tilewright.frontend.handlers import torch_dtype
from tilewright.frontend.imported import unsupported
from tilewright.frontend.onnx_import import import_onnx
from tilewright.graph.reference import evaluate


def evaluated(model: onnx.ModelProto | Path, inputs: Sequence[torch.Tensor]) -> Prepared:
    """The model read with these example inputs, as `bench.onnx_node_tests` takes it."""
    imported = import_onnx(model, inputs)

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        graph = imported.graph
        values = evaluate(graph, [x for x, leaf in zip(tensors, imported.leaves, strict=True) if leaf is not None])
        made = [torch.from_numpy(np.array(value)).to(torch_dtype(graph.values[n].dtype)) for n, value in zip(graph.outputs, values, strict=True)]
        later = tail.results(made.__getitem__) if tail is not None else []
        return [later[output.index] if output.kind == "tail" else made[output.index] for output in imported.outputs]

    tail = imported.tail
    nodes = [*unsupported(imported.graph), *(tail.nodes if tail is not None else ())]
    return function, [node.target for node in nodes], imported.leaves.count(None)
