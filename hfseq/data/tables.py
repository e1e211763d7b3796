"""Tables of pairs: CSV, TSV, JSON lines and parquet files with both sides in columns."""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hfseq import errors
from hfseq.data import files
from hfseq.data import files as data_files
from hfseq.data.arguments import ClassificationArguments
from hfseq.data.languages import code_of, find_language
from hfseq.errors import DataError, nearest

logger = logging.getLogger(__name__)

ROLES = {"source": ("source", "src", "source_text"), "target": ("target", "tgt", "target_text")}


@dataclass(frozen=True)
class PairColumns:
    """What the source and the target are called where they come from, and their languages."""

    source: str
    target: str
    source_lang: str | None = None
    target_lang: str | None = None


def choose_columns(names: Sequence[str], arguments: Any, where: str) -> PairColumns:
    """Choose the source and the target among the columns ``names`` of ``where``.

    A side is the column that its flag names, else the one that is called like its language ("de",
    "german"), else "source" or "target". What is still open goes to the first columns that are
    left, those named after a language before the others; but never a column of a third language to
    a side whose language was asked for.

    Raises:
        DataError: a column or language that was asked for is not there, or there are not two.
    """
    found = {side: _named_column(names, arguments, side, where) for side in ROLES}
    listing = ", ".join(names) or "none"
    if found["source"] and found["source"] == found["target"]:
        raise DataError(
            f"{where}: column {found['source']} would be both source and target; choose two of "
            f"{listing} with --source_column and --target_column"
        )
    for side in ROLES:
        if found[side] is None:
            language = getattr(arguments, f"{side}_lang")
            left = [name for name in names if name not in found.values()]
            left = [name for name in left if not (language and _language(name))]
            left.sort(key=lambda name: _language(name) is None)  # stable, so otherwise in order
            if not left:
                asked = f" for --{side}_lang {language}" if language else f" for the {side}"
                raise DataError(
                    f"{where}: no text column{asked}; the columns are {listing}. Name it with "
                    f"--{side}_column"
                )
            found[side] = left[0]
    source, target = str(found["source"]), str(found["target"])
    return PairColumns(
        source,
        target,
        arguments.source_lang or code_of(source),
        arguments.target_lang or code_of(target),
    )


def _language(name: str) -> str | None:
    """The language of a column's name; "id" is Indonesian only where that was asked for."""
    return None if name.lower() == "id" else code_of(name)


def _named_column(names: Sequence[str], arguments: Any, side: str, where: str) -> str | None:
    asked = getattr(arguments, f"{side}_column")
    if asked:
        if asked not in names:
            raise DataError(
                f"--{side}_column {asked}: no such text column in {where}; the columns are "
                f"{', '.join(names) or 'none'}{nearest(asked, names)}"
            )
        return asked
    language = getattr(arguments, f"{side}_lang")
    by_language = find_language(names, language) if language else None
    return by_language or next((name for name in names if name.lower() in ROLES[side]), None)


def is_header(cells: Sequence[str], arguments: Any) -> bool:
    """Tell whether the first line of a table names columns, rather than being a pair already.

    It does if two of its cells are names that are known: languages, "source" and "target", or what
    the flags ask for. A flag that names a column says that there is a header.
    """
    if arguments.source_column or arguments.target_column:
        return True
    languages = [lang for lang in (arguments.source_lang, arguments.target_lang) if lang]
    known = {
        code_of(cell) or cell.strip().lower()
        for cell in cells
        if code_of(cell)
        or cell in languages
        or any(cell.strip().lower() in names for names in ROLES.values())
    }
    return len(known) > 1


BATCH = 10_000  # pairs a record batch


#: Line number, source, target; None where a side is missing.
Pair = tuple[int, str | None, str | None]


@dataclass(frozen=True)
class Part:
    """Pairs of one origin: what messages call it, what identifies its content, how it is read."""

    name: str
    key: Any
    read: Callable[[], Iterator[Pair]]
    unit: str = "line"


EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def table_part(file: str, flag: str, arguments: Any) -> tuple[Part, PairColumns]:
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
            self.sides = PairColumns("0", "1", arguments.source_lang, arguments.target_lang)
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
            yield from enumerate(errors.parse_json("".join(lines)), 1)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.flag} {self.file} is not valid JSON: {error}") from error

    def _lines(self, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                try:
                    yield number, errors.parse_json(line)
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
        files.check(file, flag)
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


def arrow_pairs(batch: Any, sides: PairColumns, nested: bool, first: int) -> Iterator[Pair]:
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


SEPARATORS = {".tsv": "\t", ".csv": ","}


#: The columns of CoLA's own files, which have no header (Warstadt et al., 2018).
COLA = ("source", "label", "mark", "sentence")


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


def read_table(file: str, flag: str, arguments: ClassificationArguments) -> Table:
    """Read a file of examples.

    Raises:
        DataError: it is empty, of an unknown kind, or has rows that do not fit its columns.
    """
    kind, origin = data_files.extension_of(file), f"{flag} {file}"
    if kind not in (*SEPARATORS, ".json", ".jsonl", ".parquet"):
        raise DataError(
            f"{origin}: the extension '{kind}' is not known for tables of examples; use .tsv, "
            ".csv, .json, .jsonl or .parquet"
        )
    data_files.check_heads([file], "parquet" if kind == ".parquet" else "text", flag)
    if kind == ".parquet":
        table = _parquet(file, origin)
    elif kind in SEPARATORS:
        table = _delimited(file, flag, SEPARATORS[kind], arguments)
    else:
        table = _records(file, flag)
    if not len(table):
        raise DataError(f"{origin} has a header and no examples")
    return table


def _delimited(file: str, flag: str, separator: str, arguments: ClassificationArguments) -> Table:
    quoted = separator == "," if arguments.quoting is None else arguments.quoting
    lines, rows = [], []
    for line, row in _cells(file, flag, separator, quoted):
        if not any(row):  # blank lines are nobody's example
            continue
        lines.append(line)
        rows.append(row)
        if len(row) != len(rows[0]):
            hint = "--no_quoting" if quoted else "--quoting True"
            raise DataError(
                f"{flag} {file}, line {line} has {len(row)} columns where the first line has "
                f'{len(rows[0])}; {hint} reads " {"as any character" if quoted else "as quotes"}'
            )
    if not rows:
        raise DataError(f"{flag} {file} is empty; give a file with examples in it")
    cola = separator == "\t" and _is_cola(rows, arguments)
    if cola:
        names: tuple[str, ...] = COLA
    elif arguments.header is False or (arguments.header is None and arguments.by_number):
        names = tuple(map(str, range(len(rows[0]))))
        if arguments.header is None:
            _check_first(rows, arguments.label_column, f"{flag} {file}, line {lines[0]}")
    else:
        names, lines, rows = tuple(name.strip() for name in rows[0]), lines[1:], rows[1:]
    if len(set(names)) < len(names):
        raise DataError(
            f"{flag} {file}: two columns have one name in {', '.join(names)}; if the first line is "
            "an example, give --header False and columns by number"
        )
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}
    return Table(columns, f"{flag} {file}", lines, "cola" if cola else None)


def _check_first(rows: list[list[str]], label: str | None, place: str) -> None:
    """Refuse a first line whose label is no other line's: it may be a header or an example."""
    number = column_number(label, len(rows[0]))
    if number is None:
        return
    first, *others = (row[number].strip() for row in rows)
    few = len(set(others)) <= len(others) / 2  # classes, not the numbers of a regression
    if few and first not in others and re.search(r"[^\W\d]", first):
        raise DataError(
            f"{place} has the label '{first}', and no other line has: say whether it names the "
            "columns (--header True) or is an example (--header False)"
        )


def column_number(name: str | None, count: int) -> int | None:
    """Return which of ``count`` columns a flag means, where it gives a number of one."""
    if name is None or not re.fullmatch(r"[0-9]{1,9}", name) or int(name) >= count:
        return None
    return int(name)


def _cells(file: str, flag: str, separator: str, quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of a line (of its last one, where quoted cells have several) and its row."""
    text = data_files.read_lines(file, flag)
    if not quoted:
        for number, line in enumerate(text, 1):
            yield number, line.rstrip("\r\n").split(separator)
        return
    csv.field_size_limit(1 << 27)
    reader = csv.reader(text, delimiter=separator)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{flag} {file}, line {reader.line_num} is not valid CSV: {error}; --no_quoting takes "
            '" as any other character'
        ) from error


def _is_cola(rows: list[list[str]], arguments: ClassificationArguments) -> bool:
    """Recognise CoLA's own files: a source, 0 or 1, the author's mark, a sentence; no header."""
    named = arguments.sentence1_column or arguments.sentence2_column or arguments.label_column
    if named or arguments.header or arguments.task_name not in (None, "cola"):
        return False
    return all(
        len(row) == 4 and row[1] in ("0", "1") and not any(map(str.isalnum, row[2])) for row in rows
    )


def _records(file: str, flag: str) -> Table:
    """Read JSON lines, or one array of objects."""
    lines: list[int] = []
    records: list[dict[str, Any]] = []
    text = "".join(data_files.read_lines(file, flag))
    whole = text.lstrip().startswith("[")
    for number, line in [(1, text)] if whole else enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = errors.parse_json(line)
        except json.JSONDecodeError as error:
            where = f"line {getattr(error, 'lineno', number) if whole else number}"
            reason = getattr(error, "msg", error)
            raise DataError(f"{flag} {file}, {where} is not valid JSON: {reason}") from error
        found = found if whole else [found]
        if not all(isinstance(record, dict) for record in found):
            raise DataError(f"{flag} {file}, line {number} is not a JSON object with named columns")
        records += found
        lines += [number] * len(found)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    return Table(columns, f"{flag} {file}", None if whole else lines)


def _parquet(file: str, origin: str) -> Table:
    import pyarrow
    from pyarrow import parquet

    files.check(file, origin.removesuffix(f" {file}"))
    try:
        with data_files.open_binary(file) as stream:
            return Table(parquet.read_table(stream).to_pydict(), origin)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{origin} is not valid parquet: {error}") from error
