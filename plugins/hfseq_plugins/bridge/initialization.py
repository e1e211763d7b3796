"""Draws the initial parameters of a new bridged model as its PyTorch class would."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.initialization import TORCH_INIT_FUNCTIONS

from hfseq import nn
from hfseq_plugins.bridge import state, trace
from hfseq_plugins.bridge.dtypes import numpy_array
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.structure import Structure
from hfseq_plugins.bridge.tensor import JaxTensor, from_array

logger = logging.getLogger("hfseq")

#: Largest number of parameters for which a PyTorch model is constructed to get initial values.
MAX_CONSTRUCTED = 300_000_000


def initial_values(structure: Structure, key: jax.Array) -> dict[str, jax.Array]:
    """Runs the weight initialization of the PyTorch class in JAX.

    Args:
        structure: The structure of the model.
        key: A PRNG key.

    Returns:
        The initial value of each parameter by its PyTorch name.
    """
    shapes = {name: tuple(p.shape) for name, p in structure.module.named_parameters()}
    try:
        values = _draw(structure, shapes)(key)
    except UnsupportedModel as error:
        scale = getattr(structure.module.config, "initializer_range", 0.02)
        logger.warning(
            "the initialization of %s cannot run in JAX (%s). Instead, matrices are drawn from a "
            "normal distribution with the standard deviation %s, vectors are set to zero, and the "
            "weights of norms are set to one",
            type(structure.module).__name__,
            f"{error.problem}: {error.statement}",
            scale,
        )
        return _default_values(shapes, scale, key)
    missing = {name: shape for name, shape in shapes.items() if name not in values}
    return values | _constructed_values(structure, missing, key) if missing else values


def _constructed_values(
    structure: Structure, shapes: Mapping[str, tuple[int, ...]], key: jax.Array
) -> dict[str, jax.Array]:
    """Returns the initial values of parameters that only PyTorch's constructors set.

    A PyTorch model is constructed to get these values. For a model with more than `MAX_CONSTRUCTED`
    parameters, they are drawn from a normal distribution instead.

    Args:
        structure: The structure of the model.
        shapes: The shapes of these parameters by name.
        key: The PRNG key for the normal distribution.
    """
    size = sum(math.prod(shape) for shape in structure.shapes.values())
    if size > MAX_CONSTRUCTED:
        logger.warning(
            "%s sets some initial values in its constructor, which hfseq does not run for a model "
            "with %d parameters. These are drawn from a normal distribution instead: %s",
            type(structure.module).__name__,
            size,
            ", ".join(sorted(shapes)[:5]),
        )
        return _default_values(shapes, 0.02, key)
    if structure.constructed is None:
        model_class: Any = type(structure.module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = model_class._from_config(copy.deepcopy(structure.module.config))
        parameters = dict(module.named_parameters())
        structure.constructed = {n: numpy_array(parameters[n].detach()) for n in shapes}
    return {name: jnp.asarray(value) for name, value in structure.constructed.items()}


def _draw(structure: Structure, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns the compiled initialization. All models with the same structure share it."""
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
    """Replaces the truncated normal distribution in Transformers' initialization.

    PyTorch's function draws numbers repeatedly until all of them are within the bounds, which jax
    cannot compile. The replacement uses jax's distribution for traced tensors, and PyTorch's
    function for all others.
    """
    functions: dict[str, Any] = TORCH_INIT_FUNCTIONS
    original = functions["trunc_normal_"]

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

    functions["trunc_normal_"] = truncated_normal


def _initialize(module: Any) -> dict[str, Any]:
    for part in module.modules():
        vars(part).pop("_is_hf_initialized", None)
    module.initialize_weights()
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, JaxTensor) or parameter.node.root.version > 0
    }


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
