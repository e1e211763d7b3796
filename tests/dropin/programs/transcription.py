"""A transcription pipeline around Whisper, in the style of whisper-jax.

The pipeline holds the parameters itself, replicates them, and compiles `generate` with `pmap`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.frozen_dict import freeze, unfreeze
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from transformers import FlaxWhisperForConditionalGeneration, WhisperFeatureExtractor
from transformers.utils import logging

logger = logging.get_logger(__name__)


class TranscriptionPipeline:
    def __init__(self, checkpoint, dtype=jnp.bfloat16, max_length=12):
        self.dtype = dtype
        self.feature_extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
        self.model, params = FlaxWhisperForConditionalGeneration.from_pretrained(
            checkpoint, _do_init=False, dtype=dtype
        )
        cast = self.model.to_bf16 if dtype == jnp.bfloat16 else self.model.to_fp32
        self.params = freeze(cast(params))
        self.max_length = max_length
        self.p_generate = jax.pmap(self._generate, "data", static_broadcasted_argnums=(2, 3))

    def _generate(self, params, input_features, forced_decoder_ids, return_timestamps):
        return self.model.generate(
            input_features,
            params=params,
            forced_decoder_ids=forced_decoder_ids,
            return_timestamps=return_timestamps,
            max_length=self.max_length,
        ).sequences

    def chunks(self, audio, chunk_length, batch_size):
        starts = np.arange(0, len(audio), chunk_length)
        for batch in np.array_split(starts, max(len(starts) // batch_size, 1)):
            pieces = [audio[start : start + chunk_length] for start in batch]
            yield self.feature_extractor(
                pieces, sampling_rate=self.feature_extractor.sampling_rate, return_tensors="np"
            )["input_features"]

    def __call__(self, audio, chunk_length=800, batch_size=8):
        tokens, features = [], []
        params = replicate(self.params)
        for batch in self.chunks(audio, chunk_length, batch_size):
            count = len(batch)
            missing = -count % jax.device_count()
            padded = np.concatenate([batch, np.zeros((missing, *batch.shape[1:]), batch.dtype)])
            sequences = self.p_generate(params, shard(padded), ((1, 7), (2, 9)), False)
            tokens.append(np.asarray(sequences).reshape(-1, sequences.shape[-1])[:count])
            features.append(batch)
        return np.concatenate(features), np.concatenate(tokens)

    def step_by_step(self, features, decoder_ids):
        """Runs the encoder once and the decoder with a cache, one token at a time."""
        params = unfreeze(self.params)
        encoded = jax.jit(self.model.encode)(input_features=features, params=params)
        batch, length = decoder_ids.shape
        cache = self.model.init_cache(batch, self.max_length, encoded)
        mask = jnp.ones((batch, self.max_length), jnp.int32)
        logits = []
        for index in range(length):
            outputs = self.model.decode(
                decoder_ids[:, index : index + 1],
                encoded,
                decoder_attention_mask=mask,
                decoder_position_ids=jnp.full((batch, 1), index),
                past_key_values=cache,
                params=params,
            )
            cache = outputs.past_key_values
            logits.append(outputs.logits[:, 0])
        return encoded.last_hidden_state, jnp.stack(logits, axis=1)


def main(folder, output):
    audio = np.random.default_rng(0).normal(size=8 * 800).astype(np.float32)
    pipeline = TranscriptionPipeline(folder, dtype=jnp.float32)
    features, tokens = pipeline(audio)
    _, logits = pipeline.step_by_step(features[:2], tokens[:2, :6])
    halves = TranscriptionPipeline(folder)
    assert jax.tree.leaves(halves.params)[0].dtype == jnp.bfloat16
    encoded, _ = halves.step_by_step(features[:2], tokens[:2, :2])
    assert encoded.dtype == jnp.bfloat16
    logger.info("transcribed %d chunks", len(tokens))
    np.savez(
        output,
        features=features,
        tokens=tokens,
        logits=logits,
        encoded=np.asarray(encoded, np.float32),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
