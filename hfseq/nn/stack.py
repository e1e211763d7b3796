"""Identical layers, run one after the other: a Python loop, or stacked at rest and scanned.

The model file writes ``self.layer = nn.Layers([...])`` and ``nn.run_layers(self.layer, x, ...)``;
whether the layers are scanned or rematerialised is decided outside of it (``scan_layers``,
``gradient_checkpointing``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq.nn import sharding, trees
from hfseq.nn.context import current_options
from hfseq.nn.random import Keys

Tree = TypeVar("Tree")
#: Keyword arguments of one layer, or of all with a leading layer axis.
Slices = Mapping[str, jax.Array]
# A layer's call: the layer, its input, its number and its slices, to hidden states and a second.
Call = Callable[[nnx.Module, jax.Array, int | jax.Array, Slices], tuple[jax.Array, Any]]
# The last hidden states, each layer's second result, and all inputs if they are collected.
Stacked = tuple[jax.Array, tuple[Any, ...], tuple[jax.Array, ...] | None]


class Layers(nnx.List):
    """A list of layers of one class and one shape, as the checkpoint numbers them.

    The first layers may hold variables that the others lack (T5's table of relative positions).
    Stacked, these have an entry only for the layers that hold them, and the model reads them
    outside of the layers.
    """


def stack_layers(module: nnx.Module) -> None:
    """Replace every :class:`Layers` in ``module`` by one layer with stacked variables."""
    stacks = [
        (parent, name, child)
        for _, parent in nnx.iter_graph(module)
        if isinstance(parent, nnx.Module)
        for name, child in list(vars(parent).items())
        if isinstance(child, Layers)
    ]
    for parent, name, layers in stacks:
        graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
        flat = [dict(nnx.to_flat_state(state)) for state in states]
        stacked = {}
        for path in flat[0]:  # over the layers that have the variable
            having = (state[path] for state in flat if path in state)
            stacked[path] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *having)
        layer = nnx.merge(graphs[0], nnx.from_flat_state(stacked.items()))
        layer.num_stacked = len(layers)
        setattr(parent, name, nnx.data(layer))


def run_layers(
    layers: nnx.Module,
    hidden_states: jax.Array,
    *args: Any,
    rngs: Keys | None = None,
    collect: bool = False,
    per_layer: dict[str, jax.Array] | None = None,
    **kwargs: Any,
) -> tuple[jax.Array, Any, tuple[jax.Array, ...] | None]:
    """Run ``layers`` and return the last hidden state, each layer's second result, and all inputs.

    A layer is called ``layer(hidden_states, *args, rngs=keys, **kwargs)`` and returns a pair
    (hidden states, anything); ``rngs`` of a layer depend on its number alone, so loop and scan draw
    the same dropout masks. The seconds come as a tuple, one a layer. With ``collect`` the input of
    every layer is returned too, as ``hidden_states`` in the Hugging Face outputs wants it.
    ``per_layer`` holds keyword arguments with a leading layer axis, of which each layer gets its
    slice.
    """
    # A child, so that no two stacks and no dropout beside them share a key.
    keys = None if rngs is None else rngs.child()
    x = sharding.hidden_states(hidden_states)

    def call(
        layer: nnx.Module, x: jax.Array, number: int | jax.Array, slices: Slices
    ) -> tuple[jax.Array, Any]:
        layer_keys = None if keys is None else keys.fold_in(number)
        out, second = layer(x, *args, rngs=layer_keys, **kwargs, **slices)
        return sharding.hidden_states(out), second

    if isinstance(layers, nnx.List):
        return _loop(layers, x, call, per_layer or {}, collect)
    return _scan(layers, x, call, per_layer or {}, collect)


def _functional(graph: nnx.GraphDef, call: Call) -> Callable[..., tuple[jax.Array, Any]]:
    """Make a layer a function of its input, number and variables; in remat if asked."""

    def pure(
        x: jax.Array, number: jax.Array, params: nnx.State, others: nnx.State, slices: Slices
    ) -> tuple[jax.Array, Any]:
        layer = nnx.merge(graph, params, others, copy=True)
        out, second = call(layer, x, number, slices)
        return out, (second, trees.split(layer)[2])

    options = current_options()
    return jax.checkpoint(pure, policy=options.remat_policy) if options.remat else pure


def _loop(layers: nnx.List, x: jax.Array, call: Call, per_layer: Slices, collect: bool) -> Stacked:
    seconds, inputs = [], []
    for number, layer in enumerate(layers):
        inputs.append(x)
        slices = {name: values[number] for name, values in per_layer.items()}
        if current_options().remat:
            graph, params, others = trees.split(layer)
            pure = _functional(graph, call)
            x, (second, changed) = pure(x, jnp.uint32(number), params, others, slices)
            nnx.update(layer, changed)
        else:
            x, second = call(layer, x, number, slices)
        seconds.append(second)
    return x, tuple(seconds), tuple(inputs) if collect else None


def _scan(layer: nnx.Module, x: jax.Array, call: Call, per_layer: Slices, collect: bool) -> Stacked:
    graph, params, others = trees.split(layer)
    count: int = layer.num_stacked  # type: ignore[attr-defined]
    pure = _functional(graph, call)

    def body(x: jax.Array, sliced: tuple[Any, ...]) -> tuple[jax.Array, Any]:
        out, (second, changed) = pure(x, *sliced)
        return out, (second, changed, x if collect else None)

    def whole(leaf: jax.Array) -> jax.Array:
        # What only the first layers have is not read inside: any value does for the others.
        return (
            leaf if leaf.shape[0] == count else jnp.broadcast_to(leaf[0], (count, *leaf.shape[1:]))
        )

    params = jax.tree.map(whole, params)
    xs = (jnp.arange(count, dtype=jnp.uint32), params, others, per_layer)
    x, (seconds, changed, inputs) = jax.lax.scan(body, x, xs)
    nnx.update(layer, changed)

    def unstack(tree: Tree) -> tuple[Tree, ...]:
        return tuple(jax.tree.map(operator.itemgetter(i), tree) for i in range(count))

    return x, unstack(seconds), unstack(inputs) if collect else None
