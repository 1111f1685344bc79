"""Chains that are not judged, since a bound says that they cannot gain enough."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.test_branched_chains import Basic, Dense, Inception
from tests.test_chains import X86, chain_problem, conv, graph_of, no_bound
from tests.test_concatenated_chains import Fire, Ghost, Mixed, Normalised
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.gpu.rates import bandwidth
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition import tile_schedules
from tilewright.partition.apart import parts_of
from tilewright.partition.merges import CHAIN, MEASURED_LOSS, Measured, Memory, Policy
from tilewright.partition.plan import plan_program
from tilewright.partition.strip_judge import StripJudge, Strips
from tilewright.partition.strips import reads_all_rows
from tilewright.partition.tile_judge import LOWERED, SHARES, TileJudge, Tiles
from tilewright.partition.tile_schedules import shared_processor
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Ranking


def small(target: Machine, size: int) -> Machine:
    """The machine with a second-level cache of so many bytes, so that small results leave it."""
    return replace(target, caches=tuple(replace(cache, bytes=size) if cache.level == 2 else cache for cache in target.caches))


def alone(problem: Problem, target: Machine, threads: int) -> list[float]:
    return [choose(part, target, threads, replace(USUAL, winograd=False)).seconds for part in parts_of(problem)]


layers = st.lists(
    st.tuples(st.sampled_from(["pointwise", "depthwise", "square"]), st.integers(1, 5), st.sampled_from([1, 1, 2])), min_size=2, max_size=3
)


def drawn(found: Sequence[tuple[str, int, int]], channels: int) -> nn.Module:
    parts, inside = [], channels
    for kind, width, stride in found:
        outputs = inside if kind == "depthwise" else 8 * width
        size = 1 if kind == "pointwise" else 3
        parts.append(conv(inside, outputs, size, stride, size // 2, inside if kind == "depthwise" else 1))
        inside = outputs
    return nn.Sequential(*parts)


@settings(max_examples=draws(25), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(layers, st.sampled_from([8, 16, 24]), st.integers(1, 2), st.integers(8, 40), st.sampled_from([2**14, 2**17, 2**21]), st.integers(1, 3))
def test_no_strips_beat_the_bound(found: Any, channels: int, batch: int, extent: int, cache: int, threads: int) -> None:
    target = small(machine(X86), cache)
    problem = chain_problem(drawn(found, channels), torch.randn(batch, channels, extent, extent + 1))
    judge, seconds = StripJudge(target, threads, USUAL), alone(problem, target, threads)
    least, ranked = judge.least(problem, seconds), judge.ranked(problem, seconds)
    skipping = any((kind, stride) == ("pointwise", 2) for kind, _, stride in found[1:])
    assert 0 < least < sum(seconds) or skipping and least == 0
    if not isinstance(ranked, str):
        assert all(strips.seconds >= least * (1 - 1e-12) for strips in ranked)


def parts_are_bounded(judge: TileJudge, problem: Problem) -> None:
    """No part of a tile is predicted to take less than its bound."""
    for tiling, bounds in judge.tilings(problem):
        for share, number in product(SHARES, range(len(bounds))):
            with suppress(Unsuitable):
                part = tiling.repeats[number] * judge.schedules.ranking(tiling, number, share).seconds.min(initial=inf)
                through, latency = bounds[number]
                assert part >= (share * through + latency) * (1 - 1e-12), (tiling.sizes, number, share)


class Divided(nn.Module):
    """A product, and its quotient by a number that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, y / scale


SPARSE: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...]]] = {
    "windows apart": (nn.Sequential(nn.MaxPool2d(2, 3, 1), conv(32, 24), nn.Conv2d(24, 24, 2, 2, 1, groups=2)), ((2, 32, 14, 14),)),
    "windows with holes": (nn.Sequential(conv(8, 8, 2, 3, 2, 8, 2), conv(8, 8, 3, 2, 2, 2, 2)), ((2, 8, 28, 28),)),
    "every other row": (nn.Sequential(conv(32, 32, 5, 3, 2, 2), nn.MaxPool2d(2, 1, 1), conv(32, 8, 1, 2)), ((4, 32, 56, 56),)),
    "single channels": (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, (7, 1), (1, 2), (3, 0), groups=4), nn.ReLU(), nn.AvgPool2d(3, 1, 1)),
        ((2, 4, 28, 28),),
    ),
    "a number": (Divided(), ((4, 4), ())),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("target", ["h200", "a100"])
def test_parts_that_read_little_are_bounded(name: str, target: str) -> None:
    """Windows may leave out what lies between them, or read every other row; tiles of one channel are products of one row."""
    module, shapes = SPARSE[name]
    parts_are_bounded(TileJudge(machine(target), USUAL), chain_problem(module, *map(torch.randn, shapes)))


ROUNDED = {"float32": USUAL, "TF32": Numerics(tf32=True), "pairs of TF32": Numerics(tf32_pairs=True), "float16": USUAL.at("fp16")}


@settings(max_examples=draws(8), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(
    layers,
    st.sampled_from([8, 16, 24]),
    st.integers(1, 2),
    st.sampled_from([7, 8, 14]),
    st.sampled_from([*ROUNDED]),
    st.sampled_from(["h200", "a100"]),
)
def test_no_tiles_beat_the_bounds(found: Any, channels: int, batch: int, extent: int, rounding: str, target: str) -> None:
    """Neither that of all of a chain's tiles, nor those of the parts of a tile's regions."""
    module, x = drawn(found, channels), torch.randn(batch, channels, extent, extent)
    narrow = rounding == "float16"
    problem, gpu = chain_problem(module.half() if narrow else module, x.half() if narrow else x), machine(target)
    judge = TileJudge(gpu, ROUNDED[rounding])
    ranked = judge.ranked(problem, [])
    if isinstance(ranked, str):
        return
    seconds, least = ranked[0].seconds, judge.least(problem, [])
    assert 0 < least <= seconds * (1 + 1e-12)
    parts_are_bounded(judge, problem)
    for most in (0.5 * seconds, 0.99 * seconds, seconds, 1.01 * seconds, ranked[-1].seconds):
        other = replace(judge, tiles={})
        best = other.best(problem, [], most)
        with suppress(Unsuitable):  # those whose kernels may be tried next are the same
            assert [tiles for tiles in other.predicted(problem, most, LOWERED)[:LOWERED] if tiles.seconds <= most] == [
                tiles for tiles in ranked[:LOWERED] if tiles.seconds <= most
            ]
        assert best == (ranked[0] if most >= seconds else best if isinstance(best, Tiles) and best.seconds >= seconds else most)


def test_parts_with_equal_facts_have_equal_rankings() -> None:
    """Parts of tiles are ranked once for all with equal facts: those that were not ranked have the candidates that they would have."""
    module, gpu = nn.Sequential(conv(16, 96), conv(96, 96, 3, 2, 1, 96), conv(96, 24)), machine("h200")
    problem = chain_problem(module, torch.randn(1, 16, 56, 56))
    judge, numerics = TileJudge(gpu, USUAL), replace(USUAL, winograd=False)
    with mock.patch.object(tile_schedules, "rank", side_effect=rank) as asked:
        judge.ranked(problem, [])
    known = [(key, found) for key, found in judge.schedules.rankings.items() if isinstance(key, tuple) and key[0] in judge.schedules.parts]
    assert asked.call_count < len(known)
    for (part, share, near), found in known:
        expected = rank(judge.schedules.parts[part], shared_processor(gpu, share, near), 1, numerics, learned=False)
        assert isinstance(found, Ranking) and np.array_equal(found.seconds, expected.seconds)


def test_tiles_that_leave_out_rows_are_bounded_by_their_memory() -> None:
    """A pointwise layer of stride 2 reads every other row, and tiles of one row compute no others."""
    gpu = machine("h200")
    whole, half = (chain_problem(nn.Sequential(conv(256, 256), conv(256, 256, 1, stride)), torch.randn(8, 256, 32, 32)) for stride in (1, 2))
    bounds = [TileJudge(gpu, USUAL).least(problem, []) for problem in (whole, half)]
    moved = sum(half.values[name].bytes for name in (*half.region.inputs, *half.region.outputs))
    assert bounds[1] == pytest.approx(gpu.launch_seconds + moved / bandwidth(gpu)) and bounds[0] > 2 * bounds[1]


def test_chains_that_leave_out_rows_have_no_bound() -> None:
    """A pointwise layer of stride 2 reads every other row; strips compute no others, and gain more than all that separate kernels cost."""
    target = machine(X86)
    problem = chain_problem(nn.Sequential(conv(64, 64), conv(64, 64, 1, 2)), torch.randn(1, 64, 32, 32))
    judge, seconds = StripJudge(target, 1, USUAL), alone(problem, target, 1)
    found = judge.best(problem, seconds, sum(seconds))
    assert isinstance(found, Strips) and judge.least(problem, seconds) == 0 < found.seconds < 0.9 * sum(seconds)


@pytest.mark.parametrize(
    "module, whole",
    [
        (conv(8, 8, 3, 1, 1), True),
        (conv(8, 8, 3, 1, 0), True),
        (conv(8, 8, 3, 2, 1), True),
        (conv(8, 8, 2, 2), False),  # the last row of 9 is left out
        (conv(8, 8, 1, 2), False),
        (nn.MaxPool2d(3, 2, 1), True),
        (nn.MaxPool2d(2, 3), False),
    ],
)
def test_which_rows_are_read(module: nn.Module, whole: bool) -> None:
    x = torch.randn(1, 8, 9, 9)
    problem = chain_problem(nn.Sequential(conv(8, 8), module), x)
    name = problem.region.stages[0].outputs[0]
    assert reads_all_rows(problem.region.stages[-1], name, problem.values[name].shape) == whole


def test_parts_of_a_value_are_not_all_rows() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = conv(8, 8), conv(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.first(x)[:, :, 2:])
            return result

    problem = chain_problem(Part(), torch.randn(1, 8, 9, 9))
    name = problem.region.stages[0].outputs[0]
    assert not reads_all_rows(problem.region.stages[-1], name, problem.values[name].shape)


def planned(module: nn.Module, x: torch.Tensor, target: Machine, bounded: bool = True, **options: Any) -> tuple[Program, int]:
    """The program for one thread, and the number of chains that were judged."""
    best, judged = StripJudge.best, []

    def counting(judge: StripJudge, problem: Problem, *rest: Any) -> Any:
        judged.append(problem)
        return best(judge, problem, *rest)

    ways: dict[str, Any] = {"best": counting} | ({} if bounded else {"least": no_bound})
    with mock.patch.multiple(StripJudge, **ways):
        return plan_program(graph_of(module.eval(), x), target, 1, **options), len(judged)


def wide() -> nn.Module:
    """Layers whose arithmetic takes a hundred times as long as starting a kernel."""
    return nn.Sequential(conv(256, 256), conv(256, 256), conv(256, 256))


def test_chains_that_cannot_gain_are_not_judged() -> None:
    x, target = torch.randn(1, 256, 14, 14), machine(X86)
    program, judged = planned(wide(), x, target)
    said = [str(decision) for decision in program.search if decision.ways is None and "gains too little: at least" in decision.text]
    assert judged == 0 and len(said) == 3 and all("predicted in one kernel" in line and line.endswith("apart") for line in said)
    _, judged = planned(wide(), x, target, bounded=False)
    assert judged == 3


@pytest.mark.parametrize("name, judged", [("required", 1), ("refused", 0)])
def test_required_chains_are_judged(name: str, judged: int) -> None:
    x, target = torch.randn(1, 256, 14, 14), machine(X86)
    results = next(decision.results for decision in planned(wide(), x, target)[0].search if len(decision.results) == 2)
    about = frozenset({(CHAIN, results)})
    policy = Policy(taken=about) if name == "required" else Policy(refused=about)
    program, count = planned(wide(), x, target, policy=policy)
    assert count == judged == sum(part.region.kind == "chain" for part in program.regions)


def test_trials_may_measure_chains_that_are_predicted_to_lose() -> None:
    """The measured time decides, so that a chain is judged unless it certainly loses more than trials would measure."""

    def recorded(problem: Problem, *_: Any) -> Measured | None:
        return None

    x, target = torch.randn(1, 256, 14, 14), machine(X86)
    assert planned(wide(), x, target, recorded=recorded)[1] == 3

    def much(judge: StripJudge, problem: Problem, seconds: Sequence[float]) -> float:
        return (1 + 2 * MEASURED_LOSS) * sum(seconds)

    with mock.patch.object(StripJudge, "least", much):
        assert planned(wide(), x, target, recorded=recorded)[1] == 0


def test_chains_of_other_sizes_are_judged() -> None:
    x, target, memory = torch.randn(1, 256, 14, 14), machine(X86), Memory()
    results = next(decision.results for decision in planned(wide(), x, target)[0].search if len(decision.results) == 2)
    planned(wide(), x, target, policy=Policy(taken=frozenset({(CHAIN, results)})), memory=memory)
    assert planned(wide(), torch.randn(2, 256, 14, 14), target, memory=memory)[1] == 1


NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "residual": (Basic(32, 1), (1, 3, 40, 40)),
    "dense": (Dense(32, 16, 3), (1, 3, 40, 40)),
    "normalised": (Normalised(32, 16, 3), (1, 3, 40, 40)),
    "inception": (Inception(), (1, 3, 48, 48)),
    "ghost": (Ghost(64), (1, 8, 56, 56)),
    "fire": (Fire(64), (1, 8, 56, 56)),
    "mixed": (Mixed(), (1, 8, 64, 64)),
    "separable": (nn.Sequential(conv(64, 64), conv(64, 64, 3, 1, 1, 64), conv(64, 64), conv(64, 64)), (1, 64, 56, 56)),
}


def test_the_bound_changes_no_plan() -> None:
    """Among them are plans with chains over concatenations, which predictions choose."""
    target, judged, concatenated = small(machine(X86), 2**17), [0, 0], 0
    for name, (module, shape) in NETWORKS.items():
        ways = [planned(module, torch.randn(shape), target, bounded) for bounded in (True, False)]
        facts = [[(part.region.outputs, part.schedule, part.predicted_seconds) for part in program.regions] for program, _ in ways]
        assert facts[0] == facts[1], name
        judged = [total + count for total, (_, count) in zip(judged, ways, strict=True)]
        concatenated += sum(bool(part.region.wholes) for part in ways[0][0].regions)
    assert judged[0] < judged[1] and concatenated


@pytest.mark.in_turns(1)
@pytest.mark.parametrize(
    "module, shape, said",
    [
        (nn.Sequential(conv(16, 96), conv(96, 96, 3, 1, 1, 96), conv(96, 24), conv(24, 144), conv(144, 24)), (1, 16, 28, 28), "in tiles of"),
        (nn.Sequential(conv(64, 64, 3, 1, 1), conv(64, 256), conv(256, 64), conv(64, 64, 3, 1, 1)), (1, 64, 14, 14), "too little: at least"),
    ],
    ids=["inverted", "bottleneck"],
)
def test_the_bounds_of_tiles_change_no_plan(module: nn.Module, shape: tuple[int, ...], said: str) -> None:
    def unbounded(judge: TileJudge, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Tiles | str:
        ranked = judge.ranked(problem, alone)
        return ranked if isinstance(ranked, str) else ranked[0]

    graph = graph_of(module, torch.randn(shape))
    bounded = plan_program(graph, machine("h200"), 1, chains=True)
    with mock.patch.multiple(TileJudge, best=unbounded, least=no_bound):
        expected = plan_program(graph, machine("h200"), 1, chains=True)
    for own, other in zip(bounded.regions, expected.regions, strict=True):
        assert (own.region.outputs, own.schedule, own.predicted_seconds) == (other.region.outputs, other.schedule, other.predicted_seconds)
    assert [decision.taken for decision in bounded.search] == [decision.taken for decision in expected.search]
    assert any(said in decision.text for decision in bounded.search)
