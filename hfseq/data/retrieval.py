"""Training data of retrieval models: selects columns, checks labels, and creates rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np

from hfseq.data.batches import Batches, GroupedRows, derive_key
from hfseq.data.records import Records
from hfseq.errors import DataError, UsageError

#: Names of label columns. As in sentence-transformers, the first of these that a table has is used.
LABEL_COLUMNS = ("label", "labels", "score", "scores")
#: The types of labels: a number ("score"), 0 or 1 ("binary"), a class, or a list of numbers
#: ("scores").
LabelKind = Literal["score", "binary", "class", "scores"]


class Columns(NamedTuple):
    """The columns that are read from a table.

    Attributes:
        texts: Names of the text columns in order. The first contains the query.
        label: Name of the column with the labels, or `None`.
    """

    texts: list[str]
    label: str | None


def find_columns(records: Records, minimum: int, lists: bool = False) -> Columns:
    """Selects the columns with texts and labels.

    If a table has the columns "anchor" and "positive", the text columns are these and all columns
    whose names start with "negative". Otherwise, all columns with texts are used in the order of
    the file, whatever their names are.

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
            "columns with other names in this order. A column with labels must be named "
            f"{', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}."
        )
    return Columns(texts, label)


def text_problem(name: str, text: Any) -> str | None:
    """Describes why a cell does not contain a text, or returns `None` if it does."""
    if isinstance(text, str) and text.strip():
        return None
    return f"'{name}' must be a non-empty text, not {text!r:.60}"


def label_problem(
    name: str, label: Any, label_kind: LabelKind, lengths: Sequence[int] = ()
) -> str | None:
    """Describes why a cell does not contain a label of the expected type.

    Args:
        name: Name of the column.
        label: The content of the cell.
        label_kind: The expected type of the label.
        lengths: Allowed lengths of a list of numbers. Empty for any length.

    Returns:
        The problem, or `None` for a valid label.
    """
    if label_kind == "class":
        is_class = isinstance(label, int | str) and label != ""
        if is_class:
            return None
        return f"'{name}' must be a class (an integer or a text), not {label!r:.60}"
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
    """Converts a value to a number. Returns `None` if this is impossible or the number infinite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def class_labels(splits: Mapping[str, Records]) -> list[Any]:
    """Returns the classes in the label columns of all splits, sorted. Integers precede texts."""
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
    """Converts labels to an array with one entry per row.

    Args:
        labels: Labels for which `label_problem` has found no problem.
        label_kind: The type of the labels.
        classes: The ID of each class. New classes are added.

    Returns:
        Float32 numbers, `(rows,)` or `(rows, numbers)`, or int32 class IDs, `(rows,)`.

    Raises:
        DataError: The labels are lists of different lengths.
    """
    if label_kind == "class":
        return np.array([classes.setdefault(label, len(classes)) for label in labels], np.int32)
    if label_kind != "scores":
        return np.array([float(label) for label in labels], np.float32)
    lists = [label if isinstance(label, list) else [label] for label in labels]
    if len(sizes := sorted(set(map(len, lists)))) > 1:
        raise DataError(
            "the lists of scores in the label column must have the same length, but have the "
            f"different lengths {', '.join(map(str, sizes))}"
        )
    numbers = np.array([[float(value) for value in values] for values in lists], np.float32)
    return numbers[:, 0] if numbers.shape[1] == 1 else numbers


def text_values(columns: Sequence[Sequence[str]]) -> np.ndarray:
    """Returns a hash of each text, int64 `(rows, columns)`."""

    def value(text: str) -> int:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    values = [[value(text) for text in column] for column in columns]
    return np.array(values, np.int64).T.reshape(len(columns[0]), len(columns))


#: Prefix of the names of arrays with queries. Queries and documents are separate arrays, because
#: their widths differ.
QUERY = "query_"


class RetrievalRows:
    """Rows of examples whose first text is a query, and whose other texts are documents.

    Queries and documents have separate widths. `fetch` returns the arrays "input_ids" and
    "segment_ids" for documents, `(rows, documents, width)`. For queries, it returns
    "query_input_ids" and "query_segment_ids", `(rows, 1, query width)`.

    Args:
        documents: The tokens of the documents of each example.
        queries: The tokens of the query of each example, or `None` if there are only documents.
        arrays: Further arrays with one entry per row, by name, such as "labels".
        values: A hash of each text, `(rows, texts)`.
    """

    max_runs = 2  # the segments of a text and of its padding

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
        """Returns the widths of queries and documents in a batch of these rows."""
        query_width = 0 if self.queries is None else self.queries.width(indices)
        return query_width, self.documents.width(indices)

    def fetch(
        self, indices: np.ndarray, width: tuple[int, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of some rows."""
        query_width, document_width = width or self.width(indices)
        rows = self.documents.fetch(indices, document_width)
        if self.queries is not None:
            queries = self.queries.fetch(indices, query_width)
            rows |= {QUERY + name: array for name, array in queries.items()}
        return rows | {name: array[indices] for name, array in self.arrays.items()}


#: A function that returns the token IDs and the token type IDs of pairs of texts.
PairTokenizer = Callable[[Sequence[tuple[str, str]]], tuple[list[list[int]], list[list[int]]]]


class PairRows(GroupedRows):
    """Rows with a query and several documents for cross-encoders.

    Each document is tokenized together with its query. Arrays have the shape `(rows, documents,
    width)`. Rows can have different numbers of documents: the array "document_mask", `(rows,
    documents)`, is false where a row has fewer documents than others.

    Args:
        queries: The query of each row.
        documents: The documents of each row.
        tokenize: Function that tokenizes pairs.
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

        # A missing document is represented by one token, so its score is finite and it adds little
        # to the cost of the batch.
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
        """A hash of each text, int64 `(rows, texts)`. A missing document has the query's hash."""
        columns = [self.queries]
        for number in range(self.size):
            pairs = zip(self.queries, self.texts, strict=True)
            columns.append([texts[number] if number < len(texts) else q for q, texts in pairs])
        return text_values(columns)

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of some rows, padded to ``width`` tokens."""
        mask = np.arange(self.size) < self.counts[indices][:, None]
        return super().fetch(indices, width) | {"document_mask": mask}


class CandidateBatches(Batches):
    """Batches in which documents of other rows are added to each row as negatives.

    The added documents follow the documents of the row. They are drawn at random without
    repetition. The draw only depends on the seed, the step and the position of the row in the
    batch.

    Args:
        batches: The batches of `PairRows` to which documents are added.
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
        """Returns the documents to add to each row of a step, `(batch_size, count)`.

        A document is identified by its number in the batch. If the other rows have fewer than
        ``count`` documents, the missing entries are -1.
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
        """Returns some rows of a step's batch, with the added documents."""
        rows: Any = self.rows
        indices, valid = self.indices(step)
        candidates = self.candidates(step)
        owners, numbers = np.divmod(np.maximum(candidates, 0), rows.size)
        # All pairs of the batch are tokenized, even those of other rows, because the width of the
        # arrays depends on all of them.
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
