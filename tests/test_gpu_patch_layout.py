"""Orders of the patch of a direct convolution in shared memory: right results, addresses, bank conflicts as in the code, and their place as variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.direct_cases import Convolution, convolution
from tests.gpu_cases import Case, check, compiled
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.hardware import machine
from tilewright.hardware.calibration import UNCONFIRMED_VARIANTS, GpuVariants
from tilewright.kernels import registry
from tilewright.kernels.columns import length, row, take
from tilewright.kernels.gpu.direct.form import direct_form
from tilewright.kernels.gpu.direct.patch_layout import distinct_orders, lanes_of, patch_layout_of, pitches_of, read_vector_of
from tilewright.kernels.gpu.direct.resources import registers_of, shared_bytes_of
from tilewright.kernels.gpu.direct.schedule import (
    CACHED,
    ORDERS,
    REGISTERS,
    RS,
    SHARED,
    DirectFacts,
    DirectSchedule,
    S,
    columns_of,
    patch_of,
)
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.direct.space import direct_space
from tilewright.kernels.gpu.direct.variants import direct_variants
from tilewright.kernels.schema import Options
from tilewright.selection.choice import candidates, rank
from tilewright.selection.ranking import Ranking
from tilewright.selection.variants import with_variants
from tilewright.tuning import serialisation

H200 = machine("h200")
WARPS = [(k, y, 32 // k // y) for k in (1, 2, 4, 8, 16) for y in (1, 2, 4, 8, 16) if k * y <= 32]
SCHEDULES = st.builds(
    lambda sizes, warp, block, **rest: DirectSchedule(rest.pop("kernel"), *sizes, *warp, *block, **rest),
    kernel=st.sampled_from((RS, S)),
    sizes=st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3, 4))),
    warp=st.sampled_from(WARPS),
    block=st.sampled_from(((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))),
    channels=st.sampled_from((1, 2, 3, 4, 8)),
    stages=st.sampled_from((1, 2, 3)),
    filters=st.sampled_from((SHARED, CACHED, REGISTERS)),
    loop=st.sampled_from((0, 2)),
    order=st.integers(1, len(ORDERS) - 1),
)
SIZES = {
    "channels": st.sampled_from((1, 2, 3, 4, 6, 8, 12)),
    "outputs": st.sampled_from((4, 8, 12)),
    "size": st.tuples(st.integers(3, 9), st.integers(3, 9)),
    "filters": st.sampled_from(((1, 1), (3, 3), (1, 3), (3, 1))),
    "stride": st.sampled_from(((1, 1), (2, 2), (1, 2))),
    "dilation": st.sampled_from(((1, 1), (1, 1), (2, 1))),
}


def facts_of(case: Case) -> DirectFacts:
    return direct_form(case.problem).facts


def wide(case: Case, schedule: DirectSchedule, kind: str) -> tuple[float, float]:
    """Wavefronts of the warps' widest accesses to the patch, and those without bank conflicts, by the static analysis."""
    (kernel, *_) = registry.lower(case.problem, schedule, H200).kernels
    found = [access for access in accesses(kernel) if access.buffer == "patch" and access.kind == kind]
    most = max(access.bytes for access in found)
    found = [access for access in found if access.bytes == most]
    return sum(access.transactions for access in found), sum(access.ideal for access in found)


@settings(max_examples=60, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(schedule=SCHEDULES, last=st.booleans(), batch=st.sampled_from((1, 2)), seed=st.integers(0, 99), **SIZES)
def test_convolutions_in_every_order(schedule: DirectSchedule, filters: Any, dilation: Any, size: Any, **rest: Any) -> None:
    size = tuple(max(extent, (f - 1) * d + 1) for extent, f, d in zip(size, filters, dilation, strict=True))
    padding = tuple((f - 1) * d // 2 for f, d in zip(filters, dilation, strict=True))
    case = convolution(Convolution(filters=filters, dilation=dilation, size=size, padding=padding, epilogue=False, **rest))
    vectors = schedule.register_k * schedule.warp_k * schedule.block_k // min(4, schedule.register_k)
    if schedule.filters == SHARED and (vectors > schedule.threads or schedule.threads % vectors):
        return
    check(case, registry.lower(case.problem, schedule, H200))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    schedule=SCHEDULES,
    taps=st.tuples(st.sampled_from((1, 3, 5)), st.sampled_from((1, 3))),
    stride=st.integers(1, 2),
    vector=st.sampled_from((1, 2, 4)),
)
def test_every_element_has_a_place_of_its_own_and_vectors_are_aligned(schedule: DirectSchedule, taps: Any, stride: int, vector: int) -> None:
    facts = DirectFacts(1, 1, 64, 64, 56, 56, taps[0], taps[1], stride, stride, input_vector=vector)
    shape = columns_of(schedule)
    rows, columns = (int(extent[0]) for extent in patch_of(facts, shape))
    found = pitches_of(facts, schedule)
    c, y, x = np.ogrid[: schedule.channels, :rows, :columns]
    places = (c * found.channel + y * found.row + x * found.column).ravel()
    assert len(set(places.tolist())) == len(places) and places.max() < found.elements and found.elements % 4 == 0
    steps = {"c": found.channel, "y": found.row, "x": found.column}
    assert steps.pop(found.innermost) == 1 and all(step % found.width == 0 for step in steps.values())
    assert ORDERS[schedule.order][-1] == found.innermost and (schedule.slice == RS or found.innermost == "x" or found.width == 1)
    assert schedule.channels % found.channels_read == 0


@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_lanes_along_k_read_the_same_elements(warp: tuple[int, int, int]) -> None:
    k, y, x = lanes_of(*warp)
    positions, counts = np.unique(np.stack([y, x]), axis=1, return_counts=True)
    assert positions.shape[1] == warp[1] * warp[2] and (counts == warp[0]).all()
    assert (k.max(), y.max(), x.max()) == tuple(extent - 1 for extent in warp)


def test_dimensions_of_one_element_make_no_difference() -> None:
    schedule = DirectSchedule(RS, 4, 1, 2, 4, 1, 8, 1, 1, 1, channels=4)
    square, flat = DirectFacts(1, 1, 64, 64, 56, 56, 3, 3), DirectFacts(1, 1, 64, 64, 1, 3136, 1, 1)

    def orders(facts: DirectFacts, base: DirectSchedule) -> list[str]:
        return [order for number, order in enumerate(ORDERS) if distinct_orders(facts, columns_of(replace(base, order=number)))[0]]

    assert orders(square, schedule) == list(ORDERS)
    assert orders(square, replace(schedule, channels=1)) == ["cyx", "cxy"]
    assert orders(flat, schedule) == ["cyx", "yxc"]
    assert orders(flat, replace(schedule, channels=1)) == ["cyx"]


@settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(schedule=SCHEDULES, **SIZES)
def test_predicted_conflicts_of_loads_are_those_of_the_code(schedule: DirectSchedule, filters: Any, size: Any, **rest: Any) -> None:
    size = tuple(max(extent, 2 * f) for extent, f in zip(size, filters, strict=True))
    case = convolution(Convolution(filters=filters, size=size, padding=(0, 0), epilogue=False, **rest))
    schedule = replace(schedule, filters=CACHED)
    facts, shape = facts_of(case), columns_of(schedule)
    taken, ideal = wide(case, schedule, "load")
    least = -(-schedule.warp_y * schedule.warp_x * int(read_vector_of(facts, shape)[0]) // 32)
    assert taken / ideal == pytest.approx(patch_layout_of(facts, shape).load_wavefronts[0] / least)


@settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(schedule=SCHEDULES, channels=st.sampled_from((4, 8, 12, 16)), size=st.tuples(st.integers(3, 9), st.integers(3, 9)))
def test_predicted_conflicts_of_stores_are_those_of_the_code(schedule: DirectSchedule, channels: int, size: Any) -> None:
    """Of the first warp and of what it fetches first, which other warps and fetches repeat as far as the patch goes."""
    case = convolution(Convolution(channels, 8, size, (3, 3), epilogue=False))
    schedule = replace(schedule, stages=1, filters=CACHED, block_k=1, block_y=1, block_x=1)
    (kernel, *_) = registry.lower(case.problem, schedule, H200).kernels
    first = next(access for access in accesses(kernel) if access.buffer == "patch" and access.kind == "store")
    assert first.transactions / first.requests == patch_layout_of(facts_of(case), columns_of(schedule)).store_wavefronts[0]


def test_channels_that_stay_innermost_are_copied_and_read_in_vectors() -> None:
    case = convolution(Convolution(16, 16, (12, 12), (1, 1), padding=(0, 0), epilogue=False))
    base = DirectSchedule(RS, 4, 1, 4, 4, 1, 8, 1, 1, 2, channels=8, stages=2)
    for order, copied in (("cyx", "tw_copy4("), ("yxc", "tw_copy16(")):
        schedule = replace(base, order=ORDERS.index(order))
        text = print_cuda(registry.lower(case.problem, schedule, H200).kernels)
        assert f"{copied}&patch" in text or f"{copied}patch" in text, text
        assert pitches_of(facts_of(case), schedule).channels_read == (4 if order == "yxc" else 1)
        check(case, registry.lower(case.problem, schedule, H200))


def test_slices_of_several_channels_take_registers() -> None:
    case = convolution(Convolution(16, 16, (12, 12), epilogue=False))
    base = DirectSchedule(RS, 4, 1, 2, 4, 2, 4, 1, 1, 1, channels=8)
    inner = replace(base, order=ORDERS.index("yxc"))
    facts = facts_of(case)
    assert pitches_of(facts, inner).channels_read == 4
    assert registers_of(facts, columns_of(inner))[0] > registers_of(facts, columns_of(base))[0]
    assert pitches_of(facts, replace(inner, slice=S)).channels_read == 1


# Variants


def layer(channels: int, outputs: int, size: int, filters: int = 3, stride: int = 1) -> Case:
    padding = (filters // 2,) * 2
    return convolution(Convolution(channels, outputs, (size * stride,) * 2, (filters,) * 2, (stride,) * 2, padding=padding, epilogue=False))


@pytest.mark.parametrize("target", ["h200", "v100"])
def test_variants_are_few_and_feasible(target: str) -> None:
    case, here = layer(64, 128, 28, stride=2), machine(target)
    facts = facts_of(case)
    space, _ = direct_space(facts, here)
    some = take(space, np.random.default_rng(1).choice(length(space), 40, replace=False))
    rows, origins = direct_variants(facts, some, here)
    assert {*rows["order"].tolist()} == set(range(6)) and max(np.bincount(origins)) <= 11
    assert len({tuple(row(rows, at).values()) for at in range(length(rows))}) == length(rows)
    assert (shared_bytes_of(facts, rows) <= here.shared_bytes_per_block).all() and (registers_of(facts, rows) <= 255).all()
    for at in np.random.default_rng(2).choice(length(rows), 4, replace=False):
        schedule = DirectSchedule(**row(rows, int(at)))
        (kernel, *_) = registry.lower(case.problem, schedule, here).kernels
        assert shared_bytes(kernel) == shared_bytes_of(facts, columns_of(schedule))[0]
        assert serialisation.schedule_of(serialisation.schedule_text(schedule)) == schedule


def test_texts_leave_out_the_first_order() -> None:
    schedule = DirectSchedule(RS, 4, 1, 2, 4, 2, 4, 1, 1, 1, channels=8)
    assert "order" not in serialisation.schedule_text(schedule) and "patch" not in str(schedule)
    other = replace(schedule, order=2)
    assert '"order"' in serialisation.schedule_text(other) and str(other).endswith(" patch yxc")


def test_an_order_follows_its_candidate_until_measurements_confirm_its_gain() -> None:
    ranking = candidates(Ranking(H200), DIRECT, facts_of(layer(512, 512, 7)), Options())
    first = ranking.first()
    listed = [choice.schedule for choice, _ in zip(with_variants(ranking, UNCONFIRMED_VARIANTS), range(24), strict=False)]
    orders = [schedule for schedule in listed if schedule.order]
    assert listed[0] == first.schedule and orders
    assert all(listed.index(replace(schedule, order=0, loop=0)) < listed.index(schedule) for schedule in orders)
    confirmed = with_variants(ranking, GpuVariants(0.0, 0.0, 0.0, order=1.0)).first()
    assert confirmed.schedule.order and confirmed.seconds < first.seconds


def test_without_a_measured_gain_no_order_is_chosen() -> None:
    for case in (layer(64, 128, 28, stride=2), layer(512, 512, 7), layer(3, 64, 56, 7, 2)):
        assert not getattr(rank(case.problem, H200).first().schedule, "order", 0)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("order", range(1, len(ORDERS)), ids=lambda order: ORDERS[order])
def test_kernels_compile_without_spills(order: int, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    case = layer(64, 64, 28)
    for schedule in (
        DirectSchedule(RS, 8, 2, 2, 8, 2, 2, 1, 2, 2, 4, 1, 3, SHARED, order=order),
        DirectSchedule(S, 4, 4, 4, 4, 4, 2, 1, 2, 2, 8, 1, 1, SHARED, order=order),
        DirectSchedule(RS, 4, 1, 2, 8, 2, 2, 1, 2, 1, 8, 1, 2, SHARED if ORDERS[order][-1] == "c" else REGISTERS, order=order),
    ):
        (found,) = compiled(registry.lower(case.problem, schedule, H200), tmp_path).values()
        assert found.spill_bytes == 0 and found.stack_bytes == 0
        assert 0.6 < found.registers / registers_of(facts_of(case), columns_of(schedule))[0] < 1.6, schedule
