"""Learning from speech without text, as wav2vec 2.0 does (Baevski et al., 2020, section 3)."""

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
    """Draw, for each hidden frame, ``count`` other hidden ones of its row: (rows, width, count)."""
    drawn = np.zeros((*hidden.shape, count), np.int32)
    for row, places, draw in zip(drawn, map(np.flatnonzero, hidden), generators, strict=True):
        if len(places) > 1:
            others = draw.integers(len(places) - 1, size=(len(places), count))
            others += others >= np.arange(len(places))[:, None]  # any but its own
            row[places] = places[others]
    return drawn


def contrastive_loss(
    states: jax.Array, codes: jax.Array, negatives: jax.Array, hidden: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Return how badly ``states`` tell their own code from others, summed, and how many do.

    ``states`` and ``codes`` (rows, frames, width), ``negatives`` (rows, frames, others) numbers of
    frames of the row, ``hidden`` (rows, frames) which are asked. Another frame with the same code
    is no wrong answer.
    """
    states, codes = (x.astype(jnp.float32) for x in (states, codes))
    directions = (x / _length(x) for x in (states, codes))
    # Of all frames with all: much less than to gather the codes of all others.
    cosines = jnp.einsum("btd,bsd->bts", *directions) / temperature
    others = jnp.take_along_axis(cosines, negatives, axis=2)
    own = jnp.diagonal(cosines, axis1=1, axis2=2)
    given = jax.lax.stop_gradient(codes)
    their = jax.vmap(lambda row, numbers: row[numbers])(given, negatives)
    apart = _length(their - given[:, :, None])[..., 0]
    # One code is one vector up to the rounding of what projected it.
    others = jnp.where(apart > 1e-4 * _length(given), others, -jnp.inf)
    every = jnp.concatenate([own[..., None], others], axis=-1)
    losses = jax.nn.logsumexp(every, axis=-1) - own
    best = others.max(-1)
    right = hidden & (own > best) & jnp.isfinite(best)
    return jnp.where(hidden, losses, 0).sum(), right.sum()


def _length(x: jax.Array) -> jax.Array:
    # Of nothing 1e-8, as in PyTorch's cosines; its gradient is none then.
    return jnp.sqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-16))


class Wav2Vec2(AudioInputMixin, Objective):
    """Tell the code of each hidden frame from those of others of its sound; use all codes evenly.

    The loss is the mean over hidden frames, as PyTorch's script counts it: contrastive, and
    ``diversity_loss_weight`` times the share of codes out of use. That share is of the (micro-)
    batch. Spans and others are drawn from seed, step and row, the codes with the row's key;
    their temperature falls with the steps.
    """

    name = "wav2vec2"
    data_arguments = SpeechPretrainingArguments
    auto_class = "ForPreTraining"
    default_model_type = "wav2vec2"
    sums = ("correct", "contrastive", "codes", "frames", "temperature")
    supports_streaming = False

    arguments: SpeechPretrainingArguments

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, fresh: bool) -> None:
        """Refuse a model without codes, or one that hides nothing; a new one has a mask or not."""
        if not hasattr(config, "num_codevectors_per_group"):
            raise UsageError(
                f"'{config.model_type}' has no codes to predict: give --model_type wav2vec2"
            )
        if getattr(config, "add_adapter", False):
            raise UsageError(
                "add_adapter=True shortens what is predicted: pre-train without it "
                "(--config_overrides add_adapter=false)"
            )
        if not config.apply_spec_augment:
            raise UsageError(
                "apply_spec_augment=False hides nothing: give --config_overrides "
                "apply_spec_augment=true"
            )
        if fresh:  # a norm over a whole row would see padding whatever the mask says
            tokenizer.return_attention_mask = config.feat_extract_norm == "layer"

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Read the sounds, hide spans of their frames, and draw what these are told apart from."""
        heard = self.read(rows, random)
        width, frames = int(self.frames_of(heard.values.shape[1])), self.frames_of(heard.lengths)
        generators = random.generators()
        hidden = draw_time_mask(frames, width, *self.spans(), generators)
        given = self.arguments
        temperature = given.max_gumbel_temperature * given.gumbel_temperature_decay**random.step
        temperature = max(temperature, given.min_gumbel_temperature)
        return self.inputs(heard) | {
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
        """Sum the loss over hidden frames."""
        hidden, temperature = batch["hidden"], batch["temperature"]
        output, changed = forward(
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
        contrastive, right = contrastive_loss(
            output.projected_states,
            output.projected_quantized_states,
            batch["negatives"],
            hidden,
            self.config.contrastive_logits_temperature,
        )
        count, used = hidden.sum(), output.codevector_perplexity
        total = contrastive + self.config.diversity_loss_weight * self._unused(used) * count
        totals = {
            "correct": right,
            "contrastive": contrastive,
            "codes": used * count,
            "frames": batch["frames"].sum(),
        }
        if train:  # an evaluation chooses the nearest code
            totals["temperature"] = temperature[0] * count
        return total, count, {"extra": changed, "totals": totals}

    def _unused(self, perplexity: Any) -> Any:
        """Return the share of codes that are out of use."""
        codes = self.config.num_codevectors_per_group * self.config.num_codevector_groups
        return (codes - perplexity) / codes

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the loss and its parts, codes in use, and the share of frames that was hidden.

        The perplexity of codes is a mean over batches: like the loss, it belongs to their size.
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
