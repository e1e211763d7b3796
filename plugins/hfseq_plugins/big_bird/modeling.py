"""BigBird (Zaheer et al., 2020): BERT whose attention is sparse in blocks; names are BERT's.

Every token sees the first and the last block, its own and the two beside it, and some random ones,
each layer and head its own while training. Outside of training, as in PyTorch, the first block is
seen once more for each random one. Rows that are too short for that attend in full.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import BigBirdConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq.modeling import DerivedTensor
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.bert import encoder
from hfseq_plugins.bert import modeling as bert
from hfseq_plugins.bert.encoder import BertModule, FlatPooler, dense
from hfseq_plugins.roberta import modeling as roberta

# The blocks that see everything, and that everything sees.
ENDS = (slice(0, 1), slice(-1, None))


def max_full_length(config: BigBirdConfig) -> int | None:
    """Return how long a row may be to attend in full; None where every row does."""
    if config.attention_type not in ("original_full", "block_sparse"):
        raise UsageError(
            f"attention_type='{config.attention_type}' in the configuration is unknown "
            "(known: original_full, block_sparse)"
        )
    if config.attention_type == "original_full" or config.is_decoder:
        return None
    return (5 + 2 * config.num_random_blocks) * config.block_size


class Embeddings(encoder.Embeddings):
    """Word, position and token-type vectors, summed, and normalised after the dropout."""

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.factor = config.hidden_size**0.5 if config.rescale_embeddings else None

    def __call__(self, ids: jax.Array, types: jax.Array, positions: jax.Array, rngs: Keys | None):
        x = self.word_embeddings(ids)
        x = x if self.factor is None else x * self.factor
        x = x + self.token_type_embeddings(types) + self.position_embeddings(positions)
        return self.LayerNorm(self.dropout(x, rngs))


def linear(config: BigBirdConfig, features_in: int, features_out: int, rngs: nnx.Rngs) -> nn.Linear:
    """A Linear of the attention, with a bias where the configuration says so."""
    init = nn.normal(config.initializer_range)
    return nn.Linear(features_in, features_out, init, rngs, use_bias=config.use_bias)


class SelfAttention(encoder.SelfAttention):
    """Attention in full, or sparse in blocks where the rows are long enough."""

    linear = staticmethod(linear)

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs, cross: bool = False):
        super().__init__(config, rngs, cross)
        self.max_full_length = None if cross else max_full_length(config)
        self.block, self.random_blocks = config.block_size, config.num_random_blocks

    def __call__(self, x, source, mask, rngs, head_mask=None, return_weights=False):
        if self.max_full_length is None or x.shape[1] <= self.max_full_length:
            return super().__call__(x, source, mask, rngs, head_mask, return_weights)
        if head_mask is not None:
            raise UsageError("block-sparse attention takes no head_mask: leave it out")
        there = mask.without_band(x.shape[1])[:, 0, 0]  # (batch, length)
        blocks = x.shape[1] // self.block

        def split(y: jax.Array) -> jax.Array:
            return y.reshape(y.shape[0], blocks, self.block, self.kv_heads, self.head_dim)

        query, key, value = (split(part(x)) for part in (self.query, self.key, self.value))
        ends = jnp.concatenate([query[:, at] for at in ENDS], 1)
        ends, _ = nn.attend(_whole(ends), _whole(key), _whole(value), mask=nn.visible(there))
        middle = self._middle(query, key, value, there.reshape(-1, blocks, self.block), rngs)
        first, last = jnp.split(ends, 2, axis=1)
        mixed = jnp.concatenate([first, middle, last], 1) * there[..., None, None]
        return mixed.reshape(x.shape), None

    def _middle(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        there: jax.Array,
        rngs: Keys | None,
    ) -> jax.Array:
        """Return what the blocks between the first and the last see, (batch, tokens, heads, d)."""
        batch, blocks = query.shape[:2]
        rows = blocks - 2
        # The second block stands beside the first, the last but one beside the last: seen once.
        once = np.ones((rows, 5), bool)
        once[0, 1] = once[-1, -1] = False
        drawn = self._drawn(blocks, rngs)

        def near(x: jax.Array) -> jax.Array:
            """Return the blocks that a row sees for sure, (batch, rows, 5, block, ...)."""
            first, last = (jnp.broadcast_to(x[:, at], x[:, 2:].shape) for at in ENDS)
            return jnp.stack([first, x[:, :-2], x[:, 1:-1], x[:, 2:], last], 2)

        def seen(x: jax.Array) -> jax.Array:
            """Gather the keys, or the values, of each row, (batch * rows, keys, heads, d)."""
            beside = near(x)
            if drawn is None:
                shape = (batch, rows, self.random_blocks, *x.shape[2:])
                more = jnp.broadcast_to(x[:, None, :1], shape)
            else:
                heads = np.arange(self.kv_heads)[:, None, None]
                more = x[:, drawn, :, heads].transpose(3, 1, 2, 4, 0, 5)
            gathered = jnp.concatenate([beside, more], 2)
            return gathered.reshape(batch * rows, -1, *x.shape[3:])

        shown = near(there) & once[..., None]
        if drawn is None:
            shape = (batch, rows, self.random_blocks, self.block)
            shown = jnp.concatenate([shown, jnp.broadcast_to(there[:, None, :1], shape)], 2)
            mask = nn.visible(shown.reshape(batch * rows, -1))
        else:  # (batch, rows, heads, blocks, block)
            more = there[:, drawn].swapaxes(1, 2)
            shape = (*shown.shape[:2], self.kv_heads, *shown.shape[2:])
            shown = jnp.concatenate([jnp.broadcast_to(shown[:, :, None], shape), more], 3)
            mask = shown.reshape(batch * rows, self.kv_heads, 1, -1)
        middle = query[:, 1:-1].reshape(batch * rows, *query.shape[2:])
        mixed, _ = nn.attend(middle, seen(key), seen(value), mask=mask)
        return mixed.reshape(batch, -1, *mixed.shape[2:])

    def _drawn(self, blocks: int, rngs: Keys | None) -> jax.Array | None:
        """Draw blocks that a row does not see anyway, (heads, rows, random blocks)."""
        if rngs is None or self.random_blocks == 0:
            return None
        rows, numbers = np.arange(1, blocks - 1)[:, None], np.arange(blocks)[None]
        free = (abs(rows - numbers) > 1) & (numbers != 0) & (numbers != blocks - 1)
        bits = rngs.bits((self.kv_heads, *free.shape)).astype(jnp.int32)
        return jax.lax.top_k(jnp.where(free, bits, -1), self.random_blocks)[1]


def _whole(blocks: jax.Array) -> jax.Array:
    """Join (batch, blocks, block, …) to (batch, tokens, …)."""
    return blocks.reshape(blocks.shape[0], -1, *blocks.shape[3:])


class Attention(encoder.Attention):
    """Attention and its output projection."""

    submodule_classes = (SelfAttention, encoder.Output)


class Layer(encoder.Layer):
    """Self-attention, cross-attention where the configuration asks for it, feed-forward."""

    submodule_classes = (Attention, encoder.Intermediate, encoder.Output)


class Encoder(encoder.Encoder):
    """The stack of layers."""

    layer_class = Layer


class BigBirdModule(BertModule):
    """The encoder (or decoder) without a head."""

    submodule_classes = (Embeddings, Encoder)

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        super().__init__(config, rngs, add_pooling_layer=False)
        self.pooler = FlatPooler(config, rngs) if add_pooling_layer else nnx.data(None)
        self.max_full_length, self.block = max_full_length(config), config.block_size

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        head_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        segment_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        others = (head_mask, encoder_hidden_states, encoder_attention_mask, segment_ids)
        flags = {
            "rngs": rngs,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }
        length = input_ids.shape[1]
        if self.max_full_length is None or length <= self.max_full_length:
            return super().__call__(
                input_ids, attention_mask, token_type_ids, position_ids, *others, **flags
            )
        if segment_ids is not None:
            raise UsageError(
                "block-sparse attention takes no packed rows: their first block would be seen by "
                "all documents. Leave out packing, or take attention_type='original_full'"
            )
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = self.positions(input_ids, None)
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        filled = (
            jnp.pad(x, ((0, 0), (0, -length % self.block)))
            for x in (input_ids, mask, types, position_ids)
        )
        with nn.row_guarantees(None):  # rows have become longer than is known of them
            output = super().__call__(*filled, *others, **flags)
        states = output.hidden_states
        return output.replace(
            last_hidden_state=output.last_hidden_state[:, :length],
            hidden_states=None if states is None else tuple(x[:, :length] for x in states),
            attentions=None,  # no layer has all of them
        )


class BigBirdMixin:
    """BigBird's encoder under BERT's checkpoint name."""

    module = BigBirdModule


class MaskedLM(BigBirdMixin, bert.MaskedLM):
    """Masked language modelling; ``masked_positions`` (groups, k) restricts the head to them."""


class CausalLM(BigBirdMixin, bert.CausalLM):
    """Next-token prediction; the configuration's ``is_decoder`` makes it causal."""


class PreTraining(BigBirdMixin, bert.PreTraining):
    """Masked language modelling and next-sentence prediction together."""

    def __call__(self, *args: Any, **kwargs: Any):
        output = super().__call__(*args, **kwargs)
        return out.FlaxBigBirdForPreTrainingOutput(**vars(output))


class ClassificationHead(roberta.ClassificationHead):
    """The first token through a layer with the configuration's activation, then the labels."""

    activation = None


class SequenceClassification(BigBirdMixin, roberta.SequenceClassification):
    """A label (or a number) for the whole sequence."""

    prefix, head = "bert", ClassificationHead


class TokenClassification(BigBirdMixin, bert.TokenClassification):
    """A label for every token."""


class MultipleChoice(BigBirdMixin, bert.MultipleChoice):
    """One of several continuations."""


class QuestionAnsweringHead(nnx.Module):
    """A feed-forward block, then the first and the last token of the answer."""

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs):
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.intermediate = encoder.Intermediate(config, rngs)
        self.output = encoder.Output(config, config.intermediate_size, rngs)
        self.qa_outputs = dense(config, config.hidden_size, 2, rngs)

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        wide = self.intermediate(self.dropout(x, rngs))
        return self.qa_outputs(self.output(wide, x, rngs))


class QuestionAnswering(BigBirdMixin, bert.ModelWithHead):
    """The first and the last token of the answer, which do not lie in the question."""

    def __init__(self, config: BigBirdConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.qa_classifier = QuestionAnsweringHead(config, rngs)
        self.sep_token_id = config.sep_token_id

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        head_mask=None,
        question_lengths=None,
        segment_ids=None,
        *,
        rngs=None,
        **flags: Any,
    ):
        if question_lengths is None:  # up to the first separator
            question_lengths = jnp.argmax(input_ids == self.sep_token_id, -1) + 1
        place = jnp.arange(input_ids.shape[1])[None]
        question = place < question_lengths.reshape(-1, 1)
        types = 1 - question.astype(jnp.int32) if token_type_ids is None else token_type_ids
        encoded = self.encode(
            input_ids,
            attention_mask,
            types,
            position_ids,
            head_mask,
            segment_ids=segment_ids,
            rngs=rngs,
            **flags,
        )
        logits = self.qa_classifier(encoded.last_hidden_state, rngs)
        logits = logits - 1e6 * (question & (place > 0))[..., None].astype(logits.dtype)
        return out.FlaxBigBirdForQuestionAnsweringModelOutput(
            logits[..., 0],
            logits[..., 1],
            encoded.pooler_output,
            encoded.hidden_states,
            encoded.attentions,
        )


class FlaxBigBirdPreTrainedModel(bert.FlaxBertPreTrainedModel):
    """Base of the BigBird classes."""

    config_class = BigBirdConfig

    def derived_weights(self) -> dict[str, DerivedTensor]:
        """Return a pooler where PyTorch's class has one that it never asks; Flax's has none."""
        module, width = self.module_class, self.config.hidden_size
        if module is BigBirdModule or module is QuestionAnswering or module.use_pooler:
            return {}
        drawn = np.random.default_rng(0).normal(size=(width, width))
        return {
            "bert.pooler.weight": DerivedTensor(np.float32(self.config.initializer_range * drawn)),
            "bert.pooler.bias": DerivedTensor(np.zeros(width, np.float32)),
        }


class FlaxBigBirdModel(FlaxBigBirdPreTrainedModel):
    """BigBird without a head: hidden states and the pooled first token."""

    module_class = BigBirdModule


class FlaxBigBirdForPreTraining(FlaxBigBirdPreTrainedModel):
    """BigBird with the masked-LM and the next-sentence head."""

    module_class = PreTraining


class FlaxBigBirdForMaskedLM(FlaxBigBirdPreTrainedModel):
    """BigBird with the masked-LM head."""

    module_class = MaskedLM


class FlaxBigBirdForCausalLM(CausalGeneration, FlaxBigBirdPreTrainedModel):
    """BigBird as a decoder, which attends in full; set ``is_decoder=True`` in the configuration."""

    module_class = CausalLM


class FlaxBigBirdForSequenceClassification(FlaxBigBirdPreTrainedModel):
    """BigBird with a classifier on the first token."""

    module_class = SequenceClassification


class FlaxBigBirdForTokenClassification(FlaxBigBirdPreTrainedModel):
    """BigBird with a classifier on every token."""

    module_class = TokenClassification


class FlaxBigBirdForMultipleChoice(FlaxBigBirdPreTrainedModel):
    """BigBird that scores continuations."""

    module_class = MultipleChoice


class FlaxBigBirdForQuestionAnswering(FlaxBigBirdPreTrainedModel):
    """BigBird that marks the span of an answer."""

    module_class = QuestionAnswering

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        head_mask=None,
        question_lengths=None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
        **inputs,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``question_lengths`` (batch,) says how many tokens the questions have, which stand first
        and hold no answer; by default those up to the first separator.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "head_mask": head_mask,
            "question_lengths": question_lengths,
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
