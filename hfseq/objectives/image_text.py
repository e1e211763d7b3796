"""Contrastive training on pictures and their captions (Radford et al., 2021, section 2.3)."""

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
    """Each picture of the global batch has to find its caption, and each caption its picture.

    The loss is the mean of both, over all devices; a micro-batch of ``--gradient_accumulation``
    compares what is in it alone. Accuracy is how many captions find their picture in the batch, so
    it belongs to the size of the batch.
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
        """Load the image processor and the tokenizer that lie beside the model."""
        if name is None:
            raise UsageError(
                "no model: give --model_name_or_path, a folder with both encoders, an image "
                "processor and a tokenizer (docs/image_text.md makes one of two checkpoints)"
            )
        assert isinstance(arguments, ImageTextArguments)
        return load_processor_pair(name, arguments.image_size, **options)

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, fresh: bool) -> None:
        """Refuse a model that does not compare pictures and texts, and another's tokenizer."""
        text = getattr(config, "text_config", None)
        if text is None or getattr(config, "vision_config", None) is None:
            raise UsageError(
                f"'{config.model_type}' is not a pair of encoders: give a CLIP or a "
                "vision-text-dual-encoder"
            )
        check_vocabulary(tokenizer.tokenizer, text)

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenise the captions of a split."""
        encoded = self.tokenizer(
            list(splits[split].captions),
            padding="max_length",
            truncation=True,
            max_length=length,
            return_tensors="np",
        )
        ids, mask = (encoded[name].astype(np.int32) for name in ("input_ids", "attention_mask"))
        rows = IndexRows(ids, length, split, {"input_ids": ids, "segment_ids": mask})
        logger.info("%s: %d pictures with captions", split, len(rows))
        return rows, {"documents": len(rows), "tokens": int(mask.sum())}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Decode the pictures; a pair without one counts for nothing."""
        pixels, counts = self.read(rows, random)
        return {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["segment_ids"],
            "pixel_values": pixels,
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
        """Sum the loss over pairs, compared with all pairs of the batch that count."""
        output, changed = forward(
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
        # What does not count is nobody's answer.
        logits = jnp.where(counts[None], output.logits_per_text.astype(jnp.float32), -1e9)
        back = jnp.where(counts[None], output.logits_per_image.astype(jnp.float32), -1e9)
        targets = jnp.where(counts, jnp.arange(len(logits)), IGNORE_INDEX)
        texts, _, right = cross_entropy(logits, targets)
        pictures, _, _ = cross_entropy(back, targets)
        return (
            (texts + pictures) / 2,
            counts.sum(),
            {"extra": changed, "totals": {"correct": right}},
        )

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the loss and the accuracy, and how many pictures could not be read."""
        metrics = super().metrics(totals)
        metrics.pop("perplexity", None)
        return metrics | self.skip_metrics()
