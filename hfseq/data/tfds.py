"""Reads parallel text from directories that TensorFlow Datasets (TFDS) prepared.

TFRecord files are read without TensorFlow. Other formats are read with `tensorflow_datasets`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hfseq import errors
from hfseq.data import files
from hfseq.data.arguments import SPLITS, TranslationArguments
from hfseq.data.tables import Origin, Pair, PairColumns, PairSource, choose_columns
from hfseq.errors import DataError, UsageError, did_you_mean, import_problem


def read_tfrecords(file: str, flag: str) -> Iterator[bytes]:
    """Yields the records of a TFRecord file. Raises a `DataError` if it is damaged."""
    number = 0
    try:
        with files.open_binary(file) as stream:
            while header := stream.read(12):
                number += 1
                checksum = struct.pack("<I", masked_crc32c(header[:8]))
                if len(header) < 12 or header[8:] != checksum:
                    raise DataError(f"{flag} {file} is damaged: invalid header of record {number}")
                (length,) = struct.unpack("<Q", header[:8])
                record = stream.read(length + 4)
                if len(record) < length + 4:
                    raise DataError(f"{flag} {file} is truncated in record {number}: copy it again")
                yield record[:length]
    except (ImportError, OSError) as error:
        raise DataError(f"{flag} {file} cannot be read: {error}") from error


_TABLE = list(range(256))
for _ in range(8):
    # Reflected Castagnoli polynomial.
    _TABLE = [(x >> 1) ^ (0x82F63B78 if x & 1 else 0) for x in _TABLE]


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C checksum, masked as in TFRecord files (rotated, plus a constant)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(record: bytes) -> dict[str, str]:
    """Decodes a `tf.train.Example`. Returns the features that contain one byte string, as text."""
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
    """Returns the length-delimited fields of a protocol buffer message.

    Args:
        data: The data that contains the message.
        at: Start of the message.
        end: End of the message.

    Returns:
        The number, start and end of each field.
    """
    fields = []
    while at < end:
        tag, at = _varint(data, at)
        if tag & 7 != 2:
            if tag & 7 == 0:
                at = _varint(data, at)[1]
            elif tag & 7 in (1, 5):
                at += 8 if tag & 7 == 1 else 4
            else:
                raise ValueError(f"unknown field type {tag & 7}")
            continue
        length, at = _varint(data, at)
        if at + length > end:
            raise ValueError("a field is longer than its message")
        fields.append((tag >> 3, at, at + length))
        at += length
    return fields


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


TFDS_PREFIX = "tfds:"
INFO_FILE = "dataset_info.json"
FILE_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_NAME = re.compile(
    r"tfds:(?P<path>[^:#]+|[a-z0-9]+://[^:#]+)(:(?P<version>[\w.]+))?(#(?P<split>.+))?$"
)


def split_origins(name: str, flag: str, arguments: TranslationArguments) -> dict[str, Origin]:
    """Returns the `Origin` of each split of `tfds:NAME/CONFIG[:VERSION][#SPLIT]`.

    With `#SPLIT`, that split is used for training and other splits are ignored.
    """
    dataset, split = _find(name, flag)
    splits = [name for name in SPLITS if name in dataset.splits]
    if split or not splits:
        return {"train": dataset.origin(split or "train", arguments)}
    return {name: dataset.origin(name, arguments) for name in splits}


def split_origin(name: str, flag: str, arguments: TranslationArguments, split: str) -> Origin:
    """Returns the `Origin` of the split after `#` in `name`, or of `split` if there is none."""
    dataset, requested_split = _find(name, flag)
    return dataset.origin(requested_split or split, arguments)


def _find(name: str, flag: str) -> tuple[_PreparedDataset, str | None]:
    match = _NAME.match(name)
    if not match:
        raise UsageError(
            f"{flag}: '{name}' does not have the form {TFDS_PREFIX}NAME/CONFIG[:VERSION][#SPLIT]"
        )
    root = os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
    path = match["path"].rstrip("/")
    directories = [path, f"{root.rstrip('/')}/{path}"] if "/" in path else [f"{root}/{path}"]
    for candidate in directories:
        if directory := _version(candidate, match["version"], flag):
            return _PreparedDataset(directory, flag), match["split"]
    version = f" of version {match['version']}" if match["version"] else ""
    raise DataError(
        f"{flag}: no prepared dataset{version} at {directories[-1]}. Prepare it on a machine with "
        f"tensorflow_datasets (`tfds build {path} --data_dir {root}`), and set TFDS_DATA_DIR to "
        "its data_dir"
    )


def _version(path_or_url: str, version: str | None, flag: str) -> str | None:
    """Returns the directory of the requested or newest version, or `None` if there is none."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(path_or_url)
        if version:
            return (
                f"{path_or_url}/{version}"
                if system.exists(f"{path}/{version}/{INFO_FILE}")
                else None
            )
        if system.exists(f"{path}/{INFO_FILE}"):
            return path_or_url
        names = [entry.rstrip("/").split("/")[-1] for entry in system.ls(path, detail=False)]
    except FileNotFoundError:
        return None
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"{flag}: {path_or_url} cannot be read: {error}") from error
    versions = [name for name in names if re.fullmatch(r"\d+\.\d+\.\d+", name)]
    newest = max(versions, key=lambda name: [*map(int, name.split("."))], default=None)
    return newest and f"{path_or_url}/{newest}"


class _PreparedDataset:
    """A prepared dataset, as described by its `dataset_info.json`."""

    def __init__(self, directory: str, flag: str):
        self.directory, self.flag = directory, flag
        file = f"{directory}/{INFO_FILE}"
        try:
            self.info = errors.parse_json("".join(files.read_lines(file, flag)))
            self.splits = {split["name"]: split for split in self.info["splits"]}
            if not all(isinstance(name, str) for name in self.splits):
                raise TypeError("a split name is not a string")
        except (ValueError, KeyError, TypeError) as error:
            raise self._invalid_description() from error
        self.format = self.info.get("fileFormat", "tfrecord")

    def _invalid_description(self) -> DataError:
        return DataError(
            f"{self.flag}: {self.directory}/{INFO_FILE} is not a valid dataset description"
        )

    def origin(self, split: str, arguments: TranslationArguments) -> Origin:
        """Returns the `Origin` of a split.

        If no language or common name identifies the columns, the supervised keys of the dataset are
        preferred to its other features.

        Raises:
            DataError: The split does not exist, or the description is not valid.
        """
        if split not in self.splits:
            raise DataError(
                f"{self.flag}: {self.directory} has no split '{split}', only "
                f"{', '.join(self.splits) or 'none'}{did_you_mean(split, self.splits)}; specify "
                "one after #"
            )
        try:
            shards = self._shards(split)
            items = (self.info.get("supervisedKeys") or {}).get("tuple", {}).get("items", [])
            supervised = [item.get("featureKey") for item in items]
        except DataError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._invalid_description() from error
        first = next(shards[0].examples(), {}) if shards else {}
        names = [name for name in supervised if name in first]
        names += [name for name in first if name not in names]
        sides = choose_columns(names, arguments, f"{self.flag} ({split})")
        return [shard.part(sides) for shard in shards], sides

    def _shards(self, split: str) -> Sequence[_RecordFile | _OtherFormat]:
        if self.format != "tfrecord":
            return [_OtherFormat(self.directory, split, self.format, self.flag)]
        entry = self.splits[split]
        lengths = [int(length) for length in entry.get("shardLengths", [])]
        count, shards = f"{len(lengths):05d}", []
        for shard, length in enumerate(lengths):
            index = f"{shard:05d}"
            values = {
                "DATASET": self.info["name"],
                "SPLIT": split,
                "FILEFORMAT": self.format,
                "SHARD_X_OF_Y": f"{index}-of-{count}",
                "SHARD_INDEX": index,
                "NUM_SHARDS": count,
            }
            # str.format is not safe here: it evaluates attributes and pads to any width.
            template = entry.get("filepathTemplate") or FILE_TEMPLATE
            name = re.sub(r"\{(\w+)\}", lambda match, values=values: values[match[1]], template)
            if re.search(r"[/\\\0]|^\.*$", name):
                raise DataError(
                    f"{self.flag}: {self.directory}/{INFO_FILE} refers to the file "
                    f"{name!r:.80}, which must be in the same directory"
                )
            shards.append(_RecordFile(f"{self.directory}/{name}", self.flag, length))
        return shards


@dataclass(frozen=True)
class _RecordFile:
    """A TFRecord file with `length` examples."""

    file: str
    flag: str
    length: int

    def part(self, sides: PairColumns) -> PairSource:
        try:
            key = [*files.file_identity(self.file), sides.source, sides.target]
        except FileNotFoundError:
            raise DataError(
                f"{self.flag}: {self.file} is missing; prepare the dataset again"
            ) from None
        return PairSource(f"{self.flag} {self.file}", key, partial(_pairs, self, sides), "record")

    def examples(self) -> Iterator[dict[str, str]]:
        """Yields the text features of each example."""
        number = 0
        for number, record in enumerate(read_tfrecords(self.file, self.flag), 1):
            try:
                yield parse_example(record)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.flag} {self.file}, record {number} is not UTF-8: {error.reason}"
                ) from error
            except (ValueError, IndexError) as error:
                raise DataError(
                    f"{self.flag} {self.file}, record {number} is not a valid tf.train.Example"
                ) from error
        if number != self.length:
            raise DataError(
                f"{self.flag} {self.file} has {number} records, but {INFO_FILE} specifies "
                f"{self.length}; prepare the dataset again"
            )


@dataclass(frozen=True)
class _OtherFormat:
    """A split in a format that `tensorflow_datasets` reads (array_record, riegeli, parquet)."""

    directory: str
    split: str
    format: str
    flag: str

    def part(self, sides: PairColumns) -> PairSource:
        info = files.file_identity(f"{self.directory}/{INFO_FILE}")
        key = [*info, self.split, sides.source, sides.target]
        name = f"{self.flag} {self.directory} ({self.split})"
        return PairSource(name, key, partial(_pairs, self, sides), "record")

    def examples(self) -> Iterator[dict[str, str]]:
        """Yields the text features of each example."""
        try:
            import tensorflow_datasets

            builder = tensorflow_datasets.builder_from_directory(self.directory)
            source = builder.as_data_source(split=self.split)
        except ImportError as error:
            problem = import_problem(error, "tensorflow_datasets", "hfseq[tfds]")
            raise DataError(
                f"{self.flag}: {self.directory} is stored as {self.format}, which {problem}. "
                "Datasets in the tfrecord format do not require this package"
            ) from error
        except NotImplementedError as error:
            raise DataError(
                f"{self.flag}: {self.directory} is stored as {self.format}, which does not "
                "support reading single examples; prepare it as tfrecord or array_record"
            ) from error
        for example in source:
            yield {name: v.decode() for name, v in example.items() if isinstance(v, bytes)}


def _pairs(records: _RecordFile | _OtherFormat, sides: PairColumns) -> Iterator[Pair]:
    for number, example in enumerate(records.examples(), 1):
        yield number, example.get(sides.source), example.get(sides.target)
