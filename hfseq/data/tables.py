"""Tables: readers of CSV, TSV, JSON and parquet files, each row with its place in the file.

A :class:`TableFile` serves parallel text, whose pairs are read one by one (:func:`file_origin`),
and labelled examples, which are held as columns (:func:`read_table`).
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
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

BATCH_ROWS = 10_000  # rows a record batch
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON can write
#: A class by name or number, or a number to predict; None where there is none.
Label = str | float | None


@dataclass
class Table:
    """Columns by name, where each row stands, and what told where the table is.

    ``task`` is the GLUE task whose own file this was recognised as, ``classes`` the names behind
    numbers in the label column.
    """

    columns: dict[str, list[Any]]
    origin: str
    line_numbers: list[int] | None = None
    task: str | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def place(self, row: int) -> str:
        """Name a row in an error."""
        return f"{self.origin}, " + (
            f"line {self.line_numbers[row]}" if self.line_numbers else f"row {row + 1}"
        )

    def requested_column(self, flag: str, name: str | None, required: bool = True) -> str | None:
        """Return the column that a flag names, by name or by number.

        **Raises:** DataError for one that is not there, if it is ``required``.
        """
        names = list(self.columns)
        if name is None or name in names:
            return name
        if (number := column_number(name, len(names))) is not None:
            return names[number]
        if not required:
            return None
        raise DataError(
            f"--{flag} {name}: {self.origin} has no such column but {', '.join(names)}"
            + (f" (numbers 0 to {len(names) - 1})" if name.isdigit() else did_you_mean(name, names))
        )

    def column(self, flag: str, requested: str | None, usual: Sequence[str]) -> str:
        """Return the column that a flag names, by name or number, or one of the usual names.

        **Raises:** DataError where there is none.
        """
        names = list(self.columns)
        found = self.requested_column(flag, requested, required=False)
        found = (
            next((name for name in usual if name in names), None) if requested is None else found
        )
        if found is None:
            raise DataError(
                f"{self.origin} has no column '{requested or usual[0]}' but {', '.join(names)}: say "
                f"which it is with --{flag}" + (did_you_mean(requested, names) if requested else "")
            )
        return found

    def texts(self, column: str) -> list[str]:
        """Return a column of sentences; DataError where a cell holds no text."""
        for row, cell in enumerate(self.columns[column]):
            if not isinstance(cell, str) or SURROGATE.search(cell):
                what = "nothing" if cell is None else f"{cell!r:.80}, which is no text,"
                raise DataError(f"{self.place(row)} has {what} in the column '{column}'")
        return self.columns[column]

    def labels(self, column: str, task_name: str | None) -> list[Label]:
        """Return labels as text without spaces around them, numbers with a fraction as they are."""
        task = GLUE.get(task_name or "")
        names = self.classes or (task.labels if task else ())
        missing = ("-1", "-1.0") if task or self.classes else ()  # GLUE's test labels
        numbered = {str(number): name for number, name in enumerate(names)}

        def read(cell: str | float | None) -> Label:
            text = "" if cell is None else str(cell).strip()
            if not text or text in missing or (isinstance(cell, float) and math.isnan(cell)):
                return None
            return cell if isinstance(cell, float) else numbered.get(text, text)

        return [read(cell) for cell in self.columns[column]]


#: Number of the row, source, target; None where a side is missing.
Pair = tuple[int, str | None, str | None]


@dataclass(frozen=True)
class PairSource:
    """Pairs of one origin: what messages call it, what identifies its content, how it is read."""

    name: str
    key: list[Any]
    read: Callable[[], Iterator[Pair]]
    unit: str = "line"


@dataclass(frozen=True)
class PairColumns:
    """What the source and the target are called where they come from, and their languages."""

    source: str
    target: str
    source_lang: str | None = None
    target_lang: str | None = None


#: What a split is read from, and what its sides are called.
Origin = tuple[list[PairSource], PairColumns]
#: The columns of the sides, how to read the pairs, and whether there is a header.
PairReader = tuple[PairColumns, Callable[[], Iterator[Pair]], bool]


class TableFile:
    """The rows of a file, read in order and never held whole: lists of cells, dicts, or batches.

    A row comes with its number: of the line it begins in, or of the row where a file has no lines
    (parquet, one array of JSON objects), as ``unit`` says. Nothing unpacks without a limit.
    """

    unit = "line"

    def __init__(self, file: str, flag: str):
        self.file, self.flag, self.origin = file, flag, f"{flag} {file}"

    def place(self, number: int) -> str:
        """Name a row in an error."""
        return f"{self.origin}, {self.unit} {number}"

    def table(self, arguments: TableArguments) -> Table:
        """Read all rows into columns."""
        raise NotImplementedError

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Say where the pairs are and how to read them."""
        raise NotImplementedError


#: The columns of CoLA's own files, which have no header (Warstadt et al., 2018).
COLA_COLUMNS = ("source", "label", "mark", "sentence")


class DelimitedTable(TableFile):
    """CSV or TSV."""

    def __init__(self, file: str, flag: str):
        super().__init__(file, flag)
        self.is_tsv = files.extension_of(file) == ".tsv"

    def cells(self, quoted: bool, strict: bool, advice: str) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows of a CSV or TSV file that are not blank lines.

        Where " quotes cells (``quoted``) they may have several lines; ``strict`` refuses what
        stands after a closing quotation mark. ``advice`` ends the error of a broken quotation.
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
                if row:
                    yield number, row
                number = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{self.place(number)} is not valid CSV: {error}; {advice}") from error

    def table(self, arguments: TableArguments) -> Table:
        """Read all rows; columns have the names of a header, CoLA's, or numbers."""
        quoted = not self.is_tsv if arguments.quoting is None else arguments.quoting
        numbers, rows = [], []
        advice = '--no_quoting takes " as any other character'
        for number, row in self.cells(quoted, strict=False, advice=advice):
            if not any(row):
                continue
            numbers.append(number)
            rows.append(row)
            if len(row) != len(rows[0]):
                hint = "--no_quoting" if quoted else "--quoting True"
                raise DataError(
                    f"{self.place(number)} has {len(row)} columns where the first line has "
                    f'{len(rows[0])}; {hint} reads " as {"any character" if quoted else "quotes"}'
                )
        if not rows:
            raise DataError(f"{self.origin} is empty; give a file with examples in it")
        # CoLA's own files: a source, 0 or 1, the author's mark, a sentence; no header.
        cola = (
            self.is_tsv
            and not (
                arguments.requested_columns
                or arguments.header
                or arguments.task_name not in (None, "cola")
            )
            and all(
                len(row) == 4 and row[1] in ("0", "1") and not any(map(str.isalnum, row[2]))
                for row in rows
            )
        )
        if cola:
            names: tuple[str, ...] = COLA_COLUMNS
        elif arguments.header is False or (
            arguments.header is None and arguments.columns_by_number
        ):
            names = tuple(map(str, range(len(rows[0]))))
            label = column_number(arguments.label_column, len(names))
            if arguments.header is None and label is not None:
                # A label that no other line has may be a header's or an example's.
                first, *others = (row[label].strip() for row in rows)
                classes = len(set(others)) <= len(others) / 2  # not numbers of a regression
                if classes and first not in others and re.search(r"[^\W\d]", first):
                    raise DataError(
                        f"{self.place(numbers[0])} has the label '{first}', and no other line has: "
                        "say whether it names the columns (--header True) or is an example "
                        "(--header False)"
                    )
        else:
            names, numbers, rows = tuple(map(str.strip, rows[0])), numbers[1:], rows[1:]
        if len(set(names)) < len(names):
            raise DataError(
                f"{self.origin}: two columns have one name in {', '.join(names)}; if the first "
                "line is an example, give --header False and columns by number"
            )
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=False))
        return Table(columns, self.origin, numbers, "cola" if cola else None)

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Read CSV (with quotes) or TSV (without: a quotation mark is text there)."""
        advice = 'a quotation mark within a cell is doubled (""), and the cell is quoted'
        rows = partial(self.cells, quoted=not self.is_tsv, strict=True, advice=advice)
        _, first = next(rows(), (1, []))
        width = len(first)
        if width < 2:
            separator = "a tab" if self.is_tsv else "a comma"
            raise DataError(
                f"{self.place(1)} has one cell: separate source and target with {separator}"
            )
        header = is_header(first, arguments)
        names = [cell.strip() for cell in first] if header else ["0", "1"]
        if header:
            columns = choose_columns(names, arguments, self.origin)
        else:
            logger.warning(
                "%s has no header (%s names no language): the first column is the source, the "
                "second the target, and line 1 is a pair. Name the columns with --source_column "
                "and --target_column if it has one",
                *(self.origin, " | ".join(cell[:40] for cell in first[:2])),
            )
            columns = PairColumns("0", "1", arguments.source_lang, arguments.target_lang)
        source, target = names.index(columns.source), names.index(columns.target)

        def read() -> Iterator[Pair]:
            for number, row in islice(rows(), int(header), None):
                if len(row) > width:
                    remedy = "remove the tab" if self.is_tsv else "quote cells that hold a comma"
                    raise DataError(
                        f"{self.place(number)} has {len(row)} cells where the first line has "
                        f"{width}: {remedy}"
                    )
                if len(row) == width or any(row):
                    row += [""] * (width - len(row))
                    yield number, row[source], row[target]

        return columns, read, header


class JsonTable(TableFile):
    """JSON: a line for each object, or one array of them."""

    def __init__(self, file: str, flag: str):
        super().__init__(file, flag)
        first = next((line for line in files.read_lines(file, flag) if line.strip()), "")
        self.unit = "row" if first.lstrip().startswith("[") else "line"

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the objects of JSON lines, or of one array."""
        lines: Iterable[str] = files.read_lines(self.file, self.flag)
        array = self.unit == "row"
        for start, text in enumerate(["".join(lines)] if array else lines, 1):
            if text.isspace():
                continue
            try:
                parsed = errors.parse_json(text)
            except json.JSONDecodeError as error:
                line = error.lineno if array else start
                raise DataError(
                    f"{self.origin}, line {line} is not valid JSON: {error.msg}"
                ) from error
            for number, record in enumerate(parsed if array else [parsed], start):
                if not isinstance(record, dict):
                    raise DataError(f"{self.place(number)} is not a JSON object with named columns")
                yield number, record

    def table(self, arguments: TableArguments) -> Table:
        """Read all objects; what one lacks is None."""
        rows = list(self.records())
        names = dict.fromkeys(name for _, record in rows for name in record)
        columns = {name: [record.get(name) for _, record in rows] for name in names}
        lines = [number for number, _ in rows] if self.unit == "line" else None
        return Table(columns, self.origin, lines)

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Read columns, or a "translation" by language."""
        _, first = next(self.records(), (0, {}))
        nested = isinstance(first.get("translation"), dict)
        first = first["translation"] if nested else first
        names = [name for name, value in first.items() if isinstance(value, str | None)]
        columns = choose_columns(names, arguments, self.origin)
        sides = columns.source, columns.target

        def text(number: int, record: Mapping[str, Any], name: str) -> str | None:
            value = record.get(name)
            if not isinstance(value, str | None):
                raise DataError(f"{self.place(number)}: '{name}' is no text but {value!r:.50}")
            try:
                (value or "").encode()
            except UnicodeEncodeError as error:  # JSON can spell one half of a surrogate pair
                raise DataError(
                    f"{self.place(number)}: '{name}' is not valid Unicode ({error.reason}); remove "
                    "the lone \\ud800 … \\udfff escape"
                ) from error
            return value

        def read() -> Iterator[Pair]:
            for number, record in self.records():
                if nested:
                    record = record.get("translation") or {}
                    if not isinstance(record, dict):
                        raise DataError(f"{self.place(number)}: 'translation' is not an object")
                source, target = (text(number, record, name) for name in sides)
                yield number, source, target

        return columns, read, True


class ParquetTable(TableFile):
    """Parquet."""

    unit = "row"

    def __init__(self, file: str, flag: str):
        super().__init__(file, flag)
        files.check_parquet(file, flag)

    @contextmanager
    def parquet(self) -> Iterator[ParquetFile]:
        """Open a parquet file; what goes wrong while it is open is the file's fault."""
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with files.open_binary(self.file) as stream:
                yield ParquetFile(stream)
        except (UnicodeDecodeError, DataError):  # who reads text knows the row
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self.origin} is not valid parquet: {error}") from error

    def table(self, arguments: TableArguments) -> Table:
        """Read all rows."""
        try:
            with self.parquet() as parquet:
                columns = parquet.read().to_pydict()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.origin} is not valid parquet: {error}") from error
        return Table(columns, self.origin)

    def pairs(self, arguments: TranslationArguments) -> PairReader:
        """Read columns of strings, or a struct "translation" with one for each language."""
        import pyarrow

        with self.parquet() as parquet:
            fields = {field.name: field.type for field in parquet.schema_arrow}
        inner = fields.get("translation")
        nested = inner is not None and pyarrow.types.is_struct(inner)
        if inner is not None and nested:
            fields = {field.name: field.type for field in inner}
        texts = [name for name, kind in fields.items() if "string" in str(kind)]
        columns = choose_columns(texts, arguments, self.origin)

        def read() -> Iterator[Pair]:
            wanted, number = ["translation"] if nested else [columns.source, columns.target], 1
            with self.parquet() as parquet:
                for batch in parquet.iter_batches(BATCH_ROWS, columns=wanted):
                    yield from arrow_pairs(batch, columns, nested, number)
                    number += len(batch)

        return columns, read, True


FORMATS: dict[str, type[TableFile]] = {
    **{".csv": DelimitedTable, ".tsv": DelimitedTable, ".json": JsonTable, ".jsonl": JsonTable},
    ".parquet": ParquetTable,
}


def open_table(file: str, flag: str) -> TableFile:
    """Return the reader of a file, by its extension."""
    kind = files.extension_of(file)
    if kind not in FORMATS:
        raise DataError(
            f"{flag} {file}: the extension '{kind}' is not known for tables of examples; "
            "use .tsv, .csv, .json, .jsonl or .parquet"
        )
    files.check_heads([file], "parquet" if kind == ".parquet" else "text", flag)
    return FORMATS[kind](file, flag)


def read_table(file: str, flag: str, arguments: TableArguments) -> Table:
    """Read a file of examples."""
    source = open_table(file, flag)
    table = source.table(arguments)
    if not len(table):
        raise DataError(f"{source.origin} has a header and no examples")
    return table


def file_origin(file: str, flag: str, arguments: TranslationArguments) -> Origin:
    """Return how to read the pairs of a table, and which columns they are in."""
    table = open_table(file, flag)
    columns, read, header = table.pairs(arguments)
    key = [files.file_identity(file), [columns.source, columns.target], header]
    return [PairSource(table.origin, key, read, table.unit)], columns


def dataset_origin(dataset: Dataset, where: str, arguments: TranslationArguments) -> Origin:
    """Return how to read a dataset: its "translation" by language, or two columns of strings."""
    if not hasattr(dataset, "_fingerprint"):
        raise DataError(f"{where} is a stream: a map-style dataset is needed, with all of its rows")
    features = dict(dataset.features)
    inner = features.get("translation")
    languages = list(
        getattr(inner, "languages", None) or (inner if isinstance(inner, dict) else [])
    )
    texts = [name for name, kind in features.items() if "string" in str(getattr(kind, "dtype", ""))]
    sides = choose_columns(languages or texts, arguments, where)
    columns = ["translation"] if languages else [sides.source, sides.target]

    def read() -> Iterator[Pair]:
        first = 1
        for rows in dataset.select_columns(columns).with_format("arrow").iter(BATCH_ROWS):
            yield from arrow_pairs(rows, sides, bool(languages), first)
            first += len(rows)

    key = [dataset._fingerprint, sides.source, sides.target]
    return [PairSource(where, key, read, "row")], sides


def column_number(name: str | None, count: int) -> int | None:
    """Return which of ``count`` columns a flag means, where it gives a number of one."""
    number = int(name) if name and re.fullmatch(r"[0-9]{1,9}", name) else count
    return number if number < count else None


def arrow_pairs(
    batch: RecordBatch | ArrowTable, columns: PairColumns, nested: bool, first: int
) -> Iterator[Pair]:
    """Yield the pairs of an Arrow table or record batch, numbered from ``first`` on."""
    import pyarrow.compute

    def texts(name: str) -> list[str | None]:
        if nested:
            return pyarrow.compute.struct_field(batch["translation"], name).to_pylist()
        return batch[name].to_pylist()

    sources, targets = texts(columns.source), texts(columns.target)
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), first):
        yield number, source, target


def choose_columns(
    names: Sequence[str], arguments: TranslationArguments, where: str
) -> PairColumns:
    """Choose the source and the target among the columns ``names`` of ``where``.

    A side is the column that its flag names, else the one that is called like its language ("de",
    "german"), else "source" or "target". What is still open goes to the first columns that are
    left, those named after a language before the others; but never a column of a third language to
    a side whose language was asked for.
    """
    chosen: dict[str, str | None] = {}
    listing = ", ".join(names) or "none"
    for side, usual in arguments.roles.items():
        asked = getattr(arguments, f"{side}_column")
        if asked and asked not in names:
            raise DataError(
                f"--{side}_column {asked}: no such text column in {where}; the columns are "
                f"{listing}{did_you_mean(asked, names)}"
            )
        language = getattr(arguments, f"{side}_lang")
        chosen[side] = (
            asked
            or (find_language(names, language) if language else None)
            or next((name for name in names if name.lower() in usual), None)
        )
    if chosen["source"] and chosen["source"] == chosen["target"]:
        raise DataError(
            f"{where}: column {chosen['source']} would be both source and target; choose two of "
            f"{listing} with --source_column and --target_column"
        )

    def language_of(name: str) -> str | None:
        return None if name.lower() == "id" else language_code(name)  # Indonesian only if asked for

    for side in arguments.roles:
        if chosen[side] is None:
            language = getattr(arguments, f"{side}_lang")
            left = [name for name in names if name not in chosen.values()]
            left = [name for name in left if not (language and language_of(name))]
            left.sort(key=lambda name: language_of(name) is None)  # stable, so otherwise in order
            if not left:
                asked = f" for --{side}_lang {language}" if language else f" for the {side}"
                raise DataError(
                    f"{where}: no text column{asked}; the columns are {listing}. Name it with "
                    f"--{side}_column"
                )
            chosen[side] = left[0]
    source, target = str(chosen["source"]), str(chosen["target"])
    languages = (
        arguments.source_lang or language_code(source),
        arguments.target_lang or language_code(target),
    )
    return PairColumns(source, target, *languages)


def is_header(cells: Sequence[str], arguments: TranslationArguments) -> bool:
    """Tell whether the first line of a table names columns, rather than being a pair already.

    It does if two of its cells are names that are known: languages, "source" and "target", or what
    the flags ask for. A flag that names a column says that there is a header.
    """
    if arguments.source_column or arguments.target_column:
        return True
    usual = {arguments.source_lang, arguments.target_lang}
    roles = {name for names in arguments.roles.values() for name in names}
    plain = {cell: cell.strip().lower() for cell in cells}
    known = {
        language_code(cell) or name
        for cell, name in plain.items()
        if language_code(cell) or cell in usual or name in roles
    }
    return len(known) > 1
