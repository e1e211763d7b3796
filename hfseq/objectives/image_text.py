"""Contrastive training on images and captions (Radford et al., 2021, section 2.3)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import ImageTextArguments, TextArguments
from hfseq.data.batches import IGNORE_INDEX, IndexRows, RowRandom
from hfseq.data.tokenizers import check_vocabulary
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.images import ImageInputMixin, load_processor_pair

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class ImageText(ImageInputMixin, Objective):
    """CLIP's contrastive loss between the images and captions of the global batch.

    The model predicts the caption of each image among all captions of the batch, and the image of
    each caption among all images. The loss is the mean of the two cross-entropies. With
    ``--gradient_accumulation_steps``, only the images and captions of the same micro-batch are
    candidates. Accuracy is the fraction of captions whose most similar image in the batch is their
    own, so it depends on the batch size.
    """

    name = "image_text"
    data_arguments = ImageTextArguments
    auto_class = "Model"
    sums = ("correct",)
    supports_streaming = False
    default_length = 77

    arguments: ImageTextArguments

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Loads the image processor and the tokenizer of the checkpoint."""
        if name is None:
            raise UsageError(
                "no model: set --model_name_or_path to a directory with both encoders, an image "
                "processor and a tokenizer. docs/image_text.md shows how to create one from two "
                "checkpoints."
            )
        assert isinstance(arguments, ImageTextArguments)
        return load_processor_pair(name, arguments.image_size, **options)

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, from_scratch: bool) -> None:
        """Checks that the model has both encoders, and that the tokenizer fits its vocabulary."""
        text_config = getattr(config, "text_config", None)
        if text_config is None or getattr(config, "vision_config", None) is None:
            raise UsageError(
                f"'{config.model_type}' does not have an image and a text encoder. Use a CLIP or "
                "vision-text-dual-encoder model."
            )
        check_vocabulary(tokenizer.tokenizer, text_config)

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenizes the captions of a split."""
        encoded = self.tokenizer(
            list(splits[split].captions),
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="np",
        )
        ids, mask = (encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask"))
        rows = IndexRows(ids, length, split, {"input_ids": ids, "segment_ids": mask})
        logger.info("%s: %d images with captions", split, len(rows))
        return rows, {"documents": len(rows), "tokens": int(mask.sum())}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Decodes the images. "counts" is false for pairs whose image cannot be read."""
        pixel_values, counts = self.read_images(rows, random)
        return {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["segment_ids"],
            "pixel_values": pixel_values,
            "counts": counts,
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
        """Returns the sum of the loss over pairs, and the number of pairs.

        All valid pairs of the batch are candidates.
        """
        output, new_extra = forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            pixel_values=batch["pixel_values"],
            attention_mask=batch["attention_mask"],
        )
        counts = batch["counts"]
        # Pairs whose image cannot be read are not candidates.
        logits_per_text = jnp.where(counts[None], output.logits_per_text.astype(jnp.float32), -1e9)
        logits_per_image = jnp.where(
            counts[None], output.logits_per_image.astype(jnp.float32), -1e9
        )
        targets = jnp.where(counts, jnp.arange(len(logits_per_text)), IGNORE_INDEX)
        text_loss, _, correct = cross_entropy(logits_per_text, targets)
        image_loss, _, _ = cross_entropy(logits_per_image, targets)
        return (
            (text_loss + image_loss) / 2,
            counts.sum(),
            {"extra": new_extra, "totals": {"correct": correct}},
        )

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss, the accuracy and the number of skipped images."""
        metrics = super().metrics(totals)
        metrics.pop("perplexity", None)
        return metrics | self.skip_metrics()
