"""Tables of pairs: CSV, TSV, JSON lines and parquet files with both sides in columns."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hfseq import json_text
from hfseq.data import files as data_files
from hfseq.data import parquet_files
from hfseq.data.parallel.columns import Sides, choose_columns, is_header
from hfseq.data.parallel.store import BATCH, Pair, Part
from hfseq.errors import DataError

logger = logging.getLogger(__name__)
EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def table_part(file: str, flag: str, arguments: Any) -> tuple[Part, Sides]:
    """Return how to read the pairs of a table, and which columns they are in.

    Raises:
        DataError: the file is empty, binary or unreadable, or lacks the columns.
    """
    extension = data_files.extension_of(file)
    data_files.check_heads([file], data_files.BUILDERS[extension], flag)
    table = _READERS[extension](file, flag, arguments)
    columns = [table.sides.source, table.sides.target]
    key = [data_files.identity(file), columns, getattr(table, "header", True)]
    return Part(f"{flag} {file}", key, table.pairs, table.unit), table.sides


class _Delimited:
    """CSV (with quotes) or TSV (without: a quotation mark is text there)."""

    unit = "line"

    def __init__(self, file: str, flag: str, arguments: Any):
        self.file, self.flag = file, flag
        self.tabs = data_files.extension_of(file) == ".tsv"
        _, first = next(self._rows(), (1, []))
        if len(first) < 2:
            separator = "a tab" if self.tabs else "a comma"
            raise DataError(
                f"{flag} {file}, line 1 has one cell: separate source and target with {separator}"
            )
        self.header = is_header(first, arguments)
        self.names = [cell.strip() for cell in first] if self.header else ["0", "1"]
        if self.header:
            self.sides = choose_columns(self.names, arguments, f"{flag} {file}")
        else:
            logger.warning(
                "%s %s has no header (%s names no language): the first column is the source, the "
                "second the target, and line 1 is a pair. Name the columns with --source_column "
                "and --target_column if it has one",
                *(flag, file, " | ".join(cell[:40] for cell in first[:2])),
            )
            self.sides = Sides("0", "1", arguments.source_lang, arguments.target_lang)
        self.width = len(first)

    def pairs(self) -> Iterator[Pair]:
        rows, width = self._rows(), self.width
        if self.header:
            next(rows)
        source, target = self.names.index(self.sides.source), self.names.index(self.sides.target)
        last = max(source, target)
        for line, row in rows:
            if len(row) == width:
                yield line, row[source], row[target]
            elif len(row) > width:
                remedy = "remove the tab" if self.tabs else "quote cells that hold a comma"
                raise DataError(
                    f"{self.flag} {self.file}, line {line} has {len(row)} cells where the first "
                    f"line has {width}: {remedy}"
                )
            elif any(row):
                row += [""] * (last + 1 - len(row))
                yield line, row[source], row[target]

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (line the row begins in, cells)."""
        lines = data_files.read_lines(self.file, self.flag)
        if self.tabs:
            for number, line in enumerate(lines, 1):
                yield number, line.rstrip("\r\n").split("\t")
            return
        reader, number = csv.reader(lines, strict=True), 1
        try:
            for row in reader:
                if row:
                    yield number, row
                number = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{self.flag} {self.file}, line {number} is not valid CSV: {error}; a quotation "
                'mark within a cell is doubled (""), and the cell is quoted'
            ) from error


class _Json:
    """JSON lines, or one array of objects: columns, or a "translation" by language."""

    unit = "line"

    def __init__(self, file: str, flag: str, arguments: Any):
        self.file, self.flag = file, flag
        first = next((line for line in data_files.read_lines(file, flag) if line.strip()), "")
        if first.lstrip().startswith("["):
            self.unit = "item"
        _, record = next(self._records(), (0, {}))
        self.nested = isinstance(record.get("translation"), dict)
        record = record["translation"] if self.nested else record
        texts = [name for name, value in record.items() if isinstance(value, str | None)]
        self.sides = choose_columns(texts, arguments, f"{flag} {file}")

    def pairs(self) -> Iterator[Pair]:
        source, target = self.sides.source, self.sides.target
        for number, record in self._records():
            if self.nested:
                record = record.get("translation") or {}
                if not isinstance(record, dict):
                    raise DataError(f"{self._where(number)}: 'translation' is not an object")
            yield number, self._text(record, source, number), self._text(record, target, number)

    def _text(self, record: dict, name: str, number: int) -> str | None:
        text = record.get(name)
        if not isinstance(text, str | None):
            raise DataError(f"{self._where(number)}: '{name}' is no text but {text!r:.50}")
        try:
            text and text.encode()
        except UnicodeEncodeError as error:  # JSON can spell one half of a surrogate pair
            raise DataError(
                f"{self._where(number)}: '{name}' is not valid Unicode ({error.reason}); remove "
                "the lone \\ud800 … \\udfff escape"
            ) from error
        return text

    def _where(self, number: int) -> str:
        return f"{self.flag} {self.file}, {self.unit} {number}"

    def _records(self) -> Iterator[tuple[int, dict]]:
        lines = data_files.read_lines(self.file, self.flag)
        for number, record in self._items(lines) if self.unit == "item" else self._lines(lines):
            if not isinstance(record, dict):
                raise DataError(f"{self._where(number)} is not a JSON object with named columns")
            yield number, record

    def _items(self, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
        try:
            yield from enumerate(json_text.parse("".join(lines)), 1)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.flag} {self.file} is not valid JSON: {error}") from error

    def _lines(self, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                try:
                    yield number, json_text.parse(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{self._where(number)} is not valid JSON: {error.msg}"
                    ) from error


class _Parquet:
    """Parquet: two columns of strings, or a struct "translation" with one for each language."""

    unit = "row"

    def __init__(self, file: str, flag: str, arguments: Any):
        import pyarrow

        self.file, self.flag = file, flag
        parquet_files.check(file, flag)
        with self._open() as parquet:
            fields = {field.name: field.type for field in parquet.schema_arrow}
        inner = fields.get("translation")
        self.nested = inner is not None and pyarrow.types.is_struct(inner)
        if inner is not None and self.nested:
            fields = {field.name: field.type for field in inner}
        texts = [name for name, kind in fields.items() if "string" in str(kind)]
        self.sides = choose_columns(texts, arguments, f"{flag} {file}")

    @contextmanager
    def _open(self) -> Iterator[Any]:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with data_files.open_binary(self.file) as stream:
                yield ParquetFile(stream)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.flag} {self.file} is not valid parquet: {error}") from error

    def pairs(self) -> Iterator[Pair]:
        columns = ["translation"] if self.nested else [self.sides.source, self.sides.target]
        with self._open() as parquet:
            number = 1
            for batch in parquet.iter_batches(BATCH, columns=columns):
                yield from arrow_pairs(batch, self.sides, self.nested, number)
                number += len(batch)


def arrow_pairs(batch: Any, sides: Sides, nested: bool, first: int) -> Iterator[Pair]:
    """Yield the pairs of an Arrow table or record batch, numbered from ``first`` on."""
    import pyarrow.compute

    def texts(name: str) -> list[str | None]:
        if nested:
            return pyarrow.compute.struct_field(batch["translation"], name).to_pylist()
        return batch[name].to_pylist()

    sources, targets = texts(sides.source), texts(sides.target)
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), first):
        yield number, source, target


_READERS: dict[str, Callable[[str, str, Any], Any]] = {
    ".csv": _Delimited,
    ".tsv": _Delimited,
    ".json": _Json,
    ".jsonl": _Json,
    ".parquet": _Parquet,
}
