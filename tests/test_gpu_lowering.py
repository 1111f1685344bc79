"""GPU lowerings against PyTorch in float64, run by the interpreter: random shapes, layouts and schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.gpu_cases import Case, check, compiled, convolution_case, double, exp, make_case, matmul_case, random, tensor
from tilewright.codegen.cuda import print_cuda
from tilewright.errors import CompilerMissing
from tilewright.hardware import machine
from tilewright.ir.computation import StepBuilder
from tilewright.ir.expr import Expr, logical_and, select
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.columns import length, row
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.space import ContractionSchedule, contraction_space
from tilewright.kernels.gpu.gemv.space import GemvSchedule, gemv_space
from tilewright.kernels.gpu.map.space import MapSchedule
from tilewright.kernels.gpu.row_reduction.space import RowReductionSchedule
from tilewright.kernels.gpu.scan.space import ScanSchedule
from tilewright.kernels.gpu.window.lower import window_form
from tilewright.kernels.gpu.window.space import TiledLoad, WindowSchedule
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler
from tilewright.tuning.problems import convolution_problem

H200 = machine("h200")


def lower(case: Case, schedule: object) -> Lowered:
    return registry.lower(case.problem, schedule, H200)


def softmax_case(*shape: int, axis: int = -1) -> Case:
    x = random(1, *shape)
    tx = tensor("x", x)
    axis %= len(shape)
    rows = tuple(extent for i, extent in enumerate(shape) if i != axis)

    def at(index: Any, r: Any) -> Any:
        return (*index[:axis], r, *index[axis:])

    def without(index: Any) -> Any:
        return (*index[:axis], *index[axis + 1 :])

    b = StepBuilder("softmax")
    (most,) = b.reduce("max", rows, (shape[axis],), lambda *i: tx(*at(i[:-1], i[-1])))
    (total,) = b.reduce("sum", rows, (shape[axis],), lambda *i: exp(tx(*at(i[:-1], i[-1])) - most(*i[:-1])))
    out = b.map(shape, lambda *i: exp(tx(*i) - most(*without(i))) / total(*without(i)))
    return make_case("row reduction", b, out, {"x": x}, torch.softmax(double(x), axis).numpy())


def group_norm_case(batch: int, groups: int, inner: int, size: int, last: bool) -> Case:
    channels = groups * inner
    x, scale = random(2, batch, channels, size, size), random(3, channels)
    tx, ts = tensor("x", x), tensor("scale", scale)
    b = StepBuilder("norm")
    count = inner * size * size
    (mean,) = b.reduce("sum", (batch, groups), (inner, size, size), lambda n, g, c, y, z: tx(n, g * inner + c, y, z) * (1 / count))

    def centred(n: Expr, g: Expr, c: Expr, y: Expr, z: Expr) -> Any:
        return tx(n, g * inner + c, y, z) - mean(n, g)

    (square,) = b.reduce(
        "sum",
        (batch, groups),
        (inner, size, size),
        lambda *i: centred(*i) * centred(*i) * (1 / count),
    )
    from tilewright.ir.expr import unary

    out = b.map(
        x.shape,
        lambda n, c, y, z: (tx(n, c, y, z) - mean(n, c // inner)) * unary("rsqrt", square(n, c // inner) + 1e-5) * ts(c),
    )
    expected = F.group_norm(double(x), groups, double(scale))
    layout = channels_last(x.shape) if last else row_major(x.shape)
    return make_case("row reduction", b, out, {"x": x, "scale": scale}, expected.numpy(), {"x": layout, "out": layout})


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 3, 8, 12])),
    threads=st.sampled_from([64, 128]),
    items=st.sampled_from([1, 2, 4]),
    last=st.booleans(),
)
def test_map_with_broadcast(shape: tuple[int, int, int], threads: int, items: int, last: bool) -> None:
    x, y, z = random(1, *shape), random(2, shape[2]), random(3, shape[0], 1, 1)
    tx, ty, tz = tensor("x", x), tensor("y", y), tensor("z", z)
    b = StepBuilder("map")
    out = b.map(shape, lambda i, j, k: exp(tx(i, j, k)) + ty(k) * tz(i, 0, 0))
    layouts = {"out": channels_last(shape)} if last else None
    expected = torch.exp(double(x)) + double(y) * double(z)
    case = make_case("map", b, out, {"x": x, "y": y, "z": z}, expected.numpy(), layouts)
    for lanes in (1, 2, 4):
        from tilewright.kernels.gpu.map.lower import map_form

        if lanes <= map_form(case.problem).facts.vector_width:
            check(case, lower(case, MapSchedule(threads, items, lanes)))


def test_map_is_vectorised_where_it_can_be() -> None:
    x = random(1, 6, 8)
    b = StepBuilder("map")
    out = b.map((6, 8), lambda i, j: tensor("x", x)(i, j) * 2.0)
    from tilewright.kernels.gpu.map.lower import map_form

    case = make_case("map", b, out, {"x": x}, x.astype(np.float64) * 2)
    assert map_form(case.problem).facts.vector_width == 4


def test_map_of_a_reshape_and_transposition() -> None:
    x = random(1, 6, 4, 5)
    tx = tensor("x", x)
    b = StepBuilder("map")
    out = b.map((5, 24), lambda i, j: tx(j // 4, j % 4, i))
    expected = x.transpose(2, 0, 1).reshape(5, 24).astype(np.float64)
    case = make_case("map", b, out, {"x": x}, expected)
    check(case, lower(case, MapSchedule(64, 1, 1)))


@settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    channels=st.sampled_from([3, 8, 12]),
    size=st.integers(4, 9),
    stride=st.integers(1, 2),
    last=st.booleans(),
    threads=st.sampled_from([32, 64]),
    items=st.sampled_from([1, 2, 4]),
    rows=st.sampled_from([1, 2, 3]),
)
def test_depthwise_convolution(channels: int, size: int, stride: int, last: bool, threads: int, items: int, rows: int) -> None:
    x, w = random(1, 2, channels, size, size), random(2, channels, 1, 3, 3)
    tx, tw = tensor("x", x), tensor("w", w)
    extent = (size + 2 - 3) // stride + 1

    def body(n: Expr, c: Expr, oy: Expr, ox: Expr, fy: Expr, fx: Expr) -> Any:
        y, z = oy * stride + fy - 1, ox * stride + fx - 1
        return select(logical_and(y >= 0, y < size, z >= 0, z < size), tx(n, c, y, z), 0.0) * tw(c, 0, fy, fx)

    b = StepBuilder("depthwise")
    (total,) = b.reduce("sum", (2, channels, extent, extent), (3, 3), body)
    expected = F.conv2d(double(x), double(w), None, stride, 1, 1, channels).numpy()
    place = channels_last if last else row_major
    layouts = {"x": place(x.shape), "out": place(total.shape)}
    case = make_case("window", b, total, {"x": x, "w": w}, expected, layouts, frozenset({"w"}))
    widest = window_form(case.problem).facts.vector_width
    if last and channels % 4 == 0:
        assert widest == 4
    for lanes in {1, widest}:
        check(case, lower(case, WindowSchedule(threads, items, lanes, rows)))


@pytest.mark.parametrize("size, stride, rows, items", [(3, 1, 2, 4), (3, 2, 4, 2), (5, 1, 2, 2), (3, 1, 3, 3)])
def test_windows_of_a_tile_share_their_loads(size: int, stride: int, rows: int, items: int) -> None:
    """The PTX has as many loads as predicted; tiles that do not divide the extent share fewer loads, with guards."""
    given = convolution_problem(16, 16, 12, 12, size, stride, groups=16)
    assert given.region.kind == "window"
    problem = window_form(given).facts
    assert problem.loads[0] == TiledLoad(1, (stride, size), (stride, size)) and problem.loads[1] == TiledLoad(size * size, (0, 1), (0, 1))
    made = registry.lower(given, WindowSchedule(64, items, 4, rows), H200)
    try:
        compiler = NvrtcCompiler.find(H200)
    except CompilerMissing as error:
        pytest.skip(str(error))
    outcome, ptx, _ = compiler.translated(SourceFile("window", print_cuda(list(made.kernels)), "cuda", (made.kernels[0].name,)))
    assert outcome.succeeded
    assert ptx.count("ld.global") == sum(load.count(np.array(rows), np.array(items)) for load in problem.loads)


@pytest.mark.parametrize("last", [False, True])
def test_max_pooling_with_padding(last: bool) -> None:
    x = random(1, 2, 8, 7, 7)
    tx = tensor("x", x)

    def body(n: Expr, c: Expr, oy: Expr, ox: Expr, fy: Expr, fx: Expr) -> Any:
        y, z = oy * 2 + fy - 1, ox * 2 + fx - 1
        return select(logical_and(y >= 0, y < 7, z >= 0, z < 7), tx(n, c, y, z), float("-inf"))

    b = StepBuilder("pool")
    (most,) = b.reduce("max", (2, 8, 4, 4), (3, 3), body)
    expected = F.max_pool2d(double(x), 3, 2, 1).numpy()
    place = channels_last if last else row_major
    case = make_case("window", b, most, {"x": x}, expected, {"x": place(x.shape), "out": place(most.shape)})
    check(case, lower(case, WindowSchedule(32, 1, 4 if last else 1)))


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 70)),
    axis=st.integers(0, 2),
    rows=st.sampled_from([1, 2, 8]),
    threads_per_row=st.sampled_from([1, 4, 32]),
    lanes=st.sampled_from([1, 4]),
)
def test_softmax(shape: tuple[int, int, int], axis: int, rows: int, threads_per_row: int, lanes: int) -> None:
    case = softmax_case(*shape, axis=axis)
    check(case, lower(case, RowReductionSchedule(rows, threads_per_row, lanes)))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("inner", [1, 4])
def test_group_norm(last: bool, inner: int) -> None:
    case = group_norm_case(2, 3, inner, 5, last)
    check(case, lower(case, RowReductionSchedule(2, 16, 4)))


@pytest.mark.parametrize("rows, threads_per_row", [(1, 64), (32, 4), (16, 1)])
def test_spatial_mean_of_channels_last(rows: int, threads_per_row: int) -> None:
    x = random(1, 2, 20, 6, 7)
    tx = tensor("x", x)
    b = StepBuilder("mean")
    (total,) = b.reduce("sum", (2, 20), (6, 7), lambda n, c, y, z: tx(n, c, y, z))
    out = b.map((2, 20), lambda n, c: total(n, c) * (1 / 42))
    case = make_case("row reduction", b, out, {"x": x}, double(x).mean((2, 3)).numpy(), {"x": channels_last(x.shape)})
    from tilewright.kernels.gpu.row_reduction.lower import row_reduction_form

    assert row_reduction_form(case.problem).facts.row_contiguous
    check(case, lower(case, RowReductionSchedule(rows, threads_per_row, 1)))


@pytest.mark.parametrize("threads_per_row", [1, 8])
def test_argmax(threads_per_row: int) -> None:
    x = random(1, 7, 33)
    x[2, 5] = x[2, 9] = 100.0
    b = StepBuilder("arg")
    _, where = b.reduce("argmax", (7,), (33,), lambda i, r: (tensor("x", x)(i, r), r))
    out = b.map((7,), lambda i: where(i))
    case = make_case("row reduction", b, out, {"x": x}, x.argmax(1).astype(np.int64))
    check(case, lower(case, RowReductionSchedule(4, threads_per_row, 1)))


@settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 5)),
    axis=st.integers(0, 2),
    rows=st.sampled_from([1, 4]),
    shared=st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 2), (8, 1), (8, 4), (32, 1)]),
)
def test_cumulative_sum(shape: tuple[int, int, int], axis: int, rows: int, shared: tuple[int, int]) -> None:
    x = random(1, *shape)
    b = StepBuilder("cumsum")
    (total,) = b.scan("sum", shape, axis, lambda *i: tensor("x", x)(*i))
    out = b.map(shape, lambda *i: total(*i) * 2.0)
    case = make_case("scan", b, out, {"x": x}, 2 * double(x).cumsum(axis).numpy())
    check(case, lower(case, ScanSchedule(rows, *shared)))


SCHEDULES = (
    ContractionSchedule(16, 32, 8, 2, 4),
    ContractionSchedule(32, 32, 8, 4, 4),
    ContractionSchedule(64, 16, 16, 4, 2),
    ContractionSchedule(32, 64, 16, 8, 4, 2),
    ContractionSchedule(64, 64, 8, 8, 8, 3),
    ContractionSchedule(32, 32, 16, 4, 4, 1, 2),
    ContractionSchedule(16, 32, 8, 2, 4, 3, 4),
    ContractionSchedule(64, 32, 8, 8, 4, 2, 3),
)


@pytest.mark.in_turns
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        ContractionSchedule(32, 32, 8, 4, 4, 2, 2, 1),
        ContractionSchedule(16, 32, 8, 2, 4, 4, 4, 1),
        ContractionSchedule(64, 16, 8, 4, 2, 8, 2, 1),
        ContractionSchedule(32, 64, 16, 8, 4, 4, 1, 1),
    ],
    ids=str,
)
def test_a_split_within_a_cluster(schedule: ContractionSchedule, last: bool) -> None:
    case = convolution_case(channels=64, outputs=24, size=(7, 6), filter_size=1, halo=False, last=last, epilogue=True)
    check(case, lower(case, schedule))
    transposed = matmul_case(batch=(2,), m=20, n=37, r=128, transpose_b=True)
    check(transposed, lower(transposed, schedule))


def test_a_cluster_divides_the_steps_evenly() -> None:
    with pytest.raises(Unsuitable, match="evenly"):
        lower(matmul_case(m=20, n=32, r=40), ContractionSchedule(16, 32, 8, 2, 4, 2, 2, 1))


@settings(max_examples=draws(20), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    channels=st.sampled_from([2, 3, 4, 6, 16]),
    outputs=st.sampled_from([4, 6, 10, 16, 24]),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    filter_size=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    groups=st.sampled_from([1, 1, 2]),
    halo=st.booleans(),
    last=st.booleans(),
    epilogue=st.booleans(),
    constant=st.booleans(),
    schedule=st.sampled_from(SCHEDULES),
)
def test_convolution(
    channels: int,
    outputs: int,
    size: Any,
    filter_size: int,
    stride: int,
    groups: int,
    halo: bool,
    last: Any,
    epilogue: Any,
    constant: Any,
    schedule: Any,
) -> None:
    groups = groups if channels % groups == 0 else 1
    case = convolution_case(
        batch=2,
        channels=channels,
        outputs=outputs,
        size=size,
        filter_size=filter_size,
        stride=stride,
        padding=filter_size // 2,
        groups=groups,
        halo=halo,
        last=last,
        epilogue=epilogue,
        constant=constant,
    )
    problem = product_form(case.problem).facts
    if schedule.split > -(-problem.r // schedule.block_k):
        return
    check(case, lower(case, schedule))


@settings(max_examples=draws(20), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    batch=st.sampled_from([(), (2,), (2, 3)]),
    m=st.sampled_from([1, 5, 16, 36]),
    n=st.sampled_from([2, 7, 16, 40]),
    r=st.sampled_from([1, 8, 21, 32]),
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    constant=st.booleans(),
    schedule=st.sampled_from(SCHEDULES[:3] + (ContractionSchedule(32, 32, 8, 4, 4, 2), ContractionSchedule(32, 32, 8, 4, 4, 2, 3))),
)
def test_matrix_product(batch: tuple[int, ...], m: int, n: int, r: int, transpose_a: bool, transpose_b: bool, constant: Any, schedule: Any) -> None:
    case = matmul_case(batch=batch, m=m, n=n, r=r, transpose_a=transpose_a, transpose_b=transpose_b, constant=constant)
    if schedule.split > -(-r // schedule.block_k):
        return
    check(case, lower(case, schedule))


@settings(max_examples=draws(20), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    m=st.sampled_from([1, 2, 5, 8]),
    n=st.sampled_from([2, 7, 16, 40]),
    r=st.sampled_from([8, 21, 64, 300]),
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    constant=st.booleans(),
    columns=st.sampled_from([1, 8]),
    threads_along_r=st.sampled_from([1, 4, 16, 32, 64]),
    split=st.sampled_from([1, 2]),
    added=st.booleans(),
)
def test_few_rows(
    m: int, n: int, r: int, transpose_a: bool, transpose_b: bool, constant: Any, columns: int, threads_along_r: int, split: int, added: bool
) -> None:
    case = matmul_case(m=m, n=n, r=r, transpose_a=transpose_a, transpose_b=transpose_b, constant=constant, added=added)
    check(case, lower(case, GemvSchedule(columns, threads_along_r, split)))


@pytest.mark.parametrize(("m", "r", "schedule"), [(9, 16, (1, 32, 1)), (2, 64, (1, 24, 1)), (2, 6, (8, 4, 4))])
def test_schedules_that_lie_outside_the_space_of_few_rows_are_refused(m: int, r: int, schedule: tuple[int, int, int]) -> None:
    with pytest.raises(Unsuitable, match="is no schedule of"):
        lower(matmul_case(m=m, n=16, r=r), GemvSchedule(*schedule))


def test_every_kind_of_candidate_is_lowered_correctly() -> None:
    """A sample over the whole feasible space of one convolution."""
    case = convolution_case(channels=16, outputs=40, size=(6, 7))
    problem = product_form(case.problem).facts
    candidates, rejected = contraction_space(problem, H200)
    assert length(candidates) > 50 and sum(rejected.values()) > 1000
    for position in np.random.default_rng(0).choice(length(candidates), 12, replace=False):
        check(case, lower(case, ContractionSchedule(**row(candidates, int(position)))))


def test_gemv_space_is_for_few_rows() -> None:
    case = matmul_case(m=1, n=256, r=512, constant=True)
    problem = product_form(case.problem).facts
    assert length(gemv_space(problem, H200)[0]) > 10
    case = matmul_case(m=36, n=64, r=64, constant=True)
    problem = product_form(case.problem).facts
    assert length(gemv_space(problem, H200)[0]) == 0


TYPICAL = (
    ContractionSchedule(64, 64, 8, 8, 4, 4),
    ContractionSchedule(128, 64, 8, 8, 8),
    ContractionSchedule(32, 64, 16, 4, 4, 4),
    ContractionSchedule(64, 32, 32, 4, 8),
    ContractionSchedule(64, 64, 16, 8, 8, 4, 4),
    ContractionSchedule(32, 64, 32, 4, 4, 1, 4),
    ContractionSchedule(64, 128, 16, 8, 8, 4, 3),
    ContractionSchedule(64, 64, 16, 4, 8, 4, 4, 1),
)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("schedule", TYPICAL, ids=str)
def test_typical_kernels_compile_without_spills(schedule: ContractionSchedule, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    case = convolution_case(channels=64, outputs=64, size=(28, 28))
    lowered = lower(case, schedule)
    outcome = compiled(lowered, tmp_path)
    for kernel in lowered.kernels:
        found = outcome[kernel.name]
        assert found.spill_bytes == 0 and found.stack_bytes == 0
        assert found.registers * schedule.threads <= H200.registers_per_processor


def test_every_schema_compiles(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    lowerings = [
        lower(softmax_case(8, 64, 128), RowReductionSchedule(4, 32, 4)),
        lower(group_norm_case(2, 3, 4, 5, True), RowReductionSchedule(2, 16, 4)),
        lower(matmul_case(m=2, n=40, r=64, constant=True), GemvSchedule(8, 32, 2)),
        lower(matmul_case(batch=(2,), m=36, n=40, r=32, transpose_b=True), ContractionSchedule(32, 32, 8, 4, 4)),
    ]
    for number, lowered in enumerate(lowerings):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert set(compiled(lowered, folder)) == {kernel.name for kernel in lowered.kernels}
