"""Products by warpgroups: candidates over random layers in the interpreter, against PyTorch in float64; NVRTC compiles them; a GPU runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.draws import draws
from tests.interpreted import run_program
from tests.on_device import cuda_binary, launch
from tests.statements import without
from tests.test_gpu_half import check, planned
from tests.test_half_modules import EACH_TYPE, TYPES, array_of, in_type
from tilewright.analysis.gpu.warps import NotStatic, accesses
from tilewright.codegen.cuda import print_cuda, shared_bytes
from tilewright.codegen.interpreter import run
from tilewright.hardware import machine
from tilewright.hardware.machine import Machine
from tilewright.ir.dtypes import ELEMENT_TYPES
from tilewright.ir.expr import loads
from tilewright.ir.kernel import For, If, Invoke, Kernel, Store, statements
from tilewright.ir.problem import Problem
from tilewright.ir.region import Program
from tilewright.kernels.gpu.warpgroup.schema import WARPGROUP
from tilewright.kernels.gpu.warpgroup.space import WarpgroupSchedule
from tilewright.kernels.gpu.warpgroup_patch.schema import WARPGROUP_PATCH
from tilewright.kernels.schema import USUAL, AnySchema, Numerics
from tilewright.partition.context import Chooser
from tilewright.runtime.packing import nearest_tf32
from tilewright.selection.choice import rank
from tilewright.selection.ranking import Choice, Ranking, variants_of

H200, A100 = machine("h200"), machine("a100")
FEW = replace(H200, processors=2)
"""A GPU on which small layers have clusters too."""
ONE = replace(H200, processors=1)
"""A GPU on which they have more tiles than blocks at once."""


TF32 = Numerics(tf32=True)


def with_schedule(pick: Any, used: list[Any], numerics: Numerics = USUAL, schema: AnySchema = WARPGROUP, axis: str = "") -> Chooser:
    """Chooses for each region that has candidates of the schema a given one, or the one that a function `pick` picks of their number; of the variants
    alone that take the `axis`, if there are any and one is named."""

    def chooser(problem: Problem, machine: Machine, threads: int) -> Choice:
        ranking = rank(problem, machine, threads, numerics)
        own = next((number for number, part in enumerate(ranking.parts) if part.schema is schema), None)
        if own is None:
            return ranking.first()
        begin, end = map(int, ranking.starts[own : own + 2])
        numbers: Sequence[int] = range(begin, end)
        varied = variants_of(ranking.parts[own], np.arange(end - begin), machine) if axis else None
        if varied is not None and varied[0].candidates[axis].any():
            ranking = Ranking(machine, (varied[0],))
            numbers = np.flatnonzero(varied[0].candidates[axis]).tolist()
        choice = ranking.choice(numbers[pick(len(numbers)) if callable(pick) else 0])
        used.append(choice.schedule if callable(pick) else pick)
        return replace(choice, schedule=used[-1])

    return chooser


def made_of(layer: tuple[Callable[[], nn.Module], tuple[int, ...]], dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A layer in the type, and random inputs of its shape."""
    torch.manual_seed(0)
    make, shape = layer
    return make().to(dtype).eval(), (torch.randn(shape).to(dtype),)


def drawn_by(
    draw: Callable[[Random], tuple[nn.Module, tuple[torch.Tensor, ...]]], seed: int, dtype: torch.dtype
) -> tuple[Random, nn.Module, tuple[torch.Tensor, ...]]:
    """A generator of that seed, and the module and inputs in the type that it has drawn."""
    random = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = draw(random)
    return random, module.to(dtype).eval(), in_type(inputs, dtype)


def program_of(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    pick: Any,
    used: list[Any],
    numerics: Numerics = USUAL,
    schema: AnySchema = WARPGROUP,
    target: Machine = H200,
    axis: str = "",
) -> Program:
    return planned(module, inputs, target, with_schedule(pick, used, numerics, schema, axis))


def compiles(program: Program) -> None:
    kernels = {kernel.name: kernel for lowered in program.regions for kernel in lowered.kernels}
    passed, log = cuda_binary(print_cuda(list(kernels.values())))
    assert passed and "warning" not in log and "serialized" not in log and "injected" not in log, log
    assert log.count(" 0 bytes spill stores") == len(kernels), log


SCHEDULES = (
    WarpgroupSchedule(16, 1, 2),
    WarpgroupSchedule(64, 2, 3),
    WarpgroupSchedule(96, 1, 4),
    WarpgroupSchedule(256, 2, 3),
    WarpgroupSchedule(16, 1, 2, 1),
    WarpgroupSchedule(96, 2, 3, 1),
    WarpgroupSchedule(32, 1, 2, 0, 2),
    WarpgroupSchedule(64, 2, 2, 1, 3),
    WarpgroupSchedule(32, 1, 2, cluster=2),
    WarpgroupSchedule(96, 2, 3, cluster=2),
    WarpgroupSchedule(48, 1, 4, 1, 2, 2),
    WarpgroupSchedule(48, 2, 3, staged=1),
    WarpgroupSchedule(256, 1, 3, staged=1),
    WarpgroupSchedule(96, 2, 3, 1, cluster=2, staged=1),
)
"""Each number of consumers and stages, both orders of the factors, split reductions, clusters, and sums through shared memory."""

IN_TURNS = (
    (WarpgroupSchedule(128, 2, 3, persistent=1), ONE),
    (WarpgroupSchedule(256, 2, 3, swapped=1, staged=1, persistent=1), ONE),
    (WarpgroupSchedule(96, 1, 8, staged=1, persistent=1), ONE),
    (WarpgroupSchedule(256, 2, 4, cluster=2, persistent=1), FEW),
)
"""Blocks that compute several tiles, with fewer stages than steps and with more, and for which GPU."""


def in_turns(program: Program) -> Kernel:
    """The last product's kernel, which fits on the GPU and has more tiles than blocks."""
    (kernel,) = [lowered for lowered in program.regions if lowered.region.kind == "contraction"][-1].kernels
    assert shared_bytes(kernel) <= H200.shared_bytes_per_block
    assert any(isinstance(s, For) and s.variable.name == "turn" and (s.variable.extent or 1) > 1 for s in statements(kernel.body))
    return kernel


def tiled(dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution of several tiles."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(16, 64, 1), nn.Conv2d(64, 72, 3, padding=1), nn.Hardswish()).to(dtype)
    return layers, (torch.randn(2, 16, 19, 17).to(dtype),)


@pytest.mark.in_turns(2)
@EACH_TYPE
@pytest.mark.parametrize("schedule, target", IN_TURNS, ids=lambda value: "" if isinstance(value, Machine) else str(value))
def test_tiles_in_turns(schedule: WarpgroupSchedule, target: Machine, dtype: torch.dtype) -> None:
    module, inputs = tiled(dtype)
    program = program_of(module, inputs, schedule, [], target=target)
    in_turns(program)
    check(module, inputs, program)
    compiles(program)


def test_the_last_stage_of_a_tile_is_freed_for_the_next_one() -> None:
    module, inputs = tiled(torch.float16)
    kernel = in_turns(program_of(module, inputs, WarpgroupSchedule(128, 2, 3, persistent=1), [], target=ONE))
    arrivals = [s for s in statements(kernel.body) if isinstance(s, Invoke) and s.intrinsic.name == "arrival at a barrier"]
    arrays = [np.zeros(buffer.size, ELEMENT_TYPES[buffer.dtype].array) for buffer in kernel.parameters]
    faults = run(replace(kernel, body=without(kernel.body, lambda s: s is arrivals[-1])), arrays).faults
    assert any("deadlock" in fault for fault in faults), faults


TYPES_OF = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(200, 72), nn.GELU()), (3, 50, 200)),
    "1x1": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 40, 1), nn.ReLU()), (2, 16, 9, 8)),
    "3x3": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 72, 3, padding=1), nn.ReLU()), (2, 16, 9, 8)),
    "stride": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 24, 3, stride=2, padding=1)), (2, 16, 9, 8)),
    "dilation": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, (3, 2), padding=2, dilation=2)), (1, 16, 9, 8)),
    "1x1, stride": (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.Conv2d(32, 24, 1, stride=2)), (2, 16, 9, 8)),
    "1-D": (lambda: nn.Sequential(nn.Conv1d(16, 32, 1), nn.Conv1d(32, 24, 5, padding=2)), (2, 16, 30)),
    "3-D": (lambda: nn.Sequential(nn.Conv3d(16, 32, 1), nn.Conv3d(32, 24, 3, padding=1)), (1, 16, 4, 5, 6)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 40, 3, padding=1, groups=2), nn.ReLU()), (2, 16, 9, 8)),
    "groups, stride": (lambda: nn.Sequential(nn.Conv2d(16, 96, 1), nn.Conv2d(96, 72, (2, 3), stride=2, groups=3)), (2, 16, 9, 8)),
    "groups, 1x1": (lambda: nn.Sequential(nn.Conv2d(16, 120, 1), nn.Conv2d(120, 72, 1, groups=3), nn.ReLU()), (2, 16, 9, 8)),
}


@pytest.mark.in_turns(5)
@EACH_TYPE
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS[layer], dtype)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, WarpgroupSchedule(32, 2, 3), used)
    assert used
    check(module, inputs, program)
    compiles(program)


@pytest.mark.in_turns(3)
@EACH_TYPE
@pytest.mark.parametrize("schedule", [*SCHEDULES[1:4], *SCHEDULES[5:9], *SCHEDULES[-2:]], ids=str)
def test_schedules_of_groups(schedule: WarpgroupSchedule, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS["groups"], dtype)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, schedule, used)
    assert used[-1] == schedule
    check(module, inputs, program)


def check_infinite_group(channels: int, taps: int, schedule: Any, schema: AnySchema = WARPGROUP) -> bool:
    """Infinite channels of one of three groups affect its results alone. Returns whether the schema computed them: a step whose 128 bytes reached
    into the next group would multiply infinity by zero."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(16, 3 * channels, 1), nn.Conv2d(3 * channels, 24, taps, groups=3)
    with torch.no_grad():
        assert first.bias is not None
        first.bias[channels : 2 * channels] = torch.inf
    module, inputs = nn.Sequential(first, last).half().eval(), (torch.randn(1, 16, 5, 6).half(),)
    used: list[Any] = []
    program = program_of(module, inputs, schedule, used, schema=schema)
    results, faults = run_program(program, {name: array_of(x) for name, x in zip(program.graph.inputs, inputs, strict=True)})
    found = torch.from_numpy(results[program.graph.outputs[0]]).view(torch.float16).double()
    expected = module.double()(inputs[0].double()).detach().reshape(found.shape)
    finite = expected.isfinite()
    assert not faults and finite.any() and not finite.all() and (found.isfinite() == finite).all()
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-2, atol=1e-2)
    return bool(used)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("channels", [48, 40])
@pytest.mark.parametrize("taps", [1, 3])
def test_infinite_channels_of_a_group_stay_there(channels: int, taps: int) -> None:
    assert check_infinite_group(channels, taps, WarpgroupSchedule(16, 1, 2)) == (channels == 48 or taps == 1)


@pytest.mark.in_turns(5)
@EACH_TYPE
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: WarpgroupSchedule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = (
        nn.Sequential(nn.Conv2d(16, 64, 1), nn.Conv2d(64, 72, 3, padding=1), nn.Hardswish()).to(dtype),
        (torch.randn(1, 16, 10, 9).to(dtype),),
    )
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, schedule, used)
    assert set(used) == {schedule}
    check(module, inputs, program)
    compiles(program)


def check_tf32(module: nn.Module, inputs: tuple[torch.Tensor, ...], program: Program) -> None:
    """10 bits of mantissa, cut off: an error of 2^-10 per factor."""
    results, faults = run_program(program, {name: x.numpy() for name, x in zip(program.graph.inputs, inputs, strict=True)})
    assert not faults
    expected = module.double()(inputs[0].double()).detach().numpy()
    error = abs(results[program.graph.outputs[0]].reshape(expected.shape) - expected).max()
    assert 1e-7 < error < 4 * 2.0**-10 * abs(expected).max()


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("layer", ["linear", "1x1", "3x3", "stride", "groups", "groups, stride"])
def test_layers_in_tf32(layer: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    module, inputs = make().eval(), (torch.randn(shape),)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, WarpgroupSchedule(64, 2, 4), used, TF32)
    assert used
    check_tf32(module, inputs, program)
    compiles(program)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("schema", [WARPGROUP, WARPGROUP_PATCH], ids=lambda schema: schema.name)
def test_weights_are_rounded_to_tf32(schema: AnySchema) -> None:
    """Of factors that are TF32 already, the result is that of the nearest weights, not of those that are cut off."""
    torch.manual_seed(0)
    first = nn.Conv2d(16, 32, 3, padding=1).eval()
    x = nearest_tf32(torch.randn(2, 16, 9, 8)).to(memory_format=torch.channels_last)
    used: list[Any] = []
    program = program_of(first, (x,), lambda count: 0, used, TF32, schema)
    assert used
    results, faults = run_program(program, {name: given.numpy() for name, given in zip(program.graph.inputs, (x,), strict=True)})
    assert not faults
    assert first.bias is not None
    expected = nn.functional.conv2d(x.double(), nearest_tf32(first.weight).double(), first.bias.double(), padding=1).detach().numpy()
    np.testing.assert_allclose(results[program.graph.outputs[0]].reshape(expected.shape), expected, rtol=0, atol=1e-5)


class Product(nn.Module):
    """Of two computed factors."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b.mT


class Block(nn.Module):
    """A convolution, an activation and a residual that is a view of a concatenation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.first(x), self.second(x)], 1)
        result: torch.Tensor = torch.relu(self.last(both)) + both[:, : x.shape[1]]
        return result


@EACH_TYPE
def test_products_of_computed_factors(dtype: torch.dtype) -> None:
    for shapes in (((3, 70, 40), (3, 24, 40)), ((65, 64), (33, 64)), ((2, 2, 64, 24), (2, 2, 40, 24))):
        torch.manual_seed(0)
        inputs = tuple(torch.randn(shape).to(dtype) for shape in shapes)
        used: list[WarpgroupSchedule] = []
        program = program_of(Product(), inputs, WarpgroupSchedule(32, 1, 2), used)
        assert used
        check(Product(), inputs, program)


@pytest.mark.in_turns(1)
@EACH_TYPE
def test_a_residual_that_is_a_view_of_a_concatenation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(nn.Conv2d(16, 16, 1), Block(16)).to(dtype).eval(), (torch.randn(2, 16, 7, 9).to(dtype),)
    used: list[WarpgroupSchedule] = []
    program = program_of(module, inputs, WarpgroupSchedule(32, 1, 3), used)
    assert len(used) >= 3
    check(module, inputs, program)


@pytest.mark.in_turns(1)
@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize("axis", ["staged", "swapped"])
@EACH_TYPE
def test_operands_are_read_ahead_of_guards(axis: str, persistent: int, dtype: torch.dtype) -> None:
    """Rows and columns end within a tile: nothing but the store is behind a branch, of staged results, and of swapped factors where a residual is
    added to sums of many rows."""
    torch.manual_seed(0)
    module, inputs = Block(40).to(dtype).eval(), (torch.randn(2, 40, 7, 9).to(dtype),)
    used: list[WarpgroupSchedule] = []
    schedule = replace(WarpgroupSchedule(32, 1, 3, persistent=persistent), **{axis: 1})
    program = program_of(module, inputs, schedule, used, target=ONE if persistent else H200)
    ahead = 0
    for kernel in (kernel for lowered in program.regions for kernel in lowered.kernels if kernel.maps):
        inside = list(statements(kernel.body))
        stores = [one for one in inside if isinstance(one, Store) and one.buffer in {buffer.name for buffer in kernel.parameters}]
        guarded = [id(one.then) for one in inside if isinstance(one, If)]
        assert stores
        ahead += all(id(one) in guarded and not loads(one.value) for one in stores)
    assert ahead == (len(used) if axis == "staged" else 1) and len(used) > 1
    check(module, inputs, program)


def drawn(random: Random) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A convolution with an epilogue, or a linear layer, of random sizes."""

    def size(*choices: int) -> int:
        return random.choice(choices)

    channels, outputs, taps = size(8, 16, 40, 72, 96), size(5, 8, 24, 80), size(1, 2, 3, 5)
    options = {"stride": size(1, 1, 2, 3), "dilation": size(1, 1, 2), "padding": size(0, 1, taps // 2), "groups": gcd(channels, outputs, size(1, 2))}
    if random.random() < 0.3:
        width = size(8, 24, 64, 136)
        return nn.Sequential(nn.Linear(width, outputs), nn.SiLU()), (torch.randn(size(1, 17, 150), width),)
    first = nn.Conv2d(8, channels, 1)
    last = nn.Conv2d(channels, outputs, (taps, size(1, taps)), **options)  # type: ignore[arg-type]
    return nn.Sequential(first, last, nn.ReLU()), (torch.randn(size(1, 2, 3), 8, size(9, 11), size(10, 13)),)


@settings(max_examples=draws(15), deadline=None, derandomize=True, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(TYPES))
def test_any_candidate_is_as_good_as_pytorch(seed: int, dtype: torch.dtype) -> None:
    random, module, inputs = drawn_by(drawn, seed, dtype)
    check(module, inputs, program_of(module, inputs, random.randrange, [], target=random.choice((H200, FEW, ONE))))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    "left_out, position, found",
    [
        ("arrival at a barrier of a block", 0, "deadlock"),
        ("to all blocks", 0, "deadlock"),
        ("cluster barrier", 0, "race"),
        ("cluster barrier", -1, "may have ended"),
        ("wait of a warpgroup", 0, "race"),
    ],
)
def test_what_is_left_out_of_clusters_is_reported(left_out: str, position: int, found: str) -> None:
    """An arrival at the other block's barrier, a part of B from the other block, the meetings before and at the end, and the wait for a tile."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 72)).half()
    used: list[WarpgroupSchedule] = []
    schedule = WarpgroupSchedule(32, 1, 2, cluster=2)
    (kernel,) = program_of(module, (torch.randn(130, 256).half(),), schedule, used).regions[-1].kernels
    others = [s for s in statements(kernel.body) if isinstance(s, Invoke) and left_out in s.intrinsic.name]
    assert used == [schedule] and others

    arrays = [np.zeros(buffer.size, ELEMENT_TYPES[buffer.dtype].array) for buffer in kernel.parameters]
    assert not run(kernel, arrays).faults
    faults = run(replace(kernel, body=without(kernel.body, lambda s: s is others[position])), arrays).faults
    assert any(found in fault for fault in faults), faults


def test_what_engines_access_is_not_counted() -> None:
    make, shape = LAYERS["linear"]
    (kernel,) = program_of(make().half(), (torch.randn(shape).half(),), SCHEDULES[0], []).regions[-1].kernels
    with pytest.raises(NotStatic, match="is not counted"):
        accesses(kernel)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@EACH_TYPE
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_on_the_gpu(layer: str, dtype: torch.dtype) -> None:
    module, inputs = made_of(LAYERS[layer], dtype)
    for schedule in SCHEDULES:
        as_interpreted(program_of(module, inputs, schedule, []))


@pytest.mark.gpu
@EACH_TYPE
def test_tiles_in_turns_on_the_gpu(dtype: torch.dtype) -> None:
    module, inputs = tiled(dtype)
    for schedule, target in IN_TURNS:
        as_interpreted(program_of(module, inputs, schedule, [], target=target))


def as_interpreted(program: Program) -> None:
    """The kernels of the last region give on the GPU what they give in the interpreter, up to the order of sums, on random values."""
    for kernel in program.regions[-1].kernels:
        outputs = [buffer.name for buffer in kernel.parameters if buffer.writable]
        arrays = [array_of(torch.randn(buffer.size).to(TYPES_OF[buffer.dtype])) for buffer in kernel.parameters]
        found = [array.copy() for array in arrays]
        assert run(kernel, arrays, initialised=outputs).is_clean
        launch(kernel, found)
        for buffer, mine, theirs in zip(kernel.parameters, arrays, found, strict=True):
            if buffer.writable:
                a, b = (torch.from_numpy(array).view(TYPES_OF[buffer.dtype]).float() for array in (mine, theirs))
                torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)
