"""Pipelines for images: classification, features and captions."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.images import MAX_PIXELS, ImageDecoder, check_image_shape
from hfseq.data.sources import MediaSource
from hfseq.errors import UsageError
from hfseq.generation.request import end_token_ids, until_end
from hfseq.pipelines.base import Answer, Options, Outputs, Pipeline, RejectedInput, Row, distribute
from hfseq.pipelines.generation import GenerationPipeline
from hfseq.pipelines.tasks import candidate_labels_of, class_scores, hypotheses, softmax

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel


class ImagePipeline(Pipeline):
    """Base class of the pipelines that read images.

    An image is a path, a URL, a base64 string with the prefix ``data:image/``, the content of a
    file as ``bytes``, an array `(height, width, 3)` of ``uint8``, a Pillow image, or a
    dictionary with one of these as "image", "bytes" or "path".

    Args:
        model: The model.
        image_processor: Its image processor.
        max_image_pixels: Maximum number of pixels of an image. Larger images are errors.
        **arguments: Arguments of :class:`~hfseq.pipelines.base.Pipeline`.
    """

    processors: ClassVar[tuple[str, ...]] = ("image_processor",)
    input_description = "an image"
    window_batches = 1  # decoded images are large

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: Any = None,
        task: str = "",
        *,
        max_image_pixels: int = MAX_PIXELS,
        **arguments: Any,
    ):
        super().__init__(model, tokenizer, task, **arguments)
        self.decoder = ImageDecoder(self.image_processor, self.num_workers, max_image_pixels)
        check_image_shape(model, self.decoder)

    @classmethod
    def check_model(cls, model: FlaxPreTrainedModel, task: str) -> None:
        """Raises a UsageError if the model has no image inputs."""
        if not model.has_input("pixel_values"):
            raise UsageError(f"{task}: {type(model).__name__} does not read images")

    def is_single_input(self, inputs: Any) -> bool:
        """Returns whether ``inputs`` is one image."""
        return not isinstance(as_image_source(inputs), RejectedInput)

    def stream(self, inputs: Iterable[Any], *arguments: Any, **options: Any) -> Iterator[Answer]:
        """See :meth:`hfseq.pipelines.base.Pipeline.stream`."""
        try:
            yield from super().stream(inputs, *arguments, **options)
        finally:
            self.decoder.close()

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Decodes the images."""
        sources = [as_image_source(item) for item in inputs]
        valid = [source for source in sources if not isinstance(source, RejectedInput)]
        decoded = self.decoder(valid)
        pixels = iter(zip(decoded.pixel_values, decoded.reasons, strict=True))
        encoded_inputs: list[list[Row] | RejectedInput] = []
        for source in sources:
            if isinstance(source, RejectedInput):
                encoded_inputs.append(source)
                continue
            pixel_values, reason = next(pixels)
            encoded_inputs.append(
                [Row(metadata=pixel_values)] if reason is None else RejectedInput(reason)
            )
        return encoded_inputs

    def find_problem(self, rows: Sequence[Row]) -> str | None:
        """Returns `None`, because ``encode`` has already rejected unreadable images."""
        return None

    def can_share_batch(self, first: Row, row: Row, options: Options) -> bool:
        """Returns ``True``: all images have the same shape."""
        return True

    def max_rows(self, width: int, size: int) -> int:
        """Returns ``size``: all images have the same shape."""
        return size

    def collate(self, rows: Sequence[Row], count: int) -> dict[str, Any]:
        """Returns the pixel values, `(count, channels, height, width)`."""
        pixel_values = [row.metadata for row in rows]
        return {"pixel_values": np.stack([*pixel_values, *pixel_values[-1:] * (count - len(rows))])}


def as_image_source(image: Any) -> MediaSource | RejectedInput:
    """Returns the source of an image, or the reason why the value is not an image."""
    if isinstance(image, Mapping):
        values = (image.get(name) for name in ("image", "bytes", "path"))
        image = next((value for value in values if value is not None), image)
    if isinstance(image, str) and image.startswith("data:image/"):
        return MediaSource("the base64 image", base64.b64decode(image.partition(",")[2]))
    if isinstance(image, str | Path):
        return MediaSource(str(image))
    if isinstance(image, MediaSource):
        return image
    if isinstance(image, bytes):
        return MediaSource("the image", image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        from PIL import Image

        return MediaSource("the array", Image.fromarray(image))
    if hasattr(image, "getpixel"):  # an image of Pillow
        return MediaSource("the image", image)
    return RejectedInput(
        "it must be a path, a URL, bytes, a Pillow image, or a uint8 array (height, width, 3), "
        f"not {image!r:.60}"
    )


class ImageClassification(ImagePipeline):
    """Returns the ``top_k`` most probable classes of an image: ``[{label, score}]``.

    ``function_to_apply`` is ``softmax``, ``sigmoid`` or ``none``. The default depends on the
    problem type of the model.
    """

    head = "ForImageClassification"
    defaults: ClassVar = {"top_k": 5, "function_to_apply": None, "timeout": None}

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the logits of all classes."""
        return {"logits": self.model(**inputs, params=params).logits.astype(jnp.float32)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the most probable classes."""
        function = options.get("function_to_apply")
        return class_scores(self.model.config, outputs[0]["logits"], function)[
            : options.get("top_k", 5)
        ]


class ZeroShotImageClassification(ImagePipeline):
    """Classifies images with a model such as CLIP. The labels are an argument of the call.

    Returns ``[{score, label}]`` for all labels, the most probable first.
    """

    head = "Model"
    processors = ("image_processor", "tokenizer")
    defaults: ClassVar = {
        "candidate_labels": None,
        "hypothesis_template": "This is a photo of {}.",
        "timeout": None,
    }

    @classmethod
    def check_model(cls, model: FlaxPreTrainedModel, task: str) -> None:
        """Raises a UsageError if the model does not compare images with texts."""
        if not hasattr(model, "get_text_features"):
            raise UsageError(
                f"{task}: {type(model).__name__} does not compare images with texts. Use a "
                "model such as CLIP."
            )

    def __call__(
        self, inputs: Any, candidate_labels: str | Sequence[str] | None = None, **options: Any
    ) -> Any:
        """Returns the labels of one or more images with their scores."""
        if candidate_labels is not None:
            options["candidate_labels"] = candidate_labels
        return super().__call__(inputs, **options)

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Returns the logits of all labels, `(images, labels)`."""
        template = options.get("hypothesis_template", self.defaults["hypothesis_template"])
        texts = hypotheses(candidate_labels_of(options), template)
        encoded = self.tokenizer(texts, padding=True, truncation=True, return_tensors="np")
        labels = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        images = distribute(inputs, self.params)
        return self._compiled(self.params, {**images, **labels})

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the similarity of each image and label."""
        output = self.model(**inputs, params=params)
        return {"logits": output.logits_per_image.astype(jnp.float32)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the labels with their probabilities."""
        scores = softmax(outputs[0]["logits"].astype(np.float64))
        labels = candidate_labels_of(options)
        return [
            {"score": float(scores[number]), "label": labels[number]}
            for number in np.argsort(-scores, kind="stable").tolist()
        ]


class ImageFeatureExtraction(ImagePipeline):
    """Returns the last hidden states of an image as nested lists, `(1, patches, features)`.

    ``pool=True`` returns the pooled output instead, and ``return_tensors=True`` an array.
    """

    head = "Model"
    defaults: ClassVar = {"pool": False, "return_tensors": False, "timeout": None}

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Returns the hidden states, or the pooled output with ``pool=True``."""
        outputs = super().run_batch(inputs, options)
        name = "pooled" if options.get("pool") else "features"
        if name not in outputs:
            raise UsageError(
                f"pool=True requires a model with a pooled output, which "
                f"{type(self.model).__name__} does not have"
            )
        return {name: outputs[name]}

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the hidden states and, if the model has one, the pooled output."""
        output = self.model(**inputs, params=params)
        features = {"features": output[0].astype(jnp.float32)}
        pooled = getattr(output, "pooler_output", None)
        return features if pooled is None else features | {"pooled": pooled.astype(jnp.float32)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns nested lists, or an array with ``return_tensors``."""
        features = next(iter(outputs[0].values()))[None]
        return features if options.get("return_tensors") else features.tolist()


class ImageToText(ImagePipeline, GenerationPipeline):
    """Generates captions of an image: ``[{"generated_text": …}]``.

    Options are those of ``generate``.
    """

    head = "ForVision2Seq"
    processors = ("image_processor", "tokenizer")
    extra_options = ("timeout",)

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generates the captions."""
        config = self.model.config
        if not getattr(config, "is_encoder_decoder", False):  # the text follows the image
            rows = len(inputs["pixel_values"])
            start = getattr(config, "decoder_start_token_id", None)
            start = getattr(config, "bos_token_id", None) if start is None else start
            inputs = {"input_ids": np.full((rows, 1), start or 0, np.int32), **inputs}
        return self.generate(inputs, self.generation_options(options))

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Decodes the captions, without the start token."""
        (output,), answers = outputs, []
        end_ids = end_token_ids(self.model, self.generation_options(options))
        for rank, ids in enumerate(output["sequences"]):
            answer: dict[str, Any] = {
                self.output_key: self._decode(rows[0], until_end(ids[1:], end_ids))
            }
            if options.get("return_details"):
                answer |= self.details(ids[1:], end_ids, output, rank)
            answers.append(answer)
        return answers
