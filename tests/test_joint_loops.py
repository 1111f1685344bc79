"""Two loops as one: both directions of recurrent layers in one kernel, against PyTorch in float64 under any schedule, and when that is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module as module_named
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tilewright
from tests.compiled import Case, compare
from tests.draws import draws
from tests.interpreted import returned, run_program
from tests.test_gpu_recurrence import FEW, H200
from tests.test_half_modules import assert_as_good_as_eager
from tests.test_recurrence import KINDS, TARGETS, loops
from tests.test_tensor_recurrence import check, layer, on_tensor_cores
from tilewright.codegen.c import print_c
from tilewright.codegen.cuda import shared_bytes
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.compile import source_files
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.graph.reference import evaluate
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.expr import Const, Var, index_const
from tilewright.ir.graph import Graph
from tilewright.ir.kernel import Allocate, Block, Buffer, For, If, Let, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Region, Unsuitable
from tilewright.kernels.gpu.recurrence.schema import RECURRENCE
from tilewright.kernels.gpu.recurrence.space import shared_bytes_of
from tilewright.kernels.gpu.recurrence.steps import either
from tilewright.kernels.schema import Options
from tilewright.partition.context import Chooser
from tilewright.partition.joint_loops import JOINT, TimedLoop, decided, find_pairs, join_loops, joint
from tilewright.partition.merges import Memory, Policy, Timed
from tilewright.partition.plan import plan_program
from tilewright.partition.without_kernels import without_kernels
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.toolchain.binary import Binary
from tilewright.toolchain.build import compile_kernels

once = settings(max_examples=draws(12), deadline=None, derandomize=True, phases=(Phase.generate,))


def drawn(seed: int, keep: Callable[[Any], bool] = lambda schedule: True) -> Chooser:
    """Each loop takes a random candidate of its space, of those to keep if there are any, and is predicted to take no time."""

    def chosen(problem: Problem, target: Machine, threads: int) -> Choice:
        if problem.region.kind != "loop":
            return choose(problem, target, threads)
        ranking = list(rank(problem, target, threads))
        found = [choice for choice in ranking if keep(choice.schedule)] or ranking  # loops apart have no halves
        return replace(found[seed % len(found)], seconds=0.0)

    return chosen


def graph_of(module: nn.Module, x: Tensor) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simplify(import_module(module.eval(), (x,)).graph)[0]


def joined(module: nn.Module, x: Tensor, target: Machine, threads: int = 1, chooser: Chooser = choose) -> Program:
    """The program with all pairs of loops as one each, whatever is predicted."""
    graph = graph_of(module, x)
    models = None if chooser is choose else chooser
    return plan_program(graph, target, threads, chooser, models=models, persistent=True, policy=decided(graph, True))


def interpreted(module: nn.Module, x: Tensor, program: Program) -> None:
    """Compares the program with PyTorch in float64, without reports of the interpreter."""
    results, faults = run_program(program, {program.graph.inputs[0]: x.numpy()})
    assert not faults, "\n".join(faults)
    found = returned(import_module(module, (x,)), [results[name] for name in program.graph.outputs], (x,))
    compare(Case("both directions", module, (x,)), found, (x,))


@st.composite
def layers(draw: st.DrawFn, hidden: Any = (3, 4, 16, 19, 40)) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(draw(st.integers(0, 1000)))
    first, length, batch = draw(st.booleans()), draw(st.sampled_from([2, 3, 5])), draw(st.sampled_from([1, 2, 3, 7]))
    kind, wide, depth = KINDS[draw(st.sampled_from(list(KINDS)))], draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 2))
    options = {"num_layers": depth, "bias": draw(st.booleans()), "batch_first": first, "bidirectional": True}
    return kind(wide, draw(st.sampled_from(hidden)), **options), torch.randn(batch, length, wide) if first else torch.randn(length, batch, wide)


# --- one kernel for both ------------------------------------------------------------------------------------------------


@once
@given(drawn_layer=layers(), target=st.sampled_from(TARGETS), threads=st.sampled_from([1, 2, 3, 8]), seed=st.integers(0, 10_000))
def test_any_schedule_on_a_cpu(drawn_layer: Any, target: Machine, threads: int, seed: int) -> None:
    module, x = drawn_layer
    program = joined(module, x, target, threads, drawn(seed))
    assert len(loops(program)) == module.num_layers
    assert all("in one kernel" in lowered.schedule and len(lowered.kernels) == 1 for lowered in loops(program))
    interpreted(module, x, program)


@once
@given(drawn_layer=layers(), target=st.sampled_from([FEW, H200]), seed=st.integers(0, 10_000))
def test_any_schedule_on_a_gpu(drawn_layer: Any, target: Machine, seed: int) -> None:
    module, x = drawn_layer
    program = joined(module, x, target, 1, drawn(seed))
    assert len(loops(program)) == module.num_layers and all("in one kernel" in lowered.schedule for lowered in loops(program))
    interpreted(module, x, program)


@once
@given(drawn_layer=layers(hidden=(16, 22, 40)), seed=st.integers(0, 10_000), cluster=st.sampled_from([1, 2, 4, 8]))
def test_any_cluster(drawn_layer: Any, seed: int, cluster: int) -> None:
    module, x = drawn_layer
    program = joined(module, x, H200, 1, drawn(seed, lambda schedule: schedule.cluster == cluster))
    assert all(lowered.kernels[0].cluster == cluster for lowered in loops(program)) and len(loops(program)) == module.num_layers
    interpreted(module, x, program)


@once
@given(
    kind=st.sampled_from(list(KINDS)), hidden=st.sampled_from([32, 64, 96]), batch=st.sampled_from([1, 5, 16, 23]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_any_schedule_on_tensor_cores(kind: str, hidden: int, batch: int, dtype: torch.dtype, seed: int) -> None:
    module, x = layer(kind, hidden, batch, dtype, bidirectional=True)
    program = joined(module, x, H200, 1, on_tensor_cores(seed))
    (lowered,) = loops(program)
    assert "tensor cores" in lowered.schedule and lowered.repeat == 1
    check(module, x, program)


@once
@given(drawn_layer=layers(), target=st.sampled_from([FEW, H200]), seed=st.integers(0, 10_000))
def test_half_of_the_blocks_for_each(drawn_layer: Any, target: Machine, seed: int) -> None:
    module, x = drawn_layer
    program = joined(module, x, target, 1, drawn(seed, lambda schedule: schedule.divided == 1))
    for lowered in loops(program):
        kernel = lowered.kernels[-1]
        assert "half of the blocks for each loop" in lowered.schedule and kernel.cooperative
        assert kernel.launch is not None and kernel.launch.grid[0] % 2 == 0
    interpreted(module, x, program)


@once
@given(
    kind=st.sampled_from(list(KINDS)), hidden=st.sampled_from([32, 64, 96]), batch=st.sampled_from([1, 5, 16, 23]),
    dtype=st.sampled_from([torch.float16, torch.float32]), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_half_of_the_blocks_for_each_on_tensor_cores(kind: str, hidden: int, batch: int, dtype: torch.dtype, seed: int) -> None:
    module, x = layer(kind, hidden, batch, dtype, bidirectional=True)
    program = joined(module, x, H200, 1, on_tensor_cores(seed, keep=lambda schedule: schedule.divided == 1))
    (lowered,) = loops(program)
    assert "half of the blocks for each loop" in lowered.schedule
    check(module, x, program)


def test_what_both_halves_share() -> None:
    """Barriers stand outside of the condition; halves that meet at different ones, or keep different values, are refused."""
    first, zero, step = Var("first", None, "bool"), Const(0.0, "f32"), Var("step", 3)
    stores = [Store(name, step, zero) for name in ("a", "b")]

    def loop(store: Store, extent: int = 3) -> For:
        return For(step, index_const(extent), Block((store, block_barrier())))

    assert either(first, loop(stores[0]), loop(stores[0])) == loop(stores[0])
    expected = For(step, index_const(3), Block((If(first, *stores), block_barrier())))
    assert either(first, loop(stores[0]), loop(stores[1])) == expected
    with pytest.raises(Unsuitable, match="meet at different barriers"):
        either(first, loop(stores[0]), loop(stores[1], 2))
    with pytest.raises(Unsuitable, match="keep different values"):
        either(first, Allocate(Buffer("a", "f32", 1, "register")), Allocate(Buffer("a", "f32", 2, "register")))
    with pytest.raises(Unsuitable, match="keep different values"):
        either(first, Block((Let(step, index_const(1)), stores[0])), Block((Let(step, index_const(2)), stores[0])))


class Unlike(nn.Module):
    """Independent loops of different cells; a map of the first's result stands before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.LSTM(5, 19), nn.GRU(5, 19)

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.one(x)
        changed = first.exp()
        second, last = self.other(x.cos())
        return changed * second + last


@pytest.mark.parametrize("target", [TARGETS[2], FEW], ids=lambda target: str(target.name))
def test_unlike_loops(target: Machine) -> None:
    torch.manual_seed(2)
    module, x = Unlike(), torch.randn(4, 2, 5)
    program = joined(module, x, target, 2, drawn(3))
    assert len(loops(program)) == 1
    interpreted(module, x, program)


def test_shared_memory_is_as_counted() -> None:
    """That of clusters has the states of both loops."""
    problems: list[Problem] = []

    def seen(problem: Problem, target: Machine, threads: int) -> Choice:
        problems.extend([problem] * (problem.region.kind == "loop"))
        return drawn(0)(problem, target, threads)

    joined(nn.GRU(8, 24, bidirectional=True), torch.randn(3, 5, 8), H200, 1, seen)
    problem = problems[-1]
    form = RECURRENCE.match(problem, H200)
    assert form.facts.states == 2 and form.facts.products == ((3, 24), (3, 24))
    candidates, _ = RECURRENCE.space(form.facts, H200, Options(1))
    counted = shared_bytes_of(form.facts, candidates, 32)
    for position in range(0, len(counted), 29):
        schedule = RECURRENCE.schedule_of({name: int(column[position]) for name, column in candidates.items()}, H200)
        kernel = RECURRENCE.lower(problem, form, schedule, H200).kernels[-1]
        assert shared_bytes(kernel) - 16 * 4 < counted[position] <= shared_bytes(kernel), schedule


def test_one_barrier_for_both() -> None:
    program = joined(nn.LSTM(16, 64, bidirectional=True), torch.randn(5, 1, 16), TARGETS[2], 2, drawn(0, lambda schedule: schedule.workers == 2))
    (lowered,) = loops(program)
    text = print_c(list(lowered.kernels))
    assert text.count("#pragma omp parallel\n") == 1 and text.count("#pragma omp for schedule(static)\n") == 1


# --- the meaning of a joint loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_joint_loop_means_both(depth: int) -> None:
    torch.manual_seed(depth)
    module, x = nn.LSTM(4, 6, num_layers=depth, bidirectional=True).eval(), torch.randn(5, 2, 4)
    graph = graph_of(module, x)
    program = joined(module, x, TARGETS[0], 1, drawn(0))
    own = [node for node in program.graph.nodes if node.operator == "scan"]
    assert [node.attributes["reverse"] for node in own] == [(False, True, False, True)] * depth
    for wanted, found in zip(evaluate(graph, [x.numpy()]), evaluate(program.graph, [x.numpy()]), strict=True):
        assert np.array_equal(wanted, found)


def test_a_joint_loop_whose_kernel_fails_runs_by_its_definition() -> None:
    torch.manual_seed(7)
    module, x = nn.GRU(4, 6, bidirectional=True).eval(), torch.randn(5, 2, 4)
    program = joined(module, x, machine("native"), 1, drawn(0))
    ((kernel,),) = (lowered.kernels for lowered in loops(program))
    replaced = without_kernels(program, {kernel.name: "refused"})
    region = next(lowered.region for lowered in replaced.regions if lowered.region.kind == "torch")
    assert [node.operator for node in region.nodes] == ["scan"] and "kernel failed: refused" in region.reasons


def test_compiled_saved_and_loaded(tmp_path: Path) -> None:
    """Over several calls, from an artifact too; its results are slices of one buffer."""
    torch.manual_seed(8)
    module, x = nn.LSTM(7, 33, num_layers=2, bidirectional=True).eval(), torch.randn(6, 3, 7)
    policy = decided(graph_of(module, x), True)
    with mock.patch.object(module_named("tilewright.compile"), "plan_program", partial(plan_program, policy=policy)):
        executable = tilewright.compile(module, (x,), threads=2)
    found = [row for row in executable.plan.rows if row.kind == "loop"]
    assert len(found) == 2 and all("in one kernel" in row.schedule for row in found)
    executable.save(tmp_path / "layer")
    loaded = tilewright.load(tmp_path / "layer")
    for _ in range(2):
        given = torch.randn_like(x)
        for one in (executable, loaded):
            compare(Case("both directions", module, (given,)), one(given), (given,))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_onnx(kind: str) -> None:
    """Results have the directions along a dimension of their own."""
    hidden, features, gates = 5, 3, {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    generator = np.random.default_rng(1)
    shapes = {"W": (2, gates * hidden, features), "R": (2, gates * hidden, hidden), "B": (2, 2 * gates * hidden)}
    weights = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    more: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    x = generator.standard_normal((4, 2, features)).astype(np.float32)

    def model(directions: slice, way: str) -> onnx.ModelProto:
        node = helper.make_node(kind, ["X", "W", "R", "B"], ["Y", "H"], hidden_size=hidden, direction=way, **more)
        info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("X", x.shape), ("Y", None), ("H", None))]
        own = [onnx.numpy_helper.from_array(value[directions], name) for name, value in weights.items()]
        made = helper.make_graph([node], kind, info[:1], info[1:], own)
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)])

    both = model(slice(None), "bidirectional")
    imported = module_named("tilewright.frontend.onnx_import").import_onnx(both)
    graph = simplify(imported.graph)[0]
    program = plan_program(graph, TARGETS[1], 2, drawn(2), models=drawn(2), policy=decided(graph, True))
    assert len(loops(program)) == 1
    results, faults = run_program(program, {graph.inputs[0]: x})
    assert not faults
    found: Any = [results[name] for name in graph.outputs]
    ways: Any = [
        ReferenceEvaluator(model(slice(k, k + 1), "forward")).run(None, {"X": given}) for k, given in enumerate((x, np.ascontiguousarray(x[::-1])))
    ]
    wanted = np.concatenate([ways[0][0], ways[1][0][::-1]], 1), np.concatenate([ways[0][1], ways[1][1]], 0)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other, rtol=1e-5, atol=1e-5)


# --- which loops, and when ------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module, length: int = 4) -> None:
        super().__init__()
        self.one, self.other, self.length = one, other, length

    def forward(self, x: Tensor) -> Any:
        return self.one(x), self.other(x[: self.length])


def test_which_loops_are_pairs() -> None:
    x = torch.randn(4, 2, 6)

    def count(module: nn.Module) -> int:
        return len(find_pairs(graph_of(module, x)))

    assert count(nn.LSTM(6, 6)) == 0
    assert count(nn.LSTM(6, 6, num_layers=3)) == 0  # each needs the one before
    assert count(nn.LSTM(6, 6, num_layers=3, bidirectional=True)) == 3
    assert count(Two(nn.LSTM(6, 6), nn.GRU(6, 6))) == 1
    assert count(Two(nn.LSTM(6, 6), nn.GRU(6, 7))) == 0
    assert count(Two(nn.LSTM(6, 6), nn.GRU(6, 6), 3)) == 0
    assert count(Two(nn.GRU(6, 6, bidirectional=True), nn.GRU(6, 6))) == 1


class Crossing(nn.Module):
    """The loops of a size are independent, but one of each reads one of the other size: at most one pair can be one loop."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.GRU(6, 8), nn.GRU(8, 4), nn.GRU(6, 4), nn.GRU(4, 8)
        self.first = first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.first:
            found = self.b(self.a(x)[0])[0]
            return found, self.d(self.c(x)[0])[0]
        both = self.a(x)[0], self.c(x)[0]
        return self.b(both[0])[0], self.d(both[1])[0]


@pytest.mark.parametrize("first", [False, True])
def test_pairs_that_would_wait_for_one_another(first: bool) -> None:
    module, x = Crossing(first), torch.randn(3, 2, 6)
    program = joined(module, x, machine("x86-avx512"), 8)
    assert len(loops(program)) == 3
    check(module, x, program)


def test_joint_bodies_name_their_values_apart() -> None:
    (pair,) = find_pairs(graph_of(nn.GRU(6, 6, bidirectional=True), torch.randn(4, 2, 6)))
    node = joint(*pair)
    body = node.attributes["body"]
    assert len({*body.inputs}) == len(body.inputs) == len(node.inputs) and len({*body.outputs}) == len(body.outputs) == len(node.outputs)
    assert all(value.name == name for name, value in body.values.items())
    assert len(body.nodes) == sum(len(one.attributes["body"].nodes) for one in pair)


def about_pairs(program: Program) -> list[Any]:
    return [decision for decision in program.search if "independent loops" in decision.text]


@pytest.mark.parametrize(("target", "threads", "hidden", "taken"), [
    ("x86-avx512", 1, 128, False), ("x86-avx512", 1, 512, False), ("x86-avx512", 8, 128, True), ("h200", 1, 512, True), ("h200", 1, 128, False),
])  # fmt: skip
def test_the_models_decide(target: str, threads: int, hidden: int, taken: bool) -> None:
    """One thread has no barriers to save; on GPUs the kernels of two clusters run at the same time anyway, and those of two grids do not."""
    program = plan_program(graph_of(nn.LSTM(hidden, hidden, bidirectional=True), torch.randn(64, 1, hidden)), machine(target), threads)
    (decision,) = about_pairs(program)
    assert decision.taken == taken and len(loops(program)) == (1 if taken else 2)
    assert decision.kind == JOINT and (decision.ways.predicted[0] < 0.99 * decision.ways.predicted[1]) == taken
    assert "predicted as one" in decision.text and ("stay apart" in decision.text) != taken
    assert decision.text in " ".join(reason for lowered in loops(program) for reason in lowered.region.reasons)


def test_both_ways_by_policy() -> None:
    graph = graph_of(nn.LSTM(128, 128, bidirectional=True), torch.randn(20, 1, 128))
    for policy, count in ((decided(graph, True), 1), (decided(graph, False), 2)):
        for threads in (1, 8):
            program = plan_program(graph, machine("x86-avx512"), threads, policy=policy)
            assert len(loops(program)) == count and "decided by the time of the whole network" in about_pairs(program)[0].text


def test_weights_that_do_not_fit_twice() -> None:
    program = plan_program(graph_of(nn.LSTM(1024, 1024, bidirectional=True), torch.randn(20, 1, 1024)), H200, 1)
    (decision,) = about_pairs(program)
    assert not decision.taken and "no schedule is feasible" in decision.text and decision.ways is None
    assert all("in one kernel" in lowered.schedule for lowered in loops(program)) and len(loops(program)) == 2


def test_loops_of_kernels_for_each_step_stay_apart() -> None:
    program = plan_program(graph_of(nn.LSTM(64, 64, bidirectional=True), torch.randn(20, 1, 64)), machine("a100"), 1)
    assert not about_pairs(program)[0].taken and "kernels for each step" in about_pairs(program)[0].text and len(loops(program)) == 2


def test_what_was_decided_for_another_size() -> None:
    memory = Memory()
    module = nn.LSTM(128, 128, bidirectional=True)
    target = machine("x86-avx512")
    assert len(loops(plan_program(graph_of(module, torch.randn(20, 1, 128)), target, 8, memory=memory))) == 1
    assert set(memory.loops.values()) == {True}
    program = plan_program(graph_of(module, torch.randn(21, 1, 128)), target, 1, memory=memory)
    (decision,) = about_pairs(program)
    assert len(loops(program)) == 1 and decision.taken and "as for another size" in decision.text
    memory.loops.update(dict.fromkeys(memory.loops, False))
    program = plan_program(graph_of(module, torch.randn(21, 1, 128)), target, 8, memory=memory)
    (decision,) = about_pairs(program)
    assert len(loops(program)) == 2 and not decision.taken and "stay apart: as for another size" in decision.text


def test_policies_leave_other_pairs_as_for_another_size() -> None:
    """A policy about other merges has no pair predicted again, and one about a pair only that."""
    graph = graph_of(nn.LSTM(6, 6, num_layers=2, bidirectional=True), torch.randn(3, 1, 6))
    first, second = ((*one.outputs, *other.outputs) for one, other in find_pairs(graph))
    asked: list[str] = []

    def predict(graph: Graph, names: Any) -> dict[str, TimedLoop]:
        asked.extend(names)
        timed = Timed(Region("r", "loop", (), (), (), ()), 1.0)
        return {name: TimedLoop(timed, False, "unknown", True) for name in names}

    for policy, count in ((Policy(refused=frozenset({("other", first)})), 2), (Policy(refused=frozenset({(JOINT, first)})), 3)):
        merged = join_loops(graph, predict, {first: True, second: True}, policy)
        assert sum(node.operator == "scan" for node in merged.graph.nodes) == count
    assert asked == [name for pair in find_pairs(graph)[:1] for name in (*(node.name for node in pair), joint(*pair).name)]


# --- GPUs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize(("kind", "hidden", "batch", "dtype"), [
    ("LSTM", 512, 1, torch.float32), ("GRU", 800, 1, torch.float32), ("LSTM", 512, 64, torch.float16), ("GRU", 512, 16, torch.bfloat16),
    ("LSTM", 128, 1, torch.float32),
])  # fmt: skip
def test_kernels_compile_without_spills(kind: str, hidden: int, batch: int, dtype: torch.dtype, target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    module, x = layer(kind, hidden, batch, dtype, hidden, 16, bidirectional=True)
    program = joined(module, x, machine(target), 1)
    (lowered,) = loops(program)
    assert "in one kernel" in lowered.schedule and ("tensor cores" in lowered.schedule) == (batch > 1)
    sources = [source for source in source_files(program, machine(target)) if set(source.entries) & {kernel.name for kernel in lowered.kernels}]
    for built in compile_kernels(sources, machine(target)):
        assert isinstance(built, Binary)
        assert all(found.spill_bytes == 0 and found.stack_bytes == 0 for found in built.resources.values())


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "hidden", "batch", "dtype"), [
    ("LSTM", 128, 1, torch.float32), ("LSTM", 512, 1, torch.float32), ("GRU", 800, 1, torch.float32), ("tanh", 512, 3, torch.float32),
    ("LSTM", 512, 64, torch.float16), ("GRU", 512, 16, torch.bfloat16), ("LSTM", 256, 64, torch.float32),
])  # fmt: skip
def test_layers_on_the_gpu(kind: str, hidden: int, batch: int, dtype: torch.dtype) -> None:
    """Two layers, joined whatever is predicted; the last in TF32."""
    module, x = layer(kind, hidden, batch, dtype, hidden, 24, bidirectional=True, num_layers=2)
    rounded = dtype == torch.float32 and batch > 3
    policy = decided(graph_of(module, x), True)
    module, x = module.cuda(), x.cuda()
    with mock.patch.object(module_named("tilewright.compile"), "plan_program", partial(plan_program, persistent=True, policy=policy)):
        executable = tilewright.compile(module, (x,), "cuda", precision="tf32" if rounded else "fp32")
    found = [row.schedule for row in executable.plan.rows if row.kind == "loop"]
    assert len(found) == 2 and all("in one kernel" in schedule and ("tensor cores" in schedule) == (batch > 3) for schedule in found)
    for _ in range(3):  # the counter of arrivals is zero again in every call
        results = [result.cpu() for result in tree_leaves(executable(x))]
        if dtype == torch.float32:
            compare(Case("both directions", module.cpu(), (x.cpu(),), tolerance=4e-3 if rounded else 1e-4), results, (x.cpu(),))
        else:
            assert_as_good_as_eager(module.cpu(), (x.cpu(),), results)
        module.cuda()
    executable.close()
