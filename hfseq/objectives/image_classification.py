"""Classification of pictures, by one label each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import ImageArguments, TextArguments
from hfseq.data.batches import IGNORE_INDEX, IndexRows, RowRandom
from hfseq.data.classification import LabelEncoder, config_labels
from hfseq.data.images import ImageDataset, load_image_processor, load_images
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
    """Cross-entropy of the class of each picture, and how many are right.

    Pictures are decoded while batches are made, by processes of their own; training cuts out a part
    of each at random, which depends on seed, step and row alone. What cannot be read counts for
    nothing, and is named and counted in the log and the metrics.
    """

    name = "image_classification"
    data_arguments = ImageArguments  # type: ignore[assignment]
    auto_class = "ForImageClassification"
    default_model_type = "vit"

    arguments: ImageArguments  # type: ignore[assignment]

    def setup(self) -> None:
        """Find the pictures, and the metrics that judge what is predicted for them."""
        self.splits = load_images(self.arguments)
        self.regression, self.types = False, False
        self.labels = LabelEncoder(config_labels(self.config), by_number="train" not in self.splits)
        self.sums = ("correct",)  # type: ignore[misc]
        self.load_metrics(self.arguments.metrics or ("accuracy",))
        self.open_decoder(self.tokenizer)
        self._numbers = {}

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Load the image processor of the checkpoint, or make a plain one."""
        assert isinstance(arguments, ImageArguments)
        options.pop("trust_remote_code", None)
        return load_image_processor(name, arguments.image_size, **options)

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, fresh: bool) -> None:
        """Let a model that is made anew read the size that the processor makes."""
        size = getattr(tokenizer, "crop_size", None) or tokenizer.size
        if fresh and getattr(config, "image_size", None) is not None:
            sides = [size.get(side, size.get("shortest_edge")) for side in ("height", "width")]
            config.image_size = sides[0] if sides[0] == sides[1] else sides

    @classmethod
    def configure_data(  # type: ignore[override]
        cls, config: PreTrainedConfig, arguments: ImageArguments, plugins: Plugins | None
    ) -> None:
        """Let the model have the classes of the data."""
        cls.set_classes(config, load_images(arguments, plugins))

    def choose_length(self, limit: int | None) -> int:
        """Return the places of a picture in the model: its patches and the first, or one."""
        patch = getattr(self.config, "patch_size", None)
        if patch is None:
            return 1
        sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
        _, height, width = self.decoder.shape
        return (height // sides[0]) * (width // sides[1]) + 1

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Number the pictures of a split; log how many each class has."""
        pictures: ImageDataset = splits[split]
        labels = self._numbers[split] = self.labels.encode_labels(pictures, split)
        assert self.labels.names is not None
        counts = Counter(labels.tolist())
        shown = [f"{name} {counts[number]}" for number, name in enumerate(self.labels.names)]
        shown = shown[:20] + ([f"and {len(shown) - 20} classes more"] if shown[20:] else [])
        shown += [f"without a label {counts[IGNORE_INDEX]}"] if IGNORE_INDEX in counts else []
        logger.info("%s: %d pictures: %s", split, len(labels), ", ".join(shown))
        rows = IndexRows(pictures, length, split, {"labels": labels.copy()})
        return rows, {"documents": len(rows), "tokens": len(rows) * length}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Decode the pictures; those that cannot be read count for nothing."""
        pixels, read = self.read(rows, random)
        labels = rows["labels"]
        counts = read & (labels != IGNORE_INDEX)
        return {
            "pixel_values": pixels,
            "labels": np.where(counts, labels, 0).astype(np.int32),
            "counts": counts,
            "valid": rows["valid"],
        }

    def on_skip(self, split: str, number: int) -> None:
        """Have no label where there is no picture."""
        self._numbers[split][number] = IGNORE_INDEX

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Sum the loss over pictures; in evaluation the logits of each row come along."""
        output, changed = forward(model, params, rngs, train, extra, batch["pixel_values"])
        counts = batch["counts"]
        targets = jnp.where(counts, batch["labels"], IGNORE_INDEX)
        total, _, right = cross_entropy(output.logits, targets)
        totals: dict[str, jax.Array] = {"correct": right}
        if not train:
            totals["row_outputs"] = output.logits.astype(jnp.float32)
        return total, counts.sum(), {"extra": changed, "totals": totals}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Judge the predictions for a split, and say how many pictures could not be read."""
        return super().row_metrics(rows, split) | self.skip_metrics(split)

    def tokens(self, rows: Arrays) -> int:
        """Return the places of the pictures that count."""
        return int(rows["valid"].sum()) * self.choose_length(None)
