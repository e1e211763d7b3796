"""The data flags that every training script shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfseq.errors import UsageError

FILES_HELP = (
    "one or more files, quoted globs or comma-separated lists; local paths or any fsspec URL "
    "(gs://, s3://, https://); .txt, .json, .jsonl, .csv, .tsv or .parquet, "
    "optionally .gz, .bz2, .xz or .zst"
)
ARRAYS_HELP = "or one local .npy or .npz with arrays of bytes (images)"
ARRAYS = (".npy", ".npz")
SPLITS = ("train", "validation", "test")


def option(default, help: str):
    """A dataclass field with the help text that ``--help`` shows."""
    return field(default=default, metadata={"help": help})


def has_arrays(arguments: Any) -> bool:
    """Tell whether a data file is one of arrays."""
    named = [getattr(arguments, f"{split}_file", None) or () for split in SPLITS]
    return any(name.lower().endswith(ARRAYS) for names in named for name in names)


@dataclass
class TextArguments:
    """Where the text comes from and how it becomes rows of tokens (v4's names and defaults)."""

    dataset_name: str | None = option(
        None, "Dataset on the Hub, a local directory, or a name a plugin's load_dataset hook knows."
    )
    dataset_config_name: str | None = option(None, "Configuration of the dataset, e.g. a language.")
    dataset_revision: str | None = option(None, "Branch, tag or commit of the dataset on the Hub.")
    train_file: list[str] | None = option(None, f"Training text: {FILES_HELP}.")
    validation_file: list[str] | None = option(None, f"Validation text: {FILES_HELP}.")
    text_column_name: str | None = option(
        None, "Column that holds the text; by default 'text', else the first column of strings."
    )
    sample_by: str = option(
        "line",
        "What one document of a .txt file is: 'line', 'paragraph' (blank lines) or 'document'; or "
        "'raw': files of any name are one text as they are, and splits are cut off by position.",
    )
    validation_split_percentage: int = option(
        5, "Percentage of the training text to validate on when there is no validation split."
    )
    max_train_samples: int | None = option(None, "Train on the first so many documents only.")
    max_eval_samples: int | None = option(None, "Evaluate on the first so many documents only.")
    streaming: bool = option(
        False, "Read and tokenise while training instead of tokenising everything to disk first."
    )
    max_seq_length: int | None = option(
        None, "Tokens per row; by default the longest that tokenizer and model allow."
    )
    line_by_line: bool = option(
        False, "One document per row, truncated, instead of packing documents into full rows."
    )
    pad_to_max_length: bool = option(
        False, "With --line_by_line, pad every row to max_seq_length, so that nothing recompiles."
    )
    preprocessing_num_workers: int | None = option(None, "Processes that tokenise in parallel.")
    overwrite_cache: bool = option(False, "Tokenise again even if the result is in the cache.")
    data_cache_dir: str | None = option(
        None, "Cache of tokenised text; by default $HFSEQ_CACHE, else ~/.cache/hfseq."
    )

    def __post_init__(self) -> None:
        problems = [text for wrong, text in self.problems() if wrong]
        if problems:
            raise UsageError("; ".join(problems))

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Yield pairs (wrong or not, what is wrong); subclasses add their own."""
        percentage = self.validation_split_percentage
        yield not 0 <= percentage < 100, f"--validation_split_percentage {percentage}: give 0 to 99"
        yield (
            self.sample_by not in ("line", "paragraph", "document", "raw"),
            f"--sample_by {self.sample_by}: give line, paragraph, document or raw",
        )
        yield (
            self.sample_by == "raw" and (self.streaming or self.line_by_line),
            "--sample_by raw is one text without documents, read whole: drop --streaming and "
            "--line_by_line",
        )
        yield (
            has_arrays(self) and (self.streaming or self.line_by_line),
            "arrays (.npy, .npz) are a row each, read where they lie: drop --streaming and "
            "--line_by_line",
        )
        counts = ("max_seq_length", "max_train_samples", "max_eval_samples")
        for name in (*counts, "preprocessing_num_workers"):
            value = getattr(self, name)
            yield (
                value is not None and value < 1,
                f"--{name} {value}: give a number of at least 1",
            )
        yield (
            self.dataset_name and self.train_file,
            "--dataset_name and --train_file exclude each other: give one of them",
        )

    @property
    def row_length(self) -> int | None:
        """Tokens a row as asked for."""
        return self.max_seq_length

    @property
    def keep_blank(self) -> bool:
        """Whether blank lines are text, too."""
        return False

    @property
    def cache_directory(self) -> Path:
        """Where tokenised text is kept."""
        return Path(
            self.data_cache_dir or os.environ.get("HFSEQ_CACHE") or "~/.cache/hfseq"
        ).expanduser()


def split_problems(data: Any, kind: str) -> Iterator[tuple[Any, str]]:
    """Check the shares that validation and test take of the training text; ``kind`` names it."""
    share = data.test_split_percentage
    yield not 0 <= share < 100, f"--test_split_percentage {share}: give 0 to 99"
    both = share + data.validation_split_percentage
    yield both >= 100, f"validation and test shares of {both} % leave no training {kind}: give less"
