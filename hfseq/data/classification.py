"""Data of text classification: loads labeled sentences and pairs, and encodes their labels."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np

from hfseq.data import files
from hfseq.data.arguments import GLUE, SPLITS, ClassificationArguments
from hfseq.data.batches import IGNORE_INDEX, FieldRows
from hfseq.data.sources import cached_on_arguments, complete_splits, load_dataset_splits
from hfseq.data.tables import Label, Table, classes_by_column, read_table
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
    """The examples of a split in the order of the data.

    Attributes:
        first: The (first) sentences.
        second: The second sentences, or `None` for single sentences.
        labels: Labels as stored in the data, `None` where missing.
        tables: The tables that contain the examples, each with the index of its first row. Used to
            describe the location of an example in messages.
        parts: The named parts of the split and their ranges of examples, e.g. MNLI's "matched" and
            "mismatched". Empty if the split is not divided into parts.
        rows: The row index of each example in the concatenated tables, or `None` if all rows are
            included.
        classes: Class names by class id, if the data contains them.
    """

    first: list[str]
    second: list[str] | None
    labels: list[Label]
    tables: list[tuple[int, Table]]
    parts: dict[str, range] = field(default_factory=dict)
    rows: np.ndarray | None = None
    classes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls, tables: dict[str, Table], arguments: ClassificationArguments, require_labels: bool
    ) -> Examples:
        """Concatenates the tables of a split.

        Args:
            tables: The tables by name. If there are several, each one is a part of the split.
            arguments: The data flags.
            require_labels: Whether a missing label column is an error.

        Raises:
            DataError: A table is empty, or the tables have different numbers of sentence columns.
        """
        combined = cls([], None, [], [])
        for name, table in tables.items():
            first, second, label = choose_columns(table, arguments, require_labels)
            start, count = len(combined), len(table)
            if not count:
                raise DataError(f"{table.origin} contains no examples")
            if start and (combined.second is None) != (second is None):
                raise DataError(
                    f"{table.origin} has {'one column' if second is None else 'two columns'} of "
                    "sentences, but the previous files have a different number; specify the "
                    "columns with --sentence1_column and --sentence2_column"
                )
            combined.first += table.texts(first)
            if second is not None:
                combined.second = (combined.second or []) + table.texts(second)
            task = arguments.task_name or table.task
            combined.labels += table.labels(label, task) if label else [None] * count
            combined.classes = combined.classes or table.classes.get(label or "", ())
            combined.tables.append((start, table))
            combined.parts[name] = range(start, start + count)
        if len(combined.parts) == 1:
            combined.parts = {}
        return combined

    def __len__(self) -> int:
        return len(self.first)

    def contents(self) -> Iterator[str]:
        """Yields the text of each example, without its label."""
        return map("\0".join, zip(self.first, self.second or repeat(""), strict=False))

    def place(self, row: int) -> str:
        """Describes the location of an example for messages."""
        row = row if self.rows is None else int(self.rows[row])
        start, table = next(item for item in reversed(self.tables) if item[0] <= row)
        return table.place(row - start)

    def select(self, rows: np.ndarray) -> Self:
        """Returns the examples with the given indices, which must be in ascending order.

        Parts without any selected example are removed.
        """
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
    """A dictionary of the examples of each split.

    Args:
        splits: Examples by split name. Any split may be absent.
        task: The GLUE task, or `None` for other data.
    """

    def __init__(self, splits: Mapping[str, Examples], task: str | None):
        super().__init__(splits)
        self.task = task


@cached_on_arguments
def load_examples(
    arguments: ClassificationArguments, plugins: Plugins | None = None
) -> LabeledSplits:
    """Loads the examples that the flags specify.

    A dataset name is passed to the plugins' `load_dataset` hook first, and looked up on the Hub if
    no plugin handles it. The files of a split are concatenated, and each file is a named part. If
    the validation or test split is missing, it is taken from the training examples. These are
    selected by the hash of their content, so that equal examples are in the same split. Repeated
    calls with the same `arguments` object return the same result.

    Raises:
        UsageError: The flags specify no data.
        DataError: The data cannot be read, or the splits do not match.
    """
    patterns_by_split = {split: getattr(arguments, f"{split}_file") for split in SPLITS}
    if not (arguments.dataset_name or any(patterns_by_split.values())):
        raise UsageError("no data: give --task_name, --train_file or --dataset_name")
    tables: dict[str, dict[str, Table]] = {}
    if arguments.dataset_name:
        # MNLI has two validation and two test splits.
        endings = GLUE[arguments.task_name].parts if arguments.task_name else ()
        split_names = [*SPLITS, *(f"{split}_{part}" for split in SPLITS[1:] for part in endings)]
        for name, dataset in load_dataset_splits(arguments, plugins, split_names).items():
            split, _, part = name.partition("_")
            origin = f"--dataset_name {arguments.dataset_name}, split {name}"
            tables.setdefault(split, {})[part or name] = table_from_dataset(dataset, origin)
    for split, patterns in patterns_by_split.items():
        if patterns:
            flag = f"--{split}_file"
            names = files.expand_patterns(patterns, flag)
            # Parts are named after their files. If the names are not unique, the directory or a
            # number is added.
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
        sentence_counts = ", ".join(
            f"{split} {'single sentences' if examples.second is None else 'pairs'}"
            for split, examples in splits.items()
        )
        raise DataError(
            f"the splits have different numbers of sentences: {sentence_counts}; specify the "
            "columns with --sentence1_column and --sentence2_column"
        )
    complete_splits(splits, arguments)
    return splits


def table_from_dataset(dataset: Dataset, origin: str) -> Table:
    """Converts a `datasets.Dataset` to a table, with the class names of its columns."""
    columns = {name: list(dataset[name]) for name in dataset.column_names}
    return Table(columns, origin, classes=classes_by_column(dataset.features or {}))


def choose_columns(
    table: Table, arguments: ClassificationArguments, require_labels: bool
) -> tuple[str, str | None, str | None]:
    """Returns the columns of the first sentence, the second sentence and the label.

    The last two are `None` if the table does not have them.

    Raises:
        UsageError: No column matches, or one column has two roles.
        DataError: The task compares two sentences but the table has one.
    """
    names, task = list(table.columns), GLUE.get(arguments.task_name or table.task or "")
    label = table.requested_column("label_column", arguments.label_column, required=require_labels)
    if label is None and arguments.label_column is None:
        label = next((name for name in LABEL_COLUMNS if name in names), None)
        if label is None and require_labels:
            raise UsageError(
                f"{table.origin} has no column 'label', only {', '.join(names)}: specify the "
                "label with --label_column NAME (or its number, for a file without a header)"
            )
    first = table.requested_column("sentence1_column", arguments.sentence1_column)
    second = table.requested_column("sentence2_column", arguments.sentence2_column)
    if first is None:
        # Columns with common names, otherwise the text columns of a table with few columns.
        texts = tuple(
            name
            for name, cells in table.columns.items()
            if name not in (label, second) and all(isinstance(cell, str) for cell in cells[:100])
        )
        remaining = [texts] if len(texts) in (1, 2) and len(names) <= 3 else []
        for group in (*([task.sentence_columns] if task else []), *SENTENCE_COLUMNS, *remaining):
            if all(name in names and name not in (label, second) for name in group):
                first, *second_column = group
                second = second or next(iter(second_column), None)
                break
        else:
            raise UsageError(
                f"{table.origin} has no column 'sentence' or 'text', only {', '.join(names)}: "
                "specify the text with --sentence1_column (and --sentence2_column for pairs)"
            )
    elif second is None and task and len(task.sentence_columns) == 2:
        second = task.sentence_columns[1] if task.sentence_columns[1] in names else None
    if task and len(task.sentence_columns) == 2 and second is None:
        raise DataError(
            f"--task_name {arguments.task_name} compares two sentences "
            f"({task.sentence_columns[0]}, {task.sentence_columns[1]}), but {table.origin} has "
            f"one; its columns are {', '.join(names)}. Specify the second one with "
            "--sentence2_column"
        )
    role_columns = [name for name in (first, second, label) if name is not None]
    if repeated := next((name for name in role_columns if role_columns.count(name) > 1), None):
        raise UsageError(
            f"{table.origin}: the column '{repeated}' cannot have two roles; choose different "
            "columns with --sentence1_column, --sentence2_column and --label_column"
        )
    return first, second, label


FRACTION = re.compile(r"\s*[-+]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)\s*")


SCORES = {
    "decimal commas": re.compile(r"\s*[-+]?\d+,\d+\s*"),
    "integers": re.compile(r"\s*[-+]?\d+\s*"),
}
#: Problem types of Transformers' configurations.
REGRESSION: Final = "regression"
SINGLE_LABEL: Final = "single_label_classification"
MULTI_LABEL: Final = "multi_label_classification"
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


def problem_type(
    splits: LabeledSplits, arguments: ClassificationArguments, config: PreTrainedConfig
) -> ProblemType:
    """Returns the problem type of the labels, as defined by the configurations of Transformers.

    If the labels are lists, the problem is multi-label classification. Otherwise the first of these
    that is available determines the type: `--task_type`, the GLUE task, the training labels, and
    the configuration of the model.

    Raises:
        DataError: The labels are lists in some of the splits only, labels are lists although
            `--task_type` is set, or labels are numbers with decimal commas.
    """
    labels = (
        [label for label in splits["train"].labels if label is not None]
        if "train" in splits
        else []
    )
    has_lists = {
        split: any(isinstance(label, tuple) for label in examples.labels)
        for split, examples in splits.items()
        if any(label is not None for label in examples.labels)
    }
    if any(has_lists.values()):
        if arguments.task_type or not all(has_lists.values()):
            other = next((split for split, lists in has_lists.items() if not lists), None)
            conflict = (
                f"--task_type {arguments.task_type} requires"
                if other is None
                else f"the {other} split has"
            )
            raise DataError(
                "the labels are lists, which means multi-label classification, but "
                f"{conflict} one label per example: use lists in all splits, without --task_type"
            )
        return MULTI_LABEL
    if arguments.task_type:
        return REGRESSION if arguments.task_type == "regression" else SINGLE_LABEL
    if splits.task:
        return SINGLE_LABEL if GLUE[splits.task].labels else REGRESSION
    if not labels:
        return getattr(config, "problem_type", None) or SINGLE_LABEL
    is_fraction = [isinstance(x, float) or bool(FRACTION.fullmatch(str(x))) for x in labels]
    are_numbers = all(
        fraction or SCORES["integers"].fullmatch(str(label))
        for fraction, label in zip(is_fraction, labels, strict=True)
    )
    if any(is_fraction) and are_numbers:
        logger.info(
            "training a regression model, because the labels are numbers such as %s; for classes "
            "use --task_type classification",
            labels[is_fraction.index(True)],
        )
        return REGRESSION
    if all(SCORES["decimal commas"].fullmatch(str(label)) for label in labels):
        raise DataError(
            f"the labels are numbers with a decimal comma, e.g. {labels[0]!r}: write "
            f"{str(labels[0]).replace(',', '.')} for regression, or use --task_type classification"
        )
    return SINGLE_LABEL


def warn_about_classes(names: Sequence[str], num_examples: int) -> None:
    """Logs a warning if class names differ in case only, or if there are too many classes.

    There are too many if there is more than one class per two examples.
    """
    by_folded_name: dict[str, str] = {}
    for name in names:
        other = by_folded_name.setdefault(name.casefold(), name)
        if other != name:
            logger.warning(
                "the classes %r and %r differ in upper and lower case only; correct the labels if "
                "they are the same class",
                other,
                name,
            )
    if len(names) > 10 and 2 * len(names) > num_examples:
        logger.warning(
            "%d training examples have %d different labels, e.g. %r; check --label_column, or use "
            "--task_type regression for numbers",
            num_examples,
            len(names),
            names[0],
        )


def class_names(splits: LabeledSplits, config: PreTrainedConfig) -> list[str]:
    """Returns the class names, ordered by class id.

    The names come from the GLUE task, otherwise from the dataset, otherwise from the training
    labels. Training labels are sorted as numbers if all of them are integers, otherwise
    alphabetically. If the configuration of the model already contains all of the names, the names
    and the order of the configuration are used.

    Raises:
        DataError: The training examples have fewer than two classes.
    """
    labels = splits["train"].labels if "train" in splits else []
    single_labels = (
        entry
        for label in labels
        if label is not None
        for entry in (label if isinstance(label, tuple) else (label,))
    )
    present = {class_name(label): None for label in single_labels}
    classes = next((examples.classes for examples in splits.values() if examples.classes), ())
    names = list(GLUE[splits.task].labels if splits.task else ()) or list(classes)
    if not names:
        names = sort_labels(present)
        warn_about_classes(names, len(labels))
    config_names = config_labels(config)
    default = all(re.fullmatch(r"LABEL_\d+", name) for name in config_names)
    if not names:  # evaluation only: use the classes of the model
        return list(map(str, range(len(config_names)))) if default else config_names
    if "train" in splits:
        if len(present) < 2:
            only = f"the label '{next(iter(present))}'" if present else "no label"
            raise DataError(
                f"every training example has {only}, but classification requires at least two "
                "classes; check --label_column, or add examples of other classes"
            )
    return names if default or not set(names) <= set(config_names) else config_names


def config_labels(config: PreTrainedConfig) -> list[str]:
    """Returns the class names of a model configuration, ordered by class id.

    Classes without a name are called LABEL_0 and so on, as in Transformers.
    """
    names = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    return [names.get(number, f"LABEL_{number}") for number in range(len(names))]


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Returns the distinct labels, sorted as integers if possible."""
    names = set(labels)
    numbers = all(re.fullmatch(r"[-+]?\d{1,99}", name) for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if numbers else None)


def class_name(label: Label) -> str:
    """Returns the class name of a label. The labels 1.0 and 1 are the same class."""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()


class LabelEncoder:
    """Converts labels to arrays: class ids, numbers for regression, or 0 and 1 for each class.

    Args:
        names: Class names, ordered by class id. `None` for regression.
        by_number: Whether the data may contain class ids instead of class names.
        multi_label: Whether each label is a tuple of class names (multi-label classification).
    """

    def __init__(
        self, names: Sequence[str] | None, by_number: bool = False, multi_label: bool = False
    ):
        self.names, self.multi_label = None if names is None else list(names), multi_label
        self._numbers = {name: number for number, name in enumerate(self.names or ())}
        if by_number:
            self._numbers = {str(i): i for i in self._numbers.values()} | self._numbers

    def encode_labels(self, examples: Examples, split: str) -> np.ndarray:
        """Returns the labels of a split as an array.

        Returns:
            One of these arrays:

            - Single-label classification: class ids, int32 `(examples,)`. Missing labels are
              `IGNORE_INDEX`.
            - Regression: numbers, float32 `(examples,)`. Missing labels are NaN.
            - Multi-label classification: float32 `(examples, classes)`, 1 for the classes of an
              example and 0 for other classes. Rows without a label are NaN.

        Raises:
            DataError: A label is unknown or not a number, or is missing in a split other than test.
        """
        is_number = self.names is None or self.multi_label
        missing, dtype = (math.nan, np.float32) if is_number else (IGNORE_INDEX, np.int32)
        shape = (len(examples), len(self.names or ())) if self.multi_label else len(examples)
        values = np.full(shape, missing, dtype)
        for row, label in enumerate(examples.labels):
            if label is None:
                if split != "test":
                    raise DataError(f"{examples.place(row)} has no label")
            elif self.multi_label:
                entries = label if isinstance(label, tuple) else (label,)
                values[row] = 0
                values[row, [self._class_id(entry, examples, row) for entry in entries]] = 1
            elif self.names is None:
                values[row] = self._number(label, examples, row)
            else:
                values[row] = self._class_id(label, examples, row)
        return values

    def _number(self, label: Label, examples: Examples, row: int) -> float:
        value = math.nan
        with contextlib.suppress(TypeError, ValueError):
            value = float(label)  # type: ignore[arg-type]
        if not math.isfinite(value):
            raise DataError(
                f"{examples.place(row)}: the label {label!r} is not a number, but "
                "regression requires numbers; correct it, or use --task_type classification"
            )
        if abs(value) > float(np.finfo(np.float32).max):
            raise DataError(
                f"{examples.place(row)}: the label {label!r} exceeds the range of float32; "
                "scale the labels"
            )
        return value

    def _class_id(self, label: Label, examples: Examples, row: int) -> int:
        name = class_name(label)
        if name not in self._numbers:
            raise DataError(
                f"{examples.place(row)}: the label '{name}' is not one of the model's classes, "
                f"{', '.join((self.names or [])[:20])}; correct it, or add training examples with "
                "this label"
            )
        return self._numbers[name]


BATCH = 4096  # examples per call of the tokenizer


class ExampleRows(FieldRows):
    """Rows of tokenized examples, one example per row, truncated to `max_length` tokens.

    In sentence pairs, tokens are removed from the longer sentence first.

    A batch is as wide as its longest row, rounded up to one of at most four widths, so that the
    training step is compiled at most four times. The largest width fits the longest example. With
    `pad_to_max_length`, all batches are `max_length` wide.

    The rows have the additional array "labels". With `token_type_ids`, they also have
    "token_type_ids", which are 1 for the tokens of second sentences.

    Args:
        examples: The examples.
        labels: The labels from `LabelEncoder.encode_labels`.
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens per example.
        pad_to_max_length: Whether to pad all batches to `max_length`.
        token_type_ids: Whether the rows include "token_type_ids".

    Attributes:
        truncated: Number of truncated examples.
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
        ids, type_ids, self.truncated = tokenize_examples(examples, tokenizer, max_length)
        fields = {"token_type_ids": (type_ids, 0)} if token_type_ids else {}
        super().__init__(
            ids, pad_token_id(tokenizer), max_length, fields, {"labels": labels}, pad_to_max_length
        )


def tokenize_examples(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokenizes examples.

    If an example has no token at all, the unknown token (or otherwise the padding token) takes its
    place, because attention needs at least one token to attend to.

    Args:
        examples: The examples.
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens per example.

    Returns:
        Token ids and token type ids of each example, and the number of truncated examples.

    Raises:
        UsageError: `max_length` leaves no space for text.
    """
    pair = examples.second is not None
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if max_length <= special + pair:
        raise UsageError(
            f"--max_seq_length {max_length} leaves no space for text: the tokenizer adds "
            f"{special} special tokens to {'a pair' if pair else 'a sentence'}"
        )
    unknown = tokenizer.unk_token_id
    fallback_ids = [pad_token_id(tokenizer) if unknown is None else unknown]
    ids: list[list[int]] = []
    token_type_ids: list[list[int]] = []
    num_truncated = 0
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
            # Python tokenizers do not report truncation.
            longest = [len(row) == max_length for row in encoded["input_ids"]]
            rows = zip(encoded["input_ids"], encoded["token_type_ids"], longest, strict=True)
        for row, row_types, longer in rows:
            ids.append(row or fallback_ids)
            token_type_ids.append(row_types if row else [0])
            num_truncated += longer
    if backend is not None:
        backend.no_truncation()
    return ids, token_type_ids, num_truncated


def load_or_train_word_tokenizer(
    folder: Path, arguments: ClassificationArguments, load: Callable[[], Mapping[str, Examples]]
) -> PreTrainedTokenizerBase:
    """Loads the word tokenizer in `folder`, or trains and saves it if it does not exist.

    If several processes call this function, one of them trains the tokenizer.

    Args:
        folder: Directory of the tokenizer.
        arguments: The data flags, for the vocabulary size.
        load: Function that returns the splits. Called only if a tokenizer is trained.
    """

    def train(examples: Examples, temporary: Path) -> None:
        texts = [*examples.first, *(examples.second or [])]
        save_generic(train_word_tokenizer(texts, arguments.vocab_size), temporary)

    return load_or_train(folder, "examples", load, train)
