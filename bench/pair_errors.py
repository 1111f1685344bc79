"""Errors of sums of products in float32 as pairs of TF32 or of float16, whose sums tensor cores truncate, beside a chain of float32 multiply-adds.

    python -m bench.pair_errors --name pair_errors

The model of tensor cores is that of Fasi, Higham, Mikaitis and Pranesh ("Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science, 2021):
four products at a time and the sum before are aligned to the largest of them and truncated one bit below float32, and so is their sum to float32. An
error is a root mean square over sums of random numbers against float64, in units of 2^-24 of that of the sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from bench.cells import Rows, results_of
from bench.common import write_results
from tilewright.ir.dtypes import nearest_tf32
from tilewright.ir.region import F16_STEP
from tilewright.kernels.gpu.warpgroup.pairs import FLOAT16, HIGH, LOW, TF32
from tilewright.runtime.packing import f16_scale, pair_of_f16, pair_of_tf32

Array: TypeAlias = "np.ndarray[Any, Any]"

UNIT = 2.0**-24
TOGETHER = 4
"""Products that are added at once."""
DEPTH = TF32.depth
LENGTHS = (8, 16, 32, 64, 72, 256, 288, 576, 4608)
INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, int]], tuple[Array, Array]]] = {
    "normal": lambda random, size: (random.standard_normal(size), random.standard_normal(size)),
    "positive": lambda random, size: (random.random(size), random.random(size)),
    "after a ReLU": lambda random, size: (np.maximum(random.standard_normal(size), 0), random.standard_normal(size)),
}


def _truncated(values: Array, bits: int) -> Array:
    """The sums along the last axis of the terms, truncated to the unit of the last of `bits` bits of the largest."""
    _, exponents = np.frexp(np.abs(values).max(-1, keepdims=True))
    unit = np.ldexp(1.0, exponents - bits)
    result: Array = (np.trunc(values / unit) * unit).sum(-1)
    return result


def truncated_product(sums: Array, a: Array, b: Array) -> Array:
    """sums + the sums of a b along the last axis, as tensor cores compute them; in float32, as a and b are exact in float64."""
    total = sums.astype(np.float64)
    for first in range(0, a.shape[-1], TOGETHER):
        products = a[..., first : first + TOGETHER].astype(np.float64) * b[..., first : first + TOGETHER]
        terms = np.concatenate([total[..., None], np.broadcast_to(products, (*total.shape, products.shape[-1]))], -1)
        total = _truncated(_truncated(terms, 25)[..., None], 24)
    return total.astype(np.float32)


def _pair(values: Array) -> tuple[Array, Array]:
    high = nearest_tf32(values)
    return high, nearest_tf32(values - high)


def of_pairs(a: Array, b: Array, run: int = DEPTH, packed: Callable[[Array], Any] = _pair) -> Array:
    """Sums of products of pairs of TF32, moved to float32 after every `run` elements, within which products of high parts come last."""
    (high_a, low_a), (high_b, low_b) = _pair(a), packed(b)
    return _moved(((low_a, high_b), (high_a, low_b), (high_a, high_b)), run, TF32.depth, 1.0)


def of_f16_pairs(a: Array, b: Array) -> Array:
    """The same of pairs of float16, in units that the weights b have, as warpgroups make the sums."""
    weights, unit = pair_of_f16(torch.from_numpy(b)).numpy(), float(f16_scale(torch.from_numpy(b)))
    high = a.astype(np.float16)
    low = ((a - high) * np.float32(F16_STEP)).astype(np.float16)
    factors = {HIGH: high, LOW: low}
    return _moved([(factors[part], weights[tile]) for part, tile in FLOAT16.products], FLOAT16.moved_after(a.shape[1]), FLOAT16.depth, unit)


def _moved(products: Sequence[tuple[Array, Array]], run: int, depth: int, unit: float) -> Array:
    """The sums of the products of all of these factors, made of `run` elements at a time, `depth` of them at once, and added in float32."""
    (first, _), *_ = products
    total = np.zeros(len(first), np.float32)
    for start in range(0, first.shape[1], run):
        part, end = np.zeros_like(total), min(start + run, first.shape[1])
        for left, right in products:
            for begin in range(start, end, depth):
                here = slice(begin, min(begin + depth, end))
                part = truncated_product(part, left[:, here], right[:, here])
        total = total + part * np.float32(unit)
    return total


def of_warpgroups(a: Array, b: Array) -> Array:
    """As warpgroups make the sums of pairs of TF32."""
    return of_pairs(a, b, TF32.moved_after(a.shape[1]), lambda weights: pair_of_tf32(torch.from_numpy(weights)).numpy())


def of_tf32(a: Array, b: Array) -> Array:
    total = np.zeros(len(a), np.float32)
    for first in range(0, a.shape[1], DEPTH):
        total = truncated_product(total, nearest_tf32(a[:, first : first + DEPTH]), nearest_tf32(b[:, first : first + DEPTH]))
    return total


def of_multiply_adds(a: Array, b: Array) -> Array:
    """One after another along the last axis, each rounded once: what CUDA cores compute."""
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], np.float32)
    for k in range(a.shape[-1]):
        total = (total.astype(np.float64) + a[..., k].astype(np.float64) * b[..., k]).astype(np.float32)
    return total


WAYS: dict[str, Callable[[Array, Array], Array]] = {
    "multiply-adds": of_multiply_adds,
    "pairs": of_pairs,
    "pairs by warpgroups": of_warpgroups,
    "pairs of float16": of_f16_pairs,
    "pairs, not moved": lambda a, b: of_pairs(a, b, a.shape[1]),
    "tf32": of_tf32,
}


def pair_errors() -> Rows:
    """The table of the documentation."""
    ours = '`"fp32-tensor"`, by warps', "by warpgroups", '`"fp32-tensor-fp16"`'
    rows = [["factors", "products of a sum", "chain of float32 multiply-adds", *ours, "sums not moved to float32", '`"tf32"`']]
    for entry in results_of("pair_errors"):
        rows.append([entry["inputs"], f"{entry['products']:,}", *(f"{entry[way]:.2g}" if entry[way] < 100 else f"{entry[way]:,.0f}" for way in WAYS)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sums", type=int, default=4000, help="random sums of each length")
    parser.add_argument("--name", default="pair_errors", help="the result file's name in bench/results")
    options = parser.parse_args()
    random, results = np.random.default_rng(0), []
    for inputs, made in INPUTS.items():
        for length in LENGTHS:
            a, b = (values.astype(np.float32) for values in made(random, (options.sums, length)))
            exact = (a.astype(np.float64) * b).sum(-1)
            errors = {way: float(np.sqrt(((add(a, b) - exact) ** 2).mean() / (exact**2).mean()) / UNIT) for way, add in WAYS.items()}
            results.append({"inputs": inputs, "products": length, **errors})
            print(results[-1])
    write_results(options.name, vars(options), results)


if __name__ == "__main__":
    main()
