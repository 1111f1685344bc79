"""Data movement and resources of the product of Winograd's algorithm in three kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from math import prod

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.block_transforms import of_each
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.counts import contraction_counts
from tilewright.kernels.gpu.winograd.space import WinogradFacts


def winograd_counts(facts: WinogradFacts, candidates: Columns, machine: Machine) -> TileCounts:
    """The counts of the batched product on CUDA cores, with those of the transforms."""
    return counts_with_transforms(facts, candidates, lambda number, part: contraction_counts(facts.products[number], part, machine))


def counts_with_transforms(facts: WinogradFacts, candidates: Columns, multiplied: Callable[[int, Columns], TileCounts]) -> TileCounts:
    """The counts of the batched product, which takes most of the time; distinct bytes and bytes from level 2 are those of all three kernels.
    `multiplied`: the counts of candidates with the transform of a number."""
    found = {entry.name: np.zeros(length(candidates)) for entry in fields(TileCounts)}
    kind = TileCounts
    for which, transform in of_each(candidates):
        number = facts.number(transform)
        product = facts.products[number]
        one = np.ones(int(which.sum()))
        counts = multiplied(number, take(candidates, which))
        kind = type(counts)
        transformed = facts.bytes_read * prod(transform.span) / prod(transform.tile) + product.bytes_written + facts.epilogue_bytes
        counts = replace(
            counts,
            read_bytes=one * (facts.bytes_read + facts.epilogue_bytes + product.b.bytes),
            result_bytes=one * facts.bytes_written,
            level2_bytes=counts.level2_bytes + transformed,
        )
        for entry in fields(TileCounts):
            found[entry.name][which] = getattr(counts, entry.name)
    return kind(**found)
