"""Schedules of convolutions by transforms of blocks, whose batched product warpgroups compute of pairs.

The transforms are those of the schema `winograd`; the product is a candidate of `warpgroups`, a batch with an entry for each point of the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.block_transforms import TRANSFORM_COLUMNS, Transform, transform_of
from tilewright.kernels.columns import Columns, length
from tilewright.kernels.gpu.warpgroup.form import WarpgroupFacts
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule, warpgroup_space
from tilewright.kernels.gpu.winograd.space import TRANSFORM_AXES, Products, WinogradFacts, space_with_transforms
from tilewright.kernels.schema import Numerics

PRODUCT_AXES = ("columns", "consumers", "stages", "split", "cluster", "staged", "persistent", "pairs")
AXES = (*TRANSFORM_COLUMNS, *TRANSFORM_AXES, *PRODUCT_AXES)


@dataclass(frozen=True)
class PairedWinogradFacts:
    """The convolution, and the batched product of each of its `transforms_of`, as warpgroups see it."""

    base: WinogradFacts
    products: tuple[WarpgroupFacts, ...]

    @property
    def flops(self) -> float:
        return self.base.flops


@dataclass(frozen=True)
class PairedWinogradSchedule:
    """One candidate: the transform, threads per block and vector width of its kernels, and the fields of the product's `WarpgroupSchedule`."""

    output_tile: int
    transform_threads: int
    transform_vector: int
    columns: int
    consumers: int
    stages: int
    split: int = 1
    cluster: int = 1
    staged: int = 0
    persistent: int = 0
    pairs: int = field(default=1, metadata={"omitted": 1})
    filter_y: int = field(default=3, metadata={"omitted": 3})
    filter_x: int = field(default=3, metadata={"omitted": 3})
    fourier: int = field(default=0, metadata={"omitted": 0})

    @property
    def transform(self) -> Transform:
        return transform_of(self.output_tile, self.filter_y, self.filter_x, self.fourier)

    @property
    def product(self) -> WarpgroupSchedule:
        return WarpgroupSchedule(**{name: getattr(self, name) for name in PRODUCT_AXES})

    def __str__(self) -> str:
        return f"{self.transform} transforms threads={self.transform_threads} transform_vector={self.transform_vector}, {self.product}"


def of_product(candidates: Columns) -> dict[str, np.ndarray]:
    """The columns of the product's `WarpgroupSchedule`."""
    return {name: candidates[name] for name in PRODUCT_AXES} | {"swapped": np.zeros(length(candidates), np.int64)}


def paired_winograd_space(facts: PairedWinogradFacts, machine: Machine, numerics: Numerics) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns AXES, and the number rejected for each reason (`space_with_transforms`)."""
    if numerics.tf32 or not numerics.tf32_pairs:
        return {name: np.zeros(0, np.int64) for name in AXES}, {"float32 is not split into pairs": 1}

    def products(number: int) -> Products:
        return *warpgroup_space(facts.products[number], machine, numerics), []

    return space_with_transforms(facts.base, machine, products, AXES)
