"""A reduction shared by several blocks: one kernel with clusters, parts that a second kernel adds in order, or atomic additions to one sum.

Atomic additions have no fixed order, so results may differ in their last bits from run to run; they are used only if a caller asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

from tilewright.codegen.assemble import assemble
from tilewright.codegen.describe import described
from tilewright.graph.contraction import contraction
from tilewright.graph.windows import Pooling, pooling_of
from tilewright.hardware.machine import Machine
from tilewright.ir.computation import Step
from tilewright.ir.expr import Const, Expr, Load, Var, add, index_const, loads, rewrite, substitute
from tilewright.ir.graph import Value
from tilewright.ir.kernel import Block, Kernel, Launch
from tilewright.ir.layout import permuted
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Storage, Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.form import ProductForm, product_form
from tilewright.kernels.gpu.map.lower import lower_map, map_form
from tilewright.kernels.gpu.map.space import MapSchedule
from tilewright.kernels.gpu.window.lower import lower_window, window_form
from tilewright.kernels.gpu.window.space import WindowSchedule


def in_one_or_two(
    problem: Problem,
    form: ProductForm,
    schedule: Any,
    machine: Machine,
    lower: Callable[[ProductForm], tuple[Block, Launch]],
    form_of: Callable[[Problem], ProductForm] = product_form,
    occupancy: Callable[[ProductForm], int] = lambda form: 1,
    maps: Callable[[ProductForm], tuple[TensorMap, ...]] = lambda form: (),
    *,
    split: int,
    cluster: bool = False,
    atomics: bool = False,
    together: int = 1,
) -> Lowered:
    """One kernel that stores the region's output, if `split` is 1 or the blocks of a split are a `cluster`. Otherwise one that stores parts and one
    that adds them in order, or, with `atomics`, one that stores zeros, one that adds to them, and one for the map after the sum.

    `form` is the problem's form, and `form_of` gives the form of a problem that stores parts or the bare sum. `lower` makes the body for a form; the
    form's offset depends on a variable `part` if it stores parts. `occupancy`: blocks per processor to request from the assembler; `maps`: of the
    tensors that the copy engine reads. `together`: blocks of a cluster for another reason than the split."""
    whole = form

    def assembled(part: Problem) -> tuple[ProductForm, Kernel, Call]:
        form = whole if part is problem else form_of(part)
        body, launch = lower(form)
        kernel, names = assemble(
            problem.region.kind,
            body,
            part.with_storage(form.storage),
            (form.output,),
            header=f"{described(part)}\n{schedule}",
            roles={**{load.buffer: "A" for load in loads(form.a)}, **{load.buffer: "B" for load in loads(form.b)}},
            launch=launch,
            blocks_per_processor=occupancy(form),
            cluster=split if cluster else together,
            maps=maps(form),
        )
        return form, kernel, Call(kernel.name, names)

    if split == 1 or cluster:
        form, kernel, call = assembled(problem)
        return Lowered(problem.region, str(schedule), (kernel,), (call,), form.storage)
    if atomics:
        first, after, work = summed(problem)
        zeroing = _mapped(_zeroing(first))
        form, kernel, call = assembled(first)
        second = _mapped(after) if after is not None else None
    else:
        first, adding, work = in_parts(problem, split)
        zeroing = None
        form, kernel, call = assembled(first)
        threads = 64 if _elements(work) // split < 64 * 4 * machine.processors else 256
        added = window_form(adding)
        second = lower_window(adding, added, WindowSchedule(threads, 1, added.facts.vector_width), machine)
    kernels: tuple[Kernel, ...] = (kernel,)
    calls: tuple[Call, ...] = (call,)
    if zeroing is not None:
        kernels, calls = (*zeroing.kernels, *kernels), (*zeroing.calls, *calls)
    if second is not None:
        kernels, calls = (*kernels, *second.kernels), (*calls, *second.calls)
    return Lowered(problem.region, str(schedule), kernels, calls, {**form.storage, **work})


def in_parts(problem: Problem, split: int) -> tuple[Problem, Problem, dict[str, Storage]]:
    """A problem that stores partial sums [split, batch, m, n], one that adds them up and stores the region's element, and the workspace. If results
    are pooled, the second one adds the parts of each pixel of a window."""
    region, step = problem.region, problem.region.steps[0]
    name = f"{region.name}#parts"
    part = Var("part", split)
    shape = (split, *(axis.extent or 1 for axis in step.axes))
    order = [0, *(1 + place for place in _order(problem))]
    work = Storage(Value(name, shape, step.dtypes[0]), permuted(shape, order))
    first = replace(region, steps=(replace(step, index=(part, *step.axes)),), outputs=(name,))
    pooling = pooling_of(region.steps)
    if pooling is None:
        body = Load(name, (part, *step.axes), step.dtypes[0])
        after: tuple[Step, ...] = (replace(step, bodies=(body,), reduction=(part,)), *region.steps[1:])
    else:
        after = _pooling_parts(pooling, name, split)
    second = replace(region, kind="window", steps=after)
    stored = problem.with_storage({name: work})
    return replace(stored, region=first), replace(stored, region=second, constants=frozenset()), {name: work}


def _pooling_parts(pooling: Pooling, parts: str, split: int) -> tuple[Step, ...]:
    """The pooling of what would be stored of the sum of `split` parts."""
    step, last, pool = pooling.before[0], pooling.before[-1], pooling.pool
    read = pool.bodies[0]
    assert isinstance(read, Load)

    def added(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer != step.name:
            return node
        each: list[Expr] = [Load(parts, (index_const(number), *node.index), node.dtype) for number in range(split)]
        return reduce(add, each)

    value = last.bodies[0] if last is not step else Load(step.name, step.axes, step.dtypes[0])
    at = {place: position for place, position in zip(last.index, read.index, strict=True) if isinstance(place, Var)}
    pooled = replace(pool, bodies=(substitute(rewrite(value, added), at),))
    return (pooled,) if pooling.after is None else (pooled, pooling.after)


def summed(problem: Problem) -> tuple[Problem, Problem | None, dict[str, Storage]]:
    """A problem that stores the bare sum [batch, m, n], one for the map after it, and the workspace; without a map the sum is the output."""
    region = problem.region
    if len(region.steps) == 1:
        return problem, None, {}
    step, last = region.steps[0], region.steps[-1]
    if len(region.steps) > 2 or last.kind != "map":
        raise Unsuitable(f"rows of region {region.name} are reduced, whose sums blocks cannot share")
    name = f"{region.name}#sum"
    shape = tuple(axis.extent or 1 for axis in step.axes)
    work = Storage(Value(name, shape, step.dtypes[0]), permuted(shape, _order(problem)))
    first = replace(region, steps=(replace(step, index=step.axes),), outputs=(name,))

    def stored(node: Expr) -> Expr:
        return replace(node, buffer=name) if isinstance(node, Load) and node.buffer == step.name else node

    after = replace(last, bodies=tuple(rewrite(body, stored) for body in last.bodies))
    mapped = problem.with_storage({name: work})
    return replace(mapped, region=first), replace(mapped, region=replace(region, kind="map", steps=(after,))), {name: work}


def _order(problem: Problem) -> list[int]:
    """Indices of the sum's axes in the order batch, m, n."""
    step = problem.region.steps[0]
    found = contraction(step, problem.constants)
    if found is None:
        raise Unsuitable(f"the sum of region {problem.region.name} is not a matrix product")
    return [step.axes.index(axis) for axis in (*found.batch, *found.m, *found.n)]


def _zeroing(problem: Problem) -> Problem:
    """A problem that stores zeros where the given one stores its sum."""
    step = problem.region.steps[0]
    zeros = Step("zeros", step.shape, step.axes, (Const(0.0, step.dtypes[0]),), index=step.index)
    return replace(problem, region=replace(problem.region, kind="map", steps=(zeros,), inputs=()))


def _mapped(problem: Problem) -> Lowered:
    """A map with one vector per thread, as wide as its accesses allow."""
    form = map_form(problem)
    return lower_map(problem, form, MapSchedule(256, 1, form.facts.vector_width))


def _elements(work: Mapping[str, Storage]) -> int:
    return sum(item.value.elements for item in work.values())
