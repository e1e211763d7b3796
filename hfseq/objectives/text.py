"""What objectives on plain text share: how long a row is, and rows out of documents."""

from __future__ import annotations

from typing import Any

from hfseq.data import tokenization
from hfseq.data.packing import LineRows, PackedRows, Rows
from hfseq.data.raw import ImageRows, Images, RawText
from hfseq.data.store import TokenStore
from hfseq.data.text_arguments import TextArguments
from hfseq.errors import UsageError


def text_row_length(
    data: TextArguments,
    limit: int | None,
    tokenizer: Any,
    longest: int,
    natural: int | None = None,
) -> int:
    """Return tokens a row: what the flag says, else the longest that tokenizer and model allow.

    ``limit`` is the model's position table, ``longest`` the default where nothing sets a limit;
    ``natural`` is the length that the data has itself.
    """
    wanted = data.row_length or natural
    if wanted and limit and wanted > limit:
        flag = "max_seq_length" if data.max_seq_length else "block_size"
        raise UsageError(
            f"--{flag} {wanted} is longer than the position table of this model allows "
            f"({limit}): give at most {limit}, or a configuration with more max_position_embeddings"
        )
    most = limit or longest
    if longest > 512:  # v4's limit for rows of causal models
        most = min(most, longest)
    return wanted or min(tokenizer.model_max_length, most)


def text_rows(
    data: TextArguments, tokenizer: Any, splits: Any, split: str, length: int, cross: bool
) -> tuple[Rows, dict[str, Any]]:
    """Tokenise a split into packed rows, or a row a line; returns facts on it, too."""
    column, dataset = splits.text_column, splits[split]
    if isinstance(dataset, Images):
        rows = ImageRows(dataset, tokenizer, length)
        total = len(dataset) * dataset.size
        return rows, {"documents": len(dataset), "tokens": total, "bytes": total}
    if isinstance(dataset, RawText):
        store = tokenization.tokenize_raw(
            dataset, tokenizer, data.cache_directory, data.overwrite_cache
        )
        return PackedRows(store, length, cross), _facts(data, split, dataset, column, store)
    if not hasattr(dataset, "__len__"):  # a streamed validation split is read once
        dataset = _materialise(dataset)
    store = tokenization.tokenize(
        dataset, tokenizer, column, cache_dir=data.cache_directory,
        line_by_line=data.line_by_line, max_length=length, num_proc=data.preprocessing_num_workers,
        overwrite=data.overwrite_cache, keep_blank=data.keep_blank,
        append_eos=getattr(data, "append_eos", False), description=f"Tokenising {split}",
    )  # fmt: skip
    facts = _facts(data, split, dataset, column, store)
    if data.line_by_line:
        return LineRows(store, length, data.pad_to_max_length), facts
    return PackedRows(store, length, cross), facts


def _facts(
    data: TextArguments, split: str, dataset: Any, column: str, store: TokenStore
) -> dict[str, Any]:
    """Count what the metrics of an evaluation divide by."""
    facts = {"documents": len(store), "tokens": store.total_tokens}
    raw = isinstance(dataset, RawText)
    if split != "train" and getattr(data, "word_perplexity", False):
        ends = getattr(data, "count_line_ends", True)
        facts["words"] = (
            dataset.count_words(ends) if raw
            else tokenization.count_words(dataset, column, data.keep_blank, ends)
        )  # fmt: skip
    if raw:
        facts["bytes"] = len(dataset)
    elif split != "train" and getattr(data, "bits_per_byte", False):
        facts["bytes"] = tokenization.count_bytes(dataset, column, data.keep_blank)
    return facts


def _materialise(stream: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(stream))
