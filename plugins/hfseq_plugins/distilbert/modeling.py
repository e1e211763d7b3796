"""DistilBERT (Sanh et al., 2019) on Flax NNX. Module attributes are named as in checkpoints.

DistilBERT is BERT without token types and without a pooler, and with other parameter names.
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
from transformers import DistilBertConfig, PreTrainedConfig

from hfseq import nn
from hfseq.modeling import DerivedTensor, FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bert.encoder import dense
from hfseq_plugins.common import num_labels

EPSILON = 1e-12


@functools.lru_cache(maxsize=8)
def sinusoids(length: int, width: int) -> np.ndarray:
    """Returns sinusoidal position embeddings with alternating sines and cosines.

    Args:
        length: Number of positions.
        width: Number of features.

    Returns:
        A read-only float32 array, `(length, width)`.
    """
    columns = np.arange(width)
    angles = np.arange(length)[:, None] / np.power(10000, 2 * (columns // 2) / width)
    table = np.where(columns % 2, np.cos(angles), np.sin(angles)).astype(np.float32)
    table.flags.writeable = False
    return table


class SinusoidalPositions(nnx.Module):
    """Computed sinusoidal position embeddings, as in Transformers 4."""

    compute_dtype: Any = None

    def __init__(self, config: DistilBertConfig):
        self.size = (config.max_position_embeddings, config.dim)

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`."""
        vectors = jnp.take(jnp.asarray(sinusoids(*self.size)), ids, axis=0)
        return vectors.astype(self.compute_dtype or jnp.float32)


class StoredPositions(nn.Embed):
    """Position embeddings that are loaded from a checkpoint instead of computed.

    They are not trained, as in PyTorch.
    """

    def __call__(self, ids: jax.Array) -> jax.Array:  # (batch, length)
        """Maps position IDs, `(...)`, to embeddings, `(..., features)`."""
        return jax.lax.stop_gradient(super().__call__(ids))


class Embeddings(nnx.Module):
    """Sum of word and position embeddings, followed by a norm and dropout."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        init, width = nn.normal(config.initializer_range), config.dim
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        table = (config.max_position_embeddings, width, init, rngs)
        if not config.sinusoidal_pos_embds:
            self.position_embeddings: nn.Embed | SinusoidalPositions = nn.Embed(*table)
        elif getattr(config, "stored_positions", False):
            self.position_embeddings = StoredPositions(*table)
        else:
            self.position_embeddings = SinusoidalPositions(config)
        self.LayerNorm, self.dropout = nn.LayerNorm(width, EPSILON), nn.Dropout(config.dropout)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x), rngs)


class Attention(nnx.Module):
    """Multi-head self-attention with its output projection."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.heads, self.rate, width = config.n_heads, config.attention_dropout, config.dim
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (
            dense(config, width, width, rngs) for _ in range(4)
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.q_lin, self.k_lin, self.v_lin)
        )
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.rate,
            rngs=rngs,
            head_mask=None if head_mask is None else head_mask[:, None, None],
            return_weights=return_weights,
        )
        return self.out_lin(attn_output.reshape(x.shape)), weights


class FFN(nnx.Module):
    """Feed-forward block."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.lin1 = dense(config, config.dim, config.hidden_dim, rngs)
        self.lin2 = dense(config, config.hidden_dim, config.dim, rngs)
        self.act, self.dropout = nn.activation(config.activation), nn.Dropout(config.dropout)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.dropout(self.lin2(self.act(self.lin1(x))), rngs)


class Layer(nnx.Module):
    """Post-norm layer: attention and feed-forward."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.attention, self.ffn = Attention(config, rngs), FFN(config, rngs)
        self.sa_layer_norm = nn.LayerNorm(config.dim, EPSILON)
        self.output_layer_norm = nn.LayerNorm(config.dim, EPSILON)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        mask: Mask,
        *,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(x, mask, rngs, head_mask, return_weights)
        x = self.sa_layer_norm(x + attn_output)
        return self.output_layer_norm(x + self.ffn(x, rngs)), weights


class Transformer(nnx.Module):
    """The layers of the encoder."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers([Layer(config, rngs) for _ in range(config.n_layers)])


class DistilBertModule(nnx.Module):
    """DistilBERT encoder without a head."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.embeddings, self.transformer = Embeddings(config, rngs), Transformer(config, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        head_mask: jax.Array | None = None,  # (layers, heads)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        row_positions = jnp.arange(input_ids.shape[1])[None]
        positions = row_positions if segment_ids is None else nn.positions_in_segments(segment_ids)
        x, attentions, layer_inputs = nn.run_layers(
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
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class ModelWithHead(nnx.Module):
    """An encoder to which subclasses add a head.

    Attributes:
        rate: Name of the configuration field with the dropout rate of the head.
    """

    rate: ClassVar[str] = "dropout"

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        self.distilbert = DistilBertModule(config, rngs)
        self.dropout = nn.Dropout(getattr(config, self.rate))


class MaskedLM(ModelWithHead):
    """Encoder with a masked language modeling head."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.vocab_transform = dense(config, config.dim, config.dim, rngs)
        self.act = nn.activation(config.activation)
        self.vocab_layer_norm = nn.LayerNorm(config.dim, EPSILON)
        self.vocab_projector = dense(config, config.dim, config.vocab_size, rngs)
        if config.tie_word_embeddings:
            self.vocab_projector.kernel = nnx.data(None)  # type: ignore[arg-type]  # the kernel is tied

    def __call__(
        self, *args: Any, masked_positions: jax.Array | None = None, **kwargs: Any
    ) -> out.FlaxModelOutput:
        """Passes all other arguments to the encoder, then applies the head.

        Args:
            masked_positions: Indices of the `k` tokens to predict in each group of rows,
                `(groups, k)`, see `hfseq.nn.gather_positions`. The default is all tokens.

        Returns:
            Logits, `(batch, length, vocab_size)`, or `(groups, k, vocab_size)` with
                `masked_positions`.
        """
        outputs = self.distilbert(*args, **kwargs)
        logits = nn.vocabulary_logits(self.logits, outputs.last_hidden_state, masked_positions)
        return out.FlaxMaskedLMOutput(logits, outputs.hidden_states, outputs.attentions)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(..., dim)`, to logits, `(..., vocab_size)`."""
        x, head = self.vocab_layer_norm(self.act(self.vocab_transform(x))), self.vocab_projector
        if head.kernel is not None:
            return head(x)
        return self.distilbert.embeddings.word_embeddings.attend(x, head.bias[...])


class SequenceClassification(ModelWithHead):
    """Sequence classification or regression, from the first token."""

    rate = "seq_classif_dropout"

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pre_classifier = dense(config, config.dim, config.dim, rngs)
        self.classifier = dense(config, config.dim, self.labels(config), rngs)

    def labels(self, config: DistilBertConfig) -> int:
        """Returns the number of outputs of the head."""
        return num_labels(config)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, num_labels)`."""
        outputs = self.distilbert(*args, rngs=rngs, **kwargs)
        x = jax.nn.relu(self.pre_classifier(outputs.last_hidden_state[:, 0]))
        logits = self.classifier(self.dropout(x, rngs))
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class MultipleChoice(SequenceClassification):
    """Multiple choice. Inputs are `(batch, choices, length)`, logits are `(batch, choices)`."""

    def labels(self, config: DistilBertConfig) -> int:
        """Returns 1, because the head computes one score for each choice."""
        return 1

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: jax.Array,  # (batch, choices, length)
        attention_mask: jax.Array | None = None,  # (batch, choices, length)
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        _, choices, length = input_ids.shape
        mask = None if attention_mask is None else attention_mask.reshape(-1, length)
        scored = super().__call__(input_ids.reshape(-1, length), mask, **kwargs)
        logits = scored.logits.reshape(-1, choices)
        return out.FlaxMultipleChoiceModelOutput(logits, scored.hidden_states, scored.attentions)


class TokenClassification(ModelWithHead):
    """Encoder with a token classification head."""

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.classifier = dense(config, config.dim, num_labels(config), rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, length, num_labels)`."""
        outputs = self.distilbert(*args, rngs=rngs, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state, rngs))
        return out.FlaxTokenClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class QuestionAnswering(ModelWithHead):
    """Encoder with a head for extractive question answering."""

    rate = "qa_dropout"

    def __init__(self, config: DistilBertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_outputs = dense(config, config.dim, num_labels(config), rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder.

        Returns start and end logits, `(batch, length)`.
        """
        outputs = self.distilbert(*args, rngs=rngs, **kwargs)
        logits = self.qa_outputs(self.dropout(outputs.last_hidden_state, rngs))
        return out.FlaxQuestionAnsweringModelOutput(
            logits[..., 0], logits[..., 1], outputs.hidden_states, outputs.attentions
        )


class FlaxDistilBertPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the DistilBERT models: configuration, checkpoint names and call signature."""

    config_class = DistilBertConfig
    base_model_prefix = "distilbert"
    position_table = "max_position_embeddings"
    head_counts = (*FlaxPreTrainedModel.head_counts, "n_heads")
    weight_aliases = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}

    def __init__(
        self, config: DistilBertConfig, *args: Any, stored_positions: bool = False, **kwargs: Any
    ):
        if stored_positions and config.sinusoidal_pos_embds:
            config = copy.deepcopy(config)
            config.stored_positions = True
        super().__init__(config, *args, **kwargs)
        if config.sinusoidal_pos_embds and not stored_positions:
            self.ignored_weights = (*self.ignored_weights, r"\.position_embeddings\.weight$")  # type: ignore[misc]  # depends on the configuration

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        head_mask: Input = None,
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

        Token IDs and masks are `(batch, length)`, or `(batch, choices, length)` for multiple
        choice. For packed rows, `segment_ids`, `(batch, length)`, is the document number of each
        token, and 0 for padding.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "head_mask": head_mask,
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

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, Any], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Adds `stored_positions=True` if a checkpoint has other position embeddings.

        This is the case if they are not equal to the computed sinusoids.
        """
        options = super().checkpoint_options(tensors, config)
        for name, tensor in tensors.items():
            if name.endswith("embeddings.position_embeddings.weight") and len(tensor.shape) == 2:
                is_computed = DerivedTensor(sinusoids(*tensor.shape)).fits(tensor, tensors, "")
                return options if is_computed else {"stored_positions": True, **options}
        return options

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns the computed position embeddings, which PyTorch checkpoints contain."""
        config = self.config
        if not config.sinusoidal_pos_embds or getattr(config, "stored_positions", False):
            return {}
        prefix = "" if self.module_class is DistilBertModule else "distilbert."
        table = DerivedTensor(sinusoids(config.max_position_embeddings, config.dim))
        return {f"{prefix}embeddings.position_embeddings.weight": table}


class FlaxDistilBertModel(FlaxDistilBertPreTrainedModel):
    """DistilBERT without a head. Returns hidden states."""

    module_class = DistilBertModule


class FlaxDistilBertForMaskedLM(FlaxDistilBertPreTrainedModel):
    """DistilBERT with a masked language modeling head."""

    module_class = MaskedLM


class FlaxDistilBertForSequenceClassification(FlaxDistilBertPreTrainedModel):
    """DistilBERT for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxDistilBertForMultipleChoice(FlaxDistilBertPreTrainedModel):
    """DistilBERT for multiple choice."""

    module_class = MultipleChoice


class FlaxDistilBertForTokenClassification(FlaxDistilBertPreTrainedModel):
    """DistilBERT for token classification."""

    module_class = TokenClassification


class FlaxDistilBertForQuestionAnswering(FlaxDistilBertPreTrainedModel):
    """DistilBERT for extractive question answering."""

    module_class = QuestionAnswering
