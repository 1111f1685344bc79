"""Predicted seconds as named terms, for many candidates at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """`terms` maps a name to seconds, one entry per candidate. The terms named in `overlapped` run at the same time and count as their p-norm with
    the given exponent: infinity gives the longest, 1 the sum. The others add up."""

    terms: Mapping[str, np.ndarray]
    overlapped: tuple[str, ...] = ()
    exponent: float = math.inf

    @property
    def seconds(self) -> np.ndarray:
        together = [self.terms[name] for name in self.overlapped]
        alone = [values for name, values in self.terms.items() if name not in self.overlapped]
        total = p_norm(together, self.exponent) if together else np.zeros(())
        for values in alone:
            total = total + values
        return total

    def without(self, names: frozenset[str]) -> Estimate:
        """The estimate without some of its terms."""
        terms = {name: values for name, values in self.terms.items() if name not in names}
        return Estimate(terms, tuple(name for name in self.overlapped if name in terms), self.exponent)


def p_norm(terms: Sequence[np.ndarray | float], exponent: float) -> np.ndarray:
    """(sum of term ** exponent) ** (1 / exponent), element by element; the largest for an infinite exponent."""
    longest: np.ndarray = np.asarray(reduce(np.maximum, terms), dtype=np.float64)
    if math.isinf(exponent):
        return longest
    scale = np.where(longest > 0, longest, 1.0)
    shares = [np.power(np.asarray(term) / scale, exponent) for term in terms]
    return np.asarray(longest * np.power(reduce(np.add, shares), 1 / exponent))
