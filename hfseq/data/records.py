"""Examples with named columns of texts, lists or objects, and the handling of invalid examples."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data import files
from hfseq.data.arguments import SPLITS, RecordArguments
from hfseq.data.sources import cached_on_arguments, complete_splits, load_dataset_splits
from hfseq.data.tables import Table, classes_by_column, read_table
from hfseq.errors import DataError, UsageError

if TYPE_CHECKING:
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: Maximum number of invalid examples to list in a message.
MAX_REPORTED = 5


@dataclass(frozen=True)
class Records:
    """The examples of a split.

    Attributes:
        tables: The tables, in order.
        rows: Indices of the included rows, counted over all tables.
    """

    tables: tuple[Table, ...]
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def _find(self, row: int) -> tuple[Table, int]:
        number = int(self.rows[row])
        for table in self.tables:
            if number < len(table):
                return table, number
            number -= len(table)
        raise IndexError(row)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Returns an example as a dictionary from column names to values.

        The dictionary contains only the columns of the table that the example belongs to.
        """
        table, number = self._find(row)
        return {name: cells[number] for name, cells in table.columns.items()}

    def contents(self) -> Iterator[str]:
        """Yields the content of each example as a JSON string, which is hashed to form splits."""
        return (json.dumps(self[row], sort_keys=True, default=str) for row in range(len(self)))

    def place(self, row: int) -> str:
        """Describes the location of an example for messages."""
        table, number = self._find(row)
        return table.place(number)

    def select(self, rows: np.ndarray) -> Records:
        """Returns the examples with the given indices."""
        return replace(self, rows=self.rows[rows])

    def column(self, flag: str, requested: str | None, usual: Iterable[str]) -> str:
        """Returns the column that a flag specifies, or the first common name that exists.

        Args:
            flag: Name of the flag.
            requested: Value of the flag.
            usual: Common names of the column.

        Raises:
            DataError: The requested column does not exist, or a later table lacks the column.
            UsageError: None of the common names exists.
        """
        table = self.tables[0]
        names = list(table.columns)
        usual = list(usual)
        column_name = table.requested_column(flag, requested) or next(
            (name for name in usual if name in names), None
        )
        if column_name is None:
            raise UsageError(
                f"{table.origin} has no column '{' or '.join(usual[:2])}', only "
                f"{', '.join(names)}: specify the column with --{flag}"
            )
        for other in self.tables[1:]:
            if column_name not in other.columns:
                raise DataError(
                    f"{other.origin} has no column '{column_name}', but {table.origin} has one"
                )
        return column_name


@cached_on_arguments
def load_records(
    arguments: RecordArguments,
    plugins: Plugins | None = None,
    transform: Callable[[Table], Table] | None = None,
) -> dict[str, Records]:
    """Loads the examples that the flags specify, by split.

    If the validation or test split is missing, it is taken from the training examples. These are
    selected by the hash of their content, so that equal examples are in the same split. Repeated
    calls with the same `arguments` object return the same result.

    Args:
        arguments: The data flags.
        plugins: Plugins whose `load_dataset` hook may provide the dataset.
        transform: Function that converts each table, for formats whose rows are not examples.

    Raises:
        UsageError: The flags specify no data.
        DataError: The data cannot be read.
    """
    patterns_by_split = {split: getattr(arguments, f"{split}_file") for split in SPLITS}
    if not (arguments.dataset_name or any(patterns_by_split.values())):
        raise UsageError("no data: give --train_file or --dataset_name")
    tables: dict[str, tuple[Table, ...]] = {}
    if arguments.dataset_name:
        for split, dataset in load_dataset_splits(arguments, plugins, SPLITS).items():
            columns = {name: list(dataset[name]) for name in dataset.column_names}
            origin = f"--dataset_name {arguments.dataset_name}, split {split}"
            classes = classes_by_column(dataset.features or {})
            tables[split] = (Table(columns, origin, classes=classes),)
    for split, patterns in patterns_by_split.items():
        if patterns:
            flag = f"--{split}_file"
            paths = files.expand_patterns(patterns, flag)
            tables[split] = tuple(read_table(name, flag, arguments) for name in paths)
    if transform is not None:
        tables = {split: tuple(map(transform, parts)) for split, parts in tables.items()}
    splits = {
        split: Records(parts, np.arange(sum(map(len, parts)))) for split, parts in tables.items()
    }
    complete_splits(splits, arguments)
    return splits


def drop_invalid(
    records: Records, split: str, problems: Mapping[int, str], arguments: RecordArguments
) -> Records:
    """Returns the valid examples and logs the invalid ones.

    With `--bad_examples error`, invalid examples raise an error instead.

    Args:
        records: The examples of a split.
        split: Name of the split, for messages.
        problems: The problem of each invalid example, by row.
        arguments: The data flags.

    Raises:
        DataError: There are invalid examples and `--bad_examples error` is set, or there are no
            valid examples.
    """
    if not problems:
        return records
    messages = [f"{records.place(row)}: {why}" for row, why in problems.items()]
    if arguments.bad_examples == "error":
        raise DataError(
            f"{messages[0]}; correct the example, or leave it out with --bad_examples skip"
        )
    good = np.array([row for row in range(len(records)) if row not in problems], np.int64)
    if not len(good):
        raise DataError(f"none of the {len(records)} {split} examples is valid: {messages[0]}")
    suffix = f"\n  and {len(messages) - MAX_REPORTED} more" if messages[MAX_REPORTED:] else ""
    logger.warning(
        "%d of %d %s examples are invalid and left out:\n  %s%s",
        len(messages),
        len(records),
        split,
        "\n  ".join(messages[:MAX_REPORTED]),
        suffix,
    )
    return records.select(good)
