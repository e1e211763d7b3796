"""Pairs on disk: cleaned, divided by the hash of the source sentence, memory-mapped afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from hfseq import json_text
from hfseq.data.store import write_once
from hfseq.errors import DataError

VERSION = 1
REPORT = "report.json"
BATCH = 10_000  # pairs a record batch
SHOWN = 5  # dropped pairs that are named
_BREAKS = re.compile(r"\s*[\r\n]+\s*")

#: Line number, source, target; None where a side is missing.
Pair = tuple[int, str | None, str | None]


@dataclass(frozen=True)
class Part:
    """Pairs of one origin: what messages call it, what identifies its content, how it is read."""

    name: str
    key: Any
    read: Callable[[], Iterator[Pair]]
    unit: str = "line"


@dataclass(frozen=True)
class Shares:
    """Thousandths of the sources that test and that validate, and the split of the rest."""

    test: int = 0
    validation: int = 0
    rest: str = "train"

    def split_of(self, source: str) -> tuple[str, int]:
        """Return the split of all translations of a sentence, and its place among a thousand."""
        if not self.test + self.validation:
            return self.rest, 0
        place = int(sha256(source.encode()).hexdigest()[:8], 16) % 1000
        if place < self.test:
            return "test", place
        return ("validation" if place < self.test + self.validation else self.rest), place


@dataclass(frozen=True)
class PairFiles:
    """What ``store_pairs`` wrote: a directory and its report."""

    directory: Path
    report: dict[str, Any]

    def dataset(self, split: str) -> Any:
        """Return a split as a memory-mapped ``datasets.Dataset``, or None where it is empty.

        Its fingerprint is a hash of its content, so that a token cache is found again wherever the
        files lie.
        """
        if not self.report["pairs"].get(split):
            return None
        from datasets import Dataset
        from datasets.table import MemoryMappedTable

        table = MemoryMappedTable.from_file(str(self.directory / f"{split}.arrow"))
        return Dataset(table, fingerprint=self.report["fingerprints"][split])


def store_pairs(
    parts: list[Part], shares: Shares, cache_dir: Path, overwrite: bool = False
) -> PairFiles:
    """Read ``parts`` once, clean them, divide them by ``shares``, and keep them in ``cache_dir``.

    A side is stripped, line breaks within it become spaces; a pair with an empty side is dropped
    and counted. Nothing grows with the number of pairs but the files.

    Raises:
        DataError: a part cannot be read, no pair is left, or the cache cannot be written.
    """
    content = [VERSION, *astuple(shares), [part.key for part in parts]]
    key = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def write(directory: Path) -> None:
        writer = _Writer(directory, shares)
        for part in parts:
            writer.add(part)
        (directory / REPORT).write_text(json.dumps(writer.close(), indent=2))

    return write_once(Path(cache_dir) / f"pairs-{key}", _open, write, overwrite)


def _open(directory: Path) -> PairFiles:
    try:
        report = json_text.parse((directory / REPORT).read_bytes())
        if not all(isinstance(report[name], dict) for name in ("pairs", "fingerprints")):
            raise ValueError("its report counts nothing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{directory} holds no pairs: {error}") from error
    return PairFiles(directory, report)


def clean(text: str | None) -> str:
    """Strip a side and put it on one line; a missing one is empty."""
    text = text.strip() if text else ""
    return _BREAKS.sub(" ", text) if "\n" in text or "\r" in text else text


class _Writer:
    """Writes the splits side by side, and counts."""

    def __init__(self, directory: Path, shares: Shares):
        self.directory, self.shares = directory, shares
        self.splits: dict[str, _SplitFile] = {}
        self.dropped, self.lowest = 0, 1000
        self.shown: list[str] = []

    def add(self, part: Part) -> None:
        split_of, line = self.shares.split_of, 0
        try:
            for line, raw_source, raw_target in part.read():
                source, target = clean(raw_source), clean(raw_target)
                if source and target:
                    split, place = split_of(source)
                    if place < self.lowest and split == self.shares.rest:
                        self.lowest = place
                    self._split(split).add(source, target)
                else:
                    self._drop(part, line, source, target)
        except UnicodeDecodeError as error:  # parquet takes any bytes for text
            raise DataError(
                f"{part.name} is not UTF-8 after {part.unit} {line}: {error.reason}"
            ) from error

    def _split(self, name: str) -> _SplitFile:
        if name not in self.splits:
            self.splits[name] = _SplitFile(self.directory / f"{name}.arrow")
        return self.splits[name]

    def _drop(self, part: Part, line: int, source: str, target: str) -> None:
        self.dropped += 1
        if len(self.shown) < SHOWN:
            sides = "target" if source else "source" if target else "source and target"
            self.shown.append(f"{part.name}, {part.unit} {line}: empty {sides}")

    def close(self) -> dict[str, Any]:
        fingerprints = {name: split.close() for name, split in self.splits.items()}
        pairs = {name: split.count for name, split in self.splits.items()}
        report = {"pairs": pairs, "fingerprints": fingerprints, "lowest": self.lowest}
        report["dropped"] = self.dropped
        return report | ({"first_dropped": self.shown} if self.shown else {})


class _SplitFile:
    """An Arrow stream of the columns "source" and "target"."""

    def __init__(self, path: Path):
        import pyarrow

        self.schema = pyarrow.schema([("source", pyarrow.string()), ("target", pyarrow.string())])
        self.writer = pyarrow.ipc.new_stream(str(path), self.schema)
        self.sources: list[str] = []
        self.targets: list[str] = []
        self.count, self.hash = 0, blake2b(digest_size=8)

    def add(self, source: str, target: str) -> None:
        self.sources.append(source)
        self.targets.append(target)
        self.count += 1
        if len(self.sources) == BATCH:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if self.sources:
            columns = [pyarrow.array(texts, "string") for texts in (self.sources, self.targets)]
            batch = pyarrow.record_batch(columns, schema=self.schema)
            self.writer.write_batch(batch)
            self.hash.update("\n".join([*self.sources, *self.targets, ""]).encode())
            self.sources, self.targets = [], []

    def close(self) -> str:
        self._flush()
        self.writer.close()
        return self.hash.hexdigest()
