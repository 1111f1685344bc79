"""The torch.compile back end: results, gradients, changing parameters, and graphs that it declines."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tilewright.dynamo as dynamo
from tilewright.compile import compile as compile_model
from tilewright.errors import UnknownTarget, UnsupportedOption


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records every executable that the back end makes."""
    made: list[Any] = []
    original = compile_model

    def recording(*arguments: Any, **keywords: Any) -> Any:
        made.append(original(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(dynamo, "compile_model", recording)
    return made


def compiled(module: Any, **keywords: Any) -> Any:
    return torch.compile(module, backend="tilewright", **keywords)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-6)


def test_is_registered_by_name() -> None:
    assert "tilewright" in torch._dynamo.list_backends()


def test_inference_matches_float64_and_runs_compiled(compiled_calls: list[Any]) -> None:
    network = Network().eval()
    run = compiled(network)
    x = torch.randn(5, 6)
    with torch.no_grad():
        got = run(x)
        again = run(x + 1)
    want = Network().double().eval()
    want.load_state_dict(network.state_dict())
    close(got, want(x.double()).detach())
    close(again, want((x + 1).double()).detach())
    assert len(compiled_calls) == 1


def test_inference_mode(compiled_calls: list[Any]) -> None:
    network, x = Network().eval(), torch.randn(4, 6)
    with torch.inference_mode():
        close(compiled(network)(x), network(x))
    assert len(compiled_calls) == 1


def test_gradients_flow_in_training(compiled_calls: list[Any]) -> None:
    network, x = Network(), torch.randn(5, 6)
    reference = Network()
    reference.load_state_dict(network.state_dict())
    compiled(network)(x).square().sum().backward()
    reference(x).square().sum().backward()
    for got, want in zip(network.parameters(), reference.parameters(), strict=True):
        assert got.grad is not None and want.grad is not None
        close(got.grad, want.grad)
    assert not compiled_calls


def test_gradients_of_an_input_flow() -> None:
    network = Network().eval().requires_grad_(False)
    run, x = compiled(network), torch.randn(3, 6)
    with torch.no_grad():
        run(x)
    leaf = x.clone().requires_grad_()
    run(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


def test_grad_mode_with_nothing_that_requires_gradients_is_compiled(compiled_calls: list[Any]) -> None:
    network, x = Network().eval().requires_grad_(False), torch.randn(3, 6)
    close(compiled(network)(x), network(x))
    assert len(compiled_calls) == 1


def test_gradients_lost_by_the_user_are_not_needed(compiled_calls: list[Any]) -> None:
    network = Network().eval()

    def score(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return network(x) * 2

    x = torch.randn(3, 6)
    got = compiled(score)(x)
    close(got, score(x))
    assert not got.requires_grad
    assert len(compiled_calls) == 1


def test_parameters_unfrozen_later_get_gradients() -> None:
    network = Network().eval().requires_grad_(False)
    run, x = compiled(network), torch.randn(3, 6)
    run(x)
    network.requires_grad_(True)
    run(x).sum().backward()
    assert network.first.weight.grad is not None


@pytest.mark.parametrize("later", ["grad mode", "an input"])
def test_gradients_are_not_lost_where_dynamo_does_not_capture_again(later: str) -> None:
    """The captured graph is called directly, past Dynamo's guards."""
    network, x = Network().eval().requires_grad_(later == "grad mode"), torch.randn(3, 6)
    captured: list[Any] = []

    def capture(graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        captured[:] = [dynamo.backend(graph_module, inputs), inputs]
        return graph_module.forward

    with torch.set_grad_enabled(later != "grad mode"):
        torch.compile(network, backend=capture)(x)
        run, inputs = captured
        (before,) = run(*inputs)
    assert not before.requires_grad
    if later == "an input":
        inputs = [v.detach().clone().requires_grad_(v.shape == x.shape) for v in inputs]
    (after,) = run(*inputs)
    assert after.requires_grad
    close(after.detach(), before)


@pytest.mark.parametrize("change", ["in place", "optimiser", "state", "replaced", "data"])
def test_a_changed_parameter_is_seen(change: str) -> None:
    network, x = Network().eval(), torch.randn(3, 6)
    run = compiled(network)
    with torch.no_grad():
        before = run(x)
    if change == "in place":
        with torch.no_grad():
            network.first.weight.mul_(-1.5)
    elif change == "optimiser":
        optimiser = torch.optim.SGD(network.parameters(), lr=0.5)
        network(x).sum().backward()
        optimiser.step()
    elif change == "state":
        network.load_state_dict(Network().state_dict())
    elif change == "replaced":
        network.first.weight = nn.Parameter(torch.randn(8, 6))
    else:
        network.first.weight.data = torch.randn(8, 6)
    with torch.no_grad():
        got = run(x)
        close(got, network(x))
    assert not torch.allclose(got, before)


def test_a_changed_buffer_is_seen() -> None:
    network, x = Network().eval(), torch.randn(3, 6)
    run = compiled(network)
    with torch.no_grad():
        run(x)
        network.norm.running_mean.add_(3)  # type: ignore[union-attr]
        close(run(x), network(x))


def test_parameters_that_change_all_the_time_are_not_frozen(compiled_calls: list[Any]) -> None:
    network, x = Network().eval(), torch.randn(3, 6)
    run = compiled(network)
    with torch.no_grad():
        for _ in range(8):
            network.first.weight.mul_(1.1)
            close(run(x), network(x))
    assert len(compiled_calls) == dynamo._CHANGES_IN_A_ROW + 1


def test_dynamic_shapes_run_eager(compiled_calls: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    network = Network().eval()
    run = compiled(network, dynamic=True)
    with torch.no_grad(), caplog.at_level(logging.INFO, "tilewright.dynamo"):
        for n in (2, 5, 7):
            x = torch.randn(n, 6)
            close(run(x), network(x))
    assert not compiled_calls
    assert "symbolic" in caplog.text


def test_each_static_shape_is_compiled(compiled_calls: list[Any]) -> None:
    network = Network().eval()
    run = compiled(network, dynamic=False)
    with torch.no_grad():
        for n in (2, 5, 2):
            x = torch.randn(n, 6)
            close(run(x), network(x))
    assert len(compiled_calls) == 2


def test_graph_breaks_make_several_graphs(compiled_calls: list[Any]) -> None:
    first, second = Network().eval(), nn.Linear(3, 2)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = first(x)
        torch._dynamo.graph_break()
        return second(torch.tanh(y)), y

    x = torch.randn(4, 6)
    with torch.no_grad():
        for got, want in zip(compiled(both)(x), both(x), strict=True):
            close(got, want)
    assert len(compiled_calls) == 2


def test_an_input_written_in_place() -> None:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(y)
        return x.sum() + y

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    other = x.clone()
    got = compiled(change)(x, y)
    close(got, change(other, y))
    close(x, other)


def test_inputs_that_share_memory_and_are_written() -> None:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    run = compiled(change)
    run(torch.zeros(4), torch.zeros(4))
    base = torch.zeros(8)
    got = run(base[0:4], base[2:6])
    want = torch.zeros(8)
    want[0:4] += 1
    close(got, want[2:6] * 2)


def test_batch_norm_in_training_mode_updates_its_buffers() -> None:
    network, x = Network().train(), torch.randn(6, 6)
    reference = Network().train()
    reference.load_state_dict(network.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = compiled(network)
        for _ in range(2):
            close(run(x), reference(x))
    close(network.norm.running_mean, reference.norm.running_mean)  # type: ignore[arg-type]
    assert network.norm.num_batches_tracked == reference.norm.num_batches_tracked == 2


def test_a_refused_graph_runs_eager_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedOption("this cannot be", "do without")

    monkeypatch.setattr(dynamo, "compile_model", refuse)
    network, x = Network().eval(), torch.randn(3, 6)
    run = compiled(network)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            close(run(x), network(x))
    assert [str(w.message) for w in caught if "tilewright" in str(w.message)] == [
        "a graph runs eager, because tilewright cannot compile it: this cannot be; do without"
    ]


def graph_of(module: nn.Module) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    return torch.fx.symbolic_trace(module), [torch.randn(2, 6)]


def test_options_are_checked() -> None:
    graph, inputs = graph_of(nn.Linear(6, 2))
    with pytest.raises(UnsupportedOption, match="speed"):
        dynamo.backend(graph, inputs, options={"speed": 11})
    with pytest.raises(UnsupportedOption, match="trials=-3"):
        dynamo.backend(graph, inputs, options={"trials": -3})
    with pytest.raises(UnknownTarget):
        dynamo.backend(graph, inputs, options={"target": "abacus"})
    with pytest.raises(Exception, match="not here"):
        dynamo.backend(graph, inputs, options={"target": "cortex-a53"})


def test_options_reach_the_compiler(compiled_calls: list[Any]) -> None:
    network, x = Network().eval(), torch.randn(3, 6)
    with torch.no_grad():
        close(compiled(network, options={"target": "native", "threads": 1})(x), network(x))
    assert compiled_calls[0].threads == 1
