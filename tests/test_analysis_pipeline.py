"""Cycles of blocks against counting by hand, and against llvm-mca."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.instruction_counts import available, cases, compiled, executed, kernels_of
from bench.pipeline_check import inner_loops, llvm_mca, mca_cycles
from tests.machine_facts import clauses_without_origin
from tilewright.analysis.cpu.assembly import Instruction, instruction_of, parse
from tilewright.analysis.cpu.loops_execution import executions
from tilewright.analysis.cpu.pipeline import block_cycles, cycles
from tilewright.analysis.cpu.pipeline_operands import aarch64_usage
from tilewright.hardware import catalogue, machine
from tilewright.hardware.pipelines import PIPELINES, Pipeline
from tilewright.runtime.loadable import loadable_kernel

X86, ARM = "x86-64", "aarch64"


def code(*lines: str) -> list[Instruction]:
    return [instruction_of(line) for line in lines]


def steady(core: str, *lines: str, repeats: bool = True) -> float:
    architecture = ARM if core in ("cortex-a53", "neoverse-n1") else X86
    return block_cycles(code(*lines), architecture, PIPELINES[core], repeats).steady


def products(count: int, register: str = "zmm") -> list[str]:
    return [f"vfmadd231ps %{register}0,%{register}1,%{register}{number + 2}" for number in range(count)]


@pytest.mark.parametrize("core", ["skylake-server", "golden-cove"])
def test_ports_bound(core: str) -> None:
    """Two 512-bit multiply-adds per cycle; one 512-bit store; two loads."""
    assert steady(core, *products(12)) == pytest.approx(6)
    assert steady(core, *(f"vmovups %zmm{number},{64 * number}(%rax)" for number in range(6))) == pytest.approx(6, rel=0.05)
    assert steady(core, *(f"vmovups {64 * number}(%rax),%zmm{number}" for number in range(6))) == pytest.approx(3, rel=0.05)


def test_ports_of_zen3() -> None:
    """Two multiply-adds of 256 bits per cycle beside two additions, on other pipes; two loads; one store."""
    sums = [f"vaddps %ymm0,%ymm1,%ymm{number + 9}" for number in range(6)]
    assert steady("zen3", *products(12, "ymm")) == pytest.approx(6)
    assert steady("zen3", *products(6, "ymm"), *sums) == pytest.approx(4)  # as long as six products alone: their latency
    assert steady("zen3", *(f"vmovups {32 * number}(%rax),%ymm{number}" for number in range(6))) == pytest.approx(3, rel=0.05)
    assert steady("zen3", *(f"vmovups %ymm{number},{32 * number}(%rax)" for number in range(6))) == pytest.approx(6, rel=0.05)


@pytest.mark.parametrize(("core", "chain"), [("skylake-server", 4), ("haswell", 5), ("golden-cove", 4)])
def test_chains_bound(core: str, chain: int) -> None:
    """Six accumulators each depend on themselves; multiplied together they depend on one another."""
    assert steady(core, *products(6, "ymm")) == pytest.approx(chain)
    dependent = [f"vfmadd132ps %ymm{number},%ymm0,%ymm{number + 1}" for number in range(2, 6)]
    assert steady(core, *dependent, "vaddps %ymm6,%ymm1,%ymm2") > 4 * chain


def test_chain_of_a_block_that_is_no_loop_is_left_out() -> None:
    chain = [*["vaddps %ymm2,%ymm2,%ymm2"] * 4]
    assert steady("skylake-server", *chain) == pytest.approx(16)
    assert steady("skylake-server", "vxorps %xmm2,%xmm2,%xmm2", *chain, repeats=False) < 3
    found = block_cycles(code(*chain), X86, PIPELINES["skylake-server"], False)
    assert found.alone == pytest.approx(16)


@pytest.mark.parametrize(("core", "width"), [("skylake-server", 4), ("haswell", 4), ("golden-cove", 6)])
def test_issue_bound(core: str, width: int) -> None:
    """Moves between registers use only issue slots."""
    assert steady(core, *["mov %rax,%rbx"] * 24) == pytest.approx(24 / width)


def test_fusion() -> None:
    """A load is fused with the computation that uses it, and a comparison with its branch."""
    fused = [f"vfmadd231ps {4 * number}(%rax){{1to16}},%zmm0,%zmm{number + 1}" for number in range(16)]
    assert steady("skylake-server", *fused) == pytest.approx(8)
    moves = ["mov %rcx,%rdx"] * 6
    assert steady("skylake-server", *moves, "add $1,%rax", "cmp %rax,%rbx", "jne 10") == pytest.approx(2, rel=0.03)
    assert steady("skylake-server", *moves, "add $1,%rax", "cmp %rax,%rbx", "mov %rcx,%rdx", "jne 10") == pytest.approx(2.5, rel=0.03)


def test_masks_and_flags_are_dependences() -> None:
    chain = ["vcmpltps %zmm1,%zmm2,%k1", "vblendmps %zmm3,%zmm4,%zmm2{%k1}"]
    assert steady("skylake-server", *chain) == pytest.approx(5)
    assert steady("skylake-server", "cmp %rax,%rbx", "cmovl %rcx,%rax") == pytest.approx(2)
    assert steady("skylake-server", "vmovaps %zmm1,%zmm2{%k1}{z}", "vaddps %zmm2,%zmm3,%zmm4") == pytest.approx(1, rel=0.05)


def test_accumulators_of_arm_cores() -> None:
    """A multiply-add passes its result on to the next one's addend early, not to its factors."""
    assert steady("neoverse-n1", "fmla v0.4s, v1.4s, v2.4s") == pytest.approx(2)
    assert steady("neoverse-n1", "fmla v0.4s, v0.4s, v2.4s") == pytest.approx(4)
    assert steady("cortex-a53", "fmla v0.4s, v1.4s, v2.4s") == pytest.approx(4)
    assert steady("cortex-a53", "fmul v0.4s, v0.4s, v2.4s") == pytest.approx(4)
    assert steady("neoverse-n1", "fmul v0.4s, v0.4s, v2.4s", "fadd v0.4s, v0.4s, v3.4s") == pytest.approx(5)


def test_in_order() -> None:
    """Instructions start in order: two per cycle on different units, and everything waits behind a load that is used."""
    pairs = [text for number in range(4) for text in (f"fmla v{number}.4s, v8.4s, v9.4s", f"add x{number}, x{number}, #1")]
    assert steady("cortex-a53", *pairs) == pytest.approx(4)
    # 128-bit loads take two cycles without another instruction; the value is ready after five
    assert steady("cortex-a53", "ldr q0, [x0]", "ldr q1, [x1]", "ldr q2, [x2]") == pytest.approx(6)
    used = [f"fmla v{number}.4s, v8.4s, v0.s[0]" for number in range(1, 5)]
    assert steady("cortex-a53", "ldr q0, [x0]", *used) == pytest.approx(9)
    assert steady("neoverse-n1", "ldr q0, [x0]", *used) == pytest.approx(2)
    assert steady("cortex-a53", "mul x0, x1, x2", "mul x3, x4, x5") == pytest.approx(2)


def test_pairs_and_updated_addresses() -> None:
    assert steady("neoverse-n1", "ldp q0, q1, [x0]") == pytest.approx(1)
    assert steady("cortex-a53", "ldp q0, q1, [x0]") == pytest.approx(4)
    assert steady("neoverse-n1", "ldr q0, [x0], #16") == pytest.approx(1)
    assert steady("neoverse-n1", "str q0, [x0], #16", "str q1, [x1], #16") == pytest.approx(2)


def test_window_limits_what_runs_ahead() -> None:
    """Independent chains of forty additions: two additions start per cycle only if eight chains are in flight."""
    chain = ["vxorps %xmm0,%xmm0,%xmm0", *["vaddps %ymm0,%ymm1,%ymm0"] * 40]
    least = 40 / 2
    assert steady("skylake-server", *chain[:9]) == pytest.approx(4, rel=0.03)
    bounded = steady("skylake-server", *chain)
    assert 1.2 * least < bounded < 40 * 4
    assert steady("haswell", *chain) > bounded  # one port, fewer that wait


@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=lambda pipeline: pipeline.name)
def test_tables_are_whole_and_sourced(pipeline: Pipeline) -> None:
    for cost in pipeline.costs.values():
        assert all(set(ports) <= set(pipeline.ports) and ports for ports, _ in cost.uses)
    assert set(pipeline.sources) == {"ports", "issue_width", "window", "scheduler", "costs"}
    assert all(clauses_without_origin(text) == () for text in pipeline.sources.values())


def test_every_cpu_has_a_table() -> None:
    cpus = [entry for entry in catalogue().values() if not entry.is_gpu] + [machine("native")]
    assert all(entry.pipeline in PIPELINES for entry in cpus)


NEEDED = pytest.mark.skipif(llvm_mca() is None, reason="llvm-mca of LLVM 17 or later is not installed")
CASES = ("resnet 3x3 64", "mobilenet 1x1 16-96", "linear 64-37, 9 rows", "mobilenet 3x3 depthwise 96", "average pooling")


@NEEDED
@pytest.mark.parametrize(("target", "median", "most"), [("x86-avx512", 0.1, 0.25), ("x86-avx2", 0.15, 0.45), ("neoverse-n1", 0.12, 0.5)])
def test_loops_of_kernels_as_llvm_mca(target: str, median: float, most: float, tmp_path: Path) -> None:
    """Loops with multiply-adds. llvm-mca does not fuse, which shows in short loops on AVX2, and N1's accumulators are slower in its table."""
    chosen = machine(target)
    if missing := available(chosen):
        pytest.skip(f"not installed: {missing}")
    kernels = [kernel for name in CASES for kernel in kernels_of(*cases()[name], chosen, 2)]
    loops = [loop for loop in inner_loops(compiled(kernels, chosen, tmp_path), chosen) if loop.counts.fma]
    theirs = np.array(mca_cycles(llvm_mca() or "", [loop.instructions for loop in loops], chosen))
    ours = np.array([block_cycles(loop.instructions, chosen.architecture, PIPELINES[chosen.pipeline], True).steady for loop in loops])
    errors = np.abs(ours / theirs - 1)
    assert len(loops) >= 3
    assert np.median(errors) < median and errors.max() < most, list(zip(ours, theirs, strict=True))


@pytest.mark.parametrize("target", ["x86-avx512", "neoverse-n1", "cortex-a53"])
def test_cycles_of_a_kernel(target: str, tmp_path: Path) -> None:
    """At least the time of the multiply-adds, with each thread's share about half of it; every executed instruction is in a block."""
    chosen = machine(target)
    if missing := available(chosen):
        pytest.skip(f"not installed: {missing}")
    (kernel,) = (kernel for kernel in kernels_of(*cases()["resnet 3x3/2 64-128"], chosen, 2) if kernel.name.startswith("contraction"))
    assembly = parse(compiled([kernel], chosen, tmp_path), chosen.architecture)
    counted = executed(kernel, assembly, threads=1)
    found = cycles(executions(loadable_kernel(kernel), assembly), assembly, chosen)
    assert counted.fma / chosen.fma_ports <= found.steady < 4 * counted.fma / chosen.fma_ports
    assert sum(count * len(assembly.blocks[number].instructions) for number, (count, _) in found.blocks.items()) == counted.total
    half = cycles(executions(loadable_kernel(kernel), assembly, threads=2), assembly, chosen)
    assert 0.45 * found.steady < half.steady < 0.8 * found.steady
    assert found.starts > 0


def test_addresses_of_branches_are_no_registers() -> None:
    """`b00` is an address in hexadecimal digits here, and the low byte of vector register 0 elsewhere."""
    for line in ("b.cc b00", "cbz x3, d10", "b h24"):
        (instruction,) = code(line)
        usage = aarch64_usage(instruction.mnemonic, instruction.operands)
        assert usage.is_jump and not any(name.startswith("v") for name in (*usage.sources, *usage.targets))


@pytest.mark.parametrize("core", ["skylake-server", "golden-cove", "zen5"])
def test_scaling_by_powers_of_two_is_an_addition(core: str) -> None:
    """As in LLVM's tables; exponentials of vectors end with it."""
    assert steady(core, *["vscalefps %zmm1,%zmm0,%zmm0"] * 8) == steady(core, *["vaddps %zmm1,%zmm0,%zmm0"] * 8)
