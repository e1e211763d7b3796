"""Inference in int8 or FP8, and stored kernels in int8 or NF4, through qwix, an optional package:
``pip install "hfseq[qwix]"``.

In a recipe the Linears that FP8 training targets quantise both operands as they multiply:
activations with one scale a token, kernels with one a column, found in the tensors themselves.
Nothing is stored: checkpoints, parameters and their memory stay as they are. Rounding has no
gradient, so these recipes refuse to train.

Stored kernels (:func:`quantize_kernel`) are the base of adapters, which nothing trains (QLoRA:
Dettmers et al., 2023): whole kernels again for each product, in its own type.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from hfseq.errors import UsageError
from hfseq.nn import sharding
from hfseq.nn.fp8 import SITES
from hfseq.nn.precision import Dimensions, Precision


def qwix_int8() -> Precision:
    """Return the recipe ``qwix_int8``: products of int8 with sums in int32."""
    return _recipe("qwix_int8", jnp.int8)


def qwix_fp8() -> Precision:
    """Return the recipe ``qwix_fp8``: products of e4m3 with sums in float32."""
    return _recipe("qwix_fp8", jnp.float8_e4m3fn)


def _recipe(name: str, quantised: DTypeLike) -> Precision:
    _require(f"precision '{name}'")
    operation = functools.partial(quantized_product, name, quantised)
    return Precision(name, jnp.bfloat16, lambda: operation, SITES)


def _require(what: str) -> None:
    if importlib.util.find_spec("qwix") is None:
        raise UsageError(
            f"{what} needs the package qwix, which is not installed: "
            'pip install "hfseq[qwix]" (or pip install qwix)'
        )


def quantize_kernel(kernel: jax.Array, kind: str, input_axis: int) -> Any:
    """Return a kernel (in, out), or a stack of them, as a ``qwix.QArray``.

    **Arguments:** ``kind`` is "int8", with one scale for each feature that goes out, or "nf4" (the
    quantiles of a normal distribution), with one for each 64 numbers along ``input_axis``, 0 or 1.
    The result lies as ``kernel`` does; of its shape alone (``ShapeDtypeStruct``) shapes are
    returned. UsageError where qwix is not installed.
    """
    _require(f"a base in {kind}")
    shapes = jax.eval_shape(lambda k: _quantized(k, kind, input_axis), kernel)
    where, places = getattr(kernel, "sharding", None), None
    if isinstance(where, NamedSharding):
        try:
            where.shard_shape(shapes.scale.shape)
            places = where, where
        except ValueError:  # fewer scales than devices
            places = where, NamedSharding(where.mesh, PartitionSpec())
    if not isinstance(kernel, jax.ShapeDtypeStruct):
        return _quantize(kernel, kind, input_axis, places)
    parts = zip((shapes.qvalue, shapes.scale), places or (None, None), strict=True)
    values = (jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place) for s, place in parts)
    return dataclasses.replace(shapes, **dict(zip(("qvalue", "scale"), values, strict=True)))


def _quantized(kernel: jax.Array, kind: str, input_axis: int) -> Any:
    import qwix

    axis = input_axis + kernel.ndim - 2
    others = [other for other in range(kernel.ndim) if other != axis]
    tiles = {axis: math.gcd(kernel.shape[axis], 64)} if kind == "nf4" else {}
    return qwix.quantize(
        kernel.astype(jnp.float32), kind, channelwise_axes=others, tiled_axes=tiles
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(
    kernel: jax.Array,
    kind: str,
    input_axis: int,
    places: tuple[NamedSharding, NamedSharding] | None,
) -> Any:
    made = _quantized(kernel, kind, input_axis)
    if places is None:
        return made
    value, scale = jax.lax.with_sharding_constraint((made.qvalue, made.scale), places)
    return dataclasses.replace(made, qvalue=value, scale=scale)


def is_quantized(kernel: Any) -> TypeGuard[Any]:
    """Tell whether a parameter is what :func:`quantize_kernel` makes."""
    return hasattr(kernel, "qvalue")


def dequantize(kernel: Any, dtype: DTypeLike) -> jax.Array:
    """Return a stored kernel as an array of ``dtype``."""
    import qwix

    return qwix.dequantize(kernel).astype(dtype)


@functools.partial(jax.checkpoint, static_argnums=(2, 3))
def quantized_kernel_product(
    x: jax.Array, kernel: Any, axes: sharding.Axes | None, dimensions: Dimensions
) -> jax.Array:
    """Multiply (..., k) by a stored kernel that ``axes`` split; for the gradient of ``x`` it is
    gathered and made whole again.

    So between the forward and the backward pass its own part of it is all that a device holds.
    """
    kernel = dataclasses.replace(kernel, qvalue=sharding.gather_weight(kernel.qvalue, axes))
    return jax.lax.dot_general(x, dequantize(kernel, x.dtype), dimensions)


def quantized_product(
    name: str,
    quantised: DTypeLike,
    lhs: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    **ignored: Any,
) -> jax.Array:
    """Multiply (..., k) by a kernel over one of its axes with both quantised to ``quantised``.

    Returns the type of ``lhs``. ``name`` is the recipe's, for the UsageError that a gradient gets.
    """
    return _product(name, jnp.dtype(quantised), dimensions[0][1][0], lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    name: str, quantised: jnp.dtype, contracted: int, x: jax.Array, w: jax.Array
) -> jax.Array:
    import qwix

    last = x.ndim - 1
    tokens, columns = range(last), [axis for axis in range(w.ndim) if axis != contracted]
    # Scales in float32, whatever the type of computation: a rounded scale biases all it scales.
    x_, w_ = x.astype(jnp.float32), w.astype(jnp.float32)
    y = qwix.dot_general(
        qwix.quantize(x_, quantised, channelwise_axes=tokens),
        qwix.quantize(w_, quantised, channelwise_axes=columns),
        (((last,), (contracted,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return y.astype(x.dtype)


def _refuse(name: str, *ignored: Any) -> NoReturn:
    raise UsageError(
        f"precision '{name}' is for inference: its rounding has no gradient. Train with "
        "fp8_delayed, fp8_current or bfloat16; the weights are the same"
    )


_product.defvjp(_refuse, _refuse)
