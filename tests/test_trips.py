"""CPU kernels whose outermost extent is an argument: results for all batch sizes, what is compiled for further ones, and what such a kernel accesses."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.batches import check
from tests.draws import draws
from tests.operator_cases import once
from tilewright.codegen.trips import counted, shared
from tilewright.compile import source_files
from tilewright.frontend.sized import ModuleModel
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import INDEX, Const, Expr, Load, Var, compare, index_const
from tilewright.ir.kernel import SERIAL_WORK, TRIPS, Block, For, If, Let, Statement, Store
from tilewright.models import resolve
from tilewright.partition.merges import Memory
from tilewright.partition.plan import plan_program
from tilewright.runtime.dynamic import DynamicExecutable
from tilewright.runtime.loadable import LoadableProgram
from tilewright.toolchain.cache import kernel_key
from tilewright.toolchain.compilers import compiler_for


class Layers(nn.Module):
    """Layers of a random network of images: convolutions of all kinds, some with a sum after them, and poolings."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        channels = self.channels = draw.choice((3, 8, 20))
        self.layers = nn.ModuleList()
        for _ in range(draw.randint(2, 5)):
            kind, more = draw.choice(("full", "pointwise", "depthwise", "pooling", "sum")), draw.choice((8, 16, 33))
            if kind == "full":
                self.layers.append(nn.Sequential(nn.Conv2d(channels, more, 3, draw.choice((1, 2)), 1), nn.ReLU()))
            elif kind == "pointwise":
                self.layers.append(nn.Sequential(nn.Conv2d(channels, more, 1), nn.BatchNorm2d(more), nn.GELU()))
            elif kind == "depthwise":
                self.layers.append(nn.Sequential(nn.Conv2d(channels, channels, 3, 1, 1, groups=channels), nn.ReLU6()))
            elif kind == "pooling":
                self.layers.append(nn.MaxPool2d(3, 1, 1))
            else:
                self.layers.append(nn.Conv2d(channels, channels, 1))
            channels = more if kind in ("full", "pointwise") else channels
        self.head = nn.Linear(channels, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) if isinstance(layer, nn.Conv2d) else layer(x)
        return torch.softmax(self.head(x.mean((2, 3))), 1)


class Heads(nn.Module):
    """Attention of a sequence to itself, after which its heads are joined again."""

    def __init__(self, heads: int, causal: bool = False, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.bias: torch.Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(x, x.flip(-1), 2 * x, attn_mask=self.bias, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)


def sized(module: nn.Module, x: torch.Tensor, threads: int = 1) -> DynamicExecutable:
    return tilewright.compile(module.eval(), (x,), dynamic=[{0: "batch"}], wait=True, threads=threads)


@settings(once, max_examples=draws(4))
@given(seed=st.integers(0, 1 << 30), threads=st.integers(1, 2))
def test_every_batch_is_right(seed: int, threads: int) -> None:
    draw = Random(seed)
    torch.manual_seed(seed)
    module, size = Layers(draw).eval(), draw.choice((7, 12, 21))
    batches = draw.sample((1, 2, 3, 4, 5, 7, 11), 4)
    executable = sized(module, torch.randn(batches[0], module.channels, size, size), threads)
    programs = []
    for batch in batches:
        x = torch.randn(batch, module.channels, size, size)
        check(module, executable, x)
        programs.append(executable.program(x).image.program)
    for one in programs:
        for other in programs:
            check_accesses(one, other)


@settings(once, max_examples=draws(6))
@given(heads=st.integers(1, 3), length=st.integers(2, 40), width=st.integers(1, 24), kind=st.sampled_from(("plain", "causal", "bias")))
def test_attention_of_every_batch_is_right(heads: int, length: int, width: int, kind: str) -> None:
    bias = torch.randn(heads, length, length) if kind == "bias" else None
    module = Heads(heads, kind == "causal", bias).eval()
    programs = []
    executable = sized(module, torch.randn(1, length, heads * width), 2)
    for batch in (1, 2, 5):
        x = torch.randn(batch, length, heads * width)
        check(module, executable, x)
        programs.append(executable.program(x).image.program)
    for one in programs:
        for other in programs:
            check_accesses(one, other)


def check_accesses(one: LoadableProgram, other: LoadableProgram) -> None:
    """What a kernel of one program is said to access with the trips of another is what the other says."""
    for name in one.kernels.keys() & other.kernels.keys():
        mine, its = one.kernels[name], other.kernels[name]
        assert mine.touched(its.trips) == its.extents
        assert mine.growths == its.growths


@pytest.mark.parametrize("name", ["lenet5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v2", "resnet18"))])
def test_networks(name: str) -> None:
    model = resolve(f"zoo:{name}", 2)
    assert model.inputs is not None
    (x,) = model.inputs(0)
    executable = sized(model.module, x)
    for batch in (2, 3, 1, 5, 4, 7):
        check(model.module, executable, torch.randn(batch, *x.shape[1:]))


@pytest.mark.parametrize(
    ("kind", "batches", "layers"),
    [
        (
            "chain",
            (1, 2, 6, 10),
            (nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, 2, 1)),
        ),
        ("winograd", (1, 4, 6, 11), (nn.Conv2d(8, 64, 3, 2, 1), nn.GELU(), nn.Conv2d(64, 64, 3, 1, 1), nn.Tanh())),
        ("winograd", (1, 4, 6, 11), (nn.Conv2d(8, 64, 3, 2, 1), nn.GELU(), nn.Conv2d(64, 64, 7, 1, 3), nn.Tanh())),
        ("winograd", (1, 4, 6, 11), (nn.Conv2d(8, 64, 3, 2, 1), nn.GELU(), nn.Conv2d(64, 64, (7, 1), 1, (3, 0)), nn.Tanh())),
    ],
)
def test_further_batches_compile_nothing(kind: str, batches: tuple[int, ...], layers: tuple[nn.Module, ...]) -> None:
    """Their kernels have the keys of those in the cache. The target is fixed, so that choices are the same everywhere."""
    cpu, memory = machine("x86-avx512"), Memory()
    known: set[str] = set()
    model = ModuleModel(nn.Sequential(*layers).eval(), (torch.randn(4, 8, 112, 112),), None, [{0: "batch"}])
    compiler = compiler_for(cpu, "c")
    for batch in batches:
        program = plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory)
        keys = {kernel_key(source, compiler) for source in source_files(program, cpu)}
        assert {call.trips for region in program.regions for call in region.calls} == {batch}
        assert not known or keys == known
        assert any(name.startswith(kind) for name in program.kernels())
        known = keys


def test_strips_of_single_images_serve_any_number_of_images() -> None:
    """Pooling whose windows overlap, of values in memory without a halo of its padding, cannot be cut along rows."""
    cpu, memory = machine("x86-avx512"), Memory()
    layers = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 32, 1), nn.ReLU())
    model = ModuleModel(layers, (torch.randn(4, 16, 14, 14),), None, [{0: "batch"}])
    programs = [plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory) for batch in (2, 4, 6)]
    assert all("strips of 1 rows" in region.schedule for program in programs for region in program.regions)
    assert len({name for program in programs for name in program.kernels()}) == 1
    for batch in (3, 8):
        x = torch.randn(batch, 16, 14, 14)
        check(layers, sized(layers, x, 2), x)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU()), (8, 12, 12)),
        ((nn.MaxPool2d(3, 1, 1),), (16, 9, 9)),
        ((nn.Linear(24, 16), nn.GELU(), nn.LayerNorm(16)), (28, 24)),
        ((nn.Softmax(-1),), (50, 333)),
    ],
    ids=["convolution", "window", "rows", "softmax"],
)
def test_kernels_of_one_image_are_those_of_several(layers: tuple[nn.Module, ...], shape: tuple[int, ...], by_formulas: None) -> None:
    cpu = machine("x86-avx512")
    model = ModuleModel(nn.Sequential(*layers).eval(), (torch.randn(2, *shape),), None, [{0: "batch"}])
    programs = [plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory) for memory in [Memory()] for batch in (1, 2, 6)]
    one, *several = ({kernel_key(source, compiler_for(cpu, "c")) for source in source_files(program, cpu)} for program in programs)
    assert several == [one, one]
    for program in programs:  # what it says is said of its own sizes
        images = program.graph.values[program.graph.inputs[0]].shape[0]
        texts = [kernel.header for kernel in program.kernels().values()]
        assert all(re.search(rf"\b{images} x ", text) for text in texts)
        assert images > 1 or not any(re.search(r"\b2 x ", text) for text in texts)


@pytest.mark.parametrize("layer", [Heads(4), Heads(4, causal=True), Heads(4, bias=torch.ones(4, 50, 50).tril())], ids=["plain", "causal", "bias"])
def test_attention_of_one_image_is_that_of_several(layer: nn.Module, by_formulas: None) -> None:
    """Fusion leaves the axis of a single image out of its logits."""
    cpu, memory = machine("x86-avx512"), Memory()
    model = ModuleModel(layer, (torch.randn(2, 50, 128),), None, [{0: "batch"}])
    programs = [plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory, as_before=batch > 1) for batch in (1, 2, 6)]
    attention = [[name for name in program.kernels() if name.startswith("attention")] for program in programs]
    assert len(attention[0]) == 1 and attention == [attention[0]] * 3


def test_panels_of_weights_are_prefetched_for_any_number_of_images(by_formulas: None) -> None:
    """Which tiles fetch the next panel depends on the tiles of one image, although one loop goes over those of all images."""
    cpu, memory = machine("x86-avx512"), Memory()
    layers = nn.AvgPool2d(3, 1, 1), nn.Conv2d(512, 1024, 1), nn.ReLU(), nn.Conv2d(1024, 512, 1), nn.AvgPool2d(3, 1, 1)
    model = ModuleModel(nn.Sequential(*layers).eval(), (torch.randn(2, 512, 14, 14),), None, [{0: "batch"}])
    sources = []
    for batch in (1, 2, 6):
        program = plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory)
        sources.append([source for source in source_files(program, cpu) if "n 1024, r 512" in source.text])
        assert 14 * batch in {call.trips for region in program.regions for call in region.calls}
    assert "__builtin_prefetch" in sources[0][0].text
    assert [len(each) for each in sources] == [1, 1, 1]
    assert len({kernel_key(each[0], compiler_for(cpu, "c")) for each in sources}) == 1


def test_a_loop_inside_of_an_image_is_not_that_over_images() -> None:
    """Two images of a slice with one row each, of which the loop with the largest extent counts columns."""

    class Joined(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x * 2, y.expand(x.shape[0], 4)], 1)

    x, y = torch.randn(1, 5), torch.randn(1, 1)
    torch.testing.assert_close(tilewright.compile(Joined(), (x, y))(x, y), Joined()(x, y))


# what `counted` accepts

IMAGE, ROW = Var("image", 3), Var("row", 4)
SIZES = {"a": 120, "out": 120}


def copied(offset: Expr, value: Expr) -> Statement:
    """out[offset] = value for 4 rows of 10 elements of 3 images."""
    return For(IMAGE, index_const(3), For(ROW, index_const(4), Store("out", offset, value)), "parallel")


def at(index: Expr) -> Load:
    return Load("a", (index,), "f32")


def test_the_outermost_dimension_is_counted() -> None:
    moved = Var("moved")
    body = For(
        ROW,
        index_const(4),
        For(IMAGE, index_const(3), Block((Let(moved, IMAGE * 40), Store("out", moved + ROW * 10, at(ROW)))), "parallel"),
        "parallel",
    )
    found = counted(body, SIZES, ("out",))
    assert found is not None and found.trips == 3 and found.growths == {"a": 0, "out": 40}
    assert isinstance(found.body, Block) and found.body.statements[0] == Let(TRIPS, Const(3, INDEX))
    (loop,) = found.body.statements[1:]
    assert isinstance(loop, For) and loop.extent == index_const(4) and isinstance(loop.body, For) and loop.body.extent == TRIPS


def test_the_last_iteration_may_be_told_from_the_others() -> None:
    """The partial tile of rows that are those of all images."""
    whole, rest = (For(ROW, index_const(rows), Store("out", IMAGE * 40 + ROW * 10, at(IMAGE * 40 + ROW * 10))) for rows in (4, 2))
    found = counted(For(IMAGE, index_const(3), If(IMAGE < 2, whole, rest), "parallel"), SIZES, ("out",))
    assert found is not None and found.trips == 3 and found.growths == {"a": 40, "out": 40}
    assert isinstance(found.body, Block)
    (loop,) = found.body.statements[1:]
    assert isinstance(loop, For) and loop.extent == TRIPS and loop.body == If(IMAGE < TRIPS - 1, whole, rest)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(24, 40), (100, 24)), (nn.Conv2d(24, 40, 1), (24, 7, 7)), (nn.Linear(200, 90), (200,))],
    ids=["rows", "pixels", "images"],
)
def test_rows_of_all_images_have_a_kernel_for_each_remainder(layer: nn.Module, shape: tuple[int, ...], by_formulas: None) -> None:
    cpu, memory = machine("x86-avx512"), Memory()
    model = ModuleModel(layer, (torch.randn(8, *shape),), None, [{0: "batch"}])
    names: dict[int, set[str]] = {}
    for batch in range(2, 40):
        memory.kernels.clear()  # as if no batch before divided this one
        program = plan_program(simplify(model.bind((batch,)).graph)[0], cpu, 2, memory=memory, as_before=True)
        (region,) = [region for region in program.regions if region.region.kind == "contraction"]
        columns = region_columns(region.schedule)
        rows = batch * prod((shape[0], *shape[1:])) // next(layer.parameters()).shape[1]
        names.setdefault(rows % columns, set()).update(kernel.name for kernel in region.kernels if kernel.trips)
    # of few images a partial tile is much of the work, which decides about threads
    assert len(names) > 1 and all(len(kernels) <= 1 + (len(shape) == 1) for kernels in names.values()), names


def test_threads_divide_loops_of_many_images_only() -> None:
    inside = For(ROW, index_const(4), Store("out", IMAGE * 40 + ROW, at(ROW)), "parallel", work=3000)
    loop = For(IMAGE, index_const(3), inside, "parallel", work=3000)
    assert shared(loop, 0) == replace(loop, kind="serial", work=0, body=replace(inside, kind="serial", work=0))
    assert shared(loop, 3) == replace(loop, work=512, body=replace(inside, work=512))
    assert shared(replace(loop, work=SERIAL_WORK + 1), 0) == replace(loop, work=0, body=replace(inside, kind="serial", work=0))
    assert shared(replace(loop, work=6 * SERIAL_WORK, body=Block(())), 3) == replace(loop, work=0, body=Block(()))


def test_few_images_run_on_one_thread_in_the_kernel_of_many(by_formulas: None) -> None:
    cpu, memory, layer = machine("x86-avx512"), Memory(), nn.Linear(64, 64)
    model = ModuleModel(layer, (torch.randn(8, 64),), None, [{0: "batch"}])
    few, many = (plan_program(simplify(model.bind((n,)).graph)[0], cpu, 2, memory=memory, as_before=True) for n in (30, 150))
    (name,), (other,) = few.kernels(), many.kernels()
    assert name == other and re.search(r"#pragma omp parallel .* if\(trips \* \d+ > 16384\)", source_files(few, cpu)[0].text)
    executable = tilewright.compile(layer, torch.randn(8, 64), dynamic=[{0: "batch"}], wait=True, threads=2)
    for n in (2, 30, 150, 400, 3):
        check(layer, executable, torch.randn(n, 64))


def region_columns(schedule: str) -> int:
    """Pixels of a tile in a row."""
    found = re.match(r"tile 1x(\d+) pixels", schedule)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    "body",
    [
        copied(IMAGE * 40 + ROW * 10, at((IMAGE + 1) // 2)),
        copied(IMAGE * 40 + ROW * 10, at(IMAGE * 20) + at(IMAGE * 40)),
        copied(IMAGE * 40 + ROW * 10, at(IMAGE * 40) + at(ROW)),
        For(IMAGE, index_const(3), Store("out", index_const(80) - IMAGE * 40, at(IMAGE))),
        For(IMAGE, index_const(3), If(compare("lt", IMAGE, index_const(1)), Store("out", IMAGE * 40, at(IMAGE)))),
        For(IMAGE, index_const(3), If(compare("lt", IMAGE, index_const(2)), Store("out", IMAGE * 40, at(IMAGE)), Store("out", ROW, at(IMAGE)))),
        For(IMAGE, index_const(3), For(ROW, IMAGE + 1, Store("out", IMAGE * 40 + ROW, at(IMAGE)))),
        For(IMAGE, index_const(3), Store("out", IMAGE * 100, at(IMAGE))),
        Block((Store("out", index_const(0), at(index_const(0))), copied(IMAGE * 40 + ROW * 10, at(IMAGE)))),
    ],
    ids=[
        "divided",
        "two strides",
        "not all of it",
        "backwards",
        "guarded",
        "elsewhere at last",
        "an extent",
        "more than there is",
        "a statement before",
    ],
)
def test_what_is_not_counted(body: Statement) -> None:
    """What n trips access would not be known for every n, or the loop is not all of the kernel."""
    assert counted(body, SIZES, ("out",)) is None
