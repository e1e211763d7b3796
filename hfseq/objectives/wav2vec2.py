"""Self-supervised pretraining of wav2vec 2.0 (Baevski et al., 2020, section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import SpeechPretrainingArguments
from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError
from hfseq.objectives.audio import AudioInputMixin, draw_time_mask
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, forward

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel


def draw_negatives(
    hidden: np.ndarray, count: int, generators: list[np.random.Generator]
) -> np.ndarray:
    """Draws ``count`` other masked frames of the same row for each masked frame.

    Args:
        hidden: Masked frames, bool `(rows, frames)`.
        count: Number of negatives per frame.
        generators: One random generator per row.

    Returns:
        The indices of the negative frames, int32 `(rows, frames, count)`.
    """
    negatives = np.zeros((*hidden.shape, count), np.int32)
    for row, hidden_frames, generator in zip(
        negatives, map(np.flatnonzero, hidden), generators, strict=True
    ):
        if len(hidden_frames) > 1:
            picks = generator.integers(len(hidden_frames) - 1, size=(len(hidden_frames), count))
            picks += picks >= np.arange(len(hidden_frames))[:, None]  # skip the frame itself
            row[hidden_frames] = hidden_frames[picks]
    return negatives


def contrastive_loss(
    states: jax.Array, codes: jax.Array, negatives: jax.Array, hidden: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Sums the contrastive loss over masked frames, and counts correct predictions.

    The state of a masked frame should be more similar to the frame's own code than to the codes of
    its negatives. Negatives with the same code as the frame are ignored.

    Args:
        states: Projected hidden states, `(rows, frames, features)`.
        codes: Projected quantized states, `(rows, frames, features)`.
        negatives: Indices of the negative frames, `(rows, frames, count)`.
        hidden: Masked frames, bool `(rows, frames)`.
        temperature: Divisor of the cosine similarities.

    Returns:
        The summed loss, and the number of masked frames whose own code is the most similar one.
    """
    states, codes = (x.astype(jnp.float32) for x in (states, codes))
    directions = (x / _length(x) for x in (states, codes))
    # The similarities of all pairs of frames take much less memory than an array with the codes of
    # all negatives.
    similarities = jnp.einsum("btd,bsd->bts", *directions) / temperature
    negative_similarities = jnp.take_along_axis(similarities, negatives, axis=2)
    positive = jnp.diagonal(similarities, axis1=1, axis2=2)
    fixed_codes = jax.lax.stop_gradient(codes)
    negative_codes = jax.vmap(lambda row, numbers: row[numbers])(fixed_codes, negatives)
    distances = _length(negative_codes - fixed_codes[:, :, None])[..., 0]
    # Projections of the same code are equal up to rounding.
    negative_similarities = jnp.where(
        distances > 1e-4 * _length(fixed_codes), negative_similarities, -jnp.inf
    )
    all_similarities = jnp.concatenate([positive[..., None], negative_similarities], axis=-1)
    losses = jax.nn.logsumexp(all_similarities, axis=-1) - positive
    best = negative_similarities.max(-1)
    is_correct = hidden & (positive > best) & jnp.isfinite(best)
    return jnp.where(hidden, losses, 0).sum(), is_correct.sum()


def _length(x: jax.Array) -> jax.Array:
    # The norm is at least 1e-8, as in PyTorch's cosine similarity. Zero vectors have no gradient.
    return jnp.sqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-16))


class Wav2Vec2(AudioInputMixin, Objective):
    """Contrastive loss of masked frames plus a diversity loss of the codebook.

    As in the PyTorch script of Transformers, the loss is the mean contrastive loss per masked
    frame, plus ``diversity_loss_weight`` times the fraction of codes that the (micro-)batch does
    not use. Masked spans and negatives depend on seed, step and row only. Training samples the code
    of each frame, with a separate PRNG key for each row and a temperature that decreases over the
    steps.
    """

    name = "wav2vec2"
    data_arguments = SpeechPretrainingArguments
    auto_class = "ForPreTraining"
    default_model_type = "wav2vec2"
    sums = ("correct", "contrastive", "codes", "frames", "temperature")
    supports_streaming = False

    arguments: SpeechPretrainingArguments

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, from_scratch: bool) -> None:
        """Checks that the model has a codebook and masks frames.

        A new model uses an attention mask only if `feat_extract_norm` is "layer". Group
        normalization would include the padding of a row in spite of the mask.
        """
        if not hasattr(config, "num_codevectors_per_group"):
            raise UsageError(f"'{config.model_type}' has no codebook. Use --model_type wav2vec2.")
        if getattr(config, "add_adapter", False):
            raise UsageError(
                "pretraining does not support add_adapter=True. Set --config_overrides "
                "add_adapter=false."
            )
        if not config.apply_spec_augment:
            raise UsageError(
                "apply_spec_augment=False disables the masking that pretraining requires. Set "
                "--config_overrides apply_spec_augment=true."
            )
        if from_scratch:  # group normalization would include padding despite the mask
            tokenizer.return_attention_mask = config.feat_extract_norm == "layer"

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Reads the audio and draws masked spans and negatives."""
        audio = self.read_audio(rows, random)
        width = int(self.count_frames(audio.values.shape[1]))
        frames = self.count_frames(audio.lengths)
        generators = random.generators()
        hidden = draw_time_mask(frames, width, *self.mask_settings(), generators)
        data = self.arguments
        temperature = data.max_gumbel_temperature * data.gumbel_temperature_decay**random.step
        temperature = max(temperature, data.min_gumbel_temperature)
        return self.model_inputs(audio) | {
            "hidden": hidden,
            "frames": frames.astype(np.int32),
            "negatives": draw_negatives(hidden, self.config.num_negatives, generators),
            "temperature": np.full(len(frames), temperature, np.float32),
        }

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the sum of the loss over masked frames, and their number."""
        hidden, temperature = batch["hidden"], batch["temperature"]
        output, new_extra = forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_values"],
            attention_mask=batch.get("attention_mask"),
            mask_time_indices=hidden,
            gumbel_temperature=temperature[:, None, None, None],
            freeze_feature_encoder=self.arguments.freeze_feature_extractor,
        )
        contrastive, correct = contrastive_loss(
            output.projected_states,
            output.projected_quantized_states,
            batch["negatives"],
            hidden,
            self.config.contrastive_logits_temperature,
        )
        count, perplexity = hidden.sum(), output.codevector_perplexity
        total = contrastive + self.config.diversity_loss_weight * self._unused(perplexity) * count
        totals = {
            "correct": correct,
            "contrastive": contrastive,
            "codes": perplexity * count,
            "frames": batch["frames"].sum(),
        }
        if train:  # evaluation uses the most probable codes instead of sampling
            totals["temperature"] = temperature[0] * count
        return total, count, {"extra": new_extra, "totals": totals}

    def _unused(self, perplexity: Any) -> Any:
        """Returns the fraction of unused codes."""
        codes = self.config.num_codevectors_per_group * self.config.num_codevector_groups
        return (codes - perplexity) / codes

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss, the two parts of the loss, the codebook perplexity and the masked
        fraction.

        The perplexity is a mean over batches. The perplexity and the loss depend on the batch size.
        """
        count = max(totals["count"], 1)
        metrics = super().metrics(totals)
        metrics.pop("perplexity")
        codes = totals["codes"] / count
        metrics |= {
            "contrastive_loss": totals["contrastive"] / count,
            "diversity_loss": self._unused(codes),
            "codevector_perplexity": codes,
            "masked_share": totals["count"] / max(totals["frames"], 1),
        }
        if "temperature" in totals:
            metrics["gumbel_temperature"] = totals["temperature"] / count
        return metrics | self.skip_metrics()
