"""The modules of sentence-transformers that have weights: dense layers and static embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.checkpoints import files
from hfseq.errors import CheckpointError, write_atomically
from hfseq.modeling.sentence.directory import Module, SentenceDirectory

#: Weights of a module by name. They may be traced arrays.
Weights = Mapping[str, Any]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Tanh": jnp.tanh,
    "Identity": lambda x: x,
    "ReLU": jax.nn.relu,
    "Sigmoid": jax.nn.sigmoid,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
}


def torch_activation(name: str) -> str:
    """Returns the path of a PyTorch activation class, which sentence-transformers stores."""
    return f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"


@dataclass(frozen=True)
class Dense:
    """A dense layer after the pooling, or after the encoder of a multi-vector model.

    Attributes:
        kernel: Kernel, `(in_features, out_features)`.
        bias: Bias, `(out_features,)`, or `None`.
        activation: Name of the PyTorch class of the activation function.
        use_residual: Whether the input is added to the output.
        residual: Matrix by which the input is multiplied before it is added, `(in_features,
            out_features)`. `None` if input and output have the same size.
    """

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str
    use_residual: bool = False
    residual: np.ndarray | None = None

    @classmethod
    def read(cls, directory: SentenceDirectory, module: Module, features: str) -> Dense:
        """Reads a layer.

        Args:
            directory: The directory of the model.
            module: The entry of the layer in modules.json.
            features: What the layer must transform, as sentence-transformers names it:
                "sentence_embedding" or "token_embeddings".

        Raises:
            CheckpointError: The layer has no weights, or its settings are not supported.
        """
        source, folder, settings = directory.source, module.folder, module.settings
        activation = str(settings.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
        for key in ("module_input_name", "module_output_name"):
            if settings.get(key) not in (None, features):
                raise CheckpointError(
                    f"'{source}': the module in {folder} has the unsupported {key} "
                    f"{settings[key]!r} (supported: '{features}')"
                )
        if activation not in ACTIVATIONS:
            raise CheckpointError(
                f"'{source}': the module in {folder} has the unsupported activation {activation} "
                f"(supported: {', '.join(ACTIVATIONS)})"
            )
        path, tensors = directory.tensors(folder)
        try:
            kernel, use_residual = tensors["linear.weight"].T, bool(settings.get("use_residual"))
            projects = use_residual and kernel.shape[0] != kernel.shape[1]
            residual = tensors["residual.weight"].T if projects else None
            return cls(kernel, tensors.get("linear.bias"), activation, use_residual, residual)
        except (LookupError, ValueError) as error:
            raise CheckpointError(f"{path} is not a dense layer: {error!r}") from error

    @classmethod
    def random(
        cls, in_features: int, out_features: int, seed: int = 0, use_bias: bool = True
    ) -> Dense:
        """Creates a layer without activation, with random weights as in PyTorch's `Linear`.

        Args:
            in_features: Number of input features.
            out_features: Number of output features.
            seed: Seed of the initialization.
            use_bias: Whether the layer has a bias.
        """
        bound, random = in_features**-0.5, np.random.default_rng(seed)
        kernel = random.uniform(-bound, bound, (in_features, out_features)).astype(np.float32)
        bias = random.uniform(-bound, bound, out_features).astype(np.float32) if use_bias else None
        return cls(kernel, bias, "Identity")

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        weights = {"kernel": self.kernel, "bias": self.bias, "residual": self.residual}
        return {name: value for name, value in weights.items() if value is not None}

    def __call__(self, vectors: jax.Array, weights: Weights | None = None) -> jax.Array:
        """Applies the layer to vectors.

        Args:
            vectors: The vectors, `(..., in_features)`.
            weights: Weights to use instead of those in the attributes.
        """
        weights = self.weights if weights is None else weights
        outputs = vectors @ weights["kernel"].astype(vectors.dtype)
        if "bias" in weights:
            outputs += weights["bias"].astype(outputs.dtype)
        outputs = ACTIVATIONS[self.activation](outputs)
        if not self.use_residual:
            return outputs
        if "residual" in weights:
            vectors = vectors @ weights["residual"].astype(vectors.dtype)
        return outputs + vectors

    def write(self, folder: Path, features: str) -> None:
        """Writes the layer into ``folder``. ``features`` is described in :meth:`read`."""
        settings: dict[str, Any] = {
            "in_features": self.kernel.shape[0],
            "out_features": self.kernel.shape[1],
            "bias": self.bias is not None,
            "activation_function": torch_activation(self.activation),
        }
        if self.use_residual:
            settings["use_residual"] = True
        if features != "sentence_embedding":
            settings |= {"module_input_name": features, "module_output_name": features}
        tensors = {"linear.weight": np.asarray(self.kernel).T}
        if self.bias is not None:
            tensors["linear.bias"] = np.asarray(self.bias)
        if self.residual is not None:
            tensors["residual.weight"] = np.asarray(self.residual).T
        write_module(folder, settings, tensors)


def write_module(
    folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
) -> None:
    """Writes a module: ``config.json`` and, if it has tensors, ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    if tensors:
        from safetensors.numpy import save_file

        arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(arrays, folder / files.SAFETENSORS, {"format": "pt"})
