"""Runs compiled modules over poisoned memory and compares with PyTorch in float64, for tests of whole programs."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilewright
from tilewright.ir.graph import Graph
from tilewright.ir.region import Program
from tilewright.kernels.library.recurrent import layers_of
from tilewright.partition.merges import LIBRARY, Policy
from tilewright.partition.plan import plan_program
from tilewright.runtime.executable import Executable
from tilewright.runtime.packing import unpack


@dataclass(frozen=True)
class Case:
    """A module with example inputs. `tolerance`: largest error as a fraction of the largest magnitude of an output (at least 1).
    `fixed`: the inputs' values matter and are not replaced by random ones."""

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    tolerance: float = 3e-5
    fixed: bool = False

    def fresh_inputs(self) -> tuple[torch.Tensor, ...]:
        if self.fixed:
            return self.inputs
        return tuple(torch.randn_like(x) if x.is_floating_point() else x for x in self.inputs)


class Bundle(nn.Module):
    """Several cases as one module, so that their kernels are compiled in parallel."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(case.module for case in cases)
        self.counts = [len(case.inputs) for case in cases]

    def forward(self, *inputs: torch.Tensor) -> list[Any]:
        results, start = [], 0
        for part, count in zip(self.parts, self.counts, strict=True):
            results.append(part(*inputs[start : start + count]))
            start += count
        return results


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def near_not_finite(image: torch.Tensor, reach: int) -> torch.Tensor:
    """[images, 1, height, width]: the outputs at most `reach` pixels from a non-finite pixel, for which transforms of blocks may give NaN (infinity
    minus infinity) where direct summation gives a number."""
    spoilt = (~torch.isfinite(image)).any(1, keepdim=True).double()
    return F.max_pool2d(spoilt, 2 * reach + 1, 1, reach) > 0


def compare(case: Case, found: Any, inputs: Sequence[torch.Tensor], reach: int = 0) -> None:
    """Asserts that `found` equals the module's results in float64, with the shapes and types of its own results. NaN and infinities of an image may
    have spread as far as `reach` pixels, over tiles that are transformed."""
    with torch.no_grad():
        own = torch.utils._pytree.tree_leaves(case.module(*inputs))
        exact = torch.utils._pytree.tree_leaves(copy.deepcopy(case.module).double()(*map(widened, inputs)))
    results = [leaf.cpu() for leaf in torch.utils._pytree.tree_leaves(found)]
    assert len(results) == len(own), case.name
    for position, (result, like, wanted) in enumerate(zip(results, own, exact, strict=True)):
        where = f"{case.name}, output {position}"
        assert result.dtype == like.dtype and result.shape == like.shape, (where, result.dtype, like.dtype, result.shape, like.shape)
        if not like.is_floating_point():
            np.testing.assert_array_equal(result.numpy(), wanted.to(like.dtype).numpy(), err_msg=where)
            continue
        array, reference = result.double().numpy(), wanted.double().numpy()
        if (
            reach
            and wanted.dim() == 4
            and inputs[0].dim() == 4
            and (wanted.shape[0], *wanted.shape[2:]) == (inputs[0].shape[0], *inputs[0].shape[2:])
        ):
            array = np.where(near_not_finite(inputs[0], reach).numpy(), reference, array)
        finite = np.abs(reference[np.isfinite(reference)])
        scale = max(1.0, float(finite.max(initial=0.0)))
        np.testing.assert_allclose(array, reference, rtol=case.tolerance, atol=case.tolerance * scale, err_msg=where)


def poison(executable: Executable) -> None:
    """Fills the arena (except halos) and fresh outputs with NaN, so that reads and results of unwritten memory are detected."""
    assert executable._engine is not None
    buffers = executable._engine.buffers
    padded = {name for name in buffers.plan.offsets if buffers.program.storage[name].layout.is_padded}
    for name, offset in buffers.plan.offsets.items():
        start = buffers._base + offset
        if name not in padded:
            buffers.arena[start : start + buffers.plan.sizes[name]].fill_(255)
    for name in padded:
        layout = buffers.program.storage[name].layout
        if layout.dense_strides() is not None:  # for split layouts, such as panels of weights, unpack returns a copy
            view = unpack(buffers.flat(name, (), ()), layout)
            view.fill_(float("nan") if view.is_floating_point() else 1)
    allocate = type(executable)._allocate

    def poisoned() -> list[torch.Tensor]:
        outputs = allocate(executable)
        for tensor in outputs:
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).fill_(255)
        return outputs

    executable._allocate = poisoned  # type: ignore[method-assign]


@contextmanager
def without_chains() -> Iterator[None]:
    """Compilation and tuning plan every region on its own, so that what tests expect of single regions does not depend on predictions."""

    def separate(*given: Any, **named: Any) -> Program:
        return plan_program(*given, **{**named, "chains": False})

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tilewright.compile", "tilewright.tuning.tuning"):
            patch.setattr(import_module(name), "plan_program", separate)
        yield


@contextmanager
def with_layers_by_libraries() -> Iterator[None]:
    """Compilation takes every layer that a library computes, as if the whole network had been measured to be faster so."""

    def taking(graph: Graph, *given: Any, **named: Any) -> Program:
        keys = frozenset((LIBRARY, (layer.result, *layer.finals)) for layer in layers_of(graph, graph.constants))
        return plan_program(graph, *given, **{**named, "policy": Policy(taken=keys)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("tilewright.compile"), "plan_program", taking)
        yield


TRANSFORMED = re.compile(r"(winograd|winograd fused|fourier) F\((\d+x)?(?P<output_tile>\d+),(?P<filter>(\d+x)?\d+)\)")
"""Begins the text of a schedule by a transform of blocks."""


def by_transforms(executable: Executable) -> dict[int, int]:
    """The numbers of a bundle's cases that the plan computes partly by transforms of blocks; and how far, in pixels, the furthest output of a tile is
    from an element that it reads."""
    found: dict[int, int] = {}
    for row in executable.plan.rows:
        if transform := TRANSFORMED.match(row.schedule):
            reach = int(transform["output_tile"]) - 1 + max(map(int, transform["filter"].split("x"))) // 2
            for match in (re.match(r"parts\.(\d+)", place) for _, _, place in row.nodes):
                if match:
                    found[int(match[1])] = max(reach, found.get(int(match[1]), 0))
    return found


def check_native(cases: Sequence[Case], target: str = "native", calls: int = 1) -> None:
    """Compiles the cases in one program, calls it on fresh inputs (on the target's device), and compares each."""
    for case in cases:
        case.module.eval()
    bundle = Bundle(cases).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=r"(?s).*through PyTorch")  # such a result would not be ours
        executable = tilewright.compile(bundle, [x for case in cases for x in case.inputs], target=target, threads=2)
    try:
        poison(executable)
        for _ in range(calls):
            inputs = [case.fresh_inputs() for case in cases]
            results = executable(*[x.to(executable._device) for part in inputs for x in part])
            failures = []
            transformed = by_transforms(executable)
            for number, (case, part, result) in enumerate(zip(cases, inputs, results, strict=True)):
                try:
                    compare(case, result, part, transformed.get(number, 0))
                except AssertionError as error:
                    failures.append(str(error))
            assert not failures, "\n\n".join(failures)
    finally:
        executable.close()
