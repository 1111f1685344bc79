"""Counts: every schema counts all of its candidates once per ranking, and at least the problem's bytes."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from tests.operator_cases import FAMILIES
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.counts import Counts, concatenated, counted, taken
from tilewright.kernels.gpu.bounds import lower_bound
from tilewright.kernels.gpu.counts import LaunchCounts, TileCounts
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, Operand
from tilewright.kernels.registry import schemas
from tilewright.kernels.schema import Options, form_of
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import rank
from tilewright.selection.learned.gpu import described
from tilewright.selection.ranking import Choice, estimated
from tilewright.tuning.problems import convolution_problem

H200 = machine("h200")
LAYERS = [(32, 16, 20, 20, 3), (64, 64, 14, 14, 1), (30, 20, 17, 23, 3), (1000, 512, 1, 1, 1), (24, 16, 9, 9, 5)]


def checked(counts: Counts, count: int) -> None:
    assert len(counts) == count
    for entry in fields(counts):
        column = getattr(counts, entry.name)
        assert column.shape == (count,) and np.isfinite(column).all() and (column >= 0).all(), entry.name
    assert (counts.level2_bytes >= counts.read_bytes).all() and (counts.result_bytes > 0).all()
    assert (counts.memory_bytes == counts.read_bytes + counts.result_bytes).all()


@pytest.mark.parametrize("target", ["h200", "v100", "x86-avx2", "x86-avx512", "cortex-a53"])
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_convolutions_are_counted(sizes: tuple[int, int, int, int, int], target: str) -> None:
    here, problem = machine(target), convolution_problem(*sizes)
    asked = 0
    for schema in schemas(here, "contraction"):
        form = form_of(schema, problem, here)
        if isinstance(form, Unsuitable):
            continue
        candidates, _ = schema.space(form.facts, here, Options(2))
        counts = schema.counts(form.facts, candidates, here)
        checked(counts, length(candidates))
        assert isinstance(counts, LaunchCounts) == here.is_gpu and (counts.flops <= 1.3 * problem.region.flops()).all()
        some = np.arange(0, length(candidates), 7)
        few = schema.counts(form.facts, take(candidates, some), here)
        assert all((getattr(few, entry.name) == getattr(taken(counts, some), entry.name)).all() for entry in fields(few))
        asked += length(candidates) > 0
    assert asked


def test_counts_are_made_once_a_ranking_and_handed_on() -> None:
    made: list[Any] = []

    def counts(facts: Any, candidates: Columns, here: Any) -> TileCounts:
        made.append(GEMM.counts(facts, candidates, here))
        found: TileCounts = made[-1]
        return found

    def handed(given: Any) -> None:
        assert given is made[0] and len(made) == 1

    def estimate(facts: Any, candidates: Columns, given: TileCounts, here: Any, options: Options) -> Any:
        handed(given)
        return GEMM.estimate(facts, candidates, given, here, options)

    form = form_of(GEMM, convolution_problem(32, 16, 20, 20, 3), H200)
    assert not isinstance(form, Unsuitable)
    candidates, _ = GEMM.space(form.facts, H200, Options())
    part = estimated(replace(GEMM, counts=counts, estimate=estimate), form.facts, candidates, H200, Options())
    known = described(part, H200)
    assert known is not None and known.counts is part.counts
    handed(part.counts)


def test_a_bound_draws_from_counts() -> None:
    form = form_of(GEMM, convolution_problem(32, 16, 20, 20, 3), H200)
    assert not isinstance(form, Unsuitable)
    candidates, _ = GEMM.space(form.facts, H200, Options())
    before = lower_bound(GEMM, form.facts, candidates, H200).terms["fma"]
    doubled = replace(GEMM, counts=lambda facts, candidates, here: (c := GEMM.counts(facts, candidates, here)) and replace(c, blocks=2 * c.blocks))
    assert (lower_bound(doubled, form.facts, candidates, H200).terms["fma"] >= before).all()
    assert (lower_bound(doubled, form.facts, candidates, H200).terms["fma"] > before).any()


def test_bytes_of_an_implicit_gemm() -> None:
    """64 x 64 outputs from 64 x 128 and 128 x 64 factors, a block of 32 x 32: each factor is read by two columns or rows of blocks."""
    facts = ContractionFacts(1, 64, 64, 128, Operand("r", 4, 4 * 64 * 128), Operand("own", 4, 4 * 128 * 64), 4, 4 * 64 * 64, epilogue_bytes=256)
    one = {"block_m": 32, "block_n": 32, "block_k": 16, "thread_m": 4, "thread_n": 4, "split": 1, "stages": 2, "cluster": 0}
    counts = GEMM.counts(facts, {name: np.array([value, value]) for name, value in one.items()}, H200)
    assert counts.read_bytes.tolist() == [2 * 4 * 64 * 128 + 256] * 2 and counts.result_bytes.tolist() == [4 * 64 * 64] * 2
    assert counts.level2_bytes.tolist() == [2 * 2 * 4 * 64 * 128 + 256] * 2 and counts.flops.tolist() == [2 * 64 * 64 * 128] * 2


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("target", ["h200", "x86-avx512"])
def test_regions_of_networks_are_counted(target: str) -> None:
    """Regions of other kinds: maps, windows, row reductions, scans and attention."""
    here, seen = machine(target), set()

    def chosen(problem: Problem, *arguments: Any) -> Choice:
        ranking = rank(problem, *arguments)
        for part in ranking.parts:
            checked(part.counts, length(part.candidates))
            seen.add(part.schema.name)
        return ranking.first()

    for family in ("poolings", "reductions", "normalisations", "products", "attentions"):
        for case in FAMILIES[family](random.Random(5))[:3]:
            plan_program(simplify(read(case.module.eval(), case.inputs).graph)[0], here, 2, chosen, "fp32")
    assert {"map", "window", "row reduction", "contraction", "attention"} <= seen


def test_counts_taken_and_concatenated() -> None:
    counts = counted(3, np.array([1.0, 2.0, 3.0]), 10, 20, np.array([5.0, 15.0, 25.0]))
    assert counts.level2_bytes.tolist() == [10, 15, 25], "everything once at least"
    assert counts.memory_bytes.tolist() == [30, 30, 30] and len(counts) == 3
    both = concatenated([taken(counts, np.array([2, 0])), counts])
    assert both.flops.tolist() == [3, 1, 1, 2, 3] and both.level2_bytes.tolist() == [25, 10, 10, 15, 25]
