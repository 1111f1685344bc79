"""From loops to a `Kernel`: canonical parameter names, free scalars, and a name that is a digest of the code.

Regions that compute the same thing on different values become the same kernel, so a repeated layer is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from types import MappingProxyType

from tilewright.codegen.describe import described, parameter
from tilewright.codegen.lifting import lift_checks
from tilewright.codegen.source import source_text
from tilewright.codegen.trips import counted, given, redefined, shared
from tilewright.ir.expr import INDEX, Expr, Load, checks, constants, loads, rewrite, variables
from tilewright.ir.kernel import (
    FAULTS,
    Allocate,
    Block,
    Buffer,
    For,
    If,
    Kernel,
    Launch,
    Let,
    Statement,
    Store,
    expressions,
    grid_of_trips,
    map_expressions,
    statements,
)
from tilewright.ir.problem import Problem
from tilewright.ir.region import Call, Lowered, Unsuitable
from tilewright.ir.tensor_map import TensorMap


def assemble(
    kind: str,
    body: Statement,
    problem: Problem,
    written: Sequence[str],
    *,
    header: str = "",
    roles: Mapping[str, str] = MappingProxyType({}),
    launch: Launch | None = None,
    blocks_per_processor: int = 0,
    cluster: int = 1,
    growths: Mapping[str, int] = MappingProxyType({}),
    maps: Sequence[TensorMap] = (),
) -> tuple[Kernel, tuple[str, ...]]:
    """The kernel of a body whose loads and stores name values of the problem, and the names of its arguments in order: the values that it reads by
    first use, then those that it writes, and FAULTS if indices are checked. Variables that no loop binds become scalars. `header` is text for the
    reader, followed by one line per parameter; `roles` says what each value is used for. `maps` describe values that the copy engine reads. A body
    that defines TRIPS comes with the growths of its values; others on a CPU get TRIPS where that is possible (`codegen.trips`)."""
    layouts, dtypes = problem.layouts, problem.dtypes
    counts = launch is None and (bool(growths) or any(layouts[name].shape[:1] > (1,) for name in written))  # others gain from constant trip counts
    by_trips = counts and not checks(*expressions(body))  # checks leave loops that threads do not divide
    body = lift_checks(body if by_trips else shared(body, 0), keep=launch is None)
    read = [*(described.buffer for described in maps), *(load.buffer for load in loads(*expressions(body)))]
    used = [name for name in dict.fromkeys(read) if name in layouts and name not in written]
    arguments = (*used, *written)
    taken = {statement.buffer.name for statement in statements(body) if isinstance(statement, Allocate)}.intersection(arguments)
    assert not taken, f"values of the problem and buffers of the kernel have one name: {', '.join(sorted(taken))}"
    names = {name: f"in{i}" for i, name in enumerate(used)}
    names |= {name: "out" if len(written) == 1 else f"out{i}" for i, name in enumerate(written)}
    trips, sizes = 0, {name: layouts[name].size for name in arguments}
    if counts:
        found = given(body, growths) if growths else counted(body, sizes, written)
        if found is not None:
            body, trips, growths = found.body, found.trips, found.growths
        body = shared(body, trips)
    if problem.one is not None:
        trips, spare = trips - trips // 2, trips // 2
        sizes = {name: size - spare * growths.get(name, 0) for name, size in sizes.items()}
        layouts = {**layouts, **problem.one.layouts}
        # so the first half of the trips is all of an image, and nothing else
        if not trips or any(size != layouts[name].size for name, size in sizes.items()):
            raise Unsuitable("its code or memory depends on the number of images")
        body = redefined(body, trips)
    parameters = tuple(Buffer(names[name], dtypes[name], sizes[name], "global", 1, name in written, growths.get(name, 0)) for name in arguments)
    sites = [site for check in checks(*expressions(body)) for site in constants(check.args[3:])]
    faults = (Buffer(FAULTS, INDEX, 1 + max(sites), writable=True),) if sites else ()
    body = map_expressions(body, _renaming(names), lambda name: names.get(name, name))
    bound = {s.variable for s in statements(body) if isinstance(s, (For, Let))}
    special = ("thread_", "block_")
    free = variables(*expressions(body)) - bound
    scalars = tuple(sorted((v for v in free if not v.name.startswith(special)), key=lambda v: v.name))
    called = tuple(replace(described, buffer=names[described.buffer]) for described in maps)
    kernel = Kernel("kernel", (*parameters, *faults), body, launch, scalars, "", blocks_per_processor, cluster, trips, called)
    lines = (parameter(buffer, layouts[name], roles.get(name, "")) for buffer, name in zip(parameters, arguments, strict=True))
    last = (f"{FAULTS}: indices out of range, by place",) if faults else ()
    text = "\n".join(line for line in (header, *lines, *last) if line)
    return named_by_code(replace(kernel, header=text), kind.replace(" ", "_")), (*arguments, *(buffer.name for buffer in faults))


def named_by_code(kernel: Kernel, kind: str) -> Kernel:
    """The kernel with a name that is a digest of its code."""
    return replace(kernel, name=f"{kind}_{_digest(replace(kernel, name='kernel', header=''))}")


def _renaming(names: Mapping[str, str]) -> Callable[[Expr], Expr]:
    """Renames loaded buffers. An expression object that several statements share stays shared."""
    done: dict[int, tuple[Expr, Expr]] = {}  # by identity; the first of the pair keeps the key from being reused

    def renamed(expr: Expr) -> Expr:
        if id(expr) not in done:
            fresh = rewrite(expr, lambda n: replace(n, buffer=names[n.buffer]) if isinstance(n, Load) and n.buffer in names else n, False)
            done[id(expr)] = (expr, fresh)
        return done[id(expr)][1]

    return renamed


def single(problem: Problem, schedule: object, body: Statement, launch: Launch | None = None, blocks_per_processor: int = 0) -> Lowered:
    """Lowers a problem to one kernel with that body, and its call."""
    region = problem.region
    header = f"{described(problem)}\n{schedule}"
    kernel, arguments = assemble(region.kind, body, problem, region.outputs, header=header, launch=launch, blocks_per_processor=blocks_per_processor)
    return Lowered(region, str(schedule), (kernel,), (Call.of(kernel, arguments),))


def _digest(kernel: Kernel) -> str:
    """Digest of the code only: headers (shapes, predictions) may differ for equal code."""
    text = source_text(kernel)
    # one name means one kernel, so the name depends on buffer sizes too
    for buffer in kernel.parameters:
        each = f" {buffer.growth}" if kernel.trips else ""
        text += f"{buffer.dtype} {buffer.size - buffer.growth * max(kernel.trips - 1, 0)}{each};"
    text += repr(kernel.maps) if kernel.maps else ""
    if kernel.launch is not None and kernel.trips:
        text += repr(grid_of_trips(kernel))
    return sha256(text.encode()).hexdigest()[:12]


def block(*parts: Statement | Sequence[Statement]) -> Block:
    """Statements in sequence, with nested lists and blocks flattened."""
    flat: list[Statement] = []
    for part in parts:
        if isinstance(part, Block):
            flat.extend(part.statements)
        elif isinstance(part, (Let, Store, Allocate, For, If)) or not isinstance(part, Sequence):
            flat.append(part)
        else:
            flat.extend(block(*part).statements)
    return Block(tuple(flat))
