"""Products in FP8: two recipes, their state, and its way from step to step.

All that touches flax's FP8 functions is here. A product quantises its operands to e4m3 and, going
back, the gradient of its result to e5m2 (the HYBRID format), each with one float32 scale a tensor;
the three matrix products see FP8 operands and sum in float32.

* ``fp8_current``: the scale comes from the tensor itself. No state.
* ``fp8_delayed``: the scale comes from the largest absolute values of earlier steps, so that a
  tensor is quantised while it is written. Scales and histories are the collection ``fp8_params``.

The state has no gradient: what the backward pass returns in its place *is* the next state, so the
training step overwrites it (:func:`overwrite`) and no optimizer ever sees it.
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
# Every Linear inside a numbered layer: projections and feed-forward blocks, no embeddings, no head.
SITES = (r"(^|/)\d+/",)
HISTORY_LENGTH = 1024
MIN_EFFICIENT_WIDTH = 1024
# The largest value of a tensor below which all of it counts as zero: its scale, or the inverse of
# that, would leave float32.
MIN_AMAX = 2.0**-100
# e4m3 holds 18 binary orders: with more headroom than this nothing is left of a tensor.
MAX_MARGIN = 16

State = dict[str, jax.Array]
Tree = TypeVar("Tree")
_calibrating: contextvars.ContextVar[bool] = contextvars.ContextVar("calibrating", default=False)


class Fp8Param(nnx.Variable):
    """A scale or a history of largest absolute values; its "gradient" is its next value."""

    overwritten: ClassVar[bool] = True
    sidecar: ClassVar[str] = "fp8_params.safetensors"


nnx.register_variable_name(COLLECTION, Fp8Param)


class ProductSpec(NamedTuple):
    """What is static in a product: axes of the kernel, exponent of headroom, where scales are from.

    ``contracted`` is the kernel's axis of input features. With ``current`` scales come from the
    tensors themselves; with ``fallback`` only where the history is empty, which needs the tensor's
    maximum before it is quantised, so training does not do it.
    """

    contracted: int
    margin: int
    current: bool
    fallback: bool


class Fp8Product(nnx.Module):
    """The product of one Linear (or of several, fused) with delayed scales. Never shared by two.

    **Arguments:** ``history_length`` steps whose largest value sets a scale, ``margin`` binary
    orders of headroom above it.
    """

    def __init__(self, history_length: int = HISTORY_LENGTH, margin: int = 0):
        self.margin = margin
        for name in OPERANDS:
            setattr(self, name + SCALE, Fp8Param(jnp.ones(1)))
            setattr(self, name + HISTORY, Fp8Param(jnp.zeros(history_length)))

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Dimensions, **ignored: Any
    ) -> jax.Array:
        """Multiply (..., k) by a kernel of any rank over one axis, as ``lax.dot_general``."""
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
    """Multiply (..., k) by a kernel in FP8, with scales of the tensors themselves."""
    return _product(ProductSpec(dimension_numbers[0][1][0], 0, True, False), lhs, rhs, {})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan: ProductSpec, x: jax.Array, w: jax.Array, state: State) -> jax.Array:
    return _forward(plan, x, w, state)[0]


def _forward(
    plan: ProductSpec, x: jax.Array, w: jax.Array, state: State
) -> tuple[jax.Array, tuple]:
    qx, x_scale, next_x = _quantize(plan, "input", x, state)
    qw, w_scale, next_w = _quantize(plan, "kernel", w, state)
    y = _dot(qx, qw, ((x.ndim - 1,), (plan.contracted,)))
    left = {name: leaf for name, leaf in state.items() if name.startswith("output_grad")}
    like = tuple(jnp.zeros((0,), array.dtype) for array in (x, w))
    y = (y * (x_scale * w_scale)).astype(x.dtype)
    return y, (qx, x_scale, qw, w_scale, next_x | next_w, left, like)


def _backward(
    plan: ProductSpec, saved: tuple[Any, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    qx, x_scale, qw, w_scale, advanced, state, (x_like, w_like) = saved
    qg, g_scale, next_g = _quantize(plan, "output_grad", g, state)
    rows = tuple(range(qx.ndim - 1))
    features = tuple(range(qx.ndim - 1, g.ndim))
    columns = tuple(axis for axis in range(qw.ndim) if axis != plan.contracted)
    # HIGHEST: on a GPU no sums in fewer bits, which gradients do not survive.
    dx = _dot(qg, qw, (features, columns), lax.Precision.HIGHEST)
    dw = _dot(qx, qg, (rows, rows), lax.Precision.HIGHEST)
    dx = (dx * (g_scale * w_scale)).astype(x_like.dtype)
    dw = jnp.moveaxis((dw * (x_scale * g_scale)).astype(w_like.dtype), 0, plan.contracted)
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
    plan: ProductSpec, name: str, x: jax.Array, state: State
) -> tuple[jax.Array, jax.Array, State]:
    """Return ``x`` in FP8, its scale, and the part of the state that belongs to it, advanced."""
    kind = OPERANDS[name]
    limit = fp8_ops.get_fp8_max(kind, jnp.float32)
    amax = jnp.abs(x).max().astype(jnp.float32)
    # A value that is not finite must not stay in the history and set its scale for 1024 steps.
    amax = jnp.where(jnp.isfinite(amax) & (amax > MIN_AMAX), amax, 0.0)
    # Clipped, an overflow would be a finite number, and neither a loss scale nor a check of the
    # gradients would see it.
    x = jnp.where(jnp.isinf(x), jnp.nan, x)
    if not state:
        scale = fp8_ops.compute_scale(amax, jnp.ones(1), limit)
        return fp8_ops.quantize(x, kind, scale, jnp.float32), scale, {}
    typed = state[name + SCALE].dtype
    old, history = (
        lax.convert_element_type(state[name + part], jnp.float32) for part in (SCALE, HISTORY)
    )
    largest = amax if plan.current else history.max()
    if plan.fallback:
        largest = jnp.where(largest > 0, largest, amax)
    scale = fp8_ops.compute_scale(largest, old, limit, plan.margin)
    moved = jnp.roll(history, 1).at[0].set(amax)
    after = {name + SCALE: scale, name + HISTORY: moved}
    after = {key: lax.convert_element_type(leaf, typed) for key, leaf in after.items()}
    return fp8_ops.quantize(x, kind, scale, jnp.float32), scale, after


# -- the state, from step to step
# ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def calibrating() -> Iterator[None]:
    """Trace products that take their scales from the tensors, and note them in the state.

    With the first scales, 1, the gradients of a large batch would all be rounded to zero.
    """
    token = _calibrating.set(True)
    try:
        yield
    finally:
        _calibrating.reset(token)


def for_gradient(state: Tree) -> Tree:
    """Cast the state for a differentiated function: where a product runs twice, the maximum counts.

    Automatic differentiation adds the cotangents of a value that is used twice; those of this type
    are added by taking the larger.
    """
    return jax.tree.map(lambda x: lax.convert_element_type(x, fp8_ops.fp32_max_grad), state)


def from_gradient(cotangents: Tree) -> Tree:
    """Return the state that a backward pass left, in float32."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), cotangents)


def overwrite(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``new`` where it is a legal state, and ``old`` elsewhere.

    A product that did not run (or whose result was not used) has the cotangent 0, and a scale of 0
    would divide the next tensor by zero.
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
    """Return the recipe ``fp8_delayed``."""
    if amax_history_length < 1 or not 0 <= margin <= MAX_MARGIN:
        raise UsageError(
            f"fp8_delayed: amax_history_length={amax_history_length} must be 1 or more, "
            f"margin={margin} from 0 to {MAX_MARGIN}"
        )
    warn_if_emulated()
    make = functools.partial(Fp8Product, amax_history_length, margin)
    return Precision("fp8_delayed", jnp.bfloat16, make, SITES, fused=True)


def current_scaling() -> Precision:
    """Return the recipe ``fp8_current``."""
    warn_if_emulated()
    return Precision("fp8_current", jnp.bfloat16, lambda: current_product, SITES, fused=True)


def warn_if_narrow(precision: Precision, width: int | None) -> None:
    """Say where FP8 is not expected to save time: below ``PAYS_FROM`` features.

    The number is an expectation from the cost of casts beside products, not a measurement.
    """
    wanted = (
        precision.name in ("fp8_delayed", "fp8_current") and width and width < MIN_EFFICIENT_WIDTH
    )
    if wanted and has_fp8_units():
        logger.warning(
            "%s with %d features a token: products this narrow are not expected to be faster in "
            "FP8 than in bfloat16 (--precision bfloat16; docs/fp8.md, When it pays)",
            precision.name,
            width,
        )


@functools.cache
def warn_if_emulated() -> None:
    """Say once if the device has no FP8 units: numbers are right there, speed is not."""
    if not has_fp8_units():
        device = target_device()
        units = getattr(device, "compute_capability", None)
        logger.warning(
            "FP8 on %s%s, which has no FP8 units that hfseq knows of: products are emulated, with "
            "FP8's numbers but slower than bfloat16",
            device.device_kind,
            f" (compute capability {units})" if units else "",
        )


def has_fp8_units() -> bool:
    """Tell whether the device is an NVIDIA GPU of compute capability 8.9 or more."""
    return (capability() or (0, 0)) >= (8, 9)
