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
    select,
    substitute,
    variables,
    walk,
)
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank
from tilewright.tuning.trial_reference import reference_results
from tilewright.tuning.tuning import distinct_problems

X, Y = Var("x", 7), Var("y", 10)


def _larger(smaller: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.one_of(
        st.tuples(smaller, smaller).map(lambda pair: pair[0] + pair[1]),
        st.tuples(smaller, st.integers(1, 4)).map(lambda pair: pair[0] * pair[1]),
        st.tuples(smaller, st.integers(2, 5)).map(lambda pair: pair[0] // pair[1]),
        st.tuples(smaller, smaller).map(lambda pair: select(pair[0] < 3, pair[1], pair[0])),
        st.tuples(st.sampled_from("ab"), smaller).map(lambda pair: Load(pair[0], (pair[1],), "i64")),
        smaller.map(lambda index: checked(index, 4, True, 0)),
    )


expressions = st.recursive(st.one_of(st.sampled_from((X, Y)), st.integers(0, 5).map(index_const)), _larger, max_leaves=8)


@given(expressions)
def test_what_an_expression_has_is_what_its_nodes_are(expr: Expr) -> None:
    nodes = [*walk(expr)]
    assert variables(expr) == {node for node in nodes if isinstance(node, Var)}
    assert loads(expr) == tuple(dict.fromkeys(node for node in nodes if isinstance(node, Load)))
    assert checks(expr) == tuple(dict.fromkeys(node for node in nodes if getattr(node, "operation", "") == "checked"))


@given(expressions)
def test_parts_that_nothing_changes_are_kept(expr: Expr) -> None:
    def renamed(node: Expr) -> Expr:
        return Load("c", node.index, node.dtype) if isinstance(node, Load) else node

    z = Var("z", 3)
    assert rewrite(expr, renamed, plain=False) == rewrite(expr, renamed)
    assert substitute(expr, {X: z + 1}) == rewrite(expr, lambda node: z + 1 if node == X else node)
    assert X in variables(expr) or substitute(expr, {X: z + 1}) is expr


def test_expressions_deeper_than_the_stack() -> None:
    deep: Expr = Load("a", (X,), "f32")
    for number in range(20_000):
        deep = binary("add", deep, Load("a", ((X, Y)[number % 2],), "f32"))
    assert len(loads(deep)) == 2 and variables(deep) == {X, Y}
    assert substitute(deep, {Var("z", 3): X}) is deep
    assert variables(substitute(deep, {X: Y})) == {Y}


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
