"""The memory plan: buffers that are live at the same time never overlap, halos keep their zeros, and memory is reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import limited
from tests.runtime_programs import ProgramBuilder, chain
from tilewright.ir.graph import Value
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.region import Storage
from tilewright.runtime.accesses import SEGMENTS, Extent, accesses, ancestors, dependencies
from tilewright.runtime.loadable import LoadableProgram, loadable
from tilewright.runtime.memory_plan import Lifetime, MemoryPlan, assign_places, lifetimes, place, plan_memory
from tilewright.runtime.soundness import MOST_BUFFERS

HALO = channels_last((1, 4, 5, 5)).with_halo(((0, 0), (0, 0), (1, 1), (1, 1)))
OTHER_HALO = channels_last((1, 4, 5, 5)).with_halo(((0, 0), (0, 0), (2, 2), (2, 2)))


@st.composite
def buffers(draw: st.DrawFn) -> list[Lifetime]:
    result = []
    for i in range(draw(st.integers(0, 30))):
        first = draw(st.integers(0, 20))
        last = first + draw(st.integers(0, 8))
        layout = draw(st.sampled_from([None, None, None, HALO, OTHER_HALO]))
        zeroed = (layout, draw(st.sampled_from(["f32", "f64"]))) if layout else None
        size = layout.size * (4 if zeroed[1] == "f32" else 8) if layout and zeroed else draw(st.integers(0, 5000))
        result.append(Lifetime(f"b{i}", size, first, last, zeroed))
    return result


@settings(deadline=None)
@given(buffers(), st.sampled_from([64, 256]))
def test_nothing_that_lives_at_one_time_overlaps(items: list[Lifetime], alignment: int) -> None:
    plan = place(items, alignment)
    assert set(plan.offsets) == {b.name for b in items}
    ranges = {b.name: (plan.offsets[b.name], plan.offsets[b.name] + b.bytes) for b in items}
    for b in items:
        start, end = ranges[b.name]
        assert start % alignment == 0 and 0 <= start and end <= plan.bytes
    for i, a in enumerate(items):
        for b in items[:i]:
            overlap = ranges[a.name][0] < ranges[b.name][1] and ranges[b.name][0] < ranges[a.name][1]
            if overlap:
                assert a.last < b.first or b.last < a.first
                # buffers that need zeros share memory only with such buffers of exactly the same place and size
                assert a.zeroed == b.zeroed
                assert a.zeroed is None or ranges[a.name] == ranges[b.name]
    assert plan.bytes <= plan.unshared_bytes


@settings(deadline=None)
@given(buffers())
def test_peak_is_at_least_what_lives_at_one_time(items: list[Lifetime]) -> None:
    plan = place(items)
    peak = max((sum(b.bytes for b in items if b.first <= t <= b.last) for t in range(40)), default=0)
    assert plan.bytes >= peak


def test_a_chain_takes_the_memory_of_two_values() -> None:
    items = [Lifetime(f"b{i}", 1000, i, i + 1) for i in range(50)]
    plan = place(items)
    assert plan.bytes == 2048 and plan.unshared_bytes == 50 * 1024


def test_a_chain_with_halo_takes_two_slots() -> None:
    items = [Lifetime(f"b{i}", HALO.size * 4, i, i + 1, (HALO, "f32")) for i in range(50)]
    assert len(set(place(items).offsets.values())) == 2


def test_best_fit_takes_the_smallest_gap() -> None:
    walls = [Lifetime(f"w{i}", 6400, 0, 9) for i in range(3)]
    holes = [Lifetime("large", 1280, 0, 4), Lifetime("small", 640, 0, 4)]
    late = Lifetime("late", 600, 5, 9)
    plan = place([*walls, *holes, late])
    # after `large` and `small` are dead, only the place of `small` (the end) or of `large` is free
    assert plan.bytes == 3 * 6400 + 1280 + 640 and plan.offsets["late"] >= 3 * 6400


@pytest.mark.parametrize("kind", ["all at once", "one after another", "nested", pytest.param("halos", marks=pytest.mark.slow)])
def test_many_buffers_are_placed(kind: str) -> None:
    """As many buffers as a file may have; a quadratic algorithm in Python takes minutes."""
    count = MOST_BUFFERS
    lives: Callable[[int], tuple[int, int]] = {"one after another": lambda i: (i, i + 1), "nested": lambda i: (i // 2, count - i // 2)}.get(
        kind, lambda i: (0, count)
    )
    zeroed = (HALO, "f32") if kind == "halos" else None
    items = [Lifetime(f"b{i}", HALO.size * 4 if zeroed else 64 * (1 + i % 97), *lives(i), zeroed) for i in range(count)]
    with limited(60):
        plan = place(items)
    peak = 2 * 64 * 97 if kind == "one after another" else plan.unshared_bytes
    assert len(plan.offsets) == count and plan.bytes <= peak


def test_offsets_are_those_of_a_plain_search() -> None:
    """Equal to best fit implemented naively, which looks at all placed buffers for each."""
    random = Random(0)
    for _ in range(20):
        items = [Lifetime(f"b{i}", random.randint(1, 5000), first := random.randint(0, 60), first + random.randint(0, 20)) for i in range(120)]
        placed: list[tuple[int, Lifetime]] = []
        for item in sorted(items, key=lambda b: (-b.bytes, b.first, b.name)):
            cursor, best = 0, None
            for offset, other in sorted((p for p in placed if p[1].first <= item.last and item.first <= p[1].last), key=lambda p: p[0]):
                if offset - cursor >= item.bytes and (best is None or offset - cursor < best[0]):
                    best = offset - cursor, cursor
                cursor = max(cursor, -(-(offset + other.bytes) // 64) * 64)
            placed.append((cursor if best is None else best[1], item))
        assert place(items).offsets == {item.name: offset for offset, item in placed}


def test_a_long_chain_of_aliases_has_one_root() -> None:
    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("relu", ("x",), "out", (4,), "")
    program = loadable(builder.program(("out",)))
    count = 50_000
    program = replace(program, aliases={f"a{i}": f"a{i + 1}" for i in range(count)})
    with limited(60):
        assert {program.root(f"a{i}") for i in range(count)} == {f"a{count}"}
    with pytest.raises(ValueError, match="circle"):
        replace(program, aliases={"a": "b", "b": "c", "c": "b"}).root("a")


def test_lifetimes_follow_calls_aliases_and_repetition() -> None:
    builder = ProgramBuilder({"x": (4,)})
    for i, source in enumerate(["x", "v0", "v1"]):
        builder.kernel("relu", (source,), f"v{i}", (4,), "(void)x0; (void)y;")
    builder.alias("view", "v0", (2, 2))
    builder.kernel("relu", ("v2",), "v3", (4,), "(void)x0; (void)y;", repeat=3)
    builder.kernel("relu", ("view",), "v4", (4,), "(void)x0; (void)y;")
    builder.kernel("relu", ("v3",), "out", (4,), "(void)x0; (void)y;")
    program = loadable(builder.program(("out",)))
    places = assign_places(program)
    assert set(places.arena) == {"v0", "v1", "v2", "v3", "v4"} and set(places.outputs) == {"out"}
    found = {b.name: (b.first, b.last) for b in lifetimes(program, places.arena)}
    assert found == {"v0": (0, 4), "v1": (1, 2), "v2": (2, 3), "v3": (3, 5), "v4": (4, 4)}


def test_a_pytorch_region_keeps_what_its_nodes_read() -> None:
    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("relu", ("x",), "a", (4,), "")
    builder.kernel("relu", ("a",), "copy", (4,), "")
    builder.kernel("relu", ("copy",), "b", (4,), "")
    builder.kernel("relu", ("b",), "out", (4,), "")
    last = builder.regions[2]
    node = replace(last.region.nodes[0], inputs=("a",))  # the kernel would read the copy instead of the node's input
    builder.nodes[2] = node
    builder.regions[2] = replace(last, region=replace(last.region, kind="torch", nodes=(node,)), kernels=(), calls=())
    program = loadable(builder.program(("out",)))
    found = {b.name: (b.first, b.last) for b in lifetimes(program, assign_places(program).arena)}
    assert found == {"a": (0, 2), "copy": (1, 2), "b": (2, 3)}


def test_a_repeated_region_keeps_its_workspaces_throughout() -> None:
    from tilewright.ir.kernel import Block, Buffer, Kernel
    from tilewright.ir.region import Call

    builder = ProgramBuilder({"x": (4,)})
    builder.kernel("relu", ("x",), "out", (4,), "")
    workspaces = {name: Storage(Value(name, (4,), "f32"), row_major((4,))) for name in ("w1", "w2")}
    kernels = tuple(Kernel(f"k{i}", (Buffer("a", "f32", 4), Buffer("b", "f32", 4, writable=True)), Block(())) for i in range(3))
    calls = (Call("k0", ("x", "w1")), Call("k1", ("w1", "w2")), Call("k2", ("w2", "out")))
    builder.regions[0] = replace(builder.regions[0], kernels=kernels, calls=calls, storage=workspaces)
    once = loadable(builder.program(("out",)))
    assert {b.name: (b.first, b.last) for b in lifetimes(once, ("w1", "w2"))} == {"w1": (0, 1), "w2": (1, 2)}
    builder.regions[0] = replace(builder.regions[0], repeat=5)
    often = loadable(builder.program(("out",)))
    assert {b.name: (b.first, b.last) for b in lifetimes(often, ("w1", "w2"))} == {"w1": (0, 2), "w2": (0, 2)}


def test_rounded_layouts_count_as_zeroed() -> None:
    from tilewright.ir.layout import Layout

    blocked = Layout((1, 5, 4), ((0, 0), (1, 0), (2, 0), (1, 4)))
    builder = ProgramBuilder({"x": (1, 5, 4)})
    builder.kernel("relu", ("x",), "a", (1, 5, 4), "", layout=blocked)
    builder.kernel("relu", ("a",), "out", (1, 5, 4), "")
    (only,) = lifetimes(loadable(builder.program(("out",))), ("a",))
    assert only.zeroed == (blocked, "f32") and only.bytes == blocked.size * 4
    assert lifetimes(loadable(chain(1).program(("r0",))), ("p0",))[0].zeroed is None
    assert not row_major((3,)).is_padded


def test_plan_of_a_program_prints_its_sizes() -> None:
    plan = plan_memory(loadable(chain(5).program(("r4",))))
    assert "without reuse" in str(plan) and len(plan.offsets) == 14


@st.composite
def branching(draw: st.DrawFn) -> LoadableProgram:
    """Calls that read one or two earlier values, some repeated, some of PyTorch, some with a halo around their result."""
    builder = ProgramBuilder({"x": (1, 4, 5, 5)})
    names, shape = ["x"], (1, 4, 5, 5)
    for i in range(draw(st.integers(1, 14))):
        sources = draw(st.lists(st.sampled_from(names[-6:]), min_size=1, max_size=2, unique=True))
        kind = draw(st.sampled_from(["kernel"] * 8 + ["repeated", "torch"]))
        layout = draw(st.sampled_from([None, None, None, HALO]))
        if kind == "torch":
            builder.torch("relu", None, sources, {f"v{i}": (shape, "f32")})
        else:
            builder.kernel("relu", sources, f"v{i}", shape, "", layout=layout, repeat=3 if kind == "repeated" else 1)
        names.append(f"v{i}")
    return loadable(builder.program((names[-1],)))


def orders(program: LoadableProgram, plan: MemoryPlan | None) -> list[int]:
    """For each call the earlier calls that precede it, as bits, for buffers in their places or each in its own."""

    def extent(name: str) -> Extent:
        root = program.root(name)
        if plan is None or root not in plan.offsets:
            return Extent(root, 0, 1, root, program.box(name))
        return Extent("arena", plan.offsets[root], plan.offsets[root] + plan.sizes[root], root, program.box(name))

    found: list[tuple[list[Extent], list[Extent]]] = []
    for region in program.regions:
        names = program.nodes[region.nodes[0]].inputs, program.nodes[region.nodes[0]].outputs
        own = accesses(program, region.calls, extent) if region.calls else [tuple([extent(n) for n in each] for each in names)]
        found += [([SEGMENTS, *reads], [*([SEGMENTS] if not region.calls else []), *writes]) for reads, writes in own * region.repeat]
    return ancestors(dependencies(found))


@settings(deadline=None)
@given(branching())
def test_concurrent_calls_stay_so(program: LoadableProgram) -> None:
    """No call waits for another because their buffers share a place, except for those with zeros around them."""
    plan = plan_memory(program, 256, cache_bytes=1 << 30)
    found = {buffer.name: buffer for buffer in lifetimes(program, assign_places(program).arena)}
    assert orders(program, plan) == orders(program, None)
    assert plan.bytes <= plan.unshared_bytes
    for name, buffer in found.items():
        for other in found:
            start, end = (max(plan.offsets[name], plan.offsets[other]), min(plan.offsets[each] + plan.sizes[each] for each in (name, other)))
            if name != other and start < end:
                assert buffer.zeroed == found[other].zeroed


def test_branches_share_no_memory_where_there_is_enough() -> None:
    builder = ProgramBuilder({"x": (64,)})
    for branch in "ab":
        for i in range(4):
            builder.kernel("relu", ("x" if i == 0 else f"{branch}{i - 1}",), f"{branch}{i}", (64,), "")
    builder.kernel("add", ("a3", "b3"), "out", (64,), "")
    program = loadable(builder.program(("out",)))
    in_turn, concurrent = plan_memory(program, 256), plan_memory(program, 256, 1 << 20)
    assert (in_turn.bytes, concurrent.bytes) == (3 * 256, 4 * 256)
    last = orders(program, concurrent)
    assert last[7] == 0b01110000 and orders(program, in_turn)[7] & 0b1111
    assert plan_memory(program, 256, 1).offsets == in_turn.offsets  # a third more than the other, and than the cache
