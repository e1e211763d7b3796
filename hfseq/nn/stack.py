"""Layers, run one after the other: a Python loop, or stacked at rest and scanned.

The model file writes ``self.layer = nn.Layers([...])`` and ``nn.run_layers(self.layer, x, ...)``;
whether the layers are scanned or rematerialised is decided outside of it (``scan_layers``,
``gradient_checkpointing``).
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq.errors import UsageError
from hfseq.nn import sharding, trees
from hfseq.nn.context import ConstructorSignature, current_options
from hfseq.nn.random import Keys, provide_adapter_keys

#: Keyword arguments of one layer, or of all with a leading layer axis.
LayerArguments = Mapping[str, jax.Array]
# A layer's call: the layer, its input, its number and its slices, to hidden states and a second.
LayerCall = Callable[
    [nnx.Module, jax.Array, int | jax.Array, LayerArguments], tuple[jax.Array, Any]
]
# The last hidden states, each layer's second result, and all inputs if they are collected.
LayerResults = tuple[jax.Array, tuple[Any, ...], tuple[jax.Array, ...] | None]


class LayerRun(NamedTuple):
    """Layers that are scanned together: ``period`` of them, from number ``first``, repeated."""

    first: int
    period: int
    repeats: int

    def numbers(self, position: int) -> range:
        """Return the numbers of the layers at ``position`` of the pattern."""
        first = self.first + position
        return range(first, first + self.period * self.repeats, self.period)


class Layers(nnx.List):
    """A list of layers, as the checkpoint numbers them.

    Layers that differ, by their classes, variables or attributes, are scanned in runs of alike ones
    and in patterns that repeat (five windowed layers and a full one). ``shared`` are regular
    expressions on paths below a layer: of what the first layers hold for all of them, and the model
    reads outside of the layers (T5's table of relative positions). It makes no difference, and has,
    stacked, an entry only for the layers that hold it.
    """

    __signature__ = ConstructorSignature()

    def __init__(self, layers: Iterable[nnx.Module] = (), /, *, shared: Sequence[str] = ()):
        super().__init__(layers)
        self.shared = tuple(shared)

    def runs(self, path: str) -> list[LayerRun]:
        """Cut the layers, which are at ``path``, into runs so that the fewest are compiled."""
        parts = [_parts(layer, self.shared) for layer in self]
        kinds: list[int] = []  # of each layer, the number of the first one that is like it
        for number, own in enumerate(parts):
            like = (
                n for n in range(number) if kinds[n] == n and _difference(parts[n], own) is None
            )
            kinds.append(next(like, number))
        count = len(kinds)
        best: list[tuple[int, list[LayerRun]]] = [(0, [])] * (
            count + 1
        )  # of the layers from each on
        for first in reversed(range(count)):
            options: list[tuple[int, list[LayerRun]]] = []
            for period in range(1, count - first + 1):
                pattern = kinds[first : first + period]
                for repeats in range(1, (count - first) // period + 1):
                    end = first + period * repeats
                    if kinds[end - period : end] != pattern:
                        break
                    if repeats > 1 or period == 1:
                        cost, rest = best[end]
                        options.append((period + cost, [LayerRun(first, period, repeats), *rest]))
            # (of equals the one with the fewest runs, and the longest first run)
            best[first] = min(
                options,
                key=lambda made: (made[0], len(made[1]), -made[1][0].period * made[1][0].repeats),
            )
        cost, runs = best[0]
        if cost == count > 1:
            raise UsageError(
                f"scan_layers: no two layers of {path} can be scanned together; layer 1 differs "
                f"from layer 0 in {_difference(parts[0], parts[1])}. Run it without scan_layers, "
                "or with more layers if its pattern is longer"
            )
        return runs


class LayerStacks(nnx.List):
    """What :func:`stack_layers` makes of layers that differ: a stack a position of each run."""

    def __init__(self, layers: Iterable[nnx.Module], runs: Sequence[LayerRun]):
        super().__init__(layers)
        self.runs = tuple(runs)


def stack_layers(module: nnx.Module) -> None:
    """Replace every :class:`Layers` in ``module`` by stacked variables.

    Where all layers are alike they become one layer, else :class:`Stacks`. UsageError where not
    even two layers can be scanned together.
    """
    lists = [
        (parent, name, child, "/".join(map(str, (*path, name))))
        for path, parent in nnx.iter_graph(module)
        if isinstance(parent, nnx.Module)
        for name, child in list(vars(parent).items())
        if isinstance(child, Layers)
    ]
    for parent, name, layers, path in lists:
        runs = layers.runs(path)
        stacks = [
            _stack([layers[number] for number in run.numbers(position)], path)
            for run in runs
            for position in range(run.period)
        ]
        setattr(
            parent, name, nnx.data(stacks[0] if len(stacks) == 1 else LayerStacks(stacks, runs))
        )


def stacked_paths(module: nnx.Module) -> dict[trees.Path, tuple[trees.Path, ...]]:
    """Return the paths of stacks, with those that their layers have where they are not stacked."""
    parts = {tuple(map(str, path)): part for path, part in nnx.iter_graph(module)}
    stacked = {
        path: tuple((*path, str(number)) for number in range(part.num_stacked))
        for path, part in parts.items()
        if getattr(part, "num_stacked", None)
    }
    for path, part in parts.items():
        if isinstance(part, LayerStacks):
            ranges = (run.numbers(at) for run in part.runs for at in range(run.period))
            for index, numbers in enumerate(ranges):
                paths = tuple((*path, str(number)) for number in numbers)
                stacked[(*path, str(index))] = paths
    return stacked


def _stack(layers: Sequence[nnx.Module], path: str) -> nnx.Module:
    """Return the first of ``layers``, which are alike, with the variables of all of them."""
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    stacked = {}
    for name in dict.fromkeys(itertools.chain(*flat)):
        having = [state[name] for state in flat if name in state]
        if not all(name in state for state in flat[: len(having)]):
            raise UsageError(
                f"scan_layers: {path}: the first layer lacks {'/'.join(map(str, name))}, which "
                "is declared as shared by the layers: let the first ones hold it"
            )
        stacked[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *having)
    layer = nnx.merge(graphs[0], nnx.from_flat_state(stacked.items()))
    layer.num_stacked = len(layers)
    return layer


def _parts(layer: nnx.Module, shared: Sequence[str]) -> dict[str, Any]:
    """Return what a layer consists of, by path: classes, shapes and types, attributes."""
    parts: dict[str, Any] = {}
    for path, part in nnx.iter_graph(layer):
        name = "/".join(map(str, path))
        if "_pytree__" in name or any(re.search(pattern, name) for pattern in shared):
            continue
        if isinstance(part, nnx.Variable):
            parts[name] = type(part), part.shape, part.dtype
        elif isinstance(part, nnx.Module):
            parts[name] = type(part)
        else:
            parts[name] = (part.shape, part.dtype) if isinstance(part, jax.Array) else part
    return parts


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Say in what two layers differ, if they do."""
    for name in dict.fromkeys((*ours, *theirs)):
        missing = object()
        one, other = ours.get(name, missing), theirs.get(name, missing)
        if one is missing or other is missing:
            return f"{name}, which only one of them has"
        if not _alike(one, other):
            return f"{name or 'its class'}: {other!r}, not {one!r}"
    return None


def _alike(one: Any, other: Any) -> bool:
    """Compare static values; functions and plain objects by what they are made of."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return _alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, FunctionType):
        cells = [
            [cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)
        ]
        return (
            one.__code__ == other.__code__
            and _alike(one.__defaults__, other.__defaults__)
            and _alike(*cells)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if not any("__eq__" in vars(kind) for kind in type(one).__mro__[:-1]):
        return hasattr(one, "__dict__") and _alike(vars(one), vars(other))
    return bool(one == other)


def run_layers(
    layers: nnx.Module,
    hidden_states: jax.Array,
    *args: Any,
    rngs: Keys | None = None,
    collect: bool = False,
    per_layer: dict[str, jax.Array] | None = None,
    order: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[jax.Array, Any, tuple[jax.Array, ...] | None]:
    """Run ``layers`` and return the last hidden state, each layer's second result, and all inputs.

    A layer is called ``layer(hidden_states, *args, rngs=keys, **kwargs)`` and returns a pair
    (hidden states, anything); ``rngs`` of a layer depend on its number alone, so loop and scan draw
    the same dropout masks. The seconds come as a tuple, one a layer. With ``collect`` the input of
    every layer is returned too, as ``hidden_states`` in the Hugging Face outputs wants it.
    ``per_layer`` holds keyword arguments with a leading layer axis, of which each layer gets its
    slice. ``order`` names the layers one after the other where some run more than once (ALBERT).
    """
    # A child, so that no two stacks and no dropout beside them share a key.
    keys = None if rngs is None else rngs.child()
    x = sharding.constrain_hidden_states(hidden_states)

    def call(
        layer: nnx.Module, x: jax.Array, number: int | jax.Array, slices: LayerArguments
    ) -> tuple[jax.Array, Any]:
        layer_keys = None if keys is None else keys.fold_in(number)
        with provide_adapter_keys(layer_keys):
            out, second = layer(x, *args, rngs=layer_keys, **kwargs, **slices)
        return sharding.constrain_hidden_states(out), second

    slices = per_layer or {}
    if not isinstance(layers, nnx.List):
        if order is not None:
            return _scan_in_order(layers, order, x, call, slices, collect)
        alike = LayerRun(0, 1, layers.num_stacked)  # type: ignore[attr-defined]
        return _scan([layers], alike, x, call, slices, collect)
    seconds: tuple[Any, ...] = ()
    inputs: tuple[jax.Array, ...] = ()
    if not isinstance(layers, LayerStacks):
        sequence = layers if order is None else [layers[index] for index in order]
        for number, layer in enumerate(sequence):
            inputs += (x,)
            chosen = {name: values[number] for name, values in slices.items()}
            if current_options().remat:
                graph, params, others = trees.split(layer)
                pure = _functional(graph, call)
                x, (second, changed) = pure(x, jnp.uint32(number), params, others, chosen)
                nnx.update(layer, changed)
            else:
                x, second = call(layer, x, number, chosen)
            seconds += (second,)
        return x, seconds, inputs if collect else None
    stacks = iter(layers)
    for run in layers.runs:
        group = list(itertools.islice(stacks, run.period))
        x, more, seen = _scan(group, run, x, call, slices, collect)
        seconds, inputs = seconds + more, inputs + (seen or ())
    return x, seconds, inputs if collect else None


def _functional(graph: nnx.GraphDef, call: LayerCall) -> Callable[..., tuple[jax.Array, Any]]:
    """Make a layer a function of its input, number and variables; in remat if asked."""

    def pure(
        x: jax.Array,
        number: jax.Array,
        params: nnx.State,
        others: nnx.State,
        slices: LayerArguments,
    ) -> tuple[jax.Array, Any]:
        layer = nnx.merge(graph, params, others, copy=True)
        out, second = call(layer, x, number, slices)
        return out, (second, trees.split(layer)[2])

    options = current_options()
    return jax.checkpoint(pure, policy=options.remat_policy) if options.remat else pure


def _scan(
    layers: Sequence[nnx.Module],
    run: LayerRun,
    x: jax.Array,
    call: LayerCall,
    per_layer: LayerArguments,
    collect: bool,
) -> LayerResults:
    """Scan ``run``, whose positions ``layers`` are stacked each."""
    parts = [trees.split(layer) for layer in layers]
    pure = [_functional(graph, call) for graph, _, _ in parts]

    def block(x: jax.Array, sliced: list[tuple[Any, ...]]) -> tuple[jax.Array, list[Any]]:
        results = []
        for layer, slices in zip(pure, sliced, strict=True):
            out, (second, changed) = layer(x, *slices)
            results.append((second, changed, x if collect else None))
            x = out
        return x, results

    def whole(leaf: jax.Array) -> jax.Array:
        # What only the first layers have is not read inside: any value does for the others.
        if leaf.shape[0] == run.repeats:
            return leaf
        return jnp.broadcast_to(leaf[0], (run.repeats, *leaf.shape[1:]))

    xs = []
    for position, (_, params, others) in enumerate(parts):
        numbers = run.numbers(position)
        chosen = slice(numbers.start, numbers.stop, numbers.step)
        slices = {name: values[chosen] for name, values in per_layer.items()}
        counted = jnp.arange(numbers.start, numbers.stop, numbers.step, dtype=jnp.uint32)
        xs.append((counted, jax.tree.map(whole, params), others, slices))
    x, results = jax.lax.scan(block, x, xs)
    for layer, (_, changed, _) in zip(layers, results, strict=True):
        nnx.update(layer, changed)
    inputs, seconds = [], []
    for i in range(run.repeats):
        for second, _, given in results:
            seconds.append(jax.tree.map(operator.itemgetter(i), second))
            inputs.append(jax.tree.map(operator.itemgetter(i), given))
    return x, tuple(seconds), tuple(inputs) if collect else None


def _scan_in_order(
    layer: nnx.Module,
    order: Sequence[int],
    x: jax.Array,
    call: LayerCall,
    per_layer: LayerArguments,
    collect: bool,
) -> LayerResults:
    """Scan the numbers of stacked layers, whose variables are read where they lie."""
    graph, params, others = trees.split(layer)
    pure = _functional(graph, call)

    def block(carry: tuple[jax.Array, Any], given: tuple[Any, ...]) -> tuple[Any, Any]:
        (x, others), (number, index, slices) = carry, given
        own, rest = jax.tree.map(lambda leaf: leaf[index], (params, others))
        after, (second, changed) = pure(x, number, own, rest, slices)
        others = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), others, changed)
        return (after, others), (second, x if collect else None)

    numbers = jnp.arange(len(order), dtype=jnp.uint32)
    slices = {name: values[: len(order)] for name, values in per_layer.items()}
    (x, others), results = jax.lax.scan(block, (x, others), (numbers, jnp.asarray(order), slices))
    nnx.update(layer, others)
    seconds, inputs = (
        tuple(jax.tree.map(operator.itemgetter(i), part) for i in range(len(order)))
        for part in results
    )
    return x, seconds, inputs if collect else None
