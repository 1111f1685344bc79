"""Reference results of a region in float64, for checking candidates, by PyTorch on the device; what PyTorch does not compute alike, by definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from tilewright.graph import reference, tensor_reference
from tilewright.graph.contraction import Contraction, anchor, contraction
from tilewright.graph.tensor_reference import Unsupported, Window
from tilewright.ir.computation import Computation, Step
from tilewright.ir.dtypes import is_float
from tilewright.ir.expr import Apply, Expr, Load, Var, add, cast, loads, rewrite
from tilewright.ir.problem import Problem
from tilewright.ir.scalar import REINTERPRETED

ELEMENTS_AT_ONCE = 1 << 25
"""Maximum elements of the first factor, expanded as a matrix, that are processed at once."""


def reference_results(problem: Problem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The region's outputs on the device of its inputs, with floating-point values in float64; `inputs` have their logical shapes. The host computes
    them if the device's memory is too small."""
    try:
        return _results(problem, inputs)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    device = next(iter(inputs.values())).device
    found = _results(problem, {name: tensor.cpu() for name, tensor in inputs.items()})
    return {name: tensor.to(device) for name, tensor in found.items()}


def _results(problem: Problem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    region = problem.region
    if region.stages:
        known = dict(inputs)
        for stage in region.stages:
            known |= _results(replace(problem, region=stage), {name: known[name] for name in stage.inputs})
            for name, whole in region.wholes:
                if name in stage.outputs:
                    known[whole] = known[whole].to(known[name].dtype, copy=True)
                    known[whole][problem.place_of(name)] = known[name]
        return {name: known[name] for name in region.outputs}
    halos = {name: problem.layouts[name].halo for name in inputs}
    wide = {name: _padded(tensor.double() if tensor.is_floating_point() else tensor, halos[name]) for name, tensor in inputs.items()}
    read_at = {load.buffer: len(load.index) for step in region.steps for load in loads(*step.bodies)}
    steps = tuple(_with_halos(step if set(step.names) & {*region.outputs} else _as_read(step, read_at), halos) for step in region.steps)
    device = next(iter(inputs.values())).device if inputs else torch.device("cpu")
    products = {"contraction": steps[:1], "attention": steps}.get(region.kind, ())
    for step in steps:
        found = (anchor(steps, problem.constants) if step is steps[0] else contraction(step, problem.constants)) if step in products else None
        if found is not None:
            wide[step.name] = _product(found, wide, device)
            continue
        wide |= zip(step.names, _evaluated(_widened(step), wide, device), strict=True)
    return {name: wide[name] for name in region.outputs}


def _evaluated(step: Step, wide: Mapping[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    read = {load.buffer for load in loads(*step.bodies)}
    computation = Computation((step,), step.names)
    inputs = {name: tensor for name, tensor in wide.items() if name in read}
    try:
        return tensor_reference.run(computation, inputs, device)
    except Unsupported:
        return _on(device, reference.run(computation, {name: tensor.cpu().numpy() for name, tensor in inputs.items()}))


def _on(device: torch.device, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.array(array)).to(device) for array in arrays)


def _as_read(step: Step, read_at: Mapping[str, int]) -> Step:
    """The step with its results indexed as later steps of the region read them: by its own axes, or, if they read another number of dimensions
    (`read_at`), by its index, which has one of extent 1 for each dimension that was reduced."""
    if all(read_at.get(name, len(step.axes)) != len(step.axes) for name in step.names):
        return step
    return replace(step, index=step.axes, shape=tuple(axis.extent or 0 for axis in step.axes))


def _padded(tensor: torch.Tensor, halo: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The tensor with the zeros of its halo, which loads outside the logical shape read."""
    if not any(map(any, halo)):
        return tensor
    return torch.nn.functional.pad(tensor, [amount for pair in reversed(halo) for amount in pair])


def _with_halos(step: Step, halos: Mapping[str, Sequence[tuple[int, int]]]) -> Step:
    def shifted(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in halos or not any(map(any, halos[node.buffer])):
            return node
        return replace(node, index=tuple(add(i, before) for i, (before, _) in zip(node.index, halos[node.buffer], strict=True)))

    return replace(step, bodies=tuple(rewrite(body, shifted) for body in step.bodies))


def _widened(step: Step) -> Step:
    return replace(step, bodies=tuple(_wide(body) for body in step.bodies))


def _wide(body: Expr) -> Expr:
    """The expression with floats as float64, but for bits that are read or made, which are those of the type that kernels compute with."""

    def widened(node: Expr) -> Expr:
        if isinstance(node, Apply) and node.operation == "reinterpret":
            return cast(node, "f64") if is_float(node.dtype) else replace(node, args=(cast(node.args[0], REINTERPRETED[node.dtype]),))
        return replace(node, dtype="f64") if is_float(node.dtype) else node

    return rewrite(body, widened)


def _product(found: Contraction, wide: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of products, as a product of its factors expanded as matrices."""
    step = found.step
    unit = [axis for axis in step.reduction if axis not in found.r]
    b = _factor(found.b, (*found.batch, *found.n, *found.r), {}, unit, wide, device).reshape(found.size_batch, found.size_n, found.size_r)
    rows = found.m[0].extent or 1 if found.m else 1
    each = max(1, ELEMENTS_AT_ONCE // max(found.size_batch * found.size_r * (found.size_m // rows), 1))
    parts = []
    for start in range(0, rows, each):
        window = {found.m[0]: (start, min(start + each, rows))} if found.m else {}
        a = _factor(found.a, (*found.batch, *found.m, *found.r), window, unit, wide, device).reshape(found.size_batch, -1, found.size_r)
        parts.append(a @ b.transpose(1, 2))
    axes = (*found.batch, *found.m, *found.n)
    product = torch.cat(parts, 1).reshape([axis.extent or 1 for axis in axes])
    free = [axis for axis in step.axes if axis not in axes]
    assert not free, "every axis of a contraction is one of batch, m and n"
    product = product.permute([axes.index(axis) for axis in step.axes])
    if step.index == step.axes:
        return product
    result = torch.zeros(step.shape, dtype=torch.float64, device=device)
    space = {axis: (0, axis.extent or 0) for axis in step.axes}
    result[tuple(tensor_reference.values(step.index, space, {}, device))] = product
    return result


def _factor(
    expr: Expr,
    axes: Sequence[Var],
    window: Mapping[Var, Window],
    unit: Sequence[Var],
    wide: Mapping[str, torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """A factor at every point of the axes, in float64; axes of `unit` have the value 0."""
    space = {axis: window.get(axis, (0, axis.extent or 0)) for axis in axes} | {axis: (0, 1) for axis in unit}
    body = _wide(expr)
    try:
        tensor_reference.refuse((body,))
        (computed,) = tensor_reference.values((body,), space, wide, device)
    except Unsupported:
        arrays = {load.buffer: wide[load.buffer].cpu().numpy() for load in loads(body)}
        (computed,) = _on(device, reference.evaluate_expressions([body], _indices(space), arrays))
    return computed.expand([last - first for first, last in space.values()])


def _indices(space: Mapping[Var, Window]) -> dict[str, np.ndarray]:
    """Each axis's values, along a separate dimension."""
    return {
        axis.name: np.arange(*window, dtype=np.int64).reshape([-1 if k == j else 1 for j in range(len(space))])
        for k, (axis, window) in enumerate(space.items())
    }
