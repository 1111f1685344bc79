"""COEF_bc of DeepCuts' limit (PLDI 2021, section 4.2): the degree of shared-memory bank conflicts of each operation of our schedules.

    COEF_bc = wavefronts of the loads of a warp / wavefronts of these loads without bank conflicts

"For each shared memory load operation, DeepCuts checks the addresses accessed by a warp, checks if bank conflicts occur, and calculates the expected
number of cycles"; without conflicts it is 1. The addresses are those of the code (`shared_loads` of each schema), the wavefronts those of the static
analysis (`analysis.gpu.warps`). Operations that load from global memory or registers have no conflicts: transforms of Winograd's inputs, windows,
maps, products of few rows; so has the transform of Winograd's sums, of which adjacent threads read adjacent vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.kernels.columns import Columns, length, row
from tilewright.kernels.gpu.attention.places import shared_loads as attention_loads
from tilewright.kernels.gpu.attention.schema import ATTENTION
from tilewright.kernels.gpu.direct.schema import DIRECT
from tilewright.kernels.gpu.direct.shared_loads import shared_loads as direct_loads
from tilewright.kernels.gpu.gemm.schema import GEMM
from tilewright.kernels.gpu.gemm.shared_loads import shared_loads as contraction_loads
from tilewright.kernels.gpu.gemm.space import ContractionSchedule
from tilewright.kernels.gpu.shared_access import SharedLoads, conflict_coefficient
from tilewright.kernels.gpu.winograd.schema import WINOGRAD
from tilewright.kernels.gpu.winograd_fused.places import product_loads
from tilewright.kernels.gpu.winograd_fused.schema import WINOGRAD_FUSED
from tilewright.kernels.schema import AnySchema
from tilewright.kernels.winograd_transform import output_tiles

Loads = tuple[tuple[SharedLoads, ...], ...]
"""What a warp loads from shared memory in each operation of a kernel."""


def conflicts(schema: AnySchema, facts: Any, candidates: Columns, operations: int) -> list[np.ndarray]:
    """COEF_bc of each operation of a schema's candidates, of which there are so many."""
    if schema not in _LOADS:
        return [np.ones(length(candidates))] * operations
    found = np.array([[conflict_coefficient(loads) for loads in _LOADS[schema](facts, row(candidates, at))] for at in range(length(candidates))])
    return list(found.T)


def _scheduled(kind: Any, candidate: Mapping[str, int]) -> Any:
    """The schedule with a candidate's values; fields that it does not have are at their defaults."""
    return kind(**{entry.name: candidate[entry.name] for entry in fields(kind) if entry.name in candidate})


def _winograd(facts: Any, candidate: Mapping[str, int]) -> Loads:
    product = facts.products[output_tiles(facts.filter_shape).index(candidate["output_tile"])]
    return (), contraction_loads(product, _scheduled(ContractionSchedule, candidate)), ()


_LOADS: Mapping[AnySchema, Callable[[Any, Mapping[str, int]], Loads]] = MappingProxyType(
    {
        GEMM: lambda facts, candidate: (contraction_loads(facts, _scheduled(GEMM.schedule, candidate)),),
        DIRECT: lambda facts, candidate: (direct_loads(facts, _scheduled(DIRECT.schedule, candidate)),),
        WINOGRAD: _winograd,
        WINOGRAD_FUSED: lambda _, candidate: ((), product_loads(_scheduled(WINOGRAD_FUSED.schedule, candidate)), ()),
        ATTENTION: lambda facts, candidate: attention_loads(facts, _scheduled(ATTENTION.schedule, candidate)),
    }
)
