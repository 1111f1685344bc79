"""What is measured: a region with the layouts and types of its values, free of a model's names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import tilewright
from tilewright.codegen.describe import problem as described
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import StepBuilder, Tensor
from tilewright.ir.expr import variables
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, channels_last, row_major
from tilewright.ir.region import Lowered, Region
from tilewright.partition.canonical import canonical
from tilewright.runtime import plain


@dataclass(frozen=True, eq=False)
class Problem:
    """A canonical region; `layouts` and `values` are of what it reads and writes, `constants` names what may be packed when compiling."""

    region: Region
    layouts: Mapping[str, Layout]
    values: Mapping[str, Value]
    constants: frozenset[str]

    @cached_property
    def key(self) -> str:
        """A digest of everything that decides which kernels a schedule gives and what they compute."""
        stored = sorted(self.layouts)
        facts = (
            self.region.kind,
            self.region.steps,
            sorted(self.region.inputs),
            self.region.outputs,
            [(name, self.layouts[name], self.values[name].dtype, self.values[name].shape, name in self.constants) for name in stored],
        )
        return plain.digest(facts)

    @cached_property
    def text(self) -> str:
        """The problem and its values in a line, for people."""
        stored = (f"{name} {'x'.join(map(str, self.values[name].shape)) or 'scalar'} {self.layouts[name]}" for name in sorted(self.layouts))
        return f"{described(self.region, self.constants)}; {'; '.join(stored)}"

    @property
    def is_whole(self) -> bool:
        """Whether nothing outside decides what the region computes, as a loop's step number does."""
        for step in self.region.steps:
            own = {*step.axes, *step.reduction}
            if not variables(*step.bodies, *step.index) <= own:
                return False
        return True


def problem_of(region: Region, layouts: Mapping[str, Layout], values: Mapping[str, Value], constants: frozenset[str]) -> Problem:
    """The problem of any region: under canonical names, without what it does not touch."""
    names = canonical(region).names
    stored = {name: short for name, short in names.items() if name in layouts}
    return Problem(
        canonical(region).region,
        {short: layouts[name] for name, short in stored.items()},
        {short: Value(short, values[name].shape, values[name].dtype) for name, short in stored.items()},
        frozenset(short for name, short in stored.items() if name in constants),
    )


def convolution_problem(
    outputs: int,
    channels: int,
    height: int,
    width: int,
    filter_size: int,
    stride: int = 1,
    *,
    batch: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> Problem:
    """A convolution of [batch, channels, height * stride, width * stride] to [batch, outputs, height, width], channels last, its padding
    (dilation * (filter_size // 2) on each side) stored as a zeroed halo, its filters constant. A depthwise one is of kind window."""
    padding = dilation * (filter_size // 2)
    each, inside = outputs // groups, channels // groups
    if each * groups != outputs or inside * groups != channels:
        raise ValueError(f"{channels} and {outputs} channels in {groups} groups")
    x = Tensor("x", (batch, channels, height * stride, width * stride), "f32")
    w = Tensor("w", (outputs, inside, filter_size, filter_size), "f32")
    builder = StepBuilder("conv")
    shape = (batch, outputs, height, width)
    if groups == 1:
        (result,) = builder.reduce(
            "sum",
            shape,
            (filter_size, filter_size, channels),
            lambda n, k, y, x_, fy, fx, c: (
                x(n, c, y * stride + fy * dilation - padding, x_ * stride + fx * dilation - padding) * w(k, c, fy, fx)
            ),
        )
    else:
        (result,) = builder.reduce(
            "sum",
            shape,
            (filter_size, filter_size, inside),
            lambda n, g, k, y, x_, fy, fx, c: (
                x(n, c + g * inside, y * stride + fy * dilation - padding, x_ * stride + fx * dilation - padding) * w(k + g * each, c, fy, fx)
            ),
            axes=(batch, groups, each, height, width),
            index=lambda n, g, k, y, x_, *_: (n, k + g * each, y, x_),
        )
    steps = builder.finish([result], ["out"]).steps
    values = {tensor.name: Value(tensor.name, tensor.shape, "f32") for tensor in (x, w)} | {"out": Value("out", shape, "f32")}
    halo = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    layouts = {"x": channels_last(x.shape).with_halo(halo), "w": row_major(w.shape), "out": channels_last(shape)}
    kind = "window" if groups == channels == outputs > 1 else "contraction"
    return problem_of(Region("out", kind, (), steps, ("x", "w"), ("out",)), layouts, values, frozenset({"w"}))


@lru_cache(maxsize=1)
def _sources() -> str:
    """A digest of everything that lowers and prints."""
    return digest_of_files(*(f"{folder}/**/*.py" for folder in ("ir", "graph", "schedule", "codegen")))


def digest_of_files(*patterns: str) -> str:
    """Of the contents of the package's files that match one of the patterns."""
    root = Path(tilewright.__file__).parent
    files = sorted({path for pattern in patterns for path in root.glob(pattern)})
    found = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(root)} {len(content)} ".encode() + content)
    return found.hexdigest()


def generator(machine: Machine) -> str:
    """Twenty hexadecimal digits that change with anything that generated code for the machine may depend on, besides problem and schedule."""
    return hashlib.sha256(f"{_sources()} {machine.digest}".encode()).hexdigest()[:20]


def code_of(lowered: Lowered) -> str:
    """What a record names the code by: the kernels' names, which are digests of their code, in the order of the calls."""
    return "+".join(dict.fromkeys(call.kernel for call in lowered.calls))
