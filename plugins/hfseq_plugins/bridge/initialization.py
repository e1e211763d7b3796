"""Initial values of a new bridged model, drawn from the distributions of its PyTorch class."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.initialization import TORCH_INIT_FUNCTIONS

from hfseq import nn
from hfseq_plugins.bridge import state, trace
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.structure import Structure
from hfseq_plugins.bridge.tensor import JaxTensor, from_array

logger = logging.getLogger("hfseq")


def initial_values(structure: Structure, key: jax.Array) -> dict[str, jax.Array]:
    """Runs the initialization of PyTorch's class over traced arrays.

    Args:
        structure: The structure of the model.
        key: A PRNG key.

    Returns:
        The initial value of each parameter by its PyTorch name.
    """
    shapes = {name: tuple(p.shape) for name, p in structure.module.named_parameters()}
    try:
        return _draw(structure, shapes)(key)
    except UnsupportedModel as error:
        scale = getattr(structure.module.config, "initializer_range", 0.02)
        logger.warning(
            "the initialization of %s cannot run in JAX (%s): matrices are drawn from a normal "
            "distribution with the standard deviation %s, vectors are zero, and the weights of "
            "norms are one",
            type(structure.module).__name__,
            f"{error.problem}: {error.statement}",
            scale,
        )
        return _default_values(shapes, scale, key)


def _draw(structure: Structure, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns the compiled initialization, which all models with the structure share."""
    _replace_truncated_normal()
    if structure.initialize is None:

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
            keys = nn.make_keys(key)
            return trace.call(structure.module, zeros, {}, rng=keys, function=_initialize)[0]

        structure.initialize = jax.jit(draw)
    return structure.initialize


@functools.cache
def _replace_truncated_normal() -> None:
    """Lets Transformers initialize traced tensors with jax's truncated normal distribution.

    PyTorch's function draws until all numbers are within the bounds, which cannot be compiled. All
    other tensors are initialized by PyTorch's function.
    """
    original = TORCH_INIT_FUNCTIONS["trunc_normal_"]

    @functools.wraps(original)
    def truncated_normal(
        tensor: torch.Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        a: float = -2.0,
        b: float = 2.0,
        generator: Any = None,
    ) -> torch.Tensor:
        keys = state.current().keys
        if not isinstance(tensor, JaxTensor) or keys is None:
            return original(tensor, mean=mean, std=std, a=a, b=b, generator=generator)
        lower, upper = (a - mean) / std, (b - mean) / std
        draws = jax.random.truncated_normal(keys.child().key, lower, upper, tuple(tensor.shape))
        return tensor.copy_(from_array(mean + std * draws))

    TORCH_INIT_FUNCTIONS["trunc_normal_"] = truncated_normal


def _initialize(module: Any) -> dict[str, Any]:
    for part in module.modules():
        vars(part).pop("_is_hf_initialized", None)
    module.initialize_weights()
    return dict(module.named_parameters())


def _default_values(
    shapes: Mapping[str, tuple[int, ...]], scale: float, key: jax.Array
) -> dict[str, jax.Array]:
    values = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if len(shape) > 1:
            noise = jax.random.normal(jax.random.fold_in(key, number), shape)
            values[name] = scale * noise
        else:
            is_norm = name.endswith("norm.weight")
            values[name] = jnp.full(shape, float(is_norm))
    return values
