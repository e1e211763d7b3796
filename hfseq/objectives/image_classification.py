"""Image classification with one label per image."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import ImageArguments, TextArguments
from hfseq.data.batches import IGNORE_INDEX, IndexRows, RowRandom
from hfseq.data.classification import SINGLE_LABEL, LabelEncoder, config_labels
from hfseq.data.images import ImageDataset, load_image_processor, load_images
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays, Batch, Loss, Params, RowsAndStats, forward
from hfseq.objectives.classification import Classification
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.images import ImageInputMixin

if TYPE_CHECKING:
    import jax
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)


class ImageClassification(ImageInputMixin, Classification):
    """Cross-entropy of the class of each image.

    Images are decoded in separate processes when a batch is made. Training crops each image at
    random. The crop depends only on seed, step and row. Images that cannot be read are skipped,
    logged and counted in the metrics.
    """

    name = "image_classification"
    data_arguments = ImageArguments  # type: ignore[assignment]
    auto_class = "ForImageClassification"
    default_model_type = "vit"

    arguments: ImageArguments  # type: ignore[assignment]

    def setup(self) -> None:
        """Loads the image lists and the metrics."""
        self.splits = load_images(self.arguments)
        self.regression = self.multi_label = self.uses_token_types = False
        self.labels = LabelEncoder(config_labels(self.config), by_number="train" not in self.splits)
        self.sums = ("correct",)  # type: ignore[misc]
        self.load_metrics(self.arguments.metrics or ("accuracy",))
        self.open_decoder(self.tokenizer)
        self._label_ids = {}

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Loads the image processor of the checkpoint, or creates a default one."""
        assert isinstance(arguments, ImageArguments)
        options.pop("trust_remote_code", None)
        return load_image_processor(name, arguments.image_size, **options)

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, from_scratch: bool) -> None:
        """Sets the image size of a new model to the output size of the processor."""
        size = getattr(tokenizer, "crop_size", None) or tokenizer.size
        if from_scratch and getattr(config, "image_size", None) is not None:
            image_size = [size.get(side, size.get("shortest_edge")) for side in ("height", "width")]
            config.image_size = image_size[0] if image_size[0] == image_size[1] else image_size

    @classmethod
    def configure_data(  # type: ignore[override]
        cls, config: PreTrainedConfig, arguments: ImageArguments, plugins: Plugins | None
    ) -> None:
        """Sets the classes of the data in ``config``.

        Raises:
            UsageError: An image has a list of labels.
        """
        splits = load_images(arguments, plugins)
        for split, images in splits.items():
            row = next((i for i, x in enumerate(images.labels) if isinstance(x, tuple)), None)
            if row is not None:
                raise UsageError(
                    f"{images.place(row)} in {split} has a list of labels. Image classification "
                    "supports one label per image."
                )
        config.problem_type = SINGLE_LABEL
        cls.set_classes(config, splits)

    def choose_length(self, limit: int | None) -> int:
        """Returns the number of positions that an image occupies in the model.

        These are its patches and the class token, or 1 if the model has no patches."""
        config_patch_size = getattr(self.config, "patch_size", None)
        if config_patch_size is None:
            return 1
        patch_size = (
            (config_patch_size, config_patch_size)
            if isinstance(config_patch_size, int)
            else tuple(config_patch_size)
        )
        _, height, width = self.decoder.shape
        return (height // patch_size[0]) * (width // patch_size[1]) + 1

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Returns rows with the indices and labels of the images of a split.

        Also logs the number of images in each class.
        """
        images: ImageDataset = splits[split]
        labels = self._label_ids[split] = self.labels.encode_labels(images, split)
        assert self.labels.names is not None
        counts = Counter(labels.tolist())
        class_counts = [f"{name} {counts[number]}" for number, name in enumerate(self.labels.names)]
        class_counts = class_counts[:20] + (
            [f"and {len(class_counts) - 20} more classes"] if class_counts[20:] else []
        )
        class_counts += [f"unlabeled {counts[IGNORE_INDEX]}"] if IGNORE_INDEX in counts else []
        logger.info("%s: %d images: %s", split, len(labels), ", ".join(class_counts))
        rows = IndexRows(images, length, split, {"labels": labels.copy()})
        return rows, {"documents": len(rows), "tokens": len(rows) * length}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Decodes the images.

        "counts" is false for images that have no label or cannot be read.
        """
        pixel_values, is_read = self.read_images(rows, random)
        labels = rows["labels"]
        counts = is_read & (labels != IGNORE_INDEX)
        return {
            "pixel_values": pixel_values,
            "labels": np.where(counts, labels, 0).astype(np.int32),
            "counts": counts,
            "valid": rows["valid"],
        }

    def on_skip(self, split: str, index: int) -> None:
        """Removes the label of a skipped image, so that metrics ignore the image."""
        self._label_ids[split][index] = IGNORE_INDEX

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the sum of the loss over images, and their number.

        In evaluation, the totals also include the logits.
        """
        output, new_extra = forward(model, params, rngs, train, extra, batch["pixel_values"])
        counts = batch["counts"]
        targets = jnp.where(counts, batch["labels"], IGNORE_INDEX)
        total, _, correct = cross_entropy(output.logits, targets)
        totals: dict[str, jax.Array] = {"correct": correct}
        if not train:
            totals["row_outputs"] = output.logits.astype(jnp.float32)
        return total, counts.sum(), {"extra": new_extra, "totals": totals}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Scores the predictions for a split, and counts skipped images."""
        return super().row_metrics(rows, split) | self.skip_metrics(split)

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of positions of each valid image."""
        return rows["valid"] * self.choose_length(None)
