"""Labelled sentences and pairs of sentences: where they are, what labels mean, and their rows."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hfseq.data import files
from hfseq.data.arguments import GLUE, SPLITS, ClassificationArguments
from hfseq.data.batches import IGNORE_INDEX, FieldRows
from hfseq.data.sources import cached_on_arguments, complete_splits, load_dataset_splits
from hfseq.data.tables import Label, Table, read_table
from hfseq.data.tokenizers import load_or_train, pad_token_id, save_generic, train_word_tokenizer
from hfseq.errors import DataError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)
LABEL_COLUMNS = ("label", "labels", "gold_label", "is_duplicate", "Quality", "score")
SENTENCE_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
    ("text",),
)


@dataclass
class Examples:
    """The examples of a split in the order of the data; ``second`` is None for single sentences.

    ``labels`` are as the data has them, None where there is none. ``tables`` say where row i
    stands: (first row, table). ``parts`` are ranges of rows by name, where there are several.
    """

    first: list[str]
    second: list[str] | None
    labels: list[Label]
    tables: list[tuple[int, Table]]
    parts: dict[str, range] = field(default_factory=dict)
    rows: np.ndarray | None = None  # of the tables, where not all of them are here

    @classmethod
    def read(
        cls, tables: dict[str, Table], arguments: ClassificationArguments, require_labels: bool
    ) -> Examples:
        """Put the parts of a split together; where not ``labelled`` labels may be missing."""
        whole = cls([], None, [], [])
        for name, table in tables.items():
            first, second, label = choose_columns(table, arguments, require_labels)
            start, count = len(whole), len(table)
            if not count:
                raise DataError(f"{table.origin} has no examples")
            if start and (whole.second is None) != (second is None):
                raise DataError(
                    f"{table.origin} has {'one column' if second is None else 'two columns'} of "
                    "sentences, and the file before another number; name the columns with "
                    "--sentence1_column and --sentence2_column"
                )
            whole.first += table.texts(first)
            if second is not None:
                whole.second = (whole.second or []) + table.texts(second)
            task = arguments.task_name or table.task
            whole.labels += table.labels(label, task) if label else [None] * count
            whole.tables.append((start, table))
            whole.parts[name] = range(start, start + count)
        if len(whole.parts) == 1:
            whole.parts = {}
        return whole

    def __len__(self) -> int:
        return len(self.first)

    def contents(self) -> Iterator[str]:
        """Yield what each example is, its label aside."""
        return map("\0".join, zip(self.first, self.second or repeat(""), strict=False))

    def place(self, row: int) -> str:
        """Name an example in an error."""
        row = row if self.rows is None else int(self.rows[row])
        start, table = next(item for item in reversed(self.tables) if item[0] <= row)
        return table.place(row - start)

    def select(self, rows: np.ndarray) -> Self:
        """Return some of the examples, by ascending row; parts are cut likewise."""
        bounds = {
            name: range(*np.searchsorted(rows, (part.start, part.stop)).tolist())
            for name, part in self.parts.items()
        }
        return replace(
            self,
            first=[self.first[i] for i in rows],
            labels=[self.labels[i] for i in rows],
            second=None if self.second is None else [self.second[i] for i in rows],
            parts={name: part for name, part in bounds.items() if len(part)},
            rows=rows if self.rows is None else self.rows[rows],
        )


class LabeledSplits(dict[str, Examples]):
    """The splits by name (any may be absent), and the GLUE task."""

    def __init__(self, splits: Mapping[str, Examples], task: str | None):
        super().__init__(splits)
        self.task = task


@cached_on_arguments
def load_examples(
    arguments: ClassificationArguments, plugins: Plugins | None = None
) -> LabeledSplits:
    """Load the examples that the flags ask for; loading them again gives the same object.

    A dataset name is offered to the plugins' ``load_dataset`` hook first and looked up on the Hub
    then; files of a split are read one after the other, and each is a part of its own. What has no
    split is cut off the training examples: a share by hash, equal examples on one side.
    """
    named = {split: getattr(arguments, f"{split}_file") for split in SPLITS}
    if not (arguments.dataset_name or any(named.values())):
        raise UsageError("no data: give --task_name, --train_file or --dataset_name")
    tables: dict[str, dict[str, Table]] = {}
    if arguments.dataset_name:
        # MNLI has two validation and two test splits.
        endings = GLUE[arguments.task_name].parts if arguments.task_name else ()
        wanted = [*SPLITS, *(f"{split}_{part}" for split in SPLITS[1:] for part in endings)]
        for name, dataset in load_dataset_splits(arguments, plugins, wanted).items():
            split, _, part = name.partition("_")
            origin = f"--dataset_name {arguments.dataset_name}, split {name}"
            tables.setdefault(split, {})[part or name] = table_from_dataset(dataset, origin)
    for split, patterns in named.items():
        if patterns:
            flag = f"--{split}_file"
            names = files.expand_patterns(patterns, flag)
            # Parts have the stems of files, with their folders or numbers where those are equal.
            paths = [PurePosixPath(name) for name in names]
            stems = [path.name.split(".")[0] for path in paths]
            if len(set(stems)) < len(stems):
                stems = [f"{path.parent.name}_{s}" for path, s in zip(paths, stems, strict=True)]
            if len(set(stems)) < len(stems):
                stems = [f"{number}_{stem}" for number, stem in enumerate(stems)]
            tables[split] = {
                re.sub(r"\W+", "_", stem): read_table(name, flag, arguments)
                for stem, name in zip(stems, names, strict=True)
            }
    recognised = {table.task for parts in tables.values() for table in parts.values()}
    task = arguments.task_name or (recognised.pop() if len(recognised) == 1 else None)
    read = {
        split: Examples.read(parts, arguments, require_labels=split != "test")
        for split, parts in tables.items()
    }
    splits = LabeledSplits(read, task)
    if len({examples.second is None for examples in splits.values()}) > 1:
        kinds = ", ".join(
            f"{split} {'single sentences' if examples.second is None else 'pairs'}"
            for split, examples in splits.items()
        )
        raise DataError(
            f"the splits do not go together: {kinds}; name the columns with --sentence1_column and "
            "--sentence2_column"
        )
    complete_splits(splits, arguments)
    return splits


def table_from_dataset(dataset: Dataset, origin: str) -> Table:
    """Return a ``datasets.Dataset`` as a table; labels that have names are told by them."""
    features: Mapping[str, Any] = dataset.features or {}
    classes = (getattr(features.get(name), "names", None) for name in LABEL_COLUMNS)
    columns = {name: list(dataset[name]) for name in dataset.column_names}
    return Table(columns, origin, classes=tuple(next(filter(None, classes), ())))


def choose_columns(
    table: Table, arguments: ClassificationArguments, require_labels: bool
) -> tuple[str, str | None, str | None]:
    """Return the columns of first sentence, second sentence and label; either may be None."""
    names, task = list(table.columns), GLUE.get(arguments.task_name or table.task or "")
    label = table.requested_column("label_column", arguments.label_column, required=require_labels)
    if label is None and arguments.label_column is None:
        label = next((name for name in LABEL_COLUMNS if name in names), None)
        if label is None and require_labels:
            raise UsageError(
                f"{table.origin} has no column 'label' but {', '.join(names)}: say which one is "
                "the label with --label_column NAME (a number for a file without a header)"
            )
    first = table.requested_column("sentence1_column", arguments.sentence1_column)
    second = table.requested_column("sentence2_column", arguments.sentence2_column)
    if first is None:
        # By their usual names, or what else there is of text.
        texts = tuple(
            name
            for name, cells in table.columns.items()
            if name not in (label, second) and all(isinstance(cell, str) for cell in cells[:100])
        )
        few = [texts] if len(texts) in (1, 2) and len(names) <= 3 else []
        for group in (*([task.sentence_columns] if task else []), *SENTENCE_COLUMNS, *few):
            if all(name in names and name not in (label, second) for name in group):
                first, *others = group
                second = second or next(iter(others), None)
                break
        else:
            raise UsageError(
                f"{table.origin} has no column 'sentence' or 'text' but {', '.join(names)}: say "
                "which holds the text with --sentence1_column (and --sentence2_column for pairs)"
            )
    elif second is None and task and len(task.sentence_columns) == 2:
        second = task.sentence_columns[1] if task.sentence_columns[1] in names else None
    if task and len(task.sentence_columns) == 2 and second is None:
        raise DataError(
            f"--task_name {arguments.task_name} compares two sentences ({task.sentence_columns[0]}, "
            f"{task.sentence_columns[1]}), and {table.origin} has one: its columns are "
            f"{', '.join(names)}; give --sentence2_column"
        )
    chosen = [name for name in (first, second, label) if name is not None]
    if twice := next((name for name in chosen if chosen.count(name) > 1), None):
        raise UsageError(
            f"{table.origin}: the column '{twice}' is chosen for two of first sentence, second "
            "sentence and label; look at --sentence1_column, --sentence2_column and --label_column"
        )
    return first, second, label


FRACTION = re.compile(r"\s*[-+]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)\s*")


def is_regression(
    splits: LabeledSplits, arguments: ClassificationArguments, config: PreTrainedConfig
) -> bool:
    """Tell whether numbers are predicted: as the flag, the task, the data or the model says."""
    if arguments.task_type:
        return arguments.task_type == "regression"
    if splits.task:
        return not GLUE[splits.task].labels
    if "train" not in splits:
        return getattr(config, "problem_type", None) == "regression"
    labels = [label for label in splits["train"].labels if label is not None]
    fractions = [isinstance(x, float) or bool(FRACTION.fullmatch(x)) for x in labels]
    return any(fractions) and all(
        fraction or re.fullmatch(r"[-+]?\d+", str(label).strip())
        for fraction, label in zip(fractions, labels, strict=True)
    )


def class_names(splits: LabeledSplits, config: PreTrainedConfig) -> list[str]:
    """Return the classes in the order of their numbers.

    They are those of the task, of the data set, or of the training labels (numbers in their order,
    else by the alphabet). A model that has names for all of them keeps its own order.
    """
    labels = splits["train"].labels if "train" in splits else []
    present = {class_name(label): None for label in labels if label is not None}
    classes = next((c for e in splits.values() if (c := e.tables[0][1].classes)), ())
    names = list(GLUE[splits.task].labels if splits.task else ()) or list(classes)
    names = names or sort_labels(present)
    known = config_labels(config)
    default = all(re.fullmatch(r"LABEL_\d+", name) for name in known)
    if not names:  # an evaluation alone: the model knows
        return list(map(str, range(len(known)))) if default else known
    if "train" in splits:
        if len(present) < 2:
            only = f"the label '{next(iter(present))}'" if present else "no label"
            raise DataError(
                f"every training example has {only}: there is nothing to tell apart; look at "
                "--label_column, or give examples of at least two classes"
            )
    return names if default or not set(names) <= set(known) else known


def config_labels(config: PreTrainedConfig) -> list[str]:
    """Return the names of a model's classes in the order of their numbers."""
    names = sorted((int(number), str(name)) for number, name in (config.id2label or {}).items())
    return [name for _, name in names]


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: whole numbers in their order, others by the alphabet."""
    names = set(labels)
    numbers = all(re.fullmatch(r"[-+]?\d{1,99}", name) for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if numbers else None)


def class_name(label: str | float) -> str:
    """Return the name of a class; 1.0 and 1 are one class."""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()


class LabelEncoder:
    """What the labels of the examples are to the model: classes by number, or numbers.

    ``names`` are the classes in the order of their numbers; None for regression. With
    ``by_number`` the data may have the numbers instead.
    """

    def __init__(self, names: Sequence[str] | None, by_number: bool = False):
        self.names = None if names is None else list(names)
        self._numbers = {name: number for number, name in enumerate(self.names or ())}
        if by_number:
            self._numbers = {str(i): i for i in self._numbers.values()} | self._numbers

    def encode_labels(self, examples: Examples, split: str) -> np.ndarray:
        """Return int32 classes (-100 where there is none) or float32 numbers (NaN), (examples,)."""
        none, kind = (math.nan, np.float32) if self.names is None else (IGNORE_INDEX, np.int32)
        values = np.full(len(examples), none, kind)
        for row, label in enumerate(examples.labels):
            if label is not None:
                values[row] = self._number(label, examples, row)
            elif split != "test":
                raise DataError(f"{examples.place(row)} has no label")
        return values

    def _number(self, label: str | float, examples: Examples, row: int) -> float:
        if self.names is None:
            value = math.nan
            with contextlib.suppress(TypeError, ValueError):
                value = float(label)
            if not math.isfinite(value):
                raise DataError(
                    f"{examples.place(row)}: the label {label!r} is no number, which regression "
                    "needs; correct it, or give --task_type classification"
                )
            if abs(value) > float(np.finfo(np.float32).max):
                raise DataError(
                    f"{examples.place(row)}: the label {label!r} is beyond float32, in which "
                    "models compute; scale the labels"
                )
            return value
        name = class_name(label)
        if name not in self._numbers:
            raise DataError(
                f"{examples.place(row)}: the label '{name}' is not one of the classes that the "
                f"model learns, {', '.join(self.names[:20])}; correct it, or add training examples "
                "of it"
            )
        return self._numbers[name]


BATCH = 4096  # examples a call of the tokenizer


class ExampleRows(FieldRows):
    """Row i is example i, cut to ``max_length`` tokens (the longer sentence of a pair first).

    A batch is as wide as its longest row needs, in one of four widths that end with the longest
    row's, so that a step compiles four times at most; with ``pad_to_max_length`` there is one,
    ``max_length``. Rows have "labels" (rows,) and, with ``types``, "token_type_ids", 1 in a second
    sentence.
    """

    def __init__(
        self,
        examples: Examples,
        labels: np.ndarray,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        pad_to_max_length: bool = False,
        token_type_ids: bool = False,
    ):
        ids, kinds, self.truncated = tokenize_examples(examples, tokenizer, max_length)
        fields = {"token_type_ids": (kinds, 0)} if token_type_ids else {}
        super().__init__(
            ids, pad_token_id(tokenizer), max_length, fields, {"labels": labels}, pad_to_max_length
        )


def tokenize_examples(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[list[int]], list[list[int]], int]:
    """Return ids and types of each example's tokens, and how many examples were cut.

    An example without a token gets one, unknown or padding: attention needs something to look at.
    """
    pair = examples.second is not None
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length <= special + pair:
        raise UsageError(
            f"--max_seq_length {max_length} leaves no room for text: the tokenizer adds {special} "
            f"special tokens to {'a pair' if pair else 'a sentence'}"
        )
    unknown = tokenizer.unk_token_id
    nothing = [pad_token_id(tokenizer) if unknown is None else unknown]
    ids: list[list[int]] = []
    kinds: list[list[int]] = []
    cut = 0
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.enable_truncation(max_length)
    rows: Iterable[tuple[list[int], list[int], bool]]
    for start in range(0, len(examples), BATCH):
        first = examples.first[start : start + BATCH]
        second = examples.second and examples.second[start : start + BATCH]
        if backend is not None:
            texts = list(zip(first, second, strict=True)) if second else first
            encodings = backend.encode_batch_fast(texts)
            rows = [(e.ids, e.type_ids, bool(e.overflowing)) for e in encodings]
        else:
            encoded = tokenizer(
                first,
                second,
                truncation="longest_first",
                max_length=max_length,
                return_token_type_ids=True,
                return_overflowing_tokens=False,
                verbose=False,
            )
            # A tokenizer in Python does not say what it cut.
            longest = [len(row) == max_length for row in encoded["input_ids"]]
            rows = zip(encoded["input_ids"], encoded["token_type_ids"], longest, strict=True)
        for row, kind, longer in rows:
            ids.append(row or nothing)
            kinds.append(kind if row else [0])
            cut += longer
    if backend is not None:
        backend.no_truncation()
    return ids, kinds, cut


def load_or_train_word_tokenizer(
    folder: Path, arguments: ClassificationArguments, load: Callable[[], Mapping[str, Examples]]
) -> PreTrainedTokenizerBase:
    """Return the vocabulary of words in ``folder``; the first process that finds none makes it."""

    def make(examples: Examples, temporary: Path) -> None:
        texts = [*examples.first, *(examples.second or [])]
        save_generic(train_word_tokenizer(texts, arguments.vocab_size), temporary)

    return load_or_train(folder, "examples", load, make)
