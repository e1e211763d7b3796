"""Tokenization of documents, in parallel processes or on the fly for streams.

The tokens of map-style datasets are cached in a `TokenStore`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data import store
from hfseq.data.sources import REFERENCE_COLUMN, RawText, is_blank
from hfseq.data.store import Chunk, TokenStore
from hfseq.data.tokenizers import byte_ids, pad_token_id
from hfseq.errors import DataError, UsageError, exit_with_parent

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase
BATCH_DOCUMENTS = 1000  # maximum number of documents per task
MAX_CALL_CHARACTERS = 1 << 23  # per call of the tokenizer, which uses about 100 bytes for each


def tokenize(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    text_column: str,
    *,
    cache_dir: str | Path,
    line_by_line: bool = False,
    max_length: int | None = None,
    num_proc: int | None = None,
    overwrite: bool = False,
    keep_blank: bool = False,
    append_eos: bool = False,
    description: str = "Tokenizing",
) -> TokenStore:
    """Tokenizes the documents of a map-style dataset and caches the result.

    The cached store is reused as long as data, tokenizer and options are the same.

    Args:
        dataset: The documents.
        tokenizer: The tokenizer. It adds its special tokens to each document (`<s> … </s>`).
        text_column: Column of the text.
        cache_dir: Directory of cached tokens.
        line_by_line: Whether to truncate each document to `max_length` tokens, including special
            tokens.
        max_length: Maximum length in tokens. Only used with `line_by_line`.
        num_proc: Number of processes.
        overwrite: Whether to ignore a cached result.
        keep_blank: Whether blank documents (e.g. a line break) are kept as part of the text.
            Otherwise they are left out.
        append_eos: Whether to append the end-of-text token to each document.
        description: Label of the progress bar.

    Returns:
        The tokens.

    Raises:
        UsageError: `line_by_line` is set without `max_length`.
        DataError: The documents cannot be read, or contain no text.
    """
    if line_by_line and not max_length:
        raise UsageError(
            "--line_by_line requires --max_seq_length, the length to which documents are truncated"
        )
    limit = max_length if line_by_line else None
    encode = DocumentEncoder(tokenizer, limit, keep_blank, append_eos)
    return tokenize_column(
        encode,
        dataset,
        text_column,
        cache_dir=cache_dir,
        num_proc=num_proc,
        overwrite=overwrite,
        description=description,
    )


def tokenize_column(
    encode: DocumentEncoder,
    dataset: Dataset,
    column: str,
    *,
    cache_dir: str | Path,
    num_proc: int | None = None,
    overwrite: bool = False,
    description: str = "Tokenizing",
) -> TokenStore:
    """Encodes a column of a dataset with `encode` and caches the result; see `tokenize`."""
    state = tokenizer_state(encode.tokenizer)
    content = [store.VERSION, dataset._fingerprint, column, *encode.options, state]
    key = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    header = {"fingerprint": key, "pad_token_id": pad_token_id(encode.tokenizer)}

    def chunks() -> Iterator[Chunk]:
        from tqdm.auto import tqdm

        parts = _parallel(dataset, encode, column, num_proc)
        with tqdm(total=len(dataset), desc=description, unit=" documents", disable=None) as bar:
            for part in parts:
                yield part
                bar.update(len(part[1]))

    return store.build_store(Path(cache_dir) / f"tokens-{key}", chunks, header, overwrite)


def tokenize_raw(
    text: RawText,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: str | Path,
    overwrite: bool = False,
) -> TokenStore:
    """Tokenizes a raw text as one document without special tokens.

    With a byte vocabulary, the token ids are looked up in a table. The results of other tokenizers
    are cached in `cache_dir`.
    """
    table = byte_ids(tokenizer)
    pad = tokenizer.pad_token_id or 0
    if table is not None:
        return TokenStore(table[text.bytes], np.array([0, len(text)], np.int64), pad)
    key = blake2b(repr(tokenizer_state(tokenizer)).encode(), digest_size=16)
    key.update(text.bytes.tobytes())
    header = {"fingerprint": key.hexdigest(), "pad_token_id": pad}

    def chunks() -> Iterator[Chunk]:
        options = {"add_special_tokens": False, "verbose": False}
        parts = [tokenizer(piece, **options)["input_ids"] for piece in text.pieces()]
        ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
        yield ids, np.array([len(ids)], np.int64), None

    return store.build_store(Path(cache_dir) / f"raw-{key.hexdigest()}", chunks, header, overwrite)


class DocumentEncoder:
    """Tokenizes lists of documents. Instances can be pickled for worker processes.

    Args:
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens per document, or `None`.
        keep_blank: Whether blank documents are kept as part of the text instead of being left out.
        append_eos: Whether to append the end-of-text token to each document.

    Raises:
        UsageError: `append_eos` is set, but the tokenizer has no end-of-text token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        keep_blank: bool = False,
        append_eos: bool = False,
    ):
        self.tokenizer, self.max_length, self.keep_blank = tokenizer, max_length, keep_blank
        self.append_eos = append_eos
        if append_eos and tokenizer.eos_token_id is None:
            raise UsageError("--append_eos: the tokenizer has no end-of-text token; drop the flag")
        # A byte vocabulary is a lookup table if special tokens in a text are not parsed.
        verbatim = getattr(tokenizer, "split_special_tokens", False)
        self.bytes = byte_ids(tokenizer) if verbatim else None

    @property
    def options(self) -> list[Any]:
        """All values, apart from the text and the tokenizer, that determine the token ids.

        They are part of the cache key.
        """
        flags = {"keep_blank": self.keep_blank, "append_eos": self.append_eos}
        return [self.max_length, *(name for name, on in flags.items() if on)]

    def should_keep(self, text: str | None) -> bool:
        """Returns whether a document is tokenized. Empty documents are left out."""
        return bool(text) if self.keep_blank else not is_blank(text)

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokenizes texts.

        Returns:
            The ids of all texts, int32 `(total,)`, and the length of each text, int64 `(texts,)`.
        """
        eos_ids = [self.tokenizer.eos_token_id] if self.append_eos else []
        max_tokens = None if self.max_length is None else self.max_length - len(eos_ids)
        if self.bytes is not None:
            codes = (np.frombuffer(text.encode()[:max_tokens], np.uint8) for text in texts)
            tables = [np.append(self.bytes[code], np.array(eos_ids, np.int32)) for code in codes]
            lengths = np.fromiter(map(len, tables), np.int64, len(tables))
            return np.concatenate([np.zeros(0, np.int32), *tables]), lengths
        rows: list[list[int]] = []
        batch: list[str] = []
        size = 0
        for number, text in enumerate(texts, 1):
            batch.append(text)
            size += len(text)
            # A full batch of long documents, e.g. books, would not fit into memory
            if size >= MAX_CALL_CHARACTERS or number == len(texts):
                rows += self._rows(batch)
                batch, size = [], 0
        if eos_ids:
            rows = [[*row[:max_tokens], *eos_ids] for row in rows]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return flat, lengths

    def _rows(self, texts: list[str]) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            options = {"truncation": True, "max_length": self.max_length} if self.max_length else {}
            return self.tokenizer(texts, verbose=False, **options)["input_ids"]
        # Call the Rust tokenizer directly, which avoids building offsets, masks and dictionaries.
        backend.no_padding()
        backend.no_truncation()
        if self.max_length:
            backend.enable_truncation(self.max_length)
        rows = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
        backend.no_truncation()
        return rows


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns everything that determines the tokenizer's ids, for cache keys.

    The result can be converted to JSON.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        name = type(tokenizer).__qualname__
        return [name, sorted(tokenizer.get_vocab().items()), repr(tokenizer)]
    state = json.loads(backend.to_str())
    return [state | {"truncation": None, "padding": None}, tokenizer.pad_token_id]


def _parallel(
    dataset: Dataset, encode: DocumentEncoder, column: str, num_proc: int | None
) -> Iterator[Chunk]:
    size = min(BATCH_DOCUMENTS, -(-len(dataset) // (4 * (num_proc or 1))) or 1)
    tasks = [range(i, min(i + size, len(dataset))) for i in range(0, len(dataset), size)]
    workers = min(num_proc or 1, len(tasks))
    if workers < 2:  # the Rust tokenizer uses all cores by itself
        yield from (_encode_range(dataset, encode, column, task) for task in tasks)
        return
    # Forking is faster, but not safe after jax has started its threads.
    forks = sys.platform == "linux" and "jax" not in sys.modules
    context = multiprocessing.get_context("fork" if forks else "spawn")
    work = (dataset, encode, column)
    with ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(), *work)) as pool:
        try:
            yield from pool.map(_encode_in_worker, tasks)
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenization process died, probably because the machine ran out of memory; "
                "use fewer --preprocessing_num_workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker_state: tuple[Any, DocumentEncoder, str]


def _start_worker(parent: int, dataset: Dataset, encode: DocumentEncoder, column: str) -> None:
    global _worker_state
    exit_with_parent(parent)
    _worker_state = dataset, encode, column
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core


def _encode_in_worker(documents: range) -> Chunk:
    dataset, encode, column = _worker_state
    return _encode_range(dataset, encode, column, documents)


def _encode_range(
    dataset: Dataset, encode: DocumentEncoder, column: str, documents: range
) -> Chunk:
    try:
        batch = dataset[documents.start : documents.stop]
    except UnicodeDecodeError as error:
        raise DataError(
            f"a document at or after number {documents.start} is not valid UTF-8: {error}"
        ) from error
    kept_indices = [i for i, text in enumerate(batch[column]) if encode.should_keep(text)]
    ids, lengths = encode([batch[column][i] for i in kept_indices])
    if REFERENCE_COLUMN not in batch:
        return ids, lengths, None
    starts, continues = np.cumsum(lengths) - lengths, np.zeros(len(ids), np.uint8)
    for start, length, i in zip(starts, lengths, kept_indices, strict=True):
        inside = np.asarray(batch[REFERENCE_COLUMN][i], np.int64)
        continues[start + inside[inside < length]] = 1  # positions beyond the length were truncated
    return ids, lengths, continues


def count_words(
    dataset: Dataset, column: str, keep_blank: bool = False, line_ends: bool = True
) -> int:
    """Counts whitespace-separated words and line ends, for word-level perplexity.

    Every line has one line end, even the last line of a text without a final line break. This
    corresponds to WikiText (Merity et al., 2016), where each line ends with `<eos>`. Without
    `line_ends`, only words are counted, as for PG-19 (Rae et al., 2020).
    """
    words = 0
    for text in _kept_texts(dataset, column, keep_blank):
        ends = text.count("\n") + (not text.endswith("\n")) if line_ends else 0
        words += len(text.split()) + ends
    return words


def count_bytes(dataset: Dataset, column: str, keep_blank: bool = False) -> int:
    """Counts the UTF-8 bytes of the documents that are tokenized."""
    return sum(len(text.encode()) for text in _kept_texts(dataset, column, keep_blank))


def _kept_texts(dataset: Dataset, column: str, keep_blank: bool) -> Iterator[str]:
    for batch in dataset.select_columns([column]).iter(BATCH_DOCUMENTS):
        yield from (text for text in batch[column] if (text if keep_blank else not is_blank(text)))
