"""LSTM, GRU and simple recurrent networks as loops over a body graph.

The products of all inputs with W_ih are one matrix product before the loop; an iteration computes h W_hh^T, adds, and applies the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilewright.frontend.handlers import Handlers, Unsupported
from tilewright.graph.builder import GraphBuilder
from tilewright.ir.graph import Graph, Value

HANDLERS = Handlers()

# body of one iteration: (builder, states, input part of the gates, W_hh, recurrent bias, other weights...) -> new states
Cell = Callable[..., tuple[Value, ...]]


def gates_of(b: GraphBuilder, x: Value, count: int) -> list[Value]:
    size = x.shape[-1] // count
    return [b.slice(x, 1, k * size, (k + 1) * size) for k in range(count)]


def _hidden_part(b: GraphBuilder, h: Value, w: Value, bias: Value | None) -> Value:
    product = b.op("linear", h, w)
    return product if bias is None else b.pointwise("add", product, bias)


def lstm_step(b: GraphBuilder, states: Sequence[Value], x: Value, w: Value, bias: Value | None) -> tuple[Value, ...]:
    """i, f, g, o = gates;  c' = f c + i g;  h' = o tanh c'  (Hochreiter and Schmidhuber 1997, in PyTorch's order of gates)"""
    h, c = states
    i, f, cell, o = gates_of(b, b.pointwise("add", _hidden_part(b, h, w, bias), x), 4)
    kept = b.pointwise("mul", b.pointwise("sigmoid", f), c)
    c = b.pointwise("add", kept, b.pointwise("mul", b.pointwise("sigmoid", i), b.pointwise("tanh", cell)))
    return b.pointwise("mul", b.pointwise("sigmoid", o), b.pointwise("tanh", c)), c


def peephole_step(
    b: GraphBuilder, states: Sequence[Value], x: Value, w: Value, bias: Value | None, p_i: Value, p_f: Value, p_o: Value
) -> tuple[Value, ...]:
    """`lstm_step` whose gates also see the cell: i and f add p c, and o adds p c' (Gers and Schmidhuber 2000)."""
    h, c = states
    i, f, cell, o = gates_of(b, b.pointwise("add", _hidden_part(b, h, w, bias), x), 4)

    def gate(x: Value, p: Value, c: Value) -> Value:
        return b.pointwise("sigmoid", b.pointwise("add", x, b.pointwise("mul", p, c)))

    new = b.pointwise("add", b.pointwise("mul", gate(f, p_f, c), c), b.pointwise("mul", gate(i, p_i, c), b.pointwise("tanh", cell)))
    return b.pointwise("mul", gate(o, p_o, new), b.pointwise("tanh", new)), new


def gru_step(b: GraphBuilder, states: Sequence[Value], x: Value, w: Value, bias: Value | None) -> tuple[Value, ...]:
    """r, z = gates;  n = tanh(x_n + r h_n);  h' = n + z (h - n)  (Cho et al. 2014; the reset gate acts after the product)"""
    (h,) = states
    xr, xz, xn = gates_of(b, x, 3)
    hr, hz, hn = gates_of(b, _hidden_part(b, h, w, bias), 3)
    r = b.pointwise("sigmoid", b.pointwise("add", xr, hr))
    z = b.pointwise("sigmoid", b.pointwise("add", xz, hz))
    n = b.pointwise("tanh", b.pointwise("add", xn, b.pointwise("mul", r, hn)))
    return (b.pointwise("add", n, b.pointwise("mul", z, b.pointwise("sub", h, n))),)


def simple_step(activation: str) -> Cell:
    def cell(b: GraphBuilder, states: Sequence[Value], x: Value, w: Value, bias: Value | None) -> tuple[Value, ...]:
        return (b.pointwise(activation, b.pointwise("add", _hidden_part(b, states[0], w, bias), x)),)

    return cell


def _body(cell: Cell, states: Sequence[Value], x: Value, w: Value, bias: Value | None, others: Sequence[Value]) -> Graph:
    """Inputs (states, slice of the sequence, W_hh[, bias], other weights); outputs (new states, output of the step)."""
    b = GraphBuilder()
    names = ("h", "c")
    inner = [b.input(name, v.shape, v.dtype) for name, v in zip(names, states, strict=False)]
    step = b.input("x", x.shape[1:], x.dtype)
    inner_w = b.input("w_hh", w.shape, w.dtype)
    inner_bias = None if bias is None else b.input("b_hh", bias.shape, bias.dtype)
    more = [b.input("weight", v.shape, v.dtype) for v in others]
    with b.at("step", ""):
        new = cell(b, inner, step, inner_w, inner_bias, *more)
        return b.finish([*new, b.op("copy", new[0])])


def one_direction(
    g: GraphBuilder,
    cell: Cell,
    x: Value,
    initial: Sequence[Value],
    parameters: Sequence[Value],
    reverse: bool,
    inner_bias: bool,
    others: Sequence[Value] = (),
) -> tuple[Value, ...]:
    """One layer in one direction over x [T, N, C]: (final states..., outputs [T, N, H]). Both biases are added before the loop, unless `inner_bias`
    keeps that of the recurrent product inside. `others` are further weights of the cell."""
    w_ih, w_hh, *biases = parameters
    part = g.op("linear", x, w_ih)
    if biases:
        part = g.pointwise("add", part, biases[0] if inner_bias else g.pointwise("add", *biases))
    bias = biases[1] if biases and inner_bias else None
    body = _body(cell, initial, part, w_hh, bias, others)
    captured = [w_hh, *([] if bias is None else [bias]), *others]
    length = x.shape[0]
    types = [(v.shape, v.dtype) for v in initial] + [((length, *initial[0].shape), initial[0].dtype)]
    attributes = {"body": body, "states": len(initial), "sequences": 1, "length": length, "reverse": (reverse, reverse)}
    return g.structural("scan", [*initial, part, *captured], types, attributes)


def _recurrent(
    g: GraphBuilder,
    cell: Cell,
    x: Value,
    initial: Sequence[Value],
    weights: Sequence[Value],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    inner_bias: bool = False,
) -> tuple[Value, ...]:
    """All layers and directions. `initial` are the states [layers * directions, N, H]. Returns (outputs, final states...)."""
    if dropout and train and layers > 1:
        raise Unsupported("dropout between layers in training mode draws random numbers")
    unbatched = len(x.shape) == 2
    if unbatched:
        x = g.reshape(x, (x.shape[0], 1, x.shape[1]))
        initial = [g.reshape(s, (s.shape[0], 1, s.shape[-1])) for s in initial]
    elif batch_first:
        x = g.transpose(x, 0, 1)
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if len(weights) != layers * directions * each:
        raise Unsupported("an LSTM with projections")
    finals: list[list[Value]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            start = [g.op("select", s, axis=0, position=k) for s in initial]
            *final, stacked = one_direction(g, cell, x, start, weights[k * each : (k + 1) * each], bool(direction), inner_bias)
            finals.append(final)
            outputs.append(stacked)
        x = g.concatenate(outputs, 2)
    states = [g.concatenate([g.unsqueeze(f[i], 0) for f in finals], 0) for i in range(len(initial))]
    if unbatched:
        return g.reshape(x, (x.shape[0], x.shape[2])), *(g.reshape(s, (s.shape[0], s.shape[2])) for s in states)
    return g.transpose(x, 0, 1) if batch_first else x, *states


@HANDLERS.handles("lstm.input")
def lstm(
    g: GraphBuilder,
    x: Value,
    states: list[Value],
    weights: list[Value],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    if states[0].shape[-1] != states[1].shape[-1]:
        raise Unsupported("an LSTM with projections")
    return _recurrent(g, lstm_step, x, states, weights, biases, layers, dropout, train, bidirectional, batch_first)


@HANDLERS.handles("gru.input")
def gru(
    g: GraphBuilder,
    x: Value,
    state: Value,
    weights: list[Value],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    return _recurrent(g, gru_step, x, [state], weights, biases, layers, dropout, train, bidirectional, batch_first, inner_bias=True)


@HANDLERS.handles("rnn_tanh.input")
def rnn_tanh(g: GraphBuilder, x: Value, state: Value, weights: list[Value], biases: bool, *rest: Any) -> tuple[Value, ...]:
    return _recurrent(g, simple_step("tanh"), x, [state], weights, biases, *rest)


@HANDLERS.handles("rnn_relu.input")
def rnn_relu(g: GraphBuilder, x: Value, state: Value, weights: list[Value], biases: bool, *rest: Any) -> tuple[Value, ...]:
    return _recurrent(g, simple_step("relu"), x, [state], weights, biases, *rest)


def _cell(
    g: GraphBuilder, cell: Cell, x: Value, states: Sequence[Value], w_ih: Value, w_hh: Value, b_ih: Value | None, b_hh: Value | None
) -> tuple[Value, ...]:
    """A single step (torch.nn.LSTMCell and similar), without a loop."""
    part = g.op("linear", x, w_ih)
    return cell(g, states, part if b_ih is None else g.pointwise("add", part, b_ih), w_hh, b_hh)


@HANDLERS.handles("lstm_cell.default")
def lstm_cell(g: GraphBuilder, x: Value, states: list[Value], *weights: Any) -> tuple[Value, ...]:
    return _cell(g, lstm_step, x, states, *weights)


@HANDLERS.handles("gru_cell.default")
def gru_cell(g: GraphBuilder, x: Value, h: Value, *weights: Any) -> Value:
    return _cell(g, gru_step, x, [h], *weights)[0]


@HANDLERS.handles("rnn_tanh_cell.default")
def rnn_tanh_cell(g: GraphBuilder, x: Value, h: Value, *weights: Any) -> Value:
    return _cell(g, simple_step("tanh"), x, [h], *weights)[0]


@HANDLERS.handles("rnn_relu_cell.default")
def rnn_relu_cell(g: GraphBuilder, x: Value, h: Value, *weights: Any) -> Value:
    return _cell(g, simple_step("relu"), x, [h], *weights)[0]
