"""What the labels of examples are to a model: classes by number, or numbers to predict."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hfseq.data.classification import Examples, LabelledSplits
from hfseq.data.classification_arguments import ClassificationArguments
from hfseq.data.classification_glue import GLUE
from hfseq.errors import DataError
from hfseq.labels import IGNORED

FRACTION = re.compile(r"\s*[-+]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)\s*")


class Labels:
    """What the labels of the examples are to the model: classes by number, or numbers.

    ``names`` are the classes in the order of their numbers; None for regression. With
    ``by_number`` the data may have the numbers instead.
    """

    def __init__(self, names: Sequence[str] | None, by_number: bool = False):
        self.names = None if names is None else list(names)
        self._numbers = {name: number for number, name in enumerate(self.names or ())}
        if by_number:
            self._numbers = {str(i): i for i in self._numbers.values()} | self._numbers

    def numbers(self, examples: Examples, split: str) -> np.ndarray:
        """Return int32 classes (-100 where there is none) or float32 numbers (NaN), (examples,).

        Raises:
            DataError: a training or validation example without a label, a class that the training
                data lacks, or what is no number.
        """
        needed = split != "test"
        found = [self._number(examples, row, needed) for row in range(len(examples))]
        return np.array(found, np.float32 if self.names is None else np.int32)

    def _number(self, examples: Examples, row: int, needed: bool) -> float:
        label = examples.labels[row]
        if label is None:
            if needed:
                raise DataError(f"{examples.place(row)} has no label")
            return float("nan") if self.names is None else IGNORED
        if self.names is None:
            return _score(label, examples, row)
        text = class_name(label)
        number = self._numbers.get(text)
        if number is None:
            raise DataError(
                f"{examples.place(row)}: the label '{text}' is not one of the classes that the "
                f"model learns, {', '.join(self.names[:20])}; correct it, or add training examples "
                "of it"
            )
        return number


def _score(label: Any, examples: Examples, row: int) -> float:
    try:
        value = float(label)
    except (TypeError, ValueError):
        value = float("nan")
    if math.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
        raise DataError(
            f"{examples.place(row)}: the label {label!r} is beyond float32, in which models "
            "compute; scale the labels"
        )
    if not math.isfinite(value):
        raise DataError(
            f"{examples.place(row)}: the label {label!r} is no number, which regression needs; "
            "correct it, or give --task_type classification"
        )
    return value


def class_name(label: Any) -> str:
    """Return the name of a class; 1.0 and 1 are one class."""
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()


def is_regression(splits: LabelledSplits, arguments: ClassificationArguments, config: Any) -> bool:
    """Tell whether numbers are predicted: as the flag, the task, the data or the model says."""
    if arguments.task_type:
        return arguments.task_type == "regression"
    if splits.task:
        return not GLUE[splits.task].labels
    if "train" not in splits:
        return getattr(config, "problem_type", None) == "regression"
    labels = [label for label in splits["train"].labels if label is not None]
    fractions = [isinstance(x, float) or bool(FRACTION.fullmatch(x)) for x in labels]
    return any(fractions) and all(
        fraction or re.fullmatch(r"[-+]?\d+", str(label).strip())
        for fraction, label in zip(fractions, labels, strict=True)
    )


def class_names(splits: LabelledSplits, config: Any) -> list[str]:
    """Return the classes in the order of their numbers.

    They are those of the task, of the data set, or of the training labels (numbers in their order,
    else by the alphabet). A model that has names for all of them keeps its own order.

    Raises:
        DataError: training examples of one class alone.
    """
    names = _known_names(splits)
    own = [config.id2label[number] for number in sorted(config.id2label)]
    default = all(re.fullmatch(r"LABEL_\d+", name) for name in own)
    if not names:  # an evaluation alone: the model knows
        return list(map(str, range(len(own)))) if default else own
    if "train" in splits:
        present = Counter(class_name(x) for x in splits["train"].labels if x is not None)
        if len(present) < 2:
            only = f"the label '{next(iter(present))}'" if present else "no label"
            raise DataError(
                f"every training example has {only}: there is nothing to tell apart; look at "
                "--label_column, or give examples of at least two classes"
            )
    return names if default or not set(names) <= set(own) else own


def _known_names(splits: LabelledSplits) -> list[str]:
    if splits.task and GLUE[splits.task].labels:
        return list(GLUE[splits.task].labels)
    for examples in splits.values():
        if classes := examples.tables[0][1].classes:
            return list(classes)
    if "train" not in splits:
        return []
    return sorted_names(class_name(x) for x in splits["train"].labels if x is not None)


def sorted_names(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: whole numbers in their order, others by the alphabet."""
    names = set(labels)
    numbers = all(re.fullmatch(r"[-+]?\d{1,99}", name) for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if numbers else None)
