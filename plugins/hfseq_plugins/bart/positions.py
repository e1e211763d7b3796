"""Position embeddings of BART variants: learned ones, and sinusoids."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import Tensor

# Names of the position embeddings in PyTorch and Flax checkpoints.
POSITION_TABLES = r"(encoder|decoder)\.embed_positions\.(weight|embedding)$"


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, width: int) -> np.ndarray:
    """Returns sinusoidal position embeddings (Vaswani et al., 2017, section 3.5).

    The first half of the features are sines, the second half cosines. Angles are computed in
    float64, so the float32 values are bit-identical to those of Transformers.

    Args:
        length: Number of positions.
        width: Number of features.

    Returns:
        A read-only float32 array, `(length, width)`.
    """
    columns = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000, 2 * (columns // 2) / width)
    parts = (np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2]))
    table = np.concatenate(parts, axis=1).astype(np.float32)
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=8)
def fairseq_frequencies(width: int) -> np.ndarray:
    """Returns the frequencies of the sinusoidal position embeddings of fairseq.

    They are rounded to float32 as in PyTorch, which makes a difference at large positions. Only the
    exponential is computed in float64, because its float32 results differ between libraries.

    Args:
        width: Number of features.

    Returns:
        A read-only float32 array, `(width // 2,)`.
    """
    half = width // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1))
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    frequencies.flags.writeable = False
    return frequencies


class SinusoidalPositions(nnx.Module):
    """Sinusoidal position embeddings without parameters, as in Transformers 4."""

    compute_dtype: Any = None

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        self.size = (config.max_position_embeddings, config.d_model)

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`."""
        vectors = jnp.take(jnp.asarray(sinusoids(*self.size)), ids, axis=0)
        return vectors.astype(self.compute_dtype or jnp.float32)


class UnshiftedPositions(nn.Embed):
    """Learned position embeddings, without the two unused embeddings at the start in BART."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        size = (config.max_position_embeddings, config.d_model)
        super().__init__(*size, nn.normal(config.init_std), rngs)


class FrozenPositions(UnshiftedPositions):
    """Position embeddings that are loaded from a checkpoint and not trained, as in PyTorch."""

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`."""
        return jax.lax.stop_gradient(super().__call__(ids))


def fixed_positions(config: PreTrainedConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Returns sinusoids, or frozen embeddings if a checkpoint has other position embeddings."""
    computed = getattr(config, "static_position_embeddings", True)
    return (SinusoidalPositions if computed else FrozenPositions)(config, rngs)


class StoredPositions(FlaxPreTrainedModel):
    """Mixin for models whose sinusoidal position embeddings are not parameters.

    If a checkpoint contains other position embeddings, these are loaded and not trained, and the
    configuration gets `static_position_embeddings=False`.
    """

    def __init__(self, config: Any, *args: Any, stored_positions: bool = False, **kwargs: Any):
        if stored_positions and getattr(config, "static_position_embeddings", True):
            config = copy.deepcopy(config)
            config.static_position_embeddings = False
        super().__init__(config, *args, **kwargs)

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, Any], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Adds `stored_positions=True` if a checkpoint has position embeddings but no sinusoids."""
        positions = {"stored_positions": True} if has_custom_positions(tensors) else {}
        return positions | super().checkpoint_options(tensors, config)


def has_custom_positions(tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether a checkpoint contains position embeddings that are not `sinusoids`.

    Args:
        tensors: Tensors of the checkpoint by name.
    """
    tables = [tensor for name, tensor in tensors.items() if re.search(POSITION_TABLES, name)]
    return not all(is_sinusoidal(tensor) for tensor in tables if len(tensor.shape) == 2)


def is_sinusoidal(tensor: Tensor) -> bool:
    """Returns whether a stored tensor equals `sinusoids`, up to rounding of its dtype."""
    stored = np.asarray(tensor.read(...))
    tolerance = 1e-6 if stored.dtype.itemsize >= 4 else float(jnp.finfo(stored.dtype).eps)
    return bool(np.abs(stored.astype(np.float32) - sinusoids(*tensor.shape)).max() <= tolerance)
