"""LongT5 (Guo et al., 2021, https://arxiv.org/abs/2112.07916): T5 with block-local attention.

In the encoder, a token attends to the tokens at a distance of at most `local_radius`. These are in
the same block of tokens or in a neighboring one. With transient-global attention, the text is also
divided into *global blocks*, and each token also attends to one summary vector per global block.
Module attributes are named as in checkpoints.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import LongT5Config, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import shift_tokens_right
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.t5 import modeling as t5
from hfseq_plugins.t5 import stack
from hfseq_plugins.t5.stack import norm


def split_into_blocks(x: jax.Array, size: int) -> jax.Array:
    """Splits `(batch, length, ...)` into `(batch, blocks, size, ...)`.

    The last block is padded with zeros.
    """
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % size)
    return jnp.pad(x, padding).reshape(x.shape[0], -1, size, *x.shape[2:])


def with_neighbors(blocks: jax.Array) -> jax.Array:
    """Concatenates each block with its two neighbors, to `(batch, blocks, 3 * size, ...)`."""
    count = blocks.shape[1]
    padded = jnp.pad(blocks, [(0, 0), (1, 1), *[(0, 0)] * (blocks.ndim - 2)])
    return jnp.concatenate([padded[:, i : i + count] for i in range(3)], axis=2)


def fold_blocks(x: jax.Array) -> jax.Array:
    """Reshapes `(batch, blocks, ...)` to `(batch * blocks, ...)`."""
    return x.reshape(-1, *x.shape[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summaries:
    """Assigns tokens to global blocks. A block's summary is the sum of its hidden states.

    Attributes:
        blocks: Index of the block of each token, `(batch, length)`. Tokens after the last full
            block belong to that block. The index is -1 for padding, and for all tokens of a row
            that has no full block.
        exists: Whether each row has tokens in each block, `(batch, blocks)`.
        size: Number of tokens per block.
    """

    blocks: jax.Array
    exists: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def sum_blocks(self, x: jax.Array) -> jax.Array:
        """Sums the tokens of each block.

        Args:
            x: Hidden states, `(batch, length, hidden)`.

        Returns:
            The sums, `(batch, blocks, hidden)`.
        """
        count = self.exists.shape[1]
        tokens = jnp.where((self.blocks >= 0)[..., None], x, 0)
        sums = split_into_blocks(tokens, self.size).sum(2)
        last = self.blocks.max(1, keepdims=True)
        number = jnp.arange(sums.shape[1])[None]
        remainder = jnp.where((number > last)[..., None], sums, 0).sum(1, keepdims=True)
        sums = jnp.where((number == last)[..., None], sums + remainder, sums)
        return jnp.where(self.exists[..., None], sums[:, :count], 0)


def block_summaries(mask: jax.Array, size: int) -> Summaries:
    """Assigns tokens to blocks of `size` tokens.

    Args:
        mask: Boolean mask of real tokens, `(batch, length)`.
        size: Number of tokens per block.
    """
    length = mask.shape[1]
    block_numbers = jnp.arange(length) // size
    ends = mask & (jnp.arange(length) % size == size - 1)
    last = ends.sum(1, keepdims=True) - 1
    blocks = jnp.where(mask, jnp.minimum(block_numbers, last), -1)
    exists = jnp.arange(length // size)[None] <= blocks.max(1, keepdims=True)
    return Summaries(blocks, exists, size)


class LocalAttention(stack.Attention):
    """Attention of each block to itself and its neighbors.

    The batch axis of mask and bias has one entry per block of each row, see
    :meth:`EncoderStack.mask_and_bias`.
    """

    if TYPE_CHECKING:  # only subclasses with global attention have this attribute
        global_input_layer_norm: nn.RMSNorm

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, biased: bool):
        super().__init__(config, rngs, biased=biased)
        self.block = config.local_radius + 1

    def __call__(  # type: ignore[override]  # self-attention with the masks of all blocks
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: None,
        mask: tuple[jax.Array, Summaries | None],
        bias: jax.Array | None,  # (1 or batch * blocks, heads, size, keys)
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], self.kv_heads, self.head_dim)

        visible, summary = mask
        query = split_into_blocks(split(self.q(x)), self.block)
        key, value = (
            with_neighbors(split_into_blocks(split(projection(x)), self.block))
            for projection in (self.k, self.v)
        )
        if summary is not None:
            summed = self.global_input_layer_norm(summary.sum_blocks(x))
            key, value = (
                jnp.concatenate(  # every block attends to all summaries
                    [local, jnp.repeat(split(projection(summed))[:, None], local.shape[1], axis=1)],
                    axis=2,
                )
                for local, projection in ((key, self.k), (value, self.v))
            )
        attn_output, weights = nn.attend(
            fold_blocks(query),
            fold_blocks(key),
            fold_blocks(value),
            mask=visible,
            bias=bias,
            scale=1.0,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        if weights is not None:
            weights = weights.reshape(x.shape[0], -1, *weights.shape[1:])
        return self.o(
            attn_output.reshape(x.shape[0], -1, self.o.kernel.shape[0])[:, : x.shape[1]]
        ), weights


class TransientGlobalAttention(LocalAttention):
    """Local attention in which each token also attends to the summaries of all global blocks."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, biased: bool):
        super().__init__(config, rngs, biased)
        init = nn.normal(config.initializer_factor * (config.num_heads * config.d_kv) ** -0.5)
        table = (config.relative_attention_num_buckets, config.num_heads, init, rngs)
        self.global_relative_attention_bias = nn.Embed(*table) if biased else nnx.data(None)
        self.global_input_layer_norm = norm(config)


#: The name in checkpoints and the class for each `encoder_attention_type` of the configuration.
ATTENTION_TYPES = {
    "local": ("LocalSelfAttention", LocalAttention),
    "transient-global": ("TransientGlobalSelfAttention", TransientGlobalAttention),
}


class SelfAttention(nnx.Module):
    """Pre-norm block-local attention with residual connection."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs, causal: bool, biased: bool):
        attention_type = config.encoder_attention_type
        if attention_type not in ATTENTION_TYPES:
            raise UsageError(
                f"encoder_attention_type='{attention_type}' in the configuration is unknown "
                f"(known: {', '.join(ATTENTION_TYPES)})"
            )
        self.name, attention_class = ATTENTION_TYPES[attention_type]
        setattr(self, self.name, attention_class(config, rngs, biased))
        self.layer_norm, self.dropout = norm(config), nn.Dropout(config.dropout_rate)

    @property
    def attention(self) -> LocalAttention:
        """The attention module, whose attribute name depends on the attention type."""
        return getattr(self, self.name)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: tuple[jax.Array, Summaries | None],
        bias: jax.Array | None,  # (1 or batch * blocks, heads, size, keys)
        rngs: Keys | None,
        return_weights: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(
            self.layer_norm(x), None, mask, bias, rngs, return_weights
        )
        return x + self.dropout(attn_output, rngs), weights


class EncoderBlock(stack.Block):
    """Block-local self-attention and feed-forward."""

    attention_class = SelfAttention


class EncoderStack(stack.Stack):
    """The encoder. All layers use the same mask and the position biases of the first layer."""

    block_class = EncoderBlock

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.size, self.buckets = config.local_radius + 1, config.relative_attention_num_buckets
        self.global_block_size = (
            config.global_block_size if config.encoder_attention_type != "local" else None
        )

    def bias(self, name: str, queries: int, keys: int, start: int) -> jax.Array:
        """Returns a relative position bias of the first layer, `(1, heads, queries, keys)`.

        Args:
            name: Attribute name of the bias in the attention module.
            queries: Number of queries.
            keys: Number of keys.
            start: Index of the first query among the keys.
        """
        table = getattr(self.first_attention.attention, name).embedding[...]
        return nn.relative_position_bias(
            table.reshape(table.shape[-2:]),
            queries,
            keys,
            start,
            bidirectional=True,
            max_distance=self.max_distance,
        )

    def mask_and_bias(
        self, mask: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[tuple[jax.Array, Summaries | None], jax.Array]:
        """Returns the attention mask, the summaries of global blocks, and the position bias.

        The keys of a block of `size` queries are its own tokens, those of its two neighbors, and
        the summaries.

        Args:
            mask: Boolean mask of real tokens, `(batch, length)`.
            segment_ids: Document number of each token in packed rows, `(batch, length)`, or `None`.

        Returns:
            A pair. Its first element is a pair of the mask, `(batch * blocks, 1, size, keys)`, and
            the summaries or `None`. Its second element is the bias, `(batch * blocks, heads, size,
            keys)` with summaries and `(1, heads, size, keys)` without.

        Raises:
            UsageError: Attention is transient-global, and the rows are packed.
        """
        size = self.size
        near = abs(jnp.arange(3 * size) - jnp.arange(size)[:, None] - size) < size
        visible = with_neighbors(split_into_blocks(mask, size))[:, :, None] & near
        if segment_ids is not None:
            documents = split_into_blocks(segment_ids, size)
            visible &= documents[..., None] == with_neighbors(documents)[:, :, None]
        bias = self.bias("relative_attention_bias", size, 3 * size, size)
        if self.global_block_size is None or mask.shape[1] < self.global_block_size:
            return (fold_blocks(visible)[:, None], None), bias
        if segment_ids is not None:
            raise UsageError(
                "transient-global attention does not support packed rows, because a summary would "
                "mix documents. Disable packing, or use encoder_attention_type='local'"
            )
        summary = block_summaries(mask, self.global_block_size)
        count = summary.exists.shape[1]
        global_mask = jnp.broadcast_to(summary.exists[:, None, None], (*visible.shape[:3], count))
        table = self.bias("global_relative_attention_bias", count, count, 0)[0]
        global_bias = table[:, jnp.maximum(summary.blocks, 0)]  # (heads, batch, length, summaries)
        global_bias = fold_blocks(
            split_into_blocks(global_bias.transpose(1, 2, 0, 3), size)
        ).swapaxes(1, 2)
        local_bias = jnp.broadcast_to(bias, (global_bias.shape[0], *bias.shape[1:]))
        visible = jnp.concatenate([visible, global_mask], -1)
        bias = jnp.concatenate([local_bias, global_bias], -1)
        return (fold_blocks(visible)[:, None], summary), bias

    def __call__(  # type: ignore[override]  # computes mask and bias
        self,
        embedded: jax.Array,  # (batch, length, hidden)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        **options: Any,
    ) -> out.FlaxModelOutput:
        if attention_mask is None:
            attention_mask = jnp.ones(embedded.shape[:2], bool)
        mask, bias = self.mask_and_bias(attention_mask != 0, segment_ids)
        return super().__call__(
            embedded,
            mask,  # type: ignore[arg-type]  # passed on to LocalAttention
            bias=bias,
            **options,
        )


class LongEncoderMixin(t5.EncoderOnly):
    """Mixin with the encoder of LongT5, which computes its masks from `attention_mask`."""

    stack: ClassVar[Any] = EncoderStack

    def encode(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        """Runs the encoder."""
        return self.encoder(
            self.embed(self.encoder, input_ids),
            attention_mask,
            segment_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )


class EncoderDecoder(LongEncoderMixin, t5.EncoderDecoder):
    """Encoder and decoder without a head."""


class ConditionalGeneration(LongEncoderMixin, t5.ConditionalGeneration):
    """Encoder and decoder with a language modeling head."""


class FlaxLongT5PreTrainedModel(t5.FlaxT5PreTrainedModel):
    """Base class of the LongT5 models."""

    config_class = LongT5Config


class FlaxLongT5Model(FlaxLongT5PreTrainedModel):
    """LongT5 without a head. Returns the hidden states of decoder and encoder."""

    module_class = EncoderDecoder


class FlaxLongT5ForConditionalGeneration(
    t5.FlaxT5ForConditionalGeneration, FlaxLongT5PreTrainedModel
):
    """LongT5 with a language modeling head, for example for the summarization of long texts."""

    module_class = ConditionalGeneration


__all__ = [
    "FlaxLongT5ForConditionalGeneration",
    "FlaxLongT5Model",
    "FlaxLongT5PreTrainedModel",
    "shift_tokens_right",
]
