"""The data flags of classification."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hfseq.data.classification_glue import GLUE, HUB_NAME
from hfseq.data.text_arguments import TextArguments, option, split_problems

TABLES_HELP = (
    "one or more files, quoted globs or comma-separated lists, local or behind any fsspec URL; "
    ".tsv, .csv, .json, .jsonl or .parquet, optionally .gz, .bz2, .xz or .zst"
)
COLUMN_HELP = "a name, or a number counted from 0"
METRICS = ("accuracy", "f1", "f1_macro", "matthews_correlation", "pearson", "spearmanr")


@dataclass
class ClassificationArguments(TextArguments):
    """Where labelled sentences come from, what is predicted, and how predictions are judged."""

    task_name: str | None = option(
        None,
        f"A GLUE task: {', '.join(GLUE)}; from the Hub ({HUB_NAME}), or with --train_file from "
        "files that have its columns.",
    )
    task_type: str | None = option(
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
    test_split_percentage: int = option(
        0,
        "Percentage of the training examples to keep for --do_predict when there is no test split.",
    )
    max_predict_samples: int | None = option(None, "Predict the first so many test examples only.")
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
        "Whether the first line of a .tsv or .csv names the columns; by default it does, unless "
        "columns are given by number or the file is CoLA's own.",
    )
    quoting: bool | None = option(
        None, 'Whether " quotes cells; by default in .csv and not in .tsv files.'
    )
    no_quoting: bool = option(False, 'Take " as any other character, in .csv files too.')
    metrics: list[str] | None = option(
        None,
        f"What predictions are judged by: {', '.join(METRICS)}, or any name that the evaluate "
        "library loads; by default those of the task.",
    )
    vocabulary: str | None = option(
        None,
        "'words': without --tokenizer_name, make a vocabulary of the words of the training part.",
    )
    vocab_size: int | None = option(None, "Entries of that vocabulary; by default all words.")
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
            self.dataset_name, self.dataset_config_name = HUB_NAME, self.task_name
        super().__post_init__()

    def problems(self) -> Iterator[tuple[Any, str]]:
        """Add unknown tasks and kinds, and what only running text has."""
        yield (
            self.task_name is not None and self.task_name not in GLUE,
            f"--task_name {self.task_name}: give one of {', '.join(GLUE)}, or your own data with "
            "--train_file and no --task_name",
        )
        yield (
            self.task_type not in (None, "classification", "regression"),
            f"--task_type {self.task_type}: give classification or regression",
        )
        task = GLUE.get(self.task_name or "")
        own = "regression" if task and not task.labels else "classification"
        yield (
            task and self.task_type not in (None, own),
            f"--task_type {self.task_type} and --task_name {self.task_name} disagree: that is "
            f"{own}; drop one of the two",
        )
        yield (
            self.vocabulary not in (None, "words"),
            f"--vocabulary {self.vocabulary}: give words, or a tokenizer with --tokenizer_name",
        )
        for name in ("max_predict_samples", "vocab_size"):
            value = getattr(self, name)
            yield value is not None and value < 1, f"--{name} {value}: give a number of at least 1"
        yield (
            self.streaming or self.line_by_line or self.sample_by != "line",
            "--streaming, --line_by_line and --sample_by are for running text; here every example "
            "is a row: drop them",
        )
        yield from split_problems(self, "examples")
        yield from super().problems()

    @property
    def by_number(self) -> bool:
        """Whether a column is named by its number."""
        named = (self.sentence1_column, self.sentence2_column, self.label_column)
        return any(re.fullmatch(r"[0-9]{1,9}", name or "") for name in named)
