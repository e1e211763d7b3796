"""Answers to questions as spans of a context (Rajpurkar et al., 2016; 2018)."""

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
from hfseq.nn.context import RowGuarantees as KnownRows
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.metrics import answer_scores

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class QuestionAnswering(Objective):
    """Mean of the cross-entropies of an answer's first and last token, over the places of its row.

    Padding is among those places, as in Transformers (docs/decisions.md says why). A context that
    is longer than a row is several rows, with the first token as the answer where none is in them.
    Losses are over rows, scores over questions: SQuAD's exact match and F1.
    """

    name = "question_answering"
    data_arguments = QuestionAnsweringArguments
    auto_class = "ForQuestionAnswering"
    supports_streaming = False
    has_vocabulary = False
    supports_predict = True
    evaluates_test = True
    row_layout = KnownRows()
    default_length = 384

    arguments: QuestionAnsweringArguments

    def setup(self) -> None:
        """Check the examples."""
        data = self.arguments
        self.windows: dict[str, ContextWindows] = {}
        self.splits: dict[str, Records] = {}
        for split, records in load_records(data, transform=flatten_squad).items():
            for name in SQUAD_COLUMNS[1:3]:
                records.column(f"{name}_column", None, (name,))
            answered = split != "test" or "answers" in records.tables[0].columns
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
        self.types = False

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Learn whether the model tells question and context apart."""
        kinds = getattr(self.config, "type_vocab_size", 0) or 0
        given = "token_type_ids" in self.tokenizer.model_input_names
        self.types = given and kinds > 1 and model.accepts("token_type_ids")

    def choose_length(self, limit: int | None) -> int:
        """Return the tokens of a row: 384, as version 4's script, where no flag says how many."""
        return min(super().choose_length(limit), self.arguments.row_length or self.default_length)

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Cut the contexts of a split into windows, a row each."""
        records, data = splits[split], self.arguments
        examples = [records[row] for row in range(len(records))]
        windows = self.windows[split] = make_windows(
            self.tokenizer,
            [one["question"] for one in examples],
            [one["context"] for one in examples],
            length,
            data.doc_stride or min(128, length // 3),
        )
        spans = np.zeros((len(windows.ids), 2), np.int32)  # the first token: no answer here
        for row, example in enumerate(windows.example_indices.tolist()):
            answers = examples[example].get("answers") or {"text": []}
            if answers["text"]:
                start = answers["answer_start"][0]
                place = start, start + len(answers["text"][0])
                spans[row] = find_span(windows.offsets[row], *place) or 0
        fields = (
            {"token_type_ids": (windows.token_type_ids, 0)}
            if self.types and windows.token_type_ids
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
        logger.info("%s: %d questions make %d rows", split, len(records), len(rows))
        return rows, {"documents": len(records), "tokens": rows.total_tokens}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Say which rows count; the others only fill a batch up."""
        names = ("input_ids", "start", "end", *(["token_type_ids"] if self.types else []))
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
        """Sum the losses of rows; in evaluation the logits of each come along."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs: dict[str, Any] = {name: batch[name] for name in names if name in batch}
        output, changed = forward(model, params, rngs, train, extra, **inputs)
        valid, total, totals = batch["valid"], jnp.zeros(()), {}
        for name in ("start", "end"):
            logits = output[f"{name}_logits"].astype(jnp.float32)
            right = jnp.take_along_axis(logits, batch[name][:, None], axis=1)[:, 0]
            losses = jax.nn.logsumexp(logits, axis=1) - right
            total += jnp.where(valid, losses, 0.0).sum() / 2
            if not train:
                rest = ((0, 0), (0, self.length - logits.shape[1]))
                totals[f"{name}_logits"] = jnp.pad(logits, rest, constant_values=-jnp.inf)
        return total, valid.sum(), {"extra": changed, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the loss; the other scores are of questions."""
        return {"loss": super().metrics(totals)["loss"]}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Return exact match and F1, 0 to 100; with negatives those of either kind, too."""
        records = self.splits[split]
        scores: dict[str, list[tuple[float, float]]] = {"": [], "HasAns_": [], "NoAns_": []}
        for row, answer in self._answers(rows, split).items():
            wanted = records[row].get("answers")
            if wanted is None:
                continue
            score = answer_scores(answer["best"], wanted["text"])
            scores[""].append(score)
            scores["HasAns_" if wanted["text"] else "NoAns_"].append(score)
        kinds = scores if self.arguments.version_2_with_negative else [""]
        return {
            f"{kind}{name}": 100 * float(np.mean([score[place] for score in scores[kind]]))
            for kind in kinds
            if scores[kind]
            for place, name in enumerate(("exact_match", "f1"))
        }

    def _answers(self, rows: Arrays, split: str) -> dict[int, dict[str, Any]]:
        """Return the best answers of each question whose windows were all read."""
        data, windows, records = self.arguments, self.windows[split], self.splits[split]
        read, answers = len(rows["start_logits"]), {}
        for number, own in enumerate(windows.by_example(len(records))):
            if own[-1] >= read:
                break
            found, nothing = best_spans(
                rows["start_logits"][own],
                rows["end_logits"][own],
                [windows.offsets[window] for window in own],
                data.n_best_size,
                data.max_answer_length,
            )
            context = records[number]["context"]
            texts = [
                {
                    "text": context[one.start : one.end],
                    "score": one.score,
                    "start_logit": one.start_logit,
                    "end_logit": one.end_logit,
                }
                for one in found
            ]
            odds = nothing - (found[0].score if found else -np.inf)
            best = texts[0]["text"] if texts else ""
            if data.version_2_with_negative:
                texts = sorted([*texts, {"text": "", "score": nothing}], key=lambda t: -t["score"])
                best = "" if odds > data.null_score_diff_threshold else best
            weights = np.exp([text["score"] - texts[0]["score"] for text in texts])
            for text, weight in zip(texts, weights / weights.sum(), strict=True):
                text["probability"] = float(weight)
                del text["score"]
            answers[number] = {"best": best, "texts": texts, "odds": odds}
        return answers

    def reported_metrics(self, split: str) -> set[str] | None:
        """Return the names of all metrics of a split."""
        kinds = ("", "HasAns_", "NoAns_") if self.arguments.version_2_with_negative else ("",)
        return {"loss", *(f"{kind}{name}" for kind in kinds for name in ("exact_match", "f1"))}

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Write ``predictions.json``, ``nbest_predictions.json`` and ``null_odds.json``, by id."""
        records, answers = self.splits[split], self._answers(rows, split)
        ids = {row: str(records[row].get("id", row)) for row in answers}
        files = {"predictions": "best", "nbest_predictions": "texts"}
        if self.arguments.version_2_with_negative:
            files["null_odds"] = "odds"
        for name, part in files.items():
            made = {ids[row]: answer[part] for row, answer in answers.items()}
            text = json.dumps(made, indent=4, ensure_ascii=False)
            write_atomically(folder / f"{name}.json", text + "\n")
