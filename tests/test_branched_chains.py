"""Chains over graphs with branches, in strips: results that others read too, and results that several regions of a chain read."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.batches import check
from tests.compiled import Case, compare, poison
from tests.draws import draws
from tests.interpreted import check_interpreted, run_program
from tests.sample_artifacts import rewrite_manifest
from tests.test_chains import X86, conv, graph_of, no_bound
from tests.test_trips import sized
from tilewright.errors import InvalidArtifact
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import TILE, Lowered, Region, Unsuitable
from tilewright.ir.stage import MEMORY, Edge, Flow
from tilewright.partition.apart import Apart, lower_apart, parts_of
from tilewright.partition.canonical import canonical
from tilewright.partition.canonical import key_of as canonical_key
from tilewright.partition.chain_kernel import StripSchedule, chain_of
from tilewright.partition.divisions import Place, can_run
from tilewright.partition.merges import CHAIN, Policy
from tilewright.partition.paths import Section, Uses, connected, joined, sections, sorted_regions
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import lay_out
from tilewright.partition.strip_judge import Parts, StripJudge, Strips
from tilewright.partition.strips import dims_of, is_path
from tilewright.partition.without_kernels import without_kernels
from tilewright.report.explanation import stage_lines
from tilewright.runtime import artifact
from tilewright.selection.choice import choose
from tilewright.tuning.problems import key_of
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import from_records, recorded_as, recorded_chains, tune


def branched(region: Region) -> bool:
    return region.kind == "chain" and not is_path(region)


@contextmanager
def some(seed: int, share: float = 0.7) -> Iterator[list[Problem]]:
    """Inside the context chains are taken wherever they are possible, but for some that are drawn at random, in strips of a number of rows that is
    drawn too. Yields those that have branches and whose kernel was made."""
    source = random.Random(seed)
    taken: list[Problem] = []
    lower = StripJudge.lower

    def best(judge: StripJudge, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Strips | str:
        if source.random() > share:
            return "it is not drawn"
        refusals = []
        for dim in dims_of(problem):
            try:
                chain = chain_of(problem, dim)
            except Unsuitable as reason:
                refusals.append(str(reason))
                continue
            rows = source.choice([rows for rows in (1, 2, 3, 4, 5, chain.height) if rows <= chain.height])
            return Strips(StripSchedule(rows, judge.threads, dim), 1e-12, Parts(0.0))
        return "; ".join(refusals) or "it has one row"

    def lowered(judge: StripJudge, problem: Problem, schedule: StripSchedule) -> Any:
        made = lower(judge, problem, schedule)
        taken.extend([problem] if branched(problem.region) else [])
        return made

    with mock.patch.multiple(StripJudge, best=best, least=no_bound, lower=lowered):
        yield taken


class Basic(nn.Module):
    """Two residual blocks: each one's result is read by the next convolution and by the addition."""

    def __init__(self, channels: int, size: int = 3) -> None:
        super().__init__()
        self.first = conv(3, channels)
        self.inside = nn.ModuleList([nn.Conv2d(channels, channels, size, 1, size // 2) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for a, b in ((0, 1), (2, 3)):
            x = torch.relu(x + self.inside[b](torch.relu(self.inside[a](x))))
        return x


class Bottleneck(nn.Module):
    """A block whose shortcut is a strided projection, and one without."""

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(channels, 8), conv(8, 8, 3, stride, 1), nn.Conv2d(8, wide, 1)
        self.projection = nn.Conv2d(channels, wide, 1, stride)
        self.d, self.e, self.f = conv(wide, 8), conv(8, 8, 3, 1, 1), nn.Conv2d(8, wide, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.c(self.b(self.a(x))) + self.projection(x))
        return torch.relu(self.f(self.e(self.d(y))) + y)


class PooledShortcut(nn.Module):
    """A block whose shortcut is pooled before the other branch is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.pool = conv(3, 16), nn.MaxPool2d(3, 1, 1)
        self.a, self.b, self.c = conv(16, 8), conv(8, 8, 3, 1, 1), nn.Conv2d(8, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        shortcut = self.pool(x)
        return torch.relu(self.c(self.b(self.a(x))) + shortcut)


class Dense(nn.Module):
    """Layers each of which reads all results before it."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.first = conv(3, channels)
        self.narrow = nn.ModuleList([conv(channels + growth * layer, 16) for layer in range(layers)])
        self.grown = nn.ModuleList([conv(16, growth, 3, 1, 1) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for narrow, grown in zip(self.narrow, self.grown, strict=True):
            x = torch.cat([x, grown(narrow(x))], 1)
        return x


class Elan(nn.Module):
    """Each result is read by the next layer, and is a part of a concatenation."""

    def __init__(self, last: int = 1) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(8, 16), conv(16, 16, 3, 1, 1), conv(16, 16, 3, 1, 1), conv(48, 8, last, 1, last // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        second = self.b(first)
        result: torch.Tensor = self.d(torch.cat([first, second, self.c(second)], 1))
        return result


class Fans(nn.Module):
    """One value is read by two layers, whose results are added."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.first, self.a, self.b = conv(8, 16), a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        result: torch.Tensor = self.a(y) + self.b(y)
        return result


def depthwise(size: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(16, 16, size, stride, size // 2, groups=16)


class Split(nn.Module):
    """Branches of one value that never meet: both of their results are the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = conv(8, 16), conv(16, 24, 3, 1, 1), conv(16, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return self.a(y), self.b(y)


class Partial(nn.Module):
    """A layer reads a concatenation, and what follows it a part of that too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.whole, self.last = conv(8, 16, 3, 1, 1), conv(8, 16), conv(32, 16, 3, 1, 1), conv(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        result: torch.Tensor = self.last(self.whole(torch.cat([a, b], 1)) + b)
        return result


class Inception(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.one, self.three, self.five = conv(channels, 8), nn.Sequential(conv(channels, 8), conv(8, 16, 3, 1, 1)), conv(channels, 8, 5, 1, 2)
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, 8))
        self.before, self.after = conv(3, channels, 3, 1, 1), conv(40, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        result: torch.Tensor = self.after(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1))
        return result


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "basic blocks": (Basic(16), (1, 3, 11, 9)),
    "basic blocks of pointwise layers": (Basic(16, 1), (2, 3, 9, 8)),
    "bottleneck": (Bottleneck(16, 32, 1), (2, 16, 9, 8)),
    "bottleneck, stride 2": (Bottleneck(16, 32, 2), (1, 16, 12, 10)),
    "pooled shortcut": (PooledShortcut(), (1, 3, 12, 10)),
    "dense block": (Dense(16, 16, 3), (1, 3, 9, 8)),
    "concatenated results": (Elan(), (2, 8, 10, 9)),
    "two windows": (Fans(depthwise(3), depthwise(5)), (2, 8, 13, 9)),
    "two strided windows": (Fans(depthwise(3, 2), depthwise(5, 2)), (1, 8, 13, 9)),
    "a window and what it is scaled with": (Fans(nn.Conv2d(16, 16, 1), nn.MaxPool2d(3, 1, 1)), (1, 8, 12, 9)),
    "a halo beside the padding of a maximum": (Fans(nn.Conv2d(16, 16, (1, 3), 1, (0, 1)), nn.MaxPool2d(3, 1, 1)), (3, 8, 12, 9)),
    "two results": (Split(), (2, 8, 9, 10)),
    "a concatenation and its part": (Partial(), (1, 8, 12, 9)),
    "inception": (Inception(), (1, 3, 10, 9)),
}


DRAWS = pytest.mark.parametrize("seeds", [range(2), pytest.param(range(4), marks=pytest.mark.slow)], ids=["", "more"])


def checked_in_strips(name: str, module: nn.Module, shape: tuple[int, ...], seeds: range, share: float = 0.7) -> list[Problem]:
    """The chains of a module that were made of `some` in draws of these seeds; each plan's results are those of the module."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        with some(seed, share) as taken:
            check_interpreted([Case(name, module, (torch.randn(shape),))], machine(X86), 1 + seed % 3)
        found += taken
    return found


@pytest.mark.in_turns(13)
@DRAWS
@pytest.mark.parametrize("name", CASES)
def test_strips_compute_what_separate_kernels_do(name: str, seeds: range) -> None:
    found = checked_in_strips(name, *CASES[name], seeds)
    assert found or name == "a concatenation and its part", "no chain with branches was made"


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", ["basic blocks", "bottleneck, stride 2", "dense block", "concatenated results", "two results", "inception"])
def test_strips_on_this_machine(name: str) -> None:
    module, shape = CASES[name]
    torch.manual_seed(0)
    with some(0, 1.0) as taken:
        executable = tilewright.compile(module.eval(), (torch.randn(shape),), "native", threads=2)
    assert taken
    poison(executable)
    for _ in range(2):
        fresh = torch.randn(shape)
        compare(Case(name, module, (fresh,)), executable(fresh), (fresh,))


class Drawn(nn.Module):
    """Layers that each read one or two results before them; some results are the model's."""

    def __init__(self, layers: Sequence[tuple[str, int, int, int]], results: Sequence[int]) -> None:
        super().__init__()
        self.drawn, self.results = layers, results
        made = {"pointwise": lambda _: conv(8, 8), "square": lambda size: conv(8, 8, size, 1, size // 2)}
        made |= {"depthwise": lambda size: conv(8, 8, size, 1, size // 2, 8), "pool": lambda size: nn.MaxPool2d(size, 1, size // 2)}
        self.layers = nn.ModuleList([made[kind](size) for kind, size, _, _ in layers])
        self.last = conv(8, 8, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        known = [x]
        for layer, (_, _, back, other) in zip(self.layers, self.drawn, strict=True):
            y = layer(known[-1 - back % len(known)])
            known.append(y + known[-1 - other % len(known)] if other else y)
        return self.last(known[-1]), *(known[-1 - result % len(known)] * 2 for result in self.results)


random_layers = st.lists(
    st.tuples(
        st.sampled_from(["pointwise", "square", "depthwise", "pool"]), st.sampled_from([1, 3, 5]), st.sampled_from([0, 0, 1, 2]), st.integers(0, 3)
    ),
    min_size=3,
    max_size=5,
)


@settings(max_examples=draws(12), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(random_layers, st.lists(st.integers(0, 4), max_size=1), st.integers(1, 2), st.integers(4, 13), st.integers(5, 9), st.integers(0, 2**31))
def test_random_branches(layers: Any, results: Any, batch: int, height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    with some(seed):
        check_interpreted([Case("drawn", Drawn(layers, results), (torch.randn(batch, 8, height, width),))], machine(X86), 1 + seed % 3)


def test_rows_that_do_not_exist_are_not_moved() -> None:
    """Nothing was stored in the rows beside an image that nobody fills."""
    layers = [("square", 5, 3, 0), ("square", 3, 1, 4), ("square", 3, 0, 4), ("square", 5, 0, 0)]
    layers += [("pointwise", 3, 0, 1), ("depthwise", 5, 0, 1), ("pointwise", 5, 3, 3), ("pool", 5, 2, 2)]
    with some(392718981):
        check_interpreted([Case("drawn", Drawn(layers, []), (torch.randn(1, 8, 8, 6),))], machine("x86-avx2"))


def ordered(module: nn.Module, *inputs: torch.Tensor) -> tuple[Uses, list[Section]]:
    graph = graph_of(module, *inputs)
    uses = Uses(graph, lay_out(graph))
    return uses, sections(uses, 3)


def test_a_part_and_what_reads_the_whole_are_not_joined() -> None:
    """Other strips store rows of the part."""
    uses, found = ordered(Partial(), torch.randn(1, 8, 12, 9))
    by_name = {region.outputs[0]: region for section in found for region in section.regions} | {
        region.outputs[0]: region for region in uses.laid_out.regions
    }
    pair = [by_name["relu_1"], by_name["add"]]
    assert connected(pair) and not uses.may_join(pair)
    assert uses.may_join([by_name["add"], by_name["relu_3"]])


def test_what_others_read_is_stored() -> None:
    uses, (section,) = ordered(Bottleneck(16, 32, 1), torch.randn(1, 16, 8, 8))
    line = section.regions
    names = [region.outputs[0] for region in line]
    block, narrow = names.index("relu_2"), names.index("relu_3")
    assert uses.stored(line[block : narrow + 1]) == {"relu_2"}  # the addition at the end reads it
    assert uses.stored(line[block:]) == frozenset()
    assert connected(line[block : narrow + 1]) and not connected([line[0], line[narrow]])


@pytest.mark.parametrize("name", CASES)
def test_regions_come_after_those_that_they_read(name: str) -> None:
    """In lines, and however chains are chosen from them: also where what is stored for others is read before the chain's last region was."""
    module, shape = CASES[name]
    uses, found = ordered(module, torch.randn(shape))
    source = random.Random(0)
    for _ in range(5):
        segments: list[tuple[Region, ...]] = []
        for section in found:
            taken: list[Place] = []
            for place in source.sample(section.segments, len(section.segments)):
                taken += [place] if can_run([*taken, place], section.before) else []
            segments += map(section.of, taken)
        last = {segment[-1].name: segment for segment in segments}
        dropped = {region.name for segment in last.values() for region in segment} - last.keys()
        regions = [joined(last[x.name], uses.stored(last[x.name])) if x.name in last else x for x in uses.laid_out.regions if x.name not in dropped]
        made = {name for region in uses.laid_out.regions for name in region.outputs}
        known: set[str] = set()
        for region in sorted_regions(regions, uses):
            parts = {name for name, place in uses.laid_out.slices.items() if place.buffer in region.inputs and name in made}
            known |= {*region.outputs} if region.stages else set()  # a chain may store a part of a concatenation that it reads
            assert parts | made & {*region.inputs} <= known
            known |= {*region.outputs}


def test_a_program_without_regions() -> None:
    graph = graph_of(nn.Identity(), torch.randn(2, 3))
    assert not sections(Uses(graph, lay_out(graph)), 3)


def test_paths_stay_together() -> None:
    """A layer that is computed between those of a path comes before them."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.pool, self.c = conv(8, 8), conv(8, 8), nn.MaxPool2d(3, 1, 1), conv(16, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first, pooled = self.a(x), self.pool(y)
            result: torch.Tensor = self.c(torch.cat([self.b(first), pooled], 1))
            return result

    _, (section, *_) = ordered(Between(), torch.randn(1, 8, 8, 8), torch.randn(1, 8, 8, 8))
    assert [region.nodes[0].name for region in section.regions][:2] == ["conv2d", "conv2d_1"]


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("target", [X86, "h200"])
@pytest.mark.parametrize("name", ["pooled shortcut", "inception"])
def test_regions_that_are_not_successive_in_the_order(name: str, target: str) -> None:
    """Such as a shortcut and the last layer of the branch beside it, or a branch that others interleave."""
    torch.manual_seed(0)
    module, shape = CASES[name]
    graph, x = graph_of(module.eval(), torch.randn(shape)), torch.randn(shape)
    expected = copy.deepcopy(module).double()(x.double()).detach()
    _, found = ordered(module, x)
    apart = [section.of(place) for section in found for place in section.segments if place[-1] - place[0] >= len(place)]
    assert apart
    made = 0
    for segment in apart[:6]:
        results = tuple(region.outputs[0] for region in segment)
        program = plan_program(graph, machine(target), 1, chains=True, policy=Policy(taken=frozenset({(CHAIN, results)})))
        chains = [lowered.region for lowered in program.regions if lowered.region.kind == "chain"]
        made += any(tuple(stage.outputs[0] for stage in region.stages) == results for region in chains)
        values, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
        assert not faults
        assert (torch.from_numpy(values[program.graph.outputs[0]]).double() - expected).abs().max() < 1e-5 * expected.abs().max()
    assert made


def test_values_that_readers_pad_differently_have_no_tile() -> None:
    graph = graph_of(Fans(nn.Conv2d(16, 16, 3, 1, 1), nn.MaxPool2d(3, 1, 1)), torch.randn(1, 8, 12, 9))
    laid_out = lay_out(graph)
    uses = Uses(graph, laid_out)
    line = uses.order
    problem = canonical(Problem(joined(line, uses.stored(line)), laid_out.layouts, laid_out.values, frozenset(graph.constants))).problem
    with pytest.raises(Unsuitable, match="padded with several values"):
        chain_of(problem, 2)


def flow(module: nn.Module, shape: tuple[int, ...], tmp_path: Path, rows: int) -> tuple[Flow, list[str]]:
    """What is said of the chain with branches of a module, which is one chain; also after it was saved and loaded."""
    with some(0, 1.0), mock.patch.object(random.Random, "choice", lambda source, found: found[min(rows, len(found)) - 1]):
        executable = tilewright.compile(module.eval(), (torch.randn(shape),), X86, threads=1)
    executable.save(tmp_path / "chain.tw")
    (row,) = [row for row in executable.plan.rows if row.kind == "chain" and not row.flow.is_path]
    loaded = artifact.read(tmp_path / "chain.tw").program
    assert [region.flow for region in loaded.regions] == [row.flow for row in executable.plan.rows]
    return row.flow, list(stage_lines(row))


def test_edges_say_where_results_are(tmp_path: Path) -> None:
    """Two readers of a tile; a result that is stored besides; one that is read where it is stored."""
    found, said = flow(Fans(depthwise(3), depthwise(5)), (1, 8, 12, 10), tmp_path, 2)
    size = 4 * 16 * 12 * 10
    assert found.edges == (Edge(0, 1, TILE, size), Edge(0, 2, TILE, size), Edge(1, 2, TILE, size))
    assert said[0].endswith("through tiles on the chip to stage 2 and stage 3") and said[2].startswith("3: ")
    found, said = flow(Elan(3), (1, 8, 12, 10), tmp_path, 2)
    stored = [Edge(number, None, MEMORY, size) for number in range(2)]
    assert found.edges == (Edge(0, 1, TILE, size), stored[0], Edge(1, 2, TILE, size), stored[1])
    assert said[0].endswith("through tiles on the chip to stage 2, 7.68 kB through memory to other regions")
    found, said = flow(nn.Sequential(conv(8, 16), Basic(16, 1).inside[0], Both()), (1, 8, 12, 10), tmp_path, 2)
    assert found.edges[-2:] == (Edge(1, 2, MEMORY, size), Edge(1, None, MEMORY, size))
    assert said[1].endswith("through memory to stage 3 and other regions")


class Both(nn.Module):
    """A layer, and what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


@pytest.mark.parametrize("edge", [[0, 0, TILE, 1], [2, 3, TILE, 1], [-1, 1, TILE, 1], [0, 1, "registers", 1], [0, 1, TILE, -1], [0, 1, TILE]])
def test_edges_of_artifacts_join_stages_in_order(edge: list[Any], tmp_path: Path) -> None:
    with some(0, 1.0):
        tilewright.compile(Elan(3).eval(), (torch.randn(1, 8, 12, 10),), X86, threads=1).save(tmp_path / "chain.tw")

    def broken(manifest: dict[str, Any]) -> None:
        (found,) = [region["flow"] for region in manifest["program"]["regions"] if len(region["flow"]["stages"]) > 1]
        found["edges"].append(edge)

    rewrite_manifest(tmp_path / "chain.tw", broken)
    with pytest.raises(InvalidArtifact):
        artifact.read(tmp_path / "chain.tw")


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("name", ["basic blocks", "concatenated results", "bottleneck, stride 2"])
def test_any_number_of_images(name: str) -> None:
    module, shape = CASES[name]
    with some(0, 1.0) as taken:
        executable = sized(module.eval(), torch.randn(2, *shape[1:]))
        for batch in (2, 3, 1, 4):
            check(module, executable, torch.randn(batch, *shape[1:]))
    assert taken


def chain_with_branches(name: str) -> Problem:
    module, shape = CASES[name]
    with some(0, 1.0) as taken:
        plan_program(graph_of(module.eval(), torch.randn(shape)), machine(X86), 1)
    return taken[0]


def lowered_apart(judge: StripJudge, problem: Problem, schedule: object) -> Lowered:
    """The kernels of the regions one after another, in the place of a chain's: for `StripJudge.lower`."""
    return lower_apart(problem, Apart(tuple(choose(part, judge.machine, 2).schedule for part in parts_of(problem))), judge.machine)


@pytest.mark.parametrize("name", ["concatenated results", "two results", "two windows"])
def test_regions_apart_compute_the_same(name: str) -> None:
    """What trials measure a chain with branches against."""
    module, shape = CASES[name]
    with some(0, 1.0), mock.patch.object(StripJudge, "lower", lowered_apart):
        check_interpreted([Case(name, module, (torch.randn(shape),))], machine(X86), 2)


@pytest.mark.slow
def test_all_results_of_a_chain_are_checked_by_trials(tmp_path: Path) -> None:
    native, problem = machine("native"), chain_with_branches("concatenated results")
    assert len(problem.region.outputs) > 1
    with Records(tmp_path / "records.sqlite") as records:
        done = tune([*parts_of(problem), problem], native, 2, records)
        assert done.failed == 0
        found = [entry for entry in records.standing(key_of(problem), recorded_as(native, 1)) if entry.status == "measured"]
        assert {entry.description[:5] == "apart" for entry in found} == {False, True}
        decided = recorded_chains(records)(problem, native, 1, from_records(records))
        assert decided is not None and decided.seconds > 0 < decided.apart


def test_problems_that_store_other_results_differ() -> None:
    problem = chain_with_branches("concatenated results")
    alone = replace(problem, region=replace(problem.region, outputs=problem.region.outputs[:1]))
    assert key_of(problem) != key_of(alone) and canonical_key(problem) != canonical_key(alone)


def test_a_chain_with_branches_that_does_not_compile_runs_through_pytorch() -> None:
    module, shape = CASES["two results"]
    with some(0, 1.0):
        program = plan_program(graph_of(module.eval(), torch.randn(shape)), machine(X86), 1)
    (chain,) = [lowered for lowered in program.regions if branched(lowered.region)]
    replaced = without_kernels(program, {chain.kernels[0].name: "refused"})
    (region,) = [lowered.region for lowered in replaced.regions if lowered.region.kind == "torch"]
    assert {*region.outputs} == {*chain.region.outputs}


class Cached(nn.Module):
    """What was in a buffer is read by the first layer of a path, whose last layer comes after the buffer's update."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = nn.Buffer(torch.randn(1, 8, 12, 10))
        self.a, self.b = conv(8, 16), conv(16, 8, 3, 1, 1)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        first = self.a(self.cache)
        self.cache.index_copy_(2, at, x)
        result: torch.Tensor = self.b(first) + self.cache
        return result


def test_what_is_updated_in_place_is_read_before() -> None:
    module, at = Cached().eval(), torch.tensor([3, 7])
    expected = copy.deepcopy(module).double()
    with some(0, 1.0):
        executable = tilewright.compile(copy.deepcopy(module), (torch.randn(1, 8, 2, 10), at), "native", threads=1)
    assert executable.image.program.updated
    for _ in range(2):
        x = torch.randn(1, 8, 2, 10)
        torch.testing.assert_close(executable(x, at).double(), expected(x.double(), at), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["basic blocks", "concatenated results"])
def test_values_of_16_bits_are_copied_as_they_are(name: str) -> None:
    module, shape = CASES[name]
    x = torch.randn(shape)
    with some(0, 1.0) as taken:
        program = plan_program(graph_of(module, x), machine("xeon-sapphire-rapids"), 2, precision="bf16")
    assert any("bf16" in problem.dtypes.values() for problem in taken)
    (output,), (given,) = program.graph.outputs, program.graph.inputs
    results, faults = run_program(program, {given: x.numpy()})
    assert not faults
    expected = copy.deepcopy(module).double()(x.double()).detach()
    assert (torch.from_numpy(results[output]).double() - expected).abs().max() < 0.03 * expected.abs().max()
