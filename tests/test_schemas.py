"""Schemas: a toy one from outside the package is ranked, explained and compiled like the package's own; forms are matched once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tilewright
from tilewright.codegen.access import flatten
from tilewright.codegen.assemble import single
from tilewright.compile import read
from tilewright.errors import UnsupportedOption
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.estimate import Estimate
from tilewright.ir.expr import index_const
from tilewright.ir.kernel import For, Statement, Store
from tilewright.ir.problem import Problem
from tilewright.ir.region import Lowered, Unsuitable
from tilewright.kernels.columns import Columns, product_of, reject
from tilewright.kernels.counts import counted
from tilewright.kernels.cpu.loops.schema import LOOPS
from tilewright.kernels.cpu.loops.space import LoopSchedule
from tilewright.kernels.registry import lower, registered, schedule_types, schema_of, schemas
from tilewright.kernels.schema import Form, Matching, Numerics, Options, Schema, form_of
from tilewright.partition.plan import plan_program
from tilewright.selection.choice import rank
from tilewright.tuning import serialisation
from tilewright.tuning.choices import remembered
from tilewright.tuning.problems import convolution_problem

CPU = machine("x86-avx2")


@dataclass(frozen=True)
class ScalarSchedule:
    """One thread, one element at a time; `unrolled`: whether the innermost loop is unrolled."""

    unrolled: int

    def __str__(self) -> str:
        return f"scalars unrolled={self.unrolled}"


@dataclass(frozen=True)
class ScalarFacts:
    elements: int
    innermost: int


def match(problem: Problem, here: Machine) -> Form[ScalarFacts, None]:
    step = problem.region.steps[-1]
    if len(problem.region.steps) > 1 or any(name in problem.constants for name in problem.region.inputs):
        raise Unsuitable("not one map of values")
    extents = [axis.extent or 1 for axis in step.axes]
    return Form(ScalarFacts(int(np.prod(extents)), extents[-1] if extents else 1), None)


def space(facts: ScalarFacts, here: Machine, options: Options) -> tuple[Columns, dict[str, int]]:
    candidates = product_of({"unrolled": (0, 1)})
    return reject(candidates, [("the innermost loop is too long to be unrolled", (candidates["unrolled"] > 0) & (facts.innermost > 8))])


def lower_scalars(problem: Problem, form: Form[ScalarFacts, None], schedule: ScalarSchedule, here: Machine) -> Lowered:
    step, layouts = problem.region.steps[-1], problem.layouts
    output = problem.region.outputs[0]
    body: Statement = Store(output, flatten(layouts[output].offset(step.index), layouts), flatten(step.bodies[0], layouts))
    for axis in reversed(step.axes):
        body = For(axis, index_const(axis.extent or 1), body, "unroll" if schedule.unrolled and axis is step.axes[-1] else "serial")
    return single(problem, schedule, body)


SCALARS = Schema(
    name="scalars",
    kinds=("map",),
    schedule=ScalarSchedule,
    match=match,
    space=space,
    counts=lambda facts, rows, here: counted(len(rows["unrolled"]), facts.elements, 4 * facts.elements, 4 * facts.elements),
    estimate=lambda facts, rows, counts, here, options: Estimate({"elements": 1e-15 * counts.flops / (1 + rows["unrolled"])}),
    lower=lower_scalars,
)


def test_a_schema_from_outside_is_chosen_and_compiled() -> None:
    model, x = nn.Sequential(nn.Softplus(), nn.Hardtanh()), torch.randn(3, 5, 7)
    with registered(SCALARS):
        executable = tilewright.compile(model, x, threads=1)
        assert [region.schedule for region in executable.image.program.regions] == ["scalars unrolled=1"]
        torch.testing.assert_close(executable(x), model(x))
        assert serialisation.schedule_of(serialisation.schedule_text(ScalarSchedule(1))) == ScalarSchedule(1)
    executable = tilewright.compile(model, x, threads=1)
    assert "scalars" not in executable.image.program.regions[0].schedule
    assert "ScalarSchedule" not in schedule_types()


def test_its_candidates_stand_beside_the_packages_own() -> None:
    with registered(SCALARS):
        ranking = rank(map_problem(5, 12), CPU)
    assert [part.schema.name for part in ranking.parts] == ["map", "scalars"]
    assert ranking.rejected == {"scalars: the innermost loop is too long to be unrolled": 1}
    assert [str(choice.schedule) for choice in ranking] == ["scalars unrolled=0", f"loops lanes={CPU.vector_lanes()}"]
    found = ranking.find(ScalarSchedule(0))
    assert found is not None and found.terms == {"elements": pytest.approx(6e-14)} and ranking.find(ScalarSchedule(1)) is None


def map_problem(*shape: int) -> Problem:
    """Softplus of a value of this shape."""
    found: list[Problem] = []

    def keep(problem: Problem, here: Machine, threads: int) -> object:
        found.append(problem)
        return rank(problem, here, threads).first()

    plan_program(read(nn.Softplus(), (torch.randn(*shape),)).graph, CPU, 1, keep)  # type: ignore[arg-type]
    return found[0]


def test_where_it_does_not_suit_others_are_asked() -> None:
    problem = map_problem(2, 3)
    constant = replace(problem, constants=frozenset(problem.region.inputs))
    with registered(SCALARS):
        assert [part.schema.name for part in rank(constant, CPU).parts] == ["map"]
        with pytest.raises(Unsuitable, match="not one map of values"):
            lower(constant, ScalarSchedule(0), CPU)
    with pytest.raises(Unsuitable, match="no ScalarSchedule lowers a region of kind map"):
        lower(problem, ScalarSchedule(0), CPU)


def test_names_and_schedules_are_a_schemas_own() -> None:
    before = schemas(CPU, "map")
    for other in (replace(SCALARS, name="map"), replace(SCALARS, schedule=LoopSchedule)):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedOption, match="give it its own"), registered(other):
            pass
    with registered(SCALARS), pytest.raises(UnsupportedOption), registered(SCALARS):
        pass
    assert schemas(CPU, "map") == before == (LOOPS[0],)


def test_other_schedules_may_not_be_called_like_the_packages_own() -> None:
    """Records and stored choices identify schedules by the names of their types."""
    impostor = type("LoopSchedule", (), {})
    with pytest.raises(UnsupportedOption, match="rename its own"), registered(replace(SCALARS, schedule=impostor)):
        pass


def test_no_choice_is_kept_among_candidates_of_a_registered_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a choice does not cover the sources of such a schema."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    here, problem, asked = machine("h200"), convolution_problem(16, 8, 10, 10, 3), []

    def suits(problem: Problem, here: Machine) -> Form[ScalarFacts, None]:
        asked.append(problem)
        raise Unsuitable("none")

    kept = remembered()(problem, here, 1)
    with registered(replace(SCALARS, kinds=("contraction",), match=suits), gpu=True):
        assert remembered()(replace(problem), here, 1).schedule == kept.schedule and len(asked) == 1
    assert len(list(tmp_path.rglob("choices/*.json"))) == 1


def test_options_hold_among_candidates_of_a_registered_schema_too() -> None:
    here, problem = machine("h200"), convolution_problem(64, 64, 7, 7, 3)
    fixed, free = (rank(problem, here, numerics=Numerics(atomics=atomics)).candidates for atomics in (False, True))
    assert free > fixed
    with registered(replace(SCALARS, kinds=("contraction",)), gpu=True):
        both = [remembered(Numerics(atomics=atomics))(replace(problem), here, 1).candidates for atomics in (False, True)]
    assert both[1] - both[0] == free - fixed


def test_registrations_may_end_in_any_order() -> None:
    with ExitStack() as outer:
        with registered(SCALARS):
            outer.enter_context(registered(replace(SCALARS, name="others", kinds=("window",))))
        assert [schema.name for schema in schemas(CPU, "window")][-1] == "others"
        assert "scalars" not in {schema.name for schema in schemas(CPU, "map")}
    assert "others" not in {schema.name for schema in schemas(CPU, "window")}


@pytest.mark.parametrize("target", ["h200", "x86-avx512"])
def test_each_schema_says_what_it_is(target: str) -> None:
    here = machine(target)
    every = {schema for kind in ("map", "window", "row reduction", "scan", "contraction", "attention") for schema in schemas(here, kind)}
    assert len({schema.name for schema in every}) == len(every)
    for kind in ("map", "window", "row reduction", "scan", "contraction", "attention"):
        own = schemas(here, kind)
        assert len({schema.schedule for schema in own}) == len(own) > 0


@pytest.mark.parametrize("target", ["h200", "x86-avx512"])
def test_forms_are_matched_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking, choosing and lowering share the form of a problem; another machine has a form of its own where that depends on the machine."""
    here, problem = machine(target), convolution_problem(16, 8, 10, 10, 3)
    choice = rank(problem, here).first()
    forms = {id(schema): form_of(schema, problem, here) for schema in schemas(here, "contraction")}
    lower(problem, choice.schedule, here)
    assert all(form_of(schema, problem, here) is forms[id(schema)] for schema in schemas(here, "contraction"))
    schema = schema_of(choice.schedule, here, "contraction")
    assert (form_of(schema, problem, replace(here, name="another")) is forms[id(schema)]) == isinstance(schema.match, Matching)
    assert form_of(schema, replace(problem), here) is not forms[id(schema)]
