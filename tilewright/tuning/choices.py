"""Cache of choices, stored beside the kernels: the same models always choose the same schedule for the same problem, and ranking takes time.

A choice is one JSON file, named by a digest of everything that determines it: problem, machine, the sources that lower, rank and score, trained
models, options, the version of NumPy, for a GPU the calibration in use, and, where code decides, the programs that compile and read it. A choice is
not stored if a process hung while it was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright import settings
from tilewright.files import json_of
from tilewright.hardware.calibration import name_in_use
from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.ir.space import Candidate, Comparison
from tilewright.kernels.registry import has_registered, schema_of
from tilewright.kernels.schema import USUAL, Numerics
from tilewright.partition.context import Chooser
from tilewright.selection.choice import choosing, rank
from tilewright.selection.learned import cpu
from tilewright.selection.ranking import Choice
from tilewright.system.private_files import read_private, write_private
from tilewright.tuning import serialisation
from tilewright.tuning.code_choice import best, tools
from tilewright.tuning.problems import digest_of_files, generator, key_of

RANKING = (
    "kernels/**/*.py", "selection/**/*.py", "selection/models/*", "analysis/**/*.py", "hardware/*.py", "hardware/calibration/*.json",
    "toolchain/*.py", "tuning/code_choice.py", "runtime/kernel_source.py",
)  # fmt: skip
"""Files that affect the ranking: models, fitted and learned constants, occupancy rules, pipeline tables, compiler flags, choosing by code."""


@lru_cache(maxsize=1)
def _models() -> str:
    """A digest of everything that affects the ranking."""
    return f"{digest_of_files(*RANKING)} {np.__version__}"


def remembered(numerics: Numerics = USUAL, by_code: bool = False) -> Chooser:
    """A chooser that follows the models, and, `by_code` for contractions on a CPU, the code of their favourites. Earlier choices are read from the
    cache, except on a CPU where only the analytical models decide: ranking again is as quick. `numerics`: as in `selection.choice.rank`."""

    predicted = choosing(numerics)

    def models(problem: Problem, machine: Machine, threads: int) -> tuple[Choice, bool]:
        """The choice, and whether it is reproducible."""
        if not by_code or machine.is_gpu or problem.region.kind != "contraction":
            return predicted(problem, machine, threads), True
        ranking = rank(problem, machine, threads, numerics)
        choice, whole = best(problem, ranking, threads)
        return ranking.compared(choice), whole

    def chosen(problem: Problem, machine: Machine, threads: int) -> Choice:
        quick = not machine.is_gpu and (problem.region.kind != "contraction" or not (by_code or cpu.share_for(machine, [""])))
        if quick or has_registered(machine, problem.region.kind):
            return models(problem, machine, threads)[0]
        path = place(problem, machine, numerics, 0 if machine.is_gpu else threads, by_code)
        known = _read(path, problem, machine)
        if known is None:
            known, whole = models(problem, machine, threads)
            if whole:
                _write(path, known)
        return known

    return chosen


def place(problem: Problem, machine: Machine, numerics: Numerics, threads: int = 0, by_code: bool = False) -> Path:
    """The file of a choice; `threads`: threads of a CPU; `by_code`: whether code of the favourites is read on CPUs."""
    specific = name_in_use(machine) if machine.is_gpu else tools(machine) if by_code else ""
    key = hashlib.sha256(f"{key_of(problem)} {generator(machine)} {_models()} {numerics} {threads} {specific}".encode()).hexdigest()[:40]
    return settings.cache_directory() / "choices" / f"{key}.json"


def _read(path: Path, problem: Problem, machine: Machine) -> Choice | None:
    """The choice in a file; None if there is no file, it is damaged, or another user may have written it."""
    try:
        content = json_of(read_private(path, path.parent))
        if content.pop("digest") != _digest(content):
            return None
        terms = {str(name): float(seconds) for name, seconds in content["terms"].items()}
        rejected = {str(reason): int(count) for reason, count in content["rejected"].items()}
        schedule = serialisation.schedule_of(content["schedule"])
        schema = schema_of(schedule, machine, problem.region.kind)
        others = tuple(Candidate(**{**entry, "terms": MappingProxyType(entry["terms"])}) for entry in content["others"])
        comparison = Comparison(schema.name, others, MappingProxyType(content["unsuitable"]))
        seconds, candidates, flops = float(content["seconds"]), int(content["candidates"]), float(content["flops"])
        notes = tuple(map(str, content["notes"]))
        return Choice(schema, schedule, seconds, MappingProxyType(terms), rejected, candidates, None, notes, comparison, flops)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, Unsuitable):
        return None


def _digest(content: Mapping[str, Any]) -> str:
    """Detects damage: a schedule that is read is not checked against its space."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def _write(path: Path, choice: Choice) -> None:
    """Stores a choice atomically; a full or read-only disk costs only time."""
    content = {
        "schedule": serialisation.schedule_text(choice.schedule), "seconds": choice.seconds, "terms": dict(choice.terms),
        "rejected": dict(choice.rejected), "candidates": choice.candidates, "flops": choice.flops,
        "others": [{**vars(other), "terms": dict(other.terms)} for other in choice.comparison.others],
        "unsuitable": dict(choice.comparison.unsuitable), "notes": list(choice.notes),
    }  # fmt: skip
    with suppress(OSError):
        write_private(path, json.dumps({**content, "digest": _digest(content)}).encode())
