"""The direct schema against PyTorch in float64, run by the interpreter: random convolutions and schedules."""

from __future__ import annotations

import random

import pytest

from tests.direct_cases import Convolution, convolution
from tests.gpu_cases import Case, check
from tilewright.codegen.gpu import lower_gpu
from tilewright.hardware import machine
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.schedule.gpu_direct import CACHED, REGISTERS, RS, SHARED, DirectSchedule, S

H200 = machine("h200")


def lower(case: Case, schedule: object) -> Lowered:
    return lower_gpu(case.region, case.layouts, case.values, case.constants, H200, schedule)


def any_convolution(choose: random.Random) -> Convolution:
    """A small convolution; strides, dilations and padding of every kind, not all of them sensible."""
    filters = choose.choice([(3, 3), (3, 3), (1, 1), (5, 5), (7, 7), (1, 3), (3, 1), (2, 3)])
    stride = choose.choice([(1, 1), (1, 1), (2, 2), (3, 3), (1, 2), (3, 2)])
    dilation = choose.choice([(1, 1), (1, 1), (1, 1), (2, 2), (1, 3)])
    padding = tuple(choose.choice([0, (f - 1) * d // 2]) for f, d in zip(filters, dilation, strict=True))
    size = tuple(max(choose.randint(3, 12), (f - 1) * d + 1) for f, d in zip(filters, dilation, strict=True))
    groups = choose.choice([1, 1, 1, 2, 3])
    return Convolution(
        groups * choose.choice([1, 2, 3, 4, 5, 8, 12]),
        groups * choose.choice([2, 3, 4, 6, 8, 16, 20]),
        size,
        filters,
        stride,
        dilation,
        padding,
        groups,
        choose.choice([1, 1, 2, 3]),
        choose.random() < 0.8,
        choose.random() < 0.5,
        choose.randint(0, 99),
    )


def any_schedule(choose: random.Random) -> DirectSchedule:
    """Any shape of threads, whether or not the space would offer it for so small a problem."""
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
    )


REFUSALS = "cluster|leave a block nothing|do not share the load"


def check_seed(seed: int) -> bool:
    """Whether the schedule of the seed fits its convolution; where it does, the result is compared."""
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
