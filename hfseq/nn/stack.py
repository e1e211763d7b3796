"""Sequences of layers, run in a Python loop or stacked and scanned.

A model file writes `self.layer = nn.Layers([...])` and `nn.run_layers(self.layer, x, ...)`. The
options `scan_layers` and `gradient_checkpointing`, which are set outside of the model, decide
whether the layers are scanned or rematerialized.

A scan compiles one layer and runs it with the variables of many layers. These layers must be
interchangeable: they have the same classes, the same shapes and dtypes of variables, and equal
static attributes. `_describe` lists these properties by path, `_difference` compares two layers,
and `Layers.runs` divides the sequence into runs, in each of which a pattern of layers repeats.
`stack_layers` then stacks the variables of all layers at the same position of the pattern.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq.errors import UsageError
from hfseq.nn import sharding, trees
from hfseq.nn.context import ConstructorSignature, current_options
from hfseq.nn.random import Keys, provide_adapter_keys

#: Keyword arguments of one layer, or of all layers with a leading layer axis.
LayerArguments = Mapping[str, jax.Array]
# Calls a layer with its input, its number and its slice of the per-layer arguments. Returns hidden
# states and a second result.
LayerCall = Callable[
    [nnx.Module, jax.Array, int | jax.Array, LayerArguments], tuple[jax.Array, Any]
]
# The last hidden states, the second result of each layer, and the input of each layer, or `None` if
# inputs are not collected.
LayerResults = tuple[jax.Array, tuple[Any, ...], tuple[jax.Array, ...] | None]


class LayerRun(NamedTuple):
    """Layers that are scanned together.

    Attributes:
        first: Number of the first layer.
        period: Number of layers in the pattern.
        repeats: Number of times that the pattern occurs.
    """

    first: int
    period: int
    repeats: int

    @property
    def end(self) -> int:
        """Number of the first layer after the run."""
        return self.first + self.period * self.repeats

    def numbers(self, position: int) -> range:
        """Returns the numbers of the layers at `position` of the pattern."""
        return range(self.first + position, self.end + position, self.period)


class Layers(nnx.List):
    """A list of layers. Their indices are the layer numbers in checkpoints.

    Layers may differ in their classes, variables or attributes. With `scan_layers`, each run of
    interchangeable layers is scanned, and so is each repeated pattern, such as five layers with
    sliding window attention followed by one with full attention.

    Args:
        layers: The layers.
        shared: Regular expressions that match paths of parameters relative to a layer. Use them for
            parameters that only the first layers own and that the model reads outside of the
            layers, such as the relative position embeddings of T5. Layers with and without such a
            parameter are still interchangeable. The stacked parameter has an entry only for the
            layers that own it.
    """

    __signature__ = ConstructorSignature()

    def __init__(self, layers: Iterable[nnx.Module] = (), /, *, shared: Sequence[str] = ()):
        super().__init__(layers)
        self.shared = tuple(shared)

    def runs(self, path: str) -> list[LayerRun]:
        """Divides the layers into runs, so that as few layers as possible are compiled.

        Args:
            path: The path of this list in the model, for the error message.

        Raises:
            UsageError: No two layers can be scanned together.
        """
        descriptions = [_describe(layer, self.shared) for layer in self]
        count = len(descriptions)
        cost, runs = _cheapest_runs(_layer_kinds(descriptions))
        if cost == count > 1:
            raise UsageError(
                f"scan_layers: no two layers of {path} can be scanned together. Layer 1 differs "
                f"from layer 0 in {_difference(descriptions[0], descriptions[1])}. Disable "
                "scan_layers, or use enough layers for the pattern of layers to repeat"
            )
        return runs


class LayerStacks(nnx.List):
    """The result of `stack_layers` for layers that differ.

    It contains one stacked layer for each position of the pattern of each run.
    """

    def __init__(self, layers: Iterable[nnx.Module], runs: Sequence[LayerRun]):
        super().__init__(layers)
        self.runs = tuple(runs)


def stack_layers(module: nnx.Module) -> None:
    """Replaces every `Layers` in `module` by stacked layers, in place.

    If all layers of a sequence are interchangeable, they become one layer whose variables have a
    leading layer axis. Other sequences become `LayerStacks`.

    Raises:
        UsageError: No two layers of a sequence can be scanned together.
    """
    sequences = [
        (parent, name, child, "/".join(map(str, (*path, name))))
        for path, parent in nnx.iter_graph(module)
        if isinstance(parent, nnx.Module)
        for name, child in list(vars(parent).items())
        if isinstance(child, Layers)
    ]
    for parent, name, layers, path in sequences:
        runs = layers.runs(path)
        stacks = [
            _stack([layers[number] for number in run.numbers(position)], path)
            for run in runs
            for position in range(run.period)
        ]
        stacked = stacks[0] if len(stacks) == 1 else LayerStacks(stacks, runs)
        setattr(parent, name, nnx.data(stacked))


def stacked_paths(module: nnx.Module) -> dict[trees.Path, tuple[trees.Path, ...]]:
    """Maps the path of each stacked layer to the paths of its layers in the unstacked model."""
    nodes = {tuple(map(str, path)): node for path, node in nnx.iter_graph(module)}
    stacked = {
        path: tuple((*path, str(number)) for number in range(node.num_stacked))
        for path, node in nodes.items()
        if getattr(node, "num_stacked", None)
    }
    for path, node in nodes.items():
        if isinstance(node, LayerStacks):
            ranges = (run.numbers(position) for run in node.runs for position in range(run.period))
            for index, numbers in enumerate(ranges):
                paths = tuple((*path, str(number)) for number in numbers)
                stacked[(*path, str(index))] = paths
    return stacked


def _stack(layers: Sequence[nnx.Module], path: str) -> nnx.Module:
    """Returns a copy of the first layer whose variables are the stacked variables of all layers."""
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    flat = [dict(nnx.to_flat_state(state)) for state in states]
    stacked = {}
    for name in dict.fromkeys(itertools.chain(*flat)):
        values = [state[name] for state in flat if name in state]
        if not all(name in state for state in flat[: len(values)]):
            raise UsageError(
                f"scan_layers: {path}: a later layer has the parameter {'/'.join(map(str, name))}, "
                "but an earlier layer does not. Create shared parameters in the first layers"
            )
        stacked[name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
    layer = nnx.merge(graphs[0], nnx.from_flat_state(stacked.items()))
    layer.num_stacked = len(layers)
    return layer


# -- which layers are interchangeable
# ---------------------------------------------------------------------------------------


def _layer_kinds(descriptions: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns, for each layer, the number of the first layer that is interchangeable with it."""
    kinds: list[int] = []
    for number, description in enumerate(descriptions):
        matches = (
            earlier
            for earlier in range(number)
            if kinds[earlier] == earlier and _difference(descriptions[earlier], description) is None
        )
        kinds.append(next(matches, number))
    return kinds


def _cheapest_runs(kinds: Sequence[int]) -> tuple[int, list[LayerRun]]:
    """Divides a sequence of layers into runs at the lowest cost, by dynamic programming.

    The cost of a run is its period, the number of layers that are compiled for it. `best[first]` is
    the best solution for the layers from number `first` to the end. It is computed for decreasing
    `first`, as the minimum over all runs that can begin at `first`, each combined with the best
    solution for the layers after the run. If costs are equal, fewer runs are preferred, and then a
    longer first run.

    Args:
        kinds: For each layer, a number that interchangeable layers share.

    Returns:
        The number of compiled layers, and the runs.
    """
    count = len(kinds)
    best: list[tuple[int, list[LayerRun]]] = [(0, [])] * (count + 1)
    for first in reversed(range(count)):
        solutions: list[tuple[int, list[LayerRun]]] = []
        for run in _runs_from(kinds, first):
            cost, later_runs = best[run.end]
            solutions.append((run.period + cost, [run, *later_runs]))
        best[first] = min(
            solutions,
            key=lambda solution: (solution[0], len(solution[1]), -solution[1][0].end),
        )
    return best[0]


def _runs_from(kinds: Sequence[int], first: int) -> Iterator[LayerRun]:
    """Yields each run that can begin at layer `first`.

    A run consists of consecutive interchangeable layers, or of a pattern that repeats at least
    once.
    """
    remaining = len(kinds) - first
    for period in range(1, remaining + 1):
        pattern = kinds[first : first + period]
        for repeats in range(1, remaining // period + 1):
            run = LayerRun(first, period, repeats)
            if kinds[run.end - period : run.end] != pattern:
                break
            if repeats > 1 or period == 1:
                yield run


def _describe(layer: nnx.Module, shared: Sequence[str]) -> dict[str, Any]:
    """Returns the properties that must be equal in interchangeable layers, by path.

    Paths are relative to the layer. The properties are the class of each module, the shape and
    dtype of each variable and array, and the value of each static attribute. Paths that match
    `shared` are left out.
    """
    description: dict[str, Any] = {}
    for path, node in nnx.iter_graph(layer):
        name = "/".join(map(str, path))
        if "_pytree__" in name or any(re.search(pattern, name) for pattern in shared):
            continue
        if isinstance(node, nnx.Variable):
            description[name] = type(node), node.shape, node.dtype
        elif isinstance(node, nnx.Module):
            description[name] = type(node)
        else:
            is_array = isinstance(node, jax.Array)
            description[name] = (node.shape, node.dtype) if is_array else node
    return description


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """Returns the first difference between the descriptions of two layers, or `None`."""
    for name in dict.fromkeys((*first, *second)):
        missing = object()
        first_value, second_value = first.get(name, missing), second.get(name, missing)
        if first_value is missing or second_value is missing:
            return f"{name}, which only one of them has"
        if not _equal(first_value, second_value):
            return f"{name or 'its class'}: {second_value!r}, not {first_value!r}"
    return None


def _equal(first: Any, second: Any) -> bool:
    """Compares static attributes of layers by content.

    The constructor of each layer creates its own closures, partial functions and helper objects.
    Python compares these by identity. Here they count as equal if they have the same code and equal
    values: functions are compared by their code, default arguments, captured variables, attributes
    and module. Objects that do not define `__eq__` are compared by their attributes. Containers are
    compared element by element, because their elements may be such functions or objects.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, functools.partial):
        return _equal(
            (first.func, first.args, first.keywords), (second.func, second.args, second.keywords)
        )
    if isinstance(first, FunctionType):
        return _equal_functions(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _equal(first[key], second[key]) for key in first
        )
    # `object` is the last class of the method resolution order.
    defines_eq = any("__eq__" in vars(cls) for cls in type(first).__mro__[:-1])
    if not defines_eq:
        return hasattr(first, "__dict__") and _equal(vars(first), vars(second))
    return bool(first == second)


def _equal_functions(first: FunctionType, second: FunctionType) -> bool:
    first_captured, second_captured = (
        [cell.cell_contents for cell in function.__closure__ or ()] for function in (first, second)
    )
    return (
        first.__code__ == second.__code__
        and _equal(first.__defaults__, second.__defaults__)
        and _equal(first.__kwdefaults__, second.__kwdefaults__)
        and _equal(vars(first), vars(second))
        and first.__globals__ is second.__globals__
        and _equal(first_captured, second_captured)
    )


# -- running layers
# ---------------------------------------------------------------------------------------


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
    """Runs layers one after the other, as a loop or as scans.

    A layer is called as `layer(hidden_states, *args, rngs=keys, **kwargs)`. It returns a pair: the
    new hidden states, and a second result of any kind, such as attention weights. The PRNG keys
    that a layer gets depend only on the number of the layer, so the loop and the scan draw the same
    dropout masks.

    Args:
        layers: `Layers`, or the result of `stack_layers`.
        hidden_states: The input of the first layer.
        *args: Further arguments of every layer.
        rngs: PRNG keys, or `None` in evaluation.
        collect: Whether to return the input of every layer, for `hidden_states` in Hugging Face
            outputs.
        per_layer: Keyword arguments with a leading layer axis. Each layer gets its slice.
        order: Numbers of the layers in the order in which they run, for models that run a layer
            more than once (ALBERT). Default: each layer once.
        **kwargs: Keyword arguments of every layer.

    Returns:
        The last hidden states, a tuple with the second result of each layer, and a tuple with the
        input of each layer or `None`.
    """
    # Derive child keys, so that this call of `run_layers` shares no PRNG key with other calls or
    # with dropout outside of the layers.
    keys = None if rngs is None else rngs.child()
    x = sharding.constrain_hidden_states(hidden_states)

    def call(
        layer: nnx.Module, x: jax.Array, number: int | jax.Array, arguments: LayerArguments
    ) -> tuple[jax.Array, Any]:
        layer_keys = None if keys is None else keys.fold_in(number)
        with provide_adapter_keys(layer_keys):
            out, second = layer(x, *args, rngs=layer_keys, **kwargs, **arguments)
        return sharding.constrain_hidden_states(out), second

    arguments = per_layer or {}
    if isinstance(layers, LayerStacks):
        return _scan_runs(layers, x, call, arguments, collect)
    if isinstance(layers, nnx.List):
        sequence = layers if order is None else [layers[index] for index in order]
        return _loop(sequence, x, call, arguments, collect)
    if order is not None:
        return _scan_in_order(layers, order, x, call, arguments, collect)
    run = LayerRun(0, 1, layers.num_stacked)  # type: ignore[attr-defined]
    return _scan([layers], run, x, call, arguments, collect)


def _loop(
    layers: Iterable[nnx.Module],
    x: jax.Array,
    call: LayerCall,
    per_layer: LayerArguments,
    collect: bool,
) -> LayerResults:
    """Runs layers in a Python loop. `Options.remat` decides whether each is rematerialized."""
    seconds: tuple[Any, ...] = ()
    inputs: tuple[jax.Array, ...] = ()
    for number, layer in enumerate(layers):
        inputs += (x,)
        arguments = {name: values[number] for name, values in per_layer.items()}
        if current_options().remat:
            graph, params, state = trees.split(layer)
            function = _as_function(graph, call)
            x, (second, new_state) = function(x, jnp.uint32(number), params, state, arguments)
            nnx.update(layer, new_state)
        else:
            x, second = call(layer, x, number, arguments)
        seconds += (second,)
    return x, seconds, inputs if collect else None


def _as_function(graph: nnx.GraphDef, call: LayerCall) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns a pure function for a layer with the structure `graph`.

    The arguments of the function are the hidden states, the number of the layer, its parameters,
    its other variables, and its slice of the per-layer arguments. The function returns the new
    hidden states, and a pair of the second result and the updated other variables. With
    `Options.remat` it is wrapped in `jax.checkpoint`.
    """

    def function(
        x: jax.Array,
        number: jax.Array,
        params: nnx.State,
        state: nnx.State,
        arguments: LayerArguments,
    ) -> tuple[jax.Array, Any]:
        layer = nnx.merge(graph, params, state, copy=True)
        out, second = call(layer, x, number, arguments)
        return out, (second, trees.split(layer)[2])

    options = current_options()
    return jax.checkpoint(function, policy=options.remat_policy) if options.remat else function


def _scan_runs(
    stacks: LayerStacks, x: jax.Array, call: LayerCall, per_layer: LayerArguments, collect: bool
) -> LayerResults:
    """Runs `LayerStacks` with one scan per `LayerRun`."""
    seconds: tuple[Any, ...] = ()
    inputs: tuple[jax.Array, ...] = ()
    remaining = iter(stacks)
    for run in stacks.runs:
        positions = list(itertools.islice(remaining, run.period))
        x, run_seconds, run_inputs = _scan(positions, run, x, call, per_layer, collect)
        seconds, inputs = seconds + run_seconds, inputs + (run_inputs or ())
    return x, seconds, inputs if collect else None


def _scan(
    layers: Sequence[nnx.Module],
    run: LayerRun,
    x: jax.Array,
    call: LayerCall,
    per_layer: LayerArguments,
    collect: bool,
) -> LayerResults:
    """Computes a `LayerRun` with one scan.

    `layers` contains one stacked layer for each position of the pattern.
    """
    splits = [trees.split(layer) for layer in layers]
    functions = [_as_function(graph, call) for graph, _, _ in splits]

    def run_pattern(x: jax.Array, positions: list[tuple[Any, ...]]) -> tuple[jax.Array, list[Any]]:
        results = []
        for function, arguments in zip(functions, positions, strict=True):
            out, (second, new_state) = function(x, *arguments)
            results.append((second, new_state, x if collect else None))
            x = out
        return x, results

    def fill_shared(leaf: jax.Array) -> jax.Array:
        # A parameter that only the first layers own is not read within the layers, so the value
        # that the other layers get does not matter.
        if leaf.shape[0] == run.repeats:
            return leaf
        return jnp.broadcast_to(leaf[0], (run.repeats, *leaf.shape[1:]))

    xs = []
    for position, (_, params, state) in enumerate(splits):
        numbers = run.numbers(position)
        selection = slice(numbers.start, numbers.stop, numbers.step)
        arguments = {name: values[selection] for name, values in per_layer.items()}
        layer_numbers = jnp.arange(numbers.start, numbers.stop, numbers.step, dtype=jnp.uint32)
        xs.append((layer_numbers, jax.tree.map(fill_shared, params), state, arguments))
    x, results = jax.lax.scan(run_pattern, x, xs)
    for layer, (_, new_state, _) in zip(layers, results, strict=True):
        nnx.update(layer, new_state)
    inputs, seconds = [], []
    for i in range(run.repeats):
        for second, _, layer_input in results:
            seconds.append(jax.tree.map(operator.itemgetter(i), second))
            inputs.append(jax.tree.map(operator.itemgetter(i), layer_input))
    return x, tuple(seconds), tuple(inputs) if collect else None


def _scan_in_order(
    layer: nnx.Module,
    order: Sequence[int],
    x: jax.Array,
    call: LayerCall,
    per_layer: LayerArguments,
    collect: bool,
) -> LayerResults:
    """Scans stacked layers in the given order, by indexing into the stacked variables."""
    graph, params, state = trees.split(layer)
    function = _as_function(graph, call)

    def run_layer(carry: tuple[jax.Array, Any], step: tuple[Any, ...]) -> tuple[Any, Any]:
        (x, state), (number, index, arguments) = carry, step
        layer_params, layer_state = jax.tree.map(lambda leaf: leaf[index], (params, state))
        out, (second, new_state) = function(x, number, layer_params, layer_state, arguments)
        state = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), state, new_state)
        return (out, state), (second, x if collect else None)

    numbers = jnp.arange(len(order), dtype=jnp.uint32)
    arguments = {name: values[: len(order)] for name, values in per_layer.items()}
    (x, state), results = jax.lax.scan(
        run_layer, (x, state), (numbers, jnp.asarray(order), arguments)
    )
    nnx.update(layer, state)
    seconds, inputs = (
        tuple(jax.tree.map(operator.itemgetter(i), part) for i in range(len(order)))
        for part in results
    )
    return x, seconds, inputs if collect else None
