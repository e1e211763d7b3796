"""Extractive question answering: windows of contexts, and answer spans from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data.tables import Table
from hfseq.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Columns of SQuAD.
SQUAD_COLUMNS = ("id", "question", "context", "answers")


@dataclass(frozen=True)
class ContextWindows:
    """Tokenized windows, each with a question and a part of its context.

    Every window becomes one row. Consecutive windows of the same context overlap.

    Attributes:
        ids: Token ids of each window.
        token_type_ids: Token types of each window, or `None`.
        offsets: For each window, the character span of each token in the context, `(tokens, 2)`.
            -1 for tokens that are not part of the context.
        word_ids_of_tokens: For each window, the word index of each token, `(tokens,)`. -1 for
            tokens that are not part of the context.
        example_indices: Index of the question of each window, in ascending order.
    """

    ids: list[list[int]]
    token_type_ids: list[list[int]] | None
    offsets: list[np.ndarray]
    word_ids_of_tokens: list[np.ndarray]
    example_indices: np.ndarray

    def by_example(self, count: int) -> list[np.ndarray]:
        """Returns the window indices of each question. `count` is the number of questions."""
        starts = np.searchsorted(self.example_indices, np.arange(count + 1))
        return [np.arange(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def make_windows(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    contexts: Sequence[str],
    max_length: int,
    stride: int,
) -> ContextWindows:
    """Combines questions with their contexts and divides long contexts into overlapping windows.

    Args:
        tokenizer: A fast tokenizer.
        questions: The questions.
        contexts: The context of each question.
        max_length: Maximum length of a window in tokens, including question and special tokens.
        stride: Number of context tokens that consecutive windows share.

    Returns:
        The windows of all questions.

    Raises:
        UsageError: The tokenizer has no character offsets, or a question leaves no space for the
            context.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} provides no character offsets: use a fast tokenizer "
            "(with a tokenizer.json)"
        )
    question_first = tokenizer.padding_side == "right"  # with left padding, the context is first
    # Leading spaces of a question would leave less space for the context
    stripped_questions = [question.lstrip() for question in questions]
    try:
        encoded = tokenizer(
            *(
                (stripped_questions, list(contexts))
                if question_first
                else (list(contexts), stripped_questions)
            ),
            truncation="only_second" if question_first else "only_first",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
    except BaseException as error:  # the Rust library panics if no context fits
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UsageError(
            f"rows of {max_length} tokens with a stride of {stride} leave no space for context "
            "after the longest question: increase the row length or reduce the stride "
            f"({error})"
        ) from error
    offsets, words = [], []
    for row, spans in enumerate(encoded["offset_mapping"]):
        in_context = np.array([side == int(question_first) for side in encoded.sequence_ids(row)])
        offsets.append(np.where(in_context[:, None], np.array(spans, np.int32), -1))
        window_word_ids = np.array([-1 if word is None else word for word in encoded.word_ids(row)])
        words.append(np.where(in_context, window_word_ids, -1))
    return ContextWindows(
        encoded["input_ids"],
        encoded.get("token_type_ids"),
        offsets,
        words,
        np.array(encoded["overflow_to_sample_mapping"]),
    )


def find_span(offsets: np.ndarray, start: int, end: int) -> tuple[int, int] | None:
    """Returns the first and last token of a span of characters.

    Args:
        offsets: Character span of each token, `(tokens, 2)`. -1 for tokens that are not part of
            the context.
        start: First character of the span.
        end: End of the span (exclusive).

    Returns:
        The indices of the first and the last token, or `None` if the window does not contain the
        complete span.
    """
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside) or offsets[inside[0], 0] > start or offsets[inside[-1], 1] < end:
        return None
    first = inside[np.searchsorted(offsets[inside, 0], start, side="right") - 1]
    last = inside[np.searchsorted(offsets[inside, 1], end, side="left")]
    return int(first), int(last)


@dataclass(frozen=True)
class AnswerSpan:
    """A span of a context.

    Attributes:
        start: First character.
        end: End (exclusive).
        score: Sum of `start_logit` and `end_logit`.
        start_logit: Logit of the first token.
        end_logit: Logit of the last token.
    """

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
    """Finds the best answer spans of a context over all of its windows.

    A span lies within the context, ends at or after its start, and has at most `max_answer_length`
    tokens.

    Args:
        start_logits: Start logits of the tokens of each window.
        end_logits: End logits of the tokens of each window.
        offsets: Character spans of the tokens of each window, see `ContextWindows`.
        n_best: Number of spans to return. Also the number of most probable start tokens, and of
            end tokens, that are combined in each window.
        max_answer_length: Maximum span length in tokens.

    Returns:
        The spans, best first, and the score of predicting no answer. In each window, this score is
        the sum of the start logit and the end logit of the first token. The lowest score of all
        windows is returned.
    """
    spans_found, null_score = [], np.inf
    for start, end, spans in zip(start_logits, end_logits, offsets, strict=True):
        start, end = start[: len(spans)], end[: len(spans)]
        null_score = min(null_score, float(start[0] + end[0]))
        first, last = (np.argsort(-part, kind="stable")[:n_best] for part in (start, end))
        first, last = first[spans[first, 0] >= 0], last[spans[last, 0] >= 0]
        length = last[None, :] - first[:, None] + 1
        rows, columns = np.nonzero((length > 0) & (length <= max_answer_length))
        for a, b in zip(first[rows].tolist(), last[columns].tolist(), strict=True):
            logits = float(start[a]), float(end[b])
            characters = int(spans[a, 0]), int(spans[b, 1])
            spans_found.append(AnswerSpan(*characters, sum(logits), *logits))
    spans_found.sort(key=lambda span: -span.score)
    return spans_found[:n_best], float(null_score)


def answer_problem(example: dict[str, Any], allow_unanswerable: bool) -> str | None:
    """Returns a description of the problem with an example, or `None` if the example is valid.

    Args:
        example: An example with "question", "context" and "answers". If "answers" is the `Ellipsis`
            object (`...`), the answers are not checked.
        allow_unanswerable: Whether examples without an answer are valid.
    """
    for name in SQUAD_COLUMNS[1:3]:
        text = example.get(name)
        if not isinstance(text, str) or not text.strip():
            return f"it has no {name}"
    context, answers = str(example["context"]), example.get("answers")
    if answers is ...:
        return None
    if not isinstance(answers, dict) or not isinstance(answers.get("text"), list):
        return 'answers must be {"text": [...], "answer_start": [...]}, not ' + f"{answers!r:.60}"
    texts, starts = answers["text"], answers.get("answer_start")
    if not isinstance(starts, list) or len(starts) != len(texts):
        return f"it has {len(texts)} answers but a different number of 'answer_start' values"
    if not texts and not allow_unanswerable:
        return "it has no answer (allowed with --version_2_with_negative)"
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or type(start) is not int or start < 0 or not text:
            return (
                f"the answer {text!r:.60} must be a non-empty text, and its answer_start "
                f"{start!r} must be a character position"
            )
        if context[start : start + len(text)] != text:
            actual_text = context[start : start + len(text)]
            return (
                f"the answer {text!r:.60} is not at character {start}, where the context has "
                f"{actual_text!r:.60}"
            )
    return None


def flatten_squad(table: Table) -> Table:
    """Returns a table with one question per row.

    SQuAD's original files contain articles with paragraphs, and paragraphs with questions. These
    are flattened. Files in the layout of the Transformers 4 script, `{"data": [questions]}`, are
    also converted. Other tables are returned unchanged.
    """
    if "data" not in table.columns or "question" in table.columns:
        return table
    rows: list[dict[str, Any]] = []
    for article in (entry for part in table.columns["data"] for entry in part or ()):
        for paragraph in article.get("paragraphs", ()):
            for question in paragraph["qas"]:
                answers = question.get("answers", [])
                rows.append(
                    {
                        "id": question.get("id"),
                        "question": question["question"],
                        "context": paragraph["context"],
                        "answers": {
                            "text": [entry["text"] for entry in answers],
                            "answer_start": [entry["answer_start"] for entry in answers],
                        },
                    }
                )
        if "paragraphs" not in article:
            rows.append(article)
    columns = {name: [row.get(name) for row in rows] for name in SQUAD_COLUMNS}
    return Table(columns, table.origin)
