"""The data flags of each objective, and the base class that validates flags."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from hfseq.errors import UsageError, did_you_mean, parse_json

Value = TypeVar("Value")


def option(default: Value, help: str) -> Value:
    """Returns a dataclass field with a default value and a help text for `--help`."""
    if isinstance(default, list):
        return field(default_factory=lambda: copy.copy(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class AllowedValues:
    """Range of values that a flag accepts, e.g. `Annotated[int, AllowedValues("…", minimum=1)]`.

    The range is part of the type annotation and not of the field's metadata, because
    `HfArgumentParser` passes the metadata on to argparse. NaN is never allowed.

    Attributes:
        description: Description of the allowed values for error messages.
        minimum: Smallest allowed value.
        maximum: Largest allowed value.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
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


PositiveInt = Annotated[int, AllowedValues("an integer of at least 1", minimum=1)]
NonNegativeInt = Annotated[int, AllowedValues("an integer of at least 0", minimum=0)]
Percentage = Annotated[int, AllowedValues("an integer from 0 to 99", minimum=0, maximum=99)]
Fraction = Annotated[float, AllowedValues("a number from 0 to 1", minimum=0, maximum=1)]
PositiveFloat = Annotated[float, AllowedValues("a number greater than 0", above=0)]
NonNegativeFloat = Annotated[float, AllowedValues("a number of at least 0", minimum=0)]
SmoothingFactor = Annotated[
    float, AllowedValues("a number from 0 to less than 1", minimum=0, below=1)
]


@dataclass
class CheckedArguments:
    """Base class of flags that are validated on construction.

    The annotation of a field can restrict its values to a list of words (`Literal`) or to a range
    (`AllowedValues`). Subclasses check combinations of flags in `problems`.

    Raises:
        UsageError: One or more values are not allowed. The message lists all of them.
    """

    def __post_init__(self) -> None:
        problems = []
        for name, words, allowed in self._rules():
            value = getattr(self, name)
            if value is None or value in words or (not words and value in allowed):
                continue
            problems.append(
                f"--{name} {value}: expected {allowed.description}{did_you_mean(str(value), words)}"
            )
        problems += self.problems()
        if problems:
            raise UsageError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yields an error message for each invalid combination of flags.

        Subclasses yield their own messages, followed by those of their base class.
        """
        yield from ()

    @classmethod
    @functools.cache
    def _rules(cls) -> list[tuple[str, tuple[str, ...], AllowedValues]]:
        """Returns the name, the allowed words and the range of each flag with restricted values.

        The words are empty for flags with numbers. The fields that the class itself declares come
        first, followed by inherited fields.
        """
        own_annotations = inspect.get_annotations(cls)
        hints = get_type_hints(cls, include_extras=True)
        rules = []
        for name in sorted(hints, key=lambda name: name not in own_annotations):
            words: tuple[str, ...] = ()
            allowed = None
            parts = [hints[name]]
            for part in parts:  # the loop appends nested types, e.g. those of Annotated[…] | None
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
                *first_words, last_word = words
                allowed = AllowedValues(
                    f"{', '.join(first_words)} or {last_word}" if first_words else last_word
                )
            if allowed is not None:
                rules.append((name, words, allowed))
        return rules


FILES_HELP = (
    "files, quoted globs or comma-separated lists; local paths or any fsspec URL (gs://, "
    "s3://, https://); .txt, .json, .jsonl, .csv, .tsv or .parquet, optionally compressed "
    "(.gz, .bz2, .xz, .zst)"
)
ARRAYS_HELP = "or one local .npy or .npz file with uint8 arrays (images)"

#: Extensions of files that contain arrays.
ARRAY_EXTENSIONS = (".npy", ".npz")
SPLITS = ("train", "validation", "test")


@dataclass
class DistillationArguments(CheckedArguments):
    """Flags of knowledge distillation, for objectives whose models return logits or vectors."""

    teacher: str | None = option(
        None,
        "Directory or Hub name of a teacher for knowledge distillation. The model learns the "
        "teacher's predictions in addition to the labels.",
    )
    teacher_dtype: Literal["float32", "bfloat16"] | None = option(
        None, "Dtype of the teacher's parameters. Default: --param_dtype."
    )
    distillation_loss: (
        Literal["forward_kl", "reverse_kl", "jsd", "cosine", "mse", "margin_mse"] | None
    ) = option(
        None,
        "How the predictions of model and teacher are compared. forward_kl, reverse_kl and jsd "
        "compare distributions, and mse compares outputs. Embeddings also support cosine and "
        "margin_mse, and reward models margin_mse. Default: cosine for embeddings, margin_mse for "
        "reward models, otherwise forward_kl.",
    )
    distillation_temperature: PositiveFloat = option(
        1.0,
        "Temperature of teacher and student for forward_kl, reverse_kl and jsd. These losses are "
        "multiplied by its square.",
    )
    distillation_beta: Annotated[
        float, AllowedValues("a number between 0 and 1", above=0, below=1)
    ] = option(0.5, "Weight of the teacher in the mixture of --distillation_loss jsd.")
    distillation_weight: Annotated[float, AllowedValues("0 or more", minimum=0)] = option(
        0.5, "Weight of the distillation loss."
    )
    task_weight: Annotated[float, AllowedValues("0 or more", minimum=0)] = option(
        0.5, "Weight of the loss of the labels. It only has an effect with --teacher."
    )
    hidden_state_weight: Annotated[float, AllowedValues("0 or more", minimum=0)] = option(
        0.0,
        "Weight of the cosine distance between the last hidden states of teacher and student.",
    )
    attention_weight: Annotated[float, AllowedValues("0 or more", minimum=0)] = option(
        0.0,
        "Weight of the KL divergence between the attention weights of the last layers of teacher "
        "and student.",
    )

    def problems(self) -> Iterator[str]:
        """Yields an error if all losses that use the teacher have the weight 0."""
        weights = (self.distillation_weight, self.hidden_state_weight, self.attention_weight)
        if self.teacher and not any(weights):
            yield (
                "--teacher has no effect with --distillation_weight 0, --hidden_state_weight 0 and "
                "--attention_weight 0: increase one of them, or drop --teacher"
            )
        yield from super().problems()


@dataclass
class TextArguments(DistillationArguments):
    """Data flags shared by all objectives: data sources, tokenization and row length.

    Names and defaults are those of the Transformers 4 scripts.
    """

    #: Plural noun for the examples of a split, for messages.
    unit = "text"
    #: Defaults of training flags that differ for this objective.
    defaults: ClassVar[Mapping[str, float]] = {}

    dataset_name: str | None = option(
        None,
        "Dataset on the Hub, local dataset directory, or a name that a plugin's load_dataset "
        "hook handles.",
    )
    dataset_config_name: str | None = option(
        None, "Configuration of the dataset, e.g. a language code."
    )
    dataset_revision: str | None = option(None, "Branch, tag or commit of the dataset on the Hub.")
    train_file: list[str] | None = option(None, f"Training data: {FILES_HELP}.")
    validation_file: list[str] | None = option(None, f"Validation data: {FILES_HELP}.")
    text_column_name: str | None = option(
        None,
        "Column of the text. Default: 'text' if there is such a column, otherwise the first "
        "string column.",
    )
    sample_by: Literal["line", "paragraph", "document", "raw"] = option(
        "line",
        "How a .txt file is split into documents: by 'line', by 'paragraph' (blank lines), or as "
        "one 'document'. 'raw' reads files of any type as one text without documents and splits "
        "it by position.",
    )
    validation_split_percentage: Percentage = option(
        5,
        "Percentage of the training data to use for validation when the data has no validation "
        "split.",
    )
    max_train_samples: PositiveInt | None = option(
        None, "Truncate the training set to this number of examples."
    )
    max_eval_samples: PositiveInt | None = option(
        None, "Truncate the validation set to this number of examples."
    )
    streaming: bool = option(
        False, "Read and tokenize the data during training instead of tokenizing it to disk first."
    )
    max_seq_length: PositiveInt | None = option(
        None,
        "Maximum sequence length in tokens. Default: the maximum that tokenizer and model support.",
    )
    line_by_line: bool = option(
        False,
        "Train on one truncated document per row instead of packing documents into full rows.",
    )
    pad_to_max_length: bool = option(
        False,
        "Pad all rows to the maximum length to avoid recompilation. For plain text, this only has "
        "an effect with --line_by_line.",
    )
    preprocessing_num_workers: PositiveInt | None = option(
        None, "Number of processes for tokenization."
    )
    overwrite_cache: bool = option(
        False, "Read and tokenize the data again even if the result is cached."
    )
    data_cache_dir: str | None = option(
        None, "Directory of cached tokens. Default: $HFSEQ_CACHE, otherwise ~/.cache/hfseq."
    )

    def problems(self) -> Iterator[str]:
        """Yields conflicts between data sources, data formats and split percentages."""
        remedy = "drop --streaming and --line_by_line"
        per_document = self.streaming or self.line_by_line
        if per_document and self.sample_by == "raw":
            yield (
                "--streaming and --line_by_line require documents, but --sample_by raw reads the "
                f"data as one text without documents: {remedy}"
            )
        if per_document and has_arrays(self):
            yield (
                "--streaming and --line_by_line do not support arrays (.npy, .npz), which are "
                f"memory-mapped with one row per array: {remedy}"
            )
        if self.dataset_name and self.train_file:
            yield "--dataset_name and --train_file are mutually exclusive: give only one of them"
        held_out = self.validation_split_percentage + getattr(self, "test_split_percentage", 0)
        if held_out >= 100:
            yield (
                f"the validation and test splits of {held_out}% leave no training {self.unit}: "
                "reduce --validation_split_percentage or --test_split_percentage"
            )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """The requested row length in tokens, or `None` for the default."""
        return self.max_seq_length

    @property
    def keep_blank(self) -> bool:
        """Whether blank documents are kept as part of the text instead of being dropped."""
        return False

    @property
    def cache_directory(self) -> Path:
        """The directory of cached tokens."""
        directory = self.data_cache_dir or os.environ.get("HFSEQ_CACHE")
        return Path(directory or "~/.cache/hfseq").expanduser()


def has_arrays(arguments: TextArguments) -> bool:
    """Returns whether one of the data files contains arrays."""
    file_lists = [getattr(arguments, f"{split}_file", None) or () for split in SPLITS]
    return any(name.lower().endswith(ARRAY_EXTENSIONS) for names in file_lists for name in names)


REFERENCE_HELP = (
    "Whole-word reference file for Chinese. Each line is a JSON list for one document, with the "
    "positions of the tokens that continue a word."
)
UNUSED_HELP = (
    "Not supported. The Transformers 4 script accepts and ignores this flag; here it is an error."
)
CROSS_HELP = (
    "Treat a packed row as one sequence, as in Transformers 4: attention and position IDs continue "
    "across document boundaries. By default, the documents of a row are independent."
)
SMOOTHING_HELP = (
    "Label smoothing: probability that is spread over all tokens except the target. 0 disables it."
)


ROUGE_HELP = (
    "Word tokenizer for ROUGE. 'default' is the tokenizer of rouge-score, which ignores all "
    "characters except the letters a to z and digits. 'unicode' supports the letters of all "
    "scripts."
)


def test_percentage_option(unit: str) -> int:
    """Returns the flag for the percentage of the training data that is held out as test split.

    Args:
        unit: Plural noun for the examples, for the help text.
    """
    return option(
        0,
        f"Percentage of the training {unit} to hold out for --do_predict when the data has no "
        "test split.",
    )


@dataclass
class MixtureArguments(CheckedArguments):
    """Flags of a mixture of datasets, for objectives that support it.

    Attributes:
        mixture: The data flags of each dataset and its weight. Empty without a mixture.
    """

    train_mixture: str | None = option(
        None,
        "YAML file of a mixture of training datasets. It contains a list of mappings from data "
        "flags to values, such as dataset_name or train_file, and optionally a weight. Validation "
        "data comes from --validation_file, or from the first dataset.",
    )
    dataset_names: list[str] | None = option(
        None, "Datasets of a mixture. --dataset_name with several values has the same effect."
    )
    dataset_weights: list[float] | None = option(
        None,
        "Weights of the datasets in --dataset_names, in the same order. Default: all datasets have "
        "the same weight.",
    )
    multi_dataset_batch_sampler: Literal["proportional", "round_robin", "weighted"] | None = option(
        None,
        "How often each dataset of a mixture is used in an epoch. proportional: in proportion to "
        "its size. round_robin: equally often until the smallest dataset is used up. weighted: in "
        "proportion to its weight. Default: weighted if the weights differ from 1, otherwise "
        "proportional.",
    )

    def __post_init__(self) -> None:
        self.mixture: tuple[tuple[Any, float], ...] = ()
        super().__post_init__()
        if self.train_mixture:
            entries = read_mixture(self.train_mixture, {item.name for item in fields(self)})
            self._set_mixture(entries, "--train_mixture", self.train_mixture)
        elif self.dataset_names:
            weights = self.dataset_weights or [1.0] * len(self.dataset_names)
            pairs = zip(self.dataset_names, weights, strict=True)
            entries = [({"dataset_name": name}, weight) for name, weight in pairs]
            self._set_mixture(entries, "--dataset_names", "--dataset_names")

    def problems(self) -> Iterator[str]:
        """Also yields an error if a mixture is combined with other flags for training data."""
        flag = "--train_mixture" if self.train_mixture else "--dataset_names"
        is_mixture = bool(self.train_mixture or self.dataset_names)
        if self.multi_dataset_batch_sampler and not is_mixture:
            yield (
                "--multi_dataset_batch_sampler requires --train_mixture, or several values of "
                "--dataset_name"
            )
        if is_mixture and getattr(self, "streaming", False):
            yield f"{flag} does not support --streaming: drop one of them"
        if self.train_mixture and self.dataset_names:
            yield (
                "--train_mixture and several values of --dataset_name are mutually exclusive: add "
                "the datasets to the file"
            )
        names, weights = self.dataset_names or [], self.dataset_weights
        if weights is not None and len(weights) != len(names):
            yield (
                f"--dataset_weights has {len(weights)} values, but --dataset_name has "
                f"{len(names)}: give one weight for each dataset of the mixture"
            )
        elif weights and not all(math.isfinite(weight) and weight > 0 for weight in weights):
            values = " ".join(f"{weight:g}" for weight in weights)
            yield f"--dataset_weights {values}: expected numbers above 0"
        yield from super().problems()

    def _set_mixture(
        self, entries: Sequence[tuple[dict[str, Any], float]], flag: str, origin: str
    ) -> None:
        """Sets `mixture`, and the flags of this object that describe the training data.

        These flags, such as `--train_file`, get the values of the first dataset.

        Args:
            entries: The values of the data flags and the weight of each dataset.
            flag: The flag that defines the mixture, for messages.
            origin: The flag or file that lists the datasets, for messages about a dataset.
        """
        names = ("dataset_name", "dataset_config_name", "dataset_revision", "train_file")
        first = entries[0][0]
        if conflict := [
            name
            for name in names
            if getattr(self, name) is not None and getattr(self, name) != first.get(name)
        ]:
            remedy = "add the dataset to the file"
            if flag == "--dataset_names":
                remedy = "describe the datasets in the file of --train_mixture"
            raise UsageError(f"{flag} and --{conflict[0]} are mutually exclusive: {remedy}")
        for name in names:
            setattr(self, name, first.get(name))
        held_out: dict[str, Any] = {"validation_split_percentage": 0, "test_split_percentage": 0}
        held_out |= {"validation_file": None, "test_file": None}
        field_names = {item.name for item in fields(self)}
        shared = {name: value for name, value in held_out.items() if name in field_names}
        shared |= dict.fromkeys(names)
        flags = ("train_mixture", "dataset_names", "dataset_weights", "multi_dataset_batch_sampler")
        parts = []
        for number, (values, weight) in enumerate(entries):
            try:
                part_values = {**shared, **values} if number else dict(values)
                part_values |= dict.fromkeys(flags)
                parts.append((replace(self, **part_values), weight))
            except UsageError as error:
                raise UsageError(f"{origin}, dataset {number + 1}: {error}") from error
        self.mixture = tuple(parts)
        if self.multi_dataset_batch_sampler is None:
            has_weights = any(weight != 1 for _, weight in parts)
            self.multi_dataset_batch_sampler = "weighted" if has_weights else "proportional"


def read_mixture(path: str, flags: set[str]) -> list[tuple[dict[str, Any], float]]:
    """Reads the file of `--train_mixture`.

    Args:
        path: The file.
        flags: The allowed data flags.

    Returns:
        The values of the data flags and the weight of each dataset.

    Raises:
        UsageError: The file cannot be read, or does not describe a mixture.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--train_mixture {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--train_mixture {path} is not valid YAML: {error}") from error
    if isinstance(content, dict) and list(content) == ["datasets"]:
        content = content["datasets"]
    if not isinstance(content, list) or not content:
        raise UsageError(
            f"--train_mixture {path} must contain a list of datasets, e.g. '- train_file: a.jsonl'"
        )
    entries = []
    for number, item in enumerate(content, 1):
        origin = f"--train_mixture {path}, dataset {number}"
        if not isinstance(item, dict):
            raise UsageError(f"{origin} must map data flags to values, not {item!r:.60}")
        values = dict(item)
        weight = values.pop("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise UsageError(f"{origin}: weight must be a number above 0, not {weight!r:.60}")
        for name in values:
            if name not in flags:
                raise UsageError(f"{origin}: unknown data flag '{name}'{did_you_mean(name, flags)}")
        if not (values.get("train_file") or values.get("dataset_name")):
            raise UsageError(f"{origin} requires train_file or dataset_name")
        if isinstance(values.get("train_file"), str):
            values["train_file"] = [values["train_file"]]
        entries.append((values, float(weight)))
    return entries


@dataclass
class DataArguments(MixtureArguments, TextArguments):
    """Data flags of masked language modeling."""

    mlm_probability: Annotated[float, AllowedValues("a number in (0, 1]", above=0, maximum=1)] = (
        option(0.15, "Fraction of the tokens (or words) to mask.")
    )
    whole_word_masking: bool = option(False, "Mask whole words instead of individual tokens.")
    train_ref_file: str | None = option(None, REFERENCE_HELP)
    validation_ref_file: str | None = option(
        None, "Whole-word reference file of the validation data."
    )

    def problems(self) -> Iterator[str]:
        """Also yields an error if `--streaming` is combined with reference files."""
        if self.streaming and (self.train_ref_file or self.validation_ref_file):
            yield (
                "--streaming does not support reference files: drop --streaming, or "
                "--train_ref_file and --validation_ref_file"
            )
        yield from super().problems()


@dataclass
class CausalArguments(MixtureArguments, TextArguments):
    """Data flags of causal language modeling."""

    train_file: list[str] | None = option(None, f"Training data: {FILES_HELP}; {ARRAYS_HELP}.")
    validation_file: list[str] | None = option(
        None, f"Validation data: {FILES_HELP}; {ARRAYS_HELP}."
    )
    block_size: (
        Annotated[int, AllowedValues("at least 2 (a row of one token has no target)", minimum=2)]
        | None
    ) = option(
        None,
        "Row length in tokens, the same as --max_seq_length. This name is that of Transformers' "
        "run_clm. Default: the maximum that tokenizer and model support, at most 1024. For images, "
        "the number of bytes per image.",
    )
    keep_linebreaks: bool = option(
        True, "Keep the line break at the end of each line of a .txt file."
    )
    cross_documents: bool = option(False, CROSS_HELP)
    append_eos: bool = option(False, "Append the tokenizer's end-of-text token to every document.")
    start_with_eos: bool = option(
        False,
        "Start the inputs of each row with the end-of-text token, so that every token of the row "
        "is predicted. Without this flag, the first token of a row is only an input. Always on "
        "for images.",
    )
    word_perplexity: bool = option(
        False,
        "Also evaluate the perplexity per word. Words are separated by whitespace, and line ends "
        "count as words (see --count_line_ends).",
    )
    count_line_ends: bool = option(
        True,
        "Count line ends as words in --word_perplexity, as is customary for WikiText. Disable it "
        "for PG-19, where only words are counted.",
    )
    bits_per_byte: bool = option(
        False, "Also evaluate the bits per byte of the text. Always on for raw text and images."
    )
    loss_per_position: bool = option(
        False,
        "Divide the training loss by the number of positions of the batch, including padding, "
        "instead of by the number of predicted tokens. The reference implementation of the VQ "
        "Transformer does the same. Logged losses are always means over the predicted tokens.",
    )
    test_file: list[str] | None = option(
        None, f"Test data for --do_predict: {FILES_HELP}; {ARRAYS_HELP}."
    )
    test_split_percentage: Percentage = test_percentage_option("text")
    max_test_samples: PositiveInt | None = option(
        None, "Truncate the test set to this number of examples."
    )

    def problems(self) -> Iterator[str]:
        """Also yields errors for contradictory row lengths, and for flags that the data excludes.

        `--append_eos` requires documents. `--word_perplexity` and `--bits_per_byte` require the
        complete text.
        """
        block, length = self.block_size, self.max_seq_length
        if block and length and block != length:
            yield (
                f"--block_size {block} and --max_seq_length {length} disagree: give only one of "
                "them"
            )
        if self.line_by_line and (self.word_perplexity or self.bits_per_byte):
            yield (
                "--word_perplexity and --bits_per_byte require the complete text, but "
                "--line_by_line truncates it: drop --line_by_line"
            )
        if self.append_eos and (self.sample_by == "raw" or has_arrays(self)):
            yield (
                "--append_eos appends a token to each document, but --sample_by raw and arrays "
                "(.npy, .npz) have no documents: drop the flag, or use text with --sample_by "
                "document"
            )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """The requested row length in tokens, or `None` for the default."""
        return self.block_size or self.max_seq_length

    @property
    def keep_blank(self) -> bool:
        """Whether blank lines are kept as part of the text.

        They are kept if `--cross_documents` and `--keep_linebreaks` are set, because the rows then
        contain the text of the file without changes.
        """
        return self.cross_documents and self.keep_linebreaks


@dataclass
class SpanArguments(TextArguments):
    """Data flags of span corruption."""

    mlm_probability: Annotated[
        float, AllowedValues("a number between 0 and 1", above=0, below=1)
    ] = option(0.15, "Fraction of the tokens to mask in spans (noise density).")
    mean_noise_span_length: Annotated[float, AllowedValues("a number of at least 1", minimum=1)] = (
        option(3.0, "Mean length of the masked spans in tokens.")
    )
    train_ref_file: str | None = option(None, UNUSED_HELP)
    validation_ref_file: str | None = option(None, UNUSED_HELP)


@dataclass
class DenoisingArguments(TextArguments):
    """Data flags of denoising."""

    mlm_probability: Fraction = option(0.3, "Fraction of the tokens to mask in spans.")
    permute_sentence_ratio: Fraction = option(1.0, "Fraction of the sentences to shuffle.")
    poisson_lambda: Annotated[
        float, AllowedValues("a number in [0.1, 100]", minimum=0.1, maximum=100)
    ] = option(3.0, "Mean of the Poisson distribution of span lengths.")
    cross_documents: bool = option(False, CROSS_HELP)
    train_ref_file: str | None = option(None, UNUSED_HELP)
    validation_ref_file: str | None = option(None, UNUSED_HELP)


#: Name of the GLUE dataset on the Hub. It has one configuration per task.
GLUE_DATASET = "nyu-mll/glue"


class GlueTask(NamedTuple):
    """A GLUE task.

    Attributes:
        sentence_columns: Names of the text columns.
        labels: Class names, ordered by class ID. Empty for regression.
        metrics: Names of the metrics that are reported.
        parts: Suffixes of the names of the validation and test splits, for a task with several
            validation and test splits. Empty for all other tasks.
    """

    sentence_columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
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
    "files, quoted globs or comma-separated lists; local paths or any fsspec URL; .tsv, .csv, "
    ".json, .jsonl or .parquet, optionally compressed (.gz, .bz2, .xz, .zst)"
)
COLUMN_HELP = "a name, or a number (from 0)"
HEADER_HELP = "Whether the first line of a .tsv or .csv file names the columns. Default: yes"
QUOTING_HELP = (
    'Whether cells can be enclosed in quotation marks ("). Default: yes for .csv files, no for '
    ".tsv files."
)
METRICS = (
    *("accuracy", "f1", "f1_macro", "f1_micro"),
    *("matthews_correlation", "pearson", "spearmanr"),
)


@dataclass
class ExampleArguments(TextArguments):
    """Data flags of objectives that train on separate examples instead of continuous text.

    The examples come from tables, directories or datasets.
    """

    unit = "examples"
    #: Completes the sentence "every example is …" in an error message.
    row_description: ClassVar[str] = "a row"
    #: Flags that select a column of a table by its name, or by its number if it has no header.
    column_flags: ClassVar[tuple[str, ...]] = ()

    def problems(self) -> Iterator[str]:
        """Also yields errors for conflicting data sources, and for flags that need plain text.

        Data sources conflict if several of them provide the same split.
        """
        folders = [split for split in SPLITS if getattr(self, f"{split}_dir", None)]
        for split in folders:
            if getattr(self, f"{split}_file"):
                yield (
                    f"--{split}_dir and --{split}_file are mutually exclusive: give only one of "
                    "them"
                )
        if self.dataset_name and "train" in folders:
            yield "--dataset_name and --train_dir are mutually exclusive: give only one of them"
        if self.streaming or self.line_by_line or self.sample_by != "line":
            yield (
                "--streaming, --line_by_line and --sample_by apply to plain text only, but here "
                f"every {self.unit.removesuffix('s')} is {self.row_description}: drop these flags"
            )
        yield from super().problems()

    @property
    def requested_columns(self) -> list[str]:
        """The columns that flags select, by name or number."""
        return [name for flag in self.column_flags if (name := getattr(self, flag))]

    @property
    def columns_by_number(self) -> bool:
        """Whether a flag selects a column by its number."""
        return any(re.fullmatch(r"[0-9]{1,9}", name) for name in self.requested_columns)


@dataclass
class ClassificationArguments(ExampleArguments):
    """Data flags of text classification and regression."""

    column_flags = ("sentence1_column", "sentence2_column", "label_column")

    task_name: str | None = option(
        None,
        f"GLUE task: {', '.join(GLUE)}. The data is loaded from the Hub ({GLUE_DATASET}), or from "
        "--train_file with the columns of the task.",
    )
    task_type: Literal["classification", "regression"] | None = option(
        None,
        "Whether to predict classes or numbers. Default: regression if the training labels are "
        "numbers with a fractional part, otherwise classification. If the labels are lists, the "
        "task is always multi-label classification.",
    )
    train_file: list[str] | None = option(None, f"Training data: {TABLES_HELP}.")
    validation_file: list[str] | None = option(
        None,
        "Validation data, in the same formats. Several files are evaluated together and "
        "separately.",
    )
    test_file: list[str] | None = option(
        None, "Test data for --do_predict, in the same formats, with or without labels."
    )
    test_split_percentage: Percentage = test_percentage_option("examples")
    max_predict_samples: PositiveInt | None = option(
        None, "Truncate the test set to this number of examples."
    )
    sentence1_column: str | None = option(
        None,
        f"Column of the (first) sentence: {COLUMN_HELP}. Default: the column of the task, "
        "otherwise a common name (sentence, text, sentence1, premise, question1, …).",
    )
    sentence2_column: str | None = option(
        None, f"Column of the second sentence, for sentence pairs: {COLUMN_HELP}."
    )
    label_column: str | None = option(
        None,
        f"Column of the label: {COLUMN_HELP}. Default: the column of the task, otherwise 'label'.",
    )
    label_column_name: str | None = option(None, "Alias of --label_column.")
    header: bool | None = option(
        None,
        f"{HEADER_HELP}, unless columns are given by number or the file is in CoLA's original "
        "format.",
    )
    quoting: bool | None = option(None, QUOTING_HELP)
    no_quoting: bool = option(False, 'Treat " as an ordinary character, also in .csv files.')
    metrics: list[str] | None = option(
        None,
        f"Evaluation metrics: {', '.join(METRICS)}, or any metric of the evaluate library. "
        "Default: the metrics of the task.",
    )
    vocabulary: (
        Annotated[Literal["words"], AllowedValues("words (use --tokenizer_name for a tokenizer)")]
        | None
    ) = option(
        None,
        "With 'words' and without --tokenizer_name, build a word vocabulary from the training "
        "data.",
    )
    vocab_size: PositiveInt | None = option(
        None, "Maximum size of the word vocabulary. Default: all words."
    )
    ignore_mismatched_sizes: bool = option(
        False,
        "Initialize a new classifier if the model's classifier has a different number of classes.",
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
        """Also yields errors for unknown tasks and for task types that contradict the task."""
        task = GLUE.get(self.task_name or "")
        if self.task_name is not None and task is None:
            yield (
                f"--task_name {self.task_name}: expected one of {', '.join(GLUE)}; for other "
                "data use --train_file without --task_name"
            )
        expected_type = "classification" if task and task.labels else "regression"
        if task is not None and self.task_type not in (None, expected_type):
            yield (
                f"--task_type {self.task_type} and --task_name {self.task_name} disagree: this "
                f"task is {expected_type}; drop one of the two flags"
            )
        yield from super().problems()


@dataclass
class RecordArguments(ExampleArguments):
    """Data flags of examples with named columns of texts, lists or objects."""

    row_description = "independent of the others"
    label_column = None  # read_table expects this attribute
    task_name = ""

    train_file: list[str] | None = option(None, f"Training data: {TABLES_HELP}.")
    validation_file: list[str] | None = option(None, "Validation data, in the same formats.")
    test_file: list[str] | None = option(
        None, "Test data for --do_predict, in the same formats, with or without answers."
    )
    test_split_percentage: Percentage = test_percentage_option("examples")
    max_predict_samples: PositiveInt | None = option(
        None, "Truncate the test set to this number of examples."
    )
    bad_examples: Literal["skip", "error"] = option(
        "skip",
        "Handling of invalid examples: 'skip' leaves them out and logs their number and "
        "locations, 'error' stops.",
    )
    header: bool | None = option(None, f"{HEADER_HELP}.")
    quoting: bool | None = option(None, QUOTING_HELP)


@dataclass
class TokenClassificationArguments(RecordArguments):
    """Data flags of token classification."""

    task_name: str = option(
        "ner",
        "Type of the tags, e.g. ner or pos, which determines their default column. See "
        "--label_column_name.",
    )
    label_column_name: str | None = option(
        None,
        "Column of the tags, with one list per example. Default: the column named after "
        "--task_name (ner_tags for ner), tags or labels, otherwise the second column.",
    )
    label_all_tokens: bool = option(
        False,
        "Label all tokens of a word instead of its first token only. In later tokens of the word, "
        "a B- tag becomes I-.",
    )
    return_entity_level_metrics: bool = option(
        False, "Also report the metrics of each entity type."
    )
    ignore_mismatched_sizes: bool = option(
        False, "Initialize a new classifier if the model's classifier has different tags."
    )


@dataclass
class QuestionAnsweringArguments(RecordArguments):
    """Data flags of extractive question answering."""

    doc_stride: PositiveInt | None = option(
        None,
        "Number of tokens that consecutive windows of a long context share. Default: 128, or a "
        "third of the row length if that is smaller.",
    )
    version_2_with_negative: bool = option(
        False,
        "Allow questions without an answer (SQuAD 2.0). Without this flag, they are invalid "
        "examples.",
    )
    null_score_diff_threshold: float = option(
        0.0,
        "Predict no answer if its score exceeds the score of the best answer by more than this "
        "value (with --version_2_with_negative).",
    )
    n_best_size: PositiveInt = option(
        20,
        "Number of most probable start positions, and of end positions, that are combined into "
        "answers. Also the number of answers to keep per question.",
    )
    max_answer_length: PositiveInt = option(30, "Maximum answer length in tokens.")


@dataclass
class ConversationArguments(RecordArguments):
    """Data flags of objectives whose examples are conversations, or prompts with answers."""

    max_length: PositiveInt | None = option(
        None,
        "Maximum length of an example in tokens. Longer examples are truncated. Default: 1024, "
        "or the model's maximum if that is smaller.",
    )
    chat_template_path: str | None = option(
        None,
        "Chat template: a .jinja file, or a directory or Hub name of a tokenizer that has one.",
    )
    chat_template_kwargs: str | None = option(
        None,
        "Variables of the chat template as a JSON object, e.g. '{\"enable_thinking\": false}'. "
        "Values in the column chat_template_kwargs take precedence.",
    )
    eos_token: str | None = option(
        None,
        "Token that ends a turn or a text, if it is not the tokenizer's EOS token, e.g. "
        "'<|im_end|>'.",
    )

    def problems(self) -> Iterator[str]:
        """Also yields errors for contradictory lengths and for invalid template variables."""
        try:
            self.template_variables  # noqa: B018
        except ValueError as error:
            yield (
                f"--chat_template_kwargs {self.chat_template_kwargs} is not a JSON object: {error}"
            )
        length, other_length = self.max_length, self.max_seq_length
        if length and other_length and length != other_length:
            yield (
                f"--max_length {length} and --max_seq_length {other_length} disagree: give only "
                "one of them"
            )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """The requested maximum length of an example in tokens."""
        return self.max_length or self.max_seq_length

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that `--chat_template_kwargs` contains."""
        variables = parse_json(self.chat_template_kwargs or "{}")
        if not isinstance(variables, dict):
            raise ValueError(f"its type is {type(variables).__name__}")
        return variables


@dataclass
class ChatArguments(MixtureArguments, ConversationArguments):
    """Data flags of supervised fine-tuning. Names and defaults are those of TRL."""

    defaults: ClassVar[Mapping[str, float]] = {"learning_rate": 2e-5}

    test_file: list[str] | None = option(None, "Test data for --do_predict, in the same formats.")
    dataset_text_field: str = option(
        "text", "Column of the text, used if the data has neither messages nor prompts."
    )
    packing: bool = option(
        False,
        "Pack several examples into one row to reduce padding. Examples do not attend to each "
        "other.",
    )
    packing_strategy: Literal["bfd"] = option(
        "bfd",
        "Packing algorithm. bfd (best-fit decreasing) packs the longest examples first, each "
        "into the fullest row with enough space.",
    )
    completion_only_loss: bool | None = option(
        None,
        "Compute the loss on completions only. Default: enabled if the data has prompts and "
        "completions.",
    )
    assistant_only_loss: bool = option(
        False,
        "Compute the loss on assistant messages only. The chat template must mark them with "
        "generation blocks.",
    )

    def __post_init__(self) -> None:
        if self.text_column_name:
            self.dataset_text_field = self.text_column_name
        super().__post_init__()


BETA_HELP = "How strongly the model is kept close to the reference model."


@dataclass
class PreferenceArguments(ConversationArguments):
    """Data flags of training on preferences. Names and defaults are those of TRL."""

    defaults: ClassVar[Mapping[str, float]] = {"learning_rate": 1e-6}

    truncation_mode: Literal["keep_start", "keep_end"] = option(
        "keep_start",
        "How examples that are longer than --max_length are truncated: keep the first tokens of "
        "prompt and answer (keep_start), or the last ones (keep_end).",
    )
    disable_dropout: bool = option(True, "Train without dropout.")


@dataclass
class ReferenceArguments(PreferenceArguments):
    """Data flags of losses that compare the model with a reference model."""

    beta: float = option(0.1, BETA_HELP)
    reference_free: bool = option(
        False, "Train as if the reference model assigned the same probability to all answers."
    )
    ref_model_name_or_path: str | None = option(
        None,
        "Directory or Hub name of the reference model. Default: the weights from which the run "
        "starts.",
    )
    precompute_ref_log_probs: bool = option(
        False,
        "Compute the log-probabilities of the reference model before training and store them in "
        "the output directory. The reference model is then removed from memory.",
    )
    precompute_ref_batch_size: PositiveInt | None = option(
        None,
        "Batch size per data-parallel shard of --precompute_ref_log_probs. Default: "
        "--per_device_eval_batch_size.",
    )

    def problems(self) -> Iterator[str]:
        """Also yields errors for an invalid beta and for contradictory reference models."""
        if not 0 < self.beta < math.inf:
            yield f"--beta {self.beta}: use a positive number, e.g. 0.1"
        if self.reference_free and (self.ref_model_name_or_path or self.precompute_ref_log_probs):
            flag = (
                "precompute_ref_log_probs"
                if self.precompute_ref_log_probs
                else "ref_model_name_or_path"
            )
            yield f"--reference_free and --{flag} are mutually exclusive: drop one of them"
        yield from super().problems()


#: Names of the losses of DPO, which `hfseq.objectives.preference_losses` implements.
DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "robust", "cdpo", "apo_zero", "apo_down", "sigmoid_norm"),
    *("bco_pair", "nca_pair", "sft"),
)


@dataclass
class DPOArguments(ReferenceArguments):
    """Data flags of direct preference optimization."""

    packing: bool = option(
        False,
        "Pack several pairs into one row of twice the maximum length to reduce padding. Answers do "
        "not attend to each other.",
    )
    loss_type: list[str] = option(
        ["sigmoid"],
        f"One or more losses: {', '.join(DPO_LOSSES)}.",
    )
    loss_weights: list[float] | None = option(
        None, "Weight of each loss of --loss_type. Default: 1 for each of them."
    )
    label_smoothing: float = option(
        0.0,
        "Probability that the chosen and the rejected answer of a pair are swapped, for the losses "
        "robust and cdpo.",
    )

    def problems(self) -> Iterator[str]:
        """Also yields errors for unknown losses, and for values that a loss does not support."""
        unknown = [name for name in self.loss_type if name not in DPO_LOSSES]
        if unknown:
            yield (
                f"--loss_type {' '.join(self.loss_type)}: unknown loss '{unknown[0]}' (separate "
                f"several losses by spaces). Use {', '.join(DPO_LOSSES)}"
            )
        if len(set(self.loss_type)) < len(self.loss_type):
            yield f"--loss_type {' '.join(self.loss_type)}: name each loss only once"
        weights = self.loss_weights
        if weights is not None and len(weights) != len(self.loss_type):
            yield (
                f"--loss_weights has {len(weights)} values, but --loss_type has "
                f"{len(self.loss_type)}: give one weight per loss"
            )
        if weights is not None and not all(map(math.isfinite, weights)):
            yield "--loss_weights must be finite numbers"
        yield from _smoothing_problems(
            self.label_smoothing, {"robust", "cdpo"} & {*self.loss_type}, "robust or cdpo"
        )
        yield from super().problems()

    @property
    def weighted_losses(self) -> dict[str, float]:
        """The weight of each loss."""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        return dict(zip(self.loss_type, weights, strict=True))


def _smoothing_problems(smoothing: float, supported: object, names: str) -> Iterator[str]:
    if not 0 <= smoothing < 0.5:
        yield f"--label_smoothing {smoothing}: use a number from 0 to below 0.5"
    elif smoothing and not supported:
        yield (
            f"--label_smoothing {smoothing} has no effect with this --loss_type: use {names}, or "
            "drop the flag"
        )


@dataclass
class KTOArguments(ReferenceArguments):
    """Data flags of Kahneman-Tversky optimization."""

    loss_type: Literal["kto", "apo_zero_unpaired"] = option(
        "kto", "The loss. apo_zero_unpaired does not estimate the KL divergence."
    )
    desirable_weight: PositiveFloat = option(1.0, "Weight of the loss of good completions.")
    undesirable_weight: PositiveFloat = option(1.0, "Weight of the loss of bad completions.")


@dataclass
class ORPOArguments(PreferenceArguments):
    """Data flags of odds ratio preference optimization."""

    beta: PositiveFloat = option(0.1, "Weight of the odds ratio loss (lambda in the paper).")


#: Names of the losses of CPO.
CPO_LOSSES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")


@dataclass
class CPOArguments(PreferenceArguments):
    """Data flags of contrastive preference optimization and SimPO."""

    beta: PositiveFloat = option(0.1, "Factor of the log-probabilities. SimPO uses 2 to 10.")
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = option(
        "sigmoid", "The loss: sigmoid, hinge or ipo (CPO), simpo, or alphapo."
    )
    label_smoothing: float = option(
        0.0,
        "Probability that the chosen and the rejected answer of a pair are swapped, for the loss "
        "sigmoid.",
    )
    cpo_alpha: Annotated[float, AllowedValues("0 or more", minimum=0)] | None = option(
        None,
        "Weight of the cross-entropy of the chosen answers. Default: 1, and 0 for simpo and "
        "alphapo.",
    )
    simpo_gamma: float = option(0.5, "Target margin of simpo and alphapo.")
    alpha: float = option(0.0, "Exponent of the transformed rewards of alphapo.")

    def problems(self) -> Iterator[str]:
        """Also yields errors for flags that the loss does not support."""
        yield from _smoothing_problems(self.label_smoothing, self.loss_type == "sigmoid", "sigmoid")
        if self.alpha and self.loss_type != "alphapo":
            yield f"--alpha {self.alpha} has no effect with --loss_type {self.loss_type}: drop it"
        yield from super().problems()


@dataclass
class RewardArguments(PreferenceArguments):
    """Data flags of reward models."""

    defaults: ClassVar[Mapping[str, float]] = {"learning_rate": 1e-4}

    max_length: PositiveInt | None = option(
        None,
        "Maximum length of an example in tokens. Longer examples are skipped. Default: 1024, or "
        "the model's maximum if that is smaller.",
    )
    pad_token: str | None = option(
        None, "Padding token, if it is not the tokenizer's. It must differ from the EOS token."
    )
    center_rewards_coefficient: PositiveFloat | None = option(
        None,
        "Coefficient of the squared sum of the rewards of a pair, which centers the rewards at 0, "
        "e.g. 0.01.",
    )


@dataclass
class RetrievalArguments(MixtureArguments, RecordArguments):
    """Data flags that all types of retrieval models share."""

    loss: str | None = option(None, "Loss.")
    scale: PositiveFloat | None = option(
        None, "Factor for the scores in the softmax of the loss (1 / temperature)."
    )
    margin: NonNegativeFloat | None = option(
        None, "Margin of the loss. Default: depends on --loss."
    )
    temperature: PositiveFloat | None = option(
        None,
        "Temperature. distill_kl_div divides the scores of model and teacher by it, and gist "
        "divides the similarities by it. Default: depends on --loss.",
    )
    mini_batch_size: PositiveInt | None = option(
        None,
        "Number of examples per device that are encoded at a time (GradCache). The gradient does "
        "not depend on this value. A small value needs less memory and so allows a larger batch, "
        "but each example is encoded twice. Default: the whole batch at once.",
    )
    batch_sampler: Literal["batch_sampler", "no_duplicates", "group_by_label"] = option(
        "batch_sampler",
        "How examples are combined into batches. batch_sampler: at random. no_duplicates: at "
        "random, but without duplicate texts in a batch. group_by_label: with at least two "
        "examples of each label in the batch.",
    )
    query_prompt: str | None = option(
        None, "Text that precedes each query. It is saved with the model."
    )
    document_prompt: str | None = option(
        None, "Text that precedes each document. It is saved with the model."
    )

    #: The losses that `--loss` accepts. The first one is the default.
    losses: ClassVar[tuple[str, ...]] = ()

    def problems(self) -> Iterator[str]:
        """Also yields an error for an unknown loss."""
        if self.loss is not None and self.loss not in self.losses:
            yield (
                f"--loss {self.loss}: expected {', '.join(self.losses[:-1])} or "
                f"{self.losses[-1]}{did_you_mean(self.loss, self.losses)}"
            )
        yield from super().problems()


#: Losses that compare each anchor with the positives and negatives of the batch.
RANKING_LOSSES = (
    "multiple_negatives_ranking",
    "multiple_negatives_symmetric_ranking",
)
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@dataclass
class VectorArguments(RetrievalArguments):
    """Data flags of models that encode queries and documents separately."""

    directions: str | None = option(
        None,
        "Comma-separated similarities that multiple_negatives_ranking compares with the similarity "
        f"of query and positive: {', '.join(DIRECTIONS)}. Default: query_to_doc. With all four, "
        "the loss is the improved contrastive loss of GTE.",
    )
    partition_mode: Literal["joint", "per_direction"] | None = option(
        None,
        "Whether all --directions share one softmax (joint), or the loss is the mean of a separate "
        "loss for each direction (per_direction). Default: joint.",
    )
    hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = option(
        None,
        "Negatives of multiple_negatives_ranking whose logits are increased, so that they have "
        "more weight. Default: none.",
    )
    hardness_strength: NonNegativeFloat = option(
        0.0,
        "The logits of the negatives in --hardness_mode are increased by this value times their "
        "similarity to the query.",
    )

    def problems(self) -> Iterator[str]:
        """Also yields errors for invalid values of `--directions`."""
        unknown = [name for name in self.direction_names if name not in DIRECTIONS]
        if unknown:
            yield (
                f"--directions {unknown[0]}: expected {', '.join(DIRECTIONS)}"
                f"{did_you_mean(unknown[0], DIRECTIONS)}"
            )
        elif self.direction_names and DIRECTIONS[0] not in self.direction_names:
            yield (
                f"--directions must contain {DIRECTIONS[0]}, because only this direction contains "
                "the similarities of queries and their positives"
            )
        same = {"query_to_query", "doc_to_doc"} & set(self.direction_names)
        if self.partition_mode == "per_direction" and same:
            yield (
                f"--partition_mode per_direction does not support the direction {min(same)}, which "
                "contains no positive pairs: use --partition_mode joint"
            )
        yield from super().problems()

    @property
    def direction_names(self) -> tuple[str, ...]:
        """The values of `--directions`. Empty without the flag."""
        return tuple(self.directions.split(",")) if self.directions else ()


@dataclass
class EmbeddingArguments(VectorArguments):
    """Data flags of training text embeddings."""

    losses = (
        *RANKING_LOSSES,
        *("gist", "cosent", "angle", "cosine_similarity", "contrastive", "online_contrastive"),
        *("triplet", "batch_all_triplet", "batch_hard_triplet", "batch_semi_hard_triplet"),
        *("softmax", "margin_mse", "distill_kl_div", "mse", "embed_distill"),
    )

    loss: str | None = option(
        None,
        f"Loss: {', '.join(losses)}. The names are those of sentence-transformers' classes. "
        "Default: multiple_negatives_ranking.",
    )
    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = option(
        None,
        "How token embeddings are combined into a text embedding. Default: the method saved with "
        "the model, otherwise mean.",
    )
    normalize: bool = option(True, "Normalize embeddings to unit length, also in the saved model.")
    scale: PositiveFloat | None = option(
        None,
        "Factor for the cosine similarities (1 / temperature) in the ranking losses, cosent and "
        "angle. Default: 20.",
    )
    matryoshka_dims: str | None = option(
        None,
        "Comma-separated embedding dimensions, e.g. 384,128,64. The first 384, 128 and 64 "
        "features of an embedding are each trained to be usable as an embedding (Matryoshka).",
    )
    matryoshka_weights: str | None = option(
        None, "Comma-separated weights of the losses of --matryoshka_dims. Default: 1 for each."
    )
    distance_metric: Literal["euclidean", "cosine", "manhattan", "l2"] | None = option(
        None,
        "Distance of the triplet and contrastive losses (euclidean, cosine or manhattan), or of "
        "embed_distill (cosine or l2). Default: depends on --loss.",
    )
    guide_model: str | None = option(
        None,
        "Directory or Hub name of the embedding model with which the loss gist recognizes false "
        "negatives. Its embeddings are computed once, before training.",
    )
    margin_strategy: Literal["absolute", "relative"] = option(
        "absolute",
        "Whether --margin of the loss gist is an absolute similarity, or a fraction of the "
        "similarity of the positive (relative).",
    )

    def problems(self) -> Iterator[str]:
        """Also yields errors for invalid Matryoshka dimensions and for a missing guide model."""
        try:
            wrong = min(self.dims, default=1) < 1
        except ValueError:
            wrong = True
        if wrong:
            yield (
                f"--matryoshka_dims {self.matryoshka_dims}: expected positive integers, e.g. "
                "384,128,64"
            )
        try:
            weights = self.dim_weights
            wrong_weights = min(weights, default=1.0) < 0
        except ValueError:
            weights, wrong_weights = (), True
        if wrong_weights or (not wrong and weights and len(weights) != len(self.dims)):
            yield (
                f"--matryoshka_weights {self.matryoshka_weights}: expected one number of at least "
                "0 for each of the --matryoshka_dims"
            )
        if self.loss == "softmax" and self.matryoshka_dims:
            yield (
                "--loss softmax does not support --matryoshka_dims, because its classifier "
                "requires embeddings of one size: drop one of them"
            )
        if (self.loss == "gist") != bool(self.guide_model):
            yield "--loss gist requires --guide_model, and no other loss supports this flag"
        yield from super().problems()

    @property
    def dims(self) -> tuple[int, ...]:
        """The values of `--matryoshka_dims`. Empty without the flag."""
        return tuple(map(int, self.matryoshka_dims.split(","))) if self.matryoshka_dims else ()

    @property
    def dim_weights(self) -> tuple[float, ...]:
        """The values of `--matryoshka_weights`. Empty without the flag."""
        texts = self.matryoshka_weights.split(",") if self.matryoshka_weights else ()
        return tuple(map(float, texts))


@dataclass
class SparseArguments(VectorArguments):
    """Data flags of training sparse encoders (SPLADE, CSR)."""

    losses = (*RANKING_LOSSES, "margin_mse", "distill_kl_div")

    loss: str | None = option(
        None,
        f"Loss that is combined with the regularizers: {', '.join(losses)}. Default: "
        "multiple_negatives_ranking.",
    )
    scale: PositiveFloat | None = option(
        None, "Factor for the dot products in the ranking losses. Default: 1."
    )
    document_regularizer_weight: NonNegativeFloat = option(
        3e-5, "Weight of the FLOPS regularizer of documents."
    )
    query_regularizer_weight: NonNegativeFloat = option(
        5e-5, "Weight of the FLOPS regularizer of queries."
    )
    document_regularizer_threshold: PositiveInt | None = option(
        None, "Documents with at most this number of nonzero weights are not regularized."
    )
    query_regularizer_threshold: PositiveInt | None = option(
        None, "Queries with at most this number of nonzero weights are not regularized."
    )
    regularizer_warmup_ratio: Fraction = option(
        1 / 3,
        "Fraction of the training steps after which the weights of the regularizers have their "
        "full values. They start at 0 and grow quadratically.",
    )
    auto_encoder_size: PositiveInt | None = option(
        None,
        "Number of features of the autoencoder (CSR) that is added to a bi-encoder. Default: 4 "
        "times the size of its vectors.",
    )
    auto_encoder_k: PositiveInt | None = option(
        None,
        "Number of features of the autoencoder that are kept. Default: the model's, or a quarter "
        "of the size of the dense vectors.",
    )
    csr_beta: NonNegativeFloat = option(
        0.1, "Weight of the auxiliary loss of an autoencoder, which trains unused features."
    )
    csr_gamma: NonNegativeFloat = option(
        1.0, "Weight of --loss relative to the reconstruction error of an autoencoder."
    )


@dataclass
class MultiVectorArguments(VectorArguments):
    """Data flags of training multi-vector encoders (ColBERT)."""

    losses = ("multiple_negatives_ranking", "margin_mse", "distill_kl_div")

    loss: str | None = option(
        None, f"Loss: {', '.join(losses)}. Default: multiple_negatives_ranking."
    )
    scale: PositiveFloat | None = option(
        None, "Factor for the MaxSim scores in multiple_negatives_ranking. Default: 1."
    )
    embedding_size: PositiveInt | None = option(
        None,
        "Size of the token vectors, for a model without a projection. A projection to this size is "
        "then added with random weights. Default: 128.",
    )
    query_length: PositiveInt | None = option(
        None,
        "Query length in tokens. Shorter queries are padded with mask tokens, which are also "
        "scored. Default: the model's, or 32 for a new model.",
    )
    document_length: PositiveInt | None = option(
        None, "Maximum document length in tokens. Default: the model's."
    )
    query_expansion: bool = option(
        True, "Pad the queries of a new multi-vector model to --query_length with mask tokens."
    )


@dataclass
class CrossEncoderArguments(RetrievalArguments):
    """Data flags of training cross-encoders (rerankers)."""

    losses = (
        *("binary_cross_entropy", "cross_entropy", "mse", "margin_mse"),
        *("multiple_negatives_ranking", "lambda_loss", "list_net", "list_mle", "p_list_mle"),
        *("rank_net", "adr_mse"),
    )

    loss: str | None = option(
        None,
        f"Loss: {', '.join(losses)}. The names are those of sentence-transformers' classes. "
        "Default: binary_cross_entropy.",
    )
    scale: PositiveFloat | None = option(
        None, "Factor for the activated scores in multiple_negatives_ranking. Default: 10."
    )
    pos_weight: PositiveFloat | None = option(
        None,
        "Weight of the positive examples in binary_cross_entropy. A common choice is the number of "
        "negatives per positive. Default: 1.",
    )
    num_negatives: PositiveInt = option(
        4,
        "Number of documents of other examples that are added as negatives of a query in "
        "multiple_negatives_ranking.",
    )
    activation: Literal["sigmoid", "identity"] = option(
        "sigmoid", "Activation function of the scores in multiple_negatives_ranking."
    )
    weighting_scheme: Literal["none", "ndcg_loss1", "ndcg_loss2", "lambda_rank", "ndcg_loss2pp"] = (
        option("ndcg_loss2pp", "How lambda_loss weights pairs of documents.")
    )
    cutoff: PositiveInt | None = option(
        None,
        "Number of documents at the beginning of a ranking. In lambda_loss and rank_net, a pair of "
        "documents only counts if one of them is among these. Default: all documents.",
    )
    respect_input_order: bool = option(
        True,
        "Whether list_mle and p_list_mle use the order of the documents in the data as the "
        "ranking. Otherwise, they sort the documents by label.",
    )


@dataclass
class ImageArguments(ExampleArguments):
    """Data flags of image classification."""

    unit = "images"
    column_flags = ("image_column", "label_column")
    task_name = None  # read_table expects this attribute

    train_dir: str | None = option(
        None, "Training images: a directory with one subdirectory per class."
    )
    validation_dir: str | None = option(None, "Validation images, in the same layout.")
    test_dir: str | None = option(
        None, "Test images for --do_predict, in the same layout or without class subdirectories."
    )
    train_file: list[str] | None = option(
        None,
        f"Training images: tables with a column of image files and a label column ({TABLES_HELP}).",
    )
    validation_file: list[str] | None = option(None, "Validation images, in the same formats.")
    test_file: list[str] | None = option(
        None, "Test images for --do_predict, in the same formats, with or without labels."
    )
    test_split_percentage: Percentage = test_percentage_option("images")
    max_predict_samples: PositiveInt | None = option(
        None, "Truncate the test set to this number of examples."
    )
    image_column: str | None = option(
        None,
        f"Column of the image: {COLUMN_HELP}. Default: the image column of a dataset, otherwise a "
        "common name (image, path, file_name, …).",
    )
    label_column: str | None = option(
        None, f"Column of the label: {COLUMN_HELP}. Default: 'label'."
    )
    image_size: PositiveInt | None = option(
        None,
        "Height and width of the model's input in pixels. Default: the size that the image "
        "processor specifies, or 224 for a new model.",
    )
    augment: bool = option(
        True, "Train on a random crop of each image, flipped horizontally in half of the cases."
    )
    decode_workers: NonNegativeInt | None = option(
        None,
        "Number of processes that decode images. 0 decodes in the training process. Default: one "
        "per CPU, at most 8.",
    )
    max_image_pixels: PositiveInt = option(
        1 << 27, "Skip images with more pixels than this without decoding them."
    )
    header: bool | None = option(None, f"{HEADER_HELP}.")
    quoting: bool | None = option(None, QUOTING_HELP)
    metrics: list[str] | None = option(
        None,
        f"Evaluation metrics: {', '.join(METRICS[:4])}, or any metric of the evaluate library. "
        "Default: accuracy.",
    )
    ignore_mismatched_sizes: bool = option(
        False,
        "Initialize a new classifier if the model's classifier has a different number of classes.",
    )


@dataclass
class ImageTextArguments(ImageArguments):
    """Data flags of images with captions."""

    caption_column: str | None = option(
        None,
        f"Column of the caption, or of a list of captions: {COLUMN_HELP}. Default: a common name "
        "(caption, captions, text, …).",
    )
    data_dir: str | None = option(
        None,
        "Directory that the image paths of a table are relative to. Default: the directory of "
        "the table.",
    )

    def problems(self) -> Iterator[str]:
        """Also yields an error for image directories, which contain no captions."""
        if self.train_dir or self.validation_dir or self.test_dir:
            yield (
                "image directories contain classes but no captions: use tables with "
                "--train_file and --validation_file"
            )
        yield from super().problems()


@dataclass
class ImageToTextArguments(ImageTextArguments):
    """Data flags of image captioning."""

    max_target_length: PositiveInt = option(
        128, "Maximum caption length in tokens, including EOS. Longer captions are truncated."
    )
    val_max_target_length: PositiveInt | None = option(
        None, "Maximum length of generated captions in tokens. Default: --max_target_length."
    )
    label_smoothing_factor: SmoothingFactor = option(0.0, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Generate captions of the validation images at each evaluation and compute ROUGE."
    )
    max_generate_samples: PositiveInt | None = option(
        None, "Maximum number of validation images to caption, evenly spaced in the validation set."
    )
    generation_batch_size: PositiveInt = option(16, "Generation batch size.")
    num_beams: PositiveInt = option(1, "Number of beams. 1 is greedy search.")
    text_samples: NonNegativeInt = option(8, "Number of sample captions to log at each evaluation.")
    rouge_tokenizer: Literal["default", "unicode"] = option("default", ROUGE_HELP)
    block_size: NonNegativeInt | None = option(
        None, "Ignored. In the Transformers 4 script, the number of images to preprocess at a time."
    )

    @property
    def row_length(self) -> int | None:
        """The maximum caption length in tokens."""
        return self.max_target_length


@dataclass
class AudioArguments(ExampleArguments):
    """Data flags of audio."""

    unit = "audio files"
    column_flags = ("audio_column_name",)
    label_column = task_name = None  # read_table expects these attributes

    train_dir: str | None = option(None, "Training audio: a directory, searched recursively.")
    validation_dir: str | None = option(None, "Validation audio, in the same layout.")
    train_file: list[str] | None = option(
        None, f"Training audio: tables with a column of audio files ({TABLES_HELP})."
    )
    validation_file: list[str] | None = option(None, "Validation audio, in the same formats.")
    train_split_name: str = option("train", "Split of --dataset_name to train on.")
    validation_split_name: str = option("validation", "Split of --dataset_name to validate on.")
    audio_column_name: str | None = option(
        None,
        f"Column of the audio: {COLUMN_HELP}. Default: the audio column of a dataset, otherwise a "
        "common name (audio, path, file, …).",
    )
    speech_file_column: str | None = option(None, "Alias of --audio_column_name.")
    max_duration_in_seconds: Annotated[float, AllowedValues("more than 0", above=0)] = option(
        20.0,
        "Maximum duration in seconds. Pretraining crops longer audio: at a random position in "
        "training, and at the start in evaluation. Other objectives skip longer audio.",
    )
    min_duration_in_seconds: Annotated[float, AllowedValues("0 or more", minimum=0)] = option(
        0.0, "Skip audio that is shorter than this, in seconds."
    )
    pad_to_multiple_of: PositiveInt = option(
        1024,
        "Pad the audio of each batch to a multiple of this number of samples. At most four "
        "different lengths are used.",
    )
    decode_workers: NonNegativeInt | None = option(
        None,
        "Number of threads that read audio. 0 reads in the training thread. Default: one per "
        "CPU, at most 8.",
    )
    mask_time_prob: Fraction | None = option(
        None,
        "Fraction of the frames to mask. It is exact if masked spans do not overlap. Overlapping "
        "spans mask fewer frames. Default: mask_time_prob of the configuration.",
    )
    mask_time_length: PositiveInt | None = option(
        None,
        "Length of the masked spans in frames. Default: mask_time_length of the configuration.",
    )
    freeze_feature_extractor: bool = option(
        False,
        "Freeze the convolutional layers (the feature encoder), e.g. to fine-tune a pretrained "
        "model.",
    )
    header: bool | None = option(None, f"{HEADER_HELP}.")
    quoting: bool | None = option(None, QUOTING_HELP)

    def __post_init__(self) -> None:
        self.audio_column_name = self.audio_column_name or self.speech_file_column
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Also yields an error if the minimum duration exceeds the maximum duration."""
        if self.min_duration_in_seconds > self.max_duration_in_seconds:
            yield (
                f"--min_duration_in_seconds {self.min_duration_in_seconds} is greater than "
                f"--max_duration_in_seconds {self.max_duration_in_seconds}"
            )
        yield from super().problems()


@dataclass
class SpeechPretrainingArguments(AudioArguments):
    """Data flags of pretraining on speech without transcripts."""

    max_gumbel_temperature: Annotated[float, AllowedValues("more than 0", above=0)] = option(
        2.0, "Gumbel softmax temperature at the first step."
    )
    min_gumbel_temperature: Annotated[float, AllowedValues("more than 0", above=0)] = option(
        0.1, "Minimum Gumbel softmax temperature."
    )
    gumbel_temperature_decay: Annotated[float, AllowedValues("in (0, 1]", above=0, maximum=1)] = (
        option(0.999995, "Factor by which each step multiplies the Gumbel softmax temperature.")
    )
    verbose_logging: bool = option(False, "Ignored. A flag of the Transformers 4 script.")


@dataclass
class SpeechArguments(AudioArguments):
    """Data flags of speech with transcripts."""

    do_lower_case: bool = option(
        True,
        "Lowercase the transcripts. CTC then converts them to upper case if the vocabulary has no "
        "lower-case letters.",
    )
    chars_to_ignore: list[str] | None = option(
        None, "Characters to remove from the transcripts, e.g. , . ! ?"
    )
    ignore_mismatched_sizes: bool = option(
        False, "Initialize a new head if the model's head has a different number of letters."
    )

    def problems(self) -> Iterator[str]:
        """Also yields an error for audio directories, which contain no transcripts."""
        if self.train_dir or self.validation_dir:
            yield (
                "audio directories contain no transcripts: use tables with --train_file and "
                "--validation_file"
            )
        yield from super().problems()


#: The classes of arguments with which tables are read.
TableArguments = ClassificationArguments | RecordArguments | ImageArguments | AudioArguments

PARALLEL_HELP = (
    "a table with source and target columns (.csv, .tsv, .json, .jsonl or .parquet), two aligned "
    "text files (corpus.en corpus.de), a directory of MultiUN or OPUS Moses files, or "
    "tfds:NAME/CONFIG#SPLIT"
)

#: Default maximum length of source and target in tokens.
DEFAULT_SIDE_LENGTH = 256
#: Common names of the source and the target column.
SIDE_COLUMNS = {
    "source": ("source", "src", "source_text"),
    "target": ("target", "tgt", "target_text"),
}


@dataclass
class TranslationArguments(TextArguments):
    """Data flags of translation: parallel text, row lengths, and evaluation by generation."""

    unit = "pairs"
    #: Common names of the source and the target column.
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = SIDE_COLUMNS
    #: Whether line breaks within texts are kept.
    keep_line_breaks: ClassVar[bool] = False
    #: Whether `tables.is_header` treats a first line of short, distinct words as the header of a
    #: table even if none of the words is a common column name.
    expects_header: ClassVar[bool] = False
    #: The flags that specify the source and the target column.
    side_flags: ClassVar[Mapping[str, str]] = {
        "source": "source_column",
        "target": "target_column",
    }

    train_file: list[str] | None = option(None, f"Training pairs: {PARALLEL_HELP}.")
    validation_file: list[str] | None = option(None, f"Validation pairs: {PARALLEL_HELP}.")
    test_file: list[str] | None = option(None, f"Test pairs for --do_predict: {PARALLEL_HELP}.")
    validation_split_percentage: Percentage = option(
        1,
        "Percentage of the training pairs to use for validation when the data has no validation "
        "split. All translations of a source sentence are in the same split.",
    )
    test_split_percentage: Percentage = test_percentage_option("pairs")
    source_lang: str | None = option(None, "Source language, e.g. en.")
    target_lang: str | None = option(None, "Target language, e.g. de.")
    source_column: str | None = option(
        None,
        "Column of the source text. Default: the column that is named after --source_lang (its "
        "code or its English name), otherwise the first column.",
    )
    target_column: str | None = option(
        None,
        "Column of the target text. Default: the column that is named after --target_lang (its "
        "code or its English name), otherwise the second column.",
    )
    reverse_translation: bool = option(
        False, "Translate in the other direction, from target to source."
    )
    max_test_samples: PositiveInt | None = option(
        None, "Truncate the test set to this number of pairs."
    )
    source_prefix: str | None = option(
        None, "Prefix of every source text, e.g. 'translate English to German: ' for T5."
    )
    vocab_size: PositiveInt = option(
        32_000,
        "Size of the joint vocabulary of source and target. The vocabulary is trained on the data "
        "if no tokenizer is given.",
    )
    tokenizer_algorithm: Literal["unigram", "bpe"] = option(
        "bpe", "Algorithm of the joint vocabulary."
    )
    max_corpus_chars: PositiveInt = option(
        10_000_000, "Number of characters to train the joint vocabulary on."
    )
    max_source_length: PositiveInt | None = option(
        None,
        f"Maximum source length in tokens. Default: {DEFAULT_SIDE_LENGTH}, or the model's maximum "
        "if that is smaller.",
    )
    max_target_length: PositiveInt | None = option(
        None,
        f"Maximum target length in tokens. Default: {DEFAULT_SIDE_LENGTH}, or the model's maximum "
        "if that is smaller.",
    )
    truncate_long_pairs: bool = option(
        False, "Truncate training pairs that exceed the maximum length instead of skipping them."
    )
    label_smoothing_factor: SmoothingFactor = option(0.1, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Translate the validation pairs at each evaluation and compute BLEU and chrF."
    )
    max_generate_samples: PositiveInt | None = option(
        None,
        "Maximum number of validation pairs to translate, evenly spaced in the validation set.",
    )
    generation_batch_size: PositiveInt = option(64, "Generation batch size.")
    num_beams: PositiveInt = option(4, "Number of beams. 1 is greedy search.")
    max_new_tokens: PositiveInt | None = option(
        None,
        "Maximum length of generated text in tokens. Default: about twice the source length, at "
        "most the maximum target length.",
    )
    length_penalty: float = option(1.0, "Exponent of the length penalty of beam search.")
    length_penalty_type: Literal["transformers", "gnmt"] = option(
        "transformers",
        "Form of the length penalty: length^penalty (transformers) or "
        "((5 + length) / 6)^penalty (gnmt).",
    )
    bleu_tokenizer: str = option("13a", "Tokenizer of sacreBLEU: 13a, intl, zh, char, none, …")
    bleu_lowercase: bool = option(False, "Compute lowercased BLEU, as in Flax's WMT example.")
    text_samples: NonNegativeInt = option(
        8, "Number of sample translations to log at each evaluation."
    )

    def __post_init__(self) -> None:
        if self.max_seq_length:
            self.max_source_length = self.max_source_length or self.max_seq_length
            self.max_target_length = self.max_target_length or self.max_seq_length
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Also yields errors for equal source and target languages and for `--streaming`."""
        if self.source_lang is not None and self.source_lang == self.target_lang:
            yield (
                f"--source_lang and --target_lang are both {self.source_lang}: give two "
                "different languages"
            )
        if self.streaming:
            yield (
                "--streaming is not supported for parallel text, which is tokenized to disk: "
                "drop the flag"
            )
        yield from super().problems()

    @property
    def row_length(self) -> int | None:
        """The larger of the requested source and target lengths in tokens, or `None`."""
        return max(self.max_source_length or 0, self.max_target_length or 0) or None

    def lengths(self, limit: int | None) -> tuple[int, int]:
        """Returns the row lengths of source and target in tokens.

        Args:
            limit: Number of positions of the model, or `None` if it is unlimited.

        Raises:
            UsageError: A requested length exceeds `limit`.
        """
        for name in ("max_source_length", "max_target_length"):
            requested = getattr(self, name)
            if limit and requested and requested > limit:
                raise UsageError(
                    f"--{name} {requested} exceeds the {limit} positions of this model: use at "
                    f"most {limit}, or a configuration with a larger max_position_embeddings"
                )
        default = min(DEFAULT_SIDE_LENGTH, limit or DEFAULT_SIDE_LENGTH)
        return self.max_source_length or default, self.max_target_length or default


@dataclass
class SummarizationArguments(TranslationArguments):
    """Data flags of summarization."""

    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "source": ("text", "document", "article", "dialogue", "source", "src"),
        "target": ("summary", "highlights", "abstract", "target", "tgt"),
    }
    keep_line_breaks = True
    expects_header = True
    side_flags: ClassVar[Mapping[str, str]] = {
        "source": "text_column",
        "target": "summary_column",
    }

    validation_split_percentage: Percentage = option(
        5,
        "Percentage of the training data to use for validation when the data has no validation "
        "split.",
    )
    text_column: str | None = option(
        None,
        "Column of the text. Default: text, document, article or dialogue, otherwise the first of "
        "two columns.",
    )
    summary_column: str | None = option(
        None,
        "Column of the summary. Default: summary, highlights or abstract, otherwise the second of "
        "two columns.",
    )
    max_source_length: PositiveInt | None = option(
        None,
        "Maximum text length in tokens. Longer texts are truncated. Default: 1024, or the "
        "model's maximum if that is smaller.",
    )
    max_target_length: PositiveInt | None = option(
        None,
        "Maximum summary length in tokens. Default: 128, or the model's maximum if that is "
        "smaller.",
    )
    val_max_target_length: PositiveInt | None = option(
        None, "Maximum length of generated summaries in tokens. Default: --max_target_length."
    )
    truncate_long_pairs: bool = option(
        True,
        "Truncate texts and summaries that exceed the maximum length. If false, such training "
        "pairs are skipped.",
    )
    label_smoothing_factor: SmoothingFactor = option(0.0, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Summarize the validation texts at each evaluation and compute ROUGE."
    )
    max_predict_samples: PositiveInt | None = option(
        None, "Truncate the test set to this number of texts."
    )
    num_beams: PositiveInt = option(1, "Number of beams. 1 is greedy search.")
    rouge_tokenizer: Literal["default", "unicode"] = option("default", ROUGE_HELP)

    def __post_init__(self) -> None:
        self.source_column = self.source_column or self.text_column or self.text_column_name
        self.target_column = self.target_column or self.summary_column
        self.max_new_tokens = self.max_new_tokens or self.val_max_target_length
        self.max_test_samples = self.max_test_samples or self.max_predict_samples
        super().__post_init__()

    def lengths(self, limit: int | None) -> tuple[int, int]:
        """Returns the row lengths of text and summary in tokens.

        The arguments and errors are the same as in the base class, but the default lengths differ.
        """
        source, target = (min(default, limit or default) for default in (1024, 128))
        requested = super().lengths(limit)  # raises if a length is too long
        return (
            requested[0] if self.max_source_length else source,
            requested[1] if self.max_target_length else target,
        )


@dataclass
class SpeechRecognitionArguments(SpeechArguments):
    """Data flags of speech recognition with an encoder-decoder model."""

    language: str | None = option(
        None, "Spoken language, e.g. de or german. Required for multilingual models."
    )
    task: Literal["transcribe", "translate"] = option(
        "transcribe", "Whether the text is a transcript of the speech or its English translation."
    )
    max_label_length: PositiveInt = option(128, "Skip audio whose text has more tokens than this.")
    label_smoothing_factor: SmoothingFactor = option(0.0, SMOOTHING_HELP)
    predict_with_generate: bool = option(
        True, "Transcribe the validation audio at each evaluation and compute the word error rate."
    )
    max_generate_samples: PositiveInt | None = option(
        None,
        "Maximum number of validation examples to transcribe, evenly spaced in the validation set.",
    )
    generation_batch_size: PositiveInt = option(16, "Generation batch size.")
    num_beams: PositiveInt = option(1, "Number of beams. 1 is greedy search.")
    text_samples: NonNegativeInt = option(
        8, "Number of sample transcripts to log at each evaluation."
    )
    feature_extractor_name: str | None = option(
        None,
        "Directory or Hub name of the feature extractor. Default: the model's feature extractor.",
    )
    generation_max_length: PositiveInt | None = option(
        None, "Maximum length of generated text in tokens. Default: the model's maximum."
    )
    dataloader_num_workers: NonNegativeInt | None = option(None, "Alias of --decode_workers.")
    eval_split_name: str | None = option(None, "Alias of --validation_split_name.")
    text_column: str | None = option(None, "Alias of --text_column_name.")
    pad_input_to_multiple_of: PositiveInt | None = option(
        None, "Ignored. A flag of the Transformers 4 script: spectrograms always cover 30 seconds."
    )
    pad_target_to_multiple_of: PositiveInt | None = option(
        None,
        "Ignored. A flag of the Transformers 4 script: texts are always padded to "
        "--max_label_length.",
    )

    def __post_init__(self) -> None:
        self.validation_split_name = self.eval_split_name or self.validation_split_name
        self.text_column_name = self.text_column_name or self.text_column
        if self.decode_workers is None:
            self.decode_workers = self.dataloader_num_workers
        super().__post_init__()


#: Data flags of hfseq's objectives. Objectives that are not listed use the flags of "mlm".
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
    "dpo": DPOArguments,
    "kto": KTOArguments,
    "orpo": ORPOArguments,
    "cpo": CPOArguments,
    "reward": RewardArguments,
    "embedding": EmbeddingArguments,
    "cross_encoder": CrossEncoderArguments,
    "sparse_encoder": SparseArguments,
    "multi_vector": MultiVectorArguments,
    "image_classification": ImageArguments,
    "image_text": ImageTextArguments,
    "image_to_text": ImageToTextArguments,
    "wav2vec2": SpeechPretrainingArguments,
    "ctc": SpeechArguments,
    "speech_recognition": SpeechRecognitionArguments,
}


ArgumentsT = TypeVar("ArgumentsT", bound=TextArguments)


def convert_arguments(arguments: TextArguments, arguments_class: type[ArgumentsT]) -> ArgumentsT:
    """Converts arguments to another objective's class.

    Args:
        arguments: The arguments to convert.
        arguments_class: The class of the result.

    Returns:
        An instance of `arguments_class`. Fields that both classes have are copied from `arguments`
        if their value differs from the default. All other fields have their default values.
    """
    if isinstance(arguments, arguments_class):
        return arguments
    field_names = {item.name for item in fields(arguments_class)}
    values = [(item, getattr(arguments, item.name)) for item in fields(arguments)]
    changed = {item.name: value for item, value in values if value != item.default}
    return arguments_class(
        **{name: value for name, value in changed.items() if name in field_names}
    )
