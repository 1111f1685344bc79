"""Shape operators: views, and maps that only move elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.graph.operators.definition import Operator, broadcast_load, flatten, in_bounds, unflatten
from tilewright.ir.computation import StepBuilder, Tensor, maximum, minimum
from tilewright.ir.expr import Expr, compare, const, logical_and, mod, select, sub, wrap

SPACE_TO_DEPTH = "space_to_depth"
"""The operator that makes folded images (`partition.folded_images`)."""


def _reshape(b: StepBuilder, x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """The same elements in row-major order under another shape."""
    if prod(shape) != prod(x.shape):
        raise ValueError(f"reshape of {x.shape} to {tuple(shape)}")
    groups = _common_groups(x.shape, shape)

    def body(*index: Expr) -> Expr:
        source: list[Expr] = [wrap(0)] * x.rank
        for (low, high), (start, stop) in groups:
            position = flatten(index[start:stop], shape[start:stop])
            source[low:high] = unflatten(position, x.shape[low:high])
        return x(*source)

    return b.map(shape, body)


def _common_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Splits two shapes of equal size into runs of dimensions with equal products, so that indices are divided only within a run."""
    if 0 in old:
        return [((0, len(old)), (0, len(new)))]
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left = right = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append(((start_i, i), (start_j, j)))
    return groups


def _permute(b: StepBuilder, x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """Result dimension i is input dimension axes[i]."""
    if sorted(axes) != list(range(x.rank)):
        raise ValueError(f"{tuple(axes)} is no permutation of {x.rank} dimensions")
    inverse = sorted(range(x.rank), key=lambda i: axes[i])
    return b.map(tuple(x.shape[a] for a in axes), lambda *i: x(*(i[k] for k in inverse)))


def _slice(b: StepBuilder, x: Tensor, *, axis: int, start: int, length: int, step: int = 1) -> Tensor:
    """`length` elements along an axis from `start`, `step` apart."""
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    return b.map(shape, lambda *i: x(*i[:axis], i[axis] * step + start, *i[axis + 1 :]))


def _select(b: StepBuilder, x: Tensor, *, axis: int, position: int) -> Tensor:
    """Reads the input at `position` of an axis, which the result lacks."""
    return b.map((*x.shape[:axis], *x.shape[axis + 1 :]), lambda *i: x(*i[:axis], position, *i[axis:]))


def _expand(b: StepBuilder, x: Tensor, *, shape: Sequence[int]) -> Tensor:
    return b.map(shape, lambda *i: broadcast_load(x, i))


def _flip(b: StepBuilder, x: Tensor, *, axes: Sequence[int]) -> Tensor:
    return b.map(x.shape, lambda *i: x(*(sub(x.shape[k] - 1, v) if k in axes else v for k, v in enumerate(i))))


def _roll(b: StepBuilder, x: Tensor, *, shifts: Sequence[int], axes: Sequence[int]) -> Tensor:
    total = {axis: sum(s for s, a in zip(shifts, axes, strict=True) if a == axis) for axis in axes}

    def body(*index: Expr) -> Expr:
        # shifts are made positive, so that the operand of the remainder is not negative
        return x(*(mod(v + (-total[k]) % x.shape[k], x.shape[k]) if k in total else v for k, v in enumerate(index)))

    return b.map(x.shape, body if prod(x.shape) else x)


def _repeat(b: StepBuilder, x: Tensor, *, repeats: Sequence[int]) -> Tensor:
    """Tiles the input; `repeats` has one number per dimension of the result."""
    lead = len(repeats) - x.rank
    shape = (*repeats[:lead], *(r * e for r, e in zip(repeats[lead:], x.shape, strict=True)))
    return b.map(shape, lambda *i: x(*(mod(v, e) if e else v for v, e in zip(i[lead:], x.shape, strict=True))))


def _diagonal(b: StepBuilder, x: Tensor, *, offset: int, first: int, second: int) -> Tensor:
    """The diagonal of two dimensions, as a last dimension."""
    rows, columns = x.shape[first], x.shape[second]
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    kept = [k for k in range(x.rank) if k not in (first, second)]

    def body(*index: Expr) -> Expr:
        at = dict(zip(kept, index, strict=False))
        at[first] = index[-1] + max(-offset, 0)
        at[second] = index[-1] + max(offset, 0)
        return x(*(at[k] for k in range(x.rank)))

    return b.map((*(x.shape[k] for k in kept), length), body)


def _windows(b: StepBuilder, x: Tensor, *, axis: int, size: int, step: int) -> Tensor:
    """Sliding windows along an axis: their number takes its place, their elements are a last dimension (torch.Tensor.unfold)."""
    shape = (*x.shape[:axis], (x.shape[axis] - size) // step + 1, *x.shape[axis + 1 :], size)
    return b.map(shape, lambda *i: x(*i[:axis], i[axis] * step + i[-1], *i[axis + 1 : -1]))


def _strided(b: StepBuilder, x: Tensor, *, shape: Sequence[int], steps: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """The element at index i is that of the input at `starts` + `steps` i (torch.Tensor.as_strided): a row of `steps` for each input dimension."""

    for start, row, extent in zip(starts, steps, x.shape, strict=True):
        last = start + sum(step * (size - 1) for step, size in zip(row, shape, strict=True))
        if prod(shape) and (min(start, *row, 0) < 0 or last >= extent):
            raise ValueError(f"elements outside of {x.shape}")

    def place(index: Sequence[Expr], start: int, row: Sequence[int]) -> Expr:
        return sum((v * step for v, step in zip(index, row, strict=True) if step), wrap(start))

    return b.map(shape, lambda *index: x(*(place(index, start, row) for start, row in zip(starts, steps, strict=True))))


def _concatenate(b: StepBuilder, *inputs: Tensor, axis: int) -> Tensor:
    """Joins inputs of the same type along an axis."""
    starts = [sum(t.shape[axis] for t in inputs[:k]) for k in range(len(inputs) + 1)]
    shape = (*inputs[0].shape[:axis], starts[-1], *inputs[0].shape[axis + 1 :])

    def body(*index: Expr) -> Expr:
        result: Expr | None = None
        for start, tensor in reversed(list(zip(starts[:-1], inputs, strict=True))):
            if not tensor.shape[axis]:
                continue
            value = tensor(*index[:axis], index[axis] - start, *index[axis + 1 :])
            result = value if result is None else select(compare("lt", index[axis], start + tensor.shape[axis]), value, result)
        return inputs[0](*index) if result is None else result

    return b.map(shape, body)


def _pad(b: StepBuilder, x: Tensor, *, padding: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """`padding` has (before, after) for each dimension; negative numbers crop (mode "constant" only)."""
    shape = tuple(e + before + after for e, (before, after) in zip(x.shape, padding, strict=True))
    if mode == "reflect" and any(max(pair) >= e for e, pair in zip(x.shape, padding, strict=True) if any(pair)):
        raise ValueError(f"reflection of {x.shape} by {tuple(padding)}")

    def body(*index: Expr) -> Expr:
        positions = [v - before for v, (before, _) in zip(index, padding, strict=True)]
        if mode == "constant":
            inside = logical_and(*(c for p, e in zip(positions, x.shape, strict=True) for c in in_bounds(p, e)))
            return select(inside, x(*positions), const(value, x.dtype))
        return x(*(_padded(p, e, pair, mode) for p, e, pair in zip(positions, x.shape, padding, strict=True)))

    return b.map(shape, body)


def _padded(position: Expr, extent: int, pair: tuple[int, int], mode: str) -> Expr:
    if not any(pair):
        return position
    if mode == "circular":
        return mod(position + extent * -(-max(pair) // extent), extent)
    if mode == "replicate":
        return minimum(maximum(position, 0), extent - 1)
    if mode != "reflect":
        raise ValueError(f"padding mode {mode}")
    left = select(compare("lt", position, 0), sub(0, position), position)
    return select(compare("ge", position, extent), sub(2 * extent - 2, position), left)


def _triangle(b: StepBuilder, x: Tensor, *, diagonal: int, upper: bool) -> Tensor:
    """Keeps the elements on and below (`upper`: above) a diagonal of the last two dimensions."""

    def body(*index: Expr) -> Expr:
        offset = index[-1] - index[-2]
        return select(compare("ge" if upper else "le", offset, diagonal), x(*index), const(0, x.dtype))

    return b.map(x.shape, body)


def _causal_mask(b: StepBuilder, x: Tensor) -> Tensor:
    """Minus infinity above the diagonal of the last two dimensions: a query sees no later key."""
    return b.map(x.shape, lambda *i: select(compare("le", i[-1], i[-2]), x(*i), const(float("-inf"), x.dtype)))


def _insert(b: StepBuilder, x: Tensor, values: Tensor, *, axis: int, start: int, step: int = 1) -> Tensor:
    """x with positions start, start + step, ... along an axis replaced by `values` (torch.slice_scatter)."""
    length = values.shape[axis]

    def body(*index: Expr) -> Expr:
        if length == 1:  # one position, which updates in place determine
            return select(index[axis].equals(start), values(*index[:axis], 0, *index[axis + 1 :]), x(*index))
        offset = index[axis] - start
        inside = logical_and(compare("ge", offset, 0), compare("lt", offset, length * step), mod(offset, step).equals(0))
        return select(inside, values(*index[:axis], offset // step, *index[axis + 1 :]), x(*index))

    return b.map(x.shape, body if length else x)


def _interleave(b: StepBuilder, *inputs: Tensor, strides: Sequence[int], starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Interleaves phases along the trailing dimensions: element p of the result is element (p + start) // stride of phase (p + start) mod stride,
    with phases numbered in row-major order of the strides. A phase to which nothing contributes may be a single zero."""
    lead = inputs[0].rank - len(strides)

    def body(*index: Expr) -> Expr:
        shifted = [v + s for v, s in zip(index[lead:], starts, strict=True)]
        phase = flatten([mod(v, s) for v, s in zip(shifted, strides, strict=True)], strides)
        at = [v // s for v, s in zip(shifted, strides, strict=True)]
        result = inputs[-1](*index[:lead], *at)
        for k in reversed(range(len(inputs) - 1)):
            result = select(phase.equals(k), inputs[k](*index[:lead], *at), result)
        return result

    return b.map((*inputs[0].shape[:lead], *extents), body)


def _space_to_depth(b: StepBuilder, x: Tensor, *, block: Sequence[int], padding: Sequence[int], extents: Sequence[int], channels: int) -> Tensor:
    """Blocks of pixels, each as so many values side by side: x [N, C, spatial...] -> [N, 1, extents... with `channels` times the last one].

    The first block begins `padding` pixels before the image. Pixel i of channel c is value (c * block[0] + i[0]) * block[1] + i[1] ... of its block;
    pixels outside of the image and further values are zero."""
    total = x.shape[1] * prod(block)

    def body(image: Expr, _: Expr, *where: Expr) -> Expr:
        *outer, last = where
        value = mod(last, channels)
        source, *inner = unflatten(value, (x.shape[1], *block))
        blocks = (*outer, last // channels)
        positions = [j * s + i - before for j, s, i, before in zip(blocks, block, inner, padding, strict=True)]
        bounds = (c for position, size in zip(positions, x.shape[2:], strict=True) for c in in_bounds(position, size))
        return select(logical_and(compare("lt", value, total), *bounds), x(image, source, *positions), const(0, x.dtype))

    return b.map((x.shape[0], 1, *extents[:-1], extents[-1] * channels), body)


def _full(b: StepBuilder, *, shape: Sequence[int], value: float | int | bool, dtype: str) -> Tensor:
    return b.map(shape, lambda *i: const(value, dtype))


OPERATORS: tuple[Operator, ...] = (
    Operator("reshape", _reshape, view=True),
    Operator("permute", _permute, view=True),
    Operator("slice", _slice, view=True),
    Operator("select", _select, view=True),
    Operator("expand", _expand, view=True),
    Operator("flip", _flip, view=True),
    Operator("roll", _roll, view=True),
    Operator("repeat", _repeat, view=True),
    Operator("diagonal", _diagonal, view=True),
    Operator("windows", _windows, view=True),
    Operator("strided", _strided, view=True),
    Operator("concatenate", _concatenate),
    Operator("pad", _pad),
    Operator("triangle", _triangle),
    Operator("causal_mask", _causal_mask),
    Operator("insert", _insert),
    Operator("interleave", _interleave),
    Operator(SPACE_TO_DEPTH, _space_to_depth),
    Operator("full", _full),
)
