"""Data-dependent indices: in range as in PyTorch, out of range an error that names the operator, and nothing outside is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import tilewright
from tests.index_cases import CASES, COLUMNS, HUGE, NAMES, RIGHT, ROWS, TABLE, Operators, of_torch, values_of, with_index
from tests.interpreted import run_program
from tests.sample_artifacts import WEIGHTS, put, signed, with_weights
from tilewright.codegen.source import source_text
from tilewright.errors import IndexOutOfRange, InvalidModel, TilewrightError
from tilewright.frontend.torch_import import import_module
from tilewright.graph.builder import GraphBuilder
from tilewright.graph.index_checks import IndexChecks, known_ranges, range_in
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate
from tilewright.hardware import machine
from tilewright.ir.expr import INDEX, Apply, Load, Var, cast, checked, checks, const
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import FAULTS
from tilewright.ir.region import Program
from tilewright.kernels.gpu.row_reduction.space import RowReductionSchedule
from tilewright.kernels.registry import lower
from tilewright.partition.plan import plan_program
from tilewright.report.explanation import explanation
from tilewright.runtime.executable import Executable
from tilewright.tuning.tuning import distinct_problems


@cache
def compiled() -> Executable:
    return tilewright.compile(Operators(), (TABLE, *[RIGHT] * len(CASES)), "native", unsupported="error")


@pytest.mark.parametrize("position", range(len(CASES)), ids=NAMES)
def test_an_index_is_taken_or_refused_as_by_pytorch(position: int) -> None:
    """A refused call has no effect: the next call is right."""
    case, executable = CASES[position], compiled()
    refused = 0
    for value in values_of(case):
        index = RIGHT.clone()
        index[1] = value
        wanted = of_torch(case, index)
        if wanted is None:
            with pytest.raises(IndexOutOfRange, match="is out of range for a dimension of") as error:
                executable(*with_index(position, index))
            assert isinstance(error.value, IndexError) and isinstance(error.value, TilewrightError)
            if case.name not in ("int32", "computed"):
                assert f"index {value} " in str(error.value) and f"of {case.extent} elements" in str(error.value)
            assert "index_cases.py" in str(error.value)
            refused += 1
        else:
            torch.testing.assert_close(executable(*with_index(position, index))[position], wanted)
    assert refused >= len(HUGE) or case.name == "take_along"
    for found, other in zip(executable(*with_index(0, RIGHT)), CASES, strict=True):
        torch.testing.assert_close(found, other.function(TABLE, RIGHT))


@pytest.mark.parametrize("position", range(len(CASES)), ids=NAMES)
def test_the_definition_refuses_what_pytorch_does(position: int) -> None:
    case = CASES[position]
    graph = imported(position)
    for value in values_of(case):
        index = RIGHT.clone()
        index[1] = value
        inputs = [TABLE.numpy(), index.numpy()]
        wanted = of_torch(case, index)
        if wanted is None:
            with pytest.raises(IndexOutOfRange):
                evaluate(graph, inputs)
        else:
            np.testing.assert_allclose(evaluate(graph, inputs)[0], wanted.numpy(), atol=1e-5)


class One(nn.Module):
    def __init__(self, position: int) -> None:
        super().__init__()
        self.function = CASES[position].function

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.function(x, index)


@cache
def imported(position: int) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(One(position), (TABLE, RIGHT)).graph)[0]


@cache
def planned(position: int, target: str) -> Program:
    return plan_program(imported(position), machine(target), 1)


ON_CPU = ("embedding_product", "embedding_bag_max", "index_softmax", "take", "concatenated")
PLANS = [(k, "h200") for k in range(len(CASES))] + [(NAMES.index(name), "x86-avx2") for name in ON_CPU]


@pytest.mark.parametrize(("position", "target"), PLANS, ids=[f"{NAMES[k]}-{target}" for k, target in PLANS])
def test_kernels_read_nothing_outside(position: int, target: str) -> None:
    """Kernels of a GPU and of a CPU run in the interpreter, which reports every access out of bounds."""
    case, program = CASES[position], planned(position, target)
    assert not any(lowered.region.kind == "torch" for lowered in program.regions)
    for value in (case.extent - 1, case.extent, -1, -case.extent - 1, 2**32, 2**62, -(2**63)):
        index = RIGHT.clone()
        index[1] = value
        wanted = of_torch(case, index)
        found: dict[str, list[int]] = {}
        inputs = dict(zip(program.graph.inputs, (TABLE.numpy(), index.numpy()), strict=True))
        results, faults = run_program(program, inputs, found)
        assert not faults, faults
        reported = [number for numbers in found.values() for number in numbers if number]
        assert bool(reported) == (wanted is None), (value, found)
        if wanted is not None:
            np.testing.assert_allclose(results[program.graph.outputs[0]], wanted.numpy(), atol=1e-5)
        elif case.name not in ("int32", "computed"):
            assert reported == [value]


# --- the right place --------------------------------------------------------------------------------------------------


class Twins(nn.Module):
    """Two layers of the same shape, which share a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(5, 8), nn.Embedding(5, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(a), self.second(b)


def test_of_layers_that_share_a_kernel_the_right_one_is_named() -> None:
    model, right, wrong = Twins(), torch.tensor([1, 4]), torch.tensor([1, 5])
    executable = tilewright.compile(model, (right, right), "native")
    assert len(executable.image.program.kernels) == 1 and len(executable.image.program.regions) == 2
    for inputs, name in (((wrong, right), "first"), ((right, wrong), "second")):
        with torch.no_grad(), pytest.raises(IndexOutOfRange, match=f"embedding.* at {name};"):
            executable(*inputs)
        with torch.no_grad(), pytest.raises(IndexOutOfRange, match=f"embedding.* at {name};"):
            executable.verify(*inputs)
    with torch.no_grad():
        torch.testing.assert_close(executable(right, right), model(right, right))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_type_of_index(dtype: torch.dtype) -> None:
    """The model casts types with which PyTorch does not index."""

    class Cast(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x[i.long()]

    table = torch.randn(100, 3)
    executable = tilewright.compile(Cast(), (table, torch.zeros(2, dtype=dtype)), "native")
    right = torch.tensor([99, 7], dtype=dtype)
    torch.testing.assert_close(executable(table, right), table[right.long()])
    with pytest.raises(IndexOutOfRange, match="index 101 "):
        executable(table, torch.tensor([1, 101], dtype=dtype))
    if dtype is not torch.uint8:
        torch.testing.assert_close(executable(table, -right), table[-right.long()])


def test_extents_of_nothing_and_of_one() -> None:
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x[i] * 2

    one = tilewright.compile(Empty(), (torch.ones(1, 3), torch.tensor([0, -1])), "native")
    torch.testing.assert_close(one(torch.ones(1, 3), torch.tensor([0, -1])), torch.full((2, 3), 2.0))
    with pytest.raises(IndexOutOfRange):
        one(torch.ones(1, 3), torch.tensor([0, 1]))
    none = torch.zeros(0, dtype=torch.long)
    assert tilewright.compile(Empty(), (torch.ones(4, 3), none), "native")(torch.ones(4, 3), none).shape == (0, 3)
    assert tilewright.compile(Empty(), (torch.ones(0, 3), none), "native")(torch.ones(0, 3), none).shape == (0, 3)
    assert tilewright.compile(Empty(), (torch.ones(4, 0), RIGHT), "native")(torch.ones(4, 0), RIGHT).shape == (4, 0)


# --- known at compile time --------------------------------------------------------------------------------------------


class Constant(nn.Module):
    index: torch.Tensor
    table: torch.Tensor | None

    def __init__(self, index: list[int], known: bool) -> None:
        super().__init__()
        self.register_buffer("index", torch.tensor(index))
        self.register_buffer("table", TABLE.clone() if known else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.index] if self.table is None else x + self.table[self.index][0, 0]


@pytest.mark.parametrize("known", [False, True])
def test_constants_are_checked_when_compiling(known: bool) -> None:
    right = tilewright.compile(Constant([0, -1, ROWS - 1, -ROWS], known), (TABLE,), "native")
    torch.testing.assert_close(right(TABLE), Constant([0, -1, ROWS - 1, -ROWS], known)(TABLE))
    assert bool(right.image.program.index_checks) != known  # folded if the table is known too
    for wrong in (ROWS, -ROWS - 1, 2**62):
        with pytest.raises(InvalidModel, match=rf"index {wrong} is out of range for a dimension of 7 elements, in index.*test_index_checks"):
            tilewright.compile(Constant([0, wrong], known), (TABLE,), "native")


@pytest.mark.parametrize("wrong", [ROWS, -1, 2**62])
def test_constant_classes_are_checked_when_compiling(wrong: int) -> None:
    class Classes(nn.Module):
        index: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("index", torch.tensor([0, wrong]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * F.one_hot(self.index, ROWS)

    with pytest.raises(InvalidModel, match=rf"index {wrong} is out of range for a dimension of 7 elements, in indices one_hot.*test_index_checks"):
        tilewright.compile(Classes(), (torch.ones(ROWS),), "native")


@pytest.mark.parametrize("wrong", [ROWS, -ROWS - 1, 2**40, -(2**40)])
def test_constants_that_a_file_gives_are_checked_again(tmp_path: Path, wrong: int) -> None:
    """The kernels of an artifact are those of the compiled model, but its weights may have been changed."""
    tilewright.compile(Constant([0, 2, 1], False), (TABLE,), "native").save(tmp_path / "artifact")
    held = {path.relative_to(tmp_path / "artifact").as_posix(): path.read_bytes() for path in (tmp_path / "artifact").rglob("*") if path.is_file()}
    weights = safetensors.torch.load(held[WEIGHTS])
    changed = {name: torch.full_like(tensor, wrong) for name, tensor in weights.items()}
    loaded = tilewright.load(put(signed(with_weights(held, changed)), tmp_path / "changed"))
    with pytest.raises(IndexOutOfRange, match=f"index {wrong} is out of range"):
        loaded(TABLE)


LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (lambda x: (x.clamp(min=0) + 1).clamp(max=7), MOST),
        (lambda x: (x.clamp(min=0) + 2**62).clamp(max=7), MOST),
        (lambda x: (x.clamp(max=0) - 1).clamp(min=0), LEAST),
        (lambda x: (-x.clamp(max=0) - 1).clamp(max=7), LEAST),
        (lambda x: (x % 8) + (2**60 + 100) - 2**60, 3),
        (lambda x: ((x % 8) * 2**61).clamp(min=0, max=7), 5),
        (lambda x: x * 2**61 // 2**61 + 4, 1000),
        (lambda x: x * 6 // 6, MOST // 3),
        (lambda x: x.to(torch.uint8).long() - 250, 1),
        (lambda x: (x > 0).cumsum(-1), 5),
    ],
)
def test_integers_that_wrap_read_nothing_outside(index: Callable[[torch.Tensor], torch.Tensor], value: int) -> None:
    """As in PyTorch, the call raises or returns rows of the table."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return F.embedding(index(x), table)

    table, x = torch.arange(64.0).reshape(8, 8), torch.full((12,), value)
    executable = tilewright.compile(Model(), (torch.ones_like(x), table), "native")
    try:
        expected = Model()(x, table)
    except IndexError:
        with pytest.raises(IndexOutOfRange):
            executable(x, table)
    else:
        torch.testing.assert_close(executable(x, table), expected)


def test_bytes_that_are_no_booleans_read_nothing_outside() -> None:
    class Model(nn.Module):
        def forward(self, mask: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return F.embedding(mask.long(), table)

    table = torch.arange(8.0).reshape(2, 4)
    executable = tilewright.compile(Model(), (torch.zeros(3, dtype=torch.bool), table), "native")
    mask = torch.tensor([True, False, True])
    torch.testing.assert_close(executable(mask, table), Model()(mask, table))
    with pytest.raises(IndexOutOfRange, match="index 200"):
        executable(torch.tensor([1, 0, 200], dtype=torch.uint8).view(torch.bool), table)


def test_what_is_always_in_range_is_not_checked() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
            return [
                x[x.argmax(0)],
                x.index_select(0, x.argmin(0)),
                F.embedding(i.clamp(0, ROWS - 1), x),
                F.embedding(i % ROWS, x),
                x[(i > 3).long()],
                x.repeat(40, 1)[i.to(torch.uint8).long()],
            ]

    graph, _ = simplify(import_module(Model(), (TABLE, RIGHT)).graph)
    program = plan_program(graph, machine("x86-avx2"), 1)
    assert not any(lowered.checks for lowered in program.regions)
    assert not any(parameter.name == FAULTS for kernel in program.kernels().values() for parameter in kernel.parameters)


def test_ranges_of_expressions() -> None:
    x, i = Load("x", (), INDEX), Var("i", 10)
    ranges = {"x": (-3, 5), "big": (0, 2**62)}
    assert range_in(x * 2 + i, ranges) == (-6, 19)
    assert range_in(Apply("mul", (Load("big", (), INDEX), const(4, INDEX)), INDEX), ranges) == (-(2**63), 2**63 - 1)  # may wrap around
    assert range_in(cast(Load("y", (), "u8"), INDEX), ranges) == (0, 255)
    assert range_in(cast(cast(Load("x", (), INDEX), "u8"), INDEX), ranges) == (0, 255)
    assert range_in(checked(x, 4, True), {}) == (0, 3)
    assert checked(i, 10, False) == i and not checks(checked(i, 11, True))


def test_known_ranges_of_a_graph() -> None:
    b = GraphBuilder()
    x = b.input("x", (6, 4), "f32")
    _, best = b.emit("argmax_with_value", x, axis=0)
    shifted = b.pointwise("add", best, 2)
    ranges = known_ranges(b.finish([shifted]))
    assert ranges[best.name] == (0, 5) and ranges[shifted.name] == (2, 7)


# --- loops and artifacts ----------------------------------------------------------------------------------------------


def loop() -> Graph:
    """h = 0; for t: h = h + table[index[t]]"""
    inner = GraphBuilder()
    h, i, table = inner.input("h", (8,), "f32"), inner.input("i", (1,), "i64"), inner.input("table", (5, 8), "f32")
    with inner.at("row", "model.py:3"):
        row = inner.reshape(inner.op("index_select", table, i, axis=0, negative=False), (8,))
    body = inner.finish([inner.pointwise("add", h, row)])
    b = GraphBuilder()
    start, indices, rows = b.input("start", (8,), "f32"), b.input("indices", (6, 1), "i64"), b.input("rows", (5, 8), "f32")
    attributes = {"body": body, "states": 1, "sequences": 1, "length": 6, "reverse": (False,)}
    (final,) = b.structural("scan", [start, indices, rows], [((8,), "f32")], attributes)
    return b.finish([final])


def test_an_index_in_a_loop() -> None:
    graph = loop()
    program = plan_program(graph, machine("x86-avx2"), 1)
    start, rows = np.zeros(8, np.float32), np.arange(40, dtype=np.float32).reshape(5, 8)
    for step, value in ((0, 4), (0, 5), (3, -1), (5, 2**62)):
        indices = np.array([[k % 5] for k in range(6)])
        indices[step] = value
        found: dict[str, list[int]] = {}
        results, faults = run_program(program, dict(zip(graph.inputs, (start, indices, rows), strict=True)), found)
        assert not faults
        if value < 5 and value >= 0:
            assert not any(map(any, found.values()))
            np.testing.assert_allclose(results[graph.outputs[0]], rows[indices[:, 0]].sum(0))
        else:
            assert [numbers for numbers in found.values() if any(numbers)] == [[value]]
            with pytest.raises(IndexOutOfRange, match="row at model.py:3"):
                evaluate(graph, (start, indices, rows))
    (checks_of_loop,) = [lowered.checks for lowered in program.regions if lowered.checks]
    assert [check.place for found in checks_of_loop.values() for check in found] == ["index_select row at model.py:3"]


def test_a_saved_model_checks_and_names_the_place(tmp_path: object) -> None:
    model, right = Twins(), torch.tensor([1, 4])
    path = f"{tmp_path}/twins.zip"
    tilewright.compile(model, (right, right), "native").save(path)
    executable = tilewright.load(path)
    for run in (executable, executable.clone()):
        with torch.no_grad():
            with pytest.raises(IndexOutOfRange, match="index -1 .*embedding.* at second;"):
                run(right, torch.tensor([-1, 0]))
            torch.testing.assert_close(run(right, right), model(right, right))


def test_a_clone_does_not_see_the_fault_of_another() -> None:
    model, right = Twins(), torch.tensor([1, 4])
    first = tilewright.compile(model, (right, right), "native")
    second = first.clone()
    with torch.no_grad():
        with pytest.raises(IndexOutOfRange):
            first(torch.tensor([7, 7]), right)
        torch.testing.assert_close(second(right, right), model(right, right))


def test_a_region_that_the_definition_runs_names_the_place() -> None:
    """As if no compiler accepts the kernel."""
    checks_of = IndexChecks.of(loop().nodes[0].attributes["body"])
    (node, *_) = checks_of.graph.nodes
    assert checks_of.computation(node) and checks_of.found[0].place == "index_select row at model.py:3"


def test_inputs_changed_in_place_stay_as_they_were() -> None:
    class Counting(nn.Module):
        def forward(self, seen: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            seen.add_(1)
            return x[i] + seen

    seen = torch.zeros(COLUMNS)
    executable = tilewright.compile(Counting(), (seen.clone(), TABLE, RIGHT), "native")
    with pytest.raises(IndexOutOfRange):
        executable(seen, TABLE, torch.tensor([0, 1, ROWS, 2]))
    assert not seen.any()
    executable(seen, TABLE, RIGHT)
    assert bool((seen == 1).all())


def test_the_plan_says_what_is_checked() -> None:
    executable = tilewright.compile(Twins(), (torch.tensor([1, 4]), torch.tensor([1, 4])), "native")
    text = explanation(executable.image)
    assert text.count("checked  indices of index_select embedding") == 2 and "at second: 0 to 4" in text


def test_torch_compile_raises_an_index_error() -> None:
    model, right = Twins(), torch.tensor([1, 4])
    fast = torch.compile(model, backend="tilewright")
    with torch.no_grad():
        torch.testing.assert_close(fast(right, right), model(right, right))
        with pytest.raises(IndexError, match="index 5 "):
            fast(right, torch.tensor([5, 0]))
        torch.testing.assert_close(fast(right, right), model(right, right))


def kernel_of(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], target: str, index: torch.Tensor) -> str:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return function(x, i)

    graph, _ = simplify(import_module(Model(), (torch.zeros(100, 64), index)).graph)
    (kernel,) = plan_program(graph, machine(target), 1).kernels().values()
    return source_text(kernel)


def test_an_index_is_checked_before_the_loop_over_what_it_reads() -> None:
    """Loops over elements contain no check, which would prevent vectorisation."""
    rows = kernel_of(lambda x, i: F.embedding(i, x), "x86-avx2", torch.zeros(50, dtype=torch.long))
    assert rows.index("const int64_t checked_row0 = tw_checked(in0[") < rows.index("#pragma omp simd") < rows.index("in1[checked_row0 * 64")
    sums = kernel_of(lambda x, i: F.embedding(i, x).sum(1), "x86-avx2", torch.zeros(5, 4, dtype=torch.long))
    assert sums.index("= tw_checked(in0[") < sums.index("f32x8 acc[") < sums.index("in1 + checked_row0 * 64")
    assert sums.count("= tw_checked(") == 1
    single = kernel_of(lambda x, i: x.gather(0, i), "x86-avx2", torch.zeros(20, 64, dtype=torch.long))
    assert "checked_row0" not in single and "in1[tw_checked(in0[" in single


def test_a_checked_row_does_not_take_the_name_of_a_row_of_the_result() -> None:
    """Rows of a row reduction are row0, row1 ...; a table's row that is looked up before the loop over its columns is another variable."""

    class Lookup(nn.Module):
        def forward(self, table: torch.Tensor, weight: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return (table[places][:, :, None, :] + weight).amax(-1)

    graph, _ = simplify(import_module(Lookup(), (torch.zeros(20, 512), torch.zeros(36, 512), torch.tensor([[3, 19], [7, 0]]))).graph)
    (problem,) = [problem for problem in distinct_problems(graph, machine("h200"), 1) if problem.region.kind == "row reduction"]
    (kernel,) = lower(problem, RowReductionSchedule(4, 32, 4), machine("h200")).kernels
    assert "out[row0 * 72 + row1 * 36 + row2]" in source_text(kernel)
