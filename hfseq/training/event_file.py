"""TensorBoard event files and other logs that only ever grow, written record by record.

The format is written here rather than by tensorboardX: that imports PyTorch wherever it is
installed, and its writer thread dies on a full disk, after which its queue blocks training.

Sources: tensorboard/compat/proto/{event,summary,tensor}.proto, and
tensorboard/plugins/hparams/plugin_data.proto; the TFRecord format,
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
#: How a run ended, on the HParams tab.
SUCCESS, FAILURE = 1, 2


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Values in bins: ``counts`` between ``edges`` (one more), and sums over the finite values."""

    low: float
    high: float
    count: float
    total: float
    sum_squares: float
    edges: Sequence[float]
    counts: Sequence[float]


class AppendOnlyFile:
    """A file that grows by whole records: one write each, undone if the disk fills up half-way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: bytes) -> None:
        """Append one record; OSError if it does not fit, with the file as it was before."""
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
        """Close the file; closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Replace a file as a whole; what was there stays if that fails."""
    with atomic_replace(path) as temporary, temporary.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def remove_events(path: Path, step: int, tags: Iterable[str]) -> None:
    """Take the events of a step with one of these tags out of an event file of this module."""
    data, at = path.read_bytes(), 0
    kept: list[bytes] = []
    start, names = _integer(2, step) + b"\x2a", [_text(1, tag) for tag in tags]
    while at + 8 <= len(data):
        size = struct.unpack_from("<Q", data, at)[0] + 16  # with its length and two checksums
        record = data[at : at + size]
        # An event has its time in nine bytes, then its step, then its summary.
        of_step = record[12 + 9 :].startswith(start)
        if not (of_step and any(name in record for name in names)):
            kept.append(record)
        at += size
    if sum(map(len, kept)) < len(data):
        replace_file(path, kept)


class EventFile:
    """One ``events.out.tfevents.*`` file in ``directory``, as TensorBoard and the Hub read it."""

    def __init__(self, directory: Path, host: str) -> None:
        self._file = AppendOnlyFile(
            directory / f"events.out.tfevents.{time.time_ns() // 1000}.{host}.{os.getpid()}"
        )
        try:
            self._event(_text(3, "brain.Event:2"))
        except OSError:  # it will be tried again, with another file
            self._file.close()
            self._file.path.unlink(missing_ok=True)
            raise

    def start_session(self, step: int) -> None:
        """Make readers forget what earlier files of this directory say from ``step`` on."""
        self._event(_message(7, _integer(1, SESSION_START)), step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Write one point of each curve."""
        points = b""
        for tag, value in values.items():
            try:
                packed = struct.pack("<f", value)
            except OverflowError:  # beyond float32
                packed = struct.pack("<f", math.inf if value > 0 else -math.inf)
            points += _message(1, _text(1, tag) + _varint(2 << 3 | 5) + packed)
        self._event(_message(5, points), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Write a text, rendered as Markdown on the Text tab."""
        shape = _message(2, _integer(1, 1))
        tensor = _integer(1, DT_STRING) + _message(2, shape) + _text(8, text)
        metadata = _message(1, _text(1, "text"))
        value = _text(1, f"{tag}/text_summary") + _message(8, tensor) + _message(9, metadata)
        self._event(_message(5, _message(1, value)), step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Write a histogram for each tag, one event each: thousands of them are many bytes."""
        for tag, found in values.items():
            content = b"".join(
                _double(field, number)
                for field, number in enumerate(
                    (found.low, found.high, found.count, found.total, found.sum_squares), 1
                )
            )
            content += _doubles(6, found.edges[1:]) + _doubles(7, found.counts)
            value = _text(1, tag) + _message(5, content)
            self._event(_message(5, _message(1, value)), step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Write what the run was asked for, which the HParams tab compares with other runs'."""
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
        """Write how the run ended."""
        self._hparams("session_end_info", 4, _integer(1, status) + _double(2, time.time()))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _hparams(self, tag: str, field: int, content: bytes) -> None:
        plugin = _text(1, "hparams") + _message(2, _message(field, content))
        nothing = _integer(1, DT_FLOAT) + _message(2, _message(2, b""))
        value = _text(1, f"_hparams_/{tag}") + _message(8, nothing)
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
    """The masked CRC-32C of the TFRecord format."""
    return struct.pack("<I", masked_crc32c(data))
