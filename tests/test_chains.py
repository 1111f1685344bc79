"""Chains of regions in strips: what a strip needs, the partition search, and the kernels against PyTorch in float64 and in the interpreter."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.compiled import Case
from tests.draws import draws
from tests.interpreted import check_interpreted, run_program
from tests.stand_ins import merges_of
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.cpu.rates import reread_bandwidth
from tilewright.kernels.schema import USUAL
from tilewright.partition import strip_judge
from tilewright.partition.canonical import canonical, key_of
from tilewright.partition.chain_kernel import StripSchedule, chain_of
from tilewright.partition.merges import Merge
from tilewright.partition.paths import joined
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import lay_out
from tilewright.partition.strip_judge import Parts, StripJudge, Strips
from tilewright.partition.strips import Rows, dims_of
from tilewright.report.explanation import explanation
from tilewright.selection.bounds import ARITHMETIC
from tilewright.stages import Stages
from tilewright.text import seconds_text

X86 = "x86-avx2"


def graph_of(module: nn.Module, *inputs: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(module.eval(), list(inputs)).graph)[0]


def chain_problem(module: nn.Module, *inputs: torch.Tensor) -> Problem:
    """The canonical chain of all regions of a module."""
    graph = graph_of(module, *inputs)
    laid_out = lay_out(graph)
    regions = [region for region in laid_out.regions if region.nodes]
    return canonical(Problem(joined(regions), laid_out.layouts, laid_out.values, frozenset(graph.constants))).problem


def no_bound(judge: StripJudge, problem: Problem, alone: Sequence[float]) -> float:
    """In place of `StripJudge.least`."""
    return 0.0


@contextmanager
def always(rows: int) -> Iterator[list[tuple[str, ...]]]:
    """Inside the context every chain that is possible is taken, with strips of at most that many rows. Yields the kinds of the taken ones."""
    taken: list[tuple[str, ...]] = []

    def best(judge: StripJudge, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Strips | str:
        for dim in dims_of(problem):
            try:
                chain = chain_of(problem, dim)
            except Unsuitable:
                continue
            found = Strips(StripSchedule(min(rows, chain.height), judge.threads, dim), 1e-12 / len(problem.region.stages), Parts(0.0))
            judge.strips[key_of(problem)] = found
            taken.append(tuple(stage.kind for stage in problem.region.stages))
            return found
        return "no dimension can be cut"

    with mock.patch.multiple(StripJudge, best=best, least=no_bound):
        yield taken


def conv(inputs: int, outputs: int, size: int = 1, stride: int = 1, padding: int = 0, groups: int = 1, dilation: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, padding, dilation, groups), nn.ReLU())


def inverted(channels: int, wide: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(conv(channels, wide), conv(wide, wide, 3, stride, 1, wide), nn.Conv2d(wide, channels, 1))


class Residual(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inside(x)
        return result


class Gated(nn.Module):
    """A second value is read inside the chain, along all rows, one row, or one image."""

    def __init__(self, channels: int, wide: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, outputs, 3, 1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x) + y))
        return result


class OwnWeights(nn.Module):
    """Each image has its own matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 24, 40)), nn.Parameter(torch.randn(3, 40, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.relu(torch.bmm(x, self.a)), self.b)


CASES = {
    "inverted residual": (Residual(inverted(16, 32)), (1, 16, 9, 11), 4),
    "inverted, stride 2": (inverted(16, 32, 2), (2, 16, 13, 10), 2),
    "convolutions with halos": (nn.Sequential(conv(3, 8, 3, 1, 1), conv(8, 20, 3, 1, 1), conv(20, 7, 5, 2, 2)), (1, 3, 17, 9), 3),
    "dilated": (nn.Sequential(conv(4, 16, 3, 1, 2, 1, 2), conv(16, 16, 3, 1, 3, 16, 3)), (1, 4, 12, 12), 5),
    "without padding": (nn.Sequential(conv(8, 16, 3), conv(16, 8, 3), conv(8, 8, 3)), (2, 8, 15, 15), 2),
    "strides that skip rows": (nn.Sequential(conv(8, 16), conv(16, 16, 1, 3), conv(16, 8, 1, 2)), (1, 8, 23, 19), 2),
    "maximum pooling": (nn.Sequential(conv(3, 16, 3, 1, 1), nn.MaxPool2d(3, 2, 1)), (1, 3, 14, 12), 3),
    "average pooling": (nn.Sequential(conv(3, 16, 3, 1, 1), nn.AvgPool2d(2)), (1, 3, 14, 12), 3),
    "whole images": (inverted(16, 16), (5, 16, 6, 6), 6),
    "one row": (inverted(16, 16), (1, 16, 6, 6), 1),
    "matrix products": (nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 12)), (19, 24), 4),
    "products and rows": (nn.Sequential(nn.Linear(24, 600), nn.LayerNorm(600), nn.Linear(600, 12)), (2, 19, 24), 4),
    "signals": (nn.Sequential(nn.Conv1d(4, 16, 5, 1, 2), nn.ReLU(), nn.Conv1d(16, 8, 3, 2, 1)), (2, 4, 33), 6),
    "volumes": (nn.Sequential(nn.Conv3d(2, 16, 3, 1, 1), nn.ReLU(), nn.Conv3d(16, 4, 3, 1, 1)), (1, 2, 6, 5, 7), 2),
}  # fmt: skip


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_strips_compute_what_separate_kernels_do(name: str, threads: int) -> None:
    module, shape, rows = CASES[name]
    with always(rows) as taken:
        check_interpreted([Case(name, module, (torch.randn(shape),))], machine(X86), threads)
    assert taken, "nothing was merged"


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("name", CASES)
def test_strips_on_this_machine(name: str) -> None:
    module, shape, rows = CASES[name]
    inputs = torch.randn(shape)
    with always(rows) as taken:
        compiled = tilewright.compile(module.eval(), (inputs,), "native", threads=2)
    assert taken and any(region.kind == "chain" for region in compiled.image.program.regions)
    for _ in range(3):
        fresh = torch.randn(shape)
        expected = copy.deepcopy(module).double()(fresh.double())
        torch.testing.assert_close(compiled(fresh).double(), expected, rtol=1e-4, atol=1e-4)


layers = st.tuples(
    st.sampled_from(["pointwise", "depthwise", "square", "pool"]),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 1, 2]),
    st.integers(0, 2),
    st.sampled_from([5, 8, 16, 24]),
)


random_layers = st.lists(layers, min_size=2, max_size=3)


def random_chain(found: list[Any], images: tuple[int, int, int]) -> Case | None:
    """A module of drawn layers on images of (batch, height, width); None if a window is larger than its image."""
    parts: list[nn.Module] = []
    channels = first = 8
    for kind, size, stride, padding, outputs in found:
        padding = min(padding, size // 2)
        if kind == "pointwise":
            parts.append(conv(channels, outputs))
        elif kind == "depthwise":
            parts.append(conv(channels, channels, size, stride, padding, channels))
        elif kind == "square":
            parts.append(conv(channels, outputs, size, stride, padding))
        else:
            parts.append(nn.MaxPool2d(size, stride, padding))
        channels = outputs if kind in ("pointwise", "square") else channels
    module = nn.Sequential(*parts)
    inputs = torch.randn(images[0], first, *images[1:])
    try:
        return None if 0 in module(inputs).shape else Case("random", module, (inputs,))
    except RuntimeError:
        return None


@settings(max_examples=draws(8), deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(random_layers, st.integers(1, 3), st.integers(7, 16), st.integers(5, 12), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**31))
def test_random_chains(found: list[Any], batch: int, height: int, width: int, rows: int, threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    case = random_chain(found, (batch, height, width))
    if case is not None:
        with always(rows):
            check_interpreted([case], machine(X86), threads)


def test_rows_that_a_window_needs() -> None:
    assert [Rows(2, 1, -1, 3).needed(count) for count in (1, 4)] == [3, 6]
    assert [Rows(2, 2, -1, 3).needed(count) for count in (1, 4)] == [3, 9]


def test_the_frames_of_an_inverted_residual() -> None:
    chain = chain_of(chain_problem(inverted(16, 32, 2), torch.randn(1, 16, 28, 28)), 2)
    wide, depthwise, narrow = chain.frames(4)
    # four rows of the result need four of the depthwise convolution, and 2 * 3 + 3 of the first, one of which is there from the strip before
    assert (narrow.rows, depthwise.rows, wide.rows) == (4, 4, 9)
    assert (narrow.kept, depthwise.kept, wide.kept) == (0, 0, 1)
    assert wide.advance == 8 and wide.outside and not depthwise.outside


def test_the_bound_is_the_arithmetic_of_the_busiest_worker() -> None:
    """Of twelve rows two workers have six each, and each needs seven of the region before; of one in the middle both."""
    problem = chain_problem(nn.Sequential(conv(8, 16, 3, 1, 1), conv(16, 16, 3, 1, 1)), torch.randn(1, 8, 12, 12))
    first, second = (stage.flops() for stage in problem.region.stages)
    target = machine(X86)
    thread = target.peak_flops["fp32"] / target.processors
    for threads, flops in ((1, first + second), (2, 7 / 12 * first + 6 / 12 * second)):
        bounds = StripJudge(target, threads, USUAL).lower(problem, StripSchedule(3, threads, 2)).bounds
        assert bounds == {ARITHMETIC: pytest.approx(flops / thread)}


def test_strips_of_single_images_have_a_bound_for_one_image_too() -> None:
    """The schedule is that of several images, which planning takes from another size."""
    problem = chain_problem(nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 8, 1)), torch.randn(1, 16, 9, 9))
    assert 0 not in dims_of(problem)
    target = machine(X86)
    bounds = StripJudge(target, 2, USUAL).lower(problem, StripSchedule(1, 2, 0)).bounds
    assert bounds == {ARITHMETIC: pytest.approx(problem.region.flops() / (target.peak_flops["fp32"] / target.processors))}


def test_a_chain_needs_rows() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 16, 1), nn.Conv2d(12, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(torch.relu(self.first(x)).permute(0, 2, 1, 3))  # sums over what were rows
            return result

    problem = chain_problem(Turned(), torch.randn(1, 8, 12, 16))
    for dim in dims_of(problem)[:2]:
        with pytest.raises(Unsuitable):
            chain_of(problem, dim)


def plan(module: nn.Module, *inputs: torch.Tensor, threads: int = 1) -> Program:
    return plan_program(graph_of(module, *inputs), machine(X86), threads)


def test_the_partition_is_that_of_least_predicted_time() -> None:
    """Pairs gain nothing, three regions together do."""
    module = nn.Sequential(conv(16, 32), conv(32, 32, 3, 1, 1, 32), conv(32, 16), conv(16, 32, 3, 1, 1))
    gains = {3: 0.5}

    def best(judge: StripJudge, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Strips | str:
        kinds = [stage.kind for stage in problem.region.stages]
        seconds = sum(alone) * (gains.get(len(kinds), 1.1) if kinds[1] == "window" else 1.1)
        judge.strips[key_of(problem)] = Strips(StripSchedule(2, 1, 2), seconds, Parts(0.0))
        return judge.strips[key_of(problem)]

    with mock.patch.multiple(StripJudge, best=best, least=no_bound):
        program = plan(module, torch.randn(1, 16, 12, 12))
    kinds = [lowered.region.kind for lowered in program.regions if lowered.region.nodes]
    assert kinds == ["chain", "contraction"]
    assert [stage.kind for stage in next(x.region for x in program.regions if x.region.kind == "chain").stages] == [
        "contraction",
        "window",
        "contraction",
    ]
    decisions = merges_of(program)
    assert sum(decision.taken for decision in decisions) == 1
    assert sum(not decision.taken for decision in decisions) >= 3
    assert all("predicted" in decision.text or "cannot" in decision.text for decision in decisions)


@pytest.mark.parametrize(("pairs", "said"), [(0.9, "merges that exclude it gain more"), (0.995, "gains less than 1%"), (1.1, None)])
def test_merges_that_are_not_taken_although_they_gain_say_why(pairs: float, said: str | None) -> None:
    module = nn.Sequential(conv(16, 32), conv(32, 32, 3, 1, 1, 32), conv(32, 16))

    def best(judge: StripJudge, problem: Problem, alone: Sequence[float], most: float, before: object = None) -> Strips | str:
        share = 0.5 if len(problem.region.stages) == 3 else pairs
        judge.strips[key_of(problem)] = Strips(StripSchedule(2, 1, 2), share * sum(alone), Parts(0.0))
        return judge.strips[key_of(problem)]

    with mock.patch.object(StripJudge, "best", best):
        decisions = merges_of(plan(module, torch.randn(1, 16, 12, 12)))
    (taken,) = (decision for decision in decisions if decision.taken)
    refused = [decision for decision in decisions if not decision.taken]
    assert taken.text.endswith("apart") and refused
    assert all(decision.text.endswith(f"apart; {said}" if said else "apart") for decision in refused)


def test_results_that_others_read_are_stored() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = conv(8, 16), conv(16, 16, 3, 1, 1, 16), conv(16, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inside = self.a(x)
            return self.c(self.b(inside)), inside

    with always(3):
        program = plan(Branches(), torch.randn(1, 8, 12, 12))
    (chain,) = [lowered.region for lowered in program.regions if lowered.region.kind == "chain"]
    assert [stage.kind for stage in chain.stages] == ["window", "contraction"]


def test_a_chain_is_saved_and_loaded(tmp_path: Any) -> None:
    module, x = inverted(16, 32).eval(), torch.randn(1, 16, 12, 12)
    with always(4):
        compiled = tilewright.compile(module, (x,), "native", threads=2)
    expected = compiled(x)
    assert "strips of 4 rows" in str(compiled.plan)
    compiled.save(tmp_path / "chain.tw")
    assert torch.equal(tilewright.load(tmp_path / "chain.tw")(x), expected)


def test_a_constant_that_strips_pack_in_two_ways_is_saved(tmp_path: Any) -> None:
    module, x = nn.Sequential(conv(8, 24), conv(24, 24, 3, 1, 1, 24), conv(24, 24)).eval(), torch.randn(1, 8, 13, 13)
    with always(2):
        compiled = tilewright.compile(module, (x,), X86, threads=1)
    assert any(name.endswith(".1") for name in compiled.image.program.storage), "single rows are packed as the others are"
    compiled.save(tmp_path / "chain.tw")


def test_a_chain_that_does_not_compile_runs_through_pytorch() -> None:
    from tilewright.partition.without_kernels import without_kernels

    module, x = inverted(16, 32).eval(), torch.randn(1, 16, 12, 12)
    with always(4):
        program = plan(module, x)
    (chain,) = [lowered for lowered in program.regions if lowered.region.kind == "chain"]
    replaced = without_kernels(program, {chain.kernels[0].name: "refused"})
    (region,) = [lowered.region for lowered in replaced.regions if lowered.region.kind == "torch"]
    assert {node.operator for node in region.nodes} >= {"convolution", "relu"}


def test_predictions_decide_and_are_told() -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), inverted(16, 96, 2))
    program = plan_program(graph_of(module, torch.randn(1, 3, 224, 224)), machine("x86-avx512"), 1)
    assert any("predicted" in decision.text and "apart" in decision.text for decision in program.search)
    for lowered in program.regions:
        if lowered.region.kind == "chain":
            assert lowered.predicted_seconds > 0
            assert any("in strips of" in reason for reason in lowered.region.reasons)
            (apart,) = lowered.comparison.others
            assert (
                lowered.comparison.schema == "strips" and apart.predicted_seconds is not None and apart.predicted_seconds > lowered.predicted_seconds
            )


def test_a_depthwise_filter_of_one_element_is_no_attention() -> None:
    program = plan(nn.Sequential(conv(8, 8), conv(8, 8, groups=8)), torch.randn(3, 8, 8, 6))
    assert all(lowered.region.kind != "torch" for lowered in program.regions)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("target", [X86, "h200"])
def test_repeated_blocks_are_ranked_once(target: str) -> None:
    """The regions of equal blocks, their merges and the parts of their chains: a longer network ranks no more candidates."""

    def ranked(blocks: int) -> tuple[int, int]:
        counted = [0]
        stages = Stages(lambda stage, done, total: counted.append(done) if stage == "choice" else None)
        graph = graph_of(nn.Sequential(*(Residual(inverted(16, 64)) for _ in range(blocks))), torch.randn(1, 16, 14, 14))
        program = plan_program(graph, machine(target), 1, chains=True, stages=stages)
        return counted[-1], len(program.search)

    (few, merges), (many, more) = ranked(3), ranked(6)
    assert few == many > 0 and more > merges > 0


def test_the_search_is_explained(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tilewright.cli import main

    module, x = inverted(16, 32).eval(), torch.randn(1, 16, 12, 12)
    with always(4):
        tilewright.compile(module, (x,), X86, threads=2).save(tmp_path / "chain.tw")
    assert main(["explain", str(tmp_path / "chain.tw"), "--fusion"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 taken" in text and "refused: " in text and "in strips of 4 rows" in text and "apart" in text
    assert main(["explain", str(tmp_path / "chain.tw"), "--fusion", "--code"]) != 0


def test_a_chain_is_explained_with_its_terms_and_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are the sum of the terms, of which the saved ones are negative."""
    monkeypatch.setattr(Merge, "gain", property(lambda merge: float(len(merge.results)) if merge.way is not None else 0.0))
    module, x = inverted(16, 32), torch.randn(1, 16, 56, 56)
    executable = tilewright.compile(module.eval(), (x,), X86, threads=2)
    (row,) = executable.plan.rows
    assert sum(row.terms.values()) == pytest.approx(row.predicted_seconds) and row.terms["starts"] < 0 < row.terms["strips"]
    assert 0 < row.bounds[ARITHMETIC] < row.predicted_seconds
    text = explanation(executable.image)
    assert f"predicted: strips {seconds_text(row.terms['strips'])}, " in text and f"({ARITHMETIC})" in text


@pytest.mark.parametrize("shape", [(2, 16, 14, 13), (1, 16, 14, 13), (2, 16, 1, 13), (2, 16, 1, 1)], ids=str)
def test_other_values_are_read_at_the_row_of_the_image(shape: tuple[int, ...]) -> None:
    with always(3) as taken:
        check_interpreted([Case("gated", Gated(8, 16, 8), (torch.randn(2, 8, 14, 13), torch.randn(shape)))], machine(X86), 2)
    assert taken


def test_constants_of_each_image_are_not_those_of_the_first() -> None:
    module, x = OwnWeights().eval(), torch.randn(3, 20, 24)
    with always(3):
        compiled = tilewright.compile(module, (x,), "native", threads=2)
    torch.testing.assert_close(compiled(x).double(), copy.deepcopy(module).double()(x.double()), rtol=1e-4, atol=1e-4)


def test_tile_registers_work_in_strips() -> None:
    """Their kernels bind variables of many names."""
    torch.manual_seed(0)
    module, x = nn.Sequential(conv(64, 128), conv(128, 64)), torch.randn(1, 64, 14, 12)
    with always(3) as taken:
        program = plan_program(graph_of(module, x), machine("xeon-sapphire-rapids"), 2, precision="bf16")
    assert taken and any("tile registers" in lowered.schedule or "amx" in lowered.schedule.lower() for lowered in program.regions)
    (output,), (given,) = program.graph.outputs, program.graph.inputs
    results, faults = run_program(program, {given: x.numpy()})
    assert not faults
    expected = copy.deepcopy(module).double()(x.double()).detach()
    assert (torch.from_numpy(results[output]).double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_nothing_to_compute_is_not_merged() -> None:
    module = nn.Sequential(conv(3, 8, 3, 1, 1), conv(8, 8)).eval()
    assert tilewright.compile(module, (torch.randn(0, 3, 8, 8),), "native", threads=2)(torch.randn(0, 3, 8, 8)).shape == (0, 8, 8, 8)


@pytest.mark.parametrize("name", ["inverted residual", "inverted, stride 2", "convolutions with halos", "dilated", "maximum pooling", "signals"])
def test_a_worker_alone_is_predicted_to_compute_every_row_once(name: str) -> None:
    """Rows that do not exist are not counted, nor rows that the strip before left; a second worker computes some again, but not half of all."""
    module, shape, _ = CASES[name]
    chain = chain_of(chain_problem(module, torch.randn(shape)), 2)
    for rows in range(1, chain.height):
        tasks = math.prod(chain.outer) * -(-chain.height // rows)
        for number, frame in enumerate(chain.frames(rows)):
            every = math.prod(chain.outer) * chain.extent(number)
            assert strip_judge._most(chain, rows, tasks, frame, chain.extent(number), float) == (every, every)
            half, seconds = strip_judge._most(chain, rows, -(-tasks // 2), frame, chain.extent(number), float)
            assert every / 2 <= half == seconds <= every


def test_results_stay_in_a_cache_with_what_passes_beside_them() -> None:
    """A result is stored for nothing while a thread's second-level cache holds it; beyond, it comes from level 3 or memory with what is beside it."""
    here = machine("x86-avx512")
    level_2, level_3 = (here.cache(level) for level in (2, 3))
    assert level_2 is not None and level_3 is not None
    near, far = level_2.bytes // 2, level_3.bytes // 4
    assert strip_judge.between_kernels(near, 2 * level_3.bytes, here, 1) == 0 == strip_judge.between_kernels(2 * near, 0, here, 2)
    assert strip_judge.between_kernels(near + 64, 0, here, 1) > 0
    alone, beside = (strip_judge.between_kernels(far, other, here, 1) for other in (0, level_3.bytes))
    assert beside == 2 * far / here.memory_bandwidth and alone == 2 * far / reread_bandwidth(here, far, 1)


def test_strips_of_few_rows_move_rows_of_their_tiles() -> None:
    """Strips move the rows that the next strip needs too: halving the bandwidth to level 2 costs strips of one row more than those of many."""
    problem = chain_problem(nn.Sequential(conv(32, 32, 5, 1, 2, 32), conv(32, 32, 5, 1, 2, 32)), torch.randn(1, 32, 64, 64))
    here = machine("x86-avx512")
    slow = replace(here, caches=tuple(replace(cache, bandwidth=cache.bandwidth / (2 if cache.level == 2 else 1)) for cache in here.caches))

    def seconds(target: Machine) -> dict[int, float]:
        ranked = StripJudge(target, 1, USUAL).ranked(problem, [1e-4, 1e-4])
        assert not isinstance(ranked, str)
        return {strips.schedule.rows: strips.seconds for strips in ranked}

    fast, halved = seconds(here), seconds(slow)
    assert halved[2] - fast[2] > halved[16] - fast[16] > 0
