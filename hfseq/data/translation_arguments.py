"""The data flags of translation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hfseq.data.text_arguments import TextArguments, option, split_problems
from hfseq.errors import UsageError

PARALLEL_HELP = (
    ".csv, .tsv, .json, .jsonl or .parquet with both sides, two aligned text files (corpus.en "
    "corpus.de), a folder of MultiUN or OPUS Moses files, or tfds:NAME/CONFIG#SPLIT"
)
LENGTH_PENALTIES = ("transformers", "gnmt")
#: Tokens a side, where no flag and no position table says how many.
LONGEST = 256


@dataclass
class TranslationArguments(TextArguments):
    """Where parallel text comes from, how it is cut into rows, and how translations are judged."""

    train_file: list[str] | None = option(None, f"Training pairs: {PARALLEL_HELP}.")
    validation_file: list[str] | None = option(None, f"Validation pairs: {PARALLEL_HELP}.")
    test_file: list[str] | None = option(None, f"Pairs for --do_predict: {PARALLEL_HELP}.")
    validation_split_percentage: int = option(
        1,
        "Percentage of the training pairs to validate on when there is no validation split; all "
        "translations of one source sentence stay on one side.",
    )
    test_split_percentage: int = option(
        0, "Percentage of the training pairs to keep for --do_predict when there is no test split."
    )
    source_lang: str | None = option(None, "Language translated from, e.g. en.")
    target_lang: str | None = option(None, "Language translated into, e.g. de.")
    source_column: str | None = option(
        None, "Column of the source text; by default source_lang, its English name, or the first."
    )
    target_column: str | None = option(
        None, "Column of the target text; by default target_lang, its English name, or the second."
    )
    reverse_translation: bool = option(False, "Translate the other way: target to source.")
    max_test_samples: int | None = option(None, "Translate the first so many test pairs only.")
    source_prefix: str | None = option(
        None, "Text before every source sentence, e.g. 'translate English to German: ' for T5."
    )
    vocab_size: int = option(
        32_000, "Size of the joint vocabulary that is trained where no tokenizer is named."
    )
    tokenizer_algorithm: str = option("bpe", "Of that vocabulary: bpe or unigram.")
    max_corpus_chars: int = option(10_000_000, "Characters to train that vocabulary on.")
    max_source_length: int | None = option(
        None, f"Tokens a source row; {LONGEST}, or what the model allows, by default."
    )
    max_target_length: int | None = option(
        None, f"Tokens a target row; {LONGEST}, or what the model allows, by default."
    )
    truncate_long_pairs: bool = option(
        False, "Cut training pairs that are longer than a row, instead of leaving them out."
    )
    label_smoothing_factor: float = option(
        0.1, "Probability that training spreads over all tokens but the right one; 0 turns it off."
    )
    predict_with_generate: bool = option(
        True, "Translate the validation pairs at each evaluation and compute BLEU and chrF."
    )
    max_generate_samples: int | None = option(
        None, "Translate so many of the validation pairs only, spread evenly over them."
    )
    generation_batch_size: int = option(64, "Sentences that are translated at once.")
    num_beams: int = option(4, "Beams of the search; 1 is greedy.")
    max_new_tokens: int | None = option(
        None, "Longest translation in tokens; about twice the source, at most a row, by default."
    )
    length_penalty: float = option(1.0, "Exponent of the length penalty of beam search.")
    length_penalty_type: str = option(
        "transformers", "transformers: length^penalty; gnmt: ((5 + length) / 6)^penalty."
    )
    bleu_tokenizer: str = option("13a", "sacreBLEU's tokenizer: 13a, intl, zh, char, none, …")
    bleu_lowercase: bool = option(False, "Lower-cased BLEU, as the WMT example reports it.")
    text_samples: int = option(8, "Sample translations to log at each evaluation.")

    def __post_init__(self) -> None:
        if self.max_seq_length:
            self.max_source_length = self.max_source_length or self.max_seq_length
            self.max_target_length = self.max_target_length or self.max_seq_length
        super().__post_init__()

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Add what parallel text and its evaluation ask for."""
        counts = (
            *("max_source_length", "max_target_length", "max_generate_samples", "num_beams"),
            *("max_test_samples", "generation_batch_size", "max_new_tokens", "vocab_size"),
            "max_corpus_chars",
        )
        for name in counts:
            value = getattr(self, name)
            yield (
                value is not None and value < 1,
                f"--{name} {value}: give a number of at least 1",
            )
        yield from split_problems(self, "pairs")
        smoothing = self.label_smoothing_factor
        yield not 0 <= smoothing < 1, f"--label_smoothing_factor {smoothing}: give 0 to below 1"
        yield (
            self.tokenizer_algorithm not in ("unigram", "bpe"),
            f"--tokenizer_algorithm {self.tokenizer_algorithm}: give unigram or bpe",
        )
        yield (
            self.length_penalty_type not in LENGTH_PENALTIES,
            f"--length_penalty_type {self.length_penalty_type}: give "
            + " or ".join(LENGTH_PENALTIES),
        )
        yield (
            self.source_lang is not None and self.source_lang == self.target_lang,
            f"--source_lang and --target_lang are both {self.source_lang}: give two languages",
        )
        yield self.text_samples < 0, f"--text_samples {self.text_samples}: give 0 or more"
        yield (
            self.streaming,
            "--streaming: parallel text is tokenised to disk and read from there; drop the flag",
        )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """Tokens of the longer side as asked for."""
        return max(self.max_source_length or 0, self.max_target_length or 0) or None

    def lengths(self, limit: int | None) -> tuple[int, int]:
        """Return tokens of a source and of a target row where the position table has ``limit``.

        Raises:
            UsageError: a length that was asked for is longer than the table.
        """
        for name in ("max_source_length", "max_target_length"):
            wanted = getattr(self, name)
            if limit and wanted and wanted > limit:
                raise UsageError(
                    f"--{name} {wanted} is longer than the position table of this model allows "
                    f"({limit}): give at most {limit}, or a configuration with more "
                    "max_position_embeddings"
                )
        default = min(LONGEST, limit or LONGEST)
        return self.max_source_length or default, self.max_target_length or default
