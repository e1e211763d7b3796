"""TensorBoard event files, and other append-only logs.

hfseq implements the format itself instead of using tensorboardX, for two reasons. tensorboardX
imports PyTorch if it is installed. In addition, its writer thread ends when the disk is full, and
training then blocks as soon as the queue of this thread is full.

Sources: tensorboard/compat/proto/{event,summary,tensor}.proto,
tensorboard/plugins/hparams/plugin_data.proto, and the TFRecord format,
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hfseq.data.tfds import masked_crc32c
from hfseq.errors import atomic_replace

DT_FLOAT, DT_STRING = 1, 7
SESSION_START = 1
#: Status of a run in the HParams tab.
SUCCESS, FAILURE = 1, 2


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram of the finite values of an array.

    Attributes:
        low: The smallest value.
        high: The largest value.
        count: The number of values.
        total: The sum of the values.
        sum_squares: The sum of the squared values.
        edges: The edges of the bins, one more than `counts`.
        counts: The number of values in each bin.
    """

    low: float
    high: float
    count: float
    total: float
    sum_squares: float
    edges: Sequence[float]
    counts: Sequence[float]


class AppendOnlyFile:
    """A file to which only complete records are appended.

    Each record is written with a single system call. If the disk becomes full, a partially written
    record is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: bytes) -> None:
        """Appends a record.

        Raises:
            OSError: The record does not fit. The file is unchanged.
        """
        if self._descriptor is None:
            raise OSError(f"{self.path} is closed")
        size = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Closes the file. This method can be called several times."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Replaces the content of a file atomically. If this fails, the file keeps its old content."""
    with atomic_replace(path) as temporary, temporary.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def remove_events(path: Path, step: int, tags: Iterable[str]) -> None:
    """Removes the events of a step from an event file that was written by this module.

    Args:
        path: The event file.
        step: The step.
        tags: Tags of the events to remove.
    """
    data, offset = path.read_bytes(), 0
    remaining: list[bytes] = []
    start, names = _integer(2, step) + b"\x2a", [_text(1, tag) for tag in tags]
    while offset + 8 <= len(data):
        size = struct.unpack_from("<Q", data, offset)[0] + 16  # plus its length and two checksums
        record = data[offset : offset + size]
        # An event consists of the time in nine bytes, the step, and the summary.
        is_of_step = record[12 + 9 :].startswith(start)
        if not (is_of_step and any(name in record for name in names)):
            remaining.append(record)
        offset += size
    if sum(map(len, remaining)) < len(data):
        replace_file(path, remaining)


class EventFile:
    """An `events.out.tfevents.*` file in `directory`, as read by TensorBoard and the Hub."""

    def __init__(self, directory: Path, host: str) -> None:
        self._file = AppendOnlyFile(
            directory / f"events.out.tfevents.{time.time_ns() // 1000}.{host}.{os.getpid()}"
        )
        try:
            self._event(_text(3, "brain.Event:2"))
        except OSError:  # the caller retries with another file
            self._file.close()
            self._file.path.unlink(missing_ok=True)
            raise

    def start_session(self, step: int) -> None:
        """Tells readers to ignore the events of earlier files in this directory from `step` on."""
        self._event(_message(7, _integer(1, SESSION_START)), step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Writes one point for each scalar curve."""
        points = b""
        for tag, value in values.items():
            try:
                packed = struct.pack("<f", value)
            except OverflowError:  # outside of the range of float32
                packed = struct.pack("<f", math.inf if value > 0 else -math.inf)
            points += _message(1, _text(1, tag) + _varint(2 << 3 | 5) + packed)
        self._event(_message(5, points), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Writes a text, which TensorBoard renders as Markdown."""
        shape = _message(2, _integer(1, 1))
        tensor = _integer(1, DT_STRING) + _message(2, shape) + _text(8, text)
        metadata = _message(1, _text(1, "text"))
        value = _text(1, f"{tag}/text_summary") + _message(8, tensor) + _message(9, metadata)
        self._event(_message(5, _message(1, value)), step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Writes a histogram for each tag, as separate events to limit the size of an event."""
        for tag, histogram in values.items():
            content = b"".join(
                _double(field, number)
                for field, number in enumerate(
                    (
                        histogram.low,
                        histogram.high,
                        histogram.count,
                        histogram.total,
                        histogram.sum_squares,
                    ),
                    1,
                )
            )
            content += _doubles(6, histogram.edges[1:]) + _doubles(7, histogram.counts)
            value = _text(1, tag) + _message(5, content)
            self._event(_message(5, _message(1, value)), step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Writes the hyperparameters of the run for the HParams tab."""
        entries = b""
        for name, value in values.items():
            if isinstance(value, bool):
                stored = _integer(4, value)
            elif isinstance(value, int | float):
                stored = _double(2, value)
            else:
                stored = _text(
                    3, value if isinstance(value, str) else json.dumps(value, default=str)
                )
            entries += _message(1, _text(1, name) + _message(2, stored))
        self._hparams("session_start_info", 3, entries + _double(5, time.time()))

    def end_session(self, status: int) -> None:
        """Writes how the run ended: `SUCCESS` or `FAILURE`."""
        self._hparams("session_end_info", 4, _integer(1, status) + _double(2, time.time()))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _hparams(self, tag: str, field: int, content: bytes) -> None:
        plugin = _text(1, "hparams") + _message(2, _message(field, content))
        empty_tensor = _integer(1, DT_FLOAT) + _message(2, _message(2, b""))
        value = _text(1, f"_hparams_/{tag}") + _message(8, empty_tensor)
        value += _message(9, _message(1, plugin))
        self._event(_message(5, _message(1, value)))

    def _event(self, content: bytes, step: int = 0) -> None:
        data = struct.pack("<Bd", 1 << 3 | 1, time.time()) + _integer(2, step) + content
        length = struct.pack("<Q", len(data))
        self._file.append(length + _checksum(length) + data + _checksum(data))


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _doubles(field: int, values: Sequence[float]) -> bytes:
    return _message(field, struct.pack(f"<{len(values)}d", *values))


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode(errors="replace"))


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _checksum(data: bytes) -> bytes:
    """Returns the masked CRC-32C of the TFRecord format."""
    return struct.pack("<I", masked_crc32c(data))
