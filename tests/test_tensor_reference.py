"""Steps evaluated with PyTorch: every operation and kind of step against the definition in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.random_graphs import random_case
from tilewright.compile import read
from tilewright.graph import reference, tensor_reference
from tilewright.graph.tensor_reference import FLOATS_ALONE, INTEGERS_ALONE, OPERATIONS, Unsupported
from tilewright.ir import scalar
from tilewright.ir.computation import Computation, Step
from tilewright.ir.expr import Apply, Const, Expr, Load, Var
from tilewright.ir.graph import Value
from tilewright.runtime.verify import compare, errors, reference_values, widened

CPU = torch.device("cpu")
ODD = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-300, 3.7, -1e300, float("inf"), float("-inf"), float("nan")]
WHOLE = [0, 1, -1, 2, -7, 5, 63, 2**62, -(2**63)]


def both(step: Step, **arrays: np.ndarray) -> None:
    """Compares the step's results, also when it is evaluated in many blocks."""
    computation = Computation((step,), step.names)
    with np.errstate(all="ignore"):
        expected = reference.run(computation, arrays)
    for got, wanted in zip(tensor_reference.run(computation, {name: torch.from_numpy(a) for name, a in arrays.items()}, CPU), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-290, equal_nan=True)
        assert got.numpy().dtype == wanted.dtype


def defined(name: str, dtype: str) -> bool:
    """Whether the operation is defined on numbers of a type, and evaluated by PyTorch."""
    refused = INTEGERS_ALONE if dtype == "f64" else scalar.REAL | FLOATS_ALONE | {"div", "atan2", "isnan", "isinf"}
    if name in refused or name == "checked":
        return False
    return (name in ("and", "or", "not")) == (dtype == "bool") and not (name.startswith("bitwise") and dtype == "f64")


@pytest.mark.parametrize(("name", "dtype"), [(n, dtype) for n in sorted(OPERATIONS) for dtype in ("f64", "i64", "bool") if defined(n, dtype)])
def test_operations(name: str, dtype: str) -> None:
    operation = scalar.OPERATIONS[name]
    numbers = {"f64": np.array(ODD), "i64": np.array(WHOLE), "bool": np.array([True, False])}[dtype]
    i, j = Var("i", len(numbers)), Var("j", len(numbers))
    a, b = Load("a", (i,), dtype), Load("a", (j,), dtype)
    arguments = {1: (a,), 2: (a, b), 3: (Apply("lt", (a, b), "bool"), a, b)}[operation.arity]
    both(Step("s", (len(numbers),) * 2, (i, j), (Apply(name, arguments, "bool" if operation.boolean else dtype),)), a=numbers)


def test_checked_indices_and_casts() -> None:
    i = Var("i", 9)
    index = Apply("checked", (Load("a", (i,), "i64"), Const(-4, "i64"), Const(4, "i64"), Const(0, "i64")), "i64")
    both(Step("s", (9,), (i,), (Load("b", (index,), "f64"),)), a=np.array([0, 3, -1, -4, 4, -5, 99, 2, 1]), b=np.arange(4.0))
    both(Step("s", (9,), (i,), (Apply("cast", (Load("a", (i,), "f64"),), "i32"),)), a=np.array([0.9, -0.9, 3.5, -3.5, 7, 1e5, -2, 0, 1]))


@pytest.mark.parametrize("points", [1, 3, 7, 1 << 22])
@pytest.mark.parametrize("combiner", ["sum", "prod", "max", "min", "any", "all", None])
def test_steps_in_blocks(points: int, combiner: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarded, shifted, permuted and repeated loads, stored at an index of their own."""
    monkeypatch.setattr(tensor_reference, "POINTS_AT_ONCE", points)
    generator = np.random.default_rng(5)
    dtype = "bool" if combiner in ("any", "all") else "f64"
    x: np.ndarray = generator.standard_normal((5, 4, 3))
    if dtype == "bool":
        x = x > 0
    i, j, r = Var("i", 4), Var("j", 3), Var("r", 5)
    reduced = (r,) if combiner else ()
    first = r if combiner else Const(2, "i64")
    shifted = Apply("sub", (i, Const(1, "i64")), "i64")
    guarded = Apply("select", (Apply("ge", (shifted, Const(0, "i64")), "bool"), Load("x", (first, shifted, j), dtype), Const(0, dtype)), dtype)
    body = Apply("or" if dtype == "bool" else "add", (guarded, Load("x", (first, i, j), dtype)), dtype)
    both(Step("s", (4, 3), (i, j), (body,), reduced, combiner), x=x)
    flat = Apply("add", (Apply("mul", (i, Const(3, "i64")), "i64"), j), "i64")
    both(Step("s", (12,), (i, j), (body,), reduced, combiner, index=(flat,)), x=x)
    both(Step("s", (3, 4), (j, i), (Load("x", (first, i, j), dtype),), reduced, combiner), x=x)
    k = Var("k", 3)
    both(Step("s", (3,), (k,), (Load("x", (first, k, k), dtype),), reduced, combiner), x=x)


@pytest.mark.parametrize("points", [2, 1 << 22])
@pytest.mark.parametrize("combiner", ["sum", "prod", "max"])
def test_scans(combiner: str, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reference, "POINTS_AT_ONCE", points)
    i, j, k, r = Var("i", 3), Var("j", 4), Var("k", 2), Var("r", 4)
    step = Step("s", (3, 4, 2), (i, j, k), (Load("x", (i, r, k), "f64"),), (r,), combiner, j)
    x = np.random.default_rng(3).standard_normal((3, 4, 2))
    if combiner == "max":
        with pytest.raises(Unsupported, match="max"):
            tensor_reference.run(Computation((step,), ("s",)), {"x": torch.from_numpy(x)}, CPU)
        return
    both(step, x=x)


def test_what_is_left_to_the_definition() -> None:
    i = Var("i", 3)
    whole = [Apply(name, (Load("x", (i,), "i64"),) * 2, "i64") for name in ("pow", "div")]  # PyTorch divides integers as float32
    bodies: list[Expr] = [Load("x", (i,), "u64"), *whole, Load("x", (i,), "f32")]
    for body in bodies:
        with pytest.raises(Unsupported):
            tensor_reference.run(Computation((Step("s", (3,), (i,), (body,)),), ("s",)), {"x": torch.zeros(3)}, CPU)
    absolute = Step("s", (3,), (i,), (Apply("abs", (Load("x", (i,), "bool"),), "bool"),))
    with pytest.raises(Unsupported, match="not implemented"):
        tensor_reference.run(Computation((absolute,), ("s",)), {"x": torch.zeros(3, dtype=torch.bool)}, CPU)
    step = Step("s", (3,), (i,), (Load("x", (i,), "f64"), i), (Var("r", 2),), "argmax")
    with pytest.raises(Unsupported, match="argmax"):
        tensor_reference.run(Computation((step,), step.names), {"x": torch.zeros(3)}, CPU)


def test_nothing_is_read_of_tensors_without_elements() -> None:
    """Under a guard that never holds: the second of two tensors that are joined, and of which the second has no rows."""
    i, j = Var("i", 3), Var("j", 2)
    body = Apply("select", (Apply("lt", (i, Const(3, "i64")), "bool"), Load("x", (i, j), "f64"), Load("y", (i, j), "f64")), "f64")
    x = np.arange(6.0).reshape(3, 2)
    both(Step("s", (3, 2), (i, j), (body,)), x=x, y=np.zeros((0, 2)))
    both(Step("s", (3, 2), (i, j), (body,)), x=x, y=np.zeros((3, 0)))


def test_bits_are_those_of_the_types_of_the_graph() -> None:
    """Also of values computed before: the bits of float32 have others than those of the float64 in their place."""

    class Flipped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            bits = (2 * x).view(torch.int32)
            return bits, (bits ^ -(2**31)).view(torch.float32) + 1

    x = torch.tensor([0.25, -3.0, float("inf"), 0.0])
    graph = read(Flipped(), (x,)).graph
    got = reference_values(graph, [x], frozenset(graph.outputs))
    assert torch.equal(got[graph.outputs[0]], (2 * x).view(torch.int32)) and torch.equal(got[graph.outputs[1]], 1 - 2 * x.double())


def test_different_integers_are_errors_however_large() -> None:
    value = Value("y", (2,), "i64")
    found = [compare("", 0, value, torch.tensor([2**60, wrong]), torch.tensor([2**60, 5]), None) for wrong in (5, 4)]
    assert [each.passed for each in found] == [True, False]
    large = torch.tensor([2**60, -(2**62)])
    assert not compare("", 0, value, large + 1, large, None).passed and compare("", 0, value, large, large, None).passed
    small = torch.tensor([3, 2**63 + 1], dtype=torch.uint64)
    assert errors(small, small) == (0.0, 0.0) and errors(small, torch.tensor([3, 2**63], dtype=torch.uint64))[0] == 1


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int) -> None:
    """Whole graphs node by node, as `verify` and trials evaluate them."""
    case = random_case(seed)
    graph = read(case.module, case.inputs).graph
    given = dict(zip(graph.inputs, case.inputs, strict=False))
    inputs = [given[name] for name in graph.inputs]
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    got = reference_values(graph, inputs, frozenset(graph.outputs))
    for name, wanted in zip(graph.outputs, reference.evaluate(widened(graph), wide), strict=True):
        torch.testing.assert_close(got[name], torch.from_numpy(np.array(wanted)), rtol=1e-9, atol=1e-9, equal_nan=True)


def test_loops() -> None:
    """The state of a loop, and what it stacks, in both directions."""
    module = torch.nn.GRU(3, 5, bidirectional=True, batch_first=True).eval()
    x = torch.randn(2, 7, 3)
    graph = read(module, (x,)).graph
    assert any(node.operator == "scan" for node in graph.nodes)
    got = reference_values(graph, [x], frozenset(graph.outputs))
    for name, wanted in zip(graph.outputs, module.double()(x.double()), strict=True):
        torch.testing.assert_close(got[name], wanted.detach(), rtol=1e-12, atol=1e-12)
