"""Convolutions whose taps are at constant distances in a patch of the image: products by warpgroups with several taps and stride 1; and those
of any filter whose results are pooled in windows that do not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewright.codegen.access import flatten
from tilewright.codegen.common import bytes_touched, expression_flops
from tilewright.graph.windows import Pooling, pooling_of
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Expr, Load, Var, index_const, substitute
from tilewright.ir.layout import permuted
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts, WarpgroupForm, factors_form
from tilewright.kernels.gpu.warpgroup.tensors import Pixels
from tilewright.kernels.schema import Form

Extents = tuple[np.ndarray | int, ...]
PAIR = 2
"""Adjacent pixels whose sums a thread has beside each other."""
EIGHT = 8
"""Distance in pixels of the pairs of a thread, and rows of a factor of wgmma that follow each other."""


@dataclass(frozen=True)
class PatchFacts:
    """The sizes of a product by warpgroups, whose rows are `images` times the positions of `outputs` (outermost dimension first). The filter reaches
    `spans` pixels further than its first tap along each dimension. `windows`: extents of those that are pooled; without, results are stored."""

    base: WarpgroupFacts
    images: int
    outputs: tuple[int, ...]
    spans: tuple[int, ...]
    windows: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        """Parts of the channels, each of which is a patch."""
        return self.base.steps // self.base.taps

    def tile(self, height: np.ndarray | int, width: np.ndarray | int) -> Extents:
        """Output positions of a block along each dimension: one along those before the last two."""
        *outer, last = (*(1 for _ in self.outputs[2:]), height, width)[-len(self.outputs) :]
        return (*outer, last)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of a window; 1 and 1 if nothing is pooled."""
        height, width = (1, 1, *self.windows)[-2:]
        return height, width

    def pools(self, split: np.ndarray | int) -> np.ndarray | bool:
        """Whether blocks pool results: parts of a split are stored, and pooled when they are added."""
        return bool(self.windows) & (split == 1)

    def patch(
        self,
        rows: np.ndarray | int,
        height: np.ndarray | int,
        width: np.ndarray | int,
        lines: np.ndarray | int = 0,
        pools: np.ndarray | bool = False,
    ) -> tuple[Extents, Extents]:
        """Pixels that a block reads along each dimension, and the distance in rows of shared memory of neighbours along each.

        Products take `rows` successive pixels from each tap's first one on, also between the lines of the tile, or with `lines` (0 or 1) eight of
        each line; the patch has as many along its outermost dimension as these reach. In a block that `pools` a thread has the sums of pixels above
        each other, since the lines of the patch are whole multiples of eight pixels, or products take eight of each."""
        inner = [tile + span for tile, span in zip(self.tile(height, width), self.spans, strict=True)]
        inner[-1] = np.where(np.logical_and(pools, np.logical_not(lines)), -(-inner[-1] // EIGHT) * EIGHT, inner[-1])
        pitches: list[np.ndarray | int] = [1]
        for extent in inner[:0:-1]:
            pitches.insert(0, pitches[0] * extent)
        reached = np.where(lines, (rows // EIGHT - 1) * pitches[-2] + EIGHT, rows) if len(inner) > 1 else rows
        needed = reached + sum(span * pitch for span, pitch in zip(self.spans, pitches, strict=True))
        return (-(-needed // pitches[0]), *inner[1:]), tuple(pitches)


@dataclass(frozen=True)
class PooledStore:
    """What becomes of the values of a window: `combiner` of them all, which `element` reads as a load of `name`, is stored at `offset`. Both are over
    the axes of the product that are not pooled, and over `axes`, the window's number along each dimension of the image (None: there is one)."""

    name: str
    combiner: str
    element: Expr
    offset: Expr
    images: Var | None
    axes: tuple[Var | None, ...]
    channel: Var


@dataclass(frozen=True)
class PatchForm:
    """A product whose first factor is `pixels`, and how its results are pooled, if they are."""

    base: WarpgroupForm
    facts: PatchFacts
    pixels: Pixels
    pooled: PooledStore | None = None

    @property
    def product(self) -> ProductForm:
        return self.base.product


def patch_form(problem: Problem, machine: Machine) -> Form[PatchFacts, PatchForm]:
    """The form of a region.

    Raises:
        Unsuitable: if it is no product by warpgroups, or no filter slides over its first factor with stride 1, of several taps unless results are
            pooled; or if they are pooled in windows of which no thread has all pixels.
    """
    pooling = pooling_of(problem.region.steps)
    if pooling is None:
        base = factors_form(problem, machine).parts
    else:
        places = zip(pooling.before[-1].index, pooling.sizes, strict=True)
        slid = frozenset(place for place, size in places if size > 1 and isinstance(place, Var))
        base = factors_form(_stored(problem, pooling), machine, slid).parts
    pixels = base.a
    if not isinstance(pixels, Pixels) or (base.facts.taps == 1 and pooling is None):
        raise Unsuitable("no filter of several taps slides over an image")
    if any(slide.stride != 1 for slide in pixels.slides if slide.outputs > 1):
        raise Unsuitable("the filter moves by more than one pixel")
    spans = tuple((slide.taps - 1) * slide.dilation for slide in pixels.slides)
    facts = PatchFacts(base.facts, pixels.extents[0], tuple(slide.outputs for slide in pixels.slides), spans)
    if pooling is None:
        return Form(facts, PatchForm(base, facts, pixels))
    return _pooled(problem, pooling, PatchForm(base, facts, pixels))


def _stored(problem: Problem, pooling: Pooling) -> Problem:
    """The problem whose results are stored instead of being pooled, in the same order of dimensions."""
    (output,), last = problem.region.outputs, pooling.before[-1]
    order = problem.layouts[output].order
    if any(factor for _, factor in order):
        raise Unsuitable("a dimension of the pooled result is stored in parts")
    layout = permuted(last.shape, [dim for dim, _ in order])
    value = replace(problem.values[output], name=last.name, shape=last.shape)
    region = replace(problem.region, name=last.name, steps=pooling.before, outputs=(last.name,))
    layouts, values = {**problem.layouts, last.name: layout}, {**problem.values, last.name: value}
    return replace(problem, region=region, layouts=layouts, values=values)


def _pooled(problem: Problem, pooling: Pooling, form: PatchForm) -> Form[PatchFacts, PatchForm]:
    """The form of a problem whose results, stored by `form`, are pooled."""
    product, facts, slides = form.product, form.facts.base.product, form.pixels.slides
    (output,), pool, places = problem.region.outputs, pooling.pool, pooling.before[-1].index
    if product.batch or len(product.n) != 1 or product.n[0] not in places:
        raise Unsuitable("the pooled channels are several axes")
    sizes = {place: size for place, size in zip(places, pooling.sizes, strict=True)}
    axes = {place: axis for place, axis in zip(places, pool.axes, strict=True)}
    windows = tuple(sizes.get(slide.axis, 1) if slide.axis is not None else 1 for slide in slides)
    if prod(windows) != prod(pooling.sizes):
        raise Unsuitable("an axis is pooled that the filter does not slide along")
    if any(size > 1 for size in windows[:-2]) or windows[-1] > PAIR:
        raise Unsuitable(f"windows of {' x '.join(map(str, windows))} pixels are no pairs of columns in one thread")
    last = pooling.after or pool
    body = pooling.after.bodies[0] if pooling.after is not None else Load(pool.name, pool.axes, pool.dtypes[0])
    rows = [place for place in places if isinstance(place, Var) and place.extent != 1 and place != product.n[0]]
    images = next((place for place in rows if place not in {slide.axis for slide in slides}), None)
    ones: dict[Var, Expr] = {axis: index_const(0) for axis in pool.axes if axis.extent == 1}
    element = substitute(flatten(body, problem.layouts), ones)
    offset = substitute(problem.layouts[output].offset(last.index), ones)
    taken = tuple(axes[slide.axis] if slide.axis is not None else None for slide in slides)
    store = PooledStore(pool.name, str(pool.combiner), element, offset, images, taken, product.n[0])
    combined = prod(windows)
    facts = replace(
        facts,
        bytes_written=problem.values[output].bytes,
        epilogue_bytes=facts.epilogue_bytes + bytes_touched([element], pool.axes, problem.values),
        epilogue_flops=facts.epilogue_flops + 1 + expression_flops(element) / combined,
    )
    base = replace(form.facts.base, product=facts, pooled=combined)
    found = replace(form.facts, base=base, windows=windows)
    types: Mapping[str, str] = {**product.types, output: problem.values[output].dtype}
    product = replace(product, output=output, facts=facts, types=types)
    return Form(found, replace(form, base=replace(form.base, product=product, facts=base), facts=found, pooled=store))
