"""The tasks of GLUE (Wang et al., 2018): their columns, labels, splits and metrics."""

from __future__ import annotations

from typing import NamedTuple

#: Where the tasks are on the Hub, a configuration each.
HUB_NAME = "nyu-mll/glue"


class Task(NamedTuple):
    """A task; labels are in the order of their numbers, none for regression."""

    sentences: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    # Endings of its validation and test splits, where there are several.
    parts: tuple[str, ...] = ()


GLUE: dict[str, Task] = {
    "cola": Task(
        ("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation", "accuracy")
    ),
    "sst2": Task(("sentence",), ("negative", "positive")),
    "mrpc": Task(
        ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")
    ),
    "stsb": Task(("sentence1", "sentence2"), (), ("pearson", "spearmanr")),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
    "mnli": Task(
        ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"),
        parts=("matched", "mismatched"),
    ),
    "qnli": Task(("question", "sentence"), ("entailment", "not_entailment")),
    "rte": Task(("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": Task(("sentence1", "sentence2"), ("not_entailment", "entailment")),
}  # fmt: skip
