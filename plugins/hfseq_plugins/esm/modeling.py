"""ESM-2 and ESM-1b (Lin et al., 2023) on Flax NNX. Module attributes are named as in checkpoints.

ESM is a pre-norm BERT for proteins, where each token is an amino acid residue. It has rotary or
learned position embeddings. The embeddings of masked tokens are set to zero and the others are
rescaled, as in dropout. One head predicts which residues are in contact, from the attention
weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import EsmConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.positions import Angles
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense
from hfseq_plugins.bert.sharding import RULES as BERT_RULES
from hfseq_plugins.megatron_bert.modeling import Output, norm
from hfseq_plugins.roberta import modeling as roberta

RULES = [
    *BERT_RULES,
    (r"norm_after/(scale|bias)$", "vector"),
    (r"contact_head/regression/(kernel|bias)$", "replicated"),
]
#: Share of tokens that were replaced by `<mask>` when the ESM models were pretrained.
MASKED_SHARE = 0.15 * 0.8


class Embeddings(nnx.Module):
    """Sum of word embeddings and optional position embeddings. Embeddings of padding are zero."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, config.hidden_size, nn.normal(config.initializer_range), rngs)

        self.word_embeddings = table(config.vocab_size)  # type: ignore[arg-type]  # set in all configurations
        use_table = config.position_embedding_type == "absolute"
        self.position_embeddings = (
            table(config.max_position_embeddings) if use_table else nnx.data(None)
        )
        self.layer_norm = norm(config) if config.emb_layer_norm_before else nnx.data(None)
        self.mask_token_id = config.mask_token_id if config.token_dropout else None

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array,  # (batch, length)
        segment_ids: jax.Array | None,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
    ) -> jax.Array:
        x = self.word_embeddings(input_ids)
        if self.mask_token_id is not None:
            # As in dropout, the embeddings of masked tokens are set to zero. The other embeddings
            # are scaled by (1 - share of masked tokens in pretraining) / (1 - share of masked
            # tokens in the document).
            is_masked = input_ids == self.mask_token_id
            if segment_ids is None:
                counts = [part.sum(1, keepdims=True) for part in (is_masked, attention_mask)]
            else:
                counts = [_in_document(part, segment_ids) for part in (is_masked, attention_mask)]
            share = counts[0] / jnp.maximum(counts[1], 1)
            scale = jnp.where(is_masked, 0.0, (1 - MASKED_SHARE) / jnp.maximum(1 - share, 1e-6))
            x = (x * scale[..., None]).astype(x.dtype)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids)
        x = x if self.layer_norm is None else self.layer_norm(x)
        return x * attention_mask[..., None].astype(x.dtype)


def _in_document(selected: jax.Array, segments: jax.Array) -> jax.Array:
    """Returns, for each token, the number of `selected` tokens in its document.

    Args:
        selected: Boolean or 0/1 array, `(batch, length)`.
        segments: Document number of each token, `(batch, length)`.

    Returns:
        Counts, `(batch, length)`.
    """
    length = segments.shape[1]

    def row(selected: jax.Array, segments: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(selected.astype(jnp.float32), segments, num_segments=length + 1)
        return sums[segments]

    return jax.vmap(row)(selected, segments)


class SelfAttention(nnx.Module):
    """Multi-head self-attention."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs, cross: bool = False):
        self.heads, width = config.num_attention_heads, config.hidden_size
        self.rate = config.attention_probs_dropout_prob
        self.causal = bool(config.is_decoder) and nn.is_causal(config)
        self.query, self.key, self.value = (dense(config, width, width, rngs) for _ in range(3))

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        if rotary_emb is not None:
            query, key = nn.rotate(query, rotary_emb), nn.rotate(key, rotary_emb)
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            causal=self.causal,
            dropout_rate=self.rate,  # type: ignore[arg-type]  # set in all configurations
            rngs=rngs,
            return_weights=return_weights,
        )
        return attn_output.reshape(x.shape), weights


class Attention(nnx.Module):
    """Norm, attention and its output projection."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.self = SelfAttention(config, rngs)
        self.output = Output(config, config.hidden_size, rngs)
        self.LayerNorm = norm(config)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.self(
            self.LayerNorm(x), rotary_emb, mask, rngs, None, return_weights
        )
        return self.output(attn_output, x, rngs), weights


class Intermediate(nnx.Module):
    """First half of the feed-forward block, with the exact GELU."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.dense = dense(config, config.hidden_size, config.intermediate_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return nn.activation("gelu")(self.dense(x))


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.attention, self.intermediate = Attention(config, rngs), Intermediate(config, rngs)
        self.output = Output(config, config.intermediate_size, rngs)
        self.LayerNorm = norm(config)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rotary_emb: Angles,
        mask: Mask,
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        x, weights = self.attention(x, rotary_emb, mask, rngs, return_weights)
        return self.output(self.intermediate(self.LayerNorm(x)), x, rngs), weights


class Encoder(nnx.Module):
    """The layers of the encoder, and a final norm."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.emb_layer_norm_after = norm(config)


class ContactHead(nnx.Module):
    """Predicts contacts from the attention weights of all layers and heads.

    The head is a logistic regression.
    """

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs):
        features = config.num_hidden_layers * config.num_attention_heads
        self.regression = dense(config, features, 1, rngs)
        self.end = config.eos_token_id

    def __call__(
        self,
        ids: jax.Array,  # (batch, length)
        attentions: jax.Array,  # (batch, layers * heads, length, length)
    ) -> jax.Array:
        """Returns contact probabilities, `(batch, length - 2, length - 2)`."""
        is_residue = (ids != self.end).astype(attentions.dtype)  # type: ignore[attr-defined]  # an array
        a = attentions * (is_residue[:, None] * is_residue[:, :, None])[:, None]
        a = a[..., 1:-1, 1:-1]  # without the first token and the last
        a = a + jnp.swapaxes(a, -1, -2)
        expected = a.sum(-1, keepdims=True) * a.sum(-2, keepdims=True)
        a = a - expected / a.sum((-1, -2), keepdims=True)
        return jax.nn.sigmoid(self.regression(jnp.moveaxis(a, 1, -1))[..., 0])


class EsmModule(nnx.Module):
    """ESM encoder without a head."""

    def __init__(self, config: EsmConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        position_type = config.position_embedding_type
        for unsupported, message in (
            (
                config.is_folding_model,
                "is_folding_model=True is not supported: ESMFold is not implemented",
            ),
            (config.add_cross_attention, "add_cross_attention=True is not supported for ESM"),
            (
                position_type not in ("absolute", "rotary"),
                f"position_embedding_type={position_type!r} is not supported (absolute, rotary)",
            ),
            (
                config.token_dropout and config.mask_token_id is None,
                "token_dropout=True requires mask_token_id",
            ),
        ):
            if unsupported:
                raise UsageError(message)
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)
        width = config.hidden_size // config.num_attention_heads
        self.rotary = nnx.static(nn.Rotary(config, width)) if position_type == "rotary" else None
        self.pooler = encoder.Pooler(config, rngs) if add_pooling_layer else nnx.data(None)
        self.contact_head = ContactHead(config, rngs)
        self.pad_token_id = config.pad_token_id or 0

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = position_ids
        if segment_ids is not None:
            mask = (segment_ids > 0).astype(jnp.int32)
            positions = nn.positions_in_segments(segment_ids)
        row_positions = jnp.arange(input_ids.shape[1])[None] if positions is None else positions
        rotary_emb = None if self.rotary is None else self.rotary(row_positions)
        if positions is None:
            positions = nn.positions_after_padding(input_ids, self.pad_token_id)
        elif segment_ids is not None:
            positions = jnp.where(mask > 0, positions + self.pad_token_id + 1, self.pad_token_id)
        x = self.embeddings(input_ids, mask, segment_ids, positions)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            x,
            rotary_emb,
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        x = self.encoder.emb_layer_norm_after(x)
        return out.FlaxBaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )

    def predict_contacts(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns contact probabilities, `(batch, length - 2, length - 2)`."""
        output = self(input_ids, attention_mask, output_attentions=True)
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        stacked = jnp.concatenate(output.attentions, axis=1)  # type: ignore[arg-type]  # requested above
        pair_mask = (mask[:, None] * mask[:, :, None])[:, None]
        return self.contact_head(input_ids, stacked * pair_mask.astype(stacked.dtype))


class EsmMixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in ESM checkpoints."""

    prefix = "esm"
    module = EsmModule
    esm: EsmModule

    def predict_contacts(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
    ) -> jax.Array:
        """Returns contact probabilities, `(batch, length - 2, length - 2)`."""
        return self.esm.predict_contacts(input_ids, attention_mask, rngs=rngs)


class MaskedLM(EsmMixin, roberta.MaskedLM):
    """Encoder with a masked language modeling head."""


class SequenceClassification(EsmMixin, roberta.SequenceClassification):
    """Encoder with a head for protein classification or regression."""


class TokenClassification(EsmMixin, roberta.TokenClassification):
    """Encoder with a head that classifies each residue."""


class FlaxEsmPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the ESM models: configuration, checkpoint names and call signature."""

    config_class = EsmConfig
    base_model_prefix = "esm"
    module_methods = ("__call__", "predict_contacts")
    weight_aliases = {"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"}
    # Rotary frequencies. Transformers 4 stored them for each layer, and Transformers 5.23 stores
    # them under a name with an asterisk.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"rotary_embeddings\.inv_freq$")

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns the rotary frequencies, which the PyTorch classes require."""
        config, prefix = self.config, "" if self.module_class is EsmModule else "esm."
        if config.position_embedding_type != "rotary":
            return {}
        width = config.hidden_size // config.num_attention_heads
        exponents = np.arange(0, width, 2, dtype=np.float32) / width
        frequencies = np.float32(1) / np.float32(config.rope_theta) ** exponents
        return {f"{prefix}rotary_embeddings.inv_freq": DerivedTensor(frequencies)}

    def max_length(self) -> int | None:
        """Returns the maximum sequence length, or `None` with rotary embeddings.

        Tokens do not use the first `pad_token_id + 1` position embeddings.
        """
        if self.config.position_embedding_type == "rotary":
            return None
        return self.config.max_position_embeddings - (self.config.pad_token_id or 0) - 1

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        position_ids: Input = None,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`.

        `input_ids` and `attention_mask` are `(batch, length)`. For packed rows, `segment_ids`,
        `(batch, length)`, is the number of the protein of each token.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **inputs,
        }
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def predict_contacts(
        self, input_ids: Input, attention_mask: Input = None, params: trees.Params | None = None
    ) -> Any:
        """Returns contact probabilities, `(batch, length - 2, length - 2)` (Lin et al., 2023).

        The first and the last token are not residues and are not included.
        """
        model_inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.run(model_inputs, params, method="predict_contacts")


class FlaxEsmModel(FlaxEsmPreTrainedModel):
    """ESM without a head. Returns hidden states and the pooled first token."""

    module_class = EsmModule


class FlaxEsmForMaskedLM(FlaxEsmPreTrainedModel):
    """ESM with a masked language modeling head."""

    module_class = MaskedLM


class FlaxEsmForSequenceClassification(FlaxEsmPreTrainedModel):
    """ESM for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxEsmForTokenClassification(FlaxEsmPreTrainedModel):
    """ESM for residue classification."""

    module_class = TokenClassification
