"""ONNX nodes that the operator table does not cover, computed by ONNX Runtime where it is installed, else by ONNX's reference evaluator.

Such a node is a `torch` node whose target is "onnx." and the operator's name. It calls `tilewright::onnx(Tensor[] inputs, str model) -> Tensor[]`,
where `model` is a serialised ONNX model of that one node, in base64. Nodes whose results have shapes that depend on data, and those that read these,
are no nodes of the graph: they are a model of their own, in the same form, which runs after the program (`frontend.onnx_tail`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

PREFIX = "onnx."
CONTROL = frozenset({"If", "Loop", "Scan"})
"""Operators with branches or bodies: they run in models of several nodes only."""
REFUSED = frozenset(
    "SequenceMap ImageDecoder Dropout Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike "
    "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer".split()
)
"""Operators that are not run: of files and text, or random, of which two readings would differ."""
_LARGEST_TEXT = 1 << 22  # bytes of a serialised node

torch.library.define("tilewright::onnx", "(Tensor[] inputs, str model) -> Tensor[]")


def run_model(inputs: Sequence[torch.Tensor], model: str) -> list[torch.Tensor]:
    """The results of a serialised model, on the device of the inputs."""
    _, names, types, run = _evaluator(model)
    # `verify` passes floating-point numbers as float64 and takes them so
    wide = any(x.dtype == torch.float64 and kind != np.float64 for x, kind in zip(inputs, types, strict=True))
    arrays = [x.detach().cpu().numpy().astype(kind, copy=False) for x, kind in zip(inputs, types, strict=True)]
    device = inputs[0].device if inputs else torch.device("cpu")
    results = [torch.from_numpy(np.array(y)).to(device) for y in run(dict(zip(names, arrays, strict=True)))]
    return [y.double() if wide and y.is_floating_point() else y for y in results]


torch.library.impl("tilewright::onnx", "CompositeExplicitAutograd", run_model)
OPERATOR: Callable[..., Any] = torch.ops.tilewright.onnx.default


def encoded(model: Any) -> str:
    """An ONNX model as text. Raises ValueError if it is too large."""
    data = model.SerializeToString()
    if len(data) > _LARGEST_TEXT:
        raise ValueError(f"a model of {len(data):,} bytes")
    return base64.b64encode(data).decode()


def decoded(text: str) -> Any:
    """The model that `encoded` wrote. Raises ValueError for any other text, and for operators that are not run."""
    import onnx

    try:
        model = onnx.load_from_string(base64.b64decode(text, validate=True))
        checked = onnx.ModelProto()
        checked.CopyFrom(model)
        for info in checked.graph.output:
            info.type.tensor_type.shape.SetInParent()  # the checker asks for a shape, which results that depend on data may lack
        onnx.checker.check_model(checked)
    except (binascii.Error, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise ValueError(f"it is no ONNX model: {str(error).splitlines()[0][:200]}") from error
    except Exception as error:  # protocol buffers' own error, which is no ValueError
        raise ValueError(f"it is no ONNX model: {type(error).__name__}") from error
    if model.functions or not model.graph.node or not all(map(may_run, model.graph.node)) or _names_files(model.graph):
        raise ValueError("it is no model of nodes that may be run")
    return model


def may_run(node: Any) -> bool:
    """Whether ONNX's runtimes are given a node: of the standard, not `REFUSED`, nor are nodes of its branches or body."""
    if node.op_type in CONTROL and not node.domain:
        return all(may_run(inner) for attribute in node.attribute for inner in attribute.g.node)
    return not node.domain and node.op_type not in REFUSED and not any(a.HasField("g") or a.graphs for a in node.attribute)


def _names_files(graph: Any) -> bool:
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    sparse = [*graph.sparse_initializer, *(tensor for a in attributes for tensor in (a.sparse_tensor, *a.sparse_tensors))]
    tensors = [*graph.initializer, *(tensor for a in attributes for tensor in (a.t, *a.tensors))]
    tensors += [part for tensor in sparse for part in (tensor.values, tensor.indices)]
    return any(tensor.data_location == tensor.EXTERNAL for tensor in tensors) or any(_names_files(a.g) for a in attributes if a.HasField("g"))


def check_call(target: str, arguments: Sequence[tuple[str, Any]]) -> None:
    """Raises ValueError unless the arguments of a node that a file names are inputs and a model of the target's operator."""
    if len(arguments) != 2 or arguments[0][0] != "list" or arguments[1][0] != "value" or not isinstance(arguments[1][1], str):
        raise ValueError(f"a call of {target} without an ONNX model")
    model = decoded(arguments[1][1])
    if (
        len(model.graph.node) != 1
        or model.graph.node[0].op_type in CONTROL
        or model.graph.node[0].op_type != target.removeprefix(PREFIX)
        or len(model.graph.input) != len(arguments[0][1])
    ):
        raise ValueError(f"a call of {target} with the model of another operator")


def operators_of(text: str) -> dict[str, int]:
    """How often each operator occurs in a model."""
    counts: dict[str, int] = {}
    for node in decoded(text).graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def check_model(text: str, inputs: int, outputs: int) -> None:
    """Raises ValueError unless this is a model that may be run, with so many inputs and outputs."""
    graph = decoded(text).graph
    if (len(graph.input), len(graph.output)) != (inputs, outputs):
        raise ValueError(f"a model of {len(graph.input)} inputs and {len(graph.output)} outputs, not {inputs} and {outputs}")


def runner_of(text: str) -> str:
    """The name of what runs the node here: "ONNX Runtime" or "ONNX's reference evaluator"."""
    return _evaluator(text)[0]


_Evaluator = tuple[str, list[str], list[np.dtype], Callable[[dict[str, np.ndarray]], Any]]


@lru_cache(maxsize=256)
def _evaluator(text: str) -> _Evaluator:
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    model = decoded(text)
    names = [info.name for info in model.graph.input]
    types = [helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type) for info in model.graph.input]
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.force_spinning_stop", "1")  # afterwards the cores belong to our kernels
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return "ONNX Runtime", names, types, lambda given: session.run(None, given)
    except Exception:  # it is not installed, or lacks the operator, its operator set or its types
        evaluator = ReferenceEvaluator(model)
        return "ONNX's reference evaluator", names, types, lambda given: evaluator.run(None, given)
