"""PTX: loops and executed instructions, against programs with known counts, and against the kernel IR of the PTX."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod

import numpy as np
import pytest

from tests.gpu_cases import Case, convolution_case, matmul_case
from tests.machine_facts import clauses_without_origin
from tilewright.analysis.gpu.ptx import Instruction, parse
from tilewright.analysis.gpu.ptx_flow import flow_of
from tilewright.analysis.gpu.reading import busy_cycles, read_region, warp_cycles
from tilewright.analysis.gpu.warps import NotStatic, accesses
from tilewright.hardware import machine
from tilewright.hardware.catalogue import catalogue
from tilewright.ir.kernel import Launch
from tilewright.ir.region import Lowered
from tilewright.kernels.gpu.gemm.space import ContractionSchedule
from tilewright.kernels.registry import lower
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
H200 = machine("h200")

NESTED = """
.visible .entry nested(
	.param .u64 nested_param_0
)
{
	.reg .pred 	%p<5>;
	ld.param.u64 	%rd1, [nested_param_0];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, 10;

$L__BB0_1:
	// the outer loop
	mov.u32 	%r3, -4;
$L__BB0_2:
	fma.rn.f32 	%f1, %f1, %f2, %f3;
	ld.shared.v4.f32 	{%f4, %f5, %f6, %f7}, [%r9+16];
	add.s32 	%r3, %r3, 2;
	setp.lt.s32 	%p1, %r3, 6;
	@%p1 bra 	$L__BB0_2;

	setp.gt.s32 	%p2, %r1, 7;
	@%p2 bra 	$L__BB0_4;
	st.global.f32 	[%rd1], %f1;
$L__BB0_4:
	add.s32 	%r2, %r2, -3;
	setp.gt.s32 	%p3, %r2, 0;
	@%p3 bra 	$L__BB0_1;
	// begin inline asm
	cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;
	// end inline asm
	bar.sync 	0;
	ret;

}
"""


def test_blocks_loops_and_counts_of_a_known_program() -> None:
    function = parse(NESTED)["nested"]
    outer, inner = function.loops
    assert [block.successors for block in function.blocks] == [(1,), (2,), (2, 3), (5, 4), (5,), (1, 6), ()]
    assert (outer.header, outer.blocks, inner.header, inner.blocks) == (1, frozenset(range(1, 6)), 2, frozenset({2}))
    flow = flow_of(function, Launch((3, 1, 1), (40, 1, 1)))
    assert flow.trips == (4, 5)  # 10, 7, 4, 1; -4 to 4
    done = flow.instructions()
    warps = 3 * 2
    assert done["fma"] == done["shared load"] == warps * 4 * 5
    assert flow.memory("shared load") == {16: warps * 20}
    assert done["global store"] == 3 * 4  # threads 0 to 7 alone: one warp of each block
    assert flow.instructions(of_a_thread=True)["global store"] == pytest.approx(4 * 8 / 40)
    assert done["copy"] == done["barrier"] == warps
    assert done["branch"] == warps * (20 + 4 + 4 + 1)


def test_a_branch_that_data_decide_is_not_static() -> None:
    text = NESTED.replace("mov.u32 	%r1, %tid.x;", "ld.global.u32 	%r1, [%rd1];")
    with pytest.raises(NotStatic, match="data decide"):
        flow_of(parse(text)["nested"], Launch((1, 1, 1), (32, 1, 1)))


def test_classes_of_instructions() -> None:
    expected = {
        "fma.rn.f32": "fma", "mad.lo.s32": "integer", "add.f32": "float", "max.NaN.f32": "float", "ex2.approx.ftz.f32": "special",
        "rcp.rn.f32": "special", "ld.global.nc.v4.f32": "global load", "st.shared.v2.f32": "shared store", "ld.shared::cluster.f32": "shared load",
        "ld.param.u64": "other load", "red.global.add.v4.f32": "atomic", "atom.global.add.f32": "atomic", "cp.async.ca.shared.global": "copy",
        "cp.async.wait_group": "barrier", "barrier.cluster.arrive": "barrier", "bar.sync": "barrier", "setp.lt.s32": "compare", "or.pred": "compare",
        "selp.b32": "compare", "cvta.to.global.u64": "convert", "mov.u32": "move", "shl.b64": "integer", "bra.uni": "branch", "ret": "branch",
    }  # fmt: skip
    assert {opcode: Instruction(opcode).kind for opcode in expected} == expected
    assert [Instruction(opcode).bytes for opcode in ("ld.global.nc.v4.f32", "st.shared.v2.f64", "ld.shared.u8")] == [16, 16, 1]


PROGRAM = r"""
extern "C" __global__ void program(volatile float *out) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x - 20;
    const unsigned u = t * 2654435761u;
    for (int i = 0; i < (t * 7 + 3) % 11; ++i) {
        for (int j = i; j < t / 5 + min(t, 3); j += 3) out[0] = 1.0f;
        if ((t >> 2) & 1) out[1] = 2.0f;
    }
    for (unsigned j = 0; j < u % 13; j += 2) out[2] = 3.0f;
    for (int j = max(t, -5) * max(t, -5); j > 1; j >>= 1) out[3] = 4.0f;
    if (u > 0x80000000u || t < -8) out[4] = 5.0f;
}
"""


def stores_of(t: int) -> int:
    """The number of stores of thread t in PROGRAM."""
    truncated = lambda a, b: int(a / b)  # noqa: E731
    u, total = t * 2654435761 % 2**32, 0
    for i in range(max(0, t * 7 + 3 - 11 * truncated(t * 7 + 3, 11))):
        total += len(range(i, truncated(t, 5) + min(t, 3), 3)) + (t >> 2 & 1)
    total += len(range(0, u % 13, 2))
    j = max(t, -5) ** 2
    while j > 1:
        total, j = total + 1, j >> 1
    return total + (u > 0x80000000 or t < -8)


def translated(text: str, *names: str) -> str:
    outcome, ptx, cubin = NvrtcCompiler.find(H200).translated(SourceFile("test", text, "cuda", names))
    assert outcome.succeeded and cubin, outcome.log
    return ptx


def test_what_the_compiler_makes_of_arithmetic_is_followed() -> None:
    launch = Launch((5, 1, 1), (48, 1, 1))
    flow = flow_of(parse(translated(PROGRAM, "program"))["program"], launch)
    threads = [stores_of(t - 20) for t in range(5 * 48)]
    assert flow.instructions(of_a_thread=True)["global store"] == pytest.approx(np.mean(threads))


# --- against the kernel IR --------------------------------------------------------------------------------------------

SCHEDULES = (
    ContractionSchedule(32, 32, 8, 4, 4, 1, 1),
    ContractionSchedule(64, 16, 16, 4, 2, 1, 3),
    ContractionSchedule(16, 64, 8, 2, 8, 3, 2),
    ContractionSchedule(32, 16, 16, 4, 4, 2, 2, 1),
)


@cache
def lowered(which: str, number: int) -> Lowered:
    case: Case = matmul_case(m=70, n=50, r=96) if which == "matmul" else convolution_case(channels=32, outputs=40, size=(12, 11))
    return lower(case.problem, SCHEDULES[number], H200)


@pytest.mark.parametrize("which", ["matmul", "convolution"])
@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_executed_instructions_are_those_of_the_ir(which: str, number: int) -> None:
    made, schedule = lowered(which, number), SCHEDULES[number]
    kernel, found = made.kernels[0], read_region(made, H200, 10**9)[0]
    assert kernel.launch is not None
    assert found.blocks == prod(kernel.launch.grid) and found.threads == schedule.threads
    written = Counter[str]()
    for access in accesses(kernel, 10**9):
        written[f"{'global' if access.space == 'global' else 'shared'} {access.kind}"] += access.lanes  # type: ignore[assignment]
    of_a_thread = {kind: lanes / (found.blocks * found.threads) for kind, lanes in written.items()}
    assert found.of_a_thread.get("global store", 0) == pytest.approx(of_a_thread.get("global store", 0))
    assert found.of_a_thread.get("copy", 0) == pytest.approx(of_a_thread.get("shared copy", 0))
    # NVRTC splits some vector accesses, not always the same ones, and the assembler merges them again
    for kind in ("shared load", "shared store"):
        assert of_a_thread.get(kind, 0) <= found.of_a_thread.get(kind, 0) + 1e-9 <= 1.2 * of_a_thread.get(kind, 0) + 1e-6, kind
    reduction = 96 if which == "matmul" else prod(axis.extent or 1 for axis in made.region.steps[0].reduction)
    steps = -(-reduction // schedule.block_k) / schedule.split
    assert found.of_a_thread["fma"] == pytest.approx(schedule.block_m * schedule.block_n * schedule.block_k * steps / schedule.threads)


def test_busy_cycles() -> None:
    (one,) = read_region(lowered("matmul", 0), H200)
    many = read_region(lowered("matmul", 2), H200)
    assert len(many) == 2  # a split has a second kernel
    costs = warp_cycles(H200)
    assert costs["fma"] == 0.25 and costs["integer"] == 0.5 and costs["special"] == 2
    busy = busy_cycles(one)
    assert busy["multiply-adds"] * 4 == pytest.approx(one.instructions["fma"] / one.blocks, rel=0.1)
    assert busy["issue"] >= busy["multiply-adds"] and busy["latency"] == one.alone + one.waits  # one round of blocks
    assert one.resources.registers > 16 and one.occupancy.waves == 1 and one.occupancy.resident >= 1


def test_loops_have_their_instructions() -> None:
    """All steps of a block's reduction are iterations of one loop, which multiplies and adds as often as its tiles say."""
    (one,), schedule = read_region(lowered("matmul", 0), H200), SCHEDULES[0]
    inner = max((loop for loop in one.loops if loop.is_innermost), key=lambda loop: loop.iterations * loop.instructions.get("fma", 0))
    assert inner.iterations * inner.instructions["fma"] == pytest.approx(one.of_a_thread["fma"], rel=0.5)
    assert inner.instructions["fma"] == schedule.block_m * schedule.block_n * schedule.block_k / schedule.threads
    assert inner.trips == inner.iterations and sum(loop.iterations * sum(loop.instructions.values()) for loop in one.loops) < sum(
        one.of_a_thread.values()
    )


def test_costs_are_there_for_every_gpu_and_have_sources() -> None:
    from tilewright.analysis.gpu.reading import LOAD_STORE_LANES, SOURCES

    assert {target.compute_capability for target in catalogue().values() if target.is_gpu} <= set(LOAD_STORE_LANES)
    assert [clauses_without_origin(source) for source in SOURCES.values()] == [(), ()]


def test_inline_assembly_with_a_predicate_of_its_own() -> None:
    """Like that of an index check."""
    body = "{ .reg .pred outside; setp.eq.u32 outside, %r1, 0; @outside st.global.u64 [%rd1], %rd4; }"
    (block,) = parse(f".visible .entry k()\n{{\n\t{body}\n\tret;\n}}\n")["k"].blocks
    assert [(i.opcode, i.predicate) for i in block.instructions] == [("setp.eq.u32", ""), ("st.global.u64", "outside"), ("ret", "")]
