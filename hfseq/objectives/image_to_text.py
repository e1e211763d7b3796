"""Captions of pictures, word by word: an encoder of pictures and a decoder of text."""

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


class ImageToText(ImageInputMixin, TextTargetObjective):
    """Cross-entropy of each token of a caption given the picture and the tokens before it.

    ``--label_smoothing_factor`` smoothes it in training only. The end of the text is a target, too.
    In evaluation captions are written and compared (ROUGE). Pictures that cannot be read count for
    nothing.
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
        """Load the image processor and the tokenizer that lie beside the model."""
        if name is None:
            raise UsageError(
                "no model: give --model_name_or_path, a folder with a vision-encoder-decoder, an "
                "image processor and a tokenizer "
                "(scripts/create_model_from_encoder_decoder_models.py makes one of two checkpoints)"
            )
        assert isinstance(arguments, ImageToTextArguments)
        return load_processor_pair(name, arguments.image_size, **options)

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, fresh: bool) -> None:
        """Have what the decoder starts and ends with, and refuse what does not fit together."""
        decoder, words = getattr(config, "decoder", None), tokenizer.tokenizer
        if decoder is None or not hasattr(config, "encoder"):
            raise UsageError(
                f"'{config.model_type}' does not write about pictures: give a "
                "vision-encoder-decoder, an encoder of pictures and a decoder of text"
            )
        check_vocabulary(words, decoder)
        ends = (
            *(getattr(one, "eos_token_id", None) for one in (config, decoder, words)),
            words.sep_token_id,
        )
        known = {
            "decoder_start_token_id": (
                getattr(config, "decoder_start_token_id", None),
                decoder.bos_token_id,
                words.bos_token_id,
                words.cls_token_id,
            ),
            "eos_token_id": ends,
            "pad_token_id": (
                *(getattr(one, "pad_token_id", None) for one in (config, decoder, words)),
                *ends,
            ),
        }
        for name, found in known.items():
            value = next((token for token in found if token is not None), None)
            if value is None:
                raise UsageError(
                    f"neither the configuration nor the tokenizer has a {name}: set it with "
                    f"--config_overrides {name}=N"
                )
            setattr(config, name, value)

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Check the size of pictures; whoever loads the model writes as its evaluation does."""
        super().prepare(model)
        config, generation = model.config, model.generation_config
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
            setattr(generation, name, getattr(config, name))
        self.length = self.arguments.max_target_length
        room = getattr(config.decoder, "max_position_embeddings", None)
        if room is not None and self.length > room:
            raise UsageError(
                f"--max_target_length {self.length} is longer than the position table of the "
                f"decoder allows ({room}): give at most {room}"
            )
        longest = (self.arguments.val_max_target_length or self.length) + 1  # the start counts
        generation.max_length = longest if room is None else min(longest, room)
        generation.num_beams = self.arguments.num_beams

    def choose_length(self, limit: int | None) -> int:
        """Return the tokens of a caption."""
        return self.arguments.max_target_length

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenise the captions of a split."""
        texts = self.tokenizer(list(splits[split].captions), add_special_tokens=False)["input_ids"]
        labels = [[*ids[: length - 1], self.config.eos_token_id] for ids in texts]
        rows = IndexRows(labels, length, split, {"labels": pad_labels(labels, length)})
        logger.info("%s: %d pictures with captions", split, len(rows))
        return rows, {"documents": len(rows), "tokens": sum(map(len, labels))}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Decode the pictures; a row without one has no labels."""
        pixels, counts = self.read(rows, random)
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        decoder = shift_right(rows["labels"], pad, start)
        labels = np.where(counts[:, None], rows["labels"], np.int32(IGNORE_INDEX))
        return {"pixel_values": pixels, "decoder_input_ids": decoder, "labels": labels}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Sum the loss, smoothed in training only, and the cross-entropy in any case."""
        output, changed = forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["pixel_values"],
            decoder_input_ids=batch["decoder_input_ids"],
        )
        labels, size = batch["labels"], model.config.decoder.vocab_size
        return self.smoothed(output.logits, labels, size, train, changed)

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Say how many could not be read, too."""
        return super().metrics(totals) | self.skip_metrics()

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Write captions of a split, and compare them with those there are: ROUGE.

        A picture with several captions is compared with the one that fits best.
        """
        from hfseq.pipelines.images import Captioner

        data = self.arguments
        if split == "validation" and not data.predict_with_generate:
            return None
        pictures: ImageDataset = self.splits[split]
        told: dict[str, list[str]] = {}
        places: dict[str, int] = {}
        for place, caption in enumerate(pictures.captions):
            name = pictures.sources[place].name
            told.setdefault(name, []).append(caption)
            places.setdefault(name, place)
        chosen = self.chosen(split, sorted(places.values()))
        captioner = Captioner(
            model,
            self.both.inputs,
            self.tokenizer,
            batch_size=data.generation_batch_size,
            max_image_pixels=data.max_image_pixels,
        )
        answers = [
            one
            for one in captioner((pictures.sources[place] for place in chosen), params)
            if one.text is not None
        ]
        references = [told[one.name] for one in answers]
        hypotheses = [one.text or "" for one in answers]
        return GeneratedTexts(
            [one.name for one in answers],
            [captions[0] for captions in references],
            hypotheses,
            rouge_scores(hypotheses, references),
            {"rouge": "rouge-score, stemmed, F1"},
        )
