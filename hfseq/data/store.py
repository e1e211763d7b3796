"""Storage of tokenized documents and tables on disk.

A `TokenStore` contains memory-mapped int32 tokens and the offset of each document.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from hfseq import errors
from hfseq.errors import DataError

Opened = TypeVar("Opened")
VERSION = 1
HEADER_FILE = "header.json"
TOKENS_FILE = "tokens.bin"
OFFSETS_FILE = "offsets.bin"
CONTINUES_FILE = "continues.bin"


@dataclass
class TokenStore:
    """All documents of a split, concatenated.

    Arrays that are loaded from disk are memory maps.

    Attributes:
        tokens: Token ids, int32 `(total,)`.
        offsets: Document boundaries, int64 `(documents + 1,)`. Document i consists of
            `tokens[offsets[i]:offsets[i + 1]]` and is never empty.
        pad_token_id: The id for padding.
        continues: 1 for tokens that continue a word and 0 for others, uint8 `(total,)`, or `None`
            if the data does not specify words.
        header: The content of the header file.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    pad_token_id: int = 0
    continues: np.ndarray | None = None
    header: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def total_tokens(self) -> int:
        """The number of tokens in all documents."""
        return int(self.offsets[-1])

    def __getitem__(self, document: int) -> np.ndarray:
        start, end = self.offsets[document : document + 2]
        return self.tokens[start:end]

    def gather(
        self, starts: np.ndarray, lengths: np.ndarray, width: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Copies spans of tokens into padded rows.

        Args:
            starts: First token of each row, `(rows,)`.
            lengths: Number of tokens of each row, `(rows,)`.
            width: Number of columns.

        Returns:
            Int32 arrays `(rows, width)` by name ("input_ids" and, if available, "continues"), and a
            boolean array of the same shape that is false for padding.
        """
        rows = {"input_ids": np.full((len(starts), width), self.pad_token_id, np.int32)}
        flat = {"input_ids": self.tokens}
        if self.continues is not None:
            rows["continues"] = np.zeros((len(starts), width), np.int32)
            flat["continues"] = self.continues
        for name, source in flat.items():
            for row, at, length in zip(rows[name], starts.tolist(), lengths.tolist(), strict=True):
                row[:length] = source[at : at + length]
        return rows, np.arange(width) < lengths[:, None]

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Opens a store as memory maps.

        Raises:
            DataError: The directory does not contain a complete token store of this version.
        """
        path = Path(path)
        try:
            header = errors.parse_json((path / HEADER_FILE).read_bytes())
            version = header.get("version")
            total, documents, pad = (header[n] for n in ("tokens", "documents", "pad_token_id"))
            limits = ((total, 2**48), (documents, 2**48), (pad, 2**31))
            if not all(type(n) is int and 0 <= n < limit for n, limit in limits):
                raise ValueError("invalid counts in its header")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is not a token store: {error}") from error
        if version != VERSION:
            raise DataError(f"{path} is a token store of version {version} (supported: {VERSION})")
        continues = (
            _memory_map(path / CONTINUES_FILE, np.uint8, total) if header.get("continues") else None
        )
        tokens = _memory_map(path / TOKENS_FILE, "<i4", total)
        offsets = _memory_map(path / OFFSETS_FILE, "<i8", documents + 1)
        if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] <= offsets[:-1]).any():
            raise DataError(f"{path / OFFSETS_FILE} is damaged: rebuild it with --overwrite_cache")
        return cls(tokens, offsets, header["pad_token_id"], continues, header)


def _memory_map(path: Path, dtype: DTypeLike, count: int) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes instead of {expected}: rebuild it with --overwrite_cache"
        )
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))  # plain arrays slice faster


# A chunk of documents: flat token ids, the length of each document, and `continues` or None.
Chunk = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def build_store(
    path: str | Path, chunks: Callable[[], Iterable[Chunk]], header: dict, overwrite: bool = False
) -> TokenStore:
    """Opens the store at `path`, or writes it if it does not exist or is incomplete.

    Args:
        path: Directory of the store.
        chunks: Function that returns an iterable of chunks of documents.
        header: Additional content of the header file.
        overwrite: Whether to replace an existing store.

    Raises:
        DataError: No document contains tokens, or the store cannot be written.
    """

    def write(directory: Path) -> None:
        lengths: list[np.ndarray] = []
        largest, has_continues = -1, False
        with (
            open(directory / TOKENS_FILE, "wb") as tokens,
            open(directory / CONTINUES_FILE, "wb") as continuations,
        ):
            for ids, chunk_lengths, continues in chunks():
                if not len(ids):
                    continue
                lengths.append(chunk_lengths[chunk_lengths > 0])
                largest = max(largest, int(ids.max()))
                tokens.write(np.ascontiguousarray(ids, "<i4").data)
                if continues is not None:
                    has_continues = True
                    continuations.write(np.ascontiguousarray(continues, np.uint8).data)
            for stream in (tokens, continuations):
                stream.flush()
                os.fsync(stream.fileno())
        if not lengths:
            raise DataError("no document is left: all of them are blank or have no tokens")
        if not has_continues:
            (directory / CONTINUES_FILE).unlink()
        offsets = np.zeros(sum(map(len, lengths)) + 1, "<i8")
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        with open(directory / OFFSETS_FILE, "wb") as stream:
            stream.write(offsets.data)
            os.fsync(stream.fileno())
        content = {
            "version": VERSION,
            **header,
            "documents": len(offsets) - 1,
            "tokens": int(offsets[-1]),
            "largest_id": largest,
            "continues": has_continues,
        }
        (directory / HEADER_FILE).write_text(json.dumps(content, indent=2))

    return write_once(Path(path), TokenStore.open, write, overwrite)


def write_once(
    path: Path,
    opened: Callable[[Path], Opened],
    write: Callable[[Path], None],
    overwrite: bool = False,
) -> Opened:
    """Opens data in a directory. If the data does not exist or is damaged, it is written first.

    The files are written to a temporary directory that is renamed at the end, so that a killed
    process or a full disk never leaves incomplete data at `path`. If several processes call this
    function, one of them writes the data, and the other processes wait.

    Args:
        path: The directory.
        opened: Function that opens the directory, or raises a `DataError` if it is not valid.
        write: Function that writes the files into an empty directory.
        overwrite: Whether to replace an existing directory.

    Returns:
        The result of `opened(path)`.

    Raises:
        DataError: The directory cannot be written.
    """
    from filelock import FileLock

    def open_stored() -> Opened | None:
        with contextlib.suppress(DataError):
            return None if overwrite else opened(path)
        return None

    if (stored := open_stored()) is not None:
        return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # the operating system releases it if the process dies
            if (stored := open_stored()) is not None:
                return stored
            for leftover in path.parent.glob(f"{path.name}.tmp-*"):  # from killed processes
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
            temporary.mkdir()
            try:
                write(temporary)
                if path.exists():
                    path.rename(temporary / "replaced")  # open memory maps stay valid
                temporary.rename(path)
                shutil.rmtree(path / "replaced", ignore_errors=True)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write the cache {path}: {error.strerror or error}. Free some disk space, "
            "or choose another directory with --data_cache_dir or HFSEQ_CACHE"
        ) from error
    return opened(path)


#: Part of the cache key of tables. Increase it when the rows of cached tables change.
ARROW_VERSION = 1
BATCH_ROWS = 10_000  # rows per record batch


class StringTableWriter:
    """Writes a table of string columns to a file in Arrow's stream format, in batches of rows.

    Args:
        path: The file.
        names: The column names.

    Attributes:
        count: Number of rows so far.
    """

    def __init__(self, path: Path, names: Sequence[str]):
        import pyarrow

        self.schema = pyarrow.schema([(name, pyarrow.string()) for name in names])
        self.writer = pyarrow.ipc.new_stream(str(path), self.schema)
        self.rows: list[tuple[str | None, ...]] = []
        self.count, self.hash = 0, blake2b(digest_size=8)

    def add(self, *cells: str | None) -> None:
        """Appends a row."""
        self.rows.append(cells)
        self.count += 1
        if len(self.rows) == BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        columns = [list(column) for column in zip(*self.rows, strict=True)]
        arrays = [pyarrow.array(texts, "string") for texts in columns]
        self.writer.write_batch(pyarrow.record_batch(arrays, schema=self.schema))
        self.hash.update("\n".join([*(text or "" for text in chain(*columns)), ""]).encode())
        self.rows = []

    def close(self) -> str:
        """Closes the file and returns a hash of its content."""
        if self.rows:
            self._flush()
        self.writer.close()
        return self.hash.hexdigest()
