"""Products whose second factor is computed: read in place, or copied into panels, against PyTorch in float64 in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.gpu_cases import Case, check, matmul_case
from tilewright.hardware import machine
from tilewright.kernels.cpu.contraction.space import ACROSS_N, ALONG_N, CONSTANT
from tilewright.kernels.registry import lower
from tilewright.partition.canonical import canonical
from tilewright.selection.choice import rank


def product(**options: Any) -> Case:
    """A matrix product with the compiler's canonical names."""
    case = matmul_case(**options)
    same = canonical(case.problem)
    problem = same.problem
    inputs = {same.names[name]: array for name, array in case.inputs.items()}
    return Case(problem.region, problem.layouts, problem.values, inputs, case.expected, problem.constants)


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    target=st.sampled_from(["neoverse-n1", "x86-avx2"]),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    m=st.integers(2, 9),
    n=st.one_of(st.integers(2, 40), st.sampled_from([8, 16, 32])),
    r=st.integers(2, 7),
    lies=st.sampled_from([CONSTANT, ALONG_N, ALONG_N, ACROSS_N]),
    where=st.floats(0, 0.999),
    seed=st.integers(0, 1000),
)
def test_products(target: Any, batch: int, m: int, n: int, r: int, lies: Any, where: Any, seed: int) -> None:
    case = product(batch=batch, m=m, n=n, r=r, transpose_b=lies == ACROSS_N, constant=lies == CONSTANT, seed=seed)
    ranking = rank(case.problem, machine(target), 2, learned=False)
    assert ranking.parts[0].facts.b == lies
    schedule = ranking.choice(int(where * ranking.candidates)).schedule
    lowered = lower(case.problem, schedule, machine(target))
    assert (len(lowered.kernels) == 1) == (lies == CONSTANT or (lies == ALONG_N and n % schedule.panel == 0))
    check(case, lowered)


def test_the_model_knows_the_copy() -> None:
    def copies(transposed: bool, n: int) -> tuple[np.ndarray, np.ndarray]:
        case = product(batch=(2,), m=64, n=n, r=32, transpose_b=transposed)
        ranking = rank(case.problem, machine("x86-avx512"), 2, learned=False)
        divided = [n % ranking.choice(at).schedule.panel == 0 for at in range(ranking.candidates)]
        return ranking.parts[0].estimate.terms["copy of B"], np.array(divided)

    seconds, divided = copies(False, 96)
    assert ((seconds == 0) == divided).all()
    assert divided.any()
    assert not divided.all()
    assert (copies(True, 96)[0] > seconds.max()).all()
