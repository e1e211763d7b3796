"""Identical layers, run one after the other: a Python loop, or stacked at rest and scanned.

The model file writes ``self.layer = nn.Layers([...])`` and ``nn.run_layers(self.layer, x, ...)``;
whether the layers are scanned or rematerialised is decided outside of it (``scan_layers``,
``gradient_checkpointing``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq.nn import sharding, trees
from hfseq.nn.random import Keys


@dataclasses.dataclass(frozen=True)
class Options:
    """How a forward pass runs: remat of each layer, the attention implementation, the mesh."""

    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    attention: Callable[..., jax.Array] = jax.nn.dot_product_attention
    fill_encoder_cache: bool = False
    train: bool = False
    mesh: jax.sharding.Mesh | None = None
    sequence_parallel: bool = False
    # What was put together for several products, by the id of its parts (hfseq.nn.sharding).
    gathered: dict[int, Any] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )


_DEFAULT = Options()
_options: contextvars.ContextVar[Options | None] = contextvars.ContextVar(
    "hfseq_options", default=None
)


def current_options() -> Options:
    """Return the options of the forward pass being traced."""
    return _options.get() or _DEFAULT


@contextlib.contextmanager
def options(value: Options) -> Iterator[None]:
    """Trace what is inside with ``value`` in force."""
    token = _options.set(value)
    try:
        yield
    finally:
        _options.reset(token)


class Layers(nnx.List):
    """A list of layers of one class and one shape, as the checkpoint numbers them.

    The first layers may hold variables that the others lack (T5's table of relative positions).
    Stacked, these have an entry only for the layers that hold them, and the model reads them
    outside of the layers.
    """


def stack_layers(module: nnx.Module) -> None:
    """Replace every :class:`Layers` in ``module`` by one layer with stacked variables."""
    found = [
        (parent, name, child)
        for _, parent in nnx.iter_graph(module)
        if isinstance(parent, nnx.Module)
        for name, child in list(vars(parent).items())
        if isinstance(child, Layers)
    ]
    for parent, name, layers in found:
        graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
        layer = nnx.merge(graphs[0], _stack(states))
        layer.num_stacked = len(layers)
        setattr(parent, name, nnx.data(layer))


def _stack(states: Sequence[nnx.State]) -> nnx.State:
    """Stack the variables of all layers, each over the layers that have it."""
    flat = [dict(nnx.to_flat_state(state)) for state in states]

    def stacked(path: Any) -> Any:
        having = (state[path] for state in flat if path in state)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *having)

    return nnx.from_flat_state((path, stacked(path)) for path in flat[0])


def run_layers(
    layers: Any,
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
    run = _loop if isinstance(layers, nnx.List) else _scan
    # A child, so that no two stacks and no dropout beside them share a key.
    keys = None if rngs is None else rngs.child()
    x = sharding.hidden_states(hidden_states, current_options())
    return run(layers, x, args, kwargs, per_layer or {}, keys, collect)


def _functional(graph: Any, args: Any, kwargs: Any, rngs: Keys | None) -> Callable[..., Any]:
    """Make a layer a function of its variables, number and input; in remat if asked."""

    def call(x: jax.Array, sliced: Any) -> Any:
        number, params, others, own = sliced
        keys = None if rngs is None else rngs.fold_in(number)
        layer = nnx.merge(graph, params, others, copy=True)
        out, second = layer(x, *args, rngs=keys, **kwargs, **own)
        out = sharding.hidden_states(out, current_options())
        return out, (second, trees.split(layer)[2])

    chosen = current_options()
    return jax.checkpoint(call, policy=chosen.remat_policy) if chosen.remat else call


def _loop(
    layers: Any, x: Any, args: Any, kwargs: Any, own: Any, rngs: Keys | None, collect: bool
) -> Any:
    seconds, inputs = [], []
    for number, layer in enumerate(layers):
        inputs.append(x)
        mine = {name: values[number] for name, values in own.items()}
        if current_options().remat:
            graph, params, others = trees.split(layer)
            call = _functional(graph, args, kwargs, rngs)
            x, (second, changed) = call(x, (jnp.uint32(number), params, others, mine))
            nnx.update(layer, changed)
        else:
            keys = None if rngs is None else rngs.fold_in(number)
            x, second = layer(x, *args, rngs=keys, **kwargs, **mine)
            x = sharding.hidden_states(x, current_options())
        seconds.append(second)
    return x, tuple(seconds), tuple(inputs) if collect else None


def _scan(
    layer: Any, x: Any, args: Any, kwargs: Any, own: Any, rngs: Keys | None, collect: bool
) -> Any:
    graph, params, others = trees.split(layer)
    count = layer.num_stacked
    call = _functional(graph, args, kwargs, rngs)

    def body(x: jax.Array, sliced: Any) -> Any:
        out, (second, changed) = call(x, sliced)
        return out, (second, changed, x if collect else None)

    def every(leaf: jax.Array) -> jax.Array:
        # What only the first layers have is not read inside: any value does for the others.
        return (
            leaf if leaf.shape[0] == count else jnp.broadcast_to(leaf[0], (count, *leaf.shape[1:]))
        )

    params = jax.tree.map(every, params)
    xs = (jnp.arange(count, dtype=jnp.uint32), params, others, own)
    x, (seconds, changed, inputs) = jax.lax.scan(body, x, xs)
    nnx.update(layer, changed)
    return x, _unstack(seconds, count), _unstack(inputs, count) if collect else None


def _unstack(tree: Any, count: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(operator.itemgetter(i), tree) for i in range(count))
