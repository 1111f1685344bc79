"""Convolutions whose taps are at constant distances in a patch of the image: products by warpgroups with several taps and stride 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.problem import Problem
from tilewright.ir.region import Unsuitable
from tilewright.kernels.gpu.gemm.form import ProductForm
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts, WarpgroupForm, factors_form
from tilewright.kernels.gpu.warpgroup.tensors import Pixels
from tilewright.kernels.schema import Form

Extents = tuple[np.ndarray | int, ...]


@dataclass(frozen=True)
class PatchFacts:
    """The sizes of a product by warpgroups, whose rows are `images` times the positions of `outputs` (outermost dimension first). The filter reaches
    `spans` pixels further than its first tap along each dimension."""

    base: WarpgroupFacts
    images: int
    outputs: tuple[int, ...]
    spans: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Parts of the channels, each of which is a patch."""
        return self.base.steps // self.base.taps

    def tile(self, height: np.ndarray | int, width: np.ndarray | int) -> Extents:
        """Output positions of a block along each dimension: one along those before the last two."""
        *outer, last = (*(1 for _ in self.outputs[2:]), height, width)[-len(self.outputs) :]
        return (*outer, last)

    def patch(self, rows: np.ndarray | int, height: np.ndarray | int, width: np.ndarray | int) -> tuple[Extents, Extents]:
        """Pixels that a block reads along each dimension, and the distance in rows of shared memory of neighbours along each.

        Products take `rows` successive pixels from each tap's first one on, also between the lines of the tile; the patch has as many along its
        outermost dimension as these reach."""
        inner = [tile + span for tile, span in zip(self.tile(height, width), self.spans, strict=True)]
        pitches: list[np.ndarray | int] = [1]
        for extent in inner[:0:-1]:
            pitches.insert(0, pitches[0] * extent)
        needed = rows + sum(span * pitch for span, pitch in zip(self.spans, pitches, strict=True))
        return (-(-needed // pitches[0]), *inner[1:]), tuple(pitches)


@dataclass(frozen=True)
class PatchForm:
    """A product whose first factor is `pixels`."""

    base: WarpgroupForm
    facts: PatchFacts
    pixels: Pixels

    @property
    def product(self) -> ProductForm:
        return self.base.product


def patch_form(problem: Problem, machine: Machine) -> Form[PatchFacts, PatchForm]:
    """The form of a region.

    Raises:
        Unsuitable: if it is no product by warpgroups, or no filter of several taps slides over its first factor with stride 1.
    """
    base = factors_form(problem, machine).parts
    pixels = base.a
    if not isinstance(pixels, Pixels) or base.facts.taps == 1:
        raise Unsuitable("no filter of several taps slides over an image")
    if any(slide.stride != 1 for slide in pixels.slides if slide.outputs > 1):
        raise Unsuitable("the filter moves by more than one pixel")
    spans = tuple((slide.taps - 1) * slide.dilation for slide in pixels.slides)
    facts = PatchFacts(base.facts, pixels.extents[0], tuple(slide.outputs for slide in pixels.slides), spans)
    return Form(facts, PatchForm(base, facts, pixels))
