"""Examples with named columns, of texts, lists and objects: where they are, and which are bad."""

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
from hfseq.data.tables import Table, read_table
from hfseq.errors import DataError, UsageError

if TYPE_CHECKING:
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: How many bad examples are named; the others are counted.
MAX_REPORTED = 5


@dataclass(frozen=True)
class Records:
    """The examples of a split: tables one after the other, and which of their rows are here."""

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
        """Return an example by its columns; what a table lacks is not there."""
        table, number = self._find(row)
        return {name: cells[number] for name, cells in table.columns.items()}

    def contents(self) -> Iterator[str]:
        """Yield what each example is."""
        return (json.dumps(self[row], sort_keys=True, default=str) for row in range(len(self)))

    def place(self, row: int) -> str:
        """Name an example in an error."""
        table, number = self._find(row)
        return table.place(number)

    def select(self, rows: np.ndarray) -> Records:
        """Return some of the examples."""
        return replace(self, rows=self.rows[rows])

    def column(self, flag: str, requested: str | None, usual: Iterable[str]) -> str:
        """Return the column that a flag names, or the first of the ``usual`` ones that is there.

        **Raises:** DataError for a name that is not there, UsageError where none is.
        """
        table = self.tables[0]
        names = list(table.columns)
        usual = list(usual)
        found = table.requested_column(flag, requested) or next(
            (name for name in usual if name in names), None
        )
        if found is None:
            raise UsageError(
                f"{table.origin} has no column '{' or '.join(usual[:2])}' but {', '.join(names)}: "
                f"say which it is with --{flag}"
            )
        for other in self.tables[1:]:
            if found not in other.columns:
                raise DataError(f"{other.origin} has no column '{found}', which {table.origin} has")
        return found


@cached_on_arguments
def load_records(
    arguments: RecordArguments,
    plugins: Plugins | None = None,
    transform: Callable[[Table], Table] | None = None,
) -> dict[str, Records]:
    """Load the examples that the flags ask for, by split; loading them again gives the same object.

    ``shape`` makes examples of the rows of a table, where they are none.

    What has no split is cut off the training examples: a share by hash, equal examples on one side.
    """
    named = {split: getattr(arguments, f"{split}_file") for split in SPLITS}
    if not (arguments.dataset_name or any(named.values())):
        raise UsageError("no data: give --train_file or --dataset_name")
    tables: dict[str, tuple[Table, ...]] = {}
    if arguments.dataset_name:
        for split, dataset in load_dataset_splits(arguments, plugins, SPLITS).items():
            columns = {name: list(dataset[name]) for name in dataset.column_names}
            origin = f"--dataset_name {arguments.dataset_name}, split {split}"
            # The names behind numbers in a column of lists.
            inner = (getattr(kind, "feature", None) for kind in (dataset.features or {}).values())
            names = next(filter(None, (getattr(kind, "names", None) for kind in inner)), ())
            tables[split] = (Table(columns, origin, classes=tuple(names)),)
    for split, patterns in named.items():
        if patterns:
            flag = f"--{split}_file"
            found = files.expand_patterns(patterns, flag)
            tables[split] = tuple(read_table(name, flag, arguments) for name in found)
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
    """Leave out the examples with ``problems`` (row: why), named and counted; or refuse them.

    **Raises:** DataError for the first with ``--bad_examples error``, and where none is left.
    """
    if not problems:
        return records
    told = [f"{records.place(row)}: {why}" for row, why in problems.items()]
    if arguments.bad_examples == "error":
        raise DataError(f"{told[0]}; correct it, or leave it out by --bad_examples skip")
    good = np.array([row for row in range(len(records)) if row not in problems], np.int64)
    if not len(good):
        raise DataError(f"none of the {len(records)} {split} examples can be used: {told[0]}")
    more = f"\n  and {len(told) - MAX_REPORTED} more" if told[MAX_REPORTED:] else ""
    logger.warning(
        "%d of %d %s examples are left out:\n  %s%s",
        len(told),
        len(records),
        split,
        "\n  ".join(told[:MAX_REPORTED]),
        more,
    )
    return records.select(good)
