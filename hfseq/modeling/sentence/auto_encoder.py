"""Sparse autoencoders, which convert dense vectors to sparse vectors (CSR).

Source: Wen et al., "Beyond Matryoshka: Revisiting Sparse Coding for Adaptive Representation", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import CheckpointError
from hfseq.modeling.sentence.directory import Module, SentenceDirectory
from hfseq.modeling.sentence.modules import write_module

#: The name of the tensor in files for each weight.
TENSORS = {"encoder": "encoder.weight", "pre_bias": "pre_bias", "latent_bias": "latent_bias"}
#: The kernel of the decoder. It is tied to that of the encoder, so PyTorch may store it instead.
TIED_TENSOR = "decoder.linear.weight"
SETTINGS = ("input_dim", "hidden_dim", "k", "k_aux", "normalize", "dead_threshold")


@dataclass(frozen=True)
class SparseAutoEncoder:
    """Converts dense vectors to sparse vectors of latent features.

    hfseq's training does not support autoencoders, but keeps their settings for training.

    Attributes:
        encoder: Kernel of the encoder, `(hidden_dim, input_dim)`. The decoder is its transpose.
        pre_bias: Vector that is subtracted from the inputs, `(input_dim,)`.
        latent_bias: Vector that is added to the latent features, `(hidden_dim,)`.
        last_nonzero: Number of training steps since each latent feature was last nonzero, int64
            `(hidden_dim,)`.
        k: Number of largest latent features to keep.
        k_aux: Number of latent features in the auxiliary loss in training.
        normalize: Whether inputs are first standardized over their features.
        dead_threshold: Number of training steps after which a latent feature that was always zero
            counts as dead.
    """

    encoder: np.ndarray
    pre_bias: np.ndarray
    latent_bias: np.ndarray
    last_nonzero: np.ndarray
    k: int = 8
    k_aux: int = 512
    normalize: bool = False
    dead_threshold: int = 30

    @classmethod
    def read(cls, directory: SentenceDirectory, module: Module) -> SparseAutoEncoder:
        """Reads the autoencoder from a directory.

        Raises:
            CheckpointError: A tensor is missing, or the shapes of the tensors do not match.
        """
        path, tensors = directory.tensors(module.folder)
        if TIED_TENSOR in tensors:
            tensors = {TENSORS["encoder"]: tensors[TIED_TENSOR], **tensors}
        missing = [name for name in TENSORS.values() if name not in tensors]
        if missing:
            raise CheckpointError(f"{path} has no tensor '{missing[0]}'")
        weights: dict[str, Any] = {
            name: np.asarray(tensors[tensor]) for name, tensor in TENSORS.items()
        }
        hidden, size = weights["encoder"].shape
        shapes = {"pre_bias": (size,), "latent_bias": (hidden,)}
        for name, shape in shapes.items():
            if weights[name].shape != shape:
                raise CheckpointError(
                    f"{path}: {name} has the shape {weights[name].shape}, but the shape of the "
                    f"encoder's kernel requires {shape}"
                )
        stored: dict[str, Any] = {
            name: module.settings[name] for name in SETTINGS[2:] if name in module.settings
        }
        last_nonzero = np.asarray(tensors.get("stats_last_nonzero", np.zeros(hidden)), np.int64)
        return cls(**weights, last_nonzero=last_nonzero, **stored)

    @property
    def hidden_dim(self) -> int:
        """The number of latent features."""
        return len(self.encoder)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The trained weights by name."""
        return {name: getattr(self, name) for name in TENSORS}

    def __call__(self, vectors: jax.Array, weights: Any | None = None) -> jax.Array:
        """Computes the latent features of vectors, `(batch, hidden_dim)`.

        Negative features are set to zero. The caller selects the ``k`` largest features.

        Args:
            vectors: Dense vectors, `(batch, input_dim)`.
            weights: Weights to use instead of those in the attributes.
        """
        weights = self.weights if weights is None else weights
        vectors = vectors.astype(jnp.float32)
        if self.normalize:
            vectors = vectors - vectors.mean(-1, keepdims=True)
            vectors /= vectors.std(-1, ddof=1, keepdims=True) + 1e-5
        latents = (vectors - weights["pre_bias"]) @ weights["encoder"].T + weights["latent_bias"]
        return jax.nn.relu(latents)

    def write(self, folder: Path) -> None:
        """Writes the autoencoder into ``folder``."""
        sizes = {"input_dim": self.encoder.shape[1], "hidden_dim": self.hidden_dim}
        settings = sizes | {name: getattr(self, name) for name in SETTINGS[2:]}
        tensors = {tensor: np.asarray(getattr(self, name)) for name, tensor in TENSORS.items()}
        write_module(folder, settings, tensors | {"stats_last_nonzero": self.last_nonzero})
