"""Readers of CSV, TSV, JSON and parquet files.

The readers keep the location of each row for error messages. A `TableFile` reads parallel text pair
by pair (`file_origin`), and labeled examples as columns (`read_table`).
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from hfseq import errors
from hfseq.data import files
from hfseq.data.arguments import GLUE, TableArguments, TranslationArguments
from hfseq.data.languages import find_language, language_code
from hfseq.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import RecordBatch
    from pyarrow import Table as ArrowTable
    from pyarrow.parquet import ParquetFile

logger = logging.getLogger(__name__)

BATCH_ROWS = 10_000  # rows per record batch
SURROGATE = re.compile("[\ud800-\udfff]")  # unpaired surrogates, which JSON can encode
#: A class name or id, a tuple of class names or ids for multi-label classification, or a number for
#: regression. None if the label is missing.
Label = str | float | tuple[str, ...] | None


@dataclass
class Table:
    """Columns of examples, with the locations of the rows.

    Attributes:
        columns: Lists of cells by column name.
        origin: Location of the table, for messages.
        line_numbers: Line number of each row, or `None` for formats without lines.
        task: The GLUE task whose original file format was recognized.
        classes: Class names by class id, for each column of class ids or of lists of class ids.
    """

    columns: dict[str, list[Any]]
    origin: str
    line_numbers: list[int] | None = None
    task: str | None = None
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def place(self, row: int) -> str:
        """Describes the location of a row for messages."""
        return f"{self.origin}, " + (
            f"line {self.line_numbers[row]}" if self.line_numbers else f"row {row + 1}"
        )

    def requested_column(self, flag: str, name: str | None, required: bool = True) -> str | None:
        """Returns the column that a flag specifies by name or by number.

        Args:
            flag: Name of the flag.
            name: Value of the flag. `None` is returned unchanged.
            required: Whether to raise an error if the column does not exist. Otherwise `None` is
                returned.

        Raises:
            DataError: The column does not exist.
        """
        names = list(self.columns)
        if name is None or name in names:
            return name
        if (number := column_number(name, len(names))) is not None:
            return names[number]
        if not required:
            return None
        raise DataError(
            f"--{flag} {name}: {self.origin} has no such column, only {', '.join(names)}"
            + (f" (numbers 0 to {len(names) - 1})" if name.isdigit() else did_you_mean(name, names))
        )

    def column(self, flag: str, requested: str | None, usual: Sequence[str]) -> str:
        """Returns the column that a flag specifies, or the first common name that exists.

        Args:
            flag: Name of the flag.
            requested: Value of the flag, a name or a number.
            usual: Common names of the column.

        Raises:
            DataError: The table does not have the column.
        """
        names = list(self.columns)
        column_name = self.requested_column(flag, requested, required=False)
        if requested is None:
            column_name = next((name for name in usual if name in names), None)
        if column_name is None:
            raise DataError(
                f"{self.origin} has no column '{requested or usual[0]}', only "
                f"{', '.join(names)}: specify it with --{flag}"
                + (did_you_mean(requested, names) if requested else "")
            )
        return column_name

    def texts(self, column: str) -> list[str]:
        """Returns a column of texts. Raises a `DataError` if a cell is not a valid text."""
        for row, cell in enumerate(self.columns[column]):
            if not isinstance(cell, str) or SURROGATE.search(cell):
                content = "nothing" if cell is None else f"{cell!r:.80}, which is not text,"
                raise DataError(f"{self.place(row)} has {content} in the column '{column}'")
        return self.columns[column]

    def labels(self, column: str, task_name: str | None) -> list[Label]:
        """Returns the labels of a column.

        Args:
            column: Name of the column.
            task_name: Name of a GLUE task, whose class names are used if the table has none.

        Returns:
            The labels. Floating point numbers are returned unchanged. Other labels are converted
            to strings without surrounding whitespace, and class ids are replaced by class names if
            these are known. Lists become tuples of such strings. Missing labels are `None`.

        Raises:
            DataError: A list contains values that are not class names or class ids, or only some of
                the labels are lists.
        """
        task = GLUE.get(task_name or "")
        names = self.classes.get(column) or (task.labels if task else ())
        missing = ("-1", "-1.0") if names or task else ()  # as in the test splits of GLUE
        numbered = {str(number): name for number, name in enumerate(names)}

        def read(cell: str | float | None) -> str | float | None:
            text = "" if cell is None else str(cell).strip()
            if not text or text in missing or (isinstance(cell, float) and math.isnan(cell)):
                return None
            return cell if isinstance(cell, float) else numbered.get(text, text)

        labels: list[Label] = []
        has_lists = any(isinstance(cell, list) for cell in self.columns[column])
        for row, cell in enumerate(self.columns[column]):
            if not has_lists or cell is None:
                labels.append(read(cell))
                continue
            if not isinstance(cell, list):
                raise DataError(
                    f"{self.place(row)} has the label {cell!r:.60}, but other rows have lists of "
                    "labels: use a list in every row"
                )
            entries = [read(entry) for entry in cell]
            if not all(isinstance(entry, str) for entry in entries):
                raise DataError(
                    f"{self.place(row)} has the labels {cell!r:.60}: expected a list of class "
                    "names or class ids"
                )
            labels.append(tuple(map(str, entries)))
        return labels


def classes_by_column(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the class names of each column that contains class ids or lists of class ids.

    Args:
        features: The features of a dataset by column.
    """
    classes = {}
    for name, feature in features.items():
        while (inner := getattr(feature, "feature", None)) is not None:
            feature = inner
        if names := getattr(feature, "names", None):
            classes[name] = tuple(names)
    return classes


#: Row number, source and target. The source or target is None if it is missing.
Pair = tuple[int, str | None, str | None]


@dataclass(frozen=True)
class PairSource:
    """A file or dataset from which pairs are read.

    Attributes:
        name: Name for messages.
        key: Values that identify the content, for the cache key.
        read: Function that yields the pairs.
        unit: Unit of the row numbers, for messages: "line", "row", "record" or "pair".
    """

    name: str
    key: list[Any]
    read: Callable[[], Iterator[Pair]]
    unit: str = "line"


@dataclass(frozen=True)
class PairColumns:
    """The names of the source and target columns, and their languages if these are known."""

    source: str
    target: str
    source_lang: str | None = None
    target_lang: str | None = None


#: The files or datasets of a split, and the columns and languages of its source and target.
Origin = tuple[list[PairSource], PairColumns]
#: The source and target columns, a function that yields the pairs, and whether there is a header.
PairReader = tuple[PairColumns, Callable[[], Iterator[Pair]], bool]


class TableFile:
    """Base class of the readers of table files.

    Rows are numbered by the line in which they start. In files without lines (parquet, JSON
    arrays), they are numbered by their position. `unit` is "line" or "row" accordingly. The size of
    decompressed data is limited.
    """

    unit = "line"

    def __init__(self, file: str, flag: str):
        self.file, self.flag, self.origin = file, flag, f"{flag} {file}"

    def place(self, number: int) -> str:
        """Describes the location of a row for messages."""
        return f"{self.origin}, {self.unit} {number}"

    def table(self, arguments: TableArguments) -> Table:
        """Reads all rows into columns."""
        raise NotImplementedError

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Returns a reader of pairs. The pairs are only read when the reader is called."""
        raise NotImplementedError


#: A cell that can be a column name: at most three words without punctuation.
COLUMN_NAME = re.compile(r"[^\W\d]\w*([ .-]\w+){0,2}")
#: Columns of the original files of CoLA (Warstadt et al., 2018), which have no header.
COLA_COLUMNS = ("source", "label", "mark", "sentence")


class DelimitedTable(TableFile):
    """A CSV or TSV file."""

    def __init__(self, file: str, flag: str):
        super().__init__(file, flag)
        self.is_tsv = files.extension_of(file) == ".tsv"

    def cells(self, quoted: bool, strict: bool, advice: str) -> Iterator[tuple[int, list[str]]]:
        """Yields the rows of the file as lists of cells, with their line numbers.

        Args:
            quoted: Whether cells can be enclosed in quotation marks ("). Quoted cells may contain
                line breaks.
            strict: Whether text after a closing quotation mark is an error.
            advice: What to do about invalid quotation marks, for messages.
        """
        lines, separator = files.read_lines(self.file, self.flag), "\t" if self.is_tsv else ","
        if not quoted:
            for number, line in enumerate(lines, 1):
                yield number, line.rstrip("\r\n").split(separator)
            return
        csv.field_size_limit(1 << 27)
        reader, number = csv.reader(lines, delimiter=separator, strict=strict), 1
        try:
            for row in reader:
                yield number, row
                number = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{self.place(number)} is not valid CSV: {error}; {advice}") from error

    def rows(
        self,
        quoted: bool | None = None,
        *,
        strict: bool = False,
        pad_short_rows: bool = False,
        advice: str = "",
    ) -> Iterator[tuple[int, list[str]]]:
        """Yields the rows with their line numbers. All rows have as many cells as the first row.

        Additional cells at the end of a row are dropped if they are empty. Rows of empty cells at
        the end of the file are ignored. Blank lines are ignored too, except in a file with one
        column, where a blank line is a row with an empty cell.

        Args:
            quoted: Whether cells can be enclosed in quotation marks ("). Default: true for CSV
                files, false for TSV files.
            strict: Whether text after a closing quotation mark is an error.
            pad_short_rows: Whether to add empty cells to a row with too few cells, instead of
                raising an error.
            advice: What to do about quotation marks, for messages.

        Raises:
            DataError: A row has more or fewer cells than the first one.
        """
        quoted = not self.is_tsv if quoted is None else quoted
        width, pending = 0, []  # pending: empty rows, which are yielded if another row follows
        for number, row in self.cells(quoted, strict, advice):
            if not any(row):
                if len(row) > 1 or width == 1:
                    pending.append(number)
                continue
            width = width or len(row)
            while len(row) > width and not row[-1]:
                row.pop()
            if len(row) > width or (len(row) < width and not pad_short_rows):
                remedy = "remove the tab" if self.is_tsv else "quote cells that contain a comma"
                remedies = [
                    *([remedy] if len(row) > width else []),
                    *([advice] if advice and not strict else []),
                ]
                raise DataError(
                    f"{self.place(number)} has {len(row)} columns, but the first line has {width}"
                    f"{': ' if remedies else ''}{'; or '.join(remedies)}"
                )
            yield from ((empty, [""] * width) for empty in pending)
            pending.clear()
            yield number, row + [""] * (width - len(row))

    def examples(
        self, rows: Iterable[tuple[int, list[str]]], header: Sequence[str]
    ) -> Iterator[tuple[int, list[str]]]:
        """Yields the rows after the header.

        Raises:
            DataError: The header has a single column whose name contains a different separator, or
                a row repeats the header, for instance because files were concatenated.
        """
        other = next((mark for mark in ";\t|," if mark in header[0]), None)
        if len(header) == 1 and other:
            raise DataError(
                f"{self.origin}: the header is one column, {header[0]!r}. Columns are separated by "
                f"{'tabs in .tsv' if self.is_tsv else 'commas in .csv'} files; convert the file, "
                f"or rename the column if {other!r} is part of its name"
            )
        for number, row in islice(rows, 1, None):
            if row == header:
                raise DataError(
                    f"{self.place(number)} repeats the header ({', '.join(row):.80}), as in "
                    "concatenated files: remove the line"
                )
            yield number, row

    def table(self, arguments: TableArguments) -> Table:
        """Reads all rows into columns.

        Without a header, the columns are named by their numbers, except in CoLA's original files,
        whose columns are known.
        """
        quoted = not self.is_tsv if arguments.quoting is None else arguments.quoting
        flag = "--no_quoting" if quoted else "--quoting True"
        meaning = "an ordinary character" if quoted else "a quotation mark"
        numbered = list(self.rows(quoted, advice=f'{flag} treats " as {meaning}'))
        if not numbered:
            raise DataError(f"{self.origin} is empty; use a file that contains examples")
        numbers, rows = [number for number, _ in numbered], [row for _, row in numbered]
        is_cola = self._is_cola(rows, arguments)
        if is_cola:
            names: tuple[str, ...] = COLA_COLUMNS
        elif self._has_header(numbers, rows, arguments):
            numbered = list(self.examples(numbered, rows[0]))
            names = tuple(cell.strip() for cell in rows[0])
        else:
            names = tuple(str(number) for number in range(len(rows[0])))
        columns = [[row[i] for _, row in numbered] for i in range(len(names))]
        while not names[-1] and not any(columns[-1]):  # a separator at the end of the header
            names, columns = names[:-1], columns[:-1]
        self.check_unique(names, "; if the first line is an example, use --header False")
        lines = [number for number, _ in numbered]
        table = dict(zip(names, columns, strict=True))
        return Table(table, self.origin, lines, "cola" if is_cola else None)

    def check_unique(self, names: Sequence[str], advice: str = "") -> None:
        """Raises a `DataError` if two columns have the same name."""
        if len(set(names)) < len(names):
            raise DataError(
                f"{self.origin}: column names are not unique: {', '.join(names)}{advice}"
            )

    def texts(self) -> tuple[list[str], Iterator[list[str | None]]]:
        """Returns the column names, and an iterator over the rows. Empty cells are `None`."""
        rows = self.rows()
        _, header = next(rows, (1, [""]))
        names = [cell.strip() for cell in header]
        self.check_unique(names)
        examples = self.examples(chain([(1, header)], rows), header)
        return names, ([cell or None for cell in row] for _, row in examples)

    def _is_cola(self, rows: list[list[str]], arguments: TableArguments) -> bool:
        """Returns whether this is an original file of CoLA, which has no header.

        Its columns are the source, the label (0 or 1), the judgment mark of the original author,
        and the sentence.
        """
        if not self.is_tsv or arguments.requested_columns or arguments.header:
            return False
        if arguments.task_name not in (None, "cola"):
            return False
        return all(
            len(row) == 4 and row[1] in ("0", "1") and not any(map(str.isalnum, row[2]))
            for row in rows
        )

    def _has_header(
        self, numbers: list[int], rows: list[list[str]], arguments: TableArguments
    ) -> bool:
        """Returns whether the first row contains the column names.

        The first rule that applies decides:

        1. `--header`, if it is given.
        2. If a flag specifies a column by its number, the file has no header. A `DataError` is
           raised if the first row looks like a header nevertheless.
        3. Otherwise the file has a header.
        """
        if arguments.header is not None:
            return arguments.header
        if not arguments.columns_by_number:
            return True
        self._check_first_label(numbers, rows, arguments)
        return False

    def _check_first_label(
        self, numbers: list[int], rows: list[list[str]], arguments: TableArguments
    ) -> None:
        """Raises a `DataError` if the first label could be either a column name or a class.

        This is the case if the label contains a letter and occurs in no other row, and if the other
        labels are classes. They are assumed to be classes if each of them occurs twice on average,
        unlike the targets of a regression.
        """
        column = column_number(arguments.label_column, len(rows[0]))
        if column is None:
            return
        first, *labels = (row[column].strip() for row in rows)
        are_classes = len(set(labels)) <= len(labels) / 2
        if are_classes and first not in labels and re.search(r"[^\W\d]", first):
            raise DataError(
                f"{self.place(numbers[0])} has the label '{first}', which occurs in no other line: "
                "specify whether this line contains column names (--header True) or is an example "
                "(--header False)"
            )

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Returns a reader of pairs. Cells can be quoted in CSV files, but not in TSV files."""
        rows = partial(
            self.rows,
            strict=True,
            pad_short_rows=True,
            advice='quotation marks within a quoted cell must be doubled ("")',
        )
        _, first = next(rows(), (1, []))
        width = len(first)
        if width < 2:
            separator = "a tab" if self.is_tsv else "a comma"
            raise DataError(
                f"{self.place(1)} has one cell: separate source and target by {separator}"
            )
        header = is_header(first, arguments)
        names = [cell.strip() for cell in first] if header else ["0", "1"]
        if header:
            columns = choose_columns(names, arguments, self.origin)
        else:
            logger.warning(
                "%s has no header (%s contains no known column name): using the first column as "
                "%s, the second as %s, and line 1 as a pair. If line 1 is a header, specify the "
                "columns with --%s and --%s",
                self.origin,
                " | ".join(cell[:40] for cell in first[:2]),
                *arguments.side_flags,
                *arguments.side_flags.values(),
            )
            columns = PairColumns("0", "1", arguments.source_lang, arguments.target_lang)
        source, target = names.index(columns.source), names.index(columns.target)

        def read() -> Iterator[Pair]:
            for number, row in self.examples(rows(), first) if header else rows():
                yield number, row[source], row[target]

        return columns, read, header


class JsonTable(TableFile):
    """A JSON file with one object per line, or with an array of objects."""

    def __init__(self, file: str, flag: str):
        super().__init__(file, flag)
        first = next((line for line in files.read_lines(file, flag) if line.strip()), "")
        self.unit = "row" if first.lstrip().startswith("[") else "line"

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the objects with the number of their line, or their number in a JSON array."""
        lines: Iterable[str] = files.read_lines(self.file, self.flag)
        array = self.unit == "row"
        for start, text in enumerate(["".join(lines)] if array else lines, 1):
            if text.isspace():
                continue
            try:
                parsed = errors.parse_json(text, unique_keys=True)
            except json.JSONDecodeError as error:
                line = error.lineno if array else start
                raise DataError(
                    f"{self.origin}, line {line} is not valid JSON: {error.msg}"
                ) from error
            for number, record in enumerate(parsed if array else [parsed], start):
                if not isinstance(record, dict):
                    raise DataError(f"{self.place(number)} is not a JSON object with named columns")
                yield number, record

    def pair_records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the objects. If an object has a list "data", its entries are yielded instead."""
        for number, record in self.records():
            entries = record.get("data")
            if not isinstance(entries, list):
                yield number, record
                continue
            for entry_number, entry in enumerate(entries, 1):
                if not isinstance(entry, dict):
                    raise DataError(
                        f"{self.origin}: entry {entry_number} of 'data' is not a JSON object"
                    )
                yield entry_number, entry

    def table(self, arguments: TableArguments) -> Table:
        """Reads all objects into columns. Missing values are `None`."""
        rows = list(self.records())
        names = dict.fromkeys(name for _, record in rows for name in record)
        columns = {name: [record.get(name) for _, record in rows] for name in names}
        lines = [number for number, _ in rows] if self.unit == "line" else None
        return Table(columns, self.origin, lines)

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Returns a reader of pairs.

        Source and target are two values of each object. They can be nested in a "translation"
        object, which has one text per language.
        """
        _, first = next(self.pair_records(), (0, {}))
        nested = isinstance(first.get("translation"), dict)
        first = first["translation"] if nested else first
        names = [name for name, value in first.items() if isinstance(value, str | None)]
        columns = choose_columns(names, arguments, self.origin)
        sides = columns.source, columns.target

        def text(number: int, record: Mapping[str, Any], name: str) -> str | None:
            value = record.get(name)
            if not isinstance(value, str | None):
                raise DataError(f"{self.place(number)}: '{name}' is not a string but {value!r:.50}")
            try:
                (value or "").encode()
            except UnicodeEncodeError as error:  # JSON can encode unpaired surrogates
                raise DataError(
                    f"{self.place(number)}: '{name}' is not valid Unicode ({error.reason}); "
                    "remove the unpaired \\ud800 … \\udfff escape"
                ) from error
            return value

        def read() -> Iterator[Pair]:
            for number, record in self.pair_records():
                if nested:
                    record = record.get("translation") or {}
                    if not isinstance(record, dict):
                        raise DataError(f"{self.place(number)}: 'translation' is not an object")
                source, target = (text(number, record, name) for name in sides)
                yield number, source, target

        return columns, read, True


class ParquetTable(TableFile):
    """A parquet file."""

    unit = "row"

    def __init__(self, file: str, flag: str):
        super().__init__(file, flag)
        files.check_parquet(file, flag)

    @contextmanager
    def parquet(self) -> Iterator[ParquetFile]:
        """Opens the file and converts errors in the context to a `DataError`."""
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with files.open_binary(self.file) as stream:
                yield ParquetFile(stream)
        except (UnicodeDecodeError, DataError):  # handled by the callers, which know the row
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self.origin} is not valid parquet: {error}") from error

    def table(self, arguments: TableArguments) -> Table:
        """Reads all rows into columns, as `TableFile.table` describes."""
        from datasets import Features

        try:
            with self.parquet() as parquet:
                table = parquet.read()
                columns = table.to_pydict()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.origin} is not valid parquet: {error}") from error
        # `datasets` stores the class names in the schema
        classes = classes_by_column(Features.from_arrow_schema(table.schema))
        return Table(columns, self.origin, classes=classes)

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Returns a reader of pairs.

        Source and target are two string columns. They can be fields of a "translation" struct,
        which has one text per language.
        """
        import pyarrow

        with self.parquet() as parquet:
            fields = {field.name: field.type for field in parquet.schema_arrow}
        inner = fields.get("translation")
        nested = inner is not None and pyarrow.types.is_struct(inner)
        if inner is not None and nested:
            fields = {field.name: field.type for field in inner}
        texts = [name for name, dtype in fields.items() if "string" in str(dtype)]
        columns = choose_columns(texts, arguments, self.origin)

        def read() -> Iterator[Pair]:
            column_names = ["translation"] if nested else [columns.source, columns.target]
            number = 1
            with self.parquet() as parquet:
                for batch in parquet.iter_batches(BATCH_ROWS, columns=column_names):
                    yield from arrow_pairs(batch, columns, nested, number)
                    number += len(batch)

        return columns, read, True


FORMATS: dict[str, type[TableFile]] = {
    **{".csv": DelimitedTable, ".tsv": DelimitedTable, ".json": JsonTable, ".jsonl": JsonTable},
    ".parquet": ParquetTable,
}


def open_table(file: str, flag: str) -> TableFile:
    """Returns the reader for a file, based on its extension.

    Raises:
        DataError: The extension is unknown, or the file is empty or binary.
    """
    suffix = files.extension_of(file)
    if suffix not in FORMATS:
        raise DataError(
            f"{flag} {file}: unknown extension '{suffix}'; use .tsv, .csv, .json, .jsonl or "
            ".parquet"
        )
    files.check_heads([file], "parquet" if suffix == ".parquet" else "text", flag)
    return FORMATS[suffix](file, flag)


def read_table(file: str, flag: str, arguments: TableArguments) -> Table:
    """Reads a file of examples. Raises a `DataError` if the file contains no examples."""
    source = open_table(file, flag)
    table = source.table(arguments)
    if not len(table):
        raise DataError(f"{source.origin} contains a header but no examples")
    return table


def file_origin(file: str, flag: str, arguments: TranslationArguments) -> Origin:
    """Returns the `Origin` of the pairs in a table file: a `PairSource` and its columns."""
    table = open_table(file, flag)
    columns, read, header = table.pairs(arguments)
    key = [files.file_identity(file), [columns.source, columns.target], header]
    return [PairSource(table.origin, key, read, table.unit)], columns


def dataset_origin(dataset: Dataset, location: str, arguments: TranslationArguments) -> Origin:
    """Returns the `Origin` of the pairs in a dataset: a `PairSource` and its columns.

    Source and target are two string columns, or two languages of a "translation" column.

    Raises:
        DataError: The dataset is a stream, or a column is missing.
    """
    if not hasattr(dataset, "_fingerprint"):
        raise DataError(f"{location} is a stream: a map-style dataset is required")
    features = dict(dataset.features)
    inner = features.get("translation")
    languages = list(
        getattr(inner, "languages", None) or (inner if isinstance(inner, dict) else [])
    )
    texts = [
        name for name, feature in features.items() if "string" in str(getattr(feature, "dtype", ""))
    ]
    sides = choose_columns(languages or texts, arguments, location)
    columns = ["translation"] if languages else [sides.source, sides.target]

    def read() -> Iterator[Pair]:
        first = 1
        for rows in dataset.select_columns(columns).with_format("arrow").iter(BATCH_ROWS):
            yield from arrow_pairs(rows, sides, bool(languages), first)
            first += len(rows)

    key = [dataset._fingerprint, sides.source, sides.target]
    return [PairSource(location, key, read, "row")], sides


def column_number(name: str | None, count: int) -> int | None:
    """Returns the column index that a flag specifies, or `None` if it is not a valid index."""
    number = int(name) if name and re.fullmatch(r"[0-9]{1,9}", name) else count
    return number if number < count else None


def arrow_pairs(
    batch: RecordBatch | ArrowTable, columns: PairColumns, nested: bool, first: int
) -> Iterator[Pair]:
    """Yields the pairs of an Arrow table or record batch, numbered from `first`."""
    import pyarrow.compute

    def texts(name: str) -> list[str | None]:
        if nested:
            return pyarrow.compute.struct_field(batch["translation"], name).to_pylist()
        return batch[name].to_pylist()

    sources, targets = texts(columns.source), texts(columns.target)
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), first):
        yield number, source, target


def choose_columns(
    names: Sequence[str], arguments: TranslationArguments, location: str
) -> PairColumns:
    """Chooses the source and the target column.

    For each of the two sides, the first rule that finds a column decides:

    1. The column that `--source_column` or `--target_column` specifies.
    2. The column that is named after the language in `--source_lang` or `--target_lang`, e.g. "de"
       or "german".
    3. The first column with a common name of the side, e.g. "source".
    4. The first column that is left. If no flag specifies the language of the side, columns that
       are named after a language come first. If a flag does, these columns are excluded, because
       they contain another language.

    Args:
        names: The text columns.
        arguments: The data flags.
        location: Location of the data, for messages.

    Raises:
        DataError: A requested column does not exist, no column is left for a side, or both sides
            have the same column.
    """
    listing = ", ".join(names) or "none"
    flags = {side: f"--{flag}" for side, flag in arguments.side_flags.items()}
    columns = {side: _find_column(side, names, arguments, location) for side in arguments.roles}
    if columns["source"] and columns["source"] == columns["target"]:
        raise DataError(
            f"{location}: column {columns['source']} would be both source and target; choose "
            f"two of {listing} with {' and '.join(flags.values())}"
        )
    languages = (arguments.source_lang, arguments.target_lang)
    if len(names) > 2 and not any(columns.values()) and not any(languages):
        if not any(language_code(name) for name in names if name.lower() != "id"):
            raise DataError(
                f"{location}: cannot choose two of the columns {listing}: specify them with "
                f"{' and '.join(flags.values())}"
            )
    for side, column in columns.items():
        if column is None:
            language = getattr(arguments, f"{side}_lang")
            left = [name for name in names if name not in columns.values()]
            columns[side] = _first_column_left(left, language)
            if columns[side] is None:
                purpose = f" for --{side}_lang {language}" if language else f" for the {side}"
                raise DataError(
                    f"{location}: no text column{purpose}; the columns are {listing}. Specify "
                    f"it with {flags[side]}"
                )
    source, target = str(columns["source"]), str(columns["target"])
    source_lang = arguments.source_lang or language_code(source)
    target_lang = arguments.target_lang or language_code(target)
    return PairColumns(source, target, source_lang, target_lang)


def _find_column(
    side: str, names: Sequence[str], arguments: TranslationArguments, location: str
) -> str | None:
    """Returns the column of a side according to the first three rules of `choose_columns`."""
    column = getattr(arguments, f"{side}_column")
    if column:
        if column not in names:
            raise DataError(
                f"--{arguments.side_flags[side]} {column}: no such text column in {location}; the "
                f"columns are {', '.join(names) or 'none'}{did_you_mean(column, names)}"
            )
        return column
    language = getattr(arguments, f"{side}_lang")
    if language and (column := find_language(names, language)):
        return column
    return next((name for name in names if name.lower() in arguments.roles[side]), None)


def _first_column_left(names: list[str], language: str | None) -> str | None:
    """Returns the column of a side according to the last rule of `choose_columns`."""

    def names_language(name: str) -> bool:
        # "id" is more often an identifier than Indonesian.
        return name.lower() != "id" and language_code(name) is not None

    if language:
        return next((name for name in names if not names_language(name)), None)
    return next(filter(names_language, names), next(iter(names), None))


def is_header(cells: Sequence[str], arguments: TranslationArguments) -> bool:
    """Returns whether the first row of a table of pairs contains the column names.

    The first rule that applies decides:

    1. If a flag specifies a column, there is a header.
    2. If at least two cells are known names, the row is a header. Known names are languages, the
       values of `--source_lang` and `--target_lang`, and common names of a side such as "source".
       Different spellings of the same language count once.
    3. For objectives that expect a header (summarization), the row is a header if all cells differ
       and consist of at most three words that do not begin with a digit.
    """
    if arguments.source_column or arguments.target_column:
        return True
    requested_languages = {arguments.source_lang, arguments.target_lang}
    side_names = {name for names in arguments.roles.values() for name in names}
    known_names = set()
    for cell in cells:
        name = cell.strip().lower()
        if code := language_code(cell):
            known_names.add(code)
        elif cell in requested_languages or name in side_names:
            known_names.add(name)
    if arguments.expects_header and len(known_names) < 2:
        names = {cell.strip() for cell in cells}
        return len(names) == len(cells) and all(COLUMN_NAME.fullmatch(name) for name in names)
    return len(known_names) > 1
