"""Library kernels as candidates: the operators found in regions, against float64; their choice by records alone; artifacts; bad contents of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilewright
from tests.compiled import without_chains
from tests.draws import draws
from tests.sample_artifacts import manifest_of, put, signed
from tests.stand_ins import library_record, merges_of
from tilewright.cli import main
from tilewright.compile import read
from tilewright.errors import InvalidArtifact, UnsupportedOption
from tilewright.graph.passes import simplify
from tilewright.hardware import host_cpu, machine
from tilewright.ir.library import LibraryCall, View
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Numerics, Options
from tilewright.partition import loops
from tilewright.partition.precision import BFLOAT16_ISA
from tilewright.report.explanation import explanation
from tilewright.runtime.executable import Executable
from tilewright.runtime.library import transform_extents
from tilewright.selection.choice import library_choices, rank
from tilewright.selection.ranking import Ranking
from tilewright.tuning import serialisation, trials
from tilewright.tuning.measurement import Measurement
from tilewright.tuning.problems import code_of, convolution_problem
from tilewright.tuning.records import Records
from tilewright.tuning.trials import Job, Outcome, Timing
from tilewright.tuning.tuning import distinct_problems, from_records, recorded_as, tune

NATIVE = machine("native")
VENDOR = Numerics(vendor=True)
THREADS = 2
NAMED = recorded_as(NATIVE, THREADS)


def problems_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Problem]:
    return distinct_problems(simplify(read(module, inputs).graph)[0], NATIVE, THREADS)


def trials_of(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path, operator: str) -> list[Measurement]:
    """What trials record of a library's operator, all of which succeed; several times if the first was in doubt."""
    with Records(folder / "trials") as records:
        assert tune(problems_of(module, inputs), NATIVE, 1, records, threads=THREADS, numerics=VENDOR).failed == 0
        found = [entry for entry in records.all() if operator in entry.description]
    assert found and all(entry.status == "measured" for entry in found)
    return found


def record(problem: Problem, operator: str, seconds: float = 1e-9, **changes: Any) -> Measurement:
    """A record of a library's operator on this machine."""
    return library_record(problem, operator, NATIVE, THREADS, seconds, **changes)


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], path: Path, operator: str = "", vendor: bool = True) -> Executable:
    """The module with every region by a library that has records for it: of one operator, or of whichever there is."""
    with without_chains():
        with Records(path) as records:
            for problem in problems_of(module, inputs):
                offered = [choice.schedule.operator for choice in library_choices(problem, Ranking(NATIVE), Options(THREADS, VENDOR))]
                records.add([record(problem, name) for name in offered if operator in ("", name)])
        return tilewright.compile(module, inputs, "native", vendor=vendor, records=path, threads=THREADS)


def libraries(executable: Executable) -> list[LibraryCall]:
    return [region.library for region in executable.image.program.regions if region.library is not None]


def check(executable: Executable, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Compares two calls, the second of which finds what the first left in memory, with the module in float64."""
    with torch.no_grad():
        expected = module.double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    module.float()
    for _ in range(2):
        # float32 cancels far out in the tail of GELU
        torch.testing.assert_close(executable(*inputs).double(), expected, rtol=1e-4, atol=1e-4 * max(float(expected.abs().max()), 0.01))
    assert executable.verify(*inputs).passed


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One or two convolutions with what may follow them, and an input."""
    whole = lambda least, most: draw(st.integers(least, most))  # noqa: E731
    rank = draw(st.sampled_from((1, 2, 2, 2, 3)))
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    groups, channels = draw(st.sampled_from(((1, whole(1, 20)), (1, 1), (2, 8), (3, 6), (16, 16))))
    kernel = tuple(whole(1, 3) for _ in range(rank))
    stride, dilation = (tuple(whole(1, 2) for _ in range(rank)) for _ in range(2))
    padding = tuple(whole(0, 2) for _ in range(rank))
    layers: list[nn.Module] = [kind(channels, groups * whole(1, 12), kernel, stride, padding, dilation, groups, bias=draw(st.booleans()))]
    layers += draw(st.sampled_from(([], [nn.ReLU()], [nn.Hardswish()], [nn.Softmax(1)])))
    if draw(st.booleans()):
        layers.append(kind(layers[0].out_channels, whole(1, 20), 1, bias=draw(st.booleans())))
    extents = tuple((size - 1) * step + 1 + whole(0, 9) for size, step in zip(kernel, dilation, strict=True))
    return nn.Sequential(*layers).eval(), (torch.randn(whole(1, 3), channels, *extents),)


@settings(max_examples=draws(15), deadline=None, phases=(Phase.generate,))
@given(convolutions())
def test_convolutions(tmp_path_factory: pytest.TempPathFactory, case: tuple[nn.Module, tuple[Tensor, ...]]) -> None:
    executable = compiled(*case, tmp_path_factory.mktemp("library") / "records", "convolution")
    check(executable, *case)


@st.composite
def products(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A matrix product with a batch or without, with a constant factor or without, and what may follow it."""
    m, n, r, batch, heads = (draw(st.integers(1, most)) for most in (20, 20, 20, 3, 3))
    after = draw(st.sampled_from((None, nn.GELU(), nn.Softmax(-1), nn.LayerNorm(n))))
    shapes = draw(st.sampled_from((((m, r), (r, n)), ((batch, m, r), (r, n)), ((batch, heads, m, r), (batch, heads, r, n)), ((batch, m, r),))))
    return Product(n, r, after, draw(st.booleans())).eval(), tuple(torch.randn(shape) for shape in shapes)


class Product(nn.Module):
    """The product of two inputs, whose heads may come from permuted dimensions, or of one and a weight."""

    def __init__(self, n: int, r: int, after: nn.Module | None, permuted: bool) -> None:
        super().__init__()
        self.weight, self.after, self.permuted = nn.Linear(r, n), after, permuted

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        result = self.weight(a) if b is None else a @ b
        result = result if self.after is None else self.after(result)
        return result.transpose(0, 1).contiguous() if self.permuted else result


@settings(max_examples=draws(15), deadline=None, phases=(Phase.generate,))
@given(products())
def test_products(tmp_path_factory: pytest.TempPathFactory, case: tuple[nn.Module, tuple[Tensor, ...]]) -> None:
    check(compiled(*case, tmp_path_factory.mktemp("library") / "records"), *case)


class Attention(nn.Module):
    """Products of heads that are slices of permuted projections, and concatenated branches."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.left, self.right = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(24, 16, 1), nn.Conv2d(24, 16, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.project(x))
        branches = torch.cat([self.left(y)[:, :, ::2, ::2], torch.relu(self.right(y))], 1)
        rows = branches.flatten(2).transpose(1, 2).unflatten(2, (4, 8)).transpose(1, 2)
        return rows @ rows.transpose(2, 3)


OPERATORS_OF: dict[str, tuple[nn.Module, tuple[int, ...], set[str]]] = {
    "3x3": (nn.Sequential(nn.Conv2d(5, 7, 3, padding=1), nn.ReLU()), (2, 5, 8, 9), {"convolution"}),
    "1x1": (nn.Conv2d(5, 7, 1), (1, 5, 8, 9), {"convolution", "matmul", "linear"}),
    "of one dimension": (nn.Conv1d(5, 7, 3), (1, 5, 9), {"convolution"}),
    "of three": (nn.Conv3d(5, 7, 3, padding=1), (1, 5, 4, 5, 6), {"convolution"}),
    "7x7 with stride 2, one channel": (nn.Conv2d(1, 8, 7, stride=2, padding=3), (1, 1, 20, 20), {"convolution"}),
    "1x7": (nn.Conv2d(5, 7, (1, 7), padding=(0, 3)), (2, 5, 8, 9), {"convolution"}),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), (1, 8, 6, 6), {"convolution"}),
    "large filters": (nn.Sequential(nn.Conv2d(3, 5, 9, padding=4), nn.ReLU()), (2, 3, 13, 17), {"convolution", "fft_convolution"}),
    "large filters of groups": (nn.Conv2d(6, 4, (7, 8), groups=2), (1, 6, 11, 20), {"convolution", "fft_convolution"}),
    "large depthwise": (nn.Conv2d(8, 8, 13, groups=8), (1, 8, 24, 25), {"convolution", "fft_convolution"}),
    "large filters with stride": (nn.Conv2d(3, 5, 9, stride=2), (1, 3, 16, 17), {"convolution"}),
    "large in three dimensions": (nn.Conv3d(2, 3, (3, 5, 5), padding=2), (1, 2, 6, 7, 8), {"convolution", "fft_convolution"}),
    "groups": (nn.Conv2d(8, 12, 3, padding=1, groups=2), (1, 8, 6, 6), {"convolution"}),
    "linear": (nn.Linear(9, 7), (5, 9), {"matmul", "linear"}),
    "greatest elements": (nn.MaxPool2d(3, 2, 1), (2, 5, 8, 9), {"max_pooling"}),
    "means": (nn.Sequential(nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.Sigmoid()), (2, 5, 8, 9), {"average_pooling"}),
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("name", OPERATORS_OF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operators_take_weights_of_16_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights are widened once where products are of float32; a depthwise convolution reads 16 bits, of which no operator makes transforms, and so
    does any other of bfloat16 where there are instructions for it."""
    module, shape, operators = OPERATORS_OF[name]
    module, x = copy.deepcopy(module).to(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(module).double()(x.double())
    if name == "means" and dtype == torch.float16:  # the operator would store sums, which the kernel behind it divides
        assert not any(rank(problem, NATIVE, THREADS, VENDOR).library for problem in problems_of(module, (x,)) if problem.region.kind != "map")
        return
    narrow = name == "large depthwise" or dtype == torch.bfloat16 and set(BFLOAT16_ISA) <= set(host_cpu().isa)
    for operator in operators - {"matmul", "fft_convolution" if narrow else ""}:
        executable = compiled(module, (x,), tmp_path / operator, operator)
        assert [call.operator.name for call in libraries(executable)] == [operator]
        found = executable(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
        assert executable.verify(x).passed


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("name", OPERATORS_OF)
def test_operators_are_found_by_axes(name: str, tmp_path: Path) -> None:
    module, shape, operators = OPERATORS_OF[name]
    inputs = (torch.randn(shape),)
    problems = [problem for problem in problems_of(module, inputs) if problem.region.kind != "map"]
    assert [{choice.schedule.operator for choice in rank(problem, NATIVE, THREADS, VENDOR).library} for problem in problems] == [operators]
    for operator in operators:
        executable = compiled(module, inputs, tmp_path / operator, operator)
        assert [call.operator.name for call in libraries(executable)] == [operator]
        check(executable, module, inputs)


def test_a_network_with_slices_and_two_threads(tmp_path: Path) -> None:
    module, inputs = Attention().eval(), (torch.randn(2, 4, 8, 8),)
    executable = compiled(module, inputs, tmp_path / "records")
    assert len(libraries(executable)) >= 2
    check(executable, module, inputs)
    other = executable.clone()
    executable.close()
    check(other, module, inputs)


def test_transforms_are_not_offered_without_winograd() -> None:
    problem = convolution_problem(4, 4, 20, 20, 9)
    for winograd, operators in ((True, {"convolution", "fft_convolution"}), (False, {"convolution"})):
        library = rank(problem, NATIVE, THREADS, Numerics(winograd=winograd, vendor=True)).library
        assert {choice.schedule.operator for choice in library} == operators


@given(st.integers(1, 3000))
def test_extents_of_transforms(extent: int) -> None:
    (found,) = transform_extents((extent,))
    assert found >= extent and all(candidate % prime for candidate in (found,) for prime in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53))


# Which are chosen

SIMPLE = convolution_problem(16, 8, 6, 5, 3)
NETWORK = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()).eval()
INPUTS = (torch.randn(1, 8, 6, 5),)


def test_only_a_recorded_time_chooses_a_library(tmp_path: Path) -> None:
    ranking = rank(SIMPLE, NATIVE, THREADS, VENDOR)
    own = rank(SIMPLE, NATIVE, THREADS)
    assert ranking.first().schedule == own.first().schedule and ranking.candidates == own.candidates and not own.library
    (choice,) = ranking.library
    quick, slow = record(SIMPLE, "convolution"), record(SIMPLE, "convolution", 1.0)
    favourite = replace(quick, schedule=serialisation.schedule_text(own.first().schedule), median=0.1, lower=0.1, upper=0.1)
    favourite = replace(favourite, code=code_of(lower(SIMPLE, own.first().schedule, NATIVE)))
    for name, entries, numerics, expected, note in (
        ("none", [], VENDOR, own.first(), "no recorded time"),
        ("slower", [slow, favourite], VENDOR, own.first(), f"measured 1 s on {NAMED}"),
        ("faster", [quick, favourite], VENDOR, choice, f"measured 1 ns on {NAMED}"),
        ("not allowed", [quick], Numerics(), own.first(), ""),
        ("wrong", [replace(quick, status="wrong", reason="far off", median=None, lower=None, upper=None, count=0)], VENDOR, own.first(), "far off"),
        (
            "of another PyTorch",
            [replace(quick, code=quick.code.replace(torch.__version__, "1.0"))],
            VENDOR,
            own.first(),
            f"no recorded time on {NAMED}",
        ),
        ("of another machine", [replace(quick, machine="another")], VENDOR, own.first(), "no recorded time"),
    ):
        with Records(tmp_path / name) as records:
            records.add(entries)
            chosen = from_records(records, numerics)(SIMPLE, NATIVE, THREADS)
        assert chosen.schedule == expected.schedule, name
        assert note in " ".join(chosen.notes) and bool(chosen.notes) == bool(note), name


def test_without_records_plans_say_that_libraries_were_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    executable = tilewright.compile(NETWORK, INPUTS, "native", vendor=True, threads=THREADS)
    assert not libraries(executable)
    assert f"library convolution: no recorded time on {NAMED}, so that it is not chosen" in explanation(executable.image)
    assert "library" not in explanation(tilewright.compile(NETWORK, INPUTS, "native", threads=THREADS).image)


def test_a_chain_displaces_no_faster_library(tmp_path: Path) -> None:
    """Where trials measured a library's kernel and not the chain, that time counts as its region's."""
    module, inputs = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1)).eval(), (torch.randn(1, 16, 56, 56),)
    for seconds, chained in ((1.0, True), (1e-9, False)):
        path = tmp_path / str(chained)
        with without_chains():
            problems = problems_of(module, inputs)
        with Records(path) as records:
            for problem in problems:
                if problem.region.kind != "map":
                    records.add([record(problem, choice.schedule.operator, seconds) for choice in rank(problem, NATIVE, THREADS, VENDOR).library])
        executable = tilewright.compile(module, inputs, "native", vendor=True, records=path, threads=THREADS)
        search = merges_of(executable.image.program)
        assert search and any(decision.taken for decision in search) == chained
        assert all("with a library's kernel as measured" in decision.text for decision in search if "cannot" not in decision.text)
        assert bool(libraries(executable)) == (not chained)
        check(executable, module, inputs)
    plain = tilewright.compile(module, inputs, "native", records=path, threads=THREADS)
    assert not any("library" in decision.text for decision in plain.image.program.search)


def test_trials_measure_both_ways(tmp_path: Path) -> None:
    problems = problems_of(NETWORK, INPUTS)
    with Records(tmp_path / "records") as records:
        outcome = tune(problems, NATIVE, 1, records, threads=THREADS, numerics=VENDOR)
        assert outcome.measured == 3 and outcome.failed == 0  # the padded copy, our convolution and the library's
        entry = next(entry for entry in records.all() if "library" in entry.description)
        assert entry.status == "measured" and entry.relative_error is not None and entry.relative_error < 1e-5
        assert entry.code.startswith(f"torch_{torch.__version__}_convolution+map_")
        assert entry.description.startswith("library convolution, then loops")
        again = tune(problems, NATIVE, 1, records, threads=THREADS, numerics=VENDOR)
        assert again.measured == 0 and again.known == 3
    executable = tilewright.compile(NETWORK, INPUTS, vendor=True, records=tmp_path / "records", threads=THREADS)
    (region,) = (region for region in executable.plan.rows if region.kind == "contraction")
    assert region.measured_seconds is not None and any("library convolution: measured" in reason for reason in region.reasons)


def test_a_library_replaces_ours_only_in_turns_with_it() -> None:
    """The fastest of ours is measured again beside a library that seems much faster."""
    ours, other = (Job(SIMPLE, choice.schedule) for choice in islice(rank(SIMPLE, NATIVE, THREADS), 2))
    (foreign,) = (Job(SIMPLE, choice.schedule) for choice in rank(SIMPLE, NATIVE, THREADS, VENDOR).library)

    def kept(*times: tuple[Job, float]) -> list[Job]:
        outcomes = [Outcome(job, "measured", timing=Timing.of([seconds])) for job, seconds in times]
        ranked: list[tuple[Outcome, dict[str, Any]]] = [(outcome, {}) for outcome in sorted(outcomes, key=lambda outcome: outcome.seconds)]
        return [outcome.job for outcome, _ in trials._finalists(ranked)]

    assert kept((ours, 3.0), (other, 4.0), (foreign, 1.0)) == [foreign, ours]
    assert kept((ours, 1.0), (foreign, 3.0)) == [] and kept((ours, 1.0), (foreign, 1.01)) == [ours, foreign]
    assert kept((ours, 1.05), (other, 2.0), (foreign, 1.0)) == [foreign, ours] and kept((foreign, 1.0)) == [] and kept() == []


def test_loops_use_no_library(tmp_path: Path) -> None:
    """Even if records choose one: products before and after the loop are computed by a library."""
    (choice,) = rank(SIMPLE, NATIVE, THREADS, VENDOR).library
    context = SimpleNamespace(choose=lambda *_: choice)
    assert loops._with_kernels(context)(SIMPLE, NATIVE, THREADS).schedule == rank(SIMPLE, NATIVE, THREADS).first().schedule  # type: ignore[arg-type]
    module, inputs = Recurrence(), (torch.randn(5, 3, 8),)
    executable = compiled(module, inputs, tmp_path / "records")
    (loop,) = (region for region in executable.plan.rows if region.kind == "loop")
    assert "library" not in loop.schedule and len(libraries(executable)) == 2
    torch.testing.assert_close(executable(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)


class Recurrence(nn.Module):
    """A recurrent layer whose results are multiplied by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.cell(x)[0])
        return result


def test_options(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="vendor is"):
        tilewright.compile(NETWORK, INPUTS, vendor="cudnn")  # type: ignore[call-overload]
    assert main(["compile", "zoo:lenet5", "--vendor", "-o", str(tmp_path / "artifact")]) == 0


# Artifacts


def test_artifacts_run_libraries(tmp_path: Path) -> None:
    executable = compiled(NETWORK, INPUTS, tmp_path / "records")
    executable.save(tmp_path / "artifact")
    loaded = tilewright.load(tmp_path / "artifact")
    assert libraries(loaded) == libraries(executable) and "through PyTorch" in explanation(loaded.image)
    check(loaded, NETWORK, INPUTS)


def library_of(manifest: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(region["library"] for region in manifest["program"]["regions"] if region["library"] is not None)
    return found


CHANGES: dict[str, Callable[[Any], object]] = {
    "another operator": lambda call: call["operator"].update(name="as_strided"),
    "an operator for other arguments": lambda call: call.update(operator={"name": "matmul"}),
    "a view from before the buffer": lambda call: call["inputs"][0].update(offset=-1),
    "a view beyond the buffer": lambda call: call["inputs"][0].update(offset=1 << 20),
    "a view of negative strides": lambda call: call["inputs"][1]["strides"].__setitem__(0, -1),
    "a view of strides beyond the buffer": lambda call: call["inputs"][0]["strides"].__setitem__(2, 1 << 30),
    "a view of one element": lambda call: call["inputs"][0]["strides"].__setitem__(2, 0),
    "a view whose elements overlap": lambda call: call["outs"][0]["strides"].__setitem__(2, 1),
    "a view of no elements": lambda call: call["inputs"][0]["sizes"].__setitem__(0, 0),
    "a view of another rank": lambda call: call["inputs"][0]["sizes"].append(1),
    "another result": lambda call: call["outs"][0]["sizes"].__setitem__(2, 1),
    "filters that are not constant": lambda call: call["inputs"][1].update(name=call["inputs"][0]["name"]),
    "a result in an input": lambda call: call["outs"][0].update(name="input"),
    "a result in what it reads": lambda call: call["outs"][0].update(name=call["inputs"][0]["name"]),
    "a result in a constant": lambda call: call["outs"][0].update(name=call["inputs"][1]["name"]),
    "an unknown buffer": lambda call: call["inputs"][0].update(name="nothing"),
    "no groups": lambda call: call["operator"].update(groups=0),
    "strides of another rank": lambda call: call["operator"].update(stride=[1]),
    "no stride": lambda call: call["operator"].update(stride=[0, 0]),
    "an unknown field": lambda call: call.update(code="print()"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("saved")
    compiled(NETWORK, INPUTS, folder / "records").save(folder / "artifact")
    yield {str(path.relative_to(folder / "artifact")): path.read_bytes() for path in (folder / "artifact").rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CHANGES)
def test_false_statements_about_libraries_are_refused(name: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    manifest = manifest_of(saved)
    CHANGES[name](library_of(manifest))
    with pytest.raises(InvalidArtifact):
        tilewright.load(put(signed(saved, manifest), tmp_path / "artifact"))


def test_views() -> None:
    assert View("a", (2, 3), (3, 1), 0).is_injective and View("a", (1, 3), (1, 1), 0).is_injective
    assert not View("a", (2, 3), (2, 1), 0).is_injective and View("a", (2, 3), (4, 1), 5).end == 12
