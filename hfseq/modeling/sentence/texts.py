"""Tokenization of texts and pairs of texts, and batches of their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass
class TokenizedTexts:
    """The tokens of texts, without padding.

    Attributes:
        ids: The token IDs of each text.
        types: The token types of each text, or `None` if all of them are 0.
        attended: For each text, the number of leading tokens that all tokens attend to. `None`
            means all tokens. No token attends to the other tokens of a text.
        scored: For each text, whether each token is pooled or scored. `None` means all tokens.
    """

    ids: list[list[int]]
    types: list[list[int]] | None = None
    attended: list[int] | None = None
    scored: list[Sequence[bool]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def batch(
        self, numbers: Sequence[int], rows: int, width: int, pad: int
    ) -> dict[str, np.ndarray]:
        """Returns the inputs of a batch, int32 arrays `(rows, width)` with padding on the right.

        Args:
            numbers: The numbers of the texts.
            rows: Number of rows. The last text is repeated if there are more rows than texts.
            width: Number of columns.
            pad: ID of the padding token.

        Returns:
            "input_ids" and "attention_mask", "token_type_ids" if there are types, and
            "scoring_mask" if not all attended tokens are scored.
        """
        names = ["input_ids", "attention_mask"]
        names += ["token_type_ids"] * (self.types is not None)
        names += ["scoring_mask"] * (self.scored is not None)
        inputs = {name: np.zeros((rows, width), np.int32) for name in names}
        inputs["input_ids"][:] = pad
        for row, number in enumerate([*numbers, *[numbers[-1]] * (rows - len(numbers))]):
            ids = self.ids[number]
            attended = len(ids) if self.attended is None else self.attended[number]
            inputs["input_ids"][row, : len(ids)] = ids
            inputs["attention_mask"][row, :attended] = 1
            if self.types is not None:
                types = self.types[number]
                inputs["token_type_ids"][row, : len(types)] = types
            if self.scored is not None:
                inputs["scoring_mask"][row, : len(ids)] = self.scored[number]
        return inputs


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Any],
    limit: int,
    prompt: str = "",
    lower_case: bool = False,
    name: str = "sentence",
) -> TokenizedTexts:
    """Tokenizes texts or pairs of texts. Texts that are too long are truncated with a warning.

    Args:
        tokenizer: The tokenizer.
        texts: Texts, or pairs of texts, but not both.
        limit: Maximum number of tokens. The longer text of a pair is truncated first.
        prompt: Precedes each text, or the first text of each pair.
        lower_case: Whether to convert all texts, and the prompt, to lower case.
        name: Noun for the elements of ``texts`` in messages.

    Raises:
        UsageError: The elements are neither all texts nor all pairs, or one has no tokens.
    """
    columns = _columns(texts, prompt, lower_case, name)
    if not columns[0]:
        return TokenizedTexts([])
    # The tokenizer does not truncate here, so that the number of long texts can be logged.
    encoded = tokenizer(*columns, verbose=False)
    rows, types = encoded["input_ids"], encoded.get("token_type_ids")
    long = [number for number, row in enumerate(rows) if len(row) > limit]
    if long:
        logger.warning(
            "%d of %d %ss are longer than %d tokens and were truncated. The first is: %s",
            *(len(long), len(rows), name, limit, f"{columns[0][long[0]]:.60}"),
        )
        truncated = tokenizer(
            *([column[number] for number in long] for column in columns),
            truncation=True,
            max_length=limit,
        )
        for index, number in enumerate(long):
            rows[number] = truncated["input_ids"][index]
            if types is not None:
                types[number] = truncated["token_type_ids"][index]
    if empty := [number for number, row in enumerate(rows) if not row]:
        raise UsageError(f"{name} {empty[0] + 1} has no tokens: remove it")
    return TokenizedTexts(rows, types if types is not None and any(map(any, types)) else None)


def _columns(texts: Sequence[Any], prompt: str, lower_case: bool, name: str) -> list[list[str]]:
    """Returns the arguments of the tokenizer.

    Returns:
        If the elements are texts, one list with all texts. If they are pairs, a list of all first
        texts and a list of all second texts.

    Raises:
        UsageError: The first element is a text and another one is not, or the first one is a pair
            of texts and another one is not.
    """
    size = 1 if not len(texts) or isinstance(texts[0], str) else 2
    rows = [tuple(text) if isinstance(text, list | tuple) else (text,) for text in texts]
    for number, row in enumerate(rows, 1):
        if len(row) != size or not all(isinstance(text, str) for text in row):
            expected = "a text" if size == 1 else "a pair of texts, like the first one"
            raise UsageError(f"{name} {number} must be {expected}, not {texts[number - 1]!r:.60}")
    columns = [[row[side] for row in rows] for side in range(size)]
    if prompt:
        columns[0] = [prompt + text for text in columns[0]]
    if lower_case:
        columns = [[text.lower() for text in column] for column in columns]
    return columns


def check_texts(texts: Sequence[Any], name: str = "sentence") -> None:
    """Raises `UsageError` if an element is not a text."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UsageError(f"{name} {number} must be a text, not {text!r:.60}")


def prompt_length(tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
    """Returns the number of leading tokens that belong to a prompt.

    These are the tokens of the prompt alone, without a special token at its end.
    """
    ids = tokenizer(prompt)["input_ids"]
    return len(ids) - bool(ids and ids[-1] in tokenizer.all_special_ids)
