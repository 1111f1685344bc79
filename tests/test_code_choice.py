"""Choosing CPU schedules by their code: terms, scores, processes, and that the chosen kernel is compiled only once."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bench import cpu_score
from tilewright.compile import source_files
from tilewright.frontend.torch_export import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import catalogue, machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels.schema import USUAL
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import rank
from tilewright.selection.code_score import coefficients_of, linear
from tilewright.selection.ranking import Choice
from tilewright.toolchain.cache import KernelCache, kernel_key
from tilewright.toolchain.compilers import CCompiler
from tilewright.tuning import choices, code_choice, serialisation
from tilewright.tuning.code_choice import FAVOURITES, MARGIN, CodeScores, reads_code
from tilewright.tuning.problems import convolution_problem
from tilewright.tuning.score_worker import Server
from tilewright.tuning.tuning import chooser_for
from tilewright.tuning.workers import WorkerLost

TARGETS = ("x86-avx512", "x86-avx2", "neoverse-n1", "cortex-a53")
PROBLEM = convolution_problem(48, 20, 9, 11, 3)


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
    """The terms of a scoring process, computed in this one."""
    server = Server()
    server._machine, server._problem = target, problem
    return server.terms(choice_text(choice), threads, choice.seconds, choice.terms)


def choice_text(choice: Choice) -> str:
    return serialisation.schedule_text(choice.schedule)


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
    """Equal to scoring them in this process, with one process or two."""
    target = machine("x86-avx512")
    need(target)
    ranking = rank(PROBLEM, target, threads=2)
    favourites = list(islice(ranking, 3))
    coefficients = coefficients_of(target.architecture)
    scores = [linear(terms_of(PROBLEM, target, choice, 2), coefficients) for choice in favourites]
    scores[0] *= 1 - MARGIN
    for workers in (1, 2):
        with CodeScores(target, workers) as processes:
            assert processes.best(PROBLEM, ranking, 2, count=3) == (favourites[scores.index(min(scores))], True)


@pytest.mark.usefixtures("worth")
def test_the_models_decide_where_code_cannot_be_read() -> None:
    ranking = rank(PROBLEM, machine("x86-avx512"), threads=2)
    with CodeScores(machine("x86-avx512"), 1, ("-c", "raise SystemExit(3)")) as broken:
        assert broken.best(PROBLEM, ranking, 2, count=2) == (ranking.first(), False)
    assert not reads_code(machine("h200"))
    assert all(reads_code(entry) for entry in catalogue().values() if not entry.is_gpu)
    assert FAVOURITES > 1


def test_a_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A different number of threads makes another choice."""
    target = machine("x86-avx512")
    need(target)
    problem = convolution_problem(16, 8, 5, 5, 3)
    with CodeScores(target, 1) as processes:
        first = choices.remembered(USUAL, processes)(problem, target, 2)

    class Never:
        def best(self, *_: object) -> None:
            raise AssertionError("scored again")

    assert choices.remembered(USUAL, Never())(problem, target, 2) == first  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="scored again"):
        choices.remembered(USUAL, Never())(problem, target, 1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("worth")
def test_a_choice_on_the_way_to_which_something_hung_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice affected by a lost process or a hanging compiler is not stored."""
    target = machine("x86-avx512")
    need(target)
    favourite = rank(PROBLEM, target, threads=2).first()
    with CodeScores(target, 1, ("-c", "raise SystemExit(3)")) as broken:
        assert choices.remembered(USUAL, broken)(PROBLEM, target, 2) == favourite
    hanging = cache / "hanging-cc"
    hanging.write_text("#!/bin/sh\ncase $1 in --version) echo 1.0; exit;; esac\nsleep 1000\n")
    hanging.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("TILEWRIGHT_CC", str(hanging))
        patch.setenv("TILEWRIGHT_COMPILE_SECONDS", "2")
        with CodeScores(target, 1) as processes:
            assert processes.best(PROBLEM, rank(PROBLEM, target, threads=2), 2) == (favourite, False)
    assert not (cache / "choices").exists()
    with CodeScores(target, 1) as processes:
        choices.remembered(USUAL, processes)(PROBLEM, target, 2)
    assert len(list((cache / "choices").iterdir())) == 1


@pytest.mark.parametrize("setting", ["0", "1"])
def test_code_is_read_where_it_is_wanted(worth: None, cache: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("TILEWRIGHT_READ_CODE", setting)
    target = machine("x86-avx512")
    with chooser_for(target, None) as chooser:
        choice = chooser(PROBLEM, target, 1)
    assert choice.seconds > 0
    assert (cache / "kernels").exists() == (cache / "choices").exists() == (setting == "1")


def test_small_regions_are_left_to_the_models() -> None:
    ranking = rank(PROBLEM, machine("x86-avx512"), threads=2)
    assert ranking.first().seconds < code_choice.WORTH_SECONDS
    with CodeScores(machine("x86-avx512"), 1, ("-c", "raise SystemExit(3)")) as processes:
        assert processes.best(PROBLEM, ranking, 2) == (ranking.first(), True)
        assert processes._processes[0]._worker is None  # no process was started


@pytest.mark.usefixtures("worth")
def test_close_candidates_that_scores_order_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those far behind, nor if all of them are Winograd's: then no process, which would be lost, is asked."""

    def asked(target: str, scored: bool = False, count: int = FAVOURITES) -> bool:
        ranking = rank(PROBLEM, machine(target), threads=2)
        parts = tuple(replace(part, schema=replace(part.schema, scored=part.schema.scored or scored)) for part in ranking.parts)
        with CodeScores(machine(target), 1, ("-c", "raise SystemExit(3)")) as processes:
            choice, whole = processes.best(PROBLEM, replace(ranking, parts=parts), 2, count)
        assert choice.schedule == ranking.first().schedule
        return not whole

    kinds = [choice.schema.name for choice in islice(rank(PROBLEM, machine("neoverse-n1"), threads=2), 99)]
    assert kinds[:FAVOURITES] == ["winograd"] * FAVOURITES
    assert asked("x86-avx512") and not asked("neoverse-n1") and asked("neoverse-n1", scored=True)
    monkeypatch.setattr(code_choice, "CLOSE", float("inf"))
    assert asked("neoverse-n1", count=kinds.index("contraction") + 1) and not asked("neoverse-n1", count=kinds.index("contraction"))
    monkeypatch.setattr(code_choice, "CLOSE", -1.0)
    assert not asked("x86-avx512")


def test_an_interruption_waits_for_no_answer() -> None:
    target = machine("x86-avx512")
    favourite = rank(PROBLEM, target).first()
    with pytest.raises(KeyboardInterrupt), CodeScores(target, 1, ("-c", "import time; time.sleep(1000)")) as processes:
        (process,) = processes._processes
        asked = processes._pool.submit(process.terms, PROBLEM, favourite, 1)
        while process._worker is None:
            time.sleep(0.01)
        raise KeyboardInterrupt
    error = asked.exception(timeout=0)
    assert isinstance(error, WorkerLost) and "no answer" not in str(error)


@pytest.mark.usefixtures("worth")
def test_what_is_chosen_is_compiled_once(cache: Path) -> None:
    """The plan's kernel is already in the cache when it is to be built."""
    target = machine("x86-avx512")
    need(target)
    graph, _ = simplify(import_module(nn.Conv2d(20, 48, 3), (torch.randn(1, 20, 11, 13),)).graph)
    with CodeScores(target, 2) as processes:
        program = plan_program(graph, target, 2, choices.remembered(USUAL, processes))
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
