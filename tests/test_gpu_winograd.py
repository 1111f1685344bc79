"""The schemas of Winograd's algorithm and Fourier transforms against PyTorch in float64, run by the interpreter; their space, cost, accuracy, and filters that are transformed when
packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.draws import draws
from tests.gpu_cases import Case, check, compiled, convolution_case, execute, interpret
from tilewright.codegen.cuda import shared_bytes
from tilewright.frontend.torch_import import import_module
from tilewright.hardware import machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Load
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.region import Lowered, Storage, Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.block_transforms import Transform, transforms_of
from tilewright.kernels.columns import length, row
from tilewright.kernels.fourier_transform import Fourier
from tilewright.kernels.gpu.winograd.lower import winograd_facts
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd.space import AXES, TRANSFORM_AXES, WinogradSchedule, winograd_space
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.gpu.winograd_fused.space import FUSED_AXES, FUSED_COLUMNS, FusedWinogradSchedule, fused_shared_bytes_of, fused_winograd_space
from tilewright.kernels.schema import Options
from tilewright.kernels.winograd_form import winograd_form
from tilewright.kernels.winograd_transform import LINES, SQUARES, Winograd, transforms
from tilewright.partition.plan import plan_program
from tilewright.runtime import artifact, encoding
from tilewright.runtime.buffers import SharedConstants
from tilewright.runtime.fields import Field
from tilewright.runtime.packing import prepared
from tilewright.runtime.verify import TOLERANCES
from tilewright.selection.choice import rank
from tilewright.selection.ranking import estimated

H200 = machine("h200")


def lower(case: Case, schedule: WinogradSchedule | FusedWinogradSchedule) -> Lowered:
    return registry.lower(case.problem, schedule, H200)


def problem_of(case: Case) -> Any:
    return winograd_facts(case.problem, winograd_form(case.problem))


def with_epilogue(case: Case, kind: str) -> Case:
    """The case of a plain convolution, followed by a bias or a scale."""
    step, final = case.region.steps
    held = Load(step.name, step.axes, "f32")
    sum_in_float64 = torch.nn.functional.conv2d(torch.from_numpy(case.inputs["x"]).double(), torch.from_numpy(case.inputs["w"]).double(), padding=1)
    if kind == "scale":
        body, expected = held * 2.0, 2 * sum_in_float64
    else:
        bias = torch.from_numpy(case.inputs["bias"]).double()
        body, expected = held + Load("bias", (step.axes[1] + step.axes[2],), "f32"), sum_in_float64 + bias[None, :, None, None]
    steps = (step, Step("out", final.shape, final.axes, (body,), index=final.index))
    return replace(case, region=replace(case.region, steps=steps), expected=expected.numpy())


FILTERS = (*((size, size) for size in (3, 3, 5, 7, 9, 11, 6)), (1, 3), (3, 1), (1, 5), (5, 1), (1, 7), (7, 1), (3, 5))
SMALL = dict(block_m=16, block_n=32, block_k=8, thread_m=2, thread_n=4)


def examine(case: Case, threads: int, lanes: int, seed: int) -> None:
    """Checks the case under a random schedule of its space with the given threads and vectors, and a random transform."""
    candidates, _ = winograd_space(problem_of(case), H200)
    generator = np.random.default_rng(seed)
    found = transforms_of((int(candidates["filter_y"][0]), int(candidates["filter_x"][0])))
    transform = found[generator.integers(len(found))]
    allowed = [candidates["output_tile"] == transform.output_tile, candidates["fourier"] == isinstance(transform, Fourier)]
    allowed += [candidates["transform_threads"] == threads, candidates["transform_vector"] == lanes]
    positions = np.flatnonzero(np.all(allowed, axis=0))
    if len(positions):
        position = int(generator.choice(positions))
        check(case, lower(case, WinogradSchedule(**row(candidates, position))))


DRAWN = dict(
    batch=st.sampled_from([1, 2, 3]),
    channels=st.sampled_from([2, 3, 6, 8, 16, 36]),
    outputs=st.sampled_from([2, 5, 6, 16, 40]),
    filter_shape=st.sampled_from(FILTERS),
    size=st.tuples(st.integers(3, 13), st.integers(3, 13)),
    padding=st.sampled_from([0, 1, 1, 2]),
    epilogue=st.booleans(),
    threads=st.sampled_from(TRANSFORM_AXES["transform_threads"]),
    lanes=st.sampled_from(TRANSFORM_AXES["transform_vector"]),
    seed=st.integers(0, 1000),
)


def random_case(
    batch: int, channels: int, outputs: int, filter_shape: Any, size: Any, padding: int, epilogue: Any, threads: int, lanes: int, seed: int
) -> Any:
    size = tuple(max(extent, taps + 2 - 2 * padding) for extent, taps in zip(size, filter_shape, strict=True))  # no outputs of one row
    sizes: dict[str, Any] = dict(channels=channels, outputs=outputs, filter_size=filter_shape, size=size, padding=padding)
    examine(convolution_case(batch=batch, **sizes, epilogue=epilogue, seed=seed), threads, lanes, seed)


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(**DRAWN)
def test_random_convolutions_and_schedules(**drawn: Any) -> None:
    random_case(**drawn)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, phases=(Phase.generate,))
@given(**DRAWN)
def test_more_random_convolutions_and_schedules(**drawn: Any) -> None:
    random_case(**drawn)


@pytest.mark.parametrize("output_tile", SQUARES[3])
@pytest.mark.parametrize("kind", ["bias", "scale"])
def test_other_epilogues(output_tile: int, kind: str) -> None:
    case = with_epilogue(convolution_case(batch=2, channels=8, outputs=12, size=(7, 10)), kind)
    check(case, lower(case, WinogradSchedule(output_tile, 64, 4, **SMALL)))


@pytest.mark.parametrize("split, cluster", [(2, 0), (4, 1)])
def test_a_split_sum_over_channels(split: int, cluster: int) -> None:
    case = convolution_case(channels=64, outputs=24, size=(9, 6))
    lowered = lower(case, WinogradSchedule(4, 64, 2, **SMALL, split=split, stages=2, cluster=cluster))
    assert len(lowered.kernels) == (3 if cluster else 4)
    check(case, lowered)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("member", [(4, 3, 3, 0), (4, 5, 5, 0), (8, 5, 5, 1), (2, 3, 5, 0), (4, 1, 7, 0)])
def test_the_output_may_have_a_halo(member: tuple[int, int, int, int]) -> None:
    output_tile, filter_y, filter_x, fourier = member
    case = convolution_case(channels=8, outputs=8, size=(6, 9), filter_size=(filter_y, filter_x), padding=(filter_y // 2, filter_x // 2))
    layouts = dict(case.layouts) | {"out": case.layouts["out"].with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))}
    case = replace(case, layouts=layouts)
    check(case, lower(case, WinogradSchedule(output_tile, 64, 1, **SMALL, filter_y=filter_y, filter_x=filter_x, fourier=fourier)))


@pytest.mark.parametrize(
    "changed, why",
    [
        (dict(stride=2), "stride 1"),
        (dict(filter_size=1, padding=0), "two dimensions"),
        (dict(filter_size=2), "2 x 2"),
        (dict(groups=2), "one group"),
        (dict(halo=False), "guarded"),
        (dict(constant=False), "constant filters"),
        (dict(last=False), "channels last"),
        (dict(channels=1), "two dimensions"),
    ],
    ids=str,
)
def test_what_is_no_case_for_winograd(changed: dict[str, Any], why: str) -> None:
    case = convolution_case(**{"channels": 8, "outputs": 8, "size": (9, 9), **changed})
    with pytest.raises(Unsuitable, match=why):
        lower(case, WinogradSchedule(2, 64, 4, **SMALL))
    ranking = rank(case.problem, H200)
    assert not {part.schema.schedule for part in ranking.parts} & {WinogradSchedule, FusedWinogradSchedule}


# --- accuracy ---------------------------------------------------------------------------------------------------------


def emulated(x: np.ndarray, w: np.ndarray, size: int) -> np.ndarray:
    """The schema in fp32 with NumPy, adding term by term like the kernels; size 1 is direct summation. x [C, H, W] is padded by one; w [K, C, 3,
    3]."""
    f = np.float32
    one = np.ones((1, 1))
    b, a = (np.array(m, f) for m in (transforms(size, 3).inputs, transforms(size, 3).outputs)) if size > 1 else (one, one)
    (channels, height, width), k, span = x.shape, w.shape[0], len(b)
    if size == 1:
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
        tap = lambda i, j, c: w[:, c, i, j][:, None, None] * padded[c, i : i + height, j : j + width]  # noqa: E731
        return sum((tap(i, j, c) for i in range(3) for j in range(3) for c in range(channels)), np.zeros((k, height, width), f))
    rows, columns = -(-height // size), -(-width // size)
    padded = np.pad(x, ((0, 0), (1, rows * size + 1 - height), (1, columns * size + 1 - width)))
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (span, span), (1, 2))[:, ::size, ::size]
    half = sum(b[:, i, None] * tiles[..., i, None, :] for i in range(span))
    v = sum(half[..., j, None] * b[:, j] for j in range(span))
    u = prepared(torch.from_numpy(w), filters_storage(w, Winograd(size, (3, 3)))).numpy().reshape(span, span, channels, k)
    m = np.zeros((rows, columns, span, span, k), f)
    for c in range(channels):
        m += v[c][..., None] * u[:, :, c]
    half = sum(a[:, i, None, None] * m[:, :, i, None] for i in range(span))
    y = sum(half[:, :, :, j, None] * a[:, j, None] for j in range(span))  # type: ignore[index]
    assert y.dtype == f  # type: ignore[attr-defined]
    return y.transpose(4, 0, 2, 1, 3).reshape(k, rows * size, columns * size)[:, :height, :width]  # type: ignore[attr-defined]


def filters_storage(w: np.ndarray, transform: Transform) -> Storage:
    k, c, taps = *w.shape[:2], w.shape[2] * w.shape[3]
    value = Value("u", (transform.points, c, k), "f32")
    return Storage(value, row_major(value.shape), "w", ((taps, c, k), (1, taps, taps * c), 0), transform.filter_matrix)


@pytest.mark.parametrize("channels", [8, 64, pytest.param(256, marks=pytest.mark.slow), pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("positive", [False, True])
def test_accuracy_is_what_the_documentation_says(channels: int, positive: bool) -> None:
    """Errors are relative to the largest output; the limits grow with the square root of the channels, like errors of sums."""
    worst = {1: 0.0, 2: 0.0, 4: 0.0}
    for seed in range(4):
        generator = np.random.default_rng([channels, seed])
        x = generator.standard_normal((channels, 11, 14)).astype(np.float32)
        x = np.maximum(x, 0) if positive else x
        w = (generator.standard_normal((8, channels, 3, 3)) / (3 * channels**0.5)).astype(np.float32)
        expected = torch.nn.functional.conv2d(torch.from_numpy(x).double()[None], torch.from_numpy(w).double(), padding=1)[0].numpy()
        for size in worst:
            worst[size] = max(worst[size], float(np.abs(emulated(x, w, size) - expected).max() / np.abs(expected).max()))
    growth = (channels / 1024) ** 0.5
    assert worst[1] < 4e-7 + 4e-6 * growth and worst[2] < 4e-7 + 2e-6 * growth and worst[4] < 1e-6 + 8e-6 * growth, worst
    assert worst[4] < TOLERANCES["f32"] / 10


def test_the_transforms_are_exact_in_one_dimension() -> None:
    generator = np.random.default_rng(0)
    for size, taps in ((size, taps) for taps, sizes in LINES.items() for size in sizes):
        matrices = transforms(size, taps)
        d, g = generator.standard_normal(size + taps - 1), generator.standard_normal(taps)
        a, b, c = (np.array(m) for m in (matrices.outputs, matrices.inputs, matrices.filters))
        np.testing.assert_allclose(a @ ((c @ g) * (b @ d)), np.correlate(d, g), atol=1e-13)


# --- space, cost and ranking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200", "a100", "v100"])
@pytest.mark.parametrize("extents", [(64, 64, 56), (512, 512, 7), (256, 128, 68)])
def test_the_space_is_bounded_and_its_cost_positive(name: str, extents: tuple[int, int, int]) -> None:
    outputs, channels, size = extents
    problem = problem_of(convolution_case(channels=channels, outputs=outputs, size=(size, size), epilogue=False))
    target = machine(name)
    candidates, rejected = winograd_space(problem, target)
    assert tuple(candidates) == AXES and 100 < length(candidates) <= 20_000
    assert len({tuple(column[i] for column in candidates.values()) for i in range(length(candidates))}) == length(candidates)
    assert all(count > 0 for count in rejected.values())
    assert set(candidates["output_tile"]) == set(SQUARES[3])
    estimate = estimated(WINOGRAD, problem, candidates, target, Options()).estimate
    seconds = estimate.seconds
    assert np.all(np.isfinite(seconds)) and np.all(seconds > 3 * target.launch_seconds)
    assert all(np.all(term >= 0) for term in estimate.terms.values())
    assert {"launch", "compute", "memory", "input transform", "output transform"} <= set(estimate.terms)


def test_workspaces_fit_into_memory() -> None:
    problem = problem_of(convolution_case(channels=8, outputs=8, epilogue=False))  # 9 x 9: 25 tiles of 16 points, 9 tiles of 36
    candidates, rejected = winograd_space(problem, replace(H200, memory_bytes=8 * (16 * 25 * 16 * 4 - 4)))
    assert set(candidates["output_tile"]) == {4} and rejected["the workspaces exceed an eighth of the memory"] > 0


def test_a_large_layer_takes_three_kernels_and_a_small_one_takes_one() -> None:
    def chosen(size: int, channels: int) -> type:
        case = convolution_case(channels=channels, outputs=channels, size=(size, size), epilogue=False)
        return type(rank(case.problem, H200).first().schedule)

    assert chosen(68, 192) is WinogradSchedule
    assert chosen(28, 128) is FusedWinogradSchedule


def test_a_schedule_has_a_stable_text() -> None:
    schedule = WinogradSchedule(4, 64, 2, 64, 64, 16, 8, 4, 2, 4, 1)
    assert str(schedule) == (
        "winograd F(4x4,3x3) transforms threads=64 transform_vector=2, contraction block=64x64x16 thread=8x4 split=2 stages=4 cluster"
    )


# --- constants, programs, artifacts -----------------------------------------------------------------------------------


def test_a_constant_is_mapped_in_float64_and_rounded_once() -> None:
    w = np.random.default_rng(1).standard_normal((5, 6, 3, 3)).astype(np.float32)
    found = prepared(torch.from_numpy(w), filters_storage(w, Winograd(4, (3, 3)))).numpy()
    g = np.array(transforms(4, 3).filters)
    expected = np.einsum("ai,bj,kcij->abck", g, g, w.astype(np.float64)).reshape(36, 6, 5)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    with pytest.raises(ValueError, match="mapped"):
        prepared(torch.from_numpy(w), replace(filters_storage(w, Winograd(4, (3, 3))), matrix=Winograd(2, (3, 3)).filter_matrix))


@pytest.mark.parametrize("matrix", [[[1.0] * 1025], [[1.0]] * 1025, [[1.0, 2.0], [1.0]], [], [[]], [[float("nan")]], [["a"]], "ab", 7])
def test_a_manifest_with_another_matrix_is_refused(matrix: object) -> None:
    data = encoding._encode_storage(filters_storage(np.zeros((4, 4, 3, 3)), Winograd(2, (3, 3))))
    assert encoding._decode_storage(Field(data, "storage")) == filters_storage(np.zeros((4, 4, 3, 3)), Winograd(2, (3, 3)))
    with pytest.raises(ValueError, match="matrix"):
        encoding._decode_storage(Field({**data, "matrix": matrix}, "storage"))
    assert encoding._decode_storage(Field({**data, "matrix": None}, "storage")).matrix is None


class Residual(nn.Module):
    """Convolutions for which Winograd is chosen: in three kernels for the first two, in one for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(96, 96, 3, padding=1), nn.Conv2d(96, 96, 3, padding=1)
        self.last = nn.Conv2d(96, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x))) + x))


def test_a_program_is_planned_with_it_and_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(1, 96, 41, 42)
    graph = import_module(model, (x,)).graph
    program = plan_program(graph, H200, 1)
    chosen = [lowered.schedule.split("(")[0] for lowered in program.regions]
    winograd = [schedule for schedule in chosen if schedule.startswith("winograd")]
    assert len(winograd) == 3 and set(winograd) == {"winograd F", "winograd fused F"}
    (found,) = interpret(program, graph, (x,))
    expected = model.double()(x.double()).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_an_artifact_keeps_the_matrix(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    model, x = Residual().eval(), torch.randn(1, 96, 41, 42)
    exe = tilewright.compile(model, x, target="h200")
    exe.save(tmp_path / "m.tw.zip")
    program = artifact.read(tmp_path / "m.tw.zip").program
    mapped = {name: storage for name, storage in program.storage.items() if storage.matrix is not None}
    assert len(mapped) == 3
    packed = SharedConstants().packed(program, tuple(mapped), torch.device("cpu"))
    for name, storage in mapped.items():
        assert storage.source is not None and storage.matrix is not None
        weight = program.graph.constants[storage.source]
        size = round(len(storage.matrix) ** 0.5) - 2
        expected = prepared(weight, replace(filters_storage(weight.numpy(), Winograd(size, (3, 3))), source=storage.source))
        assert torch.equal(packed[name], expected.reshape(-1))


COMPILED = (
    *((2, 3, 3, 0, 4), (4, 3, 3, 0, 4), (2, 5, 5, 0, 4), (4, 5, 5, 0, 2), (8, 5, 5, 1, 1), (12, 5, 5, 1, 1), (14, 11, 11, 1, 1)),
    *((6, 1, 3, 0, 4), (4, 1, 7, 0, 4), (4, 3, 5, 0, 2)),
)
"""Transforms as fields of schedules, and the width of vectors."""


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("member", COMPILED)
def test_its_kernels_compile_without_spills(member: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    output_tile, filter_y, filter_x, fourier, vector = member
    case = convolution_case(channels=64, outputs=64, size=(30, 29), filter_size=(filter_y, filter_x), padding=(filter_y // 2, filter_x // 2))
    schedule = WinogradSchedule(output_tile, 256, vector, 64, 64, 16, 4, 4, 1, 4, 0, filter_y, filter_x, fourier)
    lowered = lower(case, schedule)
    for found in compiled(lowered, tmp_path).values():
        assert found.spill_bytes == 0 and found.stack_bytes == 0


def test_nothing_is_read_from_a_workspace_before_it_is_written() -> None:
    """The workspaces are initially NaN, which would appear in every sum."""
    case = convolution_case(channels=6, outputs=6, size=(5, 7))
    assert np.isfinite(execute(case, lower(case, WinogradSchedule(2, 64, 2, **SMALL)))).all()


def test_padded_filters_are_packed() -> None:
    case = convolution_case(channels=4, outputs=6, size=(6, 6))
    storage = lower(case, WinogradSchedule(2, 64, 2, **SMALL)).storage
    (filters,) = (item for item in storage.values() if item.matrix is not None)
    assert filters.layout == Layout((16, 4, 6), ((0, 0), (1, 0), (2, 0), (2, 4)))


# --- one kernel instead of three --------------------------------------------------------------------------------------


FUSED_DRAWN = dict(
    batch=st.sampled_from([1, 2, 3]),
    channels=st.sampled_from([4, 8, 16, 48, 64]),
    outputs=st.sampled_from([9, 16, 18, 33, 40]),
    filter_shape=st.sampled_from([(3, 3), (3, 3), (5, 5), (1, 3), (7, 1), (1, 7), (5, 3)]),
    size=st.tuples(st.integers(5, 13), st.integers(5, 13)),
    padding=st.sampled_from([0, 1, 1, 2]),
    epilogue=st.booleans(),
    seed=st.integers(0, 1000),
)


def random_fused_case(batch: int, channels: int, outputs: int, filter_shape: Any, size: Any, padding: int, epilogue: Any, seed: int) -> Any:
    size = tuple(max(extent, taps + 2 - 2 * padding) for extent, taps in zip(size, filter_shape, strict=True))
    sizes: dict[str, Any] = dict(channels=channels, outputs=outputs, filter_size=filter_shape, size=size, padding=padding)
    case = convolution_case(batch=batch, **sizes, epilogue=epilogue, seed=seed)
    candidates, _ = fused_winograd_space(problem_of(case), H200)
    generator = np.random.default_rng(seed)
    for output_tile in sorted(set(candidates["output_tile"])):  # there are fewer candidates of F(4x4)
        allowed = np.flatnonzero(candidates["output_tile"] == output_tile)
        if len(allowed):
            check(case, lower(case, FusedWinogradSchedule(**row(candidates, int(generator.choice(allowed))))))


@settings(max_examples=draws(6), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(**FUSED_DRAWN)
def test_random_convolutions_in_one_kernel(**drawn: Any) -> None:
    random_fused_case(**drawn)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, phases=(Phase.generate,))
@given(**FUSED_DRAWN)
def test_more_random_convolutions_in_one_kernel(**drawn: Any) -> None:
    random_fused_case(**drawn)


def test_a_cluster_adds_up_what_its_blocks_sum() -> None:
    case = convolution_case(channels=64, outputs=16, size=(6, 7))
    lowered = lower(case, FusedWinogradSchedule(2, 8, 16, 8, 4, 4, 4))
    assert [kernel.cluster for kernel in lowered.kernels] == [4]
    check(case, lowered)


def test_channels_that_do_not_divide_are_refused() -> None:
    with pytest.raises(Unsuitable, match="do not divide"):
        lower(convolution_case(channels=12), FusedWinogradSchedule(2, 8, 16, 8, 4, 4))


@pytest.mark.parametrize("name, some", [("h200", True), ("a100", True), ("v100", False)])
def test_the_space_of_one_kernel(name: str, some: bool) -> None:
    target = machine(name)
    problem = problem_of(convolution_case(channels=64, outputs=64, size=(28, 28), epilogue=False))
    candidates, rejected = fused_winograd_space(problem, target)
    assert tuple(candidates) == FUSED_COLUMNS and (length(candidates) > 50) == some
    assert length(candidates) + sum(rejected.values()) == len(SQUARES[3]) * np.prod([len(values) for values in FUSED_AXES.values()])
    if not some:
        assert set(rejected) == {"no asynchronous copies"}
        return
    assert target.compute_capability >= (9, 0) or set(candidates["split"]) == {1}
    estimate = estimated(WINOGRAD_FUSED, problem, candidates, target, Options()).estimate
    assert np.all(np.isfinite(estimate.seconds)) and np.all(estimate.seconds > target.launch_seconds)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "output_tile, block, filter_shape",
    [
        *((2, (16, 32, 16, 4, 8, 1), (3, 3)), (2, (32, 32, 16, 4, 8, 4), (3, 3)), (4, (16, 16, 16, 4, 4, 2), (3, 3))),
        *((4, (32, 64, 8, 8, 8, 2), (1, 7)), (6, (32, 64, 8, 8, 8, 1), (3, 1))),
    ],
)
def test_one_kernel_compiles_without_spills(output_tile: int, block: tuple[int, ...], filter_shape: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    case = convolution_case(channels=64, outputs=64, size=(28, 28), filter_size=filter_shape)
    schedule = FusedWinogradSchedule(output_tile, *block, *sorted(filter_shape))
    lowered = lower(case, schedule)
    (found,) = compiled(lowered, tmp_path).values()
    assert found.spill_bytes == 0 and found.stack_bytes == 0
    assert found.registers * schedule.threads <= H200.registers_per_processor
    shared = int(fused_shared_bytes_of(problem_of(case), {name: np.array([getattr(schedule, name)]) for name in FUSED_COLUMNS})[0])
    assert shared_bytes(lowered.kernels[0]) == shared
