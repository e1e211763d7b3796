"""Weights of TransformerEngine's Flax modules (examples/jax/encoder) in the names of this model.

The trees are those of ``te_flax.TransformerLayer`` (an encoder layer with LayerNorm, one group of
keys and values a head, the fused product of query, key and value) between ``nn.Embed`` and the
example's head. TransformerEngine itself is not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

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
    reader = _Reader(_plain(params), config)
    flat = {"embeddings/word_embeddings/embedding": reader.take("Embed_0/embedding")}
    for number in range(config.num_hidden_layers):
        flat |= {
            f"encoder/layer/{number}/{name}": value
            for name, value in _layer(reader, f"TransformerLayer_{number}").items()
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
    return _fitted(flat, kind, config, reader)


def _layer(reader: _Reader, name: str) -> dict[str, np.ndarray | None]:
    """Return one layer, by our names below ``encoder/layer/{i}``."""
    config = reader.config
    heads = config.num_attention_heads
    scale = math.sqrt(config.hidden_size // heads)
    block, mlp = f"{name}/attention", f"{name}/mlp"
    fused = reader.take(f"{block}/qkv/kernel")
    bias = reader.take(f"{block}/qkv/bias", optional=True)
    wide = reader.take(f"{mlp}/wi_kernel")
    wide_bias = reader.take(f"{mlp}/wi_bias", optional=True)
    reader.expect_products(f"{block}/qkv/kernel", 3)
    reader.expect_products(f"{mlp}/wi_kernel", 2 if config.gated_mlp else 1)
    found = {
        "attention/ln/scale": reader.take(f"{block}/qkv/scale"),
        "attention/ln/bias": reader.take(f"{block}/qkv/ln_bias"),
        "attention/output/dense/kernel": reader.take(f"{block}/out/kernel"),
        "attention/output/dense/bias": reader.take(f"{block}/out/bias", optional=True),
        "ln/scale": reader.take(f"{mlp}/scale"),
        "ln/bias": reader.take(f"{mlp}/ln_bias"),
        "output/dense/kernel": reader.take(f"{mlp}/wo_kernel"),
        "output/dense/bias": reader.take(f"{mlp}/wo_bias", optional=True),
    }
    for place, part in enumerate(("query", "key", "value")):
        factor = scale if part == "query" else 1.0
        found[f"attention/self/{part}/kernel"] = _part(fused, place, factor)
        found[f"attention/self/{part}/bias"] = _part(bias, place, factor)
    for place, part in enumerate(("dense", "up") if config.gated_mlp else ("dense",)):
        found[f"intermediate/{part}/kernel"] = _part(wide, place)
        found[f"intermediate/{part}/bias"] = _part(wide_bias, place)
    return found


def _part(stacked: np.ndarray | None, place: int, factor: float = 1.0) -> np.ndarray | None:
    """Return one of the products that lie stacked on the last axis but one."""
    if stacked is None or stacked.ndim < 2 or place >= stacked.shape[-2]:
        return None
    return stacked[..., place, :] * np.float32(factor)


class _Reader:
    """A flat view of the foreign tree that notes what was read and what was absent."""

    def __init__(self, flat: dict[str, np.ndarray], config: Fp8EncoderConfig):
        self.flat, self.config = flat, config
        self.unread, self.problems = set(flat), list[str]()

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


def _plain(params: Tree, prefix: str = "") -> dict[str, np.ndarray]:
    """Flatten to ``a/b/c`` -> float32 array, out of the boxes of logical partitioning."""
    flat: dict[str, np.ndarray] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= _plain(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = np.asarray(getattr(value, "value", value), np.float32)
    return flat


def _fitted(
    flat: dict[str, np.ndarray | None],
    kind: type[FlaxFp8EncoderPreTrainedModel],
    config: Fp8EncoderConfig,
    reader: _Reader,
) -> dict[str, Any]:
    """Nest ``flat`` as ``kind`` has it, with zeros for what only this model has."""
    shapes = _shapes(kind(config, _do_init=False).params_shape_tree)
    problems = reader.problems + [
        f"{name} has no place in this configuration" for name in sorted(reader.unread)
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
    tree: dict[str, Any] = {}
    for name, shape in shapes.items():
        value = flat.get(name)
        if value is None:
            if re.match(r"pooler/", name):
                continue
            value = np.zeros(shape, np.float32)
        *above, leaf = name.split("/")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[leaf] = value
    return tree


def _shapes(tree: Tree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _shapes(value, f"{prefix}{name}/")
        else:
            found[prefix + name] = value.shape
    return found


__all__ = ["from_transformer_engine"]
