"""What objectives on sound have in common: it is read while batches are made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.data.arguments import SPLITS, AudioArguments, SpeechArguments, TextArguments
from hfseq.data.audio import AudioDataset, AudioReader, load_audio
from hfseq.data.batches import IndexRows, RowRandom
from hfseq.errors import DataError, UsageError, first_line
from hfseq.objectives.base import Arrays, RowsAndStats, SkippedExamplesMixin

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)
#: Spans that are hidden of every row, however short, as in PyTorch's script.
MIN_SPANS = 2


def draw_time_mask(
    frames: np.ndarray,
    width: int,
    probability: float,
    length: int,
    generators: list[np.random.Generator],
) -> np.ndarray:
    """Draw spans of ``length`` that are hidden: bool (rows, width), in the first ``frames`` each.

    As many as make ``probability`` of a row together, if none overlap: each row's number is rounded
    up or down by chance. Nothing is hidden of a row that is shorter than a span.
    """
    hidden = np.zeros((len(frames), width), bool)
    for row, own, draw in zip(hidden, frames.tolist(), generators, strict=True):
        rounding, room = draw.random(), own - length + 1
        spans = max(int(probability * own / length + rounding), MIN_SPANS)
        spans = min(spans, own // length, room)
        if spans < 1:
            continue
        starts = draw.choice(room, spans, replace=False)
        row[starts[:, None] + np.arange(length)] = True
        if row.sum() < 2:  # nothing to be told apart from
            row[:] = False
    return hidden


class AudioBatch(NamedTuple):
    """The samples of a batch, float32 (rows, width), and how many are each row's own.

    Rows that do not count, as they are copies or could not be read, have none.
    """

    values: np.ndarray
    lengths: np.ndarray


class AudioInputMixin(SkippedExamplesMixin):
    """Reads the samples of a batch, and counts sounds that cannot be read."""

    unit = "sounds"
    arguments: Any
    tokenizer: Any
    config: Any
    extractor: Any  # of Transformers
    splits: Any
    heard: set[str]  # splits of which something was read
    frames_of: Any
    cuts = True  # long sounds, or leaves them out

    def setup(self) -> None:
        """Find the sounds."""
        self.extractor = getattr(self.tokenizer, "inputs", self.tokenizer)
        self.splits, self.skipped_examples = load_audio(self.arguments), {}
        self.heard = set()

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Load the feature extractor of the checkpoint, or make a plain one."""
        from transformers import AutoFeatureExtractor, Wav2Vec2FeatureExtractor

        if name is None:
            return Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
        options.pop("trust_remote_code", None)
        try:
            return AutoFeatureExtractor.from_pretrained(name, **options)
        except Exception as error:  # an OSError without a file, a ValueError of an unknown kind
            raise UsageError(
                f"'{name}' has no feature extractor ({first_line(error)}): give a directory with a "
                "preprocessor_config.json"
            ) from error

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Refuse a model that does not read samples; learn what it makes of so many."""
        frames_of = getattr(model, "_get_feat_extract_output_lengths", None)
        if frames_of is None:
            raise UsageError(
                f"{type(model).__name__} does not read the samples of sound: take wav2vec2"
            )
        self.frames_of = lambda samples: np.maximum(frames_of(samples, False), 0)
        given: AudioArguments = self.arguments
        rate = self.extractor.sampling_rate
        most, step = round(given.max_duration_in_seconds * rate), given.pad_to_multiple_of
        fewest = max(round(given.min_duration_in_seconds * rate), 1)
        while self.frames_of(fewest) < 1:
            fewest += 1
        if most < fewest:
            raise UsageError(
                f"--max_duration_in_seconds {given.max_duration_in_seconds} are {most} samples; "
                f"the model makes nothing of fewer than {fewest}"
            )
        self.reader = AudioReader(rate, fewest, most, given.decode_workers, self.cuts)
        # Four widths at most: the step is compiled for each.
        self.widths = sorted({-(-most * part // (4 * step)) * step for part in (1, 2, 3, 4)})

    def spans(self) -> tuple[float, int]:
        """Return the share of frames to hide, and the frames of a span."""
        given, config = self.arguments, self.config
        share, length = given.mask_time_prob, given.mask_time_length
        share = config.mask_time_prob if share is None else share
        used = config.apply_spec_augment
        return share if used else 0.0, config.mask_time_length if length is None else length

    def choose_length(self, limit: int | None) -> int:
        """Return the frames of the longest row."""
        return int(self.frames_of(self.widths[-1]))

    @staticmethod
    def clean(sounds: Any, arguments: SpeechArguments) -> list[str]:
        """Return what is said, spaces single, lower-cased and without characters as asked for."""
        left_out = str.maketrans("", "", "".join(arguments.chars_to_ignore or ()))
        texts = (text.translate(left_out) for text in sounds.second or ())
        texts = (text.lower() for text in texts) if arguments.do_lower_case else texts
        return [" ".join(text.split()) for text in texts]

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Number the sounds of a split."""
        rows = IndexRows(splits[split], length, split, {})
        logger.info("%s: %d sounds", split, len(rows))
        return rows, {"documents": len(rows)}

    def hear(self, rows: Arrays, random: RowRandom) -> tuple[list[Any], np.ndarray]:
        """Return the samples of each sound of a batch, or why there are none, and which count."""
        split = SPLITS[int(rows["split"][0])]
        sounds = self.splits[split]
        assert isinstance(sounds, AudioDataset)
        numbers, valid = rows["numbers"].tolist(), rows["valid"]
        starts = random.uniform(1)[:, 0] if split == "train" else np.zeros(len(numbers))
        sources = [sounds.source(number) for number in numbers]
        found = self.reader(sources, starts.tolist())
        for number, source, made in zip(numbers, sources, found, strict=True):
            if isinstance(made, str):
                self.skip_example(split, number, source.name, made)
        counts = valid & np.array([not isinstance(made, str) for made in found])
        if counts.any():
            self.heard.add(split)
        elif split not in self.heard:  # later on, a batch may be of short sounds alone
            raise DataError(
                f"none of the first {valid.sum()} sounds of {split} can be trained on, the first "
                f"of them {sources[0].name}: {found[0]}"
            )
        return found, counts

    def read(self, rows: Arrays, random: RowRandom) -> AudioBatch:
        """Return the samples of a batch as the model reads them."""
        found, counts = self.hear(rows, random)
        lengths = np.array([len(made) for made in found]) * counts
        width = next(width for width in self.widths if width >= lengths.max(initial=1))
        values = np.zeros((len(found), width), np.float32)
        for row in np.flatnonzero(counts):
            made = self.extractor(
                found[row], sampling_rate=self.extractor.sampling_rate, return_tensors="np"
            )
            values[row, : lengths[row]] = made["input_values"][0]
        rows["frames"] = self.frames_of(lengths)  # for `tokens`
        return AudioBatch(values, lengths)

    def inputs(self, heard: AudioBatch) -> Arrays:
        """Return what the model is given: a mask if it was trained to have one."""
        values, lengths = heard
        if not self.extractor.return_attention_mask:
            return {"input_values": values}
        mask = np.arange(values.shape[1]) < lengths[:, None]
        return {"input_values": values, "attention_mask": mask.astype(np.int32)}

    def tokens(self, rows: Arrays) -> int:
        """Return the frames of the sounds that count, once they were read."""
        return int(rows["frames"].sum())
