"""Pretraining of wav2vec 2.0 with the helper functions of its old module."""

import sys

import jax
import numpy as np
from transformers import FlaxWav2Vec2ForPreTraining, Wav2Vec2FeatureExtractor
from transformers.models.wav2vec2.modeling_flax_wav2vec2 import (
    _compute_mask_indices,
    _sample_negative_indices,
)


def main(folder, output):
    np.random.seed(0)  # noqa: NPY002  # the helpers use this generator
    model = FlaxWav2Vec2ForPreTraining.from_pretrained(folder)
    extractor = Wav2Vec2FeatureExtractor.from_pretrained(folder)
    audio = list(np.random.default_rng(0).normal(size=(2, 180)).astype(np.float32))
    batch = extractor(audio, sampling_rate=16_000, padding=True, return_tensors="np")
    frames = int(model._get_feat_extract_output_lengths(batch["input_values"].shape[-1]))
    features_shape = (2, frames, model.config.proj_codevector_dim)
    mask = _compute_mask_indices((2, frames), 0.4, 3, min_masks=2)
    negatives = _sample_negative_indices(features_shape, 5)
    outputs = model(batch["input_values"], mask_time_indices=mask)
    projected = outputs.projected_states.reshape(-1, features_shape[-1])
    quantized = outputs.projected_quantized_states.reshape(-1, features_shape[-1])
    candidates = quantized[negatives.reshape(2 * frames, -1)]
    candidates = np.concatenate([quantized[:, None], candidates], axis=1)
    logits = jax.numpy.einsum("nd,ncd->nc", projected, candidates)
    loss = -(jax.nn.log_softmax(logits)[:, 0] * mask.reshape(-1)).sum() / mask.sum()
    np.savez(
        output,
        values=batch["input_values"],
        mask=mask,
        negatives=negatives,
        projected=outputs.projected_states,
        quantized=outputs.projected_quantized_states,
        loss=loss,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
