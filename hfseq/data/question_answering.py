"""Answers that stand in a context: windows of it beside the question, and from scores to spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data.tables import Table
from hfseq.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The columns of SQuAD.
SQUAD_COLUMNS = ("id", "question", "context", "answers")


@dataclass(frozen=True)
class ContextWindows:
    """Questions with parts of their contexts, a row each; windows of one context overlap.

    ids, types: of the tokens. offsets: (tokens, 2) characters of the context, -1 elsewhere.
    words: (tokens,) the number of the word that a token of the context is of, -1 elsewhere.
    example: the question of each window.
    """

    ids: list[list[int]]
    token_type_ids: list[list[int]] | None
    offsets: list[np.ndarray]
    word_ids_of_tokens: list[np.ndarray]
    example_indices: np.ndarray

    def by_example(self, count: int) -> list[np.ndarray]:
        """Return the windows of each of ``count`` questions."""
        starts = np.searchsorted(self.example_indices, np.arange(count + 1))
        return [np.arange(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def make_windows(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    contexts: Sequence[str],
    max_length: int,
    stride: int,
) -> ContextWindows:
    """Put questions and contexts together, cut into windows that share ``stride`` tokens.

    **Raises:** UsageError for a tokenizer that does not say where a token stands, and where a
    question leaves no room for context.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} does not say where tokens stand in the text: give a fast "
            "tokenizer (a tokenizer.json)"
        )
    first = tokenizer.padding_side == "right"  # the question, unless padding comes before
    left = [question.lstrip() for question in questions]  # spaces would take a window's place
    try:
        encoded = tokenizer(
            *((left, list(contexts)) if first else (list(contexts), left)),
            truncation="only_second" if first else "only_first",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
    except BaseException as error:  # the Rust library panics where nothing of the context fits
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UsageError(
            f"rows of {max_length} tokens, of which windows share {stride}, leave no room beside "
            f"the longest question: give more tokens a row, or a smaller stride ({error})"
        ) from error
    offsets, words = [], []
    for row, spans in enumerate(encoded["offset_mapping"]):
        inside = np.array([side == int(first) for side in encoded.sequence_ids(row)])
        offsets.append(np.where(inside[:, None], np.array(spans, np.int32), -1))
        own = np.array([-1 if word is None else word for word in encoded.word_ids(row)])
        words.append(np.where(inside, own, -1))
    return ContextWindows(
        encoded["input_ids"],
        encoded.get("token_type_ids"),
        offsets,
        words,
        np.array(encoded["overflow_to_sample_mapping"]),
    )


def find_span(offsets: np.ndarray, start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token of the characters [start, end), if a window has them all."""
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside) or offsets[inside[0], 0] > start or offsets[inside[-1], 1] < end:
        return None
    first = inside[np.searchsorted(offsets[inside, 0], start, side="right") - 1]
    last = inside[np.searchsorted(offsets[inside, 1], end, side="left")]
    return int(first), int(last)


@dataclass(frozen=True)
class AnswerSpan:
    """A span of a context: its characters, its score, and the logits that it is the sum of."""

    start: int
    end: int
    score: float
    start_logit: float
    end_logit: float


def best_spans(
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    offsets: Sequence[np.ndarray],
    n_best: int,
    max_answer_length: int,
) -> tuple[list[AnswerSpan], float]:
    """Return the ``count`` best spans of all windows of a context, and the score of no answer.

    ``starts`` and ``ends`` are logits of the tokens of each window. Of each window ``count`` starts
    and ends are tried; a span is in the context, in order and of ``longest`` tokens at most. That
    there is no answer is what the first token says, in the window where it says so least.
    """
    found, nothing = [], np.inf
    for start, end, spans in zip(start_logits, end_logits, offsets, strict=True):
        start, end = start[: len(spans)], end[: len(spans)]
        nothing = min(nothing, float(start[0] + end[0]))
        first, last = (np.argsort(-part, kind="stable")[:n_best] for part in (start, end))
        first, last = first[spans[first, 0] >= 0], last[spans[last, 0] >= 0]
        length = last[None, :] - first[:, None] + 1
        rows, columns = np.nonzero((length > 0) & (length <= max_answer_length))
        for a, b in zip(first[rows].tolist(), last[columns].tolist(), strict=True):
            logits = float(start[a]), float(end[b])
            place = int(spans[a, 0]), int(spans[b, 1])
            found.append(AnswerSpan(*place, sum(logits), *logits))
    found.sort(key=lambda one: -one.score)
    return found[:n_best], float(nothing)


def answer_problem(example: dict[str, Any], allow_unanswerable: bool) -> str | None:
    """Say why an example with "question", "context" and "answers" is of no use, if it is."""
    for name in SQUAD_COLUMNS[1:3]:
        text = example.get(name)
        if not isinstance(text, str) or not text.strip():
            return f"there is no {name}"
    context, answers = str(example["context"]), example.get("answers")
    if answers is ...:
        return None
    if not isinstance(answers, dict) or not isinstance(answers.get("text"), list):
        return 'answers are {"text": [...], "answer_start": [...]}, and not ' + f"{answers!r:.60}"
    texts, starts = answers["text"], answers.get("answer_start")
    if not isinstance(starts, list) or len(starts) != len(texts):
        return f"{len(texts)} answers and not as many places"
    if not texts and not allow_unanswerable:
        return "it has no answer (--version_2_with_negative learns from that, too)"
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or type(start) is not int or start < 0 or not text:
            return f"the answer {text!r:.60} at {start!r}"
        if context[start : start + len(text)] != text:
            found = context[start : start + len(text)]
            return f"the answer {text!r:.60} does not stand at {start}, where {found!r:.60} is"
    return None


def flatten_squad(table: Table) -> Table:
    """Return the questions of SQuAD's own files, of articles with paragraphs, as a table.

    Other tables are returned as they are, and so are version 4's: ``{"data": [questions]}``.
    """
    if "data" not in table.columns or "question" in table.columns:
        return table
    rows: list[dict[str, Any]] = []
    for article in (one for part in table.columns["data"] for one in part or ()):
        for paragraph in article.get("paragraphs", ()):
            for question in paragraph["qas"]:
                answers = question.get("answers", [])
                rows.append(
                    {
                        "id": question.get("id"),
                        "question": question["question"],
                        "context": paragraph["context"],
                        "answers": {
                            "text": [one["text"] for one in answers],
                            "answer_start": [one["answer_start"] for one in answers],
                        },
                    }
                )
        if "paragraphs" not in article:
            rows.append(article)
    columns = {name: [row.get(name) for row in rows] for name in SQUAD_COLUMNS}
    return Table(columns, table.origin)
