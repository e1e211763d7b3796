"""Operators that compute each element independently of the others."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special
from jax.typing import ArrayLike, DTypeLike

from hfseq_plugins.bridge.operators.table import Function, add_all, operator

Array = jax.Array
BINARY_OVERLOADS = ("Tensor", "Scalar", "default")


def _add_binary(name: str, function: Function) -> None:
    operator(*(f"{name}.{overload}" for overload in BINARY_OVERLOADS), promoted=(0, 1))(function)


for _name, _function in {
    "mul": jnp.multiply,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "atan2": jnp.arctan2,
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "xlogy": special.xlogy,
    "hypot": jnp.hypot,
    "copysign": jnp.copysign,
    "floor_divide": jnp.floor_divide,
}.items():
    _add_binary(_name, cast(Function, _function))
operator("max.other", promoted=(0, 1))(jnp.maximum)
operator("min.other", promoted=(0, 1))(jnp.minimum)


@operator("add.Tensor", "add.Scalar", promoted=(0, 1))
def _add(a: Array, b: ArrayLike, alpha: float = 1) -> Array:
    return jnp.add(a, b if alpha == 1 else alpha * b)


@operator("sub.Tensor", "sub.Scalar", "subtract.Tensor", promoted=(0, 1))
def _subtract(a: Array, b: ArrayLike, alpha: float = 1) -> Array:
    return jnp.subtract(a, b if alpha == 1 else alpha * b)


@operator("rsub.Scalar", "rsub.Tensor", promoted=(0, 1))
def _reverse_subtract(a: Array, b: ArrayLike, alpha: float = 1) -> Array:
    return jnp.subtract(b, a if alpha == 1 else alpha * a)


@operator("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", promoted=(0, 1))
def _divide(a: Array, b: ArrayLike, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if rounding_mode == "trunc":
        if jnp.issubdtype(jnp.result_type(a, b), jnp.floating):
            return jnp.trunc(jnp.true_divide(a, b))
        return lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, jnp.asarray(a).dtype)))
    return jnp.true_divide(a, b)


@operator("lerp.Scalar", "lerp.Tensor")
def _lerp(a: Array, b: Array, weight: ArrayLike) -> Array:
    return a + weight * (b - a)


@operator("addcmul")
def _addcmul(x: Array, a: Array, b: Array, value: ArrayLike = 1) -> Array:
    return x + value * a * b


@operator("addcdiv")
def _addcdiv(x: Array, a: Array, b: Array, value: ArrayLike = 1) -> Array:
    return x + value * a / b


def _floating(function: Function) -> Any:
    """Wraps a function so that it converts integers to float32, as PyTorch does."""

    def compute(x: Array) -> Array:
        is_exact = not jnp.issubdtype(x.dtype, jnp.inexact)
        return function(x.astype(jnp.float32) if is_exact else x)

    return compute


add_all(
    {
        name: _floating(function)
        for name, function in {
            "exp": jnp.exp,
            "exp2": jnp.exp2,
            "expm1": jnp.expm1,
            "log": jnp.log,
            "log2": jnp.log2,
            "log10": jnp.log10,
            "log1p": jnp.log1p,
            "sqrt": jnp.sqrt,
            "rsqrt": lax.rsqrt,
            "reciprocal": jnp.reciprocal,
            "sin": jnp.sin,
            "cos": jnp.cos,
            "tan": jnp.tan,
            "asin": jnp.arcsin,
            "acos": jnp.arccos,
            "atan": jnp.arctan,
            "sinh": jnp.sinh,
            "cosh": jnp.cosh,
            "tanh": jnp.tanh,
            "asinh": jnp.arcsinh,
            "acosh": jnp.arccosh,
            "atanh": jnp.arctanh,
            "sigmoid": jax.nn.sigmoid,
            "erf": lax.erf,
            "erfc": lax.erfc,
            "erfinv": lax.erf_inv,
            "lgamma": lax.lgamma,
            "digamma": lax.digamma,
            "sinc": jnp.sinc,
        }.items()
    }
)
add_all(
    {
        "abs": jnp.abs,
        "neg": jnp.negative,
        "positive": lambda x: x,
        "sign sgn": jnp.sign,
        "ceil": jnp.ceil,
        "floor": jnp.floor,
        "trunc": jnp.trunc,
        "frac": lambda x: x - jnp.trunc(x),
        "round": jnp.round,
        "round.decimals": lambda x, decimals=0: jnp.round(x, decimals),
        "square": jnp.square,
        "angle": jnp.angle,
        "logical_not": jnp.logical_not,
        "bitwise_not": jnp.bitwise_not,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "isfinite": jnp.isfinite,
        "isneginf": jnp.isneginf,
        "isposinf": jnp.isposinf,
        "signbit": jnp.signbit,
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "silu": jax.nn.silu,
        "selu": jax.nn.selu,
        "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        "log_sigmoid": jax.nn.log_sigmoid,
        "log_sigmoid_forward": lambda x: (jax.nn.log_sigmoid(x), jnp.zeros(0, x.dtype)),
        "hardsigmoid": jax.nn.hard_sigmoid,
        "hardswish": jax.nn.hard_swish,
        "nan_to_num": lambda x, nan=None, posinf=None, neginf=None: jnp.nan_to_num(
            x, nan=nan or 0.0, posinf=posinf, neginf=neginf
        ),
        "complex": lax.complex,
        "polar": lambda radius, angle: lax.complex(
            radius * jnp.cos(angle), radius * jnp.sin(angle)
        ),
        "_conj conj _conj_physical conj_physical": jnp.conj,
        "real": jnp.real,
        "imag": jnp.imag,
        "special_xlog1py": special.xlog1py,
        "logit": lambda x, eps=None: jax.scipy.special.logit(
            x if eps is None else jnp.clip(x, eps, 1 - eps)
        ),
    }
)


@operator("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", promoted=(0, 1))
def _power(base: ArrayLike, exponent: ArrayLike) -> Array:
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)
    if isinstance(exponent, int) and not isinstance(base, int | float):
        return lax.integer_pow(base, exponent)
    if exponent == 0.5 if isinstance(exponent, float) else False:
        return jnp.sqrt(base)
    return jnp.power(base, exponent)


@operator("clamp.default", "clamp.Tensor", "hardtanh.default", "clip.default", "clip.Tensor")
def _clamp(x: Array, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Array:
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.inexact) and (
        isinstance(min, float) or isinstance(max, float)
    ):
        x = x.astype(jnp.float32)
    limits = np.iinfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else None

    def limit(value: ArrayLike) -> Any:
        if limits is not None and isinstance(value, int):
            return builtin_min(builtin_max(value, limits.min), limits.max)
        return value.astype(x.dtype) if isinstance(value, jax.Array) and not value.ndim else value

    if min is not None:
        x = jnp.maximum(x, limit(min))
    return x if max is None else jnp.minimum(x, limit(max))


builtin_min, builtin_max = min, max
operator("clamp_min.default", "clamp_min.Tensor")(lambda x, low: _clamp(x, low))
operator("clamp_max.default", "clamp_max.Tensor")(lambda x, high: _clamp(x, None, high))


@operator(*("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"), promoted=(1, 2))
def _where(condition: Array, a: ArrayLike, b: ArrayLike) -> Array:
    return jnp.where(condition, a, b)


@operator("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Array, mask: Array, value: ArrayLike) -> Array:
    if jnp.issubdtype(x.dtype, jnp.integer) and isinstance(value, int):
        limits = np.iinfo(x.dtype)
        value = builtin_min(builtin_max(value, limits.min), limits.max)
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@operator("gelu")
def _gelu(x: Array, approximate: str = "none") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@operator("leaky_relu")
def _leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, negative_slope * x)


@operator("_prelu_kernel", "prelu")
def _prelu(x: Array, weight: Array) -> Array:
    if weight.ndim == 1 and x.ndim > 1 and weight.size > 1:
        weight = weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    return jnp.where(x > 0, x, weight * x)


@operator("elu")
def _elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    negative = alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)
    return scale * jnp.where(x > 0, x, negative)


@operator("celu")
def _celu(x: Array, alpha: float = 1.0) -> Array:
    return _elu(x, alpha, 1.0, 1 / alpha)


@operator("softplus")
def _softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


@operator("threshold")
def _threshold(x: Array, threshold: float, value: float) -> Array:
    return jnp.where(x > threshold, x, jnp.asarray(value, x.dtype))


@operator("softshrink")
def _softshrink(x: Array, lambd: float = 0.5) -> Array:
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, 0))


@operator("glu")
def _glu(x: Array, dim: int = -1) -> Array:
    return jax.nn.glu(x, dim)


@operator("heaviside", promoted=(0, 1))
def _heaviside(x: Array, values: Array) -> Array:
    return jnp.heaviside(x, values)


@operator("isin.Tensor_Tensor", "isin.Tensor_Scalar")
def _isin(x: Array, values: ArrayLike, assume_unique: bool = False, invert: bool = False) -> Array:
    return jnp.isin(x, values, invert=invert)


@operator("isclose")
def _isclose(
    a: Array, b: Array, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Array:
    return jnp.isclose(a, b, rtol, atol, equal_nan)


@operator("_to_copy", "to.dtype", "to.dtype_layout")
def _to_copy(x: Array, dtype: DTypeLike | None = None, *_: Any, **__: Any) -> Array:
    if dtype is None:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        x = x.real
    return x.astype(dtype)


@operator("clone", "contiguous", "lift_fresh_copy", "lift_fresh", "lift", "alias", "resolve_conj")
@operator("resolve_neg", "_neg_view_copy")
def _identity(x: Array, *_: Any, **__: Any) -> Array:
    return x


operator("detach")(lax.stop_gradient)


@operator("fill.Scalar", "fill.Tensor")
def _fill(x: Array, value: ArrayLike) -> Array:
    return jnp.full_like(x, value)


@operator("zero")
def _zero(x: Array) -> Array:
    return jnp.zeros_like(x)


@operator("copy")
def _copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)
