"""Weights of TransformerEngine's Flax modules (examples/jax/encoder) in the names of this model.

The trees are those of ``te_flax.TransformerLayer`` (an encoder layer with LayerNorm, one group of
keys and values a head, the fused product of query, key and value) between ``nn.Embed`` and the
example's head. TransformerEngine itself is not needed.
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
# The dense layers of the example's head, and ours.
HEAD = {"DenseGeneral_0": "flatten", "DenseGeneral_1": "dense", "Dense_0": "out_proj"}


def from_transformer_engine(params: Tree, config: Fp8EncoderConfig) -> dict[str, Any]:
    """Return the parameters of this model for ``params``, the example's collection ``params``.

    **Arguments:** ``params`` a nested dict of arrays (or boxes with ``.value``) with ``Embed_0``,
    ``TransformerLayer_0``, … and, for a classifier, ``DenseGeneral_0``, ``DenseGeneral_1``,
    ``Dense_0``; ``config`` an ``Fp8EncoderConfig``, whose preset ``te`` has the example's options.

    **Returns** float32 NumPy arrays: the tree of ``FlaxFp8EncoderForSequenceClassification`` for
    ``head="te_flatten"``, else that of ``FlaxFp8EncoderModel`` without its pooler, which the
    example has not.

    The example does not divide its attention logits by ``sqrt(head_dim)`` and this model does, so
    the query's kernel is multiplied by it (and its bias, if any). What the configuration has and
    TransformerEngine has not (biases, tables of positions and token types) is zero. Scales and
    histories of its FP8 recipes are not taken over: training calibrates its own.

    **Raises:** WeightsError that lists all parameters that are absent, left over or of another
    shape.
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
    classifies = config.head == "te_flatten"
    kind = FlaxFp8EncoderForSequenceClassification if classifies else FlaxFp8EncoderModel
    if classifies:
        flat = {f"bert/{name}": value for name, value in flat.items()}
        for theirs, ours in HEAD.items():
            flat[f"classifier/{ours}/kernel"] = reader.take(f"{theirs}/kernel")
            flat[f"classifier/{ours}/bias"] = reader.take(f"{theirs}/bias", optional=True)
    return reader.fit(flat, kind)


def _part(stacked: np.ndarray | None, place: int, factor: float = 1.0) -> np.ndarray | None:
    """Return one of the products that lie stacked on the last axis but one."""
    if stacked is None or stacked.ndim < 2 or place >= stacked.shape[-2]:
        return None
    return stacked[..., place, :] * np.float32(factor)


class _Reader:
    """A flat view of the foreign tree that notes what was read and what was absent."""

    def __init__(self, params: Tree, config: Fp8EncoderConfig):
        self.config = config
        self.flat = {  # out of the boxes of logical partitioning
            name: np.asarray(getattr(value, "value", value), np.float32)
            for name, value in flatten_dict(params, sep="/").items()
        }
        self.unread, self.problems = set(self.flat), list[str]()

    def take(self, name: str, optional: bool = False) -> np.ndarray | None:
        """Return the parameter ``name``, or None where there is none."""
        self.unread.discard(name)
        if name not in self.flat and not optional:
            self.problems.append(f"{name} is absent")
        return self.flat.get(name)

    def expect_products(self, name: str, count: int) -> None:
        """Note if ``name`` does not hold ``count`` products, stacked on the last axis but one."""
        shape = self.flat[name].shape if name in self.flat else None
        if shape is not None and (len(shape) != 3 or shape[1] != count):
            self.problems.append(
                f"{name} has the shape {shape}, expected (features, {count}, features)"
            )

    def layer(self, name: str) -> dict[str, np.ndarray | None]:
        """Return one layer, by our names below ``encoder/layer/{i}``."""
        config = self.config
        scale = math.sqrt(config.hidden_size // config.num_attention_heads)
        block, mlp = f"{name}/attention", f"{name}/mlp"
        fused = self.take(f"{block}/qkv/kernel")
        bias = self.take(f"{block}/qkv/bias", optional=True)
        wide = self.take(f"{mlp}/wi_kernel")
        wide_bias = self.take(f"{mlp}/wi_bias", optional=True)
        self.expect_products(f"{block}/qkv/kernel", 3)
        self.expect_products(f"{mlp}/wi_kernel", 2 if config.gated_mlp else 1)
        found = {
            "attention/ln/scale": self.take(f"{block}/qkv/scale"),
            "attention/ln/bias": self.take(f"{block}/qkv/ln_bias"),
            "attention/output/dense/kernel": self.take(f"{block}/out/kernel"),
            "attention/output/dense/bias": self.take(f"{block}/out/bias", optional=True),
            "ln/scale": self.take(f"{mlp}/scale"),
            "ln/bias": self.take(f"{mlp}/ln_bias"),
            "output/dense/kernel": self.take(f"{mlp}/wo_kernel"),
            "output/dense/bias": self.take(f"{mlp}/wo_bias", optional=True),
        }
        for place, part in enumerate(("query", "key", "value")):
            factor = scale if part == "query" else 1.0
            found[f"attention/self/{part}/kernel"] = _part(fused, place, factor)
            found[f"attention/self/{part}/bias"] = _part(bias, place, factor)
        for place, part in enumerate(("dense", "up") if config.gated_mlp else ("dense",)):
            found[f"intermediate/{part}/kernel"] = _part(wide, place)
            found[f"intermediate/{part}/bias"] = _part(wide_bias, place)
        return found

    def fit(
        self, flat: dict[str, np.ndarray | None], kind: type[FlaxFp8EncoderPreTrainedModel]
    ) -> dict[str, Any]:
        """Nest ``flat`` as ``kind`` has it, with zeros for what only this model has."""
        tree = kind(self.config, _do_init=False).params_shape_tree
        shapes = {name: leaf.shape for name, leaf in flatten_dict(tree, sep="/").items()}
        problems = self.problems + [
            f"{name} has no place in this configuration" for name in sorted(self.unread)
        ]
        for name, value in flat.items():
            expected = shapes.get(name)
            if value is None:
                continue
            if expected is None:
                if value.any():
                    problems.append(f"{name} is not zero, but this configuration has none")
            elif value.shape != expected:
                problems.append(f"{name} has the shape {value.shape}, expected {expected}")
        if problems:
            raise WeightsError(
                "TransformerEngine's parameters do not fit the configuration:\n  "
                + "\n  ".join(problems)
            )
        values = {
            name: np.zeros(shape, np.float32) if flat.get(name) is None else flat[name]
            for name, shape in shapes.items()
            if flat.get(name) is not None or not name.startswith("pooler/")
        }
        return unflatten_dict(values, sep="/")


__all__ = ["from_transformer_engine"]
