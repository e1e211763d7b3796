"""ESM-2 and ESM-1b (Lin et al., 2023) on Flax NNX; attribute names are the checkpoint's.

BERT with the norms in front of the blocks, for proteins: rotary positions or a table, tokens that
are hidden count as dropped, and a head that tells contacts from attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import EsmConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert.encoder import dense
from hfseq_plugins.bert.sharding import RULES as BERT_RULES
from hfseq_plugins.megatron_bert.modeling import Output, norm
from hfseq_plugins.roberta import modeling as roberta

RULES = [
    *BERT_RULES,
    (r"norm_after/(scale|bias)$", "vector"),
    (r"contact_head/regression/(kernel|bias)$", "replicated"),
]
#: The share of tokens that was hidden in training: all ESM models were trained so.
HIDDEN = 0.15 * 0.8


class Embeddings(nnx.Module):
    """Words, with places where there is a table; padding is zero."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, config.hidden_size, nn.normal(config.initializer_range), rngs)

        self.word_embeddings = table(config.vocab_size)
        placed = config.position_embedding_type == "absolute"
        self.position_embeddings = (
            table(config.max_position_embeddings) if placed else nnx.data(None)
        )
        self.layer_norm = norm(config) if config.emb_layer_norm_before else nnx.data(None)
        self.mask_token_id = config.mask_token_id if config.token_dropout else None

    def __call__(
        self, ids: jax.Array, mask: jax.Array, segments: jax.Array | None, positions: jax.Array
    ) -> jax.Array:
        x = self.word_embeddings(ids)
        if self.mask_token_id is not None:
            # As dropout: what is hidden is zero, and the rest is scaled to the share that training
            # hid, by the share of hidden tokens of its own document.
            hidden = ids == self.mask_token_id
            if segments is None:
                counts = [part.sum(1, keepdims=True) for part in (hidden, mask)]
            else:
                counts = [_in_document(part, segments) for part in (hidden, mask)]
            share = counts[0] / jnp.maximum(counts[1], 1)
            scale = jnp.where(hidden, 0.0, (1 - HIDDEN) / jnp.maximum(1 - share, 1e-6))
            x = (x * scale[..., None]).astype(x.dtype)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        x = x if self.layer_norm is None else self.layer_norm(x)
        return x * mask[..., None].astype(x.dtype)


def _in_document(counted: jax.Array, segments: jax.Array) -> jax.Array:
    """Return, for each token, how many of its document are ``counted``."""
    length = segments.shape[1]

    def row(counted: jax.Array, segments: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(counted.astype(jnp.float32), segments, num_segments=length + 1)
        return sums[segments]

    return jax.vmap(row)(counted, segments)


class SelfAttention(nnx.Module):
    """Attention of a protein to itself."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs, cross: bool = False):
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.rate, self.causal = config.attention_probs_dropout_prob, bool(config.is_decoder)
        self.query, self.key, self.value = (dense(config, width, width, rngs) for _ in range(3))

    def __call__(self, x, angles, mask, rngs, head_mask=None, return_weights=False):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        if angles is not None:
            query, key = nn.rotate(query, angles), nn.rotate(key, angles)
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=self.causal,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return mixed.reshape(x.shape), weights


class Attention(nnx.Module):
    """Norm, attention and its output projection."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.self = SelfAttention(config, rngs)
        self.output = Output(config, config.hidden_size, rngs)
        self.LayerNorm = norm(config)

    def __call__(self, x, angles, mask, rngs, return_weights=False):
        mixed, weights = self.self(self.LayerNorm(x), angles, mask, rngs, None, return_weights)
        return self.output(mixed, x, rngs), weights


class Intermediate(nnx.Module):
    """The wide half of the feed-forward block, with the exact GELU."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.intermediate_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.activation("gelu")(self.dense(x))


class Layer(nnx.Module):
    """Attention and feed-forward, a norm before each."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.attention, self.intermediate = Attention(config, rngs), Intermediate(config, rngs)
        self.output = Output(config, config.intermediate_size, rngs)
        self.LayerNorm = norm(config)

    def __call__(self, x, angles, mask, *, rngs, return_weights=False):
        x, weights = self.attention(x, angles, mask, rngs, return_weights)
        return self.output(self.intermediate(self.LayerNorm(x)), x, rngs), weights


class Encoder(nnx.Module):
    """The stack of layers, and a norm behind it."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.emb_layer_norm_after = norm(config)


class ContactHead(nnx.Module):
    """Which residues touch: a logistic regression on the attention of all heads."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        features = config.num_hidden_layers * config.num_attention_heads
        self.regression = dense(config, features, 1, rngs)
        self.end = config.eos_token_id

    def __call__(self, ids: jax.Array, attentions: jax.Array) -> jax.Array:
        real = (ids != self.end).astype(attentions.dtype)
        a = attentions * (real[:, None] * real[:, :, None])[:, None]
        a = a[..., 1:-1, 1:-1]  # without the first token and the last
        a = a + jnp.swapaxes(a, -1, -2)
        expected = a.sum(-1, keepdims=True) * a.sum(-2, keepdims=True)
        a = a - expected / a.sum((-1, -2), keepdims=True)
        return jax.nn.sigmoid(self.regression(jnp.moveaxis(a, 1, -1))[..., 0])


class EsmModule(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        kind = config.position_embedding_type
        for wrong, told in (
            (config.is_folding_model, "is_folding_model=True: ESMFold is not here"),
            (config.add_cross_attention, "add_cross_attention=True: ESM reads one protein here"),
            (
                kind not in ("absolute", "rotary"),
                f"position_embedding_type={kind!r}: absolute or rotary",
            ),
            (
                config.token_dropout and config.mask_token_id is None,
                "token_dropout=True needs mask_token_id",
            ),
        ):
            if wrong:
                raise UsageError(told)
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        width = config.hidden_size // config.num_attention_heads
        self.rotary = nnx.static(nn.Rotary(config, width)) if kind == "rotary" else None
        self.pooler = encoder.Pooler(config, rngs) if add_pooling_layer else nnx.data(None)
        self.contact_head = ContactHead(config, rngs)
        self.pad_token_id = config.pad_token_id or 0

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = position_ids
        if segment_ids is not None:
            mask = (segment_ids > 0).astype(jnp.int32)
            positions = nn.positions_in_segments(segment_ids)
        whole = jnp.arange(input_ids.shape[1])[None] if positions is None else positions
        angles = None if self.rotary is None else self.rotary(whole)
        if positions is None:
            positions = nn.positions_after_padding(input_ids, self.pad_token_id)
        elif segment_ids is not None:
            positions = jnp.where(mask > 0, positions + self.pad_token_id + 1, self.pad_token_id)
        x = self.embeddings(input_ids, mask, segment_ids, positions)
        x, weights, inputs = nn.run_layers(
            self.encoder.layer,
            x,
            angles,
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.encoder.emb_layer_norm_after(x)
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )

    def predict_contacts(self, input_ids, attention_mask=None, *, rngs=None):
        """Return how likely each two residues touch, (batch, residues, residues)."""
        output = self(input_ids, attention_mask, output_attentions=True)
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        stacked = jnp.concatenate(output.attentions, axis=1)
        both = (mask[:, None] * mask[:, :, None])[:, None]
        return self.contact_head(input_ids, stacked * both.astype(stacked.dtype))


class EsmMixin:
    """ESM's encoder under its checkpoint name."""

    prefix, module = "esm", EsmModule

    def predict_contacts(self, input_ids, attention_mask=None, *, rngs=None):
        """Return how likely each two residues touch."""
        return self.esm.predict_contacts(input_ids, attention_mask, rngs=rngs)


class MaskedLM(EsmMixin, roberta.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""


class SequenceClassification(EsmMixin, roberta.SequenceClassification):
    """A label (or a number) for the whole protein."""


class TokenClassification(EsmMixin, roberta.TokenClassification):
    """A label for every residue."""


class FlaxEsmPreTrainedModel(FlaxPreTrainedModel):
    """Base of the ESM classes: configuration, checkpoint names and the call."""

    config_class = EsmConfig
    base_model_prefix = "esm"
    module_methods = ("__call__", "predict_contacts")
    weight_aliases = {"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"}
    # Of Transformers 4 one a layer; Transformers 5.23 writes it under a name with an asterisk.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"rotary_embeddings\.inv_freq$")

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return the frequencies of the angles, which PyTorch would miss."""
        config, prefix = self.config, "" if self.module_class is EsmModule else "esm."
        if config.position_embedding_type != "rotary":
            return {}
        width = config.hidden_size // config.num_attention_heads
        exponents = np.arange(0, width, 2, dtype=np.float32) / width
        frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
        return {f"{prefix}rotary_embeddings.inv_freq": DerivedTensor(frequencies)}

    def max_length(self) -> int | None:
        """The table of places holds ``pad_token_id + 1`` that no token uses; angles have no end."""
        if self.config.position_embedding_type == "rotary":
            return None
        return self.config.max_position_embeddings - (self.config.pad_token_id or 0) - 1

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        dropout_rng: jax.Array | Keys | None = None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` and the mask are (batch, length). ``segment_ids`` (batch, length) numbers the
        proteins of packed rows.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def predict_contacts(self, input_ids, attention_mask=None, params=None):
        """Return how likely each two residues touch: (batch, length - 2, length - 2), 0 to 1.

        The first and the last token of a row are no residues. (Lin et al., 2023)
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.run(given, params, method="predict_contacts")


class FlaxEsmModel(FlaxEsmPreTrainedModel):
    """ESM without a head: hidden states and the pooled first token."""

    module_class = EsmModule


class FlaxEsmForMaskedLM(FlaxEsmPreTrainedModel):
    """ESM with the masked-LM head."""

    module_class = MaskedLM


class FlaxEsmForSequenceClassification(FlaxEsmPreTrainedModel):
    """ESM with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxEsmForTokenClassification(FlaxEsmPreTrainedModel):
    """ESM with a classifier on every residue."""

    module_class = TokenClassification
