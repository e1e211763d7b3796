"""What objectives on pictures have in common: they are decoded while batches are made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data.arguments import SPLITS, ImageArguments
from hfseq.data.batches import RowRandom
from hfseq.data.images import (
    NAMED,
    Decoder,
    Pictures,
    check_pictures,
    random_crops,
    workers_of,
)
from hfseq.errors import DataError
from hfseq.objectives.base import Arrays

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class ReadsPictures:
    """Decodes the pictures of a batch, and counts those that cannot be read."""

    arguments: Any
    splits: Any
    decoder: Decoder
    left_out: dict[str, dict[int, str]]

    def open_decoder(self, processor: Any) -> None:
        """Begin to read, with an image processor of Transformers."""
        assert isinstance(self.arguments, ImageArguments)
        workers, most = workers_of(self.arguments), self.arguments.max_image_pixels
        self.decoder, self.left_out = Decoder(processor, workers, most), {}

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Refuse a model that cannot read what the processor makes."""
        check_pictures(model, self.decoder)

    def read(self, rows: Arrays, random: RowRandom) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads of the pictures of a batch, and which of them count."""
        split = SPLITS[int(rows["split"][0])]
        pictures = self.splits[split]
        assert isinstance(pictures, Pictures)
        numbers, valid = rows["pictures"].tolist(), rows["valid"]
        crops = None
        if split == "train" and self.arguments.augment:
            crops = random_crops(random.uniform(5))
        sources = [pictures.sources[number] for number in numbers]
        decoded = self.decoder(sources, crops)
        for number, source, reason in zip(numbers, sources, decoded.reasons, strict=True):
            if reason is not None:
                self._leave_out(split, number, source.name, reason)
        read = valid & np.array([reason is None for reason in decoded.reasons])
        if valid.sum() > 1 and not read.any():
            raise DataError(
                f"none of the {valid.sum()} pictures of a batch can be read, the first of them "
                f"{sources[0].name}: {decoded.reasons[0]}"
            )
        return decoded.pixels, read

    def missed(self, split: str, number: int) -> None:
        """Learn that a picture of a split cannot be read."""

    def _leave_out(self, split: str, number: int, name: str, reason: str) -> None:
        """Name a picture that cannot be read, the first time."""
        found = self.left_out.setdefault(split, {})
        if number in found:
            return
        found[number] = reason
        self.missed(split, number)
        if len(found) <= NAMED:
            logger.warning("left out of %s: %s: %s", split, name, reason)
        elif len(found) in (10, 100, 1000, 10_000, 100_000):
            logger.warning("left out of %s so far: %d pictures", split, len(found))
