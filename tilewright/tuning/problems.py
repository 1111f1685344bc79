"""Measured problems: their identity, which does not depend on names in a model, and the problems of convolutions."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import tilewright
from tilewright.codegen.describe import described
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.dtypes import DEFAULT_FLOAT
from tilewright.ir.graph import Value
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Region
from tilewright.partition.canonical import canonical
from tilewright.runtime.loadable import LoadableRegion
from tilewright.tuning import serialisation


def key_of(problem: Problem) -> str:
    """A digest of everything that determines the kernels of a canonical problem under a schedule, and what they compute."""
    known = problem.found.get(key_of)
    if known is None:
        known = problem.found[key_of] = _digest_of(problem)
    return str(known)


def _digest_of(problem: Problem) -> str:
    facts = (
        problem.region.kind,
        problem.region.steps,
        sorted(problem.region.inputs),
        problem.region.outputs,
        [
            (name, problem.layouts[name], problem.values[name].dtype, problem.values[name].shape, name in problem.constants)
            for name in sorted(problem.layouts)
        ],
    )
    stages = [(stage.kind, stage.outputs) for stage in problem.region.stages]
    return serialisation.digest((*facts, *([stages] if stages else []), *([problem.region.wholes] if problem.region.wholes else [])))


def text_of(problem: Problem) -> str:
    """The problem and its values as one readable line."""
    values, layouts = problem.values, problem.layouts
    stored = (f"{name} {'x'.join(map(str, values[name].shape)) or 'scalar'} {layouts[name]}" for name in sorted(layouts))
    return f"{described(problem)}; {'; '.join(stored)}"


def convolution_problem(
    outputs: int,
    channels: int,
    height: int,
    width: int,
    filter_size: int | tuple[int, int],
    stride: int = 1,
    *,
    batch: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> Problem:
    """A convolution of [batch, channels, height * stride, width * stride] to [batch, outputs, height, width], channels last. Its padding (dilation *
    (taps // 2) on each side) is stored as a zeroed halo, and its filters are constant. A depthwise convolution has kind window."""
    taps = (filter_size, filter_size) if isinstance(filter_size, int) else filter_size
    down, across = (dilation * (size // 2) for size in taps)
    each, inside = outputs // groups, channels // groups
    if each * groups != outputs or inside * groups != channels:
        raise ValueError(f"{channels} and {outputs} channels in {groups} groups")
    x = Tensor("x", (batch, channels, height * stride, width * stride), DEFAULT_FLOAT)
    w = Tensor("w", (outputs, inside, *taps), DEFAULT_FLOAT)
    builder = StepBuilder("conv")
    shape = (batch, outputs, height, width)
    if groups == 1:
        (result,) = builder.reduce(
            "sum",
            shape,
            (*taps, channels),
            lambda n, k, y, x_, fy, fx, c: x(n, c, y * stride + fy * dilation - down, x_ * stride + fx * dilation - across) * w(k, c, fy, fx),
        )
    else:
        (result,) = builder.reduce(
            "sum",
            shape,
            (*taps, inside),
            lambda n, g, k, y, x_, fy, fx, c: (
                x(n, c + g * inside, y * stride + fy * dilation - down, x_ * stride + fx * dilation - across) * w(k + g * each, c, fy, fx)
            ),
            axes=(batch, groups, each, height, width),
            index=lambda n, g, k, y, x_, *_: (n, k + g * each, y, x_),
        )
    steps = builder.finish([result], ["out"]).steps
    values = {tensor.name: Value(tensor.name, tensor.shape, DEFAULT_FLOAT) for tensor in (x, w)} | {"out": Value("out", shape, DEFAULT_FLOAT)}
    halo = ((0, 0), (0, 0), (down, down), (across, across))
    layouts = {"x": channels_last(x.shape).with_halo(halo), "w": row_major(w.shape), "out": channels_last(shape)}
    kind = "window" if groups == channels == outputs > 1 else "contraction"
    region = Region("out", kind, (), steps, ("x", "w"), ("out",))
    return canonical(Problem(region, layouts, values, frozenset({"w"}))).problem


@lru_cache(maxsize=2)
def _sources(chain: bool) -> str:
    """A digest of all sources that lower and print kernels; those of a chain also choose the schedules of its regions."""
    folders = ("ir", "graph", "codegen", "kernels", *(("partition", "selection") if chain else ()))
    return digest_of_files(*(f"{folder}/**/*.py" for folder in folders), *(("hardware/calibration/*.json",) if chain else ()))


def digest_of_files(*patterns: str) -> str:
    """A digest of the contents of the package's files that match any of the patterns."""
    root = Path(tilewright.__file__).parent
    files = sorted({path for pattern in patterns for path in root.glob(pattern)})
    found = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(content)} ".encode() + content)
    return found.hexdigest()


def generator(machine: Machine, chain: bool = False) -> str:
    """Twenty hexadecimal digits that change with everything that generated code of a region, or of a chain, for the machine may depend on besides
    problem and schedule."""
    return hashlib.sha256(f"{_sources(chain)} {machine.digest}".encode()).hexdigest()[:20]


def code_of(lowered: Lowered | LoadableRegion) -> str:
    """The name of the code in records: the kernels' names, which are digests of their code, in the order of the calls; a library's operator first, as
    PyTorch's of this version."""
    library = []
    if lowered.library is not None:
        import torch  # here alone: processes that compile candidates start in a quarter of the time without it

        library = [f"torch_{torch.__version__}_{lowered.library.operator.name}"]
    return "+".join((*library, *dict.fromkeys(call.kernel for call in lowered.calls)))
