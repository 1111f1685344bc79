"""Replacing parts of expressions: simultaneously, even if the result simplifies to a replaced part."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.compiled import without_chains
from tests.gpu_cases import Case, check
from tilewright.compile import read
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import (
    Apply,
    Expr,
    Load,
    Var,
    binary,
    checked,
    checks,
    index_const,
    loads,
    replace_loads,
    rewrite,
    substitute,
    variables,
    walk,
)
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.tuning import distinct_problems

Y = Var("y", 10)


@given(st.integers(1, 5))
def test_what_is_put_in_is_not_replaced_again(step: int) -> None:
    assert substitute(Y - step, {Y: Y + step}) == Y
    assert substitute(binary("max", Y - step, index_const(0)), {Y: Y + step}) == binary("max", Y, index_const(0))


def test_variables_change_places() -> None:
    x = Var("x", 10)
    assert substitute(x * 3 + Y, {x: Y, Y: x}) == Y * 3 + x


def test_a_load_that_simplification_leaves_is_not_replaced_again() -> None:
    load, zero = Load("a", (Y,), "i64"), index_const(0)
    moved = rewrite(load + zero * Y, lambda node: Load("a", (node.index[0] + 1,), "i64") if isinstance(node, Load) else node)
    assert moved == Load("a", (Y + 1,), "i64")
    assert replace_loads(load * 1, {"a": load + 1}) == load + 1


VARIABLES = (Y, Var("x", 7), Var("z", 3))
leaves = st.one_of(st.sampled_from(VARIABLES), st.integers(-3, 9).map(index_const))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "min"]), inner, inner).map(lambda drawn: binary(*drawn)),
        st.tuples(st.sampled_from("ab"), st.lists(inner, min_size=1, max_size=2)).map(lambda drawn: Load(drawn[0], tuple(drawn[1]), "i64")),
        inner.map(lambda index: checked(Load("rows", (index,), "i64"), 5, True)),
    ),
    max_leaves=12,
)


@given(trees, st.dictionaries(st.sampled_from(VARIABLES), trees, max_size=2))
def test_parts_without_the_variables_stay(tree: Expr, mapping: dict[Var, Expr]) -> None:
    assert substitute(tree, mapping) == rewrite(tree, lambda node: mapping.get(node, node) if isinstance(node, Var) else node)
    for part in walk(tree):
        if isinstance(part, Apply) and not variables(part) & {*mapping}:
            assert substitute(part, mapping) is part


@given(trees)
def test_contents_are_those_of_all_nodes(tree: Expr) -> None:
    nodes = [*walk(tree)]
    assert loads(tree) == tuple(dict.fromkeys(node for node in nodes if isinstance(node, Load)))
    assert variables(tree) == {node for node in nodes if isinstance(node, Var)}
    assert checks(tree) == tuple(dict.fromkeys(node for node in nodes if isinstance(node, Apply) and node.operation == "checked"))


def test_contents_of_expressions_deeper_than_the_stack() -> None:
    tree: Expr = Load("a", (Y,), "f32")
    for number in range(20_000):
        tree = binary("add", tree, Load("a", (VARIABLES[number % 3],), "f32"))
    assert len(loads(tree)) == 3 and variables(tree) == {*VARIABLES}
    assert substitute(tree, {Var("absent"): Y}) is tree


def test_windows_that_count_what_is_not_padding() -> None:
    """A tile's second row divides by its own count, which is computed from y + 1 - 1."""

    module = nn.Sequential(nn.Conv2d(8, 64, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(64, 8, 1))
    graph, _ = simplify(read(module.eval(), (torch.zeros(1, 8, 10, 10),)).graph)
    target = machine("h200")
    with without_chains():
        (problem,) = (one for one in distinct_problems(graph, target, 1) if one.region.kind == "window")
    inputs = {name: torch.randn(problem.values[name].shape) for name in problem.region.inputs}
    (expected,) = reference_results(problem, inputs).values()
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    case = Case(problem.region, problem.layouts, problem.values, arrays, expected.numpy(), problem.constants)
    ranking = rank(problem, target)
    tiles = [ranking.choice(at).schedule for at in range(ranking.candidates)]
    tiles = [schedule for schedule in tiles if schedule.rows > 1 or schedule.items > 1]
    assert tiles
    for schedule in tiles[:4]:
        check(case, lower(problem, schedule, target))
