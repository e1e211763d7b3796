"""Gradients of PyTorch code that disables gradients or defines its own backward pass."""

from __future__ import annotations

import functools
import sys
from types import FrameType

import jax
import jax.numpy as jnp

from hfseq_plugins.bridge.refusals import UnsupportedModel

#: Names of `torch.autograd.Function` classes whose backward pass is the derivative of their forward
#: pass, up to rounding.
EXACT_FUNCTIONS = frozenset({"GeLUFunction", "XSoftmax"})


def without_gradient(array: jax.Array) -> jax.Array:
    """Defines the gradient of a result that was computed while PyTorch's gradients were disabled.

    PyTorch disables gradients in two places. In a `torch.no_grad` block, results have no gradient.
    In the forward pass of a `torch.autograd.Function`, PyTorch would use the backward pass of the
    function. The bridge cannot run this backward pass. jax differentiates the forward passes of the
    functions in `EXACT_FUNCTIONS`, and the bridge raises an error when jax differentiates another.
    """
    name = _custom_function()
    if name is None:
        return jax.lax.stop_gradient(array)
    if name in EXACT_FUNCTIONS or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return _refuse_gradient(name, array)


def with_gradient_of(old: jax.Array, new: jax.Array) -> jax.Array:
    """Defines the gradient of a tensor after a write that PyTorch does not record.

    Such a write occurs while gradients are disabled, or changes `x.detach()` or `x.data`. The
    gradient of the new values is that of the old values, for example of a parameter.
    """
    is_float = jnp.issubdtype(new.dtype, jnp.floating)
    return _replace(old, new) if is_float and _custom_function() is None else new


@jax.custom_jvp
def _replace(old: jax.Array, new: jax.Array) -> jax.Array:
    return new


@_replace.defjvp
def _replace_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return primals[1], tangents[0]


def _custom_function() -> str | None:
    """Returns the name of the `torch.autograd.Function` that is running, if there is one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith(
            "torch/autograd/function.py"
        ):
            return frame.f_locals["cls"].__name__
        frame = frame.f_back
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse_gradient(name: str, array: jax.Array) -> jax.Array:
    return array


@_refuse_gradient.defjvp
def _refuse_gradient_jvp(
    name: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    raise UnsupportedModel(
        f"the torch.autograd.Function {name} defines its own backward pass, which may differ from "
        "the derivative of its forward pass",
        operator=f"torch.autograd.Function {name}",
        solution="The model can be evaluated, but training needs a native implementation",
    )
