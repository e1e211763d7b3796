"""Converts weights of TransformerEngine's Flax encoder (examples/jax/encoder) to this model.

The source model consists of `nn.Embed`, `te_flax.TransformerLayer` modules and the head of the
example. Its layers are encoder layers with LayerNorm, equal numbers of query and key-value heads,
and a fused projection of query, key and value. TransformerEngine does not have to be installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from hfseq.errors import WeightsError
from hfseq_plugins.fp8_encoder.modeling import (
    FlaxFp8EncoderForSequenceClassification,
    FlaxFp8EncoderModel,
    FlaxFp8EncoderPreTrainedModel,
)

if TYPE_CHECKING:
    from hfseq_plugins.fp8_encoder.configuration import Fp8EncoderConfig

Tree = Mapping[str, Any]
# The dense layers of the head. Maps the names in the example to those in this model.
HEAD = {"DenseGeneral_0": "flatten", "DenseGeneral_1": "dense", "Dense_0": "out_proj"}


def from_transformer_engine(params: Tree, config: Fp8EncoderConfig) -> dict[str, Any]:
    """Converts the parameters of TransformerEngine's encoder example.

    The example does not divide attention scores by `sqrt(head_dim)`, but this model does.
    Therefore the query's kernel and bias are multiplied by this factor. Parameters that the
    example lacks (biases, position and token-type embeddings) are zero. The scales of FP8 recipes
    are not converted: training calibrates new ones.

    Args:
        params: The collection `params` of the example, a nested dict. Its entries are `Embed_0`,
            `TransformerLayer_0`, … and, for a classifier, `DenseGeneral_0`, `DenseGeneral_1` and
            `Dense_0`. Leaves are arrays, or boxes with the array as `value`.
        config: The configuration of this model. The preset `te` has the example's options.

    Returns:
        Float32 NumPy arrays. With `head="te_flatten"` they are the parameters of
        `FlaxFp8EncoderForSequenceClassification`, otherwise those of `FlaxFp8EncoderModel` without
        the pooler, which the example lacks.

    Raises:
        WeightsError: Parameters are missing, unexpected, or of the wrong shape. The message lists
            all of them.
    """
    reader = _Reader(params, config)
    flat = {"embeddings/word_embeddings/embedding": reader.take("Embed_0/embedding")}
    for number in range(config.num_hidden_layers):
        flat |= {
            f"encoder/layer/{number}/{name}": value
            for name, value in reader.layer(f"TransformerLayer_{number}").items()
        }
    if config.final_norm:
        last = f"TransformerLayer_{config.num_hidden_layers - 1}/output_layernorm"
        flat["encoder/ln/scale"] = reader.take(f"{last}/scale")
        flat["encoder/ln/bias"] = reader.take(f"{last}/ln_bias")
    is_classifier = config.head == "te_flatten"
    model_class = FlaxFp8EncoderForSequenceClassification if is_classifier else FlaxFp8EncoderModel
    if is_classifier:
        flat = {f"bert/{name}": value for name, value in flat.items()}
        for theirs, ours in HEAD.items():
            flat[f"classifier/{ours}/kernel"] = reader.take(f"{theirs}/kernel")
            flat[f"classifier/{ours}/bias"] = reader.take(f"{theirs}/bias", optional=True)
    return reader.build_tree(flat, model_class)


def _kernel(stacked: np.ndarray | None, index: int, factor: float = 1.0) -> np.ndarray | None:
    """Returns one of several kernels or biases that are stacked on the second-to-last axis."""
    if stacked is None or stacked.ndim < 2 or index >= stacked.shape[-2]:
        return None
    return stacked[..., index, :] * np.float32(factor)


class _Reader:
    """Reads the example's parameters by path, and records unread and missing parameters."""

    def __init__(self, params: Tree, config: Fp8EncoderConfig):
        self.config = config
        self.flat = {  # `value` unwraps the boxes of logical partitioning
            name: np.asarray(getattr(value, "value", value), np.float32)
            for name, value in flatten_dict(params, sep="/").items()
        }
        self.unread, self.problems = set(self.flat), list[str]()

    def take(self, name: str, optional: bool = False) -> np.ndarray | None:
        """Returns a parameter, or None if it is missing."""
        self.unread.discard(name)
        if name not in self.flat and not optional:
            self.problems.append(f"{name} is missing")
        return self.flat.get(name)

    def expect_kernels(self, name: str, count: int) -> None:
        """Records a problem unless `name` contains `count` stacked kernels."""
        shape = self.flat[name].shape if name in self.flat else None
        if shape is not None and (len(shape) != 3 or shape[1] != count):
            self.problems.append(
                f"{name} has the shape {shape}, expected (features, {count}, features)"
            )

    def layer(self, name: str) -> dict[str, np.ndarray | None]:
        """Returns the parameters of a layer by their names in this model.

        The names are relative to `encoder/layer/{i}`.
        """
        config = self.config
        scale = math.sqrt(config.hidden_size // config.num_attention_heads)
        block, mlp = f"{name}/attention", f"{name}/mlp"
        fused = self.take(f"{block}/qkv/kernel")
        bias = self.take(f"{block}/qkv/bias", optional=True)
        up_kernel = self.take(f"{mlp}/wi_kernel")
        up_bias = self.take(f"{mlp}/wi_bias", optional=True)
        self.expect_kernels(f"{block}/qkv/kernel", 3)
        self.expect_kernels(f"{mlp}/wi_kernel", 2 if config.gated_mlp else 1)
        params = {
            "attention/ln/scale": self.take(f"{block}/qkv/scale"),
            "attention/ln/bias": self.take(f"{block}/qkv/ln_bias"),
            "attention/output/dense/kernel": self.take(f"{block}/out/kernel"),
            "attention/output/dense/bias": self.take(f"{block}/out/bias", optional=True),
            "ln/scale": self.take(f"{mlp}/scale"),
            "ln/bias": self.take(f"{mlp}/ln_bias"),
            "output/dense/kernel": self.take(f"{mlp}/wo_kernel"),
            "output/dense/bias": self.take(f"{mlp}/wo_bias", optional=True),
        }
        for index, part in enumerate(("query", "key", "value")):
            factor = scale if part == "query" else 1.0
            params[f"attention/self/{part}/kernel"] = _kernel(fused, index, factor)
            params[f"attention/self/{part}/bias"] = _kernel(bias, index, factor)
        for index, part in enumerate(("dense", "up") if config.gated_mlp else ("dense",)):
            params[f"intermediate/{part}/kernel"] = _kernel(up_kernel, index)
            params[f"intermediate/{part}/bias"] = _kernel(up_bias, index)
        return params

    def build_tree(
        self, flat: dict[str, np.ndarray | None], model_class: type[FlaxFp8EncoderPreTrainedModel]
    ) -> dict[str, Any]:
        """Returns the parameter tree of `model_class`, with zeros for missing parameters.

        Raises:
            WeightsError: The parameters do not match the configuration.
        """
        tree = model_class(self.config, _do_init=False).params_shape_tree
        shapes = {name: leaf.shape for name, leaf in flatten_dict(tree, sep="/").items()}
        problems = self.problems + [
            f"{name} is unexpected with this configuration" for name in sorted(self.unread)
        ]
        for name, value in flat.items():
            expected = shapes.get(name)
            if value is None:
                continue
            if expected is None:
                if value.any():
                    problems.append(f"{name} is not zero, but this configuration lacks it")
            elif value.shape != expected:
                problems.append(f"{name} has the shape {value.shape}, expected {expected}")
        if problems:
            raise WeightsError(
                "TransformerEngine's parameters do not match the configuration:\n  "
                + "\n  ".join(problems)
            )
        values = {
            name: np.zeros(shape, np.float32) if flat.get(name) is None else flat[name]
            for name, shape in shapes.items()
            if flat.get(name) is not None or not name.startswith("pooler/")
        }
        return unflatten_dict(values, sep="/")


__all__ = ["from_transformer_engine"]
