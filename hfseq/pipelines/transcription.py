"""Transcription of audio files with Whisper, with timestamps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.data.audio import AudioFile, MediaSource, Spectrograms, UnreadableError
from hfseq.errors import CheckpointError, UsageError, first_line
from hfseq.pipelines import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel


class Segment(NamedTuple):
    """A part of a transcript.

    Attributes:
        start: Start time in seconds.
        end: End time in seconds.
        text: The text.
    """

    start: float
    end: float
    text: str


@dataclass
class Transcript:
    """The transcript of an audio file.

    Attributes:
        name: Name of the file.
        seconds: Duration of the audio.
        segments: The segments.
        error: Why the file could not be transcribed.
    """

    name: str
    seconds: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """The text of all segments."""
        return " ".join(filter(None, (segment.text for segment in self.segments)))

    def to_srt(self) -> str:
        """Returns subtitles in SubRip format."""
        parts = [
            f"{number}\n{_time(segment.start)} --> {_time(segment.end)}\n{segment.text}\n"
            for number, segment in enumerate((s for s in self.segments if s.text), 1)
        ]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Returns the transcript as a JSON object."""
        result: dict[str, Any] = {
            "file": self.name,
            "seconds": round(self.seconds, 3),
            "text": self.text,
            "segments": [
                {
                    "start": round(segment.start, 3),
                    "end": round(segment.end, 3),
                    "text": segment.text,
                }
                for segment in self.segments
            ],
        }
        return result | ({"error": self.error} if self.error else {})


def _time(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, remainder = divmod(milliseconds, 60000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{remainder // 1000:02},{remainder % 1000:03}"


class Transcriber:
    """Transcribes audio files in batches, window by window.

    Memory use does not depend on the duration of the files: one window of each file in a batch is
    in memory.

    Args:
        model: A Whisper model.
        extractor: Its feature extractor.
        tokenizer: Its tokenizer.
        batch_size: Files per batch.
        language: Language of the audio.
        task: ``transcribe`` or ``translate``.
        resample: Whether audio is resampled to the model's sampling rate. Otherwise files with
            another rate are errors.
        **generation: Options of ``generate``. ``None`` leaves an option to the model.

    Raises:
        UsageError: The model does not support timestamps.
    """

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        extractor: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        language: str | None = None,
        task: str | None = None,
        resample: bool = True,
        **generation: Any,
    ):
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        if getattr(model.generation_config, "no_timestamps_token_id", None) is None:
            raise UsageError(
                "the model's generation_config has no no_timestamps_token_id. Transcription "
                "requires timestamps, which define the windows."
            )
        self.model, self.extractor, self.tokenizer = model, extractor, tokenizer
        self.batch_size, self.resample = batch_size, resample
        self.first_timestamp_id = model.generation_config.no_timestamps_token_id + 1
        options = {"language": language, "task": task, **generation}
        self._options = {name: value for name, value in options.items() if value is not None}

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str | None = None, **options: Any) -> Any:
        """Loads a checkpoint with its feature extractor and tokenizer.

        Args:
            name: Directory or Hub name.
            precision: Precision recipe.
            **options: Arguments of :class:`Transcriber`.

        Raises:
            UsageError: The checkpoint has another type.
            CheckpointError: The checkpoint cannot be loaded or has no feature extractor.
        """
        from transformers import AutoFeatureExtractor

        from hfseq.modeling.auto import FlaxAutoModelForSpeechSeq2Seq

        recipe = {"precision": precision} if precision else {}
        model, tokenizer = load(FlaxAutoModelForSpeechSeq2Seq, name, **recipe)
        if model.main_input_name != "input_features":
            raise UsageError(
                f"'{name}' does not read spectrograms. Transcription requires a Whisper model."
            )
        try:
            extractor = AutoFeatureExtractor.from_pretrained(name)
        except Exception as error:  # OSError without a file, ValueError for an unknown type
            raise CheckpointError(
                f"'{name}' has no feature extractor ({first_line(error)}). Use a directory with a "
                "preprocessor_config.json."
            ) from error
        return cls(model, extractor, tokenizer, **options)

    def __call__(
        self,
        sources: Iterable[str | MediaSource],
        params: Mapping[str, Any] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Iterator[Transcript]:
        """Yields a :class:`Transcript` of each file, in order. Unreadable files have an ``error``.

        Args:
            sources: Paths or sources of audio files.
            params: Parameters to use instead of the model's.
            progress: Called with the seconds of audio transcribed since the previous call.
        """
        remaining = iter(sources)
        while batch := list(itertools.islice(remaining, self.batch_size)):
            transcripts, pairs = [], []
            for source in batch:
                transcript = Transcript(source if isinstance(source, str) else source.name)
                transcripts.append(transcript)
                try:
                    audio = AudioFile(source, self.extractor.sampling_rate, self.resample)
                    transcript.seconds = audio.seconds
                    pairs.append((transcript, audio))
                except UnreadableError as error:
                    transcript.error = str(error)
            self._write(pairs, params, progress)
            yield from transcripts

    def _write(
        self,
        pairs: list[tuple[Transcript, AudioFile]],
        params: Mapping[str, Any] | None,
        progress: Callable[[float], None] | None,
    ) -> None:
        """Fills in the transcripts. A file that fails while it is read gets an ``error``."""
        if not pairs:
            return
        spectrograms = Spectrograms([audio for _, audio in pairs], self.extractor)
        frames_per_second, reported = self.extractor.sampling_rate / self.extractor.hop_length, 0.0

        def report(positions: np.ndarray) -> None:
            nonlocal reported
            seconds_done = float(positions.min(1).sum()) / frames_per_second
            if progress is not None and seconds_done > reported:
                progress(seconds_done - reported)
            reported = max(seconds_done, reported)

        generate: Callable[..., Any] = self.model.generate  # Whisper's accepts these arguments
        try:
            output = generate(spectrograms, monitor_progress=report, params=params, **self._options)
        except UnreadableError as error:
            if len(pairs) == 1:
                pairs[0][0].error = str(error)
                return
            for pair in pairs:  # find the file that fails
                self._write([pair], params, progress)
            return
        for (transcript, _), segments in zip(pairs, output.segments, strict=True):
            transcript.segments = [
                self._segment(segment, transcript.seconds) for segment in segments
            ]

    def _segment(self, segment: Mapping[str, Any], seconds: float) -> Segment:
        text_ids = [
            token
            for token in np.asarray(segment["tokens"]).tolist()
            if token < self.first_timestamp_id
        ]
        text = str(self.tokenizer.decode(text_ids, skip_special_tokens=True)).strip()
        start, end = (min(float(segment[name]), seconds) for name in ("start", "end"))
        return Segment(start, end, text)
