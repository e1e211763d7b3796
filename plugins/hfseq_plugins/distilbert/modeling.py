"""DistilBERT (Sanh et al., 2019) on Flax NNX; attribute names are the checkpoint's.

BERT without token types and pooler, under names of its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import DistilBertConfig

from hfseq import nn
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert.encoder import dense

EPSILON = 1e-12


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, width: int) -> np.ndarray:
    """Return the vectors of positions 0, 1 …, (length, width), sines and cosines in turn."""
    columns = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000, 2 * (columns // 2) / width)
    table = np.where(columns % 2, np.cos(angles), np.sin(angles)).astype(np.float32)
    table.flags.writeable = False
    return table


class SinusoidalPositions(nnx.Module):
    """Positions that are computed, as in Transformers 4."""

    compute_dtype: Any = None

    def __init__(self, config: DistilBertConfig):
        self.size = (config.max_position_embeddings, config.dim)

    def __call__(self, ids: jax.Array) -> jax.Array:
        vectors = jnp.take(jnp.asarray(sinusoids(*self.size)), ids, axis=0)
        return vectors.astype(self.compute_dtype or jnp.float32)


class StoredPositions(nn.Embed):
    """Positions that a checkpoint holds in their place; PyTorch does not train them either."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(super().__call__(ids))


class Embeddings(nnx.Module):
    """Word and position vectors, summed and normalised."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        init, width = nn.normal(config.initializer_range), config.dim
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        table = (config.max_position_embeddings, width, init, rngs)
        if not config.sinusoidal_pos_embds:
            self.position_embeddings = nn.Embed(*table)
        elif getattr(config, "stored_positions", False):
            self.position_embeddings = StoredPositions(*table)
        else:
            self.position_embeddings = SinusoidalPositions(config)
        self.LayerNorm, self.dropout = nn.LayerNorm(width, EPSILON), nn.Dropout(config.dropout)

    def __call__(self, ids: jax.Array, positions: jax.Array, rngs: Keys | None) -> jax.Array:
        x = self.word_embeddings(ids) + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(x), rngs)


class Attention(nnx.Module):
    """Attention of a sequence to itself, and its output projection."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.heads, self.rate, width = config.n_heads, config.attention_dropout, config.dim
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (
            dense(config, width, width, rngs) for _ in range(4)
        )

    def __call__(self, x, mask, rngs, head_mask=None, return_weights=False):
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.q_lin, self.k_lin, self.v_lin)
        )
        mixed, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            head_mask=None if head_mask is None else head_mask[:, None, None],
            return_weights=return_weights,
        )
        return self.out_lin(mixed.reshape(x.shape)), weights


class FFN(nnx.Module):
    """The feed-forward block."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.lin1 = dense(config, config.dim, config.hidden_dim, rngs)
        self.lin2 = dense(config, config.hidden_dim, config.dim, rngs)
        self.act, self.dropout = nn.activation(config.activation), nn.Dropout(config.dropout)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        return self.dropout(self.lin2(self.act(self.lin1(x))), rngs)


class Layer(nnx.Module):
    """Attention and feed-forward, a norm after each."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.attention, self.ffn = Attention(config, rngs), FFN(config, rngs)
        self.sa_layer_norm = nn.LayerNorm(config.dim, EPSILON)
        self.output_layer_norm = nn.LayerNorm(config.dim, EPSILON)

    def __call__(self, x, mask, *, rngs, head_mask=None, return_weights=False):
        mixed, weights = self.attention(x, mask, rngs, head_mask, return_weights)
        x = self.sa_layer_norm(x + mixed)
        return self.output_layer_norm(x + self.ffn(x, rngs)), weights


class Transformer(nnx.Module):
    """The stack of layers."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers([Layer(config, rngs) for _ in range(config.n_layers)])


class DistilBertModule(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.embeddings, self.transformer = Embeddings(config, rngs), Transformer(config, rngs)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        head_mask=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        whole = jnp.arange(input_ids.shape[1])[None]
        positions = whole if segment_ids is None else nn.positions_in_segments(segment_ids)
        x, weights, inputs = nn.run_layers(
            self.transformer.layer,
            self.embeddings(input_ids, positions, rngs),
            nn.visible(attention_mask, segment_ids),
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
            per_layer=None if head_mask is None else {"head_mask": head_mask},
        )
        return out.FlaxBaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*inputs, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )


class ModelWithHead(nnx.Module):
    """The encoder, with room for a head beside it; ``rate`` names the dropout before that."""

    rate: ClassVar[str] = "dropout"

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.distilbert = DistilBertModule(config, rngs)
        self.dropout = nn.Dropout(getattr(config, self.rate))


class MaskedLM(ModelWithHead):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.vocab_transform = dense(config, config.dim, config.dim, rngs)
        self.act = nn.activation(config.activation)
        self.vocab_layer_norm = nn.LayerNorm(config.dim, EPSILON)
        self.vocab_projector = dense(config, config.dim, config.vocab_size, rngs)
        if config.tie_word_embeddings:
            self.vocab_projector.kernel = nnx.data(None)

    def __call__(self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any):
        encoded, head = self.distilbert(*args, **kwargs), self.vocab_projector
        x = nn.gather_positions(encoded.last_hidden_state, masked_positions)
        x = self.vocab_layer_norm(self.act(self.vocab_transform(x)))
        words = self.distilbert.embeddings.word_embeddings
        logits = words.attend(x, head.bias[...]) if head.kernel is None else head(x)
        return out.FlaxMaskedLMOutput(logits, encoded.hidden_states, encoded.attentions)


class SequenceClassification(ModelWithHead):
    """A label (or a number) for the whole sequence, by its first token."""

    rate = "seq_classif_dropout"

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pre_classifier = dense(config, config.dim, config.dim, rngs)
        self.classifier = dense(config, config.dim, self.labels(config), rngs)

    def labels(self, config: DistilBertConfig) -> int:
        """Return how many numbers the head gives."""
        return config.num_labels

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.distilbert(*args, rngs=rngs, **kwargs)
        x = jax.nn.relu(self.pre_classifier(encoded.last_hidden_state[:, 0]))
        logits = self.classifier(self.dropout(x, rngs))
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class MultipleChoice(SequenceClassification):
    """One of several continuations: inputs are (batch, choices, length)."""

    def labels(self, config: DistilBertConfig) -> int:
        """Return one: a score a choice."""
        return 1

    def __call__(self, input_ids: jax.Array, attention_mask=None, **kwargs: Any):
        _, choices, length = input_ids.shape
        mask = None if attention_mask is None else attention_mask.reshape(-1, length)
        scored = super().__call__(input_ids.reshape(-1, length), mask, **kwargs)
        logits = scored.logits.reshape(-1, choices)
        return out.FlaxMultipleChoiceModelOutput(logits, scored.hidden_states, scored.attentions)


class TokenClassification(ModelWithHead):
    """A label for every token."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.dim, config.num_labels, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.distilbert(*args, rngs=rngs, **kwargs)
        logits = self.classifier(self.dropout(encoded.last_hidden_state, rngs))
        return out.FlaxTokenClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class QuestionAnswering(ModelWithHead):
    """The first and the last token of the answer."""

    rate = "qa_dropout"

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = dense(config, config.dim, config.num_labels, rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any):
        encoded = self.distilbert(*args, rngs=rngs, **kwargs)
        logits = self.qa_outputs(self.dropout(encoded.last_hidden_state, rngs))
        return out.FlaxQuestionAnsweringModelOutput(
            logits[..., 0], logits[..., 1], encoded.hidden_states, encoded.attentions
        )


class FlaxDistilBertPreTrainedModel(FlaxPreTrainedModel):
    """Base of the DistilBERT classes: configuration, checkpoint names and the call of v4."""

    config_class = DistilBertConfig
    base_model_prefix = "distilbert"
    position_table = "max_position_embeddings"
    head_counts = (*FlaxPreTrainedModel.head_counts, "n_heads")
    weight_aliases = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}

    def __init__(self, config, *args: Any, stored_positions: bool = False, **kwargs: Any):
        if stored_positions and config.sinusoidal_pos_embds:
            config = copy.deepcopy(config)
            config.stored_positions = True
        super().__init__(config, *args, **kwargs)
        if config.sinusoidal_pos_embds and not stored_positions:
            self.ignored_weights = (*self.ignored_weights, r"\.position_embeddings\.weight$")

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        head_mask=None,
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

        ``input_ids`` and the mask are (batch, length), or (batch, choices, length) for multiple
        choice. ``segment_ids`` (batch, length) numbers the documents of packed rows.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "head_mask": head_mask,
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

    @classmethod
    def checkpoint_options(cls, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Take the file's positions for parameters where they are not the computed ones."""
        for name, tensor in tensors.items():
            if name.endswith("embeddings.position_embeddings.weight") and len(tensor.shape) == 2:
                known = DerivedTensor(sinusoids(*tensor.shape)).fits(tensor, tensors, "")
                return {} if known else {"stored_positions": True}
        return {}

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return the table of computed positions, which PyTorch keeps in its checkpoints."""
        config = self.config
        if not config.sinusoidal_pos_embds or getattr(config, "stored_positions", False):
            return {}
        prefix = "" if self.module_class is DistilBertModule else "distilbert."
        table = DerivedTensor(sinusoids(config.max_position_embeddings, config.dim))
        return {f"{prefix}embeddings.position_embeddings.weight": table}


class FlaxDistilBertModel(FlaxDistilBertPreTrainedModel):
    """DistilBERT without a head: hidden states."""

    module_class = DistilBertModule


class FlaxDistilBertForMaskedLM(FlaxDistilBertPreTrainedModel):
    """DistilBERT with the masked-LM head."""

    module_class = MaskedLM


class FlaxDistilBertForSequenceClassification(FlaxDistilBertPreTrainedModel):
    """DistilBERT with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxDistilBertForMultipleChoice(FlaxDistilBertPreTrainedModel):
    """DistilBERT that scores continuations."""

    module_class = MultipleChoice


class FlaxDistilBertForTokenClassification(FlaxDistilBertPreTrainedModel):
    """DistilBERT with a classifier on every token."""

    module_class = TokenClassification


class FlaxDistilBertForQuestionAnswering(FlaxDistilBertPreTrainedModel):
    """DistilBERT that marks the span of an answer."""

    module_class = QuestionAnswering
