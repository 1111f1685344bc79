"""The PyTorch front end: calling structure, mutation, aliases, odd shapes and types, and unsupported models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.errors import InvalidModel, UnsupportedOperator
from tilewright.frontend import torch_export
from tilewright.frontend.functional import is_readable
from tilewright.frontend.imported import Imported, unsupported
from tilewright.frontend.torch_export import load_exported
from tilewright.frontend.torch_import import import_exported, import_module
from tilewright.graph.reference import evaluate


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.function(*inputs, **keywords)


def run(imported: Imported, *inputs: Any) -> tuple[np.ndarray, ...]:
    """Evaluates the graph for flattened inputs; buffers start from their initial values."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return evaluate(imported.graph, [*tensors, *(state.initial for state in imported.states)])


def test_pytorchs_operators_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function inside PyTorch; a release without it costs time only."""
    register: Callable[[], None] = torch._export.utils._materialize_cpp_cia_ops
    calls: list[int] = []
    x = torch.ones(2)

    def counted() -> None:
        calls.append(1)
        register()

    import_module(nn.Flatten(0), (x,))
    monkeypatch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", counted)
    import_module(nn.Flatten(0), (x,))
    assert len(calls) == 1 and torch._export.utils._materialize_cpp_cia_ops is counted
    monkeypatch.delattr(torch._export.utils, "_materialize_cpp_cia_ops")
    with torch_export._operators_registered_once():
        pass
    assert not hasattr(torch._export.utils, "_materialize_cpp_cia_ops")


def test_nested_structures_keywords_and_literals() -> None:
    def function(x: torch.Tensor, pair: tuple[torch.Tensor, int], *, scale: float, extra: dict[str, torch.Tensor]) -> Any:
        return {"sum": x + pair[0] * pair[1], "rest": (extra["a"] * scale, None, 7, [x])}

    x = torch.randn(3)
    imported = import_module(Function(function), (x, (x + 1, 2)), {"scale": 0.5, "extra": {"a": x * 3}})
    assert imported.leaves == (0, 1, None, None, 2) and imported.literals[2:4] == (2, 0.5)
    kinds = [(o.kind, o.value) for o in imported.outputs]
    assert kinds == [("value", None), ("value", None), ("constant", None), ("constant", 7), ("input", None)]
    results = run(imported, x, x + 1, x * 3)
    leaves = [results[0], results[1], None, 7, x]
    rebuilt = torch.utils._pytree.tree_unflatten(leaves, imported.out_spec)
    np.testing.assert_allclose(rebuilt["sum"], x + (x + 1) * 2)
    np.testing.assert_allclose(rebuilt["rest"][0], x * 1.5)


def test_mutated_input() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(x)
        y[0] = 1
        return x * y

    x, y = torch.randn(3, 2), torch.randn(3, 2)
    imported = import_module(Function(function), (x, y))
    results = run(imported, x, y.clone())
    ((leaf, output),) = imported.mutations
    expected = function(x, y)
    assert leaf == 1
    np.testing.assert_allclose(results[output], y)
    np.testing.assert_allclose(results[imported.outputs[0].index], expected)


def grown(x: torch.Tensor) -> Any:
    y = x * 2
    z = y.sigmoid_()
    y.add_(x).mul_(3)
    return y, z + x


def shifted(x: torch.Tensor) -> Any:
    y = x * 2
    z = y.t()
    y.add_(1)
    return z


def shifted_before(x: torch.Tensor) -> Any:
    y = x * 2
    y.add_(1)
    return y.t() * x.t(), y.sum(0)


def shifted_twice(x: torch.Tensor) -> Any:
    y = x * 2
    z = y.add_(1).t()
    y.mul_(x)
    return z * 3


def wider(x: torch.Tensor) -> Any:
    y = x * 2
    return y.add_(x.double() / 3)


def shifted_rows(x: torch.Tensor) -> Any:
    y = x.exp()
    y[1] += 1
    return y * 2


@pytest.mark.parametrize(
    ("function", "readable"),
    [
        (grown, True),
        (lambda x: (F.relu_(x - 0.5), F.hardtanh_(x * 3), F.silu(x * 2, inplace=True)), True),
        (lambda x: torch.diff(x), True),
        (lambda x: torch.diff(x, 2, 0, x[:1], x[:2]), True),
        (lambda x: torch.diff(x > 0, dim=0), True),
        (lambda x: torch.min(x, x.flip(0)) - torch.max(x, x.square()), True),
        (lambda x: (x * 2).to("cpu", torch.float64) + 1, True),
        (lambda x: F.batch_norm(x, torch.ones(5), torch.full((5,), 2.0), eps=0.1), True),
        (lambda x: F.batch_norm(x, None, None, training=True), False),
        (lambda x: x.reshape(-1), False),
        (lambda x: x.reshape(-1) * 2, True),
        (shifted, False),
        (shifted_before, True),
        (shifted_twice, False),
        (shifted_rows, False),
        (wider, False),
    ],
)
def test_programs_that_are_read_as_traced(function: Callable[..., Any], readable: bool) -> None:
    x = torch.randn(4, 5)
    program = torch_export.exported(Function(function), (x,))
    assert is_readable(program, torch_export.HANDLERS.keys()) == readable
    imported = import_exported(program)
    assert not unsupported(imported.graph)
    wanted = function(x.clone())
    results = run(imported, x)
    for output, want in zip(imported.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        got = results[output.index] if output.kind == "value" else x.reshape(-1).numpy()
        assert got.dtype == want.numpy().dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_programs_of_files_are_made_functional(tmp_path: Path) -> None:
    """A file does not say which tensors share memory."""
    torch.export.save(torch.export.export(Function(shifted), (torch.zeros(2, 3),)), tmp_path / "m.pt2")
    x = torch.randn(2, 3)
    np.testing.assert_allclose(run(import_exported(load_exported(tmp_path / "m.pt2")), x)[0], shifted(x), rtol=1e-6)


class Counter(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


def test_stateful_buffer() -> None:
    module, x = Counter(), torch.randn(2)
    imported = import_module(module, (x,))
    (state,) = imported.states
    results = run(imported, x)
    assert state.name == "count" and state.source is not None and state.source() is module.count
    np.testing.assert_allclose(results[state.output], [1, 1])
    np.testing.assert_allclose(results[imported.outputs[0].index], x + 1)
    assert torch.equal(module.count, torch.zeros(2)), "importing does not change the module"


def test_batch_norm_in_training_mode() -> None:
    module, x = nn.BatchNorm2d(3).double().train(), torch.randn(4, 3, 5, 5, dtype=torch.float64)
    imported = import_module(module, (x,))
    assert not unsupported(imported.graph)
    results = run(imported, x)
    expected = module(x).detach()
    np.testing.assert_allclose(results[imported.outputs[0].index], expected, atol=1e-12)
    states = {state.name: results[state.output] for state in imported.states}
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(states[name], buffer, atol=1e-12)


def test_outputs_that_alias() -> None:
    parameter = nn.Parameter(torch.randn(2))

    class Aliases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameter = parameter

        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            return x, x.view(-1)[1:], self.parameter, y, y

    imported = import_module(Aliases(), (torch.randn(2, 3),))
    kinds = [o.kind for o in imported.outputs]
    assert kinds == ["input", "input", "parameter", "value", "value"]
    assert imported.outputs[3].index == imported.outputs[4].index
    leaf, calls = imported.outputs[1].index, imported.outputs[1].calls
    assert leaf == 0 and [target for target, _ in calls] == ["aten.reshape.default", "aten.slice.Tensor"]


def test_shared_parameter_is_one_constant() -> None:
    first = nn.Linear(3, 3, bias=False)
    module = nn.Sequential(first, nn.Linear(3, 3, bias=False))
    module[1].weight = first.weight
    imported = import_module(module, (torch.randn(2, 3),))
    assert len(imported.graph.constants) == 1
    with torch.no_grad():
        first.weight.add_(1)
    (constant,) = imported.graph.constants.values()
    assert not torch.equal(constant, first.weight), "constants are copies"


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0), (1, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)

    def function(x: torch.Tensor) -> Any:
        return x.relu() + 1, x.sum(), x.reshape(-1).flip(0) * 2, torch.stack([x, x]).mean(0), (x > 0).sum(), x.exp().prod()

    imported = import_module(Function(function), (x,))
    assert not unsupported(imported.graph)
    for result, expected in zip(run(imported, x), function(x), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12)
        assert result.dtype == expected.numpy().dtype and result.shape == tuple(expected.shape)


def test_products_without_elements() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a @ b, F.linear(b.T, a), a.sum(1)

    a, b = torch.randn(2, 0), torch.randn(0, 3)
    imported = import_module(Function(function), (a, b))
    for result, expected in zip(run(imported, a, b), function(a, b), strict=True):
        np.testing.assert_allclose(result, expected)


def test_unsupported_nodes_are_listed_and_run_through_pytorch() -> None:
    def function(x: torch.Tensor) -> Any:
        values, order = torch.cummax(x, -1)
        return values * 2, order, torch.linalg.det(x.half().float()), (x + 1j).real

    x = torch.randn(3, 3)
    imported = import_module(Function(function), (x,))
    found = unsupported(imported.graph)
    assert "aten.cummax.default" in {f.target for f in found}
    running = next(f for f in found if f.target == "aten.cummax.default")
    assert "no definition" in running.reason and "test_frontend.py:" in running.place
    assert any("c64" in f.reason for f in found)
    for result, expected in zip(run(imported, x), function(x), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_random_operators_are_not_compiled() -> None:
    imported = import_module(nn.Dropout(0.5).train(), (torch.randn(8),))
    assert [f.target for f in unsupported(imported.graph)], "dropout in training mode runs through PyTorch"


def test_narrow_types_and_control_flow_are_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="float8"):
        import_module(Function(lambda x: x.view(1, 3)), (torch.zeros(3, dtype=torch.float8_e4m3fn),))
    with pytest.raises(InvalidModel, match="control flow"):
        import_module(Function(lambda x: x * 2 if x.sum() > 0 else x), (torch.randn(3),))


def test_files(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    program = torch.export.export(nn.Linear(3, 4), (x,))
    path = tmp_path / "model.pt2"
    torch.export.save(program, path)
    imported = import_exported(load_exported(path))
    with torch.no_grad():
        np.testing.assert_allclose(run(imported, x)[0], program.module()(x), rtol=1e-5, atol=1e-6)
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(path.read_bytes()[:500])
    for bad in (cut, tmp_path / "absent.pt2"):
        with pytest.raises(InvalidModel, match=bad.name):
            import_exported(load_exported(bad))


def test_symbolic_shapes_need_sizes(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.pt2"
    program = torch.export.export(nn.Linear(3, 4), (torch.randn(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    with pytest.raises(InvalidModel, match="symbolic shape.*dynamic=True"):
        import_exported(load_exported(path))


def test_equal_inputs_are_not_assumed_equal() -> None:
    x = torch.randn(3)
    imported = import_module(Function(lambda a, b: a - b), (x, x))
    np.testing.assert_allclose(run(imported, x, x + 1)[0], [-1] * 3, rtol=1e-5)


@pytest.mark.parametrize("wrong", [False, True])
def test_final_states_of_an_lstm_have_their_shapes(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wrong`: with PyTorch's decomposition of releases up to 2.11."""
    if wrong:
        decompositions = torch._decomp.decompositions
        layer = decompositions.one_layer_lstm

        def with_a_dimension_more(*arguments: Any, **options: Any) -> Any:
            output, states = layer(*arguments, **options)
            return output, tuple(state[None] for state in states)

        monkeypatch.setattr(decompositions, "one_layer_lstm", with_a_dimension_more)
        monkeypatch.setattr(decompositions, "mkldnn_one_layer_lstm", with_a_dimension_more)

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 5 + wrong, 2, bidirectional=True)  # PyTorch caches the shapes

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            _, (h, c) = self.lstm(x)
            return h[-1] * 2, c

    imported = import_module(Last().eval(), (torch.randn(6, 3, 4),))
    assert [imported.graph.values[name].shape for name in imported.graph.outputs] == [(3, 5 + wrong), (4, 3, 5 + wrong)]
    assert not any(node.operator == "torch" for node in imported.graph.nodes)


class Kept(nn.Module):
    """Keeps its last input in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)
        self.recurrent = nn.LSTM(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.recurrent(x[None])[0] + self.last
        self.last = x
        return result


def test_a_tensor_that_is_kept_outside_of_buffers_is_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    import_module(nn.LSTM(3, 3), (torch.ones(2, 3),))
    assert not [w for w in recwarn if "assigned during export" in str(w.message)]
    with pytest.warns(UserWarning, match=r"self\.last[, ].*register_buffer"):
        import_module(Kept(), (torch.ones(3),))


def test_operators_that_make_tensors_of_numbers() -> None:
    """What PyTorch decomposes into numbers of its own intermediate operators."""

    class Logarithms(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.xlogy(x, 1.7), torch.xlogy(1.7, x), torch.special.xlog1py(x, 0.3)

    x = torch.rand(50) + 0.1
    graph = import_module(Logarithms(), (x,)).graph
    assert "torch" not in {node.operator for node in graph.nodes}
    for got, wanted in zip(evaluate(graph, [x]), Logarithms()(x.double()), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
