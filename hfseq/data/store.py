"""Tokenised documents on disk: one memory-mapped int32 file, and where each document begins."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from hfseq import errors
from hfseq.errors import DataError

Opened = TypeVar("Opened")
VERSION = 1
HEADER_FILE, TOKENS_FILE, OFFSETS_FILE, CONTINUES_FILE = (
    "header.json",
    "tokens.bin",
    "offsets.bin",
    "continues.bin",
)


@dataclass
class TokenStore:
    """All documents of a split, end to end.

    tokens: int32 (total,). offsets: int64 (documents + 1,), document i is
    ``tokens[offsets[i]:offsets[i + 1]]`` and never empty. continues: uint8 (total,), 1 where a
    token continues the word before it, or None. Arrays that come from disk are memory maps.
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
        """Tokens of all documents together."""
        return int(self.offsets[-1])

    def __getitem__(self, document: int) -> np.ndarray:
        start, end = self.offsets[document : document + 2]
        return self.tokens[start:end]

    def gather(
        self, starts: np.ndarray, lengths: np.ndarray, width: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Copy ``tokens[start:start + length]`` into rows; also say where a row holds a token."""
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
        """Map a store into memory."""
        path = Path(path)
        try:
            header = errors.parse_json((path / HEADER_FILE).read_bytes())
            version = header.get("version")
            total, documents, pad = (header[n] for n in ("tokens", "documents", "pad_token_id"))
            limits = ((total, 2**48), (documents, 2**48), (pad, 2**31))
            if not all(type(n) is int and 0 <= n < limit for n, limit in limits):
                raise ValueError("its header has counts that are no counts")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is not a token store: {error}") from error
        if version != VERSION:
            raise DataError(f"{path} is a token store of version {version}, not {VERSION}")
        continues = (
            _map(path / CONTINUES_FILE, np.uint8, total) if header.get("continues") else None
        )
        tokens = _map(path / TOKENS_FILE, "<i4", total)
        offsets = _map(path / OFFSETS_FILE, "<i8", documents + 1)
        if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] <= offsets[:-1]).any():
            raise DataError(f"{path / OFFSETS_FILE} is damaged; rebuild it with --overwrite_cache")
        return cls(tokens, offsets, header["pad_token_id"], continues, header)


def _map(path: Path, dtype: DTypeLike, count: int) -> np.ndarray:
    expected = count * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        raise DataError(
            f"{path} has {size} bytes where {expected} are due; rebuild it with --overwrite_cache"
        )
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(count,)))  # plain arrays slice faster


# One chunk of documents: flat token ids, the length of each document, and optionally `continues`.
Chunk = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def build_store(
    path: str | Path, chunks: Callable[[], Iterable[Chunk]], header: dict, overwrite: bool = False
) -> TokenStore:
    """Open the store at ``path``, writing it from ``chunks()`` unless it is there and whole."""

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
            raise DataError("no document is left: every one of them is blank or has no tokens")
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
    """Return ``opened(path)``, after ``write(directory)`` if that raises a DataError at first.

    The files are written to a temporary directory and renamed, so that a killed process or a full
    disk leaves nothing that could be taken for whole. Processes that want the same directory wait
    for each other; the second one finds it done.
    """
    from filelock import FileLock

    def whole() -> Opened | None:
        with contextlib.suppress(DataError):
            return None if overwrite else opened(path)
        return None

    if (stored := whole()) is not None:
        return stored
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):  # freed by the system when its holder dies
            if (stored := whole()) is not None:
                return stored
            for leftover in path.parent.glob(f"{path.name}.tmp-*"):  # of a writer that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
            temporary.mkdir()
            try:
                write(temporary)
                if path.exists():
                    path.rename(temporary / "replaced")  # readers keep their maps of it
                temporary.rename(path)
                shutil.rmtree(path / "replaced", ignore_errors=True)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write the cache {path}: {error.strerror or error}; free some space, or "
            "name another place with --data_cache_dir or HFSEQ_CACHE"
        ) from error
    return opened(path)
