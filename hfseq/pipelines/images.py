"""Image captioning and classification pipelines for files."""

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
    """The result for an image: a caption, or classes with probabilities.

    Attributes:
        name: Name of the image file.
        text: The caption.
        labels: Classes and their probabilities.
        error: Why the image could not be read.
    """

    name: str
    text: str | None = None
    labels: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as a JSON object with the keys of Transformers' pipelines."""
        if self.error:
            return {"file": self.name, "error": self.error}
        if self.text is not None:
            return {"file": self.name, "generated_text": self.text}
        labels = [{"label": label, "score": round(score, 6)} for label, score in self.labels]
        return {"file": self.name, "labels": labels}


class ImagePipeline:
    """Base class of pipelines for images, which are read in batches.

    All batches have the same size, so that only one program is compiled. Unused rows of the last
    batch are zero.

    Args:
        model: The model.
        processor: Its image processor.
        batch_size: Images per batch, and the number of images in memory.
        workers: Number of decoding processes. 0 decodes in this process.
        max_image_pixels: Maximum number of pixels of an image. Larger images are errors.
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
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        self.model, self.batch_size = model, batch_size
        self.decoder = ImageDecoder(processor, workers, max_image_pixels)
        check_image_shape(model, self.decoder)

    def __call__(
        self, sources: Iterable[str | MediaSource], params: Mapping[str, Any] | None = None
    ) -> Iterator[ImageResult]:
        """Yields an :class:`ImageResult` for each image, in order.

        Unreadable images have an ``error``.

        Args:
            sources: Paths or sources of images.
            params: Parameters to use instead of the model's.
        """
        items = (MediaSource(source) if isinstance(source, str) else source for source in sources)
        try:
            while batch := list(itertools.islice(items, self.batch_size)):
                decoded = self.decoder(batch)
                results = [
                    ImageResult(source.name, error=reason)
                    for source, reason in zip(batch, decoded.reasons, strict=True)
                ]
                read_rows = [row for row, result in enumerate(results) if result.error is None]
                if read_rows:
                    pixel_values = np.zeros((self.batch_size, *self.decoder.shape), np.float32)
                    pixel_values[: len(read_rows)] = decoded.pixel_values[read_rows]
                    self.fill_results([results[row] for row in read_rows], pixel_values, params)
                yield from results
        finally:
            self.decoder.close()

    def fill_results(
        self,
        results: Sequence[ImageResult],
        pixel_values: np.ndarray,
        params: Mapping[str, Any] | None,
    ) -> None:
        """Sets the results of the first rows of ``pixel_values``."""
        raise NotImplementedError


class Captioner(ImagePipeline):
    """Generates a caption for each image.

    Args:
        model: A vision-encoder-decoder model.
        processor: Its image processor.
        tokenizer: Its tokenizer.
        batch_size: Images per batch.
        workers: Number of decoding processes.
        max_image_pixels: Maximum number of pixels of an image.
        **generation: Options of ``generate``. ``None`` leaves an option to the model.
    """

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
        """Loads a checkpoint with its image processor and tokenizer.

        Args:
            name: Directory or Hub name.
            precision: Precision recipe.
            **options: Arguments of :class:`Captioner`.

        Raises:
            UsageError: The checkpoint has another type.
            CheckpointError: The checkpoint cannot be loaded.
        """
        from hfseq.modeling.auto import FlaxAutoModelForVision2Seq

        recipe = {"precision": precision} if precision else {}
        model, tokenizer = load(FlaxAutoModelForVision2Seq, name, **recipe)
        return cls(model, load_image_processor(name, None), tokenizer, **options)

    def fill_results(
        self,
        results: Sequence[ImageResult],
        pixel_values: np.ndarray,
        params: Mapping[str, Any] | None,
    ) -> None:
        """Generates captions, without special tokens."""
        output = self.model.generate(pixel_values, params=params, **self._options)
        for result, row in zip(results, np.asarray(output.sequences), strict=False):
            result.text = str(self.tokenizer.decode(row.tolist(), skip_special_tokens=True)).strip()


class ImageClassifier(ImagePipeline):
    """Returns the ``top_k`` most probable classes of each image."""

    def __init__(
        self, model: FlaxPreTrainedModel, processor: Any, *, top_k: int = 5, **options: Any
    ):
        super().__init__(model, processor, **options)
        if top_k < 1:
            raise UsageError(f"top_k must be at least 1, not {top_k}")
        self.top_k, self.id2label = top_k, model.config.id2label
        self._forward = jax.jit(
            lambda params, pixels: jax.nn.softmax(model(pixels, params=params).logits)
        )

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str | None = None, **options: Any) -> Any:
        """Loads a checkpoint with its image processor. See :meth:`Captioner.from_pretrained`."""
        from hfseq.modeling import auto

        recipe = {"precision": precision} if precision else {}
        model = auto.load(auto.FlaxAutoModelForImageClassification, name, **recipe)
        return cls(model, load_image_processor(name, None), **options)

    def fill_results(
        self,
        results: Sequence[ImageResult],
        pixel_values: np.ndarray,
        params: Mapping[str, Any] | None,
    ) -> None:
        """Sets the most probable classes."""
        probabilities = np.asarray(
            self._forward(self.model.params if params is None else params, pixel_values), np.float64
        )
        for result, row in zip(results, probabilities, strict=False):
            top_ids = np.argsort(-row, kind="stable")[: self.top_k]
            result.labels = [(self.id2label[int(number)], float(row[number])) for number in top_ids]
