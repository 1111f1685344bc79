"""Variants of the code of a candidate: what DeepCuts (PLDI 2021, section 6) chooses besides tiles, for a tile that is already good.

| axis | DeepCuts | values here |
|---|---|---|
| `layout` | format of shared memory, padding against bank conflicts | rows padded; groups swizzled; tiles of copies transposed |
| `loop` | "normal" and "prefetching" | copies or registers ahead, as `stages` says; registers where there are copies; one buffer, nothing ahead |
| `table` | computation-based and memory-based index functions | divisions at each load; a table that each block computes |

Vectors are no axis: every access has the widest that alignment allows, which takes the fewest instructions and no more wavefronts. Variants are made
of a few candidates that are ranked best (`selection/variants.py`), so that they do not multiply the space. Products of Winograd's algorithm have them
too (`winograd/variants.py`); variants of direct convolutions are in `direct/variants.py`.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns, length, product_of, reject, take, times
from tilewright.kernels.gpu.gemm.space import (
    AHEAD,
    PADDED,
    PLAIN,
    PREFETCHED,
    SWIZZLED,
    TRANSPOSED,
    VARIANT_AXES,
    WORD,
    ContractionFacts,
    axis_of,
    contraction_rules,
    copied,
    steps_of,
    tile_rules,
)

ORIGIN = "origin"


def contraction_variants(facts: ContractionFacts, candidates: Columns, machine: Machine) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The feasible variants of candidates, with their columns and VARIANT_AXES, and for each the position of the candidate that it varies. Candidates
    that are swizzled themselves (`space.is_large`) have none."""
    kinds = product_of(dict(zip(VARIANT_AXES, ((PADDED, SWIZZLED, TRANSPOSED), (AHEAD, PREFETCHED, PLAIN), (0, 1)), strict=True)))
    kinds = take(kinds, np.any(list(kinds.values()), axis=0))
    plain = np.flatnonzero(sum((axis_of(candidates, name) for name in VARIANT_AXES), np.zeros(length(candidates))) == 0)
    varied = {name: column[plain] for name, column in candidates.items() if name not in VARIANT_AXES}
    rows = times({**varied, ORIGIN: plain}, kinds)
    if "layout" in candidates:  # what the space has is no variant
        rows = take(rows, (rows["layout"] != SWIZZLED) | (rows["loop"] != AHEAD) | (rows["table"] > 0) | (rows["split"] > 1))
    for rules in (variant_rules, tile_rules, contraction_rules):
        rows, _ = reject(rows, rules(facts, rows, machine))
    origins = rows.pop(ORIGIN)
    return rows, origins


def variant_rules(facts: ContractionFacts, candidates: Columns, machine: Machine) -> list[tuple[str, np.ndarray]]:
    """Reasons for which variants do not differ from another candidate, or cannot be made, and a mask of the rows that each rejects."""
    layout, loop, stages = candidates["layout"], candidates["loop"], candidates["stages"]
    along_r = [operand for operand in (facts.a, facts.b) if operand.along == "r"]
    narrow = facts.is_narrow(facts.a) or facts.is_narrow(facts.b)
    words = all(operand.element_bytes == WORD for operand in along_r)
    return [
        ("no factor is read along the reduction, so that none is transposed or padded", (layout != PADDED) & (not along_r)),
        ("banks and copies hold words, and the factor has other elements", (layout != PADDED) & (not words)),
        ("only copies of single elements transpose", (layout == TRANSPOSED) & ~copied(candidates)),
        ("the copies are of single elements anyway", (layout == TRANSPOSED) & all(operand.vector_width == 1 for operand in along_r)),
        ("one buffer, or two filled through registers, are the same with any number of stages", (loop != AHEAD) & (stages > 2)),
        ("candidates with one stage fill two buffers through registers", (loop == PREFETCHED) & ((stages == 1) | narrow)),
        ("a single step has one buffer anyway", (loop != AHEAD) & (steps_of(facts, candidates)[1] == 1)),
        ("the offsets along the reduction take no divisions, or depend on other axes", (candidates["table"] > 0) & (not facts.a.tabled)),
    ]
