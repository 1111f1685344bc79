"""Choosing CPU schedules by their code: terms, scores, which candidates are compiled, and that the chosen kernel is compiled only once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bench import cpu_score
from tilewright.analysis.cpu.assembly import disassembled
from tilewright.compile import source_files
from tilewright.errors import InternalFault, KernelFailed
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import catalogue, machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import USUAL
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import choose, rank
from tilewright.selection.code_score import code_terms, coefficients_of, linear
from tilewright.selection.ranking import Choice
from tilewright.toolchain.cache import KernelCache, kernel_key
from tilewright.toolchain.compilers import CCompiler
from tilewright.tuning import choices, code_choice, serialisation
from tilewright.tuning.code_choice import BY_CODE, FAVOURITES, MARGIN, best, compiled, printed, reads_code
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.tuning import chooser_for

TARGETS = ("x86-avx512", "x86-avx2", "neoverse-n1", "cortex-a53")
PROBLEM = convolution_problem(48, 20, 9, 11, 3)
UNDECIDED = convolution_problem(64, 64, 14, 14, 1)
"""The first candidates of the models for x86-avx512 are close, direct, and different kernels."""


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small problems worth analysing too."""
    monkeypatch.setattr(code_choice, "WORTH_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_READ_CODE", "1")
    return tmp_path


def need(target: Machine) -> None:
    missing = [tool for tool in (f"{target.target_triple}-gcc", f"{target.target_triple}-objdump") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def terms_of(problem: Problem, target: Machine, choice: Choice, threads: int) -> dict[str, float]:
    kernels = printed(problem, choice, target)
    binaries = compiled({choice.schedule: kernels}, target)
    return code_terms([(kernel, disassembled(binaries[kernel.name].path, target)) for kernel in kernels], target, threads)  # type: ignore[union-attr]


def never(*_: object) -> None:
    raise AssertionError("compiled")


@pytest.mark.parametrize("name", TARGETS)
def test_terms(name: str) -> None:
    """Multiply-adds bound the pipeline from below; two threads have half of the work each and the same dispatch."""
    target = machine(name)
    need(target)
    choice = rank(PROBLEM, target, threads=2).first()
    alone, both = (terms_of(PROBLEM, target, choice, threads) for threads in (1, 2))
    least = 48 * 20 * 9 * 11 * 9 * 2 / (target.peak_flops["fp32"] / target.processors)
    assert alone["multiply-adds"] >= 0.2 * least  # Winograd's algorithm needs at least a fourth of the products
    assert alone["pipeline"] >= 0.99 * alone["multiply-adds"]
    assert 0.4 * alone["pipeline"] < both["pipeline"] < 0.9 * alone["pipeline"] and both["dispatch"] == alone["dispatch"]
    assert all(value >= 0 for value in alone.values()) and alone["memory"] > 0
    known = coefficients_of(target.architecture)
    assert set(known) <= set(alone) | {"level 3"} and all(value >= 0 for value in known.values())
    assert linear(alone, {"pipeline": 2.0, "nothing": 5.0}) == pytest.approx(2 * alone["pipeline"])


@pytest.mark.usefixtures("worth")
def test_the_best_score_among_the_favourites() -> None:
    target = machine("x86-avx512")
    need(target)
    ranking = rank(UNDECIDED, target, threads=2)
    favourites = list(islice(ranking, 3))
    coefficients = coefficients_of(target.architecture)
    scores = [linear(terms_of(UNDECIDED, target, choice, 2), coefficients) for choice in favourites]
    scores[0] *= 1 - MARGIN
    assert best(UNDECIDED, ranking, 2, count=3) == (favourites[scores.index(min(scores))], True)


@pytest.mark.usefixtures("worth")
def test_a_better_score_by_more_than_the_margin_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    target = machine("x86-avx512")
    need(target)
    ranking = rank(UNDECIDED, target, threads=2)
    first, second = islice(ranking, 2)
    for share, wanted in ((0.98 - MARGIN, replace(second, notes=(BY_CODE,))), (1.02 - MARGIN, first)):
        given = iter((1.0, share))
        monkeypatch.setattr(code_choice, "score_of", lambda *_, given=given: next(given))
        assert best(UNDECIDED, ranking, 2) == (wanted, True)


@pytest.mark.usefixtures("worth")
def test_the_models_decide_where_code_cannot_be_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, one that fails, and code that cannot be followed."""
    target = machine("x86-avx512")
    ranking = rank(UNDECIDED, target, threads=2)
    failing = cache / "failing-x86_64-cc"
    failing.write_text("#!/bin/sh\ncase $1 in --version) echo 1.0; exit;; esac\nexit 1\n")
    failing.chmod(0o755)
    for compiler in (cache / "missing-x86_64-cc", failing):
        with monkeypatch.context() as patch:
            patch.setenv("TILEWRIGHT_CC", str(compiler))
            assert best(UNDECIDED, ranking, 2) == (ranking.first(), True)
    need(target)

    def unreadable(*_: object) -> None:
        raise KernelFailed("it cannot be read")

    monkeypatch.setattr(code_choice, "disassembled", unreadable)
    assert best(UNDECIDED, ranking, 2) == (ranking.first(), True)
    assert not reads_code(machine("h200"))
    assert all(reads_code(entry) for entry in catalogue().values() if not entry.is_gpu)


def test_a_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A different number of threads makes another choice."""
    target = machine("x86-avx512")
    problem = convolution_problem(16, 8, 5, 5, 3)
    chooser = choices.remembered(USUAL, by_code=True)
    first = chooser(problem, target, 2)
    monkeypatch.setattr(choices, "best", never)
    assert chooser(problem, target, 2) == first
    with pytest.raises(AssertionError, match="compiled"):
        chooser(problem, target, 1)


@pytest.mark.usefixtures("worth")
def test_a_choice_on_the_way_to_which_something_hung_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = machine("x86-avx512")
    need(target)
    chooser = choices.remembered(USUAL, by_code=True)
    hanging = cache / "hanging-x86_64-cc"
    hanging.write_text("#!/bin/sh\ncase $1 in --version) echo 1.0; exit;; esac\nsleep 1000\n")
    hanging.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("TILEWRIGHT_CC", str(hanging))
        patch.setenv("TILEWRIGHT_COMPILE_SECONDS", "1")
        assert chooser(UNDECIDED, target, 2) == choose(UNDECIDED, target, threads=2)
    assert not (cache / "choices").exists()
    chooser(UNDECIDED, target, 2)
    assert len(list((cache / "choices").iterdir())) == 1


@pytest.mark.parametrize("setting", ["0", "1"])
def test_code_is_read_where_it_is_wanted(worth: None, cache: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("TILEWRIGHT_READ_CODE", setting)
    target = machine("x86-avx512")
    with chooser_for(target, None) as (chooser, _):
        choice = chooser(UNDECIDED, target, 2)
    assert choice.seconds > 0
    assert (cache / "kernels").exists() == (setting == "1")


def test_small_regions_are_left_to_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = rank(PROBLEM, machine("x86-avx512"), threads=2)
    assert ranking.first().seconds < code_choice.WORTH_SECONDS
    monkeypatch.setattr(code_choice, "compiled", never)
    assert best(PROBLEM, ranking, 2) == (ranking.first(), True)


@pytest.mark.usefixtures("worth")
def test_equal_kernels_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = rank(UNDECIDED, machine("x86-avx512"), threads=2)
    first = ranking.first()
    monkeypatch.setattr(code_choice, "compiled", never)
    monkeypatch.setattr(code_choice, "lower_for_images", lambda problem, _, machine: lower(problem, first.schedule, machine))
    assert best(UNDECIDED, ranking, 2) == (first, True)


@pytest.mark.usefixtures("worth")
def test_close_candidates_that_scores_order_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those far behind, nor if all of them are Winograd's."""
    monkeypatch.setattr(code_choice, "compiled", never)
    monkeypatch.setattr(code_choice, "CLOSE", 0.05)

    def asked(target: str, problem: Problem = PROBLEM, scored: bool = False, count: int = FAVOURITES) -> bool:
        ranking = rank(problem, machine(target), threads=2)
        parts = tuple(replace(part, schema=replace(part.schema, scored=part.schema.scored or scored)) for part in ranking.parts)
        try:
            assert best(problem, replace(ranking, parts=parts), 2, count)[0].schedule == ranking.first().schedule
        except InternalFault as error:
            return "AssertionError" in str(error) and "compiled" in str(error)
        return False

    kinds = [choice.schema.name for choice in islice(rank(PROBLEM, machine("neoverse-n1"), threads=2), 99)]
    assert kinds[:FAVOURITES] == ["winograd"] * FAVOURITES
    assert asked("x86-avx512", UNDECIDED) and not asked("neoverse-n1") and asked("neoverse-n1", scored=True)
    monkeypatch.setattr(code_choice, "CLOSE", float("inf"))
    assert asked("neoverse-n1", count=kinds.index("contraction") + 1) and not asked("neoverse-n1", count=kinds.index("contraction"))
    monkeypatch.setattr(code_choice, "CLOSE", -1.0)
    assert not asked("x86-avx512", UNDECIDED)


@pytest.mark.usefixtures("worth")
@pytest.mark.parametrize("faulty", ["printed", "compiled"])
def test_a_fault_in_a_candidate_leaves_the_choice_to_the_models(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_choice, faulty, never)
    ranking = rank(UNDECIDED, machine("x86-avx512"), threads=2)
    with pytest.warns(InternalFault, match="the models decide"):
        assert best(UNDECIDED, ranking, 2) == (ranking.first(), True)


@pytest.mark.usefixtures("worth")
def test_what_is_chosen_is_compiled_once(cache: Path) -> None:
    """The plan's kernel is already in the cache when it is to be built."""
    target = machine("x86-avx512")
    need(target)
    graph, _ = simplify(import_module(nn.Conv2d(64, 64, 1), (torch.randn(1, 64, 14, 14),)).graph)
    program = plan_program(graph, target, 2, choices.remembered(USUAL, by_code=True))
    (source,) = [source for source in source_files(program, target) if source.name.startswith(("contraction", "winograd"))]
    found = KernelCache(cache / "kernels").load(kernel_key(source, CCompiler.find(target)), source, CCompiler.find(target))
    assert found is not None


def test_the_benchmark_fits_and_judges() -> None:
    """Coefficients of an exact combination are found; a perfect order has no loss."""
    generator = np.random.default_rng(3)
    wanted = {"pipeline": 1.5, "memory": 0.25, "starts": 0.0}
    rows = []
    for number in range(40):
        terms = {name: float(generator.uniform(1, 9)) for name in wanted}
        rows.append({"terms": terms, "seconds": linear(terms, wanted), "models": float(number)})
    found = cpu_score.fitted(rows)
    assert found == pytest.approx(wanted, abs=1e-9)
    seconds = np.array([row["seconds"] for row in rows])
    perfect, wrong = cpu_score.judged(rows, seconds, 8), cpu_score.judged(rows, -seconds, 8)
    assert perfect["rank correlation"] == pytest.approx(1) and perfect["top-10 ratio"] == pytest.approx(1) and perfect["loss"] == 0
    assert perfect["loss among 8"] == pytest.approx(seconds[:8].min() / seconds.min() - 1)
    assert wrong["loss"] == pytest.approx(seconds.max() / seconds.min() - 1) and wrong["top-10 ratio"] < 0.5


def test_the_benchmark_takes_favourites_and_others() -> None:
    models = np.arange(40.0)[::-1]
    seconds = np.where(np.arange(40) % 4 == 1, np.nan, 1.0)  # not measured
    order = [position for position in range(39, -1, -1) if position % 4 != 1]
    assert cpu_score.sample(seconds, models, 10) == order[:5] + [order[at] for at in (5, 11, 17, 23, 29)]
    assert cpu_score.sample(seconds[:4], models[:4], 10) == [3, 2, 0]
    assert sorted(cpu_score.sample(seconds, models, 99)) == sorted(order)


def test_the_benchmark_takes_contractions_that_nothing_disturbed() -> None:
    small, large = (serialisation.encode(replace(machine("x86-avx512"), processors=count)) for count in (2, 16))
    names = ("conv2d:64,32,20,20,3,1", "depthwise:48,14,3,1", "R2", "W3", "B1")
    lines = [{"layer": name, "machine": small, "threads": 2} for name in names]
    lines += [{"layer": "R2", "machine": large, "threads": 2}, {"layer": "R2", "machine": large, "threads": 2, "beside": 1}]
    assert [cpu_score.suits(line) for line in lines] == [True, False, True, False, True, False, True]
