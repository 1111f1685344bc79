"""The meaning of a graph: its steps evaluated with NumPy over whole iteration spaces. It is slow, and the reference for all other implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch

from tilewright import settings
from tilewright.errors import IndexOutOfRange
from tilewright.graph import onnx_call, table
from tilewright.graph.operator_arguments import checked_call
from tilewright.ir.computation import COMBINERS, Computation, Step
from tilewright.ir.dtypes import ELEMENT_TYPES, NARROW_FLOATS, of_torch
from tilewright.ir.expr import Apply, Const, Expr, Load, Var, walk
from tilewright.ir.graph import Graph, Node
from tilewright.ir.guards import guards
from tilewright.ir.scalar import OPERATIONS

T = TypeVar("T", bound=Any)
"""A tensor, however it is held."""
POINTS_AT_ONCE = 1 << 22  # iteration points evaluated together: bounds the memory of temporaries
MOST_THREADS = 8  # evaluate blocks at once


def evaluate(graph: Graph, inputs: Sequence[np.ndarray | torch.Tensor]) -> tuple[np.ndarray, ...]:
    """The graph's outputs; 16-bit floats are arrays of float32. `torch` nodes run through PyTorch, `scan` nodes as a Python loop."""
    environment = {name: to_numpy(value) for name, value in zip(graph.inputs, inputs, strict=True)}
    environment.update((name, to_numpy(value)) for name, value in graph.constants.items())
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    keep = {*graph.outputs}
    for i, node in enumerate(graph.nodes):
        results = evaluate_node(graph, node, [environment[name] for name in node.inputs])
        environment.update(zip(node.outputs, results, strict=True))
        for name in node.inputs:
            if last_use[name] == i and name not in keep:
                environment.pop(name, None)
    return tuple(environment[name] for name in graph.outputs)


def to_numpy(value: np.ndarray | torch.Tensor) -> np.ndarray:
    """The tensor as an array; 16-bit floats are widened to float32."""
    if not isinstance(value, torch.Tensor):
        return value
    wide = value.float() if of_torch(value.dtype) in NARROW_FLOATS else value
    return wide.detach().cpu().resolve_conj().resolve_neg().numpy()


def _array_type(dtype: str) -> np.dtype:
    """The type of arrays that hold values of an element type."""
    return np.dtype(np.float32 if dtype in NARROW_FLOATS else ELEMENT_TYPES[dtype].numpy)


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values of a 16-bit float type are arrays of float32 with numbers of that type."""
    return to_numpy(_tensor(array, dtype)) if dtype in NARROW_FLOATS else array


def _tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """An array of the evaluation as a tensor."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).view(array.shape)
    return tensor.to(getattr(torch, ELEMENT_TYPES[dtype].torch)) if dtype in NARROW_FLOATS else tensor


class _OutOfRange(Exception):
    """A checked index is out of range."""

    def __init__(self, index: int, extent: int) -> None:
        super().__init__(index, extent)
        self.index, self.extent = index, extent


def evaluate_node(graph: Graph, node: Node, inputs: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The node's results.

    Raises:
        IndexOutOfRange: if an index from an input is out of range.
    """
    if node.operator == "scan":
        return looped(node, inputs, evaluate, np.stack)
    if node.operator == "torch":
        types = [graph.values[name].dtype for name in node.inputs]
        return tuple(to_numpy(t) for t in call_torch(node, [_tensor(v, dtype) for v, dtype in zip(inputs, types, strict=True)]))
    try:
        results = run(table.computation(node, graph.values), dict(zip(node.inputs, inputs, strict=True)), strict=True)
        return tuple(_rounded(array, graph.values[name].dtype) for array, name in zip(results, node.outputs, strict=True))
    except _OutOfRange as fault:
        raise IndexOutOfRange.at(node.described, fault.index, fault.extent) from None


def looped(node: Node, inputs: Sequence[T], body_of: Callable[[Graph, Sequence[T]], tuple[T, ...]], stack: Callable[[list[T]], T]) -> tuple[T, ...]:
    """The results of a `scan` node, from a function that evaluates its body and one that joins arrays along a new first dimension.

    The body maps (states, an element of each sequence, other inputs) to (new states, an element of each stacked result). `reverse` says of each
    sequence, then of each stacked result, whether step t has its element length - 1 - t instead of t."""
    attributes = node.attributes
    body, states, sequences, length = attributes["body"], attributes["states"], attributes["sequences"], attributes["length"]
    reverse = attributes["reverse"]
    state = tuple(inputs[:states])
    collected: list[tuple[T, ...]] = []
    for t in range(length):
        pairs = zip(inputs[states : states + sequences], reverse[:sequences], strict=True)
        slices = [sequence[length - 1 - t if backwards else t] for sequence, backwards in pairs]
        results = body_of(body, [*state, *slices, *inputs[states + sequences :]])
        state = results[:states]
        collected.append(results[states:])
    stacked = [stack([step[k] for step in collected][:: -1 if backwards else 1]) for k, backwards in enumerate(reverse[sequences:])]
    return (*state, *stacked)


def call_torch(node: Node, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Runs a `torch` node: attribute `target` names the operator of ATen or ONNX, `call` says how its arguments are built from the inputs."""
    target = node.attributes["target"]
    if target.startswith(onnx_call.PREFIX):
        operator = onnx_call.OPERATOR
    else:
        name, overload = target.removeprefix("aten.").rsplit(".", 1)
        operator = getattr(getattr(torch.ops.aten, name), overload)
    arguments, keywords = node.attributes["call"]
    results = checked_call(operator, [_argument(a, inputs) for a in arguments], {key: _argument(a, inputs) for key, a in keywords})
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(r for r in results if isinstance(r, torch.Tensor))


def _argument(recipe: tuple[str, Any], inputs: Sequence[torch.Tensor]) -> Any:
    kind, value = recipe
    if kind == "input":
        return inputs[value]
    if kind == "list":
        return [_argument(item, inputs) for item in value]
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "device":
        return inputs[0].device if inputs else torch.device("cpu")
    return value


def run(computation: Computation, inputs: Mapping[str, np.ndarray], strict: bool = False) -> tuple[np.ndarray, ...]:
    """The outputs of a computation, from the arrays that its steps load. With `strict` an index out of range is an error, otherwise it is taken as
    0."""
    environment = dict(inputs)
    for step in computation.steps:
        environment.update(zip(step.names, _run_step(step, environment, strict), strict=True))
    return tuple(environment[name] for name in computation.outputs)


def _run_step(step: Step, environment: Mapping[str, np.ndarray], strict: bool) -> tuple[np.ndarray, ...]:
    dtypes = [_array_type(d) for d in step.dtypes]
    extents = [axis.extent or 0 for axis in step.axes]
    reduced = [axis.extent or 0 for axis in step.reduction]
    results = [np.zeros(step.shape, d) for d in dtypes]
    if not prod(extents):
        return tuple(results)
    rows = max(1, POINTS_AT_ONCE // max(prod(extents[1:]) * prod(reduced), 1)) if extents else 1
    windows = [(start, min(start + rows, extents[0])) for start in range(0, extents[0], rows)] if extents else [(0, 1)]
    if len(windows) == 1:
        _run_block(step, environment, windows[0], results, strict)
        return tuple(results)
    with ThreadPoolExecutor(min(MOST_THREADS, settings.available_cores())) as pool:  # NumPy lets other threads run while it computes
        list(pool.map(lambda window: _run_block(step, environment, window, results, strict), windows))
    return tuple(results)


def _run_block(step: Step, environment: Mapping[str, np.ndarray], window: tuple[int, int], results: list[np.ndarray], strict: bool) -> None:
    """Evaluates the rows `window` of the first axis and stores their results."""
    # a scan's axis is not iterated: the bodies are evaluated over the reduction variable and accumulated along it
    axes = tuple(v for v in step.axes if v != step.scan)
    space = (*axes, *step.reduction)
    shape = tuple((window[1] - window[0]) if step.axes and v == step.axes[0] else v.extent or 0 for v in space)
    variables: dict[str, np.ndarray] = {}
    for k, (var, extent) in enumerate(zip(space, shape, strict=True)):
        start = window[0] if step.axes and var == step.axes[0] else 0
        variables[var.name] = np.arange(start, start + extent, dtype=np.int64).reshape([-1 if j == k else 1 for j in range(len(space))])
    bodies = [np.broadcast_to(value, shape) for value in evaluate_expressions(step.bodies, variables, environment, strict)]
    count = len(step.reduction)
    if step.scan is not None:
        accumulate = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[step.combiner or ""]
        values = [np.moveaxis(accumulate.accumulate(bodies[0], axis=-1), -1, step.axes.index(step.scan))]
        if step.axes[0] == step.scan:
            values = [v[window[0] : window[1]] for v in values]
    elif step.combiner:
        values = _combine(step, bodies, count)
    else:
        values = bodies
    index_variables = {
        v.name: np.arange(*(window if k == 0 else (0, v.extent)), dtype=np.int64).reshape([-1 if j == k else 1 for j in range(len(step.axes))])
        for k, v in enumerate(step.axes)
    }
    where = tuple(evaluate_expressions(step.index, index_variables, environment))
    for result, value in zip(results, values, strict=True):
        result[where] = value


def _combine(step: Step, bodies: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Reduces the last `count` dimensions, in their order."""
    outer = bodies[0].shape[: bodies[0].ndim - count]
    flat = [b.reshape(*outer, -1) for b in bodies]
    dtypes = step.dtypes
    fold = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "any": np.logical_or, "all": np.logical_and}
    identity = COMBINERS[step.combiner or ""].identity(dtypes)
    if not flat[0].shape[-1]:
        return [np.full(outer, e.value, _array_type(d)) for e, d in zip(identity, dtypes, strict=True) if isinstance(e, Const)]
    if step.combiner in fold:
        return [fold[step.combiner].reduce(flat[0], axis=-1, dtype=flat[0].dtype if step.combiner not in ("any", "all") else None)]
    # argmax, pooled_argmax, argmin: the first of equal elements; NaN wins over all others (the first NaN, or with pooled_argmax the last)
    value = -flat[0] if step.combiner == "argmin" else flat[0]
    if flat[0].dtype.kind == "f":
        value = np.where(np.isnan(flat[0]), np.inf, value)
        best = np.where(np.isnan(flat[0]).any(-1, keepdims=True), np.isnan(flat[0]), value == value.max(-1, keepdims=True))
    else:
        best = flat[0] == (flat[0].min(-1, keepdims=True) if step.combiner == "argmin" else flat[0].max(-1, keepdims=True))
    position = np.where(best, flat[1], np.iinfo(np.int64).max).min(-1)
    if step.combiner == "pooled_argmax" and flat[0].dtype.kind == "f":
        position = np.where(np.isnan(flat[0]).any(-1), np.where(best, flat[1], -1).max(-1), position)
    chosen = np.argmax(best & (flat[1] == position[..., None]), axis=-1)
    return [np.take_along_axis(f, chosen[..., None], axis=-1)[..., 0] for f in flat]


def evaluate_expressions(
    roots: Sequence[Expr], variables: Mapping[str, np.ndarray], environment: Mapping[str, np.ndarray], strict: bool = False
) -> list[np.ndarray]:
    """Values of expressions over broadcastable index arrays. Guarded loads read a clamped position, and the guard discards the value. With `strict` a
    checked index that is out of range and whose guards hold raises _OutOfRange."""
    done: dict[int, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for node in walk(*roots):
            done[id(node)] = _value(node, done, variables, environment)
    if strict:
        for node in walk(*roots):
            if isinstance(node, Apply) and node.operation == "checked":
                _enforce(node, roots, done)
    return [done[id(root)] for root in roots]


def _enforce(check: Apply, roots: Sequence[Expr], done: Mapping[int, np.ndarray]) -> None:
    index, least, extent, _ = (done[id(argument)] for argument in check.args)
    outside = (index < least) | (index >= extent)
    if not outside.any():
        return
    paths = guards(roots)[id(check)] or ((),)
    reached = np.zeros((), np.bool_)
    for guard in paths:
        taken = np.ones((), np.bool_)
        for condition, outcome in guard:
            taken = taken & (done[id(condition)] == outcome)
        reached = reached | taken
    index, wrong = np.broadcast_arrays(index, outside & reached)
    if wrong.any():
        raise _OutOfRange(int(index[wrong][0]), int(extent))


def _value(node: Expr, done: Mapping[int, np.ndarray], variables: Mapping[str, np.ndarray], environment: Mapping[str, np.ndarray]) -> np.ndarray:
    if isinstance(node, Var):
        return variables[node.name]
    dtype = _array_type(node.dtype)
    if isinstance(node, Const):
        return _rounded(np.asarray(node.value, dtype), node.dtype)
    if isinstance(node, Load):
        array = environment[node.buffer]
        if not array.ndim:
            return array
        if not array.size:
            return np.zeros((), dtype)  # reached only under a guard that never holds
        elements: np.ndarray = array[tuple(np.clip(done[id(i)], 0, extent - 1) for i, extent in zip(node.index, array.shape, strict=True))]
        return elements
    assert isinstance(node, Apply)
    arguments = [done[id(argument)] for argument in node.args]
    if node.operation == "cast" and dtype.kind in "iu" and arguments[0].dtype.kind == "f":
        arguments[0] = np.trunc(arguments[0])
    return _rounded(np.asarray(OPERATIONS[node.operation].reference(*arguments)).astype(dtype, copy=False), node.dtype)
