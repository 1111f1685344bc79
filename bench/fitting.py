"""Preparing measurements of published kernels for training: dropping failed launches, and fitting the constants of the count model to the rest."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from scipy.optimize import least_squares

from tilewright.hardware.calibration import Overheads, gpu_calibration
from tilewright.hardware.machine import Machine
from tilewright.kernels.counts import taken
from tilewright.kernels.gpu.counted import counted_cost
from tilewright.selection.learned.hybrid import Recipe, Samples, best_of_problem, out_of_fold

FAILED_RESIDUAL = -0.9
"""Logarithm of measured over expected time below which a measurement counts as a launch that failed unnoticed."""


def without_failures(samples: Samples, machine: Machine, overheads: Overheads) -> Samples:
    """Drops impossible measurements: faster than the machine's peak rate allows, or far below the expectation from kernels of other problems (a
    launch that fails unnoticed returns in microseconds)."""
    samples = samples.where(samples.seconds > samples.counts.flops / machine.peak_flops["fp32"])
    if len(np.unique(samples.problem)) < 8:
        return samples
    quick = Recipe(options={"max_iter": 150, "loss": "absolute_error"})
    residual = np.log(samples.seconds / out_of_fold(samples, machine, quick, overheads, 4, 1))
    return samples.where(residual > FAILED_RESIDUAL)


def fit_overheads(samples: Samples, machine: Machine, start: Overheads | None = None, each: int = 40, prior: float = 0.02) -> Overheads:
    """The analytical constants of a robust least-squares fit of logarithms of time to up to `each` of the better kernels of each problem; good
    kernels have more weight. `prior` keeps constants that the data do not determine near `start` (default: the machine's)."""
    start = start or gpu_calibration(machine).counted
    quality = best_of_problem(samples) / samples.seconds
    order = np.random.default_rng(3).permutation(len(samples))
    order = order[quality[order] > 0.25]
    numbers = samples.problem[order]
    order = order[np.argsort(numbers, kind="stable")]
    numbers = samples.problem[order]
    first = np.r_[True, numbers[1:] != numbers[:-1]]
    position = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    chosen = order[position < each]
    volumes, goal, weight = taken(samples.counts, chosen), np.log(samples.seconds[chosen]), quality[chosen]
    names = [spec.name for spec in fields(Overheads)]
    origin = np.log([getattr(start, name) for name in names])

    def with_constants(logarithms: np.ndarray) -> Overheads:
        return replace(start, **dict(zip(names, map(float, np.exp(logarithms)), strict=True)))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        predicted = np.log(counted_cost(volumes, machine, with_constants(logarithms)).seconds)
        differences: np.ndarray = np.r_[(predicted - goal) * weight, (logarithms - origin) * prior * len(chosen) ** 0.5]
        return differences

    solution = least_squares(residuals, origin, loss="soft_l1", f_scale=0.1, max_nfev=40, bounds=(origin - 2.5, origin + 2.5))
    return with_constants(solution.x)
