"""Operators without products against eager PyTorch on this CPU: reductions, softmax, scans, normalisations, permutations, over every dimension.

    python -m bench.loop_operators --seed 1 --name loop_operators_1
    python -m bench.loop_operators softmax cumsum --seed 2 --rounds 9

Shapes are drawn at random from the seed. Each operator is checked against PyTorch in float64, timed in turns with eager PyTorch, and its time
compared with the predicted one.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tilewright
from bench.common import Contender, Run, compare, write_results
from tilewright.tuning.peers import PEERS

TOLERANCE = 1e-4
"""Largest relative error."""
LEAST, MOST = 1 << 18, 1 << 21
"""Elements of an input."""
DIMENSIONS = (0, 1, -2, -1)

Function = Callable[[Tensor], Tensor]

OVER_ONE: Mapping[str, Callable[..., Tensor]] = MappingProxyType({
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "argmax": torch.argmax,
    "norm": torch.linalg.vector_norm,
    "var": torch.var,
    "cumsum": torch.cumsum,
})  # fmt: skip
"""Operators over one dimension; each is drawn for all four."""


def _channels_normalised(x: Tensor) -> Tensor:
    """Layer normalisation over dimension 1 of NCHW, as ConvNeXt's."""
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).square().mean(1, keepdim=True) + 1e-6)


def _of_shape(name: str, shape: Sequence[int], draw: random.Random) -> tuple[str, Function]:
    """The operator for inputs of the shape, and how it is described."""
    if name == "permute":
        order = [0, 1, 2, 3]
        while order == sorted(order):
            draw.shuffle(order)
        return f"permute {order}", lambda x: x.permute(order).contiguous()
    if name in ("flip", "roll"):
        dim = draw.randrange(4)
        shift = draw.randrange(1, max(shape[dim], 2))
        return f"{name} {dim}", (lambda x: x.flip(dim)) if name == "flip" else (lambda x: x.roll(shift, dim))
    functions: dict[str, Function] = {
        "layer norm": lambda x: F.layer_norm(x, shape[-1:]),
        "layer norm of channels": _channels_normalised,
        "instance norm": F.instance_norm,
        "group norm": lambda x: F.group_norm(x, 4),
        "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "average of planes": lambda x: x.mean((2, 3)),
        "transpose": lambda x: x.transpose(1, 3).contiguous(),
    }
    return name, functions[name]


OTHERS = (
    "layer norm", "layer norm of channels", "instance norm", "group norm", "permute", "transpose", "flip", "roll", "pixel shuffle", "pixel unshuffle",
    "nearest", "bilinear", "average of planes",
)  # fmt: skip


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def shape_of(draw: random.Random) -> tuple[int, ...]:
    """Four extents, each a power of two times 1 to 2 so that even and odd ones occur, with LEAST to MOST elements; dimension 1 is a multiple of 4,
    the last two of 2."""
    while True:
        extents = [round(2 ** draw.uniform(0, 8)) for _ in range(4)]
        shape = (extents[0], -(-extents[1] // 4) * 4, -(-extents[2] // 2) * 2, -(-extents[3] // 2) * 2)
        if LEAST <= math.prod(shape) <= MOST and min(shape[2:]) > 2 and shape[0] > 1:
            return shape


def drawn(names: Sequence[str], seed: int) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """The operators with their shapes, described. Each depends on the seed and its name alone."""
    for name in names:
        draw = random.Random(f"{seed} {name}")
        for dim in DIMENSIONS if name in OVER_ONE else (None,):
            shape = shape_of(draw)
            told, function = _of_shape(name, shape, draw) if dim is None else (f"{name} {dim}", partial(OVER_ONE[name], dim=dim))
            yield f"{told} of {' x '.join(map(str, shape))}", _Module(function), shape


@dataclass(frozen=True)
class Row:
    """Seconds of an operator."""

    operator: str
    predicted_seconds: float
    seconds: float
    eager_seconds: float
    relative_error: float

    @property
    def ratio(self) -> float:
        """The time over that of eager PyTorch."""
        return self.seconds / self.eager_seconds


def measured(told: str, module: nn.Module, shape: tuple[int, ...], options: argparse.Namespace) -> Row | str:
    """The operator's times, or why there are none."""
    predicted: list[float] = []

    def prepare(module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
        made = tilewright.compile(module, inputs, threads=options.threads)
        predicted.append(made.plan.predicted_seconds)
        return made

    torch.manual_seed(options.seed)
    example, fresh = ((torch.randn(shape),) for _ in range(2))
    ours, eager = compare(
        told, module, example, fresh, [Contender("tilewright", prepare), PEERS["eager"]], TOLERANCE, options.rounds, options.seconds
    )  # fmt: skip
    if ours.median_seconds is None or eager.median_seconds is None or ours.relative_error is None:
        return f"{told}: {ours.status} {ours.reason}"
    return Row(told, predicted[0], ours.median_seconds, eager.median_seconds, ours.relative_error)


def table_of(rows: Sequence[Row], threads: int) -> Table:
    """The operators, those that lose most first."""
    mean = math.exp(sum(math.log(row.ratio) for row in rows) / len(rows)) if rows else math.nan
    slower = sum(row.ratio > 1.2 for row in rows)
    caption = f"{len(rows)} operators: time / eager {mean:.2f} in the geometric mean, {slower} above 1.2"
    table = Table("operator", "predicted ms", "ms", "eager ms", "ms / eager", "ms / predicted", title=f"CPU, {threads} threads", caption=caption)
    for row in sorted(rows, key=lambda row: -row.ratio):
        numbers = (row.predicted_seconds * 1e3, row.seconds * 1e3, row.eager_seconds * 1e3, row.ratio, row.seconds / row.predicted_seconds)
        table.add_row(row.operator, *(f"{number:.2f}" for number in numbers))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operators", nargs="*", default=[*OVER_ONE, *OTHERS], metavar="NAME", help=f"of {', '.join((*OVER_ONE, *OTHERS))}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.02, help="least time of one turn in one round")
    parser.add_argument("--name", default="loop_operators", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=140)
    rows: list[Row] = []
    for told, module, shape in drawn(options.operators, options.seed):
        row = measured(told, module, shape, options)
        if isinstance(row, str):
            console.print(row, markup=False)
        else:
            rows.append(row)
    path = write_results(options.name, vars(options), [{**asdict(row), "ratio": row.ratio} for row in rows])
    console.print(table_of(rows, options.threads))
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
