"""Where activations lie on a mesh, and where a layer's weights lie while it computes.

The layers and :func:`hfseq.nn.run_layers` call these functions; no model file does. Rows lie over
``data`` and ``fsdp``, their length over ``sequence``; kernels are split over ``tensor`` as Megatron
does it (Shoeybi et al., 2019), and what ``fsdp`` keeps in parts is put together for the product and
its gradient taken apart again. With sequence parallelism (Korthikanti et al., 2022) the length
between the blocks is split over ``tensor`` too: put together before a product that is split by its
output, taken apart behind one that is split by its input. A size that an axis does not divide is
left to the compiler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = ("data", "fsdp")
SEQUENCE, TENSOR, FSDP = "sequence", "tensor", "fsdp"

#: The axes of the mesh that split each dimension of a weight; what a PartitionSpec says.
Axes = tuple[Any, ...]
_ANY = PartitionSpec.UNCONSTRAINED


def assign(module: nnx.Module, axes: Mapping[tuple[str, ...], Axes]) -> None:
    """Tell every layer how its weight is split; ``axes`` by the path of the weight, without the
    axis of stacked layers."""
    for path, layer in nnx.iter_graph(module):
        for name in ("kernel", "embedding"):
            found = axes.get((*map(str, path), name))
            if found is not None and hasattr(layer, "weight_axes"):
                layer.weight_axes = found


def splits_length(options: Any) -> bool:
    """Tell whether the length of a row is split over devices while a layer computes."""
    return options.mesh is not None and _ways(options.mesh, (SEQUENCE,)) > 1


def weight(x: jax.Array, axes: Axes | None, options: Any) -> jax.Array:
    """Put together what ``fsdp`` split; the gradient is summed where it is to lie."""
    mesh = options.mesh
    if mesh is None or axes is None or _ways(mesh, (FSDP,)) == 1:
        return x
    parts = (_names(entry) for entry in axes)
    whole = PartitionSpec(*(tuple(n for n in names if n != FSDP) or None for names in parts))
    stored = NamedSharding(mesh, PartitionSpec(*axes))
    # Between the two the gradient is whole: the compiler would split what it is summed from.
    used = NamedSharding(mesh, whole)
    return x if whole == stored.spec else _move(_move(x, None, stored), used, used)


def hidden_states(x: jax.Array, options: Any) -> jax.Array:
    """Lay out what goes from block to block: (rows, length, features), features whole."""
    between = (SEQUENCE, TENSOR) if options.sequence_parallel else (SEQUENCE,)
    return _place(x, options.mesh, between, None)


def product_input(x: jax.Array, axes: Axes | None, dimension: int, options: Any) -> jax.Array:
    """Lay out the input of a product whose weight has the features that go in at ``dimension``.

    One array stays one array, however many products read it.
    """
    if options.mesh is None or axes is None:
        return x
    into, out = (TENSOR in _names(_entry(axes, place)) for place in (dimension, 1 - dimension))
    if into:
        return _place(x, options.mesh, (SEQUENCE,), TENSOR)
    if not (out and options.sequence_parallel):
        return x
    known = options.gathered.get(id(x))
    if known is None:  # the array itself is kept, so that no other can have its id
        parts, whole = _length_places(x, options.mesh)
        known = options.gathered[id(x)] = (x, _move(x, whole, parts))
    return known[1]


def product_output(x: jax.Array, axes: Axes | None, dimension: int, options: Any) -> jax.Array:
    """Lay out the result of a product whose weight has its features at ``dimension``."""
    if options.mesh is None or axes is None:
        return x
    if TENSOR in _names(_entry(axes, dimension)):
        return _place(x, options.mesh, (SEQUENCE,), TENSOR)
    if TENSOR not in _names(_entry(axes, 1 - dimension)):
        return x
    if not options.sequence_parallel:
        return _place(x, options.mesh, (SEQUENCE,), None)
    parts, whole = _length_places(x, options.mesh)
    return _move(x, parts, whole)


def token_ids(x: jax.Array, axes: Axes | None, options: Any) -> jax.Array:
    """Lay out (rows, length) as what is looked up in a table that is split by its entries."""
    if options.mesh is None or TENSOR not in _names(_entry(axes or (), 0)) or x.ndim != 2:
        return x
    entries = (_fitting(options.mesh, *one) for one in zip(x.shape, (ROWS, SEQUENCE), strict=True))
    place = NamedSharding(options.mesh, PartitionSpec(*entries))
    return jax.lax.with_sharding_constraint(x, place)


def looked_up(x: jax.Array, axes: Axes | None, options: Any) -> jax.Array:
    """Lay out the rows of a table that is split by its entries: every device adds those it has."""
    split = axes is not None and TENSOR in _names(_entry(axes, 0))
    return _place(x, options.mesh, (SEQUENCE,), None) if split else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: jax.Array, to: NamedSharding | None, back: NamedSharding | None) -> jax.Array:
    """Lay out ``x`` by ``to`` and its gradient by ``back``: one gathers what the other scatters."""
    return x if to is None else jax.lax.with_sharding_constraint(x, to)


def _move_forward(x: jax.Array, to: Any, back: Any) -> tuple[jax.Array, None]:
    return _move(x, to, back), None


def _move_backward(to: Any, back: Any, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_move(g, back, to),)


_move.defvjp(_move_forward, _move_backward)


def _length_places(x: jax.Array, mesh: Mesh) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Return where hidden states lie between the blocks and inside, with sequence parallelism."""
    return _spec(x, mesh, (SEQUENCE, TENSOR), None), _spec(x, mesh, (SEQUENCE,), None)


def _place(x: jax.Array, mesh: Mesh | None, length: tuple[str, ...], features: Any) -> jax.Array:
    place = None if mesh is None else _spec(x, mesh, length, features)
    return x if place is None else jax.lax.with_sharding_constraint(x, place)


def _spec(x: jax.Array, mesh: Mesh, length: tuple[str, ...], features: Any) -> NamedSharding | None:
    """Return where (rows, features) or (rows, length, features) lie; None for other shapes."""
    if not 2 <= x.ndim <= 3 or mesh.size == 1:
        return None
    kinds = (ROWS, length, features) if x.ndim == 3 else (ROWS, features)
    entries = [_fitting(mesh, size, axes) for size, axes in zip(x.shape, kinds, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _fitting(mesh: Mesh, size: int, axes: Any) -> Any:
    """Return the axes that split a dimension; those of a size that is not divided stay open."""
    present = tuple(name for name in _names(axes) if name in mesh.shape)
    if not present:
        return None
    return present if size % _ways(mesh, present) == 0 else _ANY


def _entry(axes: Axes, dimension: int) -> Any:
    return axes[dimension] if dimension < len(axes) else None


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _ways(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(dict(mesh.shape).get(name, 1) for name in names)
