"""Schedules of the `winograd` schema on a GPU: convolutions with stride 1 by transforms of blocks (`kernels.block_transforms`).

Three kernels (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4): every tile d of the input becomes its
points B^T d; each point of the tiles is a matrix product over the input channels with the filters G g, which are transformed at compile time; every
tile of sums s becomes A^T s, m x m outputs. For 3x3 filters there are 2.25 times fewer multiplications with m = 2, and 4 times fewer with m = 4.

Accuracy in fp32: the largest error against float64, relative to the layer's largest output, over random layers of 4 to 1024 channels: direct
summation 2.4e-7 to 3.4e-6, F(2x2) 1.7e-7 to 1.3e-6, F(4x4) 6.7e-7 to 6.4e-6, growing with the square root of the channels (docs/kernels.md has the
table, tests/test_gpu_winograd.py the emulation). All are well within the tolerance of fp32, so both are in the space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, TypeAlias

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import DEFAULT_FLOAT, size_of
from tilewright.kernels.block_transforms import TRANSFORM_COLUMNS, Transform, transform_axes, transform_of, transforms_of
from tilewright.kernels.columns import Columns, length, product_of, reject, times
from tilewright.kernels.fourier_transform import Fourier
from tilewright.kernels.gpu.gemm.space import AHEAD, PADDED, ContractionFacts, ContractionSchedule, contraction_space
from tilewright.kernels.gpu.gemm.space import AXES as GEMM_AXES
from tilewright.kernels.winograd_transform import Shape

SPLITS = (1, 2, 4)
"""Splits of the sum over channels: each point of the tiles is a separate product, so few parts are enough to fill a machine."""
TRANSFORM_AXES = {"transform_threads": (64, 256), "transform_vector": (1, 2, 4)}
PRODUCT_AXES = tuple(axis for axis in GEMM_AXES if axis != "atomics")
"""Axes of the product, whose parts are added in order."""
VARIANT_AXES = ("layout", "loop")
"""Axes of the product that only variants have."""


@dataclass(frozen=True)
class WinogradFacts:
    """A convolution as the schema sees it: extents of the output, channels of the input, taps of the filters,
    and the batched product of each of `transforms_of`.

    `input_vector`, `store_vector`: widest vectors along input channels, and along output channels of the result; `store_stride`: elements between
    adjacent output channels. Bytes are distinct bytes in memory. `element_bytes`: of a transformed element; `stored_bytes`: of one of the input in
    memory."""

    images: int
    height: int
    width: int
    channels: int
    outputs: int
    input_vector: int
    store_vector: int
    store_stride: int
    bytes_read: int
    bytes_written: int
    products: tuple[ContractionFacts, ...]
    epilogue_bytes: int = 0
    epilogue_flops: float = 0.0
    element_bytes: int = size_of(DEFAULT_FLOAT)
    stored_bytes: int = size_of(DEFAULT_FLOAT)
    filter_shape: Shape = (3, 3)

    @property
    def flops(self) -> float:
        """Operations of direct summation."""
        return 2.0 * self.images * self.outputs * self.height * self.width * self.channels * prod(self.filter_shape)

    def number(self, transform: Transform) -> int:
        """The place of a transform, and of its product, among those of the filter's shape."""
        return transforms_of(self.filter_shape).index(transform)


@dataclass(frozen=True)
class WinogradSchedule:
    """One candidate: the transform, threads per block and vector width of its kernels, and the fields of the product's `ContractionSchedule`. A
    transform that does not allow the vector width uses a smaller one. `layout` and `loop` of the product are variants (`winograd/variants.py`)."""

    output_tile: int
    transform_threads: int
    transform_vector: int
    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    split: int = 1
    stages: int = 1
    cluster: int = 0
    filter_y: int = field(default=3, metadata={"omitted": 3})
    filter_x: int = field(default=3, metadata={"omitted": 3})
    fourier: int = field(default=0, metadata={"omitted": 0})
    layout: int = field(default=PADDED, metadata={"omitted": PADDED})
    loop: int = field(default=AHEAD, metadata={"omitted": AHEAD})

    @property
    def transform(self) -> Transform:
        return transform_of(self.output_tile, self.filter_y, self.filter_x, self.fourier)

    @property
    def product(self) -> ContractionSchedule:
        return ContractionSchedule(**{name: getattr(self, name) for name in (*PRODUCT_AXES, *VARIANT_AXES)})

    def __str__(self) -> str:
        return f"{self.transform} transforms threads={self.transform_threads} transform_vector={self.transform_vector}, {self.product}"


class Transforming(Protocol):
    """What schedules say of their transforms."""

    @property
    def transform(self) -> Transform: ...
    @property
    def transform_threads(self) -> int: ...
    @property
    def transform_vector(self) -> int: ...


OTHER_REGISTERS = 20
"""Registers per thread of a transform besides the tile: ptxas 13.0 allocates 32 to 129 in all for tiles of 8 to 144 elements on sm_90a."""
CHANNELS_OF_BLOCK = 32
"""Channels of one tile that a block transforms where its pieces pass values in shared memory: a warp computes one piece of adjacent channels, whose
values are in different banks."""
AXES = (*TRANSFORM_COLUMNS, *TRANSFORM_AXES, *PRODUCT_AXES)


def held_registers(transform: Transform) -> int:
    """Values that a thread of a transform holds: a tile, or a piece of one."""
    return 2 * transform.length if isinstance(transform, Fourier) else transform.points


def scratch_bytes(transform: Transform, element_bytes: int) -> int:
    """Shared memory of a block of a transform."""
    return transform.scratch * CHANNELS_OF_BLOCK * element_bytes


def winograd_space(facts: WinogradFacts, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with the columns AXES, and the number rejected for each reason (`space_with_transforms`)."""

    def products(number: int) -> Products:
        candidates, rejected = contraction_space(facts.products[number], machine)
        split = candidates["split"] > 1
        joined = (candidates["cluster"] == 1) if machine.compute_capability >= (9, 0) else np.ones(length(candidates), bool)
        rules = [
            ("a product of many points needs no more parts", ~np.isin(candidates["split"], SPLITS)),
            ("a cluster adds up the parts without another kernel", split & ~joined),
        ]
        return candidates, rejected, rules

    return space_with_transforms(facts, machine, products, AXES)


Products: TypeAlias = tuple[Columns, dict[str, int], list[tuple[str, np.ndarray]]]
"""Candidates of a batched product, the number rejected for each reason, and further rules for them."""


def space_with_transforms(
    facts: WinogradFacts, machine: Machine, products: Callable[[int], Products], axes: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Candidates with these columns, and the number rejected for each reason. Those of the product (`products` of the transform of a number) count
    once for each shape of the transforms."""
    members = transform_axes(facts.filter_shape)
    parts: list[dict[str, np.ndarray]] = []
    rejected: dict[str, int] = {}
    for number, transform in enumerate(transforms_of(facts.filter_shape)):
        transforms, narrow = transform_ways(facts, transform, machine)
        each, product = length(transforms), facts.products[number]
        candidates, counts, rules = products(number)
        exceeds = product.a.bytes + product.bytes_written > machine.memory_bytes // 8
        memory = ("the workspaces exceed an eighth of the memory", np.full(length(candidates), exceeds))
        candidates, more = reject(candidates, [memory, *rules])
        count = length(candidates)
        chosen = {name: np.full(count * each, column[number]) for name, column in members.items()}
        parts.append({**chosen, **times(candidates, transforms)})
        for reason, rows in (*((r, n * each) for r, n in (*counts.items(), *more.items())), *((r, n * count) for r, n in narrow.items())):
            rejected[reason] = rejected.get(reason, 0) + rows
    return {name: np.concatenate([part[name] for part in parts]) for name in axes}, rejected


def transform_ways(facts: WinogradFacts, transform: Transform, machine: Machine) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Threads and vectors of a transform's kernels, and the number rejected for each reason."""
    ways = product_of(TRANSFORM_AXES)
    wide = ways["transform_vector"]
    rules = [
        ("no transform has vectors so wide", wide > max(facts.input_vector, facts.store_vector)),
        ("registers exceed a thread's", held_registers(transform) * wide + OTHER_REGISTERS > machine.registers_per_thread_max),
        ("shared memory exceeds a block's", np.full(len(wide), scratch_bytes(transform, facts.element_bytes) > machine.shared_bytes_per_block)),
        ("pieces of a tile have no vectors", (wide > 1) & isinstance(transform, Fourier)),
    ]
    return reject(ways, rules)
