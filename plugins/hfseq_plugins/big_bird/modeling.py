"""BigBird (Zaheer et al., 2020): BERT with block-sparse attention. Attributes are named as in BERT.

A sequence is divided into blocks of tokens. Every token attends to the first and the last block, to
the block that contains it, and to the two neighbors of this block. In training, it also attends to
some random blocks, which are drawn for each layer and head. Outside of training, the first block is
used in place of each random block, as in PyTorch. Short sequences use full attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import BigBirdConfig, PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import DerivedTensor
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq.nn.visible import Mask
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import BertModule, FlatPooler, dense
from hfseq_plugins.roberta import modeling as roberta

# The first and the last block. They attend to all blocks, and all blocks attend to them.
END_BLOCKS = (slice(0, 1), slice(-1, None))


def max_full_length(config: BigBirdConfig) -> int | None:
    """Returns the maximum length of sequences with full attention, or `None` if all use it."""
    if config.attention_type not in ("original_full", "block_sparse"):
        raise UsageError(
            f"unknown attention_type='{config.attention_type}' in the configuration "
            "(supported: original_full, block_sparse)"
        )
    if config.attention_type == "original_full" or config.is_decoder:
        return None
    return (5 + 2 * config.num_random_blocks) * config.block_size


class Embeddings(encoder.Embeddings):
    """Sum of word, position and token type embeddings, followed by dropout and a norm."""

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.embedding_scale = config.hidden_size**0.5 if config.rescale_embeddings else None

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        token_type_ids: jax.Array,  # (batch, length)
        position_ids: jax.Array,  # (batch, length)
        rngs: Keys | None,
    ) -> jax.Array:
        x = self.word_embeddings(input_ids)
        x = x if self.embedding_scale is None else x * self.embedding_scale
        x = x + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.LayerNorm(self.dropout(x, rngs))  # type: ignore[misc]  # created in __init__


def linear(
    config: PreTrainedConfig, features_in: int, features_out: int, rngs: nnx.Rngs
) -> nn.Linear:
    """Returns a projection of the attention, with a bias if `config.use_bias` is set."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=config.use_bias)


class SelfAttention(encoder.SelfAttention):
    """Multi-head attention: full for short sequences, block-sparse for long ones."""

    linear = staticmethod(linear)

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs, cross: bool = False):
        super().__init__(config, rngs, cross)
        self.max_full_length = None if cross else max_full_length(config)
        self.block_size, self.num_random_blocks = config.block_size, config.num_random_blocks

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        source: jax.Array,  # (batch, source_length, hidden)
        mask: Mask,
        rngs: Keys | None,
        head_mask: jax.Array | None = None,  # (heads,)
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        if self.max_full_length is None or x.shape[1] <= self.max_full_length:
            return super().__call__(x, source, mask, rngs, head_mask, return_weights)
        if head_mask is not None:
            raise UsageError("block-sparse attention does not support head_mask")
        token_mask = mask.without_band(x.shape[1])[:, 0, 0]  # type: ignore[index, union-attr]  # the module passes a Visibility with a mask; (batch, length)
        blocks = x.shape[1] // self.block_size

        def split(y: jax.Array) -> jax.Array:
            return y.reshape(y.shape[0], blocks, self.block_size, self.kv_heads, self.head_dim)

        query, key, value = (split(part(x)) for part in (self.query, self.key, self.value))
        end_output = jnp.concatenate([query[:, at] for at in END_BLOCKS], 1)
        end_output, _ = nn.attend(
            _merge_blocks(end_output),
            _merge_blocks(key),
            _merge_blocks(value),
            mask=nn.visible(token_mask),
        )
        middle = self._middle(
            query, key, value, token_mask.reshape(-1, blocks, self.block_size), rngs
        )
        first, last = jnp.split(end_output, 2, axis=1)
        attn_output = jnp.concatenate([first, middle, last], 1) * token_mask[..., None, None]
        return attn_output.reshape(x.shape), None

    def _middle(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        token_mask: jax.Array,
        rngs: Keys | None,
    ) -> jax.Array:
        """Computes the attention of all query blocks except the first and the last.

        Args:
            query: Queries, `(batch, blocks, block_size, heads, head_dim)`.
            key: Keys, same shape.
            value: Values, same shape.
            token_mask: Mask of real tokens, `(batch, blocks, block_size)`.
            rngs: PRNG keys to draw the random blocks, or `None` outside of training.

        Returns:
            The output, `(batch, tokens, heads, head_dim)`.
        """
        batch, blocks = query.shape[:2]
        num_rows = blocks - 2
        # For the second query block, the first block is both a neighbor and an end block, so the
        # queries would attend to it twice. The same is true for the last block and the
        # second-to-last query block. One of the copies is masked.
        is_first = np.ones((num_rows, 5), bool)
        is_first[0, 1] = is_first[-1, -1] = False
        random_indices = self._draw_random_blocks(blocks, rngs)

        def fixed_blocks(x: jax.Array) -> jax.Array:
            """Returns the blocks that each query block always attends to.

            These are the first block, the block before the query block, the query block itself, the
            block after it, and the last block. The shape is `(batch, num_rows, 5, block_size,
            ...)`, where `num_rows` is the number of query blocks without the first and the last.
            """
            first, last = (jnp.broadcast_to(x[:, at], x[:, 2:].shape) for at in END_BLOCKS)
            return jnp.stack([first, x[:, :-2], x[:, 1:-1], x[:, 2:], last], 2)

        def gather_blocks(x: jax.Array) -> jax.Array:
            """Returns the keys or values that each query block attends to.

            The shape is `(batch * num_rows, keys, heads, head_dim)`.
            """
            fixed = fixed_blocks(x)
            if random_indices is None:
                shape = (batch, num_rows, self.num_random_blocks, *x.shape[2:])
                random = jnp.broadcast_to(x[:, None, :1], shape)
            else:
                heads = np.arange(self.kv_heads)[:, None, None]
                random = x[:, random_indices, :, heads].transpose(3, 1, 2, 4, 0, 5)
            gathered = jnp.concatenate([fixed, random], 2)
            return gathered.reshape(batch * num_rows, -1, *x.shape[3:])

        key_mask = fixed_blocks(token_mask) & is_first[..., None]
        if random_indices is None:
            shape: tuple[int, ...] = (batch, num_rows, self.num_random_blocks, self.block_size)
            key_mask = jnp.concatenate(
                [key_mask, jnp.broadcast_to(token_mask[:, None, :1], shape)], 2
            )
            mask: Mask = nn.visible(key_mask.reshape(batch * num_rows, -1))
        else:  # (batch, num_rows, heads, blocks, block_size)
            random_mask = token_mask[:, random_indices].swapaxes(1, 2)
            shape = (*key_mask.shape[:2], self.kv_heads, *key_mask.shape[2:])
            key_mask = jnp.concatenate(
                [jnp.broadcast_to(key_mask[:, :, None], shape), random_mask], 3
            )
            mask = key_mask.reshape(batch * num_rows, self.kv_heads, 1, -1)
        middle = query[:, 1:-1].reshape(batch * num_rows, *query.shape[2:])
        attn_output, _ = nn.attend(middle, gather_blocks(key), gather_blocks(value), mask=mask)
        return attn_output.reshape(batch, -1, *attn_output.shape[2:])

    def _draw_random_blocks(self, blocks: int, rngs: Keys | None) -> jax.Array | None:
        """Draws the random blocks of each query block except the first and the last.

        The blocks that a query block always attends to are excluded.

        Returns:
            Block indices, `(heads, blocks - 2, num_random_blocks)`, or `None` without random
            blocks.
        """
        if rngs is None or self.num_random_blocks == 0:
            return None
        rows, numbers = np.arange(1, blocks - 1)[:, None], np.arange(blocks)[None]
        allowed = (abs(rows - numbers) > 1) & (numbers != 0) & (numbers != blocks - 1)
        bits = rngs.bits((self.kv_heads, *allowed.shape)).astype(jnp.int32)
        return jax.lax.top_k(jnp.where(allowed, bits, -1), self.num_random_blocks)[1]


def _merge_blocks(blocks: jax.Array) -> jax.Array:
    """Reshapes `(batch, blocks, block_size, ...)` to `(batch, tokens, ...)`."""
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])


class Attention(encoder.Attention):
    """Attention and its output projection."""

    submodule_classes = (SelfAttention, encoder.Output)


class Layer(encoder.Layer):
    """Self-attention, feed-forward and, if `config.add_cross_attention` is set, cross-attention."""

    submodule_classes = (Attention, encoder.Intermediate, encoder.Output)


class Encoder(encoder.Encoder):
    """The layers of the encoder."""

    layer_class = Layer


class BigBirdModule(BertModule):
    """BigBird encoder without a head. It is a decoder if `config.is_decoder` is set."""

    submodule_classes = (Embeddings, Encoder)

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        super().__init__(config, rngs, add_pooling_layer=False)
        self.pooler = FlatPooler(config, rngs) if add_pooling_layer else nnx.data(None)  # type: ignore[assignment]  # no `dense` level in the checkpoint
        self.max_full_length, self.block_size = max_full_length(config), config.block_size

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        head_mask: jax.Array | None = None,  # (layers, heads)
        encoder_hidden_states: jax.Array | None = None,  # (batch, source_length, hidden)
        encoder_attention_mask: jax.Array | None = None,  # (batch, source_length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        other_inputs = (head_mask, encoder_hidden_states, encoder_attention_mask, segment_ids)
        flags: dict[str, Any] = {
            "rngs": rngs,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        length = input_ids.shape[1]
        if self.max_full_length is None or length <= self.max_full_length:
            return super().__call__(
                input_ids, attention_mask, token_type_ids, position_ids, *other_inputs, **flags
            )
        if segment_ids is not None:
            raise UsageError(
                "block-sparse attention does not support packed rows (segment_ids): all documents "
                "would attend to the first block. Turn packing off, or set "
                "attention_type='original_full'"
            )
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = self.positions(input_ids, None)
        token_types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        padded = (
            jnp.pad(x, ((0, 0), (0, -length % self.block_size)))
            for x in (input_ids, mask, token_types, position_ids)
        )
        with nn.row_guarantees(None):  # they are not valid for padded rows
            output = super().__call__(*padded, *other_inputs, **flags)  # type: ignore[arg-type, call-arg]  # the first four arguments are arrays
        states = output.hidden_states
        return output.replace(
            last_hidden_state=output.last_hidden_state[:, :length],
            hidden_states=None if states is None else tuple(x[:, :length] for x in states),
            attentions=None,  # block-sparse layers do not compute full weights
        )


class BigBirdMixin(bert.ModelWithHead):
    """Sets the encoder of the BERT models to that of BigBird."""

    module = BigBirdModule


class MaskedLM(BigBirdMixin, bert.MaskedLM):
    """Encoder with a masked language modeling head."""


class CausalLM(BigBirdMixin, bert.CausalLM):
    """Causal language model. Attention is causal only if `config.is_decoder` is set."""


class PreTraining(BigBirdMixin, bert.PreTraining):
    """Encoder with heads for masked language modeling and next sentence prediction."""

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
        """Passes all arguments to the encoder. Returns the logits of both heads."""
        output = super().__call__(*args, **kwargs)
        return out.FlaxBigBirdForPreTrainingOutput(**vars(output))


class ClassificationHead(roberta.ClassificationHead):
    """Classification head on the first token, with the activation from the configuration."""

    activation = None


class SequenceClassification(BigBirdMixin, roberta.SequenceClassification):
    """Encoder with a head for sequence classification or regression."""

    prefix, head = "bert", ClassificationHead


class TokenClassification(BigBirdMixin, bert.TokenClassification):
    """Encoder with a token classification head."""


class MultipleChoice(BigBirdMixin, bert.MultipleChoice):
    """Encoder with a multiple choice head."""


class QuestionAnsweringHead(nnx.Module):
    """Question answering head: a feed-forward block, then start and end logits."""

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs):
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.intermediate = encoder.Intermediate(config, rngs)
        self.output = encoder.Output(config, config.intermediate_size, rngs)
        self.qa_outputs = dense(config, config.hidden_size, 2, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
    ) -> jax.Array:
        hidden = self.intermediate(self.dropout(x, rngs))
        return self.qa_outputs(self.output(hidden, x, rngs))


class QuestionAnswering(BigBirdMixin, bert.ModelWithHead):
    """Encoder with a head for extractive question answering.

    Answers do not contain tokens of the question.
    """

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_classifier = QuestionAnsweringHead(config, rngs)
        self.sep_token_id = config.sep_token_id

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        token_type_ids: jax.Array | None = None,  # (batch, length)
        position_ids: jax.Array | None = None,  # (batch, length)
        head_mask: jax.Array | None = None,  # (layers, heads)
        question_lengths: jax.Array | None = None,  # (batch,)
        segment_ids: jax.Array | None = None,  # (batch, length)
        *,
        rngs: Keys | None = None,
        **flags: Any,
    ) -> out.FlaxModelOutput:
        if question_lengths is None:  # the question ends at the first separator
            question_lengths = jnp.argmax(input_ids == self.sep_token_id, -1) + 1
        index = jnp.arange(input_ids.shape[1])[None]
        is_question = index < question_lengths.reshape(-1, 1)
        types = 1 - is_question.astype(jnp.int32) if token_type_ids is None else token_type_ids
        outputs = self.encode(
            input_ids,
            attention_mask,
            types,
            position_ids,
            head_mask,
            segment_ids=segment_ids,
            rngs=rngs,
            **flags,
        )
        logits = self.qa_classifier(outputs.last_hidden_state, rngs)
        logits = logits - 1e6 * (is_question & (index > 0))[..., None].astype(logits.dtype)
        return out.FlaxBigBirdForQuestionAnsweringModelOutput(
            logits[..., 0],
            logits[..., 1],
            outputs.pooler_output,
            outputs.hidden_states,
            outputs.attentions,
        )


class FlaxBigBirdPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base class of the BigBird models."""

    config_class = BigBirdConfig

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Returns a pooler for models without one.

        The PyTorch classes do not use it, but require it in checkpoints.
        """
        module, width = self.module_class, self.config.hidden_size
        if module is BigBirdModule or module is QuestionAnswering or module.use_pooler:
            return {}
        normal = np.random.default_rng(0).normal(size=(width, width))
        kernel = (self.config.initializer_range * normal).astype(np.float32)
        return {
            "bert.pooler.weight": DerivedTensor(kernel, unused=True),
            "bert.pooler.bias": DerivedTensor(np.zeros(width, np.float32), unused=True),
        }


class FlaxBigBirdModel(FlaxBigBirdPreTrainedModel):
    """BigBird without a head. Returns hidden states and the pooled first token."""

    module_class = BigBirdModule


class FlaxBigBirdForPreTraining(FlaxBigBirdPreTrainedModel):
    """BigBird with masked language modeling and next sentence prediction heads."""

    module_class = PreTraining


class FlaxBigBirdForMaskedLM(FlaxBigBirdPreTrainedModel):
    """BigBird with a masked language modeling head."""

    module_class = MaskedLM


class FlaxBigBirdForCausalLM(CausalGeneration, FlaxBigBirdPreTrainedModel):
    """BigBird as a causal decoder with full attention.

    Requires `is_decoder=True` in the configuration.
    """

    module_class = CausalLM


class FlaxBigBirdForSequenceClassification(FlaxBigBirdPreTrainedModel):
    """BigBird for sequence classification, from the first token."""

    module_class = SequenceClassification


class FlaxBigBirdForTokenClassification(FlaxBigBirdPreTrainedModel):
    """BigBird for token classification."""

    module_class = TokenClassification


class FlaxBigBirdForMultipleChoice(FlaxBigBirdPreTrainedModel):
    """BigBird for multiple choice."""

    module_class = MultipleChoice


class FlaxBigBirdForQuestionAnswering(FlaxBigBirdPreTrainedModel):
    """BigBird for extractive question answering."""

    module_class = QuestionAnswering

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        token_type_ids: Input = None,
        position_ids: Input = None,
        head_mask: Input = None,
        question_lengths: Input = None,
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

        `question_lengths`, `(batch,)`, is the number of tokens of each question. The question
        precedes the context, and no answer is predicted inside of it. By default a question ends at
        the first separator.
        """
        model_inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "head_mask": head_mask,
            "question_lengths": question_lengths,
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
