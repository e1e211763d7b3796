"""Matrix multiplication in FP8: two precision recipes and the state that one of them needs.

All uses of Flax's FP8 functions are in this module. The forward pass quantizes the input and the
kernel to e4m3. The backward pass quantizes the gradient of the result to e5m2 (the HYBRID format of
Transformer Engine). Each tensor has one float32 scale. The three matrix multiplications, for the
result and for the gradients of input and kernel, have FP8 operands and float32 accumulation.

* `fp8_current`: The scale is computed from the tensor itself. No state is needed.
* `fp8_delayed`: The scale is computed from the largest absolute values of earlier steps. Since the
  scale is known before the tensor is computed, the tensor is quantized while it is written to
  memory. Scales and histories are variables of the collection `fp8_params`.

The state has no gradient. Instead, the backward pass returns the next state where the gradient of
the state is expected. The training step replaces the old state by the next one (`overwrite`). The
optimizer does not update the state.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

from hfseq.errors import UsageError
from hfseq.nn.context import capability, current_options, target_device
from hfseq.nn.precision import Dimensions, Precision

logger = logging.getLogger(__name__)

COLLECTION = "fp8_params"
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
OPERANDS = {"input": FORWARD, "kernel": FORWARD, "output_grad": BACKWARD}
SCALE, HISTORY = "_scale", "_amax_history"
# Matches every Linear inside a numbered layer: attention projections and feed-forward layers, but
# not embeddings and output heads.
SITES = (r"(^|/)\d+/",)
HISTORY_LENGTH = 1024
MIN_EFFICIENT_WIDTH = 1024
# A tensor whose largest value is below this counts as zero, because its scale, or the inverse of
# its scale, would exceed the range of float32.
MIN_AMAX = 2.0**-100
# e4m3 covers 18 powers of two. With more headroom than this, all values would become zero.
MAX_MARGIN = 16

State = dict[str, jax.Array]
Tree = TypeVar("Tree")
_calibrating: contextvars.ContextVar[bool] = contextvars.ContextVar("calibrating", default=False)


class Fp8Param(nnx.Variable):
    """A scale or a history of largest absolute values.

    The backward pass returns its next value in place of a gradient.
    """

    overwritten: ClassVar[bool] = True
    sidecar: ClassVar[str] = "fp8_params.safetensors"


nnx.register_variable_name(COLLECTION, Fp8Param)


class ProductSpec(NamedTuple):
    """Static properties of an FP8 matrix multiplication.

    Attributes:
        contracted: The kernel's axis of input features.
        margin: The scale leaves room for values up to `2**margin` times the largest value in the
            history.
        current: Whether scales are computed from the tensors themselves instead of the history.
        fallback: Whether the scale is computed from the tensor itself if the history contains only
            zeros. This is False in training, because the maximum of the tensor would have to be
            computed before the tensor can be quantized.
    """

    contracted: int
    margin: int
    current: bool
    fallback: bool


class Fp8Product(nnx.Module):
    """The matrix multiplication of one Linear, or of several fused ones, with delayed scaling.

    The instance stores the scales of this multiplication, so no other multiplication may use it.

    Args:
        history_length: Number of earlier steps whose largest absolute value determines a scale.
        margin: The scale leaves room for values up to `2**margin` times this largest value.
    """

    def __init__(self, history_length: int = HISTORY_LENGTH, margin: int = 0):
        self.margin = margin
        for name in OPERANDS:
            setattr(self, name + SCALE, Fp8Param(jnp.ones(1)))
            setattr(self, name + HISTORY, Fp8Param(jnp.zeros(history_length)))

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Dimensions, **ignored: Any
    ) -> jax.Array:
        """Multiplies like `jax.lax.dot_general`.

        Args:
            lhs: The input, `(..., in_features)`.
            rhs: A kernel of any rank, with one axis of size `in_features`.
            dimension_numbers: The contracted dimensions.
            **ignored: Other arguments of `jax.lax.dot_general`, which have no effect.
        """
        state = {
            name + part: getattr(self, name + part)[...]
            for name in OPERANDS
            for part in (SCALE, HISTORY)
        }
        axis = dimension_numbers[0][1][0]
        training = current_options().train
        return _product(
            ProductSpec(axis, self.margin, _calibrating.get(), not training), lhs, rhs, state
        )


def current_product(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Dimensions, **ignored: Any
) -> jax.Array:
    """Multiplies in FP8 with scales that are computed from the tensors themselves.

    The arguments have the same meaning as in `Fp8Product.__call__`.
    """
    return _product(ProductSpec(dimension_numbers[0][1][0], 0, True, False), lhs, rhs, {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: ProductSpec, x: jax.Array, w: jax.Array, state: State) -> jax.Array:
    return _forward(spec, x, w, state)[0]


def _forward(
    spec: ProductSpec, x: jax.Array, w: jax.Array, state: State
) -> tuple[jax.Array, tuple]:
    qx, x_scale, next_x = _quantize(spec, "input", x, state)
    qw, w_scale, next_w = _quantize(spec, "kernel", w, state)
    y = _dot(qx, qw, ((x.ndim - 1,), (spec.contracted,)))
    gradient_state = {name: leaf for name, leaf in state.items() if name.startswith("output_grad")}
    like = tuple(jnp.zeros((0,), array.dtype) for array in (x, w))
    y = (y * (x_scale * w_scale)).astype(x.dtype)
    return y, (qx, x_scale, qw, w_scale, next_x | next_w, gradient_state, like)


def _backward(
    spec: ProductSpec, saved: tuple[Any, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    qx, x_scale, qw, w_scale, advanced, state, (x_like, w_like) = saved
    qg, g_scale, next_g = _quantize(spec, "output_grad", g, state)
    rows = tuple(range(qx.ndim - 1))
    features = tuple(range(qx.ndim - 1, g.ndim))
    columns = tuple(axis for axis in range(qw.ndim) if axis != spec.contracted)
    # HIGHEST disables reduced-precision accumulation on GPUs, which is too inexact for gradients.
    dx = _dot(qg, qw, (features, columns), lax.Precision.HIGHEST)
    dw = _dot(qx, qg, (rows, rows), lax.Precision.HIGHEST)
    dx = (dx * (g_scale * w_scale)).astype(x_like.dtype)
    dw = jnp.moveaxis((dw * (x_scale * g_scale)).astype(w_like.dtype), 0, spec.contracted)
    return dx, dw, advanced | next_g


_product.defvjp(_forward, _backward)


def _dot(
    a: jax.Array,
    b: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    precision: lax.Precision | None = None,
) -> jax.Array:
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _quantize(
    spec: ProductSpec, name: str, x: jax.Array, state: State
) -> tuple[jax.Array, jax.Array, State]:
    """Returns `x` in FP8, its scale, and the next state of this tensor."""
    fp8_dtype = OPERANDS[name]
    limit = fp8_ops.get_fp8_max(fp8_dtype, jnp.float32)
    amax = jnp.abs(x).max().astype(jnp.float32)
    # A non-finite value in the history would determine the scale for 1024 steps.
    amax = jnp.where(jnp.isfinite(amax) & (amax > MIN_AMAX), amax, 0.0)
    # Quantization clips infinite values to finite ones. Then neither loss scaling nor the checks of
    # the gradients would detect an overflow.
    x = jnp.where(jnp.isinf(x), jnp.nan, x)
    if not state:
        scale = fp8_ops.compute_scale(amax, jnp.ones(1), limit)
        return fp8_ops.quantize(x, fp8_dtype, scale, jnp.float32), scale, {}
    typed = state[name + SCALE].dtype
    old_scale, history = (
        lax.convert_element_type(state[name + part], jnp.float32) for part in (SCALE, HISTORY)
    )
    largest = amax if spec.current else history.max()
    if spec.fallback:
        largest = jnp.where(largest > 0, largest, amax)
    scale = fp8_ops.compute_scale(largest, old_scale, limit, spec.margin)
    new_history = jnp.roll(history, 1).at[0].set(amax)
    next_state = {name + SCALE: scale, name + HISTORY: new_history}
    next_state = {key: lax.convert_element_type(leaf, typed) for key, leaf in next_state.items()}
    return fp8_ops.quantize(x, fp8_dtype, scale, jnp.float32), scale, next_state


# -- the state
# ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def calibrating() -> Iterator[None]:
    """Makes `fp8_delayed` compute its scales from the current tensors within a `with` block.

    Multiplications that are traced in the block also record these scales in the state. Training
    uses this to initialize the state. Otherwise the first step would use the initial scale of 1,
    which rounds all gradients of a large batch to zero.
    """
    token = _calibrating.set(True)
    try:
        yield
    finally:
        _calibrating.reset(token)


def for_gradient(state: Tree) -> Tree:
    """Casts the state to the dtype `fp32_max_grad` before a function is differentiated.

    Automatic differentiation adds the cotangents of a value that is used more than once. In this
    dtype addition computes the maximum. If a layer is called several times, its next state thus
    contains the largest values of all calls.
    """
    return jax.tree.map(lambda x: lax.convert_element_type(x, fp8_ops.fp32_max_grad), state)


def from_gradient(cotangents: Tree) -> Tree:
    """Returns the state that a backward pass computed, in float32."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), cotangents)


def overwrite(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the new state where it is valid, and the old state elsewhere.

    If a layer did not run or its result was not used, its new state is 0, which is the cotangent of
    an unused value. A scale of 0 is invalid, because the next tensor would be divided by zero.
    """
    out = {
        name: overwrite(old[name], value) if isinstance(value, Mapping) else value
        for name, value in new.items()
    }
    for name in OPERANDS:
        if name + SCALE in new:
            scale, history = new[name + SCALE], new[name + HISTORY]
            legal = jnp.isfinite(scale) & (scale > 0)
            out[name + SCALE] = jnp.where(legal, scale, old[name + SCALE])
            out[name + HISTORY] = jnp.where(legal, history, old[name + HISTORY])
    return out


# -- recipes
# ---------------------------------------------------------------------------------------


def delayed_scaling(amax_history_length: int = HISTORY_LENGTH, margin: int = 0) -> Precision:
    """Returns the recipe `fp8_delayed`.

    Args:
        amax_history_length: Number of earlier steps whose largest absolute value determines a
            scale.
        margin: The scale leaves room for values up to `2**margin` times this largest value.

    Raises:
        UsageError: A value is out of range.
    """
    if amax_history_length < 1 or not 0 <= margin <= MAX_MARGIN:
        raise UsageError(
            f"fp8_delayed: amax_history_length={amax_history_length} must be 1 or more, and "
            f"margin={margin} must be from 0 to {MAX_MARGIN}"
        )
    warn_if_emulated()
    make = functools.partial(Fp8Product, amax_history_length, margin)
    return Precision("fp8_delayed", jnp.bfloat16, make, SITES, fused=True)


def current_scaling() -> Precision:
    """Returns the recipe `fp8_current`."""
    warn_if_emulated()
    return Precision("fp8_current", jnp.bfloat16, lambda: current_product, SITES, fused=True)


def warn_if_narrow(precision: Precision, width: int | None) -> None:
    """Warns if a model is so narrow that FP8 is not expected to save time.

    The limit of `MIN_EFFICIENT_WIDTH` features is an estimate from the cost of casts relative to
    the cost of matrix multiplications. It was not measured.
    """
    narrow = (
        precision.name in ("fp8_delayed", "fp8_current") and width and width < MIN_EFFICIENT_WIDTH
    )
    if narrow and has_fp8_units():
        logger.warning(
            "%s with %d features per token: FP8 is not expected to be faster than bfloat16 for "
            "matrix multiplications of this size (see --precision bfloat16 and docs/fp8.md)",
            precision.name,
            width,
        )


@functools.cache
def warn_if_emulated() -> None:
    """Warns once if the device has no FP8 units. FP8 is then emulated, which is slow."""
    if not has_fp8_units():
        device = target_device()
        compute_capability = getattr(device, "compute_capability", None)
        logger.warning(
            "%s%s has no known FP8 units: FP8 matrix multiplications are emulated. The results "
            "are the same, but the multiplications are slower than in bfloat16",
            device.device_kind,
            f" (compute capability {compute_capability})" if compute_capability else "",
        )


def has_fp8_units() -> bool:
    """Returns whether the device is an NVIDIA GPU of compute capability 8.9 or higher."""
    return (capability() or (0, 0)) >= (8, 9)
