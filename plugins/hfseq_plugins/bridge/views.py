"""Computes the new values of a tensor after a write to one of its views."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq_plugins.bridge.gradients import with_gradient_of

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: A function that computes the new values of a tensor. Its arguments are the old values of the
#: tensor and the new values of a view of it.
Put = Callable[[jax.Array, jax.Array], jax.Array]


def put_of(
    func: OpOverload,
    args: tuple[Any, ...],
    number: int | None,
    apply: Callable[[jax.Array], jax.Array],
) -> Put:
    """Returns the function that updates a tensor after a write to one of its views.

    Args:
        func: The operator that created the view, a `torch._ops.OpOverload`.
        args: The arguments of the operator. The first one is the viewed tensor.
        number: Index of the view in the results of the operator, if it returns several views.
        apply: Function that computes the view from the tensor.
    """
    name = str(func).split(".")[1]
    if name == "detach":  # PyTorch does not record writes to `x.detach()` and `x.data`
        return with_gradient_of
    if name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias"):
        if str(func) != "aten.view.dtype":
            return _reshape
    if name in ("transpose", "t", "permute", "numpy_T"):
        return _transpose(name, args)
    if name == "select":
        return _put_at(args[1], args[2])
    if name == "slice":
        defaults: list[Any] = [0, None, None, 1]
        dim, start, end, step = [*args[1:], *defaults[len(args) - 1 :]]
        end = None if end is None or end > 2**60 else end
        return _put_at(dim, slice(start, end, step))
    if name == "unbind":
        return _put_at(args[1] if len(args) > 1 else 0, number)
    if name == "view_as_complex":
        return lambda parent, view: jnp.stack([view.real, view.imag], -1)
    if name == "view_as_real":
        return lambda parent, view: jax.lax.complex(view[..., 0], view[..., 1])
    return _by_index(apply)


def _reshape(parent: jax.Array, view: jax.Array) -> jax.Array:
    return view.reshape(parent.shape)


def _transpose(name: str, args: tuple[Any, ...]) -> Put:
    if name == "transpose":
        return lambda parent, view: jnp.swapaxes(view, args[1], args[2])
    if name == "permute":
        order = [int(axis) % len(args[1]) for axis in args[1]]
        return lambda parent, view: jnp.transpose(view, np.argsort(order).tolist())
    return lambda parent, view: view.T


def _put_at(dim: int, index: Any) -> Put:
    def put(parent: jax.Array, view: jax.Array) -> jax.Array:
        place: list[Any] = [slice(None)] * parent.ndim
        place[dim] = index
        return parent.at[tuple(place)].set(view)

    return put


def _by_index(apply: Callable[[jax.Array], jax.Array]) -> Put:
    """Returns a function that writes each element of the view to its position in the tensor.

    The function finds these positions by taking the same view of an array of indices.
    """

    def put(parent: jax.Array, view: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            places = jnp.arange(math.prod(parent.shape), dtype=jnp.int32).reshape(parent.shape)
            index = np.asarray(apply(places)).reshape(-1)
        return parent.reshape(-1).at[index].set(view.reshape(-1)).reshape(parent.shape)

    return put
