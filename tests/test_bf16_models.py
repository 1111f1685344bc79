"""precision="bf16" on whole models: against torch.autocast, artifacts, trials, absent targets, errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.compiled import poison
from tests.sample_artifacts import rewrite_manifest
from tilewright import zoo
from tilewright.errors import InvalidArtifact, KernelFailed, TargetNotPresent, UnsupportedOption
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import host_cpu, machine
from tilewright.ir.graph import Value
from tilewright.ir.region import Region
from tilewright.partition.plan import plan_program
from tilewright.partition.precision import BFLOAT16_ISA, Precision
from tilewright.partition.regions import lay_out
from tilewright.runtime import artifact, cpu
from tilewright.runtime.loadable import LoadableKernel

XEON = machine("xeon-sapphire-rapids")
here = pytest.mark.skipif(not set(BFLOAT16_ISA) <= set(host_cpu().isa), reason="this CPU has no products of bfloat16")
HAS_TILES = "amx_bf16" in host_cpu().isa


class Small(nn.Module):
    """Three input channels, a residual, pooling, a depthwise convolution, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 5, 2, 2)
        self.second = nn.Conv2d(24, 24, 3, 1, 1)
        self.depthwise = nn.Conv2d(24, 24, 3, 1, 1, groups=24)
        self.third = nn.Conv2d(24, 40, 1)
        self.last = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        x = nn.functional.max_pool2d(self.depthwise(x), 2)
        return self.last(torch.nn.functional.silu(self.third(x)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 20, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(2, 20, 64)) + x


class Recurrent(nn.Module):
    """A loop, whose values keep their types, and a node that runs through PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(8, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(torch.relu(self.before(x)))
        return self.after(y)


class Scaled(nn.Module):
    """A model whose product is stored in bfloat16 because it is read twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.softmax(x, -1)
        return y.sum(0), y.amax(0)


def model_cases() -> list[tuple[nn.Module, Sequence[torch.Tensor]]]:
    torch.manual_seed(0)
    return [
        (Small().eval(), (torch.randn(2, 3, 21, 18),)),
        (Attention().eval(), (torch.randn(2, 20, 64),)),
        (Recurrent().eval(), (torch.randn(3, 5, 8),)),
        (nn.Linear(7, 5).eval(), (torch.randn(4, 7),)),
        (Scaled().eval(), (torch.randn(30, 40),)),
    ]


def assert_as_good_as_autocast(module: nn.Module, inputs: Sequence[torch.Tensor], found: object) -> None:
    """No more than twice the error of torch.autocast(bfloat16), or a few units of bfloat16 of the largest result."""
    with torch.no_grad():
        exact = torch.utils._pytree.tree_leaves(copy.deepcopy(module).double()(*[x.double() if x.is_floating_point() else x for x in inputs]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lower = torch.utils._pytree.tree_leaves(module(*inputs))
    for ours, theirs, wanted in zip(torch.utils._pytree.tree_leaves(found), lower, exact, strict=True):
        assert ours.dtype == torch.float32 and ours.isfinite().all()
        scale = wanted.abs().max()
        error = float((ours.double() - wanted).abs().max() / scale)
        assert error <= max(2 * float((theirs.double() - wanted).abs().max() / scale), 2.0**-7), error


@pytest.mark.in_turns(3)
@here
@pytest.mark.parametrize("number", range(len(model_cases())))
def test_models_are_as_good_as_autocast(number: int) -> None:
    module, inputs = model_cases()[number]
    executable = tilewright.compile(module, inputs, precision="bf16", threads=2)
    poison(executable)
    fresh = [torch.randn_like(x) for x in inputs]
    assert_as_good_as_autocast(module, fresh, executable(*fresh))
    assert_as_good_as_autocast(module, inputs, executable(*inputs))
    if not any(row.kind == "loop" for row in executable.plan.rows):
        verified = executable.verify(*fresh)
        assert verified.first_wrong is None, str(verified)


@here
@pytest.mark.skipif(not HAS_TILES, reason="this CPU has no tile registers")
def test_a_process_without_permission_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = model_cases()[0]
    executable = tilewright.compile(module, inputs, precision="bf16", threads=2)
    assert cpu.permit_tiles()
    monkeypatch.setattr(cpu, "permit_tiles", lambda: False)
    with pytest.raises(KernelFailed, match="does not let this process.*fp32"):
        cpu.Library(executable.image.binaries, executable.image.program.kernels)


@here
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16", "mobilenet_v2", "inception_v3", "densenet121", "bert_base"])
def test_networks_are_as_good_as_autocast(name: str) -> None:
    module, inputs = zoo.build(name)
    torch.manual_seed(1)
    fresh = zoo.NETWORKS[name].example_inputs(1)
    executable = tilewright.compile(module, inputs, precision="bf16", threads=2)
    poison(executable)
    assert_as_good_as_autocast(module, fresh, executable(*fresh))


@here
def test_values_between_kernels_are_bfloat16_and_the_rest_keeps_its_type() -> None:
    module, inputs = model_cases()[0]
    program = tilewright.compile(module, inputs, precision="bf16", threads=2).image.program
    kinds = {name: storage.value.dtype for name, storage in program.storage.items()}
    assert {kinds[name] for name in (*program.graph.inputs, *program.graph.outputs, *program.graph.constants) if name in kinds} == {"f32"}
    between = {name for region in program.regions for name in region.outputs} - set(program.graph.outputs)
    assert between and {kinds[name] for name in between} == {"bf16"}
    natively = "amx" if HAS_TILES else "pairs of bfloat16"
    assert any(natively in row.schedule for row in tilewright.compile(module, inputs, precision="bf16", threads=2).plan.rows)


def test_a_precision_decides_for_each_region_and_value() -> None:
    """Two of three products in bfloat16: the second one's input is stored in bfloat16, the third one's is not, and the first one reads a copy."""
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    graph, _ = simplify(import_module(module, (torch.randn(8, 64),)).graph)
    first, second, third = (region.outputs[0] for region in lay_out(graph).regions)
    chosen = {graph.inputs[0], first}
    asked: set[tuple[str, str]] = set()

    def stored(region: Region, value: Value) -> str:
        asked.add((region.outputs[0], value.name))
        return "bf16" if value.name in chosen else value.dtype

    program = plan_program(graph, XEON, 2, precision=Precision(stored, whole_rows=False), chains=False)
    kinds = {name: storage.value.dtype for name, storage in program.storage.items()}
    assert (kinds[first], kinds[second], kinds[third]) == ("bf16", "f32", "f32")
    copy = f"{graph.inputs[0]}.bf16"
    assert kinds[copy] == "bf16" and kinds[graph.inputs[0]] == "f32"
    by_output = {region.region.outputs[0]: region for region in program.regions}
    assert {name: by_output[name].schedule.startswith("amx") for name in (first, second, third)} == {first: True, second: True, third: False}
    assert copy in by_output[first].region.inputs and {(first, first), (second, first), (third, second)} <= asked
    assert (third, third) not in asked, "what leaves the model keeps its type"


@here
@pytest.mark.parametrize("suffix", ["", ".zip"])
def test_an_artifact_computes_the_same(tmp_path: Path, suffix: str) -> None:
    module, inputs = model_cases()[0]
    executable = tilewright.compile(module, inputs, precision="bf16", threads=2)
    executable.save(tmp_path / f"model{suffix}")
    loaded = tilewright.load(tmp_path / f"model{suffix}")
    assert torch.equal(loaded(*inputs), executable(*inputs))


def test_a_machine_with_amx_need_not_be_here() -> None:
    module, inputs = model_cases()[0]
    executable = tilewright.compile(module, inputs, "xeon-sapphire-rapids", precision="bf16", threads=4)
    assert any(row.schedule.startswith("amx") for row in executable.plan.rows)
    if not set(XEON.isa) <= set(host_cpu().isa):
        with pytest.raises(TargetNotPresent):
            executable(*inputs)
    else:
        assert_as_good_as_autocast(module, inputs, executable(*inputs))


def test_kernels_with_tiles_say_what_they_require(tmp_path: Path) -> None:
    module, inputs = model_cases()[0]
    executable = tilewright.compile(module, inputs, "xeon-sapphire-rapids", precision="bf16", threads=4)
    executable.save(tmp_path / "model")
    program = artifact.read(tmp_path / "model").program
    tiled = {call.kernel for region in program.regions for call in region.calls if "amx" in region.schedule}
    assert {name: kernel.requires for name, kernel in program.kernels.items() if kernel.requires} == dict.fromkeys(tiled, ("amx_bf16", "amx_tile"))
    rewrite_manifest(tmp_path / "model", lambda manifest: [kernel.update(requires=[]) for kernel in manifest["program"]["kernels"]])
    with pytest.raises(InvalidArtifact, match="not what the manifest says"):
        artifact.read(tmp_path / "model")


def test_permission_is_requested_for_kernels_that_require_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "permit_tiles", lambda: False)
    kernel = LoadableKernel("amx_kernel", ())
    cpu.Library((), {kernel.name: kernel})
    with pytest.raises(KernelFailed, match="does not let this process"):
        cpu.Library((), {kernel.name: replace(kernel, requires=("amx_tile",))})


@pytest.mark.slow
@here
def test_trials_measure_tiles(tmp_path: Path) -> None:
    module, inputs = nn.Sequential(nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU()).eval(), (torch.randn(1, 16, 12, 12),)
    executable = tilewright.compile(module, inputs, precision="bf16", threads=2, trials=2, records=tmp_path / "records.sqlite")
    assert any(row.measured_seconds is not None for row in executable.plan.rows if row.kind == "contraction")
    assert_as_good_as_autocast(module, inputs, executable(*inputs))


@pytest.mark.parametrize("target", ["x86-avx2", "x86-avx512", "neoverse-n1"])
def test_other_machines_are_refused_with_a_remedy(target: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"needs AVX512-BF16, and {target} is a CPU.*fp32") as error:
        tilewright.compile(nn.Linear(4, 4), torch.randn(2, 4), target, precision="bf16")
    assert "fp32" in str(error.value)


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="'fp8' is not supported"):
        tilewright.compile(nn.Linear(4, 4), torch.randn(2, 4), precision="fp8")


@here
def test_torch_compile_takes_the_option() -> None:
    module, inputs = model_cases()[0]
    torch._dynamo.reset()
    fast = torch.compile(module, backend="tilewright", options={"precision": "bf16", "threads": 2})
    with torch.no_grad():
        found = fast(*inputs)
        assert not torch.equal(found, module(*inputs))  # it is rounded
    assert_as_good_as_autocast(module, inputs, found)
