"""The data flags of each objective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hfseq.data.classification_arguments import ClassificationArguments
from hfseq.data.text_arguments import (
    ARRAYS_HELP,
    FILES_HELP,
    TextArguments,
    has_arrays,
    option,
    split_problems,
)
from hfseq.data.translation_arguments import TranslationArguments

__all__ = [
    "FILES_HELP", "OBJECTIVES", "CausalArguments", "ClassificationArguments", "DataArguments",
    "DenoisingArguments", "SpanArguments", "TextArguments", "TranslationArguments", "convert",
    "option",
]  # fmt: skip

REFERENCE_HELP = (
    "Whole-word reference file for Chinese: a JSON list of token positions per document."
)
UNUSED_HELP = "Kept for old commands, which never read it; giving one is an error."
CROSS_HELP = (
    "Let attention and positions run on from one document of a row to the next, as in "
    "Transformers 4."
)


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

    train_file: list[str] | None = option(None, f"Training text: {FILES_HELP}; {ARRAYS_HELP}.")
    validation_file: list[str] | None = option(
        None, f"Validation text: {FILES_HELP}; {ARRAYS_HELP}."
    )
    block_size: int | None = option(
        None,
        "Tokens per row, v4's name of max_seq_length here; by default 1024 at most, and of images "
        "their size.",
    )
    keep_linebreaks: bool = option(
        True, "Keep the line break at the end of each line of a .txt file."
    )
    cross_documents: bool = option(False, CROSS_HELP)
    append_eos: bool = option(False, "End every document with the tokenizer's end-of-text token.")
    start_with_eos: bool = option(
        False,
        "Let a row begin with the end-of-text token as its first input and predict all of its "
        "tokens; without it a row's first token is given. Always so for images.",
    )
    word_perplexity: bool = option(
        False,
        "Evaluate the perplexity per word as well (whitespace-separated words, and line ends).",
    )
    count_line_ends: bool = option(
        True, "Whether line ends count as words there, as in WikiText; PG-19 has words alone."
    )
    bits_per_byte: bool = option(
        False, "Evaluate the bits per byte of the text as well; always so for raw text and images."
    )
    loss_per_position: bool = option(
        False,
        "Divide the training loss by all positions of the batch's rows, padding included, instead "
        "of by the targets, as the VQ Transformer's reference does; reported losses stay per "
        "target.",
    )
    test_file: list[str] | None = option(
        None, f"Text for --do_predict: {FILES_HELP}; {ARRAYS_HELP}."
    )
    test_split_percentage: int = option(
        0, "Percentage of the training text to keep for --do_predict when there is no test split."
    )
    max_test_samples: int | None = option(None, "Judge the first so many test documents only.")

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
            (self.word_perplexity or self.bits_per_byte) and self.line_by_line,
            "--word_perplexity and --bits_per_byte need the whole text, which --line_by_line "
            "truncates: drop it",
        )
        without = self.sample_by == "raw" or has_arrays(self)
        yield (
            self.append_eos and without,
            "--append_eos ends each document, and --sample_by raw and arrays (.npy, .npz) have "
            "none: drop it, or give text with --sample_by document",
        )
        yield from split_problems(self, "text")
        samples = self.max_test_samples
        yield (
            samples is not None and samples < 1,
            f"--max_test_samples {samples}: give a number of at least 1",
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
    "translation": TranslationArguments,
    "classification": ClassificationArguments,
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
