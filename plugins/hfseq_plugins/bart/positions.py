"""Fixed places of BART's siblings: sines and cosines, computed or read from a checkpoint."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hfseq import nn

if TYPE_CHECKING:
    from transformers import BartConfig

    from hfseq.modeling import Tensor

# What a checkpoint may hold of them, in PyTorch's names and in ours.
POSITION_TABLES = r"(encoder|decoder)\.embed_positions\.(weight|embedding)$"


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, width: int) -> np.ndarray:
    """Return the vectors of places 0, 1 … (Vaswani et al., 2017, section 3.5), (length, width).

    All sines come first, then all cosines, as the stock classes lay them out; float64 inside, so
    the float32 values are the same to the last bit.
    """
    columns = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000, 2 * (columns // 2) / width)
    parts = (np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2]))
    table = np.concatenate(parts, axis=1).astype(np.float32)
    table.flags.writeable = False
    return table


class SinusoidalPositions(nnx.Module):
    """Places without parameters, as in Transformers 4."""

    compute_dtype: Any = None

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        self.size = (config.max_position_embeddings, config.d_model)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the vectors of places 0, 1, 2 …: (...) to (..., features)."""
        vectors = jnp.take(jnp.asarray(sinusoids(*self.size)), ids, axis=0)
        return vectors.astype(self.compute_dtype or jnp.float32)


class UnshiftedPositions(nn.Embed):
    """Places with a parameter each, numbered from the first row."""

    def __init__(self, config: BartConfig, rngs: nnx.Rngs):
        size = (config.max_position_embeddings, config.d_model)
        super().__init__(*size, nn.normal(config.init_std), rngs)


class FrozenPositions(UnshiftedPositions):
    """Places that a checkpoint holds, never trained: PyTorch's table has no gradient either."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the vectors of places 0, 1, 2 …: (...) to (..., features)."""
        return jax.lax.stop_gradient(super().__call__(ids))


def fixed_positions(config: BartConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Places that are computed, or those of the file where it holds other vectors."""
    computed = getattr(config, "static_position_embeddings", True)
    return (SinusoidalPositions if computed else FrozenPositions)(config, rngs)


def has_custom_positions(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a checkpoint holds tables of places that are not the computed ones."""
    tables = [tensor for name, tensor in tensors.items() if re.search(POSITION_TABLES, name)]
    return not all(is_sinusoidal(tensor) for tensor in tables if len(tensor.shape) == 2)


def is_sinusoidal(tensor: Tensor) -> bool:
    """Tell whether a tensor of a file holds :func:`sinusoids`, up to the rounding of its type."""
    given = np.asarray(tensor.read(...))
    allowed = 1e-6 if given.dtype.itemsize >= 4 else float(jnp.finfo(given.dtype).eps)
    return bool(np.abs(given.astype(np.float32) - sinusoids(*tensor.shape)).max() <= allowed)
