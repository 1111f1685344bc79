"""The learned correction of a chain's predicted time on a GPU: what of its tiles it is told, and the model of a chip.

The formulas of `tile_judge` add what the schemas predict for their parts alone. What they leave out, such as the latency of the first loads of each
part and of threads that have many results one after another, depends on the tiles. A forest of regression trees learns it from measured chains
(`bench.gpu_chains --train`), as the logarithm of measured over formulas' seconds, as CNNOpt learns from its analytical quantities (PACT 2022, section
4). Formulas leave out and never exaggerate: no correction makes a chain faster, so that their lower bounds hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, exp, log

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
inner results in shared memory. For each group of schemas its turns, its share of the work, the most results, operations and bytes of a part, per
thread but the bytes, and the operations per thread of all its parts."""


def features(tiling: Tiling, choices: Sequence[Choice], threads: int, resident: int, places: float, seconds: Mapping[str, float]) -> np.ndarray:
    """The features of tiles, [len(NAMES)] float64. `choices`: of the regions' parts; `places`: blocks that run at once; `seconds`: those of the
    formulas for the `chain`, for what it reads and stores in `memory` at least, and for the `exchange` of rows."""
    parts = [tiling.part(number) for number in range(len(choices))]
    times = [repeats * choice.seconds for repeats, choice in zip(tiling.repeats, choices, strict=True)]
    rounds = ceil(tiling.blocks / places)
    found = [
        log(seconds["chain"]), log(sum(times)), log(threads), log(resident), log(tiling.blocks), log(rounds), tiling.blocks / (rounds * places),
        float(tiling.chunked), float(tiling.exchanged is not None), log(tiling.cluster), log(1e6 * seconds["memory"]), 1e6 * seconds["exchange"],
        float(len(choices)), float(sum(tiling.repeats)), tiling.shared_bytes / 1024,
    ]  # fmt: skip
    for group in (*GROUPS.values(), "others"):
        own = [number for number, choice in enumerate(choices) if GROUPS.get(choice.schema.name, "others") == group]
        results = [sum(parts[number].values[name].bytes for name in parts[number].region.outputs) / 2 for number in own]
        operations = [parts[number].region.flops() for number in own]
        size = [sum(parts[number].values[name].bytes for name in parts[number].region.inputs) for number in own]
        found += [
            float(sum(tiling.repeats[number] for number in own)), sum(times[number] for number in own) / sum(times),
            *(log(1 + max(each, default=0) / threads) for each in (results, operations)),
            log(1 + sum(tiling.repeats[number] * count for number, count in zip(own, operations, strict=True)) / threads),
            log(1 + max(size, default=0)),
        ]  # fmt: skip
    return np.array(found)


@lru_cache(maxsize=8)
def model_of(name: str) -> Forest | None:
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
