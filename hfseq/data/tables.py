"""Tables: one reader of CSV, TSV, JSON and parquet files, each row with its place in the file.

:class:`TableFile` serves parallel text, whose pairs are read one by one (:func:`pair_part`),
and labelled examples, which are held as columns (:func:`read_table`).
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from hfseq import errors
from hfseq.data import files
from hfseq.data.arguments import ClassificationArguments, TranslationArguments
from hfseq.data.languages import code_of, find_language
from hfseq.errors import DataError, nearest

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow import Table as ArrowTable
    from pyarrow.parquet import ParquetFile

logger = logging.getLogger(__name__)

SEPARATORS = {".tsv": "\t", ".csv": ","}
EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
BATCH = 10_000  # rows a record batch


class TableFile:
    """The rows of a file, read in order and never held whole: lists of cells, dicts, or batches.

    A row comes with its number: of the line it begins in, or of the row where a file has no lines
    (parquet, one array of JSON objects), as ``unit`` says. Nothing unpacks without a limit.
    """

    def __init__(self, file: str, flag: str):
        self.file, self.flag, self.origin = file, flag, f"{flag} {file}"
        self.kind, self.unit = files.extension_of(file), "line"
        if self.kind not in EXTENSIONS:
            raise DataError(
                f"{self.origin}: the extension '{self.kind}' is not known for tables of examples; "
                "use .tsv, .csv, .json, .jsonl or .parquet"
            )
        files.check_heads([file], "parquet" if self.kind == ".parquet" else "text", flag)
        if self.kind == ".parquet":
            files.check_parquet(file, flag)
            self.unit = "row"
        elif self.kind not in SEPARATORS:
            first = next((line for line in files.read_lines(file, flag) if line.strip()), "")
            self.unit = "row" if first.lstrip().startswith("[") else "line"

    def place(self, number: int) -> str:
        """Name a row in an error."""
        return f"{self.origin}, {self.unit} {number}"

    def cells(self, quoted: bool, strict: bool, advice: str) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows of a CSV or TSV file that are not blank lines.

        Where " quotes cells (``quoted``) they may have several lines; ``strict`` refuses what
        stands after a closing quotation mark. ``advice`` ends the error of a broken quotation.
        """
        lines, separator = files.read_lines(self.file, self.flag), SEPARATORS[self.kind]
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


@dataclass
class Table:
    """Columns by name, where each row stands, and what told where the table is.

    ``task`` is the GLUE task whose own file this was recognised as, ``classes`` the names behind
    numbers in the label column.
    """

    columns: dict[str, list[Any]]
    origin: str
    lines: list[int] | None = None
    task: str | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def place(self, row: int) -> str:
        """Name a row in an error."""
        return f"{self.origin}, " + (f"line {self.lines[row]}" if self.lines else f"row {row + 1}")


#: The columns of CoLA's own files, which have no header (Warstadt et al., 2018).
COLA = ("source", "label", "mark", "sentence")


def read_table(file: str, flag: str, arguments: ClassificationArguments) -> Table:
    """Read a file of examples."""
    source = TableFile(file, flag)
    if source.kind in SEPARATORS:
        table = _table_of_cells(source, arguments)
    elif source.kind == ".parquet":
        try:
            with source.parquet() as parquet:
                table = Table(parquet.read().to_pydict(), source.origin)
        except UnicodeDecodeError as error:
            raise DataError(f"{source.origin} is not valid parquet: {error}") from error
    else:
        rows = list(source.records())
        names = dict.fromkeys(name for _, record in rows for name in record)
        columns = {name: [record.get(name) for _, record in rows] for name in names}
        lines = [number for number, _ in rows] if source.unit == "line" else None
        table = Table(columns, source.origin, lines)
    if not len(table):
        raise DataError(f"{source.origin} has a header and no examples")
    return table


def _table_of_cells(source: TableFile, arguments: ClassificationArguments) -> Table:
    """Read CSV or TSV, where columns have the names of a header, CoLA's, or numbers."""
    quoted = source.kind == ".csv" if arguments.quoting is None else arguments.quoting
    numbers, rows = [], []
    advice = '--no_quoting takes " as any other character'
    for number, row in source.cells(quoted, strict=False, advice=advice):
        if not any(row):
            continue
        numbers.append(number)
        rows.append(row)
        if len(row) != len(rows[0]):
            hint = "--no_quoting" if quoted else "--quoting True"
            raise DataError(
                f"{source.place(number)} has {len(row)} columns where the first line has "
                f'{len(rows[0])}; {hint} reads " {"as any character" if quoted else "as quotes"}'
            )
    if not rows:
        raise DataError(f"{source.origin} is empty; give a file with examples in it")
    # CoLA's own files: a source, 0 or 1, the author's mark, a sentence; no header.
    named = arguments.sentence1_column or arguments.sentence2_column or arguments.label_column
    cola = (
        source.kind == ".tsv"
        and not (named or arguments.header or arguments.task_name not in (None, "cola"))
        and all(
            len(row) == 4 and row[1] in ("0", "1") and not any(map(str.isalnum, row[2]))
            for row in rows
        )
    )
    if cola:
        names: tuple[str, ...] = COLA
    elif arguments.header is False or (arguments.header is None and arguments.by_number):
        names = tuple(map(str, range(len(rows[0]))))
        label = column_number(arguments.label_column, len(names))
        if arguments.header is None and label is not None:
            # A label that no other line has may be a header's or an example's.
            first, *others = (row[label].strip() for row in rows)
            few = len(set(others)) <= len(others) / 2  # classes, not the numbers of a regression
            if few and first not in others and re.search(r"[^\W\d]", first):
                raise DataError(
                    f"{source.place(numbers[0])} has the label '{first}', and no other line has: "
                    "say whether it names the columns (--header True) or is an example (--header "
                    "False)"
                )
    else:
        names, numbers, rows = tuple(map(str.strip, rows[0])), numbers[1:], rows[1:]
    if len(set(names)) < len(names):
        raise DataError(
            f"{source.origin}: two columns have one name in {', '.join(names)}; if the first line "
            "is an example, give --header False and columns by number"
        )
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=False))
    return Table(columns, source.origin, numbers, "cola" if cola else None)


def column_number(name: str | None, count: int) -> int | None:
    """Return which of ``count`` columns a flag means, where it gives a number of one."""
    number = int(name) if name and re.fullmatch(r"[0-9]{1,9}", name) else count
    return number if number < count else None


#: Number of the row, source, target; None where a side is missing.
Pair = tuple[int, str | None, str | None]


@dataclass(frozen=True)
class Part:
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


def pair_part(file: str, flag: str, arguments: TranslationArguments) -> tuple[Part, PairColumns]:
    """Return how to read the pairs of a table, and which columns they are in."""
    table, header = TableFile(file, flag), True
    if table.kind in SEPARATORS:
        columns, read, header = _pairs_of_cells(table, arguments)
    elif table.kind == ".parquet":
        columns, read = _pairs_of_parquet(table, arguments)
    else:
        columns, read = _pairs_of_records(table, arguments)
    key = [files.identity(file), [columns.source, columns.target], header]
    return Part(table.origin, key, read, table.unit), columns


def _pairs_of_cells(
    table: TableFile, arguments: TranslationArguments
) -> tuple[PairColumns, Callable[[], Iterator[Pair]], bool]:
    """Read CSV (with quotes) or TSV (without: a quotation mark is text there)."""
    tabs = table.kind == ".tsv"

    advice = 'a quotation mark within a cell is doubled (""), and the cell is quoted'
    rows = partial(table.cells, quoted=not tabs, strict=True, advice=advice)
    _, first = next(rows(), (1, []))
    width = len(first)
    if width < 2:
        separator = "a tab" if tabs else "a comma"
        raise DataError(
            f"{table.place(1)} has one cell: separate source and target with {separator}"
        )
    header = is_header(first, arguments)
    names = [cell.strip() for cell in first] if header else ["0", "1"]
    if header:
        columns = choose_columns(names, arguments, table.origin)
    else:
        logger.warning(
            "%s has no header (%s names no language): the first column is the source, the second "
            "the target, and line 1 is a pair. Name the columns with --source_column and "
            "--target_column if it has one",
            *(table.origin, " | ".join(cell[:40] for cell in first[:2])),
        )
        columns = PairColumns("0", "1", arguments.source_lang, arguments.target_lang)
    source, target = names.index(columns.source), names.index(columns.target)

    def read() -> Iterator[Pair]:
        for number, row in islice(rows(), int(header), None):
            if len(row) > width:
                remedy = "remove the tab" if tabs else "quote cells that hold a comma"
                raise DataError(
                    f"{table.place(number)} has {len(row)} cells where the first line has {width}: "
                    f"{remedy}"
                )
            if len(row) == width or any(row):
                row += [""] * (width - len(row))
                yield number, row[source], row[target]

    return columns, read, header


def _pairs_of_records(
    table: TableFile, arguments: TranslationArguments
) -> tuple[PairColumns, Callable[[], Iterator[Pair]]]:
    """Read JSON: columns, or a "translation" by language."""
    _, first = next(table.records(), (0, {}))
    nested = isinstance(first.get("translation"), dict)
    first = first["translation"] if nested else first
    names = [name for name, value in first.items() if isinstance(value, str | None)]
    columns = choose_columns(names, arguments, table.origin)

    def text(record: Mapping[str, Any], name: str, number: int) -> str | None:
        value = record.get(name)
        if not isinstance(value, str | None):
            raise DataError(f"{table.place(number)}: '{name}' is no text but {value!r:.50}")
        try:
            (value or "").encode()
        except UnicodeEncodeError as error:  # JSON can spell one half of a surrogate pair
            raise DataError(
                f"{table.place(number)}: '{name}' is not valid Unicode ({error.reason}); remove "
                "the lone \\ud800 … \\udfff escape"
            ) from error
        return value

    def read() -> Iterator[Pair]:
        for number, record in table.records():
            if nested:
                record = record.get("translation") or {}
                if not isinstance(record, dict):
                    raise DataError(f"{table.place(number)}: 'translation' is not an object")
            yield number, text(record, columns.source, number), text(record, columns.target, number)

    return columns, read


def _pairs_of_parquet(
    table: TableFile, arguments: TranslationArguments
) -> tuple[PairColumns, Callable[[], Iterator[Pair]]]:
    """Read parquet: columns of strings, or a struct "translation" with one for each language."""
    import pyarrow

    with table.parquet() as parquet:
        fields = {field.name: field.type for field in parquet.schema_arrow}
    inner = fields.get("translation")
    nested = inner is not None and pyarrow.types.is_struct(inner)
    if inner is not None and nested:
        fields = {field.name: field.type for field in inner}
    texts = [name for name, kind in fields.items() if "string" in str(kind)]
    columns = choose_columns(texts, arguments, table.origin)

    def read() -> Iterator[Pair]:
        wanted, number = ["translation"] if nested else [columns.source, columns.target], 1
        with table.parquet() as parquet:
            for batch in parquet.iter_batches(BATCH, columns=wanted):
                yield from arrow_pairs(batch, columns, nested, number)
                number += len(batch)

    return columns, read


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


#: What columns are called after their side.
ROLES = {"source": ("source", "src", "source_text"), "target": ("target", "tgt", "target_text")}


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
    for side, usual in ROLES.items():
        asked = getattr(arguments, f"{side}_column")
        if asked and asked not in names:
            raise DataError(
                f"--{side}_column {asked}: no such text column in {where}; the columns are "
                f"{listing}{nearest(asked, names)}"
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
        return None if name.lower() == "id" else code_of(name)  # Indonesian only if asked for

    for side in ROLES:
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
    languages = arguments.source_lang or code_of(source), arguments.target_lang or code_of(target)
    return PairColumns(source, target, *languages)


def is_header(cells: Sequence[str], arguments: TranslationArguments) -> bool:
    """Tell whether the first line of a table names columns, rather than being a pair already.

    It does if two of its cells are names that are known: languages, "source" and "target", or what
    the flags ask for. A flag that names a column says that there is a header.
    """
    if arguments.source_column or arguments.target_column:
        return True
    usual = {arguments.source_lang, arguments.target_lang}
    roles = {name for names in ROLES.values() for name in names}
    plain = {cell: cell.strip().lower() for cell in cells}
    known = {
        code_of(cell) or name
        for cell, name in plain.items()
        if code_of(cell) or cell in usual or name in roles
    }
    return len(known) > 1
