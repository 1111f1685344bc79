"""GPU kernels whose outermost extent is an argument: results for many sizes, how many kernels these share, and what such a kernel accesses."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import tilewright
from tests.draws import draws
from tests.emulated_gpu import emulated
from tests.interpreted import run_program
from tests.operator_cases import once
from tilewright.frontend.sized import ModuleModel
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import Load, compare, index_const
from tilewright.ir.kernel import TRIPS, Block, Buffer, If, Kernel, Launch, Let, Store, block_variable, thread_variable
from tilewright.ir.region import Program
from tilewright.kernels.gpu.trips import of_both
from tilewright.partition.merges import Memory
from tilewright.partition.plan import plan_program
from tilewright.runtime.encoding import decode_program, encode_program
from tilewright.runtime.fields import Field
from tilewright.runtime.kernel_source import kernel_source
from tilewright.runtime.loadable import facts_symbol, loadable_kernel
from tilewright.toolchain import compile_kernels
from tilewright.toolchain.binary import Binary

H200 = machine("h200")


class Encoder(nn.Module):
    """One layer of an encoder as BERT's, over sequences of any number and length."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, length, width)
        x = self.first(x + self.out(attended))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Layers(nn.Module):
    """Layers of a random network of images."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        channels = self.channels = draw.choice((3, 8, 20))
        layers: list[nn.Module] = []
        for _ in range(draw.randint(1, 3)):
            more = draw.choice((8, 16, 33))
            kind = draw.choice(("full", "pointwise", "depthwise", "pooling", "softmax"))
            if kind == "full":
                layers += [nn.Conv2d(channels, more, 3, draw.choice((1, 2)), 1), nn.ReLU()]
            elif kind == "pointwise":
                layers += [nn.Conv2d(channels, more, 1), nn.GELU()]
            elif kind == "depthwise":
                layers += [nn.Conv2d(channels, channels, 3, 1, 1, groups=channels), nn.ReLU6()]
            elif kind == "pooling":
                layers.append(nn.MaxPool2d(3, 1, 1))
            else:
                layers.append(nn.Softmax(-1))
            channels = more if kind in ("full", "pointwise") else channels
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def planned(module: nn.Module, x: torch.Tensor, memory: Memory, precision: str = "fp32") -> Program:
    model = ModuleModel(module.eval(), (torch.randn(2, *x.shape[1:]),), None, [{0: "batch"}])
    return plan_program(simplify(model.bind((x.shape[0],)).graph)[0], H200, 1, memory=memory, precision=precision, sizes=True)


def with_trips(kernel: Kernel, trips: int) -> Kernel:
    """The same code, called with other trips."""
    assert kernel.launch is not None
    grid = loadable_kernel(kernel).grid_of(trips)
    sizes = [replace(buffer, size=buffer.size + buffer.growth * (trips - kernel.trips)) for buffer in kernel.parameters]
    assert isinstance(kernel.body, Block)
    parts = [Let(TRIPS, index_const(trips)) if isinstance(part, Let) and part.variable == TRIPS else part for part in kernel.body.statements]
    body = Block(tuple(parts))
    return replace(kernel, body=body, trips=trips, parameters=tuple(sizes), launch=replace(kernel.launch, grid=grid))


def with_kernels(program: Program, known: dict[str, Kernel]) -> Program:
    """The program with kernels that other sizes had, called for its own; those that are not known yet are added."""
    regions = []
    for region in program.regions:
        kernels = []
        for kernel in region.kernels:
            first = known.setdefault(kernel.name, kernel)
            kernels.append(with_trips(first, kernel.trips) if kernel.trips else kernel)
            assert kernels[-1].launch == kernel.launch and kernels[-1].parameters == kernel.parameters
        regions.append(replace(region, kernels=tuple(kernels)))
    return replace(program, regions=tuple(regions))


def check(module: nn.Module, program: Program, x: torch.Tensor, tolerance: float = 1e-4) -> None:
    (name,) = program.graph.inputs
    results, faults = run_program(program, {name: x.numpy()})
    assert not faults, faults
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
    (result,) = results.values()
    found = torch.from_numpy(result).double().reshape(exact.shape)
    assert (found - exact).abs().max() <= tolerance * exact.abs().max()


@settings(once, max_examples=draws(4))
@given(seed=st.integers(0, 1 << 30))
def test_kernels_of_one_batch_serve_others(seed: int) -> None:
    """Each program runs with the kernels planned first under their names."""
    draw = Random(seed)
    torch.manual_seed(seed)
    module, size = Layers(draw).eval(), draw.choice((6, 9))
    memory, known = Memory(), dict[str, Kernel]()
    for batch in draw.sample((1, 2, 3, 4, 5, 6, 8), 3):
        x = torch.randn(batch, module.channels, size, size)
        check(module, with_kernels(planned(module, x, memory), known), x)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_an_encoder_of_many_sizes(precision: str) -> None:
    torch.manual_seed(1)
    module, memory, known = Encoder().eval(), Memory(), dict[str, Kernel]()
    for batch, length in ((4, 16), (6, 16), (3, 24), (12, 8)):
        x = torch.randn(batch, length, 32)
        check(module, with_kernels(planned(module, x, memory, precision), known), x, 1e-4 if precision == "fp32" else 2e-2)


def test_an_encoder_of_many_sizes_has_few_kernels() -> None:
    """Products of tokens, normalisations and maps are those of any number of tokens; attention has some kernels for each length."""
    torch.manual_seed(1)
    module, memory = Encoder().eval(), Memory()
    found: dict[tuple[str, bool], set[str]] = {}
    programs = 0
    for batch in (4, 7, 12, 24):
        for length in (16, 24, 48):
            programs += 1
            for region in planned(module, torch.randn(batch, length, 32), memory).regions:
                for kernel in region.kernels:
                    assert kernel.trips, region.region.name
                    found.setdefault((region.region.name, region.region.kind == "attention"), set()).add(kernel.name)
    assert sum(map(len, found.values())) < 2 * programs  # with extents of their own they would be 7 * programs
    assert all(len(names) <= 12 for names in found.values()), found


def test_kernels_with_trips_are_the_same_binaries() -> None:
    """Their sources differ in comments alone, and compile for the machine."""
    module, memory = Encoder().eval(), Memory()
    kernels = [planned(module, torch.randn(batch, 16, 32), memory, "bf16").kernels() for batch in (4, 6)]
    shared = kernels[0].keys() & kernels[1].keys()
    assert len(shared) >= 4
    for name in sorted(shared):
        one = kernels[0][name]
        files = [kernel_source(kernel, H200) for kernel in (one, kernels[1][name])]
        assert one.trips and "int trips" in files[0].text
        assert len({re.sub("^//.*$", "", file.text, flags=re.MULTILINE) for file in files}) == 1
        assert facts_symbol(loadable_kernel(one), H200) == facts_symbol(loadable_kernel(kernels[1][name]), H200)
        (binary,) = compile_kernels([files[0]], H200)
        assert isinstance(binary, Binary), binary


def test_programs_of_fixed_sizes_have_constant_extents() -> None:
    model = ModuleModel(Encoder().eval(), (torch.randn(2, 16, 32),), None, [{0: "batch"}])
    program = plan_program(simplify(model.bind((4,)).graph)[0], H200, 1)
    assert not any(kernel.trips for kernel in program.kernels().values())
    assert not any(call.trips for region in program.regions for call in region.calls)


# what `of_both` accepts


def guarded(rows: int, limit: int, size: int = 0, each: int = 16) -> Kernel:
    """out[row] = a[row] for rows below a limit, in tiles."""
    launch = Launch((-(-rows // each), 1, 1), (each, 1, 1), ((rows, each),))
    row = block_variable(launch) * each + thread_variable(launch)
    body = Block((If(compare("lt", row, index_const(limit)), Store("out", row, Load("a", (row,), "f32"))),))
    return Kernel("map_0", (Buffer("a", "f32", size or rows), Buffer("out", "f32", rows, writable=True)), body, launch)


def test_constants_on_a_line_become_arguments() -> None:
    found = of_both(guarded(60, 58), guarded(602, 600))
    assert found.trips == 60 and found.name != "map_0" and [buffer.growth for buffer in found.parameters] == [1, 1]
    assert "trips - 2" in kernel_source(found, H200).text
    assert found.name == of_both(guarded(90, 88), guarded(602, 600)).name  # on the same line
    assert loadable_kernel(found).grid_of(33) == (3, 1, 1)


def test_trips_have_as_many_rows_as_values_need() -> None:
    found = of_both(guarded(60, 58, 5), guarded(600, 598, 50))
    assert found.trips == 5 and [buffer.growth for buffer in found.parameters] == [1, 12]
    assert loadable_kernel(found).grid_of(2) == (2, 1, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (guarded(60, 58), guarded(600, 600, each=32)),
        (guarded(60, 58), replace(guarded(602, 600), body=Block(()))),
        (guarded(8, 7), guarded(602, 601)),
        (guarded(60, 58), guarded(640, 638)),
        (guarded(60, 58, 60), guarded(602, 600, 10)),
    ],
    ids=["other tiles", "other code", "one tile", "whole tiles", "a value that shrinks"],
)
def test_kernels_that_differ_otherwise_keep_their_extents(one: Kernel, other: Kernel) -> None:
    assert of_both(one, other) is one


def test_an_executable_for_many_sizes() -> None:
    """As on a GPU, whose launches get trips and the grid that follows from them; programs are saved with both."""
    torch.manual_seed(2)
    module = Encoder().eval()
    executable = tilewright.compile(module, torch.randn(4, 16, 32), "h200", dynamic=[{0: "batch"}], wait=True)
    sizes = (4, 6, 9)
    programs = [executable.program(torch.randn(size, 16, 32)) for size in sizes]
    for size, program in zip(sizes, programs, strict=True):
        assert any(call.trips for region in program.image.program.regions for call in region.calls)
        weights: dict[str, torch.Tensor] = {}
        written = json.loads(json.dumps(encode_program(program.image.program, weights)))
        again = decode_program(Field(written, "program"), weights)
        assert again.kernels == program.image.program.kernels
        x = torch.randn(size, 16, 32)
        with emulated(program), torch.no_grad():
            torch.testing.assert_close(program(x).double(), copy.deepcopy(module).double()(x.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sizes_share_kernels_on_a_gpu(precision: str) -> None:
    torch.manual_seed(3)
    module = Encoder(64, 2).eval().cuda()
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    with tilewright.compile(module, torch.randn(4, 32, 64, device="cuda"), dynamic=[{0: "batch"}], wait=True, precision=precision) as executable:
        for batch in (4, 6, 33, 7, 6, 100):
            x = torch.randn(batch, 32, 64, device="cuda")
            with torch.no_grad():
                exact = copy.deepcopy(module).double()(x.double())
            assert (executable(x).double() - exact).abs().max() <= tolerance * exact.abs().max()
