"""PyTorch's pooling as a candidate: windows with padding, dilation and rounded-up sizes, and what an average divides by, against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.draws import draws
from tests.sample_artifacts import manifest_of, put, signed
from tests.test_library import check, compiled, libraries, library_of, trials_of
from tilewright.errors import InvalidArtifact
from tilewright.ir.library import Pooling
from tilewright.ir.windows import pooled_extent
from tilewright.report.explanation import explanation


@st.composite
def poolings(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A pooling after a map, which may leave its values in another order than that of an input, with what may follow it."""
    whole = lambda least, most: draw(st.integers(least, most))  # noqa: E731
    rank, is_max = draw(st.sampled_from((1, 2, 2, 2, 3))), draw(st.booleans())
    window = tuple(whole(1, 4) for _ in range(rank))
    assume(max(window) > 1)
    stride, padding = tuple(whole(1, 3) for _ in range(rank)), tuple(whole(0, taps // 2) for taps in window)
    dilation = tuple(whole(1, 2) if is_max else 1 for _ in range(rank))
    extents = tuple((taps - 1) * step + 1 + whole(0, 9) for taps, step in zip(window, dilation, strict=True))
    dims = zip(extents, window, stride, padding, dilation, strict=True)
    ceiling = draw(st.booleans())
    assume(all(pooled_extent(size, taps, step, (pad, pad), apart, ceiling) > 0 for size, taps, step, pad, apart in dims))
    kind: Any = getattr(nn, f"{'Max' if is_max else 'Avg'}Pool{rank}d")
    options: dict[str, Any] = {"dilation": dilation} if is_max else {"count_include_pad": draw(st.booleans())}
    if not is_max and rank > 1:
        options["divisor_override"] = draw(st.sampled_from((None, None, 5)))
    after: list[nn.Module] = draw(st.sampled_from(([], [nn.ReLU()], [nn.Hardswish()])))
    layers = [kind(window, stride, padding, ceil_mode=ceiling, **options), *after]
    before: list[nn.Module] = [getattr(nn, f"Conv{rank}d")(3, 5, 1)] if draw(st.booleans()) else []
    channels = 3 if before else whole(1, 6)
    return nn.Sequential(*before, *layers).eval(), (torch.randn(whole(1, 3), channels, *extents),)


@settings(max_examples=draws(40), deadline=None, phases=(Phase.generate,))
@given(poolings())
def test_pooling(tmp_path_factory: pytest.TempPathFactory, case: tuple[nn.Module, tuple[Tensor, ...]]) -> None:
    executable = compiled(*case, tmp_path_factory.mktemp("library") / "records")
    if any(region.kind == "window" for region in executable.plan.rows):
        assert any(isinstance(call.operator, Pooling) for call in libraries(executable))
    check(executable, *case)


OPERATORS: dict[str, tuple[nn.Module, tuple[int, ...], Pooling]] = {
    "greatest": (nn.MaxPool2d(3, 2, 1), (1, 4, 9, 9), Pooling("max_pooling", (3, 3), (2, 2), (1, 1), (1, 1))),
    "rounded up": (
        nn.MaxPool2d(3, 2, ceil_mode=True), (1, 4, 8, 8), Pooling("max_pooling", (3, 3), (2, 2), (1, 1), (0, 0), ceiling=True),
    ),
    "along one dimension": (nn.MaxPool1d(3), (2, 4, 9), Pooling("max_pooling", (1, 3), (1, 3), (1, 1), (0, 0))),
    "mean with padding": (nn.AvgPool2d(3, 1, 1), (1, 4, 9, 9), Pooling("average_pooling", (3, 3), (1, 1), (1, 1), (1, 1), divisor=9)),
    "mean within": (
        nn.AvgPool2d(3, 1, 1, count_include_pad=False), (1, 4, 9, 9), Pooling("average_pooling", (3, 3), (1, 1), (1, 1), (1, 1)),
    ),
    "mean within, of one window in a dimension": (
        nn.AvgPool2d((3, 4), 3, (1, 1), count_include_pad=False), (1, 4, 9, 4), Pooling("average_pooling", (3, 4), (3, 6), (1, 1), (1, 1)),
    ),
    "mean with padding, rounded up": (
        nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 4, 8, 8), Pooling("average_pooling", (3, 3), (2, 2), (1, 1), (1, 1), ceiling=True, padded=True),
    ),
    "in three dimensions": (nn.AvgPool3d(2), (1, 2, 4, 6, 8), Pooling("average_pooling", (2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0), divisor=8)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_which_operator_pools(name: str, tmp_path: Path) -> None:
    """Also that it computes all of the region."""
    module, shape, operator = OPERATORS[name]
    inputs = (torch.randn(shape),)
    executable = compiled(module, inputs, tmp_path / "records")
    (call,) = libraries(executable)
    assert call.operator == operator
    assert [region.schedule for region in executable.image.program.regions if region.library is not None] == [f"library {operator.name}"]
    check(executable, module, inputs)


def test_divisors_that_no_operator_has_are_left_to_the_epilogue(tmp_path: Path) -> None:
    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.avg_pool2d(x, 2)
            return y * y + nn.functional.avg_pool2d(x, 2, divisor_override=1)

    module, inputs = nn.Sequential(nn.LPPool2d(1, 2), nn.ReLU()), (torch.rand(1, 4, 8, 8),)
    for one in (module, Squared()):
        executable = compiled(one, inputs, tmp_path / type(one).__name__)
        assert libraries(executable)
        check(executable, one, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pooling_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, module in (("greatest", nn.MaxPool2d(3, 2, 1)), ("mean", nn.AvgPool2d(3, 2, 1))):
        x = torch.randn(2, 6, 9, 9).to(dtype)
        executable = compiled(module, (x,), tmp_path / name)
        assert len(libraries(executable)) == 1 and executable(x).dtype == dtype
        torch.testing.assert_close(executable(x).double(), module(x.double()), rtol=1e-2, atol=1e-2)
        assert executable.verify(x).passed


def test_sums_beyond_the_range_of_float16(tmp_path: Path) -> None:
    """A sum in float32 of which the model stores the root in float16."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().sum((2, 3)).sqrt().to(x.dtype)

    x = (torch.rand(2, 4, 64, 64) * 100).half()
    executable = compiled(Norm(), (x,), tmp_path / "records")
    torch.testing.assert_close(executable(x), Norm()(x), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_of_32_bits_are_not_rounded_to_16(dtype: torch.dtype, tmp_path: Path) -> None:
    """Operators store results in the type of what they read."""

    class Wide(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x.float()) + 1

    x = torch.rand(2, 4, 6, 6).to(dtype)
    for number, function in enumerate((lambda x: x.mean((2, 3)), lambda x: torch.softmax(x, -1), lambda x: x @ x.transpose(2, 3))):
        module = Wide(function)
        executable = compiled(module, (x,), tmp_path / str(number))
        torch.testing.assert_close(executable(x), module(x), rtol=1e-5, atol=1e-5)


def test_nan_and_infinities(tmp_path: Path) -> None:
    module = nn.MaxPool2d(3, 2, 1)
    x = torch.randn(1, 4, 9, 9)
    executable = compiled(module, (x,), tmp_path / "records")
    x[0, 0, 4, 4], x[0, 1] = float("nan"), float("-inf")
    torch.testing.assert_close(executable(x), module(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_trials_artifacts_and_explanations(tmp_path: Path) -> None:
    module, inputs = nn.Sequential(nn.AvgPool2d(3, 2, 1, ceil_mode=True), nn.Hardswish()).eval(), (torch.randn(2, 8, 10, 12),)
    executable = compiled(module, inputs, tmp_path / "records")
    executable.save(tmp_path / "artifact")
    loaded = tilewright.load(tmp_path / "artifact")
    assert libraries(loaded) == libraries(executable) and "average_pooling of 2 x 8 x 10 x 12, through PyTorch" in explanation(loaded.image)
    check(loaded, module, inputs)
    entries = trials_of(module, inputs, tmp_path, "library")
    assert all(entry.description.startswith("library average_pooling, then loops") for entry in entries)
    files = {str(path.relative_to(tmp_path / "artifact")): path.read_bytes() for path in (tmp_path / "artifact").rglob("*") if path.is_file()}
    changes = (
        {"window": [3]}, {"window": [0, 3]}, {"padding": [2, 2]}, {"padding": [-1, 1]}, {"stride": [2, 3]}, {"dilation": [2, 2]},
        {"divisor": 0}, {"divisor": 1 << 35}, {"ceiling": False}, {"ceiling": 1}, {"name": "max_pooling"}, {"name": "matmul"}, {"groups": 1},
    )  # fmt: skip
    for number, change in enumerate(changes):
        manifest = manifest_of(files)
        library_of(manifest)["operator"].update(change)
        with pytest.raises(InvalidArtifact):
            tilewright.load(put(signed(files, manifest), tmp_path / str(number)))
