"""The torch.compile back end: results, gradients, changing parameters, and graphs that it declines."""

from __future__ import annotations

import copy
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tilewright.dynamo as dynamo
from tilewright.compile import compile as compile_model
from tilewright.errors import InvalidInput, NotCompiled, UnknownTarget, UnsupportedOption
from tilewright.runtime.dynamic import DynamicExecutable


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


@pytest.mark.in_turns(2)
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


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change_are_compiled_once(dynamic: bool | None, compiled_calls: list[Any]) -> None:
    network = Network().eval()
    run = compiled(network, dynamic=dynamic, options={"wait": True})
    with torch.no_grad():
        for n in (4, 2, 5, 7, 2, 5):
            x = torch.randn(n, 6)
            close(run(x), network(x))
    assert len(compiled_calls) == (1 if dynamic else 2)
    executable = compiled_calls[-1]
    assert isinstance(executable, DynamicExecutable)
    assert [tuple(sizes.values()) for sizes in executable.sizes] == ([(4,)] if dynamic else []) + [(7,), (2,), (5,)]


def test_graphs_of_one_model_share_what_planning_found(monkeypatch: pytest.MonkeyPatch) -> None:
    families: list[Any] = []
    packed: list[int] = []
    original = compile_model

    def recording(*arguments: Any, **keywords: Any) -> Any:
        families.append(keywords["family"])
        made = original(*arguments, **keywords)
        packed.append(len(families[-1].constants._packed))
        return made

    monkeypatch.setattr(dynamo, "compile_model", recording)
    network, other = Network().eval(), Network().eval()
    with torch.no_grad():
        for module, options in ((network, {}), (other, {}), (network, {"threads": 1})):
            call = compiled(module, options={"wait": True, **options})
            for batch in (40, 56, 72):
                x = torch.randn(batch, 6)
                close(call(x), copy.deepcopy(module).double()(x.double()))
            torch._dynamo.reset()
    assert len(families) == 6 and families[::2] == families[1::2] and len({id(family) for family in families}) == 3
    assert packed[::2] == packed[1::2] and all(packed) and all(family.memory.schedules for family in families)


def test_numbers_that_change_are_free(compiled_calls: list[Any]) -> None:
    def function(x: torch.Tensor, count: int) -> torch.Tensor:
        return (x[:count] + count).softmax(-1) @ x.T * x.shape[0]

    run = torch.compile(function, backend="tilewright", options={"wait": True})
    with torch.no_grad():
        for rows, count in ((8, 4), (8, 5), (9, 6), (12, 3), (9, 6)):
            x = torch.randn(rows, 32)
            close(run(x, count), function(x, count))
    assert len(compiled_calls) == 3
    assert len(compiled_calls[-1].sizes) == 2


def test_floats_that_change_are_compiled_in_and_noticed(compiled_calls: list[Any]) -> None:
    def function(x: torch.Tensor, factor: float) -> torch.Tensor:
        return (x * factor).softmax(-1) @ x.T

    run = torch.compile(function, backend="tilewright", dynamic=True, options={"wait": True})
    with torch.no_grad(), pytest.warns(NotCompiled, match="Python float.*pass it as a tensor"):
        for factor in (0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5):
            x = torch.randn(8, 32)
            close(run(x, factor), function(x, factor))
    assert len(compiled_calls) <= dynamo._CHANGES_IN_A_ROW + 1


def test_sizes_that_a_program_does_not_allow_run_eagerly(compiled_calls: list[Any]) -> None:
    network = Network().eval()
    run = compiled(network, dynamic=True, options={"wait": True})
    with torch.no_grad():
        run(torch.randn(4, 6))

        def check(leaves: Any) -> None:
            raise InvalidInput("the model requires batch % 4 == 0", "pass such sizes")

        compiled_calls[-1]._model.check = check
        x = torch.randn(3, 6)
        with pytest.warns(NotCompiled, match="batch % 4"):
            close(run(x), network(x))


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


def warned(run: Callable[[], Any], times: int = 3) -> list[str]:
    """The messages of NotCompiled in some calls, every one of them that was issued."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            run()
    return [str(w.message) for w in caught if w.category is NotCompiled]


def test_a_refused_graph_runs_eager_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedOption("this cannot be", "do without")

    monkeypatch.setattr(dynamo, "compile_model", refuse)
    network, x = Network().eval(), torch.randn(3, 6)
    run = compiled(network)
    with torch.no_grad():
        (message,) = warned(lambda: close(run(x), network(x)))
    assert re.fullmatch(r"the graph that begins at .*\(.*:\d+\) runs eagerly: tilewright cannot compile it: this cannot be; do without", message)


def test_gradients_are_a_warning_with_the_remedy() -> None:
    network, x = Network().eval(), torch.randn(3, 6)
    run = compiled(network)
    with pytest.warns(NotCompiled, match="it needs gradients.*torch.no_grad()") as caught:
        run(x)
    assert [warning.filename for warning in caught] == [__file__]  # not PyTorch's files, nor ours
    with torch.no_grad():
        assert not warned(lambda: run(x))


def test_changed_buffers_are_a_warning_with_the_remedy() -> None:
    network, x = Network().train(), torch.randn(6, 6)
    run = compiled(network)
    with torch.no_grad():
        (message,) = warned(lambda: run(x))
    assert "norm.num_batches_tracked" in message and "norm.running_mean" in message and "call eval() on the module" in message


def test_eval_is_no_remedy_for_a_counter() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner.count.add_(1)  # type: ignore[operator]
            return x.softmax(-1) * self.inner.count  # type: ignore[operator]

    run, x = compiled(Counter().eval()), torch.randn(6, 2)
    with torch.no_grad():
        (message,) = warned(lambda: run(x))
    assert "changes buffers of the module: inner.count; " in message and "eval()" not in message and "return their new values" in message


def test_a_first_call_without_rows_decides_nothing(compiled_calls: list[Any]) -> None:
    """The captured graph is called directly: Dynamo captures another one for a size of 0."""
    network = Network().eval()
    captured: list[tuple[Any, list[Any]]] = []

    def capture(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        captured.append((dynamo.backend(graph_module, example_inputs, options={"wait": True}), example_inputs))
        return graph_module.forward

    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.compile(network, backend=capture, dynamic=True)(x)
        ((run, inputs),) = captured
        sized = [5 if isinstance(value, torch.SymInt) else value for value in inputs]
        messages = []
        for rows in (0, 0, 5):
            given = [rows if isinstance(value, int) else x[:rows] if value is x else value for value in sized]
            messages += warned(lambda given=given, rows=rows: close(run(*given)[0], network(x[:rows])), 1)  # type: ignore[misc]
            assert len(compiled_calls) == (rows > 0)
    (message,) = messages
    assert message.startswith("a call of the graph") and "a size is 0" in message


def test_calls_that_run_eagerly_are_one_warning() -> None:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(torch.tanh(y) * y)
        return y * 2 - torch.sigmoid(y)

    run = compiled(change)
    run(torch.zeros(4), torch.zeros(4))
    base = torch.zeros(8)
    (message,) = warned(lambda: run(base[0:4], base[2:6]))
    assert message.startswith("a call of the graph") and "share memory; pass copies" in message


def test_a_graph_that_pytorch_computes_runs_eagerly(compiled_calls: list[Any]) -> None:
    x = torch.randn(40, 6)
    run = compiled(lambda x: torch.linalg.svd(x)[1])
    operators, graph = warned(lambda: close(run(x), torch.linalg.svd(x)[1]))
    assert "_linalg_svd" in operators and "none of its operators has a kernel" in graph
    assert len(compiled_calls) == 1


def test_glue_around_operators_of_pytorch_runs_eagerly(compiled_calls: list[Any]) -> None:
    """The decision follows from predicted times: the same operators on more elements run compiled."""

    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.special.bessel_j0(x) + 1)

    for shape, eager in (((2, 2), True), ((2000, 1000), False)):
        x, run = torch.randn(shape), compiled(around, dynamic=False)
        messages = warned(lambda x=x, run=run: close(run(x), around(x)), 1)  # type: ignore[misc]
        assert any("of calling it" in message for message in messages) == eager
    assert len(compiled_calls) == 2


def test_operators_that_are_an_error_leave_later_calls_to_pytorch(compiled_calls: list[Any]) -> None:
    """As they do for the first program: torch.compile goes on with what it cannot compile."""

    def copied(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x @ x.T @ x).index_copy(0, index, x) * 2

    run = compiled(copied, dynamic=True, options={"wait": True, "unsupported": "error"})
    messages = []
    for size in (64, 1500, 1500, 64):
        x, index = torch.randn(size, 48), torch.randperm(size)
        messages += warned(lambda x=x, index=index: close(run(x, index), copied(x, index)), 1)  # type: ignore[misc]
    (message,) = messages
    assert message.startswith("a call of the graph") and "cannot compile it: 1 operator is not covered" in message and "index_copy" in message
    assert [len(executable.sizes) for executable in compiled_calls] == [1]


def test_graphs_of_free_sizes_are_judged_again_for_larger_ones(compiled_calls: list[Any]) -> None:
    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.special.bessel_j0(x) + 1)

    run = compiled(around, dynamic=True, options={"wait": True})
    counts = []
    for rows in (4, 3, 2000, 5):
        x = torch.randn(rows, 1000 if rows == 2000 else rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotCompiled)
            close(run(x), around(x))
        counts.append(len(compiled_calls))
    assert counts == [1, 1, 2, 2]


@pytest.mark.parametrize("first", [2, 4000])
def test_further_sizes_without_predictions_are_compiled(first: int, compiled_calls: list[Any]) -> None:
    """A graph for further sizes, which has the kernels of the first, is compiled; it is judged by predictions if the first graph was too small."""
    layer = nn.Linear(29, 23, bias=False).eval().requires_grad_(False)
    run = compiled(layer, options={"wait": True})
    messages = []
    for batch in (first, 5600, 7200):
        x = torch.randn(batch, 29)
        messages += warned(lambda x=x: close(run(x), layer(x)), 1)  # type: ignore[misc]
    assert len(messages) == (first == 2) and len(compiled_calls) == 2
    assert [tuple(sizes.values()) for sizes in compiled_calls[1].sizes] == [(5600,), (7200,)]


def test_kernels_are_planned_for_the_threads_that_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.set_num_threads` decides, not the variable that set PyTorch's first number."""
    planned: list[Any] = []

    def recording(*arguments: Any, **keywords: Any) -> Any:
        executable = compile_model(*arguments, **keywords)
        planned.append(executable.threads)
        return executable

    monkeypatch.setattr(dynamo, "compile_model", recording)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TILEWRIGHT_THREADS", raising=False)
    network, x, before = Network().eval(), torch.randn(3, 6), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            close(compiled(network)(x), network(x))
    finally:
        torch.set_num_threads(before)
    assert planned == [2]


@pytest.fixture
def trials_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the trials of every compilation, and makes none."""
    taken: list[int] = []

    def recording(*arguments: Any, trials: int = 0, **keywords: Any) -> Any:
        taken.append(trials)
        return compile_model(*arguments, **keywords)

    monkeypatch.setattr(dynamo, "compile_model", recording)
    return taken


@pytest.mark.parametrize(
    ("mode", "trials"), [("default", 0), ("lite", 0), ("reduce-overhead", 0), ("max-autotune", 10), ("max-autotune-no-cudagraphs", 10)]
)
def test_modes_are_taken(mode: str, trials: int, trials_taken: list[int]) -> None:
    network, x = Network().eval(), torch.randn(3, 6)
    with torch.no_grad():
        close(compiled(network, mode=mode, fullgraph=True)(x), network(x))
    assert trials_taken == [trials]


@pytest.mark.parametrize(
    ("options", "trials", "ignored"),
    [
        ({"max_autotune": True}, 10, ""),
        ({"max_autotune": False, "epilogue_fusion": True}, 0, "epilogue_fusion is an option"),
        ({"max_autotune": True, "trials": 3}, 3, ""),
        ({"triton.cudagraphs": True, "shape-padding": False}, 0, "shape-padding, triton.cudagraphs are options"),
    ],
)
def test_options_of_inductor_are_taken_or_ignored(options: dict[str, Any], trials: int, ignored: str, trials_taken: list[int]) -> None:
    dynamo._warn_ignored.cache_clear()
    network, x = Network().eval(), torch.randn(3, 6)

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = network(x)
        torch._dynamo.graph_break()
        return network(y.repeat(1, 2))

    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        close(compiled(broken, options=options)(x), broken(x))
    assert trials_taken == [trials, trials]
    messages = [str(warning.message) for warning in caught if "Inductor" in str(warning.message)]
    assert len(messages) == bool(ignored) and all(f"{ignored} of Inductor without a meaning" in message for message in messages)


def test_an_unknown_mode_is_refused() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="mode='fastest' is not known; use default, lite, reduce-overhead, max-autotune"):
        compiled(Network().eval(), mode="fastest")(torch.randn(3, 6))


def graph_of(module: nn.Module) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    return torch.fx.symbolic_trace(module), [torch.randn(2, 6)]


def test_options_are_checked() -> None:
    graph, inputs = graph_of(nn.Linear(6, 2))
    with pytest.raises(UnsupportedOption, match="speed"):
        dynamo.backend(graph, inputs, options={"speed": 11, "epilogue_fusion": True})
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


def test_threads_trace_and_compile_at_the_same_time() -> None:
    """Dynamo traces a graph for new sizes on one thread while others export: both use PyTorch's tracers, of which a process has one."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU()).eval()
    run, errors, disabled = compiled(network, dynamic=True), [], {name for name, logger in _loggers() if logger.disabled}
    streams = sys.stdout, sys.stderr

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for k in range(6):
                    x = torch.randn(*((2, 3, 19, 21), (3, 3, 11, 12), (4, 3, 9, 9))[(seed + k) % 3], generator=generator)
                    torch.testing.assert_close(run(x), network(x), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (sys.stdout, sys.stderr) == streams
    assert {name for name, logger in _loggers() if logger.disabled} == disabled


def _loggers() -> list[tuple[str, logging.Logger]]:
    return [(name, logging.getLogger(name)) for name in list(logging.root.manager.loggerDict) if name.partition(".")[0] == "torch"]


@pytest.mark.in_turns
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "made", [lambda n: torch.randn(6).expand(n, 6), lambda n: torch.randn(n + 5).unfold(0, 6, 1), lambda n: torch.randn(n, 12)[:, ::2]]
)
def test_inputs_whose_elements_share_memory(made: Callable[[int], torch.Tensor], dynamic: bool, compiled_calls: list[Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) @ torch.ones(6, 3)

    run = compiled(function, dynamic=dynamic)
    with torch.no_grad():
        for n in (4, 5):
            x = made(n)
            close(run(x), function(x))
    assert compiled_calls


def test_vmap_in_a_captured_graph() -> None:
    """What vmap batches has no storage that could be asked."""

    class Mapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.vmap(lambda row: torch.softmax(row @ row.T, -1) + 1)(x)
            return result

    module, x = Mapped(), torch.randn(5, 8, 6)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="tilewright", fullgraph=True)(x), module(x), rtol=1e-4, atol=1e-5)
