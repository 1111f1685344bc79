"""Random workloads and samples of their schedules, for training and judging the learned model.

| class | workloads, with equal chances unless a share is given |
|---|---|
| `3x3`, `1x1`, `large` | square convolutions at batch 1: filters of 3; of 1; of 5, 7, 9 or 11 in one or both dimensions; one in four has stride 2 |
| `batch` | convolutions with filters of 1, 3 or 5 at batch 2 to 256, three in four a power of two |
| `groups` | half depthwise (filters of 3, 5, 7), half with 2 to 64 groups; one in three at a batch |
| `forms` | dilation 2 to 4, one dimension (filters of 3 to 15), three dimensions; one in four at a batch |
| `first` | 3 channels (one in ten: 1 or 4), filters of 3 to 7, or patches of 2 to 16; half at a batch |
| `transposed` | filters of 2, 3 or 4 with stride 2, one or two dimensions |
| `linear`, `product` | linear layers of 1 to 4,096 rows; batched products of attention |
| `few` | linear layers of 1 to 128 rows, most of them at most 8, with 8 to 4,096 channels: squeeze and excitation, classifiers |
| `narrow` | 1x1 convolutions between 8 to 512 channels, half at a batch of up to 64: the expansions and projections of small networks |
| `many` | batches of 16 to 256: in eight, three depthwise, two with 2 to 64 groups, two 1x1 between 8 to 512 channels, one first layer |
| `heavy` | 20 to 500 billion operations, which tensor cores compute in 0.05 to 1 ms: batches of 2 to 256, linear layers of 2,048 to 65,536 rows |
| `wide` | tensors of 120 to 320 million elements: in five, three of filters of 3, one of 1, one first layer, at batch 2 to 256 |
| `shallow` | filters of 1 (two in three) or 3 over 50,000 to 1,000,000 positions; 16 to 96 channels and outputs, in a third one up to 768 |
| `pool`, `mean` | pooling over windows of 2 to 5; means over all positions, half at a batch |
| `computed` | products that compute their first factor, half by scale, shift and ReLU: in four, three 1x1 convolutions, one linear layer |
| `dense` | 1x1 convolutions that compute their first factor, of 49 to 6,272 rows, from 64 to 1,024 channels to 32 to 256: dense blocks |
| `attention` | heads of 16 to 256 elements, 1 to 4,096 queries, one in eight a single one; one in three causal, one in five with shared keys |
| `rows`, `elementwise` | softmax and layer normalisation; sums of two tensors, one of them maybe transposed |

Extents and channels are log-uniform, so that small late layers and large early ones are equally frequent: extents without a prime factor
above 17 (CNNOpt, PACT 2022, section 4.1), five in six square; 16 to 1,024 channels, mostly multiples of 8, 16 or 32. Convolutions and linear layers
are followed by what `workloads.FOLLOWS` lists; those of `computed` compute their first factor as `workloads.COMPUTED` lists. Work and sizes are
within bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tilewright.kernels.columns import length
from tilewright.kernels.gpu.gemm.space import LARGE_FLOPS
from tilewright.selection.ranking import Ranking
from tilewright.tuning.workloads import (
    COMPUTED,
    FOLLOWS,
    FP32,
    Attention,
    Convolution,
    Elementwise,
    GlobalMean,
    Linear,
    Pool,
    Product,
    Rows,
    Workload,
)

LARGEST_PRIME = 17
LEAST_FLOPS, MOST_FLOPS = 1e6, LARGE_FLOPS
"""Range of operations of a convolution or product: below it only the launch matters, above it a sample takes milliseconds, and space and
model of CUDA cores are others."""
MOST_HEAVY_FLOPS = 5e11
"""Maximum operations of the class `heavy`, which begins where the others end."""
FEW_ROWS = 128
"""Linear layers of at most these rows may have fewer operations: networks with squeeze and excitation have dozens of them."""
LEAST_ELEMENTS, MOST_ELEMENTS = 20_000, 120_000_000
"""Least elements of pools, rows and elementwise workloads, and maximum elements of any operand or result of most classes."""
MOST_WIDE_ELEMENTS = 320_000_000
"""Maximum elements of the class `wide`, which begins where the others end."""
MOST_WINDOW_WORK, MOST_MANY_WORK = 1.5e8, 6e8
"""Maximum operations of a depthwise convolution or a pool, whose reference result is computed on the host; the latter in the class `many`."""
LEAST_MANY = 16
"""Least batch of the class `many`."""
LEAST_SHALLOW, MOST_SHALLOW = 50_000, 1_000_000
"""Positions of the results of the class `shallow`, of all images."""
SEEDED = 16
"""Part of every seed: the number of classes when the first data sets were drawn."""


def has_small_factors(number: int) -> bool:
    """Whether no prime factor exceeds LARGEST_PRIME."""
    for prime in (2, 3, 5, 7, 11, 13, LARGEST_PRIME):
        while number % prime == 0:
            number //= prime
    return number == 1


EXTENTS = tuple(extent for extent in range(3, 4097) if has_small_factors(extent))
_LAYERS = (
    (32, 3, 108, 3, 1), (32, 32, 108, 3, 1), (64, 32, 54, 3, 1), (64, 64, 54, 3, 1), (128, 64, 27, 3, 1), (128, 128, 27, 3, 1), (64, 3, 112, 7, 2),
    (64, 64, 56, 3, 1), (128, 64, 28, 3, 2), (128, 128, 28, 3, 1), (256, 128, 14, 3, 2), (256, 256, 14, 3, 1), (512, 256, 7, 3, 2),
    (512, 512, 7, 3, 1), (32, 3, 544, 3, 1), (64, 32, 272, 3, 1), (128, 64, 136, 3, 1), (256, 128, 68, 3, 1), (512, 256, 34, 3, 1),
    (1024, 512, 17, 3, 1),
)  # fmt: skip
_DEPTHWISE = (
    (32, 112, 3, 1), (96, 56, 3, 2), (144, 56, 3, 1), (192, 28, 3, 1), (384, 14, 3, 1), (576, 7, 3, 2), (960, 7, 3, 1), (240, 28, 5, 1),
    (672, 7, 5, 2), (96, 56, 7, 1),
)  # fmt: skip
_PRODUCTS = (
    (12, 128, 64, 128), (12, 128, 128, 64), (12, 384, 64, 384), (12, 384, 384, 64), (16, 197, 64, 197), (16, 197, 197, 64), (64, 49, 32, 49),
    (8, 512, 512, 512),
)  # fmt: skip
_ATTENTION = (
    (1, 16, 2048, 2048, 64, 1, 0), (1, 16, 4096, 4096, 128, 1, 0), (1, 12, 1024, 1024, 64, 1, 1), (1, 32, 1024, 1024, 128, 4, 1),
    (1, 32, 1, 4096, 64, 1, 0), (1, 1, 1, 4096, 64, 1, 0), (1, 32, 1, 1024, 128, 4, 0),
    *((batch, 12, places, places, 64, 1, 0) for places in (128, 384, 512) for batch in (1, 8, 64)),
    *((batch, heads, 197, 197, 64, 1, 0) for heads in (3, 6, 12) for batch in (1, 8, 64)),
)  # fmt: skip
JUDGED: frozenset[Workload] = frozenset((
    *(Convolution(1, c, k, (size, size), (f, f), stride) for k, c, size, f, stride in _LAYERS),
    *(Convolution(1, c, c, (size, size), (f, f), stride, groups=c) for c, size, f, stride in _DEPTHWISE),
    *(Product(*sizes) for sizes in _PRODUCTS),
    *(Attention(*sizes) for sizes in _ATTENTION),
))  # fmt: skip
"""The workloads on which models are evaluated, excluded from training: the layers of CNNOpt's table 2 (outputs, channels, height, filter, stride),
depthwise convolutions (channels, height of the result, filter, stride), batched products (batch, rows, reduced extent, columns), attention of BERT,
GPT-2 and vision transformers, and of `bench.attention`."""


def bare(workload: Workload) -> Workload:
    """The workload without what follows it or is computed before it, how its operands are stored, or its precision: those with equal sizes count as
    one."""
    workload = replace(workload, precision=FP32)
    if isinstance(workload, Convolution | Linear):
        return replace(workload, then="nothing", computed="nothing")
    return replace(workload, swapped=0) if isinstance(workload, Product) else workload


class Draw:
    """Random sizes from a seed."""

    def __init__(self, seed: Any) -> None:
        self._generator = np.random.default_rng(seed)

    def one_in(self, count: float) -> bool:
        return bool(self._generator.random() < 1 / count)

    def of(self, *choices: Any) -> Any:
        return choices[int(self._generator.integers(len(choices)))]

    def between(self, least: float, most: float) -> int:
        """Log-uniform."""
        return round(float(np.exp(self._generator.uniform(np.log(least), np.log(most)))))

    def extent(self, least: int, most: int) -> int:
        wanted = self.between(least, most)
        return min((extent for extent in EXTENTS if least <= extent <= most), key=lambda extent: abs(np.log(extent / wanted)))

    def size(self, least: int, most: int) -> tuple[int, int]:
        """Two extents, five in six times equal."""
        first = self.extent(least, most)
        return first, self.extent(least, most) if self.one_in(6) else first

    def channels(self, least: int = 16, most: int = 1024) -> int:
        """Networks have round numbers, the paper arbitrary ones."""
        step = self.of(1, 8, 8, 16, 16, 16, 32, 32, 32, 32)
        return int(max(least, round(self.between(least, most) / step) * step))

    def batch(self, most: int = 256) -> int:
        """At least two."""
        return self.between(2, most) if self.one_in(4) else 2 ** int(self._generator.integers(1, int(np.log2(most)) + 1))

    def follows(self) -> str:
        return str(self.of(*FOLLOWS, "nothing", "relu", "residual"))

    def stride(self) -> int:
        return 2 if self.one_in(4) else 1

    def strided(self, filter_size: int) -> int:
        """A stride for a filter; 1x1 filters with stride 2 are rarer."""
        return 1 if filter_size == 1 and not self.one_in(3) else self.stride()


def _square(draw: Draw, filter_size: int, batch: int = 1) -> Convolution:
    stride = draw.strided(filter_size)
    return Convolution(batch, draw.channels(), draw.channels(), draw.size(5, 288), (filter_size,) * 2, stride, then=draw.follows())


def _large(draw: Draw) -> Convolution:
    size = draw.of(5, 7, 9, 11)
    filters = (size, size) if size < 8 else draw.of((1, size), (size, 1))
    return replace(_square(draw, 3), filter=filters, size=draw.size(5, 160))


def _groups(draw: Draw) -> Convolution:
    batch = draw.batch(64) if draw.one_in(3) else 1
    if draw.one_in(2):
        channels, size = draw.channels(), draw.of(3, 3, 5, 7)
        return Convolution(batch, channels, channels, draw.size(5, 160), (size, size), draw.stride(), groups=channels, then=draw.follows())
    groups, each = draw.of(2, 4, 8, 16, 32, 64), draw.of(4, 8, 8, 16, 16, 24, 32, 40, 64)
    outputs = groups * each * draw.of(1, 1, 1, 2)
    size = draw.of(1, 3, 3, 3, 5)
    return Convolution(batch, groups * each, outputs, draw.size(5, 112), (size, size), draw.strided(size), groups=groups, then=draw.follows())


def _forms(draw: Draw) -> Convolution:
    batch, channels, outputs, then = draw.batch(64) if draw.one_in(4) else 1, draw.channels(), draw.channels(), draw.follows()
    form = draw.of("dilated", "one", "three")
    if form == "dilated":
        return Convolution(batch, channels, outputs, draw.size(9, 160), (3, 3), dilation=draw.of(2, 2, 3, 4), then=then)
    if form == "one":
        size, dilation = draw.of(3, 5, 7, 9, 15), draw.of(1, 1, 1, 2, 4)
        return Convolution(batch, channels, outputs, (draw.extent(32, 4096),), (size,), draw.stride() if dilation == 1 else 1, dilation, then=then)
    size = draw.extent(5, 112)
    filters = draw.of((3, 3, 3), (3, 3, 3), (1, 3, 3), (3, 1, 1))
    return Convolution(batch, draw.channels(16, 256), draw.channels(16, 256), (draw.extent(3, 32), size, size), filters, draw.stride(), then=then)


def _first(draw: Draw) -> Convolution:
    batch, channels, outputs = draw.batch(64) if draw.one_in(2) else 1, 3 if not draw.one_in(10) else draw.of(1, 4), draw.channels(16, 128)
    then = draw.of("nothing", "bias", "relu", "silu")
    if draw.one_in(4):
        patch = draw.of(2, 4, 8, 16)
        return Convolution(batch, channels, draw.channels(48, 1024), draw.size(7, 1024 // patch), (patch, patch), patch, then=then)
    size, stride = draw.of(3, 3, 5, 7), draw.of(1, 2, 2)
    return Convolution(batch, channels, outputs, draw.size(32, 544 // stride), (size, size), stride, then=then)


def _transposed(draw: Draw) -> Convolution:
    filter_size, rank = draw.of(2, 3, 4), draw.of(1, 2, 2, 2)
    size = draw.size(5, 112) if rank == 2 else (draw.extent(32, 1024),)
    batch, filters = draw.of(1, 1, draw.batch(16)), (filter_size,) * rank
    return Convolution(batch, draw.channels(), draw.channels(), size, filters, 2, transposed=1, then=draw.follows())


def _linear(draw: Draw) -> Linear:
    rows = draw.of(draw.between(1, 32), draw.between(16, 4096), draw.of(49, 64, 77, 128, 196, 197, 256, 384, 512, 577, 1024, 3136))
    return Linear(rows, draw.channels(64, 4096), draw.channels(64, 4096), draw.follows())


def _few(draw: Draw) -> Linear:
    rows = draw.of(1, 1, 1, draw.between(2, 8), draw.between(2, 8), 8, draw.between(9, FEW_ROWS), draw.of(16, 32, 64))
    return Linear(rows, draw.channels(8, 4096), draw.channels(8, 4096), draw.follows())


def _narrow(draw: Draw) -> Convolution:
    batch = draw.batch(64) if draw.one_in(2) else 1
    return Convolution(batch, draw.channels(8, 512), draw.channels(8, 512), draw.size(5, 160), (1, 1), then=draw.follows())


def _computing(draw: Draw) -> str:
    return "norm" if draw.one_in(2) else str(draw.of(*(name for name in COMPUTED if name not in ("nothing", "norm"))))


def _computed(draw: Draw) -> Convolution | Linear:
    computed = _computing(draw)
    if draw.one_in(4):
        return Linear(draw.between(16, 4096), draw.channels(64, 4096), draw.channels(64, 4096), draw.follows(), computed=computed)
    batch = draw.batch(64) if draw.one_in(2) else 1
    return Convolution(batch, draw.channels(16, 2048), draw.channels(), draw.size(5, 112), (1, 1), then=draw.follows(), computed=computed)


def _many(draw: Draw) -> Convolution:
    form = draw.of("depthwise", "depthwise", "depthwise", "groups", "groups", "narrow", "narrow", "first")
    batch, size = draw.batch(256), draw.size(7, 160)
    if form == "depthwise":
        channels, filter_size = draw.channels(8, 1024), draw.of(3, 3, 5, 5, 7)
        found = Convolution(batch, channels, channels, size, (filter_size,) * 2, draw.stride(), groups=channels, then=draw.follows())
    elif form == "groups":
        groups, each = draw.of(2, 4, 8, 16, 32, 64), draw.of(4, 8, 8, 16, 16, 24, 32, 40, 64)
        channels, filter_size = groups * each, draw.of(1, 3, 3, 3)
        found = Convolution(batch, channels, channels, size, (filter_size,) * 2, draw.strided(filter_size), groups=groups, then=draw.follows())
    elif form == "narrow":
        found = Convolution(batch, draw.channels(8, 512), draw.channels(8, 512), size, (1, 1), then=draw.follows())
    else:
        size, filters = draw.size(16, 144), draw.of((3, 3), (7, 7))
        found = Convolution(batch, 3, draw.channels(16, 64), size, filters, draw.of(1, 2, 2), then=draw.of("bias", "relu", "silu"))
    return found if batch >= LEAST_MANY else _many(draw)


def _heavy(draw: Draw) -> Convolution | Linear:
    if draw.one_in(4):
        return Linear(draw.between(2048, 65536), draw.channels(64, 4096), draw.channels(64, 4096), draw.follows())
    return _square(draw, draw.of(1, 3, 3, 3, 5), draw.batch())


def _wide(draw: Draw) -> Convolution:
    form, batch = draw.of(1, 3, 3, 3, "first"), draw.batch()
    return replace(_first(draw), batch=batch) if form == "first" else _square(draw, form, batch)


def _shallow(draw: Draw) -> Convolution:
    batch, filter_size = draw.batch() if not draw.one_in(4) else 1, draw.of(1, 1, 3)
    size = draw.size(*(round((positions / batch) ** 0.5) for positions in (LEAST_SHALLOW, MOST_SHALLOW)))
    channels, outputs = draw.channels(16, 96), draw.channels(16, 96)
    if draw.one_in(3):
        channels, outputs = draw.of((channels, draw.channels(96, 768)), (draw.channels(96, 768), outputs))
    return Convolution(batch, channels, outputs, size, (filter_size,) * 2, then=draw.follows())


def _dense(draw: Draw) -> Convolution:
    batch, size, computed = draw.of(1, 1, draw.batch(8)), draw.size(7, 28), _computing(draw)
    return Convolution(batch, draw.channels(64, 1024), draw.channels(32, 256), size, (1, 1), then=draw.follows(), computed=computed)


def _product(draw: Draw) -> Product:
    rows, reduced = draw.of(draw.between(16, 1024), draw.of(49, 64, 77, 96, 128, 197, 256, 384, 512)), draw.of(16, 24, 32, 48, 64, 64, 80, 96, 128)
    columns = rows if draw.one_in(2) else draw.between(16, 1024)
    batch = draw.between(1, 256)
    return Product(batch, rows, reduced, columns, 1) if draw.one_in(2) else Product(batch, rows, columns, reduced)


def _pool(draw: Draw) -> Pool:
    batch, window = draw.batch() if draw.one_in(2) else 1, draw.of(2, 3, 3, 5)
    return Pool(batch, draw.channels(), draw.size(5, 160), window, draw.of(1, 2, 2), draw.of(0, 1))


def _mean(draw: Draw) -> GlobalMean:
    return GlobalMean(draw.batch(128) if draw.one_in(2) else 1, draw.channels(8, 2048), draw.size(3, 112))


def _attention(draw: Draw) -> Attention:
    batch, heads = draw.batch(64) if draw.one_in(2) else 1, draw.of(1, 2, 3, 4, 6, 8, 8, 12, 12, 16, 16, 24, 32)
    queries = draw.of(draw.between(16, 4096), draw.between(32, 512), draw.of(49, 64, 77, 128, 196, 197, 256, 384, 512, 577, 1024, 2048))
    keys, causal = (queries, int(draw.one_in(3))) if not draw.one_in(4) else (draw.between(16, 4096), 0)
    queries, causal = (1, 0) if draw.one_in(8) else (queries, causal)
    sharing = draw.of(*(count for count in (2, 4, 8) if heads % count == 0)) if draw.one_in(5) and heads % 2 == 0 else 1
    return Attention(batch, heads, queries, keys, draw.of(16, 32, 32, 40, 48, 64, 64, 64, 64, 80, 96, 128, 128, 256), sharing, causal)


def _rows(draw: Draw) -> Rows:
    columns = draw.of(draw.between(8, 8192), draw.of(64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096))
    return Rows(draw.between(16, 65536), columns, draw.of(0, 1))


def _elementwise(draw: Draw) -> Elementwise:
    return Elementwise(draw.of(1, draw.batch()), draw.channels(), draw.size(5, 288), draw.of(0, 1))


@dataclass(frozen=True)
class Bounds:
    """Bounds of a class: least and maximum operations of convolutions and products, and the maximum of depthwise convolutions, pools and the like;
    least (excluded) and maximum elements of the largest operand or result."""

    flops: tuple[float, float] = (LEAST_FLOPS, MOST_FLOPS)
    window_work: float = MOST_WINDOW_WORK
    elements: tuple[int, int] = (0, MOST_ELEMENTS)

    def hold(self, workload: Workload) -> bool:
        """Whether work and sizes of the workload are within them."""
        least, most = self.flops
        fewest, largest = self.elements
        if not fewest < workload.elements <= largest:
            return False
        if isinstance(workload, Linear) and workload.rows <= FEW_ROWS:
            return workload.flops <= most
        depthwise = isinstance(workload, Convolution) and workload.groups == workload.channels > 1
        if depthwise or isinstance(workload, Pool | GlobalMean | Rows | Elementwise):
            return workload.elements >= LEAST_ELEMENTS and workload.flops <= self.window_work
        return least <= workload.flops <= most


CLASSES: Mapping[str, Callable[[Draw], Workload]] = MappingProxyType({
    "3x3": lambda draw: _square(draw, 3), "1x1": lambda draw: _square(draw, 1), "large": _large, "first": _first, "groups": _groups, "forms": _forms,
    "batch": lambda draw: _square(draw, draw.of(1, 3, 3, 5), draw.batch()), "transposed": _transposed, "linear": _linear, "product": _product,
    "few": _few, "narrow": _narrow, "many": _many, "heavy": _heavy, "wide": _wide, "pool": _pool, "mean": _mean, "rows": _rows,
    "attention": _attention,
    "elementwise": _elementwise, "computed": _computed, "shallow": _shallow, "dense": _dense,
})  # fmt: skip
BOUNDS: Mapping[str, Bounds] = MappingProxyType({
    "heavy": Bounds((MOST_FLOPS, MOST_HEAVY_FLOPS)), "shallow": Bounds((LEAST_FLOPS, MOST_HEAVY_FLOPS)),
    "many": Bounds(window_work=MOST_MANY_WORK),
    "wide": Bounds((LEAST_FLOPS, MOST_HEAVY_FLOPS), elements=(MOST_ELEMENTS, MOST_WIDE_ELEMENTS)),
})  # fmt: skip
"""The bounds of classes, where they are not those of the others."""
TRAINING = (
    "3x3", "batch", "groups", "1x1", "forms", "first", "batch", "linear", "few", "groups", "large", "narrow", "batch", "1x1", "forms", "3x3",
    "transposed", "product", "few", "pool", "batch", "narrow", "linear", "rows", "groups", "mean", "forms", "first", "few", "1x1",
    "elementwise", "narrow", "many",
)  # fmt: skip
"""Classes of training problems, drawn in turn; `heavy`, `wide`, `shallow`, `attention`, `computed` and `dense` are drawn by name."""


def random_workloads(
    seed: int, classes: Sequence[str] = TRAINING, without: Collection[Workload] = JUDGED, precisions: Sequence[str] = (FP32,)
) -> Iterator[Workload]:
    """Infinitely many different workloads of the classes in turn, each in one of the precisions, determined by the seed and the classes; none has the
    sizes of one of `without`."""
    draw, precision = Draw([seed, SEEDED]), Draw([seed, SEEDED, len(precisions)])
    seen = {bare(workload) for workload in without}
    for name in itertools.cycle(classes):
        workload = CLASSES[name](draw)
        while not BOUNDS.get(name, Bounds()).hold(workload) or bare(workload) in seen:
            workload = CLASSES[name](draw)
        seen.add(bare(workload))
        yield replace(workload, precision=precision.of(*precisions))


def evenly(ranking: Ranking, count: int, seed: int) -> np.ndarray:
    """Positions of `count` candidates in the ranking's space: an equal number for every schema, drawn without regard to predictions.

    If a schema has too few candidates, the others get the remainder."""
    generator = np.random.default_rng(seed)
    sizes = [length(part.candidates) for part in ranking.parts]
    starts = ranking.starts
    picked: list[np.ndarray] = []
    left, schemas = count, len(sizes)
    for number in np.argsort(sizes, kind="stable"):
        share = min(sizes[number], left // schemas)
        picked.append(starts[number] + generator.choice(sizes[number], share, replace=False))
        left, schemas = left - share, schemas - 1
    return np.sort(np.concatenate(picked))


def towards_the_best(ranking: Ranking, count: int, seed: int) -> np.ndarray:
    """Positions of `count` candidates of all schemas, most of them among each schema's best predicted, which a model must distinguish.

    A candidate's predicted rank within its schema is drawn log-uniformly."""
    generator = np.random.default_rng(seed)
    chosen: set[int] = set()
    orders = [np.argsort(part.estimate.seconds, kind="stable") for part in ranking.parts]
    starts = ranking.starts
    while len(chosen) < min(count, ranking.candidates):
        number = int(generator.integers(len(orders)))
        if not len(orders[number]):
            continue
        chosen.add(int(starts[number] + orders[number][_rank(generator, len(orders[number]))]))
    return np.array(sorted(chosen))


def towards_the_first(ranking: Ranking, count: int, seed: int) -> np.ndarray:
    """Positions of `count` candidates, most of them among the first of the ranking: a candidate's rank is drawn log-uniformly."""
    generator = np.random.default_rng(seed)
    order = np.argsort(ranking.seconds, kind="stable")
    chosen: set[int] = set()
    while len(chosen) < min(count, len(order)):
        chosen.add(int(order[_rank(generator, len(order))]))
    return np.array(sorted(chosen))


def _rank(generator: np.random.Generator, count: int) -> int:
    """A rank below `count`, log-uniform."""
    return min(int(np.exp(generator.uniform(0, np.log(count + 1)))), count) - 1
