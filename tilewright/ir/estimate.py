"""Predicted seconds as named terms, for many candidates at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """`terms` maps a name to seconds, one entry per candidate. The terms named in `overlapped` run at the same time, so only the longest of them
    counts; the others add up."""

    terms: Mapping[str, np.ndarray]
    overlapped: tuple[str, ...] = ()

    @property
    def seconds(self) -> np.ndarray:
        together = [self.terms[name] for name in self.overlapped]
        alone = [values for name, values in self.terms.items() if name not in self.overlapped]
        total: np.ndarray = np.maximum.reduce(together) if together else np.zeros(())
        for values in alone:
            total = total + values
        return total
