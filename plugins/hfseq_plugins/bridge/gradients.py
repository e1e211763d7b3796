"""Gradients where PyTorch code disables or replaces them."""

from __future__ import annotations

import functools
import sys
from types import FrameType

import jax
import jax.numpy as jnp

from hfseq_plugins.bridge.refusals import UnsupportedModel

#: Custom functions whose backward pass is the derivative of their forward pass, up to rounding.
EXACT_FUNCTIONS = frozenset({"GeLUFunction", "XSoftmax"})


def without_gradient(array: jax.Array) -> jax.Array:
    """Returns a result that was computed while PyTorch's gradients were disabled.

    PyTorch disables gradients in `torch.no_grad` blocks, whose results are constants for the
    backward pass, and in the forward passes of custom functions, which have their own backward
    pass. jax differentiates the forward pass of those in `EXACT_FUNCTIONS`, and refuses to
    differentiate others.
    """
    name = _custom_function()
    if name is None:
        return jax.lax.stop_gradient(array)
    if name in EXACT_FUNCTIONS or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return _refuse_gradient(name, array)


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
        f"the custom function {name} has its own backward pass, which may differ from the "
        "derivative of its forward pass",
        operator=f"torch.autograd.Function {name}",
        solution="The forward pass works. Training needs a native implementation",
    )
