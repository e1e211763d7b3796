"""M2M100 (Fan et al., 2021) and NLLB (NLLB Team, 2022): pre-norm BART with sinusoidal positions.

The position of a token is the number of tokens before it, without padding. Padding has no position
embedding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import M2M100Config, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import Seq2SeqGeneration
from hfseq.nn import Keys
from hfseq_plugins.bart import heads, layers
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import fairseq_frequencies
from hfseq_plugins.pegasus.modeling import DecoderLayer, EncoderLayer


class Positions(nnx.Module):
    """Sinusoidal position embeddings, as in fairseq. They are computed for sequences of any length.

    The embedding of the first position is computed for the number `pad_token_id + 1`.
    """

    compute_dtype: Any = None

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        if config.pad_token_id is None:
            raise UsageError(
                "M2M100 needs a pad_token_id in the configuration, because positions do not count "
                "padding"
            )
        self.width, self.offset = config.d_model, config.pad_token_id + 1

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`. For -1, they are zero."""
        angles = (ids + self.offset)[..., None] * fairseq_frequencies(self.width)
        vectors = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        vectors = jnp.pad(vectors, (*((0, 0) for _ in ids.shape), (0, self.width % 2)))
        vectors = jnp.where(ids[..., None] < 0, 0.0, vectors)
        return vectors.astype(self.compute_dtype or jnp.float32)


class Stack(layers.Stack):
    """Base class of encoder and decoder: no norm after the embeddings, a norm after the layers."""

    positions = Positions
    embedding_norm, norm_first = False, True

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.pad = config.pad_token_id

    def embed(
        self,
        shared: nn.Embed | None,
        ids: jax.Array,  # (batch, length)
        positions: jax.Array | None,  # (batch, length)
        segments: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        """Returns the sum of token and position embeddings. Default positions skip padding."""
        if positions is None and segments is not None:
            positions = nn.positions_in_segments(segments)
        elif positions is None:
            positions = nn.positions_after_padding(ids, self.pad) - self.pad - 1
        positions = jnp.where(ids == self.pad, -1, positions)
        return super().embed(shared, ids, positions, segments, rngs)


class Encoder(Stack, layers.Encoder):
    """M2M100 encoder with a final norm."""

    layer = EncoderLayer


class Decoder(Stack, layers.Decoder):
    """M2M100 decoder with a final norm."""

    layer = DecoderLayer


class M2M100Module(heads.BartModule):
    """Encoder and decoder without a head."""

    stack_classes = (Encoder, Decoder)


class ConditionalGeneration(heads.ConditionalGeneration):
    """Encoder-decoder with a language modeling head. Its logits have no bias."""

    module = M2M100Module

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.final_logits_bias = nnx.data(None)  # type: ignore[arg-type]  # the logits have none

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        return self.model.decoder_embedding.attend(x) if self.lm_head is None else self.lm_head(x)


class FlaxM2M100PreTrainedModel(FlaxBartPreTrainedModel):
    """Base class of the M2M100 models."""

    config_class = M2M100Config
    position_table = ""
    ignored_weights = (*FlaxBartPreTrainedModel.ignored_weights, r"embed_positions\.weights$")


class FlaxM2M100Model(FlaxM2M100PreTrainedModel):
    """M2M100 without a head. Returns decoder and encoder hidden states."""

    module_class = M2M100Module
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxM2M100ForConditionalGeneration(Seq2SeqGeneration, FlaxM2M100PreTrainedModel):
    """M2M100 with a language modeling head, for translation."""

    module_class = ConditionalGeneration
