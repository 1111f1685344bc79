"""Footprints against the integer set library, data movement against the paper's example, against an LRU cache, and against cachegrind."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache_misses import build_driver, count_misses
from bench.layers import layer
from bench.tuna_misses import tuna_misses
from tests.draws import draws
from tilewright.analysis.cpu.caches import LevelMisses, cache_misses, misses_of_levels
from tilewright.analysis.cpu.footprints import Strided, distinct_lines, line_intervals, lines_by_set, strided
from tilewright.analysis.cpu.loop_tree import LoopTree, loop_tree
from tilewright.codegen.source import source_text
from tilewright.hardware import machine as find_machine
from tilewright.hardware.machine import Cache
from tilewright.ir.expr import Apply, Expr, Load, Var, binary, index_const
from tilewright.ir.kernel import Block, Buffer, For, If, Kernel, Let, Statement, Store
from tilewright.kernels.registry import lower
from tilewright.selection.choice import rank
from tilewright.toolchain.binary import Binary, SourceFile
from tilewright.toolchain.build import compile_kernels
from tilewright.tuning.dataset import layer_problem
from tilewright.tuning.problems import convolution_problem

AVX2 = find_machine("x86-avx2")


def cache(lines: int, line_bytes: int = 64, ways: int = 0, level: int = 1) -> Cache:
    return Cache(level, lines * line_bytes, line_bytes, ways, 1, 64.0, 4.0)


def misses_of_level(tree: LoopTree, one: Cache) -> LevelMisses:
    return misses_of_levels(tree, (one,))[0]


# --- footprints ---

TERMS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 8, 16, 24, 64, 96, -4, -16]), st.integers(1, 7)), min_size=1, max_size=4)


def points(start: int, terms: Sequence[tuple[int, int]]) -> set[int]:
    found = {start}
    for stride, count in terms:
        found = {point + stride * i for point in found for i in range(count)}
    return found


@given(start=st.integers(-50, 50), terms=TERMS)
@settings(max_examples=80, deadline=None)
def test_counts_equal_those_of_the_integer_set_library(start: int, terms: list[tuple[int, int]]) -> None:
    isl = pytest.importorskip("islpy", reason="islpy, of the extra dev, is not installed")
    indices = [f"i{d}" for d in range(len(terms))]
    address = " + ".join([str(start), *(f"{stride} * {index}" for (stride, _), index in zip(terms, indices, strict=True))])
    bounds = " and ".join(f"0 <= {index} < {count}" for (_, count), index in zip(terms, indices, strict=True))
    domain = f"exists {', '.join(indices)}: {bounds}"
    elements = int(isl.Set(f"{{ [x] : {domain} and x = {address} }}").count_val().to_python())
    lines = int(isl.Set(f"{{ [l] : {domain} and 16 l <= {address} < 16 l + 16 }}").count_val().to_python())
    found = strided(start, terms)
    if found.exact:
        assert (found.elements, distinct_lines([found], 16)) == (elements, lines)
    else:
        assert found.elements >= elements and distinct_lines([found], 16) >= lines


@given(
    start=st.integers(0, 40), terms=TERMS, line=st.sampled_from([1, 4, 16]), phase=st.sampled_from([1, 2, 6, 8, 48]), sets=st.sampled_from([1, 8, 64])
)
@settings(max_examples=80, deadline=None)
def test_lines_phases_and_cache_sets_by_enumeration(start: int, terms: list[tuple[int, int]], line: int, phase: int, sets: int) -> None:
    found = strided(start, terms)
    if not found.exact:
        return
    touched = points(start, terms)
    moved = [len({(point + phase * k) // line for point in touched}) for k in range(line)]
    assert distinct_lines([found], line, phase) == pytest.approx(sum(moved) / line)
    counts = [0] * sets
    for number in {point // line for point in touched}:
        counts[number % sets] += 1
    assert lines_by_set(line_intervals([found], line), sets).tolist() == counts


@given(parts=st.lists(st.tuples(st.integers(0, 200), TERMS), min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_unions_are_exact(parts: list[tuple[int, list[tuple[int, int]]]]) -> None:
    sets = [strided(start, terms) for start, terms in parts]
    if not all(found.exact for found in sets):
        return
    lines = {point // 16 for start, terms in parts for point in points(start, terms)}
    assert distinct_lines(sets, 16) == len(lines)
    first, last = line_intervals(sets, 16)
    assert {number for a, b in zip(first, last, strict=True) for number in range(a, b + 1)} == lines


def test_convolution_windows_in_closed_form() -> None:
    # rows y * 2 + r of 5 outputs under a filter of 3 overlap; y * 4 + r do not; the channels of a pixel are adjacent
    channels, width = 32, 100
    assert strided(0, [(2 * width * channels, 5), (width * channels, 3), (1, channels)]).elements == 11 * channels
    assert strided(0, [(4 * width * channels, 5), (width * channels, 3), (1, channels)]).elements == 15 * channels
    assert strided(0, [(1, 8), (8, 4), (32, 10)]) == Strided(0, ((1, 320),))
    # 2 x + 3 y is not separable: every integer in its range, which is more than the 3 x 3 values
    assert strided(0, [(2, 4), (3, 4)]) == Strided(0, ((1, 16),), exact=False)


# --- kernels ---


def loop(name: str, extent: int, body: Statement | Sequence[Statement], kind: str = "serial") -> tuple[Var, Statement]:
    variable = Var(name, extent)
    return variable, For(variable, index_const(extent), body if isinstance(body, Statement) else Block(tuple(body)), kind)


def nest(axes: Sequence[Var], body: Statement) -> Statement:
    for axis in reversed(axes):
        body = For(axis, index_const(axis.extent or 0), body)
    return body


def element(buffer: str, offset: Expr) -> Expr:
    return Load(buffer, (offset,), "f32")


def accumulate(buffer: str, offset: Expr, a: Expr, b: Expr) -> Statement:
    product = Apply("mul", (a, b), "f32")
    return Store(buffer, offset, Apply("add", (element(buffer, offset), product), "f32"))


def two_products(n: dict[str, int], t: dict[str, int]) -> Kernel:
    """Listing 1: C = A B and E = C D, the tile loops of i and j fused."""
    it, jt, k = Var("it", n["i"] // t["i"]), Var("jt", n["j"] // t["j"]), Var("k", n["k"])
    i1, j1, i2, j2, l2 = Var("i1", t["i"]), Var("j1", t["j"]), Var("i2", t["i"]), Var("j2", t["j"]), Var("l", n["l"])

    def at(row: Expr, column: Expr, width: str) -> Expr:
        return row * n[width] + column

    first = accumulate(
        "C", at(it * t["i"] + i1, jt * t["j"] + j1, "j"), element("A", at(it * t["i"] + i1, k, "k")), element("B", at(k, jt * t["j"] + j1, "j"))
    )
    second = accumulate(
        "E", at(it * t["i"] + i2, l2, "l"), element("C", at(it * t["i"] + i2, jt * t["j"] + j2, "j")), element("D", at(jt * t["j"] + j2, l2, "l"))
    )
    body = nest([it, jt], Block((nest([k, i1, j1], first), nest([l2, i2, j2], second))))
    sizes = {"A": n["i"] * n["k"], "B": n["k"] * n["j"], "C": n["i"] * n["j"], "D": n["j"] * n["l"], "E": n["i"] * n["l"]}
    return Kernel("two_products", tuple(Buffer(name, "f32", size, writable=name in "CE") for name, size in sizes.items()), body)


def test_the_papers_two_matrix_products() -> None:
    n, t = {"i": 64, "j": 96, "k": 40, "l": 56}, {"i": 8, "j": 12}
    tile = t["i"] * t["j"] + t["i"] * n["l"] + t["j"] * n["l"] + t["j"] * n["k"] + t["i"] * n["k"]
    row = t["i"] * n["j"] + t["i"] * n["l"] + n["j"] * n["l"] + n["j"] * n["k"] + t["i"] * n["k"]
    tree = loop_tree(two_products(n, t))
    # lines of one element, as in the paper: the capacity holds an iteration of jt (with the part that it shares with the next)
    found = misses_of_level(tree, cache(tile + t["i"] * t["j"], line_bytes=4))
    assert found.total == row * (n["i"] // t["i"])
    assert found.misses == {"C": 64 * 96, "A": 64 * 40, "B": 8 * 40 * 96, "E": 64 * 56, "D": 8 * 96 * 56}
    # the paper's own rule agrees as long as no whole tensor that `it` does not index fits
    for lines in (tile, 3 * tile // 2):
        assert tuna_misses(tree, cache(lines, line_bytes=4)) == found.total
    # everything fits: each element once
    whole = misses_of_level(tree, cache(64 * 40 + 40 * 96 + 64 * 96 + 96 * 56 + 64 * 56, line_bytes=4))
    assert whole.misses == whole.footprint and whole.total == 64 * 40 + 40 * 96 + 64 * 96 + 96 * 56 + 64 * 56
    # one iteration of jt does not fit: its reuse of A and E is lost as well
    small = misses_of_level(tree, cache(tile // 2, line_bytes=4))
    assert small.misses["E"] > found.misses["E"] and small.misses["A"] > found.misses["A"]


# --- against a cache, access by access ---


def addresses(statement: Statement, bases: dict[str, int], values: dict[Var, int]) -> Iterator[int]:
    """Byte addresses of the accesses to float32 in program order."""
    if isinstance(statement, Block):
        for child in statement.statements:
            yield from addresses(child, bases, values)
    elif isinstance(statement, For):
        for value in range(evaluate(statement.extent, values)):
            yield from addresses(statement.body, bases, {**values, statement.variable: value})
    elif isinstance(statement, If):
        side = statement.then if evaluate(statement.condition, values) else statement.otherwise
        if side is not None:
            yield from addresses(side, bases, values)
    else:
        assert isinstance(statement, Store)
        stack = [statement.value]
        while stack:
            node = stack.pop()
            if isinstance(node, Load):
                yield bases[node.buffer] + 4 * evaluate(node.index[0], values)
            elif isinstance(node, Apply):
                stack.extend(reversed(node.args))
        yield bases[statement.buffer] + 4 * evaluate(statement.offset, values)


def evaluate(expr: Expr, values: dict[Var, int]) -> int:
    if isinstance(expr, Var):
        return 0 if expr.extent == 1 else values[expr]
    if isinstance(expr, Apply):
        a, b = (evaluate(arg, values) for arg in expr.args)
        return {"add": a + b, "sub": a - b, "mul": a * b, "min": min(a, b), "lt": int(a < b)}[expr.operation]
    assert not isinstance(expr, Load)
    return int(expr.value)


def line_trace(kernel: Kernel, line_bytes: int = 64) -> list[int]:
    """Cache lines in the order in which the kernel touches them."""
    bases, position = {}, 0
    for number, buffer in enumerate(kernel.parameters):
        bases[buffer.name] = position
        position += (buffer.size * 4 // line_bytes + 5 + 7 * number) * line_bytes
    return [address // line_bytes for address in addresses(kernel.body, bases, {})]


def simulated(trace: Sequence[int], lines: int, ways: int) -> int:
    """Misses of a least-recently-used cache (0 ways: fully associative)."""
    ways = ways or lines
    sets: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(lines // ways)]
    misses = 0
    for number in trace:
        held = sets[number % len(sets)]
        if number in held:
            held.move_to_end(number)
        else:
            misses += 1
            held[number] = None
            if len(held) > ways:
                held.popitem(last=False)
    return misses


def convolution(rows: int, columns: int, outputs: int, channels: int, stride: int, width: int) -> Kernel:
    """A small direct convolution, 3 x 3, tiled over columns with a partial tile at the end."""
    y, tile, r, s, c, x, k = (Var(name, e) for name, e in zip("ytrscxk", (rows, -(-columns // width), 3, 3, channels, width, outputs), strict=True))
    pixels = (columns - 1) * stride + 3
    column = tile * width + x
    a = element("a", ((y * stride + r) * pixels + column * stride + s) * channels + c)
    b = element("b", ((r * 3 + s) * channels + c) * outputs + k)
    length: Expr = index_const(width) if columns % width == 0 else binary("min", columns - tile * width, index_const(width))
    inner = nest([r, s, c], For(x, length, nest([k], accumulate("out", (y * columns + column) * outputs + k, a, b))))
    sizes = {"a": ((rows - 1) * stride + 3) * pixels * channels, "b": 9 * channels * outputs, "out": rows * columns * outputs}
    parameters = tuple(Buffer(name, "f32", size, writable=name == "out") for name, size in sizes.items())
    return Kernel("convolution", parameters, nest([y, tile], inner))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("extents", [(3, 12, 8, 16, 1, 4), (3, 10, 16, 8, 2, 4), (2, 7, 8, 32, 1, 7)])
def test_predictions_stand_beside_an_exact_cache(extents: tuple[int, int, int, int, int, int]) -> None:
    kernel = convolution(*extents)
    tree, trace = loop_tree(kernel), line_trace(kernel)
    for lines in (32, 64, 128):
        for ways in (0, 8):
            assert misses_of_level(tree, cache(lines, ways=ways)).total == pytest.approx(simulated(trace, lines, ways), rel=0.25), (lines, ways)


def test_strides_that_fall_into_one_set_conflict() -> None:
    # 12 rows 1 KiB apart, read again and again: 12 lines, but all of them in one of 16 sets of 8 ways
    again, row = Var("again", 10), Var("row", 12)
    kernel = Kernel(
        "strides", (Buffer("a", "f32", 12 * 256), Buffer("out", "f32", 16, writable=True)),
        nest([again, row], Store("out", index_const(0), element("a", row * 256))),
    )  # fmt: skip
    tree, trace = loop_tree(kernel), line_trace(kernel)
    assert misses_of_level(tree, cache(128, ways=8)).misses["a"] == 120 == simulated(trace, 128, 8) - 1
    assert misses_of_level(tree, cache(128, ways=16)).misses["a"] == 12 == simulated(trace, 128, 16) - 1
    assert misses_of_level(tree, cache(128)).misses["a"] == 12


def test_guards_and_partial_extents_are_divided() -> None:
    at, inner = Var("at", 10), Var("inner", 8)
    short = binary("min", 75 - at * 8, index_const(8))
    guarded = If(at < 4, Store("x", at * 16, element("a", at)), Store("y", at * 16, element("a", at)))
    body = nest([at], Block((For(inner, short, Store("out", at * 8 + inner, element("a", at))), guarded)))
    buffers = tuple(Buffer(name, "f32", 160, writable=name != "a") for name in ("a", "x", "y", "out"))
    found = misses_of_level(loop_tree(Kernel("guards", buffers, body)), cache(512, line_bytes=4))
    assert found.misses == {"a": 10, "out": 75, "x": 4, "y": 6}


@pytest.mark.parametrize("named", [False, True])
def test_accesses_that_are_not_affine_touch_at_most_their_buffer(named: bool) -> None:
    """Whether the loaded index has a name or not."""
    row, column, chosen = Var("row", 50), Var("column", 16), Var("chosen", 20)
    index = Load("where", (row,), "i64")
    inner = nest([column], Store("out", row * 16 + column, element("table", (chosen if named else index) * 16 + column)))
    kernel = Kernel(
        "gather", (Buffer("where", "i64", 50), Buffer("table", "f32", 320), Buffer("out", "f32", 800, writable=True)),
        nest([row], Block((Let(chosen, index), inner)) if named else inner),
    )  # fmt: skip
    found = misses_of_level(loop_tree(kernel), cache(512))
    assert found.misses == {"where": 7, "table": 20, "out": 50}


@given(
    extents=st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 40), st.integers(1, 40), st.integers(1, 2), st.integers(1, 8)),
    ways=st.sampled_from([0, 4, 8]),
)
@settings(max_examples=draws(20), deadline=None)
def test_more_capacity_never_misses_more_and_none_less_than_the_footprint(extents: tuple[int, int, int, int, int, int], ways: int) -> None:
    tree = loop_tree(convolution(*extents))
    totals = []
    for lines in (16, 64, 256, 1 << 16):
        found = misses_of_level(tree, cache(lines, ways=ways))
        assert all(found.misses[name] >= found.footprint[name] * (1 - 1e-9) for name in found.misses)
        totals.append(found.total)
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in zip(totals, totals[1:], strict=False))
    assert totals[-1] == pytest.approx(sum(found.footprint.values()))


def test_threads_share_parallel_loops() -> None:
    image, row, column = Var("image", 3), Var("row", 8), Var("column", 32)
    offset = image * 256 + row * 32 + column
    body: Statement = For(column, index_const(32), Store("out", offset, element("a", row * 32 + column)))
    for axis in (row, image):
        body = For(axis, index_const(axis.extent or 0), body, "parallel")
    kernel = Kernel("shared", (Buffer("a", "f32", 256), Buffer("out", "f32", 768, writable=True)), body)
    lines = {threads: cache_misses(kernel, AVX2, threads).level(1).misses for threads in (1, 2, 3, 12)}
    assert lines == {1: {"a": 16, "out": 48}, 2: {"a": 16, "out": 32}, 3: {"a": 16, "out": 16}, 12: {"a": 4, "out": 4}}


def test_a_kernel_of_ours_reads_its_explanation() -> None:
    problem = layer_problem(layer("R4"))
    choice = rank(problem, AVX2, 1).first()
    kernel = lower(problem, choice.schedule, AVX2).kernels[-1]
    found = cache_misses(kernel, AVX2)
    assert [level.level for level in found.levels] == [1, 2, 3]
    # every value is read or written, including the input's halo
    for level in found.levels:
        assert sum(level.footprint.values()) == pytest.approx(4 * sum(b.size for b in kernel.parameters) / 64, rel=0.03)
    totals = [level.total for level in found.levels]
    assert totals == sorted(totals, reverse=True)
    assert "L1: " in str(found) and "keeps" in str(found)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_predictions_stand_beside_cachegrind(tmp_path: Path) -> None:
    problem = convolution_problem(32, 32, 12, 12, 3)
    choices = list(rank(problem, AVX2, 1))
    driver = build_driver(tmp_path)
    for choice in choices[:: len(choices) // 3]:
        kernel = lower(problem, choice.schedule, AVX2).kernels[-1]
        (binary,) = compile_kernels([SourceFile(kernel.name, source_text(kernel), "c", (kernel.name,))], AVX2, workers=1)
        assert isinstance(binary, Binary)
        caches = tuple(replace(found, bytes=found.bytes // 2) for found in AVX2.caches[:2])
        counted = count_misses(driver, binary.path, kernel, caches, seed=3)
        tree = loop_tree(kernel)
        for cache_, misses in zip(caches, counted.misses, strict=True):
            assert misses_of_level(tree, cache_).total == pytest.approx(misses, rel=0.3), (choice.schedule, cache_.level)
