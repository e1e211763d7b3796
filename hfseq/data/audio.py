"""Sound: where it is, and its samples at a wanted rate, in pieces that fit into memory.

A file is read where it is asked for and never whole (:class:`Sound`), so an hour takes no more
memory than a window of it. What cannot be read is told by an :class:`Unreadable`, which names why.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data import files
from hfseq.data.arguments import SPLITS, AudioArguments, SpeechArguments
from hfseq.data.classification import Examples, LabeledSplits
from hfseq.data.sources import (
    MediaColumn,
    MediaSource,
    UnreadableError,
    cached_on_arguments,
    complete_splits,
    load_dataset_splits,
)
from hfseq.data.tables import Table, read_table
from hfseq.errors import DataError, UsageError, first_line

if TYPE_CHECKING:
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: Names of columns of sound and of what is said, and endings of files.
AUDIO_COLUMNS = ("audio", "audio_path", "path", "file_name", "file", "sound", "speech")
TRANSCRIPT_COLUMNS = ("text", "sentence", "transcription", "transcript")
AUDIO_EXTENSIONS = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".aifc", ".au", ".snd"),
    *(".w64", ".rf64", ".caf"),
)
#: The rate of Whisper and wav2vec 2.0, in samples a second.
SAMPLING_RATE = 16000
#: Rates that are no sound's: a broken header.
SAMPLING_RATE_LIMITS = (1000, 768000)


class AudioFile:
    """A file of sound: its length, and any part of it as float32 samples of one channel.

    ``rate`` is what is wanted; with ``resample=False`` a file of another rate is refused. Channels
    are averaged. A part is the same whether the whole is read or not.

    **Raises:** :class:`Unreadable` for what is no sound, or empty; UsageError without soundfile.
    """

    def __init__(
        self,
        source: MediaSource | str | os.PathLike[str],
        sampling_rate: int = SAMPLING_RATE,
        resample: bool = True,
    ):
        self.source = source if isinstance(source, MediaSource) else MediaSource(os.fspath(source))
        self.rate = sampling_rate
        try:
            with self._open() as file:
                self.stored_rate, self._stored = file.samplerate, file.frames
        except UnreadableError:
            raise
        except Exception as error:  # libsndfile's, and what the system says of files
            raise UnreadableError(_reason(error, self.source.name)) from error
        if not SAMPLING_RATE_LIMITS[0] <= self.stored_rate <= SAMPLING_RATE_LIMITS[1]:
            raise UnreadableError(f"{self.stored_rate} samples a second are no rate of sound")
        if self._stored < 1:
            raise UnreadableError("it is empty")
        if self.stored_rate != sampling_rate and not resample:
            raise UnreadableError(
                f"it has {self.stored_rate} samples a second, not {sampling_rate}: convert it (ffmpeg -i IN "
                f"-ar {sampling_rate} OUT), or let it be converted"
            )
        divisor = math.gcd(sampling_rate, self.stored_rate)
        self._up, self._down = sampling_rate // divisor, self.stored_rate // divisor
        #: Samples at the wanted rate.
        self.length = -(-self._stored * self._up // self._down)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.length / self.rate

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return ``count`` samples from ``start``, fewer at the end; all of them by default."""
        stop = self.length if count is None else min(start + count, self.length)
        if stop <= start:
            return np.zeros(0, np.float32)
        try:
            if self._up == self._down:
                return self._stored_part(start, stop)
            from scipy.signal import resample_poly  # type: ignore[import-untyped]

            # Whole periods of both rates, and around them what scipy's filter reaches.
            context = -(-(10 * max(self._up, self._down) // self._up + 1) // self._down)
            first, last = start // self._up - context, -(-stop // self._up) + context
            given = self._stored_part(first * self._down, last * self._down)
            made = resample_poly(given, self._up, self._down)
            return made[start - first * self._up : stop - first * self._up].astype(np.float32)
        except UnreadableError:
            raise
        except Exception as error:
            raise UnreadableError(_reason(error, self.source.name)) from error

    def _stored_part(self, start: int, stop: int) -> np.ndarray:
        """Return samples at the file's rate, silence before it and behind it."""
        inside = max(start, 0), min(stop, self._stored)
        made = np.zeros(stop - start, np.float32)
        with self._open() as file:
            file.seek(inside[0])
            samples = file.read(inside[1] - inside[0], dtype="float32", always_2d=True)
        mono = samples.mean(1) if samples.shape[1] > 1 else samples[:, 0]
        if not np.isfinite(mono).all():
            raise UnreadableError("it holds samples that are no numbers")
        made[inside[0] - start : inside[0] - start + len(mono)] = mono
        return made

    def _open(self) -> Any:
        try:
            import soundfile
        except ImportError as error:
            raise UsageError("sound needs soundfile: pip install 'hfseq[audio]'") from error
        name, data = self.source
        if data is None and not os.path.isfile(name):
            raise UnreadableError("there is no such file")
        if (len(data) if data is not None else os.path.getsize(name)) == 0:
            raise UnreadableError("it is empty")
        return soundfile.SoundFile(name if data is None else io.BytesIO(data))


def _reason(error: BaseException, name: str) -> str:
    told = first_line(error).replace(f"Error opening {name!r}: ", "").replace(name, "it")
    told = told.removesuffix(".")
    unknown = "Format not recognised" in told or "unknown format" in told.lower()
    return "it is no sound of a known kind" if unknown else told or type(error).__name__


def find_audio(names: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the files that ``names`` name: themselves, and all sound below folders, by name.

    **Raises:** DataError for a name that is nothing, and for folders without sound.
    """
    return files.find_files(names, AUDIO_EXTENSIONS, "sound")


class Spectrograms:
    """Spectrograms of sounds, made window by window by a feature extractor of Transformers.

    It stands for an array (sounds, mels, frames) where :meth:`window` is all that is asked for.
    Each window is normalised by itself, as if it were a sound of its own.
    """

    ndim = 3

    def __init__(self, sounds: Sequence[AudioFile], extractor: Any):
        self.audio_files, self.extractor, self.hop = sounds, extractor, int(extractor.hop_length)
        self.ends = np.array([max(1, -(-sound.length // self.hop)) for sound in sounds])
        self.shape = (len(sounds), int(extractor.feature_size), int(self.ends.max()))

    def window(self, row: int, start: int, frames: int) -> np.ndarray:
        """Return (mels, frames) of a sound from the frame ``start`` on."""
        samples = self.audio_files[row].read(start * self.hop, frames * self.hop)
        made = self.extractor(
            samples, sampling_rate=self.extractor.sampling_rate, return_tensors="np"
        )
        return np.asarray(made["input_features"][0])[:, :frames]


# -- sounds to train on


@dataclass
class AudioDataset(Examples):
    """The sounds of a split: ``first`` are their names, ``second`` what is said, if that is asked.

    ``sources`` are those of the whole table.
    """

    sources: Sequence[MediaSource] = ()

    def source(self, number: int) -> MediaSource:
        """Say where a sound is."""
        return self.sources[number if self.rows is None else int(self.rows[number])]


@cached_on_arguments
def load_audio(arguments: AudioArguments, plugins: Plugins | None = None) -> LabeledSplits:
    """Load what the flags name; loading it again gives the same object. Nothing is read here.

    Of a folder all sound below it, of a table or dataset a column of files or sounds.
    """
    read: dict[str, AudioDataset] = {}
    if arguments.dataset_name:
        from datasets import concatenate_datasets

        named = {split: getattr(arguments, f"{split}_split_name") for split in SPLITS[:2]}
        parts = {split: name.split("+") for split, name in named.items()}
        found = load_dataset_splits(
            arguments, plugins, [one for names in parts.values() for one in names]
        )
        for split, names in parts.items():
            if all(name in found for name in names):
                origin = f"--dataset_name {arguments.dataset_name}, split {named[split]}"
                together = [found[name] for name in names]
                whole = concatenate_datasets(together) if names[1:] else together[0]
                read[split] = _of_dataset(whole, origin, arguments)
    for split in SPLITS[:2]:
        folder, tables = (getattr(arguments, f"{split}_{kind}") for kind in ("dir", "file"))
        if folder:
            if not os.path.isdir(folder):
                raise DataError(f"--{split}_dir {folder} is no folder: give one with sound")
            found_files = find_audio([folder])
            # By their names inside, so that a folder is divided likewise wherever it lies.
            inside = [os.path.relpath(name, folder).replace(os.sep, "/") for name in found_files]
            sources = [MediaSource(name) for name in found_files]
            read[split] = _sounds(inside, f"--{split}_dir {folder}", sources)
        elif tables:
            read[split] = _of_tables(tables, f"--{split}_file", arguments)
    if not read:
        raise UsageError("no data: give --train_dir, --train_file or --dataset_name")
    splits = LabeledSplits(read, None)
    complete_splits(splits, arguments)
    return splits


def _sounds(
    names: list[str], origin: str, sources: Sequence[MediaSource], texts: list[str] | None = None
) -> AudioDataset:
    if not names:
        raise DataError(f"{origin} has no sounds")
    table = Table({"audio": list(names)}, origin)
    return AudioDataset(names, texts, [None] * len(names), [(0, table)], sources=sources)


def _of_tables(patterns: list[str], flag: str, arguments: AudioArguments) -> AudioDataset:
    names: list[str] = []
    sources: list[MediaSource] = []
    said: list[str] | None = [] if isinstance(arguments, SpeechArguments) else None
    found = files.expand_patterns(patterns, flag)
    for file in found:
        table = read_table(file, flag, arguments)
        column = replace(table, origin=file).column(
            "audio_column_name", arguments.audio_column_name, AUDIO_COLUMNS
        )
        names += (texts := table.texts(column))
        sources += [MediaSource(os.path.join(os.path.dirname(file), name)) for name in texts]
        if said is not None:
            said += table.texts(
                table.column("text_column_name", arguments.text_column_name, TRANSCRIPT_COLUMNS)
            )
    return _sounds(names, f"{flag} {', '.join(found)}", sources, said)


def _of_dataset(dataset: Any, origin: str, arguments: AudioArguments) -> AudioDataset:
    import datasets

    features: Mapping[str, Any] = dataset.features or {}
    sound = [name for name, kind in features.items() if isinstance(kind, datasets.Audio)]
    asked = arguments.audio_column_name or next(iter(sound), None)
    header = Table({name: [] for name in dataset.column_names}, origin)
    column = header.column("audio_column_name", asked, AUDIO_COLUMNS)
    names = [f"{origin} {row}" for row in range(len(dataset))]
    said = None
    if isinstance(arguments, SpeechArguments):
        others = [name for name in dataset.column_names if name != column]
        table = Table({name: dataset[name] for name in others}, origin)
        said = table.texts(
            table.column("text_column_name", arguments.text_column_name, TRANSCRIPT_COLUMNS)
        )
    return _sounds(names, origin, MediaColumn(dataset, column, origin), said)


class AudioReader:
    """Reads the sounds of a batch in threads: libsndfile and scipy leave the interpreter to others.

    Of each at most ``most`` samples, from a place that is a share of what is too much, or none
    without ``cut``; fewer than ``fewest`` are none.
    """

    def __init__(
        self,
        sampling_rate: int,
        min_length: int,
        max_length: int,
        num_workers: int | None,
        crop: bool = True,
    ):
        self.rate, self.min_length, self.most, self.cut = (
            sampling_rate,
            min_length,
            max_length,
            crop,
        )
        num_workers = min(os.cpu_count() or 1, 8) if num_workers is None else num_workers
        self._pool = ThreadPoolExecutor(num_workers, "hfseq-sound") if num_workers else None

    def __call__(
        self, sources: Sequence[MediaSource], starts: Sequence[float]
    ) -> list[np.ndarray | str]:
        """Return the samples of each, or why there are none."""
        each = self._pool.map if self._pool else map
        return list(each(self._read, sources, starts))

    def _read(self, source: MediaSource, start: float) -> np.ndarray | str:
        try:
            sound = AudioFile(source, self.rate)
            if sound.length < self.min_length:
                return f"{sound.seconds:.3g} seconds, less than {self.min_length / self.rate:.3g}"
            if sound.length > self.most and not self.cut:
                return f"{sound.seconds:.3g} seconds, more than {self.most / self.rate:.3g}"
            return sound.read(int(start * (max(sound.length - self.most, 0) + 1)), self.most)
        except UnreadableError as error:
            return str(error)
