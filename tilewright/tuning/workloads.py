"""Workloads: operators of given sizes as they occur in networks, described by text and rebuilt as problems. Models are trained and judged with them.

    convolution batch=8 channels=64 outputs=128 size=28x28 filter=3x3 stride=1 dilation=1 groups=1 transposed=0 then=residual precision=fp16

A workload's graph holds the operator, what follows it, and small neighbours (pointwise convolutions from and to 8 channels), so that the operator's
operands and result have the layouts of a network. Passes and partition are those of a compilation; constants are stored as one element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import get_type_hints

import torch

from tilewright.frontend.aten_reduction import attention
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.computation import Step
from tilewright.ir.dtypes import DEFAULT_FLOAT, FLOAT32
from tilewright.ir.expr import loads
from tilewright.ir.graph import Graph, Value
from tilewright.ir.problem import Problem
from tilewright.ir.region import Region
from tilewright.kernels.schema import USUAL, JoinDecision, Numerics
from tilewright.partition.canonical import canonical
from tilewright.partition.joining import RowJudge
from tilewright.partition.layouts import LaidOut, in_graph
from tilewright.partition.narrow_results import with_narrow_functions
from tilewright.partition.precision import NARROW, PRECISIONS
from tilewright.partition.prologues import find_prologues
from tilewright.partition.regions import lay_out

FOLLOWS = ("nothing", "bias", "relu", "silu", "gelu", "residual")
"""What follows a convolution or a linear layer in its region: nothing, a bias, a bias and that function, or a bias, an addition and ReLU."""
COMPUTED = ("nothing", "norm", "silu", "gelu", "gate", "sum")
"""What a convolution or a linear layer computes of its first factor where it reads it: nothing; by channel a scale, a shift and ReLU, as of batch
normalisation; that function; a product with a gate for each channel, as of squeeze and excitation, or (a linear layer) of a half of each row with
SiLU of the other; a sum of two tensors."""
FP32 = "fp32"
FLAGS = ("transposed", "swapped", "mean", "softmax", "causal")
"""Names of sizes that are 0 or 1."""
WORDS: Mapping[str, Sequence[str]] = MappingProxyType({"then": FOLLOWS, "computed": COMPUTED, "precision": PRECISIONS})
"""What the fields may say that are no sizes."""
NEIGHBOUR = 8
"""Channels of the values from which and to which neighbours lead."""
IMAGE_CHANNELS = 4
"""A convolution with at most this number of channels reads the network's input."""
LARGEST, MOST_DIMENSIONS = 1 << 20, 3
"""Maximum number in a description, and maximum spatial dimensions."""
MOST_ELEMENTS = 1 << 29
"""Maximum elements of an operand or result: passes may compute with constants."""
SUBJECT = "subject"
"""Place of the operator's nodes in the graph."""


@dataclass(frozen=True)
class _InPrecision:
    """`precision`: that of a compilation. In those of 16 bits everything is stored in such a type; tf32 only allows schedules to round factors,
    and fp32-tensor and fp32-tensor-fp16 to split them."""

    precision: str = field(default=FP32, kw_only=True)


@dataclass(frozen=True)
class _Computing(_InPrecision):
    """`computed`: what of `COMPUTED` the operator computes of its first factor, whose values something else reads too, so that they are stored."""

    computed: str = field(default="nothing", kw_only=True)


@dataclass(frozen=True)
class Convolution(_Computing):
    """`size`: extents of the result (transposed: of the input); those of the other side are `stride` times as large. Filters with even extents have
    no padding, as in convolutions of patches. `groups` equal to channels and outputs: depthwise."""

    batch: int
    channels: int
    outputs: int
    size: tuple[int, ...]
    filter: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: int = 0
    then: str = "nothing"

    def __post_init__(self) -> None:
        if len(self.filter) != len(self.size) or self.channels % self.groups or self.outputs % self.groups:
            raise ValueError("the filter has as many dimensions as the result, and groups divide channels and outputs")
        if self.computed != "nothing" and (max(self.stride, self.groups) > 1 or self.transposed or not all(f % 2 for f in self.filter)):
            raise ValueError("a convolution that computes its first factor has stride 1, one group and odd filters, and is not transposed")

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.outputs * (self.channels // self.groups) * prod(self.size) * prod(self.filter)

    @property
    def elements(self) -> int:
        """Elements of the largest operand or result."""
        pixels, grown = (self.batch * prod(scale * extent for extent in self.size) for scale in (1, self.stride))
        inside, outside = (pixels, grown) if self.transposed else (grown, pixels)
        return max(self.channels * inside, self.outputs * outside, self.outputs * self.channels // self.groups * prod(self.filter))

    def build(self, g: GraphBuilder) -> Value:
        rank = len(self.size)
        others: tuple[Value, ...] = ()
        same = {"stride": (self.stride,) * rank, "dilation": (self.dilation,) * rank, "groups": self.groups}
        if self.transposed:
            x = _before(g, self.batch, self.channels, self.size)
            padding = tuple((f - 1) // 2 for f in self.filter)
            more = tuple((self.stride - 1) * (f % 2) for f in self.filter)
            with g.at("operator", SUBJECT):
                w = _constant(g, (self.channels, self.outputs // self.groups, *self.filter))
                y = g.op("transposed_convolution", x, w, padding=padding, output_padding=more, **same)
        else:
            reach = (self.stride if f % 2 else self.dilation * (f - 1) + 1 for f in self.filter)
            x = _before(g, self.batch, self.channels, [(s - 1) * self.stride + r for s, r in zip(self.size, reach, strict=True)])
            pairs = tuple((self.dilation * (f // 2),) * 2 if f % 2 else (0, 0) for f in self.filter)
            if self.computed == "gate":
                gate = _neighbour(g, g.op("mean", x, axes=tuple(range(2, 2 + rank)), keepdim=True), self.channels)
                x = g.pointwise("mul", x, g.pointwise("sigmoid", gate))
            else:
                x, others = _computed(g, x, self.computed, partial(_before, g, self.batch, self.channels, x.shape[2:]))
            with g.at("operator", SUBJECT):
                w = _constant(g, (self.outputs, self.channels // self.groups, *self.filter))
                y = g.op("convolution", x, w, padding=pairs, **same)
        branch = _before(g, self.batch, self.outputs, y.shape[2:]) if self.then == "residual" else None
        return _read_beside(g, _neighbour(g, _followed(g, y, self.then, 1, branch)), others, self.computed)


@dataclass(frozen=True)
class Linear(_Computing):
    """[rows, channels] times constant [outputs, channels], transposed."""

    rows: int
    channels: int
    outputs: int
    then: str = "nothing"

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.channels * self.outputs

    @property
    def elements(self) -> int:
        return max(self.rows * self._stored, self.channels * self.outputs, self.rows * self.outputs)

    @property
    def _stored(self) -> int:
        """Elements of a row of which the first factor is computed."""
        return 2 * self.channels if self.computed == "gate" else self.channels

    def build(self, g: GraphBuilder) -> Value:
        x, others = self._first(g), tuple[Value, ...]()
        if self.computed == "gate":
            first, second = (g.slice(x, 1, start, start + self.channels) for start in (0, self.channels))
            x = g.pointwise("mul", g.pointwise("silu", first), second)
        else:
            x, others = _computed(g, x, self.computed, partial(self._first, g))
        with g.at("operator", SUBJECT):
            y = g.op("linear", x, _constant(g, (self.outputs, self.channels)))
        branch = None
        if self.then == "residual":
            branch = g.op("linear", g.input("z", (self.rows, NEIGHBOUR), DEFAULT_FLOAT), _constant(g, (self.outputs, NEIGHBOUR)))
        return _read_beside(g, _neighbour(g, _followed(g, y, self.then, 1, branch)), others, self.computed)

    def _first(self, g: GraphBuilder) -> Value:
        return _neighbour(g, g.input("x", (self.rows, NEIGHBOUR), DEFAULT_FLOAT), self._stored)


@dataclass(frozen=True)
class Product(_InPrecision):
    """[batch, rows, channels] times [batch, channels, outputs], both computed; `swapped`: the second is stored as [batch, outputs, channels]."""

    batch: int
    rows: int
    channels: int
    outputs: int
    swapped: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.channels * self.outputs

    @property
    def elements(self) -> int:
        return self.batch * max(self.rows * self.channels, self.channels * self.outputs, self.rows * self.outputs)

    def build(self, g: GraphBuilder) -> Value:
        a = g.input("a", (self.batch, self.rows, self.channels), DEFAULT_FLOAT)
        shape = (self.outputs, self.channels) if self.swapped else (self.channels, self.outputs)
        b = g.input("b", (self.batch, *shape), DEFAULT_FLOAT)
        with g.at("operator", SUBJECT):
            return g.op("matmul", a, g.transpose(b, 1, 2) if self.swapped else b)


@dataclass(frozen=True)
class Pool(_InPrecision):
    """A maximum or mean over windows; `size`: extents of the result."""

    batch: int
    channels: int
    size: tuple[int, ...]
    window: int
    stride: int
    mean: int = 0

    @property
    def flops(self) -> float:
        return float(self.batch * self.channels * prod(self.size) * self.window ** len(self.size))

    @property
    def elements(self) -> int:
        return self.batch * self.channels * prod(self.stride * extent for extent in self.size)

    def build(self, g: GraphBuilder) -> Value:
        rank, padding = len(self.size), (self.window - 1) // 2
        x = _before(g, self.batch, self.channels, [(s - 1) * self.stride + self.window - 2 * padding for s in self.size])
        same = {"window": (self.window,) * rank, "stride": (self.stride,) * rank, "padding": ((padding, padding),) * rank, "ceil_mode": False}
        with g.at("operator", SUBJECT):
            if self.mean:
                y = g.op("average_pool", x, count_include_pad=True, divisor=None, **same)
            else:
                y = g.op("max_pool", x, dilation=(1,) * rank, indices=False, **same)
        return _neighbour(g, y)


@dataclass(frozen=True)
class GlobalMean(_InPrecision):
    """The mean of each channel over all positions."""

    batch: int
    channels: int
    size: tuple[int, ...]

    @property
    def flops(self) -> float:
        return float(self.elements)

    @property
    def elements(self) -> int:
        return self.batch * self.channels * prod(self.size)

    def build(self, g: GraphBuilder) -> Value:
        x = _before(g, self.batch, self.channels, self.size)
        with g.at("operator", SUBJECT):
            y = g.op("mean", x, axes=tuple(range(2, 2 + len(self.size))), keepdim=True)
        return _neighbour(g, y)


@dataclass(frozen=True)
class Rows(_InPrecision):
    """A softmax or layer normalisation of each row of [rows, columns]."""

    rows: int
    columns: int
    softmax: int = 0

    @property
    def flops(self) -> float:
        return float(self.rows * self.columns)

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def build(self, g: GraphBuilder) -> Value:
        x = g.input("x", (self.rows, self.columns), DEFAULT_FLOAT)
        with g.at("operator", SUBJECT):
            return g.op("softmax", x, axis=1) if self.softmax else g.op("layer_norm", x, rank=1, epsilon=1e-5)


@dataclass(frozen=True)
class Elementwise(_InPrecision):
    """ReLU of the sum of two tensors; `swapped`: the second is stored with channels first, and the result with channels last."""

    batch: int
    channels: int
    size: tuple[int, ...]
    swapped: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.elements

    @property
    def elements(self) -> int:
        return self.batch * self.channels * prod(self.size)

    def build(self, g: GraphBuilder) -> Value:
        last, first = (self.batch, *self.size, self.channels), (self.batch, self.channels, *self.size)
        x = g.input("x", last, DEFAULT_FLOAT)
        y = g.input("y", first if self.swapped else last, DEFAULT_FLOAT)
        if self.swapped:
            y = g.permute(y, (0, *range(2, len(first)), 1))
        with g.at("operator", SUBJECT):
            return g.pointwise("relu", g.pointwise("add", x, y))


@dataclass(frozen=True)
class Attention(_InPrecision):
    """softmax(Q K^T / sqrt(size)) V for `heads` heads of `queries` and `keys`, `sharing` of which share their keys and values; `causal`: a query sees
    the keys up to its own place. Stored as [batch, place, head, size], as a projection leaves them, and so is the result."""

    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    sharing: int = 1
    causal: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.sharing:
            raise ValueError("the heads that share keys divide all")

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.size / (2 if self.causal else 1)

    @property
    def elements(self) -> int:
        """Scores count, although kernels store none: what results are compared with does."""
        return self.batch * self.heads * max(self.queries * self.keys, self.queries * self.size, self.keys * self.size)

    def build(self, g: GraphBuilder) -> Value:
        own = self.heads // self.sharing
        q, k, v = (
            g.permute(g.input(name, (self.batch, places, heads, self.size), DEFAULT_FLOAT), (0, 2, 1, 3))
            for name, places, heads in (("q", self.queries, self.heads), ("k", self.keys, own), ("v", self.keys, own))
        )
        with g.at("operator", SUBJECT):
            result = attention(g, q, k, v, None, 0.0, bool(self.causal), grouped=self.sharing > 1)
        return g.permute(result, (0, 2, 1, 3))


Workload = Convolution | Linear | Product | Pool | GlobalMean | Rows | Elementwise | Attention
KINDS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {kind.__name__.lower(): kind for kind in (Convolution, Linear, Product, Pool, GlobalMean, Rows, Elementwise, Attention)}
)


def text_of(workload: Workload) -> str:
    """The workload's description: its kind, name=value for each of its sizes, its precision unless that is fp32, and what it computes of its first
    factor, if anything."""
    values = [(entry.name, getattr(workload, entry.name)) for entry in sorted(fields(workload), key=lambda entry: bool(entry.kw_only))]
    usual = {entry.name: entry.default for entry in fields(workload) if entry.kw_only}
    values = [(name, value) for name, value in values if name not in usual or value != usual[name]]
    return f"{type(workload).__name__.lower()} " + " ".join(f"{name}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in values)


def workload_of(text: str) -> Workload:
    """Inverse of `text_of`; sizes with a default may be missing.

    Raises:
        ValueError: for text that describes no workload.
    """
    kind, *parts = text.split(" ")
    if kind not in KINDS:
        raise ValueError(f"there is no workload {kind[:40]!r}: one of {', '.join(KINDS)}")
    types = get_type_hints(KINDS[kind])
    given: dict[str, int | str | tuple[int, ...]] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in types or name in given:
            raise ValueError(f"{kind} has no size {part[:40]!r}")
        if types[name] is str:
            known = WORDS[name]
            if value not in known:
                raise ValueError(f"{name} is {value[:40]!r}: one of {', '.join(known)}")
            given[name] = value
            continue
        if not re.fullmatch(r"[0-9]{1,7}(x[0-9]{1,7}){0,2}", value):
            raise ValueError(f"{name} is {value[:40]!r}")
        numbers = tuple(map(int, value.split("x")))
        least, most = (0, 1) if name in FLAGS else (1, LARGEST)
        if not all(least <= number <= most for number in numbers) or (types[name] is int and len(numbers) > 1):
            raise ValueError(f"{name} is {value}")
        given[name] = numbers[0] if types[name] is int else numbers
    missing = [entry.name for entry in fields(KINDS[kind]) if entry.name not in given and entry.default is MISSING]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{kind} lacks {', '.join(missing)}")
    workload = KINDS[kind](**given)
    if workload.elements > MOST_ELEMENTS:
        raise ValueError(f"a tensor has {workload.elements} elements")
    return workload


class _InOne(RowJudge):
    """Attention is one region, whatever it takes."""

    def in_one(self, steps: tuple[Step, ...], parts: Sequence[tuple[str, tuple[Step, ...]]], values: Mapping[str, Value]) -> JoinDecision:
        return JoinDecision(True, "as the workload says")


def graph_of(workload: Workload) -> Graph:
    """The operator and its neighbours, simplified as in a compilation."""
    builder = GraphBuilder()
    simple, _ = simplify(builder.finish([workload.build(builder)]))
    return simple


def problem_of(workload: Workload) -> Problem:
    """The operator's region as a GPU would compute it, with what joins it. If several regions compute it (a transposed convolution is one convolution
    for each phase), the one with the most operations.

    Raises:
        ValueError: if sizes do not fit, or the operator cannot compute its first factor.
    """
    graph = graph_of(workload)
    laid_out = lay_out(graph, _InOne(machine("h200"), 1, frozenset()) if isinstance(workload, Attention) else None)
    computed = isinstance(workload, _Computing) and workload.computed != "nothing"
    if computed:
        maps = find_prologues(laid_out.regions, graph.outputs).get(in_graph(_subject(laid_out).outputs[0]), ())
        if not maps:
            raise ValueError(f"a kernel of its own computes the first factor of {text_of(workload)}")
        laid_out = lay_out(graph, unstored=frozenset(region.outputs[0] for region in maps))
    if workload.precision in NARROW:
        stored = NARROW[workload.precision]
        # layers that were measured before there were computed factors have all constants in 16 bits, and the exact functions
        wide = graph.constants.keys() - {load.buffer for load in loads(*_subject(laid_out).steps[0].bodies)} if computed else frozenset()
        narrow = {name: replace(value, dtype=stored) for name, value in laid_out.values.items() if value.dtype == FLOAT32 and name not in wide}
        laid_out = replace(laid_out, values={**laid_out.values, **narrow})
        laid_out = with_narrow_functions(laid_out) if computed else laid_out
    return canonical(Problem(_subject(laid_out), laid_out.layouts, laid_out.values, frozenset(graph.constants))).problem


def _subject(laid_out: LaidOut) -> Region:
    own = [region for region in laid_out.regions if any(node.place == SUBJECT for node in region.nodes)]
    return max(own, key=lambda one: (one.kind == "contraction", one.flops()))


def numerics_of(workload: Workload) -> Numerics:
    """The kinds of rounding that the workload's precision allows."""
    return USUAL.at(workload.precision)


def _constant(g: GraphBuilder, shape: Sequence[int]) -> Value:
    """A constant stored as one element. Each has another value, so that equal shapes stay separate constants."""
    return g.constant(torch.full((), 1.0 + len(g.constants)).expand(tuple(shape)))


def _before(g: GraphBuilder, batch: int, channels: int, size: Sequence[int]) -> Value:
    """A value of the network: its input, or what a convolution and ReLU compute of another input."""
    if channels <= IMAGE_CHANNELS:
        return g.input("x", (batch, channels, *size), DEFAULT_FLOAT)
    return g.pointwise("relu", _neighbour(g, g.input("x", (batch, NEIGHBOUR, *size), DEFAULT_FLOAT), channels))


def _neighbour(g: GraphBuilder, x: Value, outputs: int = NEIGHBOUR) -> Value:
    """A linear layer of a matrix, or a pointwise convolution."""
    rank = len(x.shape) - 2
    if not rank:
        return g.op("linear", x, _constant(g, (outputs, x.shape[1])))
    w = _constant(g, (outputs, x.shape[1], *(1,) * rank))
    return g.op("convolution", x, w, stride=(1,) * rank, padding=((0, 0),) * rank, dilation=(1,) * rank, groups=1)


def _by_channel(g: GraphBuilder, x: Value, axis: int) -> Value:
    """A constant for each channel, of which `axis` is the dimension."""
    return _constant(g, (x.shape[axis], *(1,) * (len(x.shape) - 1 - axis)))


def _computed(g: GraphBuilder, x: Value, computed: str, another: Callable[[], Value]) -> tuple[Value, tuple[Value, ...]]:
    """What is computed of a value, or of it and `another`, and the values that this reads: each needs another reader, or the region that stores it
    would compute the map too."""
    if computed == "nothing":
        return x, ()
    if computed == "norm":
        return g.pointwise("relu", g.pointwise("add", g.pointwise("mul", x, _by_channel(g, x, 1)), _by_channel(g, x, 1))), (x,)
    if computed == "sum":
        z = another()
        return g.pointwise("add", x, z), (x, z)
    return g.pointwise(computed, x), (x,)


def _read_beside(g: GraphBuilder, y: Value, others: Sequence[Value], computed: str) -> Value:
    """A result, and the other reader of what was computed: as in a dense block the concatenation of both (`norm`), so that it is a slice of a larger
    buffer, or a neighbour that is added."""
    if computed == "norm":
        return _neighbour(g, g.concatenate([*others, y], 1))
    for x in others:
        y = g.pointwise("add", y, _neighbour(g, x))
    return y


def _followed(g: GraphBuilder, y: Value, then: str, axis: int, branch: Value | None) -> Value:
    """What follows a result whose channels are at `axis`."""
    if then == "nothing":
        return y
    y = g.pointwise("add", y, _by_channel(g, y, axis))
    if branch is not None:
        y = g.pointwise("add", y, branch)
    return y if then == "bias" else g.pointwise("relu" if then == "residual" else then, y)
