"""float16 and bfloat16 modules on GPUs: computed by kernels, in float32 inside. The interpreter runs them; NVRTC compiles them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tilewright
from tests.draws import draws
from tests.emulated_gpu import EmulatedServer
from tests.interpreted import returned, run_program
from tests.on_device import cuda_binary
from tests.test_gpu_chains import CHUNKED, EXCHANGED, any_tiles
from tests.test_half_modules import CASES, EACH_TYPE, TYPES, Rows, array_of, assert_as_good_as_eager, in_type
from tilewright import zoo
from tilewright.codegen.cuda import print_cuda
from tilewright.frontend.imported import Imported, unsupported
from tilewright.frontend.onnx_import import import_onnx
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.hardware.tensor_cores import mma_flops
from tilewright.ir.kernel import Allocate, statements
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program, Unsuitable
from tilewright.kernels.columns import length
from tilewright.kernels.registry import lower
from tilewright.partition.canonical import canonical
from tilewright.partition.context import Chooser
from tilewright.partition.plan import plan_program
from tilewright.partition.tile_schedules import shared_processor
from tilewright.selection.choice import choose, rank
from tilewright.selection.ranking import Choice
from tilewright.tuning.peers import export_onnx

H200, RTX4090, V100 = machine("h200"), machine("rtx4090"), machine("v100")
"""With `wgmma`, with asynchronous copies alone, and without both."""
EACH_TARGET = pytest.mark.parametrize("target", [H200, V100], ids=lambda m: m.name)
ARCHITECTURE = {H200.name: "sm_90a", RTX4090.name: "sm_89", V100.name: "sm_75"}  # the oldest that NVRTC 13 compiles for


def planned(module: nn.Module, inputs: Sequence[torch.Tensor], target: Machine, chooser: Chooser = choose, chains: bool = False) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program_of(import_module(module, inputs, on_gpu=target.is_gpu), target, chooser, chains)


def program_of(imported: Imported, target: Machine, chooser: Chooser = choose, chains: bool = False) -> Program:
    graph, _ = simplify(imported.graph)
    assert not unsupported(graph)
    return plan_program(graph, target, 1, chooser, chains=chains)


def check(module: nn.Module, inputs: Sequence[torch.Tensor], program: Program, imported: Imported | None = None) -> None:
    """Interprets the program's kernels, and compares the results with PyTorch in float64."""
    imported = imported or import_module(module, inputs)
    results, faults = run_program(program, {name: array_of(x) for name, x in zip(program.graph.inputs, inputs, strict=True)})
    assert not faults
    found = returned(imported, [results[name] for name in program.graph.outputs], inputs)
    assert_as_good_as_eager(module, inputs, [x.view(torch.bfloat16) if x.dtype == torch.uint16 else x for x in found])


def compiles(program: Program, target: Machine) -> None:
    kernels = {kernel.name: kernel for lowered in program.regions for kernel in lowered.kernels}
    text = print_cuda(list(kernels.values()))
    assert "#include" not in text
    passed, log = cuda_binary(text, ARCHITECTURE[target.name])
    assert passed, log


@pytest.mark.in_turns(4)
@EACH_TARGET
@EACH_TYPE
@pytest.mark.parametrize("number", range(len(CASES)))
def test_modules_are_as_good_as_pytorch(number: int, dtype: torch.dtype, target: Machine) -> None:
    module, inputs = copy.deepcopy(CASES[number][0]).to(dtype).eval(), in_type(CASES[number][1], dtype)
    program = planned(module, inputs, target)
    check(module, inputs, program)
    compiles(program, target)


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_a_network_for_ada(dtype: torch.dtype) -> None:
    """Convolutions and products on tensor cores, and what stands between them, for a GPU of compute capability 8.9."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(2), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64), nn.Softmax(-1),
    )  # fmt: skip
    module, inputs = network.to(dtype).eval(), (torch.randn(2, 3, 16, 16, dtype=dtype),)
    program = planned(module, inputs, RTX4090)
    assert sum(lowered.schedule.startswith("tensor cores") for lowered in program.regions) == 3
    check(module, inputs, program)
    compiles(program, RTX4090)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def drawn(random: Random) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A module whose kernels are of one family, of random sizes."""

    def size(*choices: int) -> int:
        return random.choice(choices)

    channels, outputs, rows = size(3, 8, 16, 24), size(5, 8, 16, 33), size(1, 3, 7, 20)
    image = torch.randn(size(1, 2), channels, size(6, 9, 14), size(6, 8, 13))
    heads = tuple(torch.randn(1, 2, size(5, 24), d) for d in (16,))
    kind = random.choice(["convolution", "depthwise", "linear", "few rows", "attention", "pool", "norm", "softmax", "scan", "map", "batched"])
    if kind == "convolution":
        filters = size(1, 3)
        return nn.Sequential(nn.Conv2d(channels, outputs, filters, size(1, 2), filters // 2), nn.ReLU()), (image,)
    if kind == "depthwise":
        return nn.Conv2d(channels, channels, 3, size(1, 2), 1, groups=channels), (image,)
    if kind == "linear":
        return nn.Linear(size(8, 30, 64), size(16, 24, 37)), ()
    if kind == "few rows":
        return nn.Sequential(nn.Linear(96, size(32, 40, 41)), nn.GELU()), (torch.randn(size(1, 2, 8), 96),)
    if kind == "attention":
        keys = size(7, 24, 40)
        q, width = heads[0], heads[0].shape[-1]
        causal = random.random() < 0.5
        return Attention(causal), (q, *(torch.randn(1, 2, q.shape[2] if causal else keys, width) for _ in range(2)))
    if kind == "pool":
        return random.choice([nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)]), (image,)
    if kind == "norm":
        width = size(8, 24, 56, 37)
        return random.choice([nn.LayerNorm(width), nn.Softmax(-1)]), (torch.randn(rows, width),)
    if kind == "batched":
        return Product(), (torch.randn(2, rows, 24), torch.randn(2, 24, size(8, 16, 19)))
    return Rows(size(8, 16, 37)), ()


class Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + 1) @ b


def any_schedule(random: Random, target: Machine) -> Chooser:
    """Chooses any candidate of any schema that can be lowered, instead of the best."""

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads)
        for _ in range(20):
            number = random.randrange(len(ranking.parts))
            choice = ranking.choice(random.randrange(*map(int, ranking.starts[number : number + 2])))
            try:
                lower(problem, choice.schedule, target)
            except Unsuitable:
                continue
            return choice
        return ranking.first()

    return chooser


@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES), target=st.sampled_from([H200, V100]))
@settings(max_examples=draws(25), deadline=None)
def test_any_schedule_is_as_good_as_pytorch(seed: int, dtype: torch.dtype, target: Machine) -> None:
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = drawn(random)
        if not inputs:
            width = module.in_features if isinstance(module, nn.Linear) else module.norm.normalized_shape[0]  # type: ignore[index, union-attr]
            inputs = (torch.randn(random.choice([1, 9, 40]), width),)  # type: ignore[arg-type]
    module, inputs = module.to(dtype).eval(), in_type(inputs, dtype)
    check(module, inputs, planned(module, inputs, target, any_schedule(random, target)))


@pytest.mark.in_turns(2)
@EACH_TYPE
@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.GELU(), (4096, 1024)),
        (nn.LayerNorm(1024), (4096, 1024)),
        (nn.Softmax(-1), (4096, 1024)),
        (nn.Sequential(nn.Conv2d(64, 64, 1), nn.MaxPool2d(2), nn.Conv2d(64, 64, 1)), (64, 64, 56, 56)),
        (nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 64, 1)), (64, 64, 56, 56)),
    ],
    ids=["map", "normalisation", "softmax", "pooling", "depthwise"],
)
def test_vectors_of_16_bytes_and_half_the_traffic(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def candidates(dtype: torch.dtype) -> list[tuple[int, float]]:
        """The widest vectors and the bytes read of the region that is meant."""
        found: list[tuple[int, float]] = []

        def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
            part = rank(problem, machine, threads).parts[0]
            if problem.region.kind in ("window", "row reduction") or isinstance(module, nn.GELU):
                found.append((int(part.candidates["vector_width"].max()), float(part.counts.read_bytes.min())))
            return choose(problem, machine, threads)

        planned(copy.deepcopy(module).to(dtype), (torch.zeros(shape, dtype=dtype),), H200, chooser)
        return found

    ((narrow, bytes_of_halves),) = candidates(dtype)
    ((wide, bytes_of_floats),) = candidates(torch.float32)
    assert (narrow, wide) == (8, 4)
    assert bytes_of_floats == pytest.approx(2 * bytes_of_halves)


@EACH_TYPE
def test_weights_are_packed_in_16_bits(dtype: torch.dtype) -> None:
    module = nn.Sequential(
        nn.Conv2d(16, 40, 1), nn.Conv2d(40, 40, 3, groups=40), nn.Conv2d(40, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10)
    )
    program = planned(module.to(dtype).eval(), (torch.zeros(1, 16, 8, 8, dtype=dtype),), H200)
    packed = [storage.value for lowered in program.regions for storage in lowered.storage.values() if storage.source is not None]
    assert len(packed) >= 3 and {value.dtype for value in packed} == {"bf16" if dtype is torch.bfloat16 else "f16"}


@pytest.mark.in_turns
@EACH_TYPE
@pytest.mark.parametrize("filter_size, way", [(3, "winograd"), (7, "fourier")])
def test_transforms_have_float32_points(dtype: torch.dtype, filter_size: int, way: str) -> None:
    """Transformed inputs of large float16 numbers exceed its range."""
    torch.manual_seed(0)
    module = nn.Conv2d(16, 16, filter_size, padding=filter_size // 2).to(dtype)
    inputs = (torch.full((1, 16, 12, 12), 3e4, dtype=dtype) * torch.randn(1, 16, 12, 12).sign().to(dtype),)
    with torch.no_grad():
        module.weight *= 1e-3

    def winograd(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads)
        found = [choice for choice in ranking if choice.schema.name.startswith("winograd")]
        return found[0] if found else ranking.first()

    program = planned(module, inputs, H200, winograd)
    assert any(way in lowered.schedule for lowered in program.regions)
    check(module, inputs, program)


@EACH_TYPE
def test_chains(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU()).to(dtype)
    inputs = (torch.randn(1, 8, 12, 12).to(dtype),)
    check(module, inputs, planned(module, inputs, H200, chains=True))


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("seed", range(2))
def test_chunks_of_channels(name: str, seed: int) -> None:
    """Tiles of chains in 16 bits whose last sums are in chunks, on CUDA cores or, where a tile has whole matrices, on tensor cores."""
    torch.manual_seed(seed)
    dtype = (torch.float16, torch.bfloat16)[seed]
    module, inputs = copy.deepcopy(CHUNKED[name][0]).to(dtype).eval(), tuple(torch.randn(shape).to(dtype) for shape in CHUNKED[name][1])
    with any_tiles(seed, chunked=True):
        program = planned(module, inputs, H200, chains=True)
    chains = [lowered for lowered in program.regions if lowered.region.kind == "chain"]
    assert chains and all("chunks of" in lowered.schedule for lowered in chains)
    check(module, inputs, program)
    compiles(program, H200)


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_chunks_of_channels_on_tensor_cores(dtype: torch.dtype) -> None:
    """The first of the tiles that are drawn which has whole matrices."""
    module, shapes = CHUNKED["inverted, stride 2"]
    module, inputs = copy.deepcopy(module).to(dtype).eval(), tuple(torch.randn(shape).to(dtype) for shape in shapes)
    for seed in range(30):
        with any_tiles(seed, chunked=True):
            program = planned(module, inputs, H200, chains=True)
        (chain,) = (lowered for lowered in program.regions if lowered.region.kind == "chain")
        if "tensor cores" in chain.schedule.split("; ")[-1]:
            check(module, inputs, program)
            compiles(program, H200)
            return
    raise AssertionError("no tile has whole matrices")


@pytest.mark.in_turns(3)
@EACH_TYPE
@pytest.mark.parametrize("name", EXCHANGED)
def test_blocks_of_a_cluster_exchange_rows(name: str, dtype: torch.dtype) -> None:
    """Rows of 16-bit values pass between blocks as they are stored, eight elements at a time where rows are whole vectors."""
    seed = list(EXCHANGED).index(name)
    torch.manual_seed(seed)
    module, inputs = copy.deepcopy(EXCHANGED[name][0]).to(dtype).eval(), tuple(torch.randn(shape).to(dtype) for shape in EXCHANGED[name][1])
    with any_tiles(seed, exchanged=True):
        program = planned(module, inputs, H200, chains=True)
    (chain,) = (lowered for lowered in program.regions if lowered.region.kind == "chain")
    (kernel,) = chain.kernels
    offered = [found.buffer for found in statements(kernel.body) if isinstance(found, Allocate) and found.buffer.space == "cluster"]
    assert offered and {buffer.dtype for buffer in offered} == {"bf16" if dtype is torch.bfloat16 else "f16"}
    lanes = {"two exchanges": 8, "maximum pooling": 1}.get(name)
    assert lanes is None or f"tw_cluster_load{lanes}_b16(" in print_cuda([kernel])
    check(module, inputs, program)
    compiles(program, H200)


def test_a_part_of_a_processor() -> None:
    """A block that shares a processor has its part of every rate, so that one product of a warp takes as long as alone with fewer warps beside it."""
    for share in (1, 2, 4):
        part = shared_processor(H200, share, 0.0)
        whole, own = (mma_flops(machine, "f16") / (machine.processors * machine.schedulers_per_processor) for machine in (H200, part))
        assert own == pytest.approx(whole)
        assert part.sustained_flops["fp32"] / part.peak_flops["fp32"] == pytest.approx(H200.sustained_flops["fp32"] / H200.peak_flops["fp32"])


class Regions(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=self.dtype):
            y = torch.softmax(self.norm(self.first(x)), -1)
            return self.last(y), y


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_autocast_keeps_its_types(dtype: torch.dtype) -> None:
    module, inputs = Regions(dtype).eval(), (torch.randn(6, 32),)
    check(module, inputs, planned(module, inputs, H200))


@pytest.mark.in_turns(1)
@EACH_TYPE
@pytest.mark.parametrize("number", [0, 6])
def test_onnx_files(number: int, dtype: torch.dtype, tmp_path: Path) -> None:
    module, inputs = copy.deepcopy(CASES[number][0]).to(dtype).eval(), in_type(CASES[number][1], dtype)
    imported = import_onnx(export_onnx(module, inputs, str(tmp_path)))
    program = program_of(imported, H200)
    check(module, inputs, program, imported)
    compiles(program, H200)


class EncoderLayer(nn.Module):
    """A layer of BERT base over 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


@pytest.mark.slow
@EACH_TYPE
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "encoder layer"])
def test_networks_have_no_node_of_pytorch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module, inputs = (EncoderLayer().eval(), (torch.randn(1, 64, 768),)) if name == "encoder layer" else zoo.build(name)
    executable = tilewright.compile(module.to(dtype), in_type(inputs, dtype), "h200", unsupported="error")
    assert not [row for row in executable.plan.rows if row.kind == "torch"]
    executable.save(tmp_path / "model.zip")
    assert (tmp_path / "model.zip").stat().st_size < 1.1 * sum(2 * p.numel() for p in module.parameters()) + (1 << 22)


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_trials_measure_them(dtype: torch.dtype, tmp_path: Path) -> None:
    problems: list[Problem] = []

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        problems.append(canonical(problem).problem)
        return choose(problem, machine, threads)

    module = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 8, 1))
    planned(module.to(dtype), (torch.zeros(1, 8, 6, 6, dtype=dtype),), H200, chooser)
    for problem in problems[:3]:
        server = EmulatedServer(problem, H200)
        ranking = rank(problem, H200)
        for part, start in zip(ranking.parts, ranking.starts, strict=False):
            choice = ranking.choice(int(start) + length(part.candidates) // 2)
            answer = server.trial({"program": server.program(choice.schedule, tmp_path), "mode": "cold"})
            assert "error" not in answer, answer
            assert answer["relative_error"] < (2.0**-8 if dtype is torch.bfloat16 else 2.0**-11), choice.schedule


@pytest.mark.in_turns(1)
@EACH_TYPE
@pytest.mark.parametrize("module, shape", [(nn.GRU(32, 96, bidirectional=True), (5, 3, 32)), (nn.LSTM(32, 512), (3, 1, 32))], ids=["cluster", "grid"])
def test_recurrent_layers_are_one_kernel(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module, inputs = copy.deepcopy(module).to(dtype).eval(), (torch.randn(shape).to(dtype),)
    program = planned(module, inputs, H200)
    assert any("steps in one kernel" in lowered.schedule for lowered in program.regions)
    check(module, inputs, program)
    compiles(program, H200)
