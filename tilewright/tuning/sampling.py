"""Random convolutions and samples of their schedules, for training the learned model.

The ranges are those of CNNOpt (PACT 2022, section 4.1: extents of 3 to 1024 without a prime factor above 17; 16 to 1024 channels, or 3 input
channels; filters of 3, 5 and 7), plus 1x1 filters and stride 2, within bounds on the work of a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from tilewright.kernels.columns import length
from tilewright.selection.ranking import Ranking

FILTERS, FILTER_SHARES = (3, 1, 5, 7), (0.6, 0.2, 0.12, 0.08)
LARGEST_PRIME = 17
JUDGED = frozenset({
    (32, 3, 108, 3, 1), (32, 32, 108, 3, 1), (64, 32, 54, 3, 1), (64, 64, 54, 3, 1), (128, 64, 27, 3, 1), (128, 128, 27, 3, 1), (64, 3, 112, 7, 2),
    (64, 64, 56, 3, 1), (128, 64, 28, 3, 2), (128, 128, 28, 3, 1), (256, 128, 14, 3, 2), (256, 256, 14, 3, 1), (512, 256, 7, 3, 2),
    (512, 512, 7, 3, 1), (32, 3, 544, 3, 1), (64, 32, 272, 3, 1), (128, 64, 136, 3, 1), (256, 128, 68, 3, 1), (512, 256, 34, 3, 1),
    (1024, 512, 17, 3, 1),
})  # fmt: skip
"""(outputs, channels, height, filter, stride) of the layers of CNNOpt's table 2, on which models are evaluated; excluded from training."""
LEAST_FLOPS, MOST_FLOPS = 4e6, 6e9
"""Range of operations of a layer: below it only the launch matters, above it a sample takes milliseconds."""
MOST_ELEMENTS = 24_000_000
"""Maximum elements of input, weights or output."""


def has_small_factors(number: int) -> bool:
    """Whether no prime factor exceeds LARGEST_PRIME."""
    for prime in (2, 3, 5, 7, 11, 13, LARGEST_PRIME):
        while number % prime == 0:
            number //= prime
    return number == 1


EXTENTS = tuple(extent for extent in range(3, 1025) if has_small_factors(extent))


def random_layers(seed: int, without: Collection[tuple[int, int, int, int, int]] = ()) -> Iterator[dict[str, int | str]]:
    """Infinitely many random convolutions, determined by the seed: outputs, channels, height, width, filter, stride, and a name made of these.

    Extents and channels are log-uniform: small late layers and large early ones are equally frequent. `without`: excluded layers (outputs, channels,
    height, filter, stride), on which the model is evaluated."""
    generator = np.random.default_rng(seed)
    seen = set(without)
    logs = np.log(np.array(EXTENTS))

    def extent() -> int:
        return EXTENTS[int(np.abs(logs - generator.uniform(logs[0], logs[-1])).argmin())]

    def channel_count() -> int:
        count = 2 ** generator.uniform(4, 10)
        # real networks have round numbers of channels, the paper arbitrary ones
        step = int(generator.choice([1, 8, 16, 32], p=[0.15, 0.2, 0.3, 0.35]))
        return int(max(16, round(count / step) * step))

    while True:
        height = extent()
        width = height if generator.random() < 5 / 6 else extent()
        size = int(generator.choice(FILTERS, p=FILTER_SHARES))
        stride = 2 if generator.random() < 0.25 else 1
        outputs = channel_count()
        channels = 3 if generator.random() < 0.08 else channel_count()
        flops = 2.0 * outputs * channels * height * width * size * size
        elements = max(channels * height * width * stride * stride, outputs * height * width, outputs * channels * size * size)
        key = (outputs, channels, height, size, stride)
        if not LEAST_FLOPS <= flops <= MOST_FLOPS or elements > MOST_ELEMENTS or key in seen:
            continue
        seen.add(key)
        yield _layer(outputs, channels, height, width, size, stride)


def network_layers(seed: int, without: Collection[tuple[int, int, int, int, int]] = ()) -> Iterator[dict[str, int | str]]:
    """Infinitely many random convolutions of the kinds that are most frequent in networks and rare in uniform samples. Four in five have 3x3 filters
    over 6 to 64 pixels with 64 to 512 channels in steps of 32. One in five is a first layer with 3 channels over
    96 to 576 pixels. One in four has stride 2. All are square."""
    generator = np.random.default_rng([seed, 1])
    seen = set(without)
    while True:
        if generator.random() < 0.2:
            outputs, channels = 16 * int(generator.integers(1, 7)), 3
            height, size = int(generator.integers(48, 289)) * 2, int(generator.choice([3, 3, 5, 7]))
        else:
            outputs, channels = (32 * int(generator.integers(2, 17)) for _ in range(2))
            height, size = round(2 ** generator.uniform(np.log2(6), 6)), 3
        stride = 2 if generator.random() < 0.25 else 1
        key = (outputs, channels, height, size, stride)
        flops = 2.0 * outputs * channels * height * height * size * size
        if not LEAST_FLOPS <= flops <= MOST_FLOPS or key in seen:
            continue
        seen.add(key)
        yield _layer(outputs, channels, height, height, size, stride)


def _layer(outputs: int, channels: int, height: int, width: int, size: int, stride: int) -> dict[str, int | str]:
    return {
        "name": f"{outputs}x{channels}_{height}x{width}_f{size}s{stride}",
        "outputs": outputs, "channels": channels, "height": height, "width": width, "filter": size, "stride": stride,
    }  # fmt: skip


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
        rank = int(np.exp(generator.uniform(0, np.log(len(orders[number]) + 1)))) - 1
        chosen.add(int(starts[number] + orders[number][min(rank, len(orders[number]) - 1)]))
    return np.array(sorted(chosen))
