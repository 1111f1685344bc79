"""``verify``: compares every stored value of an executable with the same graph in float64, to find the first wrong region.

Memory is shared between values, so the executable runs one region at a time, and each region's results are read before the next one runs. The
reference evaluates the graph's nodes in float64 on the device of the inputs: sums of products by PyTorch's operators, all others by their definition
in the operator table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from tilewright.graph import table, tensor_reference
from tilewright.graph.reference import evaluate_node, looped, to_numpy
from tilewright.graph.tensor_reference import Unsupported
from tilewright.ir.dtypes import BY_TORCH_NAME, ELEMENT_TYPES, NARROW_FLOATS
from tilewright.ir.expr import Apply, walk
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import Storage

TOLERANCES: Mapping[str, float] = MappingProxyType({name: t.tolerance for name, t in ELEMENT_TYPES.items() if t.tolerance})
"""Largest error that passes, as a fraction of the value's largest magnitude; integers and booleans must be equal."""


AS_TF32 = "f16"
"""The type with as many bits of mantissa as TF32, whose tolerance results of products of TF32 have."""


def stored_types(storage: Iterable[Storage]) -> set[str]:
    """The types of what is stored, but for constants as pairs of numbers, which together are as exact as float32."""
    return {one.value.dtype for one in storage if not one.numbers}


def narrow_tolerance(types: Iterable[str]) -> float:
    """The tolerance of values that are computed from values of these types, as far as some are 16-bit floats; 0 if none is."""
    return max((TOLERANCES[dtype] for dtype in NARROW_FLOATS.intersection(types)), default=0.0)


@dataclass(frozen=True)
class VerifiedValue:
    """One value. `absolute_error` is the largest difference; `relative_error` is that divided by the largest magnitude of the reference. Both are
    infinite if NaN or infinities are in different positions."""

    region: str
    order: int
    value: str
    dtype: str
    shape: tuple[int, ...]
    absolute_error: float
    relative_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.relative_error <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """`values` are in order of execution; `str()` prints them worst first."""

    values: tuple[VerifiedValue, ...]

    @property
    def passed(self) -> bool:
        return all(value.passed for value in self.values)

    @property
    def first_wrong(self) -> VerifiedValue | None:
        """The first value in order of execution beyond its tolerance; errors in later values may only follow from it."""
        return next((value for value in self.values if not value.passed), None)

    @property
    def agreement(self) -> str:
        """What a verification without a wrong value says of their number."""
        count = len(self.values)
        return f"all {count} values agree" if count != 1 else "the 1 value agrees"

    @property
    def worst(self) -> tuple[VerifiedValue, ...]:
        return tuple(sorted(self.values, key=lambda v: (-v.relative_error / (v.tolerance or 1e-300), v.order)))

    def __str__(self) -> str:
        lines = [f"{'region':24} {'value':24} {'relative error':>14} {'absolute error':>14} {'tolerance':>10}"]
        for v in self.worst:
            errors = f"{v.relative_error:14.3g} {v.absolute_error:14.3g} {v.tolerance:10.3g}"
            lines.append(f"{v.region:24} {v.value:24} {errors}" + ("" if v.passed else "  wrong"))
        first = self.first_wrong
        lines.append(f"first wrong: region {first.region}, value {first.value}" if first else self.agreement)
        return "\n".join(lines)


def widened(graph: Graph) -> Graph:
    """The graph with every floating-point value, constant and `dtype` attribute as float64, and every complex one as complex128, but for values of
    which the bits are read or made."""
    values = {name: replace(value, dtype=_wide(value.dtype)) for name, value in graph.values.items()}
    constants = {name: _widened_tensor(t) for name, t in graph.constants.items()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.operator == "bit_cast":
            nodes += _between_casts(graph, node, values)
        else:
            nodes.append(replace(node, attributes=_widened_attributes(node.attributes)))
    return replace(graph, nodes=tuple(nodes), values=values, constants=constants)


def _between_casts(graph: Graph, node: Node, values: dict[str, Value]) -> tuple[Node, ...]:
    """A node that reads or makes bits, which are those of the types of the graph, between casts from and to the wide types in `values`, to which the
    values between them are added."""
    (given,), (result,) = node.inputs, node.outputs
    read, made = replace(graph.values[given], name=f"{node.name}.read"), replace(graph.values[result], name=f"{node.name}.made")
    values |= {read.name: read, made.name: made}
    return (
        Node(read.name, "cast", (given,), (read.name,), MappingProxyType({"dtype": read.dtype})),
        replace(node, inputs=(read.name,), outputs=(made.name,)),
        Node(made.name, "cast", (made.name,), (result,), MappingProxyType({"dtype": values[result].dtype})),
    )


def _wide(dtype: str) -> str:
    return {"float": "f64", "complex": "c128"}.get(ELEMENT_TYPES[dtype].kind, dtype)


def _widened_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.complex128) if tensor.is_complex() else tensor


def _widened_attributes(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    def fix(key: str, item: Any) -> Any:
        if isinstance(item, Graph):
            return widened(item)
        if key == "dtype" and isinstance(item, str):
            return _wide(item)
        if isinstance(item, tuple):
            if len(item) == 2 and item[0] == "dtype" and item[1] in BY_TORCH_NAME:
                return ("dtype", ELEMENT_TYPES[_wide(BY_TORCH_NAME[item[1]])].torch)
            return tuple(fix("", part) for part in item)
        return item

    return {key: fix(key, item) for key, item in attributes.items()}


def reference_values(graph: Graph, inputs: Sequence[torch.Tensor], wanted: frozenset[str]) -> dict[str, torch.Tensor]:
    """The wanted values of the graph in float64 (integers and booleans unchanged), on the device of its inputs; on the host if its memory is too
    small."""
    wide = widened(graph)
    device = inputs[0].device if inputs else torch.device("cpu")
    with suppress(torch.cuda.OutOfMemoryError):
        found = _values(wide, [_widened_tensor(tensor) for tensor in inputs], wanted, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what PyTorch keeps for later tensors is not there for programs
        return found
    torch.cuda.empty_cache()
    return _values(wide, [_widened_tensor(tensor).cpu() for tensor in inputs], wanted, torch.device("cpu"))


def _values(graph: Graph, inputs: Sequence[torch.Tensor], wanted: frozenset[str], device: torch.device) -> dict[str, torch.Tensor]:
    environment = dict(zip(graph.inputs, inputs, strict=True)) | {name: tensor.to(device) for name, tensor in graph.constants.items()}
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    kept = {name: tensor for name, tensor in environment.items() if name in wanted}
    for i, node in enumerate(graph.nodes):
        for name, result in zip(node.outputs, _evaluate(graph, node, [environment[name] for name in node.inputs], device), strict=True):
            environment[name] = result
            if name in wanted:
                kept[name] = result
        for name in node.inputs:
            if last_use[name] == i:
                environment.pop(name, None)
    return kept


def _evaluate(graph: Graph, node: Node, inputs: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    floating = all(tensor.dtype == torch.float64 for tensor in inputs)
    if floating and node.operator in ("matmul", "linear") and len(inputs) == 2:
        x, y = inputs
        return (x @ (y if node.operator == "matmul" else y.T),)
    rank = inputs[0].ndim - 2 if inputs else 0
    if floating and node.operator == "convolution" and len(inputs) == 2 and rank in (1, 2, 3):
        a = node.attributes
        image, filters = inputs
        padding = [amount for pair in reversed(a["padding"]) for amount in pair]
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
        return (convolve(functional.pad(image, padding), filters, None, tuple(a["stride"]), 0, tuple(a["dilation"]), a.get("groups", 1)),)
    if node.operator == "scan":
        body = node.attributes["body"]
        moved = replace(body, constants={name: tensor.to(device) for name, tensor in body.constants.items()})  # once, not in every step
        return looped(node, inputs, lambda _, given: _outputs(moved, given, device), torch.stack)
    if node.operator != "torch":
        computation = table.computation(node, graph.values)
        if not any(isinstance(part, Apply) and part.operation == "checked" for step in computation.steps for part in walk(*step.bodies)):
            with suppress(Unsupported):
                return tensor_reference.run(computation, dict(zip(node.inputs, inputs, strict=True)), device)
    results = evaluate_node(graph, node, [to_numpy(tensor) for tensor in inputs])
    return [torch.from_numpy(np.array(result)).to(device) for result in results]


def _outputs(graph: Graph, inputs: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    found = _values(graph, inputs, frozenset(graph.outputs), device)
    return tuple(found[name] for name in graph.outputs)


def errors(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and that divided by the largest magnitude that is expected. Both are 0 if all elements are equal, and infinite if NaN
    or infinities are at different positions. The tensors have as many elements, on the same device."""
    if not got.numel():
        return 0.0, 0.0
    if got.is_complex():
        return errors(torch.view_as_real(got.resolve_conj()), torch.view_as_real(expected.resolve_conj()))
    expected = expected.reshape(got.shape)
    ours, theirs = got.double(), expected.double()
    finite = torch.isfinite(ours) & torch.isfinite(theirs)
    same = finite | (ours == theirs) | (torch.isnan(ours) & torch.isnan(theirs))
    zero = torch.zeros((), dtype=torch.float64, device=ours.device)
    distance = (ours - theirs).abs()
    if not got.is_floating_point():  # different integers may be the same float64
        distance = torch.where(got == expected, zero, distance.clamp(min=1))
    difference = torch.where(finite, distance, zero).max()
    scale = torch.where(finite, theirs.abs(), zero).max()
    agree, absolute, largest = torch.stack((same.all().double(), difference, scale)).tolist()
    if not agree:
        return math.inf, math.inf
    return absolute, absolute / max(largest, torch.finfo(torch.float32).tiny) if absolute else 0.0


def compare(region: str, order: int, value: Value, got: torch.Tensor, expected: torch.Tensor, tolerance: float | None) -> VerifiedValue:
    """The error of one value; `expected` is its float64 reference."""
    exact = value.dtype not in TOLERANCES
    limit = 0.0 if exact else tolerance if tolerance is not None else TOLERANCES[value.dtype]
    absolute, relative = errors(got.detach().to(expected.device), expected)
    return VerifiedValue(region, order, value.name, value.dtype, value.shape, absolute, relative, limit)
