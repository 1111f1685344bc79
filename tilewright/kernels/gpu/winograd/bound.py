"""Lower bounds on the time of Winograd's algorithm in three kernels."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import MappingProxyType

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.block_transforms import of_each
from tilewright.kernels.columns import Columns, length, take
from tilewright.kernels.counts import taken
from tilewright.kernels.gpu.bounds import WIDEST, spread
from tilewright.kernels.gpu.counts import TileCounts
from tilewright.kernels.gpu.gemm.bound import contraction_bound
from tilewright.kernels.gpu.winograd.space import WinogradFacts


def winograd_bound(facts: WinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds (`bound_with_transforms`); that of the product is `contraction_bound`."""

    def multiplied(number: int, part: Columns, known: TileCounts) -> Estimate:
        return contraction_bound(facts.products[number], part, known, machine, share)

    return bound_with_transforms(facts, candidates, counts, machine, multiplied)


def bound_with_transforms(
    facts: WinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine, multiplied: Callable[[int, Columns, TileCounts], Estimate]
) -> Estimate:
    """Lower bounds in seconds for tiles of m results: three dependent kernels. `multiplied`: the bound of the product of candidates with the
    transform of a number.

    A transform takes at least a launch, and the time in which all schedulers issue the instructions of its tiles and channels: one addition for each
    of the points, and vector loads and stores of four elements for the points and for m inputs (tiles share the others) or outputs.
    memory: input, transformed filters and output; intermediate values may stay in level 2."""
    count = length(candidates)
    terms: dict[str, np.ndarray] = {}
    for which, transform in of_each(candidates):
        number, points = facts.number(transform), transform.points
        product = facts.products[number]
        issued = points + (points + prod(transform.tile)) / WIDEST
        inputs, sums = (spread(machine, product.m * channels * issued) for channels in (facts.channels, facts.outputs))
        estimate = multiplied(number, take(candidates, which), taken(counts, which))
        for name, seconds in estimate.terms.items():
            terms.setdefault(name, np.zeros(count))[which] = seconds if name == "memory" else seconds + inputs + sums
    return Estimate(MappingProxyType(terms), overlapped=tuple(terms))
