"""The base class of encoder-decoder models, with ``encode``, ``decode`` and generation.

The NNX module of such a model has the methods ``__call__``, ``encode`` and ``decode``. If the model
uses absolute positions, these methods accept ``position_ids`` and ``decoder_position_ids``. The
first argument is the input of the encoder: token IDs, audio or images. Its name is the class
attribute ``main_input_name``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.modeling.base import Input
from hfseq.modeling.pretrained import FlaxPreTrainedModel
from hfseq.nn import kv_cache, trees
from hfseq.nn.outputs import FlaxModelOutput
from hfseq.nn.random import Keys

#: The outputs of ``encode``. The first entry is the last hidden state.
EncoderOutputs = FlaxModelOutput | tuple[Any, ...]


def shift_tokens_right(
    input_ids: jax.Array | np.ndarray, pad_token_id: int, decoder_start_token_id: int
) -> jax.Array:
    """Creates decoder inputs from labels by shifting them to the right.

    Args:
        input_ids: Labels, a NumPy or JAX array `(batch, length)`. The last label of each sequence
            is dropped.
        pad_token_id: Token that replaces -100.
        decoder_start_token_id: Token that each decoder input begins with.

    Returns:
        Token IDs, int32 of the same shape.
    """
    ids = jnp.asarray(input_ids, jnp.int32)
    shifted = jnp.roll(ids, 1, axis=1).at[:, 0].set(decoder_start_token_id)
    return jnp.where(shifted == -100, pad_token_id, shifted)


class FlaxSeq2SeqPreTrainedModel(FlaxPreTrainedModel):
    """Base class of encoder-decoder models.

    If several pairs of source and target are packed into one row of the batch, pass
    ``segment_ids`` and ``decoder_segment_ids``, both `(batch, length)`. These arrays contain the
    number of the pair that each token belongs to, or 0 for padding. Tokens attend only to tokens of
    the same pair.
    """

    def __call__(  # type: ignore[override]
        self,
        input_ids: Input,
        attention_mask: Input = None,
        decoder_input_ids: Input = None,
        decoder_attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the encoder and the decoder; see :meth:`FlaxPreTrainedModel.run`.

        Args:
            input_ids: Input of the encoder, `(batch, source length)`.
            attention_mask: Mask of the encoder's input.
            decoder_input_ids: Input of the decoder, `(batch, target length)`.
            decoder_attention_mask: Mask of the decoder's input.
            output_attentions: See :meth:`FlaxPreTrainedModel.__call__`.
            output_hidden_states: See :meth:`FlaxPreTrainedModel.__call__`.
            return_dict: See :meth:`FlaxPreTrainedModel.__call__`.
            train: See :meth:`FlaxPreTrainedModel.__call__`.
            params: See :meth:`FlaxPreTrainedModel.__call__`.
            dropout_rng: See :meth:`FlaxPreTrainedModel.__call__`.
            extra: See :meth:`FlaxPreTrainedModel.__call__`.
            **inputs: Other inputs of the module.
        """
        if decoder_input_ids is None:
            decoder_input_ids = self.default_decoder_input_ids(input_ids)
        named_inputs = {
            self.main_input_name: input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            **inputs,
        }
        return self.run(
            named_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )

    def encode(  # type: ignore[override]  # as in Transformers 4
        self,
        input_ids: Input,
        attention_mask: Input = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the encoder on an input `(batch, source length)`.

        The arguments have the same meaning as in :meth:`__call__`.
        """
        named_inputs = {self.main_input_name: input_ids, "attention_mask": attention_mask, **inputs}
        return self.run(
            named_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            method="encode",
        )

    def decode(
        self,
        decoder_input_ids: Input,
        encoder_outputs: EncoderOutputs,
        encoder_attention_mask: Input = None,
        decoder_attention_mask: Input = None,
        past_key_values: trees.Params | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        train: bool = False,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        **inputs: Any,
    ) -> Any:
        """Runs the decoder on the outputs of the encoder.

        Args:
            decoder_input_ids: Input of the decoder, `(batch, length)`.
            encoder_outputs: Outputs of ``encode``. The first entry is the last hidden state.
            encoder_attention_mask: Mask of the encoder's output.
            decoder_attention_mask: Mask of the decoder's input. With ``past_key_values``, the mask
                must cover all positions of the cache.
            past_key_values: A cache. The output contains the cache after this call.
            output_attentions: See :meth:`FlaxPreTrainedModel.__call__`.
            output_hidden_states: See :meth:`FlaxPreTrainedModel.__call__`.
            return_dict: See :meth:`FlaxPreTrainedModel.__call__`.
            train: See :meth:`FlaxPreTrainedModel.__call__`.
            params: See :meth:`FlaxPreTrainedModel.__call__`.
            dropout_rng: See :meth:`FlaxPreTrainedModel.__call__`.
            **inputs: Other inputs of the module.
        """
        named_inputs = {
            "decoder_input_ids": decoder_input_ids,
            "encoder_hidden_states": encoder_outputs[0],
            "encoder_attention_mask": encoder_attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            **inputs,
        }
        if self.accepts("decoder_position_ids", "decode"):
            named_inputs.setdefault("decoder_position_ids", None)
        return self.run(
            named_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            method="decode",
        )

    def default_decoder_input_ids(self, input_ids: Input) -> jax.Array:
        """Returns the decoder inputs that are used if the caller passes none.

        Most families have no default and raise an error. The other families override this method.

        Raises:
            UsageError: The family has no default.
        """
        raise UsageError(
            f"{type(self).__name__} requires decoder_input_ids: create them from the labels with "
            "shift_tokens_right(labels, pad_token_id, decoder_start_token_id)"
        )

    def encoder_mask(self, attention_mask: Input, encoder_outputs: EncoderOutputs) -> Input:
        """Returns the mask of the encoder's output, which the decoder needs for cross-attention.

        By default it is the mask of the encoder's input. Families whose encoder shortens its input
        override this method.

        Args:
            attention_mask: Mask of the encoder's input.
            encoder_outputs: Outputs of ``encode``.
        """
        return attention_mask

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        encoder_outputs: EncoderOutputs | None = None,
        params: trees.Params | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Returns a cache for ``decode``.

        Args:
            batch_size: Batch size of the decoder.
            max_length: Maximum number of decoder tokens.
            encoder_outputs: Outputs of ``encode``. The first entry has the shape `(sources, source
                length, features)`. With beam search, ``batch_size`` is a multiple of the number of
                sources.
            params: The parameters of the model. If both ``params`` and ``encoder_outputs`` are
                passed, the keys and values of cross-attention are computed once and stored in the
                cache. If one of them is missing, ``decode`` computes these keys and values at every
                step.
        """
        if params is None or encoder_outputs is None:
            return self._empty_cache(kv_cache.CacheSize(batch_size, max_length))
        rows, length = encoder_outputs[0].shape[:2]
        size = kv_cache.CacheSize(batch_size, max_length, encoder=(rows, length))
        empty_cache = self._empty_cache(size)
        inputs = {
            "decoder_input_ids": jnp.zeros((batch_size, 1), jnp.int32),
            "encoder_hidden_states": encoder_outputs[0],
        }
        if self.accepts("decoder_position_ids", "decode"):
            inputs["decoder_position_ids"] = jnp.zeros((batch_size, 1), jnp.int32)
        # One decoding step fills the cache of cross-attention. Its other results are not used, so
        # the compiler removes their computation.
        cache = self.run(
            inputs,
            params,
            past_key_values=empty_cache,
            return_dict=True,
            method="decode",
            fill_encoder_cache=True,
        ).past_key_values
        return kv_cache.restart(cache, empty_cache)


if TYPE_CHECKING:
    _Model = FlaxSeq2SeqPreTrainedModel
else:
    _Model = object  # a mixin, used together with a model class


class Seq2SeqGeneration(_Model):
    """A mixin that prepares and updates the inputs of generation for encoder-decoder models."""

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids: jax.Array,
        max_length: int,
        attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
        encoder_outputs: EncoderOutputs | None = None,
        params: trees.Params | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the first call of ``decode``.

        Args:
            decoder_input_ids: First tokens of the decoder, `(batch, length)`.
            max_length: Number of tokens that the cache can contain.
            attention_mask: Mask of the encoder's input. Its batch size may be smaller than that of
                ``decoder_input_ids``, because the beams of a source share one mask.
            decoder_attention_mask: Mask of the first tokens.
            encoder_outputs: Outputs of ``encode``.
            params: The parameters of the model, with which :meth:`init_cache` stores the keys and
                values of cross-attention in the cache.
        """
        batch, length = decoder_input_ids.shape
        mask = jnp.ones((batch, max_length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        if decoder_attention_mask is not None:
            prompt_mask = jnp.asarray(decoder_attention_mask, jnp.int32)
            mask = jax.lax.dynamic_update_slice(mask, prompt_mask, (0, 0))
            positions = jnp.maximum(prompt_mask.cumsum(-1) - 1, 0)
        prepared: dict[str, Any] = {
            "past_key_values": self.init_cache(batch, max_length, encoder_outputs, params=params),
            "encoder_outputs": encoder_outputs,
            "encoder_attention_mask": attention_mask
            if encoder_outputs is None
            else self.encoder_mask(attention_mask, encoder_outputs),
            "decoder_attention_mask": mask,
        }
        if self.accepts("decoder_position_ids", "decode"):
            prepared["decoder_position_ids"] = positions
        return prepared

    def update_inputs_for_generation(
        self, model_outputs: FlaxModelOutput, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the next ``decode``, with a new cache and position."""
        updated = {**model_kwargs, "past_key_values": model_outputs.past_key_values}
        if "decoder_position_ids" in updated:
            updated["decoder_position_ids"] = updated["decoder_position_ids"][:, -1:] + 1
        return updated
