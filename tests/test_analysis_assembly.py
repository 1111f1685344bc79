"""Static analysis of assembly: loops of control-flow graphs, guards, and closed-form executions against executing every iteration."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tilewright.analysis.cpu import loops_execution
from tilewright.analysis.cpu.assembly import disassembled, instruction_of, parse
from tilewright.analysis.cpu.assembly_aarch64 import decode as decode_aarch64
from tilewright.analysis.cpu.assembly_x86 import decode as decode_x86
from tilewright.analysis.cpu.loops import EXIT, dominates, dominators, natural_loops, order_of, post_dominators
from tilewright.analysis.cpu.loops_execution import Execution
from tilewright.analysis.cpu.loops_values import MASK, Guard, Value, decided, signed
from tilewright.hardware import machine

GRAPHS = st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=2), min_size=n, max_size=n))


def reached(entry: int, successors: dict[int, list[int]], without: int | None = None) -> set[int]:
    seen: set[int] = set()
    stack = [entry] if entry != without else []
    while stack:
        block = stack.pop()
        if block not in seen:
            seen.add(block)
            stack += [target for target in successors[block] if target != without]
    return seen


@given(GRAPHS)
def test_dominators(edges: list[list[int]]) -> None:
    """A block dominates another if the other cannot be reached without it."""
    successors = dict(enumerate(edges))
    immediate = dominators(0, successors)
    everything = reached(0, successors)
    assert set(order_of(0, successors)) == everything == set(immediate)
    for above in everything:
        missing = everything - reached(0, successors, above)
        assert {block for block in everything if dominates(above, block, immediate)} == missing
    for header, loop in natural_loops(0, successors).items():
        assert all(dominates(header, block, immediate) for block in loop.blocks)
        assert all(header in successors[latch] for latch in loop.latches)
        assert loop.parent is None or loop.blocks < natural_loops(0, successors)[loop.parent].blocks | {loop.parent}


def test_post_dominators() -> None:
    diamond = {0: [1, 2], 1: [3], 2: [3], 3: []}
    assert post_dominators(0, diamond) == {EXIT: EXIT, 3: EXIT, 1: 3, 2: 3, 0: 3}


SMALL = st.integers(-40, 40)


@given(st.sampled_from(["lt", "ge", "ltu", "geu", "eq"]), SMALL, SMALL, st.integers(-5, 5), st.integers(-5, 5))
def test_how_often_a_guard_holds(relation: str, left: int, right: int, left_step: int, right_step: int) -> None:
    """The count is never too large, and exact if no side wraps around."""
    guard = Guard(relation, Value(left & MASK), Value(right & MASK))
    if not guard.holds():
        return
    told = guard.repeats(left_step, right_step)
    assert told >= 1
    for k in range(1, min(told, 200)):
        assert Guard(relation, Value(left + k * left_step & MASK), Value(right + k * right_step & MASK)).holds()
    if relation in ("lt", "ge") and told < 200:
        assert not Guard(relation, Value(left + told * left_step & MASK), Value(right + told * right_step & MASK)).holds()


@given(st.sampled_from(["eq", "ne", "ltu", "geu", "leu", "gtu", "lt", "ge", "gt", "le"]), SMALL, SMALL, st.sampled_from([4, 8]))
def test_conditions(condition: str, a: int, b: int, width: int) -> None:
    mask = (1 << 8 * width) - 1
    outcome = decided(condition, "sub", Value(a & mask), Value(b & mask), width)
    assert outcome is not None
    x, y = (a & mask, b & mask) if condition.endswith("u") else (a, b)
    name = condition.removesuffix("u")
    assert outcome[0] == {"eq": a == b, "ne": a != b, "lt": x < y, "ge": x >= y, "le": x <= y, "gt": x > y}[name]
    assert all(guard.holds() for guard in outcome[1])
    assert signed(a & mask, width) == a


LINES = {
    "vfmadd231ps 0x40(%rax,%rcx,4),%zmm1,%zmm0": ("fma", True, False, False),
    "vfmadd231ps %ymm1,%ymm2,%ymm0": ("fma", False, False, False),
    "vmovups (%rax),%ymm0": ("load", True, False, False),
    "vmovaps %ymm0,0x20(%rsp)": ("store", False, True, True),
    "vbroadcastss (%rax),%ymm0": ("load", True, False, False),
    "vpermd (%rax),%ymm1,%ymm0": ("move", True, False, False),
    "vmulps %ymm0,%ymm1,%ymm2": ("multiply", False, False, False),
    "vaddps (%rax),%ymm1,%ymm2": ("add", True, False, False),
    "vmaxps %ymm0,%ymm1,%ymm2": ("arithmetic", False, False, False),
    "addq $0x800,0x78(%rsp)": ("integer", True, True, True),
    "cmp %rax,0x70(%rsp)": ("integer", True, False, True),
    "lea 0x0(,%rcx,8),%rax": ("integer", False, False, False),
    "nopw 0x0(%rax,%rax,1)": ("integer", False, False, False),
    "prefetcht0 (%rax)": ("integer", False, False, False),
    "jne 1234 <f+0x10>": ("branch", False, False, False),
}
LINES_AARCH64 = {
    "fmla v1.4s, v2.4s, v3.s[0]": ("fma", False, False, False),
    "fmadd s0, s1, s2, s3": ("fma", False, False, False),
    "fmul v1.4s, v2.4s, v3.4s": ("multiply", False, False, False),
    "ldp q0, q1, [x0], #32": ("load", True, False, False),
    "ld1r {v0.4s}, [x0]": ("load", True, False, False),
    "str q0, [sp, #16]": ("store", False, True, True),
    "prfm pldl1keep, [x0]": ("integer", False, False, False),
    "mov v0.16b, v1.16b": ("move", False, False, False),
    "fadd v0.4s, v1.4s, v2.4s": ("add", False, False, False),
    "add x0, x1, #0x10": ("integer", False, False, False),
    "b.ne 1234 <f+0x10>  // b.any": ("branch", False, False, False),
    "cbz x0, 1234 <f+0x10>": ("branch", False, False, False),
}


@pytest.mark.parametrize(("lines", "decode"), [(LINES, decode_x86), (LINES_AARCH64, decode_aarch64)], ids=["x86-64", "aarch64"])
def test_classes(lines: dict[str, tuple[str, bool, bool, bool]], decode: Any) -> None:
    for text, (kind, reads, writes, stack) in lines.items():
        instruction = instruction_of(text)
        _, effect, _ = decode(instruction.mnemonic, instruction.operands)
        assert (effect.kind, effect.reads, effect.writes, effect.stack) == (kind, reads, writes, stack), text


SOURCE = """
#include <stdint.h>
void kernel(void *const *arguments, const int64_t *scalars) {
    const float *restrict const a = arguments[0];
    float *restrict const b = arguments[1];
    for (int64_t i = 0; i < %d; i += %d)
        for (int64_t j = %s; j < %d; ++j) {
            if (j * 2 + %d < %s) b[i * 64 + j] = a[j];
            for (int64_t k = 0; k < (%s); ++k) b[i * 64 + j %% 7] += a[i * k + j];
            if (i / 3 %% 2) b[i] *= a[j / 5];
        }
}
"""


@pytest.mark.parametrize("target", ["x86-avx2", "neoverse-n1"])
@settings(max_examples=draws(8), deadline=None, derandomize=True)
@example(4, 1, "0", 2, -2, "i", "i")  # a guard that the compiler derives from the carry flag
@example(3, 1, "i", 2, -2, "i", "i")
@given(
    st.integers(1, 12), st.integers(1, 3), st.sampled_from(["0", "i", "i / 2"]), st.integers(1, 14), st.integers(-3, 9), st.sampled_from(["i", "11"]),
    st.sampled_from(["i", "j", "9", "i - j", "i * 3"]),
)  # fmt: skip
def test_closed_form_is_what_every_iteration_gives(
    target: str, tmp_path_factory: pytest.TempPathFactory, rows: int, step: int, first: str, columns: int, shift: int, bound: str, depth: str
) -> None:
    """Loops whose bounds, guards and extents depend on one another."""
    chosen = machine(target)
    compiler = shutil.which("gcc" if target.startswith("x86") else "aarch64-linux-gnu-gcc")
    if compiler is None:
        pytest.skip("no compiler")
    folder: Path = tmp_path_factory.mktemp("loops")
    (folder / "k.c").write_text(SOURCE % (rows, step, first, columns, shift, bound, depth))
    subprocess.run([compiler, "-O2", "-ftree-vectorize", "-fPIC", "-shared", *chosen.compiler_flags, "-o", "k.so", "k.c"], cwd=folder, check=True)
    code = parse(disassembled(folder / "k.so", chosen), chosen.architecture)
    addresses = [loops_execution.BUFFERS, 2 * loops_execution.BUFFERS]
    quick = Execution(code).run("kernel", addresses, [0])
    assert quick == Single(code).run("kernel", addresses, [0])
    assert loops_execution.UNDECIDED not in quick


class Single(Execution):
    """Executes every iteration separately: no path is reused or repeated."""

    def fits(self, frame: object, path: object) -> bool:
        return False

    def steps(self, *_: object) -> None:
        return None
