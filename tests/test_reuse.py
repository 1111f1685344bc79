"""Kernels of one size that serve others without being lowered again: what is lowered, results, and what is no image of another problem."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.batches import check
from tests.draws import draws
from tests.interpreted import run_program
from tests.operator_cases import once
from tilewright.compile import source_files
from tilewright.frontend.imported import Imported
from tilewright.frontend.sized import ModuleModel
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Expr, Load, Var, floordiv, index_const, mod
from tilewright.ir.graph import Value
from tilewright.ir.layout import Layout, row_major
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Region
from tilewright.kernels.registry import lower_for_images
from tilewright.partition.merges import Memory
from tilewright.partition.plan import plan_program
from tilewright.partition.reuse import MOST_CALLS, Images, images_of
from tilewright.toolchain.cache import kernel_key
from tilewright.toolchain.compilers import compiler_for

CPU = machine("x86-avx512")


class Block(nn.Module):
    """A layer of a transformer, whose products have the rows of all sequences."""

    def __init__(self, heads: int, width: int, hidden: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(heads * width), nn.LayerNorm(heads * width)
        self.into, self.out = nn.Linear(heads * width, 3 * heads * width), nn.Linear(heads * width, heads * width)
        self.up, self.down = nn.Linear(heads * width, hidden), nn.Linear(hidden, heads * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, features = x.shape
        rows = self.into(self.first(x).reshape(sequences * length, features))
        q, k, v = rows.view(sequences, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(-1, features)
        x = x + self.out(attended).view(sequences, length, features)
        inner = nn.functional.gelu(self.up(self.second(x).reshape(-1, features)), approximate="tanh")
        return x + self.down(inner).view(sequences, length, features)


class Images4(nn.Module):
    """Convolutions of all kinds, a gate by a mean over pixels, and rows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, 2, 1)
        self.deep = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)
        self.gate = nn.Conv2d(channels, channels, 1)
        self.last = nn.Conv2d(channels, 24, 1)
        self.head = nn.Linear(24, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.hardswish(self.deep(torch.relu(self.first(x))))
        x = self.last(x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))))
        return torch.softmax(self.head(nn.functional.max_pool2d(x, 3, 2, 1).mean((2, 3))), 1)


def planned(imported: Imported, memory: Memory, as_before: bool) -> Program:
    return plan_program(simplify(imported.graph)[0], CPU, 2, memory=memory, as_before=as_before)


def keys(program: Program) -> set[str]:
    return {kernel_key(source, compiler_for(CPU, "c")) for source in source_files(program, CPU)}


def check_program(module: nn.Module, program: Program, x: torch.Tensor) -> None:
    """The program in the interpreter against PyTorch in float64."""
    results, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
    assert not faults
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double()).numpy()
    (result,) = results.values()
    assert np.abs(result.reshape(exact.shape) - exact).max() <= 1e-4 * np.abs(exact).max()


def sizes_lower_nothing(module: nn.Module, shape: tuple[int, ...], batches: tuple[int, ...]) -> list[Program]:
    """The programs of a first size, planned with fixed sizes, and of further ones; asserts that these have its kernels, none of which is lowered."""
    memory = Memory()
    programs = [planned(import_module(module, (torch.randn(1, *shape),)), memory, as_before=False)]
    model = ModuleModel(module, (torch.randn(2, *shape),), None, [{0: "batch"}])
    fault = mock.Mock(side_effect=AssertionError("a kernel is lowered"))
    with mock.patch("tilewright.partition.lowering.lower_for_images", fault), mock.patch("tilewright.kernels.registry.lower", fault):
        programs += [planned(model.bind((batch,)), memory, as_before=True) for batch in batches]
    assert not fault.called
    assert [keys(program) for program in programs] == [keys(programs[0])] * len(programs)
    return programs


@settings(once, max_examples=draws(4))
@given(heads=st.integers(1, 3), width=st.integers(1, 20), hidden=st.integers(1, 90), length=st.integers(2, 33), causal=st.booleans())
def test_rows_of_further_batches_lower_nothing(heads: int, width: int, hidden: int, length: int, causal: bool) -> None:
    module = Block(heads, width, hidden, causal).eval()
    batches = (2, 3, 5)
    programs = sizes_lower_nothing(module, (length, heads * width), batches)
    for batch, program in zip((1, *batches), programs, strict=True):
        check_program(module, program, torch.randn(batch, length, heads * width))


@settings(once, max_examples=draws(3))
@given(channels=st.sampled_from((5, 16, 40)), size=st.integers(5, 24))
def test_images_of_further_batches_lower_nothing(channels: int, size: int) -> None:
    module = Images4(channels).eval()
    programs = sizes_lower_nothing(module, (3, size, size), (2, 5))
    for batch, program in zip((1, 2, 5), programs, strict=True):
        check_program(module, program, torch.randn(batch, 3, size, size))


def test_kernels_with_a_partial_tile_are_called_for_each_image(by_formulas: None) -> None:
    """Its rows are those of images whose last tile is partial, so no trip follows from that of the image before."""
    module = nn.Sequential(nn.Flatten(0, 1), nn.Linear(40, 300), nn.ReLU()).eval()
    _, two, five = sizes_lower_nothing(module, (37, 40), (2, 5))
    for batch, program in ((2, two), (5, five)):
        (region,) = program.regions
        assert [dict(call.shifted)[program.graph.outputs[0]] for call in region.calls] == [37 * 300 * image for image in range(batch)]
        check_program(module, program, torch.randn(batch, 37, 40))


def test_a_program_that_calls_kernels_for_each_image_runs_here(tmp_path: Path) -> None:
    """Over the caller's tensors and the arena, also as an artifact, and without the compiled runner."""
    module = Block(2, 9, 31).eval()
    executable = tilewright.compile(module, torch.randn(2, 13, 18), dynamic=[{0: "batch"}], wait=True, threads=2)
    for batch in (4, 6, 10):
        x = torch.randn(batch, 13, 18)
        check(module, executable, x)
        (built,) = (built for built in executable._programs.values() if built.executable.signature.inputs[0].shape[0] == batch)
        assert any(call.shifts for region in built.executable.image.program.regions for call in region.calls)
        built.executable.save(tmp_path / "saved")
        loaded = tilewright.load(tmp_path / "saved")
        torch.testing.assert_close(loaded(x), executable(x), rtol=0, atol=0)
        with mock.patch("tilewright.runtime.cpu._load_runner", return_value=None):
            torch.testing.assert_close(tilewright.load(tmp_path / "saved")(x), executable(x), rtol=0, atol=0)


def test_an_equal_problem_under_another_schedule_is_lowered() -> None:
    memory, module = Memory(), nn.Linear(24, 40)
    imported = import_module(module, (torch.randn(30, 24),))
    with mock.patch("tilewright.partition.lowering.lower_for_images", wraps=lower_for_images) as low:
        planned(imported, memory, as_before=False)
        planned(imported, memory, as_before=False)
        assert low.call_count == 1
        ((form, (known,)),) = memory.kernels.items()
        memory.kernels[form] = (replace(known, schedule=None),)
        planned(imported, memory, as_before=False)
        assert low.call_count == 2


def test_programs_of_free_and_fixed_sizes_name_values_alike() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.reshape(x.shape[0] * x.shape[1], -1) * 2
            return ((y.abs() * y).view(x.shape) + x.shape[0] * x).pow(2)

    x = torch.randn(2, 3, 4)
    fixed, free = import_module(Rows(), (x,)).graph, ModuleModel(Rows(), (x,), None, [{0: "batch"}])
    assert "mul" not in [node.name for node in free._base.program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert [node.name for node in free.bind((2,)).graph.nodes] == [node.name for node in fixed.nodes]
    assert "mul" in fixed.values


# what is no image of another problem

ROWS, COLUMNS = 6, 5


def problem(batch: int, body: Expr | None = None, split: bool = False, layout: Layout | None = None, **constant: bool) -> Problem:
    """out[b, m, n] = 2 a[b, m, n], or of rows of all images if not `split`."""
    shape = (batch, ROWS, COLUMNS) if split else (batch * ROWS, COLUMNS)
    axes = tuple(Var(f"i{at}", extent) for at, extent in enumerate(shape))
    given = body if body is not None else Load("value0", axes, "f32") * 2.0
    step = Step("value1", shape, axes, (given,))
    region = Region("value1", "map", (), (step,), ("value0",), ("value1",))
    layouts = {"value0": layout or row_major(shape), "value1": row_major(shape)}
    values = {name: Value(name, shape, "f32") for name in layouts}
    return Problem(region, layouts, values, frozenset({"value0"} if constant else ()))


def row(batch: int) -> Var:
    return Var("i0", batch * ROWS)


COLUMN = Var("i1", COLUMNS)


def test_rows_and_images_of_several() -> None:
    assert images_of(problem(3), problem(1)) == Images(3, {"value0": ROWS * COLUMNS, "value1": ROWS * COLUMNS})
    assert images_of(problem(6, split=True), problem(2, split=True)) == Images(3, dict.fromkeys(("value0", "value1"), 2 * ROWS * COLUMNS))
    assert images_of(problem(6), problem(4)) is None and images_of(problem(1), problem(3)) is None


def positions(batch: int) -> tuple[Expr, ...]:
    """Bodies that know the number of the image, or read another one."""
    m = row(batch)
    rows = batch * ROWS
    return (
        Load("value0", (index_const(rows - 1) - m, COLUMN), "f32"),  # backwards
        Load("value0", (mod(m + 1, rows), COLUMN), "f32"),  # the next row, of the next image at last
        Load("value0", (mod(m, ROWS), COLUMN), "f32"),  # the first image
        Load("value0", (floordiv(m, batch), COLUMN), "f32"),  # rows that are repeated
        Load("value0", (m, mod(COLUMN + floordiv(m, ROWS), COLUMNS)), "f32"),  # columns that depend on the image
    )


@pytest.mark.parametrize("number", range(5))
def test_images_that_are_computed_otherwise(number: int) -> None:
    assert images_of(problem(3, positions(3)[number]), problem(1, positions(1)[number])) is None


def test_images_that_are_stored_otherwise() -> None:
    inside = Layout((3, ROWS, COLUMNS), ((1, 0), (0, 0), (2, 0)))
    assert images_of(problem(3, split=True, layout=inside), problem(1, split=True, layout=replace(inside, shape=(1, ROWS, COLUMNS)))) is None
    padded = Layout((3, ROWS, COLUMNS), ((0, 0), (1, 0), (2, 0)), ((1, 0), (0, 0), (0, 0)))
    assert images_of(problem(3, split=True, layout=padded), problem(1, split=True, layout=replace(padded, shape=(1, ROWS, COLUMNS)))) is None
    split = Layout((3 * ROWS, COLUMNS), ((0, 0), (1, 0), (0, 2)))
    assert images_of(problem(3, layout=split), problem(1, layout=replace(split, shape=(ROWS, COLUMNS)))) is None


def test_a_sum_over_images_is_none() -> None:
    def summed(batch: int) -> Problem:
        m = Var("r0", batch)
        step = Step("value1", (2, COLUMNS), (Var("i0", 2), COLUMN), (Load("value0", (m, Var("i0", 2), COLUMN), "f32"),), (m,), "sum")
        region = Region("value1", "row reduction", (), (step,), ("value0",), ("value1",))
        values = {"value0": Value("value0", (batch, 2, COLUMNS), "f32"), "value1": Value("value1", (2, COLUMNS), "f32")}
        return Problem(region, {name: row_major(value.shape) for name, value in values.items()}, values)

    assert images_of(summed(3), summed(1)) is None


def test_many_images_are_lowered() -> None:
    module, memory = nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 20)).eval(), Memory()
    planned(import_module(module, (torch.randn(1, 5, 8),)), memory, as_before=False)
    model = ModuleModel(module, (torch.randn(2, 5, 8),), None, [{0: "batch"}])
    for batch in (MOST_CALLS, MOST_CALLS + 1):
        program = planned(model.bind((batch,)), memory, as_before=True)
        assert all(len(region.calls) <= MOST_CALLS for region in program.regions)
        check_program(module, program, torch.randn(batch, 5, 8))
