"""Shared parts of the objectives with image inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.data.arguments import SPLITS, ImageArguments
from hfseq.data.batches import RowRandom
from hfseq.data.images import (
    ImageDataset,
    ImageDecoder,
    check_image_shape,
    load_image_processor,
    load_images,
    num_decode_workers,
    random_crops,
)
from hfseq.errors import DataError, UsageError, first_line
from hfseq.objectives.base import Arrays, ProcessorPair, SkippedExamplesMixin

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel


def load_processor_pair(name: str, image_size: int | None, **options: Any) -> ProcessorPair:
    """Loads the image processor and the tokenizer of a checkpoint.

    Args:
        name: Directory or Hub name of the checkpoint.
        image_size: Overrides the image size of the processor.
        **options: Download options for the Hub.

    Raises:
        UsageError: The checkpoint has no tokenizer or no image processor.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # the Rust reader of tokenizer.json raises plain exceptions
        raise UsageError(f"'{name}' has no tokenizer ({first_line(error)})") from error
    options.pop("trust_remote_code", None)
    return ProcessorPair(load_image_processor(name, image_size, **options), tokenizer)


class ImageInputMixin(SkippedExamplesMixin):
    """Decodes the images of a batch, and skips images that cannot be read."""

    unit = "images"
    arguments: Any
    splits: Any
    tokenizer: Any
    decoder: ImageDecoder

    def setup(self) -> None:
        """Loads the image lists and starts the decoder."""
        self.splits, self.processors = load_images(self.arguments), self.tokenizer
        self.open_decoder(self.processors.input_processor)
        self.tokenizer = self.processors.tokenizer

    def open_decoder(self, processor: Any) -> None:
        """Starts the decoding processes for a Transformers image processor."""
        assert isinstance(self.arguments, ImageArguments)
        num_workers = num_decode_workers(self.arguments)
        max_pixels = self.arguments.max_image_pixels
        self.decoder, self.skipped_examples = ImageDecoder(processor, num_workers, max_pixels), {}

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks that the model accepts the images of the processor."""
        check_image_shape(model, self.decoder)

    def read_images(self, rows: Arrays, random: RowRandom) -> tuple[np.ndarray, np.ndarray]:
        """Decodes the images of a batch.

        Args:
            rows: The fetched rows.
            random: Source of random numbers for the crops.

        Returns:
            The pixel values, float32 `(rows, channels, height, width)`, and a bool array `(rows,)`
            that is true for valid rows whose image could be read.

        Raises:
            DataError: None of the images of a whole global batch can be read.
        """
        split = SPLITS[int(rows["split"][0])]
        images = self.splits[split]
        assert isinstance(images, ImageDataset)
        indices, valid = rows["numbers"].tolist(), rows["valid"]
        crops = None
        if split == "train" and self.arguments.augment:
            crops = random_crops(random.uniform(5))
        sources = [images.sources[index] for index in indices]
        decoded = self.decoder(sources, crops)
        for index, source, reason in zip(indices, sources, decoded.reasons, strict=True):
            if reason is not None:
                self.skip_example(split, index, source.name, reason)
        is_read = valid & np.array([reason is None for reason in decoded.reasons])
        num_valid, num_read = int(valid.sum()), int(is_read.sum())
        is_single = num_valid * jax.process_count() == 1  # it may be the only damaged file
        if self.count_unread(split, num_valid, num_read) and not is_single:
            raise DataError(
                f"none of the {num_valid} images in a batch can be read. The first is "
                f"{sources[0].name}: {decoded.reasons[0]}"
            )
        return decoded.pixel_values, is_read
