"""Learned correction of the ranking on CPUs: predicts the error of the analytical models.

One forest serves all cores, vectors and tile registers that it was trained on, with any number of threads. It predicts the logarithm of measured over
modelled time from features that are relative to the machine: shares of the models' terms, tiles relative to registers, bytes relative to caches, work
relative to threads, how much of tiles, panels and threads is filled. It was trained on measured schedules of random problems
(`bench/cpu_learned.py`). Regions and transforms unlike those keep the analytical times; on other x86 cores a share of the correction counts.

A correction is relative to the fastest kernels of the same problem, whatever their schemas: those of two schemas compare if both were measured for
the same problems. Candidates on tile registers, for which vectors are no alternative (`Schema.alone`), are never compared with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tilewright.errors import InvalidModel
from tilewright.files import reading
from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import length
from tilewright.kernels.cpu.features import machine_features
from tilewright.kernels.schema import Options
from tilewright.selection.learned.forest import Forest, load
from tilewright.selection.ranking import Part, Ranking

MODEL = Path(__file__).parent.parent / "models" / "cpu.npz"
VERSION = 3
"""Incremented whenever `record` gives other columns for parts that a forest has learned; a forest of another version is not used."""
MISSING = -64.0
"""Value of features that a schema does not have."""
LEAST_SHARE = 2.0**-20
"""Shares of the time below this one are not told apart."""
COMMON_AXES = ("filter_y", "filter_x", "fourier")
"""Axes of transforms that are the same in all candidates that the forest covers."""
ARCHITECTURE = "x86-64"
"""That of all cores in the training data: whether the forest serves others is not known."""
SHARE_ELSEWHERE = 0.5
"""The share of the correction on cores and vectors that were not measured. A part of the error is that of the models, whatever the core, and a part
that of a core; over random problems of cores left out, first choices lose least with about a half (`bench.cpu_learned --folds`)."""


def record(part: Part, machine: Machine, threads: int) -> dict[str, np.ndarray] | None:
    """Columns of features by name; None for a part that the forest does not cover. Sizes and times are binary logarithms."""
    schema, rows = part.schema, part.candidates
    own = schema.features(part.facts, rows, machine, Options(threads)) if schema.features is not None else None
    if own is None:
        return None
    total, count = part.estimate.seconds, length(rows)
    columns = {"calls": np.log2(total / machine.dispatch_seconds)}
    columns |= {name: np.full(count, value) for name, value in machine_features(machine, threads).items()}
    columns |= {f"axis {name}": np.asarray(column, dtype=np.float64) for name, column in rows.items() if name not in COMMON_AXES}
    columns |= {f"term {name}": np.log2(np.maximum(term / total, LEAST_SHARE)) for name, term in part.estimate.terms.items()}
    return columns | own


def table(columns: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """The features as an array, [candidates, names] float32."""
    missing = np.full(len(columns["calls"]), MISSING)
    return np.stack([np.broadcast_to(columns.get(name, missing), missing.shape) for name in names], axis=1).astype(np.float32)


Build: TypeAlias = tuple[str, int, str]
"""A core, the bits of the vectors for which kernels are compiled, and what multiplies in them if not these vectors (`Schema.unit`): with others it is
another machine to a kernel."""


def build_of(machine: Machine, unit: str = "") -> Build:
    """The build of a machine's kernels that multiply with this unit."""
    return machine.pipeline, machine.vector_bits, unit


def units_of(ranking: Ranking) -> frozenset[str]:
    """What multiplies in the candidates' kernels; "" for vectors."""
    return frozenset(part.schema.unit for part in ranking.parts)


@dataclass(frozen=True)
class Trained:
    """The forest, and the builds that were measured."""

    forest: Forest
    builds: tuple[Build, ...]

    def cores(self, unit: str) -> frozenset[str]:
        """The cores on which kernels that multiply with this unit were measured."""
        return frozenset(core for core, _, own in self.builds if own == unit)


@lru_cache(maxsize=8)
def trained(path: Path) -> Trained | None:
    """The forest of a file; None if there is no file or it has another version.

    Raises:
        InvalidModel: if the file is damaged.
    """
    if not path.exists():
        return None
    forest, more = load(path)
    if forest.version != VERSION:
        return None
    with reading(path, InvalidModel, "install Tilewright again, or train it again"):
        builds = tuple((str(core), int(bits), str(unit)) for core, bits, unit in more["builds"])
        return Trained(forest, builds)


def share_for(machine: Machine, units: Iterable[str]) -> float:
    """The part of the forest's correction, as a logarithm, that counts on this machine: all if it was trained with measurements of such a core and
    such vectors, for each of the units; SHARE_ELSEWHERE if these were measured on several other cores, so that the forest was judged without one; 0
    otherwise, on other architectures, or if there is no forest."""
    known, units = trained(MODEL), frozenset(units)
    if known is None or machine.architecture != ARCHITECTURE:
        return 0.0
    if {build_of(machine, unit) for unit in units} <= set(known.builds):
        return 1.0
    return SHARE_ELSEWHERE if all(len(known.cores(unit)) > 1 for unit in units) else 0.0


def predicted(forest: Forest, ranking: Ranking, machine: Machine, threads: int, share: float = 1.0) -> np.ndarray | None:
    """Seconds of all candidates, with this share of the correction; None if there is a part that the forest does not cover.

    Transforms that it does not cover keep their analytical times. Since a correction is relative to the fastest kernels of the same problem, the
    others are then scaled so that their first has its analytical time too."""
    seconds = [part.estimate.seconds for part in ranking.parts]
    covered: list[int] = []
    for number, part in enumerate(ranking.parts):
        columns = record(part, machine, threads)
        if columns is not None:
            seconds[number] = part.estimate.seconds * np.exp2(share * forest.predict(table(columns, forest.names)))
            covered.append(number)
        elif not part.schema.transforms:
            return None
    if not covered:
        return None
    if len(covered) < len(seconds):
        scale = min(ranking.parts[number].estimate.seconds.min() for number in covered) / min(seconds[number].min() for number in covered)
        seconds = [times * scale if number in covered else times for number, times in enumerate(seconds)]
    return np.concatenate(seconds)


def corrected(ranking: Ranking, machine: Machine, threads: int) -> Ranking:
    """The ranking with the times predicted by the forest, if it covers the region and its share on this machine is not 0."""
    share, known = share_for(machine, units_of(ranking)), trained(MODEL)
    if known is None or share == 0 or not ranking.candidates:
        return ranking
    return replace(ranking, predicted=predicted(known.forest, ranking, machine, threads, share))


def decided(ranking: Ranking) -> bool:
    """Whether the order is the forest's, trained with measurements of this core, vectors and units."""
    return ranking.predicted is not None and share_for(ranking.machine, units_of(ranking)) == 1
