"""DeBERTa-v2 and v3 (He et al., 2021) on Flax NNX. Module attributes are named as in checkpoints.

An attention score is the sum of up to three products: query and key content as in BERT, query
content and relative position (`c2p`), and relative position and key content (`p2c`). A relative
position is the distance between query and key. Large distances are grouped into buckets. All layers
share the embeddings of relative positions.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import DebertaV2Config, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import Keys, sharding
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import dense, embedding_size
from hfseq_plugins.bert.sharding import RULES as BERT_RULES
from hfseq_plugins.common import num_labels

logger = logging.getLogger(__name__)

RULES = [
    (r"self/(query|key|value|pos_key|pos_query)_proj/kernel$", "column"),
    (r"self/(query|key|value|pos_key|pos_query)_proj/bias$", "column_bias"),
    (r"rel_embeddings/embedding$|embed_proj/kernel$", "table"),
    (r"conv/conv/kernel$", "replicated"),
    (r"conv/conv/bias$", "vector"),
    *BERT_RULES,
]
#: The embeddings of the relative positions in rows of one length, and indices into them:
#:
#: * The embeddings that occur in such rows, `(rows, hidden)`.
#: * For each offset of a key from its query, the row of the embedding, `(2 * length,)`.
#: * For each offset of a query from its key, the row of the embedding, `(2 * length,)`.
#:
#: The offsets are `1 - length`, `2 - length`, ..., `length`.
RelativePositions = tuple[jax.Array, jax.Array, jax.Array]


def max_relative_positions(config: DebertaV2Config) -> int:
    """Returns the limit on distances. All distances beyond it have the same embedding."""
    limit = config.max_relative_positions
    return limit if limit > 0 else config.max_position_embeddings


def position_buckets(config: DebertaV2Config) -> int:
    """Returns the number of buckets for distances in one direction, or 0 without buckets."""
    return max(getattr(config, "position_buckets", -1), 0)


def relative_rows(config: DebertaV2Config, distances: np.ndarray) -> np.ndarray:
    """Returns the rows of the relative position embeddings that belong to distances.

    With buckets, each distance up to half of the number of buckets has its own row. Larger
    distances share rows on a logarithmic scale, which is computed in float32 to round as PyTorch
    does.

    Args:
        config: The configuration.
        distances: Position of the query minus position of the key, integers.
    """
    span = position_buckets(config) or max_relative_positions(config)
    middle = position_buckets(config) // 2
    if middle:
        far = np.maximum(np.abs(distances), middle).astype(np.float32)
        octaves = np.log(far / np.float32(middle)) / np.log(
            np.float32((max_relative_positions(config) - 1) / middle)
        )
        buckets = np.ceil(octaves * np.float32(middle - 1)) + middle
        is_near = np.abs(distances) <= middle
        distances = np.where(is_near, distances, np.sign(distances) * buckets).astype(np.int64)
    return np.clip(distances + span, 0, 2 * span - 1)


def align_columns(scores: jax.Array) -> jax.Array:
    """Shifts each row of scores by relative positions so that its columns are absolute positions.

    The function reshapes rows that are one element too long, which shifts each row by one more
    element than the row before. Indexing would be slower, because its gradient is a scatter.

    Args:
        scores: `(..., length, 2 * length)`. Column `c` of row `i` is the score of position
            `i + c + 1 - length`.

    Returns:
        `(..., length, length)`. Column `j` of row `i` is the score of position `j`.
    """
    *batch, length, width = scores.shape
    flat = scores.reshape(*batch, length * width)[..., : length * (width - 1)]
    return flat.reshape(*batch, length, width - 1)[..., length - 1 :]


class Embeddings(nnx.Module):
    """Sum of word and, depending on the configuration, position and token type embeddings.

    If their size differs from the hidden size, they are projected. A norm and dropout follow.
    """

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs):
        def table(size: int) -> nn.Embed:
            return nn.Embed(size, width, nn.normal(config.initializer_range), rngs)

        width, hidden = embedding_size(config), config.hidden_size
        self.word_embeddings = table(config.vocab_size)
        biased = config.position_biased_input
        self.position_embeddings = (
            table(config.max_position_embeddings) if biased else nnx.data(None)
        )
        types = config.type_vocab_size
        self.token_type_embeddings = table(types) if types > 0 else nnx.data(None)
        init = nn.normal(config.initializer_range)
        self.embed_proj = (
            nnx.data(None)
            if width == hidden
            else nn.Linear(width, hidden, init, rngs, use_bias=False)
        )
        self.LayerNorm = nn.LayerNorm(hidden, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array | None,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        is_token: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            x = x + self.token_type_embeddings(types)
        x = self.LayerNorm(x if self.embed_proj is None else self.embed_proj(x))
        return self.dropout(zero_padding(x, is_token), rngs)


def zero_padding(
    x: jax.Array,  # (batch, length, hidden)
    is_token: jax.Array | None,  # (batch, length)
) -> jax.Array:
    """Sets the hidden states of padding to zero."""
    return x if is_token is None else jnp.where(is_token[..., None], x, 0)


class SelfAttention(nnx.Module):
    """Disentangled self-attention (He et al., 2021, section 3.1)."""

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs, cross: bool = False):
        width, self.heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "attention_head_size", None) or width // self.heads
        if self.heads * head_dim != width:
            raise UsageError(
                f"{self.heads} attention heads times {head_dim} features do not equal "
                f"hidden_size={width} in the configuration: change num_attention_heads or "
                "attention_head_size"
            )
        self.query_proj, self.key_proj, self.value_proj = (
            dense(config, width, width, rngs) for _ in range(3)
        )
        terms = config.pos_att_type or ()
        self.has_c2p, self.has_p2c = "c2p" in terms, "p2c" in terms
        self.scale = (head_dim * (1 + self.has_c2p + self.has_p2c)) ** -0.5
        separate = config.relative_attention and not getattr(config, "share_att_key", False)
        self.pos_key_proj, self.pos_query_proj = (
            dense(config, width, width, rngs) if separate and has_term else nnx.data(None)
            for has_term in (self.has_c2p, self.has_p2c)
        )
        self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
        self.rate = config.attention_probs_dropout_prob

    def split_heads(self, x: jax.Array) -> jax.Array:
        """Maps `(..., hidden)` to `(..., heads, head_dim)`."""
        return x.reshape(*x.shape[:-1], self.heads, -1)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        relative_positions: RelativePositions | None,
        mask: Mask,
        rngs: Keys | None,
        head_mask: None = None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        query, key, value = (
            self.split_heads(part(x)) for part in (self.query_proj, self.key_proj, self.value_proj)
        )
        bias = None
        if relative_positions is not None:
            bias = self.position_scores(query, key, relative_positions, rngs)
        attn_output, weights = nn.attend(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=self.scale,
            dropout_rate=self.rate,
            rngs=rngs,
            return_weights=return_weights,
        )
        return attn_output.reshape(x.shape), weights

    def position_scores(
        self,
        query: jax.Array,  # (batch, length, heads, head_dim)
        key: jax.Array,  # (batch, length, heads, head_dim)
        relative_positions: RelativePositions,
        rngs: Keys | None,
    ) -> jax.Array | None:
        """Returns the sum of the scaled scores `c2p` and `p2c`, `(batch, heads, queries, keys)`.

        The result is `None` if the configuration uses neither of them.
        """
        embeddings, by_key, by_query = relative_positions
        # All rows of the batch share the embeddings, so they also share the dropout mask.
        embeddings = self.pos_dropout(embeddings, None if rngs is None else rngs.shared)
        bias = None
        if self.has_c2p:
            project = self.key_proj if self.pos_key_proj is None else self.pos_key_proj
            positions = self.split_positions(project(embeddings))[by_key]
            bias = align_columns(self.scores(query, positions))
        if self.has_p2c:
            project = self.query_proj if self.pos_query_proj is None else self.pos_query_proj
            positions = self.split_positions(project(embeddings))[by_query]
            p2c = align_columns(self.scores(key, positions)).swapaxes(-1, -2)
            bias = p2c if bias is None else bias + p2c
        return bias

    def split_positions(self, projected: jax.Array) -> jax.Array:
        """Splits the heads of position vectors, `(rows, hidden)` to `(rows, heads, head_dim)`."""
        return sharding.constrain_shared_heads(self.split_heads(projected))

    def scores(
        self,
        contents: jax.Array,  # (batch, length, heads, head_dim)
        positions: jax.Array,  # (2 * length, heads, head_dim)
    ) -> jax.Array:
        """Returns the scaled products of contents and relative positions.

        These products are the largest arrays of the model. They have the dtype of `contents`, since
        they and their gradients need half the memory in half precision.

        Returns:
            The products, `(batch, heads, length, 2 * length)`.
        """
        positions = (positions.astype(jnp.float32) * self.scale).astype(contents.dtype)
        return jnp.einsum("blhd,phd->bhlp", contents, positions)


class Attention(encoder.Attention):
    """Attention and its output projection."""

    submodule_classes = (SelfAttention, encoder.Output)


class ConvLayer(nnx.Module):
    """Convolution over the embeddings. Its output is added to the output of the first layer.

    If a row contains several packed documents, the convolution does not mix them.
    """

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs):
        width, taps = config.hidden_size, config.conv_kernel_size
        if taps % 2 == 0:
            raise UsageError(
                f"conv_kernel_size={taps} in the configuration is even: use an odd number, so that "
                "the output of the convolution has the same length as its input"
            )
        self.conv = nn.Conv(
            width,
            width,
            (taps,),
            nn.normal(config.initializer_range),
            rngs,
            groups=getattr(config, "conv_groups", 1),
        )
        self.act = nn.activation(getattr(config, "conv_act", "tanh"))
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        residual: jax.Array,  # (batch, length, hidden)
        is_token: jax.Array | None,  # (batch, length)
        segment_ids: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        y = zero_padding(self.convolve(x, segment_ids), is_token)
        x = self.LayerNorm(residual + self.act(self.dropout(y, rngs)))
        return zero_padding(x, is_token)

    def convolve(
        self,
        x: jax.Array,  # (batch, length, hidden)
        segment_ids: jax.Array | None,  # (batch, length)
    ) -> jax.Array:
        """Convolves each document of `x`."""
        taps, length = self.conv.kernel.shape[0], x.shape[1]
        side = taps // 2
        padded = jnp.pad(x, ((0, 0), (side, side), (0, 0)))
        if segment_ids is None:
            return self.conv(padded)
        # Compute each output from its own window of inputs, in which the tokens of other documents
        # are set to zero.
        segments = jnp.pad(segment_ids, ((0, 0), (side, side)), constant_values=-1)
        windows = [
            jnp.where(
                (segments[:, tap : tap + length] == segment_ids)[..., None],
                padded[:, tap : tap + length],
                0,
            )
            for tap in range(taps)
        ]
        stacked = jnp.stack(windows, 2).reshape(-1, taps, x.shape[-1])
        return self.conv(stacked).reshape(x.shape)


class Layer(encoder.Layer):
    """Post-norm layer: attention and feed-forward. The first layer may have a convolution."""

    submodule_classes = (Attention, encoder.Intermediate, encoder.Output)

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs, is_first: bool):
        super().__init__(config, rngs)
        has_conv = is_first and getattr(config, "conv_kernel_size", 0) > 0
        self.conv = ConvLayer(config, rngs) if has_conv else nnx.data(None)

    def __call__(  # type: ignore[override]  # relative positions instead of an encoder
        self,
        x: jax.Array,  # (batch, length, hidden)
        relative_positions: RelativePositions | None,
        mask: Mask,
        is_token: jax.Array | None,  # (batch, length)
        segment_ids: jax.Array | None,  # (batch, length)
        *,
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        h, weights = self.attention(x, relative_positions, mask, rngs, None, return_weights)
        h = self.feed_forward(h, rngs)
        if self.conv is not None:
            h = self.conv(x, h, is_token, segment_ids, rngs)
        return h, weights


class Encoder(nnx.Module):
    """Stack of layers, and the embeddings of relative positions that they share."""

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs):
        depth, width = config.num_hidden_layers, config.hidden_size
        self.layer = nn.Layers([Layer(config, rngs, is_first=i == 0) for i in range(depth)])
        self.config = nnx.static(config)
        span = position_buckets(config) or max_relative_positions(config)
        init = nn.normal(config.initializer_range)
        self.rel_embeddings = (
            nn.Embed(2 * span, width, init, rngs) if config.relative_attention else nnx.data(None)
        )
        norms = getattr(config, "norm_rel_ebd", "none").lower().split("|")
        has_norm = "layer_norm" in map(str.strip, norms)
        self.LayerNorm = nn.LayerNorm(width, config.layer_norm_eps) if has_norm else nnx.data(None)

    def relative_positions(self, length: int) -> RelativePositions | None:
        """Returns the embeddings of all relative positions in rows of this length.

        They are also correct for packed rows, because the distance between two tokens does not
        depend on where their document starts in the row.
        """
        if self.rel_embeddings is None:
            return None
        offsets = np.arange(2 * length) - (length - 1)
        by_key, by_query = (relative_rows(self.config, offset) for offset in (-offsets, offsets))
        # Project only the embeddings that occur in rows of this length.
        used, indices = np.unique(np.concatenate([by_key, by_query]), return_inverse=True)
        embeddings = self.rel_embeddings(jnp.asarray(used))
        if self.LayerNorm is not None:
            embeddings = self.LayerNorm(embeddings)
        by_key, by_query = np.split(indices, 2)
        return embeddings, jnp.asarray(by_key), jnp.asarray(by_query)


class DebertaV2Module(nnx.Module):
    """DeBERTa encoder without a head."""

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs, add_pooling_layer: bool = False):
        self.embeddings, self.encoder = Embeddings(config, rngs), Encoder(config, rngs)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if position_ids is None:
            position_ids = jnp.arange(input_ids.shape[1])[None]
            if segment_ids is not None:
                position_ids = nn.positions_in_segments(segment_ids)
        is_token = None if segment_ids is None else segment_ids > 0
        if attention_mask is not None:
            visible = attention_mask != 0
            is_token = visible if visible.ndim == 2 else visible.any(1)
        x, attentions, layer_inputs = nn.run_layers(
            self.encoder.layer,
            self.embeddings(input_ids, token_type_ids, position_ids, is_token, rngs),
            self.encoder.relative_positions(input_ids.shape[1]),
            nn.visible(attention_mask, segment_ids),
            is_token,
            segment_ids,
            rngs=rngs,
            collect=output_hidden_states,
            return_weights=output_attentions,
        )
        return out.FlaxBaseModelOutput(
            last_hidden_state=x,
            hidden_states=(*layer_inputs, x) if layer_inputs is not None else None,
            attentions=attentions if output_attentions else None,
        )


class ContextPooler(nnx.Module):
    """Dropout, projection and activation of the first token."""

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs):
        width = config.pooler_hidden_size
        if width != config.hidden_size:
            raise UsageError(
                f"pooler_hidden_size={width} in the configuration must equal "
                f"hidden_size={config.hidden_size}"
            )
        self.dense = dense(config, width, width, rngs)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.act = nn.activation(config.pooler_hidden_act)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        return self.act(self.dense(self.dropout(x[:, 0], rngs)))


class DebertaV2Mixin(bert.ModelWithHead):
    """Mixin that gives the encoder its name in DeBERTa checkpoints."""

    prefix = "deberta"
    module = DebertaV2Module
    use_pooler = False
    classifier_dropout_field = "hidden_dropout_prob"


class PredictionHead(bert.Transform):
    """Language modeling head whose projection to the vocabulary is the word embedding matrix."""

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(  # type: ignore[override]  # with the embeddings
        self,
        x: jax.Array,  # (..., hidden)
        embeddings: nn.Embed,
    ) -> jax.Array:
        """Maps hidden states, `(..., hidden)`, to logits, `(..., vocab_size)`."""
        return embeddings.attend(super().__call__(x), self.bias[...])


class MaskedLM(DebertaV2Mixin, bert.MaskedLM):
    """Encoder with a masked language modeling head.

    If `config.legacy` is true, the head is that of BERT. Otherwise, it is the head of Microsoft's
    published checkpoints.
    """

    def add_head(self, config: PreTrainedConfig, rngs: nnx.Rngs) -> None:
        """Creates the language modeling head, with its name in checkpoints."""
        self.legacy = config.legacy
        if self.legacy:
            super().add_head(config, rngs)
            return
        if embedding_size(config) != config.hidden_size:
            raise UsageError(
                f"embedding_size={embedding_size(config)} in the configuration differs from "
                f"hidden_size={config.hidden_size}, which legacy=False does not support"
            )
        self.lm_predictions = nnx.Dict(lm_head=PredictionHead(config, rngs))

    @property
    def vocabulary_head(self) -> Any:
        """The language modeling head."""
        return self.cls.predictions if self.legacy else self.lm_predictions["lm_head"]


class SequenceClassification(DebertaV2Mixin):
    """Sequence classification or regression."""

    classifier_dropout_field = "cls_dropout"

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pooler = ContextPooler(config, rngs)
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(self, *args: Any, rngs: Keys | None = None, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns logits, `(batch, num_labels)`."""
        outputs = self.encode(*args, rngs=rngs, **kwargs)
        pooled = self.dropout(self.pooler(outputs.last_hidden_state, rngs), rngs)
        return out.FlaxSequenceClassifierOutput(
            self.classifier(pooled), outputs.hidden_states, outputs.attentions
        )


class MultipleChoice(DebertaV2Mixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""

    classifier_dropout_field = "cls_dropout"

    def __init__(self, config: DebertaV2Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.pooler = ContextPooler(config, rngs)

    def pool(self, outputs: out.FlaxModelOutput, rngs: Keys | None) -> jax.Array:
        """Returns the pooled hidden state of each choice, `(batch * choices, hidden)`."""
        return self.dropout(self.pooler(outputs.last_hidden_state, rngs), rngs)


class TokenClassification(DebertaV2Mixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class QuestionAnswering(DebertaV2Mixin, bert.QuestionAnswering):
    """Encoder with a head for extractive question answering."""


class FlaxDebertaV2PreTrainedModel(FlaxPreTrainedModel):
    """Base class of the DeBERTa models: configuration and checkpoint names.

    `input_ids`, `attention_mask`, `token_type_ids` and `position_ids` are `(batch, length)`, or
    `(batch, choices, length)` for multiple choice. If rows contain several packed documents,
    `segment_ids`, `(batch, length)`, contains the document number of each token, and 0 for padding.
    """

    config_class = DebertaV2Config
    base_model_prefix = "deberta"
    weight_aliases = {
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    # The head of the enhanced mask decoder used in pretraining. No class in Transformers uses it.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"^mask_predictions\.")
    weight_templates = {"encoder.layer.0.conv": "encoder.conv"}

    def __init__(self, config: DebertaV2Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if not self.config.position_biased_input:
            # Checkpoints contain position embeddings for the enhanced mask decoder, which the
            # encoder does not use.
            self.ignored_weights = (*self.ignored_weights, r"\.position_embeddings\.weight$")  # type: ignore[misc]  # depends on the configuration

    def max_length(self) -> int | None:
        """Returns the maximum sequence length, or `None` without position embeddings."""
        config = self.config
        return config.max_position_embeddings if config.position_biased_input else None


class FlaxDebertaV2Model(FlaxDebertaV2PreTrainedModel):
    """DeBERTa without a head. Returns hidden states."""

    module_class = DebertaV2Module


class FlaxDebertaV2ForMaskedLM(FlaxDebertaV2PreTrainedModel):
    """DeBERTa with a masked language modeling head.

    Args:
        config: The configuration.
        *args: See `FlaxPreTrainedModel`.
        legacy: Overrides `config.legacy`, for checkpoints that do not match it.
        **kwargs: See `FlaxPreTrainedModel`.
    """

    module_class = MaskedLM

    def __init__(
        self, config: DebertaV2Config, *args: Any, legacy: bool | None = None, **kwargs: Any
    ):
        if legacy is not None and legacy != config.legacy:
            config = copy.deepcopy(config)
            config.legacy = legacy
        super().__init__(config, *args, **kwargs)

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, Any], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Adds `legacy=False` if the only head in the checkpoint is the one for `legacy=False`.

        This is necessary because Microsoft's published configurations do not set `legacy`, and its
        default is true. For these checkpoints, PyTorch creates a head with random weights.
        """
        options = super().checkpoint_options(tensors, config)
        has_head = any(name.startswith("lm_predictions.lm_head.") for name in tensors)
        has_legacy_head = any(name.startswith("cls.predictions.") for name in tensors)
        if not config.legacy or not has_head or has_legacy_head:
            return options
        logger.info(
            "loading the checkpoint with legacy=False instead of legacy=True as in its "
            "configuration, because its language modeling head is named lm_predictions"
        )
        return {"legacy": False, **options}


class FlaxDebertaV2ForSequenceClassification(FlaxDebertaV2PreTrainedModel):
    """DeBERTa for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxDebertaV2ForMultipleChoice(FlaxDebertaV2PreTrainedModel):
    """DeBERTa for multiple choice."""

    module_class = MultipleChoice


class FlaxDebertaV2ForTokenClassification(FlaxDebertaV2PreTrainedModel):
    """DeBERTa for token classification."""

    module_class = TokenClassification


class FlaxDebertaV2ForQuestionAnswering(FlaxDebertaV2PreTrainedModel):
    """DeBERTa for extractive question answering."""

    module_class = QuestionAnswering
