"""First layers on tensor cores: a convolution of few channels and stride s over blocks of s x s pixels (space to depth).

Three channels of a row-major image are gathered one element at a time, also from a copy with channels innermost. In the folded image a block's C s s
values lie side by side, padded with zeros to whole vectors of 16 bytes, which copies to shared memory, the copy engine and matrix loads need; the
filter has ceil(k / s) taps per dimension, and zeros where a block exceeds it. Blocks along the last dimension are side by side too, so that what the
taps along it read is one run of memory: the convolution has one channel, and moves by a block's values along the last dimension. For 3 channels and
7 x 7 taps of stride 2 a sum has 4 runs of 4 x 16 values instead of 147. One map makes the folded image; its zeros are the convolution's padding.
Whether it is done is decided by prediction (`fold_images`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import MappingProxyType

import torch
from torch.nn.functional import pad

from tilewright.graph.operators.shape import SPACE_TO_DEPTH
from tilewright.graph.passes import rebuilt
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import MergeDecision, Region
from tilewright.partition.siblings import LEAST_GAIN, Merged, Predict
from tilewright.text import seconds_text

FOLDED = ".folded"
"""Suffix of what folding adds to the graph: images and filters."""
MOST_CHANNELS = 16
"""Channels of an image from which on a copy with channels innermost is read in vectors that are wide enough."""

Regions = Callable[[Graph], Sequence[Region]]
"""The regions of a graph."""
Lanes = Callable[[Graph, Region], int]
"""Elements of a vector of 16 bytes of the factors that tensor cores can multiply for a region of a graph; 0 if they cannot."""


def fold_images(graph: Graph, regions: Regions, predict: Predict, lanes: Lanes) -> Merged:
    """Folds the image of each convolution of few channels wherever the regions that this changes are predicted faster: the copies that pad or convert
    the image, the maps computed with them, and the convolution. Graphs without such convolutions cost nothing."""
    decisions: dict[str, MergeDecision] = {}
    for node in graph.nodes:
        if not _can_fold(graph, node):
            continue
        before = regions(graph)
        region = next((one for one in before if node in one.nodes), None)
        width = lanes(graph, region) if region is not None else 0
        if not width or graph.values[node.inputs[0]].shape[1] % width == 0:
            continue
        folded = _folded(graph, node, width)
        after = regions(folded)
        seconds, plain = _seconds(predict, folded, after, before), _seconds(predict, graph, before, after)
        told = f"blocks of {'x'.join(map(str, node.attributes['stride']))} pixels of {node.inputs[0]} as channels"
        taken = seconds < (1 - LEAST_GAIN) * plain
        if taken:
            graph = folded
            text = f"{told}: {seconds_text(seconds)} predicted with the map that folds them, {seconds_text(plain)} without"
        else:
            text = f"{told} are predicted slower: {seconds_text(seconds)} with the map that folds them, {seconds_text(plain)} without"
        decisions[node.name] = MergeDecision(node.outputs, taken, text)
    return Merged(graph, MappingProxyType(decisions))


def _can_fold(graph: Graph, node: Node) -> bool:
    """Whether the node is a convolution of few channels of a value with a constant filter, in one group and without dilation."""
    if node.operator != "convolution" or node.inputs[0] in graph.constants or node.inputs[1] not in graph.constants:
        return False
    if node.attributes.get("groups", 1) != 1 or any(d != 1 for d in node.attributes["dilation"]):
        return False
    new = {name + FOLDED for name in (*node.inputs, node.name)}  # names of ONNX files may be any
    shapes = [graph.values[name].shape for name in (*node.inputs, *node.outputs)]
    return shapes[0][1] < MOST_CHANNELS and not any(0 in shape for shape in shapes) and new.isdisjoint(graph.values)


def _seconds(predict: Predict, graph: Graph, regions: Sequence[Region], others: Sequence[Region]) -> float:
    """Predicted seconds of the regions of the graph that are not among the others."""
    known = {region.outputs: region.steps for region in others}
    own = {region.outputs for region in regions if known.get(region.outputs) != region.steps}
    return sum(seconds for _, seconds in predict(graph, lambda region: region.outputs in own))


def _folded(graph: Graph, node: Node, width: int) -> Graph:
    """The graph with the convolution over the folded image, whose blocks have a multiple of `width` values."""
    x, w, result = (graph.values[name] for name in (*node.inputs, *node.outputs))
    stride, rank = node.attributes["stride"], len(node.attributes["stride"])
    values_each = -(-x.shape[1] * prod(stride) // width) * width
    tensor = folded_filter(graph.constants[node.inputs[1]], stride, values_each)
    extents = tuple(o - 1 - (-k // s) for o, k, s in zip(result.shape[2:], w.shape[2:], stride, strict=True))
    image, weight = node.name + FOLDED, node.inputs[1] + FOLDED
    padding = tuple(before for before, _ in node.attributes["padding"])
    making = MappingProxyType({"block": tuple(stride), "padding": padding, "extents": extents, "channels": values_each})
    moving = {"stride": (*(1,) * (rank - 1), values_each), "padding": ((0, 0),) * rank}
    instead = [
        Node(image, SPACE_TO_DEPTH, node.inputs[:1], (image,), making, node.place),
        Node(node.name, node.operator, (image, weight), node.outputs, MappingProxyType({**node.attributes, **moving}), node.place),
    ]
    values = {
        **graph.values,
        image: Value(image, (x.shape[0], 1, *extents[:-1], extents[-1] * values_each), x.dtype),
        weight: Value(weight, tuple(tensor.shape), w.dtype),
    }
    nodes = [new for one in graph.nodes for new in (instead if one is node else [one])]
    return rebuilt(graph, nodes, values, {**graph.constants, weight: tensor})


def folded_filter(weight: torch.Tensor, stride: Sequence[int], channels: int) -> torch.Tensor:
    """Weights [K, C, taps...] for an image that the operator `space_to_depth` folded in blocks of `stride` pixels and `channels` values:
    [K, 1, ceil(taps / stride)... with `channels` times the last one]."""
    taps = [-(-k // s) for k, s in zip(weight.shape[2:], stride, strict=True)]
    rank, outputs = len(taps), weight.shape[0]
    further = [t * s - k for t, s, k in zip(taps, stride, weight.shape[2:], strict=True)]
    whole = pad(weight.detach(), [count for one in reversed(further) for count in (0, one)])
    apart = whole.reshape(*weight.shape[:2], *(extent for pair in zip(taps, stride, strict=True) for extent in pair))
    blocks = apart.permute(0, *range(2, 2 + 2 * rank, 2), 1, *range(3, 3 + 2 * rank, 2)).reshape(outputs, *taps, -1)
    return pad(blocks, (0, channels - blocks.shape[-1])).reshape(outputs, 1, *taps[:-1], taps[-1] * channels)
