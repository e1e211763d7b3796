"""Extractive question answering: answers are spans of a context (Rajpurkar et al., 2016; 2018)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import QuestionAnsweringArguments
from hfseq.data.batches import FieldRows, RowRandom
from hfseq.data.question_answering import (
    SQUAD_COLUMNS,
    ContextWindows,
    answer_problem,
    best_spans,
    find_span,
    flatten_squad,
    make_windows,
)
from hfseq.data.records import Records, drop_invalid, load_records
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import write_atomically
from hfseq.nn.context import RowGuarantees
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.metrics import answer_scores

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class QuestionAnswering(Objective):
    """Predicts the first and the last token of the answer in a context.

    The loss is the mean of two cross-entropies over the positions of a row: one for the first and
    one for the last token of the answer. The positions include padding, as in Transformers (see
    docs/decisions.md).

    A context that does not fit into a row is divided into several rows. In rows that do not contain
    the answer, the label is the first token of the row. The loss is an average over rows, and
    SQuAD's exact match and F1 are averages over questions.
    """

    name = "question_answering"
    data_arguments = QuestionAnsweringArguments
    auto_class = "ForQuestionAnswering"
    supports_streaming = False
    has_vocabulary = False
    supports_predict = True
    evaluates_test = True
    row_guarantees = RowGuarantees()
    default_length = 384

    arguments: QuestionAnsweringArguments

    def setup(self) -> None:
        """Loads the examples and skips invalid ones."""
        data = self.arguments
        self.windows: dict[str, ContextWindows] = {}
        self.splits: dict[str, Records] = {}
        for split, records in load_records(data, transform=flatten_squad).items():
            for name in SQUAD_COLUMNS[1:3]:
                records.column(f"{name}_column", None, (name,))
            self.splits[split] = records
            answered = self.has_targets(split)
            examples = [
                {"answers": None if answered else ..., **records[row]}
                for row in range(len(records))
            ]
            problems = {
                row: problem
                for row, example in enumerate(examples)
                if (problem := answer_problem(example, data.version_2_with_negative)) is not None
            }
            self.splits[split] = drop_invalid(records, split, problems, data)
        self.uses_token_types = False

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks whether the model uses token type IDs."""
        num_token_types = getattr(self.config, "type_vocab_size", 0) or 0
        tokenizer_returns_types = "token_type_ids" in self.tokenizer.model_input_names
        self.uses_token_types = (
            tokenizer_returns_types and num_token_types > 1 and model.accepts("token_type_ids")
        )

    def choose_length(self, limit: int | None) -> int:
        """Returns the row length. This is the value of the flag, or at most 384 without the flag.

        The default of 384 is the same as in the Transformers 4 script.
        """
        return min(super().choose_length(limit), self.arguments.row_length or self.default_length)

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Divides the contexts of a split into windows, with one row per window."""
        records, data = splits[split], self.arguments
        examples = [records[row] for row in range(len(records))]
        windows = self.windows[split] = make_windows(
            self.tokenizer,
            [example_dict["question"] for example_dict in examples],
            [example_dict["context"] for example_dict in examples],
            length,
            data.doc_stride or min(128, length // 3),
        )
        spans = np.zeros((len(windows.ids), 2), np.int32)  # the first token stands for "no answer"
        for row, example in enumerate(windows.example_indices.tolist()):
            answers = examples[example].get("answers") or {"text": []}
            if answers["text"]:
                start = answers["answer_start"][0]
                characters = start, start + len(answers["text"][0])
                spans[row] = find_span(windows.offsets[row], *characters) or 0
        fields = (
            {"token_type_ids": (windows.token_type_ids, 0)}
            if self.uses_token_types and windows.token_type_ids
            else {}
        )
        self.length = length
        rows = FieldRows(
            windows.ids,
            pad_token_id(self.tokenizer),
            length,
            fields,
            {"start": spans[:, 0], "end": spans[:, 1]},
            data.pad_to_max_length,
        )
        logger.info("%s: %d questions in %d rows", split, len(records), len(rows))
        return rows, {"documents": len(records), "tokens": rows.total_tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Marks the valid rows. All other rows only pad the batch."""
        names = (
            "input_ids",
            "start",
            "end",
            *(["token_type_ids"] if self.uses_token_types else []),
        )
        valid = rows["valid"] if "valid" in rows else np.ones(len(rows["start"]), bool)
        batch = {name: rows[name] for name in names if name in rows}
        return batch | {"attention_mask": rows["segment_ids"], "valid": valid}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss summed over rows. In evaluation, the totals include the logits."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
        output, new_extra = forward(model, params, rngs, train, extra, **inputs)
        valid, total, totals = batch["valid"], jnp.zeros(()), {}
        for name in ("start", "end"):
            logits = output[f"{name}_logits"].astype(jnp.float32)
            label_logits = jnp.take_along_axis(logits, batch[name][:, None], axis=1)[:, 0]
            losses = jax.nn.logsumexp(logits, axis=1) - label_logits
            total += jnp.where(valid, losses, 0.0).sum() / 2
            if not train:
                padding = ((0, 0), (0, self.length - logits.shape[1]))
                totals[f"{name}_logits"] = jnp.pad(logits, padding, constant_values=-jnp.inf)
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss. See :meth:`row_metrics` for all other metrics."""
        return {"loss": super().metrics(totals)["loss"]}

    def has_targets(self, split: str) -> bool:
        """Returns whether the questions of a split have answers."""
        return split != "test" or "answers" in self.splits[split].tables[0].columns

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Returns exact match and F1, from 0 to 100.

        With ``--version_2_with_negative``, both scores are also returned for answerable and
        unanswerable questions separately.
        """
        records = self.splits[split]
        scores: dict[str, list[tuple[float, float]]] = {"": [], "HasAns_": [], "NoAns_": []}
        for row, answer in self._answers(rows, split).items():
            references = records[row].get("answers")
            if references is None:
                continue
            score = answer_scores(answer["best"], references["text"])
            scores[""].append(score)
            scores["HasAns_" if references["text"] else "NoAns_"].append(score)
        prefixes = scores if self.arguments.version_2_with_negative else [""]
        return {
            f"{prefix}{name}": 100 * float(np.mean([score[column] for score in scores[prefix]]))
            for prefix in prefixes
            if scores[prefix]
            for column, name in enumerate(("exact_match", "f1"))
        }

    def _answers(self, rows: Arrays, split: str) -> dict[int, dict[str, Any]]:
        """Returns the best answers to each question of which all windows have been evaluated."""
        data, windows, records = self.arguments, self.windows[split], self.splits[split]
        num_read, answers = len(rows["start_logits"]), {}
        for number, question_windows in enumerate(windows.by_example(len(records))):
            if question_windows[-1] >= num_read:
                break
            spans, null_score = best_spans(
                rows["start_logits"][question_windows],
                rows["end_logits"][question_windows],
                [windows.offsets[window] for window in question_windows],
                data.n_best_size,
                data.max_answer_length,
            )
            context = records[number]["context"]
            texts = [
                {
                    "text": context[span.start : span.end],
                    "score": span.score,
                    "start_logit": span.start_logit,
                    "end_logit": span.end_logit,
                }
                for span in spans
            ]
            null_odds = null_score - (spans[0].score if spans else -np.inf)
            best = texts[0]["text"] if texts else ""
            if data.version_2_with_negative:
                texts = sorted(
                    [*texts, {"text": "", "score": null_score}], key=lambda t: -t["score"]
                )
                best = "" if null_odds > data.null_score_diff_threshold else best
            weights = np.exp([text["score"] - texts[0]["score"] for text in texts])
            for text, weight in zip(texts, weights / weights.sum(), strict=True):
                text["probability"] = float(weight)
                del text["score"]
            answers[number] = {"best": best, "texts": texts, "odds": null_odds}
        return answers

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        prefixes = ("", "HasAns_", "NoAns_") if self.arguments.version_2_with_negative else ("",)
        return {
            "loss",
            *(f"{prefix}{name}" for prefix in prefixes for name in ("exact_match", "f1")),
        }

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Writes the predictions to JSON files whose keys are the IDs of the questions.

        ``predictions.json`` contains the best answer and ``nbest_predictions.json`` the best
        answers with their probabilities. With ``--version_2_with_negative``, ``null_odds.json``
        contains the score difference between no answer and the best answer.
        """
        records, answers = self.splits[split], self._answers(rows, split)
        ids = {row: str(records[row].get("id", row)) for row in answers}
        files = {"predictions": "best", "nbest_predictions": "texts"}
        if self.arguments.version_2_with_negative:
            files["null_odds"] = "odds"
        for name, key in files.items():
            content = {ids[row]: answer[key] for row, answer in answers.items()}
            text = json.dumps(content, indent=4, ensure_ascii=False)
            write_atomically(folder / f"{name}.json", text + "\n")
