"""Parallel text in directories that TensorFlow Datasets prepared.

TFRecord files are read without TensorFlow, other formats by ``tensorflow_datasets`` itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfseq import json_text
from hfseq.data import files as data_files
from hfseq.data.parallel.columns import Sides, choose_columns
from hfseq.data.parallel.store import Pair, Part
from hfseq.data.tfrecord import parse_example, read_records
from hfseq.errors import DataError, UsageError, nearest

PREFIX = "tfds:"
INFO = "dataset_info.json"
SPLITS = ("train", "validation", "test")
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_NAME = re.compile(
    r"tfds:(?P<path>[^:#]+|[a-z0-9]+://[^:#]+)(:(?P<version>[\w.]+))?(#(?P<split>.+))?$"
)


def origins(name: str, flag: str, arguments: Any) -> dict[str, tuple[list[Part], Sides]]:
    """Return how to read the splits of ``tfds:NAME/CONFIG[:VERSION]``.

    Raises:
        UsageError: the name cannot be understood.
        DataError: the directory is not there or unreadable, or has no split to train or test on.
    """
    dataset, split = _find(name, flag)
    splits = [found for found in SPLITS if found in dataset.splits]
    if split or not splits:
        return {"train": dataset.origin(split or "train", arguments)}
    return {found: dataset.origin(found, arguments) for found in splits}


def origin(name: str, flag: str, arguments: Any, split: str) -> tuple[list[Part], Sides]:
    """Return how to read one split: the one after ``#`` in ``name``, else ``split``."""
    dataset, asked = _find(name, flag)
    return dataset.origin(asked or split, arguments)


def _find(name: str, flag: str) -> tuple[_Prepared, str | None]:
    match = _NAME.match(name)
    if not match:
        raise UsageError(f"{flag}: write {PREFIX}NAME/CONFIG[:VERSION][#SPLIT]")
    root = os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets")
    path = match["path"].rstrip("/")
    places = [path, f"{root.rstrip('/')}/{path}"] if "/" in path else [f"{root}/{path}"]
    for place in places:
        if directory := _version(place, match["version"], flag):
            return _Prepared(directory, flag), match["split"]
    version = f" of version {match['version']}" if match["version"] else ""
    raise DataError(
        f"{flag}: no prepared dataset{version} at {places[-1]}. Prepare it where "
        f"tensorflow_datasets is installed (`tfds build {path} --data_dir {root}`), and set "
        "TFDS_DATA_DIR to its data_dir"
    )


def _version(place: str, version: str | None, flag: str) -> str | None:
    """Return the directory of the version asked for, or the newest one; None if there is none."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(place)
        if version:
            return f"{place}/{version}" if system.exists(f"{path}/{version}/{INFO}") else None
        if system.exists(f"{path}/{INFO}"):
            return place
        names = [entry.rstrip("/").split("/")[-1] for entry in system.ls(path, detail=False)]
    except FileNotFoundError:
        return None
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"{flag}: {place} cannot be read: {error}") from error
    versions = [name for name in names if re.fullmatch(r"\d+\.\d+\.\d+", name)]
    newest = max(versions, key=lambda name: [*map(int, name.split("."))], default=None)
    return newest and f"{place}/{newest}"


class _Prepared:
    """A prepared dataset: what ``dataset_info.json`` says of its files."""

    def __init__(self, directory: str, flag: str):
        self.directory, self.flag = directory, flag
        file = f"{directory}/{INFO}"
        try:
            self.info = json_text.parse("".join(data_files.read_lines(file, flag)))
            self.splits = {split["name"]: split for split in self.info["splits"]}
            if not all(isinstance(name, str) for name in self.splits):
                raise TypeError("a split's name is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise self._unclear() from error
        self.format = self.info.get("fileFormat", "tfrecord")

    def _unclear(self) -> DataError:
        return DataError(
            f"{self.flag}: {self.directory}/{INFO} is not the description of a dataset"
        )

    def origin(self, split: str, arguments: Any) -> tuple[list[Part], Sides]:
        """Return how to read a split, and its languages; the dataset's own source comes first."""
        if split not in self.splits:
            raise DataError(
                f"{self.flag}: {self.directory} has no split '{split}' but "
                f"{', '.join(self.splits) or 'none'}{nearest(split, self.splits)}; name one after #"
            )
        try:
            shards = self._shards(split)
            items = (self.info.get("supervisedKeys") or {}).get("tuple", {}).get("items", [])
            supervised = [item.get("featureKey") for item in items]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise self._unclear() from error
        first = next(shards[0].examples(), {}) if shards else {}
        names = [name for name in supervised if name in first]
        names += [name for name in first if name not in names]
        sides = choose_columns(names, arguments, f"{self.flag} ({split})")
        return [shard.part(sides) for shard in shards], sides

    def _shards(self, split: str) -> Sequence[_Records | _Foreign]:
        if self.format != "tfrecord":
            return [_Foreign(self.directory, split, self.format, self.flag)]
        entry = self.splits[split]
        lengths = [int(length) for length in entry.get("shardLengths", [])]
        template = entry.get("filepathTemplate") or TEMPLATE
        return [
            _Records(f"{self.directory}/{name}", self.flag, length)
            for name, length in zip(
                self._names(template, split, len(lengths)), lengths, strict=True
            )
        ]

    def _names(self, template: str, split: str, count: int) -> Iterator[str]:
        for shard in range(count):
            index, number = f"{shard:05d}", f"{count:05d}"
            values = {
                "DATASET": self.info["name"], "SPLIT": split, "FILEFORMAT": self.format,
                "SHARD_X_OF_Y": f"{index}-of-{number}", "SHARD_INDEX": index, "NUM_SHARDS": number,
            }  # fmt: skip
            name = _filled(template, values)
            if re.search(r"[/\\\0]|^\.*$", name):
                raise DataError(
                    f"{self.flag}: {self.directory}/{INFO} names the file {name!r:.80}: files "
                    "must lie beside it"
                )
            yield name


def _filled(template: str, values: dict[str, str]) -> str:
    """Fill in names; not with str.format, which reads attributes and pads to any width."""
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], template)


@dataclass(frozen=True)
class _Records:
    """A TFRecord file of so many examples."""

    file: str
    flag: str
    length: int

    def part(self, sides: Sides) -> Part:
        try:
            key = [*data_files.identity(self.file), sides.source, sides.target]
        except FileNotFoundError:
            raise DataError(
                f"{self.flag}: {self.file} is missing; prepare the dataset anew"
            ) from None
        return Part(f"{self.flag} {self.file}", key, partial(_pairs, self, sides), "record")

    def examples(self) -> Iterator[dict[str, str]]:
        """Yield the features of each example that hold one text."""
        number = 0
        for number, record in enumerate(read_records(self.file, self.flag), 1):
            try:
                yield parse_example(record)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.flag} {self.file}, record {number} is not UTF-8: {error.reason}"
                ) from error
            except (ValueError, IndexError) as error:
                raise DataError(
                    f"{self.flag} {self.file}, record {number} is no tf.train.Example"
                ) from error
        if number != self.length:
            raise DataError(
                f"{self.flag} {self.file} has {number} records where {INFO} says {self.length}; "
                "prepare the dataset anew"
            )


@dataclass(frozen=True)
class _Foreign:
    """A split in a format that ``tensorflow_datasets`` reads (array_record, riegeli, parquet)."""

    directory: str
    split: str
    format: str
    flag: str

    def part(self, sides: Sides) -> Part:
        info = data_files.identity(f"{self.directory}/{INFO}")
        key = [*info, self.split, sides.source, sides.target]
        name = f"{self.flag} {self.directory} ({self.split})"
        return Part(name, key, partial(_pairs, self, sides), "record")

    def examples(self) -> Iterator[dict[str, str]]:
        """Yield the features of each example that hold one text."""
        try:
            import tensorflow_datasets

            builder = tensorflow_datasets.builder_from_directory(self.directory)
            source = builder.as_data_source(split=self.split)
        except ImportError as error:
            raise DataError(
                f"{self.flag}: {self.directory} is stored as {self.format}, which "
                f'`pip install "hfseq[tfds]"` can read ({error}); TFRecord needs nothing'
            ) from error
        except NotImplementedError as error:
            raise DataError(
                f"{self.flag}: {self.directory} is stored as {self.format}, which cannot be read "
                "one by one; prepare it as tfrecord or array_record"
            ) from error
        for example in source:
            yield {name: v.decode() for name, v in example.items() if isinstance(v, bytes)}


def _pairs(records: _Records | _Foreign, sides: Sides) -> Iterator[Pair]:
    for number, example in enumerate(records.examples(), 1):
        yield number, example.get(sides.source), example.get(sides.target)
