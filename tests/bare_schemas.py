"""Minimal schemas, with only a name and a schedule type, for tests that need no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewright.hardware import machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.counts import counted
from tilewright.kernels.schema import AnySchema, Schema
from tilewright.selection.ranking import Part, Ranking


def never(*_: Any) -> Any:
    raise AssertionError("nothing but the schedule is asked of this schema")


def bare(schedule: Callable[..., Any], name: str = "bare") -> AnySchema:
    return Schema(name, ("contraction",), schedule, never, never, never, never, never)  # type: ignore[arg-type]


def part(schedule: Callable[..., Any], candidates: Mapping[str, np.ndarray], seconds: Any) -> Part:
    """Candidates of a schema of their own that take `seconds`."""
    return Part(bare(schedule), None, candidates, counted(len(np.asarray(seconds)), 0, 0, 0), Estimate({"all": np.asarray(seconds, dtype=float)}))


def ranking_of(*parts: Part) -> Ranking:
    return Ranking(machine("h200"), parts)
