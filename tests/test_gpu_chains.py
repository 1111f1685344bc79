"""Chains of regions in tiles on GPUs: what a tile needs, and the kernels in the interpreter against PyTorch in float64, and through NVRTC."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests import interpreted
from tests.compiled import Case
from tests.interpreted import check_interpreted
from tests.test_chains import CASES, Gated, OwnWeights, chain_problem, conv, graph_of, inverted, random_chain, random_layers
from tilewright.codegen.cuda import print_cuda, shared_bytes, shared_offsets
from tilewright.errors import CompilerMissing
from tilewright.hardware import machine
from tilewright.hardware.calibration import GpuChains
from tilewright.ir.expr import Var, index_const, range_of, substitute
from tilewright.ir.kernel import Allocate, Kernel, statements
from tilewright.kernels.gpu.window.space import WindowFacts, conflicts_of
from tilewright.kernels.schema import USUAL
from tilewright.partition import tile_judge
from tilewright.partition.plan import plan_program
from tilewright.partition.strips import Rows
from tilewright.partition.tile_judge import TileJudge, TileParts, cut_along
from tilewright.partition.tile_work import TileWork, tile_work
from tilewright.partition.tiles import Tiling, Window
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler

H200 = "h200"


@contextmanager
def any_tiles(seed: int) -> Iterator[list[tuple[str, ...]]]:
    """Inside the context every chain that is possible is taken, with tiles, schedules' block sizes and occupancies drawn at random. Yields the kinds
    of the regions of each chain that became a kernel."""
    source = random.Random(seed)
    taken: list[tuple[str, ...]] = []
    lower = TileJudge.lower

    def lowered(judge: TileJudge, problem: Any, tiles: Any) -> Any:
        made = lower(judge, problem, tiles)
        taken.append(tuple(stage.kind for stage in problem.region.stages))
        return made

    def drawn(*given: Any) -> TileWork:
        work = tile_work(*given)
        return replace(work, seconds=np.array([source.random() for _ in work.seconds]), least=0 * work.least)

    draw = mock.patch.multiple(tile_judge, tile_work=drawn)
    chosen = mock.patch.multiple(TileJudge, lower=lowered)
    with draw, chosen, mock.patch.object(TileParts, "seconds", lambda *_: 1e-12 * source.random()):
        with mock.patch.object(interpreted, "plan_program", partial(plan_program, chains=True)):
            yield taken


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_tiles_compute_what_separate_kernels_do(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    module, shape, _ = CASES[name]
    with any_tiles(seed) as taken:
        check_interpreted([Case(name, module, (torch.randn(shape),))], machine(H200))
    assert taken, "nothing was merged"


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(random_layers, st.integers(1, 2), st.integers(4, 14), st.integers(4, 12), st.integers(0, 2**31))
def test_random_chains(found: list[Any], batch: int, height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    case = random_chain(found, (batch, height, width))
    if case is not None:
        with any_tiles(seed):
            check_interpreted([case], machine(H200))


def test_windows_stay_inside_the_image() -> None:
    """The example of `partition.tiles`: 8 rows in tiles of 4, of which a 3x3 convolution reads rows -1 to 4, and 3 to 8."""
    window = Window.of_reader(Window(4, 8, 2), Rows(2, 1, -1, 3), 8)
    assert (window.count, window.halo) == (6, (1, 1))
    assert [window.wanted(tile) for tile in range(2)] == [-1, 3]
    assert [window.first(tile) for tile in range(2)] == [0, 2]
    assert [window.skipped(tile) for tile in range(2)] == [0, 2]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(-4, 2), st.integers(1, 6), st.integers(1, 12))
def test_windows_hold_all_rows_that_are_read(size: int, tiles: int, stride: int, first: int, span: int, extent: int) -> None:
    reader, rows = Window(size, size * tiles, tiles), Rows(0, stride, first, span)
    window = Window.of_reader(reader, rows, extent)
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


def test_channels_are_cut_where_the_reader_takes_one_at_a_time() -> None:
    """A pointwise and a depthwise layer: tiles of channels need only their own filters, and compute nothing twice."""
    problem = chain_problem(nn.Sequential(conv(16, 64), conv(64, 64, 3, 1, 1, 64)), torch.randn(1, 16, 8, 8))
    dims, cuts = cut_along(problem)
    assert dims == (1, 2, 3)
    tiling = Tiling(problem, cuts, (16, 8, 8))
    assert tiling.blocks == 4 and tiling.storage[cuts[0].result].shape == (1, 16, 8, 8)
    weights = next(name for name in cuts[0].region.inputs if problem.values[name].shape == (64, 16, 1, 1))
    assert [axis for axis, *_ in tiling.slices(0, weights)] == [0]


@pytest.mark.parametrize("seed", range(4))
def test_tiles_of_channels(seed: int) -> None:
    torch.manual_seed(seed)
    cases = [
        nn.Sequential(conv(16, 64), conv(64, 64, 3, 1, 1, 64)),
        nn.Sequential(conv(8, 32, 3, 1, 1, 8), nn.MaxPool2d(3, 2, 1), conv(32, 32, 3, 1, 1, 32)),
        nn.Sequential(nn.Linear(20, 600), nn.Softmax(-1), nn.Linear(600, 48)),
    ]
    shapes = [(2, 16, 9, 8), (1, 8, 12, 11), (12, 20)]
    with any_tiles(seed) as taken:
        check_interpreted([Case(str(shape), module, (torch.randn(shape),)) for module, shape in zip(cases, shapes, strict=True)], machine(H200))
    assert len(taken) >= 3


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
    _, cuts = cut_along(problem)
    work = tile_work(problem, cuts, [[1, 8, 16], [4, 14], [14, 28]], machine(H200))
    tilings = [Tiling(problem, cuts, tuple(map(int, sizes))) for sizes in work.sizes]
    assert [tiling.shared_bytes for tiling in tilings] == list(work.shared_bytes) and len(tilings) == 12
    found = {tiling.sizes: seconds for tiling, seconds in zip(tilings, work.seconds, strict=True)}
    assert found[8, 4, 14] < found[1, 14, 28] / 3
    assert (work.least < work.seconds).all()


def test_hopeless_chains_are_not_ranked() -> None:
    """A chain whose operations alone take longer than its regions is refused by the closed form."""
    problem = chain_problem(nn.Sequential(conv(64, 64, 3, 1, 1), conv(64, 64, 3, 1, 1)), torch.randn(1, 64, 28, 28))
    counted: list[int] = []
    judge = TileJudge(machine(H200), USUAL, counted.append)
    refused = judge.best(problem, [1e-6, 1e-6])
    assert isinstance(refused, str) and "of its regions" in refused and not counted
    assert not isinstance(TileJudge(machine(H200), USUAL).ranked(problem, [1e-6, 1e-6]), str)


@pytest.mark.parametrize("strides, lanes, expected", [((16,), 1, 15), ((1,), 1, 0), ((1,), 4, 0), ((0,), 1, 0), ((48, 1), 1, 7)], ids=str)
def test_bank_conflicts_of_a_warp(strides: tuple[int, ...], lanes: int, expected: int) -> None:
    """Pixels 16 words apart share two banks; pairs of channels in pixels 48 words apart four."""
    facts = WindowFacts(256, 4, 0, 0, 1.0, 9, (), 1, 1, 1, extents=(256,) if len(strides) == 1 else (128, 2))
    rows = {name: np.array([value]) for name, value in {"threads": 32, "items": 1, "vector_width": lanes, "rows": 1}.items()}
    assert conflicts_of(facts, strides, rows) == expected


def kernels_of(module: nn.Module, target: str, seed: int, *inputs: torch.Tensor) -> list[Kernel]:
    """The kernels of the chains of a module."""
    with any_tiles(seed):
        program = plan_program(graph_of(module, *inputs), machine(target), 1, chains=True)
    return [kernel for lowered in program.regions if lowered.region.kind == "chain" for kernel in lowered.kernels]


@pytest.mark.parametrize("target", ["a100", "h200"])
def test_the_kernels_compile(target: str, tmp_path: Path) -> None:
    try:
        compiler = NvrtcCompiler.find(machine(target))
    except CompilerMissing as error:
        pytest.skip(str(error))
    modules = [inverted(16, 32, 2), nn.Sequential(conv(8, 32, 3, 1, 1), conv(32, 16, 3, 1, 1)), nn.Sequential(conv(32, 128), conv(128, 32))]
    inputs = [torch.randn(1, next(module.parameters()).shape[1], 28, 28) for module in modules]
    found = [kernel for seed, (module, x) in enumerate(zip(modules, inputs, strict=True)) for kernel in kernels_of(module, target, seed, x)]
    assert len(found) >= 3
    outcome = compiler.compile(SourceFile("kernel.cu", print_cuda(found), "cuda", tuple(kernel.name for kernel in found)), tmp_path)
    assert outcome.succeeded, outcome.log


def test_parts_that_follow_one_another_share_places() -> None:
    (kernel,) = kernels_of(inverted(16, 64), H200, 1, torch.randn(1, 16, 28, 28))
    buffers = [s.buffer for s in statements(kernel.body) if isinstance(s, Allocate) and s.buffer.space == "shared"]
    assert shared_bytes(kernel) < sum(4 * buffer.size for buffer in buffers)
    assert f"shared_memory + {max(shared_offsets(kernel).values())})" in print_cuda([kernel])


def test_chains_are_planned_where_they_are_asked_for() -> None:
    graph = graph_of(inverted(16, 96), torch.randn(1, 16, 56, 56))
    for asked, expected in ((None, False), (False, False), (True, True)):
        program = plan_program(graph, machine(H200), 1, chains=asked)
        assert bool(program.search) == expected
    assert all("us apart" in str(merge) or "cannot" in str(merge) for merge in program.search)


def test_predicted_seconds_are_composed_of_parts() -> None:
    parts = TileParts(launch=1e-6, memory=2e-6, parts=3e-6, turns=4)
    assert parts.seconds(GpuChains(work=2.0, turn=1000.0), 1e9) == pytest.approx(1e-6 + 6e-6 + 4e-6)
    assert parts.seconds(GpuChains(work=0.1, turn=0.1), 1e9) == pytest.approx(3e-6)
    problem = chain_problem(inverted(16, 64), torch.randn(1, 16, 28, 28))
    ranked = TileJudge(machine(H200), USUAL).predicted(problem)
    assert [tiles.seconds for tiles in ranked] == sorted(tiles.seconds for tiles in ranked)
    for tiles in ranked:
        assert f"by {tiles.schedule.threads} threads" in str(tiles.schedule) and len(tiles.schedule.sizes) == 3
        assert tiles.seconds > machine(H200).launch_seconds
