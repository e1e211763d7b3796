"""The data flags of each objective, and the base class that checks all flags."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import (
    Annotated,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from hfseq.errors import UsageError, did_you_mean

Value = TypeVar("Value")


def option(default: Value, help: str) -> Value:
    """Return a dataclass field with the help text that ``--help`` shows."""
    if isinstance(default, list):
        return field(default_factory=lambda: copy.copy(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class AllowedValues:
    """The values a flag takes, beside its annotation: ``Annotated[int, Allowed("…", minimum=1)]``.

    ``give`` is what an error asks for. NaN is in no range. The bounds stand in the annotation and
    not with the help text, all of which ``HfArgumentParser`` hands to argparse.
    """

    description: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


PositiveInt = Annotated[int, AllowedValues("a number of at least 1", minimum=1)]
NonNegativeInt = Annotated[int, AllowedValues("0 or more", minimum=0)]
Percentage = Annotated[int, AllowedValues("0 to 99", minimum=0, maximum=99)]
Fraction = Annotated[float, AllowedValues("a number in [0, 1]", minimum=0, maximum=1)]
PositiveFloat = Annotated[float, AllowedValues("a number above 0", above=0)]
SmoothingFactor = Annotated[float, AllowedValues("0 to below 1", minimum=0, below=1)]


@dataclass
class CheckedArguments:
    """Flags that are checked when they are made: one UsageError for all that cannot be.

    The words of a ``Literal`` and the range of an :class:`Allowed` stand in a field's annotation;
    what concerns several flags is told by :meth:`problems`.
    """

    def __post_init__(self) -> None:
        problems = []
        for name, words, allowed in self._rules():
            value = getattr(self, name)
            if value is None or value in words or (not words and value in allowed):
                continue
            problems.append(
                f"--{name} {value}: give {allowed.description}{did_you_mean(str(value), words)}"
            )
        problems += self.problems()
        if problems:
            raise UsageError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with several flags together; subclasses add their own."""
        yield from ()

    @classmethod
    @functools.cache
    def _rules(cls) -> list[tuple[str, tuple[str, ...], AllowedValues]]:
        """Return name, words (none for numbers) and range of restricted flags, own ones first."""
        own = inspect.get_annotations(cls)
        hints = get_type_hints(cls, include_extras=True)
        rules = []
        for name in sorted(hints, key=lambda name: name not in own):
            words: tuple[str, ...] = ()
            allowed = None
            parts = [hints[name]]
            for part in parts:  # grows: Annotated[…] | None, and Literal in Annotated
                if get_origin(part) is Literal:
                    words = get_args(part)
                elif get_origin(part) is Annotated:
                    parts.append(part.__origin__)
                    allowed = next(
                        mark for mark in part.__metadata__ if isinstance(mark, AllowedValues)
                    )
                else:
                    parts += get_args(part)
            if words and allowed is None:
                *others, last = words
                allowed = AllowedValues(f"{', '.join(others)} or {last}" if others else last)
            if allowed is not None:
                rules.append((name, words, allowed))
        return rules


FILES_HELP = (
    "one or more files, quoted globs or comma-separated lists; local paths or any fsspec URL "
    "(gs://, s3://, https://); .txt, .json, .jsonl, .csv, .tsv or .parquet, "
    "optionally .gz, .bz2, .xz or .zst"
)
ARRAYS_HELP = "or one local .npy or .npz with arrays of bytes (images)"

#: Endings of files that are arrays.
ARRAY_EXTENSIONS = (".npy", ".npz")
SPLITS = ("train", "validation", "test")


@dataclass
class TextArguments(CheckedArguments):
    """Where the text comes from and how it becomes rows of tokens (v4's names and defaults)."""

    #: What the splits are shares of.
    unit = "text"
    #: Defaults of flags of training, where this objective has its own.
    defaults: ClassVar[Mapping[str, float]] = {}

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
    sample_by: Literal["line", "paragraph", "document", "raw"] = option(
        "line",
        "What one document of a .txt file is: 'line', 'paragraph' (blank lines) or 'document'; or "
        "'raw': files of any name are one text as they are, and splits are cut off by position.",
    )
    validation_split_percentage: Percentage = option(
        5, "Percentage of the training text to validate on when there is no validation split."
    )
    max_train_samples: PositiveInt | None = option(
        None, "Train on the first so many documents only."
    )
    max_eval_samples: PositiveInt | None = option(
        None, "Evaluate on the first so many documents only."
    )
    streaming: bool = option(
        False, "Read and tokenise while training instead of tokenising everything to disk first."
    )
    max_seq_length: PositiveInt | None = option(
        None, "Tokens per row; by default the longest that tokenizer and model allow."
    )
    line_by_line: bool = option(
        False, "One document per row, truncated, instead of packing documents into full rows."
    )
    pad_to_max_length: bool = option(
        False, "With --line_by_line, pad every row to max_seq_length, so that nothing recompiles."
    )
    preprocessing_num_workers: PositiveInt | None = option(
        None, "Processes that tokenise in parallel."
    )
    overwrite_cache: bool = option(False, "Tokenise again even if the result is in the cache.")
    data_cache_dir: str | None = option(
        None, "Cache of tokenised text; by default $HFSEQ_CACHE, else ~/.cache/hfseq."
    )

    def problems(self) -> Iterator[str]:
        """Add flags of documents where there are none, two sources, and shares of everything."""
        rest = "drop --streaming and --line_by_line"
        apart = self.streaming or self.line_by_line
        if apart and self.sample_by == "raw":
            yield f"--sample_by raw is one text without documents, read whole: {rest}"
        if apart and has_arrays(self):
            yield f"arrays (.npy, .npz) are a row each, read where they lie: {rest}"
        if self.dataset_name and self.train_file:
            yield "--dataset_name and --train_file exclude each other: give one of them"
        held_out = self.validation_split_percentage + getattr(self, "test_split_percentage", 0)
        if held_out >= 100:
            yield (
                f"validation and test shares of {held_out} % leave no training {self.unit}: give "
                "less"
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
        named = self.data_cache_dir or os.environ.get("HFSEQ_CACHE")
        return Path(named or "~/.cache/hfseq").expanduser()


def has_arrays(arguments: TextArguments) -> bool:
    """Tell whether a data file is one of arrays."""
    named = [getattr(arguments, f"{split}_file", None) or () for split in SPLITS]
    return any(name.lower().endswith(ARRAY_EXTENSIONS) for names in named for name in names)


REFERENCE_HELP = (
    "Whole-word reference file for Chinese: a JSON list of token positions per document."
)
UNUSED_HELP = "Kept for old commands, which never read it; giving one is an error."
CROSS_HELP = (
    "Let attention and positions run on from one document of a row to the next, as in "
    "Transformers 4."
)
SMOOTHING_HELP = (
    "Probability that training spreads over all tokens but the right one; 0 turns it off."
)


def test_percentage_option(unit: str) -> int:
    """Return the flag of the percentage that is kept for the test split."""
    return option(
        0,
        f"Percentage of the training {unit} to keep for --do_predict when there is no test split.",
    )


@dataclass
class DataArguments(TextArguments):
    """The data flags of masked language modelling."""

    mlm_probability: Annotated[float, AllowedValues("a number in (0, 1]", above=0, maximum=1)] = (
        option(0.15, "Share of the tokens (or words) to mask.")
    )
    whole_word_masking: bool = option(False, "Mask whole words instead of single tokens.")
    train_ref_file: str | None = option(None, REFERENCE_HELP)
    validation_ref_file: str | None = option(None, "The same for the validation text.")

    def problems(self) -> Iterator[str]:
        """Add references to a stream."""
        if self.streaming and (self.train_ref_file or self.validation_ref_file):
            yield "--streaming cannot use reference files: drop one of the two"
        yield from super().problems()


@dataclass
class CausalArguments(TextArguments):
    """The data flags of causal language modelling."""

    train_file: list[str] | None = option(None, f"Training text: {FILES_HELP}; {ARRAYS_HELP}.")
    validation_file: list[str] | None = option(
        None, f"Validation text: {FILES_HELP}; {ARRAYS_HELP}."
    )
    block_size: (
        Annotated[int, AllowedValues("at least 2, one token predicts nothing", minimum=2)] | None
    ) = option(
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
    test_split_percentage: Percentage = test_percentage_option("text")
    max_test_samples: PositiveInt | None = option(
        None, "Judge the first so many test documents only."
    )

    def problems(self) -> Iterator[str]:
        """Add two lengths that differ, and scores and ends of documents that there are not."""
        block, length = self.block_size, self.max_seq_length
        if block and length and block != length:
            yield f"--block_size {block} and --max_seq_length {length} disagree: give one"
        if self.line_by_line and (self.word_perplexity or self.bits_per_byte):
            yield (
                "--word_perplexity and --bits_per_byte need the whole text, which --line_by_line "
                "truncates: drop it"
            )
        if self.append_eos and (self.sample_by == "raw" or has_arrays(self)):
            yield (
                "--append_eos ends each document, and --sample_by raw and arrays (.npy, .npz) have "
                "none: drop it, or give text with --sample_by document"
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

    mlm_probability: Annotated[
        float, AllowedValues("a number between 0 and 1", above=0, below=1)
    ] = option(0.15, "Share of the tokens to hide in spans (noise density).")
    mean_noise_span_length: Annotated[float, AllowedValues("a number of at least 1", minimum=1)] = (
        option(3.0, "Mean length of the hidden spans, in tokens.")
    )
    train_ref_file: str | None = option(None, UNUSED_HELP)
    validation_ref_file: str | None = option(None, UNUSED_HELP)


@dataclass
class DenoisingArguments(TextArguments):
    """The data flags of denoising."""

    mlm_probability: Fraction = option(0.3, "Share of the tokens to hide in spans.")
    permute_sentence_ratio: Fraction = option(1.0, "Share of the sentences to shuffle.")
    poisson_lambda: Annotated[
        float, AllowedValues("a number in [0.1, 100]", minimum=0.1, maximum=100)
    ] = option(3.0, "Mean of the Poisson distribution of span lengths.")
    cross_documents: bool = option(False, CROSS_HELP)
    train_ref_file: str | None = option(None, UNUSED_HELP)
    validation_ref_file: str | None = option(None, UNUSED_HELP)


#: Where the tasks are on the Hub, a configuration each.
GLUE_DATASET = "nyu-mll/glue"


class GlueTask(NamedTuple):
    """A task; labels are in the order of their numbers, none for regression."""

    sentence_columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    # Endings of its validation and test splits, where there are several.
    parts: tuple[str, ...] = ()


GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation", "accuracy")
    ),
    "sst2": GlueTask(("sentence",), ("negative", "positive")),
    "mrpc": GlueTask(
        ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")
    ),
    "stsb": GlueTask(("sentence1", "sentence2"), (), ("pearson", "spearmanr")),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
    "mnli": GlueTask(
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        parts=("matched", "mismatched"),
    ),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment")),
    "rte": GlueTask(("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": GlueTask(("sentence1", "sentence2"), ("not_entailment", "entailment")),
}


TABLES_HELP = (
    "one or more files, quoted globs or comma-separated lists, local or behind any fsspec URL; "
    ".tsv, .csv, .json, .jsonl or .parquet, optionally .gz, .bz2, .xz or .zst"
)
COLUMN_HELP = "a name, or a number counted from 0"
HEADER_HELP = "Whether the first line of a .tsv or .csv names the columns; by default it does"
QUOTING_HELP = 'Whether " quotes cells; by default in .csv and not in .tsv files.'
METRICS = ("accuracy", "f1", "f1_macro", "matthews_correlation", "pearson", "spearmanr")


@dataclass
class ExampleArguments(TextArguments):
    """Where examples come from that do not run on: of tables, folders or a dataset."""

    unit = "examples"
    #: What an example is to training.
    row_description: ClassVar[str] = "a row"
    #: The flags that name columns of a table, by number where it has no header.
    column_flags: ClassVar[tuple[str, ...]] = ()

    def problems(self) -> Iterator[str]:
        """Add two sources of one split, and what only running text has."""
        folders = [split for split in SPLITS if getattr(self, f"{split}_dir", None)]
        for split in folders:
            if getattr(self, f"{split}_file"):
                yield f"--{split}_dir and --{split}_file exclude each other: give one of them"
        if self.dataset_name and "train" in folders:
            yield "--dataset_name and --train_dir exclude each other: give one of them"
        if self.streaming or self.line_by_line or self.sample_by != "line":
            yield (
                "--streaming, --line_by_line and --sample_by are for running text; here every "
                f"{self.unit.removesuffix('s')} is {self.row_description}: drop them"
            )
        yield from super().problems()

    @property
    def requested_columns(self) -> list[str]:
        """The columns that flags name."""
        return [name for flag in self.column_flags if (name := getattr(self, flag))]

    @property
    def columns_by_number(self) -> bool:
        """Whether a column is named by its number."""
        return any(re.fullmatch(r"[0-9]{1,9}", name) for name in self.requested_columns)


@dataclass
class ClassificationArguments(ExampleArguments):
    """Where labelled sentences come from, what is predicted, and how predictions are judged."""

    column_flags = ("sentence1_column", "sentence2_column", "label_column")

    task_name: str | None = option(
        None,
        f"A GLUE task: {', '.join(GLUE)}; from the Hub ({GLUE_DATASET}), or with --train_file from "
        "files that have its columns.",
    )
    task_type: Literal["classification", "regression"] | None = option(
        None,
        "classification or regression; by default regression where the training labels are "
        "numbers with a fraction.",
    )
    train_file: list[str] | None = option(None, f"Training examples: {TABLES_HELP}.")
    validation_file: list[str] | None = option(
        None, "Validation examples, likewise; several files are judged together and each apart."
    )
    test_file: list[str] | None = option(
        None, "Examples for --do_predict, likewise, with labels or without."
    )
    test_split_percentage: Percentage = test_percentage_option("examples")
    max_predict_samples: PositiveInt | None = option(
        None, "Predict the first so many test examples only."
    )
    sentence1_column: str | None = option(
        None,
        f"Column of the (first) sentence: {COLUMN_HELP}; by default the task's, or one of a usual "
        "name (sentence, text, sentence1, premise, question1 …).",
    )
    sentence2_column: str | None = option(
        None, f"Column of the second sentence, if there is one: {COLUMN_HELP}."
    )
    label_column: str | None = option(
        None, f"Column of the label: {COLUMN_HELP}; by default the task's, or 'label'."
    )
    label_column_name: str | None = option(None, "Old name of --label_column.")
    header: bool | None = option(
        None,
        f"{HEADER_HELP}, unless columns are given by number or the file is CoLA's own.",
    )
    quoting: bool | None = option(None, QUOTING_HELP)
    no_quoting: bool = option(False, 'Take " as any other character, in .csv files too.')
    metrics: list[str] | None = option(
        None,
        f"What predictions are judged by: {', '.join(METRICS)}, or any name that the evaluate "
        "library loads; by default those of the task.",
    )
    vocabulary: (
        Annotated[Literal["words"], AllowedValues("words, or a tokenizer with --tokenizer_name")]
        | None
    ) = option(
        None,
        "'words': without --tokenizer_name, make a vocabulary of the words of the training part.",
    )
    vocab_size: PositiveInt | None = option(
        None, "Entries of that vocabulary; by default all words."
    )
    ignore_mismatched_sizes: bool = option(
        False, "Start with a new classifier where the model's own has another number of classes."
    )

    def __post_init__(self) -> None:
        self.sentence1_column = self.sentence1_column or self.text_column_name
        self.label_column = self.label_column or self.label_column_name
        if self.no_quoting:
            self.quoting = False
        if self.task_name:
            self.task_name = self.task_name.lower().replace("-", "")
        files = self.train_file or self.validation_file or self.test_file
        if self.task_name in GLUE and not (files or self.dataset_name):
            self.dataset_name, self.dataset_config_name = GLUE_DATASET, self.task_name
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Add unknown tasks, and a kind that is not the task's."""
        task = GLUE.get(self.task_name or "")
        if self.task_name is not None and task is None:
            yield (
                f"--task_name {self.task_name}: give one of {', '.join(GLUE)}, or your own data "
                "with --train_file and no --task_name"
            )
        kind = "classification" if task and task.labels else "regression"
        if task is not None and self.task_type not in (None, kind):
            yield (
                f"--task_type {self.task_type} and --task_name {self.task_name} disagree: that "
                f"is {kind}; drop one of the two"
            )
        yield from super().problems()


@dataclass
class RecordArguments(ExampleArguments):
    """Where examples with named columns come from, of texts, lists and objects."""

    row_description = "for itself"
    label_column = None  # what tables are also asked for
    task_name = ""

    train_file: list[str] | None = option(None, f"Training examples: {TABLES_HELP}.")
    validation_file: list[str] | None = option(None, "Validation examples, likewise.")
    test_file: list[str] | None = option(
        None, "Examples for --do_predict, likewise, with answers or without."
    )
    test_split_percentage: Percentage = test_percentage_option("examples")
    max_predict_samples: PositiveInt | None = option(
        None, "Predict the first so many test examples only."
    )
    bad_examples: Literal["skip", "error"] = option(
        "skip",
        "What cannot be learned from: 'skip' leaves it out, counted and named; 'error' stops.",
    )
    header: bool | None = option(None, f"{HEADER_HELP}.")
    quoting: bool | None = option(None, QUOTING_HELP)


@dataclass
class TokenClassificationArguments(RecordArguments):
    """Where words with tags come from, and how predictions are judged."""

    task_name: str = option(
        "ner", "What the tags are called: the column NAME_tags is taken where none is named."
    )
    label_column_name: str | None = option(
        None,
        "Column of the tags, a list for each example; by default NAME_tags, tags or labels, else "
        "the second.",
    )
    label_all_tokens: bool = option(
        False, "Tag all tokens of a word, and not the first alone (B- goes on as I-)."
    )
    return_entity_level_metrics: bool = option(
        False, "Report the scores of each kind of entity as well."
    )
    ignore_mismatched_sizes: bool = option(
        False, "Start with a new classifier where the model's own has other tags."
    )


@dataclass
class QuestionAnsweringArguments(RecordArguments):
    """Where questions with contexts and answers come from, and how answers are found."""

    doc_stride: PositiveInt | None = option(
        None,
        "Tokens that two windows of a context share, where it is longer than a row; 128, or a "
        "third of a row, by default.",
    )
    version_2_with_negative: bool = option(
        False, "Some questions have no answer; without it these are bad examples."
    )
    null_score_diff_threshold: float = option(
        0.0,
        "A question has no answer where that scores so much more than the best one "
        "(with --version_2_with_negative).",
    )
    n_best_size: PositiveInt = option(
        20, "Starts and ends of answers that are tried, and answers kept."
    )
    max_answer_length: PositiveInt = option(30, "Tokens of the longest answer.")


@dataclass
class ChatArguments(RecordArguments):
    """Where conversations come from, and what of them is learned (TRL's names and defaults)."""

    defaults: ClassVar[Mapping[str, float]] = {"learning_rate": 2e-5}

    test_file: list[str] | None = option(None, "Examples for --do_predict, likewise.")
    dataset_text_field: str = option(
        "text", "Column of whole texts, where there are neither messages nor prompts."
    )
    max_length: PositiveInt | None = option(
        None, "Tokens of an example, the rest is cut; 1024, or what the model allows, by default."
    )
    packing: bool = option(
        False, "Put several examples in a row, which see nothing of each other: less padding."
    )
    packing_strategy: Literal["bfd"] = option(
        "bfd", "bfd: longest first, each into the fullest row that has room (best-fit decreasing)."
    )
    completion_only_loss: bool | None = option(
        None, "Learn completions and no prompts; by default where the data has both."
    )
    assistant_only_loss: bool = option(
        False,
        "Learn what the assistant says and nothing else of conversations; the chat template has to "
        "mark it by blocks called generation.",
    )
    chat_template_path: str | None = option(
        None,
        "Chat template: a .jinja file, or the directory or Hub name of a tokenizer that has one.",
    )
    eos_token: str | None = option(
        None, "Token that ends a turn or text, where it is not the tokenizer's, e.g. '<|im_end|>'."
    )

    def __post_init__(self) -> None:
        if self.text_column_name:
            self.dataset_text_field = self.text_column_name
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Add two lengths that differ."""
        one, other = self.max_length, self.max_seq_length
        if one and other and one != other:
            yield f"--max_length {one} and --max_seq_length {other} disagree: give one"
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """Tokens of an example as asked for."""
        return self.max_length or self.max_seq_length


@dataclass
class EmbeddingArguments(RecordArguments):
    """Where texts that belong together come from, and how a text becomes a vector."""

    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = option(
        None,
        "How the vectors of tokens become one of the text; by default as the model's own files "
        "say, else mean.",
    )
    normalize: bool = option(True, "Give vectors the length 1, also in what is saved.")
    scale: PositiveFloat = option(20.0, "What the cosines are multiplied by: 1 / temperature.")
    matryoshka_dims: str | None = option(
        None,
        "Numbers of features, such as 384,128,64: the first so many are trained to be enough, too.",
    )

    def problems(self) -> Iterator[str]:
        """Add numbers of features that are none."""
        try:
            wrong = min(self.dims, default=1) < 1
        except ValueError:
            wrong = True
        if wrong:
            yield f"--matryoshka_dims {self.matryoshka_dims}: give numbers, as 384,128,64"
        yield from super().problems()

    @property
    def dims(self) -> tuple[int, ...]:
        """The numbers of features that are trained."""
        return tuple(map(int, self.matryoshka_dims.split(","))) if self.matryoshka_dims else ()


@dataclass
class ImageArguments(ExampleArguments):
    """Where pictures with labels come from, how they are read, and how predictions are judged."""

    unit = "pictures"
    column_flags = ("image_column", "label_column")
    task_name = None  # what tables are also asked for

    train_dir: str | None = option(None, "Training pictures: a folder with a folder a class.")
    validation_dir: str | None = option(None, "Validation pictures, likewise.")
    test_dir: str | None = option(
        None, "Pictures for --do_predict, likewise, or without folders of classes."
    )
    train_file: list[str] | None = option(
        None, f"Training pictures in tables, a column of files and one of labels: {TABLES_HELP}."
    )
    validation_file: list[str] | None = option(None, "Validation pictures, likewise.")
    test_file: list[str] | None = option(
        None, "Pictures for --do_predict, likewise, with labels or without."
    )
    test_split_percentage: Percentage = test_percentage_option("pictures")
    max_predict_samples: PositiveInt | None = option(
        None, "Predict the first so many test pictures only."
    )
    image_column: str | None = option(
        None,
        f"Column of the picture: {COLUMN_HELP}; by default that of pictures in a dataset, or one "
        "of a usual name (image, path, file_name …).",
    )
    label_column: str | None = option(
        None, f"Column of the label: {COLUMN_HELP}; by default 'label'."
    )
    image_size: PositiveInt | None = option(
        None,
        "Height and width that the model reads; by default the image processor's, and 224 for a "
        "model from scratch.",
    )
    augment: bool = option(
        True, "Train on a part of each picture, cut out at random and mirrored in half the cases."
    )
    decode_workers: NonNegativeInt | None = option(
        None,
        "Processes that decode pictures: by default one a CPU, 8 at most; 0 decodes in training's.",
    )
    max_image_pixels: PositiveInt = option(
        1 << 27, "Leave out pictures of more pixels, before they take memory."
    )
    header: bool | None = option(None, f"{HEADER_HELP}.")
    quoting: bool | None = option(None, QUOTING_HELP)
    metrics: list[str] | None = option(
        None,
        f"What predictions are judged by: {', '.join(METRICS[:4])}, or any name that the evaluate "
        "library loads; by default accuracy.",
    )
    ignore_mismatched_sizes: bool = option(
        False, "Start with a new classifier where the model's own has another number of classes."
    )


@dataclass
class ImageTextArguments(ImageArguments):
    """Where pictures with captions come from, and how they are read."""

    caption_column: str | None = option(
        None,
        f"Column of the caption, or of a list of them: {COLUMN_HELP}; by default one of a usual "
        "name (caption, captions, text …).",
    )
    data_dir: str | None = option(
        None, "Folder that the files of a table are relative to; by default the table's own."
    )

    def problems(self) -> Iterator[str]:
        """Add folders, in which there are no captions."""
        if self.train_dir or self.validation_dir or self.test_dir:
            yield (
                "folders have classes and no captions: give tables with --train_file and "
                "--validation_file"
            )
        yield from super().problems()


@dataclass
class ImageToTextArguments(ImageTextArguments):
    """Where pictures with captions come from, and how captions are written."""

    max_target_length: PositiveInt = option(
        128, "Tokens a caption, its end among them; longer: cut."
    )
    val_max_target_length: PositiveInt | None = option(
        None, "Tokens a caption that is written; by default --max_target_length."
    )
    label_smoothing_factor: SmoothingFactor = option(0.0, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Write captions of the validation pictures at each evaluation and compute ROUGE."
    )
    max_generate_samples: PositiveInt | None = option(
        None, "Write captions of so many validation pictures only, spread evenly over them."
    )
    generation_batch_size: PositiveInt = option(16, "Pictures that are written about at once.")
    num_beams: PositiveInt = option(1, "Beams of the search; 1 is greedy.")
    text_samples: NonNegativeInt = option(8, "Sample captions to log at each evaluation.")
    block_size: NonNegativeInt | None = option(
        None, "Version 4's: pictures were prepared so many at a time. Here they always are."
    )

    @property
    def row_length(self) -> int | None:
        """Tokens of a caption as asked for."""
        return self.max_target_length


@dataclass
class AudioArguments(ExampleArguments):
    """Where sound comes from, and how it is read."""

    unit = "sounds"
    column_flags = ("audio_column_name",)
    label_column = task_name = None  # what tables are also asked for

    train_dir: str | None = option(None, "Training sounds: a folder, all below it.")
    validation_dir: str | None = option(None, "Validation sounds, likewise.")
    train_file: list[str] | None = option(
        None, f"Training sounds in tables that have a column of files: {TABLES_HELP}."
    )
    validation_file: list[str] | None = option(None, "Validation sounds, likewise.")
    train_split_name: str = option("train", "Split of --dataset_name to train on.")
    validation_split_name: str = option("validation", "Split of --dataset_name to validate on.")
    audio_column_name: str | None = option(
        None,
        f"Column of the sound: {COLUMN_HELP}; by default that of sounds in a dataset, or one of a "
        "usual name (audio, path, file …).",
    )
    speech_file_column: str | None = option(None, "Another name of --audio_column_name.")
    max_duration_in_seconds: Annotated[float, AllowedValues("more than 0", above=0)] = option(
        20.0, "Cut longer sounds to so much: in training at a random place, else from the start."
    )
    min_duration_in_seconds: Annotated[float, AllowedValues("0 or more", minimum=0)] = option(
        0.0, "Leave shorter sounds out."
    )
    pad_to_multiple_of: PositiveInt = option(
        1024, "Samples of a batch are a multiple of this, of which there are four at most."
    )
    decode_workers: NonNegativeInt | None = option(
        None, "Threads that read sounds: by default one a CPU, 8 at most; 0 reads in training's."
    )
    mask_time_prob: Fraction | None = option(
        None,
        "Share of the frames to hide, if no spans overlap; by default the configuration's "
        "mask_time_prob.",
    )
    mask_time_length: PositiveInt | None = option(
        None, "Frames of a hidden span; by default the configuration's mask_time_length."
    )
    freeze_feature_extractor: bool = option(
        False, "Leave the convolutions as they are: for more training of a trained model."
    )
    header: bool | None = option(None, f"{HEADER_HELP}.")
    quoting: bool | None = option(None, QUOTING_HELP)

    def __post_init__(self) -> None:
        self.audio_column_name = self.audio_column_name or self.speech_file_column
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Add lengths that exclude each other."""
        if self.min_duration_in_seconds > self.max_duration_in_seconds:
            yield (
                f"--min_duration_in_seconds {self.min_duration_in_seconds} is more than "
                f"--max_duration_in_seconds {self.max_duration_in_seconds}"
            )
        yield from super().problems()


@dataclass
class SpeechPretrainingArguments(AudioArguments):
    """The data flags of learning from speech without text."""

    max_gumbel_temperature: Annotated[float, AllowedValues("more than 0", above=0)] = option(
        2.0, "Temperature of the choice of codes at the first step."
    )
    min_gumbel_temperature: Annotated[float, AllowedValues("more than 0", above=0)] = option(
        0.1, "Temperature that it does not fall below."
    )
    gumbel_temperature_decay: Annotated[float, AllowedValues("in (0, 1]", above=0, maximum=1)] = (
        option(0.999995, "What the temperature is multiplied by after each step.")
    )
    verbose_logging: bool = option(False, "Ignored: a flag of the old script.")


@dataclass
class SpeechArguments(AudioArguments):
    """Where sound with text comes from."""

    do_lower_case: bool = option(
        True, "Lower-case the text where no tokenizer is named, before its letters are collected."
    )
    chars_to_ignore: list[str] | None = option(
        None, "Characters to leave out of the text, such as , . ! ?"
    )
    ignore_mismatched_sizes: bool = option(
        False, "Start with a new head where the model's own has another number of letters."
    )

    def problems(self) -> Iterator[str]:
        """Add folders, in which there is no text."""
        if self.train_dir or self.validation_dir:
            yield (
                "folders have sound and no text: give tables with --train_file and "
                "--validation_file"
            )
        yield from super().problems()


#: The flags that tables are read by.
TableArguments = ClassificationArguments | RecordArguments | ImageArguments | AudioArguments

PARALLEL_HELP = (
    ".csv, .tsv, .json, .jsonl or .parquet with both sides, two aligned text files (corpus.en "
    "corpus.de), a folder of MultiUN or OPUS Moses files, or tfds:NAME/CONFIG#SPLIT"
)

#: Tokens a side, where no flag and no position table says how many.
DEFAULT_SIDE_LENGTH = 256
#: What columns are called after their side.
SIDE_COLUMNS = {
    "source": ("source", "src", "source_text"),
    "target": ("target", "tgt", "target_text"),
}


@dataclass
class TranslationArguments(TextArguments):
    """Where parallel text comes from, how it is cut into rows, and how translations are judged."""

    unit = "pairs"
    #: What the columns of a source and a target are usually called.
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = SIDE_COLUMNS

    train_file: list[str] | None = option(None, f"Training pairs: {PARALLEL_HELP}.")
    validation_file: list[str] | None = option(None, f"Validation pairs: {PARALLEL_HELP}.")
    test_file: list[str] | None = option(None, f"Pairs for --do_predict: {PARALLEL_HELP}.")
    validation_split_percentage: Percentage = option(
        1,
        "Percentage of the training pairs to validate on when there is no validation split; all "
        "translations of one source sentence stay on one side.",
    )
    test_split_percentage: Percentage = test_percentage_option("pairs")
    source_lang: str | None = option(None, "Language translated from, e.g. en.")
    target_lang: str | None = option(None, "Language translated into, e.g. de.")
    source_column: str | None = option(
        None, "Column of the source text; by default source_lang, its English name, or the first."
    )
    target_column: str | None = option(
        None, "Column of the target text; by default target_lang, its English name, or the second."
    )
    reverse_translation: bool = option(False, "Translate the other way: target to source.")
    max_test_samples: PositiveInt | None = option(
        None, "Translate the first so many test pairs only."
    )
    source_prefix: str | None = option(
        None, "Text before every source sentence, e.g. 'translate English to German: ' for T5."
    )
    vocab_size: PositiveInt = option(
        32_000, "Size of the joint vocabulary that is trained where no tokenizer is named."
    )
    tokenizer_algorithm: Literal["unigram", "bpe"] = option(
        "bpe", "Of that vocabulary: bpe or unigram."
    )
    max_corpus_chars: PositiveInt = option(10_000_000, "Characters to train that vocabulary on.")
    max_source_length: PositiveInt | None = option(
        None, f"Tokens a source row; {DEFAULT_SIDE_LENGTH}, or what the model allows, by default."
    )
    max_target_length: PositiveInt | None = option(
        None, f"Tokens a target row; {DEFAULT_SIDE_LENGTH}, or what the model allows, by default."
    )
    truncate_long_pairs: bool = option(
        False, "Cut training pairs that are longer than a row, instead of leaving them out."
    )
    label_smoothing_factor: SmoothingFactor = option(0.1, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Translate the validation pairs at each evaluation and compute BLEU and chrF."
    )
    max_generate_samples: PositiveInt | None = option(
        None, "Translate so many of the validation pairs only, spread evenly over them."
    )
    generation_batch_size: PositiveInt = option(64, "Sentences that are translated at once.")
    num_beams: PositiveInt = option(4, "Beams of the search; 1 is greedy.")
    max_new_tokens: PositiveInt | None = option(
        None, "Longest translation in tokens; about twice the source, at most a row, by default."
    )
    length_penalty: float = option(1.0, "Exponent of the length penalty of beam search.")
    length_penalty_type: Literal["transformers", "gnmt"] = option(
        "transformers", "transformers: length^penalty; gnmt: ((5 + length) / 6)^penalty."
    )
    bleu_tokenizer: str = option("13a", "sacreBLEU's tokenizer: 13a, intl, zh, char, none, …")
    bleu_lowercase: bool = option(False, "Lower-cased BLEU, as the WMT example reports it.")
    text_samples: NonNegativeInt = option(8, "Sample translations to log at each evaluation.")

    def __post_init__(self) -> None:
        if self.max_seq_length:
            self.max_source_length = self.max_source_length or self.max_seq_length
            self.max_target_length = self.max_target_length or self.max_seq_length
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Add a pair of one language, and reading as a stream."""
        if self.source_lang is not None and self.source_lang == self.target_lang:
            yield (
                f"--source_lang and --target_lang are both {self.source_lang}: give two languages"
            )
        if self.streaming:
            yield (
                "--streaming: parallel text is tokenised to disk and read from there; drop the flag"
            )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """Tokens of the longer side as asked for."""
        return max(self.max_source_length or 0, self.max_target_length or 0) or None

    def lengths(self, limit: int | None) -> tuple[int, int]:
        """Return tokens of a source and of a target row where the position table has ``limit``."""
        for name in ("max_source_length", "max_target_length"):
            wanted = getattr(self, name)
            if limit and wanted and wanted > limit:
                raise UsageError(
                    f"--{name} {wanted} is longer than the position table of this model allows "
                    f"({limit}): give at most {limit}, or a configuration with more "
                    "max_position_embeddings"
                )
        default = min(DEFAULT_SIDE_LENGTH, limit or DEFAULT_SIDE_LENGTH)
        return self.max_source_length or default, self.max_target_length or default


@dataclass
class SummarizationArguments(TranslationArguments):
    """Where texts with summaries come from, how they are cut, and how summaries are written."""

    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "source": ("text", "document", "article", "dialogue", "source", "src"),
        "target": ("summary", "highlights", "abstract", "target", "tgt"),
    }

    validation_split_percentage: Percentage = option(
        5, "Percentage of the training texts to validate on when there is no validation split."
    )
    text_column: str | None = option(
        None, "Column of the text; by default text, document, article or dialogue, else the first."
    )
    summary_column: str | None = option(
        None, "Column of the summary; by default summary, highlights or abstract, else the second."
    )
    max_source_length: PositiveInt | None = option(
        None, "Tokens of a text, the rest is cut; 1024, or what the model allows, by default."
    )
    max_target_length: PositiveInt | None = option(
        None, "Tokens of a summary to learn from; 128, or what the model allows, by default."
    )
    val_max_target_length: PositiveInt | None = option(
        None, "Tokens of a summary that is written; by default --max_target_length."
    )
    truncate_long_pairs: bool = option(
        True, "Cut what is longer than a row; with False such pairs are left out of training."
    )
    label_smoothing_factor: SmoothingFactor = option(0.0, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Summarise the validation texts at each evaluation and compute ROUGE."
    )
    max_predict_samples: PositiveInt | None = option(
        None, "Summarise the first so many test texts only."
    )
    num_beams: PositiveInt = option(1, "Beams of the search; 1 is greedy.")

    def __post_init__(self) -> None:
        self.source_column = self.source_column or self.text_column or self.text_column_name
        self.target_column = self.target_column or self.summary_column
        self.max_new_tokens = self.max_new_tokens or self.val_max_target_length
        self.max_test_samples = self.max_test_samples or self.max_predict_samples
        super().__post_init__()

    def lengths(self, limit: int | None) -> tuple[int, int]:
        """Return tokens of a text and of a summary where the position table has ``limit``."""
        source, target = (min(default, limit or default) for default in (1024, 128))
        asked = super().lengths(limit)  # which refuses what is too long
        return (
            asked[0] if self.max_source_length else source,
            asked[1] if self.max_target_length else target,
        )


@dataclass
class SpeechRecognitionArguments(SpeechArguments):
    """Where sound with text comes from, and how text is written."""

    language: str | None = option(
        None, "Language that is spoken, de or german; a model of several languages needs it."
    )
    task: Literal["transcribe", "translate"] = option(
        "transcribe", "What the text is: what is said, or an English translation of it."
    )
    max_label_length: PositiveInt = option(128, "Leave sounds out whose text has more tokens.")
    label_smoothing_factor: SmoothingFactor = option(0.0, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Write down the validation sounds at each evaluation and count errors of words."
    )
    max_generate_samples: PositiveInt | None = option(
        None, "Write down so many validation sounds only, spread evenly over them."
    )
    generation_batch_size: PositiveInt = option(16, "Sounds that are written down at once.")
    num_beams: PositiveInt = option(1, "Beams of the search; 1 is greedy.")
    text_samples: NonNegativeInt = option(8, "Sample texts to log at each evaluation.")
    feature_extractor_name: str | None = option(
        None, "Directory or Hub name of the feature extractor, if it does not lie with the model."
    )
    generation_max_length: PositiveInt | None = option(
        None, "Tokens a text that is written; by default what the model allows."
    )
    dataloader_num_workers: NonNegativeInt | None = option(
        None, "Another name of --decode_workers."
    )
    eval_split_name: str | None = option(None, "Another name of --validation_split_name.")
    text_column: str | None = option(None, "Another name of --text_column_name.")
    pad_input_to_multiple_of: PositiveInt | None = option(
        None, "Version 4's: spectrograms are always of thirty seconds."
    )
    pad_target_to_multiple_of: PositiveInt | None = option(
        None, "Version 4's: texts are always padded to --max_label_length."
    )

    def __post_init__(self) -> None:
        self.validation_split_name = self.eval_split_name or self.validation_split_name
        self.text_column_name = self.text_column_name or self.text_column
        if self.decode_workers is None:
            self.decode_workers = self.dataloader_num_workers
        super().__post_init__()


#: The data flags of hfseq's objectives; others have those of masked language modelling.
OBJECTIVES: dict[str, type[TextArguments]] = {
    "mlm": DataArguments,
    "clm": CausalArguments,
    "span_mlm": SpanArguments,
    "denoising": DenoisingArguments,
    "translation": TranslationArguments,
    "summarization": SummarizationArguments,
    "classification": ClassificationArguments,
    "token_classification": TokenClassificationArguments,
    "question_answering": QuestionAnsweringArguments,
    "sft": ChatArguments,
    "embedding": EmbeddingArguments,
    "image_classification": ImageArguments,
    "image_text": ImageTextArguments,
    "image_to_text": ImageToTextArguments,
    "wav2vec2": SpeechPretrainingArguments,
    "ctc": SpeechArguments,
    "speech_recognition": SpeechRecognitionArguments,
}


ArgumentsT = TypeVar("ArgumentsT", bound=TextArguments)


def convert_arguments(arguments: TextArguments, arguments_class: type[ArgumentsT]) -> ArgumentsT:
    """Return ``arguments`` as those of another objective: what was set stays set."""
    if isinstance(arguments, arguments_class):
        return arguments
    known = {item.name for item in fields(arguments_class)}
    given = [(item, getattr(arguments, item.name)) for item in fields(arguments)]
    changed = {item.name: value for item, value in given if value != item.default}
    return arguments_class(**{name: value for name, value in changed.items() if name in known})
