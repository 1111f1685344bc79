"""First layers on tensor cores: a convolution of few channels and stride s over blocks of s x s pixels (space to depth).

Three channels of a row-major image are gathered one element at a time, also from a copy with channels innermost. In the folded image a block's C s s
values lie side by side, padded with zeros to whole vectors of 16 bytes, which copies to shared memory, the copy engine and matrix loads need; the
filter has ceil(k / s) taps per dimension, and zeros where a block exceeds it. Blocks along the last dimension are side by side too, so that what the
taps along it read is one run of memory: the convolution has one channel, and moves by a block's values along the last dimension. For 3 channels and
7 x 7 taps of stride 2 a sum has 4 runs of 4 x 16 values instead of 147. One map makes the folded image; its zeros are the convolution's padding.
Whether it is done is decided by prediction (`fold_images`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

import torch
from torch.nn.functional import pad

from tilewright.graph.operators.shape import SPACE_TO_DEPTH
from tilewright.graph.passes import rebuilt
from tilewright.ir.graph import Graph, Node, Value
from tilewright.ir.region import MergeDecision, Region
from tilewright.partition.merges import BY_MERGES, Policy, Timed, compared
from tilewright.partition.siblings import Merged, Predict

FOLDED = ".folded"
"""Suffix of what folding adds to the graph: images and filters."""
IMAGE = "folded image"
"""The kind of these merges."""
MOST_CHANNELS = 16
"""Channels of an image from which on a copy with channels innermost is read in vectors that are wide enough."""

Regions = Callable[[Graph], Sequence[Region]]
"""The regions of a graph."""
Lanes = Callable[[Graph, Region], int]
"""Elements of a vector of 16 bytes of the factors that tensor cores can multiply for a region of a graph; 0 if they cannot."""


def fold_images(graph: Graph, regions: Regions, predict: Predict, lanes: Lanes, policy: Policy = BY_MERGES) -> Merged:
    """Folds the image of each convolution of few channels for which the map that folds it and the convolution over it are predicted faster than the
    convolution as it is, together with the copies of its image and the maps before it that are not stored any more. Graphs without such convolutions
    cost nothing."""
    candidates = [node for node in graph.nodes if _can_fold(graph, node)]
    if not candidates:
        return Merged(graph)
    holding = {node.name: region for region in regions(graph) for node in region.nodes}
    widths: dict[str, int] = {}
    for node in candidates:
        width = lanes(graph, holding[node.name]) if node.name in holding else 0
        if width and graph.values[node.inputs[0]].shape[1] % width:
            widths[node.name] = width
    if not widths:
        return Merged(graph)
    whole = _folded(graph, widths)
    stored = {name for region in regions(whole) for name in region.outputs}
    before = predict(graph, lambda region: not stored.issuperset(region.outputs) or _has(region, widths))
    after = predict(whole, lambda region: _has(region, {*widths, *(name + FOLDED for name in widths)}))
    plain: dict[str, list[Timed]] = {name: [] for name in widths}
    for timed in before:
        own = [name for name in widths if _has(timed.region, {name})]
        # what is not stored any more is shared by the convolutions that read it
        sharing = own or [name for name in widths if not {*holding[name].inputs}.isdisjoint(timed.region.outputs)]
        for name in sharing:
            plain[name].append(replace(timed, share=1 / len(sharing)))
    taken: dict[str, int] = {}
    decisions: dict[str, MergeDecision] = {}
    for node in candidates:
        if node.name not in widths:
            continue
        folded = [timed for timed in after if _has(timed.region, {node.name, node.name + FOLDED})]
        both = compared(folded, plain[node.name], policy.about(IMAGE, node.outputs), policy.predicted)
        told = f"blocks of {'x'.join(map(str, node.attributes['stride']))} pixels of {node.inputs[0]}"
        if both.taken:
            taken[node.name] = widths[node.name]
        text = f"{told} {'are' if both.taken else 'would be slower as'} channels: {both.text('with the map that folds them', 'without')}"
        decisions[node.name] = MergeDecision(node.outputs, both.taken, text, IMAGE, both.ways)
    return Merged(whole if taken == widths else _folded(graph, taken) if taken else graph, MappingProxyType(decisions))


def _has(region: Region, names: Collection[str]) -> bool:
    return any(node.name in names for node in region.nodes)


def _can_fold(graph: Graph, node: Node) -> bool:
    """Whether the node is a convolution of few channels of a value with a constant filter, in one group and without dilation."""
    if node.operator != "convolution" or node.inputs[0] in graph.constants or node.inputs[1] not in graph.constants:
        return False
    if node.attributes.get("groups", 1) != 1 or any(d != 1 for d in node.attributes["dilation"]):
        return False
    if any(name.startswith(node.name + FOLDED) for name in graph.values):  # names of ONNX files may be any
        return False
    shapes = [graph.values[name].shape for name in (*node.inputs, *node.outputs)]
    return shapes[0][1] < MOST_CHANNELS and not any(0 in shape for shape in shapes)


def _folded(graph: Graph, widths: Mapping[str, int]) -> Graph:
    """The graph with some convolutions over folded images, whose blocks have a multiple of so many values."""
    values, constants = dict(graph.values), dict(graph.constants)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in widths:
            nodes.append(node)
            continue
        x, w, result = (graph.values[name] for name in (*node.inputs, *node.outputs))
        stride, rank = node.attributes["stride"], len(node.attributes["stride"])
        each = -(-x.shape[1] * prod(stride) // widths[node.name]) * widths[node.name]
        extents = tuple(o - 1 - (-k // s) for o, k, s in zip(result.shape[2:], w.shape[2:], stride, strict=True))
        image, weight = node.name + FOLDED, f"{node.name}{FOLDED}.weight"
        constants[weight] = folded_filter(graph.constants[w.name], stride, each)
        values[weight] = Value(weight, tuple(constants[weight].shape), w.dtype)
        values[image] = Value(image, (x.shape[0], 1, *extents[:-1], extents[-1] * each), x.dtype)
        padding = tuple(before for before, _ in node.attributes["padding"])
        making = MappingProxyType({"block": tuple(stride), "padding": padding, "extents": extents, "channels": each})
        moving = {"stride": (*(1,) * (rank - 1), each), "padding": ((0, 0),) * rank}
        nodes.append(Node(image, SPACE_TO_DEPTH, node.inputs[:1], (image,), making, node.place))
        nodes.append(replace(node, inputs=(image, weight), attributes=MappingProxyType({**node.attributes, **moving})))
    return rebuilt(graph, nodes, values, constants)


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
