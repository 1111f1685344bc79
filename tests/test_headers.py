"""The headers of generated kernels, which must not distinguish equal layers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tilewright.codegen.source import source_text
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.kernel import Kernel
from tilewright.ir.region import Program
from tilewright.partition.plan import plan_program


def planned(module: nn.Module, shape: tuple[int, ...], target: str) -> Program:
    graph, _ = simplify(import_module(module.eval(), (torch.zeros(shape),)).graph)
    return plan_program(graph, machine(target), 2, chains=False)


def header(kernel: Kernel) -> list[str]:
    return [line[3:] for line in source_text(kernel).splitlines() if line.startswith("// ") and line[3:] in kernel.header.splitlines()]


@pytest.mark.parametrize("target", ["x86-avx2", "h200"])
def test_a_convolution_states_problem_schedule_parameters_and_prediction(target: str) -> None:
    program = planned(nn.Sequential(nn.Conv2d(24, 40, (2, 5), padding=(0, 2)), nn.ReLU()), (1, 24, 17, 19), target)
    (lowered,) = [region for region in program.regions if region.region.kind == "contraction"]
    name = lowered.calls[0].kernel
    lines = header(program.kernels()[name])
    assert "m 16 x 19, n 40, r 2 x 5 x 24" in lines[0]
    assert lines[1] == lowered.schedule
    roles = {line.split(":")[0]: line for line in lines[2:-1]}
    assert set(roles) == {parameter.name for parameter in program.kernels()[name].parameters}
    packed = ("2 x 5 x 24 x 40", "24 x 2 x 5 x 40")  # depends on the chosen schema
    assert any("A, 1 x 24 x 17 x 19 f32" in line for line in roles.values())
    assert any("B" in line and any(shape in line for shape in packed) for line in roles.values())
    seconds = float(re.match(r"predicted ([0-9.e+-]+) us", lines[-1])[1]) / 1e6  # type: ignore[index]
    assert seconds == pytest.approx(lowered.predicted_seconds, rel=1e-2)
    assert all(name in lines[-1] for name, value in lowered.terms.items() if value)


@pytest.mark.parametrize("target", ["x86-avx2", "h200"])
def test_equal_layers_are_one_kernel_and_headers_name_no_values(target: str) -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    program = planned(nn.Sequential(*layers), (32, 64), target)
    calls = [call for region in program.regions for call in region.calls]
    products = [call.kernel for call in calls if call.kernel.startswith("contraction")]
    assert len(products) >= 3 and len(set(products)) == len(products) // 3
    values = {name for name in program.graph.values if len(name) > 3}
    assert not [(n, line) for kernel in program.kernels().values() for line in header(kernel) for n in values if n in line]


def test_code_that_is_the_same_has_one_name_whatever_the_shape_in_its_header() -> None:
    first, second = (planned(nn.ReLU(), shape, "x86-avx2") for shape in ((6, 50), (3, 100)))
    assert list(first.kernels()) == list(second.kernels())
    assert [header(k) for k in first.kernels().values()] != [header(k) for k in second.kernels().values()]
