"""Classification of texts and text pairs, and regression (Devlin et al., 2018, section 4)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfseq.data.arguments import GLUE, ClassificationArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom
from hfseq.data.classification import (
    MULTI_LABEL,
    REGRESSION,
    ExampleRows,
    LabeledSplits,
    LabelEncoder,
    class_names,
    config_labels,
    load_examples,
    load_or_train_word_tokenizer,
    problem_type,
)
from hfseq.errors import UsageError, write_atomically
from hfseq.nn.context import RowGuarantees
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.metrics import Metric, compute_metrics, load_metric

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: Default metrics, used if neither the task nor a flag defines them.
BINARY_METRICS = ("accuracy", "f1", "matthews_correlation")
MULTICLASS_METRICS = ("accuracy", "f1_macro", "matthews_correlation")
MULTI_LABEL_METRICS = ("accuracy", "f1_micro", "f1_macro")
REGRESSION_METRICS = ("pearson", "spearmanr")


class Classification(Objective):
    """Trains a classifier with cross-entropy, or a regression model with squared error.

    With several labels per example (multi-label classification), the loss is the binary
    cross-entropy, averaged over the classes. As in Transformers, a class is predicted if its
    probability is above 0.5.

    Every example is one row. Losses and metrics are averages over examples. Metrics are computed on
    the host, from the predictions for all examples of a split.
    """

    name = "classification"
    data_arguments = ClassificationArguments
    auto_class = "ForSequenceClassification"
    supports_streaming = False
    has_vocabulary = False
    supports_predict = True
    evaluates_test = True
    row_guarantees = RowGuarantees()

    arguments: ClassificationArguments

    def setup(self) -> None:
        """Loads the examples and the metrics."""
        arguments, config = self.arguments, self.config
        self.splits = load_examples(arguments)
        self.regression = config.problem_type == REGRESSION
        self.multi_label = config.problem_type == MULTI_LABEL
        names = None if self.regression else config_labels(config)
        self.labels = LabelEncoder(names, "train" not in self.splits, self.multi_label)
        is_single_label = not (self.regression or self.multi_label)
        self.sums = ("correct",) if is_single_label else ()  # type: ignore[misc]
        task = GLUE.get(self.splits.task or "")
        class_metrics = BINARY_METRICS if config.num_labels == 2 else MULTICLASS_METRICS
        class_metrics = MULTI_LABEL_METRICS if self.multi_label else class_metrics
        default_metrics = (
            task.metrics if task else REGRESSION_METRICS if self.regression else class_metrics
        )
        self.load_metrics(arguments.metrics or default_metrics)
        self.uses_token_types = False
        self._label_ids: dict[str, np.ndarray] = {}  # by split

    def load_metrics(self, metrics: Sequence[str]) -> None:
        """Loads the evaluation metrics.

        Raises:
            UsageError: A metric does not exist or does not apply to the task.
        """
        self.metric_names = tuple(metrics)
        self.loaded_metrics = [load_metric(name) for name in self.metric_names]
        num_classes = len(self.labels.names or ())
        for metric in self.loaded_metrics:  # otherwise the first evaluation fails
            if not isinstance(metric, Metric):
                continue
            if self.regression and not metric.for_regression:
                raise UsageError(
                    f"--metrics {metric.name} requires classes, but this is a regression task. Use "
                    f"{', '.join(REGRESSION_METRICS)}, or set --task_type classification."
                )
            if self.multi_label and not metric.for_multi_label:
                raise UsageError(
                    f"--metrics {metric.name} requires one class per example, but the labels are "
                    f"lists. Use {', '.join(MULTI_LABEL_METRICS)}."
                )
            if metric.name == "f1" and num_classes > 2:
                raise UsageError(
                    f"--metrics f1 requires two classes, but there are {num_classes}. Use f1_macro."
                )

    @classmethod
    def make_tokenizer(  # type: ignore[override]
        cls, arguments: ClassificationArguments, folder: Path, plugins: Plugins | None
    ) -> PreTrainedTokenizerBase | None:
        """With ``--vocabulary words``, loads the run's word vocabulary or builds a new one."""
        if arguments.vocabulary is None:
            return None
        return load_or_train_word_tokenizer(
            folder, arguments, lambda: load_examples(arguments, plugins)
        )

    @classmethod
    def configure_data(  # type: ignore[override]
        cls, config: PreTrainedConfig, arguments: ClassificationArguments, plugins: Plugins | None
    ) -> None:
        """Sets the classes of the data in ``config``, or a single output for regression."""
        splits = load_examples(arguments, plugins)
        config.problem_type = problem_type(splits, arguments, config)
        if config.problem_type == REGRESSION:
            config.num_labels = 1
        else:
            cls.set_classes(config, splits)

    @staticmethod
    def set_classes(config: PreTrainedConfig, splits: LabeledSplits) -> None:
        """Sets the classes of the data in ``config``.

        If the configuration already contains all of these classes, it is not changed.
        """
        names, model_names = class_names(splits, config), config_labels(config)
        are_numbers = "train" not in splits and names == list(map(str, range(len(model_names))))
        if names != model_names and not are_numbers:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks whether the model uses token type IDs."""
        has_pairs = any(examples.second is not None for examples in self.splits.values())
        num_token_types = getattr(self.config, "type_vocab_size", 0) or 0
        # Inference code passes the outputs of the tokenizer to the model. The model must therefore
        # not depend on token type IDs if the tokenizer does not return them.
        tokenizer_returns_types = "token_type_ids" in self.tokenizer.model_input_names
        self.uses_token_types = (
            has_pairs
            and tokenizer_returns_types
            and num_token_types > 1
            and model.accepts("token_type_ids")
        )

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes a split, one row per example, and logs the number of examples per class."""
        examples = splits[split]
        labels = self._label_ids[split] = self.labels.encode_labels(examples, split)
        pad_to_max_length = self.arguments.pad_to_max_length
        rows = ExampleRows(
            examples, labels, self.tokenizer, length, pad_to_max_length, self.uses_token_types
        )
        if rows.truncated:
            logger.info(
                "truncated %d of the %d %s examples to %d tokens",
                rows.truncated,
                len(rows),
                split,
                length,
            )
        if self.labels.names is not None:
            class_ids = labels
            if self.multi_label:
                class_ids = np.nonzero(labels == 1)[1]
            counts = Counter(class_ids.tolist())
            class_counts = [
                f"{name} {counts[number]}" for number, name in enumerate(self.labels.names)
            ]
            class_counts += [f"unlabeled {counts[IGNORE_INDEX]}"] if IGNORE_INDEX in counts else []
            logger.info("%s: %d examples: %s", split, len(labels), ", ".join(class_counts))
        elif len(known_labels := labels[~np.isnan(labels)]):
            logger.info(
                "%s: %d examples, numbers from %g to %g, mean %.4g",
                split,
                len(labels),
                known_labels.min(),
                known_labels.max(),
                known_labels.mean(),
            )
        return rows, {"documents": len(rows), "tokens": rows.total_tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Excludes rows from the loss that have no label or only pad the batch."""
        labels = rows["labels"]
        has_label = self._has_label(labels)
        expanded = has_label.reshape(-1, *(1,) * (labels.ndim - 1))
        valid = rows["valid"] if "valid" in rows else np.ones(len(labels), bool)
        batch = {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["segment_ids"],
            "labels": np.where(expanded, labels, 0).astype(labels.dtype),
            "counts": has_label & valid,
            "valid": valid,
        }
        return batch | ({"token_type_ids": rows["token_type_ids"]} if self.uses_token_types else {})

    def _has_label(self, labels: np.ndarray) -> np.ndarray:
        """Returns whether each example has a label, bool `(examples,)`."""
        if self.multi_label:
            return ~np.isnan(labels).any(1)
        return ~np.isnan(labels) if self.regression else labels != IGNORE_INDEX

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss summed over examples.

        In evaluation, the totals include the logits of each row.
        """
        inputs: dict[str, Any] = {}
        if self.uses_token_types:
            inputs["token_type_ids"] = batch["token_type_ids"]
        mask, counts = batch["attention_mask"], batch["counts"]
        if model.statistics and model.accepts("code_mask"):
            # Exclude rows that only pad the batch from statistics that the model collects.
            inputs["code_mask"] = mask * batch["valid"][:, None]
        output, new_extra = forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            attention_mask=mask,
            **inputs,
        )
        logits, labels = output.logits, batch["labels"]
        totals: dict[str, jax.Array] = {}
        if self.regression:
            errors = jnp.where(counts, logits[:, 0].astype(jnp.float32) - labels, 0.0)
            total = jnp.square(errors).sum()
        elif self.multi_label:
            losses = optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), labels)
            total = jnp.where(counts, losses.mean(1), 0.0).sum()
        else:
            total, _, correct = cross_entropy(logits, jnp.where(counts, labels, IGNORE_INDEX))
            totals["correct"] = correct
        count = counts.sum()
        auxiliary_loss = getattr(output, "auxiliary_loss", None)
        # Rescale from a sum over tokens to a sum over examples.
        if train and auxiliary_loss is not None:
            totals["loss"] = jax.lax.stop_gradient(total)
            total = total + auxiliary_loss * count / jnp.maximum(mask.sum(), 1)
        if not train:
            totals["row_outputs"] = logits.astype(jnp.float32)
        return total, count, {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss and, for classes, the accuracy."""
        metrics = super().metrics(totals)
        return {name: value for name, value in metrics.items() if name != "perplexity"}

    def has_targets(self, split: str) -> bool:
        """Returns whether any example of a split has a label."""
        return bool(self._has_label(self._label_ids[split]).any())

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Computes the metrics of a split and of each of its named parts.

        The names of the metrics of a part begin with its name, e.g. ``in_domain_dev_f1``.
        """
        outputs = rows["row_outputs"]
        labels = self._label_ids[split][: len(outputs)]
        metrics = self._judge(outputs, labels)
        for name, part in self.splits[split].parts.items():
            rows_of_part = slice(part.start, min(part.stop, len(labels)))
            scores = self._judge(outputs[rows_of_part], labels[rows_of_part], with_loss=True)
            metrics |= {f"{name}_{metric}": value for metric, value in scores.items()}
        return metrics

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split.

        Returns ``None`` if a metric of the ``evaluate`` library is used, whose names are unknown.
        """
        if not all(isinstance(metric, Metric) for metric in self.loaded_metrics):
            return None
        names = {"loss", *self.metric_names}
        parts = {f"{part}_{name}" for part in self.splits[split].parts for name in names}
        return names | parts | ({"accuracy"} if self.sums else set())

    def _judge(
        self, outputs: np.ndarray, labels: np.ndarray, with_loss: bool = False
    ) -> dict[str, float]:
        has_label = self._has_label(labels)
        if not has_label.any():
            return {}
        outputs, labels = outputs[has_label], labels[has_label]
        scores = compute_metrics(self.loaded_metrics, self.predictions(outputs), labels)
        if not with_loss:
            return scores
        logits = outputs.astype(np.float64)
        if self.regression:
            return scores | {"loss": float(np.square(logits[:, 0] - labels).mean())}
        if self.multi_label:
            return scores | {"loss": float((np.logaddexp(0, logits) - logits * labels).mean())}
        maximum = logits.max(1, keepdims=True)
        log_partition = np.log(np.exp(logits - maximum).sum(1)) + maximum[:, 0]
        return scores | {
            "loss": float((log_partition - logits[np.arange(len(labels)), labels]).mean())
        }

    def predictions(self, outputs: np.ndarray) -> np.ndarray:
        """Converts the outputs of the model to predictions.

        Args:
            outputs: Logits, `(rows, num_labels)`.

        Returns:
            The predicted class IDs `(rows,)`, or numbers `(rows,)` for regression. For multi-label
            classification, 1 for each predicted class and 0 for others, `(rows, num_labels)`.
        """
        if self.multi_label:
            return (outputs > 0).astype(np.int32)
        return outputs[:, 0] if self.regression else outputs.argmax(1)

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Writes ``test_results_<task>.tsv`` with the columns index and prediction.

        If the split has named parts, each part has its own file. The predictions of multi-label
        classification are JSON lists.
        """
        predictions = self.predictions(rows["row_outputs"])
        names = self.labels.names
        if names is None:
            texts = [f"{number:.3f}" for number in predictions.tolist()]
        elif self.multi_label:
            label_lists = [[names[i] for i in np.flatnonzero(row)] for row in predictions]
            texts = [json.dumps(labels, ensure_ascii=False) for labels in label_lists]
        else:
            texts = [names[class_id] for class_id in predictions.tolist()]
        task = f"_{self.splits.task}" if self.splits.task else ""
        parts = self.splits[split].parts or {"": range(len(texts))}
        for name, part in parts.items():
            path = folder / f"test_results{task}{f'_{name}' if name else ''}.tsv"
            lines = [f"{number}\t{texts[row]}\n" for number, row in enumerate(part)]
            write_atomically(path, "index\tprediction\n" + "".join(lines))
