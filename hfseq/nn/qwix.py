"""Quantization with the optional package qwix.

Install it with `pip install "hfseq[qwix]"`. This module has two independent features.

The first feature is a set of recipes for inference in int8 or FP8. They quantize both operands of
matrix multiplications, in the same Linears as the FP8 training recipes. Activations have one scale
per token, and kernels have one scale per output feature. Quantized values and scales are computed
in each forward pass and not stored, so checkpoints, parameters and the memory of the parameters do
not change. Rounding has no gradient, so these recipes do not support training.

The second feature is the quantization of kernels to int8 or NF4 (`quantize_kernel`). Quantized
kernels hold the weights of a frozen base model while adapters are trained (QLoRA; Dettmers et al.,
2023). A kernel is dequantized for each matrix multiplication, which is computed in the dtype of its
input.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from hfseq.errors import UsageError, optional_import
from hfseq.nn import sharding
from hfseq.nn.fp8 import SITES
from hfseq.nn.precision import Dimensions, Precision


def qwix_int8() -> Precision:
    """Returns the recipe `qwix_int8`: int8 multiplication with int32 accumulation."""
    return _recipe("qwix_int8", jnp.int8)


def qwix_fp8() -> Precision:
    """Returns the recipe `qwix_fp8`: e4m3 multiplication with float32 accumulation."""
    return _recipe("qwix_fp8", jnp.float8_e4m3fn)


def _recipe(name: str, quantized: DTypeLike) -> Precision:
    _require(f"precision '{name}'")
    operation = functools.partial(quantized_product, name, quantized)
    return Precision(name, jnp.bfloat16, lambda: operation, SITES)


def _require(feature: str) -> None:
    with optional_import(feature, "qwix", "hfseq[qwix]"):
        import qwix  # noqa: F401


def quantize_kernel(kernel: jax.Array, qtype: str, input_axis: int) -> Any:
    """Quantizes a kernel to a `qwix.QArray`.

    Args:
        kernel: The kernel, `(in_features, out_features)` or transposed, with a leading layer axis
            if layers are stacked. If this is a `jax.ShapeDtypeStruct`, the result contains only
            shapes too. The result has the sharding of the kernel.
        qtype: "int8" with one scale per output feature, or "nf4" (quantiles of a normal
            distribution) with one scale per 64 elements along `input_axis`.
        input_axis: The axis of the input features, 0 or 1, not counting a layer axis.

    Raises:
        UsageError: qwix is not installed.
    """
    _require(f"a base model in {qtype}")
    shapes = jax.eval_shape(lambda k: _quantized(k, qtype, input_axis), kernel)
    kernel_sharding, shardings = getattr(kernel, "sharding", None), None
    if isinstance(kernel_sharding, NamedSharding):
        try:
            kernel_sharding.shard_shape(shapes.scale.shape)
            shardings = kernel_sharding, kernel_sharding
        except ValueError:  # the array of scales cannot be split over the mesh, so replicate it
            shardings = kernel_sharding, NamedSharding(kernel_sharding.mesh, PartitionSpec())
    if not isinstance(kernel, jax.ShapeDtypeStruct):
        return _quantize(kernel, qtype, input_axis, shardings)
    parts = zip((shapes.qvalue, shapes.scale), shardings or (None, None), strict=True)
    values = (
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=part_sharding) for s, part_sharding in parts
    )
    return dataclasses.replace(shapes, **dict(zip(("qvalue", "scale"), values, strict=True)))


def _quantized(kernel: jax.Array, qtype: str, input_axis: int) -> Any:
    import qwix

    axis = input_axis + kernel.ndim - 2
    channel_axes = [index for index in range(kernel.ndim) if index != axis]
    tiles = {axis: math.gcd(kernel.shape[axis], 64)} if qtype == "nf4" else {}
    return qwix.quantize(
        kernel.astype(jnp.float32), qtype, channelwise_axes=channel_axes, tiled_axes=tiles
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(
    kernel: jax.Array,
    qtype: str,
    input_axis: int,
    shardings: tuple[NamedSharding, NamedSharding] | None,
) -> Any:
    quantized = _quantized(kernel, qtype, input_axis)
    if shardings is None:
        return quantized
    value, scale = jax.lax.with_sharding_constraint((quantized.qvalue, quantized.scale), shardings)
    return dataclasses.replace(quantized, qvalue=value, scale=scale)


def is_quantized(kernel: Any) -> TypeGuard[Any]:
    """Returns whether a parameter is a result of `quantize_kernel`."""
    return hasattr(kernel, "qvalue")


def dequantize(kernel: Any, dtype: DTypeLike) -> jax.Array:
    """Returns a quantized kernel as an array of `dtype`."""
    import qwix

    return qwix.dequantize(kernel).astype(dtype)


@functools.partial(jax.checkpoint, static_argnums=(2, 3))
def quantized_kernel_product(
    x: jax.Array, kernel: Any, axes: sharding.Axes | None, dimensions: Dimensions
) -> jax.Array:
    """Multiplies `x` by a quantized kernel.

    The backward pass gathers and dequantizes the kernel again. Between the forward and the backward
    pass a device therefore keeps only its own shard of the quantized kernel.

    Args:
        x: The input, `(..., in_features)`.
        kernel: The quantized kernel.
        axes: The mesh axes that split each dimension of the kernel.
        dimensions: The contracted dimensions, as in `jax.lax.dot_general`.
    """
    kernel = dataclasses.replace(kernel, qvalue=sharding.gather_weight(kernel.qvalue, axes))
    return jax.lax.dot_general(x, dequantize(kernel, x.dtype), dimensions)


def quantized_product(
    name: str,
    quantized: DTypeLike,
    lhs: jax.Array,
    rhs: jax.Array,
    dimensions: Dimensions,
    **ignored: Any,
) -> jax.Array:
    """Quantizes both operands and multiplies them.

    Args:
        name: Name of the recipe, for the error that is raised if a gradient is requested.
        quantized: The dtype to quantize to.
        lhs: The input, `(..., in_features)`.
        rhs: A kernel of any rank, with one axis of size `in_features`.
        dimensions: The contracted dimensions, as in `jax.lax.dot_general`.
        **ignored: Other arguments of `jax.lax.dot_general`, which have no effect.

    Returns:
        The matrix product in the dtype of `lhs`.
    """
    return _product(name, jnp.dtype(quantized), dimensions[0][1][0], lhs, rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    name: str, quantized: jnp.dtype, contracted: int, x: jax.Array, w: jax.Array
) -> jax.Array:
    import qwix

    last = x.ndim - 1
    tokens, columns = range(last), [axis for axis in range(w.ndim) if axis != contracted]
    # Scales are always float32, because rounding a scale would change all elements that share it
    # in the same direction.
    x_, w_ = x.astype(jnp.float32), w.astype(jnp.float32)
    y = qwix.dot_general(
        qwix.quantize(x_, quantized, channelwise_axes=tokens),
        qwix.quantize(w_, quantized, channelwise_axes=columns),
        (((last,), (contracted,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return y.astype(x.dtype)


def _refuse(name: str, *ignored: Any) -> NoReturn:
    raise UsageError(
        f"precision '{name}' is for inference only, because its rounding has no gradient. Train "
        "with fp8_delayed, fp8_current or bfloat16, which use the same weights"
    )


_product.defvjp(_refuse, _refuse)
