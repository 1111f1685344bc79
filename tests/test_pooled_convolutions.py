"""Convolutions by warpgroups that pool their results: candidates over random layers in the interpreter, against PyTorch in float64; when results are
pooled where they are computed, and when not; a GPU runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.draws import draws
from tests.interpreted import run_program
from tests.test_gpu_half import check
from tests.test_gpu_warpgroup import FEW, ONE, TF32, as_interpreted, compiles, drawn_by, made_of, with_schedule
from tests.test_half_modules import EACH_TYPE, TYPES
from tests.test_prologues import graph_of
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.graph.windows import pooling_of
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Region, Unsuitable
from tilewright.kernels.columns import length, take
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup_patch.form import EIGHT
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule, lines_of, pixels_of
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import USUAL, Numerics, Options, form_of
from tilewright.partition.merges import Policy, Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.poolings import POOLING, choose_poolings, find_poolings
from tilewright.partition.predictions import Predictions
from tilewright.partition.regions import lay_out
from tilewright.selection.choice import choose, rank
from tilewright.stages import Stages

H200 = machine("h200")


class Pooling(Policy):
    """Pools whatever one kernel can pool."""

    def about(self, kind: str, results: tuple[str, ...]) -> bool | None:
        return kind == POOLING or None


def program(module: nn.Module, inputs: Sequence[Tensor], pick: Any, used: list[Any], target: Machine = H200, numerics: Numerics = USUAL) -> Program:
    """A program in which the pooled convolution has a schedule, or the one that `pick` picks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph, _ = simplify(import_module(module, tuple(inputs)).graph)
    choosing = with_schedule(pick, used, numerics, WARPGROUP_PATCH)

    def chooser(problem: Problem, machine: Machine, threads: int) -> Any:
        return (choosing if pooling_of(problem.region.steps) else lambda *_: rank(problem, machine, threads, numerics).first())(
            problem, machine, threads
        )

    made = plan_program(graph, target, 1, chooser, numerics=numerics, policy=Pooling())
    assert sum(pooling_of(lowered.region.steps) is not None for lowered in made.regions) == 1, [str(decision) for decision in made.search]
    return made


class Residual(nn.Module):
    """A convolution with bias, residual and activation, pooled, and a map of what that gives."""

    def __init__(self, channels: int, pool: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.pool = nn.Conv2d(16, channels, 1), nn.Conv2d(channels, channels, 3, padding=1), pool
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.scale * self.pool(nn.functional.hardswish(self.second(x) + x))


def layers(convolution: nn.Module, *after: nn.Module) -> nn.Module:
    """The layers behind a convolution whose result they read with channels innermost."""
    kind = type(convolution)
    return nn.Sequential(kind(16, convolution.in_channels, 1), convolution, *after)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "max": (lambda: layers(nn.Conv2d(32, 72, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), (2, 16, 10, 12)),
    "average": (lambda: layers(nn.Conv2d(80, 24, 3, padding=1), nn.AvgPool2d(2)), (1, 16, 8, 14)),
    "residual": (lambda: Residual(40, nn.MaxPool2d(2)), (2, 16, 6, 8)),
    "average of a residual": (lambda: Residual(40, nn.AvgPool2d(2)), (1, 16, 6, 20)),
    "adaptive": (lambda: layers(nn.Conv2d(32, 24, 5, padding=2), nn.AdaptiveAvgPool2d((4, 6))), (2, 16, 8, 12)),
    "no padding, dilation": (lambda: layers(nn.Conv2d(32, 24, (3, 2), dilation=2), nn.MaxPool2d(2), nn.ReLU()), (1, 16, 12, 12)),
    "lines of a window": (lambda: layers(nn.Conv2d(32, 24, 3, padding=1), nn.MaxPool2d((3, 1))), (2, 16, 9, 12)),
    "columns of a window": (lambda: layers(nn.Conv2d(32, 24, 3, padding=1), nn.AvgPool2d((1, 2))), (2, 16, 5, 10)),
    "high windows": (lambda: layers(nn.Conv2d(32, 24, 3, padding=1), nn.MaxPool2d((4, 2))), (1, 16, 16, 6)),
    "one tap": (lambda: layers(nn.Conv2d(136, 72, 1), nn.AvgPool2d(2)), (2, 16, 8, 10)),
    "one tap, one image": (lambda: layers(nn.Conv2d(40, 72, (1, 3), padding=(0, 1)), nn.ReLU(), nn.MaxPool2d(2)), (1, 16, 6, 16)),
    "1-D": (lambda: layers(nn.Conv1d(32, 24, 5, padding=2), nn.MaxPool1d(2)), (2, 16, 30)),
    "3-D": (lambda: layers(nn.Conv3d(32, 24, 3, padding=1), nn.MaxPool3d((1, 2, 2))), (1, 16, 3, 4, 6)),
}

SCHEDULES = (
    PatchSchedule(32, 1, 3, 1, 4, 6, swapped=1),
    PatchSchedule(64, 2, 2, 2, 4, 14, swapped=1),
    PatchSchedule(256, 1, 3, 2, 10, 12, swapped=1),
    PatchSchedule(160, 1, 3, 2, 10, 12, swapped=1, cluster=2),
    PatchSchedule(32, 1, 2, 1, 5, 5, split=2),
    PatchSchedule(64, 1, 2, 1, 10, 3, swapped=1, split=2),
    PatchSchedule(32, 1, 3, 1, 4, 8, swapped=1, lines=1),
    PatchSchedule(96, 2, 3, 2, 10, 8, swapped=1, lines=1),
    PatchSchedule(64, 1, 3, 2, 4, 8, swapped=1, cluster=2, lines=1),
)
"""Windows at the ends of lines, one warpgroup and two, all of an image at once, clusters, parts of a split, whose tiles are no whole windows, and eight
pixels of each line, with more lines than those of the tile."""


@pytest.mark.in_turns(6)
@EACH_TYPE
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS[layer], dtype)
    used: list[PatchSchedule] = []
    made = program(module, inputs, lambda count: count // 2, used)
    assert used and all(schedule.swapped or schedule.split > 1 for schedule in used)
    check(module, inputs, made)
    compiles(made)


@pytest.mark.in_turns(3)
@EACH_TYPE
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: PatchSchedule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = pooled_twice(dtype)
    made = program(module, inputs, schedule, [])
    check(module, inputs, made)
    compiles(made)


def pooled_twice(dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return layers(nn.Conv2d(72, 140, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).to(dtype), (torch.randn(3, 16, 10, 12).to(dtype),)


IN_TURNS = (
    PatchSchedule(64, 2, 4, 2, 4, 12, swapped=1, persistent=1),
    PatchSchedule(32, 1, 3, 1, 2, 12, swapped=1, cluster=2, persistent=1),
    PatchSchedule(64, 1, 3, 2, 8, 8, swapped=1, persistent=1, lines=1),
)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("schedule", IN_TURNS, ids=str)
def test_tiles_in_turns(schedule: PatchSchedule) -> None:
    torch.manual_seed(0)
    module, inputs = pooled_twice(torch.float16)
    made = program(module, inputs, schedule, [], FEW if schedule.cluster > 1 else ONE)
    check(module, inputs, made)
    compiles(made)


def test_tf32() -> None:
    """10 bits of mantissa, cut off: an error of 2^-10 per factor."""
    torch.manual_seed(0)
    make, shape = LAYERS["max"]
    module, x = make().eval(), torch.randn(shape)
    made = program(module, (x,), lambda count: count // 3, [], numerics=TF32)
    results, faults = run_program(made, {made.graph.inputs[0]: x.numpy()})
    assert not faults
    expected = module.double()(x.double()).detach().numpy()
    error = abs(results[made.graph.outputs[0]].reshape(expected.shape) - expected).max()
    assert 1e-7 < error < 4 * 2.0**-10 * abs(expected).max()


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)], ids=["max", "average"])
def test_nan_and_infinity_are_those_of_pytorch(pool: nn.Module) -> None:
    torch.manual_seed(0)
    module = layers(nn.Conv2d(32, 24, 3, padding=1), pool).half()
    x = torch.randn(1, 16, 8, 8).half()
    x[0, :, 1, 1], x[0, 0, 6, 6] = float("nan"), float("inf")
    made = program(module, (x,), lambda count: count // 2, [])
    results, faults = run_program(made, {made.graph.inputs[0]: x.numpy()})
    assert not faults
    found, expected = results[made.graph.outputs[0]].reshape(1, 24, 4, 4), module(x).detach().numpy()
    assert 0 < np.isnan(expected).sum() < expected.size and (np.isnan(found) == np.isnan(expected)).all()


def drawn(random: Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A convolution of random sizes with stride 1 and an epilogue, pooled in windows that divide its result."""

    def size(*choices: int) -> int:
        return random.choice(choices)

    channels, outputs, taps, dilation = size(8, 40, 160, 152), size(5, 8, 24, 80), size(1, 2, 3), size(1, 1, 2)
    window = size(1, 2, 2, 3, 4), size(1, 2, 2)
    if window == (1, 1):
        window = 2, 2
    paddings = size(0, 1), size(0, 1)
    last = nn.Conv2d(channels, outputs, (taps, size(1, taps)), padding=paddings, dilation=dilation)
    extents = [window[0] * size(2, 3, 5, 8), size(12, 20, 28)]
    whole = [extent - 2 * pad + dilation * (kernel - 1) for extent, pad, kernel in zip(extents, paddings, last.kernel_size, strict=True)]
    pool: nn.Module = random.choice((nn.MaxPool2d, nn.AvgPool2d))(window)
    after = random.choice(((), (nn.ReLU(),)))
    return layers(last, *random.choice(((), (nn.Hardswish(),))), pool, *after), (torch.randn(size(1, 2, 3), 16, *whole),)


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES))
def test_any_candidate_is_as_good_as_pytorch(seed: int, dtype: torch.dtype) -> None:
    random, module, inputs = drawn_by(drawn, seed, dtype)
    check(module, inputs, program(module, inputs, random.randrange, [], random.choice((H200, FEW, ONE))))


# --- which regions are pooled where they are computed, and which kernels do it ---------------------------------------------


def region_of(module: nn.Module, x: Tensor, results: Sequence[str] | None = None) -> list[tuple[Region, Region, Region]]:
    graph = graph_of(module, x)
    return list(find_poolings(lay_out(graph).regions, graph.outputs if results is None else results, frozenset(graph.constants)).values())


class ReadTwice(nn.Module):
    def __init__(self, result: bool) -> None:
        super().__init__()
        self.convolution, self.result = nn.Conv2d(16, 16, 3, padding=1), result

    def forward(self, x: Tensor) -> Any:
        y = self.convolution(x)
        pooled = nn.functional.max_pool2d(y, 2)
        return (pooled, y) if self.result else pooled + y.mean((2, 3), keepdim=True)


IMAGE = torch.randn(1, 16, 8, 8)


def test_poolings_behind_convolutions_are_found() -> None:
    ((host, pool, both),) = region_of(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.ReLU()), IMAGE)
    assert both.outputs == pool.outputs and both.kind == "contraction" and both.nodes == (*host.nodes, *pool.nodes)
    found = pooling_of(both.steps)
    assert found is not None and found.before == host.steps and found.sizes == (1, 1, 2, 2) and found.pool.combiner == "sum" and found.after


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(3, 2, 1)),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2, 1)),
        nn.Sequential(nn.Conv2d(16, 16, 3), nn.ZeroPad2d(1), nn.MaxPool2d(2, 2)),
        nn.Sequential(nn.Conv2d(16, 16, 3), nn.MaxPool2d(4)),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Softmax(1)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        ReadTwice(False),
        ReadTwice(True),
    ],
    ids=["overlap", "stride", "padding", "rest", "rows", "map", "two readers", "result"],
)
def test_other_reductions_stay_apart(module: nn.Module) -> None:
    assert not region_of(module, IMAGE)


@pytest.mark.parametrize(("together", "taken"), [(1.9, True), (2.1, False)])
def test_the_faster_way_is_taken_and_both_times_are_said(together: float, taken: bool) -> None:
    graph = graph_of(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2)), IMAGE)

    def predict(regions: Sequence[Region]) -> list[Timed]:
        return [Timed(region, 1.0 if pooling_of(region.steps) is None else together) for region in regions]

    chosen = choose_poolings(lay_out(graph).regions, graph.outputs, frozenset(graph.constants), predict)
    (decision,) = chosen.decisions.values()
    assert bool(chosen.values) == decision.taken == taken and decision.ways is not None and decision.ways.predicted == (together, 2.0)
    assert "1.9 s" in str(decision) or "2.1 s" in str(decision)


def test_what_no_kernel_pools_is_refused_with_the_reason() -> None:
    graph = graph_of(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2)), IMAGE)

    def predict(regions: Sequence[Region]) -> list[Timed]:
        if any(pooling_of(region.steps) for region in regions):
            raise Unsuitable("there is none")
        return [Timed(region, 1.0) for region in regions]

    chosen = choose_poolings(lay_out(graph).regions, graph.outputs, frozenset(graph.constants), predict)
    (decision,) = chosen.decisions.values()
    assert not chosen.values and not decision.taken and decision.ways is None and "there is none" in decision.text


@pytest.mark.parametrize("target", ["a100", "h200", "x86-avx512"])
def test_convolutions_in_float32_are_never_pooled(target: str) -> None:
    """No schema of theirs has windows in registers."""
    graph = graph_of(nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2)), torch.randn(64, 16, 32, 32))
    made = plan_program(graph, machine(target), 4, policy=Pooling())
    assert all(pooling_of(lowered.region.steps) is None for lowered in made.regions)


def pooled_problem(module: nn.Module, *inputs: Tensor) -> Problem:
    """The problem of the pooled convolution of a module."""
    found: list[Problem] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Any:
        found.extend([problem] if pooling_of(problem.region.steps) else [])
        return rank(problem, machine, threads, USUAL).first()

    graph = simplify(import_module(module, inputs).graph)[0]
    plan_program(graph, H200, 1, chooser, policy=Pooling())
    (problem,) = found
    return problem


def test_one_schema_pools() -> None:
    make, shape = LAYERS["max"]
    problem = pooled_problem(make().half(), torch.randn(shape).half())
    forms = {schema.name: form_of(schema, problem, H200) for schema in schemas(H200, "contraction")}
    assert {name for name, form in forms.items() if not isinstance(form, Unsuitable)} == {WARPGROUP_PATCH.name}
    assert "are pooled" in str(forms[WARPGROUP.name])


def test_windows_of_tiles() -> None:
    """Tiles are whole windows that cover the result, lines of patches whole multiples of eight pixels, and less is stored than without the pooling."""
    make = nn.Sequential(nn.Conv2d(16, 256, 1), nn.Conv2d(256, 96, 3, padding=1), nn.MaxPool2d((4, 2))).half()
    problem = pooled_problem(make, torch.randn(2, 16, 56, 60).half())
    form = form_of(WARPGROUP_PATCH, problem, H200)
    assert not isinstance(form, Unsuitable), form
    candidates, _ = WARPGROUP_PATCH.space(form.facts, H200, Options())
    parts = candidates["split"] > 1
    assert 20 < parts.sum() < length(candidates) - 20 and not WARPGROUP_PATCH.variants(form.facts, candidates, H200)[1].size  # type: ignore[misc]
    candidates = take(candidates, ~parts)
    height, width = candidates["height"], candidates["width"]
    assert (candidates["swapped"] == 1).all() and (candidates["staged"] == 0).all()
    assert (height % 4 == 0).all() and (width % 2 == 0).all() and (height > 0).all()
    lines, pixels = lines_of(candidates), pixels_of(candidates)
    extents, pitches = form.facts.patch(pixels, height, width, lines, True)
    assert set(lines) == {0, 1} and ((np.asarray(pitches[0]) % EIGHT == 0) | (lines > 0)).all() and (np.asarray(pitches[0]) >= width + 2).all()
    assert ((height - 1) * np.where(lines > 0, EIGHT, pitches[0]) + width <= pixels).all()
    last = np.where(lines > 0, (pixels // EIGHT - 1) * pitches[0] + EIGHT, pixels) - 1 + 2 * pitches[0] + 2
    assert (last < extents[0] * pitches[0]).all() and (width[lines > 0] == EIGHT).all()
    product = form.facts.base.product
    assert product.bytes_written == 2 * 96 * 14 * 30 * 2 and form.facts.base.pooled == 8
    counts = WARPGROUP_PATCH.counts(form.facts, candidates, H200)
    assert WARPGROUP_PATCH.bound is not None
    bound = WARPGROUP_PATCH.bound(form.facts, candidates, counts, H200, 1.0).seconds
    seconds = WARPGROUP_PATCH.estimate(form.facts, candidates, counts, H200, Options()).seconds
    assert (bound > 0).all() and (bound < seconds).all()
    stored = replace(form.facts, base=replace(form.facts.base, pooled=1, product=replace(product, bytes_written=8 * product.bytes_written)))
    assert (WARPGROUP_PATCH.estimate(stored, candidates, WARPGROUP_PATCH.counts(stored, candidates, H200), H200, Options()).seconds > seconds).all()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: layers(nn.Conv2d(32, 24, 3, padding=1), nn.MaxPool2d(4)), "no pairs of columns"),
        (lambda: layers(nn.Conv2d(32, 64, 3, padding=1, groups=2), nn.MaxPool2d(2)), "another order"),
        (lambda: layers(nn.Conv3d(32, 24, 3, padding=1), nn.MaxPool3d(2)), "no pairs of columns"),
    ],
    ids=["wide windows", "groups", "deep windows"],
)
def test_reasons(module: Callable[[], nn.Module], reason: str) -> None:
    made = module().half()
    dimensions = 3 if any(isinstance(part, nn.Conv3d) for part in made.modules()) else 2
    graph = simplify(import_module(made, (torch.randn(1, 16, *(8,) * dimensions).half(),)).graph)[0]
    planned = plan_program(graph, H200, 1, policy=Pooling())
    assert all(pooling_of(lowered.region.steps) is None for lowered in planned.regions)
    said = [str(decision) for decision in planned.search] + [text for lowered in planned.regions for text in lowered.region.reasons]
    assert any(reason in text for text in said), said


def test_ways_to_store_values_with_which_nothing_is_pooled_are_never_faster() -> None:
    """The convolution reads the model's row-major input."""
    graph = graph_of(nn.Sequential(nn.Conv2d(16, 32, 1), nn.MaxPool2d(2)).half(), IMAGE.half())
    predictions = Predictions(choose, H200, 1, USUAL, Stages())
    laid_out = predictions.laid_out(graph)
    ((_, _, both),) = find_poolings(laid_out.regions, graph.outputs, frozenset(graph.constants)).values()
    assert predictions._timed(graph, laid_out, [both])[0].predicted == float("inf")
    with pytest.raises(Unsuitable):
        predictions.in_partition(graph, frozenset(), [both])
    made = plan_program(graph, H200, 1, policy=Pooling())
    assert all(pooling_of(lowered.region.steps) is None for lowered in made.regions)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_values_of_float32_modules_in_16_bits(precision: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS["residual"]
    module, x = make().eval(), torch.randn(shape)
    graph = simplify(import_module(module, (x,)).graph)[0]
    made = plan_program(graph, H200, 1, precision=precision, policy=Pooling())
    assert sum(pooling_of(lowered.region.steps) is not None for lowered in made.regions) == 1, [str(decision) for decision in made.search]
    results, faults = run_program(made, {made.graph.inputs[0]: x.numpy()})
    assert not faults
    expected = module.double()(x.double()).detach().numpy()
    error = abs(results[made.graph.outputs[0]].reshape(expected.shape) - expected).max()
    assert error < (2.0**-5 if precision == "bf16" else 2.0**-8) * abs(expected).max()


def test_chains_leave_pooled_convolutions_alone() -> None:
    make, shape = LAYERS["max"]
    module = nn.Sequential(make(), nn.Conv2d(72, 16, 1), nn.ReLU()).half()
    graph = simplify(import_module(module, (torch.randn(shape).half(),)).graph)[0]
    made = plan_program(graph, H200, 1, policy=Pooling(), chains=True)
    assert sum(pooling_of(lowered.region.steps) is not None for lowered in made.regions) == 1
    assert all(pooling_of(stage.steps) is None for lowered in made.regions for stage in lowered.region.stages)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@EACH_TYPE
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_the_gpu(layer: str, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS[layer], dtype)
    for number in range(8):
        as_interpreted(program(module, inputs, lambda count, part=number / 8: int(count * part), []))


@pytest.mark.gpu
@EACH_TYPE
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_on_the_gpu(schedule: PatchSchedule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = pooled_twice(dtype)
    as_interpreted(program(module, inputs, schedule, []))


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", IN_TURNS, ids=str)
def test_tiles_in_turns_on_the_gpu(schedule: PatchSchedule) -> None:
    torch.manual_seed(0)
    module, inputs = pooled_twice(torch.float16)
    as_interpreted(program(module, inputs, schedule, [], FEW if schedule.cluster > 1 else ONE))
