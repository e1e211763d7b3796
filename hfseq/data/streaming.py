"""Batches of a streamed dataset.

The documents are tokenized on the fly, and the rows are shuffled in blocks. A run can resume at the
exact row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data.batches import LineRows, PackedRows, derive_key, permute
from hfseq.data.store import TokenStore
from hfseq.data.tokenize import DocumentEncoder
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

CHUNK_DOCUMENTS = 256  # documents to read and tokenize at a time


class StreamingBatches:
    """Endless batches of an `IterableDataset`.

    The stream is read in blocks of `block_rows` rows. The rows of each block are shuffled and then
    divided into batches. Their order depends on (seed, epoch, block) only. The order in which the
    shards of the dataset are read depends on (seed, epoch) only. Unlike the shuffle buffer of
    `datasets`, these orders are therefore the same after a resume. If the last batch of an epoch
    is not full, it is filled up with rows for which "valid" is false.

    `state()` returns a JSON-serializable position in the stream. `restore(state)` continues with
    the next batch after this position. Every process reads the complete stream and uses its part of
    each batch, so the order does not depend on the number of processes.

    Args:
        dataset: The documents.
        tokenizer: The tokenizer.
        text_column: Column of the text.
        length: Row length in tokens.
        batch_size: Rows per batch, over all processes.
        seed: Seed of the order.
        shuffle: Whether to permute rows and shards.
        line_by_line: Whether each document becomes one row, truncated to `length` tokens. By
            default, documents are packed into rows.
        cross_documents: Whether a packed row is one sequence regardless of document boundaries.
        keep_blank: Whether to keep documents that contain only white space.
        append_eos: Whether each document ends with the end-of-text token.
        block_rows: Rows per block, rounded down to full batches.
    """

    def __init__(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: PreTrainedTokenizerBase,
        text_column: str,
        length: int,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        line_by_line: bool = False,
        cross_documents: bool = False,
        keep_blank: bool = False,
        append_eos: bool = False,
        block_rows: int = 4096,
    ):
        self.source = _Source(dataset, text_column, seed, shuffle)
        limit = length if line_by_line else None
        self.encode = DocumentEncoder(tokenizer, limit, keep_blank, append_eos)
        self.pad_token_id = pad_token_id(tokenizer)
        self.length, self.line_by_line = length, line_by_line
        self.cross_documents = cross_documents
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.block_rows = max(1, block_rows // batch_size) * batch_size
        self.epoch = self.block = self.offset = 0
        # The positions at which the current block and the next block start. `_next` is None if the
        # next block begins a new epoch.
        self._start: dict[str, Any] = {"source": self.source.state(), "skip": 0}
        self._next: dict[str, Any] | None = None
        self._rows: PackedRows | LineRows | None = None
        # These two are kept between blocks, because a new reader might have to read the shard from
        # its beginning to get to the same position.
        self._reader: Iterator | None = None
        self._pending: list = []  # the chunk in which the current block ended

    def state(self) -> dict:
        """Returns the position after the most recent batch. Pass it to `restore`."""
        counters = {"epoch": self.epoch, "block": self.block, "offset": self.offset}
        return {**counters, "start": self._start}

    def restore(self, state: dict) -> None:
        """Continues with the batch that follows the position `state`.

        The object must have been created with the same arguments as the one that returned `state`.
        """
        self.epoch, self.block, self.offset = state["epoch"], state["block"], state["offset"]
        self._start, self._rows = state["start"], None
        self._reader, self._pending = None, []

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches indefinitely."""
        while True:
            yield self.next()

    def epoch_batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the batches up to the end of the current epoch, e.g. for an evaluation."""
        epoch = self.epoch
        while self._prepare() and self.epoch == epoch:
            yield self.next()

    def next(self, part: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
        """Returns the next batch.

        Args:
            part: The positions within the batch whose rows are returned.

        Returns:
            The arrays of `Rows.fetch`, and "valid", a bool array with one entry per row.

        Raises:
            DataError: The stream contains no text or cannot be read.
        """
        rows = self._prepare()
        order = np.arange(self.offset, self.offset + self.batch_size)
        valid = order < len(rows)
        order %= len(rows)
        if self.shuffle:
            order = permute(
                order, len(rows), derive_key("block", self.seed, self.epoch, self.block)
            )
        self.offset += self.batch_size
        return rows.fetch(order[part], rows.width(order)) | {"valid": valid[part]}

    def _prepare(self) -> PackedRows | LineRows:
        """Returns the rows of the current block.

        If all of its rows have been used, loads the next block first.
        """
        if self._rows is None:
            self._rows, self._next = self._load()
        while self.offset >= len(self._rows):
            if not len(self._rows) and not self.block:
                raise DataError(
                    "the stream contains no text: it has no documents, or all of them are blank"
                )
            self.offset = 0
            if self._next is not None:
                self.block, self._start = self.block + 1, self._next
            else:
                self.epoch, self.block = self.epoch + 1, 0
                self._start = {"source": self.source.state(self.epoch), "skip": 0}
            self._rows, self._next = self._load()
        return self._rows

    def _load(self) -> tuple[PackedRows | LineRows, dict | None]:
        """Reads the block that starts at `self._start`, and returns the start of the next block.

        A start is a dictionary with two entries. "source" is the state of the source before a chunk
        of documents. "skip" is the number of tokens at the beginning of this chunk that belong to
        earlier blocks. With `line_by_line`, "skip" is a number of documents instead.
        """
        block_size = self.block_rows * (1 if self.line_by_line else self.length)
        skip, available, chunks, next_start = self._start["skip"], -self._start["skip"], [], None
        if self._reader is None:
            self._reader = (
                (
                    state,
                    *self.encode(
                        [text for text in texts if text and self.encode.should_keep(text)]
                    ),
                )
                for state, texts in self.source.read(self._start["source"], CHUNK_DOCUMENTS)
            )
        for chunk in chain(self._pending, self._reader):
            state, ids, lengths = chunk
            lengths = lengths[lengths > 0]
            size = len(lengths) if self.line_by_line else len(ids)
            chunks.append((ids, lengths))
            # With >=, the end of the stream would not be detected if it coincides with the end of a
            # block. An empty block would follow.
            if available + size > block_size:
                next_start, self._pending = (
                    {"source": state, "skip": block_size - available},
                    [chunk],
                )
                break
            available += size
        else:
            self._reader, self._pending = None, []
        tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in chunks)])
        offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(n for _, n in chunks)]))
        # One more token than the rows contain, as the target of the last row. With `line_by_line`,
        # `part` then selects offsets, and there is one more offset than there are documents.
        part = slice(skip, skip + block_size + 1 if next_start else None)
        if self.line_by_line:
            store = TokenStore(tokens, offsets[part], self.pad_token_id)
            return LineRows(store, self.length, True), next_start
        tokens = tokens[part]
        offsets = np.unique(np.clip(offsets - skip, 0, len(tokens)))
        store = TokenStore(tokens, offsets, self.pad_token_id)
        rows = PackedRows(
            store, self.length, self.cross_documents, block_size if next_start else None
        )
        return rows, next_start


class _Source:
    """Reads the documents of an `IterableDataset` shard by shard, from any saved state on."""

    def __init__(self, dataset: Dataset | IterableDataset, column: str, seed: int, shuffle: bool):
        if hasattr(dataset, "to_iterable_dataset"):
            dataset = dataset.to_iterable_dataset()
        self.dataset, self.column, self.seed = dataset, column, seed
        self.shards = dataset.num_shards if shuffle else 1

    def state(self, epoch: int = 0) -> dict:
        return {"epoch": epoch, "shard": 0, "position": None}

    def read(self, state: dict, size: int) -> Iterator[tuple[dict, list[str | None]]]:
        """Yields chunks of documents, each with the state before it."""
        epoch, position = state["epoch"], state["position"]
        order = permute(np.arange(self.shards), self.shards, derive_key("shards", self.seed, epoch))
        for shard in range(state["shard"], self.shards):
            dataset = self.dataset.shard(num_shards=self.shards, index=int(order[shard]))
            if position is not None:
                dataset.load_state_dict(position)
            documents = iter(dataset)
            while True:
                chunk_state = {"epoch": epoch, "shard": shard, "position": position}
                try:
                    texts = [document[self.column] for document in islice(documents, size)]
                except Exception as error:
                    raise DataError(
                        f"cannot read the stream in epoch {epoch}, shard {shard}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                if not texts:
                    break
                yield chunk_state, texts
                position = dataset.state_dict()
            position = None
