"""Instruction chains of one warp against hand-computed times."""

from __future__ import annotations

import pytest

from tilewright.analysis.gpu.chains import UnknownLatency, alone_cycles, latencies_of
from tilewright.analysis.gpu.ptx import parse
from tilewright.analysis.gpu.ptx_flow import flow_of
from tilewright.hardware import machine
from tilewright.ir.kernel import Launch

H200 = machine("h200")


def cycles(body: str, trips: int, global_cycles: float = 0.0) -> float:
    """Cycles of a loop with this body, on its own."""
    text = f"""
.visible .entry k(
)
{{
mov.u32 %r1, 0;
$L1:
{body}
add.s32 %r1, %r1, 1;
setp.lt.s32 %p1, %r1, {trips};
@%p1 bra $L1;
ret;
}}
"""
    flow = flow_of(parse(text)["k"], Launch((1, 1, 1), (32, 1, 1)))
    return alone_cycles(flow, latencies_of(H200, global_cycles))


def test_dependent_instructions_wait_and_others_do_not() -> None:
    chain = "fma.rn.f32 %f1, %f1, %f2, %f3;\n" * 4
    apart = "\n".join(f"fma.rn.f32 %f{i}, %f{i}, %f20, %f21;" for i in range(4))
    assert cycles(chain, 50) == pytest.approx(50 * 4 * H200.fma_latency_cycles, rel=0.05)
    assert cycles(apart, 50) == pytest.approx(50 * 7, rel=0.05)  # seven instructions, one per cycle
    assert cycles(chain, 100) == pytest.approx(2 * cycles(chain, 50), rel=0.05)


@pytest.mark.parametrize("opcode", ["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "ldmatrix.sync.aligned.m8n8.x4.shared.b16"])
def test_tensor_cores_are_refused_and_not_taken_for_an_addition(opcode: str) -> None:
    with pytest.raises(UnknownLatency, match=f"no latency of {opcode} is known"):
        cycles(f"{opcode} {{%r1, %r2, %r3, %r4}}, [%r5];", 8)


@pytest.mark.parametrize("groups, share", [(0, 1.0), (1, 0.5), (3, 0.25)])
def test_copies_ahead_hide_their_latency(groups: int, share: float) -> None:
    """With n groups in flight, n + 1 iterations share a latency."""
    body = f"cp.async.cg.shared.global [%r5], [%rd5], 16;\ncp.async.commit_group ;\ncp.async.wait_group {groups};\nbar.sync 0;"
    found, free = cycles(body, 200, 800.0), cycles(body, 200)
    assert 0.9 * share * 800 < (found - free) / 200 + 16 + 6 < 1.15 * share * 800 + 30


def test_loads_wait_where_they_are_used() -> None:
    used = "ld.global.f32 %f1, [%rd1];\nadd.f32 %f2, %f1, %f2;"
    addressed = "ld.global.u64 %rd1, [%rd1];"
    assert cycles(used, 100, 500.0) < 100 * 20  # the next iteration's load does not wait
    assert cycles(addressed, 100, 500.0) == pytest.approx(100 * 500, rel=0.05)
