"""Inference in int8 or FP8 through qwix, an optional package: ``pip install "hfseq[qwix]"``.

The Linears that FP8 training targets quantise both operands as they multiply: activations with one
scale a token, kernels with one a column, found in the tensors themselves. Nothing is stored:
checkpoints, parameters and their memory stay as they are. Rounding has no gradient, so these
recipes refuse to train.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfseq.errors import UsageError
from hfseq.nn.fp8 import SITES
from hfseq.nn.precision import Dimensions, Precision


def qwix_int8() -> Precision:
    """Return the recipe ``qwix_int8``: products of int8 with sums in int32."""
    return _recipe("qwix_int8", jnp.int8)


def qwix_fp8() -> Precision:
    """Return the recipe ``qwix_fp8``: products of e4m3 with sums in float32."""
    return _recipe("qwix_fp8", jnp.float8_e4m3fn)


def _recipe(name: str, quantised: DTypeLike) -> Precision:
    if importlib.util.find_spec("qwix") is None:
        raise UsageError(
            f"precision '{name}' needs the package qwix, which is not installed: "
            'pip install "hfseq[qwix]" (or pip install qwix)'
        )
    operation = functools.partial(quantised_product, name, quantised)
    return Precision(name, jnp.bfloat16, lambda: operation, SITES)


def quantised_product(
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
