"""Batches of a stream: tokenised on the fly, shuffled in blocks, resumed to the very row."""

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

CHUNK_DOCUMENTS = 256  # documents read and tokenised at a time


class StreamingBatches:
    """Batches of an ``IterableDataset``, one after another, for ever.

    A block of ``block_rows`` rows is read, its rows are put in an order that (seed, epoch, block)
    determine, and cut into batches; the shards of the source are visited in an order that (seed,
    epoch) determine. (A ``datasets`` shuffle buffer would not come back the same after a resume.)
    The last batch of an epoch is filled up with rows marked invalid. ``state()`` is JSON-safe, and
    after ``restore(state)`` the same batches follow. Every process reads the whole stream and takes
    its ``part`` of each batch, so the order does not depend on how many there are.
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
        # Where the present block begins, and the next one (None: with the next epoch).
        self._start: dict[str, Any] = {"source": self.source.state(), "skip": 0}
        self._next: dict[str, Any] | None = None
        self._rows: PackedRows | LineRows | None = None
        # Kept from block to block, since going back to a place can mean reading its shard again:
        self._reader: Iterator | None = None
        self._pending: list = []  # the chunk in which the present block ended

    def state(self) -> dict:
        """The position after the last batch, for ``restore``."""
        counters = {"epoch": self.epoch, "block": self.block, "offset": self.offset}
        return {**counters, "start": self._start}

    def restore(self, state: dict) -> None:
        """Go on after the batch at which ``state()`` was taken, with the same arguments."""
        self.epoch, self.block, self.offset = state["epoch"], state["block"], state["offset"]
        self._start, self._rows = state["start"], None
        self._reader, self._pending = None, []

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches without end."""
        while True:
            yield self.next()

    def epoch_batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the batches up to the end of the present epoch (an evaluation is one epoch)."""
        epoch = self.epoch
        while self._prepare() and self.epoch == epoch:
            yield self.next()

    def next(self, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """Return ``part`` of the next batch: the arrays of ``Rows.fetch`` and "valid"."""
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
        """The rows of the present block, or of the next one when it is used up."""
        if self._rows is None:
            self._rows, self._next = self._load()
        while self.offset >= len(self._rows):
            if not len(self._rows) and not self.block:
                raise DataError("the stream holds no text: every document is blank or it has none")
            self.offset = 0
            if self._next is not None:
                self.block, self._start = self.block + 1, self._next
            else:
                self.epoch, self.block = self.epoch + 1, 0
                self._start = {"source": self.source.state(self.epoch), "skip": 0}
            self._rows, self._next = self._load()
        return self._rows

    def _load(self) -> tuple[PackedRows | LineRows, dict | None]:
        """Read the block that begins at ``self._start``; also say where the one after it begins.

        A place is the state of the source before a chunk of documents, and how many tokens (of
        packed rows) or documents of what follows belong to earlier blocks.
        """
        need = self.block_rows * (1 if self.line_by_line else self.length)
        skip, have, chunks, place = self._start["skip"], -self._start["skip"], [], None
        if self._reader is None:
            self._reader = (
                (
                    before,
                    *self.encode(
                        [text for text in texts if text and self.encode.should_keep(text)]
                    ),
                )
                for before, texts in self.source.read(self._start["source"], CHUNK_DOCUMENTS)
            )
        for chunk in chain(self._pending, self._reader):
            before, ids, lengths = chunk
            lengths = lengths[lengths > 0]
            size = len(lengths) if self.line_by_line else len(ids)
            chunks.append((ids, lengths))
            if have + size > need:  # strictly: a block that ends the epoch must know it
                place, self._pending = {"source": before, "skip": need - have}, [chunk]
                break
            have += size
        else:
            self._reader, self._pending = None, []
        tokens = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in chunks)])
        offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(n for _, n in chunks)]))
        # The last one of packed tokens is only predicted.
        part = slice(skip, skip + need + 1 if place else None)
        if self.line_by_line:
            store = TokenStore(tokens, offsets[part], self.pad_token_id)
            return LineRows(store, self.length, True), place
        tokens = tokens[part]
        offsets = np.unique(np.clip(offsets - skip, 0, len(tokens)))
        store = TokenStore(tokens, offsets, self.pad_token_id)
        rows = PackedRows(store, self.length, self.cross_documents, need if place else None)
        return rows, place


class _Source:
    """Documents of an IterableDataset, shard after shard, from any state that it has given."""

    def __init__(self, dataset: Dataset | IterableDataset, column: str, seed: int, shuffle: bool):
        if hasattr(dataset, "to_iterable_dataset"):
            dataset = dataset.to_iterable_dataset()
        self.dataset, self.column, self.seed = dataset, column, seed
        self.shards = dataset.num_shards if shuffle else 1

    def state(self, epoch: int = 0) -> dict:
        return {"epoch": epoch, "shard": 0, "position": None}

    def read(self, state: dict, size: int) -> Iterator[tuple[dict, list[str | None]]]:
        """Yield chunks of documents, each with the state before it."""
        epoch, position = state["epoch"], state["position"]
        order = permute(np.arange(self.shards), self.shards, derive_key("shards", self.seed, epoch))
        for shard in range(state["shard"], self.shards):
            dataset = self.dataset.shard(num_shards=self.shards, index=int(order[shard]))
            if position is not None:
                dataset.load_state_dict(position)
            documents = iter(dataset)
            while True:
                before = {"epoch": epoch, "shard": shard, "position": position}
                try:
                    texts = [document[self.column] for document in islice(documents, size)]
                except Exception as error:
                    raise DataError(
                        f"the stream broke in epoch {epoch}, shard {shard}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                if not texts:
                    break
                yield before, texts
                position = dataset.state_dict()
            position = None
