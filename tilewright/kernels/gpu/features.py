"""Features of GPU kernels for learned models: versioned lists of names, computed for whole columns from `TileCounts` and `Machine`.

`BLACK_BOX`: sizes of problem and tiles alone. `HYBRID`: these, the counts and the terms of the analytical model. `CANDIDATE`: these, the axes that
only our schedules have, and the time that the schema's own model predicts. `FORMED`: these and the problem's form (batch, groups, dilation, vectors,
epilogue). `HEAVY`: these and the layout of shared memory. `DETAILED`: those of `HYBRID` and the finer ones of `kernels.gpu.details`. `RELATIVE`: only
dimensionless quantities relative to the machine (times over the bound, shares of its resources, waves), for a model that ranks kernels on machines it
was not trained on. `STREAMS`: windows, maps and row reductions, which have no tiles in shared memory. `TENSOR`: tiles that tensor cores multiply.
`ATTENTION`: attention on tensor cores. All are binary logarithms, so that ratios become differences, except shares, which are logarithms in the last
three only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.hardware.calibration import Overheads
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.counted import busiest, counted_cost, step_cycles
from tilewright.kernels.gpu.counts import AttentionCounts, HalfPairCounts, LaunchCounts, PairCounts, TensorCounts, TileCounts, ceil_div
from tilewright.kernels.gpu.details import DETAILS, PLAIN, details
from tilewright.kernels.gpu.gemm.space import LARGE_FLOPS
from tilewright.kernels.gpu.rates import SECTOR_BYTES

VERSION = 1
"""Incremented whenever the meaning of a record's names changes; a stored model of another version, or with other names, is rejected."""
PROBLEM = ("outputs", "height", "width", "channels", "filter_y", "filter_x", "stride_y", "stride_x")
TILES = (
    "slice", "register_k", "register_y", "register_x", "warp_k", "warp_y", "warp_x", "block_k", "block_y", "block_x", "channels", "split", "stages",
)  # fmt: skip
BLACK_BOX = tuple(f"problem {name}" for name in PROBLEM) + tuple(f"tile {name}" for name in TILES) + ("schema",)
COUNTS = (
    "flops", "blocks", "warps", "steps", "registers", "shared_bytes", "resident", "accumulators", "step_multiply_adds", "step_shared_loads",
    "step_cached_loads", "step_fill", "step_sectors", "drain_wavefronts", "store_instructions", "store_sectors", "distinct_bytes", "written_bytes",
    "reuse_bytes",
)  # fmt: skip
RELATIVE = (
    "total over bound", "loop over bound", "drain over bound", "memory over bound", "launch over bound",
    "issue over fma", "shared over fma", "level2 over fma", "alone over fma", "alone over through", "drain over loop",
    "useful work", "full warps", "occupancy", "warps a scheduler", "registers share", "shared share", "resident", "blocks a processor", "waves",
    "balance", "tail", "last wave", "steps", "accumulators", "multiply-adds a load", "bytes a flop", "written share", "reuse over level 2",
    "distinct over level 2", "split", "stages", "schema",
)  # fmt: skip
ANALYTIC = ("seconds", "loop seconds", "drain seconds", "step cycles alone")
HYBRID = BLACK_BOX + COUNTS + ANALYTIC + tuple(name for name in RELATIVE[:-1] if name not in COUNTS)
DETAILED = HYBRID + DETAILS
OWN_TILES = ("cluster", "filters", "output_tile", "transform_threads", "transform_vector")
CANDIDATE = HYBRID + tuple(f"tile {name}" for name in OWN_TILES) + ("own seconds",)
FORM = (
    "images", "groups", "dilation_y", "dilation_x", "input_vector", "filter_vector", "store_vector", "taps", "guarded", "epilogue_bytes",
    "epilogue_flops",
)  # fmt: skip
"""Facts of a problem besides its sizes: images and groups (or the batch of a product) as far as a schema distinguishes them, dilation, the widest
vectors of its accesses, index divisions and guards of a load of the input, and what follows the sum: bytes read, operations per element."""
FORMED = CANDIDATE + tuple(f"form {name}" for name in FORM)
HEAVY = (*FORMED, "tile layout")
"""What tells large products apart: also which layout of shared memory their tiles have."""
STREAMS = (
    "axis threads", "axis items", "axis vector_width", "axis rows", "axis threads_per_row", "axis columns", "axis threads_along_r", "axis split",
    "term launch", "term chain", "term latency", "term tree", "term starts", "term level 2", "term wavefronts", "term memory", "term issue",
    "term split",
    "seconds", "blocks", "threads", "registers", "resident", "waves", "balance", "tail", "occupancy", "distinct over level 2",
    "fact points", "fact bytes_read", "fact bytes_written", "fact flops", "fact vector_width", "fact reduced", "fact row_extent", "fact item_extent",
    "fact inner", "fact requests", "fact scattered", "fact rows", "fact columns", "fact stages", "fact row_contiguous",
    "fact batch", "fact m", "fact n", "fact r", "fact epilogue_bytes",
    "loads", "registers loaded", "loads an output", "guarded", "useful tile", "tile", "across", "turns", "useful turns", "block bytes",
    "results of a thread", "sums added", "factor loads",
)  # fmt: skip
"""Features of schemas that stream (`streamed`): axes, shares of the terms, the launch, facts, and what the schema's own `features` add."""
TENSOR = (
    "axis block_m", "axis block_n", "axis block_k", "axis warps_m", "axis warps_n", "axis consumers", "axis stages", "axis split", "axis cluster",
    "axis staged", "axis persistent", "axis swapped", "axis taps",
    "term launch", "term compute", "term memory", "term drain", "term split",
    "seconds", "blocks", "threads", "registers", "resident", "waves", "balance", "tail", "occupancy", "distinct over level 2",
    "fact batch", "fact m", "fact n", "fact r", "fact a vector", "fact b vector", "fact a along r", "fact b along r", "fact a guarded", "fact a taps",
    "fact a arithmetic", "fact a others", "fact store vector", "fact epilogue_bytes", "fact epilogue_flops", "fact factor bytes", "fact result bytes",
    "steps", "accumulators", "shared bytes", "step sectors", "step products", "step wavefronts", "store sectors", "useful work", "work over bytes",
    "reuse over level 2", "patch over pixels",
)  # fmt: skip
"""Features of products on tensor cores, by either family of instructions (`streamed`)."""
ATTENTION = (
    "axis block_m", "axis block_n", "axis warps", "axis stages", "axis held", "axis split", "axis wide", "axis turns",
    "term launch", "term compute", "term memory", "term drain", "term parts",
    "seconds", "blocks", "threads", "registers", "resident", "waves", "balance", "tail", "occupancy", "distinct over level 2",
    "fact batch", "fact queries", "fact keys", "fact key elements", "fact value elements", "fact q vector", "fact k vector", "fact v vector",
    "fact store vector", "fact logit operations", "fact epilogue operations", "fact factor bytes", "fact keys of a head", "causal",
    "steps", "accumulators", "shared bytes", "step sectors", "step products", "step wavefronts", "useful work", "work over bytes",
)  # fmt: skip
"""Features of attention on tensor cores (`streamed`)."""
OWN_BLACK_BOX = BLACK_BOX + tuple(f"tile {name}" for name in OWN_TILES)


@dataclass(frozen=True)
class Record:
    """The `names` of features, in their order, and the `counts` of the schemas that they describe, of problems that take `least_flops` operations or
    more if each product is computed."""

    names: tuple[str, ...]
    counts: type[LaunchCounts] = TileCounts
    least_flops: float = 0.0

    @property
    def tiled(self) -> bool:
        """Whether the features are those of tiles on CUDA cores, with the counts' analytical model; otherwise they are columns of `streamed`."""
        return self.counts is TileCounts

    def describes(self, counts: LaunchCounts) -> bool:
        """Whether a model with this record covers the schema that counts so, of problems of any size."""
        return type(counts) is self.counts


RECORDS: Mapping[str, Record] = MappingProxyType(
    {
        "black box": Record(BLACK_BOX),
        "hybrid": Record(HYBRID),
        "relative": Record(RELATIVE),
        "detailed": Record(DETAILED),
        "candidate": Record(CANDIDATE),
        "formed": Record(FORMED),
        "heavy": Record(HEAVY, least_flops=LARGE_FLOPS),
        "own black box": Record(OWN_BLACK_BOX),
        "streams": Record(STREAMS, LaunchCounts),
        "tensor": Record(TENSOR, TensorCounts),
        "pairs": Record(TENSOR, PairCounts),
        "half pairs": Record(TENSOR, HalfPairCounts),
        "attention": Record(ATTENTION, AttentionCounts),
    }
)
MISSING = -64.0
"""Value of features of `STREAMS`, `TENSOR` and `ATTENTION` that a schema does not have."""
LEAST = 2.0**-10
"""Facts, counts and shares below this one are not told apart."""


def described(number: int, candidates: Columns, problem: Mapping[str, np.ndarray] | Mapping[str, float]) -> dict[str, np.ndarray]:
    """The columns of `BLACK_BOX`, `OWN_TILES`, `FORM` and `HEAVY`: the schema's number, sizes and facts of the problem and axes of the schedule by
    name. The number is fixed, since models are trained on it; names that a schema lacks are 1 (`OWN_TILES` and the layout: 0)."""
    one = np.ones(length(candidates))
    columns = {f"problem {name}": np.asarray(problem.get(name, 1)) * one for name in PROBLEM}
    columns |= {f"form {name}": np.asarray(problem.get(name, 1)) * one for name in FORM}
    columns |= {f"tile {name}": np.asarray(candidates.get(name, 1)) * one for name in TILES}
    columns |= {f"tile {name}": np.asarray(candidates.get(name, 0)) * one for name in (*OWN_TILES, "layout")}
    return columns | {"schema": number * one}


def streamed(
    names: Sequence[str], facts: Any, candidates: Columns, counts: LaunchCounts, estimate: Estimate, own: Columns, machine: Machine
) -> dict[str, np.ndarray]:
    """The columns of these names, of `STREAMS`, `TENSOR` or `ATTENTION`, all as binary logarithms; `own` are those that the schema adds, not yet as
    logarithms."""
    total = estimate.seconds
    each = ceil_div(counts.blocks, machine.processors)
    level2 = machine.cache(2)
    assert level2 is not None
    columns = {f"axis {name}": column for name, column in candidates.items()} | dict(own)
    columns |= {f"fact {entry.name}": np.asarray(value) for entry in fields(facts) if isinstance(value := getattr(facts, entry.name), int | float)}
    columns |= {
        "seconds": total / machine.launch_seconds,
        "blocks": counts.blocks / machine.processors,
        "threads": counts.threads,
        "registers": counts.registers,
        "resident": counts.resident,
        "waves": counts.blocks / (machine.processors * counts.resident),
        "balance": counts.blocks / (machine.processors * each),
        "tail": each / (ceil_div(each, counts.resident) * counts.resident),
        "occupancy": np.minimum(each, counts.resident) * counts.threads / machine.threads_per_processor,
        "distinct over level 2": counts.memory_bytes / level2.bytes,
    }
    columns |= {f"term {name}": term / total for name, term in estimate.terms.items()}
    found = {name: np.broadcast_to(np.log2(np.maximum(columns[name], LEAST)), total.shape) for name in names if name in columns}
    return {name: found.get(name, np.full(len(total), MISSING)) for name in names}


def features(record: str, described: Columns, volumes: LaunchCounts, machine: Machine, overheads: Overheads) -> np.ndarray:
    """The features, [candidates, names of the record] float32, those of one name adjacent."""
    names = RECORDS[record].names
    if not RECORDS[record].tiled:
        return np.array([described[name] for name in names], dtype=np.float32).T
    assert isinstance(volumes, TileCounts)
    columns = dict(described)
    if record not in ("black box", "own black box"):
        columns |= _terms(volumes, machine, overheads)
    if record == "detailed":
        columns |= details(described, volumes, machine)
    # shares and the schema's number are not made logarithms
    plain = {"useful work", "full warps", "occupancy", "registers share", "shared share", "balance", "tail", "last wave", "written share", "schema"}
    plain |= PLAIN
    plain |= {f"tile {name}" for name in (*OWN_TILES, "layout")}
    result = np.empty((len(names), len(volumes)), dtype=np.float32)
    for position, name in enumerate(names):
        column = np.asarray(columns[name], dtype=np.float64)
        result[position] = column if name in plain else np.log2(np.maximum(column, 1e-12))
    return result.T


def _terms(volumes: TileCounts, machine: Machine, overheads: Overheads) -> dict[str, np.ndarray]:
    """The quantities of `HYBRID` and `RELATIVE` from counts, machine and analytical model, by name."""
    v = volumes
    estimate = counted_cost(v, machine, overheads)
    cycles = step_cycles(v, machine, overheads)
    each, waves, rest = busiest(v, machine)
    moved = (v.distinct_bytes + v.written_bytes) / machine.memory_bandwidth
    bound = np.maximum(v.flops / machine.peak_flops["fp32"], moved)
    together = np.minimum(v.resident, each)
    level2 = machine.cache(2)
    assert level2 is not None
    terms = {name: getattr(v, name) for name in COUNTS}
    terms |= {
        "seconds": estimate.seconds,
        "loop seconds": estimate.terms["loop"],
        "drain seconds": estimate.terms["drain"],
        "step cycles alone": cycles["alone"],
        "total over bound": estimate.seconds / bound,
        "issue over fma": cycles["issue"] / cycles["fma"],
        "shared over fma": cycles["shared"] / cycles["fma"],
        "level2 over fma": cycles["level2"] / cycles["fma"],
        "alone over fma": cycles["alone"] / (together * cycles["fma"]),
        "alone over through": cycles["alone"] / (together * cycles["through"]),
        "drain over loop": estimate.terms["drain"] / estimate.terms["loop"],
        "useful work": v.flops / v.padded_flops,
        "full warps": v.threads / (v.warps * machine.warp_size),
        "occupancy": v.resident * v.warps * machine.warp_size / machine.threads_per_processor,
        "warps a scheduler": together * v.warps / machine.schedulers_per_processor,
        "registers share": v.resident * v.threads * v.registers / machine.registers_per_processor,
        "shared share": v.resident * v.shared_bytes / machine.shared_bytes_per_processor,
        "blocks a processor": v.blocks / machine.processors,
        "waves": waves,
        "balance": v.blocks / (machine.processors * each),
        "tail": each / (waves * v.resident),
        "last wave": rest / v.resident,
        "multiply-adds a load": v.step_multiply_adds / (v.step_shared_loads + v.step_cached_loads),
        "bytes a flop": v.blocks * v.steps * v.step_sectors * SECTOR_BYTES / v.flops,
        "written share": v.written_bytes / (v.written_bytes + v.distinct_bytes),
        "reuse over level 2": v.reuse_bytes * together * machine.processors / level2.bytes,
        "distinct over level 2": v.distinct_bytes / level2.bytes,
        "split": v.split,
        "stages": v.stages,
    }
    for name in ("loop", "drain", "memory", "launch"):
        terms[f"{name} over bound"] = estimate.terms[name] / bound
    return terms
