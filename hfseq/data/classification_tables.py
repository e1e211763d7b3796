"""Tables of labelled sentences: TSV, CSV, JSON lines and parquet, read with the place of a row."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hfseq import json_text
from hfseq.data import files as data_files
from hfseq.data import parquet_files
from hfseq.data.classification_arguments import ClassificationArguments
from hfseq.data.classification_glue import GLUE
from hfseq.errors import DataError, UsageError, nearest

SEPARATORS = {".tsv": "\t", ".csv": ","}
#: The columns of CoLA's own files, which have no header (Warstadt et al., 2018).
COLA = ("source", "label", "mark", "sentence")
LABELS = ("label", "labels", "gold_label", "is_duplicate", "Quality", "score")
SENTENCES = (
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("sentence",), ("text",),
)  # fmt: skip


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
            found = json_text.parse(line)
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

    parquet_files.check(file, origin.removesuffix(f" {file}"))
    try:
        with data_files.open_binary(file) as stream:
            return Table(parquet.read_table(stream).to_pydict(), origin)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{origin} is not valid parquet: {error}") from error


def table_of(dataset: Any, origin: str) -> Table:
    """Return a ``datasets.Dataset`` as a table; labels that have names are told by them."""
    classes: tuple[str, ...] = ()
    for name in LABELS:
        feature: Any = (dataset.features or {}).get(name)
        if found := getattr(feature, "names", None):
            classes = tuple(found)
            break
    return Table({name: list(dataset[name]) for name in dataset.column_names}, origin, None, None,
                 classes)  # fmt: skip


def choose_columns(
    table: Table, arguments: ClassificationArguments, labelled: bool
) -> tuple[str, str | None, str | None]:
    """Return the columns of first sentence, second sentence and label; either may be None.

    Raises:
        DataError: a column that was asked for is not there, or the task's second sentence.
        UsageError: no column has a usual name, or ``labelled`` examples have no label.
    """
    names, task = list(table.columns), GLUE.get(arguments.task_name or table.task or "")
    label = _asked(table, "label_column", arguments.label_column, required=labelled)
    if label is None and arguments.label_column is None:
        label = next((name for name in LABELS if name in names), None)
        if label is None and labelled:
            raise UsageError(
                f"{table.origin} has no column 'label' but {', '.join(names)}: say which one is "
                "the label with --label_column NAME (a number for a file without a header)"
            )
    first = _asked(table, "sentence1_column", arguments.sentence1_column)
    second = _asked(table, "sentence2_column", arguments.sentence2_column)
    if first is None:
        first, usual = _usual(table, task.sentences if task else None, {label, second})
        second = second or usual
    elif second is None and task and len(task.sentences) == 2:
        second = task.sentences[1] if task.sentences[1] in names else None
    if task and len(task.sentences) == 2 and second is None:
        raise DataError(
            f"--task_name {arguments.task_name} compares two sentences ({task.sentences[0]}, "
            f"{task.sentences[1]}), and {table.origin} has one: its columns are "
            f"{', '.join(names)}; give --sentence2_column"
        )
    chosen = [name for name in (first, second, label) if name is not None]
    if twice := next((name for name in chosen if chosen.count(name) > 1), None):
        raise UsageError(
            f"{table.origin}: the column '{twice}' is chosen for two of first sentence, second "
            "sentence and label; look at --sentence1_column, --sentence2_column and --label_column"
        )
    return first, second, label


def _asked(table: Table, flag: str, name: str | None, required: bool = True) -> str | None:
    """Return the column that a flag names, by name or by number."""
    names = list(table.columns)
    if name is None or name in names:
        return name
    if (number := column_number(name, len(names))) is not None:
        return names[number]
    if not required:
        return None
    raise DataError(
        f"--{flag} {name}: {table.origin} has no such column but {', '.join(names)}"
        + (f" (numbers 0 to {len(names) - 1})" if name.isdigit() else nearest(name, names))
    )


def _usual(
    table: Table, wanted: tuple[str, ...] | None, taken: set[str | None]
) -> tuple[str, str | None]:
    """Return the columns of the sentences by their usual names, or what else there is of text."""
    names = table.columns
    for group in ([wanted] if wanted else []) + list(SENTENCES):
        if all(name in names and name not in taken for name in group):
            return group[0], group[1] if len(group) == 2 else None
    texts = [
        name
        for name, cells in names.items()
        if name not in taken and all(isinstance(cell, str) for cell in cells[:100])
    ]
    if len(texts) in (1, 2) and len(names) <= 3:
        return texts[0], texts[1] if len(texts) == 2 else None
    raise UsageError(
        f"{table.origin} has no column 'sentence' or 'text' but {', '.join(names)}: say which "
        "holds the text with --sentence1_column (and --sentence2_column for pairs)"
    )
