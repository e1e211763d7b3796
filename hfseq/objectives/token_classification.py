"""Token classification: named entities, part-of-speech tags and chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import TokenClassificationArguments
from hfseq.data.batches import IGNORE_INDEX, FieldRows, RowRandom
from hfseq.data.classification import config_labels, sort_labels
from hfseq.data.records import Records, drop_invalid, load_records
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import UsageError, write_atomically
from hfseq.nn.context import RowGuarantees
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.cross_entropy import cross_entropy
from hfseq.objectives.metrics import entity_scores

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

WORD_COLUMNS = ("tokens", "words")
OVERALL_METRICS = ("precision", "recall", "f1", "accuracy")


class TokenClassification(Objective):
    """Predicts the tag of each word at the first token of the word.

    Words beyond the end of a truncated sentence are neither trained on nor evaluated. Metrics are
    computed for entities, from the predictions for all sentences of a split.
    """

    name = "token_classification"
    data_arguments = TokenClassificationArguments
    auto_class = "ForTokenClassification"
    supports_streaming = False
    has_vocabulary = False
    supports_predict = True
    evaluates_test = True
    row_guarantees = RowGuarantees()
    sums = ("correct",)

    arguments: TokenClassificationArguments

    def setup(self) -> None:
        """Loads the examples, skips invalid ones, and configures the tokenizer for words."""
        self.names = config_labels(self.config)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self._loaded = splits = load_records(self.arguments)
        self._labels: dict[str, tuple[list[list[int]], bool]] = {}
        self._token_words: dict[str, list[list[int]]] = {}
        self.splits: dict[str, Records] = {}
        for split, records in splits.items():
            words, column = word_columns(records, self.arguments, split != "test")
            problems = {}
            for row in range(len(records)):
                tags = records[row].get(column) if column else ...
                classes = self._classes(records, column)
                problem = self._problem(records[row].get(words), tags, classes)
                if problem is not None:
                    problems[row] = problem
            self.splits[split] = drop_invalid(records, split, problems, self.arguments)
        enable_prefix_space(self.tokenizer)

    def _problem(self, words: object, tags: object, classes: Sequence[str]) -> str | None:
        """Returns why an example is invalid, or ``None`` if it is valid.

        Args:
            words: The words of the example.
            tags: The tags of the example. ``Ellipsis`` if the split has no tags.
            classes: Names of numeric tags.
        """
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return f"words must be a list of texts, not {words!r:.60}"
        if not any(word.strip() for word in words):
            return "the list of words is empty"
        if tags is ...:
            return None
        if not isinstance(tags, list) or len(tags) != len(words):
            count = len(tags) if isinstance(tags, list) else f"{tags!r:.40} instead of"
            return f"it has {len(words)} words and {count} tags"
        unknown_tags = [tag for tag in tag_names(tags, classes) if tag not in self.numbers]
        if unknown_tags:
            return f"unknown tag '{unknown_tags[0]}', which is not one of the model's labels"
        return None

    def _classes(self, records: Records, column: str | None) -> Sequence[str]:
        """Returns the names of numeric tags.

        If the data does not contain names and is only evaluated, the names of the model are used.
        """
        names = records.tables[0].classes.get(column or "")
        return names or ([] if "train" in self._loaded else self.names)

    @classmethod
    def configure_data(  # type: ignore[override]
        cls,
        config: PreTrainedConfig,
        arguments: TokenClassificationArguments,
        plugins: Plugins | None,
    ) -> None:
        """Sets the tags of the training data in ``config``.

        If the configuration already contains all of these tags, it is not changed.
        """
        splits = load_records(arguments, plugins)
        model_names = config_labels(config)
        records = splits.get("train")
        if records is None or len(records) == 0:
            return
        _, column = word_columns(records, arguments, tagged=True)
        names = list(records.tables[0].classes.get(str(column), ()))
        if not names:
            lists = [records[row].get(str(column)) for row in range(len(records))]
            names = sort_labels(
                str(tag) for tags in lists if isinstance(tags, list) for tag in tags
            )
        if not names:
            raise UsageError(f"--label_column_name {column}: the training data contains no tags")
        if set(names) <= set(model_names):
            return
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the sentences of a split, with one row per sentence."""
        records, data = splits[split], self.arguments
        words, column = word_columns(records, data, split != "test")
        ids, labels, token_words, num_truncated = [], [], [], 0
        for row in range(len(records)):
            example = records[row]
            encoded = self.tokenizer(
                example[words],
                is_split_into_words=True,
                truncation=True,
                max_length=length,
                return_overflowing_tokens=True,
                verbose=False,
            )
            encoding = encoded.encodings[0]
            tags = [self.names[0]] * len(example[words])
            if column is not None:
                tags = tag_names(example[column], self._classes(records, column))
            numbers = [self.numbers[tag] for tag in tags]
            ids.append(encoding.ids)
            labels.append(self._aligned(encoding.word_ids, tags, numbers))
            token_words.append(
                [
                    word
                    for word, label in zip(encoding.word_ids, labels[-1], strict=True)
                    if label != IGNORE_INDEX
                ]
            )
            num_truncated += len(encoded.encodings) > 1
        if num_truncated:
            logger.info(
                "truncated %d of the %d %s sentences to %d tokens",
                num_truncated,
                len(records),
                split,
                length,
            )
        self.length = length
        self._labels[split] = labels, column is not None
        self._token_words[split] = token_words
        rows = FieldRows(
            ids,
            pad_token_id(self.tokenizer),
            length,
            {"labels": (labels, IGNORE_INDEX)},
            {},
            data.pad_to_max_length,
        )
        return rows, {"documents": len(rows), "tokens": rows.total_tokens}

    def _aligned(
        self, words: Sequence[int | None], tags: Sequence[str], numbers: Sequence[int]
    ) -> list[int]:
        """Returns the label of each token: ``IGNORE_INDEX`` if no tag is predicted for the token.

        Args:
            words: Index of the word of each token, or ``None`` for special tokens.
            tags: Tag of each word.
            numbers: Class ID of the tag of each word.
        """
        labels, previous = [], None
        for word in words:
            if word is None:
                labels.append(IGNORE_INDEX)
            elif word != previous:
                labels.append(numbers[word])
            elif self.arguments.label_all_tokens:
                tag = tags[word]
                inside_tag = f"I-{tag[2:]}" if tag.startswith("B-") else tag
                labels.append(self.numbers.get(inside_tag, numbers[word]))
            else:
                labels.append(IGNORE_INDEX)
            previous = word
        return labels

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Removes the labels of rows that only pad the batch."""
        valid = rows["valid"][:, None] if "valid" in rows else True
        labels = np.where(valid, rows["labels"], np.int32(IGNORE_INDEX))
        return {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["segment_ids"],
            "labels": labels,
        }

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss summed over tags. In evaluation, the totals include the predictions."""
        output, new_extra = forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
        )
        total, count, correct = cross_entropy(output.logits, batch["labels"])
        totals = {"correct": correct}
        if not train:  # pad all rows to the same width
            predictions = output.logits.argmax(-1).astype(jnp.int32)
            totals["predicted"] = jnp.pad(
                predictions, ((0, 0), (0, self.length - predictions.shape[1]))
            )
        return total, count, {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss. See :meth:`row_metrics` for all other metrics."""
        return {"loss": super().metrics(totals)["loss"]}

    def has_targets(self, split: str) -> bool:
        """Returns whether the sentences of a split have tags."""
        return self._labels[split][1]

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Computes the entity-level metrics of a split."""
        if not self.has_targets(split):
            return {}
        labels, _ = self._labels[split]
        predicted = self._tags(rows["predicted"], labels)
        references = [
            [self.names[label] for label in row if label != IGNORE_INDEX] for row in labels
        ]
        scores = entity_scores(predicted, references[: len(predicted)])
        if self.arguments.return_entity_level_metrics:
            return scores
        return {name: scores[name] for name in OVERALL_METRICS}

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split.

        Returns ``None`` with ``--return_entity_level_metrics``, because the entity types are
        unknown.
        """
        return None if self.arguments.return_entity_level_metrics else {"loss", *OVERALL_METRICS}

    def _tags(self, predicted: np.ndarray, labels: Sequence[Sequence[int]]) -> list[list[str]]:
        return [
            [
                self.names[tag]
                for tag, label in zip(row, row_labels, strict=False)
                if label != IGNORE_INDEX
            ]
            for row, row_labels in zip(predicted.tolist(), labels, strict=False)
        ]

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Writes ``predictions.txt`` and ``predictions.jsonl``, with one line per sentence.

        All sentences of the data and all of their words are included. The model does not predict
        tags for words that have no token or are beyond the end of a truncated sentence. The tag of
        such a word is "O" in ``predictions.txt`` and ``null`` in ``predictions.jsonl``.
        """
        records, (labels, _) = self.splits[split], self._labels[split]
        column, _ = word_columns(records, self.arguments, tagged=False)
        tags_by_row: dict[int, list[str | None]] = {}
        predicted = self._tags(rows["predicted"], labels)
        for row, sentence_tags in enumerate(predicted):
            tags: list[str | None] = [None] * len(records[row][column])
            # With --label_all_tokens, a word has one tag per token. The tag of its first token is
            # used.
            word_ids = self._token_words[split][row]
            for word, tag in zip(word_ids, sentence_tags, strict=True):
                if tags[word] is None:
                    tags[word] = tag
            tags_by_row[int(records.rows[row])] = tags
        loaded = self._loaded[split]
        lines, texts = [], []
        for row, index in enumerate(loaded.rows.tolist()):
            words = loaded[row].get(column)
            words = words if isinstance(words, list) else []
            tags = tags_by_row.get(index, [None] * len(words))
            texts.append(" ".join(tag or "O" for tag in tags) + "\n")
            line = {"tokens": words, "tags": tags}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_atomically(folder / "predictions.txt", "".join(texts))
        write_atomically(folder / "predictions.jsonl", "".join(lines))


def tag_names(tags: Sequence[str | int], classes: Sequence[str]) -> list[str]:
    """Returns the names of tags. Numeric tags are indices into ``classes``.

    A number that is not a valid index is converted to a string.
    """
    return [
        classes[tag] if type(tag) is int and 0 <= tag < len(classes) else str(tag) for tag in tags
    ]


def word_columns(
    records: Records, arguments: TokenClassificationArguments, tagged: bool
) -> tuple[str, str | None]:
    """Returns the names of the word column and the tag column.

    Args:
        records: The examples.
        arguments: The data flags.
        tagged: Whether tags are required. If tags are not required and the table does not have a
            tag column, its name is ``None``.
    """
    names = list(records.tables[0].columns)
    words = records.column(
        "text_column_name", arguments.text_column_name, (*WORD_COLUMNS, *names[:1])
    )
    other_names = [name for name in names if name != words]
    label_column = arguments.label_column_name
    candidates = (f"{arguments.task_name}_tags", "tags", "labels", *other_names[:1])
    if (
        not tagged
        and (label_column or candidates[0]) not in names
        and not {"tags", "labels"} & set(names)
    ):
        return words, None
    return words, records.column("label_column_name", label_column, candidates)


def enable_prefix_space(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a byte-level tokenizer encode each word as if it followed a space.

    Raises:
        UsageError: The tokenizer does not map tokens to words.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(
            f"{type(tokenizer).__name__} does not map tokens to words. Use a fast tokenizer "
            "(tokenizer.json)."
        )
    state = json.loads(backend.to_str())
    steps = [state.get("pre_tokenizer") or {}]
    for step in steps:
        steps += step.get("pretokenizers", ())
    byte_level_steps = [step for step in steps if step.get("type") == "ByteLevel"]
    if byte_level_steps and not any(step.get("add_prefix_space") for step in byte_level_steps):
        from tokenizers import Tokenizer

        byte_level_steps[0]["add_prefix_space"] = True
        # Transformers has no public method that replaces the backend of a tokenizer.
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    if byte_level_steps:
        tokenizer.add_prefix_space = True  # saved in tokenizer_config.json
