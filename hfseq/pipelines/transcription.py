"""Transcription with Whisper: from files of sound to what is said in them, and when."""

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
    """What is said between two times, in seconds."""

    start: float
    end: float
    text: str


@dataclass
class Transcript:
    """What is said in a file: its segments, how long it is, and what was wrong with it, if so."""

    name: str
    seconds: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        """All that is said."""
        return " ".join(filter(None, (segment.text for segment in self.segments)))

    def to_srt(self) -> str:
        """Return subtitles as SubRip has them."""
        parts = [
            f"{number}\n{_time(one.start)} --> {_time(one.end)}\n{one.text}\n"
            for number, one in enumerate((s for s in self.segments if s.text), 1)
        ]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        made: dict[str, Any] = {
            "file": self.name,
            "seconds": round(self.seconds, 3),
            "text": self.text,
            "segments": [
                {"start": round(one.start, 3), "end": round(one.end, 3), "text": one.text}
                for one in self.segments
            ],
        }
        return made | ({"error": self.error} if self.error else {})


def _time(seconds: float) -> str:
    whole = round(seconds * 1000)
    minutes, left = divmod(whole, 60000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{left // 1000:02},{left % 1000:03}"


class Transcriber:
    """Writes down what is said, ``batch_size`` files at a time, each window by window.

    Memory holds a window of each file of a batch, however long they are. ``language``, ``task`` and
    ``generation`` are options of the model's ``generate``; None leaves an option to the model.
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
            raise UsageError(f"batch_size {batch_size}: give a number of at least 1")
        if getattr(model.generation_config, "no_timestamps_token_id", None) is None:
            raise UsageError(
                "the generation_config of this model has no no_timestamps_token_id: files are read "
                "by windows, which end where timestamps say"
            )
        self.model, self.extractor, self.tokenizer = model, extractor, tokenizer
        self.batch_size, self.resample = batch_size, resample
        self.stamp = model.generation_config.no_timestamps_token_id + 1
        options = {"language": language, "task": task, **generation}
        self._options = {name: value for name, value in options.items() if value is not None}

    @classmethod
    def from_pretrained(cls, name: str, *, precision: str | None = None, **options: Any) -> Any:
        """Load the checkpoint ``name``, a directory or on the Hub, with its feature extractor.

        **Raises:** UsageError for a checkpoint of another kind, CheckpointError for one that cannot
        be loaded or has no feature extractor.
        """
        from transformers import AutoFeatureExtractor

        from hfseq.modeling.auto import FlaxAutoModelForSpeechSeq2Seq

        recipe = {"precision": precision} if precision else {}
        model, tokenizer = load(FlaxAutoModelForSpeechSeq2Seq, name, **recipe)
        if model.main_input_name != "input_features":
            raise UsageError(f"'{name}' reads no spectrograms: transcribe needs a Whisper")
        try:
            extractor = AutoFeatureExtractor.from_pretrained(name)
        except Exception as error:  # an OSError without a file, a ValueError of an unknown kind
            raise CheckpointError(
                f"'{name}' has no feature extractor ({first_line(error)}): give a directory with a "
                "preprocessor_config.json"
            ) from error
        return cls(model, extractor, tokenizer, **options)

    def __call__(
        self,
        sources: Iterable[str | MediaSource],
        params: Mapping[str, Any] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Iterator[Transcript]:
        """Yield a :class:`Transcript` of each file, in order; broken ones have an ``error``.

        ``progress`` is told the seconds of sound that were done since it was told last.
        """
        rest = iter(sources)
        while batch := list(itertools.islice(rest, self.batch_size)):
            made, sounds = [], []
            for source in batch:
                one = Transcript(source if isinstance(source, str) else source.name)
                made.append(one)
                try:
                    sound = AudioFile(source, self.extractor.sampling_rate, self.resample)
                    one.seconds = sound.seconds
                    sounds.append((one, sound))
                except UnreadableError as error:
                    one.error = str(error)
            self._write(sounds, params, progress)
            yield from made

    def _write(
        self,
        sounds: list[tuple[Transcript, AudioFile]],
        params: Mapping[str, Any] | None,
        progress: Callable[[float], None] | None,
    ) -> None:
        """Fill the transcripts in; a file that breaks while it is read is left out."""
        if not sounds:
            return
        spectrograms = Spectrograms([sound for _, sound in sounds], self.extractor)
        second, told = self.extractor.sampling_rate / self.extractor.hop_length, 0.0

        def tell(places: np.ndarray) -> None:
            nonlocal told
            done = float(places.min(1).sum()) / second
            if progress is not None and done > told:
                progress(done - told)
            told = max(done, told)

        write: Callable[..., Any] = self.model.generate  # a Whisper's takes these
        try:
            found = write(spectrograms, monitor_progress=tell, params=params, **self._options)
        except UnreadableError as error:
            if len(sounds) == 1:
                sounds[0][0].error = str(error)
                return
            for pair in sounds:  # to see whose it is
                self._write([pair], params, progress)
            return
        for (one, _), segments in zip(sounds, found.segments, strict=True):
            one.segments = [self._segment(segment, one.seconds) for segment in segments]

    def _segment(self, segment: Mapping[str, Any], seconds: float) -> Segment:
        words = [token for token in np.asarray(segment["tokens"]).tolist() if token < self.stamp]
        text = str(self.tokenizer.decode(words, skip_special_tokens=True)).strip()
        start, end = (min(float(segment[name]), seconds) for name in ("start", "end"))
        return Segment(start, end, text)
