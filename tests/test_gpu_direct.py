"""The direct schema against PyTorch in float64, run by the interpreter: random convolutions and schedules."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.direct_cases import Convolution, convolution
from tests.gpu_cases import Case, check, matmul_case
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.hardware import machine
from tilewright.ir.kernel import AtomicAdd, statements
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels import registry
from tilewright.kernels.columns import length, row, take
from tilewright.kernels.gpu.direct.estimate import _line_cycles
from tilewright.kernels.gpu.direct.form import direct_form
from tilewright.kernels.gpu.direct.resources import registers_of, shared_bytes_of
from tilewright.kernels.gpu.direct.schedule import (
    AXES,
    CACHED,
    ORDERS,
    REGISTERS,
    RS,
    SHARED,
    DirectFacts,
    DirectSchedule,
    S,
    blocks_of,
    columns_of,
    threads_of,
)
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.direct.space import direct_space
from tilewright.kernels.gpu.direct.variants import direct_variants
from tilewright.kernels.gpu.gemm.form import product_form
from tilewright.kernels.gpu.gemm.space import AHEAD, PLAIN, ContractionSchedule, contraction_space
from tilewright.kernels.schema import Numerics, Options
from tilewright.selection.choice import rank
from tilewright.selection.ranking import estimated
from tilewright.tuning.problems import convolution_problem

H200 = machine("h200")


def lower(case: Case, schedule: object) -> Lowered:
    return registry.lower(case.problem, schedule, H200)


def any_convolution(choose: random.Random) -> Convolution:
    """A small convolution; strides, dilations and padding of every kind, including unusual ones."""
    filters = choose.choice([(3, 3), (3, 3), (1, 1), (5, 5), (7, 7), (1, 3), (3, 1), (2, 3)])
    stride = choose.choice([(1, 1), (1, 1), (2, 2), (3, 3), (1, 2), (3, 2)])
    dilation = choose.choice([(1, 1), (1, 1), (1, 1), (2, 2), (1, 3)])
    padding = tuple(choose.choice([0, (f - 1) * d // 2]) for f, d in zip(filters, dilation, strict=True))
    size = tuple(max(choose.randint(3, 12), (f - 1) * d + 1) for f, d in zip(filters, dilation, strict=True))
    groups = choose.choice([1, 1, 1, 2, 3])
    return Convolution(
        groups * choose.choice([1, 2, 3, 4, 5, 8, 12]),
        groups * choose.choice([2, 3, 4, 6, 8, 16, 20]),
        (size[0], size[1]),
        filters,
        stride,
        dilation,
        (padding[0], padding[1]),
        groups,
        choose.choice([1, 1, 2, 3]),
        choose.random() < 0.8,
        choose.random() < 0.5,
        choose.randint(0, 99),
    )


def any_schedule(choose: random.Random) -> DirectSchedule:
    """Any shape of threads, even if the space would not offer it for such a small problem."""
    warps = [(k, y, 32 // k // y) for k in (1, 2, 4, 8, 16, 32) for y in (1, 2, 4, 8, 16, 32) if k * y <= 32]
    split = choose.choice([1, 1, 1, 2, 3])
    way = choose.choice(["parts", "cluster", "atomics"]) if split > 1 else "parts"
    return DirectSchedule(
        choose.choice([RS, S]),
        choose.choice([1, 2, 4, 8]),
        choose.choice([1, 2, 3, 4]),
        choose.choice([1, 2, 3, 4, 5]),
        *choose.choice(warps),
        *choose.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]),
        channels=choose.choice([1, 2, 3, 4, 8]),
        split=split,
        stages=choose.choice([1, 2, 3, 4]),
        filters=choose.choice([SHARED, CACHED, REGISTERS]),
        cluster=int(way == "cluster"),
        atomics=int(way == "atomics"),
        loop=choose.choice([AHEAD, PLAIN]),
        order=choose.randrange(len(ORDERS)),
    )


REFUSALS = "cluster|leave a block nothing|do not share the load"


def check_seed(seed: int) -> bool:
    """Whether the schedule of the seed fits its convolution; if so, the result is compared."""
    choose = random.Random(seed)
    case, schedule = convolution(any_convolution(choose)), any_schedule(choose)
    try:
        lowered = lower(case, schedule)
    except Unsuitable as refusal:
        assert any(reason in str(refusal) for reason in REFUSALS.split("|")), refusal
        return False
    check(case, lowered)
    return True


def test_random_convolutions_and_schedules() -> None:
    assert sum(check_seed(seed) for seed in range(24)) > 12


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1400, 40))
def test_many_random_convolutions_and_schedules(first: int) -> None:
    assert sum(check_seed(seed) for seed in range(first, first + 40)) > 20


def problem_of(case: Case) -> DirectFacts:
    return direct_form(case.problem).facts


def layer(channels: int, outputs: int, size: int, filters: int = 3, stride: int = 1) -> Case:
    """A layer for planning only: inputs and result are never computed."""
    return convolution(
        Convolution(channels, outputs, (size * stride,) * 2, (filters,) * 2, (stride,) * 2, padding=(filters // 2,) * 2, epilogue=False)
    )


def test_a_problem_is_read_off_the_offsets() -> None:
    given = Convolution(6, 16, (11, 13), (3, 5), (2, 1), (1, 2), (1, 4), groups=2, batch=2)
    found = problem_of(convolution(given))
    assert (found.images, found.groups, found.outputs, found.channels) == (2, 2, 8, 3)
    assert (found.height, found.width, found.filter_y, found.filter_x) == (6, 13, 3, 5)
    # taps two apart in x, with outputs one apart
    assert (found.stride_y, found.stride_x, found.dilation_y, found.dilation_x) == (2, 1, 1, 2)
    assert found.flops == 2 * 2 * 16 * 6 * 13 * 3 * 3 * 5


def test_a_pixelwise_convolution_has_one_dimension() -> None:
    found = problem_of(convolution(Convolution(8, 16, (5, 6), (1, 1), padding=(0, 0), epilogue=False)))
    assert (found.height, found.width, found.filter_y, found.filter_x) == (1, 30, 1, 1)


def test_what_is_no_convolution_is_refused() -> None:
    schedule = DirectSchedule(RS, 4, 1, 4, 4, 1, 8, 1, 1, 2, 4)
    with pytest.raises(Unsuitable, match="constant filters"):
        lower(matmul_case(m=16, n=16, r=16), schedule)
    case = convolution(Convolution(4, 8, (6, 6), last=True))
    bare = replace(case, layouts={**case.layouts, "x": replace(case.layouts["x"], halo=((0, 0),) * 4)})
    with pytest.raises(Unsuitable, match="stored input"):
        lower(bare, schedule)


@pytest.mark.in_turns
@pytest.mark.parametrize("filters", [SHARED, CACHED, REGISTERS])
@pytest.mark.parametrize("kernel", [RS, S])
def test_both_kernels_with_filters_from_everywhere(kernel: int, filters: int) -> None:
    case = convolution(Convolution(6, 12, (9, 10), (3, 3), batch=2, seed=filters))
    for stages, channels, split in ((1, 4, 1), (2, 2, 2), (3, 1, 1)):
        check(case, lower(case, DirectSchedule(kernel, 4, 2, 2, 2, 4, 4, 2, 1, 1, channels, split, stages, filters)))


@pytest.mark.parametrize("epilogue", [False, True])
def test_atomic_additions_go_to_one_sum(epilogue: bool) -> None:
    case = convolution(Convolution(9, 12, (7, 7), epilogue=epilogue))
    lowered = lower(case, DirectSchedule(RS, 4, 1, 2, 2, 4, 4, 1, 2, 1, 3, 3, 1, SHARED, 0, 1))
    assert any(isinstance(s, AtomicAdd) for kernel in lowered.kernels for s in statements(kernel.body))
    # zeroing, sums, and the epilogue
    assert len(lowered.calls) == (3 if epilogue else 2)
    check(case, lowered)


def test_a_matrix_product_may_add_its_parts_by_atomics_too() -> None:
    case = matmul_case(batch=(2,), m=20, n=37, r=64)
    check(case, lower(case, ContractionSchedule(16, 32, 8, 2, 4, 3, 2, 0, 1)))
    problem = product_form(case.problem).facts
    candidates, _ = contraction_space(problem, H200, atomics=True)
    assert candidates["atomics"].any() and not (candidates["atomics"] & candidates["cluster"]).any()
    assert not contraction_space(problem, H200)[0]["atomics"].any()


@pytest.mark.parametrize("last", [True, False])
def test_a_cluster_adds_its_parts(last: bool) -> None:
    case = convolution(Convolution(16, 24, (7, 9), last=last))
    check(case, lower(case, DirectSchedule(RS, 4, 2, 2, 2, 4, 4, 2, 1, 1, 4, 4, 2, SHARED, 1)))
    check(case, lower(case, DirectSchedule(S, 8, 1, 4, 4, 4, 2, 1, 2, 1, 2, 2, 1, CACHED, 1)))


SIZES = ((64, 64, 56, 3, 1), (64, 128, 28, 3, 2), (512, 512, 7, 3, 1), (3, 64, 112, 7, 2))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_space_is_feasible_and_says_what_it_rejects(size: tuple[int, ...]) -> None:
    problem = problem_of(layer(*size))
    candidates, rejected = direct_space(problem, H200)
    assert 300 < length(candidates) < 60_000
    assert any("another arrangement" in reason for reason in rejected) and sum(rejected.values()) > 1000
    assert (threads_of(candidates) <= H200.threads_per_block).all()
    assert (shared_bytes_of(problem, candidates) <= H200.shared_bytes_per_block).all()
    assert (registers_of(problem, candidates) * threads_of(candidates) <= H200.registers_per_processor).all()
    assert (candidates["warp_k"] * candidates["warp_y"] * candidates["warp_x"] == 32).all()
    assert not candidates["atomics"].any()
    distinct = np.unique(np.stack(list(candidates.values())), axis=1)
    assert distinct.shape[1] == length(candidates)


def test_blocks_have_as_many_threads_as_the_machine_and_registers_let_them() -> None:
    candidates, _ = direct_space(problem_of(layer(*SIZES[0])), H200)
    assert set(np.unique(threads_of(candidates))) >= {64, 128, 256, 512}


def test_atomics_are_offered_on_request() -> None:
    problem = problem_of(layer(*SIZES[0]))
    candidates, _ = direct_space(problem, H200, atomics=True)
    assert (candidates["split"][candidates["atomics"] > 0] > 1).all() and candidates["atomics"].any()
    assert not (candidates["cluster"] & candidates["atomics"]).any()
    case = layer(*SIZES[0])
    fixed, free = (rank(case.problem, H200, numerics=Numerics(atomics=atomics)) for atomics in (False, True))
    assert free.candidates > fixed.candidates
    assert any(choice.schema.unordered(choice.schedule) for choice in free)
    assert not any(choice.schema.unordered(choice.schedule) for choice in fixed)


def test_plain_loops_are_variants_with_one_buffer() -> None:
    case = layer(*SIZES[0])
    problem = problem_of(case)
    candidates, _ = direct_space(problem, H200)
    some = take(candidates, np.random.default_rng(1).choice(length(candidates), 200, replace=False))
    rows, origins = direct_variants(problem, some, H200)
    plain = np.flatnonzero((rows["loop"] == PLAIN) & (rows["order"] == 0))
    rows, origins = take(rows, plain), origins[plain]
    assert length(rows) > 50 and (rows["stages"] <= 2).all()
    assert all((rows[name] == some[name][origins]).all() for name in AXES)
    assert (shared_bytes_of(problem, rows) < shared_bytes_of(problem, some)[origins]).all()
    assert (registers_of(problem, rows) <= registers_of(problem, some)[origins]).all()
    for position in np.random.default_rng(2).choice(length(rows), 3, replace=False):
        schedule = DirectSchedule(**row(rows, int(position)))
        lowered = lower(case, schedule)
        assert shared_bytes(lowered.kernels[0]) == shared_bytes_of(problem, columns_of(schedule))[0]


def test_machines_without_copies_or_clusters_are_offered_neither() -> None:
    candidates, _ = direct_space(problem_of(layer(*SIZES[0])), machine("v100"))
    assert length(candidates) > 100 and (candidates["stages"] == 1).all() and not candidates["cluster"].any()


def test_candidates_of_the_space_are_right() -> None:
    """Uses small problems, so that the interpreter finishes quickly."""
    choose = np.random.default_rng(3)
    for given in (
        Convolution(16, 24, (10, 9), (3, 3)),
        Convolution(12, 16, (15, 13), (3, 3), (2, 2), groups=2),
        Convolution(8, 32, (8, 8), (5, 5), padding=(2, 2)),
    ):
        case = convolution(given)
        candidates, _ = direct_space(problem_of(case), H200, atomics=True)
        for position in choose.choice(length(candidates), 4, replace=False):
            check(case, lower(case, DirectSchedule(**row(candidates, int(position)))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_more_candidates_of_the_space_are_right(seed: int) -> None:
    choose = random.Random(5000 + seed)
    case = convolution(any_convolution(choose))
    candidates, _ = direct_space(problem_of(case), H200, atomics=True)
    for position in choose.sample(range(length(candidates)), min(10, length(candidates))):
        check(case, lower(case, DirectSchedule(**row(candidates, position))))


def test_the_cost_counts_what_a_larger_problem_takes() -> None:
    small, large = problem_of(layer(64, 64, 56)), problem_of(layer(128, 64, 56))
    candidates, _ = direct_space(small, H200)
    some = take(candidates, np.arange(0, length(candidates), 50))
    first, second = (estimated(DIRECT, problem, some, H200, Options()).estimate for problem in (small, large))
    assert (second.terms["compute"] > 1.5 * first.terms["compute"]).all()
    assert (first.seconds > small.flops / H200.peak_flops["fp32"]).all()
    assert (blocks_of(small, some) > 0).all()


def test_groups_are_adjacent_blocks_and_cost_the_lines_that_they_touch() -> None:
    """Groups of few channels share sectors of memory, which level 2 holds while adjacent blocks read and store them."""
    grouped = convolution_problem(32, 32, 28, 28, 3, batch=2, groups=4)
    facts = direct_form(grouped).facts
    candidates, _ = direct_space(facts, H200)
    for schedule in (DirectSchedule(**row(candidates, 0)), ContractionSchedule(8, 4, 8, 1, 4, 1)):
        (kernel, *_) = registry.lower(grouped, schedule, H200).kernels
        text = print_cuda([kernel])
        assert re.search(r"(group|batch) = block_x (/ 2 )?% 4;", text), text  # the outermost one is a quotient alone
    wide = replace(facts, groups=32)
    some = take(candidates, np.flatnonzero((candidates["stages"] == 1) & (candidates["register_k"] % 2 == 0)))
    one, all_groups = (DIRECT.counts(problem, some, H200) for problem in (facts, wide))
    assert (_line_cycles(facts, some, one, H200) <= _line_cycles(wide, some, all_groups, H200)).all()


def test_a_convolution_is_ranked_with_direct_candidates() -> None:
    case = layer(*SIZES[0])
    ranking = rank(case.problem, H200)
    assert DirectSchedule in {part.schema.schedule for part in ranking.parts}
    assert any(reason.startswith("direct: ") for reason in ranking.rejected)


@pytest.mark.parametrize(
    "schedule",
    [
        DirectSchedule(RS, 8, 2, 4, 8, 2, 2, 1, 2, 2, 4, 1, 3, SHARED),
        DirectSchedule(S, 4, 4, 4, 4, 4, 2, 1, 2, 2, 8, 2, 1, SHARED, 1),
        DirectSchedule(RS, 4, 2, 4, 4, 4, 2, 1, 1, 2, 4, 2, 2, CACHED, 0, 1),
        DirectSchedule(RS, 2, 2, 4, 8, 2, 2, 1, 2, 1, 8, 1, 2, REGISTERS),
    ],
    ids=str,
)
def test_typical_kernels_compile_without_spills(schedule: DirectSchedule, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from tests.gpu_cases import compiled

    case = layer(64, 64, 28)
    found = compiled(lower(case, schedule), tmp_path)
    for resources in found.values():
        assert resources.spill_bytes == 0 and resources.stack_bytes == 0
    estimate = int(registers_of(problem_of(case), columns_of(schedule))[0])
    taken = max(resources.registers for resources in found.values())
    assert 0.6 * estimate < taken < 1.6 * estimate
