"""The attention of the Differential Transformer (Ye et al., 2024, https://arxiv.org/abs/2410.05258).

Heads come in pairs. A pair mixes values of twice the head's width with the difference of its two
softmax maps, ``A1 - lambda A2``, and normalises the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq import nn
from hfseq.nn.layers import dropout
from hfseq.nn.scores import attention_weights, softmax_scale
from hfseq.nn.visible import as_visible

if TYPE_CHECKING:
    from hfseq_plugins.bart.layers import Attention
    from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig

EPSILON = 1e-5
NAMES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def initial_lambdas(depth: int) -> jax.Array:
    """Return ``0.8 - 0.6 exp(-0.3 (l - 1))`` for the layers l = 1 … ``depth`` (section 3.1)."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.arange(depth, dtype=jnp.float32))


class DifferentialMix:
    """The mixing of values, in place of ``softmax(q k) v``.

    ``lambda`` is a number a layer, ``exp(q1 k1) - exp(q2 k2) + initial``, of four trained vectors;
    ``initial`` is fixed by the depth of the layer and scales the result too.
    """

    def __init__(
        self: Attention, config: WMTTransformerConfig, heads: int, rngs: nnx.Rngs, **kind: bool
    ):
        super().__init__(config, heads, rngs, **kind)  # type: ignore[call-arg]
        for name in NAMES:
            drawn = nn.normal(0.1)(rngs.params(), (self.head_dim,), jnp.float32)
            setattr(self, name, nnx.Param(drawn))
        self.head_norm = nn.RMSNorm(2 * self.head_dim, EPSILON)

    def mix(
        self: Attention, query, key, value, *, initial, mask=None, causal=False, dropout_rate=0.0,
        rngs=None, return_weights=False,
    ):  # fmt: skip
        """Mix: (batch, queries, heads, head_dim), and the difference of the maps if asked for.

        The batch of ``query`` may be a multiple of that of ``key``, as in
        :func:`hfseq.nn.attend`. The weights are (batch, pairs, queries, keys).
        """
        rows, keys = key.shape[:2]
        folded = query.reshape(rows, -1, *query.shape[2:])
        visible = as_visible(mask, causal)
        maps = attention_weights(folded, key, visible, scale=softmax_scale(None, query))
        first, second = maps[:, 0::2], maps[:, 1::2]
        weights = first - self.strength(initial).astype(maps.dtype) * second
        weights = dropout(weights, dropout_rate, rngs)
        pairs = value.reshape(rows, keys, -1, 2 * self.head_dim)
        mixed = jnp.einsum("bhqs,bshd->bqhd", weights, pairs, preferred_element_type=jnp.float32)
        mixed = self.head_norm(mixed) * (1.0 - initial)
        seeing = visible.sees_any(folded.shape[1], keys)
        if seeing is not None:  # as in attend: between dropout and product it costs bits
            mixed = jnp.where(seeing.swapaxes(1, 2), mixed, 0)
            weights = jnp.where(seeing, weights, 0) if return_weights else weights
        mixed = mixed.astype(value.dtype).reshape(query.shape)
        return mixed, self._by_query(weights, query) if return_weights else None

    def strength(self: Attention, initial: jax.Array) -> jax.Array:
        """Return lambda, a float32 number."""
        q1, k1, q2, k2 = (getattr(self, name)[...].astype(jnp.float32) for name in NAMES)
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + initial

    @staticmethod
    def _by_query(weights: jax.Array, query: jax.Array) -> jax.Array:
        """Give every beam its own rows of weights again."""
        rows, pairs, _, keys = weights.shape
        batch, queries = query.shape[:2]
        apart = weights.reshape(rows, pairs, batch // rows, queries, keys).swapaxes(1, 2)
        return apart.reshape(batch, pairs, queries, keys)
