"""Recurrent layers, computed with `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from hfseq_plugins.bridge.operators.table import Function, operator

Array = jax.Array
#: A function that computes the next state of a cell. Its arguments are the projected input, the
#: state, and the kernel and bias of the projection of the hidden state.
Cell = Callable[[Array, tuple[Array, ...], Array, Array | None], tuple[Array, ...]]


def _lstm_cell(
    gates: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None
) -> tuple[Array, ...]:
    hidden, cell = state
    gates = gates + hidden @ w_hh.T + (0 if b_hh is None else b_hh)
    i, f, g, o = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def _gru_cell(
    gates: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None
) -> tuple[Array, ...]:
    (hidden,) = state
    recurrent = hidden @ w_hh.T + (0 if b_hh is None else b_hh)
    r, z, n = jnp.split(gates, 3, -1)
    r_hidden, z_hidden, n_hidden = jnp.split(recurrent, 3, -1)
    reset, update = jax.nn.sigmoid(r + r_hidden), jax.nn.sigmoid(z + z_hidden)
    new = jnp.tanh(n + reset * n_hidden)
    return ((1 - update) * new + update * hidden,)


def _simple_cell(activation: Callable[[Array], Array]) -> Cell:
    def cell(
        gates: Array, state: tuple[Array, ...], w_hh: Array, b_hh: Array | None
    ) -> tuple[Array, ...]:
        return (activation(gates + state[0] @ w_hh.T + (0 if b_hh is None else b_hh)),)

    return cell


def _layer(
    cell: Cell, x: Array, state: tuple[Array, ...], weights: list[Array], reverse: bool
) -> tuple[Array, tuple[Array, ...]]:
    """Runs one direction of one layer on inputs of the shape `(length, batch, inputs)`."""
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases if biases else (None, None)
    gates = x @ w_ih.T + (0 if b_ih is None else b_ih)

    def step(state: tuple[Array, ...], gates: Array) -> tuple[tuple[Array, ...], Array]:
        state = cell(gates, state, w_hh, b_hh)
        return state, state[0]

    last, outputs = lax.scan(step, state, gates, reverse=reverse)
    return outputs, last


def _run(
    cell: Cell,
    x: Array,
    states: tuple[Array, ...],
    parameters: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Array, ...]:
    x = x.swapaxes(0, 1) if batch_first else x
    per_layer = 4 if has_biases else 2
    finals = []
    directions = 2 if bidirectional else 1
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = parameters[number * per_layer : (number + 1) * per_layer]
            state = tuple(array[number] for array in states)
            output, last = _layer(cell, x, state, list(weights), direction == 1)
            outputs.append(output)
            finals.append(last)
        x = jnp.concatenate(outputs, -1)
    x = x.swapaxes(0, 1) if batch_first else x
    return (x, *(jnp.stack(arrays) for arrays in zip(*finals, strict=True)))


def _reject_dropout(dropout: float, train: bool, num_layers: int) -> None:
    if dropout and train and num_layers > 1:
        raise NotImplementedError("dropout between recurrent layers is not supported")


@operator("lstm.input")
def _lstm(
    x: Array,
    states: Sequence[Array],
    parameters: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Array, ...]:
    _reject_dropout(dropout, train, num_layers)
    return _run(
        _lstm_cell, x, tuple(states), parameters, has_biases, num_layers, bidirectional, batch_first
    )


@operator("gru.input")
def _gru(
    x: Array,
    state: Array,
    parameters: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Array, ...]:
    _reject_dropout(dropout, train, num_layers)
    return _run(
        _gru_cell, x, (state,), parameters, has_biases, num_layers, bidirectional, batch_first
    )


@operator("mkldnn_rnn_layer")
def _mkldnn_layer(
    x: Array,
    w_ih: Array,
    w_hh: Array,
    b_ih: Array,
    b_hh: Array,
    hidden: Array,
    cell: Array,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Array, Array, Array, Array]:
    """Computes the operator of PyTorch's CPU library for one direction of one LSTM layer."""
    # The inputs of this operator have the time axis first, whatever the value of batch_first.
    weights = [w_ih, w_hh, *([b_ih, b_hh] if has_biases else [])]
    outputs, (last_hidden, last_cell) = _layer(
        _lstm_cell,
        x,
        (hidden.reshape(x.shape[1], -1), cell.reshape(x.shape[1], -1)),
        weights,
        reverse,
    )
    return (
        outputs,
        last_hidden.reshape(hidden.shape),
        last_cell.reshape(cell.shape),
        jnp.zeros(0, jnp.uint8),
    )


for _name, _activation in (("rnn_tanh", jnp.tanh), ("rnn_relu", jax.nn.relu)):

    @operator(f"{_name}.input")
    def _simple(
        x: Array,
        state: Array,
        parameters: Sequence[Array],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        activation: Function = _activation,
    ) -> tuple[Array, ...]:
        _reject_dropout(dropout, train, num_layers)
        cell = _simple_cell(activation)
        return _run(
            cell, x, (state,), parameters, has_biases, num_layers, bidirectional, batch_first
        )
