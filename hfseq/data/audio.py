"""Reads audio files at a given sampling rate, and loads datasets of audio files.

`AudioFile` reads any part of a file on demand, so the memory use depends on the length of the part
and not on the length of the file. If the audio cannot be read, `UnreadableError` gives the reason.
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
from hfseq.errors import DataError, UsageError, first_line, optional_import

if TYPE_CHECKING:
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: Common column names of audio and of transcripts, and file extensions.
AUDIO_COLUMNS = ("audio", "audio_path", "path", "file_name", "file", "sound", "speech")
TRANSCRIPT_COLUMNS = ("text", "sentence", "transcription", "transcript")
AUDIO_EXTENSIONS = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".aifc", ".au", ".snd"),
    *(".w64", ".rf64", ".caf"),
)
#: Sampling rate of Whisper and wav2vec 2.0, in Hz.
SAMPLING_RATE = 16000
#: Lowest and highest plausible sampling rate in Hz. With any other rate, the file is considered
#: damaged.
SAMPLING_RATE_LIMITS = (1000, 768000)


class AudioFile:
    """An audio file, of which any part can be read as mono float32 samples.

    Channels are averaged. Reading a part returns the same samples as reading the complete file,
    even if the file is resampled.

    Args:
        source: Path of the file, or its content.
        sampling_rate: Sampling rate of the samples, in Hz.
        resample: Whether to resample a file with a different sampling rate. Otherwise the file is
            rejected with `UnreadableError`.

    Attributes:
        length: Number of samples at `sampling_rate`.
        stored_rate: Sampling rate of the file.

    Raises:
        UnreadableError: The file is not valid audio, is empty, or has a different sampling rate.
        UsageError: soundfile is not installed.
    """

    def __init__(
        self,
        source: MediaSource | str | os.PathLike[str],
        sampling_rate: int = SAMPLING_RATE,
        resample: bool = True,
    ):
        self.source = source if isinstance(source, MediaSource) else MediaSource(os.fspath(source))
        self.sampling_rate = sampling_rate
        try:
            with self._open() as file:
                self.stored_rate, self._stored = file.samplerate, file.frames
        except (UnreadableError, UsageError):
            raise
        except Exception as error:  # errors of libsndfile and of the operating system
            raise UnreadableError(_reason(error, self.source.name)) from error
        if not SAMPLING_RATE_LIMITS[0] <= self.stored_rate <= SAMPLING_RATE_LIMITS[1]:
            raise UnreadableError(f"invalid sampling rate {self.stored_rate} Hz")
        if self._stored < 1:
            raise UnreadableError("it is empty")
        if self.stored_rate != sampling_rate and not resample:
            raise UnreadableError(
                f"its sampling rate is {self.stored_rate} Hz, not {sampling_rate} Hz: convert "
                f"it (ffmpeg -i IN -ar {sampling_rate} OUT) or allow resampling"
            )
        divisor = math.gcd(sampling_rate, self.stored_rate)
        self._up, self._down = sampling_rate // divisor, self.stored_rate // divisor
        self.length = -(-self._stored * self._up // self._down)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.length / self.sampling_rate

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Reads samples.

        Args:
            start: Index of the first sample.
            count: Number of samples. Default: all samples up to the end of the file.

        Returns:
            The samples, float32 `(count,)`, or fewer than `count` samples if the file ends earlier.

        Raises:
            UnreadableError: The samples cannot be decoded.
        """
        stop = self.length if count is None else min(start + count, self.length)
        if stop <= start:
            return np.zeros(0, np.float32)
        try:
            if self._up == self._down:
                return self._read_stored(start, stop)
            from scipy.signal import resample_poly

            # Resample whole periods, in which `_down` stored samples become `_up` samples. Extend
            # them on both sides by half the length of scipy's filter.
            context = -(-(10 * max(self._up, self._down) // self._up + 1) // self._down)
            first, last = start // self._up - context, -(-stop // self._up) + context
            stored = self._read_stored(first * self._down, last * self._down)
            resampled = resample_poly(stored, self._up, self._down)
            return resampled[start - first * self._up : stop - first * self._up].astype(np.float32)
        except (UnreadableError, UsageError):
            raise
        except Exception as error:
            raise UnreadableError(_reason(error, self.source.name)) from error

    def _read_stored(self, start: int, stop: int) -> np.ndarray:
        """Returns samples at the file's sampling rate.

        The samples before the start and after the end of the file are 0.
        """
        inside = max(start, 0), min(stop, self._stored)
        samples_out = np.zeros(stop - start, np.float32)
        with self._open() as file:
            file.seek(inside[0])
            samples = file.read(inside[1] - inside[0], dtype="float32", always_2d=True)
        mono = samples.mean(1) if samples.shape[1] > 1 else samples[:, 0]
        if not np.isfinite(mono).all():
            raise UnreadableError("it contains samples that are not finite")
        samples_out[inside[0] - start : inside[0] - start + len(mono)] = mono
        return samples_out

    def _open(self) -> Any:
        with optional_import("audio", "soundfile", "hfseq[audio]"):
            import soundfile
        name, data = self.source
        if data is None and not os.path.isfile(name):
            raise UnreadableError("the file does not exist")
        if (len(data) if data is not None else os.path.getsize(name)) == 0:
            raise UnreadableError("it is empty")
        return soundfile.SoundFile(name if data is None else io.BytesIO(data))


def _reason(error: BaseException, name: str) -> str:
    message = first_line(error).replace(f"Error opening {name!r}: ", "").replace(name, "it")
    message = message.removesuffix(".")
    unknown = "Format not recognised" in message or "unknown format" in message.lower()
    return "unsupported audio format" if unknown else message or type(error).__name__


def find_audio(names: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Returns the audio files in a list of files and directories.

    Directories are searched recursively, and their files are sorted by name. Paths of files in
    `names` are returned unchanged.

    Raises:
        DataError: A path does not exist, or a directory contains no audio files.
    """
    return files.find_files(names, AUDIO_EXTENSIONS, "audio files")


class Spectrograms:
    """Log-mel spectrograms of audio files, computed window by window.

    The object takes the place of an array `(files, mel bins, frames)`, but its values can only be
    accessed through `window`. The values equal the output of Whisper's feature extractor for the
    whole file. To achieve this, frames at the edge of a window are also computed from samples
    beyond the window. The feature extractor also clips values that are too far below the maximum of
    the file. To find this maximum, the first access to a file reads the whole file once.

    Args:
        audio_files: The files.
        extractor: A `WhisperFeatureExtractor`.

    Attributes:
        ends: Number of frames of each file.
        shape: Shape of the array. Its number of frames is the number of frames of the longest file.
    """

    ndim = 3

    def __init__(self, audio_files: Sequence[AudioFile], extractor: Any):
        self.audio_files, self.extractor = audio_files, extractor
        self.hop_length = int(extractor.hop_length)
        self.ends = np.array([max(1, audio.length // self.hop_length) for audio in audio_files])
        self.shape = (len(audio_files), int(extractor.feature_size), int(self.ends.max()))
        self._maxima: dict[int, np.floating[Any]] = {}

    def window(self, row: int, start: int, frames: int) -> np.ndarray:
        """Returns up to `frames` frames of the file `row`, starting with the frame `start`.

        The shape is `(mel bins, frames)`. There are fewer frames if the file ends earlier.
        """
        if row not in self._maxima:
            step = int(self.extractor.nb_max_frames)
            starts = range(0, int(self.ends[row]), step)
            self._maxima[row] = max(self._log_mel(row, first, step).max() for first in starts)
        values = np.maximum(self._log_mel(row, start, frames), self._maxima[row] - 8.0)
        return ((values + 4.0) / 4.0).astype(np.float32)

    def _log_mel(self, row: int, start: int, frames: int) -> np.ndarray:
        """Returns base-10 logarithms of mel energies, before clipping and scaling."""
        from transformers.audio_utils import spectrogram, window_function

        extractor, hop = self.extractor, self.hop_length
        end = min(start + frames, int(self.ends[row]))
        # The samples of a frame overlap with this many frames before and after it.
        context = -(-extractor.n_fft // (2 * hop))
        first = max(0, start - context)
        samples = self.audio_files[row].read(first * hop, (end + context - first) * hop)
        samples = np.pad(samples, (0, max(0, extractor.n_fft - len(samples))))
        values = spectrogram(
            samples,
            window_function(extractor.n_fft, "hann"),
            frame_length=extractor.n_fft,
            hop_length=hop,
            power=2.0,
            dither=extractor.dither,
            mel_filters=extractor.mel_filters,
            log_mel="log10",
        )
        return values[:, start - first : end - first]


# -- datasets


@dataclass
class AudioDataset(Examples):
    """The audio files of a split.

    Attributes:
        first: Names of the audio files, for messages.
        second: Transcripts, or `None`.
        sources: The audio file of each row of the tables. The dataset may contain only some of
            these rows. Use the method `source` to get the file of an example.
    """

    sources: Sequence[MediaSource] = ()

    def source(self, number: int) -> MediaSource:
        """Returns the audio file of the example with this index."""
        return self.sources[number if self.rows is None else int(self.rows[number])]


@cached_on_arguments
def load_audio(arguments: AudioArguments, plugins: Plugins | None = None) -> LabeledSplits:
    """Loads the audio files that the flags specify, without reading their samples.

    The files come from a directory, which is searched recursively, or from a column of a table or
    dataset. Repeated calls with the same arguments return the same object.

    Raises:
        UsageError: The flags specify no data.
        DataError: The data cannot be read or contains no audio.
    """
    read: dict[str, AudioDataset] = {}
    if arguments.dataset_name:
        from datasets import concatenate_datasets

        split_names = {split: getattr(arguments, f"{split}_split_name") for split in SPLITS[:2]}
        parts = {split: name.split("+") for split, name in split_names.items()}
        dataset_splits = load_dataset_splits(
            arguments, plugins, [part for names in parts.values() for part in names]
        )
        for split, names in parts.items():
            if all(name in dataset_splits for name in names):
                origin = f"--dataset_name {arguments.dataset_name}, split {split_names[split]}"
                split_datasets = [dataset_splits[name] for name in names]
                split_dataset = (
                    concatenate_datasets(split_datasets) if names[1:] else split_datasets[0]
                )
                read[split] = _of_dataset(split_dataset, origin, arguments)
    for split in SPLITS[:2]:
        folder, tables = (getattr(arguments, f"{split}_{ending}") for ending in ("dir", "file"))
        if folder:
            if not os.path.isdir(folder):
                raise DataError(f"--{split}_dir {folder} is not a directory")
            found_files = find_audio([folder])
            # Examples are divided into splits by a hash of their names. Relative names make the
            # division independent of the location of the directory.
            inside = [os.path.relpath(name, folder).replace(os.sep, "/") for name in found_files]
            sources = [MediaSource(name) for name in found_files]
            read[split] = _audio_dataset(inside, f"--{split}_dir {folder}", sources)
        elif tables:
            read[split] = _of_tables(tables, f"--{split}_file", arguments)
    if not read:
        raise UsageError("no data: give --train_dir, --train_file or --dataset_name")
    splits = LabeledSplits(read, None)
    complete_splits(splits, arguments)
    return splits


def _audio_dataset(
    names: list[str], origin: str, sources: Sequence[MediaSource], texts: list[str] | None = None
) -> AudioDataset:
    if not names:
        raise DataError(f"{origin} contains no audio files")
    table = Table({"audio": list(names)}, origin)
    return AudioDataset(names, texts, [None] * len(names), [(0, table)], sources=sources)


def _of_tables(patterns: list[str], flag: str, arguments: AudioArguments) -> AudioDataset:
    names: list[str] = []
    sources: list[MediaSource] = []
    transcripts: list[str] | None = [] if isinstance(arguments, SpeechArguments) else None
    paths = files.expand_patterns(patterns, flag)
    for file in paths:
        table = read_table(file, flag, arguments)
        column = replace(table, origin=file).column(
            "audio_column_name", arguments.audio_column_name, AUDIO_COLUMNS
        )
        names += (texts := table.texts(column))
        sources += [MediaSource(os.path.join(os.path.dirname(file), name)) for name in texts]
        if transcripts is not None:
            transcripts += table.texts(
                table.column("text_column_name", arguments.text_column_name, TRANSCRIPT_COLUMNS)
            )
    return _audio_dataset(names, f"{flag} {', '.join(paths)}", sources, transcripts)


def _of_dataset(dataset: Any, origin: str, arguments: AudioArguments) -> AudioDataset:
    import datasets

    features: Mapping[str, Any] = dataset.features or {}
    audio_columns = [
        name for name, feature in features.items() if isinstance(feature, datasets.Audio)
    ]
    requested = arguments.audio_column_name or next(iter(audio_columns), None)
    header = Table({name: [] for name in dataset.column_names}, origin)
    column = header.column("audio_column_name", requested, AUDIO_COLUMNS)
    names = [f"{origin} {row}" for row in range(len(dataset))]
    transcripts = None
    if isinstance(arguments, SpeechArguments):
        other_columns = [name for name in dataset.column_names if name != column]
        table = Table({name: dataset[name] for name in other_columns}, origin)
        transcripts = table.texts(
            table.column("text_column_name", arguments.text_column_name, TRANSCRIPT_COLUMNS)
        )
    return _audio_dataset(names, origin, MediaColumn(dataset, column, origin), transcripts)


class AudioReader:
    """Reads the audio files of a batch in parallel threads.

    Threads are sufficient, because libsndfile and scipy release the GIL.

    Args:
        sampling_rate: Sampling rate of the samples, in Hz.
        min_length: Audio with fewer samples is skipped.
        max_length: Maximum number of samples.
        num_workers: Number of threads. With 0, the calling thread reads the files. Default: one
            thread per CPU, but at most 8.
        crop: Whether to crop audio with more than `max_length` samples instead of skipping it.
    """

    def __init__(
        self,
        sampling_rate: int,
        min_length: int,
        max_length: int,
        num_workers: int | None,
        crop: bool = True,
    ):
        self.sampling_rate, self.min_length, self.max_length, self.crop = (
            sampling_rate,
            min_length,
            max_length,
            crop,
        )
        num_workers = min(os.cpu_count() or 1, 8) if num_workers is None else num_workers
        self._pool = ThreadPoolExecutor(num_workers, "hfseq-audio") if num_workers else None

    def __call__(
        self, sources: Sequence[MediaSource], starts: Sequence[float]
    ) -> list[np.ndarray | str]:
        """Reads audio files.

        Args:
            sources: The audio files.
            starts: For each file, where to crop it if it is too long: from 0 (keep the start) to 1
                (keep the end).

        Returns:
            The samples of each file, or the reason why it is skipped.
        """
        each = self._pool.map if self._pool else map
        return list(each(self._read, sources, starts))

    def _read(self, source: MediaSource, start: float) -> np.ndarray | str:
        try:
            audio = AudioFile(source, self.sampling_rate)
            if audio.length < self.min_length:
                return (
                    f"it is {audio.seconds:.3g} seconds long, less than the minimum of "
                    f"{self.min_length / self.sampling_rate:.3g}"
                )
            if audio.length > self.max_length and not self.crop:
                return (
                    f"it is {audio.seconds:.3g} seconds long, more than the maximum of "
                    f"{self.max_length / self.sampling_rate:.3g}"
                )
            return audio.read(
                int(start * (max(audio.length - self.max_length, 0) + 1)), self.max_length
            )
        except UnreadableError as error:
            return str(error)
