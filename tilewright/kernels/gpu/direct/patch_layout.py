"""Where the elements of the patch are in shared memory: order of its dimensions, pitches with padding, and bank conflicts of what reads and fills it.

DeepCuts (PLDI 2021, section 4.1) chooses among the 24 permutations of N, C, H and W. A block's patch is of one image, so that six are distinct, and
fewer where the patch has one channel, row or column. A thread reads its slice in vectors along the innermost dimension: columns; rows, of which the S
kernel has one at a time; or channels, of which the RS kernel then holds several slices. (With single loads of these, NVCC makes vectors of them, and
as many registers are needed.) Copies from channels-last inputs are vectors if channels are
innermost, and single elements otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.codegen.common import decode
from tilewright.ir.expr import Expr, Var
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.direct.schedule import (
    BANKS,
    ORDERS,
    RS,
    DirectFacts,
    DirectSchedule,
    columns_of,
    patch_of,
    slice_of,
    stretch_of,
    threads_of,
)
from tilewright.kernels.gpu.gemm.space import axis_of
from tilewright.kernels.gpu.shared_access import offsets_of, wavefronts

PADDINGS = 8
"""Number of paddings tried for a line of the patch, and for a plane of lines unless it is of one channel."""


@dataclass(frozen=True)
class PatchLayout:
    """Of each candidate the elements between adjacent channels, rows and columns, and those of a chunk of channels; shared-memory cycles of a warp's
    vector load, and of one of its stores or copies. Loads take as many as distinct vectors fill the banks, times the conflicts that `_conflicts`
    counts in the first order, and those of the lanes' addresses in others. Stores in the first order count as one, as when the constants of the
    models were fitted: its planes are padded so that adjacent threads store to different banks."""

    channel: np.ndarray
    row: np.ndarray
    column: np.ndarray
    elements: np.ndarray
    load_wavefronts: np.ndarray
    store_wavefronts: np.ndarray


@dataclass(frozen=True)
class Pitches:
    """The layout of one schedule: elements between adjacent channels, rows and columns, and all of a chunk; the innermost dimension (c, y or x) and
    the width of a thread's vector loads along it."""

    channel: int
    row: int
    column: int
    elements: int
    innermost: str
    width: int

    @property
    def channels_read(self) -> int:
        """Channels whose slices a thread reads at once."""
        return self.width if self.innermost == "c" else 1


def pitches_of(facts: DirectFacts, schedule: DirectSchedule) -> Pitches:
    """The layout of one schedule's patch."""
    shape = columns_of(schedule)
    layout = patch_layout_of(facts, shape)
    channel, row, column, elements = (int(sizes[0]) for sizes in (layout.channel, layout.row, layout.column, layout.elements))
    return Pitches(channel, row, column, elements, ORDERS[schedule.order][-1], int(read_vector_of(facts, shape)[0]))


def innermost(candidates: Columns, dimension: str) -> np.ndarray:
    """Whether a dimension (c, y or x) is the innermost one of the patch."""
    return np.isin(axis_of(candidates, "order"), [number for number, order in enumerate(ORDERS) if order[-1] == dimension])


def distinct_orders(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Whether a candidate's order places the patch differently from all earlier ones: dimensions of one element make no difference."""
    extents = dict(zip("cyx", (candidates["channels"], *patch_of(facts, candidates)), strict=True))
    single = sum((extents[dimension] == 1) * 2**bit for bit, dimension in enumerate("cyx"))
    distinct: np.ndarray = np.array(_DISTINCT)[single, candidates["order"]]
    return distinct


def _distinct(single: int) -> list[bool]:
    """For each order whether no earlier one has the same sequence of the dimensions whose bit is not set."""
    found = ["".join(dimension for dimension in order if not single >> "cyx".index(dimension) & 1) for order in ORDERS]
    return [order not in found[:number] for number, order in enumerate(found)]


_DISTINCT = [_distinct(single) for single in range(8)]


def read_vector_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Width of a thread's vector loads of the patch along its innermost dimension: threads start at multiples of register_x * stride_x in x."""
    rows, columns = slice_of(facts, candidates)
    width = _vector_along("x", facts.stride_x, columns, candidates)
    if "order" in candidates:
        rs = candidates["slice"] == RS
        along_y = np.where(rs, _vector_along("y", facts.stride_y, rows, candidates), 1)
        along_c = np.where(rs, np.minimum(stretch_of(facts, candidates), 4), 1)
        width = np.where(innermost(candidates, "y"), along_y, np.where(innermost(candidates, "c"), along_c, width))
    return width


def _vector_along(axis: str, stride: int, extent: np.ndarray, candidates: Columns) -> np.ndarray:
    start = np.where(candidates[f"warp_{axis}"] * candidates[f"block_{axis}"] == 1, 4, candidates[f"register_{axis}"] * stride)
    aligned = np.where(start % 4 == 0, 4, np.where(start % 2 == 0, 2, 1))
    return np.minimum(aligned, np.where(extent >= 4, 4, np.where(extent >= 2, 2, 1)))


def lines_read_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How a thread reads its slices of the patch: lines along the innermost dimension, elements of a line, and channels that these lines serve."""
    rows, columns = slice_of(facts, candidates)
    lines, run, channels = np.where(candidates["slice"] == RS, rows, candidates["register_y"] * facts.filter_y), columns, np.ones_like(rows)
    if "order" in candidates:
        down = innermost(candidates, "y") & (candidates["slice"] == RS)
        single = innermost(candidates, "c")
        width = read_vector_of(facts, candidates)
        lines, run = np.where(down, columns, np.where(single, lines * columns, lines)), np.where(down, rows, np.where(single, width, columns))
        channels = np.where(single, width, 1)
    return lines, run, channels


def fetch_vector_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Channels of a pixel that a thread fetches at once: through registers, or by copies if channels are innermost."""
    together = (candidates["stages"] == 1) | innermost(candidates, "c")
    return np.where(together, np.gcd(facts.input_vector, candidates["channels"]), 1)


def fetching_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Threads that share a pixel's channels, and columns and lines that a block fetches at once."""
    groups = candidates["channels"] // fetch_vector_of(facts, candidates)
    pixels = threads_of(candidates) // groups
    rows, columns = patch_of(facts, candidates)
    at_once = np.minimum(columns, pixels)
    return groups, at_once, np.minimum(rows, pixels // at_once)


def patch_layout_of(facts: DirectFacts, candidates: Columns) -> PatchLayout:
    """The layouts of the candidates' patches. Lines are padded to whole vectors, and further by fewer than eight vectors, as are planes of lines: by
    the smallest paddings with the fewest bank conflicts within a warp's loads, and, in other orders than the first, among these with the fewest
    within its stores. The first order has planes as `_plane` pads them."""
    pitch, loads = _padded(facts, candidates)
    plane = _plane(patch_of(facts, candidates)[0] * pitch, candidates["channels"])
    one = np.ones_like(pitch)
    layout = PatchLayout(plane, pitch, one, candidates["channels"] * plane, loads, one)
    others = np.flatnonzero(axis_of(candidates, "order"))
    if not len(others):
        return layout
    reads, fetched = read_vector_of(facts, candidates), fetch_vector_of(facts, candidates)
    extents = (candidates["channels"], *patch_of(facts, candidates))
    steps = candidates["register_y"] * facts.stride_y, candidates["register_x"] * facts.stride_x
    inputs = (candidates["order"], *extents, reads, fetched, *steps, *(candidates[f"warp_{axis}"] for axis in "kyx"), *fetching_of(facts, candidates))
    found = [column.astype(float) for column in vars(layout).values()]
    for at in others:
        for column, value in zip(found, _searched(*(int(column[at]) for column in inputs)), strict=True):
            column[at] = value
    return PatchLayout(*(column.astype(np.int64) for column in found[:4]), *found[4:])


def _plane(least: np.ndarray, channels: np.ndarray) -> np.ndarray:
    """Elements between channels of the patch, at least so many. Vectors stay aligned, and, as far as that allows, adjacent threads store adjacent
    channels of adjacent pixels to different banks."""
    wanted = np.maximum(4, BANKS // np.maximum(channels, 1) // 4 * 4)
    elements: np.ndarray = least + (wanted - least) % BANKS * (channels > 1) + (-least % 4) * (channels == 1)
    return elements


def _padded(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Pitch of rows and bank conflicts of the first order, computed once for all rows with equal inputs."""
    names = ("register_y", "register_x", "warp_y", "warp_x", "block_x")
    key = np.zeros_like(candidates["register_y"])
    for name in names:
        key = key * 64 + candidates[name]
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    candidates = {name: candidates[name][first] for name in (*names, "register_k", "warp_k", "block_y", "block_k")}
    lanes = read_vector_of(facts, candidates)
    _, columns = patch_of(facts, candidates)
    # [candidates, paddings]
    pitch = (-(-columns // lanes) * lanes)[:, None] + np.arange(PADDINGS) * lanes[:, None]
    step_y = (candidates["register_y"] * facts.stride_y)[:, None] * pitch
    fixed = (candidates["warp_x"], candidates["warp_y"], candidates["register_x"] * facts.stride_x, lanes)
    warp_x, warp_y, step_x, width = (np.repeat(column, PADDINGS) for column in fixed)
    found = _conflicts(warp_x, warp_y, step_x, step_y.ravel(), width).reshape(pitch.shape)
    best = found.argmin(axis=1)[:, None]
    least: np.ndarray = np.take_along_axis(found, best, axis=1)[where, 0]
    return np.take_along_axis(pitch, best, axis=1)[where, 0], least


def _conflicts(warp_x: np.ndarray, warp_y: np.ndarray, step_x: np.ndarray, step_y: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """The maximum number of distinct vectors of `lanes` elements that a warp reads from one group of banks; threads along k read the same ones."""
    key = (((warp_x * 64 + warp_y) * 64 + step_x % BANKS) * 64 + step_y % BANKS) * 8 + lanes
    distinct, where = np.unique(key, return_inverse=True)
    width, rest = distinct % 8, distinct // 8
    y, x, warp_y, warp_x = rest % 64, rest // 64 % 64, rest // 64**2 % 64, rest // 64**3
    lane = np.arange(BANKS)
    inside = lane < (warp_x * warp_y)[:, None]
    word = lane % warp_x[:, None] * x[:, None] + lane // warp_x[:, None] * y[:, None]
    group = word % BANKS // width[:, None]
    slots = (np.arange(len(distinct))[:, None] * BANKS + group)[inside]
    counts = np.bincount(slots, minlength=len(distinct) * BANKS).reshape(-1, BANKS)
    most: np.ndarray = counts.max(axis=1)[where]
    return most


def lane_positions(lane: Expr, warps: Mapping[str, int]) -> dict[str, Expr]:
    """The position of a lane along k, y and x in a warp with so many threads along each. Lanes run along x fastest, then y, then k. However, the
    lowest bit of the lane is one of k, if there are any, and the next one of x (or y): among four adjacent lanes pairs then share filters or slices,
    and the hardware merges equal addresses of vector loads."""
    lowest: dict[str, Expr] = {}
    pixel = next((axis for axis in "xy" if warps[axis] > 1), None)
    if warps["k"] > 1 and pixel is not None:
        lowest = {"k": lane % 2, pixel: lane // 2 % 2}
        lane = lane // 4
    halves = {axis: extent // 2 if axis in lowest else extent for axis, extent in warps.items()}
    lanes = decode(lane, [Var(f"lane_{axis}", halves[axis]) for axis in "kyx"])
    return {axis: one * 2 + lowest[axis] if axis in lowest else one for axis, one in zip("kyx", lanes.values(), strict=True)}


@lru_cache(maxsize=256)
def lanes_of(warp_k: int, warp_y: int, warp_x: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of a warp's lanes along k, y and x, by the expressions of the code."""
    lane = Var("lane", BANKS)
    places = lane_positions(lane, {"k": warp_k, "y": warp_y, "x": warp_x})
    k, y, x = (offsets_of(places[axis], lane)[0] for axis in "kyx")
    return k, y, x


@lru_cache(maxsize=4096)
def _searched(
    order: int, channels: int, rows: int, columns: int, read: int, fetched: int,
    step_y: int, step_x: int, warp_k: int, warp_y: int, warp_x: int, groups: int, at_once: int, lines: int,
) -> tuple[float, ...]:  # fmt: skip
    """The fields of `PatchLayout` for one candidate in another order than the first. `read`, `fetched`: elements of a vector that is read, and
    channels that are fetched at once; `step_*`: rows or columns between the slices of adjacent threads; `groups`, `at_once`, `lines`: as
    `fetching_of`."""
    extents = {"c": channels, "y": rows, "x": columns}
    outer, middle, inner = tuple(ORDERS[order])
    stored = fetched if inner == "c" else 1
    unit = max(read, stored)
    more = unit * np.arange(PADDINGS)
    line = np.repeat(-(-extents[inner] // unit) * unit + more, PADDINGS)
    plane = extents[middle] * line + np.tile(more, PADDINGS)
    pitch = {inner: np.ones_like(line), middle: line, outer: plane}
    _, y, x = lanes_of(warp_k, warp_y, warp_x)
    words = y * step_y * pitch["y"][:, None] + x * step_x * pitch["x"][:, None]
    loads = -(-warp_y * warp_x * read // BANKS) * wavefronts(words, read) / wavefronts(words[:1], read, conflicts=False)
    lane = np.arange(BANKS)
    pixel, channel = lane // groups, lane % groups * fetched
    offset = channel * pitch["c"][:, None] + pixel // at_once * pitch["y"][:, None] + pixel % at_once * pitch["x"][:, None]
    stores = wavefronts(offset, stored, pixel < at_once * lines)
    elements = -(-extents[outer] * plane // 4) * 4  # what follows in shared memory begins at a whole vector
    best = int(np.lexsort((elements, stores, loads))[0])
    return tuple(float(column[best]) for column in (pitch["c"], pitch["y"], pitch["x"], elements, loads, stores))
