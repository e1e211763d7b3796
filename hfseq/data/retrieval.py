"""Training examples of retrieval models: their columns, labels and token rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from hfseq.data.batches import Batches, GroupedRows, derive_key
from hfseq.data.records import Records
from hfseq.errors import DataError, UsageError

#: The first of these columns contains the labels, as in sentence-transformers.
LABEL_COLUMNS = ("label", "labels", "score", "scores")
#: The labels of a loss: a number, 0 or 1, a class, or a list of numbers.
LabelKind = Literal["score", "binary", "class", "scores"]


class Columns(NamedTuple):
    """The columns of a table that are used.

    Attributes:
        texts: The text columns in order.
        label: The column of the labels, if there is one.
    """

    texts: list[str]
    label: str | None


def find_columns(records: Records, minimum: int, lists: bool = False) -> Columns:
    """Returns the columns of texts and labels.

    The columns anchor, positive and negative* are used if the first two exist. Otherwise, all text
    columns are used in the order of the file. The names have no further meaning.

    Args:
        records: The examples.
        minimum: Number of text columns that the loss requires.
        lists: Whether columns with lists of texts count as text columns.

    Raises:
        UsageError: The table has too few text columns.
    """
    table = records.tables[0]
    names = list(table.columns)
    label = next((name for name in LABEL_COLUMNS if name in names), None)

    def is_text(name: str) -> bool:
        def is_list(cell: Any) -> bool:
            return isinstance(cell, list) and any(isinstance(part, str) for part in cell)

        cells = table.columns[name][:100]
        return any(isinstance(cell, str) or (lists and is_list(cell)) for cell in cells)

    if {"anchor", "positive"} <= set(names):
        negatives = [name for name in names if name.startswith("negative")]
        return Columns(["anchor", "positive", *negatives], label)
    texts = [name for name in names if name != label and is_text(name)]
    if len(texts) < minimum:
        count = {1: "one text column is", 2: "two text columns are"}.get(
            minimum, f"{minimum} text columns are"
        )
        raise UsageError(
            f"{table.origin} has the columns {', '.join(names)}, but at least {count} "
            "required. Name them anchor, positive and (optionally) negative, or provide text "
            f"columns in this order. A column {' or '.join(LABEL_COLUMNS)} contains labels."
        )
    return Columns(texts, label)


def text_problem(name: str, text: Any) -> str | None:
    """Describes why a cell is not a text, or returns `None`."""
    if isinstance(text, str) and text.strip():
        return None
    return f"'{name}' must be a non-empty text, not {text!r:.60}"


def label_problem(
    name: str, label: Any, label_kind: LabelKind, lengths: Sequence[int] = ()
) -> str | None:
    """Describes why a cell is not a label of the expected type, or returns `None`.

    Args:
        name: Name of the column.
        label: The cell.
        label_kind: The expected type of the label.
        lengths: Allowed lengths of a list.
    """
    if label_kind == "class":
        is_class = isinstance(label, int | str) and label != ""
        return None if is_class else f"'{name}' must be a class, not {label!r:.60}"
    if label_kind == "scores":
        values = label if isinstance(label, list) else [label]
        numbers = [parse_number(value) for value in values]
        if any(number is None for number in numbers):
            return f"'{name}' must be a list of finite numbers, not {label!r:.60}"
        if lengths and len(numbers) not in lengths:
            expected = " or ".join(map(str, lengths))
            return f"'{name}' must contain {expected} numbers, not {len(numbers)}"
        return None
    number = parse_number(label)
    if number is None:
        return f"'{name}' must be a finite number, not {label!r:.60}"
    if label_kind == "binary" and number not in (0, 1):
        return f"'{name}' must be 0 or 1, not {label!r:.60}"
    return None


def parse_number(value: Any) -> float | None:
    """Returns a finite number, or `None` if the value is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def class_labels(splits: Mapping[str, Records]) -> list[Any]:
    """Returns the classes of all splits in order. Texts that are integers count as integers."""
    classes: set[Any] = set()
    for records in splits.values():
        label = find_columns(records, 2).label
        if label is not None:
            classes |= {cell for table in records.tables for cell in table.columns.get(label, ())}
    valid_classes = [value for value in classes if isinstance(value, int | str) and value != ""]
    return sorted(valid_classes, key=lambda value: (isinstance(value, str), value))


def encode_labels(
    labels: Sequence[Any], label_kind: LabelKind, classes: dict[Any, int]
) -> np.ndarray:
    """Returns valid labels as an array with one entry per row.

    Args:
        labels: Labels without problems.
        label_kind: The type of the labels.
        classes: The number of each class. New classes are added.

    Returns:
        Float32 numbers `(rows,)` or `(rows, numbers)`, or int32 class numbers `(rows,)`.

    Raises:
        DataError: The lists have different lengths.
    """
    if label_kind == "class":
        return np.array([classes.setdefault(label, len(classes)) for label in labels], np.int32)
    if label_kind != "scores":
        return np.array([float(label) for label in labels], np.float32)
    lists = [label if isinstance(label, list) else [label] for label in labels]
    if len(sizes := sorted(set(map(len, lists)))) > 1:
        raise DataError(f"the lists of scores have different lengths: {', '.join(map(str, sizes))}")
    numbers = np.array([[float(value) for value in values] for values in lists], np.float32)
    return numbers[:, 0] if numbers.shape[1] == 1 else numbers


def text_values(columns: Sequence[Sequence[str]]) -> np.ndarray:
    """Returns a hash of each text, int64 `(rows, columns)`."""

    def value(text: str) -> int:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    values = [[value(text) for text in column] for column in columns]
    return np.array(values, np.int64).T.reshape(len(columns[0]), len(columns))


#: Prefix of the arrays of queries, whose width differs from that of documents.
QUERY = "query_"


class RetrievalRows:
    """Rows of examples whose first text is a query, and whose other texts are documents.

    Queries and documents have separate widths. `fetch` returns "input_ids" and "segment_ids" of the
    documents, `(rows, documents, width)`, and those of the query with the prefix "query_",
    `(rows, 1, width)`.

    Args:
        documents: The documents of each example.
        queries: The query of each example, or `None` if there are only documents.
        arrays: Further arrays with one entry per row, by name, such as "labels".
        values: A hash of each text, `(rows, texts)`.
    """

    max_runs = 2  # a text and its padding

    def __init__(
        self,
        documents: GroupedRows,
        queries: GroupedRows | None,
        arrays: Mapping[str, np.ndarray],
        values: np.ndarray,
    ):
        self.documents, self.queries, self.arrays = documents, queries, dict(arrays)
        self.values = values

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def total_tokens(self) -> int:
        """The number of tokens of all texts, without padding."""
        queries = self.queries.total_tokens if self.queries is not None else 0
        return self.documents.total_tokens + queries

    def width(self, indices: np.ndarray) -> tuple[int, int]:
        """Returns the widths of queries and documents."""
        query_width = 0 if self.queries is None else self.queries.width(indices)
        return query_width, self.documents.width(indices)

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows."""
        query_width, document_width = width or self.width(indices)
        rows = self.documents.fetch(indices, document_width)
        if self.queries is not None:
            queries = self.queries.fetch(indices, query_width)
            rows |= {QUERY + name: array for name, array in queries.items()}
        return rows | {name: array[indices] for name, array in self.arrays.items()}


#: Maps pairs of texts to their token IDs and token types.
PairTokenizer = Callable[[Sequence[tuple[str, str]]], tuple[list[list[int]], list[list[int]]]]


class PairRows(GroupedRows):
    """Rows of a query and several documents, as tokens of pairs: `(rows, documents, width)`.

    Rows can have different numbers of documents. The array "document_mask" `(rows, documents)` is
    false for the missing ones.

    Args:
        queries: The query of each row.
        documents: The documents of each row.
        tokenize: Tokenizes pairs.
        pad: ID of the padding token.
        max_length: Maximum number of tokens per pair.
        pad_to_max_length: Whether all rows are padded to ``max_length``.
        arrays: Further arrays with one entry per row, by name.
    """

    def __init__(
        self,
        queries: Sequence[str],
        documents: Sequence[Sequence[str]],
        tokenize: PairTokenizer,
        pad: int,
        max_length: int,
        pad_to_max_length: bool,
        arrays: Mapping[str, np.ndarray],
    ):
        self.queries, self.texts, self.tokenize = queries, documents, tokenize
        self.pad = pad
        self.counts = np.array([len(texts) for texts in documents])
        pairs = zip(queries, documents, strict=True)
        ids, types = tokenize([(query, text) for query, texts in pairs for text in texts])
        offsets = np.concatenate([[0], self.counts.cumsum()])
        columns = range(int(self.counts.max()))

        def column(values: list[list[int]], number: int, missing: list[int]) -> list[list[int]]:
            return [
                values[start + number] if number < count else missing
                for start, count in zip(offsets.tolist(), self.counts.tolist(), strict=False)
            ]

        # A missing document has one token, so that it is cheap and its score is finite.
        super().__init__(
            [column(ids, number, ids[0][:1]) for number in columns],
            pad,
            max_length,
            pad_to_max_length,
            {"token_type_ids": [column(types, number, [0]) for number in columns]},
            arrays,
        )

    @property
    def values(self) -> np.ndarray:
        """A hash of each text, int64 `(rows, texts)`. Missing documents repeat the query."""
        columns = [self.queries]
        for number in range(self.size):
            pairs = zip(self.queries, self.texts, strict=True)
            columns.append([texts[number] if number < len(texts) else q for q, texts in pairs])
        return text_values(columns)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows, padded to ``width`` columns."""
        mask = np.arange(self.size) < self.counts[indices][:, None]
        return super().fetch(indices, width) | {"document_mask": mask}


class CandidateBatches(Batches):
    """Adds documents of other rows of the batch to each row, as further negatives.

    The documents are drawn at random without repetition, as a function of the seed, the step and
    the position in the batch. They follow the row's own documents.

    Args:
        batches: The batches.
        count: Number of documents to add. If the other rows of the batch have fewer documents, all
            of them are added.
    """

    def __init__(self, batches: Batches, count: int):
        rows: Any = batches.rows
        self.batches, self.rows = batches, rows
        self.batch_size, self.seed, self.steps = batches.batch_size, batches.seed, len(batches)
        self.count = min(count, (batches.batch_size - 1) * rows.size)

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the rows of a step, and whether each row is valid."""
        return self.batches.indices(step)

    def candidates(self, step: int) -> np.ndarray:
        """Returns the candidates of each row, `(batch_size, count)`.

        A candidate is the number of a document, counted over all rows of the batch. If the batch
        has too few documents, missing candidates are -1.
        """
        indices, valid = self.indices(step)
        rows: Any = self.rows
        position, number = np.nonzero(
            valid[:, None] & (np.arange(rows.size) < rows.counts[indices][:, None])
        )
        listed = position * rows.size + number
        candidates = np.full((self.batch_size, self.count), -1, np.int64)
        for row in range(self.batch_size):
            other_documents = listed[position != row]
            key = derive_key("candidates", self.seed, step, row)
            generator = np.random.Generator(np.random.Philox(key=key))
            order = generator.permutation(len(other_documents))[: self.count]
            candidates[row, : len(order)] = other_documents[order]
        return candidates

    def fetch(self, step: int, part: np.ndarray) -> dict[str, np.ndarray]:
        """Returns some rows of a step's batch, with their candidates."""
        rows: Any = self.rows
        indices, valid = self.indices(step)
        candidates = self.candidates(step)
        owners, numbers = np.divmod(np.maximum(candidates, 0), rows.size)
        # All pairs are tokenized, because the width depends on the complete batch.
        pairs = [
            (rows.queries[row], rows.texts[indices[owner]][number])
            for row, row_owners, row_numbers in zip(indices, owners, numbers, strict=True)
            for owner, number in zip(row_owners.tolist(), row_numbers.tolist(), strict=True)
        ]
        ids, types = rows.tokenize(pairs)
        longest = max(map(len, ids), default=1)
        fitting = (size for size in rows.widths if size >= longest)
        width = max(rows.width(indices), next(fitting, rows.max_length))
        arrays = rows.fetch(indices[part], width)
        shape = (self.batch_size, self.count, width)
        added = {
            "input_ids": np.full(shape, rows.pad, np.int32),
            "token_type_ids": np.zeros(shape, np.int32),
            "segment_ids": np.zeros(shape, np.int32),
        }
        flat = {name: array.reshape(-1, width) for name, array in added.items()}
        for number, (pair_ids, pair_types) in enumerate(zip(ids, types, strict=True)):
            size = min(len(pair_ids), width)
            flat["input_ids"][number, :size] = pair_ids[:size]
            flat["token_type_ids"][number, :size] = pair_types[:size]
            flat["segment_ids"][number, :size] = 1
        arrays |= {name: np.concatenate([arrays[name], added[name][part]], 1) for name in added}
        arrays["document_mask"] = np.concatenate(
            [arrays["document_mask"], candidates[part] >= 0], axis=1
        )
        return arrays | {"valid": valid[part]}
