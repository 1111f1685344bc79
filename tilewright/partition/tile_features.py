"""The learned correction of a chain's predicted time on a GPU: what of its tiles it is told, and the model of a chip.

The formulas of `tile_judge` add what the schemas predict for their parts alone. What they leave out, such as the latency of the first loads of each
part and of threads that have many results one after another, depends on the tiles. A forest of regression trees learns it from measured chains
(`bench.gpu_chain_model`), as the logarithm of measured over formulas' seconds, as CNNOpt learns from its analytical quantities (PACT 2022, section
4). No correction makes a chain faster than the formulas say, so that the bounds of the search hold; one in twenty of the measured tiles is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, log, prod

import numpy as np

from tilewright.errors import InvalidModel
from tilewright.partition.tiles import Tiling
from tilewright.selection.learned import forest
from tilewright.selection.learned.forest import Forest
from tilewright.selection.learned.gpu import MODELS
from tilewright.selection.ranking import Choice

SUFFIX = "-half-chains"
"""Appended to a machine's name: the model of its chains of 16-bit values."""
VERSION = 1
"""Of the features; models of another one are rejected."""
GROUPS: Mapping[str, str] = {"window": "windows", "tensor cores": "products"}
"""The features of a part's schema; those of all other schemas are `others`."""
NAMES = (
    "log seconds", "log work", "log threads", "log resident", "log blocks", "log rounds", "filled", "chunked", "exchanging", "log cluster",
    "log memory", "exchange", "regions", "turns", "stored kilobytes",
    *(f"{each} {name}" for each in ("windows", "products", "others")
      for name in ("turns", "share", "log results", "log operations", "log all operations", "log bytes")),
)  # fmt: skip
"""`seconds`: of the formulas; `work`: of the parts of a tile; `rounds`: of blocks; `filled`: part of the places for blocks that they take; `memory`:
microseconds of what the chain reads and stores at least; `exchange`: microseconds of the exchanges of a tile; `turns`: parts of a tile; `stored`: of
inner results in shared memory. For each group of schemas its turns, its share of the work, the most results, operations and read bytes of a part,
per thread but the bytes, and the operations per thread of all its parts."""


@dataclass(frozen=True)
class PartSize:
    """Of a region's part of a tile: results, operations, and bytes that it reads."""

    results: int
    operations: float
    read_bytes: int


def sizes_of(tiling: Tiling) -> list[PartSize]:
    """The sizes of all parts of a tile."""
    parts = [tiling.part(number) for number in range(len(tiling.cuts))]
    read = (sum(part.values[name].bytes for name in part.region.inputs) for part in parts)
    stored = (sum(prod(part.values[name].shape) for name in part.region.outputs) for part in parts)
    return [PartSize(results, part.region.flops(), size) for part, results, size in zip(parts, stored, read, strict=True)]


def features(
    tiling: Tiling, sizes: Sequence[PartSize], choices: Sequence[Choice], threads: int, resident: int, places: float, seconds: Mapping[str, float]
) -> np.ndarray:
    """The features of tiles, [len(NAMES)] float64. `sizes`, `choices`: of the regions' parts; `places`: blocks that run at once; `seconds`: those of
    the formulas for the `chain`, for what it reads and stores in `memory` at least, and for the `exchange` of rows."""
    times = [repeats * choice.seconds for repeats, choice in zip(tiling.repeats, choices, strict=True)]
    rounds = ceil(tiling.blocks / places)
    found = [
        log(seconds["chain"]), log(sum(times)), log(threads), log(resident), log(tiling.blocks), log(rounds), tiling.blocks / (rounds * places),
        float(tiling.chunked), float(tiling.exchanged is not None), log(tiling.cluster), log(1e6 * seconds["memory"]), 1e6 * seconds["exchange"],
        float(len(choices)), float(sum(tiling.repeats)), tiling.shared_bytes / 1024,
    ]  # fmt: skip
    for group in (*GROUPS.values(), "others"):
        own = [number for number, choice in enumerate(choices) if GROUPS.get(choice.schema.name, "others") == group]
        most = [max((getattr(sizes[number], name) for number in own), default=0) for name in ("results", "operations", "read_bytes")]
        found += [
            float(sum(tiling.repeats[number] for number in own)), sum(times[number] for number in own) / sum(times),
            log(1 + most[0] / threads), log(1 + most[1] / threads),
            log(1 + sum(tiling.repeats[number] * sizes[number].operations for number in own) / threads), log(1 + most[2]),
        ]  # fmt: skip
    return np.array(found)


@lru_cache(maxsize=8)
def chain_model(name: str) -> Forest | None:
    """The model of the chains of 16-bit values of a chip (`Machine.measured_as`); None if there is none.

    Raises:
        InvalidModel: if the file is damaged, or was trained with other features.
    """
    path = MODELS / f"{name}{SUFFIX}.npz"
    if not path.exists():
        return None
    found, _ = forest.load(path)
    if found.names != NAMES or found.version != VERSION:
        raise InvalidModel(f"{path} was trained with other features (version {found.version}, this is {VERSION})", "train it again")
    return found


def corrections(model: Forest, rows: np.ndarray) -> list[float]:
    """The measured over the formulas' seconds of tiles with these features, [tiles, len(NAMES)], by a model, at least 1."""
    return [exp(max(0.0, float(each))) for each in model.predict(rows)]
