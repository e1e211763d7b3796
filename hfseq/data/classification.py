"""Labelled sentences or pairs of sentences: where they come from, and what their labels mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from hfseq.data import files as data_files
from hfseq.data.classification_arguments import ClassificationArguments
from hfseq.data.classification_glue import GLUE
from hfseq.data.classification_tables import Table, choose_columns, read_table, table_of
from hfseq.data.sources import load_named
from hfseq.errors import DataError, UsageError

SPLITS = ("train", "validation", "test")
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON can write


@dataclass
class Examples:
    """The examples of a split in the order of the data; ``second`` is None for single sentences.

    ``labels`` are as the data has them, None where there is none. ``tables`` say where row i
    stands: (first row, table). ``parts`` are ranges of rows by name, where there are several.
    """

    first: list[str]
    second: list[str] | None
    labels: list[Any]
    tables: list[tuple[int, Table]]
    parts: dict[str, range] = field(default_factory=dict)
    rows: np.ndarray | None = None  # of the tables, where not all of them are here

    def __len__(self) -> int:
        return len(self.first)

    def place(self, row: int) -> str:
        """Name an example in an error."""
        row = row if self.rows is None else int(self.rows[row])
        start, table = next(item for item in reversed(self.tables) if item[0] <= row)
        return table.place(row - start)

    def select(self, rows: np.ndarray) -> Examples:
        """Return some of the examples, by ascending row; parts are cut likewise."""
        second = None if self.second is None else [self.second[i] for i in rows]
        bounds = {
            name: range(*np.searchsorted(rows, (part.start, part.stop)).tolist())
            for name, part in self.parts.items()
        }
        known = rows if self.rows is None else self.rows[rows]
        return Examples(
            [self.first[i] for i in rows], second, [self.labels[i] for i in rows], self.tables,
            {name: part for name, part in bounds.items() if len(part)}, known,
        )  # fmt: skip


class LabelledSplits(dict[str, Examples]):
    """The splits by name (any may be absent), the GLUE task, and names that the data has."""

    def __init__(self, splits: Mapping[str, Examples], task: str | None, name: str | None):
        super().__init__(splits)
        self.task = task
        self.description = {"name": name} if name else {}


def load_examples(arguments: ClassificationArguments, plugins: Any = None) -> LabelledSplits:
    """Load the examples that the flags ask for; loading them again gives the same object.

    A dataset name is offered to the plugins' ``load_dataset`` hook first and looked up on the Hub
    then; files of a split are read one after the other, and each is a part of its own. What has no
    split is cut off the training examples: a share by hash, equal examples on one side.

    Raises:
        UsageError: neither a task, a dataset nor a file is given, or no column is the sentence's.
        DataError: the data is missing, unreadable, or empty, or lacks a column.
    """
    kept = vars(arguments)  # beside the fields, so logs and cards do not see it
    if "_examples" not in kept:
        kept["_examples"] = _load(arguments, plugins)
    return kept["_examples"]


def _load(arguments: ClassificationArguments, plugins: Any) -> LabelledSplits:
    files = {split: getattr(arguments, f"{split}_file") for split in SPLITS}
    if not (arguments.dataset_name or any(files.values())):
        raise UsageError("no data: give --task_name, --train_file or --dataset_name")
    tables: dict[str, dict[str, Table]] = {}
    if arguments.dataset_name:
        tables = _named(arguments, plugins)
    for split, patterns in files.items():
        if patterns:
            flag = f"--{split}_file"
            found = data_files.expand(patterns, flag)
            names = _part_names(found)
            tables[split] = {
                name: read_table(file, flag, arguments)
                for name, file in zip(names, found, strict=True)
            }
    splits = {split: _examples(parts, arguments, split) for split, parts in tables.items()}
    if len({examples.second is None for examples in splits.values()}) > 1:
        kinds = ", ".join(
            f"{split} {'single sentences' if examples.second is None else 'pairs'}"
            for split, examples in splits.items()
        )
        raise DataError(
            f"the splits do not go together: {kinds}; name the columns with --sentence1_column and "
            "--sentence2_column"
        )
    if "train" in splits:
        _set_aside(splits, arguments)
    limits = {"train": "train", "validation": "eval", "test": "predict"}
    for split, examples in splits.items():
        most = getattr(arguments, f"max_{limits[split]}_samples")
        if most is not None and most < len(examples):
            splits[split] = examples.select(np.arange(most))
    recognised = {table.task for parts in tables.values() for table in parts.values()}
    task = arguments.task_name or (recognised.pop() if len(recognised) == 1 else None)
    return LabelledSplits(splits, task, None)


def _named(arguments: ClassificationArguments, plugins: Any) -> dict[str, dict[str, Table]]:
    """Load a dataset by name; MNLI has two validation and two test splits."""
    endings = GLUE[arguments.task_name].parts if arguments.task_name else ()
    wanted = [*SPLITS, *(f"{split}_{part}" for split in SPLITS[1:] for part in endings)]
    found = load_named(arguments, plugins, wanted)
    tables: dict[str, dict[str, Table]] = {}
    for name, dataset in found.items():
        split, _, part = name.partition("_")
        origin = f"--dataset_name {arguments.dataset_name}, split {name}"
        tables.setdefault(split, {})[part or name] = table_of(dataset, origin)
    return tables


def _part_names(files: Sequence[str]) -> list[str]:
    """Name files by their stems, with their folder where stems are equal."""
    paths = [PurePosixPath(file) for file in files]
    stems = [path.name.split(".")[0] for path in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{path.parent.name}_{stem}" for path, stem in zip(paths, stems, strict=True)]
    if len(set(stems)) < len(stems):
        stems = [f"{number}_{stem}" for number, stem in enumerate(stems)]
    return [re.sub(r"\W+", "_", stem) for stem in stems]


def _examples(tables: dict[str, Table], arguments: ClassificationArguments, split: str) -> Examples:
    """Put the parts of a split together."""
    whole, seen = Examples([], None, [], []), set()
    for name, table in tables.items():
        first, second, label = choose_columns(table, arguments, labelled=split != "test")
        start, count = len(whole), len(table)
        if not count:
            raise DataError(f"{table.origin} has no examples")
        seen.add(second is None)
        if len(seen) > 1:
            raise DataError(
                f"{table.origin} has {'one column' if second is None else 'two columns'} of "
                "sentences, and the file before another number; name the columns with "
                "--sentence1_column and --sentence2_column"
            )
        whole.first += _texts(table, first)
        if second is not None:
            whole.second = (whole.second or []) + _texts(table, second)
        whole.labels += _labels(table, label, arguments) if label else [None] * count
        whole.tables.append((start, table))
        whole.parts[name] = range(start, start + count)
    if len(whole.parts) == 1:
        whole.parts = {}
    return whole


def _texts(table: Table, column: str) -> list[str]:
    cells = table.columns[column]
    wrong = next(
        (i for i, cell in enumerate(cells) if not isinstance(cell, str) or SURROGATE.search(cell)),
        None,
    )
    if wrong is not None:
        found = "nothing" if cells[wrong] is None else f"{cells[wrong]!r:.80}, which is no text,"
        raise DataError(f"{table.place(wrong)} has {found} in the column '{column}'")
    return cells


def _labels(table: Table, column: str, arguments: ClassificationArguments) -> list[Any]:
    """Return labels as text without spaces around them, numbers with a fraction as they are."""
    task = GLUE.get(arguments.task_name or table.task or "")
    names = table.classes or (task.labels if task else ())
    known = task is not None or bool(table.classes)
    numbered = {str(number): name for number, name in enumerate(names)}

    def read(cell: Any) -> Any:
        if isinstance(cell, float) and math.isnan(cell):
            return None
        text = "" if cell is None else str(cell).strip()
        if not text or (known and text in ("-1", "-1.0")):  # GLUE's test labels
            return None
        if isinstance(cell, float):
            return cell
        return numbered.get(text, text)

    return [read(cell) for cell in table.columns[column]]


def _set_aside(splits: dict[str, Examples], arguments: ClassificationArguments) -> None:
    """Cut what has no split of its own off the training examples, by the hash of an example."""
    whole = splits["train"]
    places = np.array(
        [_place(whole.first[i], whole.second[i] if whole.second else "") for i in range(len(whole))]
    )
    kept = np.ones(len(whole), bool)
    for split in SPLITS[1:]:
        share = getattr(arguments, f"{split}_split_percentage")
        if split in splits or not share:
            continue
        left = np.sort(places[kept])
        count = min(max(1, round(len(whole) * share / 100)), len(left))
        taken = kept & (places <= left[count - 1])
        kept &= ~taken
        if not kept.any():
            raise DataError(
                f"the training data has {len(whole)} examples, too few to split off {share}% for "
                f"{split}; give --{split}_file or --{split}_split_percentage 0"
            )
        splits[split] = whole.select(np.flatnonzero(taken))
    if not kept.all():
        splits["train"] = whole.select(np.flatnonzero(kept))


def _place(first: str, second: str) -> float:
    """Return where an example lies between 0 and 1, always the same."""
    content = f"{first}\0{second}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little") / 2**64
