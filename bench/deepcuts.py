"""DeepCuts' performance upper limit (PLDI 2021, section 4) as printed, for comparison with our own bound (`kernels.gpu.bounds`) only.

limit = GMRatio * SMRatio * WBRatio * COEF_r, the claimed maximum share of the peak that a kernel reaches. It is not a bound: WBRatio as printed
gives 0.008 for 131 blocks on 132 processors, where blocks / (processors * ceil(blocks / processors)) gives 0.99; SMRatio ignores that other warps
hide a load's latency; and the halo of tables 7 and 8 is right only for 3 x 3 filters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.region import Unsuitable
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.direct.schedule import SHARED, DirectFacts, extents_of, patch_of
from tilewright.kernels.gpu.direct.schedule import threads_of as threads_of_direct
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.space import ContractionFacts, shared_bytes_of, threads_of
from tilewright.kernels.schema import AnySchema

TRANSACTION_ELEMENTS = 32
"""TRANS_global: elements of the largest transaction with global memory (128 bytes)."""


@dataclass(frozen=True)
class PrintedLimit:
    """The four factors, one number in [0, 1] per candidate."""

    memory: np.ndarray
    shared: np.ndarray
    balance: np.ndarray
    resources: np.ndarray

    @property
    def share_of_peak(self) -> np.ndarray:
        """PUL, section 4.3."""
        share: np.ndarray = self.memory * self.shared * self.balance * self.resources
        return share

    def flops(self, machine: Machine) -> np.ndarray:
        """The claimed maximum of operations per second."""
        return self.share_of_peak * machine.peak_flops["fp32"]


def printed_limit(schema: AnySchema, facts: Any, candidates: Columns, machine: Machine) -> PrintedLimit:
    """The limit of implicit GEMM by the formulas for matrix multiplication, of direct convolution by those for convolution (tables 6 to 8).

    Raises:
        Unsuitable: for another schema.
    """
    if schema not in _FORMULAS:
        raise Unsuitable(f"DeepCuts prints no formulas for the schema {schema.name}")
    return _FORMULAS[schema](facts, candidates, machine)


def _matrix_product(facts: ContractionFacts, candidates: Columns, machine: Machine) -> PrintedLimit:
    """N is m, K is n, C the reduced elements of one step."""
    n, k, c = candidates["block_m"], candidates["block_n"], candidates["block_k"]
    n_thread, k_thread = candidates["thread_m"], candidates["thread_n"]
    blocks = -(-facts.m // n) * -(-facts.n // k) * facts.batch * candidates["split"]
    transactions = n * -(-c // TRANSACTION_ELEMENTS) + c * -(-k // TRANSACTION_ELEMENTS)
    return _limit(
        machine,
        block_flops=2 * n * c * k,
        transactions=transactions,
        thread_flops=2 * n_thread * c * k_thread,
        loads=n_thread * c + c * k_thread,
        blocks=blocks,
        threads=threads_of(candidates),
        shared_bytes=shared_bytes_of(facts, candidates),
    )


def _convolution(facts: DirectFacts, candidates: Columns, machine: Machine) -> PrintedLimit:
    """P is (F - 1) / 2: a problem has no padding of its own, its input is stored with a halo. Shared memory holds what one step stages of both
    operands."""
    k_thread, y_thread, x_thread = (candidates[f"register_{d}"] for d in "kyx")
    k, y, x = extents_of(candidates)
    area = facts.filter_y * facts.filter_x
    blocks = -(-facts.outputs // k) * -(-facts.height // y) * -(-facts.width // x) * facts.images * facts.groups * candidates["split"]
    transactions = facts.channels * _halo(y, x, facts) / TRANSACTION_ELEMENTS + -(-k * facts.channels * area // TRANSACTION_ELEMENTS)
    loads = facts.channels * _halo(y_thread, x_thread, facts) + k_thread * facts.channels * area / TRANSACTION_ELEMENTS
    patch_y, patch_x = patch_of(facts, candidates)
    return _limit(
        machine,
        block_flops=2 * facts.channels * k * y * x * area,
        transactions=transactions,
        thread_flops=2 * facts.channels * k_thread * y_thread * x_thread * area,
        loads=loads,
        blocks=blocks,
        threads=threads_of_direct(candidates),
        shared_bytes=4 * candidates["channels"] * (patch_y * patch_x + np.where(candidates["filters"] == SHARED, k * area, 0)),
    )


_FORMULAS: Mapping[AnySchema, Callable[[Any, Columns, Machine], PrintedLimit]] = MappingProxyType({GEMM: _matrix_product, DIRECT: _convolution})


def _halo(y: np.ndarray, x: np.ndarray, facts: DirectFacts) -> np.ndarray:
    """The inputs of y by x outputs, counted as in tables 7 and 8."""
    pad_y, pad_x = (facts.filter_y - 1) // 2, (facts.filter_x - 1) // 2
    inputs: np.ndarray = ((y + facts.filter_y - 2 * pad_y) // facts.stride_y + 1) * ((x + facts.filter_x - 2 * pad_x) // facts.stride_x + 1)
    return inputs


def _limit(
    machine: Machine,
    *,
    block_flops: np.ndarray,
    transactions: np.ndarray,
    thread_flops: np.ndarray,
    loads: np.ndarray,
    blocks: np.ndarray,
    threads: np.ndarray,
    shared_bytes: np.ndarray,
) -> PrintedLimit:
    """The limit of section 4.2, without bank conflicts (COEF_bc = 1)."""
    intensity = block_flops / (4 * TRANSACTION_ELEMENTS * transactions)
    cache = machine.cache(1)
    latency = cache.latency_cycles if cache else 30.0
    waves = -(-blocks // machine.processors)
    return PrintedLimit(
        memory=np.minimum(1, intensity / (machine.peak_flops["fp32"] / machine.memory_bandwidth)),
        shared=np.minimum(1, thread_flops / loads / latency),
        balance=1 - blocks % machine.processors / machine.processors / waves,
        resources=((threads < machine.threads_per_block) & (shared_bytes < machine.shared_bytes_per_block)).astype(float),
    )
