"""Initial values of a new bridged model, drawn from the distributions of its PyTorch class."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfseq import nn
from hfseq_plugins.bridge import trace
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.structure import Structure

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
            error.problem,
            scale,
        )
        return _default_values(shapes, scale, key)


def _draw(structure: Structure, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns the compiled initialization, which all models with the structure share."""
    if structure.initialize is None:

        def draw(key: jax.Array) -> dict[str, jax.Array]:
            zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
            keys = nn.make_keys(key)
            return trace.call(structure.module, zeros, {}, rng=keys, function=_initialize)[0]

        structure.initialize = jax.jit(draw)
    return structure.initialize


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
