"""Executables whose sizes differ from call to call: programs by size, their bounds and guards, threads, eviction, errors."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.draws import draws
from tilewright.errors import ExecutableClosed, InvalidInput, InvalidModel, NotCompiled, TilewrightError, UnsupportedOperator, UnsupportedOption
from tilewright.frontend.symbolic import SymbolicProgram
from tilewright.frontend.torch_export import exported, tensors_of
from tilewright.runtime.dynamic import DynamicExecutable

AUTO, DYNAMIC = torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC


class Attention(nn.Module):
    """A layer whose sizes appear in products, sums, softmax, reshapes, constants and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, int]:
        batch, length, _ = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / length**0.5 + bias[:length]).masked_fill(~causal, -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch * length, 16)
        return torch.cat([mixed, x.reshape(-1, 16)]), length * 2


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@pytest.fixture(scope="module")
def attention() -> tuple[Attention, DynamicExecutable]:
    torch.manual_seed(0)
    module = Attention().eval()
    dynamic = {"x": {0: "batch", 1: "length"}, "bias": {0: "most", 1: "length"}}
    return module, tilewright.compile(module, (torch.randn(2, 5, 16), torch.randn(5, 5)), dynamic=dynamic, wait=True, programs=4)


@settings(max_examples=draws(12), deadline=None)
@given(batch=st.integers(1, 5), length=st.integers(2, 9))
def test_every_size_is_right(attention: tuple[Attention, DynamicExecutable], batch: int, length: int) -> None:
    module, executable = attention
    x, bias = torch.randn(batch, length, 16), torch.randn(length, length)
    with torch.no_grad():
        wanted = module.double()(x.double(), bias.double())
        module.float()
    got = executable(x, bias)
    torch.testing.assert_close(got[0].double(), wanted[0], atol=1e-5, rtol=1e-5)
    assert got[1] == wanted[1]
    assert len(executable.sizes) <= 4
    assert executable.sizes[-1]["batch"] == batch


def test_sizes_of_zero_and_one_are_exported_for_themselves() -> None:
    run = Function(lambda x, y: x.squeeze(0) * 2 + (3 if x.shape[0] == 1 else 0) + y.sum(0))
    executable = tilewright.compile(run, (torch.randn(1, 4), torch.randn(1, 4)), dynamic=[[{0: "a"}, {0: "b"}]], wait=True)
    for a, b in ((1, 1), (3, 2), (1, 5), (4, 1), (0, 3), (2, 0)):
        x, y = torch.randn(a, 4), torch.randn(b, 4)
        torch.testing.assert_close(executable(x, y), run(x, y))


def test_computed_sizes_of_zero_and_one_are_exported_for_themselves() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            size = x.shape[1]
            return torch.tanh(x[:, : size // 2]) + y[:, :1], x[:, 2:] * y[:, 1:].sum()

    module = Halves().eval()
    executable = tilewright.compile(module, (torch.randn(3, 10), torch.randn(3, 4)), dynamic={"x": {1: "size"}, "y": {1: "other"}}, wait=True)
    for size, other in ((10, 4), (3, 4), (2, 4), (4, 2), (3, 2), (3, 5), (1, 4), (7, 3)):
        x, y = torch.randn(3, size), torch.randn(3, other)
        for got, wanted in zip(executable(x, y), module(x, y), strict=True):
            torch.testing.assert_close(got, wanted)


def test_programs_share_weights() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()).eval()
    executable = tilewright.compile(module, torch.randn(4, 32), dynamic={"input": {0: "batch"}}, wait=True)
    programs = [executable.program(torch.randn(n, 32)) for n in (4, 4 * 9, 1)]
    weights = [{id(tensor) for tensor in program.image.program.graph.constants.values()} for program in programs]
    assert weights[0]
    assert weights[0] == weights[1] == weights[2]
    packed: list[set[int]] = []
    for program in programs[:2]:
        engine = program._engine
        assert engine is not None
        packed.append({id(tensor) for tensor in engine.buffers.constants.values()})
    assert packed[0] & packed[1]


def test_the_programs_used_longest_ago_are_closed() -> None:
    executable = tilewright.compile(nn.ReLU(), torch.randn(2, 3), dynamic={"input": {0: "batch"}}, wait=True, programs=2)
    own = executable.program(torch.randn(2, 3))
    oldest = executable._programs[((2,), False)].executable
    executable(torch.randn(3, 3))
    assert not oldest._closed
    executable(torch.randn(4, 3))
    assert executable.sizes == ({"batch": 3}, {"batch": 4})
    assert oldest._closed
    own(torch.randn(2, 3))  # a program that was handed out stays
    executable(torch.randn(2, 3))
    assert executable.sizes == ({"batch": 4}, {"batch": 2})


def test_an_evicted_program_is_closed_after_its_last_call() -> None:
    executable = tilewright.compile(nn.ReLU(), torch.randn(2, 3), dynamic={"input": {0: "batch"}}, wait=True, programs=1)
    program = executable._taken(((2,), False))
    assert program is not None
    executable(torch.randn(3, 3))
    assert program.evicted
    assert not program.executable._closed
    program.executable(torch.randn(2, 3))
    executable._release(program)
    assert program.executable._closed


def test_threads_with_different_sizes() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval()
    executable = tilewright.compile(module, torch.randn(2, 8), dynamic={"input": {0: "batch"}}, wait=0.05, programs=2)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for _ in range(40):
                    x = torch.randn(int(torch.randint(1, 6, (), generator=generator)), 8, generator=generator)
                    torch.testing.assert_close(executable(x), module(x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def slow(executable: DynamicExecutable, started: threading.Event, go_on: threading.Event) -> None:
    """Makes the executable's builds wait."""
    make = executable._builds._make

    def waiting(key: Any) -> Any:
        started.set()
        go_on.wait()
        return make(key)

    executable._builds._make = waiting


def test_calls_run_eager_while_a_program_is_built() -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(type(x))
            return x.relu() + 1

    module = Counted()
    executable = tilewright.compile(module, torch.randn(2, 3), dynamic={"x": {0: "batch"}}, wait=0)
    started, go_on = threading.Event(), threading.Event()
    slow(executable, started, go_on)
    calls.clear()
    x = torch.randn(6, 3)
    with pytest.warns(NotCompiled, match="batch = 5 run eagerly until their program is ready.*wait=True") as caught:
        for size in (5, 5, 6):
            torch.testing.assert_close(executable(x[:size]), x[:size].relu() + 1)
    assert [warning.filename for warning in caught] == [__file__]
    assert calls == [torch.Tensor] * 3
    started.wait()
    go_on.set()
    executable._builds.request(((5,), False)).done.wait()
    calls.clear()
    torch.testing.assert_close(executable(x[:5]), x[:5].relu() + 1)
    assert not calls
    assert {"batch": 5} in executable.sizes


def test_what_cannot_be_built_warns_once_and_runs_eager() -> None:
    module = nn.ReLU()
    executable = tilewright.compile(module, torch.randn(2, 3), dynamic={"input": {0: "batch"}}, wait=True)

    def failing(key: Any) -> Any:
        raise InvalidModel("it is too large", "use less")

    executable._builds._make = failing
    x = torch.randn(5, 3)
    with pytest.warns(NotCompiled, match="batch = 5 run eagerly.*too large"):
        torch.testing.assert_close(executable(x), x.relu())
    torch.testing.assert_close(executable(x), x.relu())  # warnings are errors here
    with pytest.raises(InvalidModel, match="too large"):
        executable.program(x)
    executable._eager = None
    with pytest.raises(InvalidModel, match="too large"):
        executable(x)


class Copied(nn.Module):
    """Its operator has a kernel for few indices only; one that never has a kernel comes before."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x).index_copy(0, index, values) * 2

    @staticmethod
    def inputs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.randn(size, 2), torch.randperm(size), torch.randn(size, 2)


COPIED = {"x": {0: "n"}, "index": {0: "n"}, "values": {0: "n"}}


def test_operators_that_pytorch_runs_for_later_sizes_are_one_warning() -> None:
    with pytest.warns(NotCompiled, match="^1 operator runs through PyTorch:\n.*bessel_j0") as caught:
        executable = tilewright.compile(Copied(), Copied.inputs(8), dynamic=COPIED, wait=True)
    assert len(caught) == 1
    with warnings.catch_warnings(record=True) as later:
        warnings.simplefilter("always")
        for size in (9, 4000, 4001, 4000, 9):
            inputs = Copied.inputs(size)
            torch.testing.assert_close(executable(*inputs), Copied()(*inputs))
    (message,) = [str(warning.message) for warning in later]
    assert message.startswith("1 operator runs through PyTorch:") and "aten.index_copy.default of 4000x2" in message and "for speed" in message
    assert later[0].category is NotCompiled and later[0].filename == __file__


def test_operators_that_are_an_error_are_one_for_later_sizes_too() -> None:
    class Later(nn.Module):
        def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return x.index_copy(0, index, values) * 2

    executable = tilewright.compile(Later(), Copied.inputs(8), dynamic=COPIED, wait=True, unsupported="error")
    executable(*Copied.inputs(9))
    for use in (executable, executable, executable.program, executable.verify):
        with pytest.raises(UnsupportedOperator, match="1 operator is not covered:\n.*index_copy"):
            use(*Copied.inputs(4000))


def test_parameters_that_changed_are_not_mixed() -> None:
    module = nn.Linear(3, 3).eval()
    executable = tilewright.compile(module, torch.randn(2, 3), dynamic={"input": {0: "batch"}}, wait=0)
    x = torch.randn(5, 3)
    with torch.no_grad():
        wanted = module(x)
        module.weight.zero_()
    assert executable.is_stale(module)
    torch.testing.assert_close(executable(x), wanted)


def test_buffers_that_calls_change_are_those_of_all_sizes() -> None:
    class Counter(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.sum(0)
            return self.total * 2

    def calls(run: Any) -> list[torch.Tensor]:
        return [run(torch.full((n, 4), float(n))) for n in (2, 3, 2, 5)]

    wanted = calls(Counter())
    executable = tilewright.compile(Counter(), torch.zeros(2, 4), dynamic={"x": {0: "batch"}})
    torch.testing.assert_close(calls(executable), wanted)
    program = torch.export.export(Counter(), (torch.zeros(2, 4),), dynamic_shapes=({0: DYNAMIC},))
    torch.testing.assert_close(calls(tilewright.compile(program, torch.zeros(2, 4), dynamic=True)), wanted)


def test_sizes_that_the_model_does_not_allow_are_named() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2 == 0 and x.shape[0] > 3:
            x = x + 1
        return x + y

    executable = tilewright.compile(Function(function), (torch.randn(4, 3), torch.randn(4, 3)), dynamic=[[{0: "batch"}, {0: AUTO}]], wait=True)
    with pytest.raises(InvalidInput, match=r"cannot be exported for batch = 6, inputs_1.shape\[0\] = 8: .*must match"):
        executable(torch.randn(6, 3), torch.randn(8, 3))
    for other in (2, 5, 9):  # exported once more
        x, y = torch.randn(other, 3), torch.randn(other, 3)
        torch.testing.assert_close(executable(x, y), function(x, y))
    with pytest.raises(InvalidInput, match="has no size batch"):
        executable(3, torch.randn(4, 3))
    with pytest.raises(InvalidInput, match="requires gradients"):
        executable(torch.randn(8, 3, requires_grad=True), torch.randn(8, 3))
    assert executable.sizes[0] == {"batch": 4}


def test_equal_names_are_equal_sizes() -> None:
    executable = tilewright.compile(
        Function(lambda x, y: (x.sum(0), y.sum(0))), (torch.randn(4, 3), torch.randn(4, 3)), dynamic=[[{0: "n"}, {0: "n"}]], wait=True
    )
    executable(torch.randn(5, 3), torch.randn(5, 3))
    with pytest.raises(InvalidInput, match="both are called n"):
        executable(torch.randn(5, 3), torch.randn(6, 3))


@pytest.mark.parametrize(
    ("dynamic", "error", "message"),
    [
        ({"z": {0: "n"}}, UnsupportedOption, "inputs are input"),
        ({"input": {5: "n"}}, UnsupportedOption, "2 dimensions"),
        ({"input": "n"}, UnsupportedOption, "2 dimensions"),
        ({"input": {0: 2.5}}, UnsupportedOption, "dimension of input"),
        ({}, UnsupportedOption, "names no sizes"),
        ({"input": {0: None}}, InvalidModel, "no size"),
        ({"input": {1: "channels"}}, InvalidModel, "these sizes free: You marked .*leave that size out"),
    ],
)
def test_dynamic_that_does_not_fit(dynamic: Any, error: type[TilewrightError], message: str) -> None:
    with pytest.raises(error, match=message):
        tilewright.compile(nn.Linear(3, 4), torch.randn(2, 3), dynamic=dynamic)


def test_options_and_the_rest_of_its_life(tmp_path: Path) -> None:
    for options in ({"wait": -1}, {"wait": "no"}, {"programs": 0}, {"programs": 2.0}):
        with pytest.raises(UnsupportedOption):
            tilewright.compile(nn.ReLU(), torch.randn(2, 3), dynamic=True, **options)
    executable = tilewright.compile(nn.ReLU(), torch.randn(2, 3), dynamic=True)
    with pytest.raises(UnsupportedOption, match="executable.program"):
        executable.save(tmp_path / "a.zip")
    executable.program(torch.randn(7, 4)).save(tmp_path / "a.zip")
    x = torch.randn(7, 4)
    torch.testing.assert_close(tilewright.load(tmp_path / "a.zip")(x), x.relu())
    assert executable.verify(x).passed
    assert executable.profile(x, repetitions=2).regions
    assert "sizes of" in repr(executable)
    assert str(executable.plan)
    executable.close()
    executable.close()
    for use in (lambda: executable(x), lambda: executable.program(x), lambda: executable.plan, lambda: executable.threads, executable.synchronize):
        with pytest.raises(ExecutableClosed):
            use()


def test_settings_are_those_of_all_programs() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).eval()
    executable = tilewright.compile(module, torch.randn(2, 8), dynamic={"input": {0: "batch"}}, wait=True, threads=2)
    assert executable.threads == 2 and not executable.check
    executable.program(torch.randn(3, 8))
    executable.threads, executable.check = 1, True
    x = torch.randn(4, 8)
    torch.testing.assert_close(executable(x), module(x).detach())
    programs = [executable.program(x)] + [program.executable for program in executable._programs.values()]
    assert len(programs) == 4 and {(program.threads, program.check) for program in programs} == {(1, True)}
    executable.synchronize()
    assert all(not program.users for program in executable._programs.values())
    with pytest.raises(UnsupportedOption, match="threads = 0"):
        executable.threads = 0
    assert {"export", "partition", "compile"} <= executable.compile_seconds.keys()
    assert executable.program(x).compile_seconds.keys().isdisjoint({"export"})


def test_clones_are_those_of_one_program() -> None:
    executable = tilewright.compile(nn.ReLU(), torch.randn(2, 3), dynamic=True)
    for cloned in (executable.clone, lambda: copy.copy(executable), lambda: copy.deepcopy(executable)):
        with pytest.raises(UnsupportedOption, match=r"cannot be cloned.*executable\.program"):
            cloned()


def test_python_numbers_may_be_free() -> None:
    run = Function(lambda x, n: x[:n] * n)
    executable = tilewright.compile(run, (torch.randn(8, 3), 4), dynamic=[[None, "n"]], wait=True)
    x = torch.randn(8, 3)
    for n in (4, 6, 2):
        torch.testing.assert_close(executable(x, n), run(x, n))
    with pytest.raises(InvalidInput, match="no size n"):
        executable(x, x)


def test_keywords_and_nested_inputs() -> None:
    class Nested(nn.Module):
        def forward(self, pair: Any, *, table: dict[str, torch.Tensor], scale: float = 2.0) -> torch.Tensor:
            return torch.cat([pair[0], pair[1], table["a"]]) * scale

    dynamic = {"pair": [{0: "a"}, None], "table": {"a": {0: "b"}}}
    inputs, keywords = ((torch.randn(2, 3), torch.randn(4, 3)),), {"table": {"a": torch.randn(3, 3)}}
    executable = tilewright.compile(Nested(), inputs, example_keywords=keywords, dynamic=dynamic, wait=True)
    pair, table = (torch.randn(5, 3), torch.randn(4, 3)), {"a": torch.randn(6, 3)}
    torch.testing.assert_close(executable(pair, table=table, scale=2.0), torch.cat([*pair, table["a"]]) * 2)
    with pytest.raises(InvalidInput):
        executable(pair, table=table, scale=3.0)


def test_a_program_is_read_once() -> None:
    """Binding changes nothing of the program: the same sizes give the same graph, and other sizes only other extents."""
    module = Attention().eval()
    inputs = torch.randn(3, 6, 16), torch.randn(6, 6)
    program = SymbolicProgram(exported(module, inputs, None, {0: {0: AUTO, 1: AUTO}, 1: {0: AUTO, 1: AUTO}}), tensors_of(module))
    sizes = dict(zip(program.names, program.key(inputs), strict=True))
    first = program.bind(tuple(sizes.values()))
    other = program.bind(tuple(n + 1 for n in sizes.values()))
    again = program.bind(tuple(sizes.values()))
    assert str(first.graph) == str(again.graph) != str(other.graph)
    assert [node.operator for node in first.graph.nodes] == [node.operator for node in other.graph.nodes]


def test_builds_at_the_end_of_a_process(tmp_path: Path) -> None:
    """A process that ends while a program is built ends cleanly."""
    import subprocess
    import sys

    text = """
import torch, tilewright
e = tilewright.compile(torch.nn.Linear(3, 3).eval(), torch.randn(2, 3), dynamic={"input": {0: "n"}}, wait=0)
with torch.no_grad():
    for n in range(3, 9):
        e(torch.randn(n, 3))
"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert "NotCompiled: calls with n = 3 run eagerly until" in warning
    assert time.perf_counter() > start
