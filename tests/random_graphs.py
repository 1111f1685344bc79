"""Random models of two to nine operators, each with inputs, results in float64 and an error bound of its own: well-conditioned by construction.

A graph grows operator by operator (`random_operators`). Each is evaluated in float64 as it is added: once exactly, and again over values with
rounding errors sixteen times those of float32, or four times the error of PyTorch's own float32 on these operands (for operators with several steps,
such as the softmax of a product); and over values that are all too large by a third of that, the effect of rounding a mean that is subtracted. An
operator is rejected if these errors grow beyond LIMIT of the result's magnitude, or change an integer or a truth value. The bound on an output's
error is TOLERANCE of its largest magnitude plus twice the error that resulted; outputs that rounding cannot affect (copies, maxima, integers, truth
values of exact operands) must be equal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

NOISE = 1e-6
"""Relative error that each operator makes in the noisy evaluations: sixteen units in the last place of float32."""
LEAST_NOISE = 1e-7
"""Absolute error of an operator whose result is near zero and whose intermediate results are near one (log softmax)."""
EVALUATIONS = 3
"""Number of noisy evaluations: two with independent errors, one with an error that all elements share."""
LIMIT = 3e-5
"""Largest difference of noisy evaluations from the exact one, relative to the largest magnitude of the value (at least 1)."""
TOLERANCE = 3e-5
"""Error that an output in float32 may always have, relative to its largest magnitude: sums in another order."""
LARGEST = 1e4
MOST_ELEMENTS = 20_000
MOST_PRODUCTS = 2_000_000


@dataclass(frozen=True)
class Value:
    """A value of the graph on the case's inputs: `exact` in float64 (or its integer type), and `noisy` evaluations. `sure`: not affected by rounding,
    so that every right implementation gives the same bits."""

    number: int
    exact: Tensor
    noisy: tuple[Tensor, ...]
    sure: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.exact.shape)

    @property
    def rank(self) -> int:
        return self.exact.dim()

    @property
    def is_float(self) -> bool:
        return self.exact.is_floating_point()


@dataclass(frozen=True)
class Node:
    """One operator: `part` is called with the values `inputs` and returns one tensor. `keeps`: if its inputs are sure, so is its result."""

    text: str
    inputs: tuple[int, ...]
    part: nn.Module
    keeps: bool = False


class Call(nn.Module):
    """A function as a part."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class RandomGraph(nn.Module):
    """Runs the nodes one after the other; returns the values `outputs`."""

    def __init__(self, inputs: int, nodes: Sequence[Node], outputs: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(node.part for node in nodes)
        self.wiring = [node.inputs for node in nodes]
        self.outputs = tuple(outputs)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for part, numbers in zip(self.parts, self.wiring, strict=True):
            values.append(part(*[values[number] for number in numbers]))
        return tuple(values[number] for number in self.outputs)


@dataclass(frozen=True)
class RandomCase:
    """A model with its inputs, and for each output the result in float64 and the largest error allowed (0: the same bits)."""

    name: str
    inputs: tuple[Tensor, ...]
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @property
    def module(self) -> RandomGraph:
        return RandomGraph(len(self.inputs), self.nodes, self.outputs).eval()

    def allowed(self, output: int) -> float:
        value = self.values[output]
        return 0.0 if value.sure or not value.is_float else TOLERANCE * _magnitude(value.exact) + 2 * _spread(value) + 1e-9

    def wrong(self, found: Any) -> list[str]:
        """The problems of the results, one line for each wrong output; empty if all are right."""
        results = [leaf.detach().cpu() for leaf in torch.utils._pytree.tree_leaves(found)]
        if len(results) != len(self.outputs):
            return [f"{len(results)} results instead of {len(self.outputs)}"]
        faults = []
        for position, (result, number) in enumerate(zip(results, self.outputs, strict=True)):
            exact = self.values[number].exact
            kind = torch.float32 if exact.is_floating_point() else exact.dtype
            if result.dtype != kind or result.shape != exact.shape:
                faults.append(f"output {position} is {result.dtype} {tuple(result.shape)} instead of {kind} {tuple(exact.shape)}")
                continue
            error = _error(result, exact)
            if not error <= self.allowed(number):  # NaN counts as wrong
                faults.append(f"output {position} (value {number}): error {error:.3g}, allowed {self.allowed(number):.3g}")
        return faults

    def __str__(self) -> str:
        lines = [f"{self.name}:"]
        lines += [f"  v{i} = input {_kind(x)} {list(x.shape)}" for i, x in enumerate(self.inputs)]
        for number, node in enumerate(self.nodes, len(self.inputs)):
            arguments = ", ".join(f"v{i}" for i in node.inputs)
            lines.append(f"  v{number} = {node.text} of ({arguments})  {_kind(self.values[number].exact)} {list(self.values[number].shape)}")
        return "\n".join([*lines, "  return " + ", ".join(f"v{number}" for number in self.outputs)])


def _kind(tensor: Tensor) -> str:
    return "float32" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def _error(result: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    return float((result.double() - exact.double()).abs().max())


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _spread(value: Value) -> float:
    return max((_error(noisy, value.exact) for noisy in value.noisy), default=0.0)


# --- growing a graph --------------------------------------------------------------------------------------------------


class Growth:
    """A graph while it grows, from which `random_operators` choose their operands and options."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.values: list[Value] = []
        self.inputs: list[Tensor] = []
        self.nodes: list[Node] = []

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def value(self, suits: Callable[[Value], bool]) -> Value | None:
        """A value that suits, with a preference for the newest."""
        found = [value for value in self.values if suits(value)]
        if not found:
            return None
        return found[-1] if self.chance(0.6) else self.pick(found)

    def floats(self, *ranks: int) -> Value | None:
        """A float value of one of the ranks (of any rank by default)."""
        return self.value(lambda v: v.is_float and (not ranks or v.rank in ranks) and v.exact.numel() > 0)

    def add_input(self, tensor: Tensor) -> None:
        exact = tensor.double() if tensor.is_floating_point() else tensor
        self.inputs.append(tensor)
        self.values.append(Value(len(self.values), exact, (exact,) * EVALUATIONS, True))

    def add(self, node: Node) -> bool:
        """Adds the node, unless its result is too large, not finite or badly conditioned on these inputs."""
        value = self.evaluated(node)
        if value is None:
            return False
        self.nodes.append(node)
        self.values.append(value)
        return True

    def evaluated(self, node: Node) -> Value | None:
        operands = [self.values[number] for number in node.inputs]
        part = (
            copy.deepcopy(node.part).double().eval()
            if any(True for _ in node.part.buffers()) or any(True for _ in node.part.parameters())
            else node.part
        )
        with torch.no_grad():
            exact = part(*[v.exact for v in operands])
            sure = all(v.sure for v in operands)
            noisy = (exact,) * EVALUATIONS if sure else tuple(part(*[v.noisy[k] for v in operands]) for k in range(EVALUATIONS))
        if exact.numel() > MOST_ELEMENTS:
            return None
        if not exact.is_floating_point():
            same = all(bool((other == exact).all()) for other in noisy)
            return Value(len(self.values), exact, (exact,) * EVALUATIONS, True) if same and (sure or self._decided(node, operands)) else None
        keeps = sure and node.keeps
        if not keeps:
            size = max(NOISE * _magnitude(exact) + LEAST_NOISE, 4 * _error(self._single(node, operands), exact))
            shaken = [other + size * (2 * torch.rand(exact.shape, generator=self.noise, dtype=torch.float64) - 1) for other in noisy[:2]]
            noisy = (*shaken, noisy[2] + size / 3)
        value = Value(len(self.values), exact, noisy, keeps)
        if not bool(torch.isfinite(exact).all()) or _magnitude(exact) > LARGEST or not _spread(value) <= LIMIT * max(1.0, _magnitude(exact)):
            return None
        return value

    def _single(self, node: Node, operands: Sequence[Value]) -> Tensor:
        """The operator's result in float32, on the given operands."""
        part = copy.deepcopy(node.part).float().eval()
        with torch.no_grad():
            return part(*[v.exact.float() if v.is_float else v.exact for v in operands])

    def _decided(self, node: Node, operands: Sequence[Value]) -> bool:
        """Whether errors a hundred times as large change no integer or truth value either: two noisy evaluations may miss a close case. Numbers that
        rounding may make equal are made equal once, which random errors do not do."""
        part = copy.deepcopy(node.part).double().eval()
        exact = part(*[v.exact for v in operands])
        unsure = [v.is_float and not v.sure for v in operands]

        def same(changed: Callable[[Tensor, float], Tensor]) -> bool:
            return bool(
                (
                    part(*[changed(v.exact, 1e-4 * _magnitude(v.exact)) if it else v.exact for v, it in zip(operands, unsure, strict=True)]) == exact
                ).all()
            )

        def shaken(x: Tensor, size: float) -> Tensor:
            return x + size * (2 * torch.rand(x.shape, generator=self.noise, dtype=torch.float64) - 1)

        return all(same(shaken) for _ in range(6)) and same(lambda x, size: size * torch.round(x / size) if size else x)


def random_case(seed: int) -> RandomCase:
    """The case of a seed: deterministic for a seed and a release of PyTorch."""
    from tests.random_operators import first_inputs, propose

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        growth = Growth(seed)
        first_inputs(growth)
        wanted = growth.random.randint(2, 9)
        for _ in range(20 * wanted):
            if len(growth.nodes) >= wanted:
                break
            node = propose(growth)
            if node is not None:
                growth.add(node)
    used = {number for node in growth.nodes for number in node.inputs}
    results = range(len(growth.inputs), len(growth.values))
    outputs = [number for number in results if number not in used][-3:]
    others = [number for number in results if number in used]
    if others and growth.chance(0.2):
        outputs.append(growth.pick(others))
    return trimmed(RandomCase(f"random graph {seed}", tuple(growth.inputs), tuple(growth.values), tuple(growth.nodes), tuple(outputs)))


def trimmed(case: RandomCase) -> RandomCase:
    """The case without nodes and inputs that no output needs."""
    count = len(case.inputs)
    needed: set[int] = set()
    waiting = list(case.outputs)
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            waiting += case.nodes[number - count].inputs if number >= count else ()
    kept = [number for number in range(len(case.values)) if number in needed]
    fresh = {number: i for i, number in enumerate(kept)}
    return RandomCase(
        case.name,
        tuple(case.inputs[number] for number in kept if number < count),
        tuple(replace(case.values[number], number=fresh[number]) for number in kept),
        tuple(replace(n, inputs=tuple(fresh[i] for i in n.inputs)) for n in (case.nodes[number - count] for number in kept if number >= count)),
        tuple(fresh[number] for number in case.outputs),
    )


# --- shrinking --------------------------------------------------------------------------------------------------------


def shrunk(case: RandomCase, fails: Callable[[RandomCase], bool]) -> RandomCase:
    """A smaller case that fails too: with fewer outputs, and with inputs in place of computed values."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: RandomCase) -> list[RandomCase]:
    count = len(case.inputs)
    results = [trimmed(replace(case, outputs=(number,))) for number in case.outputs if len(case.outputs) > 1]
    for number in range(len(case.values) - 1, count - 1, -1):
        cut = _with_input(case, number)
        if cut is not None:
            results.append(cut)
    # an output earlier in the graph
    last = case.nodes[-1].inputs if case.nodes else ()
    results += [trimmed(replace(case, outputs=(number,))) for number in last if number >= count]
    return [smaller for smaller in results if smaller.nodes]


def _with_input(case: RandomCase, number: int) -> RandomCase | None:
    """The case with an input in place of a computed value that is read."""
    count = len(case.inputs)
    if number in case.outputs or not any(number in node.inputs for node in case.nodes):
        return None
    order = [*range(count), number, *(i for i in range(count, len(case.values)) if i != number)]
    fresh = {old: new for new, old in enumerate(order)}
    exact = case.values[number].exact
    tensor = exact.float() if exact.is_floating_point() else exact
    growth = Growth(0)
    for x in (*case.inputs, tensor):
        growth.add_input(x)
    nodes = [replace(case.nodes[i - count], inputs=tuple(fresh[j] for j in case.nodes[i - count].inputs)) for i in order[count + 1 :]]
    if not all(growth.add(node) for node in nodes):
        return None
    return trimmed(
        replace(case, inputs=tuple(growth.inputs), values=tuple(growth.values), nodes=tuple(nodes), outputs=tuple(fresh[i] for i in case.outputs))
    )
