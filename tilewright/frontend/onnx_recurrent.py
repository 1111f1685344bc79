"""ONNX's LSTM, GRU and RNN as loops over a body graph: the same loops as for PyTorch, with the gates in ONNX's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilewright.frontend.aten_recurrent import Cell, gates_of, gru_step, lstm_step, one_direction, peephole_step, simple_step
from tilewright.frontend.handlers import Unsupported
from tilewright.frontend.onnx_node import NodeCall, NodeHandlers, numpy_dtype
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Value

HANDLERS = NodeHandlers()


def _gru_step_before(b: GraphBuilder, states: Sequence[Value], x: Value, w: Value, bias: Value | None) -> tuple[Value, ...]:
    """r, z = gates;  n = tanh(x_n + (r h) W_n);  h' = n + z (h - n): the reset gate acts before the product (linear_before_reset = 0)."""
    (h,) = states
    size = h.shape[-1]
    xr, xz, xn = gates_of(b, x, 3)
    hr, hz = gates_of(b, b.op("linear", h, b.slice(w, 0, 0, 2 * size)), 2)
    r, z = (b.pointwise("sigmoid", b.pointwise("add", p, q)) for p, q in ((xr, hr), (xz, hz)))
    n = b.pointwise("tanh", b.pointwise("add", xn, b.op("linear", b.pointwise("mul", r, h), b.slice(w, 0, 2 * size, 3 * size))))
    return (b.pointwise("add", n, b.pointwise("mul", z, b.pointwise("sub", h, n))),)


def _reordered(call: NodeCall, position: int, direction: int, order: Sequence[int], part: slice = slice(None)) -> Value:
    """One direction's weights [gates * H, ...] with the gates in the order of the cell; constants are reordered at import."""
    operand = call.inputs[position]
    gates = len(order)
    if isinstance(operand, np.ndarray):
        own = operand[direction]
        own = own.reshape(-1, gates, own.shape[0] // (gates if own.ndim > 1 else 2 * gates), *own.shape[1:])
        return call.materialise(np.ascontiguousarray(own[:, order][part].reshape(-1, *own.shape[3:])))
    g, own_value = call.g, call.g.op("select", call.value(position), axis=0, position=direction)
    rows = own_value.shape[0] // gates if part == slice(None) else own_value.shape[0] // (2 * gates)
    base = (part.start or 0) * gates * rows
    return g.concatenate([g.slice(own_value, 0, base + k * rows, base + (k + 1) * rows) for k in order], 0)


def _recurrent(
    call: NodeCall,
    cell_of: Callable[[int], Cell],
    order: Sequence[int],
    states: Sequence[int],
    inner_bias: bool,
    others_of: Callable[[int], Sequence[Value]] = lambda _: (),
) -> tuple[Value | None, ...]:
    """A recurrent operator; `order` lists ONNX's gates in the cell's order, `states` the operands that hold initial states, `others_of` further
    weights of a direction."""
    g, x = call.g, call.value(0)
    batch_first = bool(call.attribute("layout", 0))
    if batch_first:
        x = g.transpose(x, 0, 1)
    length, batch = x.shape[:2]
    hidden = call.attribute("hidden_size") or call.value(2).shape[-1]
    if call.attribute("clip") or call.attribute("input_forget", 0):
        raise Unsupported(f"{call.operator} with clip or input_forget")
    if call.has(4) and (call.constant(4, "sequence lengths") != length).any():
        raise Unsupported("sequences of different lengths")
    way = call.attribute("direction", "forward")
    reverses = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[way]
    finals, outputs = [], []
    for direction, reverse in enumerate(reverses):
        weights = [_reordered(call, 1, direction, order), _reordered(call, 2, direction, order)]
        if call.has(3):
            weights += [_reordered(call, 3, direction, order, slice(k, k + 1)) for k in range(2)]
        initial = [_state(call, position, direction, (batch, hidden), x.dtype, batch_first) for position in states]
        *final, stacked = one_direction(g, cell_of(direction), x, initial, weights, reverse, inner_bias, others_of(direction))
        finals.append(final)
        outputs.append(stacked)
    joined = g.concatenate([g.unsqueeze(y, 1) for y in outputs], 1)
    joined = g.permute(joined, (2, 0, 1, 3)) if batch_first else joined
    axis = 1 if batch_first else 0
    return joined, *(g.concatenate([g.unsqueeze(f[i], axis) for f in finals], axis) for i in range(len(states)))


def _state(call: NodeCall, position: int, direction: int, shape: tuple[int, int], dtype: str, batch_first: bool) -> Value:
    if not call.has(position):
        return call.materialise(np.zeros(shape, numpy_dtype(dtype)))
    return call.g.op("select", call.value(position), axis=1 if batch_first else 0, position=direction)


def _activations(call: NodeCall, default: Sequence[str]) -> list[list[str]]:
    """Names of the activations for each direction. Raises Unsupported for activations with parameters of their own."""
    directions = 2 if call.attribute("direction", "forward") == "bidirectional" else 1
    names = [n.lower() for n in call.attribute("activations") or list(default) * directions]
    if call.attribute("activation_alpha") or call.attribute("activation_beta"):
        raise Unsupported(f"{call.operator} with activation_alpha or activation_beta")
    return [names[k * len(default) : (k + 1) * len(default)] for k in range(directions)]


@HANDLERS.handles("LSTM")
def lstm(call: NodeCall) -> tuple[Value | None, ...]:
    """ONNX's gates are in the order i, o, f, c; the cell's in the order i, f, c, o."""
    default = ("sigmoid", "tanh", "tanh")
    if any(tuple(names) != default for names in _activations(call, default)):
        raise Unsupported("LSTM with other activations")
    gates = (0, 2, 3, 1)
    if call.has(7) and not (isinstance(call.inputs[7], np.ndarray) and not call.constant(7, "peepholes").any()):
        return _recurrent(call, lambda _: peephole_step, gates, (5, 6), False, lambda direction: _peepholes(call, direction))
    return _recurrent(call, lambda _: lstm_step, gates, (5, 6), False)


def _peepholes(call: NodeCall, direction: int) -> list[Value]:
    """The weights of the gates i, f, o; ONNX's are in the order i, o, f."""
    own = call.g.op("select", call.value(7), axis=0, position=direction)
    size = own.shape[0] // 3
    return [call.g.slice(own, 0, k * size, (k + 1) * size) for k in (0, 2, 1)]


@HANDLERS.handles("GRU")
def gru(call: NodeCall) -> tuple[Value | None, ...]:
    """ONNX's gates are in the order z, r, h; the cell's in the order r, z, n."""
    default = ("sigmoid", "tanh")
    if any(tuple(names) != default for names in _activations(call, default)):
        raise Unsupported("GRU with other activations")
    after = bool(call.attribute("linear_before_reset", 0))
    return _recurrent(call, lambda _: gru_step if after else _gru_step_before, (1, 0, 2), (5,), after)


@HANDLERS.handles("RNN")
def rnn(call: NodeCall) -> tuple[Value | None, ...]:
    names = [name for (name,) in _activations(call, ("tanh",))]
    if any(name not in ("tanh", "relu", "sigmoid") for name in names):
        raise Unsupported(f"RNN with activation {names}")
    return _recurrent(call, lambda direction: simple_step(names[direction]), (0,), (5,), False)
