"""The base class of encoder-decoders: the call, ``encode``, ``decode``, and steps of generation.

The module of such a model has three entries, ``__call__``, ``encode`` and ``decode``; a family that
numbers positions takes ``position_ids`` and ``decoder_position_ids`` there. What the encoder reads
is the first argument, under the name ``main_input_name``: ids, or the numbers of sound or pictures.
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

#: What ``encode`` returns, whose first entry is the last hidden state.
EncoderOutputs = FlaxModelOutput | tuple[Any, ...]


def shift_tokens_right(
    input_ids: jax.Array | np.ndarray, pad_token_id: int, decoder_start_token_id: int
) -> jax.Array:
    """Make decoder inputs of labels: begin with the start token, drop the last, -100 becomes pad.

    ``input_ids`` is (batch, length), NumPy or JAX; returns int32 of the same shape.
    """
    ids = jnp.asarray(input_ids, jnp.int32)
    shifted = jnp.roll(ids, 1, axis=1).at[:, 0].set(decoder_start_token_id)
    return jnp.where(shifted == -100, pad_token_id, shifted)


class FlaxSeq2SeqPreTrainedModel(FlaxPreTrainedModel):
    """Base of the encoder-decoders.

    Beside the arguments named here, ``segment_ids`` and ``decoder_segment_ids`` (batch, length)
    number the pairs that are packed into a row: nothing attends across them. 0 is padding.
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
        """Run encoder and decoder; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` (batch, source length) and ``decoder_input_ids`` (batch, target length).
        """
        if decoder_input_ids is None:
            decoder_input_ids = self.default_decoder_input_ids(input_ids)
        given = {
            self.main_input_name: input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
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
        """Run the encoder alone: (batch, source length) to hidden states."""
        given = {self.main_input_name: input_ids, "attention_mask": attention_mask, **inputs}
        return self.run(
            given,
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
        """Run the decoder on ``encoder_outputs``, whose first entry is the last hidden state.

        With ``past_key_values`` the ``decoder_attention_mask`` covers the whole cache, and the
        output carries the cache after this call.
        """
        given = {
            "decoder_input_ids": decoder_input_ids,
            "encoder_hidden_states": encoder_outputs[0],
            "encoder_attention_mask": encoder_attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            **inputs,
        }
        if self.accepts("decoder_position_ids", "decode"):
            given.setdefault("decoder_position_ids", None)
        return self.run(
            given,
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
        """Return what the decoder reads where the caller does not say; most families refuse."""
        raise UsageError(
            f"{type(self).__name__} needs decoder_input_ids: shift_tokens_right(labels, "
            "pad_token_id, decoder_start_token_id) makes them of the targets"
        )

    def encoder_mask(self, attention_mask: Input, encoder_outputs: EncoderOutputs) -> Input:
        """Return the mask of what the encoder gave, for the decoder, from that of its input.

        They are one where the encoder keeps the length; families whose encoder shortens its input
        override this.
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
        """Return a cache for ``decode``; with ``params`` it holds the encoder's keys and values.

        They are then computed once instead of at every step. ``encoder_outputs[0]`` is (rows,
        source length, features), where ``batch_size`` may be a multiple of ``rows`` (beams).
        """
        if params is None or encoder_outputs is None:
            return self._empty_cache(kv_cache.CacheSize(batch_size, max_length))
        rows, length = encoder_outputs[0].shape[:2]
        size = kv_cache.CacheSize(batch_size, max_length, encoder=(rows, length))
        empty = self._empty_cache(size)
        inputs = {
            "decoder_input_ids": jnp.zeros((batch_size, 1), jnp.int32),
            "encoder_hidden_states": encoder_outputs[0],
        }
        if self.accepts("decoder_position_ids", "decode"):
            inputs["decoder_position_ids"] = jnp.zeros((batch_size, 1), jnp.int32)
        # One step for the sake of what it leaves behind; the compiler drops the rest of it.
        filled = self.run(
            inputs,
            params,
            past_key_values=empty,
            return_dict=True,
            method="decode",
            fill_encoder_cache=True,
        ).past_key_values
        return kv_cache.restart(filled, empty)


if TYPE_CHECKING:
    _Model = FlaxSeq2SeqPreTrainedModel
else:
    _Model = object  # a mixin: the model class stands beside it


class Seq2SeqGeneration(_Model):
    """The first and the next step of generation, for encoder-decoders with a head."""

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
        """Return the keyword arguments of the first ``decode``; the cache holds ``max_length``.

        ``attention_mask`` is that of the encoder's input, which may have fewer rows than
        ``decoder_input_ids`` when several beams share a row.
        """
        batch, length = decoder_input_ids.shape
        mask = jnp.ones((batch, max_length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        if decoder_attention_mask is not None:
            given = jnp.asarray(decoder_attention_mask, jnp.int32)
            mask = jax.lax.dynamic_update_slice(mask, given, (0, 0))
            positions = jnp.maximum(given.cumsum(-1) - 1, 0)
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
        """Return the keyword arguments of the next ``decode``: the new cache, one position on."""
        updated = {**model_kwargs, "past_key_values": model_outputs.past_key_values}
        if "decoder_position_ids" in updated:
            updated["decoder_position_ids"] = updated["decoder_position_ids"][:, -1:] + 1
        return updated
