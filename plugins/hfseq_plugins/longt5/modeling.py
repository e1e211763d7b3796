"""LongT5 (Guo et al., 2021): T5 whose encoder attends in blocks; names are the checkpoint's.

A token sees those at most ``local_radius`` away, which lie in its own block and the two beside it.
With transient-global attention it also sees a summary of each fixed block of the text.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import LongT5Config

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import Seq2SeqGeneration, shift_tokens_right
from hfseq_plugins.t5 import modeling as t5
from hfseq_plugins.t5 import stack
from hfseq_plugins.t5.stack import norm

if TYPE_CHECKING:
    from hfseq.nn import Keys


def split_into_blocks(x: jax.Array, size: int) -> jax.Array:
    """Cut (batch, length, …) into (batch, blocks, size, …), the last one filled up with zeros."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % size)
    return jnp.pad(x, padding).reshape(x.shape[0], -1, size, *x.shape[2:])


def with_neighbors(blocks: jax.Array) -> jax.Array:
    """Join each block with the one before and the one after: (batch, blocks, 3 * size, …)."""
    count = blocks.shape[1]
    padded = jnp.pad(blocks, [(0, 0), (1, 1), *[(0, 0)] * (blocks.ndim - 2)])
    return jnp.concatenate([padded[:, i : i + count] for i in range(3)], axis=2)


def fold_blocks(x: jax.Array) -> jax.Array:
    """Make blocks rows of a batch: (batch, blocks, …) to (batch * blocks, …)."""
    return x.reshape(-1, *x.shape[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summaries:
    """The fixed blocks of a text: which one tokens belong to, and which ones there are.

    ``blocks`` (batch, length) are numbers, -1 for padding and where no block is full; tokens after
    the last full block belong to that one. ``there`` is (batch, blocks).
    """

    blocks: jax.Array
    there: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def of(self, x: jax.Array) -> jax.Array:
        """Sum the tokens of each block: (batch, length, features) to (batch, blocks, features)."""
        count = self.there.shape[1]
        real = jnp.where((self.blocks >= 0)[..., None], x, 0)
        sums = split_into_blocks(real, self.size).sum(2)
        last = self.blocks.max(1, keepdims=True)
        number = jnp.arange(sums.shape[1])[None]
        rest = jnp.where((number > last)[..., None], sums, 0).sum(1, keepdims=True)
        sums = jnp.where((number == last)[..., None], sums + rest, sums)
        return jnp.where(self.there[..., None], sums[:, :count], 0)


def block_summaries(mask: jax.Array, size: int) -> Summaries:
    """Find the fixed blocks of ``size`` tokens by the boolean ``mask`` (batch, length)."""
    length = mask.shape[1]
    own = jnp.arange(length) // size
    ends = mask & (jnp.arange(length) % size == size - 1)
    last = ends.sum(1, keepdims=True) - 1
    blocks = jnp.where(mask, jnp.minimum(own, last), -1)
    there = jnp.arange(length // size)[None] <= blocks.max(1, keepdims=True)
    return Summaries(blocks, there, size)


class LocalAttention(stack.Attention):
    """Attention of each block to itself and its neighbours.

    What is seen and the bias come with a row for each block (:meth:`EncoderStack.seen`).
    """

    def __init__(self, config: LongT5Config, rngs: nnx.Rngs, biased: bool):
        super().__init__(config, rngs, biased=biased)
        self.block = config.local_radius + 1

    def __call__(self, x, source, mask, bias, rngs, return_weights=False):
        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], self.kv_heads, self.head_dim)

        seen, summary = mask
        query = split_into_blocks(split(self.q(x)), self.block)
        key, value = (
            with_neighbors(split_into_blocks(split(part(x)), self.block))
            for part in (self.k, self.v)
        )
        if summary is not None:
            summed = self.global_input_layer_norm(summary.of(x))
            key, value = (
                jnp.concatenate(  # every block sees all of the summaries
                    [own, jnp.repeat(split(part(summed))[:, None], own.shape[1], axis=1)], axis=2
                )
                for own, part in ((key, self.k), (value, self.v))
            )
        mixed, weights = nn.attend(
            fold_blocks(query),
            fold_blocks(key),
            fold_blocks(value),
            mask=seen,
            bias=bias,
            scale=1.0,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        if weights is not None:
            weights = weights.reshape(x.shape[0], -1, *weights.shape[1:])
        return self.o(
            mixed.reshape(x.shape[0], -1, self.o.kernel.shape[0])[:, : x.shape[1]]
        ), weights


class TransientGlobalAttention(LocalAttention):
    """The same, and attention to a summary of each fixed block, the sum of its tokens."""

    def __init__(self, config: LongT5Config, rngs: nnx.Rngs, biased: bool):
        super().__init__(config, rngs, biased)
        init = nn.normal(config.initializer_factor * (config.num_heads * config.d_kv) ** -0.5)
        table = (config.relative_attention_num_buckets, config.num_heads, init, rngs)
        self.global_relative_attention_bias = nn.Embed(*table) if biased else nnx.data(None)
        self.global_input_layer_norm = norm(config)


#: By the configuration's ``encoder_attention_type``: the checkpoint's name, and the class.
ATTENTION_TYPES = {
    "local": ("LocalSelfAttention", LocalAttention),
    "transient-global": ("TransientGlobalSelfAttention", TransientGlobalAttention),
}


class SelfAttention(nnx.Module):
    """Norm, attention in blocks, residual."""

    def __init__(self, config: LongT5Config, rngs: nnx.Rngs, causal: bool, biased: bool):
        kind = config.encoder_attention_type
        if kind not in ATTENTION_TYPES:
            raise UsageError(
                f"encoder_attention_type='{kind}' in the configuration is unknown "
                f"(known: {', '.join(ATTENTION_TYPES)})"
            )
        self.name, made = ATTENTION_TYPES[kind]
        setattr(self, self.name, made(config, rngs, biased))
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    @property
    def attention(self) -> LocalAttention:
        """The attention under its checkpoint name."""
        return getattr(self, self.name)

    def __call__(self, x, mask, bias, rngs, return_weights):
        mixed, weights = self.attention(self.layer_norm(x), None, mask, bias, rngs, return_weights)
        return x + self.dropout(mixed, rngs), weights


class EncoderBlock(stack.Block):
    """Attention in blocks, feed-forward."""

    own = SelfAttention


class EncoderStack(stack.Stack):
    """The encoder. Its blocks share what they see and the biases of the first one's tables."""

    kind = EncoderBlock

    def __init__(self, config: LongT5Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.size, self.buckets = config.local_radius + 1, config.relative_attention_num_buckets
        self.summarised = (
            config.global_block_size if config.encoder_attention_type != "local" else None
        )

    def bias(self, name: str, queries: int, keys: int, start: int) -> jax.Array:
        """Return the bias of a table that the first block holds, (1, heads, queries, keys)."""
        table = getattr(self.first_attention.attention, name).embedding[...]
        return nn.relative_position_bias(
            table.reshape(table.shape[-2:]),
            queries,
            keys,
            start,
            bidirectional=True,
            max_distance=self.max_distance,
        )

    def seen(
        self, mask: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[tuple[jax.Array, Summaries | None], jax.Array]:
        """Return what each block's tokens see and the summaries they do, and the bias.

        ``mask`` (batch, length) is boolean. The first is (batch * blocks, 1, size, keys), the bias
        (batch * blocks, heads, size, keys), or 1 for the first axis.
        """
        size = self.size
        near = abs(jnp.arange(3 * size) - jnp.arange(size)[:, None] - size) < size
        shown = with_neighbors(split_into_blocks(mask, size))[:, :, None] & near
        if segment_ids is not None:
            documents = split_into_blocks(segment_ids, size)
            shown &= documents[..., None] == with_neighbors(documents)[:, :, None]
        bias = self.bias("relative_attention_bias", size, 3 * size, size)
        if self.summarised is None or mask.shape[1] < self.summarised:
            return (fold_blocks(shown)[:, None], None), bias
        if segment_ids is not None:
            raise UsageError(
                "transient-global attention takes no packed rows: the summaries would join their "
                "documents. Leave out packing, or take encoder_attention_type='local'"
            )
        summary = block_summaries(mask, self.summarised)
        count = summary.there.shape[1]
        all_seen = jnp.broadcast_to(summary.there[:, None, None], (*shown.shape[:3], count))
        table = self.bias("global_relative_attention_bias", count, count, 0)[0]
        beside = table[:, jnp.maximum(summary.blocks, 0)]  # (heads, batch, length, summaries)
        beside = fold_blocks(split_into_blocks(beside.transpose(1, 2, 0, 3), size)).swapaxes(1, 2)
        near_bias = jnp.broadcast_to(bias, (beside.shape[0], *bias.shape[1:]))
        shown = jnp.concatenate([shown, all_seen], -1)
        return (fold_blocks(shown)[:, None], summary), jnp.concatenate([near_bias, beside], -1)

    def __call__(self, embedded, attention_mask=None, segment_ids=None, **options: Any):
        if attention_mask is None:
            attention_mask = jnp.ones(embedded.shape[:2], bool)
        mask, bias = self.seen(attention_mask != 0, segment_ids)
        return super().__call__(embedded, mask, bias=bias, **options)


class WithLongEncoder:
    """An encoder that takes the mask of its tokens as it is."""

    stack: ClassVar[Any] = EncoderStack

    def encode(
        self,
        input_ids,
        attention_mask=None,
        segment_ids=None,
        *,
        rngs: Keys | None = None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        """Run the encoder."""
        return self.encoder(
            self.shared(input_ids),
            attention_mask,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class EncoderDecoder(WithLongEncoder, t5.EncoderDecoder):
    """LongT5 without a head."""


class ConditionalGeneration(WithLongEncoder, t5.ConditionalGeneration):
    """Next-token prediction in the decoder."""


class FlaxLongT5PreTrainedModel(t5.FlaxT5PreTrainedModel):
    """Base of the LongT5 classes."""

    config_class = LongT5Config


class FlaxLongT5Model(FlaxLongT5PreTrainedModel):
    """LongT5 without a head: hidden states of decoder and encoder."""

    module_class = EncoderDecoder


class FlaxLongT5ForConditionalGeneration(Seq2SeqGeneration, FlaxLongT5PreTrainedModel):
    """LongT5 with its language-modelling head: summaries of long texts."""

    module_class = ConditionalGeneration
    checkpoint_options = t5.FlaxT5ForConditionalGeneration.checkpoint_options


__all__ = [
    "FlaxLongT5ForConditionalGeneration",
    "FlaxLongT5Model",
    "FlaxLongT5PreTrainedModel",
    "shift_tokens_right",
]
