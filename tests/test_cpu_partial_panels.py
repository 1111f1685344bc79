"""Output channels that do not fill whole vectors, stored channels-last by a CPU contraction: against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.gpu_cases import check, convolution_case
from tilewright.hardware import machine
from tilewright.ir.kernel import Store, statements
from tilewright.kernels.cpu.contraction.space import CpuContractionSchedule
from tilewright.kernels.cpu.transposition import vector_pieces
from tilewright.kernels.registry import lower

TARGETS = tuple(machine(name) for name in ("neoverse-n1", "x86-avx2", "x86-avx512"))


@settings(max_examples=draws(25), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    target=st.sampled_from(TARGETS),
    outputs=st.integers(1, 70),
    size=st.tuples(st.integers(3, 8), st.integers(3, 12)),
    epilogue=st.booleans(),
    columns=st.integers(1, 9),
    vectors=st.integers(1, 3),
    order=st.sampled_from(["n", "m"]),
    seed=st.integers(0, 1000),
)
def test_random_channels(target: Any, outputs: int, size: Any, epilogue: Any, columns: int, vectors: Any, order: Any, seed: int) -> None:
    case = convolution_case(channels=5, outputs=outputs, size=size, filter_size=1, padding=0, epilogue=epilogue, seed=seed)
    schedule = CpuContractionSchedule(1, columns, vectors, target.vector_lanes(), order)
    check(case, lower(case.problem, schedule, target))


@pytest.mark.parametrize("outputs, widths", [(24, {16, 8}), (31, {16, 8, 4, 2, 1}), (40, {16, 8})])
def test_the_last_panel_leaves_in_vectors(outputs: int, widths: set[int]) -> None:
    case = convolution_case(channels=5, outputs=outputs, size=(4, 8), filter_size=1, padding=0)
    lowered = lower(case.problem, CpuContractionSchedule(1, 8, 1, 16, "n"), TARGETS[2])
    stores = [s for kernel in lowered.kernels for s in statements(kernel.body) if isinstance(s, Store)]
    written = {kernel.parameters[-1].name for kernel in lowered.kernels}
    assert {store.value.lanes for store in stores if store.buffer in written} == widths


def test_pieces_cover_each_element_once() -> None:
    for lanes in (1, 4, 16):
        for count in range(40):
            pieces = vector_pieces(count, lanes)
            assert [i for first, width in pieces for i in range(first, first + width)] == list(range(count))
            assert all(width <= lanes and width & (width - 1) == 0 for _, width in pieces)
