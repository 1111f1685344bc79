"""Partition: which operators share a kernel, the layouts of values between kernels, and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiled import Case, check_native
from tests.operator_cases import Applied, Dense, Function, Inverted, Residual, SharedHalo, normal, randomised
from tilewright import zoo
from tilewright.frontend.torch_import import import_module
from tilewright.graph.passes import simplify
from tilewright.hardware import machine
from tilewright.ir.expr import loads
from tilewright.ir.graph import Graph
from tilewright.ir.layout import channels_last, row_major
from tilewright.ir.region import Region
from tilewright.partition.layouts import LaidOut
from tilewright.partition.plan import plan_program
from tilewright.partition.regions import lay_out


def laid_out(model: nn.Module | Callable[..., Any], *inputs: Tensor) -> tuple[Graph, LaidOut]:
    module = model if isinstance(model, nn.Module) else Function(model)
    graph, _ = simplify(import_module(randomised(module), inputs).graph)
    return graph, lay_out(graph)


def with_operator(regions: Sequence[Region], *operators: str) -> list[Region]:
    return [region for region in regions if set(operators) <= {node.operator for node in region.nodes}]


def test_convolution_takes_norm_residual_and_activation() -> None:
    graph, result = laid_out(Residual(3, 16, 1), normal(1, 3, 8, 8))
    contractions = [region for region in result.regions if region.kind == "contraction"]
    assert len(contractions) == 3, "one kernel a convolution, and nothing else but the padded copy of the input"
    assert [region.kind for region in result.regions if region.kind != "contraction"] == ["map"]
    last = contractions[-1]
    assert last.outputs == graph.outputs[:1]
    assert [node.operator for node in last.nodes] == ["convolution", "add", "add", "relu"]
    assert sum("joins as epilogue" in reason for reason in last.reasons) == 3
    assert any("a kernel has one anchor" in reason for reason in last.reasons)


@pytest.mark.parametrize(
    "module, size, kind",
    [
        (nn.Conv2d(8, 8, 13, padding=6, groups=8), 14, "window"),
        (nn.MaxPool2d(13, 1, 6), 14, "window"),
        (nn.AvgPool2d(10, 9), 37, "window"),
        (nn.AvgPool2d(10), 40, "row reduction"),
        (nn.AdaptiveAvgPool2d(1), 14, "row reduction"),
    ],
    ids=str,
)
def test_large_windows_that_overlap_are_no_rows(module: nn.Module, size: int, kind: str) -> None:
    _, result = laid_out(module, normal(1, 8, size, size))
    assert [region.kind for region in result.regions if region.kind != "map"] == [kind]


@pytest.mark.parametrize("channels, size", [(8, (9, 11)), (1, (9, 11)), (6, (12,))], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
def test_depthwise_convolutions_are_windows_with_and_without_padding(channels: int, size: tuple[int, ...], stride: int, padding: int) -> None:
    """Also one image by one filter. Without padding the image is loaded as a matrix of weights would be, but its columns are windows."""
    module = (nn.Conv2d if len(size) == 2 else nn.Conv1d)(channels, channels, 3, stride, padding, groups=channels)
    _, result = laid_out(module, normal(2, channels, *size))
    assert [region.kind for region in result.regions if region.kind != "map"] == ["window"]


def test_halo_where_every_reader_may_have_it() -> None:
    """A value between convolutions has the widest halo that a reader needs; graph results have none and are copied once."""
    _, inner = laid_out(SharedHalo(False, 8), normal(1, 3, 8, 9))
    assert inner.layouts["relu"] == channels_last((1, 8, 8, 9)).with_halo(((0, 0), (0, 0), (2, 2), (1, 1)))
    assert "relu.padded" not in inner.layouts
    graph, returned = laid_out(SharedHalo(True, 8), normal(1, 3, 8, 9))
    assert graph.outputs[-1] == "relu"
    assert returned.layouts["relu"] == row_major((1, 8, 8, 9))
    assert returned.layouts["relu.padded"] == channels_last((1, 8, 8, 9)).with_halo(((0, 0), (0, 0), (2, 2), (1, 1)))
    copies = [region for region in returned.regions if region.outputs == ("relu.padded",)]
    assert len(copies) == 1 and copies[0].reasons[0].startswith("padding: relu is copied once")
    readers = [region for region in returned.regions if "relu.padded" in region.inputs]
    assert len(readers) >= 3


def test_inputs_and_results_are_row_major() -> None:
    for module, x in ((Residual(3, 16, 2), normal(1, 3, 9, 9)), (Dense(5, 4, 3), normal(1, 5, 8, 8)), (Inverted(6, 24), normal(1, 6, 8, 8))):
        graph, result = laid_out(module, x)
        for name in (*graph.inputs, *graph.outputs):
            assert result.layouts[name].is_row_major


@pytest.mark.parametrize("network", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v2", "inception_v3"))])
def test_whole_networks_convert_their_input_alone(network: str) -> None:
    """Every other image has its channels innermost, so that no kernel converts between layouts, except for results of the caller."""
    module, inputs = zoo.build(network, 1, 0)
    graph, _ = simplify(import_module(module, inputs).graph)
    result = lay_out(graph)
    images = {
        name for name, layout in result.layouts.items() if len(layout.shape) == 4 and layout.shape[2:] != (1, 1) and name not in graph.constants
    }
    row_major_images = {name for name in images if channels_last(result.layouts[name].shape).order != result.layouts[name].order}
    assert row_major_images == set(graph.inputs)
    (reader,) = [region for region in result.regions if set(region.inputs) & row_major_images]
    padded = network != "inception_v3"  # its first convolution has no padding and reads the input directly
    assert reader.kind == ("map" if padded else "contraction")


def test_views_are_never_stored() -> None:
    graph, result = laid_out(lambda x: F.softmax(x.permute(1, 0, 2).reshape(3, -1) * 2, 1), normal(2, 3, 4))
    (region,) = result.regions
    assert region.kind == "row reduction" and {node.operator for node in region.nodes} >= {"permute", "reshape", "mul", "softmax"}
    assert region.inputs == graph.inputs and region.outputs == graph.outputs


def test_channel_shuffle_costs_no_kernel() -> None:
    def shuffled(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x.reshape(1, 2, 3, 5, 5).transpose(1, 2).reshape(1, 6, 5, 5), w)

    _, result = laid_out(shuffled, normal(1, 6, 5, 5), normal(8, 6, 1, 1))
    assert [region.kind for region in result.regions] == ["contraction"]


def test_value_with_several_readers_is_stored_with_the_reason() -> None:
    _, result = laid_out(lambda x, w: [torch.exp(x) @ w, torch.exp(x) + 1], normal(4, 8), normal(8, 16))
    kinds = {region.outputs[0]: region.kind for region in result.regions}
    assert kinds == {"exp": "map", "matmul": "contraction", "add": "map"}
    reasons = [reason for region in result.regions for reason in region.reasons]
    assert "exp is stored: also read by add" in reasons and "exp is stored: also read by matmul" in reasons


def test_arithmetic_is_not_repeated_for_every_tile() -> None:
    _, result = laid_out(lambda x, w: torch.exp(x) @ w, normal(4, 8), normal(8, 16))
    assert [region.kind for region in result.regions] == ["map", "contraction"]
    assert any("a contraction would recompute it" in reason for reason in result.regions[1].reasons)


def test_cheap_map_is_computed_in_its_reader() -> None:
    _, result = laid_out(lambda x, y: F.relu(x * y).sum((0, 2)), normal(3, 4, 5), normal(3, 4, 5))
    (region,) = result.regions
    assert {node.operator for node in region.nodes} == {"mul", "relu", "sum"}


def test_kinds_of_reductions() -> None:
    for function, shape, kind in (
        (lambda x: F.max_pool2d(x, 2), (1, 3, 4, 4), "window"),
        (lambda x: x.sum(1), (3, 4, 5), "window"),
        (lambda x: x.sum(1), (3, 400), "row reduction"),
        (lambda x: F.layer_norm(x, (40,)), (3, 40), "row reduction"),
        (lambda x: x.cumsum(0), (3, 40), "scan"),
        (lambda x: x @ x.T, (3, 40), "contraction"),
        (lambda x: x * 2, (3, 40), "map"),
    ):
        _, result = laid_out(function, normal(*shape))
        assert [region.kind for region in result.regions] == [kind]


def test_depthwise_convolution_is_a_window_over_channels() -> None:
    _, result = laid_out(Inverted(6, 24), normal(1, 6, 8, 8))
    (depthwise,) = [region for region in with_operator(result.regions, "convolution") if region.kind == "window"]
    assert {node.operator for node in depthwise.nodes} == {"convolution", "add", "hardswish"}
    source = depthwise.inputs[0]
    assert result.layouts[source].halo == ((0, 0), (0, 0), (1, 1), (1, 1)), "its padding needs no guard"


def test_indices_and_values_are_results_of_their_own() -> None:
    """A component of a reduction is read by a map, and the region stores only the map's result."""
    graph, result = laid_out(lambda x: x.max(1), normal(4, 5))
    assert {region.outputs[0] for region in result.regions} == set(graph.outputs)
    for region in result.regions:
        assert region.steps[-1].name == region.outputs[0]
        assert not {name for step in region.steps[:-1] for name in step.names} & set(graph.values), "inner results shadow no stored value"


def test_reasons_name_values_and_nodes_that_exist() -> None:
    for module, x in ((SharedHalo(True, 8), normal(1, 3, 8, 8)), (Inverted(6, 24), normal(1, 6, 8, 8)), (Dense(5, 4, 3), normal(1, 5, 8, 8))):
        graph, result = laid_out(module, x)
        known = set(graph.values) | {node.name for node in graph.nodes}
        for region in result.regions:
            assert all(reason.strip() for reason in region.reasons)
            if len({node.name for node in region.nodes if node.operator not in ("permute", "reshape", "pad")}) > 1:
                assert region.reasons, f"{region.name} is fused without a reason"
            for reason in region.reasons:
                if " is stored: also read by " in reason:
                    name, readers = reason.split(" is stored: also read by ")
                    assert name in result.layouts, f"{name} is said to be stored"
                    assert set(readers.split(", ")) <= known


def test_every_input_of_a_region_is_ready_when_it_runs() -> None:
    for module, x in ((SharedHalo(True, 8), normal(1, 3, 8, 8)), (Inverted(6, 24), normal(1, 6, 8, 8)), (Residual(3, 16, 2), normal(2, 3, 9, 9))):
        graph, result = laid_out(module, x)
        ready = set(graph.inputs) | set(graph.constants)
        for region in result.regions:
            assert set(region.inputs) <= ready
            inner = {name for step in region.steps[:-1] for name in step.names}
            assert {load.buffer for step in region.steps for load in loads(*step.bodies)} - inner <= set(region.inputs)
            ready |= set(region.outputs)
        assert set(graph.outputs) <= ready


@pytest.mark.parametrize("read", [lambda x: F.max_pool2d(x.exp() * 2, 2, return_indices=True), lambda x: torch.max(x.exp() * 2, 1)])
def test_each_result_of_an_operator_reads_a_map_that_is_stored(read: Callable[[Tensor], Any]) -> None:
    """The kernel of one result must not take the map from that of the other."""
    module = Applied(read)
    graph, _ = simplify(import_module(module, (torch.randn(2, 3, 8, 8),)).graph)
    program = plan_program(graph, machine("x86-avx2"), 1)
    regions = [region for lowered in program.regions for region in lowered.region.stages or (lowered.region,)]
    assert [region.kind for region in regions] == ["map", "window", "window"]
    check_native([Case("results", module, (torch.randn(2, 3, 8, 8),))])
