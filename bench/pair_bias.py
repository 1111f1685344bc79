"""By how much results of float32 layers as pairs on the tensor cores of the GPU present are too small in the mean, and their errors, against float64.

    python -m bench.pair_bias --name pair_bias_h200

Convolutions and matrix products are drawn by a seed, their inputs are normal numbers behind a ReLU. Each is computed with its weights as they are and
enlarged as `runtime.packing` does (`CUT_OFF`), and by PyTorch. The bias is the slope of the errors over the results, in units of 2^-24; errors are
root mean squares over those of the results, in the same unit. Layers of which models choose no pairs by warpgroups are left out.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import tilewright
from bench.common import write_results
from bench.pair_errors import UNIT
from tilewright.runtime import packing
from tilewright.runtime.packing import CUT_OFF

PRECISIONS = ("fp32-tensor", "fp32-tensor-fp16")
EAGER, AS_THEY_ARE, ENLARGED = "eager", "as they are", "enlarged"


def drawn(random: Random) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A layer and its inputs."""
    channels, outputs, size = (random.randrange(*of) for of in ((2, 65), (4, 65), (10, 41)))
    if random.random() < 0.25:
        return nn.Linear(channels * 32, outputs * 8), lambda: torch.randn(64 * size, channels * 32)
    taps, stride = random.choice((1, 1, 3, 3, 5)), random.choice((1, 1, 2))
    images = 2 + 4000 // size**2
    return nn.Conv2d(channels * 8, outputs * 8, taps, stride, taps // 2), lambda: torch.randn(images, channels * 8, size, size)


def measured(results: Tensor, exact: Tensor) -> dict[str, float]:
    """The bias and the error of results."""
    errors, exact = (results.double() - exact).flatten(), exact.flatten()
    of_results = exact.square().mean()
    return {"bias": float((errors * exact).mean() / of_results) / UNIT, "error": float((errors.square().mean() / of_results).sqrt()) / UNIT}


def ours(module: nn.Module, x: Tensor, precision: str, cut_off: Any) -> Tensor | None:
    """The results of pairs by warpgroups; None if these are not what models choose."""
    with mock.patch.object(packing, "CUT_OFF", cut_off), tilewright.compile(module, (x,), precision=precision, vendor=False) as executable:
        if not any("warpgroups" in row.schedule and " pairs" in row.schedule for row in executable.plan.rows):
            return None
        found: Tensor = executable(x).clone()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="pair_bias", help="the result file's name in bench/results")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    random, results = Random(options.seed), list[dict[str, Any]]()
    torch.manual_seed(options.seed)
    for _ in range(options.layers):
        layer, inputs = drawn(random)
        module, x = layer.cuda().eval(), inputs().relu().cuda()
        with torch.no_grad():
            exact, theirs = copy.deepcopy(module).double()(x.double()), module(x)
        ways = {EAGER: theirs}
        for precision in PRECISIONS:
            for name, cut_off in ((AS_THEY_ARE, dict.fromkeys(CUT_OFF, 0.0)), (ENLARGED, CUT_OFF)):
                found = ours(module, x, precision, cut_off)
                if found is not None:
                    ways[f"{precision}, {name}"] = found
        if len(ways) < 1 + 2 * len(PRECISIONS):
            continue
        results += [{"layer": str(layer), "input": list(x.shape), "way": way, **measured(found, exact)} for way, found in ways.items()]
        print(*results[-len(ways) :], sep="\n", flush=True)
    write_results(options.name, vars(options), results)
    by_way = defaultdict[str, list[dict[str, Any]]](list)
    for row in results:
        by_way[row["way"]].append(row)
    for way, rows in by_way.items():
        bias, error = (sum(row[what] for row in rows) / len(rows) for what in ("bias", "error"))
        print(f"{way:32} {len(rows):3} layers, bias {bias:6.2f}, error {error:6.2f}")


if __name__ == "__main__":
    main()
