"""The data flags: those that every training script shares, and those of each objective."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from hfseq.errors import UsageError

FILES_HELP = (
    "one or more files, quoted globs or comma-separated lists; local paths or any fsspec URL "
    "(gs://, s3://, https://); .txt, .json, .jsonl, .csv, .tsv or .parquet, "
    "optionally .gz, .bz2, .xz or .zst"
)


def option(default, help: str):
    """A dataclass field with the help text that ``--help`` shows."""
    return field(default=default, metadata={"help": help})


REFERENCE_HELP = (
    "Whole-word reference file for Chinese: a JSON list of token positions per document."
)
UNUSED_HELP = "Kept for old commands, which never read it; giving one is an error."
CROSS_HELP = (
    "Let attention and positions run on from one document of a row to the next, as in "
    "Transformers 4."
)


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
        "What one document of a .txt file is: 'line', 'paragraph' (blank lines) or 'document'.",
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
            self.sample_by not in ("line", "paragraph", "document"),
            f"--sample_by {self.sample_by}: give line, paragraph or document",
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


@dataclass
class DataArguments(TextArguments):
    """The data flags of masked language modelling."""

    mlm_probability: float = option(0.15, "Share of the tokens (or words) to mask.")
    whole_word_masking: bool = option(False, "Mask whole words instead of single tokens.")
    train_ref_file: str | None = option(None, REFERENCE_HELP)
    validation_ref_file: str | None = option(None, "The same for the validation text.")

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Add a share out of range, and references to a stream."""
        share = self.mlm_probability
        yield not 0 < share <= 1, f"--mlm_probability {share}: give a number in (0, 1]"
        yield (
            self.streaming and (self.train_ref_file or self.validation_ref_file),
            "--streaming cannot use reference files: drop one of the two",
        )
        yield from super().problems()


@dataclass
class CausalArguments(TextArguments):
    """The data flags of causal language modelling."""

    block_size: int | None = option(
        None, "Tokens per row, v4's name of max_seq_length here; by default 1024 at most."
    )
    keep_linebreaks: bool = option(
        True, "Keep the line break at the end of each line of a .txt file."
    )
    cross_documents: bool = option(False, CROSS_HELP)
    word_perplexity: bool = option(
        False,
        "Evaluate the perplexity per word as well (whitespace-separated words, and line ends).",
    )

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Add a length that is none, or two that differ."""
        block, length = self.block_size, self.max_seq_length
        yield (
            block is not None and block < 2,
            f"--block_size {block}: give at least 2, one token predicts nothing",
        )
        yield (
            block and length and block != length,
            f"--block_size {block} and --max_seq_length {length} disagree: give one",
        )
        yield (
            self.word_perplexity and self.line_by_line,
            "--word_perplexity needs the whole text, which --line_by_line truncates: drop one",
        )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """Tokens a row as asked for."""
        return self.block_size or self.max_seq_length

    @property
    def keep_blank(self) -> bool:
        """A stream of text has its blank lines too."""
        return self.cross_documents and self.keep_linebreaks


@dataclass
class SpanArguments(TextArguments):
    """The data flags of span corruption."""

    mlm_probability: float = option(0.15, "Share of the tokens to hide in spans (noise density).")
    mean_noise_span_length: float = option(3.0, "Mean length of the hidden spans, in tokens.")
    train_ref_file: str | None = option(None, UNUSED_HELP)
    validation_ref_file: str | None = option(None, UNUSED_HELP)

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Add shares and lengths out of range."""
        share, mean = self.mlm_probability, self.mean_noise_span_length
        yield not 0 < share < 1, f"--mlm_probability {share}: give a number between 0 and 1"
        yield not mean >= 1, f"--mean_noise_span_length {mean}: give a number of at least 1"
        yield from super().problems()


@dataclass
class DenoisingArguments(TextArguments):
    """The data flags of denoising."""

    mlm_probability: float = option(0.3, "Share of the tokens to hide in spans.")
    permute_sentence_ratio: float = option(1.0, "Share of the sentences to shuffle.")
    poisson_lambda: float = option(3.0, "Mean of the Poisson distribution of span lengths.")
    cross_documents: bool = option(False, CROSS_HELP)
    train_ref_file: str | None = option(None, UNUSED_HELP)
    validation_ref_file: str | None = option(None, UNUSED_HELP)

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Add shares and lengths out of range."""
        for name in ("mlm_probability", "permute_sentence_ratio"):
            share = getattr(self, name)
            yield not 0 <= share <= 1, f"--{name} {share}: give a number in [0, 1]"
        mean = self.poisson_lambda
        yield not 0.1 <= mean <= 100, f"--poisson_lambda {mean}: give a number in [0.1, 100]"
        yield from super().problems()


#: The data flags of hfseq's objectives; others have those of masked language modelling.
OBJECTIVES: dict[str, type[TextArguments]] = {
    "mlm": DataArguments,
    "clm": CausalArguments,
    "span_mlm": SpanArguments,
    "denoising": DenoisingArguments,
}

Part = TypeVar("Part", bound=TextArguments)


def convert(arguments: TextArguments, kind: type[Part]) -> Part:
    """Return ``arguments`` as those of another objective: what was set stays set."""
    if isinstance(arguments, kind):
        return arguments
    known = {item.name for item in fields(kind)}
    changed = {
        item.name: getattr(arguments, item.name)
        for item in fields(arguments)
        if item.name in known and getattr(arguments, item.name) != item.default
    }
    return kind(**changed)
