"""Shared parts of the objectives with audio inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hfseq.data.arguments import SPLITS, AudioArguments, SpeechArguments, TextArguments
from hfseq.data.audio import AudioDataset, AudioReader, load_audio
from hfseq.data.batches import IndexRows, RowRandom
from hfseq.errors import DataError, UsageError, first_line
from hfseq.objectives.base import Arrays, RowsAndStats, SkippedExamplesMixin

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)
#: Minimum number of masked spans per row, as in the PyTorch pretraining script of Transformers.
MIN_SPANS = 2


def draw_time_mask(
    frames: np.ndarray,
    width: int,
    probability: float,
    length: int,
    generators: list[np.random.Generator],
) -> np.ndarray:
    """Draws masked spans of ``length`` frames for each row.

    The number of spans is ``probability`` times the number of frames, divided by ``length``. It is
    rounded up or down at random, but a row has at least ``MIN_SPANS`` spans if they fit. Spans can
    overlap, so the masked fraction can be smaller than ``probability``. Rows that are shorter than
    a span are not masked.

    Args:
        frames: Number of frames per row, `(rows,)`.
        width: Number of columns of the mask.
        probability: Fraction of the frames to mask.
        length: Number of frames per span.
        generators: One random generator per row.

    Returns:
        The masked frames, bool `(rows, width)`.
    """
    hidden = np.zeros((len(frames), width), bool)
    for row_mask, row_frames, generator in zip(hidden, frames.tolist(), generators, strict=True):
        rounding, num_starts = generator.random(), row_frames - length + 1
        spans = max(int(probability * row_frames / length + rounding), MIN_SPANS)
        spans = min(spans, row_frames // length, num_starts)
        if spans < 1:
            continue
        starts = generator.choice(num_starts, spans, replace=False)
        row_mask[starts[:, None] + np.arange(length)] = True
        if row_mask.sum() < 2:  # a single masked frame has no negatives
            row_mask[:] = False
    return hidden


class AudioBatch(NamedTuple):
    """The audio samples of a batch.

    Attributes:
        values: Samples, float32 `(rows, width)`.
        lengths: Number of valid samples per row, `(rows,)`. It is 0 for audio that could not be
            read, and for rows that only fill up the batch.
    """

    values: np.ndarray
    lengths: np.ndarray


class AudioInputMixin(SkippedExamplesMixin):
    """Reads the audio of a batch, and skips files that cannot be read.

    Attributes:
        extractor: A feature extractor of Transformers.
        readable_splits: The splits of which at least one audio file could be read.
        count_frames: Function that returns the number of the model's frames for a number of audio
            samples.
        crops_long_audio: Whether audio that is too long is cropped. Otherwise it is skipped.
        reader: Reads and resamples audio files in threads.
        widths: The widths in samples to which batches are padded, in increasing order.
    """

    unit = "audio files"
    # The width of a batch depends on the longest audio in it.
    variable_width: ClassVar[Mapping[str, int]] = {
        **{"input_values": 0, "attention_mask": 0, "hidden": 0, "negatives": 0}
    }
    arguments: Any
    tokenizer: Any
    config: Any
    extractor: Any
    splits: Any
    readable_splits: set[str]
    count_frames: Any
    crops_long_audio = True

    def setup(self) -> None:
        """Loads the list of audio files."""
        self.extractor = getattr(self.tokenizer, "input_processor", self.tokenizer)
        self.splits, self.skipped_examples = load_audio(self.arguments), {}
        self.readable_splits = set()

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Loads the feature extractor of the checkpoint, or creates a default one."""
        from transformers import AutoFeatureExtractor, Wav2Vec2FeatureExtractor

        if name is None:
            return Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
        options.pop("trust_remote_code", None)
        try:
            return AutoFeatureExtractor.from_pretrained(name, **options)
        except Exception as error:  # OSError without a file, ValueError for an unknown type
            raise UsageError(
                f"'{name}' has no feature extractor ({first_line(error)}). Use a directory with a "
                "preprocessor_config.json."
            ) from error

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks that the model accepts audio samples, and determines the widths of batches."""
        output_lengths = getattr(model, "_get_feat_extract_output_lengths", None)
        if output_lengths is None:
            raise UsageError(f"{type(model).__name__} does not accept audio samples. Use wav2vec2.")
        self.count_frames = lambda samples: np.maximum(output_lengths(samples, False), 0)
        data: AudioArguments = self.arguments
        rate = self.extractor.sampling_rate
        max_samples, multiple = round(data.max_duration_in_seconds * rate), data.pad_to_multiple_of
        min_samples = max(round(data.min_duration_in_seconds * rate), 1)
        while self.count_frames(min_samples) < 1:
            min_samples += 1
        if max_samples < min_samples:
            raise UsageError(
                f"--max_duration_in_seconds {data.max_duration_in_seconds} is {max_samples} "
                f"samples, but the model requires at least {min_samples}"
            )
        self.reader = AudioReader(
            rate, min_samples, max_samples, data.decode_workers, self.crops_long_audio
        )
        # There are at most four widths, because the step is compiled for each of them.
        self.widths = sorted(
            {-(-max_samples * quarters // (4 * multiple)) * multiple for quarters in (1, 2, 3, 4)}
        )

    def mask_settings(self) -> tuple[float, int]:
        """Returns the fraction of frames to mask, and the number of frames per masked span."""
        data, config = self.arguments, self.config
        probability, length = data.mask_time_prob, data.mask_time_length
        probability = config.mask_time_prob if probability is None else probability
        is_enabled = config.apply_spec_augment
        return (
            probability if is_enabled else 0.0,
            config.mask_time_length if length is None else length,
        )

    def choose_length(self, limit: int | None) -> int:
        """Returns the number of frames of the longest row."""
        return int(self.count_frames(self.widths[-1]))

    @staticmethod
    def clean_texts(examples: Any, arguments: SpeechArguments) -> list[str]:
        """Returns the normalized transcripts.

        Each run of white space becomes one space. Depending on the flags, some characters are
        removed, and the text is converted to lower case.
        """
        deletions = str.maketrans("", "", "".join(arguments.chars_to_ignore or ()))
        texts = (text.translate(deletions) for text in examples.second or ())
        texts = (text.lower() for text in texts) if arguments.do_lower_case else texts
        return [" ".join(text.split()) for text in texts]

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Returns rows with the indices of the audio files of a split."""
        rows = IndexRows(splits[split], length, split, {})
        logger.info("%s: %d audio files", split, len(rows))
        return rows, {"documents": len(rows)}

    def read_samples(self, rows: Arrays, random: RowRandom) -> tuple[list[Any], np.ndarray]:
        """Reads the audio samples of a batch.

        Args:
            rows: The fetched rows.
            random: Source of random numbers for the crops.

        Returns:
            For each row, its samples or the reason why they cannot be read, and a bool array
            `(rows,)` that is true for valid rows whose audio could be read.

        Raises:
            DataError: None of the audio files in the first batch of a split can be read.
        """
        split = SPLITS[int(rows["split"][0])]
        dataset = self.splits[split]
        assert isinstance(dataset, AudioDataset)
        indices, valid = rows["numbers"].tolist(), rows["valid"]
        starts = random.uniform(1)[:, 0] if split == "train" else np.zeros(len(indices))
        sources = [dataset.source(index) for index in indices]
        samples = self.reader(sources, starts.tolist())
        for index, source, row_samples in zip(indices, sources, samples, strict=True):
            if isinstance(row_samples, str):
                self.skip_example(split, index, source.name, row_samples)
        counts = valid & np.array([not isinstance(row_samples, str) for row_samples in samples])
        num_valid, num_read = int(valid.sum()), int(counts.sum())
        if num_read:
            self.readable_splits.add(split)
        if self.count_unread(split, num_valid, num_read) and split not in self.readable_splits:
            # Later batches may contain only audio that is too short.
            raise DataError(
                f"none of the first {num_valid} audio files of {split} can be used. The first is "
                f"{sources[0].name}: {samples[0]}"
            )
        return samples, counts

    def read_audio(self, rows: Arrays, random: RowRandom) -> AudioBatch:
        """Reads the audio of a batch, normalized by the feature extractor and padded."""
        samples, counts = self.read_samples(rows, random)
        lengths = np.array([len(features) for features in samples]) * counts
        width = next(width for width in self.widths if width >= lengths.max(initial=1))
        values = np.zeros((len(samples), width), np.float32)
        for row in np.flatnonzero(counts):
            features = self.extractor(
                samples[row], sampling_rate=self.extractor.sampling_rate, return_tensors="np"
            )
            values[row, : lengths[row]] = features["input_values"][0]
        rows["frames"] = self.count_frames(lengths)  # for `count_tokens`
        return AudioBatch(values, lengths)

    def model_inputs(self, audio: AudioBatch) -> Arrays:
        """Returns the model inputs, with an attention mask if the feature extractor returns one."""
        values, lengths = audio
        if not self.extractor.return_attention_mask:
            return {"input_values": values}
        mask = np.arange(values.shape[1]) < lengths[:, None]
        return {"input_values": values, "attention_mask": mask.astype(np.int32)}

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of frames of each row. It is 0 for audio that cannot be read."""
        return rows["frames"]
