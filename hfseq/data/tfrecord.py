"""TFRecord files of ``tf.train.Example``, read without TensorFlow.

A record is its length, a checksum of that, the bytes, and a checksum of those; the bytes are an
``Example``, a protocol buffer of features by name. The checksum of the length is verified, which
finds files that are cut or damaged in their structure; that of the bytes is not, since in Python it
would take longer than all the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from hfseq.data.files import open_binary
from hfseq.errors import DataError


def read_records(file: str, flag: str) -> Iterator[bytes]:
    """Yield the records of a TFRecord file.

    Raises:
        DataError: the file is missing, cut short or damaged.
    """
    number = 0
    try:
        with open_binary(file) as stream:
            while header := stream.read(12):
                number += 1
                known = struct.pack("<I", masked_crc32c(header[:8]))
                if len(header) < 12 or header[8:] != known:
                    raise DataError(f"{flag} {file} is damaged at record {number}: wrong header")
                (length,) = struct.unpack("<Q", header[:8])
                record = stream.read(length + 4)
                if len(record) < length + 4:
                    raise DataError(f"{flag} {file} ends within record {number}: copy it anew")
                yield record[:length]
    except (ImportError, OSError) as error:
        raise DataError(f"{flag} {file} cannot be read: {error}") from error


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli, reflected
        table.append(value)
    return table


_TABLE = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C, rotated and offset as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(record: bytes) -> dict[str, str]:
    """Return the features of a ``tf.train.Example`` that are one byte string, as text.

    Raises:
        ValueError: the bytes are no such message, or a text is not UTF-8.
    """
    texts: dict[str, str] = {}
    for _, start, end in _fields(record, 0, len(record)):  # Example.features
        for _, begin, stop in _fields(record, start, end):  # Features.feature, a map
            name, feature = "", (0, 0)
            for number, at, to in _fields(record, begin, stop):
                if number == 1:
                    name = record[at:to].decode()
                else:
                    feature = (at, to)
            for number, at, to in _fields(record, *feature):
                values = _fields(record, at, to) if number == 1 else []  # Feature.bytes_list
                if len(values) == 1:
                    texts[name] = record[values[0][1] : values[0][2]].decode()
    return texts


def _fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Return number, begin and end of the length-delimited fields of a message."""
    found = []
    while at < end:
        tag, at = _varint(data, at)
        if tag & 7 != 2:
            at = _skip(data, at, tag & 7)
            continue
        length, at = _varint(data, at)
        if at + length > end:
            raise ValueError("a field is longer than its message")
        found.append((tag >> 3, at, at + length))
        at += length
    return found


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind == 0:
        return _varint(data, at)[1]
    if kind in (1, 5):
        return at + (8 if kind == 1 else 4)
    raise ValueError(f"a field of the unknown kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:  # nearly always
        return value, at + 1
    value, shift = value & 0x7F, 7
    while True:
        at += 1
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
        shift += 7
