"""Finer features of GPU kernels with tiles: what decides the order among the fast ones, once all work is counted.

Two kernels with nearly equal `TileCounts` differ by what those average over: whether the warps of the last blocks load all schedulers alike, whether
a warp fills or stores in one round more than its neighbour, whether rows of shared memory are aligned for vector loads, which resource limits the
resident blocks, and whether blocks on one processor share what they read through level 1. All are columns by name, one entry per candidate.
"""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.hardware.occupancy import block_limits
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.counted import busiest
from tilewright.kernels.gpu.counts import SECTOR_WORDS, WORD, TileCounts, ceil_div

GRID = ("tile outputs", "tile rows", "tile columns", "tile points", "grid outputs", "grid rows", "grid columns")
RESIDENCE = ("allocated registers", "spare registers", "limit by threads", "limit by registers", "limit by shared memory")
VECTORS = ("vector words", "vector loads", "multiply-adds a vector load", "register column remainder")
ROUNDS = (
    "fill rounds", "fill imbalance", "fill lanes", "fill rounds in all", "drain rounds", "drain lanes", "drain rounds in all", "drain over chain",
)  # fmt: skip
TAIL = (
    "scheduler imbalance", "last wave warps a scheduler", "busiest scheduler cycles", "busiest scheduler over even", "busiest scheduler issue",
    "waves if divisible", "busiest warps", "busiest warps over even", "accumulators in flight", "chain",
)  # fmt: skip
SHARING = (
    "distinct filters", "filter bytes", "step bytes", "level 1 left", "filters over level 1", "inputs in flight", "blocks an input", "filter sharing",
    "all filter bytes", "input bytes", "output bytes", "filter traffic", "input traffic", "output traffic",
)  # fmt: skip
ALIGNMENT = ("input sectors a word", "output sectors a word", "input alignment", "output alignment")
DETAILS = GRID + RESIDENCE + VECTORS + ROUNDS + TAIL + SHARING + ALIGNMENT
PLAIN = frozenset({"spare registers", "register column remainder"})
"""Those that are not made logarithms."""
WIDEST = 4
"""Words of the widest load from shared memory."""


def details(described: Columns, counts: TileCounts, machine: Machine) -> dict[str, np.ndarray]:
    """The columns of DETAILS, from those of `features.described`, the counts and the machine.

    They are exact for the kernels published with CNNOpt, whose warps fill whole rows of a tile, and whose blocks are numbered along the output
    channels and the parts of a split first. For other kernels they are approximations."""
    v = counts
    tile = {name.removeprefix("tile "): np.asarray(column, dtype=np.float64) for name, column in described.items() if name.startswith("tile ")}
    size = {name.removeprefix("problem "): np.asarray(column, dtype=np.float64) for name, column in described.items() if name.startswith("problem ")}
    extents = {axis: tile[f"register_{axis}"] * tile[f"warp_{axis}"] * tile[f"block_{axis}"] for axis in "kyx"}
    grid = {axis: ceil_div(size[name], extents[axis]) for axis, name in (("k", "outputs"), ("y", "height"), ("x", "width"))}
    rows, columns = ((extents[axis] - 1) * size[f"stride_{axis}"] + size[f"filter_{axis}"] for axis in "yx")
    points, filter_size = extents["y"] * extents["x"], size["filter_y"] * size["filter_x"]
    found = {
        "tile outputs": extents["k"],
        "tile rows": extents["y"],
        "tile columns": extents["x"],
        "tile points": points,
        "grid outputs": grid["k"],
        "grid rows": grid["y"],
        "grid columns": grid["x"],
    }

    # what limits the resident blocks
    unit = machine.register_allocation_unit / machine.warp_size
    allocated = ceil_div(v.registers, unit) * unit
    limits = block_limits(machine, v.threads, v.registers, v.shared_bytes)
    found |= {"allocated registers": allocated, "spare registers": allocated - v.registers}
    found |= {f"limit by {name}": limits[name] / v.resident for name in ("threads", "registers", "shared memory")}

    # loads of a thread's slice of the input by vectors, as far as the alignment of its rows is known at compile time
    along_y, along_x = ((tile[f"register_{axis}"] - 1) * size[f"stride_{axis}"] + size[f"filter_{axis}"] for axis in "yx")
    ahead = tile["register_x"] * size["stride_x"]
    down = tile["register_y"] * size["stride_y"] * columns
    width = np.where((ahead % 4 == 0) & (down % 4 == 0), WIDEST, np.where((ahead % 2 == 0) & (down % 2 == 0), 2, 1))
    loads = np.zeros(len(v))
    for row in range(WIDEST):  # rows this far apart start at the same offset
        loads += np.maximum(ceil_div(along_y - row, WIDEST), 0) * (np.floor_divide(row * columns % width + along_x - 1, width) + 1)
    found |= {
        "vector words": width,
        "vector loads": loads,
        "multiply-adds a vector load": v.step_multiply_adds / (loads + v.step_cached_loads + 1),
        "register column remainder": tile["register_x"] % WIDEST,
    }

    # rounds in which the warps of a block fill shared memory, and store its results
    filling = ceil_div(v.step_fill, v.warps)
    lines = v.store_instructions / extents["k"]
    storing = extents["k"] * ceil_div(lines, v.warps)
    each, waves, rest = busiest(v, machine)
    chain = v.steps * v.step_multiply_adds
    found |= {
        "fill rounds": filling,
        "fill imbalance": filling * v.warps / v.step_fill,
        "fill lanes": rows * columns * tile["channels"] / (machine.warp_size * v.step_fill),
        "fill rounds in all": filling * v.steps,
        "drain rounds": storing,
        "drain lanes": points / (machine.warp_size * lines),
        "drain rounds in all": storing * v.warps * each,
        "drain over chain": storing / chain,
    }

    # warps of the busiest scheduler: warps are dealt to a processor's schedulers in turn
    schedulers = machine.schedulers_per_processor
    together = np.minimum(v.resident, each)
    full = waves - (rest > 0)
    warps = full * ceil_div(v.resident * v.warps, schedulers) + ceil_div(rest * v.warps, schedulers)
    cycles = machine.warp_size * schedulers / machine.fp32_lanes_per_processor
    even = v.flops / 2 / machine.warp_size / (machine.processors * schedulers) * cycles
    found |= {
        "scheduler imbalance": ceil_div(together * v.warps, schedulers) * schedulers / (together * v.warps),
        "last wave warps a scheduler": np.where(rest > 0, rest, v.resident) * v.warps / schedulers,
        "busiest scheduler cycles": warps * chain * cycles,
        "busiest scheduler over even": warps * chain * cycles / even,
        "busiest scheduler issue": warps * v.steps * (v.step_multiply_adds * cycles + loads + v.step_cached_loads),
        "waves if divisible": v.blocks / (machine.processors * v.resident),
        "busiest warps": each * v.warps,
        "busiest warps over even": ceil_div(each * v.warps, schedulers) * machine.processors * schedulers / (v.blocks * v.warps),
        "accumulators in flight": together * v.warps / schedulers * v.accumulators,
        "chain": chain,
    }

    # blocks on one processor are as far apart as there are processors: which of them read the same filters through level 1
    level1 = machine.cache(1)
    assert level1 is not None
    across = grid["k"] * v.split
    distinct = np.minimum(together, across / np.gcd(across.astype(np.int64), machine.processors))
    filters = WORD * distinct * filter_size * extents["k"] * tile["channels"]
    left = np.maximum(level1.bytes - v.resident * v.shared_bytes, 1024)
    found |= {
        "distinct filters": distinct,
        "filter bytes": filters,
        "step bytes": filters + WORD * together * rows * columns * tile["channels"],
        "level 1 left": left,
        "filters over level 1": filters / left,
        "inputs in flight": ceil_div(together * machine.processors, across),
        "blocks an input": across,
        "filter sharing": together / distinct,
        "all filter bytes": WORD * size["outputs"] * filter_size * size["channels"],
        "input bytes": WORD * size["channels"] * size["height"] * size["stride_y"] * size["width"] * size["stride_x"],
        "output bytes": WORD * size["outputs"] * size["height"] * size["width"],
        "filter traffic": WORD * v.blocks * v.steps * tile["channels"] * filter_size * extents["k"] / v.flops,
        "input traffic": WORD * v.blocks * v.steps * tile["channels"] * rows * columns / v.flops,
        "output traffic": v.written_bytes / v.flops,
    }

    # sectors of a row, for the starts that occur
    pitch = (size["width"] - 1) * size["stride_x"] + size["filter_x"]
    read_from = _common(pitch, extents["x"] * size["stride_x"])
    written_from = _common(size["width"], extents["x"])
    return found | {
        "input sectors a word": _mean_sectors(columns, read_from) / columns,
        "output sectors a word": _mean_sectors(extents["x"], written_from) / extents["x"],
        "input alignment": read_from,
        "output alignment": written_from,
    }


def _common(pitch: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The words, up to a sector, of which all starts of rows are multiples if rows are `pitch` words apart and tiles `step`."""
    return np.gcd(np.gcd(pitch.astype(np.int64), step.astype(np.int64)), SECTOR_WORDS)


def _mean_sectors(words: np.ndarray, alignment: np.ndarray) -> np.ndarray:
    """The sectors that a run of words touches: the mean over all starts that are multiples of `alignment`."""
    starts = np.arange(SECTOR_WORDS)[:, None]
    touched = np.floor_divide(starts + words - 1, SECTOR_WORDS) + 1
    occurs = starts % alignment == 0
    mean: np.ndarray = (touched * occurs).sum(0) / occurs.sum(0)
    return mean
