"""Conversion between public parameter trees and NNX states.

Users see parameters as nested dicts with string keys, as in Transformers 4. Models use NNX states,
whose paths contain integers for the elements of an `nnx.List`. All conversions between the two are
in this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Path = tuple[str, ...]
#: A path in NNX. Elements of an `nnx.List` have numbers as names.
NNXPath = tuple[Any, ...]
#: A nested dict with string keys, such as parameters, a cache, or `{collection: nested dict}`.
Params = Mapping[str, Any]


def flatten(tree: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    """Flattens a nested dict to `{path: leaf}`."""
    return dict(_walk(tree, prefix))


def _walk(tree: Mapping[str, Any], prefix: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*prefix, str(key)))
        else:
            yield (*prefix, str(key)), value


def unflatten(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Builds nested dicts from `{path: leaf}`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def thaw(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a (frozen) nested mapping to plain dicts with string keys."""
    return {
        str(key): thaw(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }


def join(path: Path) -> str:
    """Joins a path to a string such as `a/b/c`, for sharding rules and messages."""
    return "/".join(path)


def split(module: nnx.Module, *kinds: type[nnx.Variable]) -> tuple[Any, ...]:
    """Splits a module into its graph and several states.

    The states contain the parameters, the variables of each type in `kinds`, and all other
    variables.
    """
    return tuple(nnx.split(module, nnx.Param, *kinds, ...))


def to_dict(state: nnx.State) -> dict[str, Any]:
    """Returns an NNX state as a plain nested dict."""
    return thaw(nnx.to_pure_dict(state))


def nnx_paths(state: nnx.State) -> dict[Path, NNXPath]:
    """Returns the path in NNX of each variable of a state, by its path in trees."""
    return {tuple(map(str, path)): path for path, _ in nnx.to_flat_state(state)}


def to_state(
    tree: Mapping[str, Any], paths: Mapping[Path, NNXPath], variable_type: type[nnx.Variable]
) -> nnx.State:
    """Converts a tree to an NNX state.

    Args:
        tree: The values. Leaves whose paths are not in `paths` are ignored.
        paths: The paths in NNX, from `nnx_paths`. `nnx.merge` assigns variables to a module by
            their sorted order, in which the number 10 is after 2, but the string "10" before "2".
        variable_type: The type of the variables in the state.

    Raises:
        ValueError: `tree` lacks leaves of `paths`.
    """
    leaves = flatten(tree)
    missing = [path for path in paths if path not in leaves]
    if missing:
        names = ", ".join(sorted(map(join, missing)))
        raise ValueError(f"Some parameters are missing: {names}")

    return nnx.from_flat_state(
        [(nnx_path, variable_type(leaves[path])) for path, nnx_path in paths.items()]
    )


def collections(state: nnx.State) -> dict[str, tuple[type[nnx.Variable], dict[str, Any]]]:
    """Groups the variables of a state by collection: `{name: (type, nested dict of values)}`."""
    grouped: dict[str, tuple[type[nnx.Variable], dict[Path, Any]]] = {}
    for path, variable in nnx.to_flat_state(state):
        variable_type = type(variable)
        name = nnx.variablelib.variable_name_from_type(variable_type, allow_register=True)
        grouped.setdefault(name, (variable_type, {}))[1][tuple(map(str, path))] = (
            variable.get_value()
        )
    return {
        name: (variable_type, unflatten(flat)) for name, (variable_type, flat) in grouped.items()
    }


def by_collection(state: nnx.State) -> dict[str, Any]:
    """Returns the variables of a state as `{collection: nested dict}`."""
    return {name: tree for name, (_, tree) in collections(state).items()}


def attach_cache(module: nnx.Module, cache: Mapping[str, Any]) -> None:
    """Sets the leaves of a cache dict as variables of the attention modules at the same paths."""
    parts = {tuple(map(str, path)): part for path, part in nnx.iter_graph(module)}
    for path, leaf in flatten(cache).items():
        setattr(parts[path[:-1]], path[-1], nnx.Cache(leaf))


def cast_floating(
    params: Mapping[str, Any], dtype: DTypeLike, mask: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Casts floating-point leaves to `dtype`.

    With a `mask`, only those leaves are cast for which the mask is true.
    """

    def cast(leaf: jax.Array, selected: bool = True) -> jax.Array:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if selected and floating else leaf

    if mask is None:
        return jax.tree.map(cast, params)
    # One of them may be a FrozenDict.
    return jax.tree.map(cast, thaw(params), thaw(mask))
