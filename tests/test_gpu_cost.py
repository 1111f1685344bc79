"""The GPU cost models: occupancy against hand-computed cases, order of predictions in clear cases, and the resulting choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu_cases import convolution_case, matmul_case
from tilewright.hardware import machine
from tilewright.hardware.occupancy import resident_blocks
from tilewright.ir.region import Region, Unsuitable
from tilewright.ir.space import Comparison
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import AXES, ContractionFacts, ContractionSchedule, Operand, contraction_space
from tilewright.kernels.gpu.gemv.schema import GEMV
from tilewright.kernels.registry import lower
from tilewright.kernels.schema import Options
from tilewright.selection.choice import candidates, choose, rank
from tilewright.selection.ranking import Ranking, estimated

H200 = machine("h200")


def layer(k: int, c: int, o: int, f: int = 3) -> ContractionFacts:
    a, b = Operand("r", 4, 4 * c * o * o, 2), Operand("own", 4, 4 * k * c * f * f)
    return ContractionFacts(1, o * o, k, c * f * f, a, b, 4, 4 * o * o * k)


def columns(*schedules: ContractionSchedule) -> dict[str, np.ndarray]:
    return {name: np.array([getattr(s, name) for s in schedules]) for name in AXES}


@pytest.mark.parametrize(
    "threads, registers, shared, blocks",
    [
        (256, 32, 0, 8),  # threads: 2048 / 256
        (256, 64, 0, 4),  # registers: 65536 / (64 * 256)
        (128, 65, 0, 7),  # 65 registers are allocated as 72: 65536 / (72 * 128) = 7.1
        (64, 32, 56 * 1024, 4),  # shared memory: 228 KiB / (56 + 1) KiB
        (32, 16, 0, 32),  # block slots
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, blocks: int) -> None:
    found = resident_blocks(H200, np.array([threads]), np.array([registers]), np.array([shared]))
    assert found.tolist() == [blocks]


def test_terms_are_named_seconds_for_every_row() -> None:
    problem = layer(128, 128, 28)
    candidates, rejected = contraction_space(problem, H200)
    estimate = estimated(GEMM, problem, candidates, H200, Options()).estimate
    assert length(candidates) + sum(rejected.values()) >= 6000
    assert set(estimate.terms) == {"launch", "compute", "memory", "drain", "split"}
    for term in (*estimate.terms.values(), estimate.seconds):
        assert term.shape == (length(candidates),) and np.isfinite(term).all() and (term >= 0).all()
    bound = np.maximum(estimate.terms["compute"], estimate.terms["memory"])
    assert (estimate.seconds >= bound).all()
    assert (estimate.seconds >= problem.flops / H200.peak_flops["fp32"]).all()


def test_splitting_pays_where_there_are_few_tiles_and_not_where_there_are_many() -> None:
    tile = ContractionSchedule(64, 64, 8, 8, 8)
    split = ContractionSchedule(64, 64, 8, 8, 8, 8)
    few = estimated(GEMM, layer(512, 512, 7), columns(tile, split), H200, Options()).estimate.seconds
    many = estimated(GEMM, layer(64, 32, 272), columns(tile, split), H200, Options()).estimate.seconds
    assert few[1] < few[0] and many[0] < many[1]


def test_larger_thread_tiles_pay_where_work_abounds() -> None:
    small, large = ContractionSchedule(64, 64, 8, 2, 2), ContractionSchedule(128, 128, 8, 8, 8)
    seconds = estimated(GEMM, layer(256, 256, 136), columns(small, large), H200, Options()).estimate.seconds
    assert seconds[1] < seconds[0]


def test_few_rows_are_bound_by_the_weights() -> None:
    a, b = Operand("r", 4, 4 * 4096), Operand("own", 4, 4 * 4096 * 4096)
    facts = ContractionFacts(1, 1, 4096, 4096, a, b, 4, 4 * 4096)
    ranking = candidates(candidates(Ranking(H200), GEMM, facts, Options()), GEMV, facts, Options())
    best = ranking.first()
    assert best.schema is GEMV
    assert best.seconds >= 4 * 4096 * 4096 / H200.memory_bandwidth
    names = ("columns", "threads_along_r", "split")
    idle = {name: np.array([value]) for name, value in zip(names, (32, 1, 1), strict=True)}
    assert estimated(GEMV, facts, idle, H200, Options()).estimate.seconds[0] > best.seconds


def test_choice_is_the_first_of_the_ranking_and_is_lowered() -> None:
    case = convolution_case(channels=16, outputs=24, size=(9, 9))
    best = choose(case.problem, H200)
    ranking = rank(case.problem, H200)
    predicted = [candidate.seconds for candidate in ranking]
    assert predicted == sorted(predicted) and best.seconds == predicted[0]
    assert best.candidates == len(predicted) and best.rejected
    assert replace(best, comparison=Comparison()) == rank(case.problem, H200).first()
    lowered = lower(case.problem, best.schedule, H200)
    assert lowered.schedule == str(best.schedule) and lowered.calls[-1].arguments[-1] == "out"


def test_a_region_without_schema_is_refused_with_its_kind() -> None:
    case = matmul_case()
    other = replace(case, region=Region("r", "torch", (), case.region.steps, (), ("out",)))
    with pytest.raises(Unsuitable, match="torch"):
        choose(other.problem, H200)
