"""Parameter trees: nested dicts with string keys outside, NNX states inside. Converted only here.

``nnx.List`` paths are integers and the public tree's keys are strings (the v4 tree), so the border
between them is this module and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Path = tuple[str, ...]
#: A nested dict with string keys: parameters, a cache, or collections by name.
Params = Mapping[str, Any]


def flatten(tree: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    """Flatten a nested dict to ``{path: leaf}``."""
    return dict(_walk(tree, prefix))


def _walk(tree: Mapping[str, Any], prefix: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*prefix, str(key)))
        else:
            yield (*prefix, str(key)), value


def unflatten(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Nest ``{path: leaf}`` into dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def thaw(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a (frozen) nested mapping into plain dicts with string keys."""
    return {
        str(key): thaw(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }


def join(path: Path) -> str:
    """Write a path as rules and messages do: ``a/b/c``."""
    return "/".join(path)


def split(module: nnx.Module, *kinds: type[nnx.Variable]) -> tuple[Any, ...]:
    """Split a module into its graph, its parameters, states of ``kinds``, and the rest."""
    return tuple(nnx.split(module, nnx.Param, *kinds, ...))


def to_dict(state: nnx.State) -> dict[str, Any]:
    """Return the plain nested dict of an NNX state."""
    return thaw(nnx.to_pure_dict(state))


def to_state(
    tree: Mapping[str, Any], like: Mapping[str, Any], kind: type[nnx.Variable]
) -> nnx.State:
    """Wrap the leaves of ``tree`` that ``like`` has as variables of ``kind``, with NNX's keys."""
    given = flatten(tree)
    missing = [path for path in flatten(like) if path not in given]
    if missing:
        names = ", ".join(sorted(map(join, missing)))
        raise ValueError(f"Some parameters are missing: {names}")

    def keys(path: Path) -> tuple[int | str, ...]:
        return tuple(int(name) if name.isdigit() else name for name in path)

    flat = [(keys(path), kind(given[path])) for path in flatten(like)]
    return nnx.from_flat_state(flat)


def collections(state: nnx.State) -> dict[str, tuple[type[nnx.Variable], dict[str, Any]]]:
    """Group the variables of ``state`` by collection name: ``{name: (type, nested shapes)}``."""
    grouped: dict[str, tuple[type[nnx.Variable], dict[Path, Any]]] = {}
    for path, variable in nnx.to_flat_state(state):
        kind = type(variable)
        name = nnx.variablelib.variable_name_from_type(kind, allow_register=True)
        grouped.setdefault(name, (kind, {}))[1][tuple(map(str, path))] = variable.get_value()
    return {name: (kind, unflatten(flat)) for name, (kind, flat) in grouped.items()}


def by_collection(state: nnx.State) -> dict[str, Any]:
    """Return ``{collection: nested dict}`` of the variables that are not parameters."""
    return {name: tree for name, (_, tree) in collections(state).items()}


def attach_cache(module: nnx.Module, cache: Mapping[str, Any]) -> None:
    """Put the leaves of a cache dict on the attention modules at the same paths."""
    parts = {tuple(map(str, path)): part for path, part in nnx.iter_graph(module)}
    for path, leaf in flatten(cache).items():
        setattr(parts[path[:-1]], path[-1], nnx.Cache(leaf))


def cast_floating(
    params: Mapping[str, Any], dtype: DTypeLike, mask: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Cast floating leaves to ``dtype``, where ``mask`` (a tree of bools) allows it."""

    def cast(leaf: jax.Array, wanted: bool = True) -> jax.Array:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if wanted and floating else leaf

    return jax.tree.map(cast, params) if mask is None else jax.tree.map(cast, params, mask)
