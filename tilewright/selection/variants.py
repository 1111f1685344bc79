"""Variants of the code of the candidates that are ranked best (`Schema.variants`), placed by what was measured of such variants.

Learned models were trained without variants. A variant's time is therefore that of the candidate that it varies, learned correction included, times

    (analytical time of the variant / analytical time of the candidate) ^ confirmed

`confirmed` is the part of the logarithm of predicted gains that measurements on this GPU have confirmed (part "variants" of its calibration file),
the least of those of the axes in which the variant differs. Where nothing was measured it is 0: the variant comes directly behind the candidate, so
that it is never chosen by prediction alone, but is among the first that trials measure. Of some gains less is believed (`believed`).
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from tilewright.hardware.calibration import GpuVariants
from tilewright.kernels.columns import length
from tilewright.kernels.gpu.counts import LaunchCounts
from tilewright.kernels.gpu.warpgroup.space import MEETING, SENT
from tilewright.selection.ranking import Part, Ranking, rows_of, variants_of

VARIED = 8
"""Candidates, the first of the ranking, of which variants are considered."""
MOST_OF_SENT = 0.15
"""Largest logarithm of a predicted gain of results that are sent that is believed. Of products that wait for memory formulas predict up to a factor
of two, since they count stores behind all that is read; these gained nothing."""
LEAST_GAIN = 0.01
"""Variants that are predicted to gain less are left out: they would displace other candidates from trials."""


def with_variants(ranking: Ranking, confirmed: GpuVariants) -> Ranking:
    """Adds, for each of the first candidates, the variant that is predicted to gain most, if it is to gain enough."""
    if not any(part.schema.variants for part in ranking.parts):
        return ranking
    seconds, starts = ranking.seconds, ranking.starts
    first = np.argpartition(seconds, VARIED)[:VARIED] if len(seconds) > VARIED else np.arange(len(seconds))
    parts: list[Part] = []
    times: list[np.ndarray] = [seconds]
    for number, part in enumerate(ranking.parts):
        own = np.sort(first[(first >= starts[number]) & (first < starts[number + 1])])
        found = variants_of(part, own - starts[number], ranking.machine)
        if found is None:
            continue
        variants, origins, ratios = found
        best = _best_of_each(origins, ratios)
        best = best[ratios[best] <= 1 - LEAST_GAIN]
        if len(best):
            varied = rows_of(variants, best)
            predicted = seconds[own][origins[best]] * np.exp(-shares_of(varied, confirmed) * believed(varied, ratios[best]))
            distinct = _fastest_of_equal(varied, predicted)
            parts.append(rows_of(varied, distinct))
            times.append(predicted[distinct])
    return replace(ranking, parts=(*ranking.parts, *parts), predicted=np.concatenate(times)) if parts else ranking


def _best_of_each(origins: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """For each origin the position of the least ratio, the first of equal ones."""
    order = np.lexsort((np.arange(len(ratios)), ratios, origins))
    return order[np.unique(origins[order], return_index=True)[1]]


def _fastest_of_equal(variants: Part, seconds: np.ndarray) -> np.ndarray:
    """The positions of variants that are all different, of equal ones that of the fastest: candidates that differ in what a variant replaces have the
    same one."""
    order = np.argsort(seconds, kind="stable")
    columns = np.stack([column[order] for column in variants.candidates.values()], axis=1)
    return np.sort(order[np.unique(columns, axis=0, return_index=True)[1]])


def shares_of(variants: Part, confirmed: GpuVariants) -> np.ndarray:
    """The confirmed share of each variant: the least of the axes in which it has no default value."""
    shares = [np.full(length(variants.candidates), np.inf)]
    for axis in (entry.name for entry in fields(confirmed) if entry.name in variants.candidates):
        shares.append(np.where(variants.candidates[axis] > 0, getattr(confirmed, axis), np.inf))
    least: np.ndarray = np.min(shares, axis=0)
    return least


def believed(variants: Part, ratios: np.ndarray) -> np.ndarray:
    """Logarithms of predicted gains, as far as they are believed, given predicted times over those of what each varies: none of blocks that meet
    where a processor holds one of them at a time (those were slower, although formulas say about as fast), and up to a limit of results that are
    sent."""
    assert isinstance(variants.counts, LaunchCounts)
    gains: np.ndarray = -np.log(ratios)
    axes = variants.candidates
    if MEETING in axes:
        gains = np.where((axes[MEETING] > 0) & (variants.counts.resident == 1), 0.0, gains)
    if SENT in axes:
        gains = np.where(axes[SENT] > 0, np.minimum(gains, MOST_OF_SENT), gains)
    return gains
