"""Chains of regions in tiles on GPUs: what a tile needs, and the kernels in the interpreter against PyTorch in float64, and through NVRTC."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests import interpreted
from tests.compiled import Case, compare, poison
from tests.draws import draws
from tests.interpreted import check_interpreted
from tests.test_chains import CASES, Gated, OwnWeights, Residual, chain_problem, conv, graph_of, inverted, random_chain, random_layers
from tests.test_half_modules import assert_as_good_as_eager
from tilewright.codegen.cuda import print_cuda, shared_bytes, shared_offsets
from tilewright.codegen.intrinsics.barriers import cluster_barrier
from tilewright.errors import CompilerMissing
from tilewright.hardware import machine
from tilewright.hardware.calibration import GpuChains
from tilewright.ir.expr import Const, Expr, Load, Var, index_const, range_of, substitute
from tilewright.ir.kernel import Allocate, Block, Buffer, For, Kernel, Let, Statement, Store, statements
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.gpu.window.space import WindowFacts, conflicts_of
from tilewright.kernels.schema import USUAL
from tilewright.partition import tile_judge
from tilewright.partition.plan import plan_program
from tilewright.partition.strips import Rows
from tilewright.partition.tile_bounds import moved_bytes
from tilewright.partition.tile_cuts import cut_along, in_chunks
from tilewright.partition.tile_judge import TileJudge, TileParts, Tiles
from tilewright.partition.tile_kernel import split_sums
from tilewright.partition.tile_work import TileWork, tile_work
from tilewright.partition.tiles import Tiling, Window
from tilewright.selection.bounds import is_claim
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler

H200 = "h200"


@contextmanager
def any_tiles(seed: int, chunked: bool | None = None, exchanged: bool | None = None) -> Iterator[list[tuple[str, ...]]]:
    """Inside the context every chain that is possible is taken, with tiles, schedules' block sizes and occupancies drawn at random, of those that are
    chunked and exchanged as asked for. Yields the kinds of the regions of each chain that became a kernel."""
    source = random.Random(seed)
    taken: list[tuple[str, ...]] = []
    lower = TileJudge.lower

    def lowered(judge: TileJudge, problem: Any, tiles: Any) -> Any:
        made = lower(judge, problem, tiles)
        taken.append(tuple(stage.kind for stage in problem.region.stages))
        return made

    def drawn(*given: Any) -> TileWork:
        work = tile_work(*given)
        return replace(work, seconds=np.array([source.random() for _ in work.seconds]), least=0 * work.least, latencies=0 * work.latencies)

    def suitable(judge: TileJudge, problem: Any, cuts: Any, axes: Any, chunks: bool, axis: int | None = None) -> Any:
        asked = chunked in (None, chunks) and exchanged in (None, axis is not None)
        return least_work(judge, problem, cuts, axes, chunks, axis) if asked else []

    least_work = TileJudge._with_least_work
    draw = mock.patch.multiple(tile_judge, tile_work=drawn, RANKED=2)
    chosen = mock.patch.multiple(TileJudge, lower=lowered, _with_least_work=suitable, _bound=lambda *_: 0.0)
    with draw, chosen, mock.patch.object(TileParts, "seconds", lambda *_: 1e-12 * source.random()):
        asked_for = partial(plan_program, chains=True)
        with (
            mock.patch.object(interpreted, "plan_program", asked_for),
            mock.patch.object(import_module("tilewright.compile"), "plan_program", asked_for),
        ):
            yield taken


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_tiles_compute_what_separate_kernels_do(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    module, shape, _ = CASES[name]
    with any_tiles(seed) as taken:
        check_interpreted([Case(name, module, (torch.randn(shape),))], machine(H200))
    assert taken, "nothing was merged"


class Squeezed(nn.Module):
    """The sum of the last region reads a second value along the channels of its chunks, and adds a third to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.project = conv(16, 48), nn.Conv2d(48, 20, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.relu(self.project(self.expand(x) * scale) + other)
        return result


CHUNKED: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...]]] = {
    "inverted residual": (Residual(inverted(16, 96)), ((2, 16, 9, 8),)),
    "inverted, stride 2": (inverted(16, 64, 2), ((1, 16, 14, 12),)),
    "expanded twice": (nn.Sequential(conv(12, 144), conv(144, 144, 5, 1, 2, 144), conv(144, 30)), ((1, 12, 8, 8),)),
    "pointwise, pointwise": (nn.Sequential(conv(24, 64), conv(64, 24)), ((1, 24, 8, 6),)),
    "depthwise, pointwise": (nn.Sequential(conv(48, 48, 3, 1, 1, 48), conv(48, 32)), ((2, 48, 7, 8),)),
    "bottleneck": (nn.Sequential(conv(32, 16), conv(16, 32, 3, 1, 1), conv(32, 64)), ((1, 32, 8, 8),)),
    "convolutions with halos": (nn.Sequential(conv(8, 32, 3, 1, 1), conv(32, 16, 3, 1, 1)), ((1, 8, 8, 8),)),
    "windows with halos": (nn.Sequential(conv(32, 32, 3, 1, 1, 32), conv(32, 16, 3, 1, 1)), ((1, 32, 6, 8),)),
    "matrix products": (nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 12)), ((16, 24),)),
    "scaled channels": (Squeezed(), ((2, 16, 6, 8), (2, 48, 1, 1), (2, 20, 6, 8))),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("seed", range(3))
def test_sums_over_chunks_of_channels(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    module, shapes = CHUNKED[name]
    with any_tiles(seed, chunked=True) as taken:
        check_interpreted([Case(name, module, tuple(map(torch.randn, shapes)))], machine(H200))
    assert taken, "nothing was merged"


EXCHANGED: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...]]] = {
    "inverted residual": (Residual(inverted(16, 64)), ((2, 16, 8, 10),)),
    "inverted, stride 2": (inverted(16, 64, 2), ((1, 16, 16, 12),)),
    "large filters": (nn.Sequential(conv(12, 48), conv(48, 48, 5, 1, 2, 48), conv(48, 30)), ((1, 12, 8, 8),)),
    "bottleneck": (nn.Sequential(conv(32, 16), conv(16, 32, 3, 1, 1), conv(32, 64)), ((1, 32, 8, 8),)),
    "two exchanges": (nn.Sequential(conv(8, 32, 3, 1, 1), conv(32, 16, 3, 1, 1), conv(16, 8, 3, 1, 1)), ((1, 8, 16, 8),)),
    "rows before only": (nn.Sequential(conv(8, 16), nn.ZeroPad2d((0, 0, 2, 0)), conv(16, 8, 3)), ((1, 8, 8, 10),)),
    "dilated": (nn.Sequential(conv(8, 32), conv(32, 32, 3, 1, 2, 32, 2), conv(32, 16)), ((1, 8, 16, 9),)),
    "maximum pooling": (nn.Sequential(conv(3, 16, 3, 1, 1), nn.MaxPool2d(3, 2, 1)), ((1, 3, 16, 12),)),
    "signals": (nn.Sequential(nn.Conv1d(4, 16, 5, 1, 2), nn.ReLU(), nn.Conv1d(16, 8, 3, 1, 1)), ((2, 4, 32),)),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", EXCHANGED)
@pytest.mark.parametrize(("seed", "chunked"), [(2, True), (0, False), (1, False)])
def test_blocks_of_a_cluster_exchange_rows(name: str, seed: int, chunked: bool) -> None:
    torch.manual_seed(seed)
    module, shapes = EXCHANGED[name]
    if chunked and name in ("maximum pooling", "rows before only", "signals"):
        pytest.skip("no sum over so many channels")
    with any_tiles(seed, chunked, True) as taken:
        check_interpreted([Case(name, module, tuple(map(torch.randn, shapes)))], machine(H200))
    assert taken, "nothing was merged"


def on_the_gpu(module: nn.Module, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, *asked: Any) -> str:
    """Compiles a module with the tiles that are asked for (see `any_tiles`), and compares its results. Returns the schedules of its chains."""
    case = Case("chain", copy.deepcopy(module).to(dtype).eval(), tuple(torch.randn(shape).to(dtype) for shape in shapes))
    with any_tiles(*asked) as taken:
        executable = tilewright.compile(case.module, case.inputs, "cuda")
    assert taken, "nothing was merged"
    poison(executable)
    for _ in range(2):
        inputs = case.fresh_inputs()
        with torch.no_grad():
            found = executable(*(x.cuda() for x in inputs))
        if dtype == torch.float32:
            compare(case, found, inputs)
        else:
            assert_as_good_as_eager(case.module, inputs, found.cpu())
    schedules = " ".join(row.schedule for row in executable.plan.rows if row.kind == "chain")
    executable.close()
    return schedules


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inverted residual", "convolutions with halos", "average pooling", "matrix products"])
def test_tiles_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    module, shape, _ = CASES[name]
    assert "tiles of" in on_the_gpu(module, [shape], torch.float32, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inverted residual", "bottleneck", "windows with halos", "scaled channels"])
def test_chunks_on_a_gpu(name: str) -> None:
    torch.manual_seed(1)
    module, shapes = CHUNKED[name]
    assert "chunks of" in on_the_gpu(module, shapes, torch.float32, 1, True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inverted, stride 2", "two exchanges", "dilated", "bottleneck"])
@pytest.mark.parametrize("chunked", [False, True])
def test_exchanges_on_a_gpu(name: str, chunked: bool) -> None:
    if machine("cuda").compute_capability < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    torch.manual_seed(2)
    module, shapes = EXCHANGED[name]
    assert "that clusters exchange" in on_the_gpu(module, shapes, torch.float32, 2, chunked, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_tensor_cores_of_tiles_on_a_gpu(dtype: torch.dtype, chunked: bool) -> None:
    torch.manual_seed(3)
    for name, seed in (("convolutions with halos", 0), ("expanded twice", 1)):
        module, shapes = CHUNKED[name]
        assert "tensor cores" in on_the_gpu(module, shapes, dtype, seed, chunked, False)


@settings(max_examples=draws(8), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(
    random_layers,
    st.integers(1, 2),
    st.integers(4, 14),
    st.integers(4, 12),
    st.integers(0, 2**31),
    st.sampled_from([None, True]),
    st.sampled_from([None, True]),
)
def test_random_chains(found: list[Any], batch: int, height: int, width: int, seed: int, chunked: bool | None, exchanged: bool | None) -> None:
    torch.manual_seed(seed)
    case = random_chain(found, (batch, height, width))
    if case is not None:
        with any_tiles(seed, chunked, exchanged):
            check_interpreted([case], machine(H200))


def window_of(reader: Window, rows: Rows, extent: int, exchanged: bool = False) -> Window:
    """The window of an inner result with one reader."""
    return Window.of_readers(((reader, rows),), extent, exchanged)


def test_windows_stay_inside_the_image() -> None:
    """The example of `partition.tiles`: 8 rows in tiles of 4, of which a 3x3 convolution reads rows -1 to 4, and 3 to 8."""
    window = window_of(Window(4, 8, 2), Rows(2, 1, -1, 3), 8)
    assert (window.count, window.halo) == (6, (1, 1))
    assert [window.wanted(tile) for tile in range(2)] == [-1, 3]
    assert [window.first(tile) for tile in range(2)] == [0, 2]
    assert [window.skipped(tile) for tile in range(2)] == [0, 2]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(-4, 2), st.integers(1, 6), st.integers(1, 12))
def test_windows_hold_all_rows_that_are_read(size: int, tiles: int, stride: int, first: int, span: int, extent: int) -> None:
    reader, rows = Window(size, size * tiles, tiles), Rows(0, stride, first, span)
    window = window_of(reader, rows, extent)
    tile = Var("tile", tiles)
    before, after = window.halo
    for number in range(tiles):
        given = {tile: index_const(number)}
        assert set(range_of(substitute(window.first_of(tile), given))) == {window.first(number)}
        assert set(range_of(substitute(window.skipped_of(tile), given))) == {window.skipped(number)}
        begin = window.first(number)
        assert 0 <= begin <= begin + window.count <= extent
        assert 0 <= window.skipped(number) <= before + window.count + after - rows.needed(size)
        for row in range(window.wanted(number), window.wanted(number) + rows.needed(size)):
            assert begin <= row < begin + window.count or not 0 <= row < extent  # a row outside is in the halo


def test_exchanged_windows_do_not_overlap() -> None:
    """The example of `partition.tiles`, and tiles that need more than the rows beside them."""
    window = window_of(Window(4, 8, 2), Rows(2, 1, -1, 3), 8, exchanged=True)
    assert (window.count, window.halo, [window.first(tile) for tile in range(2)]) == (4, (1, 1), [0, 4])
    strided = window_of(Window(2, 4, 2), Rows(2, 2, -1, 3), 8, exchanged=True)
    assert (strided.count, strided.halo, [strided.first(tile) for tile in range(2)]) == (4, (1, 0), [0, 4])
    assert not window_of(Window(4, 8, 2), Rows(2), 8, exchanged=True).exchanged
    for reader, rows, extent in ((Window(1, 8, 8), Rows(2, 1, -2, 5), 8), (Window(3, 6, 2), Rows(2, 1, 0, 3), 8)):
        with pytest.raises(Unsuitable, match="do not exchange"):
            window_of(reader, rows, extent, exchanged=True)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(2, 5), st.integers(1, 3), st.integers(-4, 2), st.integers(1, 6))
def test_exchanged_rows_are_those_of_the_tiles_beside(size: int, tiles: int, stride: int, first: int, span: int) -> None:
    reader, rows, extent = Window(size, size * tiles, tiles), Rows(0, stride, first, span), size * tiles * stride
    try:
        window = window_of(reader, rows, extent, exchanged=True)
    except Unsuitable:
        return
    before, after = window.halo
    tile = Var("tile", tiles)
    for number in range(tiles):
        given = {tile: index_const(number)}
        assert set(range_of(substitute(window.first_of(tile), given))) == {window.first(number)}
        assert set(range_of(substitute(window.skipped_of(tile), given))) == {window.skipped(number)}
        begin, wanted = window.first(number), range(window.wanted(number), window.wanted(number) + rows.needed(size))
        assert begin - before <= wanted[0] and wanted[-1] < begin + window.count + after
        assert not window.exchanged or begin == number * window.count and max(before, after) <= window.count


def test_channels_are_cut_where_the_reader_takes_one_at_a_time() -> None:
    """A pointwise and a depthwise layer: tiles of channels need only their own filters, and compute nothing twice."""
    problem = chain_problem(nn.Sequential(conv(16, 64), conv(64, 64, 3, 1, 1, 64)), torch.randn(1, 16, 8, 8))
    cuts = cut_along(problem)
    assert [rows.dim for rows in cuts[-1].spans[cuts[-1].result] if rows is not None] == [1, 2, 3]
    tiling = Tiling(problem, cuts, (16, 8, 8))
    assert tiling.blocks == 4 and tiling.storage[cuts[0].result].shape == (1, 16, 8, 8)
    weights = next(name for name in cuts[0].region.inputs if problem.values[name].shape == (64, 16, 1, 1))
    assert [axis for axis, *_ in tiling.slices(0, weights)] == [0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_tiles_of_channels(seed: int) -> None:
    torch.manual_seed(seed)
    cases = [
        nn.Sequential(conv(16, 64), conv(64, 64, 3, 1, 1, 64)),
        nn.Sequential(conv(8, 32, 3, 1, 1, 8), nn.MaxPool2d(3, 2, 1), conv(32, 32, 3, 1, 1, 32)),
        nn.Sequential(nn.Linear(20, 600), nn.Softmax(-1), nn.ReLU(), nn.Linear(600, 48)),  # attention would join without the third
    ]
    shapes = [(2, 16, 9, 8), (1, 8, 12, 11), (12, 20)]
    with any_tiles(seed) as taken:
        check_interpreted([Case(str(shape), module, (torch.randn(shape),)) for module, shape in zip(cases, shapes, strict=True)], machine(H200))
    assert len(taken) >= 3


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("shape", [(2, 16, 14, 13), (1, 16, 14, 13), (2, 16, 1, 13), (2, 16, 1, 1)], ids=str)
def test_other_values_are_read_at_the_place_of_the_tile(shape: tuple[int, ...]) -> None:
    with any_tiles(len(shape) + shape[0]) as taken:
        check_interpreted([Case("gated", Gated(8, 16, 8), (torch.randn(2, 8, 14, 13), torch.randn(shape)))], machine(H200))
    assert taken


def test_constants_of_each_image_are_not_those_of_the_first() -> None:
    with any_tiles(3) as taken:
        check_interpreted([Case("own weights", OwnWeights(), (torch.randn(3, 20, 24),))], machine(H200))
    assert taken


def test_the_work_of_tiles_is_that_of_each_tiling() -> None:
    """Columns against single tilings; and channels of a tile that lie side by side spare bank conflicts."""
    problem = chain_problem(nn.Sequential(conv(16, 16, 5, 1, 2, 16), conv(16, 16, 5, 2, 2, 16)), torch.randn(1, 16, 112, 112))
    cuts = cut_along(problem)
    work = tile_work(problem, cuts, [[1, 8, 16], [4, 14], [14, 28]], machine(H200))
    tilings = [Tiling(problem, cuts, tuple(map(int, sizes))) for sizes in work.sizes]
    assert [tiling.shared_bytes for tiling in tilings] == list(work.shared_bytes) and len(tilings) == 12
    found = {tiling.sizes: seconds for tiling, seconds in zip(tilings, work.seconds, strict=True)}
    assert found[8, 4, 14] < found[1, 14, 28] / 3
    assert (work.least.sum(axis=1) < work.seconds).all()


def test_chunks_take_the_room_of_a_chunk() -> None:
    """However many channels are between; regions that are not cut by channels are computed once, before the chunks."""
    sizes = set()
    for wide in (64, 512):
        problem = chain_problem(inverted(16, wide), torch.randn(1, 16, 8, 8))
        cuts = in_chunks(problem, cut_along(problem))
        tiling = Tiling(problem, cuts, (16, 4, 8, 32), chunked=True)
        assert tiling.repeats == (wide // 32,) * 3 and tiling.blocks == 2 and tiling.inside == 0
        sizes.add(tiling.shared_bytes)
    assert len(sizes) == 1
    bottleneck = chain_problem(CHUNKED["bottleneck"][0], torch.randn(1, 32, 8, 8))
    cuts = in_chunks(bottleneck, cut_along(bottleneck))
    tiling = Tiling(bottleneck, cuts, (64, 4, 8, 16), chunked=True)
    assert tiling.repeats == (1, 2, 2) and tiling.inside == 1
    work = tile_work(bottleneck, cuts, [[64], [4, 8], [8], [8, 16]], machine(H200), chunked=True)
    tilings = [Tiling(bottleneck, cuts, tuple(map(int, sizes)), chunked=True) for sizes in work.sizes]
    assert [tiling.shared_bytes for tiling in tilings] == list(work.shared_bytes)
    assert list(work.results) == [64 * 4 * 8] * 2 + [64 * 8 * 8] * 2


def test_chunks_are_ranked_with_other_tiles() -> None:
    """Where the channels between leave room for few rows, chunks of them are predicted to be faster."""
    problem = chain_problem(inverted(64, 1024), torch.randn(8, 64, 28, 28))
    ranked = TileJudge(machine(H200), USUAL).predicted(problem)
    whole, chunks = ([tiles.seconds for tiles in ranked if bool(tiles.schedule.chunk) == chunked] for chunked in (False, True))
    assert min(chunks) < min(whole) / 2
    tiles = next(tiles for tiles in ranked if tiles.schedule.chunk)
    assert tiles.parts.turns % (3 * 1024 // tiles.schedule.chunk) == 0 and f"chunks of {tiles.schedule.chunk} channels" in str(tiles.schedule)


def test_exchanges_are_weighed_against_rows_computed_twice() -> None:
    """A layer of MobileNetV2 is predicted to be faster in tiles that exchange rows; not without clusters."""
    problem = chain_problem(nn.Sequential(conv(16, 96), conv(96, 96, 3, 2, 1, 96), conv(96, 24)), torch.randn(1, 16, 112, 112))
    ranked = TileJudge(machine(H200), USUAL).predicted(problem)
    apart, exchanged = ([tiles for tiles in ranked if bool(tiles.schedule.exchanged) == asked] for asked in (False, True))
    assert exchanged[0].seconds < apart[0].seconds and exchanged[0].parts.exchange > 0 == apart[0].parts.exchange
    assert exchanged[0].schedule.exchanged == 2 and "clusters exchange along dimension 2" in str(exchanged[0].schedule)
    assert not any(tiles.schedule.exchanged for tiles in TileJudge(machine("a100"), USUAL).predicted(problem))
    with pytest.raises(Unsuitable, match="clusters"):
        TileJudge(machine("a100"), USUAL).lower(problem, exchanged[0].schedule)


def test_no_block_ends_before_others_have_read_what_it_offers() -> None:
    for chunked in (False, True):
        (kernel,) = kernels_of(inverted(16, 64), H200, 0, torch.randn(1, 16, 16, 12), chunked=chunked, exchanged=True)
        assert isinstance(kernel.body, Block) and kernel.body.statements[-1] == cluster_barrier()
        assert kernel.cluster in (2, 4, 8) and any(isinstance(s, Allocate) and s.buffer.space == "cluster" for s in statements(kernel.body))


def test_kernels_that_do_more_than_to_add_have_no_chunks() -> None:
    sums, i = Buffer("sums", "f32", 4, "register"), Var("i", 4)

    def at(value: Expr) -> Statement:
        return For(i, index_const(4), Store("sums", i, value), "unroll")

    held, x = Load("sums", (i,), "f32"), Load("x", (i,), "f32")
    zero, add, store = at(Const(0.0, "f32")), at(held + x), For(i, index_const(4), Store("y", i, held), "unroll")
    before, adding, after = split_sums([Allocate(sums), zero, Let(Var("a", 4), index_const(1)), add, store])
    assert before == [Allocate(sums), zero, Let(Var("a", 4), index_const(1))] and adding == [add] and after == [store]
    refused: list[tuple[list[Statement], str]] = [
        ([Allocate(sums), add, store], "no sums"),
        ([Allocate(sums), zero, add, at(held * x), store], "more with its sums"),
        ([Allocate(sums), zero, at(held + held), store], "more with its sums"),
        ([Allocate(sums), zero, add, For(i, index_const(4), Store("z", i, held)), add, store], "more with its sums"),
        ([Allocate(sums), For(i, index_const(4), Store("z", i, x)), zero, add, store], "reads before"),
        ([Allocate(sums), zero, Let(Var("a"), Load("x", (index_const(0),), "i64")), add, Store("y", Var("a"), x)], "uses after"),
    ]
    for body, reason in refused:
        with pytest.raises(Unsuitable, match=reason):
            split_sums(body)


def test_hopeless_chains_are_not_ranked() -> None:
    """A chain whose operations alone take longer than it may is refused by the closed form; it is ranked when it may take longer."""
    problem = chain_problem(nn.Sequential(conv(64, 64, 3, 1, 1), conv(64, 64, 3, 1, 1)), torch.randn(1, 64, 28, 28))
    counted: list[int] = []
    judge = TileJudge(machine(H200), USUAL, counted.append)
    assert judge.best(problem, [1e-6, 1e-6], 2e-6) == 2e-6 and not counted
    ranked = judge.ranked(problem, [1e-6, 1e-6])
    assert not isinstance(ranked, str) and counted and judge.best(problem, [1e-6, 1e-6], 2e-6) == ranked[0]


def test_chains_without_room_say_so() -> None:
    problem = chain_problem(nn.Sequential(nn.Linear(8, 60_000), nn.LayerNorm(60_000), nn.Linear(60_000, 8)), torch.randn(16, 8))
    assert TileJudge(machine(H200), USUAL).best(problem, [1.0, 1.0, 1.0], 3.0) == tile_judge.NO_ROOM


@pytest.mark.parametrize("strides, lanes, expected", [((16,), 1, 15), ((1,), 1, 0), ((1,), 4, 0), ((0,), 1, 0), ((48, 1), 1, 7)], ids=str)
def test_bank_conflicts_of_a_warp(strides: tuple[int, ...], lanes: int, expected: int) -> None:
    """Pixels 16 words apart share two banks; pairs of channels in pixels 48 words apart four."""
    facts = WindowFacts(256, 4, 0, 0, 1.0, 9, (), 1, 1, 1, extents=(256,) if len(strides) == 1 else (128, 2))
    rows = {name: np.array([value]) for name, value in {"threads": 32, "items": 1, "vector_width": lanes, "rows": 1}.items()}
    assert conflicts_of(facts, strides, rows) == expected


def kernels_of(module: nn.Module, target: str, seed: int, *inputs: torch.Tensor, **asked: bool) -> list[Kernel]:
    """The kernels of the chains of a module."""
    with any_tiles(seed, **asked):
        program = plan_program(graph_of(module, *inputs), machine(target), 1, chains=True)
    return [kernel for lowered in program.regions if lowered.region.kind == "chain" for kernel in lowered.kernels]


@pytest.mark.parametrize("target", [pytest.param("a100", marks=pytest.mark.slow), "h200"])
def test_the_kernels_compile(target: str, tmp_path: Path) -> None:
    try:
        compiler = NvrtcCompiler.find(machine(target))
    except CompilerMissing as error:
        pytest.skip(str(error))
    modules = [inverted(16, 32, 2), nn.Sequential(conv(8, 32, 3, 1, 1), conv(32, 16, 3, 1, 1)), nn.Sequential(conv(32, 128), conv(128, 32))]
    inputs = [torch.randn(1, next(module.parameters()).shape[1], 28, 28) for module in modules]
    found = [kernel for seed, (module, x) in enumerate(zip(modules, inputs, strict=True)) for kernel in kernels_of(module, target, seed, x)]
    chunked, exchanged = ([*cases.values()][target == H200 :: 2] for cases in (CHUNKED, EXCHANGED))  # half of them for each
    for seed, (module, shapes) in enumerate(chunked):
        found += kernels_of(module, target, seed, *map(torch.randn, shapes), chunked=True)
    assert len(found) >= 3 + len(chunked)
    if target == H200:  # clusters need compute capability 9.0
        for seed, (module, shapes) in enumerate(exchanged):
            clustered = kernels_of(module, target, seed, *map(torch.randn, shapes), exchanged=True)
            assert clustered and all(kernel.cluster > 1 for kernel in clustered)
            found += clustered
    outcome = compiler.compile(SourceFile("kernel.cu", print_cuda(found), "cuda", tuple(kernel.name for kernel in found)), tmp_path)
    assert outcome.succeeded, outcome.log


def test_parts_that_follow_one_another_share_places() -> None:
    (kernel,) = kernels_of(inverted(16, 64), H200, 1, torch.randn(1, 16, 28, 28), chunked=False, exchanged=False)
    buffers = [s.buffer for s in statements(kernel.body) if isinstance(s, Allocate) and s.buffer.space == "shared"]
    assert shared_bytes(kernel) < sum(4 * buffer.size for buffer in buffers)
    assert f"shared_memory + {max(shared_offsets(kernel).values())})" in print_cuda([kernel])


def lowered_tiles(judge: TileJudge, problem: Any) -> Iterator[tuple[Tiles, Lowered]]:
    """The tiles of a chain that have a kernel, fastest first, and the kernels."""
    for tiles in judge.predicted(problem):
        with suppress(Unsuitable):
            yield tiles, judge.lower(problem, tiles.schedule)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("chunked", [False, True])
def test_bounds_contain_what_adjacent_tiles_both_compute(chunked: bool) -> None:
    """The multiply-adds of the busiest processor's blocks, rows at borders and all chunks included, are below the bound; predictions are above."""
    module = inverted(16, 96) if chunked else nn.Sequential(conv(64, 64, 3, 1, 1), conv(64, 64, 3, 1, 1))
    problem = chain_problem(module, torch.randn(4, next(module.parameters()).shape[1], 28, 28))
    target = machine(H200)
    made_of = list(lowered_tiles(TileJudge(target, USUAL), problem))
    found = [(tiles, made) for tiles, made in made_of if bool(tiles.schedule.chunk) == chunked and not tiles.schedule.exchanged]
    assert found
    for tiles, made in found:
        cuts, sizes = cut_along(problem), tiles.schedule.sizes
        if chunked:
            cuts, sizes = in_chunks(problem, cuts), (*sizes, tiles.schedule.chunk)
        tiling = Tiling(problem, cuts, sizes, chunked)
        parts = [tiling.part(number).region for number in range(len(cuts))]
        flops = sum(times * part.steps[0].flops() for part, times in zip(parts, tiling.repeats, strict=True) if part.kind == "contraction")
        least = -(-tiling.blocks // target.processors) * flops / (target.peak_flops["fp32"] / target.processors)
        (name,) = (name for name in made.bounds if not is_claim(name))
        assert least <= made.bounds[name] < tiles.seconds


def test_what_is_certainly_moved() -> None:
    """The result, the filters, and a quarter of an image of which every other pixel is read; what a window reads may be guarded."""
    images = torch.randn(1, 64, 28, 28)
    problem = chain_problem(nn.Sequential(conv(64, 32, 1, 2), conv(32, 32, 3, 1, 1, 32), conv(32, 16)), images)
    filters = 4 * (32 * 64 + 16 * 32)
    assert moved_bytes(problem) == 4 * 64 * 14 * 14 + filters + 4 * 16 * 14 * 14


def test_predicted_seconds_are_composed_of_parts() -> None:
    parts = TileParts(launch=1e-6, memory=2e-6, parts=3e-6, turns=4)
    assert parts.seconds(GpuChains(work=2.0, turn=1000.0), 1e9) == pytest.approx(1e-6 + 6e-6 + 4e-6)
    assert parts.seconds(GpuChains(work=0.1, turn=0.1), 1e9) == pytest.approx(3e-6)
    problem = chain_problem(inverted(16, 64), torch.randn(1, 16, 28, 28))
    ranked = TileJudge(machine(H200), USUAL).predicted(problem)
    assert [tiles.seconds for tiles in ranked] == sorted(tiles.seconds for tiles in ranked)
    for tiles in ranked:
        terms = dict(tiles.terms)
        launch, memory = terms.pop("launch"), terms.pop("memory")
        assert set(terms) == {"parts", "turns", "exchange"} and launch + max(sum(terms.values()), memory) == pytest.approx(tiles.seconds)
        assert f"by {tiles.schedule.threads} threads" in str(tiles.schedule) and len(tiles.schedule.sizes) == 3
        assert tiles.seconds > machine(H200).launch_seconds
