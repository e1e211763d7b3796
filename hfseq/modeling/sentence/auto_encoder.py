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
from hfseq.modeling.sentence.modules import Dense, write_module

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
        last_nonzero: Number of updates of these statistics since each latent feature was last
            nonzero, int64 `(hidden_dim,)`. Training updates them twice per text column and step.
        k: Number of largest latent features to keep.
        k_aux: Number of latent features in the auxiliary loss in training.
        normalize: Whether inputs are first standardized over their features.
        dead_threshold: Number of updates after which a latent feature that was always zero counts
            as dead in training.
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

    @classmethod
    def random(cls, input_dim: int, hidden_dim: int, k: int, seed: int = 0) -> SparseAutoEncoder:
        """Returns an autoencoder for a bi-encoder, initialized as in sentence-transformers.

        Args:
            input_dim: Size of the dense vectors.
            hidden_dim: Number of latent features.
            k: Number of latent features that are kept.
            seed: Seed of the initialization.
        """
        kernel = Dense.random(input_dim, hidden_dim, seed, use_bias=False).kernel
        zeros = np.zeros(hidden_dim, np.float32)
        return cls(
            encoder=kernel.T,
            pre_bias=np.zeros(input_dim, np.float32),
            latent_bias=zeros,
            last_nonzero=zeros.astype(np.int64),
            k=k,
            k_aux=input_dim // 2,
        )

    @property
    def hidden_dim(self) -> int:
        """The number of latent features."""
        return len(self.encoder)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The trained weights by name."""
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def buffers(self) -> dict[str, np.ndarray]:
        """The statistics that training updates, by name."""
        return {"last_nonzero": np.asarray(self.last_nonzero, np.int32)}

    def __call__(self, vectors: jax.Array, weights: Any | None = None) -> jax.Array:
        """Computes the latent features of vectors, `(batch, hidden_dim)`.

        Negative features are set to zero. The caller selects the ``k`` largest features.

        Args:
            vectors: Dense vectors, `(batch, input_dim)`.
            weights: Weights to use instead of those in the attributes.
        """
        weights = self.weights if weights is None else weights
        return jax.nn.relu(self.encode(self.standardize(vectors)[0], weights))

    def standardize(self, vectors: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns vectors that are standardized if ``normalize`` is set, their mean and deviation.

        Args:
            vectors: Dense vectors, `(batch, input_dim)`.
        """
        vectors = vectors.astype(jnp.float32)
        if not self.normalize:
            return vectors, jnp.zeros(()), jnp.ones(())
        mean, deviation = vectors.mean(-1, keepdims=True), vectors.std(-1, ddof=1, keepdims=True)
        return (vectors - mean) / (deviation + 1e-5), mean, deviation

    @staticmethod
    def encode(vectors: jax.Array, weights: Any) -> jax.Array:
        """Returns the latent features of standardized vectors before the activation."""
        return (vectors - weights["pre_bias"]) @ weights["encoder"].T + weights["latent_bias"]

    @staticmethod
    def decode(latents: jax.Array, weights: Any) -> jax.Array:
        """Returns the standardized vectors that latent features describe."""
        return latents @ weights["encoder"] + weights["pre_bias"]

    def write(self, folder: Path) -> None:
        """Writes the autoencoder into ``folder``."""
        sizes = {"input_dim": self.encoder.shape[1], "hidden_dim": self.hidden_dim}
        settings = sizes | {name: getattr(self, name) for name in SETTINGS[2:]}
        tensors = {tensor: np.asarray(getattr(self, name)) for name, tensor in TENSORS.items()}
        last_nonzero = np.asarray(self.last_nonzero, np.int64)
        write_module(folder, settings, tensors | {"stats_last_nonzero": last_nonzero})
