"""PyTorch's attention as a candidate: masks, shared heads and layouts that it takes, against float64; what it does not take; its place in artifacts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from tests.attention_cases import Function, attention_case
from tests.draws import draws
from tests.sample_artifacts import manifest_of, put, signed
from tests.test_library import NATIVE, THREADS, VENDOR, check, compiled, libraries, library_of, trials_of
from tilewright.errors import InvalidArtifact
from tilewright.hardware import host_cpu
from tilewright.ir.library import Attention, LibraryCall, View
from tilewright.ir.region import Unsuitable
from tilewright.kernels.library.attention import attention_operation
from tilewright.report.explanation import explanation
from tilewright.runtime.library import prepared
from tilewright.selection.choice import rank


class Heads(nn.Module):
    """Attention of inputs whose heads are a dimension, or slices of rows, under a mask; then what may follow."""

    def __init__(self, heads: int, shared: int, rows: bool, causal: bool, scale: float | None, after: nn.Module | None) -> None:
        super().__init__()
        self.heads, self.shared, self.rows, self.causal, self.scale, self.after = heads, shared, rows, causal, scale, after

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.rows:
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x, heads in ((q, self.heads), (k, self.shared), (v, self.shared)))
        y = scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, scale=self.scale, enable_gqa=self.heads != self.shared)
        y = y if self.after is None else self.after(y)
        return y.transpose(1, 2).flatten(2) if self.rows else y


@st.composite
def attentions(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    whole = lambda least, most: draw(st.integers(least, most))  # noqa: E731
    batch, shared, queries, keys, r, d = whole(1, 3), whole(1, 3), whole(2, 20), whole(2, 20), whole(2, 17), whole(2, 17)
    heads = shared * draw(st.sampled_from((1, 1, 2, 3)))
    rows, mask = draw(st.booleans()), draw(st.sampled_from(("none", "causal", "boolean", "added")))
    after = draw(st.sampled_from((None, nn.ReLU(), nn.Hardswish())))
    module = Heads(heads, shared, rows, mask == "causal", draw(st.sampled_from((None, 0.3))), after)
    shapes: list[tuple[int, ...]] = [(batch, queries, heads * r), (batch, keys, shared * r), (batch, keys, shared * d)]
    if not rows:
        shapes = [(batch, heads, queries, r), (batch, shared, keys, r), (batch, shared, keys, d)]
    inputs = [torch.randn(shape) for shape in shapes]
    if mask in ("boolean", "added"):
        extents = [draw(st.sampled_from((1, extent))) for extent in (batch, heads, queries)]
        seen = torch.rand(*extents, keys) > 0.4  # also rows without any key, whose result is 0
        inputs.append(seen if mask == "boolean" else torch.randn(*extents, keys).masked_fill(~seen, float("-inf")))
    return module.eval(), tuple(inputs)


@settings(max_examples=draws(30), deadline=None, phases=(Phase.generate,))
@given(attentions())
def test_attention(tmp_path_factory: pytest.TempPathFactory, case: tuple[nn.Module, tuple[Tensor, ...]]) -> None:
    executable = compiled(*case, tmp_path_factory.mktemp("library") / "records", "attention")
    calls = libraries(executable)
    if any(region.kind == "attention" for region in executable.plan.rows):  # sizes may be so small that the parts are faster
        assert [call.operator.name for call in calls] == ["attention"]
    check(executable, *case)


def inputs_of(heads: int = 2, shared: int = 2, queries: int = 24, keys: int = 20) -> tuple[Tensor, ...]:
    return torch.randn(2, heads, queries, 16), torch.randn(2, shared, keys, 16), torch.randn(2, shared, keys, 8)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(2, 3) / 4 + mask, -1) @ v


TAKEN: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Attention, list[tuple[int, ...]]]] = {
    "by products and a softmax": (
        lambda q, k, v: torch.softmax(q @ k.transpose(2, 3) / 4, -1) @ v, inputs_of(), Attention("attention", 0.25), [(2, 2, 24, 16), (2, 2, 20, 16), (2, 2, 20, 8)],
    ),
    "causal": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs_of(), Attention("attention", 0.25, 0),
        [(2, 2, 24, 16), (2, 2, 20, 16), (2, 2, 20, 8)],
    ),
    "shared heads": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True), inputs_of(6), Attention("attention", 0.25),
        [(2, 6, 24, 16), (2, 2, 20, 16), (2, 2, 20, 8)],
    ),
    "a mask of keys": (
        scaled_dot_product_attention, (*inputs_of(), torch.rand(2, 1, 1, 20) > 0.3), Attention("attention", 0.25),
        [(2, 2, 24, 16), (2, 2, 20, 16), (2, 2, 20, 8), (2, 1, 1, 20)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_operator_takes(name: str) -> None:
    function, inputs, operator, sizes = TAKEN[name]
    call = attention_operation(attention_case(function, inputs).problem).call
    assert [view.sizes for view in call.inputs] == sizes and call.outs[0].sizes == (*sizes[0][:3], 8)
    assert isinstance(call.operator, Attention) and replace(call.operator, scale=operator.scale) == operator
    assert call.operator.scale == pytest.approx(operator.scale)


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "rows that give NaN": (masked, (*inputs_of(), torch.randn(24, 20)), "gives NaN"),
    "a function of the scores": (lambda q, k, v: torch.softmax(torch.tanh(q @ k.transpose(2, 3)), -1) @ v, inputs_of(), "more than scaled scores"),
    "a negative scale": (lambda q, k, v: torch.softmax(q @ k.transpose(2, 3) * -0.5, -1) @ v, inputs_of(), "not positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_does_not_take(name: str) -> None:
    function, inputs, reason = REFUSED[name]
    problem = attention_case(function, inputs).problem
    with pytest.raises(Unsuitable, match=reason):
        attention_operation(problem)
    assert not rank(problem, NATIVE, THREADS, VENDOR).library


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12))
def test_shifted_causal_masks(queries: int, keys: int, shift: int) -> None:
    q, k, v, out = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4), torch.randn(1, 2, keys, 3), torch.full((1, 2, queries, 3), float("nan"))
    views = [View(name, tuple(x.shape), x.stride(), 0) for name, x in zip("qkvo", (q, k, v, out), strict=True)]
    call = LibraryCall(Attention("attention", 0.7, shift), tuple(views[:3]), (views[3],))
    call.check()
    prepared(call, torch.float32, torch.device("cpu"), ())(q, k, v, out)
    scores = 0.7 * q.double() @ k.double().transpose(2, 3)
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + shift
    torch.testing.assert_close(out.double(), torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Where products are of float32, keys and values are widened before, and no operator takes them with queries of 16 bits."""
    module, inputs = Function(scaled_dot_product_attention), tuple(x.to(dtype) for x in inputs_of())
    executable = compiled(module, inputs, tmp_path / "records")
    narrow = dtype == torch.bfloat16 and "amx_bf16" in host_cpu().isa
    assert [call.operator.name for call in libraries(executable)] == ["attention"] * narrow
    found = executable(*inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), module(*(x.double() for x in inputs)), rtol=2e-2, atol=2e-2)
    assert executable.verify(*inputs).passed


def saved(tmp_path: Path) -> tuple[nn.Module, tuple[Tensor, ...], Path]:
    module, inputs = Function(scaled_dot_product_attention), (*inputs_of(), torch.rand(2, 1, 24, 20) > 0.3)
    compiled(module, inputs, tmp_path / "records").save(tmp_path / "artifact")
    return module, inputs, tmp_path / "artifact"


@pytest.mark.slow
def test_trials_artifacts_and_explanations(tmp_path: Path) -> None:
    module, inputs, artifact = saved(tmp_path)
    loaded = tilewright.load(artifact)
    check(loaded, module, inputs)
    assert "attention of 2 x 2 x 24 x 16 and 2 x 2 x 20 x 16 and 2 x 2 x 20 x 8 and 2 x 1 x 24 x 20, through PyTorch" in explanation(loaded.image)
    entries = trials_of(module, inputs, tmp_path, "library attention")
    errors = [entry.relative_error for entry in entries if entry.relative_error is not None]  # that of the first time
    assert errors and max(errors) < 1e-4


CHANGES: dict[str, Callable[[Any], object]] = {
    "no heads of keys": lambda call: call["inputs"][1]["sizes"].__setitem__(1, 0),
    "another number of keys": lambda call: call["inputs"][2]["sizes"].__setitem__(2, 19),
    "another mask": lambda call: call["inputs"][3]["sizes"].__setitem__(3, 19),
    "a mask twice": lambda call: call["inputs"].append(call["inputs"][3]),
    "a mask and a shift": lambda call: call["operator"].update(shift=3),
    "a negative shift": lambda call: call["operator"].update(shift=-1),
    "a text as a scale": lambda call: call["operator"].update(scale="1"),
    "queries of booleans": lambda call: call["inputs"][0].update(name=call["inputs"][3]["name"]),
    "too few inputs": lambda call: call.update(inputs=call["inputs"][:2]),
    "the parameters of another operator": lambda call: call["operator"].update(groups=1),
}


def test_false_statements_about_attention_are_refused(tmp_path: Path) -> None:
    artifact = saved(tmp_path)[-1]
    files = {str(path.relative_to(artifact)): path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
    for number, change in enumerate(CHANGES.values()):
        manifest = manifest_of(files)
        change(library_of(manifest))
        with pytest.raises(InvalidArtifact):
            tilewright.load(put(signed(files, manifest), tmp_path / str(number)))
