"""Text of speech, word by word: an encoder of spectrograms and a decoder of text (Whisper)."""

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
    """Cross-entropy of each token of what is said given the sound and the tokens before it.

    Whisper's own first tokens (language, task, no timestamps) and the end are targets, too, as in
    PyTorch; ``--label_smoothing_factor`` smoothes training only. In evaluation sounds are written
    down and errors of words and characters counted. A sound that is longer than allowed, or has
    more tokens, counts for nothing.
    """

    name = "speech_recognition"
    data_arguments = SpeechRecognitionArguments
    auto_class = "ForSpeechSeq2Seq"
    supports_streaming = False
    cuts = False
    tokens = TextTargetObjective.tokens  # of text, not of sound

    arguments: SpeechRecognitionArguments

    def setup(self) -> None:
        """Find the sounds; the tokenizer writes what the flags say."""
        super().setup()
        self.tokenizer = self.tokenizer.tokenizer
        self.texts: dict[str, list[str]] = {}
        given = self.arguments
        if given.language is not None and hasattr(self.tokenizer, "set_prefix_tokens"):
            try:
                self.tokenizer.set_prefix_tokens(given.language, given.task, False)
                self.tokenizer("")
            except ValueError as error:
                raise UsageError(f"--language {given.language}: {first_line(error)}") from error

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Load feature extractor and tokenizer that lie beside the model."""
        from transformers import AutoTokenizer

        assert isinstance(arguments, SpeechRecognitionArguments)
        if name is None:
            raise UsageError(
                "no model: give --model_name_or_path, a Whisper with its feature extractor and "
                "tokenizer"
            )
        source = arguments.feature_extractor_name or name
        extractor = super().load_processor(source, arguments, **options)
        try:
            return ProcessorPair(extractor, AutoTokenizer.from_pretrained(name, **options))
        except Exception as error:  # the Rust reader of tokenizer.json raises nothing more exact
            raise UsageError(f"'{name}' has no tokenizer ({first_line(error)})") from error

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, fresh: bool) -> None:
        """Refuse what reads no spectrograms."""
        if not hasattr(config, "num_mel_bins") or not hasattr(tokenizer.inputs, "nb_max_frames"):
            raise UsageError(
                f"'{config.model_type}' reads no spectrograms: speech recognition needs a Whisper; "
                "run_speech_recognition_ctc_flax.py trains wav2vec2"
            )
        if config.num_mel_bins != tokenizer.inputs.feature_size:
            raise UsageError(
                f"the model reads {config.num_mel_bins} mels, and its feature extractor makes "
                f"{tokenizer.inputs.feature_size}: they are not of one checkpoint"
            )

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Settle lengths; whoever loads the model writes as its evaluation does."""
        given, config, extractor = self.arguments, model.config, self.extractor
        window = extractor.n_samples
        most = min(round(given.max_duration_in_seconds * extractor.sampling_rate), window)
        fewest = max(round(given.min_duration_in_seconds * extractor.sampling_rate), 1)
        if most < fewest:
            raise UsageError(
                f"--min_duration_in_seconds {given.min_duration_in_seconds} is more than the "
                f"{window / extractor.sampling_rate:g} seconds that the model hears"
            )
        frames = 2 * config.max_source_positions
        if extractor.nb_max_frames != frames:
            raise UsageError(
                f"the model hears {frames} frames, and its feature extractor makes "
                f"{extractor.nb_max_frames}: they are not of one checkpoint"
            )
        self.reader = AudioReader(
            extractor.sampling_rate, fewest, most, given.decode_workers, crop=False
        )
        room = config.max_target_positions
        self.length = min(given.max_label_length, room)
        generation = model.generation_config
        generation.max_length = min(given.generation_max_length or room, room)
        generation.num_beams = given.num_beams
        if getattr(generation, "is_multilingual", False):
            generation.task = given.task
            if given.language is not None:
                generation.language = given.language

    def choose_length(self, limit: int | None) -> int:
        """Return the tokens of a text."""
        return self.length

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenise what is said; what is too long is left out."""
        sounds: AudioDataset = splits[split]
        texts = self.texts[split] = self.clean(sounds, self.arguments)
        start, end = self.config.decoder_start_token_id, self.config.eos_token_id
        labels = []
        for number, ids in enumerate(self.tokenizer(texts)["input_ids"]):
            ids = ids[1:] if ids[:1] == [start] else ids
            ids = ids if ids[-1:] == [end] else [*ids, end]
            if len(ids) > length:
                name = sounds.source(number).name
                self.skip_example(split, number, name, f"{len(ids)} tokens, more than {length}")
                ids = []
            labels.append(ids)
        rows = IndexRows(sounds, length, split, {"labels": pad_labels(labels, length)})
        tokens = sum(map(len, labels))
        logger.info("%s: %d sounds, %d tokens", split, len(rows), tokens)
        return rows, {"documents": len(rows), "tokens": tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Read the sounds and make spectrograms of them; a row without one has no labels."""
        found, counts = self.hear(rows, random)
        labels = np.where(counts[:, None], rows["labels"], np.int32(IGNORE_INDEX))
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        decoder = shift_right(rows["labels"], pad, start)
        features = self.spectrograms(
            [made for made, counted in zip(found, counts, strict=True) if counted]
        )
        whole = np.zeros((len(counts), *features.shape[1:]), np.float32)
        whole[counts] = features
        return {"input_features": whole, "decoder_input_ids": decoder, "labels": labels}

    def spectrograms(self, sounds: list[np.ndarray]) -> np.ndarray:
        """Return what the model reads of samples: (sounds, mels, frames)."""
        extractor = self.extractor
        if not sounds:
            return np.zeros((0, extractor.feature_size, extractor.nb_max_frames), np.float32)
        made = extractor(sounds, sampling_rate=extractor.sampling_rate, return_tensors="np")
        return np.asarray(made["input_features"], np.float32)

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
            batch["input_features"],
            decoder_input_ids=batch["decoder_input_ids"],
        )
        labels, size = batch["labels"], model.config.vocab_size
        return self.smoothed(output.logits, labels, size, train, changed)

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Say how many could not be read, too."""
        return super().metrics(totals) | self.skip_metrics()

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Write down the sounds of a split, and count errors of words and characters."""
        data = self.arguments
        if split == "validation" and not data.predict_with_generate:
            return None
        sounds, missed = self.splits[split], self.skipped_examples.get(split, {})
        heard = [number for number in range(len(sounds)) if number not in missed]
        chosen = self.chosen(split, heard)
        names, wanted, written = [], [], []
        size = data.generation_batch_size
        for begin in range(0, len(chosen), size):
            batch = chosen[begin : begin + size]
            sources = [sounds.source(number) for number in batch]
            found = self.reader(sources, [0.0] * len(batch))
            good, samples = [], []
            for place, made in enumerate(found):
                if isinstance(made, str):
                    self.skip_example(split, batch[place], sources[place].name, made)
                else:
                    good.append(place)
                    samples.append(made)
            # One shape, so that one program is compiled.
            features = np.zeros((size, self.extractor.feature_size, self.extractor.nb_max_frames))
            features[: len(good)] = self.spectrograms(samples)
            ids = model.generate(features, params=params).sequences
            names += [sources[place].name for place in good]
            wanted += [self.texts[split][batch[place]] for place in good]
            decoded = self.tokenizer.batch_decode(
                np.asarray(ids)[: len(good)], skip_special_tokens=True
            )
            written += [" ".join(text.split()) for text in decoded]
        return GeneratedTexts(names, wanted, written, error_rates(written, wanted), {})
