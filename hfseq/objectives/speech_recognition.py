"""Speech recognition with Whisper: a spectrogram encoder and a text decoder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.data.arguments import SpeechRecognitionArguments, TextArguments
from hfseq.data.audio import AudioDataset, AudioReader
from hfseq.data.batches import IGNORE_INDEX, IndexRows, RowRandom, pad_labels, shift_right
from hfseq.errors import UsageError, first_line
from hfseq.objectives.audio import AudioInputMixin
from hfseq.objectives.base import (
    Arrays,
    Batch,
    GeneratedTexts,
    Loss,
    Params,
    ProcessorPair,
    RowsAndStats,
    forward,
)
from hfseq.objectives.metrics import error_rates
from hfseq.objectives.seq2seq import TextTargetObjective

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class SpeechRecognition(AudioInputMixin, TextTargetObjective):
    """Cross-entropy of each transcript token given the audio and the previous tokens.

    As in PyTorch, Whisper's prefix tokens (language, task, no timestamps) and EOS are targets, too.
    ``--label_smoothing_factor`` applies to training only. Evaluation transcribes the audio and
    reports word and character error rates. Examples are skipped if their audio or their transcript
    is too long.
    """

    name = "speech_recognition"
    data_arguments = SpeechRecognitionArguments
    auto_class = "ForSpeechSeq2Seq"
    supports_streaming = False
    crops_long_audio = False
    count_tokens = TextTargetObjective.count_tokens  # text tokens, not audio frames

    arguments: SpeechRecognitionArguments

    def setup(self) -> None:
        """Loads the list of audio files, and sets language and task in the tokenizer."""
        super().setup()
        self.tokenizer = self.tokenizer.tokenizer
        self.texts: dict[str, list[str]] = {}
        data = self.arguments
        if data.language is not None and hasattr(self.tokenizer, "set_prefix_tokens"):
            try:
                self.tokenizer.set_prefix_tokens(data.language, data.task, False)
                self.tokenizer("")
            except ValueError as error:
                raise UsageError(f"--language {data.language}: {first_line(error)}") from error

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Loads the feature extractor and the tokenizer of the checkpoint."""
        from transformers import AutoTokenizer

        assert isinstance(arguments, SpeechRecognitionArguments)
        if name is None:
            raise UsageError(
                "no model: set --model_name_or_path to a Whisper model with its feature extractor "
                "and tokenizer"
            )
        source = arguments.feature_extractor_name or name
        extractor = super().load_processor(source, arguments, **options)
        try:
            return ProcessorPair(extractor, AutoTokenizer.from_pretrained(name, **options))
        except Exception as error:  # the Rust reader of tokenizer.json raises plain exceptions
            raise UsageError(f"'{name}' has no tokenizer ({first_line(error)})") from error

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, from_scratch: bool) -> None:
        """Checks that the model accepts the size of the feature extractor's spectrograms."""
        if not hasattr(config, "num_mel_bins") or not hasattr(
            tokenizer.input_processor, "nb_max_frames"
        ):
            raise UsageError(
                f"'{config.model_type}' does not read spectrograms. Use a Whisper model, or train "
                "wav2vec2 with run_speech_recognition_ctc_flax.py."
            )
        if config.num_mel_bins != tokenizer.input_processor.feature_size:
            raise UsageError(
                f"the model reads {config.num_mel_bins} mel bins, but the feature extractor "
                f"returns {tokenizer.input_processor.feature_size}. Use both from the same "
                "checkpoint."
            )

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Sets the length limits, and the generation configuration that evaluation uses."""
        data, config, extractor = self.arguments, model.config, self.extractor
        window_samples = extractor.n_samples
        max_samples = min(
            round(data.max_duration_in_seconds * extractor.sampling_rate), window_samples
        )
        min_samples = max(round(data.min_duration_in_seconds * extractor.sampling_rate), 1)
        if max_samples < min_samples:
            raise UsageError(
                f"--min_duration_in_seconds {data.min_duration_in_seconds} exceeds the model's "
                f"window of {window_samples / extractor.sampling_rate:g} seconds"
            )
        frames = 2 * config.max_source_positions
        if extractor.nb_max_frames != frames:
            raise UsageError(
                f"the model reads {frames} frames, but the feature extractor returns "
                f"{extractor.nb_max_frames}. Use both from the same checkpoint."
            )
        self.reader = AudioReader(
            extractor.sampling_rate, min_samples, max_samples, data.decode_workers, crop=False
        )
        max_positions = config.max_target_positions
        self.length = min(data.max_label_length, max_positions)
        generation = model.generation_config
        generation.max_length = min(data.generation_max_length or max_positions, max_positions)
        generation.num_beams = data.num_beams
        if getattr(generation, "is_multilingual", False):
            generation.task = data.task
            if data.language is not None:
                generation.language = data.language

    def choose_length(self, limit: int | None) -> int:
        """Returns the maximum number of transcript tokens."""
        return self.length

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenizes the transcripts, and skips examples whose transcript is too long."""
        dataset: AudioDataset = splits[split]
        texts = self.texts[split] = self.clean_texts(dataset, self.arguments)
        start, end = self.config.decoder_start_token_id, self.config.eos_token_id
        labels = []
        for index, ids in enumerate(self.tokenizer(texts)["input_ids"]):
            ids = ids[1:] if ids[:1] == [start] else ids
            ids = ids if ids[-1:] == [end] else [*ids, end]
            if len(ids) > length:
                name = dataset.source(index).name
                self.skip_example(
                    split, index, name, f"{len(ids)} tokens exceed the limit of {length}"
                )
                ids = []
            labels.append(ids)
        rows = IndexRows(dataset, length, split, {"labels": pad_labels(labels, length)})
        tokens = sum(map(len, labels))
        logger.info("%s: %d audio files, %d tokens", split, len(rows), tokens)
        return rows, {"documents": len(rows), "tokens": tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Reads the audio and computes spectrograms.

        The loss ignores the labels of rows whose audio could not be read.
        """
        samples, counts = self.read_samples(rows, random)
        labels = np.where(counts[:, None], rows["labels"], np.int32(IGNORE_INDEX))
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        decoder_ids = shift_right(rows["labels"], pad, start)
        features = self.spectrograms(
            [row_samples for row_samples, counted in zip(samples, counts, strict=True) if counted]
        )
        input_features = np.zeros((len(counts), *features.shape[1:]), np.float32)
        input_features[counts] = features
        return {
            "input_features": input_features,
            "decoder_input_ids": decoder_ids,
            "labels": labels,
        }

    def spectrograms(self, samples: list[np.ndarray]) -> np.ndarray:
        """Returns the spectrograms of audio samples, `(rows, mel bins, frames)`."""
        extractor = self.extractor
        if not samples:
            return np.zeros((0, extractor.feature_size, extractor.nb_max_frames), np.float32)
        output = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="np")
        return np.asarray(output["input_features"], np.float32)

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
            batch["input_features"],
            decoder_input_ids=batch["decoder_input_ids"],
        )
        labels, vocab_size = batch["labels"], model.config.vocab_size
        return self.smoothed_loss(output.logits, labels, vocab_size, train, new_extra)

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Adds the number of skipped audio files to the metrics."""
        return super().metrics(totals) | self.skip_metrics()

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Transcribes the audio of a split and computes word and character error rates."""
        data = self.arguments
        if split == "validation" and not data.predict_with_generate:
            return None
        dataset, skipped = self.splits[split], self.skipped_examples.get(split, {})
        readable = [index for index in range(len(dataset)) if index not in skipped]
        selected = self.select_for_generation(split, readable)
        names, references, hypotheses = [], [], []
        batch_size = data.generation_batch_size
        for begin in range(0, len(selected), batch_size):
            batch = selected[begin : begin + batch_size]
            sources = [dataset.source(index) for index in batch]
            batch_samples = self.reader(sources, [0.0] * len(batch))
            read_places, read_samples = [], []
            for column, row_samples in enumerate(batch_samples):
                if isinstance(row_samples, str):
                    self.skip_example(split, batch[column], sources[column].name, row_samples)
                else:
                    read_places.append(column)
                    read_samples.append(row_samples)
            # All batches have the same shape, so that generation is compiled only once.
            features = np.zeros(
                (batch_size, self.extractor.feature_size, self.extractor.nb_max_frames)
            )
            features[: len(read_places)] = self.spectrograms(read_samples)
            ids = model.generate(features, params=params).sequences
            names += [sources[column].name for column in read_places]
            references += [self.texts[split][batch[column]] for column in read_places]
            decoded = self.tokenizer.batch_decode(
                np.asarray(ids)[: len(read_places)], skip_special_tokens=True
            )
            hypotheses += [" ".join(text.split()) for text in decoded]
        return GeneratedTexts(
            names, references, hypotheses, error_rates(hypotheses, references), {}
        )
