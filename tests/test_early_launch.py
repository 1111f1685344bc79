"""Kernels that begin before those they depend on have ended: each waits before it accesses global memory, and the graph lets it begin early."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from tests.compiled import Case
from tests.interpreted import check_interpreted
from tests.test_gpu_runtime import FakeLibrary, FakeStream, diamond, fake_engine, stream
from tilewright.codegen.cuda import print_cuda, shared_offsets, shares_places
from tilewright.codegen.intrinsics.launching import awaits_earlier_kernels, wait_for_earlier_kernels
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import Load, walk
from tilewright.ir.kernel import Block, Invoke, Kernel, Statement, expressions, written_by
from tilewright.kernels.gpu import early
from tilewright.kernels.gpu.tensor_cores.space import TensorCoreSchedule
from tilewright.kernels.registry import lower, lower_for_images
from tilewright.partition.plan import plan_program
from tilewright.runtime import gpu as gpu_module
from tilewright.runtime.driver import ADD_EDGES, Driver, KernelNodeParams
from tilewright.runtime.executable import Executable
from tilewright.runtime.loadable import facts_symbol
from tilewright.toolchain.binary import SourceFile
from tilewright.toolchain.compilers import NvrtcCompiler
from tilewright.tuning.problems import convolution_problem

__all__ = ["stream"]
H200 = machine("h200")


def network() -> nn.Module:
    """Regions of most kinds: maps, windows, row reductions, convolutions by several algorithms, products, and a recurrent layer in one kernel."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(
                nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
                nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 128, 1), nn.AdaptiveAvgPool2d(4),
            )  # fmt: skip
            self.rest = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Softmax(-1))
            self.recurrent = nn.LSTM(128, 64, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self.rest(self.image(x).flatten(2).mT)
            return rows.cumsum(1), self.recurrent(rows)[0]

    torch.manual_seed(0)
    return Network().eval()


@lru_cache
@lru_cache
def compiled(dtype: torch.dtype, target: str = "h200") -> Executable:
    return tilewright.compile(network().to(dtype), (torch.randn(2, 3, 40, 40).to(dtype),), target, unsupported="error")


@lru_cache
def kernels(dtype: torch.dtype, target: str = "h200") -> list[Kernel]:
    graph, _ = simplify(import_module(network().to(dtype), (torch.randn(2, 3, 40, 40).to(dtype),)).graph)
    return list(plan_program(graph, machine(target), 1).kernels().values())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
def test_kernels_wait_before_they_access_global_memory(dtype: torch.dtype) -> None:
    found = kernels(dtype)
    for kernel in found:
        assert awaits_earlier_kernels(kernel) != kernel.cooperative, kernel.name
        if kernel.cooperative:
            continue
        assert isinstance(kernel.body, Block)
        at = kernel.body.statements.index(wait_for_earlier_kernels())  # of every thread: not in a branch or loop
        before = Block(kernel.body.statements[:at])
        parameters = {buffer.name for buffer in kernel.parameters}
        assert not parameters & {node.buffer for one in expressions(before) for node in walk(one) if isinstance(node, Load)}
        assert not parameters & {name for one in before.statements for name in written_by(one)}
        assert not [one for one in before.statements if isinstance(one, Invoke)]
    assert not any(awaits_earlier_kernels(kernel) for kernel in kernels(dtype, "a100"))
    named = compiled(dtype).image.program.kernels
    assert {kernel.name: kernel.waits for kernel in named.values()} == {kernel.name: not kernel.cooperative for kernel in found}
    for loaded in named.values():
        assert facts_symbol(loaded, H200) != facts_symbol(replace(loaded, waits=not loaded.waits), H200)


@pytest.mark.parametrize("ahead", [False, True])
def test_scopes_keep_their_places_of_shared_memory(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a scope have the places of those of another one: here sums those of the tiles whose products they are."""
    monkeypatch.setattr(early, "AHEAD", ahead)
    problem = convolution_problem(64, 64, 28, 28, 3)
    problem = replace(problem, values={name: replace(value, dtype="f16") for name, value in problem.values.items()})
    for schedule in (TensorCoreSchedule(64, 64, 32, 2, 2, 3, 1, 0, 1), TensorCoreSchedule(64, 64, 32, 2, 2, 3, 2, 1)):
        (alone,), (early_one,) = (lowering(problem, schedule, H200).kernels for lowering in (lower, lower_for_images))
        assert awaits_earlier_kernels(early_one) and not awaits_earlier_kernels(alone)
        assert shares_places(alone) and shared_offsets(early_one) == shared_offsets(alone)


def in_order(body: Block) -> Iterator[Statement]:
    """The statements of a block and of blocks inside it."""
    for statement in body.statements:
        yield from in_order(statement) if isinstance(statement, Block) else (statement,)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
def test_constants_may_be_copied_ahead_of_the_wait(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it a kernel accesses nothing but constants; most products have their first filters then."""
    monkeypatch.setattr(early, "AHEAD", True)
    inputs = (torch.randn(2, 3, 40, 40).to(dtype),)
    graph, _ = simplify(import_module(network().to(dtype), inputs).graph)
    program = plan_program(graph, H200, 1)
    packed = {name for region in program.regions for name, storage in region.storage.items() if storage.source is not None}
    constants = set(program.graph.constants) | packed
    found = program.kernels()
    copying = 0
    for region in program.regions:
        for call in region.calls:
            kernel = found[call.kernel]
            if kernel.cooperative or not isinstance(kernel.body, Block):
                continue
            names = {buffer.name: argument for buffer, argument in zip(kernel.parameters, call.arguments, strict=True)}
            inside = tuple(in_order(kernel.body))
            at = inside.index(wait_for_earlier_kernels())
            before = {names[name] for name in early.accessed(Block(inside[:at])) if name in names}
            assert before <= constants, kernel.name
            copying += bool(before)
            if at + 1 < len(inside) and "mbarrier" not in print_cuda([kernel]):
                assert {names.get(name) for name in early.accessed(inside[at + 1])} - constants - {None}
    assert copying >= 3
    check_interpreted([Case("network", network().to(dtype), inputs, 3e-5 if dtype == torch.float32 else 5e-3)], H200)
    compiler = NvrtcCompiler.find(H200)
    assert compiler.compile(SourceFile("kernel.cu", print_cuda([*found.values()]), "cuda", tuple(found)), tmp_path).succeeded


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_assembler_keeps_accesses_behind_the_wait(dtype: torch.dtype, tmp_path: Path) -> None:
    """ptxas may move loads of what it takes for constants, although they are results of the kernel before."""
    package = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (package.submodule_search_locations or [])] if package else []
    programs = [program for folder in folders for program in folder.glob("*/bin/nvdisasm")]
    if not programs:
        pytest.skip("the package nvidia-cuda-nvdisasm is not installed")
    seen = 0
    executable = compiled(dtype)
    for binary in executable.image.binaries:
        cubin = tmp_path / "code.cubin"
        cubin.write_bytes(binary.content)
        text = subprocess.run([programs[0], "-c", cubin], capture_output=True, text=True, check=True).stdout
        for part in re.split(r"\.section\s+\.text\.", text)[1:]:
            name = part.split(",", 1)[0]
            lines = [line for line in part.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
            waits = [number for number, line in enumerate(lines) if "ACQBULK" in line]
            accesses = [number for number, line in enumerate(lines) if re.search(r"\b(LD|ST|LDG|STG|LDGSTS|UTMALDG|ATOMG|RED)\b", line)]
            if executable.image.program.kernels[name].waits:
                assert waits and accesses and waits[0] < accesses[0], name
                seen += 1
    assert seen >= 5


def edges_of(library: FakeLibrary) -> list[list[tuple[int, int]]]:
    """For each call that adds edges, their ports and types."""
    return [[(edge.from_port, edge.type) for edge in arguments[3]] for name, arguments in library.calls if name == ADD_EDGES]


@pytest.mark.parametrize("early", [True, False])
def test_kernels_that_wait_begin_early(early: bool, stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without dependencies for the kernel that depends on two others, and edges from both that let it begin early."""
    monkeypatch.setattr(gpu_module, "EARLY", early)
    program = diamond()
    waiting = replace(program, kernels={name: replace(kernel, waits=True) for name, kernel in program.kernels.items()})
    engine, library = fake_engine(waiting)
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    assert [len(before) for before, _ in library.nodes.values()] == ([0, 0, 0] if early else [0, 0, 2])
    assert edges_of(library) == ([[(1, 1), (1, 1)]] if early else [])


@pytest.mark.parametrize("change", [{"waits": False}, {"waits": True, "cooperative": True}])
def test_others_begin_when_those_before_have_ended(change: dict[str, Any], stream: FakeStream) -> None:
    program = diamond()
    engine, library = fake_engine(replace(program, kernels={name: replace(kernel, **change) for name, kernel in program.kernels.items()}))
    engine.bind([0x1000, 0x2000])
    engine.run(0, 3)
    assert not edges_of(library) and max(len(before) for before, _ in library.nodes.values()) >= 1


def test_a_driver_that_has_no_such_edges() -> None:
    library = FakeLibrary()
    delattr(library, ADD_EDGES)
    driver = Driver(library)
    value = ctypes.c_uint64(1)
    params = KernelNodeParams(kernelParams=(ctypes.c_void_p * 2)(*[ctypes.addressof(value)] * 2))
    node = driver.add_kernel_node(driver.create_graph(), [7], params, early=True)
    assert library.nodes[node][0] == [7] and ADD_EDGES not in library.names()
