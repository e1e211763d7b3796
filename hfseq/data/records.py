"""Examples with named columns, of texts, lists and objects: where they are, and which are bad."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data import files
from hfseq.data.arguments import SPLITS, RecordArguments
from hfseq.data.batches import LineRows
from hfseq.data.sources import load_named
from hfseq.data.store import TokenStore
from hfseq.data.tables import Table, column_number, read_table
from hfseq.errors import DataError, UsageError, nearest

if TYPE_CHECKING:
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: How many bad examples are named; the others are counted.
NAMED = 5


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

    def place(self, row: int) -> str:
        """Name an example in an error."""
        table, number = self._find(row)
        return table.place(number)

    def select(self, rows: np.ndarray) -> Records:
        """Return some of the examples."""
        return replace(self, rows=self.rows[rows])

    def column(self, flag: str, asked: str | None, usual: Iterable[str]) -> str:
        """Return the column that a flag names, or the first of the ``usual`` ones that is there.

        **Raises:** DataError for a name that is not there, UsageError where none is.
        """
        table = self.tables[0]
        names = list(table.columns)
        if asked is not None and asked not in names:
            if (number := column_number(asked, len(names))) is not None:
                return names[number]
            raise DataError(
                f"--{flag} {asked}: {table.origin} has no such column but {', '.join(names)}"
                f"{nearest(asked, names)}"
            )
        usual = list(usual)
        found = asked or next((name for name in usual if name in names), None)
        if found is None:
            raise UsageError(
                f"{table.origin} has no column '{' or '.join(usual[:2])}' but {', '.join(names)}: "
                f"say which it is with --{flag}"
            )
        for other in self.tables[1:]:
            if found not in other.columns:
                raise DataError(f"{other.origin} has no column '{found}', which {table.origin} has")
        return found


def load_records(
    arguments: RecordArguments, plugins: Plugins | None = None,
    shape: Callable[[Table], Table] | None = None,
) -> dict[str, Records]:  # fmt: skip
    """Load the examples that the flags ask for, by split; loading them again gives the same object.

    ``shape`` makes examples of the rows of a table, where they are none.

    What has no split is cut off the training examples: a share by hash, equal examples on one side.
    """
    kept = vars(arguments)  # beside the fields, so logs and cards do not see it
    if "_records" in kept:
        return kept["_records"]
    named = {split: getattr(arguments, f"{split}_file") for split in SPLITS}
    if not (arguments.dataset_name or any(named.values())):
        raise UsageError("no data: give --train_file or --dataset_name")
    tables: dict[str, tuple[Table, ...]] = {}
    if arguments.dataset_name:
        for split, dataset in load_named(arguments, plugins, SPLITS).items():
            columns = {name: list(dataset[name]) for name in dataset.column_names}
            origin = f"--dataset_name {arguments.dataset_name}, split {split}"
            tables[split] = (Table(columns, origin, classes=_tag_names(dataset)),)
    for split, patterns in named.items():
        if patterns:
            flag = f"--{split}_file"
            found = files.expand(patterns, flag)
            tables[split] = tuple(read_table(name, flag, arguments) for name in found)
    if shape is not None:
        tables = {split: tuple(map(shape, parts)) for split, parts in tables.items()}
    splits = {
        split: Records(parts, np.arange(sum(map(len, parts)))) for split, parts in tables.items()
    }
    if "train" in splits:
        _set_aside(splits, arguments)
    for split, most in (
        ("train", arguments.max_train_samples), ("validation", arguments.max_eval_samples),
        ("test", arguments.max_predict_samples),
    ):  # fmt: skip
        if most is not None and most < len(splits.get(split, ())):
            splits[split] = splits[split].select(np.arange(most))
    kept["_records"] = splits
    return splits


def _tag_names(dataset: Any) -> tuple[str, ...]:
    """Return the names behind numbers in a column of lists, where a dataset has one."""
    for feature in (dataset.features or {}).values():
        names = getattr(getattr(feature, "feature", None), "names", None)
        if names:
            return tuple(names)
    return ()


def _set_aside(splits: dict[str, Records], arguments: RecordArguments) -> None:
    """Cut what has no split of its own off the training examples, by the hash of an example."""
    whole = splits["train"]
    texts = (json.dumps(whole[row], sort_keys=True, default=str) for row in range(len(whole)))
    digests = (blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() for text in texts)
    shares = {
        split: getattr(arguments, f"{split}_split_percentage")
        for split in SPLITS[1:] if split not in splits
    }  # fmt: skip
    if not any(shares.values()):
        return
    positions = np.array([int.from_bytes(digest, "little") / 2**64 for digest in digests])
    left = np.ones(len(whole), bool)
    for split, share in shares.items():
        if not share:
            continue
        ordered = np.sort(positions[left])
        count = min(max(1, round(len(whole) * share / 100)), len(ordered))
        taken = left & (positions <= ordered[count - 1])
        left &= ~taken
        if not left.any():
            raise DataError(
                f"the training data has {len(whole)} examples, too few to split off {share}% for "
                f"{split}; give --{split}_file or --{split}_split_percentage 0"
            )
        splits[split] = whole.select(np.flatnonzero(taken))
    splits["train"] = whole.select(np.flatnonzero(left))


def sift(
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
    more = f"\n  and {len(told) - NAMED} more" if told[NAMED:] else ""
    logger.warning(
        "%d of %d %s examples are left out:\n  %s%s",
        len(told), len(records), split, "\n  ".join(told[:NAMED]), more,
    )  # fmt: skip
    return records.select(good)


class FieldRows(LineRows):
    """Row i is ``ids[i]``, cut to ``max_length``, with other numbers for each of its tokens.

    ``tokens`` are those by name, with what stands at padding; ``rows`` are arrays with an entry for
    each row. Batches are as wide as those of examples (:class:`LineRows`), and as the longest row
    at most.
    """

    def __init__(
        self,
        ids: Sequence[Sequence[int]],
        pad: int,
        max_length: int,
        tokens: Mapping[str, tuple[Sequence[Sequence[int]], int]],
        rows: Mapping[str, np.ndarray],
        pad_to_max_length: bool = False,
    ):
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        offsets = np.concatenate([[0], lengths.cumsum()])

        def store(values: Sequence[Sequence[int]], padding: int) -> TokenStore:
            flat = np.fromiter(chain.from_iterable(values), np.int32, int(offsets[-1]))
            return TokenStore(flat, offsets, padding)

        longest = min(-(-int(lengths.max()) // 8) * 8, max_length)
        width = max_length if pad_to_max_length else longest
        super().__init__(store(ids, pad), width, pad_to_max_length)
        self.fields = {name: store(values, padding) for name, (values, padding) in tokens.items()}
        self.rows = dict(rows)

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return self.store.total_tokens

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out, ``width`` columns wide."""
        rows = super().fetch(indices, width)
        kept = {name: rows[name] for name in ("input_ids", "segment_ids")}
        starts, lengths = self.store.offsets[indices], self._lengths(indices)
        for name, store in self.fields.items():
            gathered, _ = store.gather(starts, lengths, rows["input_ids"].shape[1])
            kept[name] = gathered["input_ids"]
        return kept | {name: values[indices] for name, values in self.rows.items()}
