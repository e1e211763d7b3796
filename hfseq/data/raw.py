"""Data that has no documents: files that are one long text, and arrays of bytes such as images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.data import files as data_files
from hfseq.data import unpacked
from hfseq.data.text_arguments import ARRAYS, SPLITS, has_arrays
from hfseq.data.vocabulary_bytes import byte_ids
from hfseq.errors import DataError, UsageError

PIECE = 1 << 20  # bytes that are tokenised at once
BYTES_INSTEAD = "a vocabulary of bytes (train_tokenizer.py --vocabulary bytes) takes any file"


@dataclasses.dataclass
class RawText:
    """The bytes ``start`` to ``stop`` of a text that was read whole; ``content`` is all of it."""

    content: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def bytes(self) -> np.ndarray:
        """The bytes of this part, uint8."""
        return self.content[self.start : self.stop]

    def take(self, count: int) -> RawText:
        """Return the first ``count`` bytes."""
        return dataclasses.replace(self, stop=min(self.stop, self.start + count))

    def pieces(self, flag: str = "--sample_by raw", advice: str = BYTES_INSTEAD) -> Iterator[str]:
        """Yield the text in pieces that end with a line where lines are not huge.

        A character that a border cuts belongs to the part before it. ``flag`` and ``advice`` are
        what an error says of bytes that are not text.

        Raises:
            DataError: the text is not UTF-8, or less than a character.
        """
        start, last = self._character(self.start), self._character(self.stop)
        if start >= last:
            raise DataError(
                f"{flag}: bytes {self.start} to {self.stop} of the text hold no whole character: "
                "give a larger file, or a larger share"
            )
        while start < last:
            stop = self._character(min(start + PIECE, last))
            breaks = np.flatnonzero(self.content[start:stop] == ord("\n"))
            if stop < last and len(breaks):
                stop = start + int(breaks[-1]) + 1
            try:
                yield self.content[start:stop].tobytes().decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{flag}: byte {start + error.start} of the text is not UTF-8; {advice}"
                ) from error
            start = stop

    def _character(self, place: int) -> int:
        """The first place from ``place`` on that is not inside a character (of 4 bytes at most)."""
        if not place:
            return place  # what continues nothing is an error, not a part of a character
        inside = self.content[place : place + 3] & 0xC0 == 0x80
        return place + (len(inside) if inside.all() else int(inside.argmin()))

    def count_words(self, line_ends: bool = True) -> int:
        """Count words between whitespace, and line ends, see ``tokenization.count_words``."""
        text = "".join(self.pieces("--word_perplexity", "words are those of text: drop the flag"))
        ends = text.count("\n") + (not text.endswith("\n")) if line_ends else 0
        return len(text.split()) + ends


@dataclasses.dataclass
class Images:
    """Arrays of bytes, all of one shape: uint8 (N, ...), memory-mapped where the file allows it."""

    arrays: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def size(self) -> int:
        """Bytes of one array."""
        return int(np.prod(self.arrays.shape[1:]))

    def take(self, count: int) -> Images:
        """Return the first ``count`` arrays."""
        return dataclasses.replace(self, stop=min(self.stop, self.start + count))


class ImageRows:
    """Row *i* is array *i*, flattened in row-major order, a token a byte.

    Raises:
        UsageError: the vocabulary is not one of bytes, or rows have another length than arrays.
    """

    def __init__(self, images: Images, tokenizer: Any, length: int):
        table = byte_ids(tokenizer)
        if table is None:
            raise UsageError(
                "arrays of bytes need a vocabulary of bytes: make one with "
                "train_tokenizer.py --model_type vq_transformer --vocabulary bytes"
            )
        if length != images.size:
            raise UsageError(
                f"rows have {length} tokens and arrays of shape {images.arrays.shape[1:]} have "
                f"{images.size} bytes: give --block_size {images.size}"
            )
        self.images, self.length, self.table = images, length, table

    def __len__(self) -> int:
        return len(self.images)

    def width(self, indices: np.ndarray) -> int:
        """Columns of a batch: always the length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out; see ``Rows``."""
        arrays = self.images.arrays[self.images.start + np.asarray(indices)]
        ids = self.table[arrays.reshape(len(arrays), -1)]
        return {
            "input_ids": ids,
            "segment_ids": np.ones_like(ids),
            "position_ids": np.tile(np.arange(self.length, dtype=np.int32), (len(ids), 1)),
            "next_ids": np.full(len(ids), -1, np.int32),
        }


def is_raw(arguments: Any) -> bool:
    """Tell whether the flags name one long text, or arrays."""
    return arguments.sample_by == "raw" or has_arrays(arguments)


def load_raw(arguments: Any) -> dict[str, Any]:
    """Read the files that the flags name and cut off what has no file of its own, by position.

    The text is training first, then validation, then test: the shares are
    ``validation_split_percentage`` and ``test_split_percentage``.

    Raises:
        UsageError: arrays are given to what trains on text alone.
        DataError: a file cannot be read, is empty, or is too small for the shares.
    """
    if has_arrays(arguments) and not hasattr(arguments, "block_size"):
        raise UsageError(
            "arrays (.npy, .npz) are no text: run_clm_flax.py trains on them, with a vocabulary "
            "that train_tokenizer.py --vocabulary bytes makes without any data"
        )
    read = _read_arrays if has_arrays(arguments) else _read_text
    splits = {}
    for split in SPLITS:
        if patterns := getattr(arguments, f"{split}_file", None):
            flag = f"--{split}_file"
            splits[split] = read(data_files.expand(patterns, flag), flag)
    if "train" not in splits:
        return splits
    whole, end = splits["train"], splits["train"].stop
    for split in ("test", "validation"):
        share = getattr(arguments, f"{split}_split_percentage", 0)
        if split not in splits and share:
            start = end - round(len(whole) * share / 100)
            splits[split] = dataclasses.replace(whole, start=start, stop=end)
            end = start
    splits["train"] = dataclasses.replace(whole, stop=end)
    empty = [name for name, part in splits.items() if not len(part)]
    if empty:
        raise DataError(
            f"{len(whole)} bytes or arrays leave nothing for {', '.join(empty)}: give a larger "
            "file, or other percentages"
        )
    return splits


def _read_text(names: Sequence[str], flag: str) -> RawText:
    parts = []
    for name in names:
        try:
            with data_files.open_binary(name) as stream:
                parts.append(np.frombuffer(stream.read(), np.uint8))
        except (ImportError, OSError, ValueError, EOFError) as error:
            raise DataError(f"{flag} {name} cannot be read: {error}") from error
    content = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not len(content):
        raise DataError(f"{flag} {names[0]} is empty; give a file with text in it")
    return RawText(content, 0, len(content))


def _read_arrays(names: Sequence[str], flag: str) -> Images:
    name = names[0]
    if len(names) > 1:
        raise DataError(f"{flag} {' '.join(names)}: give one file of arrays, .npy or .npz")
    if not name.lower().endswith(ARRAYS) or "://" in name:
        raise DataError(
            f"{flag} {name} beside files of arrays: give one local .npy or .npz file here, too"
        )
    try:
        arrays = _load_array(name, f"{flag} {name}")
    except Exception as error:  # what reads headers of arrays raises a dozen types
        if isinstance(error, DataError):
            raise
        raise DataError(f"{flag} {name} cannot be read as an array: {error}") from error
    if not arrays.size:
        raise DataError(f"{flag} {name} is empty, of shape {arrays.shape}: give one with arrays")
    if arrays.dtype != np.uint8 or arrays.ndim < 2:
        raise DataError(
            f"{flag} {name} holds {arrays.dtype} of shape {arrays.shape}: give uint8 of shape "
            "(number of arrays, ...)"
        )
    return Images(arrays, 0, len(arrays))


def _load_array(name: str, label: str) -> np.ndarray:
    if name.lower().endswith(".npy"):
        found = np.load(name, mmap_mode="r", allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        found.close()  # an archive under a wrong name
        raise DataError(f"{label} is an archive of arrays: call it .npz")
    with Path(name).open("rb") as stream:  # .npz: an archive of named arrays
        archive = np.load(stream, allow_pickle=False)
        if isinstance(archive, np.ndarray):  # under a wrong name
            return archive
        for member in archive.zip.infolist():
            if member.file_size > unpacked.FREE + unpacked.RATIO * member.compress_size:
                raise DataError(
                    f"{label} unpacks to {member.file_size >> 20} MB, more than {unpacked.RATIO} "
                    "times its size: save it with numpy.savez, which does not pack"
                )
        if len(archive.files) != 1:
            held = ", ".join(archive.files) or "nothing"
            raise DataError(f"{label} holds {held}: give a file with one array")
        return archive[archive.files[0]]
