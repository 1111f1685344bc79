"""Injected faults inside Tilewright: the model is still right, and a warning names nodes, place and exception."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tests.random_graphs import random_case
from tests.random_runs import together
from tilewright import dynamo
from tilewright.errors import CacheError, InternalFault
from tilewright.frontend import torch_export, torch_import
from tilewright.hardware import machine
from tilewright.kernels import registry
from tilewright.partition import fusion, joining, loops, lowering, predictions, regions
from tilewright.runtime.executable import Executable
from tilewright.selection import choice
from tilewright.tuning.problems import key_of
from tilewright.tuning.tuning import distinct_problems

pipeline = importlib.import_module("tilewright.compile")


class Model(nn.Module):
    """Padding by copy, a join, a loop, parts that are kernels of their own, and an operator that runs through PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear, self.norm, self.lstm = nn.Conv2d(3, 5, 3, padding=1), nn.Linear(20, 12), nn.LayerNorm(12), nn.LSTM(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.convolution(x)).flatten(2)
        z = self.norm(self.linear(y))
        steps, (last, _) = self.lstm(z)
        return steps * 2, last, F.log_softmax(torch.cummax(y, -1)[0].transpose(0, 1).flip(2) * 3, 1), F.normalize(x, dim=(1, 2))  # type: ignore[arg-type]


def warned(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of `act`, and the internal faults of which it warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    return result, [str(w.message) for w in caught if isinstance(w.message, InternalFault)]


def compiled(module: nn.Module, x: Tensor) -> tuple[Executable, list[str]]:
    return warned(lambda: tilewright.compile(module, (x,), target="native", threads=1))


def agrees(executable: Executable, module: nn.Module, x: Tensor) -> None:
    """Compares two calls with the module, and every stored value with float64."""
    with executable, torch.no_grad():
        for _ in range(2):
            for result, wanted in zip(executable(x), module(x), strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
        assert executable.verify(x).passed


@pytest.fixture
def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Model().eval(), torch.randn(2, 3, 4, 5)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("provoked\nat length")


def breaks_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, made to fail at call `number`."""
    calls = itertools.count()

    def sometimes(*arguments: Any, **keywords: Any) -> Any:
        return broken() if next(calls) == number else function(*arguments, **keywords)

    return sometimes


PLACES: dict[str, tuple[Any, str]] = {
    "partition": (regions, "partition"),
    "layouts": (predictions, "assign_layouts"),
    "pitch": (predictions, "with_cache_padding"),
    "judging a join": (joining.RowJudge, "__call__"),
    "choosing": (predictions, "choose"),
    "lowering": (lowering, "lower_for_images"),
    "unfolding a loop": (loops, "unfold"),
    "printing": (pipeline, "kernel_source"),
    "simplifying": (pipeline, "simplify"),
    "compiling": (pipeline, "compile_kernels"),
    "assembling": (pipeline, "executable_of"),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_anywhere_costs_speed_only(place: str, model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = PLACES[place]
    if place == "choosing":  # passed on when planning begins
        monkeypatch.setattr(importlib.import_module("tilewright.tuning.tuning"), "rank", broken)
        monkeypatch.setattr(choice, "rank", broken)
    elif place in ("layouts", "assembling"):  # the second call is for unfused regions
        monkeypatch.setattr(owner, name, breaks_at(0, getattr(owner, name)))
    else:
        monkeypatch.setattr(owner, name, broken)
    executable, said = compiled(*model)
    agrees(executable, *model)
    assert said and all("ZeroDivisionError" in text and "provoked" in text and "at length" not in text and "report" in text for text in said)


def test_each_region_on_its_own(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region in turn fails to lower: the warning names its nodes, the plan gives the reason, and the others keep their kernels."""
    subjects: list[str] = []
    lower = lowering._lower
    for number in range(30):
        monkeypatch.setattr(lowering, "_lower", breaks_at(number, lower))  # that of chains too, whose kernels come from their judge
        executable, said = compiled(*model)
        regions = executable.image.program.regions
        assert len(said) <= 1 and sum(region.kind != "torch" for region in regions) > 3
        agrees(executable, *model)
        if not said:
            break
        assert any("ZeroDivisionError" in reason for region in regions for reason in region.reasons)
        subjects += said
    assert len(subjects) > 6
    for words in ("a copy of x", "linear", "at linear", "scan", "log_softmax"):
        assert any(words in subject.partition(": runs")[0] for subject in subjects), (words, subjects)


@pytest.mark.slow
def test_faults_in_random_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third region of twelve random graphs fails."""
    cases = [random_case(seed) for seed in range(60, 72)]
    module, inputs = together(cases)
    calls, lower = itertools.count(), registry.lower_for_images
    monkeypatch.setattr(lowering, "lower_for_images", lambda *of: broken() if next(calls) % 3 == 0 else lower(*of))
    executable, said = warned(lambda: tilewright.compile(module, inputs, target="native", threads=1))
    assert len(said) > 5
    with executable:
        for case, found in zip(cases, executable(*inputs), strict=True):
            assert case.wrong(found) == [], case


def test_a_handler_that_fails_leaves_its_operator_to_pytorch(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import, "HANDLERS", {**torch_export.HANDLERS, "relu.default": broken, "linear.default": broken})
    executable, said = compiled(*model)
    agrees(executable, *model)
    assert len(said) == 2 and any("relu" in text for text in said) and all("runs through PyTorch" in text for text in said)


def test_tuning_goes_on_without_the_region(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = pipeline.simplify(pipeline.read(model[0], (model[1],)).graph)[0]
    everything = {key_of(problem) for problem in distinct_problems(graph, machine("native"), 1)}
    monkeypatch.setattr(lowering, "lower_for_images", breaks_at(1, registry.lower_for_images))
    _, said = warned(lambda: distinct_problems(graph, machine("native"), 1))
    assert len(said) == 1
    monkeypatch.setattr(lowering, "lower_for_images", broken)
    problems, said = warned(lambda: distinct_problems(graph, machine("native"), 1))
    assert said and {key_of(problem) for problem in problems} <= everything


def test_torch_compile(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = model
    monkeypatch.setattr(lowering, "_lower", breaks_at(1, lowering._lower))
    monkeypatch.setattr(dynamo, "_reason_to_discard", lambda _: None)  # the graph is so small that it would be left to PyTorch without the region
    torch._dynamo.reset()
    with torch.no_grad():
        fast = torch.compile(module, backend="tilewright", options={"threads": 1})
        results, said = warned(lambda: fast(x))
        assert said
        for result, wanted in zip(results, module(x), strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


def test_a_graph_of_torch_compile_runs_eagerly(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = model
    monkeypatch.setattr(torch_import, "functional", broken)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = torch.compile(module, backend="tilewright")(x)
        wanted = module(x)
    said = {type(warning.message): str(warning.message) for warning in caught}
    assert "a graph of torch.compile: it runs eagerly, because of a fault inside Tilewright: ZeroDivisionError" in said[InternalFault]
    assert "runs eagerly: a fault inside Tilewright: ZeroDivisionError" in said[tilewright.NotCompiled]
    for result, value in zip(results, wanted, strict=True):
        assert torch.equal(result, value)


def test_a_saved_executable_keeps_the_way_round(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    module, x = model
    monkeypatch.setattr(lowering, "lower_for_images", breaks_at(1, registry.lower))
    executable, said = warned(lambda: tilewright.compile(module, (x,), target="native", threads=1))
    assert said
    executable.save(tmp_path / "a.zip")
    for result, wanted in zip(tilewright.load(tmp_path / "a.zip")(x), module(x), strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "error", [CacheError("it cannot be written", "make room"), MemoryError(), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("place", ["partition", "lowering", "printing", "compiling"])
def test_what_is_meant_for_the_user_passes(
    error: BaseException, place: str, model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(*PLACES[place], fails)
    with pytest.raises(type(error)):
        tilewright.compile(model[0], (model[1],), target="native", threads=1)


def test_faults_fail_tests(model: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As configured in pyproject.toml: if these warnings are errors, the first one ends the compilation, whatever encloses it."""
    monkeypatch.setattr(lowering, "lower_for_images", broken)
    with pytest.raises(InternalFault, match="ZeroDivisionError"):
        tilewright.compile(model[0], (model[1],), target="native", threads=1)
    monkeypatch.setattr(fusion, "rows_of", broken)
    with pytest.raises(InternalFault, match="ZeroDivisionError"):
        tilewright.compile(model[0], (model[1],), target="native", threads=1)
