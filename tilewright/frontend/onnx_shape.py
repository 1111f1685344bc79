"""ONNX's shape, indexing and creation operators in terms of the operator table."""

from __future__ import annotations

from math import prod

import numpy as np

from tilewright.frontend.aten_scatter import put, scattered
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import Known, NodeCall, NodeHandlers, axis_of, numpy_dtype, shape_of, through_torch
from tilewright.frontend.onnx_pointwise import element_type
from tilewright.frontend.reading import check_computed
from tilewright.frontend.torch_indices import positions
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


@HANDLERS.handles("Shape")
def shape(call: NodeCall) -> np.ndarray:
    operand = call.inputs[0]
    assert operand is not None
    return np.array(shape_of(operand)[call.attribute("start", 0) : call.attribute("end")], np.int64)


@HANDLERS.handles("Size")
def size(call: NodeCall) -> np.ndarray:
    operand = call.inputs[0]
    assert operand is not None
    return np.array(prod(shape_of(operand)), np.int64)


# --- views ------------------------------------------------------------------------------------------------------------


@HANDLERS.handles("Reshape")
def reshape(call: NodeCall) -> Value:
    x, wanted = call.value(0), call.integers(1, "shape") or []
    if not call.attribute("allowzero", 0):
        wanted = [x.shape[k] if n == 0 else n for k, n in enumerate(wanted)]
    return call.g.reshape(x, wanted)


@HANDLERS.handles("Flatten")
def flatten(call: NodeCall) -> Value:
    x, axis = call.value(0), call.attribute("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    return call.g.reshape(x, (prod(x.shape[:axis]), prod(x.shape[axis:])))


@HANDLERS.handles("Squeeze")
def squeeze(call: NodeCall) -> Value:
    x, axes = call.value(0), call.integers(1, "axes")
    gone = {k for k, n in enumerate(x.shape) if n == 1} if axes is None else {axis_of(a, len(x.shape)) for a in axes}
    return call.g.reshape(x, [n for k, n in enumerate(x.shape) if k not in gone])


@HANDLERS.handles("Unsqueeze")
def unsqueeze(call: NodeCall) -> Value:
    x, axes = call.value(0), call.integers(1, "axes") or []
    rank = len(x.shape) + len(axes)
    added, rest = {axis_of(a, rank) for a in axes}, iter(x.shape)
    if len(added) < len(axes):
        raise ValueError(f"axes {axes} name a dimension twice")
    return call.g.reshape(x, [1 if k in added else next(rest) for k in range(rank)])


@HANDLERS.handles("Transpose")
def transpose(call: NodeCall) -> Value:
    x = call.value(0)
    return call.g.permute(x, call.attribute("perm") or tuple(reversed(range(len(x.shape)))))


@HANDLERS.handles("Expand")
def expand(call: NodeCall) -> Value:
    x, wanted = call.value(0), call.integers(1, "shape") or []
    return call.g.expand(x, np.broadcast_shapes(x.shape, tuple(wanted)))


@HANDLERS.handles("Tile")
def tile(call: NodeCall) -> Value:
    return call.g.op("repeat", call.value(0), repeats=tuple(call.integers(1, "repeats") or ()))


@HANDLERS.handles("Slice")
def slice_(call: NodeCall) -> Value:
    x = call.value(0)
    starts, stops = call.integers(1, "starts") or [], call.integers(2, "ends") or []
    axes = call.integers(3, "axes") or list(range(len(starts)))
    steps = call.integers(4, "steps") or [1] * len(starts)
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        x = _sliced(call.g, x, axis_of(axis, len(x.shape)), start, stop, step)
    return x


def _sliced(g: GraphBuilder, x: Value, axis: int, start: int, stop: int, step: int) -> Value:
    """x[start:stop:step] along an axis; a negative step walks the reversed axis forwards."""
    if step > 0:
        return g.slice(x, axis, start, stop, step)
    extent = x.shape[axis]
    positions = range(*slice(start, stop, step).indices(extent))
    turned = g.op("flip", x, axes=(axis,))
    first = extent - 1 - positions.start if len(positions) else 0
    return g.op("slice", turned, axis=axis, start=first, length=len(positions), step=-step)


@HANDLERS.handles("Split")
def split(call: NodeCall) -> tuple[Value, ...]:
    x = call.value(0)
    axis = axis_of(call.attribute("axis", 0), len(x.shape))
    sizes, count = call.integers(1, "split"), call.attribute("num_outputs") or len(call.used)
    if sizes is None:
        each = -(-x.shape[axis] // count)
        sizes = [max(min(each, x.shape[axis] - k * each), 0) for k in range(count)]
    if min(sizes, default=0) < 0 or sum(sizes) != x.shape[axis]:
        raise ValueError(f"parts of {sizes} of a dimension of {x.shape[axis]}")
    starts = np.cumsum([0, *sizes])
    return tuple(call.g.slice(x, axis, int(a), int(b)) for a, b in zip(starts[:-1], starts[1:], strict=True))


@HANDLERS.handles("Concat")
def concat(call: NodeCall) -> Value:
    parts = [call.value(i) for i in range(len(call.inputs))]
    return call.g.concatenate(parts, axis_of(call.attribute("axis"), len(parts[0].shape)))


@HANDLERS.handles("DepthToSpace")
def depth_to_space(call: NodeCall) -> Value:
    g, x, block = call.g, call.value(0), call.attribute("blocksize")
    n, c, h, w = x.shape
    deep = c // block**2
    if call.attribute("mode", "DCR") == "DCR":
        parts = g.permute(g.reshape(x, (n, block, block, deep, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        parts = g.permute(g.reshape(x, (n, deep, block, block, h, w)), (0, 1, 4, 2, 5, 3))
    return g.reshape(parts, (n, deep, h * block, w * block))


@HANDLERS.handles("SpaceToDepth")
def space_to_depth(call: NodeCall) -> Value:
    g, x, block = call.g, call.value(0), call.attribute("blocksize")
    n, c, h, w = x.shape
    parts = g.reshape(x, (n, c, h // block, block, w // block, block))
    order = (0, 3, 5, 1, 2, 4) if call.attribute("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return g.reshape(g.permute(parts, order), (n, c * block**2, h // block, w // block))


@HANDLERS.handles("Pad")
def pad(call: NodeCall) -> Value:
    g, x, mode = call.g, call.value(0), call.attribute("mode", "constant")
    rank, pads = len(x.shape), call.integers(1, "pads") or []
    axes = [axis_of(a, rank) for a in call.integers(3, "axes") or []] if call.has(3) else list(range(rank))
    pairs = [(0, 0)] * rank
    for k, axis in enumerate(axes):
        pairs[axis] = (pads[k], pads[k + len(axes)])
    if mode == "constant":
        number = call.constant(2, "padding value").reshape(-1)[0].item() if call.has(2) else 0
        return g.op("pad", x, padding=tuple(pairs), value=number)
    # the table crops only in constant mode
    x = g.op("pad", x, padding=tuple((min(a, 0), min(b, 0)) for a, b in pairs)) if any(p < 0 for pair in pairs for p in pair) else x
    pairs = [(max(a, 0), max(b, 0)) for a, b in pairs]
    if mode == "reflect" and any(max(pair) >= n and max(pair) for pair, n in zip(pairs, x.shape, strict=True)):
        for axis, (n, pair) in enumerate(zip(x.shape, pairs, strict=True)):  # reflected at both ends again and again
            check_computed(n + sum(pair))
            x = g.op("index_select", x, call.materialise(np.pad(np.arange(n), pair, mode="reflect")), axis=axis) if any(pair) else x
        return x
    return g.op("pad", x, padding=tuple(pairs), mode={"edge": "replicate", "wrap": "circular"}.get(mode, mode))


@HANDLERS.handles("Trilu")
def triangle(call: NodeCall) -> Value:
    diagonal = int(call.constant(1, "diagonal").reshape(-1)[0]) if call.has(1) else 0
    return call.g.op("triangle", call.value(0), diagonal=diagonal, upper=bool(call.attribute("upper", 1)))


@HANDLERS.handles("ReverseSequence")
def reverse_sequence(call: NodeCall) -> Value:
    """The first `length` positions along the time axis reversed, for each sequence of the batch; lengths are constants."""
    g, x = call.g, call.value(0)
    lengths = call.integers(1, "sequence lengths") or []
    time, batch = call.attribute("time_axis", 0), call.attribute("batch_axis", 1)
    positions = np.arange(x.shape[time])[:, None]
    index = np.where(positions < np.array(lengths), np.array(lengths) - 1 - positions, positions)  # [time, batch]
    index = index if time < batch else index.T
    index = index.reshape([x.shape[k] if k in (time, batch) else 1 for k in range(len(x.shape))])
    return g.op("gather", x, g.expand(call.materialise(index.astype(np.int64)), x.shape), axis=time)


# --- indexing ---------------------------------------------------------------------------------------------------------


@HANDLERS.handles("Gather")
def gather(call: NodeCall) -> Value:
    g, x, index = call.g, call.value(0), call.inputs[1]
    axis = axis_of(call.attribute("axis", 0), len(x.shape))
    if isinstance(index, np.ndarray) and index.ndim == 0 and -x.shape[axis] <= int(index) < x.shape[axis]:
        return g.op("select", x, axis=axis, position=int(index) % x.shape[axis])
    return g.op("index_select", x, call.value(1), axis=axis)


@HANDLERS.handles("Compress")
def compress(call: NodeCall) -> Value:
    """The positions along an axis, or of the flattened tensor, at which a known condition holds."""
    g, x = call.g, call.value(0)
    chosen = np.flatnonzero(call.constant(1, "condition"))
    axis = call.attribute("axis")
    if axis is None:
        x, axis = g.reshape(x, (-1,)), 0
    return g.op("index_select", x, call.materialise(chosen), axis=axis_of(axis, len(x.shape)))


@HANDLERS.handles("GatherElements")
def gather_elements(call: NodeCall) -> Value:
    x = call.value(0)
    return call.g.op("gather", x, call.value(1), axis=axis_of(call.attribute("axis", 0), len(x.shape)))


def _coordinates(call: NodeCall, index: Value, lead: tuple[int, ...] = ()) -> list[Value]:
    """One index tensor for each leading dimension of the data: counters for the batch dimensions, then slices of the index's last dimension."""
    g, rest = call.g, len(index.shape) - 1 - len(lead)
    counters = []
    for k, n in enumerate(lead):
        shape = [n if j == k else 1 for j in range(len(lead))] + [1] * rest
        counters.append(call.materialise(np.arange(n, dtype=np.int64).reshape(shape)))
    last = len(index.shape) - 1
    return counters + [g.op("select", index, axis=last, position=k) for k in range(index.shape[-1])]


@HANDLERS.handles("GatherND")
def gather_nd(call: NodeCall) -> Value:
    g, x, index = call.g, call.value(0), call.value(1)
    batch = call.attribute("batch_dims", 0)
    indices = _coordinates(call, index, index.shape[:batch])
    return g.op("index", x, *indices, axes=tuple(range(len(indices))))


@HANDLERS.handles("OneHot")
def one_hot(call: NodeCall) -> Value:
    """`values` holds (off, on); negative indices count from the end, and an index out of range sets no element to on."""
    g, index = call.g, call.value(0)
    depth = int(call.constant(1, "depth").reshape(-1)[0])
    index = g.cast(index, "i64")
    index = g.pointwise("where", g.pointwise("lt", index, 0), g.pointwise("add", index, depth), index, dtype="i64")
    hot = g.op("one_hot", index, classes=depth, dtype="bool")
    off, on = (g.op("select", call.value(2), axis=0, position=k) for k in range(2))
    result = g.pointwise("where", hot, on, off, dtype=off.dtype)
    rank = len(result.shape)
    axis = axis_of(call.attribute("axis", -1), rank)
    order = list(range(rank - 1))
    order.insert(axis, rank - 1)
    return g.permute(result, order)


# --- writing into a copy ----------------------------------------------------------------------------------------------

_COMBINERS = {"none": "", "add": "sum", "mul": "prod", "max": "max", "min": "min"}
_OF_TORCH = {"sum": "sum", "prod": "prod", "max": "amax", "min": "amin"}  # names of combiners in PyTorch's scatter_reduce


@HANDLERS.handles("ScatterElements")
def scatter_elements(call: NodeCall) -> tuple[Value, ...]:
    g, x, index, updates = call.g, call.value(0), call.value(1), call.value(2)
    axis, combiner = axis_of(call.attribute("axis", 0), len(x.shape)), _COMBINERS[call.attribute("reduction", "none")]
    try:
        return (scattered(g, x, axis, index, updates, combiner, negative=True),)
    except Unsupported:  # many indices
        index = positions(g, index, x.shape[axis], negative=True)
        if not combiner:
            return through_torch(g, "aten.scatter.src", (x, axis, index, updates))
        return through_torch(g, "aten.scatter_reduce.two", (x, axis, index, updates, _OF_TORCH[combiner]), {"include_self": True})


@HANDLERS.handles("ScatterND")
def scatter_nd(call: NodeCall) -> tuple[Value, ...]:
    g, x, updates, combiner = call.g, call.value(0), call.value(2), _COMBINERS[call.attribute("reduction", "none")]
    indices = [positions(g, index, x.shape[axis], negative=True) for axis, index in enumerate(_coordinates(call, g.cast(call.value(1), "i64")))]
    try:
        return (put(g, x, updates, indices, tuple(range(len(indices))), combiner),)
    except Unsupported:
        if combiner not in ("", "sum"):
            raise
        return through_torch(g, "aten.index_put.default", (x, indices, updates, combiner == "sum"))


@HANDLERS.handles("TensorScatter")
def tensor_scatter(call: NodeCall) -> Value:
    """A cache of keys or values [batch, ..., positions, ...] with `update` written from a position of each batch on; circular writes wrap around."""
    g, past, update = call.g, call.value(0), call.value(1)
    axis = axis_of(call.attribute("axis", -2), len(past.shape))
    size, count = past.shape[axis], update.shape[axis]
    places = call.materialise(np.arange(size, dtype=np.int64).reshape(-1, *(1 for _ in past.shape[axis + 1 :])))
    offset = places
    if call.has(2):
        first = g.reshape(g.cast(call.value(2), "i64"), (-1, *(1 for _ in past.shape[1:])))
        offset = g.pointwise("sub", places, first)  # of each place in the update
    if call.attribute("mode", "linear") == "circular":
        offset = g.pointwise("remainder", offset, size)
    inside = g.pointwise("logical_and", g.pointwise("ge", offset, 0), g.pointwise("lt", offset, count))
    read = g.expand(g.pointwise("clamp", offset, 0, count - 1), past.shape)
    return g.pointwise("where", inside, g.op("gather", update, read, axis=axis), past, dtype=past.dtype)


# --- creation ---------------------------------------------------------------------------------------------------------


@HANDLERS.handles("ConstantOfShape")
def constant_of_shape(call: NodeCall) -> Known:
    fill = call.attribute("value")
    fill = np.zeros(1, np.float32) if fill is None else fill
    extents = tuple(call.integers(0, "shape") or ())
    return call.g.expand(call.materialise(fill.reshape(())), extents)


@HANDLERS.handles("EyeLike")
def eye_like(call: NodeCall) -> np.ndarray:
    operand = call.inputs[0]
    assert operand is not None
    dtype = element_type(call.attribute("dtype")) if call.attribute("dtype") else call.kind()
    rows, columns = shape_of(operand)
    check_computed(rows * columns)
    return np.eye(rows, columns, k=call.attribute("k", 0), dtype=numpy_dtype(dtype))


@HANDLERS.handles("Range")
def arange(call: NodeCall) -> np.ndarray:
    start, limit, step = (call.constant(i, name).reshape(-1)[0] for i, name in enumerate(("start", "limit", "step")))
    if step == 0:
        raise ValueError("a step of zero")
    count = max(int(np.ceil((limit - start) / step)), 0)
    check_computed(count)
    values: np.ndarray = (start + np.arange(count) * step).astype(numpy_dtype(call.kind()))
    return values
