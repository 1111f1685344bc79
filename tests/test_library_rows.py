"""PyTorch's softmax and reductions of whole dimensions as candidates, against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.attention_cases import Function
from tests.draws import draws
from tests.sample_artifacts import manifest_of, put, signed
from tests.test_library import NATIVE, THREADS, VENDOR, check, compiled, libraries, library_of, problems_of, trials_of
from tilewright.errors import InvalidArtifact
from tilewright.ir.library import Pooling, Softmax
from tilewright.selection.choice import rank


@st.composite
def rows(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Softmax or a reduction along dimensions of an input, perhaps of another order, and what may follow."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(2, 40))
    dim = max(range(len(shape)), key=lambda at: shape[at]) if draw(st.booleans()) else draw(st.integers(0, len(shape) - 1))
    function: Callable[[Tensor], Tensor] = draw(
        st.sampled_from(
            (
                lambda x: torch.softmax(x, dim),
                lambda x: torch.log_softmax(x, dim),
                lambda x: x.mean(dim),
                lambda x: x.sum(dim, keepdim=True),
                lambda x: x.amax(dim),
                lambda x: x.mean((-2, -1)) if x.dim() > 2 else x.mean(-1),
            )
        )
    )
    after = draw(st.sampled_from((lambda y: y, torch.sigmoid, lambda y: y * y + 1)))
    turned = draw(st.booleans())
    return Function(lambda x: after(function(x.transpose(0, -1) if turned else x))), (3 * torch.randn(shape if not turned else shape[::-1]),)


@settings(max_examples=draws(40), deadline=None, phases=(Phase.generate,))
@given(rows())
def test_rows(tmp_path_factory: pytest.TempPathFactory, case: tuple[nn.Module, tuple[Tensor, ...]]) -> None:
    check(compiled(*case, tmp_path_factory.mktemp("library") / "records"), *case)


TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = {
    "rows": (lambda x: torch.softmax(x, -1), (3, 5, 20), "library softmax"),
    "channels": (lambda x: torch.softmax(x, 1), (2, 20, 4, 5), "library softmax"),
    "logarithms": (lambda x: torch.log_softmax(x, 0), (20, 3), "library log_softmax"),
    "with what follows": (lambda x: torch.softmax(x, -1) * 2 + x, (3, 5, 20), "library softmax, then loops"),
    "means": (lambda x: x.mean((2, 3)), (2, 6, 20, 20), "library average_pooling"),
    "greatest": (lambda x: x.amax((1, 3)), (2, 6, 4, 20), "library max_pooling"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_operators_take(name: str, tmp_path: Path) -> None:
    function, shape, schedule = TAKEN[name]
    module, inputs = Function(function), (torch.randn(shape),)
    executable = compiled(module, inputs, tmp_path / "records")
    (call,) = libraries(executable)
    assert isinstance(call.operator, (Softmax, Pooling)) and [view.name for view in call.inputs] == ["inputs_0"]
    (region,) = executable.image.program.regions
    assert region.schedule.startswith(schedule) and (", then" in region.schedule) == (", then" in schedule)
    check(executable, module, inputs)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "computed elements": lambda x: torch.softmax(x * x, -1),
    "two dimensions": lambda x: torch.softmax(x.flatten(1), -1),
    "a normalisation": lambda x: nn.functional.layer_norm(x, (x.shape[-1],)),
    "a sum of exponentials": lambda x: torch.logsumexp(x, -1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_operators_do_not_take(name: str) -> None:
    problems = problems_of(Function(REFUSED[name]), (torch.randn(3, 5, 20),))
    operators = {choice.schedule.operator for problem in problems for choice in rank(problem, NATIVE, THREADS, VENDOR).library}
    assert operators.isdisjoint({"softmax", "log_softmax"})


@pytest.mark.parametrize("layer", [nn.Softmax(1), nn.LogSoftmax(1), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(8)], ids=str)
def test_results_of_another_order_than_what_is_read(layer: nn.Module, tmp_path: Path) -> None:
    """PyTorch's kernels may store in a given tensor as if it had the order of their own results: channels are innermost in what these read."""
    module, inputs = nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), layer).eval(), (torch.randn(2, 3, 18, 18),)
    executable = compiled(module, inputs, tmp_path / "records")
    assert isinstance(libraries(executable)[-1].operator, (Softmax, Pooling))
    check(executable, module, inputs)


def test_infinities(tmp_path: Path) -> None:
    module, x = Function(lambda x: torch.softmax(x, -1)), torch.randn(4, 20)
    executable = compiled(module, (x,), tmp_path / "records")
    x[0, 3], x[1], x[2, 2] = float("-inf"), float("-inf"), float("inf")
    torch.testing.assert_close(executable(x), module(x), equal_nan=True)


@pytest.mark.slow
def test_trials_and_artifacts(tmp_path: Path) -> None:
    module, inputs = Function(lambda x: torch.softmax(x, 1)), (torch.randn(2, 20, 4, 5),)
    executable = compiled(module, inputs, tmp_path / "records")
    executable.save(tmp_path / "artifact")
    check(tilewright.load(tmp_path / "artifact"), module, inputs)
    files = {str(path.relative_to(tmp_path / "artifact")): path.read_bytes() for path in (tmp_path / "artifact").rglob("*") if path.is_file()}
    for number, change in enumerate(({"dim": 4}, {"dim": -1}, {"dim": True}, {"name": "softmin"}, {"name": "average_pooling"})):
        manifest = manifest_of(files)
        library_of(manifest)["operator"].update(change)
        with pytest.raises(InvalidArtifact):
            tilewright.load(put(signed(files, manifest), tmp_path / str(number)))
    entries = trials_of(module, inputs, tmp_path, "library softmax")
    errors = [entry.relative_error for entry in entries if entry.relative_error is not None]  # that of the first time
    assert errors and max(errors) < 1e-5
