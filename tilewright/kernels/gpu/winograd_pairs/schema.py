"""The schema of convolutions by transforms of blocks whose products are of pairs of narrower numbers, in three kernels."""

from __future__ import annotations

from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counts import TensorCounts, TileCounts
from tilewright.kernels.gpu.warpgroup.estimate import pipelined_bound, warpgroup_counts, warpgroup_estimate
from tilewright.kernels.gpu.warpgroup.space import kind_of
from tilewright.kernels.gpu.winograd.bound import bound_with_transforms
from tilewright.kernels.gpu.winograd.counts import counts_with_transforms
from tilewright.kernels.gpu.winograd.estimate import estimate_with_transforms
from tilewright.kernels.gpu.winograd_pairs.lower import lower_paired_winograd, match
from tilewright.kernels.gpu.winograd_pairs.space import PairedWinogradFacts, PairedWinogradSchedule, of_product, paired_winograd_space
from tilewright.kernels.schema import Schema


def counts(facts: PairedWinogradFacts, candidates: Columns, machine: Machine) -> TileCounts:
    """Those of the product, with the transforms' bytes."""
    return counts_with_transforms(facts.base, candidates, lambda number, part: warpgroup_counts(facts.products[number], of_product(part), machine))


def estimate(facts: PairedWinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine) -> Estimate:
    """Seconds of each candidate: transforms as in `winograd`, the product as by warpgroups."""

    def multiplied(number: int, part: Columns, lying: TileCounts) -> Estimate:
        assert isinstance(lying, TensorCounts)
        return warpgroup_estimate(facts.products[number], of_product(part), lying, machine)

    return estimate_with_transforms(facts.base, candidates, counts, machine, multiplied)


def bound(facts: PairedWinogradFacts, candidates: Columns, counts: TileCounts, machine: Machine, share: float) -> Estimate:
    """Lower bounds in seconds of the three kernels."""

    def multiplied(number: int, part: Columns, known: TileCounts) -> Estimate:
        assert isinstance(known, TensorCounts)
        return pipelined_bound(kind_of(facts.products[number], of_product(part)), known, machine, share)

    return bound_with_transforms(facts.base, candidates, counts, machine, multiplied)


WINOGRAD_PAIRS = Schema(
    name="winograd pairs",
    kinds=("contraction",),
    schedule=PairedWinogradSchedule,
    match=match,
    space=lambda facts, machine, options: paired_winograd_space(facts, machine, options.numerics),
    counts=counts,
    estimate=lambda facts, candidates, counts, machine, options: estimate(facts, candidates, counts, machine),
    lower=lambda problem, form, schedule, machine: lower_paired_winograd(problem, form.parts, schedule, machine),
    bound=bound,
    transforms=True,
)
