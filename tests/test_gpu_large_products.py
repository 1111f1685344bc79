"""Tiles for products of many operations on CUDA cores: right results, resources that the assembler confirms, and which problems have them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.gpu_cases import check, compiled, convolution_case, matmul_case
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.kernels import registry
from tilewright.kernels.columns import row
from tilewright.kernels.gpu.features import RECORDS
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import (
    LARGE_FLOPS,
    MOST_OF_LARGE,
    PADDED,
    SWIZZLED,
    TILE_AXES,
    ContractionSchedule,
    columns_of,
    contraction_space,
    is_of_large,
    registers_of,
)
from tilewright.kernels.schema import Options
from tilewright.selection import variants
from tilewright.selection.choice import rank
from tilewright.selection.learned import gpu as learned
from tilewright.tuning import serialisation
from tilewright.tuning.workloads import Linear, problem_of

H200, V100 = machine("h200"), machine("v100")
LARGE, SMALL = Linear(4096, 2048, 2048), Linear(1024, 2048, 2048)
SHAPES = ((256, 32, 32, 16, 8), (128, 64, 32, 16, 8), (256, 64, 16, 16, 8), (64, 128, 16, 16, 8), (128, 128, 8, 16, 8))


def space_of(problem: Problem, target: Machine = H200) -> dict[str, np.ndarray]:
    found, _ = GEMM.space(product_form(problem).facts, target, Options())
    return dict(found)


@settings(max_examples=draws(60), deadline=None)
@given(st.booleans(), st.integers(0, 1000), st.data())
def test_results(image: bool, seed: int, data: st.DataObject) -> None:
    """Of extents that are no multiples of the tile; the first factor is read along what is summed, as in large products."""
    if image:
        size = data.draw(st.tuples(st.integers(12, 17), st.integers(12, 17)))
        case = convolution_case(channels=4 * data.draw(st.integers(1, 6)), outputs=data.draw(st.integers(8, 70)), size=size, seed=seed)
    else:
        case = matmul_case(m=data.draw(st.integers(130, 300)), n=data.draw(st.integers(9, 140)), r=4 * data.draw(st.integers(3, 20)), seed=seed)
    space, _ = contraction_space(product_form(case.problem).facts, H200, large=True)
    of_large = np.flatnonzero(is_of_large(space) | (space["layout"] == SWIZZLED))
    schedule = ContractionSchedule(**row(space, int(data.draw(st.sampled_from(list(of_large))))))
    check(case, registry.lower(case.problem, schedule, H200))


@pytest.mark.parametrize("layout", [PADDED, SWIZZLED])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_assembler_spills_nothing(shape: tuple[int, int, int, int, int], layout: int, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    problem, schedule = problem_of(LARGE), ContractionSchedule(*shape, 1, 2, layout=layout)
    (resources,) = compiled(registry.lower(problem, schedule, H200), tmp_path).values()
    estimate = int(registers_of(product_form(problem).facts, columns_of(schedule))[0])
    assert resources.spill_bytes == 0 and resources.registers <= MOST_OF_LARGE and estimate <= MOST_OF_LARGE


def test_which_problems_have_them() -> None:
    large, small = space_of(problem_of(LARGE)), space_of(problem_of(SMALL))
    assert LARGE.flops >= LARGE_FLOPS > SMALL.flops
    assert max(large["thread_m"]) == 16 and max(large["block_m"]) == 256 and set(large["layout"]) == {PADDED, SWIZZLED}
    assert max(small["thread_m"]) == max(TILE_AXES["thread_m"]) and "layout" not in small
    apart = (large["thread_m"] == 16) | (large["block_m"] == 256) | (large["layout"] == SWIZZLED)
    assert set(large["split"][apart]) == {1} and len(set(large["split"][~apart])) > 1
    half = problem_of(replace(LARGE, precision="fp16"))
    assert "layout" not in space_of(half), "16-bit factors are widened"
    assert "layout" not in space_of(problem_of(LARGE), V100), "without asynchronous copies"


def test_they_are_ranked_by_a_model_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rank(problem_of(LARGE), H200).first()
    assert found.terms["learned correction"]
    of_large = [part for part in rank(problem_of(LARGE), H200).parts if learned.described(part, H200, "heavy") is not None]
    assert of_large and not any(learned.described(part, H200, "heavy") for part in rank(problem_of(SMALL), H200).parts)
    assert "tile layout" in RECORDS["heavy"].names and "tile layout" not in RECORDS["formed"].names
    before = rank(problem_of(SMALL), H200).first()
    monkeypatch.setattr(learned, "SUFFIXES", tuple(suffix for suffix in learned.SUFFIXES if suffix != learned.HEAVY_SUFFIX))
    assert rank(problem_of(SMALL), H200).first() == before and rank(problem_of(LARGE), H200).first().terms != found.terms


def test_schedules_are_kept_as_text() -> None:
    schedule = ContractionSchedule(128, 64, 32, 16, 8, 1, 2, layout=SWIZZLED)
    assert serialisation.schedule_of(serialisation.schedule_text(schedule)) == schedule


@pytest.mark.parametrize("workload", [SMALL, LARGE])
def test_variants_of_records_are_found(workload: Linear) -> None:
    """Also where the space has an axis of variants, which then are made of the rest alone."""
    ranking = rank(problem_of(workload), H200)
    base = ContractionSchedule(128, 64, 16, 8, 8, 1, 2)
    wanted = [replace(base, layout=2), replace(base, layout=1), replace(base, layout=1, loop=2), replace(base, split=2, layout=1)]
    for schedule in wanted:
        found = ranking.find(schedule)
        assert found is not None and found.schedule == schedule and found.seconds > 0


def test_no_variant_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "VARIED", 40)
    for target in (H200, machine("a100")):
        ranking = rank(problem_of(Linear(16384, 768, 3072)), target)
        assert ranking.seconds.min() > 1e-4 and len({str(choice.schedule) for choice in islice(ranking, 60)}) == 60
