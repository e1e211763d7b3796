"""Image captioning with a vision encoder and a text decoder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.data.arguments import ImageToTextArguments, TextArguments
from hfseq.data.batches import IGNORE_INDEX, IndexRows, RowRandom, pad_labels, shift_right
from hfseq.data.images import ImageDataset
from hfseq.data.tokenizers import check_vocabulary
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays, Batch, GeneratedTexts, Loss, Params, RowsAndStats, forward
from hfseq.objectives.images import ImageInputMixin, load_processor_pair
from hfseq.objectives.metrics import rouge_scores
from hfseq.objectives.seq2seq import TextTargetObjective

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


def text_config(config: PreTrainedConfig) -> Any:
    """Returns the configuration of the text decoder.

    Raises:
        UsageError: The model has no image encoder.
    """
    if hasattr(config, "encoder") and hasattr(config, "decoder"):
        return config.decoder
    if hasattr(config, "vision_config"):
        return config.get_text_config()
    raise UsageError(
        f"'{config.model_type}' cannot caption images. Use a vision-encoder-decoder with an image "
        "encoder and a text decoder, or --bridge with a captioning model such as GIT or BLIP."
    )


class ImageToText(ImageInputMixin, TextTargetObjective):
    """Cross-entropy of each caption token given the image and the previous tokens.

    ``--label_smoothing_factor`` applies to training only. EOS is also a target. Evaluation
    generates captions and reports ROUGE. Images that cannot be read are skipped.
    """

    name = "image_to_text"
    data_arguments = ImageToTextArguments
    auto_class = "ForVision2Seq"
    supports_streaming = False
    supports_predict = True
    default_length = 128

    arguments: ImageToTextArguments

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Loads the image processor and the tokenizer of the checkpoint."""
        if name is None:
            raise UsageError(
                "no model: set --model_name_or_path to a directory with a vision-encoder-decoder, "
                "an image processor and a tokenizer. "
                "scripts/create_model_from_encoder_decoder_models.py creates one from two "
                "checkpoints."
            )
        assert isinstance(arguments, ImageToTextArguments)
        return load_processor_pair(name, arguments.image_size, **options)

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, from_scratch: bool) -> None:
        """Sets the special token IDs, and checks that the model and the tokenizer match."""
        decoder, text_tokenizer = text_config(config), tokenizer.tokenizer
        if any(hasattr(config, name) for name in ("image_token_id", "image_token_index")):
            raise UsageError(
                f"'{config.model_type}' requires image tokens in the text, which this objective "
                "does not insert. Use a vision-encoder-decoder, or --bridge with a captioning "
                "model such as GIT or BLIP."
            )
        check_vocabulary(text_tokenizer, decoder)
        eos_candidates = (
            *(
                getattr(source, "eos_token_id", None)
                for source in (config, decoder, text_tokenizer)
            ),
            text_tokenizer.sep_token_id,
        )
        candidates = {
            "decoder_start_token_id": (
                getattr(config, "decoder_start_token_id", None),
                decoder.bos_token_id,
                text_tokenizer.bos_token_id,
                text_tokenizer.cls_token_id,
            ),
            "eos_token_id": eos_candidates,
            "pad_token_id": (
                *(
                    getattr(source, "pad_token_id", None)
                    for source in (config, decoder, text_tokenizer)
                ),
                *eos_candidates,
            ),
        }
        for name, token_ids in candidates.items():
            token_id = next((token for token in token_ids if token is not None), None)
            if token_id is None:
                raise UsageError(
                    f"neither the configuration nor the tokenizer has a {name}. Set it with "
                    f"--config_overrides {name}=N."
                )
            setattr(config, name, token_id)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks the image size and the caption length, and sets the generation configuration.

        The configuration is saved with the model, so that a loaded model generates captions as in
        evaluation.
        """
        super().prepare(model)
        config, generation = model.config, model.generation_config
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
            setattr(generation, name, getattr(config, name))
        self.length = self.arguments.max_target_length
        max_positions = getattr(text_config(config), "max_position_embeddings", None)
        has_decoder = model.has_input("decoder_input_ids")
        self.text_input = "decoder_input_ids" if has_decoder else "input_ids"
        if max_positions is not None and self.length > max_positions:
            raise UsageError(
                f"--max_target_length {self.length} exceeds the decoder's {max_positions} "
                f"positions. Use at most {max_positions}."
            )
        # The generation length includes the start token.
        max_length = (self.arguments.val_max_target_length or self.length) + 1
        generation.max_length = (
            max_length if max_positions is None else min(max_length, max_positions)
        )
        generation.num_beams = self.arguments.num_beams

    def choose_length(self, limit: int | None) -> int:
        """Returns the maximum number of caption tokens."""
        return self.arguments.max_target_length

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenizes the captions of a split."""
        texts = self.tokenizer(list(splits[split].captions), add_special_tokens=False)["input_ids"]
        labels = [[*ids[: length - 1], self.config.eos_token_id] for ids in texts]
        rows = IndexRows(labels, length, split, {"labels": pad_labels(labels, length)})
        logger.info("%s: %d images with captions", split, len(rows))
        return rows, {"documents": len(rows), "tokens": sum(map(len, labels))}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Decodes the images. The loss ignores the labels of images that cannot be read."""
        pixel_values, counts = self.read_images(rows, random)
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        decoder_ids = shift_right(rows["labels"], pad, start)
        labels = np.where(counts[:, None], rows["labels"], np.int32(IGNORE_INDEX))
        return {"pixel_values": pixel_values, "decoder_input_ids": decoder_ids, "labels": labels}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss, with label smoothing in training.

        The totals also include the cross-entropy without label smoothing.
        """
        output, new_extra = forward(
            model,
            params,
            rngs,
            train,
            extra,
            pixel_values=batch["pixel_values"],
            **{self.text_input: batch["decoder_input_ids"]},
        )
        labels, vocab_size = batch["labels"], text_config(model.config).vocab_size
        # A model with one sequence of image and text also predicts at the image.
        logits = output.logits[:, -labels.shape[1] :]
        return self.smoothed_loss(logits, labels, vocab_size, train, new_extra)

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Adds the number of skipped images to the metrics."""
        return super().metrics(totals) | self.skip_metrics()

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Generates captions for a split and computes ROUGE.

        For an image with several reference captions, the one with the best score counts.
        """
        from hfseq.pipelines.images import ImageToText

        data = self.arguments
        if split == "validation" and not data.predict_with_generate:
            return None
        images: ImageDataset = self.splits[split]
        captions_by_image: dict[str, list[str]] = {}
        first_rows: dict[str, int] = {}
        for row, caption in enumerate(images.captions):
            name = images.sources[row].name
            captions_by_image.setdefault(name, []).append(caption)
            first_rows.setdefault(name, row)
        selected_rows = self.select_for_generation(split, sorted(first_rows.values()))
        captioner = ImageToText(
            model,
            self.tokenizer,
            image_processor=self.processors.input_processor,
            batch_size=data.generation_batch_size,
            max_image_pixels=data.max_image_pixels,
            params=params,
        )
        sources = [images.sources[row] for row in selected_rows]
        answers = captioner.stream(sources)
        captions = {
            source.name: answer.output[0]["generated_text"].strip()
            for source, answer in zip(sources, answers, strict=True)
            if answer.error is None
        }
        references = [captions_by_image[name] for name in captions]
        hypotheses = list(captions.values())
        return GeneratedTexts(
            list(captions),
            [captions[0] for captions in references],
            hypotheses,
            *rouge_scores(hypotheses, references, self.arguments.rouge_tokenizer),
        )
