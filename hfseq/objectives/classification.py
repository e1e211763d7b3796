"""Classification of sentences and pairs, and regression (Devlin et al., 2018, section 4)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import GLUE, ClassificationArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom
from hfseq.data.classification import (
    ExampleRows,
    LabeledSplits,
    LabelEncoder,
    class_names,
    config_labels,
    is_regression,
    load_examples,
    load_or_train_word_tokenizer,
)
from hfseq.errors import UsageError, write_atomically
from hfseq.nn.context import RowGuarantees as KnownRows
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.metrics import Metric, compute_metrics, load_metric

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: What is reported where neither a task nor a flag says.
BINARY_METRICS = ("accuracy", "f1", "matthews_correlation")
MULTICLASS_METRICS = ("accuracy", "f1_macro", "matthews_correlation")
REGRESSION_METRICS = ("pearson", "spearmanr")


class Classification(Objective):
    """Cross-entropy of the class of each example, or the squared error of its number.

    Every example is a row; losses and metrics are over examples. Metrics are computed on the host,
    from the predictions for all examples of a split.
    """

    name = "classification"
    data_arguments = ClassificationArguments
    auto_class = "ForSequenceClassification"
    supports_streaming = False
    has_vocabulary = False
    supports_predict = True
    evaluates_test = True
    row_layout = KnownRows()

    arguments: ClassificationArguments

    def setup(self) -> None:
        """Load the examples, and the metrics that judge what is predicted for them."""
        arguments, config = self.arguments, self.config
        self.splits = load_examples(arguments)
        self.regression = config.problem_type == "regression"
        names = None if self.regression else config_labels(config)
        self.labels = LabelEncoder(names, by_number="train" not in self.splits)
        self.sums = () if self.regression else ("correct",)  # type: ignore[misc]
        task = GLUE.get(self.splits.task or "")
        classes = BINARY_METRICS if config.num_labels == 2 else MULTICLASS_METRICS
        usual = task.metrics if task else REGRESSION_METRICS if self.regression else classes
        self.load_metrics(arguments.metrics or usual)
        self.types = False
        self._numbers: dict[str, np.ndarray] = {}  # the labels of each split

    def load_metrics(self, metrics: Sequence[str]) -> None:
        """Load metrics; those that do not suit what is predicted are refused."""
        self.metric_names = tuple(metrics)
        self.scores = [load_metric(name) for name in self.metric_names]
        classes = len(self.labels.names or ())
        for metric in self.scores:  # which the first evaluation would stumble over
            if not isinstance(metric, Metric):
                continue
            if self.regression and not metric.for_regression:
                raise UsageError(
                    f"--metrics {metric.name} is of classes, and numbers are predicted here: give "
                    f"{', '.join(REGRESSION_METRICS)}, or --task_type classification"
                )
            if metric.name == "f1" and classes > 2:
                raise UsageError(
                    f"--metrics f1 is of two classes and there are {classes}: use f1_macro"
                )

    @classmethod
    def make_tokenizer(  # type: ignore[override]
        cls, arguments: ClassificationArguments, folder: Path, plugins: Plugins | None
    ) -> PreTrainedTokenizerBase | None:
        """Load the words that the run found when it first began, or find them, if it may."""
        if arguments.vocabulary is None:
            return None
        return load_or_train_word_tokenizer(
            folder, arguments, lambda: load_examples(arguments, plugins)
        )

    @classmethod
    def configure_data(  # type: ignore[override]
        cls, config: PreTrainedConfig, arguments: ClassificationArguments, plugins: Plugins | None
    ) -> None:
        """Let the model have the classes of the data, or one number to predict."""
        splits = load_examples(arguments, plugins)
        if is_regression(splits, arguments, config):
            config.num_labels, config.problem_type = 1, "regression"
            return
        cls.set_classes(config, splits)

    @staticmethod
    def set_classes(config: PreTrainedConfig, splits: LabeledSplits) -> None:
        """Let the model have the classes of the data, in its own order if it has them all."""
        names, known = class_names(splits, config), config_labels(config)
        numbers = "train" not in splits and names == list(map(str, range(len(known))))
        if names != known and not numbers:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: number for number, name in enumerate(names)}
        config.problem_type = "single_label_classification"

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Learn whether the model tells the sentences of a pair apart."""
        pairs = any(examples.second is not None for examples in self.splits.values())
        kinds = getattr(self.config, "type_vocab_size", 0) or 0
        # As whoever calls the model with what the tokenizer gives.
        given = "token_type_ids" in self.tokenizer.model_input_names
        self.types = pairs and given and kinds > 1 and model.accepts("token_type_ids")

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenise a split, an example a row; log how many examples each class has."""
        examples = splits[split]
        labels = self._numbers[split] = self.labels.encode_labels(examples, split)
        pads = self.arguments.pad_to_max_length
        rows = ExampleRows(examples, labels, self.tokenizer, length, pads, self.types)
        if rows.truncated:
            logger.info(
                "%d of the %d %s examples are longer than %d tokens and were cut",
                rows.truncated,
                len(rows),
                split,
                length,
            )
        if self.labels.names is not None:
            counts = Counter(labels.tolist())
            shown = [f"{name} {counts[number]}" for number, name in enumerate(self.labels.names)]
            shown += [f"without a label {counts[IGNORE_INDEX]}"] if IGNORE_INDEX in counts else []
            logger.info("%s: %d examples: %s", split, len(labels), ", ".join(shown))
        elif len(known := labels[~np.isnan(labels)]):
            logger.info(
                "%s: %d examples, numbers from %g to %g, mean %.4g",
                split,
                len(labels),
                known.min(),
                known.max(),
                known.mean(),
            )
        return rows, {"documents": len(rows), "tokens": rows.total_tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Hide the labels of rows that only fill a batch up."""
        labels = rows["labels"]
        known = ~np.isnan(labels) if self.regression else labels != IGNORE_INDEX
        valid = rows["valid"] if "valid" in rows else np.ones(len(labels), bool)
        batch = {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["segment_ids"],
            "labels": np.where(known, labels, 0).astype(labels.dtype),
            "counts": known & valid,
            "valid": valid,
        }
        return batch | ({"token_type_ids": rows["token_type_ids"]} if self.types else {})

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Sum the loss over examples; in evaluation the outputs of each row come along."""
        inputs: dict[str, Any] = {}
        if self.types:
            inputs["token_type_ids"] = batch["token_type_ids"]
        mask, counts = batch["attention_mask"], batch["counts"]
        if model.statistics and model.accepts("code_mask"):
            inputs["code_mask"] = mask * batch["valid"][:, None]  # copies count in no statistics
        output, changed = forward(
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
        else:
            total, _, right = cross_entropy(logits, jnp.where(counts, labels, IGNORE_INDEX))
            totals["correct"] = right
        count = counts.sum()
        added = getattr(output, "auxiliary_loss", None)
        if train and added is not None:  # a sum over tokens, and this one is over examples
            totals["loss"] = jax.lax.stop_gradient(total)
            total = total + added * count / jnp.maximum(mask.sum(), 1)
        if not train:
            totals["row_outputs"] = logits.astype(jnp.float32)
        return total, count, {"extra": changed, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the loss, and of classes the accuracy; nothing where there were no labels."""
        if not totals["count"]:
            return {}
        metrics = super().metrics(totals)
        return {name: value for name, value in metrics.items() if name != "perplexity"}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Judge the predictions for a split, and for each of its parts (``in_domain_dev_…``)."""
        outputs = rows["row_outputs"]
        labels = self._numbers[split][: len(outputs)]
        metrics = self._judge(outputs, labels)
        for name, part in self.splits[split].parts.items():
            rows_of_part = slice(part.start, min(part.stop, len(labels)))
            scores = self._judge(outputs[rows_of_part], labels[rows_of_part], with_loss=True)
            metrics |= {f"{name}_{metric}": value for metric, value in scores.items()}
        return metrics

    def reported_metrics(self, split: str) -> set[str] | None:
        """Return the names of all metrics of a split; other libraries' metrics name their own."""
        if not all(isinstance(metric, Metric) for metric in self.scores):
            return None
        names = {"loss", *self.metric_names}
        parts = {f"{part}_{name}" for part in self.splits[split].parts for name in names}
        return names | parts | (set() if self.regression else {"accuracy"})

    def _judge(
        self, outputs: np.ndarray, labels: np.ndarray, with_loss: bool = False
    ) -> dict[str, float]:
        known = ~np.isnan(labels) if self.regression else labels != IGNORE_INDEX
        if not known.any():
            return {}
        outputs, labels = outputs[known], labels[known]
        scores = compute_metrics(self.scores, self.predictions(outputs), labels)
        if not with_loss:
            return scores
        wide = outputs.astype(np.float64)
        if self.regression:
            return scores | {"loss": float(np.square(wide[:, 0] - labels).mean())}
        top = wide.max(1, keepdims=True)
        totals = np.log(np.exp(wide - top).sum(1)) + top[:, 0]
        return scores | {"loss": float((totals - wide[np.arange(len(labels)), labels]).mean())}

    def predictions(self, outputs: np.ndarray) -> np.ndarray:
        """Return the class of each row of logits, or its number."""
        return outputs[:, 0] if self.regression else outputs.argmax(1)

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Write ``test_results_<task>.tsv`` (index, prediction), a file for each part."""
        predictions = self.predictions(rows["row_outputs"])
        names = self.labels.names
        shown = [f"{x:.3f}" if names is None else names[x] for x in predictions.tolist()]
        task = f"_{self.splits.task}" if self.splits.task else ""
        parts = self.splits[split].parts or {"": range(len(shown))}
        for name, part in parts.items():
            path = folder / f"test_results{task}{f'_{name}' if name else ''}.tsv"
            lines = [f"{number}\t{shown[row]}\n" for number, row in enumerate(part)]
            write_atomically(path, "index\tprediction\n" + "".join(lines))
