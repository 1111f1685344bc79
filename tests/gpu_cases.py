"""Hand-written regions with random inputs and PyTorch's results in float64, for tests of GPU lowerings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.hardware import machine
from tilewright.ir.computation import StepBuilder, Tensor, maximum
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.expr import Expr, logical_and, select, unary
from tilewright.ir.graph import Graph, Value
from tilewright.ir.layout import Layout, channels_last, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Program, Region, Storage
from tilewright.runtime.packing import prepared
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler

BFLOAT16_NAN = 0x7FC0


@dataclass(frozen=True)
class Case:
    """A region, the storage of its values, its inputs, and the expected output (float64, or integers)."""

    region: Region
    layouts: Mapping[str, Layout]
    values: Mapping[str, Value]
    inputs: Mapping[str, np.ndarray]
    expected: np.ndarray
    constants: frozenset[str] = field(default_factory=frozenset)

    @property
    def problem(self) -> Problem:
        return Problem(self.region, self.layouts, self.values, self.constants)


def offsets(layout: Layout) -> np.ndarray:
    """Flat offset of every logical element."""
    total = np.zeros(layout.shape, dtype=np.int64)
    remaining = {d: int(np.prod([f for e, f in layout.order if e == d and f] or [1])) for d in range(len(layout.shape))}
    for (dim, factor), stride in zip(layout.order, layout.strides, strict=True):
        position = np.arange(layout.shape[dim]) + layout.halo[dim][0] + (layout.around[dim][0] if layout.around else 0)
        if factor == 0:
            part = position // remaining[dim]
        else:
            part = position // (remaining[dim] // factor) % factor
            remaining[dim] //= factor
        shape = [1] * len(layout.shape)
        shape[dim] = -1
        total = total + (part * stride).reshape(shape)
    return total


def stored(array: np.ndarray, layout: Layout) -> np.ndarray:
    """The array in its storage, with zeros elsewhere."""
    flat = np.zeros(layout.size, dtype=array.dtype)
    flat[offsets(layout).ravel()] = array.ravel()
    return flat


def poison(item: Storage) -> np.ndarray:
    """A buffer as a kernel may find it: NaN everywhere (zeros for types without NaN)."""
    kind = np.dtype(ELEMENT_TYPES[item.value.dtype].array)
    return np.full(item.layout.size, np.nan if kind.kind == "f" else BFLOAT16_NAN if item.value.dtype == "bf16" else 0, dtype=kind)


def execute(case: Case, lowered: Lowered, scalars: tuple[int, ...] = ()) -> np.ndarray:
    """Runs the kernels in the interpreter, and fails on anything that it reports."""
    memory = {name: stored(array, case.layouts[name]) for name, array in case.inputs.items()}
    output = case.region.outputs[0]
    everything: dict[str, Storage] = dict(lowered.storage)
    everything[output] = Storage(case.values[output], case.layouts[output])
    for name, item in everything.items():
        if item.source is not None:
            memory[name] = stored(prepared(torch.from_numpy(case.inputs[item.source]), item).numpy().copy(), item.layout)
        else:
            memory[name] = poison(item)
    kernels = {kernel.name: kernel for kernel in lowered.kernels}
    written = {name for call in lowered.calls for name in call.arguments if name not in case.inputs}
    ready = set(memory) - written | {n for n, item in lowered.storage.items() if item.source is not None}
    for call in lowered.calls:
        kernel = kernels[call.kernel]
        report = run(
            kernel,
            [memory[name] for name in call.arguments],
            scalars[: len(kernel.scalars)],
            initialised=[p.name for p, n in zip(kernel.parameters, call.arguments, strict=True) if n in ready and p.writable],
        )
        assert report.is_clean, report.faults
        ready |= set(call.arguments)
    return memory[output][offsets(case.layouts[output]).ravel()].reshape(case.values[output].shape)


def check(case: Case, lowered: Lowered) -> None:
    """Runs the case and compares, to the accuracy of float32 sums in another order."""
    found = execute(case, lowered)
    if np.issubdtype(found.dtype, np.floating):
        scale = max(1.0, float(np.abs(case.expected).max(initial=0.0)))
        np.testing.assert_allclose(found, case.expected, rtol=2e-5, atol=2e-5 * scale)
    else:
        np.testing.assert_array_equal(found, case.expected)


def make_case(
    kind: str,
    builder: StepBuilder,
    result: Tensor,
    inputs: Mapping[str, np.ndarray],
    expected: np.ndarray,
    layouts: Mapping[str, Layout] | None = None,
    constants: frozenset[str] = frozenset(),
) -> Case:
    """The builder's steps as a region that stores `out`; layouts are row-major unless given."""
    computation = builder.finish([result], ["out"])
    values = {name: Value(name, array.shape, _dtype(array)) for name, array in inputs.items()}
    values["out"] = Value("out", result.shape, result.dtype)
    placed = {name: row_major(value.shape) for name, value in values.items()} | dict(layouts or {})
    region = Region("out", kind, (), computation.steps, tuple(inputs), ("out",))
    return Case(region, placed, values, inputs, expected, constants)


def _dtype(array: np.ndarray) -> str:
    return {"float32": "f32", "int64": "i64", "bool": "bool"}[array.dtype.name]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensor(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, array.shape, _dtype(array))


def double(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).double()


def relu(value: Expr) -> Expr:
    return maximum(value, 0.0)


def exp(value: Expr) -> Expr:
    return unary("exp", value)


def convolution_case(
    *,
    batch: int = 1,
    channels: int = 8,
    outputs: int = 8,
    size: tuple[int, int] = (9, 9),
    filter_size: int | tuple[int, int] = 3,
    stride: int = 1,
    padding: int | tuple[int, int] = 1,
    groups: int = 1,
    halo: bool = True,
    last: bool = True,
    epilogue: bool = True,
    constant: bool = True,
    seed: int = 0,
) -> Case:
    """A convolution followed by bias, residual and ReLU. `last`: channels last; `halo`: padding is stored, else guarded."""
    taps = (filter_size, filter_size) if isinstance(filter_size, int) else filter_size
    down, across = (padding, padding) if isinstance(padding, int) else padding
    x = random(seed, batch, channels, *size)
    w = random(seed + 1, outputs, channels // groups, *taps)
    bias = random(seed + 2, outputs)
    out = [(extent + 2 * added - own) // stride + 1 for extent, own, added in zip(size, taps, (down, across), strict=True)]
    shape = (batch, outputs, *out)
    residual = random(seed + 3, *shape)
    builder = StepBuilder("conv")
    tx, tw = tensor("x", x), tensor("w", w)
    per_group, inner = outputs // groups, channels // groups

    def body(n: Expr, g: Expr, k: Expr, oy: Expr, ox: Expr, fy: Expr, fx: Expr, c: Expr) -> Expr:
        y, z = oy * stride + fy - down, ox * stride + fx - across
        value = tx(n, g * inner + c, y, z)
        inside = logical_and(y >= 0, y < size[0], z >= 0, z < size[1])
        return select(inside, value, 0.0) * tw(g * per_group + k, c, fy, fx)

    (total,) = builder.reduce(
        "sum",
        shape,
        (*taps, inner),
        body,
        axes=(batch, groups, per_group, *out),
        index=lambda n, g, k, oy, ox: (n, g * per_group + k, oy, ox),
    )
    expected = F.conv2d(double(x), double(w), None, stride, (down, across), 1, groups)
    inputs = {"x": x, "w": w}
    place = channels_last if last else row_major
    layouts = {"x": place(x.shape), "out": place(shape)}
    if halo and (down or across):
        layouts["x"] = layouts["x"].with_halo(((0, 0), (0, 0), (down, down), (across, across)))
    constants = frozenset({"w", "bias"}) if constant else frozenset()
    case = make_case("contraction", builder, total, inputs, expected.numpy(), layouts, constants)
    if not epilogue:
        return case
    step = case.region.steps[0]
    axes = step.axes
    channel = axes[1] * per_group + axes[2]
    from tilewright.ir.computation import Step
    from tilewright.ir.expr import Load

    held = Load("sum", axes, "f32")
    body_final = relu(held + tensor("bias", bias)(channel) + tensor("residual", residual)(*step.index))
    steps = (
        Step("sum", step.shape, axes, step.bodies, step.reduction, "sum", None, step.index),
        Step("out", step.shape, axes, (body_final,), index=step.index),
    )
    expected = torch.relu(expected + double(bias)[None, :, None, None] + double(residual))
    values = dict(case.values) | {"bias": Value("bias", bias.shape, "f32"), "residual": Value("residual", shape, "f32")}
    placed = dict(case.layouts) | {"bias": row_major(bias.shape), "residual": place(shape)}
    region = Region("out", "contraction", (), steps, ("x", "w", "bias", "residual"), ("out",))
    every = {**inputs, "bias": bias, "residual": residual}
    return Case(region, placed, values, every, expected.numpy(), constants)


def matmul_case(
    *,
    batch: tuple[int, ...] = (),
    m: int = 17,
    n: int = 19,
    r: int = 23,
    transpose_a: bool = False,
    transpose_b: bool = False,
    constant: bool = False,
    added: bool = False,
    seed: int = 0,
) -> Case:
    """A (batched) matrix product with either factor transposed; `added`: a bias for each column and another matrix are added."""
    a = random(seed, *batch, *((r, m) if transpose_a else (m, r)))
    b = random(seed + 1, *((n, r) if transpose_b else (r, n))) if constant else random(seed + 1, *batch, *((n, r) if transpose_b else (r, n)))
    ta, tb = tensor("a", a), tensor("b", b)
    builder = StepBuilder("mm")

    def body(*index: Expr) -> Expr:
        *outer, i, j, k = index
        at_a = (*outer, k, i) if transpose_a else (*outer, i, k)
        at_b = (j, k) if transpose_b else (k, j)
        return ta(*at_a) * tb(*(at_b if constant else (*outer, *at_b)))

    (total,) = builder.reduce("sum", (*batch, m, n), (r,), body)
    result = total
    x, y = double(a), double(b)
    expected = (x.mT if transpose_a else x) @ (y.mT if transpose_b else y)
    values, constants = {"a": a, "b": b}, {"b"} if constant else set()
    if added:
        values |= {"bias": random(seed + 2, n), "branch": random(seed + 3, *batch, m, n)}
        bias, branch = tensor("bias", values["bias"]), tensor("branch", values["branch"])
        result = builder.map((*batch, m, n), lambda *i: total(*i) + bias(i[-1]) + branch(*i))
        expected = expected + double(values["bias"]) + double(values["branch"])
        constants.add("bias")
    return make_case("contraction", builder, result, values, expected.numpy(), None, frozenset(constants))


def compiled(lowered: Lowered, folder: Path) -> Any:
    """Resources by kernel, as the assembler for sm_90a reports them."""
    from tilewright.toolchain.binary import parse_resources

    kernels = list({kernel.name: kernel for kernel in lowered.kernels}.values())
    source = SourceFile("kernel.cu", print_cuda(kernels), "cuda", tuple(kernel.name for kernel in kernels))
    outcome = NvrtcCompiler.find(machine("h200")).compile(source, folder)
    assert outcome.succeeded, outcome.log
    return parse_resources(outcome.log)


def at_base(flat: np.ndarray, layout: Layout) -> np.ndarray:
    """What kernels receive of the storage that a value is in: all of it, unless the value is a slice."""
    return flat[layout.base :][: layout.from_base().size]


def interpret(program: Program, graph: Graph, inputs: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    """The outputs; fails on anything that the interpreter reports, and on regions that need PyTorch."""
    storage = dict(program.storage)
    for lowered in program.regions:
        storage |= dict(lowered.storage)
    given = dict(zip(graph.inputs, inputs, strict=True)) | dict(graph.constants)
    memory: dict[str, np.ndarray] = {}

    def buffer(name: str) -> np.ndarray:
        if name not in memory:
            item = storage[name]
            source = given.get(name if name in given else item.source or "")
            if source is None:
                memory[name] = np.zeros(item.layout.size, ELEMENT_TYPES[item.value.dtype].numpy)
            else:
                memory[name] = stored(prepared(source.detach().contiguous(), item).numpy().copy(), item.layout)
        return memory[name]

    for lowered in program.regions:
        assert lowered.region.kind != "torch", lowered.region.name
        kernels = {kernel.name: kernel for kernel in lowered.kernels}
        for turn in range(lowered.repeat):
            for call in lowered.calls:
                kernel = kernels[call.kernel]
                # a buffer may be written in parts, or in an earlier iteration: only races and bounds are checked here
                known = [parameter.name for parameter in kernel.parameters]
                arrays = [at_base(buffer(program.aliases.get(n, n)), storage[n].layout) for n in call.arguments]
                report = run(kernel, arrays, [turn] * len(kernel.scalars), known)
                assert report.is_clean, (lowered.region.name, lowered.schedule, report.faults)
    results = []
    for name in graph.outputs:
        item = storage[program.aliases.get(name, name)]
        flat = buffer(program.aliases.get(name, name))
        results.append(flat[offsets(item.layout).ravel()].reshape(item.value.shape))
    return results
