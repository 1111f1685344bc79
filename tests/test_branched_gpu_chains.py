"""Chains over graphs with branches, in tiles on GPUs: the kernels in the interpreter against PyTorch in float64, and through NVRTC."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.compiled import Case
from tests.draws import draws
from tests.emulated_gpu import EmulatedServer
from tests.interpreted import check_interpreted, run_program
from tests.on_device import cuda_binary
from tests.test_branched_chains import CASES, Drawn, Fans, branched, depthwise, random_layers
from tests.test_chains import graph_of
from tests.test_gpu_chains import H200, any_tiles, on_the_gpu
from tilewright.codegen.cuda import print_cuda
from tilewright.hardware import machine
from tilewright.ir.expr import Var, index_const, range_of, substitute
from tilewright.ir.kernel import Kernel
from tilewright.ir.problem import Problem
from tilewright.kernels.schema import USUAL
from tilewright.partition.apart import Apart, parts_of
from tilewright.partition.judges import ways_of
from tilewright.partition.plan import plan_program
from tilewright.partition.strips import Rows
from tilewright.partition.tile_cuts import cut_along
from tilewright.partition.tile_judge import TileJudge
from tilewright.partition.tile_work import tile_work
from tilewright.partition.tiles import Tiling, Window
from tilewright.selection.choice import choose


@contextmanager
def some_tiles(seed: int, share: float = 0.7) -> Iterator[list[Problem]]:
    """Inside the context chains are taken wherever they are possible, but for some that are drawn at random, fewer of those with branches, in tiles
    that are drawn too (`any_tiles`). Yields those that have branches and whose kernel was made."""
    source = random.Random(seed)
    taken: list[Problem] = []
    best, lower = TileJudge.best, TileJudge.lower

    def drawn(judge: TileJudge, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Any:
        likely = share if branched(problem.region) else share / 2
        return best(judge, problem, alone, most, before) if source.random() <= likely else "it is not drawn"

    def lowered(judge: TileJudge, problem: Problem, schedule: Any) -> Any:
        made = lower(judge, problem, schedule)
        taken.extend([problem] if branched(problem.region) else [])
        return made

    with mock.patch.multiple(TileJudge, best=drawn, lower=lowered), any_tiles(seed):
        yield taken


# No chain of a part of a concatenation with a reader of the whole is made, nor tiles of a value that its readers pad with different values, but for
# chains with one of these readers.
NO_TILES, FEW_TILES = "a concatenation and its part", "a halo beside the padding of a maximum"


def kinds_of_readers(problem: Problem) -> list[set[str]]:
    """For each value that a chain reads, the kinds of its regions that do."""
    stages = problem.region.stages
    return [{stage.kind for stage in stages if name in stage.inputs} for name in {name for stage in stages for name in stage.inputs}]


@pytest.mark.in_turns(9)
@pytest.mark.parametrize("seeds", [range(2, 3), pytest.param(range(4), marks=pytest.mark.slow)], ids=["", "more"])
@pytest.mark.parametrize("name", CASES)
def test_tiles_compile_and_compute_what_separate_kernels_do(name: str, seeds: range) -> None:
    module, shape = CASES[name]
    found, kernels = [], dict[str, Kernel]()
    for seed in seeds:
        torch.manual_seed(seed)
        with some_tiles(seed, 1.0 if seed else 0.7) as taken:
            program = check_interpreted([Case(name, module, (torch.randn(shape),))], machine(H200))
        found += taken
        kernels |= {kernel.name: kernel for lowered in program.regions if branched(lowered.region) for kernel in lowered.kernels}
    assert bool(found) == (name != NO_TILES) or name == FEW_TILES, "a chain with branches was made or not against what is expected"
    if name == FEW_TILES:
        assert not any({"contraction", "window"} <= kinds for problem in found for kinds in kinds_of_readers(problem))
    assert bool(kernels) == bool(found)
    if kernels:
        passed, log = cuda_binary(print_cuda([*kernels.values()]), machine(H200).architecture)
        assert passed, log


def test_values_of_16_bits_are_stored_as_they_are() -> None:
    torch.manual_seed(0)
    module, shape = CASES["concatenated results"]
    module, x = copy.deepcopy(module).half(), torch.randn(shape).half()
    with some_tiles(0, 1.0) as taken:
        program = plan_program(graph_of(module, x), machine(H200), 1, chains=True)
    assert any(len(problem.region.outputs) > 1 for problem in taken)
    (output,), (given,) = program.graph.outputs, program.graph.inputs
    results, faults = run_program(program, {given: x.numpy()})
    assert not faults
    expected = copy.deepcopy(module).double()(x.double()).detach()
    assert (torch.from_numpy(results[output]).double() - expected).abs().max() < 2e-3 * expected.abs().max()


@settings(max_examples=draws(6), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(random_layers, st.lists(st.integers(0, 4), max_size=1), st.integers(1, 2), st.integers(4, 12), st.integers(4, 9), st.integers(0, 2**31))
def test_random_branches(layers: Any, results: Any, batch: int, height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    with some_tiles(seed, 0.8):
        check_interpreted([Case("drawn", Drawn(layers, results), (torch.randn(batch, 8, height, width),))], machine(H200))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.lists(st.tuples(st.integers(-4, 2), st.integers(1, 6)), min_size=2, max_size=3),
    st.integers(1, 14),
)  # fmt: skip
def test_windows_hold_all_rows_that_their_readers_read(size: int, tiles: int, stride: int, read: list[tuple[int, int]], extent: int) -> None:
    readers = tuple((Window(size, size * tiles, tiles), Rows(0, stride, first, span)) for first, span in read)
    window = Window.of_readers(readers, extent)
    tile = Var("tile", tiles)
    before, after = window.halo
    for number in range(tiles):
        given = {tile: index_const(number)}
        begin = window.first(number)
        assert 0 <= begin <= begin + window.count <= extent
        assert set(range_of(substitute(window.first_of(tile), given))) == {begin}
        for at, (reader, rows) in enumerate(readers):
            skipped = window.skipped(number, at)
            assert set(range_of(substitute(window.skipped_of(tile, at), given))) == {skipped}
            assert 0 <= skipped <= before + window.count + after - rows.needed(size)
            first = rows.stride * reader.first(number) + rows.first
            assert all(begin <= row < begin + window.count or not 0 <= row < extent for row in range(first, first + rows.needed(size)))


def test_shared_memory_of_branches_is_that_of_all_results_at_once() -> None:
    """Of a value, and of one made of it, that are read together; the closed form of the work agrees."""
    with some_tiles(0, 1.0) as taken:
        plan_program(graph_of(Fans(depthwise(3), depthwise(5)), torch.randn(1, 8, 12, 8)), machine(H200), 1, chains=True)
    (problem,) = taken
    cuts = cut_along(problem)
    work = tile_work(problem, cuts, [[8, 16], [4, 12], [4, 8]], machine(H200))
    tilings = [Tiling(problem, cuts, tuple(map(int, sizes))) for sizes in work.sizes]
    assert [tiling.shared_bytes for tiling in tilings] == pytest.approx(list(work.shared_bytes), abs=32)
    assert all(tiling.shared_bytes >= sum(4 * layout.size for layout in tiling.storage.values()) for tiling in tilings)


def test_results_that_are_stored_too_cost_their_copies() -> None:
    with some_tiles(0, 1.0) as taken:
        plan_program(graph_of(CASES["concatenated results"][0], torch.randn(1, 8, 12, 8)), machine(H200), 1, chains=True)
    (problem,) = taken
    assert all(tiles.parts.stored > 0 and tiles.terms["stored"] == tiles.parts.stored for tiles in TileJudge(machine(H200), USUAL).predicted(problem))


def test_all_results_of_a_chain_are_checked_by_trials(tmp_path: Path) -> None:
    """The process that measures on a GPU, over an emulated one: the chain's kernel, and its regions apart."""
    with some_tiles(0, 1.0) as taken:
        plan_program(graph_of(CASES["concatenated results"][0], torch.randn(1, 8, 12, 8)), machine(H200), 1, chains=True)
    (problem,) = taken
    assert len(problem.region.outputs) > 1
    server = EmulatedServer(problem, machine(H200), seconds=1e-2)
    apart = Apart(tuple(choose(part, machine(H200), 1).schedule for part in parts_of(problem)))
    for schedule in (ways_of(problem, machine(H200), 1)[0].schedule, apart):
        program = json.loads(json.dumps(server.program(schedule, tmp_path)))
        answer = server.trial({"program": program, "mode": "warm"})
        assert "error" not in answer and answer["relative_error"] < 1e-5, answer


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["basic blocks", "bottleneck, stride 2", "concatenated results", "two windows", "two results"])
def test_branches_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    module, shape = CASES[name]
    assert "tiles of" in on_the_gpu(module, [shape], torch.float32, 0)
