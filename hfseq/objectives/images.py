"""What objectives on pictures have in common: they are decoded while batches are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    """Load the image processor and the tokenizer of the checkpoint ``name``."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # the Rust reader of tokenizer.json raises nothing more exact
        raise UsageError(f"'{name}' has no tokenizer ({first_line(error)})") from error
    options.pop("trust_remote_code", None)
    return ProcessorPair(load_image_processor(name, image_size, **options), tokenizer)


class ImageInputMixin(SkippedExamplesMixin):
    """Decodes the pictures of a batch, and counts those that cannot be read."""

    unit = "pictures"
    arguments: Any
    splits: Any
    tokenizer: Any
    decoder: ImageDecoder

    def setup(self) -> None:
        """Find the pictures; an image processor and a tokenizer came together."""
        self.splits, self.both = load_images(self.arguments), self.tokenizer
        self.open_decoder(self.both.inputs)
        self.tokenizer = self.both.tokenizer

    def open_decoder(self, processor: Any) -> None:
        """Begin to read, with an image processor of Transformers."""
        assert isinstance(self.arguments, ImageArguments)
        workers, most = num_decode_workers(self.arguments), self.arguments.max_image_pixels
        self.decoder, self.skipped_examples = ImageDecoder(processor, workers, most), {}

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Refuse a model that cannot read what the processor makes."""
        check_image_shape(model, self.decoder)

    def read(self, rows: Arrays, random: RowRandom) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads of the pictures of a batch, and which of them count."""
        split = SPLITS[int(rows["split"][0])]
        pictures = self.splits[split]
        assert isinstance(pictures, ImageDataset)
        numbers, valid = rows["numbers"].tolist(), rows["valid"]
        crops = None
        if split == "train" and self.arguments.augment:
            crops = random_crops(random.uniform(5))
        sources = [pictures.sources[number] for number in numbers]
        decoded = self.decoder(sources, crops)
        for number, source, reason in zip(numbers, sources, decoded.reasons, strict=True):
            if reason is not None:
                self.skip_example(split, number, source.name, reason)
        read = valid & np.array([reason is None for reason in decoded.reasons])
        if valid.sum() > 1 and not read.any():
            raise DataError(
                f"none of the {valid.sum()} pictures of a batch can be read, the first of them "
                f"{sources[0].name}: {decoded.reasons[0]}"
            )
        return decoded.pixel_values, read
