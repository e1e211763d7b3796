"""Pictures to captions and to classes: checkpoints at work on files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.data.images import (
    MAX_PIXELS,
    ImageDecoder,
    MediaSource,
    check_image_shape,
    load_image_processor,
)
from hfseq.errors import UsageError
from hfseq.pipelines import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel


@dataclass
class ImageResult:
    """What a model says of a picture: a caption, or classes with their probabilities."""

    name: str
    text: str | None = None
    labels: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, under the names of Transformers' pipelines."""
        if self.error:
            return {"file": self.name, "error": self.error}
        if self.text is not None:
            return {"file": self.name, "generated_text": self.text}
        shown = [{"label": label, "score": round(score, 6)} for label, score in self.labels]
        return {"file": self.name, "labels": shown}


class ImagePipeline:
    """Reads pictures, ``batch_size`` at a time, by ``workers`` processes (0: in this one).

    Memory holds a batch of them. Every batch is as large as the others, so that one program is
    compiled: what is missing in the last is filled up with nothing.
    """

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        processor: Any,
        *,
        batch_size: int = 8,
        workers: int = 0,
        max_image_pixels: int = MAX_PIXELS,
    ):
        if batch_size < 1:
            raise UsageError(f"batch_size {batch_size}: give a number of at least 1")
        self.model, self.batch_size = model, batch_size
        self.decoder = ImageDecoder(processor, workers, max_image_pixels)
        check_image_shape(model, self.decoder)

    def __call__(
        self, sources: Iterable[str | MediaSource], params: Mapping[str, Any] | None = None
    ) -> Iterator[ImageResult]:
        """Yield an :class:`Answer` for each picture, in order; broken ones have an ``error``."""
        pictures = (MediaSource(one) if isinstance(one, str) else one for one in sources)
        try:
            while batch := list(itertools.islice(pictures, self.batch_size)):
                decoded = self.decoder(batch)
                made = [
                    ImageResult(one.name, error=why)
                    for one, why in zip(batch, decoded.reasons, strict=True)
                ]
                good = [row for row, one in enumerate(made) if one.error is None]
                if good:
                    pixels = np.zeros((self.batch_size, *self.decoder.shape), np.float32)
                    pixels[: len(good)] = decoded.pixel_values[good]
                    self.answer([made[row] for row in good], pixels, params)
                yield from made
        finally:
            self.decoder.close()

    def answer(
        self, answers: Sequence[ImageResult], pixels: np.ndarray, params: Mapping[str, Any] | None
    ) -> None:
        """Fill in the answers to the first rows of ``pixels``."""
        raise NotImplementedError


class Captioner(ImagePipeline):
    """Writes a caption for each picture; ``generation`` are options of the model's ``generate``."""

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        workers: int = 0,
        max_image_pixels: int = MAX_PIXELS,
        **generation: Any,
    ):
        super().__init__(
            model,
            processor,
            batch_size=batch_size,
            workers=workers,
            max_image_pixels=max_image_pixels,
        )
        self.tokenizer = tokenizer
        self._options = {name: value for name, value in generation.items() if value is not None}

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str | None = None, **options: Any) -> Any:
        """Load the checkpoint ``name``, with its image processor and tokenizer.

        **Raises:** UsageError for a checkpoint of another kind, CheckpointError for one that cannot
        be loaded.
        """
        from hfseq.modeling.auto import FlaxAutoModelForVision2Seq

        recipe = {"precision": precision} if precision else {}
        model, tokenizer = load(FlaxAutoModelForVision2Seq, name, **recipe)
        return cls(model, load_image_processor(name, None), tokenizer, **options)

    def answer(
        self, answers: Sequence[ImageResult], pixels: np.ndarray, params: Mapping[str, Any] | None
    ) -> None:
        """Generate, and decode without special tokens."""
        made = self.model.generate(pixels, params=params, **self._options)
        for one, row in zip(answers, np.asarray(made.sequences), strict=False):
            one.text = str(self.tokenizer.decode(row.tolist(), skip_special_tokens=True)).strip()


class ImageClassifier(ImagePipeline):
    """Says which classes a picture has, the ``top_k`` likeliest first."""

    def __init__(
        self, model: FlaxPreTrainedModel, processor: Any, *, top_k: int = 5, **options: Any
    ):
        super().__init__(model, processor, **options)
        if top_k < 1:
            raise UsageError(f"top_k {top_k}: give a number of at least 1")
        self.top_k, self.names = top_k, model.config.id2label
        self._forward = jax.jit(
            lambda params, pixels: jax.nn.softmax(model(pixels, params=params).logits)
        )

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str | None = None, **options: Any) -> Any:
        """Load the checkpoint ``name``, with its image processor; see `Captioner`."""
        from hfseq.modeling import auto

        recipe = {"precision": precision} if precision else {}
        model = auto.load(auto.FlaxAutoModelForImageClassification, name, **recipe)
        return cls(model, load_image_processor(name, None), **options)

    def answer(
        self, answers: Sequence[ImageResult], pixels: np.ndarray, params: Mapping[str, Any] | None
    ) -> None:
        """Give the likeliest classes."""
        shares = np.asarray(self._forward(params or self.model.params, pixels), np.float64)
        for one, row in zip(answers, shares, strict=False):
            best = np.argsort(-row, kind="stable")[: self.top_k]
            one.labels = [(self.names[int(number)], float(row[number])) for number in best]
