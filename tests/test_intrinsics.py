"""Instructions as data: descriptions, operands, groups of lanes, machines that lack one, and contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.instruction_values import stored
from tilewright.analysis.cpu.loop_tree import loop_tree
from tilewright.analysis.cpu.pipeline_operands import USAGES
from tilewright.analysis.gpu.warps import accesses
from tilewright.codegen.assemble import block
from tilewright.codegen.c import print_c
from tilewright.codegen.checked import CheckedPrinter
from tilewright.codegen.cuda import print_cuda
from tilewright.codegen.interpreter import run
from tilewright.codegen.intrinsics import amx, async_copy, barriers, launching, mbarrier, mma, shuffle, wgmma
from tilewright.codegen.intrinsics.barriers import block_barrier
from tilewright.codegen.intrinsics.power import power_of_two
from tilewright.codegen.intrinsics.prefetch import prefetch
from tilewright.codegen.intrinsics.tensor_copy import await_stores, commit_stores, copy_box, store_box
from tilewright.hardware import catalogue, machine
from tilewright.hardware.pipelines import PIPELINES
from tilewright.ir.expr import Expr, Load, Var, compare, const, select
from tilewright.ir.expr import index_const as at
from tilewright.ir.intrinsic import INTERPRETER, LANES, Context, ContextText, Intrinsic, Operand, Text, moved
from tilewright.ir.kernel import (
    Allocate,
    Buffer,
    If,
    Invoke,
    Kernel,
    Launch,
    Place,
    Store,
    With,
    expressions,
    map_expressions,
    required_features,
    thread_variable,
    written_by,
)
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.registry import require_instructions

WARP = Launch((1, 1, 1), (32, 1, 1))


def described() -> list[Intrinsic]:
    """One of every instruction."""
    tiles = amx.tile("c", 16, 16, "f32"), amx.tile("a", 16, 32, "bf16"), amx.tile("b", 16, 32, "bf16")
    place = Place("x", at(0))
    invoked = [
        amx.zero(tiles[0]), amx.load(tiles[1], "x", at(0), 64), amx.multiply(*tiles), amx.store(tiles[0], "x", at(0), 16),
        prefetch("x", at(0)), async_copy.commit(), async_copy.await_groups(1), barriers.block_barrier(), barriers.cluster_barrier(), mma.round_to_tf32(place, const(1.0, "f32")),
        *(shuffle.exchange(place, const(1.0, "f32"), distance) for distance in (1, 16)),
        *(mma.mma(kind, place, place, place) for kind in mma.SHAPES),
        *(mma.ldmatrix(dtype, count, place, place) for dtype in ("f32", "f16", "bf16") for count in (1, 2, 4)),
        *(mma.ldmatrix("f16", count, place, place, True) for count in (1, 2, 4)),
        *(mma.stmatrix(dtype, count, place, place, transposed) for dtype in ("f16", "bf16") for count in (1, 2, 4) for transposed in (False, True)),
        mbarrier.initialise(place, 1), mbarrier.arrive(place), mbarrier.expect(place, 16), mbarrier.publish(), mbarrier.group_barrier(at(1)),
        *(mbarrier.wait(place, at(0), scope) for scope in ("thread", "warp", "warpgroup")),
        wgmma.fence(), wgmma.commit(), wgmma.await_groups(1), wgmma.await_sums(16, place),
        *(wgmma.multiply(kind, 24, place, place, place, at(0), (wgmma.Tile(128), wgmma.Tile(64))) for kind in wgmma.DEPTHS),
        wgmma.multiply("f16", 64, place, place, place, at(0), (wgmma.Tile(64, False, 512), wgmma.Tile(128, False))),
        copy_box(place, TensorMap("tiled", "x", "f16", (8, 8), (1, 8), (8, 8)), place, [at(0), at(0)]),
        store_box(place, TensorMap("stored", "x", "f16", (8, 8), (1, 8), (8, 8)), [at(0), at(0)]), commit_stores(), await_stores(1),
        copy_box(place, TensorMap("image", "x", "f16", (8, 8, 8), (1, 8, 64), (8, 8), corners=((0, 0),), steps=(1,)), place, [at(0)] * 3, [at(0)]),
        launching.more_registers(232), launching.fewer_registers(40), launching.wait_for_earlier_kernels(), launching.launch_dependents(),
    ]  # fmt: skip
    return [*(statement.intrinsic for statement in invoked), *(async_copy.copying("f32", n, guarded) for n in (1, 2, 4) for guarded in (False, True))]


def test_descriptions_agree_with_themselves_and_with_the_tables() -> None:
    every = described()
    assert len({intrinsic.name for intrinsic in every}) == len(every)
    features = {name for target in catalogue().values() for name in target.isa}
    capabilities = {f"sm_{major}{minor}" for target in catalogue().values() for major, minor in [target.compute_capability]}
    capabilities |= {target.architecture for target in catalogue().values()}
    for intrinsic in every:
        assert intrinsic.text and intrinsic.key, intrinsic
        assert set(intrinsic.requires) <= features | capabilities, intrinsic
        if intrinsic.meaning is not None and intrinsic.meaning is not moved:
            lanes = LANES[intrinsic.scope]
            given = [
                np.zeros((operand.lanes or lanes, *operand.shape), stored(np.zeros(1), operand.dtype).dtype)
                for operand in intrinsic.operands
                if operand.reads
            ]
            (target,) = [operand for operand in intrinsic.operands if operand.writes]
            assert intrinsic.meaning(*given).shape == (target.lanes or lanes, *target.shape), intrinsic


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -126.0, -126.5, 127.99)


@pytest.mark.parametrize("perform", [mma.round_to_tf32, power_of_two])
def test_texts_for_the_interpreter_compute_the_meaning(perform: Callable[[Place, Expr], Invoke]) -> None:
    launch = Launch((1, 1, 1), (256, 1, 1))
    thread = thread_variable(launch)
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32) * np.float32(20)
    x[: len(SPECIAL)] = SPECIAL
    invoked = perform(Place("value", at(0)), Load("x", (thread,), "f32"))
    body = block([Allocate(Buffer("value", "f32", 1, "register")), invoked, Store("out", thread, Load("value", (at(0),), "f32"))])
    kernel = Kernel("performed", (Buffer("x", "f32", 256), Buffer("out", "f32", 256, writable=True)), body, launch)
    printer = CheckedPrinter(kernel)
    printer.checked(kernel)
    assert INTERPRETER in invoked.intrinsic.text and not printer.intrinsics
    out = np.full(256, np.nan, np.float32)
    assert run(kernel, [x, out]).is_clean
    assert invoked.intrinsic.meaning is not None
    expected = invoked.intrinsic.meaning(x)[:, 0]
    if perform is mma.round_to_tf32:
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
    else:
        np.testing.assert_allclose(out, expected, rtol=2.0**-22)


MACHINE_CODE = {
    "zero": ("tilezero", ("%tmm0",)),
    "tile load": ("tileloadd", ("(%rax,%rbx,1)", "%tmm1")),
    "tile product": ("tdpbf16ps", ("%tmm2", "%tmm1", "%tmm0")),
    "tile store": ("tilestored", ("%tmm0", "(%rax,%rbx,1)")),
    "prefetch": ("prefetcht0", ("(%rax)",)),
}


def test_every_cpu_has_the_keys_of_its_instructions() -> None:
    """The keys are in the table of the CPU's core, under the names that the analysis of machine code uses."""
    every = [intrinsic for intrinsic in described() if "C" in intrinsic.text]
    assert {intrinsic.key for intrinsic in every} == set(MACHINE_CODE)
    for key, instruction in MACHINE_CODE.items():
        usage = USAGES["x86-64"](*instruction)
        assert (key, 0) in (usage.load, usage.compute, usage.store)
    for target in (target for target in catalogue().values() if not target.is_gpu):
        for intrinsic in every:
            if all(map(target.has, intrinsic.requires)):
                assert PIPELINES[target.pipeline].cost(intrinsic.key).latency >= 0
    with pytest.raises(KeyError, match="the table of haswell has no row for 'tile product'"):
        PIPELINES["haswell"].cost("tile product")


def test_an_instruction_takes_the_operands_that_it_describes() -> None:
    with pytest.raises(ValueError, match=r"mma.* takes \['sums', 'a', 'b'\]"):
        Invoke(mma.mma("f16", Place("c", at(0)), Place("a", at(0)), Place("b", at(0))).intrinsic, (Place("c", at(0)), at(0), Place("b", at(0))))
    with pytest.raises(ValueError, match="no ldmatrix of 3"):
        mma.ldmatrix("f16", 3, Place("a", at(0)), Place("s", at(0)))
    with pytest.raises(ValueError, match="no stmatrix of 4 matrices of f32"):
        mma.stmatrix("f32", 4, Place("s", at(0)), Place("a", at(0)))
    with pytest.raises(ValueError, match="do not multiply"):
        amx.multiply(amx.tile("c", 16, 16, "f32"), amx.tile("a", 16, 32, "bf16"), amx.tile("b", 8, 32, "bf16"))


def test_walkers_follow_operands() -> None:
    row = Var("row", 8)
    copied = async_copy.copy("s", row * 4, select(compare("lt", row, 5), Load("x", (row * 8,), "f32", 4), const(0.0, "f32")), "f32")
    assert written_by(copied) == ("s",)
    assert [load.buffer for load in expressions(copied) if isinstance(load, Load)] == ["x"]
    moved_on = map_expressions(copied, lambda expr: expr + 1 if expr.dtype == "i64" else expr, lambda name: name + "!")
    assert isinstance(moved_on, Invoke)
    assert [place for _, place in moved_on.places] == [Place("s!", row * 4 + 1), Place("x!", row * 8 + 1)]
    assert moved_on.values == {"inside": compare("lt", row, 5)}
    with pytest.raises(ValueError, match="copies a load"):
        async_copy.copy("s", row, Load("x", (row,), "f32") + 1.0, "f32")


def test_a_prefetch_touches_nothing() -> None:
    """Not even beyond the end of its buffer."""
    hint = prefetch("x", at(1 << 20))
    assert written_by(hint) == () and [*expressions(hint)] == [at(1 << 20)]
    body = block(hint, Store("out", at(0), Load("x", (at(3),), "f32")))
    kernel = Kernel("k", (Buffer("x", "f32", 4), Buffer("out", "f32", 1, writable=True)), body)
    found = loop_tree(kernel).root
    assert found is not None and {name: len(accesses) for name, accesses in found.accesses.items()} == {"x": 1, "out": 1}
    out = np.zeros(1, np.float32)
    assert run(kernel, [np.arange(4, dtype=np.float32), out]).is_clean and out[0] == 3
    assert "__builtin_prefetch(x + 1048576);" in print_c([kernel])


def collective(width: str) -> Kernel:
    """A sum over the lanes of a group, in one of two branches that are uniform over each group."""

    def meaning(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values.sum(), (len(values), 1))

    total = Intrinsic(f"total of a {width}", width, (Operand("sum", "fragment", "write", "f32", (1,)), Operand("value", "value")), meaning)
    grid = Launch((1, 1, 1), (256, 1, 1))
    thread = thread_variable(grid)
    size = {"warp": 32, "warpgroup": 128}[width]
    one = Store("value", at(0), Load("x", (thread,), "f32"))
    add = Invoke(total, (Place("value", at(0)), Load("value", (at(0),), "f32")))
    twice = Store("value", at(0), Load("value", (at(0),), "f32") * 2.0)
    body = block(
        Allocate(Buffer("value", "f32", 1, "register")),
        one,
        If(compare("lt", thread, size), add, block(twice, add)),
        block_barrier(),
        Store("out", thread, Load("value", (at(0),), "f32")),
    )
    return Kernel("collective", (Buffer("x", "f32", 256), Buffer("out", "f32", 256, writable=True)), body, grid)


@pytest.mark.parametrize("width", ["warp", "warpgroup"])
def test_groups_of_lanes_go_their_own_ways(width: str) -> None:
    size = {"warp": 32, "warpgroup": 128}[width]
    x, out = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    report = run(collective(width), [x, out])
    assert report.is_clean, report.faults
    expected = x.reshape(-1, size).sum(axis=1) * np.where(np.arange(256 // size) == 0, 1, 2)
    np.testing.assert_array_equal(out, np.repeat(expected, size))
    with pytest.raises(ValueError, match=f"CUDA has no text of the instruction total of a {width}"):
        print_cuda([collective(width)])


def test_c_has_no_such_instruction() -> None:
    with pytest.raises(ValueError, match="C has no text of the instruction mma"):
        print_c([Kernel("k", (), mma.mma("f16", Place("c", at(0)), Place("a", at(0)), Place("b", at(0))))])
    with pytest.raises(ValueError, match="C has no text of the instruction block barrier"):
        print_c([Kernel("k", (), block_barrier())])
    with pytest.raises(ValueError, match="k is a kernel for a CPU, which has no blocks"):
        run(Kernel("k", (), block_barrier()), [])


def test_a_machine_without_the_instruction_is_not_asked_to_compile_it() -> None:
    product = Kernel("k", (), mma.mma("bf16", Place("c", at(0)), Place("a", at(0)), Place("b", at(0))), WARP)
    assert required_features(product) == ("sm_80",)
    require_instructions(product, machine("a100"))
    with pytest.raises(ValueError, match="v100 has no mma m16n8k16 bf16, which needs sm_80"):
        require_instructions(product, machine("v100"))
    with pytest.raises(ValueError, match="x86-avx512 has no load .*, which needs amx_tile"):
        require_instructions(Kernel("k", (), amx.load(amx.tile("a", 16, 32, "bf16"), "x", at(0), 64)), machine("x86-avx512"))


# --- contexts ---------------------------------------------------------------------------------------------------------


def in_context(threads: int = 64) -> Kernel:
    """out[i] = x[i ^ 1], through registers provided by a context, whose values lanes exchange in pairs."""
    registers = Buffer("mine", "f32", 1, "register"), Buffer("other", "f32", 1, "register")
    text = ContextText(("open_registers();",), ("close_registers();",), ("R0", "R1"), "// what opens and closes them\n")
    fragment = Operand("target", "fragment", "write", "f32", (1,)), Operand("source", "fragment", "read", "f32", (1,))
    exchange = Intrinsic("exchange", "warp", fragment, lambda x: x[np.arange(32) ^ 1], {"CUDA": Text("EXCHANGE({target}, {source});")})
    fill = Intrinsic("fill", "thread", (fragment[0], Operand("value", "value")), lambda x: x[:, None], {"CUDA": Text("FILL({target}, {value});")})
    take = Intrinsic(
        "take", "thread", (Operand("target", "global", "write", "f32", (1,)), fragment[1]), moved, {"CUDA": Text("TAKE({target}, {source});")}
    )
    grid = Launch((1, 1, 1), (threads, 1, 1))
    thread = thread_variable(grid)
    mine, other = Place("mine", at(0)), Place("other", at(0))
    body = block(Invoke(fill, (mine, Load("x", (thread,), "f32"))), Invoke(exchange, (other, mine)), Invoke(take, (Place("out", thread), other)))
    parameters = Buffer("x", "f32", threads), Buffer("out", "f32", threads, writable=True)
    return Kernel("context", parameters, With(Context("registers", {"CUDA": text}), registers, body), grid)


def test_a_context_surrounds_its_statements_and_names_its_buffers() -> None:
    text = print_cuda([in_context()])
    assert text.startswith("// what opens and closes them\n")
    lines = [line.strip() for line in text.splitlines()]
    inside = lines[lines.index("open_registers();") - 1 : lines.index("close_registers();") + 2]
    named = ["FILL(R0, x[thread_x]);", "EXCHANGE(R1, R0);", "TAKE(out + thread_x, R1);"]
    assert inside == ["{", "open_registers();", *named, "close_registers();", "}"]
    with pytest.raises(ValueError, match="C has no text of the context registers"):
        print_c([replace(in_context(), launch=None)])
    assert [(access.buffer, access.kind, access.requests) for access in accesses(in_context())] == [("x", "load", 2), ("out", "store", 2)]


def test_what_is_done_together_in_a_context() -> None:
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    report = run(in_context(), [x, out])
    assert report.is_clean, report.faults
    np.testing.assert_array_equal(out, x[np.arange(64) ^ 1])
