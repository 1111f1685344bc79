"""Chains over concatenations, in strips: regions that read a concatenation of which others of their chain store a part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
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
from tests.interpreted import check_interpreted
from tests.test_branched_chains import DRAWS, Dense, Elan, Inception, Partial, checked_in_strips, lowered_apart, some
from tests.test_chains import X86, conv, graph_of
from tests.test_trips import sized
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Region, Unsuitable
from tilewright.ir.stage import MEMORY, Edge
from tilewright.kernels.schema import USUAL
from tilewright.partition.apart import parts_of
from tilewright.partition.canonical import canonical
from tilewright.partition.canonical import key_of as canonical_key
from tilewright.partition.chain_kernel import StripSchedule, chain_of
from tilewright.partition.merges import Memory
from tilewright.partition.paths import Section, Uses, sections
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import lay_out
from tilewright.partition.reuse import kernels_of_images, lowered_once
from tilewright.partition.strip_judge import StripJudge
from tilewright.partition.tile_cuts import cut_along
from tilewright.partition.without_kernels import through_torch
from tilewright.runtime import artifact
from tilewright.tuning import serialisation
from tilewright.tuning.problems import key_of
from tilewright.tuning.records import Records
from tilewright.tuning.tuning import from_records, recorded_as, recorded_chains, tune


class Normalised(nn.Module):
    """Dense layers as in DenseNet: each concatenation is scaled, which is a map of its own, before a layer reads it."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.first = conv(3, channels)
        widths = [channels + growth * layer for layer in range(layers)]
        self.scale = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.narrow = nn.ModuleList(conv(width, 16) for width in widths)
        self.grown = nn.ModuleList(nn.Conv2d(16, growth, 3, 1, 1) for _ in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for scale, narrow, grown in zip(self.scale, self.narrow, self.grown, strict=True):
            x = torch.cat([x, grown(narrow(torch.relu(scale(x))))], 1)
        return x * 2


class Ghost(nn.Module):
    """Half of a value is a depthwise convolution of the other half, which the next layer reads too (GhostNet)."""

    def __init__(self, channels: int, size: int = 3) -> None:
        super().__init__()
        self.primary, self.cheap = conv(8, channels), conv(channels, channels, size, 1, size // 2, channels)
        self.last = conv(2 * channels, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.primary(x)
        result: torch.Tensor = self.last(torch.cat([x, self.cheap(x)], 1))
        return result


class Fire(nn.Module):
    """Both parts of a concatenation are layers of one value, and a layer reads it (SqueezeNet)."""

    def __init__(self, channels: int, first: int = 1, second: int = 3) -> None:
        super().__init__()
        self.narrow, self.last = conv(8, 16), conv(2 * channels, 8)
        self.a, self.b = (conv(16, channels, size, 1, size // 2) for size in (first, second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(x)
        result: torch.Tensor = self.last(torch.cat([self.a(x), self.b(x)], 1))
        return result


class Mixed(nn.Module):
    """Groups of channels have filters of several sizes (MixNet)."""

    def __init__(self, sizes: Sequence[int] = (3, 5)) -> None:
        super().__init__()
        self.wide, self.last = conv(8, 16 * len(sizes)), conv(16 * len(sizes), 8)
        self.each = nn.ModuleList(conv(16, 16, size, 1, size // 2, 16) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [layer(part) for layer, part in zip(self.each, self.wide(x).split(16, 1), strict=True)]
        result: torch.Tensor = self.last(torch.cat(parts, 1))
        return result


class Scaled(nn.Module):
    """What a layer reads is also added to what another one computes of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.whole, self.last = conv(8, 16, 3, 1, 1), conv(8, 16), conv(32, 16), conv(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        result: torch.Tensor = self.last(self.whole(torch.cat([a, b], 1)) + b)
        return result


class Returned(Ghost):
    """The concatenation is a result of the model too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = self.primary(x)
        both = torch.cat([x, self.cheap(x)], 1)
        return both, self.last(both)


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dense block": (Dense(16, 16, 3), (1, 3, 9, 8)),
    "dense block of images": (Dense(16, 8, 3), (3, 3, 9, 8)),
    "normalised": (Normalised(16, 16, 3), (2, 3, 8, 9)),
    "narrow parts": (Normalised(12, 9, 3), (1, 3, 9, 7)),
    "concatenated results": (Elan(), (2, 8, 10, 9)),
    "inception": (Inception(), (1, 3, 10, 9)),
    "ghost": (Ghost(16), (1, 8, 12, 9)),
    "fire": (Fire(16), (1, 8, 11, 9)),
    "fire of images": (Fire(24, 3, 5), (2, 8, 11, 9)),
    "mixed": (Mixed(), (2, 8, 13, 9)),
    "returned": (Returned(16), (2, 8, 12, 9)),
    "part added": (Scaled(), (1, 8, 12, 9)),
}


def of_concatenations(problems: Sequence[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.region.wholes]


@pytest.mark.in_turns(11)
@DRAWS
@pytest.mark.parametrize("name", CASES)
def test_strips_compute_what_separate_kernels_do(name: str, seeds: range) -> None:
    """The interpreter reports rows that two workers store, or that one reads and another stores."""
    assert of_concatenations(checked_in_strips(name, *CASES[name], seeds, 0.9)), "no chain over a concatenation was made"


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("name", ["normalised", "narrow parts", "ghost", "fire", "part added"])
def test_strips_on_this_machine(name: str) -> None:
    module, shape = CASES[name]
    torch.manual_seed(0)
    with some(0, 1.0) as taken:
        executable = tilewright.compile(module.eval(), (torch.randn(shape),), "native", threads=2)
    assert of_concatenations(taken)
    poison(executable)
    for _ in range(2):
        fresh = torch.randn(shape)
        compare(Case(name, module, (fresh,)), executable(fresh), (fresh,))
    assert executable.verify(fresh).passed


class Drawn(nn.Module):
    """Layers that each read a concatenation of some results before them, of any widths; the last one reads all that nothing else reads."""

    def __init__(self, layers: Sequence[tuple[str, int, frozenset[int]]], first: int) -> None:
        super().__init__()
        self.first, self.read = conv(8, first), []
        widths, unread, made = [first], {0}, []
        for kind, width, back in layers:
            read = sorted({max(len(widths) - 1 - distance, 0) for distance in back})
            channels = sum(widths[at] for at in read)
            made.append({"pointwise": conv(channels, width), "square": conv(channels, width, 3, 1, 1), "pool": nn.MaxPool2d(3, 1, 1)}[kind])
            unread = (unread - {*read}) | {len(widths)}
            widths.append(channels if kind == "pool" else width)
            self.read.append(read)
        self.layers, self.rest = nn.ModuleList(made), sorted(unread)
        self.last = conv(sum(widths[at] for at in self.rest), 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = [self.first(x)]
        for layer, read in zip(self.layers, self.read, strict=True):
            known.append(layer(torch.cat([known[at] for at in read], 1)))
        result: torch.Tensor = self.last(torch.cat([known[at] for at in self.rest], 1))
        return result


random_layers = st.lists(
    st.tuples(
        st.sampled_from(["pointwise", "pointwise", "square", "pool"]), st.sampled_from([8, 9, 12, 16, 20]), st.frozensets(st.integers(0, 3), min_size=1, max_size=3)
    ),
    min_size=2,
    max_size=5,
)  # fmt: skip


@settings(max_examples=draws(15), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(random_layers, st.sampled_from([8, 12, 17]), st.integers(1, 2), st.integers(4, 11), st.integers(5, 9), st.integers(0, 2**31))
def test_random_concatenations(layers: Any, first: int, batch: int, height: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    with some(seed, 0.9):
        check_interpreted([Case("drawn", Drawn(layers, first), (torch.randn(batch, 8, height, width),))], machine(X86), 1 + seed % 3)


def ordered(module: nn.Module, *inputs: torch.Tensor) -> tuple[Uses, list[Section]]:
    graph = graph_of(module.eval(), *inputs)
    uses = Uses(graph, lay_out(graph))
    return uses, sections(uses, 3)


def of_wholes(uses: Uses, found: Sequence[Section]) -> list[tuple[Region, ...]]:
    return [segment for section in found for segment in map(section.of, section.segments) if uses.wholes(segment)]


def test_only_readers_of_their_own_rows_are_joined_with_parts() -> None:
    """A window would read rows of a part that other strips store; a layer that skips rows would leave some of the part uncomputed."""
    uses, found = ordered(Scaled(), torch.randn(1, 8, 12, 9))
    assert of_wholes(uses, found)
    uses, found = ordered(Partial(), torch.randn(1, 8, 12, 9))
    assert not of_wholes(uses, found)
    skipping = Fire(16)
    skipping.last = conv(32, 8, 1, 2)
    uses, found = ordered(skipping, torch.randn(1, 8, 12, 9))
    assert not of_wholes(uses, found)


def test_one_buffer_holds_what_a_chain_reads_and_stores() -> None:
    """Values inside of the concatenation are there too; of two concatenations that share a part neither is the other's place."""
    uses, found = ordered(Scaled(), torch.randn(1, 8, 12, 9))
    assert {tuple(uses.wholes(segment) or ()) for segment in of_wholes(uses, found)} >= {("relu", "relu_1")}

    class Twice(Dense):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            y = torch.cat([x, self.grown[0](self.narrow[0](x))], 1)
            z = torch.cat([y, self.grown[1](self.narrow[1](y))], 1)
            result: torch.Tensor = self.narrow[2](z)
            return result

    uses, found = ordered(Twice(16, 16, 3), torch.randn(1, 3, 8, 8))
    by_name = {region.outputs[0]: region for region in uses.laid_out.regions}
    part = next(name for name in uses.parts["cat"] if name in by_name and len(by_name[name].nodes) and "conv2d_2" in by_name[name].nodes[0].name)
    both = [by_name[part], *(region for region in uses.laid_out.regions if {*region.inputs} & {"cat", "cat_1"})]
    assert len(both) == 3 and uses.wholes(both) is None and not uses.may_join(both)


def drawn_problem(name: str) -> Problem:
    """A chain over a concatenation."""
    module, shape = CASES[name]
    with some(0, 1.0) as taken:
        plan_program(graph_of(module.eval(), torch.randn(shape)), machine(X86), 1)
    return of_concatenations(taken)[0]


@pytest.mark.parametrize("name", ["narrow parts", "part added"])
def test_a_canonical_chain_keeps_where_a_part_is(name: str) -> None:
    problem = drawn_problem(name)
    assert canonical(problem).problem.layouts == problem.layouts
    for part, whole in problem.region.wholes:
        own, place = problem.layouts[part], problem.place_of(part)
        assert own == problem.layouts[whole].part(own.shape, [at.start for at in place]) or problem.layouts[whole].around
        assert [at.stop - at.start for at in place] == list(own.shape)


def test_problems_that_store_parts_elsewhere_differ() -> None:
    problem = drawn_problem("narrow parts")
    other = replace(problem, region=replace(problem.region, wholes=()))
    assert key_of(problem) != key_of(other) and canonical_key(problem) != canonical_key(other)
    memory = Memory()
    lowered_once(memory, problem, None, lambda: StripJudge(machine(X86), 1, USUAL).lower(problem, StripSchedule(1, 1, 2)))
    assert kernels_of_images(memory, problem) is not None and kernels_of_images(memory, other) is None
    again = serialisation.decode(serialisation.encode(problem))
    assert again.region.wholes == problem.region.wholes and key_of(again) == key_of(problem)


def test_strips_that_need_rows_of_one_another_are_refused() -> None:
    """As of a part that a window reads besides."""
    uses, _ = ordered(Ghost(16), torch.randn(1, 8, 12, 9))
    line, graph = uses.order, uses.graph
    assert uses.may_join(line) and {*(uses.wholes(line) or {}).values()} == {"cat"}
    problem = canonical(Problem(uses.chain(line), uses.laid_out.layouts, uses.laid_out.values, frozenset(graph.constants))).problem
    with pytest.raises(Unsuitable, match="its strips need rows of one another of value"):
        _ = chain_of(problem, 2).tiled


def test_blocks_of_a_gpu_are_refused() -> None:
    with pytest.raises(Unsuitable, match="is read as a part of value"):
        cut_along(drawn_problem("fire"))


def test_edges_pass_parts_through_memory(tmp_path: Path) -> None:
    with some(0, 1.0), mock.patch.object(random.Random, "choice", lambda source, found: found[1]):
        executable = tilewright.compile(Elan().eval(), (torch.randn(1, 8, 12, 10),), X86, threads=1)
    executable.save(tmp_path / "chain.tw")
    flows = [row.flow for row in executable.plan.rows]
    size = 4 * 16 * 12 * 10
    assert (Edge(0, 1, MEMORY, size), Edge(0, None, MEMORY, size)) in [flow.edges for flow in flows]
    assert [region.flow for region in artifact.read(tmp_path / "chain.tw").program.regions] == flows


@pytest.mark.parametrize("name", ["dense block", "ghost"])
def test_any_number_of_images(name: str) -> None:
    module, shape = CASES[name]
    with some(0, 1.0) as taken:
        executable = sized(module.eval(), torch.randn(2, *shape[1:]))
        for batch in (2, 3, 1, 4):
            check(module, executable, torch.randn(batch, *shape[1:]))
    assert of_concatenations(taken)


@pytest.mark.parametrize("name", ["narrow parts", "fire", "part added"])
def test_regions_apart_compute_the_same(name: str) -> None:
    """What trials measure such a chain against."""
    module, shape = CASES[name]
    with some(0, 1.0), mock.patch.object(StripJudge, "lower", lowered_apart):
        check_interpreted([Case(name, module, (torch.randn(shape),))], machine(X86), 2)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("name", ["narrow parts", "part added"])
def test_trials_check_both_ways(name: str, tmp_path: Path) -> None:
    """Values that share memory do so in trials too."""
    native, problem = machine("native"), drawn_problem(name)
    with Records(tmp_path / "records.sqlite") as records:
        done = tune([*parts_of(problem), problem], native, 2, records)
        assert done.failed == 0
        found = [entry for entry in records.standing(key_of(problem), recorded_as(native, 1)) if entry.status == "measured"]
        assert {entry.description[:5] == "apart" for entry in found} == {False, True}
        decided = recorded_chains(records)(problem, native, 1, from_records(records))
        assert decided is not None and decided.seconds > 0 < decided.apart


@pytest.mark.parametrize("name", ["normalised", "fire", "part added"])
def test_such_chains_can_run_through_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their kernels do not compile: the concatenation that they read is not in memory before."""

    def without_chains(*arguments: Any, **keywords: Any) -> Program:
        program = plan_program(*arguments, **keywords)
        return through_torch(program, {at: ["tried"] for at, part in enumerate(program.regions) if part.region.wholes})

    monkeypatch.setattr(import_module("tilewright.compile"), "plan_program", without_chains)
    module, shape = CASES[name]
    with some(0, 1.0):
        executable = tilewright.compile(module.eval(), (torch.randn(shape),), "native", threads=2)
    assert any(row.kind == "torch" for row in executable.plan.rows)
    poison(executable)
    for _ in range(2):
        fresh = torch.randn(shape)
        compare(Case(name, module, (fresh,)), executable(fresh), (fresh,))
    assert executable.verify(fresh).passed
